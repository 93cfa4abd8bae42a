// SPDX-License-Identifier: Apache-2.0
// Streams and events: order, independence, asynchrony, timeouts, failures, handles that are no
// handles.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <thread>

#include "support.h"

namespace ascend_test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr aclError kInvalidParam = 100000;
constexpr aclError kRuntimeInvalid = 107000;
constexpr aclError kNoTimeStamp = 107006;
constexpr aclError kTimeReversal = 107007;
constexpr aclError kAlreadySubscribed = 107011;
constexpr aclError kThreadNotSubscribed = 107012;
constexpr aclError kStreamNotSubscribed = 107015;
constexpr aclError kInvalidHandle = 107017;
constexpr aclError kNotSupported = 207000;
constexpr aclError kInner = 507000;
constexpr aclError kReportTimeout = 507012;
constexpr aclError kStreamTimeout = 507046;
constexpr aclError kEventTimeout = 507047;
constexpr aclError kStreamFailed = 507015;

// Appends a number to a list in stream order.
struct Note {
  std::vector<int>* list;
  int number;
  static void take(void* self) {
    auto* note = static_cast<Note*>(self);
    note->list->push_back(note->number);
  }
};

void sleep_50_ms(void*) { std::this_thread::sleep_for(milliseconds(50)); }

class Event {
 public:
  Event() { EXPECT_EQ(aclrtCreateEvent(&event_), ACL_SUCCESS); }
  explicit Event(std::uint32_t flag) {
    EXPECT_EQ(aclrtCreateEventWithFlag(&event_, flag), ACL_SUCCESS);
  }
  ~Event() { EXPECT_EQ(aclrtDestroyEvent(event_), ACL_SUCCESS); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator aclrtEvent() const { return event_; }

 private:
  aclrtEvent event_ = nullptr;
};

TEST(Stream, RunsItsWorkInOrderOnAnotherThread) {
  Stream stream;
  std::vector<int> list;
  std::vector<Note> notes;
  for (int i = 0; i < 100; ++i) notes.push_back({&list, i});
  for (Note& note : notes) ASSERT_EQ(aclrtLaunchHostFunc(stream, Note::take, &note), ACL_SUCCESS);
  std::thread::id thread;
  ASSERT_EQ(
      aclrtLaunchHostFunc(
          stream, [](void* id) { *static_cast<std::thread::id*>(id) = std::this_thread::get_id(); },
          &thread),
      ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  ASSERT_EQ(list.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(list[static_cast<std::size_t>(i)], i);
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(Stream, RunsBesideTheCaller) {
  Stream stream;
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  EXPECT_TRUE(gate.wait_until_reached()) << "the stream runs without anyone waiting for it";
  Forward f = small_forward();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(f.prepare(&size, &executor), 0);
  const GuardedBuffer workspace(size);
  // Phase 2 must come back although the stream is held; if it did not, this test would hang.
  ASSERT_EQ(aclnnFusedLinearOnlineMaxSum(workspace.data(), size, executor, stream), 0);
  EXPECT_TRUE(f.logits_max.untouched());
  gate.open();
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  expect_forward(f);
}

TEST(Stream, AHeldStreamHoldsNoOther) {
  Stream held, other;
  Gate gate;
  ASSERT_EQ(gate.close_on(held), ACL_SUCCESS);
  std::vector<int> list;
  Note note{&list, 1};
  ASSERT_EQ(aclrtLaunchHostFunc(other, Note::take, &note), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(other), ACL_SUCCESS);
  EXPECT_EQ(list.size(), 1u);
  EXPECT_EQ(aclrtLaunchHostFunc(nullptr, Note::take, &note), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
  EXPECT_EQ(list.size(), 2u);
}

TEST(Stream, QueryTellsWhetherWorkIsLeft) {
  Stream stream;
  aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
  EXPECT_EQ(aclrtStreamQuery(stream, &status), ACL_SUCCESS);
  EXPECT_EQ(status, ACL_STREAM_STATUS_COMPLETE);
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtStreamQuery(stream, &status), ACL_SUCCESS);
  EXPECT_EQ(status, ACL_STREAM_STATUS_NOT_READY);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtStreamQuery(stream, &status), ACL_SUCCESS);
  EXPECT_EQ(status, ACL_STREAM_STATUS_COMPLETE);
}

TEST(Stream, SynchroniseWithTimeout) {
  Stream stream;
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, -1), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 1000), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, -2), kRuntimeInvalid);
  EXPECT_EQ(aclrtSynchronizeDeviceWithTimeout(-2), kRuntimeInvalid);
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  const Clock::time_point before = Clock::now();
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 60), kStreamTimeout);
  EXPECT_GE(Clock::now() - before, milliseconds(55));
  EXPECT_FALSE(take_message().empty());
  EXPECT_EQ(aclrtSynchronizeDeviceWithTimeout(20), kStreamTimeout);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeDeviceWithTimeout(20000), ACL_SUCCESS);
}

