// SPDX-License-Identifier: Apache-2.0
// The two phases: what an executor keeps, when it dies, where its addresses come from, what a
// workspace must be.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <thread>

#include "support.h"

namespace ascend_test {
namespace {

constexpr aclnnStatus kNull = 161001;
constexpr aclnnStatus kInvalid = 161002;
constexpr aclnnStatus kRuntime = 361001;
constexpr aclnnStatus kInner = 561000;
constexpr aclnnStatus kInnerNull = 561103;

// Large enough that every operator's kernels want a workspace.
Forward make_forward(std::uint64_t seed = 1) {
  Forward f;
  f.input = Array(ACL_BF16, {37, 96});
  f.weight = Array(ACL_BF16, {300, 96});
  f.target = Array(ACL_INT32, {37});
  fill_exact(f.input, seed);
  fill_exact(f.weight, seed + 1);
  Random random(seed + 2);
  for (std::int64_t b = 0; b < 37; ++b) f.target.set_int(b, random.integer(0, 320));
  f.end = 300;
  f.make_outputs(false);
  return f;
}

struct Prepared {
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  GuardedBuffer workspace;
};

Prepared prepare(const Forward& f) {
  Prepared p;
  EXPECT_EQ(f.prepare(&p.size, &p.executor), 0) << take_message();
  EXPECT_GT(p.size, 0u) << "these tests need an operator that asks for a workspace";
  p.workspace = GuardedBuffer(p.size);
  return p;
}

aclnnStatus launch(const Prepared& p, aclrtStream stream = nullptr) {
  return aclnnFusedLinearOnlineMaxSum(p.workspace.data(), p.size, p.executor, stream);
}

void expect_statistics(const Forward& f) {
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0) << take_message();
  expect_forward(f);
}

TEST(Executor, SingleShotIsConsumedByItsSecondPhase) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(launch(p), 0);
  expect_statistics(f);
  take_message();
  EXPECT_EQ(launch(p), kInner);
  EXPECT_FALSE(take_message().empty());
  EXPECT_EQ(launch(p), kInner) << "and stays consumed";
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), kInner) << "there is nothing left to destroy";
}

TEST(Executor, NullExecutorIsRefused) {
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, nullptr, nullptr), kNull);
  EXPECT_TRUE(names(take_message(), "executor"));
  EXPECT_EQ(aclnnFusedCrossEntropyLossWithMaxSum(nullptr, 0, nullptr, nullptr), kNull);
  EXPECT_EQ(aclnnFusedLinearCrossEntropyLossGrad(nullptr, 0, nullptr, nullptr), kNull);
}

TEST(Executor, ForeignPointerIsRefused) {
  int not_an_executor[64] = {};
  auto* foreign = reinterpret_cast<aclOpExecutor*>(not_an_executor);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, foreign, nullptr), kInner);
  EXPECT_EQ(aclDestroyAclOpExecutor(foreign), kInner);
  EXPECT_EQ(aclSetAclOpExecutorRepeatable(foreign), kInner);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, reinterpret_cast<aclOpExecutor*>(8), nullptr),
            kInner);
}

TEST(Executor, OfAnotherOperatorIsRefused) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  EXPECT_EQ(aclnnFusedCrossEntropyLossWithMaxSum(p.workspace.data(), p.size, p.executor, nullptr),
            kInvalid);
  EXPECT_TRUE(names(take_message(), "executor"));
  EXPECT_EQ(launch(p), kInner) << "used up whatever came of it";
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  EXPECT_TRUE(f.logits_max.untouched());
}

TEST(Executor, SingleShotIsConsumedWhateverPhaseTwoReturns) {
  {
    const Forward f = make_forward();
    const Prepared p = prepare(f);
    int no_stream = 0;
    EXPECT_EQ(launch(p, &no_stream), kRuntime);
    EXPECT_TRUE(names(take_message(), "stream"));
    EXPECT_EQ(launch(p), kInner);
    EXPECT_TRUE(f.logits_max.untouched());
  }
  {
    Forward f = make_forward();
    ASSERT_EQ(aclSetRawTensorAddr(f.sum_exp.tensor(), nullptr), 0);
    const Prepared p = prepare(f);
    EXPECT_EQ(launch(p), kNull);
    EXPECT_TRUE(names(take_message(), "sumExpLogitsLocalOut"));
    EXPECT_EQ(aclSetRawTensorAddr(f.sum_exp.tensor(), f.sum_exp.storage()), 0);
    EXPECT_EQ(launch(p), kInner);
    EXPECT_TRUE(f.logits_max.untouched());
  }
}

