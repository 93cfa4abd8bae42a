// SPDX-License-Identifier: Apache-2.0
// The sparse gradient against its definition. Where input is the identity, grad_weight *is*
// grad_logits, transposed; where weight is, grad_input is: so what was kept can be read. Further
// columns of the other operand, which meet zeros, see the products of what was kept.
#include "reference/sparse_gradient.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "reference/tolerance.h"
#include "tests/support/isa_test.h"
#include "tests/support/one_hot.h"

namespace logitless::test {
namespace {

class SparseGradient : public IsaTest {
 protected:
  static StepResult sparse(const StepCase& c, int threads = kThreads, int64_t limit = 0) {
    PlanOptions o = options(threads);
    o.workspace_limit_bytes = limit;
    return run_step(c, o, Strategy::automatic);
  }
  static StepResult exact(StepCase& c) {
    const float eps = std::exchange(c.grad_tolerance, 0.0f);
    StepResult r = run_step(c, options(), Strategy::one_pass);
    c.grad_tolerance = eps;
    return r;
  }
};
LOGITLESS_INSTANTIATE_PER_ISA(SparseGradient);

// A step with sparse and dense rows, of any arithmetic, that is no one-hot case.
StepCase mixed_step(const Shape& shape, const Arithmetic& arithmetic, float eps = 0x1p-6f,
                    const CaseOptions& how = {}) {
  StepCase c = make_step(shape, arithmetic, how);
  c.grad_tolerance = eps;
  c.seed = 3;
  // Every fifth row has a flat softmax, the others one with few that compete.
  for (int64_t b = 0; b < shape.BT; ++b) {
    const double scale = b % 5 == 4 ? 1.0 / 64 : 2.0;
    for (int64_t h = 0; h < shape.H; ++h) c.input.set(b, h, c.input.get(b, h) * scale);
  }
  return c;
}

// ---- the kept set -----------------------------------------------------------------------------

TEST_P(SparseGradient, KeepsWhatTheDefinitionKeeps) {
  KeptSet all;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const float eps : {0x1p-9f, 0x1p-6f, 0x1p-3f}) {
      for (const uint64_t seed : {uint64_t{0}, ~uint64_t{0}}) {
        OneHot o = one_hot_input({.BT = 29, .V = 3001, .further = 5}, arithmetic);
        o.step.grad_tolerance = eps;
        o.step.seed = seed;
        const StepResult got = sparse(o.step);
        all += expect_kept_set(o, exact(o.step), got);
        expect_products(o, got);
      }
    }
  }
  EXPECT_GT(all.sparse_rows, 29 * 12);
  EXPECT_GT(all.kept, 20000);
  EXPECT_LE(all.within_an_ulp, 1 + all.kept / 50000) << "of " << all.kept << " kept";
}

TEST_P(SparseGradient, KeepsTheSameInGradInput) {
  KeptSet all;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const float eps : {0x1p-7f, 0x1p-4f}) {
      OneHot o = one_hot_weight({.BT = 31, .V = 500, .further = 7}, arithmetic);
      o.step.grad_tolerance = eps;
      o.step.seed = 99;
      const StepResult got = sparse(o.step);
      all += expect_kept_set(o, exact(o.step), got);
      expect_products(o, got);
    }
  }
  EXPECT_GT(all.sparse_rows, 0);
  EXPECT_LE(all.within_an_ulp, 1);
}

// A sample that stands for far too much: the first guesses of a threshold are too high, and fall
// from round to round. Nothing is lost by it: those rows come once more.
TEST_P(SparseGradient, GuessesThatFallFromRoundToRoundLoseNothing) {
  constexpr int64_t kTokens = 40;
  constexpr int64_t kVocabulary = 16384;  // every 64th is looked at
  OneHot o = one_hot_input({.BT = kTokens, .V = kVocabulary, .further = 1}, all_arithmetics()[0]);
  o.step.grad_tolerance = 0x1p-7f;
  for (int64_t b = 0; b < kTokens; ++b) {
    const double height = 0.2 * static_cast<double>(b);  // of what is looked at
    for (int64_t v = 0; v < kVocabulary; ++v) {
      const double looked_at = v % 64 == 0 ? (v % 128 == 0 ? height : height - 1.5) : 0.0;
      const double u = std::fmod(static_cast<double>(v) * 0.6180339887 + 0.37 * b, 1.0);
      o.set_logit(b, v, looked_at + 14.0 * std::pow(u, 6.0));
    }
  }
  KeptSet all;
  for (const int threads : {1, 2}) {
    all += expect_kept_set(o, exact(o.step), sparse(o.step, threads));
  }
  EXPECT_GT(all.sparse_rows, kTokens);
  EXPECT_LE(all.within_an_ulp, 1 + all.kept / 50000) << "of " << all.kept << " kept";
}

// The first columns are farther below the others than fp32 reaches.
TEST_P(SparseGradient, ColumnsFarBelowTheOthersHideNothing) {
  constexpr int64_t kVocabulary = 4096;
  for (const double low : {-88.0, -95.0, -104.5, -250.0}) {
    SCOPED_TRACE(low);
    OneHot o = one_hot_input({.BT = 4, .V = kVocabulary, .further = 1}, all_arithmetics()[2]);
    o.step.grad_tolerance = 0x1p-6f;
    for (int64_t v = 0; v < kVocabulary; ++v) {
      const bool large = v % 64 == 0 ? v % 512 == 0 : v % 37 == 0;
      const double x = (large ? -0.7 : -12.0) + 0.01 * static_cast<double>(v % 7);
      o.set_logit(1, v, v == 4095 ? 0.0 : v < 1024 ? low + 0.001 * x : x);
    }
    o.step.target.set_index(1, 4095);
    expect_kept_set(o, exact(o.step), sparse(o.step, 1));
  }
}

