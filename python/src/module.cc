// SPDX-License-Identifier: Apache-2.0
// The module logitless._core: arrays as (address, type, shape, strides) in, the core's plan / run
// pairs, the core's sentences as Python's exceptions. Everything else is Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "interrupt.h"
#include "openmp.h"
#include "parallel.h"
#include "workspace.h"

namespace nb = nanobind;

namespace logitless::python {
namespace {

ForwardPlan forward_plan(const Shape& s, const ForwardTypes& t, const Options& options) {
  return cache<ForwardPlan>().get(
      {s.BT, s.V, s.H, code(t.operand), code(t.multiply), code(t.target), code(t.logits),
       static_cast<int64_t>(t.logits_rounding)},
      options, [&](const PlanOptions& o) { return plan_forward(s, t, o); });
}
GradientPlan gradient_plan(const Shape& s, const GradientTypes& t, const Options& options) {
  return cache<GradientPlan>().get(
      {s.BT, s.V, s.H, code(t.operand), code(t.multiply), code(t.target),
       static_cast<int64_t>(t.mode), static_cast<int64_t>(t.logits_rounding), code(t.grad_input),
       code(t.grad_weight), code(t.grad_tolerance)},
      options, [&](const PlanOptions& o) { return plan_gradient(s, t, o); });
}
Result<LossAndGradientPlan> find_loss_and_gradient_plan(const Shape& s,
                                                        const LossAndGradientTypes& t,
                                                        Strategy strategy, const Options& options) {
  return cache<LossAndGradientPlan>().find_or_make(
      {s.BT, s.V, s.H, code(t.operand), code(t.multiply), code(t.target), code(t.grad_input),
       code(t.grad_weight), static_cast<int64_t>(strategy), code(t.grad_tolerance)},
      options, [&](const PlanOptions& o) { return plan_loss_and_gradient(s, t, o, strategy); });
}
LossAndGradientPlan loss_and_gradient_plan(const Shape& s, const LossAndGradientTypes& t,
                                           Strategy strategy, const Options& options) {
  return take(find_loss_and_gradient_plan(s, t, strategy, options));
}

// Runs a plan in the thread's workspace without the GIL. `work`: about how many multiply-adds.
template <class Plan, class Run>
void execute(const Plan& plan, double work, const Run& run_plan) {
  constexpr double kWorthInterrupting = 1e9;  // some 10 ms on one core
  const WorkspaceLease workspace(plan.workspace_bytes());
  Interrupt interrupt(work > kWorthInterrupting);
  const Result<void> done = [&] {
    const nb::gil_scoped_release without_gil;
    return run_plan(workspace.bytes(), interrupt.token());
  }();
  interrupt.raise_if_interrupted();
  if (!done) raise(done.error());
}

double size_of_problem(const Shape& s) {
  return static_cast<double>(s.BT) * static_cast<double>(s.V) * static_cast<double>(s.H);
}
Shape shape_of(const MatrixView& input, const MatrixView& weight) {
  return {.BT = input.rows, .V = weight.rows, .H = input.cols};
}

// ---- the sparse gradient ------------------------------------------------------------------------

// Of the last sparse gradient of this thread.
thread_local std::optional<SparseCounts> last_counts;

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t>;
std::optional<Counts> sparse_counts() {
  if (!last_counts) return {};
  return Counts{last_counts->rows, last_counts->dense_rows, last_counts->kept,
                last_counts->elements};
}

// ---- operators ----------------------------------------------------------------------------------

void forward(const Matrix& input, const Matrix& weight, const Vector& target,
             int64_t vocab_start_index, std::optional<int64_t> vocab_end_index,
             std::optional<int64_t> ignore_index, const std::optional<Vector>& counts,
             std::optional<int> multiply, int logits_rounding, const Vector& logits_max,
             const Vector& sum_exp_logits, const Vector& predicted_logits,
             const std::optional<Mask>& target_mask, const std::optional<Vector>& masked_target,
             const std::optional<Matrix>& logits, const Options& options) {
  const MatrixView in = view(input);
  const MatrixView w = view(weight);
  const Shape shape = shape_of(in, w);
  ForwardTypes types{.operand = in.dtype,
                     .multiply = optional_dtype(multiply),
                     .target = view(target).dtype,
                     .logits = {},
                     .logits_rounding = static_cast<LogitsRounding>(logits_rounding)};
  if (logits) types.logits = view(*logits).dtype;
  const ForwardPlan plan = forward_plan(shape, types, options);
  const ForwardOperands operands{
      in,
      w,
      view(target),
      vocab_start_index,
      vocab_end_index,
      {.ignore_index = ignore_index, .counts = optional_view<ConstVectorView>(counts)}};
  const ForwardOutputs outputs{view(logits_max),
                               view(sum_exp_logits),
                               view(predicted_logits),
                               optional_view<MaskView>(target_mask),
                               optional_view<VectorView>(masked_target),
                               optional_view<MatrixView>(logits)};
  execute(plan, size_of_problem(shape), [&](auto workspace, auto* cancel) {
    return run(plan, operands, outputs, workspace, cancel);
  });
}

void merge(const std::vector<std::tuple<Vector, Vector, Vector, Mask>>& shards,
           const Vector& logits_max, const Vector& sum_exp_logits, const Vector& predicted_logits,
           const std::optional<Mask>& target_mask) {
  std::vector<ShardStatistics> views;
  views.reserve(shards.size());
  for (const auto& [max, sum, predicted, mask] : shards) {
    views.push_back({view(max), view(sum), view(predicted), view(mask)});
  }
  const MergePlan plan =
      take(plan_merge(std::get<2>(logits_max), static_cast<int64_t>(shards.size())));
  const MergeOutputs outputs{view(logits_max), view(sum_exp_logits), view(predicted_logits),
                             optional_view<MaskView>(target_mask)};
  execute(plan, 0, [&](auto workspace, auto* cancel) {
    return run(plan, views, outputs, workspace, cancel);
  });
}

void loss(const Vector& logits_max, const Vector& sum_exp_logits, const Vector& predicted_logits,
          const std::optional<Matrix>& logits, const std::optional<Vector>& counts,
          const Vector& loss_out, const std::optional<Vector>& logsumexp,
          const std::optional<Matrix>& softmax, const Options& options) {
  LossTypes types;
  int64_t V = 0;
  if (softmax && logits) {
    types.softmax_logits = view(*logits).dtype;
    V = view(*logits).cols;
  }
  const int64_t BT = std::get<2>(logits_max);
  const LossPlan plan =
      cache<LossPlan>().get({BT, V, code(types.softmax_logits)}, options,
                            [&](const PlanOptions& o) { return plan_loss(BT, V, types, o); });
  const LossOperands operands{view(logits_max), view(sum_exp_logits), view(predicted_logits),
                              optional_view<ConstMatrixView>(logits),
                              optional_view<ConstVectorView>(counts)};
  const LossOutputs outputs{view(loss_out), optional_view<VectorView>(logsumexp),
                            optional_view<MatrixView>(softmax)};
  execute(plan, static_cast<double>(BT) * static_cast<double>(V),
          [&](auto workspace, auto* cancel) {
            return run(plan, operands, outputs, workspace, cancel);
          });
}

void gradient(const Vector& grad, const std::optional<Vector>& grad_logsumexp, const Matrix& input,
              const Matrix& weight, const std::optional<Mask>& target_mask,
              const Vector& masked_target, const std::optional<Vector>& logits_max,
              const std::optional<Vector>& sum_exp_logits, const std::optional<Matrix>& softmax,
              const std::optional<Vector>& counts, std::optional<int> multiply, int logits_rounding,
              const std::optional<Matrix>& grad_input, bool accumulate_grad_input,
              const std::optional<Matrix>& grad_weight, bool accumulate_grad_weight,
              const Options& options, const std::optional<Sparse>& sparse) {
  const MatrixView in = view(input);
  const MatrixView w = view(weight);
  const Shape shape = shape_of(in, w);
  const GradientTypes types{
      .operand = in.dtype,
      .multiply = optional_dtype(multiply),
      .target = view(masked_target).dtype,
      .mode = softmax ? GradientMode::high_performance : GradientMode::memory_saving,
      .logits_rounding = static_cast<LogitsRounding>(logits_rounding),
      .grad_tolerance = tolerance_of(sparse),
      .grad_input = output_type(grad_input, accumulate_grad_input),
      .grad_weight = output_type(grad_weight, accumulate_grad_weight)};
  const GradientPlan plan = gradient_plan(shape, types, options);
  const GradientOperands operands{view(grad),
                                  optional_view<ConstVectorView>(grad_logsumexp),
                                  in,
                                  w,
                                  optional_view<ConstMaskView>(target_mask),
                                  view(masked_target),
                                  optional_view<ConstVectorView>(logits_max),
                                  optional_view<ConstVectorView>(sum_exp_logits),
                                  optional_view<ConstMatrixView>(softmax),
                                  optional_view<ConstVectorView>(counts),
                                  seed_of(sparse),
                                  token_ids_of(sparse),
                                  sparse ? std::get<3>(*sparse) : 0};
  SparseCounts made;
  const GradientOutputs outputs{optional_view<MatrixView>(grad_input),
                                optional_view<MatrixView>(grad_weight), sparse ? &made : nullptr};
  execute(plan, size_of_problem(shape), [&](auto workspace, auto* cancel) {
    return run(plan, operands, outputs, workspace, cancel);
  });
  if (sparse) remember(made);
}

double loss_and_gradient(const Matrix& input, const Matrix& weight, const Vector& target,
                         std::optional<int64_t> ignore_index, const std::optional<Vector>& counts,
                         const std::optional<Vector>& token_weights,
                         std::optional<double> normalizer, std::optional<int> multiply,
                         int strategy, const Vector& loss_out,
                         const std::optional<Vector>& logits_max,
                         const std::optional<Vector>& sum_exp_logits,
                         const std::optional<Vector>& predicted_logits,
                         const std::optional<Matrix>& grad_input, bool accumulate_grad_input,
                         const std::optional<Matrix>& grad_weight, bool accumulate_grad_weight,
                         const Options& options, const std::optional<Sparse>& sparse) {
  const MatrixView in = view(input);
  const MatrixView w = view(weight);
  const Shape shape = shape_of(in, w);
  const LossAndGradientTypes types{.operand = in.dtype,
                                   .multiply = optional_dtype(multiply),
                                   .target = view(target).dtype,
                                   .grad_tolerance = tolerance_of(sparse),
                                   .grad_input = output_type(grad_input, accumulate_grad_input),
                                   .grad_weight = output_type(grad_weight, accumulate_grad_weight)};
  const LossAndGradientPlan plan =
      loss_and_gradient_plan(shape, types, static_cast<Strategy>(strategy), options);
  const LossAndGradientOperands operands{
      in,
      w,
      view(target),
      {.ignore_index = ignore_index, .counts = optional_view<ConstVectorView>(counts)},
      optional_view<ConstVectorView>(token_weights),
      normalizer,
      seed_of(sparse),
      token_ids_of(sparse)};
  double total = 0;
  SparseCounts made;
  const LossAndGradientOutputs outputs{view(loss_out),
                                       &total,
                                       optional_view<VectorView>(logits_max),
                                       optional_view<VectorView>(sum_exp_logits),
                                       optional_view<VectorView>(predicted_logits),
                                       optional_view<MatrixView>(grad_input),
                                       optional_view<MatrixView>(grad_weight),
                                       sparse ? &made : nullptr};
  execute(plan, 3 * size_of_problem(shape), [&](auto workspace, auto* cancel) {
    return run(plan, operands, outputs, workspace, cancel);
  });
  if (sparse) remember(made);
  return total;
}

// ---- what a loss needs around the operators -----------------------------------------------------

// How many targets count; an index error for one that does and is outside [0, V).
int64_t count_rows(const Vector& target, int64_t V, int64_t ignore_index) {
  const VectorView t = view(target);
  int64_t rows = 0;
  for (int64_t b = 0; b < t.size; ++b) {
    const int64_t id = integer_at(t, b);
    if (id == ignore_index) continue;
    if (id < 0 || id >= V) {
      raise({ErrorKind::invalid_data, "target[" + std::to_string(b) + "] is " + std::to_string(id) +
                                          ", must be in [0, V) = [0, " + std::to_string(V) +
                                          ") where the row counts"});
    }
    ++rows;
  }
  return rows;
}

// counts[b] = target[b] is not ignored.
void mark_rows(const Vector& target, int64_t ignore_index, const Vector& counts) {
  const VectorView t = view(target);
  auto* const out = reinterpret_cast<uint8_t*>(std::get<0>(counts));
  for (int64_t b = 0; b < t.size; ++b) out[b] = integer_at(t, b) != ignore_index ? 1 : 0;
}

// log(sum) + max of each row that counts, else 0.
void row_logsumexp(const Vector& target, int64_t ignore_index, const Vector& logits_max,
                   const Vector& sum_exp_logits, const Vector& logsumexp) {
  const VectorView t = view(target);
  const VectorView max = view(logits_max);
  const VectorView sum = view(sum_exp_logits);
  auto* const out = reinterpret_cast<float*>(std::get<0>(logsumexp));
  for (int64_t b = 0; b < t.size; ++b) {
    const bool counts = integer_at(t, b) != ignore_index;
    out[b] = counts ? std::log(float_at(sum, b)) + float_at(max, b) : 0.0f;
  }
}

// sum_b weights[b] * loss[b] / normalizer over the rows that count, in double, ascending.
double weighted_total(const Vector& losses, const Vector& target, int64_t ignore_index,
                      const std::optional<Vector>& weights, double normalizer) {
  const VectorView l = view(losses);
  const VectorView t = view(target);
  const auto w = optional_view<ConstVectorView>(weights);
  double total = 0;
  for (int64_t b = 0; b < l.size; ++b) {
    if (integer_at(t, b) == ignore_index) continue;
    const double weight = (w ? static_cast<double>(float_at(*w, b)) : 1.0) / normalizer;
    total += weight * static_cast<double>(float_at(l, b));
  }
  return total;
}

// grad[b] = total * weights[b] / normalizer + each[b], 0 where the row does not count.
void token_gradients(const Vector& target, int64_t ignore_index, double total,
                     const std::optional<Vector>& weights, double normalizer,
                     const std::optional<Vector>& each, const Vector& grad) {
  const VectorView t = view(target);
  const auto w = optional_view<ConstVectorView>(weights);
  const auto e = optional_view<ConstVectorView>(each);
  auto* const out = reinterpret_cast<float*>(std::get<0>(grad));
  for (int64_t b = 0; b < t.size; ++b) {
    double g = 0;
    if (integer_at(t, b) != ignore_index) {
      g = total * ((w ? static_cast<double>(float_at(*w, b)) : 1.0) / normalizer);
      if (e) g += static_cast<double>(float_at(*e, b));
    }
    out[b] = static_cast<float>(g);
  }
}

// ---- plans, printed -----------------------------------------------------------------------------

using PlanText = std::tuple<std::string, int64_t, int>;  // describe(), bytes, threads

PlanText plan_text(const std::string& kind, int64_t BT, int64_t V, int64_t H, int operand,
                   std::optional<int> multiply, int strategy, bool want_grad_input,
                   bool want_grad_weight, int grad_dtype, const Options& options,
                   double grad_tolerance) {
  const Shape shape{BT, V, H};
  const auto type = static_cast<DType>(operand);
  const auto tolerance = static_cast<float>(grad_tolerance);
  const auto wanted = [&](bool is_wanted) {
    return is_wanted ? std::optional(GradientOutput{.dtype = static_cast<DType>(grad_dtype)})
                     : std::nullopt;
  };
  const auto text = [](const auto& plan) {
    return PlanText{plan.describe(), plan.workspace_bytes(), plan.threads()};
  };
  if (kind == "forward") {
    return text(
        forward_plan(shape, {.operand = type, .multiply = optional_dtype(multiply)}, options));
  }
  if (kind == "gradient") {
    return text(gradient_plan(shape,
                              {.operand = type,
                               .multiply = optional_dtype(multiply),
                               .grad_tolerance = tolerance,
                               .grad_input = wanted(want_grad_input),
                               .grad_weight = wanted(want_grad_weight)},
                              options));
  }
  return text(loss_and_gradient_plan(shape,
                                     {.operand = type,
                                      .multiply = optional_dtype(multiply),
                                      .grad_tolerance = tolerance,
                                      .grad_input = wanted(want_grad_input),
                                      .grad_weight = wanted(want_grad_weight)},
                                     static_cast<Strategy>(strategy), options));
}

// Whether plan_loss_and_gradient takes one pass within the limit.
bool takes_one_pass(int64_t BT, int64_t V, int64_t H, int operand, std::optional<int> multiply,
                    int target, std::optional<int> grad_input, std::optional<int> grad_weight,
                    const Options& options, double grad_tolerance) {
  const auto output = [](const std::optional<int>& dtype) {
    return dtype ? std::optional(GradientOutput{.dtype = static_cast<DType>(*dtype)})
                 : std::nullopt;
  };
  const Result<LossAndGradientPlan> plan =
      find_loss_and_gradient_plan({BT, V, H},
                                  {.operand = static_cast<DType>(operand),
                                   .multiply = optional_dtype(multiply),
                                   .target = static_cast<DType>(target),
                                   .grad_tolerance = static_cast<float>(grad_tolerance),
                                   .grad_input = output(grad_input),
                                   .grad_weight = output(grad_weight)},
                                  Strategy::automatic, options);
  // A sparse gradient is one pass or nothing.
  if (grad_tolerance > 0 && !plan && plan.error().kind == ErrorKind::limit_too_small) return false;
  const bool one_pass = take(plan).strategy() == Strategy::one_pass;
  return grad_tolerance > 0 || one_pass;
}

nb::dict machine() {
  const MachineInfo info = machine_info();
  nb::dict d;
  nb::list isas;
  for (const Isa isa : info.isas) isas.append(name_of(isa));
  d["cpu"] = info.cpu;
  d["isas"] = nb::tuple(isas);
  d["isa"] = name_of(take(default_isa()));
  d["threads"] = info.threads;
  d["l1d_bytes"] = info.l1d_bytes;
  d["l2_bytes"] = info.l2_bytes;
  d["l3_bytes"] = info.l3_bytes;
  d["amx_present"] = info.amx_present;
  return d;
}

// ---- foreign arrays -----------------------------------------------------------------------------

// An array of another library, through DLPack or the buffer protocol; keeps it alive.
struct Borrowed {
  nb::ndarray<nb::ro> array;
};

int dtype_number(const nb::dlpack::dtype& type) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(type.code);
  if (type.lanes == 1) {
    if (code == Code::Float && type.bits == 32) return static_cast<int>(DType::f32);
    if (code == Code::Float && type.bits == 16) return static_cast<int>(DType::f16);
    if (code == Code::Bfloat && type.bits == 16) return static_cast<int>(DType::bf16);
    if (code == Code::Int && type.bits == 32) return static_cast<int>(DType::i32);
    if (code == Code::Int && type.bits == 64) return static_cast<int>(DType::i64);
    if (code == Code::UInt && type.bits == 8) return static_cast<int>(DType::u8);
    if (code == Code::Bool && type.bits == 8) return -2;
    if (code == Code::UInt && type.bits == 16) return -3;
  }
  return -1;
}

// A torch tensor [rows, cols] on pages that come back when it dies.
nb::ndarray<nb::pytorch> kept_matrix(size_t rows, size_t cols, int dtype) {
  const auto type = static_cast<DType>(dtype);
  const auto bits = static_cast<uint8_t>(8 * size_of(type));
  const auto code =
      type == DType::bf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  auto* const pages = new Pages(take_pages(static_cast<int64_t>(rows * cols) * size_of(type)));
  const nb::capsule owner(pages, [](void* p) noexcept {
    release_pages(*static_cast<Pages*>(p));
    delete static_cast<Pages*>(p);
  });
  const size_t shape[] = {rows, cols};
  return nb::ndarray<nb::pytorch>(pages->data, 2, shape, owner, nullptr,
                                  {static_cast<uint8_t>(code), bits, 1});
}

}  // namespace

