// SPDX-License-Identifier: Apache-2.0
// What a block of tokens goes through in one pass once its statistics are complete: exponentials
// held by its forward -> grad_weight, grad_input. Of one call, and of a vocabulary split over
// ranks, where the statistics are those of all ranks.
#pragma once

#include <cstdint>

#include "forward_pass.h"
#include "gradient_pass.h"
#include "step_tokens.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// The factors are segment maxima until take_gradient_rows().
inline GradientPass::Held held_by(const ForwardPass& forward, const ForwardPlanData& plan) {
  return {.tiles = forward.region<std::byte>(plan.held_tiles),
          .tile_bytes = plan.held_tile_bytes(),
          .vocab_panels = plan.vocab_panels(),
          .type = *plan.held,
          .factors = forward.region<float>(plan.partial_max),
          .factor_stride = plan.token_block};
}

// What the gradient needs of each row of the block, from run_max and run_sum of its forward.
inline void take_gradient_rows(const Team& team, const ForwardPlanData& forward_plan,
                               const GradientPlanData& gradient_plan, const ForwardPass& forward,
                               const GradientPass& gradient, const StepTokens& tokens,
                               int64_t rows) {
  const cpu::Kernels& k = *forward_plan.target.kernels;
  const int64_t* index = forward.region<int64_t>(forward_plan.row_index);
  const int64_t* local = forward.region<int64_t>(forward_plan.local_target);
  const float* max = forward.region<float>(forward_plan.run_max);
  const float* sum = forward.region<float>(forward_plan.run_sum);
  const float* predicted = forward.region<float>(forward_plan.predicted);
  const Range mine = team.part(rows);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t b = index[r];
    cpu::GradRow row{};
    row.grad = static_cast<float>(tokens.weight(b));
    row.target = local[r];
    row.inv_sum = 1.0f / sum[r];
    k.softmax(predicted + r, 1, max[r], row.inv_sum, &row.target_p);
    gradient.set_f16_scale(row);
    gradient.region<cpu::GradRow>(gradient_plan.row_params)[r] = row;
    gradient.region<int64_t>(gradient_plan.row_index)[r] = b;
  }
  // Segment maxima become factors, in place.
  const int64_t segments = ceil_div(forward_plan.shape.V, cpu::kSegmentColumns);
  for (int64_t s = 0; s < segments; ++s) {
    float* factors = forward.region<float>(forward_plan.partial_max) + s * forward_plan.token_block;
    for (int64_t r = mine.begin; r < mine.end; ++r) factors[r] -= max[r];
    k.exp(factors + mine.begin, mine.size(), factors + mine.begin);
    for (int64_t r = mine.begin; r < mine.end; ++r) factors[r] *= 1.0f / sum[r];
  }
}

// Both products of a block, number `block`, whose rows were taken and are behind a barrier. False
// when the call is to be left.
inline bool add_block(const Team& team, const GradientPlanData& plan, GradientPass& gradient,
                      int64_t block, int64_t rows, GradientPass::Cell& cell) {
  cell.token_index = block;
  cell.tokens = rows;
  if (plan.vocab_chunk < plan.shape.V) cell.vocab_index = -1;
  gradient.pack_tokens(team, cell);
  for (int64_t chunk = 0; chunk < cell.vocab_chunks; ++chunk) {
    if (!gradient.one_cell(team, chunk, cell)) return false;
  }
  return true;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
