// SPDX-License-Identifier: Apache-2.0
#include "executor.h"

#include <algorithm>
#include <array>

#include "stream.h"

namespace logitless::ascend {
namespace {

constexpr uint64_t kWorkspaceAlignment = 64;

Status is_stale_executor() {
  return failure(ACLNN_ERR_INNER,
                 "executor: has run already and was not made repeatable, or is destroyed, or not "
                 "from here");
}

// Where the operands' views begin now.
Status view_addresses(const Registry::Lookup& lookup, const Executor& executor,
                      std::vector<void*>* views) {
  views->reserve(executor.operands.size());
  for (const Operand& operand : executor.operands) {
    const Tensor* const tensor = lookup.find<Tensor>(operand.handle);
    if (tensor == nullptr) {
      return failure(ACLNN_ERR_PARAM_INVALID, operand.name,
                     ": was destroyed, must live until phase 2 returned");
    }
    if (!(tensor->layout == operand.layout)) {
      return failure(ACLNN_ERR_PARAM_INVALID, operand.name,
                     ": was initialised anew with another shape, strides, type or format, must be "
                     "as phase 1 saw it");
    }
    const std::vector<int64_t>& dims = operand.layout.dims;
    if (std::find(dims.begin(), dims.end(), 0) != dims.end()) {
      views->push_back(nullptr);  // nothing there: whatever the address, it is not used
      continue;
    }
    if (tensor->data == nullptr) {
      return failure(ACLNN_ERR_PARAM_NULLPTR, operand.name, ": its data address is null");
    }
    const size_t size = size_of_data_type(operand.layout.dtype);
    const uintptr_t address = reinterpret_cast<uintptr_t>(tensor->data) +
                              static_cast<uintptr_t>(operand.layout.offset) * size;
    if (address % size != 0) {
      return failure(ACLNN_ERR_PARAM_INVALID, operand.name, ": its data address ", tensor->data,
                     " is not a multiple of the ", size, " bytes of an element");
    }
    views->push_back(reinterpret_cast<void*>(address));
  }
  return {};
}

// The core speaks of its own arguments; the client knows the C parameters.
std::string with_parameter_names(std::string message) {
  static constexpr std::array<std::array<const char*, 2>, 5> kNames = {{
      {"masked_target", "maskedTarget"},
      {"target_mask", "targetMask"},
      {"logits_max", "logitsMax"},
      {"sum_exp_logits", "sumExpLogits"},
      {"predicted_logits", "predictedLogits"},
  }};
  for (const auto& [core, parameter] : kNames) {
    const std::string name = core;
    for (size_t at = message.find(name); at != std::string::npos; at = message.find(name, at)) {
      message.replace(at, name.size(), parameter);
    }
  }
  return message;
}

Status phase_2(const char* function, void* workspace, uint64_t workspaceSize, aclOpExecutor* handle,
               aclrtStream stream_handle) {
  if (handle == nullptr) return failure(ACLNN_ERR_PARAM_NULLPTR, "executor: is null");
  std::shared_ptr<Executor> executor;
  std::vector<void*> views;
  // Whatever comes of it, an executor that is not repeatable is used up.
  const Status addresses =
      Registry::instance().with_lock([&](const Registry::Lookup& lookup) -> Status {
        executor = lookup.share<Executor>(handle);
        if (!executor) return is_stale_executor();
        if (!executor->repeatable) lookup.take<Executor>(handle);
        return view_addresses(lookup, *executor, &views);
      });
  if (!executor) return addresses;
  if (std::string(function) != executor->function) {
    return failure(ACLNN_ERR_PARAM_INVALID, "executor: is one of ", executor->function);
  }
  if (workspaceSize > 0 && workspace == nullptr) {
    return failure(ACLNN_ERR_PARAM_NULLPTR,
                   "workspace: is null with workspaceSize = ", workspaceSize);
  }
  if (workspaceSize < executor->workspace_bytes) {
    return failure(ACLNN_ERR_PARAM_INVALID, "workspaceSize: is ", workspaceSize,
                   ", must be at least the ", executor->workspace_bytes,
                   " bytes that phase 1 asked for");
  }
  if (!addresses.ok()) return addresses;
  std::shared_ptr<Stream> stream;
  if (Status status = find_stream(stream_handle, &stream); !status.ok()) {
    return {streams_lost_in_fork() ? ACLNN_ERR_INNER : ACLNN_ERR_RUNTIME_ERROR, status.message};
  }
  if (!executor->bind) return {};

  std::span<std::byte> aligned;
  if (executor->workspace_bytes > 0) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace);
    const uintptr_t skip =
        (kWorkspaceAlignment - begin % kWorkspaceAlignment) % kWorkspaceAlignment;
    aligned = {static_cast<std::byte*>(workspace) + skip,
               static_cast<size_t>(executor->workspace_bytes - (kWorkspaceAlignment - 1))};
  }
  const Status queued =
      stream->enqueue({[function, work = executor->bind(views, aligned)](Stream& self) -> Status {
        const Result<void> result = work(&self.cancel());
        if (result) return {};
        return failure(ACL_ERROR_RT_AICORE_EXCEPTION, function, ": ",
                       with_parameter_names(result.error().message));
      }});
  if (!queued.ok()) return {ACLNN_ERR_RUNTIME_ERROR, queued.message};
  return {};
}

