// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/properties.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

#include "tests/kernels/definition.h"
#include "tests/kernels/kernel_fixture.h"
#include "tests/support/guarded_buffer.h"

namespace logitless::properties {
namespace {

using cpu::GemmKernels;
using cpu::PackSource;
using definition::same;
using test::GuardedBuffer;

constexpr float kInf = std::numeric_limits<float>::infinity();

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.precision(9);
  (out << ... << parts);
  return out.str();
}

int pick(const Draw& draw, int64_t low, int64_t high) { return static_cast<int>(draw(low, high)); }
bool coin(const Draw& draw) { return draw(0, 1) == 1; }

Random random_of(const Draw& draw) { return Random(static_cast<uint64_t>(draw(0, 1 << 30))); }

// What values a problem is made of.
enum class Values {
  ordinary,   // around 1, both signs
  wide,       // every exponent
  subnormal,  // many below 2^-126, of fp32 and of bf16, among numbers that bring them back
  special,    // zeros of both signs, infinities, NaN among ordinary ones
};

float value(Values kind, Random& random) {
  const float ordinary = random.uniform();
  const auto exponent = [&](int low, int high) {
    return std::ldexp(1.0f + std::fabs(random.uniform()), low + random.below(high - low + 1)) *
           (random.below(2) == 0 ? 1.0f : -1.0f);
  };
  switch (kind) {
    case Values::ordinary:
      return ordinary;
    case Values::wide:
      return exponent(-40, 40);
    case Values::subnormal:
      return random.below(2) == 0 ? exponent(-149, -120) : exponent(-30, 100);
    case Values::special:
      switch (random.below(12)) {
        case 0:
          return kInf;
        case 1:
          return -kInf;
        case 2:
          return std::nanf("");
        case 3:
          return 0.0f;
        case 4:
          return -0.0f;
        default:
          return ordinary;
      }
  }
  return ordinary;
}

Values any_values(const Draw& draw) { return static_cast<Values>(draw(0, 3)); }

const GemmKernels& any_family(const cpu::Kernels& kernels, const Draw& draw) {
  return kernels.bf16_dot != nullptr && coin(draw) ? *kernels.bf16_dot : *kernels.f32;
}

DType storage_of(PackSource source) {
  switch (source) {
    case PackSource::f16:
      return DType::f16;
    case PackSource::bf16:
      return DType::bf16;
    case PackSource::f32:
    case PackSource::f32_as_bf16:
      break;
  }
  return DType::f32;
}

void put(void* p, DType type, float x) {
  if (type == DType::f16) {
    *static_cast<float16*>(p) = float16(x);
  } else if (type == DType::bf16) {
    *static_cast<bfloat16*>(p) = bfloat16(x);
  } else {
    std::memcpy(p, &x, sizeof(x));
  }
}

// Rows of a row-major matrix in memory that ends where the last row does; the rows may overlap or
// come in any order, as views allow.
struct Rows {
  GuardedBuffer buffer;
  std::vector<const void*> pointers;
  Rows(int64_t rows, int64_t cols, DType type, Values kind, const Draw& draw)
      : buffer(rows * cols * size_of(type), size_of(type)) {
    Random random = random_of(draw);
    for (int64_t i = 0; i < rows * cols; ++i) {
      put(buffer.data() + i * size_of(type), type, value(kind, random));
    }
    const bool shuffled = coin(draw);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = shuffled ? random.below(static_cast<int>(rows)) : r;
      pointers.push_back(buffer.data() + from * cols * size_of(type));
    }
  }
};

// What may be fetched ahead is never read: any address will do.
cpu::Ahead any_hints(const Draw& draw) {
  if (coin(draw)) return {};
  return {.a = reinterpret_cast<const void*>(draw(0, int64_t{1} << 40)),
          .b = reinterpret_cast<const void*>(draw(0, int64_t{1} << 40)),
          .b_step = draw(-4096, 4096)};
}

GuardedBuffer floats(int64_t n, int64_t alignment = 4) { return GuardedBuffer(n * 4, alignment); }
float* as_floats(const GuardedBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

// n units of random values.
void fill_units(const GemmKernels& g, const GuardedBuffer& panel, int64_t n, Values kind,
                Random& random) {
  for (int64_t i = 0; i < n; ++i) {
    const float first = value(kind, random);
    const float second = value(kind, random);
    const uint32_t bits = g.k_unit == 1 ? std::bit_cast<uint32_t>(first)
                                        : definition::unit(2, static_cast<float>(bfloat16(first)),
                                                           static_cast<float>(bfloat16(second)));
    std::memcpy(panel.data() + i * 4, &bits, 4);
  }
}
uint32_t unit_at(const GuardedBuffer& panel, int64_t i) {
  return std::bit_cast<uint32_t>(as_floats(panel)[i]);
}

}  // namespace

