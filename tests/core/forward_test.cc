// SPDX-License-Identifier: Apache-2.0
#include "logitless/forward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/support/cases.h"
#include "tests/support/emulation.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

class Forward : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Forward);

// One below, at and above every tile, panel and segment of any instruction set.
const std::vector<int64_t> kTokens = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 27, 28, 29, 57};
const std::vector<int64_t> kVocabulary = {0,   1,   2,   7,   8,   9,   15,  16,  17,
                                          31,  32,  33,  127, 128, 129, 255, 256, 257,
                                          447, 448, 449, 507, 511, 512, 513};
const std::vector<int64_t> kHidden = {0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 127, 576};

// Each size of one dimension at ordinary sizes of the others.
std::vector<Shape> edge_shapes() {
  std::vector<Shape> shapes;
  for (const int64_t BT : kTokens) shapes.push_back({.BT = BT, .V = 77, .H = 33});
  for (const int64_t V : kVocabulary) shapes.push_back({.BT = 15, .V = V, .H = 32});
  for (const int64_t H : kHidden) shapes.push_back({.BT = 9, .V = 129, .H = H});
  shapes.push_back({.BT = 29, .V = 513, .H = 65});
  shapes.push_back({.BT = 0, .V = 0, .H = 0});
  shapes.push_back({.BT = 3, .V = 0, .H = 0});
  return shapes;
}

TEST_P(Forward, EverySizeAroundEveryTile) {
  int turn = 0;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape : edge_shapes()) {
      // The small choices take turns, each meets each size of some type.
      ++turn;
      ForwardCase c = make_forward_case(shape, arithmetic,
                                        {.seed = 3,
                                         .target_type = turn % 2 ? DType::i64 : DType::i32,
                                         .vocab_start = turn % 3 == 0 ? 0 : 5000});
      c.mask_layout = turn % 5 < 3 ? MaskLayout::packed_lsb_first : MaskLayout::byte_per_token;
      if (turn % 4 == 1) c.rounding = LogitsRounding::operand;
      if (turn % 7 == 2) c.logits = DType::f32;
      if (turn % 7 == 5) c.logits = arithmetic.operand;
      expect_forward(c, run_forward(c, options(1 + turn % 3)));
    }
  }
}

TEST_P(Forward, EveryKindOfInput) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                            InputKind::offset, InputKind::negative, InputKind::minus_inf}) {
      for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
        ForwardCase c = make_forward_case({.BT = 31, .V = 700, .H = 48}, arithmetic,
                                          {.kind = kind, .outside = 0.1});
        c.rounding = rounding;
        expect_forward(c, run_forward(c, options()));
      }
    }
  }
}

TEST_P(Forward, EveryLayoutOfEveryOperand) {
  const Shape shape{.BT = 17, .V = 67, .H = 37};
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Layout& input : all_layouts()) {
      for (const Layout& weight : all_layouts()) {
        ForwardCase c = make_forward_case(shape, arithmetic,
                                          {.input = input, .weight = weight, .target_stride = 3});
        c.vector_stride = 2;
        c.logits = arithmetic.operand;
        c.logits_layout = input;
        expect_forward(c, run_forward(c, options()));
      }
    }
  }
}

TEST_P(Forward, ZeroStridesOfInputs) {
  const Shape shape{.BT = 17, .V = 67, .H = 37};
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Layout& zero : {Layout{.zero_rows = true}, Layout{.zero_cols = true},
                               Layout{.zero_rows = true, .zero_cols = true}}) {
      for (const CaseOptions& how : {CaseOptions{.input = zero}, CaseOptions{.weight = zero},
                                     CaseOptions{.target_stride = 0}}) {
        ForwardCase c = make_forward_case(shape, arithmetic, how);
        const ForwardResult r = run_forward(c, options());
        expect_forward(c, r);
        c.input = c.input.contiguous_copy();
        c.weight = c.weight.contiguous_copy();
        c.target = c.target.contiguous_copy();
        EXPECT_EQ(run_forward(c, options()).bits(), r.bits());
      }
    }
  }
}

TEST_P(Forward, LogitsAreWrittenAsAsked) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const DType type : {DType::f32, arithmetic.operand}) {
      for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
        ForwardCase c = make_forward_case({.BT = 16, .V = 300, .H = 40}, arithmetic);
        c.logits = type;
        c.rounding = rounding;
        const ForwardResult r = run_forward(c, options());
        expect_forward(c, r);
        // With rounding the written values are of the operand type exactly, and the maximum among
        // them is logits_max.
        for (int64_t b = 0; b < c.shape.BT; ++b) {
          double max = -INFINITY;
          for (int64_t v = 0; v < c.shape.V; ++v) max = std::max(max, r.logits->get(b, v));
          if (rounding == LogitsRounding::operand || type == DType::f32) {
            EXPECT_EQ(max, r.logits_max.get(b)) << arithmetic.name << " token " << b;
          }
        }
      }
    }
  }
}

