// SPDX-License-Identifier: Apache-2.0
// Shapes, shards and options of all ranks -> chunks, workspace layout, the operators' plans.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "parallel/plan.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

constexpr int64_t kLeastChunk = 512;  // shorter ones spend more on packing weight than they hide
constexpr int64_t kMostChunk = 4096;

std::string number(int64_t value) { return std::to_string(value); }
Error invalid(std::string message) {
  return Error{ErrorKind::invalid_argument, std::move(message)};
}

std::string range_text(const RowRange& r) {
  std::string text = "[";  // appended to: GCC 12 warns about its own operator+
  text.append(number(r.begin)).append(", ").append(number(r.end)).append(")");
  return text;
}

// ---- what ranks must agree on, and how it reads
// --------------------------------------------------

constexpr int64_t kAbsent = -1;

int64_t code(const std::optional<DType>& dtype) {
  return dtype ? static_cast<int64_t>(*dtype) : kAbsent;
}
int64_t code(const std::optional<GradientOutput>& output) {
  return output ? 2 * static_cast<int64_t>(output->dtype) + (output->accumulate ? 1 : 0) : kAbsent;
}
std::string dtype_text(int64_t value) {
  return value == kAbsent ? "none" : name_of(static_cast<DType>(value));
}
std::string output_text(int64_t value) {
  if (value == kAbsent) return "none";
  return dtype_text(value / 2).append(value % 2 == 1 ? ", accumulated" : "");
}
std::string rows_text(int64_t value) { return value == 0 ? "all" : "slice"; }
std::string isa_text(int64_t value) { return name_of(static_cast<Isa>(value)); }
std::string flag_text(int64_t value) { return value == 0 ? "false" : "true"; }

// ISA: statistics of other kernels have other bits, and so would the merge on every rank.
std::vector<Agreed> agreed(const Shape& shape, const VocabParallelTypes& types, Isa isa) {
  return {{"BT", shape.BT, number},
          {"V", shape.V, number},
          {"H", shape.H, number},
          {"operand", static_cast<int64_t>(types.operand), dtype_text},
          {"multiply", code(types.multiply), dtype_text},
          {"target's dtype", static_cast<int64_t>(types.target), dtype_text},
          {"grad_input", code(types.grad_input), output_text},
          {"grad_weight", code(types.grad_weight), output_text},
          {"input_rows", static_cast<int64_t>(types.input_rows), rows_text},
          {"grad_input_rows", static_cast<int64_t>(types.grad_input_rows), rows_text},
          {"chunk_tokens", types.chunk_tokens, number},
          {"agree_in_run", types.agree_in_run ? 1 : 0, flag_text},
          {"isa", static_cast<int64_t>(isa), isa_text}};
}

// [0, V) without gap or overlap, by ranks in any order.
Result<void> check_cover(const std::vector<RowRange>& cover, int64_t V) {
  std::vector<size_t> order;
  for (size_t r = 0; r < cover.size(); ++r) {
    if (cover[r].size() > 0) order.push_back(r);
  }
  std::ranges::sort(order, {}, [&](size_t r) { return std::pair(cover[r].begin, r); });
  const auto name = [&](size_t r) {
    return "rank " + number(static_cast<int64_t>(r)) + " has " + range_text(cover[r]);
  };
  const std::string rule =
      "; shards must cover [0, V) = [0, " + number(V) + ") without gap or overlap";
  int64_t reached = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const RowRange& next = cover[order[i]];
    if (next.begin > reached) {
      return invalid("rows: no rank has " + range_text({reached, next.begin}) + rule);
    }
    if (next.begin < reached) {
      return invalid("rows: " + name(order[i - 1]) + " and " + name(order[i]) + rule);
    }
    reached = next.end;
  }
  if (reached < V) return invalid("rows: no rank has " + range_text({reached, V}) + rule);
  return {};
}

Result<void> check_arguments(const Shape& shape, const RowRange& rows,
                             const VocabParallelTypes& types, const LossAndGradientTypes& step) {
  if (auto ok = check_shape(shape); !ok) return ok;
  if (auto ok = check_types(step); !ok) return ok;
  if (rows.begin < 0 || rows.end < rows.begin || rows.end > shape.V) {
    return invalid("rows are " + range_text(rows) + ", must be a part of [0, V) = [0, " +
                   number(shape.V) + "), empty or not");
  }
  if (types.chunk_tokens < 0 || types.chunk_tokens % 2 != 0) {
    return invalid("chunk_tokens is " + number(types.chunk_tokens) +
                   ", must be even and not negative; 0 = automatic");
  }
  return {};
}

