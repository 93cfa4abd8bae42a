// SPDX-License-Identifier: Apache-2.0
// The main job on one case, every step timed and checked against float64 in the same run: forward,
// loss, the gradient in both modes, the vocabulary cut in four. Ends in a table; exit status 0 only
// if every error is within the allowed one and the mean loss is the expected one.
//
//   logitless_demo [--expect-mean-loss X] [--peak-seconds S] CASE...
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/case.h"
#include "cli/failure.h"
#include "cli/host_tensor.h"
#include "cli/judge.h"
#include "cli/operators.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "cli/units.h"
#include "logitless/logitless.h"
#include "reference/reference.h"

namespace {

using namespace logitless;
using cli::Case;
using cli::HostTensor;
using cli::Judgement;
using cli::Judgements;

constexpr int64_t kShards = 4;
// A step is timed so often; the median is shown.
constexpr int kRepeats = 3;
// Of the mean loss, and of the mean loss with logits rounded to bf16 first.
constexpr double kMeanLossTolerance = 2e-5;
constexpr double kRoundedMeanLossTolerance = 3e-3;
// Of the float64 one against the known value, which is given to nine decimals.
constexpr double kExactMeanLossTolerance = 1e-8;
// float64 over all of the gradients would take minutes: so many rows of each are checked, edges of
// shards and rows of targets among them. Statistics and loss are checked for every token.
constexpr int64_t kCheckedRows = 96;

// One line of the table.
struct Step {
  std::string name;
  double seconds = 0;
  double flops = 0;
  int64_t workspace_bytes = 0;
  std::string also_holds;  // what lives beside the workspace because of this step
  Judgement worst;
};

const Judgement& worst_of(const Judgements& judgements) {
  return *std::max_element(judgements.begin(), judgements.end(),
                           [](const auto& a, const auto& b) { return a.ratio < b.ratio; });
}

// Up to kCheckedRows rows spread over [0, n), first and last among them.
std::vector<int64_t> spread_rows(int64_t n) {
  std::vector<int64_t> rows;
  const int64_t count = std::min(n, kCheckedRows);
  for (int64_t i = 0; i < count; ++i) rows.push_back(count == 1 ? 0 : i * (n - 1) / (count - 1));
  return rows;
}

class Demo {
 public:
  Demo(Case c, double peak_seconds)
      : case_(std::move(c)),
        shape_(case_.shape()),
        operators_(case_, {}, LogitsRounding::none),
        peak_seconds_(peak_seconds) {}

  // Before every step: on a busy machine a single measurement would come out too low.
  void measure_peak() {
    peak_ = std::max(peak_, cli::take(measure_peak_flops(cli::take(default_isa()), case_.dtype(),
                                                         default_threads(), peak_seconds_)));
  }

  void print_machine() const {
    const int threads = default_threads();
    std::printf("%s tokens, a vocabulary of %s, hidden size %s, %s\n",
                cli::format_count(shape_.BT).c_str(), cli::format_count(shape_.V).c_str(),
                cli::format_count(shape_.H).c_str(), name_of(case_.dtype()));
    std::printf("%s: %s on %d thread%s\n\n", machine_info().cpu.c_str(),
                name_of(cli::take(default_isa())), threads, threads == 1 ? "" : "s");
  }

  void run_reference() {
    exact_ = reference::forward(case_.input.matrix(), case_.weight.matrix(), case_.target.vector(),
                                {.vocab_start_index = case_.vocab_start_index,
                                 .rows = {.ignore_index = case_.ignore_index}});
    const auto loss = reference::loss(exact_);
    for (const double value : loss.loss.value) exact_mean_ += value;
    exact_mean_ /= static_cast<double>(case_.counting_tokens());
  }

  void run_forward() {
    whole_.ranges = cli::cut_vocabulary(shape_.V, 1);
    cli::LossResult loss;
    add_step("forward and loss", [&] {
      whole_.shards.clear();
      whole_.shards.push_back(operators_.forward(whole_.ranges[0]));
      loss = operators_.loss(whole_.shards[0]);
    });
    whole_.merged = operators_.merge(whole_.shards);
    Judgements judgements;
    judge(whole_.merged, loss, judgements);
    steps_.back().worst = worst_of(judgements);
    mean_ = mean(loss);

    // The same with logits rounded to the operand type, as the C face and an NPU do it.
    cli::Operators rounding(case_, {}, LogitsRounding::operand);
    rounded_mean_ = mean(rounding.loss(rounding.forward(whole_.ranges[0])));
  }

  void run_gradient_memory_saving() { run_gradient("gradient, memory-saving", nullptr); }