// Which of two wrong things about phase 2 is told.
TEST(Executor, SecondPhaseChecksInOrder) {
  const Forward f = make_forward();
  int no_stream = 0;
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 64, nullptr, &no_stream), kNull);
  EXPECT_TRUE(names(take_message(), "executor"));
  const Prepared p = prepare(f);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, p.size - 1, p.executor, &no_stream), kNull)
      << "a null workspace before its size";
  EXPECT_FALSE(names(take_message(), "stream"));
  const Prepared q = prepare(f);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(q.workspace.data(), q.size - 1, q.executor, &no_stream),
            kInvalid)
      << "and both before the stream";
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
}

TEST(Executor, NullWorkspaceIsRefusedAndConsumesASingleShotExecutor) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, p.size, p.executor, nullptr), kNull);
  EXPECT_TRUE(names(take_message(), "workspace"));
  EXPECT_EQ(launch(p), kInner);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  EXPECT_TRUE(f.logits_max.untouched());
}

TEST(Executor, NullWorkspaceWithASizeIsRefusedEvenWhereNoneIsNeeded) {
  Forward f;
  f.input = Array(ACL_BF16, {0, 8});
  f.weight = Array(ACL_BF16, {4, 8});
  f.target = Array(ACL_INT32, {0});
  f.end = 4;
  f.make_outputs(false);
  std::uint64_t size = 9;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(f.prepare(&size, &executor), 0);
  ASSERT_EQ(size, 0u);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 64, executor, nullptr), kNull);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, executor, nullptr), kInner);
}

TEST(Executor, TooSmallWorkspaceIsRefusedAndConsumesASingleShotExecutor) {
  for (bool none : {false, true}) {
    const Forward f = make_forward();
    const Prepared p = prepare(f);
    EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(none ? nullptr : p.workspace.data(),
                                           none ? 0 : p.size - 1, p.executor, nullptr),
              kInvalid);
    const std::string message = take_message();
    EXPECT_TRUE(names(message, "workspaceSize|workspace")) << message;
    EXPECT_TRUE(names(message, std::to_string(p.size))) << "tells what is needed: " << message;
    EXPECT_EQ(launch(p), kInner);
    EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
    EXPECT_TRUE(f.logits_max.untouched());
  }
}

TEST(Executor, TooSmallWorkspaceIsRefusedByTheGradientToo) {
  Gradient g;
  g.input = Array(ACL_BF16, {20, 64});
  g.weight = Array(ACL_BF16, {200, 64});
  g.grad = Array(ACL_FLOAT, {20});
  g.mask = Array(ACL_BOOL, {20});
  g.masked_target = Array(ACL_INT32, {20});
  g.logits_max = Array(ACL_FLOAT, {20});
  g.sum_exp = Array(ACL_FLOAT, {20});
  g.make_outputs();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(g.prepare(&size, &executor), 0);
  ASSERT_GT(size, 0u);
  const GuardedBuffer workspace(size);
  EXPECT_EQ(aclnnFusedLinearCrossEntropyLossGrad(workspace.data(), size - 1, executor, nullptr),
            kInvalid);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  EXPECT_TRUE(g.grad_input.untouched());
}

TEST(Executor, LargerWorkspaceAtAnyAddressIsFine) {
  const Forward f = make_forward();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(f.prepare(&size, &executor), 0);
  std::vector<unsigned char> memory(size + 4096 + 1);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(memory.data() + 1, size + 4095, executor, nullptr), 0)
      << take_message();
  expect_statistics(f);
}

