// SPDX-License-Identifier: Apache-2.0
#pragma once

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

// ---- merge: the statistics of several shards become those of the whole vocabulary -------------
//
//   logits_max       = max over shards of logits_max_local
//   sum_exp_logits   = sum over shards of sum_exp_logits_local * exp(logits_max_local - logits_max)
//   predicted_logits = predicted_local + (logits_max_local - logits_max) of the shard that owns the
//                      target (its mask is 0); 0 where no shard does
//
// Shards are merged in the order given, with the merge the forward kernel uses; (-inf) - (-inf) is
// never formed. An output may be the very view of one of the inputs.
struct ShardStatistics {
  ConstVectorView logits_max;        // [BT] f32
  ConstVectorView sum_exp_logits;    // [BT] f32
  ConstVectorView predicted_logits;  // [BT] f32
  ConstMaskView target_mask;         // [BT]
};

struct MergeOutputs {
  VectorView logits_max;                     // [BT] f32
  VectorView sum_exp_logits;                 // [BT] f32
  VectorView predicted_logits;               // [BT] f32
  std::optional<MaskView> target_mask = {};  // [BT] 1 = no shard owns the target
};

struct MergePlanData;

class MergePlan {
 public:
  explicit MergePlan(std::shared_ptr<const MergePlanData> data) : data_(std::move(data)) {}
  LOGITLESS_API int64_t workspace_bytes() const;  // 0
  LOGITLESS_API int threads() const;
  LOGITLESS_API std::string describe() const;
  const MergePlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const MergePlanData> data_;
};

LOGITLESS_API Result<MergePlan> plan_merge(int64_t BT, int64_t shards,
                                           const PlanOptions& options = {});
LOGITLESS_API Result<void> run(const MergePlan& plan, std::span<const ShardStatistics> shards,
                               const MergeOutputs& outputs, std::span<std::byte> workspace = {},
                               const CancelToken* cancel = nullptr);

// ---- loss: merged statistics -> loss, and on request logsumexp and softmax --------------------
//
//   loss[b]      = log(sum_exp_logits[b]) - predicted_logits[b]
//                  NaN where logits_max is -inf (undefined), +inf where only the target's logit is
//   logsumexp[b] = log(sum_exp_logits[b]) + logits_max[b]
//   softmax[b,v] = exp(logits[b,v] - logits_max[b]) * (1 / sum_exp_logits[b])
// Rows that do not count: loss, logsumexp and softmax are 0. softmax may be the very elements of
// fp32 logits (same address, same strides), which it then replaces.
struct LossTypes {
  std::optional<DType> softmax_logits = {};  // present: softmax is computed from logits of this
                                             // type: f32, f16, bf16
};

struct LossOperands {
  ConstVectorView logits_max;                  // [BT] f32
  ConstVectorView sum_exp_logits;              // [BT] f32
  ConstVectorView predicted_logits;            // [BT] f32
  std::optional<ConstMatrixView> logits = {};  // [BT, V]
  std::optional<ConstVectorView> counts = {};  // [BT] u8, 0 = the row does not count
};

struct LossOutputs {
  VectorView loss;                           // [BT] f32
  std::optional<VectorView> logsumexp = {};  // [BT] f32
  std::optional<MatrixView> softmax = {};    // [BT, V] f32
};

struct LossPlanData;

class LossPlan {
 public:
  explicit LossPlan(std::shared_ptr<const LossPlanData> data) : data_(std::move(data)) {}
  LOGITLESS_API int64_t workspace_bytes() const;  // 0
  LOGITLESS_API int threads() const;
  LOGITLESS_API Isa isa() const;
  LOGITLESS_API std::string describe() const;
  const LossPlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const LossPlanData> data_;
};

// V is read only when softmax is wanted.
LOGITLESS_API Result<LossPlan> plan_loss(int64_t BT, int64_t V, const LossTypes& types = {},
                                         const PlanOptions& options = {});
LOGITLESS_API Result<void> run(const LossPlan& plan, const LossOperands& operands,
                               const LossOutputs& outputs, std::span<std::byte> workspace = {},
                               const CancelToken* cancel = nullptr);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
