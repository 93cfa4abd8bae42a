// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/failure.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

std::vector<int64_t> begins(const std::vector<RowRange>& cover) {
  std::vector<int64_t> list;
  for (const RowRange& rows : cover) list.push_back(rows.begin);
  list.push_back(cover.back().end);
  return list;
}

TEST(Ranks, SplitsByNameAndByNumbers) {
  EXPECT_EQ(begins(*parse_split("balanced", 10, 3)), (std::vector<int64_t>{0, 4, 7, 10}));
  EXPECT_EQ(begins(*parse_split("padded", 300, 2)), (std::vector<int64_t>{0, 256, 300}));
  EXPECT_EQ(begins(*parse_split("0,100,100,32000", 32000, 3)),
            (std::vector<int64_t>{0, 100, 100, 32000}));
  EXPECT_EQ(begins(*parse_split("0,7", 7, 1)), (std::vector<int64_t>{0, 7}));
}

TEST(Ranks, ASplitThatDoesNotFitIsRefused) {
  const auto message = [](const std::string& text, int64_t V, int ranks) {
    const auto split = parse_split(text, V, ranks);
    return split ? "" : split.error().message;
  };
  for (const char* text : {"", "even", "0,", "0,5x,10", "0;5;10", "0,,10"}) {
    EXPECT_EQ(message(text, 10, 2),
              "--split is '" + std::string(text) +
                  "', must be balanced, padded, or row numbers as in 0,100,100,32000");
  }
  EXPECT_EQ(message("0,10", 10, 2),
            "--split is '0,10', has 2 numbers, 2 ranks need 3: where each one's rows begin, and "
            "where the last one's end");
  for (const char* text : {"1,5,10", "0,5,9", "0,11,10"}) {
    EXPECT_EQ(message(text, 10, 2),
              "--split is '" + std::string(text) + "', must rise from 0 to V = 10");
  }
}

TEST(Ranks, AProcessByItselfIsOneRank) {
  ASSERT_FALSE(started_as_rank());
  EXPECT_EQ(threads_of_rank(), 0);
  Communicator& alone = open_ranks();
  EXPECT_EQ(alone.size(), 1);
  EXPECT_NO_THROW(on_every_rank(alone, [] {}));
  const SparseCounts counts = {.rows = 5, .dense_rows = 2, .kept = 7, .elements = 30};
  const SparseCounts same = over_ranks(alone, counts);
  EXPECT_EQ(same.rows, 5);
  EXPECT_EQ(same.dense_rows, 2);
  EXPECT_EQ(same.kept, 7);
  EXPECT_EQ(same.elements, 30);
  try {
    on_every_rank(alone, [] { fail("no such file"); });
    ADD_FAILURE() << "must throw";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.message, "no such file");
    EXPECT_EQ(failure.exit_code, kExitBadInput);
  }
  try {
    on_every_rank(alone, [] { throw std::bad_alloc(); });
    ADD_FAILURE() << "must throw";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.message, "there is not enough memory for this case");
  }
}

TEST(Ranks, ACaseIsReadInPart) {
  const test::Scratch scratch;
  const Case whole = test::synthetic({.tokens = 5, .vocab = 40, .hidden = 8});
  const std::string path = scratch.path("case.safetensors");
  test::write_case(whole, path);
  CaseOptions options;
  options.weight_rows = [](int64_t rows) -> Result<RowRange> {
    EXPECT_EQ(rows, 40);
    return RowRange{12, 19};
  };
  const Result<Case> read = load_case({path}, options);
  ASSERT_TRUE(read);
  const Case& part = *read;
  EXPECT_EQ(part.file_rows, 40);
  EXPECT_EQ(part.shape().V, 7);
  EXPECT_EQ(part.vocab_start_index, whole.vocab_start_index + 12);
  for (int64_t i = 0; i < 7 * 8; ++i) {
    ASSERT_EQ(part.weight.float_at(i), whole.weight.float_at(12 * 8 + i)) << i;
  }
  options.weight_rows = [](int64_t) -> Result<RowRange> {
    return Error{ErrorKind::invalid_argument, "no such split"};
  };
  const auto refused = load_case({path}, options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "no such split");
}

}  // namespace
}  // namespace logitless::cli
