// SPDX-License-Identifier: Apache-2.0
#include "logitless/loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference/tolerance.h"
#include "tests/support/cases.h"
#include "tests/support/emulation.h"
#include "tests/support/isa_test.h"
#include "tests/support/judge.h"

namespace logitless::test {
namespace {

class LossOperator : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(LossOperator);

struct LossResult {
  TestTensor loss;
  std::optional<TestTensor> logsumexp, softmax;
};

struct LossCase {
  int64_t BT = 0, V = 0;
  TestTensor logits_max, sum_exp_logits, predicted_logits;
  std::optional<TestTensor> logits = {}, counts = {};
  bool with_logsumexp = true;
  int64_t stride = 1;
  Layout softmax_layout = {};
};

LossResult run_loss(const LossCase& c, const PlanOptions& options, bool in_place = false) {
  LossTypes types;
  if (c.logits) types.softmax_logits = c.logits->dtype();
  LossResult r;
  r.loss = TestTensor::vector(DType::f32, c.BT, c.stride);
  LossOperands in{.logits_max = c.logits_max.vector_view(),
                  .sum_exp_logits = c.sum_exp_logits.vector_view(),
                  .predicted_logits = c.predicted_logits.vector_view()};
  LossOutputs out{.loss = r.loss.vector_view()};
  if (c.with_logsumexp) {
    r.logsumexp = TestTensor::vector(DType::f32, c.BT, c.stride);
    out.logsumexp = r.logsumexp->vector_view();
  }
  if (c.logits) {
    in.logits = c.logits->matrix_view();
    r.softmax = TestTensor::matrix(DType::f32, c.BT, c.V, c.softmax_layout);
    out.softmax = r.softmax->matrix_view();
    if (in_place) {
      for (int64_t b = 0; b < c.BT; ++b) {
        for (int64_t v = 0; v < c.V; ++v) r.softmax->set(b, v, c.logits->get(b, v));
      }
      in.logits = r.softmax->matrix_view();
    }
  }
  if (c.counts) in.counts = c.counts->vector_view();
  const auto plan = plan_loss(c.BT, c.V, types, options);
  if (!plan) {
    ADD_FAILURE() << plan.error().message;
    return r;
  }
  EXPECT_EQ(plan->isa(), options.isa.value_or(plan->isa()));
  EXPECT_EQ(plan->workspace_bytes(), 0);
  const auto ran = run(*plan, in, out);
  EXPECT_TRUE(ran) << (ran ? "" : ran.error().message);
  EXPECT_EQ(r.loss.damage(), "");
  EXPECT_EQ(r.logsumexp ? r.logsumexp->damage() : "", "");
  EXPECT_EQ(r.softmax ? r.softmax->damage() : "", "");
  return r;
}

// Statistics of some logits, as floats.
LossCase make_loss_case(int64_t BT, int64_t V, std::optional<DType> logits_type, uint64_t seed = 3,
                        int64_t stride = 1, const Layout& layout = {}) {
  LossCase c;
  c.BT = BT;
  c.V = V;
  c.stride = stride;
  c.logits_max = TestTensor::vector(DType::f32, BT, stride);
  c.sum_exp_logits = TestTensor::vector(DType::f32, BT, stride);
  c.predicted_logits = TestTensor::vector(DType::f32, BT, stride);
  const DType type = logits_type.value_or(DType::f32);
  TestTensor logits = TestTensor::matrix(type, BT, V, layout);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (int64_t b = 0; b < BT; ++b) {
    double max = -INFINITY;
    for (int64_t v = 0; v < V; ++v) {
      logits.set(b, v, 4.0 * normal(random) + (v == b % V && b % 2 == 0 ? 15.0 : 0.0));
      max = std::max(max, logits.get(b, v));
    }
    double sum = 0.0;
    for (int64_t v = 0; v < V; ++v) sum += std::exp(logits.get(b, v) - max);
    c.logits_max.set(b, max);
    c.sum_exp_logits.set(b, sum);
    c.predicted_logits.set(b, V > 0 ? logits.get(b, b % V) - max : 0.0);
  }
  if (logits_type) c.logits = std::move(logits);
  return c;
}

void expect_loss(const LossCase& c, const LossResult& r) {
  Judge loss("loss of given statistics"), logsumexp("logsumexp of given statistics");
  Judge softmax("softmax of given statistics");
  const auto rows = static_cast<double>(std::max<int64_t>(c.BT, 1));
  for (int64_t b = 0; b < c.BT; ++b) {
    const bool counts = !c.counts || c.counts->get_index(b) != 0;
    const double max = c.logits_max.get(b), sum = c.sum_exp_logits.get(b);
    const double predicted = c.predicted_logits.get(b);
    const double want = counts ? reference::loss(max, sum, predicted) : 0.0;
    loss.check(r.loss.get(b), want,
               reference::allowed_loss(want, std::log(sum), predicted, 0, 0, rows), b);
    if (r.logsumexp) {
      const double lse = counts ? std::log(sum) + max : 0.0;
      logsumexp.check(r.logsumexp->get(b), lse,
                      reference::allowed_logsumexp(lse, std::log(sum), 0, 0, rows), b);
    }
    if (!r.softmax) continue;
    for (int64_t v = 0; v < c.V; ++v) {
      const double logit = c.logits->get(b, v);
      const double p = counts ? reference::softmax(logit, max, sum) : 0.0;
      softmax.check(
          r.softmax->get(b, v), p,
          reference::allowed_softmax(p, logit - max, 0, 0, rows * static_cast<double>(c.V)), b, v);
    }
  }
}

TEST_P(LossOperator, LossAndLogsumexpOfAnySize) {
  for (const int64_t BT : {0, 1, 2, 7, 8, 9, 100, 5000}) {
    const LossCase c = make_loss_case(BT, 11, {});
    for (const int threads : {1, 2, 3}) expect_loss(c, run_loss(c, options(threads)));
  }
}

TEST_P(LossOperator, SoftmaxOfEveryTypeSizeAndLayout) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int64_t V : {1, 2, 15, 16, 17, 31, 33, 128, 511, 512, 513, 1100}) {
      const LossCase c = make_loss_case(9, V, type);
      expect_loss(c, run_loss(c, options()));
    }
    for (const Layout& layout : all_layouts()) {
      LossCase c = make_loss_case(21, 67, type, 5, 3, layout);
      for (const Layout& out : all_layouts()) {
        c.softmax_layout = out;
        expect_loss(c, run_loss(c, options()));
      }
    }
  }
}