TEST_P(Forward, OptionalOutputsMayBeAbsent) {
  const ForwardCase all = make_forward_case({.BT = 19, .V = 130, .H = 24}, all_arithmetics()[1]);
  const ForwardResult want = run_forward(all, options());
  for (int absent = 1; absent < 4; ++absent) {
    ForwardCase c = make_forward_case({.BT = 19, .V = 130, .H = 24}, all_arithmetics()[1]);
    c.with_mask = (absent & 1) == 0;
    c.with_masked_target = (absent & 2) == 0;
    const ForwardResult r = run_forward(c, options());
    expect_forward(c, r);
    EXPECT_EQ(r.logits_max.all_bits(), want.logits_max.all_bits());
  }
}

TEST_P(Forward, TargetsAreComparedAsIntegersOfAnySize) {
  const int64_t V = 40;
  for (const int64_t start : {int64_t{0}, (int64_t{1} << 24) - 7, (int64_t{1} << 31) - 20,
                              (int64_t{1} << 40) + 1, (int64_t{1} << 53) - 3}) {
    ForwardCase c = make_forward_case({.BT = 44, .V = V, .H = 16}, all_arithmetics()[1],
                                      {.vocab_start = start, .outside = 0});
    // Every id of the shard, and its neighbours outside.
    for (int64_t b = 0; b < 44; ++b) c.target.set_index(b, start - 2 + b);
    const ForwardResult r = run_forward(c, options());
    expect_forward(c, r);
    for (int64_t b = 0; b < 44; ++b) {
      const bool inside = b >= 2 && b < 2 + V;
      EXPECT_EQ(r.masked_target->get_index(b), inside ? b - 2 : 0) << start;
    }
  }
  // The neighbour of 2^24 is not 2^24: a comparison in float would confuse them.
  ForwardCase c = make_forward_case({.BT = 2, .V = 8, .H = 16}, all_arithmetics()[1],
                                    {.target_type = DType::i32, .vocab_start = (1 << 24) + 1});
  c.target.set_index(0, 1 << 24);
  c.target.set_index(1, (1 << 24) + 1);
  const ForwardResult r = run_forward(c, options());
  EXPECT_EQ(r.target_mask->get_index(0) & 3, 1);
}

TEST_P(Forward, NegativeTargetsAreOutside) {
  ForwardCase c = make_forward_case({.BT = 9, .V = 40, .H = 16}, all_arithmetics()[1]);
  for (int64_t b = 0; b < 9; ++b) c.target.set_index(b, b % 2 ? -100 : INT64_MIN + b);
  const ForwardResult r = run_forward(c, options());
  expect_forward(c, r);
}

TEST_P(Forward, TheEndIndexDecidesWhatIsInside) {
  const int64_t start = 100, V = 40;
  for (const int64_t end : {start, start + 1, start + V - 1, start + V, start + V + 5}) {
    ForwardCase c = make_forward_case({.BT = 60, .V = V, .H = 16}, all_arithmetics()[1],
                                      {.vocab_start = start});
    c.vocab_end = end;
    for (int64_t b = 0; b < 60; ++b) c.target.set_index(b, start - 5 + b);
    const ForwardResult r = run_forward(c, options());
    // Beyond V but inside the range: predicted is 0 - max, the local index as computed.
    expect_forward(c, r);
    for (int64_t b = 0; b < 60; ++b) {
      const int64_t id = start - 5 + b;
      const bool inside = id >= start && id < end;
      EXPECT_EQ(r.masked_target->get_index(b), inside ? id - start : 0);
      if (inside && id - start >= V) {
        EXPECT_EQ(r.predicted_logits.get(b), 0.0 - r.logits_max.get(b));
      }
    }
  }
}

