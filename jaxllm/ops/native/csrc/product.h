// The product of any kind of weights with inputs: a tile over a source of weight values.
//
// A source defines, for a kind of weight:
//   Value          a register of weights: Floats of kLanes columns, or Halves, of twice as many bfloat16.
//   kPairs         whether Halves multiply bfloat16 inputs in pairs; else they are converted, and multiply floats.
//   kUnit          columns that are multiplied at once, and share their scales; kChunk: columns per prefetch.
//   kScales        none, one per row (applied last; shifted: to weights 2^24 times as large), or one for each lane of a
//                  unit.
//   kMany          whether there are more input rows than a tile has.
//   kTail          whether rows may end within a chunk, without zero padding.
//   Row            row(o, i): a row's address, for the tile's row i. fetch(c) prefetches a later row's chunk, load(c,
//   values) reads a unit's
//                  columns from c on, scale(c) its scales.
// The source defines the order of columns within a unit; the input is put in the same (inputs.h).
#pragma once

#include "tiles.h"

namespace jaxllm {
namespace {

enum class Scales { kNone, kRow, kShifted, kUnit };

template <class V>
constexpr int columns_of() {
  return sizeof(V) / sizeof(V{}[0]);
}

struct Two {
  Floats first, second;
};

// A register of weights as it is multiplied; and its product, added to a sum.
template <bool Pairs>
JAXLLM_INLINE Floats factor(Floats w) {
  return w;
}

template <bool Pairs>
JAXLLM_INLINE auto factor(Halves w) {
  if constexpr (Pairs)
    return w;
  else
    return Two{even(w), odd(w)};
}

JAXLLM_INLINE void add(Floats& sum, Floats w, const float* x) { sum = fma(w, load<Floats>(x), sum); }
JAXLLM_INLINE void add(Floats& sum, Halves w, const uint16_t* x) { add_pairs(sum, w, load<Halves>(x)); }
JAXLLM_INLINE void add(Floats& sum, const Two& w, const float* x) {
  sum = fma(w.first, load<Floats>(x), sum);
  sum = fma(w.second, load<Floats>(x + kLanes), sum);
}

template <bool Pairs>
struct InputOf {
  typedef float Type;
};
template <>
struct InputOf<true> {
  typedef uint16_t Type;
};
template <class S>
using X = typename InputOf<S::kPairs>::Type;

// Adds a unit's products to a tile's sums, P weight rows at once. Units that have their own scales are added up first:
// with few registers in two halves, since a long sum waits for itself.
template <class S, int O, int R, class Row>
JAXLLM_INLINE void add_unit(Floats (&sum)[O][R], Row (&row)[O], int64_t c, const X<S>* x, int64_t x_stride) {
  typedef typename S::Value Value;
  constexpr int kColumns = columns_of<Value>(), N = S::kUnit / kColumns;
  constexpr bool kParts = S::kScales == Scales::kUnit;
  constexpr int P = R == 1 && (kRegisters >= 32 || N <= 2) ? (N * O > 16 ? O / 2 : O) : 1, kPart = N;
  JAXLLM_UNROLL
  for (int i = 0; i < O; i += P) {
    Value value[P][N];
    Floats part[P][R], scale[P];
    clear(part);
    JAXLLM_UNROLL
    for (int p = 0; p < P; p++) {
      row[i + p].load(c, value[p]);
      if constexpr (kParts) scale[p] = row[i + p].scale(c);
    }
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) JAXLLM_UNROLL
    for (int p = 0; p < P; p++) {
      const auto w = factor<S::kPairs>(value[p][n]);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) add(kParts ? part[p][j] : sum[i + p][j], w, x + j * x_stride + c + n * kColumns);
      if (kParts && (n + 1) % kPart == 0) {
        JAXLLM_UNROLL
        for (int j = 0; j < R; j++) {
          sum[i + p][j] = fma(part[p][j], scale[p], sum[i + p][j]);
          part[p][j] = Floats{};
        }
      }
    }
  }
}