std::string packing_is_its_definition(const cpu::Kernels& kernels, const Draw& draw) {
  const GemmKernels& g = any_family(kernels, draw);
  const PackSource source = g.k_unit == 2
                                ? (coin(draw) ? PackSource::bf16 : PackSource::f32_as_bf16)
                                : static_cast<PackSource>(draw(0, 3));
  const int width = coin(draw) ? g.mr : g.nr;
  const int count = pick(draw, 1, width);
  const int64_t k = draw(0, 150);
  const bool by_rows = coin(draw);
  const DType type = storage_of(source);
  const Rows rows(by_rows ? count : k, by_rows ? k : count, type, any_values(draw), draw);
  const int64_t units = (k + g.k_unit - 1) / g.k_unit;
  // Panels of the wide side are aligned, those of the narrow one begin anywhere.
  const GuardedBuffer panel = floats(units * width, width == g.nr ? 64 : 4);
  if (by_rows) {
    g.pack_rows(source, rows.pointers.data(), count, width, k, panel.data());
  } else {
    g.pack_cols(source, rows.pointers.data(), k, count, width, panel.data());
  }
  const auto element = [&](int64_t at_k, int lane) {
    if (at_k >= k || lane >= count) return 0.0f;
    const auto* row =
        static_cast<const std::byte*>(rows.pointers[static_cast<size_t>(by_rows ? lane : at_k)]);
    return definition::operand_element(source, row + (by_rows ? at_k : lane) * size_of(type),
                                       kernels.isa, g.k_unit);
  };
  for (int64_t u = 0; u < units; ++u) {
    for (int lane = 0; lane < width; ++lane) {
      const float k0 = element(u * g.k_unit, lane);
      const float k1 = g.k_unit == 2 ? element(u * 2 + 1, lane) : 0.0f;
      const uint32_t got = std::bit_cast<uint32_t>(as_floats(panel)[u * width + lane]);
      // Halves of a pair are compared as numbers, so that one NaN is as good as another.
      const bool right = g.k_unit == 1 ? same(std::bit_cast<float>(got), k0)
                                       : same(std::bit_cast<float>(got << 16), k0) &&
                                             same(std::bit_cast<float>(got & 0xffff0000u), k1);
      if (!right) {
        return text(by_rows ? "rows" : "columns", ", source ", static_cast<int>(source), ", width ",
                    width, ", count ", count, ", k ", k, ": unit ", u, " lane ", lane, " is ",
                    std::hex, got, ", must be ", definition::unit(g.k_unit, k0, k1));
      }
    }
  }
  return panel.damage();
}

std::string a_tile_is_its_definition(const cpu::Kernels& kernels, const Draw& draw) {
  const GemmKernels& g = any_family(kernels, draw);
  const int half = pick(draw, 0, g.mr / 2);
  const int rows = half == 0 ? 1 : 2 * half;
  const int64_t units = draw(0, 70);
  const bool accumulate = coin(draw);
  const Values kind = any_values(draw);
  Random random = random_of(draw);
  // Of the narrow panel the rows beyond `rows` are not read: the last unit ends with them.
  const int64_t a_floats = units == 0 ? 0 : (units - 1) * g.mr + rows;
  const GuardedBuffer a = floats(a_floats);
  const GuardedBuffer b = floats(units * g.nr, 64);
  const GuardedBuffer c = floats(int64_t{rows} * g.nr, 64);
  fill_units(g, a, a_floats, kind, random);
  fill_units(g, b, units * g.nr, kind, random);
  std::vector<float> start(static_cast<size_t>(rows * g.nr));
  for (float& x : start) x = value(kind, random);
  if (accumulate) std::memcpy(c.data(), start.data(), start.size() * 4);
  g.tile(rows, a.data(), b.data(), units, as_floats(c), accumulate, any_hints(draw));
  for (int r = 0; r < rows; ++r) {
    for (int col = 0; col < g.nr; ++col) {
      float want = accumulate ? start[static_cast<size_t>(r * g.nr + col)] : 0.0f;
      for (int64_t u = 0; u < units; ++u) {
        want = definition::multiply_add(kernels.isa, g.k_unit, want, unit_at(a, u * g.mr + r),
                                        unit_at(b, u * g.nr + col));
      }
      const float got = as_floats(c)[r * g.nr + col];
      if (!same(got, want)) {
        return text(g.k_unit == 2 ? "pairs" : "fp32", ", values ", static_cast<int>(kind),
                    ", rows ", rows, ", units ", units, accumulate ? ", accumulated" : "", ": [", r,
                    ", ", col, "] is ", got, ", must be ", want);
      }
    }
  }
  return a.damage() + b.damage() + c.damage();
}

