// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/constants.h"
#include "sparse_plan.h"
#include "team.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

constexpr double kFlopsPerThread = 4e6;  // some tens of microseconds on a current core

double product_flops(const Shape& s) {
  return 2.0 * static_cast<double>(s.BT) * static_cast<double>(s.V) * static_cast<double>(s.H);
}

// flops: of the whole call, or less than 0 when the operator settles its threads itself.
Result<Target> choose_target(const PlanOptions& options, DType operand,
                             const std::optional<DType>& multiply, double flops) {
  if (auto ok = check_options(options); !ok) return ok.error();
  Target target;
  const auto isa = options.isa ? parse_isa(name_of(*options.isa)) : default_isa();
  if (!isa) return isa.error();
  target.isa = *isa;
  target.threads = options.threads > 0 ? options.threads : default_threads();
  if (options.threads == 0 && flops >= 0) {
    // A small problem is done before a team has met, and meeting is slow on a busy machine.
    const double worth = flops / kFlopsPerThread;
    if (worth < target.threads) target.threads = std::max(1, static_cast<int>(worth));
  }
  target.kernels = cpu::kernels_of(target.isa);
  target.multiply = multiply.value_or(operand);
  target.l2_bytes = machine_info().l2_bytes;
  target.gemm = target.multiply == DType::bf16 && target.kernels->bf16_dot != nullptr
                    ? target.kernels->bf16_dot
                    : target.kernels->f32;
  switch (operand) {
    case DType::f16:
      target.source = cpu::PackSource::f16;
      break;
    case DType::bf16:
      target.source = cpu::PackSource::bf16;
      break;
    default:
      target.source =
          target.multiply == DType::bf16 ? cpu::PackSource::f32_as_bf16 : cpu::PackSource::f32;
  }
  return target;
}

std::string bytes_text(int64_t bytes) {
  char text[64];
  if (bytes < 10 * 1024) {
    std::snprintf(text, sizeof(text), "%lld B", static_cast<long long>(bytes));
  } else if (bytes < int64_t{10} << 20) {
    std::snprintf(text, sizeof(text), "%.1f KiB", static_cast<double>(bytes) / 1024);
  } else {
    std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  }
  return text;
}

std::string percent_text(double share) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f %%", 100 * share);
  return text;
}

std::string shape_text(const Shape& s) {
  return "[BT, V, H] = [" + std::to_string(s.BT) + ", " + std::to_string(s.V) + ", " +
         std::to_string(s.H) + "]";
}

std::string target_text(const Target& t) {
  return std::string(name_of(t.isa)) + ", " + std::to_string(t.threads) +
         (t.threads == 1 ? " thread" : " threads") + ", multiplied as " +
         (t.gemm->k_unit == 2 ? "bf16 pairs" : "fp32") + " in tiles of " +
         std::to_string(t.gemm->mr) + " x " + std::to_string(t.gemm->nr);
}

// Where an output is summed, in words.
std::string where_text(const std::optional<GradientOutput>& output, Accumulator a) {
  if (!output) return std::string("not wanted");
  std::string text = name_of(output->dtype);
  if (output->accumulate) text += ", added to what the buffer holds";
  switch (a) {
    case Accumulator::none:
      return text + ", complete in one step";
    case Accumulator::output:
      return text + ", summed in the output itself";
    case Accumulator::workspace:
      return text + ", summed in fp32 in the workspace";
  }
  return text;
}

Error too_small(const PlanOptions& options, int64_t least) {
  return Error{ErrorKind::limit_too_small,
               "workspace_limit_bytes is " + std::to_string(options.workspace_limit_bytes) +
                   ", the least possible workspace is " + std::to_string(least) + " bytes"};
}

// ---- forward -----------------------------------------------------------------------------------

}  // namespace

int64_t lay_out(ForwardPlanData& p) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t units = ceil_div(p.shape.H, g.k_unit);
  const int64_t seg_panels = cpu::kSegmentColumns / g.nr;
  Layout l;
  if (p.few) {
    p.input_panels = l.add(units * p.few.width * 4);
    p.weight_panels = 0;
    p.tiles_stride = round_up(p.few.own_bytes(g), kAlignment);
  } else {
    p.input_panels = l.add(p.token_panels() * units * g.mr * 4);
    p.weight_panels = l.add(p.own_panels ? 0 : p.chunk_segments * seg_panels * units * g.nr * 4);
    const int64_t panels = p.own_panels ? p.token_panels() : p.group;
    const int64_t weight = p.own_panels ? units * g.nr * 4 : 0;
    p.tiles_stride = round_up(panels * seg_panels * g.mr * g.nr * 4 + weight, kAlignment);
  }
  p.tiles = l.add(p.target.threads * p.tiles_stride);
  const int64_t segments = p.partial_segments();
  p.partial_max = l.add(segments * p.token_block * 4);
  p.partial_sum = l.add(segments * p.token_block * 4);
  p.held_tiles = l.add(p.held ? p.token_panels() * p.vocab_panels() * p.held_tile_bytes() : 0);
  p.row_index = l.add(p.token_block * 8);
  p.local_target = l.add(p.token_block * 8);
  p.run_max = l.add(p.token_block * 4);
  p.run_sum = l.add(p.token_block * 4);
  p.run_low = l.add(p.token_block * 4);
  p.predicted = l.add(p.token_block * 4);
  if (p.collects) {
    p.partial_rest = l.add(segments * p.token_block * 4);
    for (int64_t* row :
         {&p.rest_max, &p.rest_sum, &p.rest_low, &p.token_hash, &p.threshold, &p.reference}) {
      *row = l.add(p.token_block * 4);
    }
  }
  return p.workspace_bytes = l.bytes();
}

