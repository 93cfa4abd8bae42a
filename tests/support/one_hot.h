// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "reference/sparse_gradient.h"
#include "tests/support/steps.h"

// Steps in which grad_logits can be read, so that a sparse gradient's choice can be judged.
namespace logitless::test {

// One operand begins with an identity matrix, the other with the logits; each has `further`
// columns, which meet zeros in the logits and see what is kept in their own product. Both gradients
// are fp32.
struct OneHotShape {
  int64_t BT = 0;
  int64_t V = 0;
  int64_t further = 1;
};
struct OneHot {
  StepCase step;
  int64_t further = 0;
  bool input_is_identity = false;  // else weight is

  double logit(int64_t b, int64_t v) const;
  void set_logit(int64_t b, int64_t v, double value);
  double grad_logit(const StepResult& result, int64_t b, int64_t v) const;
};
// H = BT + further: grad_weight[v, b] is grad_logits[b, v]. The softmax of most rows is peaked as a
// trained model's is; every sixth is flat.
OneHot one_hot_input(const OneHotShape& shape, const Arithmetic& arithmetic, uint64_t seed = 1);
// H = V + further: grad_input[b, v] is grad_logits[b, v].
OneHot one_hot_weight(const OneHotShape& shape, const Arithmetic& arithmetic, uint64_t seed = 1);

// The definition's view of it.
reference::SparseOperands definition_operands(const OneHot& o);

struct KeptSet {
  int64_t sparse_rows = 0;
  int64_t dense_rows = 0;
  int64_t unclear_rows = 0;  // so near to another threshold that float may take it: not compared
  int64_t kept = 0;
  int64_t within_an_ulp = 0;  // decided otherwise, the test being that close

  KeptSet& operator+=(const KeptSet& other);
};
// What was kept, and as what, against the definition; a dense row is one with the bits of `exact`,
// and must be one where the definition says so. Counters too.
KeptSet expect_kept_set(const OneHot& o, const StepResult& exact, const StepResult& got);
// The further columns of the other gradient hold the product of what was kept.
void expect_products(const OneHot& o, const StepResult& got);

void expect_same_counts(const StepResult& a, const StepResult& b);

// Tokens of a step as a step of their own, with ids that say which they were.
StepCase some_tokens(const StepCase& c, std::span<const int64_t> tokens);

// The least limit that a plan takes, from what it says when there is less.
template <typename PlanFunction>
int64_t least_limit(const PlanFunction& plan) {
  const auto refused = plan(1);
  if (refused) return 1;
  const std::string& message = refused.error().message;
  const auto digits = message.find_first_of("0123456789", message.find("least"));
  int64_t limit = digits == std::string::npos ? 64 : std::stoll(message.substr(digits));
  while (!plan(limit)) limit += limit / 8 + 64;
  return limit;
}

}  // namespace logitless::test