// Rows that keep so much that blocks are cut where their candidates have no more room.
TEST_P(SparseGradient, ShortBlocksLoseNothing) {
  constexpr int64_t kTokens = 40;
  constexpr int64_t kVocabulary = 4096;
  OneHot o = one_hot_input({.BT = kTokens, .V = kVocabulary, .further = 1}, all_arithmetics()[0]);
  o.step.grad_tolerance = 0x1p-7f;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (int64_t b = 0; b < kTokens; ++b) {
    const double deviation = 2.5 + 0.02 * static_cast<double>(b);
    for (int64_t v = 0; v < kVocabulary; ++v) o.set_logit(b, v, deviation * normal(random));
  }
  const StepResult exactly = exact(o.step);
  const StepResult one = sparse(o.step, 1);
  const KeptSet set = expect_kept_set(o, exactly, one);
  EXPECT_GT(set.sparse_rows, kTokens / 2);
  EXPECT_GT(set.kept, set.sparse_rows * kVocabulary / 10);  // its candidates: more than a fifth
  EXPECT_LE(set.within_an_ulp, 1);
  for (const int threads : {2, 3}) EXPECT_EQ(sparse(o.step, threads).bits(), one.bits());
}

// NaN where the sample looks, and a target so far ahead that what is left is next to nothing: such
// rows are treated exactly, and nothing else is touched.
TEST_P(SparseGradient, RowsThatNothingCanBeChosenFromAreExact) {
  constexpr int64_t kTokens = 12;
  constexpr int64_t kVocabulary = 4096;  // every 64th is looked at
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const float eps : {0x1p-9f, 0x1p-16f}) {
      OneHot o = one_hot_input({.BT = kTokens, .V = kVocabulary, .further = 1}, arithmetic);
      o.step.grad_tolerance = eps;
      for (int64_t b = 0; b < kTokens; ++b) {
        const int64_t t = o.step.target.get_index(b);
        if (b % 4 == 1) o.set_logit(b, 64 * b, b % 8 == 1 ? NAN : -NAN);
        if (b % 4 == 2) {
          for (int64_t v = 0; v < kVocabulary; ++v) {
            o.set_logit(b, v, v == t ? 50.0 + 5.0 * b : static_cast<double>(v % 7) / 4);
          }
        }
      }
      const StepResult got = sparse(o.step);
      const StepResult exactly = exact(o.step);
      for (int64_t b = 0; b < kTokens; ++b) {
        if (b % 4 == 1 || b % 4 == 2) {
          EXPECT_EQ(got.gradients.grad_input->row_bits(b),
                    exactly.gradients.grad_input->row_bits(b))
              << b << " with " << eps;
        }
      }
    }
  }
}

// Statistics that a caller gives and that are no statistics lead where they lead without a
// tolerance; no row is left unwritten.
TEST_P(SparseGradient, StatisticsThatAreNoneAreTreatedExactly) {
  for (const int64_t V : {500, 4096}) {
    OneHot o = one_hot_input({.BT = 8, .V = V, .further = 1}, all_arithmetics()[0]);
    o.step.grad_tolerance = 0x1p-7f;
    const StepResult one = sparse(o.step);
    GradientCase g = gradient_case_of(o.step, &one);
    g.logits_max.set(1, NAN);
    g.sum_exp_logits.set(2, NAN);
    g.sum_exp_logits.set(3, 0.0);
    const GradientResult got = run_gradient(g, options());
    g.grad_tolerance = 0;
    const GradientResult exactly = run_gradient(g, options());
    for (const int64_t b : {1, 2, 3}) {
      for (int64_t h = 0; h < got.grad_input->cols(); ++h) {
        const double a = got.grad_input->get(b, h), z = exactly.grad_input->get(b, h);
        EXPECT_TRUE(a == z || (std::isnan(a) && std::isnan(z))) << V << " " << b << " " << h;
      }
    }
  }
}

// Rows of every kind beside each other: none of them moves another.
TEST_P(SparseGradient, RowsOfEveryKind) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    OneHot o = one_hot_weight({.BT = 36, .V = 600, .further = 1}, arithmetic);
    o.step.grad_tolerance = 0x1p-6f;
    for (int64_t b = 0; b < 36; ++b) {
      const int64_t t = o.step.target.get_index(b);
      const auto set = [&](auto&& logit) {
        for (int64_t v = 0; v < 600; ++v) o.set_logit(b, v, logit(v));
      };
      switch (b % 9) {
        case 0:  // one giant elsewhere
          set([&](int64_t v) { return v == (t + 1) % 600 ? 60.0 : 0.0; });
          break;
        case 1:  // all equal
          set([](int64_t) { return 1.5; });
          break;
        case 2:  // p of the target -> 1
          set([&](int64_t v) { return v == t ? 30.0 : static_cast<double>(v % 7) / 4; });
          break;
        case 3:  // p of the target is 1
          set([&](int64_t v) { return v == t ? 200.0 : -static_cast<double>(v % 7); });
          break;
        case 4:  // nothing but the target and a few
          set([&](int64_t v) { return v == t || v % 100 == 0 ? 2.0 : -300.0; });
          break;
        case 5:  // all far below zero
          set([&](int64_t v) { return -400.0 + (v % 50 == 0 ? 8.0 : 0.0); });
          break;
        case 6:  // no number
          o.set_logit(b, 17, NAN);
          break;
        case 7:  // infinite
          o.set_logit(b, 18, INFINITY);
          break;
        default:  // peaked, as made; the target first or last
          o.step.target.set_index(b, b % 2 == 0 ? 0 : 599);
      }
    }
    StepResult plain = sparse(o.step);
    StepResult exactly = exact(o.step);
    const KeptSet all = expect_kept_set(o, exactly, plain);
    EXPECT_GT(all.sparse_rows, 8) << arithmetic.name;
    EXPECT_GE(all.dense_rows, 12) << arithmetic.name;
    for (int64_t b = 0; b < 36; ++b) {
      if (b % 9 == 6 || b % 9 == 7) {
        EXPECT_TRUE(std::isnan(plain.gradients.grad_input->get(b, 0))) << b;
      } else {
        for (int64_t v = 0; v < 600; ++v) {
          ASSERT_TRUE(std::isfinite(plain.gradients.grad_input->get(b, v))) << b << " " << v;
        }
      }
    }
  }
}

