// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/operators.h"

namespace logitless::cli::test {

// Errors that a kernel or a schedule could make, planted into the outputs of a correct run. Each
// changes as little as the mistake would.
enum class Mutant {
  forward_k_pair,        // one pair of products missing from a tile of 14 x 32 logits
  forward_tail_column,   // the last vocabulary row missing from every sum
  forward_token_lost,    // the last token left as the neutral element
  forward_mask_bit,      // one bit of target_mask
  forward_target_off,    // one masked_target off by one
  forward_predicted,     // the target's neighbour taken for one token
  merge_factor,          // sum_exp_logits 1 + 2^-22 times too large
  merge_ulp,             // every sum_exp_logits one ulp too large
  merge_predicted_ulp,   // every predicted_logits that was rebased, two ulps off
  loss_log,              // log off by 2^-21 relative
  logits_k_pair,         // as forward_k_pair, in the written logits
  logits_tail_column,    // the last column not written
  softmax_unnormalised,  // one row not divided by its sum
  grad_input_k_pair,     // one pair of vocabulary rows missing from a tile of 14 x 32
  grad_input_token_lost,
  grad_weight_k_pair,     // one pair of tokens missing from a tile of 32 x 16
  grad_weight_tail,       // the last row not written
  grad_weight_token,      // the last token missing
  grad_weight_truncated,  // 16-bit outputs rounded towards zero
  // Of a training step in one pass.
  step_sum_ulp,      // one token's sum_exp_logits an ulp from the separate operator's
  step_loss_ulp,     // one token's loss
  step_total_token,  // the last token missing from the total
  step_grad_input_k_pair,
  step_grad_weight_token,
  step_target_lost,  // one token's 1 not subtracted
  step_factor,       // a tile with the factors of the segment beside it
  // Of the same step, recomputing.
  recompute_grad_ulp  // one element of grad_weight one unit off
};

struct MutantInfo {
  Mutant mutant;
  const char* name;
  // Where verify must see it: beginnings of stage and output.
  const char* stage;
  const char* output;
};
inline void PrintTo(const MutantInfo& mutant, std::ostream* out) { *out << mutant.name; }
const std::vector<MutantInfo>& all_mutants();

// An observer that plants the mutant into the first outputs of its stage.
StageObserver plant(Mutant mutant, const Case& c);

}  // namespace logitless::cli::test
