// SPDX-License-Identifier: Apache-2.0
// A training step in three products: per block of tokens the forward pass keeps the exponentials of
// its logits, which the gradient pass turns into grad_logits instead of multiplying again.
//
//   for each block of tokens
//     forward pass of the block      exp(logit - segment maximum) -> held tiles (bf16 or fp32)
//     settle its rows                loss; per segment and row
//                                    factor = exp(segment maximum - row maximum) / sum
//     for each chunk of the vocabulary
//       grad_logits tile = held * (factor * weight of the token), the target's by itself
//       grad_weight, grad_input      as in the gradient pass, tokens outside
//
// Tokens of weight 0 come last, in blocks of their own: they need statistics and a loss, no more.
#include "logitless/loss_and_gradient.h"

#include <string>

#include "check.h"
#include "float_environment.h"
#include "forward_pass.h"
#include "gradient_pass.h"
#include "loss_row.h"
#include "one_pass.h"
#include "sparse_pass.h"
#include "step_tokens.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

class LossAndGradient {
 public:
  LossAndGradient(const LossAndGradientPlanData& plan, const LossAndGradientOperands& in,
                  const LossAndGradientOutputs& out, std::span<std::byte> workspace,
                  const CancelToken* cancel)
      : p_(plan),
        in_(in),
        out_(out),
        ws_(workspace),
        cancel_(cancel),
        tokens_(in, plan.shape.BT, plan.shape.V) {}

  // Only of the rows whose gradient is left to this pass; the others have theirs, and their losses.
  void leave_out(const RowKind* kinds) { kinds_ = kinds; }

  Result<void> run() {
    if (auto ok = tokens_.count(); !ok) return ok;  // before anything is written
    for (int64_t b = 0; b < p_.shape.BT; ++b) weighted_ += has_gradient(b) ? 1 : 0;
    statistics_.logits_max = out_.logits_max.value_or(own(p_.logits_max));
    statistics_.sum_exp_logits = out_.sum_exp_logits.value_or(own(p_.sum_exp_logits));
    statistics_.predicted_logits = out_.predicted_logits.value_or(own(p_.predicted_logits));
    const ForwardOperands operands{in_.input, in_.weight, in_.target, 0, p_.shape.V, in_.rows};
    if (auto ok = p_.one_pass ? one_pass(operands) : recompute(operands); !ok) return ok;
    if (out_.total != nullptr) {
      double total = 0;
      for (int64_t b = 0; b < p_.shape.BT; ++b) {
        if (tokens_.counts(b))
          total += tokens_.weight(b) * static_cast<double>(f32_at(out_.loss, b));
      }
      *out_.total = total;
    }
    return {};
  }

 private:
  bool has_gradient(int64_t b) const {
    return tokens_.has_gradient(b) && (kinds_ == nullptr || kinds_[b] == RowKind::dense);
  }
  VectorView own(int64_t offset) const { return {ws_.data() + offset, DType::f32, p_.shape.BT, 1}; }
  // Statistics -> loss of one row that counts.
  float loss_of(int64_t b) const {
    return loss_of_row(f32_at(statistics_.logits_max, b), f32_at(statistics_.sum_exp_logits, b),
                       f32_at(statistics_.predicted_logits, b));
  }

  Result<void> recompute(const ForwardOperands& operands) {
    const auto operators = ws_.subspan(static_cast<size_t>(p_.operators));
    if (auto ok = logitless::run(*p_.forward_plan, operands, statistics_, operators, cancel_);
        !ok) {
      return ok;
    }
    const VectorView grad = own(p_.grad);
    for (int64_t b = 0; b < p_.shape.BT; ++b) {
      const bool here = tokens_.counts(b);
      set_f32(out_.loss, b, here ? loss_of(b) : 0.0f);
      set_f32(grad, b, here ? static_cast<float>(tokens_.weight(b)) : 0.0f);
    }
    GradientOperands gradient{.grad = grad,
                              .input = in_.input,
                              .weight = in_.weight,
                              .masked_target = in_.target,
                              .logits_max = statistics_.logits_max,
                              .sum_exp_logits = statistics_.sum_exp_logits};
    return logitless::run(*p_.gradient_plan, gradient, {out_.grad_input, out_.grad_weight},
                          operators, cancel_);
  }

