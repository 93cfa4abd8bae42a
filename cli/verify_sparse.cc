// SPDX-License-Identifier: Apache-2.0
#include "cli/verify_sparse.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "cli/bench_line.h"
#include "cli/failure.h"
#include "reference/sparse_gradient.h"
#include "reference/tolerance.h"

namespace logitless::cli {
namespace {

using reference::BiasCheck;
using reference::Matrix;

// What the length of a sum of independent vectors exceeds with probability < 1e-6, from the root of
// its mean square and the length of the longest (Bernstein's inequality for vectors).
constexpr double kDeviations = 5.4;
constexpr double kLongest = 9.7;
constexpr double kResolved = 0x1p-8;  // of 1 - p_target
constexpr int64_t kTokenBlock = 64;   // of logits held at once
// The check for bias multiplies each element of every seed by 65 directions.
constexpr size_t kMostBiasTokens = 256;
constexpr size_t kMostBiasRows = 512;
constexpr int kProbes = 3;  // seeds that tell which rows are fixed

double length_of(const Matrix& m, int64_t row) {
  double squares = 0;
  for (int64_t c = 0; c < m.cols; ++c) squares += m(row, c) * m(row, c);
  return std::sqrt(squares);
}

std::vector<double> row_lengths(const Matrix& m) {
  std::vector<double> lengths;
  for (int64_t r = 0; r < m.rows; ++r) lengths.push_back(length_of(m, r));
  return lengths;
}

Matrix rows_of(const HostTensor& tensor, const std::vector<int64_t>& rows) {
  const int64_t cols = tensor.shape()[1];
  Matrix m(static_cast<int64_t>(rows.size()), cols);
  for (int64_t r = 0; r < m.rows; ++r) {
    const float* from = tensor.as<float>() + rows[static_cast<size_t>(r)] * cols;
    std::copy_n(from, cols, m.row(r));
  }
  return m;
}

// At most `most` of them, evenly.
std::vector<int64_t> thinned(const std::vector<int64_t>& rows, size_t most) {
  if (rows.size() <= most) return rows;
  std::vector<int64_t> some;
  for (size_t i = 0; i < most; ++i) some.push_back(rows[i * (rows.size() - 1) / (most - 1)]);
  return some;
}

RelativeErrors summarise(const std::vector<int64_t>& rows, const std::vector<double>& error,
                         const std::vector<double>& exact) {
  RelativeErrors summary;
  std::vector<double> relative;
  double errors = 0, squares = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    errors += error[i] * error[i];
    squares += exact[i] * exact[i];
    if (exact[i] == 0) continue;
    relative.push_back(error[i] / exact[i]);
    if (!(relative.back() <= summary.worst)) {
      summary.worst = relative.back();
      summary.worst_row = rows[i];
    }
  }
  summary.rows = static_cast<int64_t>(relative.size());
  summary.all = squares > 0 ? std::sqrt(errors / squares) : 0;
  summary.median = median(relative);
  summary.p99 = quantile(relative, 0.99);
  return summary;
}

class SparseVerification {
 public:
  SparseVerification(Case& c, const SparseVerifyOptions& options, const MakeStep& make_step,
                     SparseVerifyReport& report)
      : case_(c), options_(options), make_step_(make_step), report_(report) {}

  void run() {
    say("loss and gradient");
    const StepResult first = step(options_.sparse.seed);
    report_.counts = first.sparse_counts;
    judge_statistics(first);
    find_rules();
    judge_counts(first.sparse_counts);
    judge_grad_input(first);
    judge_grad_weight(first);
    if (options_.seeds >= 2) judge_bias(first);
  }

 private:
  // What float64 says of one token's row of grad_logits, for its own grad.
  struct Row {
    bool has_gradient = false;
    bool may_be_sparse = false;
    bool may_be_dense = false;
    double rest = 0;
    double expected_kept = 0;
    double kept_variance = 0;
    double deviation = 0;  // of its row of grad_input, for one seed
    double longest = 0;    // what one choice can change in that

