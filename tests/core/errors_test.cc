// SPDX-License-Identifier: Apache-2.0
// Every rule about arguments: broken, it gives the right kind and a sentence with the argument and
// what came, and nothing is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "logitless/loss.h"
#include "tests/support/cases.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

// Of an error about an argument: parts that name a type are about types.
ErrorKind kind_of(const std::vector<std::string>& parts) {
  for (const DType dtype :
       {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8}) {
    if (std::find(parts.begin(), parts.end(), name_of(dtype)) != parts.end()) {
      return ErrorKind::wrong_type;
    }
  }
  return ErrorKind::invalid_argument;
}

// Every one of `parts` stands in the message.
template <typename T>
void expect_error(const Result<T>& result, ErrorKind kind, const std::vector<std::string>& parts) {
  ASSERT_FALSE(result) << "no error; expected one about " << parts.front();
  EXPECT_EQ(result.error().kind, kind) << result.error().message;
  for (const std::string& part : parts) {
    EXPECT_NE(result.error().message.find(part), std::string::npos)
        << "'" << part << "' is not in: " << result.error().message;
  }
}

// ---- plans ------------------------------------------------------------------------------------

TEST(PlanErrors, Shapes) {
  const ErrorKind invalid = ErrorKind::invalid_argument;
  expect_error(plan_forward({.BT = -1, .V = 2, .H = 3}, {}), invalid, {"BT", "-1"});
  expect_error(plan_forward({.BT = 1, .V = -2, .H = 3}, {}), invalid, {"V", "-2"});
  expect_error(plan_forward({.BT = 1, .V = 2, .H = -3}, {}), invalid, {"H", "-3"});
  expect_error(plan_gradient({.BT = -1, .V = 2, .H = 3}, {}), invalid, {"BT", "-1"});
  expect_error(plan_gradient({.BT = 1, .V = -2, .H = 3}, {}), invalid, {"V", "-2"});
  expect_error(plan_gradient({.BT = 1, .V = 2, .H = -3}, {}), invalid, {"H", "-3"});
  expect_error(plan_merge(-1, 2), invalid, {"BT", "-1"});
  expect_error(plan_merge(1, 0), invalid, {"shards", "0"});
  expect_error(plan_merge(1, -3), invalid, {"shards", "-3"});
  expect_error(plan_loss(-5, 2), invalid, {"BT", "-5"});
  expect_error(plan_loss(5, -2), invalid, {"V", "-2"});
  // Sizes whose product is no number of elements.
  expect_error(plan_forward({.BT = int64_t{1} << 40, .V = int64_t{1} << 40, .H = 1}, {}), invalid,
               {"BT", "V"});
  expect_error(plan_forward({.BT = INT64_MAX, .V = 1, .H = 1}, {}), invalid, {"BT"});
}

TEST(PlanErrors, Options) {
  const Shape shape{.BT = 2, .V = 3, .H = 4};
  expect_error(plan_forward(shape, {}, {.threads = -1}), ErrorKind::invalid_argument,
               {"threads", "-1"});
  expect_error(plan_gradient(shape, {}, {.threads = -2}), ErrorKind::invalid_argument,
               {"threads", "-2"});
  expect_error(plan_merge(2, 2, {.threads = -1}), ErrorKind::invalid_argument, {"threads", "-1"});
  expect_error(plan_loss(2, 2, {}, {.threads = -1}), ErrorKind::invalid_argument,
               {"threads", "-1"});
  expect_error(plan_forward(shape, {}, {.workspace_limit_bytes = -7}), ErrorKind::invalid_argument,
               {"workspace_limit_bytes", "-7"});
  expect_error(plan_gradient(shape, {}, {.workspace_limit_bytes = -7}), ErrorKind::invalid_argument,
               {"workspace_limit_bytes", "-7"});
  for (const Isa isa : {Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::neon_bf16, Isa::neon}) {
    const auto usable = usable_isas();
    if (std::find(usable.begin(), usable.end(), isa) != usable.end()) continue;
    expect_error(plan_forward(shape, {}, {.isa = isa}), ErrorKind::isa_unusable, {name_of(isa)});
    expect_error(plan_gradient(shape, {}, {.isa = isa}), ErrorKind::isa_unusable, {name_of(isa)});
  }
}

