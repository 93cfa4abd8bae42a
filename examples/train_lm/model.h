// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "examples/train_lm/options.h"
#include "examples/train_lm/parameter.h"
#include "logitless/parallel/shards.h"

// A language model of words (Bengio et al. 2003): the embeddings of the words before the one to
// predict, one hidden layer, a head of V rows.
//
//   input  = embedding[context]                 [BT, context * E]
//   active = tanh(input . hidden + bias)        [BT, H]
//   output = active, some left out              [BT, H]   what the loss is given as its input
//   logits = output . head^T                    [BT, V]   never stored, and not here
//
// Every rank has all of the model but the head, of which it has some rows, and computes the same
// bits as the other ranks.
namespace logitless::train_lm {

struct Model {
  // With its numbers before the first step. rows: this rank's of the head.
  Model(const Options& options, int64_t its_V, const RowRange& its_rows);

  // The head last.
  std::vector<Parameter*> parameters() { return {&embedding, &hidden, &bias, &head}; }

  int64_t V = 0;
  RowRange rows;
  int64_t context = 0;  // words
  int64_t H = 0;
  Parameter embedding;  // [V + 1, E]; the last row is the word that is not there
  Parameter hidden;     // [context * E, H]
  Parameter bias;       // [1, H]
  Parameter head;       // [rows, H]
};

// The small layers for BT words, and what their gradients need.
class Layers {
 public:
  Layers() = default;
  explicit Layers(const Options& options);  // with the memory for a batch

  // dropout: of `output`, by `random`; 0 for words that are not trained on.
  void forward(const Model& model, std::span<const int32_t> contexts, double dropout,
               const RandomNumbers& random);
  // Gradients of all parameters but the head; grad_output [BT, H].
  void backward(Model& model, std::span<const float> grad_output);

  const std::vector<float>& output() const { return output_; }  // [BT, H]

 private:
  std::vector<int32_t> contexts_;  // [BT, context]
  std::vector<float> input_;       // [BT, context * E]
  std::vector<float> active_;      // [BT, H]
  std::vector<float> kept_;        // [BT, H]: 0, or 1 / (1 - dropout)
  std::vector<float> output_;      // [BT, H]
  std::vector<float> grad_sum_;    // [BT, H]: of what tanh was given
  std::vector<float> transposed_;  // [H, context * E]: hidden
  std::vector<float> grad_input_;  // [BT, context * E]
};

}  // namespace logitless::train_lm
