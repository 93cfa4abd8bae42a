// SPDX-License-Identifier: Apache-2.0
// Laws that hold for any input, tried on random ones: sharded equals whole, merging in any grouping
// agrees to rounding, a row of grad_logits sums to zero over all shards, a constant added to a
// row's logits changes no gradient.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "logitless/loss.h"
#include "reference/tolerance.h"
#include "tests/support/cases.h"

namespace logitless::test {
namespace {

struct Problem {
  Shape shape;
  Arithmetic arithmetic;
  InputKind kind = InputKind::peaked;
  uint64_t seed = 0;
  PlanOptions options;
  std::vector<int64_t> cuts;  // ascending, in [0, V]
};

Problem any_problem() {
  Problem p;
  p.shape = {.BT = *rc::gen::inRange<int64_t>(1, 40),
             .V = *rc::gen::inRange<int64_t>(1, 400),
             .H = *rc::gen::inRange<int64_t>(2, 70)};
  const auto arithmetics = all_arithmetics();
  p.arithmetic = arithmetics[*rc::gen::inRange<size_t>(0, arithmetics.size())];
  p.kind = *rc::gen::element(InputKind::peaked, InputKind::flat, InputKind::certain,
                             InputKind::offset, InputKind::negative);
  p.seed = *rc::gen::inRange<uint64_t>(0, 1 << 20);
  const auto isas = usable_isas();
  p.options.isa = isas[*rc::gen::inRange<size_t>(0, isas.size())];
  p.options.threads = *rc::gen::inRange(1, 3);
  const int shards = *rc::gen::inRange(1, 8);
  for (int i = 1; i < shards; ++i) p.cuts.push_back(*rc::gen::inRange<int64_t>(0, p.shape.V + 1));
  std::sort(p.cuts.begin(), p.cuts.end());
  return p;
}

ForwardCase whole_of(const Problem& p) {
  return make_forward_case(p.shape, p.arithmetic, {.kind = p.kind, .seed = p.seed, .outside = 0.1});
}

// Statistics of one shard, vocabulary rows [first, last) of the whole; the operands are views into
// the whole's.
struct ShardRun {
  TestTensor max, sum, predicted, mask, masked_target;
  ShardStatistics views() const {
    return {max.vector_view(), sum.vector_view(), predicted.vector_view(),
            mask.mask_view(MaskLayout::byte_per_token, max.rows())};
  }
};

ConstMatrixView rows_of(const TestTensor& weight, int64_t first, int64_t last) {
  ConstMatrixView view = weight.matrix_view();
  view.data =
      static_cast<const std::byte*>(view.data) + first * view.row_stride * size_of(view.dtype);
  view.rows = last - first;
  return view;
}

ShardRun run_shard(const ForwardCase& whole, int64_t first, int64_t last,
                   const PlanOptions& options) {
  const int64_t BT = whole.shape.BT;
  ShardRun r{TestTensor::vector(DType::f32, BT), TestTensor::vector(DType::f32, BT),
             TestTensor::vector(DType::f32, BT), TestTensor::vector(DType::u8, BT),
             TestTensor::vector(DType::i64, BT)};
  ForwardOperands in = whole.operands();
  in.weight = rows_of(whole.weight, first, last);
  in.vocab_start_index = first;
  const auto plan =
      plan_forward({.BT = BT, .V = last - first, .H = whole.shape.H}, whole.types(), options);
  RC_ASSERT(static_cast<bool>(plan));
  ForwardOutputs out{r.max.vector_view(), r.sum.vector_view(), r.predicted.vector_view()};
  out.target_mask = r.mask.mask_view(MaskLayout::byte_per_token, BT);
  out.masked_target = r.masked_target.vector_view();
  RC_ASSERT(static_cast<bool>(run(*plan, in, out, guarded_workspace(plan->workspace_bytes()))));
  return r;
}

std::vector<ShardRun> run_shards(const Problem& p, const ForwardCase& whole) {
  std::vector<ShardRun> shards;
  int64_t first = 0;
  std::vector<int64_t> ends = p.cuts;
  ends.push_back(p.shape.V);
  for (const int64_t last : ends) {
    shards.push_back(run_shard(whole, first, last, p.options));
    first = last;
  }
  return shards;
}

struct Merged {
  std::vector<float> max, sum, predicted;
  std::vector<uint8_t> mask;
  explicit Merged(int64_t BT) : max(BT), sum(BT), predicted(BT), mask(BT) {}
  ShardStatistics views() const {
    return {
        vector_view<float>(std::span<const float>(max)),
        vector_view<float>(std::span<const float>(sum)),
        vector_view<float>(std::span<const float>(predicted)),
        ConstMaskView(mask.data(), static_cast<int64_t>(mask.size()), MaskLayout::byte_per_token)};
  }
};

Merged merge_of(std::span<const ShardStatistics> shards, int64_t BT, const PlanOptions& options) {
  Merged m(BT);
  MergeOutputs out{vector_view<float>(std::span<float>(m.max)),
                   vector_view<float>(std::span<float>(m.sum)),
                   vector_view<float>(std::span<float>(m.predicted))};
  out.target_mask = MaskView{m.mask.data(), BT, MaskLayout::byte_per_token, 1};
  const auto plan = plan_merge(BT, static_cast<int64_t>(shards.size()), options);
  RC_ASSERT(static_cast<bool>(plan));
  RC_ASSERT(static_cast<bool>(run(*plan, shards, out)));
  return m;
}

std::vector<ShardStatistics> views_of(const std::vector<ShardRun>& shards) {
  std::vector<ShardStatistics> views;
  for (const ShardRun& s : shards) views.push_back(s.views());
  return views;
}

// Log-sum-exp and loss are what both ways must agree in; the maximum is exact.
bool agree(const Merged& a, const Merged& b, size_t i, double parts) {
  const double allowed = reference::kMargin * 0x1p-23 * (8.0 + 4.0 * parts);
  const double lse_a = std::log(a.sum[i]), lse_b = std::log(b.sum[i]);
  const double predicted_allowed = 0x1p-23 * (1.0 + std::abs(static_cast<double>(a.predicted[i])));
  return a.max[i] == b.max[i] && std::abs(lse_a - lse_b) <= allowed &&
         std::abs(static_cast<double>(a.predicted[i]) - b.predicted[i]) <= predicted_allowed &&
         (a.mask[i] != 0) == (b.mask[i] != 0);
}

// A logit has the same bits in any shard, so only the merge's own roundings are between the two.
RC_GTEST_PROP(Invariants, ShardedEqualsWhole, ()) {
  const Problem p = any_problem();
  const ForwardCase whole = whole_of(p);
  const auto shards = run_shards(p, whole);
  const Merged merged = merge_of(views_of(shards), p.shape.BT, p.options);
  const ShardRun one = run_shard(whole, 0, p.shape.V, p.options);
  const std::vector<ShardStatistics> alone{one.views()};
  const Merged want = merge_of(alone, p.shape.BT, p.options);
  for (int64_t b = 0; b < p.shape.BT; ++b) {
    const double parts = static_cast<double>(shards.size()) +
                         static_cast<double>(p.shape.V) / reference::kSegment * 4 +
                         std::sqrt(static_cast<double>(p.shape.V));
    RC_ASSERT(agree(merged, want, static_cast<size_t>(b), parts));
  }
}

RC_GTEST_PROP(Invariants, MergingIsIndependentOfGroupingToRounding, ()) {
  const Problem p = any_problem();
  const ForwardCase whole = whole_of(p);
  const auto shards = run_shards(p, whole);
  const auto views = views_of(shards);
  const Merged flat = merge_of(views, p.shape.BT, p.options);
  const auto split = *rc::gen::inRange<size_t>(0, views.size() + 1);
  std::vector<Merged> parts;
  if (split > 0) {
    parts.push_back(merge_of(std::span(views).first(split), p.shape.BT, p.options));
  }
  if (split < views.size()) {
    parts.push_back(merge_of(std::span(views).subspan(split), p.shape.BT, p.options));
  }
  std::vector<ShardStatistics> grouped;
  for (const Merged& m : parts) grouped.push_back(m.views());
  const Merged nested = merge_of(grouped, p.shape.BT, p.options);
  for (int64_t b = 0; b < p.shape.BT; ++b) {
    RC_ASSERT(agree(nested, flat, static_cast<size_t>(b), static_cast<double>(views.size())));
  }
}

// grad_input with weights of one makes every element the sum of the row's grad_logits over the
// shard; over all shards these sum to 0 where the target is somewhere. Softmax is given: in
// memory-saving mode the same weights would make the logits.
RC_GTEST_PROP(Invariants, RowsOfGradLogitsSumToZeroOverAllShards, ()) {
  const Problem p = any_problem();
  ForwardCase forward = whole_of(p);
  for (int64_t b = 0; b < p.shape.BT; ++b) {
    forward.target.set_index(b, b * 31 % p.shape.V);  // inside
  }
  const GradientCase whole = make_gradient_case(
      std::move(forward), {.mode = GradientMode::high_performance, .seed = p.seed});
  const int64_t BT = p.shape.BT, H = 3;
  std::vector<double> sums(static_cast<size_t>(BT), 0.0);
  int64_t first = 0;
  std::vector<int64_t> ends = p.cuts;
  ends.push_back(p.shape.V);
  for (const int64_t last : ends) {
    const int64_t V = last - first;
    TestTensor ones = TestTensor::matrix(p.arithmetic.operand, V, H);
    TestTensor input = TestTensor::matrix(p.arithmetic.operand, BT, H);
    TestTensor target = TestTensor::vector(DType::i64, BT),
               mask = TestTensor::vector(DType::u8, BT);
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t v = 0; v < V; ++v) ones.set(v, h, 1.0);
      for (int64_t b = 0; b < BT; ++b) input.set(b, h, 1.0);
    }
    for (int64_t b = 0; b < BT; ++b) {
      const int64_t id = whole.masked_target.get_index(b);
      const bool inside = id >= first && id < last;
      mask.set_index(b, inside ? 0 : 1);
      target.set_index(b, inside ? id - first : 0);
    }
    GradientTypes types{.operand = p.arithmetic.operand,
                        .multiply = p.arithmetic.multiply,
                        .mode = GradientMode::high_performance};
    types.grad_input = GradientOutput{.dtype = DType::f32};
    types.grad_weight.reset();
    TestTensor out = TestTensor::matrix(DType::f32, BT, H);
    GradientOperands in;
    in.grad = whole.grad.vector_view();
    in.input = input.matrix_view();
    in.weight = ones.matrix_view();
    in.target_mask = mask.mask_view(MaskLayout::byte_per_token, BT);
    in.masked_target = target.vector_view();
    ConstMatrixView softmax = whole.softmax->matrix_view();
    softmax.data = static_cast<const float*>(softmax.data) + first * softmax.col_stride;
    softmax.cols = V;
    in.softmax = softmax;
    const auto plan = plan_gradient({.BT = BT, .V = V, .H = H}, types, p.options);
    RC_ASSERT(static_cast<bool>(plan));
    RC_ASSERT(static_cast<bool>(run(*plan, in, {.grad_input = out.matrix_view()},
                                    guarded_workspace(plan->workspace_bytes()))));
    for (int64_t b = 0; b < BT; ++b) {
      sums[static_cast<size_t>(b)] += out.get(b, b % H);
      RC_ASSERT(out.get(b, 0) == out.get(b, H - 1));
    }
    first = last;
  }
  for (int64_t b = 0; b < BT; ++b) {
    // Each element is rounded to the multiplied type once: half an ulp of it, and of one for the
    // target's.
    const double grad = std::abs(whole.grad.get(b));
    const double V = static_cast<double>(p.shape.V);
    const double allowed =
        2.0 * grad * reference::unit_roundoff(p.arithmetic.multiplied()) +
        grad * V * (reference::grad_logits_underflow(p.arithmetic.multiplied(), 1.0) + 0x1p-24);
    // The softmax that was given, in floats, sums to nearly one.
    double mass = 0.0;
    for (int64_t v = 0; v < p.shape.V; ++v) mass += whole.softmax->get(b, v);
    const double given = std::abs(mass - 1.0) * grad;
    RC_ASSERT(std::abs(sums[static_cast<size_t>(b)]) <= given + allowed);
  }
}

