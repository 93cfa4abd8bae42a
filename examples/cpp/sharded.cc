// SPDX-License-Identifier: Apache-2.0
// The vocabulary cut in four, as four ranks would hold it: each shard computes its statistics from
// its own rows, merge makes them those of the whole, and every shard then has its own grad_weight
// and a partial grad_input to be summed. Loss and gradients agree with the uncut computation.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "logitless/logitless.h"

using namespace logitless;

namespace {

constexpr int64_t kTokens = 48;
constexpr int64_t kVocabulary = 1009;  // uneven shards are fine
constexpr int64_t kHidden = 96;
// Shard r holds the vocabulary rows [kCuts[r], kCuts[r + 1]); the third is empty, which is fine
// too.
constexpr std::array<int64_t, 5> kCuts = {0, 300, 640, 640, kVocabulary};

// A workspace is 64-byte aligned; a vector of cache lines is.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};

// Ends the program with the error's sentence.
template <typename T>
T take(Result<T> result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    std::exit(1);
  }
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

std::vector<float> wave(int64_t count, float scale, float step) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(scale * std::sin(step * static_cast<float>(i)));
  }
  return values;
}

// What forward says about kTokens tokens and one shard.
struct Statistics {
  std::vector<float> logits_max = std::vector<float>(kTokens);
  std::vector<float> sum_exp_logits = std::vector<float>(kTokens);
  std::vector<float> predicted_logits = std::vector<float>(kTokens);
  std::vector<uint8_t> target_mask = std::vector<uint8_t>((kTokens + 7) / 8);  // 1 bit per token
  std::vector<int64_t> masked_target = std::vector<int64_t>(kTokens);
};

struct Problem {
  std::vector<float> input = wave(kTokens * kHidden, 0.8f, 0.37f);        // [BT, H]
  std::vector<float> weight = wave(kVocabulary * kHidden, 0.3f, 0.011f);  // [V, H]
  std::vector<int64_t> target = std::vector<int64_t>(kTokens);
  std::vector<float> grad = std::vector<float>(kTokens, 1.0f / kTokens);

  ConstMatrixView input_view() const { return matrix_view(input.data(), kTokens, kHidden); }
  ConstMatrixView shard(int64_t begin, int64_t end) const {
    return matrix_view(weight.data() + begin * kHidden, end - begin, kHidden);
  }
};

Statistics forward(const Problem& problem, int64_t begin, int64_t end) {
  const Shape shape = {.BT = kTokens, .V = end - begin, .H = kHidden};
  const auto plan = take(plan_forward(shape, {.operand = DType::f32}));
  std::vector<CacheLine> workspace(static_cast<size_t>((plan.workspace_bytes() + 63) / 64));
  Statistics out;
  take(run(plan,
           {.input = problem.input_view(),
            .weight = problem.shard(begin, end),
            .target = vector_view(std::span<const int64_t>(problem.target)),
            .vocab_start_index = begin},
           {.logits_max = vector_view(std::span(out.logits_max)),
            .sum_exp_logits = vector_view(std::span(out.sum_exp_logits)),
            .predicted_logits = vector_view(std::span(out.predicted_logits)),
            .target_mask = MaskView{out.target_mask.data(), kTokens},
            .masked_target = vector_view(std::span(out.masked_target))},
           std::as_writable_bytes(std::span(workspace))));
  return out;
}

// Where there are ranks, this is what travels between them: 12 bytes and a bit per token and rank.
Statistics merge(std::span<const Statistics> shards) {
  std::vector<ShardStatistics> views;
  for (const Statistics& shard : shards) {
    views.push_back({.logits_max = vector_view(std::span(shard.logits_max)),
                     .sum_exp_logits = vector_view(std::span(shard.sum_exp_logits)),
                     .predicted_logits = vector_view(std::span(shard.predicted_logits)),
                     .target_mask = ConstMaskView(shard.target_mask.data(), kTokens)});
  }
  Statistics out;
  const auto plan = take(plan_merge(kTokens, static_cast<int64_t>(views.size())));
  take(run(plan, views,
           {.logits_max = vector_view(std::span(out.logits_max)),
            .sum_exp_logits = vector_view(std::span(out.sum_exp_logits)),
            .predicted_logits = vector_view(std::span(out.predicted_logits)),
            .target_mask = MaskView{out.target_mask.data(), kTokens}}));
  return out;
}

