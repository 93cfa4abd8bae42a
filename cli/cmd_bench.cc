// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "cli/build_info.h"
#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/progress.h"
#include "cli/resident_memory.h"
#include "cli/synthetic.h"
#include "cli/table.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

// What is timed, and what stands beside it with logits held in memory:
//   forward      forward and loss                 | logits [BT, V] written, softmax of them
//   gradient     memory-saving gradient           | gradient from a softmax that is there already
//   gradient-hp  gradient from a given softmax    | -
//   step         forward, loss, gradient          | logits written, softmax, gradient from it
//   one-pass     loss and both gradients at once  | the same
constexpr std::array<const char*, 5> kOps = {"forward", "gradient", "gradient-hp", "step",
                                             "one-pass"};

struct BenchArguments {
  CommonOptions common;
  CaseArguments case_arguments;
  std::vector<std::string> shapes;
  std::vector<std::string> ops;
  std::string rounding = "none";
  int repeats = 0;
  double seconds = 3;
};

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of an odd or even number of times.
double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

struct Line {
  std::string op;
  Shape shape;
  DType dtype = DType::bf16;
  std::vector<double> fused;    // seconds
  std::vector<double> unfused;  // empty: not run
  double flops = 0;             // of the fused one
  double peak_before = 0, peak_after = 0;
  int64_t workspace_bytes = 0;
  std::optional<int64_t> memory, unfused_memory;  // rise of resident memory
  Isa isa = Isa::scalar;
  int threads = 0;

  double peak() const { return std::max(peak_before, peak_after); }
  double gflops() const { return flops / median(fused) * 1e-9; }
  double ratio_to_peak() const { return flops / median(fused) / peak(); }
  double spread() const {
    const auto [low, high] = std::ranges::minmax(fused);
    return (high - low) / median(fused);
  }
};

// All that the ops need of one case, made beforehand so that only the calls are timed.
class Bench {
 public:
  Bench(const Case& c, const BenchArguments& arguments, const RunSettings& settings)
      : case_(c),
        rounding_(parse_rounding(arguments.rounding)),
        arguments_(arguments),
        operators_(c, settings, rounding_),
        grad_input_(c.dtype(), {c.shape().BT, c.shape().H}),
        grad_weight_(c.dtype(), {c.shape().V, c.shape().H}) {
    grad_input_.fill_zero();
    grad_weight_.fill_zero();
    statistics_ = run_statistics(case_, operators_, {});
    // Beside each other: logits and softmax, [BT, V] of fp32 each, and as much again to be safe.
    const double wanted =
        16.0 * static_cast<double>(c.shape().BT) * static_cast<double>(c.shape().V);
    holds_logits_ = wanted < static_cast<double>(available_memory_bytes());
  }

