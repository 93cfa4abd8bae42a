// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "reference/tolerance.h"
#include "tests/support/judge.h"

namespace logitless::test {
namespace {

double samples(int64_t n) { return static_cast<double>(std::max<int64_t>(n, 1)); }

const char* name_of(LogitsRounding rounding) {
  switch (rounding) {
    case LogitsRounding::none:
      return "none";
    case LogitsRounding::operand:
      return "operand";
    case LogitsRounding::infer:
      return "infer";
  }
  return "?";
}

int64_t mask_bytes(int64_t tokens, MaskLayout layout) {
  return layout == MaskLayout::packed_lsb_first ? (tokens + 7) / 8 : tokens;
}

bool mask_bit(const TestTensor& mask, MaskLayout layout, int64_t token) {
  if (layout == MaskLayout::byte_per_token) return mask.get_index(token) != 0;
  return ((mask.get_index(token / 8) >> (token % 8)) & 1) != 0;
}

void append(std::vector<uint64_t>& all, const TestTensor& tensor) {
  const std::vector<uint64_t> bits = tensor.all_bits();
  all.insert(all.end(), bits.begin(), bits.end());
}

std::string damage_of(const char* name, const TestTensor& tensor) {
  const std::string damage = tensor.damage();
  return damage.empty() ? "" : std::string(name) + ": " + damage;
}

}  // namespace

std::vector<Arithmetic> all_arithmetics() {
  return {{DType::f16, {}, "f16"},
          {DType::bf16, {}, "bf16"},
          {DType::f32, {}, "f32"},
          {DType::f32, DType::bf16, "f32_as_bf16"}};
}

// ---- forward ----------------------------------------------------------------------------------

ForwardTypes ForwardCase::types() const {
  return {.operand = arithmetic.operand,
          .multiply = arithmetic.multiply,
          .target = target_type,
          .logits = logits,
          .logits_rounding = rounding};
}

ForwardOperands ForwardCase::operands() const {
  ForwardOperands o;
  o.input = input.matrix_view();
  o.weight = weight.matrix_view();
  o.target = target.vector_view();
  o.vocab_start_index = vocab_start;
  o.vocab_end_index = vocab_end;
  o.rows.ignore_index = ignore_index;
  if (counts) o.rows.counts = counts->vector_view();
  return o;
}

std::string ForwardCase::describe() const {
  return "BT " + std::to_string(shape.BT) + ", V " + std::to_string(shape.V) + ", H " +
         std::to_string(shape.H) + ", " + arithmetic.name + ", rounding " + name_of(rounding) +
         ", target " + logitless::name_of(target_type);
}

ForwardCase make_forward_case(const Shape& shape, const Arithmetic& arithmetic,
                              const CaseOptions& options) {
  ForwardCase c;
  c.shape = shape;
  c.arithmetic = arithmetic;
  c.target_type = options.target_type;
  c.vocab_start = options.vocab_start;
  const int64_t BT = shape.BT, V = shape.V, H = shape.H;
  c.input = TestTensor::matrix(arithmetic.operand, BT, H, options.input);
  c.weight = TestTensor::matrix(arithmetic.operand, V, H, options.weight);
  c.target = TestTensor::vector(options.target_type, BT, options.target_stride);

  std::mt19937_64 random(options.seed * 7919 + static_cast<uint64_t>(BT * 131 + V * 17 + H));
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const double width = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(H, 1)));
  for (int64_t v = 0; v < V; ++v) {
    for (int64_t h = 0; h < H; ++h) c.weight.set(v, h, normal(random) * width);
  }
  for (int64_t b = 0; b < BT; ++b) {
    const bool outside = V == 0 || uniform(random) < options.outside;
    const int64_t local = V == 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(V));
    const int64_t beyond = static_cast<int64_t>(random() % 1000);
    const bool below = options.vocab_start > 1000 && random() % 2 == 0;
    const int64_t elsewhere =
        below ? options.vocab_start - 1 - beyond : options.vocab_start + V + beyond;
    c.target.set_index(b, outside ? elsewhere : options.vocab_start + local);
    // How sure the token is: its target's logit is about this much above the rest.
    double sure = 0.0;
    double noise = 2.0;
    switch (options.kind) {
      case InputKind::peaked:
      case InputKind::offset:
      case InputKind::negative:
      case InputKind::minus_inf:
        sure = b % 3 == 0 ? 9.0 : (b % 3 == 1 ? 3.0 : 0.0);
        break;
      case InputKind::flat:
        noise = 0.02;
        break;
      case InputKind::certain:
        sure = 60.0;
        break;
    }
    for (int64_t h = 0; h < H; ++h) {
      const double along = V == 0 ? 0.0 : c.weight.get(local, h);
      c.input.set(b, h, normal(random) * noise + sure * along);
    }
  }
  if (H > 0) {
    // One hidden dimension carries what all logits of a row have in common.
    const auto constant = [&](double input_value, double weight_value) {
      for (int64_t b = 0; b < BT; ++b) c.input.set(b, H - 1, input_value);
      for (int64_t v = 0; v < V; ++v) c.weight.set(v, H - 1, weight_value);
    };
    if (options.kind == InputKind::offset) constant(100.0, 100.0);
    if (options.kind == InputKind::negative) constant(16.0, -16.0);
    if (options.kind == InputKind::minus_inf) {
      // Every fifth vocabulary row through its first element, the whole token 0 through its last.
      constant(1.0, 0.25);
      if (BT > 0) c.input.set(0, H - 1, -INFINITY);
      for (int64_t b = 0; b < BT; ++b) c.input.set(b, 0, 1.0);
      for (int64_t v = 3; v < V; v += 5) c.weight.set(v, 0, -INFINITY);
    }
  }
  return c;
}