namespace {

// The share of a team's time that waits for its slowest member when `units` equal pieces of work
// are shared out.
double idle_share(int64_t units, int64_t threads) {
  if (units == 0) return 0;
  const auto slots = static_cast<double>(ceil_div(units, threads) * threads);
  return 1.0 - static_cast<double>(units) / slots;
}

// Rounds of (segment, token panel) units that the slowest member of the team computes for a block:
// the units of a chunk are shared out between two barriers.
int64_t forward_rounds(const ForwardPlanData& p) {
  const int64_t threads = p.target.threads;
  const int64_t panels = p.token_panels();
  const int64_t segments = ceil_div(p.shape.V, cpu::kSegmentColumns);
  return segments / p.chunk_segments * ceil_div(p.chunk_segments * panels, threads) +
         ceil_div(segments % p.chunk_segments * panels, threads);
}
double forward_idle_share(const ForwardPlanData& p) {
  if (p.own_segments())
    return idle_share(ceil_div(p.shape.V, cpu::kSegmentColumns), p.target.threads);
  const int64_t units = ceil_div(p.shape.V, cpu::kSegmentColumns) * p.token_panels();
  if (units == 0) return 0;
  return 1.0 - static_cast<double>(units) /
                   static_cast<double>(forward_rounds(p) * int64_t{p.target.threads});
}

// Estimated cycles of a forward with these blocks: rounds of (segment, token panel) units between
// two barriers, weight packed once per block, and what a walk over a segment costs when few panels
// share it.
double forward_cycles(const ForwardPlanData& p) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t segments = ceil_div(p.shape.V, cpu::kSegmentColumns);
  const auto H = static_cast<double>(p.shape.H);
  constexpr double kBarriers = 10e3;  // two per chunk, with the wait for the slowest thread
  constexpr double kPack = 0.35;      // a transpose in registers, per element
  constexpr double kWalk = 0.08;      // of the unit's time, if one panel walks alone
  constexpr double kShort = 0.04;     // if it has half as many rows as the tile: more of B a flop
  const double missing = 2.0 * (g.mr - p.panel_rows) / g.mr;
  const double unit = static_cast<double>(p.panel_rows) * cpu::kSegmentColumns * (H / 64 + 1) *
                      (1 + kWalk / p.group + kShort * missing);
  const double pack = kPack * static_cast<double>(p.shape.V) * H / p.target.threads;
  const double chunks = static_cast<double>(ceil_div(segments, p.chunk_segments));
  const auto blocks = static_cast<double>(ceil_div(p.shape.BT, p.token_block));
  return blocks * (static_cast<double>(forward_rounds(p)) * unit + pack + chunks * kBarriers);
}

}  // namespace

// Up to four vectors of tokens, packing weight costs more than it saves: at (BT, 128256, 2048) on
// two cores 53 instead of 34 ms for 64 tokens, the same for 96, 22 instead of 8 ms for one.
FewTokens few_tokens(const cpu::GemmKernels& g, int64_t BT) {
  if (BT > 4 * g.lanes) return {};
  return {.width = static_cast<int>(BT <= g.few ? std::bit_ceil(static_cast<uint64_t>(BT))
                                                : round_up(BT, g.lanes))};
}

namespace {

constexpr int kSmallTeam = 8;  // full panels and whole segments serve it

// Segments of one's own where all tokens meet a panel of weight in the caches; unchanged otherwise.
ForwardPlanData with_own_segments(ForwardPlanData p) {
  constexpr int64_t kMostTokens = 1024;             // their tiles of a segment: 1 MiB a thread
  constexpr int64_t kMostBytes = int64_t{8} << 20;  // of their input
  constexpr double kMostIdle = 0.03;
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t BT = std::max<int64_t>(p.shape.BT, 1);
  p.few = few_tokens(g, BT);
  const bool fits =
      BT <= kMostTokens && round_up(BT, g.mr) * ceil_div(p.shape.H, g.k_unit) * 4 <= kMostBytes;
  const double idle = idle_share(ceil_div(p.shape.V, cpu::kSegmentColumns), p.target.threads);
  p.own_panels = !p.few && fits && (p.target.threads <= kSmallTeam || idle <= kMostIdle);
  if (!p.own_segments()) return p;
  p.token_block = BT;
  p.panel_rows = g.mr;
  p.chunk_segments = std::max<int64_t>(1, ceil_div(p.shape.V, cpu::kSegmentColumns));
  lay_out(p);
  return p;
}

// Tokens in blocks, as many rows per block as fit, since weight is packed once per block; weight in
// chunks of segments, which only have to keep the threads evenly busy between two barriers.
Result<void> choose_blocks(ForwardPlanData& p, const PlanOptions& options) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t units = ceil_div(p.shape.H, g.k_unit);
  const int64_t segments = std::max<int64_t>(1, ceil_div(p.shape.V, cpu::kSegmentColumns));
  const int64_t BT = std::max<int64_t>(p.shape.BT, 1);
  p.panel_rows = g.mr;

  p.token_block = std::min<int64_t>(BT, g.mr);
  p.chunk_segments = 1;
  p.group = 1;
  const int64_t least = p.least_bytes = lay_out(p);
  int64_t limit = options.workspace_limit_bytes;
  if (limit == 0) {
    // Beyond H = 8192 the least blocks that are not slow: 16 panels of tokens and one segment.
    p.token_block = std::min<int64_t>(BT, int64_t{16} * g.mr);
    limit = std::max(kForwardWorkspaceBytes, lay_out(p));
  } else if (limit < least) {
    return too_small(options, least);
  }

  const auto fits = [&](int64_t block, int64_t chunk, int64_t group) {
    p.token_block = block;
    p.chunk_segments = chunk;
    p.group = static_cast<int>(group);
    return lay_out(p) <= limit;
  };
  if (const ForwardPlanData own = with_own_segments(p); own.own_segments()) {
    if (own.workspace_bytes <= limit) {
      p = own;
      return {};
    }
  }
  // Panels that share a walk: half of L2, at most 8. Chunks: enough segments for any team to share
  // evenly; a few MiB of weight serve a small one. Large teams may share shorter panels evenly
  // where full ones leave some of them waiting.
  const int64_t panel_bytes = std::max<int64_t>(1, units * g.mr * 4);
  const int64_t longest = std::min<int64_t>(segments, 4 * std::max(16, p.target.threads));
  const int shortest = p.target.threads > kSmallTeam ? g.mr / 2 + 1 : g.mr;
  double best_cost = 0;
  ForwardPlanData best;
  for (int rows = g.mr; rows >= shortest; rows -= 2) {
    p.panel_rows = rows;
    const int64_t token_panels = ceil_div(BT, rows);
    const int64_t widest =
        std::min(token_panels, std::clamp<int64_t>(p.target.l2_bytes / 2 / panel_bytes, 1, 8));
    for (int64_t group = widest; group > 0; group /= 2) {
      for (int64_t chunk = 1; chunk <= longest; ++chunk) {
        int64_t low = 0;  // the largest block that fits, by bisection over panels
        int64_t high = token_panels;
        while (low < high) {
          const int64_t mid = (low + high + 1) / 2;
          if (fits(std::min(BT, mid * rows), chunk, group)) {
            low = mid;
          } else {
            high = mid - 1;
          }
        }
        if (low == 0) break;
        // Blocks of equal size.
        const int64_t blocks = ceil_div(BT, std::min(BT, low * rows));
        fits(std::min(BT, round_up(ceil_div(BT, blocks), rows)), chunk, group);
        const double cost = forward_cycles(p);
        if (best.token_block == 0 || cost < best_cost) {
          best = p;
          best_cost = cost;
        }
      }
    }
  }
  p = best;
  return {};
}

// ---- gradient ----------------------------------------------------------------------------------

}  // namespace

