// SPDX-License-Identifier: Apache-2.0
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <iterator>
#include <map>
#include <set>

#include "cli/amx_note.h"
#include "cli/baseline.h"
#include "cli/bench.h"
#include "cli/bench_ranks.h"
#include "cli/build_info.h"
#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/models.h"
#include "cli/plan_op.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/synthetic.h"
#include "cli/table.h"
#include "cli/units.h"
#include "logitless/version.h"

namespace logitless::cli {
namespace {

constexpr int64_t kModelTokens = 1024;
constexpr const char* kSparseWantsTolerance =
    "--op sparse takes --grad-tolerance EPS, for example 2^-9";
constexpr const char* kBesideSparse =
    "The sparse gradient beside forward and loss alone and beside the exact gradients in one "
    "call,\nmeasured by turns; kept: of grad_logits, in rows that are not dense";
// What it says of a step.
const std::vector<Table::Column> kSparseColumns = {
    {"tolerance", Align::right}, {"kept", Align::right},      {"dense rows", Align::right},
    {"forward", Align::right},   {"/ forward", Align::right}, {"exact", Align::right},
    {"/ exact", Align::right}};
std::vector<std::string> sparse_cells(double tolerance, const SparseCounts& counts, double seconds,
                                      double forward_seconds, double exact_seconds) {
  return {format_tolerance(tolerance),
          fmt::format("{:.2f} %", 100 * kept_share(counts)),
          fmt::format("{} of {}", format_count(counts.dense_rows), format_count(counts.rows)),
          format_seconds(forward_seconds),
          fmt::format("{:.2f} x", seconds / forward_seconds),
          format_seconds(exact_seconds),
          fmt::format("{:.2f} x", seconds / exact_seconds)};
}

struct BenchArguments {
  ListOptions lists;
  CaseArguments case_arguments;
  std::vector<std::string> shapes;
  std::vector<std::string> models;
  std::vector<int64_t> tokens;
  std::vector<std::string> ops;
  std::string only;
  double zero_grad_rows = 0;
  std::string rounding = "none";
  SparseOptions sparse;
  std::string baseline;
  bool cold = false;
  bool no_unfused = false;
  std::string split;
  std::string strategy;
  int64_t chunk_tokens = 0;
  int repeats = 0;
  double seconds = 3;
};

// A synthetic case to be made.
struct Wanted {
  std::string model;
  int64_t V = 0;
  int64_t H = 0;
  std::vector<int64_t> tokens;
};

std::string now_utc() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time({}))); }

// The first n tokens, with the case's weight lent to them: no second copy of it.
class FirstTokens {
 public:
  FirstTokens(Case& c, int64_t n) : owner_(c), weight_(std::move(c.weight)) {
    owner_.weight = HostTensor(weight_.dtype(), {0, weight_.shape()[1]});
    part_ = owner_.first_tokens(n);
    part_.weight = std::move(weight_);
  }
  ~FirstTokens() { owner_.weight = std::move(part_.weight); }
  FirstTokens(const FirstTokens&) = delete;
  FirstTokens& operator=(const FirstTokens&) = delete;
  Case& part() { return part_; }

 private:
  Case& owner_;
  HostTensor weight_;
  Case part_;
};

// Evenly spread, so that any block of tokens holds its share.
void zero_gradients(Case& c, double fraction) {
  const auto share = [&](int64_t b) { return std::floor(static_cast<double>(b) * fraction); };
  for (int64_t b = 0; b < c.shape().BT; ++b) {
    if (share(b + 1) == share(b)) continue;
    c.grad.as<float>()[b] = 0;
    if (c.grad_logsumexp) c.grad_logsumexp->as<float>()[b] = 0;
  }
}

