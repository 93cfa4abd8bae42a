// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/model.h"

#include <algorithm>
#include <cmath>

#include "examples/train_lm/layers.h"

namespace logitless::train_lm {

Model::Model(const Options& options, int64_t its_V, const RowRange& its_rows)
    : V(its_V),
      rows(its_rows),
      context(options.context),
      H(options.hidden),
      embedding("embedding", V + 1, options.embedding),
      hidden("hidden", options.context * options.embedding, H),
      bias("bias", 1, H),
      head("head", rows.size(), H) {
  embedding.initialise(RandomNumbers(options.seed, Purpose::embedding), 0.5f);
  hidden.initialise(RandomNumbers(options.seed, Purpose::hidden),
                    1.0f / std::sqrt(static_cast<float>(hidden.rows)));
  head.initialise(RandomNumbers(options.seed, Purpose::head), 0.05f, rows.begin);
}

Layers::Layers(const Options& options) {
  const size_t BT = static_cast<size_t>(options.batch), H = static_cast<size_t>(options.hidden);
  const size_t inputs = static_cast<size_t>(options.context * options.embedding);
  contexts_.reserve(BT * static_cast<size_t>(options.context));
  for (auto* values : {&input_, &grad_input_}) values->reserve(BT * inputs);
  for (auto* values : {&active_, &kept_, &output_, &grad_sum_}) values->reserve(BT * H);
  transposed_.reserve(H * inputs);
}

void Layers::forward(const Model& model, std::span<const int32_t> contexts, double dropout,
                     const RandomNumbers& random) {
  const int64_t E = model.embedding.cols;
  const int64_t inputs = model.hidden.rows;
  const int64_t H = model.H;
  const int64_t BT = static_cast<int64_t>(contexts.size()) / model.context;
  contexts_.assign(contexts.begin(), contexts.end());
  input_.resize(static_cast<size_t>(BT * inputs));
  for (auto* values : {&active_, &kept_, &output_}) values->resize(static_cast<size_t>(BT * H));
  for (int64_t i = 0; i < BT * model.context; ++i) {
    std::copy_n(model.embedding.value.data() + contexts_[static_cast<size_t>(i)] * E, E,
                input_.data() + i * E);
  }
  multiply({.data = input_.data(), .row_stride = inputs}, model.hidden.value.data(),
           model.bias.value.data(), BT, H, inputs, active_.data());
  const float left_out = static_cast<float>(dropout);
  const float scale = 1.0f / (1.0f - left_out);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < BT * H; ++i) {
    const size_t at = static_cast<size_t>(i);
    active_[at] = std::tanh(active_[at]);
    kept_[at] = left_out > 0 && random.uniform(i) < left_out ? 0.0f : scale;
    output_[at] = active_[at] * kept_[at];
  }
}

void Layers::backward(Model& model, std::span<const float> grad_output) {
  const int64_t E = model.embedding.cols;
  const int64_t inputs = model.hidden.rows;
  const int64_t H = model.H;
  const int64_t BT = static_cast<int64_t>(contexts_.size()) / model.context;
  grad_sum_.resize(static_cast<size_t>(BT * H));
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < BT * H; ++i) {
    const size_t at = static_cast<size_t>(i);
    grad_sum_[at] = grad_output[at] * kept_[at] * (1.0f - active_[at] * active_[at]);
  }
  // hidden: input^T . grad_sum. bias: the same with a column of ones for the input.
  multiply({.data = input_.data(), .row_stride = 1, .col_stride = inputs}, grad_sum_.data(),
           nullptr, inputs, H, BT, model.hidden.gradient.data());
  const float one = 1.0f;
  multiply({.data = &one, .row_stride = 0, .col_stride = 0}, grad_sum_.data(), nullptr, 1, H, BT,
           model.bias.gradient.data());
  // embedding: grad_sum . hidden^T, added up where a word stands more than once.
  transposed_.resize(static_cast<size_t>(H * inputs));
  transpose(model.hidden.value.data(), inputs, H, transposed_.data());
  grad_input_.resize(static_cast<size_t>(BT * inputs));
  multiply({.data = grad_sum_.data(), .row_stride = H}, transposed_.data(), nullptr, BT, inputs, H,
           grad_input_.data());
  std::ranges::fill(model.embedding.gradient, 0.0f);
  for (int64_t i = 0; i < BT * model.context; ++i) {
    const float* from = grad_input_.data() + i * E;
    float* to = model.embedding.gradient.data() + contexts_[static_cast<size_t>(i)] * E;
    for (int64_t e = 0; e < E; ++e) to[e] += from[e];
  }
}

}  // namespace logitless::train_lm
