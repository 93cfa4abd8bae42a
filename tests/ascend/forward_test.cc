// SPDX-License-Identifier: Apache-2.0
// aclnnFusedLinearOnlineMaxSum: what the outputs hold.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "support.h"

namespace ascend_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A call on exact numbers with random targets of which some lie outside [start, start + vocab).
Forward make_forward(aclDataType dtype, aclDataType index, std::int64_t tokens, std::int64_t vocab,
                     std::int64_t hidden, std::int64_t start, std::uint64_t seed = 1) {
  Forward f;
  f.input = Array(dtype, {tokens, hidden});
  f.weight = Array(dtype, {vocab, hidden});
  f.target = Array(index, {tokens});
  fill_exact(f.input, seed);
  fill_exact(f.weight, seed + 1);
  Random random(seed + 2);
  for (std::int64_t b = 0; b < tokens; ++b) {
    f.target.set_int(b, random.integer(start - vocab / 4 - 1, start + vocab + vocab / 4));
  }
  f.start = start;
  f.end = start + vocab;
  return f;
}

class ForwardTypes : public testing::TestWithParam<std::tuple<aclDataType, aclDataType>> {};

TEST_P(ForwardTypes, StatisticsMatchFloat64AtSizesAroundTiles) {
  const auto [dtype, index] = GetParam();
  for (std::int64_t tokens : {1, 7, 8, 9, 33}) {
    for (std::int64_t vocab : {1, 31, 32, 33, 127, 129, 507}) {
      for (std::int64_t hidden : {1, 2, 17, 64}) {
        SCOPED_TRACE(testing::Message() << "BT " << tokens << " V " << vocab << " H " << hidden);
        Forward f = make_forward(dtype, index, tokens, vocab, hidden, 40);
        f.make_outputs(tokens % 2 == 1);
        ASSERT_EQ(f.run(), 0) << take_message();
        expect_forward(f);
      }
    }
  }
}

