// SPDX-License-Identifier: Apache-2.0
// A training step of a head whose vocabulary is split over ranks.
//
//   agree       arguments checked, targets hashed: one verdict for all ranks
//
//   forward     statistics of this rank's rows for every token   -> block
//               all-gather of the blocks, merged in rank order   -> loss, total
//   backward    for each chunk of tokens
//                 gradient operator, whose grad_input rows of this chunk are partial sums
//                 start their sum over the ranks; finish the one before: round, write
//
// or, in one pass, for each block of tokens
//               forward of the block after it; start the all-gather of its statistics
//               finish this block's all-gather, merge
//               both gradients from the exponentials held; start the sum of grad_input's rows
//               finish the one before: round, write
//
// With a grad_tolerance the rows that are not flat come first (sparse_ranks.h), and one pass does
// the others.
//
// Collectives are called by the caller's thread, between the teams that compute.
#include "logitless/parallel/vocab_parallel.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "check.h"
#include "float_environment.h"
#include "forward_pass.h"
#include "gradient_pass.h"
#include "loss_row.h"
#include "one_pass.h"
#include "parallel/agreement.h"
#include "parallel/plan.h"
#include "parallel/rank_statistics.h"
#include "parallel/sparse_ranks.h"
#include "step_tokens.h"
#include "team.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

constexpr int64_t kRowsPerThread = 1024;  // fewer rows are not worth waking a thread

std::string real(int64_t bits) { return std::to_string(std::bit_cast<double>(bits)); }
std::string natural(int64_t bits) { return std::to_string(std::bit_cast<uint64_t>(bits)); }
std::string integer(int64_t value) { return std::to_string(value); }
std::string presence(int64_t value) { return value == 0 ? "none" : "one"; }

class VocabParallel {
 public:
  VocabParallel(const VocabParallelPlanData& plan, Communicator& communicator,
                const LossAndGradientOperands& in, const LossAndGradientOutputs& out,
                std::span<std::byte> workspace, const CancelToken* cancel,
                const MergedStatistics* given = nullptr)
      : p_(plan),
        comm_(communicator),
        in_(in),
        out_(out),
        ws_(workspace),
        cancel_(cancel),
        given_(given),
        tokens_(in, plan.shape.BT, plan.shape.V) {}

  Result<void> run() {
    if (auto ok = agree_on_arguments(); !ok) return ok;
    if (out_.sparse_counts != nullptr) *out_.sparse_counts = {};
    if (p_.input_is_sliced()) {
      if (auto ok = gather_input(); !ok) return ok;
    } else {
      input_ = in_.input;
    }
    if (p_.one_pass) return one_pass();
    if (given_ != nullptr) {
      take_statistics();
    } else {
      if (auto ok = forward(); !ok) return ok;
      write_losses();
    }
    return p_.gradients() ? backward() : Result<void>();
  }

 private:
  template <class T>
  T* region(int64_t offset) const {
    return reinterpret_cast<T*>(ws_.data() + offset);
  }
  VectorView vector(int64_t offset) const {
    return {ws_.data() + offset, DType::f32, p_.shape.BT, 1};
  }
  // Runs body(begin, end) on parts of n rows.
  template <class Body>
  void over_rows(int64_t n, int64_t rows_per_thread, const Body& body) const {
    const auto threads = static_cast<int>(
        std::min<int64_t>(p_.threads, ceil_div(std::max<int64_t>(n, 1), rows_per_thread)));
    run_team(threads, [&](const Team& team) {
      const Range mine = team.part(n);
      if (mine.size() > 0) body(mine.begin, mine.end);
    });
  }

  // ---- agreement --------------------------------------------------------------------------------

  Result<void> check_arguments() const {
    if (comm_.size() != p_.ranks || comm_.rank() != p_.rank) {
      return Error{ErrorKind::invalid_argument, "communicator: rank " + integer(comm_.rank()) +
                                                    " of " + integer(comm_.size()) +
                                                    " came, the plan was made for rank " +
                                                    integer(p_.rank) + " of " + integer(p_.ranks)};
    }
    if (given_ != nullptr && p_.one_pass && p_.types.grad_tolerance == 0) {
      return Error{ErrorKind::invalid_argument,
                   "plan: its strategy is one_pass, must be recompute for a backward apart"};
    }
    const Shape local{p_.shape.BT, p_.rows().size(), p_.shape.H};
    constexpr const char* kSlice = "this rank's slice of BT";
    StepRows rows{.input = local.BT, .grad_input = local.BT};
    if (p_.input_is_sliced()) {
      rows.input = p_.slice.size();
      rows.input_name = kSlice;
    }
    if (p_.scatters()) {
      rows.grad_input = p_.slice.size();
      rows.grad_input_name = kSlice;
    }
    return check_step(local, rows, p_.step, in_, out_, ws_, p_.workspace_bytes);
  }

