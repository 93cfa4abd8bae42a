// SPDX-License-Identifier: Apache-2.0
#include "logitless/gradient.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference/tolerance.h"
#include "tests/support/cases.h"
#include "tests/support/emulation.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

class Gradient : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Gradient);

const std::vector<GradientMode> kModes = {GradientMode::memory_saving,
                                          GradientMode::high_performance};

std::vector<Shape> edge_shapes() {
  std::vector<Shape> shapes;
  for (const int64_t BT : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 27, 28, 29, 57}) {
    shapes.push_back({.BT = BT, .V = 77, .H = 33});
  }
  for (const int64_t V : {0,   1,   2,   7,   8,   9,   15,  16,  17,  31,  32,  33, 127,
                          128, 129, 255, 256, 257, 447, 448, 449, 507, 511, 512, 513}) {
    shapes.push_back({.BT = 15, .V = V, .H = 32});
  }
  for (const int64_t H : {0, 1, 2, 3, 13, 14, 15, 16, 17, 31, 32, 33, 64, 127, 576}) {
    shapes.push_back({.BT = 9, .V = 129, .H = H});
  }
  shapes.push_back({.BT = 29, .V = 513, .H = 65});
  shapes.push_back({.BT = 0, .V = 0, .H = 0});
  shapes.push_back({.BT = 3, .V = 0, .H = 5});
  shapes.push_back({.BT = 0, .V = 4, .H = 5});
  return shapes;
}

TEST_P(Gradient, EverySizeAroundEveryTile) {
  int turn = 0;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape : edge_shapes()) {
      ++turn;
      ForwardCase forward = make_forward_case(
          shape, arithmetic, {.seed = 3, .target_type = turn % 2 ? DType::i64 : DType::i32});
      forward.mask_layout =
          turn % 5 < 3 ? MaskLayout::packed_lsb_first : MaskLayout::byte_per_token;
      if (turn % 4 == 1) forward.rounding = LogitsRounding::operand;
      GradientCase c = make_gradient_case(
          std::move(forward),
          {.mode = kModes[static_cast<size_t>(turn % 3 == 0)], .grad_logsumexp = turn % 5 == 1});
      // Both output types, fresh and accumulated, in turns.
      c.grad_input->dtype = turn % 2 ? arithmetic.operand : DType::f32;
      c.grad_weight->dtype = turn % 4 < 2 ? arithmetic.operand : DType::f32;
      c.grad_input->accumulate = turn % 7 < 3;
      c.grad_weight->accumulate = turn % 8 < 3;
      expect_gradient(c, run_gradient(c, options(1 + turn % 3)));
    }
  }
}

TEST_P(Gradient, EveryKindOfInputInBothModes) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                            InputKind::offset, InputKind::negative}) {
      for (const GradientMode mode : kModes) {
        for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
          ForwardCase forward = make_forward_case({.BT = 31, .V = 300, .H = 48}, arithmetic,
                                                  {.kind = kind, .outside = 0.1});
          forward.rounding = rounding;
          GradientCase c = make_gradient_case(std::move(forward), {.mode = mode});
          expect_gradient(c, run_gradient(c, options()));
        }
      }
    }
  }
}

TEST_P(Gradient, EveryOutputTypeFreshAndAccumulated) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    GradientCase c =
        make_gradient_case(make_forward_case({.BT = 30, .V = 99, .H = 37}, arithmetic));
    for (const DType input : {arithmetic.operand, DType::f32}) {
      for (const DType weight : {arithmetic.operand, DType::f32}) {
        for (const bool accumulate_input : {false, true}) {
          for (const bool accumulate_weight : {false, true}) {
            c.grad_input = {.dtype = input, .accumulate = accumulate_input};
            c.grad_weight = {.dtype = weight, .accumulate = accumulate_weight};
            expect_gradient(c, run_gradient(c, options()));
          }
        }
      }
    }
  }
}

TEST_P(Gradient, EitherOutputMayBeAbsentWithoutChangingTheOther) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const GradientMode mode : kModes) {
      GradientCase c = make_gradient_case(
          make_forward_case({.BT = 30, .V = 99, .H = 37}, arithmetic), {.mode = mode});
      const GradientResult both = run_gradient(c, options());
      const auto weight = c.grad_weight;
      c.grad_weight.reset();
      EXPECT_EQ(run_gradient(c, options()).grad_input->all_bits(), both.grad_input->all_bits());
      c.grad_weight = weight;
      c.grad_input.reset();
      EXPECT_EQ(run_gradient(c, options()).grad_weight->all_bits(), both.grad_weight->all_bits());
    }
  }
}

