// SPDX-License-Identifier: Apache-2.0
// Four lanes: AArch64 Advanced SIMD; with BF16 (Armv8.6) also its dot product of pairs.

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "cpu/constants.h"
#include "cpu/kernels.h"
#include "cpu/sparse_hash.h"

namespace {

struct NeonVec {
  static constexpr int kLanes = 4;
  using F = float32x4_t;

  static F zero() { return vdupq_n_f32(0.0f); }
  static F set1(float x) { return vdupq_n_f32(x); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static void store_first(float* p, F x, int n) {
    float lanes[4];
    vst1q_f32(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
  }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F max(F a, F b) { return vmaxnmq_f32(a, b); }
  static F max_keep_nan(F a, F b) { return vmaxq_f32(a, b); }
  static float reduce_max(F a) { return vmaxnmvq_f32(a); }
  // Written out: the order of the sum is part of the result.
  static float reduce_add(F a) {
    const float32x2_t h = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
  }
  // vmin and vmax return NaN when one operand is.
  template <bool kNonPositive>
  static F exp_argument(F x) {
    const F least = vmaxq_f32(set1(logitless::cpu::kExpLeast), x);
    if constexpr (kNonPositive) return least;
    return vminq_f32(set1(logitless::cpu::kExpMost), least);
  }
  static F exp_result(F p, F n, F, F) {
    const int32x4_t whole = vcvtnq_s32_f32(n);
    const int32x4_t half = vshrq_n_s32(whole, 1);
    return mul(mul(p, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
  }

  template <logitless::cpu::PackSource kSource>
  static F load_as(const void* p) {
    using logitless::cpu::PackSource;
    if constexpr (kSource == PackSource::f32) return load(static_cast<const float*>(p));
    if constexpr (kSource == PackSource::f16) {
      return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(p))));
    }
    if constexpr (kSource == PackSource::bf16) {
      return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(static_cast<const uint16_t*>(p)), 16));
    }
    if constexpr (kSource == PackSource::f32_as_bf16) {
      return round_bf16(load(static_cast<const float*>(p)));
    }
  }
  static F round_bf16(F x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x00400000));
    const uint32x4_t ordered = vceqq_f32(x, x);
    return vreinterpretq_f32_u32(
        vandq_u32(vbslq_u32(ordered, sum, quiet), vdupq_n_u32(0xffff0000u)));
  }
  static F round_f16(F x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }
  static void store_bf16(void* p, F x) {
    vst1_u16(static_cast<uint16_t*>(p), vshrn_n_u32(vreinterpretq_u32_f32(round_bf16(x)), 16));
  }
  static void stream(float* p, F x) { store(p, x); }
  static void stream_bf16(void* p, F a, F b) {
    store_bf16(p, a);
    store_bf16(static_cast<unsigned char*>(p) + 2 * kLanes, b);
  }
  static void stream_line(void* p, const void* from) { std::memcpy(p, from, 64); }
  static void publish() {}
  static constexpr bool kCompresses = false;
  // Of the lanes of e those with u * threshold < e, and their columns, one behind the other; at
  // least kLanes elements of both may be written. Returns how many.
  static int collect(F e, const uint32_t* vocab_hash, uint32_t token_hash, float threshold,
                     int column, float* values, uint8_t* columns) {
    const uint32x4_t x = vmulq_n_u32(veorq_u32(vld1q_u32(vocab_hash), vdupq_n_u32(token_hash)),
                                     logitless::cpu::kHashFactor);
    const F u = vcvtq_f32_s32(vreinterpretq_s32_u32(vshrq_n_u32(x, 1)));
    const uint32x4_t keep = vcltq_f32(mul(u, set1(threshold * 0x1p-31f)), e);
    if (vmaxvq_u32(keep) == 0) return 0;
    float lanes[4];
    uint32_t kept[4];
    vst1q_f32(lanes, e);
    vst1q_u32(kept, keep);
    int n = 0;
    for (int i = 0; i < 4; ++i) {
      values[n] = lanes[i];
      columns[n] = static_cast<uint8_t>(column + i);
      n += kept[i] != 0 ? 1 : 0;
    }
    return n;
  }
  // Words of two bf16 as fp32: the lower, the upper; and back, of values that are bf16.
  static F lower_halves(F x) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 16));
  }
  static F upper_halves(F x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0xffff0000u)));
  }
  static F both_halves(F lower, F upper) {
    return vreinterpretq_f32_u32(
        vorrq_u32(vshrq_n_u32(vreinterpretq_u32_f32(lower), 16), vreinterpretq_u32_f32(upper)));
  }
  static constexpr bool kTransposesHalves = false;
  static void store_f16(void* p, F x) {
    vst1_u16(static_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(x)));
  }
  // The first n elements; the others are zero, and neither read nor written.
  template <logitless::cpu::PackSource kSource>
  static F load_first_as(const void* p, int n) {
    using logitless::cpu::PackSource;
    constexpr bool kHalf = kSource == PackSource::f16 || kSource == PackSource::bf16;
    alignas(32) unsigned char lanes[4 * kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * (kHalf ? 2 : 4));
    return load_as<kSource>(lanes);
  }
  static void store_bf16_first(void* p, F x, int n) {
    uint16_t lanes[kLanes];
    store_bf16(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * 2);
  }
  static void store_f16_first(void* p, F x, int n) {
    uint16_t lanes[kLanes];
    store_f16(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * 2);
  }
  static void transpose(F* r) {
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]);
    const float32x4x2_t b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
  }

 private:
  static F power_of_two(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  }
};