int64_t lay_out(GradientPlanData& p) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t BT = p.shape.BT;
  const int64_t V = p.shape.V;
  const int64_t H = p.shape.H;
  const bool recompute = p.source == SoftmaxSource::logits;
  const bool want_input = p.types.grad_input.has_value();
  const bool want_weight = p.types.grad_weight.has_value();
  const int64_t h_units = ceil_div(H, g.k_unit);
  const int64_t t_units = ceil_div(p.token_chunk, g.k_unit);
  const int64_t v_units = ceil_div(p.vocab_chunk, g.k_unit);
  const int64_t t_panels = ceil_div(p.token_chunk, g.mr);
  const int64_t v_panels = ceil_div(p.vocab_chunk, g.nr);
  const int64_t tile_bytes = int64_t{g.mr} * g.nr * 4;
  const int64_t h_rows = ceil_div(H, g.mr);
  const int64_t h_cols = ceil_div(H, g.nr);

  const bool one_vocab_chunk = p.vocab_chunk >= V;
  const bool one_token_chunk = p.token_chunk >= BT;
  const auto place = [](const std::optional<GradientOutput>& output, bool complete) {
    if (!output || complete) return Accumulator::none;
    return output->dtype == DType::f32 ? Accumulator::output : Accumulator::workspace;
  };
  p.grad_input_accumulator = place(p.types.grad_input, one_vocab_chunk);
  p.grad_weight_accumulator = place(p.types.grad_weight, one_token_chunk);

  Layout l;
  p.grad_rows = l.add(want_input ? t_panels * v_units * g.mr * 4 : 0);
  if (p.own_panels) {
    p.input_rows = l.add(!recompute ? 0
                         : p.few    ? h_units * p.few.width * 4
                                    : t_panels * h_units * g.mr * 4);
    p.input_cols = l.add(want_weight ? h_cols * t_units * g.nr * 4 : 0);
    Layout own;
    p.weight_rows = own.add(recompute && !p.few ? h_units * g.nr * 4 : 0);
    p.weight_cols = own.add(want_input ? v_units * g.nr * 4 : 0);
    p.grad_cols = own.add(want_weight ? p.own_group * t_units * g.nr * 4 : 0);
    p.weight_pointers = own.add(want_input ? p.vocab_chunk * 8 : 0);
    p.own_stride = own.bytes();
    const int64_t base = l.add(p.target.threads * p.own_stride);
    for (int64_t* offset : {&p.weight_rows, &p.weight_cols, &p.grad_cols, &p.weight_pointers})
      *offset += base;
    p.few_stride = p.few ? round_up(p.few.own_bytes(g), kAlignment) : 0;
    p.few_logits = l.add(p.target.threads * p.few_stride);
  } else {
    p.input_rows = l.add(recompute ? t_panels * h_units * g.mr * 4 : 0);
    p.input_cols = l.add(want_weight ? h_rows * t_units * g.mr * 4 : 0);
    p.weight_rows = l.add(recompute ? v_panels * h_units * g.nr * 4 : 0);
    p.weight_cols = l.add(want_input ? h_cols * v_units * g.nr * 4 : 0);
    p.grad_cols = l.add(want_weight ? v_panels * t_units * g.nr * 4 : 0);
  }
  p.accumulator_bytes = 0;
  if (p.grad_input_accumulator == Accumulator::workspace) {
    // Chunks are cut into panels of their own, so each may end with a panel that is not full.
    const int64_t chunks = p.vocab_outside ? ceil_div(BT, p.token_chunk) : 1;
    const int64_t bytes = chunks * t_panels * h_cols * tile_bytes;
    p.grad_input_tiles = l.add(bytes);
    if (p.vocab_outside || p.own_panels) p.accumulator_bytes = bytes;
  }
  if (p.grad_weight_accumulator == Accumulator::workspace) {
    const int64_t chunks = p.vocab_outside ? 1 : ceil_div(V, p.vocab_chunk);
    const int64_t bytes = chunks * h_rows * v_panels * tile_bytes;
    p.grad_weight_tiles = l.add(bytes);
    if (!p.vocab_outside) p.accumulator_bytes = bytes;
  }
  p.row_index = l.add(p.token_chunk * 8);
  p.row_params = l.add(p.token_chunk * static_cast<int64_t>(sizeof(cpu::GradRow)));
  // Per thread: one tile of 16 rows or more, its transpose, and a row of an output.
  const int64_t wide = round_up(g.mr, 16);
  p.scratch_stride = round_up(2 * wide * g.nr * 4 + int64_t{g.nr} * 4, kAlignment);
  p.scratch = l.add(p.target.threads * p.scratch_stride);
  // What fits into a cache may as well stay there.
  constexpr int64_t kLeastStreamed = int64_t{64} << 10;
  p.past_caches = want_weight && !p.types.grad_weight->accumulate &&
                  V * H * size_of(p.types.grad_weight->dtype) >= kLeastStreamed;
  p.row_buffer_stride = p.past_caches && size_of(p.types.grad_weight->dtype) == 2
                            ? round_up(g.nr * p.row_buffer_bytes(), kAlignment)
                            : 0;
  p.row_buffers = l.add(p.target.threads * p.row_buffer_stride);
  return p.workspace_bytes = l.bytes();
}

namespace {

// Of the two steps between barriers: grad_logits; then grad_weight and grad_input together. With
// panels of one's own, grad_weight belongs to the first.
struct IdleShares {
  double grad_logits = 0;
  double products = 0;
};

// Of a full cell. Tiles of the two products are shared out from opposite ends of the team, so that
// the members with one more of one have one less of the other.
IdleShares idle_shares(const GradientPlanData& p) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t threads = p.target.threads;
  const int64_t tokens = std::min(p.token_chunk, p.shape.BT);
  const int64_t columns = std::min(p.vocab_chunk, p.shape.V);
  const int64_t token_panels = ceil_div(tokens, g.mr);
  const int64_t vocab_panels = ceil_div(columns, g.nr);
  IdleShares idle;
  if (p.own_panels) {  // the last chunk counts: there may be few
    const int64_t all = ceil_div(p.shape.V, g.nr);
    if (all > 0) {
      const int64_t rounds = all / vocab_panels * ceil_div(vocab_panels, threads) +
                             ceil_div(all % vocab_panels, threads);
      idle.grad_logits = 1 - static_cast<double>(all) / static_cast<double>(rounds * threads);
    }
    if (p.types.grad_input) {
      idle.products = idle_share(token_panels * ceil_div(p.shape.H, g.nr), threads);
    }
    return idle;
  }
  idle.grad_logits = idle_share(token_panels * vocab_panels, threads);
  const int64_t tiles_w = p.types.grad_weight ? ceil_div(p.shape.H, g.mr) * vocab_panels : 0;
  const int64_t tiles_i = p.types.grad_input ? token_panels * ceil_div(p.shape.H, g.nr) : 0;
  const auto depth_w = static_cast<double>(tokens);
  const auto depth_i = static_cast<double>(columns);
  const auto work = static_cast<double>(tiles_w) * depth_w + static_cast<double>(tiles_i) * depth_i;
  double longest = 0;
  for (int64_t i = 0; i < threads; ++i) {
    longest =
        std::max(longest, static_cast<double>(split(tiles_w, threads, i).size()) * depth_w +
                              static_cast<double>(split(tiles_i, threads, threads - 1 - i).size()) *
                                  depth_i);
  }
  if (longest > 0) idle.products = 1 - work / (longest * static_cast<double>(threads));
  return idle;
}

