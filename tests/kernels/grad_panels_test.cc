// SPDX-License-Identifier: Apache-2.0
// grad_logits from each of its sources into both panels, against the formula in double.
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

using cpu::GemmKernels;
using cpu::GradRow;
using cpu::GradSource;
using cpu::GradTile;
using cpu::GradTileOptions;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Source {
  GradSource source;
  DType type;
};
constexpr Source kSources[] = {
    {GradSource::logits, DType::f32},  {GradSource::softmax, DType::f32},
    {GradSource::softmax, DType::f16}, {GradSource::softmax, DType::bf16},
    {GradSource::held, DType::f32},    {GradSource::held, DType::bf16},
};

class GradPanels : public KernelTest {
 protected:
  static constexpr int kMost = 32;

  // A tile of `count` rows whose columns from `columns` on are NaN: they must not count.
  void make(const GemmKernels& g, const Source& source, int count, int columns, Random& random) {
    nr_ = g.nr;
    values_.assign(static_cast<size_t>(count * g.nr), kNan);
    for (int r = 0; r < count; ++r) {
      for (int c = 0; c < columns; ++c) {
        float x = source.source == GradSource::logits ? 3.0f * random.uniform()
                                                      : std::fabs(random.uniform());
        kernels().store(source.type, &x, 1, &x);
        kernels().load(source.type, &x, 1, &x);
        values_[static_cast<size_t>(r * g.nr + c)] = x;
      }
    }
    stored_.assign(values_.size() * 4 + 64, 0);
    kernels().store(source.type, values_.data(), static_cast<int64_t>(values_.size()),
                    stored_.data());
    rows_.assign(static_cast<size_t>(count), GradRow{});
    pointers_.clear();
    factors_.clear();
    for (int r = 0; r < count; ++r) {
      GradRow& row = rows_[static_cast<size_t>(r)];
      row.max = 2.5f;
      row.inv_sum = 0.25f;
      row.grad = 0.7f + 0.1f * static_cast<float>(r);
      row.grad_lse = -0.3f;
      row.f16_scale = row.f16_unscale = 1;
      row.target = r % 3 == 0 ? kV0 + (7 * r) % columns : r % 3 == 1 ? -1 : kV0 + columns;
      row.target_p = 0.125f;
      row.round_logits = r % 2 == 1;
      factors_.push_back(0.5f + 0.01f * static_cast<float>(r));
      pointers_.push_back(stored_.data() + static_cast<size_t>(r * g.nr) *
                                               static_cast<size_t>(size_of(source.type)));
    }
    tile_ = GradTile{.source = source.source,
                     .type = source.type,
                     .rows = pointers_.data(),
                     .factors = factors_.data(),
                     .count = count,
                     .columns = columns,
                     .v0 = kV0};
  }

  // The gradient of one element in double, and the size that its rounding is relative to.
  std::pair<double, double> exact(int r, int c, const GradTileOptions& options) const {
    if (r >= tile_.count || c >= tile_.columns) return {0.0, 0.0};
    const GradRow& row = rows_[static_cast<size_t>(r)];
    const auto grad = static_cast<double>(row.grad);
    const bool here = row.target == kV0 + c;
    double x = values_[static_cast<size_t>(r * nr_ + c)];
    if (tile_.source == GradSource::held) {
      const double p = here ? static_cast<double>(row.target_p)
                            : x * static_cast<double>(factors_[static_cast<size_t>(r)]);
      return {(p - (here ? 1.0 : 0.0)) * grad, std::fabs(p * grad) + (here ? grad : 0.0)};
    }
    if (tile_.source == GradSource::logits) {
      if (row.round_logits)
        x = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(x))));
      x = std::exp(x - 2.5) * 0.25;
    }
    const double lse = options.has_grad_lse ? static_cast<double>(row.grad_lse) : 0.0;
    return {(x - (here ? 1.0 : 0.0)) * grad + x * lse,
            x * (grad + std::fabs(lse)) + (here ? grad : 0.0)};
  }

  // Element (r, c) as the panels hold it.
  static float unit(const GemmKernels& g, const float* units, int64_t index, int half) {
    if (g.k_unit == 1) return units[index];
    uint16_t pair[2];
    std::memcpy(pair, units + index, sizeof(pair));
    const uint32_t bits = uint32_t{pair[half]} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static float in_a(const GemmKernels& g, const float* a, int r, int c) {
    return unit(g, a, int64_t{c} / g.k_unit * g.mr + r, c % g.k_unit);
  }
  static float in_b(const GemmKernels& g, const float* b, int r, int c) {
    return unit(g, b, int64_t{r} / g.k_unit * g.nr + c, r % g.k_unit);
  }

  static constexpr int64_t kV0 = 1000;
  int nr_ = 0;
  std::vector<float> values_, factors_;
  std::vector<unsigned char> stored_;
  std::vector<GradRow> rows_;
  std::vector<const void*> pointers_;
  GradTile tile_{};
};

