// SPDX-License-Identifier: Apache-2.0
// The table of one instruction set: what a schedule may ask of it. Kernels know tiles, panels and
// rows; never plans, views or threads. Every function here is pure: no state, no allocation.
#pragma once

#include <cstdint>

#include "logitless/machine.h"
#include "logitless/tensor.h"

namespace logitless::cpu {

// How the elements of an operand are read while packing.
enum class PackSource : uint8_t {
  f32 = 0,
  f16 = 1,
  bf16 = 2,
  f32_as_bf16 = 3,  // fp32 in memory, rounded to bf16 (nearest even)
};

constexpr int64_t source_bytes(PackSource source) {
  return source == PackSource::f16 || source == PackSource::bf16 ? 2 : 4;
}

// Rows of sums (sum_packed).
inline constexpr int64_t kPackedColumns = 32;
constexpr int64_t packed_bytes(PackSource source) { return source == PackSource::f32 ? 4 : 2; }

// Candidates of one row in one segment: a stretch of the collected arrays.
struct Chunk {
  uint32_t begin;
  int32_t count;  // or kDidNotFit
};

// Where the candidates of a few rows go.
struct Collector {
  static constexpr int32_t kDidNotFit = -1;
  const uint32_t* token_hash;  // of the rows
  const float* threshold;      // of exp(logit - reference); 0: every element is a candidate
  const float* reference;
  const uint32_t* vocab_hash;  // of the segment's columns, up to whole panels
  float* values;               // exp(logit - the segment's maximum)
  uint8_t* columns;            // within the segment
  int64_t* used;               // of both, in elements
  int64_t capacity;            // a row whose segment might not fit is left out
  Chunk* chunks;               // of the rows, chunk_stride apart
  int64_t chunk_stride;
};

// What the gradient of one token's logits needs; filled once per token and call.
struct GradRow {
  float max;      // logits_max
  float inv_sum;  // 1 / sum_exp_logits
  float grad;
  float grad_lse;      // d loss / d logsumexp
  float f16_scale;     // power of two that brings the larger of the two to [1, 2); 1 if not fp16
  float f16_unscale;   // its inverse
  int64_t target;      // local vocabulary index, -1 if the target is elsewhere
  float target_p = 0;  // softmax of the target, where the tile holds rounded exponentials
  bool round_logits;   // logits are rounded to the operand type first
};

struct GradTileOptions {
  bool has_grad_lse;
  DType round_logits_to;  // f16, bf16; f32 = never
  // The type the result is rounded to, once, whatever the units can hold. f16: in the row's scale,
  // which is undone; f32 = never.
  DType round_to;
};

// What grad_logits is made of: logits (fp32), a softmax given, or exponentials held since the
// forward, softmax = held * factors[r] (but for the target, whose softmax is GradRow::target_p).
enum class GradSource : uint8_t { logits = 0, softmax = 1, held = 2 };

// One tile of it, at most [mr][nr]. Columns `columns`..nr-1 are not read and become 0.
struct GradTile {
  GradSource source;
  DType type;                      // of the values: f32 for logits; f32, f16, bf16; f32, bf16
  const void* const* rows;         // [count], each at the tile's first column, unit stride
  const float* factors = nullptr;  // [count], where held
  int count;
  int columns;
  int64_t v0;  // vocabulary index of the first column
};

// Panels. A product C[rows, cols] += sum over k of A[rows, k] * B[k, cols] reads both operands
// packed in panels of `width` rows (A, width = mr) or columns (B, width = nr). A panel is
// [k_units][width] units of 4 bytes: a unit is one fp32 element (k_unit = 1), or a pair of bf16
// elements of neighbouring k (k_unit = 2, low half first). Odd k is padded with zeros.
//
//   unit 0: | w0 k0 k1 | w1 k0 k1 | ... | w(width-1) k0 k1 |
//   unit 1: | w0 k2 k3 | w1 k2 k3 | ...
//
// How rows of a product are written.
enum class RowsMode : uint8_t {
  store = 0,
  accumulate = 1,   // the sums begin with what is there
  past_caches = 2,  // out, its rows and nr of its elements are whole lines of 64 bytes; visible to
                    // other threads on return
};

// What the next calls will read. The hardware's prefetchers stop at every page and start anew in
// every panel, which costs a tenth of the peak; the loop over k fetches ahead by itself, one line
// of each stream per unit. The addresses are hints: never read, valid or not.
struct Ahead {
  const void* a;   // the next call's a, `mr` units of it per unit of k, into L1
  const void* b;   // a part of the B panel after this one, into L2
  int64_t b_step;  // bytes of it per unit of k: the calls that share a B panel share the fetching
};

struct GemmKernels {
  int mr;      // rows of the register tile, even
  int nr;      // columns of the register tile, a multiple of the vector
  int k_unit;  // elements of k in a unit: 1 or 2

