// SPDX-License-Identifier: Apache-2.0
#include "sparse_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "sparse_rule.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

int64_t lay_out(SparsePlanData& p) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t V = p.shape.V;
  const int64_t H = p.shape.H;
  const int64_t rows = p.block_rows();
  const int64_t units = ceil_div(H, g.k_unit);
  const int64_t threads = p.target.threads;

  ForwardPlanData& f = p.forward;
  f.panel_rows = g.mr;
  f.chunk_segments = std::max<int64_t>(1, p.segments());
  f.collects = true;

  const double expected = SparsePlanData::kDenseShare * static_cast<double>(p.vocabulary);
  const auto most = static_cast<int64_t>(expected + 8 * std::sqrt(expected)) + 64;
  p.row_capacity = std::min(V, most) + 1 + SparsePlanData::kRoom;
  // A fifth of the block's elements, and everything of a few rows in any case.
  const int64_t usual = ceil_div(rows * (V / 5 + cpu::kSegmentColumns), threads);
  const int64_t of_a_row = p.most_segments(threads) * cpu::kSegmentColumns;
  p.thread_capacity = std::max(usual, of_a_row) + SparsePlanData::kSlack;

  // Slices of equal length, so that what is walked over again and again takes some 60 % of L2.
  const int64_t element = cpu::packed_bytes(p.target.source);
  const int64_t cache = p.target.l2_bytes / 5 * 3;
  const auto slice = [&](int64_t most_columns) {
    // Two threads share the slices of grad_input.
    const int64_t slices = round_up(ceil_div(H, std::max<int64_t>(128, most_columns)), 2);
    return round_up(ceil_div(H, slices), cpu::kPackedColumns);
  };
  p.input_slice = slice(320);
  const int64_t most_segments =
      std::clamp<int64_t>(p.segments(), 1, SparsePlanData::kMostSorted / cpu::kSegmentColumns);
  p.block_segments = std::clamp<int64_t>(cache / (p.input_slice * element * cpu::kSegmentColumns),
                                         1, most_segments);
  // As many as usually have room for their entries, of a twenty-fifth.
  p.sorted_blocks =
      std::clamp<int64_t>(std::min(25 * p.entries() / (p.group_rows * p.block_columns()),
                                   p.vocab_blocks() / (4 * threads)),
                          1, SparsePlanData::kMostSorted / p.block_columns());
  p.weight_slice = slice(cache / (p.group_rows * element));

  Layout l;
  p.forward_base = l.add(lay_out(f));
  p.vocab_hash = l.add(p.segments() * cpu::kSegmentColumns * 4);
  p.tails = l.add(p.sample_stride > 0 ? p.shape.BT * static_cast<int64_t>(sizeof(SparseTail)) : 0);
  const int64_t sample_bytes = round_up(p.sample_rows(), g.nr) * units * 4;
  p.values = l.add(std::max(threads * p.thread_capacity * 4, sample_bytes));
  p.columns = l.add(threads * p.thread_capacity);
  p.used = l.add(threads * kAlignment);
  p.chunks = l.add(rows * p.segments() * static_cast<int64_t>(sizeof(cpu::Chunk)));
  p.kept_values = l.add(p.group_rows * p.row_capacity * 4);
  p.kept_columns = l.add(p.group_rows * p.row_capacity * 2);
  p.kept_begin = l.add((p.vocab_blocks() + 1) * p.group_rows * 4);
  p.pending = l.add(p.group_rows * 8);
  p.block = l.add(rows * 8);
  p.grad_input_sums = l.add(p.grad_input ? p.input_slices() * rows * p.input_slice * 4 : 0);
  p.input_panel =
      l.add(p.grad_weight ? p.weight_slices() * p.group_rows * p.weight_slice * element : 0);
  p.grad_weight_accumulator = Accumulator::none;
  if (p.grad_weight && p.groups() > 1) {
    p.grad_weight_accumulator =
        p.grad_weight->dtype == DType::f32 ? Accumulator::output : Accumulator::workspace;
  }
  p.grad_weight_sums = l.add(p.grad_weight_accumulator == Accumulator::workspace ? V * H * 4 : 0);
  // A thread's own: what the sample or the sort by column needs; gathered rows; a row of output.
  const int64_t sample =
      round_up(units * g.mr * 4, kAlignment) + round_up(p.sample_rows(), g.nr) * g.mr * 4;
  const int64_t sorted = p.entries() * (4 + 2);
  const int64_t panel = p.block_columns() * p.input_slice * element;
  const int64_t row = std::max(p.input_slice, p.weight_slice) * 4;
  p.scratch_stride =
      round_up(
          std::max({sample, sorted, panel, SparsePlanData::kSettledTogether * p.segments() * 4}),
          kAlignment) +
      2 * round_up(row, kAlignment);
  p.scratch = l.add(threads * p.scratch_stride);
  return p.workspace_bytes = l.bytes();
}