// A constant on every logit of a row: one more hidden dimension whose weight is 1 everywhere and
// whose input is the constant. Small integers are exact in every type, and powers of two added to
// logits cost at most the spacing there.
RC_GTEST_PROP(Invariants, AConstantAddedToARowsLogitsChangesNoGradient, ()) {
  Problem p = any_problem();
  p.kind = *rc::gen::element(InputKind::peaked, InputKind::flat);
  const double constant = *rc::gen::inRange(-16, 17);
  const int64_t BT = p.shape.BT, V = p.shape.V, H = p.shape.H;
  std::optional<GradientResult> results[2];
  std::optional<GradientCase> cases[2];
  for (const int shifted : {0, 1}) {
    ForwardCase c = whole_of(p);
    for (int64_t b = 0; b < BT; ++b) c.input.set(b, H - 1, shifted ? constant : 0.0);
    for (int64_t v = 0; v < V; ++v) c.weight.set(v, H - 1, 1.0);
    cases[shifted].emplace(make_gradient_case(std::move(c), {.seed = p.seed}));
    cases[shifted]->grad_input = GradientOutput{.dtype = DType::f32};
    cases[shifted]->grad_weight.reset();
    results[shifted].emplace(run_gradient(*cases[shifted], p.options));
  }
  const ReferenceGradient plain = reference_gradient(*cases[0]);
  const ReferenceGradient moved = reference_gradient(*cases[1]);
  const double n = static_cast<double>(BT * H);
  for (int64_t b = 0; b < BT; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const auto allowed = [&](const reference::Gradient& g) {
        return reference::allowed_grad_input({.value = g.value(b, h),
                                              .deviation = g.deviation(b, h),
                                              .bias = g.bias(b, h),
                                              .terms = static_cast<double>(V)},
                                             n);
      };
      const double difference =
          std::abs(results[0]->grad_input->get(b, h) - results[1]->grad_input->get(b, h));
      // The definition itself moves by the float rounding of the statistics it is given.
      const double definition = std::abs(plain.input->value(b, h) - moved.input->value(b, h));
      RC_ASSERT(definition <= allowed(*plain.input) + allowed(*moved.input));
      RC_ASSERT(difference <= definition + allowed(*plain.input) + allowed(*moved.input));
    }
  }
}

