// SPDX-License-Identifier: Apache-2.0
// The tables of docs/scaling.md: what ranks send, counted; what plans ask of memory for up to 512
// ranks; and a model of time over links of given bandwidth.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "logitless/parallel/vocab_parallel.h"

namespace logitless::bench {
namespace {

// ---- ranks that are threads of this process -----------------------------------------------------

// Where every rank lays down what it sends.
struct Table {
  explicit Table(int ranks) : sent(static_cast<size_t>(ranks)), meeting(ranks) {}
  std::vector<std::span<const std::byte>> sent;
  std::barrier<> meeting;
};

// Counts what this rank gives to collectives.
class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(Table& table, int rank) : table_(table), rank_(rank) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(table_.sent.size()); }

  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    ++gathers;
    gathered_bytes += static_cast<int64_t>(mine.size());
    lay_down(mine);
    for (size_t r = 0; r < table_.sent.size() && !mine.empty(); ++r) {
      std::memcpy(all.data() + r * mine.size(), table_.sent[r].data(), mine.size());
    }
    table_.meeting.arrive_and_wait();
    return {};
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    ++sums;
    summed_bytes += static_cast<int64_t>(values.size_bytes());
    std::vector<float> total(values.size());
    add(values, 0, total);
    std::ranges::copy(total, values.begin());
    return std::unique_ptr<PendingSum>(std::make_unique<NothingPending>());
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    ++sums;
    summed_bytes += static_cast<int64_t>(values.size_bytes());
    int64_t first = 0;
    for (int r = 0; r < rank_; ++r) first += counts[static_cast<size_t>(r)];
    add(values, static_cast<size_t>(first), mine);
    return std::unique_ptr<PendingSum>(std::make_unique<NothingPending>());
  }

  int gathers = 0, sums = 0;
  int64_t gathered_bytes = 0, summed_bytes = 0;

 private:
  void lay_down(std::span<const std::byte> mine) {
    table_.sent[static_cast<size_t>(rank_)] = mine;
    table_.meeting.arrive_and_wait();
  }
  // Everyone's floats from `first` on, added in rank order.
  void add(std::span<const float> values, size_t first, std::span<float> total) {
    lay_down(std::as_bytes(values));
    std::ranges::fill(total, 0.0f);
    for (const auto& sent : table_.sent) {
      for (size_t i = 0; i < total.size(); ++i) {
        float value = 0;
        std::memcpy(&value, sent.data() + (first + i) * sizeof value, sizeof value);
        total[i] += value;
      }
    }
    table_.meeting.arrive_and_wait();
  }

  Table& table_;
  int rank_;
};

