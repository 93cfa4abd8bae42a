// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "examples/train_lm/record.h"

namespace logitless::train_lm {

// What two runs of the same training, on different ranks, must have in common.
inline constexpr double kFirstLossTolerance = 1e-6;
inline constexpr int64_t kEarlySteps = 100;
inline constexpr double kEarlyLossTolerance = 2e-3;
inline constexpr double kHeldOutTolerance = 0.005;  // relative
// How far below the unigram cross-entropy both end, in nats.
inline constexpr double kLearned = 0.4;

struct Verdict {
  std::string what;
  double found = 0;
  double allowed = 0;
  bool at_least = false;  // found must be at least `allowed`, not at most
  bool fine = false;
};

// Throws cli::Failure where the runs are not of the same text and options, or not finished.
std::vector<Verdict> compare(const Record& a, const Record& b);

}  // namespace logitless::train_lm
