// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace logitless::train_lm {

// FNV-1a of 64 bits: tells what was damaged or is another, not what was forged.
class Fingerprint {
 public:
  void add(const void* data, size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ from[i]) * 0x100000001b3ULL;
  }
  std::string str() const { return fmt::format("{:016x}", hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace logitless::train_lm