std::string idle_text(const GradientPlanData& p, const std::string& before = {}) {
  const IdleShares idle = idle_shares(p);
  return "  idle: " + before + (p.own_panels ? "grad_logits and grad_weight " : "grad_logits ") +
         percent_text(idle.grad_logits) + (p.own_panels ? ", grad_input " : ", products ") +
         percent_text(idle.products) + "\n";
}

// Estimated cycles of one thread's share, products left out (they are the same for every plan):
// packing, accumulators moving in and out, barriers, and waiting for the slowest member.
double overhead_cycles(const GradientPlanData& p) {
  const auto BT = static_cast<double>(p.shape.BT);
  const auto V = static_cast<double>(p.shape.V);
  const auto H = static_cast<double>(p.shape.H);
  const double v_chunks = static_cast<double>(ceil_div(p.shape.V, p.vocab_chunk));
  const double t_chunks = static_cast<double>(ceil_div(p.shape.BT, p.token_chunk));
  constexpr double kPackRows = 0.35;  // a transpose in registers
  constexpr double kPackCols = 0.20;
  constexpr double kTileTraffic = 0.5;    // a tile of an accumulator in and out
  constexpr double kOutputTraffic = 1.5;  // the same through a strided or transposed output
  // Three per cell, with the wait for the slowest thread; between panels of one's own, two.
  const double kBarriers = p.own_panels ? 10e3 : 60e3;
  const bool recompute = p.source == SoftmaxSource::logits;
  const bool want_input = p.types.grad_input.has_value();
  const bool want_weight = p.types.grad_weight.has_value();
  // Beyond a part of L3, packed input comes from memory for every panel of weight.
  constexpr double kInputBytes = 12 << 20;
  constexpr double kFromMemory = 0.06;  // of a product
  constexpr double kTurned = 1.5;       // weight packed for the team, tiles of grad_weight turned
  const bool packs_rows = recompute && !p.few;
  const double pack_weight =
      V * H * ((packs_rows ? kPackRows : 0) + (want_input && !p.own_panels ? kPackCols : 0)) *
      (!p.vocab_outside && v_chunks > 1 ? t_chunks : 1);
  const double turned = want_weight && !p.own_panels ? kTurned * V * H : 0;
  const double pack_input = BT * H * ((recompute ? kPackRows : 0) + (want_weight ? kPackCols : 0)) *
                            (p.vocab_outside && t_chunks > 1 ? v_chunks : 1);
  const auto traffic = [&](Accumulator a) {
    if (a == Accumulator::none) return 0.0;
    return a == Accumulator::output ? kOutputTraffic : kTileTraffic;
  };
  const double tiles = BT * H * v_chunks * traffic(p.grad_input_accumulator) +
                       V * H * t_chunks * traffic(p.grad_weight_accumulator);
  const IdleShares idle = idle_shares(p);
  const double product = BT * V * H / (32.0 * p.target.gemm->k_unit);
  const auto wait = [](double share) { return share / (1 - share); };
  const double first = recompute + (p.own_panels && want_weight);
  const double waiting =
      product * first * wait(idle.grad_logits) +
      product * (recompute + want_input + want_weight - first) * wait(idle.products);
  double streaming = 0;
  if (p.own_panels) {
    const double forms = packs_rows + want_weight;
    if (forms * BT * H * 4 / p.target.gemm->k_unit > kInputBytes) {
      streaming = kFromMemory * forms * product;
    }
  }
  return (pack_weight + turned + pack_input + tiles + waiting + streaming) / p.target.threads +
         v_chunks * t_chunks * kBarriers;
}

std::vector<int64_t> chunk_sizes(int64_t n, int64_t unit, std::initializer_list<int64_t> wanted) {
  std::vector<int64_t> sizes;
  for (int64_t size : wanted) {
    // Chunks of equal size, in whole units.
    const int64_t chunks = std::max<int64_t>(1, ceil_div(n, size));
    const int64_t even = std::max(unit, round_up(ceil_div(n, chunks), unit));
    if (sizes.empty() || sizes.back() != even) sizes.push_back(even);
  }
  return sizes;
}

// Chunks of the vocabulary for panels of one's own: whole rounds of the team.
std::vector<int64_t> own_chunk_sizes(const GradientPlanData& p) {
  const int64_t round = int64_t{p.target.gemm->nr} * p.target.threads;
  const int64_t all = round_up(std::max<int64_t>(p.shape.V, 1), p.target.gemm->nr);
  std::vector<int64_t> sizes;
  // For few tokens a chunk's rows should still be in a cache when grad_input comes to them; for
  // many the fewer passes over its accumulator count more.
  constexpr int64_t kFew = 64;
  for (const int64_t wanted : {2048, 1024, 512, 256, 128, 64, 32, 16, 8}) {
    if (p.shape.BT <= kFew && wanted > 512) continue;
    const int64_t size = std::min(all, std::max<int64_t>(1, wanted / round) * round);
    if (sizes.empty() || sizes.back() != size) sizes.push_back(size);
  }
  return sizes;
}

}  // namespace

// Where softmax or exponentials are read, some panels at a time: along their rows.
GradientPlanData with_own_panels(GradientPlanData p, int64_t vocab_chunk) {
  p.own_panels = true;
  p.vocab_outside = false;
  p.token_chunk = round_up(std::max<int64_t>(p.shape.BT, 1), 2);
  p.vocab_chunk = vocab_chunk;
  if (p.source == SoftmaxSource::logits) {
    p.few = few_tokens(*p.target.gemm, p.shape.BT);
  } else {
    p.own_group = p.source == SoftmaxSource::softmax ? 4 : 2;
  }
  lay_out(p);
  return p;
}

