// SPDX-License-Identifier: Apache-2.0
#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "reference/tolerance.h"

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
// Logits are held for one block of tokens against one chunk of the vocabulary (gradients) or all of
// it (forward), so memory stays near kTokenBlock * V * 8 bytes whatever BT is.
constexpr int64_t kTokenBlock = 128;
constexpr int64_t kVocabularyChunk = 1024;
// Fewer elementary steps than this are not worth waking other threads for.
constexpr int64_t kParallelWork = 1 << 20;

// ---- reading views ----------------------------------------------------------------------------

const std::byte* address(const void* data, DType dtype, int64_t offset) {
  return static_cast<const std::byte*>(data) + offset * size_of(dtype);
}

double load(const void* data, DType dtype, int64_t offset) {
  const void* at = address(data, dtype, offset);
  switch (dtype) {
    case DType::f32:
      return *static_cast<const float*>(at);
    case DType::f16:
      return static_cast<float>(*static_cast<const float16*>(at));
    case DType::bf16:
      return static_cast<float>(*static_cast<const bfloat16*>(at));
    case DType::i32:
      return *static_cast<const int32_t*>(at);
    case DType::i64:
      return static_cast<double>(*static_cast<const int64_t*>(at));
    case DType::u8:
      return *static_cast<const uint8_t*>(at);
  }
  return kNaN;
}

int64_t load_index(const ConstVectorView& view, int64_t i) {
  const void* at = address(view.data, view.dtype, i * view.stride);
  switch (view.dtype) {
    case DType::i32:
      return *static_cast<const int32_t*>(at);
    case DType::i64:
      return *static_cast<const int64_t*>(at);
    case DType::u8:
      return *static_cast<const uint8_t*>(at);
    case DType::f32:
    case DType::f16:
    case DType::bf16:
      break;
  }
  return 0;
}

// The listed rows of a view, rounded to the type that the operands are multiplied in.
Matrix read_rows(const ConstMatrixView& view, std::span<const int64_t> rows,
                 std::optional<DType> multiply) {
  Matrix result(static_cast<int64_t>(rows.size()), view.cols);
  const bool rounds = multiply && *multiply != view.dtype;
#pragma omp parallel for schedule(static) if (result.rows * result.cols > kParallelWork)
  for (int64_t r = 0; r < result.rows; ++r) {
    const int64_t first = rows[static_cast<size_t>(r)] * view.row_stride;
    for (int64_t c = 0; c < view.cols; ++c) {
      const double value = load(view.data, view.dtype, first + c * view.col_stride);
      result(r, c) = rounds ? round_to(*multiply, value) : value;
    }
  }
  return result;
}

// Rows [begin, end) of a list.
std::span<const int64_t> slice(std::span<const int64_t> rows, int64_t begin, int64_t end) {
  return rows.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

// ---- matrix products --------------------------------------------------------------------------

Matrix transposed(const Matrix& m) {
  Matrix result(m.cols, m.rows);
#pragma omp parallel for schedule(static) if (result.rows * result.cols > kParallelWork)
  for (int64_t r = 0; r < result.rows; ++r) {
    for (int64_t c = 0; c < result.cols; ++c) result(r, c) = m(c, r);
  }
  return result;
}

Matrix squared(Matrix m) {
  for (double& value : m.values) value *= value;
  return m;
}

// c += a . b, for a [I, K], b [K, J]. A tile of 4 x 8 sums keeps the adders busy; b is copied into
// panels of 8 columns so that the inner loop reads it in order.
constexpr int64_t kTileRows = 4;
constexpr int64_t kTileCols = 8;

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang__)
// Chosen by the loader; sanitizers run before it can, so they take the plain one.
#define LOGITLESS_REFERENCE_CLONES \
  __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define LOGITLESS_REFERENCE_CLONES
#endif

LOGITLESS_REFERENCE_CLONES
void add_products_of_tile(const double* const a[kTileRows], const double* panel, int64_t depth,
                          double sums[kTileRows][kTileCols]) {
  double tile[kTileRows][kTileCols] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t i = 0; i < kTileRows; ++i) {
      for (int64_t j = 0; j < kTileCols; ++j) tile[i][j] += a[i][k] * panel[k * kTileCols + j];
    }
  }
  for (int64_t i = 0; i < kTileRows; ++i) {
    for (int64_t j = 0; j < kTileCols; ++j) sums[i][j] = tile[i][j];
  }
}

void add_product(const Matrix& a, const Matrix& b, Matrix& c) {
  const int64_t depth = a.cols;
  const int64_t panels = (c.cols + kTileCols - 1) / kTileCols;
#pragma omp parallel if (c.rows * c.cols * depth > kParallelWork)
  {
    std::vector<double> panel(static_cast<size_t>(depth * kTileCols));
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * kTileCols;
      const int64_t cols = std::min(kTileCols, c.cols - first);
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t j = 0; j < cols; ++j) panel[k * kTileCols + j] = b(k, first + j);
      }
      for (int64_t i = 0; i < c.rows; i += kTileRows) {
        const int64_t rows = std::min(kTileRows, c.rows - i);
        const double* a_rows[kTileRows];
        // A ragged tile repeats its last row.
        for (int64_t r = 0; r < kTileRows; ++r) a_rows[r] = a.row(i + std::min(r, rows - 1));
        double sums[kTileRows][kTileCols];
        add_products_of_tile(a_rows, panel.data(), depth, sums);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t j = 0; j < cols; ++j) c(i + r, first + j) += sums[r][j];
        }
      }
    }
  }
}

