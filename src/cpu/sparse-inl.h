// SPDX-License-Identifier: Apache-2.0
// What a sparse gradient needs of a level: the candidates of a tile of logits, chosen while their
// exponentials are in registers, and sums of a few rows of a matrix.
//
// Arithmetic (AVX-512): a candidate costs nothing by itself; every vector of 16 exponentials costs
// the hash (xor, multiply, shift, convert), a product, a comparison, two compressions and two
// stores, about 14 instructions beside the 17 of exp. Compressed in a register and stored whole:
// compressing straight to memory is microcoded on some CPUs.

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/softmax_tile-inl.h"
#include "cpu/sparse_hash.h"

namespace {

// Both steps of the choice, for a level that does them lane by lane.
[[gnu::always_inline]] inline int large_lanes(const float* values, const uint8_t* columns,
                                              int lanes, float scale, float least, int except,
                                              float* out) {
  int n = 0;
  for (int i = 0; i < lanes; ++i) {
    const float p = values[i] * scale;
    out[n] = p;
    n += p >= least && columns[i] != except ? 1 : 0;
  }
  return n;
}
[[gnu::always_inline]] inline int thin_lanes(const float* values, const uint8_t* columns, int lanes,
                                             float scale, const uint32_t* vocab_hash,
                                             uint32_t token_hash, float tau, float factor,
                                             float* out_values, uint8_t* out_columns) {
  int n = 0;
  for (int i = 0; i < lanes; ++i) {
    const float p = values[i] * scale;
    const float u = logitless::cpu::uniform_of(token_hash, vocab_hash[columns[i]]);
    out_values[n] = (p > tau ? p : tau) * factor;
    out_columns[n] = columns[i];
    n += p >= tau || u * tau < p ? 1 : 0;
  }
  return n;
}

template <class V>
void segment_stats_collect(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                           float* max, float* sum, const logitless::cpu::Collector& collector) {
  using logitless::cpu::Collector;
  constexpr float kLeastThreshold = 0x1p-90f;  // far above the subnormals: below, everything
  int64_t used = *collector.used;
  uint32_t token_hash = 0;
  float threshold = 0;
  bool fits = false;
  int64_t n = 0;
  const auto begin = [&](int r, float row_max) {
    token_hash = collector.token_hash[r];
    n = used;
    fits = used + panels * nr + V::kLanes <= collector.capacity;
    alignas(64) float lanes[V::kLanes] = {};
    lanes[0] = collector.reference[r] - row_max;
    V::store(lanes, exp_vector<V>(V::load(lanes)));
    threshold = collector.threshold[r] * lanes[0];
    if (!(threshold >= kLeastThreshold)) threshold = 0.0f;  // NaN too: 0 * infinity
  };
  const auto hold = [&](int p, int, int c, typename V::F e0, typename V::F e1) {
    if (!fits) return;
    const int column = p * nr + c;
    const uint32_t* hash = collector.vocab_hash + column;
    n += V::collect(e0, hash, token_hash, threshold, column, collector.values + n,
                    collector.columns + n);
    n += V::collect(e1, hash + V::kLanes, token_hash, threshold, column + V::kLanes,
                    collector.values + n, collector.columns + n);
  };
  for (int r = 0; r < rows; ++r) {
    const auto row = [&](int, float row_max) { begin(r, row_max); };
    segment_rows<V>(tiles + int64_t{r} * nr, tile_stride, panels, nr, 1, max + r, sum + r, row,
                    hold);
    collector.chunks[r * collector.chunk_stride] = {
        static_cast<uint32_t>(used), fits ? static_cast<int32_t>(n - used) : Collector::kDidNotFit};
    used = n;
  }
  *collector.used = used;
}

// A level that can compress has its own.
template <class V, class... Arguments>
[[gnu::always_inline]] inline int lanes_at_least(const Arguments&... arguments) {
  if constexpr (V::kCompresses) {
    return V::large_lanes(arguments...);
  } else {
    return large_lanes(arguments...);
  }
}
template <class V, class... Arguments>
[[gnu::always_inline]] inline int lanes_thinned(const Arguments&... arguments) {
  if constexpr (V::kCompresses) {
    return V::thin_lanes(arguments...);
  } else {
    return thin_lanes(arguments...);
  }
}

template <class V>
int64_t large_values(const float* values, const uint8_t* columns, int64_t count, float scale,
                     float least, int except, float* out) {
  int64_t n = 0;
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const int lanes = count - i < V::kLanes ? static_cast<int>(count - i) : V::kLanes;
    n += lanes_at_least<V>(values + i, columns + i, lanes, scale, least, except, out + n);
  }
  return n;
}

