// SPDX-License-Identifier: Apache-2.0
#include "logitless/tensor.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

namespace logitless::test {
namespace {

// The value of a 16-bit pattern, from the definition of the format.
double decoded(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits >> 15 ? -1.0 : 1.0;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <typename T>
struct Format;
template <>
struct Format<float16> {
  static constexpr int kExponent = 5, kMantissa = 10;
};
template <>
struct Format<bfloat16> {
  static constexpr int kExponent = 8, kMantissa = 7;
};

template <typename T>
class SixteenBits : public testing::Test {
 protected:
  static double value(uint32_t bits) {
    return decoded(static_cast<uint16_t>(bits), Format<T>::kExponent, Format<T>::kMantissa);
  }
};
using Types = testing::Types<float16, bfloat16>;
TYPED_TEST_SUITE(SixteenBits, Types);

TYPED_TEST(SixteenBits, EveryPatternDecodesAndComesBack) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    TypeParam x;
    x.bits = static_cast<uint16_t>(i);
    const auto f = static_cast<float>(x);
    const double want = this->value(i);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(f)) << i;
      const TypeParam back(f);
      ASSERT_TRUE(std::isnan(static_cast<float>(back))) << i;
      ASSERT_EQ(back.bits >> 15, i >> 15) << i;
    } else {
      ASSERT_EQ(f, want) << i;
      ASSERT_EQ(std::signbit(f), std::signbit(want)) << i;
      ASSERT_EQ(TypeParam(f).bits, i);
    }
  }
}

TYPED_TEST(SixteenBits, BetweenNeighboursRoundsToNearestAndTiesToEven) {
  const uint32_t infinity = ((1u << Format<TypeParam>::kExponent) - 1)
                            << Format<TypeParam>::kMantissa;
  for (uint32_t i = 0; i < infinity; ++i) {
    const double low = this->value(i);
    // Beyond the largest number stands the one that would follow it.
    const double high = i + 1 == infinity ? 2 * low - this->value(i - 1) : this->value(i + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    // For bf16 and the least fp16 differences the middle is exact in float.
    ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
    const uint32_t even = i % 2 == 0 ? i : i + 1;
    for (const float sign : {1.0f, -1.0f}) {
      const uint32_t s = sign < 0 ? 0x8000u : 0u;
      ASSERT_EQ(TypeParam(sign * middle).bits, even | s) << low;
      ASSERT_EQ(TypeParam(sign * std::nextafter(middle, 0.0f)).bits, i | s) << low;
      ASSERT_EQ(TypeParam(sign * std::nextafter(middle, INFINITY)).bits, (i + 1) | s) << low;
    }
  }
}

TYPED_TEST(SixteenBits, InfinityAndHugeValues) {
  EXPECT_TRUE(std::isinf(static_cast<float>(TypeParam(INFINITY))));
  EXPECT_EQ(static_cast<float>(TypeParam(-INFINITY)), -INFINITY);
  EXPECT_EQ(static_cast<float>(TypeParam(std::numeric_limits<float>::max())), INFINITY);
}

TEST(Tensor, SizesAndNames) {
  EXPECT_EQ(size_of(DType::f32), 4);
  EXPECT_EQ(size_of(DType::f16), 2);
  EXPECT_EQ(size_of(DType::bf16), 2);
  EXPECT_EQ(size_of(DType::i32), 4);
  EXPECT_EQ(size_of(DType::i64), 8);
  EXPECT_EQ(size_of(DType::u8), 1);
  EXPECT_STREQ(name_of(DType::bf16), "bf16");
  EXPECT_STREQ(name_of(DType::i64), "i64");
}

TEST(Tensor, ContiguousViews) {
  std::vector<float> values(6);
  const VectorView v = vector_view<float>(std::span<float>(values));
  EXPECT_EQ(v.size, 6);
  EXPECT_EQ(v.stride, 1);
  EXPECT_EQ(v.dtype, DType::f32);
  const ConstMatrixView m = matrix_view(values.data(), 2, 3);
  EXPECT_EQ(m.rows, 2);
  EXPECT_EQ(m.row_stride, 3);
  EXPECT_EQ(m.col_stride, 1);
}

static_assert(bfloat16(1.0f).bits == 0x3f80);
static_assert(float16(1.0f).bits == 0x3c00);
static_assert(static_cast<float>(float16(0x1p-24f)) == 0x1p-24f);

}  // namespace
}  // namespace logitless::test
