// SPDX-License-Identifier: Apache-2.0
// logitless forward, loss, gradient and verify under mpirun: the vocabulary of the case split over
// ranks.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <utility>

#include "cli/commands.h"
#include "cli/compare.h"
#include "cli/failure.h"
#include "cli/files.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/safetensors.h"
#include "cli/table.h"
#include "cli/units.h"
#include "logitless/parallel/vocab_parallel.h"
#include "logitless/version.h"

namespace logitless::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Counts what this rank sends, and how long it waits for the others.
class MeteredCommunicator final : public Communicator {
 public:
  explicit MeteredCommunicator(Communicator& inner) : inner_(inner) {}

  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    gathered_bytes += static_cast<int64_t>(mine.size());
    const Waiting waiting(waited_seconds);
    return inner_.all_gather(mine, all);
  }
  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    gathered_bytes += static_cast<int64_t>(mine.size());
    return metered(inner_.start_all_gather(mine, all));
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    summed_bytes += static_cast<int64_t>(values.size_bytes());
    return metered(inner_.start_all_reduce_sum(values));
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    summed_bytes += static_cast<int64_t>(values.size_bytes());
    return metered(inner_.start_reduce_scatter_sum(values, counts, mine));
  }

  double waited_seconds = 0;
  int64_t gathered_bytes = 0;  // contributions to gathers
  int64_t summed_bytes = 0;    // and to sums

 private:
  class Waiting {
   public:
    explicit Waiting(double& total) : total_(total), start_(Clock::now()) {}
    ~Waiting() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    double& total_;
    Clock::time_point start_;
  };

  class MeteredPending final : public Pending {
   public:
    MeteredPending(std::unique_ptr<Pending> inner, double& waited)
        : inner_(std::move(inner)), waited_(waited) {}
    Result<void> wait() override {
      const Waiting waiting(waited_);
      return inner_->wait();
    }

   private:
    std::unique_ptr<Pending> inner_;
    double& waited_;
  };

  Result<std::unique_ptr<Pending>> metered(Result<std::unique_ptr<Pending>> started) {
    if (!started) return started;
    return std::unique_ptr<Pending>(
        std::make_unique<MeteredPending>(std::move(started).value(), waited_seconds));
  }

  Communicator& inner_;
};

struct Outputs {
  HostTensor loss, logits_max, sum_exp_logits, predicted_logits;  // [BT] f32
  HostTensor grad_input;                                          // [BT, H]
  HostTensor grad_weight;                                         // this rank's rows
  double total = 0;
  SparseCounts sparse_counts;  // of a sparse gradient, this rank's rows
};

// Rows of every rank -> the whole matrix, on rank 0; in blocks, so that the other ranks need no
// more than a few of them. Collective.
HostTensor gather_rows(Communicator& communicator, const HostTensor& mine,
                       const std::vector<RowRange>& cover, int64_t V) {
  constexpr int64_t kBlockBytes = int64_t{4} << 20;
  const bool keeps = communicator.rank() == 0;
  const int64_t H = mine.shape()[1];
  const int64_t row_bytes = H * size_of(mine.dtype());
  int64_t longest = 0;
  for (const RowRange& rows : cover) longest = std::max(longest, rows.size());
  const int64_t block_rows = std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, row_bytes));
  HostTensor whole;
  std::vector<std::byte> sent, all;
  on_every_rank(communicator, [&] {
    whole = HostTensor(mine.dtype(), {keeps ? V : 0, H});
    sent.resize(static_cast<size_t>(block_rows * row_bytes));
    all.resize(sent.size() * cover.size());
  });
  if (row_bytes == 0) return whole;
  for (int64_t first = 0; first < longest; first += block_rows) {
    const auto rows_of = [&](const RowRange& rows) {
      return std::clamp<int64_t>(rows.size() - first, 0, block_rows);
    };
    const int64_t own = rows_of(cover[static_cast<size_t>(communicator.rank())]);
    if (own > 0) {
      std::memcpy(sent.data(), mine.data() + first * row_bytes,
                  static_cast<size_t>(own * row_bytes));
    }
    take(communicator.all_gather(sent, all));
    for (size_t r = 0; keeps && r < cover.size(); ++r) {
      const int64_t count = rows_of(cover[r]);
      if (count == 0) continue;
      std::memcpy(whole.data() + (cover[r].begin + first) * row_bytes, all.data() + r * sent.size(),
                  static_cast<size_t>(count * row_bytes));
    }
  }
  return whole;
}

