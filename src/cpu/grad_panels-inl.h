// SPDX-License-Identifier: Apache-2.0
// One tile of grad_logits, from its source to the panels of both products without a stop in memory.
//
//   row r:  values -> gradient (fp32) -> rounded units along the columns
//   A form, for grad_input:   squares of those units, transposed: [columns / k_unit][mr]
//   B form, for grad_weight:  units of two rows interleaved:      [rows / k_unit][nr]
//
// What happens to a logit between the two is gradient_of_values(), and only there: a feature of the
// loss belongs into it and into segment_rows (softmax_tile-inl.h).

#include <cstdint>

#include "cpu/exp-inl.h"
#include "cpu/kernels.h"

namespace {

// The factors of one row.
template <class V>
struct RowFactors {
  typename V::F max, inv_sum, grad, grad_lse, unscale, held;
  float target_grad;  // (p_target - 1) * grad where p_target is known beforehand (held)
};

template <class V>
[[gnu::always_inline]] inline RowFactors<V> row_factors(const logitless::cpu::GradRow& row,
                                                        const logitless::cpu::GradTile& tile, int r,
                                                        bool f16) {
  const float grad = f16 ? row.grad * row.f16_scale : row.grad;
  const bool held = tile.source == logitless::cpu::GradSource::held;
  return {.max = V::set1(row.max),
          .inv_sum = V::set1(row.inv_sum),
          .grad = V::set1(grad),
          .grad_lse = V::set1(f16 ? row.grad_lse * row.f16_scale : row.grad_lse),
          .unscale = V::set1(row.f16_unscale),
          .held = V::set1(held ? tile.factors[r] * grad : 0.0f),
          .target_grad = (row.target_p - 1.0f) * grad};
}

// g as it enters the products: rounded once to the operands' type. fp16 in the row's own scale, so
// that neither small gradients underflow nor another token's size matters. Pairs of bf16 are
// rounded when they are made.
template <class G>
[[gnu::always_inline]] inline typename G::V::F rounded_gradient(
    typename G::V::F g, const RowFactors<typename G::V>& row,
    const logitless::cpu::GradTileOptions& options) {
  using V = typename G::V;
  if constexpr (G::kUnit == 1) {
    if (options.round_to == logitless::DType::f16) return V::mul(V::round_f16(g), row.unscale);
    if (options.round_to == logitless::DType::bf16) return V::round_bf16(g);
  }
  return g;
}

// grad_logits of kLanes values: (p - one_hot) * grad + p * grad_lse in fp32, the subtraction first;
// then rounded. Held exponentials take one product: softmax's factor and the
// gradient are multiplied beforehand.
template <class G, logitless::cpu::GradSource kSource>
[[gnu::always_inline]] inline typename G::V::F gradient_of_values(
    typename G::V::F values, typename G::V::F one_hot, const RowFactors<typename G::V>& row,
    const logitless::cpu::GradRow& params, const logitless::cpu::GradTileOptions& options) {
  using V = typename G::V;
  using logitless::cpu::GradSource;
  using F = typename V::F;
  F g;
  if constexpr (kSource == GradSource::held) {
    g = V::mul(values, row.held);
  } else {
    F p = values;
    if constexpr (kSource == GradSource::logits) {
      if (params.round_logits && options.round_logits_to != logitless::DType::f32) {
        p = options.round_logits_to == logitless::DType::bf16 ? V::round_bf16(p) : V::round_f16(p);
      }
      p = V::mul(exp_vector<V>(V::sub(p, row.max)), row.inv_sum);
    }
    g = V::mul(V::sub(p, one_hot), row.grad);
    if (options.has_grad_lse) g = V::fma(p, row.grad_lse, g);
  }
  return rounded_gradient<G>(g, row, options);
}

// All vectors of row r. The target's column and columns beyond the vocabulary are rare, and take
// the way through memory.
template <class G, logitless::cpu::GradSource kSource, logitless::cpu::PackSource kType>
[[gnu::always_inline]] inline void gradient_of_row(const logitless::cpu::GradTile& tile, int r,
                                                   const logitless::cpu::GradRow& params,
                                                   const logitless::cpu::GradTileOptions& options,
                                                   typename G::V::F* g) {
  using logitless::cpu::GradSource;
  using V = typename G::V;
  using F = typename V::F;
  constexpr int kNr = G::kLanes * G::kVecs;
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kType);
  if (kSource == GradSource::held && params.grad == 0.0f) {  // whatever it holds
#pragma GCC unroll 8
    for (int j = 0; j < G::kVecs; ++j) g[j] = V::zero();
    return;
  }
  const RowFactors<V> row =
      row_factors<V>(params, tile, r, options.round_to == logitless::DType::f16);
  const auto* values = static_cast<const unsigned char*>(tile.rows[r]);
  const int64_t target = params.target - tile.v0;
  const bool here = params.target >= 0 && target >= 0 && target < kNr;
  if (tile.columns == kNr) {
#pragma GCC unroll 8
    for (int j = 0; j < G::kVecs; ++j) {
      const F x = V::template load_as<kType>(values + j * G::kLanes * kBytes);
      g[j] = gradient_of_values<G, kSource>(x, V::zero(), row, params, options);
    }
    if (!here) return;
  }
  alignas(64) float buffer[kNr] = {};
  for (int c = 0; c < tile.columns; ++c) {
    const F x = V::template load_first_as<kType>(values + c * kBytes, 1);
    const F one_hot = V::set1(here && c == target ? 1.0f : 0.0f);
    F element = gradient_of_values<G, kSource>(x, one_hot, row, params, options);
    if (kSource == GradSource::held && here && c == target) {
      element = rounded_gradient<G>(V::set1(row.target_grad), row, options);
    }
    V::store_first(buffer + c, element, 1);
  }
#pragma GCC unroll 8
  for (int j = 0; j < G::kVecs; ++j) g[j] = V::load(buffer + j * G::kLanes);
}

