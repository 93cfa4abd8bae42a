// SPDX-License-Identifier: Apache-2.0
// Every rule about arguments, one function per operator; the message says what came and what is
// allowed. Nothing has been written when one of these fails.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "logitless/result.h"
#include "plan.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

Result<void> check_shape(const Shape& shape);
Result<void> check_types(const ForwardTypes& types);
Result<void> check_types(const GradientTypes& types);
Result<void> check_types(const LossAndGradientTypes& types);
Result<void> check_options(const PlanOptions& options);

Result<void> check(const ForwardPlanData& plan, const ForwardOperands& operands,
                   const ForwardOutputs& outputs, std::span<std::byte> workspace);
Result<void> check(const MergePlanData& plan, std::span<const ShardStatistics> shards,
                   const MergeOutputs& outputs);
Result<void> check(const LossPlanData& plan, const LossOperands& operands,
                   const LossOutputs& outputs);
Result<void> check(const GradientPlanData& plan, const GradientOperands& operands,
                   const GradientOutputs& outputs, std::span<std::byte> workspace);
Result<void> check(const LossAndGradientPlanData& plan, const LossAndGradientOperands& operands,
                   const LossAndGradientOutputs& outputs, std::span<std::byte> workspace);

// A step's arguments where input and grad_input need not have BT rows.
struct StepRows {
  int64_t input = 0;
  const char* input_name = "BT";
  int64_t grad_input = 0;
  const char* grad_input_name = "BT";
};
Result<void> check_step(const Shape& shape, const StepRows& rows, const LossAndGradientTypes& types,
                        const LossAndGradientOperands& operands,
                        const LossAndGradientOutputs& outputs, std::span<std::byte> workspace,
                        int64_t workspace_bytes);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
