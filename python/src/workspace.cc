// SPDX-License-Identifier: Apache-2.0
#include "workspace.h"

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <set>

#include "logitless/machine.h"

namespace logitless::python {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

std::mutex mutex;  // guards every slot and the set
// A fork by one thread must not copy a mutex that another one holds.
[[gnu::constructor]] void watch_forks() {
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
}

std::set<WorkspaceSlot*>& slots() {
  static auto* const all = new std::set<WorkspaceSlot*>;  // threads may outlive static objects
  return *all;
}

}  // namespace

class WorkspaceSlot {
 public:
  WorkspaceSlot() {
    const std::lock_guard lock(mutex);
    slots().insert(this);
  }
  ~WorkspaceSlot() {
    const std::lock_guard lock(mutex);
    slots().erase(this);
    release();
  }

  std::span<std::byte> lease(int64_t bytes) {
    const std::lock_guard lock(mutex);
    if (bytes > size_) {
      release();
      const int64_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      void* const fresh = mmap(nullptr, static_cast<size_t>(wanted), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (fresh == MAP_FAILED) throw std::bad_alloc();
      data_ = static_cast<std::byte*>(fresh);
      size_ = wanted;
      prefer_huge_pages({data_, static_cast<size_t>(size_)});
    }
    in_use_ = true;
    return {data_, static_cast<size_t>(size_)};
  }
  void give_back() {
    const std::lock_guard lock(mutex);
    in_use_ = false;
    if (dropped_) release();
    dropped_ = false;
  }
  void drop() {  // under the mutex
    if (in_use_) {
      dropped_ = true;
    } else {
      release();
    }
  }
  int64_t size() const { return size_; }

 private:
  void release() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
    data_ = nullptr;
    size_ = 0;
  }

  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  bool in_use_ = false;
  bool dropped_ = false;
};

namespace {

WorkspaceSlot& slot_of_this_thread() {
  thread_local WorkspaceSlot slot;
  return slot;
}

}  // namespace

WorkspaceLease::WorkspaceLease(int64_t bytes)
    : slot_(slot_of_this_thread()), bytes_(slot_.lease(bytes)) {}
WorkspaceLease::~WorkspaceLease() { slot_.give_back(); }

void drop_workspaces() {
  const std::lock_guard lock(mutex);
  for (WorkspaceSlot* slot : slots()) slot->drop();
}

int64_t workspace_bytes_held() {
  const std::lock_guard lock(mutex);
  int64_t bytes = 0;
  for (const WorkspaceSlot* slot : slots()) bytes += slot->size();
  return bytes;
}

}  // namespace logitless::python
