// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace logitless::train_lm {

// How far the training is, on stderr: a bar that is rewritten in place where a person looks at it,
// else a line now and then. Under mpirun stderr is never a terminal of ours, so the caller says.
enum class ProgressStyle { none, lines, bar };

// "auto" is a bar where stderr is a terminal, else lines. Throws cli::Failure.
ProgressStyle parse_progress(const std::string& text);

class ProgressBar {
 public:
  explicit ProgressBar(ProgressStyle style) : style_(style) {}
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // note: "loss 6.212, 4,812 words/s, 412 MiB". every: a step whose line is always written.
  void show(int64_t step, int64_t steps, const std::string& note, bool every);
  // Ends the bar's line.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  ProgressStyle style_;
  bool shown_ = false;
  Clock::time_point last_;
};

// "[#####.....]", width characters between the brackets.
std::string bar_text(int64_t step, int64_t steps, int64_t width);

}  // namespace logitless::train_lm
