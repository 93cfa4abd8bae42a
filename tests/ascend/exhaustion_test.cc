// SPDX-License-Identifier: Apache-2.0
// The host's memory runs out inside every function that takes some: each allocation of a call fails
// in turn. No exception may cross, the code must say so, and what was there before must still work.
#include <gtest/gtest.h>

#include "support.h"
#include "tests/support/failing_new.h"

namespace ascend_test {
namespace {

using logitless::test::FailingNew;

constexpr int kRuntimeOutOfMemory = 200000;
constexpr int kInner = 561000;

class Exhaustion : public testing::Test {
 protected:
  void SetUp() override {
    if (!logitless::test::failing_new_available()) {
      GTEST_SKIP() << "this sanitizer's operator new cannot be replaced";
    }
  }
};

// call() until none of its allocations fails; `expected` whenever it says that one did. clean():
// after a call that succeeded.
template <class Call, class Clean>
void expect_told(const char* what, int expected, const Call& call, const Clean& clean) {
  SCOPED_TRACE(what);
  int told = 0;
  for (int before = 0;; ++before) {
    ASSERT_LT(before, 10000);
    take_message();
    int status = -1;
    bool failed = false;
    {
      FailingNew failing(before, 0);
      status = call();
      failed = failing.failed();
    }
    const std::string message = take_message();
    if (status == 0) {
      clean();
    } else {
      EXPECT_TRUE(failed) << message;
      EXPECT_EQ(status, expected) << "allocation " << before << ": " << message;
      EXPECT_NE(message.find("out of host memory"), std::string::npos) << message;
      ++told;
    }
    if (!failed) break;
  }
  EXPECT_GT(told, 0) << "a function without an allocation has no place here";
}

constexpr auto kNothing = [] {};

TEST_F(Exhaustion, OfTensorsArraysAndLists) {
  const std::int64_t dims[] = {2, 3};
  aclTensor* tensor = nullptr;
  expect_told(
      "aclCreateTensor", 1,
      [&] {
        tensor = aclCreateTensor(dims, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 2, nullptr);
        return tensor == nullptr ? 1 : 0;
      },
      [&] { EXPECT_EQ(aclDestroyTensor(tensor), 0); });
  aclIntArray* array = nullptr;
  expect_told(
      "aclCreateIntArray", 1,
      [&] {
        array = aclCreateIntArray(dims, 2);
        return array == nullptr ? 1 : 0;
      },
      [&] { EXPECT_EQ(aclDestroyIntArray(array), 0); });
  tensor = aclCreateTensor(dims, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 2, nullptr);
  std::int64_t* out = nullptr;
  std::uint64_t count = 0;
  expect_told(
      "aclGetViewShape", kInner, [&] { return aclGetViewShape(tensor, &out, &count); },
      [&] { delete[] out; });
  const std::int64_t other[] = {5, 7, 1};
  expect_told(
      "aclInitTensor", kInner,
      [&] {
        return aclInitTensor(tensor, other, 3, ACL_INT32, nullptr, 0, ACL_FORMAT_ND, other, 3,
                             nullptr);
      },
      kNothing);
  EXPECT_EQ(aclDestroyTensor(tensor), 0);
}

TEST_F(Exhaustion, OfBothPhases) {
  const Forward f = small_forward();
  Loss loss;
  Gradient gradient;
  for (Array* array : {&loss.logits_max, &loss.sum_exp, &loss.predicted, &gradient.grad,
                       &gradient.logits_max, &gradient.sum_exp}) {
    *array = Array(ACL_FLOAT, {9});
    array->fill(1);
  }
  loss.make_outputs();
  gradient.input = Array(ACL_BF16, {9, 16});
  gradient.weight = Array(ACL_BF16, {140, 16});
  gradient.mask = Array(ACL_BOOL, {9});
  gradient.masked_target = Array(ACL_INT32, {9});
  for (Array* array :
       {&gradient.input, &gradient.weight, &gradient.mask, &gradient.masked_target}) {
    array->fill(0);
  }
  gradient.make_outputs();
  const struct {
    const char* name;
    Prepare prepare;
    LaunchFunction launch;
  } operators[] = {
      {"forward", f.preparer(), aclnnFusedLinearOnlineMaxSum},
      {"loss", loss.preparer(), aclnnFusedCrossEntropyLossWithMaxSum},
      {"gradient", gradient.preparer(), aclnnFusedLinearCrossEntropyLossGrad},
  };
  const Stream stream;
  for (const auto& op : operators) {
    SCOPED_TRACE(op.name);
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    expect_told(
        "phase 1", kInner,
        [&] {
          size = 77;
          executor = nullptr;
          const aclnnStatus status = op.prepare(&size, &executor);
          if (status != 0 && (size != 77 || executor != nullptr)) return 1;
          return static_cast<int>(status);
        },
        [&] { EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0); });
    ASSERT_EQ(op.prepare(&size, &executor), 0);
    const GuardedBuffer workspace(size);
    // Repeatable, so that one executor serves all tries.
    ASSERT_EQ(aclSetAclOpExecutorRepeatable(executor), 0);
    expect_told(
        "phase 2", kInner,
        [&] { return static_cast<int>(op.launch(workspace.data(), size, executor, stream)); },
        [&] { EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS) << take_message(); });
    EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
  }
  expect_forward(f);
}

TEST_F(Exhaustion, OfAPhaseTwoConsumesItsExecutor) {
  const Forward f = small_forward();
  std::uint64_t size = 0;
  for (int before = 0;; ++before) {
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(f.prepare(&size, &executor), 0);
    const GuardedBuffer workspace(size);
    aclnnStatus status = -1;
    {
      FailingNew failing(before, 0);
      status = aclnnFusedLinearOnlineMaxSum(workspace.data(), size, executor, nullptr);
    }
    EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclDestroyAclOpExecutor(executor), kInner) << "allocation " << before;
    if (status == 0) break;
    ASSERT_LT(before, 1000);
  }
}

TEST_F(Exhaustion, OfStreamsEventsAndMemory) {
  aclrtStream stream = nullptr;
  aclrtEvent event = nullptr;
  expect_told(
      "aclrtCreateStream", kRuntimeOutOfMemory, [&] { return aclrtCreateStream(&stream); },
      [&] { EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS); });
  expect_told(
      "aclrtCreateEvent", kRuntimeOutOfMemory, [&] { return aclrtCreateEvent(&event); },
      [&] { EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS); });
  void* memory = nullptr;
  expect_told(
      "aclrtMalloc", kRuntimeOutOfMemory,
      [&] { return aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST); },
      [&] { EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS); });
  const Stream living;
  ASSERT_EQ(aclrtCreateEvent(&event), ACL_SUCCESS);
  static unsigned char bytes[64];
  const struct {
    const char* name;
    std::function<aclError()> call;
  } enqueued[] = {
      {"aclrtRecordEvent", [&] { return aclrtRecordEvent(event, living); }},
      {"aclrtResetEvent", [&] { return aclrtResetEvent(event, living); }},
      {"aclrtMemsetAsync", [&] { return aclrtMemsetAsync(bytes, 64, 1, 64, living); }},
      {"aclrtMemcpyAsync",
       [&] {
         return aclrtMemcpyAsync(bytes, 32, bytes + 32, 32, ACL_MEMCPY_DEVICE_TO_DEVICE, living);
       }},
  };
  for (const auto& one : enqueued) {
    expect_told(one.name, kRuntimeOutOfMemory, one.call, kNothing);
    EXPECT_EQ(aclrtSynchronizeStream(living), ACL_SUCCESS) << take_message();
  }
  EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
}

}  // namespace
}  // namespace ascend_test
