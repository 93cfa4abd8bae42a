// SPDX-License-Identifier: Apache-2.0
// exp for one vector, within 2 ulp of the exact value for every float.
//
//   n = round(x / ln 2), r = x - n ln 2 (two-step, r in [-0.347, 0.347]), exp(x) = 2^n p(r)
//
// p is a minimax polynomial of degree 6 (relative error 2^-27.9 before rounding; its first two
// coefficients are exactly 1). ln 2 is split so that n * kLn2Hi is exact for |n| <= 2^9. The last
// step scales by 2^n with one rounding, also into the subnormals. x is clamped to [-105, 89]:
// outside, the result is 0 or infinity anyway, and -inf would make r a NaN. The clamp keeps NaN.

#include "cpu/constants.h"

namespace {

template <class V>
[[gnu::always_inline]] inline typename V::F exp_vector(typename V::F x) {
  using F = typename V::F;
  x = V::clamp_keep_nan(x, -105.0f, 89.0f);
  const F magic = V::set1(0x1.8p23f);  // adding it rounds to an integer, kept in the low bits
  const F shifted = V::fma(x, V::set1(0x1.715476p+0f), magic);
  const F n = V::sub(shifted, magic);
  F r = V::fma(n, V::set1(-logitless::cpu::kLn2Hi), x);
  r = V::fma(n, V::set1(-logitless::cpu::kLn2Lo), r);
  F p = V::set1(logitless::cpu::kExpCoefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 7; ++i) p = V::fma(p, r, V::set1(logitless::cpu::kExpCoefficients[i]));
  return V::scale_by_power_of_two(p, n, shifted);
}

}  // namespace
