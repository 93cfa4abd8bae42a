// SPDX-License-Identifier: Apache-2.0
// Compiled with -ffp-contract=off: a fused multiply-add would change bits between machines.
#include "cli/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

namespace logitless::cli {
namespace {

// Independent streams of random numbers.
enum class Stream : uint64_t {
  weight = 1,
  noise = 2,
  target = 3,
  rival = 4,
  masked = 5,
  zero_grad = 6,
  margin = 7,
  rival_margin = 8,
};

// splitmix64's finaliser: a bijection that mixes every bit into every other.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(mix(seed + 0x9e3779b97f4a7c15u)) {}

  uint64_t bits(Stream stream, uint64_t row) const {
    return mix(mix(seed_ ^ (static_cast<uint64_t>(stream) * 0xd6e8feb86659fd93u)) + row * kStep);
  }
  // In [0, 1), 24 bits: exact in float.
  float uniform(Stream stream, uint64_t row) const {
    return static_cast<float>(bits(stream, row) >> 40) * 0x1p-24f;
  }
  // Nearly normal with mean 0 and variance 1: the sum of the four 16-bit fields of one hash (an
  // Irwin-Hall distribution), whose largest magnitude is 3.46. Integer until the one product.
  static float normal(uint64_t row_bits, uint64_t column) {
    const uint64_t hash = mix(row_bits + column * kStep);
    const int64_t sum = static_cast<int64_t>((hash & 0xffff) + ((hash >> 16) & 0xffff) +
                                             ((hash >> 32) & 0xffff) + (hash >> 48));
    constexpr float kToUnitVariance = 0x1.bb67aep-16f;  // sqrt(3) * 2^-16
    return static_cast<float>(sum - 2 * 65535) * kToUnitVariance;
  }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
  uint64_t seed_;
};

// Natural logarithm to about 0.06 by a straight line between powers of two: libm's last bits differ
// between machines.
float rough_log(uint64_t x) {
  if (x == 0) return 0;
  const int exponent = static_cast<int>(std::bit_width(x)) - 1;
  const float mantissa = static_cast<float>(x) / static_cast<float>(uint64_t{1} << exponent) - 1.0f;
  return 0.6931472f * (static_cast<float>(exponent) + mantissa);
}

// A word of the global vocabulary, low ids more often than high ones: u^3 * V.
int64_t skewed_id(float uniform, int64_t V) {
  const double u = static_cast<double>(uniform);
  return std::min(static_cast<int64_t>(u * u * u * static_cast<double>(V)), V - 1);
}

Error invalid(std::string message) {
  return Error{.kind = ErrorKind::invalid_argument, .message = std::move(message)};
}

// Rows of weight have entries of this deviation, near a trained embedding's.
constexpr float kWeightDeviation = 0.0625f;
// Deviation of the logits of words that mean nothing here.
constexpr float kBackgroundDeviation = 2.0f;

Result<int64_t> checked_global_vocab(const SyntheticOptions& o) {
  const auto fraction = [](double p) { return p >= 0 && p <= 1; };
  if (o.tokens < 0) return invalid(fmt::format("--tokens is {}, must be >= 0", o.tokens));
  if (o.vocab < 0) return invalid(fmt::format("--vocab is {}, must be >= 0", o.vocab));
  if (o.hidden < 0) return invalid(fmt::format("--hidden is {}, must be >= 0", o.hidden));
  if (!fraction(o.masked))
    return invalid(fmt::format("--masked is {}, must be in [0, 1]", o.masked));
  if (!fraction(o.zero_grad)) {
    return invalid(fmt::format("--zero-grad is {}, must be in [0, 1]", o.zero_grad));
  }
  constexpr int64_t kMost = int64_t{1} << 40;
  for (const auto& [name, value] : {std::pair{"--tokens", o.tokens},
                                    {"--vocab", o.vocab},
                                    {"--hidden", o.hidden},
                                    {"--vocab-start", o.vocab_start}}) {
    if (value > kMost) return invalid(fmt::format("{} is {}, must be at most 2^40", name, value));
  }
  if (static_cast<double>(std::max(o.tokens, o.vocab)) * static_cast<double>(o.hidden) > 0x1p56) {
    return invalid(
        fmt::format("--tokens {}, --vocab {} and --hidden {} make a tensor of more than "
                    "2^56 elements",
                    o.tokens, o.vocab, o.hidden));
  }
  if (o.vocab_start < 0) {
    return invalid(fmt::format("--vocab-start is {}, must be >= 0", o.vocab_start));
  }
  const int64_t end = o.vocab_start + o.vocab;
  // Targets outside the shard need a word there.
  const bool need_outside = o.tokens > 0 && o.vocab_start == 0 && (o.masked > 0 || o.vocab == 0);
  const int64_t least = end + (need_outside ? 1 : 0);
  const int64_t automatic = need_outside ? end + std::max<int64_t>(o.vocab, 1) : end;
  const int64_t global = o.global_vocab.value_or(automatic);
  if (global < least) {
    return invalid(
        fmt::format("--global-vocab is {}, must be at least {} with --vocab-start {}, "
                    "--vocab {} and --masked {}",
                    global, least, o.vocab_start, o.vocab, o.masked));
  }
  return global;
}

}  // namespace