std::vector<Wanted> wanted_cases(const BenchArguments& arguments) {
  std::vector<std::string> shapes = arguments.shapes;
  // LM heads of real models: LLaMA 1B-like, SmolLM2 135M.
  if (shapes.empty() && arguments.models.empty()) shapes = {"1024,32000,2048", "1024,49152,576"};
  std::vector<Wanted> wanted;
  for (const std::string& text : shapes) {
    const Shape shape = take(parse_shape(text));
    wanted.push_back({.model = "", .V = shape.V, .H = shape.H, .tokens = {shape.BT}});
    if (!arguments.tokens.empty()) wanted.back().tokens = arguments.tokens;
  }
  for (const std::string& name : arguments.models) {
    const Model model = take(find_model(name));
    wanted.push_back({.model = model.name, .V = model.V, .H = model.H, .tokens = {kModelTokens}});
    if (!arguments.tokens.empty()) wanted.back().tokens = arguments.tokens;
  }
  return wanted;
}

class BenchRun {
 public:
  explicit BenchRun(const BenchArguments& arguments)
      : arguments_(arguments),
        settings_(arguments.lists.settings()),
        rounding_(parse_rounding(arguments.rounding)),
        isa_(take(default_isa())),
        sparse_(arguments.sparse.parse()),
        ops_(arguments.ops) {
    if (ops_.empty()) ops_ = {"forward", "gradient", "step", "one-pass"};
    if (arguments.ops.empty() && sparse_.tolerance > 0) ops_ = {"sparse"};
    for (const RunSettings& settings : settings_) {
      const int threads = settings.threads > 0 ? settings.threads : default_threads();
      if (std::ranges::find(threads_, threads) == threads_.end()) threads_.push_back(threads);
    }
  }

  int run() {
    check_arguments();
    if (!arguments_.baseline.empty()) {
      baseline_ = take(read_baseline(arguments_.baseline));
      take(check_comparable(*baseline_, logitless::name_of(isa_), threads_));
    }
    if (!arguments_.case_arguments.paths.empty()) {
      run_saved_case();
    } else {
      run_synthetic_cases();
    }
    std::vector<Comparison> comparisons;
    if (baseline_) {
      comparisons = compare_lines(lines_, *baseline_);
      if (std::ranges::all_of(comparisons,
                              [](const Comparison& c) { return c.before == nullptr; })) {
        fail(
            fmt::format("--baseline {}: none of its {} lines is of the shapes, types and options "
                        "measured here",
                        printable(arguments_.baseline), baseline_->lines.size()));
      }
    }
    if (arguments_.lists.json) {
      print_document(comparisons);
    } else {
      print_text(comparisons);
    }
    const bool slower = std::ranges::any_of(
        comparisons, [](const Comparison& c) { return c.verdict == Verdict::slower; });
    return slower ? kExitRegression : kExitFine;
  }

 private:
  void check_arguments() const {
    const bool synthetic = !arguments_.shapes.empty() || !arguments_.models.empty();
    if (!arguments_.case_arguments.paths.empty() && synthetic) {
      fail("bench takes a CASE, or --shape and --model, not both");
    }
    const bool sparse = std::ranges::find(ops_, "sparse") != ops_.end();
    if (sparse && !(sparse_.tolerance > 0)) {
      fail(kSparseWantsTolerance);
    }
    if (!sparse && sparse_.tolerance > 0) {
      fail(fmt::format("--grad-tolerance is for --op sparse, not for {}", fmt::join(ops_, ",")));
    }
    if (!arguments_.baseline.empty() && arguments_.repeats > 0 &&
        arguments_.repeats < kLeastRepeats) {
      fail(
          fmt::format("--repeats is {}, must be at least {} with --baseline: it compares intervals",
                      arguments_.repeats, kLeastRepeats));
    }
  }

  void run_saved_case() {
    CaseArguments chosen = arguments_.case_arguments;
    std::vector<int64_t> tokens = arguments_.tokens;
    if (!tokens.empty()) chosen.tokens = std::ranges::max(tokens);
    Case c = chosen.load();
    if (tokens.empty()) tokens = {c.shape().BT};
    // The one pass takes a whole vocabulary; unasked, it is left out where it cannot run.
    const bool one_pass = c.vocab_start_index == 0 && !c.grad_logsumexp;
    if (!one_pass && arguments_.ops.empty()) {
      std::erase(ops_, "one-pass");
      notes_.push_back("one-pass is left out: it takes a vocabulary from 0 and no grad_logsumexp");
    }
    check_plans(tokens, c.shape().V, c.shape().H, c.dtype());
    for (const int64_t count : tokens) {
      FirstTokens first(c, count);
      run_case(first.part(), "");
    }
  }