// A case of which every rank has its rows of weight; as a step of the whole vocabulary, with ids
// relative to it.
struct RankCase {
  Case c;
  std::vector<RowRange> cover;
  RowRange rows;  // this rank's
  Shape shape;    // V of the whole vocabulary
  int64_t first_id = 0;
  DType grad_dtype = DType::f32;
  PlanOptions options;
  HostTensor target, counting;
  int64_t counted = 0;
};

// Collective, as all that follows.
RankCase load_on_ranks(Communicator& world, const RankRun& run_options) {
  RankCase r;
  on_every_rank(world, [&] {
    Case& c = r.c;
    c = take(run_options.case_arguments->try_load([&](int64_t V) -> Result<RowRange> {
      auto split = parse_split(run_options.split, V, world.size());
      if (!split) return split.error();
      r.cover = std::move(split).value();
      return r.cover[static_cast<size_t>(world.rank())];
    }));
    if (c.grad_logsumexp) fail("ranks take no grad_logsumexp");
    r.options = run_options.settings.plan_options();
    if (r.options.threads == 0) r.options.threads = threads_of_rank();
    r.grad_dtype = run_options.grad_dtype.value_or(c.dtype());
    if (r.grad_dtype != c.dtype() && r.grad_dtype != DType::f32) {
      fail(fmt::format("--grad-dtype is {}, must be f32 or {}, the case's own type",
                       logitless::name_of(r.grad_dtype), logitless::name_of(c.dtype())));
    }
    r.rows = r.cover[static_cast<size_t>(world.rank())];
    r.shape = {.BT = c.shape().BT, .V = c.file_rows, .H = c.shape().H};
    r.first_id = c.vocab_start_index - r.rows.begin;
    r.target = HostTensor(DType::i64, {r.shape.BT});
    r.counting = HostTensor(DType::u8, {r.shape.BT});
    for (int64_t b = 0; b < r.shape.BT; ++b) {
      const int64_t id = c.target.integer_at(b);
      if (c.counts(b) && (id < r.first_id || id >= r.first_id + r.shape.V)) {
        fail(fmt::format("target[{}] is {}, no rank has it: the case's vocabulary is [{}, {})", b,
                         id, r.first_id, r.first_id + r.shape.V));
      }
      r.counting.as<uint8_t>()[b] = c.counts(b) ? 1 : 0;
      r.target.as<int64_t>()[b] = c.counts(b) ? id - r.first_id : 0;
      r.counted += c.counts(b) ? 1 : 0;
    }
  });
  return r;
}

Result<VocabParallelPlan> plan_on_ranks(Communicator& communicator, const RankCase& r,
                                        const RankRun& run_options, Strategy strategy) {
  VocabParallelTypes types;
  types.operand = r.c.dtype();
  types.grad_input = types.grad_weight = {};
  if (run_options.gradient) {
    types.grad_input = types.grad_weight = GradientOutput{.dtype = r.grad_dtype};
    types.grad_tolerance = run_options.sparse.tolerance;
  }
  types.chunk_tokens = run_options.chunk_tokens;
  types.strategy = strategy;
  return plan_vocab_parallel_linear_cross_entropy(communicator, r.shape, r.rows, types, r.options);
}

