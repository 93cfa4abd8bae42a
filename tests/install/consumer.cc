// SPDX-License-Identifier: Apache-2.0
// Forward and loss of two tokens whose logits are known, through the installed headers alone.
#include <logitless/logitless.h>

#include <cmath>
#include <cstdio>
#include <span>
#include <vector>

using namespace logitless;

struct alignas(64) CacheLine {
  std::byte bytes[64];
};

int main() {
  // input . weight^T with H = 1: token 0 has logits 0, 1, 2, 3; token 1 has 0, -1, -2, -3.
  const std::vector<float> input = {1, -1};
  const std::vector<float> weight = {0, 1, 2, 3};
  const std::vector<int64_t> target = {3, 0};
  const auto plan = plan_forward({.BT = 2, .V = 4, .H = 1}, {.operand = DType::f32});
  const auto loss_plan = plan_loss(2, 4);
  if (!plan || !loss_plan) return 1;
  std::vector<CacheLine> workspace(static_cast<size_t>(plan->workspace_bytes() / 64 + 1));
  std::vector<float> max(2), sum(2), predicted(2), loss(2);
  const auto forward = run(*plan,
                           {.input = matrix_view(input.data(), 2, 1),
                            .weight = matrix_view(weight.data(), 4, 1),
                            .target = vector_view(std::span(target))},
                           {.logits_max = vector_view(std::span(max)),
                            .sum_exp_logits = vector_view(std::span(sum)),
                            .predicted_logits = vector_view(std::span(predicted))},
                           std::as_writable_bytes(std::span(workspace)));
  const auto done = run(*loss_plan,
                        {.logits_max = vector_view(std::span(max)),
                         .sum_exp_logits = vector_view(std::span(sum)),
                         .predicted_logits = vector_view(std::span(predicted))},
                        {.loss = vector_view(std::span(loss))});
  if (!forward || !done) return 1;

  // Both targets have the largest logit: log(1 + e^-1 + e^-2 + e^-3).
  const double expected = std::log(1 + std::exp(-1.0) + std::exp(-2.0) + std::exp(-3.0));
  std::printf("%s: loss %.7f %.7f, expected %.7f\n", LOGITLESS_VERSION,
              static_cast<double>(loss[0]), static_cast<double>(loss[1]), expected);
  return std::abs(loss[0] - expected) < 1e-6 && std::abs(loss[1] - expected) < 1e-6 ? 0 : 1;
}
