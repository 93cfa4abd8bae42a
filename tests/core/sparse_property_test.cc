// SPDX-License-Identifier: Apache-2.0
// Whatever the shape, the strides, the tolerance, the seed: what is kept is what the definition
// keeps, and the products are those of what is kept.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "tests/support/one_hot.h"

namespace logitless::test {
namespace {

Layout any_layout() {
  const auto layouts = all_layouts();
  return layouts[*rc::gen::inRange<size_t>(0, layouts.size())];
}

TestTensor laid_out(const TestTensor& from, const Layout& layout) {
  TestTensor t = TestTensor::matrix(from.dtype(), from.rows(), from.cols(), layout);
  for (int64_t r = 0; r < from.rows(); ++r) {
    for (int64_t c = 0; c < from.cols(); ++c) t.set(r, c, from.get(r, c));
  }
  return t;
}

OneHot any_one_hot() {
  const auto arithmetics = all_arithmetics();
  const Arithmetic arithmetic = arithmetics[*rc::gen::inRange<size_t>(0, arithmetics.size())];
  const bool input = *rc::gen::arbitrary<bool>();
  const OneHotShape shape{.BT = *rc::gen::inRange<int64_t>(1, 40),
                          .V = *rc::gen::inRange<int64_t>(1, input ? 2000 : 300),
                          .further = *rc::gen::inRange<int64_t>(1, 70)};
  const auto seed = *rc::gen::inRange<uint64_t>(0, 1 << 20);
  OneHot o =
      input ? one_hot_input(shape, arithmetic, seed) : one_hot_weight(shape, arithmetic, seed);
  o.step.input = laid_out(o.step.input, any_layout());
  o.step.weight = laid_out(o.step.weight, any_layout());
  o.step.grad_input_layout = any_layout();
  o.step.grad_weight_layout = any_layout();
  // From 2^-16 to 2^-1.
  o.step.grad_tolerance = std::exp2(-static_cast<float>(*rc::gen::inRange(1000, 16000)) / 1000.0f);
  o.step.seed = *rc::gen::arbitrary<uint64_t>();
  if (*rc::gen::arbitrary<bool>()) {
    o.step.token_ids = TestTensor::vector(DType::i64, shape.BT, *rc::gen::inRange<int64_t>(1, 4));
    for (int64_t b = 0; b < shape.BT; ++b) {
      o.step.token_ids->set_index(b, *rc::gen::arbitrary<int64_t>());
    }
  }
  if (*rc::gen::arbitrary<bool>()) {
    o.step.token_weights = TestTensor::vector(DType::f32, shape.BT);
    for (int64_t b = 0; b < shape.BT; ++b) {
      o.step.token_weights->set(b, static_cast<double>(*rc::gen::inRange(-3, 4)) / 2);
    }
  }
  if (*rc::gen::arbitrary<bool>()) o.step.ignore_index = o.step.target.get_index(0);
  return o;
}

RC_GTEST_PROP(SparseProperties, WhatIsKeptIsWhatTheDefinitionKeeps, ()) {
  OneHot o = any_one_hot();
  PlanOptions options;
  const auto isas = usable_isas();
  options.isa = isas[*rc::gen::inRange<size_t>(0, isas.size())];
  options.threads = *rc::gen::inRange(1, 4);
  if (*rc::gen::arbitrary<bool>()) {
    options.workspace_limit_bytes = least_limit([&](int64_t limit) {
      PlanOptions p = options;
      p.workspace_limit_bytes = limit;
      return plan_loss_and_gradient(o.step.shape, o.step.types(), p);
    });
  }
  const StepResult got = run_step(o.step, options, Strategy::automatic);
  const float eps = o.step.grad_tolerance;
  o.step.grad_tolerance = 0.0f;
  options.workspace_limit_bytes = 0;
  const StepResult exact = run_step(o.step, options, Strategy::one_pass);
  o.step.grad_tolerance = eps;
  RC_ASSERT(got.loss.all_bits() == exact.loss.all_bits());
  RC_ASSERT(got.sum_exp_logits.all_bits() == exact.sum_exp_logits.all_bits());
  const KeptSet kept = expect_kept_set(o, exact, got);
  expect_products(o, got);
  RC_ASSERT(kept.within_an_ulp <= 1);
  RC_ASSERT(!testing::Test::HasFailure());
}

}  // namespace
}  // namespace logitless::test
