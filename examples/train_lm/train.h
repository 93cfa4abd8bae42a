// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/train_lm/options.h"

namespace logitless::train_lm {

struct TrainArguments {
  Options options;
  std::vector<std::string> texts;
  std::string split = "balanced";  // of the vocabulary, as `logitless gradient --split` has it
  int64_t stop_after = 0;          // steps; 0 = options.steps
  int64_t held_out_every = 50;     // steps
  std::string checkpoint = "train_lm.safetensors";
  int64_t save_every = 0;  // steps; 0 = at the end and when interrupted
  std::string resume;      // a checkpoint to go on from
  std::string record;      // where the run is written down; empty = nowhere
  std::string progress = "auto";
  bool check = true;  // the first step against float64
};

// On every rank of the job. The exit code: cli::kExit*.
int train(const TrainArguments& arguments);

}  // namespace logitless::train_lm
