// SPDX-License-Identifier: Apache-2.0
// A sparse gradient whose vocabulary is split keeps what it keeps where it is whole, but for what
// is decided by the last bits of a merged sum.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/parallel/scenarios.h"
#include "tests/parallel/thread_ranks.h"
#include "tests/support/one_hot.h"

namespace logitless::test {
namespace {

struct NamedCover {
  std::string name;
  std::vector<RowRange> cover;
};
std::vector<NamedCover> covers(int64_t V, int ranks) {
  return {{"balanced", balanced_cover(V, ranks)},
          {"uneven", uneven_cover(V, ranks)},
          {"with empty", cover_with_empty(V, ranks)}};
}

struct Case {
  bool input_is_identity = true;
  int64_t BT = 18;
  int64_t V = 2200;
  float tolerance = 0x1p-6f;
  uint64_t seed = 3;
};
OneHot make(const Case& c) {
  const Arithmetic arithmetic = all_arithmetics()[2];  // fp32
  const OneHotShape shape{.BT = c.BT, .V = c.V, .further = 3};
  OneHot o = c.input_is_identity ? one_hot_input(shape, arithmetic, c.seed)
                                 : one_hot_weight(shape, arithmetic, c.seed);
  o.step.grad_tolerance = c.tolerance;
  o.step.seed = c.seed * 1000 + 7;
  // The sample, every 64th column, makes their sums too large and knows nothing of their tails: one
  // row comes twice, and is sparse; one twice, and is dense.
  for (const int64_t b : {8, 9}) {
    if (c.V < 2048 || b >= c.BT) continue;
    for (int64_t v = 0; v < c.V; ++v) {
      const double seen = v == 0 ? 0.0 : v % 640 == 0 ? -1.0 : -9.0;
      const double unseen = b == 9 ? -4.0 : v % 16 == 5 ? -5.0 : -14.0;
      o.set_logit(b, v, (v % 64 == 0 ? seen : unseen) + 0.01 * static_cast<double>(v % 7));
    }
  }
  return o;
}

ShardedStep sharded(const Case& c, std::vector<RowRange> cover) {
  ShardedStep s;
  s.step = make(c).step;
  s.strategy = Strategy::automatic;
  s.cover = std::move(cover);
  return s;
}

// The step on ranks, from the parts of all; what was kept is counted over all.
StepResult run_sharded(const ShardedStep& s) {
  StepResult whole;
  SparseCounts all;
  std::vector<SparseCounts> counts(s.cover.size());
  run_ranks(static_cast<int>(s.cover.size()), [&](Communicator& communicator) {
    const RankResult mine = run_rank(communicator, s);
    ASSERT_TRUE(mine.result) << mine.result.error().message;
    StepResult assembled = assemble(communicator, s, mine);
    counts[static_cast<size_t>(communicator.rank())] = mine.step.gradients.sparse_counts;
    if (communicator.rank() == 0) whole = std::move(assembled);
  });
  for (size_t r = 0; r < counts.size(); ++r) {
    EXPECT_EQ(counts[r].rows, counts[0].rows);
    EXPECT_EQ(counts[r].dense_rows, counts[0].dense_rows);
    EXPECT_EQ(counts[r].elements, (counts[r].rows - counts[r].dense_rows) * s.cover[r].size());
    all.kept += counts[r].kept;
    all.elements += counts[r].elements;
  }
  all.rows = counts[0].rows;
  all.dense_rows = counts[0].dense_rows;
  whole.gradients.sparse_counts = all;
  return whole;
}

StepResult exact_of(const Case& c, const std::vector<RowRange>& cover) {
  ShardedStep s = sharded(c, cover);
  s.step.grad_tolerance = 0.0f;
  s.strategy = Strategy::one_pass;
  return run_sharded(s);
}

// Elements kept here and not there.
int64_t differing(const OneHot& o, const StepResult& a, const StepResult& b) {
  int64_t count = 0;
  for (int64_t t = 0; t < o.step.shape.BT; ++t) {
    for (int64_t v = 0; v < o.step.shape.V; ++v) {
      count += (o.grad_logit(a, t, v) != 0) != (o.grad_logit(b, t, v) != 0) ? 1 : 0;
    }
  }
  return count;
}

void expect_same_statistics(const StepResult& a, const StepResult& b) {
  EXPECT_EQ(a.loss.all_bits(), b.loss.all_bits());
  EXPECT_EQ(a.logits_max.all_bits(), b.logits_max.all_bits());
  EXPECT_EQ(a.sum_exp_logits.all_bits(), b.sum_exp_logits.all_bits());
  EXPECT_EQ(a.predicted_logits.all_bits(), b.predicted_logits.all_bits());
  EXPECT_EQ(a.total, b.total);
}

TEST(VocabParallelSparse, KeepsWhatAWholeVocabularyKeeps) {
  KeptSet all;
  int64_t other = 0;
  for (const bool input_is_identity : {true, false}) {
    const Case c{.input_is_identity = input_is_identity, .V = input_is_identity ? 2200 : 300};
    const OneHot o = make(c);
    const StepResult one = run_step(o.step, {.threads = 2}, Strategy::automatic);
    for (const int ranks : {1, 2, 3, 7}) {
      for (const auto& [name, cover] : covers(c.V, ranks)) {
        if (ranks < 3 && name != "balanced" && !input_is_identity) continue;  // it takes long
        SCOPED_TRACE(std::to_string(ranks) + " ranks, " + name);
        const StepResult exact = exact_of(c, cover);
        const StepResult got = run_sharded(sharded(c, cover));
        const KeptSet set = expect_kept_set(o, exact, got);
        EXPECT_GT(set.sparse_rows, 5);
        expect_same_counts(one, got);
        const int64_t differ = differing(o, one, got);
        if (ranks == 1) {
          EXPECT_EQ(differ, 0);
        }
        other += differ;
        all += set;
        expect_products(o, got);
        expect_same_statistics(got, exact);
      }
    }
  }
  EXPECT_GT(all.kept, 5000);
  EXPECT_GT(all.dense_rows, 12);
  EXPECT_LE(static_cast<double>(other), 20e-6 * static_cast<double>(all.kept));
}

TEST(VocabParallelSparse, AnyCoverKeepsWhatTheDefinitionKeeps) {
  std::mt19937_64 random(11);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 24; ++round) {
    const Case c{.BT = 1 + below(18),
                 .V = round % 3 == 0 ? 2048 + below(300) : 20 + below(800),
                 .tolerance = std::ldexp(1.0f, static_cast<int>(-2 - below(8))),
                 .seed = 100 + static_cast<uint64_t>(round)};
    const int64_t ranks = 1 + below(8);
    std::vector<int64_t> cuts = {0, c.V};
    while (static_cast<int64_t>(cuts.size()) <= ranks) cuts.push_back(below(c.V + 1));
    std::ranges::sort(cuts);
    std::vector<RowRange> cover;
    for (size_t i = 1; i < cuts.size(); ++i) cover.push_back({cuts[i - 1], cuts[i]});
    std::ranges::shuffle(cover, random);
    SCOPED_TRACE("round " + std::to_string(round));
    const OneHot o = make(c);
    ShardedStep s = sharded(c, cover);
    s.options.threads = 1 + round % 2;
    s.grad_input_rows = round % 4 < 2 ? TokenRows::all : TokenRows::slice;
    s.input_rows = round % 5 < 3 ? TokenRows::all : TokenRows::slice;
    const StepResult got = run_sharded(s);
    s.step.grad_tolerance = 0.0f;
    s.strategy = Strategy::one_pass;
    const StepResult exact = run_sharded(s);
    expect_kept_set(o, exact, got);
    expect_same_statistics(got, exact);
  }
}

TEST(VocabParallelSparse, BitsDependOnNeitherThreadsNorChunksNorLimits) {
  const Case c;
  const OneHot o = make(c);
  const auto cover = uneven_cover(c.V, 3);
  ShardedStep s = sharded(c, cover);
  const StepResult plain = run_sharded(s);
  s.options.threads = 2;
  EXPECT_EQ(run_sharded(s).bits(), plain.bits());
  s.chunk_tokens = 4;
  EXPECT_EQ(run_sharded(s).bits(), plain.bits());
  // The least limit of each rank, when the others have none.
  for (int rank = 0; rank < 3; ++rank) {
    const auto limited = [&](int64_t limit) {
      Result<void> result;
      run_ranks(3, [&](Communicator& communicator) {
        PlanOptions options{.threads = 1};
        if (communicator.rank() == rank) options.workspace_limit_bytes = limit;
        const auto plan = plan_vocab_parallel_linear_cross_entropy(
            communicator, s.step.shape, cover[static_cast<size_t>(communicator.rank())], s.types(),
            options);
        if (communicator.rank() != rank) return;
        if (!plan) {
          result = plan.error();
          EXPECT_EQ(plan.error().kind, ErrorKind::limit_too_small);
        } else {
          EXPECT_LE(plan->workspace_bytes(), limit);
        }
      });
      return result;
    };
    const int64_t least = least_limit(limited);
    StepResult whole;
    run_ranks(3, [&](Communicator& communicator) {
      ShardedStep mine = sharded(c, cover);
      mine.chunk_tokens = s.chunk_tokens;
      if (communicator.rank() == rank) mine.options.workspace_limit_bytes = least;
      const RankResult r = run_rank(communicator, mine);
      ASSERT_TRUE(r.result) << r.result.error().message;
      StepResult assembled = assemble(communicator, mine, r);
      if (communicator.rank() == 0) whole = std::move(assembled);
    });
    EXPECT_EQ(whole.bits(), plain.bits()) << "rank " << rank << ", limit " << least;
  }
  s.grad_input_rows = s.input_rows = TokenRows::slice;
  const StepResult sliced = run_sharded(s);
  EXPECT_EQ(sliced.gradients.grad_input->all_bits(), plain.gradients.grad_input->all_bits());
  EXPECT_EQ(differing(o, sliced, plain), 0);
}

// Limits and threads of each rank by themselves, rows of all kinds.
TEST(VocabParallelSparse, WhateverRanksHaveTheBitsAreTheSame) {
  std::mt19937_64 random(23);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int64_t limited = 0;
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const Case c{.BT = round % 4 == 0 ? 70 + below(30) : 1 + below(40),
                 .V = round % 2 == 0 ? 2048 + below(3000) : 1 + below(900),
                 .tolerance = std::ldexp(0.7f, static_cast<int>(-1 - below(11))),
                 .seed = 200 + static_cast<uint64_t>(round)};
    const auto ranks = static_cast<size_t>(1 + below(6));
    std::vector<int64_t> cuts = {0, c.V};
    while (cuts.size() <= ranks) cuts.push_back(below(c.V + 1));
    std::ranges::sort(cuts);
    std::vector<RowRange> cover;
    for (size_t i = 1; i < cuts.size(); ++i) cover.push_back({cuts[i - 1], cuts[i]});
    std::ranges::shuffle(cover, random);
    const TokenRows rows = below(2) == 0 ? TokenRows::all : TokenRows::slice;
    std::vector<PlanOptions> options(ranks);
    std::vector<int64_t> bytes(ranks);
    // Empty where a limit is too small, on every rank.
    const auto run_all = [&] {
      std::vector<uint64_t> bits;
      run_ranks(static_cast<int>(ranks), [&](Communicator& communicator) {
        const auto rank = static_cast<size_t>(communicator.rank());
        ShardedStep s = sharded(c, cover);
        s.input_rows = s.grad_input_rows = rows;
        s.options = options[rank];
        const RankResult r = run_rank(communicator, s, [&](RankArguments& a) {
          bytes[rank] = static_cast<int64_t>(a.workspace.size());
        });
        if (!r.result) {
          EXPECT_EQ(r.result.error().kind, ErrorKind::limit_too_small);
          return;
        }
        const StepResult whole = assemble(communicator, s, r);
        if (rank == 0) bits = whole.bits();
      });
      return bits;
    };
    for (PlanOptions& o : options) o.threads = 1;
    const std::vector<uint64_t> want = run_all();
    const std::vector<int64_t> free = bytes;
    for (size_t r = 0; r < ranks; ++r) {
      options[r].threads = static_cast<int>(1 + below(4));
      const double share = 0.7 + 0.01 * static_cast<double>(below(40));
      options[r].workspace_limit_bytes =
          below(2) == 0 ? 0 : static_cast<int64_t>(share * static_cast<double>(free[r]));
    }
    std::vector<uint64_t> got = run_all();
    if (got.empty()) {  // threads alone
      for (PlanOptions& o : options) o.workspace_limit_bytes = 0;
      got = run_all();
    } else {
      ++limited;
    }
    EXPECT_TRUE(got == want);
  }
  EXPECT_GT(limited, 1);
}

