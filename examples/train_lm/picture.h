// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "examples/train_lm/record.h"

namespace logitless::train_lm {

// The losses of two runs over the steps as one SVG: `below` drawn broad and pale, `above` thin and
// dark on top of it, so that both are seen where they agree; their held-out losses, and the
// unigram's as a line.
std::string draw_losses(const Record& below, const Record& above);

}  // namespace logitless::train_lm
