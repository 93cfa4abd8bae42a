// SPDX-License-Identifier: Apache-2.0
#include "logitless/loss_and_gradient.h"

#include <gtest/gtest.h>

#include <cmath>

#include "logitless/loss.h"
#include "tests/support/cases.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

class LossAndGradient : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(LossAndGradient);

const std::vector<Strategy> kStrategies = {Strategy::one_pass, Strategy::recompute};

struct StepCase {
  Shape shape;
  Arithmetic arithmetic;
  DType target_type = DType::i64;
  std::optional<GradientOutput> grad_input, grad_weight;
  std::optional<int64_t> ignore_index = {};
  std::optional<double> normalizer = {};
  Layout grad_input_layout = {}, grad_weight_layout = {};
  int64_t vector_stride = 1;
  TestTensor input, weight, target;
  std::optional<TestTensor> counts = {}, token_weights = {};

  bool row_counts(int64_t b) const {
    if (counts && counts->get_index(b) == 0) return false;
    return !ignore_index || target.get_index(b) != *ignore_index;
  }
  // w[b], as the operator computes it: in double, rounded to float for the gradient.
  double token_weight(int64_t b) const {
    double rows = 0;
    for (int64_t i = 0; i < shape.BT; ++i) rows += row_counts(i) ? 1 : 0;
    const double n = normalizer.value_or(token_weights || rows == 0 ? 1.0 : rows);
    return (token_weights ? token_weights->get(b) : 1.0) / n;
  }
  LossAndGradientTypes types() const {
    return {.operand = arithmetic.operand,
            .multiply = arithmetic.multiply,
            .target = target_type,
            .grad_input = grad_input,
            .grad_weight = grad_weight};
  }
  LossAndGradientOperands operands() const {
    LossAndGradientOperands o;
    o.input = input.matrix_view();
    o.weight = weight.matrix_view();
    o.target = target.vector_view();
    o.rows.ignore_index = ignore_index;
    if (counts) o.rows.counts = counts->vector_view();
    if (token_weights) o.token_weights = token_weights->vector_view();
    o.normalizer = normalizer;
    return o;
  }
};

StepCase make_step(const Shape& shape, const Arithmetic& arithmetic,
                   const CaseOptions& how = {.outside = 0}) {
  CaseOptions inside = how;
  inside.outside = 0;
  ForwardCase forward = make_forward_case(shape, arithmetic, inside);
  StepCase c;
  c.shape = shape;
  c.arithmetic = arithmetic;
  c.target_type = forward.target_type;
  c.grad_input = c.grad_weight = GradientOutput{.dtype = arithmetic.operand};
  c.input = std::move(forward.input);
  c.weight = std::move(forward.weight);
  c.target = std::move(forward.target);
  // An empty vocabulary has no valid target.
  if (shape.V == 0) c.ignore_index = 0;
  for (int64_t b = 0; shape.V == 0 && b < shape.BT; ++b) c.target.set_index(b, 0);
  return c;
}

struct StepResult {
  TestTensor loss, logits_max, sum_exp_logits, predicted_logits;
  double total = NAN;
  GradientResult gradients;
  std::vector<uint64_t> bits() const {
    std::vector<uint64_t> all = gradients.bits();
    for (const TestTensor* t : {&loss, &logits_max, &sum_exp_logits, &predicted_logits}) {
      const auto bits = t->all_bits();
      all.insert(all.end(), bits.begin(), bits.end());
    }
    all.push_back(std::bit_cast<uint64_t>(total));
    return all;
  }
};

