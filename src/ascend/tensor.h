// SPDX-License-Identifier: Apache-2.0
// Descriptions of tensors and of the other arguments of aclnn functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "aclnn/acl_meta.h"
#include "handles.h"

namespace logitless::ascend {

// What an operator's plan depends on: everything but the address.
struct TensorLayout {
  std::vector<int64_t> dims;     // of the view
  std::vector<int64_t> strides;  // as many, in elements
  int64_t offset = 0;            // in elements
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_UNDEFINED;

  bool operator==(const TensorLayout&) const = default;
};

// Read and written with the registry locked.
struct Tensor {
  static constexpr HandleKind kKind = HandleKind::tensor;
  TensorLayout layout;
  std::vector<int64_t> storage_dims;
  void* data = nullptr;  // before the offset
};

struct TensorList {
  static constexpr HandleKind kKind = HandleKind::tensor_list;
  std::vector<const aclTensor*> values;  // never changes
};

size_t size_of_data_type(aclDataType dtype);
std::string name_of_data_type(aclDataType dtype);  // "FLOAT16 (1)"

}  // namespace logitless::ascend
