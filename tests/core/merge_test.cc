// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "logitless/loss.h"
#include "reference/tolerance.h"
#include "tests/support/cases.h"
#include "tests/support/isa_test.h"
#include "tests/support/judge.h"

namespace logitless::test {
namespace {

class Merge : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Merge);

struct Shards {
  std::vector<ForwardCase> cases;
  std::vector<ForwardResult> results;
};

// The vocabulary of one case cut before each of `cuts`; neighbours may be equal (an empty shard).
Shards run_shards(const ForwardCase& whole, std::vector<int64_t> cuts, const PlanOptions& options,
                  MaskLayout layout) {
  Shards shards;
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(whole.shape.V);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t first = cuts[i], n = cuts[i + 1] - cuts[i];
    ForwardCase c;
    c.shape = {.BT = whole.shape.BT, .V = n, .H = whole.shape.H};
    c.arithmetic = whole.arithmetic;
    c.target_type = whole.target_type;
    c.rounding = whole.rounding;
    c.mask_layout = layout;
    c.vocab_start = whole.vocab_start + first;
    c.input = TestTensor::matrix(c.arithmetic.operand, c.shape.BT, c.shape.H);
    c.weight = TestTensor::matrix(c.arithmetic.operand, n, c.shape.H);
    c.target = TestTensor::vector(c.target_type, c.shape.BT);
    for (int64_t b = 0; b < c.shape.BT; ++b) {
      c.target.set_index(b, whole.target.get_index(b));
      for (int64_t h = 0; h < c.shape.H; ++h) c.input.set(b, h, whole.input.get(b, h));
    }
    for (int64_t v = 0; v < n; ++v) {
      for (int64_t h = 0; h < c.shape.H; ++h) c.weight.set(v, h, whole.weight.get(first + v, h));
    }
    shards.results.push_back(run_forward(c, options));
    shards.cases.push_back(std::move(c));
  }
  return shards;
}

std::vector<ShardStatistics> views_of(const Shards& shards) {
  std::vector<ShardStatistics> views;
  for (size_t i = 0; i < shards.cases.size(); ++i) {
    const ForwardResult& r = shards.results[i];
    views.push_back({.logits_max = r.logits_max.vector_view(),
                     .sum_exp_logits = r.sum_exp_logits.vector_view(),
                     .predicted_logits = r.predicted_logits.vector_view(),
                     .target_mask = r.target_mask->mask_view(shards.cases[i].mask_layout,
                                                             shards.cases[i].shape.BT)});
  }
  return views;
}

// The merge as a forward result: mask and maximum, sum, predicted.
ForwardResult run_merge(std::span<const ShardStatistics> shards, int64_t BT,
                        const PlanOptions& options, MaskLayout layout, int64_t stride = 1) {
  ForwardResult r;
  r.logits_max = TestTensor::vector(DType::f32, BT, stride);
  r.sum_exp_logits = TestTensor::vector(DType::f32, BT, stride);
  r.predicted_logits = TestTensor::vector(DType::f32, BT, stride);
  r.target_mask = TestTensor::vector(
      DType::u8, layout == MaskLayout::packed_lsb_first ? (BT + 7) / 8 : BT, stride);
  const auto plan = plan_merge(BT, static_cast<int64_t>(shards.size()), options);
  if (!plan) {
    ADD_FAILURE() << plan.error().message;
    return r;
  }
  EXPECT_EQ(plan->workspace_bytes(), 0);
  const auto ran = run(*plan, shards,
                       {.logits_max = r.logits_max.vector_view(),
                        .sum_exp_logits = r.sum_exp_logits.vector_view(),
                        .predicted_logits = r.predicted_logits.vector_view(),
                        .target_mask = r.target_mask->mask_view(layout, BT)});
  EXPECT_TRUE(ran) << (ran ? "" : ran.error().message);
  EXPECT_EQ(r.damage(), "");
  return r;
}

void expect_statistics(const ForwardResult& got, const reference::Statistics& want,
                       MaskLayout layout) {
  const auto n = static_cast<int64_t>(want.tokens.size());
  Judge max("merged logits_max"), sum("merged sum_exp_logits"), predicted("merged predicted");
  for (int64_t b = 0; b < n; ++b) {
    const auto i = static_cast<size_t>(b);
    const auto samples = static_cast<double>(n);
    max.check(got.logits_max.get(b), want.logits_max.value[i],
              reference::allowed_logits_max(want.logits_max.value[i], want.logits_max.deviation[i],
                                            want.logits_max.flip[i], samples),
              b);
    sum.check(got.sum_exp_logits.get(b), want.sum_exp_logits.value[i],
              reference::allowed_sum_exp_logits(want.sum_exp_logits.value[i],
                                                want.sum_exp_logits.deviation[i],
                                                want.sum_exp_logits.flip[i], samples),
              b);
    predicted.check(got.predicted_logits.get(b), want.predicted_logits.value[i],
                    reference::allowed_predicted_logits(want.predicted_logits.value[i],
                                                        want.predicted_logits.deviation[i],
                                                        want.predicted_logits.flip[i], samples),
                    b);
    const int64_t bits =
        got.target_mask->get_index(layout == MaskLayout::packed_lsb_first ? b / 8 : b);
    const bool masked = layout == MaskLayout::packed_lsb_first ? (bits >> (b % 8)) & 1 : bits != 0;
    EXPECT_EQ(masked, want.target_mask[i] != 0) << b;
  }
}