// 6 x 16: 24 accumulators, 4 loads, 1 broadcast of 32 registers.
struct NeonF32 {
  static constexpr int kMr = 6;
  static constexpr int kLanes = 4;
  static constexpr int kVecs = 4;
  static constexpr int kUnit = 1;
  static constexpr double kFlops = 8.0;
  static constexpr bool kFetchesAhead = true;
  static constexpr int kChains = 16;  // of stream_tile-inl.h
  using V = NeonVec;
  using F = float32x4_t;
  using P = float32x4_t;
  static F zero() { return vdupq_n_f32(0.0f); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static P load_b(const float* p) { return vld1q_f32(p); }
  static P as_units(F x) { return x; }
  static P broadcast(const float* p) { return vld1q_dup_f32(p); }
  static F mac(F acc, P a, P b) { return vfmaq_f32(acc, a, b); }
  static void opaque(P& p) { asm volatile("" : "+w"(p)); }
  static void keep(F& f) { asm volatile("" : "+w"(f)); }

  // One row's gradients are its units, in both forms.
  static void units_of_columns(const F* g, F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = g[j];
  }
  static void units_of_rows(const F (*rows)[kVecs], F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = rows[0][j];
  }
};

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

struct NeonBf16Dot {
  static constexpr int kMr = 6;
  static constexpr int kLanes = 4;
  static constexpr int kVecs = 4;
  static constexpr int kUnit = 2;
  static constexpr double kFlops = 16.0;
  static constexpr bool kFetchesAhead = true;
  static constexpr int kChains = 16;  // of stream_tile-inl.h
  using V = NeonVec;
  using F = float32x4_t;
  using P = bfloat16x8_t;
  static F zero() { return vdupq_n_f32(0.0f); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static P load_b(const float* p) { return vreinterpretq_bf16_f32(vld1q_f32(p)); }
  static P as_units(F x) { return vreinterpretq_bf16_f32(x); }
  static P broadcast(const float* p) { return vreinterpretq_bf16_f32(vld1q_dup_f32(p)); }
  static F mac(F acc, P a, P b) { return vbfdotq_f32(acc, a, b); }
  static void opaque(P& p) { asm volatile("" : "+w"(p)); }
  static void keep(F& f) { asm volatile("" : "+w"(f)); }

  // Columns 2 u and 2 u + 1 of a row make its unit u.
  static void units_of_columns(const F* g, F* units) {
    for (int j = 0; j < kVecs / 2; ++j) {
      uint16_t halves[8];
      NeonVec::store_bf16(halves, g[2 * j]);
      NeonVec::store_bf16(halves + 4, g[2 * j + 1]);
      units[j] = vreinterpretq_f32_u16(vld1q_u16(halves));
    }
  }
  // Column c of two rows makes unit c.
  static void units_of_rows(const F (*rows)[kVecs / 2], F* units) {
    for (int j = 0; j < kVecs / 2; ++j) {
      const uint16x8_t a = vreinterpretq_u16_f32(rows[0][j]);
      const uint16x8_t b = vreinterpretq_u16_f32(rows[1][j]);
      units[2 * j] = vreinterpretq_f32_u16(vzip1q_u16(a, b));
      units[2 * j + 1] = vreinterpretq_f32_u16(vzip2q_u16(a, b));
    }
  }

  template <logitless::cpu::PackSource kSource>
  static F load_units(const void* p) {
    using logitless::cpu::PackSource;
    if constexpr (kSource == PackSource::f32_as_bf16) {
      uint16_t halves[8];
      NeonVec::store_bf16(halves, vld1q_f32(static_cast<const float*>(p)));
      NeonVec::store_bf16(halves + 4, vld1q_f32(static_cast<const float*>(p) + 4));
      return vreinterpretq_f32_u16(vld1q_u16(halves));
    } else {
      return vreinterpretq_f32_u16(vld1q_u16(static_cast<const uint16_t*>(p)));
    }
  }
  template <logitless::cpu::PackSource kSource>
  static F interleave_units(const void* p0, const void* p1) {
    using logitless::cpu::PackSource;
    uint16x4_t lo, hi;
    if constexpr (kSource == PackSource::f32_as_bf16) {
      uint16_t halves[8];
      NeonVec::store_bf16(halves, vld1q_f32(static_cast<const float*>(p0)));
      NeonVec::store_bf16(halves + 4, vld1q_f32(static_cast<const float*>(p1)));
      lo = vld1_u16(halves);
      hi = vld1_u16(halves + 4);
    } else {
      lo = vld1_u16(static_cast<const uint16_t*>(p0));
      hi = vld1_u16(static_cast<const uint16_t*>(p1));
    }
    return vreinterpretq_f32_u32(vorrq_u32(vmovl_u16(lo), vshll_n_u16(hi, 16)));
  }
};

#endif  // __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

}  // namespace
