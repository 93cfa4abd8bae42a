// SPDX-License-Identifier: Apache-2.0
#include "reference/sparse_gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
// Fewer elementary steps than this are not worth waking other threads for.
constexpr int64_t kParallelWork = 1 << 20;

uint64_t mix64(uint64_t z) {
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9;
  z ^= z >> 27;
  z *= 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double relative_distance(double value, double limit) {
  if (value == limit) return 0.0;
  return std::abs(value - limit) / std::max(std::abs(value), std::abs(limit));
}

// The sum of those p that are < tau, the target's left out.
double mass_below(std::span<const double> softmax, int64_t target, double tau) {
  double sum = 0.0;
  for (size_t v = 0; v < softmax.size(); ++v) {
    if (static_cast<int64_t>(v) != target && softmax[v] < tau) sum += softmax[v];
  }
  return sum;
}

// 64 signs for each of `count` rows or columns.
Matrix random_signs(int64_t count, uint64_t seed) {
  Matrix signs(count, BiasCheck::kRandomDirections);
  for (int64_t i = 0; i < count; ++i) {
    uint64_t bits = mix64(mix64(seed + kGolden) + static_cast<uint64_t>(i));
    for (int64_t k = 0; k < signs.cols; ++k, bits >>= 1) signs(i, k) = (bits & 1) != 0 ? 1.0 : -1.0;
  }
  return signs;
}

}  // namespace

// ---- the choice -------------------------------------------------------------------------------

uint32_t sparse_token_hash(uint64_t seed, int64_t token_id) {
  const uint64_t start = mix64(seed + kGolden);
  return static_cast<uint32_t>(mix64(start + static_cast<uint64_t>(token_id)) >> 32);
}

uint32_t sparse_vocab_hash(uint64_t seed, int64_t vocab_id) {
  const uint64_t start = mix64(seed + 2 * kGolden);
  return static_cast<uint32_t>(mix64(start + static_cast<uint64_t>(vocab_id)) >> 32);
}

double sparse_uniform(uint32_t token_hash, uint32_t vocab_hash) {
  const uint32_t x = (token_hash ^ vocab_hash) * 0x9E3779B1U;
  return static_cast<double>(static_cast<float>(static_cast<int32_t>(x >> 1))) * 0x1p-31;
}

// ---- one row ----------------------------------------------------------------------------------

SparseRule sparse_rule(std::span<const double> softmax, int64_t target, double eps) {
  SparseRule rule;
  rule.rest = mass_below(softmax, target, kInfinity);
  const double limit = eps * rule.rest * eps * rule.rest;
  rule.tau_distance = kInfinity;
  double below = 0.0;
  for (rule.tau = 1.0;; rule.tau /= 2.0) {
    below = mass_below(softmax, target, rule.tau);
    const double product = rule.tau * below;
    // Of the products on either side of the limit the nearest ones are the last two.
    if (product > 0.0) {
      const double distance = relative_distance(product, limit);
      rule.tau_distance = product <= limit ? std::min(rule.tau_distance, distance) : distance;
    }
    if (product <= limit) break;
  }
  double variance = 0.0;
  if (target >= 0 && target < static_cast<int64_t>(softmax.size())) rule.expected_kept = 1.0;
  for (size_t v = 0; v < softmax.size(); ++v) {
    if (static_cast<int64_t>(v) == target) continue;
    const double p = softmax[v];
    for (const double edge : {rule.tau, 2.0 * rule.tau}) {
      rule.tau_distance = std::min(rule.tau_distance, relative_distance(p, edge));
    }
    if (p >= rule.tau) {
      rule.expected_kept += 1.0;
    } else {
      rule.expected_kept += p / rule.tau;
      variance += p * (rule.tau - p);
    }
  }
  rule.deviation = std::sqrt(variance);
  return rule;
}

namespace {

// The expected number of kept elements, were the sampled columns all there is, each so many times.
double sampled_kept(std::span<const double> logits, int64_t target, double eps, int64_t stride) {
  std::vector<double> sample;
  double max = -kInfinity, sum = 0.0;
  for (int64_t v = 0; v < static_cast<int64_t>(logits.size()); v += stride) {
    if (v == target) continue;
    sample.push_back(logits[static_cast<size_t>(v)]);
    max = std::max(max, sample.back());
  }
  if (!std::isfinite(max)) return 0.0;
  const auto each = static_cast<double>(stride);
  for (double& p : sample) {
    p = std::exp(p - max);
    sum += each * p;
  }
  for (double& p : sample) p /= sum;
  // Of the sample's own softmax, where rest is 1: each column stands for `stride` of them.
  for (double tau = 1.0;; tau /= 2.0) {
    double below = 0.0, above = 0.0;
    for (const double p : sample) (p < tau ? below : above) += p < tau ? each * p : each;
    if (tau * below <= eps * eps) return above + below / tau;
  }
}

}  // namespace

