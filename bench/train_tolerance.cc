// SPDX-License-Identifier: Apache-2.0
// What a gradient that is sparse, or dropped in part, does to a training: the language model of
// examples/train_lm for the same steps and seeds, with gradients of several kinds. As JSON, which
// bench/train_tolerance_plot.py draws, and as a table.
//
//   train_tolerance --json curves.json TEXT...
#include <fmt/format.h>
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cli/failure.h"
#include "cli/files.h"
#include "cli/host_tensor.h"
#include "examples/train_lm/trainer.h"
#include "logitless/logitless.h"
#include "logitless/parallel/communicator.h"

namespace logitless::bench {
namespace {

using train_lm::Options;
using train_lm::Trainer;

constexpr const char* kSchema = "logitless-train-tolerance-1";

// What is left out of grad_logits = softmax - onehot, before it is multiplied by the token's
// weight.
enum class Dropped { nothing, elements, tiles };

constexpr float kThreshold = 0x1p-12f;
constexpr int64_t kTileTokens = 128;
constexpr int64_t kTileVocab = 128;

// A head that keeps all logits, and leaves out of its gradients what is below kThreshold:
//
//   elements  each element by itself
//   tiles     by the rule of Cut Cross-Entropy (arXiv:2411.09009): a tile of tokens and of the
//             vocabulary, sorted by falling mean logit, where all of its elements are
//
// The operators are the library's: what is left out is written into the softmax that they are
// given.
class DroppingHead {
 public:
  DroppingHead(const Shape& shape, Dropped dropped)
      : shape_(shape),
        dropped_(dropped),
        forward_(cli::take(plan_forward(
            shape, {.operand = DType::f32, .multiply = DType::bf16, .logits = DType::f32}))),
        loss_plan_(
            cli::take(plan_loss(shape.BT, shape.V, LossTypes{.softmax_logits = DType::f32}))),
        gradient_(
            cli::take(plan_gradient(shape, {.operand = DType::f32,
                                            .multiply = DType::bf16,
                                            .mode = GradientMode::high_performance,
                                            .grad_input = GradientOutput{.dtype = DType::f32},
                                            .grad_weight = GradientOutput{.dtype = DType::f32}}))),
        workspace_(std::max(forward_.workspace_bytes(), gradient_.workspace_bytes())),
        softmax_(static_cast<size_t>(shape.BT * shape.V)) {
    for (auto* values : {&max_, &sum_, &predicted_, &loss_, &grad_}) {
      values->resize(static_cast<size_t>(shape.BT));
    }
  }

  Result<double> run(const float* input, const float* weight, const std::vector<int64_t>& target,
                     double normalizer, float* grad_input, float* grad_weight) {
    const ConstMatrixView input_view = matrix_view(input, shape_.BT, shape_.H);
    const ConstMatrixView weight_view = matrix_view(weight, shape_.V, shape_.H);
    const VectorView max = vector_view(std::span(max_)), sum = vector_view(std::span(sum_)),
                     predicted = vector_view(std::span(predicted_));
    const MatrixView softmax = matrix_view(softmax_.data(), shape_.BT, shape_.V);
    auto done = logitless::run(
        forward_,
        {.input = input_view, .weight = weight_view, .target = vector_view(std::span(target))},
        {.logits_max = max,
         .sum_exp_logits = sum,
         .predicted_logits = predicted,
         .logits = softmax},
        workspace_.span());
    if (!done) return done.error();
    done = logitless::run(loss_plan_,
                          {.logits_max = max,
                           .sum_exp_logits = sum,
                           .predicted_logits = predicted,
                           .logits = softmax},
                          {.loss = vector_view(std::span(loss_)), .softmax = softmax});
    if (!done) return done.error();
    drop(input, weight, target);
    std::ranges::fill(grad_, static_cast<float>(1 / normalizer));
    done = logitless::run(gradient_,
                          {.grad = vector_view(std::span(grad_)),
                           .input = input_view,
                           .weight = weight_view,
                           .masked_target = vector_view(std::span(target)),
                           .softmax = softmax},
                          {.grad_input = matrix_view(grad_input, shape_.BT, shape_.H),
                           .grad_weight = matrix_view(grad_weight, shape_.V, shape_.H)},
                          workspace_.span());
    if (!done) return done.error();
    return std::accumulate(loss_.begin(), loss_.end(), 0.0) / normalizer;
  }

  // Of the elements of all runs.
  double kept_share() const {
    return runs_ == 0
               ? 1
               : static_cast<double>(kept_) / static_cast<double>(runs_ * shape_.BT * shape_.V);
  }

