// SPDX-License-Identifier: Apache-2.0
// Statistics of all ranks become one row's; what every schedule over ranks shares.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "parallel/plan.h"
#include "step_tokens.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

struct MergedRows {
  float* max;
  float* sum;
  float* low;
  float* predicted;
};

// Rows [begin, end) of of_rank(r, 0 .. 2): logits_max, sum_exp_logits, predicted_logits of rank r;
// in rank order: the same operations on every rank. Row i is token token_of(i).
template <class OfRank, class TokenOf>
void merge_ranks(const VocabParallelPlanData& p, const ConstVectorView& targets,
                 const StepTokens& tokens, int64_t begin, int64_t end, const MergedRows& to,
                 const OfRank& of_rank, const TokenOf& token_of) {
  std::fill(to.max + begin, to.max + end, -std::numeric_limits<float>::infinity());
  for (float* zeros : {to.sum, to.low, to.predicted}) std::fill(zeros + begin, zeros + end, 0.0f);
  for (int64_t r = 0; r < p.ranks; ++r) {
    p.kernels->merge_rows(to.max + begin, to.sum + begin, to.low + begin, of_rank(r, 0) + begin,
                          of_rank(r, 1) + begin, end - begin);
  }
  for (int64_t i = begin; i < end; ++i) to.sum[i] += to.low[i];
  for (int64_t r = 0; r < p.ranks; ++r) {
    const RowRange& owned = p.cover[static_cast<size_t>(r)];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = token_of(i);
      const int64_t target = integer_at(targets, b);
      if (target < owned.begin || target >= owned.end || !tokens.counts(b)) continue;
      const float local = of_rank(r, 0)[i];
      // A shard of -inf logits owns the target: with any finite logit elsewhere p is 0.
      to.predicted[i] = of_rank(r, 2)[i] + (local == to.max[i] ? 0.0f : local - to.max[i]);
    }
  }
}

inline constexpr const char* kStepCancelled = "loss_and_gradient: cancelled";

// On every rank the same error where one was cancelled.
template <class WasCancelled>
Result<void> cancelled_somewhere(int64_t ranks, const WasCancelled& was_cancelled) {
  int64_t first = 0, count = 0;
  for (int64_t r = ranks - 1; r >= 0; --r) {
    if (!was_cancelled(r)) continue;
    first = r;
    ++count;
  }
  if (count == 0) return {};
  const std::string who = count == ranks ? "" : "rank " + std::to_string(first) + ": ";
  return Error{ErrorKind::cancelled, who + kStepCancelled};
}

// out[row] (+)= values, rounded once.
inline void add_rounded_row(const cpu::Kernels& k, const MatrixView& out, int64_t row,
                            const float* values, int64_t columns, bool accumulate) {
  constexpr int64_t kBlock = 512;
  alignas(64) float sums[kBlock];
  for (int64_t h = 0; h < columns; h += kBlock) {
    const int64_t n = std::min(kBlock, columns - h);
    if (accumulate) {
      load_row(k, out, row, h, n, sums);
      for (int64_t i = 0; i < n; ++i) sums[i] += values[h + i];
    }
    store_row(k, out, row, h, n, accumulate ? sums : values + h);
  }
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
