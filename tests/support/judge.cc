// SPDX-License-Identifier: Apache-2.0
#include "tests/support/judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

namespace logitless::test {
namespace {

std::map<std::string, double>& worst_ratios() {
  static std::map<std::string, double> ratios;
  return ratios;
}

}  // namespace

Judge::~Judge() {
  double& known = worst_ratios()[name_];
  known = std::max(known, worst_ratio_);
  if (worst_ratio_ > 1.0) ADD_FAILURE() << name_ << ": " << worst_;
}

void Judge::check(double got, double want, double allowed, int64_t row, int64_t col) {
  double ratio = 0.0;
  if (std::isnan(want) || std::isnan(got)) {
    ratio = std::isnan(want) && std::isnan(got) ? 0.0 : INFINITY;
  } else if (std::isinf(want) || std::isinf(got)) {
    ratio = want == got ? 0.0 : INFINITY;
  } else {
    const double error = std::abs(got - want);
    ratio = error == 0.0 ? 0.0 : error / allowed;
  }
  if (ratio <= worst_ratio_) return;
  worst_ratio_ = ratio;
  if (ratio <= 1.0) return;
  char text[256];
  std::snprintf(text, sizeof text,
                "[%lld, %lld] is %.9g, must be %.9g; error %.3g, allowed %.3g (ratio %.3g)",
                static_cast<long long>(row), static_cast<long long>(col), got, want,
                std::abs(got - want), allowed, ratio);
  worst_ = text;
}

void print_margins() {
  if (worst_ratios().empty()) return;
  std::printf("observed / allowed error, worst of each:\n");
  for (const auto& [name, ratio] : worst_ratios()) {
    std::printf("  %-40s %.3f\n", name.c_str(), ratio);
  }
}

}  // namespace logitless::test
