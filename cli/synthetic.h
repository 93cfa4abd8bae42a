// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "cli/case.h"

namespace logitless::cli {

struct SyntheticOptions {
  int64_t tokens = 1024;
  int64_t vocab = 32000;  // rows of weight, on this shard
  int64_t hidden = 1024;
  DType dtype = DType::bf16;
  uint64_t seed = 0;
  double masked = 0;     // fraction of targets outside the shard
  double zero_grad = 0;  // fraction of tokens whose grad is 0
  int64_t vocab_start = 0;
  std::optional<int64_t> global_vocab = {};  // absent: as small as the other options allow
  // Absent: all. Else of weight there are these rows alone, input and target those of the shard.
  std::optional<RowRange> weight_rows = {};
};

// A case whose softmax looks like a trained language model's: most tokens have one or two likely
// words, the target is often but not always among them, the mean loss is about 3 at ordinary sizes.
// Frequent words come often as targets. Every number is a function of (seed, what, index) alone, in
// integer arithmetic and single correctly rounded operations: the same bits on every machine, and
// the shards of one global vocabulary are slices of the same weight. `progress` gets the rows done.
// Errors name the option and the rule.
Result<Case> make_synthetic(const SyntheticOptions& options,
                            const std::function<void(int64_t)>& progress = {});

}  // namespace logitless::cli
