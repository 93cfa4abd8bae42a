// SPDX-License-Identifier: Apache-2.0
// Ranks that run out of memory: all of them end, with a message, and none waits for another.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/failure.h"
#include "examples/train_lm/checkpoint.h"
#include "tests/cli/scratch.h"
#include "tests/parallel/thread_ranks.h"
#include "tests/support/failing_new.h"
#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

using logitless::test::FailingNew;

constexpr const char* kNoFailingNew = "this sanitizer's operator new cannot be replaced";
constexpr size_t kLarge = 16384;  // plans and agreements are smaller, no part of the model is

using Work = std::function<void(Communicator& communicator, const std::function<void()>& arm)>;

// Does `work` again and again, and lets one allocation fail after arm() on the rank `poor`: each of
// its first `most` large ones in turn. judge(messages): what work failed with on each rank. How
// many allocations there were.
int64_t for_each_allocation(
    int ranks, int poor, int64_t most, const Work& work,
    const std::function<void(const std::vector<std::string>& messages)>& judge) {
  for (int64_t before = 0; before < most; ++before) {
    std::vector<std::string> messages(static_cast<size_t>(ranks), "no failure");
    bool failed = false;
    const auto body = [&](Communicator& communicator) {
      std::string& message = messages[static_cast<size_t>(communicator.rank())];
      std::optional<FailingNew> failing;
      try {
        work(communicator, [&] {
          if (communicator.rank() == poor) failing.emplace(before, kLarge);
        });
      } catch (const cli::Failure& failure) {
        message = failure.message;
      }
      if (failing) failed = failing->failed();
    };
    if (ranks == 1) {
      const auto alone = self_communicator();
      body(*alone);
    } else {
      logitless::test::run_ranks(ranks, body);
    }
    if (!failed) {
      for (const std::string& message : messages) EXPECT_EQ(message, "no failure");
      return before;
    }
    judge(messages);
  }
  return most;
}

Options options_of_large_parts() {
  Options options = test::small_options();
  options.hidden = 4096;
  return options;
}

TEST(Memory, ARankThatHasTooLittleForTheModelEndsAllRanks) {
  if (!logitless::test::failing_new_available()) GTEST_SKIP() << kNoFailingNew;
  const Text text = test::small_text();
  const Options options = options_of_large_parts();
  for (const int ranks : {1, 3}) {
    const auto cover = test::small_cover(text.V(), ranks);
    const int poor = ranks - 1;
    const std::string who = ranks == 1 ? "" : fmt::format("rank {}: ", poor);
    const int64_t allocations = for_each_allocation(
        ranks, poor, 1000,
        [&](Communicator& communicator, const auto& arm) {
          arm();
          make_trainer(communicator, options, text, cover[static_cast<size_t>(communicator.rank())],
                       1);
        },
        [&](const std::vector<std::string>& messages) {
          EXPECT_EQ(messages[0],
                    who + fmt::format("there is not enough memory for the model with {} of the "
                                      "head's 150 rows",
                                      cover[static_cast<size_t>(poor)].size()));
          for (size_t rank = 1; rank < messages.size(); ++rank) EXPECT_EQ(messages[rank], "");
        });
    // Four parameters of four matrices each, the workspace, buffers of a step.
    EXPECT_GT(allocations, 20);
  }
}

TEST(Memory, ARankThatHasTooLittleForACheckpointEndsAllRanks) {
  if (!logitless::test::failing_new_available()) GTEST_SKIP() << kNoFailingNew;
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.safetensors");
  const Text text = test::small_text();
  const auto cover = test::small_cover(text.V(), 3);
  // The head's part of a block and everyone's, and on rank 0 the head before them; behind those
  // comes what the ranks' transport allocates, which is the test's own.
  for (const auto& [poor, gathering] : {std::pair(0, 3), std::pair(2, 2)}) {
    const std::string who = fmt::format("rank {}: ", poor);
    const int64_t allocations = for_each_allocation(
        3, poor, gathering,
        [&](Communicator& communicator, const auto& arm) {
          const auto trainer = make_trainer(communicator, options_of_large_parts(), text,
                                            cover[static_cast<size_t>(communicator.rank())], 1);
          arm();
          save_checkpoint(path, communicator, cover, "print", *trainer);
        },
        [&](const std::vector<std::string>& messages) {
          EXPECT_EQ(messages[0], who + "there is not enough memory for this case");
        });
    EXPECT_EQ(allocations, gathering);
  }
}

}  // namespace
}  // namespace logitless::train_lm