TEST(Executor, WorkspaceOfExactlyTheSizeAtAnOddAddressIsFine) {
  const Forward f = make_forward();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(f.prepare(&size, &executor), 0);
  const GuardedBuffer memory(size + 1);
  // The byte before the workspace is not the operator's; GuardedBuffer protects the one behind it.
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(memory.data() + 1, size, executor, nullptr), 0)
      << take_message();
  expect_statistics(f);
  EXPECT_EQ(memory.data()[0], kGapByte);
}

TEST(Executor, OperatorsOfOneStreamMayShareAWorkspace) {
  Stream stream;
  std::vector<Forward> calls;
  for (std::uint64_t seed : {1, 5, 9}) calls.push_back(make_forward(seed));
  std::uint64_t size = 0;
  std::vector<aclOpExecutor*> executors(3);
  for (std::size_t i = 0; i < 3; ++i) ASSERT_EQ(calls[i].prepare(&size, &executors[i]), 0);
  const GuardedBuffer workspace(size);
  for (aclOpExecutor* executor : executors) {
    ASSERT_EQ(aclnnFusedLinearOnlineMaxSum(workspace.data(), size, executor, stream), 0);
  }
  ASSERT_EQ(aclrtSynchronizeStream(stream), 0);
  for (const Forward& f : calls) expect_forward(f);
}

TEST(Executor, NeverRunMayBeDestroyed) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), kInner) << "twice";
  EXPECT_EQ(launch(p), kInner);
  EXPECT_EQ(aclDestroyAclOpExecutor(nullptr), kInnerNull);
}

TEST(Executor, RepeatableRunsUntilDestroyed) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(launch(p), 0) << take_message();
    expect_statistics(f);
  }
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
  EXPECT_EQ(launch(p), kInner);
}

TEST(Executor, RepeatableSurvivesARefusedLaunch) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, p.size, p.executor, nullptr), kNull);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(p.workspace.data(), p.size - 1, p.executor, nullptr),
            kInvalid);
  EXPECT_EQ(launch(p), 0) << take_message();
  expect_statistics(f);
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
}

TEST(Executor, RepeatableReadsNewDataEachTime) {
  Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  for (std::uint64_t seed : {21, 22}) {
    fill_exact(f.input, seed);
    EXPECT_EQ(launch(p), 0);
    expect_statistics(f);
  }
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
}

TEST(Executor, SetRepeatableWantsALiveExecutor) {
  EXPECT_EQ(aclSetAclOpExecutorRepeatable(nullptr), kInnerNull);
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(launch(p), 0);
  expect_statistics(f);
  EXPECT_EQ(aclSetAclOpExecutorRepeatable(p.executor), kInner);
}

TEST(Executor, DestroyedWhileItsWorkIsQueuedLetsTheWorkFinish) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  Stream stream;
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), 0);
  ASSERT_EQ(launch(p, stream), 0);
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStream(stream), 0);
  expect_forward(f);
}

TEST(Executor, TensorsMayBeDestroyedAsSoonAsPhaseTwoReturned) {
  Forward f = make_forward();
  const Prepared p = prepare(f);
  Stream stream;
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), 0);
  ASSERT_EQ(launch(p, stream), 0);
  for (Array* array : {&f.input, &f.weight, &f.target, &f.logits_max, &f.sum_exp, &f.predicted,
                       &f.mask, &f.masked_target}) {
    EXPECT_EQ(array->destroy_tensor(), 0);
  }
  EXPECT_TRUE(f.logits_max.untouched()) << "the gate holds the stream";
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStream(stream), 0);
  expect_forward(f);
}

TEST(Executor, TensorsDestroyedBeforePhaseTwoAreRefused) {
  Forward f = make_forward();
  const Prepared p = prepare(f);
  EXPECT_EQ(f.input.destroy_tensor(), 0);
  EXPECT_EQ(launch(p), kInvalid);
  EXPECT_TRUE(names(take_message(), "input"));
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  EXPECT_TRUE(f.logits_max.untouched());
}

TEST(Executor, RepeatableNeedsItsTensorsAtEachLaunch) {
  Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  ASSERT_EQ(launch(p), 0);
  expect_statistics(f);
  EXPECT_EQ(f.masked_target.destroy_tensor(), 0);
  EXPECT_EQ(launch(p), kInvalid);
  EXPECT_TRUE(names(take_message(), "maskedTargetOut"));
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
}

