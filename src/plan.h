// SPDX-License-Identifier: Apache-2.0
// Shapes + machine + options -> schedule, tiles, workspace layout. A plan is a pure function of
// these; it knows no address and no stride.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cpu/constants.h"
#include "cpu/kernels.h"
#include "logitless/forward.h"
#include "logitless/gradient.h"
#include "logitless/loss.h"
#include "logitless/loss_and_gradient.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

inline constexpr int64_t kAlignment = 64;
inline constexpr int64_t kForwardWorkspaceBytes = int64_t{16} << 20;   // default limit, H <= 8192
inline constexpr int64_t kGradientWorkspaceBytes = int64_t{64} << 20;  // beside the accumulator

inline constexpr int64_t kLossAndGradientWorkspaceBytes = int64_t{256} << 20;  // or 1.25 x data

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// n rows cut into the fewest panels of at most `width`, as even as pairs of rows allow: 1024 rows
// in panels of 14 become 68 of 14 and 6 of 12, not 73 of 14 and one of 2.
struct Panels {
  int64_t n;
  int64_t count;
  int64_t pairs;
  Panels(int64_t rows, int width)
      : n(rows), count(ceil_div(rows, width)), pairs(ceil_div(rows, 2)) {}
  int64_t begin(int64_t i) const {
    return 2 * (i * (pairs / count) + (i < pairs % count ? i : pairs % count));
  }
  int size(int64_t i) const {
    const int64_t end = i + 1 == count ? n : begin(i + 1);
    return static_cast<int>(end - begin(i));
  }
  // Rows the register tile computes: even, the padded one is zero; a single row stays single.
  static int tile_rows(int size) { return size == 1 ? 1 : size + (size & 1); }
};