// Logits of -inf have no softmax, are never kept, and make no NaN of the others.
TEST_P(SparseGradient, MinusInfinityIsNeverKept) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    OneHot o = one_hot_weight({.BT = 20, .V = 600, .further = 1}, arithmetic);
    o.step.grad_tolerance = 0x1p-5f;
    for (int64_t b = 0; b < 20; ++b) {
      o.step.input.set(b, 600, 1.0);
      o.step.target.set_index(b, o.step.target.get_index(b) / 5 * 5);
    }
    for (int64_t v = 0; v < 600; ++v) o.step.weight.set(v, 600, v % 5 == 3 ? -INFINITY : 0.0);
    const StepResult got = sparse(o.step);
    EXPECT_LT(got.gradients.sparse_counts.dense_rows, 20);
    for (int64_t b = 0; b < 20; ++b) {
      EXPECT_TRUE(std::isfinite(got.loss.get(b)));
      for (int64_t v = 0; v < 600; ++v) {
        const double g = got.gradients.grad_input->get(b, v);
        ASSERT_TRUE(v % 5 == 3 ? g == 0.0 : std::isfinite(g)) << b << " " << v << " " << g;
      }
    }
    for (int64_t v = 3; v < 600; v += 5) {
      for (int64_t h = 0; h <= 600; ++h) {
        ASSERT_EQ(got.gradients.grad_weight->get(v, h), 0.0) << v;
      }
    }
  }
}

// Statistics that are infinite for all rows: exact, whatever that is.
TEST_P(SparseGradient, PlusInfinityIsTreatedExactly) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    OneHot o = one_hot_weight({.BT = 6, .V = 300, .further = 1}, arithmetic);
    o.step.grad_tolerance = 0x1p-5f;
    for (int64_t b = 0; b < 6; ++b) o.step.input.set(b, 300, 1.0);
    for (int64_t v = 0; v < 300; ++v) o.step.weight.set(v, 300, v == 5 ? INFINITY : 0.0);
    const StepResult got = sparse(o.step), want = exact(o.step);
    EXPECT_EQ(got.gradients.sparse_counts.dense_rows, 6);
    EXPECT_EQ(got.bits(), want.bits());
  }
}

// ---- what it may depend on --------------------------------------------------------------------

TEST_P(SparseGradient, BitsDependOnNeitherThreadsNorLimits) {
  // Large enough for a look at a sample of the vocabulary.
  for (const bool f32 : {false, true}) {
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      if (f32 == (arithmetic.operand == DType::f32)) continue;  // each in one type
      StepCase c = mixed_step({.BT = 91, .V = 2100, .H = 32}, arithmetic);
      if (f32) c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
      const StepResult one = sparse(c, 1);
      const auto want = one.bits();
      EXPECT_GT(one.gradients.sparse_counts.dense_rows, 0);
      EXPECT_LT(one.gradients.sparse_counts.dense_rows, 91);
      for (const int threads : {2, 3}) {
        const StepResult got = sparse(c, threads);
        ASSERT_EQ(got.bits(), want) << arithmetic.name << " " << threads << " threads";
        expect_same_counts(got, one);
      }
      for (const int threads : {1, 2, 3}) {
        const auto plan = [&](int64_t limit) {
          PlanOptions o = options(threads);
          o.workspace_limit_bytes = limit;
          return plan_loss_and_gradient(c.shape, c.types(), o);
        };
        const int64_t full = plan(0)->workspace_bytes();
        const int64_t least = least_limit(plan);
        for (const int64_t limit :
             {least, least + (full - least) / 16, least + (full - least) / 3, full}) {
          if (!plan(limit)) continue;
          const StepResult got = sparse(c, threads, limit);
          ASSERT_EQ(got.bits(), want) << arithmetic.name << " " << threads << " threads, limit "
                                      << limit << " of " << full << "\n"
                                      << plan(limit)->describe();
          expect_same_counts(got, one);
        }
      }
    }
  }
}

TEST_P(SparseGradient, ATokenKeepsItsChoiceByItsIdInAnyBatch) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = mixed_step({.BT = 41, .V = 900, .H = 24}, arithmetic);
    c.normalizer = 41.0;
    const StepResult want = sparse(c);
    // Absent ids are the rows' own numbers.
    c.token_ids = TestTensor::vector(DType::i64, 41, 2);
    for (int64_t b = 0; b < 41; ++b) c.token_ids->set_index(b, b);
    EXPECT_EQ(sparse(c).bits(), want.bits()) << arithmetic.name;
    // The same tokens in another order, and a part of them: each with its own bits.
    std::vector<int64_t> order(41);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(4));
    for (const int64_t n : {41, 40, 15, 14, 13, 7, 2, 1}) {
      const StepResult got = sparse(some_tokens(c, std::span(order).first(static_cast<size_t>(n))));
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(got.token_bits(i), want.token_bits(order[static_cast<size_t>(i)]))
            << arithmetic.name << ", token " << i << " of " << n;
      }
    }
    // Ids beyond the batch, negative ones, equal ones.
    for (int64_t b = 0; b < 41; ++b) {
      c.token_ids->set_index(b, b % 3 == 0 ? -b : (int64_t{1} << 40) + b / 2);
    }
    EXPECT_NE(sparse(c).bits(), want.bits());
  }
}

