// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <cstring>
#include <new>

#include "status.h"

namespace logitless::ascend {

size_t size_of_data_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
      return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    case ACL_DT_UNDEFINED:
    case ACL_STRING:
    case ACL_INT4:
    case ACL_UINT1:
    case ACL_FLOAT6_E3M2:
    case ACL_FLOAT6_E2M3:
    case ACL_FLOAT4_E2M1:
    case ACL_FLOAT4_E1M2:
      return 0;
  }
  return 0;
}

std::string name_of_data_type(aclDataType dtype) {
  const char* name = nullptr;
  switch (static_cast<int>(dtype)) {
    case ACL_FLOAT:
      name = "FLOAT";
      break;
    case ACL_FLOAT16:
      name = "FLOAT16";
      break;
    case ACL_BF16:
      name = "BF16";
      break;
    case ACL_INT8:
      name = "INT8";
      break;
    case ACL_INT32:
      name = "INT32";
      break;
    case ACL_INT64:
      name = "INT64";
      break;
    case ACL_UINT8:
      name = "UINT8";
      break;
    case ACL_BOOL:
      name = "BOOL";
      break;
    case ACL_DOUBLE:
      name = "DOUBLE";
      break;
    default:
      return text("aclDataType ", static_cast<int>(dtype));
  }
  return text(name, " (", static_cast<int>(dtype), ")");
}

