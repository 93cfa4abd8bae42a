// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/failure.h"

namespace logitless::train_lm {
namespace {

std::string named(const Record& record) {
  return fmt::format("{} rank{}", record.ranks, record.ranks == 1 ? "" : "s");
}

void check_comparable(const Record& a, const Record& b) {
  for (const auto& [key, value] : a.options) {
    const auto other = b.options.find(key);
    const std::string theirs = other == b.options.end() ? "none" : other->second;
    if (theirs != value) {
      cli::fail(
          fmt::format("the runs differ: --{} is {} and {}, must be the same", key, value, theirs));
    }
  }
  if (a.text != b.text) cli::fail("the runs differ: they were trained on different texts");
  if (a.losses.size() != b.losses.size()) {
    cli::fail(fmt::format("the runs differ: {} and {} steps were done, must be the same",
                          a.losses.size(), b.losses.size()));
  }
  if (a.losses.empty() || a.held_out.empty() || b.held_out.empty()) {
    cli::fail("a run has no step, or no held-out loss");
  }
}

}  // namespace

std::vector<Verdict> compare(const Record& a, const Record& b) {
  check_comparable(a, b);
  std::vector<Verdict> verdicts;
  // Written so that NaN is not fine.
  const auto at_most = [&](std::string what, double found, double allowed) {
    verdicts.push_back({std::move(what), found, allowed, false, found <= allowed});
  };
  const auto at_least = [&](std::string what, double found, double allowed) {
    verdicts.push_back({std::move(what), found, allowed, true, found >= allowed});
  };

  for (const Record* run : {&a, &b}) {
    if (run->first_step.empty()) {
      cli::fail(
          fmt::format("the run on {} was resumed, so its first step was not checked against "
                      "float64: train again from the start",
                      named(*run)));
    }
    at_most(fmt::format("first mean loss against float64, {}", named(*run)),
            std::abs(run->losses.front() - run->exact_first_loss), kFirstLossTolerance);
    for (const Record::Judged& judged : run->first_step) {
      verdicts.push_back({fmt::format("first {} against float64, {}", judged.output, named(*run)),
                          judged.observed, judged.allowed, false, judged.fine});
    }
  }
  const std::string both = fmt::format("{} against {}", named(a), named(b));
  at_most("first mean loss, " + both, std::abs(a.losses.front() - b.losses.front()),
          kFirstLossTolerance);
  double largest = 0;
  const size_t early = std::min<size_t>(a.losses.size(), kEarlySteps);
  for (size_t i = 0; i < early; ++i) {
    const double apart = std::abs(a.losses[i] - b.losses[i]);
    if (std::isnan(apart) || apart > largest) largest = apart;
  }
  at_most(fmt::format("first {} mean losses, {}", early, both), largest, kEarlyLossTolerance);
  const double last_a = a.held_out.back().second, last_b = b.held_out.back().second;
  at_most("held-out loss, relative, " + both, std::abs(last_a - last_b) / std::abs(last_b),
          kHeldOutTolerance);
  for (const Record* run : {&a, &b}) {
    at_least(fmt::format("held-out loss below the unigram's {:.4f}, {}", run->unigram, named(*run)),
             run->unigram - run->held_out.back().second, kLearned);
  }
  return verdicts;
}

}  // namespace logitless::train_lm
