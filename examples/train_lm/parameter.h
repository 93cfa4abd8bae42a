// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "examples/train_lm/random.h"

namespace logitless::train_lm {

// A matrix that is trained, with all that training keeps of it; each [rows, cols], row-major.
struct Parameter {
  Parameter(std::string its_name, int64_t its_rows, int64_t its_cols)
      : name(std::move(its_name)), rows(its_rows), cols(its_cols) {
    for (auto* values : {&value, &gradient, &mean, &square}) {
      values->resize(static_cast<size_t>(rows * cols));
    }
  }
  int64_t size() const { return rows * cols; }

  // Uniform with standard deviation `deviation`. first_row: of this part in the whole matrix, which
  // has the same numbers however it is cut.
  void initialise(const RandomNumbers& random, float deviation, int64_t first_row = 0) {
    constexpr float kSpan = 3.4641016f;  // sqrt(12)
    for (int64_t i = 0; i < size(); ++i) {
      value[static_cast<size_t>(i)] =
          kSpan * deviation * (random.uniform(first_row * cols + i) - 0.5f);
    }
  }

  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> value;
  std::vector<float> gradient;
  std::vector<float> mean;    // AdamW's, of the gradient
  std::vector<float> square;  // and of its square
};

}  // namespace logitless::train_lm
