// SPDX-License-Identifier: Apache-2.0
// A team of threads with static partitions. The only file that knows OpenMP, besides the machine's
// measurements.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "float_environment.h"
#include "logitless/cancel.h"

namespace logitless {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Part i of n items over `parts`: sizes differ by at most one.
inline Range split(int64_t n, int64_t parts, int64_t i) {
  const int64_t base = n / parts;
  const int64_t extra = n % parts;
  const int64_t begin = i * base + std::min(i, extra);
  return {begin, begin + base + (i < extra ? 1 : 0)};
}

// True in a child made by fork: it computes on one thread, since the pool's threads did not come
// along and waiting for them would hang.
bool in_forked_child();

class Team {
 public:
  Team(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Every member has arrived; writes before it are visible after it. A team of one is not in a
  // parallel region of ours, where a barrier would bind to the caller's region.
  void barrier() const {
    if (size_ > 1) {
#pragma omp barrier
    }
  }
  Range part(int64_t n) const { return split(n, size_, rank_); }
  // The same from the other end: whoever had one item more has one less.
  Range part_from_end(int64_t n) const { return split(n, size_, size_ - 1 - rank_); }

 private:
  int rank_;
  int size_;
};

// Runs body(team) on `threads` threads, or fewer if the runtime grants fewer, each with the default
// floating-point environment. body must not throw.
template <class Body>
void run_team(int threads, const Body& body) {
  if (threads <= 1 || in_forked_child()) {
    const DefaultFloatEnvironment environment;
    body(Team(0, 1));
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const DefaultFloatEnvironment environment;
    body(Team(omp_get_thread_num(), omp_get_num_threads()));
  }
}

// The cancel token as a running operator sees it: once it was seen set it stays set, and members
// skip their work. They may see it at different places, but must leave a loop with barriers
// together: leave_together() is a barrier after which all of them have the same answer. The answer
// only ever turns from false to true; a member that reads late may learn of a later request already
// at this call, which is harmless where the way out leads straight to the next call.
class Stop {
 public:
  explicit Stop(const CancelToken* token) : token_(token) {}
  bool requested() {
    if (token_ == nullptr) return false;
    if (!stopped_.load(std::memory_order_relaxed) && token_->cancelled()) {
      stopped_.store(true, std::memory_order_relaxed);
    }
    return stopped_.load(std::memory_order_relaxed);
  }
  bool leave_together(const Team& team) {
    if (team.rank() == 0) leave_.store(requested(), std::memory_order_relaxed);
    team.barrier();
    return leave_.load(std::memory_order_relaxed);
  }

 private:
  const CancelToken* token_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> leave_{false};
};

}  // namespace logitless