// The forward of blocks of so many rows.
void set_block(SparsePlanData& p, int64_t rows) {
  ForwardPlanData& f = p.forward;
  f.token_block = f.shape.BT = rows;
  f.shape.V = p.shape.V;
  f.shape.H = p.shape.H;
  f.target = p.target;
  f.few = few_tokens(*p.target.gemm, rows);
  f.own_panels = !f.few;
}

// Of a block.
int64_t most_rows(const SparsePlanData& p) {
  constexpr int64_t kMostTokens = 1024;             // their tiles of a segment: 1 MiB a thread
  constexpr int64_t kMostBytes = int64_t{8} << 20;  // of their packed input
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t row_bytes = std::max<int64_t>(1, ceil_div(p.shape.H, g.k_unit) * 4);
  return std::clamp<int64_t>(kMostBytes / row_bytes, g.mr, kMostTokens);
}

// Candidates are found by 32 bits, kept elements of a row by 31.
bool is_found(const SparsePlanData& p) {
  return p.target.threads * p.thread_capacity <= UINT32_MAX && p.row_capacity <= INT32_MAX;
}

void set_sample(SparsePlanData& p) {
  constexpr int64_t kSampleRows = 1024;
  constexpr int64_t kSampleShare = 64;
  if (p.vocabulary >= 32 * kSampleShare) {
    p.sample_stride = std::max(kSampleShare, ceil_div(p.vocabulary, kSampleRows));
  }
}

}  // namespace

bool choose_sparse(SparsePlanData& p, int64_t limit_bytes, int64_t& least_bytes) {
  const int64_t BT = std::max<int64_t>(1, p.shape.BT);
  const int64_t most = most_rows(p);
  set_sample(p);
  least_bytes = INT64_MAX;
  // The fewest groups, then the longest blocks.
  for (int64_t groups = 1;; groups *= 2) {
    p.group_rows = ceil_div(BT, groups);
    if (p.group_rows > SparsePlanData::kMostRows) continue;
    const int64_t longest = std::min(p.group_rows, most);
    for (int64_t blocks = 1;; blocks *= 2) {
      const int64_t rows = ceil_div(longest, blocks);
      set_block(p, rows);
      const int64_t bytes = lay_out(p);
      if (is_found(p)) {
        least_bytes = std::min(least_bytes, bytes);
        if (bytes <= limit_bytes) return true;
      }
      if (rows == 1) break;
    }
    if (p.group_rows == 1) return false;
  }
}

namespace {

template <class Types>
SparsePlanData begin_sparse(const Shape& shape, const Types& types, const Target& target) {
  SparsePlanData p;
  p.shape = shape;
  p.vocabulary = shape.V;
  p.target = target;
  p.tolerance = static_cast<double>(types.grad_tolerance);
  p.grad_input = types.grad_input;
  p.grad_weight = types.grad_weight;
  p.forward.types.operand = types.operand;
  p.forward.types.multiply = types.multiply;
  p.forward.types.target = types.target;
  return p;
}

}  // namespace

