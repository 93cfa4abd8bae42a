// SPDX-License-Identifier: Apache-2.0
// The forward pass: input, weight, target -> logits_max, sum_exp_logits, predicted_logits, masks.
//
//   for each block of tokens                        rows that count, compacted
//     pack input                                    A panels, once
//     for each chunk of the vocabulary
//       pack weight                                 B panels
//       for each (group of token panels, segment)   one owner each
//         logits tile by tile -> a segment's buffer (in L2)
//         max and sum of exp per row and segment    -> partial statistics
//       merge the segments of the chunk in order    one owner per row
//
// A short batch goes another way (own_block): each member takes segments of its own, packs weight
// for itself alone, panel by panel, or for a few tokens reads it as it lies in memory, and the team
// meets only once.
//
// Which segment a column belongs to depends on the column alone, and segments are merged in
// ascending order, so threads, chunks and blocks leave no trace in the bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/constants.h"
#include "cpu/sparse_hash.h"
#include "few_tokens.h"
#include "logitless/forward.h"
#include "plan.h"
#include "sparse_rule.h"
#include "team.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

inline constexpr int64_t kNoTarget = -1;

class ForwardPass {
 public:
  ForwardPass(const ForwardPlanData& plan, const ForwardOperands& in, const ForwardOutputs& out,
              std::byte* workspace, Stop& stop)
      : p_(plan),
        g_(*plan.target.gemm),
        k_(*plan.target.kernels),
        in_(in),
        out_(out),
        ws_(workspace),
        stop_(stop),
        start_(in.vocab_start_index),
        end_(in.vocab_end_index.value_or(in.vocab_start_index + plan.shape.V)) {}

  Result<void> run() {
    write_targets();
    run_team(p_.target.threads, [this](const Team& team) { work(team); });
    if (stop_.requested()) return Error{ErrorKind::cancelled, "forward: cancelled"};
    return {};
  }

  // ---- the parts, for a schedule that goes on with a block ------------------------------------

  // Where the candidates of a sparse gradient go, and what they are measured by.
  struct Collect {
    double tolerance = 0;
    const uint32_t* vocab_hash = nullptr;  // of every column, up to whole segments
    const SparseTail* tails = nullptr;     // of every token; null: thresholds that always hold
    double sample_stride = 0;
    double share = 1;         // of the vocabulary, what is here
    float* values = nullptr;  // of all threads, per_thread elements each
    uint8_t* columns = nullptr;
    int64_t per_thread = 0;
    int64_t* used = nullptr;       // [threads][kUsedStride], counted from the beginning of all
    cpu::Chunk* chunks = nullptr;  // [token_block][segments]
    static constexpr int64_t kUsedStride = 8;
  };
  void set_collect(const Collect& collect) { collect_ = collect; }

  template <class T>
  T* region(int64_t offset) const {
    return reinterpret_cast<T*>(ws_ + offset);
  }

  bool counts(int64_t b) const { return row_counts(in_.rows, in_.target, b); }
  bool outside(int64_t target) const { return target < start_ || target >= end_; }
  bool masked(int64_t b) const { return !counts(b) || outside(integer_at(in_.target, b)); }

  void write_targets() const {
    if (out_.target_mask) {
      write_mask(*out_.target_mask, outside(0), [this](int64_t b) { return masked(b); });
    }
    if (!out_.masked_target) return;
    for (int64_t b = 0; b < p_.shape.BT; ++b) {
      set_integer(*out_.masked_target, b, masked(b) ? 0 : integer_at(in_.target, b) - start_);
    }
  }

  void work(const Team& team) {
    neutral_rows(team);
    int64_t cursor = 0;  // every member scans alike; the first one writes the block's lists
    while (cursor < p_.shape.BT) {
      const int64_t rows = next_block(team, cursor);
      if (rows == 0) break;
      one_block(team, rows);
      if (stop_.leave_together(team)) return;  // also: the block's lists are rewritten next
    }
  }

