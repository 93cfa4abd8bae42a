// SPDX-License-Identifier: Apache-2.0
// logitless forward, loss and gradient under mpirun: the vocabulary of the case split over ranks.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/safetensors.h"
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

  class MeteredSum final : public PendingSum {
   public:
    MeteredSum(std::unique_ptr<PendingSum> sum, double& waited)
        : sum_(std::move(sum)), waited_(waited) {}
    Result<void> wait() override {
      const Waiting waiting(waited_);
      return sum_->wait();
    }

   private:
    std::unique_ptr<PendingSum> sum_;
    double& waited_;
  };

  Result<std::unique_ptr<PendingSum>> metered(Result<std::unique_ptr<PendingSum>> started) {
    if (!started) return started;
    return std::unique_ptr<PendingSum>(
        std::make_unique<MeteredSum>(std::move(started).value(), waited_seconds));
  }

  Communicator& inner_;
};

struct Outputs {
  HostTensor loss, logits_max, sum_exp_logits, predicted_logits;  // [BT] f32
  HostTensor grad_input;                                          // [BT, H]
  HostTensor grad_weight;                                         // this rank's rows
  double total = 0;
};

// Rows of every rank -> the whole matrix, on rank 0; in blocks, so that the other ranks need no
// more than a few of them. Collective.
HostTensor gather_rows(Communicator& communicator, const HostTensor& mine,
                       const std::vector<RowRange>& cover, int64_t V) {
  constexpr int64_t kBlockBytes = int64_t{4} << 20;
  const bool keeps = communicator.rank() == 0;
  const int64_t H = mine.shape()[1];
  const int64_t row_bytes = H * size_of(mine.dtype());
  HostTensor whole(mine.dtype(), {keeps ? V : 0, H});
  if (row_bytes == 0) return whole;
  int64_t longest = 0;
  for (const RowRange& rows : cover) longest = std::max(longest, rows.size());
  const int64_t block_rows = std::max<int64_t>(1, kBlockBytes / row_bytes);
  std::vector<std::byte> sent(static_cast<size_t>(block_rows * row_bytes));
  std::vector<std::byte> all(sent.size() * cover.size());
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

}  // namespace

