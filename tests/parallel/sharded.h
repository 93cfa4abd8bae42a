// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "logitless/parallel/vocab_parallel.h"
#include "tests/support/steps.h"

// A training step of a head whose vocabulary is split over ranks: run and judged on any transport.
// Every rank makes the whole case and uses views of its part, so that what belongs to other ranks
// can be seen to stay untouched.
namespace logitless::test {

struct ShardedStep {
  StepCase step;                // of the whole vocabulary
  std::vector<RowRange> cover;  // by rank
  TokenRows input_rows = TokenRows::all;
  TokenRows grad_input_rows = TokenRows::all;
  int64_t chunk_tokens = 0;
  bool agree_in_run = true;
  Strategy strategy = Strategy::recompute;
  bool apart = false;  // run without gradients, then run_gradient
  PlanOptions options = {.threads = 1};

  VocabParallelTypes types() const;
};

// Covers to try: every rank's rows.
std::vector<RowRange> balanced_cover(int64_t V, int ranks);
std::vector<RowRange> padded_cover(int64_t V, int ranks, int64_t multiple);
std::vector<RowRange> uneven_cover(int64_t V, int ranks);  // growing shards, ranks in reverse order
std::vector<RowRange> cover_with_empty(int64_t V, int ranks);  // the first and every third is empty

// What one rank gives to run; a test may change it before.
struct RankArguments {
  LossAndGradientOperands operands;
  LossAndGradientOutputs outputs;
  std::span<std::byte> workspace;
  const CancelToken* cancel = nullptr;
};

struct RankResult {
  Result<void> result;  // of planning, else of running
  StepResult step;      // tensors of the whole shape, of which this rank has written its part
  std::string description;
  Strategy strategy = Strategy::recompute;  // the plan's
};
RankResult run_rank(Communicator& communicator, const ShardedStep& c,
                    const std::function<void(RankArguments&)>& change = {});

// The whole step from the parts of all ranks, on every rank; checks that what all of them have is
// the same bits, and that no rank has written another's part.
StepResult assemble(Communicator& communicator, const ShardedStep& c, const RankResult& mine);

// run_rank and assemble; rank 0 judges everything against float64, and the loss against one rank.
// The bits of everything are returned, on every rank.
std::vector<uint64_t> expect_sharded(Communicator& communicator, const ShardedStep& c);
void judge_whole(const ShardedStep& c, const StepResult& whole, Strategy strategy);

}  // namespace logitless::test
