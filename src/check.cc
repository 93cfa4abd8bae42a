// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "strides.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

// Sizes and products of sizes stay below this, so that byte offsets fit in 63 bits.
constexpr int64_t kMaxElements = int64_t{1} << 56;

std::string number(int64_t value) { return std::to_string(value); }

Error invalid(std::string message) {
  return Error{ErrorKind::invalid_argument, std::move(message)};
}
Error wrong_type(std::string message) { return Error{ErrorKind::wrong_type, std::move(message)}; }

// The argument's name as the message prints it; text is made only when there is an error, since a
// running operator allocates nothing.
struct Name {
  const char* text;
  int64_t shard = -1;
  Name(const char* argument) : text(argument) {}
  Name(int64_t index, const char* argument) : text(argument), shard(index) {}
};
std::string operator+(const Name& name, const std::string& rest) {
  return (name.shard < 0 ? std::string() : "shards[" + number(name.shard) + "].") + name.text +
         rest;
}

bool is_one_of(DType dtype, std::initializer_list<DType> allowed) {
  for (DType a : allowed) {
    if (a == dtype) return true;
  }
  return false;
}

std::string list(std::initializer_list<DType> dtypes) {
  std::string text;
  size_t i = 0;
  for (DType dtype : dtypes) {
    if (i > 0) text += i + 1 == dtypes.size() ? " or " : ", ";
    text += name_of(dtype);
    ++i;
  }
  return text;
}

Result<void> check_dtype(const Name& name, DType came, std::initializer_list<DType> allowed) {
  if (is_one_of(came, allowed)) return {};
  return wrong_type(name + ": dtype is " + name_of(came) + ", must be " + list(allowed));
}

enum class Access { input, output };

Result<void> check_vector(const Name& name, const ConstVectorView& view, int64_t size,
                          std::initializer_list<DType> dtypes, Access access) {
  if (auto ok = check_dtype(name, view.dtype, dtypes); !ok) return ok;
  if (view.size != size) {
    return invalid(name + ": size is " + number(view.size) + ", must be BT = " + number(size));
  }
  if (view.stride < 0) {
    return invalid(name + ": stride is " + number(view.stride) + ", must not be negative");
  }
  if (size > 0 && view.data == nullptr) {
    return invalid(name + ": data is null, must hold " + number(size) + " elements");
  }
  if (access == Access::output && size > 1 && view.stride == 0) {
    return invalid(name + ": stride is 0, elements of an output must not overlap");
  }
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(size_of(view.dtype)) != 0) {
    return invalid(name + ": data is not aligned to its elements of " +
                   number(size_of(view.dtype)) + " bytes");
  }
  return {};
}

Result<void> check_matrix(const Name& name, const ConstMatrixView& view, int64_t rows,
                          const char* rows_name, int64_t cols, const char* cols_name,
                          std::initializer_list<DType> dtypes, Access access) {
  if (auto ok = check_dtype(name, view.dtype, dtypes); !ok) return ok;
  if (view.rows != rows || view.cols != cols) {
    return invalid(name + ": shape is [" + number(view.rows) + ", " + number(view.cols) +
                   "], must be [" + rows_name + ", " + cols_name + "] = [" + number(rows) + ", " +
                   number(cols) + "]");
  }
  if (view.row_stride < 0 || view.col_stride < 0) {
    return invalid(name + ": strides are (" + number(view.row_stride) + ", " +
                   number(view.col_stride) + "), must not be negative");
  }
  if (rows == 0 || cols == 0) return {};
  if (view.data == nullptr) {
    return invalid(name + ": data is null, must hold [" + number(rows) + ", " + number(cols) +
                   "] elements");
  }
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(size_of(view.dtype)) != 0) {
    return invalid(name + ": data is not aligned to its elements of " +
                   number(size_of(view.dtype)) + " bytes");
  }
  if (access == Access::output) {
    if (elements_overlap(rows, cols, view.row_stride, view.col_stride)) {
      return invalid(name + ": strides (" + number(view.row_stride) + ", " +
                     number(view.col_stride) + ") put two elements of [" + number(rows) + ", " +
                     number(cols) + "] at one address, elements of an output must not overlap");
    }
  }
  return {};
}

