// SPDX-License-Identifier: Apache-2.0
// What a process does once: initialise, choose a device, finalise, fork. Each test runs in a
// process of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "support.h"

namespace ascend_test {
namespace {

constexpr aclError kInvalidParam = 100000;
constexpr aclError kRepeatInitialize = 100002;
constexpr aclError kRepeatFinalize = 100037;
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kNoContext = 107002;

Forward small_forward() {
  Forward f;
  f.input = Array(ACL_BF16, {9, 16});
  f.weight = Array(ACL_BF16, {140, 16});
  f.target = Array(ACL_INT32, {9});
  fill_exact(f.input, 1);
  fill_exact(f.weight, 2);
  f.target.fill(4);
  f.end = 140;
  f.make_outputs(false);
  return f;
}

TEST(Process, InitCountsAndFinalizeEndsWhateverTheCount) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclInit(nullptr), kRepeatInitialize);
    EXPECT_EQ(aclInit(nullptr), kRepeatInitialize);
    EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
    EXPECT_EQ(aclFinalize(), kRepeatFinalize);
  });
}

TEST(Process, FinalizeReferenceDropsOneAtATime) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclInit(nullptr), kRepeatInitialize);
    EXPECT_EQ(aclInit(nullptr), kRepeatInitialize);
    std::uint64_t count = 99;
    EXPECT_EQ(aclFinalizeReference(&count), ACL_SUCCESS);
    EXPECT_EQ(count, 2u);
    EXPECT_EQ(aclFinalizeReference(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclFinalizeReference(&count), ACL_SUCCESS);
    EXPECT_EQ(count, 0u);
    EXPECT_EQ(aclFinalize(), kRepeatFinalize);
  });
}

TEST(Process, FinalizeBeforeInitIsRefused) {
  EXPECT_IN_FRESH_PROCESS(EXPECT_EQ(aclFinalize(), kRepeatFinalize););
}

TEST(Process, WithoutInitADeviceCanBeUsed) {
  // torch_npu initialises; smaller clients begin with aclrtSetDevice.
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    const Forward f = small_forward();
    EXPECT_EQ(f.run(), 0);
    expect_forward(f);
  });
}

TEST(Process, ThereIsOneDevice) {
  EXPECT_IN_FRESH_PROCESS({
    std::uint32_t count = 0;
    EXPECT_EQ(aclrtGetDeviceCount(&count), ACL_SUCCESS);
    EXPECT_EQ(count, 1u);
    EXPECT_EQ(aclrtGetDeviceCount(nullptr), kInvalidParam);
    EXPECT_EQ(aclrtSetDevice(1), kInvalidDevice);
    EXPECT_FALSE(take_message().empty());
    EXPECT_EQ(aclrtSetDevice(-1), kInvalidDevice);
    std::int32_t device = 77;
    EXPECT_EQ(aclrtGetDevice(&device), kNoContext);
    EXPECT_EQ(device, 77);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(aclrtGetDevice(nullptr), kInvalidParam);
    EXPECT_EQ(aclrtResetDevice(1), kInvalidDevice);
    EXPECT_EQ(aclrtResetDeviceForce(1), kInvalidDevice);
  });
}

TEST(Process, WithoutADeviceNothingIsCreated) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    aclrtEvent event = nullptr;
    aclrtContext context = nullptr;
    void* memory = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), kNoContext);
    EXPECT_FALSE(take_message().empty());
    EXPECT_EQ(aclrtCreateStreamWithConfig(&stream, 0, ACL_STREAM_FAST_LAUNCH), kNoContext);
    EXPECT_EQ(aclrtCreateEvent(&event), kNoContext);
    EXPECT_EQ(aclrtCreateEventWithFlag(&event, ACL_EVENT_SYNC), kNoContext);
    EXPECT_EQ(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC), kNoContext);
    EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), kNoContext);
    EXPECT_EQ(aclrtMallocAlign32(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), kNoContext);
    EXPECT_EQ(aclrtMallocCached(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), kNoContext);
    EXPECT_EQ(aclrtMallocWithCfg(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST, nullptr), kNoContext);
    EXPECT_EQ(aclrtMallocHost(&memory, 64), kNoContext);
    EXPECT_EQ(aclrtSynchronizeDevice(), kNoContext);
    EXPECT_EQ(aclrtSynchronizeDeviceWithTimeout(10), kNoContext);
    EXPECT_EQ(aclrtSynchronizeStream(nullptr), kNoContext);
    EXPECT_EQ(aclrtGetCurrentContext(&context), kNoContext);
    EXPECT_EQ(stream, nullptr);
    EXPECT_EQ(event, nullptr);
    EXPECT_EQ(memory, nullptr);
  });
}

