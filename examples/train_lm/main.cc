// SPDX-License-Identifier: Apache-2.0
// A language model of words, trained with its head cut over the ranks of an MPI job by
// vocab_parallel_linear_cross_entropy, and the proof that the cut changes nothing:
//
//   mpirun -n 4 logitless_train_lm train --split 0,2000,5500,9000,13433 --record four.json TEXT...
//   logitless_train_lm train --record one.json TEXT...
//   logitless_train_lm compare four.json one.json --picture losses.svg
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <new>
#include <string>

#include "cli/failure.h"
#include "cli/files.h"
#include "cli/table.h"
#include "cli/units.h"
#include "examples/train_lm/compare.h"
#include "examples/train_lm/picture.h"
#include "examples/train_lm/record.h"
#include "examples/train_lm/train.h"

namespace {

using namespace logitless;
using namespace logitless::train_lm;

// Of ranks that fail together, one says why: the others' message is empty.
int complain(int code, const std::string& message) {
  if (!message.empty()) fmt::print(stderr, "logitless_train_lm: {}\n", message);
  return code;
}

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

void add_train(CLI::App& app, TrainArguments& arguments) {
  CLI::App* command = app.add_subcommand("train", "Train on texts; on ranks under mpirun");
  Options& options = arguments.options;
  command->add_option("texts", arguments.texts, "Files of text, read one after the other")
      ->required();
  command
      ->add_option("--split", arguments.split,
                   "Rows of the head on each rank: balanced, padded, or where each one's begin "
                   "and the last one's end, as in 0,2000,5500,9000,13433")
      ->capture_default_str();
  const auto number = [&](const char* name, auto& value, const char* what) {
    command->add_option(name, value, what)->capture_default_str();
  };
  number("--steps", options.steps, "Steps of the whole training");
  number("--batch", options.batch, "Words that a step predicts");
  number("--context", options.context, "Words that it predicts each one from");
  number("--embedding", options.embedding, "Numbers that stand for a word");
  number("--hidden", options.hidden, "Size of the hidden layer, H of the head");
  number("--rate", options.rate, "AdamW's largest step; falls to 0 at the last one");
  number("--warm-up", options.warm_up, "Steps in which the rate rises");
  number("--decay", options.decay, "AdamW's weight decay");
  number("--dropout", options.dropout, "Share of hidden values that a step leaves out");
  number("--grad-tolerance", options.grad_tolerance,
         "Error of a sparse gradient of the head, of each word's; 0 = exact");
  number("--seed", options.seed, "Of all random numbers");
  number("--held-out-every", arguments.held_out_every, "Steps between held-out losses");
  number("--checkpoint", arguments.checkpoint, "File that Ctrl-C and the end save the run in");
  number("--save-every", arguments.save_every, "Also save after so many steps; 0 = do not");
  number("--stop-after", arguments.stop_after, "Stop early, after this step; 0 = do not");
  number("--resume", arguments.resume, "Go on from a checkpoint");
  number("--record", arguments.record, "File for `compare`: losses and checks as JSON");
  number("--progress", arguments.progress, "auto, bar, lines or none");
  command->add_flag("!--no-check", arguments.check,
                    "Leave out the first step's check against float64");
}

void add_compare(CLI::App& app, std::vector<std::string>& records, std::string& picture) {
  CLI::App* command =
      app.add_subcommand("compare", "Judge two runs of the same training on different ranks");
  command->add_option("records", records, "What two runs wrote with --record")
      ->required()
      ->expected(2);
  command->add_option("--picture", picture, "File for both curves, as SVG");
}

int compare_runs(const std::vector<std::string>& records, const std::string& picture) {
  const Record a = read_record(records[0]);
  const Record b = read_record(records[1]);
  const std::vector<Verdict> verdicts = compare(a, b);
  const cli::Marks mark = cli::marks();
  cli::Table table({{"check"}, {"found", cli::Align::right}, {"allowed", cli::Align::right}, {""}});
  bool fine = true;
  for (const Verdict& verdict : verdicts) {
    table.row({verdict.what, fmt::format("{:.2e}", verdict.found),
               fmt::format("{}{:.2e}", verdict.at_least ? ">= " : "", verdict.allowed),
               verdict.fine ? mark.good : mark.bad});
    fine = fine && verdict.fine;
  }
  fmt::print("{}", table.str());
  if (!picture.empty()) {
    const std::string svg = draw_losses(a, b);
    cli::OutputFile file = cli::take(cli::OutputFile::create(picture));
    cli::take(file.write(svg.data(), svg.size(), nullptr));
    cli::take(file.commit());
    fmt::print("\nBoth curves: {}\n", picture);
  }
  for (const Verdict& verdict : verdicts) {
    if (verdict.fine) continue;
    fmt::print("FAILED: {} is {:.6g}, must be {} {:.6g}\n", verdict.what, verdict.found,
               verdict.at_least ? "at least" : "at most", verdict.allowed);
  }
  return fine ? cli::kExitFine : cli::kExitVerificationFailed;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A language model of words, its head cut over the ranks of an MPI job.",
               "logitless_train_lm");
  app.require_subcommand(1);
  app.footer("Exit code: 0 fine, 1 a check failed, 2 bad usage or input, 130 interrupted.");
  TrainArguments arguments;
  std::vector<std::string> records;
  std::string picture;
  add_train(app, arguments);
  add_compare(app, records, picture);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    return complain(cli::kExitBadInput,
                    one_line(error.what()) + " (see logitless_train_lm --help)");
  }
  try {
    return app.got_subcommand("train") ? train(arguments) : compare_runs(records, picture);
  } catch (const cli::Failure& failure) {
    return complain(failure.exit_code, failure.message);
  } catch (const std::bad_alloc&) {
    return complain(cli::kExitBadInput, "there is not enough memory for this model");
  }
}