  Result<void> agree_on_arguments() {
    Result<void> mine = check_arguments();
    const bool usable = static_cast<bool>(mine);  // views may be read, the workspace written
    if (usable) mine = tokens_.count();
    cancellable_ = cancel_ != nullptr;
    if (!p_.types.agree_in_run) return mine;
    Hash targets, filter, weights, ids;
    const bool sparse = p_.types.grad_tolerance > 0;
    const bool has_ids = sparse && in_.token_ids.has_value();
    for (int64_t b = 0; usable && b < p_.shape.BT; ++b) {
      targets.add(static_cast<uint64_t>(integer_at(in_.target, b)));
      if (in_.rows.counts) filter.add(byte_at(*in_.rows.counts, b) ? 1 : 0);
      if (in_.token_weights) weights.add(std::bit_cast<uint32_t>(f32_at(*in_.token_weights, b)));
      if (has_ids) ids.add(static_cast<uint64_t>(integer_at(*in_.token_ids, b)));
    }
    const Agreed fields[] = {
        {"plan", p_.id, nullptr},
        {"statistics", given_ != nullptr ? 1 : 0, presence},
        {"target", targets.value(), nullptr},
        {"ignore_index", in_.rows.ignore_index ? 1 : 0, presence},
        {"ignore_index", in_.rows.ignore_index.value_or(0), integer},
        {"counts", in_.rows.counts ? 1 : 0, presence},
        {"counts", filter.value(), nullptr},
        {"token_weights", in_.token_weights ? 1 : 0, presence},
        {"token_weights", weights.value(), nullptr},
        {"normalizer", in_.normalizer ? 1 : 0, presence},
        {"normalizer", std::bit_cast<int64_t>(in_.normalizer.value_or(0)), real},
        {"seed", std::bit_cast<int64_t>(sparse ? in_.seed : uint64_t{0}), natural},
        {"token_ids", has_ids ? 1 : 0, presence},
        {"token_ids", ids.value(), nullptr},
    };
    // Where the workspace cannot be used there is a message about it to send.
    const auto ranks = static_cast<size_t>(comm_.size());
    std::unique_ptr<Statement[]> apart;
    std::span<Statement> statements(region<Statement>(p_.statements), usable ? ranks : 0);
    if (!usable) {
      apart = std::make_unique<Statement[]>(ranks);
      statements = {apart.get(), ranks};
    }
    const int64_t own[] = {cancellable_ ? 1 : 0};
    if (auto ok = agree(comm_, mine, fields, own, statements); !ok) return ok;
    for (const Statement& s : statements) cancellable_ = cancellable_ || s.own[0] != 0;
    return {};
  }

  // ---- forward ----------------------------------------------------------------------------------

