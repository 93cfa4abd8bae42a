// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace logitless::cpu