TEST(PlanErrors, TypesOfTheForward) {
  const Shape shape{.BT = 2, .V = 3, .H = 4};
  const ErrorKind wrong = ErrorKind::wrong_type;
  for (const DType dtype : {DType::i32, DType::i64, DType::u8}) {
    expect_error(plan_forward(shape, {.operand = dtype}), wrong, {"operand", name_of(dtype)});
  }
  expect_error(plan_forward(shape, {.operand = DType::bf16, .multiply = DType::f16}), wrong,
               {"multiply", "f16", "bf16"});
  expect_error(plan_forward(shape, {.operand = DType::f16, .multiply = DType::bf16}), wrong,
               {"multiply", "f16", "bf16"});
  expect_error(plan_forward(shape, {.operand = DType::f32, .multiply = DType::f16}), wrong,
               {"multiply", "f16"});
  expect_error(plan_forward(shape, {.operand = DType::bf16, .multiply = DType::f32}), wrong,
               {"multiply", "f32"});
  for (const DType dtype : {DType::f32, DType::u8, DType::bf16}) {
    expect_error(plan_forward(shape, {.target = dtype}), wrong, {"target", name_of(dtype)});
  }
  expect_error(plan_forward(shape, {.operand = DType::bf16, .logits = DType::f16}), wrong,
               {"logits", "f16"});
  expect_error(plan_forward(shape, {.logits = DType::i32}), wrong, {"logits", "i32"});
  expect_error(plan_forward(shape, {.logits_rounding = LogitsRounding::infer}),
               ErrorKind::invalid_argument, {"logits_rounding", "infer"});
  // The operand type itself may be named.
  EXPECT_TRUE(plan_forward(shape, {.operand = DType::f16, .multiply = DType::f16}));
}

TEST(PlanErrors, TypesOfTheGradientAndTheLoss) {
  const Shape shape{.BT = 2, .V = 3, .H = 4};
  const ErrorKind wrong = ErrorKind::wrong_type;
  expect_error(plan_gradient(shape, {.operand = DType::i32}), wrong, {"operand", "i32"});
  expect_error(plan_gradient(shape, {.operand = DType::bf16, .multiply = DType::f16}), wrong,
               {"multiply", "f16"});
  expect_error(plan_gradient(shape, {.target = DType::u8}), wrong, {"target", "u8"});
  GradientTypes types;
  types.grad_input = {.dtype = DType::f16};
  expect_error(plan_gradient(shape, types), wrong, {"grad_input", "f16"});
  types = {};
  types.grad_weight = {.dtype = DType::i64};
  expect_error(plan_gradient(shape, types), wrong, {"grad_weight", "i64"});
  for (const DType dtype : {DType::i32, DType::i64, DType::u8}) {
    expect_error(plan_loss(2, 3, {.softmax_logits = dtype}), wrong, {"logits", name_of(dtype)});
  }
}

TEST(PlanErrors, NoOutputIsAPlanThatDoesNothing) {
  GradientTypes types;
  types.grad_input.reset();
  types.grad_weight.reset();
  const auto plan = plan_gradient({.BT = 2, .V = 3, .H = 4}, types);
  if (!plan) {
    EXPECT_EQ(plan.error().kind, ErrorKind::invalid_argument);
    return;
  }
  GradientCase c = make_gradient_case(make_forward_case({.BT = 2, .V = 3, .H = 4}, {}));
  c.grad_input.reset();
  c.grad_weight.reset();
  run_gradient(c, {});
}

// ---- forward ----------------------------------------------------------------------------------

class ForwardErrors : public testing::Test {
 protected:
  static constexpr Shape kShape{.BT = 10, .V = 20, .H = 8};

