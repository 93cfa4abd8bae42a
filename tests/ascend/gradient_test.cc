// SPDX-License-Identifier: Apache-2.0
// aclnnFusedLinearCrossEntropyLossGrad: what the outputs hold, in both modes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "support.h"

namespace ascend_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr aclError kStreamFailed = 507015;

enum class Mode { kMemorySaving, kHighPerformance };
enum class Mask { kPacked, kBool };

struct Shape {
  std::int64_t tokens, vocab, hidden;
};

// Fills statistics (of rounded logits) or softmax from float64, for the operands that `g` has now.
void fill_statistics(Gradient& g, Mode mode) {
  const std::int64_t tokens = g.input.dim(0), vocab = g.weight.dim(0);
  Forward f;
  f.input = Array(g.input.dtype(), g.input.shape());
  f.input.assign(g.input);
  f.weight = Array(g.weight.dtype(), g.weight.shape());
  f.weight.assign(g.weight);
  f.target = Array(ACL_INT32, {tokens});
  f.target.fill(0);
  f.end = vocab;
  const Statistics statistics = reference_statistics(f);
  if (mode == Mode::kMemorySaving) {
    g.logits_max = Array(ACL_FLOAT, {tokens});
    g.sum_exp = Array(ACL_FLOAT, {tokens});
    g.logits_max.assign(statistics.logits_max);
    g.sum_exp.assign(statistics.sum_exp);
    return;
  }
  std::vector<double> softmax = reference_logits(g.input, g.weight, true);
  for (std::int64_t i = 0; i < tokens * vocab; ++i) {
    const auto b = static_cast<std::size_t>(i / vocab);
    softmax[i] = std::exp(softmax[i] - statistics.logits_max[b]) / statistics.sum_exp[b];
  }
  g.softmax = Array(ACL_FLOAT, {tokens, vocab});
  g.softmax.assign(softmax);
}

void set_masked(Gradient& g, std::int64_t b, bool masked) {
  if (g.mask.dtype() == ACL_BOOL) return g.mask.set_int(b, masked);
  const std::int64_t bit = std::int64_t{1} << (b % 8);
  const std::int64_t byte = g.mask.get_int(b / 8);
  g.mask.set_int(b / 8, masked ? byte | bit : byte & ~bit);
}

// A call with random operands, masks and targets, grad in [0.5, 2) with both signs.
Gradient make_gradient(Shape shape, Mode mode, aclDataType dtype = ACL_BF16,
                       aclDataType index = ACL_INT32, Mask mask = Mask::kPacked,
                       std::uint64_t seed = 1) {
  const auto [tokens, vocab, hidden] = shape;
  Gradient g;
  g.input = Array(dtype, {tokens, hidden});
  g.weight = Array(dtype, {vocab, hidden});
  fill_exact(g.input, seed, 6);
  fill_exact(g.weight, seed + 1, 6);
  g.grad = Array(ACL_FLOAT, {tokens});
  g.masked_target = Array(index, {tokens});
  g.mask = mask == Mask::kBool ? Array(ACL_BOOL, {tokens}) : Array(ACL_UINT8, {(tokens + 7) / 8});
  Random random(seed + 2);
  for (std::int64_t b = 0; b < tokens; ++b) {
    g.grad.set(b, (random.integer(0, 1) ? 1 : -1) * (0.5 + 1.5 * random.uniform()));
    const bool masked = random.integer(0, 3) == 0;
    set_masked(g, b, masked);
    g.masked_target.set_int(b, masked || vocab == 0 ? 0 : random.integer(0, vocab - 1));
  }
  if (vocab > 0) {
    fill_statistics(g, mode);
  } else if (mode == Mode::kMemorySaving) {
    g.logits_max = Array(ACL_FLOAT, {tokens});
    g.sum_exp = Array(ACL_FLOAT, {tokens});
  } else {
    g.softmax = Array(ACL_FLOAT, {tokens, 0});
  }
  g.make_outputs();
  return g;
}

using Types = std::tuple<Mode, aclDataType, aclDataType, Mask>;

std::string type_name(const testing::TestParamInfo<Types>& types) {
  const auto [mode, dtype, index, mask] = types.param;
  return std::string(mode == Mode::kMemorySaving ? "MemorySaving" : "HighPerformance") +
         (dtype == ACL_BF16 ? "BFloat16" : "Float16") + (index == ACL_INT64 ? "Int64" : "Int32") +
         (mask == Mask::kBool ? "BoolMask" : "PackedMask");
}

class GradientTypes : public testing::TestWithParam<Types> {};

