// Integers times inputs that keep all their bits: each integer (less its zero point) is exact as a float32 and as a
// bfloat16; a group's products are added up before they are scaled.
#pragma once

#include "rows.h"

namespace jaxllm {
namespace {

// The scales and zero points of a row's groups: the scales as stored, or converted to floats.
struct GroupRow {
  const void* scales;
  const uint8_t* zeros;
};

// How a unit's scales are distributed over lanes, and memory for those of a tile's rows, or of a block's: they are
// converted once for a tile, not once for each register of weights, and four of them can be read at any place. One or
// two input rows need each of them once: sets that spread halves quickly read them as they are stored.
struct Groups {
  const Weight& w;
  int shift;  // log2 of a group's columns
  Spread spread;
  int64_t stride;
  float* memory;
  bool as_stored;

  template <class S = Spread>
  JAXLLM_INLINE Floats scale(GroupRow row, int64_t c) const {
    const S& how = spread;
    if constexpr (S::kHalves)
      if (as_stored) return how.halves(static_cast<const uint16_t*>(row.scales) + (c >> shift));
    return how.floats(static_cast<const float*>(row.scales) + (c >> shift));
  }
  JAXLLM_INLINE Ints zero(GroupRow row, int64_t c) const { return spread.bytes(row.zeros + (c >> shift)); }
  GroupRow row(int64_t o, int i) const {
    const uint8_t* line = static_cast<const uint8_t*>(w.scale) + 2 * o * w.groups;
    for (int64_t i = 0; i < 2 * w.groups && as_stored; i += 64) ahead(line + i, 512);  // some rows ahead
    if (as_stored) return {static_cast<const uint16_t*>(w.scale) + o * w.groups, w.zero + o * w.groups};
    float* to = memory + i * stride;
    scales_of(w, o, 1, to);
    return {to, w.zero + o * w.groups};
  }
};

// Those of units of `kUnit` columns.
inline Groups groups_of(const Weight& w, const Input& in, int columns) {
  const int shift = w.groups <= 1 ? 62 : (w.group == 32 ? 5 : (w.group == 64 ? 6 : 7));
  const int64_t stride = w.groups + 4;
  float* memory = reinterpret_cast<float*>(space<Groups>(kBlockRows * 4 * stride));
  return {w,      shift,  Spread(w.group < columns && w.groups > 1 ? int(columns / w.group) : 1),
          stride, memory, Spread::kHalves && in.rows <= 2 && w.half && w.groups > 1};
}

template <Scales S, int Unit, bool Pairs, bool Blocks = false>
struct Int8 {
  static constexpr bool kPairs = Pairs, kTail = false, kEnds = false;
  static constexpr int kUnit = Unit, kChunk = 64;
  static constexpr Scales kScales = S;
  typedef typename FloatsOrHalves<Pairs>::Type Value;
  struct Row {
    const Int8* of;
    const int8_t* at;
    GroupRow groups;

    JAXLLM_INLINE const int8_t* codes(int64_t c) const { return at + (Blocks ? (c >> 5) * block_bytes(8) + 2 : c); }
    JAXLLM_INLINE void fetch(int64_t c) const {
      const uint8_t* line = reinterpret_cast<const uint8_t*>(codes(c));
      ahead(line, of->distance);
      if (Blocks) ahead(line + 64, of->distance);  // two blocks are more than a line
    }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) const {
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) {
        const int8_t* p = codes(c) + n * columns_of<Value>();
        if constexpr (Pairs)
          out[n] = narrow(from_int8(p), from_int8(p + kLanes));
        else
          out[n] = from_int8(p);
      }
    }
    JAXLLM_INLINE Floats scale(int64_t c) const {
      if constexpr (Blocks)
        return of->groups.spread.template apart<1>(reinterpret_cast<const uint8_t*>(codes(c)) - 2, 0);
      return of->groups.scale(groups, c);
    }
  };
  const Weight& w;
  int64_t distance;
  Groups groups;
  Int8(const Weight& w, const Input& in) : w(w), distance(distance_of(w.stride)), groups(groups_of(w, in, Unit)) {}

  JAXLLM_INLINE Row row(int64_t o, int i) const {
    return {this, reinterpret_cast<const int8_t*>(w.data + o * w.stride),
            S == Scales::kUnit && !Blocks ? groups.row(o, i) : GroupRow{}};
  }
};

