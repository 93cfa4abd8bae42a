// SPDX-License-Identifier: Apache-2.0
// What a plan promises before anything runs: workspace within its contract and limit, the same plan
// for the same question, a description a person can read.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/support/cases.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

class Plan : public IsaTest {};
LOGITLESS_INSTANTIATE_PER_ISA(Plan);

constexpr int64_t kMiB = int64_t{1} << 20;

const std::vector<Shape> kShapes = {{.BT = 1, .V = 1, .H = 1},
                                    {.BT = 1, .V = 151936, .H = 4096},
                                    {.BT = 7, .V = 32000, .H = 2048},
                                    {.BT = 1024, .V = 49152, .H = 576},
                                    {.BT = 2048, .V = 128256, .H = 1024},
                                    {.BT = 4096, .V = 151936, .H = 8192},
                                    {.BT = 1 << 20, .V = 256000, .H = 4096},
                                    {.BT = 1 << 20, .V = 1000, .H = 8192},
                                    {.BT = 131072, .V = 151936, .H = 1},
                                    {.BT = 3, .V = int64_t{1} << 32, .H = 64},
                                    {.BT = 0, .V = 0, .H = 0}};

TEST_P(Plan, ForwardWorkspaceIsWithinSixteenMebibytes) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape : kShapes) {
      for (const int threads : {1, 2, 16, 64}) {
        const auto plan =
            plan_forward(shape, {.operand = arithmetic.operand, .multiply = arithmetic.multiply},
                         options(threads));
        ASSERT_TRUE(plan) << plan.error().message;
        EXPECT_LE(plan->workspace_bytes(), 16 * kMiB)
            << arithmetic.name << " BT " << shape.BT << " V " << shape.V << " H " << shape.H
            << " threads " << threads;
        EXPECT_EQ(plan->isa(), isa());
        EXPECT_EQ(plan->threads(), threads);
        EXPECT_EQ(plan->shape().V, shape.V);
      }
    }
  }
}

TEST_P(Plan, GradientWorkspaceIsWithinItsContract) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape : kShapes) {
      for (const bool f32_input : {false, true}) {
        for (const bool f32_weight : {false, true}) {
          GradientTypes types{.operand = arithmetic.operand, .multiply = arithmetic.multiply};
          types.grad_input = {.dtype = f32_input ? DType::f32 : arithmetic.operand};
          types.grad_weight = {.dtype = f32_weight ? DType::f32 : arithmetic.operand};
          const auto plan = plan_gradient(shape, types, options());
          ASSERT_TRUE(plan) << plan.error().message;
          // One accumulator, counted in whole tiles (of at most 32 rows and columns); none where
          // the caller's own float output can be it.
          const bool given =
              types.grad_input->dtype == DType::f32 || types.grad_weight->dtype == DType::f32;
          const int64_t least = std::min(shape.BT, shape.V);
          const int64_t accumulator = given ? 0 : (least + 64) * (shape.H + 64) * 4;
          EXPECT_LE(plan->workspace_bytes(), 64 * kMiB + accumulator)
              << arithmetic.name << " BT " << shape.BT << " V " << shape.V << " H " << shape.H
              << " f32 " << f32_input << f32_weight;
        }
      }
    }
  }
}

TEST_P(Plan, OneOutputAloneNeedsNoAccumulator) {
  for (const bool input : {true, false}) {
    GradientTypes types;
    if (input) {
      types.grad_weight.reset();
    } else {
      types.grad_input.reset();
    }
    const auto plan = plan_gradient({.BT = 2048, .V = 128256, .H = 1024}, types, options());
    ASSERT_TRUE(plan);
    EXPECT_LE(plan->workspace_bytes(), 64 * kMiB);
  }
}

TEST_P(Plan, IsAFunctionOfItsArguments) {
  const Shape shape{.BT = 777, .V = 12345, .H = 512};
  const auto a = plan_forward(shape, {}, options());
  const auto b = plan_forward(shape, {}, options());
  ASSERT_TRUE(a && b);
  EXPECT_EQ(a->workspace_bytes(), b->workspace_bytes());
  EXPECT_EQ(a->describe(), b->describe());
  const auto c = plan_gradient(shape, {}, options());
  const auto d = plan_gradient(shape, {}, options());
  ASSERT_TRUE(c && d);
  EXPECT_EQ(c->describe(), d->describe());
}