  Line run(const std::string& op, Progress& progress) {
    progress.show(fmt::format("{} {}", op, format_shape(case_.shape())));
    const std::function<void()> fused = fused_work(op);
    const std::function<void()> unfused = unfused_work(op);
    Line line;
    line.op = op;
    line.shape = case_.shape();
    line.dtype = case_.dtype();
    if ((op == "gradient" || op == "gradient-hp") && holds_logits_) make_softmax();

    // Warm: threads, workspace, caches; also tells the memory of the first call and its flops.
    const size_t costs_before = operators_.costs().size();
    operators_.drop_workspace();
    line.memory = peak_memory_of(fused);
    for (size_t i = costs_before; i < operators_.costs().size(); ++i) {
      const Cost& cost = operators_.costs()[i];
      line.flops += cost.flops;
      line.workspace_bytes = std::max(line.workspace_bytes, cost.workspace_bytes);
    }
    line.isa = operators_.isa();
    line.threads = operators_.threads();
    if (unfused) {
      operators_.drop_workspace();
      line.unfused_memory = peak_memory_of(unfused);
      // Its softmax is there before and after.
      if (op == "gradient" && line.unfused_memory) *line.unfused_memory += softmax_->bytes();
    }

    // A B A B: slow drifts of the clock meet both alike.
    line.peak_before = measure_peak(line);
    const double first = seconds_of(fused) + (unfused ? seconds_of(unfused) : 0);
    const int repeats =
        arguments_.repeats > 0
            ? arguments_.repeats
            : std::clamp(static_cast<int>(arguments_.seconds / std::max(first, 1e-6)), 5, 101);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      progress.show(op, repeat, repeats);
      line.fused.push_back(seconds_of(fused));
      if (unfused) line.unfused.push_back(seconds_of(unfused));
    }
    line.peak_after = measure_peak(line);
    softmax_of_step_.reset();
    return line;
  }

  // Whether logits and softmax fit into memory; without, only the fused operators run.
  bool holds_logits() const { return holds_logits_; }

 private:
  std::function<void()> fused_work(const std::string& op) {
    if (op == "forward") {
      return [this] {
        const ForwardResult forward = operators_.forward(whole());
        static_cast<void>(operators_.loss(forward));
      };
    }
    if (op == "gradient") return [this] { gradient(nullptr); };
    if (op == "gradient-hp") return [this] { gradient(&*softmax_); };
    if (op == "one-pass") {
      return [this] {
        static_cast<void>(
            operators_.loss_and_gradient(grad_input_.matrix(), grad_weight_.matrix()));
      };
    }
    return [this] {
      const ForwardResult forward = operators_.forward(whole());
      static_cast<void>(operators_.loss(forward));
      gradient(nullptr);
    };
  }

  std::function<void()> unfused_work(const std::string& op) {
    if (!holds_logits_ || op == "gradient-hp") return {};
    if (op == "forward") return [this] { write_softmax(); };
    if (op == "gradient") return [this] { gradient(&*softmax_); };
    return [this] {
      write_softmax();
      gradient(&*softmax_of_step_);
    };
  }

  ShardRange whole() const { return {.begin = 0, .end = case_.shape().V}; }

  void gradient(const HostTensor* softmax) {
    Operators::GradientRequest request;
    request.shard = whole();
    request.local = &statistics_.shards.front();
    request.merged = &statistics_.merged;
    request.grad_input = grad_input_.matrix();
    request.grad_weight = grad_weight_.matrix();
    if (softmax != nullptr) {
      request.mode = GradientMode::high_performance;
      request.softmax = softmax->matrix();
    }
    operators_.gradient(request);
  }

  // The buffers live from one repeat to the next, as a framework's caching allocator has it.
  void write_softmax() {
    if (!softmax_of_step_) {
      softmax_of_step_ = HostTensor(DType::f32, {case_.shape().BT, case_.shape().V});
    }
    const ForwardResult forward = operators_.forward(whole(), operators_.logits_dtype());
    operators_.softmax(forward, *forward.logits, softmax_of_step_->matrix());
  }

  void make_softmax() {
    if (!softmax_) softmax_ = run_softmax(case_, operators_, statistics_, {});
  }

  double measure_peak(const Line& line) {
    return take(measure_peak_flops(line.isa, line.dtype, line.threads, 0.2));
  }

  const Case& case_;
  LogitsRounding rounding_;
  const BenchArguments& arguments_;
  Operators operators_;
  HostTensor grad_input_;
  HostTensor grad_weight_;
  StatisticsResult statistics_;
  std::optional<HostTensor> softmax_;          // given to gradient and gradient-hp
  std::optional<HostTensor> softmax_of_step_;  // made by the unfused computation
  bool holds_logits_ = false;
};

std::string memory_text(const std::optional<int64_t>& bytes) {
  return bytes ? format_bytes(*bytes) : "";
}

ordered_json memory_json(const std::optional<int64_t>& bytes) {
  return bytes ? ordered_json(*bytes) : ordered_json();
}

ordered_json line_json(const Line& line) {
  ordered_json entry = {
      {"op", line.op},
      {"shape", to_json(line.shape)},
      {"dtype", logitless::name_of(line.dtype)},
      {"isa", logitless::name_of(line.isa)},
      {"threads", line.threads},
      {"repeats", line.fused.size()},
      {"median_seconds", median(line.fused)},
      {"spread", line.spread()},
      {"seconds_per_token",
       median(line.fused) / static_cast<double>(std::max<int64_t>(line.shape.BT, 1))},
      {"flops", line.flops},
      {"gflops", line.gflops()},
      {"peak_flops_before", line.peak_before},
      {"peak_flops_after", line.peak_after},
      {"ratio_to_peak", line.ratio_to_peak()},
      {"workspace_bytes", line.workspace_bytes},
      {"peak_memory_bytes", memory_json(line.memory)},
      {"seconds", line.fused}};
  if (!line.unfused.empty()) {
    entry["unfused"] = {{"median_seconds", median(line.unfused)},
                        {"time_ratio", median(line.unfused) / median(line.fused)},
                        {"peak_memory_bytes", memory_json(line.unfused_memory)},
                        {"seconds", line.unfused}};
  }
  return entry;
}

void print_lines(const std::vector<Line>& lines) {
  Table table({{"BT,V,H", Align::left},
               {"type", Align::left},
               {"op", Align::left},
               {"median", Align::right},
               {"spread", Align::right},
               {"GFLOP/s", Align::right},
               {"of peak", Align::right},
               {"workspace", Align::right},
               {"memory", Align::right},
               {"unfused", Align::right},
               {"memory", Align::right},
               {"/ fused", Align::right}});
  for (const Line& line : lines) {
    const bool beside = !line.unfused.empty();
    table.row({fmt::format("{},{},{}", line.shape.BT, line.shape.V, line.shape.H),
               logitless::name_of(line.dtype), line.op, format_seconds(median(line.fused)),
               fmt::format("{:.1f} %", 100 * line.spread()), fmt::format("{:.1f}", line.gflops()),
               fmt::format("{:.3f}", line.ratio_to_peak()), format_bytes(line.workspace_bytes),
               memory_text(line.memory), beside ? format_seconds(median(line.unfused)) : "",
               beside ? memory_text(line.unfused_memory) : "",
               beside ? fmt::format("{:.2f} x", median(line.unfused) / median(line.fused)) : ""});
  }
  fmt::print("{}", table.str());
}

