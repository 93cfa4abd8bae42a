// SPDX-License-Identifier: Apache-2.0
#include "tests/parallel/sharded.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "reference/tolerance.h"
#include "tests/support/judge.h"

namespace logitless::test {
namespace {

template <class View>
View rows_of(View view, const RowRange& rows) {
  using Byte =
      std::conditional_t<std::is_same_v<View, ConstMatrixView>, const std::byte, std::byte>;
  view.data = static_cast<Byte*>(view.data) + rows.begin * view.row_stride * size_of(view.dtype);
  view.rows = rows.size();
  return view;
}

RowRange slice_of(const ShardedStep& c, int rank) {
  return *balanced_shard(c.step.shape.BT, static_cast<int>(c.cover.size()), rank);
}

StepResult whole_outputs(const StepCase& c) {
  StepResult r;
  r.loss = TestTensor::vector(DType::f32, c.shape.BT, c.vector_stride);
  r.logits_max = TestTensor::vector(DType::f32, c.shape.BT, c.vector_stride);
  r.sum_exp_logits = TestTensor::vector(DType::f32, c.shape.BT, c.vector_stride);
  r.predicted_logits = TestTensor::vector(DType::f32, c.shape.BT, c.vector_stride);
  r.gradients = make_gradient_outputs(gradient_case_of(c));
  return r;
}

// Everyone's words, in rank order; all ranks have as many.
std::vector<std::vector<uint64_t>> gather(Communicator& communicator,
                                          const std::vector<uint64_t>& mine) {
  const auto ranks = static_cast<size_t>(communicator.size());
  std::vector<uint64_t> all(mine.size() * ranks);
  const auto ok = communicator.all_gather(std::as_bytes(std::span(mine)),
                                          std::as_writable_bytes(std::span(all)));
  EXPECT_TRUE(ok) << (ok ? "" : ok.error().message);
  std::vector<std::vector<uint64_t>> parts;
  for (size_t r = 0; r < ranks; ++r) {
    const auto begin = all.begin() + static_cast<int64_t>(r * mine.size());
    parts.emplace_back(begin, begin + static_cast<int64_t>(mine.size()));
  }
  return parts;
}

double from_bits(DType dtype, uint64_t bits) {
  switch (dtype) {
    case DType::f32:
      return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    case DType::f16: {
      float16 value;
      value.bits = static_cast<uint16_t>(bits);
      return static_cast<double>(static_cast<float>(value));
    }
    default: {
      bfloat16 value;
      value.bits = static_cast<uint16_t>(bits);
      return static_cast<double>(static_cast<float>(value));
    }
  }
}

// `whole` gets each rank's rows; what a rank has beyond them must be as made.
void join_rows(Communicator& communicator, const char* name, const TestTensor& mine,
               const TestTensor& as_made, const std::function<RowRange(int)>& rows,
               TestTensor& whole) {
  const auto all = gather(communicator, mine.all_bits());
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const RowRange own = rows(rank);
    for (int64_t r = 0; r < mine.rows(); ++r) {
      for (int64_t h = 0; h < mine.cols(); ++h) {
        const uint64_t bits =
            all[static_cast<size_t>(rank)][static_cast<size_t>(r * mine.cols() + h)];
        if (r >= own.begin && r < own.end) {
          whole.set(r, h, from_bits(mine.dtype(), bits));
        } else {
          ASSERT_EQ(bits, as_made.bits(r, h))
              << name << ": rank " << rank << " has written [" << r << ", " << h << "]";
        }
      }
    }
  }
}

// The weight of each token in the total, as the gradient operators get it.
std::vector<float> token_gradients(const StepCase& step) {
  const LossAndGradientOperands operands = step.operands();
  const int64_t BT = step.shape.BT;
  int64_t counting = 0;
  for (int64_t b = 0; b < BT; ++b) counting += step.row_counts(b) ? 1 : 0;
  const bool plain = !operands.token_weights && counting > 0;
  const double normalizer =
      operands.normalizer.value_or(plain ? static_cast<double>(counting) : 1.0);
  std::vector<float> gradients(static_cast<size_t>(BT));
  for (int64_t b = 0; b < BT; ++b) {
    double weight = 1;
    if (const auto& given = operands.token_weights) {
      weight = double{static_cast<const float*>(given->data)[b * given->stride]};
    }
    gradients[static_cast<size_t>(b)] = static_cast<float>(weight / normalizer);
  }
  return gradients;
}

// a, whose gradients come from a call of their own.
Result<void> run_apart(Communicator& communicator, const ShardedStep& c,
                       const VocabParallelPlan& plan, const RankArguments& a) {
  VocabParallelTypes types = c.types();
  types.grad_input = types.grad_weight = std::nullopt;
  const auto forward = plan_vocab_parallel_linear_cross_entropy(communicator, c.step.shape,
                                                                plan.rows(), types, c.options);
  if (!forward) return forward.error();
  LossAndGradientOutputs outputs = a.outputs;
  outputs.grad_input = outputs.grad_weight = std::nullopt;
  if (auto ok = run(*forward, communicator, a.operands, outputs,
                    guarded_workspace(forward->workspace_bytes()), a.cancel);
      !ok) {
    return ok;
  }
  const std::vector<float> gradients = token_gradients(c.step);
  LossAndGradientOperands operands = a.operands;
  operands.token_weights = vector_view(std::span(gradients));
  operands.normalizer = 1.0;
  return run_gradient(plan, communicator, operands, {*outputs.logits_max, *outputs.sum_exp_logits},
                      {a.outputs.grad_input, a.outputs.grad_weight, a.outputs.sparse_counts},
                      guarded_workspace(plan.workspace_bytes()), a.cancel);
}

}  // namespace

