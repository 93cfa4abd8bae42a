// SPDX-License-Identifier: Apache-2.0
// The sparse rows of a step over ranks (sparse_pass.h): what is kept of a row is decided by the
// whole row, of which every rank has a part.
//
//   for each block of rows with a gradient
//     look at a sample of this rank's columns    -> gather maxima, then sums by levels
//                                                   every rank: the same flat rows, the same tails
//   for each group of the others
//     for each block
//       forward, candidates                      -> gather statistics; merge, losses
//       sums of candidates by levels             -> gather; every rank: the same thresholds
//       thin; this rank's part of grad_input
//     gather what did not fit; sum grad_input
//     grad_weight of this rank
//
// Rows left to the exact pass are the same on every rank. Collectives block, between teams.
#pragma once

#include <cstring>
#include <limits>

#include "parallel/rank_statistics.h"
#include "sparse_pass.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

class SparseRanks {
 public:
  // Statistics of the rows it does are left where the plan has them.
  SparseRanks(const VocabParallelPlanData& plan, Communicator& communicator,
              const LossAndGradientOperands& in, const ForwardOperands& operands,
              const LossAndGradientOutputs& out, const StepTokens& tokens, std::byte* workspace,
              Stop& stop)
      : p_(plan),
        s_(*plan.sparse),
        comm_(communicator),
        in_(in),
        operands_(operands),
        out_(out),
        tokens_(tokens),
        ws_(workspace),
        stop_(stop) {}

  Result<void> run() {
    auto* kinds = region<RowKind>(p_.kinds);
    auto* rows = region<int64_t>(p_.sparse_rows);
    int64_t count = 0;
    for (int64_t b = 0; b < p_.shape.BT; ++b) {
      const bool has = tokens_.has_gradient(b);
      kinds[b] = has ? RowKind::sparse : RowKind::none;
      if (has) rows[count++] = b;
    }
    const ForwardOutputs statistics{vector(p_.logits_max), vector(p_.sum_exp_logits),
                                    vector(p_.predicted_logits)};
    GradientOutputs gradients;
    gradients.grad_weight = out_.grad_weight;
    if (p_.types.grad_input) {
      gradients.grad_input = matrix_view(region<float>(p_.grad_input), p_.shape.BT, p_.shape.H);
    }
    Pass pass(s_, operands_, statistics, gradients, in_.seed, p_.rows().begin, *this, rows, kinds,
              ws_ + p_.operators, stop_);
    team([&](const Team& team) { pass.begin(team); });
    if (auto ok = agree_on_blocks(); !ok) return ok;
    if (s_.sample_stride > 0) {
      team([&](const Team& team) { pass.pack_sample(team); });
      for (int64_t r0 = 0; r0 < count; r0 += s_.block_rows()) {
        if (auto ok = look_at_sample(pass, {r0, std::min(count, r0 + s_.block_rows())}); !ok) {
          return ok;
        }
      }
    }
    const int64_t sparse = pass.list_sparse(count);
    for (int64_t g0 = 0; g0 < sparse; g0 += s_.group_rows) {
      if (auto ok = one_group(pass, g0, std::min(s_.group_rows, sparse - g0)); !ok) return ok;
    }
    began_ = pass.began();
    const int64_t left = pass.sparse_rows(p_.shape.BT);
    if (out_.sparse_counts != nullptr) {
      *out_.sparse_counts = {.rows = count,
                             .dense_rows = count - left,
                             .kept = pass.kept(),
                             .elements = left * p_.rows().size()};
    }
    return {};
  }

  // Whether grad_weight was written.
  bool began() const { return began_; }

  // ---- what the pass asks ----------------------------------------------------------------------

  int64_t token_id(int64_t b) const { return in_.token_ids ? integer_at(*in_.token_ids, b) : b; }
  SparseRow row(int64_t b, float max, float sum) const {
    return {.grad = static_cast<float>(tokens_.weight(b)), .max = max, .sum = sum};
  }
  void settled(int64_t) const {}

