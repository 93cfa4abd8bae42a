// SPDX-License-Identifier: Apache-2.0
#include "workspace.h"

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <set>
#include <vector>

#include "logitless/machine.h"

namespace logitless::python {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr size_t kPagesKept = 4;  // gradients of input and weight of a model's head, or of two

Pages map_pages(int64_t bytes) {
  const int64_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const fresh = mmap(nullptr, static_cast<size_t>(wanted), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw std::bad_alloc();
  const Pages pages{static_cast<std::byte*>(fresh), wanted};
  prefer_huge_pages({pages.data, static_cast<size_t>(pages.bytes)});
  return pages;
}
void unmap_pages(const Pages& pages) {
  if (pages.data != nullptr) munmap(pages.data, static_cast<size_t>(pages.bytes));
}

std::mutex mutex;  // guards every slot, the set, and pages that wait
// A fork by one thread must not copy a mutex that another one holds.
[[gnu::constructor]] void watch_forks() {
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
}

std::set<WorkspaceSlot*>& slots() {
  static auto* const all = new std::set<WorkspaceSlot*>;  // threads may outlive static objects
  return *all;
}

std::vector<Pages>& waiting_pages() {
  static auto* const pages = new std::vector<Pages>;
  return *pages;
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
    if (bytes > pages_.bytes) {
      release();
      pages_ = map_pages(bytes);
    }
    in_use_ = true;
    return {pages_.data, static_cast<size_t>(pages_.bytes)};
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
  int64_t size() const { return pages_.bytes; }

 private:
  void release() {
    unmap_pages(pages_);
    pages_ = {};
  }

  Pages pages_;
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

Pages take_pages(int64_t bytes) {
  const std::lock_guard lock(mutex);
  std::vector<Pages>& waiting = waiting_pages();
  for (auto it = waiting.begin(); it != waiting.end(); ++it) {
    if (it->bytes < bytes || it->bytes > bytes + bytes / 4 + kHugePage) continue;
    const Pages found = *it;
    waiting.erase(it);
    return found;
  }
  return map_pages(bytes);
}

void release_pages(Pages pages) {
  const std::lock_guard lock(mutex);
  std::vector<Pages>& waiting = waiting_pages();
  waiting.push_back(pages);
  if (waiting.size() > kPagesKept) {
    unmap_pages(waiting.front());
    waiting.erase(waiting.begin());
  }
}

int64_t page_bytes_held() {
  const std::lock_guard lock(mutex);
  int64_t bytes = 0;
  for (const Pages& pages : waiting_pages()) bytes += pages.bytes;
  return bytes;
}

void drop_workspaces() {
  const std::lock_guard lock(mutex);
  for (WorkspaceSlot* slot : slots()) slot->drop();
  for (const Pages& pages : waiting_pages()) unmap_pages(pages);
  waiting_pages().clear();
}

int64_t workspace_bytes_held() {
  const std::lock_guard lock(mutex);
  int64_t bytes = 0;
  for (const WorkspaceSlot* slot : slots()) bytes += slot->size();
  return bytes;
}

}  // namespace logitless::python
