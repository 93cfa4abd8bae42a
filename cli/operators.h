// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/host_tensor.h"
#include "logitless/logitless.h"

namespace logitless::cli {

// The library's operators over a case whose vocabulary is cut into shards within this process: what
// ranks of a vocabulary-parallel run would do, one after the other.

// Rows [begin, end) of the case's weight.
struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// `shards` contiguous ranges that cover [0, V), sizes within one of each other; with more shards
// than rows some are empty.
std::vector<ShardRange> cut_vocabulary(int64_t V, int64_t shards);

struct RunSettings {
  int threads = 0;  // 0 = the library's default
  int64_t workspace_limit_bytes = 0;
  const CancelToken* cancel = nullptr;

  PlanOptions plan_options() const {
    return {.threads = threads, .isa = {}, .workspace_limit_bytes = workspace_limit_bytes};
  }
};

// What one call cost; `flops` is 2 per multiply-add of its products, over the rows that count in
// each: nothing is multiplied for the others.
struct Cost {
  std::string stage;
  double seconds = 0;
  double flops = 0;
  int64_t workspace_bytes = 0;
};
using Costs = std::vector<Cost>;

// Memory for workspaces, kept between calls: fresh pages cost time.
class Workspace {
 public:
  std::span<std::byte> get(int64_t bytes);
  void drop() { buffer_ = Buffer(); }

 private:
  Buffer buffer_;
};

struct ForwardResult {
  HostTensor logits_max;             // [BT] f32
  HostTensor sum_exp_logits;         // [BT] f32
  HostTensor predicted_logits;       // [BT] f32
  HostTensor target_mask;            // packed, u8 [(BT + 7) / 8]
  HostTensor masked_target;          // [BT], dtype of target
  std::optional<HostTensor> logits;  // [BT, V of the shard]
};

struct LossResult {
  HostTensor loss;       // [BT] f32
  HostTensor logsumexp;  // [BT] f32
};

// Loss and both gradients of a whole case, and the statistics they came from.
struct StepResult {
  HostTensor logits_max;        // [BT] f32
  HostTensor sum_exp_logits;    // [BT] f32
  HostTensor predicted_logits;  // [BT] f32
  HostTensor loss;              // [BT] f32
  double total = 0;             // sum of grad[b] * loss[b]
  HostTensor grad_input;        // [BT, H]
  HostTensor grad_weight;       // [V, H]
  SparseCounts sparse_counts;   // of a sparse gradient
};

// A sparse gradient of relative standard error `tolerance`; 0 = exact.
struct SparseGradient {
  float tolerance = 0;
  uint64_t seed = 0;
};

// Of the elements in rows that are not dense; 0 where there are none.
double kept_share(const SparseCounts& counts);

// What of a case the operators take.
enum class Scope {
  shard,  // everything
  // A training step: the vocabulary is whole, so tokens whose target is outside do not count, and
  // the loss is all that the total is made of, so grad_logsumexp is left out.
  step,
};

// Runs on one case with one set of options. Errors throw Failure.
class Operators {
 public:
  Operators(const Case& c, const RunSettings& settings, LogitsRounding rounding,
            Scope scope = Scope::shard)
      : case_(c), settings_(settings), rounding_(rounding), scope_(scope) {}

  ForwardResult forward(ShardRange shard, std::optional<DType> logits = {});
  // Into the result of an earlier call with the same arguments: its memory is used again.
  void forward(ShardRange shard, std::optional<DType> logits, ForwardResult& result);
  // masked_target of the result is relative to the whole case.
  ForwardResult merge(std::span<const ForwardResult> shards);
  LossResult loss(const ForwardResult& merged);
  // softmax of a shard from its logits, into a view [BT, V of the shard] of f32.
  void softmax(const ForwardResult& merged, const HostTensor& logits, MatrixView softmax);
  // Type of logits from which softmax is computed: fp32, or the operands' own when logits are
  // rounded to it.
  DType logits_dtype() const {
    return rounding_ == LogitsRounding::operand ? case_.dtype() : DType::f32;
  }

