// SPDX-License-Identifier: Apache-2.0
// Exact laws: the same bits for any number of threads, workspace limit, run and schedule; for a
// token, whatever other tokens stand beside it.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/support/cases.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

class Determinism : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Determinism);

// No limit, and four from little more than the least to half of what is wanted.
template <typename PlanFunction>
std::vector<int64_t> five_limits(const PlanFunction& plan, PlanOptions options) {
  std::vector<int64_t> limits{0};
  const int64_t wanted = plan(options)->workspace_bytes();
  for (const double part : {0.02, 0.1, 0.3, 0.6}) {
    options.workspace_limit_bytes = std::max<int64_t>(1, static_cast<int64_t>(part * wanted));
    // The least that is accepted at or above this share.
    while (!plan(options)) {
      options.workspace_limit_bytes += options.workspace_limit_bytes / 8 + 64;
    }
    limits.push_back(options.workspace_limit_bytes);
  }
  return limits;
}

struct Way {
  int threads;
  int64_t limit;
};
// 1, 2, 3 and 5 threads without a limit, every limit with 1 and 2 threads, the same again: more
// threads than cores meet at barriers slowly, so not every pair.
std::vector<Way> ways(const std::vector<int64_t>& limits) {
  std::vector<Way> all{{1, 0}, {2, 0}, {3, 0}, {5, 0}, {2, 0}};
  for (size_t i = 1; i < limits.size(); ++i) {
    all.push_back({2, limits[i]});
    if (i % 2 == 1) all.push_back({1, limits[i]});
  }
  all.push_back({3, limits.back()});
  return all;
}

TEST_P(Determinism, ForwardBitsDependOnNeitherThreadsNorLimitsNorRuns) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
      const int64_t tokens = rounding == LogitsRounding::none ? 83 : 21;
      ForwardCase c = make_forward_case({.BT = tokens, .V = 1500, .H = 72}, arithmetic);
      c.rounding = rounding;
      c.logits = DType::f32;
      const auto want = run_forward(c, options(1)).bits();
      const auto limits = five_limits(
          [&](const PlanOptions& o) { return plan_forward(c.shape, c.types(), o); }, options(2));
      for (const Way& way : ways(limits)) {
        PlanOptions o = options(way.threads);
        o.workspace_limit_bytes = way.limit;
        if (!plan_forward(c.shape, c.types(), o)) continue;  // more threads need more
        ASSERT_EQ(run_forward(c, o).bits(), want) << way.threads << " threads, limit " << way.limit;
      }
    }
  }
}

TEST_P(Determinism, GradientBitsDependOnNeitherThreadsNorLimitsNorRuns) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto mode : {GradientMode::memory_saving, GradientMode::high_performance}) {
      for (const bool f32 : {false, true}) {
        for (const bool accumulate : {false, true}) {
          // More tokens than vocabulary, and the reverse: both schedules.
          const Shape shape =
              accumulate ? Shape{.BT = 301, .V = 130, .H = 72} : Shape{.BT = 83, .V = 900, .H = 72};
          GradientCase c = make_gradient_case(make_forward_case(shape, arithmetic),
                                              {.mode = mode, .grad_logsumexp = f32});
          c.grad_input = {.dtype = f32 ? DType::f32 : arithmetic.operand, .accumulate = accumulate};
          c.grad_weight = c.grad_input;
          const auto want = run_gradient(c, options(1)).bits();
          const auto limits = five_limits(
              [&](const PlanOptions& o) { return plan_gradient(c.shape, c.types(), o); },
              options(2));
          for (const Way& way : ways(limits)) {
            PlanOptions o = options(way.threads);
            o.workspace_limit_bytes = way.limit;
            if (!plan_gradient(c.shape, c.types(), o)) continue;
            ASSERT_EQ(run_gradient(c, o).bits(), want)
                << c.describe() << ", " << way.threads << " threads, limit " << way.limit;
          }
        }
      }
    }
  }
}

