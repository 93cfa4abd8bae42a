// SPDX-License-Identifier: Apache-2.0
// Shapes, shards and options of all ranks -> chunks, workspace layout, the operators' plans.
#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "parallel/plan.h"
#include "parallel/sparse_ranks.h"

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
std::string strategy_text(int64_t value) {
  switch (static_cast<Strategy>(value)) {
    case Strategy::automatic:
      return "automatic";
    case Strategy::one_pass:
      return "one_pass";
    case Strategy::recompute:
      return "recompute";
  }
  return number(value);
}
std::string tolerance_text(int64_t bits) {
  return std::to_string(std::bit_cast<float>(static_cast<int32_t>(bits)));
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
          {"grad_tolerance", std::bit_cast<int32_t>(types.grad_tolerance), tolerance_text},
          {"grad_input", code(types.grad_input), output_text},
          {"grad_weight", code(types.grad_weight), output_text},
          {"input_rows", static_cast<int64_t>(types.input_rows), rows_text},
          {"grad_input_rows", static_cast<int64_t>(types.grad_input_rows), rows_text},
          {"chunk_tokens", types.chunk_tokens, number},
          {"agree_in_run", types.agree_in_run ? 1 : 0, flag_text},
          {"strategy", static_cast<int64_t>(types.strategy), strategy_text},
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
  if (types.grad_tolerance > 0 && types.strategy == Strategy::recompute) {
    return invalid("grad_tolerance is " + std::to_string(types.grad_tolerance) +
                   ", must be 0 with the strategy recompute: a sparse gradient is one pass");
  }
  if (types.chunk_tokens < 0 || types.chunk_tokens % 2 != 0) {
    return invalid("chunk_tokens is " + number(types.chunk_tokens) +
                   ", must be even and not negative; 0 = automatic");
  }
  return {};
}

// Tokens whose sum is to be hidden behind the next ones.
int64_t wanted_chunk(const VocabParallelPlanData& p) {
  const int64_t all = std::max<int64_t>(2, round_up(p.shape.BT, 2));
  // Nothing to hide, or nothing to sum: the products run best in one piece.
  if (p.ranks == 1 || !p.types.grad_input) return all;
  if (p.types.chunk_tokens > 0) return std::min(all, p.types.chunk_tokens);
  return std::min(all, std::clamp(round_up(ceil_div(p.shape.BT, 4), 2), kLeastChunk, kMostChunk));
}

