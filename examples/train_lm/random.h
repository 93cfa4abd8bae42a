// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Random numbers that are a function of what they are for: seed, purpose, step, index. Whoever asks
// gets the same ones, so nothing depends on how the work is cut over ranks and threads, and a
// resumed run needs no generator's state.
namespace logitless::train_lm {

enum class Purpose : uint64_t {
  embedding = 1,
  hidden = 2,
  head = 3,
  order = 4,
  dropout = 5,
  sparse = 6
};

class RandomNumbers {
 public:
  RandomNumbers(uint64_t seed, Purpose purpose, int64_t step = 0)
      : key_(mix(mix(mix(seed) + static_cast<uint64_t>(purpose)) + static_cast<uint64_t>(step))) {}

  uint64_t bits(int64_t index) const {
    return mix(key_ + static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15ULL);
  }
  // In [0, 1), multiples of 2^-24: exact floats.
  float uniform(int64_t index) const { return static_cast<float>(bits(index) >> 40) * 0x1p-24f; }

 private:
  // A bijection of 64 bits that leaves no trace of its argument (splitmix64's last step).
  static constexpr uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }

  uint64_t key_;
};

}  // namespace logitless::train_lm
