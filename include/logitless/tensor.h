// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "logitless/export.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

enum class DType : uint8_t { f32 = 0, f16 = 1, bf16 = 2, i32 = 3, i64 = 4, u8 = 5 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::f16:
      return 2;
    case DType::bf16:
      return 2;
    case DType::i32:
      return 4;
    case DType::i64:
      return 8;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
  }
  return "?";
}

// Storage of the 16-bit types, with conversions that round to nearest even; NaN stays NaN.
// Always inlined: a copy compiled for one instruction set must not be linked into code for another.
struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;
  [[gnu::always_inline]] explicit constexpr bfloat16(float value) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) | 0x0040u);  // quiet, sign kept
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  [[gnu::always_inline]] explicit constexpr operator float() const {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
};

struct float16 {
  uint16_t bits = 0;

  float16() = default;
  [[gnu::always_inline]] explicit constexpr float16(float value) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
      half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // normal: 2^-14 and above
      half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    } else if (magnitude > 0x33000000u) {  // subnormal: above 2^-25, which ties to zero
      const uint32_t shift = 126u - (magnitude >> 23);
      const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const uint32_t rest = mantissa & ((1u << shift) - 1u);
      const uint32_t half_way = 1u << (shift - 1u);
      half = mantissa >> shift;
      half += (rest > half_way || (rest == half_way && (half & 1u))) ? 1u : 0u;
    }
    bits = static_cast<uint16_t>(sign | half);
  }
  [[gnu::always_inline]] explicit constexpr operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 31u) return __builtin_bit_cast(float, sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0u) {
      const float value = static_cast<float>(mantissa) * 0x1p-24f;
      return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, value));
    }
    return __builtin_bit_cast(float, sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
};

template <typename T>
concept Element = std::same_as<T, float> || std::same_as<T, float16> || std::same_as<T, bfloat16> ||
    std::same_as<T, int32_t> || std::same_as<T, int64_t> || std::same_as<T, uint8_t>;

template <Element T>
constexpr DType dtype_of() {
  if constexpr (std::same_as<T, float>) return DType::f32;
  if constexpr (std::same_as<T, float16>) return DType::f16;
  if constexpr (std::same_as<T, bfloat16>) return DType::bf16;
  if constexpr (std::same_as<T, int32_t>) return DType::i32;
  if constexpr (std::same_as<T, int64_t>) return DType::i64;
  if constexpr (std::same_as<T, uint8_t>) return DType::u8;
}

// Views do not own. Strides are in elements and never negative; an input may have zero strides.
// data may be null when the view has no element.
struct VectorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t size = 0;
  int64_t stride = 1;
};

struct ConstVectorView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t size = 0;
  int64_t stride = 1;

  constexpr ConstVectorView() = default;
  constexpr ConstVectorView(const void* from, DType type, int64_t count, int64_t step = 1)
      : data(from), dtype(type), size(count), stride(step) {}
  constexpr ConstVectorView(const VectorView& v)
      : data(v.data), dtype(v.dtype), size(v.size), stride(v.stride) {}
};

struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

struct ConstMatrixView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;

  constexpr ConstMatrixView() = default;
  constexpr ConstMatrixView(const void* from, DType type, int64_t row_count, int64_t col_count,
                            int64_t row_step, int64_t col_step = 1)
      : data(from),
        dtype(type),
        rows(row_count),
        cols(col_count),
        row_stride(row_step),
        col_stride(col_step) {}
  constexpr ConstMatrixView(const MatrixView& m)
      : data(m.data),
        dtype(m.dtype),
        rows(m.rows),
        cols(m.cols),
        row_stride(m.row_stride),
        col_stride(m.col_stride) {}
};

// target_mask: 1 = the target is outside this shard. Two layouts:
// packed_lsb_first: token b is bit b % 8 of byte b / 8; (size + 7) / 8 bytes; padding bits are
//                   never read, and written as if the target were id 0.
// byte_per_token:   0 or not 0, one byte per token.
enum class MaskLayout : uint8_t { packed_lsb_first = 0, byte_per_token = 1 };

struct MaskView {
  void* data = nullptr;
  int64_t size = 0;  // tokens
  MaskLayout layout = MaskLayout::packed_lsb_first;
  int64_t stride = 1;  // in bytes
};

struct ConstMaskView {
  const void* data = nullptr;
  int64_t size = 0;
  MaskLayout layout = MaskLayout::packed_lsb_first;
  int64_t stride = 1;

  constexpr ConstMaskView() = default;
  constexpr ConstMaskView(const void* from, int64_t tokens,
                          MaskLayout kind = MaskLayout::packed_lsb_first, int64_t step = 1)
      : data(from), size(tokens), layout(kind), stride(step) {}
  constexpr ConstMaskView(const MaskView& m)
      : data(m.data), size(m.size), layout(m.layout), stride(m.stride) {}
};

// Views of contiguous buffers.
template <Element T>
constexpr VectorView vector_view(std::span<T> v) {
  return {v.data(), dtype_of<T>(), static_cast<int64_t>(v.size()), 1};
}
template <Element T>
constexpr ConstVectorView vector_view(std::span<const T> v) {
  return {v.data(), dtype_of<T>(), static_cast<int64_t>(v.size()), 1};
}
template <Element T>
constexpr MatrixView matrix_view(T* data, int64_t rows, int64_t cols) {
  return {data, dtype_of<T>(), rows, cols, cols, 1};
}
template <Element T>
constexpr ConstMatrixView matrix_view(const T* data, int64_t rows, int64_t cols) {
  return {data, dtype_of<T>(), rows, cols, cols, 1};
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