// ---- logits -----------------------------------------------------------------------------------

// A logit that was rounded to `dtype`, and the value it would have had on the other side of the
// nearest rounding boundary; equal when no error within `reach` can carry it there.
struct RoundedLogit {
  double value;
  double other;
};

RoundedLogit round_logit(DType dtype, double unrounded, double reach) {
  const double value = round_to(dtype, unrounded);
  if (!std::isfinite(value)) return {value, value};
  const double step = spacing(dtype, unrounded);
  const double to_boundary = step / 2.0 - std::abs(unrounded - value);
  if (to_boundary > reach) return {value, value};
  return {value, unrounded >= value ? value + step : value - step};
}

// A finite logit's error as an implementation computes it; infinities and NaN have none.
double logit_variance(int64_t hidden, double sum, double sum_of_squares) {
  if (!std::isfinite(sum) || !std::isfinite(sum_of_squares)) return 0.0;
  return product_sum_variance(static_cast<double>(hidden), sum, sum_of_squares);
}

// The same from the partial sums themselves, for the few logits that whole statistics hang on.
double logit_path_variance(const ConstMatrixView& input, const ConstMatrixView& weight,
                           DType multiply, int64_t token, int64_t v) {
  double sum = 0.0, squared_partial_sums = 0.0, squares = 0.0;
  for (int64_t h = 0; h < input.cols; ++h) {
    const double product =
        round_to(multiply, element(input, token, h)) * round_to(multiply, element(weight, v, h));
    sum += product;
    squared_partial_sums += sum * sum;
    squares += product * product;
  }
  if (!std::isfinite(squared_partial_sums)) return 0.0;
  return partial_sums_variance(squared_partial_sums, squares);
}

// logits = a . b^T and their variances, for rows of a and b already in double.
struct LogitsBlock {
  Matrix value;
  Matrix variance;
};

LogitsBlock logits_of(const Matrix& input, const Matrix& input_squared, const Matrix& weight) {
  LogitsBlock block{Matrix(input.rows, weight.rows), Matrix(input.rows, weight.rows)};
  const Matrix weight_transposed = transposed(weight);
  add_product(input, weight_transposed, block.value);
  add_product(input_squared, squared(weight_transposed), block.variance);
#pragma omp parallel for schedule(static) if (block.value.rows * block.value.cols > kParallelWork)
  for (int64_t i = 0; i < block.value.rows; ++i) {
    for (int64_t j = 0; j < block.value.cols; ++j) {
      block.variance(i, j) = logit_variance(input.cols, block.value(i, j), block.variance(i, j));
    }
  }
  return block;
}

void reserve(TokenValues& values, int64_t n) {
  values.value.assign(static_cast<size_t>(n), 0.0);
  values.deviation.assign(static_cast<size_t>(n), 0.0);
  values.flip.assign(static_cast<size_t>(n), 0.0);
}

Statistics empty_statistics(std::vector<int64_t> tokens) {
  Statistics s;
  const auto n = static_cast<int64_t>(tokens.size());
  s.tokens = std::move(tokens);
  reserve(s.logits_max, n);
  reserve(s.sum_exp_logits, n);
  reserve(s.predicted_logits, n);
  s.target_mask.assign(static_cast<size_t>(n), 0);
  s.masked_target.assign(static_cast<size_t>(n), 0);
  s.counts.assign(static_cast<size_t>(n), 1);
  for (auto* v : {&s.logsumexp_deviation, &s.logsumexp_flip, &s.loss_deviation, &s.loss_flip}) {
    v->assign(static_cast<size_t>(n), 0.0);
  }
  return s;
}

// Maximum that keeps a NaN.
double max_of(std::span<const double> values) {
  double largest = -kInfinity;
  for (const double value : values) {
    if (std::isnan(value)) return kNaN;
    largest = std::max(largest, value);
  }
  return largest;
}

// exp(value - max), where -inf beside a maximum of -inf is 0, not NaN.
double exp_below(double value, double max) {
  return value == -kInfinity ? (std::isnan(max) ? kNaN : 0.0) : std::exp(value - max);
}

// How many equal terms an average term finds in its own segment, itself included: they are rounded
// alike when they are added, so their errors add up instead of averaging out.
double repetition(std::span<const double> logits) {
  const auto segment = static_cast<size_t>(kSegment);
  double equal_pairs = 0.0;
  std::vector<double> sorted;
  for (size_t first = 0; first < logits.size(); first += segment) {
    const auto part = logits.subspan(first, std::min(segment, logits.size() - first));
    sorted.assign(part.begin(), part.end());
    std::sort(sorted.begin(), sorted.end());
    for (size_t i = 0, j = 0; i < sorted.size(); i = j) {
      while (j < sorted.size() && sorted[j] == sorted[i]) ++j;
      equal_pairs += static_cast<double>((j - i) * (j - i));
    }
  }
  return logits.empty() ? 1.0 : equal_pairs / static_cast<double>(logits.size());
}