// Statistics, loss, total and grad_input.
bool same_on_every_rank(Communicator& communicator, const Outputs& out) {
  uint64_t hash = std::bit_cast<uint64_t>(out.total);
  for (const HostTensor* tensor :
       {&out.loss, &out.logits_max, &out.sum_exp_logits, &out.predicted_logits, &out.grad_input}) {
    for (int64_t i = 0; i < tensor->bytes(); ++i) {
      hash = (hash ^ static_cast<uint64_t>(tensor->data()[i])) * 0x100000001b3u;  // FNV-1a
    }
  }
  std::vector<uint64_t> all(static_cast<size_t>(communicator.size()));
  take(communicator.all_gather(std::as_bytes(std::span(&hash, 1)),
                               std::as_writable_bytes(std::span(all))));
  return std::ranges::all_of(all, [&](uint64_t other) { return other == hash; });
}

struct Ran {
  Outputs out;
  double seconds = 0;
};

// seed: of a sparse gradient.
Ran run_plan(MeteredCommunicator& communicator, const RankCase& r, const VocabParallelPlan& plan,
             uint64_t seed, Workspace& workspace, const CancelToken& cancel) {
  Ran ran;
  Outputs& out = ran.out;
  std::span<std::byte> scratch;
  const bool with_gradient = plan.types().grad_input.has_value();
  on_every_rank(communicator, [&] {
    for (HostTensor* vector :
         {&out.loss, &out.logits_max, &out.sum_exp_logits, &out.predicted_logits}) {
      *vector = HostTensor(DType::f32, {r.shape.BT});
    }
    if (with_gradient) {
      out.grad_input = HostTensor(r.grad_dtype, {r.shape.BT, r.shape.H});
      out.grad_weight = HostTensor(r.grad_dtype, {r.rows.size(), r.shape.H});
    }
    scratch = workspace.get(plan.workspace_bytes());
  });
  LossAndGradientOperands operands;
  operands.input = r.c.input.matrix();
  operands.weight = r.c.weight.matrix();
  operands.target = r.target.vector();
  operands.rows.counts = r.counting.vector();
  operands.token_weights = r.c.grad.vector();
  operands.seed = seed;
  LossAndGradientOutputs outputs;
  outputs.loss = out.loss.vector();
  outputs.total = &out.total;
  outputs.logits_max = out.logits_max.vector();
  outputs.sum_exp_logits = out.sum_exp_logits.vector();
  outputs.predicted_logits = out.predicted_logits.vector();
  if (with_gradient) {
    outputs.grad_input = out.grad_input.matrix();
    outputs.grad_weight = out.grad_weight.matrix();
    if (plan.types().grad_tolerance > 0) outputs.sparse_counts = &out.sparse_counts;
  }
  communicator.waited_seconds = 0;
  communicator.gathered_bytes = communicator.summed_bytes = 0;
  const auto start = Clock::now();
  const Result<void> result = run(plan, communicator, operands, outputs, scratch, &cancel);
  ran.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  take_on_ranks(communicator, result);
  return ran;
}

// Rank 0 alone has judged; what it says, on every rank.
int exit_code_of_rank_0(Communicator& world, bool fine) {
  const double verdict = fine ? 1 : 0;
  std::vector<double> verdicts(static_cast<size_t>(world.size()));
  take(world.all_gather(std::as_bytes(std::span(&verdict, 1)),
                        std::as_writable_bytes(std::span(verdicts))));
  return verdicts[0] == 1 ? kExitFine : kExitVerificationFailed;
}

// Steps that rank 0 asks for and the other ranks take part in.
class OrderedSteps {
 public:
  // Collective; fails where a sparse step is impossible.
  OrderedSteps(MeteredCommunicator& communicator, RankCase& r, const RankRun& run_options,
               const CancelToken& cancel)
      : world_(communicator), case_(r), cancel_(cancel) {
    sparse_ = take_on_ranks(world_, plan_on_ranks(world_, r, run_options, Strategy::automatic));
    RankRun exact_run = run_options;
    exact_run.sparse = {};
    auto exact = plan_on_ranks(world_, r, exact_run, Strategy::automatic);
    if (exact || exact.error().kind != ErrorKind::limit_too_small) {
      exact_ = take_on_ranks(world_, std::move(exact));
    }
    on_every_rank(world_, [&] {
      sent_.resize(sizeof(Order) + static_cast<size_t>(r.c.grad.bytes()));
      received_.resize(sent_.size() * static_cast<size_t>(world_.size()));
    });
  }

