// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/synthetic.h"

namespace logitless::cli::test {

// A folder that lives as long as the object.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  // Names of the files in it, sorted.
  std::vector<std::string> files() const;

 private:
  std::filesystem::path folder_;
};

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& bytes);

// A safetensors file of this header and this many zero bytes of data.
std::string safetensors_bytes(const std::string& header, size_t data_bytes);

// Fails the test on an error of the library.
Case synthetic(const SyntheticOptions& options);
void write_case(const Case& c, const std::string& path);

}  // namespace logitless::cli::test
