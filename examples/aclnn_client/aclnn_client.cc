// SPDX-License-Identifier: Apache-2.0
// Host code as one writes it for an NPU, unchanged on a CPU: the loss of a language model's head
// whose vocabulary is cut into two shards, and its gradients, without ever building the logits of a
// whole shard.
//
//   1. forward on each shard          aclnnFusedLinearOnlineMaxSum
//   2. merge the statistics by hand   what ranks do with one MAX and two SUM all-reduces
//   3. loss                           aclnnFusedCrossEntropyLossWithMaxSum, with each shard's
//   softmax
//   4. gradient on each shard         aclnnFusedLinearCrossEntropyLossGrad, twice: from the
//   statistics (memory-saving mode) and
//                                     from softmax (high-performance mode)
//
// Prints the loss and, for each result, its error beside the error allowed; ends with 1 if one is
// beyond. Build and run:
//
//   . <prefix>/ascend/set_env.sh
//   g++ -std=c++11 aclnn_client.cc -o aclnn_client -I$ASCEND_HOME_PATH/include
//       -L$ASCEND_HOME_PATH/lib64 -lopapi_math -lopapi_nn -lascendcl -lnnopbase      (one line)
//   ./aclnn_client
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "acl/acl.h"
#include "aclnn/opdev/fp16_t.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"

namespace {

const int64_t kTokens = 96;
const int64_t kHidden = 64;
const int64_t kVocab = 700;           // of both shards
const int64_t kFirstShardRows = 300;  // shards need not be equal

// Every call returns a status; the text behind it names the argument, what came and what is
// allowed.
void check(int status, const char* call) {
  if (status == ACL_SUCCESS) return;
  const char* text = aclGetRecentErrMsg();
  std::fprintf(stderr, "%s returned %d: %s\n", call, status, text != nullptr ? text : "");
  std::exit(1);
}
#define CHECK(call) check((call), #call)

// A tensor and its device memory. Tensors describe memory; they never own it.
template <typename T>
class DeviceTensor {
 public:
  DeviceTensor(aclDataType type, const std::vector<int64_t>& shape) : count_(1) {
    for (int64_t dim : shape) count_ *= static_cast<size_t>(dim);
    CHECK(aclrtMalloc(&address_, bytes(), ACL_MEM_MALLOC_HUGE_FIRST));
    tensor_ = aclCreateTensor(shape.data(), shape.size(), type, nullptr, 0, ACL_FORMAT_ND,
                              shape.data(), shape.size(), address_);
  }
  DeviceTensor(aclDataType type, const std::vector<int64_t>& shape, const std::vector<T>& host)
      : DeviceTensor(type, shape) {
    CHECK(aclrtMemcpy(address_, bytes(), host.data(), bytes(), ACL_MEMCPY_HOST_TO_DEVICE));
  }
  ~DeviceTensor() {
    aclDestroyTensor(tensor_);
    aclrtFree(address_);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  aclTensor* get() const { return tensor_; }
  std::vector<T> read() const {
    std::vector<T> host(count_);
    CHECK(aclrtMemcpy(host.data(), bytes(), address_, bytes(), ACL_MEMCPY_DEVICE_TO_HOST));
    return host;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }
  size_t count_;
  void* address_ = nullptr;
  aclTensor* tensor_ = nullptr;
};
typedef DeviceTensor<op::fp16_t> HalfTensor;
typedef DeviceTensor<float> FloatTensor;

// Phase 2: a workspace of the size that phase 1 asked for, the launch, the wait.
template <typename Launch>
void launch_and_wait(Launch launch, const char* name, uint64_t workspace_size,
                     aclOpExecutor* executor, aclrtStream stream) {
  void* workspace = nullptr;
  if (workspace_size > 0) {
    CHECK(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST));
  }
  check(launch(workspace, workspace_size, executor, stream), name);
  CHECK(aclrtSynchronizeStream(stream));
  if (workspace != nullptr) CHECK(aclrtFree(workspace));
}

// One shard of the vocabulary: rows [start, end) of the head's weight, and what was computed from
// them.
struct Shard {
  int64_t start, end;
  std::unique_ptr<HalfTensor> weight, logits;
  std::unique_ptr<FloatTensor> max, sum, predicted, softmax;
  std::unique_ptr<DeviceTensor<uint8_t>> mask;
  std::unique_ptr<DeviceTensor<int32_t>> masked_target;
  int64_t rows() const { return end - start; }
};

// The target of token b lies outside the shard: bit b of the mask, lowest bit first.
bool outside(const std::vector<uint8_t>& mask, int64_t b) {
  return ((mask[static_cast<size_t>(b / 8)] >> (b % 8)) & 1) != 0;
}

void forward(Shard& shard, const HalfTensor& input, const DeviceTensor<int32_t>& target,
             aclrtStream stream) {
  shard.max.reset(new FloatTensor(ACL_FLOAT, {kTokens}));
  shard.sum.reset(new FloatTensor(ACL_FLOAT, {kTokens}));
  shard.predicted.reset(new FloatTensor(ACL_FLOAT, {kTokens}));
  shard.mask.reset(new DeviceTensor<uint8_t>(ACL_UINT8, {(kTokens + 7) / 8}));
  shard.masked_target.reset(new DeviceTensor<int32_t>(ACL_INT32, {kTokens}));
  // Only the high-performance gradient needs logits, through softmax; without it pass a null
  // pointer.
  shard.logits.reset(new HalfTensor(ACL_FLOAT16, {kTokens, shard.rows()}));
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  // The end of the range is exclusive.
  CHECK(aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
      input.get(), shard.weight->get(), target.get(), shard.start, shard.end, shard.max->get(),
      shard.sum->get(), shard.predicted->get(), shard.mask->get(), shard.masked_target->get(),
      shard.logits->get(), &workspace_size, &executor));
  launch_and_wait(aclnnFusedLinearOnlineMaxSum, "aclnnFusedLinearOnlineMaxSum", workspace_size,
                  executor, stream);
}