template <class V>
int64_t thin(const float* values, const uint8_t* columns, int64_t count, float scale,
             const uint32_t* vocab_hash, uint32_t token_hash, float tau, float factor,
             float* out_values, uint8_t* out_columns) {
  int64_t n = 0;
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const int lanes = count - i < V::kLanes ? static_cast<int>(count - i) : V::kLanes;
    n += lanes_thinned<V>(values + i, columns + i, lanes, scale, vocab_hash, token_hash, tau,
                          factor, out_values + n, out_columns + n);
  }
  return n;
}

template <class V, logitless::cpu::PackSource kSource, int kVectors>
[[gnu::always_inline]] inline void sum_block(const void* const* rows, int64_t offset,
                                             const float* factors, int64_t count, float* out,
                                             bool accumulate) {
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  typename V::F acc[kVectors];
#pragma GCC unroll 16
  for (int j = 0; j < kVectors; ++j) {
    acc[j] = accumulate ? V::load(out + j * V::kLanes) : V::zero();
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto* row = static_cast<const unsigned char*>(rows[i]) + offset;
    const typename V::F factor = V::set1(factors[i]);
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      acc[j] = V::fma(factor, V::template load_as<kSource>(row + j * V::kLanes * kBytes), acc[j]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < kVectors; ++j) V::store(out + j * V::kLanes, acc[j]);
}

// As many blocks of kVectors as fit from column c on, then narrower ones. Sixteen vectors of the
// output stay in registers while the rows pass by; the chains of fewer than four would wait.
template <class V, logitless::cpu::PackSource kSource, int kVectors>
int64_t sum_blocks(const void* const* rows, int64_t offset, const float* factors, int64_t count,
                   int64_t columns, float* out, bool accumulate, int64_t c) {
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  constexpr int64_t kBlock = int64_t{kVectors} * V::kLanes;
  for (; c + kBlock <= columns; c += kBlock) {
    sum_block<V, kSource, kVectors>(rows, offset + c * kBytes, factors, count, out + c, accumulate);
  }
  if constexpr (kVectors > 1) {
    c = sum_blocks<V, kSource, kVectors / 2>(rows, offset, factors, count, columns, out, accumulate,
                                             c);
  }
  return c;
}

template <class V, logitless::cpu::PackSource kSource>
void sum_rows_from(const void* const* rows, int64_t offset, const float* factors, int64_t count,
                   int64_t columns, float* out, bool accumulate) {
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  constexpr int kVectors = V::kLanes == 16 ? 16 : 8;  // of 32 and of 16 registers
  const int64_t c =
      sum_blocks<V, kSource, kVectors>(rows, offset, factors, count, columns, out, accumulate, 0);
  if (c == columns) return;
  const auto rest = static_cast<int>(columns - c);
  alignas(64) float lanes[V::kLanes] = {};
  for (int j = 0; j < rest && accumulate; ++j) lanes[j] = out[c + j];
  typename V::F acc = V::load(lanes);
  for (int64_t i = 0; i < count; ++i) {
    const auto* row = static_cast<const unsigned char*>(rows[i]) + offset + c * kBytes;
    acc = V::fma(V::set1(factors[i]), V::template load_first_as<kSource>(row, rest), acc);
  }
  V::store_first(out + c, acc, rest);
}

template <class V>
void sum_rows(logitless::cpu::PackSource source, const void* const* rows, int64_t offset,
              const float* factors, int64_t count, int64_t columns, float* out, bool accumulate) {
  using logitless::cpu::PackSource;
  switch (source) {
    case PackSource::f32:
      return sum_rows_from<V, PackSource::f32>(rows, offset, factors, count, columns, out,
                                               accumulate);
    case PackSource::f16:
      return sum_rows_from<V, PackSource::f16>(rows, offset, factors, count, columns, out,
                                               accumulate);
    case PackSource::bf16:
      return sum_rows_from<V, PackSource::bf16>(rows, offset, factors, count, columns, out,
                                                accumulate);
    case PackSource::f32_as_bf16:
      return sum_rows_from<V, PackSource::f32_as_bf16>(rows, offset, factors, count, columns, out,
                                                       accumulate);
  }
}

}  // namespace
