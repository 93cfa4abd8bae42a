// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/layers.h"

#include <algorithm>

namespace logitless::train_lm {
namespace {

// Sums held in registers while k runs: 8 of 4 floats each with SSE2, which every x86-64 has.
constexpr int64_t kTileRows = 4;
constexpr int64_t kTileCols = 8;

template <int64_t Rows>
void full_tile(const Factor& a, const float* b, const float* start, int64_t n, int64_t k,
               float* out) {
  float sum[Rows][kTileCols];
  for (int64_t r = 0; r < Rows; ++r) {
    for (int64_t c = 0; c < kTileCols; ++c) sum[r][c] = start == nullptr ? 0.0f : start[c];
  }
  for (int64_t q = 0; q < k; ++q) {
    for (int64_t r = 0; r < Rows; ++r) {
      const float factor = a.data[r * a.row_stride + q * a.col_stride];
      for (int64_t c = 0; c < kTileCols; ++c) sum[r][c] += factor * b[q * n + c];
    }
  }
  for (int64_t r = 0; r < Rows; ++r) {
    for (int64_t c = 0; c < kTileCols; ++c) out[r * n + c] = sum[r][c];
  }
}

void edge_tile(const Factor& a, const float* b, const float* start, int64_t rows, int64_t cols,
               int64_t n, int64_t k, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      float sum = start == nullptr ? 0.0f : start[c];
      for (int64_t q = 0; q < k; ++q) {
        sum += a.data[r * a.row_stride + q * a.col_stride] * b[q * n + c];
      }
      out[r * n + c] = sum;
    }
  }
}

}  // namespace

void multiply(const Factor& a, const float* b, const float* start, int64_t m, int64_t n, int64_t k,
              float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < m; i += kTileRows) {
    const int64_t rows = std::min(kTileRows, m - i);
    const Factor a_tile = {a.data + i * a.row_stride, a.row_stride, a.col_stride};
    for (int64_t j = 0; j < n; j += kTileCols) {
      const int64_t cols = std::min(kTileCols, n - j);
      const float* from = start == nullptr ? nullptr : start + j;
      if (rows == kTileRows && cols == kTileCols) {
        full_tile<kTileRows>(a_tile, b + j, from, n, k, out + i * n + j);
      } else {
        edge_tile(a_tile, b + j, from, rows, cols, n, k, out + i * n + j);
      }
    }
  }
}

void transpose(const float* in, int64_t rows, int64_t cols, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
  }
}

}  // namespace logitless::train_lm
