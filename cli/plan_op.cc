// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_op.h"

namespace logitless::cli {
namespace {

template <typename Plan>
Result<PlanSummary> summary(const std::string& op, const Result<Plan>& plan) {
  if (!plan) return plan.error();
  return PlanSummary{.op = op,
                     .shape = plan->shape(),
                     .isa = plan->isa(),
                     .threads = plan->threads(),
                     .workspace_bytes = plan->workspace_bytes(),
                     .strategy = {},
                     .text = plan->describe()};
}

}  // namespace

Result<PlanSummary> plan_op(const PlanRequest& request, const PlanOptions& options) {
  if (request.op == "forward") {
    ForwardTypes types;
    types.operand = request.dtype;
    types.logits_rounding = request.rounding;
    return summary(request.op, plan_forward(request.shape, types, options));
  }
  std::optional<GradientOutput> grad_input;
  std::optional<GradientOutput> grad_weight;
  if (request.grad_input) grad_input = GradientOutput{.dtype = request.dtype};
  if (request.grad_weight) grad_weight = GradientOutput{.dtype = request.dtype};
  if (request.op == "one-pass") {
    LossAndGradientTypes types;
    types.operand = request.dtype;
    types.grad_tolerance = request.grad_tolerance;
    types.grad_input = grad_input;
    types.grad_weight = grad_weight;
    const auto plan = plan_loss_and_gradient(request.shape, types, options);
    Result<PlanSummary> result = summary(request.op, plan);
    if (result) {
      result->strategy = plan->strategy() == Strategy::one_pass ? "one_pass" : "recompute";
    }
    return result;
  }
  GradientTypes types;
  types.operand = request.dtype;
  types.mode =
      request.op == "gradient" ? GradientMode::memory_saving : GradientMode::high_performance;
  types.logits_rounding = request.rounding;
  types.grad_tolerance = request.grad_tolerance;
  types.grad_input = grad_input;
  types.grad_weight = grad_weight;
  return summary(request.op, plan_gradient(request.shape, types, options));
}

}  // namespace logitless::cli