TEST_P(GradientTypes, MatchesFloat64AtSizesAroundTiles) {
  const auto [mode, dtype, index, mask] = GetParam();
  for (const Shape& shape : {Shape{1, 128, 1}, Shape{7, 128, 16}, Shape{8, 129, 33},
                             Shape{9, 160, 17}, Shape{33, 191, 64}, Shape{17, 507, 40}}) {
    SCOPED_TRACE(testing::Message()
                 << "BT " << shape.tokens << " V " << shape.vocab << " H " << shape.hidden);
    const Gradient g = make_gradient(shape, mode, dtype, index, mask);
    ASSERT_EQ(g.run(), 0) << take_message();
    expect_gradients(g, reference_grad_logits(g, true));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GradientTypes,
    testing::Combine(testing::Values(Mode::kMemorySaving, Mode::kHighPerformance),
                     testing::Values(ACL_FLOAT16, ACL_BF16), testing::Values(ACL_INT32, ACL_INT64),
                     testing::Values(Mask::kPacked, Mask::kBool)),
    type_name);

class GradientModes : public testing::TestWithParam<Mode> {};

INSTANTIATE_TEST_SUITE_P(Both, GradientModes,
                         testing::Values(Mode::kMemorySaving, Mode::kHighPerformance),
                         [](const auto& mode) {
                           return std::string(mode.param == Mode::kMemorySaving
                                                  ? "MemorySaving"
                                                  : "HighPerformance");
                         });

TEST(GradientNumerics, SoftmaxMinusOneTimesGradIsRoundedOnceBeforeTheProducts) {
  for (aclDataType dtype : {ACL_FLOAT16, ACL_BF16}) {
    Gradient g = make_gradient({24, 130, 16}, Mode::kHighPerformance, dtype);
    Random random(9);
    for (std::int64_t b = 0; b < 24; ++b) g.grad.set(b, 1 + random.uniform());
    ASSERT_EQ(g.run(), 0) << take_message();
    std::vector<double> expected(24 * 130);
    for (std::int64_t b = 0; b < 24; ++b) {
      for (std::int64_t v = 0; v < 130; ++v) {
        auto p = static_cast<float>(g.softmax.get(b * 130 + v));
        if (!g.is_masked(b) && g.masked_target.get_int(b) == v) p -= 1;
        expected[b * 130 + v] = rounded(dtype, p * static_cast<float>(g.grad.get(b)));
      }
    }
    expect_gradients(g, expected, 0.0);
  }
}

TEST_P(GradientModes, IsProportionalToGrad) {
  Gradient one = make_gradient({12, 140, 24}, GetParam());
  for (std::int64_t b = 0; b < 12; ++b) one.grad.set(b, 1);
  ASSERT_EQ(one.run(), 0);
  Gradient four = make_gradient({12, 140, 24}, GetParam());
  for (std::int64_t b = 0; b < 12; ++b) four.grad.set(b, -4);
  ASSERT_EQ(four.run(), 0);
  for (std::int64_t i = 0; i < one.grad_input.count(); ++i) {
    EXPECT_EQ(four.grad_input.get(i), -4 * one.grad_input.get(i));
  }
  for (std::int64_t i = 0; i < one.grad_weight.count(); ++i) {
    EXPECT_EQ(four.grad_weight.get(i), -4 * one.grad_weight.get(i));
  }
}

TEST_P(GradientModes, SmallGradDoesNotUnderflowFloat16) {
  // A mean over many tokens: grad * softmax is far below the least fp16 number; the outputs are
  // not.
  Gradient g = make_gradient({16, 256, 8}, GetParam(), ACL_FLOAT16);
  for (std::int64_t b = 0; b < 16; ++b) g.grad.set(b, std::ldexp(1.0, -12));
  for (std::int64_t i = 0; i < g.weight.count(); ++i) g.weight.set(i, g.weight.get(i) + 2);
  g.softmax = Array();
  g.logits_max = Array();
  g.sum_exp = Array();
  fill_statistics(g, GetParam());
  ASSERT_EQ(g.run(), 0);
  expect_gradients(g, reference_grad_logits(g, true));
}

class GradientLayouts : public testing::TestWithParam<std::tuple<Mode, Layout>> {};

INSTANTIATE_TEST_SUITE_P(All, GradientLayouts,
                         testing::Combine(testing::Values(Mode::kMemorySaving,
                                                          Mode::kHighPerformance),
                                          testing::Values(Layout::kFlat, Layout::kRowGap,
                                                          Layout::kGapped, Layout::kTransposed)),
                         [](const auto& both) {
                           return std::string(std::get<0>(both.param) == Mode::kMemorySaving
                                                  ? "MemorySaving"
                                                  : "HighPerformance") +
                                  layout_name(std::get<1>(both.param));
                         });

// The tensors that a call reads, in a fixed order.
std::vector<Array*> inputs_of(Gradient& g) {
  std::vector<Array*> arrays = {&g.grad, &g.input, &g.weight, &g.mask, &g.masked_target};
  if (g.softmax.tensor() != nullptr) {
    arrays.push_back(&g.softmax);
  } else {
    arrays.push_back(&g.logits_max);
    arrays.push_back(&g.sum_exp);
  }
  return arrays;
}

TEST_P(GradientLayouts, EveryTensorMayHaveAnyLayoutAndGivesTheSameBits) {
  const auto [mode, layout] = GetParam();
  for (Mask mask : {Mask::kPacked, Mask::kBool}) {
    for (aclDataType dtype : {ACL_FLOAT16, ACL_BF16}) {
      Gradient plain = make_gradient({21, 133, 37}, mode, dtype, ACL_INT64, mask);
      ASSERT_EQ(plain.run(), 0) << take_message();
      expect_gradients(plain, reference_grad_logits(plain, true));
      const std::size_t inputs = inputs_of(plain).size();
      for (std::size_t which = 0; which < inputs + 2; ++which) {
        SCOPED_TRACE(testing::Message()
                     << "tensor " << which << " mask " << static_cast<int>(mask));
        Gradient g = make_gradient({21, 133, 37}, mode, dtype, ACL_INT64, mask);
        const std::vector<Array*> theirs = inputs_of(g), ours = inputs_of(plain);
        for (std::size_t i = 0; i < inputs; ++i) {
          if (i != which && which < inputs) continue;
          *theirs[i] = Array(ours[i]->dtype(), ours[i]->shape(), layout);
          theirs[i]->assign(*ours[i]);
        }
        for (Array* array : theirs) array->set_read_only(true);
        g.make_outputs(which >= inputs ? layout : Layout::kContiguous);
        ASSERT_EQ(g.run(), 0) << take_message();
        EXPECT_TRUE(g.grad_input.gaps_untouched());
        EXPECT_TRUE(g.grad_weight.gaps_untouched());
        EXPECT_EQ(g.grad_input.values(), plain.grad_input.values());
        EXPECT_EQ(g.grad_weight.values(), plain.grad_weight.values());
      }
    }
  }
}

TEST_P(GradientModes, ZeroStridesBroadcastInputs) {
  for (std::size_t which = 0; which < 8; ++which) {
    SCOPED_TRACE(testing::Message() << "tensor " << which);
    Gradient g = make_gradient({10, 131, 24}, GetParam(), ACL_BF16, ACL_INT32, Mask::kBool);
    const std::vector<Array*> arrays = inputs_of(g);
    if (which >= arrays.size()) break;
    Array& array = *arrays[which];
    std::vector<double> first_row;
    const std::int64_t columns = array.count() / array.dim(0);
    for (std::int64_t i = 0; i < columns; ++i) first_row.push_back(array.get(i));
    array = Array(array.dtype(), array.shape(), Layout::kBroadcast);
    for (std::int64_t i = 0; i < columns; ++i) array.set(i, first_row[static_cast<std::size_t>(i)]);
    if (which == 1 || which == 2) fill_statistics(g, GetParam());
    if (GetParam() == Mode::kMemorySaving && (which == 5 || which == 6)) {
      g.logits_max.fill(3);  // statistics of no particular softmax
      g.sum_exp.fill(50);
    }
    ASSERT_EQ(g.run(), 0) << take_message();
    expect_gradients(g, reference_grad_logits(g, true));
  }
}

TEST_P(GradientModes, MaskedRowsKeepTheirSoftmaxAndLoseNothing) {
  Gradient g = make_gradient({8, 130, 16}, GetParam());
  for (std::int64_t b = 0; b < 8; ++b) set_masked(g, b, b < 4);
  for (std::int64_t b = 0; b < 8; ++b) g.masked_target.set_int(b, 5);
  ASSERT_EQ(g.run(), 0);
  expect_gradients(g, reference_grad_logits(g, true));
}

TEST_P(GradientModes, MaskedRowsMayHoldAnyMaskedTarget) {
  for (aclDataType index : {ACL_INT32, ACL_INT64}) {
    Gradient g = make_gradient({8, 130, 16}, GetParam(), ACL_BF16, index);
    for (std::int64_t b = 0; b < 8; ++b) {
      set_masked(g, b, true);
      g.masked_target.set_int(b, b % 2 ? -1 - b : 130 + b * 1000);
    }
    ASSERT_EQ(g.run(), 0) << take_message();
    expect_gradients(g, reference_grad_logits(g, true));
  }
}

TEST_P(GradientModes, PaddingBitsOfTheMaskAreNotRead) {
  Gradient zeros = make_gradient({11, 130, 16}, GetParam());
  zeros.mask.set_int(1, zeros.mask.get_int(1) & 0b111);
  ASSERT_EQ(zeros.run(), 0);
  Gradient ones = make_gradient({11, 130, 16}, GetParam());
  ones.mask.set_int(1, ones.mask.get_int(1) | 0b11111000);
  ASSERT_EQ(ones.run(), 0);
  EXPECT_EQ(zeros.grad_input.values(), ones.grad_input.values());
  EXPECT_EQ(zeros.grad_weight.values(), ones.grad_weight.values());
}

TEST_P(GradientModes, APackedMaskMayBeLongerThanNeeded) {
  Gradient plain = make_gradient({11, 130, 16}, GetParam());
  ASSERT_EQ(plain.run(), 0);
  Gradient longer = make_gradient({11, 130, 16}, GetParam());
  Array mask(ACL_UINT8, {11});
  for (std::int64_t k = 0; k < 11; ++k) mask.set_int(k, k < 2 ? longer.mask.get_int(k) : 0xFF);
  longer.mask = std::move(mask);
  ASSERT_EQ(longer.run(), 0) << take_message();
  EXPECT_EQ(plain.grad_input.values(), longer.grad_input.values());
}

TEST_P(GradientModes, AnyByteOfABoolMaskButZeroIsTrue) {
  Gradient plain = make_gradient({11, 130, 16}, GetParam(), ACL_BF16, ACL_INT32, Mask::kBool);
  ASSERT_EQ(plain.run(), 0);
  for (int truth : {2, 0x80, 0xFF}) {
    Gradient g = make_gradient({11, 130, 16}, GetParam(), ACL_BF16, ACL_INT32, Mask::kBool);
    for (std::int64_t b = 0; b < 11; ++b) {
      if (g.is_masked(b)) g.mask.set_int(b, truth);
    }
    ASSERT_EQ(g.run(), 0);
    EXPECT_EQ(plain.grad_input.values(), g.grad_input.values()) << truth;
    EXPECT_EQ(plain.grad_weight.values(), g.grad_weight.values()) << truth;
  }
}

TEST(GradientHighPerformance, StatisticsBesideSoftmaxAreNotRead) {
  Gradient g = make_gradient({6, 128, 16}, Mode::kHighPerformance);
  ASSERT_EQ(g.run(), 0);
  Gradient with = make_gradient({6, 128, 16}, Mode::kHighPerformance);
  with.logits_max = Array(ACL_FLOAT, {6});
  with.sum_exp = Array(ACL_FLOAT, {6});
  with.logits_max.fill(std::numeric_limits<double>::quiet_NaN());
  with.sum_exp.fill(0);
  ASSERT_EQ(with.run(), 0);
  EXPECT_EQ(g.grad_input.values(), with.grad_input.values());
  EXPECT_EQ(g.grad_weight.values(), with.grad_weight.values());
}

TEST(GradientHighPerformance, SoftmaxIsOnlyRead) {
  for (aclDataType dtype : {ACL_FLOAT16, ACL_BF16}) {
    Gradient g = make_gradient({20, 200, 24}, Mode::kHighPerformance, dtype);
    const std::vector<double> before = g.softmax.values();
    for (Array* array : inputs_of(g)) array->set_read_only(true);
    ASSERT_EQ(g.run(), 0) << take_message();
    EXPECT_EQ(g.softmax.values(), before);
  }
}

TEST(GradientHighPerformance, AnySoftmaxIsUsedAsItIs) {
  // Not normalised, as the original's own test data.
  Gradient g = make_gradient({9, 140, 16}, Mode::kHighPerformance);
  Random random(4);
  for (std::int64_t i = 0; i < g.softmax.count(); ++i) g.softmax.set(i, 5 * random.uniform());
  ASSERT_EQ(g.run(), 0);
  expect_gradients(g, reference_grad_logits(g, true));
}

TEST(GradientMemorySaving, StatisticsOfAWholeVocabularyServeOneShard) {
  // The sum of a whole vocabulary is larger than the sum over this shard's rows; its maximum may
  // lie elsewhere.
  Gradient g = make_gradient({9, 140, 16}, Mode::kMemorySaving);
  for (std::int64_t b = 0; b < 9; ++b) {
    g.logits_max.set(b, rounded(ACL_BF16, g.logits_max.get(b) + 1.5));
    g.sum_exp.set(b, g.sum_exp.get(b) * 3);
  }
  ASSERT_EQ(g.run(), 0);
  expect_gradients(g, reference_grad_logits(g, true));
}

// Confident tokens: their logit is 30 + step, which the operand type rounds to 30; all others are 0
// and have probability e^-30.
Gradient confident(const std::vector<double>& maxima, aclDataType dtype = ACL_BF16,
                   double step = 0.0625) {
  const auto tokens = static_cast<std::int64_t>(maxima.size());
  Gradient g;
  g.input = Array(dtype, {tokens, 2});
  g.weight = Array(dtype, {128, 2});
  g.weight.fill(0);
  g.weight.set(2 * 3, 30);
  g.weight.set(2 * 3 + 1, 1);
  g.grad = Array(ACL_FLOAT, {tokens});
  g.grad.fill(1);
  g.mask = Array(ACL_BOOL, {tokens});
  g.mask.fill(0);
  g.masked_target = Array(ACL_INT32, {tokens});
  g.masked_target.fill(3);
  g.logits_max = Array(ACL_FLOAT, {tokens});
  g.sum_exp = Array(ACL_FLOAT, {tokens});
  for (std::int64_t b = 0; b < tokens; ++b) {
    g.input.set(2 * b, 1);
    g.input.set(2 * b + 1, step);
    g.logits_max.set(b, maxima[static_cast<std::size_t>(b)]);
    g.sum_exp.set(b, 1);
  }
  g.make_outputs();
  return g;
}

TEST(GradientMemorySaving, RecomputedLogitsAreRoundedRowByRowAsTheirStatisticsWere) {
  // Rows 0 and 2: statistics of rounded logits (30); rows 1 and 3: of unrounded ones (30.0625).
  // With the wrong choice a row's probability is off by 6 % and its gradient by 30 * 0.06.
  const Gradient g = confident({30, 30.0625, 30, 30.0625});
  ASSERT_EQ(g.run(), 0) << take_message();
  for (std::int64_t i = 0; i < g.grad_input.count(); ++i) {
    EXPECT_NEAR(g.grad_input.get(i), 0, 30 * 1e-6) << "element " << i;
  }
  // In fp16 the step is 1/128: wrong would be 30 * 0.008.
  const double above = 30 + 1.0 / 128;
  ASSERT_EQ(rounded(ACL_FLOAT16, above), 30);
  const Gradient h = confident({30, above, 30, above}, ACL_FLOAT16, 1.0 / 128);
  ASSERT_EQ(h.run(), 0) << take_message();
  for (std::int64_t i = 0; i < h.grad_input.count(); ++i) {
    EXPECT_NEAR(h.grad_input.get(i), 0, 30 * 1e-5) << "element " << i;
  }
}

TEST(GradientMemorySaving, EachRowsRoundingDependsOnItsOwnMaximumAlone) {
  const Gradient together = confident({30, 30.0625, 30});
  ASSERT_EQ(together.run(), 0);
  for (double max : {30.0, 30.0625}) {
    const Gradient alone = confident({max});
    ASSERT_EQ(alone.run(), 0);
    const std::int64_t row = max == 30.0 ? 0 : 1;
    EXPECT_EQ(alone.grad_input.bits(0), together.grad_input.bits(2 * row));
    EXPECT_EQ(alone.grad_input.bits(1), together.grad_input.bits(2 * row + 1));
  }
}

TEST_P(GradientModes, RowsWithGradZeroContributeExactlyNothing) {
  for (double zero : {0.0, -0.0}) {
    Gradient all = make_gradient({12, 130, 16}, GetParam());
    for (std::int64_t b : {0, 5, 11}) all.grad.set(b, zero);
    ASSERT_EQ(all.run(), 0);
    expect_gradients(all, reference_grad_logits(all, true));
    for (std::int64_t b : {0, 5, 11}) {
      for (std::int64_t h = 0; h < 16; ++h) EXPECT_EQ(all.grad_input.get(b * 16 + h), 0);
    }
  }
}

TEST_P(GradientModes, RowsWithGradZeroMayHoldNaNAndInfinity) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (double zero : {0.0, -0.0}) {
    for (bool masked : {false, true}) {
      Gradient g = make_gradient({12, 130, 16}, GetParam());
      const double poison[] = {nan, kInfinity, -kInfinity};
      for (std::int64_t b : {1, 4, 7}) {
        g.grad.set(b, zero);
        set_masked(g, b, masked);
        for (std::int64_t h = 0; h < 16; ++h) g.input.set(b * 16 + h, poison[b % 3]);
        if (GetParam() == Mode::kHighPerformance) {
          for (std::int64_t v = 0; v < 130; ++v) g.softmax.set(b * 130 + v, nan);
        } else {
          g.logits_max.set(b, poison[(b + 1) % 3]);
          g.sum_exp.set(b, b == 4 ? 0 : nan);
        }
      }
      ASSERT_EQ(g.run(), 0) << take_message();
      expect_gradients(g, reference_grad_logits(g, true));
      for (std::int64_t b : {1, 4, 7}) {
        for (std::int64_t h = 0; h < 16; ++h) EXPECT_EQ(g.grad_input.get(b * 16 + h), 0);
      }
      for (double value : g.grad_weight.values()) EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST_P(GradientModes, ARowOfNaNStaysInItsOwnRowOfInputGrad) {
  Gradient g = make_gradient({6, 130, 16}, GetParam());
  if (GetParam() == Mode::kHighPerformance) {
    g.softmax.set(2 * 130 + 7, std::numeric_limits<double>::quiet_NaN());
  } else {
    g.sum_exp.set(2, std::numeric_limits<double>::quiet_NaN());
  }
  ASSERT_EQ(g.run(), 0);
  for (std::int64_t i = 0; i < g.grad_input.count(); ++i) {
    EXPECT_EQ(std::isnan(g.grad_input.get(i)), i / 16 == 2) << i;
  }
}

TEST_P(GradientModes, AllRowsWithGradZeroGiveZeros) {
  Gradient g = make_gradient({5, 130, 16}, GetParam());
  g.grad.fill(0);
  ASSERT_EQ(g.run(), 0);
  for (double value : g.grad_input.values()) EXPECT_EQ(value, 0);
  for (double value : g.grad_weight.values()) EXPECT_EQ(value, 0);
}

// ---- empty tensors

TEST_P(GradientModes, NoTokensWritesWeightGradWithZeros) {
  for (Layout layout : {Layout::kContiguous, Layout::kGapped}) {
    Gradient g = make_gradient({0, 128, 16}, GetParam());
    g.make_outputs(layout);
    ASSERT_EQ(g.run(), 0) << take_message();
    for (double value : g.grad_weight.values()) EXPECT_EQ(value, 0);
    EXPECT_TRUE(g.grad_weight.gaps_untouched());
  }
}

TEST_P(GradientModes, EmptyVocabularyWritesInputGradWithZeros) {
  for (Layout layout : {Layout::kContiguous, Layout::kGapped}) {
    Gradient g = make_gradient({9, 0, 16}, GetParam());
    for (std::int64_t b = 0; b < 9; ++b) {
      set_masked(g, b, false);
      g.masked_target.set_int(b, 3);  // no row can own it; with V = 0 that is not an error
    }
    g.make_outputs(layout);
    ASSERT_EQ(g.run(), 0) << take_message();
    for (double value : g.grad_input.values()) EXPECT_EQ(value, 0);
    EXPECT_TRUE(g.grad_input.gaps_untouched());
  }
}

TEST_P(GradientModes, HiddenSizeZeroHasNothingToWrite) {
  Gradient g = make_gradient({9, 130, 0}, GetParam());
  EXPECT_EQ(g.run(), 0) << take_message();
}

TEST_P(GradientModes, EmptyOperandsNeedNoWorkspace) {
  for (const Shape& shape : {Shape{0, 128, 16}, Shape{9, 0, 16}, Shape{9, 130, 0}}) {
    const Gradient g = make_gradient(shape, GetParam());
    std::uint64_t size = 77;
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(g.prepare(&size, &executor), 0);
    EXPECT_EQ(size, 0u);
    EXPECT_EQ(aclnnFusedLinearCrossEntropyLossGrad(nullptr, 0, executor, nullptr), 0);
    EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0) << take_message();
  }
}

TEST_P(GradientModes, AddressesOfEmptyOperandsAreNotUsed) {
  for (const Shape& shape : {Shape{0, 128, 16}, Shape{9, 0, 16}, Shape{9, 130, 0}}) {
    Gradient g = make_gradient(shape, GetParam());
    std::vector<Array*> arrays = inputs_of(g);
    arrays.push_back(&g.grad_input);
    arrays.push_back(&g.grad_weight);
    for (std::uintptr_t address : {std::uintptr_t{0}, std::uintptr_t{17}}) {
      for (Array* array : arrays) {
        if (array->count() > 0) continue;
        ASSERT_EQ(aclSetRawTensorAddr(array->tensor(), reinterpret_cast<void*>(address)), 0);
      }
      EXPECT_EQ(g.run(), 0) << take_message();
    }
  }
}

// ---- a target that this shard does not have

TEST_P(GradientModes, BadUnmaskedTargetFailsOnTheStreamBeforeAnythingIsWritten) {
  for (std::int64_t bad : {std::int64_t{130}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    for (Mask mask : {Mask::kPacked, Mask::kBool}) {
      Gradient g = make_gradient({12, 130, 16}, GetParam(), ACL_BF16, ACL_INT64, mask);
      set_masked(g, 9, false);
      g.masked_target.set_int(9, bad);
      const Stream stream;
      std::uint64_t size = 0;
      aclOpExecutor* executor = nullptr;
      ASSERT_EQ(g.prepare(&size, &executor), 0);
      const GuardedBuffer workspace(size);
      take_message();
      ASSERT_EQ(aclnnFusedLinearCrossEntropyLossGrad(workspace.data(), size, executor, stream), 0);
      Forward later;  // must run all the same
      later.input = Array(ACL_BF16, {3, 4});
      later.weight = Array(ACL_BF16, {5, 4});
      later.target = Array(ACL_INT32, {3});
      fill_exact(later.input, 1);
      fill_exact(later.weight, 2);
      later.target.fill(1);
      later.end = 5;
      later.make_outputs(false);
      std::uint64_t later_size = 0;
      aclOpExecutor* later_executor = nullptr;
      ASSERT_EQ(later.prepare(&later_size, &later_executor), 0);
      const GuardedBuffer later_workspace(later_size);
      ASSERT_EQ(
          aclnnFusedLinearOnlineMaxSum(later_workspace.data(), later_size, later_executor, stream),
          0);
      EXPECT_EQ(aclrtSynchronizeStream(stream), kStreamFailed);
      const std::string message = take_message();
      EXPECT_TRUE(names(message, "maskedTarget")) << message;
      EXPECT_TRUE(names(message, "9")) << "names the row: " << message;
      EXPECT_NE(message.find(std::to_string(bad)), std::string::npos)
          << "names the value: " << message;
      EXPECT_EQ(aclrtSynchronizeStream(stream), 0) << "told once";
      EXPECT_TRUE(g.grad_input.untouched());
      EXPECT_TRUE(g.grad_weight.untouched());
      expect_forward(later);
    }
  }
}

TEST(GradientOnStream, BadTargetIsAlsoToldByDeviceSynchronisation) {
  Gradient g = make_gradient({4, 130, 16}, Mode::kMemorySaving);
  set_masked(g, 0, false);
  g.masked_target.set_int(0, 1000);
  const Stream stream;
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(g.prepare(&size, &executor), 0);
  const GuardedBuffer workspace(size);
  ASSERT_EQ(aclnnFusedLinearCrossEntropyLossGrad(workspace.data(), size, executor, stream), 0);
  EXPECT_EQ(aclrtSynchronizeDevice(), kStreamFailed);
  EXPECT_TRUE(names(take_message(), "1000"));
  EXPECT_EQ(aclrtSynchronizeDevice(), 0);
  EXPECT_EQ(aclrtSynchronizeStream(stream), 0) << "told once";
}

TEST_P(GradientModes, BadTargetOfARowWithGradZeroIsNoError) {
  for (double zero : {0.0, -0.0}) {
    Gradient g = make_gradient({6, 130, 16}, GetParam());
    set_masked(g, 2, false);
    g.masked_target.set_int(2, -77);
    g.grad.set(2, zero);
    EXPECT_EQ(g.run(), 0) << take_message();
    expect_gradients(g, reference_grad_logits(g, true));
  }
}

TEST(GradientOnStream, MaskedTargetWrittenByAForwardBeyondTheShardFails) {
  Forward f;
  f.input = Array(ACL_BF16, {3, 8});
  f.weight = Array(ACL_BF16, {128, 8});
  f.target = Array(ACL_INT32, {3});
  fill_exact(f.input, 1);
  fill_exact(f.weight, 2);
  f.target.assign({5, 300, 7});
  f.end = 1000;  // 1000 ids claimed by a shard of 128 rows
  f.make_outputs(false);
  ASSERT_EQ(f.run(), 0);
  Gradient g;
  g.input = std::move(f.input);
  g.weight = std::move(f.weight);
  g.mask = std::move(f.mask);
  g.masked_target = std::move(f.masked_target);
  g.logits_max = std::move(f.logits_max);
  g.sum_exp = std::move(f.sum_exp);
  g.grad = Array(ACL_FLOAT, {3});
  g.grad.fill(1);
  g.make_outputs();
  EXPECT_EQ(g.run(), kStreamFailed);
  const std::string message = take_message();
  EXPECT_TRUE(names(message, "300")) << message;
}

// ---- the published example

TEST(GradientExample, EverythingZeroGivesZeroEvenReadTwiceItsLength) {
  // The published program copies twice the bytes of the output back: device memory has that slack.
  constexpr std::int64_t kSize = 1024;
  const std::int64_t vector[] = {kSize}, matrix[] = {kSize, kSize};
  struct Operand {
    aclDataType type;
    std::uint64_t rank;
    std::size_t bytes;
    void* memory = nullptr;
    aclTensor* tensor = nullptr;
  };
  Operand operands[] = {
      {ACL_FLOAT, 1, kSize * 4},        {ACL_BF16, 2, kSize * kSize * 2},
      {ACL_BF16, 2, kSize * kSize * 2}, {ACL_UINT8, 1, kSize},
      {ACL_INT32, 1, kSize * 4},        {ACL_FLOAT, 2, kSize * kSize * 4},
      {ACL_BF16, 2, kSize * kSize * 2}, {ACL_BF16, 2, kSize * kSize * 2},
  };
  for (Operand& o : operands) {
    ASSERT_EQ(aclrtMalloc(&o.memory, o.bytes, ACL_MEM_MALLOC_HUGE_FIRST), 0);
    ASSERT_EQ(aclrtMemset(o.memory, o.bytes, 0, o.bytes), 0);
    const std::int64_t* dims = o.rank == 1 ? vector : matrix;
    o.tensor =
        aclCreateTensor(dims, o.rank, o.type, nullptr, 0, ACL_FORMAT_ND, dims, o.rank, o.memory);
  }
  const std::vector<char> noise(operands[6].bytes, 0x11);
  for (int k : {6, 7}) {
    ASSERT_EQ(aclrtMemcpy(operands[k].memory, operands[k].bytes, noise.data(), noise.size(),
                          ACL_MEMCPY_HOST_TO_DEVICE),
              0);
  }
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
                operands[0].tensor, operands[1].tensor, operands[2].tensor, operands[3].tensor,
                operands[4].tensor, 0.0F, nullptr, nullptr, operands[5].tensor, operands[6].tensor,
                operands[7].tensor, &size, &executor),
            0)
      << take_message();
  void* workspace = nullptr;
  if (size > 0) {
    ASSERT_EQ(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST), 0);
  }
  ASSERT_EQ(aclnnFusedLinearCrossEntropyLossGrad(workspace, size, executor, nullptr), 0);
  ASSERT_EQ(aclrtSynchronizeStream(nullptr), 0) << take_message();
  std::vector<std::uint16_t> result(2 * kSize * kSize, 0xFFFF);
  for (int k : {6, 7}) {
    ASSERT_EQ(aclrtMemcpy(result.data(), result.size() * 2, operands[k].memory,
                          2 * operands[k].bytes, ACL_MEMCPY_DEVICE_TO_HOST),
              0);
    for (std::int64_t i = 0; i < kSize * kSize; ++i) {
      ASSERT_EQ(result[static_cast<std::size_t>(i)] & 0x7FFF, 0) << i;
    }
  }
  EXPECT_EQ(aclDestroyTensor(nullptr), 0);
  for (Operand& o : operands) {
    EXPECT_EQ(aclDestroyTensor(o.tensor), 0);
    EXPECT_EQ(aclrtFree(o.memory), 0);
  }
  if (workspace != nullptr) {
    EXPECT_EQ(aclrtFree(workspace), 0);
  }
}

