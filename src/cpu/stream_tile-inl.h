// SPDX-License-Identifier: Apache-2.0
// Products of few tokens: the tokens stand in the lanes, and weight is read once, row by row as it
// lies in memory, without being packed first.
//
//   c [rows][kVecs * kLanes] = weight rows . tokens          kVecs = 1 .. 4
//
// The same chain of multiply-adds per element as in gemm_tile-inl.h, so the same bits.
//
// Arithmetic (AVX-512, 16 rows, one vector of tokens): per unit 1 load, 16 broadcasts, 16
// multiply-adds: 8.5 cycles for 16 rows, less than reading them from memory takes. Rows are copied
// a block at a time (1/16 of the multiply-adds): rows a power of two apart share one set of L1, and
// their units could not be read in place. The next rows are fetched into L2 in the k loop, in the
// order of memory.

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/pack-inl.h"

namespace {

constexpr int64_t kStreamBlock = 128;                 // units copied at a time, 512 bytes a row
constexpr int64_t kStreamStride = kStreamBlock + 16;  // rows in different sets

template <class G, int kRows, int kVecs, logitless::cpu::PackSource kSource>
[[gnu::noinline]] void stream_tile(const void* const* rows, int64_t k, const float* tokens,
                                   float* c, bool accumulate, const logitless::cpu::Ahead& ahead) {
  using V = typename G::V;
  constexpr int kWidth = kVecs * G::kLanes;
  constexpr int64_t kBlock = int64_t{G::kLanes} * G::kUnit;  // elements of one copied vector
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  alignas(64) float staged[kRows * kStreamStride];
  auto next = reinterpret_cast<uintptr_t>(ahead.b);
  const auto step = static_cast<uintptr_t>(ahead.b_step);
  typename G::F acc[kRows][kVecs];
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      acc[i][j] = accumulate ? G::load(c + i * kWidth + j * G::kLanes) : G::zero();
    }
  }
  for (int64_t k0 = 0; k0 < k; k0 += kStreamBlock * G::kUnit) {
    const int64_t elements = k - k0 < kStreamBlock * G::kUnit ? k - k0 : kStreamBlock * G::kUnit;
    for (int i = 0; i < kRows; ++i) {
      const auto* row = static_cast<const unsigned char*>(rows[i]) + k0 * kBytes;
      float* out = staged + i * kStreamStride;
      for (int64_t e = 0; e < elements; e += kBlock) {
        const int64_t rest = elements - e;
        V::store(out + e / G::kUnit, rest >= kBlock
                                         ? load_units<G, kSource>(row + e * kBytes)
                                         : load_units_first<G, kSource>(row + e * kBytes, rest));
      }
    }
    const int64_t units = (elements + G::kUnit - 1) / G::kUnit;
    const float* b = tokens + k0 / G::kUnit * kWidth;
    const float* a = staged;
    for (int64_t u = 0; u < units; ++u) {
      typename G::P bv[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) bv[j] = G::load_b(b + j * G::kLanes);
      if constexpr (G::kFetchesAhead) {
        __builtin_prefetch(reinterpret_cast<const void*>(next), 0, 2);
        next += step;
      }
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const typename G::P av = G::broadcast(a + i * kStreamStride);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) acc[i][j] = G::mac(acc[i][j], bv[j], av);
      }
      ++a;
      b += kWidth;
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) G::store(c + i * kWidth + j * G::kLanes, acc[i][j]);
  }
}

// Rows per call: enough chains to hide the latency of a multiply-add, a divisor of a segment.
template <class G>
constexpr int stream_rows(int vecs) {
  return vecs == 3 ? G::kChains / 2 : G::kChains / vecs;
}

template <class G, logitless::cpu::PackSource kSource>
void stream_width(const void* const* rows, int64_t k, const float* tokens, int width, float* c,
                  bool accumulate, const logitless::cpu::Ahead& ahead) {
  switch (width / G::kLanes) {
    case 1:
      return stream_tile<G, stream_rows<G>(1), 1, kSource>(rows, k, tokens, c, accumulate, ahead);
    case 2:
      return stream_tile<G, stream_rows<G>(2), 2, kSource>(rows, k, tokens, c, accumulate, ahead);
    case 3:
      return stream_tile<G, stream_rows<G>(3), 3, kSource>(rows, k, tokens, c, accumulate, ahead);
    default:
      return stream_tile<G, stream_rows<G>(4), 4, kSource>(rows, k, tokens, c, accumulate, ahead);
  }
}

template <class G>
void stream(logitless::cpu::PackSource source, const void* const* rows, int64_t k,
            const void* tokens, int width, float* c, bool accumulate,
            const logitless::cpu::Ahead& ahead) {
  using logitless::cpu::PackSource;
  const auto* b = static_cast<const float*>(tokens);
  switch (source) {
    case PackSource::f32_as_bf16:
      return stream_width<G, PackSource::f32_as_bf16>(rows, k, b, width, c, accumulate, ahead);
    case PackSource::bf16:
      return stream_width<G, PackSource::bf16>(rows, k, b, width, c, accumulate, ahead);
    case PackSource::f16:
      if constexpr (G::kUnit == 1) {
        stream_width<G, PackSource::f16>(rows, k, b, width, c, accumulate, ahead);
      }
      return;
    case PackSource::f32:
      if constexpr (G::kUnit == 1) {
        stream_width<G, PackSource::f32>(rows, k, b, width, c, accumulate, ahead);
      }
      return;
  }
}

}  // namespace
