// SPDX-License-Identifier: Apache-2.0
#include "logitless/forward.h"

#include "check.h"
#include "forward_pass.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

Result<void> run(const ForwardPlan& plan, const ForwardOperands& operands,
                 const ForwardOutputs& outputs, std::span<std::byte> workspace,
                 const CancelToken* cancel) {
  if (auto ok = check(plan.data(), operands, outputs, workspace); !ok) return ok;
  Stop stop(cancel);
  return ForwardPass(plan.data(), operands, outputs, workspace.data(), stop).run();
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