Result<void> check_mask(const Name& name, const ConstMaskView& view, int64_t size) {
  if (view.size != size) {
    return invalid(name + ": size is " + number(view.size) +
                   " tokens, must be BT = " + number(size));
  }
  if (view.stride < 0) {
    return invalid(name + ": stride is " + number(view.stride) + ", must not be negative");
  }
  if (size > 0 && view.data == nullptr) {
    return invalid(name + ": data is null, must hold " + number(size) + " tokens");
  }
  return {};
}

Result<void> check_output_mask(const Name& name, const MaskView& view, int64_t size) {
  if (auto ok = check_mask(name, view, size); !ok) return ok;
  const int64_t elements = view.layout == MaskLayout::packed_lsb_first ? ceil_div(size, 8) : size;
  if (elements > 1 && view.stride == 0) {
    return invalid(name + ": stride is 0, elements of an output must not overlap");
  }
  return {};
}

Result<void> check_workspace(std::span<std::byte> workspace, int64_t bytes) {
  if (static_cast<int64_t>(workspace.size()) < bytes) {
    return Error{ErrorKind::workspace_too_small,
                 "workspace: " + number(static_cast<int64_t>(workspace.size())) +
                     " bytes came, the plan asks for " + number(bytes)};
  }
  if (bytes > 0 && reinterpret_cast<uintptr_t>(workspace.data()) % kAlignment != 0) {
    return invalid("workspace: address is not a multiple of " + number(kAlignment) + " bytes");
  }
  return {};
}

Result<void> check_operand_types(DType operand, const std::optional<DType>& multiply,
                                 DType target) {
  if (auto ok = check_dtype("operand", operand, {DType::f32, DType::f16, DType::bf16}); !ok) {
    return ok;
  }
  if (multiply && *multiply != operand && !(operand == DType::f32 && *multiply == DType::bf16)) {
    return wrong_type(std::string("multiply: ") + name_of(*multiply) + " came with operands of " +
                      name_of(operand) + ", must be the operand type, or bf16 with f32 operands");
  }
  return check_dtype("target", target, {DType::i32, DType::i64});
}

// Runs the checks in order and returns the first error.
template <class... Checks>
Result<void> first_error(Checks&&... checks) {
  Result<void> result;
  const auto run_one = [&](auto&& check_one) {
    if (result) result = check_one();
  };
  (run_one(checks), ...);
  return result;
}

constexpr auto kF32 = {DType::f32};
constexpr auto kU8 = {DType::u8};

}  // namespace

Result<void> check_shape(const Shape& shape) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"BT", shape.BT}, {"V", shape.V}, {"H", shape.H}};
  for (const auto& size : sizes) {
    if (size.value < 0 || size.value > (int64_t{1} << 48)) {
      return invalid(std::string(size.name) + " is " + number(size.value) +
                     ", must be between 0 and 2^48");
    }
  }
  const auto too_large = [](int64_t a, int64_t b) { return b > 0 && a > kMaxElements / b; };
  if (too_large(shape.BT, shape.V) || too_large(shape.BT, shape.H) || too_large(shape.V, shape.H)) {
    return invalid("shape [BT, V, H] = [" + number(shape.BT) + ", " + number(shape.V) + ", " +
                   number(shape.H) + "]: a matrix of more than 2^56 elements");
  }
  return {};
}

Result<void> check_options(const PlanOptions& options) {
  if (options.threads < 0 || options.threads > 4096) {
    return invalid("threads is " + number(options.threads) + ", must be between 0 and 4096");
  }
  if (options.workspace_limit_bytes < 0) {
    return invalid("workspace_limit_bytes is " + number(options.workspace_limit_bytes) +
                   ", must not be negative");
  }
  return {};
}

Result<void> check_types(const ForwardTypes& types) {
  if (auto ok = check_operand_types(types.operand, types.multiply, types.target); !ok) return ok;
  if (types.logits && *types.logits != types.operand && *types.logits != DType::f32) {
    return wrong_type(std::string("logits: dtype is ") + name_of(*types.logits) +
                      ", must be f32 or the operand type " + name_of(types.operand));
  }
  if (types.logits_rounding == LogitsRounding::infer) {
    return invalid("logits_rounding: infer is for the gradient, must be none or operand");
  }
  return {};
}

