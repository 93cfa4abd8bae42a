// SPDX-License-Identifier: Apache-2.0
// The allowed errors themselves: a correct implementation in plain float loops is within them, not
// by more than a factor of 8, and wrong ones are beyond.
#include "reference/tolerance.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>

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
