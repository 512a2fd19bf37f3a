// Weights of any kind times inputs, in tiles over a source of weight values.
//
// A source defines, for a kind of weight:
//   Value          a register of weights: Floats of kLanes columns, or Halves, of twice as many bfloat16.
//   kPairs         whether Halves multiply bfloat16 inputs in pairs; else they become floats.
//   kUnit          columns that are multiplied at once and share their scales; kChunk: columns per prefetch.
//   kScales        none, one per row (applied last; shifted: to weights 2^24 times as large), or one per lane of a
//   unit. kPartialChunk  whether rows may end within a chunk, without zero padding; kPartialUnits: within a chunk's
//   units. Row            row(o, i) for the tile's row i; fetch(c) prefetches a later row's chunk, load(c, values)
//   reads the
//                  unit of columns from c on, scale(c) its scales.
// The source defines the order of columns within a unit, and prepare_input.h permutes the input in the same way.
#pragma once

#include "tiles.h"

namespace jaxllm {
namespace {

enum class Scales { kNone, kRow, kShifted, kUnit };

template <class V>
constexpr int lane_count() {
  return sizeof(V) / sizeof(V{}[0]);
}

// The N registers that a register of weights becomes for multiplication.
template <class V, int N>
struct Factor {
  V part[N];
};

template <bool Pairs>
JAXLLM_INLINE Factor<Floats, 1> factor(Floats w) {
  return {{w}};
}

template <bool Pairs>
JAXLLM_INLINE auto factor(Halves w) {
  if constexpr (Pairs)
    return Factor<Halves, 1>{{w}};
  else
    return Factor<Floats, 2>{{even(w), odd(w)}};
}

JAXLLM_INLINE void add(Floats& sum, Floats w, Floats x) { sum = fma(w, x, sum); }
JAXLLM_INLINE void add(Floats& sum, Halves w, Halves x) { add_pairs(sum, w, x); }

template <bool Pairs>
struct InputOf {
  typedef float Type;
};
template <>
struct InputOf<true> {
  typedef uint16_t Type;
};
template <class S>
using InputType = typename InputOf<S::kPairs>::Type;

template <class S>
constexpr bool kSequential = false;  // rows read on from where they are, and prefetch from there
template <class S>
constexpr int kTileRows8 = 0;  // weight rows of a tile with 5 to 8 input rows; 0: tiles have four input rows
template <class S>
struct DecodedRows;
template <class S>
constexpr bool kInMemory = false;  // values are read as they are multiplied
template <class S>
constexpr bool kInMemory<DecodedRows<S>> = true;

// Adds a unit's products to a tile's sums. P weight rows at a time share loads of the input, since processors load
// hardly more registers than they multiply. A unit with its own scales has its own sum, which is then scaled.
template <class S, int O, int R, class Row>
JAXLLM_INLINE void add_unit(Floats (&sum)[O][R], Row (&row)[O], int64_t c, const InputType<S>* x, int64_t x_stride) {
  typedef typename S::Value Value;
  typedef decltype(factor<S::kPairs>(Value{})) Factors;
  typedef decltype(+Factors{}.part[0]) Number;
  constexpr int kColumns = lane_count<Value>(), N = S::kUnit / kColumns, kNumbers = sizeof(Factors) / sizeof(Number);
  constexpr bool kParts = S::kScales == Scales::kUnit;
  constexpr bool kShareLoads = R == 1 ? kRegisters >= 32 || N <= 2 : kInMemory<S> || !(kParts || S::kPairs);
  constexpr int P = kShareLoads ? (R == 1 && N * O > 16 ? O / 2 : O) : 1;
  JAXLLM_UNROLL
  for (int i = 0; i < O; i += P) {
    Value value[P][N];
    Floats part[P][R], scale[P];
    clear(part);
    JAXLLM_UNROLL
    for (int p = 0; p < P; p++) {
      if constexpr (!kInMemory<S>) row[i + p].load(c, value[p]);
      if constexpr (kParts && !kInMemory<S>) scale[p] = row[i + p].scale(c);
    }
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) {
      Factors w[P];
      JAXLLM_UNROLL
      for (int p = 0; p < P; p++) {
        if constexpr (kInMemory<S>) value[p][n] = row[i + p].value(c + n * kColumns);
        w[p] = factor<S::kPairs>(value[p][n]);
      }
      JAXLLM_UNROLL
      for (int k = 0; k < kNumbers; k++) JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const auto in = load<Number>(x + j * x_stride + c + (n * kNumbers + k) * lane_count<Number>());
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) add(kParts ? part[p][j] : sum[i + p][j], w[p].part[k], in);
      }
    }
    JAXLLM_UNROLL
    for (int p = 0; p < P && kParts; p++) {
      if constexpr (kParts && kInMemory<S>) scale[p] = row[i + p].scale(c);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) sum[i + p][j] = fma(part[p][j], scale[p], sum[i + p][j]);
    }
  }
}

