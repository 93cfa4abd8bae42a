// SPDX-License-Identifier: Apache-2.0
// The gradient pass: grad_logits cell by cell -> grad_input, grad_weight.
//
//   for each outer chunk (vocabulary or tokens), for each inner chunk (the other)
//     pack what changed: input as A panels by rows (logits) and by columns (grad_weight),
//                        weight as B panels by rows (logits) and by columns (grad_input)
//     cell:  logits tile -> grad_logits tile (in L1) -> packed twice, as A and as B panels
//     grad_weight[chunk] += grad_logits^T . input      k = tokens of the chunk
//     grad_input[chunk]  += grad_logits . weight       k = vocabulary rows of the chunk
//
// The register tile has a narrow side (mr, broadcast) and a wide one (nr, vectors). A tile of
// grad_logits [mr tokens][nr columns] is one contiguous piece of either packed form: transposed,
// of the A panel of its tokens; as it is, of the B panel of its columns. So both packings happen in
// L1, right after exp. The price: grad_weight comes out as tiles [H][V] and is transposed once, on
// its way to memory.
//
// Where the packed input fits the caches, it goes another way (own_panels_cell): each thread takes
// vocabulary panels of its own, packs weight for itself alone, and makes its rows of grad_weight as
// they lie in memory. Nothing of weight passes through the outer caches twice, and no tile is
// turned.
//
// Every element of an output is one running sum in ascending k, from chunk to chunk, whichever loop
// is outside: schedules, chunks and threads leave no trace in the bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cpu/constants.h"
#include "few_tokens.h"
#include "logitless/gradient.h"
#include "plan.h"
#include "team.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

class GradientPass {
 public:
  GradientPass(const GradientPlanData& plan, const GradientOperands& in, const GradientOutputs& out,
               std::byte* workspace, Stop& stop)
      : p_(plan),
        g_(*plan.target.gemm),
        k_(*plan.target.kernels),
        in_(in),
        out_(out),
        ws_(workspace),
        stop_(stop),
        h_units_(ceil_div(plan.shape.H, plan.target.gemm->k_unit)) {}

  Result<void> run() {
    if (auto ok = count_rows(); !ok) return ok;
    run_team(p_.target.threads, [this](const Team& team) { work(team); });
    if (stop_.requested()) return Error{ErrorKind::cancelled, "gradient: cancelled"};
    return {};
  }

  // ---- the parts, for a schedule that comes with rows and exponentials of its own -------------

  // Exponentials kept by the forward of the same tokens, and what makes them a softmax.
  struct Held {
    const std::byte* tiles = nullptr;  // [token panel][vocabulary panel][mr][nr]
    int64_t tile_bytes = 0;
    int64_t vocab_panels = 0;
    DType type = DType::f32;
    const float* factors = nullptr;  // [segment][factor_stride]
    int64_t factor_stride = 0;
  };

  template <class T>
  T* region(int64_t offset) const {
    return reinterpret_cast<T*>(ws_ + offset);
  }
  float* scratch(const Team& team) const {
    return region<float>(p_.scratch + team.rank() * p_.scratch_stride);
  }

  bool recompute() const { return p_.source == SoftmaxSource::logits; }
  float grad_lse(int64_t b) const {
    return in_.grad_logsumexp ? f32_at(*in_.grad_logsumexp, b) : 0.0f;
  }
  bool counts(int64_t b) const {
    if (in_.counts && !byte_at(*in_.counts, b)) return false;
    return f32_at(in_.grad, b) != 0.0f || grad_lse(b) != 0.0f;
  }
  bool masked(int64_t b) const { return in_.target_mask && mask_at(*in_.target_mask, b); }

  // Also the rule about data: checked before anything is written.
  Result<void> count_rows() {
    for (int64_t b = 0; b < p_.shape.BT; ++b) {
      if (!counts(b)) continue;
      ++rows_;
      if (masked(b) || p_.shape.V == 0) continue;
      const int64_t target = integer_at(in_.masked_target, b);
      if (target < 0 || target >= p_.shape.V) {
        return Error{ErrorKind::invalid_data,
                     "masked_target[" + std::to_string(b) + "] is " + std::to_string(target) +
                         ", must be in [0, V) = [0, " + std::to_string(p_.shape.V) +
                         ") where target_mask is 0 and grad is not 0"};
      }
    }
    return {};
  }

  struct Cell {
    int64_t token_chunks = 0, vocab_chunks = 0;
    int64_t token_index = -1, vocab_index = -1;
    int64_t tokens = 0;           // rows of this chunk
    int64_t next_row = 0;         // where the scan for the following chunk begins
    int64_t v0 = 0, columns = 0;  // vocabulary rows of this chunk
    int64_t token_units(int k_unit) const { return ceil_div(tokens, k_unit); }
    int64_t vocab_units(int k_unit) const { return ceil_div(columns, k_unit); }
  };