TEST(Stream, SynchroniseDeviceWaitsForEveryStream) {
  Stream a, b;
  std::atomic<int> done{0};
  const auto slow = [](void* counter) {
    std::this_thread::sleep_for(milliseconds(30));
    ++*static_cast<std::atomic<int>*>(counter);
  };
  for (aclrtStream stream : {static_cast<aclrtStream>(a), static_cast<aclrtStream>(b),
                             static_cast<aclrtStream>(nullptr)}) {
    ASSERT_EQ(aclrtLaunchHostFunc(stream, slow, &done), ACL_SUCCESS);
  }
  EXPECT_EQ(aclrtSynchronizeDevice(), ACL_SUCCESS);
  EXPECT_EQ(done, 3);
}

TEST(Stream, DestroyWaitsForQueuedWork) {
  aclrtStream stream = nullptr;
  ASSERT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
  std::atomic<int> done{0};
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(aclrtLaunchHostFunc(
                  stream,
                  [](void* counter) {
                    std::this_thread::sleep_for(milliseconds(10));
                    ++*static_cast<std::atomic<int>*>(counter);
                  },
                  &done),
              ACL_SUCCESS);
  }
  EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
  EXPECT_EQ(done, 5);
}

TEST(Stream, DestroyForceDropsQueuedWork) {
  aclrtStream stream = nullptr;
  ASSERT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  ASSERT_TRUE(gate.wait_until_reached());
  static std::atomic<int> done{0};  // outlives work that might be run all the same
  ASSERT_EQ(aclrtLaunchHostFunc(
                stream, [](void*) { ++done; }, nullptr),
            ACL_SUCCESS);
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(200));
    gate.open();
  });
  EXPECT_EQ(aclrtDestroyStreamForce(stream), ACL_SUCCESS);
  opener.join();
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(done, 0);
  EXPECT_EQ(aclrtSynchronizeStream(stream), kInvalidHandle);
}

TEST(Stream, IdsDiffer) {
  Stream a, b;
  std::int32_t first = -1, second = -1;
  EXPECT_EQ(aclrtStreamGetId(a, &first), ACL_SUCCESS);
  EXPECT_EQ(aclrtStreamGetId(b, &second), ACL_SUCCESS);
  EXPECT_NE(first, second);
  EXPECT_EQ(aclrtStreamGetId(a, nullptr), kInvalidParam);
}

TEST(Stream, EveryFlagAndPriorityIsAccepted) {
  for (std::uint32_t flag : {0u, 1u, 2u, 3u, 4u, 8u, 0x10u, 0x20u}) {
    aclrtStream stream = nullptr;
    EXPECT_EQ(aclrtCreateStreamWithConfig(&stream, 7, flag), ACL_SUCCESS) << flag;
    EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
  }
  aclrtStream stream = nullptr;
  EXPECT_EQ(aclrtCreateStreamWithConfig(&stream, 0, 0x40), kRuntimeInvalid);
  EXPECT_TRUE(names(take_message(), "flag"));
  EXPECT_EQ(stream, nullptr);
}

