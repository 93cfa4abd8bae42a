// SPDX-License-Identifier: Apache-2.0
// aclnnFusedCrossEntropyLossWithMaxSum: what the outputs hold.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support.h"

namespace ascend_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Statistics of no particular softmax: the operator computes with whatever it is given.
Loss make_loss(std::int64_t tokens, std::int64_t vocab, aclDataType logits_type) {
  Loss loss;
  loss.logits_max = Array(ACL_FLOAT, {tokens});
  loss.sum_exp = Array(ACL_FLOAT, {tokens});
  loss.predicted = Array(ACL_FLOAT, {tokens});
  Random random(static_cast<std::uint64_t>(tokens * 1000 + vocab));
  for (std::int64_t b = 0; b < tokens; ++b) {
    loss.logits_max.set(b, 10 * random.uniform() - 2);
    loss.sum_exp.set(b, 1 + 5000 * random.uniform());
    loss.predicted.set(b, -20 * random.uniform());
  }
  if (logits_type != ACL_DT_UNDEFINED) {
    loss.logits = Array(logits_type, {tokens, vocab});
    for (std::int64_t i = 0; i < tokens * vocab; ++i) loss.logits.set(i, 8 - 30 * random.uniform());
  }
  return loss;
}

void expect_loss(const Loss& loss) {
  const double ulp = std::ldexp(1.0, -23);
  for (std::int64_t b = 0; b < loss.loss.count(); ++b) {
    const double log_sum = std::log(loss.sum_exp.get(b));
    const double expected = log_sum - loss.predicted.get(b);
    // A logarithm within 2 ulp, and one rounding of the difference.
    EXPECT_NEAR(loss.loss.get(b), expected,
                2 * ulp * std::fabs(log_sum) + ulp * std::fabs(expected))
        << "token " << b;
  }
  if (loss.logits.tensor() == nullptr) return;
  const std::int64_t vocab = loss.logits.dim(1);
  for (std::int64_t i = 0; i < loss.softmax.count(); ++i) {
    const std::int64_t b = i / vocab;
    const double x = loss.logits.get(i) - loss.logits_max.get(b);
    const double expected = std::exp(x) / loss.sum_exp.get(b);
    if (expected == 0) {
      EXPECT_EQ(loss.softmax.get(i), 0) << "element " << i;
      continue;
    }
    // exp within 2 ulp, its argument rounded once, reciprocal, product.
    EXPECT_NEAR(loss.softmax.get(i), expected, expected * ulp * (5 + std::fabs(x)) + 1e-44)
        << "element " << i;
  }
}

TEST(Loss, AloneMatchesFloat64) {
  for (std::int64_t tokens : {1, 7, 8, 9, 1000}) {
    Loss loss = make_loss(tokens, 0, ACL_DT_UNDEFINED);
    loss.make_outputs();
    ASSERT_EQ(loss.run(), 0) << take_message();
    expect_loss(loss);
  }
}

TEST(Loss, WithSoftmaxMatchesFloat64) {
  for (aclDataType type : {ACL_FLOAT, ACL_FLOAT16, ACL_BF16}) {
    for (std::int64_t vocab : {1, 15, 16, 17, 127, 257, 1000}) {
      SCOPED_TRACE(testing::Message() << "type " << type << " V " << vocab);
      Loss loss = make_loss(9, vocab, type);
      loss.make_outputs();
      for (Array* array : {&loss.logits_max, &loss.sum_exp, &loss.predicted, &loss.logits}) {
        array->set_read_only(true);
      }
      ASSERT_EQ(loss.run(), 0) << take_message();
      expect_loss(loss);
    }
  }
}

class LossLayouts : public testing::TestWithParam<Layout> {};

TEST_P(LossLayouts, EveryTensorMayHaveAnyLayout) {
  for (aclDataType type : {ACL_FLOAT, ACL_FLOAT16, ACL_BF16}) {
    const Loss plain = make_loss(11, 70, type);
    Loss loss = make_loss(11, 70, type);
    const auto relayout = [&](Array& array, const Array& like) {
      array = Array(like.dtype(), like.shape(), GetParam());
      array.assign(like);
      array.set_read_only(true);
    };
    relayout(loss.logits_max, plain.logits_max);
    relayout(loss.sum_exp, plain.sum_exp);
    relayout(loss.predicted, plain.predicted);
    relayout(loss.logits, plain.logits);
    loss.make_outputs(GetParam());
    ASSERT_EQ(loss.run(), 0) << take_message();
    expect_loss(loss);
    EXPECT_TRUE(loss.loss.gaps_untouched());
    EXPECT_TRUE(loss.softmax.gaps_untouched());
  }
}

INSTANTIATE_TEST_SUITE_P(All, LossLayouts,
                         testing::Values(Layout::kFlat, Layout::kRowGap, Layout::kGapped,
                                         Layout::kTransposed),
                         [](const auto& layout) { return layout_name(layout.param); });

TEST(Loss, ZeroStridesBroadcastInputs) {
  Loss loss = make_loss(6, 20, ACL_BF16);
  loss.logits_max = Array(ACL_FLOAT, {6}, Layout::kBroadcast);
  loss.sum_exp = Array(ACL_FLOAT, {6}, Layout::kBroadcast);
  loss.predicted = Array(ACL_FLOAT, {6}, Layout::kBroadcast);
  loss.logits = Array(ACL_BF16, {6, 20}, Layout::kBroadcast);
  loss.logits_max.fill(1.5);
  loss.sum_exp.fill(7);
  loss.predicted.fill(-2);
  for (std::int64_t v = 0; v < 20; ++v) loss.logits.set(v, -0.25 * static_cast<double>(v));
  loss.make_outputs();
  ASSERT_EQ(loss.run(), 0) << take_message();
  expect_loss(loss);
}