// Regions of a workspace, laid out one behind the other.
class Layout {
 public:
  int64_t add(int64_t bytes) {
    const int64_t offset = bytes_;
    bytes_ += round_up(bytes, kAlignment);
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

struct Target {
  Isa isa = Isa::scalar;
  int threads = 1;
  const cpu::Kernels* kernels = nullptr;
  const cpu::GemmKernels* gemm = nullptr;
  cpu::PackSource source = cpu::PackSource::f32;  // how input and weight are read
  DType multiply = DType::f32;
  int64_t l2_bytes = 0;
};

// Few tokens: their logits are made from weight as it lies in memory, without packing it
// (few_tokens.h).
struct FewTokens {
  int width = 0;  // of the tokens' panel; 0: too many tokens, weight is packed
  explicit operator bool() const { return width > 0; }
  bool vocab_in_lanes(const cpu::GemmKernels& g) const { return width <= g.few; }
  // A thread's own memory: tiles of a segment; logits before they are turned; staged weight.
  int64_t tiles_bytes() const {
    return round_up(int64_t{cpu::kSegmentColumns} * width * 4, kAlignment);
  }
  int64_t logits() const { return tiles_bytes(); }
  int64_t staged() const { return 2 * tiles_bytes(); }
  int64_t own_bytes(const cpu::GemmKernels& g) const {
    return vocab_in_lanes(g) ? tiles_bytes() : staged() + g.stream_staged_bytes;
  }
};

struct ForwardPlanData {
  Shape shape;
  ForwardTypes types;
  Target target;
  int64_t token_block = 0;     // rows whose packed input is held at a time
  int64_t chunk_segments = 0;  // segments of weight packed at a time
  int panel_rows = 0;          // tokens of a panel: mr, or fewer so that a large team shares them
  int group = 0;               // token panels that share one walk over a segment
  int64_t least_bytes = 0;     // the least workspace any limit allows
  // A short batch: all tokens in one block, and each thread takes segments of its own, of which it
  // packs a panel of weight at a time; or none, for a few tokens.
  bool own_panels = false;
  FewTokens few;
  bool own_segments() const { return own_panels || few; }
  // One pass: the exponentials of a block's logits are kept, in this type, as tiles
  // [token panel][vocabulary panel][mr][nr], and the statistics of all its segments.
  std::optional<DType> held;
  int64_t held_tiles = 0;
  // A sparse gradient: candidates are collected (sparse_pass.h). Only with segments of one's own.
  bool collects = false;
  int64_t vocab_panels() const { return ceil_div(shape.V, target.gemm->nr); }
  int64_t token_panels() const { return ceil_div(token_block, panel_rows); }
  // Of a chunk, but where it is of all.
  int64_t partial_segments() const {
    return held || own_segments() ? ceil_div(shape.V, cpu::kSegmentColumns) : chunk_segments;
  }
  int64_t held_tile_bytes() const { return target.gemm->mr * target.gemm->nr * size_of(*held); }
  // Workspace offsets in bytes.
  int64_t input_panels = 0, weight_panels = 0, tiles = 0, tiles_stride = 0;
  int64_t partial_max = 0, partial_sum = 0;  // [partial_segments()][token_block]
  int64_t row_index = 0, local_target = 0;   // [token_block] i64
  int64_t run_max = 0, run_sum = 0, run_low = 0, predicted = 0;  // [token_block] f32
  // Sums without the target's term, relative to the same maxima; what candidates are measured by.
  int64_t partial_rest = 0;                              // [partial_segments()][token_block]
  int64_t rest_max = 0, rest_sum = 0, rest_low = 0;      // [token_block] f32
  int64_t token_hash = 0, threshold = 0, reference = 0;  // [token_block] u32, f32, f32
  int64_t workspace_bytes = 0;
};

// Where a gradient's partial sums live between the steps of k.
enum class Accumulator : uint8_t {
  none = 0,       // one step completes it
  output = 1,     // the fp32 output itself
  workspace = 2,  // fp32 tiles in the workspace
};

// What a tile of grad_logits is made of.
enum class SoftmaxSource : uint8_t {
  logits = 0,   // recomputed
  softmax = 1,  // given by the caller
  held = 2,     // exponentials kept by the same call's forward
};

struct SparseStepPlanData;
struct SparseGradientPlanData;

struct GradientPlanData {
  Shape shape;
  GradientTypes types;
  SoftmaxSource source = SoftmaxSource::logits;
  Target target;
  // The outer loop; the inner loop runs over the other dimension. Vocabulary outside completes
  // rows of grad_weight as it goes, tokens outside rows of grad_input.
  bool vocab_outside = true;
  int64_t token_chunk = 0;  // even
  int64_t vocab_chunk = 0;  // a multiple of nr
  Accumulator grad_input_accumulator = Accumulator::none;
  Accumulator grad_weight_accumulator = Accumulator::none;
  int64_t accumulator_bytes = 0;  // of the one summed over the outer loop
  int64_t least_bytes = 0;        // the least workspace any limit allows
  // Workspace offsets in bytes.
  int64_t input_rows = 0;   // A panels: tokens x H, for logits
  int64_t input_cols = 0;   // A panels: H x tokens, for grad_weight
  int64_t weight_rows = 0;  // B panels: vocabulary x H, for logits
  int64_t weight_cols = 0;  // B panels: H x vocabulary, for grad_input
  int64_t grad_rows = 0;    // A panels: tokens x vocabulary, for grad_input
  int64_t grad_cols = 0;    // B panels: vocabulary x tokens, for grad_weight
  int64_t grad_input_tiles = 0, grad_weight_tiles = 0;
  int64_t row_index = 0, row_params = 0;  // [token_chunk]
  int64_t scratch = 0, scratch_stride = 0;
  // Per thread: rows of a fresh 16-bit grad_weight, collected until whole cache lines can be
  // written. Stride 0: written tile by tile.
  int64_t row_buffers = 0, row_buffer_stride = 0;
  int64_t row_buffer_bytes() const { return kBufferedPanels * target.gemm->mr * 2; }  // of a row
  static constexpr int64_t kBufferedPanels = 32;
  bool past_caches = false;  // a fresh grad_weight, too large to stay in them
  // Panels of one's own (gradient_pass.h): all tokens in one chunk, and each thread packs of weight
  // what it needs itself, panel by panel. input_cols are then B panels, tokens x H; weight_rows,
  // weight_cols and grad_cols are one panel per thread.
  bool own_panels = false;
  int64_t own_group = 1;  // panels a thread makes together, so that rows are read along
  FewTokens few;
  int64_t weight_pointers = 0;             // per thread: the chunk's rows of weight
  int64_t own_stride = 0;                  // of these four
  int64_t few_logits = 0, few_stride = 0;  // FewTokens::own_bytes, per thread
  int64_t workspace_bytes = 0;
  // With a grad_tolerance, instead of all this (sparse_plan.h).
  std::shared_ptr<const SparseGradientPlanData> sparse;
};

struct LossAndGradientPlanData {
  Shape shape;
  LossAndGradientTypes types;
  Target target;
  bool one_pass = true;
  std::string why;
  int64_t limit_bytes = 0;
  // One pass: both halves, each with its own part of the workspace.
  ForwardPlanData forward;
  GradientPlanData gradient;
  // Where the forward of the next block runs before the gradients of this one: what it holds lies
  // in other places, the buffers it only computes in are the same.
  bool two_blocks = false;
  ForwardPlanData next_forward;
  int64_t forward_base = 0, gradient_base = 0;
  // Recompute: the operators one after the other, over one workspace.
  std::optional<ForwardPlan> forward_plan;
  std::optional<GradientPlan> gradient_plan;
  int64_t logits_max = 0, sum_exp_logits = 0, predicted_logits = 0, grad = 0;  // [BT] f32
  int64_t operators = 0;                                                       // their workspace
  int64_t workspace_bytes = 0;
  // With a grad_tolerance, instead of all this (sparse_plan.h).
  std::shared_ptr<const SparseStepPlanData> sparse;
};

// Lines of describe() below the first.
std::string one_pass_text(const LossAndGradientPlanData& plan);

struct MergePlanData {
  int64_t BT = 0;
  int64_t shards = 0;
  int threads = 1;
  const cpu::Kernels* kernels = nullptr;
};

// Fills the offsets for the blocks chosen; returns the workspace's bytes.
int64_t lay_out(ForwardPlanData& plan);
int64_t lay_out(GradientPlanData& plan);
int64_t lay_out(LossAndGradientPlanData& plan);
// The plan with panels of one's own, for all tokens and this chunk of the vocabulary.
GradientPlanData with_own_panels(GradientPlanData plan, int64_t vocab_chunk);

// How few tokens are read, and whether they are few.
FewTokens few_tokens(const cpu::GemmKernels& gemm, int64_t BT);

// The bytes one pass may use where no limit is given.
int64_t default_limit(const Shape& shape, const LossAndGradientTypes& types);

// One pass over blocks that the caller makes: at most `blocks` of them, of at most `block_tokens`
// tokens. shape, types, target, two_blocks and limit_bytes are set before.
int64_t least_one_pass_bytes(const LossAndGradientPlanData& plan, int64_t block_tokens,
                             int64_t blocks);
// The fewest cycles within the limit; false where the least bytes are beyond it.
bool choose_one_pass_blocks(LossAndGradientPlanData& plan, int64_t block_tokens, int64_t blocks);

// The blocks of one pass: the fewest cycles within plan.limit_bytes. False if nothing fits;
// least_bytes is then what would have.
bool choose_one_pass(LossAndGradientPlanData& plan, int64_t& least_bytes);
struct LossPlanData {
  int64_t BT = 0;
  int64_t V = 0;
  LossTypes types;
  Target target;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