void remember(const SparseCounts& counts) { last_counts = counts; }

NB_MODULE(_core, m) {
  m.doc() =
      "The core's plan / run pairs; see logitless.numpy for the face that checks and documents.";
  m.attr("__version__") = LOGITLESS_VERSION;

  m.def("forward", &forward, nb::arg("input"), nb::arg("weight"), nb::arg("target"),
        nb::arg("vocab_start_index"), nb::arg("vocab_end_index").none(),
        nb::arg("ignore_index").none(), nb::arg("counts").none(), nb::arg("multiply").none(),
        nb::arg("logits_rounding"), nb::arg("logits_max"), nb::arg("sum_exp_logits"),
        nb::arg("predicted_logits"), nb::arg("target_mask").none(), nb::arg("masked_target").none(),
        nb::arg("logits").none(), nb::arg("options"));
  m.def("merge", &merge, nb::arg("shards"), nb::arg("logits_max"), nb::arg("sum_exp_logits"),
        nb::arg("predicted_logits"), nb::arg("target_mask").none());
  m.def("loss", &loss, nb::arg("logits_max"), nb::arg("sum_exp_logits"),
        nb::arg("predicted_logits"), nb::arg("logits").none(), nb::arg("counts").none(),
        nb::arg("loss"), nb::arg("logsumexp").none(), nb::arg("softmax").none(),
        nb::arg("options"));
  m.def("gradient", &gradient, nb::arg("grad"), nb::arg("grad_logsumexp").none(), nb::arg("input"),
        nb::arg("weight"), nb::arg("target_mask").none(), nb::arg("masked_target"),
        nb::arg("logits_max").none(), nb::arg("sum_exp_logits").none(), nb::arg("softmax").none(),
        nb::arg("counts").none(), nb::arg("multiply").none(), nb::arg("logits_rounding"),
        nb::arg("grad_input").none(), nb::arg("accumulate_grad_input"),
        nb::arg("grad_weight").none(), nb::arg("accumulate_grad_weight"), nb::arg("options"),
        nb::arg("sparse").none() = nb::none());
  m.def("loss_and_gradient", &loss_and_gradient, nb::arg("input"), nb::arg("weight"),
        nb::arg("target"), nb::arg("ignore_index").none(), nb::arg("counts").none(),
        nb::arg("token_weights").none(), nb::arg("normalizer").none(), nb::arg("multiply").none(),
        nb::arg("strategy"), nb::arg("loss"), nb::arg("logits_max").none(),
        nb::arg("sum_exp_logits").none(), nb::arg("predicted_logits").none(),
        nb::arg("grad_input").none(), nb::arg("accumulate_grad_input"),
        nb::arg("grad_weight").none(), nb::arg("accumulate_grad_weight"), nb::arg("options"),
        nb::arg("sparse").none() = nb::none());
  m.def("sparse_counts", &sparse_counts);

  m.def("count_rows", &count_rows);
  m.def("mark_rows", &mark_rows);
  m.def("row_logsumexp", &row_logsumexp);
  m.def("weighted_total", &weighted_total, nb::arg("loss"), nb::arg("target"),
        nb::arg("ignore_index"), nb::arg("weights").none(), nb::arg("normalizer"));
  m.def("token_gradients", &token_gradients, nb::arg("target"), nb::arg("ignore_index"),
        nb::arg("total"), nb::arg("weights").none(), nb::arg("normalizer"), nb::arg("each").none(),
        nb::arg("grad"));

  m.def("plan_text", &plan_text, nb::arg("kind"), nb::arg("BT"), nb::arg("V"), nb::arg("H"),
        nb::arg("operand"), nb::arg("multiply").none(), nb::arg("strategy"), nb::arg("grad_input"),
        nb::arg("grad_weight"), nb::arg("grad_dtype"), nb::arg("options"),
        nb::arg("grad_tolerance") = 0.0);
  m.def("takes_one_pass", &takes_one_pass, nb::arg("BT"), nb::arg("V"), nb::arg("H"),
        nb::arg("operand"), nb::arg("multiply").none(), nb::arg("target"),
        nb::arg("grad_input").none(), nb::arg("grad_weight").none(), nb::arg("options"),
        nb::arg("grad_tolerance") = 0.0);
  m.def("machine", &machine, nb::sig("def machine() -> dict[str, typing.Any]"));
  m.def("measure_peak_flops", [](const std::string& isa, int dtype, int threads, double seconds) {
    const Isa level = take(parse_isa(isa));
    const nb::gil_scoped_release without_gil;
    return take(measure_peak_flops(level, static_cast<DType>(dtype), threads, seconds));
  });

  bind_parallel(m);

  m.def("suggest_openmp", &suggest_openmp);
  m.def("openmp_path", &openmp_path);
  m.def("drop_workspaces", &drop_workspaces);
  m.def("workspace_bytes_held", &workspace_bytes_held);
  m.def("kept_matrix", &kept_matrix,
        nb::sig("def kept_matrix(rows: int, cols: int, dtype: int) -> typing.Any"));
  m.def("page_bytes_held", &page_bytes_held);

  nb::class_<Borrowed>(m, "Borrowed", "An array of another library, kept alive.")
      .def_prop_ro("address",
                   [](const Borrowed& b) { return reinterpret_cast<uintptr_t>(b.array.data()); })
      .def_prop_ro("dtype", [](const Borrowed& b) { return dtype_number(b.array.dtype()); })
      .def_prop_ro(
          "on_cpu",
          [](const Borrowed& b) { return b.array.device_type() == nb::device::cpu::value; })
      .def_prop_ro(
          "shape",
          [](const Borrowed& b) {
            nb::list shape;
            for (size_t i = 0; i < b.array.ndim(); ++i) shape.append(b.array.shape(i));
            return nb::tuple(shape);
          },
          nb::for_getter(nb::sig("def shape(self) -> tuple[int, ...]")))
      .def_prop_ro(
          "strides",
          [](const Borrowed& b) {
            nb::list strides;
            for (size_t i = 0; i < b.array.ndim(); ++i) strides.append(b.array.stride(i));
            return nb::tuple(strides);
          },
          nb::for_getter(nb::sig("def strides(self) -> tuple[int, ...]")));
  m.def(
      "borrow", [](nb::ndarray<nb::ro> array) { return Borrowed{std::move(array)}; },
      nb::sig("def borrow(array: typing.Any) -> Borrowed"));
}

}  // namespace logitless::python