Result<Case> make_synthetic(const SyntheticOptions& o,
                            const std::function<void(int64_t)>& progress) {
  const Result<int64_t> global_vocab = checked_global_vocab(o);
  if (!global_vocab) return global_vocab.error();
  const int64_t BT = o.tokens;
  const int64_t V = o.vocab;
  const int64_t H = o.hidden;
  const int64_t outside = *global_vocab - V;  // words on other shards
  const Random random(o.seed);

  Case c;
  c.source = "synthetic";
  c.vocab_start_index = o.vocab_start;
  c.input = HostTensor(o.dtype, {BT, H});
  const RowRange rows = o.weight_rows.value_or(RowRange{0, V});
  c.weight = HostTensor(o.dtype, {rows.size(), H});
  c.target = HostTensor(DType::i64, {BT});

  const auto weight_element = [&](uint64_t row_bits, int64_t h) {
    return Random::normal(row_bits, static_cast<uint64_t>(h)) * kWeightDeviation;
  };
  for (int64_t v = rows.begin; v < rows.end; ++v) {
    const uint64_t row = random.bits(Stream::weight, static_cast<uint64_t>(o.vocab_start + v));
    for (int64_t h = 0; h < H; ++h) {
      store_float(c.weight.data(), o.dtype, (v - rows.begin) * H + h, weight_element(row, h));
    }
    if (progress) progress(v);
  }

  // input[b] = a * w[target] / |w|^2 + r * w[rival] / |w|^2 + noise, so the target's logit is about
  // a, the rival's about r, and a word's that means nothing is normal with the variance below. The
  // log-sum-exp of the latter is log V + variance / 2; a and r stand above or below it by a margin.
  const float norm2 =
      static_cast<float>(std::max<int64_t>(H, 1)) * kWeightDeviation * kWeightDeviation;
  const float noise_deviation = kBackgroundDeviation / std::sqrt(norm2);
  const float log_vocab = rough_log(static_cast<uint64_t>(std::max<int64_t>(*global_vocab, 1)));
  std::vector<float> row(static_cast<size_t>(H));
  for (int64_t b = 0; b < BT; ++b) {
    const uint64_t token = static_cast<uint64_t>(b);
    const bool masked =
        V == 0 ||
        (outside > 0 && static_cast<double>(random.uniform(Stream::masked, token)) < o.masked);
    const float u = random.uniform(Stream::target, token);
    int64_t id = masked ? skewed_id(u, outside) : o.vocab_start + skewed_id(u, V);
    if (masked && id >= o.vocab_start) id += V;
    c.target.as<int64_t>()[b] = id;
    const int64_t rival = skewed_id(random.uniform(Stream::rival, token), *global_vocab);

    const float target_margin = random.uniform(Stream::margin, token) * 12.0f - 6.5f;
    const float rival_margin = random.uniform(Stream::rival_margin, token) * 8.0f - 4.0f;
    float background = log_vocab + kBackgroundDeviation * kBackgroundDeviation / 2;
    const float spill = (background * background) / static_cast<float>(std::max<int64_t>(H, 1));
    background += std::min(spill, 4.0f);
    const float a = std::max(background + target_margin, 0.0f) / norm2;
    const float r = std::max(background + rival_margin, 0.0f) / norm2;

    const uint64_t target_row = random.bits(Stream::weight, static_cast<uint64_t>(id));
    const uint64_t rival_row = random.bits(Stream::weight, static_cast<uint64_t>(rival));
    const uint64_t noise_row = random.bits(Stream::noise, token);
    for (int64_t h = 0; h < H; ++h) {
      const float noise = Random::normal(noise_row, static_cast<uint64_t>(h)) * noise_deviation;
      const float value = a * weight_element(target_row, h) + r * weight_element(rival_row, h);
      store_float(c.input.data(), o.dtype, b * H + h, value + noise);
    }
    if (progress) progress(V + b);
  }

  // The gradient of the mean over the tokens that carry loss.
  c.grad = HostTensor(DType::f32, {BT});
  int64_t carrying = 0;
  for (int64_t b = 0; b < BT; ++b) {
    const float u = random.uniform(Stream::zero_grad, static_cast<uint64_t>(b));
    const bool carries = static_cast<double>(u) >= o.zero_grad;
    c.grad.as<float>()[b] = carries ? 1.0f : 0.0f;
    carrying += carries ? 1 : 0;
  }
  for (int64_t b = 0; b < BT; ++b) {
    c.grad.as<float>()[b] /= static_cast<float>(std::max<int64_t>(carrying, 1));
  }
  return c;
}

}  // namespace logitless::cli
