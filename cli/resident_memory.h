// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace logitless::cli {

// How far the resident memory of this process rises above its level before `work` while it runs.
// Nothing where the system does not let a process reset its own high-water mark.
std::optional<int64_t> peak_memory_of(const std::function<void()>& work);

// What the system could still give without swapping; 0 where it does not say.
int64_t available_memory_bytes();

// Gives the pages of freed memory back to the system: what is allocated next is fresh.
void release_free_memory();

}  // namespace logitless::cli