// The gradient operator's case for the same step, from given statistics.
GradientCase gradient_case_of(const StepCase& c, const StepResult* statistics = nullptr) {
  GradientCase g;
  g.shape = c.shape;
  g.arithmetic = c.arithmetic;
  g.target_type = c.target_type;
  g.grad_input = c.grad_input;
  g.grad_weight = c.grad_weight;
  g.grad_input_layout = c.grad_input_layout;
  g.grad_weight_layout = c.grad_weight_layout;
  if (statistics == nullptr) return g;
  const int64_t BT = c.shape.BT, V = c.shape.V, H = c.shape.H;
  g.grad = TestTensor::vector(DType::f32, BT);
  g.logits_max = TestTensor::vector(DType::f32, BT);
  g.sum_exp_logits = TestTensor::vector(DType::f32, BT);
  g.masked_target = TestTensor::vector(c.target_type, BT);
  g.input = TestTensor::matrix(c.arithmetic.operand, BT, H);
  g.weight = TestTensor::matrix(c.arithmetic.operand, V, H);
  for (int64_t b = 0; b < BT; ++b) {
    g.grad.set(b, c.row_counts(b) ? c.token_weight(b) : 0.0);
    g.logits_max.set(b, statistics->logits_max.get(b));
    g.sum_exp_logits.set(b, statistics->sum_exp_logits.get(b));
    g.masked_target.set_index(b, c.target.get_index(b));
    for (int64_t h = 0; h < H; ++h) g.input.set(b, h, c.input.get(b, h));
  }
  for (int64_t v = 0; v < V; ++v) {
    for (int64_t h = 0; h < H; ++h) g.weight.set(v, h, c.weight.get(v, h));
  }
  return g;
}

StepResult run_step(const StepCase& c, const PlanOptions& options, Strategy strategy) {
  StepResult r;
  const int64_t BT = c.shape.BT, stride = c.vector_stride;
  r.loss = TestTensor::vector(DType::f32, BT, stride);
  r.logits_max = TestTensor::vector(DType::f32, BT, stride);
  r.sum_exp_logits = TestTensor::vector(DType::f32, BT, stride);
  r.predicted_logits = TestTensor::vector(DType::f32, BT, stride);
  r.gradients = make_gradient_outputs(gradient_case_of(c));
  const auto plan = plan_loss_and_gradient(c.shape, c.types(), options, strategy);
  if (!plan) {
    ADD_FAILURE() << "plan_loss_and_gradient: " << plan.error().message;
    return r;
  }
  EXPECT_EQ(plan->isa(), options.isa.value_or(plan->isa()));
  EXPECT_TRUE(strategy == Strategy::automatic || plan->strategy() == strategy);
  const GradientOutputs gradients = outputs_of(r.gradients);
  LossAndGradientOutputs outputs;
  outputs.loss = r.loss.vector_view();
  outputs.total = &r.total;
  outputs.logits_max = r.logits_max.vector_view();
  outputs.sum_exp_logits = r.sum_exp_logits.vector_view();
  outputs.predicted_logits = r.predicted_logits.vector_view();
  outputs.grad_input = gradients.grad_input;
  outputs.grad_weight = gradients.grad_weight;
  const auto ran = run(*plan, c.operands(), outputs, guarded_workspace(plan->workspace_bytes()));
  if (!ran) ADD_FAILURE() << "loss_and_gradient: " << ran.error().message;
  EXPECT_EQ(r.gradients.damage() + r.loss.damage() + r.logits_max.damage() +
                r.sum_exp_logits.damage() + r.predicted_logits.damage(),
            "");
  return r;
}