  Result<void> one_pass(const ForwardOperands& operands) {
    Stop stop(cancel_);
    GradientOperands unused;
    unused.input = in_.input;
    unused.weight = in_.weight;
    const GradientOutputs gradients{out_.grad_input, out_.grad_weight};
    ForwardPass forward(p_.forward, operands, statistics_, ws_.data() + p_.forward_base, stop);
    GradientPass gradient(p_.gradient, unused, gradients, ws_.data() + p_.gradient_base, stop);
    gradient.set_held(held_by(forward, p_.forward));
    run_team(p_.target.threads, [&](const Team& team) { work(team, forward, gradient, stop); });
    if (stop.requested()) return Error{ErrorKind::cancelled, "loss_and_gradient: cancelled"};
    return {};
  }

  void work(const Team& team, ForwardPass& forward, GradientPass& gradient, Stop& stop) {
    forward.neutral_rows(team);
    zero_rows(team);
    GradientPass::Cell cell;
    cell.token_chunks = ceil_div(weighted_, p_.forward.token_block);
    cell.vocab_chunks = ceil_div(p_.shape.V, p_.gradient.vocab_chunk);
    int64_t cursor = 0;
    for (int64_t block = 0; block < cell.token_chunks; ++block) {
      const int64_t rows =
          forward.next_block(team, cursor, [&](int64_t b) { return has_gradient(b); });
      forward.one_block(team, rows);
      if (stop.leave_together(team)) return;
      settle(team, forward, rows);
      take_gradient_rows(team, p_.forward, p_.gradient, forward, gradient, tokens_, rows);
      team.barrier();
      if (p_.shape.H == 0) continue;
      if (!add_block(team, p_.gradient, gradient, block, rows, cell)) return;
    }
    cursor = 0;
    for (int64_t left = tokens_.counting() - tokens_.weighted(); left > 0;) {
      const int64_t rows =
          forward.next_block(team, cursor, [&](int64_t b) { return !tokens_.has_gradient(b); });
      forward.one_block(team, rows);
      if (stop.leave_together(team)) return;
      settle(team, forward, rows);
      team.barrier();
      left -= rows;
    }
  }

  // Fresh gradients where the products will not write, and the loss of rows that do not count.
  void zero_rows(const Team& team) const {
    const Range tokens = team.part(p_.shape.BT);
    for (int64_t b = tokens.begin; b < tokens.end; ++b) {
      if (!tokens_.counts(b)) set_f32(out_.loss, b, 0.0f);
      if (tokens_.has_gradient(b)) continue;
      if (out_.grad_input && !p_.types.grad_input->accumulate) zero_row(*out_.grad_input, b);
    }
    if (weighted_ > 0 || !out_.grad_weight || p_.types.grad_weight->accumulate) return;
    const Range vocabulary = team.part(p_.shape.V);
    for (int64_t v = vocabulary.begin; v < vocabulary.end; ++v) zero_row(*out_.grad_weight, v);
  }

  // The block's statistics are complete: its losses.
  void settle(const Team& team, const ForwardPass& forward, int64_t rows) const {
    const int64_t* index = forward.region<int64_t>(p_.forward.row_index);
    const Range mine = team.part(rows);
    for (int64_t r = mine.begin; r < mine.end; ++r) set_f32(out_.loss, index[r], loss_of(index[r]));
  }

  const LossAndGradientPlanData& p_;
  const LossAndGradientOperands& in_;
  const LossAndGradientOutputs& out_;
  std::span<std::byte> ws_;
  const CancelToken* cancel_;
  StepTokens tokens_;
  const RowKind* kinds_ = nullptr;
  int64_t weighted_ = 0;  // rows whose gradient is made here
  ForwardOutputs statistics_;
};

