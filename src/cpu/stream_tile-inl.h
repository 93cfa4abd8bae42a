// SPDX-License-Identifier: Apache-2.0
// Products of few tokens: weight is read once, row by row as it lies in memory, without being
// packed into panels first. The same chain of multiply-adds per element as in gemm_tile-inl.h, so
// the same bits. Two forms:
//
//   stream_vocab    vocabulary rows in the lanes, turned in registers; up to lanes / 2 tokens
//   stream_tokens   tokens in the lanes; up to four vectors of them
//
// What decides is how memory is read. It answers after some 500 cycles, so dozens of lines must be
// under way at any time; both forms fetch rows in the order of memory, one line at a time, evenly
// between the multiply-adds: fetched in bursts, most are dropped. Into L1, although the rows, many
// and a power of two apart, fall into few of its sets and soon leave it for L2: fetched into L2
// alone, half as many are under way.

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/pack-inl.h"

namespace {

// Vocabulary rows in the lanes: tiles [count / nr][width][nr].
//
// Arithmetic (AVX-512): per 16 units of 16 rows 16 loads, 64 shuffles and 16 multiply-adds a token,
// about 100 cycles for 1 KiB of weight. The chains of few tokens are as long as the shuffles take,
// and run beside those of the next square.
template <class G, int kTokens, logitless::cpu::PackSource kSource>
[[gnu::noinline]] void stream_vocab_tile(const void* const* rows, int count, int64_t k,
                                         const float* tokens, float* tiles, bool accumulate) {
  using V = typename G::V;
  constexpr int kNr = G::kLanes * G::kVecs;
  constexpr int64_t kBlock = int64_t{G::kLanes} * G::kUnit;  // elements of a square
  constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);
  for (int r0 = 0; r0 < count; r0 += G::kLanes) {
    float* out = tiles + int64_t{r0 / kNr} * kTokens * kNr + r0 % kNr;
    typename G::F acc[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[t] = accumulate ? G::load(out + t * kNr) : G::zero();
    RowFetcher next(rows, count, r0 + G::kLanes, k * kBytes);
    const float* b = tokens;
    typename V::F r[G::kLanes];
    int64_t k0 = 0;
    for (; k0 + kBlock <= k; k0 += kBlock) {
#pragma GCC unroll 16
      for (int i = 0; i < G::kLanes; ++i) {
        next.fetch(kBlock * kBytes);
        const auto* row = static_cast<const unsigned char*>(rows[r0 + i]);
        r[i] = load_units<G, kSource>(row + k0 * kBytes);
      }
      V::transpose(r);
#pragma GCC unroll 16
      for (int u = 0; u < G::kLanes; ++u) {
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          acc[t] = G::mac(acc[t], G::broadcast(b + u * kTokens + t), G::as_units(r[u]));
        }
      }
      b += G::kLanes * kTokens;
    }
    if (k0 < k) {
      for (int i = 0; i < G::kLanes; ++i) {
        const auto* row = static_cast<const unsigned char*>(rows[r0 + i]);
        r[i] = load_units_first<G, kSource>(row + k0 * kBytes, k - k0);
      }
      V::transpose(r);
      for (int u = 0; u < (k - k0 + G::kUnit - 1) / G::kUnit; ++u) {
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          acc[t] = G::mac(acc[t], G::broadcast(b + u * kTokens + t), G::as_units(r[u]));
        }
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) G::store(out + t * kNr, acc[t]);
  }
}

// Rows of one group from the element k0 on; vector i of row r is staged at [r][i kLanes ..].
template <class G, logitless::cpu::PackSource kSource>
struct StreamBlock {
  static constexpr int64_t kVector = int64_t{G::kLanes} * G::kUnit;  // elements
  static constexpr int64_t kBytes = logitless::cpu::source_bytes(kSource);

  const void* const* rows;
  int64_t k0;
  int64_t elements;