// Given one shard of all, or shards of any cut with the merged statistics: grad_input partials sum
// to the whole's, grad_weight rows are the whole's.
RC_GTEST_PROP(Invariants, GradientsOfShardsMakeTheWholes, ()) {
  const Problem p = any_problem();
  GradientCase whole = make_gradient_case(whole_of(p), {.seed = p.seed});
  whole.grad_input = whole.grad_weight = GradientOutput{.dtype = DType::f32};
  const GradientResult want = run_gradient(whole, p.options);
  const ReferenceGradient exact = reference_gradient(whole);
  const int64_t BT = p.shape.BT, V = p.shape.V, H = p.shape.H;
  const std::vector<uint8_t> mask = reference::read(*whole.operands().target_mask);
  // Accumulated shard by shard into one float buffer: also the reduction of a real run.
  TestTensor input_sum = TestTensor::matrix(DType::f32, BT, H);
  for (int64_t b = 0; b < BT; ++b) {
    for (int64_t h = 0; h < H; ++h) input_sum.set(b, h, 0.0);
  }
  int64_t first = 0;
  std::vector<int64_t> ends = p.cuts;
  ends.push_back(V);
  for (const int64_t last : ends) {
    TestTensor target = TestTensor::vector(DType::i64, BT),
               outside = TestTensor::vector(DType::u8, BT);
    for (int64_t b = 0; b < BT; ++b) {
      const int64_t id = whole.masked_target.get_index(b);
      const bool inside = !mask[static_cast<size_t>(b)] && id >= first && id < last;
      outside.set_index(b, inside ? 0 : 1);
      target.set_index(b, inside ? id - first : 0);
    }
    GradientOperands in = whole.operands();
    in.weight = rows_of(whole.weight, first, last);
    in.target_mask = outside.mask_view(MaskLayout::byte_per_token, BT);
    in.masked_target = target.vector_view();
    GradientTypes types = whole.types();
    types.target = DType::i64;
    types.grad_input->accumulate = true;
    TestTensor weight = TestTensor::matrix(DType::f32, last - first, H);
    const auto plan = plan_gradient({.BT = BT, .V = last - first, .H = H}, types, p.options);
    RC_ASSERT(static_cast<bool>(plan));
    RC_ASSERT(static_cast<bool>(
        run(*plan, in, {.grad_input = input_sum.matrix_view(), .grad_weight = weight.matrix_view()},
            guarded_workspace(plan->workspace_bytes()))));
    for (int64_t v = first; v < last; ++v) {
      RC_ASSERT(weight.row_bits(v - first) == want.grad_weight->row_bits(v));
    }
    first = last;
  }
  // One running sum in ascending order, cut or not. A cut at an odd row pairs other rows with each
  // other where products are added in pairs, so to rounding only.
  for (int64_t b = 0; b < BT; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const double allowed =
          reference::allowed_grad_input({.value = exact.input->value(b, h),
                                         .deviation = exact.input->deviation(b, h),
                                         .bias = exact.input->bias(b, h),
                                         .terms = static_cast<double>(V)},
                                        static_cast<double>(BT * H));
      RC_ASSERT(std::abs(input_sum.get(b, h) - exact.input->value(b, h)) <= allowed);
    }
  }
}

}  // namespace
}  // namespace logitless::test
