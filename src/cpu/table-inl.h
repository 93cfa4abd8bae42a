// SPDX-License-Identifier: Apache-2.0
// Builds the table of one ISA from its vector type and its families of register tiles.

#include "cpu/gemm_tile-inl.h"
#include "cpu/grad_panels-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/product_rows-inl.h"
#include "cpu/softmax_tile-inl.h"
#include "cpu/sparse-inl.h"
#include "cpu/stream_tile-inl.h"
#include "cpu/tile_packing-inl.h"

namespace {

template <class G>
constexpr logitless::cpu::GemmKernels gemm_table() {
  static_assert(G::kMr % 2 == 0, "tokens are packed in pairs");
  return {
      .mr = G::kMr,
      .nr = G::kLanes * G::kVecs,
      .k_unit = G::kUnit,
      .tile = &tile<G>,
      .tile_packing = &tile_packing<G>,
      .pack_rows = &pack_rows<G>,
      .pack_cols = &pack_cols<G>,
      .grad_panels = &grad_panels<G>,
      .product_rows = &product_rows<G>,
      .lanes = G::kLanes,
      .few = G::kLanes / 2,
      .stream_vocab = &stream_vocab<G>,
      .stream_rows = {stream_rows<G>(1), stream_rows<G>(2), stream_rows<G>(3), stream_rows<G>(4)},
      .stream_staged_bytes = stream_staged_bytes<G>(),
      .stream_tokens = &stream_tokens<G>,
      .peak = &peak<G>,
      .flops_per_instruction = G::kFlops,
  };
}

template <class V>
constexpr logitless::cpu::Kernels table(logitless::Isa isa, const logitless::cpu::GemmKernels* f32,
                                        const logitless::cpu::GemmKernels* bf16_dot) {
  return {
      .isa = isa,
      .f32 = f32,
      .bf16_dot = bf16_dot,
      .segment_stats = &segment_stats<V>,
      .segment_stats_held = &segment_stats_held<V>,
      .segment_stats_collect = &segment_stats_collect<V>,
      .large_values = &large_values<V>,
      .thin = &thin<V>,
      .pack_for_sums = &pack_for_sums<V>,
      .sum_packed = &sum_packed<V>,
      .merge_rows = &merge_rows<V>,
      .round_values = &round_values<V>,
      .softmax = &softmax_values<V>,
      .exp = &exp_values<V>,
      .load = &load_values<V>,
      .store = &store_values<V>,
      .store_transposed = &store_transposed<V>,
      .copy_past_caches = &copy_past_caches<V>,
      .transpose = &transpose_tile<V>,
  };
}

}  // namespace