  void work(const Team& team) {
    fresh_zeros(team);
    if (rows_ == 0 || p_.shape.V == 0 || p_.shape.H == 0) return;
    const int64_t token_chunks = ceil_div(rows_, p_.token_chunk);
    const int64_t vocab_chunks = ceil_div(p_.shape.V, p_.vocab_chunk);
    const int64_t outer_count = p_.vocab_outside ? vocab_chunks : token_chunks;
    const int64_t inner_count = p_.vocab_outside ? token_chunks : vocab_chunks;
    Cell cell;
    cell.token_chunks = token_chunks;
    cell.vocab_chunks = vocab_chunks;
    for (int64_t outer = 0; outer < outer_count; ++outer) {
      for (int64_t inner = 0; inner < inner_count; ++inner) {
        const int64_t token_index = p_.vocab_outside ? inner : outer;
        const int64_t vocab_index = p_.vocab_outside ? outer : inner;
        if (token_index != cell.token_index) take_tokens(team, token_index, cell);
        if (!one_cell(team, vocab_index, cell)) return;
      }
    }
  }

  // False when the call is to be left.
  bool one_cell(const Team& team, int64_t vocab_index, Cell& cell) {
    if (p_.own_panels) return own_panels_cell(team, vocab_index, cell);
    if (vocab_index != cell.vocab_index) take_vocabulary(team, vocab_index, cell);
    team.barrier();
    make_grad_logits(team, cell);
    team.barrier();
    if (out_.grad_weight) add_grad_weight(team, cell);
    if (out_.grad_input) add_grad_input(team, cell);
    return !stop_.leave_together(team);
  }

  // What the products will not write: rows that do not count, and everything when nothing does.
  void fresh_zeros(const Team& team) const {
    if (out_.grad_input && !p_.types.grad_input->accumulate) {
      const bool all = p_.shape.V == 0;
      const Range mine = team.part(p_.shape.BT);
      for (int64_t b = mine.begin; b < mine.end; ++b) {
        if (all || !counts(b)) zero_row(*out_.grad_input, b);
      }
    }
    if (out_.grad_weight && !p_.types.grad_weight->accumulate && rows_ == 0) {
      const Range mine = team.part(p_.shape.V);
      for (int64_t v = mine.begin; v < mine.end; ++v) zero_row(*out_.grad_weight, v);
    }
  }

  // ---- packing ---------------------------------------------------------------------------------

  void take_tokens(const Team& team, int64_t index, Cell& cell) {
    if (index <= cell.token_index) cell.next_row = 0;  // an inner loop starts again
    cell.token_index = index;
    cell.tokens = 0;
    auto* rows = region<int64_t>(p_.row_index);
    auto* params = region<cpu::GradRow>(p_.row_params);
    for (; cell.next_row < p_.shape.BT && cell.tokens < p_.token_chunk; ++cell.next_row) {
      if (!counts(cell.next_row)) continue;
      if (team.rank() == 0) {
        rows[cell.tokens] = cell.next_row;
        params[cell.tokens] = row_params(cell.next_row);
      }
      ++cell.tokens;
    }
    team.barrier();
    pack_tokens(team, cell);
  }

  void pack_tokens(const Team& team, const Cell& cell) {
    if (p_.own_panels) return pack_own_tokens(team, cell);
    const RowSelection input{in_.input, region<int64_t>(p_.row_index)};
    if (recompute()) {
      const Panels panels(cell.tokens, g_.mr);
      const Range mine = team.part(panels.count);
      for (int64_t i = mine.begin; i < mine.end && !stop_.requested(); ++i) {
        pack_row_panel(p_.target, input, panels.begin(i), panels.size(i), g_.mr,
                       region<float>(p_.input_rows) + i * h_units_ * g_.mr);
      }
    }
    if (!out_.grad_weight) return;
    const Panels panels(p_.shape.H, g_.mr);
    const Range mine = team.part(ceil_div(cell.tokens, kPackDepth));
    for (int64_t d = mine.begin; d < mine.end && !stop_.requested(); ++d) {
      const int64_t k0 = d * kPackDepth;
      const int64_t k = std::min(kPackDepth, cell.tokens - k0);
      for (int64_t i = 0; i < panels.count; ++i) {
        pack_col_block(p_.target, input, k0, k, panels.begin(i), panels.size(i), g_.mr,
                       region<float>(p_.input_cols) + i * cell.token_units(g_.k_unit) * g_.mr);
      }
    }
  }

  // The power of two that brings the larger gradient to [1, 2): p / N falls below fp16's least
  // number. Per row, so that no row depends on another.
  void set_f16_scale(cpu::GradRow& row) const {
    row.f16_scale = row.f16_unscale = 1.0f;
    if (p_.target.multiply != DType::f16) return;
    const float size = std::max(std::fabs(row.grad), std::fabs(row.grad_lse));
    if (!std::isfinite(size) || size == 0.0f) return;
    const int exponent = std::clamp(std::ilogb(size), -126, 126);
    row.f16_scale = std::ldexp(1.0f, -exponent);
    row.f16_unscale = std::ldexp(1.0f, exponent);
  }

