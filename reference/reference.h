// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "logitless/options.h"
#include "logitless/tensor.h"

// The definition of the operators, in double, in plain loops. It is the oracle of every test and of
// `logitless verify`; it shares the views with the library and none of its code.
//
// Beside each value stands how far a correct float implementation strays from it (tolerance.h says
// how that is estimated): `deviation` is a standard deviation, `flip` the change if a logit that is
// rounded to 16 bits falls on the other side of a rounding boundary (0 where none is near).
namespace logitless::reference {

// Row-major.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(int64_t n_rows, int64_t n_cols)
      : rows(n_rows), cols(n_cols), values(static_cast<size_t>(n_rows * n_cols)) {}
  double* row(int64_t r) { return values.data() + r * cols; }
  const double* row(int64_t r) const { return values.data() + r * cols; }
  double& operator()(int64_t r, int64_t c) { return row(r)[c]; }
  double operator()(int64_t r, int64_t c) const { return row(r)[c]; }
};

// Contents of views; any stride, any type. `multiply`: rounded to that type on the way.
double element(const ConstVectorView& view, int64_t i);
double element(const ConstMatrixView& view, int64_t row, int64_t col);
std::vector<double> read(const ConstVectorView& view);
std::vector<int64_t> read_indices(const ConstVectorView& view);  // i32, i64, u8; exact
std::vector<uint8_t> read(const ConstMaskView& view);            // one byte per token, 0 or 1
Matrix read(const ConstMatrixView& view, std::optional<DType> multiply = {});

// 0, 1, ..., n - 1.
std::vector<int64_t> all_rows(int64_t n);

// ---- forward ----------------------------------------------------------------------------------
struct ForwardOptions {
  std::optional<DType> multiply = {};                     // absent = the operands' own type
  LogitsRounding logits_rounding = LogitsRounding::none;  // none or operand
  int64_t vocab_start_index = 0;
  std::optional<int64_t> vocab_end_index = {};  // exclusive; absent = start + V
  RowFilter rows = {};
};

// One value per token with its error estimate.
struct TokenValues {
  std::vector<double> value;
  std::vector<double> deviation;
  std::vector<double> flip;
};

// Entry i of every vector belongs to the token tokens[i].
struct Statistics {
  std::vector<int64_t> tokens;
  TokenValues logits_max;
  TokenValues sum_exp_logits;  // deviation and flip are relative
  TokenValues predicted_logits;
  std::vector<uint8_t> target_mask;    // 1 = outside this shard
  std::vector<int64_t> masked_target;  // local index, 0 where masked
  std::vector<uint8_t> counts;         // 0 = the row filter dropped the row
  // Error that the logits leave in log(sum) + max, and in log(sum) - predicted: smaller than the
  // parts suggest, the maximum's own error cancels.
  std::vector<double> logsumexp_deviation, logsumexp_flip;
  std::vector<double> loss_deviation, loss_flip;
};

// Statistics of the listed rows of input (absent: all) against every row of weight.
Statistics forward(const ConstMatrixView& input, const ConstMatrixView& weight,
                   const ConstVectorView& target, const ForwardOptions& options = {},
                   std::optional<std::vector<int64_t>> tokens = {});

// Logits of the listed tokens, rounded as asked, with their deviation (0 flip: see spacing()).
struct Logits {
  Matrix value;      // after rounding
  Matrix unrounded;  // before
  Matrix deviation;  // of the float sum, before rounding
};
Logits logits(const ConstMatrixView& input, const ConstMatrixView& weight,
              const ForwardOptions& options, std::span<const int64_t> tokens);

// ---- merge, loss ------------------------------------------------------------------------------
// Shards in any order; each with the same tokens.
Statistics merge(std::span<const Statistics> shards);

struct Loss {
  TokenValues loss;
  TokenValues logsumexp;
};
Loss loss(const Statistics& merged);
// From statistics alone, e.g. those of an implementation: no error estimates.
double loss(double logits_max, double sum_exp_logits, double predicted_logits);
double softmax(double logit, double logits_max, double sum_exp_logits);

// ---- gradient ---------------------------------------------------------------------------------
// Statistics are doubles, so both a float implementation's and the definition's own can be given.
// Every vector is [BT].
struct GradientOperands {
  ConstMatrixView input;   // [BT, H]
  ConstMatrixView weight;  // [V, H]
  std::vector<double> grad;
  std::vector<double> grad_logsumexp = {};  // empty = none
  std::vector<uint8_t> target_mask = {};    // 1 = outside; empty = every target is inside
  std::vector<int64_t> masked_target;
  std::vector<double> logits_max = {};      // memory-saving mode
  std::vector<double> sum_exp_logits = {};  // memory-saving mode
  // Error of the statistics that the judged implementation used, relative to the ones above, as a
  // deviation of log(sum) + max; empty: it used exactly these (their float values).
  std::vector<double> logsumexp_deviation = {};
  std::optional<ConstMatrixView> softmax = {};  // [BT, V]: high-performance mode
  std::vector<uint8_t> counts = {};             // 0 = the row does not count; empty = all do
};

struct GradientOptions {
  std::optional<DType> multiply = {};
  LogitsRounding logits_rounding = LogitsRounding::none;  // memory-saving mode
  // The judged implementation keeps exponentials in this type between two passes over a block; the
  // target's own excepted. An error of the implementation, no part of the definition.
  std::optional<DType> held_softmax = {};
};

// Row i belongs to rows[i] (a token or a vocabulary row).
struct Gradient {
  std::vector<int64_t> rows;
  Matrix value;
  Matrix deviation;  // before the rounding of the output
  Matrix bias;       // errors common to a whole row; a bound, not a deviation
};

// Rows of grad_input for the listed tokens, over all of V.
Gradient grad_input(const GradientOperands& operands, const GradientOptions& options = {},
                    std::optional<std::vector<int64_t>> tokens = {});
// Rows of grad_weight for the listed vocabulary rows, over all tokens.
Gradient grad_weight(const GradientOperands& operands, const GradientOptions& options = {},
                     std::optional<std::vector<int64_t>> vocabulary = {});

}  // namespace logitless::reference