  const unsigned char* row(int i) const {
    return static_cast<const unsigned char*>(rows[i]) + k0 * kBytes;
  }
  [[gnu::always_inline]] inline void stage(const unsigned char* row, int64_t i, float* out) const {
    const unsigned char* p = row + i * kVector * kBytes;
    if ((i + 1) * kVector <= elements) {
      G::V::store(out, load_units<G, kSource>(p));
    } else if (i * kVector < elements) {
      G::V::store(out, load_units_first<G, kSource>(p, elements - i * kVector));
    }
  }
};

constexpr int64_t kStreamBlock = 512;                 // units of a row staged at a time
constexpr int64_t kStreamStride = kStreamBlock + 16;  // rows in different sets of the caches

// Tokens in the lanes: c [count][kVecs * kLanes].
//
// Arithmetic (AVX-512, 16 rows, one vector of tokens): per unit 16 broadcasts, 16 multiply-adds, 1
// load of tokens, and 1 load and 1 store that stage the next block: 9 cycles on two load ports.
// Staged, because kRows broadcasts a unit from rows a power of two apart would miss L1 every time.
template <class G, int kRows, int kVecs, logitless::cpu::PackSource kSource>
[[gnu::noinline]] void stream_tokens_tile(const void* const* rows, int count, int64_t k,
                                          const float* tokens, float* c, bool accumulate,
                                          float* staged) {
  using Block = StreamBlock<G, kSource>;
  constexpr int kWidth = kVecs * G::kLanes;
  // So many vectors of the next block are staged while so many units of this one are multiplied.
  constexpr int kStaged = kRows > G::kLanes ? kRows / G::kLanes : 1;
  constexpr int kMultiplied = kRows > G::kLanes ? 1 : G::kLanes / kRows;

  // Blocks of nearly the same length: each has the time to stage the next one.
  const int64_t all_vectors = (k + Block::kVector - 1) / Block::kVector;
  const int64_t blocks = (all_vectors * G::kLanes + kStreamBlock - 1) / kStreamBlock;
  const int64_t vectors = blocks == 0 ? 0 : (all_vectors + blocks - 1) / blocks;
  const int64_t length = vectors * Block::kVector;
  const int64_t total = blocks * (count / kRows);
  const auto block_of = [&](int64_t i) {
    const int64_t k0 = i % blocks * length;
    return Block{rows + i / blocks * kRows, k0, k - k0 < length ? k - k0 : length};
  };
  // Rows beyond the last are a guess: those of the next call.
  const auto first_row = reinterpret_cast<uintptr_t>(rows[0]);
  const uintptr_t apart = reinterpret_cast<uintptr_t>(rows[1]) - first_row;

  if (total > 0) {
    const Block first = block_of(0);
    for (int r = 0; r < kRows; ++r) {
      for (int64_t v = 0; v < vectors; ++v) {
        first.stage(first.row(r), v, staged + r * kStreamStride + v * G::kLanes);
      }
    }
  }
  for (int group = 0; group < count / kRows; ++group) {
    float* out = c + group * kRows * kWidth;
    typename G::F acc[kRows][kVecs];
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        acc[i][j] = accumulate ? G::load(out + i * kWidth + j * G::kLanes) : G::zero();
      }
    }
    const float* b = tokens;
    for (int64_t n = group * blocks; n < (group + 1) * blocks; ++n) {
      const int64_t units = (block_of(n).elements + G::kUnit - 1) / G::kUnit;
      const bool more = n + 1 < total;
      const Block next = more ? block_of(n + 1) : Block{rows, 0, 0};
      const int64_t fetched = n + 2;  // staged after `next`
      uintptr_t fetch = first_row + static_cast<uintptr_t>(fetched / blocks * kRows) * apart +
                        static_cast<uintptr_t>(fetched % blocks * length * Block::kBytes);
      const float* a = staged + n % 2 * kRows * kStreamStride;
      float* to = staged + (n + 1) % 2 * kRows * kStreamStride;
      int64_t u = 0;
      for (int r = 0; r < kRows; ++r, fetch += apart, to += kStreamStride) {
        const unsigned char* row = next.row(r);
        for (int64_t v = 0; v < vectors; v += kStaged) {
#pragma GCC unroll 8
          for (int i = 0; i < kStaged; ++i) {
            next.stage(row, v + i, to + (v + i) * G::kLanes);
            if constexpr (G::kFetchesAhead) {
              constexpr int64_t kBytes = Block::kVector * Block::kBytes;
#pragma GCC unroll 4
              for (int64_t line = 0; line < kBytes; line += 64) {
                __builtin_prefetch(reinterpret_cast<const void*>(
                                       fetch + static_cast<uintptr_t>((v + i) * kBytes + line)),
                                   0, 3);
              }
            }
          }
#pragma GCC unroll 1
          for (int i = 0; i < kMultiplied && u < units; ++i, ++u) {
            typename G::P bv[kVecs];
#pragma GCC unroll 4
            for (int j = 0; j < kVecs; ++j) bv[j] = G::load_b(b + j * G::kLanes);
#pragma GCC unroll 32
            for (int x = 0; x < kRows; ++x) {
              const typename G::P av = G::broadcast(a + x * kStreamStride);
#pragma GCC unroll 4
              for (int j = 0; j < kVecs; ++j) acc[x][j] = G::mac(acc[x][j], bv[j], av);
            }
            ++a;
            b += kWidth;
          }
        }
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) G::store(out + i * kWidth + j * G::kLanes, acc[i][j]);
    }
  }
}

