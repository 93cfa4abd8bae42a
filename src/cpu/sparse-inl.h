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
                                             uint16_t base, float* out_values,
                                             uint16_t* out_columns) {
  int n = 0;
  for (int i = 0; i < lanes; ++i) {
    const float p = values[i] * scale;
    const float u = logitless::cpu::uniform_of(token_hash, vocab_hash[columns[i]]);
    out_values[n] = (p > tau ? p : tau) * factor;
    out_columns[n] = static_cast<uint16_t>(base + columns[i]);
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
             uint16_t base, float* out_values, uint16_t* out_columns) {
  int64_t n = 0;
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const int lanes = count - i < V::kLanes ? static_cast<int>(count - i) : V::kLanes;
    n += lanes_thinned<V>(values + i, columns + i, lanes, scale, vocab_hash, token_hash, tau,
                          factor, base, out_values + n, out_columns + n);
  }
  return n;
}

// ---- sums of a few rows ----
//
// Arithmetic (AVX-512, bf16): per 32 columns of a row one load, a shift, a mask and two
// multiply-adds. bf16 is packed so that element j shares a word with element j + kLanes, which is
// its upper half.

// Two neighbouring vectors of a packed row.
template <class V, logitless::cpu::PackSource kSource>
[[gnu::always_inline]] inline void load_packed(const unsigned char* p, typename V::F* x) {
  using logitless::cpu::PackSource;
  if constexpr (kSource == PackSource::f32 || kSource == PackSource::f16) {
    x[0] = V::template load_as<kSource>(p);
    x[1] = V::template load_as<kSource>(p + V::kLanes * logitless::cpu::source_bytes(kSource));
  } else {
    const typename V::F both = V::load(reinterpret_cast<const float*>(p));
    x[0] = V::lower_halves(both);
    x[1] = V::upper_halves(both);
  }
}

// kVectors vectors of the output stay in registers while the rows pass by.
template <class V, logitless::cpu::PackSource kSource, int kVectors>
[[gnu::noinline]] void sum_block(const unsigned char* panel, int64_t row_bytes, const uint16_t* ids,
                                 const float* factors, int64_t count, float* out, bool accumulate) {
  constexpr int64_t kBytes = logitless::cpu::packed_bytes(kSource);
  typename V::F acc[kVectors];
#pragma GCC unroll 32
  for (int j = 0; j < kVectors; ++j) {
    acc[j] = accumulate ? V::load(out + j * V::kLanes) : V::zero();
  }
  for (int64_t i = 0; i < count; ++i) {
    const unsigned char* row = panel + ids[i] * row_bytes;
    asm("" : "+r"(row));  // one address: GCC would keep one for each vector, and spill them
    const typename V::F factor = V::set1(factors[i]);
#pragma GCC unroll 32
    for (int j = 0; j < kVectors; j += 2) {
      typename V::F x[2];
      load_packed<V, kSource>(row + j * V::kLanes * kBytes, x);
      acc[j] = V::fma(factor, x[0], acc[j]);
      acc[j + 1] = V::fma(factor, x[1], acc[j + 1]);
    }
  }
#pragma GCC unroll 32
  for (int j = 0; j < kVectors; ++j) V::store(out + j * V::kLanes, acc[j]);
}

// Chooses the instance by the number of vectors, which is even.
template <class V, logitless::cpu::PackSource kSource, int kVectors>
void sum_vectors(int64_t vectors, const unsigned char* panel, int64_t row_bytes,
                 const uint16_t* ids, const float* factors, int64_t count, float* out,
                 bool accumulate) {
  if (vectors == kVectors) {
    return sum_block<V, kSource, kVectors>(panel, row_bytes, ids, factors, count, out, accumulate);
  }
  if constexpr (kVectors > 2) {
    return sum_vectors<V, kSource, kVectors - 2>(vectors, panel, row_bytes, ids, factors, count,
                                                 out, accumulate);
  }
}