// The statistics of one token from its logits: the definition. unrounded and variance only serve
// the error estimates.
void statistics_of_row(std::span<const double> logits, std::span<const double> unrounded,
                       std::span<const double> variance, std::optional<DType> rounding,
                       double reach, size_t i, Statistics& s) {
  const double max = max_of(logits);
  double sum = 0.0;
  for (const double logit : logits) sum += exp_below(logit, max);

  const bool masked = s.target_mask[i] != 0;
  const int64_t target = s.masked_target[i];
  const bool has_target = !masked && target >= 0 && target < static_cast<int64_t>(logits.size());
  double predicted = 0.0;
  if (has_target) {
    // NaN where the maximum is infinite or NaN, except that -inf beside -inf is 0.
    predicted = max == -kInfinity ? 0.0 : logits[static_cast<size_t>(target)] - max;
  } else if (!masked && !logits.empty()) {
    // The target's id is on this shard, its row is not: as if its logit were 0.
    predicted = max == -kInfinity ? 0.0 : 0.0 - max;
  }
  s.logits_max.value[i] = max;
  s.sum_exp_logits.value[i] = sum;
  s.predicted_logits.value[i] = predicted;
  if (!std::isfinite(max) || !(sum > 0.0)) return;

  // Error estimates, p = exp(logit - max) / sum. With rounded logits the float error of a logit
  // either vanishes or becomes a flip by one step of the type.
  const auto at_max =
      static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const double own = exp_sum_variance(static_cast<double>(logits.size()), repetition(logits));
  double sum_variance = own;
  double loss_variance = 0.0, logsumexp_variance = 0.0;
  double sum_flip = 0.0, logsumexp_flip = 0.0, max_flip = 0.0, target_flip = 0.0;
  for (size_t v = 0; v < logits.size(); ++v) {
    const double p = exp_below(logits[v], max) / sum;
    const bool is_target = has_target && static_cast<int64_t>(v) == target;
    if (rounding) {
      const RoundedLogit r = round_logit(*rounding, unrounded[v], reach * std::sqrt(variance[v]));
      if (r.other == r.value) continue;
      const double change = std::abs(std::expm1(r.other - r.value)) * p;
      logsumexp_flip += change;
      sum_flip += change;
      if (v == at_max || r.other > max) {
        const double shift = std::abs(r.other - max);
        max_flip = std::max(max_flip, shift);
      }
      if (is_target) target_flip = std::abs(r.other - r.value);
      continue;
    }
    const double from_max = v == at_max ? 1.0 - p : p;
    sum_variance += from_max * from_max * variance[v];
    logsumexp_variance += p * p * variance[v];
    const double from_loss = is_target ? 1.0 - p : p;
    loss_variance += from_loss * from_loss * variance[v];
  }
  // Another maximum rescales the whole sum.
  if (max_flip > 0.0) sum_flip += std::expm1(max_flip);
  s.logits_max.deviation[i] = rounding ? 0.0 : std::sqrt(variance[at_max]);
  s.logits_max.flip[i] = max_flip;
  s.sum_exp_logits.deviation[i] = std::sqrt(sum_variance);
  s.sum_exp_logits.flip[i] = sum_flip;
  const bool target_is_max = has_target && target == static_cast<int64_t>(at_max);
  if (has_target && !target_is_max) {
    s.predicted_logits.deviation[i] =
        rounding ? 0.0 : std::sqrt(variance[static_cast<size_t>(target)] + variance[at_max]);
  } else if (!has_target && !masked) {
    s.predicted_logits.deviation[i] = s.logits_max.deviation[i];
  }
  s.predicted_logits.flip[i] = masked ? 0.0 : target_flip + max_flip;
  s.logsumexp_deviation[i] = std::sqrt(logsumexp_variance + own);
  s.logsumexp_flip[i] = logsumexp_flip;
  s.loss_deviation[i] = std::sqrt(loss_variance + own);
  s.loss_flip[i] = logsumexp_flip + target_flip;
}

std::optional<DType> rounding_type(LogitsRounding rounding, DType type) {
  // Float sums are floats already.
  if (rounding == LogitsRounding::operand && type != DType::f32) return type;
  return {};
}

}  // namespace

// ---- reading views, public --------------------------------------------------------------------

double element(const ConstVectorView& view, int64_t i) {
  return load(view.data, view.dtype, i * view.stride);
}

double element(const ConstMatrixView& view, int64_t row, int64_t col) {
  return load(view.data, view.dtype, row * view.row_stride + col * view.col_stride);
}

std::vector<double> read(const ConstVectorView& view) {
  std::vector<double> result(static_cast<size_t>(view.size));
  for (int64_t i = 0; i < view.size; ++i) result[static_cast<size_t>(i)] = element(view, i);
  return result;
}

std::vector<int64_t> read_indices(const ConstVectorView& view) {
  std::vector<int64_t> result(static_cast<size_t>(view.size));
  for (int64_t i = 0; i < view.size; ++i) result[static_cast<size_t>(i)] = load_index(view, i);
  return result;
}

