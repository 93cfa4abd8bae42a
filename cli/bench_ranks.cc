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
#include "cli/synthetic.h"
#include "logitless/parallel/vocab_parallel.h"

namespace logitless::cli {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Passes everything on and notes what it was.
class NotingCommunicator final : public Communicator {
 public:
  explicit NotingCommunicator(Communicator& inner) : inner_(inner) {}
  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  // The blocking form does for start_all_gather, too: nobody takes the time of this.
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (auto ok = inner_.all_gather(mine, all); !ok) return ok;
    gathered.emplace_back(all.begin(), all.end());
    return {};
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

  std::vector<std::vector<std::byte>> gathered;  // of all ranks
  std::vector<size_t> sums;                      // floats

 private:
  Communicator& inner_;
};

// Returns at once: gathers what was gathered before, in the same step, and sums nothing.
class ReplayingCommunicator final : public Communicator {
 public:
  explicit ReplayingCommunicator(const NotingCommunicator& noted) : noted_(noted) {}
  int rank() const noexcept override { return noted_.rank(); }
  int size() const noexcept override { return noted_.size(); }
  Result<void> all_gather(std::span<const std::byte> /*mine*/, std::span<std::byte> all) override {
    if (next_ == noted_.gathered.size() || noted_.gathered[next_].size() != all.size()) {
      return Error{ErrorKind::communication, "bench: a step is not the one before it"};
    }
    std::ranges::copy(noted_.gathered[next_++], all.begin());
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
  const NotingCommunicator& noted_;
  size_t next_ = 0;
};

class RankBench {
 public:
  RankBench(Communicator& communicator, const Shape& shape, const RankBenchSettings& settings)
      : world_(communicator), shape_(shape), settings_(settings) {
    on_every_rank(world_, [&] { make_operands(); });
    plan_ = planned(true, settings.sparse);
    if (settings.sparse.tolerance > 0) {
      exact_ = planned(true, {});
      forward_ = planned(false, {});
    }
    on_every_rank(world_, [&] { make_outputs(); });
  }