// The global statistics: the largest maximum; sums rebased to it; the predicted logit of the one
// shard that has the target, rebased likewise. A shard that does not have it adds nothing, which
// its 0 alone would not tell.
void merge(const std::vector<Shard>& shards, std::vector<float>& max, std::vector<float>& sum,
           std::vector<float>& predicted) {
  max.assign(kTokens, -INFINITY);
  sum.assign(kTokens, 0);
  predicted.assign(kTokens, 0);
  for (const Shard& shard : shards) {
    const std::vector<float> local = shard.max->read();
    for (size_t b = 0; b < max.size(); ++b) max[b] = std::max(max[b], local[b]);
  }
  for (const Shard& shard : shards) {
    const std::vector<float> local_max = shard.max->read(), local_sum = shard.sum->read();
    const std::vector<float> local_predicted = shard.predicted->read();
    const std::vector<uint8_t> mask = shard.mask->read();
    for (size_t b = 0; b < max.size(); ++b) {
      const float shift = local_max[b] - max[b];
      sum[b] += local_sum[b] * std::exp(shift);
      if (!outside(mask, static_cast<int64_t>(b))) predicted[b] += local_predicted[b] + shift;
    }
  }
}

// The result of a gradient call on one shard, in float.
struct Gradients {
  std::vector<double> input, weight;
};

template <typename T>
std::vector<double> widen(const std::vector<T>& values) {
  std::vector<double> wide;
  wide.reserve(values.size());
  for (const T& value : values) wide.push_back(static_cast<float>(value));
  return wide;
}

