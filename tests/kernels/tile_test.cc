// SPDX-License-Identifier: Apache-2.0
// The register tile against double, and the order of its sums.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

using cpu::GemmKernels;
using cpu::PackSource;

class Tile : public KernelTest {};

struct Aligned {
  explicit Aligned(size_t floats)
      : data(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)), &std::free) {
  }
  std::unique_ptr<float, decltype(&std::free)> data;
};

struct Product {
  const GemmKernels& g;
  int rows, k;
  std::vector<float> a, b;  // [rows][k], [nr][k], exact in bf16
  Aligned packed_a, packed_b, c;
  Product(const GemmKernels& family, int row_count, int depth, Random& random)
      : g(family),
        rows(row_count),
        k(depth),
        a(static_cast<size_t>(rows * k)),
        b(static_cast<size_t>(g.nr * k)),
        packed_a(static_cast<size_t>((k + 2) * g.mr)),
        packed_b(static_cast<size_t>((k + 2) * g.nr)),
        c(static_cast<size_t>(g.mr * g.nr)) {
    for (float& x : a) x = static_cast<float>(bfloat16(random.uniform()));
    for (float& x : b) x = static_cast<float>(bfloat16(random.uniform()));
    const PackSource source = g.k_unit == 2 ? PackSource::f32_as_bf16 : PackSource::f32;
    std::vector<const void*> pointers;
    for (int r = 0; r < rows; ++r) pointers.push_back(a.data() + r * k);
    g.pack_rows(source, pointers.data(), rows, g.mr, k, packed_a.data.get());
    pointers.clear();
    for (int r = 0; r < g.nr; ++r) pointers.push_back(b.data() + r * k);
    g.pack_rows(source, pointers.data(), g.nr, g.nr, k, packed_b.data.get());
  }
  int64_t units() const { return (k + g.k_unit - 1) / g.k_unit; }
  int tile_rows() const { return rows == 1 ? 1 : rows + (rows & 1); }
  float* out() { return c.data.get(); }
};

TEST_P(Tile, EveryRowCountAndDepthIsWithinTheErrorOfItsSum) {
  Random random(5);
  for (const GemmKernels* g : families()) {
    for (int rows = 1; rows <= g->mr; ++rows) {
      for (const int k : {0, 1, 2, 3, 7, 64, 129}) {
        for (const bool accumulate : {false, true}) {
          Product p(*g, rows, k, random);
          const float start = accumulate ? 3.0f : std::nanf("");
          for (int i = 0; i < g->mr * g->nr; ++i) p.out()[i] = start;
          g->tile(p.tile_rows(), p.packed_a.data.get(), p.packed_b.data.get(), p.units(), p.out(),
                  accumulate, {});
          for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < g->nr; ++c) {
              double exact = accumulate ? 3.0 : 0.0;
              double size = std::fabs(exact);
              for (int i = 0; i < k; ++i) {
                const double product = static_cast<double>(p.a[static_cast<size_t>(r * k + i)]) *
                                       static_cast<double>(p.b[static_cast<size_t>(c * k + i)]);
                exact += product;
                size += std::fabs(product);
              }
              // Each of k additions and products rounds once; first order.
              ASSERT_NEAR(p.out()[r * g->nr + c], exact, 2.0 * k * 0x1p-24 * size)
                  << "rows " << rows << " k " << k << " at " << r << ", " << c;
            }
          }
        }
      }
    }
  }
}

TEST_P(Tile, CuttingTheDepthChangesNoBit) {
  Random random(6);
  for (const GemmKernels* g : families()) {
    const int k = 96;
    Product p(*g, g->mr, k, random);
    const auto n = static_cast<size_t>(g->mr * g->nr);
    g->tile(g->mr, p.packed_a.data.get(), p.packed_b.data.get(), p.units(), p.out(), false, {});
    const std::vector<float> whole(p.out(), p.out() + n);
    for (const int cut : {2, 32, 94}) {
      const int64_t first = cut / g->k_unit;
      g->tile(g->mr, p.packed_a.data.get(), p.packed_b.data.get(), first, p.out(), false, {});
      g->tile(g->mr, p.packed_a.data.get() + first * g->mr, p.packed_b.data.get() + first * g->nr,
              p.units() - first, p.out(), true, {});
      ASSERT_EQ(std::memcmp(whole.data(), p.out(), n * sizeof(float)), 0) << "cut at " << cut;
    }
  }
}

TEST_P(Tile, ARowHasTheSameBitsInATileOfAnySize) {
  Random random(7);
  for (const GemmKernels* g : families()) {
    Product p(*g, g->mr, 70, random);
    const auto n = static_cast<size_t>(g->nr);
    g->tile(g->mr, p.packed_a.data.get(), p.packed_b.data.get(), p.units(), p.out(), false, {});
    const std::vector<float> first(p.out(), p.out() + n);
    for (int rows = 1; rows < g->mr; rows += rows == 1 ? 1 : 2) {
      g->tile(rows, p.packed_a.data.get(), p.packed_b.data.get(), p.units(), p.out(), false, {});
      ASSERT_EQ(std::memcmp(first.data(), p.out(), n * sizeof(float)), 0) << rows;
    }
  }
}

