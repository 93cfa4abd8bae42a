// SPDX-License-Identifier: Apache-2.0
#include "tests/train_lm/small_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <string_view>

#include "cli/failure.h"
#include "tests/parallel/thread_ranks.h"

namespace logitless::train_lm::test {

Options small_options() {
  Options options;
  options.context = 2;
  options.embedding = 12;
  options.hidden = 40;
  options.batch = 60;
  options.steps = 8;
  options.warm_up = 2;
  options.rate = 1e-2;
  return options;
}

Text small_text(int64_t words, int64_t V) {
  std::vector<std::string> names;
  for (int64_t v = 0; v < V; ++v) names.push_back(fmt::format("w{}", v));
  std::vector<std::string_view> text;
  int64_t word = 0;
  const RandomNumbers random(11, Purpose::order);
  for (int64_t i = 0; i < words; ++i) {
    // Follows from the one before it, half of the time.
    const float share = random.uniform(2 * i + 1);
    word = random.uniform(2 * i) < 0.5f
               ? (word * 7 + 3) % V
               : static_cast<int64_t>(share * share * static_cast<float>(V));
    text.push_back(names[static_cast<size_t>(word)]);
  }
  return number_words(text);
}

std::vector<RowRange> small_cover(int64_t V, int ranks) {
  std::vector<int64_t> cuts = {0};
  for (int r = 1; r < ranks; ++r)
    cuts.push_back(r == 2 ? cuts.back() : V * r * r / (ranks * ranks));
  cuts.push_back(V);
  std::vector<RowRange> cover;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) cover.push_back({cuts[r], cuts[r + 1]});
  return cover;
}

void with_trainers(int ranks, const Options& options, const Text& text,
                   const std::function<void(Communicator& ranks, Trainer& trainer)>& body) {
  const std::vector<RowRange> cover = small_cover(text.V(), ranks);
  const auto on_rank = [&](Communicator& communicator) {
    try {
      const auto trainer = make_trainer(communicator, options, text,
                                        cover[static_cast<size_t>(communicator.rank())], 1);
      body(communicator, *trainer);
    } catch (const cli::Failure& failure) {
      ADD_FAILURE() << "rank " << communicator.rank() << ": " << failure.message;
    }
  };
  if (ranks == 1) {
    const auto alone = self_communicator();
    on_rank(*alone);
  } else {
    logitless::test::run_ranks(ranks, on_rank);
  }
}

std::vector<uint32_t> bits_of(Trainer& trainer) {
  std::vector<uint32_t> bits;
  for (const Parameter* parameter : trainer.model().parameters()) {
    for (const auto* values : {&parameter->value, &parameter->mean, &parameter->square}) {
      for (const float value : *values) bits.push_back(std::bit_cast<uint32_t>(value));
    }
  }
  for (const double loss : trainer.losses()) {
    const auto both = std::bit_cast<uint64_t>(loss);
    bits.push_back(static_cast<uint32_t>(both));
    bits.push_back(static_cast<uint32_t>(both >> 32));
  }
  return bits;
}

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const cli::Failure& failure) {
    return failure.message;
  }
  return "";
}

}  // namespace logitless::train_lm::test
