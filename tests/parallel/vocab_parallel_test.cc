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
  for (const Strategy strategy : kStrategies) {
    for (const Scenario& s : cover_scenarios(GetParam(), strategy)) {
      SCOPED_TRACE(s.name);
      run_scenario(GetParam(), s.step);
    }
  }
}

TEST_P(VocabParallel, EdgesAreDefined) {
  for (const Strategy strategy : kStrategies) {
    for (const Scenario& s : edge_scenarios(GetParam(), strategy)) {
      SCOPED_TRACE(s.name);
      run_scenario(GetParam(), s.step);
    }
  }
}

TEST_P(VocabParallel, EveryOptionCounts) {
  for (const Strategy strategy : kStrategies) {
    for (const Scenario& s : option_scenarios(GetParam(), strategy)) {
      SCOPED_TRACE(s.name);
      run_scenario(GetParam(), s.step);
    }
  }
}

// A forward and then a gradient have the bits of both in one call.
TEST_P(VocabParallel, TheBackwardApartHasTheSameBits) {
  for (const auto& scenarios : {cover_scenarios, edge_scenarios, option_scenarios}) {
    std::vector<Scenario> all = scenarios(GetParam(), Strategy::recompute);
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
    for (const Strategy strategy : kStrategies) {
      ShardedStep s;
      s.step = make_step({.BT = 19, .V = 130, .H = 33}, all_arithmetics()[1]);
      s.cover = balanced_cover(130, ranks);
      s.chunk_tokens = 4;
      s.options.isa = isa;
      s.strategy = strategy;
      SCOPED_TRACE(name_of(isa));
      run_scenario(ranks, s);
      run_ranks(ranks, [&](Communicator& communicator) {
        const auto plan = plan_vocab_parallel_linear_cross_entropy(
            communicator, s.step.shape, s.cover[static_cast<size_t>(communicator.rank())],
            s.types(), s.options);
        ASSERT_TRUE(plan);
        EXPECT_EQ(plan->isa(), isa);
        EXPECT_NE(plan->id(), 0);
        EXPECT_EQ(plan->strategy(), strategy);
      });
    }
  }
}

// The loss and a row of grad_input know nothing of chunks, threads or limits; all-reduced, neither
// does grad_weight.
// What a refused limit would have to be.
int64_t least_in(const std::string& message) {
  const auto at = message.find(" is ", message.find("the least"));
  EXPECT_NE(at, std::string::npos) << message;
  return std::stoll(message.substr(at + 4));
}