TEST_P(SparseGradient, ASeedRepeatsItselfAndAnotherDiffers) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = mixed_step({.BT = 20, .V = 900, .H = 24}, arithmetic);
    const StepResult first = sparse(c), again = sparse(c);
    EXPECT_EQ(first.bits(), again.bits());
    const StepResult exactly = exact(c);
    for (const uint64_t seed : {uint64_t{0}, uint64_t{4}, uint64_t{1} << 63}) {
      c.seed = seed;
      const StepResult other = sparse(c);
      EXPECT_NE(other.gradients.bits(), first.gradients.bits());
      // Losses, and which rows are dense, know nothing of seeds.
      EXPECT_EQ(other.loss.all_bits(), first.loss.all_bits());
      EXPECT_EQ(other.gradients.sparse_counts.dense_rows, first.gradients.sparse_counts.dense_rows);
      for (int64_t b = 0; b < 20; ++b) {
        const auto same = [&](const StepResult& r) {
          return r.gradients.grad_input->row_bits(b) == exactly.gradients.grad_input->row_bits(b);
        };
        EXPECT_EQ(same(first), same(other)) << b;
      }
    }
  }
}

TEST_P(SparseGradient, StatisticsAndLossAreTheExactOnes) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto kind : {InputKind::peaked, InputKind::flat, InputKind::certain,
                            InputKind::offset, InputKind::negative, InputKind::minus_inf}) {
      StepCase c = make_step({.BT = 33, .V = 700, .H = 48}, arithmetic, {.kind = kind});
      c.grad_tolerance = 0x1p-8f;
      const StepResult got = sparse(c), want = exact(c);
      const auto bits = [](const StepResult& r) {
        std::vector<uint64_t> all{std::bit_cast<uint64_t>(r.total)};
        for (const TestTensor* t :
             {&r.loss, &r.logits_max, &r.sum_exp_logits, &r.predicted_logits}) {
          const auto some = t->all_bits();
          all.insert(all.end(), some.begin(), some.end());
        }
        return all;
      };
      EXPECT_EQ(bits(got), bits(want)) << arithmetic.name << ", kind " << static_cast<int>(kind);
      if (kind == InputKind::flat) {
        // Every row is dense: nothing is left of the tolerance.
        EXPECT_EQ(got.gradients.sparse_counts.dense_rows, 33);
        EXPECT_EQ(got.gradients.bits(), want.gradients.bits()) << arithmetic.name;
      }
    }
  }
}

// Statistics given, logits recomputed: the same choice.
TEST_P(SparseGradient, TwoPassesKeepTheSame) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    OneHot o = one_hot_input({.BT = 29, .V = 1501, .further = 3}, arithmetic);
    o.step.grad_tolerance = 0x1p-6f;
    o.step.seed = 7;
    o.step.normalizer = 3.0;
    o.step.token_ids = TestTensor::vector(DType::i64, 29);
    for (int64_t b = 0; b < 29; ++b) o.step.token_ids->set_index(b, 1000 - 13 * b);
    const StepResult one = sparse(o.step);
    GradientCase g = gradient_case_of(o.step, &one);
    const GradientResult two = run_gradient(g, options());
    EXPECT_EQ(two.sparse_counts.rows, one.gradients.sparse_counts.rows);
    EXPECT_EQ(two.sparse_counts.dense_rows, one.gradients.sparse_counts.dense_rows);
    const StepResult exactly = exact(o.step);
    g.grad_tolerance = 0;
    const GradientResult exact_two = run_gradient(g, options());
    g.grad_tolerance = o.step.grad_tolerance;
    int64_t differ = 0;
    for (int64_t b = 0; b < 29; ++b) {
      // A dense row has the bits of its own exact form.
      if (one.gradients.grad_input->row_bits(b) == exactly.gradients.grad_input->row_bits(b)) {
        EXPECT_EQ(two.grad_input->row_bits(b), exact_two.grad_input->row_bits(b)) << b;
        continue;
      }
      for (int64_t v = 0; v < 1501; ++v) {
        const double a = one.gradients.grad_weight->get(v, b), z = two.grad_weight->get(v, b);
        if ((a == 0) != (z == 0)) {
          ++differ;
        } else {
          ASSERT_NEAR(a, z, 0x1p-19 * std::abs(a)) << b << " " << v;
        }
      }
    }
    EXPECT_LE(differ, 1) << arithmetic.name;
    for (const int threads : {1, 3}) {
      EXPECT_EQ(run_gradient(g, options(threads)).bits(), two.bits());
    }
    const auto plan = [&](int64_t limit) {
      PlanOptions p = options();
      p.workspace_limit_bytes = limit;
      return plan_gradient(g.shape, g.types(), p);
    };
    PlanOptions small = options();
    small.workspace_limit_bytes = least_limit(plan);
    EXPECT_EQ(run_gradient(g, small).bits(), two.bits())
        << plan(small.workspace_limit_bytes)->describe();
  }
}

