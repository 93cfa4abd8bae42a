// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <numeric>

namespace logitless {

// Whether two elements of a [rows, cols] view lie at one address: i row steps equal j column steps
// for some 0 < i < rows, 0 < j < cols. Strides are not negative; the least such i and j are
// col_stride / g and row_stride / g, g their greatest common divisor.
constexpr bool elements_overlap(int64_t rows, int64_t cols, int64_t row_stride,
                                int64_t col_stride) {
  if (rows == 0 || cols == 0) return false;
  if ((rows > 1 && row_stride == 0) || (cols > 1 && col_stride == 0)) return true;
  if (rows == 1 || cols == 1) return false;
  const int64_t g = std::gcd(row_stride, col_stride);
  return col_stride / g < rows && row_stride / g < cols;
}

}  // namespace logitless
