// SPDX-License-Identifier: Apache-2.0
// A client that knows only the toolkit folder. C++11. All three operators: fp16 and bf16, int32 and
// int64 targets, packed and BOOL masks, both modes of the gradient, checked against float64.
//
// Compiled plainly it links -lopapi_math -lopapi_nn -lascendcl -lnnopbase. With -DCLIENT_DLOPEN it
// links none of them: every function is looked up in libopapi.so, as plug-ins do.
#include <cmath>
#include <cstring>
#include <iostream>
#include <vector>

#include "acl/acl.h"
#include "aclnn/opdev/bfloat16.h"
#include "aclnn/opdev/fp16_t.h"
#include "aclnn_fused_linear_cross_entropy_loss_grad.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"

#ifdef CLIENT_DLOPEN
#include <dlfcn.h>

static void* symbol(const char* name) {
  static void* const library = dlopen("libopapi.so", RTLD_LAZY);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) {
    const char* why = dlerror();
    printf("FAILED: no %s in libopapi.so: %s\n", name, why == nullptr ? "" : why);
    exit(1);
  }
  return found;
}
#define API(function) (reinterpret_cast<decltype(&function)>(symbol(#function)))
#else
#define API(function) (function)
#endif

static int failures = 0;

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      const char* text = API(aclGetRecentErrMsg)();                              \
      printf("FAILED line %d: %s %s\n", __LINE__, #condition, text ? text : ""); \
      ++failures;                                                                \
    }                                                                            \
  } while (0)

// A tensor in device memory, filled from and read back into host memory.
struct DeviceTensor {
  aclTensor* tensor;
  void* address;
  size_t bytes;

