// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/reference.h"

// The definition of the sparse gradient, from logits in double: which elements of grad_logits one
// seed keeps and as what, what they are on average over seeds, and how far they stray from that.
// Of a row b that has a gradient, w its grad, t its target, p its softmax:
//
//   rest       = sum of p[v] over v != t
//   below(tau) = sum of those p[v] that are < tau
//   tau        = the largest power of two, at most 1, with tau * below(tau) <= (eps * rest)^2
//   g[t]       = -rest * w
//   g[v]       = p[v] * w                                    where p[v] >= tau
//              = tau * w if u(b, v) * tau < p[v], else 0     where p[v] < tau
//
// u(b, v) is uniform in [0, 1) over seeds, so the mean of g[v] is p[v] * w and its variance
// p[v] * (tau - p[v]) * w^2. A row's mean squared error is at most tau * below(tau) * w^2 <=
// (eps * rest * w)^2: relative to the row's own length at most eps, since that is at least
// rest * |w|, the target's element.
namespace logitless::reference {

// ---- the choice -------------------------------------------------------------------------------
uint32_t sparse_token_hash(uint64_t seed, int64_t token_id);
uint32_t sparse_vocab_hash(uint64_t seed, int64_t vocab_id);  // the global id
double sparse_uniform(uint32_t token_hash, uint32_t vocab_hash);

// ---- one row ----------------------------------------------------------------------------------
struct SparseRule {
  double rest = 0;
  double tau = 0;
  // How near the row was to another tau: the least relative distance of tau * below(tau) and
  // 2 tau * below(2 tau) from their limit, and of any p[v] from the two.
  double tau_distance = 0;
  double expected_kept = 0;  // elements, on average over seeds, the target among them
  double deviation = 0;      // root of the mean squared error of the whole row, for w = 1
};
// target outside [0, V): no element is the target.
SparseRule sparse_rule(std::span<const double> softmax, int64_t target, double eps);

// Rows of which more than a fifth would be kept are left to the exact gradient, which is then
// cheaper; that is no part of the definition, and a row near the limit may go either way.
struct DenseRule {
  bool may_be_dense = false;
  bool may_be_sparse = true;
};
// logits and softmax of the row. Of a large vocabulary a sample is looked at beforehand, the
// elements of every 64th column (or of 1024, if these are fewer) but the target's, taken for all of
// them: if that keeps more than a fifth, the row counts as flat.
DenseRule dense_rule(std::span<const double> logits, int64_t target, double eps,
                     const SparseRule& rule);

// ---- grad_logits of a batch -------------------------------------------------------------------
struct SparseOperands {
  Matrix logits;                        // [BT, V]
  std::vector<int64_t> target;          // [BT], rows of this vocabulary
  std::vector<double> grad;             // [BT]; 0 = the row has no gradient
  std::vector<int64_t> token_ids = {};  // [BT]; empty = 0, 1, ...
  int64_t vocab_start_index = 0;        // the global id of column 0
  double eps = 0;
  uint64_t seed = 0;
};

struct SparseGradient {
  Matrix value;     // [BT, V]: g; 0 where it is not kept
  Matrix expected;  // [BT, V]: its mean over seeds, the exact grad_logits
  // [BT, V]: |u tau - p| / p where a choice was made: how near the other one was; else infinite.
  Matrix distance;
  std::vector<SparseRule> rules;    // [BT]; tau is 0 where a row has no gradient
  std::vector<DenseRule> dense;     // [BT]
  std::vector<uint8_t> not_finite;  // [BT]: statistics are not, so that nothing can be chosen
};
SparseGradient sparse_grad_logits(const SparseOperands& operands);

// grad_logits . weight [BT, H] and grad_logits^T . input [V, H], in double.
Matrix times(const Matrix& grad_logits, const Matrix& weight);
Matrix transposed_times(const Matrix& grad_logits, const Matrix& input);

// ---- unbiased or not --------------------------------------------------------------------------
// The mean of many random gradients against what they should be on average, along fixed
// directions: the expected gradient's own, in which every kind of shrinking shows, and 64 random
// ones.
class BiasCheck {
 public:
  static constexpr int kRandomDirections = 64;
  static constexpr int kDirections = kRandomDirections + 1;
  static constexpr double kMostErrors = 5.0;  // of a sound mean, in standard errors

  // Of grad_input each row counts alike: it is divided by the length of its expected value. A row
  // of grad_weight may be kept once in a thousand seeds, so that its own mean says nothing; there
  // errors count as they are.
  enum class Rows : uint8_t { alike, as_they_are };

  // rounding: of each row, the length of an error that is the same for all seeds, such as float's;
  // empty: 2^-20 of the row. Rows without a gradient, or with less than ten bits right, say nothing
  // and are left out.
  explicit BiasCheck(Matrix expected, std::vector<double> rounding = {}, Rows rows = Rows::alike);
  // The gradient of one more seed.
  void add(const Matrix& got);

  int64_t samples() const { return samples_; }
  int64_t rows() const { return static_cast<int64_t>(used_.size()); }
  // The mean error along a direction, beyond what rounding explains, in standard errors of it;
  // infinite where nothing varies and the mean is off all the same.
  double errors(int direction) const;
  double worst() const;
  bool fine() const { return worst() <= kMostErrors; }

 private:
  Matrix expected_;
  Matrix row_signs_, column_signs_;  // a direction's sign at an element is the product of two
  std::vector<int64_t> used_;
  std::vector<double> scale_;    // of the used rows
  std::vector<double> allowed_;  // [kDirections]
  std::vector<double> sum_, squares_;
  int64_t samples_ = 0;
};

}  // namespace logitless::reference