TEST(Executor, TensorsMadeAnewBetweenThePhasesAreRefused) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  const std::int64_t shape[] = {37, 95};
  EXPECT_EQ(aclInitTensor(f.input.tensor(), shape, 2, ACL_BF16, nullptr, 0, ACL_FORMAT_ND, shape, 2,
                          nullptr),
            0);
  EXPECT_EQ(launch(p), kInvalid);
  EXPECT_TRUE(names(take_message(), "input"));
  EXPECT_TRUE(f.logits_max.untouched());
}

TEST(Executor, PhaseTwoMayRunOnAnotherThread) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  aclnnStatus status = -1;
  aclError finished = -1;
  std::thread([&] {
    Stream* stream = nullptr;
    ASSERT_EQ(aclrtSetDevice(0), 0);
    stream = new Stream;
    status = launch(p, *stream);
    finished = aclrtSynchronizeStream(*stream);
    delete stream;
    ASSERT_EQ(aclrtResetDevice(0), 0);
  }).join();
  EXPECT_EQ(status, 0);
  EXPECT_EQ(finished, 0);
  expect_forward(f);
}

TEST(Executor, PhaseTwoOnAThreadWithoutADeviceWorksWithAStreamAndNotWithout) {
  Stream stream;
  const Forward f = make_forward(), g = make_forward();
  const Prepared p = prepare(f), q = prepare(g);
  std::thread([&] {
    EXPECT_EQ(launch(p, stream), 0) << take_message();
    EXPECT_EQ(launch(q, nullptr), kRuntime) << "no device, so no default stream";
  }).join();
  EXPECT_EQ(aclrtSynchronizeStream(stream), 0);
  expect_forward(f);
}

// ---- addresses

using SetAddress = aclnnStatus (*)(aclOpExecutor*, const size_t, aclTensor*, void*);

struct Spelling {
  const char* name;
  SetAddress input, output, any;
};

class Addresses : public testing::TestWithParam<Spelling> {};

INSTANTIATE_TEST_SUITE_P(BothSpellings, Addresses,
                         testing::Values(Spelling{"Lower", aclSetInputTensorAddr,
                                                  aclSetOutputTensorAddr, aclSetTensorAddr},
                                         Spelling{"Capital", AclSetInputTensorAddr,
                                                  AclSetOutputTensorAddr, AclSetTensorAddr}),
                         [](const auto& spelling) { return spelling.param.name; });

TEST_P(Addresses, EachAsynchronousLaunchLatchesItsOwn) {
  const Spelling& set = GetParam();
  Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  constexpr int kLaunches = 4;
  std::vector<Array> inputs, maxima, sums;
  Stream stream;
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), 0);
  for (int i = 0; i < kLaunches; ++i) {
    inputs.emplace_back(ACL_BF16, std::vector<std::int64_t>{37, 96});
    fill_exact(inputs.back(), static_cast<std::uint64_t>(100 + i));
    maxima.emplace_back(ACL_FLOAT, std::vector<std::int64_t>{37});
    sums.emplace_back(ACL_FLOAT, std::vector<std::int64_t>{37});
    EXPECT_EQ(set.input(p.executor, 0, f.input.tensor(), inputs.back().storage()), 0);
    EXPECT_EQ(set.output(p.executor, 0, f.logits_max.tensor(), maxima.back().storage()), 0);
    EXPECT_EQ(set.any(p.executor, 4, f.sum_exp.tensor(), sums.back().storage()), 0);
    ASSERT_EQ(launch(p, stream), 0) << take_message();
  }
  gate.open();
  ASSERT_EQ(aclrtSynchronizeStream(stream), 0);
  EXPECT_TRUE(f.logits_max.untouched()) << "the address of phase 1 must not be used";
  for (int i = 0; i < kLaunches; ++i) {
    SCOPED_TRACE(i);
    const auto k = static_cast<std::size_t>(i);
    f.input.assign(inputs[k]);
    f.logits_max.assign(maxima[k]);
    f.sum_exp.assign(sums[k]);
    const Statistics expected = reference_statistics(f);
    EXPECT_EQ(maxima[k].values(), expected.logits_max);
    for (std::int64_t b = 0; b < 37; ++b) {
      EXPECT_NEAR(sums[k].get(b), expected.sum_exp[static_cast<std::size_t>(b)],
                  expected.sum_exp[static_cast<std::size_t>(b)] * 1e-5);
    }
  }
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
}

