// SPDX-License-Identifier: Apache-2.0
// The four entry points that g++ compiles `#pragma omp parallel` and `barrier` into, defined here
// (hidden): barriers are our own, the others are passed on to a runtime that is looked for at the
// first parallel region. libomp and libiomp5 offer the same entry points as libgomp.
#include "openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace logitless::python {
namespace {

// ---- regions and their barriers -----------------------------------------------------------------

// Waiting for the others, of which a call has hundreds. A runtime's own barrier spins for
// milliseconds by default: where another process has one of the CPUs, the member that waits keeps
// the one that works from running, and a step takes twice its CPU time. Here a member spins for
// about as long as it takes to be woken, then sleeps.
class Barrier {
 public:
  void wait(uint32_t size) {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (round_.load(std::memory_order_acquire) != round) return;
        relax();
      }
    } while (Clock::now() < end);
    round_.wait(round, std::memory_order_acquire);
  }

 private:
  static constexpr std::chrono::microseconds kSpin{50};
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// What a thread is a member of; restored when the region ends.
struct Membership {
  Barrier* barrier = nullptr;
  uint32_t size = 1;
};
thread_local Membership membership;

struct Region {
  void (*body)(void*);
  void* data;
  Barrier barrier;
};

// ---- threads of our own, for machines without any runtime ---------------------------------------

thread_local int own_rank = 0;
thread_local int own_size = 1;

void own_parallel(void (*body)(void*), void* data, unsigned threads, unsigned /*flags*/) {
  std::mutex mutex;
  std::condition_variable all_here;
  int size = 0;  // known only when every thread has started
  const auto work = [&](int rank) {
    const int outer_rank = std::exchange(own_rank, rank);
    const int outer_size = std::exchange(own_size, size);
    body(data);
    own_rank = outer_rank;
    own_size = outer_size;
  };
  std::vector<std::thread> others;
  try {
    for (unsigned rank = 1; rank < threads; ++rank) {
      others.emplace_back([&, rank] {
        {
          std::unique_lock lock(mutex);
          all_here.wait(lock, [&] { return size != 0; });
        }
        work(static_cast<int>(rank));
      });
    }
  } catch (const std::system_error&) {  // no more threads to be had: those that came do the work
  }
  {
    const std::lock_guard lock(mutex);
    size = static_cast<int>(others.size()) + 1;
  }
  all_here.notify_all();
  work(0);
  for (std::thread& thread : others) thread.join();
}
int own_thread_num() { return own_rank; }
int own_num_threads() { return own_size; }

// ---- the search ---------------------------------------------------------------------------------

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = own_parallel;
  int (*thread_num)() = own_thread_num;
  int (*num_threads)() = own_num_threads;
  std::string path = "threads of its own";
};

// Fills `runtime` from a library; false if it is not there or lacks an entry point.
bool take(const std::string& path, int flags, Runtime& runtime) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | flags);
  if (library == nullptr) return false;
  Runtime found;
  const auto get = [&](const char* name, auto& function) {
    void* const symbol = dlsym(library, name);
    std::memcpy(&function, &symbol, sizeof(symbol));
    return symbol != nullptr;
  };
  if (!get("GOMP_parallel", found.parallel) || !get("omp_get_thread_num", found.thread_num) ||
      !get("omp_get_num_threads", found.num_threads)) {
    dlclose(library);
    return false;
  }
  Dl_info info;
  void* entry = nullptr;
  std::memcpy(&entry, &found.parallel, sizeof(entry));
  found.path = dladdr(entry, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : path;
  runtime = found;  // the library stays open: its threads outlive any handle
  return true;
}

// Runtimes that the process has mapped, torch's first.
std::vector<std::string> mapped_runtimes() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const std::string name = path.substr(path.find_last_of('/') + 1);
        for (const char* known : {"libgomp", "libomp", "libiomp5"}) {
          if (name.rfind(known, 0) != 0) continue;
          auto& list = *static_cast<std::vector<std::string>*>(out);
          const bool of_torch = path.find("/torch") != std::string::npos;
          list.insert(of_torch ? list.begin() : list.end(), path);
        }
        return 0;
      },
      &paths);
  return paths;
}

std::mutex suggestion_mutex;
std::string suggestion;
std::atomic<const Runtime*> chosen{nullptr};

Runtime choose() {
  Runtime runtime;
  if (const char* wanted = std::getenv("LOGITLESS_OPENMP"); wanted != nullptr && *wanted != '\0') {
    if (std::strcmp(wanted, "none") != 0) take(wanted, 0, runtime);
    return runtime;
  }
  for (const std::string& path : mapped_runtimes()) {
    if (take(path, RTLD_NOLOAD, runtime)) return runtime;
  }
  {
    const std::lock_guard lock(suggestion_mutex);
    if (!suggestion.empty() && take(suggestion, 0, runtime)) return runtime;
  }
  for (const char* name : {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"}) {
    if (take(name, 0, runtime)) return runtime;
  }
  return runtime;
}

const Runtime& runtime() {
  static const Runtime once = choose();
  chosen.store(&once, std::memory_order_release);
  return once;
}

void enter(void* at) {
  auto& region = *static_cast<Region*>(at);
  const Membership outer =
      std::exchange(membership, {&region.barrier, static_cast<uint32_t>(runtime().num_threads())});
  region.body(region.data);
  region.barrier.wait(membership.size);  // sooner than the runtime's, at which members spin
  membership = outer;
}

}  // namespace

void suggest_openmp(std::string path) {
  const std::lock_guard lock(suggestion_mutex);
  suggestion = std::move(path);
}

std::string openmp_path() {
  const Runtime* const now = chosen.load(std::memory_order_acquire);
  return now == nullptr ? "" : now->path;
}

}  // namespace logitless::python

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

HIDDEN void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  using namespace logitless::python;
  Region region{body, data, {}};
  runtime().parallel(enter, &region, threads, flags);
}
HIDDEN void GOMP_barrier() {
  using namespace logitless::python;
  if (membership.barrier != nullptr) membership.barrier->wait(membership.size);
}
HIDDEN int omp_get_thread_num() { return logitless::python::runtime().thread_num(); }
HIDDEN int omp_get_num_threads() { return logitless::python::runtime().num_threads(); }
