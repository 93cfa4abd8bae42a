// SPDX-License-Identifier: Apache-2.0
// The library's side of bench/peers.py: holds one case and runs operators on it when told to. One
// JSON object a line comes in on stdin, one goes out on stdout (bench/peer_comparison.py has the
// list; bench/peer_torch.py answers for PyTorch). Everything an operator needs is made beforehand,
// so that only its call is timed.
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/build_info.h"
#include "cli/case.h"
#include "cli/failure.h"
#include "cli/host_tensor.h"
#include "cli/resident_memory.h"
#include "cli/safetensors.h"
#include "cli/units.h"
#include "logitless/logitless.h"

namespace logitless::bench {
namespace {

using cli::Case;
using cli::fail;
using cli::HostTensor;
using cli::take;
using nlohmann::json;

// One operator on the case, ready to be called.
struct Prepared {
  std::function<void(std::span<std::byte>)> call;
  int64_t workspace_bytes = 0;
  int64_t gradient_bytes = 0;  // of the gradients that it writes
  std::string describe;
};

HostTensor zeros(DType dtype, std::vector<int64_t> shape) {
  HostTensor tensor(dtype, std::move(shape));
  tensor.fill_zero();  // touched: its pages are not the call's
  return tensor;
}

// A case, the outputs of every operator on it, and the statistics that the gradient starts from.
class Loaded {
 public:
  Loaded(Case c, PlanOptions options)
      : case_(std::move(c)),
        options_(options),
        counts_(DType::u8, {case_.shape().BT}),
        loss_(zeros(DType::f32, {case_.shape().BT})),
        logits_max_(zeros(DType::f32, {case_.shape().BT})),
        sum_exp_logits_(zeros(DType::f32, {case_.shape().BT})),
        predicted_logits_(zeros(DType::f32, {case_.shape().BT})),
        masked_target_(zeros(case_.target.dtype(), {case_.shape().BT})),
        grad_input_(zeros(case_.dtype(), {case_.shape().BT, case_.shape().H})),
        grad_weight_(zeros(case_.dtype(), {case_.shape().V, case_.shape().H})) {
    for (int64_t b = 0; b < case_.shape().BT; ++b) counts_.as<uint8_t>()[b] = case_.counts(b);
    if (case_.counting_tokens() == 0) fail("no token of the case counts");
    if (case_.vocab_start_index != 0 || case_.tokens_outside() != 0) {
      fail("the case is a shard; a whole vocabulary is wanted");
    }
  }

  const Case& problem() const { return case_; }
  const HostTensor& grad_input() const { return grad_input_; }
  const HostTensor& grad_weight() const { return grad_weight_; }

  // Mean over the tokens that count, as the call left it.
  double mean_loss() const {
    double sum = 0;
    for (int64_t b = 0; b < case_.shape().BT; ++b) {
      if (case_.counts(b)) sum += static_cast<double>(loss_.as<float>()[b]);
    }
    return sum / static_cast<double>(case_.counting_tokens());
  }

  Prepared prepare(const std::string& op) {
    if (op == "step") return step(Strategy::automatic);
    if (op == "step-recompute") return step(Strategy::recompute);
    if (op == "step-sparse") return step(Strategy::one_pass, kTolerance);
    if (op == "forward") return forward();
    if (op == "gradient") {
      const Prepared first = forward();
      cli::Buffer workspace(first.workspace_bytes);
      first.call(workspace.span());
      return gradient();
    }
    fail(fmt::format("op is `{}`, must be step, step-recompute, step-sparse, forward or gradient",
                     cli::printable(op)));
  }

 private:
  static constexpr float kTolerance = 0x1p-9f;

  // Loss and both gradients, one call.
  Prepared step(Strategy strategy, float grad_tolerance = 0.0f) {
    LossAndGradientTypes types;
    types.grad_tolerance = grad_tolerance;
    types.operand = case_.dtype();
    types.target = case_.target.dtype();
    types.grad_input = GradientOutput{.dtype = case_.dtype(), .accumulate = false};
    types.grad_weight = GradientOutput{.dtype = case_.dtype(), .accumulate = false};
    const LossAndGradientPlan plan =
        take(plan_loss_and_gradient(case_.shape(), types, options_, strategy));
    LossAndGradientOperands operands;
    operands.input = case_.input.matrix();
    operands.weight = case_.weight.matrix();
    operands.target = std::as_const(case_.target).vector();
    operands.rows.ignore_index = case_.ignore_index;
    LossAndGradientOutputs outputs;
    outputs.loss = loss_.vector();
    outputs.grad_input = grad_input_.matrix();
    outputs.grad_weight = grad_weight_.matrix();
    return {.call =
                [plan, operands, outputs](std::span<std::byte> workspace) mutable {
                  ++operands.seed;  // a new one for every step
                  take(run(plan, operands, outputs, workspace));
                },
            .workspace_bytes = plan.workspace_bytes(),
            .gradient_bytes = grad_input_.bytes() + grad_weight_.bytes(),
            .describe = plan.describe()};
  }

