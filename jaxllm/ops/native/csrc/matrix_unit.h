// Products by a matrix unit (AMX): tiles of 16 weight rows times 16 input rows, of bfloat16 pairs or bytes.
//
// A weight tile is 64 bytes of each row, in place or decoded to scratch, as many columns as the caches hold. The input
// is transposed, 16 rows interleaved (prepare_matrix). Columns that share a scale are summed in the unit, then scaled
// and added to the output's total. Sums are in column order, so an output's bits depend on its own two rows only.
#pragma once

#include "prepare_input.h"

namespace jaxllm {
namespace {

constexpr int64_t kTile = kStrip, kTiles = 2;  // rows of a tile; tiles multiplied at once, of either side
constexpr int64_t kTileFloats = kTile * kTile;

// Weight rows per block: the large one for more than two strips of inputs.
constexpr int64_t kSmallBlock = kTile, kLargeBlock = 4 * kTiles * kTile;

// Bytes of a row per pass: a small block fits L1, a large one L2 besides many strips.
constexpr int64_t kSmallBlockBytes = 512, kLargeBlockBytes = 2048;

inline bool by_matrix(const Weight& w, const Input& in) {
  return !w.e2m1 && (multiplies_bf16(w, in) || (uses_int8_input(w, in) && !in.quantized));
}

// Layout of a prepared input: strips of 16 rows; of each, its columns in order (64 bytes for 4 bytes of all 16 rows),
// and then the steps of its blocks, for all 16 rows.
struct Strips {
  int64_t size, width, blocks;  // bytes of a number; columns; of rounded ones

  Strips(const Weight& w, const Input& in)
      : size(uses_int8_input(w, in) ? 1 : 2),
        width(round_up(in.columns, 128)),
        blocks(size == 1 ? width / step_columns(w) : 0) {}
  int64_t row_bytes() const { return width * size; }
  int64_t bytes() const { return kTile * (row_bytes() + 4 * blocks); }
};

inline size_t matrix_bytes(const Weight& w, const Input& in) {
  return round_up(in.rows, kTile) / kTile * Strips(w, in).bytes();
}

inline void prepare_matrix(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const Strips strips(w, in);
  const int64_t row_bytes = strips.row_bytes(), padded = round_up(in.columns, 128), count = step_columns(w);
  struct Scratch {};
  uint8_t* lines = thread_scratch<Scratch>(kTile * row_bytes + 4 * padded);
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
      for (int64_t c = in.columns; c < padded; c++) x[c] = 0;
      for (int64_t b = 0; b < strips.blocks; b++)
        step[kTile * b + i] = quantize_int8(x + count * b, count, reinterpret_cast<int8_t*>(line + count * b));
    }
    for (int64_t k = 0; k < row_bytes; k += 64) {
      Bits words[kTile];
      for (int64_t i = 0; i < kTile; i++) words[i] = load<Bits>(lines + i * row_bytes + k);
      transpose(words, reinterpret_cast<uint32_t*>(to + kTile * k), kTile);
    }
  }
}

// Source of a weight tile: 16 rows and their distance.
struct Panel {
  const uint8_t* at;
  int64_t stride;
};

// Prefetches these bytes of the next block.
JAXLLM_INLINE void prefetch_block(const uint8_t* from, int64_t bytes, int64_t stride) {
  for (int64_t offset = 0; offset < bytes; offset += 64) prefetch_line(from + offset, kSmallBlock * stride);
}

// Panels, one type per kind of weight: start(i, o) maps row i of a block to weight row o; fill(i, c, columns, to)
// decodes columns of it for the unit; in_place(c, columns) is whether the unit reads them as stored.
struct Panels {
  const Weight& w;
  const uint8_t* row[kLargeBlock];

  explicit Panels(const Weight& w) : w(w) {}
  void start(int64_t i, int64_t o) { row[i] = w.data + o * w.stride; }
  bool in_place(int64_t, int64_t) const { return false; }
};

template <int Size>
struct DensePanels : Panels {  // bfloat16, or bytes
  using Panels::Panels;
  bool in_place(int64_t c, int64_t columns) const { return Size == 1 || c + columns <= w.columns; }
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    const int64_t stored = in_place(c, columns) ? columns : w.columns - c;
    memcpy(to, row[i] + c * Size, stored * Size);
    memset(to + stored * Size, 0, (columns - stored) * Size);
  }
};

