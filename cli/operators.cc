// SPDX-License-Identifier: Apache-2.0
#include "cli/operators.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cli/failure.h"
#include "logitless/machine.h"

namespace logitless::cli {
namespace {

MaskView mask_view(HostTensor& packed, int64_t BT) {
  return {.data = packed.data(), .size = BT, .layout = MaskLayout::packed_lsb_first, .stride = 1};
}

ConstMaskView mask_view(const HostTensor& packed, int64_t BT) {
  return {packed.data(), BT, MaskLayout::packed_lsb_first, 1};
}

void report(const WholeRunOptions& options, const std::string& what) {
  if (options.progress) options.progress(what);
}

}  // namespace

double kept_share(const SparseCounts& counts) {
  if (counts.elements == 0) return 0;
  return static_cast<double>(counts.kept) / static_cast<double>(counts.elements);
}

std::vector<ShardRange> cut_vocabulary(int64_t V, int64_t shards) {
  std::vector<ShardRange> ranges;
  const int64_t size = V / shards;
  const int64_t larger = V % shards;  // the first so many have one row more
  for (int64_t s = 0; s < shards; ++s) {
    const int64_t begin = s * size + std::min(s, larger);
    ranges.push_back({.begin = begin, .end = begin + size + (s < larger ? 1 : 0)});
  }
  return ranges;
}

std::span<std::byte> Workspace::get(int64_t bytes) {
  if (buffer_.size() < bytes) {
    buffer_ = Buffer();
    buffer_ = Buffer(bytes);
    prefer_huge_pages(buffer_.span());
  }
  return buffer_.span();
}

template <typename Plan, typename Run>
void Operators::timed(const char* stage, double flops, const Plan& plan, const Run& run_plan) {
  const std::span<std::byte> workspace = workspace_.get(plan.workspace_bytes());
  const auto start = std::chrono::steady_clock::now();
  take(run_plan(workspace));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  costs_.push_back({.stage = stage,
                    .seconds = seconds,
                    .flops = flops,
                    .workspace_bytes = plan.workspace_bytes()});
}

bool Operators::counts(int64_t b) const {
  if (!case_.counts(b)) return false;
  if (scope_ == Scope::shard) return true;
  const int64_t target = case_.target.integer_at(b) - case_.vocab_start_index;
  return target >= 0 && target < case_.shape().V;
}

std::optional<HostTensor> Operators::counts() const {
  if (!case_.ignore_index && scope_ == Scope::shard) return {};
  const int64_t BT = case_.shape().BT;
  HostTensor bytes(DType::u8, {BT});
  for (int64_t b = 0; b < BT; ++b) bytes.as<uint8_t>()[b] = counts(b) ? 1 : 0;
  return bytes;
}

double Operators::product_flops(int64_t rows, int64_t V) const {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(V) *
         static_cast<double>(case_.shape().H);
}

ForwardResult Operators::forward(ShardRange shard, std::optional<DType> logits) {
  const int64_t BT = case_.shape().BT;
  ForwardResult result{.logits_max = HostTensor(DType::f32, {BT}),
                       .sum_exp_logits = HostTensor(DType::f32, {BT}),
                       .predicted_logits = HostTensor(DType::f32, {BT}),
                       .target_mask = HostTensor(DType::u8, {packed_mask_bytes(BT)}),
                       .masked_target = HostTensor(case_.target.dtype(), {BT}),
                       .logits = {}};
  if (logits) result.logits = HostTensor(*logits, {BT, shard.size()});
  forward(shard, logits, result);
  return result;
}

void Operators::forward(ShardRange shard, std::optional<DType> logits, ForwardResult& result) {
  const Shape shape{.BT = case_.shape().BT, .V = shard.size(), .H = case_.shape().H};
  ForwardTypes types;
  types.operand = case_.dtype();
  types.target = case_.target.dtype();
  types.logits = logits;
  types.logits_rounding = rounding_;
  const ForwardPlan plan = take(plan_forward(shape, types, settings_.plan_options()));
  isa_ = plan.isa();
  threads_ = plan.threads();

  ForwardOperands operands;
  operands.input = case_.input.matrix();
  operands.weight = case_.weight.rows(shard.begin, shard.end);
  operands.target = case_.target.vector();
  operands.vocab_start_index = case_.vocab_start_index + shard.begin;
  const std::optional<HostTensor> counts_tensor = counts();
  if (counts_tensor) operands.rows.counts = counts_tensor->vector();
  operands.rows.ignore_index = case_.ignore_index;
  ForwardOutputs outputs;
  outputs.logits_max = result.logits_max.vector();
  outputs.sum_exp_logits = result.sum_exp_logits.vector();
  outputs.predicted_logits = result.predicted_logits.vector();
  outputs.target_mask = mask_view(result.target_mask, shape.BT);
  outputs.masked_target = result.masked_target.vector();
  if (result.logits) outputs.logits = result.logits->matrix();

  const double flops = product_flops(case_.counting_tokens(), shape.V);
  timed("forward", flops, plan, [&](std::span<std::byte> workspace) {
    return run(plan, operands, outputs, workspace, settings_.cancel);
  });
}

ForwardResult Operators::merge(std::span<const ForwardResult> shards) {
  const int64_t BT = case_.shape().BT;
  const MergePlan plan =
      take(plan_merge(BT, static_cast<int64_t>(shards.size()), settings_.plan_options()));
  ForwardResult merged{.logits_max = HostTensor(DType::f32, {BT}),
                       .sum_exp_logits = HostTensor(DType::f32, {BT}),
                       .predicted_logits = HostTensor(DType::f32, {BT}),
                       .target_mask = HostTensor(DType::u8, {packed_mask_bytes(BT)}),
                       .masked_target = HostTensor(case_.target.dtype(), {BT}),
                       .logits = {}};
  std::vector<ShardStatistics> statistics;
  for (const ForwardResult& shard : shards) {
    statistics.push_back({.logits_max = shard.logits_max.vector(),
                          .sum_exp_logits = shard.sum_exp_logits.vector(),
                          .predicted_logits = shard.predicted_logits.vector(),
                          .target_mask = mask_view(shard.target_mask, BT)});
  }
  const MergeOutputs outputs{.logits_max = merged.logits_max.vector(),
                             .sum_exp_logits = merged.sum_exp_logits.vector(),
                             .predicted_logits = merged.predicted_logits.vector(),
                             .target_mask = mask_view(merged.target_mask, BT)};
  timed("merge", 0, plan, [&](std::span<std::byte> workspace) {
    return run(plan, statistics, outputs, workspace, settings_.cancel);
  });
  for (int64_t b = 0; b < BT; ++b) {
    const int64_t local =
        mask_bit(merged.target_mask, b) ? 0 : case_.target.integer_at(b) - case_.vocab_start_index;
    if (case_.target.dtype() == DType::i32) {
      merged.masked_target.as<int32_t>()[b] = static_cast<int32_t>(local);
    } else {
      merged.masked_target.as<int64_t>()[b] = local;
    }
  }
  return merged;
}

LossResult Operators::loss(const ForwardResult& merged) {
  const int64_t BT = case_.shape().BT;
  const LossPlan plan = take(plan_loss(BT, case_.shape().V, {}, settings_.plan_options()));
  LossResult result{.loss = HostTensor(DType::f32, {BT}),
                    .logsumexp = HostTensor(DType::f32, {BT})};
  const std::optional<HostTensor> counts_tensor = counts();
  LossOperands operands;
  operands.logits_max = merged.logits_max.vector();
  operands.sum_exp_logits = merged.sum_exp_logits.vector();
  operands.predicted_logits = merged.predicted_logits.vector();
  if (counts_tensor) operands.counts = counts_tensor->vector();
  const LossOutputs outputs{
      .loss = result.loss.vector(), .logsumexp = result.logsumexp.vector(), .softmax = {}};
  timed("loss", 0, plan, [&](std::span<std::byte> workspace) {
    return run(plan, operands, outputs, workspace, settings_.cancel);
  });
  return result;
}

void Operators::softmax(const ForwardResult& merged, const HostTensor& logits,
                        MatrixView softmax_view) {
  const int64_t BT = case_.shape().BT;
  const LossTypes types{.softmax_logits = logits.dtype()};
  const LossPlan plan = take(plan_loss(BT, logits.shape()[1], types, settings_.plan_options()));
  HostTensor unused_loss(DType::f32, {BT});
  const std::optional<HostTensor> counts_tensor = counts();
  LossOperands operands;
  operands.logits_max = merged.logits_max.vector();
  operands.sum_exp_logits = merged.sum_exp_logits.vector();
  operands.predicted_logits = merged.predicted_logits.vector();
  operands.logits = logits.matrix();
  if (counts_tensor) operands.counts = counts_tensor->vector();
  const LossOutputs outputs{.loss = unused_loss.vector(), .logsumexp = {}, .softmax = softmax_view};
  timed("softmax", 0, plan, [&](std::span<std::byte> workspace) {
    return run(plan, operands, outputs, workspace, settings_.cancel);
  });
}

HostTensor Operators::loss_and_gradient(const std::optional<MatrixView>& grad_input,
                                        const std::optional<MatrixView>& grad_weight,
                                        const SparseGradient& sparse, SparseCounts* sparse_counts) {
  const Shape shape = case_.shape();
  if (case_.vocab_start_index != 0) {
    fail("one pass takes a whole vocabulary: vocab_start_index must be 0");
  }
  if (case_.grad_logsumexp) fail("one pass takes no grad_logsumexp");
  LossAndGradientTypes types;
  types.operand = case_.dtype();
  types.target = case_.target.dtype();
  types.grad_tolerance = sparse.tolerance;
  const auto output = [](const std::optional<MatrixView>& view) {
    std::optional<GradientOutput> type;
    if (view) type = GradientOutput{.dtype = view->dtype, .accumulate = false};
    return type;
  };
  types.grad_input = output(grad_input);
  types.grad_weight = output(grad_weight);
  const LossAndGradientPlan plan =
      take(plan_loss_and_gradient(shape, types, settings_.plan_options()));
  isa_ = plan.isa();
  threads_ = plan.threads();
  HostTensor loss(DType::f32, {shape.BT});
  LossAndGradientOperands operands;
  operands.input = case_.input.matrix();
  operands.weight = case_.weight.matrix();
  operands.target = case_.target.vector();
  operands.rows.ignore_index = case_.ignore_index;
  operands.token_weights = case_.grad.vector();
  operands.seed = sparse.seed;
  SparseCounts own_counts;
  LossAndGradientOutputs outputs;
  outputs.loss = loss.vector();
  outputs.grad_input = grad_input;
  outputs.grad_weight = grad_weight;
  if (sparse.tolerance > 0) outputs.sparse_counts = &own_counts;
  const int gradients = (grad_input ? 1 : 0) + (grad_weight ? 1 : 0);
  const double forward_flops = product_flops(case_.counting_tokens(), shape.V);
  timed("loss and gradient",
        forward_flops + gradients * product_flops(case_.tokens_with_gradient(), shape.V), plan,
        [&](std::span<std::byte> workspace) {
          return run(plan, operands, outputs, workspace, settings_.cancel);
        });
  if (sparse.tolerance > 0) {
    // What a sparse gradient multiplies: dense rows, and elsewhere what it kept.
    costs_.back().flops =
        forward_flops + gradients * (product_flops(own_counts.dense_rows, shape.V) +
                                     product_flops(own_counts.kept, 1));
  }
  if (sparse_counts != nullptr) *sparse_counts = own_counts;
  return loss;
}

std::optional<StepResult> Operators::step(Strategy strategy, DType dtype,
                                          const SparseGradient& sparse) {
  const Shape shape = case_.shape();
  LossAndGradientTypes types;
  types.operand = case_.dtype();
  types.target = DType::i64;
  types.grad_tolerance = sparse.tolerance;
  types.grad_input = types.grad_weight = GradientOutput{.dtype = dtype, .accumulate = false};
  Result<LossAndGradientPlan> planned =
      plan_loss_and_gradient(shape, types, settings_.plan_options(), strategy);
  if (!planned && planned.error().kind == ErrorKind::limit_too_small) return {};
  const LossAndGradientPlan plan = take(std::move(planned));
  isa_ = plan.isa();
  threads_ = plan.threads();

  // Targets relative to the case, which may be a shard of something larger.
  HostTensor target(DType::i64, {shape.BT});
  HostTensor counting(DType::u8, {shape.BT});
  for (int64_t b = 0; b < shape.BT; ++b) {
    counting.as<uint8_t>()[b] = counts(b) ? 1 : 0;
    target.as<int64_t>()[b] = counts(b) ? case_.target.integer_at(b) - case_.vocab_start_index : 0;
  }
  StepResult result{.logits_max = HostTensor(DType::f32, {shape.BT}),
                    .sum_exp_logits = HostTensor(DType::f32, {shape.BT}),
                    .predicted_logits = HostTensor(DType::f32, {shape.BT}),
                    .loss = HostTensor(DType::f32, {shape.BT}),
                    .grad_input = HostTensor(dtype, {shape.BT, shape.H}),
                    .grad_weight = HostTensor(dtype, {shape.V, shape.H}),
                    .sparse_counts = {}};
  LossAndGradientOperands operands;
  operands.input = case_.input.matrix();
  operands.weight = case_.weight.matrix();
  operands.target = target.vector();
  operands.rows.counts = counting.vector();
  operands.token_weights = case_.grad.vector();
  operands.seed = sparse.seed;
  LossAndGradientOutputs outputs;
  if (sparse.tolerance > 0) outputs.sparse_counts = &result.sparse_counts;
  outputs.loss = result.loss.vector();
  outputs.total = &result.total;
  outputs.logits_max = result.logits_max.vector();
  outputs.sum_exp_logits = result.sum_exp_logits.vector();
  outputs.predicted_logits = result.predicted_logits.vector();
  outputs.grad_input = result.grad_input.matrix();
  outputs.grad_weight = result.grad_weight.matrix();
  const double product = 2.0 * static_cast<double>(shape.BT) * static_cast<double>(shape.V) *
                         static_cast<double>(shape.H);
  timed("loss and gradient", (strategy == Strategy::recompute ? 4 : 3) * product, plan,
        [&](std::span<std::byte> workspace) {
          return run(plan, operands, outputs, workspace, settings_.cancel);
        });
  return result;
}

void Operators::gradient(const GradientRequest& request) {
  const Shape shape{.BT = case_.shape().BT, .V = request.shard.size(), .H = case_.shape().H};
  GradientTypes types;
  types.operand = case_.dtype();
  types.target = case_.target.dtype();
  types.mode = request.mode;
  types.logits_rounding = rounding_;
  types.grad_input = {};
  types.grad_weight = {};
  if (request.grad_input) {
    types.grad_input = GradientOutput{.dtype = request.grad_input->dtype,
                                      .accumulate = request.accumulate_grad_input};
  }
  if (request.grad_weight) {
    types.grad_weight = GradientOutput{.dtype = request.grad_weight->dtype, .accumulate = false};
  }
  const GradientPlan plan = take(plan_gradient(shape, types, settings_.plan_options()));
  isa_ = plan.isa();
  threads_ = plan.threads();

  const std::optional<HostTensor> counts_tensor = counts();
  GradientOperands operands;
  operands.grad = case_.grad.vector();
  if (case_.grad_logsumexp && scope_ == Scope::shard) {
    operands.grad_logsumexp = case_.grad_logsumexp->vector();
  }
  operands.input = case_.input.matrix();
  operands.weight = case_.weight.rows(request.shard.begin, request.shard.end);
  operands.target_mask = mask_view(request.local->target_mask, shape.BT);
  operands.masked_target = request.local->masked_target.vector();
  if (counts_tensor) operands.counts = counts_tensor->vector();
  if (request.mode == GradientMode::memory_saving) {
    operands.logits_max = request.merged->logits_max.vector();
    operands.sum_exp_logits = request.merged->sum_exp_logits.vector();
  } else {
    operands.softmax = request.softmax;
  }
  const GradientOutputs outputs{.grad_input = request.grad_input,
                                .grad_weight = request.grad_weight};
  // Each product, the recomputed logits among them.
  const int products = (request.mode == GradientMode::memory_saving ? 1 : 0) +
                       (request.grad_input ? 1 : 0) + (request.grad_weight ? 1 : 0);
  const double flops = products * product_flops(case_.tokens_with_gradient(), shape.V);
  timed(request.mode == GradientMode::memory_saving ? "gradient memory-saving"
                                                    : "gradient high-performance",
        flops, plan, [&](std::span<std::byte> workspace) {
          return run(plan, operands, outputs, workspace, settings_.cancel);
        });
}

HostTensor* StageOutputs::find(const std::string& name) const {
  for (const auto& [known, tensor] : tensors) {
    if (known == name) return tensor;
  }
  return nullptr;
}

StatisticsResult run_statistics(const Case& c, Operators& operators,
                                const WholeRunOptions& options) {
  const ShardRange whole{.begin = 0, .end = c.shape().V};
  const auto observe = [&](Stage stage, ShardRange range, ForwardResult& result) {
    if (!options.after) return;
    options.after({.stage = stage,
                   .rounding = options.rounding,
                   .mode = GradientMode::memory_saving,
                   .shard = range,
                   .tensors = {{"logits_max", &result.logits_max},
                               {"sum_exp_logits", &result.sum_exp_logits},
                               {"predicted_logits", &result.predicted_logits},
                               {"target_mask", &result.target_mask},
                               {"masked_target", &result.masked_target}}});
  };
  StatisticsResult statistics;
  statistics.ranges = cut_vocabulary(c.shape().V, options.shards);
  for (const ShardRange range : statistics.ranges) {
    report(options, "forward");
    statistics.shards.push_back(operators.forward(range));
    observe(Stage::forward, range, statistics.shards.back());
  }
  statistics.merged = operators.merge(statistics.shards);
  observe(Stage::merge, whole, statistics.merged);
  return statistics;
}

LossResult run_loss(Operators& operators, const ForwardResult& merged,
                    const WholeRunOptions& options) {
  LossResult result = operators.loss(merged);
  if (options.after) {
    options.after({.stage = Stage::loss,
                   .rounding = options.rounding,
                   .mode = GradientMode::memory_saving,
                   .shard = {},
                   .tensors = {{"loss", &result.loss}, {"logsumexp", &result.logsumexp}}});
  }
  return result;
}

HostTensor run_softmax(const Case& c, Operators& operators, const StatisticsResult& statistics,
                       const WholeRunOptions& options, const LogitsObserver& with_logits) {
  const auto observe = [&](Stage stage, ShardRange range, const char* name, HostTensor& tensor) {
    if (!options.after) return;
    options.after({.stage = stage,
                   .rounding = options.rounding,
                   .mode = GradientMode::high_performance,
                   .shard = range,
                   .tensors = {{name, &tensor}}});
  };
  HostTensor softmax(DType::f32, {c.shape().BT, c.shape().V});
  for (const ShardRange range : statistics.ranges) {
    report(options, "softmax");
    ForwardResult forward = operators.forward(range, operators.logits_dtype());
    observe(Stage::logits, range, "logits", *forward.logits);
    MatrixView columns = softmax.matrix();
    columns.data = softmax.as<float>() + range.begin;
    columns.cols = range.size();
    operators.softmax(statistics.merged, *forward.logits, columns);
    observe(Stage::softmax, range, "softmax", softmax);
    if (with_logits) with_logits(range, *forward.logits, softmax);
  }
  return softmax;
}

GradientResult run_gradient(const Case& c, Operators& operators, const StatisticsResult& statistics,
                            const HostTensor* softmax, DType dtype,
                            const WholeRunOptions& options) {
  const Shape shape = c.shape();
  const bool several = statistics.ranges.size() > 1;
  GradientResult result{.grad_input = HostTensor(several ? DType::f32 : dtype, {shape.BT, shape.H}),
                        .grad_weight = HostTensor(dtype, {shape.V, shape.H})};
  for (size_t s = 0; s < statistics.ranges.size(); ++s) {
    report(options, "gradient");
    const ShardRange range = statistics.ranges[s];
    Operators::GradientRequest request;
    request.shard = range;
    request.local = &statistics.shards[s];
    request.merged = &statistics.merged;
    request.grad_input = result.grad_input.matrix();
    request.accumulate_grad_input = s > 0;
    request.grad_weight = result.grad_weight.rows(range.begin, range.end);
    if (softmax != nullptr) {
      request.mode = GradientMode::high_performance;
      request.softmax = ConstMatrixView(softmax->as<float>() + range.begin, DType::f32, shape.BT,
                                        range.size(), shape.V);
    }
    operators.gradient(request);
  }
  if (result.grad_input.dtype() != dtype) result.grad_input = result.grad_input.converted(dtype);
  if (options.after) {
    options.after(
        {.stage = Stage::gradient,
         .rounding = options.rounding,
         .mode = softmax != nullptr ? GradientMode::high_performance : GradientMode::memory_saving,
         .shard = {.begin = 0, .end = shape.V},
         .tensors = {{"grad_input", &result.grad_input}, {"grad_weight", &result.grad_weight}}});
  }
  return result;
}

std::optional<StepResult> run_step(Operators& operators, Strategy strategy, DType dtype,
                                   const WholeRunOptions& options) {
  report(options, "loss and gradient");
  std::optional<StepResult> result = operators.step(strategy, dtype);
  if (result && options.after) {
    options.after({.stage = Stage::step,
                   .rounding = LogitsRounding::none,
                   .mode = GradientMode::memory_saving,
                   .shard = {},
                   .tensors = {{"logits_max", &result->logits_max},
                               {"sum_exp_logits", &result->sum_exp_logits},
                               {"predicted_logits", &result->predicted_logits},
                               {"loss", &result->loss},
                               {"grad_input", &result->grad_input},
                               {"grad_weight", &result->grad_weight}},
                   .strategy = strategy,
                   .total = &result->total});
  }
  return result;
}

}  // namespace logitless::cli