// One way of few tokens through weight rows as they lie in memory.
struct Streaming {
  const GemmKernels& g;
  int width;
  bool vocab_in_lanes;
  int group() const { return vocab_in_lanes ? g.nr : g.stream_rows[width / g.lanes - 1]; }
  int64_t at(int v, int token) const {
    return vocab_in_lanes ? int64_t{v / g.nr * width + token} * g.nr + v % g.nr
                          : int64_t{v} * width + token;
  }
  void run(PackSource source, const std::vector<const void*>& rows, int64_t k, const float* panel,
           float* c, bool accumulate) const {
    const auto count = static_cast<int>(rows.size());
    if (vocab_in_lanes) {
      g.stream_vocab(source, rows.data(), count, k, panel, width, c, accumulate);
    } else {
      const Aligned staged(static_cast<size_t>(g.stream_staged_bytes) / sizeof(float));
      g.stream_tokens(source, rows.data(), count, k, panel, width, c, accumulate,
                      staged.data.get());
    }
  }
};
std::vector<Streaming> streamings(const GemmKernels& g) {
  std::vector<Streaming> all;
  for (int width = 1; width <= g.few; width *= 2) all.push_back({g, width, true});
  for (int vectors = 1; vectors <= 4; ++vectors) all.push_back({g, vectors * g.lanes, false});
  return all;
}

// Rows lie 4 KiB apart now and then, and depths end inside a unit, a vector and a staged block.
TEST_P(Tile, StreamedRowsHaveTheBitsOfTheTile) {
  Random random(9);
  for (const GemmKernels* g : families()) {
    const PackSource source = g->k_unit == 2 ? PackSource::f32_as_bf16 : PackSource::f32;
    for (const int k : {0, 1, 2, 31, 64, 127, 300, 1024, 2081}) {
      for (const Streaming& form : streamings(*g)) {
        const int rows = 2 * form.group();
        const int width = form.width;
        const int64_t units = (k + g->k_unit - 1) / g->k_unit;
        std::vector<float> weight(static_cast<size_t>(rows * k));
        std::vector<float> tokens(static_cast<size_t>(width * k));
        for (float& x : weight) x = random.uniform();
        for (float& x : tokens) x = random.uniform();
        std::vector<const void*> weight_rows, token_rows;
        for (int i = 0; i < rows; ++i) weight_rows.push_back(weight.data() + i * k);
        for (int i = 0; i < width; ++i) token_rows.push_back(tokens.data() + i * k);
        const Aligned panel(static_cast<size_t>((units + 1) * width));
        const Aligned c(static_cast<size_t>(rows * width));
        const Aligned a(static_cast<size_t>((units + 1) * g->mr));
        const Aligned b(static_cast<size_t>((units + 1) * g->nr));
        const Aligned tile(static_cast<size_t>(g->mr * g->nr));
        g->pack_rows(source, token_rows.data(), width, width, k, panel.data.get());
        std::fill_n(c.data.get(), rows * width, std::nanf(""));
        form.run(source, weight_rows, k, panel.data.get(), c.data.get(), false);
        for (int token = 0; token < width; ++token) {
          g->pack_rows(source, token_rows.data() + token, 1, g->mr, k, a.data.get());
          for (int v0 = 0; v0 < rows; v0 += g->nr) {
            const int count = std::min(g->nr, rows - v0);
            g->pack_rows(source, weight_rows.data() + v0, count, g->nr, k, b.data.get());
            g->tile(1, a.data.get(), b.data.get(), units, tile.data.get(), false, {});
            for (int v = 0; v < count; ++v) {
              ASSERT_EQ(c.data.get()[form.at(v0 + v, token)], tile.data.get()[v])
                  << "k " << k << " width " << width << " token " << token << " row " << v0 + v;
            }
          }
        }
        // Cut where a unit ends, the sum goes on.
        const int64_t cut = units / 3;
        if (cut == 0) continue;
        const std::vector<float> whole(c.data.get(), c.data.get() + rows * width);
        form.run(source, weight_rows, cut * g->k_unit, panel.data.get(), c.data.get(), false);
        for (const void*& row : weight_rows) {
          row = static_cast<const float*>(row) + cut * g->k_unit;
        }
        form.run(source, weight_rows, k - cut * g->k_unit, panel.data.get() + cut * width,
                 c.data.get(), true);
        ASSERT_EQ(std::memcmp(whole.data(), c.data.get(), whole.size() * sizeof(float)), 0);
      }
    }
  }
}

TEST_P(Tile, SubnormalOperandsAreKeptByFp32AndZerosInDotProducts) {
  // 2^-130 is subnormal in bf16 and fp32; its product with 2^100 is normal.
  Random random(8);
  for (const GemmKernels* g : families()) {
    Product p(*g, 2, 2, random);
    const PackSource source = g->k_unit == 2 ? PackSource::f32_as_bf16 : PackSource::f32;
    const float a[2] = {0x1p-130f, 0.0f};
    const float b[2] = {0x1p100f, 0.0f};
    std::vector<const void*> pointers(static_cast<size_t>(g->nr), b);
    g->pack_rows(source, pointers.data(), g->nr, g->nr, 2, p.packed_b.data.get());
    pointers.assign(2, a);
    g->pack_rows(source, pointers.data(), 2, g->mr, 2, p.packed_a.data.get());
    g->tile(2, p.packed_a.data.get(), p.packed_b.data.get(), p.units(), p.out(), false, {});
    EXPECT_EQ(p.out()[0], g->k_unit == 1 ? 0x1p-30f : 0.0f);
  }
}

TEST_P(Tile, PeakCountsItsInstructions) {
  for (const GemmKernels* g : families()) {
    EXPECT_EQ(g->peak(10), 10 * g->mr * g->nr / (g->flops_per_instruction / 2 / g->k_unit));
  }
}

LOGITLESS_PER_ISA(Tile);

}  // namespace
}  // namespace logitless
