// SPDX-License-Identifier: Apache-2.0
#include "cli/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <utility>

namespace logitless::cli {
namespace {

// Below this many multiply-adds for one product nothing is sampled.
constexpr double kAlwaysComplete = 2e8;
constexpr int64_t kTokensTimed = 16;
// Softmax of high-performance mode is BT x V floats, its logits as many: more than this is not
// asked of the machine, and the mode is verified on fewer tokens.
constexpr int64_t kMostSoftmaxBytes = int64_t{1} << 30;
// Logits, one by one, of so many sampled tokens.
constexpr size_t kTokensWithLogits = 16;

// Row and column tiles of every instruction set are among these; a tile's first and last row are
// where a tail or a mask goes wrong.
constexpr std::initializer_list<int64_t> kTokenTiles = {14, 8, 6, 4, 128, 512};
constexpr std::initializer_list<int64_t> kVocabularyTiles = {32, 16, 256, 512, 2048};

// The edges of tiles of `size` in [begin, end): around the first boundary and the last, and the
// ends.
void add_edges(int64_t begin, int64_t end, int64_t size, std::vector<int64_t>& out) {
  if (begin >= end) return;
  const int64_t last_tile = begin + (end - 1 - begin) / size * size;
  for (const int64_t row :
       {begin, end - 1, begin + size - 1, begin + size, last_tile - 1, last_tile}) {
    if (row >= begin && row < end) out.push_back(row);
  }
}

// The first `count` distinct values of `wanted`, then random ones of [0, n).
std::vector<int64_t> pick(const std::vector<int64_t>& wanted, int64_t n, int64_t count,
                          std::mt19937_64& random) {
  if (count >= n) {
    std::vector<int64_t> all(static_cast<size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  std::set<int64_t> chosen;
  for (const int64_t row : wanted) {
    if (static_cast<int64_t>(chosen.size()) == count) break;
    chosen.insert(row);
  }
  while (static_cast<int64_t>(chosen.size()) < count) {
    chosen.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(n)));
  }
  return {chosen.begin(), chosen.end()};
}

// The better of two runs: the first one also pays for the threads.
double seconds_per_token(const Case& c) {
  std::vector<int64_t> tokens(static_cast<size_t>(std::min(kTokensTimed, c.shape().BT)));
  std::iota(tokens.begin(), tokens.end(), 0);
  double best = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    const reference::Statistics timed =
        reference::forward(c.input.matrix(), c.weight.matrix(), c.target.vector(), {}, tokens);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count() / static_cast<double>(timed.tokens.size()));
  }
  return best;
}

std::string rounding_name(LogitsRounding rounding) {
  return rounding == LogitsRounding::none ? "logits fp32" : "logits rounded";
}

// The verification of one rounding of logits.
class Verification {
 public:
  Verification(const Case& c, const VerifyOptions& options, const Sample& sample,
               LogitsRounding rounding, VerifyReport& report)
      : case_(c),
        options_(options),
        sample_(sample),
        rounding_(rounding),
        report_(report),
        operators_(c, options.run, rounding),
        name_(rounding_name(rounding)) {
    run_options_.shards = options.shards;
    run_options_.rounding = rounding;
    run_options_.after = options.after;
  }

  void run() {
    all_tokens_.resize(static_cast<size_t>(case_.shape().BT));
    std::iota(all_tokens_.begin(), all_tokens_.end(), 0);
    say("forward");
    statistics_ = run_statistics(case_, operators_, run_options_);
    loss_ = run_loss(operators_, statistics_.merged, run_options_);
    judge_forward();
    judge_merge_and_loss();
    const reference::Statistics given = as_reference(statistics_.merged, case_, all_tokens_);
    judge_memory_saving(given);
    judge_high_performance();
    if (rounding_ == LogitsRounding::none) judge_steps();
    report_.isa = operators_.isa();
    report_.threads = operators_.threads();
  }

 private:
  std::string stage(const char* what) const { return fmt::format("{}, {}", what, name_); }
  void say(const char* what) const {
    if (options_.progress) options_.progress(stage(what));
  }

