// SPDX-License-Identifier: Apache-2.0
// What becomes of numbers below 2^-126 on each level, as docs/numerics.md says, and of the host's
// own floating-point settings.
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <optional>

#include "logitless/loss.h"
#include "tests/support/cases.h"
#include "tests/support/isa_test.h"
#include "tests/support/steps.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace logitless::test {
namespace {

class Subnormal : public IsaTest {
 protected:
  // Does this level multiply in an instruction that takes subnormals as zeros?
  static bool flushes(const Arithmetic& arithmetic) {
    return arithmetic.multiplied() == DType::bf16 &&
           (isa() == Isa::avx512bf16 || isa() == Isa::neon_bf16);
  }
  // The logit of one product of two numbers.
  static double logit(const Arithmetic& arithmetic, double input, double weight) {
    ForwardCase c;
    c.shape = {.BT = 1, .V = 1, .H = 1};
    c.arithmetic = arithmetic;
    c.logits = DType::f32;
    c.input = TestTensor::matrix(arithmetic.operand, 1, 1);
    c.weight = TestTensor::matrix(arithmetic.operand, 1, 1);
    c.target = TestTensor::vector(DType::i64, 1);
    c.input.set(0, 0, input);
    c.weight.set(0, 0, weight);
    c.target.set_index(0, 0);
    EXPECT_EQ(c.input.get(0, 0), input) << "the type holds this number";
    return run_forward(c, options()).logits->get(0, 0);
  }
};
LOGITLESS_INSTANTIATE_PER_ISA(Subnormal);

TEST_P(Subnormal, OperandsAreZerosInDotProductsOfBf16Only) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    if (arithmetic.operand == DType::f16) continue;
    EXPECT_EQ(logit(arithmetic, 0x1p-130, 0x1p100), flushes(arithmetic) ? 0.0 : 0x1p-30)
        << arithmetic.name;
    EXPECT_EQ(logit(arithmetic, 0x1p-126, 0x1p100), 0x1p-26) << arithmetic.name;
  }
}

// The least number of fp16 is far above fp32's subnormals.
TEST_P(Subnormal, OperandsOfFp16AreKeptEverywhere) {
  const Arithmetic f16 = all_arithmetics()[0];
  ASSERT_EQ(f16.operand, DType::f16);
  for (const double x : {0x1p-24, 0x1.8p-23, 0x1.ff8p-15}) {
    EXPECT_EQ(logit(f16, x, 0x1p-24), x * 0x1p-24);
    EXPECT_EQ(logit(f16, x, 0x1p10), x * 0x1p10);
  }
}

TEST_P(Subnormal, LogitsAreZerosInDotProductsOfBf16Only) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    if (arithmetic.operand == DType::f16) continue;
    EXPECT_EQ(logit(arithmetic, 0x1p-70, 0x1p-70), flushes(arithmetic) ? 0.0 : 0x1p-140)
        << arithmetic.name;
    EXPECT_EQ(logit(arithmetic, 0x1p-70, 0x1p-56), 0x1p-126) << arithmetic.name;
  }
}

// exp, softmax and what is stored as fp32: kept on every level.
TEST_P(Subnormal, SoftmaxIsKeptEverywhere) {
  const std::vector<float> logits = {0.0f, -88.0f, -95.0f, -103.0f, -104.5f};
  std::vector<float> softmax(logits.size());
  const std::vector<float> max = {0.0f}, sum = {1.0f}, predicted = {0.0f};
  std::vector<float> loss(1);
  const auto n = static_cast<int64_t>(logits.size());
  LossOperands in{vector_view<float>(std::span<const float>(max)),
                  vector_view<float>(std::span<const float>(sum)),
                  vector_view<float>(std::span<const float>(predicted))};
  in.logits = matrix_view<float>(logits.data(), 1, n);
  LossOutputs out{vector_view<float>(std::span<float>(loss))};
  out.softmax = matrix_view<float>(softmax.data(), 1, n);
  ASSERT_TRUE(run(*plan_loss(1, n, {.softmax_logits = DType::f32}, options()), in, out));
  for (size_t i = 0; i < logits.size(); ++i) {
    const double want = std::exp(static_cast<double>(logits[i]));
    EXPECT_NEAR(softmax[i], want, std::max(0x1p-22 * want, 0x1p-148)) << logits[i];
  }
  EXPECT_GT(softmax[3], 0.0f);
  EXPECT_EQ(softmax[4], 0.0f);
}

// grad_logits below 2^-126 where bf16 pairs are multiplied: nothing; elsewhere what it is.
TEST_P(Subnormal, GradLogitsAreZerosInDotProductsOfBf16Only) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const Strategy strategy : {Strategy::one_pass, Strategy::recompute}) {
      // 256 equal logits: softmax is 2^-8, grad_logits 2^-128 but for the target.
      StepCase c;
      c.shape = {.BT = 1, .V = 256, .H = 2};
      c.arithmetic = arithmetic;
      c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
      c.input = TestTensor::matrix(arithmetic.operand, 1, 2);
      c.weight = TestTensor::matrix(arithmetic.operand, 256, 2);
      c.target = TestTensor::vector(DType::i64, 1);
      c.target.set_index(0, 0);
      c.token_weights = TestTensor::vector(DType::f32, 1);
      c.token_weights->set(0, 0x1p-120);
      c.input.set(0, 0, 0.0);
      c.input.set(0, 1, 0x1p14);
      for (int64_t v = 0; v < 256; ++v) {
        c.weight.set(v, 0, v == 5 ? 0x1p14 : 0.0);
        c.weight.set(v, 1, 0.0);
      }
      const StepResult r = run_step(c, options(), strategy);
      const double want = flushes(arithmetic) ? 0.0 : 0x1p-114;
      EXPECT_EQ(r.gradients.grad_input->get(0, 0), want) << arithmetic.name;
      EXPECT_EQ(r.gradients.grad_weight->get(5, 1), want) << arithmetic.name;
      // The target's is no subnormal.
      EXPECT_NEAR(r.gradients.grad_weight->get(0, 1), -0x1.fep-107, 0x1p-114) << arithmetic.name;
    }
  }
}

