// SPDX-License-Identifier: Apache-2.0
#include "cli/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "tests/cli/mutate.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using test::synthetic;

// Ragged in every direction, more than one tile in each.
Case ragged_case(DType dtype, int64_t BT = 45) {
  SyntheticOptions options;
  options.tokens = BT;
  options.vocab = 507;
  options.hidden = 67;
  options.dtype = dtype;
  options.zero_grad = 0.2;
  options.masked = 0.1;
  options.seed = 3;
  return synthetic(options);
}

std::string failures(const VerifyReport& report) {
  std::string text;
  for (const Judgement& judgement : report.judgements) {
    if (!judgement.fine()) text += judgement.stage + ": " + describe_worst(judgement) + '\n';
  }
  return text;
}

// LOGITLESS_ISA is read on every call.
class ForcedIsa {
 public:
  explicit ForcedIsa(Isa isa) {
    const char* before = std::getenv("LOGITLESS_ISA");
    if (before != nullptr) before_ = before;
    ::setenv("LOGITLESS_ISA", logitless::name_of(isa), 1);
  }
  ~ForcedIsa() {
    if (before_) {
      ::setenv("LOGITLESS_ISA", before_->c_str(), 1);
    } else {
      ::unsetenv("LOGITLESS_ISA");
    }
  }
  ForcedIsa(const ForcedIsa&) = delete;
  ForcedIsa& operator=(const ForcedIsa&) = delete;

 private:
  std::optional<std::string> before_;
};

std::string isa_name(const testing::TestParamInfo<Isa>& info) {
  return logitless::name_of(info.param);
}

class VerifyPerIsa : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Usable, VerifyPerIsa, testing::ValuesIn(usable_isas()), isa_name);

TEST_P(VerifyPerIsa, PassesForEveryTypeAndNumberOfShards) {
  const ForcedIsa forced(GetParam());
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const Case c = ragged_case(dtype);
    for (const int64_t shards : {1, 2, 4, 7}) {
      const VerifyReport report = verify_case(c, {.shards = shards, .run = {.threads = 2}});
      EXPECT_EQ(report.isa, GetParam());
      EXPECT_TRUE(report.sample.complete);
      EXPECT_TRUE(report.fine()) << logitless::name_of(dtype) << ", " << shards << " shards:\n"
                                 << failures(report);
      EXPECT_NEAR(report.mean_loss, report.mean_loss_float64, 1e-5);
    }
  }
}

TEST(Verify, ManyTokensPass) {
  // More than one block of every kernel, few enough for float64.
  const Case c = ragged_case(DType::bf16, 700);
  const VerifyReport report = verify_case(c, {.shards = 2, .run = {.threads = 2}});
  EXPECT_TRUE(report.fine()) << failures(report);
}

TEST(Verify, MoreShardsThanRowsPass) {
  SyntheticOptions options;
  options.tokens = 9;
  options.vocab = 5;
  options.hidden = 8;
  const VerifyReport report = verify_case(synthetic(options), {.shards = 7});
  EXPECT_TRUE(report.fine()) << failures(report);
}

TEST(Verify, EmptyCasesPass) {
  for (const auto& [tokens, vocab, hidden] : {std::tuple{0, 5, 3}, {5, 0, 3}, {5, 3, 0}}) {
    SyntheticOptions options;
    options.tokens = tokens;
    options.vocab = vocab;
    options.hidden = hidden;
    const VerifyReport report = verify_case(synthetic(options), {.shards = 2});
    EXPECT_TRUE(report.fine()) << tokens << "," << vocab << "," << hidden << ":\n"
                               << failures(report);
  }
}

TEST(Verify, IgnoredTokensAndGradOfLogsumexpPass) {
  Case c = ragged_case(DType::bf16);
  c.ignore_index = -100;
  for (const int64_t b : {0, 13, 14, 44}) {
    c.target.as<int64_t>()[b] = -100;
    // What does not count may hold anything.
    store_float(c.input.data(), DType::bf16, b * 67, std::numeric_limits<float>::quiet_NaN());
  }
  c.grad_logsumexp = HostTensor(DType::f32, {45});
  for (int64_t b = 0; b < 45; ++b) c.grad_logsumexp->as<float>()[b] = 1e-3f * float(b % 5);
  const VerifyReport report = verify_case(c, {.shards = 3});
  EXPECT_TRUE(report.fine()) << failures(report);
}

TEST(Verify, JudgesEveryStage) {
  const VerifyReport report = verify_case(ragged_case(DType::f16), {.shards = 2});
  for (const char* rounding : {"logits fp32", "logits rounded"}) {
    for (const char* stage : {"forward", "merge", "loss", "softmax", "gradient memory-saving"}) {
      const std::string name = std::string(stage) + ", " + rounding;
      EXPECT_TRUE(std::ranges::any_of(report.judgements, [&](const Judgement& judgement) {
        return judgement.stage == name && judgement.elements > 0;
      })) << name;
    }
  }
  for (const char* output : {"grad_input", "grad_weight"}) {
    EXPECT_TRUE(std::ranges::any_of(report.judgements, [&](const Judgement& judgement) {
      return judgement.stage == "gradient high-performance" && judgement.output == output;
    }));
    for (const char* stage :
         {"one pass", "one pass, to fp32", "recompute, as separate operators"}) {
      EXPECT_TRUE(std::ranges::any_of(report.judgements, [&](const Judgement& judgement) {
        return judgement.stage == stage && judgement.output == output && judgement.elements > 0;
      })) << stage;
    }
  }
  for (const char* stage : {"one pass", "recompute"}) {
    for (const char* output : {"logits_max", "sum_exp_logits", "predicted_logits", "loss"}) {
      for (const std::string& name :
           {std::string(stage), std::string(stage) + ", as separate operators"}) {
        EXPECT_TRUE(std::ranges::any_of(report.judgements,
                                        [&](const Judgement& judgement) {
                                          return judgement.stage == name &&
                                                 judgement.output == output &&
                                                 judgement.elements > 0;
                                        }))
            << name << " " << output;
      }
    }
  }
}