  // Runs with something broken; no output may change.
  void expect(const std::function<void(ForwardOperands&, ForwardOutputs&)>& breakage,
              const std::vector<std::string>& parts, std::optional<ErrorKind> kind = {}) {
    ForwardCase c = make_forward_case(kShape, all_arithmetics()[1]);
    c.logits = DType::bf16;
    ForwardResult result = make_forward_outputs(c);
    const auto plan = plan_forward(c.shape, c.types(), {.threads = 2});
    ASSERT_TRUE(plan);
    ForwardOperands operands = c.operands();
    operands.rows.counts = counts_.vector_view();
    ForwardOutputs outputs = outputs_of(c, result);
    breakage(operands, outputs);
    auto workspace = guarded_workspace(plan->workspace_bytes());
    if (misalign_) workspace = workspace.subspan(1);
    if (shorten_) workspace = workspace.first(workspace.size() - 1);
    expect_error(run(*plan, operands, outputs, workspace), kind.value_or(kind_of(parts)), parts);
    for (const TestTensor* t :
         {&result.logits_max, &result.sum_exp_logits, &result.predicted_logits,
          &*result.target_mask, &*result.masked_target, &*result.logits}) {
      EXPECT_TRUE(t->untouched()) << parts.front();
    }
  }

  TestTensor counts_ = TestTensor::vector(DType::u8, kShape.BT);
  bool misalign_ = false, shorten_ = false;
};

TEST_F(ForwardErrors, Matrices) {
  expect([](auto& in, auto&) { in.input.rows = 9; }, {"input", "[9, 8]", "[10, 8]"});
  expect([](auto& in, auto&) { in.input.cols = 7; }, {"input", "[10, 7]", "[10, 8]"});
  expect([](auto& in, auto&) { in.weight.rows = 21; }, {"weight", "[21, 8]", "[20, 8]"});
  expect([](auto& in, auto&) { in.weight.cols = 9; }, {"weight", "[20, 9]", "[20, 8]"});
  expect([](auto& in, auto&) { in.input.dtype = DType::f16; }, {"input", "f16", "bf16"});
  expect([](auto& in, auto&) { in.weight.dtype = DType::f32; }, {"weight", "f32", "bf16"});
  expect([](auto& in, auto&) { in.input.data = nullptr; }, {"input", "null"});
  expect([](auto& in, auto&) { in.weight.data = nullptr; }, {"weight", "null"});
  expect([](auto& in, auto&) { in.input.row_stride = -8; }, {"input", "stride", "-8"});
  expect([](auto& in, auto&) { in.weight.col_stride = -1; }, {"weight", "stride", "-1"});
  expect([](auto& in, auto&) { in.input.data = static_cast<const char*>(in.input.data) + 1; },
         {"input", "align"});
}

TEST_F(ForwardErrors, VectorsAndMasks) {
  expect([](auto& in, auto&) { in.target.size = 9; }, {"target", "9", "10"});
  expect([](auto& in, auto&) { in.target.dtype = DType::i32; }, {"target", "i32", "i64"});
  expect([](auto& in, auto&) { in.target.data = nullptr; }, {"target", "null"});
  expect([](auto& in, auto&) { in.target.stride = -1; }, {"target", "stride", "-1"});
  expect([](auto& in, auto&) { in.rows.counts->size = 11; }, {"counts", "11", "10"});
  expect([](auto& in, auto&) { in.rows.counts->dtype = DType::i32; }, {"counts", "i32", "u8"});
  expect([](auto&, auto& out) { out.logits_max.size = 3; }, {"logits_max", "3", "10"});
  expect([](auto&, auto& out) { out.logits_max.dtype = DType::bf16; }, {"logits_max", "bf16"});
  expect([](auto&, auto& out) { out.logits_max.data = nullptr; }, {"logits_max", "null"});
  expect([](auto&, auto& out) { out.logits_max.stride = 0; }, {"logits_max", "stride"});
  expect([](auto&, auto& out) { out.sum_exp_logits.size = 12; }, {"sum_exp_logits", "12", "10"});
  expect([](auto&, auto& out) { out.sum_exp_logits.stride = -2; }, {"sum_exp_logits", "-2"});
  expect([](auto&, auto& out) { out.predicted_logits.size = 0; }, {"predicted_logits", "0", "10"});
  expect([](auto&, auto& out) { out.predicted_logits.dtype = DType::i64; },
         {"predicted_logits", "i64"});
  expect([](auto&, auto& out) { out.target_mask->size = 16; }, {"target_mask", "16", "10"});
  expect([](auto&, auto& out) { out.target_mask->data = nullptr; }, {"target_mask", "null"});
  expect([](auto&, auto& out) { out.target_mask->stride = 0; }, {"target_mask", "stride"});
  expect([](auto&, auto& out) { out.masked_target->dtype = DType::i32; },
         {"masked_target", "i32", "i64"});
  expect([](auto&, auto& out) { out.masked_target->size = 8; }, {"masked_target", "8", "10"});
}