  // Collective. Rank 0 does `work`, which may ask for steps; what fails is every rank's failure.
  void run(const std::function<void()>& work) {
    std::exception_ptr failed;
    try {
      if (world_.rank() == 0) {
        work();
      } else {
        while (take_order().step != 0) do_step();
      }
    } catch (...) {
      if (together_) throw;  // on every rank
      failed = std::current_exception();
    }
    if (world_.rank() == 0) {
      order_ = {.step = 0, .seed = 0, .tolerance = 0};
      send();
    }
    on_every_rank(world_, [&] {
      if (failed) std::rethrow_exception(failed);
    });
  }

  // On rank 0, within run(): as MakeStep.
  std::optional<StepResult> step(const Case& c, const SparseGradient& sparse) {
    if (sparse.tolerance == 0 && !exact_) return {};
    std::memcpy(case_.c.grad.data(), c.grad.data(), static_cast<size_t>(c.grad.bytes()));
    order_ = {.step = 1, .seed = sparse.seed, .tolerance = sparse.tolerance};
    send();
    return do_step();
  }

  const VocabParallelPlan& sparse_plan() const { return *sparse_; }
  bool same_on_every_rank() const { return same_; }  // in all steps so far

 private:
  struct Order {
    int64_t step = 0;  // 0: that was all
    uint64_t seed = 0;
    double tolerance = 0;
  };

  // Everyone gets what rank 0 has put into order_ and the case's grad.
  void send() {
    std::memcpy(sent_.data(), &order_, sizeof order_);
    std::memcpy(sent_.data() + sizeof order_, case_.c.grad.data(),
                static_cast<size_t>(case_.c.grad.bytes()));
    take(world_.all_gather(sent_, received_));
  }
  const Order& take_order() {
    send();
    std::memcpy(&order_, received_.data(), sizeof order_);
    std::memcpy(case_.c.grad.data(), received_.data() + sizeof order_,
                static_cast<size_t>(case_.c.grad.bytes()));
    return order_;
  }

  // Collective. Of the gradients rank 0 has all, the others nothing.
  StepResult do_step() {
    together_ = true;
    const VocabParallelPlan& plan = order_.tolerance > 0 ? *sparse_ : *exact_;
    Ran ran = run_plan(world_, case_, plan, order_.seed, workspace_, cancel_);
    same_ = cli::same_on_every_rank(world_, ran.out) && same_;
    StepResult result;
    result.grad_weight = gather_rows(world_, ran.out.grad_weight, case_.cover, case_.shape.V);
    result.sparse_counts = over_ranks(world_, ran.out.sparse_counts);
    result.logits_max = std::move(ran.out.logits_max);
    result.sum_exp_logits = std::move(ran.out.sum_exp_logits);
    result.predicted_logits = std::move(ran.out.predicted_logits);
    result.loss = std::move(ran.out.loss);
    result.total = ran.out.total;
    result.grad_input = std::move(ran.out.grad_input);
    together_ = false;
    return result;
  }

  MeteredCommunicator& world_;
  RankCase& case_;
  const CancelToken& cancel_;
  std::optional<VocabParallelPlan> sparse_, exact_;
  Workspace workspace_;
  Order order_;
  std::vector<std::byte> sent_, received_;
  bool together_ = false;  // in a step: what fails there fails on every rank
  bool same_ = true;
};

}  // namespace