void expect_same_bits(int ranks, Strategy strategy) {
  ShardedStep s;
  s.step = make_step({.BT = 37, .V = 203, .H = 24}, all_arithmetics()[1]);
  s.step.ignore_index = s.step.target.get_index(5);
  s.cover = uneven_cover(203, ranks);
  s.strategy = strategy;
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
    EXPECT_EQ(plan.error().kind, ErrorKind::limit_too_small);
    return least_in(plan.error().message);
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

TEST_P(VocabParallel, BitsDependOnNeitherChunksNorThreadsNorLimits) {
  for (const Strategy strategy : kStrategies) expect_same_bits(GetParam(), strategy);
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

// In one pass: 12 bytes per token and a header of 64 for each block, and the same sums.
TEST_P(VocabParallel, OnePassSendsABlockAtATime) {
  const int ranks = GetParam();
  ShardedStep s;
  s.step = make_step({.BT = 64, .V = 100, .H = 16}, all_arithmetics()[1]);
  s.cover = balanced_cover(100, ranks);
  s.strategy = Strategy::one_pass;
  s.chunk_tokens = 16;
  for (const bool scatter : {false, true}) {
    s.grad_input_rows = scatter ? TokenRows::slice : TokenRows::all;
    run_ranks(ranks, [&](Communicator& communicator) {
      const RankResult r = run_rank(communicator, s);
      ASSERT_TRUE(r.result);
      const int blocks = ranks == 1 ? 1 : 4;
      const Traffic& t = traffic_of(communicator);
      EXPECT_EQ(t.gathers, 2 + blocks);
      // Of a block 16 tokens, but where every slice is cut and their number does not divide.
      const int64_t statistics = 2 * 512 + 64 * blocks + 12 * 64;
      EXPECT_GE(t.gathered_bytes, statistics);
      EXPECT_LE(t.gathered_bytes, statistics + (scatter ? 63 * blocks : 0));
      EXPECT_EQ(scatter ? t.scattered_floats : t.reduced_floats, 64 * 16);
      EXPECT_EQ(t.sums, blocks);
      EXPECT_NE(r.description.find("one pass: asked for"), std::string::npos) << r.description;
      EXPECT_NE(r.description.find(ranks == 1 ? "all-gather of 832 bytes"
                                              : "at most 4 blocks of 16 tokens, 256 bytes"),
                std::string::npos)
          << r.description;
    });
  }
}

// Each rank says what fits it, and all of them do the same.
TEST(VocabParallelPlan, TheStrategyIsThatOfEveryRank) {
  constexpr int kRanks = 3;
  ShardedStep s;
  s.step = make_step({.BT = 256, .V = 3000, .H = 32}, all_arithmetics()[1]);
  s.cover = {{0, 2800}, {2800, 3000}, {3000, 3000}};
  s.strategy = Strategy::automatic;
  const auto plan_of = [&](Communicator& communicator, int64_t limit) {
    PlanOptions options = s.options;
    options.workspace_limit_bytes = limit;
    return plan_vocab_parallel_linear_cross_entropy(
        communicator, s.step.shape, s.cover[static_cast<size_t>(communicator.rank())], s.types(),
        options);
  };
  // bytes[rank] of the longest blocks and of recomputing.
  std::vector<int64_t> one_pass(kRanks), recompute(kRanks);
  const auto all_plans = [&](const std::vector<int64_t>& limits) {
    std::vector<Result<VocabParallelPlan>> plans(kRanks, Error{});
    run_ranks(kRanks, [&](Communicator& communicator) {
      const auto rank = static_cast<size_t>(communicator.rank());
      plans[rank] = plan_of(communicator, limits[rank]);
    });
    return plans;
  };
  for (const auto& plan : all_plans({0, 0, 0})) {
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->strategy(), Strategy::one_pass);
    EXPECT_EQ(plan->chunk_tokens(), 256);
    EXPECT_NE(plan->describe().find("one pass: fits the limit of every rank"), std::string::npos)
        << plan->describe();
  }
  // Blocks as short as the rank with most of the vocabulary needs them.
  int64_t shortest = 256;
  bool recomputes = false, refused = false;
  for (int64_t limit = int64_t{4} << 20; limit > 1000; limit = limit * 7 / 8) {
    const auto plans = all_plans({limit, 0, 0});
    for (const auto& plan : plans) ASSERT_EQ(bool{plan}, bool{plans[0]});
    if (!plans[0]) {
      refused = true;
      EXPECT_EQ(plans[2].error().kind, ErrorKind::limit_too_small);
      EXPECT_EQ(plans[2].error().message, plans[0].error().message);
      continue;
    }
    EXPECT_FALSE(refused);
    EXPECT_LE(plans[0]->workspace_bytes(), limit);
    for (const auto& plan : plans) {
      ASSERT_EQ(plan->strategy(), plans[0]->strategy());
      ASSERT_EQ(plan->chunk_tokens(), plans[0]->chunk_tokens());
    }
    if (plans[0]->strategy() == Strategy::recompute) {
      recomputes = true;
      EXPECT_NE(plans[1]->describe().find("recompute: one pass does not fit the limit of rank 0"),
                std::string::npos)
          << plans[1]->describe();
      continue;
    }
    EXPECT_FALSE(recomputes);
    shortest = std::min(shortest, plans[0]->chunk_tokens());
  }
  EXPECT_EQ(shortest, 64);
  EXPECT_TRUE(recomputes);
  EXPECT_TRUE(refused);
  s.step.grad_input.reset();
  s.step.grad_weight.reset();
  const auto alone = all_plans({0, 0, 0});
  ASSERT_TRUE(alone[0]);
  EXPECT_NE(alone[0]->describe().find("recompute: no gradient is wanted"), std::string::npos);
}

// Different limits: the same blocks, the same collectives, the same bits.
TEST(VocabParallelPlan, RanksWithDifferentLimitsRunTogether) {
  constexpr int kRanks = 3;
  const auto step = [] {
    ShardedStep s;
    s.step = make_step({.BT = 640, .V = 3000, .H = 32}, all_arithmetics()[1]);
    s.cover = balanced_cover(3000, kRanks);
    s.strategy = Strategy::one_pass;
    return s;
  };
  const auto plain = run_scenario(kRanks, step());
  std::vector<std::vector<uint64_t>> bits(kRanks);
  std::vector<int64_t> blocks(kRanks);
  run_ranks(kRanks, [&](Communicator& communicator) {
    const auto rank = static_cast<size_t>(communicator.rank());
    ShardedStep s = step();
    const auto plan_it = [&] {
      return plan_vocab_parallel_linear_cross_entropy(communicator, s.step.shape, s.cover[rank],
                                                      s.types(), s.options);
    };
    s.options.workspace_limit_bytes = rank == 1 ? 1 : 0;
    const auto too_small = plan_it();
    ASSERT_FALSE(too_small);
    const int64_t least = least_in(too_small.error().message);
    s.options.workspace_limit_bytes = rank == 1 ? least + least / 8 : 0;
    s.options.threads = rank == 2 ? 2 : 1;
    const auto plan = plan_it();
    ASSERT_TRUE(plan) << plan.error().message;
    blocks[rank] = plan->chunk_tokens();
    const RankResult r = run_rank(communicator, s);
    ASSERT_TRUE(r.result) << r.result.error().message;
    bits[rank] = assemble(communicator, s, r).bits();
  });
  for (const auto& b : bits) EXPECT_EQ(b, plain);
  for (const int64_t b : blocks) EXPECT_EQ(b, blocks[0]);
  EXPECT_LT(blocks[0], 640);
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
    for (const Strategy strategy : kStrategies) {
      s.strategy = strategy;
      EXPECT_EQ(expect_sharded(*communicator, s), run_step(s.step, s.options, strategy).bits());
    }
  }
}

}  // namespace
}  // namespace logitless::test