TEST_F(ForwardErrors, LogitsAndRange) {
  expect([](auto&, auto& out) { out.logits.reset(); }, {"logits", "absent"});
  expect([](auto&, auto& out) { out.logits->dtype = DType::f32; }, {"logits", "f32", "bf16"});
  expect([](auto&, auto& out) { out.logits->rows = 20; }, {"logits", "[20, 20]", "[10, 20]"});
  expect([](auto&, auto& out) { out.logits->row_stride = 19; }, {"logits", "stride", "19"});
  expect([](auto&, auto& out) { out.logits->col_stride = 0; }, {"logits", "stride"});
  expect([](auto& in, auto&) { in.vocab_start_index = -5; }, {"vocab_start_index", "-5"});
  expect(
      [](auto& in, auto&) {
        in.vocab_start_index = 7;
        in.vocab_end_index = 6;
      },
      {"vocab_end_index", "6", "7"});
}

TEST_F(ForwardErrors, WorkspaceTooSmallOrMisaligned) {
  shorten_ = true;
  expect([](auto&, auto&) {}, {"workspace"}, ErrorKind::workspace_too_small);
  misalign_ = true;
  shorten_ = false;
  // One byte is missing too, so either rule may speak.
  ForwardCase c = make_forward_case(kShape, all_arithmetics()[1]);
  ForwardResult result = make_forward_outputs(c);
  const auto plan = plan_forward(c.shape, c.types(), {.threads = 2});
  const auto big = guarded_workspace(plan->workspace_bytes() + 64);
  expect_error(run(*plan, c.operands(), outputs_of(c, result), big.subspan(8)),
               ErrorKind::invalid_argument, {"workspace", "64"});
  EXPECT_TRUE(result.logits_max.untouched());
}

TEST_F(ForwardErrors, LogitsThatWereNotPlanned) {
  ForwardCase c = make_forward_case(kShape, all_arithmetics()[1]);
  const auto plan = plan_forward(c.shape, c.types(), {.threads = 2});
  c.logits = DType::bf16;
  ForwardResult result = make_forward_outputs(c);
  expect_error(
      run(*plan, c.operands(), outputs_of(c, result), guarded_workspace(plan->workspace_bytes())),
      ErrorKind::invalid_argument, {"logits"});
  EXPECT_TRUE(result.logits->untouched());
}

// ---- gradient ---------------------------------------------------------------------------------

class GradientErrors : public testing::TestWithParam<GradientMode> {
 protected:
  static constexpr Shape kShape{.BT = 10, .V = 20, .H = 8};

