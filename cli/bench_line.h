// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::cli {

// What `bench --json` writes; a reader refuses any other.
inline constexpr const char* kBenchSchema = "logitless-bench-1";

struct Interval {
  double low = 0;
  double high = 0;
};

// Value below which the fraction q of the values lies, between neighbours by proportion; of no
// values 0.
double quantile(std::vector<double> values, double q);
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }
// From the 10th to the 90th percentile: what nine of ten further repeats would show, without the
// few that something else on the machine disturbed.
Interval middle(const std::vector<double>& values);
inline constexpr std::array<double, 2> kPercentiles = {10, 90};

// What a call cannot do without: products; each operand read and each gradient written once; each
// operand of each product packed once. Vectors of BT are left out.
struct Work {
  double bytes_read = 0;
  double bytes_written = 0;
  double packed = 0;  // elements

  Work& operator+=(const Work& other);
};

// op: forward, gradient, gradient-hp, one-pass or sparse. rows: of them count; with_gradient: of
// these, the ones whose gradient is not 0.
struct WorkRequest {
  std::string op;
  Shape shape;
  DType dtype = DType::bf16;
  int64_t rows = 0;
  int64_t with_gradient = 0;
  bool grad_input = true;
  bool grad_weight = true;
};
Work work_of(const WorkRequest& request);

// Cycles to pack one element: 0.15 for a transpose of 16 x 16 in registers of 64 bytes; other
// levels are assumed to be slower as their registers are narrower.
double pack_cycles(Isa isa);

// One line of a benchmark. Times are in seconds, of the operators' run alone: not of planning, nor
// of allocating what they write to.
struct BenchLine {
  std::string op;
  std::string model;  // "" = none named
  Shape shape;
  DType dtype = DType::bf16;
  std::string logits_rounding = "none";
  std::string only;           // the one gradient that is asked for; "" = both
  double zero_grad_rows = 0;  // fraction of rows whose gradient was set to 0
  int64_t workspace_limit_bytes = 0;
  float grad_tolerance = 0;  // of sparse
  Isa isa = Isa::scalar;
  int threads = 0;

  std::vector<double> seconds;  // warm
  std::vector<double> cold;     // caches flushed, workspace fresh; empty: not asked for
  std::vector<double> unfused;  // with logits held in memory; empty: not run
  // Of sparse, by turns with it: forward and loss alone, and the exact gradients in one call.
  std::vector<double> forward, exact;
  uint64_t seed = 0;
  SparseCounts sparse_counts;
  double flops = 0;
  Work work;
  double peak_before = 0, peak_after = 0;  // flop/s
  double clock_hz = 0;
  double read_bytes_per_second = 0;
  int64_t workspace_bytes = 0;
  std::optional<int64_t> memory, unfused_memory;  // rise of resident memory
  std::string strategy;                           // of one-pass: one_pass or recompute
  std::string plan;                               // what the plan says of itself

  double peak() const { return std::max(peak_before, peak_after); }
  double seconds_median() const { return median(seconds); }
  double ratio_to_peak() const { return flops / seconds_median() / peak(); }
  // Of middle(seconds), turned round: low belongs to the slow repeats.
  Interval ratio_interval() const;
  double spread() const;

  // Of a sparse gradient: elements kept in rows that are not dense; 0 where there are none.
  double kept_share() const;

  // The least time that the machine's limits allow: the larger of bytes / bandwidth, flops / peak.
  double roofline_seconds() const;
  double ratio_to_roofline() const { return roofline_seconds() / seconds_median(); }
  // What a good implementation may take: the larger of bytes / bandwidth and flops / (0.9 peak),
  // and packing.
  double bytes_seconds() const;
  double flops_seconds() const;
  double packing_seconds() const;
  double expected_seconds() const;
};

nlohmann::ordered_json to_json(const BenchLine& line);

}  // namespace logitless::cli