// The least limits that each rank finds for itself may not fit together: then there is no plan.
TEST(VocabParallelSparse, APlanOfLimitsIsWhole) {
  std::mt19937_64 random(5);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int64_t accepted = 0;
  for (int round = 0; round < 40; ++round) {
    const Shape shape{.BT = 64 + below(1200), .V = 3000 + below(20000), .H = 8 + below(100)};
    const int64_t cut = 1 + below(shape.V / 10);
    const RowRange rows[2] = {{0, cut}, {cut, shape.V}};
    int64_t free[2] = {0, 0}, limits[2] = {0, 0};
    for (int i = 0; i < 40; ++i) {
      run_ranks(2, [&](Communicator& communicator) {
        const int rank = communicator.rank();
        const auto plan = plan_vocab_parallel_linear_cross_entropy(
            communicator, shape, rows[rank], {.grad_tolerance = 0x1p-6f},
            {.threads = 1, .workspace_limit_bytes = limits[rank]});
        if (!plan) {
          EXPECT_EQ(plan.error().kind, ErrorKind::limit_too_small);
          return;
        }
        if (limits[rank] == 0) {
          free[rank] = plan->workspace_bytes();
          return;
        }
        EXPECT_LE(plan->workspace_bytes(), limits[rank]);
        EXPECT_NE(plan->describe().find("tokens in"), std::string::npos);  // of the flat rows
        if (rank == 0) ++accepted;
      });
      for (int r : {0, 1}) limits[r] = free[r] * (15 + below(90)) / 100;
    }
  }
  EXPECT_GT(accepted, 100);
}

