// SPDX-License-Identifier: Apache-2.0
// Everything between a tile of logits and a tile of grad_logits. A feature of the loss (softcap,
// temperature, bias, smoothing) belongs here and nowhere else.

#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/exp-inl.h"
#include "cpu/kernels.h"

namespace {

// Row max and sum of exp over one segment; merged into the row's state by the schedule.
// Shapes  tiles [panels][rows][nr]; max, sum [rows].
// Error   sum: (panels * nr / kLanes + log2 kLanes + 4) * 2^-24 relative, first order: exp within
//         2 ulp, kLanes running sums over the sums of panels, then a tree (Higham, Accuracy and
//         Stability, ch. 4).
// Empty   a row of -inf: the maximum is taken as 0 inside, so every term is exp(-inf) = 0 and
//         (-inf) - (-inf) is never formed.
// Why     max first, then sum: the segment is still in the cache, and the online update
//         (arXiv:1805.02867) would spend an extra exp at every new maximum.
//
// Hold(panel, row, column, exponentials) is called once per vector.
template <class V, class Hold>
[[gnu::always_inline]] inline void segment_rows(const float* tiles, int64_t tile_stride, int panels,
                                                int nr, int rows, float* max, float* sum,
                                                const Hold& hold) {
  using F = typename V::F;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int r = 0; r < rows; ++r) {
    const float* row = tiles + int64_t{r} * nr;
    F m = V::set1(-kInf);
    for (int p = 0; p < panels; ++p) {
      for (int c = 0; c < nr; c += V::kLanes) m = V::max(m, V::load(row + p * tile_stride + c));
    }
    const float row_max = V::reduce_max(m);
    const F base = V::set1(row_max == -kInf ? 0.0f : row_max);
    F s = V::zero();
    for (int p = 0; p < panels; ++p) {
      F of_panel = V::zero();
      for (int c = 0; c < nr; c += V::kLanes) {
        const F e = exp_vector<V>(V::sub(V::load(row + p * tile_stride + c), base));
        of_panel = V::add(of_panel, e);
        hold(p, r, c, e);
      }
      s = V::add(s, of_panel);
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

template <class V>
void segment_stats(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                   float* max, float* sum) {
  segment_rows<V>(tiles, tile_stride, panels, nr, rows, max, sum,
                  [](int, int, int, typename V::F) {});
}

template <class V>
void segment_stats_held(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                        float* max, float* sum, logitless::DType held_type, void* held,
                        int64_t held_stride) {
  auto* bytes = static_cast<unsigned char*>(held);
  if (held_type == logitless::DType::bf16) {
    segment_rows<V>(tiles, tile_stride, panels, nr, rows, max, sum,
                    [&](int p, int r, int c, typename V::F e) {
                      V::store_bf16(bytes + p * held_stride + (int64_t{r} * nr + c) * 2, e);
                    });
  } else {
    segment_rows<V>(
        tiles, tile_stride, panels, nr, rows, max, sum, [&](int p, int r, int c, typename V::F e) {
          V::store(reinterpret_cast<float*>(bytes + p * held_stride) + int64_t{r} * nr + c, e);
        });
  }
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

// grad_logits of one element: (p - one_hot) * grad + p * grad_lse, in fp32, the subtraction first;
// for fp16 operands rounded in the row's own scale, so that neither small gradients underflow nor
// another token's size matters.
template <class V, bool kGradLse, bool kRoundF16>
[[gnu::always_inline]] inline typename V::F grad_value(typename V::F p, typename V::F one_hot,
                                                       typename V::F grad, typename V::F grad_lse,
                                                       typename V::F unscale) {
  typename V::F g = V::mul(V::sub(p, one_hot), grad);
  if constexpr (kGradLse) g = V::fma(p, grad_lse, g);
  if constexpr (kRoundF16) g = V::mul(V::round_f16(g), unscale);
  return g;
}

template <class V, bool kGradLse, bool kRoundF16>
void grad_rows(float* tile, int count, int nr, int64_t v0, const logitless::cpu::GradRow* rows,
               const logitless::cpu::GradTileOptions& options) {
  using F = typename V::F;
  for (int r = 0; r < count; ++r) {
    const logitless::cpu::GradRow& row = rows[r];
    float* x = tile + int64_t{r} * nr;
    if (row.round_logits) round_values<V>(x, nr, options.round_logits_to);
    const F max = V::set1(row.max);
    const F inv_sum = V::set1(row.inv_sum);
    const F grad = V::set1(kRoundF16 ? row.grad * row.f16_scale : row.grad);
    const F grad_lse = V::set1(kRoundF16 ? row.grad_lse * row.f16_scale : row.grad_lse);
    const F unscale = V::set1(row.f16_unscale);
    const auto probability = [&](F value) {
      return options.softmax_given ? value : V::mul(exp_vector<V>(V::sub(value, max)), inv_sum);
    };
    const int64_t target = row.target - v0;
    const bool here = row.target >= 0 && target >= 0 && target < nr;
    const float target_value = here ? x[target] : 0.0f;
    for (int c = 0; c < nr; c += V::kLanes) {
      const F p = probability(V::load(x + c));
      V::store(x + c, grad_value<V, kGradLse, kRoundF16>(p, V::zero(), grad, grad_lse, unscale));
    }
    if (here) {
      const F p = probability(V::set1(target_value));
      V::store_first(x + target,
                     grad_value<V, kGradLse, kRoundF16>(p, V::set1(1.0f), grad, grad_lse, unscale),
                     1);
    }
  }
}

template <class V>
void grad_tile(float* tile, int count, int nr, int64_t v0, const logitless::cpu::GradRow* rows,
               const logitless::cpu::GradTileOptions& options) {
  if (options.has_grad_lse) {
    if (options.round_to_f16) return grad_rows<V, true, true>(tile, count, nr, v0, rows, options);
    return grad_rows<V, true, false>(tile, count, nr, v0, rows, options);
  }
  if (options.round_to_f16) return grad_rows<V, false, true>(tile, count, nr, v0, rows, options);
  return grad_rows<V, false, false>(tile, count, nr, v0, rows, options);
}

// The same from held exponentials. One product per element: softmax's factor and the gradient are
// multiplied first.
template <class V, logitless::cpu::PackSource kHeld>
void grad_rows_held(const unsigned char* held, const float* factors, float* tile, int count, int nr,
                    int64_t v0, const logitless::cpu::GradRow* rows,
                    const logitless::cpu::GradTileOptions& options) {
  using F = typename V::F;
  constexpr int64_t kBytes = kHeld == logitless::cpu::PackSource::bf16 ? 2 : 4;
  for (int r = 0; r < count; ++r) {
    const logitless::cpu::GradRow& row = rows[r];
    float* x = tile + int64_t{r} * nr;
    if (row.grad == 0.0f) {
      for (int c = 0; c < nr; c += V::kLanes) V::store(x + c, V::zero());
      continue;
    }
    const float grad = options.round_to_f16 ? row.grad * row.f16_scale : row.grad;
    const F factor = V::set1(factors[r] * grad);
    const F unscale = V::set1(row.f16_unscale);
    const auto* e = held + int64_t{r} * nr * kBytes;
    for (int c = 0; c < nr; c += V::kLanes) {
      F g = V::mul(V::template load_as<kHeld>(e + c * kBytes), factor);
      if (options.round_to_f16) g = V::mul(V::round_f16(g), unscale);
      V::store(x + c, g);
    }
    const int64_t target = row.target - v0;
    if (row.target >= 0 && target >= 0 && target < nr) {
      F g = V::set1((row.target_p - 1.0f) * grad);
      if (options.round_to_f16) g = V::mul(V::round_f16(g), unscale);
      V::store_first(x + target, g, 1);
    }
  }
}

template <class V>
void grad_tile_held(logitless::DType held_type, const void* held, const float* factors, float* tile,
                    int count, int nr, int64_t v0, const logitless::cpu::GradRow* rows,
                    const logitless::cpu::GradTileOptions& options) {
  using logitless::cpu::PackSource;
  const auto* bytes = static_cast<const unsigned char*>(held);
  if (held_type == logitless::DType::bf16) {
    grad_rows_held<V, PackSource::bf16>(bytes, factors, tile, count, nr, v0, rows, options);
  } else {
    grad_rows_held<V, PackSource::f32>(bytes, factors, tile, count, nr, v0, rows, options);
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

}  // namespace