TEST_P(ForwardTypes, StatisticsDoNotDependOnWhetherLogitsAreAskedFor) {
  const auto [dtype, index] = GetParam();
  Forward with = make_forward(dtype, index, 21, 300, 70, 0);
  Forward without = make_forward(dtype, index, 21, 300, 70, 0);
  with.make_outputs(true);
  without.make_outputs(false);
  ASSERT_EQ(with.run(), 0);
  ASSERT_EQ(without.run(), 0);
  for (std::int64_t b = 0; b < 21; ++b) {
    EXPECT_EQ(with.logits_max.bits(b), without.logits_max.bits(b));
    EXPECT_EQ(with.sum_exp.bits(b), without.sum_exp.bits(b));
    EXPECT_EQ(with.predicted.bits(b), without.predicted.bits(b));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardTypes,
                         testing::Combine(testing::Values(ACL_FLOAT16, ACL_BF16),
                                          testing::Values(ACL_INT32, ACL_INT64)),
                         [](const auto& types) {
                           return std::string(std::get<0>(types.param) == ACL_BF16 ? "BFloat16"
                                                                                   : "Float16") +
                                  (std::get<1>(types.param) == ACL_INT64 ? "Int64" : "Int32");
                         });

TEST(Forward, InputsAreOnlyRead) {
  Forward f = make_forward(ACL_BF16, ACL_INT64, 20, 260, 40, 0);
  f.make_outputs(true);
  for (Array* array : {&f.input, &f.weight, &f.target}) array->set_read_only(true);
  ASSERT_EQ(f.run(), 0) << take_message();
  expect_forward(f);
}

// One row of the layout table: each operand and output in turn in each layout, everything else
// contiguous.
class ForwardLayouts : public testing::TestWithParam<Layout> {};

TEST_P(ForwardLayouts, InputsInAnyLayoutGiveTheSameBits) {
  for (aclDataType dtype : {ACL_FLOAT16, ACL_BF16}) {
    Forward plain = make_forward(dtype, ACL_INT64, 19, 133, 37, 20);
    plain.make_outputs(true);
    ASSERT_EQ(plain.run(), 0);
    for (int which = 0; which < 4; ++which) {
      SCOPED_TRACE(testing::Message() << "input " << which);
      Forward f = make_forward(dtype, ACL_INT64, 19, 133, 37, 20);
      const auto relayout = [&](Array& array, const Array& like) {
        array = Array(like.dtype(), like.shape(), GetParam());
        array.assign(like);
        array.set_read_only(true);
      };
      if (which == 0 || which == 3) relayout(f.input, plain.input);
      if (which == 1 || which == 3) relayout(f.weight, plain.weight);
      if (which == 2 || which == 3) relayout(f.target, plain.target);
      f.make_outputs(true);
      ASSERT_EQ(f.run(), 0) << take_message();
      expect_forward(f);
      for (std::int64_t b = 0; b < 19; ++b) {
        EXPECT_EQ(f.sum_exp.bits(b), plain.sum_exp.bits(b));
      }
    }
  }
}

TEST_P(ForwardLayouts, OutputsInAnyLayoutLeaveTheirGapsAlone) {
  for (aclDataType index : {ACL_INT32, ACL_INT64}) {
    Forward f = make_forward(ACL_FLOAT16, index, 21, 133, 37, 20);
    f.make_outputs(true, GetParam());
    ASSERT_EQ(f.run(), 0) << take_message();
    expect_forward(f);
    for (const Array* array :
         {&f.logits_max, &f.sum_exp, &f.predicted, &f.mask, &f.masked_target, &f.logits}) {
      EXPECT_TRUE(array->gaps_untouched());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardLayouts,
                         testing::Values(Layout::kContiguous, Layout::kFlat, Layout::kRowGap,
                                         Layout::kGapped, Layout::kTransposed),
                         [](const auto& layout) { return layout_name(layout.param); });

TEST(Forward, ZeroStridesBroadcastInputs) {
  for (int which = 0; which < 3; ++which) {
    SCOPED_TRACE(which);
    Forward f = make_forward(ACL_BF16, ACL_INT32, 11, 140, 24, 0);
    if (which == 0) f.input = Array(ACL_BF16, {11, 24}, Layout::kBroadcast);
    if (which == 1) f.weight = Array(ACL_BF16, {140, 24}, Layout::kBroadcast);
    if (which == 2) f.target = Array(ACL_INT32, {11}, Layout::kBroadcast);
    if (which == 0) fill_exact(f.input, 5);
    if (which == 1) fill_exact(f.weight, 6);
    if (which == 2) f.target.set_int(0, 3);
    f.make_outputs(true);
    ASSERT_EQ(f.run(), 0) << take_message();
    expect_forward(f);
  }
}

TEST(Forward, PaddingBitsAreWrittenAsIfTheTargetWereZero) {
  struct Case {
    std::int64_t start, end;
    std::int64_t byte;  // targets 10, 25, 12
  };
  for (const Case& c : {Case{10, 20, 0b11111010}, Case{0, 20, 0b00000010}, Case{0, 0, 0b11111111},
                        Case{11, 26, 0b11111001}, Case{0, 100, 0}, Case{26, 26, 0b11111111}}) {
    SCOPED_TRACE(testing::Message() << c.start << " to " << c.end);
    Forward f = make_forward(ACL_FLOAT16, ACL_INT32, 3, 130, 8, 0);
    f.target.assign({10, 25, 12});
    f.start = c.start;
    f.end = c.end;
    f.make_outputs(false);
    ASSERT_EQ(f.run(), 0) << take_message();
    EXPECT_EQ(f.mask.get_int(0) & 0xFF, c.byte);
    expect_forward(f);
  }
}

TEST(Forward, LastIdOfTheRangeIsInsideAndTheEndIsOutside) {
  Forward f = make_forward(ACL_BF16, ACL_INT32, 4, 16, 8, 0);
  f.start = 100;
  f.end = 116;
  f.target.assign({99, 100, 115, 116});
  f.make_outputs(false);
  ASSERT_EQ(f.run(), 0);
  EXPECT_TRUE(f.is_masked(0));
  EXPECT_FALSE(f.is_masked(1));
  EXPECT_FALSE(f.is_masked(2));
  EXPECT_TRUE(f.is_masked(3));
  expect_forward(f);
}

TEST(Forward, TargetsAbove2To24AreExact) {
  const std::int64_t base = 1 << 24;
  for (aclDataType index : {ACL_INT32, ACL_INT64}) {
    Forward f = make_forward(ACL_FLOAT16, index, 4, 8, 8, 0);
    f.start = base;
    f.end = base + 3;
    const std::int64_t targets[] = {base - 1, base + 1, base + 2, base + 3};
    for (int b = 0; b < 4; ++b) f.target.set_int(b, targets[b]);
    f.make_outputs(false);
    ASSERT_EQ(f.run(), 0);
    expect_forward(f);
    EXPECT_EQ(f.masked_target.get_int(1), 1);
    EXPECT_EQ(f.masked_target.get_int(2), 2);
    EXPECT_TRUE(f.is_masked(0));
    EXPECT_TRUE(f.is_masked(3));
  }
}

TEST(Forward, TargetsBeyond2To31And2To53AreExact) {
  for (std::int64_t base : {std::int64_t{1} << 31, (std::int64_t{1} << 32) + 5,
                            (std::int64_t{1} << 53) + 1, (std::int64_t{1} << 62) + 1}) {
    Forward f = make_forward(ACL_FLOAT16, ACL_INT64, 5, 8, 8, 0);
    f.start = base;
    f.end = base + 8;
    const std::int64_t targets[] = {base - 1, base, base + 7, base + 8, (base + 1) & 0xFFFFFFFF};
    for (int b = 0; b < 5; ++b) f.target.set_int(b, targets[b]);
    f.make_outputs(false);
    ASSERT_EQ(f.run(), 0);
    expect_forward(f);
    EXPECT_EQ(f.masked_target.get_int(2), 7);
    EXPECT_EQ(f.is_masked(4), base >> 32 != 0) << "an id must not be cut to 32 bits";
  }
}

TEST(Forward, Int32TargetsBesideAShardBeyondTheirRangeAreOutside) {
  Forward f = make_forward(ACL_FLOAT16, ACL_INT32, 9, 8, 8, 0);
  f.start = (std::int64_t{1} << 32) + 1;  // cut to 32 bits it would be 1
  f.end = f.start + 8;
  f.target.fill(3);
  f.make_outputs(false);
  ASSERT_EQ(f.run(), 0);
  expect_forward(f);
  for (int b = 0; b < 9; ++b) EXPECT_TRUE(f.is_masked(b));
}

TEST(Forward, ExtremeTargetsAreJustOutside) {
  for (aclDataType index : {ACL_INT32, ACL_INT64}) {
    Forward f = make_forward(ACL_FLOAT16, index, 3, 8, 8, 0);
    f.start = 4;
    f.end = 12;
    f.target.set_int(0, index == ACL_INT32 ? std::numeric_limits<std::int32_t>::min()
                                           : std::numeric_limits<std::int64_t>::min());
    f.target.set_int(1, index == ACL_INT32 ? std::numeric_limits<std::int32_t>::max()
                                           : std::numeric_limits<std::int64_t>::max());
    f.target.set_int(2, -100);
    f.make_outputs(false);
    ASSERT_EQ(f.run(), 0);
    expect_forward(f);
    for (int b = 0; b < 3; ++b) EXPECT_TRUE(f.is_masked(b));
  }
}

TEST(Forward, TargetInTheRangeButBeyondTheShardPredictsMinusTheMaximum) {
  Forward f = make_forward(ACL_BF16, ACL_INT32, 3, 10, 8, 0);
  f.start = 5;
  f.end = 105;  // 100 ids claimed, 10 rows here
  f.target.assign({15, 104, 14});
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0) << take_message();
  expect_forward(f);
  EXPECT_EQ(f.masked_target.get_int(0), 10);
  EXPECT_EQ(f.masked_target.get_int(1), 99);
  EXPECT_EQ(f.predicted.get(0), 0 - f.logits_max.get(0));
  EXPECT_EQ(f.predicted.get(1), 0 - f.logits_max.get(1));
  EXPECT_FALSE(f.is_masked(0));
}

TEST(Forward, ARangeShorterThanTheShardStillCountsEveryRow) {
  Forward f = make_forward(ACL_FLOAT16, ACL_INT32, 5, 40, 8, 0);
  f.end = 2;
  f.make_outputs(false);
  ASSERT_EQ(f.run(), 0);
  expect_forward(f);
}

TEST(Forward, StatisticsComeFromLogitsRoundedToTheOperandType) {
  // One logit of 30 + 1/16, which bf16 rounds to 30 and fp16 keeps; the other is 0.
  for (aclDataType dtype : {ACL_BF16, ACL_FLOAT16}) {
    Forward f;
    f.input = Array(dtype, {1, 2});
    f.weight = Array(dtype, {2, 2});
    f.target = Array(ACL_INT32, {1});
    f.input.assign({1, 0.0625});
    f.weight.assign({30, 1, 0, 0});
    f.target.set_int(0, 1);
    f.end = 2;
    f.make_outputs(true);
    ASSERT_EQ(f.run(), 0);
    const double expected = dtype == ACL_BF16 ? 30.0 : 30.0625;
    EXPECT_EQ(f.logits_max.get(0), expected);
    EXPECT_EQ(f.predicted.get(0), -expected);
    EXPECT_EQ(f.logits.get(0), expected);
  }
}

TEST(Forward, RoundingOfLogitsIsToNearestEven) {
  // 256 + 1 and 256 + 3 are ties in bf16, whose steps there are 2.
  Forward f;
  f.input = Array(ACL_BF16, {1, 2});
  f.weight = Array(ACL_BF16, {2, 2});
  f.target = Array(ACL_INT32, {1});
  f.input.assign({1, 1});
  f.weight.assign({256, 1, 256, 3});
  f.target.set_int(0, 0);
  f.end = 2;
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0);
  EXPECT_EQ(f.logits.get(0), 256);
  EXPECT_EQ(f.logits.get(1), 260);
}

TEST(Forward, LogitsBeyondFloat16BecomeInfiniteAsTheirTypeSays) {
  Forward f;
  f.input = Array(ACL_FLOAT16, {2, 1});
  f.weight = Array(ACL_FLOAT16, {3, 1});
  f.target = Array(ACL_INT32, {2});
  f.input.assign({1000, -1000});
  f.weight.assign({-70, 1, 0});
  f.target.assign({1, 1});
  f.end = 3;
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0);
  EXPECT_EQ(f.logits.get(0), -kInfinity);
  EXPECT_EQ(f.logits.get(3), kInfinity);
  EXPECT_EQ(f.logits_max.get(0), 1000);
  EXPECT_NEAR(f.sum_exp.get(0), 1.0, 1e-6);
  EXPECT_EQ(f.logits_max.get(1), kInfinity);
}