  void expect(const std::function<void(GradientOperands&, GradientOutputs&)>& breakage,
              const std::vector<std::string>& parts, std::optional<ErrorKind> kind = {}) {
    GradientCase c =
        make_gradient_case(make_forward_case(kShape, all_arithmetics()[1], {.outside = 0}),
                           {.mode = GetParam(), .grad_logsumexp = true, .zero_grad = 0});
    c.counts = TestTensor::vector(DType::u8, kShape.BT);
    GradientResult result = make_gradient_outputs(c);
    const auto plan = plan_gradient(c.shape, c.types(), {.threads = 2});
    ASSERT_TRUE(plan);
    GradientOperands operands = c.operands();
    GradientOutputs outputs = outputs_of(result);
    breakage(operands, outputs);
    auto workspace = guarded_workspace(plan->workspace_bytes());
    if (shorten_) workspace = workspace.first(workspace.size() - 1);
    expect_error(run(*plan, operands, outputs, workspace), kind.value_or(kind_of(parts)), parts);
    EXPECT_TRUE(result.grad_input->untouched()) << parts.front();
    EXPECT_TRUE(result.grad_weight->untouched()) << parts.front();
  }
  bool shorten_ = false;
};
INSTANTIATE_TEST_SUITE_P(Modes, GradientErrors,
                         testing::Values(GradientMode::memory_saving,
                                         GradientMode::high_performance),
                         [](const auto& mode) {
                           return mode.param == GradientMode::memory_saving ? "memory_saving"
                                                                            : "high_performance";
                         });

TEST_P(GradientErrors, Operands) {
  expect([](auto& in, auto&) { in.grad.size = 11; }, {"grad", "11", "10"});
  expect([](auto& in, auto&) { in.grad.dtype = DType::bf16; }, {"grad", "bf16", "f32"});
  expect([](auto& in, auto&) { in.grad.data = nullptr; }, {"grad", "null"});
  expect([](auto& in, auto&) { in.grad_logsumexp->size = 3; }, {"grad_logsumexp", "3", "10"});
  expect([](auto& in, auto&) { in.grad_logsumexp->dtype = DType::f16; }, {"grad_logsumexp", "f16"});
  expect([](auto& in, auto&) { in.input.cols = 9; }, {"input", "[10, 9]", "[10, 8]"});
  expect([](auto& in, auto&) { in.input.dtype = DType::f32; }, {"input", "f32", "bf16"});
  expect([](auto& in, auto&) { in.weight.rows = 19; }, {"weight", "[19, 8]", "[20, 8]"});
  expect([](auto& in, auto&) { in.weight.row_stride = -1; }, {"weight", "stride", "-1"});
  expect([](auto& in, auto&) { in.target_mask->size = 12; }, {"target_mask", "12", "10"});
  expect([](auto& in, auto&) { in.target_mask->data = nullptr; }, {"target_mask", "null"});
  expect([](auto& in, auto&) { in.masked_target.size = 9; }, {"masked_target", "9", "10"});
  expect([](auto& in, auto&) { in.masked_target.dtype = DType::i32; },
         {"masked_target", "i32", "i64"});
  expect([](auto& in, auto&) { in.counts->size = 1; }, {"counts", "1", "10"});
  expect([](auto& in, auto&) { in.counts->dtype = DType::f32; }, {"counts", "f32", "u8"});
  if (GetParam() == GradientMode::memory_saving) {
    expect([](auto& in, auto&) { in.logits_max.reset(); }, {"logits_max", "memory-saving"});
    expect([](auto& in, auto&) { in.sum_exp_logits.reset(); }, {"sum_exp_logits", "memory-saving"});
    expect([](auto& in, auto&) { in.logits_max->size = 2; }, {"logits_max", "2", "10"});
    expect([](auto& in, auto&) { in.sum_exp_logits->dtype = DType::i32; },
           {"sum_exp_logits", "i32"});
  } else {
    expect([](auto& in, auto&) { in.softmax.reset(); }, {"softmax", "high-performance"});
    expect([](auto& in, auto&) { in.softmax->cols = 19; }, {"softmax", "[10, 19]", "[10, 20]"});
    expect([](auto& in, auto&) { in.softmax->dtype = DType::bf16; }, {"softmax", "bf16", "f32"});
  }
}

