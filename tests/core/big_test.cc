// SPDX-License-Identifier: Apache-2.0
// Sizes whose products pass 2^31 elements, where a 32-bit index or product would wrap.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "logitless/loss.h"
#include "tests/support/cases.h"
#include "tests/support/sanitizers.h"
#include "tests/support/steps.h"

namespace logitless::test {
namespace {

constexpr int64_t kWrap = int64_t{1} << 31;

PlanOptions best() { return {.threads = 2}; }

// BT * V = 2^31 + ..., logits never stored; H is 1, so the operands are small.
TEST(Big, BTTimesVAboveTwoToTheThirtyOne) {
  constexpr Shape shape{.BT = 50'000, .V = 50'001, .H = 1};
  static_assert(shape.BT * shape.V > kWrap);
  ForwardCase c;
  c.shape = shape;
  c.arithmetic = all_arithmetics()[1];
  c.input = TestTensor::matrix(DType::bf16, shape.BT, 1);
  c.weight = TestTensor::matrix(DType::bf16, shape.V, 1);
  c.target = TestTensor::vector(DType::i64, shape.BT);
  for (int64_t b = 0; b < shape.BT; ++b) {
    c.input.set(b, 0, b % 2 ? 1.0 : 0.0);
    c.target.set_index(b, shape.V - 1 - b % shape.V);
  }
  for (int64_t v = 0; v < shape.V; ++v) c.weight.set(v, 0, v == shape.V - 1 ? 4.0 : 0.0);
  const ForwardResult r = run_forward(c, best());
  for (int64_t b = 0; b < shape.BT; ++b) {
    const bool peak = b % 2 == 1;
    ASSERT_EQ(r.logits_max.get(b), peak ? 4.0 : 0.0) << b;
    const double sum = peak ? 1.0 + (static_cast<double>(shape.V) - 1.0) * std::exp(-4.0)
                            : static_cast<double>(shape.V);
    ASSERT_NEAR(r.sum_exp_logits.get(b), sum, 1e-4 * sum) << b;
    ASSERT_EQ(r.predicted_logits.get(b), peak && b % shape.V != 0 ? -4.0 : 0.0) << b;
    ASSERT_EQ(r.masked_target->get_index(b), shape.V - 1 - b % shape.V);
  }
}

TEST(Big, GradientOfBTTimesVAboveTwoToTheThirtyOne) {
  constexpr Shape shape{.BT = 50'000, .V = 50'001, .H = 1};
  GradientCase c;
  c.shape = shape;
  c.arithmetic = all_arithmetics()[1];
  c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
  c.input = TestTensor::matrix(DType::bf16, shape.BT, 1);
  c.weight = TestTensor::matrix(DType::bf16, shape.V, 1);
  c.grad = TestTensor::vector(DType::f32, shape.BT, 0);
  c.grad.set(0, 1.0);
  c.masked_target = TestTensor::vector(DType::i64, shape.BT);
  c.logits_max = TestTensor::vector(DType::f32, shape.BT);
  c.sum_exp_logits = TestTensor::vector(DType::f32, shape.BT);
  const double others = static_cast<double>(shape.V) - 1.0;
  const double peaked_sum = 1.0 + others * std::exp(-4.0);
  for (int64_t b = 0; b < shape.BT; ++b) {
    const bool peak = b % 2 == 1;
    c.input.set(b, 0, peak ? 1.0 : 0.0);
    c.masked_target.set_index(b, shape.V - 1 - b % shape.V);
    c.logits_max.set(b, peak ? 4.0 : 0.0);
    c.sum_exp_logits.set(b, peak ? peaked_sum : static_cast<double>(shape.V));
  }
  for (int64_t v = 0; v < shape.V; ++v) c.weight.set(v, 0, v == shape.V - 1 ? 4.0 : 0.0);
  const GradientResult r = run_gradient(c, best());
  for (int64_t b = 0; b < shape.BT; ++b) {
    const double p = b % 2 ? 1.0 / peaked_sum : 1.0 / static_cast<double>(shape.V);
    const double want = 4.0 * (p - (b == 0 ? 1.0 : 0.0));
    ASSERT_NEAR(r.grad_input->get(b, 0), want, 0x1p-8 * std::abs(want)) << b;
  }
  // Odd tokens have input 1: half of them, with the same softmax; each column is one token's
  // target.
  for (int64_t v = 0; v < shape.V; ++v) {
    const double p = (v == shape.V - 1 ? 1.0 : std::exp(-4.0)) / peaked_sum;
    const bool target_of_odd = v > 0 && (shape.V - 1 - v) % 2 == 1;
    const double want = p * 25'000.0 - (target_of_odd ? 1.0 : 0.0);
    ASSERT_NEAR(r.grad_weight->get(v, 0), want, 0x1p-8 * 25'000.0 * p) << v;
  }
}

// A matrix whose rows lie so far apart that offsets pass 2^31 elements; only the pages of its rows
// become real memory.
class FarRows {
 public:
  FarRows(DType dtype, int64_t rows, int64_t cols, int64_t row_stride)
      : view_{nullptr, dtype, rows, cols, row_stride, 1},
        bytes_(static_cast<size_t>(((rows - 1) * row_stride + cols) * size_of(dtype))) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    mark_as_mapped(memory, bytes_);
    view_.data = memory;
  }
  ~FarRows() {
    if (view_.data != nullptr) munmap(view_.data, bytes_);
  }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  bool mapped() const { return view_.data != nullptr; }
  const MatrixView& view() const { return view_; }
  std::byte* row(int64_t r) const {
    return static_cast<std::byte*>(view_.data) + r * view_.row_stride * size_of(view_.dtype);
  }
  size_t row_bytes() const { return static_cast<size_t>(view_.cols * size_of(view_.dtype)); }
  void copy_from(const TestTensor& contiguous) {
    const auto* from = static_cast<const std::byte*>(contiguous.matrix_view().data);
    for (int64_t r = 0; r < view_.rows; ++r) {
      std::memcpy(row(r), from + static_cast<size_t>(r) * row_bytes(), row_bytes());
    }
  }
  bool equals(const TestTensor& contiguous) const {
    const auto* other = static_cast<const std::byte*>(contiguous.matrix_view().data);
    for (int64_t r = 0; r < view_.rows; ++r) {
      if (std::memcmp(row(r), other + static_cast<size_t>(r) * row_bytes(), row_bytes()) != 0) {
        return false;
      }
    }
    return true;
  }

 private:
  MatrixView view_;
  size_t bytes_;
};

// Every matrix far apart gives the same bits as all of them contiguous.
TEST(Big, OffsetsAboveTwoToTheThirtyOneElements) {
  const Shape shape{.BT = 600, .V = 20'000, .H = 24};
  const int64_t stride_v = 120'000, stride_bt = 4'000'000;
  ASSERT_GT((shape.V - 1) * stride_v, kWrap);
  ASSERT_GT((shape.BT - 1) * stride_bt, kWrap);
  ForwardCase c = make_forward_case(shape, all_arithmetics()[1]);
  c.logits = DType::bf16;
  const ForwardResult want = run_forward(c, best());

  FarRows input(DType::bf16, shape.BT, shape.H, stride_bt);
  FarRows weight(DType::bf16, shape.V, shape.H, stride_v);
  FarRows logits(DType::bf16, shape.BT, shape.V, stride_bt);
  ASSERT_TRUE(input.mapped() && weight.mapped() && logits.mapped());
  input.copy_from(c.input);
  weight.copy_from(c.weight);
  ForwardResult far = make_forward_outputs(c);
  ForwardOperands operands = c.operands();
  operands.input = input.view();
  operands.weight = weight.view();
  ForwardOutputs outputs = outputs_of(c, far);
  outputs.logits = logits.view();
  const auto plan = plan_forward(shape, c.types(), best());
  ASSERT_TRUE(plan);
  ASSERT_TRUE(run(*plan, operands, outputs, guarded_workspace(plan->workspace_bytes())));
  EXPECT_EQ(far.logits_max.all_bits(), want.logits_max.all_bits());
  EXPECT_EQ(far.sum_exp_logits.all_bits(), want.sum_exp_logits.all_bits());
  EXPECT_EQ(far.predicted_logits.all_bits(), want.predicted_logits.all_bits());
  EXPECT_TRUE(logits.equals(*want.logits));

  // Softmax of the logits, far apart as well, and the gradient that takes it.
  TestTensor near_softmax = TestTensor::matrix(DType::f32, shape.BT, shape.V);
  FarRows softmax(DType::f32, shape.BT, shape.V, stride_bt);
  ASSERT_TRUE(softmax.mapped());
  std::vector<float> loss(static_cast<size_t>(shape.BT));
  const auto loss_plan = plan_loss(shape.BT, shape.V, {.softmax_logits = DType::bf16}, best());
  LossOperands statistics{want.logits_max.vector_view(), want.sum_exp_logits.vector_view(),
                          want.predicted_logits.vector_view()};
  for (const bool is_far : {false, true}) {
    statistics.logits = is_far ? logits.view() : want.logits->matrix_view();
    LossOutputs out{vector_view<float>(std::span<float>(loss))};
    out.softmax = is_far ? softmax.view() : near_softmax.matrix_view();
    ASSERT_TRUE(run(*loss_plan, statistics, out));
  }
  EXPECT_TRUE(softmax.equals(near_softmax));

  for (const auto mode : {GradientMode::high_performance, GradientMode::memory_saving}) {
    GradientCase g;
    g.shape = shape;
    g.arithmetic = c.arithmetic;
    g.mode = mode;
    g.grad = TestTensor::vector(DType::f32, shape.BT);
    g.masked_target = TestTensor::vector(DType::i64, shape.BT);
    for (int64_t b = 0; b < shape.BT; ++b) {
      g.grad.set(b, b % 5 == 0 ? 0.0 : 0.5);
      g.masked_target.set_index(b, want.masked_target->get_index(b));
    }
    const auto run_with = [&](const ConstMatrixView& in, const ConstMatrixView& w,
                              const ConstMatrixView& p, const MatrixView& grad_input,
                              const MatrixView& grad_weight) {
      GradientOperands o;
      o.grad = g.grad.vector_view();
      o.input = in;
      o.weight = w;
      o.masked_target = g.masked_target.vector_view();
      if (mode == GradientMode::high_performance) o.softmax = p;
      o.logits_max = want.logits_max.vector_view();
      o.sum_exp_logits = want.sum_exp_logits.vector_view();
      const auto gradient = plan_gradient(shape, g.types(), best());
      ASSERT_TRUE(gradient);
      const auto ran = run(*gradient, o, {.grad_input = grad_input, .grad_weight = grad_weight},
                           guarded_workspace(gradient->workspace_bytes()));
      ASSERT_TRUE(ran) << ran.error().message;
    };
    GradientResult near = make_gradient_outputs(g);
    run_with(c.input.matrix_view(), c.weight.matrix_view(), near_softmax.matrix_view(),
             near.grad_input->matrix_view(), near.grad_weight->matrix_view());
    FarRows grad_input(DType::bf16, shape.BT, shape.H, stride_bt);
    FarRows grad_weight(DType::bf16, shape.V, shape.H, stride_v);
    ASSERT_TRUE(grad_input.mapped() && grad_weight.mapped());
    run_with(input.view(), weight.view(), softmax.view(), grad_input.view(), grad_weight.view());
    EXPECT_TRUE(grad_input.equals(*near.grad_input));
    EXPECT_TRUE(grad_weight.equals(*near.grad_weight));
  }
}

// 8 MiB beside the accumulator at the sizes of real models: slower, and the same bits.
TEST(Big, LittleWorkspaceChangesNoBitAtRealSizes) {
  for (const Shape& shape :
       {Shape{.BT = 512, .V = 16000, .H = 2048}, Shape{.BT = 200, .V = 3000, .H = 8192}}) {
    PlanOptions limited = best();
    limited.workspace_limit_bytes = shape.BT * shape.H * 4 + (int64_t{8} << 20);
    StepCase step = make_step(shape, all_arithmetics()[1]);
    step.normalizer = 1.0;
    const StepResult want = run_step(step, best(), Strategy::recompute);
    const StepResult got = run_step(step, limited, Strategy::recompute);
    EXPECT_EQ(got.bits(), want.bits());
    // The gradient operator by itself, whose bits these are.
    const GradientCase gradient = gradient_case_of(step, &want);
    EXPECT_EQ(run_gradient(gradient, limited).bits(), want.gradients.bits());
    // One pass holds exponentials of at least 64 tokens: the least that it accepts.
    step.grad_weight = GradientOutput{.dtype = DType::f32};
    const auto plan = [&](const PlanOptions& o) {
      return plan_loss_and_gradient(shape, step.types(), o, Strategy::one_pass);
    };
    limited.workspace_limit_bytes = int64_t{1} << 20;
    while (!plan(limited)) limited.workspace_limit_bytes += int64_t{1} << 18;
    EXPECT_LT(limited.workspace_limit_bytes, plan(best())->workspace_bytes());
    EXPECT_EQ(run_step(step, limited, Strategy::one_pass).bits(),
              run_step(step, best(), Strategy::one_pass).bits());
  }
}

// Plans of sizes that no machine here holds: no overflow on the way to the number.
TEST(Big, PlansOfHugeShapesDoNotWrap) {
  for (const Shape& shape : {Shape{.BT = int64_t{1} << 31, .V = 1 << 20, .H = 16},
                             Shape{.BT = 1 << 20, .V = int64_t{1} << 33, .H = 64},
                             Shape{.BT = 3, .V = 5, .H = int64_t{1} << 32}}) {
    const auto forward = plan_forward(shape, {}, best());
    if (forward) {
      EXPECT_GT(forward->workspace_bytes(), 0);
    } else {
      EXPECT_FALSE(forward.error().message.empty());
    }
    const auto gradient = plan_gradient(shape, {}, best());
    if (gradient) {
      // At least the accumulator, where there must be one.
      EXPECT_GT(gradient->workspace_bytes(), 0);
    } else {
      EXPECT_FALSE(gradient.error().message.empty());
    }
  }
}

}  // namespace
}  // namespace logitless::test
