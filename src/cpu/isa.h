// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "logitless/machine.h"

namespace logitless::cpu {

// Dispatch is data: every level, best first, `scalar` last.
struct Level {
  Isa isa;
  const char* name;
  const struct Kernels* (*kernels)();  // null when this build has no such level
  bool (*offered)();                   // does this CPU (and operating system) offer it
};

std::span<const Level> levels();

// The level's entry; never null.
const Level& level_of(Isa isa);

bool usable(const Level& level);

// Whether programs can multiply bf16 tiles with AMX: leaf7_edx is EDX of CPUID leaf 7 (bit 22
// AMX-BF16, bit 24 AMX-TILE), xcr0 the register state the operating system saves (bits 17 and 18,
// tile configuration and tile data). No level uses it yet; other libraries do.
constexpr bool amx_bf16(uint32_t leaf7_edx, uint64_t xcr0) {
  constexpr uint32_t kInstructions = 1u << 22 | 1u << 24;
  constexpr uint64_t kState = uint64_t{1} << 17 | uint64_t{1} << 18;
  return (leaf7_edx & kInstructions) == kInstructions && (xcr0 & kState) == kState;
}
// The same of this CPU and operating system.
bool amx_bf16_present();

}  // namespace logitless::cpu