// Statistics and loss: the bits of the separate operators. Gradients: of the gradient operator
// where recomputed, within the allowed error (one more rounding of softmax) in one pass.
void expect_step(const StepCase& c, const StepResult& got, const PlanOptions& options,
                 Strategy strategy) {
  SCOPED_TRACE("BT " + std::to_string(c.shape.BT) + ", V " + std::to_string(c.shape.V) + ", H " +
               std::to_string(c.shape.H) + ", " + c.arithmetic.name +
               (strategy == Strategy::one_pass ? ", one pass" : ", recompute"));
  const int64_t BT = c.shape.BT;
  std::vector<float> max(static_cast<size_t>(BT)), sum(max), predicted(max), loss(max);
  std::vector<uint8_t> counts(static_cast<size_t>(BT));
  for (int64_t b = 0; b < BT; ++b) counts[static_cast<size_t>(b)] = c.row_counts(b) ? 1 : 0;
  const ForwardOperands forward{
      .input = c.input.matrix_view(),
      .weight = c.weight.matrix_view(),
      .target = c.target.vector_view(),
      .rows = {.ignore_index = c.ignore_index,
               .counts = vector_view<uint8_t>(std::span<const uint8_t>(counts))}};
  const auto forward_plan = plan_forward(
      c.shape,
      {.operand = c.arithmetic.operand, .multiply = c.arithmetic.multiply, .target = c.target_type},
      options);
  ASSERT_TRUE(forward_plan);
  ASSERT_TRUE(run(*forward_plan, forward,
                  {.logits_max = vector_view<float>(std::span<float>(max)),
                   .sum_exp_logits = vector_view<float>(std::span<float>(sum)),
                   .predicted_logits = vector_view<float>(std::span<float>(predicted))},
                  guarded_workspace(forward_plan->workspace_bytes())));
  LossOperands statistics{vector_view<float>(std::span<const float>(max)),
                          vector_view<float>(std::span<const float>(sum)),
                          vector_view<float>(std::span<const float>(predicted))};
  statistics.counts = vector_view<uint8_t>(std::span<const uint8_t>(counts));
  ASSERT_TRUE(run(*plan_loss(BT, 0, {}, options), statistics,
                  {.loss = vector_view<float>(std::span<float>(loss))}));
  double total = 0.0;
  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const auto same = [&](const TestTensor& t, float want) {
      return t.bits(b) == std::bit_cast<uint32_t>(want) ||
             (std::isnan(want) && std::isnan(t.get(b)));
    };
    EXPECT_TRUE(same(got.logits_max, max[i])) << b;
    EXPECT_TRUE(same(got.sum_exp_logits, sum[i])) << b;
    EXPECT_TRUE(same(got.predicted_logits, predicted[i])) << b;
    EXPECT_TRUE(same(got.loss, loss[i])) << b;
    if (counts[i]) total += c.token_weight(b) * static_cast<double>(loss[i]);
  }
  EXPECT_TRUE(got.total == total || (std::isnan(total) && std::isnan(got.total)))
      << got.total << " " << total;

  GradientCase gradient = gradient_case_of(c, &got);
  if (strategy == Strategy::recompute) {
    EXPECT_EQ(run_gradient(gradient, options).bits(), got.gradients.bits());
    return;
  }
  reference::GradientOptions how = gradient.reference_options();
  if (c.arithmetic.multiplied() == DType::bf16) how.held_softmax = DType::bf16;
  // Two more exps and products in float: from segment to row.
  if (c.arithmetic.multiplied() != DType::bf16) how.held_softmax = DType::f32;
  ReferenceGradient want;
  const auto operands = gradient.reference_operands();
  if (c.grad_input) want.input = reference::grad_input(operands, how);
  if (c.grad_weight) want.weight = reference::grad_weight(operands, how);
  expect_gradient(gradient, got.gradients, want);
}

