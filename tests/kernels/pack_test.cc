// SPDX-License-Identifier: Apache-2.0
// Packing against its definition (the picture in kernels.h), conversions against the storage types.
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "tests/kernels/all_floats.h"
#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

using cpu::GemmKernels;
using cpu::PackSource;

class Pack : public KernelTest {};

constexpr float kSentinel = -12345.0f;

int element_bytes(PackSource source) {
  return source == PackSource::f16 || source == PackSource::bf16 ? 2 : 4;
}

// A matrix whose values include everything packing may meet, as bytes of the source type.
struct Matrix {
  int rows, cols;
  PackSource source;
  std::vector<unsigned char> bytes;
  Matrix(int row_count, int col_count, PackSource from, Random& random)
      : rows(row_count), cols(col_count), source(from) {
    // Exactly as large as it must be: reading on is a fault under AddressSanitizer.
    bytes.resize(static_cast<size_t>(rows) * static_cast<size_t>(cols) *
                 static_cast<size_t>(element_bytes(from)));
    for (int i = 0; i < rows * cols; ++i) {
      float x = random.uniform();
      if (random.below(50) == 0) x = std::numeric_limits<float>::infinity();
      if (random.below(50) == 0) x = 0.0f;
      set(i, x);
    }
  }
  void set(int i, float x) {
    unsigned char* p =
        bytes.data() + static_cast<size_t>(i) * static_cast<size_t>(element_bytes(source));
    if (source == PackSource::f16) {
      const float16 v(x);
      std::memcpy(p, &v, 2);
    } else if (source == PackSource::bf16) {
      const bfloat16 v(x);
      std::memcpy(p, &v, 2);
    } else {
      std::memcpy(p, &x, 4);
    }
  }
  const void* row(int r, int c = 0) const {
    return bytes.data() +
           static_cast<size_t>(r * cols + c) * static_cast<size_t>(element_bytes(source));
  }
  float at(int r, int c) const {
    const void* p = row(r, c);
    if (source == PackSource::f16) return static_cast<float>(*static_cast<const float16*>(p));
    if (source == PackSource::bf16) return static_cast<float>(*static_cast<const bfloat16*>(p));
    const float x = *static_cast<const float*>(p);
    return source == PackSource::f32_as_bf16 ? static_cast<float>(bfloat16(x)) : x;
  }
};

// The value of k element `k`, lane `lane` of a panel.
float packed_at(const GemmKernels& g, const std::vector<float>& panel, int width, int k, int lane) {
  const float unit = panel[static_cast<size_t>(k / g.k_unit * width + lane)];
  if (g.k_unit == 1) return unit;
  const auto bits = std::bit_cast<uint32_t>(unit);
  return std::bit_cast<float>(k % 2 == 0 ? bits << 16 : bits & 0xffff0000u);
}

void check_panel(const GemmKernels& g, const std::vector<float>& panel, int width, int k, int count,
                 const std::function<float(int, int)>& expected) {
  const int units = (k + g.k_unit - 1) / g.k_unit;
  for (int i = 0; i < units * g.k_unit; ++i) {
    for (int lane = 0; lane < width; ++lane) {
      const float want = i < k && lane < count ? expected(i, lane) : 0.0f;
      ASSERT_EQ(packed_at(g, panel, width, i, lane), want) << "k " << i << " lane " << lane;
    }
  }
  ASSERT_EQ(panel[static_cast<size_t>(units * width)], kSentinel) << "wrote beyond the panel";
}

std::vector<PackSource> sources(const GemmKernels& g) {
  if (g.k_unit == 2) return {PackSource::bf16, PackSource::f32_as_bf16};
  return {PackSource::f32, PackSource::f16, PackSource::bf16, PackSource::f32_as_bf16};
}