std::string streamed_rows_are_their_definition(const cpu::Kernels& kernels, const Draw& draw) {
  const GemmKernels& g = any_family(kernels, draw);
  const PackSource source = g.k_unit == 2
                                ? (coin(draw) ? PackSource::bf16 : PackSource::f32_as_bf16)
                                : static_cast<PackSource>(draw(0, 3));
  const bool vocab_in_lanes = g.few > 0 && coin(draw);
  const int vectors = pick(draw, 1, 4);
  const int width = vocab_in_lanes ? std::min(1 << (vectors - 1), g.few) : vectors * g.lanes;
  const int rows = pick(draw, 1, 3) * (vocab_in_lanes ? g.nr : g.stream_rows[vectors - 1]);
  const int64_t k = coin(draw) ? draw(0, 40) : coin(draw) ? draw(120, 300) : draw(1000, 4200);
  const int64_t units = (k + g.k_unit - 1) / g.k_unit;
  const bool accumulate = coin(draw);
  const Values kind = any_values(draw);
  const DType type = storage_of(source);
  const Rows weight(rows, k, type, kind, draw);
  Random random = random_of(draw);
  const GuardedBuffer tokens = floats(units * width, 64);
  for (int64_t u = 0; u < units; ++u) {
    for (int lane = 0; lane < width; ++lane) {
      // Beyond an odd k the panel holds zeros, as packing leaves them.
      const bool odd = g.k_unit == 2 && 2 * u + 1 >= k;
      const float first = value(kind, random);
      const float second = odd ? 0.0f : value(kind, random);
      const uint32_t bits = g.k_unit == 1 ? std::bit_cast<uint32_t>(first)
                                          : definition::unit(2, static_cast<float>(bfloat16(first)),
                                                             static_cast<float>(bfloat16(second)));
      std::memcpy(tokens.data() + (u * width + lane) * 4, &bits, 4);
    }
  }
  const GuardedBuffer c = floats(int64_t{rows} * width, 64);
  std::vector<float> start(static_cast<size_t>(rows * width));
  for (float& x : start) x = value(kind, random);
  if (accumulate) std::memcpy(c.data(), start.data(), start.size() * 4);
  const GuardedBuffer staged = floats(g.stream_staged_bytes / 4, 64);
  if (vocab_in_lanes) {
    g.stream_vocab(source, weight.pointers.data(), rows, k, tokens.data(), width, as_floats(c),
                   accumulate);
  } else {
    g.stream_tokens(source, weight.pointers.data(), rows, k, tokens.data(), width, as_floats(c),
                    accumulate, staged.data());
  }
  const auto at = [&](int row, int token) {
    return static_cast<size_t>(vocab_in_lanes ? (row / g.nr * width + token) * g.nr + row % g.nr
                                              : row * width + token);
  };
  const auto element = [&](int row, int64_t at_k) {
    if (at_k >= k) return 0.0f;
    const auto* p = static_cast<const std::byte*>(weight.pointers[static_cast<size_t>(row)]);
    return definition::operand_element(source, p + at_k * size_of(type), kernels.isa, g.k_unit);
  };
  for (int r = 0; r < rows; ++r) {
    for (int lane = 0; lane < width; ++lane) {
      float want = accumulate ? start[at(r, lane)] : 0.0f;
      for (int64_t u = 0; u < units; ++u) {
        const float k0 = element(r, u * g.k_unit);
        const float k1 = g.k_unit == 2 ? element(r, 2 * u + 1) : 0.0f;
        const auto token = std::bit_cast<uint32_t>(as_floats(tokens)[u * width + lane]);
        want = definition::multiply_add(kernels.isa, g.k_unit, want, token,
                                        definition::unit(g.k_unit, k0, k1));
      }
      const float got = as_floats(c)[at(r, lane)];
      if (!same(got, want)) {
        return text(g.k_unit == 2 ? "pairs" : "fp32", ", source ", static_cast<int>(source),
                    ", values ", static_cast<int>(kind), ", width ", width, ", k ", k,
                    accumulate ? ", accumulated" : "", ": row ", r, " token ", lane, " is ", got,
                    ", must be ", want);
      }
    }
  }
  return weight.buffer.damage() + tokens.damage() + c.damage() + staged.damage();
}