template <class G, logitless::cpu::GradSource kSource, logitless::cpu::PackSource kType>
void grad_panels_from(const logitless::cpu::GradTile& tile, const logitless::cpu::GradRow* params,
                      const logitless::cpu::GradTileOptions& options, float* a, float* b) {
  using V = typename G::V;
  using F = typename V::F;
  constexpr int kNr = G::kLanes * G::kVecs;
  constexpr int kUnitVecs = G::kVecs / G::kUnit;  // vectors of units of one row
  constexpr int kBlocks = (G::kMr + G::kLanes - 1) / G::kLanes;
  F units[kUnitVecs][kBlocks * G::kLanes];
  for (int r = 0; r < kBlocks * G::kLanes; r += G::kUnit) {
    F pair[G::kUnit][kUnitVecs];
#pragma GCC unroll 2
    for (int i = 0; i < G::kUnit; ++i) {
      F g[G::kVecs];
      if (r + i < tile.count) {
        gradient_of_row<G, kSource, kType>(tile, r + i, params[r + i], options, g);
      } else {
#pragma GCC unroll 8
        for (int j = 0; j < G::kVecs; ++j) g[j] = V::zero();
      }
      G::units_of_columns(g, pair[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kUnitVecs; ++j) units[j][r + i] = pair[i][j];
    }
    if (b != nullptr && r < tile.count) {
      F both[G::kVecs];
      G::units_of_rows(pair, both);
#pragma GCC unroll 8
      for (int j = 0; j < G::kVecs; ++j) {
        V::store(b + r / G::kUnit * kNr + j * G::kLanes, both[j]);
      }
    }
  }
  if (a == nullptr) return;
  const int columns = (tile.columns + G::kUnit - 1) / G::kUnit;
  for (int j = 0; j < kUnitVecs; ++j) {
    for (int r0 = 0; r0 < G::kMr; r0 += G::kLanes) {
      constexpr int kRest = G::kMr % G::kLanes;
      const int lanes = G::kMr - r0 < G::kLanes ? kRest : G::kLanes;
      V::transpose(units[j] + r0);
#pragma GCC unroll 16
      for (int i = 0; i < G::kLanes; ++i) {
        const int column = j * G::kLanes + i;
        if (column < columns) {
          V::store_first(a + column * G::kMr + r0, units[j][r0 + i], lanes);
        }
      }
    }
  }
}

template <class G>
void grad_panels(const logitless::cpu::GradTile& tile, const logitless::cpu::GradRow* rows,
                 const logitless::cpu::GradTileOptions& options, void* a, void* b) {
  using logitless::DType;
  using logitless::cpu::GradSource;
  using logitless::cpu::PackSource;
  auto* pa = static_cast<float*>(a);
  auto* pb = static_cast<float*>(b);
  switch (tile.source) {
    case GradSource::logits:
      return grad_panels_from<G, GradSource::logits, PackSource::f32>(tile, rows, options, pa, pb);
    case GradSource::softmax:
      if (tile.type == DType::f32) {
        return grad_panels_from<G, GradSource::softmax, PackSource::f32>(tile, rows, options, pa,
                                                                         pb);
      }
      if (tile.type == DType::f16) {
        return grad_panels_from<G, GradSource::softmax, PackSource::f16>(tile, rows, options, pa,
                                                                         pb);
      }
      return grad_panels_from<G, GradSource::softmax, PackSource::bf16>(tile, rows, options, pa,
                                                                        pb);
    case GradSource::held:
      if (tile.type == DType::f32) {
        return grad_panels_from<G, GradSource::held, PackSource::f32>(tile, rows, options, pa, pb);
      }
      return grad_panels_from<G, GradSource::held, PackSource::bf16>(tile, rows, options, pa, pb);
  }
}

}  // namespace