TEST(Process, EachThreadChoosesItsOwnDevice) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    std::thread([] {
      aclrtStream stream = nullptr;
      std::int32_t device = 0;
      EXPECT_EQ(aclrtGetDevice(&device), kNoContext);
      EXPECT_EQ(aclrtCreateStream(&stream), kNoContext);
      EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
      EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
    }).join();
  });
}

TEST(Process, CallsWithAHandleWorkFromAnyThread) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    aclrtEvent event = nullptr;
    void* memory = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtCreateEvent(&event), ACL_SUCCESS);
    EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
    std::thread([&] {
      aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
      EXPECT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtMemsetAsync(memory, 64, 7, 64, stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtStreamQuery(stream, &status), ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeEvent(event), ACL_SUCCESS);
      EXPECT_EQ(aclrtDestroyEvent(event), ACL_SUCCESS);
      EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
    }).join();
  });
}

TEST(Process, SetDeviceCountsAndTheLastResetReleases) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    void* memory = nullptr;
    EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS) << "one is left";
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
    EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    std::int32_t device = 0;
    EXPECT_EQ(aclrtGetDevice(&device), kNoContext);
    EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), kNoContext);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS) << "and it can be set again";
    EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
    EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  });
}

TEST(Process, ResetDeviceForceReleasesWhateverTheCount) {
  EXPECT_IN_FRESH_PROCESS({
    for (int i = 0; i < 3; ++i) EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtResetDeviceForce(0), ACL_SUCCESS);
    std::int32_t device = 0;
    EXPECT_EQ(aclrtGetDevice(&device), kNoContext);
  });
}

TEST(Process, ResetDeviceWaitsForQueuedWork) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    static bool ran = false;
    EXPECT_EQ(aclrtLaunchHostFunc(
                  nullptr,
                  [](void*) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(100));
                    ran = true;
                  },
                  nullptr),
              ACL_SUCCESS);
    EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    EXPECT_TRUE(ran);
  });
}

TEST(Process, StreamsEndWithTheirDevice) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    char memory[8] = {};
    EXPECT_NE(aclrtMemsetAsync(memory, 8, 1, 8, stream), ACL_SUCCESS);
    EXPECT_NE(aclrtSynchronizeStream(stream), ACL_SUCCESS);
    EXPECT_NE(aclrtDestroyStream(stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_NE(aclrtSynchronizeStream(stream), ACL_SUCCESS) << "a new life of the device";
  });
}

TEST(Process, StreamsEndWithTheirContext) {
  EXPECT_IN_FRESH_PROCESS({
    aclrtContext context = nullptr;
    aclrtStream stream = nullptr;
    EXPECT_EQ(aclrtCreateContext(&context, 0), ACL_SUCCESS);
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    static bool ran = false;
    EXPECT_EQ(aclrtLaunchHostFunc(
                  stream,
                  [](void*) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(50));
                    ran = true;
                  },
                  nullptr),
              ACL_SUCCESS);
    EXPECT_EQ(aclrtDestroyContext(context), ACL_SUCCESS);
    EXPECT_TRUE(ran) << "queued work is finished first";
    EXPECT_NE(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  });
}

TEST(Process, ExitWithStreamsAndWorkLeftDoesNotHangOrCrash) {
  EXPECT_EXIT(
      {
        alarm(20);
        aclrtSetDevice(0);
        aclrtStream stream = nullptr;
        aclrtCreateStream(&stream);
        static Gate gate;
        gate.close_on(stream);
        gate.open();
        std::exit(5);  // runs destructors, unlike _Exit
      },
      testing::ExitedWithCode(5), "");
}

