// SPDX-License-Identifier: Apache-2.0
// A product of little depth whose rows go straight to memory: grad_weight of few tokens. Its tiles
// are [vocabulary][H], as the output lies, and end after a few units of k, so that turning them on
// the way out (softmax_tile-inl.h, store_transposed) would cost more than the product.
//
// Arithmetic (AVX-512, 11 x 32): per unit 2 loads, 11 broadcasts, 22 multiply-adds; for 14 tokens 7
// units, 77 cycles, and then 11 lines are rounded and written.

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/softmax_tile-inl.h"

namespace {

// One whole row of a tile, rounded once.
template <class G>
[[gnu::always_inline]] inline void store_tile_row(logitless::DType type, unsigned char* p,
                                                  const typename G::F* row) {
  if constexpr (requires { G::store_row_bf16(p, row); }) {
    if (type == logitless::DType::bf16) return G::store_row_bf16(p, row);
  }
  const int64_t bytes = type == logitless::DType::f32 ? 4 : 2;
#pragma GCC unroll 8
  for (int j = 0; j < G::kVecs; ++j) {
    store_lanes<typename G::V>(type, p + j * G::kLanes * bytes, row[j], G::kLanes);
  }
}

// The same past the caches, to whole lines of 64 bytes.
template <class G>
[[gnu::always_inline]] inline void stream_tile_row(logitless::DType type, unsigned char* p,
                                                   const typename G::F* row) {
  using V = typename G::V;
  if constexpr (requires { G::stream_row_bf16(p, row); }) {
    if (type == logitless::DType::bf16) return G::stream_row_bf16(p, row);
  }
  if (type == logitless::DType::bf16) {
#pragma GCC unroll 4
    for (int j = 0; j < G::kVecs; j += 2) {
      V::stream_bf16(p + j * G::kLanes * 2, row[j], row[j + 1]);
    }
    return;
  }
  if (type == logitless::DType::f16) return store_tile_row<G>(type, p, row);
#pragma GCC unroll 8
  for (int j = 0; j < G::kVecs; ++j) {
    V::stream(reinterpret_cast<float*>(p) + j * G::kLanes, row[j]);
  }
}

// kRows rows of one panel. The multiply-adds of gemm_tile: one chain per element, ascending k.
template <class G, int kRows>
[[gnu::noinline]] void product_tile(const float* a, const float* b, int64_t k_units, int rows,
                                    int columns, logitless::DType type,
                                    logitless::cpu::RowsMode mode, unsigned char* out,
                                    int64_t out_row_bytes) {
  using V = typename G::V;
  constexpr int kNr = G::kLanes * G::kVecs;
  typename G::F acc[kRows][G::kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::zero();
  }
  if (mode == logitless::cpu::RowsMode::accumulate) {
    alignas(64) float lanes[kRows][kNr] = {};
    for (int i = 0; i < rows; ++i) {
      load_values<V>(type, out + i * out_row_bytes, columns, lanes[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::load(lanes[i] + j * G::kLanes);
    }
  }
  for (int64_t u = 0; u < k_units; ++u) {
    typename G::P bv[G::kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < G::kVecs; ++j) bv[j] = G::load_b(b + j * G::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename G::P av = G::broadcast(a + i);
#pragma GCC unroll 8
      for (int j = 0; j < G::kVecs; ++j) acc[i][j] = G::mac(acc[i][j], bv[j], av);
    }
    a += kNr;
    b += kNr;
  }
  if (rows == kRows && columns == kNr && mode == logitless::cpu::RowsMode::past_caches) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) stream_tile_row<G>(type, out + i * out_row_bytes, acc[i]);
    return;
  }
  if (rows == kRows && columns == kNr) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) store_tile_row<G>(type, out + i * out_row_bytes, acc[i]);
    return;
  }
  alignas(64) float lanes[kNr];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) break;
#pragma GCC unroll 8
    for (int j = 0; j < G::kVecs; ++j) G::store(lanes + j * G::kLanes, acc[i][j]);
    store_values<V>(type, lanes, columns, out + i * out_row_bytes);
  }
}

// nr rows in the fewest blocks that the tile's registers hold, as even as possible.
template <class G>
void product_rows(const void* a, const void* b, int64_t k_units, int rows, int64_t columns,
                  logitless::DType type, logitless::cpu::RowsMode mode, void* out,
                  int64_t out_row_bytes) {
  constexpr int kNr = G::kLanes * G::kVecs;
  constexpr int kBlocks = (kNr + G::kMr - 1) / G::kMr;
  constexpr int kRows = (kNr + kBlocks - 1) / kBlocks;
  constexpr int kLast = kNr - (kBlocks - 1) * kRows;
  const auto* panel = static_cast<const float*>(b);
  const int64_t bytes = type == logitless::DType::f32 ? 4 : 2;
  for (int64_t c0 = 0; c0 < columns; c0 += kNr, panel += k_units * kNr) {
    const auto width = static_cast<int>(columns - c0 < kNr ? columns - c0 : kNr);
    for (int r0 = 0; r0 < rows; r0 += kRows) {
      const auto* units = static_cast<const float*>(a) + r0;
      auto* to = static_cast<unsigned char*>(out) + r0 * out_row_bytes + c0 * bytes;
      if (r0 + kRows <= kNr) {
        product_tile<G, kRows>(units, panel, k_units, rows - r0 < kRows ? rows - r0 : kRows, width,
                               type, mode, to, out_row_bytes);
      } else {
        product_tile<G, kLast>(units, panel, k_units, rows - r0 < kLast ? rows - r0 : kLast, width,
                               type, mode, to, out_row_bytes);
      }
    }
  }
  if (mode == logitless::cpu::RowsMode::past_caches) G::V::publish();
}

}  // namespace