double mean_loss(const Statistics& merged) {
  std::vector<float> loss(kTokens);
  take(run(take(plan_loss(kTokens, kVocabulary)),
           {.logits_max = vector_view(std::span(merged.logits_max)),
            .sum_exp_logits = vector_view(std::span(merged.sum_exp_logits)),
            .predicted_logits = vector_view(std::span(merged.predicted_logits))},
           {.loss = vector_view(std::span(loss))}));
  double sum = 0;
  for (const float value : loss) sum += value;
  return sum / kTokens;
}

// grad_weight of the shard is written; grad_input is *added*, so shards of one process sum for
// free (ranks would all-reduce it).
void gradient(const Problem& problem, int64_t begin, int64_t end, const Statistics& own,
              const Statistics& merged, std::vector<float>& grad_input,
              std::vector<float>& grad_weight) {
  const Shape shape = {.BT = kTokens, .V = end - begin, .H = kHidden};
  const auto plan = take(
      plan_gradient(shape, {.operand = DType::f32,
                            .grad_input = GradientOutput{.dtype = DType::f32, .accumulate = true},
                            .grad_weight = GradientOutput{.dtype = DType::f32}}));
  std::vector<CacheLine> workspace(static_cast<size_t>((plan.workspace_bytes() + 63) / 64));
  take(run(plan,
           {.grad = vector_view(std::span(problem.grad)),
            .input = problem.input_view(),
            .weight = problem.shard(begin, end),
            .target_mask = ConstMaskView(own.target_mask.data(), kTokens),  // the shard's own
            .masked_target = vector_view(std::span(own.masked_target)),
            .logits_max = vector_view(std::span(merged.logits_max)),
            .sum_exp_logits = vector_view(std::span(merged.sum_exp_logits))},
           {.grad_input = matrix_view(grad_input.data(), kTokens, kHidden),
            .grad_weight = matrix_view(grad_weight.data() + begin * kHidden, end - begin, kHidden)},
           std::as_writable_bytes(std::span(workspace))));
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return largest;
}

}  // namespace

int main() {
  Problem problem;
  for (int64_t b = 0; b < kTokens; ++b) problem.target[static_cast<size_t>(b)] = 21 * b;

  // In one piece.
  const Statistics whole = forward(problem, 0, kVocabulary);
  std::vector<float> input_whole(problem.input.size()), weight_whole(problem.weight.size());
  gradient(problem, 0, kVocabulary, whole, whole, input_whole, weight_whole);

  // In four.
  std::vector<Statistics> shards;
  for (size_t r = 0; r + 1 < kCuts.size(); ++r) {
    shards.push_back(forward(problem, kCuts[r], kCuts[r + 1]));
  }
  const Statistics merged = merge(shards);
  std::vector<float> input_cut(problem.input.size()), weight_cut(problem.weight.size());
  for (size_t r = 0; r + 1 < kCuts.size(); ++r) {
    gradient(problem, kCuts[r], kCuts[r + 1], shards[r], merged, input_cut, weight_cut);
  }

  const double loss_whole = mean_loss(whole);
  const double loss_cut = mean_loss(merged);
  const double input_error = largest_difference(input_whole, input_cut);
  const double weight_error = largest_difference(weight_whole, weight_cut);
  std::printf("mean loss       whole %.7f   in four shards %.7f\n", loss_whole, loss_cut);
  std::printf("largest change  grad_input %.1e   grad_weight %.1e\n", input_error, weight_error);
  return std::abs(loss_whole - loss_cut) < 1e-5 && input_error < 1e-6 && weight_error < 1e-6 ? 0
                                                                                             : 1;
}
