// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/table.h"
#include "cli/units.h"
#include "cli/verify.h"
#include "cli/verify_sparse.h"
#include "reference/sparse_gradient.h"

namespace logitless::cli {
namespace {

struct VerifyArguments {
  CommonOptions common;
  CaseArguments case_arguments;
  int64_t shards = 1;
  std::string split;
  int64_t chunk_tokens = 0;
  bool full = false;
  SparseOptions sparse;
  int seeds = 256;
};

// Under mpirun: what only ranks do.
int run_split(const VerifyArguments& arguments, const SparseGradient& sparse) {
  if (arguments.shards > 1) fail("--shards is for one rank: not with mpirun or --split");
  RankRun run;
  run.case_arguments = &arguments.case_arguments;
  run.settings = arguments.common.settings();
  run.json = arguments.common.json;
  run.with_loss = run.gradient = true;
  run.chunk_tokens = arguments.chunk_tokens;
  if (!arguments.split.empty()) run.split = arguments.split;
  if (sparse.tolerance == 0) return verify_on_ranks(run, arguments.full);
  run.sparse = sparse;
  return verify_sparse_on_ranks(run, arguments.seeds, arguments.full);
}

ordered_json errors_json(const RelativeErrors& errors) {
  ordered_json document = {{"rows", errors.rows},     {"all", errors.all},
                           {"median", errors.median}, {"p99", errors.p99},
                           {"worst", errors.worst},   {"worst_row", errors.worst_row}};
  return document;
}

void print_sparse(const SparseVerifyReport& report, const Case& c, const SparseGradient& sparse,
                  const std::vector<RowRange>& cover) {
  const SparseCounts& counts = report.counts;
  const std::string ranks = cover.empty() ? "" : fmt::format("{} ranks of ", cover.size());
  fmt::print("{} {}, {}, {}{} thread{}, workspace {}\n", format_shape(report.shape),
             logitless::name_of(c.dtype()), logitless::name_of(report.isa), ranks, report.threads,
             report.threads == 1 ? "" : "s", format_bytes(report.workspace_bytes));
  fmt::print("sparse gradient to fp32, grad_tolerance {} ({:.3g}), seed {}\n",
             format_tolerance(sparse.tolerance), sparse.tolerance, sparse.seed);
  fmt::print("kept {:.3g} % of grad_logits; {} of {} rows with a gradient are dense\n",
             100 * kept_share(counts), format_count(counts.dense_rows), format_count(counts.rows));
  if (!report.sample.complete) {
    fmt::print("errors are those of {} of {} tokens and {} of {} vocabulary rows (--full: all)\n",
               format_count(static_cast<int64_t>(report.sample.tokens.size())),
               format_count(report.shape.BT),
               format_count(static_cast<int64_t>(report.sample.vocabulary.size())),
               format_count(report.shape.V));
  }
  Table table({{"relative error", Align::left},
               {"rows", Align::right},
               {"all", Align::right},
               {"median", Align::right},
               {"p99", Align::right},
               {"worst", Align::right},
               {"of row", Align::right}});
  const auto add = [&](const char* name, const RelativeErrors& errors, bool each_row) {
    std::vector<std::string> cells = {name, format_count(errors.rows),
                                      fmt::format("{:.5f}", errors.all)};
    if (each_row && errors.rows > 0) {
      for (const double value : {errors.median, errors.p99, errors.worst}) {
        cells.push_back(fmt::format("{:.5f}", value));
      }
      cells.push_back(fmt::format("{}", errors.worst_row));
    } else {
      cells.insert(cells.end(), 4, "");
    }
    table.row(std::move(cells));
  };
  add("grad_input", report.grad_input, true);
  // A row of grad_weight of which nothing was kept is off by all of it.
  add("grad_weight", report.grad_weight, false);
  fmt::print("\n{}", table.str());
  if (report.certain_rows > 0) {
    fmt::print("without {} row{} with 1 - p_target < 2^-8, where float itself has few digits\n",
               format_count(report.certain_rows), report.certain_rows == 1 ? "" : "s");
  }
  if (report.seeds > 0) {
    fmt::print("bias: {} seeds, {} directions, {} rows of grad_input", format_count(report.seeds),
               reference::BiasCheck::kDirections, format_count(report.bias_rows));
    if (report.fixed_rows > 0) {
      fmt::print("; {} rows that no seed changes are left out", format_count(report.fixed_rows));
    }
    fmt::print("\n");
  } else {
    fmt::print("bias: not checked, {}\n", report.fixed_rows > 0 ? "no seed changes anything"
                                                                : "that takes more than one seed");
  }
  fmt::print("\n");
  print_judgements(
      report.judgements,
      "an error is allowed the length that chance exceeds once in a million, for which "
      "a row of\nfew chosen elements needs room");
}

int run_verify_sparse(const VerifyArguments& arguments, const SparseGradient& sparse) {
  if (arguments.shards > 1) fail("--shards has no sparse gradient: not with --grad-tolerance");
  SparseVerifyOptions options;
  options.sparse = sparse;
  options.seeds = arguments.seeds;
  options.full = arguments.full;
  options.run = arguments.common.settings();
  Progress progress;
  options.progress = [&](const std::string& what) { progress.show(what); };
  progress.show("reading the case");
  Case c = arguments.case_arguments.load();
  const SparseVerifyReport report = verify_sparse(c, options);
  return print_sparse_verification(report, c, sparse, arguments.common.json);
}

int run_verify(const VerifyArguments& arguments) {
  const SparseGradient sparse = arguments.sparse.parse();
  if (!arguments.sparse.grad_tolerance.empty() && sparse.tolerance == 0) {
    fail("--grad-tolerance is 0, that of exact gradients: without it verify judges these");
  }
  if (started_as_rank() || !arguments.split.empty()) return run_split(arguments, sparse);
  if (sparse.tolerance > 0) return run_verify_sparse(arguments, sparse);
  VerifyOptions options;
  options.shards = arguments.shards;
  options.full = arguments.full;
  options.run = arguments.common.settings();
  Progress progress;
  options.progress = [&](const std::string& what) { progress.show(what); };
  progress.show("reading the case");
  const Case c = arguments.case_arguments.load();
  const VerifyReport report = verify_case(c, options);
  const int code = report.fine() ? kExitFine : kExitVerificationFailed;
  const Sample& sample = report.sample;
  if (arguments.common.json) {
    print_json({{"case", c.source},
                {"shape", to_json(report.shape)},
                {"dtype", logitless::name_of(c.dtype())},
                {"isa", logitless::name_of(report.isa)},
                {"threads", report.threads},
                {"shards", arguments.shards},
                {"complete", sample.complete},
                {"tokens_checked", sample.tokens.size()},
                {"vocabulary_rows_checked", sample.vocabulary.size()},
                {"softmax_tokens", report.softmax_tokens},
                {"one_pass_fits", report.one_pass_fits},
                {"mean_loss", report.mean_loss},
                {"mean_loss_float64", report.mean_loss_float64},
                {"judgements", to_json(report.judgements)},
                {"fine", report.fine()}});
    return code;
  }
  fmt::print("{} {}, {}, {} thread{}, {} shard{}\n", format_shape(report.shape),
             logitless::name_of(c.dtype()), logitless::name_of(report.isa), report.threads,
             report.threads == 1 ? "" : "s", arguments.shards, arguments.shards == 1 ? "" : "s");
  if (sample.complete) {
    fmt::print("all tokens and vocabulary rows are checked against float64\n");
  } else {
    fmt::print(
        "checked against float64: {} of {} tokens, {} of {} vocabulary rows, tile and shard "
        "edges among them (--full checks all)\n",
        format_count(static_cast<int64_t>(sample.tokens.size())), format_count(report.shape.BT),
        format_count(static_cast<int64_t>(sample.vocabulary.size())), format_count(report.shape.V));
  }
  if (report.softmax_tokens < report.shape.BT) {
    fmt::print("high-performance mode holds softmax [BT, V], so it ran on the first {} tokens\n",
               format_count(report.softmax_tokens));
  }
  if (!report.one_pass_fits) {
    fmt::print("loss and gradient in one pass does not fit the workspace limit: not verified\n");
  }
  fmt::print("\n");
  print_judgements(report.judgements);
  fmt::print("\nmean loss of the checked tokens {:.9g}, float64 {:.9g}\n", report.mean_loss,
             report.mean_loss_float64);
  fmt::print("{} {}\n", report.fine() ? marks().good : marks().bad,
             report.fine() ? "every error is within what is allowed"
                           : "verification failed: an error is beyond what is allowed");
  return code;
}

}  // namespace

int print_sparse_verification(const SparseVerifyReport& report, const Case& c,
                              const SparseGradient& sparse, bool json,
                              const std::vector<RowRange>& cover) {
  const int code = report.fine() ? kExitFine : kExitVerificationFailed;
  if (!json) {
    print_sparse(report, c, sparse, cover);
    fmt::print("{} {}\n", report.fine() ? marks().good : marks().bad,
               report.fine() ? "every error is within what is allowed"
                             : "verification failed: an error is beyond what is allowed");
    return code;
  }
  const SparseCounts& counts = report.counts;
  ordered_json document = {{"case", c.source},
                           {"shape", to_json(report.shape)},
                           {"dtype", logitless::name_of(c.dtype())},
                           {"isa", logitless::name_of(report.isa)},
                           {"threads", report.threads}};
  if (!cover.empty()) {
    document["ranks"] = cover.size();
    document["split"] = to_json(cover);
  }
  document.update({{"grad_tolerance", sparse.tolerance},
                   {"seed", sparse.seed},
                   {"rows", counts.rows},
                   {"dense_rows", counts.dense_rows},
                   {"kept", counts.kept},
                   {"elements", counts.elements},
                   {"complete", report.sample.complete},
                   {"tokens_checked", report.sample.tokens.size()},
                   {"vocabulary_rows_checked", report.sample.vocabulary.size()},
                   {"grad_input", errors_json(report.grad_input)},
                   {"certain_rows", report.certain_rows},
                   {"grad_weight", errors_json(report.grad_weight)},
                   {"seeds", report.seeds},
                   {"bias_rows", report.bias_rows},
                   {"fixed_rows", report.fixed_rows},
                   {"workspace_bytes", report.workspace_bytes},
                   {"judgements", to_json(report.judgements)},
                   {"fine", report.fine()}});
  print_json(document);
  return code;
}

void add_verify(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* sub = app.add_subcommand(
      "verify", "Check every operator, mode and stage against float64: observed and allowed error");
  add_case_options(*sub, arguments->case_arguments);
  sub->add_option("--shards", arguments->shards,
                  "Cut the vocabulary into so many shards and merge them")
      ->check(whole_number(1, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--split", arguments->split,
                  "Under mpirun the step of the vocabulary split over ranks is verified instead: "
                  "which rows each has, balanced (default), padded, or row numbers such as "
                  "0,100,100,32000")
      ->type_name("SPLIT");
  sub->add_option("--chunk-tokens", arguments->chunk_tokens,
                  "Under mpirun, tokens summed while the next ones are computed; 0 = automatic")
      ->check(whole_number(0, kMostTokens))
      ->type_name("N");
  sub->add_flag("--full", arguments->full,
                "Check every row; the default samples where that takes more than about 20 s");
  add_sparse_options(*sub, arguments->sparse,
                     "Verify the sparse gradient of this relative standard error instead, for "
                     "example 2^-9: one seed's errors, and the mean of many seeds");
  sub->add_option("--seeds", arguments->seeds,
                  "Seeds of the check for bias, from --seed on; 0: no check")
      ->check(whole_number(0, 1 << 20))
      ->capture_default_str()
      ->type_name("N");
  add_common_options(*sub, arguments->common);
  sub->footer(
      example("  logitless verify hidden.safetensors head.safetensors --shards 4\n"
              "  logitless verify case.safetensors --grad-tolerance 2^-9\n"
              "  mpirun -n 4 logitless verify case.safetensors --split padded\n"
              "  mpirun -n 4 logitless verify case.safetensors --grad-tolerance 2^-9"));
  sub->callback(
      [arguments, &command] { command = [arguments] { return run_verify(*arguments); }; });
}

}  // namespace logitless::cli
