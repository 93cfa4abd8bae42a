// SPDX-License-Identifier: Apache-2.0
#include "cli/table.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace logitless::cli {
namespace {

// Code points of UTF-8 text: every byte but the continuation bytes.
size_t width_of(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale(value);
    return locale.find("UTF-8") != std::string_view::npos ||
           locale.find("utf8") != std::string_view::npos ||
           locale.find("UTF8") != std::string_view::npos;
  }
  return false;
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::row(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::str() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = width_of(columns_[c].title);
    for (const auto& cells : rows_) width = std::max(width, width_of(cells[c]));
    widths.push_back(width);
  }
  std::string out;
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string space(widths[c] - width_of(cell), ' ');
      if (c > 0) text += "  ";
      text += columns_[c].align == Align::right ? space + cell : cell + space;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + '\n';
  };
  line([&](size_t c) -> const std::string& { return columns_[c].title; });
  size_t total = 0;
  for (const size_t width : widths) total += width;
  out += std::string(total + 2 * (columns_.size() - 1), '-') + '\n';
  for (const auto& cells : rows_) {
    line([&](size_t c) -> const std::string& { return cells[c]; });
  }
  return out;
}

Marks marks() {
  static const bool pretty = stdout_is_terminal() && locale_is_utf8();
  return pretty ? Marks{.good = "✓", .bad = "✗"} : Marks{.good = "ok", .bad = "BEYOND"};
}

bool stdout_is_terminal() { return ::isatty(STDOUT_FILENO) == 1; }
bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

}  // namespace logitless::cli