void run_ranks(int ranks, const std::function<void(CountingCommunicator&)>& body) {
  Table table(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      CountingCommunicator communicator(table, rank);
      body(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

[[noreturn]] void stop(const Error& error) {
  fmt::print(stderr, "scaling: {}\n", error.message);
  std::exit(1);
}
template <class T>
T take(Result<T> result) {
  if (!result) stop(result.error());
  return std::move(result).value();
}

// ---- bytes --------------------------------------------------------------------------------------

struct Sent {
  int gathers = 0, sums = 0;
  double gathered = 0, summed = 0;  // bytes of a rank and token
};

// One step without the agreement, whose 512 bytes do not grow.
Sent count_bytes(const Shape& shape, int ranks, Strategy strategy, TokenRows rows) {
  Sent sent;
  run_ranks(ranks, [&](CountingCommunicator& communicator) {
    const RowRange mine = take(balanced_shard(shape.V, ranks, communicator.rank()));
    const RowRange slice = take(balanced_shard(shape.BT, ranks, communicator.rank()));
    VocabParallelTypes types;
    types.grad_input_rows = rows;
    types.agree_in_run = false;
    types.strategy = strategy;
    const auto plan = take(
        plan_vocab_parallel_linear_cross_entropy(communicator, shape, mine, types, {.threads = 1}));
    const auto matrix = [](const std::vector<bfloat16>& values, int64_t n, int64_t H) {
      return matrix_view(values.data(), n, H);
    };
    std::vector<bfloat16> input(static_cast<size_t>(shape.BT * shape.H));
    std::vector<bfloat16> weight(static_cast<size_t>(mine.size() * shape.H));
    for (size_t i = 0; i < input.size(); ++i) input[i] = bfloat16(static_cast<float>(i % 7) - 3);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = bfloat16(static_cast<float>(i % 5) / 8);
    std::vector<int64_t> target(static_cast<size_t>(shape.BT));
    for (size_t b = 0; b < target.size(); ++b) target[b] = static_cast<int64_t>(b) % shape.V;
    const int64_t grad_rows = rows == TokenRows::all ? shape.BT : slice.size();
    std::vector<bfloat16> grad_input(static_cast<size_t>(grad_rows * shape.H));
    std::vector<bfloat16> grad_weight(weight.size());
    std::vector<float> loss(target.size());
    const auto bytes = static_cast<size_t>(plan.workspace_bytes());
    const std::unique_ptr<std::byte, decltype(&std::free)> workspace(
        static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), &std::free);
    LossAndGradientOperands operands;
    operands.input = matrix(input, shape.BT, shape.H);
    operands.weight = matrix(weight, mine.size(), shape.H);
    operands.target = vector_view<int64_t>(std::span<const int64_t>(target));
    LossAndGradientOutputs outputs;
    outputs.loss = vector_view<float>(std::span<float>(loss));
    outputs.grad_input = matrix_view(grad_input.data(), grad_rows, shape.H);
    outputs.grad_weight = matrix_view(grad_weight.data(), mine.size(), shape.H);
    communicator.gathers = communicator.sums = 0;
    communicator.gathered_bytes = communicator.summed_bytes = 0;
    if (auto ok = run(plan, communicator, operands, outputs, {workspace.get(), bytes}); !ok) {
      stop(ok.error());
    }
    if (communicator.rank() != 0) return;
    const auto tokens = static_cast<double>(shape.BT);
    sent = {communicator.gathers, communicator.sums,
            static_cast<double>(communicator.gathered_bytes) / tokens,
            static_cast<double>(communicator.summed_bytes) / tokens};
  });
  return sent;
}

void print_bytes() {
  const Shape shape{.BT = 2048, .V = 256, .H = 128};
  fmt::print("(BT {}, V {}, H {}), bf16\n\n", shape.BT, shape.V, shape.H);
  fmt::print(
      "| ranks | strategy | grad_input | gathers | given to gathers, bytes / token | the least | "
      "sums | given to sums, bytes / token | the least |\n|---|---|---|---|---|---|---|---|---|\n");
  for (const int ranks : {1, 2, 4, 8}) {
    for (const Strategy strategy : {Strategy::one_pass, Strategy::recompute}) {
      for (const TokenRows rows : {TokenRows::all, TokenRows::slice}) {
        const Sent sent = count_bytes(shape, ranks, strategy, rows);
        fmt::print("| {} | {} | {} | {} | {:.2f} | 12 | {} | {:.0f} | {} |\n", ranks,
                   strategy == Strategy::one_pass ? "one pass" : "recompute",
                   rows == TokenRows::all ? "all-reduced" : "reduce-scattered", sent.gathers,
                   sent.gathered, sent.sums, sent.summed, 4 * shape.H);
      }
    }
  }
}

// ---- memory -------------------------------------------------------------------------------------

constexpr int kRanks[] = {8, 16, 32, 64, 128, 256, 512};

struct Memory {
  int64_t chunk_tokens = 0;
  int64_t workspace = 0;
  bool one_pass = true;
};

Memory plan_memory(const Shape& shape, int ranks, Strategy strategy, DType grad_weight,
                   int threads) {
  Memory memory;
  run_ranks(ranks, [&](CountingCommunicator& communicator) {
    VocabParallelTypes types;
    types.grad_weight = GradientOutput{.dtype = grad_weight};
    types.strategy = strategy;
    const RowRange mine = take(balanced_shard(shape.V, ranks, communicator.rank()));
    const auto plan = take(plan_vocab_parallel_linear_cross_entropy(communicator, shape, mine,
                                                                    types, {.threads = threads}));
    if (communicator.rank() != 0) return;
    memory = {plan.chunk_tokens(), plan.workspace_bytes(), plan.strategy() == Strategy::one_pass};
  });
  return memory;
}

std::string gib(double bytes) { return fmt::format("{:.2f}", bytes / (1 << 30)); }

void print_memory(const Shape& shape, int threads) {
  fmt::print("GiB of a rank, (BT {}, V {}, H {}), bf16, {} threads\n\n", shape.BT, shape.V, shape.H,
             threads);
  fmt::print(
      "| ranks | weight and grad_weight | input and grad_input | block | one pass | one pass, fp32 "
      "grad_weight given | recompute | the same | full logits in fp32, for comparison |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  for (const int ranks : kRanks) {
    const double rows = std::ceil(static_cast<double>(shape.V) / ranks);
    const auto of = [&](Strategy strategy, DType grad_weight) {
      return plan_memory(shape, ranks, strategy, grad_weight, threads);
    };
    const auto text = [](const Memory& m) {
      return gib(static_cast<double>(m.workspace)) + (m.one_pass ? "" : " (recompute)");
    };
    const Memory one_pass = of(Strategy::automatic, DType::bf16);
    fmt::print("| {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", ranks,
               gib(4 * rows * static_cast<double>(shape.H)),
               gib(4 * static_cast<double>(shape.BT) * static_cast<double>(shape.H)),
               one_pass.chunk_tokens, text(one_pass), text(of(Strategy::automatic, DType::f32)),
               gib(static_cast<double>(of(Strategy::recompute, DType::bf16).workspace)),
               gib(static_cast<double>(of(Strategy::recompute, DType::f32).workspace)),
               gib(4 * rows * static_cast<double>(shape.BT)));
  }
}

// ---- time ---------------------------------------------------------------------------------------

struct Link {
  const char* name;
  double bytes_per_second;  // of a rank, each way
  double latency;           // seconds
};

constexpr Link kLinks[] = {{"10 Gbit/s Ethernet", 1.25e9, 30e-6},
                           {"25 Gbit/s Ethernet", 3.1e9, 20e-6},
                           {"100 Gbit/s InfiniBand", 12.5e9, 2e-6},
                           {"400 Gbit/s InfiniBand", 50e9, 2e-6},
                           {"NVLink 4, 450 GB/s", 450e9, 2e-6}};

// What a step is made of, in seconds; see docs/scaling.md for the formulas.
struct Step {
  double computing = 0, merging = 0, gathering = 0, summing = 0;
  double total = 0;
  double hidden() const {
    const double communicating = gathering + summing;
    const double waited = total - computing - merging;
    return communicating > 0 ? std::clamp(1 - waited / communicating, 0.0, 1.0) : 1;
  }
};

struct Model {
  Shape shape;
  double flops = 0;              // of a rank, of the step's products
  double merged_per_second = 0;  // tokens of one rank's statistics
  int products = 3;              // 4 in recompute
  bool scatters = false;
  double blocks = 4;

  Step step(int ranks, const Link& link) const {
    const double p = ranks;
    const auto BT = static_cast<double>(shape.BT);
    const auto H = static_cast<double>(shape.H);
    const auto V = static_cast<double>(shape.V);
    Step s;
    s.computing = products * 2 * BT * std::ceil(V / p) * H / flops;
    if (ranks == 1) {
      s.total = s.computing;
      return s;
    }
    s.merging = BT * p / merged_per_second;
    s.gathering =
        blocks * std::ceil(std::log2(p)) * link.latency + 12 * BT * (p - 1) / link.bytes_per_second;
    const double times = scatters ? 1 : 2;
    s.summing = times * (blocks * (p - 1) * link.latency +
                         (p - 1) / p * BT * H * 4 / link.bytes_per_second);
    // The first sum begins after two blocks' forwards and one's gradients, or, recomputed, after
    // everyone's forward and one's gradients; the last one has nothing to hide behind.
    const double work = s.computing + s.merging;
    const double first =
        work * std::min(1.0, products == 3 ? 4 / (3 * blocks) : 0.25 + 0.75 / blocks);
    const double last = s.summing / blocks;
    s.total = std::max(work + last, first + s.gathering + s.summing);
    return s;
  }
  // The most ranks whose communication is shorter than what they compute.
  int64_t hides_up_to(const Link& link) const {
    int64_t most = 1;
    for (int ranks = 2; ranks <= 4096; ++ranks) {
      const Step s = step(ranks, link);
      if (s.gathering + s.summing <= s.computing + s.merging) most = ranks;
    }
    return most;
  }
};

std::string ms(double seconds) {
  return seconds >= 10  ? fmt::format("{:.1f} s", seconds)
         : seconds >= 1 ? fmt::format("{:.2f} s", seconds)
                        : fmt::format("{:.3g} ms", 1e3 * seconds);
}

void print_time(const Model& model, const Link& link) {
  fmt::print("(BT {}, V {}, H {}), {} products, ranks of {:.3g} TFLOP/s, {}{}\n\n", model.shape.BT,
             model.shape.V, model.shape.H, model.products, model.flops / 1e12, link.name,
             model.scatters ? ", reduce-scattered" : "");
  fmt::print(
      "| ranks | computing | merging | gathering | summing | step | hidden | of ideal |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const int ranks : kRanks) {
    const Step s = model.step(ranks, link);
    const double alone = model.step(1, link).computing;
    fmt::print("| {} | {} | {} | {} | {} | {} | {:.0f} % | {:.2f} |\n", ranks, ms(s.computing),
               ms(s.merging), ms(s.gathering), ms(s.summing), ms(s.total), 100 * s.hidden(),
               alone / ranks / s.total);
  }
}

void print_limits(Model model) {
  fmt::print("The most ranks whose communication is shorter than what they compute, V {}, H {}\n\n",
             model.shape.V, model.shape.H);
  fmt::print("| link | ranks of | all-reduced | reduce-scattered |\n|---|---|---|---|\n");
  for (const Link& link : kLinks) {
    for (const double flops : {0.2e12, 5e12, 400e12}) {
      model.flops = flops;
      model.scatters = false;
      const int64_t reduced = model.hides_up_to(link);
      model.scatters = true;
      const auto text = [](int64_t ranks) {
        return ranks >= 4096 ? std::string("4096 and more") : fmt::format("{}", ranks);
      };
      fmt::print("| {} | {:.3g} TFLOP/s | {} | {} |\n", link.name, flops / 1e12, text(reduced),
                 text(model.hides_up_to(link)));
    }
  }
}

int run_program(int argc, char** argv) {
  CLI::App app("Tables of docs/scaling.md: bytes, memory, time", "scaling");
  std::vector<std::string> tables;
  Model model;
  model.shape = {.BT = 8192, .V = 256000, .H = 8192};
  std::vector<int64_t> shape;
  double tera_flops = 5, gigabits = 0, microseconds = 2, merged = 1e9;
  int threads = 64;
  app.add_option("tables", tables, "Any of bytes, memory, time, limits; default: all")
      ->check(CLI::IsMember({"bytes", "memory", "time", "limits"}));
  app.add_option("--shape", shape, "BT,V,H")->delimiter(',')->expected(3);
  app.add_option("--tera-flops", tera_flops, "Of a rank, of the products of a step");
  app.add_option("--merged", merged, "Tokens of one rank's statistics merged in a second");
  app.add_option("--threads", threads, "Of a rank, for its plan");
  app.add_option("--products", model.products, "3 in one pass, 4 recomputed");
  app.add_option("--blocks", model.blocks, "Of tokens, in a step");
  app.add_flag("--scatter", model.scatters, "grad_input is reduce-scattered");
  app.add_option("--gigabits", gigabits, "A link of one's own");
  app.add_option("--latency", microseconds, "Its latency in microseconds");
  CLI11_PARSE(app, argc, argv);
  if (!shape.empty()) model.shape = {.BT = shape[0], .V = shape[1], .H = shape[2]};
  model.flops = tera_flops * 1e12;
  model.merged_per_second = merged;
  const auto wanted = [&](const char* table) {
    return tables.empty() || std::ranges::find(tables, table) != tables.end();
  };
  const auto heading = [](const char* title) { fmt::print("\n## {}\n\n", title); };
  if (wanted("bytes")) {
    heading("Bytes");
    print_bytes();
  }
  if (wanted("memory")) {
    heading("Memory");
    print_memory(model.shape, threads);
  }
  if (wanted("time")) {
    heading("Time");
    const std::string own = fmt::format("{:.3g} Gbit/s", gigabits);
    print_time(model, gigabits > 0 ? Link{own.c_str(), gigabits * 1.25e8, microseconds * 1e-6}
                                   : kLinks[2]);
  }
  if (wanted("limits")) {
    heading("Limits");
    print_limits(model);
  }
  return 0;
}

}  // namespace
}  // namespace logitless::bench

int main(int argc, char** argv) { return logitless::bench::run_program(argc, argv); }
