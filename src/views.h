// SPDX-License-Identifier: Apache-2.0
// Where views meet panels: addresses, scalars of any dtype, packing from any stride. Strides are
// resolved here, block by block, so no operand is ever copied whole.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "logitless/options.h"
#include "logitless/tensor.h"
#include "plan.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

inline const std::byte* at(const ConstMatrixView& m, int64_t row, int64_t col) {
  return static_cast<const std::byte*>(m.data) +
         (row * m.row_stride + col * m.col_stride) * size_of(m.dtype);
}
inline std::byte* at(const MatrixView& m, int64_t row, int64_t col) {
  return static_cast<std::byte*>(m.data) +
         (row * m.row_stride + col * m.col_stride) * size_of(m.dtype);
}

inline float f32_at(const ConstVectorView& v, int64_t i) {
  return static_cast<const float*>(v.data)[i * v.stride];
}
inline void set_f32(const VectorView& v, int64_t i, float value) {
  static_cast<float*>(v.data)[i * v.stride] = value;
}
inline bool byte_at(const ConstVectorView& v, int64_t i) {
  return static_cast<const uint8_t*>(v.data)[i * v.stride] != 0;
}
inline int64_t integer_at(const ConstVectorView& v, int64_t i) {
  return v.dtype == DType::i32 ? int64_t{static_cast<const int32_t*>(v.data)[i * v.stride]}
                               : static_cast<const int64_t*>(v.data)[i * v.stride];
}
// Whether a row counts in the loss.
inline bool row_counts(const RowFilter& rows, const ConstVectorView& target, int64_t b) {
  if (rows.counts && !byte_at(*rows.counts, b)) return false;
  return !rows.ignore_index || integer_at(target, b) != *rows.ignore_index;
}
inline void set_integer(const VectorView& v, int64_t i, int64_t value) {
  if (v.dtype == DType::i32) {
    static_cast<int32_t*>(v.data)[i * v.stride] = static_cast<int32_t>(value);
  } else {
    static_cast<int64_t*>(v.data)[i * v.stride] = value;
  }
}
inline bool mask_at(const ConstMaskView& m, int64_t i) {
  const auto* bytes = static_cast<const uint8_t*>(m.data);
  if (m.layout == MaskLayout::byte_per_token) return bytes[i * m.stride] != 0;
  return ((bytes[i / 8 * m.stride] >> (i % 8)) & 1) != 0;
}

// Writes a whole mask, bit(i) for token i; the padding bits of a packed mask are `padding`.
template <class Bit>
void write_mask(const MaskView& m, bool padding, const Bit& bit) {
  auto* bytes = static_cast<uint8_t*>(m.data);
  if (m.layout == MaskLayout::byte_per_token) {
    for (int64_t i = 0; i < m.size; ++i) bytes[i * m.stride] = bit(i) ? 1 : 0;
    return;
  }
  for (int64_t i = 0; i < m.size; i += 8) {
    unsigned value = 0;
    for (int64_t j = 0; j < 8; ++j) {
      const bool set = i + j < m.size ? bit(i + j) : padding;
      value |= (set ? 1u : 0u) << j;
    }
    bytes[i / 8 * m.stride] = static_cast<uint8_t>(value);
  }
}

// In an index: a row that takes part in nothing. It is packed as zeros and never written.
inline constexpr int64_t kNoRow = -1;

// Rows of a matrix chosen by an index, or all of them in order from `first`.
struct RowSelection {
  const ConstMatrixView& matrix;
  const int64_t* index = nullptr;
  int64_t first = 0;
  int64_t row(int64_t i) const { return index != nullptr ? index[i] : first + i; }
};

// Copies `count` elements of one row from a column on into unit stride.
inline void gather(const ConstMatrixView& m, int64_t row, int64_t col, int64_t count, void* dst) {
  const std::byte* p = at(m, row, col);
  const int64_t element = size_of(m.dtype);
  auto* out = static_cast<std::byte*>(dst);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(out + i * element, p + i * m.col_stride * element, static_cast<size_t>(element));
  }
}

