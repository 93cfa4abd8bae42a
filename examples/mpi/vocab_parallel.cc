// SPDX-License-Identifier: Apache-2.0
// A training step of a head whose vocabulary is split over the ranks of an MPI job, each of which
// holds some rows of weight:
//
//   mpirun -n 3 example_vocab_parallel
//
// Loss and gradients agree with the same step on one rank, and the loss has the same bits on all.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "logitless/logitless.h"
#include "logitless/parallel/mpi_communicator.h"

using namespace logitless;

namespace {

constexpr int64_t BT = 200, V = 8009, H = 64;

// A workspace is 64-byte aligned; a vector of cache lines is.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};

template <typename T>
T take(Result<T> result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

struct Step {
  double mean = 0;
  RowRange rows;  // of the vocabulary: this rank's
  std::vector<float> loss = std::vector<float>(BT);
  std::vector<float> grad_input = std::vector<float>(BT * H);
  std::vector<float> grad_weight;  // [rows, H]
};

Step step(Communicator& ranks, const std::vector<float>& input, const std::vector<float>& weight,
          const std::vector<int64_t>& target) {
  Step out;
  const RowRange rows = take(balanced_shard(V, ranks.size(), ranks.rank()));  // or any cover
  const auto plan = take(plan_vocab_parallel_linear_cross_entropy(
      ranks, {.BT = BT, .V = V, .H = H}, rows,
      {.operand = DType::f32, .grad_input = {{DType::f32}}, .grad_weight = {{DType::f32}}}));
  std::vector<CacheLine> workspace(static_cast<size_t>(plan.workspace_bytes() / 64 + 1));
  out.rows = rows;
  out.grad_weight.resize(static_cast<size_t>(rows.size() * H));
  take(run(plan, ranks,
           {.input = matrix_view(input.data(), BT, H),  // all tokens, on every rank
            .weight = matrix_view(weight.data() + rows.begin * H, rows.size(), H),
            .target = vector_view(std::span(target)),
            .rows = {.ignore_index = -100}},
           {.loss = vector_view(std::span(out.loss)),
            .total = &out.mean,
            .grad_input = matrix_view(out.grad_input.data(), BT, H),  // summed over the ranks
            .grad_weight = matrix_view(out.grad_weight.data(), rows.size(), H)},
           std::as_writable_bytes(std::span(workspace))));
  return out;
}

float largest_difference(std::span<const float> a, std::span<const float> b) {
  float largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

std::vector<float> wave(int64_t count, float scale, float step) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(scale * std::sin(step * static_cast<float>(i)));
  }
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  bool fine = false;
  {
    const auto communicator = take(mpi_communicator(MPI_COMM_WORLD));
    Communicator& ranks = *communicator;
    const auto input = wave(BT * H, 0.8f, 0.37f);
    const auto weight = wave(V * H, 0.3f, 0.011f);  // a real program reads its own rows alone
    std::vector<int64_t> target(BT, -100);
    for (size_t b = 50; b < target.size(); ++b) target[b] = static_cast<int64_t>(40 * b);

    const Step split = step(ranks, input, weight, target);
    const auto alone = self_communicator();
    const Step whole = step(*alone, input, weight, target);
    const auto own_rows = std::span(whole.grad_weight)
                              .subspan(static_cast<size_t>(split.rows.begin * H),
                                       static_cast<size_t>(split.rows.size() * H));
    const double loss_error = std::abs(split.mean - whole.mean);
    const float input_error = largest_difference(split.grad_input, whole.grad_input);
    const float weight_error = largest_difference(split.grad_weight, own_rows);
    std::printf(
        "rank %d of %d, rows %lld to %lld: mean loss %.7f; apart from one rank's by %.1e, "
        "grad_input %.1e, grad_weight %.1e\n",
        ranks.rank(), ranks.size(), static_cast<long long>(split.rows.begin),
        static_cast<long long>(split.rows.end), split.mean, loss_error,
        static_cast<double>(input_error), static_cast<double>(weight_error));
    fine = loss_error < 1e-5 && input_error < 1e-6f && weight_error < 1e-6f;
  }
  MPI_Finalize();
  return fine ? 0 : 1;
}