  // Vectors of a block that ranks tell each other: logits_max, sum_exp_logits, predicted_logits;
  // the same of the sum without the target, which is of two parts; rows whose candidates did not
  // fit.
  static constexpr int64_t kVectors = 7;

 private:
  using Pass = SparsePass<SparseRanks>;

  template <class T>
  T* region(int64_t offset) const {
    return reinterpret_cast<T*>(ws_ + offset);
  }
  VectorView vector(int64_t offset) const { return {ws_ + offset, DType::f32, p_.shape.BT, 1}; }
  template <class Body>
  void team(const Body& body) const {
    run_team(p_.threads, body);
  }
  RowKind& kind(int64_t i) const {  // of row i of the list
    return region<RowKind>(p_.kinds)[region<int64_t>(p_.sparse_rows)[i]];
  }

  // What this rank sends, behind its header; what rank r has sent.
  std::byte* mine() const { return region<std::byte>(p_.sparse_block) + kAlignment; }
  std::byte* of_rank(int64_t r) const {
    return region<std::byte>(p_.sparse_blocks) + r * stride_ + kAlignment;
  }
  // On every rank the same error where one was cancelled.
  Result<void> gather(int64_t bytes) {
    stride_ = kAlignment + round_up(bytes, kAlignment);
    std::byte* block = region<std::byte>(p_.sparse_block);
    std::fill(block, block + kAlignment, std::byte{0});
    block[0] = std::byte{stop_.requested()};
    std::fill(mine() + bytes, block + stride_, std::byte{0});
    auto* all = region<std::byte>(p_.sparse_blocks);
    if (auto ok = comm_.all_gather({block, static_cast<size_t>(stride_)},
                                   {all, static_cast<size_t>(p_.ranks * stride_)});
        !ok) {
      return ok;
    }
    return cancelled_somewhere(p_.ranks,
                               [&](int64_t r) { return all[r * stride_] != std::byte{0}; });
  }

  // How many rows are done at a time, which threads may decide.
  Result<void> agree_on_blocks() {
    blocks_ = {std::min(s_.certain_rows(), s_.block_rows()), s_.room()};
    std::memcpy(mine(), &blocks_, sizeof blocks_);
    if (auto ok = gather(sizeof blocks_); !ok) return ok;
    for (int64_t r = 0; r < p_.ranks; ++r) {
      Blocks theirs;
      std::memcpy(&theirs, of_rank(r), sizeof theirs);
      blocks_ = {std::min(blocks_.certain, theirs.certain), std::min(blocks_.room, theirs.room)};
    }
    return {};
  }

  Result<void> look_at_sample(Pass& pass, const Range& of) {
    const int64_t n = of.size();
    const auto* rows = region<int64_t>(p_.sparse_rows);
    auto* own = reinterpret_cast<float*>(mine());
    team([&](const Team& team) {
      pass.over_sample(team, of, [&](int64_t i, float* logits) {
        own[i - of.begin] = pass.sampled_max(logits, rows[i]);
      });
    });
    if (auto ok = gather(n * 4); !ok) return ok;
    auto* max = region<float>(p_.sampled_max);
    std::fill_n(max, n, -std::numeric_limits<float>::infinity());
    for (int64_t r = 0; r < p_.ranks; ++r) {
      const auto* theirs = reinterpret_cast<const float*>(of_rank(r));
      for (int64_t i = 0; i < n; ++i) max[i] = std::max(max[i], theirs[i]);
    }
    auto* samples = reinterpret_cast<Sample*>(mine());
    team([&](const Team& team) {
      pass.over_sample(team, of, [&](int64_t i, float* logits) {
        pass.sampled_max(logits, rows[i]);  // the target's becomes -inf
        const float reference = max[i - of.begin];
        samples[i - of.begin] =
            std::isfinite(reference) ? pass.sample_of(logits, reference) : Sample{};
      });
    });
    if (auto ok = gather(n * static_cast<int64_t>(sizeof(Sample))); !ok) return ok;
    team([&](const Team& team) {
      const Range part = team.part(n);
      for (int64_t i = part.begin; i < part.end; ++i) {
        Sample all;
        for (int64_t r = 0; r < p_.ranks; ++r) {
          all.add(reinterpret_cast<const Sample*>(of_rank(r))[i]);
        }
        if (pass.is_flat(rows[of.begin + i], max[i], all)) kind(of.begin + i) = RowKind::dense;
      }
    });
    return {};
  }

