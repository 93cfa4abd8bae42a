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

// The forward operator on one vocabulary shard: logits = input . weight^T is reduced to an online
// maximum and sum per token and never stored (unless asked for).
//
//   logits_max_local[b]     = max_v logits[b, v]
//   sum_exp_logits_local[b] = sum_v exp(logits[b, v] - logits_max_local[b])
//   target_mask[b]          = target[b] < vocab_start_index or target[b] >= vocab_end_index
//   masked_target[b]        = target_mask[b] ? 0 : target[b] - vocab_start_index
//   predicted_local[b]      = target_mask[b] ? 0 : logits[b, masked_target[b]] -
//   logits_max_local[b]
//
// V = 0 or a row of -inf: max -inf, sum 0, predicted 0. A NaN logit: max and sum are NaN.
// A row that does not count is written as the neutral element of merging: max -inf, sum 0,
// predicted 0, mask 1 and masked_target 0.
// An unmasked target whose local index is >= V: predicted is 0 - max, masked_target as computed.
// Deterministic: the same bits for any threads, limit, tile and run on one ISA, and for a token
// whatever other tokens stand beside it.
struct ForwardTypes {
  DType operand = DType::bf16;         // input and weight: f32, f16, bf16
  std::optional<DType> multiply = {};  // absent = operand; bf16 with operand f32: rounded to
                                       // nearest even while packing
  DType target = DType::i64;           // target and masked_target: i32, i64
  std::optional<DType> logits = {};    // present: logits are written, as operand type or f32
  LogitsRounding logits_rounding = LogitsRounding::none;
};

struct ForwardOperands {
  ConstMatrixView input;   // [BT, H] operand
  ConstMatrixView weight;  // [V, H] operand
  ConstVectorView target;  // [BT] i32 or i64, global vocabulary ids
  int64_t vocab_start_index = 0;
  // Exclusive, as in Megatron; absent = vocab_start_index + V. May be less or more than that.
  std::optional<int64_t> vocab_end_index = {};
  RowFilter rows = {};
};

struct ForwardOutputs {
  VectorView logits_max;                         // [BT] f32
  VectorView sum_exp_logits;                     // [BT] f32
  VectorView predicted_logits;                   // [BT] f32
  std::optional<MaskView> target_mask = {};      // [BT]
  std::optional<VectorView> masked_target = {};  // [BT], dtype of target
  std::optional<MatrixView> logits = {};         // [BT, V]; rows that do not count are zeros
};

struct ForwardPlanData;

// Immutable, cheap to copy, safe to share between threads; depends on no stride or address.
class ForwardPlan {
 public:
  explicit ForwardPlan(std::shared_ptr<const ForwardPlanData> data) : data_(std::move(data)) {}
  LOGITLESS_API int64_t workspace_bytes() const;
  LOGITLESS_API int threads() const;
  LOGITLESS_API Isa isa() const;
  LOGITLESS_API const Shape& shape() const;
  LOGITLESS_API const ForwardTypes& types() const;
  LOGITLESS_API std::string describe() const;  // schedule, tiles, chunks, workspace; several lines
  const ForwardPlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const ForwardPlanData> data_;
};

// Errors: invalid_argument, wrong_type, limit_too_small, isa_unusable.
LOGITLESS_API Result<ForwardPlan> plan_forward(const Shape& shape, const ForwardTypes& types,
                                               const PlanOptions& options = {});

// workspace: at least plan.workspace_bytes() bytes, 64-byte aligned; contents are overwritten.
// Allocates nothing (after OpenMP's threads exist). Errors: invalid_argument, workspace_too_small
// (nothing written), cancelled (outputs unspecified).
LOGITLESS_API Result<void> run(const ForwardPlan& plan, const ForwardOperands& operands,
                               const ForwardOutputs& outputs, std::span<std::byte> workspace,
                               const CancelToken* cancel = nullptr);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
