// SPDX-License-Identifier: Apache-2.0
#include "cli/synthetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "reference/reference.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using test::synthetic;
using testing::HasSubstr;

// FNV-1a over the bytes of all tensors.
uint64_t fingerprint(const Case& c) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const HostTensor* tensor : {&c.input, &c.weight, &c.target, &c.grad}) {
    for (int64_t i = 0; i < tensor->bytes(); ++i) {
      hash = (hash ^ std::to_integer<uint64_t>(tensor->data()[i])) * 0x100000001b3u;
    }
  }
  return hash;
}

constexpr uint64_t kFingerprintF32 = 7138600423576613561u;
constexpr uint64_t kFingerprintBf16 = 13823776567910081974u;

SyntheticOptions small() {
  SyntheticOptions options;
  options.tokens = 60;
  options.vocab = 300;
  options.hidden = 48;
  options.seed = 7;
  return options;
}

// The same on every machine and with every compiler: these numbers never change.
TEST(Synthetic, IsAFunctionOfTheSeedAlone) {
  SyntheticOptions options = small();
  options.masked = 0.25;
  options.zero_grad = 0.25;
  options.dtype = DType::f32;
  EXPECT_EQ(fingerprint(synthetic(options)), kFingerprintF32);
  options.dtype = DType::bf16;
  EXPECT_EQ(fingerprint(synthetic(options)), kFingerprintBf16);
  options.seed = 8;
  EXPECT_NE(fingerprint(synthetic(options)), kFingerprintBf16);
}

TEST(Synthetic, SomeRowsOfWeightAreThoseOfAll) {
  SyntheticOptions options = small();
  const Case whole = synthetic(options);
  options.weight_rows = RowRange{70, 170};
  const Case part = synthetic(options);
  ASSERT_EQ(part.weight.shape(), (std::vector<int64_t>{100, 48}));
  EXPECT_EQ(std::memcmp(part.weight.data(), whole.weight.rows(70, 170).data,
                        static_cast<size_t>(part.weight.bytes())),
            0);
  for (const auto& [mine, all] : {std::pair{&part.input, &whole.input},
                                  {&part.target, &whole.target},
                                  {&part.grad, &whole.grad}}) {
    ASSERT_EQ(mine->bytes(), all->bytes());
    EXPECT_EQ(std::memcmp(mine->data(), all->data(), static_cast<size_t>(all->bytes())), 0);
  }
}

TEST(Synthetic, ShardsAreSlicesOfOneVocabulary) {
  SyntheticOptions options = small();
  const Case whole = synthetic(options);
  options.vocab = 100;
  options.vocab_start = 150;
  options.global_vocab = 300;
  const Case shard = synthetic(options);
  EXPECT_EQ(shard.vocab_start_index, 150);
  const int64_t row_bytes = 48 * size_of(DType::bf16);
  EXPECT_EQ(std::memcmp(shard.weight.data(), whole.weight.data() + 150 * row_bytes,
                        static_cast<size_t>(shard.weight.bytes())),
            0);
  EXPECT_EQ(shard.tokens_outside(), 0);
}

TEST(Synthetic, MaskedAndZeroGradAreFractions) {
  SyntheticOptions options = small();
  options.tokens = 4000;
  options.masked = 0.3;
  options.zero_grad = 0.6;
  const Case c = synthetic(options);
  EXPECT_NEAR(static_cast<double>(c.tokens_outside()) / 4000, 0.3, 0.03);
  const float* grad = c.grad.as<float>();
  EXPECT_NEAR(static_cast<double>(std::count(grad, grad + 4000, 0.0f)) / 4000, 0.6, 0.03);
  EXPECT_NEAR(static_cast<double>(std::accumulate(grad, grad + 4000, 0.0f)), 1.0, 1e-3);
  options.masked = 1;
  options.zero_grad = 1;
  const Case all = synthetic(options);
  EXPECT_EQ(all.tokens_outside(), 4000);
  EXPECT_EQ(*std::max_element(all.grad.as<float>(), all.grad.as<float>() + 4000), 0.0f);
}

TEST(Synthetic, SoftmaxIsPeakedAsATrainedModels) {
  SyntheticOptions options;
  options.tokens = 300;
  options.vocab = 4000;
  options.hidden = 128;
  const Case c = synthetic(options);
  const reference::Statistics statistics =
      reference::forward(c.input.matrix(), c.weight.matrix(), c.target.vector());
  const reference::Loss loss = reference::loss(statistics);
  double mean = 0;
  int peaked = 0;
  for (size_t b = 0; b < 300; ++b) {
    mean += loss.loss.value[b] / 300;
    // 1 / sum is the largest probability.
    peaked += statistics.sum_exp_logits.value[b] < 2 ? 1 : 0;
  }
  EXPECT_GT(mean, 2.0);
  EXPECT_LT(mean, 4.0);
  EXPECT_GT(peaked, 100);
  EXPECT_LT(peaked, 280);
}

TEST(Synthetic, EmptySizesAreCases) {
  for (const auto& [tokens, vocab, hidden] :
       {std::tuple{0, 5, 3}, {5, 0, 3}, {5, 3, 0}, {0, 0, 0}}) {
    SyntheticOptions options;
    options.tokens = tokens;
    options.vocab = vocab;
    options.hidden = hidden;
    const Case c = synthetic(options);
    EXPECT_EQ(c.shape().BT, tokens);
    EXPECT_EQ(c.shape().V, vocab);
    EXPECT_EQ(c.shape().H, hidden);
  }
}

TEST(Synthetic, RefusesImpossibleOptions) {
  const auto error = [](auto change) {
    SyntheticOptions options = small();
    change(options);
    const Result<Case> c = make_synthetic(options);
    return c ? std::string("no error") : c.error().message;
  };
  EXPECT_THAT(error([](auto& o) { o.tokens = -1; }), HasSubstr("--tokens is -1, must be >= 0"));
  EXPECT_THAT(error([](auto& o) { o.vocab = -1; }), HasSubstr("--vocab is -1"));
  EXPECT_THAT(error([](auto& o) { o.hidden = -1; }), HasSubstr("--hidden is -1"));
  EXPECT_THAT(error([](auto& o) { o.masked = 1.5; }), HasSubstr("--masked is 1.5, must be in"));
  EXPECT_THAT(error([](auto& o) { o.masked = NAN; }), HasSubstr("--masked is nan"));
  EXPECT_THAT(error([](auto& o) { o.zero_grad = -0.5; }), HasSubstr("--zero-grad is -0.5"));
  EXPECT_THAT(error([](auto& o) { o.vocab_start = -3; }), HasSubstr("--vocab-start is -3"));
  EXPECT_THAT(error([](auto& o) { o.hidden = int64_t{1} << 62; }), HasSubstr("at most 2^40"));
  EXPECT_THAT(error([](auto& o) { o.hidden = o.vocab = int64_t{1} << 40; }),
              HasSubstr("more than 2^56 elements"));
  EXPECT_THAT(error([](auto& o) { o.global_vocab = 200; }),
              HasSubstr("--global-vocab is 200, must be at least 300"));
  EXPECT_THAT(error([](auto& o) {
                o.global_vocab = 300;
                o.masked = 0.5;
              }),
              HasSubstr("must be at least 301"));
}

}  // namespace
}  // namespace logitless::cli
