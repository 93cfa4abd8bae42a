// SPDX-License-Identifier: Apache-2.0
#include "cli/case.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/safetensors.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using test::Scratch;
using testing::AllOf;
using testing::HasSubstr;

class CaseFiles : public testing::Test {
 protected:
  // [BT, V, H] = [5, 7, 4].
  CaseFiles() {
    input_.fill_zero();
    weight_.fill_zero();
    for (int64_t b = 0; b < 5; ++b) {
      target_.as<int64_t>()[b] = b;
      store_float(input_.data(), DType::bf16, b * 4, float(b));
    }
  }

  std::string write(const std::string& name, const std::vector<NamedTensor>& tensors,
                    const std::map<std::string, std::string>& metadata = {}) {
    const std::string path = scratch_.path(name);
    EXPECT_TRUE(write_safetensors(path, tensors, metadata).has_value());
    return path;
  }
  std::string write_whole(const std::map<std::string, std::string>& metadata = {}) {
    return write("whole", {{"input", &input_}, {"weight", &weight_}, {"target", &target_}},
                 metadata);
  }
  static std::string error_of(const std::vector<std::string>& paths,
                              const CaseOptions& options = {}) {
    const Result<Case> c = load_case(paths, options);
    return c ? "no error" : c.error().message;
  }

  Scratch scratch_;
  HostTensor input_{DType::bf16, {5, 4}};
  HostTensor weight_{DType::bf16, {7, 4}};
  HostTensor target_{DType::i64, {5}};
};

TEST_F(CaseFiles, OneFileIsACase) {
  const Result<Case> c = load_case({write_whole()});
  ASSERT_TRUE(c.has_value()) << c.error().message;
  EXPECT_EQ(c->shape().BT, 5);
  EXPECT_EQ(c->shape().V, 7);
  EXPECT_EQ(c->shape().H, 4);
  EXPECT_EQ(c->dtype(), DType::bf16);
  EXPECT_EQ(c->target.integer_at(3), 3);
  EXPECT_EQ(c->vocab_start_index, 0);
  // Without a grad of its own: that of the mean loss.
  EXPECT_EQ(c->grad.as<float>()[0], 1.0f / 5.0f);
}

TEST_F(CaseFiles, SeveralFilesMakeACase) {
  const std::string hidden = write("hidden", {{"input", &input_}, {"target", &target_}});
  const std::string head = write("head", {{"lm_head.weight", &weight_}, {"other", &target_}});
  CaseOptions options;
  options.weight_name = "lm_head.weight";
  EXPECT_EQ(error_of({hidden, head}, options), "no error");
  EXPECT_THAT(error_of({hidden, head}),
              AllOf(HasSubstr("hidden"), HasSubstr("head"),
                    HasSubstr("no tensor named `weight`; a case has input [BT, H]"),
                    HasSubstr("lm_head.weight")));
  EXPECT_THAT(error_of({hidden, head, hidden}, options), HasSubstr("tensor `input`: stands in"));
}

TEST_F(CaseFiles, TokensAreTheFirstOnes) {
  CaseOptions options;
  options.tokens = 2;
  const Result<Case> c = load_case({write_whole()}, options);
  ASSERT_TRUE(c.has_value());
  EXPECT_EQ(c->shape().BT, 2);
  EXPECT_EQ(c->input.float_at(4), 1.0f);
  EXPECT_EQ(c->grad.as<float>()[1], 0.5f);
  options.tokens = 6;
  EXPECT_THAT(error_of({write_whole()}, options),
              HasSubstr("tensor `input`: has 5 tokens, 6 are asked for"));
  options.tokens = 0;
  EXPECT_EQ(error_of({write_whole()}, options), "no error");
}

TEST_F(CaseFiles, DtypeConvertsBothOperands) {
  CaseOptions options;
  options.dtype = DType::f32;
  const Result<Case> c = load_case({write_whole()}, options);
  ASSERT_TRUE(c.has_value());
  EXPECT_EQ(c->input.dtype(), DType::f32);
  EXPECT_EQ(c->weight.dtype(), DType::f32);
  EXPECT_EQ(c->input.float_at(8), 2.0f);
}