std::string product_rows_are_their_definition(const cpu::Kernels& kernels, const Draw& draw) {
  const GemmKernels& g = any_family(kernels, draw);
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  const DType type = types[draw(0, 2)];
  const int64_t bytes = size_of(type);
  const int rows = coin(draw) ? g.nr : pick(draw, 1, g.nr);
  const int64_t columns = coin(draw) ? g.nr * draw(1, 3) : draw(1, 3 * g.nr);
  const int64_t panels = (columns + g.nr - 1) / g.nr;
  const int64_t units = coin(draw) ? draw(1, 8) : draw(1, 70);
  const bool lines = g.nr * bytes % 64 == 0;
  const auto mode = static_cast<cpu::RowsMode>(draw(0, lines ? 2 : 1));
  const int64_t row_bytes = mode == cpu::RowsMode::past_caches
                                ? panels * g.nr * bytes + 64 * draw(0, 2)
                                : (columns + draw(0, 5)) * bytes;
  const Values kind = any_values(draw);
  Random random = random_of(draw);
  const GuardedBuffer a = floats(units * g.nr, 64);
  const GuardedBuffer b = floats(panels * units * g.nr, 64);
  fill_units(g, a, units * g.nr, kind, random);
  fill_units(g, b, panels * units * g.nr, kind, random);
  const GuardedBuffer out((rows - 1) * row_bytes + columns * bytes,
                          mode == cpu::RowsMode::past_caches ? 64 : bytes);
  std::vector<std::byte> before(static_cast<size_t>(out.size()));
  for (size_t i = 0; i + static_cast<size_t>(bytes) <= before.size();
       i += static_cast<size_t>(bytes)) {
    put(before.data() + i, type, value(kind, random));
  }
  std::memcpy(out.data(), before.data(), before.size());
  g.product_rows(a.data(), b.data(), units, rows, columns, type, mode, out.data(), row_bytes);
  const auto load = [&](const std::byte* p) {
    float x = 0;
    kernels.load(type, p, 1, &x);
    return x;
  };
  for (int r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t at = r * row_bytes + c * bytes;
      float want = mode == cpu::RowsMode::accumulate ? load(before.data() + at) : 0.0f;
      for (int64_t u = 0; u < units; ++u) {
        want = definition::multiply_add(kernels.isa, g.k_unit, want, unit_at(a, u * g.nr + r),
                                        unit_at(b, (c / g.nr * units + u) * g.nr + c % g.nr));
      }
      kernels.round_values(&want, 1, type);
      const float got = load(out.data() + at);
      if (!same(got, want)) {
        return text(g.k_unit == 2 ? "pairs" : "fp32", " as ", name_of(type), ", mode ",
                    static_cast<int>(mode), ", values ", static_cast<int>(kind), ", rows ", rows,
                    ", columns ", columns, ", units ", units, ": [", r, ", ", c, "] is ", got,
                    ", must be ", want);
      }
    }
    const int64_t end = r * row_bytes + columns * bytes;
    const int64_t gap = r + 1 < rows ? row_bytes - columns * bytes : 0;
    if (std::memcmp(out.data() + end, before.data() + end, static_cast<size_t>(gap)) != 0) {
      return text("columns beyond ", columns, " of row ", r, " were written");
    }
  }
  return a.damage() + b.damage() + out.damage();
}

std::string a_packing_tile_is_its_definition(const cpu::Kernels& kernels, const Draw& draw) {
  const GemmKernels& g = any_family(kernels, draw);
  const PackSource source = g.k_unit == 2
                                ? (coin(draw) ? PackSource::bf16 : PackSource::f32_as_bf16)
                                : static_cast<PackSource>(draw(0, 3));
  const int half = pick(draw, 0, g.mr / 2);
  const int rows = half == 0 ? 1 : 2 * half;
  const int64_t units = draw(0, 70);
  const int64_t k = units * g.k_unit;
  const bool accumulate = coin(draw);
  const Values kind = any_values(draw);
  const DType type = storage_of(source);
  const int64_t first = draw(0, 40);  // the column where the panel begins
  const Rows b_rows(k, first + g.nr, type, kind, draw);
  Random random = random_of(draw);
  const int64_t a_floats = units == 0 ? 0 : (units - 1) * g.mr + rows;
  const GuardedBuffer a = floats(a_floats);
  fill_units(g, a, a_floats, kind, random);
  const GuardedBuffer c = floats(int64_t{rows} * g.nr, 64);
  const GuardedBuffer plain = floats(int64_t{rows} * g.nr, 64);
  for (int i = 0; i < rows * g.nr; ++i) as_floats(c)[i] = as_floats(plain)[i] = value(kind, random);
  const GuardedBuffer packed = floats(units * g.nr, 64);
  const GuardedBuffer panel = floats(units * g.nr, 64);
  g.tile_packing(source, rows, a.data(), b_rows.pointers.data(), first * size_of(type), units,
                 as_floats(c), accumulate, packed.data());
  std::vector<const void*> at_first;
  for (const void* row : b_rows.pointers) {
    at_first.push_back(static_cast<const std::byte*>(row) + first * size_of(type));
  }
  g.pack_cols(source, at_first.data(), k, g.nr, g.nr, panel.data());
  g.tile(rows, a.data(), panel.data(), units, as_floats(plain), accumulate, any_hints(draw));
  const std::string what =
      text(g.k_unit == 2 ? "pairs" : "fp32", ", source ", static_cast<int>(source), ", values ",
           static_cast<int>(kind), ", rows ", rows, ", units ", units);
  if (std::memcmp(packed.data(), panel.data(), static_cast<size_t>(units * g.nr) * 4) != 0) {
    return text(what, ": the packed panel differs");
  }
  for (int i = 0; i < rows * g.nr; ++i) {
    if (!same(as_floats(c)[i], as_floats(plain)[i])) {
      return text(what, ": [", i / g.nr, ", ", i % g.nr, "] is ", as_floats(c)[i], ", must be ",
                  as_floats(plain)[i]);
    }
  }
  return b_rows.buffer.damage() + a.damage() + c.damage() + packed.damage();
}

