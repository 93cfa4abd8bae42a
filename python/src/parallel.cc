// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "binding.h"
#include "interrupt.h"
#include "parallel/agreement.h"
#include "workspace.h"

namespace nb = nanobind;

namespace logitless::python {
namespace {

// ---- the transport ------------------------------------------------------------------------------

nb::object memory(const void* data, size_t bytes) {
  static char nothing = 0;
  auto* const start = bytes > 0 ? static_cast<char*>(const_cast<void*>(data)) : &nothing;
  return nb::steal(PyMemoryView_FromMemory(start, static_cast<Py_ssize_t>(bytes), PyBUF_WRITE));
}

// Calls Python's verbs with memoryviews of the operator's buffers. Whatever they raise is an
// ErrorKind::communication here, and the cause of the exception that the call ends with.
class PythonTransport final : public Communicator {
 public:
  explicit PythonTransport(nb::object transport)
      : transport_(std::move(transport)),
        rank_(nb::cast<int>(transport_.attr("rank"))),
        size_(nb::cast<int>(transport_.attr("size"))),
        starts_gathers_(nb::hasattr(transport_, "start_all_gather")) {
    if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
      raise({ErrorKind::invalid_argument, "transport: rank is " + std::to_string(rank_) +
                                              " of size " + std::to_string(size_) +
                                              ", must be in [0, size)"});
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    return call("all_gather", [&] {
      transport_.attr("all_gather")(memory(mine.data(), mine.size()),
                                    memory(all.data(), all.size()));
    });
  }

  // A verb that a transport need not have.
  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    if (!starts_gathers_) return Communicator::start_all_gather(mine, all);
    return start("start_all_gather", [&] {
      return transport_.attr("start_all_gather")(memory(mine.data(), mine.size()),
                                                 memory(all.data(), all.size()));
    });
  }

  Result<std::unique_ptr<Pending>> start_all_reduce_sum(std::span<float> values) override {
    return start("start_all_reduce_sum", [&] {
      return transport_.attr("start_all_reduce_sum")(memory(values.data(), values.size_bytes()));
    });
  }

  Result<std::unique_ptr<Pending>> start_reduce_scatter_sum(std::span<const float> values,
                                                            std::span<const int64_t> counts,
                                                            std::span<float> mine) override {
    return start("start_reduce_scatter_sum", [&] {
      nb::list list;
      for (const int64_t count : counts) list.append(count);
      return transport_.attr("start_reduce_scatter_sum")(
          memory(values.data(), values.size_bytes()), list, memory(mine.data(), mine.size_bytes()));
    });
  }

  // With the GIL: raises what a call that failed is to end with.
  [[noreturn]] void raise_error(const Error& error) {
    if (error.kind != ErrorKind::communication || failure_ == nullptr) raise(error);
    if (!failure_->matches(PyExc_Exception)) {  // Ctrl-C, sys.exit()
      failure_->restore();
      throw nb::python_error();
    }
    nb::raise_from(*failure_, PyExc_RuntimeError, "%s", error.message.c_str());
  }

 private:
  class Call final : public Pending {
   public:
    Call(PythonTransport& transport, nb::object handle)
        : transport_(transport), handle_(std::move(handle)) {}
    ~Call() override {
      (void)wait();
      const nb::gil_scoped_acquire gil;
      handle_.reset();
    }
    Result<void> wait() override {
      if (waited_) return {};
      waited_ = true;
      return transport_.call("wait", [&] { handle_.attr("wait")(); });
    }

   private:
    PythonTransport& transport_;
    nb::object handle_;
    bool waited_ = false;
  };

  template <class Body>
  Result<void> call(const char* verb, const Body& body) {
    const nb::gil_scoped_acquire gil;
    try {
      body();
      return {};
    } catch (nb::python_error& error) {
      return failed(verb, error);
    } catch (const std::exception& error) {
      return Error{ErrorKind::communication, std::string(verb) + ": " + error.what()};
    }
  }

  template <class Body>
  Result<std::unique_ptr<Pending>> start(const char* verb, const Body& body) {
    const nb::gil_scoped_acquire gil;  // until the handle has its owner
    std::unique_ptr<Pending> pending;
    const Result<void> started =
        call(verb, [&] { pending = std::make_unique<Call>(*this, nb::object(body())); });
    if (!started) return started.error();
    return pending;
  }

