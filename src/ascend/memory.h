// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace logitless::ascend {

enum class MemoryKind : uint8_t { device, host };

// What aclrtMalloc and aclrtMallocHost gave out and nobody freed yet.
class Allocations {
 public:
  static Allocations& instance();  // never destroyed, as the registry

  // Null when there is no memory. huge: ask for 2 MiB pages.
  void* allocate(size_t bytes, MemoryKind kind, bool huge);
  // False when the address is not one of this kind.
  bool free(void* address, MemoryKind kind);
  bool is_ours(const void* address) const;  // also inside an allocation

  std::mutex& mutex() { return mutex_; }

 private:
  struct Block {
    size_t bytes;
    MemoryKind kind;
  };
  mutable std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
};

}  // namespace logitless::ascend
