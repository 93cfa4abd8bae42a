// SPDX-License-Identifier: Apache-2.0
#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/failure.h"
#include "cli/plan_op.h"
#include "cli/resident_memory.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

const char* rounding_name(LogitsRounding rounding) {
  return rounding == LogitsRounding::operand ? "operand" : "none";
}

// The planned operators that an op is made of.
std::vector<std::string> parts_of(const std::string& op) {
  if (op == "step") return {"forward", "gradient"};
  return {op};
}

// The name of a part's plan.
std::string planned_op(const std::string& part) { return part == "sparse" ? "one-pass" : part; }

int repeats_in(double seconds, double first, int least, int most) {
  const double fit = seconds / std::max(first, 1e-6);
  return std::clamp(static_cast<int>(std::min(fit, 1e6)), least, most);
}

}  // namespace

Bench::Bench(const Case& c, const BenchSettings& settings)
    : case_(c), settings_(settings), operators_(c, settings.run, settings.rounding) {
  const Shape shape = c.shape();
  if (settings.only != "grad_weight") {
    grad_input_ = HostTensor(c.dtype(), {shape.BT, shape.H});
    grad_input_->fill_zero();
  }
  if (settings.only != "grad_input") {
    grad_weight_ = HostTensor(c.dtype(), {shape.V, shape.H});
    grad_weight_->fill_zero();
  }
  statistics_ = run_statistics(case_, operators_, {});
  // Beside each other: logits and softmax, [BT, V] of fp32 each, and as much again to be safe.
  const double wanted = 16.0 * static_cast<double>(shape.BT) * static_cast<double>(shape.V);
  holds_logits_ = wanted < static_cast<double>(available_memory_bytes());
}

BenchLine Bench::run(const std::string& op, Progress& progress) {
  progress.show(fmt::format("{} {}", op, format_shape(case_.shape())));
  BenchLine line;
  line.op = op;
  line.model = settings_.model;
  line.shape = case_.shape();
  line.dtype = case_.dtype();
  line.logits_rounding = rounding_name(settings_.rounding);
  line.only = settings_.only;
  line.zero_grad_rows = settings_.zero_grad_rows;
  line.workspace_limit_bytes = settings_.run.workspace_limit_bytes;
  line.read_bytes_per_second = settings_.read_bytes_per_second;
  if (op == "sparse") {
    line.grad_tolerance = settings_.sparse.tolerance;
    line.seed = settings_.sparse.seed;
  }
  if (op == "forward") {  // knows no gradient
    line.only.clear();
    line.zero_grad_rows = 0;
  }
  fill_plan(line);
  const Calls fused = fused_calls(op);
  const Calls unfused = unfused_calls(op);
  if (op == "gradient-hp" || (op == "gradient" && unfused)) {
    if (!softmax_) softmax_ = run_softmax(case_, operators_, statistics_, {});
  }

  // Warm: threads, workspace, caches; also tells the memory of the first call and its flops.
  const size_t costs_before = operators_.costs().size();
  operators_.drop_workspace();
  line.memory = peak_memory_of(fused);
  for (size_t i = costs_before; i < operators_.costs().size(); ++i) {
    const Cost& cost = operators_.costs()[i];
    line.flops += cost.flops;
    line.workspace_bytes = std::max(line.workspace_bytes, cost.workspace_bytes);
  }
  line.sparse_counts = sparse_counts_;
  line.isa = operators_.isa();
  line.threads = operators_.threads();
  if (unfused) {
    operators_.drop_workspace();
    line.unfused_memory = peak_memory_of(unfused);
    // Its softmax is there before and after.
    if (op == "gradient" && line.unfused_memory) *line.unfused_memory += softmax_->bytes();
  }

  // A B A B: slow drifts of the clock meet both alike.
  line.peak_before = measure_peak(line);
  std::vector<std::pair<Calls, std::vector<double>*>> beside;
  if (unfused) beside.emplace_back(unfused, &line.unfused);
  if (op == "sparse") {
    beside.emplace_back(fused_calls("forward"), &line.forward);
    beside.emplace_back(fused_calls("one-pass"), &line.exact);
  }
  double first = seconds_of(fused);
  for (const auto& [calls, seconds] : beside) first += seconds_of(calls);
  const int repeats =
      settings_.repeats > 0 ? settings_.repeats : repeats_in(settings_.seconds, first, 5, 101);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    progress.show(op, repeat, repeats);
    line.seconds.push_back(seconds_of(fused));
    for (const auto& [calls, seconds] : beside) seconds->push_back(seconds_of(calls));
  }
  line.peak_after = measure_peak(line);
  line.clock_hz = measure_clock_hz(0.02);

  const int cold_repeats = !settings_.cold         ? 0
                           : settings_.repeats > 0 ? settings_.repeats
                                                   : repeats_in(settings_.seconds, first, 3, 21);
  for (int repeat = 0; repeat < cold_repeats; ++repeat) {
    progress.show(op + ", cold", repeat, cold_repeats);
    operators_.drop_workspace();
    release_free_memory();
    // Reads a buffer larger than every cache, with the threads that run the operators.
    static_cast<void>(measure_read_bandwidth(line.threads, 1e-3));
    line.cold.push_back(seconds_of(fused));
  }
  step_logits_.reset();
  step_softmax_.reset();
  return line;
}

