// SPDX-License-Identifier: Apache-2.0
// The input is the file: 8 bytes of length, JSON, data. Whatever it holds, the reader gives tensors
// that lie within it, or one sentence.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cli/safetensors.h"

namespace {

// A finding ends the run, in every build type.
void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace logitless::cli;
  // The length is taken from the first two bytes, so that short inputs reach the parser.
  if (size < 2) return 0;
  const size_t length = (size_t{data[0]} | size_t{data[1]} << 8) % (size - 1);
  const std::string_view header(reinterpret_cast<const char*>(data) + 2,
                                length < size - 2 ? length : size - 2);
  const uint64_t data_bytes = size - 2 - header.size();
  const logitless::Result<SafetensorsHeader> parsed =
      parse_safetensors_header(header, data_bytes, "fuzz");
  if (!parsed) {
    require(parsed.error().message.find('\n') == std::string::npos);
    require(parsed.error().message.size() < 2000);
    return 0;
  }
  uint64_t covered = 0;
  for (const TensorInfo& tensor : parsed->tensors) {
    require(tensor.begin == covered && tensor.begin <= tensor.end && tensor.end <= data_bytes);
    covered = tensor.end;
    const auto dtype = dtype_from_safetensors(tensor.dtype);
    if (!dtype) continue;
    // What it takes is what the file holds: no allocation larger than the input.
    const HostTensor held(*dtype, tensor.shape);
    require(static_cast<uint64_t>(held.bytes()) == tensor.end - tensor.begin);
  }
  require(covered == data_bytes);
  return 0;
}
