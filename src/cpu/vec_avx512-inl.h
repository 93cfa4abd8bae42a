// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes: AVX-512 F, BW, DQ, VL; with AVX512-BF16 also its dot product of pairs.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/constants.h"
#include "cpu/kernels.h"
#include "cpu/sparse_hash.h"

namespace {

struct Avx512Vec {
  static constexpr int kLanes = 16;
  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F max_keep_nan(F a, F b) {
    return _mm512_mask_add_ps(max(a, b), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), a, b);
  }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  // Written out: the order of the sum is part of the result.
  static float reduce_add(F a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  // min returns its second operand when one is NaN: x stands second.
  template <bool kNonPositive>
  static F exp_argument(F x) {
    if constexpr (kNonPositive) return x;
    return _mm512_min_ps(set1(logitless::cpu::kExpMost), x);
  }
  static F exp_result(F p, F n, F, F x) {
    const __mmask16 keep =
        _mm512_cmp_ps_mask(x, set1(logitless::cpu::kExpLeast), _CMP_NLT_UQ);  // NaN too
    return _mm512_maskz_scalef_ps(keep, p, n);
  }

  template <logitless::cpu::PackSource kSource>
  static F load_as(const void* p) {
    using logitless::cpu::PackSource;
    if constexpr (kSource == PackSource::f32) return load(static_cast<const float*>(p));
    if constexpr (kSource == PackSource::f16) {
      return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    }
    if constexpr (kSource == PackSource::bf16) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
    }
    if constexpr (kSource == PackSource::f32_as_bf16) {
      return round_bf16(load(static_cast<const float*>(p)));
    }
  }
  static F round_bf16(F x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    sum = _mm512_mask_or_epi32(sum, nan, u, _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(
        _mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static F round_f16(F x) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_bf16(void* p, F x) { _mm256_storeu_si256(static_cast<__m256i*>(p), halves(x)); }
  static void store_f16(void* p, F x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // The first n elements; the others are zero, and neither read nor written.
  template <logitless::cpu::PackSource kSource>
  static F load_first_as(const void* p, int n) {
    using logitless::cpu::PackSource;
    const __mmask16 mask = first(n);
    if constexpr (kSource == PackSource::f32) return _mm512_maskz_loadu_ps(mask, p);
    if constexpr (kSource == PackSource::f16) {
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
    }
    if constexpr (kSource == PackSource::bf16) {
      return _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
    }
    if constexpr (kSource == PackSource::f32_as_bf16) {
      return round_bf16(_mm512_maskz_loadu_ps(mask, p));
    }
  }
  static void store_bf16_first(void* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), halves(x));
  }
  static void store_f16_first(void* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first(n),
                             _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Written once, read long afterwards: past the caches, so that no line is read before it is
  // overwritten. publish() comes before other threads may read.
  static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
  static void stream_bf16(void* p, F a, F b) {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(halves(a)), halves(b), 1);
    _mm512_stream_si512(static_cast<__m512i*>(p), both);
  }
  static void stream_line(void* p, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(p), _mm512_loadu_si512(from));
  }
  static void publish() { _mm_sfence(); }
  static constexpr bool kCompresses = true;
  // Of the lanes of e those with u * threshold < e, and their columns, one behind the other; at
  // least kLanes elements of both may be written. Returns how many.
  static int collect(F e, const uint32_t* vocab_hash, uint32_t token_hash, float threshold,
                     int column, float* values, uint8_t* columns) {
    __m512i x = _mm512_xor_si512(_mm512_loadu_si512(vocab_hash),
                                 _mm512_set1_epi32(static_cast<int>(token_hash)));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(logitless::cpu::kHashFactor)));
    const F u = _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 1));
    const __mmask16 keep = _mm512_cmp_ps_mask(mul(u, set1(threshold * 0x1p-31f)), e, _CMP_LT_OQ);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i place = _mm512_add_epi32(_mm512_set1_epi32(column), lane);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(keep, e));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(columns),
                     _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(keep, place)));
    return __builtin_popcount(keep);
  }
  // sparse-inl.h, for up to 16 elements at a time.
  static int large_lanes(const float* values, const uint8_t* columns, int lanes, float scale,
                         float least, int except, float* out) {
    const F p = mul(_mm512_loadu_ps(values), set1(scale));
    const __m512i column =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
    const __mmask16 keep = _mm512_mask_cmp_ps_mask(first(lanes), p, set1(least), _CMP_GE_OQ) &
                           _mm512_cmpneq_epi32_mask(column, _mm512_set1_epi32(except));
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(keep, p));
    return __builtin_popcount(keep);
  }
  static int thin_lanes(const float* values, const uint8_t* columns, int lanes, float scale,
                        const uint32_t* vocab_hash, uint32_t token_hash, float tau, float factor,
                        uint16_t base, float* out_values, uint16_t* out_columns) {
    const __mmask16 here = first(lanes);
    const F p = mul(_mm512_loadu_ps(values), set1(scale));
    const __m512i column =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
    __m512i x = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), here, column, vocab_hash, 4);
    x = _mm512_xor_si512(x, _mm512_set1_epi32(static_cast<int>(token_hash)));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(logitless::cpu::kHashFactor)));
    const F u = _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 1));
    const F t = set1(tau);
    const auto keep = static_cast<__mmask16>(
        _mm512_mask_cmp_ps_mask(here, mul(u, set1(tau * 0x1p-31f)), p, _CMP_LT_OQ) |
        _mm512_mask_cmp_ps_mask(here, p, t, _CMP_GE_OQ));
    _mm512_storeu_ps(out_values, _mm512_maskz_compress_ps(keep, mul(max(p, t), set1(factor))));
    const __m512i place = _mm512_add_epi32(column, _mm512_set1_epi32(base));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out_columns),
                        _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(keep, place)));
    return __builtin_popcount(keep);
  }
  // Words of two bf16 as fp32: the lower, the upper; and back, of values that are bf16.
  static F lower_halves(F x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16));
  }
  static F upper_halves(F x) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static F both_halves(F lower, F upper) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(lower), 16),
                                               _mm512_castps_si512(upper)));
  }
  static constexpr bool kTransposesHalves = false;
  // 16 x 16 in registers, four stages of 16 shuffles.
  static void transpose(F* r) {
    F t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    // r[4 g + c] holds column 4 q + c of rows 4 g .. 4 g + 3 in its 128-bit lane q.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      t[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);           // q 0, 2 of groups 0, 1
      t[4 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);       // q 1, 3
      t[8 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);  // groups 2, 3
      t[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      r[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
      r[8 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
      r[4 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0x88);
      r[12 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0xdd);
    }
  }

 private:
  static __m256i halves(F x) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(round_bf16(x)), 16));
  }
  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
};

