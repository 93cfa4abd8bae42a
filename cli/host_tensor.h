// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::cli {

// Uninitialised memory, 64-byte aligned as workspaces must be. Throws std::bad_alloc.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);

  std::byte* data() { return bytes_.get(); }
  const std::byte* data() const { return bytes_.get(); }
  int64_t size() const { return size_; }
  std::span<std::byte> span() { return {bytes_.get(), static_cast<size_t>(size_)}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  int64_t size_ = 0;
};

// A contiguous row-major tensor that owns its memory.
class HostTensor {
 public:
  HostTensor() = default;
  // Uninitialised. The caller has checked that the product of shape and element size fits int64.
  HostTensor(DType dtype, std::vector<int64_t> shape);

  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t elements() const;
  int64_t bytes() const { return elements() * size_of(dtype_); }
  std::byte* data() { return buffer_.data(); }
  const std::byte* data() const { return buffer_.data(); }

  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(buffer_.data());
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(buffer_.data());
  }

  // Element i as float, for the operand types.
  float float_at(int64_t i) const;
  // Element i, for i32 and i64.
  int64_t integer_at(int64_t i) const;

  // Rank 1 and rank 2.
  VectorView vector();
  ConstVectorView vector() const;
  MatrixView matrix();
  ConstMatrixView matrix() const;
  // Rows [begin, end) of a matrix.
  MatrixView rows(int64_t begin, int64_t end);
  ConstMatrixView rows(int64_t begin, int64_t end) const;

  // A copy whose elements are rounded to nearest even; f32, f16, bf16 only.
  HostTensor converted(DType dtype) const;
  void fill_zero();

 private:
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_;
  Buffer buffer_;
};

// Element i of a buffer of an operand type as float.
float load_float(const std::byte* data, DType dtype, int64_t i);
void store_float(std::byte* data, DType dtype, int64_t i, float value);

// The packed target_mask: token b is bit b % 8 of byte b / 8; 1 = outside.
bool mask_bit(const HostTensor& packed, int64_t b);
int64_t packed_mask_bytes(int64_t tokens);

}  // namespace logitless::cli