namespace {

Result<void> check_tolerance(float tolerance) {
  if (tolerance == 0.0f) return {};
  if (tolerance >= kLeastGradTolerance && tolerance <= kMostGradTolerance) return {};
  return invalid("grad_tolerance is " + std::to_string(tolerance) +
                 ", must be 0, or between 2^-16 and 0.5");
}

// Types of both gradients, of whichever operator makes them.
template <class Types>
Result<void> check_gradient_types(const Types& types) {
  if (auto ok = check_operand_types(types.operand, types.multiply, types.target); !ok) return ok;
  const struct {
    const char* name;
    const std::optional<GradientOutput>& output;
  } outputs[] = {{"grad_input", types.grad_input}, {"grad_weight", types.grad_weight}};
  for (const auto& o : outputs) {
    if (o.output && o.output->dtype != DType::f32 && o.output->dtype != types.operand) {
      return wrong_type(std::string(o.name) + ": dtype is " + name_of(o.output->dtype) +
                        ", must be f32 or the operand type " + name_of(types.operand));
    }
  }
  return check_tolerance(types.grad_tolerance);
}

// The gradients' buffers: present exactly when planned, and of the planned shape and type.
template <class Types, class Outputs>
Result<void> check_gradient_outputs(const Shape& shape, const Types& types, const Outputs& out,
                                    int64_t input_rows, const char* input_rows_name) {
  const struct {
    const char* name;
    const std::optional<GradientOutput>& planned;
    const std::optional<MatrixView>& view;
    int64_t rows;
    const char* rows_name;
  } matrices[] = {{"grad_input", types.grad_input, out.grad_input, input_rows, input_rows_name},
                  {"grad_weight", types.grad_weight, out.grad_weight, shape.V, "V"}};
  for (const auto& m : matrices) {
    if (m.planned.has_value() != m.view.has_value()) {
      return invalid(std::string(m.name) + (m.planned
                                                ? ": absent, but the plan was made with it"
                                                : ": given, but the plan was made without it"));
    }
    if (!m.planned) continue;
    if (auto ok = check_matrix(m.name, *m.view, m.rows, m.rows_name, shape.H, "H",
                               {m.planned->dtype}, Access::output);
        !ok) {
      return ok;
    }
  }
  return {};
}

}  // namespace

Result<void> check_types(const GradientTypes& types) {
  if (auto ok = check_gradient_types(types); !ok || types.grad_tolerance == 0.0f) return ok;
  if (types.mode != GradientMode::memory_saving) {
    return invalid("grad_tolerance is " + std::to_string(types.grad_tolerance) +
                   ", must be 0 in high-performance mode (softmax given)");
  }
  if (types.logits_rounding == LogitsRounding::infer) {
    return invalid("logits_rounding: infer came with a grad_tolerance, must be none or operand");
  }
  return {};
}
Result<void> check_types(const LossAndGradientTypes& types) { return check_gradient_types(types); }

Result<void> check(const ForwardPlanData& plan, const ForwardOperands& in,
                   const ForwardOutputs& out, std::span<std::byte> workspace) {
  const int64_t BT = plan.shape.BT;
  const int64_t V = plan.shape.V;
  const int64_t H = plan.shape.H;
  const ForwardTypes& types = plan.types;
  const auto rules = first_error(
      [&] {
        return check_matrix("input", in.input, BT, "BT", H, "H", {types.operand}, Access::input);
      },
      [&] {
        return check_matrix("weight", in.weight, V, "V", H, "H", {types.operand}, Access::input);
      },
      [&] { return check_vector("target", in.target, BT, {types.target}, Access::input); },
      [&] {
        return in.rows.counts ? check_vector("counts", *in.rows.counts, BT, kU8, Access::input)
                              : Result<void>();
      },
      [&] { return check_vector("logits_max", out.logits_max, BT, kF32, Access::output); },
      [&] { return check_vector("sum_exp_logits", out.sum_exp_logits, BT, kF32, Access::output); },
      [&] {
        return check_vector("predicted_logits", out.predicted_logits, BT, kF32, Access::output);
      },
      [&] {
        return out.target_mask ? check_output_mask("target_mask", *out.target_mask, BT)
                               : Result<void>();
      },
      [&] {
        return out.masked_target ? check_vector("masked_target", *out.masked_target, BT,
                                                {types.target}, Access::output)
                                 : Result<void>();
      });
  if (!rules) return rules;
  if (out.logits.has_value() != types.logits.has_value()) {
    return invalid(out.logits ? "logits: given, but the plan was made without them"
                              : "logits: absent, but the plan was made with them");
  }
  if (out.logits) {
    if (auto ok =
            check_matrix("logits", *out.logits, BT, "BT", V, "V", {*types.logits}, Access::output);
        !ok) {
      return ok;
    }
  }
  if (in.vocab_start_index < 0 || in.vocab_start_index > INT64_MAX - V) {
    return invalid("vocab_start_index is " + number(in.vocab_start_index) +
                   ", must be between 0 and 2^63 - 1 - V");
  }
  if (in.vocab_end_index && *in.vocab_end_index < in.vocab_start_index) {
    return invalid("vocab_end_index is " + number(*in.vocab_end_index) +
                   ", must not be less than vocab_start_index = " + number(in.vocab_start_index));
  }
  return check_workspace(workspace, plan.workspace_bytes);
}

