// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/failure.h"
#include "cli/table.h"
#include "cli/units.h"

namespace logitless::train_lm {
namespace {

constexpr int64_t kWidth = 24;
constexpr std::chrono::milliseconds kBetween{200};

}  // namespace

ProgressStyle parse_progress(const std::string& text) {
  if (text == "auto") return cli::stderr_is_terminal() ? ProgressStyle::bar : ProgressStyle::lines;
  if (text == "bar") return ProgressStyle::bar;
  if (text == "lines") return ProgressStyle::lines;
  if (text == "none") return ProgressStyle::none;
  cli::fail(
      fmt::format("--progress is '{}', must be auto, bar, lines or none", cli::printable(text)));
}

std::string bar_text(int64_t step, int64_t steps, int64_t width) {
  const int64_t full = std::clamp<int64_t>(width * step / std::max<int64_t>(steps, 1), 0, width);
  return fmt::format("[{}{}]", std::string(static_cast<size_t>(full), '#'),
                     std::string(static_cast<size_t>(width - full), '.'));
}

void ProgressBar::show(int64_t step, int64_t steps, const std::string& note, bool every) {
  if (style_ == ProgressStyle::none) return;
  if (style_ == ProgressStyle::lines) {
    if (every) fmt::print(stderr, "step {} of {}  {}\n", step, steps, note);
    return;
  }
  const auto now = Clock::now();
  if (!every && shown_ && now - last_ < kBetween) return;
  fmt::print(stderr, "\r\033[K{} {} of {}  {}", bar_text(step, steps, kWidth), step, steps, note);
  std::fflush(stderr);
  shown_ = true;
  last_ = now;
}

void ProgressBar::finish() {
  if (shown_) fmt::print(stderr, "\n");
  shown_ = false;
}

ProgressBar::~ProgressBar() { finish(); }

}  // namespace logitless::train_lm
