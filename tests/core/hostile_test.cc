// SPDX-License-Identifier: Apache-2.0
// Random problems of awkward sizes, layouts and values against exact laws: a token's results do not
// depend on the tokens beside it, on the threads, the workspace or the strides; a step in one call
// is what its parts are.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/support/cases.h"
#include "tests/support/steps.h"

namespace logitless::test {
namespace {

int64_t in(int64_t low, int64_t high) {  // both included
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(low, high + 1));
}
bool coin() { return in(0, 1) == 1; }

// Around the tiles of every level, segments and chunks; or anything.
int64_t any_tokens() {
  return *rc::gen::weightedOneOf<int64_t>(
      {{3, rc::gen::element<int64_t>(1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 27, 28, 29, 43)},
       {1, rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(1, 150))}});
}
int64_t any_vocabulary() {
  return *rc::gen::weightedOneOf<int64_t>(
      {{3, rc::gen::element<int64_t>(1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 224, 255,
                                     256, 257, 448, 511, 512, 513, 769)},
       {1, rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(1, 900))}});
}
int64_t any_hidden() {
  return *rc::gen::weightedOneOf<int64_t>(
      {{3, rc::gen::element<int64_t>(0, 1, 2, 3, 6, 7, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65)},
       {1, rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(0, 130))}});
}

Arithmetic any_arithmetic() {
  const auto all = all_arithmetics();
  return all[static_cast<size_t>(in(0, static_cast<int64_t>(all.size()) - 1))];
}
PlanOptions any_options() {
  const auto isas = usable_isas();
  return {.threads = static_cast<int>(in(1, 3)),
          .isa = isas[static_cast<size_t>(in(0, static_cast<int64_t>(isas.size()) - 1))]};
}
Strategy any_strategy() { return coin() ? Strategy::one_pass : Strategy::recompute; }
InputKind any_kind() {
  return *rc::gen::element(InputKind::peaked, InputKind::flat, InputKind::certain,
                           InputKind::offset, InputKind::negative);
}
Layout any_layout() {
  const auto all = all_layouts();
  return all[static_cast<size_t>(in(0, static_cast<int64_t>(all.size()) - 1))];
}
GradientOutput any_output(const Arithmetic& arithmetic) {
  return {.dtype = coin() ? arithmetic.operand : DType::f32, .accumulate = coin()};
}

// A limit that the plan accepts, from the least to all it wants; 0 for none.
template <class Plan>
int64_t any_limit(const Plan& plan, PlanOptions options) {
  if (coin()) return 0;
  const auto wanted = plan(options);
  RC_ASSERT(static_cast<bool>(wanted));
  options.workspace_limit_bytes =
      std::max<int64_t>(1, wanted->workspace_bytes() * in(0, 100) / 100);
  while (!plan(options)) options.workspace_limit_bytes += options.workspace_limit_bytes / 8 + 64;
  return options.workspace_limit_bytes;
}

void copy_row(const TestTensor& from, int64_t row, TestTensor& to, int64_t to_row) {
  for (int64_t c = 0; c < from.cols(); ++c) to.set(to_row, c, from.get(row, c));
}

