// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <limits>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/files.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/safetensors.h"
#include "cli/synthetic.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

struct MakeArguments {
  CommonOptions common;
  std::string out;
  std::string dtype = "bf16";
  SyntheticOptions synthetic;
};

constexpr int64_t kMostSize = int64_t{1} << 40;

int run_make(const MakeArguments& arguments) {
  SyntheticOptions options = arguments.synthetic;
  options.dtype = take(parse_operand_dtype(arguments.dtype));
  static_cast<void>(arguments.common.settings());  // refuses a bad limit
  take(check_output(arguments.out, {}));
  const CancelToken& cancel = cancel_on_interrupt();
  Progress progress;
  const int64_t rows = options.vocab + options.tokens;
  const Case c = take(make_synthetic(options, [&](int64_t done) {
    if (done % 64 != 0) return;
    progress.show("making the case", done, rows);
    if (cancel.cancelled()) {
      throw Failure{.exit_code = kExitCancelled, .message = "cancelled, nothing was written"};
    }
  }));
  std::map<std::string, std::string> metadata = case_metadata(c.vocab_start_index, c.shape().V);
  metadata["seed"] = fmt::format("{}", options.seed);
  take(write_safetensors(
      arguments.out,
      {{"input", &c.input}, {"weight", &c.weight}, {"target", &c.target}, {"grad", &c.grad}},
      metadata, &cancel));
  const int64_t bytes = c.input.bytes() + c.weight.bytes() + c.target.bytes() + c.grad.bytes();
  if (arguments.common.json) {
    print_json({{"out", arguments.out},
                {"shape", to_json(c.shape())},
                {"dtype", logitless::name_of(c.dtype())},
                {"seed", options.seed},
                {"vocab_start_index", c.vocab_start_index},
                {"targets_outside", c.tokens_outside()},
                {"bytes", bytes}});
    return kExitFine;
  }
  fmt::print("wrote {}: {} {}, {}\n", arguments.out, format_shape(c.shape()),
             logitless::name_of(c.dtype()), format_bytes(bytes));
  return kExitFine;
}

}  // namespace

void add_make(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<MakeArguments>();
  CLI::App* sub = app.add_subcommand(
      "make", "Write a synthetic case with a softmax as peaked as a trained model's");
  SyntheticOptions& s = arguments->synthetic;
  sub->add_option("out", arguments->out, "The safetensors file to write")
      ->required()
      ->type_name("OUT");
  sub->add_option("--tokens", s.tokens, "Tokens, BT")
      ->check(whole_number(0, kMostSize))
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--vocab", s.vocab, "Rows of weight, V")
      ->check(whole_number(0, kMostSize))
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--hidden", s.hidden, "Hidden size, H")
      ->check(whole_number(0, kMostSize))
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--dtype", arguments->dtype, "Of input and weight: f32, f16 or bf16")
      ->capture_default_str()
      ->type_name("TYPE");
  sub->add_option("--seed", s.seed, "The same seed gives the same bits on every machine")
      ->check(seed_number())
      ->capture_default_str()
      ->type_name("N");
  sub->add_option("--masked", s.masked, "Fraction of targets outside the shard")
      ->capture_default_str()
      ->type_name("P");
  sub->add_option("--zero-grad", s.zero_grad, "Fraction of tokens whose grad is 0")
      ->capture_default_str()
      ->type_name("P");
  sub->add_option("--vocab-start", s.vocab_start, "Global id of the shard's first row")
      ->check(whole_number(0, std::numeric_limits<int64_t>::max()))
      ->capture_default_str()
      ->type_name("ID");
  sub->add_option("--global-vocab", s.global_vocab,
                  "Size of the whole vocabulary; default: just what the other options need")
      ->check(whole_number(0, std::numeric_limits<int64_t>::max()))
      ->type_name("N");
  add_common_options(*sub, arguments->common);
  sub->footer(
      example("  logitless make case.safetensors --tokens 1024 --vocab 32000 --hidden 2048 "
              "--seed 7"));
  sub->callback([arguments, &command] { command = [arguments] { return run_make(*arguments); }; });
}

}  // namespace logitless::cli
