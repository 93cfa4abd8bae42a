// SPDX-License-Identifier: Apache-2.0
// Every test of this folder runs once per level that this CPU offers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "logitless/machine.h"

namespace logitless {

class KernelTest : public testing::TestWithParam<Isa> {
 protected:
  const cpu::Kernels& kernels() const { return *cpu::kernels_of(GetParam()); }
  // The level's register tiles: fp32, and bf16 pairs where it has them.
  std::vector<const cpu::GemmKernels*> families() const {
    std::vector<const cpu::GemmKernels*> all = {kernels().f32};
    if (kernels().bf16_dot != nullptr) all.push_back(kernels().bf16_dot);
    return all;
  }
  void SetUp() override { ASSERT_EQ(kernels().isa, GetParam()); }
};

#define LOGITLESS_PER_ISA(suite)                       \
  INSTANTIATE_TEST_SUITE_P(                            \
      PerIsa, suite, testing::ValuesIn(usable_isas()), \
      [](const testing::TestParamInfo<Isa>& level) { return std::string(name_of(level.param)); })

// A small generator of our own: the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(static_cast<int32_t>(bits())) * 0x1p-31f; }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }

 private:
  uint64_t state_;
};

}  // namespace logitless
