// SPDX-License-Identifier: Apache-2.0
#include "tests/cli/scratch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "cli/safetensors.h"

namespace logitless::cli::test {

Scratch::Scratch() {
  std::string name = (std::filesystem::temp_directory_path() / "logitless_cli_XXXXXX").string();
  folder_ = ::mkdtemp(name.data());
}

Scratch::~Scratch() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::vector<std::string> Scratch::files() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string safetensors_bytes(const std::string& header, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
  return bytes + header + std::string(data_bytes, '\0');
}

Case synthetic(const SyntheticOptions& options) {
  Result<Case> c = make_synthetic(options);
  EXPECT_TRUE(c.has_value()) << (c ? "" : c.error().message);
  return std::move(c).value();
}

void write_case(const Case& c, const std::string& path) {
  const Result<void> written = write_safetensors(
      path, {{"input", &c.input}, {"weight", &c.weight}, {"target", &c.target}, {"grad", &c.grad}},
      case_metadata(c.vocab_start_index, c.shape().V));
  EXPECT_TRUE(written.has_value()) << (written ? "" : written.error().message);
}

}  // namespace logitless::cli::test