TEST(Forward, LargeCommonOffsetDoesNotOverflow) {
  for (double offset : {10000.0, -10000.0}) {
    Forward f;
    f.input = Array(ACL_BF16, {2, 2});
    f.weight = Array(ACL_BF16, {200, 2});
    f.target = Array(ACL_INT32, {2});
    f.input.assign({offset, 1, offset, 2});
    Random random(3);
    for (std::int64_t v = 0; v < 200; ++v) {
      f.weight.set(2 * v, 1);
      f.weight.set(2 * v + 1, static_cast<double>(random.integer(-4, 4)) * 64);
    }
    f.target.assign({5, 199});
    f.end = 200;
    f.make_outputs(true);
    ASSERT_EQ(f.run(), 0);
    expect_forward(f);
  }
}

TEST(Forward, ARowOfMinusInfinityHasMaximumMinusInfinityAndSumZero) {
  Forward f = make_forward(ACL_BF16, ACL_INT32, 9, 140, 24, 0);
  for (std::int64_t v = 0; v < 140; ++v) f.weight.set(v * 24, -1);
  for (std::int64_t h = 0; h < 24; ++h) f.input.set(4 * 24 + h, h == 0 ? kInfinity : 0);
  f.target.fill(3);
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0) << take_message();
  EXPECT_EQ(f.logits_max.get(4), -kInfinity);
  EXPECT_EQ(f.sum_exp.get(4), 0);
  EXPECT_EQ(f.predicted.get(4), 0);
  EXPECT_FALSE(f.is_masked(4));
  const Statistics expected = reference_statistics(f);
  for (std::size_t b : {0u, 3u, 5u, 8u}) {
    EXPECT_EQ(f.logits_max.get(static_cast<std::int64_t>(b)), expected.logits_max[b]);
    EXPECT_NEAR(f.sum_exp.get(static_cast<std::int64_t>(b)), expected.sum_exp[b],
                expected.sum_exp[b] * 1e-5);
  }
}

