// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/cli/scratch.h"
#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Text, WordsAreRunsOfLettersAndMarksStandAlone) {
  EXPECT_THAT(tokenise("Don't  stop,\n\tno_1!!  x"),
              ElementsAre("Don", "'", "t", "stop", ",", "no_1", "!", "!", "x"));
  EXPECT_THAT(tokenise(" caf\xc3\xa9 "), ElementsAre("caf\xc3\xa9"));
  EXPECT_TRUE(tokenise("").empty());
  EXPECT_TRUE(tokenise(" \r\n\v\f\t").empty());
}

TEST(Text, FrequentWordsComeFirst) {
  const Text text = number_words(tokenise("b a c a , c a"));
  EXPECT_THAT(text.vocabulary, ElementsAre("a", "c", "b", ","));  // b before , : it came first
  EXPECT_THAT(text.words, ElementsAre(2, 0, 1, 0, 3, 1, 0));
}

TEST(Text, AnotherTextHasAnotherFingerprint) {
  const std::string print = number_words(tokenise("a b c")).fingerprint();
  EXPECT_EQ(number_words(tokenise("a  b\nc")).fingerprint(), print);
  EXPECT_NE(number_words(tokenise("a b d")).fingerprint(), print);
  EXPECT_NE(number_words(tokenise("a b c c")).fingerprint(), print);
}

TEST(Text, FilesAreReadOneAfterTheOther) {
  const cli::test::Scratch scratch;
  cli::test::write_file(scratch.path("a"), "one two");
  cli::test::write_file(scratch.path("b"), "three");
  EXPECT_THAT(read_text({scratch.path("a"), scratch.path("b")}).vocabulary,
              ElementsAre("one", "two", "three"));
  EXPECT_THAT(test::message_of([&] { read_text({scratch.path("none")}); }),
              testing::AllOf(HasSubstr(scratch.path("none")), HasSubstr("cannot be opened")));
}

TEST(Text, EveryTwentiethBlockIsHeldOut) {
  EXPECT_FALSE(is_held_out(0));
  EXPECT_FALSE(is_held_out(3799));
  EXPECT_TRUE(is_held_out(3800));
  EXPECT_TRUE(is_held_out(3999));
  EXPECT_FALSE(is_held_out(4000));
  EXPECT_TRUE(is_held_out(7800));
  const Split split = split_text(test::small_text(8001));
  EXPECT_EQ(split.held_out.size(), 400u);
  EXPECT_EQ(split.training.size(), 7601u);
}

TEST(Text, TrainingDoesNotSeeHeldOutWords) {
  const Text text = test::small_text(8000);
  const int32_t none = static_cast<int32_t>(text.V());
  const auto word = [&](int64_t at) { return text.words[static_cast<size_t>(at)]; };
  std::vector<int32_t> context(3);
  context_of(text, 1, 3, context.data());
  EXPECT_THAT(context, ElementsAre(word(0), none, none));
  context_of(text, 4001, 3, context.data());
  EXPECT_THAT(context, ElementsAre(word(4000), none, none));
  context_of(text, 3800, 3, context.data());  // a held-out word sees what was read before it
  EXPECT_THAT(context, ElementsAre(word(3799), word(3798), word(3797)));
}

TEST(Text, UnigramCrossEntropyIsItsFormula) {
  // Training: 3,800 words, of which 1,900 are a; held out: 100 a and 100 that occur nowhere else.
  std::vector<std::string_view> words;
  for (int i = 0; i < 3800; ++i) words.push_back(i % 2 == 0 ? "a" : "b");
  for (int i = 0; i < 200; ++i) words.push_back(i % 2 == 0 ? "a" : "new");
  const Text text = number_words(words);
  const double expected = -0.5 * (std::log(1901.0 / 3803.0) + std::log(1.0 / 3803.0));
  EXPECT_NEAR(unigram_cross_entropy(text, split_text(text)), expected, 1e-12);
}

TEST(Text, TheBundledTextsAreTheKnownOnes) {
  const std::string data = LOGITLESS_DATA;
  const Text text =
      read_text({data + "/alice.txt", data + "/as_you_like_it.txt", data + "/paradise_lost.txt"});
  EXPECT_EQ(text.words.size(), 161133u);
  EXPECT_EQ(text.V(), 13433);
  const Split split = split_text(text);
  EXPECT_EQ(split.held_out.size(), 8000u);
  EXPECT_NEAR(unigram_cross_entropy(text, split), 6.783508335640, 1e-9);
}

}  // namespace
}  // namespace logitless::train_lm
