// SPDX-License-Identifier: Apache-2.0
#include "cli/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "reference/tolerance.h"

namespace logitless::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Half an ulp of 1 in fp32.
const double kFloatRoundoff = reference::unit_roundoff(DType::f32);

double samples_of(size_t rows, int64_t cols = 1) {
  return static_cast<double>(rows) * static_cast<double>(std::max<int64_t>(cols, 1));
}

bool mask_at(const HostTensor& mask, int64_t BT, int64_t b) {
  // One byte per token is told from packed bits by its size; BT = 1 packs into one byte as well,
  // and both layouts then read the same.
  return mask.shape()[0] == BT && BT != packed_mask_bytes(BT) ? mask.as<uint8_t>()[b] != 0
                                                              : mask_bit(mask, b);
}

}  // namespace

ElementJudge::ElementJudge(std::string stage, std::string output) {
  verdict_.stage = std::move(stage);
  verdict_.output = std::move(output);
}

void ElementJudge::add(double got, double expected, double allowed, int64_t row, int64_t col) {
  double error = std::abs(got - expected);
  if (got == expected || (std::isnan(got) && std::isnan(expected))) {
    error = 0;
  } else if (!std::isfinite(got) || !std::isfinite(expected)) {
    error = kInfinity;
  }
  const double ratio = error == 0 ? 0 : allowed > 0 ? error / allowed : kInfinity;
  // Of equally good elements the one with the widest allowance stands for all.
  const bool worst =
      ratio > verdict_.ratio || (ratio == verdict_.ratio && allowed > verdict_.allowed);
  if (verdict_.elements == 0 || worst) {
    verdict_.observed = error;
    verdict_.allowed = allowed;
    verdict_.ratio = ratio;
    verdict_.got = got;
    verdict_.expected = expected;
    verdict_.row = row;
    verdict_.col = col;
  }
  verdict_.exact = (verdict_.elements == 0 || verdict_.exact) && allowed == 0;
  ++verdict_.elements;
}

reference::Statistics as_reference(const ForwardResult& result, const Case& c,
                                   std::span<const int64_t> tokens) {
  reference::Statistics s;
  s.tokens.assign(tokens.begin(), tokens.end());
  const size_t n = tokens.size();
  const auto fill = [&](reference::TokenValues& values, const HostTensor& tensor) {
    for (const int64_t b : tokens)
      values.value.push_back(static_cast<double>(tensor.as<float>()[b]));
    values.deviation.assign(n, 0.0);
    values.flip.assign(n, 0.0);
  };
  fill(s.logits_max, result.logits_max);
  fill(s.sum_exp_logits, result.sum_exp_logits);
  fill(s.predicted_logits, result.predicted_logits);
  for (const int64_t b : tokens) {
    s.target_mask.push_back(mask_bit(result.target_mask, b) ? 1 : 0);
    s.masked_target.push_back(result.masked_target.integer_at(b));
    s.counts.push_back(c.counts(b) ? 1 : 0);
  }
  s.logsumexp_deviation.assign(n, 0.0);
  s.logsumexp_flip.assign(n, 0.0);
  s.loss_deviation.assign(n, 0.0);
  s.loss_flip.assign(n, 0.0);
  return s;
}