  // Softmax is made here from fp32 logits, which is the one place where anything of size BT * V
  // exists: that is what this mode costs.
  void run_gradient_high_performance() {
    const HostTensor softmax = cli::run_softmax(case_, operators_, whole_, {});
    run_gradient("gradient, softmax given", &softmax);
    steps_.back().also_holds = " + softmax " + cli::format_bytes(softmax.bytes());
  }

  // What a training step calls: three products instead of four.
  void run_one_pass() {
    LossAndGradientTypes types;
    types.operand = case_.dtype();
    types.target = case_.target.dtype();
    types.grad_input = GradientOutput{.dtype = case_.dtype()};
    types.grad_weight = GradientOutput{.dtype = case_.dtype()};
    const auto plan = cli::take(plan_loss_and_gradient(shape_, types));
    cli::Buffer workspace(plan.workspace_bytes());
    HostTensor loss(DType::f32, {shape_.BT});
    HostTensor grad_input(case_.dtype(), case_.input.shape());
    HostTensor grad_weight(case_.dtype(), case_.weight.shape());
    LossAndGradientOutputs outputs;
    outputs.loss = loss.vector();
    outputs.grad_input = grad_input.matrix();
    outputs.grad_weight = grad_weight.matrix();
    Step step;
    step.name = "loss and gradient, one pass";
    std::vector<double> seconds;
    for (int i = 0; i < kRepeats; ++i) {
      const auto start = std::chrono::steady_clock::now();
      cli::take(run(plan,
                    {.input = case_.input.matrix(),
                     .weight = case_.weight.matrix(),
                     .target = case_.target.vector(),
                     .rows = {.ignore_index = case_.ignore_index},
                     .token_weights = case_.grad.vector(),
                     .normalizer = 1.0},
                    outputs, workspace.span()));
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      seconds.push_back(elapsed.count());
    }
    std::sort(seconds.begin(), seconds.end());
    step.seconds = seconds[seconds.size() / 2];
    step.flops = 6.0 * static_cast<double>(shape_.BT) * static_cast<double>(shape_.V) *
                 static_cast<double>(shape_.H);
    step.workspace_bytes = plan.workspace_bytes();
    Judgements judgements;
    cli::judge_loss("loss", &loss, nullptr, exact_, false, judgements);
    // Exponentials are kept in bf16 before grad_logits are rounded to it.
    judge(grad_input, grad_weight, nullptr, judgements,
          plan.strategy() == Strategy::one_pass && case_.dtype() == DType::bf16 ? 2 : 1);
    step.worst = worst_of(judgements);
    steps_.push_back(step);
  }

  // As four ranks would: each shard its statistics, one merge, each shard its gradients.
  void run_sharded() {
    const cli::WholeRunOptions options = {.shards = kShards};
    cli::StatisticsResult statistics;
    cli::LossResult loss;
    cli::GradientResult gradient;
    add_step("all of it, vocabulary cut in 4", [&] {
      statistics = cli::run_statistics(case_, operators_, options);
      loss = cli::run_loss(operators_, statistics.merged, options);
      gradient = cli::run_gradient(case_, operators_, statistics, nullptr, case_.dtype(), options);
    });
    Judgements judgements;
    judge(statistics.merged, loss, judgements);
    judge(gradient.grad_input, gradient.grad_weight, nullptr, judgements);
    steps_.back().worst = worst_of(judgements);
    sharded_mean_ = mean(loss);
  }

