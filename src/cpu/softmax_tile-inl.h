// SPDX-License-Identifier: Apache-2.0
// The statistics of a tile of logits, and conversions. A feature of the loss (softcap, temperature,
// bias, smoothing) belongs into segment_rows here and gradient_of_values in grad_panels-inl.h, and
// nowhere else.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/exp-inl.h"
#include "cpu/kernels.h"

namespace {

// Row max and sum of exp over one segment; merged into the row's state by the schedule.
// Shapes  tiles [panels][rows][nr]; max, sum [rows].
// Error   sum: (panels * nr / kLanes + log2 kLanes + 4) * 2^-24 relative, first order: exp within
//         2 ulp, kLanes running sums over sums of two, then a tree (Higham, Accuracy and
//         Stability, ch. 4).
// Empty   a row of -inf: the maximum is taken as 0 inside, so every term is exp(-inf) = 0 and
//         (-inf) - (-inf) is never formed.
// Why     max first, then sum: the segment is still in the cache, and the online update
//         (arXiv:1805.02867) would spend an extra exp at every new maximum.
//
// begin(row, its maximum) comes before the exponentials, two vectors at a time: hold(panel, row,
// column, exponentials of kLanes columns, of the next).
template <class V, class Begin, class Hold>
[[gnu::always_inline]] inline void segment_rows(const float* tiles, int64_t tile_stride, int panels,
                                                int nr, int rows, float* max, float* sum,
                                                const Begin& begin, const Hold& hold) {
  using F = typename V::F;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int r = 0; r < rows; ++r) {
    const float* row = tiles + int64_t{r} * nr;
    F m[2] = {V::set1(-kInf), V::set1(-kInf)};
    for (int p = 0; p < panels; ++p) {
      for (int c = 0; c < nr; c += 2 * V::kLanes) {
        m[0] = V::max(m[0], V::load(row + p * tile_stride + c));
        m[1] = V::max(m[1], V::load(row + p * tile_stride + c + V::kLanes));
      }
    }
    const float row_max = V::reduce_max(V::max(m[0], m[1]));
    const F base = V::set1(row_max == -kInf ? 0.0f : row_max);
    begin(r, row_max);
    F s = V::zero();
    for (int p = 0; p < panels; ++p) {
      for (int c = 0; c < nr; c += 2 * V::kLanes) {
        const float* x = row + p * tile_stride + c;
        const F e0 = exp_vector<V, true>(V::sub(V::load(x), base));
        const F e1 = exp_vector<V, true>(V::sub(V::load(x + V::kLanes), base));
        s = V::add(s, V::add(e0, e1));
        hold(p, r, c, e0, e1);
      }
    }
    sum[r] = V::reduce_add(s);
    max[r] = row_max;
    if (sum[r] != sum[r]) {  // rare: +inf (its maximum stands) or a NaN, which max may have lost
      for (int p = 0; p < panels; ++p) {
        for (int c = 0; c < nr; ++c) {
          const float x = row[p * tile_stride + c];
          if (x != x) max[r] = x;
        }
      }
    }
  }
}

// Nothing to do before a row's exponentials.
constexpr auto kNoBegin = [](int, float) {};

template <class V>
void segment_stats(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                   float* max, float* sum) {
  segment_rows<V>(tiles, tile_stride, panels, nr, rows, max, sum, kNoBegin,
                  [](int, int, int, typename V::F, typename V::F) {});
}

template <class V>
void segment_stats_held(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                        float* max, float* sum, logitless::DType held_type, void* held,
                        int64_t held_stride) {
  auto* bytes = static_cast<unsigned char*>(held);
  if (held_type == logitless::DType::bf16) {
    segment_rows<V>(tiles, tile_stride, panels, nr, rows, max, sum, kNoBegin,
                    [&](int p, int r, int c, typename V::F e0, typename V::F e1) {
                      V::stream_bf16(bytes + p * held_stride + (int64_t{r} * nr + c) * 2, e0, e1);
                    });
  } else {
    segment_rows<V>(tiles, tile_stride, panels, nr, rows, max, sum, kNoBegin,
                    [&](int p, int r, int c, typename V::F e0, typename V::F e1) {
                      auto* out =
                          reinterpret_cast<float*>(bytes + p * held_stride) + int64_t{r} * nr + c;
                      V::stream(out, e0);
                      V::stream(out + V::kLanes, e1);
                    });
  }
  V::publish();
}