// Fails the trial, not yet the test, with what a helper's expectations say: RapidCheck goes on to
// find the smallest failure.
template <class Function>
void trial(const Function& function) {
  testing::TestPartResultArray results;
  {
    using Reporter = testing::ScopedFakeTestPartResultReporter;
    const Reporter reporter(Reporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    function();
  }
  std::string text;
  for (int i = 0; i < results.size(); ++i) text += results.GetTestPartResult(i).message();
  if (!text.empty()) RC_FAIL(text);
}

// Different tokens, ascending or not.
std::vector<int64_t> some_tokens(int64_t BT) {
  const int64_t count = in(1, std::min<int64_t>(BT, 16));
  std::vector<int64_t> rows(static_cast<size_t>(BT));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  for (int64_t i = 0; i < count; ++i) {
    std::swap(rows[static_cast<size_t>(i)], rows[static_cast<size_t>(in(i, BT - 1))]);
  }
  rows.resize(static_cast<size_t>(count));
  return rows;
}

// ---- batch invariance -------------------------------------------------------------------------

RC_GTEST_PROP(Hostile, ATokenOfTheForwardDoesNotSeeTheOthers, ()) {
  const Shape shape{.BT = any_tokens(), .V = any_vocabulary(), .H = any_hidden()};
  const Arithmetic arithmetic = any_arithmetic();
  const PlanOptions options = any_options();
  ForwardCase all = make_forward_case(shape, arithmetic, {.kind = any_kind(), .outside = 0.1});
  all.rounding = coin() ? LogitsRounding::none : LogitsRounding::operand;
  if (coin()) all.logits = DType::f32;
  const auto chosen = some_tokens(shape.BT);
  const std::set<int64_t> few(chosen.begin(), chosen.end());
  // The others hold anything, and some of them do not count.
  if (coin()) {
    all.counts = TestTensor::vector(DType::u8, shape.BT);
    for (int64_t b = 0; b < shape.BT; ++b) all.counts->set_index(b, few.count(b) ? 1 : in(0, 1));
  }
  for (int64_t b = 0; b < shape.BT && shape.H > 0; ++b) {
    if (!few.count(b) && in(0, 5) == 0)
      all.input.set(b, in(0, shape.H - 1), coin() ? NAN : INFINITY);
  }
  const ForwardResult want = run_forward(all, options);

  ForwardCase c;
  c.shape = {.BT = static_cast<int64_t>(chosen.size()), .V = shape.V, .H = shape.H};
  c.arithmetic = arithmetic;
  c.rounding = all.rounding;
  c.logits = all.logits;
  c.input = TestTensor::matrix(arithmetic.operand, c.shape.BT, shape.H);
  c.target = TestTensor::vector(DType::i64, c.shape.BT);
  c.weight = std::move(all.weight);
  for (size_t i = 0; i < chosen.size(); ++i) {
    copy_row(all.input, chosen[i], c.input, static_cast<int64_t>(i));
    c.target.set_index(static_cast<int64_t>(i), all.target.get_index(chosen[i]));
  }
  PlanOptions other = any_options();
  other.isa = options.isa;
  other.workspace_limit_bytes =
      any_limit([&](const PlanOptions& o) { return plan_forward(c.shape, c.types(), o); }, other);
  const ForwardResult got = run_forward(c, other);
  for (size_t i = 0; i < chosen.size(); ++i) {
    RC_ASSERT(got.token_bits(static_cast<int64_t>(i), MaskLayout::packed_lsb_first) ==
              want.token_bits(chosen[i], MaskLayout::packed_lsb_first));
  }
}

RC_GTEST_PROP(Hostile, ATokenOfTheGradientDoesNotSeeTheOthers, ()) {
  const Shape shape{.BT = any_tokens(), .V = any_vocabulary(), .H = any_hidden()};
  const Arithmetic arithmetic = any_arithmetic();
  const PlanOptions options = any_options();
  const auto mode = coin() ? GradientMode::memory_saving : GradientMode::high_performance;
  GradientCase all =
      make_gradient_case(make_forward_case(shape, arithmetic, {.kind = any_kind(), .outside = 0.1}),
                         {.mode = mode, .grad_logsumexp = coin()});
  all.grad_input->dtype = DType::f32;
  if (coin()) all.grad_weight.reset();
  const auto chosen = some_tokens(shape.BT);
  const GradientResult want = run_gradient(all, options);

  const auto n = static_cast<int64_t>(chosen.size());
  GradientCase c;
  c.shape = {.BT = n, .V = shape.V, .H = shape.H};
  c.arithmetic = arithmetic;
  c.mode = mode;
  c.grad_input = all.grad_input;
  c.grad_weight.reset();
  c.input = TestTensor::matrix(arithmetic.operand, n, shape.H);
  c.weight = std::move(all.weight);
  for (TestTensor* t : {&c.grad, &c.logits_max, &c.sum_exp_logits}) {
    *t = TestTensor::vector(DType::f32, n);
  }
  c.masked_target = TestTensor::vector(DType::i64, n);
  c.mask_layout = MaskLayout::byte_per_token;
  c.target_mask = TestTensor::vector(DType::u8, n);
  if (all.grad_logsumexp) c.grad_logsumexp = TestTensor::vector(DType::f32, n);
  if (all.softmax) c.softmax = TestTensor::matrix(DType::f32, n, shape.V);
  const std::vector<uint8_t> mask = reference::read(*all.operands().target_mask);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = chosen[static_cast<size_t>(i)];
    copy_row(all.input, b, c.input, i);
    copy_row(all.grad, b, c.grad, i);
    copy_row(all.logits_max, b, c.logits_max, i);
    copy_row(all.sum_exp_logits, b, c.sum_exp_logits, i);
    c.masked_target.set_index(i, all.masked_target.get_index(b));
    c.target_mask->set_index(i, mask[static_cast<size_t>(b)]);
    if (all.grad_logsumexp) copy_row(*all.grad_logsumexp, b, *c.grad_logsumexp, i);
    if (all.softmax) copy_row(*all.softmax, b, *c.softmax, i);
  }
  PlanOptions other = any_options();
  other.isa = options.isa;
  other.workspace_limit_bytes =
      any_limit([&](const PlanOptions& o) { return plan_gradient(c.shape, c.types(), o); }, other);
  const GradientResult got = run_gradient(c, other);
  for (int64_t i = 0; i < n; ++i) {
    RC_ASSERT(got.grad_input->row_bits(i) ==
              want.grad_input->row_bits(chosen[static_cast<size_t>(i)]));
  }
}

