// SPDX-License-Identifier: Apache-2.0
// Whatever is wrong on one rank, or differs between two, is the same sentence on all of them, and
// nothing is written.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>

#include "tests/parallel/scenarios.h"
#include "tests/parallel/thread_ranks.h"

namespace logitless::test {
namespace {

constexpr int kRanks = 3;

ShardedStep ordinary(Strategy strategy = Strategy::recompute) {
  ShardedStep s;
  s.strategy = strategy;
  s.step = make_step({.BT = 20, .V = 60, .H = 16}, all_arithmetics()[1]);
  s.cover = balanced_cover(60, kRanks);
  s.chunk_tokens = 6;
  return s;
}

// Fresh outputs, as they were made.
bool untouched(const ShardedStep& s, const RankResult& r) {
  const auto as_made = [](const auto& output, const auto& tensor) {
    return !output || output->accumulate || tensor->untouched();
  };
  return r.step.loss.untouched() && r.step.logits_max.untouched() &&
         r.step.sum_exp_logits.untouched() && r.step.predicted_logits.untouched() &&
         as_made(s.step.grad_input, r.step.gradients.grad_input) &&
         as_made(s.step.grad_weight, r.step.gradients.grad_weight) && std::isnan(r.step.total);
}

using Change = std::function<void(int rank, ShardedStep&)>;
using ChangeArguments = std::function<void(int rank, RankArguments&)>;

// Runs with what `change` and `arguments` do on each rank; every rank must come to this error.
void expect_error(ErrorKind kind, const std::string& message, const Change& change,
                  const ChangeArguments& arguments = {}) {
  SCOPED_TRACE(message);
  for (const Strategy strategy : kStrategies) {
    run_ranks(kRanks, [&](Communicator& communicator) {
      const int rank = communicator.rank();
      ShardedStep s = ordinary(strategy);
      if (change) change(rank, s);
      const RankResult r = run_rank(communicator, s, [&](RankArguments& a) {
        if (arguments) arguments(rank, a);
      });
      ASSERT_FALSE(r.result) << "rank " << rank;
      EXPECT_EQ(r.result.error().message, message) << "rank " << rank;
      EXPECT_EQ(r.result.error().kind, kind) << "rank " << rank;
      EXPECT_TRUE(untouched(s, r)) << "rank " << rank;
    });
  }
}

void expect_invalid(const std::string& message, const Change& change,
                    const ChangeArguments& arguments = {}) {
  const bool of_a_type = message.find("dtype is ") != std::string::npos;
  expect_error(of_a_type ? ErrorKind::wrong_type : ErrorKind::invalid_argument, message, change,
               arguments);
}

// On one rank only.
Change on(int rank, const std::function<void(ShardedStep&)>& change) {
  return [=](int r, ShardedStep& s) {
    if (r == rank) change(s);
  };
}
ChangeArguments on_arguments(int rank, const std::function<void(RankArguments&)>& change) {
  return [=](int r, RankArguments& a) {
    if (r == rank) change(a);
  };
}

TEST(VocabParallelErrors, RanksThatDisagreeInThePlan) {
  expect_invalid("BT: ranks 0 and 1 were given 20 and 21, must be the same",
                 on(1, [](ShardedStep& s) { s.step.shape.BT = 21; }));
  expect_invalid("H: ranks 0 and 2 were given 16 and 24, must be the same",
                 on(2, [](ShardedStep& s) { s.step.shape.H = 24; }));
  expect_invalid("V: ranks 0 and 1 were given 60 and 64, must be the same",
                 on(1, [](ShardedStep& s) { s.step.shape.V = 64; }));
  expect_invalid("operand: ranks 0 and 1 were given f16 and bf16, must be the same",
                 on(0, [](ShardedStep& s) {
                   s.step.arithmetic = all_arithmetics()[0];
                   s.step.grad_input->dtype = s.step.grad_weight->dtype = DType::f16;
                 }));
  expect_invalid("multiply: ranks 0 and 2 were given none and bf16, must be the same",
                 [](int rank, ShardedStep& s) {
                   s.step.arithmetic = all_arithmetics()[rank == 2 ? 3 : 2];
                   s.step.grad_input->dtype = s.step.grad_weight->dtype = DType::f32;
                 });
  expect_invalid("target's dtype: ranks 0 and 1 were given i64 and i32, must be the same",
                 on(1, [](ShardedStep& s) { s.step.target_type = DType::i32; }));
  expect_invalid("grad_input: ranks 0 and 1 were given bf16 and none, must be the same",
                 on(1, [](ShardedStep& s) { s.step.grad_input.reset(); }));
  expect_invalid(
      "grad_input: ranks 0 and 2 were given bf16 and bf16, accumulated, must be the same",
      on(2, [](ShardedStep& s) { s.step.grad_input->accumulate = true; }));
  expect_invalid("grad_weight: ranks 0 and 1 were given bf16 and f32, must be the same",
                 on(1, [](ShardedStep& s) { s.step.grad_weight->dtype = DType::f32; }));
  expect_invalid("input_rows: ranks 0 and 1 were given all and slice, must be the same",
                 on(1, [](ShardedStep& s) { s.input_rows = TokenRows::slice; }));
  expect_invalid("grad_input_rows: ranks 0 and 2 were given all and slice, must be the same",
                 on(2, [](ShardedStep& s) { s.grad_input_rows = TokenRows::slice; }));
  expect_invalid("chunk_tokens: ranks 0 and 1 were given 6 and 0, must be the same",
                 on(1, [](ShardedStep& s) { s.chunk_tokens = 0; }));
  expect_invalid("agree_in_run: ranks 0 and 1 were given true and false, must be the same",
                 on(1, [](ShardedStep& s) { s.agree_in_run = false; }));
  expect_invalid("strategy: ranks 0 and 2 were given automatic and one_pass, must be the same",
                 [](int rank, ShardedStep& s) {
                   s.strategy = rank == 2 ? Strategy::one_pass : Strategy::automatic;
                 });
  const Isa best = usable_isas().front();
  if (best == Isa::scalar) GTEST_SKIP() << "this machine has no second level of instructions";
  expect_invalid(std::string("isa: ranks 0 and 1 were given ") + name_of(best) +
                     " and scalar, must be the same",
                 [&](int rank, ShardedStep& s) { s.options.isa = rank == 1 ? Isa::scalar : best; });
}

TEST(VocabParallelErrors, ShardsThatDoNotCoverTheVocabulary) {
  const auto cover = [](std::vector<RowRange> ranges) {
    return [=](int, ShardedStep& s) { s.cover = ranges; };
  };
  const std::string rule = "; shards must cover [0, V) = [0, 60) without gap or overlap";
  expect_invalid("rows: no rank has [20, 21)" + rule, cover({{0, 20}, {21, 40}, {40, 60}}));
  expect_invalid("rows: no rank has [59, 60)" + rule, cover({{40, 59}, {0, 20}, {20, 40}}));
  expect_invalid("rows: no rank has [0, 1)" + rule, cover({{40, 60}, {1, 20}, {20, 40}}));
  expect_invalid("rows: no rank has [0, 60)" + rule, cover({{0, 0}, {30, 30}, {60, 60}}));
  expect_invalid("rows: rank 1 has [0, 21) and rank 2 has [20, 40)" + rule,
                 cover({{40, 60}, {0, 21}, {20, 40}}));
  expect_invalid("rows: rank 0 has [0, 60) and rank 2 has [0, 60)" + rule,
                 cover({{0, 60}, {3, 3}, {0, 60}}));
}

TEST(VocabParallelErrors, APlanThatOneRankCannotMake) {
  expect_invalid("rank 1: rows are [20, 61), must be a part of [0, V) = [0, 60), empty or not",
                 on(1, [](ShardedStep& s) {
                   s.cover[1] = {20, 61};
                 }));
  expect_invalid("rank 2: rows are [60, 40), must be a part of [0, V) = [0, 60), empty or not",
                 on(2, [](ShardedStep& s) {
                   s.cover[2] = {60, 40};
                 }));
  expect_invalid("rank 0: rows are [-1, 20), must be a part of [0, V) = [0, 60), empty or not",
                 on(0, [](ShardedStep& s) {
                   s.cover[0] = {-1, 20};
                 }));
  expect_invalid("rank 1: chunk_tokens is 7, must be even and not negative; 0 = automatic",
                 on(1, [](ShardedStep& s) { s.chunk_tokens = 7; }));
  expect_invalid("chunk_tokens is -2, must be even and not negative; 0 = automatic",
                 [](int, ShardedStep& s) { s.chunk_tokens = -2; });
  expect_invalid("rank 2: grad_weight: dtype is f16, must be f32 or the operand type bf16",
                 on(2, [](ShardedStep& s) { s.step.grad_weight->dtype = DType::f16; }));
  expect_invalid("rank 1: threads is -1, must be between 0 and 4096",
                 on(1, [](ShardedStep& s) { s.options.threads = -1; }));
  run_ranks(kRanks, [&](Communicator& communicator) {
    const auto plan = plan_vocab_parallel_linear_cross_entropy(
        communicator, {.BT = communicator.rank() == 1 ? -1 : 20, .V = 0, .H = 16}, {0, 0}, {});
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().message, "rank 1: BT is -1, must be between 0 and 2^48");
  });
  for (const Strategy strategy : {Strategy::automatic, Strategy::one_pass, Strategy::recompute}) {
    run_ranks(kRanks, [&](Communicator& communicator) {
      ShardedStep s = ordinary(strategy);
      if (communicator.rank() == 1) s.options.workspace_limit_bytes = 1000;
      const RankResult r = run_rank(communicator, s);
      ASSERT_FALSE(r.result);
      EXPECT_EQ(r.result.error().kind, ErrorKind::limit_too_small);
      const std::string& message = r.result.error().message;
      EXPECT_EQ(message.rfind("rank 1: workspace_limit_bytes is 1000, the least", 0), 0u)
          << message;
      EXPECT_EQ(message.find("of one pass") != std::string::npos, strategy == Strategy::one_pass)
          << message;
    });
  }
}

TEST(VocabParallelErrors, AWorkspaceThatIsMissingOrTooSmall) {
  for (const int way : {0, 1, 2, 3}) {
    const bool missing = way % 2 == 0;
    run_ranks(kRanks, [&](Communicator& communicator) {
      const ShardedStep s = ordinary(kStrategies[way / 2]);
      const RankResult r = run_rank(communicator, s, [&](RankArguments& a) {
        if (communicator.rank() != 2) return;
        a.workspace = missing ? std::span<std::byte>() : a.workspace.first(a.workspace.size() - 1);
      });
      ASSERT_FALSE(r.result);
      EXPECT_EQ(r.result.error().kind, ErrorKind::workspace_too_small);
      const std::string& message = r.result.error().message;
      EXPECT_EQ(message.rfind("rank 2: workspace: ", 0), 0u) << message;
      EXPECT_NE(message.find(" bytes came, the plan asks for "), std::string::npos) << message;
      EXPECT_TRUE(untouched(ordinary(), r));
    });
  }
}

TEST(VocabParallelErrors, ArgumentsThatAreWrong) {
  expect_invalid("rank 1: input: shape is [19, 16], must be [BT, H] = [20, 16]", {},
                 on_arguments(1, [](RankArguments& a) { a.operands.input.rows = 19; }));
  expect_invalid(
      "rank 0: input: shape is [20, 16], must be [this rank's slice of BT, H] = [7, 16]",
      [](int, ShardedStep& s) { s.input_rows = TokenRows::slice; },
      on_arguments(0, [](RankArguments& a) { a.operands.input.rows = 20; }));
  expect_invalid("rank 1: weight: shape is [21, 16], must be [V, H] = [20, 16]", {},
                 on_arguments(1, [](RankArguments& a) { a.operands.weight.rows = 21; }));
  expect_invalid("rank 2: target: data is null, must hold 20 elements", {},
                 on_arguments(2, [](RankArguments& a) { a.operands.target.data = nullptr; }));
  expect_invalid("rank 1: loss: dtype is f16, must be f32", {},
                 on_arguments(1, [](RankArguments& a) { a.outputs.loss.dtype = DType::f16; }));
  expect_invalid("rank 1: grad_input: absent, but the plan was made with it", {},
                 on_arguments(1, [](RankArguments& a) { a.outputs.grad_input.reset(); }));
  expect_invalid(
      "rank 1: grad_input: shape is [8, 16], must be [this rank's slice of BT, H] = [7, 16]",
      [](int, ShardedStep& s) { s.grad_input_rows = TokenRows::slice; },
      on_arguments(1, [](RankArguments& a) { a.outputs.grad_input->rows = 8; }));
  expect_invalid("rank 2: grad_weight: data is null, must hold [20, 16] elements", {},
                 on_arguments(2, [](RankArguments& a) { a.outputs.grad_weight->data = nullptr; }));
  expect_invalid("rank 0: workspace: address is not a multiple of 64 bytes", {},
                 on_arguments(0, [](RankArguments& a) {
                   // Any address will do: it is not written to.
                   a.workspace = {a.workspace.data() - 8, a.workspace.size() + 8};
                 }));
  expect_invalid("normalizer is 0.000000, must not be 0 or NaN",
                 [](int, ShardedStep& s) { s.step.normalizer = 0.0; });
}

TEST(VocabParallelErrors, RanksThatDisagreeInWhatTheyRun) {
  expect_invalid("target: ranks 0 and 2 hold different contents, must be the same",
                 on(2, [](ShardedStep& s) {
                   s.step.target.set_index(7, (s.step.target.get_index(7) + 1) % 60);
                 }));
  expect_invalid("ignore_index: ranks 0 and 1 were given none and one, must be the same",
                 on(1, [](ShardedStep& s) { s.step.ignore_index = -100; }));
  expect_invalid("ignore_index: ranks 0 and 1 were given -1 and -100, must be the same",
                 [](int rank, ShardedStep& s) { s.step.ignore_index = rank == 1 ? -100 : -1; });
  const auto filter = [](ShardedStep& s, int64_t dropped) {
    s.step.counts = TestTensor::vector(DType::u8, 20);
    for (int64_t b = 0; b < 20; ++b) s.step.counts->set_index(b, b == dropped ? 0 : 1);
  };
  expect_invalid("counts: ranks 0 and 1 were given none and one, must be the same",
                 on(1, [&](ShardedStep& s) { filter(s, 3); }));
  expect_invalid("counts: ranks 0 and 2 hold different contents, must be the same",
                 [&](int rank, ShardedStep& s) { filter(s, rank == 2 ? 3 : 4); });
  const auto weigh = [](ShardedStep& s, double weight) {
    s.step.token_weights = TestTensor::vector(DType::f32, 20);
    for (int64_t b = 0; b < 20; ++b) s.step.token_weights->set(b, b == 5 ? weight : 0.5);
  };
  expect_invalid("token_weights: ranks 0 and 1 were given one and none, must be the same",
                 [&](int rank, ShardedStep& s) {
                   if (rank != 1) weigh(s, 0.25);
                 });
  expect_invalid("token_weights: ranks 0 and 1 hold different contents, must be the same",
                 [&](int rank, ShardedStep& s) { weigh(s, rank == 1 ? 0.125 : 0.25); });
  expect_invalid("normalizer: ranks 0 and 2 were given 4.000000 and 5.000000, must be the same",
                 [](int rank, ShardedStep& s) { s.step.normalizer = rank == 2 ? 5 : 4; });
}

TEST(VocabParallelErrors, ATargetThatNoShardOwns) {
  for (const int64_t id : {int64_t{60}, int64_t{-1}, int64_t{1} << 40}) {
    expect_error(
        ErrorKind::invalid_data,
        "target[7] is " + std::to_string(id) + ", must be in [0, V) = [0, 60) where the row counts",
        [&](int, ShardedStep& s) { s.step.target.set_index(7, id); });
  }
  expect_error(ErrorKind::invalid_data,
               "rank 1: target[7] is 60, must be in [0, V) = [0, 60) where the row counts",
               on(1, [&](ShardedStep& s) { s.step.target.set_index(7, 60); }));
}

TEST(VocabParallelErrors, AnotherPlanOrCommunicator) {
  run_ranks(kRanks, [&](Communicator& communicator) {
    const ShardedStep s = ordinary();
    ShardedStep other = ordinary();
    other.cover = uneven_cover(60, kRanks);
    const int rank = communicator.rank();
    const auto plan_of = [&](Communicator& c, const ShardedStep& step) {
      return plan_vocab_parallel_linear_cross_entropy(
          c, step.step.shape, step.cover[static_cast<size_t>(rank)], step.types(), step.options);
    };
    const auto plan = plan_of(communicator, s);
    ASSERT_TRUE(plan);
    other.cover[0] = s.cover[0];
    other.cover[1] = {40, 60};
    other.cover[2] = {20, 40};
    const auto swapped = plan_of(communicator, other);
    ASSERT_TRUE(swapped);
    // The first rank's shard is the same in both plans, but the plans are not.
    TestTensor loss = TestTensor::vector(DType::f32, 20);
    TestTensor grad_input = TestTensor::matrix(DType::bf16, 20, 16);
    TestTensor grad_weight = TestTensor::matrix(DType::bf16, 20, 16);
    LossAndGradientOperands in = s.step.operands();
    in.weight.rows = 20;
    LossAndGradientOutputs out;
    out.loss = loss.vector_view();
    out.grad_input = grad_input.matrix_view();
    out.grad_weight = grad_weight.matrix_view();
    const auto& mine = rank == 0 ? *plan : *swapped;
    const auto ran = run(mine, communicator, in, out, guarded_workspace(mine.workspace_bytes()));
    ASSERT_FALSE(ran);
    EXPECT_EQ(ran.error().message, "plan: ranks 0 and 1 hold different contents, must be the same");
    EXPECT_TRUE(loss.untouched());
    const auto alone = self_communicator();
    const auto wrong = run(*plan, *alone, in, out, guarded_workspace(plan->workspace_bytes()));
    ASSERT_FALSE(wrong);
    EXPECT_EQ(wrong.error().message, "communicator: rank 0 of 1 came, the plan was made for rank " +
                                         std::to_string(rank) + " of 3");
  });
}

TEST(VocabParallelErrors, ABackwardApart) {
  run_ranks(kRanks, [&](Communicator& communicator) {
    const ShardedStep s = ordinary();
    const int rank = communicator.rank();
    const RowRange rows = s.cover[static_cast<size_t>(rank)];
    const auto plan = plan_vocab_parallel_linear_cross_entropy(communicator, s.step.shape, rows,
                                                               s.types(), s.options);
    ASSERT_TRUE(plan);
    TestTensor loss = TestTensor::vector(DType::f32, 20);
    TestTensor short_sum = TestTensor::vector(DType::f32, 19);
    TestTensor grad_input = TestTensor::matrix(DType::bf16, 20, 16);
    TestTensor grad_weight = TestTensor::matrix(DType::bf16, rows.size(), 16);
    LossAndGradientOperands in = s.step.operands();
    in.weight.rows = rows.size();
    const GradientOutputs out{grad_input.matrix_view(), grad_weight.matrix_view()};
    const auto workspace = guarded_workspace(plan->workspace_bytes());
    const auto expect = [&](const Result<void>& ran, const std::string& message) {
      ASSERT_FALSE(ran);
      EXPECT_EQ(ran.error().message, message);
      EXPECT_TRUE(loss.untouched() && grad_input.untouched() && grad_weight.untouched());
    };
    const MergedStatistics fine{loss.vector_view(), loss.vector_view()};
    const MergedStatistics bad{loss.vector_view(), short_sum.vector_view()};
    expect(run_gradient(*plan, communicator, in, rank == 1 ? bad : fine, out, workspace),
           "rank 1: sum_exp_logits: size is 19, must be BT = 20");
    // One rank is in its forward still.
    const LossAndGradientOutputs step{
        .loss = loss.vector_view(), .grad_input = out.grad_input, .grad_weight = out.grad_weight};
    expect(rank == 2 ? run(*plan, communicator, in, step, workspace)
                     : run_gradient(*plan, communicator, in, fine, out, workspace),
           "statistics: ranks 0 and 2 were given one and none, must be the same");
    VocabParallelTypes types = s.types();
    types.strategy = Strategy::one_pass;
    const auto one_pass = plan_vocab_parallel_linear_cross_entropy(communicator, s.step.shape, rows,
                                                                   types, s.options);
    ASSERT_TRUE(one_pass);
    expect(run_gradient(*one_pass, communicator, in, fine, out,
                        guarded_workspace(one_pass->workspace_bytes())),
           "plan: its strategy is one_pass, must be recompute for a backward apart");
  });
}

// In one pass what was cancelled has one name.
void expect_cancelled(Strategy strategy) {
  const bool one_pass = strategy == Strategy::one_pass;
  // Before it begins, on any rank.
  for (int cancelled = 0; cancelled < kRanks; ++cancelled) {
    CancelToken token;
    token.cancel();
    run_ranks(kRanks, [&](Communicator& communicator) {
      const RankResult r = run_rank(communicator, ordinary(strategy), [&](RankArguments& a) {
        if (communicator.rank() == cancelled) a.cancel = &token;
      });
      ASSERT_FALSE(r.result);
      EXPECT_EQ(r.result.error().kind, ErrorKind::cancelled);
      EXPECT_EQ(r.result.error().message,
                "rank " + std::to_string(cancelled) +
                    (one_pass ? ": loss_and_gradient: cancelled" : ": forward: cancelled"));
    });
  }
  // After the n-th collective of the cancelled rank, which is the only one with a token: planning,
  // agreement, statistics, then the sums of the chunks; in one pass both by turns.
  bool seen_in_gradient = false;
  for (const bool with_grad_input : {true, false}) {
    for (int call = 2; call < 7; ++call) {
      CancelToken token;
      std::atomic<int> calls{0};
      ThreadRanksOptions options;
      options.before_call = [&](int rank) {
        if (rank == 1 && calls++ == call) token.cancel();
      };
      run_ranks(
          kRanks,
          [&](Communicator& communicator) {
            ShardedStep s = ordinary(strategy);
            if (!with_grad_input) s.step.grad_input.reset();
            const RankResult r = run_rank(communicator, s, [&](RankArguments& a) {
              if (communicator.rank() == 1) a.cancel = &token;
            });
            if (r.result) return;  // the token fired when all was done
            EXPECT_EQ(r.result.error().kind, ErrorKind::cancelled);
            EXPECT_EQ(r.result.error().message, one_pass ? "rank 1: loss_and_gradient: cancelled"
                                                         : "rank 1: gradient: cancelled");
            if (communicator.rank() == 0) seen_in_gradient = true;
          },
          options);
    }
  }
  EXPECT_TRUE(seen_in_gradient);
}

TEST(VocabParallelErrors, ACancelledRankCancelsAll) {
  for (const Strategy strategy : kStrategies) expect_cancelled(strategy);
}

TEST(VocabParallelErrors, AStatusIsShared) {
  run_ranks(kRanks, [](Communicator& communicator) {
    EXPECT_TRUE(share_status(communicator, {}));
    Result<void> mine;
    if (communicator.rank() > 0) {
      mine = Error{ErrorKind::invalid_data, std::string(communicator.rank() == 1 ? 400 : 3, 'x')};
    }
    const auto shared = share_status(communicator, mine);
    ASSERT_FALSE(shared);
    EXPECT_EQ(shared.error().kind, ErrorKind::invalid_data);
    // Of the lowest rank that has one; long sentences are cut.
    EXPECT_EQ(shared.error().message, "rank 1: " + std::string(292, 'x') + "...");
    const auto everywhere =
        share_status(communicator, Error{ErrorKind::cancelled, "the same sentence"});
    ASSERT_FALSE(everywhere);
    EXPECT_EQ(everywhere.error().message, "the same sentence");
    EXPECT_EQ(everywhere.error().kind, ErrorKind::cancelled);
  });
}

// Whichever collective fails: no rank hangs, no rank claims success.
TEST(VocabParallelErrors, ATransportThatFails) {
  for (const int way : {0, 1, 2, 3}) {
    const bool scatter = way % 2 == 1;
    const auto run_one = [&](Communicator& communicator) {
      ShardedStep s = ordinary(kStrategies[way / 2]);
      s.input_rows = s.grad_input_rows = scatter ? TokenRows::slice : TokenRows::all;
      return run_rank(communicator, s).result;
    };
    std::atomic<int> calls{0};
    run_ranks(kRanks, [&](Communicator& communicator) {
      EXPECT_TRUE(run_one(communicator));
      calls = traffic_of(communicator).gathers + traffic_of(communicator).sums;
    });
    EXPECT_GT(calls, 5);
    for (int failing = 0; failing < calls; ++failing) {
      run_ranks(kRanks,
                [&](Communicator& communicator) {
                  const auto result = run_one(communicator);
                  ASSERT_FALSE(result) << "call " << failing;
                  EXPECT_EQ(result.error().kind, ErrorKind::communication);
                  EXPECT_EQ(result.error().message, "the transport failed, as asked for");
                },
                {.failing_call = failing});
    }
  }
}

}  // namespace
}  // namespace logitless::test