std::vector<uint64_t> ForwardResult::bits() const {
  std::vector<uint64_t> all;
  for (const TestTensor* t : {&logits_max, &sum_exp_logits, &predicted_logits}) append(all, *t);
  for (const auto* t : {&target_mask, &masked_target, &logits}) {
    if (*t) append(all, **t);
  }
  return all;
}

std::vector<uint64_t> ForwardResult::token_bits(int64_t token, MaskLayout layout) const {
  std::vector<uint64_t> all{logits_max.bits(token), sum_exp_logits.bits(token),
                            predicted_logits.bits(token)};
  if (target_mask) all.push_back(mask_bit(*target_mask, layout, token) ? 1 : 0);
  if (masked_target) all.push_back(masked_target->bits(token));
  if (logits) {
    const auto row = logits->row_bits(token);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

std::string ForwardResult::damage() const {
  std::string all = damage_of("logits_max", logits_max) +
                    damage_of("sum_exp_logits", sum_exp_logits) +
                    damage_of("predicted_logits", predicted_logits);
  if (target_mask) all += damage_of("target_mask", *target_mask);
  if (masked_target) all += damage_of("masked_target", *masked_target);
  if (logits) all += damage_of("logits", *logits);
  return all;
}

ForwardResult make_forward_outputs(const ForwardCase& c) {
  ForwardResult r;
  const int64_t n = c.shape.BT, stride = c.vector_stride;
  r.logits_max = TestTensor::vector(DType::f32, n, stride);
  r.sum_exp_logits = TestTensor::vector(DType::f32, n, stride);
  r.predicted_logits = TestTensor::vector(DType::f32, n, stride);
  if (c.with_mask) {
    r.target_mask = TestTensor::vector(DType::u8, mask_bytes(n, c.mask_layout), stride);
  }
  if (c.with_masked_target) r.masked_target = TestTensor::vector(c.target_type, n, stride);
  if (c.logits) r.logits = TestTensor::matrix(*c.logits, n, c.shape.V, c.logits_layout);
  return r;
}

ForwardOutputs outputs_of(const ForwardCase& c, ForwardResult& r) {
  ForwardOutputs o;
  o.logits_max = r.logits_max.vector_view();
  o.sum_exp_logits = r.sum_exp_logits.vector_view();
  o.predicted_logits = r.predicted_logits.vector_view();
  if (r.target_mask) o.target_mask = r.target_mask->mask_view(c.mask_layout, c.shape.BT);
  if (r.masked_target) o.masked_target = r.masked_target->vector_view();
  if (r.logits) o.logits = r.logits->matrix_view();
  return o;
}

ForwardResult run_forward(const ForwardCase& c, const PlanOptions& options) {
  const auto plan = plan_forward(c.shape, c.types(), options);
  if (!plan) {
    ADD_FAILURE() << "plan_forward: " << plan.error().message;
    return make_forward_outputs(c);
  }
  EXPECT_EQ(plan->isa(), options.isa.value_or(plan->isa()));
  if (options.workspace_limit_bytes > 0) {
    EXPECT_LE(plan->workspace_bytes(), options.workspace_limit_bytes);
  }
  return run_forward(c, *plan);
}

ForwardResult run_forward(const ForwardCase& c, const ForwardPlan& plan) {
  ForwardResult result = make_forward_outputs(c);
  const auto ran =
      run(plan, c.operands(), outputs_of(c, result), guarded_workspace(plan.workspace_bytes()));
  if (!ran) ADD_FAILURE() << "forward: " << ran.error().message;
  EXPECT_EQ(result.damage(), "");
  return result;
}

reference::Statistics reference_forward(const ForwardCase& c) {
  const ForwardOperands o = c.operands();
  return reference::forward(o.input, o.weight, o.target,
                            {.multiply = c.arithmetic.multiply,
                             .logits_rounding = c.rounding,
                             .vocab_start_index = c.vocab_start,
                             .vocab_end_index = c.vocab_end,
                             .rows = o.rows});
}

void expect_forward(const ForwardCase& c, const ForwardResult& result) {
  expect_forward(c, result, reference_forward(c));
}

void expect_forward(const ForwardCase& c, const ForwardResult& result,
                    const reference::Statistics& want) {
  SCOPED_TRACE(c.describe());
  const std::string suffix =
      std::string(" ") + c.arithmetic.name +
      (c.rounding == LogitsRounding::none ? "" : std::string(", rounded ") + name_of(c.rounding));
  const double n = samples(c.shape.BT);
  Judge max("logits_max" + suffix), sum("sum_exp_logits" + suffix),
      predicted("predicted_logits" + suffix);
  for (int64_t b = 0; b < c.shape.BT; ++b) {
    const auto i = static_cast<size_t>(b);
    max.check(result.logits_max.get(b), want.logits_max.value[i],
              reference::allowed_logits_max(want.logits_max.value[i], want.logits_max.deviation[i],
                                            want.logits_max.flip[i], n),
              b);
    sum.check(result.sum_exp_logits.get(b), want.sum_exp_logits.value[i],
              reference::allowed_sum_exp_logits(want.sum_exp_logits.value[i],
                                                want.sum_exp_logits.deviation[i],
                                                want.sum_exp_logits.flip[i], n),
              b);
    predicted.check(result.predicted_logits.get(b), want.predicted_logits.value[i],
                    reference::allowed_predicted_logits(want.predicted_logits.value[i],
                                                        want.predicted_logits.deviation[i],
                                                        want.predicted_logits.flip[i], n),
                    b);
    if (result.target_mask) {
      EXPECT_EQ(mask_bit(*result.target_mask, c.mask_layout, b), want.target_mask[i] != 0)
          << "token " << b;
    }
    if (result.masked_target) {
      EXPECT_EQ(result.masked_target->get_index(b), want.masked_target[i]) << "token " << b;
    }
  }
  if (result.target_mask && c.mask_layout == MaskLayout::packed_lsb_first) {
    // Padding bits are written as if the target were id 0.
    const int64_t end = c.vocab_end.value_or(c.vocab_start + c.shape.V);
    const bool outside = 0 < c.vocab_start || 0 >= end;
    for (int64_t b = c.shape.BT; b < (c.shape.BT + 7) / 8 * 8; ++b) {
      EXPECT_EQ(mask_bit(*result.target_mask, c.mask_layout, b), outside) << "padding bit " << b;
    }
  }
  if (!result.logits) return;
  const ForwardOperands o = c.operands();
  const auto tokens = reference::all_rows(c.shape.BT);
  const reference::Logits logits =
      reference::logits(o.input, o.weight,
                        {.multiply = c.arithmetic.multiply, .logits_rounding = c.rounding}, tokens);
  Judge judge("logits" + suffix + ", written as " + logitless::name_of(*c.logits));
  const double all = samples(c.shape.BT * c.shape.V);
  for (int64_t b = 0; b < c.shape.BT; ++b) {
    const bool counts = want.counts[static_cast<size_t>(b)] != 0;
    for (int64_t v = 0; v < c.shape.V; ++v) {
      // Rounded logits are off by up to half an ulp of their type, whatever they are written as.
      const DType type = c.rounding == LogitsRounding::operand && *c.logits == DType::f32
                             ? c.arithmetic.multiplied()
                             : *c.logits;
      const double exact = counts ? logits.unrounded(b, v) : 0.0;
      judge.check(result.logits->get(b, v), exact,
                  reference::allowed_logit(exact, counts ? logits.deviation(b, v) : 0.0, type, all),
                  b, v);
    }
  }
}

// ---- gradient ---------------------------------------------------------------------------------

GradientTypes GradientCase::types() const {
  return {.operand = arithmetic.operand,
          .multiply = arithmetic.multiply,
          .target = target_type,
          .mode = mode,
          .logits_rounding = rounding,
          .grad_tolerance = grad_tolerance,
          .grad_input = grad_input,
          .grad_weight = grad_weight};
}

GradientOperands GradientCase::operands() const {
  GradientOperands o;
  o.grad = grad.vector_view();
  if (grad_logsumexp) o.grad_logsumexp = grad_logsumexp->vector_view();
  o.input = input.matrix_view();
  o.weight = weight.matrix_view();
  if (target_mask) o.target_mask = target_mask->mask_view(mask_layout, shape.BT);
  o.masked_target = masked_target.vector_view();
  if (mode == GradientMode::memory_saving) {
    o.logits_max = logits_max.vector_view();
    o.sum_exp_logits = sum_exp_logits.vector_view();
  } else {
    o.softmax = softmax->matrix_view();
  }
  if (counts) o.counts = counts->vector_view();
  o.seed = seed;
  if (token_ids) o.token_ids = token_ids->vector_view();
  return o;
}

reference::GradientOperands GradientCase::reference_operands() const {
  const GradientOperands o = operands();
  reference::GradientOperands r;
  r.input = o.input;
  r.weight = o.weight;
  r.grad = reference::read(o.grad);
  if (o.grad_logsumexp) r.grad_logsumexp = reference::read(*o.grad_logsumexp);
  if (o.target_mask) r.target_mask = reference::read(*o.target_mask);
  r.masked_target = reference::read_indices(o.masked_target);
  if (o.logits_max) r.logits_max = reference::read(*o.logits_max);
  if (o.sum_exp_logits) r.sum_exp_logits = reference::read(*o.sum_exp_logits);
  r.softmax = o.softmax;
  if (counts) {
    for (int64_t b = 0; b < shape.BT; ++b) r.counts.push_back(counts->get_index(b) != 0 ? 1 : 0);
  }
  return r;
}

reference::GradientOptions GradientCase::reference_options() const {
  return {.multiply = arithmetic.multiply, .logits_rounding = rounding};
}

std::string GradientCase::describe() const {
  return "BT " + std::to_string(shape.BT) + ", V " + std::to_string(shape.V) + ", H " +
         std::to_string(shape.H) + ", " + arithmetic.name + ", rounding " + name_of(rounding) +
         (mode == GradientMode::memory_saving ? ", memory-saving" : ", high-performance") +
         (grad_logsumexp ? ", grad_logsumexp" : "");
}

GradientCase make_gradient_case(ForwardCase forward, const GradientCaseOptions& options) {
  GradientCase c;
  const reference::Statistics s = reference_forward(forward);
  c.shape = forward.shape;
  c.arithmetic = forward.arithmetic;
  c.target_type = forward.target_type;
  c.mask_layout = forward.mask_layout;
  c.mode = options.mode;
  c.rounding =
      options.mode == GradientMode::memory_saving ? forward.rounding : LogitsRounding::none;
  c.grad_input = c.grad_weight = GradientOutput{.dtype = c.arithmetic.operand};
  const int64_t BT = c.shape.BT, V = c.shape.V;
  const int64_t stride = options.vector_stride;
  c.grad = TestTensor::vector(DType::f32, BT, stride);
  c.masked_target = TestTensor::vector(c.target_type, BT, stride);
  c.logits_max = TestTensor::vector(DType::f32, BT, stride);
  c.sum_exp_logits = TestTensor::vector(DType::f32, BT, stride);
  c.target_mask = TestTensor::vector(DType::u8, mask_bytes(BT, c.mask_layout), stride);
  if (options.grad_logsumexp) c.grad_logsumexp = TestTensor::vector(DType::f32, BT, stride);

  std::mt19937_64 random(options.seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const bool zero = uniform(random) < options.zero_grad;
    const double grad = zero ? 0.0 : options.grad_scale * (0.25 + uniform(random));
    c.grad.set(b, random() % 4 == 0 ? -grad : grad);
    if (c.grad_logsumexp)
      c.grad_logsumexp->set(b, zero ? 0.0 : 0.3 * options.grad_scale * normal(random));
    c.logits_max.set(b, s.logits_max.value[i]);
    c.sum_exp_logits.set(b, s.sum_exp_logits.value[i]);
    c.masked_target.set_index(b, s.masked_target[i]);
    if (c.mask_layout == MaskLayout::byte_per_token) {
      // Any value but 0 means outside.
      c.target_mask->set_index(b, s.target_mask[i] ? 1 + b % 255 : 0);
    } else {
      int64_t byte = c.target_mask->get_index(b / 8);
      byte &= ~(int64_t{1} << (b % 8));
      byte |= int64_t{s.target_mask[i]} << (b % 8);
      c.target_mask->set_index(b / 8, byte);
    }
  }
  if (options.mode == GradientMode::high_performance) {
    c.softmax = TestTensor::matrix(DType::f32, BT, V, options.softmax);
    const ForwardOperands o = forward.operands();
    const auto tokens = reference::all_rows(BT);
    const reference::Logits logits = reference::logits(
        o.input, o.weight, {.multiply = c.arithmetic.multiply, .logits_rounding = forward.rounding},
        tokens);
    for (int64_t b = 0; b < BT; ++b) {
      for (int64_t v = 0; v < V; ++v) {
        c.softmax->set(
            b, v,
            reference::softmax(logits.value(b, v), c.logits_max.get(b), c.sum_exp_logits.get(b)));
      }
    }
  }
  c.input = std::move(forward.input);
  c.weight = std::move(forward.weight);
  c.counts = std::move(forward.counts);
  return c;
}

std::vector<uint64_t> GradientResult::bits() const {
  std::vector<uint64_t> all;
  for (const auto* t : {&grad_input, &grad_weight}) {
    if (*t) append(all, **t);
  }
  return all;
}

std::string GradientResult::damage() const {
  std::string all;
  if (grad_input) all += damage_of("grad_input", *grad_input);
  if (grad_weight) all += damage_of("grad_weight", *grad_weight);
  return all;
}

namespace {

// An output buffer, with something to accumulate into where that is asked for.
TestTensor make_grad_output(const GradientOutput& output, int64_t rows, int64_t cols,
                            const Layout& layout, uint64_t seed, reference::Matrix& initial) {
  TestTensor t = TestTensor::matrix(output.dtype, rows, cols, layout);
  initial = reference::Matrix(rows, cols);
  if (!output.accumulate) return t;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      t.set(r, c, normal(random));
      initial(r, c) = t.get(r, c);
    }
  }
  return t;
}

}  // namespace

