// SPDX-License-Identifier: Apache-2.0
// The allowed errors themselves: a correct implementation in plain float loops is within them, not
// by more than a factor of 8, and wrong ones are beyond.
#include "reference/tolerance.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "tests/support/cases.h"
#include "tests/support/emulation.h"

namespace logitless::test {
namespace {

using reference::round_to;
using reference::spacing;

TEST(Tolerance, RoundToAgreesWithTheStorageTypes) {
  for (uint32_t i = 0; i < (1u << 24); ++i) {
    const float f = std::bit_cast<float>(i << 8 | (i & 0xff));
    if (std::isnan(f)) continue;
    ASSERT_EQ(round_to(DType::f16, f), static_cast<float>(float16(f))) << f;
    ASSERT_EQ(round_to(DType::bf16, f), static_cast<float>(bfloat16(f))) << f;
    ASSERT_EQ(round_to(DType::f32, f), f);
  }
}

TEST(Tolerance, SpacingIsTheDistanceOfNeighbours) {
  EXPECT_EQ(spacing(DType::f32, 1.0), 0x1p-23);
  EXPECT_EQ(spacing(DType::bf16, 30.0), 0x1p-3);
  EXPECT_EQ(spacing(DType::f16, 65504.0), 32.0);
  EXPECT_EQ(spacing(DType::f16, 0.0), 0x1p-24);
  EXPECT_EQ(spacing(DType::bf16, 0x1p-130), 0x1p-133);
}

// Rows [begin, end) of a view.
ConstMatrixView rows_of(const ConstMatrixView& view, int64_t begin, int64_t end) {
  return {static_cast<const std::byte*>(view.data) + begin * view.row_stride * size_of(view.dtype),
          view.dtype,
          end - begin,
          view.cols,
          view.row_stride,
          view.col_stride};
}

// The statistics of shards as `cut` says.
std::vector<reference::Statistics> shards_of(const ForwardCase& c,
                                             const std::vector<int64_t>& cut) {
  std::vector<reference::Statistics> shards;
  for (size_t s = 0; s + 1 < cut.size(); ++s) {
    shards.push_back(reference::forward(c.operands().input,
                                        rows_of(c.operands().weight, cut[s], cut[s + 1]),
                                        c.operands().target, {.vocab_start_index = cut[s]}));
  }
  return shards;
}

TEST(Tolerance, MergingOneShardChangesNoEstimate) {
  const ForwardCase c = make_forward_case({.BT = 40, .V = 300, .H = 64}, all_arithmetics()[1]);
  const std::vector<reference::Statistics> one = shards_of(c, {0, 300});
  const reference::Statistics merged = reference::merge(one);
  const auto same = [](const std::vector<double>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-9 * want[i]) << i;
  };
  same(merged.logits_max.deviation, one[0].logits_max.deviation);
  same(merged.sum_exp_logits.deviation, one[0].sum_exp_logits.deviation);
  same(merged.predicted_logits.deviation, one[0].predicted_logits.deviation);
  same(merged.logsumexp_deviation, one[0].logsumexp_deviation);
  same(merged.loss_deviation, one[0].loss_deviation);
}

// The deviations of merged statistics against what errors of logits really do to them: noise of the
// size that each logit's deviation says, beside which no other rounding counts (logits near 1e4).
TEST(Tolerance, DeviationsOfMergedStatisticsAreThoseOfTheirLogits) {
  const Shape shape{.BT = 24, .V = 300, .H = 64};
  const ForwardCase c =
      make_forward_case(shape, all_arithmetics()[2], {.kind = InputKind::offset, .outside = 0});
  const reference::Logits exact =
      reference::logits(c.operands().input, c.operands().weight, {}, reference::all_rows(shape.BT));
  for (const std::vector<int64_t>& cut :
       {std::vector<int64_t>{0, 300}, {0, 130, 300}, {0, 7, 90, 200, 300}}) {
    const reference::Statistics expected = reference::merge(shards_of(c, cut));
    const reference::Loss expected_loss = reference::loss(expected);
    // The logits that statistics hang on, every shard's largest and the target's, have closer
    // estimates than the others: those of a shard of that row alone.
    reference::Matrix deviation = exact.deviation;
    const auto closer = [&](int64_t b, int64_t v) {
      const reference::Statistics alone = reference::forward(
          c.operands().input, rows_of(c.operands().weight, v, v + 1), c.operands().target,
          {.vocab_start_index = v}, std::vector<int64_t>{b});
      deviation(b, v) = alone.logits_max.deviation[0];
    };
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    constexpr int kDraws = 300;
    // Of max, sum, predicted, loss, logsumexp.
    std::array<std::vector<double>, 5> ratios;
    for (int64_t b = 0; b < shape.BT; ++b) {
      const auto at = static_cast<size_t>(b);
      const double* logits = exact.value.row(b);
      const int64_t at_max = std::max_element(logits, logits + shape.V) - logits;
      const int64_t target = c.target.get_index(b);
      closer(b, target);
      for (size_t s = 0; s + 1 < cut.size(); ++s) {
        closer(b, std::max_element(logits + cut[s], logits + cut[s + 1]) - logits);
      }
      std::array<double, 5> squares{};
      std::vector<double> noisy(static_cast<size_t>(shape.V));
      for (int draw = 0; draw < kDraws; ++draw) {
        for (int64_t v = 0; v < shape.V; ++v) {
          noisy[static_cast<size_t>(v)] = logits[v] + deviation(b, v) * normal(random);
        }
        const double max = noisy[static_cast<size_t>(at_max)];
        const double of_target = noisy[static_cast<size_t>(target)];
        double sum = 0;
        for (const double logit : noisy) sum += std::exp(logit - max);
        const std::array<double, 5> errors = {
            max - expected.logits_max.value[at], sum / expected.sum_exp_logits.value[at] - 1,
            of_target - max - expected.predicted_logits.value[at],
            std::log(sum) + max - of_target - expected_loss.loss.value[at],
            std::log(sum) + max - expected_loss.logsumexp.value[at]};
        for (size_t i = 0; i < 5; ++i) squares[i] += errors[i] * errors[i] / kDraws;
      }
      const std::array<double, 5> deviations = {
          expected.logits_max.deviation[at], expected.sum_exp_logits.deviation[at],
          expected.predicted_logits.deviation[at], expected_loss.loss.deviation[at],
          expected_loss.logsumexp.deviation[at]};
      for (size_t i = 0; i < 5; ++i) {
        if (deviations[i] > 0) ratios[i].push_back(std::sqrt(squares[i]) / deviations[i]);
      }
    }
    for (size_t i = 0; i < 5; ++i) {
      std::ranges::sort(ratios[i]);
      // 300 draws know a deviation to 4 %.
      EXPECT_LT(ratios[i].back(), 1.2) << "output " << i << ", " << cut.size() - 1 << " shards";
      EXPECT_GT(ratios[i][ratios[i].size() / 2], 0.4)
          << "output " << i << ", " << cut.size() - 1 << " shards";
    }
  }
}

class ToleranceTest : public testing::TestWithParam<Arithmetic> {};
INSTANTIATE_TEST_SUITE_P(PerType, ToleranceTest, testing::ValuesIn(all_arithmetics()),
                         [](const auto& arithmetic) { return arithmetic.param.name; });

const Shape kShape{.BT = 61, .V = 509, .H = 96};

TEST_P(ToleranceTest, PlainFloatForwardIsWithin) {
  for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                            InputKind::offset, InputKind::negative}) {
      ForwardCase c = make_forward_case(kShape, GetParam(), {.kind = kind});
      c.rounding = rounding;
      expect_forward(c, plain_float(c));
    }
  }
}