SparsePlanData begin_split(const Shape& shape, int64_t vocabulary, int64_t vocab_start,
                           const LossAndGradientTypes& types, const Target& target) {
  SparsePlanData p = begin_sparse(shape, types, target);
  if (p.grad_input) p.grad_input = GradientOutput{.dtype = DType::f32};
  p.vocabulary = vocabulary;
  p.vocab_start = vocab_start;
  set_sample(p);
  return p;
}

bool set_sparse_choice(SparsePlanData& p, int choice) {
  const int64_t groups = ceil_div(p.shape.BT, SparsePlanData::kMostRows) << (choice / 8);
  const int64_t blocks = int64_t{1} << (choice % 8);
  if (groups > p.shape.BT) return false;
  p.group_rows = ceil_div(p.shape.BT, groups);
  // grad_input is summed over the ranks a group at a time, which a transport may count in 31 bits.
  if (p.grad_input && p.group_rows * p.shape.H > INT32_MAX) return false;
  const int64_t longest = std::min(p.group_rows, most_rows(p));
  if (blocks > longest) return false;
  set_block(p, ceil_div(longest, blocks));
  lay_out(p);
  return is_found(p);
}

Error beyond_32_bits(const Shape& shape, int threads) {
  return Error{ErrorKind::invalid_argument,
               "grad_tolerance: must be 0 for [BT, V, H] = [" + std::to_string(shape.BT) + ", " +
                   std::to_string(shape.V) + ", " + std::to_string(shape.H) +
                   "], threads = " + std::to_string(threads) +
                   ": candidates of one token, or grad_input of a group of tokens over ranks, are "
                   "more than 32 bits can number"};
}

namespace {

// In any workspace.
Result<void> check_possible(const SparsePlanData& sparse) {
  SparsePlanData unlimited = sparse;
  int64_t least = 0;
  if (choose_sparse(unlimited, INT64_MAX, least)) return {};
  return beyond_32_bits(sparse.shape, sparse.target.threads);
}

Error does_not_fit(int64_t limit_bytes, int64_t least) {
  return Error{ErrorKind::limit_too_small,
               "workspace_limit_bytes: a sparse gradient does not fit " +
                   std::to_string(limit_bytes) + " bytes, the least possible workspace is " +
                   std::to_string(least) + " bytes"};
}

}  // namespace

Result<void> plan_sparse(LossAndGradientPlanData& plan, const PlanOptions& options) {
  auto data = std::make_shared<SparseStepPlanData>();
  const int64_t BT = plan.shape.BT;
  Layout l;
  data->kinds = l.add(BT);
  data->rows = l.add(BT * 8);
  data->statistics = l.add(3 * BT * 4);
  data->passes = l.bytes();
  const bool limited = options.workspace_limit_bytes > 0;
  const int64_t limit = plan.limit_bytes - data->passes;

  data->exact = plan;
  data->exact.types.grad_tolerance = 0.0f;
  data->exact.limit_bytes = limit;
  data->after = data->exact;
  if (data->after.types.grad_weight) data->after.types.grad_weight->accumulate = true;
  data->sparse = begin_sparse(plan.shape, plan.types, plan.target);
  if (auto ok = check_possible(data->sparse); !ok) return ok;
  int64_t least = 0;
  const auto choose = [&](const auto& chosen) {
    int64_t bytes = 0;
    const bool fits = chosen(limit, bytes) || (!limited && chosen(INT64_MAX, bytes));
    least = std::max(least, bytes);
    return fits;
  };
  const auto one_pass = [](LossAndGradientPlanData& p) {
    return [&p](int64_t bytes, int64_t& least_bytes) {
      p.limit_bytes = bytes;
      return choose_one_pass(p, least_bytes);
    };
  };
  bool fits = choose(one_pass(data->exact));
  // The others within what the exact pass takes anyway, if that leaves blocks worth having.
  const int64_t beside = data->exact.workspace_bytes;
  fits = choose([&](int64_t bytes, int64_t& least_bytes) {
           return one_pass(data->after)(std::min(bytes, beside), least_bytes) ||
                  one_pass(data->after)(bytes, least_bytes);
         }) &&
         fits;
  fits = choose([&](int64_t bytes, int64_t& least_bytes) {
           return (choose_sparse(data->sparse, std::min(bytes, beside), least_bytes) &&
                   data->sparse.block_rows() >= std::min<int64_t>(256, BT)) ||
                  choose_sparse(data->sparse, bytes, least_bytes);
         }) &&
         fits;
  if (!fits) return does_not_fit(plan.limit_bytes, data->passes + least);
  const int64_t passes = std::max(
      {data->exact.workspace_bytes, data->after.workspace_bytes, data->sparse.workspace_bytes});
  plan.workspace_bytes = data->passes + passes;
  plan.sparse = std::move(data);
  return {};
}

