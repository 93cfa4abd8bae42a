// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "logitless/parallel/vocab_parallel.h"
#include "parallel/agreement.h"
#include "plan.h"
#include "sparse_plan.h"
#include "team.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

struct VocabParallelPlanData {
  Shape shape;  // V of the whole vocabulary
  int ranks = 1;
  int rank = 0;
  std::vector<RowRange> cover;  // the vocabulary's rows, by rank
  RowRange slice;               // this rank's tokens, where they are sliced
  VocabParallelTypes types;
  LossAndGradientTypes step;  // what the arguments of a step are checked against
  int64_t id = 0;             // hash of what the ranks agreed on: all of them run the same plan
  int64_t chunk_tokens = 0;   // even
  int64_t most_chunks = 1;
  int threads = 1;
  bool one_pass = false;
  std::string why;
  // One pass: a chunk is a block. The plan's shape is this rank's, its grad_input fp32.
  LossAndGradientPlanData step_plan;
  // A sparse gradient: rows that are not flat, then those that are, which add to their grad_weight.
  std::optional<SparsePlanData> sparse;
  LossAndGradientPlanData after_plan;
  // Recompute: the operators.
  std::optional<ForwardPlan> forward;
  // grad_input of all tokens in fp32, of which one chunk's rows have a gradient at a time. The
  // first chunk finds grad_weight as the caller left it, the next ones add to it.
  std::optional<GradientPlan> first_gradient, next_gradient;
  const cpu::Kernels* kernels = nullptr;

  const RowRange& rows() const { return cover[static_cast<size_t>(rank)]; }
  RowRange slice_of(int64_t of_rank) const {
    const Range part = split(shape.BT, ranks, of_rank);
    return {part.begin, part.end};
  }
  int64_t longest_slice() const { return ceil_div(shape.BT, ranks); }
  bool gradients() const { return types.grad_input || types.grad_weight; }
  bool input_is_sliced() const { return types.input_rows == TokenRows::slice; }
  bool scatters() const { return types.grad_input_rows == TokenRows::slice; }
  // 16-bit rows of grad_weight that more than one chunk adds to are summed in fp32 beside it.
  bool sums_grad_weight_apart() const {
    return !one_pass && most_chunks > 1 && types.grad_weight &&
           types.grad_weight->dtype != DType::f32;
  }
  // Chunks of sliced tokens have rows of every rank, which are brought together to be sent. In one
  // pass every chunk is computed where it is sent from.
  bool copies_chunks() const {
    return types.grad_input && (one_pass || (scatters() && most_chunks > 1));
  }

  // What a rank sends to all others in the forward: a header, then logits_max, sum_exp_logits and
  // predicted_logits of every token, or of a block's. The header is a statement; in one pass,
  // whether this rank was cancelled.
  int64_t header_bytes() const {
    return one_pass ? kAlignment : static_cast<int64_t>(sizeof(Statement));
  }
  int64_t block_bytes(int64_t tokens) const {
    return header_bytes() + round_up(3 * tokens * 4, kAlignment);
  }
  int64_t most_block_bytes() const { return block_bytes(one_pass ? most_chunk_rows() : shape.BT); }
  int64_t input_row_bytes() const { return shape.H * size_of(types.operand); }
  int64_t input_slice_bytes() const {
    return round_up(longest_slice() * input_row_bytes(), kAlignment);
  }
  // Rows of a chunk, at most: in one pass what was asked for, else half a chunk more; and what
  // cutting every slice adds.
  int64_t most_chunk_rows() const {
    const int64_t slack = scatters() && types.grad_input ? ranks : 0;
    return std::min(shape.BT, chunk_tokens + (one_pass ? 0 : chunk_tokens / 2 + ranks) + slack);
  }
  int64_t regions() const { return most_chunks > 1 ? 2 : 1; }  // of chunks, by turns

  // Workspace offsets in bytes.
  int64_t statements = 0;                         // [ranks]
  int64_t input_mine = 0, input_all = 0;          // one slice; all BT rows
  int64_t block[2] = {0, 0}, blocks[2] = {0, 0};  // one rank's; [ranks]
  int64_t target_mask = 0, masked_target = 0;     // packed; [BT] of the target's type
  int64_t logits_max = 0, sum_exp_logits = 0, sum_low = 0, predicted_logits = 0;  // [BT] f32
  int64_t active = 0;                           // [BT] i64: rows with a gradient, ascending
  int64_t slice_starts = 0;                     // [ranks + 1] i64, in `active`
  int64_t counts = 0;                           // [ranks] i64
  int64_t output_rows = 0;                      // [most_chunk_rows()] i64: 0, 1, ...
  int64_t merged_predicted = 0;                 // [most_chunk_rows()] f32
  int64_t grad = 0;                             // [BT] f32, of one chunk
  int64_t grad_input = 0;                       // [BT, H] f32
  int64_t grad_weight = 0;                      // [V of this rank, H] f32
  int64_t send[2] = {0, 0};                     // [most_chunk_rows(), H] f32
  int64_t received[2] = {0, 0};                 // [longest_slice(), H] f32
  int64_t kinds = 0, sparse_rows = 0;           // [BT] RowKind, i64
  int64_t sparse_block = 0, sparse_blocks = 0;  // one rank's; [ranks]
  int64_t sampled_max = 0, late = 0;            // of a block, f32, u8
  int64_t operators = 0;                        // workspace of the operators
  int64_t workspace_bytes = 0;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