// Rows [begin, begin + count) of the selection, all H columns -> one panel
// (GemmKernels::pack_rows).
inline void pack_row_panel(const Target& target, const RowSelection& rows, int64_t begin, int count,
                           int width, float* dst) {
  const cpu::GemmKernels& g = *target.gemm;
  const ConstMatrixView& m = rows.matrix;
  constexpr int kMaxWidth = 64;
  const void* pointers[kMaxWidth];
  if (m.col_stride == 1 || m.cols <= 1) {
    for (int i = 0; i < count; ++i) pointers[i] = at(m, rows.row(begin + i), 0);
    g.pack_rows(target.source, pointers, count, width, m.cols, dst);
    return;
  }
  constexpr int64_t kBlock = 128;  // even: a pair never straddles two blocks
  alignas(64) std::byte staged[kMaxWidth][kBlock * 4];
  for (int i = 0; i < count; ++i) pointers[i] = staged[i];
  for (int64_t k0 = 0; k0 < m.cols; k0 += kBlock) {
    const int64_t k = m.cols - k0 < kBlock ? m.cols - k0 : kBlock;
    for (int i = 0; i < count; ++i) gather(m, rows.row(begin + i), k0, k, staged[i]);
    g.pack_rows(target.source, pointers, count, width, k, dst + k0 / g.k_unit * width);
  }
}

// What a tile may fetch for the panel that is packed next, `rows` rows of m from `first` on: part
// `part` of `parts` equal ones, `k_units` steps each. A hint: the rows need not exist.
inline cpu::Ahead ahead_of_rows(const void* next_a, const ConstMatrixView& m, int64_t first,
                                int64_t rows, int64_t part, int64_t parts, int64_t k_units) {
  const int64_t row_bytes = m.row_stride * size_of(m.dtype);
  const int64_t step = rows * row_bytes / std::max<int64_t>(1, k_units * parts);
  const auto begin = reinterpret_cast<uintptr_t>(m.data);
  const auto offset = static_cast<uintptr_t>(first * row_bytes + part * k_units * step);
  return {next_a, reinterpret_cast<const void*>(begin + offset), step};
}

inline constexpr int64_t kPackDepth = 64;  // rows of k packed together: even, and L1-sized

// Rows [k0, k0 + k) of the selection (k <= kPackDepth, k0 even), columns [col, col + count) -> the
// units k0 / k_unit ... of one panel (GemmKernels::pack_cols). dst is the panel's start.
inline void pack_col_block(const Target& target, const RowSelection& rows, int64_t k0, int64_t k,
                           int64_t col, int count, int width, float* dst) {
  const cpu::GemmKernels& g = *target.gemm;
  const ConstMatrixView& m = rows.matrix;
  const void* pointers[kPackDepth];
  float* out = dst + k0 / g.k_unit * width;
  constexpr int kMaxWidth = 32;
  static constexpr std::byte kZeros[kMaxWidth * 4] = {};
  if (m.col_stride == 1 || count == 1) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t row = rows.row(k0 + i);
      pointers[i] = row == kNoRow ? kZeros : at(m, row, col);
    }
    g.pack_cols(target.source, pointers, k, count, width, out);
    return;
  }
  alignas(64) std::byte staged[kPackDepth][kMaxWidth * 4];
  for (int64_t i = 0; i < k; ++i) {
    const int64_t row = rows.row(k0 + i);
    if (row != kNoRow) gather(m, row, col, count, staged[i]);
    pointers[i] = row == kNoRow ? kZeros : staged[i];
  }
  g.pack_cols(target.source, pointers, k, count, width, out);
}

// `count` values of one row of an output or input, to and from fp32, any stride.
inline void load_row(const cpu::Kernels& kernels, const ConstMatrixView& m, int64_t row,
                     int64_t col, int64_t count, float* dst) {
  if (m.col_stride == 1) return kernels.load(m.dtype, at(m, row, col), count, dst);
  for (int64_t i = 0; i < count; ++i) kernels.load(m.dtype, at(m, row, col + i), 1, dst + i);
}
inline void store_row(const cpu::Kernels& kernels, const MatrixView& m, int64_t row, int64_t col,
                      int64_t count, const float* src) {
  if (m.col_stride == 1) return kernels.store(m.dtype, src, count, at(m, row, col));
  for (int64_t i = 0; i < count; ++i) kernels.store(m.dtype, src + i, 1, at(m, row, col + i));
}
inline void zero_row(const MatrixView& m, int64_t row) {
  if (m.cols == 0) return;
  const auto element = static_cast<size_t>(size_of(m.dtype));
  if (m.col_stride == 1) {
    std::memset(at(m, row, 0), 0, static_cast<size_t>(m.cols) * element);
    return;
  }
  for (int64_t c = 0; c < m.cols; ++c) std::memset(at(m, row, c), 0, element);
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
