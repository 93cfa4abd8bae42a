// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_line.h"

#include <algorithm>
#include <cmath>

#include "cli/operators.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

constexpr double kExpectedOfPeak = 0.9;

ordered_json memory_json(const std::optional<int64_t>& bytes) {
  return bytes ? ordered_json(*bytes) : ordered_json();
}

ordered_json interval_json(const Interval& interval) { return {interval.low, interval.high}; }

}  // namespace

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

Interval middle(const std::vector<double>& values) {
  return {.low = quantile(values, kPercentiles[0] / 100),
          .high = quantile(values, kPercentiles[1] / 100)};
}

Work& Work::operator+=(const Work& other) {
  bytes_read += other.bytes_read;
  bytes_written += other.bytes_written;
  packed += other.packed;
  return *this;
}

Work work_of(const WorkRequest& request) {
  const auto BT = static_cast<double>(request.shape.BT);
  const auto V = static_cast<double>(request.shape.V);
  const auto H = static_cast<double>(request.shape.H);
  const auto rows = static_cast<double>(request.rows);
  const auto with_gradient = static_cast<double>(request.with_gradient);
  const auto size = static_cast<double>(size_of(request.dtype));
  const bool softmax_given = request.op == "gradient-hp";
  const bool forward = request.op == "forward";
  // Tokens whose logits are multiplied: with a gradient alone, only those that have one.
  const bool sparse = request.op == "sparse";
  const double logits_rows = forward || sparse || request.op == "one-pass" ? rows : with_gradient;
  Work work;
  work.bytes_read = (logits_rows + V) * H * size;
  if (softmax_given) work.bytes_read += with_gradient * V * 4;
  if (!softmax_given) work.packed += (logits_rows + V) * H;
  if (forward) return work;
  if (request.grad_input) {
    work.bytes_written += BT * H * size;
    // What is kept is multiplied as it lies.
    if (!sparse) work.packed += with_gradient * V + V * H;
  }
  if (request.grad_weight) {
    work.bytes_written += V * H * size;
    if (!sparse) work.packed += with_gradient * V + with_gradient * H;
  }
  return work;
}

double pack_cycles(Isa isa) {
  constexpr double kCycles = 0.15;
  switch (isa) {
    case Isa::avx512bf16:
    case Isa::avx512:
      return kCycles;
    case Isa::avx2:
      return kCycles * 2;
    case Isa::neon_bf16:
    case Isa::neon:
      return kCycles * 4;
    case Isa::scalar:
      return kCycles * 16;
  }
  return kCycles;
}

Interval BenchLine::ratio_interval() const {
  const Interval times = middle(seconds);
  return {.low = flops / times.high / peak(), .high = flops / times.low / peak()};
}

double BenchLine::spread() const {
  const auto [low, high] = std::ranges::minmax(seconds);
  return (high - low) / seconds_median();
}

double BenchLine::kept_share() const { return cli::kept_share(sparse_counts); }

double BenchLine::bytes_seconds() const {
  return (work.bytes_read + work.bytes_written) / read_bytes_per_second;
}

double BenchLine::flops_seconds() const { return flops / (kExpectedOfPeak * peak()); }

double BenchLine::packing_seconds() const {
  return work.packed * pack_cycles(isa) / (clock_hz * threads);
}

double BenchLine::roofline_seconds() const { return std::max(bytes_seconds(), flops / peak()); }

double BenchLine::expected_seconds() const {
  return std::max(bytes_seconds(), flops_seconds()) + packing_seconds();
}

ordered_json to_json(const BenchLine& line) {
  ordered_json entry = {
      {"op", line.op},
      {"shape", {{"BT", line.shape.BT}, {"V", line.shape.V}, {"H", line.shape.H}}},
      {"dtype", logitless::name_of(line.dtype)},
      {"isa", logitless::name_of(line.isa)},
      {"threads", line.threads},
      {"logits_rounding", line.logits_rounding}};
  if (!line.model.empty()) entry["model"] = line.model;
  if (!line.only.empty()) entry["only"] = line.only;
  if (line.zero_grad_rows > 0) entry["zero_grad_rows"] = line.zero_grad_rows;
  if (line.workspace_limit_bytes > 0) entry["workspace_limit_bytes"] = line.workspace_limit_bytes;
  if (line.grad_tolerance > 0) entry["grad_tolerance"] = line.grad_tolerance;
  entry.update(ordered_json{
      {"repeats", line.seconds.size()},
      {"median_seconds", line.seconds_median()},
      {"seconds_interval", interval_json(middle(line.seconds))},
      {"spread", line.spread()},
      {"seconds_per_token",
       line.seconds_median() / static_cast<double>(std::max<int64_t>(line.shape.BT, 1))},
      {"flops", line.flops},
      {"gflops", line.flops / line.seconds_median() * 1e-9},
      {"peak_flops_before", line.peak_before},
      {"peak_flops_after", line.peak_after},
      {"ratio_to_peak", line.ratio_to_peak()},
      {"ratio_interval", interval_json(line.ratio_interval())},
      {"bytes_read", line.work.bytes_read},
      {"bytes_written", line.work.bytes_written},
      {"read_bytes_per_second", line.read_bytes_per_second},
      {"roofline_seconds", line.roofline_seconds()},
      {"ratio_to_roofline", line.ratio_to_roofline()},
      {"packed_elements", line.work.packed},
      {"clock_hz", line.clock_hz},
      {"expected",
       {{"bytes_seconds", line.bytes_seconds()},
        {"flops_seconds", line.flops_seconds()},
        {"packing_seconds", line.packing_seconds()},
        {"seconds", line.expected_seconds()}}},
      {"workspace_bytes", line.workspace_bytes},
      {"peak_memory_bytes", memory_json(line.memory)},
      {"seconds", line.seconds}});
  if (!line.cold.empty()) {
    entry["cold"] = {{"repeats", line.cold.size()},
                     {"median_seconds", median(line.cold)},
                     {"seconds_interval", interval_json(middle(line.cold))},
                     {"seconds", line.cold}};
  }
  if (!line.unfused.empty()) {
    entry["unfused"] = {{"median_seconds", median(line.unfused)},
                        {"time_ratio", median(line.unfused) / line.seconds_median()},
                        {"peak_memory_bytes", memory_json(line.unfused_memory)},
                        {"seconds", line.unfused}};
  }
  if (line.grad_tolerance > 0) {
    const double seconds = line.seconds_median();
    entry["sparse"] = {{"seed", line.seed},
                       {"rows", line.sparse_counts.rows},
                       {"dense_rows", line.sparse_counts.dense_rows},
                       {"kept", line.sparse_counts.kept},
                       {"elements", line.sparse_counts.elements},
                       {"kept_share", line.kept_share()},
                       {"forward_median_seconds", median(line.forward)},
                       {"forward_seconds", line.forward},
                       {"times_forward", seconds / median(line.forward)},
                       {"exact_median_seconds", median(line.exact)},
                       {"exact_seconds", line.exact},
                       {"times_exact", seconds / median(line.exact)}};
  }
  if (!line.strategy.empty()) entry["strategy"] = line.strategy;
  entry["plan"] = line.plan;
  return entry;
}

}  // namespace logitless::cli