Result<void> check(const MergePlanData& plan, std::span<const ShardStatistics> shards,
                   const MergeOutputs& out) {
  if (static_cast<int64_t>(shards.size()) != plan.shards) {
    return invalid("shards: " + number(static_cast<int64_t>(shards.size())) +
                   " came, the plan was made for " + number(plan.shards));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    const ShardStatistics& s = shards[i];
    const auto name = [&](const char* what) { return Name(static_cast<int64_t>(i), what); };
    const auto rules = first_error(
        [&] {
          return check_vector(name("logits_max"), s.logits_max, plan.BT, kF32, Access::input);
        },
        [&] {
          return check_vector(name("sum_exp_logits"), s.sum_exp_logits, plan.BT, kF32,
                              Access::input);
        },
        [&] {
          return check_vector(name("predicted_logits"), s.predicted_logits, plan.BT, kF32,
                              Access::input);
        },
        [&] { return check_mask(name("target_mask"), s.target_mask, plan.BT); });
    if (!rules) return rules;
  }
  return first_error(
      [&] { return check_vector("logits_max", out.logits_max, plan.BT, kF32, Access::output); },
      [&] {
        return check_vector("sum_exp_logits", out.sum_exp_logits, plan.BT, kF32, Access::output);
      },
      [&] {
        return check_vector("predicted_logits", out.predicted_logits, plan.BT, kF32,
                            Access::output);
      },
      [&] {
        return out.target_mask ? check_output_mask("target_mask", *out.target_mask, plan.BT)
                               : Result<void>();
      });
}

Result<void> check(const LossPlanData& plan, const LossOperands& in, const LossOutputs& out) {
  const auto rules = first_error(
      [&] { return check_vector("logits_max", in.logits_max, plan.BT, kF32, Access::input); },
      [&] {
        return check_vector("sum_exp_logits", in.sum_exp_logits, plan.BT, kF32, Access::input);
      },
      [&] {
        return check_vector("predicted_logits", in.predicted_logits, plan.BT, kF32, Access::input);
      },
      [&] {
        return in.counts ? check_vector("counts", *in.counts, plan.BT, kU8, Access::input)
                         : Result<void>();
      },
      [&] { return check_vector("loss", out.loss, plan.BT, kF32, Access::output); },
      [&] {
        return out.logsumexp
                   ? check_vector("logsumexp", *out.logsumexp, plan.BT, kF32, Access::output)
                   : Result<void>();
      });
  if (!rules) return rules;
  const bool planned = plan.types.softmax_logits.has_value();
  if (planned != in.logits.has_value()) {
    return invalid(planned ? "logits: absent, but the plan was made with softmax"
                           : "logits: given, but the plan was made without softmax");
  }
  if (planned != out.softmax.has_value()) {
    return invalid(planned ? "softmax: absent, but the plan was made with it"
                           : "softmax: given, but the plan was made without it");
  }
  if (!planned) return {};
  return first_error(
      [&] {
        return check_matrix("logits", *in.logits, plan.BT, "BT", plan.V, "V",
                            {*plan.types.softmax_logits}, Access::input);
      },
      [&] {
        return check_matrix("softmax", *out.softmax, plan.BT, "BT", plan.V, "V", kF32,
                            Access::output);
      });
}