// The offset makes global ids of a gradient's vocabulary rows.
TEST_P(SparseGradient, TheChoiceGoesByTheGlobalVocabularyId) {
  OneHot o = one_hot_input({.BT = 20, .V = 900, .further = 1}, all_arithmetics()[2]);
  o.step.grad_tolerance = 0x1p-6f;
  const StepResult statistics = sparse(o.step);
  GradientCase g = gradient_case_of(o.step, &statistics);
  const auto plan = plan_gradient(g.shape, g.types(), options());
  ASSERT_TRUE(plan);
  for (const int64_t start : {int64_t{0}, int64_t{1}, int64_t{1} << 33}) {
    GradientResult r = make_gradient_outputs(g);
    GradientOperands operands = g.operands();
    operands.vocab_start_index = start;
    ASSERT_TRUE(run(*plan, operands, outputs_of(r), guarded_workspace(plan->workspace_bytes())));
    reference::SparseOperands want = definition_operands(o);
    want.vocab_start_index = start;
    const auto kept = reference::sparse_grad_logits(want);
    int64_t differ = 0, sparse_rows = 0;
    for (int64_t b = 0; b < 20; ++b) {
      if (kept.rules[static_cast<size_t>(b)].expected_kept > 70) continue;
      ++sparse_rows;
      for (int64_t v = 0; v < 900; ++v) {
        differ += (r.grad_weight->get(v, b) != 0) != (kept.value(b, v) != 0) ? 1 : 0;
      }
    }
    EXPECT_GT(sparse_rows, 5);
    EXPECT_LE(differ, 1) << start;
  }
}

// ---- outputs and operands ---------------------------------------------------------------------

TEST_P(SparseGradient, EverySizeAroundEveryTile) {
  std::vector<OneHotShape> shapes;
  for (const int64_t BT : {1, 2, 7, 8, 9, 13, 14, 15, 28, 29, 57}) {
    shapes.push_back({.BT = BT, .V = 777, .further = 3});
  }
  for (const int64_t V : {1, 2, 3, 31, 32, 33, 127, 128, 129, 255, 256, 257, 449, 513, 1025}) {
    shapes.push_back({.BT = 15, .V = V, .further = 17});
  }
  for (const int64_t further : {1, 2, 15, 16, 31, 33, 177, 179, 191, 193, 500}) {
    shapes.push_back({.BT = 13, .V = 529, .further = further});
  }
  int turn = 0;
  int64_t sparse_rows = 0;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const OneHotShape& shape : shapes) {
      OneHot o = one_hot_input(shape, arithmetic);
      o.step.grad_tolerance = ++turn % 2 == 0 ? 0x1p-8f : 0x1p-4f;
      const StepResult want = exact(o.step), got = sparse(o.step);
      EXPECT_EQ(got.loss.all_bits(), want.loss.all_bits()) << o.step.describe();
      sparse_rows += expect_kept_set(o, want, got).sparse_rows;
      expect_products(o, got);
    }
  }
  EXPECT_GT(sparse_rows, 500);
}

TEST_P(SparseGradient, NothingIsFineToo) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape : {Shape{.BT = 0, .V = 600, .H = 16}, Shape{.BT = 5, .V = 0, .H = 16},
                               Shape{.BT = 5, .V = 600, .H = 0}, Shape{.BT = 5, .V = 600, .H = 1},
                               Shape{.BT = 0, .V = 0, .H = 0}, Shape{.BT = 1, .V = 1, .H = 1}}) {
      StepCase c = mixed_step(shape, arithmetic);
      const StepResult want = exact(c), got = sparse(c);
      EXPECT_EQ(got.loss.all_bits(), want.loss.all_bits()) << c.describe();
      EXPECT_EQ(got.total, want.total);
      const SparseCounts& counts = got.gradients.sparse_counts;
      // Without hidden dimensions there is nothing to count for.
      if (shape.H > 0) {
        EXPECT_EQ(counts.rows, shape.V == 0 ? 0 : shape.BT) << c.describe();
      }
      EXPECT_EQ(counts.elements, (counts.rows - counts.dense_rows) * shape.V) << c.describe();
      EXPECT_LE(counts.kept, counts.elements) << c.describe();
      for (const double value : got.gradients.grad_input->values()) {
        ASSERT_TRUE(std::isfinite(value)) << c.describe();
      }
      for (const double value : got.gradients.grad_weight->values()) {
        ASSERT_TRUE(std::isfinite(value)) << c.describe();
      }
      if (counts.dense_rows == counts.rows && shape.H > 0) {
        EXPECT_EQ(got.bits(), want.bits()) << c.describe();
      }
    }
  }
}

TEST_P(SparseGradient, EveryLayoutHasTheSameBits) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    const Shape shape{.BT = 17, .V = 900, .H = 37};
    const StepCase plain = mixed_step(shape, arithmetic);
    const StepResult want = sparse(plain);
    EXPECT_GT(want.gradients.sparse_counts.kept, 0);
    for (const Layout& layout : all_layouts()) {
      StepCase c = mixed_step(shape, arithmetic, 0x1p-6f,
                              {.input = layout, .weight = layout, .target_stride = 2});
      c.vector_stride = 3;
      c.grad_input_layout = c.grad_weight_layout = layout;
      EXPECT_EQ(sparse(c).bits(), want.bits()) << arithmetic.name;
    }
  }
}

