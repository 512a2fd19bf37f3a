// Products by a matrix unit, if the layer has one: 16 weight rows times 16 input rows at once, of bfloat16 pairs or of
// bytes.
//
// Weights are read from their rows, 64 bytes of each per tile, or copied so first, as many columns as the caches hold;
// the input is transposed, 16 rows interleaved (prepare_matrix). Columns that share a scale are summed in the unit,
// then scaled and added to the output's total. An output's bits depend on its own two rows alone: the unit adds in the
// order of columns, and goes on where it stopped.
#pragma once

#include "inputs.h"

namespace jaxllm {
namespace {

constexpr int64_t kTile = kStrip, kTiles = 2;  // rows of a tile; tiles multiplied at once, of either side
constexpr int64_t kTileFloats = kTile * kTile;

// Weight rows per block: many if there are more than two strips of inputs, so that these are read rarely.
constexpr int64_t kFew = kTile, kMost = 4 * kTiles * kTile;

// Bytes of a row that are written or read at once: those of a block should fit the L1 cache, or the L2 cache besides
// many strips.
constexpr int64_t kFewBytes = 512, kManyBytes = 2048;

inline bool by_matrix(const Weight& w, const Input& in) { return halves(w, in) || (rounded(w, in) && !in.codes); }

// Layout of a prepared input: strips of 16 rows; of each, its columns in order (64 bytes for 4 bytes of all 16 rows),
// and then the steps of its blocks, for all 16 rows.
struct Strips {
  int64_t size, width, blocks;  // bytes of a number; columns; of rounded ones

  Strips(const Weight& w, const Input& in)
      : size(rounded(w, in) ? 1 : 2), width(up(in.columns, 128)), blocks(size == 1 ? width / step_columns(w) : 0) {}
  int64_t row_bytes() const { return width * size; }
  int64_t bytes() const { return kTile * (row_bytes() + 4 * blocks); }
};

inline size_t matrix_bytes(const Weight& w, const Input& in) {
  return up(in.rows, kTile) / kTile * Strips(w, in).bytes();
}

inline void prepare_matrix(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const Strips strips(w, in);
  const int64_t row_bytes = strips.row_bytes(), whole = up(in.columns, 128), count = step_columns(w);
  struct Use {};
  uint8_t* lines = space<Use>(kTile * row_bytes + 4 * whole);
  float* x = reinterpret_cast<float*>(lines + kTile * row_bytes);
  for (int64_t first = begin; first < end; first += kTile) {
    uint8_t* to = static_cast<uint8_t*>(prepared) + first / kTile * strips.bytes();
    float* step = reinterpret_cast<float*>(to + kTile * row_bytes);
    memset(lines, 0, kTile * row_bytes);
    if (strips.blocks) memset(step, 0, 4 * kTile * strips.blocks);
    for (int64_t i = 0; i < kTile && first + i < end; i++) {
      uint8_t* line = lines + i * row_bytes;
      const int64_t at = (first + i) * in.columns;
      if (!strips.blocks) {
        memcpy(line, static_cast<const uint16_t*>(in.x) + at, 2 * in.columns);
        for (int64_t c = 0; c < row_bytes && w.kind == Kind::kInt4; c += sizeof(Halves))
          store(line + c, nibble_order(load<Halves>(line + c)));
        continue;
      }
      to_floats(in.bf16 ? Kind::kBF16 : Kind::kF32, in.x, at, in.columns, x);
      for (int64_t c = in.columns; c < whole; c++) x[c] = 0;
      for (int64_t b = 0; b < strips.blocks; b++)
        step[kTile * b + i] = write_digits(x + count * b, count, reinterpret_cast<int8_t*>(line + count * b));
    }
    for (int64_t k = 0; k < row_bytes; k += 64) {
      Bits four[kTile];
      for (int64_t i = 0; i < kTile; i++) four[i] = load<Bits>(lines + i * row_bytes + k);
      transpose(four, reinterpret_cast<uint32_t*>(to + kTile * k), kTile);
    }
  }
}

// What a tile of weights is read from: 16 rows and their distance.
struct Panel {
  const uint8_t* at;
  int64_t stride;
};

// Prefetches what the next block reads in place of these bytes.
JAXLLM_INLINE void ask(const uint8_t* from, int64_t bytes, int64_t stride) {
  for (int64_t line = 0; line < bytes; line += 64) ahead(from + line, kFew * stride);
}

// Panels, one type per kind of weight: start(i, o) maps row i of a block to row o of the weights; fill(i, c, columns,
// to) writes those of its columns as the unit takes them; in_place(c, columns) is whether they are stored so already.
struct Panels {
  const Weight& w;
  const uint8_t* row[kMost];