namespace {

// Ranks above this are taken for a wrong argument rather than followed through memory.
constexpr uint64_t kMaxRank = 64;

Status is_null(const char* name) { return failure(ACLNN_ERR_PARAM_NULLPTR, name, ": is null"); }

Status is_stale(const char* name) {
  return failure(ACLNN_ERR_PARAM_INVALID, name, ": is destroyed, or not from here");
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& dims) {
  std::vector<int64_t> strides(dims.size());
  uint64_t step = 1;  // wraps for absurd dims, which phase 1 rejects
  for (size_t i = dims.size(); i-- > 0;) {
    strides[i] = static_cast<int64_t>(step);
    step *= static_cast<uint64_t>(dims[i]);
  }
  return strides;
}

Status check_dims(const char* name, const int64_t* dims, uint64_t count) {
  if (dims == nullptr && count > 0) {
    return failure(ACLNN_ERR_PARAM_NULLPTR, name, ": is null with ", count, " dimensions");
  }
  if (count > kMaxRank) {
    return failure(ACLNN_ERR_PARAM_INVALID, name, ": ", count, " dimensions, must be at most ",
                   kMaxRank);
  }
  return {};
}

TensorLayout make_layout(const int64_t* dims, uint64_t rank, aclDataType dtype,
                         const int64_t* stride, int64_t offset, aclFormat format) {
  TensorLayout layout;
  layout.dims.assign(dims, dims + rank);
  if (stride != nullptr) {
    layout.strides.assign(stride, stride + rank);
  } else {
    layout.strides = contiguous_strides(layout.dims);
  }
  layout.offset = offset;
  layout.dtype = dtype;
  layout.format = format;
  return layout;
}

// Copies what `read` finds in the living tensor.
template <class Read>
Status read_tensor(const aclTensor* handle, const Read& read) {
  return Registry::instance().with_lock([&](const Registry::Lookup& lookup) -> Status {
    Tensor* const tensor = lookup.find<Tensor>(handle);
    if (tensor == nullptr) return is_stale("tensor");
    read(*tensor);
    return {};
  });
}

template <class Read>
Status get_array(const aclTensor* handle, int64_t** out, const char* out_name, uint64_t* count,
                 const char* count_name, const Read& read) {
  if (handle == nullptr) return is_null("tensor");
  if (out == nullptr) return is_null(out_name);
  if (count == nullptr) return is_null(count_name);
  std::vector<int64_t> values;
  if (Status status = read_tensor(handle, [&](const Tensor& t) { values = read(t); });
      !status.ok()) {
    return status;
  }
  int64_t* const array = new int64_t[values.size()];
  for (size_t i = 0; i < values.size(); ++i) array[i] = values[i];
  *out = array;
  *count = values.size();
  return {};
}

template <class Value, class Read>
Status get_value(const aclTensor* handle, Value* out, const char* out_name, const Read& read) {
  if (handle == nullptr) return is_null("tensor");
  if (out == nullptr) return is_null(out_name);
  return read_tensor(handle, [&](const Tensor& t) { *out = read(t); });
}

struct Scalar {
  static constexpr HandleKind kKind = HandleKind::scalar;
  aclDataType dtype;
  unsigned char value[16];
};

template <class Element, HandleKind kind>
struct Array {
  static constexpr HandleKind kKind = kind;
  std::vector<Element> values;
};
using IntArray = Array<int64_t, HandleKind::int_array>;
using FloatArray = Array<float, HandleKind::float_array>;
using BoolArray = Array<bool, HandleKind::bool_array>;
using ScalarList = Array<const aclScalar*, HandleKind::scalar_list>;

// Runs make() -> handle for functions that have only null to say that something is wrong.
template <class Handle, class Make>
Handle* created(const char* function, const Make& make) {
  Handle* handle = nullptr;
  aclnn_call(function, [&] { return make(&handle); });
  return handle;
}

template <class ArrayType, class Handle, class Element>
Status create_array(const Element* value, uint64_t size, Handle** out) {
  if (value == nullptr && size > 0) {
    return failure(ACLNN_ERR_PARAM_NULLPTR, "value: is null with size ", size);
  }
  auto array = std::make_shared<ArrayType>();
  array->values.assign(value, value + size);
  *out = static_cast<Handle*>(Registry::instance().add(std::move(array)));
  return {};
}

template <class ArrayType>
Status get_size(const void* handle, const char* name, uint64_t* size) {
  if (handle == nullptr) return is_null(name);
  if (size == nullptr) return is_null("size");
  const auto array = Registry::instance().find<ArrayType>(handle);
  if (!array) return is_stale(name);
  *size = array->values.size();
  return {};
}

template <class T>
Status destroy(const void* handle, const char* name) {
  if (handle == nullptr) return {};
  return Registry::instance().take<T>(handle) ? Status() : is_stale(name);
}

// A list's elements may have been destroyed before it; those are gone already.
template <class List, class Element>
Status destroy_list(const void* handle, const char* name) {
  if (handle == nullptr) return {};
  const auto list = Registry::instance().take<List>(handle);
  if (!list) return is_stale(name);
  for (const void* element : list->values) Registry::instance().take<Element>(element);
  return {};
}

template <class List, class Element, class Handle, class ElementHandle>
Status create_list(const ElementHandle* const* value, uint64_t size, Handle** out) {
  if (value == nullptr && size > 0) {
    return failure(ACLNN_ERR_PARAM_NULLPTR, "value: is null with size ", size);
  }
  for (uint64_t i = 0; i < size; ++i) {
    if (value[i] != nullptr && !Registry::instance().find<Element>(value[i])) {
      return failure(ACLNN_ERR_PARAM_INVALID, "value[", i, "]: is destroyed, or not from here");
    }
  }
  auto list = std::make_shared<List>();
  list->values.assign(value, value + size);
  *out = static_cast<Handle*>(Registry::instance().add(std::move(list)));
  return {};
}

}  // namespace
}  // namespace logitless::ascend

using namespace logitless::ascend;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType,
                           const int64_t* stride, int64_t offset, aclFormat format,
                           const int64_t* storageDims, uint64_t storageDimsNum, void* tensorData) {
  return created<aclTensor>(__func__, [&](aclTensor** out) -> Status {
    if (Status status = check_dims("viewDims", viewDims, viewDimsNum); !status.ok()) return status;
    if (Status status = check_dims("storageDims", storageDims, storageDimsNum); !status.ok()) {
      return status;
    }
    auto tensor = std::make_shared<Tensor>();
    tensor->layout = make_layout(viewDims, viewDimsNum, dataType, stride, offset, format);
    tensor->storage_dims.assign(storageDims, storageDims + storageDimsNum);
    tensor->data = tensorData;
    *out = static_cast<aclTensor*>(Registry::instance().add(std::move(tensor)));
    return {};
  });
}

