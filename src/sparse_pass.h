// SPDX-License-Identifier: Apache-2.0
// A sparse gradient (gradient.h): few elements of grad_logits, chosen while logits stream.
//
//   look at a sample of the vocabulary            flat rows go to the exact pass
//   for each group of rows
//     for each block of rows
//       forward pass                              candidates: exp(logit - segment maximum) and
//       column
//                                                 of what may be kept, by the sums so far
//       settle each row                           tau from the candidates' sums; thinned -> kept
//       grad_input = kept . weight                a segment of weight at a time, in L2
//     grad_weight = kept^T . input                a segment at a time, kept sorted by column
//
// Candidates are a superset of what is kept: with S' the sum of the exponentials without the
// target's, tau is above eps^2 * S' / (2 sum_exp_logits) whatever the row looks like (its
// below(tau) is at most rest), and the S' of the columns seen so far only grows. An element is a
// candidate by the number that decides about keeping it, so the order of events does not matter,
// nor how often a row is done again: rows whose candidates did not fit come once more, few at a
// time.
//
// Each row of grad_input, and each of grad_weight, is one running sum in ascending order of what is
// kept, in fp32, whatever the blocks, groups and threads are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/sparse_hash.h"
#include "forward_pass.h"
#include "logitless/gradient.h"
#include "sparse_plan.h"
#include "sparse_rule.h"
#include "team.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// What becomes of a row that has a gradient.
enum class RowKind : uint8_t { none = 0, sparse = 1, pending = 2, dense = 3 };

// Rows, whoever asks for the gradient:
//
//   int64_t count()                   rows with a gradient, ascending
//   int64_t token_id(int64_t b)
//   SparseRow row(int64_t b, float max, float sum)   statistics as the forward made them
//   void settled(int64_t b)           its statistics are written
struct SparseRow {
  float grad = 0;      // of the loss
  float grad_lse = 0;  // of logsumexp
  float max = 0;       // softmax = exp(logit - max) / sum
  float sum = 1;
};

template <class Rows>
class SparsePass {
 public:
  // kinds [BT]: sparse where a row has a gradient, else none; dense afterwards where a row is left
  // to the exact pass. rows: the numbers of those that have one, ascending.
  SparsePass(const SparsePlanData& plan, const ForwardOperands& in,
             const ForwardOutputs& statistics, const GradientOutputs& out, uint64_t seed,
             int64_t vocab_start, const Rows& source, int64_t* rows, RowKind* kinds,
             std::byte* workspace, Stop& stop)
      : p_(plan),
        g_(*plan.target.gemm),
        k_(*plan.target.kernels),
        in_(in),
        out_(out),
        seed_(seed),
        source_(source),
        rows_(rows),
        kinds_(kinds),
        ws_(workspace),
        stop_(stop),
        forward_(plan.forward, in, statistics, workspace + plan.forward_base, stop) {
    // Half of the least threshold, for it is a power of two; and a little for the roundings.
    const double share = 0.5 * p_.tolerance * p_.tolerance * (1 - 0x1p-10);
    collect_ = {.share = static_cast<float>(share),
                .vocab_seed = cpu::vocab_seed(seed),
                .vocab_start = vocab_start,
                .values = region<float>(p_.values),
                .columns = region<uint8_t>(p_.columns),
                .used = region<int64_t>(p_.used),
                .chunks = region<cpu::Chunk>(p_.chunks)};
  }

  // False when the call is to be left. `count` rows have a gradient.
  bool work(const Team& team, int64_t count) {
    if (team.rank() == 0) {  // perhaps fewer threads than planned: they share what is there
      collect_.per_thread = p_.target.threads * p_.thread_capacity / team.size();
      forward_.set_collect(collect_);
      certain_rows_ = p_.certain_rows(team.size());
    }
    team.barrier();
    if (p_.sample_stride > 0) look_at_sample(team, count);
    if (stop_.leave_together(team)) return false;
    if (team.rank() == 0) {  // the sparse ones, still ascending
      sparse_ = 0;
      for (int64_t i = 0; i < count; ++i) {
        if (kinds_[rows_[i]] == RowKind::sparse) rows_[sparse_++] = rows_[i];
      }
    }
    team.barrier();
    for (int64_t g0 = 0; g0 < sparse_; g0 += p_.group_rows) {
      const int64_t rows = std::min(p_.group_rows, sparse_ - g0);
      if (!one_group(team, g0, rows)) return false;
    }
    return true;
  }

