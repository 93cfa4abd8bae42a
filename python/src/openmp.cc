// SPDX-License-Identifier: Apache-2.0
// The four entry points that g++ compiles `#pragma omp parallel` and `barrier` into, defined here
// (hidden) and passed on to a runtime that is looked for at the first parallel region. libomp and
// libiomp5 offer the same entry points as libgomp.
#include "openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace logitless::python {
namespace {

// ---- threads of our own, for machines without any runtime ---------------------------------------

class OwnTeam {
 public:
  void run(void (*body)(void*), void* data, unsigned threads);
  void barrier() {
    std::unique_lock lock(mutex_);
    const unsigned round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }
  int size() const { return static_cast<int>(size_); }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  unsigned size_ = 0, arrived_ = 0, round_ = 0;
  bool started_ = false;
};

thread_local OwnTeam* own_team = nullptr;
thread_local int own_rank = 0;

void OwnTeam::run(void (*body)(void*), void* data, unsigned threads) {
  std::vector<std::thread> others;
  const auto work = [&](int rank) {
    OwnTeam* const outer_team = own_team;
    const int outer_rank = own_rank;
    own_team = this;
    own_rank = rank;
    body(data);
    own_team = outer_team;
    own_rank = outer_rank;
  };
  // The team's size is known only when every thread has started.
  try {
    for (unsigned rank = 1; rank < threads; ++rank) {
      others.emplace_back([&, rank] {
        {
          std::unique_lock lock(mutex_);
          all_here_.wait(lock, [&] { return started_; });
        }
        work(static_cast<int>(rank));
      });
    }
  } catch (const std::system_error&) {  // no more threads to be had: those that came do the work
  }
  {
    const std::lock_guard lock(mutex_);
    size_ = static_cast<unsigned>(others.size()) + 1;
    started_ = true;
  }
  all_here_.notify_all();
  work(0);
  for (std::thread& thread : others) thread.join();
}

void own_parallel(void (*body)(void*), void* data, unsigned threads, unsigned /*flags*/) {
  OwnTeam team;
  team.run(body, data, threads == 0 ? 1 : threads);
}
void own_barrier() {
  if (own_team != nullptr) own_team->barrier();
}
int own_thread_num() { return own_rank; }
int own_num_threads() { return own_team != nullptr ? own_team->size() : 1; }

// ---- the search ---------------------------------------------------------------------------------

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = own_parallel;
  void (*barrier)() = own_barrier;
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
  if (!get("GOMP_parallel", found.parallel) || !get("GOMP_barrier", found.barrier) ||
      !get("omp_get_thread_num", found.thread_num) ||
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
  logitless::python::runtime().parallel(body, data, threads, flags);
}
HIDDEN void GOMP_barrier() { logitless::python::runtime().barrier(); }
HIDDEN int omp_get_thread_num() { return logitless::python::runtime().thread_num(); }
HIDDEN int omp_get_num_threads() { return logitless::python::runtime().num_threads(); }
