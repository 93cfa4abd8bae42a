// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/table.h"

namespace logitless::cli {
namespace {

constexpr std::chrono::milliseconds kQuiet{1000};
constexpr std::chrono::milliseconds kBetween{100};

}  // namespace

Progress::Progress() : terminal_(stderr_is_terminal()), start_(Clock::now()), last_(start_) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void Progress::show(const std::string& what) {
  const auto now = Clock::now();
  if (!terminal_ || now - start_ < kQuiet || (shown_ && now - last_ < kBetween)) return;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::fputs(fmt::format("\r\033[K{:6.1f} s  {}", seconds, what).c_str(), stderr);
  std::fflush(stderr);
  shown_ = true;
  last_ = now;
}

void Progress::show(const std::string& what, int64_t done, int64_t total) {
  const int64_t percent = total > 0 ? 100 * done / total : 100;
  show(fmt::format("{} {} %", what, percent));
}

}  // namespace logitless::cli