// ---- the host's settings ----------------------------------------------------------------------

// Subnormals as zeros and rounding upwards, for this thread alone.
class HostSettings {
 public:
#if defined(__x86_64__)
  HostSettings() : before_(_mm_getcsr()) { _mm_setcsr(kMine); }
  ~HostSettings() { _mm_setcsr(before_); }
  bool unchanged() const { return (_mm_getcsr() & ~0x3fu) == kMine; }  // but for the sticky flags

 private:
  static constexpr unsigned kMine = 0x1f80 | 0x8040 | 0x4000;
  unsigned before_;
#elif defined(__aarch64__)
  HostSettings() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(kMine));
  }
  ~HostSettings() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
  bool unchanged() const {
    uint64_t now = 0;
    asm volatile("mrs %0, fpcr" : "=r"(now));
    return now == kMine;
  }

 private:
  static constexpr uint64_t kMine = (uint64_t{1} << 24) | (uint64_t{1} << 22);
  uint64_t before_ = 0;
#endif
};

// Operands of which many are subnormal or give such products.
template <class Case>
void make_tiny(Case& c) {
  for (int64_t b = 0; b < c.shape.BT; ++b) {
    for (int64_t h = 0; h < c.shape.H; h += 2) c.input.set(b, h, c.input.get(b, h) * 0x1p-70);
  }
  for (int64_t v = 0; v < c.shape.V; ++v) {
    for (int64_t h = 0; h < c.shape.H; h += 4) c.weight.set(v, h, c.weight.get(v, h) * 0x1p-60);
  }
}

TEST_P(Subnormal, TheHostsSettingsChangeNoBitAndStayAsTheyAre) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    ForwardCase forward = make_forward_case({.BT = 40, .V = 300, .H = 8}, arithmetic);
    forward.logits = DType::f32;
    make_tiny(forward);
    GradientCase gradient = make_gradient_case(
        make_forward_case({.BT = 40, .V = 300, .H = 8}, arithmetic), {.grad_scale = 0x1p-120});
    make_tiny(gradient);
    gradient.grad_input = gradient.grad_weight = GradientOutput{.dtype = DType::f32};
    StepCase step = make_step({.BT = 40, .V = 300, .H = 8}, arithmetic);
    make_tiny(step);
    step.normalizer = 0x1.8p119;
    step.grad_input = step.grad_weight = GradientOutput{.dtype = DType::f32};
    const auto forward_bits = run_forward(forward, options()).bits();
    const auto gradient_bits = run_gradient(gradient, options()).bits();
    const auto one_pass = run_step(step, options(), Strategy::one_pass);
    const auto recompute = run_step(step, options(), Strategy::recompute);
    for (const int threads : {1, 2}) {
      const auto with_settings = [](auto&& work) {
        bool unchanged = false;
        {
          const HostSettings settings;
          work();
          unchanged = settings.unchanged();
        }
        EXPECT_TRUE(unchanged);
      };
      std::optional<ForwardResult> f;
      with_settings([&] { f.emplace(run_forward(forward, options(threads))); });
      EXPECT_EQ(f->bits(), forward_bits) << arithmetic.name << ", " << threads << " threads";
      GradientResult g = make_gradient_outputs(gradient);
      const auto plan = plan_gradient(gradient.shape, gradient.types(), options(threads));
      with_settings([&] {
        EXPECT_TRUE(run(*plan, gradient.operands(), outputs_of(g),
                        guarded_workspace(plan->workspace_bytes())));
      });
      EXPECT_EQ(g.bits(), gradient_bits) << arithmetic.name << ", " << threads << " threads";
      for (const Strategy strategy : {Strategy::one_pass, Strategy::recompute}) {
        std::optional<StepResult> s;
        with_settings([&] { s.emplace(run_step(step, options(threads), strategy)); });
        EXPECT_EQ(s->bits(), (strategy == Strategy::one_pass ? one_pass : recompute).bits())
            << arithmetic.name << ", " << threads << " threads";
      }
    }
  }
}

// A host that turns floating-point exceptions into signals does so for its own arithmetic.
TEST_P(Subnormal, TheHostsTrapsDoNotGoOff) {
  StepCase c = make_step({.BT = 20, .V = 300, .H = 8}, all_arithmetics()[2]);
  c.input.set(3, 0, NAN);
  c.input.set(4, 0, 3e38);
  c.input.set(5, 0, INFINITY);
  const LossAndGradientPlan plan = *plan_loss_and_gradient(c.shape, c.types(), options());
  const auto want = run_step(c, options(), Strategy::automatic).bits();
  const int traps = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW;
  if (feenableexcept(traps) == -1) GTEST_SKIP() << "this CPU has no traps";
  const auto got = run_step(c, options(), Strategy::automatic);
  const int enabled = fegetexcept();
  fedisableexcept(FE_ALL_EXCEPT);
  EXPECT_EQ(enabled & traps, traps);
  EXPECT_EQ(got.bits(), want);
}

}  // namespace
}  // namespace logitless::test
