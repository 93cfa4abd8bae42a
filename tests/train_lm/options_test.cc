// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

std::string complaint(const Options& options) {
  return test::message_of([&] { check(options, 1000); });
}

TEST(Options, WhatIsWrongIsNamed) {
  Options options = test::small_options();
  EXPECT_EQ(complaint(options), "");
  options.batch = 1001;
  EXPECT_EQ(complaint(options), "--batch is 1001, must be in [1, 1000], the words to train on");
  options = test::small_options();
  options.hidden = 0;
  EXPECT_EQ(complaint(options), "--hidden is 0, must be in [1, 16384]");
  options = test::small_options();
  options.dropout = 1;
  EXPECT_EQ(complaint(options), "--dropout is 1, must be in [0, 1)");
  options.dropout = std::nan("");
  EXPECT_EQ(complaint(options), "--dropout is nan, must be in [0, 1)");
  options = test::small_options();
  for (const double fine : {0.0, 0x1p-16, 0x1p-9, 0.5}) {
    options.grad_tolerance = fine;
    EXPECT_EQ(complaint(options), "");
  }
  options.grad_tolerance = 0.75;
  EXPECT_EQ(complaint(options),
            "--grad-tolerance is 0.75, must be 0 (exact) or in [1.52587890625e-05, 0.5]");
  for (const double wrong : {-0.5, 0x1p-17, std::nan("")}) {
    options.grad_tolerance = wrong;
    EXPECT_NE(complaint(options), "") << wrong;
  }
}

TEST(Options, EveryStepHasASeedOfItsOwn) {
  Options options;
  std::set<uint64_t> seeds;
  for (const uint64_t seed : {1, 2}) {
    options.seed = seed;
    for (int64_t step = 1; step <= 100; ++step) {
      seeds.insert(seed_of_step(options, step));
      EXPECT_EQ(seed_of_step(options, step), seed_of_step(options, step));
    }
  }
  EXPECT_EQ(seeds.size(), 200u);
}

TEST(Options, TheRateRisesThenFalls) {
  Options options;
  options.steps = 100;
  options.warm_up = 10;
  options.rate = 1;
  EXPECT_DOUBLE_EQ(rate_of_step(options, 1), 0.1);
  EXPECT_DOUBLE_EQ(rate_of_step(options, 10), 0.91);
  EXPECT_DOUBLE_EQ(rate_of_step(options, 51), 0.5);
  EXPECT_DOUBLE_EQ(rate_of_step(options, 100), 0.01);
  options.warm_up = 0;
  EXPECT_DOUBLE_EQ(rate_of_step(options, 1), 1);
}

TEST(Options, EveryOneIsWrittenDown) {
  const auto before = to_map(Options());
  Options options;
  options.seed = 2;
  options.context = options.embedding = options.hidden = options.batch = 3;
  options.steps = options.warm_up = 5;
  options.rate = options.decay = options.dropout = options.grad_tolerance = 0.5;
  for (const auto& [key, value] : to_map(options)) EXPECT_NE(value, before.at(key)) << key;
  EXPECT_EQ(before.size(), 11u);
}

}  // namespace
}  // namespace logitless::train_lm
