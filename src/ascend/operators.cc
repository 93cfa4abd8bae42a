// SPDX-License-Identifier: Apache-2.0
// The C door of the three operators. Phase 1 checks, in the order that clients know, makes the plan
// and keeps it in an executor; phase 2 gives it the tensors' addresses and the stream's place.
#include <atomic>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"
#include "executor.h"
#include "logitless/logitless.h"
#include "strides.h"

namespace logitless::ascend {
namespace {

// ---- the rules
// ------------------------------------------------------------------------------------

struct Argument {
  const char* name;
  const aclTensor* handle;
  TensorLayout layout = {};  // once it was found alive

  int64_t dim(size_t i) const { return layout.dims[i]; }
  bool given() const { return handle != nullptr; }
};

std::string shape_text(const std::vector<int64_t>& dims) {
  std::string all = "[";
  for (size_t i = 0; i < dims.size(); ++i) all += text(i > 0 ? ", " : "", dims[i]);
  return all + "]";
}

// Rules looked at one after the other; the first that is broken stays, and later ones do nothing.
class Rules {
 public:
  bool ok() const { return first_.ok(); }
  const Status& first() const { return first_; }

  void not_null(const void* pointer, const char* name) {
    if (ok() && pointer == nullptr) {
      first_ = failure(ACLNN_ERR_PARAM_NULLPTR, name, ": is null, must be given");
    }
  }
  void not_null(const Argument& argument) { not_null(argument.handle, argument.name); }

  // Copies what the living tensors say, as one moment's state. Null ones are skipped.
  void alive(std::initializer_list<Argument*> arguments) {
    if (!ok()) return;
    first_ = Registry::instance().with_lock([&](const Registry::Lookup& lookup) -> Status {
      for (Argument* argument : arguments) {
        if (!argument->given()) continue;
        const Tensor* const tensor = lookup.find<Tensor>(argument->handle);
        if (tensor == nullptr) {
          return failure(ACLNN_ERR_PARAM_INVALID, argument->name,
                         ": is destroyed, or not a tensor from here");
        }
        argument->layout = tensor->layout;
      }
      return {};
    });
  }

  void dtype(const Argument& argument, std::initializer_list<aclDataType> allowed) {
    if (!ok()) return;
    std::string list;
    size_t i = 0;
    for (const aclDataType one : allowed) {
      if (one == argument.layout.dtype) return;
      list += (i == 0 ? "" : i + 1 == allowed.size() ? " or " : ", ") + name_of_data_type(one);
      ++i;
    }
    broken(argument, "dtype is ", name_of_data_type(argument.layout.dtype), ", must be ", list);
  }

  void dtype_as(const Argument& argument, const Argument& other) {
    if (!ok() || argument.layout.dtype == other.layout.dtype) return;
    broken(argument, "dtype is ", name_of_data_type(argument.layout.dtype), ", must be ",
           name_of_data_type(other.layout.dtype), ", that of ", other.name);
  }

  void format_nd(const Argument& argument) {
    if (!ok() || argument.layout.format == ACL_FORMAT_ND) return;
    broken(argument, "format is ", static_cast<int>(argument.layout.format),
           ", must be ACL_FORMAT_ND (2)");
  }

  void rank(const Argument& argument, size_t rank) {
    if (!ok() || argument.layout.dims.size() == rank) return;
    broken(argument, "shape is ", shape_text(argument.layout.dims), ", must have ", rank,
           rank == 1 ? " dimension" : " dimensions");
  }

  void shape(const Argument& argument, const std::vector<int64_t>& dims, const char* meaning) {
    if (!ok() || argument.layout.dims == dims) return;
    broken(argument, "shape is ", shape_text(argument.layout.dims), ", must be ", shape_text(dims),
           " = ", meaning);
  }