TEST_P(Addresses, IndexIsIgnoredAndTheTensorDecides) {
  Forward f = make_forward();
  const Prepared p = prepare(f);
  const Array maxima(ACL_FLOAT, {37});
  EXPECT_EQ(GetParam().output(p.executor, 12345, f.logits_max.tensor(), maxima.storage()), 0);
  ASSERT_EQ(launch(p), 0);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  EXPECT_TRUE(f.logits_max.untouched());
  EXPECT_EQ(maxima.values(), reference_statistics(f).logits_max);
}

TEST_P(Addresses, NullDataInPhaseOneIsFineWhenSetBeforePhaseTwo) {
  Forward f = make_forward();
  const std::int64_t shape[] = {37, 96};
  aclTensor* input =
      aclCreateTensor(shape, 2, ACL_BF16, nullptr, 0, ACL_FORMAT_ND, shape, 2, nullptr);
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
                input, f.weight.tensor(), f.target.tensor(), 0, 300, f.logits_max.tensor(),
                f.sum_exp.tensor(), f.predicted.tensor(), f.mask.tensor(), f.masked_target.tensor(),
                nullptr, &size, &executor),
            0)
      << take_message();
  const GuardedBuffer workspace(size);
  EXPECT_EQ(GetParam().any(executor, 0, input, f.input.storage()), 0);
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(workspace.data(), size, executor, nullptr), 0)
      << take_message();
  expect_statistics(f);
  EXPECT_EQ(aclDestroyTensor(input), 0);
}

TEST_P(Addresses, OfAViewAreThatOfItsStorage) {
  // The offset of the view is added to the new address as it was to the old one.
  Forward f = make_forward();
  Array flat(ACL_BF16, {37, 96}, Layout::kFlat), other(ACL_BF16, {37, 96}, Layout::kFlat);
  flat.fill(0);
  other.assign(f.input);
  f.input = std::move(flat);
  const Prepared p = prepare(f);
  EXPECT_EQ(GetParam().input(p.executor, 0, f.input.tensor(), other.storage()), 0);
  ASSERT_EQ(launch(p), 0);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  f.input.assign(other);
  expect_forward(f);
}

TEST_P(Addresses, NullAndStaleHandlesAreRefused) {
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  void* address = f.input.storage();
  for (SetAddress set : {GetParam().input, GetParam().output, GetParam().any}) {
    EXPECT_EQ(set(nullptr, 0, f.input.tensor(), address), kInnerNull);
    EXPECT_EQ(set(p.executor, 0, nullptr, address), kInnerNull);
  }
  ASSERT_EQ(launch(p), 0);
  expect_statistics(f);
  for (SetAddress set : {GetParam().input, GetParam().output, GetParam().any}) {
    EXPECT_EQ(set(p.executor, 0, f.input.tensor(), address), kInner) << "the executor is gone";
  }
  const Prepared q = prepare(f);
  int no_tensor = 0;
  for (SetAddress set : {GetParam().input, GetParam().output, GetParam().any}) {
    EXPECT_EQ(set(q.executor, 0, reinterpret_cast<aclTensor*>(&no_tensor), address), kInvalid);
  }
  EXPECT_EQ(aclDestroyAclOpExecutor(q.executor), 0);
}

TEST(Addresses, RawAddressOfATensorIsReadByTheNextPhaseTwo) {
  Forward f = make_forward();
  const Prepared p = prepare(f);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(p.executor), 0);
  ASSERT_EQ(launch(p), 0);
  expect_statistics(f);
  Array other(ACL_BF16, {37, 96});
  fill_exact(other, 77);
  EXPECT_EQ(aclSetRawTensorAddr(f.input.tensor(), other.storage()), 0);
  ASSERT_EQ(launch(p), 0);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  f.input.assign(other);
  expect_forward(f);
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
}