Status set_address(aclOpExecutor* executor, aclTensor* tensor, void* addr) {
  if (executor == nullptr) return failure(ACLNN_ERR_INNER_NULLPTR, "executor: is null");
  if (tensor == nullptr) return failure(ACLNN_ERR_INNER_NULLPTR, "tensor: is null");
  return Registry::instance().with_lock([&](const Registry::Lookup& lookup) -> Status {
    if (lookup.find<Executor>(executor) == nullptr) return is_stale_executor();
    Tensor* const living = lookup.find<Tensor>(tensor);
    if (living == nullptr) {
      return failure(ACLNN_ERR_PARAM_INVALID, "tensor: is destroyed, or not from here");
    }
    living->data = addr;
    return {};
  });
}

Status set_list_address(aclOpExecutor* executor, size_t relativeIndex, aclTensorList* tensors,
                        void* addr) {
  if (executor == nullptr) return failure(ACLNN_ERR_INNER_NULLPTR, "executor: is null");
  if (tensors == nullptr) return failure(ACLNN_ERR_INNER_NULLPTR, "tensors: is null");
  const auto list = Registry::instance().find<TensorList>(tensors);
  if (!list) return failure(ACLNN_ERR_PARAM_INVALID, "tensors: is destroyed, or not from here");
  if (relativeIndex >= list->values.size()) {
    return failure(ACLNN_ERR_PARAM_INVALID, "relativeIndex: is ", relativeIndex,
                   ", must be less than the list's ", list->values.size(), " tensors");
  }
  // The list holds what the client may not change; the tensor itself is the client's.
  return set_address(executor, const_cast<aclTensor*>(list->values[relativeIndex]), addr);
}

aclnnStatus set_address_call(const char* function, aclOpExecutor* executor, aclTensor* tensor,
                             void* addr) {
  return aclnn_call(function, [&] { return set_address(executor, tensor, addr); });
}

aclnnStatus set_list_address_call(const char* function, aclOpExecutor* executor,
                                  size_t relativeIndex, aclTensorList* tensors, void* addr) {
  return aclnn_call(function,
                    [&] { return set_list_address(executor, relativeIndex, tensors, addr); });
}

}  // namespace

Status publish(std::shared_ptr<Executor> executor, int64_t plan_workspace_bytes,
               uint64_t* workspaceSize, aclOpExecutor** out) {
  executor->workspace_bytes =
      plan_workspace_bytes == 0
          ? 0
          : static_cast<uint64_t>(plan_workspace_bytes) + kWorkspaceAlignment - 1;
  const uint64_t bytes = executor->workspace_bytes;
  *out = static_cast<aclOpExecutor*>(Registry::instance().add(std::move(executor)));
  *workspaceSize = bytes;
  return {};
}