// With a grad_tolerance: rows that are not flat sparsely, then the others.
class SparseStep {
 public:
  SparseStep(const LossAndGradientPlanData& plan, const LossAndGradientOperands& in,
             const LossAndGradientOutputs& out, std::span<std::byte> workspace,
             const CancelToken* cancel)
      : p_(*plan.sparse),
        shape_(plan.shape),
        in_(in),
        out_(out),
        ws_(workspace),
        cancel_(cancel),
        tokens_(in, plan.shape.BT, plan.shape.V),
        statistics_{.logits_max = out.logits_max.value_or(own(0)),
                    .sum_exp_logits = out.sum_exp_logits.value_or(own(1)),
                    .predicted_logits = out.predicted_logits.value_or(own(2))} {}

  Result<void> run() {
    if (auto ok = tokens_.count(); !ok) return ok;  // before anything is written
    auto* kinds = reinterpret_cast<RowKind*>(ws_.data() + p_.kinds);
    auto* rows = reinterpret_cast<int64_t*>(ws_.data() + p_.rows);
    int64_t count = 0;
    for (int64_t b = 0; b < shape_.BT; ++b) {
      const bool has = tokens_.has_gradient(b);
      kinds[b] = has ? RowKind::sparse : RowKind::none;
      if (has) rows[count++] = b;
    }
    Stop stop(cancel_);
    const ForwardOperands operands{in_.input, in_.weight, in_.target, 0, shape_.V, in_.rows};
    const GradientOutputs gradients{out_.grad_input, out_.grad_weight};
    SparsePass pass(p_.sparse, operands, statistics_, gradients, in_.seed, 0, *this, rows, kinds,
                    ws_.data() + p_.passes, stop);
    run_team(p_.sparse.target.threads, [&](const Team& team) { pass.work(team, count); });
    if (stop.requested()) return Error{ErrorKind::cancelled, "loss_and_gradient: cancelled"};
    const int64_t sparse = pass.sparse_rows(shape_.BT);
    LossAndGradient others(pass.began() ? p_.after : p_.exact, in_, out_,
                           ws_.subspan(static_cast<size_t>(p_.passes)), cancel_);
    others.leave_out(kinds);
    if (auto ok = others.run(); !ok) return ok;
    if (out_.sparse_counts != nullptr) {
      *out_.sparse_counts = {.rows = count,
                             .dense_rows = count - sparse,
                             .kept = pass.kept(),
                             .elements = sparse * shape_.V};
    }
    return {};
  }

  // ---- what the pass asks ----------------------------------------------------------------------

  int64_t token_id(int64_t b) const { return in_.token_ids ? integer_at(*in_.token_ids, b) : b; }
  SparseRow row(int64_t b, float max, float sum) const {
    return {.grad = static_cast<float>(tokens_.weight(b)), .max = max, .sum = sum};
  }
  void settled(int64_t b) const {
    set_f32(out_.loss, b,
            loss_of_row(f32_at(statistics_.logits_max, b), f32_at(statistics_.sum_exp_logits, b),
                        f32_at(statistics_.predicted_logits, b)));
  }

 private:
  VectorView own(int64_t i) const {
    return {ws_.data() + p_.statistics + i * shape_.BT * 4, DType::f32, shape_.BT, 1};
  }

  const SparseStepPlanData& p_;
  const Shape& shape_;
  const LossAndGradientOperands& in_;
  const LossAndGradientOutputs& out_;
  std::span<std::byte> ws_;
  const CancelToken* cancel_;
  StepTokens tokens_;
  ForwardOutputs statistics_;
};

}  // namespace

Result<void> run(const LossAndGradientPlan& plan, const LossAndGradientOperands& operands,
                 const LossAndGradientOutputs& outputs, std::span<std::byte> workspace,
                 const CancelToken* cancel) {
  if (auto ok = check(plan.data(), operands, outputs, workspace); !ok) return ok;
  const DefaultFloatEnvironment environment;  // losses and weights are not all made in a team
  if (plan.data().sparse) {
    return SparseStep(plan.data(), operands, outputs, workspace, cancel).run();
  }
  const Result<void> done =
      LossAndGradient(plan.data(), operands, outputs, workspace, cancel).run();
  if (done && outputs.sparse_counts != nullptr) *outputs.sparse_counts = {};
  return done;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