TEST_P(Gradient, EveryLayoutOfEveryMatrix) {
  const Shape shape{.BT = 17, .V = 67, .H = 37};
  const auto layouts = all_layouts();
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (size_t i = 0; i < layouts.size(); ++i) {
      for (size_t j = 0; j < layouts.size(); ++j) {
        const GradientMode mode = kModes[(i + j) % 2];
        GradientCase c = make_gradient_case(
            make_forward_case(shape, arithmetic, {.input = layouts[i], .weight = layouts[j]}),
            {.mode = mode, .grad_logsumexp = true, .softmax = layouts[i], .vector_stride = 2});
        c.grad_input_layout = layouts[j];
        c.grad_weight_layout = layouts[i];
        c.grad_input->accumulate = i % 2 == 0;
        if (j % 3 == 0) c.grad_weight->dtype = DType::f32;
        expect_gradient(c, run_gradient(c, options()));
      }
    }
  }
}

// The bits of the same operands as real copies. (The allowed error takes roundings as independent;
// those of equal rows are not.)
TEST_P(Gradient, ZeroStridesOfInputs) {
  const Shape shape{.BT = 17, .V = 67, .H = 37};
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Layout& zero : {Layout{.zero_rows = true}, Layout{.zero_cols = true}}) {
      for (const bool of_input : {true, false}) {
        GradientCase c = make_gradient_case(
            make_forward_case(shape, arithmetic,
                              of_input ? CaseOptions{.input = zero} : CaseOptions{.weight = zero}));
        const auto bits = run_gradient(c, options()).bits();
        c.input = c.input.contiguous_copy();
        c.weight = c.weight.contiguous_copy();
        const GradientResult copied = run_gradient(c, options());
        EXPECT_EQ(copied.bits(), bits);
        if (of_input || zero.zero_cols) expect_gradient(c, copied);
      }
    }
    // One gradient for all tokens, as of a sum.
    GradientCase c = make_gradient_case(make_forward_case(shape, arithmetic), {.zero_grad = 0});
    c.grad = TestTensor::vector(DType::f32, shape.BT, 0);
    c.grad.set(0, 0.3);
    const GradientResult r = run_gradient(c, options());
    expect_gradient(c, r);
    c.grad = c.grad.contiguous_copy();
    EXPECT_EQ(run_gradient(c, options()).bits(), r.bits());
  }
}

// ---- each optional argument changes the result, and as the definition says --------------------

TEST_P(Gradient, GradLogsumexpCounts) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const GradientMode mode : kModes) {
      GradientCase with =
          make_gradient_case(make_forward_case({.BT = 20, .V = 90, .H = 24}, arithmetic),
                             {.mode = mode, .grad_logsumexp = true});
      // A row whose grad alone is 0 still contributes.
      with.grad.set(3, 0.0);
      with.grad_logsumexp->set(3, 0.7);
      const GradientResult r = run_gradient(with, options());
      expect_gradient(with, r);
      with.grad_logsumexp.reset();
      const GradientResult without = run_gradient(with, options());
      expect_gradient(with, without);
      EXPECT_NE(r.grad_input->all_bits(), without.grad_input->all_bits());
      EXPECT_NE(r.grad_weight->all_bits(), without.grad_weight->all_bits());
    }
  }
}

TEST_P(Gradient, TheMaskCounts) {
  GradientCase c = make_gradient_case(
      make_forward_case({.BT = 20, .V = 90, .H = 24}, all_arithmetics()[1], {.outside = 0.5}));
  const GradientResult masked = run_gradient(c, options());
  expect_gradient(c, masked);
  // Absent: every target is inside, so also those that the mask had put at local index 0.
  c.target_mask.reset();
  const GradientResult inside = run_gradient(c, options());
  expect_gradient(c, inside);
  EXPECT_NE(masked.grad_input->all_bits(), inside.grad_input->all_bits());
}