TEST_P(LossAndGradient, EverySizeAroundEveryTile) {
  std::vector<Shape> shapes;
  for (const int64_t BT : {0, 1, 2, 7, 8, 9, 13, 14, 15, 28, 29, 57}) {
    shapes.push_back({.BT = BT, .V = 77, .H = 33});
  }
  for (const int64_t V : {0, 1, 2, 31, 32, 33, 127, 255, 256, 257, 449, 513, 700}) {
    shapes.push_back({.BT = 15, .V = V, .H = 32});
  }
  for (const int64_t H : {0, 1, 2, 3, 31, 33, 576}) shapes.push_back({.BT = 9, .V = 129, .H = H});
  int turn = 0;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape : shapes) {
      for (const Strategy strategy : kStrategies) {
        ++turn;
        StepCase c =
            make_step(shape, arithmetic, {.target_type = turn % 3 ? DType::i64 : DType::i32});
        c.grad_input = GradientOutput{.dtype = turn % 5 < 3 ? arithmetic.operand : DType::f32,
                                      .accumulate = turn % 7 < 2};
        c.grad_weight = GradientOutput{.dtype = turn % 4 < 2 ? arithmetic.operand : DType::f32,
                                       .accumulate = turn % 11 < 3};
        expect_step(c, run_step(c, options(), strategy), options(), strategy);
      }
    }
  }
}

TEST_P(LossAndGradient, EveryKindOfInput) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                            InputKind::offset, InputKind::negative}) {
      for (const Strategy strategy : kStrategies) {
        const StepCase c = make_step({.BT = 31, .V = 700, .H = 48}, arithmetic, {.kind = kind});
        expect_step(c, run_step(c, options(), strategy), options(), strategy);
      }
    }
  }
}

TEST_P(LossAndGradient, EveryLayout) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Layout& layout : all_layouts()) {
      for (const Strategy strategy : kStrategies) {
        StepCase c = make_step({.BT = 17, .V = 300, .H = 37}, arithmetic,
                               {.input = layout, .weight = layout, .target_stride = 2});
        c.vector_stride = 3;
        c.grad_input_layout = c.grad_weight_layout = layout;
        expect_step(c, run_step(c, options(), strategy), options(), strategy);
      }
    }
  }
}

TEST_P(LossAndGradient, EveryOptionalArgumentCounts) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : {all_arithmetics()[0], all_arithmetics()[1]}) {
      const Shape shape{.BT = 40, .V = 300, .H = 24};
      const auto step = [&](auto&& change) {
        StepCase c = make_step(shape, arithmetic);
        change(c);
        const StepResult r = run_step(c, options(), strategy);
        expect_step(c, r, options(), strategy);
        return r.bits();
      };
      const auto plain = step([](StepCase&) {});
      EXPECT_NE(step([](StepCase& c) { c.normalizer = 7.0; }), plain);
      EXPECT_NE(step([](StepCase& c) { c.ignore_index = c.target.get_index(5); }), plain);
      EXPECT_NE(step([](StepCase& c) {
                  c.counts = TestTensor::vector(DType::u8, 40, 2);
                  for (int64_t b = 0; b < 40; ++b) c.counts->set_index(b, b % 3);
                }),
                plain);
      const auto weigh = [](StepCase& c) {
        c.token_weights = TestTensor::vector(DType::f32, 40, 2);
        for (int64_t b = 0; b < 40; ++b)
          c.token_weights->set(b, 0.1 * static_cast<double>(b % 7) - 0.2);
      };
      const auto weighted = step(weigh);
      EXPECT_NE(weighted, plain);
      EXPECT_NE(step([&](StepCase& c) {
                  weigh(c);
                  c.normalizer = 3.0;
                }),
                weighted);
    }
  }
}

TEST_P(LossAndGradient, EitherGradientMayBeAbsent) {
  for (const Strategy strategy : kStrategies) {
    StepCase c = make_step({.BT = 40, .V = 300, .H = 24}, all_arithmetics()[1]);
    const StepResult both = run_step(c, options(), strategy);
    const auto weight = c.grad_weight;
    c.grad_weight.reset();
    const StepResult input = run_step(c, options(), strategy);
    EXPECT_EQ(input.gradients.grad_input->all_bits(), both.gradients.grad_input->all_bits());
    c.grad_weight = weight;
    c.grad_input.reset();
    const StepResult alone = run_step(c, options(), strategy);
    EXPECT_EQ(alone.gradients.grad_weight->all_bits(), both.gradients.grad_weight->all_bits());
    EXPECT_EQ(alone.loss.all_bits(), both.loss.all_bits());
  }
}