TEST_P(SparseGradient, ZeroStridesOfOperandsAreRead) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    // One row for all tokens; they differ by their targets and their choices.
    StepCase c = mixed_step({.BT = 12, .V = 900, .H = 37}, arithmetic, 0x1p-5f,
                            {.input = {.zero_rows = true}});
    StepCase plain = mixed_step({.BT = 12, .V = 900, .H = 37}, arithmetic, 0x1p-5f);
    const auto peak = [&](StepCase& step) {
      for (int64_t b = 0; b < 12; ++b) {
        step.target.set_index(b, 70 * b);
        for (int64_t h = 0; h < 37; ++h) step.input.set(b, h, 2 * step.weight.get(70, h) * 5);
      }
    };
    peak(c);
    peak(plain);
    const StepResult got = sparse(c), want = sparse(plain);
    EXPECT_EQ(got.bits(), want.bits()) << arithmetic.name;
    EXPECT_NE(got.gradients.grad_input->row_bits(2), got.gradients.grad_input->row_bits(3));
  }
}

TEST_P(SparseGradient, EitherGradientMayBeAbsent) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = mixed_step({.BT = 40, .V = 900, .H = 24}, arithmetic);
    const StepResult both = sparse(c);
    const auto weight = c.grad_weight;
    c.grad_weight.reset();
    const StepResult input = sparse(c);
    EXPECT_EQ(input.gradients.grad_input->all_bits(), both.gradients.grad_input->all_bits());
    EXPECT_EQ(input.loss.all_bits(), both.loss.all_bits());
    expect_same_counts(input, both);
    c.grad_weight = weight;
    c.grad_input.reset();
    const StepResult alone = sparse(c);
    EXPECT_EQ(alone.gradients.grad_weight->all_bits(), both.gradients.grad_weight->all_bits());
    expect_same_counts(alone, both);
    c.grad_weight.reset();
    EXPECT_EQ(sparse(c).loss.all_bits(), both.loss.all_bits());
  }
}

TEST_P(SparseGradient, TheOutputTypeChangesTheLastRoundingOnly) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = mixed_step({.BT = 40, .V = 900, .H = 24}, arithmetic);
    const StepResult narrow = sparse(c);
    c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
    const StepResult wide = sparse(c), exactly = exact(c);
    const auto rounds_to = [&](const TestTensor& from, const TestTensor& to) {
      for (int64_t r = 0; r < from.rows(); ++r) {
        for (int64_t h = 0; h < from.cols(); ++h) {
          const auto value = static_cast<float>(from.get(r, h));
          float want = value;
          if (to.dtype() == DType::bf16) want = static_cast<float>(bfloat16(value));
          if (to.dtype() == DType::f16) want = static_cast<float>(float16(value));
          ASSERT_EQ(to.get(r, h), static_cast<double>(want)) << arithmetic.name;
        }
      }
    };
    rounds_to(*wide.gradients.grad_input, *narrow.gradients.grad_input);
    // Without dense rows, whose sum in a 16-bit grad_weight is rounded once more.
    StepCase peaked = mixed_step({.BT = 40, .V = 900, .H = 24}, arithmetic);
    peaked.token_weights = TestTensor::vector(DType::f32, 40);
    for (int64_t b = 0; b < 40; ++b) {
      const bool dense =
          wide.gradients.grad_input->row_bits(b) == exactly.gradients.grad_input->row_bits(b);
      peaked.token_weights->set(b, dense ? 0.0 : 1.0);
    }
    const StepResult narrow_peaked = sparse(peaked);
    EXPECT_EQ(narrow_peaked.gradients.sparse_counts.dense_rows, 0);
    EXPECT_GT(narrow_peaked.gradients.sparse_counts.rows, 5);
    peaked.grad_input = peaked.grad_weight = GradientOutput{.dtype = DType::f32};
    rounds_to(*sparse(peaked).gradients.grad_weight, *narrow_peaked.gradients.grad_weight);
  }
}

TEST_P(SparseGradient, AccumulatesOntoWhatIsThere) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const DType dtype : {arithmetic.operand, DType::f32}) {
      StepCase c = mixed_step({.BT = 40, .V = 900, .H = 24}, arithmetic);
      c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
      const StepResult fresh = sparse(c);
      c.grad_input = c.grad_weight = GradientOutput{.dtype = dtype, .accumulate = true};
      const StepResult got = sparse(c);
      const auto expect = [&](const TestTensor& sum, const TestTensor& added,
                              const reference::Matrix& before) {
        for (int64_t r = 0; r < sum.rows(); ++r) {
          for (int64_t h = 0; h < sum.cols(); ++h) {
            const double want = before(r, h) + added.get(r, h);
            // Partial sums that start from what is there are as large as that; a 16-bit grad_weight
            // is rounded once more before the dense rows are added.
            const double size = std::abs(before(r, h)) + std::abs(want);
            const double allowed = reference::half_ulp(dtype, want) +
                                   1.1 * reference::half_ulp(dtype, size) + 0x1p-19 * size;
            ASSERT_NEAR(sum.get(r, h), want, allowed) << arithmetic.name << " " << r << " " << h;
          }
        }
      };
      expect(*got.gradients.grad_input, *fresh.gradients.grad_input, got.gradients.initial_input);
      expect(*got.gradients.grad_weight, *fresh.gradients.grad_weight,
             got.gradients.initial_weight);
      for (const int threads : {1, 3}) {
        EXPECT_EQ(sparse(c, threads).bits(), got.bits()) << arithmetic.name;
      }
      const auto plan = [&](int64_t limit) {
        PlanOptions o = options();
        o.workspace_limit_bytes = limit;
        return plan_loss_and_gradient(c.shape, c.types(), o);
      };
      EXPECT_EQ(sparse(c, kThreads, least_limit(plan)).bits(), got.bits()) << arithmetic.name;
    }
  }
}

// ---- rows that do not count -------------------------------------------------------------------