  // Outputs of the rows that do not count.
  void neutral_rows(const Team& team) const {
    const Range mine = team.part(p_.shape.BT);
    for (int64_t b = mine.begin; b < mine.end; ++b) {
      if (counts(b)) continue;
      set_f32(out_.logits_max, b, -std::numeric_limits<float>::infinity());
      set_f32(out_.sum_exp_logits, b, 0.0f);
      set_f32(out_.predicted_logits, b, 0.0f);
      if (out_.logits) zero_row(*out_.logits, b);
    }
  }

  // The threshold of candidates, relative to exp(reference), of a token whose sum without the
  // target is `rest` in a share of the columns, relative to the same.
  float threshold_of(int64_t b, float reference, double rest, double seen) const {
    double threshold = collect_.tolerance * collect_.tolerance * rest;
    if (collect_.tails != nullptr) {
      const SparseTail& tail = collect_.tails[b];
      const double scale = std::exp(static_cast<double>(reference - tail.reference));
      const double guess = tail.guess(rest * scale, seen * collect_.share, collect_.tolerance,
                                      collect_.sample_stride) /
                           scale;
      if (std::isfinite(guess)) threshold = std::max(threshold, guess);
    }
    // Half of it, for the row's own is a power of two; and a little for the roundings.
    return static_cast<float>(0.5 * (1 - 0x1p-10) * threshold);
  }

  int64_t next_block(const Team& team, int64_t& cursor) const {
    return next_block(team, cursor, [](int64_t) { return true; });
  }
  // Only of the rows that `takes` chooses from those that count.
  template <class Takes>
  int64_t next_block(const Team& team, int64_t& cursor, const Takes& takes) const {
    int64_t rows = 0;
    for (; cursor < p_.shape.BT && rows < p_.token_block; ++cursor) {
      if (!counts(cursor) || !takes(cursor)) continue;
      if (team.rank() == 0) take_row(rows, cursor);
      ++rows;
    }
    team.barrier();
    return rows;
  }

  // Token b becomes row r of the block.
  void take_row(int64_t r, int64_t b) const {
    const int64_t target = integer_at(in_.target, b);
    region<int64_t>(p_.row_index)[r] = b;
    region<int64_t>(p_.local_target)[r] = outside(target) ? kNoTarget : target - start_;
    region<float>(p_.run_max)[r] = -std::numeric_limits<float>::infinity();
    region<float>(p_.run_sum)[r] = 0.0f;
    region<float>(p_.run_low)[r] = 0.0f;
    region<float>(p_.predicted)[r] = 0.0f;
  }

  void one_block(const Team& team, int64_t rows) {
    if (p_.own_segments()) return own_block(team, rows);
    const Panels panels(rows, p_.panel_rows);
    const RowSelection input{in_.input, region<int64_t>(p_.row_index)};
    pack_input(team, input, panels);
    const int64_t segments = ceil_div(p_.shape.V, cpu::kSegmentColumns);
    for (int64_t s0 = 0; s0 < segments; s0 += p_.chunk_segments) {
      const int64_t count = std::min(p_.chunk_segments, segments - s0);
      pack_weight(team, s0, count);
      team.barrier();
      // All (segment, token panel) pairs stand in one line, and a share is a stretch of it.
      const Range share = team.part(count * panels.count);
      for (int64_t unit = share.begin; unit < share.end;) {
        const int64_t s = unit / panels.count;
        const int64_t panel = unit % panels.count;
        const int64_t group = std::min({int64_t{p_.group}, panels.count - panel, share.end - unit});
        segment(team, panels, panel, group, s0, s);
        unit += group;
      }
      if (stop_.leave_together(team)) return;
      merge_segments(team, rows, s0, count);
    }
    finish(team.part(rows));
  }

 private:
  int segment_panels() const { return cpu::kSegmentColumns / g_.nr; }