// The float and the 16-bit output are the same sum, rounded once.
TEST_P(Determinism, TheOutputTypeChangesTheLastRoundingOnly) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    GradientCase c =
        make_gradient_case(make_forward_case({.BT = 83, .V = 900, .H = 72}, arithmetic));
    const GradientResult narrow = run_gradient(c, options());
    c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
    const GradientResult wide = run_gradient(c, options());
    const auto rounds_to = [&](const TestTensor& from, const TestTensor& to) {
      for (int64_t r = 0; r < from.rows(); ++r) {
        for (int64_t h = 0; h < from.cols(); ++h) {
          const auto value = static_cast<float>(from.get(r, h));
          float want = value;
          if (to.dtype() == DType::bf16) want = static_cast<float>(bfloat16(value));
          if (to.dtype() == DType::f16) want = static_cast<float>(float16(value));
          ASSERT_EQ(to.get(r, h), want);
        }
      }
    };
    rounds_to(*wide.grad_input, *narrow.grad_input);
    rounds_to(*wide.grad_weight, *narrow.grad_weight);
  }
}

// A plan is shared between threads, each with its own workspace and outputs.
TEST_P(Determinism, TwoThreadsRunOnePlan) {
  const ForwardCase c = make_forward_case({.BT = 83, .V = 900, .H = 72}, all_arithmetics()[1]);
  const GradientCase g =
      make_gradient_case(make_forward_case({.BT = 83, .V = 900, .H = 72}, all_arithmetics()[1]));
  const auto want = run_forward(c, options()).bits();
  const auto want_gradient = run_gradient(g, options()).bits();
  const auto forward = plan_forward(c.shape, c.types(), options());
  const auto gradient = plan_gradient(g.shape, g.types(), options());
  ASSERT_TRUE(forward && gradient);
  std::vector<std::thread> threads;
  std::atomic<int> same{0};
  constexpr int kTurns = 5;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < kTurns; ++turn) {
        ForwardResult r = make_forward_outputs(c);
        const bool ran = static_cast<bool>(run(*forward, c.operands(), outputs_of(c, r),
                                               guarded_workspace(forward->workspace_bytes())));
        same += ran && r.bits() == want ? 1 : 0;
        GradientResult gradients = make_gradient_outputs(g);
        const bool also = static_cast<bool>(run(*gradient, g.operands(), outputs_of(gradients),
                                                guarded_workspace(gradient->workspace_bytes())));
        same += also && gradients.bits() == want_gradient ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, 2 * 2 * kTurns);
}

// A host that calls from within its own parallel region gets one thread, the same bits, and no
// barrier of ours waits for threads of its.
TEST_P(Determinism, InsideACallersParallelRegion) {
  const ForwardCase c = make_forward_case({.BT = 83, .V = 900, .H = 72}, all_arithmetics()[1]);
  const GradientCase g =
      make_gradient_case(make_forward_case({.BT = 83, .V = 900, .H = 72}, all_arithmetics()[1]));
  const auto want = run_forward(c, options()).bits();
  const auto want_gradient = run_gradient(g, options()).bits();
  std::atomic<int> same{0};
#pragma omp parallel num_threads(3)
  {
    if (omp_get_thread_num() != 1) {
      same += run_forward(c, options(2)).bits() == want ? 1 : 0;
      same += run_gradient(g, options(2)).bits() == want_gradient ? 1 : 0;
    }
  }
  EXPECT_EQ(same, 4);
}

// A runtime that grants fewer threads than the plan latched changes no bit.
TEST_P(Determinism, FewerThreadsThanPlanned) {
  const ForwardCase c = make_forward_case({.BT = 83, .V = 900, .H = 72}, all_arithmetics()[1]);
  const GradientCase g =
      make_gradient_case(make_forward_case({.BT = 83, .V = 900, .H = 72}, all_arithmetics()[1]));
  const auto want = run_forward(c, options(1)).bits();
  const auto want_gradient = run_gradient(g, options(1)).bits();
  const int dynamic = omp_get_dynamic();
  omp_set_dynamic(1);  // at most as many as there are cores
  EXPECT_EQ(run_forward(c, options(64)).bits(), want);
  EXPECT_EQ(run_gradient(g, options(64)).bits(), want_gradient);
  omp_set_dynamic(dynamic);
}

