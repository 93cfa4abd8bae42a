// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "examples/train_lm/options.h"
#include "examples/train_lm/picture.h"
#include "examples/train_lm/progress.h"
#include "tests/cli/scratch.h"
#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

using testing::HasSubstr;

Record good_record(int64_t ranks) {
  Record record;
  record.options = to_map(test::small_options());
  record.text = "abc";
  record.V = 150;
  record.ranks = ranks;
  record.cuts = {0, 150};
  record.isa = "scalar";
  record.threads = 1;
  record.unigram = 6.78;
  for (int i = 0; i < 120; ++i) record.losses.push_back(9.5 - 0.02 * i);
  record.held_out = {{60, 7.5}, {120, 6.3}};
  record.first_step = {{"loss", 1e-7, 1e-6, true}, {"grad_input", 1e-9, 1e-8, true}};
  record.exact_first_loss = 9.5;
  record.seconds = 1.5;
  record.tokens_per_second = 1e3;
  record.memory_bytes = 1 << 20;
  return record;
}

// What is not fine, in words.
std::vector<std::string> failing(const Record& a, const Record& b) {
  std::vector<std::string> found;
  for (const Verdict& verdict : compare(a, b)) {
    if (!verdict.fine) found.push_back(verdict.what);
  }
  return found;
}

TEST(Compare, GoodRunsAreFine) { EXPECT_TRUE(failing(good_record(4), good_record(1)).empty()); }

TEST(Compare, EveryCheckCanFail) {
  const Record one = good_record(1);
  Record four = good_record(4);
  four.losses[0] += 2e-6;
  EXPECT_THAT(failing(four, one),
              testing::ElementsAre(HasSubstr("first mean loss against float64, 4"),
                                   HasSubstr("first mean loss, 4 ranks against 1")));
  four = good_record(4);
  four.first_step[1].fine = false;
  EXPECT_THAT(failing(four, one),
              testing::ElementsAre(HasSubstr("first grad_input against float64, 4 ranks")));
  four = good_record(4);
  four.losses[99] += 3e-3;
  EXPECT_THAT(failing(four, one), testing::ElementsAre(HasSubstr("first 100 mean losses")));
  four.losses[99] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(failing(four, one), testing::ElementsAre(HasSubstr("first 100 mean losses")));
  four = good_record(4);
  four.losses[100] += 3e-3;
  EXPECT_TRUE(failing(four, one).empty());
  four = good_record(4);
  four.held_out.back().second = 6.34;
  EXPECT_THAT(failing(four, one), testing::ElementsAre(HasSubstr("held-out loss, relative")));
  four.held_out.back().second = 6.39;
  EXPECT_THAT(failing(four, one),
              testing::ElementsAre(HasSubstr("held-out loss, relative"),
                                   HasSubstr("below the unigram's 6.7800, 4 ranks")));
}

TEST(Compare, OnlyRunsOfTheSameTrainingAreCompared) {
  const auto complaint = [](const Record& a, const Record& b) {
    return test::message_of([&] { compare(a, b); });
  };
  const Record one = good_record(1);
  Record four = good_record(4);
  four.options["rate"] = "7";
  EXPECT_EQ(complaint(four, one), "the runs differ: --rate is 7 and 0.01, must be the same");
  four = good_record(4);
  four.text = "x";
  EXPECT_THAT(complaint(four, one), HasSubstr("different texts"));
  four = good_record(4);
  four.losses.pop_back();
  EXPECT_THAT(complaint(four, one), HasSubstr("119 and 120 steps"));
  four = good_record(4);
  four.first_step.clear();
  EXPECT_THAT(complaint(four, one), HasSubstr("4 ranks was resumed"));
}

TEST(Record, IsReadAsItWasWritten) {
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.json"), again = scratch.path("again.json");
  Record record = good_record(4);
  record.losses[5] = 1.0 / 3;
  write_record(path, record);
  const Record read = read_record(path);
  EXPECT_EQ(read.losses, record.losses);
  EXPECT_EQ(read.held_out, record.held_out);
  EXPECT_EQ(read.options, record.options);
  write_record(again, read);
  EXPECT_EQ(cli::test::read_file(again), cli::test::read_file(path));
}

TEST(Record, WhatIsWrongWithAFileIsNamed) {
  const cli::test::Scratch scratch;
  const std::string path = scratch.path("run.json");
  const auto complaint = [&](const std::string& text) {
    cli::test::write_file(path, text);
    return test::message_of([&] { read_record(path); });
  };
  EXPECT_THAT(complaint("{"), HasSubstr("run.json: is no record of a run: "));
  EXPECT_THAT(complaint("[1]"), HasSubstr("run.json: is no record of a run: "));
  EXPECT_THAT(complaint("{\"schema\": \"other\"}"), HasSubstr("run.json: schema is "));
  EXPECT_THAT(complaint("{\"schema\": \"logitless-train-lm-1\"}"), HasSubstr("options"));
  EXPECT_THAT(test::message_of([&] { read_record(scratch.path("none")); }),
              HasSubstr("cannot be opened"));
}

TEST(Picture, HasBothCurvesAndTheUnigram) {
  const std::string svg = draw_losses(good_record(4), good_record(1));
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  for (const char* words :
       {"4 ranks, held-out text: 6.300", "1 rank, held-out text: 6.300", "6.78"}) {
    EXPECT_THAT(svg, HasSubstr(words));
  }
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  Record short_run = good_record(1);
  short_run.losses = {9.5};
  EXPECT_EQ(draw_losses(short_run, short_run).find("nan"), std::string::npos);
}

TEST(Progress, TheBarFills) {
  EXPECT_EQ(bar_text(0, 10, 5), "[.....]");
  EXPECT_EQ(bar_text(5, 10, 5), "[##...]");
  EXPECT_EQ(bar_text(10, 10, 5), "[#####]");
  EXPECT_EQ(bar_text(11, 10, 5), "[#####]");
  EXPECT_THAT(test::message_of([] { parse_progress("loud"); }),
              HasSubstr("--progress is 'loud', must be auto, bar, lines or none"));
}

}  // namespace
}  // namespace logitless::train_lm