TEST_P(Gradient, RowsThatDoNotCountAreZeroAndUnreadWhateverTheyHold) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const GradientMode mode : kModes) {
      for (const bool by_counts : {true, false}) {
        const Shape shape{.BT = 37, .V = 150, .H = 24};
        const auto dropped = [](int64_t b) { return b % 3 == 1 || (b > 8 && b < 20); };
        GradientCase c = make_gradient_case(make_forward_case(shape, arithmetic),
                                            {.mode = mode, .zero_grad = 0});
        if (by_counts) c.counts = TestTensor::vector(DType::u8, shape.BT, 2);
        for (int64_t b = 0; b < shape.BT; ++b) {
          if (by_counts) c.counts->set_index(b, dropped(b) ? 0 : 1 + b % 255);
          if (!dropped(b)) continue;
          // Minus zero is zero.
          c.grad.set(b, by_counts ? NAN : (b % 2 ? 0.0 : -0.0));
          c.logits_max.set(b, NAN);
          c.sum_exp_logits.set(b, 0.0);
          c.masked_target.set_index(b, int64_t{1} << 30);
          for (int64_t h = 0; h < shape.H; ++h) c.input.set(b, h, h % 2 ? NAN : INFINITY);
          for (int64_t v = 0; c.softmax && v < shape.V; ++v) c.softmax->set(b, v, NAN);
        }
        const GradientResult r = run_gradient(c, options());
        expect_gradient(c, r);
        for (int64_t b = 0; b < shape.BT; ++b) {
          for (int64_t h = 0; dropped(b) && h < shape.H; ++h) {
            EXPECT_EQ(r.grad_input->get(b, h), 0.0);
          }
        }
      }
    }
  }
}

TEST_P(Gradient, RowsThatDoNotCountKeepWhatIsAccumulatedInto) {
  GradientCase c = make_gradient_case(
      make_forward_case({.BT = 25, .V = 80, .H = 20}, all_arithmetics()[1]), {.zero_grad = 0.5});
  c.grad_input->accumulate = c.grad_weight->accumulate = true;
  const GradientResult before = make_gradient_outputs(c);
  const GradientResult r = run_gradient(c, options());
  expect_gradient(c, r);
  for (int64_t b = 0; b < 25; ++b) {
    if (c.grad.get(b) == 0.0) {
      EXPECT_EQ(r.grad_input->row_bits(b), before.grad_input->row_bits(b));
    }
  }
}

TEST_P(Gradient, NoRowCounts) {
  for (const bool accumulate : {false, true}) {
    GradientCase c = make_gradient_case(
        make_forward_case({.BT = 25, .V = 80, .H = 20}, all_arithmetics()[1]), {.zero_grad = 1.0});
    c.grad_input->accumulate = c.grad_weight->accumulate = accumulate;
    const GradientResult before = make_gradient_outputs(c);
    const GradientResult r = run_gradient(c, options());
    if (accumulate) {
      EXPECT_EQ(r.bits(), before.bits());
    } else {
      for (const double value : r.grad_weight->values()) EXPECT_EQ(value, 0.0);
    }
    expect_gradient(c, r);
  }
}

TEST_P(Gradient, EmptySizesStillWriteZeros) {
  for (const Shape& shape : {Shape{.BT = 0, .V = 6, .H = 4}, Shape{.BT = 6, .V = 0, .H = 4},
                             Shape{.BT = 6, .V = 4, .H = 0}}) {
    GradientCase c = make_gradient_case(make_forward_case(shape, all_arithmetics()[1]));
    const GradientResult r = run_gradient(c, options());
    for (const double value : r.grad_input->values()) EXPECT_EQ(value, 0.0);
    for (const double value : r.grad_weight->values()) EXPECT_EQ(value, 0.0);
  }
}

// ---- LogitsRounding ---------------------------------------------------------------------------