  // Sizes and strides that make sense: not negative, and every element within 2^62 bytes.
  void view(const Argument& argument) {
    if (!ok()) return;
    const TensorLayout& layout = argument.layout;
    bool empty = false;
    for (const int64_t dim : layout.dims) {
      if (dim < 0) {
        return broken(argument, "shape is ", shape_text(layout.dims), ", must not be negative");
      }
      empty = empty || dim == 0;
    }
    if (empty) return;
    int64_t extent = 1;
    for (size_t i = 0; i < layout.dims.size(); ++i) {
      int64_t reach = 0;
      if (layout.dims[i] == 1) continue;
      if (layout.strides[i] < 0) {
        return broken(argument, "strides are ", shape_text(layout.strides),
                      ", must not be negative");
      }
      if (__builtin_mul_overflow(layout.dims[i] - 1, layout.strides[i], &reach) ||
          __builtin_add_overflow(extent, reach, &extent) ||
          extent > (int64_t{1} << 62) / static_cast<int64_t>(size_of_data_type(layout.dtype))) {
        return broken(argument, "shape ", shape_text(layout.dims), " with strides ",
                      shape_text(layout.strides), " reaches too far, must stay within 2^62 bytes");
      }
    }
  }

  // Also that no two elements share memory.
  void output_view(const Argument& argument) {
    view(argument);
    if (!ok()) return;
    const TensorLayout& layout = argument.layout;
    for (const int64_t dim : layout.dims) {
      if (dim == 0) return;
    }
    const bool overlaps =
        layout.dims.size() == 2
            ? elements_overlap(layout.dims[0], layout.dims[1], layout.strides[0], layout.strides[1])
            : layout.dims.size() == 1 && layout.dims[0] > 1 && layout.strides[0] == 0;
    if (!overlaps) return;
    broken(argument, "shape ", shape_text(layout.dims), " with strides ",
           shape_text(layout.strides), ", elements of an output must not overlap");
  }

  // A rule about a shape, with what is allowed.
  template <class... Values>
  void shape_rule(bool holds, const Argument& argument, const Values&... allowed) {
    if (ok() && !holds) broken(argument, "shape is ", shape_text(argument.layout.dims), allowed...);
  }

  template <class... Values>
  void that(bool holds, const char* name, const Values&... values) {
    if (ok() && !holds) first_ = failure(ACLNN_ERR_PARAM_INVALID, name, ": ", values...);
  }

