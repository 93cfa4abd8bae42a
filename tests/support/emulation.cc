// SPDX-License-Identifier: Apache-2.0
#include "tests/support/emulation.h"

#include <algorithm>
#include <cmath>

namespace logitless::test {
namespace {

float rounded(DType type, float value) {
  switch (type) {
    case DType::f16:
      return static_cast<float>(float16(value));
    case DType::bf16:
      return static_cast<float>(bfloat16(value));
    case DType::f32:
    case DType::i32:
    case DType::i64:
    case DType::u8:
      break;
  }
  return value;
}

struct FloatMatrix {
  int64_t rows, cols;
  std::vector<float> values;
  float& operator()(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
  float operator()(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
};

FloatMatrix floats(const TestTensor& t, DType type) {
  FloatMatrix m{t.rows(), t.cols(), std::vector<float>(static_cast<size_t>(t.rows() * t.cols()))};
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) m(r, c) = rounded(type, static_cast<float>(t.get(r, c)));
  }
  return m;
}

}  // namespace

namespace {

// grad_logits from float statistics, and the two products, each output rounded to its type.
struct Products {
  FloatMatrix grad_input, grad_weight;
};

Products products(const FloatMatrix& grad_logits, const FloatMatrix& input,
                  const FloatMatrix& weight, const reference::Matrix& initial_input,
                  const reference::Matrix& initial_weight, int64_t tokens) {
  const int64_t BT = input.rows, V = weight.rows, H = input.cols;
  Products p{{BT, H, std::vector<float>(static_cast<size_t>(BT * H))},
             {V, H, std::vector<float>(static_cast<size_t>(V * H))}};
  for (int64_t b = 0; b < BT; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      float sum = initial_input.rows > 0 ? static_cast<float>(initial_input(b, h)) : 0.0f;
      for (int64_t v = 0; v < V; ++v) sum += grad_logits(b, v) * weight(v, h);
      p.grad_input(b, h) = sum;
    }
  }
  for (int64_t v = 0; v < V; ++v) {
    for (int64_t h = 0; h < H; ++h) {
      float sum = initial_weight.rows > 0 ? static_cast<float>(initial_weight(v, h)) : 0.0f;
      for (int64_t b = 0; b < tokens; ++b) sum += grad_logits(b, v) * input(b, h);
      p.grad_weight(v, h) = sum;
    }
  }
  return p;
}

float dot(const FloatMatrix& a, int64_t row_a, const FloatMatrix& b, int64_t row_b, int64_t n) {
  float sum = 0.0f;
  for (int64_t k = 0; k < n; ++k) sum += a(row_a, k) * b(row_b, k);
  return sum;
}

// The rounding of one token's logits.
DType logits_type(LogitsRounding rounding, DType type, float logits_max) {
  switch (rounding) {
    case LogitsRounding::none:
      return DType::f32;
    case LogitsRounding::operand:
      return type;
    case LogitsRounding::infer:
      return rounded(type, logits_max) == logits_max ? type : DType::f32;
  }
  return DType::f32;
}

}  // namespace

EagerResult eager(const GradientCase& c) {
  const DType type = c.arithmetic.multiplied();
  const int64_t BT = c.shape.BT, V = c.shape.V, H = c.shape.H;
  const FloatMatrix input = floats(c.input, type);
  const FloatMatrix weight = floats(c.weight, type);
  const auto operands = c.reference_operands();
  EagerResult result;
  result.loss.assign(static_cast<size_t>(BT), 0.0);
  result.grad_input = reference::Matrix(BT, H);
  result.grad_weight = reference::Matrix(V, H);
  FloatMatrix grad_logits{BT, V, std::vector<float>(static_cast<size_t>(BT * V))};

  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    std::vector<float> logits(static_cast<size_t>(V));
    float max = -INFINITY;
    for (int64_t v = 0; v < V; ++v) {
      float sum = 0.0f;
      for (int64_t h = 0; h < H; ++h) sum += input(b, h) * weight(v, h);
      logits[static_cast<size_t>(v)] = rounded(type, sum);
      max = std::max(max, logits[static_cast<size_t>(v)]);
    }
    float sum = 0.0f;
    for (const float logit : logits) sum += std::exp(logit - max);
    result.logits_max.push_back(max);
    result.sum_exp_logits.push_back(sum);
    const bool masked = !operands.target_mask.empty() && operands.target_mask[i] != 0;
    const int64_t target = operands.masked_target[i];
    if (!masked) {
      result.loss[i] = std::log(sum) - (logits[static_cast<size_t>(target)] - max);
    }
    const auto grad = static_cast<float>(operands.grad[i]);
    for (int64_t v = 0; v < V; ++v) {
      const float softmax = std::exp(logits[static_cast<size_t>(v)] - max) / sum;
      const float one = !masked && target == v ? 1.0f : 0.0f;
      grad_logits(b, v) = rounded(type, (softmax - one) * grad);
    }
  }
  const Products p = products(grad_logits, input, weight, {}, {}, BT);
  for (size_t e = 0; e < p.grad_input.values.size(); ++e) {
    result.grad_input.values[e] = rounded(type, p.grad_input.values[e]);
  }
  for (size_t e = 0; e < p.grad_weight.values.size(); ++e) {
    result.grad_weight.values[e] = rounded(type, p.grad_weight.values[e]);
  }
  return result;
}

