// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace logitless::cli {

enum class Align { left, right };

// Rows of text in columns as wide as their widest cell.
class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::left;
  };
  explicit Table(std::vector<Column> columns);
  void row(std::vector<std::string> cells);
  // Title line, a rule, the rows; every line ends with a newline and none with spaces.
  std::string str() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Characters for a person's terminal: pretty where stdout is a terminal in a UTF-8 locale, ASCII
// words elsewhere (a file, a pipe, a test).
struct Marks {
  const char* good;
  const char* bad;
};
Marks marks();

bool stdout_is_terminal();
bool stderr_is_terminal();

}  // namespace logitless::cli