Gradients gradient(const Shard& shard, const HalfTensor& input, const FloatTensor& grad,
                   const FloatTensor& max, const FloatTensor& sum, bool memory_saving,
                   aclrtStream stream) {
  const HalfTensor input_grad(ACL_FLOAT16, {kTokens, kHidden});
  const HalfTensor weight_grad(ACL_FLOAT16, {shard.rows(), kHidden});
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  CHECK(aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
      grad.get(), input.get(), shard.weight->get(), shard.mask->get(), shard.masked_target->get(),
      0.0F, memory_saving ? max.get() : nullptr, memory_saving ? sum.get() : nullptr,
      memory_saving ? nullptr : shard.softmax->get(), input_grad.get(), weight_grad.get(),
      &workspace_size, &executor));
  launch_and_wait(aclnnFusedLinearCrossEntropyLossGrad, "aclnnFusedLinearCrossEntropyLossGrad",
                  workspace_size, executor, stream);
  Gradients result;
  result.input = widen(input_grad.read());
  result.weight = widen(weight_grad.read());
  return result;
}

// ---- float64: the definition

struct Exact {
  std::vector<double> loss, input_grad, weight_grad;
};

Exact compute_exactly(const std::vector<double>& input, const std::vector<double>& weight,
                      const std::vector<int32_t>& target, const std::vector<float>& grad) {
  Exact exact;
  exact.input_grad.assign(input.size(), 0);
  exact.weight_grad.assign(weight.size(), 0);
  std::vector<double> logits(kVocab);
  for (int64_t b = 0; b < kTokens; ++b) {
    const double* x = &input[static_cast<size_t>(b * kHidden)];
    for (int64_t v = 0; v < kVocab; ++v) {
      double logit = 0;
      for (int64_t h = 0; h < kHidden; ++h) logit += x[h] * weight[v * kHidden + h];
      // The operators round logits to the operands' type before the statistics.
      logits[v] = static_cast<float>(op::fp16_t(logit));
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double logit : logits) sum += std::exp(logit - max);
    exact.loss.push_back(std::log(sum) + max - logits[target[b]]);
    for (int64_t v = 0; v < kVocab; ++v) {
      const double hit = v == target[b] ? 1 : 0;
      const double g = (std::exp(logits[v] - max) / sum - hit) * grad[b];
      for (int64_t h = 0; h < kHidden; ++h) {
        exact.input_grad[b * kHidden + h] += g * weight[v * kHidden + h];
        exact.weight_grad[v * kHidden + h] += g * x[h];
      }
    }
  }
  return exact;
}

bool report(const char* what, const std::vector<double>& got, const std::vector<double>& exact,
            double allowed) {
  double error = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(got[i] - exact[i]);
    if (!(difference <= error)) error = difference;  // a NaN is an error too
  }
  const bool fine = error <= allowed;
  std::printf("  %-34s error %.2e, allowed %.2e   %s\n", what, error, allowed,
              fine ? "ok" : "WRONG");
  return fine;
}

// Numbers in [-1, 1) that are the same everywhere.
double next_number(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<double>(state >> 8) / 8388608.0 - 1.0;
}

}  // namespace