TEST_P(Pack, RowsAndColumnsLandWhereThePictureSays) {
  Random random(3);
  for (const GemmKernels* g : families()) {
    for (const PackSource source : sources(*g)) {
      for (const int width : {g->mr, g->nr}) {
        for (const int k : {1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65}) {
          const int count = 1 + random.below(width);
          SCOPED_TRACE(testing::Message() << "width " << width << " k " << k << " count " << count
                                          << " source " << static_cast<int>(source));
          const auto units = static_cast<size_t>((k + g->k_unit - 1) / g->k_unit);
          std::vector<float> panel(units * static_cast<size_t>(width) + 1, kSentinel);
          const Matrix by_rows(count, k, source, random);
          std::vector<const void*> rows;
          for (int r = 0; r < count; ++r) rows.push_back(by_rows.row(r));
          g->pack_rows(source, rows.data(), count, width, k, panel.data());
          check_panel(*g, panel, width, k, count,
                      [&](int i, int lane) { return by_rows.at(lane, i); });
          if (HasFatalFailure()) return;

          std::fill(panel.begin(), panel.end(), kSentinel);
          const Matrix by_cols(k, count, source, random);
          rows.clear();
          for (int r = 0; r < k; ++r) rows.push_back(by_cols.row(r));
          g->pack_cols(source, rows.data(), k, count, width, panel.data());
          check_panel(*g, panel, width, k, count,
                      [&](int i, int lane) { return by_cols.at(i, lane); });
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(Pack, TransposeMovesEveryElement) {
  Random random(4);
  for (const GemmKernels* g : families()) {
    const int wide = (g->mr + 15) / 16 * 16;
    for (int rows = 1; rows <= g->mr; ++rows) {
      std::vector<float> tile(static_cast<size_t>(g->mr * g->nr));
      for (float& x : tile) x = random.uniform();
      std::vector<float> out(static_cast<size_t>(g->nr * wide), kSentinel);
      kernels().transpose(tile.data(), rows, g->nr, out.data(), wide);
      for (int c = 0; c < g->nr; ++c) {
        for (int r = 0; r < wide; ++r) {
          const float want = r < rows ? tile[static_cast<size_t>(r * g->nr + c)] : kSentinel;
          ASSERT_EQ(out[static_cast<size_t>(c * wide + r)], want) << rows << " " << r << " " << c;
        }
      }
    }
  }
}

TEST_P(Pack, LoadWidensEvery16BitPattern) {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> out(bits.size());
  kernels().load(DType::f16, bits.data(), static_cast<int64_t>(bits.size()), out.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float want = static_cast<float>(std::bit_cast<float16>(bits[i]));
    ASSERT_TRUE(out[i] == want || (std::isnan(out[i]) && std::isnan(want))) << i;
  }
  kernels().load(DType::bf16, bits.data(), static_cast<int64_t>(bits.size()), out.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float want = static_cast<float>(std::bit_cast<bfloat16>(bits[i]));
    ASSERT_TRUE(out[i] == want || (std::isnan(out[i]) && std::isnan(want))) << i;
  }
}

TEST_P(Pack, StoreRoundsSampledFloatsToNearestEven) {
  EXPECT_EQ(wrong_conversions({&kernels()}, 2039)[0], 0);
}

TEST_P(Pack, CopiedRowsReachEveryByteAndNoOther) {
  std::vector<unsigned char> from(4096);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + 1);
  for (const int64_t bytes : {0, 2, 28, 62, 64, 66, 128, 190, 896}) {
    for (int64_t offset = 0; offset < 64; offset += 2) {
      constexpr int64_t kRows = 3;
      const int64_t stride = bytes + 34;  // every row has an alignment of its own
      std::vector<unsigned char> to(static_cast<size_t>(64 + offset + kRows * stride + 64), 0xee);
      const auto address = reinterpret_cast<uintptr_t>(to.data());
      const int64_t begin = static_cast<int64_t>((64 - address % 64) % 64) + offset;
      kernels().copy_past_caches(from.data(), 1000, kRows, bytes, to.data() + begin, stride);
      for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) {
        const int64_t row = i < begin ? -1 : (i - begin) / stride;
        const int64_t column = i < begin ? 0 : (i - begin) % stride;
        const bool inside = row >= 0 && row < kRows && column < bytes;
        const unsigned char want = inside ? from[static_cast<size_t>(row * 1000 + column)] : 0xee;
        ASSERT_EQ(to[static_cast<size_t>(i)], want) << bytes << " bytes at " << offset << ", " << i;
      }
    }
  }
}

LOGITLESS_PER_ISA(Pack);

}  // namespace
}  // namespace logitless
