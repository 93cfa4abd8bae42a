// SPDX-License-Identifier: Apache-2.0
// Peak memory as a user sees it: the resident set of a fresh process, its operands and outputs
// touched before the operator runs.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "logitless/logitless.h"
#include "tests/support/sanitizers.h"

// The linker's: where this program's writable data begins and ends.
extern "C" char __data_start, _end;

namespace logitless::test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr Shape kShape{.BT = 2048, .V = 128256, .H = 1024};
// Threads' stacks, the tables and code pages that a first run touches, page rounding.
constexpr int64_t kSlack = 6 * kMiB;

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

std::vector<bfloat16> operand(int64_t n, float scale) {
  std::vector<bfloat16> values(static_cast<size_t>(n));
  uint32_t state = 1;
  for (bfloat16& value : values) {
    state = state * 1664525u + 1013904223u;
    value = bfloat16((static_cast<float>(state >> 8) * 0x1p-24f - 0.5f) * scale);
  }
  return values;
}

struct Growth {
  int64_t bytes = -1;            // of the resident set, by planning and running
  int64_t workspace_bytes = -1;  // as planned
};

// Runs f in a fresh process (of this program; nothing ran in it yet) and reads what it measured.
template <typename F>
Growth in_fresh_process(F&& f) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    const Growth growth = f();
    const bool written = write(ends[1], &growth, sizeof growth) == sizeof growth;
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  Growth growth;
  if (read(ends[0], &growth, sizeof growth) != sizeof growth) growth = {};
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  std::printf("workspace %.1f MiB, resident set grew by %.1f MiB\n",
              static_cast<double>(growth.workspace_bytes) / kMiB,
              static_cast<double>(growth.bytes) / kMiB);
  return growth;
}

Growth measure_forward() {
  const auto input = operand(kShape.BT * kShape.H, 1.0f);
  const auto weight = operand(kShape.V * kShape.H, 0.1f);
  const std::vector<int64_t> target(static_cast<size_t>(kShape.BT), 77);
  std::vector<float> max(target.size(), 1.0f), sum(max), predicted(max);
  const int64_t before = peak_resident_bytes();
  const auto plan = plan_forward(kShape, {}, {.threads = 2});
  if (!plan) return {};
  std::vector<std::byte> memory(static_cast<size_t>(plan->workspace_bytes() + 64));
  std::byte* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  const auto ran = run(*plan,
                       {.input = matrix_view<bfloat16>(input.data(), kShape.BT, kShape.H),
                        .weight = matrix_view<bfloat16>(weight.data(), kShape.V, kShape.H),
                        .target = vector_view<int64_t>(std::span<const int64_t>(target))},
                       {.logits_max = vector_view<float>(std::span<float>(max)),
                        .sum_exp_logits = vector_view<float>(std::span<float>(sum)),
                        .predicted_logits = vector_view<float>(std::span<float>(predicted))},
                       {aligned, static_cast<size_t>(plan->workspace_bytes())});
  if (!ran) return {};
  return {peak_resident_bytes() - before, plan->workspace_bytes()};
}

Growth measure_gradient(bool f32_grad_weight) {
  const auto input = operand(kShape.BT * kShape.H, 1.0f);
  const auto weight = operand(kShape.V * kShape.H, 0.1f);
  const std::vector<int64_t> target(static_cast<size_t>(kShape.BT), 77);
  const std::vector<float> grad(target.size(), 1.0f / 2048), max(target.size(), 3.0f),
      sum(target.size(), 5e4f);
  std::vector<bfloat16> grad_input(input.size(), bfloat16(1.0f));
  std::vector<bfloat16> narrow(f32_grad_weight ? 0 : weight.size(), bfloat16(1.0f));
  std::vector<float> wide(f32_grad_weight ? weight.size() : 0, 1.0f);
  const int64_t before = peak_resident_bytes();
  GradientTypes types;
  if (f32_grad_weight) types.grad_weight->dtype = DType::f32;
  const auto plan = plan_gradient(kShape, types, {.threads = 2});
  if (!plan) return {};
  std::vector<std::byte> memory(static_cast<size_t>(plan->workspace_bytes() + 64));
  std::byte* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  GradientOperands in;
  in.grad = vector_view<float>(std::span<const float>(grad));
  in.input = matrix_view<bfloat16>(input.data(), kShape.BT, kShape.H);
  in.weight = matrix_view<bfloat16>(weight.data(), kShape.V, kShape.H);
  in.masked_target = vector_view<int64_t>(std::span<const int64_t>(target));
  in.logits_max = vector_view<float>(std::span<const float>(max));
  in.sum_exp_logits = vector_view<float>(std::span<const float>(sum));
  GradientOutputs out;
  out.grad_input = matrix_view<bfloat16>(grad_input.data(), kShape.BT, kShape.H);
  out.grad_weight = f32_grad_weight ? matrix_view<float>(wide.data(), kShape.V, kShape.H)
                                    : matrix_view<bfloat16>(narrow.data(), kShape.V, kShape.H);
  const auto ran = run(*plan, in, out, {aligned, static_cast<size_t>(plan->workspace_bytes())});
  if (!ran) return {};
  return {peak_resident_bytes() - before, plan->workspace_bytes()};
}

class PeakMemory : public testing::Test {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "shadow memory would be measured";
  }
};

TEST_F(PeakMemory, ForwardAtARealSize) {
  const Growth growth = in_fresh_process(measure_forward);
  ASSERT_GE(growth.bytes, 0);
  EXPECT_LE(growth.workspace_bytes, 16 * kMiB);
  EXPECT_LE(growth.bytes, growth.workspace_bytes + kSlack);
}

TEST_F(PeakMemory, GradientAtARealSize) {
  const Growth growth = in_fresh_process([] { return measure_gradient(false); });
  ASSERT_GE(growth.bytes, 0);
  const int64_t accumulator = std::min(kShape.BT, kShape.V) * kShape.H * 4;
  // Whole tiles: a fraction of a per cent above the accumulator's own size.
  EXPECT_LE(growth.workspace_bytes, 64 * kMiB + accumulator + accumulator / 64);
  EXPECT_LE(growth.bytes, growth.workspace_bytes + kSlack);
}

TEST_F(PeakMemory, GradientIntoAFloatGradWeight) {
  const Growth growth = in_fresh_process([] { return measure_gradient(true); });
  ASSERT_GE(growth.bytes, 0);
  EXPECT_LE(growth.workspace_bytes, 64 * kMiB);
  EXPECT_LE(growth.bytes, growth.workspace_bytes + kSlack);
}

// Static data that the library brings to a process is less than 1 MiB: the whole program, library
// and test framework included, has little writable memory of its own.
TEST_F(PeakMemory, StaticBuffersAreSmall) { EXPECT_LT(&_end - &__data_start, kMiB); }

}  // namespace
}  // namespace logitless::test
