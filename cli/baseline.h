// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "cli/bench_line.h"
#include "logitless/result.h"

namespace logitless::cli {

// Fewer repeats than this give no interval worth comparing.
inline constexpr int kLeastRepeats = 5;

// A former run of `bench --json`, as far as a comparison reads it.
struct Baseline {
  struct Line {
    // What must agree: work done another way is another line.
    std::string op, dtype, isa, logits_rounding, only;
    Shape shape;
    int threads = 0;
    double zero_grad_rows = 0;
    int64_t workspace_limit_bytes = 0;
    double grad_tolerance = 0;

    double ratio_to_peak = 0;
    Interval ratio_interval;
  };
  std::string source;  // the file
  std::string commit, date, cpu;
  int64_t l3_bytes = 0;
  std::string isa;
  std::vector<int> threads;  // as asked for; a tiny problem takes fewer
  std::vector<Line> lines;
};

// Errors name the file and what is wrong with it.
Result<Baseline> parse_baseline(const std::string& text, const std::string& source);
Result<Baseline> read_baseline(const std::string& path);

// Before anything is measured: a baseline of another instruction set, or of other threads, answers
// another question.
Result<void> check_comparable(const Baseline& baseline, const std::string& isa,
                              const std::vector<int>& threads);

enum class Verdict { same, slower, faster, unmatched };
const char* name_of(Verdict verdict);

// Slower or faster: the intervals of the ratio to peak do not overlap.
struct Comparison {
  const BenchLine* now = nullptr;
  const Baseline::Line* before = nullptr;  // null: unmatched
  Verdict verdict = Verdict::unmatched;
};
std::vector<Comparison> compare_lines(const std::vector<BenchLine>& lines,
                                      const Baseline& baseline);

}  // namespace logitless::cli