  DeviceTensor(aclDataType type, const std::vector<int64_t>& shape, size_t item, const void* host)
      : tensor(nullptr), address(nullptr), bytes(item) {
    for (size_t i = 0; i < shape.size(); ++i) bytes *= static_cast<size_t>(shape[i]);
    CHECK(API(aclrtMalloc)(&address, bytes, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
    if (host != nullptr) {
      CHECK(API(aclrtMemcpy)(address, bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE) ==
            ACL_SUCCESS);
    }
    tensor = API(aclCreateTensor)(shape.data(), shape.size(), type, nullptr, 0,
                                  aclFormat::ACL_FORMAT_ND, shape.data(), shape.size(), address);
    CHECK(tensor != nullptr);
  }
  ~DeviceTensor() {
    CHECK(API(aclDestroyTensor)(tensor) == 0);
    CHECK(API(aclrtFree)(address) == ACL_SUCCESS);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  template <typename T>
  std::vector<T> read() const {
    std::vector<T> host(bytes / sizeof(T));
    CHECK(API(aclrtMemcpy)(host.data(), bytes, address, bytes, ACL_MEMCPY_DEVICE_TO_HOST) ==
          ACL_SUCCESS);
    return host;
  }
};

// Workspace, phase 2, synchronise.
template <typename Launch>
void finish(Launch launch, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream) {
  void* workspace = nullptr;
  if (workspace_size > 0) {
    CHECK(API(aclrtMalloc)(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
  }
  CHECK(launch(workspace, workspace_size, executor, stream) == 0);
  CHECK(API(aclrtSynchronizeStream)(stream) == ACL_SUCCESS);
  if (workspace != nullptr) CHECK(API(aclrtFree)(workspace) == ACL_SUCCESS);
}

static const int64_t kTokens = 13, kVocab = 150, kHidden = 40, kStart = 50;

template <typename T>
double largest_difference(const std::vector<T>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double d = std::fabs(static_cast<double>(static_cast<float>(a[i])) - b[i]);
    if (!(d <= largest)) largest = d;  // NaN too
  }
  return largest;
}

template <typename Element, typename Index>
void run_one(aclDataType type, aclDataType index_type, bool bool_mask, bool softmax_given,
             double unit, aclrtStream stream) {
  std::vector<Element> input(kTokens * kHidden), weight(kVocab * kHidden);
  std::vector<double> x(input.size()), w(weight.size());
  unsigned state = 12345;
  for (size_t i = 0; i < input.size() + weight.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(static_cast<int>(state >> 27) - 16) / 32.0F;
    if (i < input.size()) {
      input[i] = Element(value);
      x[i] = static_cast<float>(input[i]);
    } else {
      weight[i - input.size()] = Element(value);
      w[i - input.size()] = static_cast<float>(weight[i - input.size()]);
    }
  }
  std::vector<Index> target(kTokens);
  for (int64_t b = 0; b < kTokens; ++b) target[b] = static_cast<Index>(b * 17 + 30);
  const int64_t mask_bytes = (kTokens + 7) / 8;

  DeviceTensor input_t(type, {kTokens, kHidden}, 2, input.data());
  DeviceTensor weight_t(type, {kVocab, kHidden}, 2, weight.data());
  DeviceTensor target_t(index_type, {kTokens}, sizeof(Index), target.data());
  DeviceTensor max_t(ACL_FLOAT, {kTokens}, 4, nullptr), sum_t(ACL_FLOAT, {kTokens}, 4, nullptr);
  DeviceTensor predicted_t(ACL_FLOAT, {kTokens}, 4, nullptr);
  DeviceTensor mask_t(ACL_UINT8, {mask_bytes}, 1, nullptr);
  DeviceTensor masked_t(index_type, {kTokens}, sizeof(Index), nullptr);
  DeviceTensor logits_t(type, {kTokens, kVocab}, 2, nullptr);

  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  CHECK(API(aclnnFusedLinearOnlineMaxSumGetWorkspaceSize)(
            input_t.tensor, weight_t.tensor, target_t.tensor, kStart, kStart + kVocab, max_t.tensor,
            sum_t.tensor, predicted_t.tensor, mask_t.tensor, masked_t.tensor,
            softmax_given ? logits_t.tensor : nullptr, &workspace_size, &executor) == 0);
  finish(API(aclnnFusedLinearOnlineMaxSum), workspace_size, executor, stream);

  DeviceTensor loss_t(ACL_FLOAT, {kTokens}, 4, nullptr);
  DeviceTensor softmax_t(ACL_FLOAT, {kTokens, kVocab}, 4, nullptr);
  CHECK(API(aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize)(
            max_t.tensor, sum_t.tensor, predicted_t.tensor, 0.0F, nullptr, nullptr,
            softmax_given ? logits_t.tensor : nullptr, loss_t.tensor,
            softmax_given ? softmax_t.tensor : nullptr, &workspace_size, &executor) == 0);
  finish(API(aclnnFusedCrossEntropyLossWithMaxSum), workspace_size, executor, stream);

  std::vector<float> grad(kTokens);
  for (int64_t b = 0; b < kTokens; ++b) grad[b] = 0.75F + 0.125F * static_cast<float>(b % 5);
  const std::vector<uint8_t> packed = mask_t.read<uint8_t>();
  std::vector<uint8_t> unpacked(kTokens);
  for (int64_t b = 0; b < kTokens; ++b) unpacked[b] = (packed[b / 8] >> (b % 8)) & 1;
  DeviceTensor bool_t(ACL_BOOL, {kTokens}, 1, unpacked.data());
  DeviceTensor grad_t(ACL_FLOAT, {kTokens}, 4, grad.data());
  DeviceTensor grad_input_t(type, {kTokens, kHidden}, 2, nullptr);
  DeviceTensor grad_weight_t(type, {kVocab, kHidden}, 2, nullptr);
  CHECK(API(aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize)(
            grad_t.tensor, input_t.tensor, weight_t.tensor,
            bool_mask ? bool_t.tensor : mask_t.tensor, masked_t.tensor, 0.0F,
            softmax_given ? nullptr : max_t.tensor, softmax_given ? nullptr : sum_t.tensor,
            softmax_given ? softmax_t.tensor : nullptr, grad_input_t.tensor, grad_weight_t.tensor,
            &workspace_size, &executor) == 0);
  finish(API(aclnnFusedLinearCrossEntropyLossGrad), workspace_size, executor, stream);

  // The same in float64.
  const std::vector<Index> masked = masked_t.read<Index>();
  std::vector<double> maximum(kTokens), total(kTokens), predicted(kTokens), loss(kTokens);
  std::vector<double> all_logits, softmax;
  std::vector<double> grad_input(x.size(), 0), grad_weight(w.size(), 0);
  for (int64_t b = 0; b < kTokens; ++b) {
    std::vector<double> logits(kVocab, 0);
    double largest = -1e300, sum = 0;
    for (int64_t v = 0; v < kVocab; ++v) {
      for (int64_t h = 0; h < kHidden; ++h) logits[v] += x[b * kHidden + h] * w[v * kHidden + h];
      logits[v] = static_cast<float>(Element(static_cast<float>(logits[v])));
      if (logits[v] > largest) largest = logits[v];
    }
    for (int64_t v = 0; v < kVocab; ++v) sum += std::exp(logits[v] - largest);
    const bool outside = target[b] < kStart || target[b] >= kStart + kVocab;
    CHECK(outside == (unpacked[b] != 0));
    CHECK(masked[b] == (outside ? 0 : target[b] - kStart));
    maximum[b] = largest;
    total[b] = sum;
    predicted[b] = outside ? 0 : logits[target[b] - kStart] - largest;
    loss[b] = std::log(sum) - predicted[b];
    for (int64_t v = 0; v < kVocab; ++v) {
      all_logits.push_back(logits[v]);
      softmax.push_back(std::exp(logits[v] - largest) / sum);
      const bool hit = !outside && v == target[b] - kStart;
      const double g = (std::exp(logits[v] - largest) / sum - (hit ? 1 : 0)) * grad[b];
      for (int64_t h = 0; h < kHidden; ++h) {
        grad_input[b * kHidden + h] += g * w[v * kHidden + h];
        grad_weight[v * kHidden + h] += g * x[b * kHidden + h];
      }
    }
  }
  CHECK((largest_difference(max_t.read<float>(), maximum) < 1e-6));
  CHECK((largest_difference(sum_t.read<float>(), total) < 1e-3));
  CHECK((largest_difference(predicted_t.read<float>(), predicted) < 1e-6));
  if (softmax_given) {
    CHECK((largest_difference(logits_t.read<Element>(), all_logits) == 0));
    CHECK((largest_difference(softmax_t.read<float>(), softmax) < 1e-6));
  }
  const double loss_error = largest_difference(loss_t.read<float>(), loss);
  const double input_error = largest_difference(grad_input_t.read<Element>(), grad_input);
  const double weight_error = largest_difference(grad_weight_t.read<Element>(), grad_weight);
  // |weight| and |input| are at most 1/2 and every row of |grad_logits| sums to at most 2 |grad|.
  printf("%s %s %s %s: loss within %.1e, inputGrad within %.1e, weightGrad within %.1e\n",
         type == ACL_BF16 ? "bf16" : "fp16", sizeof(Index) == 8 ? "int64" : "int32",
         bool_mask ? "bool mask" : "packed mask", softmax_given ? "softmax" : "statistics",
         loss_error, input_error, weight_error);
  CHECK(loss_error < 1e-5);
  CHECK(input_error < 4 * unit);
  CHECK(weight_error < 4 * unit);
}

#ifdef CLIENT_DLOPEN
#ifdef __clang__
#define ANY_FUNCTION_TYPE __attribute__((no_sanitize("function")))
#else
#define ANY_FUNCTION_TYPE
#endif
// Callers that deduce the function's type from their arguments pass labelSmoothing as double where
// the interface has float. On x86-64 and AArch64 the callee then reads the low half of the double:
// 0.0 is 0.0F, so is 0.5, and 0.1 is tiny.
ANY_FUNCTION_TYPE static void pass_label_smoothing_as_double() {
  typedef aclnnStatus (*AsDeduced)(const aclTensor*, const aclTensor*, const aclTensor*, double,
                                   const aclTensor*, const aclTensor*, const aclTensor*, aclTensor*,
                                   aclTensor*, uint64_t*, aclOpExecutor**);
  const AsDeduced phase1 =
      reinterpret_cast<AsDeduced>(symbol("aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize"));
  DeviceTensor t(ACL_FLOAT, {4}, 4, nullptr);
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  CHECK(phase1(t.tensor, t.tensor, t.tensor, 0.0, nullptr, nullptr, nullptr, t.tensor, nullptr,
               &workspace_size, &executor) == 0);
  CHECK(API(aclDestroyAclOpExecutor)(executor) == 0);
  CHECK(phase1(t.tensor, t.tensor, t.tensor, 0.5, nullptr, nullptr, nullptr, t.tensor, nullptr,
               &workspace_size, &executor) == 0);
  CHECK(API(aclDestroyAclOpExecutor)(executor) == 0);
  CHECK(phase1(t.tensor, t.tensor, t.tensor, 0.1, nullptr, nullptr, nullptr, t.tensor, nullptr,
               &workspace_size, &executor) == 161002);
}
#endif

int main() {
#ifdef CLIENT_DLOPEN
  void* library = dlopen("libopapi.so", RTLD_LAZY);
  CHECK(library != nullptr);
  const char* absent[] = {"PTAGetExecCache",   "PTAFindExecCache", "InitPTACacheThreadLocal",
                          "SetPTAHashKey",     "CanUsePTACache",   "AddTensorAddrToCachedList",
                          "SetPTACacheHashKey"};
  for (size_t i = 0; i < sizeof absent / sizeof absent[0]; ++i) {
    CHECK(dlsym(library, absent[i]) == nullptr);
  }
  typedef int (*InitHugeMem)(void*, bool);
  typedef void (*EndHugeMem)(void*, bool);
  CHECK(reinterpret_cast<InitHugeMem>(symbol("InitHugeMemThreadLocal"))(nullptr, false) == 0);
  reinterpret_cast<EndHugeMem>(symbol("ReleaseHugeMem"))(nullptr, false);
  reinterpret_cast<EndHugeMem>(symbol("UnInitHugeMemThreadLocal"))(nullptr, false);
  const char* aliases[] = {"libascendcl.so", "libacl_rt.so",     "libnnopbase.so",
                           "libopapi_nn.so", "libopapi_math.so", "libcust_opapi.so"};
  for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; ++i) {
    void* alias = dlopen(aliases[i], RTLD_LAZY);
    CHECK(alias != nullptr);
    CHECK(alias != nullptr && dlsym(alias, "aclCreateTensor") == dlsym(library, "aclCreateTensor"));
  }
#endif
  CHECK(API(aclInit)(nullptr) == ACL_SUCCESS);
  CHECK(API(aclrtSetDevice)(0) == ACL_SUCCESS);
  aclrtStream stream = nullptr;
  CHECK(API(aclrtCreateStream)(&stream) == ACL_SUCCESS);
#ifdef CLIENT_DLOPEN
  pass_label_smoothing_as_double();
#endif
  for (int bool_mask = 0; bool_mask < 2; ++bool_mask) {
    for (int softmax_given = 0; softmax_given < 2; ++softmax_given) {
      const bool m = bool_mask != 0, s = softmax_given != 0;
      run_one<op::fp16_t, int32_t>(ACL_FLOAT16, ACL_INT32, m, s, std::ldexp(1.0, -11), stream);
      run_one<op::fp16_t, int64_t>(ACL_FLOAT16, ACL_INT64, m, s, std::ldexp(1.0, -11), stream);
      run_one<op::bfloat16, int32_t>(ACL_BF16, ACL_INT32, m, s, std::ldexp(1.0, -8), stream);
      run_one<op::bfloat16, int64_t>(ACL_BF16, ACL_INT64, m, s, std::ldexp(1.0, -8), stream);
    }
  }
  CHECK(API(aclrtDestroyStream)(stream) == ACL_SUCCESS);
  CHECK(API(aclrtResetDevice)(0) == ACL_SUCCESS);
  CHECK(API(aclFinalize)() == ACL_SUCCESS);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