// Rows of a group: enough chains to hide the latency of a multiply-add, a divisor of a segment.
template <class G>
constexpr int stream_rows(int vecs) {
  return vecs == 3 ? G::kChains / 2 : G::kChains / vecs;
}

template <class G>
constexpr int64_t stream_staged_bytes() {
  return 2 * stream_rows<G>(1) * kStreamStride * int64_t{sizeof(float)};
}

template <class G>
void stream_vocab(logitless::cpu::PackSource source, const void* const* rows, int count, int64_t k,
                  const void* tokens, int width, float* tiles, bool accumulate) {
  const auto* b = static_cast<const float*>(tokens);
  with_source<G>(source, [&]<logitless::cpu::PackSource kSource>() {
    switch (width) {
      case 1:
        return stream_vocab_tile<G, 1, kSource>(rows, count, k, b, tiles, accumulate);
      case 2:
        return stream_vocab_tile<G, 2, kSource>(rows, count, k, b, tiles, accumulate);
      case 4:
        if constexpr (G::kLanes >= 8) {
          stream_vocab_tile<G, 4, kSource>(rows, count, k, b, tiles, accumulate);
        }
        return;
      default:
        if constexpr (G::kLanes >= 16) {
          stream_vocab_tile<G, 8, kSource>(rows, count, k, b, tiles, accumulate);
        }
    }
  });
}

template <class G>
void stream_tokens(logitless::cpu::PackSource source, const void* const* rows, int count, int64_t k,
                   const void* tokens, int width, float* c, bool accumulate, void* staged) {
  const auto* b = static_cast<const float*>(tokens);
  auto* stage = static_cast<float*>(staged);
  with_source<G>(source, [&]<logitless::cpu::PackSource kSource>() {
    const auto tile = [&]<int kVecs>() {
      stream_tokens_tile<G, stream_rows<G>(kVecs), kVecs, kSource>(rows, count, k, b, c, accumulate,
                                                                   stage);
    };
    switch (width / G::kLanes) {
      case 1:
        return tile.template operator()<1>();
      case 2:
        return tile.template operator()<2>();
      case 3:
        return tile.template operator()<3>();
      default:
        return tile.template operator()<4>();
    }
  });
}

}  // namespace
