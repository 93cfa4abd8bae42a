// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "cli/failure.h"
#include "cli/files.h"
#include "cli/units.h"
#include "examples/train_lm/fingerprint.h"

namespace logitless::train_lm {
namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

}  // namespace

std::vector<std::string_view> tokenise(std::string_view text) {
  std::vector<std::string_view> words;
  size_t i = 0;
  while (i < text.size()) {
    const size_t begin = i;
    while (i < text.size() && is_letter(text[i])) ++i;
    if (i == begin && !is_space(text[i])) ++i;  // a mark
    if (i > begin) {
      words.push_back(text.substr(begin, i - begin));
    } else {
      ++i;  // a space
    }
  }
  return words;
}

Text number_words(const std::vector<std::string_view>& words) {
  struct Entry {
    std::string_view word;
    int64_t count = 0;
    int32_t id = 0;
  };
  std::vector<Entry> entries;  // in order of first appearance
  std::unordered_map<std::string_view, int32_t> found;
  Text text;
  for (const std::string_view word : words) {
    const auto [at, is_new] = found.try_emplace(word, static_cast<int32_t>(entries.size()));
    if (is_new) entries.push_back({.word = word});
    ++entries[static_cast<size_t>(at->second)].count;
    text.words.push_back(at->second);
  }
  std::vector<int32_t> order;
  for (size_t i = 0; i < entries.size(); ++i) order.push_back(static_cast<int32_t>(i));
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
    return entries[static_cast<size_t>(a)].count > entries[static_cast<size_t>(b)].count;
  });
  for (const int32_t i : order) {
    Entry& entry = entries[static_cast<size_t>(i)];
    entry.id = static_cast<int32_t>(text.vocabulary.size());
    text.vocabulary.emplace_back(entry.word);
  }
  for (int32_t& word : text.words) word = entries[static_cast<size_t>(word)].id;
  return text;
}

Text read_text(const std::vector<std::string>& paths) {
  std::string all;
  for (const std::string& path : paths) {
    const cli::InputFile file = cli::take(cli::InputFile::open(path));
    const size_t before = all.size();
    all.resize(before + file.size());
    cli::take(file.read(0, all.data() + before, file.size()));
    all += '\n';  // the last word of one file and the first of the next one are two
  }
  const std::vector<std::string_view> words = tokenise(all);
  if (words.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    cli::fail(fmt::format("the text has {} words, must be at most {}", words.size(),
                          std::numeric_limits<int32_t>::max()));
  }
  return number_words(words);
}

std::string Text::fingerprint() const {
  Fingerprint print;
  for (const std::string& word : vocabulary) print.add(word.c_str(), word.size() + 1);
  print.add(words.data(), words.size() * sizeof words[0]);
  return print.str();
}

Split split_text(const Text& text) {
  Split split;
  for (size_t i = 0; i < text.words.size(); ++i) {
    (is_held_out(static_cast<int64_t>(i)) ? split.held_out : split.training)
        .push_back(static_cast<int32_t>(i));
  }
  return split;
}

void context_of(const Text& text, int64_t position, int64_t size, int32_t* context) {
  const bool trains = !is_held_out(position);
  for (int64_t k = 0; k < size; ++k) {
    const int64_t at = position - 1 - k;
    const bool none = at < 0 || (trains && is_held_out(at));
    context[k] = none ? static_cast<int32_t>(text.V()) : text.words[static_cast<size_t>(at)];
  }
}

double unigram_cross_entropy(const Text& text, const Split& split) {
  std::vector<int64_t> count(text.vocabulary.size(), 1);
  for (const int32_t at : split.training)
    ++count[static_cast<size_t>(text.words[static_cast<size_t>(at)])];
  const double all = static_cast<double>(split.training.size() + count.size());
  double sum = 0;
  for (const int32_t at : split.held_out) {
    const size_t word = static_cast<size_t>(text.words[static_cast<size_t>(at)]);
    sum -= std::log(static_cast<double>(count[word]) / all);
  }
  return sum / static_cast<double>(std::max<size_t>(split.held_out.size(), 1));
}

}  // namespace logitless::train_lm