 private:
  template <class... Values>
  void broken(const Argument& argument, const Values&... values) {
    first_ = failure(ACLNN_ERR_PARAM_INVALID, argument.name, ": ", values...);
  }
  Status first_;
};

int64_t packed_bytes(int64_t tokens) { return tokens / 8 + (tokens % 8 != 0 ? 1 : 0); }

// A plan's refusal, as a phase 1 returns it: our limits are like the original's tiling limits,
// unless the shape itself is absurd.
Status refusal(const Error& error) {
  const bool of_an_argument =
      error.kind == ErrorKind::invalid_argument || error.kind == ErrorKind::wrong_type;
  return {of_an_argument ? ACLNN_ERR_PARAM_INVALID : ACLNN_ERR_INNER_NULLPTR, error.message};
}

// ---- from tensors to views
// --------------------------------------------------------------------------

DType dtype_of(const Argument& argument) {
  switch (argument.layout.dtype) {
    case ACL_FLOAT16:
      return DType::f16;
    case ACL_BF16:
      return DType::bf16;
    case ACL_INT32:
      return DType::i32;
    case ACL_INT64:
      return DType::i64;
    case ACL_UINT8:
      return DType::u8;
    default:
      return DType::f32;
  }
}

// Phase 1 keeps the view, phase 2 fills in where it begins. A dimension with at most one element
// has no stride worth looking at.
VectorView vector_of(const Argument& argument) {
  const int64_t size = argument.dim(0);
  return {nullptr, dtype_of(argument), size, size > 1 ? argument.layout.strides[0] : 1};
}

MatrixView matrix_of(const Argument& argument) {
  const int64_t rows = argument.dim(0);
  const int64_t cols = argument.dim(1);
  const bool empty = rows == 0 || cols == 0;
  return {nullptr,
          dtype_of(argument),
          rows,
          cols,
          rows > 1 && !empty ? argument.layout.strides[0] : cols,
          cols > 1 && !empty ? argument.layout.strides[1] : 1};
}

MaskView mask_of(const Argument& argument, int64_t tokens) {
  const bool packed = argument.layout.dtype == ACL_UINT8;
  return {nullptr, tokens, packed ? MaskLayout::packed_lsb_first : MaskLayout::byte_per_token,
          argument.dim(0) > 1 ? argument.layout.strides[0] : 1};
}

MatrixView at(MatrixView view, void* data) {
  view.data = data;
  return view;
}

// 16-bit elements; 0 has no bit set in either type.
void fill_zeros(const MatrixView& view) {
  if (view.cols == 0) return;  // without walking through any number of rows of nothing
  uint16_t* const data = static_cast<uint16_t*>(view.data);
  for (int64_t row = 0; row < view.rows; ++row) {
    for (int64_t col = 0; col < view.cols; ++col) {
      data[row * view.row_stride + col * view.col_stride] = 0;
    }
  }
}

std::shared_ptr<Executor> make_executor(const char* function,
                                        std::initializer_list<const Argument*> arguments) {
  auto executor = std::make_shared<Executor>();
  executor->function = function;
  for (const Argument* argument : arguments) {
    if (!argument->given()) continue;
    executor->operands.push_back({argument->name, argument->handle, argument->layout});
  }
  return executor;
}

void not_null_results(Rules& rules, const void* workspaceSize, const void* executor) {
  rules.not_null(workspaceSize, "workspaceSize");
  rules.not_null(executor, "executor");
}

// ---- forward
// ----------------------------------------------------------------------------------------

constexpr char kForward[] = "aclnnFusedLinearOnlineMaxSum";

void hint_at_inclusive_end(const char* function, int64_t start, int64_t end, int64_t V) {
  if (end - start != V - 1) return;
  static std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  leave_hint(function, text("vocabEndIndex: is ", end,
                            " = vocabStartIndex + V - 1, but the end is exclusive: "
                            "targets of ",
                            end, " are masked; said once per process"));
}

Status forward_phase_1(const char* function, Argument input, Argument weight, Argument target,
                       int64_t start, int64_t end, Argument max, Argument sum, Argument predicted,
                       Argument mask, Argument masked_target, Argument logits,
                       uint64_t* workspaceSize, aclOpExecutor** out) {
  Rules rules;
  not_null_results(rules, workspaceSize, out);
  for (const Argument* a :
       {&input, &weight, &target, &max, &sum, &predicted, &mask, &masked_target}) {
    rules.not_null(*a);
  }
  rules.alive({&input, &weight, &target, &max, &sum, &predicted, &mask, &masked_target, &logits});
  rules.dtype(input, {ACL_FLOAT16, ACL_BF16});
  rules.dtype(weight, {ACL_FLOAT16, ACL_BF16});
  rules.dtype(target, {ACL_INT32, ACL_INT64});
  rules.dtype_as(weight, input);
  for (const Argument* a : {&max, &sum, &predicted}) rules.dtype(*a, {ACL_FLOAT});
  rules.dtype(mask, {ACL_UINT8});
  rules.dtype_as(masked_target, target);
  if (logits.given()) rules.dtype_as(logits, input);
  for (const Argument* a : {&input, &weight}) rules.rank(*a, 2);
  for (const Argument* a : {&target, &max, &sum, &predicted, &mask, &masked_target}) {
    rules.rank(*a, 1);
  }
  if (!rules.ok()) return rules.first();

  const Shape shape = {input.dim(0), weight.dim(0), input.dim(1)};
  rules.shape_rule(shape.V != 0, weight, ", V must be at least 1");
  rules.shape_rule(shape.H <= 65534, input, ", H must be at most 65534");
  rules.shape_rule(weight.dim(1) == shape.H, weight, ", must be [V, H] with input's H = ", shape.H);
  for (const Argument* a : {&target, &max, &sum, &predicted}) rules.shape(*a, {shape.BT}, "[BT]");
  rules.shape(mask, {packed_bytes(shape.BT)}, "[ceil(BT / 8)]");
  rules.shape(masked_target, {shape.BT}, "[BT]");
  if (logits.given()) {
    rules.rank(logits, 2);
    rules.shape(logits, {shape.BT, shape.V}, "[BT, V]");
  }
  rules.that(start >= 0, "vocabStartIndex", "is ", start, ", must be at least 0");
  rules.that(end >= start, "vocabEndIndex", "is ", end,
             ", must be at least vocabStartIndex = ", start);
  for (const Argument* a : {&input, &weight, &target}) rules.view(*a);
  for (const Argument* a : {&max, &sum, &predicted, &mask, &masked_target}) rules.output_view(*a);
  if (logits.given()) rules.output_view(logits);
  if (!rules.ok()) return rules.first();

  // Without tokens there is nothing to run, and no address is looked at.
  auto executor = make_executor(kForward, {});
  int64_t workspace_bytes = 0;
  if (shape.BT > 0) {
    executor = make_executor(kForward, {&input, &weight, &target, &max, &sum, &predicted, &mask,
                                        &masked_target, &logits});
    ForwardTypes types;
    types.operand = dtype_of(input);
    types.target = dtype_of(target);
    types.logits_rounding = LogitsRounding::operand;
    if (logits.given()) types.logits = types.operand;
    const Result<ForwardPlan> plan = plan_forward(shape, types);
    if (!plan) return refusal(plan.error());
    workspace_bytes = plan->workspace_bytes();

    ForwardOperands operands;
    operands.input = matrix_of(input);
    operands.weight = matrix_of(weight);
    operands.target = vector_of(target);
    operands.vocab_start_index = start;
    operands.vocab_end_index = end;
    ForwardOutputs outputs;
    outputs.logits_max = vector_of(max);
    outputs.sum_exp_logits = vector_of(sum);
    outputs.predicted_logits = vector_of(predicted);
    outputs.target_mask = mask_of(mask, shape.BT);
    outputs.masked_target = vector_of(masked_target);
    if (logits.given()) outputs.logits = matrix_of(logits);
    executor->bind = [plan = *plan, operands, outputs](std::span<void* const> views,
                                                       std::span<std::byte> workspace) -> Work {
      ForwardOperands in = operands;
      in.input.data = views[0];
      in.weight.data = views[1];
      in.target.data = views[2];
      ForwardOutputs results = outputs;
      results.logits_max.data = views[3];
      results.sum_exp_logits.data = views[4];
      results.predicted_logits.data = views[5];
      results.target_mask->data = views[6];
      results.masked_target->data = views[7];
      if (results.logits) results.logits->data = views[8];
      return [=](const CancelToken* cancel) { return run(plan, in, results, workspace, cancel); };
    };
  }
  const Status status = publish(std::move(executor), workspace_bytes, workspaceSize, out);
  if (status.ok()) hint_at_inclusive_end(function, start, end, shape.V);
  return status;
}

// ---- loss
// -------------------------------------------------------------------------------------------

constexpr char kLoss[] = "aclnnFusedCrossEntropyLossWithMaxSum";

void no_label_smoothing(Rules& rules, float labelSmoothing) {
  rules.that(labelSmoothing == 0.0f, "labelSmoothing", "is ", labelSmoothing, ", must be 0");
}

Status loss_phase_1(Argument max, Argument sum, Argument predicted, float labelSmoothing,
                    Argument logits, Argument loss, Argument softmax, uint64_t* workspaceSize,
                    aclOpExecutor** out) {
  if (!logits.given()) softmax.handle = nullptr;  // ignored then
  Rules rules;
  not_null_results(rules, workspaceSize, out);
  for (const Argument* a : {&max, &sum, &predicted, &loss}) rules.not_null(*a);
  if (logits.given()) rules.not_null(softmax);
  rules.alive({&max, &sum, &predicted, &logits, &loss, &softmax});
  for (const Argument* a : {&max, &sum, &predicted, &loss}) rules.dtype(*a, {ACL_FLOAT});
  if (logits.given()) {
    rules.dtype(logits, {ACL_FLOAT, ACL_FLOAT16, ACL_BF16});
    rules.dtype(softmax, {ACL_FLOAT});
  }
  rules.rank(max, 1);
  for (const Argument* a : {&sum, &predicted, &loss}) {
    rules.shape(*a, max.layout.dims, "the shape of logitsMax");
  }
  if (logits.given()) {
    rules.rank(logits, 2);
    rules.shape(softmax, logits.layout.dims, "the shape of vocabParallelLogitsOptional");
    if (rules.ok()) {
      rules.shape_rule(logits.dim(0) == max.dim(0), logits,
                       ", must be [BT, V] with logitsMax's BT = ", max.dim(0));
    }
  }
  no_label_smoothing(rules, labelSmoothing);
  for (const Argument* a : {&max, &sum, &predicted}) rules.view(*a);
  rules.output_view(loss);
  if (logits.given()) {
    rules.view(logits);
    rules.output_view(softmax);
  }
  if (!rules.ok()) return rules.first();

  const int64_t BT = max.dim(0);
  const int64_t V = logits.given() ? logits.dim(1) : 0;
  auto executor = make_executor(kLoss, {});
  int64_t workspace_bytes = 0;
  if (BT > 0) {
    executor = make_executor(kLoss, {&max, &sum, &predicted, &loss, &logits, &softmax});
    LossTypes types;
    if (V > 0) types.softmax_logits = dtype_of(logits);
    const Result<LossPlan> plan = plan_loss(BT, V, types);
    if (!plan) return refusal(plan.error());
    workspace_bytes = plan->workspace_bytes();

    LossOperands operands;
    operands.logits_max = vector_of(max);
    operands.sum_exp_logits = vector_of(sum);
    operands.predicted_logits = vector_of(predicted);
    LossOutputs outputs;
    outputs.loss = vector_of(loss);
    if (V > 0) {
      operands.logits = matrix_of(logits);
      outputs.softmax = matrix_of(softmax);
    }
    executor->bind = [plan = *plan, operands, outputs](std::span<void* const> views,
                                                       std::span<std::byte> workspace) -> Work {
      LossOperands in = operands;
      in.logits_max.data = views[0];
      in.sum_exp_logits.data = views[1];
      in.predicted_logits.data = views[2];
      LossOutputs results = outputs;
      results.loss.data = views[3];
      if (results.softmax) {
        in.logits->data = views[4];
        results.softmax->data = views[5];
      }
      return [=](const CancelToken* cancel) { return run(plan, in, results, workspace, cancel); };
    };
  }
  return publish(std::move(executor), workspace_bytes, workspaceSize, out);
}

// ---- gradient
// ---------------------------------------------------------------------------------------

constexpr char kGradient[] = "aclnnFusedLinearCrossEntropyLossGrad";

Status gradient_phase_1(Argument grad, Argument input, Argument weight, Argument mask,
                        Argument masked_target, float labelSmoothing, Argument max, Argument sum,
                        Argument softmax, Argument grad_input, Argument grad_weight,
                        uint64_t* workspaceSize, aclOpExecutor** out) {
  const bool recompute = !softmax.given();
  if (!recompute) max.handle = sum.handle = nullptr;  // ignored then
  Rules rules;
  not_null_results(rules, workspaceSize, out);
  if (rules.ok() && recompute && (!max.given() || !sum.given())) {
    return failure(ACLNN_ERR_PARAM_NULLPTR,
                   "softmaxOptional: is null and so is logitsMaxOptional or sumExpLogitsOptional, "
                   "either the first or the other two must be given");
  }
  for (const Argument* a :
       {&grad, &input, &weight, &mask, &masked_target, &grad_input, &grad_weight}) {
    rules.not_null(*a);
  }
  rules.alive({&grad, &input, &weight, &mask, &masked_target, &max, &sum, &softmax, &grad_input,
               &grad_weight});
  // In their order among the parameters: the statistics, or softmax.
  const std::initializer_list<const Argument*> statistics = {&max, &sum};
  const std::initializer_list<const Argument*> probabilities = {&softmax};
  const auto& mode_arguments = recompute ? statistics : probabilities;

  rules.dtype(grad, {ACL_FLOAT});
  for (const Argument* a : {&input, &weight}) rules.dtype(*a, {ACL_FLOAT16, ACL_BF16});
  rules.dtype(mask, {ACL_BOOL, ACL_UINT8});
  rules.dtype(masked_target, {ACL_INT32, ACL_INT64});
  for (const Argument* a : mode_arguments) rules.dtype(*a, {ACL_FLOAT});
  for (const Argument* a : {&weight, &grad_input, &grad_weight}) rules.dtype_as(*a, input);
  for (const Argument* a : {&grad, &input, &weight, &mask, &masked_target}) rules.format_nd(*a);
  for (const Argument* a : mode_arguments) rules.format_nd(*a);
  for (const Argument* a : {&grad_input, &grad_weight}) rules.format_nd(*a);
  no_label_smoothing(rules, labelSmoothing);
  rules.rank(grad, 1);
  for (const Argument* a : {&input, &weight}) rules.rank(*a, 2);
  for (const Argument* a : {&mask, &masked_target}) rules.rank(*a, 1);
  for (const Argument* a : mode_arguments) rules.rank(*a, recompute ? 1 : 2);
  for (const Argument* a : {&grad_input, &grad_weight}) rules.rank(*a, 2);
  if (!rules.ok()) return rules.first();

  const Shape shape = {grad.dim(0), weight.dim(0), input.dim(1)};
  rules.shape_rule(input.dim(0) == shape.BT, input,
                   ", must be [BT, H] with grad's BT = ", shape.BT);
  rules.shape_rule(shape.V == 0 || shape.V >= 128, weight, ", V must be 0 or at least 128");
  rules.shape_rule(weight.dim(1) == shape.H, weight, ", must be [V, H] with input's H = ", shape.H);
  if (mask.layout.dtype == ACL_BOOL) {
    rules.shape(mask, {shape.BT}, "[BT]");
  } else {
    rules.shape_rule(mask.dim(0) >= packed_bytes(shape.BT), mask,
                     ", must have at least ceil(BT / 8) = ", packed_bytes(shape.BT), " bytes");
  }
  rules.shape(masked_target, {shape.BT}, "[BT]");
  for (const Argument* a : mode_arguments) {
    if (recompute) {
      rules.shape(*a, {shape.BT}, "[BT]");
    } else {
      rules.shape(*a, {shape.BT, shape.V}, "[BT, V]");
    }
  }
  rules.shape(grad_input, {shape.BT, shape.H}, "[BT, H]");
  rules.shape(grad_weight, {shape.V, shape.H}, "[V, H]");
  for (const Argument* a : {&grad, &input, &weight, &mask, &masked_target}) rules.view(*a);
  for (const Argument* a : mode_arguments) rules.view(*a);
  for (const Argument* a : {&grad_input, &grad_weight}) rules.output_view(*a);
  if (!rules.ok()) return rules.first();

  if (shape.BT == 0 || shape.V == 0 || shape.H == 0) {
    // As with the original no workspace is asked for; unlike there, what is left is zeros.
    auto executor = make_executor(kGradient, {&grad_input, &grad_weight});
    executor->bind = [grad_input_view = matrix_of(grad_input),
                      grad_weight_view = matrix_of(grad_weight)](std::span<void* const> views,
                                                                 std::span<std::byte>) -> Work {
      const MatrixView first = at(grad_input_view, views[0]);
      const MatrixView second = at(grad_weight_view, views[1]);
      return [=](const CancelToken*) -> Result<void> {
        fill_zeros(first);
        fill_zeros(second);
        return {};
      };
    };
    return publish(std::move(executor), 0, workspaceSize, out);
  }

  GradientTypes types;
  types.operand = dtype_of(input);
  types.target = dtype_of(masked_target);
  types.mode = recompute ? GradientMode::memory_saving : GradientMode::high_performance;
  if (recompute) types.logits_rounding = LogitsRounding::infer;
  types.grad_input = GradientOutput{types.operand, false};
  types.grad_weight = GradientOutput{types.operand, false};
  const Result<GradientPlan> plan = plan_gradient(shape, types);
  if (!plan) return refusal(plan.error());

  GradientOperands operands;
  operands.grad = vector_of(grad);
  operands.input = matrix_of(input);
  operands.weight = matrix_of(weight);
  operands.target_mask = mask_of(mask, shape.BT);
  operands.masked_target = vector_of(masked_target);
  if (recompute) {
    operands.logits_max = vector_of(max);
    operands.sum_exp_logits = vector_of(sum);
  } else {
    operands.softmax = matrix_of(softmax);
  }
  GradientOutputs outputs;
  outputs.grad_input = matrix_of(grad_input);
  outputs.grad_weight = matrix_of(grad_weight);
  auto executor = make_executor(kGradient, {&grad, &input, &weight, &mask, &masked_target,
                                            &grad_input, &grad_weight, &max, &sum, &softmax});
  executor->bind = [plan = *plan, operands, outputs](std::span<void* const> views,
                                                     std::span<std::byte> workspace) -> Work {
    GradientOperands in = operands;
    in.grad.data = views[0];
    in.input.data = views[1];
    in.weight.data = views[2];
    in.target_mask->data = views[3];
    in.masked_target.data = views[4];
    if (in.softmax) {
      in.softmax->data = views[7];
    } else {
      in.logits_max->data = views[7];
      in.sum_exp_logits->data = views[8];
    }
    GradientOutputs results = outputs;
    results.grad_input->data = views[5];
    results.grad_weight->data = views[6];
    return [=](const CancelToken* cancel) { return run(plan, in, results, workspace, cancel); };
  };
  return publish(std::move(executor), plan->workspace_bytes(), workspaceSize, out);
}

}  // namespace
}  // namespace logitless::ascend