VocabParallelTypes ShardedStep::types() const {
  return {.operand = step.arithmetic.operand,
          .multiply = step.arithmetic.multiply,
          .target = step.target_type,
          .grad_tolerance = step.grad_tolerance,
          .grad_input = step.grad_input,
          .grad_weight = step.grad_weight,
          .input_rows = input_rows,
          .grad_input_rows = grad_input_rows,
          .chunk_tokens = chunk_tokens,
          .agree_in_run = agree_in_run,
          .strategy = strategy};
}

std::vector<RowRange> balanced_cover(int64_t V, int ranks) {
  std::vector<RowRange> cover;
  for (int r = 0; r < ranks; ++r) cover.push_back(*balanced_shard(V, ranks, r));
  return cover;
}

std::vector<RowRange> padded_cover(int64_t V, int ranks, int64_t multiple) {
  std::vector<RowRange> cover;
  for (int r = 0; r < ranks; ++r) cover.push_back(*padded_shard(V, ranks, r, multiple));
  return cover;
}

std::vector<RowRange> uneven_cover(int64_t V, int ranks) {
  std::vector<RowRange> cover;
  const int64_t parts = int64_t{ranks} * (ranks + 1) / 2;
  int64_t begin = 0;
  for (int r = 0; r < ranks; ++r) {
    const int64_t end = r + 1 == ranks ? V : std::min(V, begin + V * (r + 1) / parts);
    cover.push_back({begin, end});
    begin = end;
  }
  std::ranges::reverse(cover);
  return cover;
}

std::vector<RowRange> cover_with_empty(int64_t V, int ranks) {
  std::vector<RowRange> cover;
  int full = 0;
  const auto is_empty = [&](int r) { return ranks > 1 && r % 3 == 0; };
  for (int r = 0; r < ranks; ++r) full += is_empty(r) ? 0 : 1;
  int next = 0;
  for (int r = 0; r < ranks; ++r) {
    cover.push_back(is_empty(r) ? RowRange{V, V} : *balanced_shard(V, full, next++));
  }
  return cover;
}