int run_on_ranks(const RankRun& run_options) {
  Communicator& world = open_ranks();
  MeteredCommunicator communicator(world);
  const bool speaks = world.rank() == 0;
  const bool with_gradient = run_options.gradient;
  const CancelToken& cancel = cancel_on_interrupt();
  Progress progress;
  const auto show = [&](const char* what) {
    if (speaks) progress.show(what);
  };

  on_every_rank(world, [&] {
    if (!speaks || run_options.out.empty()) return;
    take(check_output(run_options.out, run_options.case_arguments->paths));
  });
  show("reading the case");
  const RankCase r = load_on_ranks(world, run_options);
  const VocabParallelPlan plan =
      take_on_ranks(world, plan_on_ranks(communicator, r, run_options, run_options.strategy));
  show(with_gradient ? "loss and gradient" : "forward and loss");
  Workspace workspace;
  const Ran ran = run_plan(communicator, r, plan, run_options.sparse.seed, workspace, cancel);
  const Outputs& out = ran.out;
  const double seconds = ran.seconds;
  const Case& c = r.c;
  const std::vector<RowRange>& cover = r.cover;
  const Shape& shape = r.shape;
  const bool sparse = with_gradient && run_options.sparse.tolerance > 0;
  const SparseCounts counts = over_ranks(world, out.sparse_counts);

  if (!run_options.out.empty()) {
    show("writing");
    HostTensor grad_weight;
    if (with_gradient) grad_weight = gather_rows(world, out.grad_weight, cover, shape.V);
    on_every_rank(world, [&] {
      if (!speaks) return;
      std::vector<NamedTensor> tensors = {{"logits_max", &out.logits_max},
                                          {"sum_exp_logits", &out.sum_exp_logits},
                                          {"predicted_logits", &out.predicted_logits}};
      if (run_options.with_loss) tensors.push_back({"loss", &out.loss});
      if (with_gradient) {
        tensors.push_back({"grad_input", &out.grad_input});
        tensors.push_back({"grad_weight", &grad_weight});
      }
      std::map<std::string, std::string> metadata = case_metadata(r.first_id, shape.V);
      metadata["isa"] = logitless::name_of(plan.isa());
      metadata["ranks"] = fmt::format("{}", world.size());
      if (with_gradient) metadata["strategy"] = name_of(plan.strategy());
      if (sparse) {
        metadata["grad_tolerance"] = format_tolerance(run_options.sparse.tolerance);
        metadata["seed"] = fmt::format("{}", run_options.sparse.seed);
      }
      metadata["made_by"] = "logitless " LOGITLESS_VERSION;
      take(write_safetensors(run_options.out, tensors, metadata, &cancel));
    });
  }
  if (!speaks) return kExitFine;

  double sum = 0, largest = 0;
  int64_t n = 0;
  for (int64_t b = 0; b < shape.BT; ++b) {
    if (r.counting.as<uint8_t>()[b] == 0) continue;
    const double value = static_cast<double>(out.loss.as<float>()[b]);
    largest = n == 0 ? value : std::max(largest, value);
    sum += value;
    ++n;
  }
  const double mean = sum / static_cast<double>(std::max<int64_t>(n, 1));
  if (run_options.json) {
    ordered_json document = {{"case", c.source},
                             {"shape", to_json(shape)},
                             {"dtype", logitless::name_of(c.dtype())},
                             {"isa", logitless::name_of(plan.isa())},
                             {"threads", plan.threads()},
                             {"ranks", world.size()},
                             {"split", to_json(cover)},
                             {"tokens_counting", r.counted}};
    if (run_options.with_loss) {
      document["mean_loss"] = mean;
      document["largest_loss"] = largest;
    }
    if (with_gradient) document["strategy"] = name_of(plan.strategy());
    if (sparse) {
      document["grad_tolerance"] = run_options.sparse.tolerance;
      document["seed"] = run_options.sparse.seed;
      document["rows"] = counts.rows;
      document["dense_rows"] = counts.dense_rows;
      document["kept"] = counts.kept;
      document["elements"] = counts.elements;
    }
    document["seconds"] = seconds;
    document["waited_seconds"] = communicator.waited_seconds;
    document["gathered_bytes"] = communicator.gathered_bytes;
    document["summed_bytes"] = communicator.summed_bytes;
    document["workspace_bytes"] = plan.workspace_bytes();
    if (!run_options.out.empty()) document["out"] = run_options.out;
    print_json(document);
    return kExitFine;
  }
  fmt::print("case   {} {}, {} tokens count", format_shape(shape), logitless::name_of(c.dtype()),
             format_count(r.counted));
  std::string ends;
  for (const RowRange& shard : cover) {
    ends += fmt::format("{}{} to {}", ends.empty() ? "" : ", ", shard.begin, shard.end);
  }
  fmt::print("\nranks  {}, vocabulary rows {}\n", world.size(), ends);
  std::string how;
  if (sparse) {
    how = fmt::format(", sparse gradient, grad_tolerance {}, seed {}",
                      format_tolerance(run_options.sparse.tolerance), run_options.sparse.seed);
  } else if (with_gradient) {
    how = plan.strategy() == Strategy::one_pass ? ", one pass" : ", logits recomputed";
  }
  fmt::print("run    {}, {} thread{} each{}\n", logitless::name_of(plan.isa()), plan.threads(),
             plan.threads() == 1 ? "" : "s", how);
  if (run_options.with_loss) fmt::print("loss   mean {:.9g}, largest {:.9g}\n", mean, largest);
  if (sparse) print_kept(counts);
  fmt::print("time   {} on rank 0, of which {} waiting for other ranks; workspace {}\n",
             format_seconds(seconds), format_seconds(communicator.waited_seconds),
             format_bytes(plan.workspace_bytes()));
  fmt::print("sent   rank 0 gave {} to gathers and {} to sums\n",
             format_bytes(communicator.gathered_bytes), format_bytes(communicator.summed_bytes));
  if (!run_options.out.empty()) fmt::print("wrote  {}\n", run_options.out);
  return kExitFine;
}

