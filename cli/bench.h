// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>

#include "cli/bench_line.h"
#include "cli/case.h"
#include "cli/operators.h"
#include "cli/progress.h"

namespace logitless::cli {

// What is timed, and what stands beside it with logits held in memory:
//   forward      forward and loss                 | logits [BT, V] written, softmax of them
//   gradient     memory-saving gradient           | gradient from a softmax that is there already
//   gradient-hp  gradient from a given softmax    | -
//   step         forward, loss, gradient          | logits written, softmax, gradient from it
//   one-pass     loss and both gradients at once  | the same
//   sparse       one-pass with a sparse gradient  | -; by turns: forward, one-pass
inline constexpr std::array<const char*, 6> kBenchOps = {"forward", "gradient", "gradient-hp",
                                                         "step",    "one-pass", "sparse"};

struct BenchSettings {
  RunSettings run;
  LogitsRounding rounding = LogitsRounding::none;
  std::string only;  // grad_input or grad_weight; "" = both
  int repeats = 0;   // 0 = as many as fit into `seconds`
  double seconds = 3;
  bool cold = false;          // also with caches flushed and a fresh workspace
  bool unfused = true;        // also with logits held in memory, where they fit
  std::string model;          // for the line alone
  SparseGradient sparse;      // of the op of that name; each call takes the next seed
  double zero_grad_rows = 0;  // for the line alone: the case has these zeros
  double read_bytes_per_second = 0;
};

// Everything that the ops need of one case, made beforehand so that only the operators are timed.
class Bench {
 public:
  // Errors throw Failure, here and below.
  Bench(const Case& c, const BenchSettings& settings);

  BenchLine run(const std::string& op, Progress& progress);
  // Whether logits and softmax fit into memory; without, only the fused operators run.
  bool holds_logits() const { return holds_logits_; }

 private:
  using Calls = std::function<void()>;
  Calls fused_calls(const std::string& op);
  Calls unfused_calls(const std::string& op);
  double seconds_of(const Calls& calls);
  void fill_plan(BenchLine& line);
  double measure_peak(const BenchLine& line) const;
  ShardRange whole() const { return {.begin = 0, .end = case_.shape().V}; }
  void forward_and_loss();
  void gradient(const HostTensor* softmax);
  void loss_and_gradient(const SparseGradient& sparse);
  void write_softmax();

  const Case& case_;
  BenchSettings settings_;
  Operators operators_;
  std::optional<HostTensor> grad_input_;   // [BT, H]
  std::optional<HostTensor> grad_weight_;  // [V, H]
  StatisticsResult statistics_;
  std::optional<HostTensor> softmax_;  // [BT, V], given to gradient and gradient-hp
  // Made by the unfused computation; they live from one repeat to the next, as a framework's
  // caching allocator has it.
  std::optional<ForwardResult> step_logits_;
  std::optional<HostTensor> step_softmax_;
  bool holds_logits_ = false;
  uint64_t sparse_calls_ = 0;
  SparseCounts sparse_counts_;  // of the last call
};

}  // namespace logitless::cli