struct PackedBf16Panels {
  const PackedBf16Source<true> source;
  PackedBf16Source<true>::Row row[kLargeBlock];

  explicit PackedBf16Panels(const Weight& w) : source(w) {}
  void start(int64_t i, int64_t o) { row[i] = source.row(o, 0); }
  bool in_place(int64_t, int64_t) const { return false; }
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    prefetch_block(row[i].bytes + c, columns, source.w.stride);
    prefetch_block(row[i].nibbles + c / 2, columns / 2, source.w.nibble_stride);
    for (int64_t k = 0; k < columns; k += 64) {
      Halves values[PackedBf16Source<true>::kValues];
      row[i].load(c + k, values);
      memcpy(to + 2 * k, values, sizeof values);
    }
  }
};

template <bool Pairs, bool Blocks>
struct Int8Panels : Panels {                                     // as bfloat16; from blocks also as bytes
  static constexpr int kBytes32 = Blocks ? block_bytes(8) : 32;  // of 32 columns
  using Panels::Panels;
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    const uint8_t* from = row[i] + c / 32 * kBytes32;
    prefetch_block(from, columns / 32 * kBytes32, w.stride);
    if (Blocks) from += 2;
    for (int64_t k = 0; k < columns; k += 32, from += kBytes32) {
      if constexpr (Pairs)
        store(to + 2 * k, int8_to_bf16(reinterpret_cast<const int8_t*>(from)));
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
  const uint8_t* zero[kLargeBlock];

  void start(int64_t i, int64_t o) {
    Panels::start(i, o);
    zero[i] = Zero ? w.zero + o * w.groups : nullptr;
  }
  JAXLLM_INLINE int zero_at(int64_t i, int64_t c) const { return Zero ? zero[i][w.groups > 1 ? c / w.group : 0] : 8; }
  void fill(int64_t i, int64_t c, int64_t columns, uint8_t* to) {
    const uint8_t* from = row[i] + c / 32 * kBytes32;
    prefetch_block(from, columns / 32 * kBytes32, w.stride);
    if (Blocks) from += 2;
    if constexpr (Pairs) {
      for (int64_t k = 0; k < columns; k += 32, from += kBytes32)
        store(to + 2 * k, nibbles_to_bf16(nibbles, from, zero_at(i, c + k)));
    } else {
      Bytes offset = Bytes{} + uint8_t(8);
      for (int64_t k = 0; k < columns; k += kBytes, from += 2 * kBytes32) {
        if (Zero) {
          uint8_t zeros[kBytes];
          memset(zeros, zero_at(i, c + k), kBytes / 2);
          memset(zeros + kBytes / 2, zero_at(i, c + k + kBytes / 2), kBytes / 2);
          offset = load<Bytes>(zeros);
        }
        store(to + k, unpack_nibbles(from, from + kBytes32) - offset);
      }
    }
  }
};

// Calls run(T, i, j) for the tile of sums T of weight tile i and strip j.
template <int O, int S, class Run>
JAXLLM_INLINE void for_each_sums(const Run& run) {
  run(Int<0>(), 0, 0);
  if constexpr (S > 1) run(Int<1>(), 0, 1);
  if constexpr (O > 1) run(Int<2>(), 1, 0);
  if constexpr (O > 1 && S > 1) run(Int<3>(), 1, 1);
}

// Adds the products of bytes k to end of the rows.
template <bool Pairs, int O, int S>
JAXLLM_INLINE void add_columns(const Panel* panel, const uint8_t* const* x, int64_t k, int64_t end, int64_t step,
                               bool prefetch) {
  for (; k < end; k += step) {
    if (prefetch)
      for (int i = 0; i < O; i++)
        for (int r = 0; r < kTile; r++)
          prefetch_line(panel[i].at + r * panel[i].stride + k, kSmallBlock * panel[i].stride);
    load_tile<4>(panel[0].at + k, panel[0].stride);
    if constexpr (O > 1) load_tile<5>(panel[1].at + k, panel[1].stride);
    load_tile<6>(x[0] + kTile * k, 64);
    if constexpr (S > 1) load_tile<7>(x[1] + kTile * k, 64);
    for_each_sums<O, S>([](auto T, int, int) { add_tiles<Pairs, T, 4 + T / 2, 6 + T % 2>(); });
  }
}

// Adds a tile's sums to its outputs' totals, times `scale` of each weight row and `step` of each input row.
template <bool Pairs, int T>
JAXLLM_INLINE void add_scaled(const float* scale, int64_t scale_stride, const float* step, float* total) {
  alignas(64) uint8_t sums[kTileFloats * 4];
  store_tile<T>(sums);
  const Floats steps = Pairs ? Floats{} : load<Floats>(step);
  for (int64_t i = 0; i < kTile; i++) {
    const Floats row_scale = splat(scale[i * scale_stride]), so_far = load<Floats>(total + kTile * i);
    if constexpr (Pairs)
      store(total + kTile * i, fma(load<Floats>(sums + 64 * i), row_scale, so_far));
    else  // scaled first: steps may be so large that anything else overflows
      store(total + kTile * i, fma(to_floats(load<Ints>(sums + 64 * i)) * row_scale, steps, so_far));
  }
}

// Transposes and stores a block's outputs [weight tile][strip][weight row][input row], times each weight row's `scale`
// if not null.
inline void store_totals(const float* total, const float* scale, int64_t rows, const Input& in, int64_t stride,
                         float* y) {
  const int64_t count = round_up(in.rows, kTile) / kTile;
  for (int64_t s = 0; s < count; s++)
    for (int64_t t = 0; t * kTile < rows; t++) {
      const float* sums = total + (t * count + s) * kTileFloats;
      Bits lines[kTile];
      for (int64_t i = 0; i < kTile; i++) {
        lines[i] = load<Bits>(sums + kTile * i);
        if (scale) lines[i] = Bits(Floats(lines[i]) * scale[t * kTile + i]);
      }
      uint32_t transposed[kTileFloats];
      float* to = y + s * kTile * stride + t * kTile;
      const int64_t columns_left = rows - t * kTile, rows_left = in.rows - s * kTile;
      const bool full = columns_left >= kTile && rows_left >= kTile;
      transpose(lines, full ? reinterpret_cast<uint32_t*>(to) : transposed, full ? stride : kTile);
      for (int64_t r = 0; r < kTile && r < rows_left && !full; r++)
        memcpy(to + r * stride, transposed + kTile * r, 4 * (columns_left < kTile ? columns_left : kTile));
    }
}

template <bool Pairs, class Panels>
void multiply_panels(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (!in.rows) return;
  constexpr int64_t kSize = Pairs ? 2 : 1;
  const Strips strips(w, in);
  const int64_t columns = round_up(w.columns, is_integer(w) ? 128 : 32), count = round_up(in.rows, kTile) / kTile;
  const bool large = count > kTiles, grouped = w.groups > 1;
  const bool sums_in_unit = Pairs && !grouped && columns;  // all columns are summed in the unit
  const int64_t block = large ? kLargeBlock : kSmallBlock, pass = (large ? kLargeBlockBytes : kSmallBlockBytes) / kSize;
  const int64_t stride = pass * kSize + 64;  // of written rows
  const int64_t unit = Pairs && !grouped ? pass : step_columns(w);
  const int64_t step = unit * kSize < 64 ? unit * kSize : 64, groups = grouped ? w.groups : 1;
  const MatrixUnit on{int(step)};
  struct Scratch {};
  uint8_t* memory = thread_scratch<Scratch>(block * (stride + 4 * groups + 4 * kTile * count));
  float *scale = reinterpret_cast<float*>(memory + block * stride), *total = scale + block * groups;
  Panels panels(w);
  for (int64_t o = begin; o < end; o += block) {
    const int64_t rows = end - o < block ? end - o : block, tiles = (rows + kTile - 1) / kTile;
    for (int64_t i = 0; i < tiles * kTile; i++) panels.start(i, o + (i < rows ? i : rows - 1));
    for (int64_t i = 0; i < tiles * kTile * groups; i++) scale[i] = 1;
    if (w.groups) load_scales(w, o, rows, scale);
    if (!sums_in_unit) memset(total, 0, 4 * kTileFloats * tiles * count);
    for (int64_t c = 0; c < columns; c += pass) {
      const int64_t width = columns - c < pass ? columns - c : pass;
      Panel panel[kLargeBlock / kTile];
      for (int64_t t = 0; t < tiles; t++) {
        const bool in_place = !large && (t + 1) * kTile <= rows && panels.in_place(c, width);
        uint8_t* to = memory + t * kTile * stride;
        panel[t] = in_place ? Panel{w.data + (o + t * kTile) * w.stride + c * kSize, w.stride} : Panel{to, stride};
        for (int64_t i = 0; i < kTile && !in_place; i++) panels.fill(t * kTile + i, c, width, to + i * stride);
      }
      for (int64_t s = 0; s < count; s += kTiles) {
        const uint8_t* strip[kTiles];
        const float* steps[kTiles];
        for (int64_t j = 0; j < kTiles && s + j < count; j++) {
          strip[j] = x + (s + j) * strips.bytes() + kTile * c * kSize;
          steps[j] = reinterpret_cast<const float*>(x + (s + j) * strips.bytes() + kTile * strips.row_bytes());
        }
        const auto multiply = [&](auto O, auto S, int64_t t) {
          for (int64_t u = 0; u < width; u += unit) {
            const auto sums_at = [&](int i, int j) { return total + ((t + i) * count + s + j) * kTileFloats; };
            for_each_sums<O, S>([&](auto T, int i, int j) {
              if (sums_in_unit && c)
                load_tile<T>(sums_at(i, j), 64);
              else
                clear_tile<T>();
            });
            const int64_t stop = u + unit < width ? u + unit : width;
            add_columns<Pairs, O, S>(panel + t, strip, u * kSize, stop * kSize, step,
                                     !s && panel[t].stride == w.stride);
            for_each_sums<O, S>([&](auto T, int i, int j) {
              if (sums_in_unit) return store_tile<T>(sums_at(i, j));
              const float* row_scales = scale + (t + i) * kTile * groups + (grouped ? (c + u) / unit : 0);
              add_scaled<Pairs, T>(row_scales, groups, steps[j] + kTile * ((c + u) / unit), sums_at(i, j));
            });
          }
        };
        const bool two_strips = s + 1 < count;
        int64_t t = 0;
        for (; t + 1 < tiles; t += 2) two_strips ? multiply(Int<2>(), Int<2>(), t) : multiply(Int<2>(), Int<1>(), t);
        if (t < tiles) two_strips ? multiply(Int<1>(), Int<2>(), t) : multiply(Int<1>(), Int<1>(), t);
      }
    }
    store_totals(total, sums_in_unit && w.groups ? scale : nullptr, rows, in, w.rows, y + o);
  }
}

inline void multiply_dense_matrix(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end,
                                  float* y) {
  if (uses_int8_input(w, in)) {
    if (w.blocks)
      return w.kind == Kind::kInt8 ? multiply_panels<false, Int8Panels<false, true>>(w, in, x, begin, end, y)
                                   : multiply_panels<false, Int4Panels<false, false, true>>(w, in, x, begin, end, y);
    if (w.kind == Kind::kInt8) return multiply_panels<false, DensePanels<1>>(w, in, x, begin, end, y);
    return w.zero ? multiply_panels<false, Int4Panels<false, true>>(w, in, x, begin, end, y)
                  : multiply_panels<false, Int4Panels<false, false>>(w, in, x, begin, end, y);
  }
  switch (w.kind) {
    case Kind::kBF16: return multiply_panels<true, DensePanels<2>>(w, in, x, begin, end, y);
    case Kind::kPackedBF16: return multiply_panels<true, PackedBf16Panels>(w, in, x, begin, end, y);
    case Kind::kInt8:
      w.blocks ? multiply_panels<true, Int8Panels<true, true>>(w, in, x, begin, end, y)
               : multiply_panels<true, Int8Panels<true, false>>(w, in, x, begin, end, y);
      break;
    default:
      w.blocks ? multiply_panels<true, Int4Panels<true, false, true>>(w, in, x, begin, end, y)
      : w.zero ? multiply_panels<true, Int4Panels<true, true>>(w, in, x, begin, end, y)
               : multiply_panels<true, Int4Panels<true, false>>(w, in, x, begin, end, y);
  }
  recompute_overflowed(w, in, begin, end, y);
}

inline void multiply_matrix(const Weight& w, const Input& in, const void* prepared, int64_t begin, int64_t end,
                            float* y) {
  const uint8_t* x = static_cast<const uint8_t*>(prepared);
  if (!is_sparse(w)) return multiply_dense_matrix(w, in, x, begin, end, y);
  for_each_decoded(w, begin, end, kLargeBlock, [&](const Weight& rows, int64_t o, int64_t count) {
    multiply_dense_matrix(rows, in, x, 0, count, y + o);
  });
}

}  // namespace
}  // namespace jaxllm