Bench::Calls Bench::fused_calls(const std::string& op) {
  if (op == "forward") return [this] { forward_and_loss(); };
  if (op == "gradient") return [this] { gradient(nullptr); };
  if (op == "gradient-hp") return [this] { gradient(&*softmax_); };
  if (op == "one-pass") return [this] { loss_and_gradient({}); };
  if (op == "sparse") {
    return [this] {
      SparseGradient sparse = settings_.sparse;
      sparse.seed += sparse_calls_++;
      loss_and_gradient(sparse);
    };
  }
  return [this] {
    forward_and_loss();
    gradient(nullptr);
  };
}

Bench::Calls Bench::unfused_calls(const std::string& op) {
  if (!settings_.unfused || !holds_logits_ || op == "gradient-hp" || op == "sparse") return {};
  if (op == "forward") return [this] { write_softmax(); };
  if (op == "gradient") return [this] { gradient(&*softmax_); };
  return [this] {
    write_softmax();
    gradient(&*step_softmax_);
  };
}

// Of the operators' runs alone: plans and the tensors of a result are a user's to keep.
double Bench::seconds_of(const Calls& calls) {
  const size_t before = operators_.costs().size();
  calls();
  double seconds = 0;
  for (size_t i = before; i < operators_.costs().size(); ++i) {
    seconds += operators_.costs()[i].seconds;
  }
  return seconds;
}

// The work a line stands for, and what its plans say.
void Bench::fill_plan(BenchLine& line) {
  for (const std::string& part : parts_of(line.op)) {
    line.work += work_of({.op = part,
                          .shape = line.shape,
                          .dtype = line.dtype,
                          .rows = case_.counting_tokens(),
                          .with_gradient = case_.tokens_with_gradient(),
                          .grad_input = grad_input_.has_value(),
                          .grad_weight = grad_weight_.has_value()});
    const PlanSummary plan = take(plan_op({.op = planned_op(part),
                                           .shape = line.shape,
                                           .dtype = line.dtype,
                                           .rounding = settings_.rounding,
                                           .grad_tolerance = line.grad_tolerance,
                                           .grad_input = grad_input_.has_value(),
                                           .grad_weight = grad_weight_.has_value()},
                                          settings_.run.plan_options()));
    line.plan += plan.text;
    line.strategy = plan.strategy;
  }
}

double Bench::measure_peak(const BenchLine& line) const {
  const double seconds = std::clamp(settings_.seconds / 10, 0.02, 0.2);
  return take(measure_peak_flops(line.isa, line.dtype, line.threads, seconds));
}

void Bench::forward_and_loss() {
  operators_.forward(whole(), {}, statistics_.shards.front());
  static_cast<void>(operators_.loss(statistics_.shards.front()));
}

void Bench::gradient(const HostTensor* softmax) {
  Operators::GradientRequest request;
  request.shard = whole();
  request.local = &statistics_.shards.front();
  request.merged = &statistics_.merged;
  if (grad_input_) request.grad_input = grad_input_->matrix();
  if (grad_weight_) request.grad_weight = grad_weight_->matrix();
  if (softmax != nullptr) {
    request.mode = GradientMode::high_performance;
    request.softmax = softmax->matrix();
  }
  operators_.gradient(request);
}

void Bench::loss_and_gradient(const SparseGradient& sparse) {
  std::optional<MatrixView> grad_input;
  std::optional<MatrixView> grad_weight;
  if (grad_input_) grad_input = grad_input_->matrix();
  if (grad_weight_) grad_weight = grad_weight_->matrix();
  static_cast<void>(operators_.loss_and_gradient(grad_input, grad_weight, sparse, &sparse_counts_));
}

void Bench::write_softmax() {
  const DType logits_dtype = operators_.logits_dtype();
  if (step_logits_) {
    operators_.forward(whole(), logits_dtype, *step_logits_);
  } else {
    step_logits_ = operators_.forward(whole(), logits_dtype);
    step_softmax_ = HostTensor(DType::f32, {case_.shape().BT, case_.shape().V});
  }
  operators_.softmax(*step_logits_, *step_logits_->logits, step_softmax_->matrix());
}

}  // namespace logitless::cli