TEST_P(GradientErrors, Outputs) {
  expect([](auto&, auto& out) { out.grad_input.reset(); }, {"grad_input", "absent"});
  expect([](auto&, auto& out) { out.grad_weight.reset(); }, {"grad_weight", "absent"});
  expect([](auto&, auto& out) { out.grad_input->rows = 20; }, {"grad_input", "[20, 8]", "[10, 8]"});
  expect([](auto&, auto& out) { out.grad_input->dtype = DType::f32; },
         {"grad_input", "f32", "bf16"});
  expect([](auto&, auto& out) { out.grad_weight->cols = 7; }, {"grad_weight", "[20, 7]"});
  expect([](auto&, auto& out) { out.grad_weight->row_stride = 0; }, {"grad_weight", "stride"});
  expect([](auto&, auto& out) { out.grad_weight->row_stride = 7; }, {"grad_weight", "stride", "7"});
  expect([](auto&, auto& out) { out.grad_weight->data = nullptr; }, {"grad_weight", "null"});
}

TEST_P(GradientErrors, WorkspaceTooSmall) {
  shorten_ = true;
  expect([](auto&, auto&) {}, {"workspace"}, ErrorKind::workspace_too_small);
}

TEST_P(GradientErrors, ATargetOutsideTheVocabularyIsDataThatIsFoundBeforeAnythingIsWritten) {
  for (const int64_t bad : {int64_t{-1}, int64_t{20}, int64_t{1} << 40, INT64_MIN}) {
    for (const int64_t row : {0, 9}) {
      std::vector<int64_t> targets(10, 3);
      targets[static_cast<size_t>(row)] = bad;
      const ConstVectorView view = vector_view<int64_t>(std::span<const int64_t>(targets));
      expect([&](auto& in, auto&) { in.masked_target = view; },
             {"masked_target", std::to_string(row) + "]", std::to_string(bad)},
             ErrorKind::invalid_data);
    }
  }
}

TEST_P(GradientErrors, ABadTargetThatIsMaskedOrDoesNotCountIsNoError) {
  for (const int how : {0, 1, 2}) {
    GradientCase c =
        make_gradient_case(make_forward_case(kShape, all_arithmetics()[1], {.outside = 0}),
                           {.mode = GetParam(), .zero_grad = 0});
    c.masked_target.set_index(4, 1000);
    c.counts = TestTensor::vector(DType::u8, kShape.BT);
    if (how == 0) c.target_mask->set_index(0, 1 << 4);
    if (how == 1) c.grad.set(4, -0.0);
    if (how == 2) c.counts->set_index(4, 0);
    expect_gradient(c, run_gradient(c, {.threads = 2}));
  }
}

// ---- merge, loss ------------------------------------------------------------------------------

TEST(MergeErrors, ArgumentsAreNamed) {
  std::vector<float> a(4), b(4), c(4);
  std::vector<uint8_t> mask(4);
  const auto shard = [&] {
    return ShardStatistics{vector_view<float>(std::span<const float>(a)),
                           vector_view<float>(std::span<const float>(a)),
                           vector_view<float>(std::span<const float>(a)),
                           ConstMaskView(mask.data(), 4)};
  };
  TestTensor max = TestTensor::vector(DType::f32, 4), sum = TestTensor::vector(DType::f32, 4),
             predicted = TestTensor::vector(DType::f32, 4);
  const auto plan = plan_merge(4, 2);
  ASSERT_TRUE(plan);
  const auto expect =
      [&](const std::function<void(std::vector<ShardStatistics>&, MergeOutputs&)>& breakage,
          const std::vector<std::string>& parts) {
        std::vector<ShardStatistics> shards{shard(), shard()};
        MergeOutputs out{max.vector_view(), sum.vector_view(), predicted.vector_view()};
        breakage(shards, out);
        expect_error(run(*plan, shards, out), kind_of(parts), parts);
        EXPECT_TRUE(max.untouched() && sum.untouched() && predicted.untouched());
      };
  expect([](auto& s, auto&) { s.pop_back(); }, {"shards", "1", "2"});
  expect([](auto& s, auto&) { s[1].logits_max.size = 3; }, {"shards[1]", "logits_max", "3", "4"});
  expect([](auto& s, auto&) { s[0].sum_exp_logits.dtype = DType::f16; },
         {"shards[0]", "sum_exp_logits", "f16"});
  expect([](auto& s, auto&) { s[1].predicted_logits.data = nullptr; },
         {"shards[1]", "predicted_logits", "null"});
  expect([](auto& s, auto&) { s[1].target_mask.size = 8; }, {"shards[1]", "target_mask", "8"});
  expect([](auto&, auto& o) { o.logits_max.size = 5; }, {"logits_max", "5", "4"});
  expect([](auto&, auto& o) { o.sum_exp_logits.stride = 0; }, {"sum_exp_logits", "stride"});
  expect([](auto&, auto& o) { o.predicted_logits.dtype = DType::i32; },
         {"predicted_logits", "i32"});
}