int run_bench(const BenchArguments& arguments) {
  const RunSettings settings = arguments.common.settings();
  std::vector<std::string> ops = arguments.ops;
  if (ops.empty()) ops = {"forward", "gradient", "step", "one-pass"};
  if (!arguments.case_arguments.paths.empty() && !arguments.shapes.empty()) {
    fail("bench takes a CASE or --shape, not both");
  }
  Progress progress;
  std::vector<Line> lines;
  bool without_logits = false;
  const auto run_case = [&](const Case& c) {
    Bench bench(c, arguments, settings);
    for (const std::string& op : ops) {
      if (op == "gradient-hp" && !bench.holds_logits()) {
        fail(fmt::format("gradient-hp holds softmax, which does not fit into memory for {}",
                         format_shape(c.shape())));
      }
      lines.push_back(bench.run(op, progress));
    }
    without_logits = without_logits || !bench.holds_logits();
  };
  if (!arguments.case_arguments.paths.empty()) {
    run_case(arguments.case_arguments.load());
  } else {
    std::vector<std::string> shapes = arguments.shapes;
    // LM heads of real models: LLaMA 1B-like, SmolLM2 135M.
    if (shapes.empty()) shapes = {"1024,32000,2048", "1024,49152,576"};
    for (const std::string& text : shapes) {
      const Shape shape = take(parse_shape(text));
      SyntheticOptions synthetic;
      synthetic.tokens = shape.BT;
      synthetic.vocab = shape.V;
      synthetic.hidden = shape.H;
      synthetic.dtype = arguments.case_arguments.dtype.empty()
                            ? DType::bf16
                            : take(parse_operand_dtype(arguments.case_arguments.dtype));
      const int64_t rows = shape.BT + shape.V;
      run_case(take(make_synthetic(synthetic, [&](int64_t done) {
        if (done % 256 == 0) progress.show("making a case", done, rows);
      })));
    }
  }
  if (arguments.common.json) {
    const MachineInfo machine = machine_info();
    ordered_json list = ordered_json::array();
    for (const Line& line : lines) list.push_back(line_json(line));
    print_json({{"cpu", machine.cpu},
                {"l2_bytes", machine.l2_bytes},
                {"l3_bytes", machine.l3_bytes},
                {"compiler", build_compiler()},
                {"commit", build_commit()},
                {"logits_rounding", arguments.rounding},
                {"cases", std::move(list)}});
    return kExitFine;
  }
  const Line& last = lines.back();
  fmt::print("{}, {} thread{}; peak {:.1f} GFLOP/s, measured around each line in this process\n\n",
             logitless::name_of(last.isa), last.threads, last.threads == 1 ? "" : "s",
             last.peak() * 1e-9);
  print_lines(lines);
  if (without_logits) {
    fmt::print(
        "\nlogits and softmax do not fit into this machine's memory: nothing unfused beside\n");
  }
  return kExitFine;
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App* sub = app.add_subcommand(
      "bench",
      "Time the fused operators beside the same computation with logits held in memory, as ratios "
      "to the machine's peak measured in the same process");
  add_case_options(*sub, arguments->case_arguments, false);
  sub->add_option("--shape", arguments->shapes, "One or more of BT,V,H, instead of a CASE")
      ->type_name("BT,V,H");
  sub->add_option("--op", arguments->ops,
                  "forward, gradient, gradient-hp, step, one-pass; default: all but gradient-hp")
      ->delimiter(',')
      ->check(CLI::IsMember(kOps))
      ->type_name("OP,...");
  sub->add_option("--logits-rounding", arguments->rounding, "none or operand")
      ->capture_default_str()
      ->type_name("ROUNDING");
  sub->add_option("--repeats", arguments->repeats, "Default: as many as fit --seconds, 5 to 101")
      ->check(CLI::Range(1, 10000, "REPEATS"))
      ->type_name("N");
  sub->add_option("--seconds", arguments->seconds, "Time for each line")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->type_name("SECONDS");
  add_common_options(*sub, arguments->common);
  sub->footer(
      example("  logitless bench --shape 1024,32000,2048 --op forward,gradient --dtype bf16"));
  sub->callback([arguments, &command] { command = [arguments] { return run_bench(*arguments); }; });
}

}  // namespace logitless::cli