 private:
  void drop(const float* input, const float* weight, const std::vector<int64_t>& target) {
    ++runs_;
    if (dropped_ == Dropped::nothing) {
      kept_ += shape_.BT * shape_.V;
      return;
    }
    if (dropped_ == Dropped::tiles) sort_vocabulary(input, weight);
    const int64_t tile_tokens = dropped_ == Dropped::tiles ? kTileTokens : 1;
    int64_t kept = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : kept)
    for (int64_t first = 0; first < shape_.BT; first += tile_tokens) {
      const int64_t last = std::min(first + tile_tokens, shape_.BT);
      if (dropped_ == Dropped::elements) {
        for (int64_t v = 0; v < shape_.V; ++v) {
          if (keep(first, v, target)) {
            ++kept;
          } else {
            drop_element(first, v, target);
          }
        }
        continue;
      }
      for (int64_t i = 0; i < shape_.V; i += kTileVocab) {
        const std::span<const int64_t> columns = std::span(order_).subspan(
            static_cast<size_t>(i), static_cast<size_t>(std::min(kTileVocab, shape_.V - i)));
        bool any = false;
        for (int64_t b = first; b < last && !any; ++b) {
          any = std::ranges::any_of(columns, [&](int64_t v) { return keep(b, v, target); });
        }
        if (any) {
          kept += (last - first) * std::ssize(columns);
          continue;
        }
        for (int64_t b = first; b < last; ++b) {
          for (const int64_t v : columns) drop_element(b, v, target);
        }
      }
    }
    kept_ += kept;
  }

  bool keep(int64_t b, int64_t v, const std::vector<int64_t>& target) const {
    const float p = softmax_[static_cast<size_t>(b * shape_.V + v)];
    return std::abs(target[static_cast<size_t>(b)] == v ? p - 1 : p) >= kThreshold;
  }
  // grad_logits becomes 0.
  void drop_element(int64_t b, int64_t v, const std::vector<int64_t>& target) {
    softmax_[static_cast<size_t>(b * shape_.V + v)] =
        target[static_cast<size_t>(b)] == v ? 1.0f : 0.0f;
  }

  // The mean over tokens of input . weight[v] is the mean of input times weight[v].
  void sort_vocabulary(const float* input, const float* weight) {
    std::vector<double> mean(static_cast<size_t>(shape_.H));
    for (int64_t b = 0; b < shape_.BT; ++b) {
      for (int64_t h = 0; h < shape_.H; ++h) {
        mean[static_cast<size_t>(h)] += static_cast<double>(input[b * shape_.H + h]);
      }
    }
    std::vector<double> logit(static_cast<size_t>(shape_.V));
    for (int64_t v = 0; v < shape_.V; ++v) {
      for (int64_t h = 0; h < shape_.H; ++h) {
        logit[static_cast<size_t>(v)] +=
            mean[static_cast<size_t>(h)] * static_cast<double>(weight[v * shape_.H + h]);
      }
    }
    order_.resize(static_cast<size_t>(shape_.V));
    std::iota(order_.begin(), order_.end(), int64_t{0});
    std::ranges::stable_sort(order_, std::greater<>(),
                             [&](int64_t v) { return logit[static_cast<size_t>(v)]; });
  }

  Shape shape_;
  Dropped dropped_;
  ForwardPlan forward_;
  LossPlan loss_plan_;
  GradientPlan gradient_;
  cli::Buffer workspace_;
  std::vector<float> softmax_;  // [BT, V]; the logits first
  std::vector<float> max_, sum_, predicted_, loss_, grad_;
  std::vector<int64_t> order_;
  int64_t runs_ = 0;
  int64_t kept_ = 0;
};

// One kind of gradient.
struct Method {
  const char* name;
  double grad_tolerance = 0;
  std::optional<Dropped> dropped = {};  // absent: the library's own head
};
constexpr Method kMethods[] = {
    {"exact", 0},
    {"exact, logits kept", 0, Dropped::nothing},
    {"eps = 2^-9", 0x1p-9},
    {"eps = 2^-7", 0x1p-7},
    {"dropped below 2^-12, element by element", 0, Dropped::elements},
    {"dropped below 2^-12, by tiles (CCE's rule)", 0, Dropped::tiles},
};

struct Run {
  const Method* method = nullptr;
  uint64_t seed = 0;
  std::vector<double> losses;
  std::vector<std::pair<int64_t, double>> held_out;
  double kept_share = 1;   // of the elements of grad_logits
  double dense_share = 0;  // of the rows: treated exactly, and not counted above
};

Run train(const Method& method, Options options, const train_lm::Text& text,
          int64_t held_out_every) {
  options.grad_tolerance = method.grad_tolerance;
  const auto alone = self_communicator();
  const auto trainer = train_lm::make_trainer(*alone, options, text, {0, text.V()}, 0);
  std::optional<DroppingHead> dropping;
  if (method.dropped) {
    dropping.emplace(Shape{.BT = options.batch, .V = text.V(), .H = options.hidden},
                     *method.dropped);
  }
  Run run;
  run.method = &method;
  run.seed = options.seed;
  SparseCounts counts;
  const CancelToken never;
  for (int64_t step = 1; step <= options.steps; ++step) {
    const double loss = cli::take(dropping ? trainer->step_with([&](auto... arguments) {
      return dropping->run(arguments...);
    })
                                           : trainer->step(never));
    const SparseCounts& of_step = trainer->sparse_counts();
    counts.rows += of_step.rows;
    counts.dense_rows += of_step.dense_rows;
    counts.kept += of_step.kept;
    counts.elements += of_step.elements;
    if (step % held_out_every == 0 || step == options.steps) {
      run.held_out.emplace_back(step, cli::take(trainer->held_out_loss(never)));
      fmt::print(stderr, "\r\033[K{}, seed {}: step {} of {}, loss {:.4f}, held out {:.4f}",
                 method.name, options.seed, step, options.steps, loss, run.held_out.back().second);
    }
  }
  fmt::print(stderr, "\n");
  run.losses = trainer->losses();
  if (dropping) run.kept_share = dropping->kept_share();
  if (method.grad_tolerance > 0) {
    run.kept_share = static_cast<double>(counts.kept) /
                     static_cast<double>(std::max<int64_t>(counts.elements, 1));
    run.dense_share = static_cast<double>(counts.dense_rows) /
                      static_cast<double>(std::max<int64_t>(counts.rows, 1));
  }
  return run;
}

void write_json(const std::string& path, const Options& options, const train_lm::Text& text,
                double unigram, const std::vector<Run>& runs) {
  auto options_map = to_map(options);
  for (const char* of_run : {"seed", "grad-tolerance"}) options_map.erase(of_run);
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Run& run : runs) {
    all.push_back({{"method", run.method->name},
                   {"seed", run.seed},
                   {"losses", run.losses},
                   {"held_out", run.held_out},
                   {"kept_share", run.kept_share},
                   {"dense_share", run.dense_share}});
  }
  const nlohmann::ordered_json document = {{"schema", kSchema},
                                           {"options", options_map},
                                           {"text", text.fingerprint()},
                                           {"V", text.V()},
                                           {"isa", name_of(cli::take(default_isa()))},
                                           {"unigram", unigram},
                                           {"runs", all}};
  const std::string json = document.dump(1) + "\n";
  cli::OutputFile file = cli::take(cli::OutputFile::create(path));
  cli::take(file.write(json.data(), json.size(), nullptr));
  cli::take(file.commit());
}

