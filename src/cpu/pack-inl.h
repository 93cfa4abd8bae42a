// SPDX-License-Identifier: Apache-2.0
// Packing into panels (kernels.h has the picture). Sources are rows with unit stride; the schedules
// resolve every other stride before they come here.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

namespace {

// Calls f<source>() for a source that the family reads.
template <class G, class Function>
void with_source(logitless::cpu::PackSource source, Function f) {
  using logitless::cpu::PackSource;
  switch (source) {
    case PackSource::f32_as_bf16:
      return f.template operator()<PackSource::f32_as_bf16>();
    case PackSource::bf16:
      return f.template operator()<PackSource::bf16>();
    case PackSource::f16:
      if constexpr (G::kUnit == 1) f.template operator()<PackSource::f16>();
      return;
    case PackSource::f32:
      if constexpr (G::kUnit == 1) f.template operator()<PackSource::f32>();
      return;
  }
}

// kLanes units that lie one behind the other in memory.
template <class G, logitless::cpu::PackSource kSource>
[[gnu::always_inline]] inline typename G::V::F load_units(const void* p) {
  if constexpr (G::kUnit == 1) {
    return G::V::template load_as<kSource>(p);
  } else {
    return G::template load_units<kSource>(p);
  }
}

// The same for fewer than kLanes units: the missing elements are zero and are not read.
template <class G, logitless::cpu::PackSource kSource>
[[gnu::always_inline]] inline typename G::V::F load_units_first(const void* p, int64_t elements) {
  alignas(64) unsigned char buffer[G::kLanes * G::kUnit * 4] = {};
  std::memcpy(buffer, p, static_cast<size_t>(elements * logitless::cpu::source_bytes(kSource)));
  return load_units<G, kSource>(buffer);
}

// Squares are read from kLanes rows at once: more streams than the hardware's prefetchers follow,
// and each ends at every page. So the rows of the next squares are fetched one behind the other, as
// they lie in memory, a vector's worth with each row of these: fetched in bursts, most are dropped.
// Into L1, although rows a power of two apart fall into one set of it and soon leave it for L2:
// fetched into L2 alone, half as many are under way (stream_tile-inl.h). The rows behind the panel
// are a guess; a wrong one costs nothing but the fetch.
struct RowFetcher {
  const void* const* rows;
  int count;
  uintptr_t first_row;
  uintptr_t apart;  // bytes from one row to the next
  int64_t row_bytes;
  int row = 0;
  int64_t offset = 0;

  RowFetcher(const void* const* panel_rows, int panel_count, int first, int64_t bytes)
      : rows(panel_rows), count(panel_count), row_bytes(bytes), row(first) {
    first_row = count > 0 ? address(0) : 0;
    apart = count > 1 ? address(1) - first_row : 0;
  }
  uintptr_t address(int i) const { return reinterpret_cast<uintptr_t>(rows[i]); }
  [[gnu::always_inline]] inline void fetch(int64_t bytes) {
    const uintptr_t p =
        (row < count ? address(row) : first_row + static_cast<uintptr_t>(row) * apart) +
        static_cast<uintptr_t>(offset);
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(p + static_cast<uintptr_t>(i)), 0, 3);
    }
    offset += bytes;
    if (offset >= row_bytes) {
      offset = 0;
      ++row;
    }
  }
};

template <class G, logitless::cpu::PackSource kSource>
void pack_rows_from(const void* const* rows, int count, int width, int64_t k, float* dst) {
  using V = typename G::V;
  constexpr int64_t kBlock = int64_t{G::kLanes} * G::kUnit;  // elements of k per square
  for (int r0 = 0; r0 < width; r0 += G::kLanes) {
    const int lanes = width - r0 < G::kLanes ? width - r0 : G::kLanes;
    RowFetcher next(rows, count, r0 + G::kLanes, k * logitless::cpu::source_bytes(kSource));
    for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
      const int64_t elements = k - k0 < kBlock ? k - k0 : kBlock;
      typename V::F r[G::kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < G::kLanes; ++i) {
        if (r0 + i >= count) {
          r[i] = V::zero();
          continue;
        }
        const auto* p = static_cast<const unsigned char*>(rows[r0 + i]) +
                        k0 * logitless::cpu::source_bytes(kSource);
        next.fetch(kBlock * logitless::cpu::source_bytes(kSource));
        r[i] = elements == kBlock ? load_units<G, kSource>(p)
                                  : load_units_first<G, kSource>(p, elements);
      }
      V::transpose(r);
      const int units = static_cast<int>((elements + G::kUnit - 1) / G::kUnit);
      float* out = dst + k0 / G::kUnit * width + r0;
      for (int u = 0; u < units; ++u) {
        if (lanes == G::kLanes) {
          V::store(out + int64_t{u} * width, r[u]);
        } else {
          V::store_first(out + int64_t{u} * width, r[u], lanes);
        }
      }
    }
  }
}

