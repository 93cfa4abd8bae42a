// SPDX-License-Identifier: Apache-2.0
// Memory that is kept because fresh pages are expensive: one workspace per thread, and the large
// gradients that one pass makes anew in every training step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace logitless::python {

class WorkspaceSlot;

// The calling thread's workspace for the duration of one call; at least `bytes`, 64-byte aligned.
// Throws std::bad_alloc.
class WorkspaceLease {
 public:
  explicit WorkspaceLease(int64_t bytes);
  ~WorkspaceLease();
  WorkspaceLease(const WorkspaceLease&) = delete;
  WorkspaceLease& operator=(const WorkspaceLease&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  WorkspaceSlot& slot_;
  std::span<std::byte> bytes_;
};

// Pages for a gradient, of `bytes` or somewhat more, used before if there are such. Throws
// std::bad_alloc. What comes back by release_pages is kept for the next that asks.
struct Pages {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};
Pages take_pages(int64_t bytes);
void release_pages(Pages pages);
int64_t page_bytes_held();  // that wait for the next, not those in use

// Gives back every thread's workspace, and pages that wait; a workspace that is in use goes back
// when its call ends.
void drop_workspaces();
// Bytes held now, over all threads.
int64_t workspace_bytes_held();

}  // namespace logitless::python
