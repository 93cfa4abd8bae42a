// SPDX-License-Identifier: Apache-2.0
// The register tile of every product. Written once; each ISA supplies a family G:
//
//   kMr, kLanes, kVecs   rows, floats per vector, vectors per row of the tile (nr = lanes * vecs)
//   F, P                 accumulator vector, vector of units
//   broadcast(p)         the unit at p in every lane;  load_b(p)  kLanes units
//   mac(acc, a, b)       acc + a . b per lane
//   kFetchesAhead        whether the loop prefetches (kernels.h, Ahead)
//
// Arithmetic (AVX-512, 14 x 32): per unit 2 loads, 14 broadcasts, 28 multiply-adds; 28
// accumulators + 2 + 1 = 31 of 32 registers. The broadcasts are kept apart from the arithmetic
// (28 instructions with a memory operand each would need 30 loads where two load ports do 28).
// k is never cut: the accumulators of a tile are loaded and stored once per call.
// This function must not be inlined into code that applies exp: the compiler then hoists exp's
// constants into registers and spills accumulators inside the k loop.
// No standard containers here: an inline function compiled with these flags may become the copy
// that the linker keeps for everyone.

#include <cstdint>

#include "cpu/kernels.h"

namespace {

template <class G, int kRows>
[[gnu::noinline]] void gemm_tile(const float* a, const float* b, int64_t k_units, float* c,
                                 bool accumulate, const logitless::cpu::Ahead& ahead) {
  constexpr int kNr = G::kLanes * G::kVecs;
  // Numbers, not pointers: they may point anywhere.
  auto next_a = reinterpret_cast<uintptr_t>(ahead.a);
  auto next_b = reinterpret_cast<uintptr_t>(ahead.b);
  const int64_t next_b_step = ahead.b_step;
  typename G::F acc[kRows][G::kVecs];
  if (accumulate) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::load(c + i * kNr + j * G::kLanes);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::zero();
    }
  }
  for (int64_t u = 0; u < k_units; ++u) {
    typename G::P bv[G::kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < G::kVecs; ++j) bv[j] = G::load_b(b + j * G::kLanes);
    if constexpr (G::kFetchesAhead) {
      __builtin_prefetch(reinterpret_cast<const void*>(next_a), 0, 3);
      __builtin_prefetch(reinterpret_cast<const void*>(next_b), 0, 2);
      next_a += G::kMr * 4;
      next_b += static_cast<uintptr_t>(next_b_step);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename G::P av = G::broadcast(a + i);
#pragma GCC unroll 4
      for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::mac(acc[i][j], av, bv[j]);
    }
    a += G::kMr;
    b += kNr;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < G::kVecs; ++j) G::store(c + i * kNr + j * G::kLanes, acc[i][j]);
  }
}

// Chooses the instance by the number of rows: even ones, and 1.
template <class G, int kRows>
void gemm_tile_rows(int rows, const float* a, const float* b, int64_t k_units, float* c,
                    bool accumulate, const logitless::cpu::Ahead& ahead) {
  if (rows == kRows) return gemm_tile<G, kRows>(a, b, k_units, c, accumulate, ahead);
  if constexpr (kRows > 2) {
    return gemm_tile_rows<G, kRows - 2>(rows, a, b, k_units, c, accumulate, ahead);
  } else if constexpr (kRows == 2) {
    return gemm_tile_rows<G, 1>(rows, a, b, k_units, c, accumulate, ahead);
  }
}

template <class G>
void tile(int rows, const void* a, const void* b, int64_t k_units, float* c, bool accumulate,
          const logitless::cpu::Ahead& ahead) {
  gemm_tile_rows<G, G::kMr>(rows, static_cast<const float*>(a), static_cast<const float*>(b),
                            k_units, c, accumulate, ahead);
}

// As many independent accumulators as the tile has, nothing but registers.
template <class G>
[[gnu::noinline]] int64_t peak(int64_t iterations) {
  constexpr int kChains = G::kMr * G::kVecs;
  alignas(64) float units[G::kLanes] = {};
  typename G::P a = G::load_b(units);
  typename G::P b = a;
  G::opaque(a);
  G::opaque(b);
  typename G::F acc[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) {
    acc[i] = G::zero();
    G::keep(acc[i]);  // else equal chains become one
  }
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) acc[i] = G::mac(acc[i], a, b);
  }
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) G::keep(acc[i]);
  return iterations * kChains;
}

}  // namespace