template <bool Zero, bool Pairs, bool Blocks = false>
struct Int4 {
  static constexpr bool kPairs = Pairs, kTail = false, kEnds = false;
  static constexpr int kUnit = 2 * kBytes, kChunk = 128;
  static constexpr Scales kScales = Scales::kUnit;
  typedef NibbleValue Value;
  struct Row {
    const Int4* of;
    const uint8_t* at;
    GroupRow groups;

    JAXLLM_INLINE void fetch(int64_t c) const {
      const uint8_t* line = at + (Blocks ? (c >> 5) * block_bytes(4) : c / 2);
      ahead(line, of->distance);
      if (Blocks) ahead(line + 64, of->distance);
    }
    JAXLLM_INLINE Bytes codes(int64_t c) const { return codes_at<4, Blocks>(at, c); }
    // The zero point; 1 where it is not the row's own.
    JAXLLM_INLINE Ints offset(int64_t c) const { return Zero ? of->groups.zero(groups, c) : Ints{} + 1; }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) const {
      Ints zero = {};
      if (Zero) zero = of->groups.zero(groups, c);
      of->nibbles.values(codes(c), zero, out);
    }
    JAXLLM_INLINE Floats scale(int64_t c) const {
      if constexpr (Blocks)
        return of->groups.spread.template apart<kUnit / 32>(at + (c >> 5) * block_bytes(4), block_bytes(4));
      return of->groups.scale(groups, c);
    }
  };
  const Weight& w;
  int64_t distance;
  Groups groups;
  Nibbles<Zero> nibbles;
  Int4(const Weight& w, const Input& in) : w(w), distance(distance_of(w.stride)), groups(groups_of(w, in, kUnit)) {}

  JAXLLM_INLINE Row row(int64_t o, int i) const {
    return {this, w.data + o * w.stride, Blocks ? GroupRow{} : groups.row(o, i)};
  }
};

template <bool Pairs>
void multiply_integers(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (w.kind == Kind::kInt4) {
    if (w.blocks) return multiply_expanded(Int4<false, Pairs, true>(w, in), w, in, x, begin, end, y);
    if (w.zero) return multiply_expanded(Int4<true, Pairs>(w, in), w, in, x, begin, end, y);
    return multiply_expanded(Int4<false, Pairs>(w, in), w, in, x, begin, end, y);
  }
  if (w.groups <= 1) return multiply_expanded(Int8<Scales::kRow, 4 * kLanes, Pairs>(w, in), w, in, x, begin, end, y);
  if (w.group > 32) return multiply_expanded(Int8<Scales::kUnit, 64, Pairs>(w, in), w, in, x, begin, end, y);
  if (w.blocks) return multiply_expanded(Int8<Scales::kUnit, 32, Pairs, true>(w, in), w, in, x, begin, end, y);
  return multiply_expanded(Int8<Scales::kUnit, 32, Pairs>(w, in), w, in, x, begin, end, y);
}

// One output alone: slow, from dequantized weights.
inline float product(const Weight& w, const Input& in, int64_t o, int64_t r) {
  double sum = 0;
  for (int64_t from = 0; from < in.columns; from += kPart) {
    const int64_t count = in.columns - from < kPart ? in.columns - from : kPart;
    float part[kPart];
    row_part(w, o, from, count, part);
    for (int64_t i = 0; i < count; i++)
      sum += double(part[i]) * element(in.bf16 ? Kind::kBF16 : Kind::kF32, in.x, r * in.columns + from + i);
  }
  return float(sum);
}

// Sums that are scaled after adding overflow if inputs are huge: an output that is not finite is
// computed again, from weights that are scaled first.
inline void mend(const Weight& w, const Input& in, int64_t begin, int64_t end, float* y) {
  for (int64_t r = 0; r < in.rows; r++)
    for (int64_t first = begin; first < end; first += kLanes) {
      const int64_t last = first + kLanes < end ? first + kLanes : end;
      float* out = y + r * w.rows;
      if (last - first == kLanes && !any_of(Bits(magnitude(load<Floats>(out + first)) < HUGE_VALF) ^ ~0u)) continue;
      for (int64_t o = first; o < last; o++)
        if (!__builtin_isfinite(out[o])) out[o] = product(w, in, o, r);
    }
}

}  // namespace
}  // namespace jaxllm