TEST_P(LossAndGradient, RowsThatDoNotCountMayHoldAnything) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 40, .V = 300, .H = 24}, arithmetic);
      c.ignore_index = -100;
      for (int64_t b = 0; b < 40; b += 3) {
        c.target.set_index(b, -100);
        for (int64_t h = 0; h < 24; ++h) c.input.set(b, h, h % 2 ? NAN : INFINITY);
      }
      const StepResult r = run_step(c, options(), strategy);
      expect_step(c, r, options(), strategy);
      for (const double value : r.gradients.grad_weight->values()) {
        ASSERT_TRUE(std::isfinite(value));
      }
      // No row counts: zeros everywhere.
      for (int64_t b = 0; b < 40; ++b) c.target.set_index(b, -100);
      const StepResult none = run_step(c, options(), strategy);
      EXPECT_EQ(none.total, 0.0);
      for (const double value : none.gradients.grad_weight->values()) EXPECT_EQ(value, 0.0);
      for (const double value : none.gradients.grad_input->values()) EXPECT_EQ(value, 0.0);
    }
  }
}

// A weight of exactly 0 is a grad of 0: the row contributes 0 to both gradients, whatever it holds.
TEST_P(LossAndGradient, TokensOfWeightZeroPoisonNoGradient) {
  for (const Strategy strategy : kStrategies) {
    StepCase c = make_step({.BT = 20, .V = 100, .H = 16}, all_arithmetics()[1]);
    c.token_weights = TestTensor::vector(DType::f32, 20);
    for (int64_t b = 0; b < 20; ++b) c.token_weights->set(b, b == 7 ? 0.0 : 0.5);
    for (int64_t h = 0; h < 16; ++h) c.input.set(7, h, NAN);
    const StepResult r = run_step(c, options(), strategy);
    for (const double value : r.gradients.grad_weight->values()) {
      ASSERT_TRUE(std::isfinite(value));
    }
    for (int64_t h = 0; h < 16; ++h) EXPECT_EQ(r.gradients.grad_input->get(7, h), 0.0);
  }
}

TEST_P(LossAndGradient, NaNStaysInItsRowOfLossAndGradInput) {
  for (const Strategy strategy : kStrategies) {
    StepCase c = make_step({.BT = 30, .V = 300, .H = 16}, all_arithmetics()[1]);
    const StepResult clean = run_step(c, options(), strategy);
    c.input.set(11, 3, NAN);
    const StepResult r = run_step(c, options(), strategy);
    for (int64_t b = 0; b < 30; ++b) {
      if (b == 11) {
        EXPECT_TRUE(std::isnan(r.loss.get(b)));
        EXPECT_TRUE(std::isnan(r.gradients.grad_input->get(b, 0)));
      } else {
        EXPECT_EQ(r.loss.bits(b), clean.loss.bits(b)) << b;
        EXPECT_EQ(r.gradients.grad_input->row_bits(b), clean.gradients.grad_input->row_bits(b));
      }
    }
  }
}

// A segment without a finite logit beside one with: its exponentials are 0, not NaN.
TEST_P(LossAndGradient, SegmentsOfMinusInfinity) {
  for (const Strategy strategy : kStrategies) {
    StepCase c = make_step({.BT = 5, .V = 600, .H = 8}, all_arithmetics()[2]);
    c.grad_weight->dtype = DType::f32;
    for (int64_t b = 0; b < 5; ++b) {
      c.input.set(b, 0, 1e30);
      c.target.set_index(b, 300 + b);
    }
    // Overflow to -inf by finite weights in the first and the last segment.
    for (int64_t v = 0; v < 600; ++v) c.weight.set(v, 0, v < 256 || v >= 512 ? -1e30 : 0.0);
    const StepResult r = run_step(c, options(), strategy);
    for (const double value : r.loss.values()) EXPECT_TRUE(std::isfinite(value));
    for (const double value : r.gradients.grad_input->values()) EXPECT_TRUE(std::isfinite(value));
    for (int64_t v = 0; v < 256; ++v) EXPECT_EQ(r.gradients.grad_weight->get(v, 1), 0.0);
  }
}

