// SPDX-License-Identifier: Apache-2.0
// What a training step needs of the head, in one call and one pass: the mean loss over the tokens
// that count, and both gradients. Prompt tokens are marked with -100 and cost nothing.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "logitless/logitless.h"

using namespace logitless;

namespace {

// A workspace is 64-byte aligned; a vector of cache lines is.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};

std::vector<bfloat16> wave(int64_t count, float scale, float step) {
  std::vector<bfloat16> values;
  for (int64_t i = 0; i < count; ++i) {
    values.emplace_back(scale * std::sin(step * static_cast<float>(i)));
  }
  return values;
}

}  // namespace

int main() {
  const Shape shape = {.BT = 200, .V = 8000, .H = 128};
  const auto input = wave(shape.BT * shape.H, 0.5f, 0.7f);  // [BT, H]
  const auto weight = wave(shape.V * shape.H, 0.2f, 0.3f);  // [V, H]
  std::vector<int64_t> target(static_cast<size_t>(shape.BT), -100);
  for (size_t b = 50; b < target.size(); ++b) target[b] = static_cast<int64_t>(31 * b);

  // grad_weight in fp32 and added to what the buffer holds: gradient accumulation for free.
  const auto plan = plan_loss_and_gradient(
      shape, {.operand = DType::bf16,
              .grad_input = GradientOutput{.dtype = DType::bf16},
              .grad_weight = GradientOutput{.dtype = DType::f32, .accumulate = true}});
  if (!plan) {
    std::fprintf(stderr, "%s\n", plan.error().message.c_str());
    return 1;
  }
  std::printf("%s", plan->describe().c_str());
  std::vector<CacheLine> workspace(static_cast<size_t>(plan->workspace_bytes() / 64 + 1));

  double mean_loss = 0;
  std::vector<float> loss(target.size());  // per token
  std::vector<bfloat16> grad_input(input.size());
  std::vector<float> grad_weight(weight.size());
  const auto done = run(*plan,
                        {.input = matrix_view(input.data(), shape.BT, shape.H),
                         .weight = matrix_view(weight.data(), shape.V, shape.H),
                         .target = vector_view(std::span<const int64_t>(target)),
                         .rows = {.ignore_index = -100}},
                        {.loss = vector_view(std::span(loss)),
                         .total = &mean_loss,
                         .grad_input = matrix_view(grad_input.data(), shape.BT, shape.H),
                         .grad_weight = matrix_view(grad_weight.data(), shape.V, shape.H)},
                        std::as_writable_bytes(std::span(workspace)));
  if (!done) {
    std::fprintf(stderr, "%s\n", done.error().message.c_str());
    return 1;
  }
  std::printf("mean loss %.4f nats over the 150 tokens that count\n", mean_loss);
  return std::isfinite(mean_loss) && mean_loss > 0 && loss[0] == 0 ? 0 : 1;
}