// ---- one call for a step ----------------------------------------------------------------------

// Weights of every kind: 0, tiny, huge, negative.
TestTensor any_weights(int64_t BT) {
  TestTensor weights = TestTensor::vector(DType::f32, BT, in(1, 3));
  const bool wild = coin();
  for (int64_t b = 0; b < BT; ++b) {
    const double size = wild ? std::ldexp(1.0, static_cast<int>(in(-40, 2))) : 1.0;
    weights.set(b, in(0, 4) == 0 ? 0.0 : (in(0, 3) == 0 ? -0.7 : 0.3) * size);
  }
  return weights;
}

StepCase any_step() {
  const Shape shape{.BT = any_tokens(), .V = any_vocabulary(), .H = any_hidden()};
  const Arithmetic arithmetic = any_arithmetic();
  const InputKind kind = any_kind();
  StepCase c = make_step(shape, arithmetic,
                         {.kind = kind,
                          .input = any_layout(),
                          .weight = any_layout(),
                          .target_type = coin() ? DType::i64 : DType::i32,
                          .target_stride = in(1, 2)});
  c.grad_input = any_output(arithmetic);
  c.grad_weight = any_output(arithmetic);
  if (kind == InputKind::offset || kind == InputKind::negative) {
    // One hidden dimension is the same for the whole vocabulary: terms that are nearly equal round
    // alike beside what a buffer held, and errors are judged as those of different terms.
    c.grad_input->accumulate = c.grad_weight->accumulate = false;
  }
  c.grad_input_layout = any_layout();
  c.grad_weight_layout = any_layout();
  c.vector_stride = in(1, 3);
  switch (in(0, 5)) {
    case 0:
      c.grad_input.reset();
      break;
    case 1:
      c.grad_weight.reset();
      break;
    default:
      break;
  }
  if (coin()) c.token_weights = any_weights(shape.BT);
  switch (in(0, 4)) {
    case 0:
      c.normalizer = 3.0;
      break;
    case 1:
      c.normalizer = -1e6;
      break;
    case 2:
      c.normalizer = INFINITY;
      break;
    default:
      break;
  }
  // Rows that do not count hold anything, NaN among it, and a target of any kind.
  if (coin()) c.ignore_index = -100;
  if (coin()) c.counts = TestTensor::vector(DType::u8, shape.BT, in(1, 2));
  for (int64_t b = 0; b < shape.BT; ++b) {
    const bool drop = in(0, 4) == 0;
    if (c.counts) c.counts->set_index(b, drop ? 0 : in(1, 255));
    if (!drop || (!c.counts && !c.ignore_index)) continue;
    c.target.set_index(b, c.ignore_index ? -100 : int64_t{1} << 30);
    if (shape.H > 0) c.input.set(b, in(0, shape.H - 1), coin() ? NAN : -INFINITY);
  }
  return c;
}