Result<void> plan_sparse(GradientPlanData& plan, const PlanOptions& options) {
  auto data = std::make_shared<SparseGradientPlanData>();
  const int64_t BT = plan.shape.BT;
  Layout l;
  data->kinds = l.add(BT);
  data->rows = l.add(BT * 8);
  data->counts = l.add(BT);
  data->targets = l.add(BT * 8);
  data->statistics = l.add(3 * BT * 4);
  data->passes = l.bytes();

  GradientTypes types = plan.types;
  types.grad_tolerance = 0.0f;
  GradientTypes after = types;
  for (auto* output : {&after.grad_input, &after.grad_weight}) {
    if (*output) (*output)->accumulate = true;
  }
  data->sparse = begin_sparse(plan.shape, plan.types, plan.target);
  data->sparse.forward.types.target = DType::i64;
  data->sparse.forward.types.logits_rounding = plan.types.logits_rounding;
  if (auto ok = check_possible(data->sparse); !ok) return ok;
  PlanOptions inner{.threads = plan.target.threads, .isa = plan.target.isa};
  const auto plan_exact = [&]() -> Result<void> {
    auto exact = plan_gradient(plan.shape, types, inner);
    if (!exact) return exact.error();
    auto added = plan_gradient(plan.shape, after, inner);
    if (!added) return added.error();
    data->exact = *exact;
    data->after = *added;
    return {};
  };
  if (auto ok = plan_exact(); !ok) return ok;
  int64_t least_sparse = 0;
  if (options.workspace_limit_bytes > 0) {
    const int64_t limit = options.workspace_limit_bytes - data->passes;
    const bool fits = choose_sparse(data->sparse, limit, least_sparse);
    const int64_t least = round_up(
        std::max({least_sparse, data->exact->data().least_bytes, data->after->data().least_bytes}),
        kAlignment);
    if (!fits || limit < least) {
      return does_not_fit(options.workspace_limit_bytes, data->passes + least);
    }
    inner.workspace_limit_bytes = limit;
    if (auto ok = plan_exact(); !ok) return ok;
  } else {
    const LossAndGradientTypes step{
        .operand = types.operand, .grad_input = types.grad_input, .grad_weight = types.grad_weight};
    if (!choose_sparse(data->sparse, default_limit(plan.shape, step), least_sparse)) {
      choose_sparse(data->sparse, INT64_MAX, least_sparse);
    }
  }
  const int64_t passes = std::max({data->exact->workspace_bytes(), data->after->workspace_bytes(),
                                   data->sparse.workspace_bytes});
  plan.workspace_bytes = data->passes + passes;
  plan.least_bytes = plan.workspace_bytes;
  plan.sparse = std::move(data);
  return {};
}

std::string sparse_text(const SparsePlanData& p) {
  char eps[32];
  std::snprintf(eps, sizeof(eps), "%.3g", p.tolerance);
  std::string text = std::string("  sparse gradient, tolerance ") + eps + ": rows in " +
                     std::to_string(p.groups()) + " groups of " + std::to_string(p.group_rows) +
                     ", blocks of " + std::to_string(p.block_rows()) + ", up to " +
                     std::to_string(p.most_kept_of_row()) + " elements kept of a row, " +
                     std::to_string(p.thread_capacity) + " candidates a thread";
  if (p.sample_stride > 0) {
    text += "; every " + std::to_string(p.sample_stride) + "th vocabulary row tells how flat it is";
  }
  return text + "\n";
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
