// SPDX-License-Identifier: Apache-2.0
#include "logitless/parallel/shards.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace logitless::test {
namespace {

TEST(Shards, BalancedOnesCoverTheVocabularyInSizesWithinOneOfEachOther) {
  for (const int64_t V : {0, 1, 2, 7, 127, 128, 129, 507, 151936}) {
    for (const int ranks : {1, 2, 3, 5, 7, 8, 64}) {
      int64_t reached = 0;
      int64_t least = V, most = 0;
      for (int r = 0; r < ranks; ++r) {
        const RowRange shard = *balanced_shard(V, ranks, r);
        EXPECT_EQ(shard.begin, reached);
        reached = shard.end;
        least = std::min(least, shard.size());
        most = std::max(most, shard.size());
      }
      EXPECT_EQ(reached, V);
      EXPECT_LE(most - least, 1);
    }
  }
}

TEST(Shards, PaddedOnesAreMegatrons) {
  // Llama 3 over 8: a multiple of 128 * 8 already. GPT-2 over 8: padded to 51,200, 6,400 each.
  EXPECT_EQ(padded_shard(128256, 8, 7)->begin, 7 * 16128);
  EXPECT_EQ(padded_shard(128256, 8, 7)->end, 128256);
  EXPECT_EQ(padded_shard(50257, 8, 0)->size(), 6400);
  EXPECT_EQ(padded_shard(50257, 8, 7)->begin, 44800);
  EXPECT_EQ(padded_shard(50257, 8, 7)->end, 50257);
  EXPECT_EQ(padded_shard(50257, 8, 7, 1)->begin, 7 * 6283);
  for (const int64_t V : {0, 1, 127, 128, 129, 507, 1000}) {
    for (const int ranks : {1, 2, 3, 8}) {
      int64_t reached = 0;
      for (int r = 0; r < ranks; ++r) {
        const RowRange shard = *padded_shard(V, ranks, r);
        EXPECT_EQ(shard.begin, reached);
        reached = shard.end;
        EXPECT_EQ(padded_shard(V, ranks, 0)->size() >= shard.size(), true);
      }
      EXPECT_EQ(reached, V);
    }
  }
}

TEST(Shards, ErrorsNameTheArgumentAndTheRule) {
  const auto message = [](const Result<RowRange>& r) { return r ? "" : r.error().message; };
  EXPECT_EQ(message(balanced_shard(-1, 2, 0)), "V is -1, must be between 0 and 2^48");
  EXPECT_EQ(message(balanced_shard(10, 0, 0)), "ranks is 0, must be at least 1");
  EXPECT_EQ(message(balanced_shard(10, 2, 2)), "rank is 2, must be in [0, ranks) = [0, 2)");
  EXPECT_EQ(message(padded_shard(10, 2, -1)), "rank is -1, must be in [0, ranks) = [0, 2)");
  EXPECT_EQ(message(padded_shard(10, 2, 0, 0)),
            "multiple is 0, must be between 1 and 2^48 / ranks");
}

}  // namespace
}  // namespace logitless::test