void set_recompute(VocabParallelPlanData& p) {
  p.one_pass = false;
  p.chunk_tokens = wanted_chunk(p);
  p.most_chunks = std::max<int64_t>(1, p.shape.BT / p.chunk_tokens);
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
  if (p.one_pass && p.sparse) {
    return std::max(
        {p.step_plan.workspace_bytes, p.after_plan.workspace_bytes, p.sparse->workspace_bytes});
  }
  if (p.one_pass) return p.step_plan.workspace_bytes;
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

// What lies before the operators' workspace depends on the chunks alone.
void lay_out(VocabParallelPlanData& p) {
  const int64_t BT = p.shape.BT;
  const int64_t row_bytes = p.shape.H * 4;
  Layout l;
  p.statements = l.add(p.ranks * static_cast<int64_t>(sizeof(Statement)));
  if (p.input_is_sliced()) {
    p.input_mine = l.add(p.input_slice_bytes());
    p.input_all = l.add(p.ranks * p.input_slice_bytes());
  }
  for (int64_t i = 0; i < (p.one_pass ? p.regions() : 1); ++i) {
    p.block[i] = l.add(p.most_block_bytes());
    p.blocks[i] = l.add(p.ranks * p.most_block_bytes());
  }
  if (p.gradients()) {
    p.active = l.add(BT * 8);
    p.slice_starts = l.add((p.ranks + 1) * 8);
    p.counts = l.add(p.ranks * 8);
  }
  for (int64_t i = 0; i < p.regions(); ++i) {
    if (p.copies_chunks()) p.send[i] = l.add(p.most_chunk_rows() * row_bytes);
    if (p.types.grad_input && p.scatters()) p.received[i] = l.add(p.longest_slice() * row_bytes);
  }
  if (p.one_pass) {
    p.output_rows = l.add(p.most_chunk_rows() * 8);
    p.merged_predicted = l.add(p.most_chunk_rows() * 4);
  } else {
    p.target_mask = l.add(ceil_div(BT, 8));
    p.masked_target = l.add(BT * size_of(p.types.target));
    p.logits_max = l.add(BT * 4);
    p.sum_exp_logits = l.add(BT * 4);
    p.sum_low = l.add(BT * 4);
    p.predicted_logits = l.add(BT * 4);
    if (p.gradients()) p.grad = l.add(BT * 4);
    if (p.types.grad_input) p.grad_input = l.add(BT * row_bytes);
    if (p.sums_grad_weight_apart()) p.grad_weight = l.add(p.rows().size() * row_bytes);
  }
  if (p.one_pass && p.sparse) {
    for (auto* statistics : {&p.logits_max, &p.sum_exp_logits, &p.predicted_logits}) {
      *statistics = l.add(BT * 4);
    }
    p.kinds = l.add(BT);
    p.sparse_rows = l.add(BT * 8);
    const int64_t rows = p.sparse->block_rows();
    const int64_t of_a_row = std::max({static_cast<int64_t>(sizeof(Sample)),
                                       SparseRanks::kVectors * 4, p.sparse->record_bytes()});
    const int64_t sent =
        kAlignment + round_up(std::max(rows * of_a_row, p.sparse->group_rows), kAlignment);
    p.sparse_block = l.add(sent);
    p.sparse_blocks = l.add(p.ranks * sent);
    p.sampled_max = l.add(rows * 4);
    p.late = l.add(rows);
    p.merged_predicted = l.add(std::max(p.most_chunk_rows(), rows) * 4);
    if (p.types.grad_input) p.grad_input = l.add(BT * row_bytes);
  }
  p.operators = l.add(operator_bytes(p));
  if (p.one_pass && !p.sparse) {
    p.logits_max = p.operators + p.step_plan.logits_max;
    p.sum_exp_logits = p.operators + p.step_plan.sum_exp_logits;
    p.predicted_logits = p.operators + p.step_plan.predicted_logits;
  }
  p.workspace_bytes = l.bytes();
}

Result<void> plan_recompute(VocabParallelPlanData& p, const PlanOptions& options) {
  set_recompute(p);
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

// ---- one pass -----------------------------------------------------------------------------------
//
// Every rank says which lengths of blocks fit its limit, and all of them take the longest that fits
// everywhere. (Longer blocks do not need more in every case: a single one needs no sums beside a
// 16-bit grad_weight.) What they choose from follows from what they agree on: the chunk that hides
// the communication, and by fourths of an octave more and shorter ones, down to 64 tokens, below
// which packing weight again costs more than the fourth product. If the length is ours to choose,
// one block of all tokens comes last.

using Choices = uint64_t;  // a bit for each of these, and one for recompute
constexpr int kOneBlock = 62;
constexpr int kRecompute = 63;

// How many blocks choice i has; 0: it is none.
int64_t blocks_of_choice(const VocabParallelPlanData& p, int i) {
  const int64_t wanted = std::max<int64_t>(1, ceil_div(p.shape.BT, wanted_chunk(p)));
  if (i == 0) return wanted;
  if (i == kOneBlock) return p.types.chunk_tokens == 0 && wanted > 1 ? 1 : 0;
  constexpr int64_t kFourths[] = {64, 76, 91, 108};  // of an octave, in 64ths
  const auto blocks = [&](int n) { return ceil_div((wanted * kFourths[n % 4]) << (n / 4), 64); };
  if (blocks(i) == blocks(i - 1) || p.shape.BT / blocks(i) < 64) return 0;
  return blocks(i);
}

void set_blocks(VocabParallelPlanData& p, const Target& target, int64_t blocks,
                const PlanOptions& options) {
  p.one_pass = true;
  p.most_chunks = blocks;
  p.chunk_tokens = std::max<int64_t>(2, round_up(ceil_div(p.shape.BT, blocks), 2));
  LossAndGradientPlanData& step = p.step_plan;
  step = {};
  step.shape = {p.shape.BT, p.rows().size(), p.shape.H};
  step.types = p.step;
  step.types.grad_tolerance = 0.0f;
  step.limit_bytes = options.workspace_limit_bytes > 0 ? options.workspace_limit_bytes
                                                       : default_limit(step.shape, step.types);
  if (step.types.grad_input) step.types.grad_input = GradientOutput{.dtype = DType::f32};
  step.target = target;
  step.two_blocks = p.ranks > 1 && blocks > 1;
  // The limit is the operators' where it is ours, else of all.
  if (options.workspace_limit_bytes > 0) {
    lay_out(p);
    step.limit_bytes -= p.operators;
  }
  p.after_plan = step;
  if (step.types.grad_weight) p.after_plan.types.grad_weight->accumulate = true;
}

// What the least blocks of one pass need, with `blocks` of tokens.
int64_t least_bytes_of(const VocabParallelPlanData& p, int64_t blocks) {
  int64_t bytes = least_one_pass_bytes(p.step_plan, p.most_chunk_rows(), blocks);
  if (!p.sparse) return bytes;
  return std::max(bytes, least_one_pass_bytes(p.after_plan, p.most_chunk_rows(), blocks));
}

// Choices of a sparse gradient that fit this rank's limit beside the shortest blocks of one pass;
// plan.sparse becomes the first of them. Without a limit those that fit the default one, or all.
Choices fitting_sparse(VocabParallelPlanData& plan, const PlanOptions& options, int64_t& least) {
  const Target& target = plan.forward->data().target;
  int64_t blocks = 1;
  for (int i = 0; i < kOneBlock; ++i) blocks = std::max(blocks, blocks_of_choice(plan, i));
  Choices fitting = 0, all = 0;
  for (int i = kSparseChoices - 1; i >= 0; --i) {
    VocabParallelPlanData p = plan;
    if (!set_sparse_choice(*p.sparse, i)) continue;
    all |= Choices{1} << i;
    set_blocks(p, target, blocks, options);
    lay_out(p);
    const bool limited = options.workspace_limit_bytes > 0;
    const int64_t bytes = p.sparse->workspace_bytes + (limited ? p.operators : 0);
    const int64_t limit = limited ? options.workspace_limit_bytes : p.step_plan.limit_bytes;
    least = std::min(least, p.operators + p.sparse->workspace_bytes);
    if (bytes <= limit) fitting |= Choices{1} << i;
  }
  if (fitting == 0 && options.workspace_limit_bytes == 0) fitting = all;
  if (fitting != 0) set_sparse_choice(*plan.sparse, std::countr_zero(fitting));
  return fitting;
}

// The choices that fit this rank's limit; least: what the most frugal of them needs.
Choices fitting_choices(const VocabParallelPlanData& plan, const PlanOptions& options,
                        int64_t& least) {
  const Target& target = plan.forward->data().target;
  Choices fitting = 0;
  for (int i = 0; i <= kOneBlock; ++i) {
    const int64_t blocks = blocks_of_choice(plan, i);
    if (blocks == 0) continue;
    VocabParallelPlanData p = plan;
    set_blocks(p, target, blocks, options);
    const bool limited = options.workspace_limit_bytes > 0;
    const int64_t sparse = p.sparse && limited ? p.sparse->workspace_bytes : 0;
    const int64_t bytes = std::max(least_bytes_of(p, blocks), sparse);
    if (bytes <= p.step_plan.limit_bytes) fitting |= Choices{1} << i;
    lay_out(p);
    least = std::min(least, p.operators + bytes);
  }
  return fitting;
}

// Everything a rank can do by itself; which strategies are open to it.
Result<Choices> plan_locally(VocabParallelPlanData& p, const RowRange& rows,
                             const PlanOptions& options, Choices& sparse) {
  if (auto ok = check_arguments(p.shape, rows, p.types, p.step); !ok) return ok.error();
  Choices open = 0;
  const Result<void> recomputed = plan_recompute(p, options);
  if (!recomputed && recomputed.error().kind != ErrorKind::limit_too_small) {
    return recomputed.error();
  }
  int64_t least = INT64_MAX;
  const auto too_small = [&](const std::string& what) {
    return Error{ErrorKind::limit_too_small,
                 options.workspace_limit_bytes > 0
                     ? "workspace_limit_bytes is " + number(options.workspace_limit_bytes) +
                           ", the least possible workspace of " + what + " is " + number(least) +
                           " bytes"
                     : "workspace_limit_bytes: " + what +
                           " does not fit the default limit, the least possible workspace is " +
                           number(least) + " bytes"};
  };
  if (p.types.grad_tolerance > 0 && p.gradients() && p.shape.BT > 0 && p.shape.V > 0 &&
      p.shape.H > 0) {
    p.sparse = begin_split({p.shape.BT, rows.size(), p.shape.H}, p.shape.V, rows.begin, p.step,
                           p.forward->data().target);
    sparse = fitting_sparse(p, options, least);
    if (sparse == 0) {
      if (least == INT64_MAX) return beyond_32_bits(p.sparse->shape, p.sparse->target.threads);
      return too_small("a sparse gradient");
    }
  } else if (p.types.strategy != Strategy::one_pass) {
    if (recomputed) open |= Choices{1} << kRecompute;
    if (p.types.strategy == Strategy::recompute || !p.gradients()) {
      if (!recomputed) return recomputed.error();
      return open;
    }
  }
  least = INT64_MAX;
  open |= fitting_choices(p, options, least);
  if (open != 0) return open;
  if (p.sparse) return too_small("a sparse gradient");
  if (p.types.strategy == Strategy::automatic) return recomputed.error();
  return too_small("one pass");
}

constexpr const char* kNoCommonBlocks =
    "workspace_limit_bytes: no blocks of a sparse gradient fit the limits of all ranks";

// The same choice on every rank. fits: beside the sparse gradient that all have agreed on, too.
Result<void> choose(VocabParallelPlanData& p, const std::vector<Choices>& open,
                    const PlanOptions& options, bool& fits) {
  Choices common = ~Choices{0};
  for (const Choices& of_rank : open) common &= of_rank;
  const auto without = [&](Choices wanted) {  // the first rank that has none of these
    const auto found =
        std::ranges::find_if(open, [&](Choices of_rank) { return (of_rank & wanted) == 0; });
    return found == open.end() ? "" : " of rank " + number(found - open.begin());
  };
  constexpr Choices kOnePass = ~(Choices{1} << kRecompute);
  for (int i = 0; i <= kOneBlock; ++i) {
    if ((common >> i & 1) == 0) continue;
    p.why = p.types.strategy == Strategy::one_pass ? "asked for" : "fits the limit of every rank";
    const Target target = p.forward->data().target;
    const int64_t blocks = blocks_of_choice(p, i);
    set_blocks(p, target, blocks, options);
    // Was found to fit, above, but beside this rank's own choice of a sparse gradient.
    fits = choose_one_pass_blocks(p.step_plan, p.most_chunk_rows(), blocks) &&
           (!p.sparse || choose_one_pass_blocks(p.after_plan, p.most_chunk_rows(), blocks));
    if (!fits) p.step_plan.workspace_bytes = least_bytes_of(p, blocks);
    lay_out(p);
    return {};
  }
  if ((common >> kRecompute & 1) != 0) {
    p.why = p.types.strategy == Strategy::recompute ? "asked for"
            : !p.gradients()                        ? "no gradient is wanted"
            : without(kOnePass).empty()
                ? "no length of blocks in one pass fits the limits of all ranks"
                : "one pass does not fit the limit" + without(kOnePass);
    return {};
  }
  return Error{ErrorKind::limit_too_small,
               "workspace_limit_bytes: no length of blocks in one pass fits the limits of all "
               "ranks, and recomputing does not fit the limit" +
                   without(Choices{1} << kRecompute)};
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
            .grad_tolerance = types.grad_tolerance,
            .grad_input = types.grad_input,
            .grad_weight = types.grad_weight};
  p.cover.resize(static_cast<size_t>(p.ranks));
  p.cover[static_cast<size_t>(p.rank)] = rows;
  Choices sparse = 0;
  const Result<Choices> choices = plan_locally(p, rows, options, sparse);
  const Result<void> mine = choices ? Result<void>() : choices.error();

  std::vector<Statement> statements(static_cast<size_t>(p.ranks));
  const auto fields = agreed(shape, types, mine ? p.forward->isa() : Isa::scalar);
  const int64_t own[] = {rows.begin, rows.end, choices ? std::bit_cast<int64_t>(*choices) : 0,
                         std::bit_cast<int64_t>(sparse)};
  if (auto ok = agree(communicator, mine, fields, own, statements); !ok) return ok.error();
  Hash id;
  for (const Agreed& field : fields) id.add(static_cast<uint64_t>(field.value));
  for (size_t r = 0; r < p.cover.size(); ++r) {
    p.cover[r] = {statements[r].own[0], statements[r].own[1]};
    id.add(static_cast<uint64_t>(p.cover[r].begin));
    id.add(static_cast<uint64_t>(p.cover[r].end));
  }
  if (auto ok = check_cover(p.cover, shape.V); !ok) return ok.error();
  std::vector<Choices> open;
  for (const Statement& s : statements) open.push_back(std::bit_cast<Choices>(s.own[2]));
  int sparse_choice = 0;
  if (p.sparse) {
    Choices common = ~Choices{0};
    for (const Statement& s : statements) common &= std::bit_cast<Choices>(s.own[3]);
    if (common == 0) return Error{ErrorKind::limit_too_small, kNoCommonBlocks};
    sparse_choice = std::countr_zero(common);
    set_sparse_choice(*p.sparse, sparse_choice);
  }
  bool fits = true;
  if (auto ok = choose(p, open, options, fits); !ok) return ok.error();
  if (p.sparse) {
    // What every rank found to fit may not fit together.
    fits = fits && (options.workspace_limit_bytes == 0 ||
                    p.workspace_bytes <= options.workspace_limit_bytes);
    const Result<void> fitting =
        fits ? Result<void>()
             : Error{ErrorKind::limit_too_small, "workspace_limit_bytes is " +
                                                     number(options.workspace_limit_bytes) +
                                                     ", the blocks that fit on all ranks need " +
                                                     number(p.workspace_bytes) + " bytes"};
    if (auto ok = agree(communicator, fitting, {}, {}, statements); !ok) return ok.error();
  }
  id.add(static_cast<uint64_t>(p.one_pass ? p.most_chunks : 0));
  id.add(static_cast<uint64_t>(sparse_choice));
  p.id = id.value() != 0 ? id.value() : 1;
  p.slice = p.slice_of(p.rank);
  return VocabParallelPlan(std::move(data));
}

int64_t VocabParallelPlan::workspace_bytes() const { return data_->workspace_bytes; }
int VocabParallelPlan::threads() const { return data_->threads; }
Isa VocabParallelPlan::isa() const { return data_->forward->isa(); }
Strategy VocabParallelPlan::strategy() const {
  return data_->one_pass ? Strategy::one_pass : Strategy::recompute;
}
const Shape& VocabParallelPlan::shape() const { return data_->shape; }
const RowRange& VocabParallelPlan::rows() const { return data_->rows(); }
const RowRange& VocabParallelPlan::slice() const { return data_->slice; }
int64_t VocabParallelPlan::chunk_tokens() const { return data_->chunk_tokens; }
int64_t VocabParallelPlan::id() const { return data_->id; }
const VocabParallelTypes& VocabParallelPlan::types() const { return data_->types; }

std::string VocabParallelPlan::describe() const {
  const VocabParallelPlanData& p = *data_;
  std::string text = "vocabulary parallel: rank " + number(p.rank) + " of " + number(p.ranks) +
                     ", vocabulary rows " + range_text(p.rows()) + " of " + number(p.shape.V) +
                     ", " + (p.one_pass ? "one pass" : "recompute") + ": " + p.why + "\n";
  if (p.input_is_sliced() || (p.types.grad_input && p.scatters())) {
    text += "  tokens " + range_text(p.slice) + " of " + number(p.shape.BT) + " are this rank's\n";
  }
  text += "  forward: " +
          (p.one_pass && p.most_chunks > 1
               ? "an all-gather for each of at most " + number(p.most_chunks) + " blocks of " +
                     number(p.chunk_tokens) + " tokens, "
               : std::string("one all-gather of ")) +
          number(p.block_bytes(p.one_pass ? p.chunk_tokens : p.shape.BT)) +
          " bytes from each rank (12 per token and a header)";
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
  if (p.sparse) text += sparse_text(*p.sparse);
  if (p.one_pass) return text + one_pass_text(p.step_plan);
  text += p.forward->describe();
  if (p.first_gradient) text += p.first_gradient->describe();
  return text;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
