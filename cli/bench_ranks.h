// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/operators.h"
#include "logitless/parallel/communicator.h"

namespace logitless::cli {

// What a vocabulary-parallel step is made of, measured on every rank by turns: the step itself; the
// same with a communicator that returns at once, which leaves the computation; and the step's
// collectives one after the other with nothing computed in between. Beside a sparse step, forward
// and loss alone, and the exact step.
struct RankBenchSettings {
  std::string split = "balanced";
  int64_t chunk_tokens = 0;
  Strategy strategy = Strategy::automatic;
  DType dtype = DType::bf16;
  SparseGradient sparse;  // each step takes the next seed
  RunSettings run;
  int repeats = 0;  // 0 = as many as fit into `seconds`, 5 to 101
  double seconds = 3;
};

struct RankBenchLine {
  Shape shape;
  DType dtype = DType::bf16;
  Isa isa = Isa::scalar;
  int threads = 0;
  int ranks = 1;
  Strategy strategy = Strategy::one_pass;
  int64_t chunk_tokens = 0;
  std::vector<RowRange> cover;
  int repeats = 0;
  // Medians, each of the rank that was slowest.
  double seconds = 0;
  double computation_seconds = 0;
  double communication_seconds = 0;
  // Of each rank, per step.
  int64_t gathered_bytes = 0;
  int64_t summed_bytes = 0;
  int64_t workspace_bytes = 0;
  // Of a sparse step; counts of all ranks, in the first one.
  SparseGradient sparse;
  SparseCounts sparse_counts;
  double forward_seconds = 0;
  double exact_seconds = 0;

  // The part of the communication that the step does not wait for, 0 to 1; 1 where there is none.
  double hidden() const;
};

// Collective. Loss and both gradients in the operands' type, of synthetic operands.
RankBenchLine bench_ranks(Communicator& communicator, const Shape& shape,
                          const RankBenchSettings& settings);

}  // namespace logitless::cli