aclnnStatus aclInitTensor(aclTensor* tensor, const int64_t* viewDims, uint64_t viewDimsNum,
                          aclDataType dataType, const int64_t* stride, int64_t offset,
                          aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum,
                          void* tensorDataAddr) {
  return aclnn_call(__func__, [&]() -> Status {
    if (tensor == nullptr) return is_null("tensor");
    if (viewDims != nullptr) {
      if (Status status = check_dims("viewDims", viewDims, viewDimsNum); !status.ok()) {
        return status;
      }
    }
    if (storageDims != nullptr) {
      if (Status status = check_dims("storageDims", storageDims, storageDimsNum); !status.ok()) {
        return status;
      }
    }
    return Registry::instance().with_lock([&](const Registry::Lookup& lookup) -> Status {
      Tensor* const living = lookup.find<Tensor>(tensor);
      if (living == nullptr) return is_stale("tensor");
      const std::vector<int64_t> old_dims = living->layout.dims;
      const int64_t* const dims = viewDims != nullptr ? viewDims : old_dims.data();
      const uint64_t rank = viewDims != nullptr ? viewDimsNum : old_dims.size();
      living->layout = make_layout(dims, rank, dataType, stride, offset, format);
      if (storageDims != nullptr) {
        living->storage_dims.assign(storageDims, storageDims + storageDimsNum);
      }
      if (tensorDataAddr != nullptr) living->data = tensorDataAddr;
      return {};
    });
  });
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
  return aclnn_call(__func__, [&] { return destroy<Tensor>(tensor, "tensor"); });
}

aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** viewDims, uint64_t* viewDimsNum) {
  return aclnn_call(__func__, [&] {
    return get_array(tensor, viewDims, "viewDims", viewDimsNum, "viewDimsNum",
                     [](const Tensor& t) { return t.layout.dims; });
  });
}

aclnnStatus aclGetStorageShape(const aclTensor* tensor, int64_t** storageDims,
                               uint64_t* storageDimsNum) {
  return aclnn_call(__func__, [&] {
    return get_array(tensor, storageDims, "storageDims", storageDimsNum, "storageDimsNum",
                     [](const Tensor& t) { return t.storage_dims; });
  });
}

aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** stridesValue,
                              uint64_t* stridesNum) {
  return aclnn_call(__func__, [&] {
    return get_array(tensor, stridesValue, "stridesValue", stridesNum, "stridesNum",
                     [](const Tensor& t) { return t.layout.strides; });
  });
}

aclnnStatus aclGetViewOffset(const aclTensor* tensor, int64_t* offset) {
  return aclnn_call(__func__, [&] {
    return get_value(tensor, offset, "offset", [](const Tensor& t) { return t.layout.offset; });
  });
}

aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format) {
  return aclnn_call(__func__, [&] {
    return get_value(tensor, format, "format", [](const Tensor& t) { return t.layout.format; });
  });
}

aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType) {
  return aclnn_call(__func__, [&] {
    return get_value(tensor, dataType, "dataType", [](const Tensor& t) { return t.layout.dtype; });
  });
}

aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* addr) {
  return aclnn_call(__func__, [&]() -> Status {
    if (tensor == nullptr) return is_null("tensor");
    return read_tensor(tensor, [&](Tensor& t) { t.data = addr; });
  });
}

aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr) {
  return aclnn_call(__func__, [&] {
    return get_value(tensor, addr, "addr", [](const Tensor& t) { return t.data; });
  });
}