namespace {

// Whole panels may be too coarse for a large team: then only where nothing else fits.
double reluctance(const GradientPlanData& p) {
  constexpr double kMostIdle = 0.03;
  const IdleShares idle = idle_shares(p);
  const bool coarse = p.own_panels && p.target.threads > kSmallTeam &&
                      std::max(idle.grad_logits, idle.products) > kMostIdle;
  return coarse ? 1e30 : 0;
}

Result<void> choose_schedule(GradientPlanData& p, const PlanOptions& options) {
  const cpu::GemmKernels& g = *p.target.gemm;
  const int64_t BT = p.shape.BT;
  const int64_t V = p.shape.V;
  const int64_t H = p.shape.H;
  if (BT == 0 || V == 0 || H == 0) {  // there is no product: nothing to keep
    p.token_chunk = g.mr;
    p.vocab_chunk = g.nr;
    lay_out(p);
    p.workspace_bytes = p.least_bytes = 0;
    return {};
  }
  // More than about 2,000 columns or 16,384 tokens at a time bring nothing that the model sees.
  const auto vocab_sizes =
      chunk_sizes(V, g.nr, {2560, 2400, 2240, 2100, 1960, 1792, 1600, 1344, 1120, 896,
                            672,  448,  320,  224,  160,  96,   64,   32,   16,   8});
  const auto token_sizes =
      chunk_sizes(BT, g.mr % 2 == 0 ? g.mr : 2 * g.mr,
                  {int64_t{1} << 48, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8});
  const bool fp32_given = (p.types.grad_weight && p.types.grad_weight->dtype == DType::f32) ||
                          (p.types.grad_input && p.types.grad_input->dtype == DType::f32);
  const bool both = p.types.grad_input.has_value() && p.types.grad_weight.has_value();
  // One fp32 accumulator, for whichever output is summed over chunks, in whole tiles.
  const int64_t accumulator_allowed = both && !fp32_given
                                          ? std::min(round_up(BT, g.mr) * round_up(H, g.nr),
                                                     round_up(V, g.nr) * round_up(H, g.mr)) *
                                                4
                                          : 0;
  // Panels that are not full at the end of each chunk.
  const auto within = [&](const GradientPlanData& c) {
    if (options.workspace_limit_bytes > 0) {
      return c.workspace_bytes <= options.workspace_limit_bytes;
    }
    return c.workspace_bytes <= kGradientWorkspaceBytes + accumulator_allowed;
  };
  bool found = false;
  double best_cost = 0;
  GradientPlanData best = p;
  GradientPlanData least = p;
  int64_t least_bytes = INT64_MAX;
  const auto consider = [&](const GradientPlanData& c) {
    if (c.workspace_bytes < least_bytes) {
      least_bytes = c.workspace_bytes;
      least = c;
    }
    if (!within(c)) return;
    const double cost = overhead_cycles(c) + reluctance(c);
    if (!found || cost < best_cost) {
      found = true;
      best_cost = cost;
      best = c;
    }
  };
  for (const int64_t vocab_chunk : own_chunk_sizes(p)) consider(with_own_panels(p, vocab_chunk));
  for (const bool vocab_outside : {true, false}) {
    for (const int64_t vocab_chunk : vocab_sizes) {
      for (const int64_t token_chunk : token_sizes) {
        GradientPlanData c = p;
        c.vocab_outside = vocab_outside;
        c.vocab_chunk = vocab_chunk;
        c.token_chunk = token_chunk;
        lay_out(c);
        consider(c);
      }
    }
  }
  if (!found) {
    if (options.workspace_limit_bytes > 0) return too_small(options, least_bytes);
    best = least;  // a hidden size so large that even the least chunks need more than the default
  }
  p = best;
  p.least_bytes = least_bytes;
  return {};
}

// ---- loss and gradient
// ----------------------------------------------------------------------------

}  // namespace

int64_t default_limit(const Shape& s, const LossAndGradientTypes& types) {
  const auto matrix = [](int64_t rows, int64_t cols, DType type) {
    return static_cast<double>(rows) * static_cast<double>(cols) *
           static_cast<double>(size_of(type));
  };
  double bytes = matrix(s.BT, s.H, types.operand) + matrix(s.V, s.H, types.operand);
  if (types.grad_input) bytes += matrix(s.BT, s.H, types.grad_input->dtype);
  if (types.grad_weight) bytes += matrix(s.V, s.H, types.grad_weight->dtype);
  return std::max(kLossAndGradientWorkspaceBytes, static_cast<int64_t>(1.25 * bytes));
}

int64_t lay_out(LossAndGradientPlanData& p) {
  Layout l;
  p.logits_max = l.add(p.shape.BT * 4);
  p.sum_exp_logits = l.add(p.shape.BT * 4);
  p.predicted_logits = l.add(p.shape.BT * 4);
  if (p.one_pass) {
    int64_t forward_bytes = lay_out(p.forward);
    if (p.two_blocks) {
      p.next_forward = p.forward;
      ForwardPlanData& next = p.next_forward;
      const int64_t held_bytes = forward_bytes - next.partial_max;
      for (int64_t* offset :
           {&next.partial_max, &next.partial_sum, &next.held_tiles, &next.row_index,
            &next.local_target, &next.run_max, &next.run_sum, &next.run_low, &next.predicted}) {
        *offset += held_bytes;
      }
      forward_bytes += held_bytes;
    }
    p.forward_base = l.add(forward_bytes);
    p.gradient_base = l.add(lay_out(p.gradient));
  } else {
    p.grad = l.add(p.shape.BT * 4);
    p.operators =
        l.add(std::max(p.forward_plan->workspace_bytes(), p.gradient_plan->workspace_bytes()));
  }
  return p.workspace_bytes = l.bytes();
}

namespace {

// Estimated cycles of one thread beyond the three products: what long blocks save.
double one_pass_overhead(const LossAndGradientPlanData& p) {
  const double blocks = static_cast<double>(ceil_div(p.shape.BT, p.forward.token_block));
  const double pack =
      p.forward.few ? 0 : 0.35 * static_cast<double>(p.shape.V) * static_cast<double>(p.shape.H);
  const double idle = forward_idle_share(p.forward);
  const double product = static_cast<double>(p.shape.BT) * static_cast<double>(p.shape.V) *
                         static_cast<double>(p.shape.H) / 64 / p.target.threads;
  return blocks * pack / p.target.threads + product * idle / (1 - idle) +
         overhead_cycles(p.gradient);
}

// What all candidates share.
void begin_one_pass(LossAndGradientPlanData& p) {
  const cpu::GemmKernels& g = *p.target.gemm;
  p.forward.shape = p.gradient.shape = p.shape;
  p.forward.target = p.gradient.target = p.target;
  p.forward.types.operand = p.gradient.types.operand = p.types.operand;
  p.forward.types.multiply = p.gradient.types.multiply = p.types.multiply;
  p.forward.types.target = p.gradient.types.target = p.types.target;
  p.gradient.types.grad_input = p.types.grad_input;
  p.gradient.types.grad_weight = p.types.grad_weight;
  p.gradient.source = SoftmaxSource::held;
  p.gradient.vocab_outside = false;
  p.forward.panel_rows = g.mr;
  p.forward.held = p.target.multiply == DType::bf16 ? DType::bf16 : DType::f32;
  const int64_t units = ceil_div(p.shape.H, g.k_unit);
  p.forward.group = static_cast<int>(
      std::clamp<int64_t>(p.target.l2_bytes / 2 / std::max<int64_t>(1, units * g.mr * 4), 1, 8));
}

int64_t all_segments(const Shape& s) {
  return std::max<int64_t>(1, ceil_div(s.V, cpu::kSegmentColumns));
}

std::vector<int64_t> vocab_chunks_of_one_pass(const LossAndGradientPlanData& p) {
  return chunk_sizes(p.shape.V, p.target.gemm->nr, {2304, 1792, 1344, 896, 448, 224});
}

// With few segments of the forward at a time.
int64_t lay_out_least(LossAndGradientPlanData& c) {
  const int64_t units = ceil_div(c.shape.H, c.target.gemm->k_unit);
  const int64_t segments = all_segments(c.shape);
  // A few MiB of weight serve a small team; a large one waits less if it shares more.
  const int64_t few = std::clamp<int64_t>(
      (int64_t{4} << 20) / std::max<int64_t>(1, units * cpu::kSegmentColumns * 4), 1, segments);
  c.forward.chunk_segments = c.forward.own_segments() ? segments : few;
  return lay_out(c);
}

// More segments at a time, where a team waits less for it.
void lengthen_chunks(LossAndGradientPlanData& c, int64_t limit_bytes) {
  constexpr double kIdle = 0.01;
  LossAndGradientPlanData longer = c;
  while (forward_idle_share(c.forward) > kIdle &&
         longer.forward.chunk_segments < all_segments(c.shape)) {
    ++longer.forward.chunk_segments;
    if (lay_out(longer) > limit_bytes) return;
    if (forward_idle_share(longer.forward) < forward_idle_share(c.forward)) c = longer;
  }
}

// The cheapest of the candidates that fit.
struct OnePassChoice {
  int64_t limit_bytes;
  int64_t least_bytes = INT64_MAX;  // of all candidates
  std::optional<LossAndGradientPlanData> best = {};
  double best_cost = 0;

