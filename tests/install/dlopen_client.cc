// SPDX-License-Identifier: Apache-2.0
// A client that links nothing: everything comes from dlopen("libopapi.so") and dlsym, as
// frameworks load the operators.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

int main() {
  void* library = dlopen("libopapi.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  const char* const names[] = {
      "aclCreateTensor",
      "aclDestroyTensor",
      "aclGetRecentErrMsg",
      "aclrtCreateStream",
      "InitHugeMemThreadLocal",
      "aclnnFusedLinearOnlineMaxSumGetWorkspaceSize",
      "aclnnFusedLinearOnlineMaxSum",
      "aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize",
      "aclnnFusedCrossEntropyLossWithMaxSum",
      "aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize",
      "aclnnFusedLinearCrossEntropyLossGrad",
  };
  for (const char* name : names) {
    if (dlsym(library, name) == nullptr) {
      std::printf("libopapi.so lacks %s\n", name);
      return 1;
    }
  }
  // A call whose answer is known: a destroyed null tensor is fine, a null out-pointer is not.
  using Destroy = int32_t (*)(const void*);
  using Run = int32_t (*)(void*, uint64_t, void*, void*);
  const auto destroy = reinterpret_cast<Destroy>(dlsym(library, "aclDestroyTensor"));
  const auto run = reinterpret_cast<Run>(dlsym(library, "aclnnFusedCrossEntropyLossWithMaxSum"));
  const int32_t destroyed = destroy(nullptr);
  const int32_t ran = run(nullptr, 0, nullptr, nullptr);
  std::printf("aclDestroyTensor(null) -> %d, phase 2 with a null executor -> %d\n", destroyed, ran);
  return destroyed == 0 && ran == 161001 ? 0 : 1;
}