  Result<void> one_group(Pass& pass, int64_t g0, int64_t rows) {
    for (int64_t r0 = 0, n = 0; r0 < rows; r0 += n) {
      n = pass.rows_that_fit({g0 + r0, g0 + rows}, blocks_.certain, blocks_.room);
      pass.list_block(r0, n);
      if (auto ok = one_block(pass, g0, n, s_.sample_stride > 0); !ok) return ok;
    }
    const int64_t pending = pass.list_pending(g0, rows);
    for (int64_t i0 = 0; i0 < pending; i0 += blocks_.certain) {
      const int64_t n = std::min(blocks_.certain, pending - i0);
      pass.take_pending(i0, n);
      if (auto ok = one_block(pass, g0, n, false); !ok) return ok;
    }
    // A row of which one rank kept more than it has room for is nobody's.
    for (int64_t r = 0; r < rows; ++r) mine()[r] = static_cast<std::byte>(kind(g0 + r));
    if (auto ok = gather(rows); !ok) return ok;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t rank = 0; rank < p_.ranks; ++rank) {
        if (of_rank(rank)[r] == static_cast<std::byte>(RowKind::sparse)) continue;
        pass.drop(g0, r);
        break;
      }
    }
    if (p_.types.grad_input) {
      if (auto ok = sum_grad_input(g0, rows); !ok) return ok;
    }
    team([&](const Team& team) { pass.end_group(team, g0, rows); });
    return {};
  }

  Result<void> one_block(Pass& pass, int64_t g0, int64_t n, bool guess) {
    team([&](const Team& team) { pass.forward_block(team, g0, n, guess); });
    write_statistics(pass, n);
    if (auto ok = gather(kVectors * n * 4); !ok) return ok;
    auto* late = region<uint8_t>(p_.late);
    merge_statistics(pass.forward(), n, late);
    team([&](const Team& team) { pass.write_records(team, g0, n, late, mine()); });
    if (auto ok = gather(n * s_.record_bytes()); !ok) return ok;
    team([&](const Team& team) {
      pass.keep_by_records(team, g0, n, late, of_rank(0), stride_, p_.ranks);
      team.barrier();
      if (p_.types.grad_input) pass.add_grad_input(team, g0, n);
    });
    return {};
  }

  void write_statistics(const Pass& pass, int64_t n) const {
    const ForwardPass& forward = pass.forward();
    const ForwardPlanData& f = s_.forward;
    const auto* index = forward.region<int64_t>(f.row_index);
    auto* sent = reinterpret_cast<float*>(mine());
    const int64_t of_tokens[] = {p_.logits_max, p_.sum_exp_logits, p_.predicted_logits};
    for (int64_t offset : of_tokens) {
      for (int64_t r = 0; r < n; ++r) *sent++ = region<float>(offset)[index[r]];
    }
    for (int64_t offset : {f.rest_max, f.rest_sum, f.rest_low}) {
      sent = std::copy_n(forward.region<float>(offset), n, sent);
    }
    for (int64_t r = 0; r < n; ++r) *sent++ = pass.fits(r) ? 0.0f : 1.0f;
  }

  // Of all ranks in place of this one's.
  void merge_statistics(const ForwardPass& forward, int64_t n, uint8_t* late) const {
    const ForwardPlanData& f = s_.forward;
    const auto* index = forward.region<int64_t>(f.row_index);
    const auto of = [&](int64_t r, int64_t v) {
      return reinterpret_cast<const float*>(of_rank(r)) + v * n;
    };
    const MergedRows merged{forward.region<float>(f.run_max), forward.region<float>(f.run_sum),
                            forward.region<float>(f.run_low), region<float>(p_.merged_predicted)};
    float* rest_max = forward.region<float>(f.rest_max);
    float* rest_sum = forward.region<float>(f.rest_sum);
    float* rest_low = forward.region<float>(f.rest_low);
    team([&](const Team& team) {
      const Range part = team.part(n);
      const int64_t i = part.begin;
      merge_ranks(p_, in_.target, tokens_, part.begin, part.end, merged, of,
                  [&](int64_t r) { return index[r]; });
      std::fill(rest_max + i, rest_max + part.end, -std::numeric_limits<float>::infinity());
      for (float* zeros : {rest_sum, rest_low}) std::fill(zeros + i, zeros + part.end, 0.0f);
      std::fill(late + i, late + part.end, uint8_t{0});
      for (int64_t r = 0; r < p_.ranks; ++r) {
        for (int64_t vector : {4, 5}) {  // both parts of the sum
          p_.kernels->merge_rows(rest_max + i, rest_sum + i, rest_low + i, of(r, 3) + i,
                                 of(r, vector) + i, part.size());
        }
        for (int64_t j = i; j < part.end; ++j) late[j] |= of(r, 6)[j] != 0.0f ? 1 : 0;
      }
      for (int64_t r = part.begin; r < part.end; ++r) {
        region<float>(p_.logits_max)[index[r]] = merged.max[r];
        region<float>(p_.sum_exp_logits)[index[r]] = merged.sum[r];
        region<float>(p_.predicted_logits)[index[r]] = merged.predicted[r];
      }
    });
  }

  // The group's sparse rows close up, are summed, rounded once, and written.
  Result<void> sum_grad_input(int64_t g0, int64_t rows) {
    const int64_t H = p_.shape.H;
    const auto* list = region<int64_t>(p_.sparse_rows) + g0;
    float* sums = region<float>(p_.grad_input);
    int64_t* counts = region<int64_t>(p_.counts);
    std::fill_n(counts, p_.ranks, 0);
    int64_t n = 0;
    int64_t destination = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t b = list[r];
      if (kind(g0 + r) != RowKind::sparse) continue;
      while (b >= p_.slice_of(destination).end) ++destination;
      counts[destination] += H;
      std::memmove(sums + n++ * H, sums + b * H, static_cast<size_t>(H) * sizeof(float));
    }
    if (n == 0) return {};
    const std::span<float> all(sums, static_cast<size_t>(n * H));
    if (p_.scatters()) {
      float* received = region<float>(p_.received[0]);
      if (auto ok = comm_.reduce_scatter_sum(all, {counts, static_cast<size_t>(p_.ranks)},
                                             {received, static_cast<size_t>(counts[p_.rank])});
          !ok) {
        return ok;
      }
      sums = received;
    } else if (auto ok = comm_.all_reduce_sum(all); !ok) {
      return ok;
    }
    const RowRange own = p_.scatters() ? p_.slice : RowRange{0, p_.shape.BT};
    int64_t i = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t b = list[r];
      if (kind(g0 + r) != RowKind::sparse || b < own.begin || b >= own.end) continue;
      add_rounded_row(*p_.kernels, *out_.grad_input, b - own.begin, sums + i++ * H, H,
                      p_.types.grad_input->accumulate);
    }
    return {};
  }

  const VocabParallelPlanData& p_;
  const SparsePlanData& s_;
  Communicator& comm_;
  const LossAndGradientOperands& in_;
  const ForwardOperands& operands_;
  const LossAndGradientOutputs& out_;
  const StepTokens& tokens_;
  std::byte* ws_;
  Stop& stop_;
  int64_t stride_ = 0;  // of what was gathered last
  struct Blocks {
    int64_t certain = 1;  // rows that fit whatever they look like
    double room = 0;      // candidates
  };
  Blocks blocks_;
  bool began_ = false;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
