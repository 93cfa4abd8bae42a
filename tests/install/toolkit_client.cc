// SPDX-License-Identifier: Apache-2.0
// The loss of two tokens through the C face, as a client of the toolkit folder writes it.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"

#define CHECK(call)                                                  \
  do {                                                               \
    const int status = (call);                                       \
    if (status != 0) {                                               \
      const char* text = aclGetRecentErrMsg();                       \
      std::printf("%s -> %d %s\n", #call, status, text ? text : ""); \
      return 1;                                                      \
    }                                                                \
  } while (0)

int main() {
  CHECK(aclInit(nullptr));
  CHECK(aclrtSetDevice(0));
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream));

  const std::vector<float> sum = {2.0f, 4.0f};
  const std::vector<float> predicted = {-1.0f, 0.0f};
  const int64_t shape[] = {2};
  const int64_t stride[] = {1};
  void* device[4] = {nullptr, nullptr, nullptr, nullptr};
  aclTensor* tensor[4] = {nullptr, nullptr, nullptr, nullptr};
  const std::vector<float> max = {0.0f, 0.0f};
  const float* host[3] = {max.data(), sum.data(), predicted.data()};
  const size_t bytes = 2 * sizeof(float);
  for (int i = 0; i < 4; ++i) {
    CHECK(aclrtMalloc(&device[i], bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    if (i < 3) CHECK(aclrtMemcpy(device[i], bytes, host[i], bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    tensor[i] = aclCreateTensor(shape, 1, ACL_FLOAT, stride, 0, ACL_FORMAT_ND, shape, 1, device[i]);
  }

  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  CHECK(aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(tensor[0], tensor[1], tensor[2], 0.0f,
                                                             nullptr, nullptr, nullptr, tensor[3],
                                                             nullptr, &workspace_size, &executor));
  void* workspace = nullptr;
  if (workspace_size > 0) {
    CHECK(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST));
  }
  CHECK(aclnnFusedCrossEntropyLossWithMaxSum(workspace, workspace_size, executor, stream));
  CHECK(aclrtSynchronizeStream(stream));

  float loss[2] = {0, 0};
  CHECK(aclrtMemcpy(loss, bytes, device[3], bytes, ACL_MEMCPY_DEVICE_TO_HOST));
  for (int i = 0; i < 4; ++i) {
    CHECK(aclDestroyTensor(tensor[i]));
    CHECK(aclrtFree(device[i]));
  }
  if (workspace != nullptr) CHECK(aclrtFree(workspace));
  CHECK(aclrtDestroyStream(stream));
  CHECK(aclrtResetDevice(0));
  CHECK(aclFinalize());

  const double expected[2] = {std::log(2.0) + 1.0, std::log(4.0)};
  std::printf("loss %.6f %.6f, expected %.6f %.6f\n", static_cast<double>(loss[0]),
              static_cast<double>(loss[1]), expected[0], expected[1]);
  return std::fabs(loss[0] - expected[0]) < 1e-6 && std::fabs(loss[1] - expected[1]) < 1e-6 ? 0 : 1;
}