TEST(Forward, OnlyTheTargetAtMinusInfinityPredictsMinusInfinity) {
  Forward f = make_forward(ACL_FLOAT16, ACL_INT32, 3, 40, 8, 0);
  for (std::int64_t b = 0; b < 3; ++b) f.input.set(b * 8, 1);
  f.weight.set(7 * 8, -kInfinity);
  f.target.assign({7, 8, 7});
  f.make_outputs(false);
  ASSERT_EQ(f.run(), 0);
  EXPECT_EQ(f.predicted.get(0), -kInfinity);
  EXPECT_TRUE(std::isfinite(f.predicted.get(1)));
  EXPECT_EQ(f.predicted.get(2), -kInfinity);
  EXPECT_TRUE(std::isfinite(f.sum_exp.get(0)));
}

TEST(Forward, ANaNLogitMakesMaximumAndSumOfItsRowNaNAndOfNoOther) {
  for (std::int64_t column : {0, 77, 139}) {
    Forward f = make_forward(ACL_BF16, ACL_INT32, 5, 140, 16, 0);
    // Row 2 meets 0 * -inf = NaN in one column only; the other rows meet -inf there.
    for (std::int64_t b = 0; b < 5; ++b) f.input.set(b * 16, b == 2 ? 0 : 1);
    f.weight.set(column * 16, -kInfinity);
    f.target.fill(5);
    f.make_outputs(false);
    ASSERT_EQ(f.run(), 0);
    for (std::int64_t b = 0; b < 5; ++b) {
      EXPECT_EQ(std::isnan(f.logits_max.get(b)), b == 2) << "column " << column;
      EXPECT_EQ(std::isnan(f.sum_exp.get(b)), b == 2) << "column " << column;
      if (b != 2) {
        EXPECT_TRUE(std::isfinite(f.predicted.get(b)));
      }
    }
  }
}