  bool fits(LossAndGradientPlanData& c) {
    least_bytes = std::min(least_bytes, lay_out_least(c));
    return c.workspace_bytes <= limit_bytes;
  }

  // False when it does not fit.
  bool consider(LossAndGradientPlanData c) {
    if (!fits(c)) return false;
    lengthen_chunks(c, limit_bytes);
    const double cost = one_pass_overhead(c) + reluctance(c.gradient);
    if (!best || cost < best_cost) {
      best = c;
      best_cost = cost;
    }
    return true;
  }
};

}  // namespace

bool choose_one_pass(LossAndGradientPlanData& p, int64_t& least_bytes) {
  const cpu::GemmKernels& g = *p.target.gemm;
  begin_one_pass(p);
  OnePassChoice choice{.limit_bytes = p.limit_bytes};
  const auto block_of = [&](int64_t blocks) {
    return std::max<int64_t>(g.mr, round_up(ceil_div(p.shape.BT, blocks), g.mr));
  };
  for (const int64_t vocab_chunk : own_chunk_sizes(p.gradient)) {
    LossAndGradientPlanData c = p;
    c.forward.token_block = block_of(1);
    c.forward = with_own_segments(c.forward);
    c.gradient = with_own_panels(c.gradient, vocab_chunk);
    choice.consider(c);
  }
  for (const int64_t vocab_chunk : vocab_chunks_of_one_pass(p)) {
    const auto in_blocks = [&](int64_t blocks) {
      LossAndGradientPlanData c = p;
      c.forward.token_block = c.gradient.token_chunk = block_of(blocks);
      c.gradient.vocab_chunk = vocab_chunk;
      return c;
    };
    // The fewest blocks that fit, as shorter ones only cost more. One is tried apart: it needs no
    // sums between blocks. Of several, what they need falls with their length.
    if (choice.consider(in_blocks(1))) continue;
    // Fewer than 64 tokens a block: packing weight again costs more than the fourth product.
    int64_t too_few = 1, enough = std::max<int64_t>(1, p.shape.BT / 64);
    const auto fit = [&](int64_t blocks) {
      LossAndGradientPlanData c = in_blocks(blocks);
      return choice.fits(c);
    };
    if (enough == 1 || !fit(enough)) continue;
    while (enough - too_few > 1) {
      const int64_t middle = too_few + (enough - too_few) / 2;
      (fit(middle) ? enough : too_few) = middle;
    }
    choice.consider(in_blocks(enough));
  }
  least_bytes = choice.least_bytes;
  if (choice.best) p = *choice.best;
  return choice.best.has_value();
}

namespace {

// The same where somebody else makes the blocks. The gradient's tokens are those of all blocks if
// they were full, so that it keeps sums between blocks exactly where there are several.
OnePassChoice choose_among_blocks(const LossAndGradientPlanData& p, int64_t block_tokens,
                                  int64_t blocks) {
  const cpu::GemmKernels& g = *p.target.gemm;
  LossAndGradientPlanData whole = p;
  begin_one_pass(whole);
  const int64_t unit = g.mr % 2 == 0 ? g.mr : 2 * g.mr;
  const int64_t tokens = std::max(unit, round_up(block_tokens, unit));
  whole.forward.token_block = whole.gradient.token_chunk = tokens;
  whole.gradient.shape.BT = blocks * tokens;
  OnePassChoice choice{.limit_bytes = p.limit_bytes};
  if (blocks == 1) {
    for (const int64_t vocab_chunk : own_chunk_sizes(whole.gradient)) {
      LossAndGradientPlanData c = whole;
      c.forward = with_own_segments(c.forward);
      c.gradient = with_own_panels(c.gradient, vocab_chunk);
      choice.consider(c);
    }
  }
  for (const int64_t vocab_chunk : vocab_chunks_of_one_pass(p)) {
    LossAndGradientPlanData c = whole;
    c.gradient.vocab_chunk = vocab_chunk;
    choice.consider(c);
  }
  return choice;
}

Result<void> choose_recompute(LossAndGradientPlanData& p, const PlanOptions& options) {
  const ForwardTypes forward{
      .operand = p.types.operand, .multiply = p.types.multiply, .target = p.types.target};
  const GradientTypes gradient{.operand = p.types.operand,
                               .multiply = p.types.multiply,
                               .target = p.types.target,
                               .grad_input = p.types.grad_input,
                               .grad_weight = p.types.grad_weight};
  PlanOptions inner{.threads = p.target.threads, .isa = p.target.isa};
  p.one_pass = false;
  const auto plan_both = [&]() -> Result<void> {
    auto forward_plan = plan_forward(p.shape, forward, inner);
    if (!forward_plan) return forward_plan.error();
    auto gradient_plan = plan_gradient(p.shape, gradient, inner);
    if (!gradient_plan) return gradient_plan.error();
    p.forward_plan = *forward_plan;
    p.gradient_plan = *gradient_plan;
    lay_out(p);
    return {};
  };
  if (auto ok = plan_both(); !ok || options.workspace_limit_bytes == 0) return ok;
  // The statistics stand beside the operators' workspace.
  const int64_t rows_bytes = p.operators;
  const int64_t least = rows_bytes + round_up(std::max(p.forward_plan->data().least_bytes,
                                                       p.gradient_plan->data().least_bytes),
                                              kAlignment);
  if (options.workspace_limit_bytes < least) return too_small(options, least);
  inner.workspace_limit_bytes = options.workspace_limit_bytes - rows_bytes;
  return plan_both();
}

}  // namespace

int64_t least_one_pass_bytes(const LossAndGradientPlanData& plan, int64_t block_tokens,
                             int64_t blocks) {
  LossAndGradientPlanData unlimited = plan;
  unlimited.limit_bytes = 0;
  return choose_among_blocks(unlimited, block_tokens, blocks).least_bytes;
}

bool choose_one_pass_blocks(LossAndGradientPlanData& plan, int64_t block_tokens, int64_t blocks) {
  const OnePassChoice choice = choose_among_blocks(plan, block_tokens, blocks);
  if (choice.best) plan = *choice.best;
  return choice.best.has_value();
}