  // After work(): rows that were not left to the exact pass, and what of them was kept.
  int64_t sparse_rows(int64_t BT) const { return std::count(kinds_, kinds_ + BT, RowKind::sparse); }
  int64_t kept() const { return kept_; }
  // Whether grad_weight was written.
  bool began() const { return sparse_ > 0; }

 private:
  template <class T>
  T* region(int64_t offset) const {
    return reinterpret_cast<T*>(ws_ + offset);
  }
  template <class T>
  T* scratch(const Team& team, int64_t offset = 0) const {
    return region<T>(p_.scratch + team.rank() * p_.scratch_stride + offset);
  }
  template <class T>
  T* block_region(int64_t offset) const {
    return forward_.template region<T>(offset);
  }
  int64_t gathered_bytes() const {
    return round_up(SparsePlanData::kGathered * std::max(p_.input_slice, p_.weight_slice) * 4,
                    kAlignment);
  }
  float* output_row(const Team& team) const {
    return scratch<float>(
        team,
        p_.scratch_stride - round_up(std::max(p_.input_slice, p_.weight_slice) * 4, kAlignment));
  }
  std::byte* gathered(const Team& team) const {
    return reinterpret_cast<std::byte*>(output_row(team)) - gathered_bytes();
  }

  // ---- which rows are flat ---------------------------------------------------------------------

