// SPDX-License-Identifier: Apache-2.0
// Tensors, scalars, arrays and lists: what they remember, who owns what.
#include <gtest/gtest.h>

#include <thread>

#include "aclnn/aclnn_base.h"
#include "support.h"

namespace ascend_test {
namespace {

constexpr aclnnStatus kNull = 161001;
constexpr aclnnStatus kInvalid = 161002;

using Getter = aclnnStatus (*)(const aclTensor*, std::int64_t**, std::uint64_t*);

std::vector<std::int64_t> dims_from(Getter get, const aclTensor* tensor) {
  std::int64_t* dims = nullptr;
  std::uint64_t count = 0;
  EXPECT_EQ(get(tensor, &dims, &count), 0);
  std::vector<std::int64_t> result(dims, dims + count);
  delete[] dims;  // as every client does
  return result;
}

using Dims = std::vector<std::int64_t>;

TEST(Tensor, RemembersWhatItWasMadeOf) {
  std::int64_t view[] = {3, 4}, strides[] = {10, 2}, storage[] = {64};
  float data[64] = {};
  aclTensor* tensor =
      aclCreateTensor(view, 2, ACL_FLOAT, strides, 5, ACL_FORMAT_NCHW, storage, 1, data);
  ASSERT_NE(tensor, nullptr);
  view[0] = strides[0] = storage[0] = -1;  // arrays were copied
  EXPECT_EQ(dims_from(aclGetViewShape, tensor), (Dims{3, 4}));
  EXPECT_EQ(dims_from(aclGetViewStrides, tensor), (Dims{10, 2}));
  EXPECT_EQ(dims_from(aclGetStorageShape, tensor), (Dims{64}));
  std::int64_t offset = 0;
  EXPECT_EQ(aclGetViewOffset(tensor, &offset), 0);
  EXPECT_EQ(offset, 5);
  aclFormat format = ACL_FORMAT_UNDEFINED;
  EXPECT_EQ(aclGetFormat(tensor, &format), 0);
  EXPECT_EQ(format, ACL_FORMAT_NCHW);
  aclDataType type = ACL_DT_UNDEFINED;
  EXPECT_EQ(aclGetDataType(tensor, &type), 0);
  EXPECT_EQ(type, ACL_FLOAT);
  void* address = nullptr;
  EXPECT_EQ(aclGetRawTensorAddr(tensor, &address), 0);
  EXPECT_EQ(address, data);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, WithoutStridesIsContiguous) {
  const std::int64_t view[] = {2, 3, 5};
  aclTensor* tensor =
      aclCreateTensor(view, 3, ACL_FLOAT16, nullptr, 0, ACL_FORMAT_ND, view, 3, nullptr);
  EXPECT_EQ(dims_from(aclGetViewStrides, tensor), (Dims{15, 5, 1}));
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, MayHaveNoDimension) {
  aclTensor* tensor =
      aclCreateTensor(nullptr, 0, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr);
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(dims_from(aclGetViewShape, tensor), Dims{});
  EXPECT_EQ(dims_from(aclGetViewStrides, tensor), Dims{});
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, WithoutItsDimensionsIsNotMade) {
  const std::int64_t dims[] = {2};
  EXPECT_EQ(aclCreateTensor(nullptr, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr),
            nullptr);
  EXPECT_EQ(aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 1, nullptr),
            nullptr);
}

TEST(Tensor, IsNotCheckedWhenMade) {
  const std::int64_t odd[] = {-3, 7};
  aclTensor* tensor = aclCreateTensor(odd, 2, static_cast<aclDataType>(999), nullptr, -9,
                                      static_cast<aclFormat>(77), odd, 2, nullptr);
  EXPECT_NE(tensor, nullptr);
  EXPECT_EQ(dims_from(aclGetViewShape, tensor), (Dims{-3, 7}));
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, DestroyingNullSucceedsAndDestroyingTwiceDoesNot) {
  EXPECT_EQ(aclDestroyTensor(nullptr), 0);
  EXPECT_EQ(aclDestroyScalar(nullptr), 0);
  EXPECT_EQ(aclDestroyIntArray(nullptr), 0);
  EXPECT_EQ(aclDestroyFloatArray(nullptr), 0);
  EXPECT_EQ(aclDestroyBoolArray(nullptr), 0);
  EXPECT_EQ(aclDestroyTensorList(nullptr), 0);
  EXPECT_EQ(aclDestroyScalarList(nullptr), 0);
  const std::int64_t dims[] = {2};
  aclTensor* tensor =
      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
  EXPECT_EQ(aclDestroyTensor(tensor), kInvalid);
}

TEST(Tensor, IsNotTheOwnerOfItsData) {
  void* memory = nullptr;
  ASSERT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
  const std::int64_t dims[] = {16};
  aclTensor* tensor =
      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, memory);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
  EXPECT_EQ(aclrtMemset(memory, 64, 1, 64), ACL_SUCCESS);
  EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
}

