// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "tests/parallel/scenarios.h"
#include "tests/parallel/thread_ranks.h"

namespace logitless::test {
namespace {

// One rank, by turns, is late at every collective.
TEST(LateRank, ChangesNoBitAndHangsNobody) {
  constexpr int kRanks = 4;
  for (const int way : {0, 1, 2, 3}) {
    ShardedStep s;
    s.step = make_step({.BT = 40, .V = 90, .H = 16}, all_arithmetics()[1]);
    s.cover = uneven_cover(90, kRanks);
    s.chunk_tokens = 6;
    s.grad_input_rows = way % 2 == 1 ? TokenRows::slice : TokenRows::all;
    s.strategy = kStrategies[way / 2];
    std::vector<uint64_t> in_time;
    for (int turn = 0; turn <= 200; ++turn) {
      ThreadRanksOptions options;
      options.before_call = [turn](int rank) {
        if (turn == 0 || rank != turn % kRanks) return;
        std::this_thread::sleep_for(std::chrono::microseconds(300 * (1 + turn % 5)));
      };
      std::vector<std::vector<uint64_t>> bits(kRanks);
      run_ranks(
          kRanks,
          [&](Communicator& communicator) {
            bits[static_cast<size_t>(communicator.rank())] = expect_sharded(communicator, s);
          },
          options);
      if (turn == 0) in_time = bits[0];
      for (const auto& b : bits) ASSERT_EQ(b, in_time) << "turn " << turn;
    }
  }
}

}  // namespace
}  // namespace logitless::test