void judge_statistics(const std::string& stage, const StatisticsTensors& got,
                      const reference::Statistics& expected, int64_t BT, Judgements& out) {
  const double samples = samples_of(expected.tokens.size());
  const auto judge_values = [&](const char* name, const HostTensor* tensor,
                                const reference::TokenValues& values, auto allowed) {
    if (tensor == nullptr) return;
    ElementJudge judge(stage, name);
    for (size_t i = 0; i < expected.tokens.size(); ++i) {
      const double value = values.value[i];
      // A row that does not count is the neutral element of merging, exactly.
      const double limit = expected.counts[i] && std::isfinite(value)
                               ? allowed(value, values.deviation[i], values.flip[i], samples)
                               : 0;
      judge.add(static_cast<double>(tensor->as<float>()[expected.tokens[i]]), value, limit,
                expected.tokens[i]);
    }
    out.push_back(judge.verdict());
  };
  judge_values("logits_max", got.logits_max, expected.logits_max, reference::allowed_logits_max);
  judge_values("sum_exp_logits", got.sum_exp_logits, expected.sum_exp_logits,
               reference::allowed_sum_exp_logits);
  judge_values("predicted_logits", got.predicted_logits, expected.predicted_logits,
               reference::allowed_predicted_logits);
  if (got.target_mask != nullptr) {
    ElementJudge judge(stage, "target_mask");
    for (size_t i = 0; i < expected.tokens.size(); ++i) {
      const int64_t b = expected.tokens[i];
      judge.add(mask_at(*got.target_mask, BT, b) ? 1 : 0, expected.target_mask[i], 0, b);
    }
    out.push_back(judge.verdict());
  }
  if (got.masked_target != nullptr) {
    ElementJudge judge(stage, "masked_target");
    for (size_t i = 0; i < expected.tokens.size(); ++i) {
      const int64_t b = expected.tokens[i];
      judge.add(static_cast<double>(got.masked_target->integer_at(b)),
                static_cast<double>(expected.masked_target[i]), 0, b);
    }
    out.push_back(judge.verdict());
  }
}

void judge_merge(const std::string& stage, const ForwardResult& merged,
                 std::span<const reference::Statistics> shards, Judgements& out) {
  const reference::Statistics expected = reference::merge(shards);
  const size_t n = expected.tokens.size();
  ElementJudge max_judge(stage, "logits_max");
  ElementJudge sum_judge(stage, "sum_exp_logits");
  ElementJudge predicted_judge(stage, "predicted_logits");
  ElementJudge mask_judge(stage, "target_mask");
  // Of the tokens one shard of which holds nearly the whole sum: the rest is exact by definition
  // (exp(0) = 1), so a common factor has nowhere to hide.
  constexpr double kSmallShare = 0.125;
  double error_sum = 0, variance_sum = 0;
  int64_t error_count = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t b = expected.tokens[i];
    const double max = expected.logits_max.value[i];
    const double sum = expected.sum_exp_logits.value[i];
    const double predicted = expected.predicted_logits.value[i];
    max_judge.add(static_cast<double>(merged.logits_max.as<float>()[b]), max, 0, b);
    mask_judge.add(mask_bit(merged.target_mask, b) ? 1 : 0, expected.target_mask[i], 0, b);

    // First order, shards in the order they are merged: whichever side stands below the larger
    // maximum is rebased, with exp's promised error, the rounding of its argument and of the
    // product; adding rounds once more.
    double relative = 0, rebased_share = 0, added_variance = 0, predicted_allowed = 0;
    double running_max = -kInfinity, running_share = 0;
    for (const reference::Statistics& shard : shards) {
      const double local = shard.logits_max.value[i];
      const double share = sum > 0 && std::isfinite(local)
                               ? shard.sum_exp_logits.value[i] * std::exp(local - max) / sum
                               : 0;
      const double lower_share = local > running_max ? running_share : share;
      if (lower_share > 0 && local != running_max) {
        const double step = std::abs(local - running_max);
        relative += lower_share * (reference::kExpError + (2 + step) * kFloatRoundoff);
        // Adding less than an ulp cannot round by more than what is added.
        added_variance += std::pow(std::min(lower_share, kFloatRoundoff), 2) / 3;
      }
      if (local != max) rebased_share += share;
      running_share += share;
      running_max = std::max(running_max, local);
      if (shard.target_mask[i] == 0) {
        const double shift = std::isfinite(local) ? local - max : 0;
        predicted_allowed = shift == 0 ? 0
                                       : reference::half_ulp(DType::f32, shift) +
                                             reference::half_ulp(DType::f32, predicted);
      }
    }
    const double additions = static_cast<double>(shards.size() - 1) * kFloatRoundoff;
    const bool finite = std::isfinite(sum);
    const double sum_allowed = finite ? reference::kMargin * (relative + additions) * sum : 0;
    const double got_sum = static_cast<double>(merged.sum_exp_logits.as<float>()[b]);
    sum_judge.add(got_sum, sum, sum_allowed, b);
    predicted_judge.add(static_cast<double>(merged.predicted_logits.as<float>()[b]), predicted,
                        std::isfinite(predicted) ? reference::kMargin * predicted_allowed : 0, b);
    if (finite && sum > 0 && rebased_share <= kSmallShare) {
      error_sum += got_sum / sum - 1;
      variance_sum += relative * relative / 3 + added_variance;
      ++error_count;
    }
  }
  out.push_back(max_judge.verdict());
  out.push_back(sum_judge.verdict());
  if (error_count >= 8) {
    // Errors of different tokens are independent, so their mean shrinks with the root of the count.
    const double count = static_cast<double>(error_count);
    const double allowed =
        reference::kMargin * reference::spread(1) * std::sqrt(variance_sum) / count;
    ElementJudge judge(stage, "sum_exp_logits, mean");
    judge.add(error_sum / count, 0, allowed, -1);
    out.push_back(judge.verdict());
    out.back().elements = error_count;
  }
  out.push_back(predicted_judge.verdict());
  out.push_back(mask_judge.verdict());
}

