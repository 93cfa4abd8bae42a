// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <gtest/gtest.h>

namespace logitless::cpu {
namespace {

TEST(Isa, AmxNeedsItsInstructionsAndTheSystemsState) {
  constexpr uint32_t kBf16 = 1u << 22;
  constexpr uint32_t kTile = 1u << 24;
  constexpr uint64_t kTileConfiguration = 1u << 17;
  constexpr uint64_t kTileData = 1u << 18;
  constexpr uint64_t kState = kTileConfiguration | kTileData;
  EXPECT_TRUE(amx_bf16(kBf16 | kTile, kState));
  EXPECT_TRUE(amx_bf16(~0u, ~uint64_t{0}));
  EXPECT_FALSE(amx_bf16(kTile, kState));  // int8 alone would be bit 25
  EXPECT_FALSE(amx_bf16(kTile | 1u << 25, kState));
  EXPECT_FALSE(amx_bf16(kBf16, kState));
  EXPECT_FALSE(amx_bf16(kBf16 | kTile, kTileData));  // a system that does not save the tiles
  EXPECT_FALSE(amx_bf16(kBf16 | kTile, kTileConfiguration));
  EXPECT_FALSE(amx_bf16(0, 0));
}

TEST(Isa, TheMachineSaysWhatTheCpuSays) {
  EXPECT_EQ(machine_info().amx_present, amx_bf16_present());
}

}  // namespace
}  // namespace logitless::cpu
