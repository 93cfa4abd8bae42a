// SPDX-License-Identifier: Apache-2.0
// Any problem, any cover of the vocabulary in any rank order, any targets.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/parallel/scenarios.h"
#include "tests/parallel/thread_ranks.h"

namespace logitless::test {
namespace {

std::vector<RowRange> any_cover(int64_t V, int ranks) {
  std::vector<int64_t> cuts = {0, V};
  for (int i = 1; i < ranks; ++i) cuts.push_back(*rc::gen::inRange<int64_t>(0, V + 1));
  std::sort(cuts.begin(), cuts.end());
  std::vector<RowRange> ordered;
  for (int r = 0; r < ranks; ++r) {
    ordered.push_back({cuts[static_cast<size_t>(r)], cuts[static_cast<size_t>(r) + 1]});
  }
  // A permutation: each rank in turn takes one of those that are left.
  std::vector<RowRange> cover;
  while (!ordered.empty()) {
    const auto i = *rc::gen::inRange<size_t>(0, ordered.size());
    cover.push_back(ordered[i]);
    ordered.erase(ordered.begin() + static_cast<int64_t>(i));
  }
  return cover;
}

GradientOutput any_output(const Arithmetic& arithmetic) {
  return {.dtype = *rc::gen::element(DType::f32, arithmetic.operand),
          .accumulate = *rc::gen::arbitrary<bool>()};
}

ShardedStep any_step(int ranks) {
  ShardedStep s;
  const Shape shape{.BT = *rc::gen::inRange<int64_t>(0, 40),
                    .V = *rc::gen::inRange<int64_t>(1, 300),
                    .H = *rc::gen::inRange<int64_t>(2, 60)};
  const auto arithmetics = all_arithmetics();
  const Arithmetic arithmetic = arithmetics[*rc::gen::inRange<size_t>(0, arithmetics.size())];
  s.step = make_step(shape, arithmetic,
                     {.kind = *rc::gen::element(InputKind::peaked, InputKind::flat,
                                                InputKind::certain, InputKind::negative),
                      .seed = *rc::gen::inRange<uint64_t>(0, 1 << 20),
                      .target_type = *rc::gen::element(DType::i32, DType::i64),
                      .outside = 0});
  for (int64_t b = 0; b < shape.BT; ++b) {
    // Mostly the one the input was made for, else any.
    if (*rc::gen::inRange(0, 4) == 0) {
      s.step.target.set_index(b, *rc::gen::inRange<int64_t>(0, shape.V));
    }
  }
  if (*rc::gen::arbitrary<bool>()) {
    s.step.ignore_index = -100;
    for (int64_t b = 0; b < shape.BT; ++b) {
      if (*rc::gen::inRange(0, 3) == 0) s.step.target.set_index(b, -100);
    }
  }
  s.step.grad_input = any_output(arithmetic);
  s.step.grad_weight = any_output(arithmetic);
  s.cover = any_cover(shape.V, ranks);
  s.input_rows = *rc::gen::element(TokenRows::all, TokenRows::slice);
  s.grad_input_rows = *rc::gen::element(TokenRows::all, TokenRows::slice);
  s.chunk_tokens = 2 * *rc::gen::inRange<int64_t>(0, 12);
  s.strategy = *rc::gen::element(Strategy::one_pass, Strategy::recompute, Strategy::automatic);
  const auto isas = usable_isas();
  s.options.isa = isas[*rc::gen::inRange<size_t>(0, isas.size())];
  return s;
}

RC_GTEST_PROP(VocabParallelProperties, AnyCoverIsWithinTheContractOnEveryRank, ()) {
  const int ranks = *rc::gen::inRange(1, 9);
  const ShardedStep s = any_step(ranks);
  std::vector<std::vector<uint64_t>> bits(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& communicator) {
    bits[static_cast<size_t>(communicator.rank())] = expect_sharded(communicator, s);
  });
  for (const auto& b : bits) RC_ASSERT(b == bits[0]);
  RC_ASSERT(!testing::Test::HasFailure());
}

// A cover with a row moved over one edge, or two ranges swapped so that they overlap, is noticed,
// and by every rank in the same words.
RC_GTEST_PROP(VocabParallelProperties, ABrokenCoverIsNoticedByEveryRank, ()) {
  const int ranks = *rc::gen::inRange(2, 9);
  const int64_t V = *rc::gen::inRange<int64_t>(1, 200);
  std::vector<RowRange> cover = any_cover(V, ranks);
  const auto broken = *rc::gen::inRange<size_t>(0, cover.size());
  RowRange& range = cover[broken];
  RC_PRE(range.size() > 0);
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      ++range.begin;
      break;
    case 1:
      --range.end;
      break;
    case 2:
      RC_PRE(range.begin > 0);
      --range.begin;
      break;
    default:
      RC_PRE(range.end < V);
      ++range.end;
  }
  std::vector<std::string> messages(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& communicator) {
    const auto rank = static_cast<size_t>(communicator.rank());
    const auto plan = plan_vocab_parallel_linear_cross_entropy(
        communicator, {.BT = 4, .V = V, .H = 8}, cover[rank], {}, {.threads = 1});
    messages[rank] = plan ? "" : plan.error().message;
  });
  for (const std::string& message : messages) {
    RC_ASSERT(message == messages[0]);
    RC_ASSERT(message.find("shards must cover") != std::string::npos);
  }
}

}  // namespace
}  // namespace logitless::test