TEST_P(LossOperator, LogsumexpMayBeAbsent) {
  LossCase c = make_loss_case(9, 20, DType::f32);
  c.with_logsumexp = false;
  expect_loss(c, run_loss(c, options()));
}

TEST_P(LossOperator, EmptyVocabularyStillGivesTheLoss) {
  LossCase c = make_loss_case(5, 0, DType::bf16);
  for (int64_t b = 0; b < 5; ++b) {
    c.logits_max.set(b, 1.0);
    c.sum_exp_logits.set(b, 2.0);
    c.predicted_logits.set(b, -0.5);
  }
  const LossResult r = run_loss(c, options());
  for (int64_t b = 0; b < 5; ++b) EXPECT_NEAR(r.loss.get(b), std::log(2.0) + 0.5, 1e-6);
}

TEST_P(LossOperator, InfinitiesAreDefined) {
  LossCase c = make_loss_case(4, 3, DType::f32);
  // All logits -inf: undefined. Only the target's: infinite. A NaN stays NaN.
  c.logits_max.set(0, -INFINITY);
  c.sum_exp_logits.set(0, 0.0);
  c.predicted_logits.set(0, 0.0);
  c.predicted_logits.set(1, -INFINITY);
  c.logits_max.set(2, NAN);
  c.sum_exp_logits.set(2, NAN);
  c.predicted_logits.set(2, NAN);
  const LossResult r = run_loss(c, options());
  EXPECT_TRUE(std::isnan(r.loss.get(0)));
  EXPECT_EQ(r.logsumexp->get(0), -INFINITY);
  EXPECT_EQ(r.loss.get(1), INFINITY);
  EXPECT_TRUE(std::isnan(r.loss.get(2)));
  EXPECT_TRUE(std::isfinite(r.loss.get(3)));
  for (int64_t v = 0; v < 3; ++v) {
    EXPECT_TRUE(std::isnan(r.softmax->get(2, v)));
    EXPECT_TRUE(std::isfinite(r.softmax->get(3, v)));
  }
}

TEST_P(LossOperator, RowsThatDoNotCountAreZeroWhateverTheyHold) {
  LossCase c = make_loss_case(20, 40, DType::f16);
  c.counts = TestTensor::vector(DType::u8, 20, 2);
  for (int64_t b = 0; b < 20; ++b) {
    const bool dropped = b % 3 == 0;
    c.counts->set_index(b, dropped ? 0 : 200);
    if (!dropped) continue;
    c.logits_max.set(b, NAN);
    c.sum_exp_logits.set(b, INFINITY);
    for (int64_t v = 0; v < 40; ++v) c.logits->set(b, v, NAN);
  }
  const LossResult r = run_loss(c, options());
  expect_loss(c, r);
}

