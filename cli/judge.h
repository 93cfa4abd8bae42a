// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/operators.h"
#include "reference/reference.h"

namespace logitless::cli {

// The verdict on one output: its worst element, the one whose error is the largest part of what is
// allowed for it.
struct Judgement {
  std::string stage;
  std::string output;
  double observed = 0;  // absolute error of the worst element
  double allowed = 0;   // for that element
  double ratio = 0;     // observed / allowed; infinite where a NaN or infinity is wrong
  double got = 0;
  double expected = 0;
  int64_t row = -1;
  int64_t col = -1;  // -1: the output is a vector
  int64_t elements = 0;
  bool exact = false;  // nothing but the very value is allowed

  bool fine() const { return ratio <= 1; }
};

class ElementJudge {
 public:
  ElementJudge(std::string stage, std::string output);
  // allowed = 0 asks for the exact value.
  void add(double got, double expected, double allowed, int64_t row, int64_t col = -1);
  const Judgement& verdict() const { return verdict_; }

 private:
  Judgement verdict_;
};

using Judgements = std::vector<Judgement>;

// Each judge_* compares tensors of the operators, all rows of which are given, with a reference for
// some rows (`tokens`, or Gradient::rows).

// The float64 statistics of a library result, for tokens: what a later stage was given.
reference::Statistics as_reference(const ForwardResult& result, const Case& c,
                                   std::span<const int64_t> tokens);

// logits_max, sum_exp_logits, predicted_logits, target_mask and masked_target; a null tensor is not
// judged.
struct StatisticsTensors {
  const HostTensor* logits_max = nullptr;
  const HostTensor* sum_exp_logits = nullptr;
  const HostTensor* predicted_logits = nullptr;
  const HostTensor* target_mask = nullptr;  // packed, or one byte per token when its size is BT
  const HostTensor* masked_target = nullptr;
};
void judge_statistics(const std::string& stage, const StatisticsTensors& got,
                      const reference::Statistics& expected, int64_t BT, Judgements& out);

// Merged statistics against the shards they were made of. Beside the elements the mean error is
// judged: a merge that is off by a common factor of an ulp shows in it when no element does.
void judge_merge(const std::string& stage, const ForwardResult& merged,
                 std::span<const reference::Statistics> shards, Judgements& out);

// loss and logsumexp (may be null). With `own` only the operator's own error is allowed, expected
// being made of the very statistics it was given; else also what the statistics bring along.
void judge_loss(const std::string& stage, const HostTensor* loss, const HostTensor* logsumexp,
                const reference::Statistics& statistics, bool own, Judgements& out);

// Written logits [tokens, V]; output: the type they were written as.
void judge_logits(const std::string& stage, const HostTensor& logits,
                  const reference::Logits& expected, std::span<const int64_t> tokens,
                  LogitsRounding rounding, DType multiply, Judgements& out);

// softmax[b, first_column + v] against exp(logits[b, v] - logits_max[b]) / sum_exp_logits[b] with
// the very operands the operator was given.
void judge_softmax(const std::string& stage, const HostTensor& softmax, const HostTensor& logits,
                   int64_t first_column, const ForwardResult& merged, const Case& c,
                   std::span<const int64_t> tokens, Judgements& out);

// Rows of grad_input or grad_weight; terms: V or BT.
void judge_gradient(const std::string& stage, const std::string& output, const HostTensor& got,
                    const reference::Gradient& expected, int64_t terms, Judgements& out);

// Two tensors of one type and shape that are promised to agree bit by bit (a NaN with any NaN).
void judge_same_bits(const std::string& stage, const std::string& output, const HostTensor& got,
                     const HostTensor& expected, Judgements& out);

// Folds a later part of the same output (more rows) into one verdict.
void join(Judgements& into, const Judgements& more);

// "grad_weight[3, 17] is 0.25, float64 says 0.5: off by 0.25, allowed 1e-3"
std::string describe_worst(const Judgement& judgement);

}  // namespace logitless::cli