// Null is the default stream: one queue, the same for every function.
TEST(Stream, NullIsTheDefaultOne) {
  Event event;
  std::int32_t id = -1, again = -2;
  EXPECT_EQ(aclrtStreamGetId(nullptr, &id), ACL_SUCCESS);
  EXPECT_EQ(aclrtStreamGetId(nullptr, &again), ACL_SUCCESS);
  EXPECT_EQ(id, again);
  EXPECT_EQ(aclrtSetStreamFailureMode(nullptr, 0), ACL_SUCCESS);
  Gate gate;
  ASSERT_EQ(gate.close_on(nullptr), ACL_SUCCESS);
  aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
  EXPECT_EQ(aclrtStreamQuery(nullptr, &status), ACL_SUCCESS);
  EXPECT_EQ(status, ACL_STREAM_STATUS_NOT_READY);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(nullptr, 10), kStreamTimeout);
  aclrtEventStatus recorded = ACL_EVENT_STATUS_RESERVED;
  EXPECT_EQ(aclrtRecordEvent(event, nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEvent(event, &recorded), ACL_SUCCESS);
  EXPECT_EQ(recorded, ACL_EVENT_STATUS_NOT_READY);
  unsigned char memory[4] = {};
  EXPECT_EQ(aclrtMemsetAsync(memory, 4, 5, 4, nullptr), ACL_SUCCESS);
  EXPECT_EQ(memory[0], 0) << "the gate holds the stream";
  // What is synchronous waits for no stream.
  unsigned char copy[4] = {1, 1, 1, 1};
  EXPECT_EQ(aclrtMemcpy(copy, 4, memory, 4, ACL_MEMCPY_DEVICE_TO_HOST), ACL_SUCCESS);
  EXPECT_EQ(copy[3], 0);
  EXPECT_EQ(aclrtMemset(copy, 4, 9, 4), ACL_SUCCESS);
  void* device = nullptr;
  EXPECT_EQ(aclrtMalloc(&device, 64, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
  EXPECT_EQ(aclrtFree(device), ACL_SUCCESS);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
  EXPECT_EQ(memory[3], 5);
  EXPECT_EQ(aclrtQueryEvent(event, &recorded), ACL_SUCCESS);
  EXPECT_EQ(recorded, ACL_EVENT_STATUS_COMPLETE);
}

// A host function that waits for its own stream would wait for ever.
TEST(Stream, MustNotBeAwaitedByItsOwnHostFunction) {
  struct Argument {
    aclrtStream stream;
    aclrtEvent event;
    aclError synchronized = -1, destroyed = -1, device = -1, awaited = -1, copied = -1, reset = -1,
             finalized = -1;
  };
  Stream stream;
  Event event;
  Argument argument;
  argument.stream = stream;
  argument.event = event;
  ASSERT_EQ(aclrtLaunchHostFunc(
                stream,
                [](void* self) {
                  auto* a = static_cast<Argument*>(self);
                  a->synchronized = aclrtSynchronizeStream(a->stream);
                  a->destroyed = aclrtDestroyStream(a->stream);
                  a->device = aclrtSynchronizeDevice();
                  char from = 1, to = 0;  // pageable: over when the call returns
                  a->copied =
                      aclrtMemcpyAsync(&to, 1, &from, 1, ACL_MEMCPY_HOST_TO_HOST, a->stream);
                  a->reset = aclrtResetDevice(0);
                  a->finalized = aclFinalize();
                  if (aclrtRecordEvent(a->event, a->stream) != ACL_SUCCESS) return;
                  a->awaited = aclrtSynchronizeEvent(a->event);
                },
                &argument),
            ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
  EXPECT_EQ(argument.synchronized, kInner);
  EXPECT_EQ(argument.destroyed, kInner);
  EXPECT_EQ(argument.device, kInner);
  EXPECT_EQ(argument.copied, kInner);
  EXPECT_EQ(argument.reset, kInner);
  EXPECT_EQ(argument.finalized, kInner);
  EXPECT_EQ(argument.awaited, kInner);
}

TEST(Stream, NullArgumentsAreRefused) {
  Stream stream;
  aclrtEvent event = nullptr;
  ASSERT_EQ(aclrtCreateEvent(&event), ACL_SUCCESS);
  EXPECT_EQ(aclrtCreateStream(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtCreateStreamWithConfig(nullptr, 0, 0), kInvalidParam);
  EXPECT_EQ(aclrtDestroyStream(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtDestroyStreamForce(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtStreamQuery(stream, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtStreamWaitEvent(stream, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtLaunchHostFunc(stream, nullptr, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtLaunchCallback(nullptr, nullptr, ACL_CALLBACK_BLOCK, stream), kInvalidParam);
  EXPECT_EQ(aclrtCreateEvent(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtCreateEventWithFlag(nullptr, ACL_EVENT_SYNC), kInvalidParam);
  EXPECT_EQ(aclrtCreateEventExWithFlag(nullptr, ACL_EVENT_SYNC), kInvalidParam);
  EXPECT_EQ(aclrtDestroyEvent(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtRecordEvent(nullptr, stream), kInvalidParam);
  EXPECT_EQ(aclrtResetEvent(nullptr, stream), kInvalidParam);
  EXPECT_EQ(aclrtSynchronizeEvent(nullptr), kInvalidParam);
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(nullptr, 5), kInvalidParam);
  EXPECT_EQ(aclrtQueryEvent(event, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtQueryEventStatus(event, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, nullptr), kInvalidParam);
  aclrtEventStatus old_status = ACL_EVENT_STATUS_RESERVED;
  EXPECT_EQ(aclrtQueryEvent(nullptr, &old_status), kInvalidParam);
  float ms = 0;
  EXPECT_EQ(aclrtEventElapsedTime(nullptr, event, event), kInvalidParam);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, nullptr, event), kInvalidParam);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, event, nullptr), kInvalidParam);
  EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
}

TEST(Stream, ManyAtOnce) {
  constexpr int kStreams = 64;
  std::atomic<int> done{0};
  std::vector<aclrtStream> streams(kStreams);
  for (aclrtStream& stream : streams) {
    ASSERT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    ASSERT_EQ(aclrtLaunchHostFunc(
                  stream, [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); }, &done),
              ACL_SUCCESS);
  }
  EXPECT_EQ(aclrtSynchronizeDevice(), ACL_SUCCESS);
  EXPECT_EQ(done, kStreams);
  for (aclrtStream stream : streams) EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
}

TEST(Stream, MadeFedAndDestroyedByManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      ASSERT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
      std::atomic<int> done{0};
      for (int i = 0; i < 30; ++i) {
        aclrtStream stream = nullptr;
        aclrtEvent event = nullptr;
        ASSERT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
        ASSERT_EQ(aclrtCreateEvent(&event), ACL_SUCCESS);
        EXPECT_EQ(
            aclrtLaunchHostFunc(
                stream, [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); }, &done),
            ACL_SUCCESS);
        EXPECT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
        EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
        EXPECT_EQ(done, i + 1);
        EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
        EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
      }
      ASSERT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Stream, HostFunctionsMayCallTheInterface) {
  Stream first, second;
  struct Argument {
    aclrtStream stream;
    std::vector<int> list;
    aclError launched = -1, freed = -1;
    std::string message;
  } argument{second, {}, -1, -1, {}};
  ASSERT_EQ(aclrtLaunchHostFunc(
                first,
                [](void* self) {
                  auto* a = static_cast<Argument*>(self);
                  a->launched = aclrtLaunchHostFunc(
                      a->stream,
                      [](void* list) { static_cast<std::vector<int>*>(list)->push_back(1); },
                      &a->list);
                  a->freed = aclrtFree(nullptr);
                  a->message = take_message();
                },
                &argument),
            ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(first), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(second), ACL_SUCCESS);
  EXPECT_EQ(argument.launched, ACL_SUCCESS);
  EXPECT_EQ(argument.freed, kInvalidParam);
  EXPECT_FALSE(argument.message.empty());
  EXPECT_EQ(argument.list.size(), 1u);
}

// Every function that takes a handle, given one that was destroyed, one that never was, and one of
// another kind.
TEST(Handles, StaleForeignAndConfusedOnesAreRefusedEverywhere) {
  Stream good_stream;
  aclrtEvent good_event = nullptr;
  ASSERT_EQ(aclrtCreateEvent(&good_event), ACL_SUCCESS);
  aclrtStream stale_stream = nullptr;
  aclrtEvent stale_event = nullptr;
  ASSERT_EQ(aclrtCreateStream(&stale_stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtDestroyStream(stale_stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtCreateEvent(&stale_event), ACL_SUCCESS);
  ASSERT_EQ(aclrtDestroyEvent(stale_event), ACL_SUCCESS);
  alignas(64) unsigned char foreign[512] = {};
  unsigned char memory[64] = {};
  const auto none = [](void*) { ADD_FAILURE() << "ran on a stream that does not exist"; };
  for (aclrtStream bad : {stale_stream, static_cast<aclrtStream>(foreign), good_event,
                          reinterpret_cast<aclrtStream>(std::uintptr_t{8})}) {
    take_message();
    EXPECT_EQ(aclrtSynchronizeStream(bad), kInvalidHandle);
    EXPECT_FALSE(take_message().empty());
    EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(bad, 5), kInvalidHandle);
    EXPECT_EQ(aclrtDestroyStream(bad), kInvalidHandle);
    EXPECT_EQ(aclrtDestroyStreamForce(bad), kInvalidHandle);
    aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
    EXPECT_EQ(aclrtStreamQuery(bad, &status), kInvalidHandle);
    std::int32_t id = 0;
    EXPECT_EQ(aclrtStreamGetId(bad, &id), kInvalidHandle);
    EXPECT_EQ(aclrtStreamWaitEvent(bad, good_event), kInvalidHandle);
    EXPECT_EQ(aclrtSetStreamFailureMode(bad, 0), kInvalidHandle);
    EXPECT_EQ(aclrtLaunchHostFunc(bad, none, nullptr), kInvalidHandle);
    EXPECT_EQ(aclrtLaunchCallback(none, nullptr, ACL_CALLBACK_NO_BLOCK, bad), kInvalidHandle);
    EXPECT_EQ(aclrtSubscribeReport(pthread_self(), bad), kInvalidHandle);
    EXPECT_EQ(aclrtUnSubscribeReport(pthread_self(), bad), kInvalidHandle);
    EXPECT_EQ(aclrtRecordEvent(good_event, bad), kInvalidHandle);
    EXPECT_EQ(aclrtResetEvent(good_event, bad), kInvalidHandle);
    EXPECT_EQ(aclrtMemsetAsync(memory, 64, 1, 64, bad), kInvalidHandle);
    EXPECT_EQ(aclrtMemcpyAsync(memory, 32, memory + 32, 32, ACL_MEMCPY_DEVICE_TO_DEVICE, bad),
              kInvalidHandle);
    EXPECT_EQ(aclrtMemcpy2dAsync(memory, 8, memory + 32, 8, 4, 2, ACL_MEMCPY_DEVICE_TO_DEVICE, bad),
              kInvalidHandle);
    Forward f;
    f.input = Array(ACL_BF16, {2, 4});
    f.weight = Array(ACL_BF16, {3, 4});
    f.target = Array(ACL_INT32, {2});
    f.end = 3;
    f.make_outputs(false);
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(f.prepare(&size, &executor), 0);
    const GuardedBuffer workspace(size);
    EXPECT_EQ(aclnnFusedLinearOnlineMaxSum(workspace.data(), size, executor, bad), 361001);
    EXPECT_TRUE(names(take_message(), "stream"));
    EXPECT_TRUE(f.logits_max.untouched());
  }
  for (aclrtEvent bad : {stale_event, static_cast<aclrtEvent>(foreign),
                         static_cast<aclrtEvent>(static_cast<aclrtStream>(good_stream)),
                         reinterpret_cast<aclrtEvent>(std::uintptr_t{8})}) {
    aclrtEventStatus old_status = ACL_EVENT_STATUS_RESERVED;
    aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    aclrtEventWaitStatus wait = ACL_EVENT_WAIT_STATUS_RESERVED;
    float ms = 0;
    EXPECT_EQ(aclrtRecordEvent(bad, good_stream), kInvalidHandle);
    EXPECT_EQ(aclrtResetEvent(bad, good_stream), kInvalidHandle);
    EXPECT_EQ(aclrtStreamWaitEvent(good_stream, bad), kInvalidHandle);
    EXPECT_EQ(aclrtQueryEvent(bad, &old_status), kInvalidHandle);
    EXPECT_EQ(aclrtQueryEventStatus(bad, &status), kInvalidHandle);
    EXPECT_EQ(aclrtQueryEventWaitStatus(bad, &wait), kInvalidHandle);
    EXPECT_EQ(aclrtSynchronizeEvent(bad), kInvalidHandle);
    EXPECT_EQ(aclrtSynchronizeEventWithTimeout(bad, 5), kInvalidHandle);
    EXPECT_EQ(aclrtEventElapsedTime(&ms, bad, good_event), kInvalidHandle);
    EXPECT_EQ(aclrtEventElapsedTime(&ms, good_event, bad), kInvalidHandle);
    EXPECT_EQ(aclrtDestroyEvent(bad), kInvalidHandle);
  }
  EXPECT_EQ(aclrtSynchronizeStream(good_stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtDestroyEvent(good_event), ACL_SUCCESS);
}

// ---- events

TEST(Event, QueriesTellTheSameInOppositeSenses) {
  Stream stream;
  Event event;
  aclrtEventStatus old_status = ACL_EVENT_STATUS_RESERVED;
  aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
  aclrtEventWaitStatus wait = ACL_EVENT_WAIT_STATUS_RESERVED;
  EXPECT_EQ(aclrtQueryEventStatus(event, &status), ACL_SUCCESS);
  EXPECT_EQ(status, ACL_EVENT_RECORDED_STATUS_COMPLETE) << "never recorded";
  EXPECT_EQ(aclrtQueryEvent(event, &old_status), ACL_SUCCESS);
  EXPECT_EQ(old_status, ACL_EVENT_STATUS_COMPLETE) << "never recorded";
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, &wait), ACL_SUCCESS);
  EXPECT_EQ(wait, ACL_EVENT_WAIT_STATUS_COMPLETE) << "nobody waits";
  EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS) << "never recorded";
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEvent(event, &old_status), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEventStatus(event, &status), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, &wait), ACL_SUCCESS);
  EXPECT_EQ(static_cast<int>(old_status), 1);
  EXPECT_EQ(static_cast<int>(status), 0);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEvent(event, &old_status), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEventStatus(event, &status), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, &wait), ACL_SUCCESS);
  EXPECT_EQ(static_cast<int>(old_status), 0);
  EXPECT_EQ(static_cast<int>(status), 1);
  EXPECT_EQ(wait, ACL_EVENT_WAIT_STATUS_COMPLETE);
}