int verify_on_ranks(const RankRun& run_options, bool full) {
  Communicator& world = open_ranks();
  MeteredCommunicator communicator(world);
  const bool speaks = world.rank() == 0;
  const CancelToken& cancel = cancel_on_interrupt();
  Progress progress;
  const auto show = [&](const std::string& what) {
    if (speaks) progress.show(what);
  };
  show("reading the case");
  const RankCase r = load_on_ranks(world, run_options);

  Judgements judgements;
  CompareReport report;
  std::string left_out;  // a strategy that the limit left no room for
  Isa isa = Isa::scalar;
  int threads = 0;
  std::vector<int64_t> chunks;
  Workspace workspace;
  for (const Strategy strategy : {Strategy::one_pass, Strategy::recompute}) {
    const std::string name = strategy == Strategy::one_pass ? "one pass" : "recomputed";
    show(name);
    const auto plan = plan_on_ranks(communicator, r, run_options, strategy);
    if (!plan && plan.error().kind == ErrorKind::limit_too_small && left_out.empty()) {
      left_out = name;
      continue;
    }
    take_on_ranks(world, plan ? Result<void>() : Result<void>(plan.error()));
    isa = plan->isa();
    threads = plan->threads();
    chunks.push_back(plan->chunk_tokens());
    Ran ran = run_plan(communicator, r, *plan, 0, workspace, cancel);
    const bool same_everywhere = same_on_every_rank(world, ran.out);
    ForeignOutputs outputs;
    outputs["grad_weight"] = gather_rows(world, ran.out.grad_weight, r.cover, r.shape.V);
    on_every_rank(world, [&] {
      if (!speaks) return;
      outputs["loss"] = std::move(ran.out.loss);
      outputs["logits_max"] = std::move(ran.out.logits_max);
      outputs["sum_exp_logits"] = std::move(ran.out.sum_exp_logits);
      outputs["predicted_logits"] = std::move(ran.out.predicted_logits);
      outputs["grad_input"] = std::move(ran.out.grad_input);
      const Case whole = run_options.case_arguments->load();
      CompareOptions options;
      options.full = full;
      options.progress = show;
      if (strategy == Strategy::one_pass) options.held_softmax = held_softmax_type(whole.dtype());
      report = compare_outputs(whole, outputs, options);
      for (Judgement& judgement : report.judgements) {
        judgement.stage = name + ", " + judgement.stage;
        judgements.push_back(judgement);
      }
      ElementJudge same(name, "the same bits on every rank");
      same.add(same_everywhere ? 1 : 0, 1, 0, 0);
      judgements.push_back(same.verdict());
    });
  }
  const bool fine = std::ranges::all_of(judgements, [](const auto& j) { return j.fine(); });
  const int code = exit_code_of_rank_0(world, fine);
  if (!speaks) return code;
  const Sample& sample = report.sample;
  if (run_options.json) {
    print_json({{"case", r.c.source},
                {"shape", to_json(r.shape)},
                {"dtype", logitless::name_of(r.c.dtype())},
                {"isa", logitless::name_of(isa)},
                {"threads", threads},
                {"ranks", world.size()},
                {"split", to_json(r.cover)},
                {"chunk_tokens", chunks},
                {"complete", sample.complete},
                {"tokens_checked", sample.tokens.size()},
                {"vocabulary_rows_checked", sample.vocabulary.size()},
                {"one_pass_fits", left_out != "one pass"},
                {"recomputing_fits", left_out != "recomputed"},
                {"mean_loss", report.mean_loss.value_or(0)},
                {"mean_loss_float64", report.mean_loss_float64.value_or(0)},
                {"judgements", to_json(judgements)},
                {"fine", fine}});
    return code;
  }
  fmt::print("{} {}, {}, {} ranks of {} thread{}\n", format_shape(r.shape),
             logitless::name_of(r.c.dtype()), logitless::name_of(isa), world.size(), threads,
             threads == 1 ? "" : "s");
  if (!sample.complete) {
    fmt::print(
        "checked against float64: {} of {} tokens, {} of {} vocabulary rows (--full checks "
        "all)\n",
        format_count(static_cast<int64_t>(sample.tokens.size())), format_count(r.shape.BT),
        format_count(static_cast<int64_t>(sample.vocabulary.size())), format_count(r.shape.V));
  } else {
    fmt::print("all tokens and vocabulary rows are checked against float64\n");
  }
  if (!left_out.empty()) {
    fmt::print("{} does not fit the workspace limit: not verified\n", left_out);
  }
  fmt::print("\n");
  print_judgements(judgements);
  fmt::print("\nmean loss {:.9g}, float64 {:.9g}\n", report.mean_loss.value_or(0),
             report.mean_loss_float64.value_or(0));
  fmt::print("{} {}\n", fine ? marks().good : marks().bad,
             fine ? "every error is within what is allowed"
                  : "verification failed: an error is beyond what is allowed");
  return code;
}

