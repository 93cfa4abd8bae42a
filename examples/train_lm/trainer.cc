// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "cli/failure.h"
#include "cli/ranks.h"
#include "examples/train_lm/adamw.h"

namespace logitless::train_lm {
Batches::Batches(const Options& options, std::vector<int32_t> training)
    : seed_(options.seed),
      batch_(options.batch),
      per_epoch_(static_cast<int64_t>(training.size()) / options.batch),
      training_(std::move(training)) {}

std::vector<int32_t> Batches::of_step(int64_t step) {
  const int64_t epoch = (step - 1) / per_epoch_;
  if (epoch != epoch_) {
    const RandomNumbers random(seed_, Purpose::order, epoch);
    std::vector<std::pair<uint64_t, int32_t>> keyed;
    for (const int32_t position : training_) keyed.emplace_back(random.bits(position), position);
    std::ranges::sort(keyed);
    order_.clear();
    for (const auto& entry : keyed) order_.push_back(entry.second);
    epoch_ = epoch;
  }
  const auto first = order_.begin() + (step - 1) % per_epoch_ * batch_;
  return {first, first + batch_};
}

Trainer::Trainer(Communicator& ranks, const Options& options, const Text& text,
                 const RowRange& rows, const Plans& plans)
    : options_(options),
      text_(text),
      split_(split_text(text)),
      batches_(options, split_.training),
      model_(options, text.V(), rows),
      head_(ranks, plans.step),
      held_out_head_(ranks, plans.held_out),
      layers_(options),
      grad_input_(static_cast<size_t>(options.batch * options.hidden)) {}

std::unique_ptr<Trainer> make_trainer(Communicator& ranks, const Options& options, const Text& text,
                                      const RowRange& rows, int threads) {
  const Shape shape = {.BT = options.batch, .V = text.V(), .H = options.hidden};
  const auto plan = [&](bool with_gradients) {
    return cli::take_on_ranks(
        ranks, Head::plan(ranks, shape, rows,
                          {.with_gradients = with_gradients,
                           .grad_tolerance = static_cast<float>(options.grad_tolerance),
                           .threads = threads}));
  };
  const Trainer::Plans plans = {.step = plan(true), .held_out = plan(false)};
  std::unique_ptr<Trainer> trainer;
  cli::on_every_rank(ranks, [&] {
    try {
      trainer = std::make_unique<Trainer>(ranks, options, text, rows, plans);
    } catch (const std::bad_alloc&) {
      cli::fail(
          fmt::format("there is not enough memory for the model with {} of the head's {} rows",
                      rows.size(), text.V()));
    }
  });
  return trainer;
}

void Trainer::gather(std::span<const int32_t> positions, int64_t rows) {
  // What is left of the last batch does not count.
  contexts_.assign(static_cast<size_t>(rows * options_.context), 0);
  target_.assign(static_cast<size_t>(rows), Head::kIgnored);
  for (size_t b = 0; b < positions.size(); ++b) {
    context_of(text_, positions[b], options_.context,
               contexts_.data() + static_cast<int64_t>(b) * options_.context);
    target_[b] = text_.words[static_cast<size_t>(positions[b])];
  }
}

Result<double> Trainer::step(const CancelToken& cancel) {
  const uint64_t seed = seed_of_step(options_, steps_done() + 1);
  return step_with([&](const float* input, const float* weight, const std::vector<int64_t>& target,
                       double normalizer, float* grad_input, float* grad_weight) {
    return head_.run(input, weight, target, normalizer, seed, grad_input, grad_weight, cancel);
  });
}

Result<double> Trainer::step_with(const OtherHead& head) {
  const int64_t step = steps_done() + 1;
  gather(batches_.of_step(step), options_.batch);
  layers_.forward(model_, contexts_, options_.dropout,
                  RandomNumbers(options_.seed, Purpose::dropout, step));
  const auto loss =
      head(layers_.output().data(), model_.head.value.data(), target_,
           static_cast<double>(options_.batch), grad_input_.data(), model_.head.gradient.data());
  if (!loss) return loss.error();
  layers_.backward(model_, grad_input_);
  for (Parameter* parameter : model_.parameters()) {
    update({.decay = options_.decay}, rate_of_step(options_, step), step, *parameter);
  }
  losses_.push_back(*loss);
  return *loss;
}

Result<double> Trainer::held_out_loss(const CancelToken& cancel) {
  const std::span<const int32_t> all(split_.held_out);
  double sum = 0;
  for (size_t first = 0; first < all.size(); first += static_cast<size_t>(options_.batch)) {
    gather(all.subspan(first, std::min(all.size() - first, static_cast<size_t>(options_.batch))),
           options_.batch);
    layers_.forward(model_, contexts_, 0, RandomNumbers(0, Purpose::dropout));
    const auto part =
        held_out_head_.run(layers_.output().data(), model_.head.value.data(), target_,
                           static_cast<double>(all.size()), 0, nullptr, nullptr, cancel);
    if (!part) return part.error();
    sum += *part;
  }
  return sum;
}

}  // namespace logitless::train_lm