  Result<void> gather_input() {
    const int64_t bytes = p_.input_slice_bytes();
    const int64_t row_bytes = p_.input_row_bytes();
    auto* mine = region<std::byte>(p_.input_mine);
    auto* all = region<std::byte>(p_.input_all);
    over_rows(p_.slice.size(), kRowsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        if (in_.input.col_stride != 1) {
          gather(in_.input, b, 0, p_.shape.H, mine + b * row_bytes);
        } else if (row_bytes > 0) {
          std::memcpy(mine + b * row_bytes, at(in_.input, b, 0), static_cast<size_t>(row_bytes));
        }
      }
    });
    std::memset(mine + p_.slice.size() * row_bytes, 0,
                static_cast<size_t>(bytes - p_.slice.size() * row_bytes));
    if (auto ok = comm_.all_gather({mine, static_cast<size_t>(bytes)},
                                   {all, static_cast<size_t>(p_.ranks * bytes)});
        !ok) {
      return ok;
    }
    // Slices were sent at the length of the longest; rows close up.
    for (int64_t r = 1; r < p_.ranks; ++r) {
      const RowRange slice = p_.slice_of(r);
      std::memmove(all + slice.begin * row_bytes, all + r * bytes,
                   static_cast<size_t>(slice.size() * row_bytes));
    }
    input_ = ConstMatrixView(all, p_.types.operand, p_.shape.BT, p_.shape.H, p_.shape.H);
    return {};
  }

  // What a rank says of `tokens` tokens: a header, then three vectors.
  float* values(std::byte* block, int64_t tokens, int64_t vector) const {
    return reinterpret_cast<float*>(block + p_.header_bytes()) + vector * tokens;
  }
  // Bytes behind the vectors are sent too.
  void clear_end(std::byte* block, int64_t tokens) const {
    auto* end = reinterpret_cast<std::byte*>(values(block, tokens, 3));
    std::fill(end, block + p_.block_bytes(tokens), std::byte{0});
  }

  // Vectors of every rank's block.
  auto of_rank(std::byte* blocks, int64_t tokens) const {
    return [this, blocks, tokens](int64_t r, int64_t vector) {
      return values(blocks + r * p_.block_bytes(tokens), tokens, vector);
    };
  }

  Result<void> forward() {
    const int64_t BT = p_.shape.BT;
    auto* block = region<std::byte>(p_.block[0]);
    const auto own = [&](int64_t i) { return VectorView{values(block, BT, i), DType::f32, BT, 1}; };
    ForwardOutputs local{own(0), own(1), own(2)};
    local.target_mask = MaskView{ws_.data() + p_.target_mask, BT};
    local.masked_target = VectorView{ws_.data() + p_.masked_target, p_.types.target, BT, 1};
    const Result<void> ran =
        logitless::run(*p_.forward, forward_operands(), local,
                       ws_.subspan(static_cast<size_t>(p_.operators)), cancel_);
    const Statement statement = statement_of(ran);
    std::memcpy(block, &statement, sizeof statement);
    clear_end(block, BT);
    const int64_t bytes = p_.block_bytes(BT);
    auto* blocks = region<std::byte>(p_.blocks[0]);
    if (auto ok = comm_.all_gather({block, static_cast<size_t>(bytes)},
                                   {blocks, static_cast<size_t>(p_.ranks * bytes)});
        !ok) {
      return ok;
    }
    auto* statements = region<Statement>(p_.statements);
    for (int64_t r = 0; r < p_.ranks; ++r) {
      std::memcpy(statements + r, blocks + r * bytes, sizeof(Statement));
    }
    if (auto ok = first_error({statements, static_cast<size_t>(p_.ranks)}); !ok) return ok;
    const MergedRows merged{region<float>(p_.logits_max), region<float>(p_.sum_exp_logits),
                            region<float>(p_.sum_low), region<float>(p_.predicted_logits)};
    over_rows(BT, 4 * kRowsPerThread, [&](int64_t begin, int64_t end) {
      merge_ranks(p_, in_.target, tokens_, begin, end, merged, of_rank(blocks, BT),
                  [](int64_t b) { return b; });
    });
    return {};
  }

  ForwardOperands forward_operands() const {
    return {.input = input_,
            .weight = in_.weight,
            .target = in_.target,
            .vocab_start_index = p_.rows().begin,
            .rows = in_.rows};
  }

  void write_losses() const {
    const float* max = region<float>(p_.logits_max);
    const float* sum = region<float>(p_.sum_exp_logits);
    const float* predicted = region<float>(p_.predicted_logits);
    double total = 0;
    for (int64_t b = 0; b < p_.shape.BT; ++b) {
      const float loss = tokens_.counts(b) ? loss_of_row(max[b], sum[b], predicted[b]) : 0.0f;
      set_f32(out_.loss, b, loss);
      if (tokens_.counts(b)) total += tokens_.weight(b) * static_cast<double>(loss);
      if (out_.logits_max) set_f32(*out_.logits_max, b, max[b]);
      if (out_.sum_exp_logits) set_f32(*out_.sum_exp_logits, b, sum[b]);
      if (out_.predicted_logits) set_f32(*out_.predicted_logits, b, predicted[b]);
    }
    if (out_.total != nullptr) *out_.total = total;
  }

  // In place of a forward: what it would have left for the backward.
  void take_statistics() const {
    const int64_t BT = p_.shape.BT;
    float* max = region<float>(p_.logits_max);
    float* sum = region<float>(p_.sum_exp_logits);
    const VectorView masked_target{ws_.data() + p_.masked_target, p_.types.target, BT, 1};
    const auto outside = [&](int64_t b) {
      const int64_t target = integer_at(in_.target, b);
      return !tokens_.counts(b) || target < p_.rows().begin || target >= p_.rows().end;
    };
    for (int64_t b = 0; b < BT; ++b) {
      max[b] = f32_at(given_->logits_max, b);
      sum[b] = f32_at(given_->sum_exp_logits, b);
      set_integer(masked_target, b, outside(b) ? 0 : integer_at(in_.target, b) - p_.rows().begin);
    }
    write_mask(MaskView{ws_.data() + p_.target_mask, BT}, true, outside);
  }

  // ---- backward ---------------------------------------------------------------------------------
  //
  // `active` lists the rows with a gradient. All-reduced, a chunk is a stretch of that list; each
  // but the last has an even number of rows, so that sums over tokens have the bits of one piece.
  // Reduce-scattered, every rank's slice of tokens is cut into as many parts as there are chunks,
  // and a chunk is the n-th part of each: every rank receives something in every chunk.

  Range part(int64_t chunk, int64_t destination) const {
    const int64_t* starts = region<int64_t>(p_.slice_starts);
    if (!p_.scatters()) {
      const Range pairs = split(ceil_div(active_rows_, 2), chunks_, chunk);
      return {std::min(active_rows_, 2 * pairs.begin), std::min(active_rows_, 2 * pairs.end)};
    }
    const Range cut = split(starts[destination + 1] - starts[destination], chunks_, chunk);
    return {starts[destination] + cut.begin, starts[destination] + cut.end};
  }
  int64_t destinations() const { return p_.scatters() ? p_.ranks : 1; }

  template <class Body>
  void for_rows(int64_t chunk, const Body& body) const {
    const int64_t* active = region<int64_t>(p_.active);
    int64_t i = 0;
    for (int64_t d = 0; d < destinations(); ++d) {
      const Range rows = part(chunk, d);
      for (int64_t a = rows.begin; a < rows.end; ++a) body(i++, active[a]);
    }
  }

  // Its gradient is made here.
  bool is_active(int64_t b) const {
    return tokens_.has_gradient(b) && (kinds_ == nullptr || kinds_[b] == RowKind::dense);
  }

  void list_active_rows() {
    if (!p_.gradients()) return;
    int64_t* active = region<int64_t>(p_.active);
    int64_t* starts = region<int64_t>(p_.slice_starts);
    int64_t rank = 0;
    for (int64_t b = 0; b < p_.shape.BT; ++b) {
      while (rank < p_.ranks && b >= p_.slice_of(rank).begin) starts[rank++] = active_rows_;
      if (is_active(b)) active[active_rows_++] = b;
    }
    while (rank <= p_.ranks) starts[rank++] = active_rows_;
    // In one pass a chunk is never longer than its block.
    const int64_t chunks =
        p_.one_pass ? ceil_div(active_rows_, p_.chunk_tokens) : active_rows_ / p_.chunk_tokens;
    chunks_ = std::clamp<int64_t>(chunks, 1, p_.most_chunks);
  }

  Result<void> backward() {
    list_active_rows();
    float* grad = region<float>(p_.grad);
    std::fill(grad, grad + p_.shape.BT, 0.0f);
    if (p_.types.grad_input && p_.most_chunks > 1) {
      float* partial = region<float>(p_.grad_input);
      over_rows(p_.shape.BT, kRowsPerThread, [&](int64_t begin, int64_t end) {
        std::fill(partial + begin * p_.shape.H, partial + end * p_.shape.H, 0.0f);
      });
    }
    if (p_.sums_grad_weight_apart() && p_.types.grad_weight->accumulate) load_grad_weight();

    Result<void> mine;
    Sum before, now;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      if (mine) mine = compute(chunk);
      if (!p_.types.grad_input) continue;
      if (auto ok = start(chunk, now); !ok) return ok;
      if (auto ok = finish(before); !ok) return ok;
      before = std::move(now);
    }
    if (auto ok = finish(before); !ok) return ok;
    if (mine && p_.sums_grad_weight_apart()) store_grad_weight();
    if (mine && p_.types.grad_input && !p_.types.grad_input->accumulate) zero_inactive_rows();
    if (!cancellable_) return mine;
    // Ranks that were not cancelled learn of those that were.
    return agree(comm_, mine, {}, {},
                 {region<Statement>(p_.statements), static_cast<size_t>(p_.ranks)});
  }

  Result<void> compute(int64_t chunk) const {
    float* grad = region<float>(p_.grad);
    if (chunk > 0) for_rows(chunk - 1, [&](int64_t, int64_t b) { grad[b] = 0.0f; });
    for_rows(chunk, [&](int64_t, int64_t b) { grad[b] = static_cast<float>(tokens_.weight(b)); });
    GradientOperands operands{
        .grad = vector(p_.grad), .input = input_, .weight = in_.weight, .masked_target = {}};
    operands.target_mask = ConstMaskView(ws_.data() + p_.target_mask, p_.shape.BT);
    operands.masked_target =
        ConstVectorView(ws_.data() + p_.masked_target, p_.types.target, p_.shape.BT);
    operands.logits_max = vector(p_.logits_max);
    operands.sum_exp_logits = vector(p_.sum_exp_logits);
    GradientOutputs outputs;
    if (p_.types.grad_input) {
      outputs.grad_input = matrix_view(region<float>(p_.grad_input), p_.shape.BT, p_.shape.H);
    }
    if (p_.types.grad_weight) {
      outputs.grad_weight = p_.sums_grad_weight_apart() ? matrix_view(region<float>(p_.grad_weight),
                                                                      p_.rows().size(), p_.shape.H)
                                                        : *out_.grad_weight;
    }
    const GradientPlan& plan = chunk == 0 ? *p_.first_gradient : *p_.next_gradient;
    return logitless::run(plan, operands, outputs, ws_.subspan(static_cast<size_t>(p_.operators)),
                          cancel_);
  }

  // A chunk's sum under way; empty where there is none. Rows lie in order of for_rows.
  struct Sum {
    std::unique_ptr<PendingSum> pending;
    int64_t chunk = -1;
    const float* rows = nullptr;  // once it is done: this rank's
  };

  Result<void> start(int64_t chunk, Sum& sum) const {
    const int64_t H = p_.shape.H;
    float* partial = region<float>(p_.grad_input);
    // The rows of a chunk close up: where they are a stretch of all rows, within that stretch.
    int64_t rows = 0;
    float* send = nullptr;
    if (p_.scatters() && chunks_ > 1) {
      send = region<float>(p_.send[chunk % 2]);
      for_rows(chunk, [&](int64_t i, int64_t b) {
        std::memcpy(send + i * H, partial + b * H, static_cast<size_t>(H) * sizeof(float));
        ++rows;
      });
    } else {
      for_rows(chunk, [&](int64_t i, int64_t b) {
        if (send == nullptr) send = partial + b * H;
        if (send + i * H != partial + b * H) {
          std::memcpy(send + i * H, partial + b * H, static_cast<size_t>(H) * sizeof(float));
        }
        ++rows;
      });
      if (send == nullptr) send = partial;
    }
    return start_sum(chunk, send, rows, sum);
  }

  // `rows` rows in order of for_rows.
  Result<void> start_sum(int64_t chunk, float* send, int64_t rows, Sum& sum) const {
    const int64_t H = p_.shape.H;
    sum.chunk = chunk;
    sum.rows = send;
    const auto floats = static_cast<size_t>(rows * H);
    if (!p_.scatters()) {
      auto pending = comm_.start_all_reduce_sum({send, floats});
      if (!pending) return pending.error();
      sum.pending = std::move(pending).value();
      return {};
    }
    int64_t* counts = region<int64_t>(p_.counts);
    for (int64_t r = 0; r < p_.ranks; ++r) counts[r] = part(chunk, r).size() * H;
    float* received = region<float>(p_.received[chunk % 2]);
    sum.rows = received;
    auto pending =
        comm_.start_reduce_scatter_sum({send, floats}, {counts, static_cast<size_t>(p_.ranks)},
                                       {received, static_cast<size_t>(counts[p_.rank])});
    if (!pending) return pending.error();
    sum.pending = std::move(pending).value();
    return {};
  }

  // Waits, rounds once, writes.
  Result<void> finish(Sum& sum) const {
    if (sum.chunk < 0) return {};
    if (auto ok = sum.pending->wait(); !ok) return ok;
    const Range rows = part(sum.chunk, p_.scatters() ? p_.rank : 0);
    const int64_t first_row = p_.scatters() ? p_.slice.begin : 0;
    const int64_t* active = region<int64_t>(p_.active);
    over_rows(rows.size(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        add_rounded_row(*p_.kernels, *out_.grad_input, active[rows.begin + i] - first_row,
                        sum.rows + i * p_.shape.H, p_.shape.H, p_.types.grad_input->accumulate);
      }
    });
    sum.chunk = -1;
    return {};
  }

  void load_grad_weight() const {
    float* sums = region<float>(p_.grad_weight);
    over_rows(p_.rows().size(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        load_row(*p_.kernels, *out_.grad_weight, v, 0, p_.shape.H, sums + v * p_.shape.H);
      }
    });
  }
  void store_grad_weight() const {
    const float* sums = region<float>(p_.grad_weight);
    over_rows(p_.rows().size(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        store_row(*p_.kernels, *out_.grad_weight, v, 0, p_.shape.H, sums + v * p_.shape.H);
      }
    });
  }

  void zero_inactive_rows() const {
    const RowRange rows = p_.scatters() ? p_.slice : RowRange{0, p_.shape.BT};
    for (int64_t b = rows.begin; b < rows.end; ++b) {
      if (tokens_.has_gradient(b)) continue;
      zero_row(*out_.grad_input, b - rows.begin);
    }
  }

  // ---- one pass ---------------------------------------------------------------------------------
  //
  // Blocks with a gradient are the chunks of above; those of tokens that have none come behind
  // them, for their statistics. Blocks use one of two regions by turns: what is sent of them, and
  // with more than one rank what their forward holds, which then goes ahead of the gradients by a
  // block.

  struct Block {
    int64_t rows = 0;
    int64_t chunk = -1;  // -1: without a gradient
  };

  // The forward of a block, whose statistics are gathered.
  struct Ahead {
    std::unique_ptr<Pending> pending;
    Block block;
    int64_t region = 0;
  };

  // Of which only loss and statistics are wanted.
  int64_t inactive_rows() const {
    if (given_ != nullptr) return 0;
    return tokens_.counting() - (p_.gradients() ? tokens_.weighted() : 0);
  }
  int64_t gradient_blocks() const { return active_rows_ > 0 ? chunks_ : 0; }
  int64_t blocks() const {
    if (inactive_rows() == 0) return gradient_blocks();
    return gradient_blocks() + ceil_div(inactive_rows(), p_.most_chunk_rows());
  }

  Result<void> one_pass() {
    neutral_statistics();
    Stop stop(cancel_);
    const ForwardOperands operands = forward_operands();
    if (p_.sparse) {
      SparseRanks sparse(p_, comm_, in_, operands, out_, tokens_, ws_.data(), stop);
      if (auto ok = sparse.run(); !ok) return ok;
      kinds_ = region<RowKind>(p_.kinds);
      if (sparse.began()) step_ = &p_.after_plan;
    }
    list_active_rows();
    const bool fresh = p_.types.grad_weight && !p_.types.grad_weight->accumulate;
    if (fresh && active_rows_ == 0 && step_ == &p_.step_plan) {
      over_rows(p_.rows().size(), 64, [&](int64_t begin, int64_t end) {
        for (int64_t v = begin; v < end; ++v) zero_row(*out_.grad_weight, v);
      });
    }
    const LossAndGradientPlanData& plan = *step_;
    std::byte* base = ws_.data() + p_.operators;
    const ForwardOutputs statistics{vector(p_.logits_max), vector(p_.sum_exp_logits),
                                    vector(p_.predicted_logits)};
    ForwardPass forwards[2] = {{plan.forward, operands, statistics, base + plan.forward_base, stop},
                               {plan_of(1), operands, statistics, base + plan.forward_base, stop}};
    GradientOperands unused;
    unused.input = input_;
    unused.weight = in_.weight;
    GradientOutputs outputs;
    if (p_.types.grad_input) {
      outputs.grad_input = matrix_view(region<float>(p_.send[0]), 0, p_.shape.H);
    }
    outputs.grad_weight = out_.grad_weight;
    GradientPass gradient(plan.gradient, unused, outputs, base + plan.gradient_base, stop);
    int64_t* output_rows = region<int64_t>(p_.output_rows);
    for (int64_t r = 0; r < p_.most_chunk_rows(); ++r) output_rows[r] = r;
    gradient.set_output_rows(output_rows);

    Ahead ahead, now;
    Sum before, sum;
    inactive_cursor_ = 0;
    const int64_t count = blocks();
    if (count > 0) {
      if (auto ok = start_forward(0, forwards, stop, now); !ok) return ok;
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool more = i + 1 < count;
      if (more && plan.two_blocks) {
        if (auto ok = start_forward(i + 1, forwards, stop, ahead); !ok) return ok;
      }
      if (auto ok = finish_forward(now, forwards[now.region]); !ok) return ok;
      if (now.block.chunk >= 0) {
        float* rows = p_.types.grad_input ? region<float>(p_.send[now.region]) : nullptr;
        if (rows != nullptr) {
          outputs.grad_input = matrix_view(rows, now.block.rows, p_.shape.H);
        }
        add_gradients(now, forwards[now.region], gradient, stop);
        if (rows != nullptr) {
          if (auto ok = start_sum(now.block.chunk, rows, now.block.rows, sum); !ok) return ok;
          if (auto ok = finish(before); !ok) return ok;
          before = std::move(sum);
        }
      }
      if (more && !plan.two_blocks) {
        if (auto ok = start_forward(i + 1, forwards, stop, ahead); !ok) return ok;
      }
      now = std::move(ahead);
    }
    if (auto ok = finish(before); !ok) return ok;
    if (given_ == nullptr) write_losses();
    if (p_.types.grad_input && !p_.types.grad_input->accumulate) zero_inactive_rows();
    if (!cancellable_) return {};
    return agree(comm_, cancelled(stop), {}, {},
                 {region<Statement>(p_.statements), static_cast<size_t>(p_.ranks)});
  }

  static Result<void> cancelled(Stop& stop) {
    if (!stop.requested()) return {};
    return Error{ErrorKind::cancelled, kStepCancelled};
  }

  // Of tokens that do not count.
  void neutral_statistics() const {
    std::fill_n(region<float>(p_.logits_max), p_.shape.BT, -std::numeric_limits<float>::infinity());
    std::fill_n(region<float>(p_.sum_exp_logits), p_.shape.BT, 0.0f);
    std::fill_n(region<float>(p_.predicted_logits), p_.shape.BT, 0.0f);
  }

  // Lists block number i and computes its forward, which is skipped once this rank was cancelled;
  // starts the gathering of its statistics.
  Result<void> start_forward(int64_t i, ForwardPass* forwards, Stop& stop, Ahead& ahead) {
    ahead.region = i % p_.regions();
    ForwardPass& forward = forwards[ahead.region];
    ahead.block = list_block(i, forward);
    const int64_t rows = ahead.block.rows;
    const ForwardPlanData& plan = plan_of(ahead.region);
    if (!stop.requested()) {
      run_team(p_.threads, [&](const Team& team) { forward.one_block(team, rows); });
    }
    std::byte* block = region<std::byte>(p_.block[ahead.region]);
    const int64_t bytes = p_.block_bytes(rows);
    std::fill(block, block + p_.header_bytes(), std::byte{0});
    block[0] = std::byte{stop.requested()};
    const int64_t* index = forward.region<int64_t>(plan.row_index);
    const int64_t statistics[] = {p_.logits_max, p_.sum_exp_logits, p_.predicted_logits};
    for (int64_t v = 0; v < 3; ++v) {
      float* sent = values(block, rows, v);
      for (int64_t r = 0; r < rows; ++r) sent[r] = region<float>(statistics[v])[index[r]];
    }
    clear_end(block, rows);
    auto pending = comm_.start_all_gather(
        {block, static_cast<size_t>(bytes)},
        {region<std::byte>(p_.blocks[ahead.region]), static_cast<size_t>(p_.ranks * bytes)});
    if (!pending) return pending.error();
    ahead.pending = std::move(pending).value();
    return {};
  }

  const ForwardPlanData& plan_of(int64_t region) const {
    const LossAndGradientPlanData& plan = *step_;
    return region == 1 && plan.two_blocks ? plan.next_forward : plan.forward;
  }

  Block list_block(int64_t i, const ForwardPass& forward) {
    Block block;
    if (i < gradient_blocks()) {
      block.chunk = i;
      for_rows(i, [&](int64_t r, int64_t b) {
        forward.take_row(r, b);
        ++block.rows;
      });
      return block;
    }
    for (int64_t& b = inactive_cursor_; b < p_.shape.BT; ++b) {
      if (block.rows == p_.most_chunk_rows()) break;
      if (!tokens_.counts(b) || (p_.gradients() && tokens_.has_gradient(b))) continue;
      forward.take_row(block.rows++, b);
    }
    return block;
  }

  // Waits for the statistics of all ranks; those of the whole vocabulary take the place of this
  // rank's. On every rank the same error where one was cancelled.
  Result<void> finish_forward(Ahead& now, const ForwardPass& forward) const {
    if (auto ok = now.pending->wait(); !ok) return ok;
    const int64_t rows = now.block.rows;
    std::byte* blocks = region<std::byte>(p_.blocks[now.region]);
    const auto was_cancelled = [&](int64_t r) {
      return blocks[r * p_.block_bytes(rows)] != std::byte{0};
    };
    if (auto ok = cancelled_somewhere(p_.ranks, was_cancelled); !ok) return ok;
    const ForwardPlanData& plan = plan_of(now.region);
    const int64_t* index = forward.region<int64_t>(plan.row_index);
    const MergedRows merged{
        forward.region<float>(plan.run_max), forward.region<float>(plan.run_sum),
        forward.region<float>(plan.run_low), region<float>(p_.merged_predicted)};
    over_rows(rows, 4 * kRowsPerThread, [&](int64_t begin, int64_t end) {
      merge_ranks(p_, in_.target, tokens_, begin, end, merged, of_rank(blocks, rows),
                  [&](int64_t r) { return index[r]; });
      for (int64_t r = begin; r < end; ++r) {
        region<float>(p_.logits_max)[index[r]] = merged.max[r];
        region<float>(p_.sum_exp_logits)[index[r]] = merged.sum[r];
        region<float>(p_.predicted_logits)[index[r]] = merged.predicted[r];
      }
    });
    return {};
  }

  // Both products of a block, whose grad_input lies where it is sent from.
  void add_gradients(const Ahead& now, const ForwardPass& forward, GradientPass& gradient,
                     Stop& stop) {
    const LossAndGradientPlanData& plan = *step_;
    if (p_.shape.H == 0) return;
    if (plan.shape.V == 0) {
      if (p_.types.grad_input) {
        std::fill_n(region<float>(p_.send[now.region]), now.block.rows * p_.shape.H, 0.0f);
      }
      return;
    }
    if (stop.requested()) return;
    cell_.token_chunks = gradient_blocks();
    cell_.vocab_chunks = ceil_div(plan.shape.V, plan.gradient.vocab_chunk);
    gradient.set_held(held_by(forward, plan_of(now.region)));
    run_team(p_.threads, [&](const Team& team) {
      GradientPass::Cell cell = cell_;
      take_gradient_rows(team, plan_of(now.region), plan.gradient, forward, gradient, tokens_,
                         now.block.rows);
      team.barrier();
      add_block(team, plan.gradient, gradient, now.block.chunk, now.block.rows, cell);
      if (team.rank() == 0) cell_ = cell;
    });
  }

  const VocabParallelPlanData& p_;
  Communicator& comm_;
  const LossAndGradientOperands& in_;
  const LossAndGradientOutputs& out_;
  std::span<std::byte> ws_;
  const CancelToken* cancel_;
  const MergedStatistics* given_;  // null: there is a forward
  bool cancellable_ = false;       // some rank was given a token
  StepTokens tokens_;
  ConstMatrixView input_;  // [BT, H]
  int64_t active_rows_ = 0;
  int64_t chunks_ = 1;
  // One pass.
  const LossAndGradientPlanData* step_ = &p_.step_plan;
  const RowKind* kinds_ = nullptr;  // null: no row is sparse
  int64_t inactive_cursor_ = 0;
  GradientPass::Cell cell_;  // what is packed
};

}  // namespace

