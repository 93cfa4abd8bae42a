// SPDX-License-Identifier: Apache-2.0
#include "cli/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "cli/failure.h"
#include "cli/table.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

constexpr double kWideMargin = 8;

template <typename T>
CLI::Validator number_between(T least, T most, const char* kind) {
  const auto rule = [least, most, kind](std::string& text) -> std::string {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool all = error == std::errc() && end == text.data() + text.size();
    if (all && value >= least && value <= most) return "";
    return fmt::format("'{}' is not a {} from {} to {}", printable(text), kind, least, most);
  };
  return {rule, ""};
}

}  // namespace

CLI::Validator whole_number(int64_t least, int64_t most) {
  return number_between(least, most, "whole number");
}
CLI::Validator seed_number() {
  return number_between<uint64_t>(0, std::numeric_limits<uint64_t>::max(), "whole number");
}
CLI::Validator number(double least, double most) { return number_between(least, most, "number"); }

RunSettings CommonOptions::settings() const {
  RunSettings settings;
  settings.threads = threads;
  if (!workspace_limit.empty()) settings.workspace_limit_bytes = take(parse_bytes(workspace_limit));
  return settings;
}

std::vector<RunSettings> ListOptions::settings() const {
  std::vector<RunSettings> list;
  const std::vector<int> counts = threads.empty() ? std::vector<int>{0} : threads;
  const std::vector<std::string> limits =
      workspace_limits.empty() ? std::vector<std::string>{""} : workspace_limits;
  for (const int count : counts) {
    for (const std::string& limit : limits) {
      CommonOptions one;
      one.threads = count;
      one.workspace_limit = limit;
      list.push_back(one.settings());
    }
  }
  return list;
}

SparseGradient SparseOptions::parse() const {
  SparseGradient sparse;
  if (!grad_tolerance.empty()) sparse.tolerance = take(parse_tolerance(grad_tolerance));
  sparse.seed = seed;
  return sparse;
}

Case CaseArguments::load() const { return take(try_load({})); }

Result<Case> CaseArguments::try_load(
    const std::function<Result<RowRange>(int64_t rows)>& weight_rows) const {
  CaseOptions options;
  options.weight_rows = weight_rows;
  options.tokens = tokens;
  options.weight_name = weight_name;
  options.ignore_index = ignore_index;
  if (!dtype.empty()) {
    const auto parsed = parse_operand_dtype(dtype);
    if (!parsed) return parsed.error();
    options.dtype = *parsed;
  }
  return load_case(paths, options);
}

void add_common_options(CLI::App& sub, CommonOptions& common) {
  sub.add_flag("--json", common.json, "Print one JSON document instead of text");
  sub.add_option("--threads", common.threads,
                 "Threads; default: OMP_NUM_THREADS or the CPUs this process may use")
      ->check(whole_number(1, kMostThreads))
      ->type_name("N");
  sub.add_option("--workspace-limit", common.workspace_limit,
                 "At most this much workspace per operator, for example 64MiB")
      ->type_name("SIZE");
}

void add_list_options(CLI::App& sub, ListOptions& lists) {
  sub.add_flag("--json", lists.json, "Print one JSON document instead of text");
  sub.add_option(
         "--threads", lists.threads,
         "Threads, one number or several; default: OMP_NUM_THREADS or the CPUs this process "
         "may use")
      ->delimiter(',')
      ->check(whole_number(1, kMostThreads))
      ->type_name("N,...");
  sub.add_option("--workspace-limit", lists.workspace_limits,
                 "At most this much workspace per operator, for example 64MiB; several: one after "
                 "the other")
      ->delimiter(',')
      ->type_name("SIZE,...");
}

void add_case_options(CLI::App& sub, CaseArguments& arguments, bool required, bool with_tokens) {
  CLI::Option* paths = sub.add_option(
      "case", arguments.paths,
      "One or more safetensors files that together hold input [BT, H], weight [V, H], target [BT] "
      "and, if wanted, grad [BT] and grad_logsumexp [BT]");
  paths->type_name("CASE")->expected(-1);
  if (required) paths->required();
  if (with_tokens) {
    sub.add_option("--tokens", arguments.tokens, "Only the first N tokens of the case")
        ->check(whole_number(0, kMostTokens))
        ->type_name("N");
  }
  sub.add_option("--dtype", arguments.dtype, "Convert input and weight to f32, f16 or bf16")
      ->type_name("TYPE");
  sub.add_option("--weight-name", arguments.weight_name,
                 "Name of weight in its file, for example lm_head.weight")
      ->type_name("NAME")
      ->capture_default_str();
  sub.add_option("--ignore-index", arguments.ignore_index,
                 "Tokens whose target is this id do not count, for example -100")
      ->check(
          whole_number(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()))
      ->type_name("ID");
}