// Adds the products of columns begin <= c < end, whole units, to a tile's sums.
template <class S, int O, int R, class Row>
JAXLLM_INLINE void add_columns(Floats (&sum)[O][R], Row (&row)[O], int64_t begin, int64_t end, const InputType<S>* x,
                               int64_t x_stride, bool fetch) {
  for (int64_t c = begin; c < end; c += S::kChunk) {
    if (c % S::kChunk) __builtin_unreachable();
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++)
      if (fetch) row[i].fetch(c);
    JAXLLM_UNROLL
    for (int u = 0; u < S::kChunk; u += S::kUnit) {
      if (S::kPartialUnits && c + u >= end) break;
      add_unit<S, O, R>(sum, row, c + u, x, x_stride);
    }
  }
}

template <class S, int O, int R>
JAXLLM_INLINE void store_sums(Floats (&sum)[O][R], const Weight& w, const TileRows& o, int64_t r, float* y) {
  constexpr bool kShifted = S::kScales == Scales::kShifted;
  JAXLLM_UNROLL
  for (int i = 0; i < O && kShifted; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[i][j] *= 0x1p-24f;
  store_sums(sum, w, o, r, kShifted || S::kScales == Scales::kRow, y);
}

template <class S, int O, int R>
void tile(const S& source, const Weight& w, const InputType<S>* x, int64_t x_stride, const TileRows& o, int64_t r,
          float* y) {
  typename S::Row row[O];
  Floats sum[O][R];
  clear(sum);
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) row[i] = source.row(o[i], i);
  x += r * x_stride;
  const int64_t full = S::kPartialChunk ? w.columns / S::kChunk * S::kChunk : w.columns;
  add_columns<S>(sum, row, 0, full, x, x_stride, !r);
  if constexpr (S::kPartialChunk) {
    if (full < w.columns) {
      alignas(64) uint8_t ends[O][S::kChunk * 4] = {};
      for (int i = 0; i < O; i++) row[i].pad_end(full, w.columns - full, ends[i]);
      static_assert(S::kChunk == S::kUnit, "");
      add_unit<S, O, R>(sum, row, full, x, x_stride);
    }
  }
  store_sums<S>(sum, w, o, r, y);
}

// Distance between rows of a prepared input: no power of two, so that rows do not map to the same L1 cache sets.
inline int64_t prepared_stride(const Input& in) { return round_up(in.columns, 128) + 32 * 5; }

template <class S>
void multiply_source(const S& source, const Weight& w, const Input& in, const uint8_t* x, int64_t row_bytes,
                     int64_t begin, int64_t end, float* y) {
  constexpr bool kParts = S::kScales == Scales::kUnit, kFewRegisters = kRegisters < 32;
  constexpr int kTileRows4 = !kParts ? (kFewRegisters ? 2 : 4) : (kFewRegisters ? 1 : 2);
  constexpr int kTileRows2 = !kParts && kFewRegisters ? 3 : kTileRows4;
  for_each_block(begin, end, row_bytes, in.rows, [&](int64_t begin, int64_t end) {
    for_each_tile<4, kTileRows2, kTileRows4, kTileRows8<S>>(
        begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
          tile<S, O, R>(source, w, reinterpret_cast<const InputType<S>*>(x), prepared_stride(in), o, r, y);
        });
  });
}

