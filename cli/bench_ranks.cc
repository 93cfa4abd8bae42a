// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "cli/failure.h"
#include "cli/ranks.h"
#include "logitless/parallel/vocab_parallel.h"

namespace logitless::cli {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// A small number that depends on i alone, the same on every rank.
float value_at(int64_t i) {
  auto x = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u;
  x ^= x >> 32;
  return static_cast<float>(static_cast<int32_t>(x & 0xffff) - 0x8000) * 0x1p-17f;
}

HostTensor filled(DType dtype, int64_t rows, int64_t cols, int64_t first) {
  HostTensor tensor(dtype, {rows, cols});
  for (int64_t i = 0; i < rows * cols; ++i)
    store_float(tensor.data(), dtype, i, value_at(first + i));
  return tensor;
}

// Returns at once. Gathers give every rank this one's contribution, which is a valid one.
class MuteCommunicator final : public Communicator {
 public:
  explicit MuteCommunicator(const Communicator& like) : rank_(like.rank()), size_(like.size()) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    for (size_t at = 0; at < all.size(); at += mine.size()) {
      std::memcpy(all.data() + at, mine.data(), mine.size());
    }
    return {};
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> /*values*/) override {
    return std::unique_ptr<PendingSum>(std::make_unique<NothingPending>());
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> /*values*/,
                                                               std::span<const int64_t> /*counts*/,
                                                               std::span<float> /*mine*/) override {
    return std::unique_ptr<PendingSum>(std::make_unique<NothingPending>());
  }

 private:
  int rank_;
  int size_;
};

// Passes everything on and notes what it was.
class NotingCommunicator final : public Communicator {
 public:
  explicit NotingCommunicator(Communicator& inner) : inner_(inner) {}
  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    gathers.push_back(mine.size());
    return inner_.all_gather(mine, all);
  }
  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    gathers.push_back(mine.size());
    return inner_.start_all_gather(mine, all);
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    sums.push_back(values.size());
    return inner_.start_all_reduce_sum(values);
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    return inner_.start_reduce_scatter_sum(values, counts, mine);  // this bench makes none
  }

  std::vector<size_t> gathers;  // bytes
  std::vector<size_t> sums;     // floats

 private:
  Communicator& inner_;
};

class RankBench {
 public:
  RankBench(Communicator& communicator, const Shape& shape, const RankBenchSettings& settings)
      : world_(communicator), shape_(shape), settings_(settings) {
    on_every_rank(world_, [&] { make_operands(); });
    plan();
    on_every_rank(world_, [&] { make_outputs(); });
  }

  RankBenchLine run() {
    NotingCommunicator noting(world_);
    step(noting);  // also the first touch of every page
    std::vector<float> values(noting.sums.empty() ? 0 : std::ranges::max(noting.sums));
    std::vector<std::byte> sent(noting.gathers.empty() ? 0 : std::ranges::max(noting.gathers));
    std::vector<std::byte> all(sent.size() * static_cast<size_t>(world_.size()));
    const auto communicate = [&] {
      for (const size_t bytes : noting.gathers) {
        take(world_.all_gather(std::span(sent).first(bytes),
                               std::span(all).first(bytes * static_cast<size_t>(world_.size()))));
      }
      for (const size_t floats : noting.sums) {
        auto started = world_.start_all_reduce_sum(std::span(values).first(floats));
        take(take(std::move(started))->wait());
      }
    };
    MuteCommunicator mute(world_);
    const auto compute = [&] { step(mute); };
    const auto whole = [&] { step(world_); };

    std::vector<double> steps = {seconds_of(whole)}, computing = {seconds_of(compute)},
                        communicating = {seconds_of(communicate)};
    // Rank 0 says how often, or ranks would part.
    const double once = slowest(steps[0] + computing[0] + communicating[0]);
    const int repeats =
        settings_.repeats > 0
            ? settings_.repeats
            : static_cast<int>(std::clamp(settings_.seconds / std::max(once, 1e-9), 5.0, 101.0));
    for (int i = 1; i < repeats; ++i) {
      steps.push_back(seconds_of(whole));
      computing.push_back(seconds_of(compute));
      communicating.push_back(seconds_of(communicate));
    }
    RankBenchLine line;
    line.shape = shape_;
    line.dtype = settings_.dtype;
    line.isa = plan_->isa();
    line.threads = plan_->threads();
    line.ranks = world_.size();
    line.strategy = plan_->strategy();
    line.chunk_tokens = plan_->chunk_tokens();
    line.cover = cover_;
    line.repeats = repeats;
    line.seconds = slowest(median(steps));
    line.computation_seconds = slowest(median(computing));
    line.communication_seconds = slowest(median(communicating));
    for (const size_t bytes : noting.gathers) line.gathered_bytes += static_cast<int64_t>(bytes);
    for (const size_t floats : noting.sums) line.summed_bytes += static_cast<int64_t>(4 * floats);
    line.workspace_bytes = plan_->workspace_bytes();
    return line;
  }

