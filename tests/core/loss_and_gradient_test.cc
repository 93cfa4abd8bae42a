// SPDX-License-Identifier: Apache-2.0
#include "logitless/loss_and_gradient.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "logitless/loss.h"
#include "tests/support/cases.h"
#include "tests/support/emulation.h"
#include "tests/support/isa_test.h"
#include "tests/support/steps.h"

namespace logitless::test {
namespace {

class LossAndGradient : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(LossAndGradient);

const std::vector<Strategy> kStrategies = {Strategy::one_pass, Strategy::recompute};

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

// At most twice the error of a framework that holds logits and grad_logits of the operand type: the
// exponentials that one pass keeps in bf16 included.
TEST_P(LossAndGradient, ErrorIsAtMostTwiceAFrameworks) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain}) {
        StepCase c = make_step({.BT = 64, .V = 500, .H = 96}, arithmetic, {.kind = kind});
        c.normalizer = 1.0;
        const StepResult ours = run_step(c, options(), strategy);
        const GradientCase g = gradient_case_of(c, &ours);
        const EagerResult theirs = eager(g);
        // Against what the operands make, statistics and all.
        ForwardCase forward = make_forward_case(c.shape, arithmetic, {.kind = kind, .outside = 0});
        const reference::Statistics statistics = reference_forward(forward);
        reference::GradientOperands operands = g.reference_operands();
        operands.logits_max = statistics.logits_max.value;
        operands.sum_exp_logits = statistics.sum_exp_logits.value;
        const auto compare = [&](const TestTensor& got, const reference::Matrix& eager_value,
                                 const reference::Gradient& exact, const char* name) {
          double our_squares = 0, their_squares = 0, our_worst = 0, their_worst = 0, largest = 0;
          for (int64_t r = 0; r < got.rows(); ++r) {
            for (int64_t h = 0; h < got.cols(); ++h) {
              const double our_error = got.get(r, h) - exact.value(r, h);
              const double their_error = eager_value(r, h) - exact.value(r, h);
              our_worst = std::max(our_worst, std::abs(our_error));
              their_worst = std::max(their_worst, std::abs(their_error));
              our_squares += our_error * our_error;
              their_squares += their_error * their_error;
              largest = std::max(largest, std::abs(exact.value(r, h)));
            }
          }
          // The floor: two roundings of float of the largest element.
          const double floor = 0x1p-23 * largest;
          EXPECT_LE(our_worst, 2 * their_worst + floor) << name << " " << arithmetic.name;
          EXPECT_LE(std::sqrt(our_squares), 2 * std::sqrt(their_squares) + floor)
              << name << " " << arithmetic.name;
        };
        compare(*ours.gradients.grad_input, theirs.grad_input,
                reference::grad_input(operands, g.reference_options()), "grad_input");
        compare(*ours.gradients.grad_weight, theirs.grad_weight,
                reference::grad_weight(operands, g.reference_options()), "grad_weight");
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
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 40, .V = 300, .H = 24}, arithmetic);
      const StepResult both = run_step(c, options(), strategy);
      const auto weight = c.grad_weight;
      c.grad_weight.reset();
      const StepResult input = run_step(c, options(), strategy);
      EXPECT_EQ(input.gradients.grad_input->all_bits(), both.gradients.grad_input->all_bits());
      EXPECT_EQ(input.loss.all_bits(), both.loss.all_bits());
      c.grad_weight = weight;
      c.grad_input.reset();
      const StepResult alone = run_step(c, options(), strategy);
      EXPECT_EQ(alone.gradients.grad_weight->all_bits(), both.gradients.grad_weight->all_bits());
      EXPECT_EQ(alone.loss.all_bits(), both.loss.all_bits());
    }
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

