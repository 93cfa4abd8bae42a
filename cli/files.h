// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "logitless/cancel.h"
#include "logitless/result.h"

namespace logitless::cli {

// A regular file opened for reading; its size is taken once.
class InputFile {
 public:
  static Result<InputFile> open(const std::string& path);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;
  ~InputFile();

  uint64_t size() const { return size_; }
  // Reads exactly `bytes` at `offset`; an error where the file turns out to be shorter.
  Result<void> read(uint64_t offset, void* out, uint64_t bytes) const;

 private:
  InputFile(std::string path, int fd, uint64_t size);
  std::string path_;
  int fd_;
  uint64_t size_;
};

// A file written under a temporary name in the same folder, which takes its real name in commit().
// Destroyed without it, the temporary file is removed.
class OutputFile {
 public:
  // An error when `path` exists and is no regular file (a device must not be renamed over).
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  Result<void> write(const void* data, uint64_t bytes, const CancelToken* cancel);
  Result<void> commit();

 private:
  OutputFile(std::string path, std::string temporary, int fd);
  std::string path_;
  std::string temporary_;
  int fd_;
};

// What would keep `path` from being written, before hours of computing: no folder, a device, or one
// of `inputs`, which would be lost.
Result<void> check_output(const std::string& path, const std::vector<std::string>& inputs);

// Removes the temporary file being written, if any. Async-signal-safe: for the handler of a second
// Ctrl-C, which ends the program without unwinding.
void remove_unfinished_file() noexcept;

}  // namespace logitless::cli
