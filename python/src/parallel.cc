// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <algorithm>
#include <cstring>
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
        size_(nb::cast<int>(transport_.attr("size"))) {
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

  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    return start("start_all_reduce_sum", [&] {
      return transport_.attr("start_all_reduce_sum")(memory(values.data(), values.size_bytes()));
    });
  }

  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
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
  class Pending final : public PendingSum {
   public:
    Pending(PythonTransport& transport, nb::object handle)
        : transport_(transport), handle_(std::move(handle)) {}
    ~Pending() override {
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
  Result<std::unique_ptr<PendingSum>> start(const char* verb, const Body& body) {
    const nb::gil_scoped_acquire gil;  // until the handle has its owner
    std::unique_ptr<PendingSum> pending;
    const Result<void> started =
        call(verb, [&] { pending = std::make_unique<Pending>(*this, nb::object(body())); });
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
std::string call_text(int64_t value) {
  return value == 0 ? "a loss" : value == 1 ? "its backward" : "a loss with gradients";
}

// The agreement of a plan, answered from what the ranks have said already: they were given the same
// but for their rows of the vocabulary. So each rank makes and keeps plans as it likes.
class KnownRanks final : public Communicator {
 public:
  KnownRanks(const Communicator& ranks, std::span<const RowRange> cover)
      : rank_(ranks.rank()), cover_(cover) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(cover_.size()); }
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    Statement statement;
    if (mine.size() != sizeof statement) return unexpected();
    std::memcpy(&statement, mine.data(), sizeof statement);
    for (size_t r = 0; r < cover_.size(); ++r) {
      statement.own[0] = cover_[r].begin;
      statement.own[1] = cover_[r].end;
      std::memcpy(all.data() + r * sizeof statement, &statement, sizeof statement);
    }
    return {};
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> /*values*/) override {
    return unexpected();
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> /*values*/,
                                                               std::span<const int64_t> /*counts*/,
                                                               std::span<float> /*mine*/) override {
    return unexpected();
  }

 private:
  static Error unexpected() {
    return Error{ErrorKind::communication, "a plan communicates more than it is known to"};
  }
  int rank_;
  std::span<const RowRange> cover_;
};

struct Arrays {
  MatrixView input, weight;
  VectorView target;
  std::optional<int64_t> vocab_start;
  std::optional<MergedStatistics> statistics;  // of the forward; absent: there is one
  bool wants_grad_input, wants_grad_weight;    // now or in the backward
};

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

Result<std::vector<RowRange>> meet(Communicator& ranks, const Arrays& a,
                                   const VocabParallelTypes& types, const Options& options) {
  const Result<Isa> isa = isa_of(options);
  const int64_t call = a.statistics ? 1 : types.grad_input || types.grad_weight ? 2 : 0;
  const Agreed fields[] = {
      {"call", call, call_text},
      {"target's size", a.target.size, number},
      {"H", a.input.cols, number},
      {"input's dtype", static_cast<int64_t>(types.operand), dtype_text},
      {"weight's dtype", static_cast<int64_t>(a.weight.dtype), dtype_text},
      {"multiply", code(types.multiply), dtype_text},
      {"target's dtype", static_cast<int64_t>(types.target), dtype_text},
      {"gradient of input", a.wants_grad_input ? 1 : 0, flag_text},
      {"gradient of weight", a.wants_grad_weight ? 1 : 0, flag_text},
      {"grad_input", code(types.grad_input), output_text},
      {"grad_weight", code(types.grad_weight), output_text},
      {"sequence_parallel", types.input_rows == TokenRows::slice ? 1 : 0, flag_text},
      {"vocab_start", a.vocab_start ? 1 : 0, presence_text},
      {"chunk_tokens", types.chunk_tokens, number},
      {"isa", isa ? static_cast<int64_t>(*isa) : 0, isa_text},
  };
  const Result<void> mine = isa ? Result<void>() : Result<void>(isa.error());
  std::vector<Statement> statements(static_cast<size_t>(ranks.size()));
  const int64_t own[] = {a.weight.rows, a.vocab_start.value_or(-1)};
  if (auto ok = agree(ranks, mine, fields, own, statements); !ok) return ok.error();
  return cover_of(statements);
}

int64_t hash_of(std::span<const RowRange> cover) {
  Hash hash;
  for (const RowRange& rows : cover) {
    hash.add(static_cast<uint64_t>(rows.begin));
    hash.add(static_cast<uint64_t>(rows.end));
  }
  return hash.value();
}

Result<VocabParallelPlan> plan_of(const Communicator& ranks, const Arrays& a,
                                  std::span<const RowRange> cover, const VocabParallelTypes& types,
                                  const Options& options) {
  Shape shape{.BT = a.target.size, .V = 0, .H = a.input.cols};
  for (const RowRange& rows : cover) shape.V = std::max(shape.V, rows.end);
  return cache<VocabParallelPlan>().find_or_make(
      {shape.BT, shape.V, shape.H, code(types.operand), code(types.multiply), code(types.target),
       code(types.grad_input), code(types.grad_weight), static_cast<int64_t>(types.input_rows),
       types.chunk_tokens, ranks.rank(), ranks.size(), hash_of(cover)},
      options, [&](const PlanOptions& o) {
        KnownRanks known(ranks, cover);
        return plan_vocab_parallel_linear_cross_entropy(
            known, shape, cover[static_cast<size_t>(ranks.rank())], types, o);
      });
}

// ---- the step -----------------------------------------------------------------------------------

Result<void> out_of_memory(int64_t bytes) {
  return Error{kOutOfMemory,
               "the workspace needs " + number(bytes) + " bytes, which are not there"};
}

// The loss of a vocabulary split over ranks, its gradients, or both. Returns the total, and where
// this rank's rows begin.
std::tuple<double, int64_t> vocab_parallel(
    nb::object transport_object, const Matrix& input, const Matrix& weight, const Vector& target,
    std::optional<int64_t> vocab_start, bool sequence_parallel, std::optional<int64_t> ignore_index,
    const std::optional<Vector>& counts, const std::optional<Vector>& token_weights,
    std::optional<double> normalizer, std::optional<int> multiply, std::tuple<bool, bool> wanted,
    const std::optional<std::tuple<Vector, Vector>>& statistics, const std::optional<Vector>& loss,
    const std::optional<Vector>& logits_max, const std::optional<Vector>& sum_exp_logits,
    const std::optional<Vector>& predicted_logits, const std::optional<Matrix>& grad_input,
    bool accumulate_grad_input, const std::optional<Matrix>& grad_weight,
    bool accumulate_grad_weight, int64_t chunk_tokens, const Options& options) {
  PythonTransport python(std::move(transport_object));
  std::unique_ptr<Communicator> alone;
  if (python.size() == 1) alone = self_communicator();
  Communicator& ranks = alone ? *alone : python;

  Arrays a{.input = view(input),
           .weight = view(weight),
           .target = view(target),
           .vocab_start = vocab_start,
           .statistics = {},
           .wants_grad_input = std::get<0>(wanted),
           .wants_grad_weight = std::get<1>(wanted)};
  if (statistics) {
    a.statistics = MergedStatistics{view(std::get<0>(*statistics)), view(std::get<1>(*statistics))};
  }
  const TokenRows rows = sequence_parallel ? TokenRows::slice : TokenRows::all;
  const VocabParallelTypes types{.operand = a.input.dtype,
                                 .multiply = optional_dtype(multiply),
                                 .target = a.target.dtype,
                                 .grad_input = output_type(grad_input, accumulate_grad_input),
                                 .grad_weight = output_type(grad_weight, accumulate_grad_weight),
                                 .input_rows = rows,
                                 .grad_input_rows = rows,
                                 .chunk_tokens = chunk_tokens,
                                 .strategy = Strategy::recompute};
  const auto take_here = [&](auto result) {
    if (!result) python.raise_error(result.error());
    if constexpr (!std::is_same_v<decltype(result), Result<void>>) return std::move(result).value();
  };
  // What goes wrong on this rank alone, all ranks hear of in place of their agreement in run.
  const auto give_up = [&](const Result<void>& why) { take_here(share_status(ranks, why)); };

  const std::vector<RowRange> cover = take_here(meet(ranks, a, types, options));
  Result<VocabParallelPlan> plan = plan_of(ranks, a, cover, types, options);
  if (!plan) give_up(plan.error());
  std::optional<WorkspaceLease> workspace;
  try {
    workspace.emplace(plan->workspace_bytes());
  } catch (const std::bad_alloc&) {
    give_up(out_of_memory(plan->workspace_bytes()));
  }

  const LossAndGradientOperands operands{
      a.input,
      a.weight,
      a.target,
      {.ignore_index = ignore_index, .counts = optional_view<ConstVectorView>(counts)},
      optional_view<ConstVectorView>(token_weights),
      normalizer};
  double total = 0;
  constexpr double kWorthInterrupting = 1e9;  // multiply-adds
  const Shape& shape = plan->shape();
  const double work = static_cast<double>(shape.BT) * static_cast<double>(a.weight.rows) *
                      static_cast<double>(shape.H) *
                      (types.grad_input || types.grad_weight ? 3 : 1);
  Interrupt interrupt(work > kWorthInterrupting, true);
  const CancelToken* const cancel = interrupt.armed() ? interrupt.token() : nullptr;
  const Result<void> done = [&] {
    const nb::gil_scoped_release without_gil;
    if (a.statistics) {
      return run_gradient(
          *plan, ranks, operands, *a.statistics,
          {optional_view<MatrixView>(grad_input), optional_view<MatrixView>(grad_weight)},
          workspace->bytes(), cancel);
    }
    const LossAndGradientOutputs outputs{
        loss ? view(*loss) : VectorView{},           &total,
        optional_view<VectorView>(logits_max),       optional_view<VectorView>(sum_exp_logits),
        optional_view<VectorView>(predicted_logits), optional_view<MatrixView>(grad_input),
        optional_view<MatrixView>(grad_weight)};
    return run(*plan, ranks, operands, outputs, workspace->bytes(), cancel);
  }();
  interrupt.raise_if_interrupted();
  take_here(done);
  return {total, plan->rows().begin};
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
        nb::arg("accumulate_grad_weight"), nb::arg("chunk_tokens"), nb::arg("options"));
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