int64_t choose_chunk(const VocabParallelPlanData& p) {
  const int64_t all = std::max<int64_t>(2, round_up(p.shape.BT, 2));
  // Nothing to hide, or nothing to sum: the products run best in one piece.
  if (p.ranks == 1 || !p.types.grad_input) return all;
  if (p.types.chunk_tokens > 0) return std::min(all, p.types.chunk_tokens);
  return std::min(all, std::clamp(round_up(ceil_div(p.shape.BT, 4), 2), kLeastChunk, kMostChunk));
}

Result<void> plan_operators(VocabParallelPlanData& p, const PlanOptions& options) {
  const Shape local{p.shape.BT, p.rows().size(), p.shape.H};
  auto forward = plan_forward(
      local, {.operand = p.types.operand, .multiply = p.types.multiply, .target = p.types.target},
      options);
  if (!forward) return forward.error();
  p.forward = *forward;
  p.threads = forward->threads();
  p.kernels = forward->data().target.kernels;
  if (!p.gradients()) return {};
  GradientTypes types{.operand = p.types.operand,
                      .multiply = p.types.multiply,
                      .target = p.types.target,
                      .grad_input = {},
                      .grad_weight = p.types.grad_weight};
  const bool chunks = p.most_chunks > 1;
  if (p.types.grad_input) types.grad_input = GradientOutput{DType::f32, chunks};
  if (p.sums_grad_weight_apart()) types.grad_weight->dtype = DType::f32;
  auto first = plan_gradient(local, types, options);
  if (!first) return first.error();
  p.first_gradient = p.next_gradient = *first;
  if (chunks && types.grad_weight && !types.grad_weight->accumulate) {
    types.grad_weight->accumulate = true;
    auto next = plan_gradient(local, types, options);
    if (!next) return next.error();
    p.next_gradient = *next;
  }
  return {};
}

int64_t operator_bytes(const VocabParallelPlanData& p) {
  int64_t bytes = p.forward->workspace_bytes();
  for (const auto* gradient : {&p.first_gradient, &p.next_gradient}) {
    if (*gradient) bytes = std::max(bytes, (*gradient)->workspace_bytes());
  }
  return bytes;
}

int64_t least_operator_bytes(const VocabParallelPlanData& p) {
  int64_t bytes = p.forward->data().least_bytes;
  for (const auto* gradient : {&p.first_gradient, &p.next_gradient}) {
    if (*gradient) bytes = std::max(bytes, (*gradient)->data().least_bytes);
  }
  return bytes;
}

void lay_out(VocabParallelPlanData& p) {
  const int64_t BT = p.shape.BT;
  const int64_t row_bytes = p.shape.H * 4;
  Layout l;
  p.statements = l.add(p.ranks * static_cast<int64_t>(sizeof(Statement)));
  if (p.input_is_sliced()) {
    p.input_mine = l.add(p.input_slice_bytes());
    p.input_all = l.add(p.ranks * p.input_slice_bytes());
  }
  p.block = l.add(p.block_bytes());
  p.blocks = l.add(p.ranks * p.block_bytes());
  p.target_mask = l.add(ceil_div(BT, 8));
  p.masked_target = l.add(BT * size_of(p.types.target));
  p.logits_max = l.add(BT * 4);
  p.sum_exp_logits = l.add(BT * 4);
  p.sum_low = l.add(BT * 4);
  p.predicted_logits = l.add(BT * 4);
  if (p.gradients()) {
    p.active = l.add(BT * 8);
    p.slice_starts = l.add((p.ranks + 1) * 8);
    p.counts = l.add(p.ranks * 8);
    p.grad = l.add(BT * 4);
  }
  if (p.types.grad_input) p.grad_input = l.add(BT * row_bytes);
  if (p.sums_grad_weight_apart()) p.grad_weight = l.add(p.rows().size() * row_bytes);
  for (int i = 0; i < (p.most_chunks > 1 ? 2 : 1); ++i) {
    if (p.copies_chunks()) p.send[i] = l.add(p.most_chunk_rows() * row_bytes);
    if (p.types.grad_input && p.scatters()) p.received[i] = l.add(p.longest_slice() * row_bytes);
  }
  p.operators = l.add(operator_bytes(p));
  p.workspace_bytes = l.bytes();
}