 private:
  RowRange rows() const { return cover_[static_cast<size_t>(world_.rank())]; }

  void make_operands() {
    cover_ = take(parse_split(settings_.split, shape_.V, world_.size()));
    if (shape_.V == 0 || shape_.BT == 0) fail("bench on ranks needs tokens and vocabulary rows");
    input_ = filled(settings_.dtype, shape_.BT, shape_.H, 0);
    weight_ = filled(settings_.dtype, rows().size(), shape_.H, (1 + rows().begin) * shape_.H);
    target_ = HostTensor(DType::i64, {shape_.BT});
    for (int64_t b = 0; b < shape_.BT; ++b) target_.as<int64_t>()[b] = b * 7919 % shape_.V;
  }

  void plan() {
    VocabParallelTypes types;
    types.operand = settings_.dtype;
    types.grad_input = types.grad_weight = GradientOutput{.dtype = settings_.dtype};
    types.chunk_tokens = settings_.chunk_tokens;
    types.strategy = settings_.strategy;
    PlanOptions options = settings_.run.plan_options();
    if (options.threads == 0) options.threads = threads_of_rank();
    auto planned = plan_vocab_parallel_linear_cross_entropy(world_, shape_, rows(), types, options);
    if (!planned) {  // on every rank
      throw Failure{.exit_code = kExitBadInput,
                    .message = world_.rank() == 0 ? planned.error().message : ""};
    }
    plan_ = std::move(planned).value();
  }

  void make_outputs() {
    loss_ = HostTensor(DType::f32, {shape_.BT});
    grad_input_ = HostTensor(settings_.dtype, {shape_.BT, shape_.H});
    grad_weight_ = HostTensor(settings_.dtype, {rows().size(), shape_.H});
    workspace_ = Buffer(plan_->workspace_bytes());
    prefer_huge_pages(workspace_.span());
  }

  void step(Communicator& communicator) {
    LossAndGradientOperands operands;
    operands.input = std::as_const(input_).matrix();
    operands.weight = std::as_const(weight_).matrix();
    operands.target = std::as_const(target_).vector();
    LossAndGradientOutputs outputs;
    outputs.loss = loss_.vector();
    outputs.grad_input = grad_input_.matrix();
    outputs.grad_weight = grad_weight_.matrix();
    take(logitless::run(*plan_, communicator, operands, outputs, workspace_.span(),
                        settings_.run.cancel));
  }

  // All ranks begin together.
  double seconds_of(const std::function<void()>& work) {
    take(share_status(world_, {}));
    const auto start = Clock::now();
    work();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  // The largest of all ranks' values, on every rank.
  double slowest(double mine) {
    std::vector<double> all(static_cast<size_t>(world_.size()));
    take(world_.all_gather(std::as_bytes(std::span(&mine, 1)),
                           std::as_writable_bytes(std::span(all))));
    return std::ranges::max(all);
  }

  Communicator& world_;
  Shape shape_;
  const RankBenchSettings& settings_;
  std::vector<RowRange> cover_;
  HostTensor input_, weight_, target_, loss_, grad_input_, grad_weight_;
  Buffer workspace_;
  std::optional<VocabParallelPlan> plan_;
};

}  // namespace

double RankBenchLine::hidden() const {
  if (ranks == 1 || communication_seconds <= 0) return 1;
  return std::clamp(1 - (seconds - computation_seconds) / communication_seconds, 0.0, 1.0);
}

RankBenchLine bench_ranks(Communicator& communicator, const Shape& shape,
                          const RankBenchSettings& settings) {
  return RankBench(communicator, shape, settings).run();
}

}  // namespace logitless::cli
