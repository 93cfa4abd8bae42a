// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/host_tensor.h"
#include "logitless/cancel.h"
#include "logitless/result.h"

namespace logitless::cli {

// A reader and writer of safetensors files: 8 bytes of header length (little endian), a JSON object
// of tensors, then their bytes. Nothing in a file is believed: every length, offset and shape is
// checked against the size of the file before memory of that size is asked for.

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library

struct TensorInfo {
  std::string name;
  std::string dtype;  // as the file spells it: "BF16"
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // in the data that follows the header; [begin, end)
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// Parses the JSON part. data_bytes: how many bytes follow it in the file. Tensors must cover those
// exactly: no gap, no overlap. `file` only names the file in messages.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, uint64_t data_bytes,
                                                   const std::string& file);

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const TensorInfo* find(std::string_view name) const;

  // The whole tensor, or its first `rows` along the first dimension (rows >= 0, at most the
  // dimension). An error when the dtype is none of ours (DType; BOOL is read as u8).
  Result<HostTensor> read(const TensorInfo& info) const;
  Result<HostTensor> read_rows(const TensorInfo& info, int64_t rows) const;
  // Rows [begin, end) along the first dimension, in [0, dimension].
  Result<HostTensor> read_rows(const TensorInfo& info, int64_t begin, int64_t end) const;

 private:
  std::string path_;
  SafetensorsHeader header_;
  uint64_t data_offset_ = 0;
};

// What the file's dtype means here; absent when the library has no such type.
std::optional<DType> dtype_from_safetensors(std::string_view name);
const char* dtype_to_safetensors(DType dtype);

struct NamedTensor {
  std::string name;
  const HostTensor* tensor = nullptr;
};

// Writes beside `path` and renames at the end: a failure, or `cancel` (looked at between blocks),
// leaves whatever stood at `path` before and no other file. `path` must be absent or a regular
// file.
Result<void> write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                               const std::map<std::string, std::string>& metadata,
                               const CancelToken* cancel = nullptr);

}  // namespace logitless::cli