TEST(Forward, HiddenSizeZeroGivesLogitsOfZero) {
  Forward f = make_forward(ACL_FLOAT16, ACL_INT32, 10, 9, 0, 3);
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0) << take_message();
  expect_forward(f);
  for (std::int64_t b = 0; b < 10; ++b) {
    EXPECT_EQ(f.logits_max.get(b), 0);
    EXPECT_EQ(f.sum_exp.get(b), 9);
    EXPECT_EQ(f.predicted.get(b), 0);
  }
}

TEST(Forward, NoTokensAsksForNoWorkspaceAndDoesNothing) {
  Forward f = make_forward(ACL_FLOAT16, ACL_INT32, 0, 9, 16, 3);
  f.make_outputs(true);
  std::uint64_t size = 99;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(f.prepare(&size, &executor), 0);
  EXPECT_EQ(size, 0u);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, executor, nullptr), 0);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
}

TEST(Forward, NoTokensNeedsNoMemoryAtAll) {
  const std::int64_t none[] = {0, 16}, rows[] = {9, 16};
  const auto empty = [&](aclDataType type, std::uint64_t rank) {
    return aclCreateTensor(none, rank, type, nullptr, 0, ACL_FORMAT_ND, none, rank, nullptr);
  };
  aclTensor* input = empty(ACL_BF16, 2);
  aclTensor* weight =
      aclCreateTensor(rows, 2, ACL_BF16, nullptr, 0, ACL_FORMAT_ND, rows, 2, nullptr);
  aclTensor* target = empty(ACL_INT32, 1);
  aclTensor* floats[] = {empty(ACL_FLOAT, 1), empty(ACL_FLOAT, 1), empty(ACL_FLOAT, 1)};
  aclTensor* mask = empty(ACL_UINT8, 1);
  aclTensor* masked = empty(ACL_INT32, 1);
  std::uint64_t size = 99;
  aclOpExecutor* executor = nullptr;
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(input, weight, target, 0, 9, floats[0],
                                                         floats[1], floats[2], mask, masked,
                                                         nullptr, &size, &executor),
            0);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, executor, nullptr), 0);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  for (aclTensor* t : {input, weight, target, floats[0], floats[1], floats[2], mask, masked}) {
    EXPECT_EQ(aclDestroyTensor(t), 0);
  }
}