// Rows that do not count may hold anything: they are not read.
TEST_P(Forward, RowsThatDoNotCountAreNeutralWhateverTheyHold) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const bool by_index : {true, false}) {
      const Shape shape{.BT = 37, .V = 150, .H = 24};
      const auto dropped = [](int64_t b) { return b % 3 == 1 || (b > 8 && b < 20); };
      ForwardCase c = make_forward_case(shape, arithmetic);
      c.logits = DType::f32;
      if (by_index) c.ignore_index = -100;
      if (!by_index) c.counts = TestTensor::vector(DType::u8, shape.BT, 2);
      for (int64_t b = 0; b < shape.BT; ++b) {
        if (!by_index) c.counts->set_index(b, dropped(b) ? 0 : 1 + b % 255);
        if (!dropped(b)) continue;
        if (by_index) c.target.set_index(b, -100);
        for (int64_t h = 0; h < shape.H; ++h) c.input.set(b, h, h % 2 ? NAN : INFINITY);
      }
      const ForwardResult r = run_forward(c, options());
      expect_forward(c, r);
      for (int64_t b = 0; b < shape.BT; ++b) {
        if (!dropped(b)) continue;
        EXPECT_EQ(r.logits_max.get(b), -INFINITY);
        EXPECT_EQ(r.sum_exp_logits.get(b), 0.0);
        EXPECT_EQ(r.predicted_logits.get(b), 0.0);
        EXPECT_EQ(r.masked_target->get_index(b), 0);
      }
    }
  }
}

TEST_P(Forward, AFilterThatIsIgnoredWouldShow) {
  // The same case with and without: the filter must change the dropped rows and no other bit.
  const Shape shape{.BT = 21, .V = 90, .H = 24};
  const ForwardCase all = make_forward_case(shape, all_arithmetics()[1]);
  ForwardCase some = make_forward_case(shape, all_arithmetics()[1]);
  some.counts = TestTensor::vector(DType::u8, shape.BT);
  for (int64_t b = 0; b < shape.BT; ++b) some.counts->set_index(b, b % 4 != 2);
  const ForwardResult with = run_forward(some, options());
  const ForwardResult without = run_forward(all, options());
  for (int64_t b = 0; b < shape.BT; ++b) {
    const bool same = with.token_bits(b, all.mask_layout) == without.token_bits(b, all.mask_layout);
    EXPECT_EQ(same, b % 4 != 2) << b;
  }
}

TEST_P(Forward, EveryTargetElsewhereOrEveryRowDropped) {
  ForwardCase c =
      make_forward_case({.BT = 23, .V = 99, .H = 16}, all_arithmetics()[1], {.outside = 1.0});
  expect_forward(c, run_forward(c, options()));
  c.counts = TestTensor::vector(DType::u8, 23);
  for (int64_t b = 0; b < 23; ++b) c.counts->set_index(b, 0);
  c.logits = DType::f32;
  expect_forward(c, run_forward(c, options()));
}

TEST_P(Forward, NaNStaysInItsRow) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    const Shape shape{.BT = 30, .V = 200, .H = 24};
    const ForwardCase clean = make_forward_case(shape, arithmetic);
    ForwardCase c = make_forward_case(shape, arithmetic);
    c.input.set(11, 5, NAN);
    const ForwardResult r = run_forward(c, options());
    const ForwardResult want = run_forward(clean, options());
    for (int64_t b = 0; b < shape.BT; ++b) {
      if (b == 11) {
        EXPECT_TRUE(std::isnan(r.logits_max.get(b)));
        EXPECT_TRUE(std::isnan(r.sum_exp_logits.get(b)));
      } else {
        EXPECT_EQ(r.token_bits(b, c.mask_layout), want.token_bits(b, c.mask_layout)) << b;
      }
    }
    // A NaN in one vocabulary row reaches every token, wherever in the vocabulary it stands.
    for (const int64_t v : {int64_t{0}, int64_t{131}, shape.V - 1}) {
      ForwardCase bad = make_forward_case(shape, arithmetic);
      bad.weight.set(v, 3, NAN);
      const ForwardResult all = run_forward(bad, options());
      for (int64_t b = 0; b < shape.BT; ++b) {
        EXPECT_TRUE(std::isnan(all.logits_max.get(b))) << v;
        EXPECT_TRUE(std::isnan(all.sum_exp_logits.get(b))) << v;
      }
    }
  }
}

TEST_P(Forward, PlusInfinityStaysInItsRow) {
  const Shape shape{.BT = 30, .V = 200, .H = 24};
  const ForwardCase clean = make_forward_case(shape, all_arithmetics()[1]);
  ForwardCase c = make_forward_case(shape, all_arithmetics()[1]);
  for (int64_t h = 0; h < shape.H; ++h) c.input.set(4, h, 1.0);
  for (int64_t h = 0; h < shape.H; ++h) c.weight.set(7, h, 0.5);
  c.input.set(4, 0, INFINITY);
  c.target.set_index(4, 7);
  ForwardCase reference_case = make_forward_case(shape, all_arithmetics()[1]);
  for (int64_t h = 0; h < shape.H; ++h) reference_case.weight.set(7, h, 0.5);
  const ForwardResult r = run_forward(c, options());
  const ForwardResult want = run_forward(reference_case, options());
  EXPECT_EQ(r.logits_max.get(4), INFINITY);
  EXPECT_TRUE(std::isnan(r.sum_exp_logits.get(4)));
  // Its target's own logit is infinite too: predicted is inf - inf, in the definition as well.
  EXPECT_TRUE(std::isnan(r.predicted_logits.get(4)));
  expect_forward(c, r);
  for (int64_t b = 0; b < shape.BT; ++b) {
    if (b == 4) continue;
    EXPECT_EQ(r.token_bits(b, c.mask_layout), want.token_bits(b, c.mask_layout)) << b;
  }
}