// Loss end to end, against the definition on the operands: the error of the statistics included.
TEST_P(LossOperator, EndToEnd) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                            InputKind::offset, InputKind::negative}) {
      for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
        ForwardCase forward = make_forward_case({.BT = 50, .V = 700, .H = 64}, arithmetic,
                                                {.kind = kind, .outside = 0});
        forward.rounding = rounding;
        ForwardResult statistics = run_forward(forward, options());
        LossCase c;
        c.BT = 50;
        c.logits_max = std::move(statistics.logits_max);
        c.sum_exp_logits = std::move(statistics.sum_exp_logits);
        c.predicted_logits = std::move(statistics.predicted_logits);
        const LossResult got = run_loss(c, options());
        const reference::Statistics s = reference_forward(forward);
        const reference::Loss want = reference::loss(s);
        SCOPED_TRACE(forward.describe());
        Judge loss(std::string("loss, end to end ") + arithmetic.name);
        Judge logsumexp(std::string("logsumexp, end to end ") + arithmetic.name);
        for (int64_t b = 0; b < 50; ++b) {
          const auto i = static_cast<size_t>(b);
          const double log_sum = std::log(s.sum_exp_logits.value[i]);
          loss.check(
              got.loss.get(b), want.loss.value[i],
              reference::allowed_loss(want.loss.value[i], log_sum, s.predicted_logits.value[i],
                                      want.loss.deviation[i], want.loss.flip[i], 50),
              b);
          logsumexp.check(
              got.logsumexp->get(b), want.logsumexp.value[i],
              reference::allowed_logsumexp(want.logsumexp.value[i], log_sum,
                                           want.logsumexp.deviation[i], want.logsumexp.flip[i], 50),
              b);
        }
      }
    }
  }
}

// At most twice the error of a framework that holds logits of the operand type.
TEST_P(LossOperator, ErrorIsAtMostTwiceAFrameworks) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat}) {
      const Shape shape{.BT = 100, .V = 700, .H = 96};
      const CaseOptions how{.kind = kind, .outside = 0};
      const ForwardCase forward = make_forward_case(shape, arithmetic, how);
      ForwardResult statistics = run_forward(forward, options());
      LossCase c;
      c.BT = shape.BT;
      c.logits_max = std::move(statistics.logits_max);
      c.sum_exp_logits = std::move(statistics.sum_exp_logits);
      c.predicted_logits = std::move(statistics.predicted_logits);
      const LossResult ours = run_loss(c, options());
      const reference::Loss want = reference::loss(reference_forward(forward));
      const EagerResult theirs =
          eager(make_gradient_case(make_forward_case(shape, arithmetic, how)));
      double our_worst = 0, their_worst = 0, largest = 0;
      for (int64_t b = 0; b < shape.BT; ++b) {
        const double exact = want.loss.value[static_cast<size_t>(b)];
        our_worst = std::max(our_worst, std::abs(ours.loss.get(b) - exact));
        their_worst = std::max(their_worst, std::abs(theirs.loss[static_cast<size_t>(b)] - exact));
        largest = std::max(largest, std::abs(exact));
      }
      // The floor: two roundings of float of the largest loss.
      EXPECT_LE(our_worst, 2 * their_worst + 0x1p-23 * largest) << arithmetic.name;
    }
  }
}

TEST_P(LossOperator, AnyNumberOfThreadsGivesTheSameBits) {
  const LossCase c = make_loss_case(300, 2000, DType::bf16);
  const LossResult want = run_loss(c, options(1));
  for (const int threads : {2, 3, 5}) {
    const LossResult r = run_loss(c, options(threads));
    EXPECT_EQ(r.loss.all_bits(), want.loss.all_bits());
    EXPECT_EQ(r.softmax->all_bits(), want.softmax->all_bits());
  }
}

TEST_P(LossOperator, SoftmaxMayTakeThePlaceOfFp32Logits) {
  const LossCase c = make_loss_case(33, 1300, DType::f32);
  const LossResult want = run_loss(c, options(2));
  for (const int threads : {1, 3}) {
    const LossResult r = run_loss(c, options(threads), true);
    EXPECT_EQ(r.softmax->all_bits(), want.softmax->all_bits());
  }
}

}  // namespace
}  // namespace logitless::test