std::string an_element_does_not_know_its_place(const cpu::Kernels& kernels, const Draw& draw) {
  const cpu::Kernels& scalar = *cpu::scalar_kernels();
  const int64_t n = draw(1, 100);
  const Values kind = any_values(draw);
  Random random = random_of(draw);
  const GuardedBuffer in = floats(n);
  float* x = as_floats(in);
  for (int64_t i = 0; i < n; ++i) x[i] = value(kind, random);

  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    // To storage and back.
    const GuardedBuffer stored(n * size_of(type), size_of(type));
    const GuardedBuffer loaded = floats(n);
    kernels.store(type, x, n, stored.data());
    kernels.load(type, stored.data(), n, as_floats(loaded));
    const GuardedBuffer rounded = floats(n);
    std::memcpy(rounded.data(), x, static_cast<size_t>(n) * 4);
    kernels.round_values(as_floats(rounded), n, type);
    for (int64_t i = 0; i < n; ++i) {
      float one = 0;
      scalar.store(type, x + i, 1, &one);
      float want = 0;
      scalar.load(type, &one, 1, &want);
      if (!same(as_floats(loaded)[i], want)) {
        return text("load of store as ", name_of(type), ": ", x[i], " at ", i, " of ", n, " is ",
                    as_floats(loaded)[i], ", must be ", want);
      }
      if (!same(as_floats(rounded)[i], want)) {
        return text("round_values to ", name_of(type), ": ", x[i], " at ", i, " of ", n, " is ",
                    as_floats(rounded)[i], ", must be ", want);
      }
    }
    const std::string damage = stored.damage() + loaded.damage() + rounded.damage();
    if (!damage.empty()) return damage;
  }

  const float max = value(Values::ordinary, random);
  const GuardedBuffer exps = floats(n);
  const GuardedBuffer softmax = floats(n);
  kernels.exp(x, n, as_floats(exps));
  kernels.softmax(x, n, max, 0.37f, as_floats(softmax));
  for (int64_t i = 0; i < n; ++i) {
    float alone = 0;
    kernels.exp(x + i, 1, &alone);
    if (!same(as_floats(exps)[i], alone)) return text("exp(", x[i], ") at ", i, " of ", n);
    kernels.softmax(x + i, 1, max, 0.37f, &alone);
    if (!same(as_floats(softmax)[i], alone)) return text("softmax of ", x[i], " at ", i, " of ", n);
  }
  return exps.damage() + softmax.damage();
}

namespace {

// Logits of a segment as tiles [panels][rows][nr].
struct Segment {
  int nr, panels, rows;
  int64_t stride;
  GuardedBuffer tiles;
  Segment(const cpu::Kernels& kernels, const Draw& draw)
      : nr(any_family(kernels, draw).nr),
        panels(pick(draw, 1, 256 / nr)),
        rows(pick(draw, 1, 14)),
        stride((int64_t{rows} * nr + 15) / 16 * 16 + 16 * draw(0, 2)),
        tiles(floats((panels - 1) * stride + int64_t{rows} * nr, 64)) {
    Random random = random_of(draw);
    const int kind = pick(draw, 0, 4);
    for (int r = 0; r < rows; ++r) {
      const int empty = kind == 1 ? random.below(3) : 1;  // 0: a row of -inf
      for (int p = 0; p < panels; ++p) {
        for (int c = 0; c < nr; ++c) {
          float x = random.uniform() * (kind == 0 ? 1.0f : 60.0f);
          if (kind == 2) x += 1e4f;
          if (kind >= 3 && random.below(9) == 0) x = -kInf;
          if (kind == 4 && random.below(400) == 0) x = random.below(2) == 0 ? kInf : std::nanf("");
          at(p, r)[c] = empty == 0 ? -kInf : x;
        }
      }
    }
  }
  float* at(int panel, int row) const {
    return as_floats(tiles) + panel * stride + int64_t{row} * nr;
  }
};

}  // namespace