    bool surely_sparse() const { return has_gradient && may_be_sparse && !may_be_dense; }
  };

  void say(const std::string& what) const {
    if (options_.progress) options_.progress(what);
  }
  const Row& row(int64_t b) const { return rows_[static_cast<size_t>(b)]; }

  StepResult step(uint64_t seed) {
    SparseGradient sparse = options_.sparse;
    sparse.seed = seed;
    std::optional<StepResult> result = make_step_(case_, sparse);
    if (!result) fail("--workspace-limit leaves no room for loss and gradient in one call");
    if (options_.after) options_.after(seed, *result);
    return std::move(*result);
  }

  int64_t local_target(int64_t b) const {
    return case_.target.integer_at(b) - case_.vocab_start_index;
  }
  bool has_gradient(int64_t b) const {
    const int64_t target = local_target(b);
    return case_.counts(b) && target >= 0 && target < case_.shape().V &&
           case_.grad.as<float>()[b] != 0;
  }

  // Of the same call with exact gradients: the same bits.
  void judge_statistics(const StepResult& got) {
    const std::optional<StepResult> exact = make_step_(case_, {});
    if (!exact) return;
    const std::string stage = "as with exact gradients";
    judge_same_bits(stage, "logits_max", got.logits_max, exact->logits_max, report_.judgements);
    judge_same_bits(stage, "sum_exp_logits", got.sum_exp_logits, exact->sum_exp_logits,
                    report_.judgements);
    judge_same_bits(stage, "predicted_logits", got.predicted_logits, exact->predicted_logits,
                    report_.judgements);
    judge_same_bits(stage, "loss", got.loss, exact->loss, report_.judgements);
    ElementJudge total(stage, "total");
    total.add(got.total, exact->total, 0, -1);
    report_.judgements.push_back(total.verdict());
  }

  // ---- the rule of every row -------------------------------------------------------------------

  // From the library's own fp32 logits: what it makes of them is judged here, they themselves where
  // verify is asked without a tolerance.
  void find_rules() {
    const Shape shape = case_.shape();
    rows_.assign(static_cast<size_t>(shape.BT), {});
    weight_lengths_ = row_lengths(reference::read(case_.weight.matrix()));
    input_lengths_ = row_lengths(reference::read(case_.input.matrix()));
    weight_variance_.assign(static_cast<size_t>(shape.V), 0);
    weight_longest_.assign(static_cast<size_t>(shape.V), 0);
    for (int64_t begin = 0; begin < shape.BT; begin += kTokenBlock) {
      say(fmt::format("float64 rules, token {} of {}", begin, shape.BT));
      const int64_t end = std::min(begin + kTokenBlock, shape.BT);
      const HostTensor logits = logits_of(begin, end);
      std::vector<std::vector<double>> softmax(static_cast<size_t>(end - begin));
      std::vector<reference::SparseRule> rules(softmax.size());
      std::vector<reference::DenseRule> dense(softmax.size());
#pragma omp parallel for schedule(dynamic)
      for (int64_t b = begin; b < end; ++b) {
        if (!has_gradient(b)) continue;
        const auto i = static_cast<size_t>(b - begin);
        const float* row_logits = logits.as<float>() + (b - begin) * shape.V;
        softmax[i] = softmax_of(row_logits);
        if (softmax[i].empty()) continue;
        const auto eps = static_cast<double>(options_.sparse.tolerance);
        rules[i] = reference::sparse_rule(softmax[i], local_target(b), eps);
        dense[i] = reference::dense_rule(std::vector<double>(row_logits, row_logits + shape.V),
                                         local_target(b), eps, rules[i]);
      }
      for (int64_t b = begin; b < end; ++b) {
        const auto i = static_cast<size_t>(b - begin);
        if (has_gradient(b)) add_rule(b, softmax[i], rules[i], dense[i]);
      }
    }
  }