template <class V>
void merge_rows(float* max, float* sum, float* low, const float* max_b, const float* sum_b,
                int64_t count) {
  using F = typename V::F;
  const auto merge = [](F& m, F& s, F& l, F mb, F sb) {
    const F both = V::max_keep_nan(m, mb);
    // Two parts of -inf meet at the least finite number: exp(-inf) = 0 on both sides.
    const F base = V::max(both, V::set1(-std::numeric_limits<float>::max()));
    const F scale = exp_vector<V>(V::sub(m, base));
    const F a = V::mul(s, scale);
    const F b = V::mul(sb, exp_vector<V>(V::sub(mb, base)));
    s = V::add(a, b);
    // Two-sum (Knuth): s + rounded is exactly a + b.
    const F of_b = V::sub(s, a);
    const F rounded = V::add(V::sub(a, V::sub(s, of_b)), V::sub(b, of_b));
    l = V::add(V::mul(l, scale), rounded);
    m = both;
  };
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    F m = V::load(max + i);
    F s = V::load(sum + i);
    F l = V::load(low + i);
    merge(m, s, l, V::load(max_b + i), V::load(sum_b + i));
    V::store(max + i, m);
    V::store(sum + i, s);
    V::store(low + i, l);
  }
  if (i == count) return;
  const int rest = static_cast<int>(count - i);
  alignas(64) float lanes[5][V::kLanes] = {};
  for (int j = 0; j < rest; ++j) {
    lanes[0][j] = max[i + j];
    lanes[1][j] = sum[i + j];
    lanes[2][j] = low[i + j];
    lanes[3][j] = max_b[i + j];
    lanes[4][j] = sum_b[i + j];
  }
  F m = V::load(lanes[0]);
  F s = V::load(lanes[1]);
  F l = V::load(lanes[2]);
  merge(m, s, l, V::load(lanes[3]), V::load(lanes[4]));
  V::store_first(max + i, m, rest);
  V::store_first(sum + i, s, rest);
  V::store_first(low + i, l, rest);
}

template <class V>
void round_values(float* values, int64_t count, logitless::DType to) {
  if (to == logitless::DType::f32) return;
  const bool bf16 = to == logitless::DType::bf16;
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    const typename V::F x = V::load(values + i);
    V::store(values + i, bf16 ? V::round_bf16(x) : V::round_f16(x));
  }
  for (; i < count; ++i) {
    values[i] = bf16 ? static_cast<float>(logitless::bfloat16(values[i]))
                     : static_cast<float>(logitless::float16(values[i]));
  }
}

// out[i] = f(x[i]) for any count; the tail goes through a padded vector, so every element sees the
// same arithmetic.
template <class V, class Function>
void map_values(const float* x, int64_t count, float* out, Function f) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store(out + i, f(V::load(x + i)));
  if (i < count) {
    alignas(64) float lanes[V::kLanes] = {};
    for (int64_t j = i; j < count; ++j) lanes[j - i] = x[j];
    V::store_first(out + i, f(V::load(lanes)), static_cast<int>(count - i));
  }
}

template <class V>
void softmax_values(const float* x, int64_t count, float max, float inv_sum, float* out) {
  const typename V::F m = V::set1(max);
  const typename V::F s = V::set1(inv_sum);
  map_values<V>(x, count, out,
                [&](typename V::F v) { return V::mul(exp_vector<V>(V::sub(v, m)), s); });
}

template <class V>
void exp_values(const float* x, int64_t count, float* out) {
  map_values<V>(x, count, out, [](typename V::F v) { return exp_vector<V>(v); });
}

template <class V, logitless::cpu::PackSource kSource>
void load_from(const void* src, int64_t count, float* dst) {
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  const auto* p = static_cast<const unsigned char*>(src);
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    V::store(dst + i, V::template load_as<kSource>(p + i * kBytes));
  }
  if (i < count) {
    const auto rest = static_cast<int>(count - i);
    V::store_first(dst + i, V::template load_first_as<kSource>(p + i * kBytes, rest), rest);
  }
}

