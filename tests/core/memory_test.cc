// SPDX-License-Identifier: Apache-2.0
// A running operator allocates nothing once the threads exist, and touches nothing but its
// operands, outputs and exactly the workspace its plan asked for.
#include <gtest/gtest.h>

#include "logitless/loss.h"
#include "tests/support/allocation_hook.h"
#include "tests/support/cases.h"
#include "tests/support/isa_test.h"
#include "tests/support/one_hot.h"

namespace logitless::test {
namespace {

class Allocation : public IsaTest {
 protected:
  void SetUp() override {
    if (!allocation_hook_available()) GTEST_SKIP() << "the sanitizer owns malloc";
  }
};
LOGITLESS_INSTANTIATE_PER_ISA(Allocation);

TEST_P(Allocation, TheHookCounts) {
  const AllocationGuard guard;
  std::vector<int> v(1000, 1);
  EXPECT_GT(guard.allocations(), 0);
  EXPECT_EQ(v.back(), 1);
}

TEST_P(Allocation, ForwardAllocatesNothing) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
      for (const bool filtered : {false, true}) {
        ForwardCase c = make_forward_case({.BT = 100, .V = 1000, .H = 64}, arithmetic,
                                          {.weight = {.transposed = true}});
        c.rounding = rounding;
        c.logits = DType::f32;
        if (filtered) c.ignore_index = c.target.get_index(3);
        ForwardResult r = make_forward_outputs(c);
        const auto plan = plan_forward(c.shape, c.types(), options());
        const auto workspace = guarded_workspace(plan->workspace_bytes());
        const ForwardOperands operands = c.operands();
        const ForwardOutputs outputs = outputs_of(c, r);
        ASSERT_TRUE(run(*plan, operands, outputs, workspace));  // now the threads exist
        int64_t allocations = -1;
        bool ok = false;
        {
          const AllocationGuard guard;
          ok = static_cast<bool>(run(*plan, operands, outputs, workspace));
          allocations = guard.allocations();
        }
        EXPECT_TRUE(ok);
        EXPECT_EQ(allocations, 0) << c.describe();
      }
    }
  }
}

TEST_P(Allocation, GradientAllocatesNothing) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto mode : {GradientMode::memory_saving, GradientMode::high_performance}) {
      for (const bool accumulate : {false, true}) {
        // Little memory: many chunks, every accumulator in use.
        GradientCase c = make_gradient_case(
            make_forward_case({.BT = 100, .V = 1000, .H = 64}, arithmetic), {.mode = mode});
        c.grad_input->accumulate = c.grad_weight->accumulate = accumulate;
        for (const int64_t limit : {int64_t{0}, int64_t{1} << 19}) {
          PlanOptions o = options();
          o.workspace_limit_bytes = limit;
          const auto plan = plan_gradient(c.shape, c.types(), o);
          if (!plan) continue;
          GradientResult r = make_gradient_outputs(c);
          const auto workspace = guarded_workspace(plan->workspace_bytes());
          const GradientOperands operands = c.operands();
          const GradientOutputs outputs = outputs_of(r);
          ASSERT_TRUE(run(*plan, operands, outputs, workspace));
          int64_t allocations = -1;
          bool ok = false;
          {
            const AllocationGuard guard;
            ok = static_cast<bool>(run(*plan, operands, outputs, workspace));
            allocations = guard.allocations();
          }
          EXPECT_TRUE(ok);
          EXPECT_EQ(allocations, 0) << c.describe() << ", limit " << limit;
        }
      }
    }
  }
}

TEST_P(Allocation, LossAndGradientAllocatesNothing) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Strategy strategy : {Strategy::one_pass, Strategy::recompute}) {
      const ForwardCase c =
          make_forward_case({.BT = 100, .V = 1000, .H = 64}, arithmetic, {.outside = 0});
      TestTensor loss = TestTensor::vector(DType::f32, 100);
      TestTensor grad_input = TestTensor::matrix(DType::f32, 100, 64);
      TestTensor grad_weight = TestTensor::matrix(arithmetic.operand, 1000, 64);
      LossAndGradientTypes types{.operand = arithmetic.operand, .multiply = arithmetic.multiply};
      types.grad_input = GradientOutput{.dtype = DType::f32};
      types.grad_weight = GradientOutput{.dtype = arithmetic.operand};
      const auto plan = plan_loss_and_gradient(c.shape, types, options(), strategy);
      ASSERT_TRUE(plan);
      const LossAndGradientOperands operands{.input = c.input.matrix_view(),
                                             .weight = c.weight.matrix_view(),
                                             .target = c.target.vector_view()};
      LossAndGradientOutputs outputs;
      outputs.loss = loss.vector_view();
      outputs.grad_input = grad_input.matrix_view();
      outputs.grad_weight = grad_weight.matrix_view();
      const auto workspace = guarded_workspace(plan->workspace_bytes());
      ASSERT_TRUE(run(*plan, operands, outputs, workspace));
      int64_t allocations = -1;
      bool ok = false;
      {
        const AllocationGuard guard;
        ok = static_cast<bool>(run(*plan, operands, outputs, workspace));
        allocations = guard.allocations();
      }
      EXPECT_TRUE(ok);
      EXPECT_EQ(allocations, 0) << c.describe();
    }
  }
}

