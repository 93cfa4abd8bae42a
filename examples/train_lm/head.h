// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cli/host_tensor.h"
#include "logitless/cancel.h"
#include "logitless/parallel/vocab_parallel.h"

namespace logitless::train_lm {

// The loss of a head whose rows are cut over the ranks: this file is all that a program needs of
// the library for it. Operands are fp32 and multiplied in bf16, gradients are fp32.
class Head {
 public:
  // Collective. shape.V: of the whole vocabulary; rows: this rank's; threads: 0 = the library's
  // default. The plan's errors are the same on every rank.
  static Result<VocabParallelPlan> plan(Communicator& ranks, const Shape& shape,
                                        const RowRange& rows, bool with_gradients, int threads);
  // Asks for its memory: std::bad_alloc.
  Head(Communicator& ranks, VocabParallelPlan plan);

  // Collective. Sum over BT tokens of the loss / normalizer, with the same bits on every rank.
  // Tokens whose target is kIgnored do not count. input [BT, H], weight [rows, H], target [BT]; the
  // gradients, of the same shapes, are left alone by a plan without. Where `cancel` fires on one
  // rank, every rank returns ErrorKind::cancelled.
  Result<double> run(const float* input, const float* weight, const std::vector<int64_t>& target,
                     double normalizer, float* grad_input, float* grad_weight,
                     const CancelToken& cancel);

  static constexpr int64_t kIgnored = -1;
  const VocabParallelPlan& the_plan() const { return plan_; }
  const std::vector<float>& loss() const { return loss_; }  // of every token, of the last run

 private:
  Communicator* ranks_;
  VocabParallelPlan plan_;
  cli::Buffer workspace_;
  std::vector<float> loss_;
};

}  // namespace logitless::train_lm