TEST_P(Gradient, InferRoundsExactlyTheRowsWhoseMaximumIsRepresentable) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    if (arithmetic.multiplied() == DType::f32) continue;
    // Statistics of rounded logits: every maximum is representable.
    ForwardCase rounded =
        make_forward_case({.BT = 24, .V = 120, .H = 40}, arithmetic, {.kind = InputKind::certain});
    rounded.rounding = LogitsRounding::operand;
    GradientCase c = make_gradient_case(std::move(rounded));
    const auto as_operand = run_gradient(c, options()).bits();
    c.rounding = LogitsRounding::infer;
    const GradientResult inferred = run_gradient(c, options());
    EXPECT_EQ(inferred.bits(), as_operand);
    expect_gradient(c, inferred);
    c.rounding = LogitsRounding::none;
    EXPECT_NE(run_gradient(c, options()).bits(), as_operand);

    // Statistics of unrounded logits: none is.
    GradientCase plain = make_gradient_case(
        make_forward_case({.BT = 24, .V = 120, .H = 40}, arithmetic, {.kind = InputKind::certain}));
    const auto as_none = run_gradient(plain, options()).bits();
    plain.rounding = LogitsRounding::infer;
    EXPECT_EQ(run_gradient(plain, options()).bits(), as_none);

    // Both kinds in one call: row by row.
    ForwardCase other =
        make_forward_case({.BT = 24, .V = 120, .H = 40}, arithmetic, {.kind = InputKind::certain});
    other.rounding = LogitsRounding::operand;
    const reference::Statistics s = reference_forward(other);
    for (size_t b = 0; b < 24; b += 2) {
      plain.logits_max.set(static_cast<int64_t>(b), s.logits_max.value[b]);
      plain.sum_exp_logits.set(static_cast<int64_t>(b), s.sum_exp_logits.value[b]);
    }
    expect_gradient(plain, run_gradient(plain, options()));
  }
}

// A token predicted with p near 1, its logit at 30: with the rounding of its statistics the
// gradient is as small as it should be; with the other it would be off by several per cent of grad.
TEST_P(Gradient, ACertainTokenHasNoSpuriousGradient) {
  ForwardCase forward = make_forward_case({.BT = 16, .V = 64, .H = 32}, all_arithmetics()[1],
                                          {.kind = InputKind::certain, .outside = 0});
  forward.rounding = LogitsRounding::operand;
  GradientCase c = make_gradient_case(std::move(forward), {.zero_grad = 0});
  c.rounding = LogitsRounding::infer;
  c.grad_input = {.dtype = DType::f32};
  const GradientResult r = run_gradient(c, options());
  expect_gradient(c, r);
}

// ---- inputs that hunt -------------------------------------------------------------------------

TEST_P(Gradient, NaNStaysInItsRowOfGradInput) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    const Shape shape{.BT = 30, .V = 200, .H = 24};
    const GradientCase clean = make_gradient_case(make_forward_case(shape, arithmetic));
    GradientCase c = make_gradient_case(make_forward_case(shape, arithmetic));
    c.input.set(11, 5, NAN);
    c.grad.set(11, 1.0);
    const GradientResult r = run_gradient(c, options());
    const GradientResult want = run_gradient(clean, options());
    for (int64_t b = 0; b < shape.BT; ++b) {
      if (b == 11) {
        for (int64_t h = 0; h < shape.H; ++h) EXPECT_TRUE(std::isnan(r.grad_input->get(b, h)));
      } else {
        EXPECT_EQ(r.grad_input->row_bits(b), want.grad_input->row_bits(b)) << b;
      }
    }
  }
}

TEST_P(Gradient, LogitsOfMinusInfinityGiveNoGradient) {
  // Finite weights whose logits overflow to -inf: exp gives 0, nothing else happens.
  for (const GradientMode mode : kModes) {
    ForwardCase forward =
        make_forward_case({.BT = 12, .V = 90, .H = 16}, all_arithmetics()[2], {.outside = 0});
    GradientCase c = make_gradient_case(std::move(forward), {.mode = mode});
    for (int64_t b = 0; b < 12; ++b) c.input.set(b, 0, 1e30);
    for (int64_t v = 0; v < 90; ++v) {
      c.weight.set(v, 0, v % 4 == 1 ? -1e30 : 0.0);
    }
    for (int64_t b = 0; b < 12; ++b) {
      if (c.masked_target.get_index(b) % 4 == 1) c.grad.set(b, 0.0);
      for (int64_t v = 1; c.softmax && v < 90; v += 4) c.softmax->set(b, v, 0.0);
    }
    c.grad_weight = GradientOutput{.dtype = DType::f32};
    const GradientResult r = run_gradient(c, options());
    for (const double value : r.grad_input->values()) EXPECT_TRUE(std::isfinite(value));
    for (int64_t v = 1; v < 90; v += 4) {
      for (int64_t h = 0; h < 16; ++h) EXPECT_EQ(r.grad_weight->get(v, h), 0.0) << v;
    }
  }
}