TEST(Event, ElapsedTimeIsMilliseconds) {
  Stream stream;
  Event start, end;
  ASSERT_EQ(aclrtRecordEvent(start, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtLaunchHostFunc(stream, sleep_50_ms, nullptr), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(end, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeEvent(end), ACL_SUCCESS);
  float ms = 0;
  EXPECT_EQ(aclrtEventElapsedTime(&ms, start, end), ACL_SUCCESS);
  EXPECT_GE(ms, 49.0F);
  EXPECT_LT(ms, 20000.0F);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, end, start), kTimeReversal);
  EXPECT_FALSE(take_message().empty());
}

TEST(Event, ElapsedTimeNeedsTwoFinishedRecords) {
  Stream stream;
  Event start, end;
  float ms = -1;
  EXPECT_EQ(aclrtEventElapsedTime(&ms, start, end), kNoTimeStamp);
  ASSERT_EQ(aclrtRecordEvent(start, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, start, end), kNoTimeStamp);
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(end, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, start, end), kNoTimeStamp) << "not finished";
  gate.open();
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, start, end), ACL_SUCCESS);
  EXPECT_GE(ms, 0.0F);
}

TEST(Event, SynchroniseWithTimeout) {
  Stream stream;
  Event event;
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, 30), kEventTimeout);
  EXPECT_FALSE(take_message().empty());
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, -2), kRuntimeInvalid);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, 20000), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, -1), ACL_SUCCESS);
}

