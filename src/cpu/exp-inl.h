// SPDX-License-Identifier: Apache-2.0
// exp for one vector, within 2 ulp of the exact value for every float.
//
//   n = round(x / ln 2), r = x - n ln 2 (two-step, r in [-0.347, 0.347]), exp(x) = 2^n p(r)
//
// p is a minimax polynomial of degree 6 (relative error 2^-27.9 before rounding; its first two
// coefficients are exactly 1). ln 2 is split so that n * kLn2Hi is exact for |n| <= 2^9. The last
// step scales by 2^n with one rounding, also into the subnormals. Beyond [-105, 89] the result is 0
// or infinity anyway, and an infinite x would make r a NaN: each level clamps x or selects the 0
// afterwards, whatever is cheaper there. Both keep NaN.

#pragma once

#include "cpu/constants.h"

namespace {

// kNonPositive: x <= 0 or NaN is known, as below a maximum; the bits are the same.
template <class V, bool kNonPositive = false>
[[gnu::always_inline]] inline typename V::F exp_vector(typename V::F argument) {
  using F = typename V::F;
  const F x = V::template exp_argument<kNonPositive>(argument);
  const F magic = V::set1(0x1.8p23f);  // adding it rounds to an integer, kept in the low bits
  const F shifted = V::fma(x, V::set1(0x1.715476p+0f), magic);
  const F n = V::sub(shifted, magic);
  F r = V::fma(n, V::set1(-logitless::cpu::kLn2Hi), x);
  r = V::fma(n, V::set1(-logitless::cpu::kLn2Lo), r);
  F p = V::set1(logitless::cpu::kExpCoefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 7; ++i) p = V::fma(p, r, V::set1(logitless::cpu::kExpCoefficients[i]));
  return V::exp_result(p, n, shifted, x);
}

}  // namespace
