// SPDX-License-Identifier: Apache-2.0
// What every binding shares: arrays as they come from Python, errors as they go there, plans that
// are kept.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "logitless/logitless.h"

namespace logitless::python {

// ---- arrays -------------------------------------------------------------------------------------

// Strides in elements. DType as its number.
using Vector = std::tuple<uintptr_t, int, int64_t, int64_t>;  // address, dtype, size, stride
using Matrix = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t>;
using Mask = std::tuple<uintptr_t, int64_t, bool, int64_t>;  // address, tokens, packed, stride

inline VectorView view(const Vector& v) {
  return {reinterpret_cast<void*>(std::get<0>(v)), static_cast<DType>(std::get<1>(v)),
          std::get<2>(v), std::get<3>(v)};
}
inline MatrixView view(const Matrix& m) {
  return {reinterpret_cast<void*>(std::get<0>(m)),
          static_cast<DType>(std::get<1>(m)),
          std::get<2>(m),
          std::get<3>(m),
          std::get<4>(m),
          std::get<5>(m)};
}
inline MaskView view(const Mask& m) {
  return {reinterpret_cast<void*>(std::get<0>(m)), std::get<1>(m),
          std::get<2>(m) ? MaskLayout::packed_lsb_first : MaskLayout::byte_per_token,
          std::get<3>(m)};
}
template <class View, class Array>
std::optional<View> optional_view(const std::optional<Array>& array) {
  if (!array) return {};
  return View(view(*array));
}

inline std::optional<DType> optional_dtype(const std::optional<int>& dtype) {
  if (!dtype) return {};
  return static_cast<DType>(*dtype);
}

inline int64_t integer_at(const ConstVectorView& v, int64_t i) {
  return v.dtype == DType::i32 ? static_cast<const int32_t*>(v.data)[i * v.stride]
                               : static_cast<const int64_t*>(v.data)[i * v.stride];
}
inline float float_at(const ConstVectorView& v, int64_t i) {
  return static_cast<const float*>(v.data)[i * v.stride];
}

// ---- errors -------------------------------------------------------------------------------------

// Errors of one rank that have no kind in the core but a type in Python.
inline constexpr auto kNotImplemented = static_cast<ErrorKind>(1000);
inline constexpr auto kOutOfMemory = static_cast<ErrorKind>(1001);
inline constexpr auto kOther = static_cast<ErrorKind>(1002);

inline PyObject* exception_type(ErrorKind kind) {
  if (kind == kNotImplemented) return PyExc_NotImplementedError;
  if (kind == kOutOfMemory) return PyExc_MemoryError;
  switch (kind) {
    case ErrorKind::invalid_data:
      return PyExc_IndexError;
    case ErrorKind::wrong_type:
      return PyExc_TypeError;
    case ErrorKind::cancelled:
      return PyExc_KeyboardInterrupt;
    case ErrorKind::communication:
      return PyExc_RuntimeError;
    case ErrorKind::invalid_argument:
    case ErrorKind::workspace_too_small:
    case ErrorKind::limit_too_small:
    case ErrorKind::isa_unusable:
      return PyExc_ValueError;
  }
  return PyExc_RuntimeError;
}

[[noreturn]] inline void raise(const Error& error) {
  PyErr_SetString(exception_type(error.kind), error.message.c_str());
  throw nanobind::python_error();
}

template <class T>
T take(Result<T> result) {
  if (!result) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

// ---- the sparse gradient ------------------------------------------------------------------------

// grad_tolerance, seed, token_ids, the global id of weight's first row. Absent: exact.
using Sparse = std::tuple<double, uint64_t, std::optional<Vector>, int64_t>;

inline float tolerance_of(const std::optional<Sparse>& sparse) {
  return sparse ? static_cast<float>(std::get<0>(*sparse)) : 0.0f;
}
inline uint64_t seed_of(const std::optional<Sparse>& sparse) {
  return sparse ? std::get<1>(*sparse) : 0;
}
inline std::optional<ConstVectorView> token_ids_of(const std::optional<Sparse>& sparse) {
  if (!sparse) return {};
  return optional_view<ConstVectorView>(std::get<2>(*sparse));
}

// What sparse_counts() tells of this thread.
void remember(const SparseCounts& counts);

// ---- plans --------------------------------------------------------------------------------------

// What every call takes: threads (0 = the default, else at most so many), an ISA's name or "", the
// workspace's limit or 0.
using Options = std::tuple<int, std::string, int64_t>;

inline Result<Isa> isa_of(const Options& options) {
  return std::get<1>(options).empty() ? default_isa() : parse_isa(std::get<1>(options));
}

// Making a plan costs more than running a tiny one, so each thread keeps those it made. A key is
// everything that a plan is a function of.
template <class Plan>
class PlanCache {
 public:
  using Key = std::array<int64_t, 20>;

  template <class Make>
  Plan get(const Key& key, const Options& options, const Make& make) {
    return take(find_or_make(key, options, make));
  }

  template <class Make>
  Result<Plan> find_or_make(Key key, const Options& options, const Make& make) {
    PlanOptions plan_options;
    plan_options.workspace_limit_bytes = std::get<2>(options);
    const Result<Isa> isa = isa_of(options);
    if (!isa) return isa.error();
    plan_options.isa = *isa;
    const int wanted = std::get<0>(options);
    const int usual = default_threads();
    key[16] = static_cast<int64_t>(*isa);
    key[17] = plan_options.workspace_limit_bytes;
    key[18] = wanted;
    key[19] = usual;
    if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
    Result<Plan> plan = make(plan_options);
    if (!plan) return plan;
    // A plan that takes fewer threads than usual does so because the problem is tiny.
    if (wanted != 0 && plan->threads() != wanted &&
        (plan->threads() > wanted || plan->threads() == usual)) {
      plan_options.threads = wanted;
      plan = make(plan_options);
      if (!plan) return plan;
    }
    if (plans_.size() >= 256) plans_.clear();
    plans_.emplace(key, *plan);
    return plan;
  }

 private:
  std::map<Key, Plan> plans_;
};

template <class Plan>
PlanCache<Plan>& cache() {
  thread_local PlanCache<Plan> plans;
  return plans;
}

inline int64_t code(const std::optional<DType>& dtype) {
  return dtype ? static_cast<int64_t>(*dtype) : -1;
}
inline int64_t code(float value) { return std::bit_cast<int32_t>(value); }
inline int64_t code(const std::optional<GradientOutput>& output) {
  return output ? static_cast<int64_t>(output->dtype) + (output->accumulate ? 100 : 0) : -1;
}

inline std::optional<GradientOutput> output_type(const std::optional<Matrix>& matrix,
                                                 bool accumulate) {
  if (!matrix) return {};
  return GradientOutput{.dtype = static_cast<DType>(std::get<1>(*matrix)),
                        .accumulate = accumulate};
}

}  // namespace logitless::python