Result<LossAndGradientPlan> plan_loss_and_gradient(const Shape& shape,
                                                   const LossAndGradientTypes& types,
                                                   const PlanOptions& options, Strategy strategy) {
  if (auto ok = check_shape(shape); !ok) return ok.error();
  if (auto ok = check_types(types); !ok) return ok.error();
  auto target = choose_target(options, types.operand, types.multiply, product_flops(shape));
  if (!target) return target.error();
  auto data = std::make_shared<LossAndGradientPlanData>();
  data->shape = shape;
  data->types = types;
  data->target = *target;
  const bool limited = options.workspace_limit_bytes > 0;
  data->limit_bytes = limited ? options.workspace_limit_bytes : default_limit(shape, types);
  const std::string limit =
      (limited ? "the limit of " : "the default limit of ") + bytes_text(data->limit_bytes);
  const bool anything = shape.BT > 0 && shape.V > 0 && shape.H > 0 &&
                        (types.grad_input.has_value() || types.grad_weight.has_value());
  if (types.grad_tolerance > 0 && strategy == Strategy::recompute) {
    return Error{ErrorKind::invalid_argument,
                 "grad_tolerance is " + std::to_string(types.grad_tolerance) +
                     ", must be 0 with the strategy recompute: a sparse gradient is one pass"};
  }
  if (types.grad_tolerance > 0 && anything) {
    data->why = "sparse, in one pass";
    if (auto ok = plan_sparse(*data, options); !ok) return ok.error();
    return LossAndGradientPlan(std::move(data));
  }
  if (strategy != Strategy::recompute) {
    int64_t least = INT64_MAX;
    if (choose_one_pass(*data, least)) {
      data->why = strategy == Strategy::one_pass ? "asked for" : "fits " + limit;
      return LossAndGradientPlan(std::move(data));
    }
    if (strategy == Strategy::one_pass) {
      return Error{ErrorKind::limit_too_small, "workspace_limit_bytes: one pass does not fit " +
                                                   limit + ", the least possible workspace is " +
                                                   std::to_string(least) + " bytes"};
    }
  }
  data->why = strategy == Strategy::recompute ? "asked for" : "one pass does not fit " + limit;
  if (auto ok = choose_recompute(*data, options); !ok) return ok.error();
  return LossAndGradientPlan(std::move(data));
}

Result<ForwardPlan> plan_forward(const Shape& shape, const ForwardTypes& types,
                                 const PlanOptions& options) {
  if (auto ok = check_shape(shape); !ok) return ok.error();
  if (auto ok = check_types(types); !ok) return ok.error();
  auto target = choose_target(options, types.operand, types.multiply, product_flops(shape));
  if (!target) return target.error();
  auto data = std::make_shared<ForwardPlanData>();
  data->shape = shape;
  data->types = types;
  data->target = *target;
  if (auto ok = choose_blocks(*data, options); !ok) return ok.error();
  return ForwardPlan(std::move(data));
}

Result<MergePlan> plan_merge(int64_t BT, int64_t shards, const PlanOptions& options) {
  if (auto ok = check_shape({BT, 0, 0}); !ok) return ok.error();
  if (shards < 1) {
    return Error{ErrorKind::invalid_argument,
                 "shards is " + std::to_string(shards) + ", must be at least 1"};
  }
  auto target = choose_target(options, DType::f32, {}, -1);
  if (!target) return target.error();
  auto data = std::make_shared<MergePlanData>();
  data->BT = BT;
  data->shards = shards;
  data->threads = target->threads;
  data->kernels = target->kernels;
  return MergePlan(std::move(data));
}

Result<LossPlan> plan_loss(int64_t BT, int64_t V, const LossTypes& types,
                           const PlanOptions& options) {
  if (auto ok = check_shape({BT, V, 0}); !ok) return ok.error();
  if (types.softmax_logits && size_of(*types.softmax_logits) != 2 &&
      *types.softmax_logits != DType::f32) {
    return Error{ErrorKind::wrong_type, std::string("logits: dtype is ") +
                                            name_of(*types.softmax_logits) +
                                            ", must be f32, f16 or bf16"};
  }
  auto target = choose_target(options, DType::f32, {}, -1);
  if (!target) return target.error();
  auto data = std::make_shared<LossPlanData>();
  data->BT = BT;
  data->V = V;
  data->types = types;
  data->target = *target;
  return LossPlan(std::move(data));
}

Result<GradientPlan> plan_gradient(const Shape& shape, const GradientTypes& types,
                                   const PlanOptions& options) {
  if (auto ok = check_shape(shape); !ok) return ok.error();
  if (auto ok = check_types(types); !ok) return ok.error();
  auto target = choose_target(options, types.operand, types.multiply, product_flops(shape));
  if (!target) return target.error();
  auto data = std::make_shared<GradientPlanData>();
  data->shape = shape;
  data->types = types;
  data->source =
      types.mode == GradientMode::memory_saving ? SoftmaxSource::logits : SoftmaxSource::softmax;
  data->target = *target;
  const bool anything = shape.BT > 0 && shape.V > 0 && shape.H > 0 &&
                        (types.grad_input.has_value() || types.grad_weight.has_value());
  if (types.grad_tolerance > 0 && anything) {
    if (auto ok = plan_sparse(*data, options); !ok) return ok.error();
    return GradientPlan(std::move(data));
  }
  if (auto ok = choose_schedule(*data, options); !ok) return ok.error();
  return GradientPlan(std::move(data));
}

int64_t ForwardPlan::workspace_bytes() const { return data_->workspace_bytes; }
int ForwardPlan::threads() const { return data_->target.threads; }
Isa ForwardPlan::isa() const { return data_->target.isa; }
const Shape& ForwardPlan::shape() const { return data_->shape; }
const ForwardTypes& ForwardPlan::types() const { return data_->types; }