TEST_P(ToleranceTest, PlainFloatGradientIsWithin) {
  for (const auto mode : {GradientMode::memory_saving, GradientMode::high_performance}) {
    for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
      for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                              InputKind::offset, InputKind::negative}) {
        ForwardCase forward = make_forward_case(kShape, GetParam(), {.kind = kind});
        forward.rounding = rounding;
        GradientCase c = make_gradient_case(
            std::move(forward), {.mode = mode, .grad_logsumexp = kind == InputKind::peaked});
        expect_gradient(c, plain_float(c));
        c.grad_input = {.dtype = DType::f32, .accumulate = true};
        c.grad_weight = {.dtype = DType::f32};
        expect_gradient(c, plain_float(c));
      }
    }
  }
}

// Two gradients that nearly cancel leave the roundings of both.
TEST_P(ToleranceTest, GradientsThatCancelAreWithin) {
  for (const auto mode : {GradientMode::memory_saving, GradientMode::high_performance}) {
    GradientCase c = make_gradient_case(make_forward_case(kShape, GetParam()),
                                        {.mode = mode, .grad_logsumexp = true});
    for (int64_t b = 0; b < kShape.BT; ++b) {
      c.grad_logsumexp->set(
          b, -c.grad.get(b) * (1.0 + std::ldexp(1.0, -6 - static_cast<int>(b % 16))));
    }
    c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
    expect_gradient(c, plain_float(c));
  }
}

// Of some assertions inside, at least one must fail.
template <typename F>
int failures_of(F&& judge) {
  testing::TestPartResultArray results;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    judge();
  }
  int failures = 0;
  for (int i = 0; i < results.size(); ++i) failures += results.GetTestPartResult(i).failed();
  return failures;
}

TEST_P(ToleranceTest, WrongForwardsAreBeyond) {
  const ForwardCase c = make_forward_case(kShape, GetParam());
  for (const auto mutation : {Mutation::drop_k_pair, Mutation::drop_last_column,
                              Mutation::drop_last_token, Mutation::inexact_max}) {
    EXPECT_GT(failures_of([&] { expect_forward(c, plain_float(c, mutation)); }), 0)
        << static_cast<int>(mutation);
  }
}

TEST_P(ToleranceTest, WrongGradientsAreBeyond) {
  const GradientCase c = make_gradient_case(make_forward_case(kShape, GetParam()));
  for (const auto mutation : {Mutation::drop_k_pair, Mutation::drop_last_column,
                              Mutation::drop_last_token, Mutation::one_after_scaling}) {
    EXPECT_GT(failures_of([&] { expect_gradient(c, plain_float(c, mutation)); }), 0)
        << static_cast<int>(mutation);
  }
}

}  // namespace
}  // namespace logitless::test
