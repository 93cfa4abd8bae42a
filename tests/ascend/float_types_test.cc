// SPDX-License-Identifier: Apache-2.0
// op::fp16_t, op::bfloat16 and the two C conversions, over all bit patterns and all rounding
// boundaries, against float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "aclnn/opdev/bfloat16.h"
#include "aclnn/opdev/fp16_t.h"
#include "support.h"

namespace ascend_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

op::fp16_t half(unsigned bits) {
  op::fp16_t h;
  h.val = static_cast<std::uint16_t>(bits);
  return h;
}

TEST(Fp16, EveryBitPatternConvertsToItsValue) {
  ASSERT_EQ(sizeof(op::fp16_t), 2u);
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const double expected = half_value(static_cast<std::uint16_t>(bits));
    const op::fp16_t h = half(bits);
    ASSERT_TRUE(same(static_cast<double>(h), expected)) << bits;
    ASSERT_TRUE(same(static_cast<float>(h), expected)) << bits;
    ASSERT_TRUE(same(h.toFloat(), expected)) << bits;
    ASSERT_TRUE(same(h.toDouble(), expected)) << bits;
    ASSERT_TRUE(same(aclFloat16ToFloat(static_cast<aclFloat16>(bits)), expected)) << bits;
    ASSERT_EQ(h.IsInf(), expected == kInfinity ? 1 : expected == -kInfinity ? -1 : 0);
    ASSERT_EQ(static_cast<bool>(h), !(expected == 0)) << bits;
  }
}

// Between each number and the next one above: both, the tie, and the float and double neighbours of
// the tie.
TEST(Fp16, EveryRoundingBoundaryRoundsToNearestEven) {
  for (unsigned bits = 0; bits < 0x7C00; ++bits) {
    const double low = half_value(static_cast<std::uint16_t>(bits));
    const double high =
        bits + 1 == 0x7C00 ? 65536 : half_value(static_cast<std::uint16_t>(bits + 1));
    const double tie = (low + high) / 2;
    const auto tie_float = static_cast<float>(tie);
    ASSERT_EQ(tie_float, tie);
    const double up = bits + 1, even = bits % 2 == 0 ? bits : bits + 1;
    const auto expect = [&](double number, double pattern) {
      for (int sign : {1, -1}) {
        const auto want = static_cast<unsigned>(pattern) | (sign < 0 ? 0x8000u : 0u);
        ASSERT_EQ(op::fp16_t(sign * number).val, want) << number;
        const auto narrow = static_cast<float>(sign * number);
        if (narrow == sign * number) {
          ASSERT_EQ(op::fp16_t(narrow).val, want) << number;
          ASSERT_EQ(aclFloatToFloat16(narrow), want) << number;
          op::fp16_t assigned;
          assigned = narrow;
          ASSERT_EQ(assigned.val, want) << number;
        }
      }
    };
    expect(low, bits);
    expect(tie, even);
    expect(std::nextafter(tie, 0.0), bits);
    expect(std::nextafter(tie, 1e9), up);
    expect(std::nextafterf(tie_float, 0.0F), bits);
    expect(std::nextafterf(tie_float, 1e9F), up);
  }
}

TEST(Fp16, OverflowAndNaN) {
  EXPECT_EQ(op::fp16_t(65519.99F).val, 0x7BFF);
  EXPECT_EQ(op::fp16_t(65520.0F).val, 0x7C00);
  EXPECT_EQ(op::fp16_t(1e300).val, 0x7C00);
  EXPECT_EQ(op::fp16_t(-1e300).val, 0xFC00);
  EXPECT_EQ(op::fp16_t(std::numeric_limits<float>::infinity()).val, 0x7C00);
  EXPECT_EQ(op::fp16_t(std::numeric_limits<float>::denorm_min()).val, 0);
  EXPECT_EQ(op::fp16_t(std::numeric_limits<double>::denorm_min()).val, 0);
  EXPECT_EQ(op::fp16_t(std::numeric_limits<float>::quiet_NaN()).val & 0x7FFF, 0x7FFF);
  EXPECT_TRUE(std::isnan(aclFloat16ToFloat(aclFloatToFloat16(NAN))));
}

TEST(Fp16, DoublesAreRoundedOnce) {
  // Through float this would become a tie and round down.
  EXPECT_EQ(op::fp16_t(1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40)).val, 0x3C01);
  op::fp16_t assigned;
  assigned = 1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
  EXPECT_EQ(assigned.val, 0x3C01);
}