  void run_synthetic_cases() {
    const DType dtype = arguments_.case_arguments.dtype.empty()
                            ? DType::bf16
                            : take(parse_operand_dtype(arguments_.case_arguments.dtype));
    const std::vector<Wanted> wanted = wanted_cases(arguments_);
    for (const Wanted& w : wanted) check_plans(w.tokens, w.V, w.H, dtype);
    for (const Wanted& w : wanted) {
      SyntheticOptions synthetic;
      synthetic.tokens = std::ranges::max(w.tokens);
      synthetic.vocab = w.V;
      synthetic.hidden = w.H;
      synthetic.dtype = dtype;
      const int64_t rows = synthetic.tokens + w.V;
      Case c = take(make_synthetic(synthetic, [&](int64_t done) {
        if (done % 256 == 0) progress_.show("making a case", done, rows);
      }));
      for (const int64_t count : w.tokens) {
        FirstTokens first(c, count);
        set_mean_grad(first.part());
        run_case(first.part(), w.model);
      }
    }
  }

  // A limit too small for the last line is said before the first is measured.
  void check_plans(const std::vector<int64_t>& tokens, int64_t V, int64_t H, DType dtype) const {
    for (const int64_t BT : tokens) {
      for (const RunSettings& settings : settings_) {
        for (const std::string& op : ops_) {
          for (const std::string& part : op == "step"
                                             ? std::vector<std::string>{"forward", "gradient"}
                                             : std::vector<std::string>{op}) {
            const bool sparse = part == "sparse";
            take(plan_op({.op = sparse ? "one-pass" : part,
                          .shape = {.BT = BT, .V = V, .H = H},
                          .dtype = dtype,
                          .rounding = rounding_,
                          .grad_tolerance = sparse ? sparse_.tolerance : 0,
                          .grad_input = arguments_.only != "grad_weight",
                          .grad_weight = arguments_.only != "grad_input"},
                         settings.plan_options()));
          }
        }
      }
    }
  }

  void run_case(Case& c, const std::string& model) {
    if (arguments_.zero_grad_rows > 0) zero_gradients(c, arguments_.zero_grad_rows);
    for (const RunSettings& run_settings : settings_) {
      BenchSettings settings;
      settings.run = run_settings;
      settings.rounding = rounding_;
      settings.only = arguments_.only;
      settings.repeats = arguments_.repeats;
      settings.seconds = arguments_.seconds;
      settings.cold = arguments_.cold;
      settings.unfused = !arguments_.no_unfused;
      settings.model = model;
      settings.sparse = sparse_;
      settings.zero_grad_rows = arguments_.zero_grad_rows;
      const int threads = run_settings.threads > 0 ? run_settings.threads : default_threads();
      settings.read_bytes_per_second = read_bandwidth(threads);
      Bench bench(c, settings);
      for (const std::string& op : ops_) {
        if (op == "gradient-hp" && !bench.holds_logits()) {
          fail(fmt::format("gradient-hp holds softmax, which does not fit into memory for {}",
                           format_shape(c.shape())));
        }
        lines_.push_back(bench.run(op, progress_));
      }
      if (settings.unfused && !bench.holds_logits()) {
        notes_.push_back(
            fmt::format("nothing unfused beside {}: logits and softmax do not fit into "
                        "this machine's memory",
                        format_shape(c.shape())));
      }
    }
  }

  double read_bandwidth(int threads) {
    const auto known = bandwidths_.find(threads);
    if (known != bandwidths_.end()) return known->second;
    progress_.show("measuring read bandwidth");
    const double seconds = std::clamp(arguments_.seconds / 10, 0.02, 0.2);
    return bandwidths_[threads] = measure_read_bandwidth(threads, seconds);
  }

  // ---- results ---------------------------------------------------------------------------------

  bool same_machine() const {
    const MachineInfo machine = machine_info();
    return baseline_->cpu == machine.cpu && baseline_->l3_bytes == machine.l3_bytes;
  }

