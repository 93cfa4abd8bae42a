// SPDX-License-Identifier: Apache-2.0
// A framework's plug-in: it links nothing of the interface, searches several libraries for every
// function, deduces the operators' types from the arguments of the call (so labelSmoothing travels
// as a double), describes tensors over flat storage, and runs phase 2 on a queue's thread that
// never chose a device, where it also destroys the tensors before anything is synchronised.
#include <dlfcn.h>
#include <glob.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"
#include "aclnn/opdev/bfloat16.h"

#ifdef __clang__
#define ANY_FUNCTION_TYPE __attribute__((no_sanitize("function")))
#else
#define ANY_FUNCTION_TYPE
#endif

namespace {

// libcust_opapi.so comes first, then the old monolith, then whatever the toolkit has; libraries
// that are not there are no error.
std::vector<void*> open_libraries() {
  std::vector<std::string> names = {"libcust_opapi.so", "libopapi.so"};
  const char* const home = std::getenv("ASCEND_HOME_PATH");
  glob_t found = {};
  if (home != nullptr &&
      glob((std::string(home) + "/lib64/libopapi_*.so").c_str(), 0, nullptr, &found) == 0) {
    for (std::size_t i = 0; i < found.gl_pathc; ++i) names.push_back(found.gl_pathv[i]);
  }
  globfree(&found);
  names.push_back("libaclnn_ops_infer.so");
  std::vector<void*> libraries;
  for (const std::string& name : names) {
    if (void* const library = dlopen(name.c_str(), RTLD_LAZY)) libraries.push_back(library);
  }
  return libraries;
}

void* find(const char* name) {
  static const std::vector<void*> libraries = open_libraries();
  for (void* library : libraries) {
    if (void* const found = dlsym(library, name)) return found;
  }
  return nullptr;
}

template <typename Function>
Function* need(const char* name) {
  void* const found = find(name);
  if (found == nullptr) throw std::runtime_error(std::string("no function ") + name);
  return reinterpret_cast<Function*>(found);
}
#define API(function) need<decltype(function)>(#function)

void check(int status, const std::string& call) {
  if (status == 0) return;
  const char* const text = API(aclGetRecentErrMsg)();
  throw std::runtime_error(call + " returned " + std::to_string(status) + ": " +
                           (text != nullptr ? text : "no message"));
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("does not hold: " + what);
}

// A matrix or vector of the framework, `gap` elements into its storage; undefined without a shape.
struct Dense {
  aclDataType type = ACL_DT_UNDEFINED;
  std::vector<int64_t> shape = {};
  void* storage = nullptr;
  int64_t storage_elements = 0;
  int64_t gap = 0;
};

aclTensor* convert(const Dense& dense) {
  if (dense.type == ACL_DT_UNDEFINED) return nullptr;
  std::vector<int64_t> strides(dense.shape.size(), 1);
  for (std::size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * dense.shape[i];
  return API(aclCreateTensor)(dense.shape.data(), dense.shape.size(), dense.type, strides.data(),
                              dense.gap, ACL_FORMAT_ND, &dense.storage_elements, 1, dense.storage);
}
template <typename T>
T convert(const T& value) {
  return value;
}

void destroy(aclTensor* tensor) { check(API(aclDestroyTensor)(tensor), "aclDestroyTensor"); }
template <typename T>
void destroy(const T&) {}

struct Workspace {
  void* memory = nullptr;
  ~Workspace() {
    if (memory != nullptr) API(aclrtFree)(memory);
  }
};

template <typename... Converted>
ANY_FUNCTION_TYPE void execute_converted(const char* api, aclrtStream stream, Workspace* workspace,
                                         Converted... arguments) {
  using Phase1 = int(Converted..., uint64_t*, aclOpExecutor**);
  using Phase2 = int(void*, uint64_t, aclOpExecutor*, aclrtStream);
  Phase1* const phase1 = need<Phase1>((std::string(api) + "GetWorkspaceSize").c_str());
  Phase2* const phase2 = need<Phase2>(api);
  // Found or not, the pool of host memory is optional.
  auto* const init_huge = reinterpret_cast<int (*)(void*, bool)>(find("InitHugeMemThreadLocal"));
  auto* const release_huge = reinterpret_cast<void (*)(void*, bool)>(find("ReleaseHugeMem"));
  auto* const end_huge = reinterpret_cast<void (*)(void*, bool)>(find("UnInitHugeMemThreadLocal"));
  if (init_huge != nullptr) expect(init_huge(nullptr, false) == 0, "InitHugeMemThreadLocal is 0");
  uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  const int status = phase1(arguments..., &size, &executor);
  if (status != 0) {
    const std::initializer_list<int> all = {(destroy(arguments), 0)...};
    static_cast<void>(all);
    check(status, api);
  }
  if (size > 0) {
    check(API(aclrtMalloc)(&workspace->memory, size, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
  }
  int result = -1;
  std::thread([&] {
    result = phase2(workspace->memory, size, executor, stream);
    const std::initializer_list<int> all = {(destroy(arguments), 0)...};
    static_cast<void>(all);
    if (release_huge != nullptr) release_huge(nullptr, false);
  }).join();
  if (end_huge != nullptr) end_huge(nullptr, false);
  expect(result == 0, std::string(api) + " is 0 on the queue's thread");
}

template <typename... Arguments>
void execute(const char* api, aclrtStream stream, const Arguments&... arguments) {
  Workspace workspace;
  execute_converted(api, stream, &workspace, convert(arguments)...);
  check(API(aclrtSynchronizeStream)(stream), "aclrtSynchronizeStream");
}

// The text with which a call that must fail does so.
template <typename Call>
std::string failure_of(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  throw std::runtime_error("a call that must fail did not");
}

constexpr int64_t kTokens = 11, kVocab = 140, kHidden = 24, kStart = 30, kGap = 3;

template <typename T>
struct Buffer {
  std::vector<T> all;
  Dense dense;
  Buffer(aclDataType type, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (int64_t dim : shape) count *= dim;
    all.resize(static_cast<std::size_t>(count + kGap));
    dense = {type, std::move(shape), all.data(), count + kGap, kGap};
  }
  T& operator[](int64_t i) { return all[static_cast<std::size_t>(i + kGap)]; }
};

void run() {
  check(API(aclInit)(nullptr), "aclInit");
  check(API(aclrtSetDevice)(0), "aclrtSetDevice");
  aclrtStream stream = nullptr;
  check(API(aclrtCreateStream)(&stream), "aclrtCreateStream");

  Buffer<op::bfloat16> input(ACL_BF16, {kTokens, kHidden}), weight(ACL_BF16, {kVocab, kHidden});
  Buffer<int64_t> target(ACL_INT64, {kTokens}), masked(ACL_INT64, {kTokens});
  Buffer<float> max(ACL_FLOAT, {kTokens}), sum(ACL_FLOAT, {kTokens}),
      predicted(ACL_FLOAT, {kTokens});
  Buffer<uint8_t> mask(ACL_UINT8, {(kTokens + 7) / 8});
  Buffer<float> loss(ACL_FLOAT, {kTokens}), grad(ACL_FLOAT, {kTokens});
  Buffer<op::bfloat16> grad_input(ACL_BF16, {kTokens, kHidden}),
      grad_weight(ACL_BF16, {kVocab, kHidden});
  unsigned state = 7;
  const auto next = [&state] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(state >> 27) - 16) / 32.0F;
  };
  for (int64_t i = 0; i < kTokens * kHidden; ++i) input[i] = op::bfloat16(next());
  for (int64_t i = 0; i < kVocab * kHidden; ++i) weight[i] = op::bfloat16(next());
  for (int64_t b = 0; b < kTokens; ++b) {
    target[b] = 20 + 15 * b;
    grad[b] = 1;
  }
  const Dense undefined;

  execute("aclnnFusedLinearOnlineMaxSum", stream, input.dense, weight.dense, target.dense, kStart,
          kStart + kVocab, max.dense, sum.dense, predicted.dense, mask.dense, masked.dense,
          undefined);
  execute("aclnnFusedCrossEntropyLossWithMaxSum", stream, max.dense, sum.dense, predicted.dense,
          0.0, undefined, undefined, undefined, loss.dense, undefined);
  execute("aclnnFusedLinearCrossEntropyLossGrad", stream, grad.dense, input.dense, weight.dense,
          mask.dense, masked.dense, 0.0, max.dense, sum.dense, undefined, grad_input.dense,
          grad_weight.dense);

  std::vector<double> want_grad_weight(static_cast<std::size_t>(kVocab * kHidden), 0.0);
  double loss_error = 0, input_error = 0, weight_error = 0;
  for (int64_t b = 0; b < kTokens; ++b) {
    std::vector<double> logits;
    double largest = -1e300, total = 0;
    for (int64_t v = 0; v < kVocab; ++v) {
      double logit = 0;
      for (int64_t h = 0; h < kHidden; ++h) {
        logit += static_cast<double>(input[b * kHidden + h]) *
                 static_cast<double>(weight[v * kHidden + h]);
      }
      logits.push_back(static_cast<double>(op::bfloat16(logit)));
      largest = std::fmax(largest, logits.back());
    }
    for (double logit : logits) total += std::exp(logit - largest);
    const bool outside = target[b] < kStart || target[b] >= kStart + kVocab;
    const int64_t id = outside ? 0 : target[b] - kStart;
    expect(((mask[b / 8] >> (b % 8)) & 1) == (outside ? 1 : 0), "the mask");
    expect(masked[b] == id, "the masked target");
    const double want =
        std::log(total) - (outside ? 0 : logits[static_cast<std::size_t>(id)] - largest);
    loss_error = std::fmax(loss_error, std::fabs(static_cast<double>(loss[b]) - want));
    std::vector<double> row(static_cast<std::size_t>(kHidden), 0.0);
    for (int64_t v = 0; v < kVocab; ++v) {
      const double p = std::exp(logits[static_cast<std::size_t>(v)] - largest) / total;
      const double g = p - (!outside && v == id ? 1 : 0);
      for (int64_t h = 0; h < kHidden; ++h) {
        row[static_cast<std::size_t>(h)] += g * static_cast<double>(weight[v * kHidden + h]);
        want_grad_weight[static_cast<std::size_t>(v * kHidden + h)] +=
            g * static_cast<double>(input[b * kHidden + h]);
      }
    }
    for (int64_t h = 0; h < kHidden; ++h) {
      const double got = static_cast<double>(grad_input[b * kHidden + h]);
      input_error = std::fmax(input_error, std::fabs(got - row[static_cast<std::size_t>(h)]));
    }
  }
  for (int64_t i = 0; i < kVocab * kHidden; ++i) {
    const double got = static_cast<double>(grad_weight[i]);
    weight_error =
        std::fmax(weight_error, std::fabs(got - want_grad_weight[static_cast<std::size_t>(i)]));
  }
  std::printf("loss within %.1e, inputGrad within %.1e, weightGrad within %.1e\n", loss_error,
              input_error, weight_error);
  const double unit = std::ldexp(1.0, -8);
  expect(loss_error < 1e-5, "the loss");
  expect(input_error < 4 * unit, "inputGrad");
  expect(weight_error < 4 * unit, "weightGrad");

  // What is refused is told in words; a smoothing of 0.5 arrives as 0 and cannot be.
  const std::string text = failure_of([&] {
    execute("aclnnFusedLinearCrossEntropyLossGrad", stream, grad.dense, input.dense, weight.dense,
            mask.dense, masked.dense, 0.1, max.dense, sum.dense, undefined, grad_input.dense,
            grad_weight.dense);
  });
  expect(text.find("returned 161002: ") != std::string::npos, text);
  expect(text.find("labelSmoothing") != std::string::npos, text);
  const std::string none = failure_of([&] {
    execute("aclnnFusedLinearCrossEntropyLossGrad", stream, grad.dense, input.dense, weight.dense,
            mask.dense, masked.dense, 0.0, undefined, undefined, undefined, grad_input.dense,
            grad_weight.dense);
  });
  expect(none.find("returned 161001: ") != std::string::npos, none);
  expect(failure_of([&] { execute("aclnnMatmul", stream, input.dense); }).find("no function") == 0,
         "operators that are not here are not found");

  check(API(aclrtDestroyStream)(stream), "aclrtDestroyStream");
  check(API(aclrtResetDevice)(0), "aclrtResetDevice");
  check(API(aclFinalize)(), "aclFinalize");
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  return 0;
}