  // Forward and loss.
  Prepared forward() {
    ForwardTypes types;
    types.operand = case_.dtype();
    types.target = case_.target.dtype();
    const ForwardPlan plan = take(plan_forward(case_.shape(), types, options_));
    const LossPlan loss_plan =
        take(plan_loss(case_.shape().BT, case_.shape().V, LossTypes{}, options_));
    ForwardOperands operands;
    operands.input = case_.input.matrix();
    operands.weight = case_.weight.matrix();
    operands.target = std::as_const(case_.target).vector();
    operands.rows.ignore_index = case_.ignore_index;
    ForwardOutputs outputs;
    outputs.logits_max = logits_max_.vector();
    outputs.sum_exp_logits = sum_exp_logits_.vector();
    outputs.predicted_logits = predicted_logits_.vector();
    outputs.masked_target = masked_target_.vector();
    LossOperands loss_operands;
    loss_operands.logits_max = logits_max_.vector();
    loss_operands.sum_exp_logits = sum_exp_logits_.vector();
    loss_operands.predicted_logits = predicted_logits_.vector();
    loss_operands.counts = counts_.vector();
    LossOutputs loss_outputs;
    loss_outputs.loss = loss_.vector();
    return {.call =
                [plan, operands, outputs, loss_plan, loss_operands,
                 loss_outputs](std::span<std::byte> workspace) {
                  take(run(plan, operands, outputs, workspace));
                  take(run(loss_plan, loss_operands, loss_outputs));
                },
            .workspace_bytes = plan.workspace_bytes(),
            .gradient_bytes = 0,
            .describe = plan.describe()};
  }

  // Both gradients from the statistics, logits recomputed. The forward has run.
  Prepared gradient() {
    GradientTypes types;
    types.operand = case_.dtype();
    types.target = case_.target.dtype();
    types.grad_input = GradientOutput{.dtype = case_.dtype(), .accumulate = false};
    types.grad_weight = GradientOutput{.dtype = case_.dtype(), .accumulate = false};
    const GradientPlan plan = take(plan_gradient(case_.shape(), types, options_));
    GradientOperands operands;
    operands.grad = std::as_const(case_.grad).vector();
    operands.input = case_.input.matrix();
    operands.weight = case_.weight.matrix();
    operands.masked_target = masked_target_.vector();
    operands.logits_max = logits_max_.vector();
    operands.sum_exp_logits = sum_exp_logits_.vector();
    operands.counts = counts_.vector();
    GradientOutputs outputs;
    outputs.grad_input = grad_input_.matrix();
    outputs.grad_weight = grad_weight_.matrix();
    return {.call =
                [plan, operands, outputs](std::span<std::byte> workspace) {
                  take(run(plan, operands, outputs, workspace));
                },
            .workspace_bytes = plan.workspace_bytes(),
            .gradient_bytes = grad_input_.bytes() + grad_weight_.bytes(),
            .describe = plan.describe()};
  }