ForwardResult plain_float(const ForwardCase& c, Mutation mutation) {
  const DType type = c.arithmetic.multiplied();
  const int64_t BT = c.shape.BT, V = c.shape.V, H = c.shape.H;
  const FloatMatrix input = floats(c.input, type);
  const FloatMatrix weight = floats(c.weight, type);
  const int64_t columns = mutation == Mutation::drop_last_column ? V - 1 : V;
  const int64_t depth = mutation == Mutation::drop_k_pair ? H - 2 : H;
  ForwardResult r = make_forward_outputs(c);
  for (int64_t b = 0; b < BT; ++b) {
    const int64_t token = mutation == Mutation::drop_last_token && b == BT - 1 ? b - 1 : b;
    std::vector<float> logits;
    for (int64_t v = 0; v < columns; ++v) {
      const float logit = dot(input, token, weight, v, depth);
      logits.push_back(c.rounding == LogitsRounding::operand ? rounded(type, logit) : logit);
    }
    float max = -INFINITY;
    for (const float logit : logits) max = std::max(max, logit);
    float sum = 0.0f;
    constexpr size_t kSegment = 256;
    for (size_t first = 0; first < logits.size(); first += kSegment) {
      float part = 0.0f;
      for (size_t v = first; v < std::min(first + kSegment, logits.size()); ++v) {
        part += std::exp(logits[v] - max);
      }
      sum += part;
    }
    if (mutation == Mutation::inexact_max) sum *= 1.0f + 0x1p-12f;
    const int64_t id = c.target.get_index(b);
    const int64_t end = c.vocab_end.value_or(c.vocab_start + V);
    const bool outside = id < c.vocab_start || id >= end;
    const int64_t local = outside ? 0 : id - c.vocab_start;
    r.logits_max.set(b, max);
    r.sum_exp_logits.set(b, sum);
    const bool known = !outside && local < columns;
    r.predicted_logits.set(b, known ? logits[static_cast<size_t>(local)] - max : 0.0f);
    if (r.masked_target) r.masked_target->set_index(b, local);
  }
  r.target_mask.reset();
  return r;
}

GradientResult plain_float(const GradientCase& c, Mutation mutation) {
  const DType type = c.arithmetic.multiplied();
  const int64_t BT = c.shape.BT, V = c.shape.V, H = c.shape.H;
  const FloatMatrix input = floats(c.input, type);
  const FloatMatrix weight = floats(c.weight, type);
  const auto operands = c.reference_operands();
  const int64_t depth = mutation == Mutation::drop_k_pair ? H - 2 : H;
  FloatMatrix grad_logits{BT, V, std::vector<float>(static_cast<size_t>(BT * V))};
  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const auto grad = static_cast<float>(operands.grad[i]);
    const auto grad_logsumexp =
        operands.grad_logsumexp.empty() ? 0.0f : static_cast<float>(operands.grad_logsumexp[i]);
    if (grad == 0.0f && grad_logsumexp == 0.0f) continue;
    const bool masked = !operands.target_mask.empty() && operands.target_mask[i] != 0;
    const bool given = c.mode == GradientMode::high_performance;
    const float max = given ? 0.0f : static_cast<float>(operands.logits_max[i]);
    const float inverse = given ? 0.0f : 1.0f / static_cast<float>(operands.sum_exp_logits[i]);
    const float largest = std::max(std::abs(grad), std::abs(grad_logsumexp));
    const float scale = type == DType::f16 ? std::ldexp(1.0f, -std::ilogb(largest)) : 1.0f;
    for (int64_t v = 0; v < V; ++v) {
      float softmax = 0.0f;
      if (given) {
        softmax = static_cast<float>(c.softmax->get(b, v));
      } else {
        const float logit =
            rounded(logits_type(c.rounding, type, max), dot(input, b, weight, v, depth));
        softmax = std::exp(logit - max) * inverse;
      }
      if (mutation == Mutation::drop_last_column && v == V - 1) continue;
      const float one = !masked && operands.masked_target[i] == v ? 1.0f : 0.0f;
      float g = (softmax - one) * grad + softmax * grad_logsumexp;
      if (mutation == Mutation::one_after_scaling) g = softmax * grad - one;
      grad_logits(b, v) = rounded(type, g * scale) / scale;
    }
  }
  GradientResult r = make_gradient_outputs(c);
  const int64_t tokens = mutation == Mutation::drop_last_token ? BT - 1 : BT;
  const Products p =
      products(grad_logits, input, weight, r.initial_input, r.initial_weight, tokens);
  for (int64_t h = 0; h < H; ++h) {
    for (int64_t b = 0; r.grad_input && b < BT; ++b) r.grad_input->set(b, h, p.grad_input(b, h));
    for (int64_t v = 0; r.grad_weight && v < V; ++v) r.grad_weight->set(v, h, p.grad_weight(v, h));
  }
  return r;
}

}  // namespace logitless::test
