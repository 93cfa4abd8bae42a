// SPDX-License-Identifier: Apache-2.0
// One lane in plain C++: correct on every machine on day one, and the yardstick of the others.
// Multiply-adds are rounded twice (the build sets -ffp-contract=off for this level).

#include <cstdint>
#include <cstring>

#include "cpu/constants.h"
#include "cpu/kernels.h"
#include "cpu/sparse_hash.h"

namespace {

struct ScalarVec {
  static constexpr int kLanes = 1;
  using F = float;

  static F zero() { return 0.0f; }
  static F set1(float x) { return x; }
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static void store_first(float* p, F x, int) { *p = x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F max_keep_nan(F a, F b) { return a != a || b != b ? a + b : max(a, b); }
  static float reduce_max(F a) { return a; }
  static float reduce_add(F a) { return a; }
  template <bool kNonPositive>
  static F exp_argument(F x) {
    const F least = x < logitless::cpu::kExpLeast ? logitless::cpu::kExpLeast : x;
    if constexpr (kNonPositive) return least;
    return least > logitless::cpu::kExpMost ? logitless::cpu::kExpMost : least;
  }

  // p * 2^n in two steps: the first is exact, so there is one rounding. n stands in the low bits of
  // `shifted` (exp-inl.h), where a NaN is an odd number and not an undefined conversion.
  static F exp_result(F p, F, F shifted, F) {
    const int32_t whole =
        __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, 0x1.8p23f);
    const int32_t half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
  }

  template <logitless::cpu::PackSource kSource>
  static F load_as(const void* p) {
    using logitless::cpu::PackSource;
    if constexpr (kSource == PackSource::f32) return *static_cast<const float*>(p);
    if constexpr (kSource == PackSource::f16) {
      return static_cast<float>(*static_cast<const logitless::float16*>(p));
    }
    if constexpr (kSource == PackSource::bf16) {
      return static_cast<float>(*static_cast<const logitless::bfloat16*>(p));
    }
    if constexpr (kSource == PackSource::f32_as_bf16) {
      return round_bf16(*static_cast<const float*>(p));
    }
  }
  static F round_bf16(F x) { return static_cast<float>(logitless::bfloat16(x)); }
  static F round_f16(F x) { return static_cast<float>(logitless::float16(x)); }
  static void store_bf16(void* p, F x) {
    *static_cast<logitless::bfloat16*>(p) = logitless::bfloat16(x);
  }
  static void stream(float* p, F x) { store(p, x); }
  static void stream_bf16(void* p, F a, F b) {
    store_bf16(p, a);
    store_bf16(static_cast<unsigned char*>(p) + 2, b);
  }
  static void stream_line(void* p, const void* from) { std::memcpy(p, from, 64); }
  static void publish() {}
  static constexpr bool kCompresses = false;
  // Of the lanes of e those with u * threshold < e, and their columns, one behind the other; at
  // least kLanes elements of both may be written. Returns how many.
  static int collect(F e, const uint32_t* vocab_hash, uint32_t token_hash, float threshold,
                     int column, float* values, uint8_t* columns) {
    *values = e;
    *columns = static_cast<uint8_t>(column);
    return logitless::cpu::uniform_of(token_hash, *vocab_hash) * threshold < e ? 1 : 0;
  }
  // Words of two bf16 as fp32: the lower, the upper; and back, of values that are bf16.
  static F lower_halves(F x) {
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) << 16);
  }
  static F upper_halves(F x) {
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & 0xffff0000u);
  }
  static F both_halves(F lower, F upper) {
    return __builtin_bit_cast(
        float, __builtin_bit_cast(uint32_t, lower) >> 16 | __builtin_bit_cast(uint32_t, upper));
  }
  static constexpr bool kTransposesHalves = false;
  static void store_f16(void* p, F x) {
    *static_cast<logitless::float16*>(p) = logitless::float16(x);
  }
  template <logitless::cpu::PackSource kSource>
  static F load_first_as(const void* p, int) {
    return load_as<kSource>(p);
  }
  static void store_bf16_first(void* p, F x, int) { store_bf16(p, x); }
  static void store_f16_first(void* p, F x, int) { store_f16(p, x); }
  static void transpose(F*) {}

 private:
  static float power_of_two(int32_t n) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(n + 127) << 23);
  }
};

struct ScalarF32 {
  static constexpr int kMr = 4;
  static constexpr int kLanes = 1;
  static constexpr int kVecs = 8;
  static constexpr int kUnit = 1;
  static constexpr double kFlops = 2.0;
  static constexpr bool kFetchesAhead = false;
  static constexpr int kChains = 8;  // of stream_tile-inl.h
  using V = ScalarVec;
  using F = float;
  using P = float;
  static F zero() { return 0.0f; }
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static P load_b(const float* p) { return *p; }
  static P as_units(F x) { return x; }
  static P broadcast(const float* p) { return *p; }
  static F mac(F acc, P a, P b) { return acc + a * b; }
  static void opaque(P& p) { asm volatile("" : "+m"(p)); }
  static void keep(F& f) { asm volatile("" : "+m"(f)); }

  // One row's gradients are its units, in both forms.
  static void units_of_columns(const F* g, F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = g[j];
  }
  static void units_of_rows(const F (*rows)[kVecs], F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = rows[0][j];
  }
};

}  // namespace