  void print_document(const std::vector<Comparison>& comparisons) const {
    const MachineInfo machine = machine_info();
    ordered_json list = ordered_json::array();
    for (const BenchLine& line : lines_) list.push_back(cli::to_json(line));
    ordered_json document = {{"schema", kBenchSchema},
                             {"date", now_utc()},
                             {"version", LOGITLESS_VERSION},
                             {"commit", build_commit()},
                             {"compiler", build_compiler()},
                             {"cpu", machine.cpu},
                             {"l1d_bytes", machine.l1d_bytes},
                             {"l2_bytes", machine.l2_bytes},
                             {"l3_bytes", machine.l3_bytes},
                             {"amx_present", machine.amx_present},
                             {"isa", logitless::name_of(isa_)},
                             {"threads", threads_},
                             {"logits_rounding", arguments_.rounding},
                             {"interval_percentiles", kPercentiles},
                             {"notes", notes_},
                             {"cases", std::move(list)}};
    if (baseline_) document["baseline"] = baseline_json(comparisons);
    print_json(document);
  }

  ordered_json baseline_json(const std::vector<Comparison>& comparisons) const {
    ordered_json list = ordered_json::array();
    int slower = 0;
    for (size_t i = 0; i < comparisons.size(); ++i) {
      const Comparison& c = comparisons[i];
      ordered_json entry = {{"case", i}, {"verdict", name_of(c.verdict)}};
      if (c.before != nullptr) {
        entry["ratio_to_peak"] = c.before->ratio_to_peak;
        entry["ratio_interval"] = {c.before->ratio_interval.low, c.before->ratio_interval.high};
      }
      slower += c.verdict == Verdict::slower ? 1 : 0;
      list.push_back(std::move(entry));
    }
    return {{"file", baseline_->source},      {"commit", baseline_->commit},
            {"date", baseline_->date},        {"cpu", baseline_->cpu},
            {"same_machine", same_machine()}, {"regressions", slower},
            {"lines", std::move(list)}};
  }

  // Whether a column says something that the heading does not: its values differ.
  template <typename Of>
  bool varies(const Of& of) const {
    return std::ranges::any_of(lines_, [&](const BenchLine& l) { return of(l) != of(lines_[0]); });
  }

  // The columns that tell one line from another.
  struct Names {
    bool model = false;
    bool threads = false;
    bool limit = false;
  };
  Names names() const {
    return {.model = std::ranges::any_of(lines_, [](const auto& l) { return !l.model.empty(); }),
            .threads = varies([](const BenchLine& l) { return l.threads; }),
            .limit = varies([](const BenchLine& l) { return l.workspace_limit_bytes; })};
  }
  static std::vector<Table::Column> name_columns(const Names& names) {
    std::vector<Table::Column> columns;
    if (names.model) columns.push_back({"model", Align::left});
    columns.insert(columns.end(),
                   {{"BT,V,H", Align::left}, {"type", Align::left}, {"op", Align::left}});
    if (names.threads) columns.push_back({"threads", Align::right});
    if (names.limit) columns.push_back({"limit", Align::right});
    return columns;
  }
  static std::vector<std::string> name_cells(const Names& names, const BenchLine& line) {
    std::vector<std::string> cells;
    if (names.model) cells.push_back(line.model);
    cells.push_back(fmt::format("{},{},{}", line.shape.BT, line.shape.V, line.shape.H));
    cells.emplace_back(logitless::name_of(line.dtype));
    // The limit may not have left room for one pass: that is then four products, counted as three.
    const std::string strategy = line.strategy == "recompute" ? ", recomputed" : "";
    cells.push_back(line.op + strategy + (line.only.empty() ? "" : " (" + line.only + ")"));
    if (names.threads) cells.push_back(fmt::format("{}", line.threads));
    if (names.limit) {
      cells.push_back(line.workspace_limit_bytes == 0 ? "default"
                                                      : format_bytes(line.workspace_limit_bytes));
    }
    return cells;
  }