// p / N is below fp16's least number: the scale of each row keeps it.
TEST_P(Gradient, TinyAndHugeGradientsLoseNothing) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const double scale : {0x1p-40, 0x1p-24, 1e-9, 1e6}) {
      for (const GradientMode mode : kModes) {
        GradientCase c =
            make_gradient_case(make_forward_case({.BT = 25, .V = 200, .H = 24}, arithmetic),
                               {.mode = mode, .grad_scale = scale});
        c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
        expect_gradient(c, run_gradient(c, options()));
      }
    }
    // Rows of very different size in one call; a common scale would lose the small ones.
    GradientCase c = make_gradient_case(
        make_forward_case({.BT = 25, .V = 200, .H = 24}, arithmetic), {.zero_grad = 0});
    for (int64_t b = 0; b < 25; ++b) c.grad.set(b, std::ldexp(1.0, static_cast<int>(-3 * b)));
    c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
    expect_gradient(c, run_gradient(c, options()));
  }
}

TEST_P(Gradient, TheMaximumOfOtherShardsMayBeFarAbove) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    GradientCase c =
        make_gradient_case(make_forward_case({.BT = 25, .V = 200, .H = 24}, arithmetic));
    for (int64_t b = 0; b < 25; ++b) {
      // 3 to 200 above: softmax goes from small to nothing.
      const double above = 3.0 + 8.0 * static_cast<double>(b);
      c.logits_max.set(b, c.logits_max.get(b) + above);
      c.sum_exp_logits.set(b, 1.0 + c.sum_exp_logits.get(b) * std::exp(-above));
    }
    expect_gradient(c, run_gradient(c, options()));
  }
}

// Rounded to the operands' type once, also where the instruction set multiplies that type as fp32.
// Seen through an identity for weight, grad_input is grad_logits.
TEST_P(Gradient, GradLogitsAreRoundedToTheOperandTypeOnEveryInstructionSet) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    const DType multiplied = arithmetic.multiplied();
    for (const int64_t BT : {1, 3, 20}) {
      for (const GradientMode mode : kModes) {
        ForwardCase forward = make_forward_case({.BT = BT, .V = 48, .H = 48}, arithmetic);
        for (int64_t v = 0; v < 48; ++v) {
          for (int64_t h = 0; h < 48; ++h) forward.weight.set(v, h, v == h ? 1.0 : 0.0);
        }
        GradientCase c = make_gradient_case(std::move(forward), {.mode = mode, .zero_grad = 0});
        c.grad_input = {.dtype = DType::f32};
        c.grad_weight.reset();
        const GradientResult r = run_gradient(c, options());
        expect_gradient(c, r);
        int unrounded = 0;
        for (int64_t b = 0; b < BT; ++b) {
          // fp16 in the row's own scale.
          const int scale = multiplied == DType::f16 ? -std::ilogb(c.grad.get(b)) : 0;
          for (int64_t v = 0; v < 48; ++v) {
            const double g = std::ldexp(r.grad_input->get(b, v), scale);
            unrounded +=
                reference::round_to(multiplied == DType::f32 ? DType::bf16 : multiplied, g) != g;
          }
        }
        if (multiplied == DType::f32) {
          EXPECT_GT(unrounded, 0) << arithmetic.name;
        } else {
          EXPECT_EQ(unrounded, 0) << arithmetic.name;
        }
      }
    }
  }
}

// ---- error rule -------------------------------------------------------------------------------

// At most twice the error of what a framework computes in the same type, plus the floor that the
// definition's tolerance has for the two.
TEST_P(Gradient, ErrorIsAtMostTwiceAFrameworks) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat}) {
      GradientCase c = make_gradient_case(
          make_forward_case({.BT = 64, .V = 500, .H = 96}, arithmetic, {.kind = kind}),
          {.zero_grad = 0});
      c.grad_input = c.grad_weight = GradientOutput{.dtype = arithmetic.multiplied()};
      if (arithmetic.multiply) c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
      const GradientResult ours = run_gradient(c, options());
      const EagerResult theirs = eager(c);
      const ReferenceGradient want = reference_gradient(c);
      const auto compare = [&](const TestTensor& got, const reference::Matrix& eager_value,
                               const reference::Gradient& exact, const char* name) {
        double our_worst = 0, their_worst = 0, our_squares = 0, their_squares = 0, largest = 0;
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
      compare(*ours.grad_input, theirs.grad_input, *want.input, "grad_input");
      compare(*ours.grad_weight, theirs.grad_weight, *want.weight, "grad_weight");
    }
  }
}

}  // namespace
}  // namespace logitless::test
