// SPDX-License-Identifier: Apache-2.0
// What a process does once: initialise, choose a device, finalise, fork. Each test runs in a
// process of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "support.h"

namespace ascend_test {
namespace {

constexpr aclError kInvalidParam = 100000;
constexpr aclError kRepeatInitialize = 100002;
constexpr aclError kInvalidFile = 100003;
constexpr aclError kRepeatFinalize = 100037;
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kRuntimeInvalid = 107000;
constexpr aclError kNoContext = 107002;
constexpr aclError kInvalidHandle = 107017;
constexpr aclError kForked = 507000;

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
    count = 99;
    EXPECT_EQ(aclFinalizeReference(&count), kRepeatFinalize);
    EXPECT_EQ(count, 99u);
  });
}

TEST(Process, FinalizeBeforeInitIsRefused) {
  EXPECT_IN_FRESH_PROCESS(EXPECT_EQ(aclFinalize(), kRepeatFinalize););
}

TEST(Process, InitWantsAConfigurationThatCanBeReadOrNone) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclInit("/nowhere/acl.json"), kInvalidFile);
    EXPECT_NE(take_message().find("/nowhere/acl.json"), std::string::npos);
    EXPECT_EQ(aclFinalize(), kRepeatFinalize) << "a refused aclInit does not count";
    EXPECT_EQ(aclInit(""), ACL_SUCCESS);
    EXPECT_EQ(aclInit("/dev/null"), kRepeatInitialize);
    EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
  });
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
    EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtResetDevice(0), kNoContext) << "nothing is left to undo";
    EXPECT_EQ(aclrtResetDeviceForce(0), ACL_SUCCESS);
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
    EXPECT_EQ(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1), kNoContext);
    std::size_t free_bytes = 0;
    std::size_t total = 0;
    EXPECT_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &free_bytes, &total), kNoContext);
    EXPECT_EQ(aclrtLaunchHostFunc(
                  nullptr, [](void*) {}, nullptr),
              kNoContext)
        << "no default stream";
    EXPECT_EQ(stream, nullptr);
    EXPECT_EQ(event, nullptr);
    EXPECT_EQ(memory, nullptr);
  });
}