TEST(Event, MakesAnotherStreamWait) {
  Stream first, second;
  Event event;
  std::vector<int> list;
  Note one{&list, 1}, two{&list, 2};
  Gate gate;
  ASSERT_EQ(gate.close_on(first), ACL_SUCCESS);
  ASSERT_EQ(aclrtLaunchHostFunc(first, Note::take, &one), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(event, first), ACL_SUCCESS);
  ASSERT_EQ(aclrtStreamWaitEvent(second, event), ACL_SUCCESS);
  ASSERT_EQ(aclrtLaunchHostFunc(second, Note::take, &two), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(second, 50), kStreamTimeout);
  EXPECT_TRUE(list.empty());
  aclrtEventWaitStatus wait = ACL_EVENT_WAIT_STATUS_RESERVED;
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, &wait), ACL_SUCCESS);
  EXPECT_EQ(wait, ACL_EVENT_WAIT_STATUS_NOT_READY);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStream(second), ACL_SUCCESS);
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, &wait), ACL_SUCCESS);
  EXPECT_EQ(wait, ACL_EVENT_WAIT_STATUS_COMPLETE);
  EXPECT_EQ(list, (std::vector<int>{1, 2}));
}

TEST(Event, NeverRecordedMakesNoStreamWait) {
  Stream stream;
  Event event;
  EXPECT_EQ(aclrtStreamWaitEvent(stream, event), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
}

TEST(Event, AwaitedIsTheRecordThatWasNewestThen) {
  Stream first, second;
  Event event;
  Gate early, late;
  ASSERT_EQ(early.close_on(first), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(event, first), ACL_SUCCESS);
  ASSERT_EQ(aclrtStreamWaitEvent(second, event), ACL_SUCCESS);
  ASSERT_EQ(late.close_on(first), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(event, first), ACL_SUCCESS);
  early.open();
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(second, 20000), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, 10), kEventTimeout);
  late.open();
  EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
}