  void pack_input(const Team& team, const RowSelection& input, const Panels& panels) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const Range mine = team.part(panels.count);
    for (int64_t i = mine.begin; i < mine.end && !stop_.requested(); ++i) {
      pack_row_panel(p_.target, input, panels.begin(i), panels.size(i), g_.mr,
                     region<float>(p_.input_panels) + i * units * g_.mr);
    }
  }

  void pack_weight(const Team& team, int64_t s0, int64_t segments) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const int64_t v0 = s0 * cpu::kSegmentColumns;
    const int64_t columns = std::min(segments * cpu::kSegmentColumns, p_.shape.V - v0);
    const RowSelection weight{in_.weight, nullptr, v0};
    const Range mine = team.part(ceil_div(columns, g_.nr));
    for (int64_t i = mine.begin; i < mine.end && !stop_.requested(); ++i) {
      const int64_t begin = i * g_.nr;
      pack_row_panel(p_.target, weight, begin,
                     static_cast<int>(std::min<int64_t>(g_.nr, columns - begin)), g_.nr,
                     region<float>(p_.weight_panels) + i * units * g_.nr);
    }
  }

  // Logits of `group` token panels against segment s of the chunk, then their statistics.
  void segment(const Team& team, const Panels& panels, int64_t panel0, int64_t group, int64_t s0,
               int64_t s) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const int64_t v0 = (s0 + s) * cpu::kSegmentColumns;
    const int columns = segment_columns(v0);
    const int vocab_panels = static_cast<int>(ceil_div(columns, g_.nr));
    float* tiles = region<float>(p_.tiles + team.rank() * p_.tiles_stride);
    const int64_t panel_stride = segment_panels() * tile_floats;
    const auto a_panel = [&](int64_t panel) {
      return region<float>(p_.input_panels) + panel * units * g_.mr;
    };
    const auto b_panel = [&](int64_t v) {
      return region<float>(p_.weight_panels) + (s * segment_panels() + v) * units * g_.nr;
    };
    // What comes after this group: the next one along the segment, or the next segment.
    const bool last_group = panel0 + group >= panels.count;
    const int64_t group_after = last_group ? 0 : panel0 + group;
    const int64_t step = g_.nr * 4 / group;
    for (int v = 0; v < vocab_panels; ++v) {
      if (stop_.requested()) return;
      const bool last_panel = v + 1 == vocab_panels;
      const float* b_after = b_panel(last_panel && !last_group ? 0 : v + 1);
      for (int64_t i = 0; i < group; ++i) {
        const int64_t a_after = i + 1 < group ? panel0 + i + 1 : last_panel ? group_after : panel0;
        const cpu::Ahead ahead{a_panel(a_after), b_after + i * units * step / 4, step};
        g_.tile(Panels::tile_rows(panels.size(panel0 + i)), a_panel(panel0 + i), b_panel(v), units,
                tiles + i * panel_stride + v * tile_floats, false, ahead);
      }
    }
    for (int64_t i = 0; i < group; ++i) {
      statistics(team, panels.begin(panel0 + i), panels.size(panel0 + i), tiles + i * panel_stride,
                 tile_floats, v0, columns, partial(s0, s), held_tile(panel0 + i, v0));
    }
  }

  // A short batch. Each member takes a stretch of the segments.
  void own_block(const Team& team, int64_t rows) {
    const RowSelection input{in_.input, region<int64_t>(p_.row_index)};
    const Panels panels(rows, p_.panel_rows);
    if (!p_.few) {
      pack_input(team, input, panels);
    } else if (team.rank() == 0) {
      pack_row_panel(p_.target, input, 0, static_cast<int>(rows), p_.few.width,
                     region<float>(p_.input_panels));
    }
    team.barrier();
    const int64_t segments = ceil_div(p_.shape.V, cpu::kSegmentColumns);
    for (int64_t s0 = 0, s1 = 0; s1 < segments; s0 = s1) {
      s1 = p_.collects ? round_end(s1, segments, team.size()) : segments;
      const Range mine = team.part(s1 - s0);
      for (int64_t s = s0 + mine.begin; s < s0 + mine.end && !stop_.requested(); ++s) {
        if (p_.few) {
          few_segment(team, panels, s);
        } else {
          own_segment(team, panels, s);
        }
      }
      if (stop_.leave_together(team)) return;
      merge_segments(team, rows, s0, s1 - s0);
      if (!p_.collects) continue;
      merge_rest(team, rows, s0, s1 - s0);
      if (s1 < segments) {
        set_thresholds(team, rows, static_cast<double>(s1) / static_cast<double>(segments));
      }
      team.barrier();
    }
    finish(team.part(rows));
  }

  // Candidates are measured by the sums so far: the first rounds are short, since what they collect
  // is measured by little.
  static int64_t round_end(int64_t begin, int64_t segments, int64_t threads) {
    for (const int64_t share : {64, 16, 4}) {
      const int64_t end = ceil_div(ceil_div(segments, share), threads) * threads;
      if (end > begin) return std::min(end, segments);
    }
    return segments;
  }

  void few_segment(const Team& team, const Panels& panels, int64_t s) {
    const int64_t tile_floats = int64_t{p_.few.width} * g_.nr;
    const int64_t v0 = s * cpu::kSegmentColumns;
    const int columns = segment_columns(v0);
    float* tiles = few_logits(p_.target, p_.few, in_.weight, region<float>(p_.input_panels), v0,
                              columns, own(team));
    const int64_t part = s * p_.token_block;
    if (!p_.held) {
      return statistics(team, 0, static_cast<int>(panels.n), tiles, tile_floats, v0, columns, part,
                        nullptr);
    }
    for (int64_t i = 0; i < panels.count; ++i) {
      const int64_t row0 = panels.begin(i);
      statistics(team, row0, panels.size(i), tiles + row0 * g_.nr, tile_floats, v0, columns, part,
                 held_tile(i, v0));
    }
  }

  // Weight is packed panel by panel, and each panel meets all tokens while it is in L2; the rows of
  // the next one are fetched meanwhile.
  void own_segment(const Team& team, const Panels& panels, int64_t s) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const int64_t panel_stride = segment_panels() * tile_floats;
    const int64_t v0 = s * cpu::kSegmentColumns;
    const int columns = segment_columns(v0);
    auto* tiles = reinterpret_cast<float*>(own(team));
    float* weight = tiles + p_.token_panels() * panel_stride;
    for (int v = 0; v * g_.nr < columns; ++v) {
      pack_row_panel(p_.target, {in_.weight, nullptr, v0}, v * g_.nr,
                     std::min(g_.nr, columns - v * g_.nr), g_.nr, weight);
      for (int64_t i = 0; i < panels.count; ++i) {
        if (stop_.requested()) return;
        const float* input = region<float>(p_.input_panels) + i * units * g_.mr;
        const int64_t after = i + 1 < panels.count ? units * g_.mr : 0;
        g_.tile(Panels::tile_rows(panels.size(i)), input, weight, units,
                tiles + i * panel_stride + v * tile_floats, false,
                ahead_of_rows(input + after, in_.weight, v0 + (v + 1) * g_.nr, g_.nr, i,
                              panels.count, units));
      }
    }
    for (int64_t i = 0; i < panels.count; ++i) {
      statistics(team, panels.begin(i), panels.size(i), tiles + i * panel_stride, tile_floats, v0,
                 columns, s * p_.token_block, held_tile(i, v0));
    }
  }

  std::byte* own(const Team& team) const {
    return region<std::byte>(p_.tiles + team.rank() * p_.tiles_stride);
  }
  int segment_columns(int64_t v0) const {
    return static_cast<int>(std::min<int64_t>(cpu::kSegmentColumns, p_.shape.V - v0));
  }

  // Where the exponentials of a token panel are kept, from column v0 on.
  std::byte* held_tile(int64_t panel, int64_t v0) const {
    if (!p_.held) return nullptr;
    return region<std::byte>(p_.held_tiles) +
           (panel * p_.vocab_panels() + v0 / g_.nr) * p_.held_tile_bytes();
  }

  // One segment of some rows: tiles of its panels, `tile_floats` apart, become statistics.
  void statistics(const Team& team, int64_t row0, int rows, float* tiles, int64_t tile_floats,
                  int64_t v0, int columns, int64_t part, std::byte* held) {
    const int vocab_panels = static_cast<int>(ceil_div(columns, g_.nr));
    if (p_.types.logits_rounding == LogitsRounding::operand) {
      for (int v = 0; v < vocab_panels; ++v) {
        k_.round_values(tiles + v * tile_floats, int64_t{rows} * g_.nr, p_.target.multiply);
      }
    }
    if (out_.logits) store_logits(row0, rows, tiles, tile_floats, v0, columns);
    // Columns beyond the vocabulary count as -inf.
    for (int c = columns; c < vocab_panels * g_.nr; ++c) {
      for (int r = 0; r < rows; ++r) {
        tiles[c / g_.nr * tile_floats + int64_t{r} * g_.nr + c % g_.nr] =
            -std::numeric_limits<float>::infinity();
      }
    }
    float* max = region<float>(p_.partial_max) + part + row0;
    float* sum = region<float>(p_.partial_sum) + part + row0;
    if (held != nullptr) {
      k_.segment_stats_held(tiles, tile_floats, vocab_panels, g_.nr, rows, max, sum, *p_.held, held,
                            p_.held_tile_bytes());
    } else if (p_.collects) {
      collect(team, row0, rows, tiles, tile_floats, v0, vocab_panels, max, sum);
    } else {
      k_.segment_stats(tiles, tile_floats, vocab_panels, g_.nr, rows, max, sum);
    }
    const int64_t* local = region<int64_t>(p_.local_target) + row0;
    float* rest = p_.collects ? region<float>(p_.partial_rest) + part + row0 : nullptr;
    if (p_.collects) std::copy(sum, sum + rows, rest);
    for (int r = 0; r < rows; ++r) {
      const int64_t c = local[r] - v0;
      if (local[r] == kNoTarget || c < 0 || c >= columns) continue;
      float& logit = tiles[c / g_.nr * tile_floats + int64_t{r} * g_.nr + c % g_.nr];
      region<float>(p_.predicted)[row0 + r] = logit;
      if (!p_.collects) continue;
      // The sum without the target, where it can be told from the target: relative to its own
      // maximum.
      logit = -std::numeric_limits<float>::infinity();
      float rest_max = 0;
      k_.segment_stats(tiles + int64_t{r} * g_.nr, tile_floats, vocab_panels, g_.nr, 1, &rest_max,
                       rest + r);
      float scale = rest_max - max[r];
      k_.exp(&scale, 1, &scale);
      rest[r] = rest[r] == 0.0f ? 0.0f : rest[r] * scale;
    }
  }

  // The segment's statistics, and its candidates.
  void collect(const Team& team, int64_t row0, int rows, const float* tiles, int64_t tile_floats,
               int64_t v0, int vocab_panels, float* max, float* sum) {
    const int64_t segments = p_.partial_segments();
    const cpu::Collector collector{
        .token_hash = region<uint32_t>(p_.token_hash) + row0,
        .threshold = region<float>(p_.threshold) + row0,
        .reference = region<float>(p_.reference) + row0,
        .vocab_hash = collect_.vocab_hash + v0,
        .values = collect_.values,
        .columns = collect_.columns,
        .used = collect_.used + team.rank() * Collect::kUsedStride,
        .capacity = (team.rank() + 1) * collect_.per_thread,
        .chunks = collect_.chunks + row0 * segments + v0 / cpu::kSegmentColumns,
        .chunk_stride = segments};
    k_.segment_stats_collect(tiles, tile_floats, vocab_panels, g_.nr, rows, max, sum, collector);
  }

  // The same merge for the sums without targets.
  void merge_rest(const Team& team, int64_t rows, int64_t s0, int64_t segments) {
    const Range mine = team.part(rows);
    float* max = region<float>(p_.rest_max) + mine.begin;
    float* sum = region<float>(p_.rest_sum) + mine.begin;
    float* low = region<float>(p_.rest_low) + mine.begin;
    for (int64_t s = s0; s < s0 + segments; ++s) {
      const int64_t part = s * p_.token_block + mine.begin;
      k_.merge_rows(max, sum, low, region<float>(p_.partial_max) + part,
                    region<float>(p_.partial_rest) + part, mine.size());
    }
  }

  // What the next candidates are measured by, from the sums so far.
  void set_thresholds(const Team& team, int64_t rows, double seen) {
    const Range mine = team.part(rows);
    const int64_t* index = region<int64_t>(p_.row_index);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      float reference = region<float>(p_.rest_max)[r];
      double rest = static_cast<double>(region<float>(p_.rest_sum)[r]) +
                    static_cast<double>(region<float>(p_.rest_low)[r]);
      // Relative to the sample's largest where that is larger: fp32 has no threshold relative to
      // columns far below it.
      if (collect_.tails != nullptr && collect_.tails[index[r]].reference > reference) {
        const float sampled = collect_.tails[index[r]].reference;
        rest *= std::exp(static_cast<double>(reference - sampled));
        reference = sampled;
      }
      // Never below the one before: from the largest on, candidates are complete.
      const double before =
          static_cast<double>(region<float>(p_.threshold)[r]) *
          std::exp(static_cast<double>(region<float>(p_.reference)[r] - reference));
      const float now = threshold_of(index[r], reference, rest, seen);
      region<float>(p_.threshold)[r] = before > now ? static_cast<float>(before) : now;
      region<float>(p_.reference)[r] = reference;
    }
  }

  void store_logits(int64_t row0, int rows, const float* tiles, int64_t tile_floats, int64_t v0,
                    int columns) const {
    const int64_t* index = region<int64_t>(p_.row_index) + row0;
    for (int c = 0; c < columns; c += g_.nr) {
      const float* tile = tiles + c / g_.nr * tile_floats;
      for (int r = 0; r < rows; ++r) {
        store_row(k_, *out_.logits, index[r], v0 + c, std::min(g_.nr, columns - c),
                  tile + int64_t{r} * g_.nr);
      }
    }
  }

  // Where segment s of the chunk that begins at s0 keeps its statistics.
  int64_t partial(int64_t s0, int64_t s) const {
    return (p_.held || p_.collects ? s0 + s : s) * p_.token_block;
  }

  void merge_segments(const Team& team, int64_t rows, int64_t s0, int64_t segments) {
    float* max = region<float>(p_.run_max);
    float* sum = region<float>(p_.run_sum);
    float* low = region<float>(p_.run_low);
    const Range mine = team.part(rows);
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t part = partial(s0, s) + mine.begin;
      k_.merge_rows(max + mine.begin, sum + mine.begin, low + mine.begin,
                    region<float>(p_.partial_max) + part, region<float>(p_.partial_sum) + part,
                    mine.size());
    }
  }

  void finish(const Range& rows) const {
    const int64_t* index = region<int64_t>(p_.row_index);
    const int64_t* local = region<int64_t>(p_.local_target);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const float max = region<float>(p_.run_max)[r];
      const bool has_target =
          local[r] != kNoTarget && max != -std::numeric_limits<float>::infinity();
      set_f32(out_.logits_max, index[r], max);
      float& sum = region<float>(p_.run_sum)[r];
      sum += region<float>(p_.run_low)[r];
      set_f32(out_.sum_exp_logits, index[r], sum);
      set_f32(out_.predicted_logits, index[r],
              has_target ? region<float>(p_.predicted)[r] - max : 0.0f);
    }
  }

  const ForwardPlanData& p_;
  const cpu::GemmKernels& g_;
  const cpu::Kernels& k_;
  const ForwardOperands& in_;
  const ForwardOutputs& out_;
  std::byte* ws_;
  Stop& stop_;
  int64_t start_;
  int64_t end_;
  Collect collect_;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
