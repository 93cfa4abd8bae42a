// SPDX-License-Identifier: Apache-2.0
// What packing and the register tiles compute, one element at a time, bit by bit, for every level:
// the yardstick of property_test.cc, and what docs/numerics.md says about pairs and subnormals.
// Compiled with -ffp-contract=off.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "logitless/machine.h"
#include "logitless/tensor.h"

namespace logitless::definition {

inline bool is_subnormal(float x) { return x != 0.0f && std::fabs(x) < 0x1p-126f; }
// Subnormals become zeros of their sign.
inline float flushed(float x) { return is_subnormal(x) ? std::copysign(0.0f, x) : x; }

// ---- packing ----------------------------------------------------------------------------------

// One element of an operand as it is multiplied, from its bytes. Levels with a dot product of
// AVX512-BF16 convert fp32 by an instruction that takes subnormals as zeros.
inline float operand_element(cpu::PackSource source, const void* p, Isa isa, int k_unit) {
  float x = 0;
  switch (source) {
    case cpu::PackSource::f16:
      return static_cast<float>(*static_cast<const float16*>(p));
    case cpu::PackSource::bf16:
      return static_cast<float>(*static_cast<const bfloat16*>(p));
    case cpu::PackSource::f32:
      std::memcpy(&x, p, sizeof(x));
      return x;
    case cpu::PackSource::f32_as_bf16:
      std::memcpy(&x, p, sizeof(x));
      if (isa == Isa::avx512bf16 && k_unit == 2) x = flushed(x);
      return static_cast<float>(bfloat16(x));
  }
  return x;
}

// Unit of k0 (and k0 + 1 where a unit is a pair; absent: +0).
inline uint32_t unit(int k_unit, float at_k0, float at_k1) {
  const auto low = std::bit_cast<uint32_t>(at_k0);
  if (k_unit == 1) return low;
  return (low >> 16) | (std::bit_cast<uint32_t>(at_k1) & 0xffff0000u);
}

// ---- products ---------------------------------------------------------------------------------

// x * y + acc, rounded once; results that are below 2^-126 after a rounding to 24 bits are zeros.
inline float multiply_add_flushed(float x, float y, float acc) {
  const long double exact =
      static_cast<long double>(x) * static_cast<long double>(y) + static_cast<long double>(acc);
  const long double size = std::fabs(exact);
  if (size < 0x1p-126L * (1 - 0x1p-25L)) return std::copysign(0.0f, std::fma(x, y, acc));
  return std::fma(x, y, acc);
}

// a + b, rounded to float "to odd": towards zero, and the last bit set where that was inexact.
inline float add_to_odd(float a, float b) {
  const double x = static_cast<double>(a);
  const double y = static_cast<double>(b);
  double sum = x + y;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  // Two-sum (Knuth): sum + error is exactly x + y. To odd in double first, which loses nothing.
  const double of_y = sum - x;
  const double error = (x - (sum - of_y)) + (y - of_y);
  auto bits = std::bit_cast<uint64_t>(sum);
  if (error != 0.0 && (bits & 1) == 0) {
    bits = (error > 0) == (sum > 0) ? bits | 1 : bits - 1;
    sum = std::bit_cast<double>(bits);
  }
  auto narrow = static_cast<float>(sum);
  if (std::isinf(narrow)) {
    return std::fabs(sum) < 0x1p128 ? std::copysign(0x1.fffffep127f, narrow) : narrow;
  }
  if (static_cast<double>(narrow) == sum) return narrow;
  auto narrow_bits = std::bit_cast<uint32_t>(narrow);
  if (std::fabs(static_cast<double>(narrow)) > std::fabs(sum)) --narrow_bits;  // towards zero
  return std::bit_cast<float>(narrow_bits | 1);
}

// acc + the unit (a, b): what one multiply-add of a level's tile does.
//   scalar            two roundings
//   fp32 of the rest  one
//   avx512bf16 pairs  two multiply-adds, the odd k first, each rounded once to nearest even;
//                     subnormal operands, sums and results are zeros, whatever MXCSR says
//   neon_bf16 pairs   both products, their sum, and its sum with acc, each rounded to odd;
//                     subnormals are zeros, whatever FPCR says (while its EBF bit is 0)
inline float multiply_add(Isa isa, int k_unit, float acc, uint32_t a, uint32_t b) {
  if (k_unit == 1) {
    const float x = std::bit_cast<float>(a);
    const float y = std::bit_cast<float>(b);
    return isa == Isa::scalar ? acc + x * y : std::fma(x, y, acc);
  }
  const auto even = [](uint32_t u) { return flushed(std::bit_cast<float>(u << 16)); };
  const auto odd = [](uint32_t u) { return flushed(std::bit_cast<float>(u & 0xffff0000u)); };
  if (isa == Isa::avx512bf16) {
    return multiply_add_flushed(even(a), even(b),
                                multiply_add_flushed(odd(a), odd(b), flushed(acc)));
  }
  // Products of two bf16 have 16 significant bits: exact unless they leave the range.
  const float x = flushed(even(a) * even(b));
  const float y = flushed(odd(a) * odd(b));
  return flushed(add_to_odd(flushed(acc), flushed(add_to_odd(x, y))));
}

// ---- comparison -------------------------------------------------------------------------------

// The same bits, or both NaN: which NaN is nobody's contract.
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

}  // namespace logitless::definition
