// SPDX-License-Identifier: Apache-2.0
// Logits of few tokens: weight is read once, as it lies in memory, without being packed into panels
// (cpu/stream_tile-inl.h). At most a segment of the vocabulary at a time.
#pragma once

#include <algorithm>
#include <bit>

#include "cpu/constants.h"
#include "plan.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// The `count` rows of weight from v on, at most a segment, in groups of `group`: those beyond
// repeat the last one. multiply(rows, number, k0, k, first): of `number` rows that begin `first`
// after v, the k elements from k0 on.
template <class Multiply>
void for_weight_rows(const ConstMatrixView& m, int64_t v, int count, int group, Multiply multiply) {
  const void* rows[cpu::kSegmentColumns];
  if (m.col_stride == 1 || m.cols <= 1) {
    const auto number = static_cast<int>(round_up(count, group));
    for (int i = 0; i < number; ++i) rows[i] = at(m, v + std::min(i, count - 1), 0);
    multiply(rows, number, 0, m.cols, 0);
    return;
  }
  constexpr int kMaxGroup = 32;
  constexpr int64_t kBlock = 128;  // even: a pair never straddles two blocks
  alignas(64) std::byte gathered[kMaxGroup][kBlock * 4];
  for (int first = 0; first < count; first += group) {
    const int present = std::min(group, count - first);
    for (int i = 0; i < group; ++i) rows[i] = gathered[std::min(i, present - 1)];
    for (int64_t k0 = 0; k0 < m.cols; k0 += kBlock) {
      const int64_t k = std::min(kBlock, m.cols - k0);
      for (int i = 0; i < present; ++i) gather(m, v + first + i, k0, k, gathered[i]);
      multiply(rows, group, k0, k, first);
    }
  }
}

// Logits of `columns` vocabulary rows from v0 on -> tiles [panel of nr][few.width][nr], which
// stand at the beginning of `own` (few.own_bytes()). tokens: one panel [k_units][few.width].
inline float* few_logits(const Target& target, const FewTokens& few, const ConstMatrixView& weight,
                         const float* tokens, int64_t v0, int columns, std::byte* own) {
  const cpu::GemmKernels& g = *target.gemm;
  const int width = few.width;
  auto* tiles = reinterpret_cast<float*>(own);
  const auto tokens_from = [&](int64_t k0) { return tokens + k0 / g.k_unit * width; };
  if (few.vocab_in_lanes(g)) {
    for_weight_rows(weight, v0, columns, g.nr,
                    [&](const void* const* rows, int count, int64_t k0, int64_t k, int first) {
                      g.stream_vocab(target.source, rows, count, k, tokens_from(k0), width,
                                     tiles + int64_t{first} * width, k0 > 0);
                    });
    return tiles;
  }
  auto* logits = reinterpret_cast<float*>(own + few.logits());  // [column][token]
  for_weight_rows(weight, v0, columns, g.stream_rows[width / g.lanes - 1],
                  [&](const void* const* rows, int count, int64_t k0, int64_t k, int first) {
                    g.stream_tokens(target.source, rows, count, k, tokens_from(k0), width,
                                    logits + int64_t{first} * width, k0 > 0, own + few.staged());
                  });
  // Transposed in squares, as larger batches see them: the same bits.
  for (int v = 0; v < columns; v += g.nr) {
    target.kernels->transpose(logits + int64_t{v} * width, g.nr, width, tiles + int64_t{v} * width,
                              g.nr);
  }
  return tiles;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