TEST_P(GradPanels, EverySourceFollowsItsFormulaInBothForms) {
  Random random(10);
  for (const GemmKernels* g : families()) {
    for (const Source& source : kSources) {
      for (int count = 1; count <= g->mr; ++count) {
        for (const int columns : {g->nr, g->nr - 1, 1}) {
          for (const bool with_lse : {false, true}) {
            if (with_lse && source.source == GradSource::held) continue;  // not offered there
            make(*g, source, count, columns, random);
            const GradTileOptions options{
                .has_grad_lse = with_lse, .round_logits_to = DType::bf16, .round_to = DType::f32};
            alignas(64) float a[kMost * kMost];
            alignas(64) float b[kMost * kMost];
            std::fill(std::begin(a), std::end(a), kNan);
            std::fill(std::begin(b), std::end(b), kNan);
            g->grad_panels(tile_, rows_.data(), options, a, b);
            const double rounding = g->k_unit == 2 ? 0x1p-8 : 0.0;
            for (int r = 0; r < g->mr; ++r) {
              for (int c = 0; c < columns + (columns & (g->k_unit - 1)); ++c) {
                const auto [want, size] = exact(r, c, options);
                const double bound = 8 * 0x1p-24 * size + rounding * std::fabs(want);
                ASSERT_NEAR(in_a(*g, a, r, c), want, bound)
                    << "A, source " << static_cast<int>(source.source) << " count " << count
                    << " columns " << columns << " at " << r << ", " << c;
              }
            }
            for (int r = 0; r < count + (count & (g->k_unit - 1)); ++r) {
              for (int c = 0; c < g->nr; ++c) {
                if (c < columns) {
                  ASSERT_EQ(in_b(*g, b, r, c), in_a(*g, a, r, c)) << "B at " << r << ", " << c;
                } else {
                  ASSERT_EQ(in_b(*g, b, r, c), 0.0f) << "B beyond the vocabulary";
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(GradPanels, EitherFormMayBeLeftOut) {
  Random random(11);
  for (const GemmKernels* g : families()) {
    make(*g, kSources[0], g->mr, g->nr, random);
    const GradTileOptions options{
        .has_grad_lse = false, .round_logits_to = DType::bf16, .round_to = DType::f32};
    alignas(64) float both[2][kMost * kMost] = {};
    alignas(64) float one[2][kMost * kMost] = {};
    g->grad_panels(tile_, rows_.data(), options, both[0], both[1]);
    g->grad_panels(tile_, rows_.data(), options, one[0], nullptr);
    g->grad_panels(tile_, rows_.data(), options, nullptr, one[1]);
    EXPECT_EQ(std::memcmp(both, one, sizeof(both)), 0);
  }
}

TEST_P(GradPanels, HeldRowsWithoutGradientAreZeroWhateverTheyHold) {
  Random random(12);
  for (const GemmKernels* g : families()) {
    make(*g, {GradSource::held, DType::f32}, 2, g->nr, random);
    std::vector<float> poison(static_cast<size_t>(2 * g->nr), kNan);
    pointers_ = {poison.data(), poison.data() + g->nr};
    rows_[0].grad = rows_[1].grad = 0.0f;
    rows_[0].target = kV0;
    const GradTileOptions options{
        .has_grad_lse = false, .round_logits_to = DType::f32, .round_to = DType::f32};
    alignas(64) float a[kMost * kMost];
    alignas(64) float b[kMost * kMost];
    g->grad_panels(tile_, rows_.data(), options, a, b);
    for (int c = 0; c < g->nr; ++c) {
      EXPECT_EQ(in_a(*g, a, 0, c), 0.0f);
      EXPECT_EQ(in_b(*g, b, 1, c), 0.0f);
    }
  }
}

TEST_P(GradPanels, Fp16RowsAreRoundedInTheirOwnScale) {
  // grad = 2^-40: the product would be 0 in fp16; scaled to [1, 2) it keeps 11 bits.
  GradRow row{.max = 0,
              .inv_sum = 1,
              .grad = 0x1p-40f,
              .grad_lse = 0,
              .f16_scale = 0x1p40f,
              .f16_unscale = 0x1p-40f,
              .target = -1,
              .round_logits = false};
  const GemmKernels* g = kernels().f32;
  const std::vector<float> values(static_cast<size_t>(g->nr), 0.3f);
  const void* pointer = values.data();
  alignas(64) float a[kMost * kMost];
  g->grad_panels({.source = GradSource::softmax,
                  .type = DType::f32,
                  .rows = &pointer,
                  .count = 1,
                  .columns = g->nr,
                  .v0 = 0},
                 &row,
                 {.has_grad_lse = false, .round_logits_to = DType::f16, .round_to = DType::f16}, a,
                 nullptr);
  EXPECT_EQ(a[0], static_cast<float>(float16(0.3f)) * 0x1p-40f);
}

// Products without an instruction for bf16 take the same grad_logits as those with one.
TEST_P(GradPanels, Bf16IsRoundedOnceWhateverTheUnitsHold) {
  Random random(13);
  const GemmKernels* g = kernels().f32;
  for (const Source& source : kSources) {
    for (const int columns : {g->nr, g->nr - 1}) {
      make(*g, source, g->mr, columns, random);
      GradTileOptions options{
          .has_grad_lse = false, .round_logits_to = DType::bf16, .round_to = DType::f32};
      alignas(64) float unrounded[kMost * kMost];
      alignas(64) float a[kMost * kMost];
      alignas(64) float b[kMost * kMost];
      g->grad_panels(tile_, rows_.data(), options, unrounded, nullptr);
      options.round_to = DType::bf16;
      g->grad_panels(tile_, rows_.data(), options, a, b);
      int changed = 0;
      for (int r = 0; r < g->mr; ++r) {
        for (int c = 0; c < columns; ++c) {
          const float before = in_a(*g, unrounded, r, c);
          const auto want = static_cast<float>(bfloat16(before));
          changed += want != before;
          ASSERT_EQ(in_a(*g, a, r, c), want) << "source " << static_cast<int>(source.source);
          ASSERT_EQ(in_b(*g, b, r, c), want) << "source " << static_cast<int>(source.source);
        }
      }
      EXPECT_GT(changed, 0);
    }
  }
}

LOGITLESS_PER_ISA(GradPanels);

}  // namespace
}  // namespace logitless