  HostTensor logits_of(int64_t begin, int64_t end) {
    const Shape shape{.BT = end - begin, .V = case_.shape().V, .H = case_.shape().H};
    ForwardTypes types;
    types.operand = case_.dtype();
    types.target = case_.target.dtype();
    types.logits = DType::f32;
    const ForwardPlan plan = take(plan_forward(shape, types, options_.run.plan_options()));
    HostTensor logits(DType::f32, {shape.BT, shape.V});
    HostTensor max(DType::f32, {shape.BT}), sum(DType::f32, {shape.BT}),
        predicted(DType::f32, {shape.BT}), target(types.target, {shape.BT});
    for (int64_t b = 0; b < shape.BT; ++b) {
      if (types.target == DType::i32) {
        target.as<int32_t>()[b] = 0;
      } else {
        target.as<int64_t>()[b] = 0;
      }
    }
    ForwardOperands operands;
    operands.input = case_.input.rows(begin, end);
    operands.weight = case_.weight.matrix();
    operands.target = target.vector();
    ForwardOutputs outputs;
    outputs.logits_max = max.vector();
    outputs.sum_exp_logits = sum.vector();
    outputs.predicted_logits = predicted.vector();
    outputs.logits = logits.matrix();
    take(logitless::run(plan, operands, outputs, workspace_.get(plan.workspace_bytes())));
    return logits;
  }

  // Empty where it is not finite.
  std::vector<double> softmax_of(const float* logits) const {
    const auto V = static_cast<size_t>(case_.shape().V);
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t v = 0; v < V; ++v) max = std::max(max, static_cast<double>(logits[v]));
    std::vector<double> softmax(V);
    for (size_t v = 0; v < V; ++v) {
      softmax[v] = std::exp(static_cast<double>(logits[v]) - max);
      sum += softmax[v];
    }
    if (!std::isfinite(sum)) return {};
    for (double& p : softmax) p /= sum;
    return softmax;
  }

  void add_rule(int64_t b, const std::vector<double>& softmax, const reference::SparseRule& rule,
                const reference::DenseRule& dense) {
    Row& row = rows_[static_cast<size_t>(b)];
    row.has_gradient = true;
    row.may_be_sparse = !softmax.empty() && dense.may_be_sparse;
    row.may_be_dense = softmax.empty() || dense.may_be_dense;
    row.rest = rule.rest;
    row.expected_kept = rule.expected_kept;
    if (!row.may_be_sparse) return;
    const int64_t target = local_target(b);
    const double w = std::abs(static_cast<double>(case_.grad.as<float>()[b]));
    const double input_length = input_lengths_[static_cast<size_t>(b)];
    double variance = 0, longest = 0;
    for (size_t v = 0; v < softmax.size(); ++v) {
      const double p = softmax[v];
      if (static_cast<int64_t>(v) == target || p >= rule.tau || p == 0) continue;
      const double kept = p / rule.tau;
      row.kept_variance += kept * (1 - kept);
      const double element = p * (rule.tau - p) * w * w;
      variance += element * weight_lengths_[v] * weight_lengths_[v];
      longest = std::max(longest, weight_lengths_[v]);
      weight_variance_[v] += element * input_length * input_length;
      weight_longest_[v] = std::max(weight_longest_[v], rule.tau * w * input_length);
    }
    row.deviation = std::sqrt(variance);
    row.longest = rule.tau * w * longest;
  }

  void judge_counts(const SparseCounts& counts) {
    // Rows that may go either way are half of each.
    double kept = 0, variance = 0, unclear_kept = 0, dense = 0, unclear = 0;
    for (const Row& row : rows_) {
      if (!row.has_gradient) continue;
      const double half = row.may_be_sparse && row.may_be_dense ? 0.5 : 0;
      unclear_kept += half * row.expected_kept;
      unclear += half;
      dense += row.may_be_sparse ? half : 1;
      kept += (row.may_be_sparse ? 1 - half : 0) * row.expected_kept;
      variance += row.kept_variance;
    }
    // A row's threshold may fall to the next power of two by an ulp: a few elements.
    constexpr double kUlps = 1e-4;
    ElementJudge kept_judge("one seed", "elements kept");
    kept_judge.add(static_cast<double>(counts.kept), kept,
                   6 * std::sqrt(variance) + unclear_kept + kUlps * kept + 1, -1);
    ElementJudge dense_judge("one seed", "dense rows");
    dense_judge.add(static_cast<double>(counts.dense_rows), dense, unclear, -1);
    report_.judgements.push_back(kept_judge.verdict());
    report_.judgements.push_back(dense_judge.verdict());
  }