std::vector<uint8_t> read(const ConstMaskView& view) {
  const auto* bytes = static_cast<const uint8_t*>(view.data);
  std::vector<uint8_t> result(static_cast<size_t>(view.size));
  for (int64_t b = 0; b < view.size; ++b) {
    const bool outside = view.layout == MaskLayout::packed_lsb_first
                             ? (bytes[b / 8 * view.stride] >> (b % 8)) & 1
                             : bytes[b * view.stride] != 0;
    result[static_cast<size_t>(b)] = outside ? 1 : 0;
  }
  return result;
}

Matrix read(const ConstMatrixView& view, std::optional<DType> multiply) {
  return read_rows(view, all_rows(view.rows), multiply);
}

std::vector<int64_t> all_rows(int64_t n) {
  std::vector<int64_t> rows(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) rows[static_cast<size_t>(i)] = i;
  return rows;
}

// ---- forward ----------------------------------------------------------------------------------

Logits logits(const ConstMatrixView& input, const ConstMatrixView& weight,
              const ForwardOptions& options, std::span<const int64_t> tokens) {
  const DType multiply = options.multiply.value_or(input.dtype);
  const auto rounding = rounding_type(options.logits_rounding, multiply);
  const Matrix rows = read_rows(input, tokens, multiply);
  const Matrix rows_squared = squared(rows);
  Logits result;
  result.unrounded = Matrix(rows.rows, weight.rows);
  result.deviation = Matrix(rows.rows, weight.rows);
  const std::vector<int64_t> vocabulary = all_rows(weight.rows);
  for (int64_t v0 = 0; v0 < weight.rows; v0 += kVocabularyChunk) {
    const int64_t v1 = std::min(v0 + kVocabularyChunk, weight.rows);
    const Matrix chunk = read_rows(weight, slice(vocabulary, v0, v1), multiply);
    const LogitsBlock block = logits_of(rows, rows_squared, chunk);
    for (int64_t i = 0; i < rows.rows; ++i) {
      for (int64_t v = v0; v < v1; ++v) {
        result.unrounded(i, v) = block.value(i, v - v0);
        result.deviation(i, v) = std::sqrt(block.variance(i, v - v0));
      }
    }
  }
  result.value = result.unrounded;
  if (rounding) {
    for (double& value : result.value.values) value = round_to(*rounding, value);
  }
  return result;
}

Statistics forward(const ConstMatrixView& input, const ConstMatrixView& weight,
                   const ConstVectorView& target, const ForwardOptions& options,
                   std::optional<std::vector<int64_t>> tokens) {
  Statistics s = empty_statistics(tokens ? std::move(*tokens) : all_rows(input.rows));
  const auto n = static_cast<int64_t>(s.tokens.size());
  const int64_t start = options.vocab_start_index;
  const int64_t end = options.vocab_end_index.value_or(start + weight.rows);
  const auto rounding =
      rounding_type(options.logits_rounding, options.multiply.value_or(input.dtype));
  const double reach = kMargin * spread(static_cast<double>(n) * static_cast<double>(weight.rows));

  for (size_t i = 0; i < s.tokens.size(); ++i) {
    const int64_t id = load_index(target, s.tokens[i]);
    const bool ignored = options.rows.ignore_index && id == *options.rows.ignore_index;
    const bool dropped = options.rows.counts && load_index(*options.rows.counts, s.tokens[i]) == 0;
    s.counts[i] = ignored || dropped ? 0 : 1;
    s.target_mask[i] = id < start || id >= end || !s.counts[i] ? 1 : 0;
    s.masked_target[i] = s.target_mask[i] ? 0 : id - start;
  }

  for (int64_t b0 = 0; b0 < n; b0 += kTokenBlock) {
    const int64_t b1 = std::min(b0 + kTokenBlock, n);
    const Logits block = logits(input, weight, options, slice(s.tokens, b0, b1));
    // exp and a sort cost about 30 steps per logit.
#pragma omp parallel for schedule(static) if ((b1 - b0) * weight.rows * 30 > kParallelWork)
    for (int64_t b = b0; b < b1; ++b) {
      const auto i = static_cast<size_t>(b);
      if (!s.counts[i]) {
        // The neutral element of merging.
        s.logits_max.value[i] = -kInfinity;
        continue;
      }
      std::vector<double> variance(static_cast<size_t>(weight.rows));
      for (int64_t v = 0; v < weight.rows; ++v) {
        const double deviation = block.deviation(b - b0, v);
        variance[static_cast<size_t>(v)] = deviation * deviation;
      }
      const auto size = static_cast<size_t>(weight.rows);
      const DType multiply = options.multiply.value_or(input.dtype);
      if (size > 0) {
        const double* row = block.value.row(b - b0);
        const int64_t at_max = std::max_element(row, row + weight.rows) - row;
        variance[static_cast<size_t>(at_max)] =
            logit_path_variance(input, weight, multiply, s.tokens[i], at_max);
        const int64_t own = s.masked_target[i];
        if (!s.target_mask[i] && own < weight.rows) {
          variance[static_cast<size_t>(own)] =
              logit_path_variance(input, weight, multiply, s.tokens[i], own);
        }
      }
      statistics_of_row({block.value.row(b - b0), size}, {block.unrounded.row(b - b0), size},
                        variance, rounding, reach, i, s);
    }
  }
  return s;
}