  void print_text(const std::vector<Comparison>& comparisons) const {
    const BenchLine& last = lines_.back();
    std::vector<std::string> threads;
    for (const int count : threads_) threads.push_back(fmt::format("{}", count));
    fmt::print(
        "{}, {} thread{}; peak {:.1f} GFLOP/s, measured around each line in this process; "
        "reading {:.1f} GB/s\n",
        logitless::name_of(isa_), fmt::join(threads, ", "),
        threads_ == std::vector<int>{1} ? "" : "s", last.peak() * 1e-9,
        last.read_bytes_per_second * 1e-9);
    if (const std::string amx = amx_note(machine_info().amx_present); !amx.empty()) {
      fmt::print("AMX {}\n", amx);
    }
    if (arguments_.zero_grad_rows > 0) {
      fmt::print("gradient 0 in {:.3g} % of the rows\n", 100 * arguments_.zero_grad_rows);
    }
    fmt::print("\n");
    print_lines();
    print_sparse_lines();
    for (const std::string& note : notes_) fmt::print("\n{}\n", note);
    if (baseline_) print_comparisons(comparisons);
  }

  void print_lines() const {
    const Names which = names();
    const bool unfused =
        std::ranges::any_of(lines_, [](const auto& line) { return !line.unfused.empty(); });
    std::vector<Table::Column> columns = name_columns(which);
    columns.insert(columns.end(), {{"median", Align::right}, {"spread", Align::right}});
    if (arguments_.cold) columns.push_back({"cold", Align::right});
    columns.insert(columns.end(), {{"GFLOP/s", Align::right},
                                   {"of peak", Align::right},
                                   {"of roofline", Align::right},
                                   {"workspace", Align::right},
                                   {"memory", Align::right}});
    if (unfused) {
      columns.insert(
          columns.end(),
          {{"unfused", Align::right}, {"memory", Align::right}, {"/ fused", Align::right}});
    }
    Table table(columns);
    const auto memory = [](const std::optional<int64_t>& bytes) {
      return bytes ? format_bytes(*bytes) : "";
    };
    for (const BenchLine& line : lines_) {
      std::vector<std::string> cells = name_cells(which, line);
      cells.push_back(format_seconds(line.seconds_median()));
      cells.push_back(fmt::format("{:.1f} %", 100 * line.spread()));
      if (arguments_.cold) cells.push_back(format_seconds(median(line.cold)));
      cells.push_back(fmt::format("{:.1f}", line.flops / line.seconds_median() * 1e-9));
      cells.push_back(fmt::format("{:.3f}", line.ratio_to_peak()));
      cells.push_back(fmt::format("{:.3f}", line.ratio_to_roofline()));
      cells.push_back(format_bytes(line.workspace_bytes));
      cells.push_back(memory(line.memory));
      if (!line.unfused.empty()) {
        cells.push_back(format_seconds(median(line.unfused)));
        cells.push_back(memory(line.unfused_memory));
        cells.push_back(fmt::format("{:.2f} x", median(line.unfused) / line.seconds_median()));
      }
      table.row(std::move(cells));
    }
    fmt::print("{}", table.str());
  }

  void print_sparse_lines() const {
    const Names which = names();
    std::vector<Table::Column> columns = name_columns(which);
    columns.insert(columns.end(), kSparseColumns.begin(), kSparseColumns.end());
    Table table(columns);
    bool any = false;
    for (const BenchLine& line : lines_) {
      if (line.op != "sparse") continue;
      any = true;
      std::vector<std::string> cells = name_cells(which, line);
      std::ranges::move(sparse_cells(line.grad_tolerance, line.sparse_counts, line.seconds_median(),
                                     median(line.forward), median(line.exact)),
                        std::back_inserter(cells));
      table.row(std::move(cells));
    }
    if (!any) return;
    fmt::print("\n{}\n\n{}", kBesideSparse, table.str());
  }