Result<void> run(const VocabParallelPlan& plan, Communicator& communicator,
                 const LossAndGradientOperands& operands, const LossAndGradientOutputs& outputs,
                 std::span<std::byte> workspace, const CancelToken* cancel) {
  const DefaultFloatEnvironment environment;  // losses and weights are not all made in a team
  return VocabParallel(plan.data(), communicator, operands, outputs, workspace, cancel).run();
}

Result<void> run_gradient(const VocabParallelPlan& plan, Communicator& communicator,
                          const LossAndGradientOperands& operands,
                          const MergedStatistics& statistics, const GradientOutputs& outputs,
                          std::span<std::byte> workspace, const CancelToken* cancel) {
  const DefaultFloatEnvironment environment;
  // The statistics are checked like the outputs of a run, and not written; nor is there a loss.
  const auto read = [](const ConstVectorView& v) {
    return VectorView{const_cast<void*>(v.data), v.dtype, v.size, v.stride};
  };
  const LossAndGradientOutputs step{.loss = read(statistics.logits_max),
                                    .logits_max = read(statistics.logits_max),
                                    .sum_exp_logits = read(statistics.sum_exp_logits),
                                    .grad_input = outputs.grad_input,
                                    .grad_weight = outputs.grad_weight,
                                    .sparse_counts = outputs.sparse_counts};
  return VocabParallel(plan.data(), communicator, operands, step, workspace, cancel, &statistics)
      .run();
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
