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
  struct PlanOptions {
    bool with_gradients = true;
    float grad_tolerance = 0;  // of a sparse gradient; 0 = exact
    int threads = 0;           // 0 = the library's default
  };
  // Collective. shape.V: of the whole vocabulary; rows: this rank's. Errors are the same on every
  // rank.
  static Result<VocabParallelPlan> plan(Communicator& ranks, const Shape& shape,
                                        const RowRange& rows, const PlanOptions& options);
  // Asks for its memory: std::bad_alloc.
  Head(Communicator& ranks, VocabParallelPlan plan);

  // Collective. Sum over BT tokens of the loss / normalizer, with the same bits on every rank.
  // Tokens whose target is kIgnored do not count. input [BT, H], weight [rows, H], target [BT]; the
  // gradients, of the same shapes, are left alone by a plan without. seed: of a sparse gradient, a
  // new one for every step. Where `cancel` fires on one rank, every rank returns
  // ErrorKind::cancelled.
  Result<double> run(const float* input, const float* weight, const std::vector<int64_t>& target,
                     double normalizer, uint64_t seed, float* grad_input, float* grad_weight,
                     const CancelToken& cancel);

  static constexpr int64_t kIgnored = -1;
  const VocabParallelPlan& the_plan() const { return plan_; }
  // Of the last run; of sparse_counts, kept and elements are those of this rank's rows.
  const std::vector<float>& loss() const { return loss_; }  // of every token
  const SparseCounts& sparse_counts() const { return counts_; }

 private:
  Communicator* ranks_;
  VocabParallelPlan plan_;
  cli::Buffer workspace_;
  std::vector<float> loss_;
  SparseCounts counts_;
};

}  // namespace logitless::train_lm