// ---- merge, loss ------------------------------------------------------------------------------

Statistics merge(std::span<const Statistics> shards) {
  if (shards.empty()) return {};
  Statistics merged = empty_statistics(shards.front().tokens);
  for (size_t i = 0; i < merged.tokens.size(); ++i) {
    std::vector<double> maxima;
    for (const Statistics& shard : shards) maxima.push_back(shard.logits_max.value[i]);
    const double max = max_of(maxima);
    double sum = 0.0, predicted = 0.0;
    bool owned = false, counts = false;
    for (const Statistics& shard : shards) {
      const double local = shard.logits_max.value[i];
      sum += shard.sum_exp_logits.value[i] * exp_below(local, max);
      counts = counts || shard.counts[i];
      if (shard.target_mask[i]) continue;
      owned = true;
      merged.masked_target[i] = shard.masked_target[i];
      // A shard of -inf only: its target's logit is -inf, unless all shards are.
      const double shift = local == max ? 0.0 : local - max;
      predicted += shard.predicted_logits.value[i] + shift;
    }
    merged.logits_max.value[i] = max;
    merged.sum_exp_logits.value[i] = sum;
    merged.predicted_logits.value[i] = predicted;
    merged.target_mask[i] = owned ? 0 : 1;
    merged.counts[i] = counts ? 1 : 0;

    // Each shard's errors, weighted with its share of the sum. Sums are relative to a maximum, and
    // so are their errors: what a shard's own maximum is off by cancels in sum * exp(local - max),
    // and one shard, the first that holds the maximum, is not rebased at all. Two errors that share
    // a logit add up; all others are independent.
    const auto owner = static_cast<size_t>(std::ranges::find(maxima, max) - maxima.begin());
    const double max_deviation =
        owner < shards.size() ? shards[owner].logits_max.deviation[i] : 0.0;
    double sum_variance = 0.0, logsumexp_variance = 0.0, loss_variance = 0.0;
    double predicted_deviation = 0.0, target_flip = 0.0;
    for (size_t r = 0; r < shards.size(); ++r) {
      const Statistics& shard = shards[r];
      const double local = shard.logits_max.value[i];
      const double share =
          sum > 0.0 ? shard.sum_exp_logits.value[i] * exp_below(local, max) / sum : 0.0;
      const double exp_error =
          r == owner ? 0.0 : exp_variance(std::isfinite(local - max) ? local - max : 0.0);
      const double of_logsumexp =
          share * share * (std::pow(shard.logsumexp_deviation[i], 2) + exp_error);
      logsumexp_variance += of_logsumexp;
      // All other terms are relative to the owner's maximum too.
      sum_variance +=
          r == owner
              ? std::pow(share * shard.sum_exp_logits.deviation[i] + (1.0 - share) * max_deviation,
                         2)
              : of_logsumexp;
      merged.logits_max.flip[i] = std::max(merged.logits_max.flip[i], shard.logits_max.flip[i]);
      merged.sum_exp_logits.flip[i] +=
          share * (shard.sum_exp_logits.flip[i] + std::expm1(shard.logits_max.flip[i]));
      merged.logsumexp_flip[i] += share * shard.logsumexp_flip[i];
      if (shard.target_mask[i]) {
        loss_variance += of_logsumexp;
        continue;
      }
      const double own_max = shard.logits_max.deviation[i];
      const double predicted_of_shard = shard.predicted_logits.deviation[i];
      // The shift by (local - max) is rounded, and so is the sum with it.
      const double shift = r == owner ? 0.0 : unit_roundoff(DType::f32) * predicted;
      // The target's logit is off by no more than its distance to the maximum is, unless it is
      // that.
      const double logit = std::max(predicted_of_shard, own_max);
      predicted_deviation =
          r == owner ? predicted_of_shard
                     : std::sqrt(logit * logit + max_deviation * max_deviation + shift * shift);
      loss_variance += std::pow(share * shard.loss_deviation[i] + (1.0 - share) * logit, 2) +
                       share * share * exp_error + shift * shift;
      target_flip = shard.predicted_logits.flip[i] + shard.logits_max.flip[i];
    }
    if (std::isfinite(max)) {
      merged.logits_max.deviation[i] = max_deviation;
      merged.sum_exp_logits.deviation[i] = std::sqrt(sum_variance);
      merged.logsumexp_deviation[i] = std::sqrt(logsumexp_variance);
      merged.loss_deviation[i] = std::sqrt(loss_variance);
      merged.predicted_logits.deviation[i] = predicted_deviation;
      if (owned) merged.predicted_logits.flip[i] = target_flip + merged.logits_max.flip[i];
    }
    merged.loss_flip[i] = merged.logsumexp_flip[i] + target_flip;
  }
  return merged;
}

double loss(double logits_max, double sum_exp_logits, double predicted_logits) {
  if (logits_max == -kInfinity) return kNaN;
  return std::log(sum_exp_logits) - predicted_logits;
}

