// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cli/judge.h"
#include "examples/train_lm/trainer.h"
#include "logitless/parallel/communicator.h"

namespace logitless::train_lm {

struct FirstStep {
  double exact_loss = 0;  // the mean loss, in float64
  // Loss of every token; rows of grad_input and grad_weight, but those of a sparse gradient.
  cli::Judgements judgements;
};

// What the first step's loss and gradients are allowed to be, computed in float64 over the whole
// vocabulary (docs/numerics.md is the contract). Call it when one step is done; collective, and the
// result is rank 0's.
FirstStep check_first_step(Communicator& ranks, const std::vector<RowRange>& cover,
                           Trainer& trainer);

}  // namespace logitless::train_lm
