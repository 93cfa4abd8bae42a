// SPDX-License-Identifier: Apache-2.0
// Ranks as threads: the same scenarios run under mpirun in mpi_test.cc.
#include "logitless/parallel/vocab_parallel.h"

#include <gtest/gtest.h>

#include <mutex>

#include "tests/parallel/scenarios.h"
#include "tests/parallel/thread_ranks.h"
#include "tests/support/isa_test.h"

namespace logitless::test {
namespace {

class VocabParallel : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, VocabParallel, testing::Values(1, 2, 3, 5, 8));

std::vector<uint64_t> run_scenario(int ranks, const ShardedStep& step,
                                   const ThreadRanksOptions& options = {}) {
  std::vector<std::vector<uint64_t>> bits(static_cast<size_t>(ranks));
  run_ranks(
      ranks,
      [&](Communicator& communicator) {
        bits[static_cast<size_t>(communicator.rank())] = expect_sharded(communicator, step);
      },
      options);
  for (const auto& b : bits) EXPECT_EQ(b, bits[0]);
  return bits[0];
}

TEST_P(VocabParallel, EveryCoverIsWithinTheContract) {
  for (const Scenario& s : cover_scenarios(GetParam())) {
    SCOPED_TRACE(s.name);
    run_scenario(GetParam(), s.step);
  }
}

TEST_P(VocabParallel, EdgesAreDefined) {
  for (const Scenario& s : edge_scenarios(GetParam())) {
    SCOPED_TRACE(s.name);
    run_scenario(GetParam(), s.step);
  }
}

TEST_P(VocabParallel, EveryOptionCounts) {
  for (const Scenario& s : option_scenarios(GetParam())) {
    SCOPED_TRACE(s.name);
    run_scenario(GetParam(), s.step);
  }
}

// A forward and then a gradient have the bits of both in one call.
TEST_P(VocabParallel, TheBackwardApartHasTheSameBits) {
  for (const auto& scenarios : {cover_scenarios, edge_scenarios, option_scenarios}) {
    std::vector<Scenario> all = scenarios(GetParam());
    for (Scenario& s : all) {
      SCOPED_TRACE(s.name);
      const auto together = run_scenario(GetParam(), s.step);
      s.step.apart = true;
      EXPECT_EQ(run_scenario(GetParam(), s.step), together);
    }
  }
}

TEST_P(VocabParallel, EveryInstructionSet) {
  const int ranks = GetParam();
  for (const Isa isa : usable_isas()) {
    ShardedStep s;
    s.step = make_step({.BT = 19, .V = 130, .H = 33}, all_arithmetics()[1]);
    s.cover = balanced_cover(130, ranks);
    s.chunk_tokens = 4;
    s.options.isa = isa;
    SCOPED_TRACE(name_of(isa));
    run_scenario(ranks, s);
    run_ranks(ranks, [&](Communicator& communicator) {
      const auto plan = plan_vocab_parallel_linear_cross_entropy(
          communicator, s.step.shape, s.cover[static_cast<size_t>(communicator.rank())], s.types(),
          s.options);
      ASSERT_TRUE(plan);
      EXPECT_EQ(plan->isa(), isa);
    });
  }
}

// The loss and a row of grad_input know nothing of chunks, threads or limits; all-reduced, neither
// does grad_weight.
TEST_P(VocabParallel, BitsDependOnNeitherChunksNorThreadsNorLimits) {
  const int ranks = GetParam();
  ShardedStep s;
  s.step = make_step({.BT = 37, .V = 203, .H = 24}, all_arithmetics()[1]);
  s.step.ignore_index = s.step.target.get_index(5);
  s.cover = uneven_cover(203, ranks);
  const auto plain = run_scenario(ranks, s);
  for (const int64_t chunk : {2, 8, 10, 36, 100}) {
    s.chunk_tokens = chunk;
    EXPECT_EQ(run_scenario(ranks, s), plain) << "chunk " << chunk;
  }
  s.options.threads = 2;
  EXPECT_EQ(run_scenario(ranks, s), plain);
  // The least workspace of every rank.
  const auto least_of = [&](Communicator& communicator) {
    const auto plan = plan_vocab_parallel_linear_cross_entropy(
        communicator, s.step.shape, s.cover[static_cast<size_t>(communicator.rank())], s.types(),
        {.threads = 1, .workspace_limit_bytes = 1});
    EXPECT_FALSE(plan);
    const std::string& message = plan.error().message;
    EXPECT_EQ(plan.error().kind, ErrorKind::limit_too_small) << message;
    const auto at = message.find("workspace is ");
    return std::stoll(message.substr(at + 13));
  };
  std::mutex mutex;
  int64_t least = 0;
  run_ranks(ranks, [&](Communicator& communicator) {
    const int64_t own = least_of(communicator);
    const std::lock_guard lock(mutex);
    least = std::max(least, own);
  });
  // Ranks have different leasts, and all of them were told that of the first that failed.
  for (int doubled = 0; doubled < 4; ++doubled, least *= 2) {
    bool fits = true;
    s.options = {.threads = 1, .workspace_limit_bytes = least};
    run_ranks(ranks, [&](Communicator& communicator) {
      const auto plan = plan_vocab_parallel_linear_cross_entropy(
          communicator, s.step.shape, s.cover[static_cast<size_t>(communicator.rank())], s.types(),
          s.options);
      const std::lock_guard lock(mutex);
      fits = fits && plan;
      EXPECT_TRUE(!plan || plan->workspace_bytes() <= least);
    });
    if (!fits) continue;
    EXPECT_EQ(run_scenario(ranks, s), plain);
    return;
  }
  ADD_FAILURE() << "no limit was enough";
}

// 12 bytes per token and rank and one header in the forward; each row of grad_input once.
TEST_P(VocabParallel, SendsNoMoreThanItSays) {
  const int ranks = GetParam();
  ShardedStep s;
  s.step = make_step({.BT = 64, .V = 100, .H = 16}, all_arithmetics()[1]);
  s.cover = balanced_cover(100, ranks);
  constexpr int64_t kStatement = 512;
  for (const bool scatter : {false, true}) {
    for (const bool agree : {true, false}) {
      s.grad_input_rows = scatter ? TokenRows::slice : TokenRows::all;
      s.agree_in_run = agree;
      s.chunk_tokens = 16;
      run_ranks(ranks, [&](Communicator& communicator) {
        const RankResult r = run_rank(communicator, s);
        ASSERT_TRUE(r.result);
        const Traffic& t = traffic_of(communicator);
        // The plan's agreement, run's, and the statistics.
        EXPECT_EQ(t.gathers, agree ? 3 : 2);
        EXPECT_EQ(t.gathered_bytes, (agree ? 3 : 2) * kStatement + 12 * 64);
        EXPECT_EQ(scatter ? t.scattered_floats : t.reduced_floats, 64 * 16);
        EXPECT_EQ(scatter ? t.reduced_floats : t.scattered_floats, 0);
        EXPECT_EQ(t.sums, ranks == 1 ? 1 : 4);
        EXPECT_NE(r.description.find("all-gather of 1280 bytes"), std::string::npos)
            << r.description;
      });
    }
  }
}

TEST(VocabParallelSelf, TheSelfTransportIsOneRank) {
  const auto communicator = self_communicator();
  EXPECT_EQ(communicator->rank(), 0);
  EXPECT_EQ(communicator->size(), 1);
  std::vector<float> values = {1, 2, 3}, mine(3);
  ASSERT_TRUE(communicator->all_reduce_sum(values));
  const std::vector<int64_t> counts = {3};
  ASSERT_TRUE(communicator->reduce_scatter_sum(values, counts, mine));
  EXPECT_EQ(mine, values);
  for (const bool scatter : {false, true}) {
    ShardedStep s;
    s.step = make_step({.BT = 9, .V = 50, .H = 8}, all_arithmetics()[1]);
    s.cover = balanced_cover(50, 1);
    s.input_rows = s.grad_input_rows = scatter ? TokenRows::slice : TokenRows::all;
    const auto sharded = expect_sharded(*communicator, s);
    EXPECT_EQ(sharded, run_step(s.step, s.options, Strategy::recompute).bits());
  }
}

}  // namespace
}  // namespace logitless::test