DenseRule dense_rule(std::span<const double> logits, int64_t target, double eps,
                     const SparseRule& rule) {
  constexpr int64_t kLeastSampled = 2048;
  const auto V = static_cast<int64_t>(logits.size());
  const double limit = 0.2 * static_cast<double>(V);
  DenseRule dense;
  // The target may be counted or not.
  dense.may_be_dense = rule.expected_kept > 0.75 * limit;
  dense.may_be_sparse = rule.expected_kept < 1.25 * limit + 1.5;
  if (V >= kLeastSampled) {
    const int64_t stride = std::max<int64_t>(64, (V + 1023) / 1024);
    const double flat = 0.2 * static_cast<double>(V);
    const double sampled = sampled_kept(logits, target, eps, stride);
    if (sampled > 0.8 * flat) dense.may_be_dense = true;
  }
  return dense;
}

// ---- grad_logits of a batch -------------------------------------------------------------------

SparseGradient sparse_grad_logits(const SparseOperands& operands) {
  const int64_t BT = operands.logits.rows, V = operands.logits.cols;
  SparseGradient result;
  result.value = Matrix(BT, V);
  result.expected = Matrix(BT, V);
  result.distance = Matrix(BT, V);
  result.rules.resize(static_cast<size_t>(BT));
  result.dense.resize(static_cast<size_t>(BT));
  result.not_finite.resize(static_cast<size_t>(BT));
  std::fill(result.distance.values.begin(), result.distance.values.end(), kInfinity);
  std::vector<uint32_t> vocab_hash(static_cast<size_t>(V));
  for (int64_t v = 0; v < V; ++v) {
    vocab_hash[static_cast<size_t>(v)] =
        sparse_vocab_hash(operands.seed, operands.vocab_start_index + v);
  }

#pragma omp parallel for schedule(static) if (BT * V * 32 > kParallelWork)
  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const double grad = operands.grad[i];
    if (grad == 0.0) continue;
    const int64_t target = operands.target[i];
    const double* logits = operands.logits.row(b);
    double max = -kInfinity, sum = 0.0;
    for (int64_t v = 0; v < V; ++v) max = std::max(max, logits[v]);
    for (int64_t v = 0; v < V; ++v) sum += std::exp(logits[v] - max);
    std::vector<double> softmax(static_cast<size_t>(V));
    for (int64_t v = 0; v < V; ++v) {
      softmax[static_cast<size_t>(v)] = std::exp(logits[v] - max) / sum;
    }
    if (!std::isfinite(sum)) {
      result.not_finite[i] = 1;
      for (int64_t v = 0; v < V; ++v) {
        const double one = v == target ? 1.0 : 0.0;
        result.value(b, v) = result.expected(b, v) = (softmax[static_cast<size_t>(v)] - one) * grad;
      }
      continue;
    }

    const SparseRule rule = sparse_rule(softmax, target, operands.eps);
    result.rules[i] = rule;
    result.dense[i] = dense_rule({logits, static_cast<size_t>(V)}, target, operands.eps, rule);
    const uint32_t token_hash =
        sparse_token_hash(operands.seed, operands.token_ids.empty() ? b : operands.token_ids[i]);
    for (int64_t v = 0; v < V; ++v) {
      const double p = softmax[static_cast<size_t>(v)];
      if (v == target) {
        result.value(b, v) = result.expected(b, v) = -rule.rest * grad;
        continue;
      }
      result.expected(b, v) = p * grad;
      if (p >= rule.tau) {
        result.value(b, v) = p * grad;
        continue;
      }
      const double threshold =
          rule.tau * sparse_uniform(token_hash, vocab_hash[static_cast<size_t>(v)]);
      result.value(b, v) = threshold < p ? rule.tau * grad : 0.0;
      result.distance(b, v) = p > 0.0 ? std::abs(threshold - p) / p : kInfinity;
    }
  }
  return result;
}

Matrix times(const Matrix& grad_logits, const Matrix& weight) {
  Matrix result(grad_logits.rows, weight.cols);
#pragma omp parallel for schedule(static) if (grad_logits.rows * weight.rows > kParallelWork)
  for (int64_t b = 0; b < grad_logits.rows; ++b) {
    for (int64_t v = 0; v < grad_logits.cols; ++v) {
      const double g = grad_logits(b, v);
      if (g == 0.0) continue;
      for (int64_t h = 0; h < weight.cols; ++h) result(b, h) += g * weight(v, h);
    }
  }
  return result;
}