TEST_P(Merge, ShardsEqualTheWhole) {
  const Shape shape{.BT = 41, .V = 507, .H = 32};
  const std::vector<std::vector<int64_t>> covers = {
      {}, {200}, {169, 338}, {0, 0, 507}, {1, 2, 130, 131, 400, 506}, {253, 253}};
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
      ForwardCase whole =
          make_forward_case(shape, arithmetic, {.vocab_start = 77, .outside = 0.15});
      whole.rounding = rounding;
      const reference::Statistics want = reference_forward(whole);
      for (const auto& cuts : covers) {
        for (const auto layout : {MaskLayout::packed_lsb_first, MaskLayout::byte_per_token}) {
          const Shards shards = run_shards(whole, cuts, options(), layout);
          std::vector<reference::Statistics> parts;
          for (const ForwardCase& c : shards.cases) parts.push_back(reference_forward(c));
          const reference::Statistics merged = reference::merge(parts);
          // The definition agrees with itself to double precision...
          for (size_t i = 0; i < want.tokens.size(); ++i) {
            EXPECT_EQ(merged.logits_max.value[i], want.logits_max.value[i]);
            EXPECT_NEAR(merged.sum_exp_logits.value[i], want.sum_exp_logits.value[i], 1e-11);
            EXPECT_NEAR(merged.predicted_logits.value[i], want.predicted_logits.value[i], 1e-11);
            EXPECT_EQ(merged.target_mask[i], want.target_mask[i]);
          }
          // ... and the library with it.
          expect_statistics(run_merge(views_of(shards), shape.BT, options(), layout, 2), merged,
                            layout);
        }
      }
    }
  }
}

TEST_P(Merge, MinusInfinityIsNeverSubtractedFromItself) {
  const int64_t BT = 6;
  // Shards per column; token by token: all -inf; first -inf; last -inf; NaN in one; none owns.
  struct Part {
    std::vector<float> max, sum, predicted;
    std::vector<uint8_t> mask;
  };
  const float inf = INFINITY;
  std::vector<Part> parts = {
      {{-inf, -inf, 2, 1, 3, -inf}, {0, 0, 5, 1, 2, 0}, {0, 0, -1, 0, 0, 0}, {1, 1, 0, 1, 1, 0}},
      {{-inf, 4, -inf, NAN, 1, 2}, {0, 3, 0, NAN, 4, 1}, {0, -2, 0, 0, 0, 0}, {0, 0, 1, 0, 1, 1}}};
  std::vector<ShardStatistics> views;
  for (Part& p : parts) {
    views.push_back({vector_view<float>(std::span<const float>(p.max)),
                     vector_view<float>(std::span<const float>(p.sum)),
                     vector_view<float>(std::span<const float>(p.predicted)),
                     ConstMaskView(p.mask.data(), BT, MaskLayout::byte_per_token)});
  }
  const ForwardResult r = run_merge(views, BT, options(), MaskLayout::byte_per_token);
  const auto expect = [&](int64_t b, double max, double sum, double predicted, bool masked) {
    EXPECT_EQ(r.logits_max.get(b), max) << b;
    EXPECT_NEAR(r.sum_exp_logits.get(b), sum, 1e-6) << b;
    EXPECT_EQ(r.predicted_logits.get(b), predicted) << b;
    EXPECT_EQ(r.target_mask->get_index(b) != 0, masked) << b;
  };
  expect(0, -inf, 0, 0, false);
  expect(1, 4, 3, -2, false);
  expect(2, 2, 5, -1, false);
  EXPECT_TRUE(std::isnan(r.logits_max.get(3)));
  EXPECT_TRUE(std::isnan(r.sum_exp_logits.get(3)));
  expect(4, 3, 2 + 4 * std::exp(-2.0), 0, true);
  // The owner saw nothing but -inf: its target's logit is -inf.
  expect(5, 2, 1, -inf, false);
}

