// SPDX-License-Identifier: Apache-2.0
#include "cli/host_tensor.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace logitless::cli {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Buffer::Buffer(int64_t bytes)
    : bytes_(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlignment))),
      size_(bytes) {}

void Buffer::Free::operator()(std::byte* bytes) const { ::operator delete(bytes, kAlignment); }

HostTensor::HostTensor(DType dtype, std::vector<int64_t> shape)
    : dtype_(dtype), shape_(std::move(shape)), buffer_(bytes()) {}

int64_t HostTensor::elements() const {
  int64_t product = 1;
  for (const int64_t size : shape_) product *= size;
  return product;
}

float load_float(const std::byte* data, DType dtype, int64_t i) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(data)[i];
  if (dtype == DType::f16) return static_cast<float>(reinterpret_cast<const float16*>(data)[i]);
  return static_cast<float>(reinterpret_cast<const bfloat16*>(data)[i]);
}

void store_float(std::byte* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::f32) reinterpret_cast<float*>(data)[i] = value;
  if (dtype == DType::f16) reinterpret_cast<float16*>(data)[i] = float16(value);
  if (dtype == DType::bf16) reinterpret_cast<bfloat16*>(data)[i] = bfloat16(value);
}

float HostTensor::float_at(int64_t i) const { return load_float(data(), dtype_, i); }

int64_t HostTensor::integer_at(int64_t i) const {
  return dtype_ == DType::i32 ? int64_t{as<int32_t>()[i]} : as<int64_t>()[i];
}

VectorView HostTensor::vector() { return {data(), dtype_, shape_[0], 1}; }
ConstVectorView HostTensor::vector() const { return {data(), dtype_, shape_[0], 1}; }
MatrixView HostTensor::matrix() { return {data(), dtype_, shape_[0], shape_[1], shape_[1], 1}; }
ConstMatrixView HostTensor::matrix() const {
  return {data(), dtype_, shape_[0], shape_[1], shape_[1], 1};
}
MatrixView HostTensor::rows(int64_t begin, int64_t end) {
  return {
      data() + begin * shape_[1] * size_of(dtype_), dtype_, end - begin, shape_[1], shape_[1], 1};
}
ConstMatrixView HostTensor::rows(int64_t begin, int64_t end) const {
  return {
      data() + begin * shape_[1] * size_of(dtype_), dtype_, end - begin, shape_[1], shape_[1], 1};
}

HostTensor HostTensor::converted(DType dtype) const {
  HostTensor out(dtype, shape_);
  const int64_t n = elements();
  for (int64_t i = 0; i < n; ++i) store_float(out.data(), dtype, i, float_at(i));
  return out;
}

void HostTensor::fill_zero() {
  if (bytes() > 0) std::memset(data(), 0, static_cast<size_t>(bytes()));
}

bool mask_bit(const HostTensor& packed, int64_t b) {
  return (packed.as<uint8_t>()[b / 8] >> (b % 8)) & 1;
}

int64_t packed_mask_bytes(int64_t tokens) { return (tokens + 7) / 8; }

}  // namespace logitless::cli