Matrix transposed_times(const Matrix& grad_logits, const Matrix& input) {
  Matrix result(grad_logits.cols, input.cols);
#pragma omp parallel for schedule(static) if (grad_logits.cols * input.rows > kParallelWork)
  for (int64_t v = 0; v < grad_logits.cols; ++v) {
    for (int64_t b = 0; b < grad_logits.rows; ++b) {
      const double g = grad_logits(b, v);
      if (g == 0.0) continue;
      for (int64_t h = 0; h < input.cols; ++h) result(v, h) += g * input(b, h);
    }
  }
  return result;
}

// ---- unbiased or not --------------------------------------------------------------------------

BiasCheck::BiasCheck(Matrix expected, std::vector<double> rounding, Rows rows)
    : expected_(std::move(expected)),
      row_signs_(random_signs(expected_.rows, 1)),
      column_signs_(random_signs(expected_.cols, 2)),
      allowed_(kDirections),
      sum_(kDirections),
      squares_(kDirections) {
  constexpr double kFloatRounding = 0x1p-20;
  constexpr double kLeastPrecision = 0x1p-10;
  std::vector<double> lengths;
  double whole = 0.0;
  for (int64_t r = 0; r < expected_.rows; ++r) {
    double squares = 0.0;
    for (int64_t c = 0; c < expected_.cols; ++c) squares += expected_(r, c) * expected_(r, c);
    lengths.push_back(std::sqrt(squares));
    if (std::isfinite(squares)) whole += squares;
  }
  double total = 0.0, squares = 0.0;
  for (int64_t r = 0; r < expected_.rows; ++r) {
    const double length = lengths[static_cast<size_t>(r)];
    const double wrong =
        rounding.empty() ? kFloatRounding * length : rounding[static_cast<size_t>(r)];
    if (!(length > 0.0) || !std::isfinite(length) || !(wrong < kLeastPrecision * length)) continue;
    const double scale = 1.0 / (rows == Rows::alike ? length : std::sqrt(whole));
    used_.push_back(r);
    scale_.push_back(scale);
    total += wrong * scale * length * scale;
    squares += wrong * scale * wrong * scale;
  }
  // Along the gradient itself rounding may add up; along random directions it averages out.
  allowed_[0] = total;
  constexpr double kDeviations = 5.0;
  for (int k = 1; k < kDirections; ++k) {
    allowed_[static_cast<size_t>(k)] = kDeviations * std::sqrt(squares);
  }
}

void BiasCheck::add(const Matrix& got) {
  double along[kDirections] = {};
  for (size_t u = 0; u < used_.size(); ++u) {
    const int64_t r = used_[u];
    double of_row[kRandomDirections] = {};
    for (int64_t c = 0; c < expected_.cols; ++c) {
      const double error = (got(r, c) - expected_(r, c)) * scale_[u];
      along[0] += error * expected_(r, c) * scale_[u];
      const double* signs = column_signs_.row(c);
      for (int k = 0; k < kRandomDirections; ++k) of_row[k] += error * signs[k];
    }
    for (int k = 0; k < kRandomDirections; ++k) along[k + 1] += of_row[k] * row_signs_(r, k);
  }
  for (int k = 0; k < kDirections; ++k) {
    sum_[static_cast<size_t>(k)] += along[k];
    squares_[static_cast<size_t>(k)] += along[k] * along[k];
  }
  ++samples_;
}

double BiasCheck::errors(int direction) const {
  const auto k = static_cast<size_t>(direction);
  const auto n = static_cast<double>(samples_);
  if (samples_ < 2) return 0.0;
  const double mean = sum_[k] / n;
  if (!std::isfinite(mean)) return kInfinity;
  const double beyond = std::max(0.0, std::abs(mean) - allowed_[k]);
  if (beyond == 0.0) return 0.0;
  const double variance = std::max(0.0, (squares_[k] - n * mean * mean) / (n - 1.0));
  // Where all seeds give the same, what is left of the variance is the cancellation of two sums.
  const double standard_error = std::sqrt(variance / n);
  if (!(variance > 1e-12 * mean * mean)) return kInfinity;
  return beyond / standard_error;
}

double BiasCheck::worst() const {
  double most = 0.0;
  for (int k = 0; k < kDirections; ++k) most = std::max(most, errors(k));
  return most;
}

}  // namespace logitless::reference