  void judge_forward() {
    for (size_t s = 0; s < statistics_.ranges.size(); ++s) {
      say("float64 forward");
      const ShardRange range = statistics_.ranges[s];
      expected_shards_.push_back(reference::forward(
          case_.input.matrix(), case_.weight.rows(range.begin, range.end), case_.target.vector(),
          reference_options(case_, range, rounding_), sample_.tokens));
      const ForwardResult& got = statistics_.shards[s];
      Judgements judgements;
      judge_statistics(stage("forward"),
                       {.logits_max = &got.logits_max,
                        .sum_exp_logits = &got.sum_exp_logits,
                        .predicted_logits = &got.predicted_logits,
                        .target_mask = &got.target_mask,
                        .masked_target = &got.masked_target},
                       expected_shards_.back(), case_.shape().BT, judgements);
      join(report_.judgements, judgements);
    }
  }

  void judge_merge_and_loss() {
    std::vector<reference::Statistics> given;
    for (const ForwardResult& shard : statistics_.shards) {
      given.push_back(as_reference(shard, case_, all_tokens_));
    }
    Judgements judgements;
    judge_merge(stage("merge"), statistics_.merged, given, judgements);
    judge_loss(stage("loss"), &loss_.loss, &loss_.logsumexp,
               as_reference(statistics_.merged, case_, all_tokens_), true, judgements);
    const reference::Statistics expected = reference::merge(expected_shards_);
    judge_loss(stage("end to end"), &loss_.loss, &loss_.logsumexp, expected, false, judgements);
    join(report_.judgements, judgements);
    if (rounding_ == LogitsRounding::none) set_mean_loss(expected);
  }

  void set_mean_loss(const reference::Statistics& expected) {
    const reference::Loss expected_loss = reference::loss(expected);
    double count = 0;
    for (size_t i = 0; i < expected.tokens.size(); ++i) {
      if (!expected.counts[i]) continue;
      report_.mean_loss += static_cast<double>(loss_.loss.as<float>()[expected.tokens[i]]);
      report_.mean_loss_float64 += expected_loss.loss.value[i];
      ++count;
    }
    report_.mean_loss /= std::max(count, 1.0);
    report_.mean_loss_float64 /= std::max(count, 1.0);
  }

  void judge_memory_saving(const reference::Statistics& given) {
    const std::string name = stage("gradient memory-saving");
    say("gradient memory-saving");
    const GradientResult got =
        run_gradient(case_, operators_, statistics_, nullptr, case_.dtype(), run_options_);
    // fp32 outputs show errors that the rounding of 16-bit ones hides.
    std::optional<GradientResult> got_f32;
    if (case_.dtype() != DType::f32 && rounding_ == LogitsRounding::none) {
      got_f32 = run_gradient(case_, operators_, statistics_, nullptr, DType::f32, run_options_);
    }
    const std::string name_f32 = name + ", to fp32";
    const reference::GradientOperands operands = reference_operands(case_, given);
    const reference::GradientOptions options{.multiply = {}, .logits_rounding = rounding_};
    say("float64 grad_input");
    const reference::Gradient expected = reference::grad_input(operands, options, sample_.tokens);
    Judgements judgements;
    judge_gradient(name, "grad_input", got.grad_input, expected, case_.shape().V, judgements);
    if (got_f32) {
      judge_gradient(name_f32, "grad_input", got_f32->grad_input, expected, case_.shape().V,
                     judgements);
    }
    join(report_.judgements, judgements);
    say("float64 grad_weight");
    std::vector<GradWeight> weights = {{.stage = name, .tensor = &got.grad_weight}};
    if (got_f32) weights.push_back({.stage = name_f32, .tensor = &got_f32->grad_weight});
    judge_grad_weights(weights, operands, options, sample_.vocabulary, report_.judgements);
  }

  // Softmax is made from logits of either rounding, the gradient only reads it: one rounding will
  // do for the gradient.
  void judge_high_performance() {
    const Shape shape = case_.shape();
    const int64_t row_bytes = std::max<int64_t>(shape.V, 1) * 8;
    const int64_t tokens = std::min(shape.BT, std::max<int64_t>(kMostSoftmaxBytes / row_bytes, 1));
    report_.softmax_tokens = tokens;
    if (tokens == shape.BT) {
      judge_high_performance_of(case_, statistics_, operators_, sample_.tokens);
      return;
    }
    const Case part = case_.first_tokens(tokens);
    Operators operators(part, options_.run, rounding_);
    const StatisticsResult statistics = run_statistics(part, operators, run_options_);
    std::vector<int64_t> sampled;
    for (const int64_t b : sample_.tokens) {
      if (b < tokens) sampled.push_back(b);
    }
    judge_high_performance_of(part, statistics, operators, sampled);
  }

