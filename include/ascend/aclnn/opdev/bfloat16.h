// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACLNN_OPDEV_BFLOAT16_H
#define LOGITLESS_ASCEND_ACLNN_OPDEV_BFLOAT16_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace op {
namespace logitless_detail {

// Any number but NaN, rounded once, to nearest even, to sign, exponent and mantissa bits of a
// 16-bit format; overflow is infinity, tiny values become subnormal.
template <int kExponentBits, int kMantissaBits>
inline uint16_t round_to_16_bits(double number) {
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 63) << 15);
  const int infinity_exponent = (1 << kExponentBits) - 1;
  const uint16_t infinity = static_cast<uint16_t>(sign | (infinity_exponent << kMantissaBits));
  const int double_exponent = static_cast<int>((bits >> 52) & 0x7ff);
  if (double_exponent == 0) return sign;  // zero, or far below the least subnormal
  // Biased exponent in the narrow format; 0 and below is subnormal. Infinity is above all.
  const int exponent = double_exponent - 1023 + ((1 << (kExponentBits - 1)) - 1);
  if (exponent >= infinity_exponent) return infinity;
  const uint64_t significand = (bits & 0xfffffffffffffULL) | (1ULL << 52);
  const int shift = 52 - kMantissaBits + (exponent < 1 ? 1 - exponent : 0);
  if (shift >= 54) return sign;
  uint64_t rounded = significand >> shift;
  const uint64_t rest = significand & ((1ULL << shift) - 1);
  const uint64_t half_way = 1ULL << (shift - 1);
  if (rest > half_way || (rest == half_way && (rounded & 1) != 0)) ++rounded;
  // The leading one of a normal number adds 1 to the exponent field; so may a carry.
  if (exponent >= 1) rounded += static_cast<uint64_t>(exponent - 1) << kMantissaBits;
  return static_cast<uint16_t>(sign | rounded);
}

// Towards zero as C++ does, but limited to the range of Int; NaN is 0.
template <typename Int>
inline Int saturate(double number) {
  if (number != number) return 0;
  if (number <= static_cast<double>(std::numeric_limits<Int>::min())) {
    return std::numeric_limits<Int>::min();
  }
  if (number >= static_cast<double>(std::numeric_limits<Int>::max())) {
    return std::numeric_limits<Int>::max();
  }
  return static_cast<Int>(number);
}

}  // namespace logitless_detail

// Storage of a bfloat16 with conversions; arithmetic rounds once per operation.
struct bfloat16 {
  struct from_bits_t {};
  static constexpr from_bits_t from_bits() { return from_bits_t(); }

  uint16_t value;

  constexpr bfloat16() : value(0) {}
  constexpr bfloat16(uint16_t bits, from_bits_t) : value(bits) {}
  // To nearest even; NaN is 0x7FC0.
  template <typename T, typename std::enable_if<std::is_arithmetic<T>::value, int>::type = 0>
  bfloat16(T number) : value(round(static_cast<double>(number))) {}

  operator float() const {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float number = 0;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
  }
  explicit operator double() const { return static_cast<float>(*this); }
  explicit operator bool() const { return (value & 0x7fff) != 0; }
  template <typename T,
            typename std::enable_if<std::is_integral<T>::value && !std::is_same<T, bool>::value,
                                    int>::type = 0>
  explicit operator T() const {
    return logitless_detail::saturate<T>(static_cast<float>(*this));
  }

  bfloat16 operator-() const {
    return bfloat16(static_cast<uint16_t>(value ^ 0x8000), from_bits());
  }
  bfloat16& operator+=(bfloat16 other) { return *this = *this + other; }
  bfloat16& operator-=(bfloat16 other) { return *this = *this - other; }
  bfloat16& operator*=(bfloat16 other) { return *this = *this * other; }
  bfloat16& operator/=(bfloat16 other) { return *this = *this / other; }
  friend bfloat16 operator+(bfloat16 a, bfloat16 b) { return bfloat16(a.wide() + b.wide()); }
  friend bfloat16 operator-(bfloat16 a, bfloat16 b) { return bfloat16(a.wide() - b.wide()); }
  friend bfloat16 operator*(bfloat16 a, bfloat16 b) { return bfloat16(a.wide() * b.wide()); }
  friend bfloat16 operator/(bfloat16 a, bfloat16 b) { return bfloat16(a.wide() / b.wide()); }
  friend bool operator==(bfloat16 a, bfloat16 b) { return a.wide() == b.wide(); }
  friend bool operator!=(bfloat16 a, bfloat16 b) { return a.wide() != b.wide(); }
  friend bool operator<(bfloat16 a, bfloat16 b) { return a.wide() < b.wide(); }
  friend bool operator<=(bfloat16 a, bfloat16 b) { return a.wide() <= b.wide(); }
  friend bool operator>(bfloat16 a, bfloat16 b) { return a.wide() > b.wide(); }
  friend bool operator>=(bfloat16 a, bfloat16 b) { return a.wide() >= b.wide(); }

 private:
  // 53 bits are more than twice 8 + 2, so rounding the double's result is rounding once.
  double wide() const { return static_cast<float>(*this); }
  static uint16_t round(double number) {
    if (number != number) return 0x7fc0;
    return logitless_detail::round_to_16_bits<8, 7>(number);
  }
};

}  // namespace op

#endif
