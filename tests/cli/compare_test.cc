// SPDX-License-Identifier: Apache-2.0
#include "cli/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/safetensors.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using test::Scratch;
using test::synthetic;
using testing::HasSubstr;

class Compare : public testing::Test {
 protected:
  Compare() : case_(make_case()) {}

  static Case make_case() {
    SyntheticOptions options;
    options.tokens = 45;
    options.vocab = 507;
    options.hidden = 64;
    return synthetic(options);
  }

  // What our own operators give, as if from elsewhere.
  ForeignOutputs outputs(LogitsRounding rounding, bool statistics = true) {
    Operators operators(case_, {}, rounding);
    const WholeRunOptions options{.shards = 1, .rounding = rounding};
    StatisticsResult result = run_statistics(case_, operators, options);
    LossResult loss = run_loss(operators, result.merged, options);
    GradientResult gradient =
        run_gradient(case_, operators, result, nullptr, case_.dtype(), options);
    ForwardResult with_logits =
        operators.forward({.begin = 0, .end = 507}, operators.logits_dtype());
    ForeignOutputs out;
    out.emplace("softmax", run_softmax(case_, operators, result, options));
    out.emplace("logits", std::move(*with_logits.logits));
    out.emplace("loss", std::move(loss.loss));
    out.emplace("logsumexp", std::move(loss.logsumexp));
    out.emplace("predicted_logits", std::move(result.merged.predicted_logits));
    out.emplace("target_mask", std::move(result.merged.target_mask));
    out.emplace("masked_target", std::move(result.merged.masked_target));
    out.emplace("grad_input", std::move(gradient.grad_input));
    out.emplace("grad_weight", std::move(gradient.grad_weight));
    if (statistics) {
      out.emplace("logits_max", std::move(result.merged.logits_max));
      out.emplace("sum_exp_logits", std::move(result.merged.sum_exp_logits));
    }
    return out;
  }

  static std::string failures(const CompareReport& report) {
    std::string text;
    for (const Judgement& judgement : report.judgements) {
      if (!judgement.fine()) text += describe_worst(judgement) + '\n';
    }
    return text;
  }

  Scratch scratch_;
  Case case_;
};

TEST_F(Compare, GoodOutputsPassWithAndWithoutTheirStatistics) {
  for (const LogitsRounding rounding : {LogitsRounding::none, LogitsRounding::operand}) {
    for (const bool statistics : {true, false}) {
      const CompareReport report =
          compare_outputs(case_, outputs(rounding, statistics), {.rounding = rounding});
      EXPECT_TRUE(report.fine()) << failures(report);
      EXPECT_EQ(report.statistics_from_file, statistics);
      EXPECT_EQ(report.judgements.size(), statistics ? 11U : 9U);
      ASSERT_TRUE(report.mean_loss.has_value());
      EXPECT_NEAR(*report.mean_loss, *report.mean_loss_float64, 1e-4);
    }
  }
}

TEST_F(Compare, OtherRoundingIsBeyond) {
  const CompareReport report =
      compare_outputs(case_, outputs(LogitsRounding::operand), {.rounding = LogitsRounding::none});
  EXPECT_FALSE(report.fine());
}

TEST_F(Compare, ATamperedElementIsNamed) {
  for (const char* name : {"logits_max", "sum_exp_logits", "predicted_logits", "loss", "logsumexp",
                           "logits", "softmax", "grad_input", "grad_weight"}) {
    ForeignOutputs tampered = outputs(LogitsRounding::none);
    HostTensor& tensor = tampered.at(name);
    const int64_t cols = tensor.shape().size() == 2 ? tensor.shape()[1] : 1;
    const int64_t col = cols == 1 ? 0 : 11;
    store_float(tensor.data(), tensor.dtype(), 37 * cols + col,
                tensor.float_at(37 * cols + col) + 0.5f);
    const CompareReport report = compare_outputs(case_, tampered, {});
    const auto found = std::ranges::find_if(
        report.judgements, [&](const Judgement& judgement) { return judgement.output == name; });
    ASSERT_NE(found, report.judgements.end());
    EXPECT_FALSE(found->fine()) << name;
    EXPECT_EQ(found->row, 37) << name;
    EXPECT_EQ(found->col, cols == 1 ? -1 : 11) << name;
    EXPECT_THAT(describe_worst(*found),
                HasSubstr(name + std::string(cols == 1 ? "[37] is" : "[37, 11] is")));
  }
}

TEST_F(Compare, NanIsBeyond) {
  ForeignOutputs tampered = outputs(LogitsRounding::none);
  tampered.at("loss").as<float>()[4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(compare_outputs(case_, tampered, {}).fine());
}

TEST_F(Compare, AMaskOfBytesIsReadAsOne) {
  ForeignOutputs out;
  HostTensor bytes(DType::u8, {45});
  bytes.fill_zero();
  out.emplace("target_mask", std::move(bytes));
  EXPECT_TRUE(compare_outputs(case_, out, {}).fine());
  out.at("target_mask").as<uint8_t>()[44] = 7;
  const CompareReport report = compare_outputs(case_, out, {});
  ASSERT_EQ(report.judgements.size(), 1U);
  EXPECT_EQ(report.judgements[0].row, 44);
  EXPECT_EQ(report.absent.size(), 10U);
}

TEST_F(Compare, ShapesAndTypesAreChecked) {
  const auto error = [&](const char* name, HostTensor tensor) {
    const std::string path = scratch_.path("outputs");
    tensor.fill_zero();
    EXPECT_TRUE(write_safetensors(path, {{name, &tensor}}, {}).has_value());
    const Result<ForeignOutputs> loaded = load_outputs(path, case_);
    return loaded ? std::string("no error") : loaded.error().message;
  };
  EXPECT_THAT(error("loss", HostTensor(DType::f32, {44})),
              HasSubstr("tensor `loss`: shape [44] must be [45]"));
  EXPECT_THAT(error("loss", HostTensor(DType::bf16, {45})),
              HasSubstr("tensor `loss`: dtype BF16 must be F32"));
  EXPECT_THAT(error("grad_weight", HostTensor(DType::bf16, {64, 507})),
              HasSubstr("tensor `grad_weight`: shape [64, 507] must be [507, 64]"));
  EXPECT_THAT(error("masked_target", HostTensor(DType::f32, {45})),
              HasSubstr("dtype F32 must be I32 or I64"));
  EXPECT_THAT(error("target_mask", HostTensor(DType::i32, {45})),
              HasSubstr("dtype I32 must be U8 or BOOL"));
  EXPECT_THAT(error("something", HostTensor(DType::f32, {45})),
              HasSubstr("has none of the outputs that can be judged"));
  EXPECT_EQ(error("target_mask", HostTensor(DType::u8, {6})), "no error");
  EXPECT_EQ(error("grad_input", HostTensor(DType::f32, {45, 64})), "no error");
}

}  // namespace
}  // namespace logitless::cli