  void judge_high_performance_of(const Case& c, const StatisticsResult& statistics,
                                 Operators& operators, const std::vector<int64_t>& tokens) {
    say("softmax");
    std::vector<int64_t> few(tokens);
    if (few.size() > kTokensWithLogits) {
      // The ends, and an even choice between them.
      for (size_t i = 0; i < kTokensWithLogits; ++i) {
        few[i] = tokens[i * (tokens.size() - 1) / (kTokensWithLogits - 1)];
      }
      few.resize(kTokensWithLogits);
    }
    const auto judge_shard = [&](ShardRange range, const HostTensor& logits,
                                 const HostTensor& softmax) {
      Judgements judgements;
      std::vector<int64_t> counting;  // logits of rows that do not count are zeros
      for (const int64_t b : few) {
        if (c.counts(b)) counting.push_back(b);
      }
      const reference::Logits expected =
          reference::logits(c.input.matrix(), c.weight.rows(range.begin, range.end),
                            reference_options(c, range, rounding_), counting);
      judge_logits(stage("forward"), logits, expected, counting, rounding_, c.dtype(), judgements);
      judge_softmax(stage("softmax"), softmax, logits, range.begin, statistics.merged, c, tokens,
                    judgements);
      join(report_.judgements, judgements);
    };
    const HostTensor softmax = run_softmax(c, operators, statistics, run_options_, judge_shard);
    if (rounding_ != LogitsRounding::none) return;

    const std::string name = "gradient high-performance";
    say("gradient high-performance");
    const GradientResult got =
        run_gradient(c, operators, statistics, &softmax, c.dtype(), run_options_);
    std::vector<int64_t> all(static_cast<size_t>(c.shape().BT));
    std::iota(all.begin(), all.end(), 0);
    reference::GradientOperands operands =
        reference_operands(c, as_reference(statistics.merged, c, all));
    operands.softmax = softmax.matrix();
    say("float64 grad_input");
    Judgements judgements;
    judge_gradient(name, "grad_input", got.grad_input, reference::grad_input(operands, {}, tokens),
                   c.shape().V, judgements);
    join(report_.judgements, judgements);
    say("float64 grad_weight");
    judge_grad_weights({{.stage = name, .tensor = &got.grad_weight}}, operands, {},
                       sample_.vocabulary, report_.judgements);
  }

  // The operator of a whole training step, by both strategies, on the tokens whose target is here.
  void judge_steps() {
    Operators operators(case_, options_.run, LogitsRounding::none, Scope::step);
    say("loss and gradient");
    const StatisticsResult separate = run_statistics(case_, operators, {});
    const LossResult loss = run_loss(operators, separate.merged, {});
    const std::optional<StepResult> recomputed =
        run_step(operators, Strategy::recompute, case_.dtype(), run_options_);
    const std::optional<StepResult> one_pass =
        run_step(operators, Strategy::one_pass, case_.dtype(), run_options_);
    report_.one_pass_fits = one_pass.has_value();
    if (recomputed) {
      judge_step_statistics("recompute", *recomputed, separate, loss);
      const GradientResult gradients =
          run_gradient(case_, operators, separate, nullptr, case_.dtype(), {});
      Judgements judgements;
      const std::string stage = "recompute, as separate operators";
      judge_same_bits(stage, "grad_input", recomputed->grad_input, gradients.grad_input,
                      judgements);
      judge_same_bits(stage, "grad_weight", recomputed->grad_weight, gradients.grad_weight,
                      judgements);
      join(report_.judgements, judgements);
    }
    if (one_pass) {
      judge_step_statistics("one pass", *one_pass, separate, loss);
      judge_one_pass(*one_pass, separate, operators);
    }
  }

  // Statistics for all tokens as the step saw them: where the target is elsewhere, nothing counts.
  static void drop_outside(reference::Statistics& statistics) {
    for (size_t i = 0; i < statistics.tokens.size(); ++i) {
      if (statistics.target_mask[i] == 0) continue;
      statistics.counts[i] = 0;
      statistics.logits_max.value[i] = -std::numeric_limits<double>::infinity();
      statistics.sum_exp_logits.value[i] = 0;
      statistics.predicted_logits.value[i] = 0;
    }
  }