  struct GradientRequest {
    GradientMode mode = GradientMode::memory_saving;
    ShardRange shard;
    const ForwardResult* local = nullptr;   // the shard's own mask and masked_target
    const ForwardResult* merged = nullptr;  // statistics
    std::optional<ConstMatrixView> softmax = {};
    std::optional<MatrixView> grad_input = {};
    bool accumulate_grad_input = false;
    std::optional<MatrixView> grad_weight = {};
  };
  void gradient(const GradientRequest& request);

  // Loss and the gradients that are given a place, of the whole case in one call, the case's `grad`
  // as token weights.
  HostTensor loss_and_gradient(const std::optional<MatrixView>& grad_input,
                               const std::optional<MatrixView>& grad_weight,
                               const SparseGradient& sparse = {}, SparseCounts* counts = nullptr);
  // The same by the strategy named, on a case of any shard (see Scope::step), gradients as `dtype`.
  // Nothing where its workspace does not fit the limit.
  std::optional<StepResult> step(Strategy strategy, DType dtype, const SparseGradient& sparse = {});

  // The next call touches fresh pages.
  void drop_workspace() { workspace_.drop(); }

  Isa isa() const { return isa_; }
  int threads() const { return threads_; }
  const Costs& costs() const { return costs_; }

 private:
  template <typename Plan, typename Run>
  void timed(const char* stage, double flops, const Plan& plan, const Run& run);
  bool counts(int64_t b) const;
  // The bytes of a row filter, where some token does not count.
  std::optional<HostTensor> counts() const;
  double product_flops(int64_t rows, int64_t V) const;

  const Case& case_;
  RunSettings settings_;
  LogitsRounding rounding_;
  Scope scope_;
  Workspace workspace_;
  Costs costs_;
  Isa isa_ = Isa::scalar;
  int threads_ = 0;
};

// Everything a whole run gives. `after` (may be empty) sees the outputs of each stage as soon as
// they exist and before later stages use them.
enum class Stage { forward, merge, loss, logits, softmax, gradient, step };

struct StageOutputs {
  Stage stage = Stage::forward;
  LogitsRounding rounding = LogitsRounding::none;
  GradientMode mode = GradientMode::memory_saving;
  ShardRange shard;  // forward and logits; else the whole vocabulary
  // By the names of the tensors; owned by the run.
  std::vector<std::pair<std::string, HostTensor*>> tensors;
  Strategy strategy = Strategy::automatic;  // of a step
  double* total = nullptr;                  // of a step
  HostTensor* find(const std::string& name) const;
};
using StageObserver = std::function<void(const StageOutputs&)>;

struct GradientResult {
  HostTensor grad_input;   // [BT, H]
  HostTensor grad_weight;  // [V, H]
};

struct WholeRunOptions {
  int64_t shards = 1;
  LogitsRounding rounding = LogitsRounding::none;
  StageObserver after = {};
  std::function<void(const std::string&)> progress = {};
};

// forward on every shard and merge.
struct StatisticsResult {
  std::vector<ShardRange> ranges;
  std::vector<ForwardResult> shards;
  ForwardResult merged;
};
StatisticsResult run_statistics(const Case& c, Operators& operators,
                                const WholeRunOptions& options);
LossResult run_loss(Operators& operators, const ForwardResult& merged,
                    const WholeRunOptions& options);
// softmax [BT, V] f32 of the whole case, shard by shard, from logits of Operators::logits_dtype().
// with_logits (may be empty) sees each shard's logits [BT, V of the shard] beside the softmax,
// whose columns of this shard are then complete.
using LogitsObserver =
    std::function<void(ShardRange shard, const HostTensor& logits, const HostTensor& softmax)>;
HostTensor run_softmax(const Case& c, Operators& operators, const StatisticsResult& statistics,
                       const WholeRunOptions& options, const LogitsObserver& with_logits = {});
// softmax: null = memory-saving mode. With several shards grad_input is accumulated over them in
// fp32 and rounded once. dtype: of both outputs.
GradientResult run_gradient(const Case& c, Operators& operators, const StatisticsResult& statistics,
                            const HostTensor* softmax, DType dtype, const WholeRunOptions& options);
std::optional<StepResult> run_step(Operators& operators, Strategy strategy, DType dtype,
                                   const WholeRunOptions& options);

}  // namespace logitless::cli