GradientResult make_gradient_outputs(const GradientCase& c) {
  GradientResult r;
  if (c.grad_input) {
    r.grad_input = make_grad_output(*c.grad_input, c.shape.BT, c.shape.H, c.grad_input_layout, 11,
                                    r.initial_input);
  }
  if (c.grad_weight) {
    r.grad_weight = make_grad_output(*c.grad_weight, c.shape.V, c.shape.H, c.grad_weight_layout, 13,
                                     r.initial_weight);
  }
  return r;
}

GradientOutputs outputs_of(GradientResult& r) {
  GradientOutputs o;
  if (r.grad_input) o.grad_input = r.grad_input->matrix_view();
  if (r.grad_weight) o.grad_weight = r.grad_weight->matrix_view();
  return o;
}

GradientResult run_gradient(const GradientCase& c, const PlanOptions& options) {
  const auto plan = plan_gradient(c.shape, c.types(), options);
  if (!plan) {
    ADD_FAILURE() << "plan_gradient: " << plan.error().message;
    return make_gradient_outputs(c);
  }
  EXPECT_EQ(plan->isa(), options.isa.value_or(plan->isa()));
  if (options.workspace_limit_bytes > 0) {
    EXPECT_LE(plan->workspace_bytes(), options.workspace_limit_bytes);
  }
  return run_gradient(c, *plan);
}