  reference::Statistics statistics_of(const StepResult& step,
                                      const StatisticsResult& separate) const {
    reference::Statistics given = as_reference(separate.merged, case_, all_tokens_);
    for (const int64_t b : all_tokens_) {
      const auto i = static_cast<size_t>(b);
      given.logits_max.value[i] = static_cast<double>(step.logits_max.as<float>()[b]);
      given.sum_exp_logits.value[i] = static_cast<double>(step.sum_exp_logits.as<float>()[b]);
      given.predicted_logits.value[i] = static_cast<double>(step.predicted_logits.as<float>()[b]);
    }
    drop_outside(given);
    return given;
  }

  void judge_step_statistics(const std::string& stage, const StepResult& step,
                             const StatisticsResult& separate, const LossResult& loss) {
    reference::Statistics expected = reference::merge(expected_shards_);
    drop_outside(expected);
    Judgements judgements;
    judge_statistics(stage,
                     {.logits_max = &step.logits_max,
                      .sum_exp_logits = &step.sum_exp_logits,
                      .predicted_logits = &step.predicted_logits},
                     expected, case_.shape().BT, judgements);
    const reference::Statistics given = statistics_of(step, separate);
    judge_loss(stage, &step.loss, nullptr, given, true, judgements);
    judge_loss(stage + ", end to end", &step.loss, nullptr, expected, false, judgements);
    double total = 0;
    for (const int64_t b : all_tokens_) {
      if (given.counts[static_cast<size_t>(b)] == 0) continue;
      total += static_cast<double>(case_.grad.as<float>()[b]) *
               static_cast<double>(step.loss.as<float>()[b]);
    }
    ElementJudge judge(stage, "total");
    judge.add(step.total, total, 0, -1);
    judgements.push_back(judge.verdict());

    const std::string same = stage + ", as separate operators";
    const ForwardResult& forward = separate.merged;
    judge_same_bits(same, "logits_max", step.logits_max, forward.logits_max, judgements);
    judge_same_bits(same, "sum_exp_logits", step.sum_exp_logits, forward.sum_exp_logits,
                    judgements);
    judge_same_bits(same, "predicted_logits", step.predicted_logits, forward.predicted_logits,
                    judgements);
    judge_same_bits(same, "loss", step.loss, loss.loss, judgements);
    join(report_.judgements, judgements);
  }

  void judge_one_pass(const StepResult& step, const StatisticsResult& separate,
                      Operators& operators) {
    std::optional<StepResult> f32;
    if (case_.dtype() != DType::f32) {
      f32 = run_step(operators, Strategy::one_pass, DType::f32, run_options_);
    }
    reference::GradientOperands operands = reference_operands(case_, statistics_of(step, separate));
    operands.grad_logsumexp.clear();
    const reference::GradientOptions options{.multiply = {},
                                             .logits_rounding = LogitsRounding::none,
                                             .held_softmax = held_softmax_type(case_.dtype())};
    const std::string stage_f32 = "one pass, to fp32";
    say("float64 grad_input");
    const reference::Gradient expected = reference::grad_input(operands, options, sample_.tokens);
    Judgements judgements;
    judge_gradient("one pass", "grad_input", step.grad_input, expected, case_.shape().V,
                   judgements);
    if (f32) {
      judge_gradient(stage_f32, "grad_input", f32->grad_input, expected, case_.shape().V,
                     judgements);
    }
    join(report_.judgements, judgements);
    say("float64 grad_weight");
    std::vector<GradWeight> weights = {{.stage = "one pass", .tensor = &step.grad_weight}};
    if (f32) weights.push_back({.stage = stage_f32, .tensor = &f32->grad_weight});
    judge_grad_weights(weights, operands, options, sample_.vocabulary, report_.judgements);
  }

  const Case& case_;
  const VerifyOptions& options_;
  const Sample& sample_;
  LogitsRounding rounding_;
  VerifyReport& report_;
  Operators operators_;
  std::string name_;
  WholeRunOptions run_options_;
  std::vector<int64_t> all_tokens_;
  StatisticsResult statistics_;
  LossResult loss_;
  std::vector<reference::Statistics> expected_shards_;
};

}  // namespace