TEST_P(Forward, EverySegmentOfMinusInfinityAndTheMaximumAnywhere) {
  // Whole segments without a finite logit, before and behind the only finite one.
  const int64_t V = 900;
  for (const int64_t only : {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{600}, V - 1}) {
    ForwardCase c =
        make_forward_case({.BT = 3, .V = V, .H = 8}, all_arithmetics()[2], {.outside = 0});
    for (int64_t b = 0; b < 3; ++b) {
      c.input.set(b, 0, 1.0);
      c.target.set_index(b, b == 0 ? only : (only + 1) % V);
    }
    for (int64_t v = 0; v < V; ++v) {
      if (v != only) c.weight.set(v, 0, -INFINITY);
    }
    const ForwardResult r = run_forward(c, options());
    expect_forward(c, r);
    for (int64_t b = 0; b < 3; ++b) EXPECT_EQ(r.sum_exp_logits.get(b), 1.0);
    EXPECT_EQ(r.predicted_logits.get(0), 0.0);
    EXPECT_EQ(r.predicted_logits.get(1), -INFINITY);
  }
}

TEST_P(Forward, TheMaximumIsFoundInEveryColumn) {
  const int64_t V = 530;
  ForwardCase c = make_forward_case({.BT = V, .V = V, .H = 16}, all_arithmetics()[1],
                                    {.kind = InputKind::flat, .outside = 0});
  // Token b's largest logit stands in column b: its input is that column's weight row.
  for (int64_t b = 0; b < V; ++b) {
    c.target.set_index(b, b);
    for (int64_t h = 0; h < 16; ++h) {
      c.weight.set(b, h, ((b >> (h % 10)) & 1) ? 1.0 : -1.0);
      c.input.set(b, h, c.weight.get(b, h));
    }
  }
  const ForwardResult r = run_forward(c, options());
  expect_forward(c, r);
  for (int64_t b = 0; b < V; ++b) EXPECT_EQ(r.predicted_logits.get(b), 0.0) << b;
}

// ---- error rule -------------------------------------------------------------------------------

// At most twice the error of a framework that holds logits of the operand type.
TEST_P(Forward, ErrorIsAtMostTwiceAFrameworks) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain}) {
      const Shape shape{.BT = 100, .V = 700, .H = 96};
      const CaseOptions how{.kind = kind, .outside = 0};
      const ForwardCase c = make_forward_case(shape, arithmetic, how);
      const ForwardResult ours = run_forward(c, options());
      const reference::Statistics want = reference_forward(c);
      const EagerResult theirs =
          eager(make_gradient_case(make_forward_case(shape, arithmetic, how)));
      const auto compare = [&](const TestTensor& got, const std::vector<double>& eager_values,
                               const std::vector<double>& exact, const char* name) {
        double our_worst = 0, their_worst = 0, our_squares = 0, their_squares = 0, largest = 0;
        for (int64_t b = 0; b < shape.BT; ++b) {
          const auto i = static_cast<size_t>(b);
          const double our_error = got.get(b) - exact[i];
          const double their_error = eager_values[i] - exact[i];
          our_worst = std::max(our_worst, std::abs(our_error));
          their_worst = std::max(their_worst, std::abs(their_error));
          our_squares += our_error * our_error;
          their_squares += their_error * their_error;
          largest = std::max(largest, std::abs(exact[i]));
        }
        // The floor: two roundings of float of the largest value.
        const double floor = 0x1p-23 * largest;
        EXPECT_LE(our_worst, 2 * their_worst + floor) << name << " " << arithmetic.name;
        EXPECT_LE(std::sqrt(our_squares), 2 * std::sqrt(their_squares) + floor)
            << name << " " << arithmetic.name;
      };
      compare(ours.logits_max, theirs.logits_max, want.logits_max.value, "logits_max");
      compare(ours.sum_exp_logits, theirs.sum_exp_logits, want.sum_exp_logits.value,
              "sum_exp_logits");
    }
  }
}

}  // namespace
}  // namespace logitless::test