// Tokens [first, first + n) of a step as a step of their own.
StepCase some_tokens(const StepCase& c, int64_t first, int64_t n) {
  StepCase part;
  part.shape = {.BT = n, .V = c.shape.V, .H = c.shape.H};
  part.arithmetic = c.arithmetic;
  part.grad_input = c.grad_input;
  part.grad_weight = c.grad_weight;
  part.normalizer = c.normalizer;
  part.input = TestTensor::matrix(c.arithmetic.operand, n, c.shape.H);
  part.weight = c.weight.contiguous_copy();
  part.target = TestTensor::vector(DType::i64, n);
  for (int64_t b = 0; b < n; ++b) {
    part.target.set_index(b, c.target.get_index(first + b));
    for (int64_t h = 0; h < c.shape.H; ++h) part.input.set(b, h, c.input.get(first + b, h));
  }
  return part;
}

TEST_P(LossAndGradient, ATokenHasTheSameBitsInAnyBatch) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 61, .V = 300, .H = 33}, arithmetic);
      c.normalizer = 61.0;
      const StepResult want = run_step(c, options(), strategy);
      for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 27, 28, 29}) {
        for (const int64_t first : {int64_t{0}, 61 - n}) {
          const StepResult got = run_step(some_tokens(c, first, n), options(), strategy);
          for (int64_t b = 0; b < n; ++b) {
            ASSERT_EQ(got.token_bits(b), want.token_bits(first + b))
                << arithmetic.name << ", token " << first + b << " in " << n;
          }
        }
      }
    }
  }
}

TEST_P(LossAndGradient, TokensThatDoNotCountLeaveNoTrace) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 31, .V = 300, .H = 33}, arithmetic);
      const StepResult want = run_step(c, options(), strategy);
      // The same tokens with others between them, an odd number each time.
      StepCase wide = make_step({.BT = 124, .V = 300, .H = 33}, arithmetic);
      wide.weight = c.weight.contiguous_copy();
      wide.ignore_index = -1;
      for (int64_t b = 0; b < 124; ++b) {
        const bool here = b % 4 == 2;
        wide.target.set_index(b, here ? c.target.get_index(b / 4) : -1);
        for (int64_t h = 0; h < 33; ++h) {
          wide.input.set(b, h, here ? c.input.get(b / 4, h) : double{NAN});
        }
      }
      const StepResult got = run_step(wide, options(), strategy);
      EXPECT_EQ(got.gradients.grad_weight->all_bits(), want.gradients.grad_weight->all_bits())
          << arithmetic.name;
      for (int64_t b = 0; b < 31; ++b) {
        EXPECT_EQ(got.token_bits(4 * b + 2), want.token_bits(b)) << arithmetic.name;
      }
      EXPECT_EQ(got.total, want.total);
    }
  }
}

TEST_P(LossAndGradient, TokensOfWeightZeroLeaveNoTraceInGradientsAndHaveALoss) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 90, .V = 300, .H = 33}, arithmetic);
      c.normalizer = 7.0;
      const StepResult plain = run_step(c, options(), strategy);
      c.token_weights = TestTensor::vector(DType::f32, 90);
      const auto weightless = [](int64_t b) { return b % 3 == 1 || b == 44; };
      for (int64_t b = 0; b < 90; ++b) c.token_weights->set(b, weightless(b) ? 0.0 : 1.0);
      StepCase without = make_step({.BT = 90, .V = 300, .H = 33}, arithmetic);
      without.normalizer = 7.0;
      without.ignore_index = -1;
      for (int64_t b = 0; b < 90; ++b) {
        if (weightless(b)) without.target.set_index(b, -1);
      }
      const StepResult want = run_step(without, options(), strategy);
      for (const bool least : {false, true}) {  // one block, and many
        PlanOptions o = options();
        if (least) o.workspace_limit_bytes = 1024;
        while (!plan_loss_and_gradient(c.shape, c.types(), o, strategy)) {
          o.workspace_limit_bytes += o.workspace_limit_bytes / 8 + 64;
        }
        const StepResult got = run_step(c, o, strategy);
        EXPECT_EQ(got.gradients.grad_weight->all_bits(), want.gradients.grad_weight->all_bits())
            << arithmetic.name;
        EXPECT_EQ(got.gradients.grad_input->all_bits(), want.gradients.grad_input->all_bits())
            << arithmetic.name;
        EXPECT_EQ(got.loss.all_bits(), plain.loss.all_bits()) << arithmetic.name;
        EXPECT_EQ(got.total, want.total) << arithmetic.name;
      }
    }
  }
}

