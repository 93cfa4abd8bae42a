// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/all_floats.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/kernels/definition.h"

namespace logitless {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The block of floats that begins with the `first`-th of every `step`-th one.
void fill(float* x, int64_t count, int64_t first, uint64_t step) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = std::bit_cast<float>(static_cast<uint32_t>(static_cast<uint64_t>(first + i) * step));
  }
}

double ulp_of(double exact) {
  if (exact == 0) return 0x1p-149;
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::ldexp(1.0, std::max(exponent - 24, -149));
}

double ulp_error(float x, double exact, float y) {
  if (std::isnan(x)) return std::isnan(y) ? 0 : static_cast<double>(kInf);
  if (exact > static_cast<double>(std::numeric_limits<float>::max())) {
    return y == kInf || y == std::numeric_limits<float>::max() ? 0 : static_cast<double>(kInf);
  }
  return std::fabs(static_cast<double>(y) - exact) / ulp_of(exact);
}

constexpr int64_t kBlock = 4096;

// A block of floats and what they are as each 16-bit type.
struct Rounded {
  float x[kBlock];
  float f16[kBlock], bf16[kBlock];
};

// Bits first: only blocks with NaN need a second look.
int64_t different(const float* got, const float* want) {
  if (std::memcmp(got, want, kBlock * sizeof(float)) == 0) return 0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < kBlock; ++i) wrong += definition::same(got[i], want[i]) ? 0 : 1;
  return wrong;
}

// The elements of a panel of pairs, [k][width], one float each.
void unpack_pairs(const float* panel, int64_t width, float* elements) {
  for (int64_t u = 0; u < kBlock / width / 2; ++u) {
    for (int64_t lane = 0; lane < width; ++lane) {
      const auto bits = std::bit_cast<uint32_t>(panel[u * width + lane]);
      elements[2 * u * width + lane] = std::bit_cast<float>(bits << 16);
      elements[(2 * u + 1) * width + lane] = std::bit_cast<float>(bits & 0xffff0000u);
    }
  }
}

// fp32 operands multiplied as bf16: the block as rows of a panel, and as its columns.
int64_t wrong_panels(Isa isa, const cpu::GemmKernels& g, const Rounded& block) {
  constexpr auto kSource = cpu::PackSource::f32_as_bf16;
  const int64_t width = g.nr;
  const int64_t k = kBlock / width;
  float want[kBlock];  // by columns, as they lie in x
  for (int64_t i = 0; i < kBlock; ++i) {
    want[i] = definition::is_subnormal(block.x[i])
                  ? definition::operand_element(kSource, &block.x[i], isa, g.k_unit)
                  : block.bf16[i];
  }
  alignas(64) float panel[kBlock];
  float elements[kBlock];
  const void* pointers[kBlock];
  const auto got = [&] {
    if (g.k_unit == 1) return static_cast<const float*>(panel);
    unpack_pairs(panel, width, elements);
    return static_cast<const float*>(elements);
  };
  for (int64_t r = 0; r < k; ++r) pointers[r] = block.x + r * width;
  g.pack_cols(kSource, pointers, k, static_cast<int>(width), static_cast<int>(width), panel);
  int64_t wrong = different(got(), want);

  for (int64_t r = 0; r < width; ++r) pointers[r] = block.x + r * k;
  g.pack_rows(kSource, pointers, static_cast<int>(width), static_cast<int>(width), k, panel);
  float by_rows[kBlock];
  for (int64_t at_k = 0; at_k < k; ++at_k) {
    for (int64_t lane = 0; lane < width; ++lane)
      by_rows[at_k * width + lane] = want[lane * k + at_k];
  }
  return wrong + different(got(), by_rows);
}

// All ways in which a level makes 16 bits of floats, against the storage types.
int64_t wrong_of(const cpu::Kernels& kernels, const Rounded& block) {
  int64_t wrong = 0;
  float values[kBlock];
  uint16_t stored[kBlock];
  for (const DType type : {DType::f16, DType::bf16}) {
    const float* want = type == DType::f16 ? block.f16 : block.bf16;
    kernels.store(type, block.x, kBlock, stored);
    // Widening is exact, and load is checked on every pattern by itself (pack_test.cc).
    kernels.load(type, stored, kBlock, values);
    wrong += different(values, want);
    std::memcpy(values, block.x, sizeof(values));
    kernels.round_values(values, kBlock, type);
    wrong += different(values, want);
  }
  wrong += wrong_panels(kernels.isa, *kernels.f32, block);
  if (kernels.bf16_dot != nullptr) wrong += wrong_panels(kernels.isa, *kernels.bf16_dot, block);
  return wrong;
}

}  // namespace

double exp_ulp_error(float x, float y) { return ulp_error(x, std::exp(static_cast<double>(x)), y); }

std::vector<double> worst_exp_error(const std::vector<const cpu::Kernels*>& levels, uint64_t step) {
  const auto count = static_cast<int64_t>((uint64_t{1} << 32) / step);
  std::vector<double> worst(levels.size(), 0.0);
#pragma omp parallel
  {
    std::vector<double> mine(levels.size(), 0.0);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < count; block += kBlock) {
      float x[kBlock];
      float y[kBlock];
      double exact[kBlock];
      fill(x, kBlock, block, step);
      for (int64_t i = 0; i < kBlock; ++i) exact[i] = std::exp(static_cast<double>(x[i]));
      for (size_t level = 0; level < levels.size(); ++level) {
        levels[level]->exp(x, kBlock, y);
        for (int64_t i = 0; i < kBlock; ++i) {
          // A NaN error must survive the comparison.
          const double error = ulp_error(x[i], exact[i], y[i]);
          if (!(error <= mine[level])) mine[level] = error;
        }
      }
    }
#pragma omp critical
    for (size_t level = 0; level < levels.size(); ++level) {
      if (!(mine[level] <= worst[level])) worst[level] = mine[level];
    }
  }
  return worst;
}

std::vector<int64_t> wrong_conversions(const std::vector<const cpu::Kernels*>& levels,
                                       uint64_t step) {
  std::vector<int64_t> wrong(levels.size(), 0);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < static_cast<int64_t>((uint64_t{1} << 32) / step);
       first += kBlock) {
    Rounded block;
    fill(block.x, kBlock, first, step);
    for (int64_t i = 0; i < kBlock; ++i) {
      block.f16[i] = static_cast<float>(float16(block.x[i]));
      block.bf16[i] = static_cast<float>(bfloat16(block.x[i]));
    }
    for (size_t level = 0; level < levels.size(); ++level) {
      const int64_t here = wrong_of(*levels[level], block);
#pragma omp atomic
      wrong[level] += here;
    }
  }
  return wrong;
}

}  // namespace logitless
