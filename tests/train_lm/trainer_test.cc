// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/ranks.h"
#include "examples/train_lm/compare.h"
#include "examples/train_lm/first_step.h"
#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

using test::bits_of;
using test::small_options;
using test::small_text;
using test::with_trainers;

void run_steps(Trainer& trainer, int64_t until) {
  const CancelToken never;
  while (trainer.steps_done() < until) {
    const auto loss = trainer.step(never);
    ASSERT_TRUE(loss) << loss.error().message;
  }
}

TEST(Batches, EveryEpochHasEveryWordOnceInAnOrderOfItsOwn) {
  std::vector<int32_t> words;
  for (int32_t i = 0; i < 600; ++i) words.push_back(3 * i);
  Batches batches(small_options(), words);  // 60 a step
  std::vector<std::vector<int32_t>> epochs(2);
  for (int64_t step = 1; step <= 20; ++step) {
    const auto batch = batches.of_step(step);
    auto& epoch = epochs[static_cast<size_t>((step - 1) / 10)];
    epoch.insert(epoch.end(), batch.begin(), batch.end());
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_FALSE(std::ranges::is_sorted(epochs[0]));
  EXPECT_THAT(epochs[0], testing::UnorderedElementsAreArray(words));
  EXPECT_THAT(epochs[1], testing::UnorderedElementsAreArray(words));
  // A resumed run asks for a step in the middle first.
  Batches later(small_options(), words);
  EXPECT_EQ(later.of_step(17), batches.of_step(17));
}

TEST(Trainer, FourRanksLearnWhatOneLearns) {
  const Text text = small_text();
  const Options options = small_options();
  std::vector<double> alone, four;
  double held_out_alone = 0, held_out_four = 0;
  const CancelToken never;
  with_trainers(1, options, text, [&](Communicator&, Trainer& trainer) {
    run_steps(trainer, options.steps);
    alone = trainer.losses();
    held_out_alone = trainer.held_out_loss(never).value();
  });
  with_trainers(4, options, text, [&](Communicator& ranks, Trainer& trainer) {
    run_steps(trainer, options.steps);
    const double held_out = trainer.held_out_loss(never).value();
    if (ranks.rank() != 2) return;  // any: the same bits
    four = trainer.losses();
    held_out_four = held_out;
  });
  ASSERT_EQ(alone.size(), static_cast<size_t>(options.steps));
  ASSERT_EQ(four.size(), alone.size());
  EXPECT_NEAR(alone[0], four[0], kFirstLossTolerance);
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(alone[i], four[i], kEarlyLossTolerance);
  EXPECT_LT(alone.back(), alone.front());  // it does learn
  EXPECT_NEAR(held_out_four / held_out_alone, 1, kHeldOutTolerance);
}

TEST(Trainer, TheSmallLayersHaveTheSameBitsOnEveryRank) {
  const Text text = small_text();
  std::vector<std::vector<float>> embeddings(3), hiddens(3);
  with_trainers(3, small_options(), text, [&](Communicator& ranks, Trainer& trainer) {
    run_steps(trainer, 4);
    embeddings[static_cast<size_t>(ranks.rank())] = trainer.model().embedding.value;
    hiddens[static_cast<size_t>(ranks.rank())] = trainer.model().hidden.value;
  });
  for (const size_t rank : {1, 2}) {
    EXPECT_EQ(embeddings[rank], embeddings[0]);
    EXPECT_EQ(hiddens[rank], hiddens[0]);
  }
}

TEST(Trainer, HeldOutLossCountsEveryHeldOutWordOnce) {
  // 400 held-out words in batches of 60: the last one is not full.
  const Text text = small_text(8000);
  std::vector<double> losses;
  for (const int64_t batch : {60, 400}) {
    Options options = small_options();
    options.batch = batch;
    with_trainers(1, options, text, [&](Communicator&, Trainer& trainer) {
      EXPECT_EQ(trainer.split().held_out.size(), 400u);
      losses.push_back(trainer.held_out_loss(CancelToken()).value());
    });
  }
  ASSERT_EQ(losses.size(), 2u);
  EXPECT_NEAR(losses[0], losses[1], 1e-6);
}

TEST(Trainer, AnInterruptedStepLeavesTheModelAsItWas) {
  const Text text = small_text();
  std::vector<std::vector<uint32_t>> whole(3), interrupted(3);
  with_trainers(3, small_options(), text, [&](Communicator& ranks, Trainer& trainer) {
    run_steps(trainer, 5);
    whole[static_cast<size_t>(ranks.rank())] = bits_of(trainer);
  });
  with_trainers(3, small_options(), text, [&](Communicator& ranks, Trainer& trainer) {
    run_steps(trainer, 3);
    const auto before = bits_of(trainer);
    CancelToken token;
    if (ranks.rank() == 1) token.cancel();  // on one rank
    const auto loss = trainer.step(token);
    ASSERT_FALSE(loss);
    EXPECT_EQ(loss.error().kind, ErrorKind::cancelled);
    EXPECT_EQ(bits_of(trainer), before);
    run_steps(trainer, 5);
    interrupted[static_cast<size_t>(ranks.rank())] = bits_of(trainer);
  });
  EXPECT_EQ(interrupted, whole);
}

// So large a tolerance that even an untrained model has few elements to keep.
Options sparse_options() {
  Options options = small_options();
  options.grad_tolerance = 0.5;
  return options;
}

TEST(Trainer, SparseGradientsAreThoseOfTheSeedAndTheStep) {
  const Text text = small_text();
  std::vector<std::vector<uint32_t>> runs;
  std::vector<std::vector<double>> losses;
  for (const auto& [tolerance, seed] : {std::pair(0.5, 1), {0.5, 1}, {0.0, 1}, {0.5, 2}}) {
    Options options = sparse_options();
    options.grad_tolerance = tolerance;
    options.seed = static_cast<uint64_t>(seed);
    const bool sparse = tolerance > 0;
    with_trainers(1, options, text, [&](Communicator&, Trainer& trainer) {
      run_steps(trainer, 1);
      const SparseCounts counts = trainer.sparse_counts();
      EXPECT_EQ(counts.rows, sparse ? options.batch : 0);
      if (sparse) {
        EXPECT_LT(counts.dense_rows, counts.rows);
        EXPECT_LT(counts.kept, counts.elements / 5);
      }
      run_steps(trainer, options.steps);
      runs.push_back(bits_of(trainer));
      losses.push_back(trainer.losses());
    });
  }
  EXPECT_EQ(runs[1], runs[0]);
  EXPECT_NE(runs[2], runs[0]);
  EXPECT_NE(runs[3], runs[0]);
  EXPECT_EQ(losses[2][0], losses[0][0]);  // statistics and losses are exact
  EXPECT_NE(losses[2], losses[0]);
  EXPECT_LT(losses[0].back(), losses[0].front());  // it does learn
}

// What is kept of a head is the same however it is cut, so sparse training is as near to that on
// one rank as exact training is.
TEST(Trainer, ThreeRanksTrainWithTheSparseGradientsOfOne) {
  const Text text = small_text();
  const Options options = sparse_options();
  struct Run {
    std::vector<double> losses;
    std::vector<float> grad_input;  // of the first step
    std::vector<SparseCounts> counts;
  };
  std::vector<Run> runs;
  for (const int ranks : {1, 3}) {
    std::vector<Run> each(static_cast<size_t>(ranks));
    with_trainers(ranks, options, text, [&](Communicator& communicator, Trainer& trainer) {
      Run& run = each[static_cast<size_t>(communicator.rank())];
      for (int64_t step = 1; step <= options.steps; ++step) {
        run_steps(trainer, step);
        run.counts.push_back(cli::over_ranks(communicator, trainer.sparse_counts()));
        if (step == 1) run.grad_input = trainer.grad_input();
      }
      run.losses = trainer.losses();
    });
    for (const Run& run : each) {
      EXPECT_EQ(run.losses, each[0].losses);  // the same bits on every rank
      EXPECT_EQ(run.grad_input, each[0].grad_input);
    }
    runs.push_back(std::move(each[0]));
  }
  const Run &alone = runs[0], &three = runs[1];
  EXPECT_NEAR(alone.losses[0], three.losses[0], kFirstLossTolerance);
  for (size_t i = 0; i < alone.losses.size(); ++i) {
    EXPECT_NEAR(alone.losses[i], three.losses[i], kEarlyLossTolerance);
    EXPECT_EQ(three.counts[i].rows, options.batch);
    EXPECT_EQ(three.counts[i].elements,
              (three.counts[i].rows - three.counts[i].dense_rows) * text.V());
  }
  // Of the same model: the last bits of a merged sum decide about few elements, if any.
  EXPECT_EQ(three.counts[0].dense_rows, alone.counts[0].dense_rows);
  EXPECT_NEAR(static_cast<double>(three.counts[0].kept), static_cast<double>(alone.counts[0].kept),
              1);
  EXPECT_GT(three.counts[0].kept, 100);
  // Another seed's gradient would be half of it away (the tolerance); an element that is kept on
  // one and not on the other weighs less than that; float's last bits some 1e-6.
  double squares = 0, apart = 0;
  for (size_t i = 0; i < alone.grad_input.size(); ++i) {
    const auto mine = static_cast<double>(alone.grad_input[i]);
    squares += mine * mine;
    apart += std::pow(mine - static_cast<double>(three.grad_input[i]), 2);
  }
  const bool same = three.counts[0].kept == alone.counts[0].kept;
  EXPECT_LT(std::sqrt(apart), (same ? 1e-5 : 0.5) * std::sqrt(squares));
}

TEST(Trainer, AnotherHeadTakesThePlaceOfTheLibrarys) {
  const Text text = small_text();
  with_trainers(1, small_options(), text, [&](Communicator&, Trainer& trainer) {
    const auto before = trainer.model().head.value;
    const auto loss = trainer.step_with([&](const float* input, const float* weight,
                                            const std::vector<int64_t>& target, double normalizer,
                                            float* grad_input, float* grad_weight) {
      EXPECT_EQ(input, trainer.head_input().data());
      EXPECT_EQ(weight, trainer.model().head.value.data());
      EXPECT_EQ(&target, &trainer.target());
      EXPECT_EQ(normalizer, 60);
      std::fill_n(grad_input, trainer.grad_input().size(), 0.0f);
      std::fill_n(grad_weight, before.size(), 1.0f);
      return Result<double>(1.25);
    });
    EXPECT_EQ(*loss, 1.25);
    EXPECT_EQ(trainer.losses(), std::vector<double>{1.25});
    EXPECT_LT(trainer.model().head.value[0], before[0]);  // a step against the gradient
  });
}

TEST(FirstStep, OfASparseGradientTheLossesAreJudged) {
  with_trainers(1, sparse_options(), small_text(), [&](Communicator& ranks, Trainer& trainer) {
    run_steps(trainer, 1);
    const FirstStep first = check_first_step(ranks, test::small_cover(150, 1), trainer);
    ASSERT_EQ(first.judgements.size(), 1u);
    EXPECT_TRUE(first.judgements[0].fine());
  });
}

TEST(FirstStep, IsWithinTheContractAndAWrongGradientIsNot) {
  const Text text = small_text();
  for (const int ranks : {1, 4}) {
    with_trainers(ranks, small_options(), text, [&](Communicator& communicator, Trainer& trainer) {
      run_steps(trainer, 1);
      const auto cover = test::small_cover(text.V(), ranks);
      const FirstStep first = check_first_step(communicator, cover, trainer);
      if (communicator.rank() == 0) {
        ASSERT_EQ(first.judgements.size(), 3u);
        for (const auto& judgement : first.judgements)
          EXPECT_TRUE(judgement.fine()) << judgement.output;
        EXPECT_NEAR(first.exact_loss, trainer.losses().front(), kFirstLossTolerance);
      }
      // One element of the last rank's first row of grad_weight, off by 10 %.
      auto& gradient = trainer.model().head.gradient;
      if (communicator.rank() == ranks - 1) {
        *std::ranges::max_element(gradient.begin(), gradient.begin() + trainer.model().H, {},
                                  [](float g) { return std::abs(g); }) *= 1.1f;
      }
      const FirstStep wrong = check_first_step(communicator, cover, trainer);
      if (communicator.rank() == 0) {
        ASSERT_EQ(wrong.judgements.size(), 3u);
        EXPECT_TRUE(wrong.judgements[1].fine());
        EXPECT_FALSE(wrong.judgements[2].fine());
      }
    });
  }
}

}  // namespace
}  // namespace logitless::train_lm