aclnnStatus aclDumpOpTensors(const char*, const char*, aclTensor** tensors, size_t inputTensorNum,
                             size_t outputTensorNum, aclrtStream) {
  return aclnn_call(__func__, [&]() -> Status {
    if (tensors == nullptr && inputTensorNum + outputTensorNum > 0) return is_null("tensors");
    return {};
  });
}

aclScalar* aclCreateScalar(void* value, aclDataType dataType) {
  return created<aclScalar>(__func__, [&](aclScalar** out) -> Status {
    if (value == nullptr) return is_null("value");
    const size_t size = size_of_data_type(dataType);
    if (size == 0) {
      return failure(ACLNN_ERR_PARAM_INVALID, "dataType: is ", name_of_data_type(dataType),
                     ", must be a type of whole bytes");
    }
    auto scalar = std::make_shared<Scalar>();
    scalar->dtype = dataType;
    std::memcpy(scalar->value, value, size);
    *out = static_cast<aclScalar*>(Registry::instance().add(std::move(scalar)));
    return {};
  });
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
  return created<aclIntArray>(
      __func__, [&](aclIntArray** out) { return create_array<IntArray>(value, size, out); });
}

aclFloatArray* aclCreateFloatArray(const float* value, uint64_t size) {
  return created<aclFloatArray>(
      __func__, [&](aclFloatArray** out) { return create_array<FloatArray>(value, size, out); });
}

aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size) {
  return created<aclBoolArray>(
      __func__, [&](aclBoolArray** out) { return create_array<BoolArray>(value, size, out); });
}

aclTensorList* aclCreateTensorList(const aclTensor* const* value, uint64_t size) {
  return created<aclTensorList>(__func__, [&](aclTensorList** out) {
    return create_list<TensorList, Tensor>(value, size, out);
  });
}

aclScalarList* aclCreateScalarList(const aclScalar* const* value, uint64_t size) {
  return created<aclScalarList>(__func__, [&](aclScalarList** out) {
    return create_list<ScalarList, Scalar>(value, size, out);
  });
}

aclnnStatus aclDestroyScalar(const aclScalar* scalar) {
  return aclnn_call(__func__, [&] { return destroy<Scalar>(scalar, "scalar"); });
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
  return aclnn_call(__func__, [&] { return destroy<IntArray>(array, "array"); });
}

aclnnStatus aclDestroyFloatArray(const aclFloatArray* array) {
  return aclnn_call(__func__, [&] { return destroy<FloatArray>(array, "array"); });
}

aclnnStatus aclDestroyBoolArray(const aclBoolArray* array) {
  return aclnn_call(__func__, [&] { return destroy<BoolArray>(array, "array"); });
}

aclnnStatus aclDestroyTensorList(const aclTensorList* array) {
  return aclnn_call(__func__, [&] { return destroy_list<TensorList, Tensor>(array, "array"); });
}

aclnnStatus aclDestroyScalarList(const aclScalarList* array) {
  return aclnn_call(__func__, [&] { return destroy_list<ScalarList, Scalar>(array, "array"); });
}

aclnnStatus aclGetIntArraySize(const aclIntArray* array, uint64_t* size) {
  return aclnn_call(__func__, [&] { return get_size<IntArray>(array, "array", size); });
}

aclnnStatus aclGetFloatArraySize(const aclFloatArray* array, uint64_t* size) {
  return aclnn_call(__func__, [&] { return get_size<FloatArray>(array, "array", size); });
}

aclnnStatus aclGetBoolArraySize(const aclBoolArray* array, uint64_t* size) {
  return aclnn_call(__func__, [&] { return get_size<BoolArray>(array, "array", size); });
}

aclnnStatus aclGetTensorListSize(const aclTensorList* tensorList, uint64_t* size) {
  return aclnn_call(__func__, [&] { return get_size<TensorList>(tensorList, "tensorList", size); });
}

aclnnStatus aclGetScalarListSize(const aclScalarList* scalarList, uint64_t* size) {
  return aclnn_call(__func__, [&] { return get_size<ScalarList>(scalarList, "scalarList", size); });
}

}  // extern "C"