void judge_loss(const std::string& stage, const HostTensor* loss, const HostTensor* logsumexp,
                const reference::Statistics& statistics, bool own, Judgements& out) {
  const reference::Loss expected = reference::loss(statistics);
  const size_t n = statistics.tokens.size();
  const double samples = samples_of(n);
  ElementJudge loss_judge(stage, "loss");
  ElementJudge logsumexp_judge(stage, "logsumexp");
  for (size_t i = 0; i < n; ++i) {
    const int64_t b = statistics.tokens[i];
    const double log_sum = std::log(statistics.sum_exp_logits.value[i]);
    const auto limit = [&](const reference::TokenValues& values, auto allowed) {
      if (!statistics.counts[i] || !std::isfinite(values.value[i])) return 0.0;
      return allowed(values.value[i], own ? 0 : values.deviation[i], own ? 0 : values.flip[i]);
    };
    if (loss != nullptr) {
      const double allowed = limit(expected.loss, [&](double value, double deviation, double flip) {
        return reference::allowed_loss(value, log_sum, statistics.predicted_logits.value[i],
                                       deviation, flip, samples);
      });
      loss_judge.add(static_cast<double>(loss->as<float>()[b]), expected.loss.value[i], allowed, b);
    }
    if (logsumexp != nullptr) {
      const double allowed =
          limit(expected.logsumexp, [&](double value, double deviation, double flip) {
            return reference::allowed_logsumexp(value, log_sum, deviation, flip, samples);
          });
      logsumexp_judge.add(static_cast<double>(logsumexp->as<float>()[b]),
                          expected.logsumexp.value[i], allowed, b);
    }
  }
  if (loss != nullptr) out.push_back(loss_judge.verdict());
  if (logsumexp != nullptr) out.push_back(logsumexp_judge.verdict());
}

void judge_logits(const std::string& stage, const HostTensor& logits,
                  const reference::Logits& expected, std::span<const int64_t> tokens,
                  LogitsRounding rounding, DType multiply, Judgements& out) {
  const int64_t V = logits.shape()[1];
  const double samples = samples_of(tokens.size(), V);
  ElementJudge judge(stage, "logits");
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    for (int64_t v = 0; v < V; ++v) {
      const double unrounded = expected.unrounded(row, v);
      // Judged before rounding, so that the half ulp of the rounding is allowed once.
      const DType written = rounding == LogitsRounding::operand ? multiply : logits.dtype();
      const double limit =
          std::isfinite(unrounded)
              ? reference::allowed_logit(unrounded, expected.deviation(row, v), written, samples)
              : 0;
      judge.add(static_cast<double>(logits.float_at(tokens[i] * V + v)), unrounded, limit,
                tokens[i], v);
    }
  }
  out.push_back(judge.verdict());
}

