// SPDX-License-Identifier: Apache-2.0
// logitless forward, loss, gradient.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/files.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/safetensors.h"
#include "cli/table.h"
#include "cli/units.h"
#include "logitless/version.h"

namespace logitless::cli {
namespace {

enum class Operator { forward, loss, gradient };

struct RunArguments {
  CommonOptions common;
  CaseArguments case_arguments;
  Operator op = Operator::forward;
  std::string out;
  std::string mode = "memory-saving";
  std::string rounding = "none";
  std::string grad_dtype;
  int64_t shards = 1;
  std::string split;
  std::string strategy;
  int64_t chunk_tokens = 0;
  bool with_softmax = false;
  SparseOptions sparse;
};

GradientMode parse_mode(const std::string& text) {
  if (text == "memory-saving") return GradientMode::memory_saving;
  if (text == "high-performance") return GradientMode::high_performance;
  fail(fmt::format("--mode is '{}', must be memory-saving or high-performance", printable(text)));
}

// Loss of the tokens that count.
struct LossSummary {
  double mean = 0;
  double largest = 0;
};

LossSummary summarise(const Case& c, const HostTensor& loss) {
  LossSummary summary;
  int64_t count = 0;
  for (int64_t b = 0; b < c.shape().BT; ++b) {
    if (!c.counts(b)) continue;
    const double value = static_cast<double>(loss.as<float>()[b]);
    summary.mean += value;
    summary.largest = count == 0 ? value : std::max(summary.largest, value);
    ++count;
  }
  summary.mean /= static_cast<double>(std::max<int64_t>(count, 1));
  return summary;
}

// The calls of one stage, several shards together.
struct StageCost {
  std::string stage;
  int calls = 0;
  double seconds = 0;
  double flops = 0;
  int64_t workspace_bytes = 0;
};

std::vector<StageCost> by_stage(const Costs& costs) {
  std::vector<StageCost> stages;
  for (const Cost& cost : costs) {
    auto stage = std::ranges::find_if(
        stages, [&](const StageCost& known) { return known.stage == cost.stage; });
    if (stage == stages.end())
      stage = stages.insert(stages.end(), StageCost{cost.stage, 0, 0, 0, 0});
    ++stage->calls;
    stage->seconds += cost.seconds;
    stage->flops += cost.flops;
    stage->workspace_bytes = std::max(stage->workspace_bytes, cost.workspace_bytes);
  }
  return stages;
}

// Under mpirun, where every rank comes here with the same arguments.
int run_split(const RunArguments& arguments, const SparseGradient& sparse, LogitsRounding rounding,
              GradientMode mode) {
  const auto only_alone = [](bool asked, const char* option) {
    if (asked) fail(fmt::format("{} is for one rank: not with mpirun or --split", option));
  };
  only_alone(arguments.shards > 1, "--shards");
  only_alone(rounding != LogitsRounding::none, "--logits-rounding operand");
  only_alone(mode != GradientMode::memory_saving, "--mode high-performance");
  only_alone(arguments.with_softmax, "--with-softmax");
  RankRun run;
  run.case_arguments = &arguments.case_arguments;
  run.settings = arguments.common.settings();
  run.json = arguments.common.json;
  run.with_loss = arguments.op != Operator::forward;
  run.gradient = arguments.op == Operator::gradient;
  if (!arguments.grad_dtype.empty()) {
    run.grad_dtype = take(parse_operand_dtype(arguments.grad_dtype));
  }
  run.sparse = sparse;
  run.chunk_tokens = arguments.chunk_tokens;
  run.strategy = parse_strategy(arguments.strategy);
  if (!arguments.split.empty()) run.split = arguments.split;
  run.out = arguments.out;
  return run_on_ranks(run);
}

DType grad_dtype_for(const RunArguments& arguments, const Case& c) {
  const DType grad_dtype =
      arguments.grad_dtype.empty() ? c.dtype() : take(parse_operand_dtype(arguments.grad_dtype));
  if (grad_dtype != c.dtype() && grad_dtype != DType::f32) {
    fail(fmt::format("--grad-dtype is {}, must be f32 or {}, the case's own type",
                     logitless::name_of(grad_dtype), logitless::name_of(c.dtype())));
  }
  return grad_dtype;
}

// Loss and both gradients in one call, the gradients sparse.
int run_sparse(const RunArguments& arguments, const SparseGradient& sparse, LogitsRounding rounding,
               GradientMode mode) {
  const auto only_exact = [](bool asked, const char* option) {
    if (asked) fail(fmt::format("{} has no sparse gradient: not with --grad-tolerance", option));
  };
  only_exact(arguments.shards > 1, "--shards");
  only_exact(rounding != LogitsRounding::none, "--logits-rounding operand");
  only_exact(mode != GradientMode::memory_saving, "--mode high-performance");
  RunSettings settings = arguments.common.settings();
  const CancelToken& cancel = cancel_on_interrupt();
  settings.cancel = &cancel;
  Progress progress;
  progress.show("reading the case");
  const Case c = arguments.case_arguments.load();
  if (c.vocab_start_index != 0 || c.tokens_outside() > 0) {
    fail(
        "--grad-tolerance takes a whole vocabulary: vocab_start_index 0, and every target that "
        "counts below V");
  }
  if (c.grad_logsumexp) fail("--grad-tolerance takes no grad_logsumexp");
  Operators operators(c, settings, rounding, Scope::step);
  progress.show("loss and gradient");
  const std::optional<StepResult> step =
      operators.step(Strategy::automatic, grad_dtype_for(arguments, c), sparse);
  if (!step) fail("--workspace-limit leaves no room for loss and gradient in one call");
  const SparseCounts& counts = step->sparse_counts;
  if (!arguments.out.empty()) {
    progress.show("writing");
    std::map<std::string, std::string> metadata = case_metadata(0, c.shape().V);
    metadata["logits_rounding"] = name_of(rounding);
    metadata["isa"] = logitless::name_of(operators.isa());
    metadata["made_by"] = "logitless " LOGITLESS_VERSION;
    metadata["grad_tolerance"] = format_tolerance(sparse.tolerance);
    metadata["seed"] = fmt::format("{}", sparse.seed);
    const std::vector<NamedTensor> tensors = {{"logits_max", &step->logits_max},
                                              {"sum_exp_logits", &step->sum_exp_logits},
                                              {"predicted_logits", &step->predicted_logits},
                                              {"loss", &step->loss},
                                              {"grad_input", &step->grad_input},
                                              {"grad_weight", &step->grad_weight}};
    take(write_safetensors(arguments.out, tensors, metadata, &cancel));
  }
  const LossSummary summary = summarise(c, step->loss);
  const Cost& cost = operators.costs().back();
  if (arguments.common.json) {
    ordered_json document = {{"case", c.source},
                             {"shape", to_json(c.shape())},
                             {"dtype", logitless::name_of(c.dtype())},
                             {"isa", logitless::name_of(operators.isa())},
                             {"threads", operators.threads()},
                             {"grad_tolerance", sparse.tolerance},
                             {"seed", sparse.seed},
                             {"tokens_counting", c.counting_tokens()},
                             {"mean_loss", summary.mean},
                             {"largest_loss", summary.largest},
                             {"total", step->total},
                             {"rows", counts.rows},
                             {"dense_rows", counts.dense_rows},
                             {"kept", counts.kept},
                             {"elements", counts.elements},
                             {"seconds", cost.seconds},
                             {"workspace_bytes", cost.workspace_bytes}};
    if (!arguments.out.empty()) document["out"] = arguments.out;
    print_json(document);
    return kExitFine;
  }
  fmt::print("case   {} {}, {} tokens count\n", format_shape(c.shape()),
             logitless::name_of(c.dtype()), format_count(c.counting_tokens()));
  fmt::print("run    {}, {} thread{}, sparse gradient, grad_tolerance {}, seed {}\n",
             logitless::name_of(operators.isa()), operators.threads(),
             operators.threads() == 1 ? "" : "s", format_tolerance(sparse.tolerance), sparse.seed);
  fmt::print("loss   mean {:.9g}, largest {:.9g}\n", summary.mean, summary.largest);
  print_kept(counts);
  fmt::print("time   {}, workspace {}\n", format_seconds(cost.seconds),
             format_bytes(cost.workspace_bytes));
  if (!arguments.out.empty()) fmt::print("wrote  {}\n", arguments.out);
  return kExitFine;
}

int run_operators(const RunArguments& arguments) {
  RunSettings settings = arguments.common.settings();
  const LogitsRounding rounding = parse_rounding(arguments.rounding);
  const GradientMode mode = parse_mode(arguments.mode);
  const SparseGradient sparse = arguments.sparse.parse();
  if (started_as_rank() || !arguments.split.empty()) {
    return run_split(arguments, sparse, rounding, mode);
  }
  if (!arguments.out.empty()) take(check_output(arguments.out, arguments.case_arguments.paths));
  if (sparse.tolerance > 0) return run_sparse(arguments, sparse, rounding, mode);
  const CancelToken& cancel = cancel_on_interrupt();
  settings.cancel = &cancel;
  Progress progress;
  progress.show("reading the case");
  const Case c = arguments.case_arguments.load();
  const DType grad_dtype = grad_dtype_for(arguments, c);

  Operators operators(c, settings, rounding);
  WholeRunOptions options;
  options.shards = arguments.shards;
  options.rounding = rounding;
  options.progress = [&](const std::string& what) { progress.show(what); };
  const StatisticsResult statistics = run_statistics(c, operators, options);
  const ForwardResult& merged = statistics.merged;
  std::vector<NamedTensor> tensors = {{"logits_max", &merged.logits_max},
                                      {"sum_exp_logits", &merged.sum_exp_logits},
                                      {"predicted_logits", &merged.predicted_logits},
                                      {"target_mask", &merged.target_mask},
                                      {"masked_target", &merged.masked_target}};
  std::optional<LossResult> loss;
  std::optional<HostTensor> softmax;
  std::optional<GradientResult> gradient;
  if (arguments.op != Operator::forward) {
    loss = run_loss(operators, merged, options);
    tensors.push_back({"loss", &loss->loss});
    tensors.push_back({"logsumexp", &loss->logsumexp});
  }
  const bool high_performance =
      arguments.op == Operator::gradient && mode == GradientMode::high_performance;
  if (arguments.with_softmax || high_performance) {
    softmax = run_softmax(c, operators, statistics, options);
  }
  if (arguments.with_softmax) tensors.push_back({"softmax", &*softmax});
  if (arguments.op == Operator::gradient) {
    gradient = run_gradient(c, operators, statistics, high_performance ? &*softmax : nullptr,
                            grad_dtype, options);
    tensors.push_back({"grad_input", &gradient->grad_input});
    tensors.push_back({"grad_weight", &gradient->grad_weight});
  }

  if (!arguments.out.empty()) {
    progress.show("writing");
    std::map<std::string, std::string> metadata = case_metadata(c.vocab_start_index, c.shape().V);
    metadata["logits_rounding"] = name_of(rounding);
    metadata["isa"] = logitless::name_of(operators.isa());
    metadata["shards"] = fmt::format("{}", arguments.shards);
    metadata["made_by"] = "logitless " LOGITLESS_VERSION;
    if (arguments.op == Operator::gradient) metadata["mode"] = arguments.mode;
    take(write_safetensors(arguments.out, tensors, metadata, &cancel));
  }

  const std::vector<StageCost> stages = by_stage(operators.costs());
  const LossSummary summary = loss ? summarise(c, loss->loss) : LossSummary{};
  if (arguments.common.json) {
    ordered_json document = {{"case", c.source},
                             {"shape", to_json(c.shape())},
                             {"dtype", logitless::name_of(c.dtype())},
                             {"isa", logitless::name_of(operators.isa())},
                             {"threads", operators.threads()},
                             {"shards", arguments.shards},
                             {"logits_rounding", name_of(rounding)},
                             {"tokens_counting", c.counting_tokens()},
                             {"targets_outside", c.tokens_outside()}};
    if (loss) {
      document["mean_loss"] = summary.mean;
      document["largest_loss"] = summary.largest;
    }
    ordered_json list = ordered_json::array();
    for (const StageCost& stage : stages) {
      list.push_back({{"stage", stage.stage},
                      {"calls", stage.calls},
                      {"seconds", stage.seconds},
                      {"flops", stage.flops},
                      {"workspace_bytes", stage.workspace_bytes}});
    }
    document["stages"] = std::move(list);
    if (!arguments.out.empty()) document["out"] = arguments.out;
    print_json(document);
    return kExitFine;
  }

  fmt::print("case   {} {}, {} tokens count", format_shape(c.shape()),
             logitless::name_of(c.dtype()), format_count(c.counting_tokens()));
  if (c.tokens_outside() > 0) {
    fmt::print(", {} of their targets are outside the vocabulary",
               format_count(c.tokens_outside()));
  }
  fmt::print("\nrun    {}, {} thread{}, {} shard{}, logits rounding {}\n",
             logitless::name_of(operators.isa()), operators.threads(),
             operators.threads() == 1 ? "" : "s", arguments.shards,
             arguments.shards == 1 ? "" : "s", name_of(rounding));
  if (loss) fmt::print("loss   mean {:.9g}, largest {:.9g}\n", summary.mean, summary.largest);
  Table table({{"stage", Align::left},
               {"calls", Align::right},
               {"time", Align::right},
               {"GFLOP/s", Align::right},
               {"workspace", Align::right}});
  for (const StageCost& stage : stages) {
    table.row({stage.stage, fmt::format("{}", stage.calls), format_seconds(stage.seconds),
               stage.flops > 0 ? fmt::format("{:.1f}", stage.flops / stage.seconds * 1e-9) : "",
               format_bytes(stage.workspace_bytes)});
  }
  fmt::print("{}", table.str());
  if (!arguments.out.empty()) fmt::print("wrote  {}\n", arguments.out);
  return kExitFine;
}

void add_operator(CLI::App& app, Command& command, Operator op, const std::string& name,
                  const std::string& description, const std::string& example_line) {
  const auto arguments = std::make_shared<RunArguments>();
  arguments->op = op;
  CLI::App* sub = app.add_subcommand(name, description);
  add_case_options(*sub, arguments->case_arguments);
  sub->add_option("--out", arguments->out,
                  "The safetensors file to write; without it only the summary is printed")
      ->type_name("OUT");
  sub->add_option("--shards", arguments->shards,
                  "Cut the vocabulary into so many shards and merge them")
      ->check(whole_number(1, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--split", arguments->split,
                  "Under mpirun, which rows of the vocabulary each rank has: balanced (default), "
                  "padded (as Megatron does), or row numbers such as 0,100,100,32000")
      ->type_name("SPLIT");
  if (op == Operator::gradient) {
    add_strategy_option(*sub, arguments->strategy);
    sub->add_option("--chunk-tokens", arguments->chunk_tokens,
                    "Under mpirun, so many tokens are summed over the ranks while the next ones "
                    "are computed; even, 0 = automatic")
        ->check(whole_number(0, kMostTokens))
        ->type_name("N");
  }
  sub->add_option("--logits-rounding", arguments->rounding,
                  "none: fp32 logits; operand: rounded to the operands' type first")
      ->capture_default_str()
      ->type_name("ROUNDING");
  if (op == Operator::gradient) {
    sub->add_option("--mode", arguments->mode,
                    "memory-saving recomputes the logits, high-performance keeps softmax [BT, V]")
        ->capture_default_str()
        ->type_name("MODE");
    sub->add_option("--grad-dtype", arguments->grad_dtype,
                    "Type of grad_input and grad_weight: f32 or the case's own (default)")
        ->type_name("TYPE");
  }
  if (op == Operator::gradient) {
    add_sparse_options(*sub, arguments->sparse,
                       "Loss and gradients in one call, the gradients sparse and unbiased, with "
                       "this relative standard error, for example 2^-9");
  }
  if (op == Operator::loss) {
    sub->add_flag("--with-softmax", arguments->with_softmax, "Also write softmax [BT, V]");
  }
  add_common_options(*sub, arguments->common);
  sub->footer(example(example_line));
  sub->callback(
      [arguments, &command] { command = [arguments] { return run_operators(*arguments); }; });
}

}  // namespace

void add_forward_loss_gradient(CLI::App& app, Command& command) {
  add_operator(app, command, Operator::forward, "forward",
               "Statistics of every token: logits_max, sum_exp_logits, predicted_logits, masks",
               "  logitless forward case.safetensors --shards 4 --out statistics.safetensors");
  add_operator(app, command, Operator::loss, "loss", "The forward's outputs, loss and logsumexp",
               "  logitless loss hidden.safetensors head.safetensors --out loss.safetensors");
  add_operator(app, command, Operator::gradient, "gradient",
               "The loss's outputs, grad_input and grad_weight",
               "  logitless gradient case.safetensors --mode memory-saving --shards 4 --out "
               "gradient.safetensors\n"
               "  logitless gradient case.safetensors --grad-tolerance 2^-9 --seed 17\n"
               "  mpirun -n 4 logitless gradient case.safetensors --split padded");
}

}  // namespace logitless::cli