TEST_P(LossAndGradient, BitsDependOnNeitherThreadsNorLimits) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 120, .V = 900, .H = 40}, arithmetic);
      const auto want = run_step(c, options(1), strategy).bits();
      const int64_t full =
          plan_loss_and_gradient(c.shape, c.types(), options(), strategy)->workspace_bytes();
      for (const int threads : {1, 2, 3, 5}) {
        for (const double part : {0.0, 0.05, 0.2, 0.5}) {
          if (part > 0 && threads > 2) continue;
          PlanOptions o = options(threads);
          o.workspace_limit_bytes = static_cast<int64_t>(part * static_cast<double>(full));
          while (!plan_loss_and_gradient(c.shape, c.types(), o, strategy)) {
            o.workspace_limit_bytes += o.workspace_limit_bytes / 8 + 64;
          }
          ASSERT_EQ(run_step(c, o, strategy).bits(), want)
              << arithmetic.name << " " << threads << " threads, part " << part;
        }
      }
    }
  }
}

TEST_P(LossAndGradient, TheDefaultChoosesByTheLimitAndSaysSo) {
  const Shape shape{.BT = 300, .V = 5000, .H = 64};
  const auto wide = plan_loss_and_gradient(shape, {}, options());
  ASSERT_TRUE(wide);
  EXPECT_EQ(wide->strategy(), Strategy::one_pass);
  EXPECT_NE(wide->describe().find("one pass"), std::string::npos) << wide->describe();
  PlanOptions small = options();
  const auto least =
      plan_loss_and_gradient(shape, {}, {.threads = 2, .isa = isa(), .workspace_limit_bytes = 1});
  ASSERT_FALSE(least);
  EXPECT_EQ(least.error().kind, ErrorKind::limit_too_small);
  const auto at = least.error().message.find("least");
  small.workspace_limit_bytes = std::stoll(
      least.error().message.substr(least.error().message.find_first_of("0123456789", at)));
  const auto tight = plan_loss_and_gradient(shape, {}, small);
  ASSERT_TRUE(tight) << tight.error().message;
  EXPECT_LE(tight->workspace_bytes(), small.workspace_limit_bytes);
  // The default limit at a real size: the larger of 256 MiB and 1.25 x operands and gradients.
  const Shape real{.BT = 4096, .V = 49152, .H = 576};
  const int64_t tensors = 2 * 2 * (real.BT + real.V) * real.H;
  const auto plan = plan_loss_and_gradient(real, {}, options());
  ASSERT_TRUE(plan);
  EXPECT_LE(plan->workspace_bytes(), std::max<int64_t>(int64_t{256} << 20, tensors * 5 / 4));
}