template <class S, int O, int R>
void tile(const S& source, const Weight& w, const X<S>* x, int64_t x_stride, const TileRows& o, int64_t r, float* y) {
  typedef typename S::Row Row;
  Row row[O];
  Floats sum[O][R];
  clear(sum);
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) row[i] = source.row(o[i], i);
  x += r * x_stride;
  const int64_t whole = S::kTail ? w.columns / S::kChunk * S::kChunk : w.columns;
  for (int64_t c = 0; c < whole; c += S::kChunk) {
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++)
      if (!r) row[i].fetch(c);
    JAXLLM_UNROLL
    for (int u = 0; u < S::kChunk; u += S::kUnit) {
      if (S::kEnds && c + u >= whole) break;
      add_unit<S, O, R>(sum, row, c + u, x, x_stride);
    }
  }
  if constexpr (S::kTail) {
    if (whole < w.columns) {
      alignas(64) uint8_t ends[O][S::kChunk * 4] = {};
      for (int i = 0; i < O; i++) row[i].end(whole, w.columns - whole, ends[i]);
      static_assert(S::kChunk == S::kUnit, "");
      add_unit<S, O, R>(sum, row, whole, x, x_stride);
    }
  }
  constexpr bool kShifted = S::kScales == Scales::kShifted;
  JAXLLM_UNROLL
  for (int i = 0; i < O && kShifted; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[i][j] *= 0x1p-24f;
  put(sum, w, o, r, kShifted || S::kScales == Scales::kRow, y);
}

// Distance between rows of a prepared input: not a power of two, or rows of both factors would share a few lines of the
// L1 cache.
inline int64_t stride_of(const Input& in) { return up(in.columns, 128) + 32 * 5; }

template <class S>
void multiply_source(const S& source, const Weight& w, const Input& in, const uint8_t* x, int64_t row_bytes,
                     int64_t begin, int64_t end, float* y) {
  constexpr bool kParts = S::kScales == Scales::kUnit, kSmall = kRegisters < 32;
  constexpr int kMost = !kParts ? (kSmall ? 2 : 4) : (kSmall ? 1 : 2);
  constexpr int kFew = !kParts && kSmall ? 3 : kMost;
  blocks(begin, end, row_bytes, in.rows, [&](int64_t begin, int64_t end) {
    tiles<4, kFew, kMost, S::kMany>(begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
      tile<S, O, R>(source, w, reinterpret_cast<const X<S>*>(x), stride_of(in), o, r, y);
    });
  });
}

// The values of a source's rows from `first` on, decoded to memory: as they are multiplied, in the same order.
template <class S>
struct Expanded {
  typedef decltype(factor<S::kPairs>(typename S::Value{})) Factor;
  static constexpr bool kPairs = S::kPairs, kTail = false, kEnds = S::kEnds, kMany = true;
  static constexpr int kUnit = S::kUnit, kChunk = S::kUnit, kSize = kPairs ? 2 : 4;
  static constexpr Scales kScales = S::kScales;
  struct Choose {
    static auto value() {
      if constexpr (kPairs)
        return Halves{};
      else
        return Floats{};
    }
  };
  typedef decltype(Choose::value()) Value;
  struct Row {
    const uint8_t* at;
    typename S::Row own;
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) const {
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) out[n] = jaxllm::load<Value>(at + c * kSize + n * sizeof(Value));
    }
    JAXLLM_INLINE Floats scale(int64_t c) const { return own.scale(c); }
    void fetch(int64_t) const {}
  };
  const S& source;
  const uint8_t* data;
  int64_t stride, first;

  JAXLLM_INLINE Row row(int64_t o, int i) const { return {data + (o - first) * stride, source.row(o, i)}; }
};

// The same if decoding values is expensive: done once for many rows, unless pairs have scales, which cost more than
// their values.
template <class S>
void multiply_expanded(const S& source, const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end,
                       float* y) {
  if ((S::kPairs && S::kScales == Scales::kUnit) || in.rows <= (S::kScales == Scales::kNone ? 4 : 16))
    return multiply_source(source, w, in, x, w.stride, begin, end, y);
  typedef typename S::Value Value;
  typedef typename Expanded<S>::Factor Factor;
  const int64_t stride = (up(in.columns, 128) + 32 * 3) * Expanded<S>::kSize, most = rows_in_cache(stride);
  uint8_t* values = space<S>(size_t(most) * stride);
  for (int64_t b = begin; b < end; b += most) {
    const int64_t stop = b + most < end ? b + most : end;
    for (int64_t o = b; o < stop; o++) {
      typename S::Row row = source.row(o, 0);
      uint8_t* to = values + (o - b) * stride;
      for (int64_t c = 0; c < w.columns; c += S::kChunk) {
        row.fetch(c);
        for (int u = 0; u < S::kChunk && !(S::kEnds && c + u >= w.columns); u += S::kUnit) {
          Value some[S::kUnit / columns_of<Value>()];
          row.load(c + u, some);
          Factor* at = reinterpret_cast<Factor*>(to + (c + u) * Expanded<S>::kSize);
          for (const Value& value : some) store(at++, factor<S::kPairs>(value));
        }
      }
    }
    multiply_source(Expanded<S>{source, values, stride, b}, w, in, x, 0, b, stop, y);
  }
}

}  // namespace
}  // namespace jaxllm