aclnnStatus run_phase_2(const char* function, void* workspace, uint64_t workspaceSize,
                        aclOpExecutor* executor, aclrtStream stream) noexcept {
  return aclnn_call(function,
                    [&] { return phase_2(function, workspace, workspaceSize, executor, stream); });
}

}  // namespace logitless::ascend

using namespace logitless::ascend;

extern "C" {

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  return aclnn_call(__func__, [&]() -> Status {
    if (executor == nullptr) return failure(ACLNN_ERR_INNER_NULLPTR, "executor: is null");
    return Registry::instance().with_lock([&](const Registry::Lookup& lookup) -> Status {
      Executor* const living = lookup.find<Executor>(executor);
      if (living == nullptr) return is_stale_executor();
      living->repeatable = true;
      return {};
    });
  });
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  return aclnn_call(__func__, [&]() -> Status {
    if (executor == nullptr) return failure(ACLNN_ERR_INNER_NULLPTR, "executor: is null");
    return Registry::instance().take<Executor>(executor) ? Status() : is_stale_executor();
  });
}

aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, const size_t, aclTensor* tensor,
                                  void* addr) {
  return set_address_call(__func__, executor, tensor, addr);
}

aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, const size_t, aclTensor* tensor,
                                   void* addr) {
  return set_address_call(__func__, executor, tensor, addr);
}

aclnnStatus aclSetTensorAddr(aclOpExecutor* executor, const size_t, aclTensor* tensor, void* addr) {
  return set_address_call(__func__, executor, tensor, addr);
}

aclnnStatus aclSetDynamicInputTensorAddr(aclOpExecutor* executor, size_t,
                                         const size_t relativeIndex, aclTensorList* tensors,
                                         void* addr) {
  return set_list_address_call(__func__, executor, relativeIndex, tensors, addr);
}

aclnnStatus aclSetDynamicOutputTensorAddr(aclOpExecutor* executor, size_t,
                                          const size_t relativeIndex, aclTensorList* tensors,
                                          void* addr) {
  return set_list_address_call(__func__, executor, relativeIndex, tensors, addr);
}

aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor* executor, size_t, const size_t relativeIndex,
                                    aclTensorList* tensors, void* addr) {
  return set_list_address_call(__func__, executor, relativeIndex, tensors, addr);
}

aclnnStatus AclSetInputTensorAddr(aclOpExecutor* executor, const size_t, aclTensor* tensor,
                                  void* addr) {
  return set_address_call(__func__, executor, tensor, addr);
}

aclnnStatus AclSetOutputTensorAddr(aclOpExecutor* executor, const size_t, aclTensor* tensor,
                                   void* addr) {
  return set_address_call(__func__, executor, tensor, addr);
}

aclnnStatus AclSetTensorAddr(aclOpExecutor* executor, const size_t, aclTensor* tensor, void* addr) {
  return set_address_call(__func__, executor, tensor, addr);
}

aclnnStatus AclSetDynamicInputTensorAddr(aclOpExecutor* executor, size_t,
                                         const size_t relativeIndex, aclTensorList* tensors,
                                         void* addr) {
  return set_list_address_call(__func__, executor, relativeIndex, tensors, addr);
}

aclnnStatus AclSetDynamicOutputTensorAddr(aclOpExecutor* executor, size_t,
                                          const size_t relativeIndex, aclTensorList* tensors,
                                          void* addr) {
  return set_list_address_call(__func__, executor, relativeIndex, tensors, addr);
}

aclnnStatus AclSetDynamicTensorAddr(aclOpExecutor* executor, size_t, const size_t relativeIndex,
                                    aclTensorList* tensors, void* addr) {
  return set_list_address_call(__func__, executor, relativeIndex, tensors, addr);
}

}  // extern "C"
