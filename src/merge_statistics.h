// SPDX-License-Identifier: Apache-2.0
// The one merge: of segments within a row, and of shards.
#pragma once

#include <limits>

#include "cpu/kernels.h"
#include "logitless/export.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

struct RowStatistics {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
};

// The exponential of the kernels for one value, so that merging depends on the ISA only.
inline float exp_one(const cpu::Kernels& kernels, float x) {
  float y;
  kernels.exp(&x, 1, &y);
  return y;
}

// max(a, b), and both sums rebased to it. (-inf) - (-inf) is never formed: a part that has seen
// nothing (max -inf) has sum 0 and adds nothing. A NaN on either side makes both numbers NaN; two
// maxima of +inf keep it, with the sum NaN that each of them already has.
// Error of one merge: 4 * 2^-24 relative (exp within 2 ulp, one product, one addition).
inline RowStatistics merge_statistics(const cpu::Kernels& kernels, RowStatistics a,
                                      RowStatistics b) {
  if (a.max != a.max) return a;
  if (b.max != b.max) return b;
  if (b.max == a.max) return {a.max, a.sum + b.sum};
  if (b.max < a.max) return {a.max, a.sum + b.sum * exp_one(kernels, b.max - a.max)};
  return {b.max, a.sum * exp_one(kernels, a.max - b.max) + b.sum};
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