  void print_comparisons(const std::vector<Comparison>& comparisons) const {
    const Names which = names();
    std::vector<Table::Column> columns = name_columns(which);
    columns.insert(columns.end(), {{"before, of peak", Align::right},
                                   {"now, of peak", Align::right},
                                   {"change", Align::right},
                                   {"", Align::left}});
    Table table(columns);
    const auto text = [](double ratio, const Interval& interval) {
      return fmt::format("{:.3f} ({:.3f} to {:.3f})", ratio, interval.low, interval.high);
    };
    int slower = 0;
    for (const Comparison& c : comparisons) {
      std::vector<std::string> cells = name_cells(which, *c.now);
      cells.push_back(
          c.before == nullptr ? "" : text(c.before->ratio_to_peak, c.before->ratio_interval));
      cells.push_back(text(c.now->ratio_to_peak(), c.now->ratio_interval()));
      cells.push_back(
          c.before == nullptr
              ? ""
              : fmt::format("{:+.1f} %",
                            100 * (c.now->ratio_to_peak() / c.before->ratio_to_peak - 1)));
      cells.emplace_back(name_of(c.verdict));
      table.row(std::move(cells));
      slower += c.verdict == Verdict::slower ? 1 : 0;
    }
    fmt::print("\nBeside {} (commit {}, {})\n", printable(baseline_->source),
               baseline_->commit.empty() ? "unknown" : printable(baseline_->commit),
               printable(baseline_->date));
    if (!same_machine()) {
      fmt::print("which was measured on another machine, {}: ratios to the peak say less then\n",
                 printable(baseline_->cpu));
    }
    fmt::print("\n{}", table.str());
    fmt::print(
        "slower or faster: the intervals from the {:.0f}th to the {:.0f}th percentile do not "
        "overlap\n",
        kPercentiles[0], kPercentiles[1]);
    fmt::print("{} of {} lines slower\n", slower, comparisons.size());
  }

  const BenchArguments& arguments_;
  std::vector<RunSettings> settings_;
  LogitsRounding rounding_;
  Isa isa_;
  SparseGradient sparse_;
  std::vector<int> threads_;
  std::vector<std::string> ops_;
  std::optional<Baseline> baseline_;
  std::map<int, double> bandwidths_;
  Progress progress_;
  std::vector<BenchLine> lines_;
  std::vector<std::string> notes_;
};

// Names as in to_json(BenchLine).
ordered_json sparse_json(const RankBenchLine& line) {
  const SparseCounts& counts = line.sparse_counts;
  return {{"seed", line.sparse.seed},
          {"rows", counts.rows},
          {"dense_rows", counts.dense_rows},
          {"kept", counts.kept},
          {"elements", counts.elements},
          {"kept_share", kept_share(counts)},
          {"forward_median_seconds", line.forward_seconds},
          {"times_forward", line.seconds / line.forward_seconds},
          {"exact_median_seconds", line.exact_seconds},
          {"times_exact", line.seconds / line.exact_seconds}};
}

ordered_json rank_line_json(const RankBenchLine& line) {
  ordered_json entry = {{"op", "vocab-parallel"},
                        {"shape", to_json(line.shape)},
                        {"dtype", logitless::name_of(line.dtype)},
                        {"isa", logitless::name_of(line.isa)},
                        {"ranks", line.ranks},
                        {"threads", line.threads},
                        {"split", to_json(line.cover)},
                        {"strategy", name_of(line.strategy)},
                        {"chunk_tokens", line.chunk_tokens},
                        {"repeats", line.repeats},
                        {"median_seconds", line.seconds},
                        {"computation_seconds", line.computation_seconds},
                        {"communication_seconds", line.communication_seconds},
                        {"hidden", line.hidden()},
                        {"gathered_bytes", line.gathered_bytes},
                        {"summed_bytes", line.summed_bytes},
                        {"workspace_bytes", line.workspace_bytes}};
  if (line.sparse.tolerance > 0) {
    entry["grad_tolerance"] = line.sparse.tolerance;
    entry["sparse"] = sparse_json(line);
  }
  return entry;
}

