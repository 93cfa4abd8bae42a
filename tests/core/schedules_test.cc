// SPDX-License-Identifier: Apache-2.0
// The gradient has schedules that a plan chooses among by shape and limit: panels of one's own,
// vocabulary outside, tokens outside. Here each is run on the same problem, whatever the plan would
// have chosen: the same bits, from the first to the last.
#include <gtest/gtest.h>

#include "plan.h"
#include "tests/support/cases.h"
#include "tests/support/isa_test.h"
#include "tests/support/steps.h"

namespace logitless::test {
namespace {

class Schedules : public IsaTest {
 protected:
  static void expect_the_same_bits(const GradientCase& c);
};
LOGITLESS_INSTANTIATE_PER_ISA(Schedules);

struct Schedule {
  const char* name;
  bool own_panels;
  bool few;            // logits from weight as it lies in memory, where there are few tokens
  bool vocab_outside;  // of the other schedules
  int64_t token_chunk;
  int64_t vocab_panels;
};
constexpr Schedule kSchedules[] = {
    {"own panels, one at a time", true, true, false, 0, 1},
    {"own panels, many", true, true, false, 0, 1000},
    {"own panels, weight packed", true, false, false, 0, 3},
    {"vocabulary outside", false, false, true, 28, 3},
    {"vocabulary outside, all tokens", false, false, true, 1000, 2},
    {"tokens outside", false, false, false, 56, 2},
    {"tokens outside, all vocabulary", false, false, false, 28, 1000},
};

GradientPlanData scheduled(GradientPlanData p, const Schedule& s) {
  const int64_t nr = p.target.gemm->nr;
  const int64_t chunk = std::min(s.vocab_panels * nr, round_up(p.shape.V, nr));
  p = with_own_panels(p, chunk);
  if (!s.own_panels || !s.few) p.few = {};
  if (!s.own_panels) {
    p.own_panels = false;
    p.vocab_outside = s.vocab_outside;
    p.token_chunk = std::min(s.token_chunk, round_up(p.shape.BT, 2));
  }
  lay_out(p);
  return p;
}

GradientPlan scheduled(const GradientCase& c, const PlanOptions& options, const Schedule& s) {
  const auto plan = plan_gradient(c.shape, c.types(), options);
  return GradientPlan(std::make_shared<GradientPlanData>(scheduled(plan->data(), s)));
}

void Schedules::expect_the_same_bits(const GradientCase& c) {
  const auto want = run_gradient(c, options(1)).bits();
  for (const Schedule& s : kSchedules) {
    for (const int threads : {1, 2, 3}) {
      ASSERT_EQ(run_gradient(c, scheduled(c, options(threads), s)).bits(), want)
          << c.describe() << ": " << s.name << ", " << threads << " threads";
    }
  }
}

// Every count of tokens that a kernel sees as an edge: lanes, pairs, panels.
TEST_P(Schedules, GradientOfEveryTypeAndMode) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const auto mode : {GradientMode::memory_saving, GradientMode::high_performance}) {
      for (const bool accumulate : {false, true}) {
        for (const int64_t tokens : {1, 7, 33, 83}) {
          GradientCase c =
              make_gradient_case(make_forward_case({.BT = tokens, .V = 301, .H = 71}, arithmetic),
                                 {.mode = mode, .grad_logsumexp = accumulate});
          c.grad_input = {.dtype = accumulate ? DType::f32 : arithmetic.operand,
                          .accumulate = accumulate};
          c.grad_weight = {.dtype = arithmetic.operand, .accumulate = accumulate};
          expect_the_same_bits(c);
        }
      }
    }
  }
}

// Large enough that whole lines of grad_weight are written past the caches, and whole panels are
// packed as they are multiplied; rows that begin on a line and rows that do not; either gradient.
TEST_P(Schedules, GradientWrittenPastTheCaches) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const int64_t H : {192, 195}) {
      GradientCase c =
          make_gradient_case(make_forward_case({.BT = 40, .V = 350, .H = H}, arithmetic));
      c.grad_weight = {.dtype = arithmetic.operand};
      expect_the_same_bits(c);
      c.grad_weight = {.dtype = DType::f32};
      expect_the_same_bits(c);
      c.grad_input.reset();
      expect_the_same_bits(c);
      c.grad_input = GradientOutput{.dtype = DType::f32};
      c.grad_weight.reset();
      expect_the_same_bits(c);
    }
  }
}

TEST_P(Schedules, GradientOfEveryLayout) {
  for (const Layout& layout : all_layouts()) {
    GradientCase c = make_gradient_case(
        make_forward_case({.BT = 21, .V = 130, .H = 66}, {}, {.input = layout, .weight = layout}));
    c.grad_input_layout = c.grad_weight_layout = layout;
    expect_the_same_bits(c);
    c.grad_weight->accumulate = true;
    expect_the_same_bits(c);
  }
}

// Segments of one's own, for few tokens or not, and segments shared by the team.
TEST_P(Schedules, Forward) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const int64_t tokens : {1, 7, 33, 83}) {
      ForwardCase c = make_forward_case({.BT = tokens, .V = 700, .H = 71}, arithmetic);
      c.logits = DType::f32;
      const auto want = run_forward(c, options(1)).bits();
      for (const int threads : {1, 2, 3}) {
        const ForwardPlanData plan = plan_forward(c.shape, c.types(), options(threads))->data();
        ASSERT_TRUE(plan.own_segments()) << "a short batch";
        std::vector<ForwardPlanData> ways;
        ForwardPlanData p = plan;
        p.few = {};
        p.own_panels = true;
        ways.push_back(p);
        p.own_panels = false;
        p.group = 2;
        for (const int64_t block : {int64_t{28}, tokens}) {
          p.token_block = std::min(block, tokens);
          for (const int64_t segments : {1, 3}) {
            p.chunk_segments = segments;
            ways.push_back(p);
          }
        }
        for (ForwardPlanData& way : ways) {
          lay_out(way);
          const ForwardPlan other(std::make_shared<ForwardPlanData>(way));
          ASSERT_EQ(run_forward(c, other).bits(), want)
              << c.describe() << ", " << threads << " threads\n"
              << other.describe();
        }
      }
    }
  }
}

// One pass in one block of tokens and in several, the first also with panels of one's own.
TEST_P(Schedules, OnePass) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const int64_t tokens : {5, 40, 83}) {
      const StepCase c = make_step({.BT = tokens, .V = 301, .H = 71}, arithmetic);
      const auto want = run_step(c, options(1), Strategy::one_pass).bits();
      for (const Schedule& s : kSchedules) {
        if (s.vocab_outside) continue;  // a block of tokens ends before the next one begins
        for (const int threads : {1, 2, 3}) {
          auto p = plan_loss_and_gradient(c.shape, c.types(), options(threads), Strategy::one_pass)
                       ->data();
          const int64_t mr = p.target.gemm->mr;
          p.gradient = scheduled(p.gradient, s);
          p.gradient.few = {};
          if (!s.few) {
            p.forward.few = {};
            p.forward.own_panels = s.own_panels;
          }
          if (!s.own_panels) {
            p.forward.chunk_segments = 1;
            p.forward.token_block = p.gradient.token_chunk =
                std::min(round_up(s.token_chunk, mr), round_up(tokens, mr));
          }
          lay_out(p);
          const LossAndGradientPlan plan(std::make_shared<LossAndGradientPlanData>(p));
          ASSERT_EQ(run_step(c, plan).bits(), want)
              << c.describe() << ": " << s.name << ", " << threads << " threads";
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
