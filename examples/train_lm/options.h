// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace logitless::train_lm {

// What a run's numbers depend on, beside the text. Ranks, threads and the cut of the vocabulary
// are no part of it.
struct Options {
  uint64_t seed = 1;
  int64_t context = 4;     // words before the one to predict
  int64_t embedding = 32;  // numbers of each
  int64_t hidden = 256;    // H: what the head is given
  int64_t batch = 1024;    // BT: words predicted per step
  int64_t steps = 149;     // the bundled texts once
  int64_t warm_up = 20;    // steps in which the rate rises to `rate`, then it falls to 0 at `steps`
  double rate = 1.6e-2;
  double decay = 0.1;
  double dropout = 0.2;       // share of hidden values that a step leaves out
  double grad_tolerance = 0;  // of a sparse gradient of the head; 0 = exact
};

// As written into checkpoints and records; equal exactly when the options are.
std::map<std::string, std::string> to_map(const Options& options);

// Throws cli::Failure: the option, what it is, what is allowed. words: that are trained on.
void check(const Options& options, int64_t words);

// In step `step`, from 1.
double rate_of_step(const Options& options, int64_t step);

// Of what a sparse gradient keeps in step `step`: another one in every step, the same on every rank
// and in a resumed run.
uint64_t seed_of_step(const Options& options, int64_t step);

}  // namespace logitless::train_lm