// A count that no tensor has is not followed through memory.
TEST(Tensor, OfMoreThan64DimensionsIsNotMade) {
  const std::vector<std::int64_t> ones(65, 1);
  take_message();
  for (std::uint64_t rank : {std::uint64_t{65}, ~std::uint64_t{0}}) {
    EXPECT_EQ(aclCreateTensor(ones.data(), rank, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, ones.data(),
                              1, nullptr),
              nullptr);
    EXPECT_TRUE(names(take_message(), "viewDims"));
    EXPECT_EQ(aclCreateTensor(ones.data(), 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, ones.data(),
                              rank, nullptr),
              nullptr);
    EXPECT_TRUE(names(take_message(), "storageDims"));
  }
  aclTensor* tensor = aclCreateTensor(ones.data(), 64, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND,
                                      ones.data(), 64, nullptr);
  EXPECT_NE(tensor, nullptr);
  EXPECT_EQ(aclInitTensor(tensor, ones.data(), 65, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0,
                          nullptr),
            kInvalid);
  EXPECT_EQ(aclInitTensor(tensor, nullptr, 0, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, ones.data(), 65,
                          nullptr),
            kInvalid);
  EXPECT_EQ(dims_from(aclGetViewShape, tensor).size(), 64u) << "as it was";
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, GettersWantEveryArgument) {
  const std::int64_t dims[] = {2};
  aclTensor* tensor =
      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  std::int64_t* out = nullptr;
  std::uint64_t count = 0;
  for (Getter get : {aclGetViewShape, aclGetStorageShape, aclGetViewStrides}) {
    EXPECT_EQ(get(nullptr, &out, &count), kNull);
    EXPECT_EQ(get(tensor, nullptr, &count), kNull);
    EXPECT_EQ(get(tensor, &out, nullptr), kNull);
  }
  std::int64_t offset = 0;
  aclFormat format = ACL_FORMAT_ND;
  aclDataType type = ACL_FLOAT;
  void* address = nullptr;
  EXPECT_EQ(aclGetViewOffset(nullptr, &offset), kNull);
  EXPECT_EQ(aclGetViewOffset(tensor, nullptr), kNull);
  EXPECT_EQ(aclGetFormat(nullptr, &format), kNull);
  EXPECT_EQ(aclGetFormat(tensor, nullptr), kNull);
  EXPECT_EQ(aclGetDataType(nullptr, &type), kNull);
  EXPECT_EQ(aclGetDataType(tensor, nullptr), kNull);
  EXPECT_EQ(aclGetRawTensorAddr(nullptr, &address), kNull);
  EXPECT_EQ(aclGetRawTensorAddr(tensor, nullptr), kNull);
  EXPECT_EQ(aclSetRawTensorAddr(nullptr, address), kNull);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, ForeignAndDestroyedHandlesAreRefused) {
  const std::int64_t dims[] = {2};
  aclTensor* stale =
      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  EXPECT_EQ(aclDestroyTensor(stale), 0);
  alignas(64) unsigned char memory[512] = {};
  for (aclTensor* handle : {stale, reinterpret_cast<aclTensor*>(memory)}) {
    std::int64_t* out = nullptr;
    std::uint64_t count = 0;
    std::int64_t offset = 0;
    void* address = nullptr;
    aclFormat format = ACL_FORMAT_ND;
    aclDataType type = ACL_FLOAT;
    EXPECT_EQ(aclGetFormat(handle, &format), kInvalid);
    EXPECT_EQ(aclGetDataType(handle, &type), kInvalid);
    for (Getter get : {aclGetViewShape, aclGetStorageShape, aclGetViewStrides}) {
      EXPECT_EQ(get(handle, &out, &count), kInvalid);
      EXPECT_EQ(out, nullptr);
    }
    EXPECT_EQ(aclGetViewOffset(handle, &offset), kInvalid);
    EXPECT_EQ(aclGetRawTensorAddr(handle, &address), kInvalid);
    EXPECT_EQ(aclSetRawTensorAddr(handle, memory), kInvalid);
    EXPECT_EQ(aclDestroyTensor(handle), kInvalid);
    EXPECT_EQ(aclInitTensor(handle, dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, memory),
              kInvalid);
    std::uint64_t size = 1;
    aclOpExecutor* executor = nullptr;
    EXPECT_EQ(aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
                  handle, handle, handle, 0, nullptr, nullptr, nullptr, handle, nullptr, &size,
                  &executor),
              kInvalid);
    EXPECT_EQ(executor, nullptr);
  }
}