  // Returns whether everything is as it should be.
  bool print_results(std::optional<double> expected_mean) const {
    using cli::Align;
    const cli::Marks mark = cli::marks();
    bool fine = true;
    const auto verdict = [&](bool good) -> std::string {
      fine = fine && good;
      return good ? mark.good : mark.bad;
    };
    const auto fixed = [](const char* format, double value) -> std::string {
      char text[32];
      std::snprintf(text, sizeof text, format, value);
      return text;
    };

    cli::Table table({{"step"},
                      {"time", Align::right},
                      {"of peak", Align::right},
                      {"scratch memory"},
                      {"nearest to its limit"},
                      {"error", Align::right},
                      {"allowed", Align::right},
                      {""}});
    for (const Step& step : steps_) {
      table.row({step.name, cli::format_seconds(step.seconds),
                 fixed("%.0f %%", 100 * step.flops / step.seconds / peak_),
                 cli::format_bytes(step.workspace_bytes) + step.also_holds, step.worst.output,
                 cli::format_error(step.worst.observed), cli::format_error(step.worst.allowed),
                 verdict(step.worst.fine())});
    }
    std::printf("\n%s\n", table.str().c_str());
    for (const Step& step : steps_) {
      if (step.worst.fine()) continue;
      std::printf("%s: %s\n", step.name.c_str(), cli::describe_worst(step.worst).c_str());
    }
    std::printf("Full logits would take %s, and as much again for their gradient.\n",
                cli::format_bytes(shape_.BT * shape_.V * 4).c_str());
    std::printf("Peak: %.0f GFLOP/s, the same instruction on registers alone, in this run.\n",
                peak_ * 1e-9);
    std::printf(
        "Errors are against float64; shown is the element nearest to what the arithmetic "
        "allows.\n\n");

    cli::Table means({{"mean loss, nats"},
                      {"", Align::right},
                      {"off by", Align::right},
                      {"allowed", Align::right},
                      {""}});
    const auto line = [&](const std::string& name, double value, double from, double tolerance) {
      const double off = std::abs(value - from);
      means.row({name, fixed("%.9f", value), fixed("%.1e", off), fixed("%.0e", tolerance),
                 verdict(off <= tolerance)});
    };
    if (expected_mean) {
      line("float64, computed just now", exact_mean_, *expected_mean, kExactMeanLossTolerance);
    } else {
      means.row({"float64, computed just now", fixed("%.9f", exact_mean_), "", "", ""});
    }
    const double from = expected_mean.value_or(exact_mean_);
    line("fused", mean_, from, kMeanLossTolerance);
    line("fused, vocabulary cut in 4", sharded_mean_, from, kMeanLossTolerance);
    line(std::string("fused, logits rounded to ") + name_of(case_.dtype()), rounded_mean_, from,
         kRoundedMeanLossTolerance);
    std::printf("%s\n", means.str().c_str());
    return fine;
  }

 private:
  // Runs `work` kRepeats times and records the median of what its calls of operators took.
  template <typename Work>
  void add_step(const char* name, Work&& work) {
    Step step;
    step.name = name;
    std::vector<double> seconds;
    for (int i = 0; i < kRepeats; ++i) {
      const size_t before = operators_.costs().size();
      work();
      seconds.push_back(0);
      step.flops = 0;
      for (size_t call = before; call < operators_.costs().size(); ++call) {
        const cli::Cost& cost = operators_.costs()[call];
        seconds.back() += cost.seconds;
        step.flops += cost.flops;
        step.workspace_bytes = std::max(step.workspace_bytes, cost.workspace_bytes);
      }
    }
    std::sort(seconds.begin(), seconds.end());
    step.seconds = seconds[seconds.size() / 2];
    steps_.push_back(step);
  }

  void run_gradient(const char* name, const HostTensor* softmax) {
    HostTensor grad_input(case_.dtype(), case_.input.shape());
    HostTensor grad_weight(case_.dtype(), case_.weight.shape());
    cli::Operators::GradientRequest request;
    request.shard = whole_.ranges[0];
    request.local = &whole_.shards[0];
    request.merged = &whole_.merged;
    request.grad_input = grad_input.matrix();
    request.grad_weight = grad_weight.matrix();
    if (softmax != nullptr) {
      request.mode = GradientMode::high_performance;
      request.softmax = softmax->matrix();
    }
    add_step(name, [&] { operators_.gradient(request); });
    Judgements judgements;
    judge(grad_input, grad_weight, softmax, judgements);
    steps_.back().worst = worst_of(judgements);
  }

  double mean(const cli::LossResult& loss) const {
    double sum = 0;
    for (int64_t b = 0; b < shape_.BT; ++b) sum += static_cast<double>(loss.loss.float_at(b));
    return sum / static_cast<double>(case_.counting_tokens());
  }

  // Statistics and loss of every token.
  void judge(const cli::ForwardResult& merged, const cli::LossResult& loss, Judgements& out) const {
    cli::judge_statistics("statistics",
                          {.logits_max = &merged.logits_max,
                           .sum_exp_logits = &merged.sum_exp_logits,
                           .predicted_logits = &merged.predicted_logits,
                           .target_mask = &merged.target_mask,
                           .masked_target = &merged.masked_target},
                          exact_, shape_.BT, out);
    cli::judge_loss("loss", &loss.loss, &loss.logsumexp, exact_, false, out);
  }