Result<void> check(const GradientPlanData& plan, const GradientOperands& in,
                   const GradientOutputs& out, std::span<std::byte> workspace) {
  const int64_t BT = plan.shape.BT;
  const int64_t V = plan.shape.V;
  const int64_t H = plan.shape.H;
  const GradientTypes& types = plan.types;
  const bool given = types.mode == GradientMode::high_performance;
  if (given && !in.softmax) return invalid("softmax: absent, high-performance mode needs it");
  if (!given && !in.logits_max) return invalid("logits_max: absent, memory-saving mode needs it");
  if (!given && !in.sum_exp_logits) {
    return invalid("sum_exp_logits: absent, memory-saving mode needs it");
  }
  const auto rules = first_error(
      [&] { return check_vector("grad", in.grad, BT, kF32, Access::input); },
      [&] {
        return in.grad_logsumexp
                   ? check_vector("grad_logsumexp", *in.grad_logsumexp, BT, kF32, Access::input)
                   : Result<void>();
      },
      [&] {
        return check_matrix("input", in.input, BT, "BT", H, "H", {types.operand}, Access::input);
      },
      [&] {
        return check_matrix("weight", in.weight, V, "V", H, "H", {types.operand}, Access::input);
      },
      [&] {
        return in.target_mask ? check_mask("target_mask", *in.target_mask, BT) : Result<void>();
      },
      [&] {
        return check_vector("masked_target", in.masked_target, BT, {types.target}, Access::input);
      },
      [&] {
        return in.token_ids
                   ? check_vector("token_ids", *in.token_ids, BT, {DType::i64}, Access::input)
                   : Result<void>();
      },
      [&] {
        return in.counts ? check_vector("counts", *in.counts, BT, kU8, Access::input)
                         : Result<void>();
      },
      [&] {
        return given ? check_matrix("softmax", *in.softmax, BT, "BT", V, "V", kF32, Access::input)
                     : Result<void>();
      },
      [&] {
        return given ? Result<void>()
                     : check_vector("logits_max", *in.logits_max, BT, kF32, Access::input);
      },
      [&] {
        return given ? Result<void>()
                     : check_vector("sum_exp_logits", *in.sum_exp_logits, BT, kF32, Access::input);
      });
  if (!rules) return rules;
  if (auto ok = check_gradient_outputs(plan.shape, types, out, BT, "BT"); !ok) return ok;
  return check_workspace(workspace, plan.workspace_bytes);
}

Result<void> check(const LossAndGradientPlanData& plan, const LossAndGradientOperands& in,
                   const LossAndGradientOutputs& out, std::span<std::byte> workspace) {
  const StepRows rows{.input = plan.shape.BT, .grad_input = plan.shape.BT};
  return check_step(plan.shape, rows, plan.types, in, out, workspace, plan.workspace_bytes);
}

Result<void> check_step(const Shape& shape, const StepRows& step, const LossAndGradientTypes& types,
                        const LossAndGradientOperands& in, const LossAndGradientOutputs& out,
                        std::span<std::byte> workspace, int64_t workspace_bytes) {
  const int64_t BT = shape.BT;
  const int64_t V = shape.V;
  const int64_t H = shape.H;
  const auto optional_vector = [&](const char* name, const auto& view, const auto& dtypes,
                                   Access access) {
    return view ? check_vector(name, *view, BT, dtypes, access) : Result<void>();
  };
  const auto rules = first_error(
      [&] {
        return check_matrix("input", in.input, step.input, step.input_name, H, "H", {types.operand},
                            Access::input);
      },
      [&] {
        return check_matrix("weight", in.weight, V, "V", H, "H", {types.operand}, Access::input);
      },
      [&] { return check_vector("target", in.target, BT, {types.target}, Access::input); },
      [&] { return optional_vector("counts", in.rows.counts, kU8, Access::input); },
      [&] { return optional_vector("token_weights", in.token_weights, kF32, Access::input); },
      [&] {
        return in.token_ids
                   ? check_vector("token_ids", *in.token_ids, BT, {DType::i64}, Access::input)
                   : Result<void>();
      },
      [&] { return optional_vector("logits_max", out.logits_max, kF32, Access::output); },
      [&] { return optional_vector("sum_exp_logits", out.sum_exp_logits, kF32, Access::output); },
      [&] { return check_vector("loss", out.loss, BT, kF32, Access::output); },
      [&] {
        return optional_vector("predicted_logits", out.predicted_logits, kF32, Access::output);
      },
      [&] {
        return check_gradient_outputs(shape, types, out, step.grad_input, step.grad_input_name);
      });
  if (!rules) return rules;
  if (in.normalizer && !(std::fabs(*in.normalizer) > 0)) {
    return invalid("normalizer is " + std::to_string(*in.normalizer) + ", must not be 0 or NaN");
  }
  return check_workspace(workspace, workspace_bytes);
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