TEST(Addresses, MissingDataAtPhaseTwoIsAnErrorAndNoCrash) {
  Forward f = make_forward();
  ASSERT_EQ(aclSetRawTensorAddr(f.weight.tensor(), nullptr), 0);
  const Prepared p = prepare(f);
  take_message();
  EXPECT_EQ(launch(p), kNull);
  const std::string message = take_message();
  EXPECT_TRUE(names(message, "weight")) << message;
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), 0);
  EXPECT_TRUE(f.logits_max.untouched());
}

TEST(Addresses, OfTensorListsAreCheckedByRelativeIndex) {
  using SetListAddress =
      aclnnStatus (*)(aclOpExecutor*, size_t, const size_t, aclTensorList*, void*);
  const std::int64_t shape[] = {4};
  const aclTensor* tensors[2];
  for (const aclTensor*& t : tensors) {
    t = aclCreateTensor(shape, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape, 1, nullptr);
  }
  aclTensorList* list = aclCreateTensorList(tensors, 2);
  ASSERT_NE(list, nullptr);
  const Forward f = make_forward();
  const Prepared p = prepare(f);
  float data[4] = {};
  for (SetListAddress set :
       {aclSetDynamicInputTensorAddr, aclSetDynamicOutputTensorAddr, aclSetDynamicTensorAddr,
        AclSetDynamicInputTensorAddr, AclSetDynamicOutputTensorAddr, AclSetDynamicTensorAddr}) {
    EXPECT_EQ(set(p.executor, 0, 2, list, data), kInvalid);
    EXPECT_EQ(set(nullptr, 0, 0, list, data), kInnerNull);
    EXPECT_EQ(set(p.executor, 0, 0, nullptr, data), kInnerNull);
    EXPECT_EQ(set(p.executor, 0, 1, list, data), 0);
    void* address = nullptr;
    EXPECT_EQ(aclGetRawTensorAddr(tensors[1], &address), 0);
    EXPECT_EQ(address, data);
  }
  EXPECT_EQ(aclDestroyAclOpExecutor(p.executor), 0);
  EXPECT_EQ(aclDestroyTensorList(list), 0);
}

// ---- memory of any origin

TEST(Memory, AnyHostPointerIsDeviceMemory) {
  // input from aclrtMalloc, weight from malloc, target from a vector, everything else from mmap.
  Forward f = make_forward();
  void* input = nullptr;
  ASSERT_EQ(aclrtMalloc(&input, f.input.storage_bytes(), ACL_MEM_MALLOC_NORMAL_ONLY), 0);
  ASSERT_EQ(aclrtMemcpy(input, f.input.storage_bytes(), f.input.storage(), f.input.storage_bytes(),
                        ACL_MEMCPY_HOST_TO_DEVICE),
            0);
  void* weight = std::malloc(f.weight.storage_bytes());
  std::memcpy(weight, f.weight.storage(), f.weight.storage_bytes());
  std::vector<std::int32_t> target(37);
  std::memcpy(target.data(), f.target.storage(), f.target.storage_bytes());
  const Prepared p = prepare(f);
  EXPECT_EQ(aclSetTensorAddr(p.executor, 0, f.input.tensor(), input), 0);
  EXPECT_EQ(aclSetTensorAddr(p.executor, 1, f.weight.tensor(), weight), 0);
  EXPECT_EQ(aclSetTensorAddr(p.executor, 2, f.target.tensor(), target.data()), 0);
  EXPECT_EQ(launch(p), 0);
  expect_statistics(f);
  std::free(weight);
  EXPECT_EQ(aclrtFree(input), 0);
}

// ---- threads