// The published example inputs: all ones, target 1.
void expect_example(std::int64_t tokens, std::int64_t vocab, std::int64_t hidden,
                    std::int64_t end) {
  Forward f;
  f.input = Array(ACL_FLOAT16, {tokens, hidden});
  f.weight = Array(ACL_FLOAT16, {vocab, hidden});
  f.target = Array(ACL_INT32, {tokens});
  f.input.fill(1);
  f.weight.fill(1);
  f.target.fill(1);
  f.end = end;
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0) << take_message();
  for (std::int64_t b = 0; b < tokens; ++b) {
    EXPECT_EQ(f.logits_max.get(b), static_cast<double>(hidden));
    EXPECT_EQ(f.sum_exp.get(b), static_cast<double>(vocab));
    EXPECT_EQ(f.predicted.get(b), 0);
    EXPECT_EQ(f.masked_target.get_int(b), 1);
  }
  for (std::int64_t k = 0; k < f.mask.count(); ++k) EXPECT_EQ(f.mask.get_int(k), 0);
  for (double logit : f.logits.values()) EXPECT_EQ(logit, static_cast<double>(hidden));
}

TEST(Forward, PublishedExampleFile) { expect_example(3, 5, 4, 2); }
TEST(Forward, PublishedExamplePage) { expect_example(128, 256, 64, 64); }

TEST(Forward, TwoRunsGiveTheSameBits) {
  Forward f = make_forward(ACL_BF16, ACL_INT32, 45, 700, 130, 0);
  f.make_outputs(true);
  ASSERT_EQ(f.run(), 0);
  Forward again = make_forward(ACL_BF16, ACL_INT32, 45, 700, 130, 0);
  again.make_outputs(true);
  ASSERT_EQ(again.run(), 0);
  for (std::int64_t b = 0; b < 45; ++b) {
    EXPECT_EQ(f.sum_exp.bits(b), again.sum_exp.bits(b));
    EXPECT_EQ(f.predicted.bits(b), again.predicted.bits(b));
  }
}

}  // namespace
}  // namespace ascend_test
