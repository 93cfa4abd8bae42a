// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "logitless/cancel.h"
#include "logitless/gradient.h"
#include "logitless/options.h"
#include "logitless/result.h"
#include "logitless/tensor.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Loss and both gradients in one call, for a whole vocabulary, where the weight
// of every token in the loss is known up front: a training step.
//
//   total = sum_b w[b] * loss[b],   w[b] = token_weights[b] / normalizer
//
// In one pass, a block of tokens finishes statistics, loss and both gradients
// before the next one starts: three products instead of the four of forward +
// memory-saving gradient. The exponentials of the block's logits are kept
// meanwhile: rounded to bf16 where operands are multiplied in bf16 (one more
// relative rounding of softmax, 2^-9; the target's own softmax stays fp32),
// else in fp32.
//
// Statistics and loss have the bits of the separate operators. Gradients do not
// depend on threads, blocks, or the limit, as long as the strategy is the same
// one; a row of grad_input depends on other tokens only through the default
// normalizer. The two strategies differ by the rounding above: name one where
// bits must not depend on the limit.
enum class Strategy : uint8_t {
  automatic = 0,  // one pass if its workspace is within the limit, else
                  // recompute; describe() says
  one_pass = 1,
  recompute = 2,  // forward, loss, memory-saving gradient
};

struct LossAndGradientTypes {
  DType operand = DType::bf16;         // input and weight: f32, f16, bf16
  std::optional<DType> multiply = {};  // absent = operand; bf16 with operand f32
  DType target = DType::i64;           // i32, i64
  // 0 = exact; else a sparse gradient that is unbiased (gradient.h), in one pass.
  float grad_tolerance = 0.0f;
  // Absent: not wanted, its product is not computed.
  std::optional<GradientOutput> grad_input = GradientOutput{};
  std::optional<GradientOutput> grad_weight = GradientOutput{};
};

struct LossAndGradientOperands {
  ConstMatrixView input;   // [BT, H] operand
  ConstMatrixView weight;  // [V, H] operand
  ConstVectorView target;  // [BT] i32 or i64; in [0, V) where the row counts
  RowFilter rows = {};
  std::optional<ConstVectorView> token_weights = {};  // [BT] f32; absent = 1
  // Absent: with token_weights 1, else the number of rows that count. Not 0.
  std::optional<double> normalizer = {};
  // With a grad_tolerance: as in GradientOperands.
  uint64_t seed = 0;
  std::optional<ConstVectorView> token_ids = {};  // [BT] i64; absent = the row's number
};

struct LossAndGradientOutputs {
  VectorView loss;          // [BT] f32, unweighted; 0 where the row does not count
  double* total = nullptr;  // sum of w[b] * loss[b] in double, ascending b; may be null
  std::optional<VectorView> logits_max = {};        // [BT] f32
  std::optional<VectorView> sum_exp_logits = {};    // [BT] f32
  std::optional<VectorView> predicted_logits = {};  // [BT] f32
  std::optional<MatrixView> grad_input = {};        // [BT, H], present exactly when planned
  std::optional<MatrixView> grad_weight = {};       // [V, H]
  SparseCounts* sparse_counts = nullptr;            // zeros where nothing is sparse; may be null
};

struct LossAndGradientPlanData;

// Immutable, cheap to copy, safe to share between threads; depends on no stride
// or address.
class LossAndGradientPlan {
 public:
  explicit LossAndGradientPlan(std::shared_ptr<const LossAndGradientPlanData> data)
      : data_(std::move(data)) {}
  LOGITLESS_API int64_t workspace_bytes() const;
  LOGITLESS_API int threads() const;
  LOGITLESS_API Isa isa() const;
  LOGITLESS_API Strategy strategy() const;  // one_pass or recompute
  LOGITLESS_API const Shape& shape() const;
  LOGITLESS_API const LossAndGradientTypes& types() const;
  LOGITLESS_API std::string describe() const;
  const LossAndGradientPlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const LossAndGradientPlanData> data_;
};

// The default limit is the larger of 256 MiB and 1.25 x the bytes of operands
// and gradients. Errors: invalid_argument, wrong_type, limit_too_small, isa_unusable.
LOGITLESS_API Result<LossAndGradientPlan> plan_loss_and_gradient(
    const Shape& shape, const LossAndGradientTypes& types, const PlanOptions& options = {},
    Strategy strategy = Strategy::automatic);

// Errors: invalid_argument, workspace_too_small; invalid_data when a row that
// counts has a target outside [0, V) (names row and value) — nothing is
// written; cancelled (outputs unspecified).
LOGITLESS_API Result<void> run(const LossAndGradientPlan& plan,
                               const LossAndGradientOperands& operands,
                               const LossAndGradientOutputs& outputs,
                               std::span<std::byte> workspace, const CancelToken* cancel = nullptr);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