TEST(Process, FinalizeWithWorkQueuedDoesNotHang) {
  EXPECT_IN_FRESH_PROCESS({
    alarm(20);
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtLaunchHostFunc(
                  stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); },
                  nullptr),
              ACL_SUCCESS);
    EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
  });
}

TEST(Process, ContextsBelongToThreads) {
  EXPECT_IN_FRESH_PROCESS({
    aclrtContext first = nullptr;
    aclrtContext second = nullptr;
    aclrtContext current = nullptr;
    EXPECT_EQ(aclrtCreateContext(&first, 0), ACL_SUCCESS);
    EXPECT_EQ(aclrtGetCurrentContext(&current), ACL_SUCCESS);
    EXPECT_EQ(current, first) << "creating makes current";
    EXPECT_EQ(aclrtCreateContext(&second, 0), ACL_SUCCESS);
    EXPECT_NE(first, second);
    EXPECT_EQ(aclrtGetCurrentContext(&current), ACL_SUCCESS);
    EXPECT_EQ(current, second);
    EXPECT_EQ(aclrtSetCurrentContext(first), ACL_SUCCESS);
    EXPECT_EQ(aclrtGetCurrentContext(&current), ACL_SUCCESS);
    EXPECT_EQ(current, first);
    std::int32_t device = 5;
    EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS);
    EXPECT_EQ(device, 0);
    std::thread([&] {
      void* memory = nullptr;
      EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), kNoContext);
      EXPECT_EQ(aclrtSetCurrentContext(second), ACL_SUCCESS);
      EXPECT_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
      EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
    }).join();
    const Forward f = small_forward();
    EXPECT_EQ(f.run(), 0) << "a context has a default stream";
    expect_forward(f);
    EXPECT_EQ(aclrtDestroyContext(second), ACL_SUCCESS);
    EXPECT_NE(aclrtSetCurrentContext(second), ACL_SUCCESS);
    EXPECT_NE(aclrtDestroyContext(second), ACL_SUCCESS);
    EXPECT_EQ(aclrtDestroyContext(first), ACL_SUCCESS);
    EXPECT_EQ(aclrtGetCurrentContext(&current), kNoContext) << "the current one is gone";
  });
}

TEST(Process, ContextCallsCheckTheirArguments) {
  EXPECT_IN_FRESH_PROCESS({
    aclrtContext context = nullptr;
    EXPECT_EQ(aclrtCreateContext(nullptr, 0), kInvalidParam);
    EXPECT_EQ(aclrtCreateContext(&context, 3), kInvalidDevice);
    EXPECT_EQ(context, nullptr);
    EXPECT_EQ(aclrtDestroyContext(nullptr), kInvalidParam);
    EXPECT_EQ(aclrtSetCurrentContext(nullptr), kInvalidParam);
    EXPECT_EQ(aclrtGetCurrentContext(nullptr), kInvalidParam);
    int foreign[16] = {};
    EXPECT_NE(aclrtSetCurrentContext(foreign), ACL_SUCCESS);
    EXPECT_NE(aclrtDestroyContext(foreign), ACL_SUCCESS);
  });
}

TEST(Process, TellsWhatItIs) {
  EXPECT_IN_FRESH_PROCESS({
    std::int32_t major = 0;
    std::int32_t minor = 0;
    std::int32_t patch = -1;
    EXPECT_EQ(aclrtGetVersion(&major, &minor, &patch), ACL_SUCCESS);
    EXPECT_EQ(major, 1);
    EXPECT_EQ(minor, 17);
    EXPECT_EQ(patch, 0);
    EXPECT_EQ(aclrtGetVersion(nullptr, &minor, &patch), kInvalidParam);
    aclrtRunMode mode = ACL_DEVICE;
    EXPECT_EQ(aclrtGetRunMode(&mode), ACL_SUCCESS);
    EXPECT_EQ(mode, ACL_HOST);
    EXPECT_EQ(aclrtGetRunMode(nullptr), kInvalidParam);
    EXPECT_NE(aclrtGetSocName(), nullptr);
    EXPECT_EQ(aclrtSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1), ACL_SUCCESS);
  });
}

