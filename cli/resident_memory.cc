// SPDX-License-Identifier: Apache-2.0
#include "cli/resident_memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace logitless::cli {
namespace {

// "VmHWM:   1234 kB" of a file under /proc.
std::optional<int64_t> proc_kib(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    int64_t kib = 0;
    if (word == key + ":" && file >> kib) return kib * 1024;
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> peak_memory_of(const std::function<void()>& work) {
  // Freed pages of earlier work must not hide the new ones.
  release_free_memory();
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5" << std::flush;  // 5: VmHWM starts again at the present VmRSS
  const bool was_reset = reset.good();
  const std::optional<int64_t> before = proc_kib("/proc/self/status", "VmRSS");
  work();
  const std::optional<int64_t> peak = proc_kib("/proc/self/status", "VmHWM");
  if (!was_reset || !before || !peak) return std::nullopt;
  return std::max<int64_t>(*peak - *before, 0);
}

void release_free_memory() { ::malloc_trim(0); }

int64_t available_memory_bytes() { return proc_kib("/proc/meminfo", "MemAvailable").value_or(0); }

}  // namespace logitless::cli