  // The rule about expected numbers, by every sample_stride'th column, relative to the sum without
  // the target: the row's own business, whatever tokens, limits and threads it comes with.
  void look_at_sample(const Team& team, int64_t count) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const int64_t n = p_.sample_rows();
    const int64_t v_panels = ceil_div(n, g_.nr);
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    auto* weight = region<float>(p_.values);
    const Range mine = team.part(v_panels);
    for (int64_t i = mine.begin; i < mine.end && !stop_.requested(); ++i) {
      int64_t index[64];
      const auto columns = static_cast<int>(std::min<int64_t>(g_.nr, n - i * g_.nr));
      for (int c = 0; c < columns; ++c) index[c] = (i * g_.nr + c) * p_.sample_stride;
      pack_row_panel(p_.target, {in_.weight, index}, 0, columns, g_.nr, weight + i * units * g_.nr);
    }
    team.barrier();
    float* input = scratch<float>(team);
    float* tiles = scratch<float>(team, round_up(units * g_.mr * 4, kAlignment));
    const Panels panels(count, g_.mr);
    const Range share = team.part(panels.count);
    for (int64_t a = share.begin; a < share.end && !stop_.requested(); ++a) {
      const int64_t* rows = rows_ + panels.begin(a);
      pack_row_panel(p_.target, {in_.input, rows}, 0, panels.size(a), g_.mr, input);
      for (int64_t v = 0; v < v_panels; ++v) {
        g_.tile(Panels::tile_rows(panels.size(a)), input, weight + v * units * g_.nr, units,
                tiles + v * tile_floats, false,
                {input, weight + (v + 1) * units * g_.nr, g_.nr * 4});
      }
      for (int r = 0; r < panels.size(a); ++r) {
        if (is_flat(tiles + r * g_.nr, rows[r])) kinds_[rows[r]] = RowKind::dense;
      }
    }
    team.barrier();
  }

  bool is_flat(float* row, int64_t b) const {
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const int64_t n = p_.sample_rows();
    const int64_t target = integer_at(in_.target, b) - vocab_of_target();
    float max = -std::numeric_limits<float>::infinity();
    for (int64_t v0 = 0; v0 < n; v0 += g_.nr) {
      float* x = row + v0 / g_.nr * tile_floats;
      for (int64_t c = 0; c < std::min<int64_t>(g_.nr, n - v0); ++c) {
        if ((v0 + c) * p_.sample_stride == target) x[c] = -std::numeric_limits<float>::infinity();
        max = std::max(max, x[c]);
      }
    }
    if (!std::isfinite(max)) return false;  // nothing to tell it by
    double sum = 0;
    for (int64_t v0 = 0; v0 < n; v0 += g_.nr) {
      float* x = row + v0 / g_.nr * tile_floats;
      const int64_t columns = std::min<int64_t>(g_.nr, n - v0);
      for (int64_t c = 0; c < columns; ++c) x[c] -= max;
      k_.exp(x, columns, x);
      for (int64_t c = 0; c < columns; ++c) sum += static_cast<double>(x[c]);
    }
    SoftmaxBins bins;
    const auto each = static_cast<double>(p_.sample_stride);
    const auto scale = static_cast<float>(1 / (each * sum));
    const float least = least_threshold(1, p_.tolerance);
    for (int64_t v0 = 0; v0 < n; v0 += g_.nr) {
      const float* x = row + v0 / g_.nr * tile_floats;
      for (int64_t c = 0; c < std::min<int64_t>(g_.nr, n - v0); ++c) {
        const float p = x[c] * scale;
        if (p >= least) bins.add(p);
      }
    }
    const double share = SparsePlanData::kFlatShare * static_cast<double>(p_.shape.V);
    return bins.threshold(1, p_.tolerance, each).expected > share;
  }
  int64_t vocab_of_target() const { return in_.vocab_start_index; }
  double most_kept() const { return SparsePlanData::kDenseShare * static_cast<double>(p_.shape.V); }

  // ---- a group of rows -------------------------------------------------------------------------

  bool one_group(const Team& team, int64_t g0, int64_t rows) {
    auto* pending = region<int64_t>(p_.pending);
    for (int64_t r0 = 0; r0 < rows; r0 += p_.block_rows()) {
      const int64_t n = std::min(p_.block_rows(), rows - r0);
      if (team.rank() == 0) {
        for (int64_t r = 0; r < n; ++r) region<int64_t>(p_.block)[r] = r0 + r;
      }
      if (!one_block(team, g0, n)) return false;
    }
    // Once more those whose candidates did not fit, so few that everything fits.
    if (team.rank() == 0) {
      pending_ = 0;
      for (int64_t r = 0; r < rows; ++r) {
        if (kinds_[rows_[g0 + r]] == RowKind::pending) pending[pending_++] = r;
      }
    }
    team.barrier();
    const int64_t few = std::min(certain_rows_, p_.block_rows());
    for (int64_t i0 = 0; i0 < pending_; i0 += few) {
      const int64_t n = std::min(few, pending_ - i0);
      if (team.rank() == 0) std::copy(pending + i0, pending + i0 + n, region<int64_t>(p_.block));
      if (!one_block(team, g0, n)) return false;
    }
    if (out_.grad_weight) add_grad_weight(team, g0, rows);
    if (team.rank() == 0) {
      const int32_t* end = region<int32_t>(p_.kept_begin) + p_.segments() * p_.group_rows;
      for (int64_t r = 0; r < rows; ++r) kept_ += end[r];
    }
    return !stop_.leave_together(team);
  }

  // The rows of the group whose numbers stand in `block`.
  bool one_block(const Team& team, int64_t g0, int64_t n) {
    team.barrier();
    const auto* block = region<int64_t>(p_.block);
    const uint64_t token_seed = cpu::token_seed(seed_);
    const Range mine = team.part(n);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t b = rows_[g0 + block[r]];
      forward_.take_row(r, b);
      block_region<float>(p_.forward.rest_max)[r] = -std::numeric_limits<float>::infinity();
      for (const int64_t zero :
           {p_.forward.rest_sum, p_.forward.rest_low, p_.forward.threshold, p_.forward.reference}) {
        block_region<float>(zero)[r] = 0.0f;
      }
      block_region<uint32_t>(p_.forward.token_hash)[r] =
          cpu::hash_of(token_seed, source_.token_id(b));
    }
    region<int64_t>(p_.used)[team.rank() * ForwardPass::Collect::kUsedStride] =
        team.rank() * collect_.per_thread;
    team.barrier();
    forward_.one_block(team, n);
    if (stop_.leave_together(team)) return false;
    settle(team, g0, n);
    team.barrier();
    if (out_.grad_input) add_grad_input(team, g0, n);
    return !stop_.leave_together(team);
  }

  // ---- settling --------------------------------------------------------------------------------

  // Rows of the block: threshold, kept elements.
  void settle(const Team& team, int64_t g0, int64_t n) {
    const Range mine = team.part(n);
    const int64_t segments = p_.segments();
    const auto* block = region<int64_t>(p_.block);
    for (int64_t r = mine.begin; r < mine.end && !stop_.requested(); ++r) {
      const int64_t b = rows_[g0 + block[r]];
      source_.settled(b);
      kinds_[b] = settle_row(r, b, block[r]);
      if (kinds_[b] == RowKind::sparse) continue;
      int32_t* begin = region<int32_t>(p_.kept_begin) + block[r];
      for (int64_t s = 0; s <= segments; ++s) begin[s * p_.group_rows] = 0;
    }
  }

  // Row r of the block, row `kept` of the group.
  RowKind settle_row(int64_t r, int64_t b, int64_t kept) {
    const ForwardPlanData& f = p_.forward;
    const int64_t segments = p_.segments();
    const float max = block_region<float>(f.run_max)[r];
    const float sum = block_region<float>(f.run_sum)[r];
    if (!std::isfinite(max) || !std::isfinite(sum) || !(sum > 0)) return RowKind::dense;
    const SparseRow row = source_.row(b, max, sum);
    const cpu::Chunk* chunks = region<cpu::Chunk>(p_.chunks) + r * segments;
    for (int64_t s = 0; s < segments; ++s) {
      if (chunks[s].count == cpu::Collector::kDidNotFit) return RowKind::pending;
    }
    const float inv_sum = 1.0f / row.sum;
    float rest_scale = block_region<float>(f.rest_max)[r] - row.max;
    k_.exp(&rest_scale, 1, &rest_scale);
    const double rest = (static_cast<double>(block_region<float>(f.rest_sum)[r]) +
                         static_cast<double>(block_region<float>(f.rest_low)[r])) *
                        static_cast<double>(rest_scale) / static_cast<double>(row.sum);

    // Segment maxima become factors of softmax.
    float* factor = block_region<float>(f.partial_max) + r;
    const int64_t stride = f.token_block;
    constexpr int64_t kAtOnce = 64;
    for (int64_t s0 = 0; s0 < segments; s0 += kAtOnce) {
      float lanes[kAtOnce];
      const int64_t count = std::min(kAtOnce, segments - s0);
      for (int64_t i = 0; i < count; ++i) lanes[i] = factor[(s0 + i) * stride] - row.max;
      k_.exp(lanes, count, lanes);
      for (int64_t i = 0; i < count; ++i) factor[(s0 + i) * stride] = lanes[i] * inv_sum;
    }

    const int64_t target = block_region<int64_t>(f.local_target)[r];
    const float* values = region<float>(p_.values);
    const uint8_t* columns = region<uint8_t>(p_.columns);
    const float least = least_threshold(rest, p_.tolerance);
    SoftmaxBins bins;
    for (int64_t s = 0; s < segments; ++s) {
      const float scale = factor[s * stride];
      const cpu::Chunk chunk = chunks[s];
      const int64_t target_column = target - s * cpu::kSegmentColumns;
      for (int32_t i = 0; i < chunk.count; ++i) {
        const float p = values[chunk.begin + i] * scale;
        if (p >= least && columns[chunk.begin + i] != target_column) bins.add(p);
      }
    }
    const SoftmaxBins::Threshold threshold = bins.threshold(rest, p_.tolerance);
    if (threshold.expected > most_kept()) return RowKind::dense;

    // Thinned, the target between them.
    float* kept_values = region<float>(p_.kept_values) + kept * p_.row_capacity;
    uint8_t* kept_columns = region<uint8_t>(p_.kept_columns) + kept * p_.row_capacity;
    int32_t* begin = region<int32_t>(p_.kept_begin) + kept;
    const float of_p = row.grad + row.grad_lse;
    const float tau = threshold.tau;
    const uint32_t token_hash = block_region<uint32_t>(f.token_hash)[r];
    int32_t n = 0;
    for (int64_t s = 0; s < segments; ++s) {
      begin[s * p_.group_rows] = n;
      const float scale = factor[s * stride];
      const cpu::Chunk chunk = chunks[s];
      if (n + chunk.count + 1 > p_.row_capacity)
        return RowKind::dense;  // far beyond what to expect
      const int64_t v0 = s * cpu::kSegmentColumns;
      int64_t target_column = target >= v0 && target < v0 + cpu::kSegmentColumns ? target - v0 : -1;
      const auto add = [&](float g, int64_t column) {
        kept_values[n] = g;
        kept_columns[n++] = static_cast<uint8_t>(column);
      };
      const auto add_target = [&] {
        float p = 0;
        k_.softmax(block_region<float>(f.predicted) + r, 1, row.max, inv_sum, &p);
        add((p - 1.0f) * row.grad + p * row.grad_lse, target_column);
        target_column = -1;
      };
      for (int32_t i = 0; i < chunk.count; ++i) {
        const int64_t column = columns[chunk.begin + i];
        if (target_column >= 0 && column >= target_column) {
          const bool itself = column == target_column;
          add_target();
          if (itself) continue;
        }
        const float p = values[chunk.begin + i] * scale;
        if (p >= tau) {
          add(p * of_p, column);
        } else if (cpu::uniform_of(token_hash, cpu::hash_of(collect_.vocab_seed,
                                                            collect_.vocab_start + v0 + column)) *
                       tau <
                   p) {
          add(tau * of_p, column);
        }
      }
      if (target_column >= 0) add_target();
    }
    begin[segments * p_.group_rows] = n;
    return RowKind::sparse;
  }

  // ---- products --------------------------------------------------------------------------------

  // sums[0 .. columns) (+)= sum of factors[i] * row(i)[h0 ..], the rows of m.
  template <class RowOf>
  void sum(const Team& team, const ConstMatrixView& m, const RowOf& row_of, const float* factors,
           int64_t count, int64_t h0, int64_t columns, float* sums, bool accumulate) const {
    constexpr int kMost = 256;
    const void* rows[kMost];
    const cpu::PackSource source = p_.target.source;
    const bool direct = m.col_stride == 1;
    const int64_t at_once = direct ? kMost : SparsePlanData::kGathered;
    const int64_t element = cpu::source_bytes(source);
    for (int64_t i0 = 0; i0 < count || (i0 == 0 && !accumulate); i0 += at_once) {
      const int64_t n = std::min(at_once, count - i0);
      for (int64_t i = 0; i < n; ++i) {
        if (direct) {
          rows[i] = at(m, row_of(i0 + i), h0);
        } else {
          std::byte* to = gathered(team) + i * columns * element;
          gather(m, row_of(i0 + i), h0, columns, to);
          rows[i] = to;
        }
      }
      k_.sum_rows(source, rows, 0, factors + i0, n, columns, sums, accumulate || i0 > 0);
    }
  }

  void add_grad_input(const Team& team, int64_t g0, int64_t n) {
    const int64_t H = p_.shape.H;
    const auto* block = region<int64_t>(p_.block);
    const int32_t* begin = region<int32_t>(p_.kept_begin);
    const Range mine = share_of(team, n);
    float* sums = region<float>(p_.grad_input_sums);
    std::fill(sums + mine.begin * H, sums + mine.end * H, 0.0f);
    for (int64_t r = mine.begin; r < mine.end && p_.grad_input->accumulate; ++r) {
      load_row(k_, *out_.grad_input, rows_[g0 + block[r]], 0, H, sums + r * H);
    }
    for (int64_t s = 0; s < p_.segments() && !stop_.requested(); ++s) {
      const int32_t* from = begin + s * p_.group_rows;
      const int32_t* to = from + p_.group_rows;
      for (int64_t h0 = 0; h0 < H; h0 += p_.input_slice) {
        const int64_t columns = std::min(p_.input_slice, H - h0);
        for (int64_t r = mine.begin; r < mine.end; ++r) {
          const int64_t kept = block[r];
          const int64_t first = kept * p_.row_capacity + from[kept];
          const uint8_t* column = region<uint8_t>(p_.kept_columns) + first;
          sum(
              team, in_.weight, [&](int64_t i) { return s * cpu::kSegmentColumns + column[i]; },
              region<float>(p_.kept_values) + first, to[kept] - from[kept], h0, columns,
              sums + r * H + h0, true);
        }
      }
    }
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t b = rows_[g0 + block[r]];
      if (kinds_[b] == RowKind::sparse) store_row(k_, *out_.grad_input, b, 0, H, sums + r * H);
    }
  }

  // Rows of the block, so that every member has about as many kept elements.
  Range share_of(const Team& team, int64_t n) const {
    const auto* block = region<int64_t>(p_.block);
    const int32_t* end = region<int32_t>(p_.kept_begin) + p_.segments() * p_.group_rows;
    constexpr int64_t kRow = 16;  // what a row costs by itself, in elements
    int64_t all = 0;
    for (int64_t r = 0; r < n; ++r) all += end[block[r]] + kRow;
    Range mine{n, n};
    int64_t before = 0;
    const Range wanted = split(all, team.size(), team.rank());
    for (int64_t r = 0; r < n; ++r) {
      if (before >= wanted.begin && mine.begin == n) mine.begin = r;
      if (before >= wanted.end) {
        mine.end = r;
        break;
      }
      before += end[block[r]] + kRow;
    }
    return mine;
  }

  void add_grad_weight(const Team& team, int64_t g0, int64_t rows) {
    // Segments in turn: those of frequent words have more.
    for (int64_t s = team.rank(); s < p_.segments() && !stop_.requested(); s += team.size()) {
      grad_weight_segment(team, g0, rows, s);
    }
  }

  // Rows of grad_weight of one segment: its kept elements, sorted by column.
  void grad_weight_segment(const Team& team, int64_t g0, int64_t rows, int64_t s) {
    const int64_t v0 = s * cpu::kSegmentColumns;
    const auto columns = static_cast<int>(std::min<int64_t>(cpu::kSegmentColumns, p_.shape.V - v0));
    const int32_t* from = region<int32_t>(p_.kept_begin) + s * p_.group_rows;
    const int32_t* to = from + p_.group_rows;
    const uint8_t* kept_columns = region<uint8_t>(p_.kept_columns);
    const float* kept_values = region<float>(p_.kept_values);
    int64_t count[cpu::kSegmentColumns] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* column = kept_columns + r * p_.row_capacity;
      for (int32_t i = from[r]; i < to[r]; ++i) ++count[column[i]];
    }
    auto* values = scratch<float>(team);
    auto* tokens = reinterpret_cast<int32_t*>(values + p_.entries());
    for (int c0 = 0; c0 < columns;) {
      int64_t next[cpu::kSegmentColumns + 1];
      int64_t all = 0;
      int c1 = c0;
      for (; c1 < columns && all + count[c1] <= p_.entries(); ++c1) {
        next[c1] = all;
        all += count[c1];
      }
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* column = kept_columns + r * p_.row_capacity;
        const float* value = kept_values + r * p_.row_capacity;
        for (int32_t i = from[r]; i < to[r]; ++i) {
          if (column[i] < c0 || column[i] >= c1) continue;
          const int64_t at = next[column[i]]++;
          values[at] = value[i];
          tokens[at] = static_cast<int32_t>(r);
        }
      }
      grad_weight_rows(team, g0, v0, c0, c1, count, values, tokens);
      c0 = c1;
    }
  }

  // Columns [c0, c1) of a segment from v0 on, sorted.
  void grad_weight_rows(const Team& team, int64_t g0, int64_t v0, int c0, int c1,
                        const int64_t* count, const float* values, const int32_t* tokens) {
    const int64_t H = p_.shape.H;
    const bool begun = g0 > 0 || p_.grad_weight->accumulate;
    const bool last = g0 + p_.group_rows >= sparse_;
    const bool in_workspace = p_.grad_weight_accumulator == Accumulator::workspace;
    const MatrixView& out = *out_.grad_weight;
    for (int64_t h0 = 0; h0 < H; h0 += p_.weight_slice) {
      const int64_t columns = std::min(p_.weight_slice, H - h0);
      int64_t begin = 0;
      for (int c = c0; c < c1; begin += count[c++]) {
        const int64_t v = v0 + c;
        float* sums =
            in_workspace ? region<float>(p_.grad_weight_sums) + v * H + h0 : output_row(team);
        if (begun && (g0 == 0 || !in_workspace)) load_row(k_, out, v, h0, columns, sums);
        const int32_t* token = tokens + begin;
        sum(
            team, in_.input, [&](int64_t i) { return rows_[g0 + token[i]]; }, values + begin,
            count[c], h0, columns, sums, begun);
        if (last || !in_workspace) store_row(k_, out, v, h0, columns, sums);
      }
    }
  }

  const SparsePlanData& p_;
  const cpu::GemmKernels& g_;
  const cpu::Kernels& k_;
  const ForwardOperands& in_;
  const GradientOutputs& out_;
  uint64_t seed_;
  const Rows& source_;
  int64_t* rows_;
  RowKind* kinds_;
  std::byte* ws_;
  Stop& stop_;
  ForwardPass forward_;
  ForwardPass::Collect collect_;
  // Written by the first member, read behind a barrier.
  int64_t certain_rows_ = 1;
  int64_t sparse_ = 0;
  int64_t pending_ = 0;
  int64_t kept_ = 0;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
