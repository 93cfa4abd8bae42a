// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace logitless::test {

// Observed errors of one output against the allowed ones, element by element; fails the test when
// one is beyond, naming the worst. The largest ratio per name is printed at the end of the program.
class Judge {
 public:
  // name: what is judged, e.g. "grad_weight bf16".
  explicit Judge(std::string name) : name_(std::move(name)) {}
  ~Judge();
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  // A NaN wants a NaN, an infinity wants itself.
  void check(double got, double want, double allowed, int64_t row, int64_t col = 0);
  double worst_ratio() const { return worst_ratio_; }

 private:
  std::string name_;
  std::string worst_;
  double worst_ratio_ = 0.0;
};

// Prints the table of the worst ratios seen by every Judge of this process.
void print_margins();

}  // namespace logitless::test
