// SPDX-License-Identifier: Apache-2.0
// Eight lanes: AVX2 + FMA + F16C.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/constants.h"
#include "cpu/kernels.h"
#include "cpu/sparse_hash.h"

namespace {

struct Avx2Vec {
  static constexpr int kLanes = 8;
  using F = __m256;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store_first(float* p, F x, int n) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
  }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F max_keep_nan(F a, F b) {
    return _mm256_blendv_ps(max(a, b), add(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
  }
  static float reduce_max(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float reduce_add(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  // min and max return their second operand when one is NaN: x stands second.
  template <bool kNonPositive>
  static F exp_argument(F x) {
    const F least = _mm256_max_ps(set1(logitless::cpu::kExpLeast), x);
    if constexpr (kNonPositive) return least;
    return _mm256_min_ps(set1(logitless::cpu::kExpMost), least);
  }
  static F exp_result(F p, F n, F, F) {
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return mul(mul(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
  }

  template <logitless::cpu::PackSource kSource>
  static F load_as(const void* p) {
    using logitless::cpu::PackSource;
    if constexpr (kSource == PackSource::f32) return load(static_cast<const float*>(p));
    if constexpr (kSource == PackSource::f16) {
      return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    }
    if constexpr (kSource == PackSource::bf16) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))), 16));
    }
    if constexpr (kSource == PackSource::f32_as_bf16) {
      return round_bf16(load(static_cast<const float*>(p)));
    }
  }
  static F round_bf16(F x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const F rounded =
        _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    return _mm256_blendv_ps(rounded, quiet(x), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static F round_f16(F x) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_bf16(void* p, F x) {
    const __m256i u = _mm256_srli_epi32(_mm256_castps_si256(round_bf16(x)), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
  static void stream_bf16(void* p, F a, F b) {
    store_bf16(p, a);
    store_bf16(static_cast<unsigned char*>(p) + 2 * kLanes, b);
  }
  static void stream_line(void* p, const void* from) {
    const auto* x = static_cast<const __m256i*>(from);
    _mm256_stream_si256(static_cast<__m256i*>(p), _mm256_loadu_si256(x));
    _mm256_stream_si256(static_cast<__m256i*>(p) + 1, _mm256_loadu_si256(x + 1));
  }
  static void publish() { _mm_sfence(); }
  static constexpr bool kCompresses = false;
  // Of the lanes of e those with u * threshold < e, and their columns, one behind the other; at
  // least kLanes elements of both may be written. Returns how many.
  static int collect(F e, const uint32_t* vocab_hash, uint32_t token_hash, float threshold,
                     int column, float* values, uint8_t* columns) {
    __m256i x = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(vocab_hash)),
                                 _mm256_set1_epi32(static_cast<int>(token_hash)));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(logitless::cpu::kHashFactor)));
    const F u = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 1));
    auto keep = static_cast<unsigned>(
        _mm256_movemask_ps(_mm256_cmp_ps(mul(u, set1(threshold * 0x1p-31f)), e, _CMP_LT_OQ)));
    if (keep == 0) return 0;
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, e);
    int n = 0;
    for (; keep != 0; keep &= keep - 1, ++n) {
      const int lane = __builtin_ctz(keep);
      values[n] = lanes[lane];
      columns[n] = static_cast<uint8_t>(column + lane);
    }
    return n;
  }
  // Words of two bf16 as fp32: the lower, the upper; and back, of values that are bf16.
  static F lower_halves(F x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16));
  }
  static F upper_halves(F x) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static F both_halves(F lower, F upper) {
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(lower), 16),
                                               _mm256_castps_si256(upper)));
  }
  static constexpr bool kTransposesHalves = false;
  static void store_f16(void* p, F x) {
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
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
  // 8 x 8 in registers.
  static void transpose(F* r) {
    F t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }

 private:
  static F power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static F quiet(F x) {
    const __m256i u =
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    return _mm256_castsi256_ps(_mm256_or_si256(u, _mm256_set1_epi32(0x00400000)));
  }
};

// 6 x 16: 12 accumulators, 2 loads, 1 broadcast of 16 registers.
struct Avx2F32 {
  static constexpr int kMr = 6;
  static constexpr int kLanes = 8;
  static constexpr int kVecs = 2;
  static constexpr int kUnit = 1;
  static constexpr double kFlops = 16.0;
  static constexpr bool kFetchesAhead = true;
  static constexpr int kChains = 8;  // of stream_tile-inl.h
  using V = Avx2Vec;
  using F = __m256;
  using P = __m256;
  static F zero() { return _mm256_setzero_ps(); }
  static F load(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, F x) { _mm256_store_ps(p, x); }
  static P load_b(const float* p) { return _mm256_load_ps(p); }
  static P as_units(F x) { return x; }
  static P broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static F mac(F acc, P a, P b) { return _mm256_fmadd_ps(a, b, acc); }
  static void opaque(P& p) { asm volatile("" : "+x"(p)); }
  static void keep(F& f) { asm volatile("" : "+x"(f)); }

  // One row's gradients are its units, in both forms.
  static void units_of_columns(const F* g, F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = g[j];
  }
  static void units_of_rows(const F (*rows)[kVecs], F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = rows[0][j];
  }
};

}  // namespace