TEST_P(LossAndGradient, BrokenArgumentsAreNamedAndNothingIsWritten) {
  for (const Strategy strategy : kStrategies) {
    const auto expect = [&](auto&& breakage, ErrorKind kind, const std::string& part) {
      StepCase c = make_step({.BT = 10, .V = 20, .H = 8}, all_arithmetics()[1]);
      StepResult r;
      r.loss = TestTensor::vector(DType::f32, 10);
      r.gradients = make_gradient_outputs(gradient_case_of(c));
      const auto plan = plan_loss_and_gradient(c.shape, c.types(), options(), strategy);
      ASSERT_TRUE(plan);
      LossAndGradientOperands in = c.operands();
      const GradientOutputs gradients = outputs_of(r.gradients);
      LossAndGradientOutputs out;
      out.loss = r.loss.vector_view();
      out.grad_input = gradients.grad_input;
      out.grad_weight = gradients.grad_weight;
      auto workspace = guarded_workspace(plan->workspace_bytes());
      breakage(c, in, out, workspace);
      const auto ran = run(*plan, in, out, workspace);
      ASSERT_FALSE(ran) << part;
      EXPECT_EQ(ran.error().kind, kind) << ran.error().message;
      EXPECT_NE(ran.error().message.find(part), std::string::npos) << ran.error().message;
      EXPECT_TRUE(r.loss.untouched()) << part;
      EXPECT_TRUE(r.gradients.grad_input->untouched()) << part;
      EXPECT_TRUE(r.gradients.grad_weight->untouched()) << part;
    };
    const ErrorKind invalid = ErrorKind::invalid_argument;
    expect([](auto&, auto& in, auto&, auto&) { in.input.rows = 9; }, invalid, "input");
    expect([](auto&, auto& in, auto&, auto&) { in.weight.dtype = DType::f32; }, invalid, "weight");
    expect([](auto&, auto& in, auto&, auto&) { in.target.size = 9; }, invalid, "target");
    expect([](auto&, auto& in, auto&, auto&) { in.token_weights = in.target; }, invalid,
           "token_weights");
    expect([](auto&, auto& in, auto&, auto&) { in.rows.counts = in.target; }, invalid, "counts");
    expect([](auto&, auto& in, auto&, auto&) { in.normalizer = 0.0; }, invalid, "normalizer");
    expect([](auto&, auto& in, auto&, auto&) { in.normalizer = NAN; }, invalid, "normalizer");
    expect([](auto&, auto&, auto& out, auto&) { out.loss.size = 3; }, invalid, "loss");
    expect([](auto&, auto&, auto& out, auto&) { out.grad_input.reset(); }, invalid, "grad_input");
    expect([](auto&, auto&, auto& out, auto&) { out.grad_weight->rows = 3; }, invalid,
           "grad_weight");
    expect([](auto&, auto&, auto& out, auto&) { out.logits_max = VectorView{}; }, invalid,
           "logits_max");
    expect([](auto&, auto&, auto&, auto& w) { w = w.first(w.size() - 1); },
           ErrorKind::workspace_too_small, "workspace");
    for (const int64_t bad : {int64_t{-1}, int64_t{20}, int64_t{1} << 40}) {
      expect([&](auto& c, auto&, auto&, auto&) { c.target.set_index(6, bad); },
             ErrorKind::invalid_data, "target[6] is " + std::to_string(bad));
    }
    EXPECT_FALSE(plan_loss_and_gradient({.BT = -1, .V = 2, .H = 3}, {}, options(), strategy));
    EXPECT_FALSE(plan_loss_and_gradient({.BT = 1, .V = 2, .H = 3}, {.operand = DType::i32},
                                        options(), strategy));
  }
}

TEST_P(LossAndGradient, ACancelledStepSaysSo) {
  CancelToken token;
  token.cancel();
  for (const Strategy strategy : kStrategies) {
    const StepCase c = make_step({.BT = 40, .V = 300, .H = 24}, all_arithmetics()[1]);
    GradientResult gradients = make_gradient_outputs(gradient_case_of(c));
    TestTensor loss = TestTensor::vector(DType::f32, 40);
    const auto plan = plan_loss_and_gradient(c.shape, c.types(), options(), strategy);
    const GradientOutputs views = outputs_of(gradients);
    LossAndGradientOutputs out;
    out.loss = loss.vector_view();
    out.grad_input = views.grad_input;
    out.grad_weight = views.grad_weight;
    const auto ran =
        run(*plan, c.operands(), out, guarded_workspace(plan->workspace_bytes()), &token);
    ASSERT_FALSE(ran);
    EXPECT_EQ(ran.error().kind, ErrorKind::cancelled);
  }
}

}  // namespace
}  // namespace logitless::test