  // Vocabulary rows worth a look: edges of the shards, rows that are targets, and others.
  std::vector<int64_t> checked_vocabulary() const {
    std::vector<int64_t> rows = spread_rows(shape_.V);
    for (const cli::ShardRange range : cli::cut_vocabulary(shape_.V, kShards)) {
      if (range.size() > 0) rows.insert(rows.end(), {range.begin, range.end - 1});
    }
    for (const int64_t b : spread_rows(shape_.BT)) {
      const int64_t v = case_.target.integer_at(b) - case_.vocab_start_index;
      if (case_.counts(b) && v >= 0 && v < shape_.V) rows.push_back(v);
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }

  // Rows of both gradients. A given softmax is an operand; else the definition uses its own
  // statistics, and how far correct ones stray from them is part of what is allowed. roundings: of
  // softmax to 16 bits, which are independent and what nearly all of the deviation comes from.
  void judge(const HostTensor& grad_input, const HostTensor& grad_weight, const HostTensor* softmax,
             Judgements& out, int roundings = 1) const {
    reference::GradientOperands operands = {
        .input = case_.input.matrix(),
        .weight = case_.weight.matrix(),
        .grad = reference::read(case_.grad.vector()),
        .target_mask = exact_.target_mask,
        .masked_target = exact_.masked_target,
        .logits_max = exact_.logits_max.value,
        .sum_exp_logits = exact_.sum_exp_logits.value,
        .logsumexp_deviation = exact_.logsumexp_deviation,
        .counts = exact_.counts,
    };
    if (case_.grad_logsumexp) {
      operands.grad_logsumexp = reference::read(case_.grad_logsumexp->vector());
    }
    if (softmax != nullptr) operands.softmax = softmax->matrix();
    const auto judge_rows = [&](const char* output, const HostTensor& got,
                                reference::Gradient expected, int64_t terms) {
      for (double& deviation : expected.deviation.values) deviation *= std::sqrt(roundings);
      cli::judge_gradient("gradient", output, got, expected, terms, out);
    };
    judge_rows("grad_input", grad_input,
               reference::grad_input(operands, {}, spread_rows(shape_.BT)), shape_.V);
    judge_rows("grad_weight", grad_weight,
               reference::grad_weight(operands, {}, checked_vocabulary()), shape_.BT);
  }

  Case case_;
  Shape shape_;
  cli::Operators operators_;
  double peak_seconds_;
  double peak_ = 0;  // flop/s
  reference::Statistics exact_;
  double exact_mean_ = 0, mean_ = 0, rounded_mean_ = 0, sharded_mean_ = 0;
  cli::StatisticsResult whole_;
  std::vector<Step> steps_;
};

int run_demo(const std::vector<std::string>& paths, double peak_seconds,
             std::optional<double> expected_mean) {
  Demo demo(cli::take(cli::load_case(paths)), peak_seconds);
  demo.print_machine();
  const std::pair<const char*, void (Demo::*)()> stages[] = {
      {"float64: loss of every token", &Demo::run_reference},
      {"fused: forward and loss", &Demo::run_forward},
      {"fused: gradient, memory-saving mode", &Demo::run_gradient_memory_saving},
      {"fused: gradient, high-performance mode", &Demo::run_gradient_high_performance},
      {"fused: loss and gradient in one pass", &Demo::run_one_pass},
      {"fused: all of it, vocabulary cut in 4", &Demo::run_sharded},
  };
  std::printf("Every fused step runs %d times and is then checked against float64:\n", kRepeats);
  for (const auto& [what, run_stage] : stages) {
    std::printf("  %-40s ", what);
    std::fflush(stdout);
    demo.measure_peak();
    const auto start = std::chrono::steady_clock::now();
    (demo.*run_stage)();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    std::printf("%8s\n", cli::format_seconds(elapsed.count()).c_str());
  }
  return demo.print_results(expected_mean) ? cli::kExitFine : cli::kExitVerificationFailed;
}

}  // namespace

int main(int argc, char** argv) {
  std::optional<double> expected_mean;
  double peak_seconds = 0.3;
  std::vector<std::string> paths;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--expect-mean-loss") == 0 && i + 1 < argc) {
      expected_mean = std::strtod(argv[++i], nullptr);
    } else if (std::strcmp(argv[i], "--peak-seconds") == 0 && i + 1 < argc) {
      peak_seconds = std::strtod(argv[++i], nullptr);
    } else {
      paths.emplace_back(argv[i]);
    }
  }
  if (paths.empty()) {
    std::fprintf(stderr,
                 "usage: logitless_demo [--expect-mean-loss X] [--peak-seconds S] CASE...\n");
    return cli::kExitBadInput;
  }
  try {
    return run_demo(paths, peak_seconds, expected_mean);
  } catch (const cli::Failure& failure) {
    std::fprintf(stderr, "demo: %s\n", failure.message.c_str());
    return failure.exit_code;
  }
}