  // c [rows][nr] contiguous, 64-byte aligned: c (+)= a . b over k_units units, in ascending order.
  // a: panel of width mr (rows beyond `rows` are not read), b: panel of width nr.
  // rows: even, 2..mr, or 1. accumulate false: c is not read.
  void (*tile)(int rows, const void* a, const void* b, int64_t k_units, float* c, bool accumulate,
               const Ahead& ahead);

  // The same, full, with B's rows as they lie in memory, nr columns of rows[0 .. k_units * k_unit)
  // from byte `offset` on; they are packed as they are read: packed [k_units][nr].
  void (*tile_packing)(PackSource source, int rows, const void* a, const void* const* b_rows,
                       int64_t offset, int64_t k_units, float* c, bool accumulate, void* packed);

  // Packs `count` <= width rows of k elements each, rows[i] pointing at k = 0 with unit stride:
  // dst[u][i]. Lanes count..width-1 become zero.
  void (*pack_rows)(PackSource source, const void* const* rows, int count, int width, int64_t k,
                    void* dst);
  // Packs k rows of `count` <= width columns each, rows[k] pointing at the first column:
  // dst[u][column]. Lanes count..width-1 become zero.
  void (*pack_cols)(PackSource source, const void* const* rows, int64_t k, int count, int width,
                    void* dst);

  // grad_logits of one tile -> the A panel of its tokens, from the tile's first column on
  // ([columns / k_unit][mr], for grad_input), and the B panel of its columns, from its first token
  // on ([count / k_unit][nr], for grad_weight). Either may be null. Rounded once: as the options
  // say, pairs of bf16 always to bf16. Rows count..mr-1 become 0. Rows of held values whose
  // gradients are 0 become 0 whatever they hold.
  void (*grad_panels)(const GradTile& tile, const GradRow* rows, const GradTileOptions& options,
                      void* a, void* b);

  // Rows of a product, straight to where they belong, rounded once:
  //   out[i][c] (+)= sum over k of a[k][i] * b[k][c],  i < rows <= nr, c < columns
  // a: one B panel of `rows` columns (as grad_panels makes it), b: B panels of the columns, one
  // behind the other. out: rows of `type`, unit stride, `out_row_bytes` apart. The chain of
  // multiply-adds per element is that of `tile`.
  void (*product_rows)(const void* a, const void* b, int64_t k_units, int rows, int64_t columns,
                       DType type, RowsMode mode, void* out, int64_t out_row_bytes);

  // Few tokens: products with weight rows read as they lie in memory, k elements from rows[i] on;
  // the same chain per element as `tile`, so the same bits. tokens: a panel [k_units][width]. All
  // rows are valid; those of the next call are guessed to follow, and fetched.
  int lanes;
  // Vocabulary in the lanes, width 1, 2, 4 .. few: tiles [count / nr][width][nr] (+)= ...
  // count: a multiple of nr.
  int few;  // 0: this form does not exist
  void (*stream_vocab)(PackSource source, const void* const* rows, int count, int64_t k,
                       const void* tokens, int width, float* tiles, bool accumulate);
  // Tokens in the lanes, width 1 to 4 times `lanes`: c [count][width] (+)= ...
  // count: a multiple of stream_rows[width / lanes - 1]. staged: stream_staged_bytes, scratch.
  int stream_rows[4];
  int64_t stream_staged_bytes;
  void (*stream_tokens)(PackSource source, const void* const* rows, int count, int64_t k,
                        const void* tokens, int width, float* c, bool accumulate, void* staged);

  // Register-only loop of the instruction `tile` is made of; returns how many of them it ran.
  int64_t (*peak)(int64_t iterations);
  double flops_per_instruction;
};

struct Kernels {
  Isa isa;
  const GemmKernels* f32;       // multiplies fp32, and everything without an own instruction
  const GemmKernels* bf16_dot;  // null where the ISA has no bf16 dot product

