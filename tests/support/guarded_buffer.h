// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace logitless::test {

// Memory between two areas that no one may touch. The data ends at the area behind it (up to the
// alignment asked for), so that one element too far is a crash at the instruction that reads or
// writes it; the bytes before the data and in the alignment gap hold a pattern that damage()
// checks.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  // Filled with 0xff, which is a NaN of every floating type and -1 of every integer type.
  explicit GuardedBuffer(int64_t bytes, int64_t alignment = 1);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  std::byte* data() const { return data_; }
  int64_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }
  // Empty, or which byte around the data was overwritten.
  std::string damage() const;

 private:
  std::byte* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Workspace of exactly `bytes` bytes, 64-byte aligned, that ends at a guard page. One mapping per
// thread is kept and grown, so what an earlier run left there is what the next one finds; the first
// and last part are filled with NaN. Valid until the next call on this thread.
std::span<std::byte> guarded_workspace(int64_t bytes);

}  // namespace logitless::test
