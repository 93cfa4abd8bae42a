// SPDX-License-Identifier: Apache-2.0
#include "cli/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/models_json.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

std::vector<Model> parse_models() {
  // Written by us and read by a test: a mistake in it is ours, not the user's.
  const auto document = nlohmann::json::parse(kModelsJson);
  std::vector<Model> list;
  for (const auto& entry : document.at("models")) {
    list.push_back({.name = entry.at("name"),
                    .V = entry.at("V"),
                    .H = entry.at("H"),
                    .source = entry.at("source")});
  }
  return list;
}

// Letters and digits, lower case.
std::string squeezed(std::string_view name) {
  std::string out;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0) out += static_cast<char>(std::tolower(byte));
  }
  return out;
}

// Insertions, deletions and replacements that make one of the other (Levenshtein).
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

}  // namespace

const std::vector<Model>& models() {
  static const std::vector<Model> list = parse_models();
  return list;
}

Result<Model> find_model(std::string_view name) {
  const std::string wanted = squeezed(name.substr(0, 64));
  std::vector<std::string> near;
  std::vector<std::string> all;
  for (const Model& model : models()) {
    const std::string known = squeezed(model.name);
    if (known == wanted) return model;
    all.push_back(model.name);
    const bool part = wanted.size() >= 3 && known.find(wanted) != std::string::npos;
    if (part || edits(wanted, known) <= 2) near.push_back(model.name);
  }
  const bool some = !near.empty();
  return Error{.kind = ErrorKind::invalid_argument,
               .message = fmt::format("there is no model '{}'; {} {}", printable(name),
                                      some ? "near it are" : "known are",
                                      fmt::join(some ? near : all, ", "))};
}

}  // namespace logitless::cli