using namespace logitless::ascend;

extern "C" {

aclnnStatus aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
    const aclTensor* input, const aclTensor* weight, const aclTensor* target,
    int64_t vocabStartIndex, int64_t vocabEndIndex, aclTensor* logitsMaxLocalOut,
    aclTensor* sumExpLogitsLocalOut, aclTensor* predictedLogitsLocalOut, aclTensor* targetMaskOut,
    aclTensor* maskedTargetOut, aclTensor* vocabParallelLogitsOutOptional, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  const char* const function = __func__;
  return aclnn_call(function, [&] {
    return forward_phase_1(function, {"input", input}, {"weight", weight}, {"target", target},
                           vocabStartIndex, vocabEndIndex, {"logitsMaxLocalOut", logitsMaxLocalOut},
                           {"sumExpLogitsLocalOut", sumExpLogitsLocalOut},
                           {"predictedLogitsLocalOut", predictedLogitsLocalOut},
                           {"targetMaskOut", targetMaskOut}, {"maskedTargetOut", maskedTargetOut},
                           {"vocabParallelLogitsOutOptional", vocabParallelLogitsOutOptional},
                           workspaceSize, executor);
  });
}

aclnnStatus aclnnFusedLinearOnlineMaxSum(void* workspace, uint64_t workspaceSize,
                                         aclOpExecutor* executor, aclrtStream stream) {
  return run_phase_2(kForward, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
    const aclTensor* logitsMax, const aclTensor* sumExpLogits, const aclTensor* predictedLogits,
    float labelSmoothing, const aclTensor*, const aclTensor*,
    const aclTensor* vocabParallelLogitsOptional, aclTensor* lossOut, aclTensor* softMaxOutOptional,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  return aclnn_call(__func__, [&] {
    return loss_phase_1({"logitsMax", logitsMax}, {"sumExpLogits", sumExpLogits},
                        {"predictedLogits", predictedLogits}, labelSmoothing,
                        {"vocabParallelLogitsOptional", vocabParallelLogitsOptional},
                        {"lossOut", lossOut}, {"softMaxOutOptional", softMaxOutOptional},
                        workspaceSize, executor);
  });
}

aclnnStatus aclnnFusedCrossEntropyLossWithMaxSum(void* workspace, uint64_t workspaceSize,
                                                 aclOpExecutor* executor, aclrtStream stream) {
  return run_phase_2(kLoss, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
    const aclTensor* grad, const aclTensor* input, const aclTensor* weight,
    const aclTensor* targetMask, const aclTensor* maskedTarget, float labelSmoothing,
    const aclTensor* logitsMaxOptional, const aclTensor* sumExpLogitsOptional,
    const aclTensor* softmaxOptional, aclTensor* inputGradOut, aclTensor* weightGradOut,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  return aclnn_call(__func__, [&] {
    return gradient_phase_1(
        {"grad", grad}, {"input", input}, {"weight", weight}, {"targetMask", targetMask},
        {"maskedTarget", maskedTarget}, labelSmoothing, {"logitsMaxOptional", logitsMaxOptional},
        {"sumExpLogitsOptional", sumExpLogitsOptional}, {"softmaxOptional", softmaxOptional},
        {"inputGradOut", inputGradOut}, {"weightGradOut", weightGradOut}, workspaceSize, executor);
  });
}

aclnnStatus aclnnFusedLinearCrossEntropyLossGrad(void* workspace, uint64_t workspaceSize,
                                                 aclOpExecutor* executor, aclrtStream stream) {
  return run_phase_2(kGradient, workspace, workspaceSize, executor, stream);
}

}  // extern "C"