TEST(Fp16, UInt16IsABitPatternWhenConstructedAndANumberWhenAssigned) {
  EXPECT_EQ(static_cast<float>(op::fp16_t(static_cast<std::uint16_t>(0x3C00))), 1.0F);
  op::fp16_t assigned;
  assigned = static_cast<std::uint16_t>(2);
  EXPECT_EQ(static_cast<float>(assigned), 2.0F);
  EXPECT_EQ(op::fp16_t().val, 0);
}

TEST(Fp16, FillsVectorsAsClientsDo) {
  const std::vector<op::fp16_t> ones(3, 1.0), zeros(3, 0), twos(3, 2);
  EXPECT_EQ(ones[2].val, 0x3C00);
  EXPECT_EQ(zeros[2].val, 0);
  EXPECT_EQ(twos[2].val, 0x4000);
}

TEST(Fp16, IntegersConvertBothWays) {
  for (int number = -2048; number <= 2048; ++number) {
    const op::fp16_t h(number);
    ASSERT_EQ(static_cast<float>(h), static_cast<float>(number));
    ASSERT_EQ(static_cast<std::int32_t>(h), number);
    ASSERT_EQ(static_cast<std::int64_t>(h), number);
    ASSERT_EQ(static_cast<std::int16_t>(h), number);
    ASSERT_EQ(h.toInt32(), number);
    if (number >= 0) {
      ASSERT_EQ(static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(number));
      ASSERT_EQ(static_cast<std::uint64_t>(h), static_cast<std::uint64_t>(number));
      ASSERT_EQ(h.toUInt16(), number);
    }
    if (number >= -128 && number < 128) {
      ASSERT_EQ(static_cast<std::int8_t>(h), number);
      ASSERT_EQ(h.toInt8(), number);
    }
    if (number >= 0 && number < 256) {
      ASSERT_EQ(h.toUInt8(), number);
    }
    op::fp16_t assigned;
    assigned = static_cast<std::int64_t>(number);
    ASSERT_EQ(assigned.val, h.val);
    assigned = static_cast<std::int16_t>(number);
    ASSERT_EQ(assigned.val, h.val);
    assigned = number;
    ASSERT_EQ(assigned.val, h.val);
    ASSERT_EQ(h.toInt16(), number);
    ASSERT_EQ(h.toInt64(), number);
    if (number >= 0) {
      ASSERT_EQ(static_cast<std::uint16_t>(h), number);
      ASSERT_EQ(h.toUInt32(), static_cast<std::uint32_t>(number));
      ASSERT_EQ(h.toUInt64(), static_cast<std::uint64_t>(number));
      assigned = static_cast<std::uint16_t>(number);
      ASSERT_EQ(assigned.val, h.val);
      assigned = static_cast<std::uint32_t>(number);
      ASSERT_EQ(assigned.val, h.val);
      assigned = static_cast<std::uint64_t>(number);
      ASSERT_EQ(assigned.val, h.val);
    }
    if (number >= -128 && number < 128) {
      assigned = static_cast<std::int8_t>(number);
      ASSERT_EQ(assigned.val, h.val);
      ASSERT_EQ(op::fp16_t(static_cast<std::int8_t>(number)).val, h.val);
    }
    if (number >= 0 && number < 256) {
      assigned = static_cast<std::uint8_t>(number);
      ASSERT_EQ(assigned.val, h.val);
      ASSERT_EQ(op::fp16_t(static_cast<std::uint8_t>(number)).val, h.val);
      ASSERT_EQ(static_cast<std::uint8_t>(h), number);
    }
  }
  EXPECT_EQ(op::fp16_t(2049).val, op::fp16_t(2048).val);
  EXPECT_EQ(op::fp16_t(2051).val, op::fp16_t(2052).val);
  EXPECT_EQ(op::fp16_t(std::numeric_limits<std::uint64_t>::max()).val, 0x7C00);
  EXPECT_EQ(op::fp16_t(std::numeric_limits<std::int64_t>::min()).val, 0xFC00);
}

// Every number of a coarse sample with every number of another: each operation is the exact result
// rounded once.
TEST(Fp16, ArithmeticRoundsOnce) {
  for (unsigned a = 0; a < 0x10000; a += 97) {
    for (unsigned b = 0; b < 0x10000; b += 389) {
      const op::fp16_t x = half(a), y = half(b);
      const double u = half_value(static_cast<std::uint16_t>(a));
      const double v = half_value(static_cast<std::uint16_t>(b));
      const auto expect = [](op::fp16_t got, double exact) {
        ASSERT_TRUE(same(static_cast<double>(got), half_value(half_bits(exact))));
      };
      expect(x + y, u + v);
      expect(x - y, u - v);
      expect(x * y, u * v);
      expect(x / y, u / v);
      op::fp16_t z = x;
      z += y;
      expect(z, u + v);
      z = x;
      z -= y;
      expect(z, u - v);
      z = x;
      z *= y;
      expect(z, u * v);
      z = x;
      z /= y;
      expect(z, u / v);
      ASSERT_EQ(x == y, u == v);
      ASSERT_EQ(x != y, u != v);
      ASSERT_EQ(x < y, u < v);
      ASSERT_EQ(x <= y, u <= v);
      ASSERT_EQ(x > y, u > v);
      ASSERT_EQ(x >= y, u >= v);
    }
  }
}