  RankBenchLine run() {
    const bool sparse = settings_.sparse.tolerance > 0;
    NotingCommunicator noting(world_);
    step(*plan_, noting, settings_.sparse.seed);  // also the first touch of every page
    const SparseCounts counts = over_ranks(world_, sparse_counts_);
    size_t longest = 0;
    for (const auto& all : noting.gathered) longest = std::max(longest, all.size());
    std::vector<float> values;
    std::vector<std::byte> sent, received;
    on_every_rank(world_, [&] {
      values.resize(noting.sums.empty() ? 0 : std::ranges::max(noting.sums));
      sent.resize(longest / static_cast<size_t>(world_.size()));
      received.resize(longest);
    });
    uint64_t seed = settings_.sparse.seed;
    const std::function<void()> whole = [&] { step(*plan_, world_, seed++); };
    const std::function<void()> compute = [&] {
      ReplayingCommunicator replaying(noting);
      step(*plan_, replaying, settings_.sparse.seed);
    };
    const std::function<void()> communicate = [&] {
      for (const auto& all : noting.gathered) {
        take(world_.all_gather(
            std::span(sent).first(all.size() / static_cast<size_t>(world_.size())),
            std::span(received).first(all.size())));
      }
      for (const size_t floats : noting.sums) {
        auto started = world_.start_all_reduce_sum(std::span(values).first(floats));
        take(take(std::move(started))->wait());
      }
    };
    // By turns.
    struct Turn {
      std::function<void()> work;
      std::vector<double> seconds = {};
    };
    std::vector<Turn> turns = {{whole}, {compute}, {communicate}};
    if (sparse) {
      turns.push_back({[&] { step(*forward_, world_, 0); }});
      turns.push_back({[&] { step(*exact_, world_, 0); }});
    }
    double once = 0;
    for (Turn& turn : turns) {
      turn.work();  // touches pages that the step above did not
      turn.seconds.push_back(seconds_of(turn.work));
      once += turn.seconds[0];
    }
    // The same on every rank, or they would part.
    once = slowest(once);
    const int repeats =
        settings_.repeats > 0
            ? settings_.repeats
            : static_cast<int>(std::clamp(settings_.seconds / std::max(once, 1e-9), 5.0, 101.0));
    for (int i = 1; i < repeats; ++i) {
      for (Turn& turn : turns) turn.seconds.push_back(seconds_of(turn.work));
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
    line.seconds = slowest(median(turns[0].seconds));
    line.computation_seconds = slowest(median(turns[1].seconds));
    line.communication_seconds = slowest(median(turns[2].seconds));
    if (sparse) {
      line.sparse = settings_.sparse;
      line.sparse_counts = counts;
      line.forward_seconds = slowest(median(turns[3].seconds));
      line.exact_seconds = slowest(median(turns[4].seconds));
    }
    for (const auto& all : noting.gathered) {
      line.gathered_bytes += std::ssize(all) / world_.size();
    }
    for (const size_t floats : noting.sums) line.summed_bytes += static_cast<int64_t>(4 * floats);
    line.workspace_bytes = plan_->workspace_bytes();
    return line;
  }

 private:
  RowRange rows() const { return cover_[static_cast<size_t>(world_.rank())]; }

  void make_operands() {
    cover_ = take(parse_split(settings_.split, shape_.V, world_.size()));
    if (shape_.V == 0 || shape_.BT == 0) fail("bench on ranks needs tokens and vocabulary rows");
    SyntheticOptions synthetic;
    synthetic.tokens = shape_.BT;
    synthetic.vocab = shape_.V;
    synthetic.hidden = shape_.H;
    synthetic.dtype = settings_.dtype;
    synthetic.weight_rows = rows();
    case_ = take(make_synthetic(synthetic));
  }

  VocabParallelPlan planned(bool with_gradients, const SparseGradient& sparse) {
    VocabParallelTypes types;
    types.operand = settings_.dtype;
    types.grad_input = types.grad_weight = {};
    if (with_gradients) {
      types.grad_input = types.grad_weight = GradientOutput{.dtype = settings_.dtype};
      types.grad_tolerance = sparse.tolerance;
      types.strategy = settings_.strategy;
    }
    types.chunk_tokens = settings_.chunk_tokens;
    PlanOptions options = settings_.run.plan_options();
    if (options.threads == 0) options.threads = threads_of_rank();
    return take_on_ranks(
        world_, plan_vocab_parallel_linear_cross_entropy(world_, shape_, rows(), types, options));
  }

  void make_outputs() {
    loss_ = HostTensor(DType::f32, {shape_.BT});
    grad_input_ = HostTensor(settings_.dtype, {shape_.BT, shape_.H});
    grad_weight_ = HostTensor(settings_.dtype, {rows().size(), shape_.H});
    int64_t bytes = plan_->workspace_bytes();
    if (exact_) bytes = std::max(bytes, exact_->workspace_bytes());
    if (forward_) bytes = std::max(bytes, forward_->workspace_bytes());
    workspace_ = Buffer(bytes);
    prefer_huge_pages(workspace_.span());
  }

  // seed: of a sparse gradient.
  void step(const VocabParallelPlan& plan, Communicator& communicator, uint64_t seed) {
    LossAndGradientOperands operands;
    operands.input = std::as_const(case_.input).matrix();
    operands.weight = std::as_const(case_.weight).matrix();
    operands.target = std::as_const(case_.target).vector();
    operands.seed = seed;
    LossAndGradientOutputs outputs;
    outputs.loss = loss_.vector();
    if (plan.types().grad_input) {
      outputs.grad_input = grad_input_.matrix();
      outputs.grad_weight = grad_weight_.matrix();
    }
    if (plan.types().grad_tolerance > 0) outputs.sparse_counts = &sparse_counts_;
    take_on_ranks(world_, logitless::run(plan, communicator, operands, outputs, workspace_.span(),
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
  Case case_;  // with this rank's rows of weight
  HostTensor loss_, grad_input_, grad_weight_;
  SparseCounts sparse_counts_;  // of the last sparse step, of this rank's rows
  Buffer workspace_;
  std::optional<VocabParallelPlan> plan_;
  std::optional<VocabParallelPlan> exact_, forward_;  // beside a sparse one
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
