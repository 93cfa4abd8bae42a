// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/model.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <vector>

#include "examples/train_lm/layers.h"
#include "tests/train_lm/small_run.h"

namespace logitless::train_lm {
namespace {

constexpr int64_t kV = 20;

std::vector<float> numbers(int64_t count, int64_t seed) {
  const RandomNumbers random(5, Purpose::hidden, seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(random.uniform(i) - 0.5f);
  return values;
}

std::vector<int32_t> some_contexts(const Options& options, int64_t words) {
  const RandomNumbers random(6, Purpose::order);
  std::vector<int32_t> contexts;
  for (int64_t i = 0; i < words * options.context; ++i) {
    contexts.push_back(static_cast<int32_t>(random.bits(i) % (kV + 1)));
  }
  return contexts;
}

TEST(Layers, TheProductIsItsDefinition) {
  // Whole tiles and what is left of them, both ways round.
  for (const int64_t m : {1, 4, 9}) {
    for (const int64_t n : {1, 8, 21}) {
      const int64_t k = 13;
      const auto a = numbers(m * k, 1), b = numbers(k * n, 2), start = numbers(n, 3);
      std::vector<float> out(static_cast<size_t>(m * n), -1.0f), turned = out;
      multiply({.data = a.data(), .row_stride = k}, b.data(), start.data(), m, n, k, out.data());
      std::vector<float> transposed(a.size());
      transpose(a.data(), m, k, transposed.data());
      multiply({.data = transposed.data(), .row_stride = 1, .col_stride = m}, b.data(),
               start.data(), m, n, k, turned.data());
      EXPECT_EQ(out, turned);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double sum = static_cast<double>(start[static_cast<size_t>(j)]);
          for (int64_t q = 0; q < k; ++q) {
            sum += static_cast<double>(a[static_cast<size_t>(i * k + q)]) *
                   static_cast<double>(b[static_cast<size_t>(q * n + j)]);
          }
          EXPECT_NEAR(static_cast<double>(out[static_cast<size_t>(i * n + j)]), sum, 1e-6);
        }
      }
    }
  }
}

// sum(output * direction), in double: what backward() differentiates.
double projected(const Model& model, const std::vector<int32_t>& contexts,
                 const std::vector<float>& direction) {
  Layers layers;
  layers.forward(model, contexts, 0.25, RandomNumbers(1, Purpose::dropout, 3));
  double sum = 0;
  for (size_t i = 0; i < direction.size(); ++i) {
    sum += static_cast<double>(layers.output()[i]) * static_cast<double>(direction[i]);
  }
  return sum;
}

TEST(Layers, GradientsAreDifferenceQuotients) {
  const Options options = test::small_options();
  Model model(options, kV, {0, kV});
  const auto contexts = some_contexts(options, 9);
  const auto direction = numbers(9 * options.hidden, 4);
  Layers layers;
  layers.forward(model, contexts, 0.25, RandomNumbers(1, Purpose::dropout, 3));
  layers.backward(model, direction);
  for (Parameter* parameter : {&model.embedding, &model.hidden, &model.bias}) {
    for (int64_t i = 0; i < parameter->size(); i += 7) {
      float& value = parameter->value[static_cast<size_t>(i)];
      const float was = value;
      constexpr float kStep = 1.0f / 64;
      value = was + kStep;
      const double above = projected(model, contexts, direction);
      value = was - kStep;
      const double below = projected(model, contexts, direction);
      value = was;
      const double quotient = (above - below) / (2 * static_cast<double>(kStep));
      EXPECT_NEAR(static_cast<double>(parameter->gradient[static_cast<size_t>(i)]), quotient, 2e-3)
          << parameter->name << " " << i;
    }
  }
}

TEST(Layers, DropoutLeavesOutItsShareAndOthersInEveryStep) {
  const Options options = test::small_options();
  const Model model(options, kV, {0, kV});
  const auto contexts = some_contexts(options, 200);
  const auto zeros = [&](double dropout, int64_t step) {
    Layers layers;
    layers.forward(model, contexts, dropout, RandomNumbers(1, Purpose::dropout, step));
    std::vector<bool> dropped;
    for (const float value : layers.output()) dropped.push_back(value == 0.0f);
    return dropped;
  };
  const auto share = [](const std::vector<bool>& dropped) {
    return static_cast<double>(std::count(dropped.begin(), dropped.end(), true)) /
           static_cast<double>(dropped.size());
  };
  EXPECT_EQ(share(zeros(0, 1)), 0);
  // 8,000 values: five standard deviations.
  EXPECT_NEAR(share(zeros(0.3, 1)), 0.3, 0.026);
  EXPECT_EQ(zeros(0.3, 1), zeros(0.3, 1));
  EXPECT_NE(zeros(0.3, 1), zeros(0.3, 2));
}

TEST(Layers, ThreadsChangeNoBit) {
  const Options options = test::small_options();
  const auto contexts = some_contexts(options, 33);
  const auto direction = numbers(33 * options.hidden, 4);
  const int before = omp_get_max_threads();
  std::vector<std::vector<float>> gradients;
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    Model model(options, kV, {0, kV});
    Layers layers;
    layers.forward(model, contexts, 0.25, RandomNumbers(1, Purpose::dropout, 3));
    layers.backward(model, direction);
    gradients.push_back(model.hidden.gradient);
    gradients.back().insert(gradients.back().end(), model.embedding.gradient.begin(),
                            model.embedding.gradient.end());
  }
  omp_set_num_threads(before);
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(Model, TheHeadIsTheSameHoweverItIsCut) {
  const Options options = test::small_options();
  const Model whole(options, kV, {0, kV});
  const Model part(options, kV, {7, 12});
  EXPECT_EQ(part.head.value, std::vector<float>(whole.head.value.begin() + 7 * options.hidden,
                                                whole.head.value.begin() + 12 * options.hidden));
  EXPECT_EQ(part.embedding.value, whole.embedding.value);
  Options other = options;
  other.seed = 2;
  EXPECT_NE(Model(other, kV, {0, kV}).head.value, whole.head.value);
}

TEST(RandomNumbers, AreUniform) {
  const RandomNumbers random(3, Purpose::dropout, 7);
  constexpr int64_t kCount = 100'000;
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double u = static_cast<double>(random.uniform(i));
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    squares += u * u;
  }
  EXPECT_NEAR(sum / kCount, 0.5, 0.005);
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 0.005);
}

}  // namespace
}  // namespace logitless::train_lm