double softmax(double logit, double logits_max, double sum_exp_logits) {
  return std::exp(logit - logits_max) / sum_exp_logits;
}

Loss loss(const Statistics& merged) {
  Loss result;
  const auto n = static_cast<int64_t>(merged.tokens.size());
  reserve(result.loss, n);
  reserve(result.logsumexp, n);
  for (size_t i = 0; i < merged.tokens.size(); ++i) {
    if (!merged.counts[i]) continue;
    const double max = merged.logits_max.value[i];
    const double sum = merged.sum_exp_logits.value[i];
    result.loss.value[i] = loss(max, sum, merged.predicted_logits.value[i]);
    result.loss.deviation[i] = merged.loss_deviation[i];
    result.loss.flip[i] = merged.loss_flip[i];
    result.logsumexp.value[i] = std::log(sum) + max;
    result.logsumexp.deviation[i] = merged.logsumexp_deviation[i];
    result.logsumexp.flip[i] = merged.logsumexp_flip[i];
  }
  return result;
}

// ---- gradient ---------------------------------------------------------------------------------

namespace {

// A block of grad_logits [tokens, vocabulary rows] and what an implementation's error in each
// element amounts to when it enters the two products.
struct GradLogitsBlock {
  Matrix value;
  Matrix variance;
  Matrix rounding;  // what rounding to the operands' 16-bit type adds to the exact value
};

double largest_grad_of(const GradientOperands& operands, int64_t token) {
  const auto b = static_cast<size_t>(token);
  const double extra = operands.grad_logsumexp.empty() ? 0.0 : std::abs(operands.grad_logsumexp[b]);
  return std::max(std::abs(operands.grad[b]), extra);
}

bool contributes(const GradientOperands& operands, int64_t token) {
  const auto b = static_cast<size_t>(token);
  if (!operands.counts.empty() && operands.counts[b] == 0) return false;
  return operands.grad[b] != 0.0 ||
         (!operands.grad_logsumexp.empty() && operands.grad_logsumexp[b] != 0.0);
}

bool is_target(const GradientOperands& operands, int64_t token, int64_t v) {
  const auto b = static_cast<size_t>(token);
  const bool masked = !operands.target_mask.empty() && operands.target_mask[b] != 0;
  return !masked && operands.masked_target[b] == v;
}

// The rounding that the statistics of a token were made with.
std::optional<DType> rounding_of_token(const GradientOperands& operands,
                                       const GradientOptions& options, int64_t token) {
  const DType type = options.multiply.value_or(operands.input.dtype);
  if (options.logits_rounding != LogitsRounding::infer) {
    return rounding_type(options.logits_rounding, type);
  }
  const double max = operands.logits_max[static_cast<size_t>(token)];
  return rounding_type(round_to(type, max) == max ? LogitsRounding::operand : LogitsRounding::none,
                       type);
}

// grad_logits of the listed tokens and vocabulary rows: the definition. weight and input hold these
// rows in double.
GradLogitsBlock grad_logits_of(const GradientOperands& operands, const GradientOptions& options,
                               std::span<const int64_t> tokens, const Matrix& input,
                               const Matrix& input_squared, std::span<const int64_t> vocabulary,
                               const Matrix& weight) {
  const DType multiply = options.multiply.value_or(operands.input.dtype);
  const bool recomputes = !operands.softmax.has_value();
  LogitsBlock logits_block;
  if (recomputes) logits_block = logits_of(input, input_squared, weight);
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  const auto n_vocabulary = static_cast<int64_t>(vocabulary.size());
  GradLogitsBlock block{Matrix(n_tokens, n_vocabulary), Matrix(n_tokens, n_vocabulary),
                        Matrix(n_tokens, n_vocabulary)};
  const double reach = kMargin * spread(static_cast<double>(operands.input.rows) *
                                        static_cast<double>(operands.weight.rows));

  // exp and the error estimates cost about 30 steps per element.
#pragma omp parallel for schedule(static) if (n_tokens * n_vocabulary * 30 > kParallelWork)
  for (int64_t i = 0; i < n_tokens; ++i) {
    const int64_t b = tokens[static_cast<size_t>(i)];
    if (!contributes(operands, b)) continue;  // exactly 0, whatever the operands hold
    const double grad = operands.grad[static_cast<size_t>(b)];
    const double grad_logsumexp =
        operands.grad_logsumexp.empty() ? 0.0 : operands.grad_logsumexp[static_cast<size_t>(b)];
    const auto rounding =
        recomputes ? rounding_of_token(operands, options, b) : std::optional<DType>();
    GradLogitsError error;
    error.multiply = multiply;
    error.scale = std::abs(grad + grad_logsumexp);
    const double scale_from = largest_grad_of(operands, b);
    error.underflow = grad_logits_underflow(multiply, scale_from);
    const double f16_scale = multiply == DType::f16 && std::isfinite(scale_from)
                                 ? std::exp2(-std::ilogb(scale_from))
                                 : 1.0;
    for (int64_t j = 0; j < n_vocabulary; ++j) {
      const int64_t v = vocabulary[static_cast<size_t>(j)];
      double p = 0.0;
      error.flip = 0.0;
      error.softmax_variance = 0.0;
      if (recomputes) {
        const double max = operands.logits_max[static_cast<size_t>(b)];
        const double sum = operands.sum_exp_logits[static_cast<size_t>(b)];
        double logit = logits_block.value(i, j);
        const double logit_error = logits_block.variance(i, j);
        if (rounding) {
          const RoundedLogit r = round_logit(*rounding, logit, reach * std::sqrt(logit_error));
          logit = r.value;
          error.flip = std::abs(softmax(r.other, max, sum) - softmax(r.value, max, sum));
        }
        p = softmax(logit, max, sum);
        error.softmax_variance = (rounding ? 0.0 : logit_error) + exp_variance(logit - max);
      } else {
        p = element(*operands.softmax, b, v);
      }
      const double one = is_target(operands, b, v) ? 1.0 : 0.0;
      if (options.held_softmax && one == 0.0) {
        const double held = unit_roundoff(*options.held_softmax);
        error.softmax_variance += held * held / 3.0;
      }
      const double value = (p - one) * grad + p * grad_logsumexp;
      block.value(i, j) = value;
      error.value = value;
      error.softmax = p;
      error.logsumexp_part = p * grad_logsumexp;
      if (!std::isfinite(value)) continue;
      block.variance(i, j) = grad_logits_variance(error);
      if (multiply != DType::f32) {
        block.rounding(i, j) = round_to(multiply, value * f16_scale) / f16_scale - value;
      }
    }
  }
  return block;
}

// Sums over one product with grad_logits besides its value.
struct ErrorSums {
  Matrix variance;  // of variance * factor^2
  Matrix squares;   // of squared products; only where operands are multiplied as floats, else the
                    // float additions are lost in the rounding of grad_logits
  Matrix rounding;  // of rounding * factor; only where they are not