// Candidates are found by 32 bits.
TEST(VocabParallelSparse, AHugeShardHasShorterBlocks) {
  run_ranks(1, [&](Communicator& communicator) {
    const Shape shape{.BT = 1024, .V = 30'000'000, .H = 1024};
    const auto plan = plan_vocab_parallel_linear_cross_entropy(
        communicator, shape, {0, shape.V}, {.grad_tolerance = 0x1p-9f}, {.threads = 2});
    ASSERT_TRUE(plan) << plan.error().message;
    const std::string text = plan->describe();
    const size_t at = text.find("elements kept of a row, ");
    ASSERT_NE(at, std::string::npos);
    const int64_t of_a_thread = std::stoll(text.substr(text.find(", ", at) + 2));
    EXPECT_LE(2 * of_a_thread, int64_t{UINT32_MAX}) << text;
  });
}

// Tokens of a group are found by 16 bits, and a sum over ranks is counted by 31.
TEST(VocabParallelSparse, ManyTokensAreManyGroups) {
  for (const Shape& shape :
       {Shape{.BT = 20'000'000, .V = 5000, .H = 8}, Shape{.BT = 65536, .V = 5000, .H = 40'000}}) {
    run_ranks(1, [&](Communicator& communicator) {
      const auto plan = plan_vocab_parallel_linear_cross_entropy(
          communicator, shape, {0, shape.V}, {.grad_tolerance = 0x1p-9f}, {.threads = 2});
      ASSERT_TRUE(plan) << plan.error().message;
      const std::string text = plan->describe();
      const size_t at = text.find(" groups of ");
      ASSERT_NE(at, std::string::npos) << text;
      const int64_t rows = std::stoll(text.substr(at + 11));
      EXPECT_LE(rows, 65536) << text;
      EXPECT_LE(rows * shape.H, INT32_MAX) << text;
    });
  }
}

// A shard whose first columns are farther below the others than fp32 reaches.
TEST(VocabParallelSparse, ColumnsFarBelowTheOthersHideNothing) {
  for (const double low : {-88.0, -95.0, -104.5, -250.0}) {
    for (const double high : {0.0, -3.0}) {
      SCOPED_TRACE("low " + std::to_string(low) + ", high " + std::to_string(high));
      const Case c{.BT = 4, .V = 4352};
      OneHot o = make(c);
      for (int64_t v = 0; v < c.V; ++v) {
        const bool large = v % 64 == 0 ? v % 512 == 0 : v % 37 == 0;
        const double x = (large ? -0.1 : -12.0) - 0.1 * static_cast<double>(v % 11);
        o.set_logit(1, v, v == 4200 ? 0.0 : v < 1024 ? low + 0.001 * x : high + x);
      }
      o.step.target.set_index(1, 4200);
      // The operands are alike on all ranks, and are not copied.
      ShardedStep s;
      s.strategy = Strategy::automatic;
      s.cover = {{0, 4096}, {4096, 4352}};
      std::swap(s.step, o.step);
      const StepResult got = run_sharded(s);
      s.step.grad_tolerance = 0.0f;
      s.strategy = Strategy::one_pass;
      const StepResult exact = run_sharded(s);
      std::swap(s.step, o.step);
      o.step.grad_tolerance = c.tolerance;
      const KeptSet set = expect_kept_set(o, exact, got);
      EXPECT_EQ(set.sparse_rows, c.BT);
    }
  }
}

TEST(VocabParallelSparse, AddsToWhatIsThere) {
  const Case c;
  const auto cover = balanced_cover(c.V, 3);
  ShardedStep s = sharded(c, cover);
  const StepResult plain = run_sharded(s);
  s.step.grad_input->accumulate = s.step.grad_weight->accumulate = true;
  const GradientResult there = make_gradient_outputs(gradient_case_of(s.step));
  const StepResult got = run_sharded(s);
  const auto expect_sum = [](const TestTensor& a, const TestTensor& b, const TestTensor& sum) {
    for (int64_t r = 0; r < sum.rows(); ++r) {
      for (int64_t h = 0; h < sum.cols(); ++h) {
        const double want = a.get(r, h) + b.get(r, h);
        ASSERT_NEAR(sum.get(r, h), want, 1e-6 * (1 + std::abs(want))) << r << " " << h;
      }
    }
  };
  expect_sum(*there.grad_input, *plain.gradients.grad_input, *got.gradients.grad_input);
  expect_sum(*there.grad_weight, *plain.gradients.grad_weight, *got.gradients.grad_weight);
}

// Rows that count and have no gradient among them.
TEST(VocabParallelSparse, TheBackwardApartIsTheSameStep) {
  for (const int ranks : {1, 3}) {
    Case c;
    ShardedStep s = sharded(c, uneven_cover(c.V, ranks));
    s.step.token_weights.emplace(TestTensor::vector(DType::f32, c.BT));
    for (int64_t b = 0; b < c.BT; ++b) {
      s.step.token_weights->set(b, b % 5 == 2 ? 0.0 : 0.5 + 0.25 * static_cast<double>(b % 3));
    }
    for (const TokenRows rows : {TokenRows::all, TokenRows::slice}) {
      s.input_rows = s.grad_input_rows = rows;
      s.apart = false;
      const StepResult together = run_sharded(s);
      s.apart = true;
      const StepResult apart = run_sharded(s);
      EXPECT_EQ(apart.bits(), together.bits());
      expect_same_counts(apart, together);
      EXPECT_GT(apart.gradients.sparse_counts.rows, apart.gradients.sparse_counts.dense_rows);
    }
  }
}

// No row, no gradient, fewer vocabulary rows than ranks, ...
TEST(VocabParallelSparse, NothingIsFineToo) {
  for (Scenario& scenario : edge_scenarios(3, Strategy::one_pass)) {
    SCOPED_TRACE(scenario.name);
    const StepResult exact = run_sharded(scenario.step);
    scenario.step.step.grad_tolerance = 0x1p-4f;
    expect_same_statistics(run_sharded(scenario.step), exact);
  }
  for (Scenario& scenario : option_scenarios(3, Strategy::one_pass)) {
    SCOPED_TRACE(scenario.name);
    const StepResult exact = run_sharded(scenario.step);
    scenario.step.step.grad_tolerance = 0x1p-4f;
    expect_same_statistics(run_sharded(scenario.step), exact);
  }
}

// Rows that come twice do so: two gathers more.
TEST(VocabParallelSparse, SomeRowsComeTwice) {
  const auto gathers = [](const Case& c) {
    int number = 0;
    run_ranks(3, [&](Communicator& communicator) {
      const RankResult r = run_rank(communicator, sharded(c, balanced_cover(c.V, 3)));
      ASSERT_TRUE(r.result);
      if (communicator.rank() == 0) number = traffic_of(communicator).gathers;
    });
    return number;
  };
  EXPECT_EQ(gathers({.BT = 18}), gathers({.BT = 8}) + 2);
}

// Whenever a rank is cancelled, all of them say so. So many rows that no two gathers are of as many
// bytes: also while others have rows that come once more.
TEST(VocabParallelSparse, ACancelledRankIsEveryonesError) {
  const Case c{.BT = 100};
  for (int at = 0; at < 16; ++at) {
    CancelToken token;
    std::atomic<int> calls = 0;
    std::atomic<int> finished = 0, cancelled = 0;
    run_ranks(3,
              [&](Communicator& communicator) {
                const ShardedStep s = sharded(c, balanced_cover(c.V, 3));
                const RankResult r = run_rank(communicator, s, [&](RankArguments& a) {
                  if (communicator.rank() == 1) a.cancel = &token;
                });
                if (r.result) {
                  ++finished;
                } else {
                  EXPECT_EQ(r.result.error().message, "rank 1: loss_and_gradient: cancelled");
                  EXPECT_EQ(r.result.error().kind, ErrorKind::cancelled);
                  ++cancelled;
                }
              },
              {.before_call = [&](int rank) {
                if (rank == 1 && calls++ == at) token.cancel();
              }});
    EXPECT_EQ(finished + cancelled, 3);
    EXPECT_TRUE(finished == 0 || cancelled == 0) << at;
    if (at < 6) {
      EXPECT_EQ(cancelled, 3) << at;
    }
  }
}

TEST(VocabParallelSparse, RanksMustAgree) {
  const Case c{.BT = 6, .V = 90};
  const auto expect_error = [&](const std::string& message, const auto& change) {
    SCOPED_TRACE(message);
    run_ranks(3, [&](Communicator& communicator) {
      ShardedStep s = sharded(c, balanced_cover(c.V, 3));
      change(communicator.rank(), s);
      const RankResult r = run_rank(communicator, s);
      ASSERT_FALSE(r.result);
      EXPECT_EQ(r.result.error().message, message);
      EXPECT_TRUE(r.step.loss.untouched());
    });
  };
  expect_error("seed: ranks 0 and 2 were given 3007 and 18446744073709551615, must be the same",
               [](int rank, ShardedStep& s) {
                 if (rank == 2) s.step.seed = UINT64_MAX;
               });
  const auto ids = [](ShardedStep& s, int64_t first) {
    s.step.token_ids.emplace(TestTensor::vector(DType::i64, s.step.shape.BT));
    for (int64_t b = 0; b < s.step.shape.BT; ++b) s.step.token_ids->set_index(b, first + b);
  };
  expect_error("token_ids: ranks 0 and 1 were given none and one, must be the same",
               [&](int rank, ShardedStep& s) {
                 if (rank == 1) ids(s, 0);
               });
  expect_error("token_ids: ranks 0 and 1 hold different contents, must be the same",
               [&](int rank, ShardedStep& s) { ids(s, rank == 1 ? 1 : 0); });
  expect_error("grad_tolerance: ranks 0 and 1 were given 0.015625 and 0.000000, must be the same",
               [](int rank, ShardedStep& s) {
                 if (rank == 1) s.step.grad_tolerance = 0.0f;
               });
  expect_error("rank 2: grad_tolerance is 0.750000, must be 0, or between 2^-16 and 0.5",
               [](int rank, ShardedStep& s) {
                 if (rank == 2) s.step.grad_tolerance = 0.75f;
               });
  expect_error(
      "grad_tolerance is 0.015625, must be 0 with the strategy recompute: a sparse gradient is one "
      "pass",
      [](int, ShardedStep& s) { s.strategy = Strategy::recompute; });
}

}  // namespace
}  // namespace logitless::test
