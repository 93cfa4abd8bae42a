// SPDX-License-Identifier: Apache-2.0
#include "check.h"
#include "float_environment.h"
#include "gradient_pass.h"
#include "logitless/gradient.h"
#include "sparse_pass.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

// With a grad_tolerance: the forward once more, for candidates; rows that are not flat sparsely,
// then the others.
class SparseGradient {
 public:
  SparseGradient(const GradientPlanData& plan, const GradientOperands& in,
                 const GradientOutputs& out, std::span<std::byte> workspace,
                 const CancelToken* cancel)
      : p_(*plan.sparse),
        plan_(plan),
        in_(in),
        out_(out),
        ws_(workspace),
        exact_(p_.exact->data()),
        stop_(cancel),
        rules_(exact_, in, out, nullptr, stop_) {}

  Result<void> run() {
    if (auto ok = rules_.count_rows(); !ok) return ok;  // before anything is written
    const int64_t BT = plan_.shape.BT;
    auto* kinds = region<RowKind>(p_.kinds);
    auto* rows = region<int64_t>(p_.rows);
    auto* targets = region<int64_t>(p_.targets);
    int64_t count = 0;
    for (int64_t b = 0; b < BT; ++b) {
      const bool has = rules_.counts(b);
      kinds[b] = has ? RowKind::sparse : RowKind::none;
      targets[b] = has && !rules_.masked(b) ? integer_at(in_.masked_target, b) : kNoTarget;
      if (has) rows[count++] = b;
    }
    const ForwardOperands operands{
        in_.input, in_.weight, {targets, DType::i64, BT, 1}, 0, plan_.shape.V};
    const ForwardOutputs statistics{
        .logits_max = own(0), .sum_exp_logits = own(1), .predicted_logits = own(2)};
    SparsePass pass(p_.sparse, operands, statistics, out_, in_.seed, in_.vocab_start_index, *this,
                    rows, kinds, ws_.data() + p_.passes, stop_);
    run_team(p_.sparse.target.threads, [&](const Team& team) { pass.work(team, count); });
    if (stop_.requested()) return Error{ErrorKind::cancelled, "gradient: cancelled"};
    const int64_t sparse = pass.sparse_rows(BT);
    if (auto ok = others(pass.began(), kinds); !ok) return ok;
    if (out_.sparse_counts != nullptr) {
      *out_.sparse_counts = {.rows = count,
                             .dense_rows = count - sparse,
                             .kept = pass.kept(),
                             .elements = sparse * plan_.shape.V};
    }
    return {};
  }

  // ---- what the pass asks ----------------------------------------------------------------------

  int64_t token_id(int64_t b) const { return in_.token_ids ? integer_at(*in_.token_ids, b) : b; }
  SparseRow row(int64_t b, float, float) const {
    return {.grad = f32_at(in_.grad, b),
            .grad_lse = rules_.grad_lse(b),
            .max = f32_at(*in_.logits_max, b),
            .sum = f32_at(*in_.sum_exp_logits, b)};
  }
  void settled(int64_t) const {}

 private:
  template <class T>
  T* region(int64_t offset) const {
    return reinterpret_cast<T*>(ws_.data() + offset);
  }
  VectorView own(int64_t i) const {
    return {region<float>(p_.statistics) + i * plan_.shape.BT, DType::f32, plan_.shape.BT, 1};
  }

  // The rows left to the exact pass. It would zero what it does not write: where the sparse pass
  // has begun, both outputs are added to, and rows that nobody has written are zeroed before.
  Result<void> others(bool began, const RowKind* kinds) {
    auto* counts = region<uint8_t>(p_.counts);
    for (int64_t b = 0; b < plan_.shape.BT; ++b) {
      counts[b] = kinds[b] == RowKind::dense ? 1 : 0;
      const bool fresh = out_.grad_input && !plan_.types.grad_input->accumulate;
      if (began && fresh && kinds[b] != RowKind::sparse) zero_row(*out_.grad_input, b);
    }
    GradientOperands dense = in_;
    dense.counts = ConstVectorView{counts, DType::u8, plan_.shape.BT, 1};
    GradientPass pass((began ? *p_.after : *p_.exact).data(), dense, out_, ws_.data() + p_.passes,
                      stop_);
    return pass.run();
  }

  const SparseGradientPlanData& p_;
  const GradientPlanData& plan_;
  const GradientOperands& in_;
  const GradientOutputs& out_;
  std::span<std::byte> ws_;
  const GradientPlanData& exact_;
  Stop stop_;
  GradientPass rules_;  // which rows count; not run
};

}  // namespace

Result<void> run(const GradientPlan& plan, const GradientOperands& operands,
                 const GradientOutputs& outputs, std::span<std::byte> workspace,
                 const CancelToken* cancel) {
  if (auto ok = check(plan.data(), operands, outputs, workspace); !ok) return ok;
  if (plan.data().sparse) {
    const DefaultFloatEnvironment environment;
    return SparseGradient(plan.data(), operands, outputs, workspace, cancel).run();
  }
  Stop stop(cancel);
  const Result<void> done =
      GradientPass(plan.data(), operands, outputs, workspace.data(), stop).run();
  if (done && outputs.sparse_counts != nullptr) *outputs.sparse_counts = {};
  return done;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