constexpr int kBlockRows = 12;  // weight rows that are decoded at once

// For more input rows, blocks of weight rows and columns are decoded once, with their scales, to memory that fits L1.
// Sums are kept in memory between blocks of columns.
template <class S>
struct DecodedRows {
  typedef decltype(+factor<S::kPairs>(typename S::Value{}).part[0]) Value;
  static constexpr bool kPairs = S::kPairs, kPartialUnits = false, kParts = S::kScales == Scales::kUnit;
  static constexpr bool kSmall = kRegisters < 32;
  static constexpr int kSize = sizeof(InputType<S>), kRows = kBlockRows, kColumns = 2048 / kSize;
  static constexpr int kTile = kSmall ? 3 : 6;  // rows, with four of the input
  static constexpr int kUnit = kParts ? S::kUnit : lane_count<Value>(), kChunk = S::kUnit;
  static constexpr int kPass = S::kChunk > 128 ? S::kChunk : 128;  // columns
  static constexpr Scales kScales = S::kScales;
  struct Row {
    const uint8_t* at;
    const Floats* scales;
    void fetch(int64_t) const {}
    JAXLLM_INLINE Value value(int64_t c) const { return load<Value>(at + c * kSize); }
    JAXLLM_INLINE Floats scale(int64_t c) const { return scales[c / kUnit]; }
  };
  const Weight& w;
  const InputType<S>* x;
  int64_t x_stride, columns;
  float* y;
  uint8_t (*values)[kColumns * kSize];
  Floats (*scales)[kParts ? kColumns / kUnit : 1];
  TileRows o;
  typename S::Row row[kRows];

  static void decode(typename S::Row& row, int64_t begin, int64_t end, uint8_t* to, Floats* scales) {
    alignas(64) uint8_t place[S::kPartialChunk ? S::kChunk * 4 : 1];
    for (int64_t c = begin; c < end; c += S::kChunk) {
      if (c % S::kChunk) __builtin_unreachable();
      if constexpr (S::kPartialChunk) {
        if (c + S::kChunk > end) {
          memset(place, 0, sizeof place);
          row.pad_end(c, end - c, place);
        }
      }
      if constexpr (kSequential<S>) row.fetch(c);
      JAXLLM_UNROLL
      for (int u = 0; u < S::kChunk; u += S::kUnit) {
        if (S::kPartialUnits && c + u >= end) break;
        typename S::Value value[S::kUnit / lane_count<typename S::Value>()];
        row.load(c + u, value);
        if constexpr (kParts) *scales++ = row.scale(c + u);
        JAXLLM_UNROLL
        for (const auto& weights : value) {
          JAXLLM_UNROLL
          for (const Value& part :
               factor<kPairs>(weights).part) {  // not in one assignment, which GCC 12 copies through memory
            store(to, part);
            to += sizeof part;
          }
        }
      }
    }
  }

