// SPDX-License-Identifier: Apache-2.0
// One workspace per thread, kept between calls because fresh pages are expensive.
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

// Gives back every thread's workspace; one that is in use goes back when its call ends.
void drop_workspaces();
// Bytes held now, over all threads.
int64_t workspace_bytes_held();

}  // namespace logitless::python