  cpu::GradRow row_params(int64_t b) const {
    cpu::GradRow row{};
    row.grad = f32_at(in_.grad, b);
    row.grad_lse = grad_lse(b);
    row.target = masked(b) ? -1 : integer_at(in_.masked_target, b);
    set_f16_scale(row);
    if (!recompute()) return row;
    row.max = f32_at(*in_.logits_max, b);
    row.inv_sum = 1.0f / f32_at(*in_.sum_exp_logits, b);
    switch (p_.types.logits_rounding) {
      case LogitsRounding::none:
        row.round_logits = false;
        break;
      case LogitsRounding::operand:
        row.round_logits = true;
        break;
      case LogitsRounding::infer: {
        float rounded = row.max;
        k_.round_values(&rounded, 1, p_.target.multiply);
        row.round_logits = rounded == row.max;
        break;
      }
    }
    return row;
  }

  void take_vocabulary(const Team& team, int64_t index, Cell& cell) {
    cell.vocab_index = index;
    cell.v0 = index * p_.vocab_chunk;
    cell.columns = std::min(p_.vocab_chunk, p_.shape.V - cell.v0);
    const RowSelection weight{in_.weight, nullptr, cell.v0};
    // Both forms of nr rows together: the second reads them from the cache.
    const Range mine = team.part(ceil_div(cell.columns, g_.nr));
    for (int64_t i = mine.begin; i < mine.end && !stop_.requested(); ++i) {
      const int64_t begin = i * g_.nr;
      const auto rows = static_cast<int>(std::min<int64_t>(g_.nr, cell.columns - begin));
      if (recompute()) {
        pack_row_panel(p_.target, weight, begin, rows, g_.nr,
                       region<float>(p_.weight_rows) + i * h_units_ * g_.nr);
      }
      if (!out_.grad_input) continue;
      for (int64_t h = 0; h < p_.shape.H; h += g_.nr) {
        pack_col_block(p_.target, weight, begin, rows, h,
                       static_cast<int>(std::min<int64_t>(g_.nr, p_.shape.H - h)), g_.nr,
                       region<float>(p_.weight_cols) + h * cell.vocab_units(g_.k_unit));
      }
    }
  }

  // ---- grad_logits -----------------------------------------------------------------------------

  // A panels of about half of L2 share one walk over the B panels.
  int64_t group_of(int64_t a_panel_bytes) const {
    return std::clamp<int64_t>(l2_bytes_ / 2 / std::max<int64_t>(a_panel_bytes, 1), 1, 64);
  }

  // What a walk reads next: the A panel of the next tile, and the B panel after this one, of which
  // each of the `parts` tiles that share a B panel fetches one part.
  struct Next {
    int64_t a, b;
    int64_t part, parts;
    int64_t tile_b;  // the B panel of the next tile
  };
  cpu::Ahead ahead(const Next& next, const float* a_panels, const float* b_panels,
                   int64_t k_units) const {
    const int64_t step = g_.nr * 4 / next.parts;
    return {a_panels + next.a * k_units * g_.mr,
            b_panels + (next.b * g_.nr + next.part * step / 4) * k_units, step};
  }

  // Calls tile(a, b, next) for a member's share of the panels. All tiles stand in one line,
  // group by group of A panels, within a group one B panel after the other; a share is a stretch of
  // it, so shares differ by one tile at most, for any number of threads.
  template <class Tile>
  void for_tiles(const Range& mine, int64_t a_panels, int64_t b_panels, int64_t group,
                 const Tile& tile) {
    for_tiles(mine, a_panels, b_panels, group, tile, [](int64_t, int64_t, int64_t) {});
  }
  // The same; behind the last of the A panels [a0, a1) that follow each other on one B panel, b,
  // comes done(a0, a1, b).
  template <class Tile, class Done>
  void for_tiles(const Range& mine, int64_t a_panels, int64_t b_panels, int64_t group,
                 const Tile& tile, const Done& done) {
    int64_t i = mine.begin;
    while (i < mine.end && !stop_.requested()) {
      const int64_t a0 = i / (group * b_panels) * group;
      const int64_t width = std::min(group, a_panels - a0);
      const int64_t in_group = i - a0 * b_panels;
      const int64_t b = in_group / width;
      const int64_t first = in_group % width;
      const int64_t end = std::min(width, first + mine.end - i);
      const bool last = b + 1 == b_panels;
      const int64_t a_after = !last ? a0 : a0 + width < a_panels ? a0 + width : 0;
      for (int64_t a = first; a < end; ++a) {
        const bool more = a + 1 < end;
        tile(a0 + a, b,
             Next{more ? a0 + a + 1 : a_after, last ? 0 : b + 1, a, width,
                  more || last ? b : b + 1});
      }
      done(a0 + first, a0 + end, b);
      i += end - first;
    }
  }

  cpu::GradTileOptions tile_options() const {
    return {
        .has_grad_lse = in_.grad_logsumexp.has_value(),
        .round_logits_to = p_.target.multiply,
        .round_to = p_.target.multiply,
    };
  }

