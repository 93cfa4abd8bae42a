// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/head.h"

#include <fmt/format.h>

#include <span>
#include <utility>

namespace logitless::train_lm {

int64_t Head::Plan::workspace_bytes() const {
  return split ? split->workspace_bytes() : whole->workspace_bytes();
}

Head::Head(Communicator& ranks, Plan plan)
    : ranks_(&ranks),
      plan_(std::move(plan)),
      workspace_(plan_.workspace_bytes()),
      loss_(static_cast<size_t>(plan_.shape().BT)) {}

Result<Head::Plan> Head::plan(Communicator& ranks, const Shape& shape, const RowRange& rows,
                              const PlanOptions& options) {
  const GradientOutput gradient = {.dtype = DType::f32};
  if (options.with_gradients && options.grad_tolerance > 0) {
    if (ranks.size() > 1) {
      return Error{ErrorKind::invalid_argument,
                   fmt::format("--grad-tolerance is {}, must be 0 on {} ranks: a sparse gradient "
                               "needs the whole vocabulary on one",
                               options.grad_tolerance, ranks.size())};
    }
    LossAndGradientTypes types = {.operand = DType::f32, .multiply = DType::bf16};
    types.grad_tolerance = options.grad_tolerance;
    types.grad_input = types.grad_weight = gradient;
    auto whole = plan_loss_and_gradient(shape, types, {.threads = options.threads});
    if (!whole) return whole.error();
    return Plan{.split = {}, .whole = std::move(whole).value()};
  }
  VocabParallelTypes types = {.operand = DType::f32, .multiply = DType::bf16};
  types.grad_input = types.grad_weight = {};
  if (options.with_gradients) {
    types.grad_input = types.grad_weight = gradient;
    // By name: which one is automatic depends on limits, and a run must not.
    types.strategy = Strategy::one_pass;
  }
  auto split = plan_vocab_parallel_linear_cross_entropy(ranks, shape, rows, types,
                                                        {.threads = options.threads});
  if (!split) return split.error();
  return Plan{.split = std::move(split).value(), .whole = {}};
}

Result<double> Head::run(const float* input, const float* weight,
                         const std::vector<int64_t>& target, double normalizer, uint64_t seed,
                         float* grad_input, float* grad_weight, const CancelToken& cancel) {
  const int64_t BT = plan_.shape().BT, H = plan_.shape().H;
  const int64_t V = plan_.split ? plan_.split->rows().size() : plan_.whole->shape().V;
  const auto& gradients =
      plan_.split ? plan_.split->types().grad_input : plan_.whole->types().grad_input;
  double total = 0;
  LossAndGradientOutputs outputs = {.loss = vector_view(std::span(loss_)), .total = &total};
  if (gradients) {
    outputs.grad_input = matrix_view(grad_input, BT, H);
    outputs.grad_weight = matrix_view(grad_weight, V, H);
  }
  LossAndGradientOperands operands = {.input = matrix_view(input, BT, H),
                                      .weight = matrix_view(weight, V, H),
                                      .target = vector_view(std::span(target)),
                                      .rows = {.ignore_index = kIgnored},
                                      .normalizer = normalizer};
  Result<void> done;
  if (plan_.split) {
    done = logitless::run(*plan_.split, *ranks_, operands, outputs, workspace_.span(), &cancel);
  } else {
    operands.seed = seed;
    outputs.sparse_counts = &counts_;
    done = logitless::run(*plan_.whole, operands, outputs, workspace_.span(), &cancel);
  }
  if (!done) return done.error();
  return total;
}

}  // namespace logitless::train_lm