// Everything a rank can do by itself.
Result<void> plan_locally(VocabParallelPlanData& p, const RowRange& rows,
                          const PlanOptions& options) {
  if (auto ok = check_arguments(p.shape, rows, p.types, p.step); !ok) return ok;
  p.chunk_tokens = choose_chunk(p);
  p.most_chunks = std::max<int64_t>(1, p.shape.BT / p.chunk_tokens);
  PlanOptions inner = options;
  inner.workspace_limit_bytes = 0;
  if (auto ok = plan_operators(p, inner); !ok) return ok;
  lay_out(p);
  if (options.workspace_limit_bytes == 0) return {};
  const int64_t least = p.operators + round_up(least_operator_bytes(p), kAlignment);
  if (options.workspace_limit_bytes < least) {
    return Error{ErrorKind::limit_too_small,
                 "workspace_limit_bytes is " + number(options.workspace_limit_bytes) +
                     ", the least possible workspace is " + number(least) + " bytes"};
  }
  inner.workspace_limit_bytes = options.workspace_limit_bytes - p.operators;
  if (auto ok = plan_operators(p, inner); !ok) return ok;
  lay_out(p);
  return {};
}

}  // namespace

Result<VocabParallelPlan> plan_vocab_parallel_linear_cross_entropy(Communicator& communicator,
                                                                   const Shape& shape,
                                                                   const RowRange& rows,
                                                                   const VocabParallelTypes& types,
                                                                   const PlanOptions& options) {
  auto data = std::make_shared<VocabParallelPlanData>();
  VocabParallelPlanData& p = *data;
  p.shape = shape;
  p.ranks = communicator.size();
  p.rank = communicator.rank();
  p.types = types;
  p.step = {.operand = types.operand,
            .multiply = types.multiply,
            .target = types.target,
            .grad_input = types.grad_input,
            .grad_weight = types.grad_weight};
  p.cover.resize(static_cast<size_t>(p.ranks));
  p.cover[static_cast<size_t>(p.rank)] = rows;
  const Result<void> mine = plan_locally(p, rows, options);

  std::vector<Statement> statements(static_cast<size_t>(p.ranks));
  const auto fields = agreed(shape, types, mine ? p.forward->isa() : Isa::scalar);
  if (auto ok = agree(communicator, mine, fields, rows.begin, rows.end, statements); !ok) {
    return ok.error();
  }
  Hash id;
  for (const Agreed& field : fields) id.add(static_cast<uint64_t>(field.value));
  for (size_t r = 0; r < p.cover.size(); ++r) {
    p.cover[r] = {statements[r].own[0], statements[r].own[1]};
    id.add(static_cast<uint64_t>(p.cover[r].begin));
    id.add(static_cast<uint64_t>(p.cover[r].end));
  }
  p.id = id.value();
  if (auto ok = check_cover(p.cover, shape.V); !ok) return ok.error();
  p.slice = p.slice_of(p.rank);
  return VocabParallelPlan(std::move(data));
}

int64_t VocabParallelPlan::workspace_bytes() const { return data_->workspace_bytes; }
int VocabParallelPlan::threads() const { return data_->threads; }
Isa VocabParallelPlan::isa() const { return data_->forward->isa(); }
const Shape& VocabParallelPlan::shape() const { return data_->shape; }
const RowRange& VocabParallelPlan::rows() const { return data_->rows(); }
const RowRange& VocabParallelPlan::slice() const { return data_->slice; }
int64_t VocabParallelPlan::chunk_tokens() const { return data_->chunk_tokens; }
const VocabParallelTypes& VocabParallelPlan::types() const { return data_->types; }

std::string VocabParallelPlan::describe() const {
  const VocabParallelPlanData& p = *data_;
  std::string text = "vocabulary parallel: rank " + number(p.rank) + " of " + number(p.ranks) +
                     ", vocabulary rows " + range_text(p.rows()) + " of " + number(p.shape.V) +
                     "\n";
  if (p.input_is_sliced() || (p.types.grad_input && p.scatters())) {
    text += "  tokens " + range_text(p.slice) + " of " + number(p.shape.BT) + " are this rank's\n";
  }
  text += "  forward: one all-gather of " + number(p.block_bytes()) +
          " bytes from each rank (12 per "
          "token and a header)";
  if (p.input_is_sliced()) {
    text += ", after one of " + number(p.input_slice_bytes()) + " bytes of input";
  }
  text += "\n";
  if (p.types.grad_input) {
    text += std::string("  grad_input: fp32 sums ") +
            (p.scatters() ? "reduce-scattered" : "all-reduced") + " in at most " +
            number(p.most_chunks) + (p.most_chunks == 1 ? " chunk" : " chunks of about ") +
            (p.most_chunks == 1 ? "" : number(p.chunk_tokens) + " tokens") + "\n";
  }
  if (p.sums_grad_weight_apart()) text += "  grad_weight: summed in fp32 in the workspace\n";
  text += "  workspace: " + number(p.workspace_bytes) + " bytes, of which the operators have " +
          number(operator_bytes(p)) + "\n";
  text += p.forward->describe();
  if (p.first_gradient) text += p.first_gradient->describe();
  return text;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