  void make_grad_logits(const Team& team, const Cell& cell) {
    const Panels panels(cell.tokens, g_.mr);
    const cpu::GradTileOptions options = tile_options();
    float* tile = scratch(team);
    // Given or held, they are read along their rows.
    const int64_t group = recompute() ? group_of(h_units_ * g_.mr * 4) : 1;
    const int64_t v_panels = ceil_div(cell.columns, g_.nr);
    for_tiles(team.part(panels.count * v_panels), panels.count, v_panels, group,
              [&](int64_t a, int64_t b, const Next& next) {
                grad_tile(panels, cell, options, tile, a, b, next);
              });
  }

  // Where the tile (a, b) of grad_logits goes.
  float* in_grad_rows(const Cell& cell, int64_t a, int64_t b) const {
    if (!out_.grad_input) return nullptr;
    const int64_t units = cell.vocab_units(g_.k_unit);
    return region<float>(p_.grad_rows) + (a * units + b * (g_.nr / g_.k_unit)) * g_.mr;
  }
  float* in_grad_cols(const Cell& cell, int64_t row0, int64_t b) const {
    if (!out_.grad_weight) return nullptr;
    const int64_t units = cell.token_units(g_.k_unit);
    return region<float>(p_.grad_cols) + (b * units + row0 / g_.k_unit) * g_.nr;
  }

  void grad_tile(const Panels& panels, const Cell& cell, const cpu::GradTileOptions& options,
                 float* tile, int64_t a, int64_t b, const Next& next) {
    const int64_t row0 = panels.begin(a);
    const int rows = panels.size(a);
    const int64_t v0 = cell.v0 + b * g_.nr;
    const auto columns = static_cast<int>(std::min<int64_t>(g_.nr, cell.columns - b * g_.nr));
    fetch_for_writing(in_grad_rows(cell, next.a, next.tile_b));
    fetch_for_writing(in_grad_cols(cell, panels.begin(next.a), next.tile_b));
    const void* values[kMaxTileRows];
    cpu::GradTile from{.source = cpu::GradSource::logits,
                       .type = DType::f32,
                       .rows = values,
                       .count = rows,
                       .columns = columns,
                       .v0 = v0};
    switch (p_.source) {
      case SoftmaxSource::logits:
        g_.tile(Panels::tile_rows(rows), region<float>(p_.input_rows) + a * h_units_ * g_.mr,
                region<float>(p_.weight_rows) + b * h_units_ * g_.nr, h_units_, tile, false,
                ahead(next, region<float>(p_.input_rows), region<float>(p_.weight_rows), h_units_));
        for (int r = 0; r < rows; ++r) values[r] = tile + r * g_.nr;
        break;
      case SoftmaxSource::softmax:
        from.source = cpu::GradSource::softmax;
        softmax_rows(region<int64_t>(p_.row_index) + row0, v0, tile, from, values);
        break;
      case SoftmaxSource::held:
        held_rows(a, row0, from, values);
        break;
    }
    g_.grad_panels(from, region<cpu::GradRow>(p_.row_params) + row0, options,
                   in_grad_rows(cell, a, b), in_grad_cols(cell, row0, b));
  }

  // Rows of exponentials that the forward kept, of token panel a.
  void held_rows(int64_t a, int64_t row0, cpu::GradTile& from, const void** values) const {
    const std::byte* held =
        held_.tiles + (a * held_.vocab_panels + from.v0 / g_.nr) * held_.tile_bytes;
    for (int r = 0; r < from.count; ++r) values[r] = held + r * g_.nr * size_of(held_.type);
    from.source = cpu::GradSource::held;
    from.type = held_.type;
    from.factors = held_.factors + from.v0 / cpu::kSegmentColumns * held_.factor_stride + row0;
  }

  // Rows of the softmax that was given, as they lie; copied only where their columns are apart.
  void softmax_rows(const int64_t* index, int64_t v0, float* tile, cpu::GradTile& from,
                    const void** values) const {
    const ConstMatrixView& softmax = *in_.softmax;
    from.type = softmax.dtype;
    for (int r = 0; r < from.count; ++r) {
      if (softmax.col_stride == 1) {
        values[r] = at(softmax, index[r], v0);
        // A little of many rows at a time: more streams than the hardware follows.
        const auto* soon = static_cast<const std::byte*>(values[r]) + kFetchBytes;
        __builtin_prefetch(soon, 0, 2);
        if (softmax.dtype == DType::f32) __builtin_prefetch(soon + 64, 0, 2);
        continue;
      }
      gather(softmax, index[r], v0, from.columns, tile + r * g_.nr);
      values[r] = tile + r * g_.nr;
    }
  }

  // The panels of grad_logits lie in outer caches; a tile takes mr * nr units of 4 / k_unit bytes.
  void fetch_for_writing(const float* p) const {
    if (p == nullptr) return;
    const auto* bytes = reinterpret_cast<const char*>(p);
    const int64_t size = int64_t{g_.mr} * g_.nr * 4 / g_.k_unit;
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(bytes + i, 1);
  }