TEST_P(Plan, DescribesItself) {
  const auto forward = plan_forward({.BT = 1024, .V = 32000, .H = 2048}, {}, options());
  ASSERT_TRUE(forward);
  for (const std::string& part :
       {std::string("1024"), std::string("32000"), std::string("2048"), std::string("bf16"),
        std::string(name_of(isa())), std::to_string(forward->workspace_bytes())}) {
    EXPECT_NE(forward->describe().find(part), std::string::npos) << part << " in\n"
                                                                 << forward->describe();
  }
  const auto gradient = plan_gradient({.BT = 1024, .V = 32000, .H = 2048}, {}, options());
  ASSERT_TRUE(gradient);
  EXPECT_NE(gradient->describe().find(name_of(isa())), std::string::npos);
  EXPECT_NE(gradient->describe().find(std::to_string(gradient->workspace_bytes())),
            std::string::npos)
      << gradient->describe();
  EXPECT_FALSE(plan_merge(5, 2, options())->describe().empty());
  EXPECT_FALSE(plan_loss(5, 2, {}, options())->describe().empty());
}

// The number in "... the least possible workspace is N bytes".
int64_t least_of(const std::string& message) {
  const auto at = message.find("least");
  if (at == std::string::npos) return -1;
  const auto digit = message.find_first_of("0123456789", at);
  return digit == std::string::npos ? -1 : std::stoll(message.substr(digit));
}

TEST_P(Plan, ALimitTooSmallNamesTheLeastAndThatWorks) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape :
         {Shape{.BT = 40, .V = 600, .H = 70}, Shape{.BT = 300, .V = 40, .H = 33}}) {
      const ForwardCase c = make_forward_case(shape, arithmetic);
      PlanOptions small = options();
      small.workspace_limit_bytes = 1;
      const auto refused = plan_forward(shape, c.types(), small);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().kind, ErrorKind::limit_too_small);
      const int64_t least = least_of(refused.error().message);
      ASSERT_GT(least, 1) << refused.error().message;
      small.workspace_limit_bytes = least - 1;
      EXPECT_FALSE(plan_forward(shape, c.types(), small));
      small.workspace_limit_bytes = least;
      const auto want = run_forward(c, options()).bits();
      EXPECT_EQ(run_forward(c, small).bits(), want);

      const GradientCase g = make_gradient_case(make_forward_case(shape, arithmetic));
      PlanOptions tiny = options();
      tiny.workspace_limit_bytes = 1;
      const auto no = plan_gradient(shape, g.types(), tiny);
      ASSERT_FALSE(no);
      EXPECT_EQ(no.error().kind, ErrorKind::limit_too_small);
      const int64_t least_gradient = least_of(no.error().message);
      ASSERT_GT(least_gradient, 1) << no.error().message;
      tiny.workspace_limit_bytes = least_gradient - 1;
      EXPECT_FALSE(plan_gradient(shape, g.types(), tiny));
      tiny.workspace_limit_bytes = least_gradient;
      const auto gradient = run_gradient(g, options()).bits();
      EXPECT_EQ(run_gradient(g, tiny).bits(), gradient);
    }
  }
}

TEST_P(Plan, AnyLimitThatIsAcceptedIsKept) {
  const Shape shape{.BT = 2048, .V = 49152, .H = 576};
  for (int64_t limit = int64_t{1} << 12; limit < int64_t{1} << 32; limit *= 2) {
    PlanOptions limited = options();
    limited.workspace_limit_bytes = limit;
    const auto forward = plan_forward(shape, {}, limited);
    if (forward) {
      EXPECT_LE(forward->workspace_bytes(), limit);
    } else {
      EXPECT_EQ(forward.error().kind, ErrorKind::limit_too_small);
    }
    const auto gradient = plan_gradient(shape, {}, limited);
    if (gradient) {
      EXPECT_LE(gradient->workspace_bytes(), limit);
    } else {
      EXPECT_EQ(gradient.error().kind, ErrorKind::limit_too_small);
    }
  }
}

