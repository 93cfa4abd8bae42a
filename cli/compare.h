// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/judge.h"
#include "cli/verify.h"
#include "logitless/result.h"

namespace logitless::cli {

// Outputs made elsewhere, by the names of their tensors: any of logits_max, sum_exp_logits,
// predicted_logits, target_mask (packed or one byte per token), masked_target, loss, logsumexp,
// logits, softmax, grad_input, grad_weight. Others are ignored.
using ForeignOutputs = std::map<std::string, HostTensor>;

// Shapes and dtypes are checked against the case; a wrong one is an error that names the tensor.
Result<ForeignOutputs> load_outputs(const std::string& path, const Case& c);

struct CompareOptions {
  LogitsRounding rounding = LogitsRounding::none;
  // The gradients were made from exponentials held in this type (one pass).
  std::optional<DType> held_softmax = {};
  bool full = false;
  std::function<void(const std::string&)> progress = {};
};

struct CompareReport {
  Judgements judgements;
  std::vector<std::string> absent;  // outputs that the file does not have
  Sample sample;
  bool statistics_from_file = false;  // the gradient was judged with the file's own statistics
  // Over the checked tokens that count; only with a loss.
  std::optional<double> mean_loss;
  std::optional<double> mean_loss_float64;

  bool fine() const;
};

CompareReport compare_outputs(const Case& c, const ForeignOutputs& outputs,
                              const CompareOptions& options);

}  // namespace logitless::cli
