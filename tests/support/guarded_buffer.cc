// SPDX-License-Identifier: Apache-2.0
#include "tests/support/guarded_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/support/sanitizers.h"

namespace logitless::test {
namespace {

constexpr unsigned char kPattern = 0xa5;
constexpr unsigned char kNaNByte = 0xff;

int64_t page() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

// On either side: address space only, and wide, since a wrong offset seldom misses by little.
int64_t guard() { return 256 * page(); }

[[noreturn]] void out_of_memory(int64_t bytes) {
  std::fprintf(stderr, "guarded buffer: cannot map %lld bytes\n", static_cast<long long>(bytes));
  std::abort();
}

}  // namespace

GuardedBuffer::GuardedBuffer(int64_t bytes, int64_t alignment) : bytes_(bytes) {
  const int64_t inside = (bytes + page() - 1) / page() * page();
  mapped_bytes_ = inside + 2 * guard();
  void* mapping = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) out_of_memory(mapped_bytes_);
  mapping_ = static_cast<std::byte*>(mapping);
  std::byte* begin = mapping_ + guard();
  if (inside > 0 && mprotect(begin, static_cast<size_t>(inside), PROT_READ | PROT_WRITE) != 0) {
    out_of_memory(inside);
  }
  mark_as_mapped(begin, static_cast<size_t>(inside));
  data_ = begin + (inside - bytes) / alignment * alignment;
  std::memset(begin, kPattern, static_cast<size_t>(data_ - begin));
  std::memset(data_, kNaNByte, static_cast<size_t>(bytes));
  std::byte* end = data_ + bytes;
  std::memset(end, kPattern, static_cast<size_t>(begin + inside - end));
}

GuardedBuffer::~GuardedBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, static_cast<size_t>(mapped_bytes_));
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept { *this = std::move(other); }

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::string GuardedBuffer::damage() const {
  if (mapping_ == nullptr) return {};
  const std::byte* begin = mapping_ + guard();
  const std::byte* end = mapping_ + mapped_bytes_ - guard();
  for (const std::byte* p = begin; p != end; ++p) {
    if (p == data_) p = data_ + bytes_;
    if (p == end) break;
    if (*p != std::byte{kPattern}) {
      return "byte " + std::to_string(p - data_) + " relative to a buffer of " +
             std::to_string(bytes_) + " bytes was overwritten";
    }
  }
  return {};
}

std::span<std::byte> guarded_workspace(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  constexpr int64_t kFilled = int64_t{1} << 20;
  thread_local GuardedBuffer buffer;
  if (bytes == 0) return {};
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (buffer.size() < rounded) {
    buffer = GuardedBuffer(std::max(rounded, 2 * buffer.size()), kAlignment);
  }
  std::byte* end = buffer.data() + buffer.size();
  // Only a size that is no multiple of 64 leaves a few bytes between the workspace and the page.
  std::byte* data = end - rounded;
  std::memset(data, kNaNByte, static_cast<size_t>(std::min(bytes, kFilled)));
  std::memset(end - std::min(rounded, kFilled), kNaNByte,
              static_cast<size_t>(std::min(rounded, kFilled)));
  return {data, static_cast<size_t>(bytes)};
}

}  // namespace logitless::test