  // Multiplies columns from c on of one tile, whose sums are kept in `sums_of_tile`.
  __attribute__((noinline)) void multiply(int64_t c, int64_t end, int i, int64_t r, Floats* all) const {
    Row rows[kTile];
    JAXLLM_UNROLL
    for (int n = 0; n < kTile; n++) rows[n] = {values[i + n] - c * kSize, scales[i + n] - c / kUnit};
    Floats sum[kTile][4];
    if constexpr (kParts) asm("" : : "r"(sum) : "memory");  // kept in memory: registers hold a unit's sums
    JAXLLM_UNROLL
    for (int n = 0; n < kTile; n++) JAXLLM_UNROLL
    for (int j = 0; j < 4; j++) sum[n][j] = c ? all[4 * n + j] : Floats{};
    for (int64_t from = c; from < end; from += kPass) {
      if (!r && !kSequential<S>) {  // prefetches what is decoded next
        JAXLLM_UNROLL
        for (int n = 0; n < kTile; n++)
          for (int u = 0; u < kPass; u += S::kChunk) row[i + n].fetch(from + u);
      }
      add_columns<DecodedRows>(sum, rows, from, from + kPass < end ? from + kPass : end, x + r * x_stride, x_stride,
                               false);
    }
    if (end >= columns) return store_sums<S>(sum, w, TileRows{o[i], o.step, o.last}, r, y);
    JAXLLM_UNROLL
    for (int n = 0; n < kTile; n++) JAXLLM_UNROLL
    for (int j = 0; j < 4; j++) all[4 * n + j] = sum[n][j];
  }
};

// Decodes rows if there are more input rows than max_source_rows. With up to 16, blocks have distant rows, as tiles do;
// with more, neighboring rows, whose outputs fill cache lines of y, and each block prefetches the next.
template <class S>
void multiply_decoded(const S& source, const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end,
                      float* y, int64_t max_source_rows = S::kScales == Scales::kNone ? 4 : 16) {
  if (in.rows <= max_source_rows) return multiply_source(source, w, in, x, w.stride, begin, end, y);
  typedef DecodedRows<S> Block;
  const int64_t strips = round_up(in.rows, 4) / 4, full_blocks = (end - begin) / Block::kRows,
                rest = end - begin - full_blocks * Block::kRows;
  // Strips of the input that stay in L2 while all weights are decoded.
  const int64_t strips_in_cache = 4 * rows_in_cache(4 * prepared_stride(in) * Block::kSize);
  const bool many_rows = in.rows > 16;
  constexpr size_t kValueBytes = sizeof(*Block::values) * Block::kRows,
                   kScaleBytes = sizeof(*Block::scales) * Block::kRows;
  uint8_t* memory = thread_scratch<Block>(kValueBytes + kScaleBytes + strips * 4 * Block::kRows * sizeof(Floats));
  Floats* sums = reinterpret_cast<Floats*>(memory + kValueBytes + kScaleBytes);
  S block_source = source;
  if (many_rows && source.distance) block_source.distance = Block::kRows * w.stride;
  Block block = {w,
                 reinterpret_cast<const InputType<S>*>(x),
                 prepared_stride(in),
                 round_up(w.columns, S::kUnit),
                 y,
                 reinterpret_cast<decltype(Block::values)>(memory),
                 reinterpret_cast<decltype(Block::scales)>(memory + kValueBytes),
                 {},
                 {}};
  for (int64_t from = 0; from < strips; from += strips_in_cache)
    for (int64_t n = 0; n < full_blocks + (rest > 0); n++) {
      const int64_t first_row = begin + n * Block::kRows;
      block.o =
          many_rows || n == full_blocks ? TileRows{first_row, 1, end - 1} : TileRows{begin + n, full_blocks, end - 1};
      for (int i = 0; i < Block::kRows; i++) block.row[i] = block_source.row(block.o[i], i);
      int64_t c = 0;
      do {
        const int64_t stop = c + Block::kColumns < w.columns ? c + Block::kColumns : w.columns;
        for (int i = 0; i < Block::kRows; i++) Block::decode(block.row[i], c, stop, block.values[i], block.scales[i]);
        for (int64_t s = from; s < from + strips_in_cache && s < strips; s++)
          for (int i = 0; i < (n < full_blocks ? Block::kRows : rest); i += Block::kTile)
            block.multiply(c, round_up(stop, S::kUnit), i, 4 * s + 4 <= in.rows ? 4 * s : in.rows - 4,
                           sums + ((s - from) * Block::kRows + i) * 4);
        c = stop;
      } while (c < w.columns);
    }
}

}  // namespace
}  // namespace jaxllm