  explicit Panels(const Weight& w) : w(w) {}
  void start(int64_t i, int64_t o) { row[i] = w.data + o * w.stride; }
  bool in_place(int64_t, int64_t) const { return false; }
};

template <int Size>
struct PlainPanels : Panels {  // bfloat16, or bytes
  using Panels::Panels;
  bool in_place(int64_t c, int64_t columns) const { return Size == 1 || c + columns <= w.columns; }
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    const int64_t there = in_place(c, columns) ? columns : w.columns - c;
    memcpy(to, row[i] + c * Size, there * Size);
    memset(to + there * Size, 0, (columns - there) * Size);
  }
};

struct PackedPanels {
  const Packed<true> source;
  Packed<true>::Row row[kMost];

  explicit PackedPanels(const Weight& w) : source(w) {}
  void start(int64_t i, int64_t o) { row[i] = source.row(o, 0); }
  bool in_place(int64_t, int64_t) const { return false; }
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    ask(row[i].bytes + c, columns, source.w.stride);
    ask(row[i].nibbles + c / 2, columns / 2, source.w.nibble_stride);
    for (int64_t k = 0; k < columns; k += 64) {
      Halves some[Packed<true>::kValues];
      row[i].load(c + k, some);
      memcpy(to + 2 * k, some, sizeof some);
    }
  }
};

template <bool Pairs, bool Blocks>
struct Int8Panels : Panels {                                     // as bfloat16; from blocks also as bytes
  static constexpr int kBytes32 = Blocks ? block_bytes(8) : 32;  // of 32 columns
  using Panels::Panels;
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    const uint8_t* from = row[i] + c / 32 * kBytes32;
    ask(from, columns / 32 * kBytes32, w.stride);
    if (Blocks) from += 2;
    for (int64_t k = 0; k < columns; k += 32, from += kBytes32) {
      if constexpr (Pairs)
        store(to + 2 * k, halves_of(reinterpret_cast<const int8_t*>(from)));
      else
        memcpy(to + k, from, 32);
    }
  }
};

template <bool Pairs, bool Zero, bool Blocks = false>
struct Int4Panels : Panels {                                     // as bfloat16, in another order, or as bytes
  static constexpr int kBytes32 = Blocks ? block_bytes(4) : 16;  // of 32 columns
  using Panels::Panels;
  const Nibbles<Zero> nibbles = {};
  const uint8_t* zero[kMost];

  void start(int64_t i, int64_t o) {
    Panels::start(i, o);
    zero[i] = Zero ? w.zero + o * w.groups : nullptr;
  }
  JAXLLM_INLINE int zero_at(int64_t i, int64_t c) const { return Zero ? zero[i][w.groups > 1 ? c / w.group : 0] : 8; }
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    const uint8_t* from = row[i] + c / 32 * kBytes32;
    ask(from, columns / 32 * kBytes32, w.stride);
    if (Blocks) from += 2;
    if constexpr (Pairs) {
      for (int64_t k = 0; k < columns; k += 32, from += kBytes32)
        store(to + 2 * k, nibble_halves(nibbles, from, zero_at(i, c + k)));
    } else {
      Bytes less = Bytes{} + uint8_t(8);
      for (int64_t k = 0; k < columns; k += kBytes, from += 2 * kBytes32) {
        if (Zero) {
          uint8_t of[kBytes];
          memset(of, zero_at(i, c + k), kBytes / 2);
          memset(of + kBytes / 2, zero_at(i, c + k + kBytes / 2), kBytes / 2);
          less = load<Bytes>(of);
        }
        store(to + k, nibbles_of(from, from + kBytes32) - less);
      }
    }
  }
};

// Calls some(T, i, j) for each tile of sums T, that of weight tile i and strip j.
template <int O, int S, class Some>
JAXLLM_INLINE void each_sum(const Some& some) {
  some(Int<0>(), 0, 0);
  if constexpr (S > 1) some(Int<1>(), 0, 1);
  if constexpr (O > 1) some(Int<2>(), 1, 0);
  if constexpr (O > 1 && S > 1) some(Int<3>(), 1, 1);
}

