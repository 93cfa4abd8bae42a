// SPDX-License-Identifier: Apache-2.0
// The choice of a sparse gradient: a number in [0, 1) of (seed, token id, global vocabulary id).
//
// Both ids are mixed with the seed once per row and per column (the finaliser of splitmix64, Steele
// et al., OOPSLA 2014); for an element the two are combined by a xor and one multiplication, of
// which the upper bits count: per element that is all that can be afforded. Two elements of one row
// (or column) are as good as independent, which is what the variance of a sum needs.
// Always inlined: the kernels use it too (see bfloat16 in logitless/tensor.h).
#pragma once

#include <cstdint>

namespace logitless::cpu {

inline constexpr uint32_t kHashFactor = 0x9E3779B1u;  // odd, near 2^32 times the golden ratio
inline constexpr uint64_t kSeedStep = 0x9e3779b97f4a7c15u;

[[gnu::always_inline]] constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
// What does not change within a call.
[[gnu::always_inline]] constexpr uint64_t token_seed(uint64_t seed) {
  return mix64(seed + kSeedStep);
}
[[gnu::always_inline]] constexpr uint64_t vocab_seed(uint64_t seed) {
  return mix64(seed + 2 * kSeedStep);
}
[[gnu::always_inline]] constexpr uint32_t hash_of(uint64_t mixed_seed, int64_t id) {
  return static_cast<uint32_t>(mix64(mixed_seed + static_cast<uint64_t>(id)) >> 32);
}
// The element's number: 31 bits, as an integer and as a multiple of 2^-31 rounded to fp32.
[[gnu::always_inline]] constexpr int32_t hash31(uint32_t token_hash, uint32_t vocab_hash) {
  return static_cast<int32_t>(((token_hash ^ vocab_hash) * kHashFactor) >> 1);
}
[[gnu::always_inline]] constexpr float uniform_of(uint32_t token_hash, uint32_t vocab_hash) {
  return static_cast<float>(hash31(token_hash, vocab_hash)) * 0x1p-31f;
}

}  // namespace logitless::cpu