TEST(Threads, TwoThreadsWithTwoStreams) {
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([t] {
      ASSERT_EQ(aclrtSetDevice(0), 0);
      {
        Stream stream;
        for (std::uint64_t i = 0; i < 10; ++i) {
          const Forward f = make_forward(1000 * t + i);
          EXPECT_EQ(f.run(stream), 0);
          expect_forward(f);
        }
      }
      ASSERT_EQ(aclrtResetDevice(0), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Threads, OneStreamFedByTwoThreads) {
  Stream stream;
  std::vector<std::vector<Forward>> calls(2);
  std::vector<std::vector<Prepared>> prepared(2);
  for (std::uint64_t t = 0; t < 2; ++t) {
    for (std::uint64_t i = 0; i < 12; ++i) {
      calls[t].push_back(make_forward(1000 * t + i));
      prepared[t].push_back(prepare(calls[t].back()));
    }
  }
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (const Prepared& p : prepared[t]) EXPECT_EQ(launch(p, stream), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(aclrtSynchronizeStream(stream), 0);
  for (const auto& of_thread : calls) {
    for (const Forward& f : of_thread) expect_forward(f);
  }
}

// ---- error texts

TEST(Messages, BelongToTheirThread) {
  take_message();
  std::thread([] {
    EXPECT_NE(aclnnFusedLinearOnlineMaxSum(nullptr, 0, nullptr, nullptr), 0);
  }).join();
  EXPECT_EQ(aclGetRecentErrMsg(), nullptr) << "another thread's error";
  EXPECT_NE(aclnnFusedLinearOnlineMaxSum(nullptr, 0, nullptr, nullptr), 0);
  std::thread([] { EXPECT_EQ(aclGetRecentErrMsg(), nullptr); }).join();
  EXPECT_NE(aclGetRecentErrMsg(), nullptr);
  EXPECT_EQ(aclGetRecentErrMsg(), nullptr) << "get and clear";
}

TEST(Messages, StayValidUntilTheNextCall) {
  EXPECT_NE(aclnnFusedLinearOnlineMaxSum(nullptr, 0, nullptr, nullptr), 0);
  const char* text = aclGetRecentErrMsg();
  ASSERT_NE(text, nullptr);
  const std::string copy = text;
  EXPECT_NE(aclnnFusedCrossEntropyLossWithMaxSum(nullptr, 0, nullptr, nullptr), 0);
  EXPECT_EQ(copy, text) << "a new error must not overwrite a text that was handed out";
}

TEST(Messages, AreOneLineWithProcessTimeKindAndFunction) {
  const auto expect_line = [](const std::string& kind, const std::string& function) {
    const std::string message = take_message();
    const std::regex line("\\[PID: " + std::to_string(getpid()) +
                          "\\] \\d{4}-\\d\\d-\\d\\d-\\d\\d:\\d\\d:\\d\\d\\.\\d{3}\\.\\d{3} AclNN_" +
                          kind + ": " + function + ": [^\n]+");
    EXPECT_TRUE(std::regex_match(message, line)) << message;
  };
  EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(nullptr, 0, nullptr, nullptr), kNull);
  expect_line("Parameter_Error\\(EZ1001\\)", "aclnnFusedLinearOnlineMaxSum");
  EXPECT_EQ(aclrtFree(nullptr), 100000);
  expect_line("Parameter_Error\\(EZ1001\\)", "aclrtFree");
  EXPECT_EQ(aclDestroyAclOpExecutor(nullptr), kInnerNull);
  expect_line("Inner_Error\\(EZ9999\\)", "aclDestroyAclOpExecutor");
  void* memory = nullptr;
  EXPECT_EQ(aclrtMalloc(&memory, SIZE_MAX, ACL_MEM_MALLOC_HUGE_FIRST), 207001);
  expect_line("Runtime_Error\\(EZ9903\\)", "aclrtMalloc");
}

TEST(Messages, OfSuccessDoNotReplaceOneThatWaits) {
  EXPECT_EQ(aclrtFree(nullptr), 100000);
  const Forward f = make_forward();
  EXPECT_EQ(f.run(), 0);
  EXPECT_TRUE(names(take_message(), "aclrtFree"));
}

TEST(Messages, NewestIsTheOneToldAndLongOnesAreCut) {
  EXPECT_EQ(aclrtFree(nullptr), 100000);
  EXPECT_EQ(aclrtFreeHost(nullptr), 100000);
  const std::string message = take_message();
  EXPECT_TRUE(names(message, "aclrtFreeHost")) << message;
  EXPECT_FALSE(names(message, "aclrtFree")) << message;
  const std::string path(100000, 'x');
  EXPECT_EQ(aclInit(path.c_str()), 100003);
  EXPECT_GT(take_message().size(), 1000u);
}

}  // namespace
}  // namespace ascend_test