template <class V, logitless::cpu::PackSource kSource>
void sum_packed_from(const void* panel, const uint16_t* ids, const float* factors, int64_t count,
                     int64_t columns, float* out, bool accumulate) {
  constexpr int64_t kBytes = logitless::cpu::packed_bytes(kSource);
  constexpr int64_t kMost = V::kLanes == 16 ? 20 : 12;  // of 32 and of 16 registers
  // Blocks of nearly the same width: the few chains of a narrow one would wait for each other.
  const int64_t all = columns / V::kLanes;
  const int64_t blocks = (all + kMost - 1) / kMost;
  const int64_t width = blocks == 0 ? 0 : (all / 2 + blocks - 1) / blocks * 2;
  for (int64_t v = 0; v < all; v += width) {
    const int64_t c = v * V::kLanes;
    sum_vectors<V, kSource, kMost>(width < all - v ? width : all - v,
                                   static_cast<const unsigned char*>(panel) + c * kBytes,
                                   columns * kBytes, ids, factors, count, out + c, accumulate);
  }
}

template <class V>
void sum_packed(logitless::cpu::PackSource source, const void* panel, const uint16_t* ids,
                const float* factors, int64_t count, int64_t columns, float* out, bool accumulate) {
  using logitless::cpu::PackSource;
  if (source == PackSource::f32) {
    return sum_packed_from<V, PackSource::f32>(panel, ids, factors, count, columns, out,
                                               accumulate);
  }
  if (source == PackSource::f16) {
    return sum_packed_from<V, PackSource::f16>(panel, ids, factors, count, columns, out,
                                               accumulate);
  }
  sum_packed_from<V, PackSource::bf16>(panel, ids, factors, count, columns, out, accumulate);
}

template <class V, logitless::cpu::PackSource kSource>
void pack_for_sums_from(const void* const* rows, int64_t count, int64_t columns, void* panel) {
  using logitless::cpu::PackSource;
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  constexpr int64_t kPackedBytes = logitless::cpu::packed_bytes(kSource);
  constexpr int64_t kPair = 2 * V::kLanes;
  constexpr int64_t kUnit = logitless::cpu::kPackedColumns;
  const int64_t padded = (columns + kUnit - 1) / kUnit * kUnit;
  auto* out = static_cast<unsigned char*>(panel);
  for (int64_t i = 0; i < count; ++i) {
    const auto* row = static_cast<const unsigned char*>(rows[i]);
    for (int64_t c = 0; c < padded; c += kPair, out += kPair * kPackedBytes) {
      typename V::F x[2];
      for (int j = 0; j < 2; ++j) {
        const int64_t left = columns - c - j * V::kLanes;
        const unsigned char* p = row + (c + j * V::kLanes) * kBytes;
        if (left >= V::kLanes) {
          x[j] = V::template load_as<kSource>(p);
        } else if (left > 0) {
          x[j] = V::template load_first_as<kSource>(p, static_cast<int>(left));
        } else {
          x[j] = V::zero();
        }
      }
      if constexpr (kSource == PackSource::f32) {
        V::store(reinterpret_cast<float*>(out), x[0]);
        V::store(reinterpret_cast<float*>(out) + V::kLanes, x[1]);
      } else if constexpr (kSource == PackSource::f16) {
        V::store_f16(out, x[0]);
        V::store_f16(out + V::kLanes * kPackedBytes, x[1]);
      } else {
        V::store(reinterpret_cast<float*>(out), V::both_halves(x[0], x[1]));
      }
    }
  }
}

template <class V>
void pack_for_sums(logitless::cpu::PackSource source, const void* const* rows, int64_t count,
                   int64_t columns, void* panel) {
  using logitless::cpu::PackSource;
  switch (source) {
    case PackSource::f32:
      return pack_for_sums_from<V, PackSource::f32>(rows, count, columns, panel);
    case PackSource::f16:
      return pack_for_sums_from<V, PackSource::f16>(rows, count, columns, panel);
    case PackSource::bf16:
      return pack_for_sums_from<V, PackSource::bf16>(rows, count, columns, panel);
    case PackSource::f32_as_bf16:
      return pack_for_sums_from<V, PackSource::f32_as_bf16>(rows, count, columns, panel);
  }
}

}  // namespace
