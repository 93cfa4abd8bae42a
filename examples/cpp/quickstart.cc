// SPDX-License-Identifier: Apache-2.0
// Loss and both gradients of a language model's head, the logits never built: forward gives three
// numbers per token, loss one, gradient the two matrices the optimiser wants.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
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
  const Shape shape = {.BT = 256, .V = 16000, .H = 64};

  // Operands: hidden states, the head's weight, and which token came next.
  const auto input = wave(shape.BT * shape.H, 0.5f, 0.7f);
  const auto weight = wave(shape.V * shape.H, 0.2f, 0.3f);
  std::vector<int64_t> target(shape.BT);
  std::iota(target.begin(), target.end(), 1000);
  const auto input_view = matrix_view(input.data(), shape.BT, shape.H);
  const auto weight_view = matrix_view(weight.data(), shape.V, shape.H);

  // Plan: shapes and types in, workspace size out. One workspace serves all three, one at a time.
  const auto forward = plan_forward(shape, {.operand = DType::bf16});
  const auto loss = plan_loss(shape.BT, shape.V);
  const auto gradient = plan_gradient(shape, {.operand = DType::bf16});
  if (!forward || !loss || !gradient) {
    std::fprintf(stderr, "no plan\n");
    return 1;
  }
  const int64_t bytes = std::max(forward->workspace_bytes(), gradient->workspace_bytes());
  std::vector<CacheLine> lines(static_cast<size_t>((bytes + 63) / 64));
  const auto workspace = std::as_writable_bytes(std::span(lines));

  // Run: forward, loss, and the gradient of the mean loss.
  std::vector<float> max(target.size()), sum(target.size()), predicted(target.size());
  std::vector<float> losses(target.size());
  const std::vector<float> grad(target.size(), 1.0f / static_cast<float>(shape.BT));
  std::vector<bfloat16> grad_input(input.size()), grad_weight(weight.size());
  const auto fail = [](const Error& error) {
    std::fprintf(stderr, "%s\n", error.message.c_str());
    return 1;
  };

  if (auto done = run(*forward,
                      {.input = input_view,
                       .weight = weight_view,
                       .target = vector_view(std::span<const int64_t>(target))},
                      {.logits_max = vector_view(std::span(max)),
                       .sum_exp_logits = vector_view(std::span(sum)),
                       .predicted_logits = vector_view(std::span(predicted))},
                      workspace);
      !done) {
    return fail(done.error());
  }
  if (auto done = run(*loss,
                      {.logits_max = vector_view(std::span(max)),
                       .sum_exp_logits = vector_view(std::span(sum)),
                       .predicted_logits = vector_view(std::span(predicted))},
                      {.loss = vector_view(std::span(losses))});
      !done) {
    return fail(done.error());
  }
  if (auto done = run(*gradient,
                      {.grad = vector_view(std::span(grad)),
                       .input = input_view,
                       .weight = weight_view,
                       .masked_target = vector_view(std::span<const int64_t>(target)),
                       .logits_max = vector_view(std::span(max)),
                       .sum_exp_logits = vector_view(std::span(sum))},
                      {.grad_input = matrix_view(grad_input.data(), shape.BT, shape.H),
                       .grad_weight = matrix_view(grad_weight.data(), shape.V, shape.H)},
                      workspace);
      !done) {
    return fail(done.error());
  }

  double mean = 0;
  for (float value : losses) mean += value / static_cast<double>(shape.BT);
  std::printf("mean loss %.4f nats over %zu tokens; workspace %.2f MiB, logits would be %.2f MiB\n",
              mean, losses.size(), static_cast<double>(bytes) / 1048576.0,
              static_cast<double>(shape.BT * shape.V * 4) / 1048576.0);
  return std::isfinite(mean) && mean > 0 ? 0 : 1;
}