TEST(Loss, PublishedExample) {
  Loss loss;
  loss.logits_max = Array(ACL_FLOAT, {2});
  loss.sum_exp = Array(ACL_FLOAT, {2});
  loss.predicted = Array(ACL_FLOAT, {2});
  loss.logits = Array(ACL_FLOAT, {2, 2});
  for (Array* array : {&loss.logits_max, &loss.sum_exp, &loss.predicted}) array->assign({0.5, 1});
  loss.logits.assign({1, 0.5, 0.5, 1});
  loss.make_outputs();
  ASSERT_EQ(loss.run(), 0) << take_message();
  const double expected_loss[] = {-1.193147, -1.0};
  const double expected_softmax[] = {3.297443, 2.0, 0.606531, 1.0};
  for (int b = 0; b < 2; ++b) EXPECT_NEAR(loss.loss.get(b), expected_loss[b], 1e-6);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(loss.softmax.get(i), expected_softmax[i], 1e-6);
}

TEST(Loss, SumsThatAreNotPositiveFollowIeee) {
  Loss loss = make_loss(4, 0, ACL_DT_UNDEFINED);
  loss.logits_max.assign({1, 1, 1, 1});
  loss.sum_exp.assign({0, -1, std::numeric_limits<double>::quiet_NaN(), kInfinity});
  loss.predicted.assign({0, 0, 0, 0});
  loss.make_outputs();
  ASSERT_EQ(loss.run(), 0);
  EXPECT_EQ(loss.loss.get(0), -kInfinity);
  EXPECT_TRUE(std::isnan(loss.loss.get(1)));
  EXPECT_TRUE(std::isnan(loss.loss.get(2)));
  EXPECT_EQ(loss.loss.get(3), kInfinity);
}

TEST(Loss, IsNaNWhereTheMaximumIsMinusInfinityAndInfiniteWhereOnlyTheTargetIs) {
  Loss loss = make_loss(3, 0, ACL_DT_UNDEFINED);
  loss.logits_max.assign({-kInfinity, 2, 2});
  loss.sum_exp.assign({0, 3, 3});
  loss.predicted.assign({0, -kInfinity, -1});
  loss.make_outputs();
  ASSERT_EQ(loss.run(), 0);
  EXPECT_TRUE(std::isnan(loss.loss.get(0)));
  EXPECT_EQ(loss.loss.get(1), kInfinity);
  EXPECT_TRUE(std::isfinite(loss.loss.get(2)));
}

TEST(Loss, LogitsOfMinusInfinityHaveProbabilityZero) {
  Loss loss = make_loss(2, 5, ACL_BF16);
  loss.logits.set(3, -kInfinity);
  loss.make_outputs();
  ASSERT_EQ(loss.run(), 0);
  EXPECT_EQ(loss.softmax.get(3), 0);
  expect_loss(loss);
}

TEST(Loss, EmptyVocabularyStillWritesTheLoss) {
  Loss loss = make_loss(5, 0, ACL_FLOAT);
  loss.make_outputs();
  ASSERT_EQ(loss.run(), 0) << take_message();
  expect_loss(loss);
}

TEST(Loss, AddressesOfEmptyOperandsAreNotUsed) {
  for (std::int64_t tokens : {0, 5}) {
    Loss loss = make_loss(tokens, tokens == 0 ? 12 : 0, ACL_BF16);
    loss.make_outputs();
    for (std::uintptr_t address : {std::uintptr_t{0}, std::uintptr_t{17}}) {
      for (Array* array : {&loss.logits_max, &loss.sum_exp, &loss.predicted, &loss.loss,
                           &loss.logits, &loss.softmax}) {
        if (array->count() > 0) continue;
        ASSERT_EQ(aclSetRawTensorAddr(array->tensor(), reinterpret_cast<void*>(address)), 0);
      }
      EXPECT_EQ(loss.run(), 0) << take_message();
    }
    expect_loss(loss);
  }
}

TEST(Loss, NoTokensSucceedsAndWritesNothing) {
  for (aclDataType type : {ACL_DT_UNDEFINED, ACL_BF16}) {
    Loss loss = make_loss(0, 12, type);
    loss.make_outputs();
    EXPECT_EQ(loss.run(), 0) << take_message();
  }
}

TEST(Loss, SoftmaxWithoutLogitsIsLeftAlone) {
  Loss loss = make_loss(5, 0, ACL_DT_UNDEFINED);
  loss.make_outputs();
  loss.softmax = Array(ACL_FLOAT, {5, 4});
  ASSERT_EQ(loss.run(), 0);
  EXPECT_TRUE(loss.softmax.untouched());
  expect_loss(loss);
}

TEST(Loss, InputAndWeightMayBeAnythingAndAreNotTouched) {
  Loss loss = make_loss(5, 0, ACL_DT_UNDEFINED);
  loss.make_outputs();
  const Array input(ACL_FLOAT, {2}), weight(ACL_INT8, {3, 3});
  const aclError status = run(
      [&](std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
            loss.logits_max.tensor(), loss.sum_exp.tensor(), loss.predicted.tensor(), 0,
            input.tensor(), weight.tensor(), nullptr, loss.loss.tensor(), nullptr, size, executor);
      },
      aclnnFusedCrossEntropyLossWithMaxSum);
  ASSERT_EQ(status, 0) << take_message();
  expect_loss(loss);
  EXPECT_TRUE(input.untouched());
  EXPECT_TRUE(weight.untouched());
}

}  // namespace
}  // namespace ascend_test
