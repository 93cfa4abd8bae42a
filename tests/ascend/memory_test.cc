// SPDX-License-Identifier: Apache-2.0
// Device and pinned memory, copies and fills, synchronous and on streams.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "support.h"

namespace ascend_test {
namespace {

constexpr aclError kInvalidParam = 100000;
constexpr aclError kRuntimeInvalid = 107000;
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kOutOfMemory = 207001;

void* allocate(std::size_t bytes) {
  void* memory = nullptr;
  EXPECT_EQ(aclrtMalloc(&memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
  return memory;
}

TEST(DeviceMemory, IsAlignedWritableAndSeparate) {
  std::vector<unsigned char*> blocks;
  for (std::size_t bytes : {1, 31, 32, 64, 4095, 4097, 3 << 20}) {
    blocks.push_back(static_cast<unsigned char*>(allocate(bytes)));
    ASSERT_NE(blocks.back(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back()) % 64, 0u);
    std::memset(blocks.back(), static_cast<int>(blocks.size()), bytes);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(blocks[i][0], i + 1);
    EXPECT_EQ(aclrtFree(blocks[i]), ACL_SUCCESS);
  }
}

TEST(DeviceMemory, EveryPolicyAndFormWorks) {
  for (int policy : {0, 1, 2, 3, 4, 5, 6, 7, 0x1000, 0x0101, 0x100000}) {
    void* memory = nullptr;
    const auto p = static_cast<aclrtMemMallocPolicy>(policy);
    EXPECT_EQ(aclrtMalloc(&memory, 100, p), ACL_SUCCESS) << policy;
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
    EXPECT_EQ(aclrtMallocAlign32(&memory, 100, p), ACL_SUCCESS);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
    EXPECT_EQ(aclrtMallocCached(&memory, 100, p), ACL_SUCCESS);
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
    EXPECT_EQ(aclrtMallocWithCfg(&memory, 100, p, nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  }
}

TEST(DeviceMemory, OfAnUnknownPolicyIsRefused) {
  for (int policy : {8, 0x10, 0x0108, -1}) {
    void* memory = nullptr;
    const auto p = static_cast<aclrtMemMallocPolicy>(policy);
    EXPECT_EQ(aclrtMalloc(&memory, 100, p), kInvalidParam) << policy;
    EXPECT_TRUE(names(take_message(), "policy"));
    EXPECT_EQ(aclrtMallocAlign32(&memory, 100, p), kInvalidParam);
    EXPECT_EQ(aclrtMallocCached(&memory, 100, p), kInvalidParam);
    EXPECT_EQ(aclrtMallocWithCfg(&memory, 100, p, nullptr), kInvalidParam);
    EXPECT_EQ(memory, nullptr);
  }
}

TEST(DeviceMemory, ConfiguredMustBeOfTheOneDevice) {
  aclrtMallocAttribute attributes[2] = {};
  attributes[0].attr = ACL_RT_MEM_ATTR_MODULE_ID;
  attributes[0].value.moduleId = 33;
  attributes[1].attr = ACL_RT_MEM_ATTR_DEVICE_ID;
  aclrtMallocConfig config = {attributes, 2};
  void* memory = nullptr;
  EXPECT_EQ(aclrtMallocWithCfg(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST, &config), ACL_SUCCESS);
  EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  memory = nullptr;
  attributes[1].value.deviceId = 1;
  EXPECT_EQ(aclrtMallocWithCfg(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST, &config), kInvalidDevice);
  config.attrs = nullptr;
  EXPECT_EQ(aclrtMallocWithCfg(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST, &config), kInvalidParam);
  EXPECT_EQ(memory, nullptr);
}

TEST(DeviceMemory, ChecksItsArguments) {
  void* memory = nullptr;
  EXPECT_EQ(aclrtMallocCached(nullptr, 64, ACL_MEM_MALLOC_HUGE_FIRST), kInvalidParam);
  EXPECT_EQ(aclrtMallocWithCfg(nullptr, 64, ACL_MEM_MALLOC_HUGE_FIRST, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtMalloc(nullptr, 64, ACL_MEM_MALLOC_HUGE_FIRST), kInvalidParam);
  EXPECT_EQ(aclrtMalloc(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST), kInvalidParam);
  EXPECT_EQ(aclrtMallocAlign32(nullptr, 64, ACL_MEM_MALLOC_HUGE_FIRST), kInvalidParam);
  EXPECT_EQ(aclrtMallocAlign32(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST), kInvalidParam);
  EXPECT_EQ(aclrtMallocCached(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST), kInvalidParam);
  EXPECT_EQ(aclrtMallocWithCfg(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtMallocHost(nullptr, 64), kInvalidParam);
  EXPECT_EQ(aclrtMallocHost(&memory, 0), kInvalidParam);
  EXPECT_EQ(aclrtFree(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtFreeHost(nullptr), kInvalidParam);
  EXPECT_EQ(memory, nullptr);
  EXPECT_FALSE(take_message().empty());
}

TEST(DeviceMemory, AskingForTooMuchIsAnErrorAndNoCrash) {
  void* memory = nullptr;
  for (std::size_t bytes : {std::size_t{1} << 62, SIZE_MAX, SIZE_MAX - 31, SIZE_MAX - (2 << 20)}) {
    EXPECT_EQ(aclrtMalloc(&memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST), kOutOfMemory) << bytes;
    EXPECT_EQ(aclrtMallocHost(&memory, bytes), kOutOfMemory) << bytes;
    EXPECT_EQ(aclrtMallocAlign32(&memory, bytes, ACL_MEM_MALLOC_NORMAL_ONLY), kOutOfMemory);
  }
  EXPECT_EQ(memory, nullptr);
}

TEST(DeviceMemory, FreeingTwiceOrForeignMemoryIsAnErrorAndNoCrash) {
  void* memory = allocate(64);
  EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  EXPECT_EQ(aclrtFree(memory), kRuntimeInvalid);
  std::vector<char> vector(64);
  EXPECT_EQ(aclrtFree(vector.data()), kRuntimeInvalid);
  void* other = allocate(4096);
  EXPECT_EQ(aclrtFree(static_cast<char*>(other) + 64), kRuntimeInvalid) << "not its beginning";
  EXPECT_EQ(aclrtFreeHost(other), kRuntimeInvalid);
  EXPECT_EQ(aclrtFree(other), ACL_SUCCESS);
  void* pinned = nullptr;
  ASSERT_EQ(aclrtMallocHost(&pinned, 64), ACL_SUCCESS);
  EXPECT_EQ(aclrtFreeHost(pinned), ACL_SUCCESS);
  EXPECT_EQ(aclrtFreeHost(pinned), kRuntimeInvalid);
}

TEST(DeviceMemory, MayBeReadAsFarAsTheDevicesPagesGo) {
  // size + 32 rounded up to 2 MiB: what a published program reads beyond its output.
  constexpr std::size_t kPage = std::size_t{2} << 20;
  for (std::size_t bytes : {std::size_t{1}, kPage - 33, kPage - 32, kPage, 3 * kPage}) {
    auto* memory = static_cast<unsigned char*>(allocate(bytes));
    const std::size_t readable = (bytes + 32 + kPage - 1) / kPage * kPage;
    std::vector<unsigned char> host(readable);
    EXPECT_EQ(aclrtMemcpy(host.data(), readable, memory, readable, ACL_MEMCPY_DEVICE_TO_HOST),
              ACL_SUCCESS);
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  }
}

TEST(DeviceMemory, InfoIsPlausible) {
  for (aclrtMemAttr attr : {ACL_HBM_MEM, ACL_DDR_MEM, ACL_HBM_MEM_HUGE, ACL_MEM_P2P_HUGE1G}) {
    std::size_t free_bytes = 0, total = 0;
    EXPECT_EQ(aclrtGetMemInfo(attr, &free_bytes, &total), ACL_SUCCESS);
    EXPECT_GT(total, std::size_t{64} << 20);
    EXPECT_GT(free_bytes, 0u);
    EXPECT_LE(free_bytes, total);
  }
  std::size_t bytes = 0;
  EXPECT_EQ(aclrtGetMemInfo(ACL_HBM_MEM, nullptr, &bytes), kInvalidParam);
  EXPECT_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &bytes, nullptr), kInvalidParam);
  std::size_t total = 0;
  for (int attr : {-1, 18}) {
    EXPECT_EQ(aclrtGetMemInfo(static_cast<aclrtMemAttr>(attr), &bytes, &total), kInvalidParam);
  }
}

// ---- copies

std::vector<unsigned char> pattern(std::size_t bytes) {
  std::vector<unsigned char> result(bytes);
  std::iota(result.begin(), result.end(), static_cast<unsigned char>(1));
  return result;
}

TEST(Copy, EveryKindCopiesAndOthersAreRefused) {
  const std::vector<unsigned char> source = pattern(1000);
  void* device = allocate(1000);
  for (int kind : {0, 1, 2, 3, 4, 5}) {
    std::vector<unsigned char> back(1000);
    const auto k = static_cast<aclrtMemcpyKind>(kind);
    EXPECT_EQ(aclrtMemset(device, 1000, 0, 1000), ACL_SUCCESS);
    EXPECT_EQ(aclrtMemcpy(device, 1000, source.data(), 1000, k), ACL_SUCCESS) << kind;
    EXPECT_EQ(aclrtMemcpy(back.data(), 1000, device, 1000, ACL_MEMCPY_DEVICE_TO_HOST), ACL_SUCCESS);
    EXPECT_EQ(back, source);
    std::fill(back.begin(), back.end(), static_cast<unsigned char>(0));
    EXPECT_EQ(aclrtMemset(device, 1000, 0, 1000), ACL_SUCCESS);
    EXPECT_EQ(aclrtMemcpyAsync(device, 1000, source.data(), 1000, k, nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclrtMemcpyAsync(back.data(), 1000, device, 1000, k, nullptr), ACL_SUCCESS) << kind;
    EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
    EXPECT_EQ(back, source);
  }
  for (int kind : {6, 7, 8, -1, 1000}) {
    const auto k = static_cast<aclrtMemcpyKind>(kind);
    EXPECT_EQ(aclrtMemcpy(device, 1000, source.data(), 1000, k), kInvalidParam) << kind;
    EXPECT_EQ(aclrtMemcpyAsync(device, 1000, source.data(), 1000, k, nullptr), kInvalidParam);
    EXPECT_EQ(aclrtMemcpy2d(device, 10, source.data(), 10, 10, 100, k), kInvalidParam);
    EXPECT_EQ(aclrtMemcpy2dAsync(device, 10, source.data(), 10, 10, 100, k, nullptr),
              kInvalidParam);
  }
  EXPECT_EQ(aclrtFree(device), ACL_SUCCESS);
}

TEST(Copy, ChecksItsArguments) {
  Stream stream;
  unsigned char a[8] = {1, 2, 3, 4}, b[8] = {};
  EXPECT_EQ(aclrtMemcpy(nullptr, 8, a, 8, ACL_MEMCPY_HOST_TO_DEVICE), kInvalidParam);
  EXPECT_EQ(aclrtMemcpy(b, 8, nullptr, 8, ACL_MEMCPY_HOST_TO_DEVICE), kInvalidParam);
  EXPECT_EQ(aclrtMemcpy(b, 4, a, 5, ACL_MEMCPY_HOST_TO_DEVICE), kRuntimeInvalid);
  EXPECT_FALSE(take_message().empty());
  EXPECT_EQ(aclrtMemcpy(b, 8, a, 0, ACL_MEMCPY_HOST_TO_DEVICE), ACL_SUCCESS);
  EXPECT_EQ(aclrtMemcpyAsync(nullptr, 8, a, 8, ACL_MEMCPY_HOST_TO_DEVICE, stream), kInvalidParam);
  EXPECT_EQ(aclrtMemcpyAsync(b, 8, nullptr, 8, ACL_MEMCPY_HOST_TO_DEVICE, stream), kInvalidParam);
  EXPECT_EQ(aclrtMemcpyAsync(b, 4, a, 5, ACL_MEMCPY_HOST_TO_DEVICE, stream), kRuntimeInvalid);
  EXPECT_EQ(aclrtMemcpyAsync(b, 8, a, 0, ACL_MEMCPY_HOST_TO_DEVICE, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(b[0], 0);
}

TEST(Fill, FillsBytesAndChecksItsArguments) {
  Stream stream;
  unsigned char a[8] = {9, 9, 9, 9, 9, 9, 9, 9};
  EXPECT_EQ(aclrtMemset(a, 8, 0x1FF, 3), ACL_SUCCESS);
  EXPECT_EQ(a[2], 0xFF);
  EXPECT_EQ(a[3], 9);
  EXPECT_EQ(aclrtMemset(a, 8, 1, 0), ACL_SUCCESS);
  EXPECT_EQ(aclrtMemset(nullptr, 8, 1, 8), kInvalidParam);
  EXPECT_EQ(aclrtMemset(a, 4, 1, 5), kRuntimeInvalid);
  EXPECT_EQ(aclrtMemsetAsync(nullptr, 8, 1, 8, stream), kInvalidParam);
  EXPECT_EQ(aclrtMemsetAsync(a, 4, 1, 5, stream), kRuntimeInvalid);
  EXPECT_EQ(aclrtMemsetAsync(a, 8, 1, 0, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(a[0], 0xFF);
  EXPECT_EQ(aclrtMemsetAsync(a + 1, 7, 4, 2, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(a[0], 0xFF);
  EXPECT_EQ(a[1], 4);
  EXPECT_EQ(a[2], 4);
  EXPECT_EQ(a[3], 9);
}

TEST(Copy, TwoDimensionalCopiesLeaveThePitchAlone) {
  Stream stream;
  const std::vector<unsigned char> source = pattern(5 * 20);
  for (bool asynchronous : {false, true}) {
    std::vector<unsigned char> target(5 * 16, 0xEE);
    if (asynchronous) {
      EXPECT_EQ(aclrtMemcpy2dAsync(target.data(), 16, source.data(), 20, 12, 5,
                                   ACL_MEMCPY_DEVICE_TO_DEVICE, stream),
                ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
    } else {
      EXPECT_EQ(
          aclrtMemcpy2d(target.data(), 16, source.data(), 20, 12, 5, ACL_MEMCPY_HOST_TO_DEVICE),
          ACL_SUCCESS);
    }
    for (std::size_t row = 0; row < 5; ++row) {
      for (std::size_t column = 0; column < 16; ++column) {
        EXPECT_EQ(target[row * 16 + column], column < 12 ? source[row * 20 + column] : 0xEE);
      }
    }
  }
}

TEST(Copy, TwoDimensionalCopiesCheckTheirArguments) {
  Stream stream;
  unsigned char a[64] = {}, b[64] = {};
  EXPECT_EQ(aclrtMemcpy2d(nullptr, 8, a, 8, 8, 2, ACL_MEMCPY_HOST_TO_DEVICE), kInvalidParam);
  EXPECT_EQ(aclrtMemcpy2d(b, 8, nullptr, 8, 8, 2, ACL_MEMCPY_HOST_TO_DEVICE), kInvalidParam);
  EXPECT_EQ(aclrtMemcpy2d(b, 8, a, 16, 9, 2, ACL_MEMCPY_HOST_TO_DEVICE), kRuntimeInvalid);
  EXPECT_EQ(aclrtMemcpy2d(b, 16, a, 8, 9, 2, ACL_MEMCPY_HOST_TO_DEVICE), kRuntimeInvalid);
  a[0] = 1;
  EXPECT_EQ(aclrtMemcpy2d(b, 8, a, 8, 0, 2, ACL_MEMCPY_HOST_TO_DEVICE), ACL_SUCCESS);
  EXPECT_EQ(aclrtMemcpy2d(b, 8, a, 8, 8, 0, ACL_MEMCPY_HOST_TO_DEVICE), ACL_SUCCESS);
  EXPECT_EQ(b[0], 0);
  EXPECT_EQ(aclrtMemcpy2dAsync(nullptr, 8, a, 8, 8, 2, ACL_MEMCPY_HOST_TO_DEVICE, stream),
            kInvalidParam);
  EXPECT_EQ(aclrtMemcpy2dAsync(b, 8, a, 16, 9, 2, ACL_MEMCPY_HOST_TO_DEVICE, stream),
            kRuntimeInvalid);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
}

TEST(AsynchronousCopy, OfPinnedMemoryWaitsItsTurnOnTheStream) {
  constexpr std::size_t kBytes = 4096;
  void *pinned = nullptr, *back = nullptr;
  ASSERT_EQ(aclrtMallocHost(&pinned, kBytes), ACL_SUCCESS);
  ASSERT_EQ(aclrtMallocHost(&back, kBytes), ACL_SUCCESS);
  std::memset(back, 0, kBytes);
  void* device = allocate(kBytes);
  ASSERT_EQ(aclrtMemset(device, kBytes, 0, kBytes), ACL_SUCCESS);
  {
    Stream stream;
    Gate gate;
    ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
    std::memset(pinned, 1, kBytes);
    ASSERT_EQ(aclrtMemcpyAsync(device, kBytes, pinned, kBytes, ACL_MEMCPY_HOST_TO_DEVICE, stream),
              ACL_SUCCESS);
    ASSERT_EQ(aclrtMemsetAsync(device, kBytes / 2, 7, kBytes / 2, stream), ACL_SUCCESS);
    ASSERT_EQ(aclrtMemcpyAsync(back, kBytes, device, kBytes, ACL_MEMCPY_DEVICE_TO_HOST, stream),
              ACL_SUCCESS);
    EXPECT_EQ(static_cast<char*>(back)[0], 0) << "the gate holds the stream";
    std::memset(pinned, 2, kBytes);  // pinned memory is read when the stream gets there
    gate.open();
    ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  }
  EXPECT_EQ(static_cast<char*>(back)[0], 7);
  EXPECT_EQ(static_cast<char*>(back)[kBytes / 2], 2);
  EXPECT_EQ(aclrtFree(device), ACL_SUCCESS);
  EXPECT_EQ(aclrtFreeHost(pinned), ACL_SUCCESS);
  EXPECT_EQ(aclrtFreeHost(back), ACL_SUCCESS);
}

TEST(AsynchronousCopy, OfPageableMemoryIsOverWhenItReturns) {
  Stream stream;
  constexpr std::size_t kBytes = 1 << 20;
  void* device = allocate(kBytes);
  std::vector<char> source(kBytes, 5), back(kBytes, 0);
  for (int i = 0; i < 20; ++i) {
    std::fill(source.begin(), source.end(), static_cast<char>(i + 1));
    ASSERT_EQ(
        aclrtMemcpyAsync(device, kBytes, source.data(), kBytes, ACL_MEMCPY_HOST_TO_DEVICE, stream),
        ACL_SUCCESS);
    std::fill(source.begin(), source.end(), static_cast<char>(99));
    ASSERT_EQ(
        aclrtMemcpyAsync(back.data(), kBytes, device, kBytes, ACL_MEMCPY_DEVICE_TO_HOST, stream),
        ACL_SUCCESS);
    EXPECT_EQ(std::count(back.begin(), back.end(), static_cast<char>(i + 1)),
              static_cast<std::ptrdiff_t>(kBytes));
  }
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtFree(device), ACL_SUCCESS);
}

TEST(AsynchronousCopy, OfResultsFollowsTheOperatorOnItsStream) {
  Forward f;
  f.input = Array(ACL_BF16, {64, 128});
  f.weight = Array(ACL_BF16, {2000, 128});
  f.target = Array(ACL_INT32, {64});
  fill_exact(f.input, 1);
  fill_exact(f.weight, 2);
  f.target.fill(1);
  f.end = 2000;
  f.make_outputs(false);
  void* pinned = nullptr;
  ASSERT_EQ(aclrtMallocHost(&pinned, 64 * 4), ACL_SUCCESS);
  {
    Stream stream;
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(f.prepare(&size, &executor), 0);
    const GuardedBuffer workspace(size);
    ASSERT_EQ(aclnnFusedLinearOnlineMaxSum(workspace.data(), size, executor, stream), 0);
    ASSERT_EQ(aclrtMemcpyAsync(pinned, 256, f.logits_max.storage(), 256, ACL_MEMCPY_DEVICE_TO_HOST,
                               stream),
              ACL_SUCCESS);
    ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  }
  expect_forward(f);
  EXPECT_EQ(std::memcmp(pinned, f.logits_max.storage(), 256), 0);
  EXPECT_EQ(aclrtFreeHost(pinned), ACL_SUCCESS);
}

}  // namespace
}  // namespace ascend_test