TEST(Process, RemembersTheLastErrorOfEachThread) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(9), kInvalidDevice);
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), kInvalidDevice);
    std::thread([] { EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_SUCCESS); }).join();
    EXPECT_EQ(aclrtGetLastError(ACL_RT_THREAD_LEVEL), kInvalidDevice);
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_SUCCESS) << "Get clears";
  });
}

TEST(Process, HintsOnceAtAnEndIndexThatLooksInclusive) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    Forward f = small_forward();
    EXPECT_EQ(f.run(), 0);
    EXPECT_EQ(take_message(), "") << "end == start + V is what is meant";
    f.end = f.start + f.weight.dim(0) - 1;
    f.target.fill(static_cast<double>(f.end));
    f.make_outputs(false);
    EXPECT_EQ(f.run(), 0);
    const std::string hint = take_message();
    EXPECT_TRUE(names(hint, "vocabEndIndex")) << hint;
    EXPECT_EQ(hint.find('\n'), std::string::npos) << "one line";
    expect_forward(f);
    EXPECT_TRUE(f.is_masked(0)) << "obeyed all the same";
    EXPECT_EQ(f.run(), 0);
    EXPECT_EQ(take_message(), "") << "once per process";
  });
}

// The child of a process that has used streams: their threads do not exist there. Everything must
// come back, none may hang.
TEST(Fork, ChildGetsErrorsFromStreamsAndDoesNotHang) {
  EXPECT_IN_FRESH_PROCESS({
    alarm(60);
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    aclrtEvent event = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtCreateEvent(&event), ACL_SUCCESS);
    const Forward f = small_forward();
    EXPECT_EQ(f.run(stream), 0);
    EXPECT_EQ(f.run(), 0);
    EXPECT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a hang ends in SIGALRM, which the parent sees
      int failures = 0;
      const auto refused = [&failures](const char* what, aclError status) {
        if (status != ACL_SUCCESS) return;
        std::fprintf(stderr, "in the child %s succeeded\n", what);
        ++failures;
      };
      char memory[64];
      refused("aclrtSynchronizeStream", aclrtSynchronizeStream(stream));
      refused("aclrtSynchronizeStream(null)", aclrtSynchronizeStream(nullptr));
      refused("aclrtSynchronizeDevice", aclrtSynchronizeDevice());
      refused("aclrtMemsetAsync", aclrtMemsetAsync(memory, 64, 1, 64, stream));
      refused("aclrtRecordEvent", aclrtRecordEvent(event, stream));
      refused("aclrtLaunchHostFunc", aclrtLaunchHostFunc(
                                         stream, [](void*) {}, nullptr));
      refused("aclrtStreamWaitEvent", aclrtStreamWaitEvent(stream, event));
      aclrtStream another = nullptr;
      refused("aclrtCreateStream", aclrtCreateStream(&another));
      refused("an operator", f.run(stream));
      aclrtDestroyStreamForce(stream);
      aclrtDestroyStream(stream);
      aclrtDestroyEvent(event);
      aclrtResetDevice(0);
      aclFinalize();
      std::_Exit(failures == 0 ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    const Forward again = small_forward();
    EXPECT_EQ(again.run(stream), 0) << "the parent is unharmed";
    expect_forward(again);
    EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
  });
}

TEST(Fork, ChildOfABusyParentDoesNotHangAtItsExit) {
  EXPECT_IN_FRESH_PROCESS({
    alarm(60);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    Stream stream;
    Gate gate;
    EXPECT_EQ(gate.close_on(stream), ACL_SUCCESS);
    EXPECT_TRUE(gate.wait_until_reached());
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      std::exit(aclrtSynchronizeStream(stream) == ACL_SUCCESS ? 1 : 0);  // runs destructors
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  });
}

TEST(Fork, ChildOfAProcessWithoutStreamsMayUseThem) {
  EXPECT_IN_FRESH_PROCESS({
    alarm(60);
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      int failures = 0;
      if (aclrtSetDevice(0) != 0) ++failures;
      const Forward f = small_forward();
      if (f.run() != 0) ++failures;
      std::_Exit(failures);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  });
}

}  // namespace
}  // namespace ascend_test

// This process never touches the library, so each child forked from it begins as a fresh process
// would; and forking, unlike executing anew, also works under an emulator.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::FLAGS_gtest_death_test_style = "fast";
  return RUN_ALL_TESTS();
}
