// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/compare.h"
#include "cli/failure.h"
#include "cli/progress.h"
#include "cli/safetensors.h"
#include "cli/table.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

struct CompareArguments {
  CommonOptions common;
  CaseArguments case_arguments;
  std::string outputs;
  std::string rounding;
  bool full = false;
};

// The option, else what the file says of itself, else none.
LogitsRounding choose_rounding(const CompareArguments& arguments) {
  if (!arguments.rounding.empty()) return parse_rounding(arguments.rounding);
  const SafetensorsFile file = take(SafetensorsFile::open(arguments.outputs));
  const auto entry = file.metadata().find("logits_rounding");
  return entry != file.metadata().end() && entry->second == "operand" ? LogitsRounding::operand
                                                                      : LogitsRounding::none;
}

// Gradients made in one pass say so, in the file's metadata.
std::optional<DType> held_softmax(const CompareArguments& arguments, const Case& c) {
  const SafetensorsFile file = take(SafetensorsFile::open(arguments.outputs));
  const auto entry = file.metadata().find("strategy");
  if (entry == file.metadata().end() || entry->second != name_of(Strategy::one_pass)) return {};
  return held_softmax_type(c.dtype());
}

// So do sparse ones, which are right on average over seeds and not one by one.
std::string sparse_tolerance(const CompareArguments& arguments) {
  const SafetensorsFile file = take(SafetensorsFile::open(arguments.outputs));
  const auto entry = file.metadata().find("grad_tolerance");
  return entry == file.metadata().end() ? "" : entry->second;
}

int run_compare(const CompareArguments& arguments) {
  static_cast<void>(arguments.common.settings());  // refuses a bad limit
  CompareOptions options;
  options.rounding = choose_rounding(arguments);
  options.full = arguments.full;
  Progress progress;
  options.progress = [&](const std::string& what) { progress.show(what); };
  progress.show("reading");
  const Case c = arguments.case_arguments.load();
  options.held_softmax = held_softmax(arguments, c);
  ForeignOutputs outputs = take(load_outputs(arguments.outputs, c));
  const std::string tolerance = sparse_tolerance(arguments);
  if (!tolerance.empty()) {
    outputs.erase("grad_input");
    outputs.erase("grad_weight");
  }
  const CompareReport report = compare_outputs(c, outputs, options);
  const int code = report.fine() ? kExitFine : kExitVerificationFailed;
  const Sample& sample = report.sample;
  if (arguments.common.json) {
    ordered_json document = {
        {"case", c.source},
        {"outputs", arguments.outputs},
        {"shape", to_json(c.shape())},
        {"logits_rounding", name_of(options.rounding)},
        {"complete", sample.complete},
        {"tokens_checked", sample.tokens.size()},
        {"vocabulary_rows_checked", sample.vocabulary.size()},
        {"not_in_file", report.absent},
        {"gradient_statistics", report.statistics_from_file ? "file" : "float64"}};
    if (report.mean_loss) {
      document["mean_loss"] = *report.mean_loss;
      document["mean_loss_float64"] = *report.mean_loss_float64;
    }
    if (!tolerance.empty()) document["grad_tolerance"] = tolerance;
    document["judgements"] = to_json(report.judgements);
    document["fine"] = report.fine();
    print_json(document);
    return code;
  }
  fmt::print("{} against float64, {} {}, logits rounding {}\n", printable(arguments.outputs),
             format_shape(c.shape()), logitless::name_of(c.dtype()), name_of(options.rounding));
  if (!tolerance.empty()) {
    fmt::print(
        "its gradients are sparse (grad_tolerance {}) and not judged here: verify "
        "--grad-tolerance does\n",
        printable(tolerance));
  }
  if (!sample.complete) {
    fmt::print("sampled: {} of {} tokens, {} of {} vocabulary rows (--full checks all)\n",
               format_count(static_cast<int64_t>(sample.tokens.size())), format_count(c.shape().BT),
               format_count(static_cast<int64_t>(sample.vocabulary.size())),
               format_count(c.shape().V));
  }
  if (report.statistics_from_file) {
    fmt::print("the gradient is judged with the file's own logits_max and sum_exp_logits\n");
  }
  if (!report.absent.empty()) {
    fmt::print("not in the file, so not judged: {}\n", fmt::join(report.absent, ", "));
  }
  fmt::print("\n");
  print_judgements(report.judgements);
  fmt::print("\n");
  for (const Judgement& judgement : report.judgements) {
    if (judgement.observed > 0) fmt::print("worst: {}\n", describe_worst(judgement));
  }
  if (report.mean_loss) {
    fmt::print("mean loss {:.9g}, float64 {:.9g}\n", *report.mean_loss, *report.mean_loss_float64);
  }
  fmt::print("{} {}\n", report.fine() ? marks().good : marks().bad,
             report.fine() ? "every error is within what is allowed"
                           : "comparison failed: an error is beyond what is allowed");
  return code;
}

}  // namespace

void add_compare(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<CompareArguments>();
  CLI::App* sub = app.add_subcommand(
      "compare", "Judge outputs made elsewhere (an accelerator, a framework, your own kernel)");
  add_case_options(*sub, arguments->case_arguments);
  sub->add_option("--outputs", arguments->outputs,
                  "Safetensors file with any of logits_max, sum_exp_logits, predicted_logits, "
                  "target_mask, masked_target, loss, logsumexp, logits, softmax, grad_input, "
                  "grad_weight")
      ->required()
      ->type_name("FILE");
  sub->add_option("--logits-rounding", arguments->rounding,
                  "How the outputs were made: none or operand; default: what the file's metadata "
                  "say, else none")
      ->type_name("ROUNDING");
  sub->add_flag("--full", arguments->full,
                "Check every row; the default samples where that takes more than about 20 s");
  add_common_options(*sub, arguments->common);
  sub->footer(example(
      "  logitless compare case.safetensors --outputs npu_dump.safetensors --logits-rounding "
      "operand"));
  sub->callback(
      [arguments, &command] { command = [arguments] { return run_compare(*arguments); }; });
}

}  // namespace logitless::cli
