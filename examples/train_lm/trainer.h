// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "examples/train_lm/head.h"
#include "examples/train_lm/model.h"
#include "examples/train_lm/options.h"
#include "examples/train_lm/text.h"

namespace logitless::train_lm {

// Which words a step predicts: in every epoch each training word once, in an order of its own,
// those that are left over when a batch no longer fits excepted.
class Batches {
 public:
  // training: at least a batch of them.
  Batches(const Options& options, std::vector<int32_t> training);
  // Positions of step `step`, from 1.
  std::vector<int32_t> of_step(int64_t step);

 private:
  uint64_t seed_;
  int64_t batch_;
  int64_t per_epoch_;
  std::vector<int32_t> training_;
  int64_t epoch_ = -1;          // that order_ is of
  std::vector<int32_t> order_;  // positions
};

// The model and its training, one step after the other. Every call of it is collective.
class Trainer {
 public:
  struct Plans {
    VocabParallelPlan step, held_out;
  };
  // Not collective, and asks for the memory of the model and of a step: std::bad_alloc. text must
  // outlive the trainer.
  Trainer(Communicator& ranks, const Options& options, const Text& text, const RowRange& rows,
          const Plans& plans);

  // One step; the mean loss of its words before it, with the same bits on every rank.
  // ErrorKind::cancelled, on every rank, when `cancel` fires on one: the model is as before.
  Result<double> step(const CancelToken& cancel);
  // The same with another head than the library's, for comparison: its mean loss, and gradients of
  // it as Head::run has them.
  using OtherHead = std::function<Result<double>(
      const float* input, const float* weight, const std::vector<int64_t>& target,
      double normalizer, float* grad_input, float* grad_weight)>;
  Result<double> step_with(const OtherHead& head);
  // Mean loss of the held-out words.
  Result<double> held_out_loss(const CancelToken& cancel);

  Model& model() { return model_; }
  const Options& options() const { return options_; }
  int64_t steps_done() const { return static_cast<int64_t>(losses_.size()); }
  std::vector<double>& losses() { return losses_; }  // of every step
  const Split& split() const { return split_; }
  const VocabParallelPlan& plan() const { return head_.the_plan(); }
  // Of the last step; kept and elements are those of this rank's rows.
  const SparseCounts& sparse_counts() const { return head_.sparse_counts(); }

  // Of the last step, for checking it.
  const std::vector<float>& head_input() const { return layers_.output(); }  // [BT, H]
  const std::vector<int64_t>& target() const { return target_; }             // [BT]
  const std::vector<float>& token_losses() const { return head_.loss(); }    // [BT]
  const std::vector<float>& grad_input() const { return grad_input_; }       // [BT, H]

 private:
  // The words at `positions`, and before them.
  void gather(std::span<const int32_t> positions, int64_t rows);

  Options options_;
  const Text& text_;
  Split split_;
  Batches batches_;
  Model model_;
  Head head_;
  Head held_out_head_;
  Layers layers_;
  std::vector<int32_t> contexts_;
  std::vector<int64_t> target_;
  std::vector<float> grad_input_;
  std::vector<double> losses_;
};

// Plans, then a trainer; threads: 0 = the library's default. Collective: where one rank has not the
// memory for it, or a plan is impossible, every rank throws the same cli::Failure.
std::unique_ptr<Trainer> make_trainer(Communicator& ranks, const Options& options, const Text& text,
                                      const RowRange& rows, int threads);

}  // namespace logitless::train_lm