TEST(Tensor, InitGivesItANewLifeInPlace) {
  const std::int64_t dims[] = {2, 3}, strides[] = {1, 2};
  float first[64] = {}, second[64] = {};
  aclTensor* tensor =
      aclCreateTensor(dims, 2, ACL_FLOAT, strides, 4, ACL_FORMAT_ND, dims, 2, first);
  const std::int64_t other[] = {5}, storage[] = {40}, step[] = {3};
  EXPECT_EQ(aclInitTensor(tensor, other, 1, ACL_INT32, step, 1, ACL_FORMAT_NCL, storage, 1, second),
            0);
  EXPECT_EQ(dims_from(aclGetViewShape, tensor), (Dims{5}));
  EXPECT_EQ(dims_from(aclGetViewStrides, tensor), (Dims{3}));
  EXPECT_EQ(dims_from(aclGetStorageShape, tensor), (Dims{40}));
  aclDataType type = ACL_FLOAT;
  EXPECT_EQ(aclGetDataType(tensor, &type), 0);
  EXPECT_EQ(type, ACL_INT32);
  aclFormat format = ACL_FORMAT_ND;
  EXPECT_EQ(aclGetFormat(tensor, &format), 0);
  EXPECT_EQ(format, ACL_FORMAT_NCL);
  std::int64_t offset = 0;
  EXPECT_EQ(aclGetViewOffset(tensor, &offset), 0);
  EXPECT_EQ(offset, 1);
  void* address = nullptr;
  EXPECT_EQ(aclGetRawTensorAddr(tensor, &address), 0);
  EXPECT_EQ(address, second);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Tensor, InitKeepsWhatItIsNotGiven) {
  const std::int64_t dims[] = {2, 3}, strides[] = {1, 2};
  float data[64] = {};
  aclTensor* tensor = aclCreateTensor(dims, 2, ACL_FLOAT, strides, 0, ACL_FORMAT_ND, dims, 2, data);
  EXPECT_EQ(
      aclInitTensor(tensor, nullptr, 0, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr),
      0);
  EXPECT_EQ(dims_from(aclGetViewShape, tensor), (Dims{2, 3}));
  EXPECT_EQ(dims_from(aclGetStorageShape, tensor), (Dims{2, 3}));
  EXPECT_EQ(dims_from(aclGetViewStrides, tensor), (Dims{3, 1})) << "no strides: contiguous";
  void* address = nullptr;
  EXPECT_EQ(aclGetRawTensorAddr(tensor, &address), 0);
  EXPECT_EQ(address, data);
  EXPECT_EQ(aclInitTensor(nullptr, dims, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 2, data),
            kNull);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Lists, KnowTheirSizesAndOwnTheirElements) {
  const std::int64_t dims[] = {2};
  const aclTensor* tensors[3];
  for (const aclTensor*& t : tensors) {
    t = aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  }
  aclTensorList* list = aclCreateTensorList(tensors, 3);
  std::uint64_t size = 0;
  EXPECT_EQ(aclGetTensorListSize(list, &size), 0);
  EXPECT_EQ(size, 3u);
  EXPECT_EQ(aclDestroyTensorList(list), 0);
  for (const aclTensor* t : tensors) {
    EXPECT_EQ(aclDestroyTensor(t), kInvalid) << "went with its list";
  }
  EXPECT_EQ(aclDestroyTensorList(list), kInvalid);
  EXPECT_EQ(aclGetTensorListSize(list, &size), kInvalid);
  float value = 2;
  const aclScalar* scalars[] = {aclCreateScalar(&value, ACL_FLOAT),
                                aclCreateScalar(&value, ACL_FLOAT)};
  aclScalarList* scalar_list = aclCreateScalarList(scalars, 2);
  EXPECT_EQ(aclGetScalarListSize(scalar_list, &size), 0);
  EXPECT_EQ(size, 2u);
  EXPECT_EQ(aclDestroyScalarList(scalar_list), 0);
  for (const aclScalar* scalar : scalars) {
    EXPECT_EQ(aclDestroyScalar(scalar), kInvalid) << "went with its list";
  }
  EXPECT_EQ(aclGetScalarListSize(scalar_list, &size), kInvalid);
}

TEST(Lists, MayHaveNullElementsAndNoOthersThatAreNone) {
  const std::int64_t dims[] = {2};
  const aclTensor* tensor =
      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  const aclTensor* with_null[] = {tensor, nullptr};
  aclTensorList* list = aclCreateTensorList(with_null, 2);
  EXPECT_NE(list, nullptr);
  EXPECT_EQ(aclDestroyTensorList(list), 0);
  take_message();
  EXPECT_EQ(aclCreateTensorList(&tensor, 1), nullptr) << "destroyed with the first list";
  EXPECT_FALSE(take_message().empty());
  EXPECT_EQ(aclCreateTensorList(nullptr, 1), nullptr);
  EXPECT_EQ(aclCreateScalarList(nullptr, 1), nullptr);
  aclTensorList* empty = aclCreateTensorList(nullptr, 0);
  EXPECT_NE(empty, nullptr);
  EXPECT_EQ(aclDestroyTensorList(empty), 0);
}

