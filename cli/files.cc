// SPDX-License-Identifier: Apache-2.0
#include "cli/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cli/units.h"

namespace logitless::cli {
namespace {

constexpr uint64_t kBlockBytes = 8 << 20;  // a cancel is noticed after at most one block
constexpr const char* kNotWrittenOver =
    "exists and is not a regular file, so it is not written over";

// The temporary file's name for remove_unfinished_file. One file is written at a time.
std::array<char, 4096> unfinished_path;
std::atomic<bool> unfinished{false};

void set_unfinished(const std::string& path) {
  if (path.size() >= unfinished_path.size()) return;
  std::memcpy(unfinished_path.data(), path.c_str(), path.size() + 1);
  unfinished.store(true);
}

Error io_error(const std::string& path, const std::string& what, int code) {
  return Error{.kind = ErrorKind::invalid_argument,
               .message = fmt::format("{}: {}: {}", printable(path), what,
                                      std::generic_category().message(code))};
}

Error rule_error(const std::string& path, const std::string& rule) {
  return Error{.kind = ErrorKind::invalid_argument,
               .message = fmt::format("{}: {}", printable(path), rule)};
}

}  // namespace

InputFile::InputFile(std::string path, int fd, uint64_t size)
    : path_(std::move(path)), fd_(fd), size_(size) {}
InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

Result<InputFile> InputFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe nobody writes to must not wait; a pipe is refused below.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return io_error(path, "cannot be opened", errno);
  InputFile file(path, fd, 0);
  struct stat status {};
  if (::fstat(fd, &status) != 0) return io_error(path, "cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) return rule_error(path, "is not a regular file");
  file.size_ = static_cast<uint64_t>(status.st_size);
  return file;
}

Result<void> InputFile::read(uint64_t offset, void* out, uint64_t bytes) const {
  std::byte* to = static_cast<std::byte*>(out);
  while (bytes > 0) {
    const ssize_t got =
        ::pread(fd_, to, std::min<uint64_t>(bytes, 1U << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(path_, "cannot be read", errno);
    if (got == 0) return rule_error(path_, "became shorter while it was read");
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return {};
}

OutputFile::OutputFile(std::string path, std::string temporary, int fd)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}
OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)) {}
OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
    unfinished.store(false);
  }
}

Result<OutputFile> OutputFile::create(const std::string& path) {
  std::error_code code;
  const std::filesystem::file_status status = std::filesystem::status(path, code);
  const bool exists = std::filesystem::exists(status);
  if (exists && !std::filesystem::is_regular_file(status)) {
    return rule_error(path, kNotWrittenOver);
  }
  // A link is followed, so that what it points to is replaced and not the link.
  const std::string real = exists ? std::filesystem::canonical(path, code).string() : path;
  if (code && exists) return io_error(path, "cannot be examined", code.value());
  std::string temporary = fmt::format("{}.tmp{}", real, ::getpid());
  const int fd =
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd < 0) return io_error(path, "cannot be written", errno);
  set_unfinished(temporary);
  return OutputFile(real, std::move(temporary), fd);
}

Result<void> OutputFile::write(const void* data, uint64_t bytes, const CancelToken* cancel) {
  const std::byte* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    if (cancel != nullptr && cancel->cancelled()) {
      return Error{.kind = ErrorKind::cancelled,
                   .message = fmt::format("{}: cancelled, nothing was written", printable(path_))};
    }
    const ssize_t put = ::write(fd_, from, std::min(bytes, kBlockBytes));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return io_error(path_, "cannot be written", errno);
    from += put;
    bytes -= static_cast<uint64_t>(put);
  }
  return {};
}

Result<void> OutputFile::commit() {
  // Some file systems report a full disk only here.
  const int closed = ::close(std::exchange(fd_, -1));
  if (closed != 0) return io_error(path_, "cannot be written", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return io_error(path_, "cannot be written", errno);
  }
  temporary_.clear();
  unfinished.store(false);
  return {};
}

Result<void> check_output(const std::string& path, const std::vector<std::string>& inputs) {
  struct stat out {};
  std::filesystem::path real = path;
  if (::stat(path.c_str(), &out) == 0) {
    if (!S_ISREG(out.st_mode)) return rule_error(path, kNotWrittenOver);
    for (const std::string& input : inputs) {
      struct stat in {};
      if (::stat(input.c_str(), &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino) {
        return rule_error(path, "is an input, so it is not written over");
      }
    }
    std::error_code code;
    real = std::filesystem::canonical(path, code);
    if (code) return io_error(path, "cannot be examined", code.value());
  }
  const std::string folder = real.has_parent_path() ? real.parent_path().string() : ".";
  if (::access(folder.c_str(), W_OK | X_OK) != 0) return io_error(path, "cannot be written", errno);
  return {};
}

void remove_unfinished_file() noexcept {
  if (unfinished.load()) ::unlink(unfinished_path.data());
}

}  // namespace logitless::cli
