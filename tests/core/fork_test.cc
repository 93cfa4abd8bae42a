// SPDX-License-Identifier: Apache-2.0
// After fork the child has none of the pool's threads: it computes on one, and must not hang.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "logitless/loss.h"
#include "tests/support/cases.h"

namespace logitless::test {
namespace {

// Exit status of a child that runs f, or -1 if it did not end in time.
template <typename F>
int status_of_child(F&& f) {
  const pid_t child = fork();
  if (child == 0) {
    f();
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  for (int i = 0; i < 1000; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

TEST(Fork, AChildComputesTheSameBitsWithoutTheParentsThreads) {
  const PlanOptions options{.threads = 4};
  const ForwardCase forward = make_forward_case({.BT = 60, .V = 700, .H = 64}, {});
  const GradientCase gradient =
      make_gradient_case(make_forward_case({.BT = 60, .V = 700, .H = 64}, {}));
  const auto want = run_forward(forward, options).bits();
  const auto want_gradient = run_gradient(gradient, options).bits();
  for (int generation = 0; generation < 3; ++generation) {
    const int status = status_of_child([&] {
      EXPECT_EQ(run_forward(forward, options).bits(), want);
      EXPECT_EQ(run_gradient(gradient, options).bits(), want_gradient);
      // A grandchild, as of a data loader's worker.
      EXPECT_EQ(status_of_child([&] { EXPECT_EQ(run_forward(forward, options).bits(), want); }), 0);
    });
    EXPECT_EQ(status, 0);
    // The parent goes on as before.
    EXPECT_EQ(run_forward(forward, options).bits(), want);
  }
}

// A plan made before the fork, and one made after it.
TEST(Fork, PlansWorkOnBothSides) {
  const ForwardCase c = make_forward_case({.BT = 30, .V = 100, .H = 32}, {});
  const auto plan = plan_forward(c.shape, c.types(), {.threads = 3});
  ASSERT_TRUE(plan);
  const auto run_plan = [&] {
    ForwardResult r = make_forward_outputs(c);
    EXPECT_TRUE(
        run(*plan, c.operands(), outputs_of(c, r), guarded_workspace(plan->workspace_bytes())));
    return r.bits();
  };
  const auto want = run_plan();
  EXPECT_EQ(status_of_child([&] {
              EXPECT_EQ(run_plan(), want);
              EXPECT_EQ(run_forward(c, {.threads = 3}).bits(), want);
            }),
            0);
}

}  // namespace
}  // namespace logitless::test