RC_GTEST_PROP(Hostile, AStepIsItsDefinition, ()) {
  const StepCase c = any_step();
  // Roundings of a row that are functions of one or two numbers are not independent of them, which
  // the allowed errors suppose; such sizes are judged on chosen problems (loss_and_gradient_test).
  RC_PRE(c.shape.H == 0 || c.shape.H > 2);
  const PlanOptions options = any_options();
  const Strategy strategy = any_strategy();
  PlanOptions limited = options;
  limited.workspace_limit_bytes = any_limit(
      [&](const PlanOptions& o) { return plan_loss_and_gradient(c.shape, c.types(), o, strategy); },
      options);
  trial([&] { expect_step(c, run_step(c, limited, strategy), options, strategy); });
}

RC_GTEST_PROP(Hostile, ThreadsLimitsAndLayoutsLeaveNoTraceInAStep, ()) {
  StepCase c = any_step();
  const PlanOptions options = any_options();
  const Strategy strategy = any_strategy();
  const auto plan = [&](const PlanOptions& o) {
    return plan_loss_and_gradient(c.shape, c.types(), o, strategy);
  };
  const auto want = run_step(c, {.threads = 1, .isa = options.isa}, strategy).bits();
  PlanOptions other = options;
  other.workspace_limit_bytes = any_limit(plan, options);
  RC_ASSERT(run_step(c, other, strategy).bits() == want);
  c.input = c.input.contiguous_copy();
  c.weight = c.weight.contiguous_copy();
  c.grad_input_layout = c.grad_weight_layout = any_layout();
  c.vector_stride = 1;
  RC_ASSERT(run_step(c, other, strategy).bits() == want);
}

// A token's loss, statistics and row of grad_input are those it has in any other batch, where the
// normalizer is given; and grad_weight is that of the tokens that count, in their order.
RC_GTEST_PROP(Hostile, ATokenOfAStepDoesNotSeeTheOthers, ()) {
  const Shape shape{.BT = any_tokens(), .V = any_vocabulary(), .H = any_hidden()};
  const Arithmetic arithmetic = any_arithmetic();
  const PlanOptions options = any_options();
  const Strategy strategy = any_strategy();
  StepCase all = make_step(shape, arithmetic, {.kind = any_kind()});
  all.normalizer = 7.0;
  if (coin()) all.token_weights = any_weights(shape.BT);
  all.grad_input->dtype = DType::f32;
  all.counts = TestTensor::vector(DType::u8, shape.BT);
  const auto chosen = some_tokens(shape.BT);
  const std::set<int64_t> few(chosen.begin(), chosen.end());
  const bool only = coin();  // the others do not count at all
  for (int64_t b = 0; b < shape.BT; ++b) {
    all.counts->set_index(b, few.count(b) || !only ? 1 : 0);
    if (!few.count(b) && shape.H > 0 && in(0, 5) == 0) all.input.set(b, in(0, shape.H - 1), NAN);
  }
  const StepResult want = run_step(all, options, strategy);

  const auto n = static_cast<int64_t>(chosen.size());
  StepCase c;
  c.shape = {.BT = n, .V = shape.V, .H = shape.H};
  c.arithmetic = arithmetic;
  c.grad_input = all.grad_input;
  c.grad_weight = all.grad_weight;
  c.normalizer = all.normalizer;
  c.input = TestTensor::matrix(arithmetic.operand, n, shape.H);
  c.target = TestTensor::vector(DType::i64, n);
  c.weight = std::move(all.weight);
  if (all.token_weights) c.token_weights = TestTensor::vector(DType::f32, n);
  std::vector<int64_t> order = chosen;
  if (only) std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = order[static_cast<size_t>(i)];
    copy_row(all.input, b, c.input, i);
    c.target.set_index(i, all.target.get_index(b));
    if (all.token_weights) c.token_weights->set(i, all.token_weights->get(b));
  }
  PlanOptions other = any_options();
  other.isa = options.isa;
  other.workspace_limit_bytes = any_limit(
      [&](const PlanOptions& o) { return plan_loss_and_gradient(c.shape, c.types(), o, strategy); },
      other);
  const StepResult got = run_step(c, other, strategy);
  for (int64_t i = 0; i < n; ++i) {
    RC_ASSERT(got.token_bits(i) == want.token_bits(order[static_cast<size_t>(i)]));
  }
  if (only)
    RC_ASSERT(got.gradients.grad_weight->all_bits() == want.gradients.grad_weight->all_bits());
}

