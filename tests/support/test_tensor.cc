// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace logitless::test {

std::vector<Layout> all_layouts() {
  return {Layout{},
          Layout{.gap = 5},
          Layout{.step = 2},
          Layout{.offset = 3},
          Layout{.transposed = true},
          Layout{.transposed = true, .gap = 3, .offset = 1},
          Layout{.transposed = true, .gap = 1, .step = 3}};
}

TestTensor TestTensor::make(DType dtype, int64_t rows, int64_t cols, int64_t row_stride,
                            int64_t col_stride, int64_t offset) {
  TestTensor t;
  t.dtype_ = dtype;
  t.rows_ = rows;
  t.cols_ = cols;
  t.row_stride_ = row_stride;
  t.col_stride_ = col_stride;
  t.offset_ = offset;
  const bool empty = rows == 0 || cols == 0;
  const int64_t elements =
      empty ? offset : offset + (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
  t.buffer_ = GuardedBuffer(elements * size_of(dtype), size_of(dtype));
  return t;
}

TestTensor TestTensor::matrix(DType dtype, int64_t rows, int64_t cols, const Layout& layout) {
  const int64_t run = layout.transposed ? rows : cols;
  int64_t inner = layout.step;
  int64_t outer = run * inner + layout.gap;
  int64_t row_stride = layout.transposed ? inner : outer;
  int64_t col_stride = layout.transposed ? outer : inner;
  if (layout.zero_rows) row_stride = 0;
  if (layout.zero_cols) col_stride = 0;
  return make(dtype, rows, cols, row_stride, col_stride, layout.offset);
}

TestTensor TestTensor::vector(DType dtype, int64_t size, int64_t stride, int64_t offset) {
  return make(dtype, size, 1, stride, 1, offset);
}

TestTensor TestTensor::contiguous_copy() const {
  TestTensor copy = make(dtype_, rows_, cols_, cols_, 1, 0);
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < cols_; ++c) {
      std::memcpy(copy.at(r, c), at(r, c), static_cast<size_t>(size_of(dtype_)));
    }
  }
  return copy;
}

void TestTensor::set(int64_t row, int64_t col, double value) {
  std::byte* p = at(row, col);
  const auto f = static_cast<float>(value);
  switch (dtype_) {
    case DType::f32:
      std::memcpy(p, &f, sizeof f);
      break;
    case DType::f16: {
      const float16 h(f);
      std::memcpy(p, &h, sizeof h);
      break;
    }
    case DType::bf16: {
      const bfloat16 h(f);
      std::memcpy(p, &h, sizeof h);
      break;
    }
    case DType::i32:
    case DType::i64:
    case DType::u8:
      set_index(row, static_cast<int64_t>(value));
      break;
  }
}

void TestTensor::set_index(int64_t i, int64_t value) {
  std::byte* p = at(i, 0);
  if (dtype_ == DType::i32) {
    const auto v = static_cast<int32_t>(value);
    std::memcpy(p, &v, sizeof v);
  } else if (dtype_ == DType::i64) {
    std::memcpy(p, &value, sizeof value);
  } else {
    const auto v = static_cast<uint8_t>(value);
    std::memcpy(p, &v, sizeof v);
  }
}

double TestTensor::get(int64_t row, int64_t col) const {
  const std::byte* p = at(row, col);
  switch (dtype_) {
    case DType::f32: {
      float v;
      std::memcpy(&v, p, sizeof v);
      return v;
    }
    case DType::f16: {
      float16 v;
      std::memcpy(&v, p, sizeof v);
      return static_cast<float>(v);
    }
    case DType::bf16: {
      bfloat16 v;
      std::memcpy(&v, p, sizeof v);
      return static_cast<float>(v);
    }
    case DType::i32:
    case DType::i64:
    case DType::u8:
      return static_cast<double>(get_index(row));
  }
  return 0.0;
}

int64_t TestTensor::get_index(int64_t i) const {
  const uint64_t raw = bits(i, 0);
  if (dtype_ == DType::i32) return static_cast<int32_t>(raw);
  return static_cast<int64_t>(raw);
}

uint64_t TestTensor::bits(int64_t row, int64_t col) const {
  uint64_t raw = 0;
  std::memcpy(&raw, at(row, col), static_cast<size_t>(size_of(dtype_)));
  return raw;
}

std::vector<uint64_t> TestTensor::all_bits() const {
  std::vector<uint64_t> result;
  result.reserve(static_cast<size_t>(rows_ * cols_));
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < cols_; ++c) result.push_back(bits(r, c));
  }
  return result;
}

std::vector<uint64_t> TestTensor::row_bits(int64_t row) const {
  std::vector<uint64_t> result;
  for (int64_t c = 0; c < cols_; ++c) result.push_back(bits(row, c));
  return result;
}

std::vector<double> TestTensor::values() const {
  std::vector<double> result;
  result.reserve(static_cast<size_t>(rows_ * cols_));
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < cols_; ++c) result.push_back(get(r, c));
  }
  return result;
}

bool TestTensor::untouched() const {
  const auto bytes = buffer_.span();
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0xff}; });
}

std::string TestTensor::damage() const {
  std::string outside = buffer_.damage();
  if (!outside.empty()) return outside;
  const auto bytes = buffer_.span();
  const int64_t width = size_of(dtype_);
  if (rows_ * cols_ * width == buffer_.size()) return {};
  std::vector<bool> is_element(bytes.size() / static_cast<size_t>(width), false);
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t c = 0; c < cols_; ++c) {
      is_element[static_cast<size_t>(offset_ + r * row_stride_ + c * col_stride_)] = true;
    }
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (!is_element[i / static_cast<size_t>(width)] && bytes[i] != std::byte{0xff}) {
      return "the gap at byte " + std::to_string(i) + " of " + std::to_string(bytes.size()) +
             " was written";
    }
  }
  return {};
}

}  // namespace logitless::test
