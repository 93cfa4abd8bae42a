// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Files of text as numbered words, and the part of them that is never trained on.
namespace logitless::train_lm {

// Runs of letters, digits and '_', and every other visible character on its own: what the regular
// expression \w+|[^\w\s] finds in ASCII. Bytes beyond ASCII count as letters. The pieces point into
// `text`.
std::vector<std::string_view> tokenise(std::string_view text);

struct Text {
  std::vector<std::string> vocabulary;  // by id: the most frequent first, then by first appearance
  std::vector<int32_t> words;           // the files, one after the other, as ids
  int64_t V() const { return static_cast<int64_t>(vocabulary.size()); }
  // Of vocabulary and words: what a checkpoint is checked with.
  std::string fingerprint() const;
};

// Throws cli::Failure, which names the file.
Text read_text(const std::vector<std::string>& paths);
Text number_words(const std::vector<std::string_view>& words);

// Every twentieth block of 200 words is held out.
inline constexpr int64_t kBlockWords = 200;
inline constexpr int64_t kHeldOutEvery = 20;
constexpr bool is_held_out(int64_t position) {
  return position / kBlockWords % kHeldOutEvery == kHeldOutEvery - 1;
}

// Positions of the words to predict, in order.
struct Split {
  std::vector<int32_t> training;
  std::vector<int32_t> held_out;
};
Split split_text(const Text& text);

// The words before `position`, the nearest first, into context[0..size): ids, or V where there is
// none. Before a training word there is none in a held-out block: those are not even seen.
void context_of(const Text& text, int64_t position, int64_t size, int32_t* context);

// Mean over the held-out words of -log of how frequent each is among the training words, every word
// of the vocabulary counted once more (or an unseen one would cost infinity). Nats.
double unigram_cross_entropy(const Text& text, const Split& split);

}  // namespace logitless::train_lm