// A zero of an owner (its target is its maximum) is not the zero of a shard without the target.
TEST_P(Merge, TheOwnersZeroIsRebased) {
  const std::vector<float> max0{1}, sum0{2}, zero{0}, max1{3}, sum1{1};
  const std::vector<uint8_t> owns{0}, none{1};
  const auto shard = [](const std::vector<float>& max, const std::vector<float>& sum,
                        const std::vector<float>& predicted, const std::vector<uint8_t>& mask) {
    return ShardStatistics{vector_view<float>(std::span<const float>(max)),
                           vector_view<float>(std::span<const float>(sum)),
                           vector_view<float>(std::span<const float>(predicted)),
                           ConstMaskView(mask.data(), 1)};
  };
  const std::vector<ShardStatistics> first = {shard(max0, sum0, zero, owns),
                                              shard(max1, sum1, zero, none)};
  EXPECT_EQ(run_merge(first, 1, options(), MaskLayout::packed_lsb_first).predicted_logits.get(0),
            -2.0);
  const std::vector<ShardStatistics> second = {shard(max0, sum0, zero, none),
                                               shard(max1, sum1, zero, owns)};
  EXPECT_EQ(run_merge(second, 1, options(), MaskLayout::packed_lsb_first).predicted_logits.get(0),
            0.0);
}

TEST_P(Merge, AnOutputMayBeAnInput) {
  const ForwardCase whole = make_forward_case({.BT = 33, .V = 300, .H = 16}, all_arithmetics()[1]);
  Shards shards = run_shards(whole, {100, 200}, options(), MaskLayout::packed_lsb_first);
  const ForwardResult want =
      run_merge(views_of(shards), 33, options(), MaskLayout::packed_lsb_first);
  const auto plan = plan_merge(33, 3, options());
  ASSERT_TRUE(plan);
  const std::vector<ShardStatistics> views = views_of(shards);
  ForwardResult& in_place = shards.results[1];
  const auto ran =
      run(*plan, views,
          {.logits_max = in_place.logits_max.vector_view(),
           .sum_exp_logits = in_place.sum_exp_logits.vector_view(),
           .predicted_logits = in_place.predicted_logits.vector_view(),
           .target_mask = in_place.target_mask->mask_view(MaskLayout::packed_lsb_first, 33)});
  ASSERT_TRUE(ran);
  EXPECT_EQ(in_place.logits_max.all_bits(), want.logits_max.all_bits());
  EXPECT_EQ(in_place.sum_exp_logits.all_bits(), want.sum_exp_logits.all_bits());
  EXPECT_EQ(in_place.predicted_logits.all_bits(), want.predicted_logits.all_bits());
  EXPECT_EQ(in_place.target_mask->all_bits(), want.target_mask->all_bits());
}

TEST_P(Merge, OneShardIsCopied) {
  const ForwardCase whole = make_forward_case({.BT = 9, .V = 60, .H = 16}, all_arithmetics()[1]);
  const Shards one = run_shards(whole, {}, options(), MaskLayout::packed_lsb_first);
  const ForwardResult merged = run_merge(views_of(one), 9, options(), MaskLayout::packed_lsb_first);
  EXPECT_EQ(merged.logits_max.all_bits(), one.results[0].logits_max.all_bits());
  EXPECT_EQ(merged.sum_exp_logits.all_bits(), one.results[0].sum_exp_logits.all_bits());
  EXPECT_EQ(merged.predicted_logits.all_bits(), one.results[0].predicted_logits.all_bits());
}

TEST_P(Merge, ManyTokensOnAnyNumberOfThreadsGiveTheSameBits) {
  const int64_t BT = 30011;
  std::vector<std::vector<float>> columns;
  std::vector<std::vector<uint8_t>> masks;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 9; ++i) {
    columns.emplace_back(BT);
    for (float& x : columns.back()) x = i % 3 == 1 ? 1 + std::abs(normal(random)) : normal(random);
  }
  for (int i = 0; i < 3; ++i) {
    masks.emplace_back((BT + 7) / 8);
    for (uint8_t& byte : masks.back()) byte = static_cast<uint8_t>(random());
  }
  std::vector<ShardStatistics> views;
  for (size_t i = 0; i < 3; ++i) {
    views.push_back({vector_view<float>(std::span<const float>(columns[3 * i])),
                     vector_view<float>(std::span<const float>(columns[3 * i + 1])),
                     vector_view<float>(std::span<const float>(columns[3 * i + 2])),
                     ConstMaskView(masks[i].data(), BT)});
  }
  const auto want = run_merge(views, BT, options(1), MaskLayout::packed_lsb_first).bits();
  for (const int threads : {2, 3, 5}) {
    EXPECT_EQ(run_merge(views, BT, options(threads), MaskLayout::packed_lsb_first).bits(), want);
  }
}

}  // namespace
}  // namespace logitless::test