Sample choose_sample(const Case& c, const SampleOptions& options) {
  const Shape shape = c.shape();
  Sample sample;
  int64_t tokens = shape.BT;
  int64_t rows = shape.V;
  const double product = static_cast<double>(shape.BT) * static_cast<double>(shape.V) *
                         static_cast<double>(std::max<int64_t>(shape.H, 1));
  if (!options.full && product > kAlwaysComplete) {
    const double token_seconds = seconds_per_token(c);
    const double row_seconds =
        token_seconds * static_cast<double>(shape.BT) / static_cast<double>(shape.V);
    const double half = options.budget_seconds / 2;
    const auto affordable = [&](double seconds) {
      return static_cast<int64_t>(std::min(half / seconds, 0x1p40));
    };
    constexpr int64_t kLeast = 16;  // the edges
    tokens =
        std::min(tokens, std::max(kLeast, affordable(options.passes_per_token * token_seconds)));
    rows = std::min(rows, std::max(4 * kLeast, affordable(options.passes_per_row * row_seconds)));
    sample.complete = tokens == shape.BT && rows == shape.V;
  }
  std::mt19937_64 random(options.seed);
  std::vector<int64_t> wanted;
  for (const int64_t tile : kTokenTiles) add_edges(0, shape.BT, tile, wanted);
  sample.tokens = pick(wanted, shape.BT, tokens, random);

  wanted.clear();
  for (const ShardRange range : cut_vocabulary(shape.V, options.shards)) {
    for (const int64_t tile : kVocabularyTiles) add_edges(range.begin, range.end, tile, wanted);
  }
  for (const int64_t b : sample.tokens) {
    const int64_t row = c.target.integer_at(b) - c.vocab_start_index;
    if (row >= 0 && row < shape.V) wanted.push_back(row);
  }
  sample.vocabulary = pick(wanted, shape.V, rows, random);
  return sample;
}

bool VerifyReport::fine() const {
  return std::ranges::all_of(judgements,
                             [](const Judgement& judgement) { return judgement.fine(); });
}

reference::ForwardOptions reference_options(const Case& c, ShardRange shard,
                                            LogitsRounding rounding) {
  reference::ForwardOptions options;
  options.logits_rounding = rounding;
  options.vocab_start_index = c.vocab_start_index + shard.begin;
  options.rows.ignore_index = c.ignore_index;
  return options;
}

reference::GradientOperands reference_operands(const Case& c, const reference::Statistics& all) {
  reference::GradientOperands operands;
  operands.input = c.input.matrix();
  operands.weight = c.weight.matrix();
  operands.grad = reference::read(c.grad.vector());
  if (c.grad_logsumexp) operands.grad_logsumexp = reference::read(c.grad_logsumexp->vector());
  operands.target_mask = all.target_mask;
  operands.masked_target = all.masked_target;
  operands.logits_max = all.logits_max.value;
  operands.sum_exp_logits = all.sum_exp_logits.value;
  operands.counts = all.counts;
  return operands;
}

void judge_grad_weights(const std::vector<GradWeight>& got,
                        const reference::GradientOperands& operands,
                        const reference::GradientOptions& options,
                        const std::vector<int64_t>& vocabulary, Judgements& out) {
  constexpr int64_t kSlice = 4096;
  const auto n = static_cast<int64_t>(vocabulary.size());
  for (int64_t begin = 0; begin < n; begin += kSlice) {
    const std::vector<int64_t> rows(vocabulary.begin() + begin,
                                    vocabulary.begin() + std::min(begin + kSlice, n));
    const reference::Gradient expected = reference::grad_weight(operands, options, rows);
    Judgements judgements;
    for (const GradWeight& weight : got) {
      judge_gradient(weight.stage, "grad_weight", *weight.tensor, expected, operands.input.rows,
                     judgements);
    }
    join(out, judgements);
  }
}

VerifyReport verify_case(const Case& c, const VerifyOptions& options) {
  VerifyReport report;
  report.shape = c.shape();
  report.sample =
      choose_sample(c, {.shards = options.shards, .full = options.full, .budget_seconds = 16});
  std::vector<LogitsRounding> roundings = {LogitsRounding::none};
  // Rounding fp32 logits to fp32 is no rounding.
  if (c.dtype() != DType::f32) roundings.push_back(LogitsRounding::operand);
  for (const LogitsRounding rounding : roundings) {
    Verification(c, options, report.sample, rounding, report).run();
  }
  return report;
}

}  // namespace logitless::cli
