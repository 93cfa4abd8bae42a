// SPDX-License-Identifier: Apache-2.0
#include "cli/verify_sparse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "reference/sparse_gradient.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using reference::Matrix;
using test::synthetic;

// Peaked, no row of it flat, with rows that have no gradient and targets that are elsewhere.
Case peaked_case(DType dtype = DType::bf16, double masked = 0) {
  SyntheticOptions options;
  options.tokens = 45;
  options.vocab = 1507;
  options.hidden = 67;
  options.dtype = dtype;
  options.zero_grad = 0.2;
  options.masked = masked;
  options.seed = 3;
  return synthetic(options);
}

SparseVerifyOptions options_for(float tolerance, int seeds) {
  SparseVerifyOptions options;
  options.sparse = {.tolerance = tolerance, .seed = 11};
  options.seeds = seeds;
  options.run.threads = 2;
  return options;
}

std::string failures(const SparseVerifyReport& report) {
  std::string text;
  for (const Judgement& judgement : report.judgements) {
    if (!judgement.fine()) text += judgement.stage + ": " + describe_worst(judgement) + '\n';
  }
  return text;
}

const Judgement* failed(const SparseVerifyReport& report, const std::string& part) {
  for (const Judgement& judgement : report.judgements) {
    const std::string name = judgement.stage + ": " + judgement.output;
    if (!judgement.fine() && name.find(part) != std::string::npos) return &judgement;
  }
  return nullptr;
}

TEST(VerifySparse, PassesForEveryTypeAndTolerance) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const float tolerance : {0x1p-3f, 0x1p-6f, 0x1p-9f}) {
      Case c = peaked_case(dtype, 0.1);
      const SparseVerifyReport report = verify_sparse(c, options_for(tolerance, 24));
      EXPECT_TRUE(report.fine()) << logitless::name_of(dtype) << ", tolerance " << tolerance
                                 << ":\n"
                                 << failures(report);
      EXPECT_TRUE(report.sample.complete);
      EXPECT_GT(report.counts.rows, 20);
      EXPECT_LT(report.counts.rows, 45);
      EXPECT_LE(report.grad_input.median, report.grad_input.p99);
      EXPECT_LE(report.grad_input.p99, report.grad_input.worst);
      if (tolerance < 0x1p-5f) continue;
      // Relative to a tolerance that the rows' own differences do not hide.
      EXPECT_GT(report.grad_input.all, 0.1 * static_cast<double>(tolerance));
      EXPECT_LT(report.grad_input.all, 2 * static_cast<double>(tolerance));
      EXPECT_LT(report.grad_weight.all, 2 * static_cast<double>(tolerance));
    }
  }
}

TEST(VerifySparse, AFlatCaseIsExact) {
  Case c = peaked_case();
  for (int64_t i = 0; i < c.input.elements(); ++i) {
    store_float(c.input.data(), c.input.dtype(), i, c.input.float_at(i) / 256);
  }
  const SparseVerifyReport report = verify_sparse(c, options_for(0x1p-8f, 4));
  EXPECT_TRUE(report.fine()) << failures(report);
  EXPECT_EQ(report.counts.dense_rows, report.counts.rows);
  EXPECT_EQ(report.seeds, 0);  // nothing to be biased
  EXPECT_EQ(report.fixed_rows, report.counts.rows);
}

// As ranks do.
TEST(VerifySparse, StepsMayBeMadeElsewhere) {
  Case c = peaked_case();
  SparseVerifyOptions options = options_for(0x1p-6f, 8);
  const SparseVerifyReport here = verify_sparse(c, options);
  Case again = peaked_case();
  Operators operators(again, options.run, LogitsRounding::none, Scope::step);
  std::vector<uint64_t> seeds;
  options.make_step = [&](const Case& now, const SparseGradient& sparse) {
    EXPECT_EQ(&now, &again);
    if (sparse.tolerance == 0) return std::optional<StepResult>();  // as if there were no room
    seeds.push_back(sparse.seed);
    return operators.step(Strategy::automatic, DType::f32, sparse);
  };
  const SparseVerifyReport there = verify_sparse(again, options);
  EXPECT_TRUE(there.fine()) << failures(there);
  // One seed, two more that tell what varies, eight.
  EXPECT_THAT(seeds, testing::ElementsAre(11, 12, 13, 11, 12, 13, 14, 15, 16, 17, 18));
  Judgements of_here;
  for (const Judgement& judgement : here.judgements) {
    if (judgement.stage != "as with exact gradients") of_here.push_back(judgement);
  }
  ASSERT_EQ(there.judgements.size(), of_here.size());
  for (size_t i = 0; i < of_here.size(); ++i) {
    EXPECT_EQ(there.judgements[i].output, of_here[i].output);
    EXPECT_EQ(there.judgements[i].observed, of_here[i].observed) << of_here[i].output;
  }
  EXPECT_EQ(here.threads, 2);
  EXPECT_EQ(there.threads, 0);
}

// ---- it can fail ------------------------------------------------------------------------------

using After = std::function<void(const Case& c, uint64_t seed, StepResult& result)>;

SparseVerifyReport with(const After& after, int seeds = 64) {
  Case c = peaked_case(DType::f32);
  SparseVerifyOptions options = options_for(0x1p-5f, seeds);
  options.after = [&](uint64_t seed, StepResult& result) { after(c, seed, result); };
  return verify_sparse(c, options);
}