  // ---- one seed --------------------------------------------------------------------------------

  reference::GradientOperands operands_for(const StepResult& step) const {
    reference::GradientOperands operands;
    operands.input = case_.input.matrix();
    operands.weight = case_.weight.matrix();
    operands.logits_max = reference::read(step.logits_max.vector());
    operands.sum_exp_logits = reference::read(step.sum_exp_logits.vector());
    for (int64_t b = 0; b < case_.shape().BT; ++b) {
      const bool counts = has_gradient(b);
      operands.grad.push_back(counts ? static_cast<double>(case_.grad.as<float>()[b]) : 0.0);
      operands.masked_target.push_back(counts ? local_target(b) : 0);
      operands.counts.push_back(counts ? 1 : 0);
    }
    return operands;
  }

  // Kept values are multiplied in fp32 whatever the operands are; dense rows as one pass does.
  static constexpr reference::GradientOptions kKept{
      .multiply = DType::f32, .logits_rounding = LogitsRounding::none, .held_softmax = {}};
  reference::GradientOptions dense_options() const {
    return {.multiply = {},
            .logits_rounding = LogitsRounding::none,
            .held_softmax = held_softmax_type(case_.dtype())};
  }
  bool any_dense() const {
    return std::ranges::any_of(rows_,
                               [](const Row& row) { return row.has_gradient && row.may_be_dense; });
  }

  // Lengths of what float's roundings may make of each row.
  static std::vector<double> roundings(const reference::Gradient& gradient, int64_t terms) {
    const Matrix& value = gradient.value;
    const double samples = static_cast<double>(value.rows) * static_cast<double>(value.cols);
    std::vector<double> lengths;
    for (int64_t r = 0; r < value.rows; ++r) {
      double squares = 0;
      for (int64_t h = 0; h < value.cols; ++h) {
        const double allowed = reference::allowed_grad_input({.value = value(r, h),
                                                              .deviation = gradient.deviation(r, h),
                                                              .bias = gradient.bias(r, h),
                                                              .terms = static_cast<double>(terms)},
                                                             samples);
        squares += allowed * allowed;
      }
      lengths.push_back(std::sqrt(squares));
    }
    return lengths;
  }

  struct RowErrors {
    std::vector<double> error, exact;
    double squares = 0, rounding_squares = 0, predicted_squares = 0;
  };

  // Each row, and all of them together.
  RowErrors judge_rows(const char* output, const HostTensor& got, const reference::Gradient& exact,
                       const std::vector<double>& rounding, const std::vector<double>& deviation,
                       const std::vector<double>& longest, double independent) {
    RowErrors errors;
    const Matrix mine = rows_of(got, exact.rows);
    ElementJudge judge("one seed", fmt::format("{}, length of a row's error", output));
    double count = 0;
    for (size_t i = 0; i < exact.rows.size(); ++i) {
      const auto r = static_cast<int64_t>(i);
      double squares = 0;
      for (int64_t h = 0; h < mine.cols; ++h) {
        squares += std::pow(mine(r, h) - exact.value(r, h), 2);
      }
      const double length = length_of(exact.value, r);
      errors.error.push_back(std::sqrt(squares));
      errors.exact.push_back(length);
      if (!std::isfinite(length)) continue;
      judge.add(
          errors.error[i], 0,
          rounding[i] + reference::kMargin * (kDeviations * deviation[i] + kLongest * longest[i]),
          exact.rows[i]);
      errors.squares += squares;
      errors.rounding_squares += rounding[i] * rounding[i];
      errors.predicted_squares += deviation[i] * deviation[i];
      count += 1;
    }
    report_.judgements.push_back(judge.verdict());
    // The more of them, the nearer their sum to what it is on average.
    const double spread = 1 + 6 / std::sqrt(std::max(std::min(count, independent), 1.0));
    ElementJudge all("one seed", fmt::format("{}, length of all errors", output));
    all.add(std::sqrt(errors.squares), 0,
            std::sqrt(errors.predicted_squares) * spread + std::sqrt(errors.rounding_squares), -1);
    report_.judgements.push_back(all.verdict());
    return errors;
  }