// 14 x 32 for both families: see gemm_tile-inl.h.
struct Avx512F32 {
  static constexpr int kMr = 14;
  static constexpr int kLanes = 16;
  static constexpr int kVecs = 2;
  static constexpr int kUnit = 1;
  static constexpr double kFlops = 32.0;
  static constexpr bool kFetchesAhead = true;
  static constexpr int kChains = 16;  // of stream_tile-inl.h
  using V = Avx512Vec;
  using F = __m512;
  using P = __m512;
  static F zero() { return _mm512_setzero_ps(); }
  static F load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, F x) { _mm512_store_ps(p, x); }
  static P load_b(const float* p) { return _mm512_load_ps(p); }
  static P as_units(F x) { return x; }
  static P broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static F mac(F acc, P a, P b) { return _mm512_fmadd_ps(a, b, acc); }
  static void opaque(P& p) { asm volatile("" : "+v"(p)); }
  static void keep(F& f) { asm volatile("" : "+v"(f)); }

  // One row's gradients are its units, in both forms.
  static void units_of_columns(const F* g, F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = g[j];
  }
  static void units_of_rows(const F (*rows)[kVecs], F* units) {
    for (int j = 0; j < kVecs; ++j) units[j] = rows[0][j];
  }
};

#ifdef __AVX512BF16__

// Element i of two vectors of 32 halves side by side: i of the first, 32 + i of the second.
struct Interleave {
  uint16_t index[2][32];
};
constexpr Interleave interleave_indices() {
  Interleave table{};
  for (int i = 0; i < 32; ++i) {
    table.index[i / 16][i % 16 * 2] = static_cast<uint16_t>(i);
    table.index[i / 16][i % 16 * 2 + 1] = static_cast<uint16_t>(32 + i);
  }
  return table;
}

