// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace logitless::cpu {

// exp(r) on [-0.34758, 0.34758], relative minimax with the first two coefficients fixed at 1;
// highest power first. Relative error 2^-27.9 with these rounded coefficients.
inline constexpr float kExpCoefficients[7] = {
    0x1.6a2172p-10f, 0x1.123b8cp-7f, 0x1.5558fcp-5f, 0x1.55549p-3f, 0x1.fffffcp-2f, 1.0f, 1.0f};
// Below the least argument exp is 0 in fp32, above the most it is infinite.
inline constexpr float kExpLeast = -105.0f;
inline constexpr float kExpMost = 89.0f;
// ln 2 = kLn2Hi + kLn2Lo; kLn2Hi has 14 significant bits, so n * kLn2Hi is exact for |n| < 2^10.
inline constexpr float kLn2Hi = 0x1.62ep-1f;
inline constexpr float kLn2Lo = 0x1.0bfbe8p-15f;

// Columns of one statistics segment: the row maximum and sum are formed per segment and merged in
// ascending order. Part of the numerics: changing it changes bits.
inline constexpr int kSegmentColumns = 256;

}  // namespace logitless::cpu