// Adds the products of columns to them; k and end are bytes of a row.
template <bool Pairs, int O, int S>
JAXLLM_INLINE void add_columns(const Panel* panel, const uint8_t* const* x, int64_t k, int64_t end, int64_t step,
                               bool ask) {
  for (; k < end; k += step) {
    if (ask)
      for (int i = 0; i < O; i++)
        for (int r = 0; r < kTile; r++) ahead(panel[i].at + r * panel[i].stride + k, kFew * panel[i].stride);
    load_tile<4>(panel[0].at + k, panel[0].stride);
    if constexpr (O > 1) load_tile<5>(panel[1].at + k, panel[1].stride);
    load_tile<6>(x[0] + kTile * k, 64);
    if constexpr (S > 1) load_tile<7>(x[1] + kTile * k, 64);
    each_sum<O, S>([](auto T, int, int) { add_tiles<Pairs, T, 4 + T / 2, 6 + T % 2>(); });
  }
}

// Adds a tile's sums to the totals of its outputs: `scale` for each weight row, at a distance; `step` for each input
// row.
template <bool Pairs, int T>
JAXLLM_INLINE void add_scaled(const float* scale, int64_t apart, const float* step, float* total) {
  alignas(64) uint8_t sums[kTileFloats * 4];
  store_tile<T>(sums);
  const Floats by = Pairs ? Floats{} : load<Floats>(step);
  for (int64_t i = 0; i < kTile; i++) {
    const Floats of = all_of(scale[i * apart]), so_far = load<Floats>(total + kTile * i);
    if constexpr (Pairs)
      store(total + kTile * i, fma(load<Floats>(sums + 64 * i), of, so_far));
    else  // scaled first: steps may be so large that anything else overflows
      store(total + kTile * i, fma(to_floats(load<Ints>(sums + 64 * i)) * of, by, so_far));
  }
}

// Transposes and writes the outputs of a block of weight rows, [tile of weights][strip of inputs][weight row][input
// row], times each weight row's `scale` unless that is null.
inline void put_totals(const float* total, const float* scale, int64_t rows, const Input& in, int64_t stride,
                       float* y) {
  const int64_t count = up(in.rows, kTile) / kTile;
  for (int64_t s = 0; s < count; s++)
    for (int64_t t = 0; t * kTile < rows; t++) {
      const float* sums = total + (t * count + s) * kTileFloats;
      Bits of[kTile];
      for (int64_t i = 0; i < kTile; i++) {
        of[i] = load<Bits>(sums + kTile * i);
        if (scale) of[i] = Bits(Floats(of[i]) * scale[t * kTile + i]);
      }
      uint32_t turned[kTileFloats];
      float* to = y + s * kTile * stride + t * kTile;
      const int64_t left = rows - t * kTile, below = in.rows - s * kTile;
      const bool whole = left >= kTile && below >= kTile;
      transpose(of, whole ? reinterpret_cast<uint32_t*>(to) : turned, whole ? stride : kTile);
      for (int64_t r = 0; r < kTile && r < below && !whole; r++)
        memcpy(to + r * stride, turned + kTile * r, 4 * (left < kTile ? left : kTile));
    }
}