std::string statistics_belong_to_their_row(const cpu::Kernels& kernels, const Draw& draw) {
  const Segment s(kernels, draw);
  const auto rows = static_cast<size_t>(s.rows);
  std::vector<float> max(rows), sum(rows), held_max(rows), held_sum(rows);
  kernels.segment_stats(as_floats(s.tiles), s.stride, s.panels, s.nr, s.rows, max.data(),
                        sum.data());
  for (const DType type : {DType::bf16, DType::f32}) {
    const int64_t held_bytes = int64_t{s.rows} * s.nr * size_of(type);
    const int64_t held_stride = (held_bytes + 63) / 64 * 64;
    const GuardedBuffer held((s.panels - 1) * held_stride + held_bytes, 64);
    kernels.segment_stats_held(as_floats(s.tiles), s.stride, s.panels, s.nr, s.rows,
                               held_max.data(), held_sum.data(), type, held.data(), held_stride);
    for (size_t r = 0; r < rows; ++r) {
      if (!same(max[r], held_max[r]) || !same(sum[r], held_sum[r])) {
        return text("held as ", name_of(type), ": row ", r, " is (", held_max[r], ", ", held_sum[r],
                    "), without (", max[r], ", ", sum[r], ")");
      }
      for (int p = 0; p < s.panels && max[r] == max[r]; ++p) {
        for (int c = 0; c < s.nr; ++c) {
          float want = s.at(p, static_cast<int>(r))[c] - (max[r] == -kInf ? 0.0f : max[r]);
          kernels.exp(&want, 1, &want);
          // The instruction that rounds them on this level takes subnormals as zeros.
          if (type == DType::bf16 && kernels.isa == Isa::avx512bf16) {
            want = definition::flushed(want);
          }
          kernels.round_values(&want, 1, type);
          float got = 0;
          const auto* panel = held.data() + p * held_stride;
          kernels.load(type, panel + (static_cast<int64_t>(r) * s.nr + c) * size_of(type), 1, &got);
          if (!same(got, want)) {
            return text("held as ", name_of(type), ": panel ", p, ", row ", r, ", column ", c,
                        " is ", got, ", must be ", want);
          }
        }
      }
    }
    const std::string damage = held.damage();
    if (!damage.empty()) return damage;
  }
  // A row alone, in tiles of one row.
  const int alone = pick(draw, 0, s.rows - 1);
  const GuardedBuffer one = floats(int64_t{s.panels} * s.nr, 64);
  for (int p = 0; p < s.panels; ++p) {
    std::memcpy(as_floats(one) + p * s.nr, s.at(p, alone), static_cast<size_t>(s.nr) * 4);
  }
  float one_max = 0;
  float one_sum = 0;
  kernels.segment_stats(as_floats(one), s.nr, s.panels, s.nr, 1, &one_max, &one_sum);
  if (!same(one_max, max[static_cast<size_t>(alone)]) ||
      !same(one_sum, sum[static_cast<size_t>(alone)])) {
    return text("row ", alone, " of ", s.rows, " alone is (", one_max, ", ", one_sum, "), not (",
                max[static_cast<size_t>(alone)], ", ", sum[static_cast<size_t>(alone)], ")");
  }

  // Merging: count rows at once, and one by one.
  const int64_t count = draw(1, 50);
  Random random = random_of(draw);
  std::vector<float> merged[5];
  for (auto& v : merged) v.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const auto part = [&](float& m, float& t) {
      const int kind = random.below(8);
      m = kind == 0 ? -kInf : kind == 1 ? std::nanf("") : kind == 2 ? kInf : 50 * random.uniform();
      t = m == -kInf ? 0.0f : 1.0f + 100 * std::fabs(random.uniform());
    };
    part(merged[0][i], merged[1][i]);
    merged[2][i] = merged[0][i] == -kInf ? 0.0f : 1e-7f * random.uniform();
    part(merged[3][i], merged[4][i]);
  }
  std::vector<float> together[3] = {merged[0], merged[1], merged[2]};
  kernels.merge_rows(together[0].data(), together[1].data(), together[2].data(), merged[3].data(),
                     merged[4].data(), count);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    float m = merged[0][i];
    float t = merged[1][i];
    float low = merged[2][i];
    kernels.merge_rows(&m, &t, &low, &merged[3][i], &merged[4][i], 1);
    if (!same(m, together[0][i]) || !same(t, together[1][i]) || !same(low, together[2][i])) {
      return text("row ", i, " of ", count, " merged alone is (", m, ", ", t, ", ", low, "), not (",
                  together[0][i], ", ", together[1][i], ", ", together[2][i], ")");
    }
  }
  return {};
}

