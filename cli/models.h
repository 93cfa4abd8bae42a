// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/result.h"

namespace logitless::cli {

// The head of a public language model: weight [V, H].
struct Model {
  std::string name;
  int64_t V = 0;
  int64_t H = 0;
  std::string source;  // the model's page, below huggingface.co
};

// cli/data/models.json, which is part of the program.
const std::vector<Model>& models();

// Case and punctuation do not matter: "GPT2" is gpt-2. An unknown name is an error that lists the
// near ones, or all.
Result<Model> find_model(std::string_view name);

}  // namespace logitless::cli