TEST(Process, EachThreadChoosesItsOwnDevice) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtContext of_first = nullptr;
    EXPECT_EQ(aclrtGetCurrentContext(&of_first), ACL_SUCCESS);
    std::int32_t stream_of_first = -1;
    EXPECT_EQ(aclrtStreamGetId(nullptr, &stream_of_first), ACL_SUCCESS);
    std::thread([&] {
      aclrtStream stream = nullptr;
      std::int32_t device = 0;
      EXPECT_EQ(aclrtGetDevice(&device), kNoContext);
      EXPECT_EQ(aclrtCreateStream(&stream), kNoContext);
      EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
      aclrtContext context = nullptr;
      EXPECT_EQ(aclrtGetCurrentContext(&context), ACL_SUCCESS);
      EXPECT_EQ(context, of_first) << "the device's default context is one";
      std::int32_t default_stream = -2;
      EXPECT_EQ(aclrtStreamGetId(nullptr, &default_stream), ACL_SUCCESS);
      EXPECT_EQ(default_stream, stream_of_first) << "and so is its stream";
      EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    }).join();
    std::int32_t device = -1;
    EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS) << "the count is the process's";
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
      aclrtEventStatus event_status = ACL_EVENT_STATUS_RESERVED;
      aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_NOT_READY;
      aclrtEventWaitStatus waits = ACL_EVENT_WAIT_STATUS_RESERVED;
      std::int32_t id = -1;
      float ms = -1;
      char host[64] = {};
      EXPECT_EQ(aclrtSetStreamFailureMode(stream, 0), ACL_SUCCESS);
      EXPECT_EQ(aclrtStreamGetId(stream, &id), ACL_SUCCESS);
      EXPECT_EQ(aclrtLaunchHostFunc(
                    stream, [](void*) {}, nullptr),
                ACL_SUCCESS);
      EXPECT_EQ(aclrtRecordEvent(event, stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtStreamWaitEvent(stream, event), ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeStreamWithTimeout(stream, 20000), ACL_SUCCESS);
      EXPECT_EQ(aclrtQueryEvent(event, &event_status), ACL_SUCCESS);
      EXPECT_EQ(aclrtQueryEventStatus(event, &recorded), ACL_SUCCESS);
      EXPECT_EQ(aclrtQueryEventWaitStatus(event, &waits), ACL_SUCCESS);
      EXPECT_EQ(aclrtSynchronizeEventWithTimeout(event, 20000), ACL_SUCCESS);
      EXPECT_EQ(aclrtEventElapsedTime(&ms, event, event), ACL_SUCCESS);
      EXPECT_EQ(ms, 0);
      EXPECT_EQ(aclrtResetEvent(event, stream), ACL_SUCCESS);
      EXPECT_EQ(aclrtMemset(memory, 64, 1, 64), ACL_SUCCESS);
      EXPECT_EQ(aclrtMemcpy(host, 64, memory, 64, ACL_MEMCPY_DEVICE_TO_HOST), ACL_SUCCESS);
      EXPECT_EQ(aclrtMemcpyAsync(memory, 64, host, 64, ACL_MEMCPY_HOST_TO_DEVICE, stream),
                ACL_SUCCESS);
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

TEST(Process, ResetDeviceForceDropsQueuedWork) {
  EXPECT_IN_FRESH_PROCESS({
    alarm(60);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    static std::atomic<bool> ran{false};
    Gate gate;
    EXPECT_EQ(gate.close_on(stream), ACL_SUCCESS);
    EXPECT_TRUE(gate.wait_until_reached());
    EXPECT_EQ(aclrtLaunchHostFunc(
                  stream, [](void*) { ran = true; }, nullptr),
              ACL_SUCCESS);
    std::thread opener([&] {
      // Not before the queue is dropped: then the stream is no longer to be found.
      while (aclrtSynchronizeStreamWithTimeout(stream, 1) != kInvalidHandle) {
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      gate.open();
    });
    EXPECT_EQ(aclrtResetDeviceForce(0), ACL_SUCCESS);
    opener.join();
    EXPECT_FALSE(ran);
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
    EXPECT_EQ(aclrtMemsetAsync(memory, 8, 1, 8, stream), kInvalidHandle);
    EXPECT_EQ(aclrtSynchronizeStream(stream), kInvalidHandle);
    EXPECT_EQ(aclrtDestroyStream(stream), kInvalidHandle);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtSynchronizeStream(stream), kInvalidHandle) << "a new life of the device";
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
    EXPECT_EQ(aclrtSynchronizeStream(stream), kInvalidHandle);
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

TEST(Process, FinalizeWaitsForQueuedWork) {
  EXPECT_IN_FRESH_PROCESS({
    alarm(20);
    static std::atomic<bool> ran{false};
    EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    aclrtStream stream = nullptr;
    EXPECT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
    EXPECT_EQ(aclrtLaunchHostFunc(
                  stream,
                  [](void*) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(50));
                    ran = true;
                  },
                  nullptr),
              ACL_SUCCESS);
    EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
    EXPECT_TRUE(ran);
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
    EXPECT_EQ(aclrtSetCurrentContext(second), kInvalidHandle);
    EXPECT_EQ(aclrtDestroyContext(second), kInvalidHandle);
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
    EXPECT_EQ(aclrtSetCurrentContext(foreign), kInvalidHandle);
    EXPECT_EQ(aclrtDestroyContext(foreign), kInvalidHandle);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclrtGetCurrentContext(&context), ACL_SUCCESS);
    EXPECT_EQ(aclrtDestroyContext(context), kRuntimeInvalid) << "aclrtResetDevice does that";
    aclrtContext still = nullptr;
    EXPECT_EQ(aclrtGetCurrentContext(&still), ACL_SUCCESS);
    EXPECT_EQ(still, context);
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
    EXPECT_EQ(aclrtGetVersion(&major, nullptr, &patch), kInvalidParam);
    EXPECT_EQ(aclrtGetVersion(&major, &minor, nullptr), kInvalidParam);
    aclrtRunMode mode = ACL_DEVICE;
    EXPECT_EQ(aclrtGetRunMode(&mode), ACL_SUCCESS);
    EXPECT_EQ(mode, ACL_HOST);
    EXPECT_EQ(aclrtGetRunMode(nullptr), kInvalidParam);
    EXPECT_STREQ(aclrtGetSocName(), "Logitless_CPU");
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    for (int opt = -1; opt < 5; ++opt) {
      const aclError expected = opt >= 0 && opt < 4 ? ACL_SUCCESS : kInvalidParam;
      EXPECT_EQ(aclrtSetSysParamOpt(static_cast<aclSysParamOpt>(opt), 1), expected) << opt;
      EXPECT_EQ(aclrtCtxSetSysParamOpt(static_cast<aclSysParamOpt>(opt), 0), expected) << opt;
    }
  });
}

TEST(Process, PrintsNothingWhateverGoesWrong) {
  EXPECT_IN_FRESH_PROCESS({
    std::FILE* const printed = std::tmpfile();
    const int old_stderr = dup(2);
    dup2(fileno(printed), 1);
    dup2(fileno(printed), 2);
    aclFinalize();
    aclrtSetDevice(5);
    aclrtFree(nullptr);
    void* memory = nullptr;
    aclrtSetDevice(0);
    aclrtMalloc(&memory, SIZE_MAX, ACL_MEM_MALLOC_HUGE_FIRST);
    aclDestroyTensor(reinterpret_cast<aclTensor*>(std::uintptr_t{8}));
    aclrtSynchronizeStream(&memory);
    Forward f = small_forward();
    f.end = f.start + f.weight.dim(0) - 1;
    const aclError hinted = f.run();
    f.end = -1;
    const aclError refused = f.run();
    std::fflush(nullptr);
    dup2(old_stderr, 2);
    EXPECT_EQ(lseek(fileno(printed), 0, SEEK_END), 0) << "bytes on stdout or stderr";
    EXPECT_EQ(hinted, 0);
    EXPECT_NE(refused, 0);
  });
}

TEST(Process, LogsOnlyWhereTheEnvironmentAsksForIt) {
  EXPECT_IN_FRESH_PROCESS({
    const auto logged = [](aclLogLevel level) {
      testing::internal::CaptureStdout();
      ACL_APP_LOG(level, "seven is %d", 7);
      std::fflush(stdout);
      return testing::internal::GetCapturedStdout();
    };
    unsetenv("ASCEND_SLOG_PRINT_TO_STDOUT");
    unsetenv("ASCEND_GLOBAL_LOG_LEVEL");
    EXPECT_EQ(logged(ACL_ERROR), "");
    setenv("ASCEND_SLOG_PRINT_TO_STDOUT", "1", 1);
    EXPECT_NE(logged(ACL_ERROR).find("seven is 7"), std::string::npos);
    EXPECT_EQ(logged(ACL_WARNING), "") << "errors only, unless asked";
    setenv("ASCEND_GLOBAL_LOG_LEVEL", "1", 1);
    EXPECT_NE(logged(ACL_INFO).find("seven is 7"), std::string::npos);
    EXPECT_EQ(logged(ACL_DEBUG), "");
  });
}

TEST(Process, RemembersTheLastErrorOfEachThread) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(9), kInvalidDevice);
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), kInvalidDevice);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_NE(aclDestroyAclOpExecutor(nullptr), 0);
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), kInvalidDevice)
        << "neither success nor what is not the runtime's clears or replaces it";
    std::thread([] { EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_SUCCESS); }).join();
    EXPECT_EQ(aclrtGetLastError(ACL_RT_THREAD_LEVEL), kInvalidDevice);
    EXPECT_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_SUCCESS) << "Get clears";
    EXPECT_EQ(aclrtPeekAtLastError(static_cast<aclrtLastErrLevel>(1)), kInvalidParam);
    EXPECT_EQ(aclrtGetLastError(static_cast<aclrtLastErrLevel>(1)), kInvalidParam);
  });
}

