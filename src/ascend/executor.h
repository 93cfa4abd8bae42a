// SPDX-License-Identifier: Apache-2.0
// What phase 1 leaves for phase 2, and phase 2 itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aclnn/acl_meta.h"
#include "handles.h"
#include "logitless/cancel.h"
#include "logitless/result.h"
#include "status.h"
#include "tensor.h"

namespace logitless::ascend {

// A tensor as phase 1 saw it. Phase 2 asks the living tensor for nothing but its address.
struct Operand {
  const char* name;  // the C parameter's
  const aclTensor* handle;
  TensorLayout layout;
};

using Work = std::function<Result<void>(const CancelToken*)>;

struct Executor {
  static constexpr HandleKind kKind = HandleKind::executor;
  const char* function = nullptr;  // the phase 2 that may run it
  uint64_t workspace_bytes = 0;    // what phase 1 asked for, alignment included
  std::vector<Operand> operands;
  // Where the operands' views begin now, in their order -> what to run; no function: nothing to
  // run.
  std::function<Work(std::span<void* const> views, std::span<std::byte> workspace)> bind;
  bool repeatable = false;  // read and written with the registry locked
};

// Gives the client an executor that asks for the plan's workspace, wherever that will begin.
Status publish(std::shared_ptr<Executor> executor, int64_t plan_workspace_bytes,
               uint64_t* workspaceSize, aclOpExecutor** out);

// The body of every phase 2.
aclnnStatus run_phase_2(const char* function, void* workspace, uint64_t workspaceSize,
                        aclOpExecutor* executor, aclrtStream stream) noexcept;

}  // namespace logitless::ascend
