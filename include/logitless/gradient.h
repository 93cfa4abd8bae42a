// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "logitless/cancel.h"
#include "logitless/options.h"
#include "logitless/result.h"
#include "logitless/tensor.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// The gradient operator on one vocabulary shard; grad_logits is never whole.
//
//   softmax[b,v]     given (high-performance mode), or
//                    exp(logits[b,v] - logits_max[b]) / sum_exp_logits[b] with recomputed logits
//                    (memory-saving mode)
//   grad_logits[b,v] = (softmax[b,v] - [v == masked_target[b] and not target_mask[b]]) * grad[b]
//                      + softmax[b,v] * grad_logsumexp[b]
//   grad_input       = grad_logits . weight      [BT, H], partial: to be summed over shards
//   grad_weight      = grad_logits^T . input     [V, H]
//
// grad_logits is formed in fp32, rounded once to the type the operands are multiplied in (fp16:
// after scaling each row by a power of two, undone exactly), multiplied with fp32 accumulation in
// ascending order of the summed index; outputs are rounded once. Rows whose grad (and
// grad_logsumexp) are 0, or which the counts mask drops, contribute exactly 0 and cost nothing.
// Deterministic as the forward; a row of grad_input does not depend on the other tokens.
enum class GradientMode : uint8_t {
  memory_saving = 0,     // softmax recomputed from logits_max and sum_exp_logits
  high_performance = 1,  // softmax given
};

// An output's type and what to do with what its buffer holds.
struct GradientOutput {
  DType dtype = DType::bf16;  // f32 or the operand type
  bool accumulate = false;    // true: the buffer's value is the first addend
};

// A sparse gradient that is unbiased, for a grad_tolerance eps above 0 (docs/sparse-gradient.md).
// Of a row of grad_logits, p = softmax, t its target, w its grad:
//
//   rest       = sum of p[v] over v != t
//   below(tau) = sum of those p[v] < tau
//   tau        = the largest power of two, at most 1, with tau * below(tau) <= (eps * rest)^2
//
// p[v] >= tau stays as it is; a smaller one becomes tau with probability p[v] / tau, else 0; the
// target stays as it is. The expectation is the exact gradient, and the standard error of a row of
// grad_logits at most eps of its norm. What is kept depends on seed, token id and global
// vocabulary id alone: on no thread, chunk or limit. Kept values are not rounded to the operand
// type. A row of which this would keep more than a fifth, or whose statistics are not finite, is
// treated exactly, as are all rows where eps is 0. (In a batch that has both kinds of rows, a
// 16-bit grad_weight is rounded once for either.) A vocabulary of
// about 2^32 rows, the candidates of which 32 bits cannot number, is refused (invalid_argument).
inline constexpr float kLeastGradTolerance = 0x1p-16f;
inline constexpr float kMostGradTolerance = 0.5f;

// What a sparse gradient did.
struct SparseCounts {
  int64_t rows = 0;        // that have a gradient
  int64_t dense_rows = 0;  // of them, treated exactly
  int64_t kept = 0;        // elements of grad_logits in the others
  int64_t elements = 0;    // (rows - dense_rows) * V, of which they were kept
};

struct GradientTypes {
  DType operand = DType::bf16;         // input and weight: f32, f16, bf16
  std::optional<DType> multiply = {};  // absent = operand; bf16 with operand f32
  DType target = DType::i64;           // masked_target: i32, i64
  GradientMode mode = GradientMode::memory_saving;
  // With which rounding the statistics were made; memory-saving mode only.
  LogitsRounding logits_rounding = LogitsRounding::none;
  // 0 = exact; else from kLeastGradTolerance to kMostGradTolerance, in memory-saving mode, for
  // statistics of this weight alone (no other shards).
  float grad_tolerance = 0.0f;
  // Absent: not wanted, its product is not computed.
  std::optional<GradientOutput> grad_input = GradientOutput{};
  std::optional<GradientOutput> grad_weight = GradientOutput{};
};

struct GradientOperands {
  ConstVectorView grad;                                // [BT] f32, d loss / d loss[b]
  std::optional<ConstVectorView> grad_logsumexp = {};  // [BT] f32
  ConstMatrixView input;                               // [BT, H] operand
  ConstMatrixView weight;                              // [V, H] operand
  std::optional<ConstMaskView> target_mask = {};       // [BT]; absent = every target is inside
  ConstVectorView masked_target;                       // [BT] i32 or i64, local indices
  std::optional<ConstVectorView> logits_max = {};      // [BT] f32, merged; memory-saving mode
  std::optional<ConstVectorView> sum_exp_logits = {};  // [BT] f32, merged; memory-saving mode
  std::optional<ConstMatrixView> softmax = {};         // [BT, V] f32, read-only; high-performance
  std::optional<ConstVectorView> counts = {};          // [BT] u8, 0 = the row does not count
  // With a grad_tolerance: what the choice depends on. A new seed for every step: the same one
  // would leave out the same elements again and again.
  uint64_t seed = 0;
  std::optional<ConstVectorView> token_ids = {};  // [BT] i64; absent = the row's number
  int64_t vocab_start_index = 0;                  // the global id of weight's first row
};

struct GradientOutputs {
  std::optional<MatrixView> grad_input = {};   // [BT, H], present exactly when planned
  std::optional<MatrixView> grad_weight = {};  // [V, H]
  SparseCounts* sparse_counts = nullptr;       // zeros where nothing is sparse; may be null
};

struct GradientPlanData;

// Immutable, cheap to copy, safe to share between threads; depends on no stride or address.
class GradientPlan {
 public:
  explicit GradientPlan(std::shared_ptr<const GradientPlanData> data) : data_(std::move(data)) {}
  LOGITLESS_API int64_t workspace_bytes() const;
  LOGITLESS_API int threads() const;
  LOGITLESS_API Isa isa() const;
  LOGITLESS_API const Shape& shape() const;
  LOGITLESS_API const GradientTypes& types() const;
  LOGITLESS_API std::string describe() const;
  const GradientPlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const GradientPlanData> data_;
};

// Errors: invalid_argument, wrong_type, limit_too_small, isa_unusable.
LOGITLESS_API Result<GradientPlan> plan_gradient(const Shape& shape, const GradientTypes& types,
                                                 const PlanOptions& options = {});

// Errors: invalid_argument and workspace_too_small; invalid_data when a row that counts has an
// unmasked masked_target outside [0, V) and V > 0 (names row and value) — in all these cases
// nothing is written; cancelled (outputs unspecified). Fresh outputs are never read.
LOGITLESS_API Result<void> run(const GradientPlan& plan, const GradientOperands& operands,
                               const GradientOutputs& outputs, std::span<std::byte> workspace,
                               const CancelToken* cancel = nullptr);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
