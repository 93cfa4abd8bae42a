// SPDX-License-Identifier: Apache-2.0
// Everything between a tile of logits and a tile of grad_logits, at its edges.
#include <cmath>
#include <limits>

#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

using cpu::GradRow;
using cpu::GradTileOptions;

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

TEST_P(SoftmaxTile, GradTileFollowsItsFormula) {
  Random random(10);
  for (const bool given : {false, true}) {
    for (const bool with_lse : {false, true}) {
      std::vector<float> tile(2 * kNr);
      for (float& x : tile) x = given ? std::fabs(random.uniform()) : 3.0f * random.uniform();
      const std::vector<float> before = tile;
      GradRow rows[2] = {};
      rows[0] = {.max = 2.5f,
                 .inv_sum = 0.25f,
                 .grad = 0.7f,
                 .grad_lse = -0.3f,
                 .f16_scale = 1,
                 .f16_unscale = 1,
                 .target = 1000 + 9,
                 .round_logits = false};
      rows[1] = rows[0];
      rows[1].target = -1;
      kernels().grad_tile(tile.data(), 2, kNr, 1000, rows,
                          GradTileOptions{.softmax_given = given,
                                          .has_grad_lse = with_lse,
                                          .round_logits_to = DType::bf16,
                                          .round_to_f16 = false});
      for (int r = 0; r < 2; ++r) {
        for (int c = 0; c < kNr; ++c) {
          const double x = before[static_cast<size_t>(r * kNr + c)];
          const double p = given ? x : std::exp(x - 2.5) * 0.25;
          const double one_hot = r == 0 && c == 9 ? 1.0 : 0.0;
          const double want = (p - one_hot) * static_cast<double>(0.7f) +
                              (with_lse ? p * static_cast<double>(-0.3f) : 0.0);
          EXPECT_NEAR(tile[static_cast<size_t>(r * kNr + c)], want, 8 * 0x1p-24 * (p + one_hot))
              << given << with_lse << " at " << r << ", " << c;
        }
      }
    }
  }
}

TEST_P(SoftmaxTile, RowsAreRoundedOnlyWhereAsked) {
  GradRow rows[2] = {};
  rows[0] = {.max = 0,
             .inv_sum = 1,
             .grad = 1,
             .grad_lse = 0,
             .f16_scale = 1,
             .f16_unscale = 1,
             .target = -1,
             .round_logits = true};
  rows[1] = rows[0];
  rows[1].round_logits = false;
  std::vector<float> tile(2 * kNr, -0.3337f);
  kernels().grad_tile(tile.data(), 2, kNr, 0, rows,
                      GradTileOptions{.softmax_given = false,
                                      .has_grad_lse = false,
                                      .round_logits_to = DType::bf16,
                                      .round_to_f16 = false});
  const double rounded = static_cast<double>(static_cast<float>(bfloat16(-0.3337f)));
  EXPECT_NEAR(tile[0], std::exp(rounded), 4 * 0x1p-24);
  EXPECT_NEAR(tile[kNr], std::exp(static_cast<double>(-0.3337f)), 4 * 0x1p-24);
}

TEST_P(SoftmaxTile, Fp16RowsAreRoundedInTheirOwnScale) {
  // grad = 2^-40: the product would be 0 in fp16; scaled to [1, 2) it keeps 11 bits.
  GradRow row{.max = 0,
              .inv_sum = 1,
              .grad = 0x1p-40f,
              .grad_lse = 0,
              .f16_scale = 0x1p40f,
              .f16_unscale = 0x1p-40f,
              .target = -1,
              .round_logits = false};
  std::vector<float> tile(kNr, 0.3f);
  kernels().grad_tile(tile.data(), 1, kNr, 0, &row,
                      GradTileOptions{.softmax_given = true,
                                      .has_grad_lse = false,
                                      .round_logits_to = DType::f16,
                                      .round_to_f16 = true});
  EXPECT_EQ(tile[0], static_cast<float>(float16(0.3f)) * 0x1p-40f);
}

LOGITLESS_PER_ISA(SoftmaxTile);

}  // namespace
}  // namespace logitless