void print_rank_lines(const std::vector<RankBenchLine>& lines) {
  fmt::print(
      "{} ranks of {} thread{}, {}: loss and both gradients{}, medians of the slowest rank\n\n",
      lines[0].ranks, lines[0].threads, lines[0].threads == 1 ? "" : "s",
      logitless::name_of(lines[0].isa), lines[0].sparse.tolerance > 0 ? ", sparse" : "");
  Table table({{"shape", Align::left},
               {"type", Align::left},
               {"strategy", Align::left},
               {"chunk", Align::right},
               {"step", Align::right},
               {"computing", Align::right},
               {"communicating", Align::right},
               {"hidden", Align::right},
               {"gathered / token", Align::right},
               {"summed / token", Align::right},
               {"workspace", Align::right}});
  for (const RankBenchLine& line : lines) {
    const auto per_token = [&](int64_t bytes) {
      return fmt::format("{:.1f} B",
                         static_cast<double>(bytes) / static_cast<double>(line.shape.BT));
    };
    table.row({format_shape(line.shape), logitless::name_of(line.dtype), name_of(line.strategy),
               format_count(line.chunk_tokens), format_seconds(line.seconds),
               format_seconds(line.computation_seconds), format_seconds(line.communication_seconds),
               fmt::format("{:.0f} %", 100 * line.hidden()), per_token(line.gathered_bytes),
               per_token(line.summed_bytes), format_bytes(line.workspace_bytes)});
  }
  fmt::print("{}", table.str());
  if (lines[0].sparse.tolerance == 0) return;
  std::vector<Table::Column> columns = {{"shape", Align::left}};
  columns.insert(columns.end(), kSparseColumns.begin(), kSparseColumns.end());
  Table sparse(columns);
  for (const RankBenchLine& line : lines) {
    std::vector<std::string> cells = {format_shape(line.shape)};
    std::ranges::move(sparse_cells(line.sparse.tolerance, line.sparse_counts, line.seconds,
                                   line.forward_seconds, line.exact_seconds),
                      std::back_inserter(cells));
    sparse.row(std::move(cells));
  }
  fmt::print("\n{}\n\n{}", kBesideSparse, sparse.str());
}

