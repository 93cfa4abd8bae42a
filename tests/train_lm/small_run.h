// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "examples/train_lm/trainer.h"
#include "logitless/parallel/communicator.h"

// A training that takes milliseconds.
namespace logitless::train_lm::test {

Options small_options();

// So many words, some frequent and some rare, in which the next one can be guessed.
Text small_text(int64_t words = 5000, int64_t V = 150);

// On `ranks` ranks, cut unevenly, one of them empty where there are more than two.
std::vector<RowRange> small_cover(int64_t V, int ranks);

// A trainer on each of so many ranks, which are threads; one for ranks = 1.
void with_trainers(int ranks, const Options& options, const Text& text,
                   const std::function<void(Communicator& ranks, Trainer& trainer)>& body);

// Bits of all that a checkpoint has, of this rank.
std::vector<uint32_t> bits_of(Trainer& trainer);

// The message of the cli::Failure that `work` throws; "" where it throws none.
std::string message_of(const std::function<void()>& work);

}  // namespace logitless::train_lm::test