// Both gradients made of a grad_logits of one's own.
void set_gradients(const Case& c, const Matrix& grad_logits, StepResult& result) {
  const auto set = [](const Matrix& from, HostTensor& to) {
    for (size_t i = 0; i < from.values.size(); ++i) {
      to.as<float>()[i] = static_cast<float>(from.values[i]);
    }
  };
  set(reference::times(grad_logits, reference::read(c.weight.matrix())), result.grad_input);
  set(reference::transposed_times(grad_logits, reference::read(c.input.matrix())),
      result.grad_weight);
}

// The case is always the same one; its grad changes while it is verified.
reference::SparseOperands definition(const Case& c, uint64_t seed) {
  static const Matrix logits =
      reference::logits(c.input.matrix(), c.weight.matrix(), {}, reference::all_rows(c.shape().BT))
          .value;
  reference::SparseOperands operands;
  operands.logits = logits;
  operands.target = reference::read_indices(c.target.vector());
  operands.grad = reference::read(c.grad.vector());
  operands.eps = 0x1p-5;
  operands.seed = seed;
  return operands;
}

TEST(VerifySparse, TheDefinitionItselfPasses) {
  const SparseVerifyReport report = with([](const Case& c, uint64_t seed, StepResult& result) {
    reference::SparseGradient g = reference::sparse_grad_logits(definition(c, seed));
    for (int64_t b = 0; b < g.value.rows; ++b) {
      if (!g.dense[static_cast<size_t>(b)].may_be_dense) continue;
      std::copy_n(g.expected.row(b), g.value.cols, g.value.row(b));
    }
    set_gradients(c, g.value, result);
  });
  EXPECT_TRUE(report.fine()) << failures(report);
  EXPECT_EQ(report.seeds, 64);
  EXPECT_GT(report.bias_rows, 15);
}

// Small elements left out, as other kernels do: the same for every seed, and too little.
TEST(VerifySparse, DroppingFails) {
  const SparseVerifyReport report = with([](const Case& c, uint64_t seed, StepResult& result) {
    Matrix value = reference::sparse_grad_logits(definition(c, seed)).expected;
    for (int64_t b = 0; b < value.rows; ++b) {
      const double w = std::abs(static_cast<double>(c.grad.as<float>()[b]));
      for (int64_t v = 0; v < value.cols; ++v) {
        if (std::abs(value(b, v)) < 0x1p-9 * w) value(b, v) = 0;
      }
    }
    set_gradients(c, value, result);
  });
  EXPECT_NE(failed(report, "grad_input, in standard errors"), nullptr);
  EXPECT_NE(failed(report, "grad_weight, in standard errors"), nullptr);
}

TEST(VerifySparse, EveryOtherMistakeFails) {
  // Kept, but as it is: a little too small on average.
  EXPECT_NE(failed(with([](const Case& c, uint64_t seed, StepResult& result) {
                     reference::SparseGradient g =
                         reference::sparse_grad_logits(definition(c, seed));
                     for (size_t i = 0; i < g.value.values.size(); ++i) {
                       if (g.value.values[i] != 0) g.value.values[i] = g.expected.values[i];
                     }
                     set_gradients(c, g.value, result);
                   }),
                   "in standard errors"),
            nullptr);
  // A threshold eight times too large: right on average, too far off.
  const SparseVerifyReport wide = with([](const Case& c, uint64_t seed, StepResult& result) {
    reference::SparseOperands operands = definition(c, seed);
    operands.eps *= 8;
    set_gradients(c, reference::sparse_grad_logits(operands).value, result);
  });
  EXPECT_NE(failed(wide, "grad_input, length of all errors"), nullptr);
  EXPECT_NE(failed(wide, "grad_weight, length of all errors"), nullptr);
  EXPECT_EQ(failed(wide, "in standard errors"), nullptr) << failures(wide);
  // One row lost, one row of grad_weight wrong, an ulp of the loss, a counter.
  const SparseVerifyReport lost = with(
      [](const Case& c, uint64_t, StepResult& result) {
        int64_t b = 0;
        while (c.grad.as<float>()[b] == 0) ++b;
        for (int64_t h = 0; h < 67; ++h) result.grad_input.as<float>()[b * 67 + h] = 0;
      },
      0);
  ASSERT_NE(failed(lost, "grad_input, length of a row's error"), nullptr);
  EXPECT_EQ(lost.seeds, 0);
  EXPECT_NE(failed(with(
                       [](const Case& c, uint64_t, StepResult& result) {
                         // The row of the largest element, turned round.
                         float* grad = result.grad_weight.as<float>();
                         const int64_t n = c.shape().V * 67;
                         const float* largest = std::max_element(grad, grad + n);
                         const int64_t v = (largest - grad) / 67;
                         for (int64_t h = 0; h < 67; ++h) grad[v * 67 + h] *= -1;
                       },
                       0),
                   "grad_weight, length of all errors"),
            nullptr);
  EXPECT_NE(failed(with(
                       [](const Case&, uint64_t, StepResult& result) {
                         float& loss = result.loss.as<float>()[7];
                         loss = std::nextafter(loss, 0.0f);
                       },
                       0),
                   "as with exact gradients: loss"),
            nullptr);
  EXPECT_NE(
      failed(with([](const Case&, uint64_t, StepResult& result) { result.sparse_counts.kept *= 2; },
                  0),
             "elements kept"),
      nullptr);
  EXPECT_NE(failed(with([](const Case&, uint64_t,
                           StepResult& result) { result.sparse_counts.dense_rows += 20; },
                        0),
                   "dense rows"),
            nullptr);
}

}  // namespace
}  // namespace logitless::cli
