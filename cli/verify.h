// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/judge.h"
#include "cli/operators.h"

namespace logitless::cli {

// Which rows are compared with float64. Everything where that is affordable, else tile and shard
// edges, the rows of the sampled tokens' targets, and random ones.
struct Sample {
  std::vector<int64_t> tokens;      // ascending
  std::vector<int64_t> vocabulary;  // ascending, rows of weight
  bool complete = true;
};

struct SampleOptions {
  int64_t shards = 1;
  bool full = false;
  double budget_seconds = 20;
  // Reference passes over a token (a vocabulary row), in units of one float64 forward of it.
  double passes_per_token = 9;
  double passes_per_row = 7;
  uint64_t seed = 0;
};
Sample choose_sample(const Case& c, const SampleOptions& options);

struct VerifyOptions {
  int64_t shards = 1;
  bool full = false;
  RunSettings run = {};
  StageObserver after = {};  // see operators.h
  std::function<void(const std::string&)> progress = {};
};

struct VerifyReport {
  Judgements judgements;
  Sample sample;
  Shape shape;
  Isa isa = Isa::scalar;
  int threads = 0;
  int64_t softmax_tokens = 0;  // high-performance mode was run on the first so many tokens
  bool one_pass_fits = true;   // else the workspace limit left out the one pass
  // Over the checked tokens that count, logits not rounded.
  double mean_loss = 0;
  double mean_loss_float64 = 0;

  bool fine() const;
};

// Every operator, mode and stage against the definition in float64. A stage is judged by what it
// makes of the inputs it was given, so that an error is found where it arises; the loss also from
// end to end. Failures of the operators throw Failure.
VerifyReport verify_case(const Case& c, const VerifyOptions& options);

// The type in which one pass holds exponentials.
inline DType held_softmax_type(DType operand) {
  return operand == DType::bf16 ? DType::bf16 : DType::f32;
}

// The reference's view of a case and of statistics for all its tokens.
reference::GradientOperands reference_operands(const Case& c, const reference::Statistics& all);
reference::ForwardOptions reference_options(const Case& c, ShardRange shard,
                                            LogitsRounding rounding);

// grad_weight tensors that should all hold the same. Vocabulary rows are taken in slices, which
// bounds the memory of the reference.
struct GradWeight {
  std::string stage;
  const HostTensor* tensor = nullptr;
};
void judge_grad_weights(const std::vector<GradWeight>& got,
                        const reference::GradientOperands& operands,
                        const reference::GradientOptions& options,
                        const std::vector<int64_t>& vocabulary, Judgements& out);

}  // namespace logitless::cli
