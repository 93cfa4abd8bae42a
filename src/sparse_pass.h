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
#include <bit>
#include <cmath>
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

// What the pass asks whoever wants the gradient (Rows):
//
//   int64_t token_id(int64_t b)
//   SparseRow row(int64_t b, float max, float sum)   statistics as the forward made them
//   void settled(int64_t b)                          its statistics are written
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
        vocab_start_(vocab_start),
        source_(source),
        rows_(rows),
        kinds_(kinds),
        ws_(workspace),
        stop_(stop),
        forward_(plan.forward, in, statistics, workspace + plan.forward_base, stop) {
    collect_ = {.tolerance = p_.tolerance,
                .vocab_hash = region<uint32_t>(p_.vocab_hash),
                .sample_stride = static_cast<double>(p_.sample_stride),
                .share = p_.share(),
                .values = region<float>(p_.values),
                .columns = region<uint8_t>(p_.columns),
                .used = region<int64_t>(p_.used),
                .chunks = region<cpu::Chunk>(p_.chunks)};
  }

  // False when the call is to be left. `count` rows have a gradient.
  bool work(const Team& team, int64_t count) {
    begin(team);
    if (p_.sample_stride > 0) look_at_sample(team, count);
    if (stop_.leave_together(team)) return false;
    if (team.rank() == 0) list_sparse(count);
    team.barrier();
    for (int64_t g0 = 0; g0 < sparse_; g0 += p_.group_rows) {
      const int64_t rows = std::min(p_.group_rows, sparse_ - g0);
      if (!one_group(team, g0, rows)) return false;
    }
    return true;
  }

  // Before anything else.
  void begin(const Team& team) {
    const uint64_t seed = cpu::vocab_seed(seed_);
    const Range columns = team.part(p_.segments() * cpu::kSegmentColumns);
    for (int64_t v = columns.begin; v < columns.end; ++v) {
      region<uint32_t>(p_.vocab_hash)[v] = cpu::hash_of(seed, vocab_start_ + v);
    }
    team.barrier();
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
  // Behind the rest of a thread's own: a row of output, and one without unit stride, gathered.
  int64_t row_bytes() const {
    return round_up(std::max(p_.input_slice, p_.weight_slice) * 4, kAlignment);
  }
  float* output_row(const Team& team) const {
    return scratch<float>(team, p_.scratch_stride - row_bytes());
  }
  std::byte* gathered_row(const Team& team) const {
    return scratch<std::byte>(team, p_.scratch_stride - 2 * row_bytes());
  }

  static constexpr int64_t kAhead = 8;  // rows, fetched beforehand
  static constexpr int64_t kLine = 64;

  // ---- which rows are flat ---------------------------------------------------------------------

  // The rule about expected numbers, by every sample_stride'th column, relative to the sum without
  // the target: the row's own business, whatever tokens, limits and threads it comes with.
  void look_at_sample(const Team& team, int64_t count) {
    pack_sample(team);
    over_sample(team, {0, count}, [&](int64_t i, float* logits) {
      const int64_t b = rows_[i];
      const float max = sampled_max(logits, b);
      const Sample s = std::isfinite(max) ? sample_of(logits, max) : Sample{};
      if (is_flat(b, max, s)) kinds_[b] = RowKind::dense;
    });
  }

 public:
  // ---- the same in steps, for ranks ------------------------------------------------------------

  void pack_sample(const Team& team) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const int64_t n = p_.sample_rows();
    auto* weight = region<float>(p_.values);
    const Range mine = team.part(ceil_div(n, g_.nr));
    for (int64_t i = mine.begin; i < mine.end && !stop_.requested(); ++i) {
      int64_t index[64];
      const auto columns = static_cast<int>(std::min<int64_t>(g_.nr, n - i * g_.nr));
      for (int c = 0; c < columns; ++c) {
        index[c] = p_.sample_first() + (i * g_.nr + c) * p_.sample_stride;
      }
      pack_row_panel(p_.target, {in_.weight, index}, 0, columns, g_.nr, weight + i * units * g_.nr);
    }
    team.barrier();
  }

  // Calls body(i, logits) for the rows [begin, end) of those with a gradient, in tiles.
  template <class Body>
  void over_sample(const Team& team, const Range& of, const Body& body) {
    const int64_t units = ceil_div(p_.shape.H, g_.k_unit);
    const int64_t v_panels = ceil_div(p_.sample_rows(), g_.nr);
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const auto* weight = region<float>(p_.values);
    float* input = scratch<float>(team);
    float* tiles = scratch<float>(team, round_up(units * g_.mr * 4, kAlignment));
    const Panels panels(of.size(), g_.mr);
    const Range share = team.part(panels.count);
    for (int64_t a = share.begin; a < share.end && !stop_.requested(); ++a) {
      const int64_t first = of.begin + panels.begin(a);
      pack_row_panel(p_.target, {in_.input, rows_ + first}, 0, panels.size(a), g_.mr, input);
      for (int64_t v = 0; v < v_panels; ++v) {
        g_.tile(Panels::tile_rows(panels.size(a)), input, weight + v * units * g_.nr, units,
                tiles + v * tile_floats, false,
                {input, weight + (v + 1) * units * g_.nr, g_.nr * 4});
      }
      for (int r = 0; r < panels.size(a); ++r) body(first + r, tiles + r * g_.nr);
    }
    team.barrier();
  }

  // The largest but for the target's, which becomes -inf.
  float sampled_max(float* logits, int64_t b) const {
    const int64_t target = integer_at(in_.target, b) - in_.vocab_start_index - p_.sample_first();
    float max = -std::numeric_limits<float>::infinity();
    over_panels(logits, [&](float* x, int64_t columns, int64_t v0) {
      for (int64_t c = 0; c < columns; ++c) {
        if ((v0 + c) * p_.sample_stride == target) x[c] = -std::numeric_limits<float>::infinity();
        max = std::max(max, x[c]);
      }
    });
    return max;
  }

  // Relative to a finite maximum; the target's logit is -inf.
  Sample sample_of(float* logits, float max) const {
    constexpr float kLowest = -100.0f;  // of no weight, and no part of the moments
    Sample s;
    over_panels(logits, [&](float* x, int64_t columns, int64_t) {
      float first = 0;
      float second = 0;
      for (int64_t c = 0; c < columns; ++c) {
        x[c] -= max;
        const float d = x[c] < kLowest ? 0.0f : x[c];  // also the target
        first += d;
        second += d * d;
        s.number += x[c] < kLowest ? 0 : 1;
      }
      s.moments[0] += static_cast<double>(first);
      s.moments[1] += static_cast<double>(second);
      k_.exp(x, columns, x);
      for (int64_t c = 0; c < columns; ++c) s.row.add(x[c]);
    });
    return s;
  }

  // The row's tail, and whether it is flat. The sample may miss its largest values; the sum it then
  // leads to is helped by that of a normal distribution with the sample's moments.
  bool is_flat(int64_t b, float max, const Sample& s) const {
    SparseTail& tail = region<SparseTail>(p_.tails)[b];
    tail = {};
    if (!std::isfinite(max)) {  // nothing to tell by: thresholds that always hold
      tail.reference = std::numeric_limits<float>::quiet_NaN();
      tail.candidates = static_cast<float>(most_kept());
      return false;
    }
    const auto each = static_cast<double>(p_.sample_stride);
    const auto V = static_cast<double>(p_.vocabulary);
    tail = s.row.tail(max, each);
    const double guess = 0.5 * tail.guess(0, 0, p_.tolerance, each);
    tail.candidates =
        static_cast<float>(guess > 0 ? std::min(V, s.row.candidates(guess, each)) : V);
    const auto number = static_cast<double>(s.number);
    const double mean = s.moments[0] / number;
    const double variance = s.moments[1] / number - mean * mean;
    // By this library's exp, which is the same on every rank, whatever C library it has.
    auto normal = static_cast<float>(mean + 0.5 * variance);
    k_.exp(&normal, 1, &normal);
    const double rest =
        std::max(each * s.row.sum(), std::min(V * static_cast<double>(normal), 1e30));
    return s.row.expected(rest, p_.tolerance, each) > most_kept();
  }

  // How many of the `count` are not flat, which then lead the list, ascending.
  int64_t list_sparse(int64_t count) {
    sparse_ = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (kinds_[rows_[i]] == RowKind::sparse) rows_[sparse_++] = rows_[i];
    }
    return sparse_;
  }

 private:
  template <class Body>
  void over_panels(float* logits, const Body& body) const {
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const int64_t n = p_.sample_rows();
    for (int64_t v0 = 0; v0 < n; v0 += g_.nr) {
      body(logits + v0 / g_.nr * tile_floats, std::min<int64_t>(g_.nr, n - v0), v0);
    }
  }
  double most_kept() const {
    return SparsePlanData::kDenseShare * static_cast<double>(p_.vocabulary);
  }

  // ---- a group of rows -------------------------------------------------------------------------

  bool one_group(const Team& team, int64_t g0, int64_t rows) {
    for (int64_t r0 = 0, n = 0; r0 < rows; r0 += n) {
      n = rows_that_fit({g0 + r0, g0 + rows}, p_.certain_rows(), p_.room());
      if (team.rank() == 0) list_block(r0, n);
      if (!one_block(team, g0, n, p_.sample_stride > 0)) return false;
    }
    // Once more those whose candidates did not fit, or whose threshold was guessed too high: so few
    // that everything fits, by thresholds that always hold.
    if (team.rank() == 0) list_pending(g0, rows);
    team.barrier();
    const int64_t few = std::min(p_.certain_rows(), p_.block_rows());
    for (int64_t i0 = 0; i0 < pending_; i0 += few) {
      const int64_t n = std::min(few, pending_ - i0);
      if (team.rank() == 0) take_pending(i0, n);
      if (!one_block(team, g0, n, false)) return false;
    }
    end_group(team, g0, rows);
    return !stop_.leave_together(team);
  }

  // The rows of the group whose numbers stand in `block`.
  bool one_block(const Team& team, int64_t g0, int64_t n, bool guess) {
    forward_block(team, g0, n, guess);
    if (stop_.leave_together(team)) return false;
    settle(team, g0, n);
    team.barrier();
    if (out_.grad_input) add_grad_input(team, g0, n);
    return !stop_.leave_together(team);
  }

 public:
  // ---- the same in steps, for ranks ------------------------------------------------------------

  // How many of these rows of the list make a block: as many as have room for the candidates that
  // their samples lead to expect; `certain` rows have it in any case.
  int64_t rows_that_fit(const Range& of, int64_t certain, double room) const {
    const int64_t most = std::min(p_.block_rows(), of.size());
    if (p_.sample_stride == 0) return most;
    const auto* tails = region<SparseTail>(p_.tails);
    int64_t n = 0;
    for (double expected = 0; n < most; ++n) {
      expected += static_cast<double>(tails[rows_[of.begin + n]].candidates);
      if (expected > room) break;
    }
    if (n == most) return most;
    return std::max(n - n % g_.mr, std::min(certain, most));  // whole panels
  }
  const ForwardPass& forward() const { return forward_; }

  // Rows [r0, r0 + n) of the group become the block.
  void list_block(int64_t r0, int64_t n) {
    for (int64_t r = 0; r < n; ++r) region<int64_t>(p_.block)[r] = r0 + r;
  }
  // Rows of the group to be done again; returns how many.
  int64_t list_pending(int64_t g0, int64_t rows) {
    pending_ = 0;
    for (int64_t r = 0; r < rows; ++r) {
      if (kinds_[rows_[g0 + r]] == RowKind::pending) region<int64_t>(p_.pending)[pending_++] = r;
    }
    return pending_;
  }
  // Of them [i0, i0 + n) become the block.
  void take_pending(int64_t i0, int64_t n) {
    const auto* pending = region<int64_t>(p_.pending);
    std::copy(pending + i0, pending + i0 + n, region<int64_t>(p_.block));
  }

  // What is kept of the group is complete.
  void end_group(const Team& team, int64_t g0, int64_t rows) {
    if (out_.grad_weight) add_grad_weight(team, g0, rows);
    if (team.rank() != 0) return;
    const int32_t* end = region<int32_t>(p_.kept_begin) + p_.vocab_blocks() * p_.group_rows;
    for (int64_t r = 0; r < rows; ++r) kept_ += end[r];
  }

  // Row r of the group is left to the exact pass after all.
  void drop(int64_t g0, int64_t r) {
    kinds_[rows_[g0 + r]] = RowKind::dense;
    keep_nothing(r);
  }

  // The forward of the block, with its candidates.
  void forward_block(const Team& team, int64_t g0, int64_t n, bool guess) {
    if (team.rank() == 0) {
      // Perhaps fewer threads than planned: they share what is there.
      collect_.per_thread = p_.target.threads * p_.thread_capacity / team.size();
      collect_.tails = guess ? region<SparseTail>(p_.tails) : nullptr;
      forward_.set_collect(collect_);
    }
    team.barrier();
    const auto* block = region<int64_t>(p_.block);
    const uint64_t token_seed = cpu::token_seed(seed_);
    const Range mine = team.part(n);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t b = rows_[g0 + block[r]];
      forward_.take_row(r, b);
      block_region<float>(p_.forward.rest_max)[r] = -std::numeric_limits<float>::infinity();
      for (const int64_t zero : {p_.forward.rest_sum, p_.forward.rest_low}) {
        block_region<float>(zero)[r] = 0.0f;
      }
      const float reference = guess ? region<SparseTail>(p_.tails)[b].reference : 0.0f;
      const float threshold = guess ? forward_.threshold_of(b, reference, 0, 0) : 0.0f;
      block_region<float>(p_.forward.threshold)[r] = threshold > 0 ? threshold : 0.0f;
      block_region<float>(p_.forward.reference)[r] = threshold > 0 ? reference : 0.0f;
      block_region<uint32_t>(p_.forward.token_hash)[r] =
          cpu::hash_of(token_seed, source_.token_id(b));
    }
    region<int64_t>(p_.used)[team.rank() * ForwardPass::Collect::kUsedStride] =
        team.rank() * collect_.per_thread;
    team.barrier();
    forward_.one_block(team, n);
  }

  // After the forward the statistics of all ranks took the place of this one's. What this rank says
  // of the block's rows, a record of record_bytes() each; late: rows that did not fit somewhere.
  bool fits(int64_t r) const {
    const auto* chunks = region<cpu::Chunk>(p_.chunks) + r * p_.segments();
    return std::none_of(chunks, chunks + p_.segments(), [](const cpu::Chunk& chunk) {
      return chunk.count == cpu::Collector::kDidNotFit;
    });
  }
  int64_t record_bytes() const { return p_.record_bytes(); }
  void write_records(const Team& team, int64_t g0, int64_t n, const uint8_t* late,
                     std::byte* records) {
    over_settling(team, n, [&](Settling* rows, int64_t count) {
      for (int64_t i = 0; i < count; ++i) begin_row(rows[i], g0, late[rows[i].r] == 0);
      add_to_bins(rows, count);
      for (int64_t i = 0; i < count; ++i) {
        const Settling& x = rows[i];
        const Record record(p_, records + x.r * record_bytes());
        *record.complete = x.complete > 0 ? static_cast<double>(x.complete) : 0.0;
        x.bins.read(SoftmaxBins::first_level(x.rest, p_.levels()), p_.levels(), record.sums,
                    record.counts);
      }
    });
  }
  // What all ranks say of them: everyone chooses the same thresholds, and keeps its part.
  void keep_by_records(const Team& team, int64_t g0, int64_t n, const uint8_t* late,
                       std::byte* records, int64_t rank_stride, int64_t ranks) {
    over_settling(team, n, [&](Settling* rows, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        Settling& x = rows[i];
        begin_row(x, g0, late[x.r] == 0);
        if (x.kind != RowKind::sparse) continue;
        double complete = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const Record record(p_, records + rank * rank_stride + x.r * record_bytes());
          complete = std::max(complete, *record.complete);
          x.bins.add(SoftmaxBins::first_level(x.rest, p_.levels()), p_.levels(), record.sums,
                     record.counts);
        }
        choose_threshold(x, complete);
      }
      keep(rows, count);
    });
  }

  // Rows of grad_input, before other ranks' parts.
  void add_grad_input(const Team& team, int64_t g0, int64_t n) {
    // Members share the slices of H, and where there are fewer slices than members, the rows.
    int64_t lanes = std::min<int64_t>(team.size(), p_.input_slices());
    while (team.size() % lanes != 0) --lanes;
    const Range mine = share_of(n, team.size() / lanes, team.rank() / lanes);
    for (int64_t slice = team.rank() % lanes; slice < p_.input_slices(); slice += lanes) {
      grad_input_slice(team, g0, mine, slice);
    }
  }

 private:
  // ---- settling --------------------------------------------------------------------------------

  // A row of the block on its way from candidates to kept elements. Rows are settled in groups, a
  // segment of all of them before the next segment: their candidates lie side by side.
  struct Settling {
    RowKind kind = RowKind::sparse;
    SparseRow row;
    int64_t r = 0;     // in the block
    int64_t b = 0;     // of the batch
    int64_t kept = 0;  // in the group of rows
    int64_t target = kNoTarget;
    float inv_sum = 0;
    double rest = 0;
    float complete = 0;  // candidates are complete from here on
    float least = 0;     // no value below it counts for the threshold
    float tau = 0;
    float* factor = nullptr;  // of each segment: softmax = candidate * factor
    const cpu::Chunk* chunks = nullptr;
    int64_t n = 0;  // kept so far
    SoftmaxBins bins;
  };
  static constexpr int64_t kSettledTogether = SparsePlanData::kSettledTogether;

  // Of a row, what a rank tells the others.
  struct Record {
    Record(const SparsePlanData& plan, std::byte* at)
        : complete(reinterpret_cast<double*>(at)),
          sums(complete + 1),
          counts(reinterpret_cast<int32_t*>(sums + plan.levels())) {}
    double* complete;  // this rank's values are complete from here on
    double* sums;      // [levels]
    int32_t* counts;
  };

  // Rows of the block: threshold, kept elements.
  void settle(const Team& team, int64_t g0, int64_t n) {
    over_settling(team, n, [&](Settling* rows, int64_t count) {
      for (int64_t i = 0; i < count; ++i) begin_row(rows[i], g0, fits(rows[i].r));
      add_to_bins(rows, count);
      for (int64_t i = 0; i < count; ++i) {
        choose_threshold(rows[i], static_cast<double>(rows[i].complete));
      }
      keep(rows, count);
    });
  }

  template <class Body>
  void over_settling(const Team& team, int64_t n, const Body& body) {
    const Range mine = team.part(n);
    for (int64_t r0 = mine.begin; r0 < mine.end; r0 += kSettledTogether) {
      Settling rows[kSettledTogether];
      const int64_t count = std::min(kSettledTogether, mine.end - r0);
      for (int64_t i = 0; i < count; ++i) {
        rows[i].r = r0 + i;
        rows[i].factor = scratch<float>(team) + i * p_.segments();
      }
      body(rows, count);
    }
  }

  void add_to_bins(Settling* rows, int64_t count) const {
    for (int64_t s = 0; s < p_.segments(); ++s) {
      for (int64_t i = 0; i < count; ++i) {
        fetch_candidates(rows[i], s + 1);
        if (rows[i].kind == RowKind::sparse) add_to_bins(rows[i], s);
      }
    }
  }

  void keep(Settling* rows, int64_t count) const {
    for (int64_t s = 0; s < p_.segments(); ++s) {
      for (int64_t i = 0; i < count; ++i) {
        fetch_candidates(rows[i], s + 1);
        if (rows[i].kind == RowKind::sparse) thin(rows[i], s);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      kinds_[rows[i].b] = rows[i].kind;
      int32_t* begin = region<int32_t>(p_.kept_begin) + rows[i].kept;
      begin[p_.vocab_blocks() * p_.group_rows] = static_cast<int32_t>(rows[i].n);
      if (rows[i].kind != RowKind::sparse) keep_nothing(rows[i].kept);
    }
  }

  void keep_nothing(int64_t row_of_group) const {
    int32_t* begin = region<int32_t>(p_.kept_begin) + row_of_group;
    for (int64_t j = 0; j <= p_.vocab_blocks(); ++j) begin[j * p_.group_rows] = 0;
  }

  void begin_row(Settling& x, int64_t g0, bool fits) const {
    const ForwardPlanData& f = p_.forward;
    const int64_t segments = p_.segments();
    x.kept = region<int64_t>(p_.block)[x.r];
    x.b = rows_[g0 + x.kept];
    source_.settled(x.b);
    const float max = block_region<float>(f.run_max)[x.r];
    const float sum = block_region<float>(f.run_sum)[x.r];
    if (!std::isfinite(max) || !std::isfinite(sum) || !(sum > 0)) {
      x.kind = RowKind::dense;
    } else if (!fits) {
      x.kind = RowKind::pending;
    }
    if (x.kind != RowKind::sparse) return;
    x.chunks = region<cpu::Chunk>(p_.chunks) + x.r * segments;
    x.row = source_.row(x.b, max, sum);
    x.target = block_region<int64_t>(f.local_target)[x.r];
    x.inv_sum = 1.0f / x.row.sum;
    float rest_scale = block_region<float>(f.rest_max)[x.r] - x.row.max;
    k_.exp(&rest_scale, 1, &rest_scale);
    x.rest = (static_cast<double>(block_region<float>(f.rest_sum)[x.r]) +
              static_cast<double>(block_region<float>(f.rest_low)[x.r])) *
             static_cast<double>(rest_scale) / static_cast<double>(x.row.sum);
    // Segment maxima become factors, side by side.
    const float* segment_max = block_region<float>(f.partial_max) + x.r;
    for (int64_t s = 0; s < segments; ++s) {
      x.factor[s] = segment_max[s * f.token_block] - x.row.max;
    }
    k_.exp(x.factor, segments, x.factor);
    for (int64_t s = 0; s < segments; ++s) x.factor[s] *= x.inv_sum;
    if (collect_.tails != nullptr) {  // else complete for every threshold the rule can lead to
      x.complete = block_region<float>(f.reference)[x.r] - x.row.max;
      k_.exp(&x.complete, 1, &x.complete);
      x.complete *= block_region<float>(f.threshold)[x.r] * x.inv_sum * (1 + 0x1p-10f);
    }
    x.least = std::max(least_threshold(x.rest, p_.tolerance), x.complete);
  }

  void fetch_candidates(const Settling& x, int64_t s) const {
    if (x.kind != RowKind::sparse || s >= p_.segments()) return;
    const float* values = region<float>(p_.values) + x.chunks[s].begin;
    __builtin_prefetch(values);
    __builtin_prefetch(values + 16);
    __builtin_prefetch(region<uint8_t>(p_.columns) + x.chunks[s].begin);
  }

  // The target's column within segment s; -1: elsewhere.
  static int target_column(const Settling& x, int64_t s) {
    const int64_t column = x.target - s * cpu::kSegmentColumns;
    return column >= 0 && column < cpu::kSegmentColumns ? static_cast<int>(column) : -1;
  }

  void add_to_bins(Settling& x, int64_t s) const {
    const cpu::Chunk chunk = x.chunks[s];
    float large[cpu::kSegmentColumns + SparsePlanData::kRoom];
    const int64_t count = k_.large_values(region<float>(p_.values) + chunk.begin,
                                          region<uint8_t>(p_.columns) + chunk.begin, chunk.count,
                                          x.factor[s], x.least, target_column(x, s), large);
    for (int64_t i = 0; i < count; ++i) x.bins.add(large[i]);
  }

  void choose_threshold(Settling& x, double complete) const {
    if (x.kind != RowKind::sparse) return;
    const SoftmaxBins::Threshold threshold = x.bins.threshold(x.rest, p_.tolerance, complete);
    x.tau = threshold.tau;
    if (x.tau == 0.0f) {  // guessed too high; or, without a guess, too little rest to choose from
      x.kind = collect_.tails != nullptr ? RowKind::pending : RowKind::dense;
    } else if (threshold.expected > most_kept()) {
      x.kind = RowKind::dense;
    }
  }

  void thin(Settling& x, int64_t s) const {
    if (s % p_.block_segments == 0) {
      region<int32_t>(p_.kept_begin)[s / p_.block_segments * p_.group_rows + x.kept] =
          static_cast<int32_t>(x.n);
    }
    const cpu::Chunk chunk = x.chunks[s];
    const int64_t v0 = s * cpu::kSegmentColumns;
    const auto base = static_cast<uint16_t>(v0 % p_.block_columns());
    float* values = region<float>(p_.kept_values) + x.kept * p_.row_capacity + x.n;
    auto* columns = region<uint16_t>(p_.kept_columns) + x.kept * p_.row_capacity + x.n;
    int64_t added =
        k_.thin(region<float>(p_.values) + chunk.begin, region<uint8_t>(p_.columns) + chunk.begin,
                chunk.count, x.factor[s], region<uint32_t>(p_.vocab_hash) + v0,
                block_region<uint32_t>(p_.forward.token_hash)[x.r], x.tau,
                x.row.grad + x.row.grad_lse, base, values, columns);
    if (const int target = target_column(x, s); target >= 0) {
      float p = 0;
      k_.softmax(block_region<float>(p_.forward.predicted) + x.r, 1, x.row.max, x.inv_sum, &p);
      added = put_target(static_cast<uint16_t>(base + target),
                         (p - 1.0f) * x.row.grad + p * x.row.grad_lse, added, values, columns);
    }
    x.n += added;
    if (x.n > p_.most_kept_of_row()) x.kind = RowKind::dense;
  }

  // The target's element among the `count` of its segment, in place of what was chosen of it.
  static int64_t put_target(uint16_t column, float g, int64_t count, float* values,
                            uint16_t* columns) {
    const int64_t at = std::lower_bound(columns, columns + count, column) - columns;
    if (at == count || columns[at] != column) {
      std::copy_backward(columns + at, columns + count, columns + count + 1);
      std::copy_backward(values + at, values + count, values + count + 1);
      ++count;
    }
    columns[at] = column;
    values[at] = g;
    return count;
  }

  // ---- products --------------------------------------------------------------------------------

  // Kept elements of row r of the group in block i of the vocabulary.
  struct Kept {
    explicit Kept(const SparsePass& pass)
        : all_values(pass.template region<float>(pass.p_.kept_values)),
          all_columns(pass.template region<uint16_t>(pass.p_.kept_columns)),
          begin(pass.template region<int32_t>(pass.p_.kept_begin)),
          group_rows(pass.p_.group_rows),
          row_capacity(pass.p_.row_capacity) {}
    int64_t first(int64_t i, int64_t r) const {
      return r * row_capacity + begin[i * group_rows + r];
    }
    int64_t count(int64_t i, int64_t r) const {
      return begin[(i + 1) * group_rows + r] - begin[i * group_rows + r];
    }
    const float* values(int64_t i, int64_t r) const { return all_values + first(i, r); }
    const uint16_t* columns(int64_t i, int64_t r) const { return all_columns + first(i, r); }
    // Rows lie far apart: no hardware foresees them.
    void fetch(int64_t i, int64_t r) const {
      const float* v = values(i, r);
      __builtin_prefetch(v);
      __builtin_prefetch(v + 16);
      __builtin_prefetch(columns(i, r));
    }
    const float* all_values;
    const uint16_t* all_columns;
    const int32_t* begin;
    int64_t group_rows, row_capacity;
  };

  // Columns [h0, h0 + columns) of rows row_of(0 .. count) of m -> a panel of sum_packed.
  template <class RowOf>
  void pack(const Team& team, const ConstMatrixView& m, const RowOf& row_of, int64_t count,
            int64_t h0, int64_t columns, std::byte* panel) {
    const int64_t bytes =
        round_up(columns, cpu::kPackedColumns) * cpu::packed_bytes(p_.target.source);
    const int64_t lines = ceil_div(columns * size_of(m.dtype), kLine);
    for (int64_t i = 0; i < count && !stop_.requested(); ++i) {
      const void* row = at(m, row_of(i), h0);
      if (i + kAhead < count) {
        const std::byte* ahead = at(m, row_of(i + kAhead), h0);
        for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(ahead + line * kLine);
      }
      if (m.col_stride != 1) {
        gather(m, row_of(i), h0, columns, gathered_row(team));
        row = gathered_row(team);
      }
      k_.pack_for_sums(p_.target.source, &row, 1, columns, panel + i * bytes);
    }
  }

  // Rows `mine` of the block, a slice of their columns.
  void grad_input_slice(const Team& team, int64_t g0, const Range& mine, int64_t slice) {
    const int64_t h0 = slice * p_.input_slice;
    const int64_t columns = std::min(p_.input_slice, p_.shape.H - h0);
    const int64_t padded = round_up(columns, cpu::kPackedColumns);
    const auto* block = region<int64_t>(p_.block);
    const MatrixView& out = *out_.grad_input;
    const auto sums = [&](int64_t r) {
      return region<float>(p_.grad_input_sums) + (slice * p_.block_rows() + r) * p_.input_slice;
    };
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      std::fill(sums(r), sums(r) + padded, 0.0f);
      if (p_.grad_input->accumulate) {
        load_row(k_, out, rows_[g0 + block[r]], h0, columns, sums(r));
      }
    }
    auto* panel = scratch<std::byte>(team);
    const Kept kept(*this);
    for (int64_t i = 0; i < p_.vocab_blocks() && !stop_.requested(); ++i) {
      const int64_t v0 = i * p_.block_columns();
      const int64_t v1 = std::min(v0 + p_.block_columns(), p_.shape.V);
      pack(
          team, in_.weight, [&](int64_t v) { return v0 + v; }, v1 - v0, h0, columns, panel);
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        if (r + kAhead < mine.end) kept.fetch(i, block[r + kAhead]);
        const int64_t n = kept.count(i, block[r]);
        if (n == 0) continue;
        k_.sum_packed(p_.target.source, panel, kept.columns(i, block[r]), kept.values(i, block[r]),
                      n, padded, sums(r), true);
      }
    }
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t b = rows_[g0 + block[r]];
      if (kinds_[b] == RowKind::sparse) store_row(k_, out, b, h0, columns, sums(r));
    }
  }

  // Rows of the block, so that every member has about as many kept elements.
  Range share_of(int64_t n, int64_t parts, int64_t part) const {
    const auto* block = region<int64_t>(p_.block);
    const int32_t* end = region<int32_t>(p_.kept_begin) + p_.vocab_blocks() * p_.group_rows;
    constexpr int64_t kRow = 16;  // what a row costs by itself, in elements
    int64_t all = 0;
    for (int64_t r = 0; r < n; ++r) all += end[block[r]] + kRow;
    Range mine{n, n};
    int64_t before = 0;
    const Range wanted = split(all, parts, part);
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
    auto* panel = region<std::byte>(p_.input_panel);
    const Range mine = team.part(rows);
    for (int64_t slice = 0; slice < p_.weight_slices(); ++slice) {
      const int64_t h0 = slice * p_.weight_slice;
      const int64_t columns = std::min(p_.weight_slice, p_.shape.H - h0);
      pack(
          team, in_.input, [&](int64_t i) { return rows_[g0 + mine.begin + i]; }, mine.size(), h0,
          columns, panel_row(panel, slice, mine.begin));
    }
    team.barrier();
    // In turn: blocks of frequent words have more.
    const int64_t at_once = p_.sorted_blocks;
    const int64_t steps = ceil_div(p_.vocab_blocks(), at_once);
    for (int64_t i = team.rank(); i < steps && !stop_.requested(); i += team.size()) {
      const int64_t block = i * at_once;
      grad_weight_blocks(team, g0, rows, block, std::min(block + at_once, p_.vocab_blocks()));
    }
  }

  // Row r of a slice of the group's input.
  std::byte* panel_row(std::byte* panel, int64_t slice, int64_t r) const {
    const int64_t h0 = slice * p_.weight_slice;
    const int64_t columns =
        round_up(std::min(p_.weight_slice, p_.shape.H - h0), cpu::kPackedColumns);
    const int64_t element = cpu::packed_bytes(p_.target.source);
    return panel + (slice * p_.group_rows * p_.weight_slice + r * columns) * element;
  }

  // Rows of grad_weight of blocks [i0, i1): their kept elements, sorted by column.
  void grad_weight_blocks(const Team& team, int64_t g0, int64_t rows, int64_t i0, int64_t i1) {
    const int64_t v0 = i0 * p_.block_columns();
    const int64_t columns = std::min(i1 * p_.block_columns(), p_.shape.V) - v0;
    const Kept kept(*this);
    // Calls body(r, column from v0 on, value), rows ascending.
    const auto for_kept = [&](const auto& body) {
      for (int64_t i = i0; i < i1; ++i) {
        const int64_t before = (i - i0) * p_.block_columns();
        for (int64_t r = 0; r < rows; ++r) {
          if (r + kAhead < rows) kept.fetch(i, r + kAhead);
          const uint16_t* column = kept.columns(i, r);
          const float* value = kept.values(i, r);
          const int64_t n = kept.count(i, r);
          for (int64_t j = 0; j < n; ++j) body(r, before + column[j], value[j]);
        }
      }
    };
    int64_t count[SparsePlanData::kMostSorted] = {};
    for_kept([&](int64_t, int64_t column, float) { ++count[column]; });
    auto* values = scratch<float>(team);
    auto* tokens = reinterpret_cast<uint16_t*>(values + p_.entries());
    for (int64_t c0 = 0; c0 < columns;) {  // at a time as many columns as there is room for
      int64_t next[SparsePlanData::kMostSorted];
      int64_t all = 0;
      int64_t c1 = c0;
      for (; c1 < columns && all + count[c1] <= p_.entries(); ++c1) {
        next[c1] = all;
        all += count[c1];
      }
      for_kept([&](int64_t r, int64_t column, float value) {
        if (column < c0 || column >= c1) return;
        const int64_t at = next[column]++;
        values[at] = value;
        tokens[at] = static_cast<uint16_t>(r);
      });
      grad_weight_rows(team, g0, {v0 + c0, v0 + c1}, count + c0, values, tokens);
      c0 = c1;
    }
  }

  // Rows `vocabulary` of grad_weight from their kept elements, sorted; count of each.
  void grad_weight_rows(const Team& team, int64_t g0, const Range& vocabulary, const int64_t* count,
                        const float* values, const uint16_t* tokens) {
    const int64_t H = p_.shape.H;
    const bool begun = g0 > 0 || p_.grad_weight->accumulate;
    const bool last = g0 + p_.group_rows >= sparse_;
    const bool in_workspace = p_.grad_weight_accumulator == Accumulator::workspace;
    const MatrixView& out = *out_.grad_weight;
    for (int64_t h0 = 0; h0 < H; h0 += p_.weight_slice) {
      const int64_t columns = std::min(p_.weight_slice, H - h0);
      const int64_t padded = round_up(columns, cpu::kPackedColumns);
      const std::byte* panel =
          panel_row(region<std::byte>(p_.input_panel), h0 / p_.weight_slice, 0);
      int64_t begin = 0;
      for (int64_t v = vocabulary.begin; v < vocabulary.end; ++v) {
        const int64_t n = count[v - vocabulary.begin];
        float* sums = output_row(team);
        float* kept_sums = region<float>(p_.grad_weight_sums) + v * H + h0;
        if (begun && in_workspace && g0 > 0) {
          std::copy(kept_sums, kept_sums + columns, sums);
        } else if (begun) {
          load_row(k_, out, v, h0, columns, sums);
        }
        k_.sum_packed(p_.target.source, panel, tokens + begin, values + begin, n, padded, sums,
                      begun);
        if (in_workspace && !last) {
          std::copy(sums, sums + columns, kept_sums);
        } else {
          store_row(k_, out, v, h0, columns, sums);
        }
        begin += n;
      }
    }
  }

  const SparsePlanData& p_;
  const cpu::GemmKernels& g_;
  const cpu::Kernels& k_;
  const ForwardOperands& in_;
  const GradientOutputs& out_;
  uint64_t seed_;
  int64_t vocab_start_;
  const Rows& source_;
  int64_t* rows_;
  RowKind* kinds_;
  std::byte* ws_;
  Stop& stop_;
  ForwardPass forward_;
  ForwardPass::Collect collect_;
  // Written by the first member, read behind a barrier.
  int64_t sparse_ = 0;
  int64_t pending_ = 0;
  int64_t kept_ = 0;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