  ErrorSums(int64_t rows, int64_t cols)
      : variance(rows, cols), squares(rows, cols), rounding(rows, cols) {}
};

// c += g . factor with everything its errors need.
void add_gradient(const GradLogitsBlock& g, const Matrix& factor, DType multiply, Matrix& value,
                  ErrorSums& sums) {
  const Matrix factor_squared = squared(factor);
  add_product(g.value, factor, value);
  add_product(g.variance, factor_squared, sums.variance);
  if (multiply == DType::f32) {
    add_product(squared(g.value), factor_squared, sums.squares);
  } else {
    add_product(g.rounding, factor, sums.rounding);
  }
}

// The roundings of grad_logits are taken as independent (`deviation`). Where many elements are
// equal they are not, their errors add up: what they really add beyond 4 deviations, which spread()
// always allows, is added to `bias`.
void finish_errors(int64_t terms, const ErrorSums& sums, Gradient& gradient) {
  for (size_t e = 0; e < gradient.value.values.size(); ++e) {
    double& deviation = gradient.deviation.values[e];
    deviation += sums.variance.values[e] + product_sum_variance(static_cast<double>(terms),
                                                                gradient.value.values[e],
                                                                sums.squares.values[e]);
    deviation = std::isfinite(deviation) ? std::sqrt(deviation) : 0.0;
    const double common = std::abs(sums.rounding.values[e]);
    if (common > 4.0 * deviation) gradient.bias.values[e] += common - 4.0 * deviation;
  }
}

// Adds block to the rows of `all` from `first` on.
void add_rows(const Matrix& block, int64_t first, Matrix& all) {
  for (int64_t r = 0; r < block.rows; ++r) {
    for (int64_t c = 0; c < block.cols; ++c) all(first + r, c) += block(r, c);
  }
}

Gradient empty_gradient(std::vector<int64_t> rows, int64_t cols) {
  Gradient g;
  const auto n = static_cast<int64_t>(rows.size());
  g.rows = std::move(rows);
  g.value = Matrix(n, cols);
  g.deviation = Matrix(n, cols);
  g.bias = Matrix(n, cols);
  return g;
}

}  // namespace