// Sparse and dense rows, in one pass and with statistics given, with much memory and little.
TEST_P(Allocation, SparseGradientAllocatesNothing) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = make_step({.BT = 100, .V = 2000, .H = 64}, arithmetic);
    c.grad_tolerance = 0x1p-6f;
    for (int64_t b = 0; b < 100; ++b) {
      const double scale = b % 5 == 4 ? 1.0 / 64 : 2.0;
      for (int64_t h = 0; h < 64; ++h) c.input.set(b, h, c.input.get(b, h) * scale);
    }
    c.token_ids = TestTensor::vector(DType::i64, 100);
    for (int64_t b = 0; b < 100; ++b) c.token_ids->set_index(b, 3 * b);
    const StepResult statistics = run_step(c, options(), Strategy::automatic);
    EXPECT_GT(statistics.gradients.sparse_counts.dense_rows, 0);
    EXPECT_LT(statistics.gradients.sparse_counts.dense_rows, 100);
    const GradientCase g = gradient_case_of(c, &statistics);
    const auto step_plan = [&](int64_t limit) {
      PlanOptions o = options();
      o.workspace_limit_bytes = limit;
      return plan_loss_and_gradient(c.shape, c.types(), o);
    };
    const auto gradient_plan = [&](int64_t limit) {
      PlanOptions o = options();
      o.workspace_limit_bytes = limit;
      return plan_gradient(g.shape, g.types(), o);
    };
    TestTensor loss = TestTensor::vector(DType::f32, 100);
    GradientResult r = make_gradient_outputs(g);
    LossAndGradientOutputs outputs;
    outputs.loss = loss.vector_view();
    outputs.grad_input = r.grad_input->matrix_view();
    outputs.grad_weight = r.grad_weight->matrix_view();
    outputs.sparse_counts = &r.sparse_counts;
    const LossAndGradientOperands operands = c.operands();
    const GradientOperands gradient_operands = g.operands();
    const GradientOutputs gradient_outputs = outputs_of(r);
    const auto expect_none = [&](const auto& plan, const auto& in, const auto& out) {
      ASSERT_TRUE(plan);
      const auto workspace = guarded_workspace(plan->workspace_bytes());
      ASSERT_TRUE(run(*plan, in, out, workspace));
      int64_t allocations = -1;
      bool ok = false;
      {
        const AllocationGuard guard;
        ok = static_cast<bool>(run(*plan, in, out, workspace));
        allocations = guard.allocations();
      }
      EXPECT_TRUE(ok);
      EXPECT_EQ(allocations, 0) << c.describe();
    };
    for (const bool little : {false, true}) {
      expect_none(step_plan(little ? least_limit(step_plan) : 0), operands, outputs);
      expect_none(gradient_plan(little ? least_limit(gradient_plan) : 0), gradient_operands,
                  gradient_outputs);
    }
  }
}

TEST_P(Allocation, MergeAndLossAllocateNothing) {
  const int64_t BT = 20000, V = 10;
  std::vector<float> a(BT, 1.0f), b(BT, 2.0f), out(BT), softmax(BT * V), logits(BT * V);
  const std::vector<uint8_t> mask(BT / 8);
  const ConstVectorView va = vector_view<float>(std::span<const float>(a));
  const ConstVectorView vb = vector_view<float>(std::span<const float>(b));
  const std::vector<ShardStatistics> shards{{va, vb, va, ConstMaskView(mask.data(), BT)},
                                            {vb, va, va, ConstMaskView(mask.data(), BT)}};
  std::vector<float> sum(BT), predicted(BT);
  const MergeOutputs merged{vector_view<float>(std::span<float>(out)),
                            vector_view<float>(std::span<float>(sum)),
                            vector_view<float>(std::span<float>(predicted))};
  LossOperands operands{va, vb, va};
  operands.logits = matrix_view<float>(static_cast<const float*>(logits.data()), BT, V);
  LossOutputs outputs{vector_view<float>(std::span<float>(out))};
  outputs.softmax = matrix_view<float>(softmax.data(), BT, V);
  const auto merge = plan_merge(BT, 2, options());
  const auto loss = plan_loss(BT, V, {.softmax_logits = DType::f32}, options());
  ASSERT_TRUE(run(*merge, shards, merged));
  ASSERT_TRUE(run(*loss, operands, outputs));
  int64_t allocations = -1;
  bool ok = false;
  {
    const AllocationGuard guard;
    ok = static_cast<bool>(run(*merge, shards, merged)) &&
         static_cast<bool>(run(*loss, operands, outputs));
    allocations = guard.allocations();
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0);
}

class Workspace : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Workspace);

// Contents from another run, or of any kind, are no input.
TEST_P(Workspace, WhatTheWorkspaceHoldsIsNoInput) {
  const ForwardCase c = make_forward_case({.BT = 37, .V = 333, .H = 40}, all_arithmetics()[1]);
  const GradientCase g =
      make_gradient_case(make_forward_case({.BT = 37, .V = 333, .H = 40}, all_arithmetics()[1]));
  const auto forward = plan_forward(c.shape, c.types(), options());
  const auto gradient = plan_gradient(g.shape, g.types(), options());
  std::vector<uint64_t> first, first_gradient;
  for (const int fill : {0x00, 0xff, 0x7f, 0x3c}) {
    ForwardResult r = make_forward_outputs(c);
    auto workspace = guarded_workspace(forward->workspace_bytes());
    std::fill(workspace.begin(), workspace.end(), static_cast<std::byte>(fill));
    ASSERT_TRUE(run(*forward, c.operands(), outputs_of(c, r), workspace));
    if (first.empty()) first = r.bits();
    EXPECT_EQ(r.bits(), first) << fill;
    GradientResult gradients = make_gradient_outputs(g);
    workspace = guarded_workspace(gradient->workspace_bytes());
    std::fill(workspace.begin(), workspace.end(), static_cast<std::byte>(fill));
    ASSERT_TRUE(run(*gradient, g.operands(), outputs_of(gradients), workspace));
    if (first_gradient.empty()) first_gradient = gradients.bits();
    EXPECT_EQ(gradients.bits(), first_gradient) << fill;
  }
}

}  // namespace
}  // namespace logitless::test