TEST(Arrays, KnowTheirSizes) {
  const std::int64_t ints[] = {1, 2, 3};
  const float floats[] = {1, 2};
  const bool bools[] = {true};
  std::uint64_t size = 0;
  aclIntArray* int_array = aclCreateIntArray(ints, 3);
  EXPECT_EQ(aclGetIntArraySize(int_array, &size), 0);
  EXPECT_EQ(size, 3u);
  aclFloatArray* float_array = aclCreateFloatArray(floats, 2);
  EXPECT_EQ(aclGetFloatArraySize(float_array, &size), 0);
  EXPECT_EQ(size, 2u);
  aclBoolArray* bool_array = aclCreateBoolArray(bools, 1);
  EXPECT_EQ(aclGetBoolArraySize(bool_array, &size), 0);
  EXPECT_EQ(size, 1u);
  EXPECT_EQ(aclGetIntArraySize(int_array, nullptr), kNull);
  EXPECT_EQ(aclGetFloatArraySize(float_array, nullptr), kNull);
  EXPECT_EQ(aclGetBoolArraySize(bool_array, nullptr), kNull);
  EXPECT_EQ(aclGetIntArraySize(nullptr, &size), kNull);
  EXPECT_EQ(aclGetFloatArraySize(nullptr, &size), kNull);
  EXPECT_EQ(aclGetBoolArraySize(nullptr, &size), kNull);
  EXPECT_EQ(aclGetTensorListSize(nullptr, &size), kNull);
  EXPECT_EQ(aclGetScalarListSize(nullptr, &size), kNull);
  EXPECT_EQ(aclDestroyIntArray(int_array), 0);
  EXPECT_EQ(aclDestroyFloatArray(float_array), 0);
  EXPECT_EQ(aclDestroyBoolArray(bool_array), 0);
  EXPECT_EQ(aclDestroyIntArray(int_array), kInvalid);
  EXPECT_EQ(aclDestroyFloatArray(float_array), kInvalid);
  EXPECT_EQ(aclDestroyBoolArray(bool_array), kInvalid);
  EXPECT_EQ(aclGetIntArraySize(int_array, &size), kInvalid);
  EXPECT_EQ(aclCreateIntArray(nullptr, 1), nullptr);
  EXPECT_EQ(aclCreateFloatArray(nullptr, 1), nullptr);
  EXPECT_EQ(aclCreateBoolArray(nullptr, 1), nullptr);
  double number = 0.5;
  aclScalar* scalar = aclCreateScalar(&number, ACL_DOUBLE);
  EXPECT_NE(scalar, nullptr);
  EXPECT_EQ(aclDestroyScalar(scalar), 0);
  EXPECT_EQ(aclDestroyScalar(scalar), kInvalid);
  EXPECT_EQ(aclCreateScalar(nullptr, ACL_DOUBLE), nullptr);
  EXPECT_EQ(aclCreateScalar(&number, ACL_INT4), nullptr) << "not whole bytes";
}

TEST(Dump, IsAcceptedAndWritesNothing) {
  const std::int64_t dims[] = {2};
  float data[2] = {1, 2};
  aclTensor* tensor = aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, data);
  aclTensor* tensors[] = {tensor, tensor};
  EXPECT_EQ(aclDumpOpTensors("Operator", "name", tensors, 1, 1, nullptr), 0);
  EXPECT_EQ(aclDumpOpTensors("Operator", "name", nullptr, 1, 0, nullptr), kNull);
  EXPECT_EQ(aclDumpOpTensors("Operator", "name", nullptr, 0, 0, nullptr), 0);
  EXPECT_EQ(data[1], 2);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST(Handles, AreMadeAndEndedByManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      const std::int64_t dims[] = {3};
      for (int i = 0; i < 300; ++i) {
        aclTensor* tensor =
            aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
        aclIntArray* array = aclCreateIntArray(dims, 1);
        std::uint64_t size = 0;
        aclOpExecutor* executor = nullptr;
        EXPECT_EQ(aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
                      tensor, tensor, tensor, 0, nullptr, nullptr, nullptr, tensor, nullptr, &size,
                      &executor),
                  0);
        EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
        EXPECT_EQ(aclDestroyIntArray(array), 0);
        EXPECT_EQ(aclDestroyTensor(tensor), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(AclnnBase, InitAndFinalizeAreOptionalAndHarmless) {
  EXPECT_EQ(aclnnInit(nullptr), 0);
  EXPECT_EQ(aclnnFinalize(), 0);
  const std::int64_t dims[] = {2};
  aclTensor* tensor =
      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  EXPECT_NE(tensor, nullptr);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

}  // namespace
}  // namespace ascend_test