  // ---- products --------------------------------------------------------------------------------

  struct Step {
    const GradientOutput& output;
    Accumulator accumulator;
    float* tiles;  // of the workspace accumulator
    bool first, last;
  };

  // One output tile: its running sum comes from where it lives, k goes on, and back it goes.
  // load and store move a tile between the output and `c`; multiply(resume) adds to it.
  template <class Multiply, class Load, class Store>
  void add_tile(const Step& step, float* c, int64_t next_tile, const Multiply& multiply,
                const Load& load, const Store& store) {
    const bool in_output = step.accumulator != Accumulator::workspace;
    const bool resume = step.first ? step.output.accumulate : true;
    if (!in_output && !step.first) {
      // The next tile of the same walk: its running sums arrive while this one is computed.
      const auto* next = reinterpret_cast<const char*>(c + next_tile);
      for (int64_t i = 0; i < int64_t{g_.mr} * g_.nr * 4; i += 64) __builtin_prefetch(next + i, 1);
    }
    if (resume && (step.first || in_output)) load(c);
    multiply(resume);
    if (step.last || in_output) store(c);
  }

  void add_grad_weight(const Team& team, const Cell& cell) {
    const Panels panels(p_.shape.H, g_.mr);
    const int64_t units = cell.token_units(g_.k_unit);
    const int64_t v_panels = ceil_div(cell.columns, g_.nr);
    const Step step{*p_.types.grad_weight, p_.grad_weight_accumulator,
                    region<float>(p_.grad_weight_tiles), cell.token_index == 0,
                    cell.token_index + 1 == cell.token_chunks};
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const int64_t chunk_panels = ceil_div(p_.vocab_chunk, g_.nr);
    const int64_t base = p_.vocab_outside ? 0 : cell.vocab_index * chunk_panels * panels.count;
    const int64_t wide = round_up(g_.mr, 16);
    float* transposed = scratch(team) + wide * g_.nr;
    const float* a_panels = region<float>(p_.input_cols);
    const float* b_panels = region<float>(p_.grad_cols);
    // Whole lines of a fresh output are written past the caches: tiles are 14 columns of it or so,
    // and reading each line first costs as much of the memory's time as writing it.
    const MatrixView& out = *out_.grad_weight;
    const bool buffered = p_.row_buffer_stride > 0 && step.last && out.col_stride == 1;
    std::byte* buffer = region<std::byte>(p_.row_buffers + team.rank() * p_.row_buffer_stride);
    int64_t buffered_h0 = -1;  // the first column in it
    int64_t group = group_of(units * g_.mr * 4);
    if (buffered) group = std::min(group, GradientPlanData::kBufferedPanels);
    const int64_t element = size_of(out.dtype);
    for_tiles(
        team.part(panels.count * v_panels), panels.count, v_panels, group,
        [&](int64_t a, int64_t b, const Next& next) {
          const int64_t h0 = panels.begin(a);
          if (buffered_h0 < 0) buffered_h0 = h0;
          const int rows = panels.size(a);
          const int64_t v0 = cell.v0 + b * g_.nr;
          const int64_t columns = std::min<int64_t>(g_.nr, cell.columns - b * g_.nr);
          float* c = step.accumulator == Accumulator::workspace
                         ? step.tiles + (base + b * panels.count + a) * tile_floats
                         : scratch(team);
          add_tile(
              step, c, tile_floats,
              [&](bool resume) {
                g_.tile(Panels::tile_rows(rows), a_panels + a * units * g_.mr,
                        b_panels + b * units * g_.nr, units, c, resume,
                        ahead(next, a_panels, b_panels, units));
              },
              [&](float* tile) {
                for (int64_t v = 0; v < columns; ++v) {
                  load_row(k_, *out_.grad_weight, v0 + v, h0, rows, transposed + v * wide);
                }
                // wide columns become rows; the tile's buffer has only the real ones, so by
                // way of the scratch tile when it is an accumulator's.
                float* whole = scratch(team);
                k_.transpose(transposed, g_.nr, static_cast<int>(wide), whole, g_.nr);
                if (tile != whole) std::copy(whole, whole + rows * g_.nr, tile);
              },
              [&](const float* tile) {
                if (buffered) {
                  k_.store_transposed(out.dtype, tile, rows, g_.nr, static_cast<int>(columns),
                                      buffer + (h0 - buffered_h0) * element, p_.row_buffer_bytes());
                  return;
                }
                if (out.col_stride == 1) {
                  k_.store_transposed(out.dtype, tile, rows, g_.nr, static_cast<int>(columns),
                                      at(out, v0, h0), out.row_stride * element);
                  return;
                }
                k_.transpose(tile, rows, g_.nr, transposed, wide);
                for (int64_t v = 0; v < columns; ++v) {
                  store_row(k_, out, v0 + v, h0, rows, transposed + v * wide);
                }
              });
        },
        [&](int64_t, int64_t a1, int64_t b) {
          if (buffered) {
            const int64_t v0 = cell.v0 + b * g_.nr;
            const int64_t end = a1 == panels.count ? p_.shape.H : panels.begin(a1);
            k_.copy_past_caches(
                buffer, p_.row_buffer_bytes(), std::min<int64_t>(g_.nr, cell.columns - b * g_.nr),
                (end - buffered_h0) * element, at(out, v0, buffered_h0), out.row_stride * element);
          }
          buffered_h0 = -1;
        });
  }