// Strides, offsets and transposes move data, they change no number.
TEST_P(Determinism, LayoutsLeaveNoTrace) {
  for (const int64_t tokens : {40, 140}) {  // few, and more than the lanes hold
    const Shape shape{.BT = tokens, .V = 300, .H = 50};
    for (const Arithmetic& arithmetic : all_arithmetics()) {
      const auto want = run_forward(make_forward_case(shape, arithmetic), options()).bits();
      const auto gradient =
          run_gradient(make_gradient_case(make_forward_case(shape, arithmetic)), options()).bits();
      for (const Layout& layout : all_layouts()) {
        const CaseOptions how{.input = layout, .weight = layout};
        EXPECT_EQ(run_forward(make_forward_case(shape, arithmetic, how), options()).bits(), want);
        GradientCase c = make_gradient_case(make_forward_case(shape, arithmetic, how));
        c.grad_input_layout = c.grad_weight_layout = layout;
        EXPECT_EQ(run_gradient(c, options()).bits(), gradient);
      }
    }
  }
}

// ---- batch invariance at real H and V ---------------------------------------------------------

class BatchInvariance : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(BatchInvariance);

// Filled from a table: a distribution of ordinary shape without a random draw per element.
TestTensor filled(DType dtype, int64_t rows, int64_t cols, double width, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> table(4096);
  for (double& value : table) value = normal(random) * width;
  TestTensor t = TestTensor::matrix(dtype, rows, cols);
  uint64_t state = seed;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      t.set(r, c, table[state >> 52]);
    }
  }
  return t;
}

struct Tokens {
  ForwardCase forward;
  GradientCase gradient;
};

// The listed tokens of a batch, without a weight.
Tokens take(const TestTensor& input, const std::vector<int64_t>& rows, const Shape& whole,
            const Arithmetic& arithmetic) {
  Tokens t;
  const auto n = static_cast<int64_t>(rows.size());
  t.forward.shape = t.gradient.shape = {.BT = n, .V = whole.V, .H = whole.H};
  t.forward.arithmetic = t.gradient.arithmetic = arithmetic;
  t.forward.input = TestTensor::matrix(arithmetic.operand, n, whole.H);
  t.gradient.input = TestTensor::matrix(arithmetic.operand, n, whole.H);
  t.forward.target = TestTensor::vector(DType::i64, n);
  t.gradient.masked_target = TestTensor::vector(DType::i64, n);
  t.gradient.grad = TestTensor::vector(DType::f32, n);
  t.gradient.logits_max = TestTensor::vector(DType::f32, n);
  t.gradient.sum_exp_logits = TestTensor::vector(DType::f32, n);
  t.gradient.grad_input = GradientOutput{.dtype = arithmetic.operand};
  t.gradient.grad_weight.reset();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = rows[static_cast<size_t>(i)];
    const int64_t target = b * 7919 % whole.V;
    t.forward.target.set_index(i, target);
    t.gradient.masked_target.set_index(i, target);
    t.gradient.grad.set(i, 0.001 * static_cast<double>(1 + b % 13));
    for (int64_t h = 0; h < whole.H; ++h) {
      t.forward.input.set(i, h, input.get(b, h));
      t.gradient.input.set(i, h, input.get(b, h));
    }
  }
  return t;
}