  Case case_;
  PlanOptions options_;
  HostTensor counts_;
  HostTensor loss_;
  HostTensor logits_max_, sum_exp_logits_, predicted_logits_, masked_target_;
  HostTensor grad_input_, grad_weight_;
};

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Rows of a matrix, in the order they are named.
HostTensor some_rows(const HostTensor& matrix, const std::vector<int64_t>& rows, const char* what) {
  const int64_t count = matrix.shape()[0];
  const auto row_bytes = static_cast<size_t>(matrix.shape()[1] * size_of(matrix.dtype()));
  HostTensor out(matrix.dtype(), {static_cast<int64_t>(rows.size()), matrix.shape()[1]});
  std::byte* to = out.data();
  for (const int64_t row : rows) {
    if (row < 0 || row >= count) {
      fail(fmt::format("{}: row {} is not in [0, {})", what, row, count));
    }
    std::memcpy(to, matrix.data() + static_cast<size_t>(row) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return out;
}

class Worker {
 public:
  json answer(const json& request) {
    const std::string what = request.at("do").get<std::string>();
    if (what == "load") return load(request);
    if (what == "prepare") return prepare(request);
    if (what == "memory") return memory(request);
    if (what == "run") return run_op(request);
    if (what == "peak") return peak(request);
    if (what == "write") return write(request);
    fail(fmt::format("`do` is `{}`, must be load, prepare, memory, run, peak or write",
                     cli::printable(what)));
  }

 private:
  json load(const json& request) {
    prepared_.clear();
    loaded_.reset();
    Case c = take(cli::load_case(request.at("files").get<std::vector<std::string>>()));
    cli::set_mean_grad(c);
    const Isa isa = take(default_isa());
    threads_ = request.value("threads", 0);
    if (threads_ == 0) threads_ = default_threads();
    loaded_.emplace(std::move(c), PlanOptions{.threads = threads_,
                                              .isa = isa,
                                              .workspace_limit_bytes =
                                                  request.value("workspace_limit", int64_t{0})});
    isa_ = isa;
    const Shape shape = loaded_->problem().shape();
    const MachineInfo machine = machine_info();
    return {{"BT", shape.BT},
            {"V", shape.V},
            {"H", shape.H},
            {"dtype", name_of(loaded_->problem().dtype())},
            {"counting_tokens", loaded_->problem().counting_tokens()},
            {"threads", threads_},
            {"isa", name_of(isa)},
            {"cpu", machine.cpu},
            {"amx_present", machine.amx_present},
            {"compiler", cli::build_compiler()},
            {"commit", cli::build_commit()},
            {"version", LOGITLESS_VERSION}};
  }

  Loaded& loaded() {
    if (!loaded_) fail("no case is loaded");
    return *loaded_;
  }

  Prepared& prepared(const json& request) {
    const std::string op = request.at("op").get<std::string>();
    const auto found = prepared_.find(op);
    if (found == prepared_.end()) {
      fail(fmt::format("op `{}` has not been prepared", cli::printable(op)));
    }
    return found->second;
  }

  json prepare(const json& request) {
    const std::string op = request.at("op").get<std::string>();
    Prepared ready = loaded().prepare(op);
    json reply = {{"workspace_bytes", ready.workspace_bytes}, {"describe", ready.describe}};
    prepared_[op] = std::move(ready);
    return reply;
  }

  // One call with fresh pages: how far the resident memory rises, and the gradients, whose pages
  // have been touched before.
  json memory(const json& request) {
    const Prepared& op = prepared(request);
    workspace_ = cli::Buffer();
    const std::optional<int64_t> bytes = cli::peak_memory_of([&] { call(op); });
    return {{"memory_bytes", bytes ? json(*bytes + op.gradient_bytes) : json()}};
  }

  json run_op(const json& request) {
    const Prepared& op = prepared(request);
    reserve(op);
    const std::clock_t cpu_before = std::clock();  // of all threads
    const double seconds = seconds_of([&] { call(op); });
    const std::clock_t cpu = std::clock() - cpu_before;
    return {{"seconds", seconds}, {"cpu_seconds", static_cast<double>(cpu) / CLOCKS_PER_SEC}};
  }

  json peak(const json& request) {
    return {{"flops_per_second", take(measure_peak_flops(isa_, loaded().problem().dtype(), threads_,
                                                         request.value("seconds", 0.2)))}};
  }

  // Rows of the gradients of the last call.
  json write(const json& request) {
    const HostTensor grad_input = some_rows(
        loaded().grad_input(), request.at("tokens").get<std::vector<int64_t>>(), "tokens");
    const HostTensor grad_weight =
        some_rows(loaded().grad_weight(), request.at("rows").get<std::vector<int64_t>>(), "rows");
    take(cli::write_safetensors(request.at("file").get<std::string>(),
                                {{"grad_input", &grad_input}, {"grad_weight", &grad_weight}}, {}));
    return {{"loss", loaded().mean_loss()}};
  }

  void reserve(const Prepared& op) {
    if (workspace_.size() >= op.workspace_bytes) return;
    workspace_ = cli::Buffer();
    workspace_ = cli::Buffer(op.workspace_bytes);
    prefer_huge_pages(workspace_.span());
  }

  void call(const Prepared& op) {
    reserve(op);
    op.call(workspace_.span());
  }

  std::optional<Loaded> loaded_;
  std::map<std::string, Prepared> prepared_;
  cli::Buffer workspace_;  // of the operator that needs most, kept between calls
  int threads_ = 0;
  Isa isa_ = Isa::scalar;
};

int serve() {
  Worker worker;
  std::string line;
  while (std::getline(std::cin, line)) {
    json reply;
    try {
      const json request = json::parse(line);
      if (request.at("do") == "quit") return 0;
      reply = worker.answer(request);
    } catch (const cli::Failure& failure) {
      reply = {{"error", failure.message}};
    } catch (const json::exception& e) {
      reply = {{"error", fmt::format("bad command: {}", e.what())}};
    } catch (const std::bad_alloc&) {
      reply = {{"error", "out of memory"}};
    }
    std::cout << reply.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace logitless::bench

int main() { return logitless::bench::serve(); }