  void add_grad_input(const Team& team, const Cell& cell) {
    const Panels panels(cell.tokens, g_.mr);
    const int64_t units = cell.vocab_units(g_.k_unit);
    const int64_t h_panels = ceil_div(p_.shape.H, g_.nr);
    const Step step{*p_.types.grad_input, p_.grad_input_accumulator,
                    region<float>(p_.grad_input_tiles), cell.vocab_index == 0,
                    cell.vocab_index + 1 == cell.vocab_chunks};
    const int64_t tile_floats = int64_t{g_.mr} * g_.nr;
    const int64_t chunk_panels = ceil_div(p_.token_chunk, g_.mr);
    const int64_t base = p_.vocab_outside ? cell.token_index * chunk_panels * h_panels : 0;
    const int64_t* index = output_rows_ != nullptr ? output_rows_ : region<int64_t>(p_.row_index);
    const float* a_panels = region<float>(p_.grad_rows);
    const float* b_panels = region<float>(p_.weight_cols);
    const bool own_panels = p_.own_panels;
    float* own_panel = own<float>(team, p_.weight_cols);
    int64_t own_index = -1;  // the B panel in it
    const bool plain = in_.weight.col_stride == 1 && cell.columns % g_.k_unit == 0;
    const void** weight = own<const void*>(team, p_.weight_pointers);
    for (int64_t v = 0; own_panels && plain && v < cell.columns; ++v) {
      weight[v] = at(in_.weight, cell.v0 + v, 0);
    }
    const int64_t element = size_of(in_.weight.dtype);
    for_tiles(
        team.part_from_end(panels.count * h_panels), panels.count, h_panels,
        own_panels ? panels.count : group_of(units * g_.mr * 4),
        [&](int64_t a, int64_t b, const Next& next) {
          const int64_t row0 = panels.begin(a);
          const int rows = panels.size(a);
          const int64_t h0 = b * g_.nr;
          const int64_t columns = std::min<int64_t>(g_.nr, p_.shape.H - h0);
          const bool packs = own_panels && own_index != b;
          own_index = b;
          const bool as_it_multiplies = packs && plain && columns == g_.nr;
          if (packs && !as_it_multiplies) {
            pack_weight_columns(cell, h0, static_cast<int>(columns), own_panel);
          }
          float* c = step.accumulator == Accumulator::workspace
                         ? step.tiles + (base + a * h_panels + b) * tile_floats
                         : scratch(team);
          add_tile(
              step, c, h_panels * tile_floats,
              [&](bool resume) {
                const float* a_panel = a_panels + a * units * g_.mr;
                const int tile_rows = Panels::tile_rows(rows);
                if (as_it_multiplies) {
                  g_.tile_packing(p_.target.source, tile_rows, a_panel, weight, h0 * element, units,
                                  c, resume, own_panel);
                } else if (own_panels) {
                  g_.tile(tile_rows, a_panel, own_panel, units, c, resume,
                          {a_panels + next.a * units * g_.mr, own_panel, 0});
                } else {
                  g_.tile(tile_rows, a_panel, b_panels + b * units * g_.nr, units, c, resume,
                          ahead(next, a_panels, b_panels, units));
                }
              },
              [&](float* tile) {
                for (int r = 0; r < rows; ++r) {
                  if (index[row0 + r] == kNoRow) continue;
                  load_row(k_, *out_.grad_input, index[row0 + r], h0, columns, tile + r * g_.nr);
                }
              },
              [&](const float* tile) {
                for (int r = 0; r < rows; ++r) {
                  if (index[row0 + r] == kNoRow) continue;
                  store_row(k_, *out_.grad_input, index[row0 + r], h0, columns, tile + r * g_.nr);
                }
              });
        });
  }

  void set_held(const Held& held) { held_ = held; }
  // Where the rows of a block lie in grad_input, if not where they lie in input.
  void set_output_rows(const int64_t* rows) { output_rows_ = rows; }

  // ---- panels of one's own ---------------------------------------------------------------------
  //
  //   each member, of its panels of the chunk's vocabulary rows
  //     logits of all tokens                weight as it lies, or packed for this panel only
  //     grad_logits                         as an A panel for all, as a B panel for itself
  //     its rows of grad_weight             tiles as the output lies, straight to memory
  //   barrier
  //   each member, of its tiles of grad_input
  //     the chunk's rows of weight x grad_logits: packed by the first tile of a panel as it
  //     multiplies, in L1 for the others

  template <class T>
  T* own(const Team& team, int64_t offset) const {
    return region<T>(offset + team.rank() * p_.own_stride);
  }

