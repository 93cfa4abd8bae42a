// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "cli/case.h"
#include "cli/judge.h"
#include "cli/operators.h"
#include "cli/verify.h"

namespace logitless::cli {

// Loss and both gradients of a case as it is at that moment, in one call, as fp32; tolerance 0:
// exact. Nothing where the workspace limit leaves no room.
using MakeStep =
    std::function<std::optional<StepResult>(const Case& c, const SparseGradient& sparse)>;

// The sparse gradient against float64: how far one seed's gradients are from the exact ones, and
// whether many seeds' are right on average.
struct SparseVerifyOptions {
  SparseGradient sparse;  // the first seed; the others follow it
  int seeds = 256;        // fewer than 2: no check for bias
  bool full = false;
  RunSettings run = {};
  MakeStep make_step = {};  // absent: this process's operators
  // Sees, and may change, the fp32 result of every seed before it is judged.
  std::function<void(uint64_t seed, StepResult& result)> after = {};
  std::function<void(const std::string&)> progress = {};
};

// Of rows of a gradient: |got - exact| / |exact|, lengths over a row, and over all rows together.
struct RelativeErrors {
  int64_t rows = 0;
  double all = 0;
  double median = 0;
  double p99 = 0;
  double worst = 0;
  int64_t worst_row = -1;
};

struct SparseVerifyReport {
  Judgements judgements;
  Sample sample;
  Shape shape;
  // Of a sparse step; a make_step of one's own leaves them as they are.
  Isa isa = Isa::scalar;
  int threads = 0;
  int64_t workspace_bytes = 0;
  SparseCounts counts;  // of the first seed
  // Rows of the sample with a gradient and 1 - p_target >= 2^-8. Nearer to 1 the last bit of a
  // float log-sum-exp is already a large part of p - 1, sparse or not.
  RelativeErrors grad_input;
  int64_t certain_rows = 0;  // the other ones
  RelativeErrors grad_weight;
  int seeds = 0;           // that the check for bias took
  int64_t fixed_rows = 0;  // the same for every seed (dense ones), left out of it
  int64_t bias_rows = 0;   // of grad_input in it

  bool fine() const;
};

// Failures of the operators throw Failure. The case's grad is changed meanwhile.
SparseVerifyReport verify_sparse(Case& c, const SparseVerifyOptions& options);

}  // namespace logitless::cli
