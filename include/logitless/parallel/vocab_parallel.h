// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "logitless/loss_and_gradient.h"
#include "logitless/parallel/communicator.h"
#include "logitless/parallel/shards.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Cross-entropy of a head whose vocabulary is split over ranks: a training step in one call, as in
// loss_and_gradient.h, where each rank has some rows of weight.
//
//   forward   each rank's statistics of all tokens; an all-gather of 12 bytes per token and rank,
//             merged in rank order: loss and total have the same bits on every rank
//   backward  grad_weight: rows of this rank, nothing is communicated
//             grad_input:  partial sums in fp32, summed over the ranks, rounded once; in chunks of
//             tokens, each summed while the next one is computed
//
// In one pass (Strategy) both happen block by block of tokens: the statistics of a block are
// gathered while the forward of the next block is computed.
//
// Both calls are collective. Each begins with one agreement of fixed size (512 bytes per rank): a
// rank's bad argument, and anything in which ranks disagree, is the same error on every rank, and
// nothing has been written. Shards may be uneven, empty, and in any rank order, but must cover
// [0, V) without gap or overlap.
enum class TokenRows : uint8_t {
  all = 0,    // every rank has all BT rows
  slice = 1,  // rank r has the rows balanced_shard(BT, ranks, r) (sequence parallel)
};

struct VocabParallelTypes {
  DType operand = DType::bf16;         // input and weight: f32, f16, bf16
  std::optional<DType> multiply = {};  // absent = operand; bf16 with operand f32
  DType target = DType::i64;           // i32, i64
  // 0 = exact; else a sparse gradient that is unbiased (gradient.h), in one pass: every rank keeps
  // its part of what a whole vocabulary would keep. Its collectives block.
  float grad_tolerance = 0.0f;
  // Absent: not wanted, its product is not computed.
  std::optional<GradientOutput> grad_input = GradientOutput{};
  std::optional<GradientOutput> grad_weight = GradientOutput{};
  TokenRows input_rows = TokenRows::all;       // slice: input is all-gathered first
  TokenRows grad_input_rows = TokenRows::all;  // all: all-reduced; slice: reduce-scattered
  // Tokens whose sum runs while the next ones are computed, even; 0 = automatic (BT / 4, between
  // 512 and 4096; with one rank BT). Short chunks hide more of the communication but each packs
  // weight again. In one pass a chunk is a block; blocks are shorter where a limit says so.
  int64_t chunk_tokens = 0;
  // Whether run begins with the agreement. Without it a call saves one latency, and an argument
  // that is wrong on one rank, or different, means waiting for ever, or wrong sums; a cancel token
  // is then given on every rank or on none.
  bool agree_in_run = true;
  // automatic: one pass if some length of its blocks fits the limit of every rank, else recompute;
  // recompute too where no gradient is wanted.
  Strategy strategy = Strategy::automatic;
};

struct VocabParallelPlanData;

// Immutable, cheap to copy; for one communicator size and rank. One run at a time per communicator.
class VocabParallelPlan {
 public:
  explicit VocabParallelPlan(std::shared_ptr<const VocabParallelPlanData> data)
      : data_(std::move(data)) {}
  LOGITLESS_API int64_t workspace_bytes() const;
  LOGITLESS_API int threads() const;
  LOGITLESS_API Isa isa() const;
  LOGITLESS_API const Shape& shape() const;     // V of the whole vocabulary
  LOGITLESS_API const RowRange& rows() const;   // of the vocabulary, this rank's
  LOGITLESS_API const RowRange& slice() const;  // of the tokens, where they are sliced
  LOGITLESS_API Strategy strategy() const;      // one_pass or recompute
  LOGITLESS_API int64_t chunk_tokens() const;   // in one pass: of a block, at most
  LOGITLESS_API const VocabParallelTypes& types() const;
  // A hash of what the ranks agreed on and chose, not 0: plans of the same id may run together.
  LOGITLESS_API int64_t id() const;
  LOGITLESS_API std::string describe() const;  // with the bytes that are communicated
  const VocabParallelPlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const VocabParallelPlanData> data_;
};

// shape.V is the whole vocabulary's; rows: this rank's part of it. threads and the workspace limit
// may differ between ranks, everything else must not; the default limit is that of this rank's part
// (loss_and_gradient.h), what is communicated not counted. Errors: invalid_argument,
// limit_too_small, isa_unusable, communication.
LOGITLESS_API Result<VocabParallelPlan> plan_vocab_parallel_linear_cross_entropy(
    Communicator& communicator, const Shape& shape, const RowRange& rows,
    const VocabParallelTypes& types, const PlanOptions& options = {});

// Operands: weight is [rows().size(), H]; input [BT, H], or this rank's slice of it. Target, rows,
// token_weights, normalizer, seed and token_ids are of all BT tokens and the same on every rank;
// the default normalizer counts them (a data-parallel group beside this one: give the normalizer of
// both).
// Outputs: loss and statistics of all BT tokens; grad_input [BT, H], or this rank's slice of it;
// grad_weight [rows().size(), H]; of sparse_counts, kept and elements are those of this rank's rows
// of weight.
//
// Errors: invalid_argument, workspace_too_small; invalid_data when a row that counts has a target
// outside [0, V) (names row and value) — nothing is written; cancelled, on every rank when one
// rank's token fires (outputs unspecified; a rank that was cancelled still takes part in the
// communication, without computing); communication (outputs unspecified; the communicator is
// unusable).
LOGITLESS_API Result<void> run(const VocabParallelPlan& plan, Communicator& communicator,
                               const LossAndGradientOperands& operands,
                               const LossAndGradientOutputs& outputs,
                               std::span<std::byte> workspace, const CancelToken* cancel = nullptr);

// What a run said of all tokens (LossAndGradientOutputs): the same bits on every rank.
struct MergedStatistics {
  ConstVectorView logits_max;      // [BT] f32
  ConstVectorView sum_exp_logits;  // [BT] f32
};

// The backward apart, for losses whose weights are known only after the forward: run a plan without
// gradients, then this one, which must recompute or have a grad_tolerance, with the statistics that
// it gave. operands.token_weights are then the gradients of the loss with respect to each token's.
// Bits and errors are those of run. A sparse gradient takes its forward again and needs no
// statistics: it makes the same once more.
LOGITLESS_API Result<void> run_gradient(const VocabParallelPlan& plan, Communicator& communicator,
                                        const LossAndGradientOperands& operands,
                                        const MergedStatistics& statistics,
                                        const GradientOutputs& outputs,
                                        std::span<std::byte> workspace,
                                        const CancelToken* cancel = nullptr);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