  void judge_grad_input(const StepResult& got) {
    say("float64 grad_input");
    std::vector<int64_t> tokens;
    for (const int64_t b : report_.sample.tokens) {
      if (row(b).has_gradient) tokens.push_back(b);
    }
    const reference::GradientOperands operands = operands_for(got);
    const int64_t V = case_.shape().V;
    const reference::Gradient exact = reference::grad_input(operands, kKept, tokens);
    std::vector<double> rounding = roundings(exact, V);
    if (any_dense()) {
      const std::vector<double> dense =
          roundings(reference::grad_input(operands, dense_options(), tokens), V);
      for (size_t i = 0; i < tokens.size(); ++i) {
        if (row(tokens[i]).may_be_dense) rounding[i] = dense[i];
      }
    }
    std::vector<double> deviation, longest;
    for (const int64_t b : tokens) {
      deviation.push_back(row(b).deviation);
      longest.push_back(row(b).longest);
    }
    const RowErrors errors =
        judge_rows("grad_input", got.grad_input, exact, rounding, deviation, longest, 1e9);
    std::vector<int64_t> resolved;
    std::vector<double> error, length;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (!(row(tokens[i]).rest >= kResolved)) {
        ++report_.certain_rows;
        continue;
      }
      resolved.push_back(tokens[i]);
      error.push_back(errors.error[i]);
      length.push_back(errors.exact[i]);
    }
    report_.grad_input = summarise(resolved, error, length);
  }

  void judge_grad_weight(const StepResult& got) {
    say("float64 grad_weight");
    const std::vector<int64_t>& vocabulary = report_.sample.vocabulary;
    const reference::GradientOperands operands = operands_for(got);
    const int64_t BT = case_.shape().BT;
    const reference::Gradient exact = reference::grad_weight(operands, kKept, vocabulary);
    const std::vector<double> rounding =
        any_dense() ? roundings(reference::grad_weight(operands, dense_options(), vocabulary), BT)
                    : roundings(exact, BT);
    std::vector<double> deviation, longest;
    for (const int64_t v : vocabulary) {
      deviation.push_back(std::sqrt(weight_variance_[static_cast<size_t>(v)]));
      longest.push_back(weight_longest_[static_cast<size_t>(v)]);
    }
    const auto tokens = static_cast<double>(case_.tokens_with_gradient());
    const RowErrors errors =
        judge_rows("grad_weight", got.grad_weight, exact, rounding, deviation, longest, tokens);
    report_.grad_weight = summarise(vocabulary, errors.error, errors.exact);
  }

  // ---- many seeds ------------------------------------------------------------------------------

  // Rows that are the same for every seed show no standard error; those that the rule says are
  // dense lose their gradient. One that should vary stays, and fails.
  void drop_fixed_rows(const StepResult& first) {
    constexpr double kLeastVariance = 20;
    const int64_t BT = case_.shape().BT, H = case_.shape().H;
    std::vector<StepResult> probes;
    for (int i = 1; i < kProbes; ++i) {
      probes.push_back(step(options_.sparse.seed + static_cast<uint64_t>(i)));
    }
    for (int64_t b = 0; b < BT; ++b) {
      if (!row(b).has_gradient) continue;
      const float* mine = first.grad_input.as<float>() + b * H;
      const bool fixed = std::ranges::all_of(probes, [&](const StepResult& probe) {
        return std::equal(mine, mine + H, probe.grad_input.as<float>() + b * H);
      });
      // NaN is not equal to itself.
      const bool number = std::all_of(mine, mine + H, [](float g) { return std::isfinite(g); });
      if (number && (!fixed || (row(b).surely_sparse() && row(b).kept_variance > kLeastVariance))) {
        continue;
      }
      case_.grad.as<float>()[b] = 0;
      ++report_.fixed_rows;
    }
  }

  void judge_bias(const StepResult& first) {
    say("which rows vary");
    drop_fixed_rows(first);
    std::vector<int64_t> tokens;
    for (const int64_t b : report_.sample.tokens) {
      if (has_gradient(b)) tokens.push_back(b);
    }
    if (tokens.empty()) return;
    tokens = thinned(tokens, kMostBiasTokens);
    const std::vector<int64_t> vocabulary = thinned(report_.sample.vocabulary, kMostBiasRows);
    const reference::GradientOperands operands = operands_for(first);
    say("float64 gradients");
    const reference::Gradient input = reference::grad_input(operands, kKept, tokens);
    const reference::Gradient weight = reference::grad_weight(operands, kKept, vocabulary);
    BiasCheck input_check(input.value, roundings(input, case_.shape().V));
    BiasCheck weight_check(weight.value, roundings(weight, case_.shape().BT),
                           BiasCheck::Rows::as_they_are);
    for (int i = 0; i < options_.seeds; ++i) {
      say(fmt::format("seed {} of {}", i, options_.seeds));
      const StepResult got = step(options_.sparse.seed + static_cast<uint64_t>(i));
      input_check.add(rows_of(got.grad_input, tokens));
      weight_check.add(rows_of(got.grad_weight, vocabulary));
    }
    report_.seeds = options_.seeds;
    report_.bias_rows = input_check.rows();
    const std::string stage = fmt::format("mean of {} seeds", options_.seeds);
    for (const auto& [check, output] :
         {std::pair{&input_check, "grad_input"}, std::pair{&weight_check, "grad_weight"}}) {
      ElementJudge judge(stage, fmt::format("{}, in standard errors", output));
      for (int k = 0; k < BiasCheck::kDirections; ++k) {
        judge.add(check->errors(k), 0, BiasCheck::kMostErrors, -1);
      }
      report_.judgements.push_back(judge.verdict());
    }
  }

  Case& case_;
  const SparseVerifyOptions& options_;
  const MakeStep& make_step_;
  SparseVerifyReport& report_;
  Workspace workspace_;
  std::vector<Row> rows_;                                 // [BT]
  std::vector<double> weight_lengths_, input_lengths_;    // [V], [BT]
  std::vector<double> weight_variance_, weight_longest_;  // [V], of rows of grad_weight
};

}  // namespace

bool SparseVerifyReport::fine() const {
  return std::ranges::all_of(judgements,
                             [](const Judgement& judgement) { return judgement.fine(); });
}

SparseVerifyReport verify_sparse(Case& c, const SparseVerifyOptions& options) {
  SparseVerifyReport report;
  report.shape = c.shape();
  report.sample = choose_sample(
      c, {.full = options.full, .budget_seconds = 16, .passes_per_token = 6, .passes_per_row = 6});
  Operators operators(c, options.run, LogitsRounding::none, Scope::step);
  MakeStep make_step = options.make_step;
  if (!make_step) {
    make_step = [&](const Case& /*c*/, const SparseGradient& sparse) {
      std::optional<StepResult> result = operators.step(Strategy::automatic, DType::f32, sparse);
      if (result && sparse.tolerance > 0) {
        report.isa = operators.isa();
        report.threads = operators.threads();
        report.workspace_bytes = operators.costs().back().workspace_bytes;
      }
      return result;
    };
  }
  SparseVerification(c, options, make_step, report).run();
  return report;
}

}  // namespace logitless::cli