struct Avx512Bf16Vec : Avx512Vec {
  alignas(64) static constexpr Interleave kInterleave = interleave_indices();
  // One instruction rounds both; it takes subnormal values as 0.
  static void stream_bf16(void* p, F a, F b) {
    _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  // Units [32 columns] of pairs of rows a, b of 32 halves each.
  static void interleave(__m512i a, __m512i b, F* units) {
    const __m512i low = _mm512_load_si512(kInterleave.index[0]);
    const __m512i high = _mm512_load_si512(kInterleave.index[1]);
    units[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
    units[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
  }

  // tile [rows <= 16][32] -> 32 rows of `rows` bf16. Rounded first, so that pairs of rows are moved
  // as units of 32 bits and one square of 16 holds the whole tile: a third of the instructions.
  static constexpr bool kTransposesHalves = true;
  static void store_halves_transposed(const float* tile, int rows, void* out,
                                      int64_t out_row_bytes) {
    F square[16];
    for (int r = 0; r < 16; r += 2) {
      __m512i halves[2];
      for (int i = 0; i < 2; ++i) {
        const float* x = tile + (r + i) * 32;
        halves[i] = r + i < rows ? (__m512i)_mm512_cvtne2ps_pbh(load(x + 16), load(x))
                                 : _mm512_setzero_si512();
      }
      F units[2];
      interleave(halves[0], halves[1], units);
      square[r / 2] = units[0];
      square[8 + r / 2] = units[1];
    }
    transpose(square);  // row c: column c in the lower half, column 16 + c in the upper
    auto* p = static_cast<unsigned char*>(out);
    const auto mask = static_cast<__mmask16>((1u << rows) - 1u);
    for (int c = 0; c < 16; ++c) {
      const __m512i both = _mm512_castps_si512(square[c]);
      _mm256_mask_storeu_epi16(p + c * out_row_bytes, mask, _mm512_castsi512_si256(both));
      _mm256_mask_storeu_epi16(p + (16 + c) * out_row_bytes, mask,
                               _mm512_extracti64x4_epi64(both, 1));
    }
  }
};

// The dot product treats subnormal inputs as zero and flushes subnormal results.
struct Avx512Bf16Dot {
  static constexpr int kMr = 14;
  static constexpr int kLanes = 16;
  static constexpr int kVecs = 2;
  static constexpr int kUnit = 2;
  static constexpr double kFlops = 64.0;
  static constexpr bool kFetchesAhead = true;
  static constexpr int kChains = 16;  // of stream_tile-inl.h
  using V = Avx512Vec;
  using F = __m512;
  using P = __m512bh;
  static F zero() { return _mm512_setzero_ps(); }
  static F load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, F x) { _mm512_store_ps(p, x); }
  static P load_b(const float* p) { return (__m512bh)_mm512_load_ps(p); }
  static P as_units(F x) { return (__m512bh)x; }
  static P broadcast(const float* p) { return (__m512bh)_mm512_set1_ps(*p); }
  static F mac(F acc, P a, P b) { return _mm512_dpbf16_ps(acc, a, b); }
  static void opaque(P& p) { asm volatile("" : "+v"(p)); }
  static void keep(F& f) { asm volatile("" : "+v"(f)); }

  // A row of a tile: one instruction rounds both halves.
  static void store_row_bf16(void* p, const F* row) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(row[1], row[0]));
  }
  static void stream_row_bf16(void* p, const F* row) {
    _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)_mm512_cvtne2ps_pbh(row[1], row[0]));
  }

  // Columns 2 u and 2 u + 1 of a row make its unit u.
  static void units_of_columns(const F* g, F* units) {
    units[0] = _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(g[1], g[0]));
  }
  // Column c of two rows makes unit c.
  static void units_of_rows(const F (*rows)[1], F* units) {
    Avx512Bf16Vec::interleave(_mm512_castps_si512(rows[0][0]), _mm512_castps_si512(rows[1][0]),
                              units);
  }

  // Units of kLanes * 2 consecutive elements.
  template <logitless::cpu::PackSource kSource>
  static __m512 load_units(const void* p) {
    using logitless::cpu::PackSource;
    if constexpr (kSource == PackSource::f32_as_bf16) {
      const float* x = static_cast<const float*>(p);
      return _mm512_castsi512_ps(
          (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x)));
    } else {
      return _mm512_castsi512_ps(_mm512_loadu_si512(p));
    }
  }
  // Units of kLanes columns of two neighbouring k: low half from p0.
  template <logitless::cpu::PackSource kSource>
  static __m512 interleave_units(const void* p0, const void* p1) {
    using logitless::cpu::PackSource;
    __m256i lo, hi;
    if constexpr (kSource == PackSource::f32_as_bf16) {
      lo = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(p0));
      hi = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(p1));
    } else {
      lo = _mm256_loadu_si256(static_cast<const __m256i*>(p0));
      hi = _mm256_loadu_si256(static_cast<const __m256i*>(p1));
    }
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(lo),
                                               _mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16)));
  }
};

#endif  // __AVX512BF16__

}  // namespace
