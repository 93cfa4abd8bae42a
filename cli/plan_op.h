// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "logitless/logitless.h"

namespace logitless::cli {

// Operators by the names that the command line gives them.
inline constexpr std::array<const char*, 4> kPlannedOps = {"forward", "gradient", "gradient-hp",
                                                           "one-pass"};

struct PlanRequest {
  std::string op;  // one of kPlannedOps
  Shape shape;
  DType dtype = DType::bf16;
  LogitsRounding rounding = LogitsRounding::none;
  float grad_tolerance = 0;  // of gradient and one-pass
  bool grad_input = true;
  bool grad_weight = true;
};

// What a plan says of itself.
struct PlanSummary {
  std::string op;
  Shape shape;
  Isa isa = Isa::scalar;
  int threads = 0;
  int64_t workspace_bytes = 0;
  std::string strategy;  // of one-pass: one_pass or recompute; else ""
  std::string text;
};

Result<PlanSummary> plan_op(const PlanRequest& request, const PlanOptions& options);

}  // namespace logitless::cli
