// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The one product that the small layers need. Every rank computes all of it, with the same bits.
namespace logitless::train_lm {

// a[i, k] = data[i * row_stride + k * col_stride]: either way round.
struct Factor {
  const float* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

// out[i, j] = start[j] + sum_k a[i, k] b[k, j]   (start null: 0), k ascending for every element, so
// the same bits for any number of threads. Shapes: a [m, k], b [k, n], out [m, n], the latter two
// contiguous.
void multiply(const Factor& a, const float* b, const float* start, int64_t m, int64_t n, int64_t k,
              float* out);

// out [cols, rows] = in [rows, cols], transposed.
void transpose(const float* in, int64_t rows, int64_t cols, float* out);

}  // namespace logitless::train_lm