// Every number of tokens that a path of its own might serve, from either end of a larger batch.
TEST_P(BatchInvariance, FewTokensHaveTheBitsTheyHaveAmongMany) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto rounding : {LogitsRounding::none, LogitsRounding::operand}) {
      for (const int64_t V : {1, 33, 513}) {
        ForwardCase all = make_forward_case({.BT = 45, .V = V, .H = 70}, arithmetic);
        all.rounding = rounding;
        all.logits = DType::f32;
        const ForwardResult want = run_forward(all, options());
        for (int64_t n = 1; n <= 31; n += n < 17 ? 1 : 7) {
          for (const int64_t first : {int64_t{0}, 45 - n}) {
            ForwardCase few = make_forward_case({.BT = n, .V = V, .H = 70}, arithmetic);
            few.rounding = rounding;
            few.logits = DType::f32;
            few.weight = all.weight.contiguous_copy();
            for (int64_t i = 0; i < n; ++i) {
              few.target.set_index(i, all.target.get_index(first + i));
              for (int64_t h = 0; h < 70; ++h) few.input.set(i, h, all.input.get(first + i, h));
            }
            for (const int threads : {1, 2}) {
              const ForwardResult got = run_forward(few, options(threads));
              for (int64_t i = 0; i < n; ++i) {
                ASSERT_EQ(got.token_bits(i, MaskLayout::packed_lsb_first),
                          want.token_bits(first + i, MaskLayout::packed_lsb_first))
                    << arithmetic.name << ", token " << first + i << " in " << n << ", V " << V;
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(BatchInvariance, ARowAloneInSevenAndInAThousandHasTheSameBits) {
  const bool slow_level = isa() == Isa::scalar || isa() == Isa::neon || isa() == Isa::neon_bf16;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    // The head of a real model; levels and types that would take long have a smaller vocabulary.
    const bool real = !slow_level && arithmetic.operand != DType::f32;
    const Shape shape{.BT = 1000, .V = real ? 49152 : 3001, .H = slow_level ? 96 : 576};
    const TestTensor input = filled(arithmetic.operand, shape.BT, shape.H, 1.0, 1);
    TestTensor weight = filled(arithmetic.operand, shape.V, shape.H, 0.05, 2);

    std::vector<int64_t> thousand(1000);
    for (size_t i = 0; i < thousand.size(); ++i) thousand[i] = static_cast<int64_t>(i);
    const std::vector<std::vector<int64_t>> batches = {
        thousand, {3, 999, 500, 501, 7, 0, 14}, {500}};
    std::vector<ForwardResult> statistics;
    std::vector<GradientResult> gradients;
    for (const auto& rows : batches) {
      Tokens t = take(input, rows, shape, arithmetic);
      t.forward.weight = std::move(weight);
      statistics.push_back(run_forward(t.forward, options()));
      weight = std::move(t.forward.weight);
      for (int64_t i = 0; i < t.forward.shape.BT; ++i) {
        t.gradient.logits_max.set(i, statistics.back().logits_max.get(i));
        t.gradient.sum_exp_logits.set(i, statistics.back().sum_exp_logits.get(i));
      }
      t.gradient.weight = std::move(weight);
      gradients.push_back(run_gradient(t.gradient, options()));
      weight = std::move(t.gradient.weight);
    }
    for (size_t batch = 1; batch < batches.size(); ++batch) {
      for (size_t i = 0; i < batches[batch].size(); ++i) {
        const auto row = static_cast<int64_t>(i);
        const int64_t b = batches[batch][i];
        EXPECT_EQ(statistics[batch].token_bits(row, MaskLayout::packed_lsb_first),
                  statistics[0].token_bits(b, MaskLayout::packed_lsb_first))
            << arithmetic.name << " token " << b << " in " << batches[batch].size();
        EXPECT_EQ(gradients[batch].grad_input->row_bits(row), gradients[0].grad_input->row_bits(b))
            << arithmetic.name << " token " << b << " in " << batches[batch].size();
      }
    }
  }
}

// Few tokens take a way of their own through weight (lanes of 4, 8 or 16 tokens, 1 to 4 of them).
TEST_P(BatchInvariance, FewTokensHaveTheBitsOfALargeBatch) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    const Shape shape{.BT = 200, .V = 700, .H = 51};
    const TestTensor input = filled(arithmetic.operand, shape.BT, shape.H, 1.0, 3);
    TestTensor weight = filled(arithmetic.operand, shape.V, shape.H, 0.2, 4);
    const auto statistics = [&](int64_t first, int64_t count) {
      std::vector<int64_t> rows;
      for (int64_t i = 0; i < count; ++i) rows.push_back(first + i);
      Tokens t = take(input, rows, shape, arithmetic);
      t.forward.weight = std::move(weight);
      t.forward.logits = DType::f32;
      ForwardResult result = run_forward(t.forward, options());
      weight = std::move(t.forward.weight);
      return result;
    };
    const ForwardResult whole = statistics(0, shape.BT);
    for (const int64_t count : {1, 2, 4, 5, 8, 9, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65, 130}) {
      const int64_t first = count % 60;
      const ForwardResult part = statistics(first, count);
      for (int64_t b = 0; b < count; ++b) {
        ASSERT_EQ(part.token_bits(b, MaskLayout::packed_lsb_first),
                  whole.token_bits(first + b, MaskLayout::packed_lsb_first))
            << arithmetic.name << " token " << b << " of " << count;
        ASSERT_EQ(part.logits->row_bits(b), whole.logits->row_bits(first + b))
            << arithmetic.name << " logits of token " << b << " of " << count;
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