std::string grad_logits_belong_to_their_row(const cpu::Kernels& kernels, const Draw& draw) {
  using cpu::GradRow;
  using cpu::GradSource;
  const GemmKernels& g = any_family(kernels, draw);
  const int count = pick(draw, 1, g.mr);
  const int columns = coin(draw) ? g.nr : pick(draw, 1, g.nr);
  const auto source = static_cast<GradSource>(draw(0, 2));
  DType type = DType::f32;
  if (source == GradSource::softmax) type = static_cast<DType>(draw(0, 2));
  if (source == GradSource::held) type = coin(draw) ? DType::f32 : DType::bf16;
  // 16-bit operands without an instruction of their own are multiplied as fp32, and rounded here.
  const DType round_to =
      g.k_unit == 2 ? DType::bf16 : std::array{DType::f32, DType::f16, DType::bf16}[draw(0, 2)];
  const bool f16 = round_to == DType::f16;
  const bool lse = source != GradSource::held && coin(draw);
  const int64_t v0 = draw(0, 4) * g.nr;
  Random random = random_of(draw);
  const cpu::GradTileOptions options{
      .has_grad_lse = lse, .round_logits_to = f16 ? DType::f16 : DType::bf16, .round_to = round_to};
  std::vector<GradRow> params(static_cast<size_t>(count));
  std::vector<float> factors(static_cast<size_t>(count));
  for (int r = 0; r < count; ++r) {
    GradRow& row = params[static_cast<size_t>(r)];
    row = GradRow{};
    row.max = 3.0f;
    row.inv_sum = 0.01f;
    row.grad = random.below(6) == 0 ? 0.0f : random.uniform();
    row.grad_lse = lse ? random.uniform() : 0.0f;
    const float size = std::max(std::fabs(row.grad), std::fabs(row.grad_lse));
    const int exponent = f16 && size > 0 ? std::ilogb(size) : 0;
    row.f16_scale = std::ldexp(1.0f, -exponent);
    row.f16_unscale = std::ldexp(1.0f, exponent);
    row.target = random.below(3) == 0 ? -1 : random.below(5 * g.nr);
    row.target_p = std::fabs(random.uniform());
    row.round_logits = random.below(2) == 0;
    factors[static_cast<size_t>(r)] = 0.5f * std::fabs(random.uniform());
  }
  // Rows apart, in memory that ends with the last column of the last row.
  const GuardedBuffer stored(((count - 1) * int64_t{g.nr} + columns) * size_of(type),
                             size_of(type));
  std::vector<float> values(static_cast<size_t>(count * g.nr), std::nanf(""));
  std::vector<const void*> pointers;
  for (int r = 0; r < count; ++r) {
    std::byte* at = stored.data() + int64_t{r} * g.nr * size_of(type);
    pointers.push_back(at);
    float* x = values.data() + static_cast<size_t>(r * g.nr);
    for (int c = 0; c < columns; ++c) {
      x[c] = source == GradSource::logits ? 6 * random.uniform() - 3 : std::fabs(random.uniform());
      kernels.round_values(x + c, 1, type);
    }
    // What a row of gradient 0 holds since the forward is nobody's business.
    if (source == GradSource::held && params[static_cast<size_t>(r)].grad == 0.0f) {
      x[0] = std::nanf("");
    }
    kernels.store(type, x, columns, at);
  }
  const auto tile_of = [&](int first, int rows) {
    return cpu::GradTile{.source = source,
                         .type = type,
                         .rows = pointers.data() + first,
                         .factors = factors.data() + first,
                         .count = rows,
                         .columns = columns,
                         .v0 = v0};
  };
  // A form: [columns in units][mr]. B form: [rows in units][nr].
  const int64_t a_units = (columns + g.k_unit - 1) / g.k_unit;
  const int64_t b_units = (count + g.k_unit - 1) / g.k_unit;
  const GuardedBuffer a = floats(a_units * g.mr);
  const GuardedBuffer b = floats(b_units * g.nr, 64);
  const int wanted = pick(draw, 0, 2);  // 0: both
  g.grad_panels(tile_of(0, count), params.data(), options, wanted == 2 ? nullptr : a.data(),
                wanted == 1 ? nullptr : b.data());
  const auto half = [&](float unit, int64_t k) {
    const auto bits = std::bit_cast<uint32_t>(unit);
    if (g.k_unit == 1) return unit;
    return std::bit_cast<float>(k % 2 == 0 ? bits << 16 : bits & 0xffff0000u);
  };
  const auto in_a = [&](const GuardedBuffer& panel, int r, int c) {
    return half(as_floats(panel)[int64_t{c} / g.k_unit * g.mr + r], c);
  };
  const auto in_b = [&](int r, int c) {
    return half(as_floats(b)[int64_t{r} / g.k_unit * g.nr + c], r);
  };
  const GuardedBuffer alone = floats(a_units * g.mr);
  for (int r = 0; r < g.mr; ++r) {
    if (r < count) {
      g.grad_panels(tile_of(r, 1), params.data() + r, options, alone.data(), nullptr);
    }
    for (int c = 0; c < a_units * g.k_unit; ++c) {
      const bool inside = r < count && c < columns;
      const float want = inside ? in_a(alone, 0, c) : 0.0f;
      if (wanted != 2 && !same(in_a(a, r, c), want)) {
        return text("A, ", count, " rows, ", columns, " columns, source ", static_cast<int>(source),
                    ": [", r, ", ", c, "] is ", in_a(a, r, c), ", alone ", want);
      }
    }
  }
  for (int r = 0; wanted != 1 && r < b_units * g.k_unit; ++r) {
    if (r < count) {
      g.grad_panels(tile_of(r, 1), params.data() + r, options, alone.data(), nullptr);
    }
    for (int c = 0; c < g.nr; ++c) {
      const float want = r < count && c < columns ? in_a(alone, 0, c) : 0.0f;
      if (!same(in_b(r, c), want)) {
        return text("B, ", count, " rows, ", columns, " columns, source ", static_cast<int>(source),
                    ": [", r, ", ", c, "] is ", in_b(r, c), ", alone ", want);
      }
    }
  }

  // The formula.
  for (int r = 0; r < count; ++r) {
    const GradRow& row = params[static_cast<size_t>(r)];
    g.grad_panels(tile_of(r, 1), &row, options, alone.data(), nullptr);
    for (int c = 0; c < columns; ++c) {
      float x = values[static_cast<size_t>(r * g.nr + c)];
      const bool is_target = row.target == v0 + c;
      const double one = is_target ? 1.0 : 0.0;
      double p = static_cast<double>(x);
      if (source == GradSource::logits) {
        if (row.round_logits) kernels.round_values(&x, 1, options.round_logits_to);
        p = std::exp(static_cast<double>(x) - 3.0) * static_cast<double>(0.01f);
      }
      if (source == GradSource::held) {
        p = is_target ? static_cast<double>(row.target_p)
                      : p * static_cast<double>(factors[static_cast<size_t>(r)]);
        if (row.grad == 0.0f) p = one;
      }
      const auto grad = static_cast<double>(row.grad);
      const auto grad_lse = static_cast<double>(row.grad_lse);
      const double want = (p - one) * grad + p * grad_lse;
      // exp and five operations in fp32; then fp16 in the row's own scale, or bf16.
      double allowed = 16 * 0x1p-24 * ((p + one) * std::fabs(grad) + p * std::fabs(grad_lse));
      const auto scale = static_cast<double>(row.f16_unscale);
      if (f16) allowed += std::max(0x1p-11 * std::fabs(want), 0x1p-25 * scale);
      if (round_to == DType::bf16) allowed += 0x1p-8 * std::fabs(want);
      const auto got = static_cast<double>(in_a(alone, 0, c));
      if (!(std::fabs(got - want) <= 1.01 * allowed)) {
        return text("source ", static_cast<int>(source), ": row ", r, ", column ", c, " is ", got,
                    ", must be ", want, " +- ", allowed);
      }
    }
  }
  return a.damage() + b.damage() + stored.damage();
}

