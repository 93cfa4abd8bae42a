// SPDX-License-Identifier: Apache-2.0
#include "tests/parallel/scenarios.h"

#include <cmath>
#include <functional>
#include <utility>

namespace logitless::test {
namespace {

struct NamedCover {
  const char* name;
  std::vector<RowRange> cover;
};

std::vector<NamedCover> covers(int64_t V, int ranks) {
  return {{"balanced", balanced_cover(V, ranks)},
          {"padded", padded_cover(V, ranks, 16)},
          {"uneven", uneven_cover(V, ranks)},
          {"with empty", cover_with_empty(V, ranks)}};
}

ShardedStep sharded(const Shape& shape, const Arithmetic& arithmetic, std::vector<RowRange> cover) {
  ShardedStep s;
  s.step = make_step(shape, arithmetic);
  s.cover = std::move(cover);
  return s;
}

std::vector<Scenario> with(Strategy strategy, std::vector<Scenario> all) {
  for (Scenario& s : all) {
    s.name += strategy == Strategy::one_pass ? ", one pass" : ", recompute";
    s.step.strategy = strategy;
  }
  return all;
}

Arithmetic bf16() { return all_arithmetics()[1]; }
Arithmetic f32() { return all_arithmetics()[2]; }

}  // namespace

std::vector<Scenario> cover_scenarios(int ranks, Strategy strategy) {
  std::vector<Scenario> all;
  const Shape shape{.BT = 37, .V = 203, .H = 24};
  int turn = 0;
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    for (const NamedCover& c : covers(shape.V, ranks)) {
      for (const bool scatter : {false, true}) {
        for (const int64_t chunk : {0, 6}) {
          ++turn;
          ShardedStep s = sharded(shape, arithmetic, c.cover);
          s.grad_input_rows = scatter ? TokenRows::slice : TokenRows::all;
          s.input_rows = turn % 3 == 0 ? TokenRows::slice : TokenRows::all;
          s.chunk_tokens = chunk;
          s.step.grad_input = GradientOutput{
              .dtype = turn % 5 < 3 ? arithmetic.operand : DType::f32, .accumulate = turn % 7 < 2};
          s.step.grad_weight = GradientOutput{
              .dtype = turn % 4 < 2 ? arithmetic.operand : DType::f32, .accumulate = turn % 9 < 3};
          all.push_back({std::string(c.name) + ", " + arithmetic.name +
                             (scatter ? ", scattered" : ", reduced") + ", chunk " +
                             std::to_string(chunk),
                         std::move(s)});
        }
      }
    }
  }
  return with(strategy, std::move(all));
}

std::vector<Scenario> edge_scenarios(int ranks, Strategy strategy) {
  std::vector<Scenario> all;
  const auto add = [&](const char* name, const Shape& shape, const Arithmetic& arithmetic,
                       const std::function<void(ShardedStep&)>& change = {}) {
    for (const bool scatter : {false, true}) {
      for (const int64_t chunk : {0, 2}) {
        ShardedStep s = sharded(shape, arithmetic, balanced_cover(shape.V, ranks));
        s.grad_input_rows = s.input_rows = scatter ? TokenRows::slice : TokenRows::all;
        s.chunk_tokens = chunk;
        if (change) change(s);
        all.push_back({std::string(name) + (scatter ? ", scattered" : "") + ", chunk " +
                           std::to_string(chunk),
                       std::move(s)});
      }
    }
  };
  add("BT = 0", {.BT = 0, .V = 50, .H = 8}, bf16());
  add("BT = 1", {.BT = 1, .V = 50, .H = 8}, bf16());
  add("BT = 1, f32", {.BT = 1, .V = 50, .H = 8}, f32());
  add("three vocabulary rows", {.BT = 9, .V = 3, .H = 8}, bf16());
  add("one vocabulary row", {.BT = 9, .V = 1, .H = 8}, f32());
  add("V = 0", {.BT = 9, .V = 0, .H = 8}, bf16());
  add("H = 0", {.BT = 9, .V = 30, .H = 0}, bf16());
  add("no token counts", {.BT = 9, .V = 50, .H = 8}, bf16(), [](ShardedStep& s) {
    s.step.ignore_index = -100;
    for (int64_t b = 0; b < 9; ++b) s.step.target.set_index(b, -100);
  });
  add("the last token counts alone", {.BT = 9, .V = 50, .H = 8}, f32(), [](ShardedStep& s) {
    s.step.ignore_index = -100;
    for (int64_t b = 0; b < 8; ++b) s.step.target.set_index(b, -100);
  });
  // What an ignored token holds is nobody's business, a target that no shard owns included.
  add("ignored targets outside", {.BT = 9, .V = 50, .H = 8}, bf16(), [](ShardedStep& s) {
    s.step.ignore_index = 4711;
    for (int64_t b = 0; b < 9; b += 2) s.step.target.set_index(b, 4711);
    s.step.input.set(2, 3, NAN);
  });
  return with(strategy, std::move(all));
}

std::vector<Scenario> option_scenarios(int ranks, Strategy strategy) {
  std::vector<Scenario> all;
  const Shape shape{.BT = 26, .V = 90, .H = 16};
  const auto add = [&](const char* name, const std::function<void(ShardedStep&)>& change) {
    for (const int64_t chunk : {0, 4}) {
      ShardedStep s = sharded(shape, bf16(), uneven_cover(shape.V, ranks));
      s.chunk_tokens = chunk;
      change(s);
      all.push_back({std::string(name) + ", chunk " + std::to_string(chunk), std::move(s)});
    }
  };
  const auto weigh = [](ShardedStep& s) {
    s.step.token_weights = TestTensor::vector(DType::f32, 26, 2);
    for (int64_t b = 0; b < 26; ++b) {
      s.step.token_weights->set(b, 0.1 * static_cast<double>(b % 7) - 0.2);
    }
  };
  add("token weights", weigh);
  add("token weights and normalizer", [&](ShardedStep& s) {
    weigh(s);
    s.step.normalizer = 3.0;
  });
  add("normalizer", [](ShardedStep& s) { s.step.normalizer = 100.0; });
  add("counts", [](ShardedStep& s) {
    s.step.counts = TestTensor::vector(DType::u8, 26, 3);
    for (int64_t b = 0; b < 26; ++b) s.step.counts->set_index(b, b % 3);
  });
  add("counts, scattered", [](ShardedStep& s) {
    s.step.counts = TestTensor::vector(DType::u8, 26);
    for (int64_t b = 0; b < 26; ++b) s.step.counts->set_index(b, b % 5 < 2);
    s.grad_input_rows = TokenRows::slice;
  });
  add("no grad_input", [](ShardedStep& s) { s.step.grad_input.reset(); });
  add("no grad_weight", [](ShardedStep& s) { s.step.grad_weight.reset(); });
  add("loss alone", [](ShardedStep& s) {
    s.step.grad_input.reset();
    s.step.grad_weight.reset();
  });
  add("no agreement", [](ShardedStep& s) { s.agree_in_run = false; });
  add("two threads", [](ShardedStep& s) { s.options.threads = 2; });
  add("32-bit targets and strides", [&](ShardedStep& s) {
    s.step = make_step(shape, bf16(),
                       {.input = {.gap = 3},
                        .weight = {.transposed = true},
                        .target_type = DType::i32,
                        .target_stride = 2,
                        .outside = 0});
    s.step.vector_stride = 3;
    s.step.grad_input_layout = {.transposed = true, .gap = 2};
    s.step.grad_weight_layout = {.step = 2};
    s.input_rows = TokenRows::slice;
  });
  return with(strategy, std::move(all));
}

}  // namespace logitless::test