  // Row maximum and sum of exp over one segment of logits.
  // tiles: [panels] tiles `tile_stride` floats apart, each [rows][nr] contiguous.
  // A row of -inf gives (-inf, 0); a NaN gives (NaN, NaN).
  // Error of the sum: (panels * nr / lanes + log2(lanes) + 4) * 2^-24 relative, first order.
  void (*segment_stats)(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                        float* max, float* sum);
  // The same statistics, and the exponentials they are made of are kept:
  //   held[p][r][c] = exp(tiles[p][r][c] - max[r]), as bf16 (nearest even) or f32,
  // one panel `held_stride` bytes behind the other, all aligned to 64 bytes. Written past the
  // caches and visible to other threads on return. A row of -inf holds zeros. The sum is made of
  // the values before they are rounded: the same bits as segment_stats.
  void (*segment_stats_held)(const float* tiles, int64_t tile_stride, int panels, int nr, int rows,
                             float* max, float* sum, DType held_type, void* held,
                             int64_t held_stride);
  // The same bits again; and of every row those exponentials e with u * threshold < e, u the
  // element's number (sparse_hash.h), go to the collector, in ascending order of their columns. A
  // segment has at most 256 columns.
  void (*segment_stats_collect)(const float* tiles, int64_t tile_stride, int panels, int nr,
                                int rows, float* max, float* sum, const Collector& collector);
  // p = values[i] * scale for i < count: those >= least go to `out`, in order, but for that of
  // `except` among the columns. out has room for count + 15. Returns how many.
  int64_t (*large_values)(const float* values, const uint8_t* columns, int64_t count, float scale,
                          float least, int except, float* out);
  // The choice of a sparse gradient for a chunk of candidates: p = values[i] * scale with
  // u * tau < p or p >= tau becomes max(p, tau) * factor, the others go. vocab_hash: of the
  // segment's columns; `base` is added to those written. The outputs have room for count + 15.
  // Returns how many.
  int64_t (*thin)(const float* values, const uint8_t* columns, int64_t count, float scale,
                  const uint32_t* vocab_hash, uint32_t token_hash, float tau, float factor,
                  uint16_t base, float* out_values, uint16_t* out_columns);
  // Rows for sum_packed, one behind the other: each round_up(columns, kPackedColumns) elements,
  // zeros behind, of packed_bytes(source) bytes each. The rows have unit stride.
  void (*pack_for_sums)(PackSource source, const void* const* rows, int64_t count, int64_t columns,
                        void* panel);
  // out[c] (+)= sum over i < count of factors[i] * (row ids[i] of the panel)[c], in ascending i,
  // one rounding per term, for c < columns, a multiple of kPackedColumns.
  void (*sum_packed)(PackSource source, const void* panel, const uint16_t* ids,
                     const float* factors, int64_t count, int64_t columns, float* out,
                     bool accumulate);
  // Merges part b of count rows into part a, in place: the one merge, of segments and of shards.
  //   max = max(a, b); sum + low = (sum_a + low_a) exp(max_a - max) + sum_b exp(max_b - max)
  // `low` is what the additions round away (two-sum): beside a token predicted with p near 1, the
  // sums of hundreds of parts are each below half an ulp of the running one, and all of them count.
  // It starts at 0; the result is sum + low.
  // (-inf) - (-inf) is never formed: a part that has seen nothing is (-inf, 0) and adds nothing. A
  // NaN makes max and sum NaN. Error of one merge: 3 * 2^-24 of the part that is scaled; merging
  // with an empty part is exact.
  void (*merge_rows)(float* max, float* sum, float* low, const float* max_b, const float* sum_b,
                     int64_t count);
  // In place: count values rounded to `to` (f16 or bf16; f32 leaves them).
  void (*round_values)(float* values, int64_t count, DType to);
  // out[i] = exp(x[i] - max) * inv_sum
  void (*softmax)(const float* x, int64_t count, float max, float inv_sum, float* out);
  // exp: within 2 ulp of the exact value for every float; exp(-inf) = 0, exp(NaN) = NaN.
  void (*exp)(const float* x, int64_t count, float* out);
  // Contiguous conversions between a storage type and fp32, one rounding (nearest even).
  void (*load)(DType type, const void* src, int64_t count, float* dst);
  void (*store)(DType type, const float* src, int64_t count, void* dst);
  // tile [rows][nr] -> row c of the output, for c < columns, holds column c of the tile, in `type`.
  void (*store_transposed)(DType type, const float* tile, int rows, int nr, int columns, void* out,
                           int64_t out_row_bytes);
  // Rows of `bytes` bytes, copied past the caches: no line of dst is read first but those that are
  // only partly overwritten, at either end of a row. Visible to other threads on return.
  void (*copy_past_caches)(const void* src, int64_t src_stride, int64_t rows, int64_t bytes,
                           void* dst, int64_t dst_stride);
  // tile [rows][nr] -> out [nr][out_stride].
  void (*transpose)(const float* tile, int rows, int nr, float* out, int64_t out_stride);
};

// The tables this build has; null where the build's architecture has no such level.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* neon_kernels();
const Kernels* neon_bf16_kernels();

// The table of a usable level.
const Kernels* kernels_of(Isa isa);

}  // namespace logitless::cpu