// The step is verified on a shard of something larger too: on the tokens whose target is there.
TEST(Verify, AStepOfAShardTakesTheTokensWhoseTargetIsThere) {
  Case c = ragged_case(DType::bf16);
  c.vocab_start_index = 40;  // a tenth of the targets is now below it or beyond its end
  c.ignore_index = -100;
  c.target.as<int64_t>()[3] = -100;
  const VerifyReport report = verify_case(c, {.run = {.threads = 2}});
  EXPECT_TRUE(report.fine()) << failures(report);
  EXPECT_TRUE(report.one_pass_fits);
}

TEST(Verify, AOnePassThatDoesNotFitIsLeftOut) {
  const Case c = ragged_case(DType::bf16, 450);
  // Enough for every operator, not for the exponentials of 64 tokens.
  int64_t limit = 4 << 10;
  while (!plan_gradient(c.shape(), {}, {.threads = 1, .workspace_limit_bytes = limit}) ||
         !plan_forward(c.shape(), {}, {.threads = 1, .workspace_limit_bytes = limit}) ||
         !plan_loss_and_gradient(c.shape(), {}, {.threads = 1, .workspace_limit_bytes = limit})) {
    limit += limit / 8;
  }
  const VerifyReport report =
      verify_case(c, {.run = {.threads = 1, .workspace_limit_bytes = limit}});
  EXPECT_TRUE(report.fine()) << failures(report);
  EXPECT_FALSE(report.one_pass_fits);
}

class VerifyMutants : public testing::TestWithParam<test::MutantInfo> {};
INSTANTIATE_TEST_SUITE_P(All, VerifyMutants, testing::ValuesIn(test::all_mutants()),
                         [](const auto& mutant) { return std::string(mutant.param.name); });

// The very mistakes that a kernel could make are seen, and seen where they were made.
TEST_P(VerifyMutants, AreCaught) {
  const test::MutantInfo& mutant = GetParam();
  const Case c = ragged_case(DType::bf16);
  for (const int64_t shards : {2, 4, 7}) {
    const VerifyReport report =
        verify_case(c, {.shards = shards, .after = test::plant(mutant.mutant, c)});
    EXPECT_FALSE(report.fine()) << shards << " shards";
    const bool seen = std::ranges::any_of(report.judgements, [&](const Judgement& judgement) {
      return !judgement.fine() && std::string_view(judgement.stage).starts_with(mutant.stage) &&
             std::string_view(judgement.output).starts_with(mutant.output);
    });
    EXPECT_TRUE(seen) << shards << " shards:\n" << failures(report);
  }
}

TEST(Sample, HasTheEdgesOfTilesAndShards) {
  SyntheticOptions options;
  options.tokens = 1003;
  options.vocab = 20011;
  options.hidden = 32;
  const Case c = synthetic(options);
  const Sample sample = choose_sample(c, {.shards = 3, .budget_seconds = 1e-9});
  EXPECT_FALSE(sample.complete);
  EXPECT_LT(sample.tokens.size(), 100U);
  EXPECT_THAT(sample.tokens, testing::IsSupersetOf({0, 13, 14, 1002}));
  // Of each shard the first and last row, and the last full tile of 32 columns.
  for (const ShardRange range : cut_vocabulary(20011, 3)) {
    EXPECT_THAT(sample.vocabulary, testing::IsSupersetOf({range.begin, range.begin + 31,
                                                          range.begin + 32, range.end - 1}));
  }
  EXPECT_TRUE(std::ranges::is_sorted(sample.tokens));
  EXPECT_TRUE(std::ranges::is_sorted(sample.vocabulary));
  EXPECT_TRUE(choose_sample(c, {.full = true, .budget_seconds = 1e-9}).complete);
}

TEST(CutVocabulary, CoversTheVocabularyEvenly) {
  for (const int64_t V : {0, 1, 5, 507}) {
    for (const int64_t shards : {1, 2, 3, 7, 10}) {
      const std::vector<ShardRange> ranges = cut_vocabulary(V, shards);
      ASSERT_EQ(static_cast<int64_t>(ranges.size()), shards);
      int64_t end = 0;
      for (const ShardRange range : ranges) {
        EXPECT_EQ(range.begin, end);
        EXPECT_LE(range.size() - V / shards, 1);
        EXPECT_GE(range.size(), V / shards);
        end = range.end;
      }
      EXPECT_EQ(end, V);
    }
  }
}

}  // namespace
}  // namespace logitless::cli