  Error failed(const char* verb, nb::python_error& error) {
    std::string text = std::string(verb) + ": ";
    try {
      text += nb::cast<std::string>(nb::str(error.type().attr("__name__")));
      const auto sentence = nb::cast<std::string>(nb::str(error.value()));
      if (!sentence.empty()) text += ": " + sentence;
    } catch (const std::exception&) {
      text += "an exception whose text cannot be had";
    }
    if (failure_ == nullptr) failure_ = std::make_unique<nb::python_error>(std::move(error));
    return Error{ErrorKind::communication, text};
  }

  nb::object transport_;
  int rank_;
  int size_;
  bool starts_gathers_;
  std::unique_ptr<nb::python_error> failure_;  // the first
};

// ---- what all ranks know before they plan -------------------------------------------------------

std::string number(int64_t value) { return std::to_string(value); }
std::string dtype_text(int64_t value) {
  return value < 0 ? "none" : name_of(static_cast<DType>(value));
}
std::string output_text(int64_t value) {
  if (value < 0) return "none";
  return std::string(dtype_text(value % 100)).append(value >= 100 ? ", accumulated" : "");
}
std::string flag_text(int64_t value) { return value == 0 ? "False" : "True"; }
std::string presence_text(int64_t value) { return value == 0 ? "none" : "one"; }
std::string isa_text(int64_t value) { return name_of(static_cast<Isa>(value)); }
std::string strategy_text(int64_t value) {
  switch (static_cast<Strategy>(value)) {
    case Strategy::automatic:
      return "automatic";
    case Strategy::one_pass:
      return "one_pass";
    case Strategy::recompute:
      return "recompute";
  }
  return "none";
}
std::string tolerance_text(int64_t bits) {
  return std::to_string(std::bit_cast<float>(static_cast<int32_t>(bits)));
}
std::string seed_text(int64_t bits) { return std::to_string(std::bit_cast<uint64_t>(bits)); }
std::string call_text(int64_t value) {
  return value == 0 ? "a loss" : value == 1 ? "its backward" : "a loss with gradients";
}

// What this rank calls with, and the plans that it has kept of such a call. A plan is made by all
// ranks together, so it may be used again only where all of them have kept it: each says which one
// it has (ids are the same where covers and everything else are).
struct Step {
  MatrixView input, weight;
  VectorView target;
  std::optional<int64_t> vocab_start;
  std::optional<MergedStatistics> statistics;  // of the forward; absent: there is one
  bool wants_grad_input, wants_grad_weight;    // now or in the backward
  float grad_tolerance;                        // as those two
  uint64_t seed;
  // Without gradients where `types` would not take one pass.
  bool or_forward;
  VocabParallelTypes types, forward_types;
};

std::map<std::vector<int64_t>, VocabParallelPlan>& kept_plans() {
  thread_local std::map<std::vector<int64_t>, VocabParallelPlan> plans;
  return plans;
}

std::vector<int64_t> key_of(const Communicator& ranks, const Step& step,
                            const VocabParallelTypes& types, const PlanOptions& options) {
  return {ranks.rank(),
          ranks.size(),
          step.target.size,
          step.weight.rows,
          step.input.cols,
          step.vocab_start.value_or(-1),
          code(types.operand),
          code(types.multiply),
          code(types.target),
          code(types.grad_tolerance),
          code(types.grad_input),
          code(types.grad_weight),
          static_cast<int64_t>(types.input_rows),
          types.chunk_tokens,
          static_cast<int64_t>(types.strategy),
          static_cast<int64_t>(options.isa.value_or(Isa::scalar)),
          options.workspace_limit_bytes,
          options.threads};
}

std::optional<VocabParallelPlan> kept_plan(const std::vector<int64_t>& key) {
  const auto found = kept_plans().find(key);
  if (found == kept_plans().end()) return {};
  return found->second;
}
int64_t id_of(const std::optional<VocabParallelPlan>& plan) { return plan ? plan->id() : 0; }

// Every rank's rows of the vocabulary: at vocab_start, or one after another.
std::vector<RowRange> cover_of(std::span<const Statement> statements) {
  std::vector<RowRange> cover;
  int64_t next = 0;
  for (const Statement& s : statements) {
    const int64_t begin = s.own[1] < 0 ? next : s.own[1];
    next += s.own[0];
    // Where there are no rows it does not matter where they begin.
    cover.push_back(s.own[0] == 0 ? RowRange{0, 0} : RowRange{begin, begin + s.own[0]});
  }
  return cover;
}

// What the ranks have said of themselves.
struct Met {
  std::vector<RowRange> cover;
  bool kept, kept_forward;  // all of them have the plan, and the one without gradients
};

Result<Met> meet(Communicator& ranks, const Step& step, int64_t kept, int64_t kept_forward,
                 const Result<Isa>& isa) {
  const VocabParallelTypes& types = step.types;
  const int64_t call = step.statistics ? 1 : types.grad_input || types.grad_weight ? 2 : 0;
  const Agreed fields[] = {
      {"target's size", step.target.size, number},
      {"H", step.input.cols, number},
      {"input's dtype", static_cast<int64_t>(types.operand), dtype_text},
      {"weight's dtype", static_cast<int64_t>(step.weight.dtype), dtype_text},
      {"multiply", code(types.multiply), dtype_text},
      {"target's dtype", static_cast<int64_t>(types.target), dtype_text},
      {"gradient of input", step.wants_grad_input ? 1 : 0, flag_text},
      {"gradient of weight", step.wants_grad_weight ? 1 : 0, flag_text},
      {"grad_tolerance", std::bit_cast<int32_t>(step.grad_tolerance), tolerance_text},
      {"seed", std::bit_cast<int64_t>(step.seed), seed_text},
      {"strategy", static_cast<int64_t>(types.strategy), strategy_text},
      {"call", call, call_text},
      {"grad_input", code(types.grad_input), output_text},
      {"grad_weight", code(types.grad_weight), output_text},
      {"sequence_parallel", types.input_rows == TokenRows::slice ? 1 : 0, flag_text},
      {"vocab_start", step.vocab_start ? 1 : 0, presence_text},
      {"chunk_tokens", types.chunk_tokens, number},
      {"isa", isa ? static_cast<int64_t>(*isa) : 0, isa_text},
  };
  const Result<void> mine = isa ? Result<void>() : Result<void>(isa.error());
  std::vector<Statement> statements(static_cast<size_t>(ranks.size()));
  const int64_t own[] = {step.weight.rows, step.vocab_start.value_or(-1), kept, kept_forward};
  if (auto ok = agree(ranks, mine, fields, own, statements); !ok) return ok.error();
  const auto everywhere = [&](int i) {
    return std::ranges::all_of(statements, [&](const Statement& s) {
      return s.own[i] != 0 && s.own[i] == statements[0].own[i];
    });
  };
  return Met{cover_of(statements), everywhere(2), everywhere(3)};
}

// Threads are settled before, since ranks make a plan once, together: a tiny problem takes few.
int settled_threads(const Step& step, const Options& options) {
  const Shape local{step.target.size, step.weight.rows, step.input.cols};
  const ForwardTypes types{
      .operand = step.types.operand, .multiply = step.types.multiply, .target = step.types.target};
  const auto plan = cache<ForwardPlan>().find_or_make(
      {local.BT, local.V, local.H, code(types.operand), code(types.multiply), code(types.target),
       code(types.logits), static_cast<int64_t>(types.logits_rounding)},
      {std::get<0>(options), std::get<1>(options), 0},
      [&](const PlanOptions& o) { return plan_forward(local, types, o); });
  return plan ? plan->threads() : 0;  // what is wrong the plan of all ranks will say
}

Result<VocabParallelPlan> plan_of(Communicator& ranks, const Step& step,
                                  const std::vector<RowRange>& cover,
                                  const VocabParallelTypes& types, const PlanOptions& options,
                                  const std::vector<int64_t>& key) {
  Shape shape{.BT = step.target.size, .V = 0, .H = step.input.cols};
  for (const RowRange& rows : cover) shape.V = std::max(shape.V, rows.end);
  auto plan = plan_vocab_parallel_linear_cross_entropy(
      ranks, shape, cover[static_cast<size_t>(ranks.rank())], types, options);
  if (!plan) return plan;
  auto& plans = kept_plans();
  if (plans.size() >= 256) plans.clear();
  plans.insert_or_assign(key, *plan);
  return plan;
}

// ---- the step -----------------------------------------------------------------------------------

Result<void> out_of_memory(int64_t bytes) {
  return Error{kOutOfMemory,
               "the workspace needs " + number(bytes) + " bytes, which are not there"};
}

// The loss of a vocabulary split over ranks, its gradients, or both. Returns the total, where this
// rank's rows begin, and whether gradients were made with the loss: or_forward leaves them out
// where they would not be made in one pass.
std::tuple<double, int64_t, bool> vocab_parallel(
    nb::object transport_object, const Matrix& input, const Matrix& weight, const Vector& target,
    std::optional<int64_t> vocab_start, bool sequence_parallel, std::optional<int64_t> ignore_index,
    const std::optional<Vector>& counts, const std::optional<Vector>& token_weights,
    std::optional<double> normalizer, std::optional<int> multiply, std::tuple<bool, bool> wanted,
    const std::optional<std::tuple<Vector, Vector>>& statistics, const std::optional<Vector>& loss,
    const std::optional<Vector>& logits_max, const std::optional<Vector>& sum_exp_logits,
    const std::optional<Vector>& predicted_logits, const std::optional<Matrix>& grad_input,
    bool accumulate_grad_input, const std::optional<Matrix>& grad_weight,
    bool accumulate_grad_weight, int64_t chunk_tokens, int strategy, bool or_forward,
    const Options& options, const std::optional<Sparse>& sparse) {
  PythonTransport python(std::move(transport_object));
  std::unique_ptr<Communicator> alone;
  if (python.size() == 1) alone = self_communicator();
  Communicator& ranks = alone ? *alone : python;

  const TokenRows rows = sequence_parallel ? TokenRows::slice : TokenRows::all;
  Step step{.input = view(input),
            .weight = view(weight),
            .target = view(target),
            .vocab_start = vocab_start,
            .statistics = {},
            .wants_grad_input = std::get<0>(wanted),
            .wants_grad_weight = std::get<1>(wanted),
            .grad_tolerance = tolerance_of(sparse),
            .seed = seed_of(sparse),
            .or_forward = or_forward,
            .types = {},
            .forward_types = {}};
  if (statistics) {
    step.statistics =
        MergedStatistics{view(std::get<0>(*statistics)), view(std::get<1>(*statistics))};
  }
  step.types = {.operand = step.input.dtype,
                .multiply = optional_dtype(multiply),
                .target = step.target.dtype,
                .grad_tolerance = grad_input || grad_weight ? step.grad_tolerance : 0.0f,
                .grad_input = output_type(grad_input, accumulate_grad_input),
                .grad_weight = output_type(grad_weight, accumulate_grad_weight),
                .input_rows = rows,
                .grad_input_rows = rows,
                .chunk_tokens = chunk_tokens,
                .strategy = static_cast<Strategy>(strategy)};
  step.forward_types = step.types;
  step.forward_types.grad_tolerance = 0.0f;
  step.forward_types.grad_input.reset();
  step.forward_types.grad_weight.reset();
  step.forward_types.strategy = Strategy::recompute;
  const auto take_here = [&](auto result) {
    if (!result) python.raise_error(result.error());
    if constexpr (!std::is_same_v<decltype(result), Result<void>>) return std::move(result).value();
  };
  // What goes wrong on this rank alone, all ranks hear of in place of their agreement in run.
  const auto give_up = [&](const Result<void>& why) { take_here(share_status(ranks, why)); };

  const Result<Isa> isa = isa_of(options);
  const PlanOptions plan_options{.threads = settled_threads(step, options),
                                 .isa = isa ? std::optional(*isa) : std::nullopt,
                                 .workspace_limit_bytes = std::get<2>(options)};
  const auto key = key_of(ranks, step, step.types, plan_options);
  const auto forward_key = key_of(ranks, step, step.forward_types, plan_options);
  std::optional<VocabParallelPlan> plan = kept_plan(key);
  std::optional<VocabParallelPlan> forward_plan;
  if (or_forward) forward_plan = kept_plan(forward_key);
  const Met met = take_here(meet(ranks, step, id_of(plan), id_of(forward_plan), isa));
  if (!met.kept) plan = take_here(plan_of(ranks, step, met.cover, step.types, plan_options, key));
  const bool forward_only = or_forward && plan->strategy() != Strategy::one_pass;
  if (forward_only && met.kept_forward) {
    plan = forward_plan;
  } else if (forward_only) {
    plan =
        take_here(plan_of(ranks, step, met.cover, step.forward_types, plan_options, forward_key));
  }
  std::optional<WorkspaceLease> workspace;
  try {
    workspace.emplace(plan->workspace_bytes());
  } catch (const std::bad_alloc&) {
    give_up(out_of_memory(plan->workspace_bytes()));
  }

  const LossAndGradientOperands operands{
      step.input,
      step.weight,
      step.target,
      {.ignore_index = ignore_index, .counts = optional_view<ConstVectorView>(counts)},
      optional_view<ConstVectorView>(token_weights),
      normalizer,
      step.seed,
      token_ids_of(sparse)};
  double total = 0;
  SparseCounts made;
  SparseCounts* const made_here = plan->types().grad_tolerance > 0 ? &made : nullptr;
  constexpr double kWorthInterrupting = 1e9;  // multiply-adds
  const Shape& shape = plan->shape();
  const double work = static_cast<double>(shape.BT) * static_cast<double>(step.weight.rows) *
                      static_cast<double>(shape.H) *
                      (plan->types().grad_input || plan->types().grad_weight ? 3 : 1);
  Interrupt interrupt(work > kWorthInterrupting, true);
  const CancelToken* const cancel = interrupt.armed() ? interrupt.token() : nullptr;
  const Result<void> done = [&] {
    const nb::gil_scoped_release without_gil;
    if (step.statistics) {
      return run_gradient(*plan, ranks, operands, *step.statistics,
                          {optional_view<MatrixView>(grad_input),
                           optional_view<MatrixView>(grad_weight), made_here},
                          workspace->bytes(), cancel);
    }
    LossAndGradientOutputs outputs{
        loss ? view(*loss) : VectorView{},           &total,
        optional_view<VectorView>(logits_max),       optional_view<VectorView>(sum_exp_logits),
        optional_view<VectorView>(predicted_logits), optional_view<MatrixView>(grad_input),
        optional_view<MatrixView>(grad_weight),      made_here};
    if (forward_only) {
      outputs.grad_input.reset();
      outputs.grad_weight.reset();
    }
    return run(*plan, ranks, operands, outputs, workspace->bytes(), cancel);
  }();
  interrupt.raise_if_interrupted();
  take_here(done);
  if (made_here != nullptr) remember(made);
  return {total, plan->rows().begin, !forward_only};
}

// This rank cannot take part, for the reason `exception`: every rank's call ends with it.
void vocab_parallel_fail(nb::object transport_object, nb::object exception) {
  PythonTransport python(std::move(transport_object));
  const auto is = [&](PyObject* type) {
    return PyErr_GivenExceptionMatches(exception.ptr(), type) != 0;
  };
  std::string text = nb::cast<std::string>(nb::str(exception));
  ErrorKind kind = kOther;
  if (is(PyExc_NotImplementedError)) {
    kind = kNotImplemented;
  } else if (is(PyExc_TypeError)) {
    kind = ErrorKind::wrong_type;
  } else if (is(PyExc_IndexError)) {
    kind = ErrorKind::invalid_data;
  } else if (is(PyExc_ValueError)) {
    kind = ErrorKind::invalid_argument;
  } else if (is(PyExc_MemoryError)) {
    kind = kOutOfMemory;
  } else if (is(PyExc_KeyboardInterrupt)) {
    kind = ErrorKind::cancelled;
  } else {
    text = nb::cast<std::string>(nb::str(exception.type().attr("__name__"))) + ": " + text;
  }
  const Result<void> mine = Error{kind, text};
  const Result<void> shared = python.size() == 1 ? mine : share_status(python, mine);
  if (!shared) python.raise_error(shared.error());
}

RowRange whole(Result<RowRange> rows) { return take(std::move(rows)); }

}  // namespace