std::string ForwardPlan::describe() const {
  const ForwardPlanData& p = *data_;
  const int64_t units = ceil_div(p.shape.H, p.target.gemm->k_unit);
  std::string text = "forward " + shape_text(p.shape) + ", " + name_of(p.types.operand) + "\n";
  text += "  " + target_text(p.target) + "\n";
  if (p.own_segments()) {
    const int64_t segments = ceil_div(p.shape.V, cpu::kSegmentColumns);
    if (p.few) {
      text += "  few tokens, " +
              (p.few.vocab_in_lanes(*p.target.gemm)
                   ? "vocabulary in the lanes"
                   : std::to_string(p.few.width) + " of them in the lanes") +
              ": weight is read once, as it lies in memory\n";
    } else {
      text += "  all tokens in one block; each thread takes segments of the vocabulary, " +
              std::to_string(cpu::kSegmentColumns) + " columns each\n";
    }
    text += "  workspace " + bytes_text(p.workspace_bytes) + " (" +
            std::to_string(p.workspace_bytes) + " bytes)\n";
    return text + "  idle: " + percent_text(idle_share(segments, p.target.threads)) + " (" +
           std::to_string(segments) + " segments)\n";
  }
  text += "  tokens in " + std::to_string(ceil_div(p.shape.BT, p.token_block)) + " blocks of " +
          std::to_string(p.token_block) + "; vocabulary in chunks of " +
          std::to_string(p.chunk_segments) + " segments of " +
          std::to_string(cpu::kSegmentColumns) + " columns; " + std::to_string(p.group) +
          " panels of " + std::to_string(p.panel_rows) + " tokens share a walk over a segment\n";
  text += "  workspace " + bytes_text(p.workspace_bytes) + " (" +
          std::to_string(p.workspace_bytes) + " bytes): input " +
          bytes_text(p.token_panels() * units * p.target.gemm->mr * 4) + ", weight " +
          bytes_text(p.chunk_segments * units * cpu::kSegmentColumns * 4) + ", tiles " +
          bytes_text(p.target.threads * p.tiles_stride) + "\n";
  return text + "  idle: " + percent_text(forward_idle_share(p)) + " (" +
         std::to_string(p.chunk_segments * p.token_panels()) + " units a chunk)\n";
}

int64_t MergePlan::workspace_bytes() const { return 0; }
int MergePlan::threads() const { return data_->threads; }
std::string MergePlan::describe() const {
  return "merge of " + std::to_string(data_->shards) +
         " shards, BT = " + std::to_string(data_->BT) + ", " + std::to_string(data_->threads) +
         " threads\n";
}

int64_t LossPlan::workspace_bytes() const { return 0; }
int LossPlan::threads() const { return data_->target.threads; }
Isa LossPlan::isa() const { return data_->target.isa; }
std::string LossPlan::describe() const {
  return "loss, BT = " + std::to_string(data_->BT) +
         (data_->types.softmax_logits ? ", with softmax over V = " + std::to_string(data_->V)
                                      : std::string()) +
         ", " + name_of(data_->target.isa) + ", " + std::to_string(data_->target.threads) +
         " threads\n";
}

int64_t LossAndGradientPlan::workspace_bytes() const { return data_->workspace_bytes; }
int LossAndGradientPlan::threads() const { return data_->target.threads; }
Isa LossAndGradientPlan::isa() const { return data_->target.isa; }
Strategy LossAndGradientPlan::strategy() const {
  return data_->one_pass ? Strategy::one_pass : Strategy::recompute;
}
const Shape& LossAndGradientPlan::shape() const { return data_->shape; }
const LossAndGradientTypes& LossAndGradientPlan::types() const { return data_->types; }

std::string one_pass_text(const LossAndGradientPlanData& p) {
  std::string text = "  " + target_text(p.target) + "\n";
  text += "  tokens in " + std::to_string(ceil_div(p.shape.BT, p.forward.token_block)) +
          " blocks of " + std::to_string(p.forward.token_block) + "; vocabulary in chunks of " +
          std::to_string(p.gradient.vocab_chunk) +
          (p.gradient.own_panels ? ", each thread with panels of its own" : "") +
          "; exponentials held as " + name_of(*p.forward.held) + "\n";
  text +=
      "  grad_input " + where_text(p.types.grad_input, p.gradient.grad_input_accumulator) + "\n";
  text +=
      "  grad_weight " + where_text(p.types.grad_weight, p.gradient.grad_weight_accumulator) + "\n";
  text += "  workspace " + bytes_text(p.workspace_bytes) + " (" +
          std::to_string(p.workspace_bytes) + " bytes): held " +
          bytes_text((p.two_blocks ? 2 : 1) * p.forward.token_panels() * p.forward.vocab_panels() *
                     p.forward.held_tile_bytes()) +
          ", accumulator " + bytes_text(p.gradient.accumulator_bytes) + "\n";
  return text +
         idle_text(p.gradient, "forward " + percent_text(forward_idle_share(p.forward)) + ", ");
}

std::string LossAndGradientPlan::describe() const {
  const LossAndGradientPlanData& p = *data_;
  std::string text = "loss and gradient " + shape_text(p.shape) + ", " + name_of(p.types.operand) +
                     ", " + (p.one_pass ? "one pass" : "recompute") + ": " + p.why + "\n";
  if (p.sparse) {
    text += sparse_text(p.sparse->sparse) + "  workspace " + bytes_text(p.workspace_bytes) + " (" +
            std::to_string(p.workspace_bytes) + " bytes)\n  flat rows, exactly:\n";
    return text + one_pass_text(p.sparse->exact);
  }
  if (!p.one_pass) {
    return text + p.forward_plan->describe() + p.gradient_plan->describe() + "  workspace " +
           bytes_text(p.workspace_bytes) + " (" + std::to_string(p.workspace_bytes) + " bytes)\n";
  }
  return text + one_pass_text(p);
}

int64_t GradientPlan::workspace_bytes() const { return data_->workspace_bytes; }
int GradientPlan::threads() const { return data_->target.threads; }
Isa GradientPlan::isa() const { return data_->target.isa; }
const Shape& GradientPlan::shape() const { return data_->shape; }
const GradientTypes& GradientPlan::types() const { return data_->types; }

std::string GradientPlan::describe() const {
  const GradientPlanData& p = *data_;
  std::string text =
      "gradient " + shape_text(p.shape) + ", " + name_of(p.types.operand) +
      (p.types.mode == GradientMode::memory_saving ? ", memory-saving (softmax recomputed)\n"
                                                   : ", high-performance (softmax given)\n");
  if (p.sparse) {
    text += sparse_text(p.sparse->sparse) + "  workspace " + bytes_text(p.workspace_bytes) + " (" +
            std::to_string(p.workspace_bytes) + " bytes)\n  flat rows, exactly:\n";
    return text + p.sparse->exact->describe();
  }
  text += "  " + target_text(p.target) + "\n";
  const std::string vocab = "vocabulary in " + std::to_string(ceil_div(p.shape.V, p.vocab_chunk)) +
                            " chunks of " + std::to_string(p.vocab_chunk);
  const std::string tokens = "tokens in " + std::to_string(ceil_div(p.shape.BT, p.token_chunk)) +
                             " chunks of " + std::to_string(p.token_chunk);
  if (p.own_panels) {
    text += "  " + vocab + ", each thread with panels of its own" +
            (p.few ? "; few tokens, logits from weight as it lies in memory" : "") + "\n";
  } else {
    text += "  outside " + (p.vocab_outside ? vocab : tokens) + "; inside " +
            (p.vocab_outside ? tokens : vocab) + "\n";
  }
  text += "  grad_input " + where_text(p.types.grad_input, p.grad_input_accumulator) + "\n";
  text += "  grad_weight " + where_text(p.types.grad_weight, p.grad_weight_accumulator) + "\n";
  text += "  workspace " + bytes_text(p.workspace_bytes) + " (" +
          std::to_string(p.workspace_bytes) + " bytes), of it accumulator " +
          bytes_text(p.accumulator_bytes) + "\n";
  return text + idle_text(p);
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