// kLanes columns of kUnit neighbouring rows -> kLanes units.
template <class G, logitless::cpu::PackSource kSource>
[[gnu::always_inline]] inline typename G::V::F column_units(const unsigned char* const* p) {
  if constexpr (G::kUnit == 1) {
    return G::V::template load_as<kSource>(p[0]);
  } else {
    return G::template interleave_units<kSource>(p[0], p[1]);
  }
}

// One unit of a panel that is not full, or whose last pair is odd.
template <class G, logitless::cpu::PackSource kSource>
[[gnu::noinline]] void pack_partial_unit(const void* const* rows, int rows_present, int count,
                                         int width, float* dst) {
  using V = typename G::V;
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  for (int c0 = 0; c0 < width; c0 += G::kLanes) {
    const int valid = count - c0 < 0 ? 0 : (count - c0 < G::kLanes ? count - c0 : G::kLanes);
    alignas(64) unsigned char buffer[2][G::kLanes * 4] = {};
    for (int i = 0; i < rows_present; ++i) {
      std::memcpy(buffer[i], static_cast<const unsigned char*>(rows[i]) + c0 * kBytes,
                  static_cast<size_t>(valid * kBytes));
    }
    const unsigned char* p[2] = {buffer[0], buffer[1]};
    const typename V::F units = column_units<G, kSource>(p);
    if (width - c0 >= G::kLanes) {
      V::store(dst + c0, units);
    } else {
      V::store_first(dst + c0, units, width - c0);
    }
  }
}

template <class G, logitless::cpu::PackSource kSource>
void pack_cols_from(const void* const* rows, int64_t k, int count, int width, float* dst) {
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  const bool full = count == width && width % G::kLanes == 0;
  for (int64_t k0 = 0; k0 < k; k0 += G::kUnit) {
    float* out = dst + k0 / G::kUnit * width;
    const int present = k - k0 < G::kUnit ? 1 : G::kUnit;
    if (!full || present < G::kUnit) {
      pack_partial_unit<G, kSource>(rows + k0, present, count, width, out);
      continue;
    }
    for (int c0 = 0; c0 < width; c0 += G::kLanes) {
      const unsigned char* p[2];
      for (int i = 0; i < G::kUnit; ++i) {
        p[i] = static_cast<const unsigned char*>(rows[k0 + i]) + c0 * kBytes;
        if (c0 * kBytes % 64 == 0) __builtin_prefetch(p[i] + 512, 0, 2);
      }
      G::V::store(out + c0, column_units<G, kSource>(p));
    }
  }
}

template <class G>
void pack_rows(logitless::cpu::PackSource source, const void* const* rows, int count, int width,
               int64_t k, void* dst) {
  using logitless::cpu::PackSource;
  float* out = static_cast<float*>(dst);
  switch (source) {
    case PackSource::f32_as_bf16:
      return pack_rows_from<G, PackSource::f32_as_bf16>(rows, count, width, k, out);
    case PackSource::bf16:
      return pack_rows_from<G, PackSource::bf16>(rows, count, width, k, out);
    case PackSource::f16:
      if constexpr (G::kUnit == 1) {
        pack_rows_from<G, PackSource::f16>(rows, count, width, k, out);
      }
      return;
    case PackSource::f32:
      if constexpr (G::kUnit == 1) {
        pack_rows_from<G, PackSource::f32>(rows, count, width, k, out);
      }
      return;
  }
}

template <class G>
void pack_cols(logitless::cpu::PackSource source, const void* const* rows, int64_t k, int count,
               int width, void* dst) {
  using logitless::cpu::PackSource;
  float* out = static_cast<float*>(dst);
  switch (source) {
    case PackSource::f32_as_bf16:
      return pack_cols_from<G, PackSource::f32_as_bf16>(rows, k, count, width, out);
    case PackSource::bf16:
      return pack_cols_from<G, PackSource::bf16>(rows, k, count, width, out);
    case PackSource::f16:
      if constexpr (G::kUnit == 1) {
        pack_cols_from<G, PackSource::f16>(rows, k, count, width, out);
      }
      return;
    case PackSource::f32:
      if constexpr (G::kUnit == 1) {
        pack_cols_from<G, PackSource::f32>(rows, k, count, width, out);
      }
      return;
  }
}

// tile [rows][nr] -> out [nr][out_stride], squares of kLanes in registers.
template <class V>
void transpose_tile(const float* tile, int rows, int nr, float* out, int64_t out_stride) {
  for (int r0 = 0; r0 < rows; r0 += V::kLanes) {
    const int lanes = rows - r0 < V::kLanes ? rows - r0 : V::kLanes;
    for (int c0 = 0; c0 < nr; c0 += V::kLanes) {
      typename V::F r[V::kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < V::kLanes; ++i) {
        r[i] = i < lanes ? V::load(tile + (r0 + i) * nr + c0) : V::zero();
      }
      V::transpose(r);
      for (int j = 0; j < V::kLanes; ++j) {
        V::store_first(out + (c0 + j) * out_stride + r0, r[j], lanes);
      }
    }
  }
}

}  // namespace
