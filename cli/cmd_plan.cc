// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/models.h"
#include "cli/plan_op.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

struct PlanArguments {
  ListOptions lists;
  std::vector<std::string> shapes;
  std::vector<std::string> models;
  std::optional<int64_t> tokens;
  std::vector<std::string> ops;
  std::string dtype = "bf16";
  std::string rounding = "none";
  std::string grad_tolerance;
};

int run_plan(const PlanArguments& arguments) {
  const std::vector<RunSettings> settings = arguments.lists.settings();
  PlanRequest request;
  request.dtype = take(parse_operand_dtype(arguments.dtype));
  request.rounding = parse_rounding(arguments.rounding);
  std::vector<std::string> ops = arguments.ops;
  if (!arguments.grad_tolerance.empty()) {
    request.grad_tolerance = take(parse_tolerance(arguments.grad_tolerance));
  }
  if (ops.empty()) ops.assign(kPlannedOps.begin(), kPlannedOps.end());
  // Unasked, the one that knows no sparse gradient is left out.
  if (request.grad_tolerance > 0 && arguments.ops.empty()) std::erase(ops, "gradient-hp");
  std::vector<Shape> shapes;
  for (const std::string& text : arguments.shapes) {
    shapes.push_back(take(parse_shape(text)));
    if (arguments.tokens) shapes.back().BT = *arguments.tokens;
  }
  for (const std::string& name : arguments.models) {
    const Model model = take(find_model(name));
    shapes.push_back({.BT = arguments.tokens.value_or(1024), .V = model.V, .H = model.H});
  }
  if (shapes.empty()) fail("plan takes --shape or --model");
  std::vector<PlanSummary> plans;
  for (const Shape& shape : shapes) {
    request.shape = shape;
    for (const std::string& op : ops) {
      request.op = op;
      for (const RunSettings& one : settings) {
        plans.push_back(take(plan_op(request, one.plan_options())));
      }
    }
  }
  if (arguments.lists.json) {
    ordered_json list = ordered_json::array();
    for (const PlanSummary& plan : plans) {
      list.push_back({{"op", plan.op},
                      {"shape", to_json(plan.shape)},
                      {"dtype", logitless::name_of(request.dtype)},
                      {"isa", logitless::name_of(plan.isa)},
                      {"threads", plan.threads},
                      {"workspace_bytes", plan.workspace_bytes},
                      {"strategy", plan.strategy},
                      {"describe", plan.text}});
      if (request.grad_tolerance > 0 && plan.op != "forward") {
        list.back()["grad_tolerance"] = request.grad_tolerance;
      }
    }
    print_json({{"plans", std::move(list)}});
    return kExitFine;
  }
  for (const PlanSummary& plan : plans) {
    fmt::print("{} {} {}: workspace {}\n{}{}\n", plan.op, format_shape(plan.shape),
               logitless::name_of(request.dtype), format_bytes(plan.workspace_bytes), plan.text,
               plan.text.ends_with('\n') ? "" : "\n");
  }
  return kExitFine;
}

}  // namespace

void add_plan(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<PlanArguments>();
  CLI::App* sub = app.add_subcommand(
      "plan", "Print what would run: schedule, tiles, chunks, workspace; nothing is computed");
  sub->add_option("--shape", arguments->shapes, "One or more of BT,V,H")->type_name("BT,V,H");
  sub->add_option("--model", arguments->models,
                  "Heads of public models, for example llama-3-8b,gpt-2")
      ->delimiter(',')
      ->type_name("NAME,...");
  sub->add_option("--tokens", arguments->tokens, "BT of --model (default 1024) and --shape")
      ->check(whole_number(0, kMostTokens))
      ->type_name("N");
  sub->add_option("--op", arguments->ops, "forward, gradient, gradient-hp, one-pass; default: all")
      ->delimiter(',')
      ->check(CLI::IsMember(kPlannedOps))
      ->type_name("OP,...");
  sub->add_option("--dtype", arguments->dtype, "Of input and weight: f32, f16 or bf16")
      ->capture_default_str()
      ->type_name("TYPE");
  sub->add_option("--logits-rounding", arguments->rounding, "none or operand")
      ->capture_default_str()
      ->type_name("ROUNDING");
  add_tolerance_option(*sub, arguments->grad_tolerance,
                       "The sparse gradient of this relative standard error, for example 2^-9, "
                       "instead of the exact one");
  add_list_options(*sub, arguments->lists);
  sub->footer(
      example("  logitless plan --shape 1024,32000,2048 --workspace-limit 64MiB\n"
              "  logitless plan --model llama-3-8b --threads 16,64,128"));
  sub->callback([arguments, &command] { command = [arguments] { return run_plan(*arguments); }; });
}

}  // namespace logitless::cli