TEST_P(SparseGradient, RowsThatDoNotCountMayHoldAnything) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = mixed_step({.BT = 40, .V = 900, .H = 24}, arithmetic);
    c.normalizer = 5.0;
    const StepResult clean = sparse(c);
    c.ignore_index = -100;
    c.token_weights = TestTensor::vector(DType::f32, 40, 2);
    for (int64_t b = 0; b < 40; ++b) c.token_weights->set(b, b % 7 == 2 ? 0.0 : 1.0);
    const auto has_gradient = [](int64_t b) { return b % 3 != 0 && b % 7 != 2; };
    int64_t rows = 0;
    for (int64_t b = 0; b < 40; ++b) {
      rows += has_gradient(b) ? 1 : 0;
      if (b % 3 == 0) c.target.set_index(b, -100);
      for (int64_t h = 0; h < 24 && !has_gradient(b); ++h) {
        c.input.set(b, h, h % 2 ? NAN : INFINITY);
      }
    }
    const StepResult r = sparse(c);
    EXPECT_EQ(r.gradients.sparse_counts.rows, rows);
    for (const double value : r.gradients.grad_weight->values()) ASSERT_TRUE(std::isfinite(value));
    for (int64_t b = 0; b < 40; ++b) {
      if (has_gradient(b)) {
        EXPECT_EQ(r.token_bits(b), clean.token_bits(b)) << arithmetic.name << " " << b;
        continue;
      }
      for (int64_t h = 0; h < 24; ++h) EXPECT_EQ(r.gradients.grad_input->get(b, h), 0.0);
    }
    // No row counts: zeros everywhere.
    for (int64_t b = 0; b < 40; ++b) c.target.set_index(b, -100);
    const StepResult none = sparse(c);
    EXPECT_EQ(none.total, 0.0);
    for (const double value : none.gradients.grad_weight->values()) ASSERT_EQ(value, 0.0);
    for (const double value : none.gradients.grad_input->values()) ASSERT_EQ(value, 0.0);
    EXPECT_EQ(none.gradients.sparse_counts.rows, 0);
    EXPECT_EQ(none.gradients.sparse_counts.kept, 0);
    EXPECT_EQ(none.gradients.sparse_counts.elements, 0);
  }
}

TEST_P(SparseGradient, WeightsOfAnySignAndSizeScaleARow) {
  for (const Arithmetic& arithmetic : {all_arithmetics()[1], all_arithmetics()[2]}) {
    OneHot o = one_hot_input({.BT = 20, .V = 900, .further = 1}, arithmetic);
    o.step.grad_tolerance = 0x1p-6f;
    const StepResult plain = sparse(o.step);
    o.step.token_weights = TestTensor::vector(DType::f32, 20);
    for (int64_t b = 0; b < 20; ++b) {
      o.step.token_weights->set(
          b, (b % 2 == 0 ? -1.0 : 1.0) * std::ldexp(1.0, static_cast<int>(b) - 10));
    }
    o.step.normalizer = 1.0;
    const StepResult got = sparse(o.step);
    const StepResult weighted_exact = exact(o.step);
    const KeptSet kept = expect_kept_set(o, weighted_exact, got);
    EXPECT_GT(kept.sparse_rows, 5);
    EXPECT_EQ(got.gradients.sparse_counts.kept, plain.gradients.sparse_counts.kept);
  }
}

TEST_P(SparseGradient, DenseRowsHaveTheExactBits) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const float eps : {0x1p-10f, 0x1p-5f, 0x1p-1f}) {
      StepCase c = mixed_step({.BT = 60, .V = 900, .H = 24}, arithmetic, eps);
      c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
      const StepResult got = sparse(c), want = exact(c);
      int64_t dense = 0;
      for (int64_t b = 0; b < 60; ++b) {
        dense += got.gradients.grad_input->row_bits(b) == want.gradients.grad_input->row_bits(b);
      }
      EXPECT_EQ(dense, got.gradients.sparse_counts.dense_rows) << arithmetic.name << " " << eps;
    }
  }
}

TEST_P(SparseGradient, WhatTheWorkspaceHoldsIsNoInput) {
  const StepCase c = mixed_step({.BT = 37, .V = 900, .H = 40}, all_arithmetics()[1]);
  const auto plan = plan_loss_and_gradient(c.shape, c.types(), options());
  ASSERT_TRUE(plan);
  std::vector<uint64_t> want;
  for (const int fill : {0x00, 0xff, 0x7f, 0x3c}) {
    GradientResult gradients = make_gradient_outputs(gradient_case_of(c));
    TestTensor loss = TestTensor::vector(DType::f32, 37);
    LossAndGradientOutputs out;
    const GradientOutputs views = outputs_of(gradients);
    out.loss = loss.vector_view();
    out.grad_input = views.grad_input;
    out.grad_weight = views.grad_weight;
    const auto workspace = guarded_workspace(plan->workspace_bytes());
    std::fill(workspace.begin(), workspace.end(), static_cast<std::byte>(fill));
    ASSERT_TRUE(run(*plan, c.operands(), out, workspace));
    if (want.empty()) want = gradients.bits();
    EXPECT_EQ(gradients.bits(), want) << fill;
  }
}

