// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "logitless/tensor.h"
#include "tests/support/guarded_buffer.h"

namespace logitless::test {

// How a matrix lies in memory, in elements.
struct Layout {
  bool transposed = false;  // columns are contiguous instead of rows
  int64_t gap = 0;          // unused elements behind each contiguous run
  int64_t step = 1;         // distance of neighbours within a run
  int64_t offset = 0;       // unused elements before the first
  bool zero_rows = false;   // row stride 0: every row is the same memory
  bool zero_cols = false;   // column stride 0

  static Layout contiguous() { return {}; }
};
// One of each kind, contiguous first.
std::vector<Layout> all_layouts();

// A tensor in guarded memory, filled with NaN (or -1) until it is set. The elements between the
// strides must stay as they were: damage() tells.
class TestTensor {
 public:
  TestTensor() = default;
  static TestTensor matrix(DType dtype, int64_t rows, int64_t cols, const Layout& layout = {});
  static TestTensor vector(DType dtype, int64_t size, int64_t stride = 1, int64_t offset = 0);

  // The same elements, contiguous.
  TestTensor contiguous_copy() const;

  MatrixView matrix_view() const {
    return {first(), dtype_, rows_, cols_, row_stride_, col_stride_};
  }
  VectorView vector_view() const { return {first(), dtype_, rows_, row_stride_}; }
  // Of u8, one element per byte of the mask.
  MaskView mask_view(MaskLayout layout, int64_t tokens) const {
    return {first(), tokens, layout, row_stride_};
  }

  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // Rounds to nearest even.
  void set(int64_t row, int64_t col, double value);
  void set(int64_t i, double value) { set(i, 0, value); }
  void set_index(int64_t i, int64_t value);
  double get(int64_t row, int64_t col = 0) const;
  int64_t get_index(int64_t i) const;
  uint64_t bits(int64_t row, int64_t col = 0) const;
  std::vector<uint64_t> all_bits() const;
  std::vector<uint64_t> row_bits(int64_t row) const;
  std::vector<double> values() const;

  // Every element still 0xff, as made.
  bool untouched() const;
  // Empty, or what was written outside the elements.
  std::string damage() const;

 private:
  static TestTensor make(DType dtype, int64_t rows, int64_t cols, int64_t row_stride,
                         int64_t col_stride, int64_t offset);
  std::byte* first() const { return buffer_.data() + offset_ * size_of(dtype_); }
  std::byte* at(int64_t row, int64_t col) const {
    return first() + (row * row_stride_ + col * col_stride_) * size_of(dtype_);
  }

  GuardedBuffer buffer_;
  DType dtype_ = DType::f32;
  int64_t rows_ = 0, cols_ = 0, row_stride_ = 0, col_stride_ = 1, offset_ = 0;
};

}  // namespace logitless::test
