// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/table.h"
#include "cli/units.h"
#include "cli/verify.h"

namespace logitless::cli {
namespace {

struct VerifyArguments {
  CommonOptions common;
  CaseArguments case_arguments;
  int64_t shards = 1;
  std::string split;
  int64_t chunk_tokens = 0;
  bool full = false;
};

// Under mpirun: what only ranks do.
int run_split(const VerifyArguments& arguments) {
  if (arguments.shards > 1) fail("--shards is for one rank: not with mpirun or --split");
  RankRun run;
  run.case_arguments = &arguments.case_arguments;
  run.settings = arguments.common.settings();
  run.json = arguments.common.json;
  run.with_loss = run.gradient = true;
  run.chunk_tokens = arguments.chunk_tokens;
  if (!arguments.split.empty()) run.split = arguments.split;
  return verify_on_ranks(run, arguments.full);
}

int run_verify(const VerifyArguments& arguments) {
  if (started_as_rank() || !arguments.split.empty()) return run_split(arguments);
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

void add_verify(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* sub = app.add_subcommand(
      "verify", "Check every operator, mode and stage against float64: observed and allowed error");
  add_case_options(*sub, arguments->case_arguments);
  sub->add_option("--shards", arguments->shards,
                  "Cut the vocabulary into so many shards and merge them")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20, "SHARDS"))
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--split", arguments->split,
                  "Under mpirun the step of the vocabulary split over ranks is verified instead: "
                  "which rows each has, balanced (default), padded, or row numbers such as "
                  "0,100,100,32000")
      ->type_name("SPLIT");
  sub->add_option("--chunk-tokens", arguments->chunk_tokens,
                  "Under mpirun, tokens summed while the next ones are computed; 0 = automatic")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  sub->add_flag("--full", arguments->full,
                "Check every row; the default samples where that takes more than about 20 s");
  add_common_options(*sub, arguments->common);
  sub->footer(
      example("  logitless verify hidden.safetensors head.safetensors --shards 4\n"
              "  mpirun -n 4 logitless verify case.safetensors --split padded"));
  sub->callback(
      [arguments, &command] { command = [arguments] { return run_verify(*arguments); }; });
}

}  // namespace logitless::cli