TEST_P(SparseGradient, TwoThreadsRunOnePlan) {
  StepCase c = mixed_step({.BT = 60, .V = 900, .H = 40}, all_arithmetics()[1]);
  const auto plan = plan_loss_and_gradient(c.shape, c.types(), options());
  ASSERT_TRUE(plan);
  const auto want = run_step(c, *plan).bits();
  std::vector<std::vector<uint64_t>> got(2);
  std::vector<std::thread> threads;
  for (auto& mine : got) {
    threads.emplace_back([&c, &plan, &mine] { mine = run_step(c, *plan).bits(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(got[0], want);
  EXPECT_EQ(got[1], want);
}

TEST_P(SparseGradient, ACancelledStepSaysSo) {
  CancelToken token;
  token.cancel();
  const StepCase c = mixed_step({.BT = 40, .V = 900, .H = 24}, all_arithmetics()[1]);
  GradientResult gradients = make_gradient_outputs(gradient_case_of(c));
  TestTensor loss = TestTensor::vector(DType::f32, 40);
  const auto plan = plan_loss_and_gradient(c.shape, c.types(), options());
  LossAndGradientOutputs out;
  const GradientOutputs views = outputs_of(gradients);
  out.loss = loss.vector_view();
  out.grad_input = views.grad_input;
  out.grad_weight = views.grad_weight;
  const auto ran =
      run(*plan, c.operands(), out, guarded_workspace(plan->workspace_bytes()), &token);
  ASSERT_FALSE(ran);
  EXPECT_EQ(ran.error().kind, ErrorKind::cancelled);
}

// ---- errors -----------------------------------------------------------------------------------

TEST_P(SparseGradient, AToleranceOutOfRangeIsNamed) {
  const Shape shape{.BT = 10, .V = 20, .H = 8};
  for (const float bad : {-0x1p-9f, NAN, 0x1p-17f, 0.51f, 1.0f, INFINITY, -INFINITY, 1e-30f}) {
    const auto step = plan_loss_and_gradient(shape, {.grad_tolerance = bad}, options());
    ASSERT_FALSE(step) << bad;
    EXPECT_EQ(step.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(step.error().message.find("grad_tolerance"), std::string::npos)
        << step.error().message;
    const auto gradient = plan_gradient(shape, {.grad_tolerance = bad}, options());
    ASSERT_FALSE(gradient) << bad;
    EXPECT_EQ(gradient.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(gradient.error().message.find("grad_tolerance"), std::string::npos)
        << gradient.error().message;
  }
  for (const float good : {0.0f, 0x1p-16f, 0.5f, 0.001f}) {
    EXPECT_TRUE(plan_loss_and_gradient(shape, {.grad_tolerance = good}, options())) << good;
    EXPECT_TRUE(plan_gradient(shape, {.grad_tolerance = good}, options())) << good;
  }
  const auto given = plan_gradient(
      shape, {.mode = GradientMode::high_performance, .grad_tolerance = 0.01f}, options());
  ASSERT_FALSE(given);
  EXPECT_NE(given.error().message.find("grad_tolerance"), std::string::npos)
      << given.error().message;
  // What a plan says of itself tells of it.
  const auto plan = plan_loss_and_gradient(shape, {.grad_tolerance = 0x1p-9f}, options());
  EXPECT_NE(plan->describe().find("sparse"), std::string::npos) << plan->describe();
}

TEST_P(SparseGradient, BrokenArgumentsAreNamedAndNothingIsWritten) {
  const auto expect = [&](auto&& breakage, ErrorKind kind, const std::string& part) {
    StepCase c = mixed_step({.BT = 10, .V = 200, .H = 8}, all_arithmetics()[1]);
    c.token_ids = TestTensor::vector(DType::i64, 10);
    for (int64_t b = 0; b < 10; ++b) c.token_ids->set_index(b, b);
    StepResult r;
    r.loss = TestTensor::vector(DType::f32, 10);
    r.gradients = make_gradient_outputs(gradient_case_of(c));
    const auto plan = plan_loss_and_gradient(c.shape, c.types(), options());
    ASSERT_TRUE(plan);
    LossAndGradientOperands in = c.operands();
    const GradientOutputs gradients = outputs_of(r.gradients);
    LossAndGradientOutputs out;
    out.loss = r.loss.vector_view();
    out.grad_input = gradients.grad_input;
    out.grad_weight = gradients.grad_weight;
    SparseCounts counts = kOldCounts;
    out.sparse_counts = &counts;
    auto workspace = guarded_workspace(plan->workspace_bytes());
    breakage(c, in, workspace);
    const auto ran = run(*plan, in, out, workspace);
    ASSERT_FALSE(ran) << part;
    EXPECT_EQ(ran.error().kind, kind) << ran.error().message;
    EXPECT_NE(ran.error().message.find(part), std::string::npos) << ran.error().message;
    EXPECT_TRUE(r.loss.untouched()) << part;
    EXPECT_TRUE(r.gradients.grad_input->untouched()) << part;
    EXPECT_TRUE(r.gradients.grad_weight->untouched()) << part;
    EXPECT_EQ(counts.kept, kOldCounts.kept) << part;
  };
  const ErrorKind invalid = ErrorKind::invalid_argument, wrong = ErrorKind::wrong_type;
  expect([](auto&, auto& in, auto&) { in.token_ids->size = 9; }, invalid, "token_ids");
  expect([](auto&, auto& in, auto&) { in.token_ids->dtype = DType::i32; }, wrong, "token_ids");
  expect([](auto&, auto& in, auto&) { in.token_ids->stride = -1; }, invalid, "token_ids");
  expect([](auto&, auto& in, auto&) { in.token_ids->data = nullptr; }, invalid, "token_ids");
  expect([](auto&, auto&, auto& w) { w = w.first(w.size() - 1); }, ErrorKind::workspace_too_small,
         "workspace");
  expect([](auto& c, auto&, auto&) { c.target.set_index(6, 200); }, ErrorKind::invalid_data,
         "target[6] is 200");
}

}  // namespace
}  // namespace logitless::test
