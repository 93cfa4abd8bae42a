// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/head.h"

#include <span>
#include <utility>

namespace logitless::train_lm {

Head::Head(Communicator& ranks, VocabParallelPlan plan)
    : ranks_(&ranks),
      plan_(std::move(plan)),
      workspace_(plan_.workspace_bytes()),
      loss_(static_cast<size_t>(plan_.shape().BT)) {}

Result<VocabParallelPlan> Head::plan(Communicator& ranks, const Shape& shape, const RowRange& rows,
                                     const PlanOptions& options) {
  VocabParallelTypes types = {.operand = DType::f32, .multiply = DType::bf16};
  types.grad_input = types.grad_weight = {};
  if (options.with_gradients) {
    types.grad_input = types.grad_weight = GradientOutput{.dtype = DType::f32};
    types.grad_tolerance = options.grad_tolerance;
    // By name: which one is automatic depends on limits, and a run must not.
    types.strategy = Strategy::one_pass;
  }
  return plan_vocab_parallel_linear_cross_entropy(ranks, shape, rows, types,
                                                  {.threads = options.threads});
}

Result<double> Head::run(const float* input, const float* weight,
                         const std::vector<int64_t>& target, double normalizer, uint64_t seed,
                         float* grad_input, float* grad_weight, const CancelToken& cancel) {
  const int64_t BT = plan_.shape().BT, V = plan_.rows().size(), H = plan_.shape().H;
  double total = 0;
  LossAndGradientOutputs outputs = {.loss = vector_view(std::span(loss_)), .total = &total};
  if (plan_.types().grad_input) {
    outputs.grad_input = matrix_view(grad_input, BT, H);
    outputs.grad_weight = matrix_view(grad_weight, V, H);
    if (plan_.types().grad_tolerance > 0) outputs.sparse_counts = &counts_;
  }
  const LossAndGradientOperands operands = {.input = matrix_view(input, BT, H),
                                            .weight = matrix_view(weight, V, H),
                                            .target = vector_view(std::span(target)),
                                            .rows = {.ignore_index = kIgnored},
                                            .normalizer = normalizer,
                                            .seed = seed};
  const Result<void> done =
      logitless::run(plan_, *ranks_, operands, outputs, workspace_.span(), &cancel);
  if (!done) return done.error();
  return total;
}

}  // namespace logitless::train_lm