// ---- sizes that the original refuses

TEST(GradientSizes, SoftmaxOf25000Columns) {
  const Gradient g = make_gradient({3, 25000, 4}, Mode::kHighPerformance);
  ASSERT_EQ(g.run(), 0) << take_message();
  expect_gradients(g, reference_grad_logits(g, true));
}

TEST(GradientSizes, Softmax70000ColumnsWide) {
  const Gradient g = make_gradient({2, 70000, 2}, Mode::kHighPerformance, ACL_FLOAT16);
  ASSERT_EQ(g.run(), 0) << take_message();
  expect_gradients(g, reference_grad_logits(g, true));
}

TEST(GradientSizes, HiddenSize70000) {
  for (Mode mode : {Mode::kMemorySaving, Mode::kHighPerformance}) {
    Gradient g = make_gradient({2, 128, 70000}, mode);
    for (std::int64_t i = 0; i < g.weight.count(); ++i) {
      if (i % 64 != 0) g.weight.set_int(i, 0);  // keeps logits moderate
    }
    fill_statistics(g, mode);
    ASSERT_EQ(g.run(), 0) << take_message();
    expect_gradients(g, reference_grad_logits(g, true));
  }
}

TEST(GradientSizes, MoreThan65536Tokens) {
  const Gradient g = make_gradient({65537, 128, 1}, Mode::kHighPerformance);
  ASSERT_EQ(g.run(), 0) << take_message();
  expect_gradients(g, reference_grad_logits(g, true));
}

}  // namespace
}  // namespace ascend_test