std::string transposes_move_every_element(const cpu::Kernels& kernels, const Draw& draw) {
  const GemmKernels& g = any_family(kernels, draw);
  const int rows = pick(draw, 1, g.mr);
  const int columns = coin(draw) ? g.nr : pick(draw, 1, g.nr);
  Random random = random_of(draw);
  const GuardedBuffer tile = floats(int64_t{rows} * g.nr, 64);
  const Values kind = any_values(draw);
  for (int i = 0; i < rows * g.nr; ++i) as_floats(tile)[i] = value(kind, random);

  const int64_t stride = rows + draw(0, 20);
  const GuardedBuffer out = floats((g.nr - 1) * stride + rows);
  kernels.transpose(as_floats(tile), rows, g.nr, as_floats(out), stride);
  for (int c = 0; c < g.nr; ++c) {
    for (int64_t r = 0; r < (c + 1 < g.nr ? stride : rows); ++r) {
      const float got = as_floats(out)[c * stride + r];
      const bool moved = r < rows ? same(got, as_floats(tile)[r * g.nr + c]) : std::isnan(got);
      if (!moved) return text("transpose of ", rows, " rows: [", c, ", ", r, "] is ", got);
    }
  }

  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const int64_t row_elements = rows + draw(0, 9);
    const GuardedBuffer stored(((columns - 1) * row_elements + rows) * size_of(type),
                               size_of(type));
    kernels.store_transposed(type, as_floats(tile), rows, g.nr, columns, stored.data(),
                             row_elements * size_of(type));
    for (int c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < (c + 1 < columns ? row_elements : rows); ++r) {
        float got = 0;
        kernels.load(type, stored.data() + (c * row_elements + r) * size_of(type), 1, &got);
        float want = r < rows ? as_floats(tile)[r * g.nr + c] : std::nanf("");
        // A fast path of this level rounds by an instruction that takes subnormals as zeros; what
        // it is given comes out of the dot product, which leaves none.
        const bool flushes = type == DType::bf16 && kernels.isa == Isa::avx512bf16;
        const bool zero = flushes && got == 0.0f && definition::is_subnormal(want);
        kernels.round_values(&want, 1, type);
        if (!zero && !same(got, want)) {
          return text("store_transposed of ", rows, " rows, ", columns, " columns as ",
                      name_of(type), ": [", c, ", ", r, "] is ", got, ", must be ", want);
        }
      }
    }
    if (!stored.damage().empty()) return stored.damage();
  }
  return out.damage() + tile.damage();
}

}  // namespace logitless::properties