TEST(LossErrors, ArgumentsAreNamed) {
  std::vector<float> values(4), logits(12);
  TestTensor loss = TestTensor::vector(DType::f32, 4),
             softmax = TestTensor::matrix(DType::f32, 4, 3);
  const auto plan = plan_loss(4, 3, {.softmax_logits = DType::f32});
  ASSERT_TRUE(plan);
  const auto expect = [&](const std::function<void(LossOperands&, LossOutputs&)>& breakage,
                          const std::vector<std::string>& parts) {
    const ConstVectorView v = vector_view<float>(std::span<const float>(values));
    LossOperands in{v, v, v};
    in.logits = matrix_view<float>(logits.data(), 4, 3);
    LossOutputs out{loss.vector_view()};
    out.softmax = softmax.matrix_view();
    breakage(in, out);
    expect_error(run(*plan, in, out), kind_of(parts), parts);
    EXPECT_TRUE(loss.untouched() && softmax.untouched());
  };
  expect([](auto& in, auto&) { in.logits_max.size = 5; }, {"logits_max", "5", "4"});
  expect([](auto& in, auto&) { in.sum_exp_logits.dtype = DType::bf16; },
         {"sum_exp_logits", "bf16"});
  expect([](auto& in, auto&) { in.predicted_logits.data = nullptr; }, {"predicted_logits", "null"});
  expect([](auto& in, auto&) { in.logits.reset(); }, {"logits", "absent"});
  expect([](auto& in, auto&) { in.logits->rows = 3; }, {"logits", "[3, 3]", "[4, 3]"});
  expect([](auto& in, auto&) { in.logits->dtype = DType::f16; }, {"logits", "f16", "f32"});
  expect([](auto& in, auto&) { in.counts = ConstVectorView(in.logits->data, DType::u8, 3); },
         {"counts", "3", "4"});
  expect([](auto&, auto& out) { out.loss.size = 3; }, {"loss", "3", "4"});
  expect([](auto&, auto& out) { out.loss.dtype = DType::f16; }, {"loss", "f16"});
  expect([](auto&, auto& out) { out.softmax.reset(); }, {"softmax", "absent"});
  expect([](auto&, auto& out) { out.softmax->dtype = DType::bf16; }, {"softmax", "bf16"});
  expect(
      [](auto&, auto& out) {
        out.logsumexp = VectorView{out.loss.data, DType::f32, 3};
      },
      {"logsumexp", "3", "4"});
}

// ---- cancelling -------------------------------------------------------------------------------

class Cancel : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Cancel);

