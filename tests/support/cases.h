// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "reference/reference.h"
#include "tests/support/test_tensor.h"

// Operands, runs and judgements of the operators, so that a test says only what is special in it.
namespace logitless::test {

// What is stored and what is multiplied.
struct Arithmetic {
  DType operand = DType::bf16;
  std::optional<DType> multiply = {};
  const char* name = "bf16";
  DType multiplied() const { return multiply.value_or(operand); }
};
inline void PrintTo(const Arithmetic& arithmetic, std::ostream* out) { *out << arithmetic.name; }
std::vector<Arithmetic> all_arithmetics();  // f16, bf16, f32, f32 multiplied in bf16

enum class InputKind {
  peaked,     // as a trained model: some tokens sure of their target, some not
  flat,       // an untrained model
  certain,    // p of the target within float of 1
  offset,     // all logits near 1e4
  negative,   // all logits below -100
  minus_inf,  // some logits -inf; row 0 all -inf
};

// ---- forward ----------------------------------------------------------------------------------
struct ForwardCase {
  Shape shape;
  Arithmetic arithmetic;
  DType target_type = DType::i64;
  MaskLayout mask_layout = MaskLayout::packed_lsb_first;
  std::optional<DType> logits = {};
  LogitsRounding rounding = LogitsRounding::none;
  int64_t vocab_start = 0;
  std::optional<int64_t> vocab_end = {};
  std::optional<int64_t> ignore_index = {};
  bool with_mask = true;           // the mask output is asked for
  bool with_masked_target = true;  // so is masked_target
  Layout logits_layout = {};
  int64_t vector_stride = 1;  // of the vector outputs and the mask
  TestTensor input, weight, target;
  std::optional<TestTensor> counts = {};

  ForwardTypes types() const;
  ForwardOperands operands() const;
  std::string describe() const;
};

struct CaseOptions {
  InputKind kind = InputKind::peaked;
  uint64_t seed = 1;
  Layout input = {};
  Layout weight = {};
  DType target_type = DType::i64;
  int64_t target_stride = 1;
  int64_t vocab_start = 0;
  double outside = 0.2;  // share of targets on other shards
};
ForwardCase make_forward_case(const Shape& shape, const Arithmetic& arithmetic,
                              const CaseOptions& options = {});

struct ForwardResult {
  TestTensor logits_max, sum_exp_logits, predicted_logits;
  std::optional<TestTensor> target_mask = {}, masked_target = {}, logits = {};
  std::vector<uint64_t> bits() const;  // of everything
  // Bits of what belongs to one token: statistics, mask, masked target, logits.
  std::vector<uint64_t> token_bits(int64_t token, MaskLayout layout) const;
  std::string damage() const;
};
ForwardResult make_forward_outputs(const ForwardCase& c);
ForwardOutputs outputs_of(const ForwardCase& c, ForwardResult& result);

// Plans, asserts the ISA, runs in a guarded workspace of exactly the planned size, checks gaps.
// Any error is a test failure.
ForwardResult run_forward(const ForwardCase& c, const PlanOptions& options);
ForwardResult run_forward(const ForwardCase& c, const ForwardPlan& plan);
reference::Statistics reference_forward(const ForwardCase& c);
// Every output against the definition.
void expect_forward(const ForwardCase& c, const ForwardResult& result);
void expect_forward(const ForwardCase& c, const ForwardResult& result,
                    const reference::Statistics& want);

// ---- gradient ---------------------------------------------------------------------------------
struct GradientCase {
  Shape shape;
  Arithmetic arithmetic;
  DType target_type = DType::i64;
  MaskLayout mask_layout = MaskLayout::packed_lsb_first;
  GradientMode mode = GradientMode::memory_saving;
  LogitsRounding rounding = LogitsRounding::none;
  float grad_tolerance = 0.0f;
  uint64_t seed = 0;
  std::optional<GradientOutput> grad_input = GradientOutput{};
  std::optional<GradientOutput> grad_weight = GradientOutput{};
  Layout grad_input_layout = {}, grad_weight_layout = {};
  TestTensor grad, input, weight, masked_target, logits_max, sum_exp_logits;
  std::optional<TestTensor> target_mask = {}, grad_logsumexp = {}, softmax = {}, counts = {},
                            token_ids = {};

  GradientTypes types() const;
  GradientOperands operands() const;
  reference::GradientOperands reference_operands() const;
  reference::GradientOptions reference_options() const;
  std::string describe() const;
};

// From a forward case (which is consumed) with the definition's own statistics, as floats. Both
// outputs of operand type unless changed; grad differs per token and is 0 for some.
struct GradientCaseOptions {
  GradientMode mode = GradientMode::memory_saving;
  bool grad_logsumexp = false;
  double grad_scale = 1.0;
  double zero_grad = 0.1;  // share of tokens
  uint64_t seed = 7;
  Layout softmax = {};
  int64_t vector_stride = 1;
};
GradientCase make_gradient_case(ForwardCase forward, const GradientCaseOptions& options = {});

// What the caller's counts hold before a run.
inline constexpr SparseCounts kOldCounts = {
    .rows = -1, .dense_rows = -2, .kept = -3, .elements = -5};

struct GradientResult {
  std::optional<TestTensor> grad_input = {}, grad_weight = {};
  SparseCounts sparse_counts = {};
  // What the buffers held before, where they are accumulated into.
  reference::Matrix initial_input = {}, initial_weight = {};
  std::vector<uint64_t> bits() const;
  std::string damage() const;
};
GradientResult make_gradient_outputs(const GradientCase& c);
GradientOutputs outputs_of(GradientResult& result);
GradientResult run_gradient(const GradientCase& c, const PlanOptions& options);
GradientResult run_gradient(const GradientCase& c, const GradientPlan& plan);
struct ReferenceGradient {
  std::optional<reference::Gradient> input, weight;
};
ReferenceGradient reference_gradient(const GradientCase& c);
void expect_gradient(const GradientCase& c, const GradientResult& result);
void expect_gradient(const GradientCase& c, const GradientResult& result,
                     const ReferenceGradient& want);

}  // namespace logitless::test