void bind_parallel(nb::module_& m) {
  m.def("vocab_parallel", &vocab_parallel, nb::arg("transport"), nb::arg("input"),
        nb::arg("weight"), nb::arg("target"), nb::arg("vocab_start").none(),
        nb::arg("sequence_parallel"), nb::arg("ignore_index").none(), nb::arg("counts").none(),
        nb::arg("token_weights").none(), nb::arg("normalizer").none(), nb::arg("multiply").none(),
        nb::arg("wanted"), nb::arg("statistics").none(), nb::arg("loss").none(),
        nb::arg("logits_max").none(), nb::arg("sum_exp_logits").none(),
        nb::arg("predicted_logits").none(), nb::arg("grad_input").none(),
        nb::arg("accumulate_grad_input"), nb::arg("grad_weight").none(),
        nb::arg("accumulate_grad_weight"), nb::arg("chunk_tokens"), nb::arg("strategy"),
        nb::arg("or_forward"), nb::arg("options"), nb::arg("sparse").none() = nb::none());
  m.def("vocab_parallel_fail", &vocab_parallel_fail, nb::arg("transport"), nb::arg("exception"));
  m.def(
      "balanced_shard",
      [](int64_t V, int ranks, int rank) {
        const RowRange rows = whole(balanced_shard(V, ranks, rank));
        return std::tuple(rows.begin, rows.end);
      },
      nb::arg("V"), nb::arg("ranks"), nb::arg("rank"));
  m.def(
      "padded_shard",
      [](int64_t V, int ranks, int rank, int64_t multiple) {
        const RowRange rows = whole(padded_shard(V, ranks, rank, multiple));
        return std::tuple(rows.begin, rows.end);
      },
      nb::arg("V"), nb::arg("ranks"), nb::arg("rank"), nb::arg("multiple"));
}

}  // namespace logitless::python