int verify_sparse_on_ranks(const RankRun& run_options, int seeds, bool full) {
  Communicator& world = open_ranks();
  MeteredCommunicator communicator(world);
  const CancelToken& cancel = cancel_on_interrupt();
  Progress progress;
  const auto show = [&](const std::string& what) {
    if (world.rank() == 0) progress.show(what);
  };
  show("reading the case");
  RankRun fp32 = run_options;
  fp32.grad_dtype = DType::f32;
  RankCase r = load_on_ranks(world, fp32);
  OrderedSteps steps(communicator, r, fp32, cancel);
  SparseVerifyReport report;
  steps.run([&] {
    Case whole = fp32.case_arguments->load();
    SparseVerifyOptions options;
    options.sparse = fp32.sparse;
    options.seeds = seeds;
    options.full = full;
    options.run = fp32.settings;
    options.run.threads = steps.sparse_plan().threads();
    options.make_step = [&](const Case& c, const SparseGradient& sparse) {
      return steps.step(c, sparse);
    };
    options.progress = show;
    report = verify_sparse(whole, options);
    report.isa = steps.sparse_plan().isa();
    report.threads = steps.sparse_plan().threads();
    report.workspace_bytes = steps.sparse_plan().workspace_bytes();
    ElementJudge same("every step", "the same bits on every rank");
    same.add(steps.same_on_every_rank() ? 1 : 0, 1, 0, -1);
    report.judgements.push_back(same.verdict());
  });
  const int code = exit_code_of_rank_0(world, report.fine());
  if (world.rank() != 0) return code;
  return print_sparse_verification(report, r.c, fp32.sparse, run_options.json, r.cover);
}

}  // namespace logitless::cli