// Held-out losses at the end; how far from the exact run of the same seed, on average.
void print_table(const std::vector<uint64_t>& seeds, const std::vector<Run>& runs) {
  const auto of = [&](const Method& method, uint64_t seed) -> const Run& {
    return *std::ranges::find_if(
        runs, [&](const Run& run) { return run.method == &method && run.seed == seed; });
  };
  fmt::print("| gradient |");
  for (const uint64_t seed : seeds) fmt::print(" seed {} |", seed);
  fmt::print(" off the exact run of the same seed | elements kept | rows dense |\n|---|");
  for (size_t i = 0; i < seeds.size(); ++i) fmt::print("---|");
  fmt::print("---|---|---|\n");
  for (const Method& method : kMethods) {
    fmt::print("| {} |", method.name);
    std::string apart;
    double kept = 0, dense = 0;
    for (const uint64_t seed : seeds) {
      const Run& run = of(method, seed);
      fmt::print(" {:.4f} |", run.held_out.back().second);
      apart +=
          fmt::format("{}{:+.4f}", apart.empty() ? "" : ", ",
                      run.held_out.back().second - of(kMethods[0], seed).held_out.back().second);
      kept += run.kept_share / static_cast<double>(seeds.size());
      dense += run.dense_share / static_cast<double>(seeds.size());
    }
    fmt::print(" {} | {:.2f} % | {:.1f} % |\n", apart, 100 * kept, 100 * dense);
  }
}

int run_program(int argc, char** argv) {
  CLI::App app("Loss while training with gradients of several kinds", "train_tolerance");
  Options options;
  std::vector<std::string> texts;
  std::vector<uint64_t> seeds = {1, 2, 3};
  std::string json;
  int64_t held_out_every = 10;
  app.add_option("texts", texts, "Files of text, read one after the other")->required();
  app.add_option("--steps", options.steps, "Of each run")->capture_default_str();
  app.add_option("--seeds", seeds, "Of the runs of each kind")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--held-out-every", held_out_every, "Steps between held-out losses")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", json, "File for all losses");
  CLI11_PARSE(app, argc, argv);
  const train_lm::Text text = train_lm::read_text(texts);
  const train_lm::Split split = train_lm::split_text(text);
  train_lm::check(options, std::ssize(split.training));
  omp_set_num_threads(default_threads());
  std::vector<Run> runs;
  for (const uint64_t seed : seeds) {
    for (const Method& method : kMethods) {
      options.seed = seed;
      runs.push_back(train(method, options, text, held_out_every));
    }
  }
  if (!json.empty()) {
    write_json(json, options, text, train_lm::unigram_cross_entropy(text, split), runs);
  }
  print_table(seeds, runs);
  return 0;
}

}  // namespace
}  // namespace logitless::bench

int main(int argc, char** argv) {
  try {
    return logitless::bench::run_program(argc, argv);
  } catch (const logitless::cli::Failure& failure) {
    fmt::print(stderr, "train_tolerance: {}\n", failure.message);
    return failure.exit_code;
  }
}
