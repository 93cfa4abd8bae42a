// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/first_step.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "cli/host_tensor.h"
#include "cli/ranks.h"
#include "examples/train_lm/checkpoint.h"
#include "reference/reference.h"

namespace logitless::train_lm {
namespace {

// float64 over all of the gradients would take minutes: so many rows of each are checked, edges of
// shards and rows of targets among them. The loss is checked for every token.
constexpr int64_t kCheckedRows = 64;

std::vector<int64_t> spread_rows(int64_t n) {
  std::vector<int64_t> rows;
  const int64_t count = std::min(n, kCheckedRows);
  for (int64_t i = 0; i < count; ++i) rows.push_back(count == 1 ? 0 : i * (n - 1) / (count - 1));
  return rows;
}

std::vector<int64_t> vocabulary_rows(const std::vector<RowRange>& cover,
                                     const std::vector<int64_t>& target) {
  std::vector<int64_t> rows;
  for (const RowRange& shard : cover) {
    if (shard.size() > 0) rows.insert(rows.end(), {shard.begin, shard.end - 1});
  }
  for (const int64_t b : spread_rows(std::ssize(target)))
    rows.push_back(target[static_cast<size_t>(b)]);
  std::ranges::sort(rows);
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

cli::HostTensor as_tensor(const std::vector<float>& values, std::vector<int64_t> shape) {
  cli::HostTensor tensor(DType::f32, std::move(shape));
  if (!values.empty()) std::memcpy(tensor.data(), values.data(), values.size() * sizeof(float));
  return tensor;
}

}  // namespace

FirstStep check_first_step(Communicator& ranks, const std::vector<RowRange>& cover,
                           Trainer& trainer) {
  FirstStep result;
  const Options& options = trainer.options();
  const int64_t BT = options.batch, H = options.hidden, V = trainer.model().V;
  const cli::HostTensor grad_weight = gather_rows(ranks, cover, trainer.model().head.gradient, H);
  cli::on_every_rank(ranks, [&] {  // float64 may find no memory
    if (ranks.rank() != 0) return;
    // AdamW has changed the head: here it is as it was, whole.
    const Model initial(options, V, {0, V});
    const ConstMatrixView input = matrix_view(trainer.head_input().data(), BT, H);
    const ConstMatrixView weight = matrix_view(initial.head.value.data(), V, H);
    const auto statistics = reference::forward(
        input, weight, vector_view(std::span(trainer.target())), {.multiply = DType::bf16});
    const auto loss = reference::loss(statistics);
    for (const double value : loss.loss.value) result.exact_loss += value / static_cast<double>(BT);
    const cli::HostTensor token_losses = as_tensor(trainer.token_losses(), {BT});
    cli::judge_loss("loss", &token_losses, nullptr, statistics, false, result.judgements);

    if (options.grad_tolerance > 0) return;  // a sparse gradient is right in expectation alone
    const float share = static_cast<float>(1.0 / static_cast<double>(BT));
    const reference::GradientOperands operands = {
        .input = input,
        .weight = weight,
        .grad = std::vector<double>(static_cast<size_t>(BT), static_cast<double>(share)),
        .target_mask = statistics.target_mask,
        .masked_target = statistics.masked_target,
        .logits_max = statistics.logits_max.value,
        .sum_exp_logits = statistics.sum_exp_logits.value,
        .logsumexp_deviation = statistics.logsumexp_deviation,
    };
    reference::GradientOptions how = {.multiply = DType::bf16};
    // One pass rounds the exponentials it holds.
    if (trainer.plan().strategy() == Strategy::one_pass) how.held_softmax = DType::bf16;
    cli::judge_gradient("gradient", "grad_input", as_tensor(trainer.grad_input(), {BT, H}),
                        reference::grad_input(operands, how, spread_rows(BT)), V,
                        result.judgements);
    cli::judge_gradient(
        "gradient", "grad_weight", grad_weight,
        reference::grad_weight(operands, how, vocabulary_rows(cover, trainer.target())), BT,
        result.judgements);
  });
  return result;
}

}  // namespace logitless::train_lm
