// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/options.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/failure.h"
#include "examples/train_lm/random.h"
#include "logitless/gradient.h"

namespace logitless::train_lm {
namespace {

void check_size(const char* name, int64_t value, int64_t least, int64_t largest) {
  if (value >= least && value <= largest) return;
  cli::fail(fmt::format("{} is {}, must be in [{}, {}]", name, value, least, largest));
}

// Also refuses NaN.
void check_number(const char* name, double value, double least, double below) {
  if (value >= least && value < below) return;
  cli::fail(fmt::format("{} is {}, must be in [{}, {})", name, value, least, below));
}

}  // namespace

std::map<std::string, std::string> to_map(const Options& options) {
  const auto text = [](auto value) { return fmt::format("{}", value); };
  return {{"seed", text(options.seed)},
          {"context", text(options.context)},
          {"embedding", text(options.embedding)},
          {"hidden", text(options.hidden)},
          {"batch", text(options.batch)},
          {"steps", text(options.steps)},
          {"warm-up", text(options.warm_up)},
          {"rate", text(options.rate)},
          {"decay", text(options.decay)},
          {"dropout", text(options.dropout)},
          {"grad-tolerance", text(options.grad_tolerance)}};
}

void check(const Options& options, int64_t words) {
  check_size("--context", options.context, 1, 64);
  check_size("--embedding", options.embedding, 1, 4096);
  check_size("--hidden", options.hidden, 1, 16384);
  if (options.batch < 1 || options.batch > words) {
    cli::fail(fmt::format("--batch is {}, must be in [1, {}], the words to train on", options.batch,
                          words));
  }
  check_size("--steps", options.steps, 1, 1'000'000'000);
  check_size("--warm-up", options.warm_up, 0, 1'000'000'000);
  check_number("--rate", options.rate, 0, 1);
  check_number("--decay", options.decay, 0, 1);
  check_number("--dropout", options.dropout, 0, 1);
  const double least = static_cast<double>(kLeastGradTolerance);
  const double most = static_cast<double>(kMostGradTolerance);
  const double tolerance = options.grad_tolerance;
  if (tolerance != 0 && !(tolerance >= least && tolerance <= most)) {
    cli::fail(fmt::format("--grad-tolerance is {}, must be 0 (exact) or in [{}, {}]", tolerance,
                          least, most));
  }
}

double rate_of_step(const Options& options, int64_t step) {
  const double rising =
      static_cast<double>(step) / static_cast<double>(std::max<int64_t>(options.warm_up, 1));
  const double left =
      static_cast<double>(options.steps - step + 1) / static_cast<double>(options.steps);
  return options.rate * std::min(1.0, rising) * left;
}

uint64_t seed_of_step(const Options& options, int64_t step) {
  return RandomNumbers(options.seed, Purpose::sparse, step).bits(0);
}

}  // namespace logitless::train_lm
