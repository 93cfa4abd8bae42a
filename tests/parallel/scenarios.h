// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/parallel/sharded.h"

// What both transports are tried on.
namespace logitless::test {

inline constexpr Strategy kStrategies[] = {Strategy::one_pass, Strategy::recompute};

struct Scenario {
  std::string name;
  ShardedStep step;
};

// Every kind of cover with every arithmetic, all-reduced and reduce-scattered, in one chunk and in
// several, into every kind of output.
std::vector<Scenario> cover_scenarios(int ranks, Strategy strategy);
// BT = 0, BT = 1, no token that counts, more ranks than vocabulary rows, V = 0, H = 0.
std::vector<Scenario> edge_scenarios(int ranks, Strategy strategy);
// Token weights, counts, ignore_index, normalizer; one gradient or none.
std::vector<Scenario> option_scenarios(int ranks, Strategy strategy);

}  // namespace logitless::test