// Micro-batches that accumulate into one fp32 grad_weight make the bits of one batch, where each
// but the last has an even number of tokens that count (they are added in pairs).
RC_GTEST_PROP(Hostile, StepsAccumulateToTheBitsOfOneStep, ()) {
  const Shape shape{.BT = any_tokens(), .V = any_vocabulary(), .H = any_hidden()};
  const Arithmetic arithmetic = any_arithmetic();
  const PlanOptions options = any_options();
  const Strategy strategy = any_strategy();
  StepCase whole = make_step(shape, arithmetic, {.kind = any_kind()});
  whole.normalizer = 11.0;
  whole.grad_input = GradientOutput{.dtype = DType::f32};
  whole.grad_weight = GradientOutput{.dtype = DType::f32};
  const StepResult want = run_step(whole, options, strategy);

  const int64_t cut = std::min(shape.BT, 2 * in(0, shape.BT / 2));
  TestTensor grad_weight = TestTensor::matrix(DType::f32, shape.V, shape.H);
  for (int part = 0; part < 2; ++part) {
    const int64_t first = part == 0 ? 0 : cut;
    const int64_t rows = (part == 0 ? cut : shape.BT) - first;
    LossAndGradientTypes types = whole.types();
    types.grad_weight->accumulate = part == 1;
    LossAndGradientOperands operands = whole.operands();
    const auto below = [&](ConstMatrixView& view) {
      view.data =
          static_cast<const std::byte*>(view.data) + first * view.row_stride * size_of(view.dtype);
      view.rows = rows;
    };
    below(operands.input);
    operands.target.data = static_cast<const int64_t*>(operands.target.data) + first;
    operands.target.size = rows;
    TestTensor loss = TestTensor::vector(DType::f32, rows);
    TestTensor grad_input = TestTensor::matrix(DType::f32, rows, shape.H);
    LossAndGradientOutputs outputs;
    outputs.loss = loss.vector_view();
    outputs.grad_input = grad_input.matrix_view();
    outputs.grad_weight = grad_weight.matrix_view();
    const auto plan =
        plan_loss_and_gradient({.BT = rows, .V = shape.V, .H = shape.H}, types, options, strategy);
    RC_ASSERT(static_cast<bool>(plan));
    RC_ASSERT(static_cast<bool>(
        run(*plan, operands, outputs, guarded_workspace(plan->workspace_bytes()))));
    for (int64_t i = 0; i < rows; ++i) {
      RC_ASSERT(grad_input.row_bits(i) == want.gradients.grad_input->row_bits(first + i));
      RC_ASSERT(loss.bits(i) == want.loss.bits(first + i));
    }
  }
  RC_ASSERT(grad_weight.all_bits() == want.gradients.grad_weight->all_bits());
}

}  // namespace
}  // namespace logitless::test