TEST_P(LossAndGradient, MicroBatchesMakeTheBitsOfTheWhole) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 41, .V = 300, .H = 33}, arithmetic);
      c.normalizer = 41.0;
      c.grad_weight->dtype = DType::f32;
      const auto want = run_step(c, options(), strategy).gradients.grad_weight->all_bits();
      TestTensor sum = TestTensor::matrix(DType::f32, 300, 33);
      for (int64_t first = 0; first < 41; first += 14) {
        StepCase part = some_tokens(c, first, std::min<int64_t>(14, 41 - first));
        part.grad_weight->accumulate = first > 0;
        const auto plan = plan_loss_and_gradient(part.shape, part.types(), options(), strategy);
        ASSERT_TRUE(plan);
        TestTensor loss = TestTensor::vector(DType::f32, part.shape.BT);
        TestTensor grad_input = TestTensor::matrix(arithmetic.operand, part.shape.BT, 33);
        LossAndGradientOutputs out;
        out.loss = loss.vector_view();
        out.grad_input = grad_input.matrix_view();
        out.grad_weight = sum.matrix_view();
        ASSERT_TRUE(run(*plan, part.operands(), out, guarded_workspace(plan->workspace_bytes())));
      }
      EXPECT_EQ(sum.all_bits(), want) << arithmetic.name;
    }
  }
}

// A weight that is no number stays in its row of grad_input; losses do not know of it.
TEST_P(LossAndGradient, WeightsThatAreNoNumbersStayInTheirRow) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      for (const double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
        StepCase c = make_step({.BT = 30, .V = 100, .H = 16}, arithmetic);
        c.token_weights = TestTensor::vector(DType::f32, 30);
        for (int64_t b = 0; b < 30; ++b) c.token_weights->set(b, 0.25);
        const StepResult clean = run_step(c, options(), strategy);
        c.token_weights->set(17, bad);
        const StepResult r = run_step(c, options(), strategy);
        EXPECT_EQ(r.loss.all_bits(), clean.loss.all_bits());
        for (int64_t b = 0; b < 30; ++b) {
          if (b == 17) {
            EXPECT_FALSE(std::isfinite(r.gradients.grad_input->get(b, 0))) << arithmetic.name;
          } else {
            EXPECT_EQ(r.token_bits(b), clean.token_bits(b)) << arithmetic.name << " " << b;
          }
        }
      }
    }
  }
}

// total / infinity: losses as ever, gradients exactly 0, whatever the buffers held.
TEST_P(LossAndGradient, AnInfiniteNormalizerMakesGradientsZero) {
  for (const Strategy strategy : kStrategies) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      StepCase c = make_step({.BT = 30, .V = 100, .H = 16}, arithmetic);
      const StepResult plain = run_step(c, options(), strategy);
      c.normalizer = INFINITY;
      const StepResult r = run_step(c, options(), strategy);
      EXPECT_EQ(r.loss.all_bits(), plain.loss.all_bits());
      EXPECT_EQ(r.total, 0.0);
      for (const double value : r.gradients.grad_weight->values()) ASSERT_EQ(value, 0.0);
      for (const double value : r.gradients.grad_input->values()) ASSERT_EQ(value, 0.0);
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
    const ErrorKind invalid = ErrorKind::invalid_argument, wrong = ErrorKind::wrong_type;
    expect([](auto&, auto& in, auto&, auto&) { in.input.rows = 9; }, invalid, "input");
    expect([](auto&, auto& in, auto&, auto&) { in.weight.dtype = DType::f32; }, wrong, "weight");
    expect([](auto&, auto& in, auto&, auto&) { in.target.size = 9; }, invalid, "target");
    expect([](auto&, auto& in, auto&, auto&) { in.token_weights = in.target; }, wrong,
           "token_weights");
    expect([](auto&, auto& in, auto&, auto&) { in.rows.counts = in.target; }, wrong, "counts");
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