RankResult run_rank(Communicator& communicator, const ShardedStep& c,
                    const std::function<void(RankArguments&)>& change) {
  RankResult r;
  r.step = whole_outputs(c.step);
  const int rank = communicator.rank();
  const RowRange rows = c.cover[static_cast<size_t>(rank)];
  const auto plan = plan_vocab_parallel_linear_cross_entropy(communicator, c.step.shape, rows,
                                                             c.types(), c.options);
  if (!plan) {
    r.result = plan.error();
    return r;
  }
  r.description = plan->describe();
  r.strategy = plan->strategy();
  EXPECT_TRUE(c.strategy == Strategy::automatic || r.strategy == c.strategy);
  RankArguments a;
  a.operands = c.step.operands();
  a.operands.weight = rows_of(a.operands.weight, rows);
  if (c.input_rows == TokenRows::slice) {
    a.operands.input = rows_of(a.operands.input, slice_of(c, rank));
  }
  a.outputs.loss = r.step.loss.vector_view();
  a.outputs.total = &r.step.total;
  a.outputs.logits_max = r.step.logits_max.vector_view();
  a.outputs.sum_exp_logits = r.step.sum_exp_logits.vector_view();
  a.outputs.predicted_logits = r.step.predicted_logits.vector_view();
  if (c.step.grad_tolerance > 0) {
    a.outputs.sparse_counts = &(r.step.gradients.sparse_counts = kOldCounts);
  }
  if (c.step.grad_input) {
    a.outputs.grad_input = r.step.gradients.grad_input->matrix_view();
    if (c.grad_input_rows == TokenRows::slice) {
      a.outputs.grad_input = rows_of(*a.outputs.grad_input, slice_of(c, rank));
    }
  }
  if (c.step.grad_weight) {
    a.outputs.grad_weight = rows_of(r.step.gradients.grad_weight->matrix_view(), rows);
  }
  a.workspace = guarded_workspace(plan->workspace_bytes());
  if (change) change(a);
  r.result = c.apart ? run_apart(communicator, c, *plan, a)
                     : run(*plan, communicator, a.operands, a.outputs, a.workspace, a.cancel);
  EXPECT_EQ(r.step.gradients.damage() + r.step.loss.damage() + r.step.logits_max.damage() +
                r.step.sum_exp_logits.damage() + r.step.predicted_logits.damage(),
            "");
  return r;
}

StepResult assemble(Communicator& communicator, const ShardedStep& c, const RankResult& mine) {
  StepResult whole = whole_outputs(c.step);
  const StepResult as_made = whole_outputs(c.step);
  whole.total = mine.step.total;
  std::vector<uint64_t> common = {std::bit_cast<uint64_t>(mine.step.total)};
  const auto everywhere = [&](const TestTensor& got, TestTensor& into) {
    const auto bits = got.all_bits();
    common.insert(common.end(), bits.begin(), bits.end());
    for (int64_t row = 0; row < got.rows(); ++row) {
      for (int64_t col = 0; col < got.cols(); ++col) into.set(row, col, got.get(row, col));
    }
  };
  everywhere(mine.step.loss, whole.loss);
  everywhere(mine.step.logits_max, whole.logits_max);
  everywhere(mine.step.sum_exp_logits, whole.sum_exp_logits);
  everywhere(mine.step.predicted_logits, whole.predicted_logits);
  if (c.step.grad_input && c.grad_input_rows == TokenRows::all) {
    everywhere(*mine.step.gradients.grad_input, *whole.gradients.grad_input);
  } else if (c.step.grad_input) {
    join_rows(
        communicator, "grad_input", *mine.step.gradients.grad_input, *as_made.gradients.grad_input,
        [&](int rank) { return slice_of(c, rank); }, *whole.gradients.grad_input);
  }
  EXPECT_EQ(gather(communicator, common)[0], common)
      << "rank " << communicator.rank() << " has other bits than rank 0";
  if (c.step.grad_weight) {
    join_rows(
        communicator, "grad_weight", *mine.step.gradients.grad_weight,
        *as_made.gradients.grad_weight,
        [&](int rank) { return c.cover[static_cast<size_t>(rank)]; }, *whole.gradients.grad_weight);
  }
  return whole;
}