TEST_P(Cancel, ATokenThatIsSetStopsEveryOperator) {
  CancelToken token;
  token.cancel();
  ForwardCase c = make_forward_case({.BT = 40, .V = 600, .H = 64}, all_arithmetics()[1]);
  ForwardResult result = make_forward_outputs(c);
  const auto plan = plan_forward(c.shape, c.types(), options());
  expect_error(run(*plan, c.operands(), outputs_of(c, result),
                   guarded_workspace(plan->workspace_bytes()), &token),
               ErrorKind::cancelled, {"cancelled"});
  GradientCase g = make_gradient_case(make_forward_case(c.shape, all_arithmetics()[1]));
  GradientResult gradients = make_gradient_outputs(g);
  const auto gradient_plan = plan_gradient(g.shape, g.types(), options());
  expect_error(run(*gradient_plan, g.operands(), outputs_of(gradients),
                   guarded_workspace(gradient_plan->workspace_bytes()), &token),
               ErrorKind::cancelled, {"cancelled"});
  std::vector<float> values(4, 1.0f), out(4);
  const ConstVectorView v = vector_view<float>(std::span<const float>(values));
  expect_error(run(*plan_loss(4, 0, {}, options()), {v, v, v},
                   {vector_view<float>(std::span<float>(out))}, {}, &token),
               ErrorKind::cancelled, {"cancelled"});
  const std::vector<uint8_t> mask(4);
  const std::vector<ShardStatistics> shards{{v, v, v, ConstMaskView(mask.data(), 4)}};
  std::vector<float> sum(4), predicted(4);
  expect_error(
      run(*plan_merge(4, 1, options()), shards,
          {vector_view<float>(std::span<float>(out)), vector_view<float>(std::span<float>(sum)),
           vector_view<float>(std::span<float>(predicted))},
          {}, &token),
      ErrorKind::cancelled, {"cancelled"});
  // And a reset one does not.
  token.reset();
  EXPECT_TRUE(run(*plan, c.operands(), outputs_of(c, result),
                  guarded_workspace(plan->workspace_bytes()), &token));
  expect_forward(c, result);
}

// A run that would take seconds ends within a fraction of one.
TEST_P(Cancel, AnotherThreadStopsALongRun) {
  using std::chrono::steady_clock;
  // Zero strides: sizes of a large model in a few kilobytes.
  const Shape shape{.BT = 4096, .V = isa() == Isa::scalar ? 100'000 : 1'000'000, .H = 512};
  ForwardCase c;
  c.shape = shape;
  c.arithmetic = all_arithmetics()[1];
  c.input = TestTensor::matrix(DType::bf16, shape.BT, shape.H, {.zero_rows = true});
  c.weight = TestTensor::matrix(DType::bf16, shape.V, shape.H, {.zero_rows = true});
  c.target = TestTensor::vector(DType::i64, shape.BT, 0);
  for (int64_t h = 0; h < shape.H; ++h) {
    c.input.set(0, h, 0.01);
    c.weight.set(0, h, 0.01);
  }
  c.target.set_index(0, 5);
  ForwardResult result = make_forward_outputs(c);
  const auto plan = plan_forward(c.shape, c.types(), options());
  ASSERT_TRUE(plan);
  const auto workspace = guarded_workspace(plan->workspace_bytes());
  CancelToken token;
  steady_clock::time_point asked;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    asked = steady_clock::now();
    token.cancel();
  });
  const auto ran = run(*plan, c.operands(), outputs_of(c, result), workspace, &token);
  const auto ended = steady_clock::now();
  other.join();
  expect_error(ran, ErrorKind::cancelled, {"cancelled"});
  EXPECT_LT(std::chrono::duration<double>(ended - asked).count(), 2.0);

  GradientTypes types;
  types.grad_weight.reset();
  const Shape gradient_shape{.BT = shape.BT, .V = shape.V, .H = shape.H};
  const auto gradient_plan = plan_gradient(gradient_shape, types, options());
  ASSERT_TRUE(gradient_plan);
  TestTensor grad = TestTensor::vector(DType::f32, shape.BT, 0);
  grad.set(0, 1.0);
  TestTensor grad_input = TestTensor::matrix(DType::bf16, shape.BT, shape.H);
  GradientOperands operands;
  operands.grad = grad.vector_view();
  operands.logits_max = operands.sum_exp_logits = grad.vector_view();
  operands.input = c.input.matrix_view();
  operands.weight = c.weight.matrix_view();
  operands.masked_target = c.target.vector_view();
  token.reset();
  std::thread another([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    asked = steady_clock::now();
    token.cancel();
  });
  const auto gradient = run(*gradient_plan, operands, {.grad_input = grad_input.matrix_view()},
                            guarded_workspace(gradient_plan->workspace_bytes()), &token);
  const auto gradient_ended = steady_clock::now();
  another.join();
  expect_error(gradient, ErrorKind::cancelled, {"cancelled"});
  EXPECT_LT(std::chrono::duration<double>(gradient_ended - asked).count(), 2.0);
}

}  // namespace
}  // namespace logitless::test