  bool own_panels_cell(const Team& team, int64_t vocab_index, Cell& cell) {
    cell.vocab_index = vocab_index;
    cell.v0 = vocab_index * p_.vocab_chunk;
    cell.columns = std::min(p_.vocab_chunk, p_.shape.V - cell.v0);
    if (vocab_index == 0) team.barrier();  // the packed tokens are everyone's
    const int64_t segment = cpu::kSegmentColumns / g_.nr;
    const Range mine = team.part(ceil_div(cell.columns, g_.nr));
    for (int64_t first = mine.begin; first < mine.end; first += segment) {
      if (stop_.requested()) break;
      own_vocabulary(team, cell, {first, std::min(mine.end, first + segment)});
    }
    team.barrier();
    if (out_.grad_input) add_grad_input(team, cell);
    return !stop_.leave_together(team);
  }

  void pack_own_tokens(const Team& team, const Cell& cell) {
    const RowSelection input{in_.input, region<int64_t>(p_.row_index)};
    if (p_.few) {
      if (team.rank() == 0) {
        pack_row_panel(p_.target, input, 0, static_cast<int>(cell.tokens), p_.few.width,
                       region<float>(p_.input_rows));
      }
    } else if (recompute()) {
      const Panels panels(cell.tokens, g_.mr);
      const Range mine = team.part(panels.count);
      for (int64_t i = mine.begin; i < mine.end; ++i) {
        pack_row_panel(p_.target, input, panels.begin(i), panels.size(i), g_.mr,
                       region<float>(p_.input_rows) + i * h_units_ * g_.mr);
      }
    }
    if (!out_.grad_weight) return;
    const Range mine = team.part(ceil_div(p_.shape.H, g_.nr));
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const auto columns = static_cast<int>(std::min<int64_t>(g_.nr, p_.shape.H - i * g_.nr));
      for (int64_t k0 = 0; k0 < cell.tokens; k0 += kPackDepth) {
        pack_col_block(p_.target, input, k0, std::min(kPackDepth, cell.tokens - k0), i * g_.nr,
                       columns, g_.nr,
                       region<float>(p_.input_cols) + i * cell.token_units(g_.k_unit) * g_.nr);
      }
    }
  }

  // The chunk's rows of weight, `count` columns from h0 on, as one B panel.
  void pack_weight_columns(const Cell& cell, int64_t h0, int count, float* panel) const {
    const RowSelection weight{in_.weight, nullptr, cell.v0};
    for (int64_t k0 = 0; k0 < cell.columns; k0 += kPackDepth) {
      pack_col_block(p_.target, weight, k0, std::min(kPackDepth, cell.columns - k0), h0, count,
                     g_.nr, panel);
    }
  }

  // Panels [range) of the chunk, at most a segment: grad_logits, and from them grad_weight.
  void own_vocabulary(const Team& team, const Cell& cell, const Range& range) {
    const int64_t v0 = cell.v0 + range.begin * g_.nr;
    const auto columns =
        static_cast<int>(std::min(range.end * g_.nr, cell.columns) - range.begin * g_.nr);
    const float* logits = nullptr;
    if (p_.few) {
      logits = few_logits(p_.target, p_.few, in_.weight, region<float>(p_.input_rows), v0, columns,
                          region<std::byte>(p_.few_logits + team.rank() * p_.few_stride));
    }
    const Panels panels(cell.tokens, g_.mr);
    for (int64_t b0 = range.begin; b0 < range.end; b0 += p_.own_group) {
      const int64_t b1 = std::min(range.end, b0 + p_.own_group);
      if (recompute() && !p_.few) {
        const Range v = panel_rows(cell, b0);
        pack_row_panel(p_.target, {in_.weight, nullptr, v.begin}, 0, static_cast<int>(v.size()),
                       g_.nr, own<float>(team, p_.weight_rows));
      }
      for (int64_t a = 0; a < panels.count; ++a) {
        if (stop_.requested()) return;
        for (int64_t b = b0; b < b1; ++b) {
          own_grad_tile(team, cell, panels, a, b, own_grad_cols(team, cell, b - b0),
                        p_.few ? logits + (b - range.begin) * p_.few.width * g_.nr : nullptr);
        }
      }
      for (int64_t b = b0; b < b1 && out_.grad_weight; ++b) {
        store_weight_rows(team, cell, panel_rows(cell, b), own_grad_cols(team, cell, b - b0));
      }
    }
  }

  Range panel_rows(const Cell& cell, int64_t b) const {
    return {cell.v0 + b * g_.nr, cell.v0 + std::min((b + 1) * g_.nr, cell.columns)};
  }
  float* own_grad_cols(const Team& team, const Cell& cell, int64_t panel) const {
    return own<float>(team, p_.grad_cols) + panel * cell.token_units(g_.k_unit) * g_.nr;
  }

  // Tile (a, b) of grad_logits, into the A panel of its tokens and this thread's B panel.
  // few: the logits of all tokens, where they are few.
  void own_grad_tile(const Team& team, const Cell& cell, const Panels& panels, int64_t a, int64_t b,
                     float* grad_cols, const float* few) {
    const int64_t row0 = panels.begin(a);
    const Range v = panel_rows(cell, b);
    const void* values[kMaxTileRows];
    cpu::GradTile from{.source = cpu::GradSource::logits,
                       .type = DType::f32,
                       .rows = values,
                       .count = panels.size(a),
                       .columns = static_cast<int>(v.size()),
                       .v0 = v.begin};
    switch (p_.source) {
      case SoftmaxSource::logits: {
        const float* tile = scratch(team);
        if (p_.few) {
          tile = few + row0 * g_.nr;
        } else {
          const float* input = region<float>(p_.input_rows) + a * h_units_ * g_.mr;
          const float* weight = own<float>(team, p_.weight_rows);
          const int64_t after = a + 1 < panels.count ? h_units_ * g_.mr : 0;
          g_.tile(Panels::tile_rows(from.count), input, weight, h_units_, scratch(team), false,
                  ahead_of_rows(input + after, in_.weight, v.begin + g_.nr, g_.nr, a, panels.count,
                                h_units_));
        }
        for (int r = 0; r < from.count; ++r) values[r] = tile + r * g_.nr;
        break;
      }
      case SoftmaxSource::softmax:
        from.source = cpu::GradSource::softmax;
        softmax_rows(region<int64_t>(p_.row_index) + row0, v.begin, scratch(team), from, values);
        break;
      case SoftmaxSource::held:
        held_rows(a, row0, from, values);
        break;
    }
    g_.grad_panels(from, region<cpu::GradRow>(p_.row_params) + row0, tile_options(),
                   in_grad_rows(cell, a, b),
                   out_.grad_weight ? grad_cols + row0 / g_.k_unit * g_.nr : nullptr);
  }

  // Rows [v.begin, v.end) of grad_weight, at most nr, from the B panel of their grad_logits.
  void store_weight_rows(const Team& team, const Cell& cell, const Range& v, const float* panel) {
    const MatrixView& out = *out_.grad_weight;
    const bool accumulate = p_.types.grad_weight->accumulate;
    auto mode = accumulate ? cpu::RowsMode::accumulate : cpu::RowsMode::store;
    const int64_t units = cell.token_units(g_.k_unit);
    const auto rows = static_cast<int>(v.size());
    const float* input = region<float>(p_.input_cols);
    const int64_t element = size_of(out.dtype);
    if (out.col_stride != 1) {  // one panel of H at a time, by way of fp32
      float* tile = scratch(team);
      for (int64_t h0 = 0; h0 < p_.shape.H; h0 += g_.nr) {
        const int64_t columns = std::min<int64_t>(g_.nr, p_.shape.H - h0);
        if (accumulate) {
          for (int r = 0; r < rows; ++r) {
            load_row(k_, out, v.begin + r, h0, columns, tile + r * g_.nr);
          }
        }
        g_.product_rows(panel, input + h0 * units, units, rows, columns, DType::f32, mode, tile,
                        g_.nr * 4);
        for (int r = 0; r < rows; ++r) {
          store_row(k_, out, v.begin + r, h0, columns, tile + r * g_.nr);
        }
      }
      return;
    }
    const auto whole_lines = [](int64_t bytes) { return bytes % 64 == 0; };
    std::byte* first = at(out, v.begin, 0);
    const bool direct = p_.past_caches && whole_lines(g_.nr * element) &&
                        whole_lines(out.row_stride * element) &&
                        whole_lines(static_cast<int64_t>(reinterpret_cast<uintptr_t>(first)));
    if (direct) mode = cpu::RowsMode::past_caches;
    if (direct || p_.row_buffer_stride == 0) {
      g_.product_rows(panel, input, units, rows, p_.shape.H, out.dtype, mode, first,
                      out.row_stride * element);
      return;
    }
    std::byte* buffer = region<std::byte>(p_.row_buffers + team.rank() * p_.row_buffer_stride);
    const int64_t at_once = p_.row_buffer_bytes() / element / g_.nr * g_.nr;
    for (int64_t h0 = 0; h0 < p_.shape.H; h0 += at_once) {
      const int64_t columns = std::min(at_once, p_.shape.H - h0);
      g_.product_rows(panel, input + h0 * units, units, rows, columns, out.dtype,
                      cpu::RowsMode::store, buffer, p_.row_buffer_bytes());
      k_.copy_past_caches(buffer, p_.row_buffer_bytes(), rows, columns * element,
                          at(out, v.begin, h0), out.row_stride * element);
    }
  }

 private:
  static constexpr int64_t kFetchBytes = 512;
  static constexpr int kMaxTileRows = 32;

  const GradientPlanData& p_;
  const cpu::GemmKernels& g_;
  const cpu::Kernels& k_;
  const GradientOperands& in_;
  const GradientOutputs& out_;
  std::byte* ws_;
  Stop& stop_;
  int64_t h_units_;
  int64_t l2_bytes_ = p_.target.l2_bytes;
  Held held_;
  const int64_t* output_rows_ = nullptr;
  int64_t rows_ = 0;  // that count
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
