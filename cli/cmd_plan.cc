// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

struct PlanArguments {
  CommonOptions common;
  std::vector<std::string> shapes;
  std::vector<std::string> ops;
  std::string dtype = "bf16";
  std::string rounding = "none";
};

struct Described {
  std::string op;
  Shape shape;
  Isa isa;
  int threads;
  int64_t workspace_bytes;
  std::string text;
};

template <typename Plan>
Described describe(const std::string& op, const Plan& plan) {
  return {.op = op,
          .shape = plan.shape(),
          .isa = plan.isa(),
          .threads = plan.threads(),
          .workspace_bytes = plan.workspace_bytes(),
          .text = plan.describe()};
}

constexpr std::array<const char*, 4> kOps = {"forward", "gradient", "gradient-hp", "one-pass"};

int run_plan(const PlanArguments& arguments) {
  const PlanOptions options = arguments.common.settings().plan_options();
  const DType dtype = take(parse_operand_dtype(arguments.dtype));
  const LogitsRounding rounding = parse_rounding(arguments.rounding);
  std::vector<std::string> ops = arguments.ops;
  if (ops.empty()) ops.assign(kOps.begin(), kOps.end());
  std::vector<Described> plans;
  for (const std::string& text : arguments.shapes) {
    const Shape shape = take(parse_shape(text));
    for (const std::string& op : ops) {
      if (op == "forward") {
        ForwardTypes types;
        types.operand = dtype;
        types.logits_rounding = rounding;
        plans.push_back(describe(op, take(plan_forward(shape, types, options))));
        continue;
      }
      if (op == "one-pass") {
        LossAndGradientTypes types;
        types.operand = dtype;
        types.grad_input = GradientOutput{.dtype = dtype};
        types.grad_weight = GradientOutput{.dtype = dtype};
        plans.push_back(describe(op, take(plan_loss_and_gradient(shape, types, options))));
        continue;
      }
      GradientTypes types;
      types.operand = dtype;
      types.mode = op == "gradient" ? GradientMode::memory_saving : GradientMode::high_performance;
      types.logits_rounding = rounding;
      types.grad_input = GradientOutput{.dtype = dtype};
      types.grad_weight = GradientOutput{.dtype = dtype};
      plans.push_back(describe(op, take(plan_gradient(shape, types, options))));
    }
  }
  if (arguments.common.json) {
    ordered_json list = ordered_json::array();
    for (const Described& plan : plans) {
      list.push_back({{"op", plan.op},
                      {"shape", to_json(plan.shape)},
                      {"dtype", logitless::name_of(dtype)},
                      {"isa", logitless::name_of(plan.isa)},
                      {"threads", plan.threads},
                      {"workspace_bytes", plan.workspace_bytes},
                      {"describe", plan.text}});
    }
    print_json({{"plans", std::move(list)}});
    return kExitFine;
  }
  for (const Described& plan : plans) {
    fmt::print("{} {} {}: workspace {}\n{}{}\n", plan.op, format_shape(plan.shape),
               logitless::name_of(dtype), format_bytes(plan.workspace_bytes), plan.text,
               plan.text.ends_with('\n') ? "" : "\n");
  }
  return kExitFine;
}

}  // namespace

void add_plan(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<PlanArguments>();
  CLI::App* sub = app.add_subcommand(
      "plan", "Print what would run: schedule, tiles, chunks, workspace; nothing is computed");
  sub->add_option("--shape", arguments->shapes, "One or more of BT,V,H")
      ->required()
      ->type_name("BT,V,H");
  sub->add_option("--op", arguments->ops, "forward, gradient, gradient-hp, one-pass; default: all")
      ->delimiter(',')
      ->check(CLI::IsMember(kOps))
      ->type_name("OP,...");
  sub->add_option("--dtype", arguments->dtype, "Of input and weight: f32, f16 or bf16")
      ->capture_default_str()
      ->type_name("TYPE");
  sub->add_option("--logits-rounding", arguments->rounding, "none or operand")
      ->capture_default_str()
      ->type_name("ROUNDING");
  add_common_options(*sub, arguments->common);
  sub->footer(example("  logitless plan --shape 1024,32000,2048 --workspace-limit 64MiB"));
  sub->callback([arguments, &command] { command = [arguments] { return run_plan(*arguments); }; });
}

}  // namespace logitless::cli