op::bfloat16 brain(unsigned bits) {
  op::bfloat16 b;
  b.value = static_cast<std::uint16_t>(bits);
  return b;
}

TEST(BFloat16, EveryBitPatternConvertsToItsValue) {
  ASSERT_EQ(sizeof(op::bfloat16), 2u);
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    ASSERT_TRUE(
        same(static_cast<float>(brain(bits)), bfloat16_value(static_cast<std::uint16_t>(bits))))
        << bits;
  }
}

TEST(BFloat16, EveryRoundingBoundaryRoundsToNearestEven) {
  for (unsigned bits = 0; bits < 0x7F80; ++bits) {
    const double low = bfloat16_value(static_cast<std::uint16_t>(bits));
    const double high = bits + 1 == 0x7F80 ? std::ldexp(1.0, 128)
                                           : bfloat16_value(static_cast<std::uint16_t>(bits + 1));
    const double tie = (low + high) / 2;
    const auto narrow_tie = static_cast<float>(tie);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    for (unsigned sign : {0u, 0x8000u}) {
      const float s = sign != 0 ? -1.0F : 1.0F;
      ASSERT_EQ(op::bfloat16(s * static_cast<float>(low)).value, bits | sign);
      ASSERT_EQ(op::bfloat16(s * narrow_tie).value, even | sign) << tie;
      ASSERT_EQ(op::bfloat16(s * std::nextafterf(narrow_tie, 0.0F)).value, bits | sign) << tie;
      ASSERT_EQ(op::bfloat16(s * std::nextafterf(narrow_tie, INFINITY)).value, (bits + 1) | sign);
    }
  }
  EXPECT_EQ(op::bfloat16(std::numeric_limits<float>::max()).value, 0x7F80);
  EXPECT_EQ(op::bfloat16(NAN).value, 0x7FC0);
}

TEST(BFloat16, IsMadeOfBitsAndConvertsBack) {
  EXPECT_EQ(op::bfloat16().value, 0);
  for (unsigned bits = 0; bits < 0x10000; bits += 7) {
    const op::bfloat16 b(static_cast<std::uint16_t>(bits), op::bfloat16::from_bits());
    ASSERT_EQ(b.value, bits);
    const double expected = bfloat16_value(static_cast<std::uint16_t>(bits));
    ASSERT_TRUE(same(static_cast<double>(b), expected)) << bits;
    ASSERT_EQ(static_cast<bool>(b), !(expected == 0)) << bits;
  }
  for (int number = -256; number <= 256; ++number) {
    const op::bfloat16 b(number);
    ASSERT_EQ(static_cast<float>(b), static_cast<float>(number));
    ASSERT_EQ(static_cast<std::int32_t>(b), number);
    ASSERT_EQ(static_cast<std::int64_t>(b), number);
  }
  EXPECT_EQ(op::bfloat16(static_cast<std::uint16_t>(2)).value, 0x4000) << "a number, not bits";
  EXPECT_EQ(op::bfloat16(1 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40)).value, 0x3F81)
      << "a double is rounded once";
}

TEST(BFloat16, ArithmeticRoundsOnce) {
  for (unsigned a = 0; a < 0x10000; a += 971) {
    for (unsigned b = 0; b < 0x10000; b += 389) {
      const op::bfloat16 x = brain(a), y = brain(b);
      const double u = bfloat16_value(static_cast<std::uint16_t>(a));
      const double v = bfloat16_value(static_cast<std::uint16_t>(b));
      const auto expect = [](op::bfloat16 got, double exact) {
        ASSERT_TRUE(same(static_cast<float>(got), bfloat16_value(bfloat16_bits(exact))));
      };
      expect(x + y, u + v);
      expect(x - y, u - v);
      expect(x * y, u * v);
      expect(x / y, u / v);
      ASSERT_EQ(x == y, u == v);
      ASSERT_EQ(x < y, u < v);
      ASSERT_EQ(x >= y, u >= v);
    }
  }
}

TEST(BFloat16, FromFp16) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const double value = half_value(static_cast<std::uint16_t>(bits));
    ASSERT_TRUE(same(static_cast<float>(static_cast<op::bfloat16>(half(bits))),
                     bfloat16_value(bfloat16_bits(value))))
        << bits;
  }
}

}  // namespace
}  // namespace ascend_test
