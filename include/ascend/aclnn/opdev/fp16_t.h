// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACLNN_OPDEV_FP16_T_H
#define LOGITLESS_ASCEND_ACLNN_OPDEV_FP16_T_H

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "bfloat16.h"

namespace op {

// Storage of an IEEE half with conversions; arithmetic rounds once per operation.
struct tagFp16 {
  uint16_t val;

  constexpr tagFp16() : val(0) {}
  // Mind: a uint16_t is the bit pattern here, but a number when assigned.
  constexpr tagFp16(uint16_t bits) : val(bits) {}
  // To nearest even; above 65519.99 is infinity; NaN has all mantissa bits set.
  template <typename T, typename std::enable_if<std::is_arithmetic<T>::value, int>::type = 0>
  tagFp16(T number) : val(round(static_cast<double>(number))) {}
  tagFp16(bfloat16 number) : val(round(static_cast<float>(number))) {}

  template <typename T, typename std::enable_if<std::is_arithmetic<T>::value, int>::type = 0>
  tagFp16& operator=(T number) {
    val = round(static_cast<double>(number));
    return *this;
  }

  operator float() const { return static_cast<float>(toDouble()); }
  operator double() const { return toDouble(); }
  operator bool() const { return (val & 0x7fff) != 0; }
  operator int8_t() const { return toInt8(); }
  operator uint8_t() const { return toUInt8(); }
  operator int16_t() const { return toInt16(); }
  operator uint16_t() const { return toUInt16(); }
  operator int32_t() const { return toInt32(); }
  operator uint32_t() const { return toUInt32(); }
  operator int64_t() const { return toInt64(); }
  operator uint64_t() const { return toUInt64(); }
  operator bfloat16() const { return bfloat16(toDouble()); }

  double toDouble() const {
    const int exponent = (val >> 10) & 0x1f;
    const int mantissa = val & 0x3ff;
    double magnitude = 0;
    if (exponent == 0x1f) {
      magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                                : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
      magnitude = std::ldexp(static_cast<double>(mantissa), -24);
    } else {
      magnitude = std::ldexp(static_cast<double>(mantissa + 1024), exponent - 25);
    }
    return (val & 0x8000) != 0 ? -magnitude : magnitude;
  }
  float toFloat() const { return static_cast<float>(toDouble()); }
  // Towards zero, limited to the type's range; NaN is 0.
  int8_t toInt8() const { return logitless_detail::saturate<int8_t>(toDouble()); }
  uint8_t toUInt8() const { return logitless_detail::saturate<uint8_t>(toDouble()); }
  int16_t toInt16() const { return logitless_detail::saturate<int16_t>(toDouble()); }
  uint16_t toUInt16() const { return logitless_detail::saturate<uint16_t>(toDouble()); }
  int32_t toInt32() const { return logitless_detail::saturate<int32_t>(toDouble()); }
  uint32_t toUInt32() const { return logitless_detail::saturate<uint32_t>(toDouble()); }
  int64_t toInt64() const { return logitless_detail::saturate<int64_t>(toDouble()); }
  uint64_t toUInt64() const { return logitless_detail::saturate<uint64_t>(toDouble()); }

  // 1: plus infinity, -1: minus infinity, 0: neither.
  int IsInf() const {
    if ((val & 0x7fff) != 0x7c00) return 0;
    return (val & 0x8000) != 0 ? -1 : 1;
  }

  tagFp16 operator-() const { return tagFp16(static_cast<uint16_t>(val ^ 0x8000)); }
  tagFp16& operator+=(tagFp16 other) { return *this = *this + other; }
  tagFp16& operator-=(tagFp16 other) { return *this = *this - other; }
  tagFp16& operator*=(tagFp16 other) { return *this = *this * other; }
  tagFp16& operator/=(tagFp16 other) { return *this = *this / other; }
  // A double holds sums and products of halves exactly, and quotients to more than twice 11 + 2
  // bits, so each is rounded once.
  friend tagFp16 operator+(tagFp16 a, tagFp16 b) { return tagFp16(a.toDouble() + b.toDouble()); }
  friend tagFp16 operator-(tagFp16 a, tagFp16 b) { return tagFp16(a.toDouble() - b.toDouble()); }
  friend tagFp16 operator*(tagFp16 a, tagFp16 b) { return tagFp16(a.toDouble() * b.toDouble()); }
  friend tagFp16 operator/(tagFp16 a, tagFp16 b) { return tagFp16(a.toDouble() / b.toDouble()); }
  friend bool operator==(tagFp16 a, tagFp16 b) { return a.toDouble() == b.toDouble(); }
  friend bool operator!=(tagFp16 a, tagFp16 b) { return a.toDouble() != b.toDouble(); }
  friend bool operator<(tagFp16 a, tagFp16 b) { return a.toDouble() < b.toDouble(); }
  friend bool operator<=(tagFp16 a, tagFp16 b) { return a.toDouble() <= b.toDouble(); }
  friend bool operator>(tagFp16 a, tagFp16 b) { return a.toDouble() > b.toDouble(); }
  friend bool operator>=(tagFp16 a, tagFp16 b) { return a.toDouble() >= b.toDouble(); }

 private:
  static uint16_t round(double number) {
    if (number != number) return static_cast<uint16_t>(std::signbit(number) ? 0xffff : 0x7fff);
    return logitless_detail::round_to_16_bits<5, 10>(number);
  }
};
typedef tagFp16 fp16_t;

}  // namespace op

#endif
