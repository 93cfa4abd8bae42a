// SPDX-License-Identifier: Apache-2.0
#include "check.h"
#include "gradient_pass.h"
#include "logitless/gradient.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

Result<void> run(const GradientPlan& plan, const GradientOperands& operands,
                 const GradientOutputs& outputs, std::span<std::byte> workspace,
                 const CancelToken* cancel) {
  if (auto ok = check(plan.data(), operands, outputs, workspace); !ok) return ok;
  Stop stop(cancel);
  return GradientPass(plan.data(), operands, outputs, workspace.data(), stop).run();
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