void judge_softmax(const std::string& stage, const HostTensor& softmax, const HostTensor& logits,
                   int64_t first_column, const ForwardResult& merged, const Case& c,
                   std::span<const int64_t> tokens, Judgements& out) {
  const int64_t V = logits.shape()[1];
  const double samples = samples_of(tokens.size(), V);
  ElementJudge judge(stage, "softmax");
  for (const int64_t b : tokens) {
    const double max = static_cast<double>(merged.logits_max.as<float>()[b]);
    const double sum = static_cast<double>(merged.sum_exp_logits.as<float>()[b]);
    for (int64_t v = 0; v < V; ++v) {
      const double logit = static_cast<double>(logits.float_at(b * V + v));
      const double value = c.counts(b) ? reference::softmax(logit, max, sum) : 0;
      const double limit = c.counts(b) && std::isfinite(value)
                               ? reference::allowed_softmax(value, logit - max, 0, 0, samples)
                               : 0;
      const int64_t column = first_column + v;
      judge.add(static_cast<double>(softmax.as<float>()[b * softmax.shape()[1] + column]), value,
                limit, b, column);
    }
  }
  out.push_back(judge.verdict());
}

void judge_gradient(const std::string& stage, const std::string& output, const HostTensor& got,
                    const reference::Gradient& expected, int64_t terms, Judgements& out) {
  const int64_t H = expected.value.cols;
  const double samples = samples_of(expected.rows.size(), H);
  ElementJudge judge(stage, output);
  reference::GradElement element;
  element.terms = static_cast<double>(terms);
  element.output = got.dtype();
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    for (int64_t h = 0; h < H; ++h) {
      element.value = expected.value(row, h);
      element.deviation = expected.deviation(row, h);
      element.bias = expected.bias(row, h);
      // A row to which nothing contributes is exactly 0.
      const bool nothing = element.value == 0 && element.deviation == 0;
      const double limit = nothing || !std::isfinite(element.value)
                               ? 0
                               : reference::allowed_grad_input(element, samples);
      judge.add(static_cast<double>(got.float_at(expected.rows[i] * H + h)), element.value, limit,
                expected.rows[i], h);
    }
  }
  out.push_back(judge.verdict());
}

void judge_same_bits(const std::string& stage, const std::string& output, const HostTensor& got,
                     const HostTensor& expected, Judgements& out) {
  ElementJudge judge(stage, output);
  const bool matrix = got.shape().size() == 2;
  const int64_t cols = matrix ? std::max<int64_t>(got.shape()[1], 1) : 1;
  for (int64_t i = 0; i < got.elements(); ++i) {
    auto value = static_cast<double>(got.float_at(i));
    const auto want = static_cast<double>(expected.float_at(i));
    // Zeros of different signs are equal, and must not count as the same.
    if (value == 0 && want == 0 && std::signbit(value) != std::signbit(want)) {
      value = std::copysign(std::numeric_limits<double>::denorm_min(), value);
    }
    judge.add(value, want, 0, i / cols, matrix ? i % cols : -1);
  }
  out.push_back(judge.verdict());
}

void join(Judgements& into, const Judgements& more) {
  for (const Judgement& judgement : more) {
    const auto same = std::ranges::find_if(into, [&](const Judgement& known) {
      return known.stage == judgement.stage && known.output == judgement.output;
    });
    if (same == into.end()) {
      into.push_back(judgement);
      continue;
    }
    const int64_t elements = same->elements + judgement.elements;
    const bool exact =
        (same->elements == 0 || same->exact) && (judgement.elements == 0 || judgement.exact);
    if (same->elements == 0 || judgement.ratio > same->ratio) *same = judgement;
    same->elements = elements;
    same->exact = exact;
  }
}

std::string describe_worst(const Judgement& j) {
  const std::string place = j.row < 0   ? std::string()
                            : j.col < 0 ? fmt::format("[{}]", j.row)
                                        : fmt::format("[{}, {}]", j.row, j.col);
  return fmt::format("{}{} is {:.9g}, float64 says {:.9g}: off by {:.3g}, allowed {:.3g}", j.output,
                     place, j.got, j.expected, j.observed, j.allowed);
}

}  // namespace logitless::cli