Gradient grad_input(const GradientOperands& operands, const GradientOptions& options,
                    std::optional<std::vector<int64_t>> tokens) {
  const DType multiply = options.multiply.value_or(operands.input.dtype);
  const int64_t V = operands.weight.rows, H = operands.weight.cols;
  const std::vector<int64_t> wanted = tokens ? std::move(*tokens) : all_rows(operands.input.rows);
  Gradient result = empty_gradient(wanted, H);
  const std::vector<int64_t> vocabulary = all_rows(V);
  // Tokens are blocked as widely as memory allows: each block reads all of weight.
  constexpr int64_t kWideBlock = 16 * kTokenBlock;

  for (int64_t first = 0; first < result.value.rows; first += kWideBlock) {
    // Rows that do not count stay 0 and are not read.
    std::vector<int64_t> places, block_tokens;
    for (int64_t i = first; i < std::min(first + kWideBlock, result.value.rows); ++i) {
      if (!contributes(operands, wanted[static_cast<size_t>(i)])) continue;
      places.push_back(i);
      block_tokens.push_back(wanted[static_cast<size_t>(i)]);
    }
    Gradient block = empty_gradient(block_tokens, H);
    ErrorSums sums(block.value.rows, H);
    const Matrix input = read_rows(operands.input, block_tokens, multiply);
    const Matrix input_squared = squared(input);
    for (int64_t v0 = 0; v0 < V; v0 += kVocabularyChunk) {
      const auto chunk = slice(vocabulary, v0, std::min(v0 + kVocabularyChunk, V));
      const Matrix weight = read_rows(operands.weight, chunk, multiply);
      const GradLogitsBlock g =
          grad_logits_of(operands, options, block_tokens, input, input_squared, chunk, weight);
      add_gradient(g, weight, multiply, block.value, sums);
    }
    for (int64_t i = 0; i < block.value.rows; ++i) {
      const int64_t b = block_tokens[static_cast<size_t>(i)];
      const auto at = static_cast<size_t>(b);
      const double grad = operands.grad[at];
      const bool has_target = operands.target_mask.empty() || !operands.target_mask[at];
      const int64_t target = operands.masked_target[at];
      // An error common to a row of softmax (1 / sum, a drift of exp, the statistics) moves
      // sum_v softmax * weight * grad as a whole.
      const double common = kExpError + 2.0 * unit_roundoff(DType::f32);
      const double statistics =
          operands.logsumexp_deviation.empty() ? 0.0 : operands.logsumexp_deviation[at];
      for (int64_t h = 0; h < H; ++h) {
        double softmax_sum = block.value(i, h);
        if (has_target && target >= 0 && target < V) {
          double w = element(operands.weight, target, h);
          softmax_sum += grad * round_to(multiply, w);
        }
        if (!std::isfinite(softmax_sum)) continue;
        if (!operands.softmax) block.bias(i, h) = common * std::abs(softmax_sum);
        block.deviation(i, h) += statistics * statistics * softmax_sum * softmax_sum;
      }
    }
    finish_errors(V, sums, block);
    for (int64_t i = 0; i < block.value.rows; ++i) {
      const int64_t place = places[static_cast<size_t>(i)];
      std::copy_n(block.value.row(i), H, result.value.row(place));
      std::copy_n(block.deviation.row(i), H, result.deviation.row(place));
      std::copy_n(block.bias.row(i), H, result.bias.row(place));
    }
  }
  return result;
}

Gradient grad_weight(const GradientOperands& operands, const GradientOptions& options,
                     std::optional<std::vector<int64_t>> vocabulary) {
  const DType multiply = options.multiply.value_or(operands.input.dtype);
  const int64_t BT = operands.input.rows, H = operands.input.cols;
  Gradient result =
      empty_gradient(vocabulary ? std::move(*vocabulary) : all_rows(operands.weight.rows), H);
  ErrorSums sums(result.value.rows, H);

  std::vector<int64_t> tokens;
  for (int64_t b = 0; b < BT; ++b) {
    if (contributes(operands, b)) tokens.push_back(b);
  }
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  for (int64_t b0 = 0; b0 < n_tokens; b0 += kVocabularyChunk) {
    const auto chunk_tokens = slice(tokens, b0, std::min(b0 + kVocabularyChunk, n_tokens));
    const Matrix input = read_rows(operands.input, chunk_tokens, multiply);
    const Matrix input_squared = squared(input);
    for (int64_t r0 = 0; r0 < result.value.rows; r0 += kVocabularyChunk) {
      const int64_t r1 = std::min(r0 + kVocabularyChunk, result.value.rows);
      const auto chunk = slice(result.rows, r0, r1);
      const Matrix weight = read_rows(operands.weight, chunk, multiply);
      GradLogitsBlock g =
          grad_logits_of(operands, options, chunk_tokens, input, input_squared, chunk, weight);
      if (!operands.logsumexp_deviation.empty()) {
        // One error per token: independent along this sum.
        for (int64_t i = 0; i < g.value.rows; ++i) {
          const int64_t b = chunk_tokens[static_cast<size_t>(i)];
          const double deviation = operands.logsumexp_deviation[static_cast<size_t>(b)];
          for (int64_t j = 0; j < g.value.cols; ++j) {
            const double one = is_target(operands, b, chunk[static_cast<size_t>(j)]) ? 1.0 : 0.0;
            const double softmax_part = g.value(i, j) + one * operands.grad[static_cast<size_t>(b)];
            if (std::isfinite(softmax_part)) {
              g.variance(i, j) += deviation * deviation * softmax_part * softmax_part;
            }
          }
        }
      }
      const GradLogitsBlock transposed_g{transposed(g.value), transposed(g.variance),
                                         transposed(g.rounding)};
      Matrix value(r1 - r0, H);
      ErrorSums block_sums(r1 - r0, H);
      add_gradient(transposed_g, input, multiply, value, block_sums);
      add_rows(value, r0, result.value);
      add_rows(block_sums.variance, r0, sums.variance);
      add_rows(block_sums.squares, r0, sums.squares);
      add_rows(block_sums.rounding, r0, sums.rounding);
    }
  }
  finish_errors(n_tokens, sums, result);
  return result;
}

}  // namespace logitless::reference
