// SPDX-License-Identifier: Apache-2.0
#include "tests/cli/mutate.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "reference/reference.h"

namespace logitless::cli::test {
namespace {

constexpr int64_t kTileTokens = 14;
constexpr int64_t kTileColumns = 32;

double element(const HostTensor& matrix, int64_t row, int64_t col) {
  return static_cast<double>(matrix.float_at(row * matrix.shape()[1] + col));
}

void subtract(HostTensor& matrix, int64_t row, int64_t col, double value) {
  const int64_t i = row * matrix.shape()[1] + col;
  store_float(matrix.data(), matrix.dtype(), i,
              static_cast<float>(static_cast<double>(matrix.float_at(i)) - value));
}

// grad_logits[b, v] of the whole case, by definition.
class GradLogits {
 public:
  GradLogits(const Case& c, std::vector<int64_t> tokens) : case_(c) {
    logits_ = reference::logits(c.input.matrix(), c.weight.matrix(), {}, tokens);
    tokens_ = std::move(tokens);
  }
  double operator()(int64_t b, int64_t v) const {
    const auto i = std::ranges::find(tokens_, b) - tokens_.begin();
    const double* row = logits_.value.row(i);
    const double max = *std::max_element(row, row + logits_.value.cols);
    double sum = 0;
    for (int64_t j = 0; j < logits_.value.cols; ++j) sum += std::exp(row[j] - max);
    const double one = case_.target.integer_at(b) - case_.vocab_start_index == v ? 1 : 0;
    return (std::exp(row[v] - max) / sum - one) * static_cast<double>(case_.grad.as<float>()[b]);
  }