// Heads of real models, up to H = 8192: with 8 MiB beside the accumulator there is a plan for the
// gradient and for a whole step, for teams of any size.
TEST_P(Plan, EightMebibytesBesideTheAccumulatorSuffice) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Shape& shape :
         {Shape{.BT = 1024, .V = 32000, .H = 2048}, Shape{.BT = 512, .V = 32064, .H = 4096},
          Shape{.BT = 2048, .V = 128256, .H = 2048}, Shape{.BT = 8192, .V = 32000, .H = 1024},
          Shape{.BT = 1024, .V = 49152, .H = 576}, Shape{.BT = 8192, .V = 128256, .H = 4096},
          Shape{.BT = 1024, .V = 256000, .H = 8192}, Shape{.BT = 65536, .V = 151936, .H = 8192}}) {
      for (const bool given : {false, true}) {  // an fp32 output is its own accumulator
        for (const int threads : {1, 2, 16}) {
          const DType type = given ? DType::f32 : arithmetic.operand;
          const bool none = type == DType::f32;
          // The forward packs one segment of 256 vocabulary rows; as fp32 8 MiB of them at
          // H = 8192, with nothing else to share.
          if (none && shape.H == 8192) continue;
          const int64_t accumulator =
              none ? 0 : (std::min(shape.BT, shape.V) + 64) * (shape.H + 64) * 4;
          PlanOptions limited = options(threads);
          limited.workspace_limit_bytes = accumulator + 8 * kMiB;
          SCOPED_TRACE(std::string(arithmetic.name) + " BT " + std::to_string(shape.BT) + " V " +
                       std::to_string(shape.V) + " H " + std::to_string(shape.H) + ", " +
                       std::to_string(threads) + " threads");
          const GradientOutput output{.dtype = type};
          const auto gradient = plan_gradient(shape,
                                              {.operand = arithmetic.operand,
                                               .multiply = arithmetic.multiply,
                                               .grad_input = output,
                                               .grad_weight = output},
                                              limited);
          ASSERT_TRUE(gradient) << gradient.error().message;
          EXPECT_LE(gradient->workspace_bytes(), limited.workspace_limit_bytes);
          const auto step = plan_loss_and_gradient(shape,
                                                   {.operand = arithmetic.operand,
                                                    .multiply = arithmetic.multiply,
                                                    .grad_input = output,
                                                    .grad_weight = output},
                                                   limited);
          ASSERT_TRUE(step) << step.error().message;
          EXPECT_LE(step->workspace_bytes(), limited.workspace_limit_bytes);
        }
      }
    }
  }
}

// Every size that is allowed is planned, or refused, without a search as long as the sizes are.
TEST_P(Plan, TheLargestSizesAreAnsweredAtOnce) {
  constexpr int64_t kMost = int64_t{1} << 48;
  for (const Shape& shape : {Shape{.BT = kMost, .V = 1, .H = 1}, Shape{.BT = 1, .V = kMost, .H = 1},
                             Shape{.BT = 1, .V = 1, .H = kMost},
                             Shape{.BT = int64_t{1} << 40, .V = 1 << 12, .H = 1 << 12},
                             Shape{.BT = 1 << 12, .V = int64_t{1} << 40, .H = 1 << 12}}) {
    for (const int64_t limit : {int64_t{0}, kMiB, 1024 * kMiB}) {
      PlanOptions wanted = options(3);
      wanted.workspace_limit_bytes = limit;
      // A sparse gradient numbers the candidates of a token by 32 bits.
      const bool too_many = shape.V == kMost || shape.V == int64_t{1} << 40;
      const auto kept = [&](const auto& plan, bool sparse = false) {
        if (plan) {
          EXPECT_FALSE(sparse && too_many);
          EXPECT_GE(plan->workspace_bytes(), 0);
          EXPECT_TRUE(limit == 0 || plan->workspace_bytes() <= limit);
        } else if (sparse && too_many) {
          EXPECT_EQ(plan.error().kind, ErrorKind::invalid_argument);
          EXPECT_NE(plan.error().message.find("grad_tolerance: must be 0"), std::string::npos)
              << plan.error().message;
        } else {
          EXPECT_EQ(plan.error().kind, ErrorKind::limit_too_small) << plan.error().message;
        }
      };
      kept(plan_forward(shape, {}, wanted));
      for (const float tolerance : {0.0f, 0x1p-9f}) {
        LossAndGradientTypes types{.grad_input = {{DType::bf16}}, .grad_weight = {{DType::bf16}}};
        types.grad_tolerance = tolerance;
        GradientTypes apart{.grad_input = {{DType::bf16}}, .grad_weight = {{DType::bf16}}};
        apart.grad_tolerance = tolerance;
        kept(plan_gradient(shape, apart, wanted), tolerance > 0);
        for (const Strategy strategy : {Strategy::automatic, Strategy::one_pass}) {
          kept(plan_loss_and_gradient(shape, types, wanted, strategy), tolerance > 0);
        }
      }
    }
  }
}

TEST_P(Plan, ThreadsAreTakenFromTheOptionsOrTheMachine) {
  EXPECT_EQ(plan_forward({.BT = 4, .V = 4, .H = 4}, {}, options(5))->threads(), 5);
  EXPECT_EQ(plan_forward({.BT = 4096, .V = 4096, .H = 4096}, {}, {.isa = isa()})->threads(),
            default_threads());
  // A tiny problem is done before a second thread has woken up.
  EXPECT_EQ(plan_forward({.BT = 4, .V = 4, .H = 4}, {}, {.isa = isa()})->threads(), 1);
}

// A plan outlives what made it and may be shared by threads.
TEST_P(Plan, IsCheapToCopyAndShare) {
  ForwardPlan copy = *plan_forward({.BT = 4, .V = 4, .H = 4}, {}, options());
  const ForwardPlan other = copy;
  EXPECT_EQ(&copy.data(), &other.data());
}

}  // namespace
}  // namespace logitless::test