template <bool Pairs, class Panels>
void multiply_panels(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (!in.rows) return;
  constexpr int64_t kSize = Pairs ? 2 : 1;
  const Strips strips(w, in);
  const int64_t columns = up(w.columns, integers(w) ? 128 : 32), count = up(in.rows, kTile) / kTile;
  const bool many = count > kTiles, grouped = w.groups > 1;
  const bool once = Pairs && !grouped && columns;  // all columns are summed in the unit
  const int64_t block = many ? kMost : kFew, pass = (many ? kManyBytes : kFewBytes) / kSize;
  const int64_t stride = pass * kSize + 64;  // of written rows
  const int64_t unit = Pairs && !grouped ? pass : step_columns(w);
  const int64_t step = unit * kSize < 64 ? unit * kSize : 64, groups = grouped ? w.groups : 1;
  const MatrixUnit on{int(step)};
  struct Use {};
  uint8_t* memory = space<Use>(block * (stride + 4 * groups + 4 * kTile * count));
  float *scale = reinterpret_cast<float*>(memory + block * stride), *total = scale + block * groups;
  Panels panels(w);
  for (int64_t o = begin; o < end; o += block) {
    const int64_t rows = end - o < block ? end - o : block, tiles = (rows + kTile - 1) / kTile;
    for (int64_t i = 0; i < tiles * kTile; i++) panels.start(i, o + (i < rows ? i : rows - 1));
    for (int64_t i = 0; i < tiles * kTile * groups; i++) scale[i] = 1;
    if (w.groups) scales_of(w, o, rows, scale);
    if (!once) memset(total, 0, 4 * kTileFloats * tiles * count);
    for (int64_t c = 0; c < columns; c += pass) {
      const int64_t some = columns - c < pass ? columns - c : pass;
      Panel panel[kMost / kTile];
      for (int64_t t = 0; t < tiles; t++) {
        const bool in_place = !many && (t + 1) * kTile <= rows && panels.in_place(c, some);
        uint8_t* to = memory + t * kTile * stride;
        panel[t] = in_place ? Panel{w.data + (o + t * kTile) * w.stride + c * kSize, w.stride} : Panel{to, stride};
        for (int64_t i = 0; i < kTile && !in_place; i++) panels.fill(t * kTile + i, c, some, to + i * stride);
      }
      for (int64_t s = 0; s < count; s += kTiles) {
        const uint8_t* strip[kTiles];
        const float* steps[kTiles];
        for (int64_t j = 0; j < kTiles && s + j < count; j++) {
          strip[j] = x + (s + j) * strips.bytes() + kTile * c * kSize;
          steps[j] = reinterpret_cast<const float*>(x + (s + j) * strips.bytes() + kTile * strips.row_bytes());
        }
        const auto multiply = [&](auto O, auto S, int64_t t) {
          for (int64_t u = 0; u < some; u += unit) {
            const auto sums = [&](int i, int j) { return total + ((t + i) * count + s + j) * kTileFloats; };
            each_sum<O, S>([&](auto T, int i, int j) {
              if (once && c)
                load_tile<T>(sums(i, j), 64);
              else
                clear_tile<T>();
            });
            const int64_t stop = u + unit < some ? u + unit : some;
            add_columns<Pairs, O, S>(panel + t, strip, u * kSize, stop * kSize, step,
                                     !s && panel[t].stride == w.stride);
            each_sum<O, S>([&](auto T, int i, int j) {
              if (once) return store_tile<T>(sums(i, j));
              const float* of = scale + (t + i) * kTile * groups + (grouped ? (c + u) / unit : 0);
              add_scaled<Pairs, T>(of, groups, steps[j] + kTile * ((c + u) / unit), sums(i, j));
            });
          }
        };
        const bool both = s + 1 < count;
        int64_t t = 0;
        for (; t + 1 < tiles; t += 2) both ? multiply(Int<2>(), Int<2>(), t) : multiply(Int<2>(), Int<1>(), t);
        if (t < tiles) both ? multiply(Int<1>(), Int<2>(), t) : multiply(Int<1>(), Int<1>(), t);
      }
    }
    put_totals(total, once && w.groups ? scale : nullptr, rows, in, w.rows, y + o);
  }
}

inline void multiply_dense_matrix(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end,
                                  float* y) {
  if (rounded(w, in)) {
    if (w.blocks)
      return w.kind == Kind::kInt8 ? multiply_panels<false, Int8Panels<false, true>>(w, in, x, begin, end, y)
                                   : multiply_panels<false, Int4Panels<false, false, true>>(w, in, x, begin, end, y);
    if (w.kind == Kind::kInt8) return multiply_panels<false, PlainPanels<1>>(w, in, x, begin, end, y);
    return w.zero ? multiply_panels<false, Int4Panels<false, true>>(w, in, x, begin, end, y)
                  : multiply_panels<false, Int4Panels<false, false>>(w, in, x, begin, end, y);
  }
  switch (w.kind) {
    case Kind::kBF16: return multiply_panels<true, PlainPanels<2>>(w, in, x, begin, end, y);
    case Kind::kPacked: return multiply_panels<true, PackedPanels>(w, in, x, begin, end, y);
    case Kind::kInt8:
      w.blocks ? multiply_panels<true, Int8Panels<true, true>>(w, in, x, begin, end, y)
               : multiply_panels<true, Int8Panels<true, false>>(w, in, x, begin, end, y);
      break;
    default:
      w.blocks ? multiply_panels<true, Int4Panels<true, false, true>>(w, in, x, begin, end, y)
      : w.zero ? multiply_panels<true, Int4Panels<true, true>>(w, in, x, begin, end, y)
               : multiply_panels<true, Int4Panels<true, false>>(w, in, x, begin, end, y);
  }
  mend(w, in, begin, end, y);
}

inline void multiply_matrix(const Weight& w, const Input& in, const void* prepared, int64_t begin, int64_t end,
                            float* y) {
  const uint8_t* x = static_cast<const uint8_t*>(prepared);
  if (!sparse(w)) return multiply_dense_matrix(w, in, x, begin, end, y);
  by_blocks(w, begin, end, kMost,
            [&](const Weight& rows, int64_t o, int64_t count) { multiply_dense_matrix(rows, in, x, 0, count, y + o); });
}

}  // namespace
}  // namespace jaxllm