int main() {
  CHECK(aclInit(nullptr));
  CHECK(aclrtSetDevice(0));
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream));
  bool fine = true;
  {
    // Hidden states, the head's weight, the token that came next, and the gradient of the mean
    // loss.
    uint32_t state = 1;
    std::vector<op::fp16_t> input(kTokens * kHidden), weight(kVocab * kHidden);
    for (op::fp16_t& x : input) x = next_number(state);
    for (op::fp16_t& w : weight) w = 0.5 * next_number(state);
    std::vector<int32_t> target(kTokens);
    for (int32_t& t : target) t = static_cast<int32_t>((next_number(state) + 1) / 2 * kVocab);
    const std::vector<float> grad(kTokens, 1.0F / kTokens);

    const HalfTensor input_tensor(ACL_FLOAT16, {kTokens, kHidden}, input);
    const DeviceTensor<int32_t> target_tensor(ACL_INT32, {kTokens}, target);
    const FloatTensor grad_tensor(ACL_FLOAT, {kTokens}, grad);
    std::vector<Shard> shards(2);
    shards[0].start = 0;
    shards[0].end = shards[1].start = kFirstShardRows;
    shards[1].end = kVocab;

    for (Shard& shard : shards) {
      const std::vector<op::fp16_t> rows(weight.begin() + shard.start * kHidden,
                                         weight.begin() + shard.end * kHidden);
      shard.weight.reset(new HalfTensor(ACL_FLOAT16, {shard.rows(), kHidden}, rows));
      forward(shard, input_tensor, target_tensor, stream);
    }

    std::vector<float> max, sum, predicted;
    merge(shards, max, sum, predicted);
    const FloatTensor max_tensor(ACL_FLOAT, {kTokens}, max), sum_tensor(ACL_FLOAT, {kTokens}, sum);
    const FloatTensor predicted_tensor(ACL_FLOAT, {kTokens}, predicted);

    // Each rank would compute the same loss; the softmax is its own shard's.
    std::vector<double> loss;
    for (Shard& shard : shards) {
      shard.softmax.reset(new FloatTensor(ACL_FLOAT, {kTokens, shard.rows()}));
      const FloatTensor loss_tensor(ACL_FLOAT, {kTokens});
      uint64_t workspace_size = 0;
      aclOpExecutor* executor = nullptr;
      CHECK(aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
          max_tensor.get(), sum_tensor.get(), predicted_tensor.get(), 0.0F, nullptr, nullptr,
          shard.logits->get(), loss_tensor.get(), shard.softmax->get(), &workspace_size,
          &executor));
      launch_and_wait(aclnnFusedCrossEntropyLossWithMaxSum, "aclnnFusedCrossEntropyLossWithMaxSum",
                      workspace_size, executor, stream);
      loss = widen(loss_tensor.read());
    }

    const Exact exact = compute_exactly(widen(input), widen(weight), target, grad);
    double mean = 0;
    for (double l : loss) mean += l / kTokens;
    std::printf("%d tokens, vocabulary of %d in shards of %d and %d, hidden size %d, fp16\n",
                static_cast<int>(kTokens), static_cast<int>(kVocab),
                static_cast<int>(shards[0].rows()), static_cast<int>(shards[1].rows()),
                static_cast<int>(kHidden));
    std::printf("mean loss %.6f\n", mean);
    // fp32 statistics of about kVocab addends, and a logit that fp32 addition order rounds to fp16
    // either way (a step of 2^-9 at logits below 4) in rare ties.
    fine = report("loss", loss, exact.loss, std::ldexp(1.0, -9)) && fine;

    for (int memory_saving = 1; memory_saving >= 0; --memory_saving) {
      std::printf("gradient, %s\n", memory_saving != 0 ? "memory-saving mode (from statistics)"
                                                       : "high-performance mode (from softmax)");
      // inputGrad is a partial result: ranks sum it. weightGrad stays on its shard.
      std::vector<double> input_grad(exact.input_grad.size(), 0), weight_grad;
      for (const Shard& shard : shards) {
        const Gradients local = gradient(shard, input_tensor, grad_tensor, max_tensor, sum_tensor,
                                         memory_saving != 0, stream);
        for (size_t i = 0; i < input_grad.size(); ++i) input_grad[i] += local.input[i];
        weight_grad.insert(weight_grad.end(), local.weight.begin(), local.weight.end());
      }
      // Each addend is rounded to fp16 (2^-11) once, the result once more, and a row's softmax may
      // stand on a logit that was rounded the other way. |weight| <= 1/2 and the |grad_logits| of a
      // token sum to at most 2 / kTokens; |input| <= 1 and a vocabulary row is the target of a few
      // tokens.
      const double unit = std::ldexp(1.0, -11);
      fine = report("inputGrad, summed over shards", input_grad, exact.input_grad,
                    4 * unit / kTokens) &&
             fine;
      fine = report("weightGrad, shard after shard", weight_grad, exact.weight_grad,
                    8 * unit / kTokens) &&
             fine;
    }
  }
  CHECK(aclrtDestroyStream(stream));
  CHECK(aclrtResetDevice(0));
  CHECK(aclFinalize());
  std::printf("%s\n", fine ? "all results within their bounds" : "SOME RESULT IS WRONG");
  return fine ? 0 : 1;
}