GradientResult run_gradient(const GradientCase& c, const GradientPlan& plan) {
  GradientResult result = make_gradient_outputs(c);
  GradientOutputs outputs = outputs_of(result);
  if (c.grad_tolerance > 0) outputs.sparse_counts = &(result.sparse_counts = kOldCounts);
  const auto ran = run(plan, c.operands(), outputs, guarded_workspace(plan.workspace_bytes()));
  if (!ran) ADD_FAILURE() << "gradient: " << ran.error().message;
  EXPECT_EQ(result.damage(), "");
  return result;
}

ReferenceGradient reference_gradient(const GradientCase& c) {
  ReferenceGradient r;
  const auto operands = c.reference_operands();
  if (c.grad_input) r.input = reference::grad_input(operands, c.reference_options());
  if (c.grad_weight) r.weight = reference::grad_weight(operands, c.reference_options());
  return r;
}

void expect_gradient(const GradientCase& c, const GradientResult& result) {
  expect_gradient(c, result, reference_gradient(c));
}

namespace {

void expect_grad(const std::string& name, const TestTensor& got, const reference::Gradient& want,
                 const reference::Matrix& initial, const GradientOutput& output, int64_t terms,
                 double (*allowed)(const reference::GradElement&, double)) {
  Judge judge(name + " as " + logitless::name_of(output.dtype) +
              (output.accumulate ? ", accumulated" : ""));
  const double n = samples(got.rows() * got.cols());
  for (int64_t r = 0; r < got.rows(); ++r) {
    for (int64_t h = 0; h < got.cols(); ++h) {
      const double value = want.value(r, h) + initial(r, h);
      const reference::GradElement element{.value = value,
                                           .deviation = want.deviation(r, h),
                                           .bias = want.bias(r, h),
                                           .initial = initial(r, h),
                                           .terms = static_cast<double>(terms),
                                           .output = output.dtype};
      judge.check(got.get(r, h), value, allowed(element, n), r, h);
    }
  }
}

}  // namespace

void expect_gradient(const GradientCase& c, const GradientResult& result,
                     const ReferenceGradient& want) {
  SCOPED_TRACE(c.describe());
  const std::string suffix = std::string(" ") + c.arithmetic.name;
  if (c.grad_input) {
    expect_grad("grad_input" + suffix, *result.grad_input, *want.input, result.initial_input,
                *c.grad_input, c.shape.V, reference::allowed_grad_input);
  }
  if (c.grad_weight) {
    expect_grad("grad_weight" + suffix, *result.grad_weight, *want.weight, result.initial_weight,
                *c.grad_weight, c.shape.BT, reference::allowed_grad_weight);
  }
}

}  // namespace logitless::test
