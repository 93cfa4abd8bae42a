// SPDX-License-Identifier: Apache-2.0
// The plan of a sparse gradient (sparse_pass.h): blocks, capacities, workspace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "plan.h"
#include "sparse_rule.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

struct SparsePlanData {
  Shape shape;
  Target target;
  double tolerance = 0;
  // Of a vocabulary split over ranks shape has this rank's rows, from vocab_start on.
  int64_t vocabulary = 0;  // of all ranks
  int64_t vocab_start = 0;
  std::optional<GradientOutput> grad_input, grad_weight;
  // Of a block of rows; collects candidates.
  ForwardPlanData forward;
  int64_t block_rows() const { return forward.token_block; }
  // Rows whose kept elements are in memory together; grad_weight is summed from group to group.
  int64_t group_rows = 0;
  int64_t groups() const { return ceil_div(std::max<int64_t>(1, shape.BT), group_rows); }
  // Kept elements of a row that there is room for; behind them, where a segment's candidates are
  // thinned. A row of more is treated densely: it keeps eight standard deviations more than any
  // that is not flat is expected to, so that chance hardly ever decides.
  int64_t row_capacity = 0;
  static constexpr int64_t kRoom = cpu::kSegmentColumns + 32;
  int64_t most_kept_of_row() const { return row_capacity - kRoom; }
  // Of what ranks tell each other of a row: levels of softmax values, bytes.
  int levels() const { return SoftmaxBins::levels(tolerance); }
  int64_t record_bytes() const { return round_up(8 + levels() * (8 + 4), 8); }
  // Of the vocabulary, this rank's.
  double share() const {
    return static_cast<double>(shape.V) / static_cast<double>(std::max<int64_t>(1, vocabulary));
  }
  static constexpr int64_t kSettledTogether = 16;  // rows
  int64_t thread_capacity = 0;                     // candidates that a thread collects of a block
  // Segments that one thread takes at most: of each of the four rounds one more than its share.
  int64_t most_segments(int64_t threads) const {
    return std::min(segments(), ceil_div(segments(), threads) + 4);
  }
  static constexpr int64_t kSlack = 2 * cpu::kSegmentColumns;  // behind the last candidate
  // Rows of which everything can be collected, whatever they look like; on fewer threads than were
  // planned, too, which share the same lists.
  int64_t certain_rows() const {
    const int64_t segments_of_a_thread = std::max<int64_t>(1, most_segments(target.threads));
    return std::max<int64_t>(
        1, (thread_capacity - kSlack) / (segments_of_a_thread * cpu::kSegmentColumns));
  }
  // Candidates of the whole vocabulary that there is room for, a fifth more than are expected:
  // where a list ends, all rows of the block come once more.
  double room() const {
    const int64_t capacity = target.threads * (thread_capacity - kSlack);
    return static_cast<double>(capacity) / 1.2 / std::max(share(), 1e-9);
  }
  // Every so many vocabulary rows one is looked at beforehand; 0: none.
  int64_t sample_stride = 0;
  // The first is that of a global id.
  int64_t sample_first() const { return round_up(vocab_start, sample_stride) - vocab_start; }
  int64_t sample_rows() const {
    if (sample_stride == 0) return 0;
    return ceil_div(std::max<int64_t>(0, shape.V - sample_first()), sample_stride);
  }
  // More than this expected share of a row kept, by the whole row or, beforehand, by the sample: it
  // is treated densely. Beyond what pays (some 13 %), so that a few such rows among many need not
  // bring the exact pass along.
  static constexpr double kDenseShare = 0.2;
  static constexpr int64_t kMostRows = int64_t{1} << 16;  // of a group
  static constexpr int64_t kEntries = int64_t{1} << 16;   // of grad_weight, sorted at a time
  int64_t entries() const { return std::max(kEntries, group_rows); }
  // Columns of H that a product walks over, so that the other operand's rows, packed for it, stay
  // in L2: those of some segments of weight, or all of the group's input.
  int64_t input_slice = 0, weight_slice = 0;
  int64_t input_slices() const { return ceil_div(shape.H, input_slice); }
  int64_t weight_slices() const { return ceil_div(shape.H, weight_slice); }
  // Segments of weight walked over together: a block of the vocabulary, within which kept elements
  // are found by 16 bits, as rows are within a group.
  int64_t block_segments = 0;
  int64_t block_columns() const { return block_segments * cpu::kSegmentColumns; }
  int64_t vocab_blocks() const { return ceil_div(segments(), block_segments); }
  // Blocks whose kept elements are sorted together for grad_weight.
  static constexpr int64_t kMostSorted = 16 * cpu::kSegmentColumns;  // columns
  int64_t sorted_blocks = 0;
  Accumulator grad_weight_accumulator = Accumulator::none;
  int64_t segments() const { return ceil_div(shape.V, cpu::kSegmentColumns); }
  // Workspace offsets in bytes.
  int64_t forward_base = 0;
  int64_t vocab_hash = 0;  // [segments][256] u32
  int64_t tails = 0;       // [BT] SparseTail, with a sample
  int64_t values = 0, columns = 0, used = 0, chunks = 0;
  int64_t kept_values = 0, kept_columns = 0;  // [group_rows][row_capacity]
  int64_t kept_begin = 0;                     // [vocab_blocks() + 1][group_rows] i32
  int64_t pending = 0, block = 0;             // [group_rows], [block_rows()] i64
  int64_t grad_input_sums = 0;                // [input_slices()][block_rows()][input_slice] f32
  int64_t input_panel = 0;                    // [weight_slices()][group_rows][weight_slice], packed
  int64_t grad_weight_sums = 0;               // [V][H] f32
  int64_t scratch = 0, scratch_stride = 0;
  int64_t workspace_bytes = 0;
};