TEST(Process, HintsOnceAtAnEndIndexThatLooksInclusive) {
  EXPECT_IN_FRESH_PROCESS({
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    Forward f = small_forward();
    EXPECT_EQ(f.run(), 0);
    EXPECT_EQ(take_message(), "") << "end == start + V is what is meant";
    f.start = -1;
    f.end = f.start + f.weight.dim(0) - 1;
    EXPECT_NE(f.run(), 0);
    EXPECT_TRUE(names(take_message(), "vocabStartIndex")) << "a refusal is no hint";
    f.start = 0;
    f.end = f.start + f.weight.dim(0) - 1;
    f.target.fill(static_cast<double>(f.end));
    f.make_outputs(false);
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    EXPECT_EQ(f.prepare(&size, &executor), 0);
    const std::string hint = take_message();  // phase 1 leaves it
    EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
    EXPECT_TRUE(names(hint, "vocabEndIndex")) << hint;
    EXPECT_EQ(hint.find('\n'), std::string::npos) << "one line";
    EXPECT_EQ(f.run(), 0);
    EXPECT_EQ(take_message(), "") << "once per process";
    expect_forward(f);
    EXPECT_TRUE(f.is_masked(0)) << "obeyed all the same";
    std::thread([&] {
      EXPECT_EQ(f.prepare(&size, &executor), 0);
      EXPECT_EQ(take_message(), "") << "not once per thread";
      EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
    }).join();
  });
}

// What is wrong behind the checks of the arguments: here, an instruction set that is none.
TEST(Process, KernelsThatCannotBeHadAreAnInnerError) {
  EXPECT_IN_FRESH_PROCESS({
    setenv("LOGITLESS_ISA", "abacus", 1);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    const Forward f = small_forward();
    std::uint64_t size = 77;
    aclOpExecutor* executor = nullptr;
    EXPECT_EQ(f.prepare(&size, &executor), 561103);
    const std::string message = take_message();
    EXPECT_NE(message.find("AclNN_Inner_Error(EZ9999)"), std::string::npos) << message;
    EXPECT_NE(message.find("abacus"), std::string::npos) << message;
    EXPECT_EQ(size, 77u);
    EXPECT_EQ(executor, nullptr);
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
        if (status == kForked) return;
        std::fprintf(stderr, "in the child %s returned %d\n", what, status);
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
      if (f.run(stream) != 561000) ++failures;
      aclrtEventStatus event_status = ACL_EVENT_STATUS_RESERVED;
      float ms = 0;
      refused("aclrtQueryEvent", aclrtQueryEvent(event, &event_status));
      refused("aclrtSynchronizeEvent", aclrtSynchronizeEvent(event));
      refused("aclrtEventElapsedTime", aclrtEventElapsedTime(&ms, event, event));
      refused("aclrtCreateEvent", aclrtCreateEvent(&event));
      if (aclrtMemset(memory, 64, 1, 64) != 0 || memory[63] != 1) ++failures;
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
