// SPDX-License-Identifier: Apache-2.0
// The register tile, with B read as it lies in memory: rows of k, two of which make the units of
// their columns. The units are also stored, for the other tiles of the same B panel. Alone,
// packing waits for the lines of its rows; here the multiply-adds of a unit take as long.

#include <cstdint>

#include "cpu/pack-inl.h"

namespace {

template <class G, int kRows, logitless::cpu::PackSource kSource>
[[gnu::noinline]] void packing_tile(const float* a, const void* const* b_rows, int64_t offset,
                                    int64_t k_units, float* c, bool accumulate, float* packed) {
  constexpr int kNr = G::kLanes * G::kVecs;
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  typename G::F acc[kRows][G::kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < G::kVecs; ++j) {
      acc[i][j] = accumulate ? G::load(c + i * kNr + j * G::kLanes) : G::zero();
    }
  }
  for (int64_t u = 0; u < k_units; ++u) {
    const unsigned char* rows[2];
#pragma GCC unroll 2
    for (int i = 0; i < G::kUnit; ++i) {
      rows[i] = static_cast<const unsigned char*>(b_rows[u * G::kUnit + i]) + offset;
      if constexpr (G::kFetchesAhead) __builtin_prefetch(rows[i] + 2 * kNr * kBytes, 0, 2);
    }
    typename G::P bv[G::kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < G::kVecs; ++j) {
      const unsigned char* p[2] = {rows[0] + j * G::kLanes * kBytes,
                                   rows[G::kUnit - 1] + j * G::kLanes * kBytes};
      const typename G::V::F units = column_units<G, kSource>(p);
      G::V::store(packed + j * G::kLanes, units);
      bv[j] = G::as_units(units);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename G::P av = G::broadcast(a + i);
#pragma GCC unroll 4
      for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::mac(acc[i][j], av, bv[j]);
    }
    a += G::kMr;
    packed += kNr;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < G::kVecs; ++j) G::store(c + i * kNr + j * G::kLanes, acc[i][j]);
  }
}

template <class G, int kRows, logitless::cpu::PackSource kSource>
void packing_tile_rows(int rows, const float* a, const void* const* b_rows, int64_t offset,
                       int64_t k_units, float* c, bool accumulate, float* packed) {
  if (rows == kRows) {
    return packing_tile<G, kRows, kSource>(a, b_rows, offset, k_units, c, accumulate, packed);
  }
  if constexpr (kRows > 2) {
    return packing_tile_rows<G, kRows - 2, kSource>(rows, a, b_rows, offset, k_units, c, accumulate,
                                                    packed);
  } else if constexpr (kRows == 2) {
    return packing_tile_rows<G, 1, kSource>(rows, a, b_rows, offset, k_units, c, accumulate,
                                            packed);
  }
}

template <class G>
void tile_packing(logitless::cpu::PackSource source, int rows, const void* a,
                  const void* const* b_rows, int64_t offset, int64_t k_units, float* c,
                  bool accumulate, void* packed) {
  with_source<G>(source, [&]<logitless::cpu::PackSource kSource>() {
    packing_tile_rows<G, G::kMr, kSource>(rows, static_cast<const float*>(a), b_rows, offset,
                                          k_units, c, accumulate, static_cast<float*>(packed));
  });
}

}  // namespace
