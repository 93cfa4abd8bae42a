// SPDX-License-Identifier: Apache-2.0
// The statistics of tiles of logits, at their edges.
#include <cmath>
#include <limits>

#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class SoftmaxTile : public KernelTest {
 protected:
  static constexpr int kNr = 32;
  static constexpr int kPanels = 8;
  static constexpr int kColumns = kNr * kPanels;

  // Statistics of one row laid out as the first of `rows` rows in each panel's tile.
  std::pair<float, float> stats(const std::vector<float>& row) {
    constexpr int kRows = 3;
    std::vector<float> tiles(static_cast<size_t>(kPanels * kRows * kNr), 7.0f);
    for (int c = 0; c < kColumns; ++c) {
      tiles[static_cast<size_t>((c / kNr * kRows + 1) * kNr + c % kNr)] =
          row[static_cast<size_t>(c)];
    }
    float max[kRows];
    float sum[kRows];
    kernels().segment_stats(tiles.data(), kRows * kNr, kPanels, kNr, kRows, max, sum);
    EXPECT_EQ(max[0], 7.0f);
    EXPECT_EQ(sum[0], static_cast<float>(kColumns));
    return {max[1], sum[1]};
  }
};

TEST_P(SoftmaxTile, SegmentStatisticsAgreeWithDouble) {
  Random random(9);
  for (const float scale : {1.0f, 30.0f}) {
    for (const float offset : {0.0f, 1e4f, -500.0f}) {
      std::vector<float> row(kColumns);
      for (float& x : row) x = offset + scale * random.uniform();
      const auto [max, sum] = stats(row);
      float exact_max = -kInf;
      for (float x : row) exact_max = std::max(exact_max, x);
      double exact = 0;
      for (float x : row)
        exact += std::exp(static_cast<double>(x) - static_cast<double>(exact_max));
      EXPECT_EQ(max, exact_max);
      // The bound of the comment at segment_stats, with the scalar level's one lane.
      EXPECT_NEAR(sum, exact, (kColumns + 4) * 0x1p-24 * exact);
    }
  }
}

TEST_P(SoftmaxTile, SegmentOfMinusInfinityIsEmpty) {
  const auto [max, sum] = stats(std::vector<float>(kColumns, -kInf));
  EXPECT_EQ(max, -kInf);
  EXPECT_EQ(sum, 0.0f);
}

TEST_P(SoftmaxTile, NanMakesBothNumbersNanWhereverItStands) {
  for (const int place : {0, 1, 17, 100, kColumns - 1}) {
    for (const float other : {0.0f, -kInf, kInf}) {
      std::vector<float> row(kColumns, other);
      row[static_cast<size_t>(place)] = std::nanf("");
      const auto [max, sum] = stats(row);
      EXPECT_TRUE(std::isnan(max)) << place << " beside " << other;
      EXPECT_TRUE(std::isnan(sum)) << place << " beside " << other;
    }
  }
}

TEST_P(SoftmaxTile, PlusInfinityKeepsItsMaximum) {
  std::vector<float> row(kColumns, 1.0f);
  row[5] = kInf;
  const auto [max, sum] = stats(row);
  EXPECT_EQ(max, kInf);
  EXPECT_TRUE(std::isnan(sum));
}

TEST_P(SoftmaxTile, MergeIsExactWithAnEmptyPartAndPropagatesNan) {
  const float nan = std::nanf("");
  const struct {
    float max_a, sum_a, max_b, sum_b, max, sum;
  } cases[] = {
      {-kInf, 0, 3, 1.7f, 3, 1.7f},     {3, 1.7f, -kInf, 0, 3, 1.7f},
      {-kInf, 0, -kInf, 0, -kInf, 0},   {2, 1, 2, 3, 2, 4},
      {200, 1, -200, 5, 200, 1},        {nan, nan, 1, 1, nan, nan},
      {1, 1, nan, nan, nan, nan},       {-kInf, 0, nan, nan, nan, nan},
      {kInf, nan, 5, 1, kInf, nan},     {kInf, nan, kInf, nan, kInf, nan},
      {-3e38f, 2, -kInf, 0, -3e38f, 2},
  };
  for (const auto& c : cases) {
    // In a full vector and alone: the same bits.
    for (const int64_t count : {int64_t{1}, int64_t{37}}) {
      std::vector<float> max(37, c.max_a), sum(37, c.sum_a), max_b(37, c.max_b), sum_b(37, c.sum_b);
      std::vector<float> low(37, 0.0f);
      kernels().merge_rows(max.data(), sum.data(), low.data(), max_b.data(), sum_b.data(), count);
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) sum[i] += low[i];
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
        EXPECT_TRUE(max[i] == c.max || (std::isnan(max[i]) && std::isnan(c.max))) << max[i];
        EXPECT_TRUE(sum[i] == c.sum || (std::isnan(sum[i]) && std::isnan(c.sum))) << sum[i];
      }
    }
  }
}

TEST_P(SoftmaxTile, PartsBelowHalfAnUlpAllCount) {
  // A confident token: 1, and then hundreds of parts of 2^-26 that a plain sum would lose.
  float max = 0.0f;
  float sum = 1.0f;
  float low = 0.0f;
  const float part_max = 0.0f;
  const float part_sum = 0x1p-26f;
  for (int i = 0; i < 512; ++i) kernels().merge_rows(&max, &sum, &low, &part_max, &part_sum, 1);
  EXPECT_EQ(sum + low, 1.0f + 512 * 0x1p-26f);
}

LOGITLESS_PER_ISA(SoftmaxTile);

}  // namespace
}  // namespace logitless