CLI::Option* add_tolerance_option(CLI::App& sub, std::string& grad_tolerance,
                                  const std::string& what) {
  return sub.add_option("--grad-tolerance", grad_tolerance, what)->type_name("EPS");
}

void add_sparse_options(CLI::App& sub, SparseOptions& sparse, const std::string& what) {
  CLI::Option* tolerance = add_tolerance_option(sub, sparse.grad_tolerance, what);
  sub.add_option("--seed", sparse.seed,
                 "Of the sparse gradient's choice; a training step takes a new one each time")
      ->check(seed_number())
      ->needs(tolerance)
      ->capture_default_str()
      ->type_name("N");
}

std::string example(const std::string& lines) { return "Example:\n" + lines; }

LogitsRounding parse_rounding(const std::string& text) {
  if (text == "none") return LogitsRounding::none;
  if (text == "operand") return LogitsRounding::operand;
  fail(fmt::format("--logits-rounding is '{}', must be none or operand", printable(text)));
}

Strategy parse_strategy(const std::string& text) {
  if (text.empty() || text == "automatic") return Strategy::automatic;
  if (text == "one-pass") return Strategy::one_pass;
  if (text == "recompute") return Strategy::recompute;
  fail(
      fmt::format("--strategy is '{}', must be automatic, one-pass or recompute", printable(text)));
}

const char* name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::automatic:
      return "automatic";
    case Strategy::one_pass:
      return "one_pass";
    case Strategy::recompute:
      return "recompute";
  }
  return "";
}

void add_strategy_option(CLI::App& sub, std::string& strategy) {
  sub.add_option("--strategy", strategy,
                 "Under mpirun: one-pass holds the exponentials of a chunk of tokens for its "
                 "gradients, recompute multiplies for the logits again; automatic (default)")
      ->type_name("STRATEGY");
}

const char* name_of(LogitsRounding rounding) {
  switch (rounding) {
    case LogitsRounding::none:
      return "none";
    case LogitsRounding::operand:
      return "operand";
    case LogitsRounding::infer:
      return "infer";
  }
  return "?";
}

void print_kept(const SparseCounts& counts) {
  fmt::print("kept   {:.3g} % of grad_logits; {} of {} rows dense\n", 100 * kept_share(counts),
             format_count(counts.dense_rows), format_count(counts.rows));
}

void print_json(const ordered_json& document) {
  fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

ordered_json to_json(const Shape& shape) {
  return {{"BT", shape.BT}, {"V", shape.V}, {"H", shape.H}};
}

ordered_json to_json(const std::vector<RowRange>& cover) {
  ordered_json shards = ordered_json::array();
  for (const RowRange& rows : cover) shards.push_back({rows.begin, rows.end});
  return shards;
}

ordered_json to_json(const Judgements& judgements) {
  ordered_json list = ordered_json::array();
  for (const Judgement& j : judgements) {
    ordered_json entry = {{"stage", j.stage},      {"output", j.output}, {"observed", j.observed},
                          {"allowed", j.allowed},  {"ratio", j.ratio},   {"fine", j.fine()},
                          {"elements", j.elements}};
    ordered_json worst = {{"got", j.got}, {"expected", j.expected}};
    if (j.row >= 0) worst["row"] = j.row;
    if (j.col >= 0) worst["column"] = j.col;
    entry["worst"] = std::move(worst);
    list.push_back(std::move(entry));
  }
  return list;
}

void print_judgements(const Judgements& judgements, const std::string& wide_margins) {
  Table table({{"stage", Align::left},
               {"output", Align::left},
               {"elements", Align::right},
               {"observed", Align::right},
               {"allowed", Align::right},
               {"margin", Align::right},
               {"", Align::left}});
  for (const Judgement& j : judgements) {
    const bool comparable = j.allowed > 0 && j.observed > 0 && std::isfinite(j.observed);
    table.row({j.stage, j.output, format_count(j.elements), format_error(j.observed),
               j.exact ? "exact" : format_error(j.allowed),
               comparable ? fmt::format("{:.2f} x", 1 / j.ratio) : "",
               j.fine() ? marks().good : marks().bad});
  }
  fmt::print("{}", table.str());
  // An allowance far above what was observed would let mistakes pass: it has to give its reason.
  const bool wide = std::ranges::any_of(
      judgements, [](const Judgement& j) { return j.observed > 0 && j.ratio < 1 / kWideMargin; });
  if (wide) fmt::print("margins above {:.0f} x: {}\n", kWideMargin, wide_margins);
  for (const Judgement& j : judgements) {
    if (!j.fine()) fmt::print("{} {}: {}\n", marks().bad, j.stage, describe_worst(j));
  }
}

}  // namespace logitless::cli