template <class V>
void load_values(logitless::DType type, const void* src, int64_t count, float* dst) {
  using logitless::cpu::PackSource;
  if (type == logitless::DType::f32) return load_from<V, PackSource::f32>(src, count, dst);
  if (type == logitless::DType::f16) return load_from<V, PackSource::f16>(src, count, dst);
  return load_from<V, PackSource::bf16>(src, count, dst);
}

// The first n lanes of x as elements of `type`; n = kLanes stores all of them.
template <class V>
[[gnu::always_inline]] inline void store_lanes(logitless::DType type, void* p, typename V::F x,
                                               int n) {
  if (type == logitless::DType::f32) {
    auto* out = static_cast<float*>(p);
    return n == V::kLanes ? V::store(out, x) : V::store_first(out, x, n);
  }
  if (type == logitless::DType::f16) {
    return n == V::kLanes ? V::store_f16(p, x) : V::store_f16_first(p, x, n);
  }
  return n == V::kLanes ? V::store_bf16(p, x) : V::store_bf16_first(p, x, n);
}

template <class V>
void store_values(logitless::DType type, const float* src, int64_t count, void* dst) {
  const int64_t bytes = type == logitless::DType::f32 ? 4 : 2;
  auto* p = static_cast<unsigned char*>(dst);
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    store_lanes<V>(type, p + i * bytes, V::load(src + i), V::kLanes);
  }
  if (i < count) {
    alignas(64) float lanes[V::kLanes] = {};
    for (int64_t j = i; j < count; ++j) lanes[j - i] = src[j];
    store_lanes<V>(type, p + i * bytes, V::load(lanes), static_cast<int>(count - i));
  }
}

// tile [rows][nr] -> row c of the output holds column c, from squares of kLanes in registers.
template <class V>
void store_transposed(logitless::DType type, const float* tile, int rows, int nr, int columns,
                      void* out, int64_t out_row_bytes) {
  if constexpr (V::kTransposesHalves) {
    if (type == logitless::DType::bf16 && nr == 32 && columns == nr && rows <= 16) {
      return V::store_halves_transposed(tile, rows, out, out_row_bytes);
    }
  }
  const int64_t bytes = type == logitless::DType::f32 ? 4 : 2;
  for (int r0 = 0; r0 < rows; r0 += V::kLanes) {
    const int lanes = rows - r0 < V::kLanes ? rows - r0 : V::kLanes;
    for (int c0 = 0; c0 < columns; c0 += V::kLanes) {
      typename V::F r[V::kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < V::kLanes; ++i) {
        r[i] = i < lanes ? V::load(tile + (r0 + i) * nr + c0) : V::zero();
      }
      V::transpose(r);
      auto* p = static_cast<unsigned char*>(out) + c0 * out_row_bytes + r0 * bytes;
      const int valid = columns - c0 < V::kLanes ? columns - c0 : V::kLanes;
#pragma GCC unroll 16
      for (int j = 0; j < V::kLanes; ++j) {
        if (j < valid) store_lanes<V>(type, p + j * out_row_bytes, r[j], lanes);
      }
    }
  }
}

template <class V>
void copy_past_caches(const void* src, int64_t src_stride, int64_t rows, int64_t bytes, void* dst,
                      int64_t dst_stride) {
  constexpr int64_t kLine = 64;
  for (int64_t r = 0; r < rows; ++r) {
    const auto* from = static_cast<const unsigned char*>(src) + r * src_stride;
    auto* to = static_cast<unsigned char*>(dst) + r * dst_stride;
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
    const int64_t to_line = misaligned == 0 ? 0 : kLine - misaligned;
    const int64_t head = to_line < bytes ? to_line : bytes;
    std::memcpy(to, from, static_cast<size_t>(head));
    int64_t i = head;
    for (; i + kLine <= bytes; i += kLine) V::stream_line(to + i, from + i);
    std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
  }
  V::publish();
}

}  // namespace