// Loss and gradient: the sparse rows, then the others in one pass, over one workspace.
struct SparseStepPlanData {
  SparsePlanData sparse;
  LossAndGradientPlanData exact;
  LossAndGradientPlanData after;  // adds to the grad_weight of sparse rows
  int64_t kinds = 0, rows = 0;    // [BT] RowKind, i64
  int64_t statistics = 0;         // [3][BT] f32
  int64_t passes = 0;             // the workspace of either
};

// A gradient from given statistics: the same.
struct SparseGradientPlanData {
  SparsePlanData sparse;
  std::optional<GradientPlan> exact, after;
  int64_t kinds = 0, rows = 0;  // [BT]
  int64_t counts = 0;           // [BT] u8: rows left to the exact pass
  int64_t targets = 0;          // [BT] i64
  int64_t statistics = 0;       // [3][BT] f32, of the forward
  int64_t passes = 0;
};

// Fill plan.sparse and plan.workspace_bytes.
Result<void> plan_sparse(LossAndGradientPlanData& plan, const PlanOptions& options);
Result<void> plan_sparse(GradientPlanData& plan, const PlanOptions& options);

// What a limit allows; the least bytes possible where it allows nothing.
bool choose_sparse(SparsePlanData& plan, int64_t limit_bytes, int64_t& least_bytes);
// Where no workspace would help.
Error beyond_32_bits(const Shape& shape, int threads);

// A vocabulary split over ranks, of which `shape` has this rank's rows. Blocks and groups must be
// those of all ranks, so they are chosen among these: the fewest groups, then the longest blocks,
// come first.
inline constexpr int kSparseChoices = 64;
SparsePlanData begin_split(const Shape& shape, int64_t vocabulary, int64_t vocab_start,
                           const LossAndGradientTypes& types, const Target& target);
// False where there is no such choice; else workspace_bytes says what it needs.
bool set_sparse_choice(SparsePlanData& plan, int choice);
std::string sparse_text(const SparsePlanData& plan);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