void judge_whole(const ShardedStep& c, const StepResult& whole, Strategy strategy) {
  SCOPED_TRACE(c.step.describe() + ", " + std::to_string(c.cover.size()) + " ranks");
  const int64_t BT = c.step.shape.BT;
  // Statistics against float64.
  TestTensor filter = TestTensor::vector(DType::u8, BT);
  for (int64_t b = 0; b < BT; ++b) filter.set_index(b, c.step.row_counts(b) ? 1 : 0);
  const reference::Statistics want = reference::forward(
      c.step.input.matrix_view(), c.step.weight.matrix_view(), c.step.target.vector_view(),
      {.multiply = c.step.arithmetic.multiply, .rows = {.counts = filter.vector_view()}});
  const double n = static_cast<double>(std::max<int64_t>(BT, 1));
  const std::string suffix = std::string(", sharded ") + c.step.arithmetic.name;
  const StepResult one = run_step(c.step, c.options, Strategy::recompute);
  {
    Judge max("logits_max" + suffix), sum("sum_exp_logits" + suffix),
        predicted("predicted_logits" + suffix), loss("loss" + suffix),
        apart("loss of ranks against one" + suffix);
    double total = 0;
    for (int64_t b = 0; b < BT; ++b) {
      const auto i = static_cast<size_t>(b);
      max.check(whole.logits_max.get(b), want.logits_max.value[i],
                reference::allowed_logits_max(want.logits_max.value[i],
                                              want.logits_max.deviation[i], 0, n),
                b);
      sum.check(whole.sum_exp_logits.get(b), want.sum_exp_logits.value[i],
                reference::allowed_sum_exp_logits(want.sum_exp_logits.value[i],
                                                  want.sum_exp_logits.deviation[i], 0, n),
                b);
      predicted.check(whole.predicted_logits.get(b), want.predicted_logits.value[i],
                      reference::allowed_predicted_logits(want.predicted_logits.value[i],
                                                          want.predicted_logits.deviation[i], 0, n),
                      b);
      if (!c.step.row_counts(b)) {
        EXPECT_EQ(whole.loss.get(b), 0.0) << b;
        continue;
      }
      const double exact = reference::loss(want.logits_max.value[i], want.sum_exp_logits.value[i],
                                           want.predicted_logits.value[i]);
      const double allowed = reference::allowed_loss(exact, std::log(want.sum_exp_logits.value[i]),
                                                     want.predicted_logits.value[i],
                                                     want.loss_deviation[i], want.loss_flip[i], n);
      loss.check(whole.loss.get(b), exact, allowed, b);
      apart.check(whole.loss.get(b), one.loss.get(b), allowed, b);
      total += c.step.token_weight(b) * whole.loss.get(b);
    }
    EXPECT_TRUE(whole.total == total || (std::isnan(total) && std::isnan(whole.total)))
        << whole.total << " " << total;
  }
  if (strategy == Strategy::one_pass) return expect_one_pass_gradient(c.step, whole);
  expect_gradient(gradient_case_of(c.step, &whole), whole.gradients);
}

std::vector<uint64_t> expect_sharded(Communicator& communicator, const ShardedStep& c) {
  const RankResult mine = run_rank(communicator, c);
  if (!mine.result) {
    ADD_FAILURE() << "rank " << communicator.rank() << ": " << mine.result.error().message;
    return {};
  }
  const StepResult whole = assemble(communicator, c, mine);
  if (communicator.rank() == 0) judge_whole(c, whole, mine.strategy);
  return whole.bits();
}

}  // namespace logitless::test