int run_on_ranks(const RankRun& run_options) {
  const std::unique_ptr<Communicator> world = open_ranks();
  MeteredCommunicator communicator(*world);
  const bool speaks = world->rank() == 0;
  const bool with_gradient = run_options.gradient;
  const CancelToken& cancel = cancel_on_interrupt();
  Progress progress;
  const auto show = [&](const char* what) {
    if (speaks) progress.show(what);
  };

  show("reading the case");
  std::vector<RowRange> cover;
  Case c;
  PlanOptions options;
  DType grad_dtype = DType::f32;
  on_every_rank(*world, [&] {
    c = take(run_options.case_arguments->try_load([&](int64_t V) -> Result<RowRange> {
      auto split = parse_split(run_options.split, V, world->size());
      if (!split) return split.error();
      cover = std::move(split).value();
      return cover[static_cast<size_t>(world->rank())];
    }));
    if (c.grad_logsumexp) fail("ranks take no grad_logsumexp");
    options = run_options.settings.plan_options();
    if (options.threads == 0) options.threads = threads_of_rank();
    grad_dtype = run_options.grad_dtype.value_or(c.dtype());
    if (grad_dtype != c.dtype() && grad_dtype != DType::f32) {
      fail(fmt::format("--grad-dtype is {}, must be f32 or {}, the case's own type",
                       logitless::name_of(grad_dtype), logitless::name_of(c.dtype())));
    }
  });
  const RowRange rows = cover[static_cast<size_t>(world->rank())];
  const Shape shape{.BT = c.shape().BT, .V = c.file_rows, .H = c.shape().H};
  const int64_t first_id = c.vocab_start_index - rows.begin;  // of the whole vocabulary

  VocabParallelTypes types;
  types.operand = c.dtype();
  types.grad_input = types.grad_weight = {};
  if (with_gradient) types.grad_input = types.grad_weight = GradientOutput{.dtype = grad_dtype};
  types.chunk_tokens = run_options.chunk_tokens;
  const auto planned =
      plan_vocab_parallel_linear_cross_entropy(communicator, shape, rows, types, options);
  if (!planned) {  // on every rank
    throw Failure{.exit_code = kExitBadInput, .message = speaks ? planned.error().message : ""};
  }
  const VocabParallelPlan& plan = *planned;

  // As a step of the whole vocabulary, with ids relative to it.
  HostTensor target, counting;
  Outputs out;
  Buffer workspace;
  int64_t counted = 0;
  on_every_rank(*world, [&] {
    target = HostTensor(DType::i64, {shape.BT});
    counting = HostTensor(DType::u8, {shape.BT});
    for (int64_t b = 0; b < shape.BT; ++b) {
      const int64_t id = c.target.integer_at(b);
      if (c.counts(b) && (id < first_id || id >= first_id + shape.V)) {
        fail(fmt::format("target[{}] is {}, no rank has it: the case's vocabulary is [{}, {})", b,
                         id, first_id, first_id + shape.V));
      }
      counting.as<uint8_t>()[b] = c.counts(b) ? 1 : 0;
      target.as<int64_t>()[b] = c.counts(b) ? id - first_id : 0;
      counted += c.counts(b) ? 1 : 0;
    }
    for (HostTensor* vector :
         {&out.loss, &out.logits_max, &out.sum_exp_logits, &out.predicted_logits}) {
      *vector = HostTensor(DType::f32, {shape.BT});
    }
    if (with_gradient) {
      out.grad_input = HostTensor(grad_dtype, {shape.BT, shape.H});
      out.grad_weight = HostTensor(grad_dtype, {rows.size(), shape.H});
    }
    workspace = Buffer(plan.workspace_bytes());
  });
  LossAndGradientOperands operands;
  operands.input = std::as_const(c.input).matrix();
  operands.weight = std::as_const(c.weight).matrix();
  operands.target = std::as_const(target).vector();
  operands.rows.counts = std::as_const(counting).vector();
  operands.token_weights = std::as_const(c.grad).vector();
  LossAndGradientOutputs outputs;
  outputs.loss = out.loss.vector();
  outputs.total = &out.total;
  outputs.logits_max = out.logits_max.vector();
  outputs.sum_exp_logits = out.sum_exp_logits.vector();
  outputs.predicted_logits = out.predicted_logits.vector();
  if (with_gradient) {
    outputs.grad_input = out.grad_input.matrix();
    outputs.grad_weight = out.grad_weight.matrix();
  }
  show(with_gradient ? "loss and gradient" : "forward and loss");
  communicator.waited_seconds = 0;
  communicator.gathered_bytes = communicator.summed_bytes = 0;
  const auto start = Clock::now();
  const Result<void> ran = run(plan, communicator, operands, outputs, workspace.span(), &cancel);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (!ran) {
    throw Failure{
        .exit_code = ran.error().kind == ErrorKind::cancelled ? kExitCancelled : kExitBadInput,
        .message = speaks ? ran.error().message : ""};
  }

  if (!run_options.out.empty()) {
    show("writing");
    HostTensor grad_weight;
    if (with_gradient) grad_weight = gather_rows(*world, out.grad_weight, cover, shape.V);
    on_every_rank(*world, [&] {
      if (!speaks) return;
      std::vector<NamedTensor> tensors = {{"logits_max", &out.logits_max},
                                          {"sum_exp_logits", &out.sum_exp_logits},
                                          {"predicted_logits", &out.predicted_logits}};
      if (run_options.with_loss) tensors.push_back({"loss", &out.loss});
      if (with_gradient) {
        tensors.push_back({"grad_input", &out.grad_input});
        tensors.push_back({"grad_weight", &grad_weight});
      }
      std::map<std::string, std::string> metadata = case_metadata(first_id, shape.V);
      metadata["isa"] = logitless::name_of(plan.isa());
      metadata["ranks"] = fmt::format("{}", world->size());
      metadata["made_by"] = "logitless " LOGITLESS_VERSION;
      take(write_safetensors(run_options.out, tensors, metadata, &cancel));
    });
  }
  if (!speaks) return kExitFine;

  double sum = 0, largest = 0;
  int64_t n = 0;
  for (int64_t b = 0; b < shape.BT; ++b) {
    if (counting.as<uint8_t>()[b] == 0) continue;
    const double value = static_cast<double>(out.loss.as<float>()[b]);
    largest = n == 0 ? value : std::max(largest, value);
    sum += value;
    ++n;
  }
  const double mean = sum / static_cast<double>(std::max<int64_t>(n, 1));
  if (run_options.json) {
    ordered_json shards = ordered_json::array();
    for (const RowRange& shard : cover) shards.push_back({shard.begin, shard.end});
    ordered_json document = {{"case", c.source},
                             {"shape", to_json(shape)},
                             {"dtype", logitless::name_of(c.dtype())},
                             {"isa", logitless::name_of(plan.isa())},
                             {"threads", plan.threads()},
                             {"ranks", world->size()},
                             {"split", std::move(shards)},
                             {"tokens_counting", counted}};
    if (run_options.with_loss) {
      document["mean_loss"] = mean;
      document["largest_loss"] = largest;
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
             format_count(counted));
  std::string ends;
  for (const RowRange& shard : cover) {
    ends += fmt::format("{}{} to {}", ends.empty() ? "" : ", ", shard.begin, shard.end);
  }
  fmt::print("\nranks  {}, vocabulary rows {}\n", world->size(), ends);
  fmt::print("run    {}, {} thread{} each\n", logitless::name_of(plan.isa()), plan.threads(),
             plan.threads() == 1 ? "" : "s");
  if (run_options.with_loss) fmt::print("loss   mean {:.9g}, largest {:.9g}\n", mean, largest);
  fmt::print("time   {} on rank 0, of which {} waiting for other ranks; workspace {}\n",
             format_seconds(seconds), format_seconds(communicator.waited_seconds),
             format_bytes(plan.workspace_bytes()));
  fmt::print("sent   rank 0 gave {} to gathers and {} to sums\n",
             format_bytes(communicator.gathered_bytes), format_bytes(communicator.summed_bytes));
  if (!run_options.out.empty()) fmt::print("wrote  {}\n", run_options.out);
  return kExitFine;
}

}  // namespace logitless::cli