TEST(Event, RecordedAnewCountsAnew) {
  Stream stream;
  Event event;
  ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, 20), kEventTimeout);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
}

TEST(Event, CanBeResetAndUsedAgain) {
  Stream stream;
  Event event;
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
    ASSERT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
    ASSERT_EQ(aclrtResetEvent(event, stream), ACL_SUCCESS);
    ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  }
}

TEST(Event, IsResetInStreamOrderToOneNeverRecorded) {
  Stream stream;
  Event event, other;
  ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(other, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtResetEvent(event, stream), ACL_SUCCESS);
  float ms = -1;
  EXPECT_EQ(aclrtEventElapsedTime(&ms, event, other), ACL_SUCCESS) << "not yet";
  gate.open();
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, event, other), kNoTimeStamp);
  aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
  EXPECT_EQ(aclrtQueryEventStatus(event, &status), ACL_SUCCESS);
  EXPECT_EQ(status, ACL_EVENT_RECORDED_STATUS_COMPLETE);
}

TEST(Event, HasATimeOnlyWithTheFlagForIt) {
  Stream stream;
  Event timed(ACL_EVENT_TIME_LINE);
  Event untimed(ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS);
  ASSERT_EQ(aclrtRecordEvent(timed, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtRecordEvent(untimed, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  float ms = -1;
  EXPECT_EQ(aclrtEventElapsedTime(&ms, timed, timed), ACL_SUCCESS);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, timed, untimed), kNoTimeStamp);
  EXPECT_TRUE(names(take_message(), "endEvent"));
  EXPECT_EQ(aclrtEventElapsedTime(&ms, untimed, timed), kNoTimeStamp);
  EXPECT_TRUE(names(take_message(), "startEvent"));
}

TEST(Event, OfTheDefaultStream) {
  Event event;
  EXPECT_EQ(aclrtRecordEvent(event, nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
  EXPECT_EQ(aclrtResetEvent(event, nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
}

TEST(Event, DestroyedWhileAStreamWaitsForItDoesNoHarm) {
  Stream first, second;
  Gate gate;
  ASSERT_EQ(gate.close_on(first), ACL_SUCCESS);
  {
    Event event;
    ASSERT_EQ(aclrtRecordEvent(event, first), ACL_SUCCESS);
    ASSERT_EQ(aclrtStreamWaitEvent(second, event), ACL_SUCCESS);
  }
  gate.open();
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(second, 20000), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(first, 20000), ACL_SUCCESS);
}

TEST(Event, FlagsAreAccepted) {
  for (std::uint32_t flag : {1u, 2u, 8u, 9u, 0x10u, 0x20u}) {
    aclrtEvent event = nullptr;
    EXPECT_EQ(aclrtCreateEventWithFlag(&event, flag), ACL_SUCCESS) << flag;
    EXPECT_EQ(aclrtRecordEvent(event, nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
    EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
    EXPECT_EQ(aclrtCreateEventExWithFlag(&event, flag), ACL_SUCCESS) << flag;
    EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
  }
  for (std::uint32_t flag : {4u, 0x80u}) {
    aclrtEvent event = nullptr;
    EXPECT_EQ(aclrtCreateEventWithFlag(&event, flag), kRuntimeInvalid) << flag;
    EXPECT_TRUE(names(take_message(), "flag"));
    EXPECT_EQ(aclrtCreateEventExWithFlag(&event, flag), kRuntimeInvalid) << flag;
    EXPECT_EQ(event, nullptr);
  }
}

TEST(Event, WithTheIpcFlagCannotBeResetQueriedOrTimed) {
  Stream stream;
  aclrtEvent event = nullptr;
  ASSERT_EQ(aclrtCreateEventExWithFlag(&event, ACL_EVENT_IPC), ACL_SUCCESS);
  Event other;
  ASSERT_EQ(aclrtRecordEvent(other, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  aclrtEventStatus old_status = ACL_EVENT_STATUS_RESERVED;
  float ms = 0;
  aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
  aclrtEventWaitStatus wait = ACL_EVENT_WAIT_STATUS_RESERVED;
  EXPECT_EQ(aclrtResetEvent(event, stream), kNotSupported);
  EXPECT_EQ(aclrtQueryEvent(event, &old_status), kNotSupported);
  EXPECT_EQ(aclrtQueryEventStatus(event, &status), kNotSupported);
  EXPECT_EQ(aclrtQueryEventWaitStatus(event, &wait), kNotSupported);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, other, event), kNotSupported);
  EXPECT_EQ(aclrtEventElapsedTime(&ms, event, other), kNotSupported);
  EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
}

// ---- callbacks

TEST(Callback, RunsOnTheSubscribedThreadInProcessReport) {
  Stream stream;
  std::atomic<bool> subscribed{false}, stop{false};
  std::thread::id worker_id, ran_on;
  std::thread worker([&] {
    worker_id = std::this_thread::get_id();
    while (!subscribed) std::this_thread::yield();
    while (!stop) aclrtProcessReport(20);
  });
  const auto id = static_cast<std::uint64_t>(worker.native_handle());
  ASSERT_EQ(aclrtSubscribeReport(id, stream), ACL_SUCCESS);
  subscribed = true;
  ASSERT_EQ(
      aclrtLaunchCallback(
          [](void* where) { *static_cast<std::thread::id*>(where) = std::this_thread::get_id(); },
          &ran_on, ACL_CALLBACK_BLOCK, stream),
      ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
  stop = true;
  worker.join();
  EXPECT_EQ(ran_on, worker_id);
  EXPECT_EQ(aclrtUnSubscribeReport(id, stream), ACL_SUCCESS);
}

TEST(Callback, BlockHoldsTheStreamAndNoBlockDoesNot) {
  Stream stream;
  const auto self = static_cast<std::uint64_t>(pthread_self());
  ASSERT_EQ(aclrtSubscribeReport(self, stream), ACL_SUCCESS);
  std::vector<int> list;
  Note callback{&list, 1}, behind{&list, 2};
  ASSERT_EQ(aclrtLaunchCallback(Note::take, &callback, ACL_CALLBACK_NO_BLOCK, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtLaunchHostFunc(stream, Note::take, &behind), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
  EXPECT_EQ(list, std::vector<int>{2}) << "the stream did not wait for us";
  EXPECT_EQ(aclrtProcessReport(20000), ACL_SUCCESS);
  EXPECT_EQ(list, (std::vector<int>{2, 1}));
  ASSERT_EQ(aclrtLaunchCallback(Note::take, &callback, ACL_CALLBACK_BLOCK, stream), ACL_SUCCESS);
  ASSERT_EQ(aclrtLaunchHostFunc(stream, Note::take, &behind), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 50), kStreamTimeout);
  EXPECT_EQ(aclrtProcessReport(20000), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
  EXPECT_EQ(list, (std::vector<int>{2, 1, 1, 2}));
  EXPECT_EQ(aclrtUnSubscribeReport(self, stream), ACL_SUCCESS);
}

TEST(Callback, NeedsASubscribedThread) {
  Stream stream;
  const aclrtCallback nothing = [](void*) {};
  EXPECT_EQ(aclrtLaunchCallback(nothing, nullptr, ACL_CALLBACK_BLOCK, stream),
            kStreamNotSubscribed);
  EXPECT_FALSE(take_message().empty());
  EXPECT_EQ(aclrtProcessReport(10), kThreadNotSubscribed);
  EXPECT_EQ(aclrtProcessReport(-2), kRuntimeInvalid);
  const auto self = static_cast<std::uint64_t>(pthread_self());
  EXPECT_EQ(aclrtUnSubscribeReport(self, stream), kThreadNotSubscribed);
  EXPECT_EQ(aclrtSubscribeReport(self, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSubscribeReport(self, stream), kAlreadySubscribed);
  EXPECT_EQ(aclrtUnSubscribeReport(self + 1, stream), kThreadNotSubscribed);
  EXPECT_EQ(aclrtLaunchCallback(nothing, nullptr, static_cast<aclrtCallbackBlockType>(2), stream),
            kInvalidParam);
  EXPECT_EQ(aclrtUnSubscribeReport(self, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
}

TEST(Callback, ReportTimesOut) {
  Stream stream;
  ASSERT_EQ(aclrtSubscribeReport(pthread_self(), stream), ACL_SUCCESS);
  const Clock::time_point before = Clock::now();
  EXPECT_EQ(aclrtProcessReport(30), kReportTimeout);
  EXPECT_GE(Clock::now() - before, milliseconds(25));
  EXPECT_EQ(aclrtUnSubscribeReport(pthread_self(), stream), ACL_SUCCESS);
}

// ---- failing work

// A gradient whose row 1 has a target that this shard does not have.
Gradient failing_gradient() {
  Gradient g;
  g.input = Array(ACL_BF16, {3, 8});
  g.weight = Array(ACL_BF16, {130, 8});
  fill_exact(g.input, 1);
  fill_exact(g.weight, 2);
  g.grad = Array(ACL_FLOAT, {3});
  g.grad.fill(1);
  g.mask = Array(ACL_BOOL, {3});
  g.mask.fill(0);
  g.masked_target = Array(ACL_INT32, {3});
  g.masked_target.assign({0, 130, 1});
  g.logits_max = Array(ACL_FLOAT, {3});
  g.sum_exp = Array(ACL_FLOAT, {3});
  g.logits_max.fill(9);
  g.sum_exp.fill(1);
  g.make_outputs();
  return g;
}

void enqueue(const GuardedBuffer& workspace, std::uint64_t size, aclOpExecutor* executor,
             aclrtStream stream) {
  ASSERT_EQ(aclnnFusedLinearCrossEntropyLossGrad(workspace.data(), size, executor, stream), 0);
}

TEST(FailureMode, ContinueRunsLaterWorkAndStopDoesNot) {
  for (std::uint64_t mode : {0, 1}) {
    SCOPED_TRACE(mode);
    Stream stream;
    ASSERT_EQ(aclrtSetStreamFailureMode(stream, mode), ACL_SUCCESS);
    const Gradient g = failing_gradient();
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(g.prepare(&size, &executor), 0);
    const GuardedBuffer workspace(size);
    enqueue(workspace, size, executor, stream);
    unsigned char* memory = nullptr;
    ASSERT_EQ(aclrtMalloc(reinterpret_cast<void**>(&memory), 64, ACL_MEM_MALLOC_HUGE_FIRST), 0);
    memory[0] = 0;
    ASSERT_EQ(aclrtMemsetAsync(memory, 64, 3, 64, stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtSynchronizeStream(stream), kStreamFailed);
    EXPECT_EQ(memory[0], mode == 0 ? 3 : 0);
    EXPECT_TRUE(g.grad_input.untouched());
    if (mode == 0) {
      EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS) << "told once";
    } else {
      EXPECT_EQ(aclrtSynchronizeStream(stream), kStreamFailed) << "stays so";
      ASSERT_EQ(aclrtMemsetAsync(memory, 64, 4, 64, stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), kStreamFailed);
      EXPECT_EQ(memory[0], 0);
      EXPECT_EQ(aclrtSetStreamFailureMode(stream, 0), ACL_SUCCESS) << "a new beginning";
      EXPECT_EQ(aclrtSynchronizeStream(stream), kStreamFailed);
      ASSERT_EQ(aclrtMemsetAsync(memory, 64, 5, 64, stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
      EXPECT_EQ(memory[0], 5);
    }
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  }
}

TEST(FailureMode, OtherModesAreRefused) {
  Stream stream;
  EXPECT_EQ(aclrtSetStreamFailureMode(stream, 2), kRuntimeInvalid);
  EXPECT_TRUE(names(take_message(), "mode"));
}

TEST(Failure, OfOneStreamIsNoFailureOfAnother) {
  Stream bad, good;
  const Gradient g = failing_gradient();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(g.prepare(&size, &executor), 0);
  const GuardedBuffer workspace(size);
  enqueue(workspace, size, executor, bad);
  EXPECT_EQ(aclrtSynchronizeStream(good), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(bad), kStreamFailed);
}

// Several failures are one answer; neither an event nor a wait that ended too early takes it away.
TEST(Failure, IsToldOnceByTheNextSynchroniseThatWaitedForIt) {
  Stream stream;
  Event event;
  Gate gate;
  ASSERT_EQ(gate.close_on(stream), ACL_SUCCESS);
  const Gradient first = failing_gradient(), second = failing_gradient();
  std::vector<GuardedBuffer> workspaces;
  for (const Gradient* g : {&first, &second}) {
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(g->prepare(&size, &executor), 0);
    workspaces.emplace_back(size);
    enqueue(workspaces.back(), size, executor, stream);
  }
  ASSERT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 10), kStreamTimeout);
  gate.open();
  EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
  aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
  EXPECT_EQ(aclrtStreamQuery(stream, &status), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), kStreamFailed);
  const std::string message = take_message();
  EXPECT_TRUE(names(message, "maskedTarget")) << message;
  EXPECT_NE(message.find("AclNN_Runtime_Error(EZ9903)"), std::string::npos) << message;
  EXPECT_EQ(aclrtSynchronizeDevice(), ACL_SUCCESS) << "told";
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS) << "told";
}

TEST(Failure, MessageIsForTheThreadThatSynchronises) {
  Stream stream;
  const Gradient g = failing_gradient();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(g.prepare(&size, &executor), 0);
  const GuardedBuffer workspace(size);
  enqueue(workspace, size, executor, stream);
  take_message();
  std::thread([&] {
    EXPECT_EQ(aclrtSynchronizeStream(stream), kStreamFailed);
    EXPECT_TRUE(names(take_message(), "130"));
  }).join();
  EXPECT_EQ(take_message(), "");
}

TEST(Failure, OnTheDefaultStream) {
  const Gradient g = failing_gradient();
  EXPECT_EQ(g.run(), kStreamFailed);
  EXPECT_TRUE(names(take_message(), "130"));
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
}

TEST(Failure, DestroyingTheStreamForgetsIt) {
  const Gradient g = failing_gradient();
  std::uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(g.prepare(&size, &executor), 0);
  const GuardedBuffer workspace(size);
  {
    Stream stream;
    enqueue(workspace, size, executor, stream);
    EXPECT_EQ(aclrtSynchronizeStream(stream), kStreamFailed);
  }
  EXPECT_EQ(aclrtSynchronizeDevice(), ACL_SUCCESS);
}

}  // namespace
}  // namespace ascend_test