 private:
  const Case& case_;
  std::vector<int64_t> tokens_;
  reference::Logits logits_;
};

// What a change of grad_logits [all tokens, V] makes of both gradients.
void add_grad_logits(const Case& c, const reference::Matrix& change, const StageOutputs& outputs) {
  const Shape shape = c.shape();
  for (int64_t h = 0; h < shape.H; ++h) {
    for (int64_t b = 0; b < shape.BT; ++b) {
      double sum = 0;
      for (int64_t v = 0; v < shape.V; ++v) sum += change(b, v) * element(c.weight, v, h);
      if (sum != 0) subtract(*outputs.find("grad_input"), b, h, -sum);
    }
    for (int64_t v = 0; v < shape.V; ++v) {
      double sum = 0;
      for (int64_t b = 0; b < shape.BT; ++b) sum += change(b, v) * element(c.input, b, h);
      if (sum != 0) subtract(*outputs.find("grad_weight"), v, h, -sum);
    }
  }
}

constexpr int64_t kSegmentColumns = 256;

// softmax as one pass makes it: exp(logit - maximum of its segment) is held and later multiplied by
// the segment's factor.
struct Held {
  reference::Matrix exponential, factor;  // [BT, V], [BT, segments]
  explicit Held(const Case& c) : exponential(c.shape().BT, c.shape().V) {
    const Shape shape = c.shape();
    std::vector<int64_t> tokens(static_cast<size_t>(shape.BT));
    std::iota(tokens.begin(), tokens.end(), 0);
    const reference::Matrix logits =
        reference::logits(c.input.matrix(), c.weight.matrix(), {}, tokens).value;
    factor = reference::Matrix(shape.BT, (shape.V + kSegmentColumns - 1) / kSegmentColumns);
    for (int64_t b = 0; b < shape.BT; ++b) {
      const double* row = logits.row(b);
      const double max = *std::max_element(row, row + shape.V);
      double sum = 0;
      for (int64_t v = 0; v < shape.V; ++v) sum += std::exp(row[v] - max);
      for (int64_t s = 0; s < factor.cols; ++s) {
        const int64_t begin = s * kSegmentColumns;
        const int64_t end = std::min(begin + kSegmentColumns, shape.V);
        const double segment_max = *std::max_element(row + begin, row + end);
        factor(b, s) = std::exp(segment_max - max) / sum;
        for (int64_t v = begin; v < end; ++v) exponential(b, v) = std::exp(row[v] - segment_max);
      }
    }
  }
};

double grad_of(const Case& c, int64_t b) {
  return c.counts(b) ? static_cast<double>(c.grad.as<float>()[b]) : 0;
}

int64_t target_of(const Case& c, int64_t b) { return c.target.integer_at(b) - c.vocab_start_index; }

// The shard's statistics of some tokens again, from logits that `spoil` has changed.
template <typename Spoil>
void redo_statistics(const Case& c, const StageOutputs& outputs, int64_t tokens,
                     const Spoil& spoil) {
  std::vector<int64_t> list(static_cast<size_t>(tokens));
  std::iota(list.begin(), list.end(), 0);
  reference::Logits logits =
      reference::logits(c.input.matrix(), c.weight.rows(outputs.shard.begin, outputs.shard.end),
                        {.logits_rounding = outputs.rounding}, list);
  spoil(logits.value);
  for (int64_t b = 0; b < tokens; ++b) {
    const double* row = logits.value.row(b);
    const double max = *std::max_element(row, row + logits.value.cols);
    double sum = 0;
    for (int64_t v = 0; v < logits.value.cols; ++v) sum += std::exp(row[v] - max);
    outputs.find("logits_max")->as<float>()[b] = static_cast<float>(max);
    outputs.find("sum_exp_logits")->as<float>()[b] = static_cast<float>(sum);
    if (mask_bit(*outputs.find("target_mask"), b)) continue;
    const int64_t target = outputs.find("masked_target")->integer_at(b);
    outputs.find("predicted_logits")->as<float>()[b] = static_cast<float>(row[target] - max);
  }
}

// The last pair of products is missing from the first tile.
void drop_k_pair(const Case& c, int64_t first_row, reference::Matrix& logits) {
  const int64_t H = c.shape().H;
  for (int64_t b = 0; b < std::min(kTileTokens, logits.rows); ++b) {
    for (int64_t v = 0; v < std::min(kTileColumns, logits.cols); ++v) {
      for (int64_t h = H - 2; h < H; ++h) {
        logits(b, v) -= element(c.input, b, h) * element(c.weight, first_row + v, h);
      }
    }
  }
}

// The next float away from zero, or towards it.
float one_ulp(float value, bool up) {
  return std::nextafter(value,
                        up ? std::copysign(std::numeric_limits<float>::infinity(), value) : 0.0f);
}

bool step_counts(const Case& c, int64_t b) {
  return c.counts(b) && target_of(c, b) >= 0 && target_of(c, b) < c.shape().V;
}

void apply(Mutant mutant, const Case& c, const StageOutputs& outputs) {
  const Shape shape = c.shape();
  const int64_t last_token = shape.BT - 1;
  const int64_t last_row = shape.V - 1;
  int64_t counting_token = last_token;  // the last one of which a step takes notice
  while (counting_token > 0 &&
         (!step_counts(c, counting_token) || grad_of(c, counting_token) == 0)) {
    --counting_token;
  }
  switch (mutant) {
    case Mutant::forward_k_pair:
      redo_statistics(c, outputs, std::min(kTileTokens, shape.BT), [&](reference::Matrix& logits) {
        drop_k_pair(c, outputs.shard.begin, logits);
      });
      return;
    case Mutant::forward_tail_column:
      redo_statistics(c, outputs, shape.BT, [&](reference::Matrix& logits) {
        for (int64_t b = 0; b < logits.rows; ++b) {
          logits(b, logits.cols - 1) = -std::numeric_limits<double>::infinity();
        }
      });
      return;
    case Mutant::forward_token_lost:
      outputs.find("logits_max")->as<float>()[last_token] = -std::numeric_limits<float>::infinity();
      outputs.find("sum_exp_logits")->as<float>()[last_token] = 0;
      outputs.find("predicted_logits")->as<float>()[last_token] = 0;
      return;
    case Mutant::forward_mask_bit:
      outputs.find("target_mask")->as<uint8_t>()[last_token / 8] ^=
          static_cast<uint8_t>(1 << (last_token % 8));
      return;
    case Mutant::forward_target_off:
      outputs.find("masked_target")->as<int64_t>()[last_token] += 1;
      return;
    case Mutant::forward_predicted: {
      const reference::Logits logits =
          reference::logits(c.input.matrix(), c.weight.rows(outputs.shard.begin, outputs.shard.end),
                            {}, std::vector<int64_t>{0});
      outputs.find("predicted_logits")->as<float>()[0] =
          static_cast<float>(logits.value(0, 1)) - outputs.find("logits_max")->as<float>()[0];
      return;
    }
    case Mutant::merge_factor:
      for (int64_t b = 0; b < shape.BT; ++b) {
        outputs.find("sum_exp_logits")->as<float>()[b] *= 1.0f + 0x1p-22f;
      }
      return;
    case Mutant::merge_ulp:
      for (int64_t b = 0; b < shape.BT; ++b) {
        float& sum = outputs.find("sum_exp_logits")->as<float>()[b];
        sum = one_ulp(sum, true);
      }
      return;
    case Mutant::merge_predicted_ulp:
      for (int64_t b = 0; b < shape.BT; ++b) {
        float& predicted = outputs.find("predicted_logits")->as<float>()[b];
        predicted = one_ulp(one_ulp(predicted, true), true);
      }
      return;
    case Mutant::loss_log:
      for (int64_t b = 0; b < shape.BT; ++b) {
        outputs.find("loss")->as<float>()[b] *= 1.0f + 0x1p-21f;
      }
      return;
    case Mutant::logits_k_pair: {
      HostTensor& logits = *outputs.find("logits");
      for (int64_t b = 0; b < std::min(kTileTokens, shape.BT); ++b) {
        for (int64_t v = 0; v < std::min(kTileColumns, outputs.shard.size()); ++v) {
          for (int64_t h = shape.H - 2; h < shape.H; ++h) {
            subtract(logits, b, v,
                     element(c.input, b, h) * element(c.weight, outputs.shard.begin + v, h));
          }
        }
      }
      return;
    }
    case Mutant::logits_tail_column:
      for (int64_t b = 0; b < shape.BT; ++b) {
        HostTensor& logits = *outputs.find("logits");
        const int64_t cols = logits.shape()[1];
        store_float(logits.data(), logits.dtype(), b * cols + cols - 1, 0);
      }
      return;
    case Mutant::softmax_unnormalised:
      for (int64_t v = 0; v < shape.V; ++v) {
        outputs.find("softmax")->as<float>()[v] *= 1.0f + 0x1p-20f;
      }
      return;
    case Mutant::grad_input_k_pair:
    case Mutant::step_grad_input_k_pair: {
      // The pair that token 0's target is in: one of little weight would be lost in rounding.
      std::vector<int64_t> tile(static_cast<size_t>(std::min(kTileTokens, shape.BT)));
      std::iota(tile.begin(), tile.end(), 0);
      const GradLogits g(c, tile);
      const int64_t pair = (c.target.integer_at(0) - c.vocab_start_index) / 2 * 2;
      for (const int64_t b : tile) {
        for (int64_t h = 0; h < std::min(kTileColumns, shape.H); ++h) {
          for (int64_t v = pair; v < std::min(pair + 2, shape.V); ++v) {
            subtract(*outputs.find("grad_input"), b, h, g(b, v) * element(c.weight, v, h));
          }
        }
      }
      return;
    }
    case Mutant::grad_input_token_lost:
      for (int64_t h = 0; h < shape.H; ++h) {
        store_float(outputs.find("grad_input")->data(), outputs.find("grad_input")->dtype(),
                    last_token * shape.H + h, 0);
      }
      return;
    case Mutant::grad_weight_k_pair: {
      const GradLogits g(c, {0, 1});
      const int64_t first = (c.target.integer_at(0) - c.vocab_start_index) / 32 * 32;
      for (int64_t v = first; v < std::min(first + kTileColumns, shape.V); ++v) {
        for (int64_t h = 0; h < std::min<int64_t>(16, shape.H); ++h) {
          for (int64_t b = 0; b < 2; ++b) {
            subtract(*outputs.find("grad_weight"), v, h, g(b, v) * element(c.input, b, h));
          }
        }
      }
      return;
    }
    case Mutant::grad_weight_tail:
      for (int64_t h = 0; h < shape.H; ++h) {
        store_float(outputs.find("grad_weight")->data(), outputs.find("grad_weight")->dtype(),
                    last_row * shape.H + h, 0);
      }
      return;
    case Mutant::grad_weight_token:
    case Mutant::step_grad_weight_token: {
      const GradLogits g(c, {last_token});
      for (int64_t v = 0; v < shape.V; ++v) {
        const double grad = g(last_token, v);
        for (int64_t h = 0; h < shape.H; ++h) {
          subtract(*outputs.find("grad_weight"), v, h, grad * element(c.input, last_token, h));
        }
      }
      return;
    }
    case Mutant::grad_weight_truncated: {
      // Half of all roundings to nearest go away from zero; those lose one unit.
      HostTensor& grad = *outputs.find("grad_weight");
      if (size_of(grad.dtype()) != 2) return;
      for (int64_t i = 0; i < grad.elements(); i += 2) {
        uint16_t& bits = grad.as<uint16_t>()[i];
        if ((bits & 0x7fffU) != 0) --bits;
      }
      return;
    }
    case Mutant::step_sum_ulp: {
      float& sum = outputs.find("sum_exp_logits")->as<float>()[counting_token];
      sum = one_ulp(sum, true);
      return;
    }
    case Mutant::step_loss_ulp: {
      float& loss = outputs.find("loss")->as<float>()[counting_token];
      loss = one_ulp(loss, true);
      return;
    }
    case Mutant::step_total_token:
      *outputs.total -= grad_of(c, counting_token) *
                        static_cast<double>(outputs.find("loss")->as<float>()[counting_token]);
      return;
    case Mutant::step_target_lost: {
      reference::Matrix change(shape.BT, shape.V);
      change(counting_token, target_of(c, counting_token)) = grad_of(c, counting_token);
      add_grad_logits(c, change, outputs);
      return;
    }
    case Mutant::step_factor: {
      const Held held(c);
      reference::Matrix change(shape.BT, shape.V);
      for (int64_t b = 0; b < shape.BT; ++b) {
        if (!step_counts(c, b)) continue;
        for (int64_t v = 0; v < shape.V; ++v) {
          // The last panel of the first segment, taken for one of the second.
          const bool tile = v >= kSegmentColumns - kTileColumns && v < kSegmentColumns;
          if (!tile || v == target_of(c, b)) continue;
          change(b, v) =
              held.exponential(b, v) * (held.factor(b, 1) - held.factor(b, 0)) * grad_of(c, b);
        }
      }
      add_grad_logits(c, change, outputs);
      return;
    }
    case Mutant::recompute_grad_ulp: {
      HostTensor& grad = *outputs.find("grad_weight");
      const int64_t i = target_of(c, counting_token) * shape.H;
      grad.as<uint16_t>()[i] ^= 1;
      return;
    }
  }
}

Stage stage_of(Mutant mutant) {
  switch (mutant) {
    case Mutant::forward_k_pair:
    case Mutant::forward_tail_column:
    case Mutant::forward_token_lost:
    case Mutant::forward_mask_bit:
    case Mutant::forward_target_off:
    case Mutant::forward_predicted:
      return Stage::forward;
    case Mutant::merge_factor:
    case Mutant::merge_ulp:
    case Mutant::merge_predicted_ulp:
      return Stage::merge;
    case Mutant::loss_log:
      return Stage::loss;
    case Mutant::logits_k_pair:
    case Mutant::logits_tail_column:
      return Stage::logits;
    case Mutant::softmax_unnormalised:
      return Stage::softmax;
    case Mutant::grad_input_k_pair:
    case Mutant::grad_input_token_lost:
    case Mutant::grad_weight_k_pair:
    case Mutant::grad_weight_tail:
    case Mutant::grad_weight_token:
    case Mutant::grad_weight_truncated:
      return Stage::gradient;
    case Mutant::step_sum_ulp:
    case Mutant::step_loss_ulp:
    case Mutant::step_total_token:
    case Mutant::step_grad_input_k_pair:
    case Mutant::step_grad_weight_token:
    case Mutant::step_target_lost:
    case Mutant::step_factor:
    case Mutant::recompute_grad_ulp:
      return Stage::step;
  }
  return Stage::forward;
}

}  // namespace

const std::vector<MutantInfo>& all_mutants() {
  static const std::vector<MutantInfo> mutants = {
      {Mutant::forward_k_pair, "forward_k_pair", "forward", "sum_exp_logits"},
      {Mutant::forward_tail_column, "forward_tail_column", "forward", "sum_exp_logits"},
      {Mutant::forward_token_lost, "forward_token_lost", "forward", "logits_max"},
      {Mutant::forward_mask_bit, "forward_mask_bit", "forward", "target_mask"},
      {Mutant::forward_target_off, "forward_target_off", "forward", "masked_target"},
      {Mutant::forward_predicted, "forward_predicted", "forward", "predicted_logits"},
      {Mutant::merge_factor, "merge_factor", "merge", "sum_exp_logits"},
      {Mutant::merge_ulp, "merge_ulp", "merge", "sum_exp_logits"},
      {Mutant::merge_predicted_ulp, "merge_predicted_ulp", "merge", "predicted_logits"},
      {Mutant::loss_log, "loss_log", "loss", "loss"},
      {Mutant::logits_k_pair, "logits_k_pair", "forward", "logits"},
      {Mutant::logits_tail_column, "logits_tail_column", "forward", "logits"},
      {Mutant::softmax_unnormalised, "softmax_unnormalised", "softmax", "softmax"},
      {Mutant::grad_input_k_pair, "grad_input_k_pair", "gradient", "grad_input"},
      {Mutant::grad_input_token_lost, "grad_input_token_lost", "gradient", "grad_input"},
      {Mutant::grad_weight_k_pair, "grad_weight_k_pair", "gradient", "grad_weight"},
      {Mutant::grad_weight_tail, "grad_weight_tail", "gradient", "grad_weight"},
      {Mutant::grad_weight_token, "grad_weight_token", "gradient", "grad_weight"},
      {Mutant::grad_weight_truncated, "grad_weight_truncated", "gradient", "grad_weight"},
      {Mutant::step_sum_ulp, "step_sum_ulp", "one pass, as separate", "sum_exp_logits"},
      {Mutant::step_loss_ulp, "step_loss_ulp", "one pass, as separate", "loss"},
      {Mutant::step_total_token, "step_total_token", "one pass", "total"},
      {Mutant::step_grad_input_k_pair, "step_grad_input_k_pair", "one pass", "grad_input"},
      {Mutant::step_grad_weight_token, "step_grad_weight_token", "one pass", "grad_weight"},
      {Mutant::step_target_lost, "step_target_lost", "one pass", "grad_input"},
      {Mutant::step_factor, "step_factor", "one pass", "grad_weight"},
      {Mutant::recompute_grad_ulp, "recompute_grad_ulp", "recompute, as separate", "grad_weight"}};
  return mutants;
}

StageObserver plant(Mutant mutant, const Case& c) {
  const auto planted = std::make_shared<bool>(false);
  return [mutant, &c, planted](const StageOutputs& outputs) {
    if (*planted || outputs.stage != stage_of(mutant)) return;
    const Strategy strategy =
        mutant == Mutant::recompute_grad_ulp ? Strategy::recompute : Strategy::one_pass;
    if (outputs.stage == Stage::step && outputs.strategy != strategy) return;
    *planted = true;
    apply(mutant, c, outputs);
  };
}

}  // namespace logitless::cli::test