// Under mpirun: vocabulary parallel instead of the operators.
int bench_on_ranks(const BenchArguments& arguments) {
  const auto only_alone = [](bool asked, const char* option) {
    if (asked) fail(fmt::format("{} is for one rank: not with mpirun or --split", option));
  };
  only_alone(!arguments.case_arguments.paths.empty(), "a CASE");
  for (const std::string& op : arguments.ops) {
    if (op != "sparse")
      fail(
          fmt::format("--op {} is for one rank: with mpirun or --split there is "
                      "one step, with --grad-tolerance a sparse one",
                      op));
  }
  only_alone(!arguments.only.empty(), "--only");
  only_alone(arguments.zero_grad_rows > 0, "--zero-grad-rows");
  only_alone(arguments.cold, "--cold");
  only_alone(!arguments.baseline.empty(), "--baseline");
  only_alone(arguments.rounding != "none", "--logits-rounding operand");
  const std::vector<RunSettings> settings = arguments.lists.settings();
  only_alone(settings.size() > 1, "a list of threads or limits");
  RankBenchSettings bench;
  bench.sparse = arguments.sparse.parse();
  if (!arguments.ops.empty() && bench.sparse.tolerance == 0) fail(kSparseWantsTolerance);
  if (!arguments.split.empty()) bench.split = arguments.split;
  bench.chunk_tokens = arguments.chunk_tokens;
  bench.strategy = parse_strategy(arguments.strategy);
  if (!arguments.case_arguments.dtype.empty()) {
    bench.dtype = take(parse_operand_dtype(arguments.case_arguments.dtype));
  }
  bench.run = settings[0];
  bench.repeats = arguments.repeats;
  bench.seconds = arguments.seconds;
  std::vector<RankBenchLine> lines;
  const std::vector<Wanted> wanted = wanted_cases(arguments);
  Communicator& world = open_ranks();
  for (const Wanted& w : wanted) {
    for (const int64_t BT : w.tokens) {
      lines.push_back(bench_ranks(world, {.BT = BT, .V = w.V, .H = w.H}, bench));
    }
  }
  if (world.rank() != 0) return kExitFine;
  if (!arguments.lists.json) {
    print_rank_lines(lines);
    return kExitFine;
  }
  ordered_json list = ordered_json::array();
  for (const RankBenchLine& line : lines) list.push_back(rank_line_json(line));
  print_json({{"schema", "logitless-bench-ranks-1"},
              {"date", now_utc()},
              {"version", LOGITLESS_VERSION},
              {"commit", build_commit()},
              {"compiler", build_compiler()},
              {"cpu", machine_info().cpu},
              {"cases", std::move(list)}});
  return kExitFine;
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App* sub = app.add_subcommand(
      "bench",
      "Time the fused operators beside the same computation with logits held in memory, as ratios "
      "to the machine's peak measured in the same process");
  add_case_options(*sub, arguments->case_arguments, false, false);
  sub->add_option("--shape", arguments->shapes, "One or more of BT,V,H, instead of a CASE")
      ->type_name("BT,V,H");
  sub->add_option("--model", arguments->models,
                  "Heads of public models, for example llama-3-8b,gpt-2, instead of a CASE")
      ->delimiter(',')
      ->type_name("NAME,...");
  sub->add_option("--tokens", arguments->tokens,
                  "BT of --model (default 1024) and --shape, or the first N tokens of the CASE; "
                  "several: one after the other")
      ->delimiter(',')
      ->check(whole_number(0, kMostTokens))
      ->type_name("N,...");
  sub->add_option("--op", arguments->ops,
                  "forward, gradient, gradient-hp, step, one-pass, sparse; default: all but "
                  "gradient-hp and sparse, with --grad-tolerance sparse alone")
      ->delimiter(',')
      ->check(CLI::IsMember(kBenchOps))
      ->type_name("OP,...");
  sub->add_option("--only", arguments->only, "Of the gradients only grad_input or grad_weight")
      ->check(CLI::IsMember({"grad_input", "grad_weight"}))
      ->type_name("GRADIENT");
  add_sparse_options(*sub, arguments->sparse,
                     "Of op sparse: the relative standard error of a token's gradient, for example "
                     "2^-9; timed by turns with the forward and the exact one pass");
  sub->add_option("--zero-grad-rows", arguments->zero_grad_rows,
                  "Fraction of the rows whose grad is set to 0, evenly spread")
      ->check(number(0, 1))
      ->type_name("FRACTION");
  sub->add_option("--logits-rounding", arguments->rounding, "none or operand")
      ->capture_default_str()
      ->type_name("ROUNDING");
  sub->add_flag("--cold", arguments->cold,
                "Also time calls with flushed caches and a fresh workspace");
  sub->add_flag("--no-unfused", arguments->no_unfused,
                "Nothing with logits held in memory beside it");
  sub->add_option("--baseline", arguments->baseline,
                  "What an earlier bench --json printed: compare with it; exit status 1 if a line "
                  "is slower")
      ->type_name("FILE");
  sub->add_option("--split", arguments->split,
                  "Under mpirun, vocabulary parallel is timed instead: which rows each rank has, "
                  "balanced (default), padded, or row numbers such as 0,100,100,32000")
      ->type_name("SPLIT");
  add_strategy_option(*sub, arguments->strategy);
  sub->add_option("--chunk-tokens", arguments->chunk_tokens,
                  "Under mpirun, tokens summed while the next ones are computed; 0 = automatic")
      ->check(whole_number(0, kMostTokens))
      ->type_name("N");
  sub->add_option("--repeats", arguments->repeats, "Default: as many as fit --seconds, 5 to 101")
      ->check(whole_number(1, 10000))
      ->type_name("N");
  sub->add_option("--seconds", arguments->seconds, "Time for each line")
      ->check(number(0.001, 86400))
      ->capture_default_str()
      ->type_name("SECONDS");
  add_list_options(*sub, arguments->lists);
  sub->footer(example(
      "  logitless bench --shape 1024,32000,2048 --op forward,gradient --dtype bf16\n"
      "  logitless bench --model smollm2-135m --json > before.json\n"
      "  logitless bench --model smollm2-135m --baseline before.json\n"
      "  logitless bench --model smollm2-135m --grad-tolerance 2^-9\n"
      "  mpirun -n 4 logitless bench --model llama-3-8b --threads 1 --grad-tolerance 2^-9"));
  sub->callback([arguments, &command] {
    command = [arguments] {
      if (started_as_rank() || !arguments->split.empty()) return bench_on_ranks(*arguments);
      return BenchRun(*arguments).run();
    };
  });
}

}  // namespace logitless::cli