TEST_F(CaseFiles, ShapesAndTypesMustFit) {
  HostTensor narrow(DType::bf16, {7, 3});
  HostTensor vector(DType::bf16, {7});
  HostTensor floats(DType::f32, {7, 4});
  HostTensor ids(DType::i32, {7, 4});
  HostTensor few(DType::i64, {4});
  HostTensor wrong_target(DType::f32, {5});
  HostTensor wrong_grad(DType::bf16, {5});
  narrow.fill_zero();
  vector.fill_zero();
  floats.fill_zero();
  ids.fill_zero();
  few.fill_zero();
  wrong_target.fill_zero();
  wrong_grad.fill_zero();
  const auto with = [&](const HostTensor& weight, const HostTensor& target) {
    return error_of({write("f", {{"input", &input_}, {"weight", &weight}, {"target", &target}})});
  };
  EXPECT_THAT(with(narrow, target_),
              HasSubstr("tensor `weight`: shape [7, 3] must be [V, H] with H = 4"));
  EXPECT_THAT(with(vector, target_), HasSubstr("tensor `weight`: shape [7] must be [V, H]"));
  EXPECT_THAT(with(floats, target_),
              HasSubstr("tensor `weight`: dtype F32 must be BF16, the dtype of `input`"));
  EXPECT_THAT(with(ids, target_), HasSubstr("dtype I32 is not one of F32, F16, BF16"));
  EXPECT_THAT(with(weight_, few), HasSubstr("tensor `target`: shape [4] must be [BT] with BT = 5"));
  EXPECT_THAT(with(weight_, wrong_target),
              HasSubstr("tensor `target`: dtype F32 is not one of I32, I64"));
  EXPECT_THAT(error_of({write_whole(), write("g", {{"grad", &wrong_grad}})}),
              HasSubstr("tensor `grad`: dtype BF16 must be F32"));
}

TEST_F(CaseFiles, ScalarsComeFromMetadata) {
  const Result<Case> c =
      load_case({write_whole({{"vocab_start_index", "100"}, {"vocab_end_index", "107"}})});
  ASSERT_TRUE(c.has_value()) << c.error().message;
  EXPECT_EQ(c->vocab_start_index, 100);
  EXPECT_EQ(c->tokens_outside(), 5);
  EXPECT_THAT(error_of({write_whole({{"vocab_end_index", "8"}})}),
              HasSubstr("`vocab_end_index` is 8; vocab_start_index 0 and the 7 rows of weight"));
  EXPECT_THAT(error_of({write_whole({{"vocab_start_index", "-1"}})}), HasSubstr("must be >= 0"));
  EXPECT_THAT(error_of({write_whole({{"vocab_start_index", "9223372036854775807"}})}),
              HasSubstr("below 2^63"));
  EXPECT_THAT(error_of({write_whole({{"vocab_start_index", "ten"}})}),
              HasSubstr("is 'ten', which is not a whole number"));
  EXPECT_THAT(error_of({write_whole({{"vocab_start_index", "99999999999999999999"}})}),
              HasSubstr("not a whole number"));
}

TEST_F(CaseFiles, IgnoredTokensDoNotCount) {
  CaseOptions options;
  options.ignore_index = 3;
  const Result<Case> c = load_case({write_whole({{"ignore_index", "4"}})}, options);
  ASSERT_TRUE(c.has_value());
  EXPECT_EQ(c->ignore_index, 3);  // the option beats the file
  EXPECT_EQ(c->counting_tokens(), 4);
  EXPECT_EQ(c->grad.as<float>()[3], 0.0f);
  EXPECT_EQ(c->grad.as<float>()[4], 0.25f);
  EXPECT_EQ(load_case({write_whole({{"ignore_index", "4"}})})->ignore_index, 4);
}

TEST_F(CaseFiles, GradsOfTheFileAreUsed) {
  HostTensor grad(DType::f32, {5});
  for (int64_t b = 0; b < 5; ++b) grad.as<float>()[b] = float(b);
  const std::string grads = write("grads", {{"grad", &grad}, {"grad_logsumexp", &grad}});
  CaseOptions options;
  options.tokens = 3;
  const Result<Case> c = load_case({write_whole(), grads}, options);
  ASSERT_TRUE(c.has_value()) << c.error().message;
  EXPECT_EQ(c->grad.elements(), 3);
  EXPECT_EQ(c->grad.as<float>()[2], 2.0f);
  ASSERT_TRUE(c->grad_logsumexp.has_value());
  EXPECT_EQ(c->grad_logsumexp->as<float>()[1], 1.0f);
}

}  // namespace
}  // namespace logitless::cli
