// Integer weights times unrounded inputs: integers (less their zero point) are exact in float32 and bfloat16; the sum
// of a group is scaled. With AVX-512 int8 weights are scaled before float32 products, so that all sums of many input
// rows fit the registers; a float16 scale times an int8 is exact. Narrower sets would read a single row slower.
#pragma once

#include "dequantize.h"

namespace jaxllm {
namespace {

// A row's scales, as stored or converted to floats, and zero points.
struct GroupRow {
  const void* scales;
  const uint8_t* zeros;
};

// Broadcasts a unit's scales over lanes. The scales of a tile's rows are first converted to floats in scratch memory,
// once instead of once for each register of weights. For one or two input rows, which need each scale once, sets that
// convert and broadcast halves quickly read them as stored. Exponents are always read so.
struct Groups {
  const Weight& w;
  int shift;  // log2 of a group's columns
  Broadcast broadcast;
  int64_t stride;
  float* memory;
  bool as_stored;

  template <class S = Broadcast>
  JAXLLM_INLINE Floats scale(GroupRow row, int64_t c) const {
    const S& lanes = broadcast;
    if constexpr (S::kHalves)
      if (as_stored) return lanes.halves(static_cast<const uint16_t*>(row.scales) + (c >> shift));
    return lanes.floats(static_cast<const float*>(row.scales) + (c >> shift));
  }
  JAXLLM_INLINE Floats power(GroupRow row, int64_t c) const {
    return from_exponents(broadcast.bytes(static_cast<const uint8_t*>(row.scales) + (c >> shift)));
  }
  JAXLLM_INLINE Ints zero(GroupRow row, int64_t c) const { return broadcast.bytes(row.zeros + (c >> shift)); }
  GroupRow row(int64_t o, int i) const {
    const uint8_t* line = static_cast<const uint8_t*>(w.scale) + (w.e2m1 ? 1 : 2) * o * w.groups;
    if (w.e2m1) return {line, nullptr};
    for (int64_t i = 0; i < 2 * w.groups && as_stored; i += 64) prefetch_line(line + i, 512);  // some rows ahead
    if (as_stored) return {static_cast<const uint16_t*>(w.scale) + o * w.groups, w.zero + o * w.groups};
    float* to = memory + i * stride;
    load_scales(w, o, 1, to);
    return {to, w.zero + o * w.groups};
  }
};

// For units of this many columns.
inline Groups make_groups(const Weight& w, const Input& in, int columns) {
  const int shift = w.groups <= 1 ? 62 : (w.group == 32 ? 5 : (w.group == 64 ? 6 : 7));
  const int64_t stride = w.groups + 4;
  float* memory = reinterpret_cast<float*>(thread_scratch<Groups>(kBlockRows * 4 * stride));
  return {w,      shift,  Broadcast(w.group < columns && w.groups > 1 ? int(columns / w.group) : 1),
          stride, memory, Broadcast::kHalves && in.rows <= 2 && w.half && w.groups > 1};
}

template <Scales S, int Unit, bool Pairs, bool Blocks = false>
struct Int8Source {
  static constexpr bool kPairs = Pairs, kPartialChunk = false, kPartialUnits = false;
  static constexpr int kUnit = Unit, kChunk = 64;
  static constexpr bool kScaled = S == Scales::kUnit && !Pairs && kLanes == 16;
  static constexpr Scales kScales = kScaled ? Scales::kNone : S;
  // With sums in memory, 32 columns would be stored and scaled as often as they are multiplied.
  static constexpr bool kFewRows = S == Scales::kRow || Unit > 32 || kRegisters < 32;
  static constexpr int64_t kMaxSourceRows = kScaled ? 8 : (kFewRows ? 16 : INT64_MAX);
  typedef typename FloatsOrHalves<Pairs>::Type Value;
  struct Row {
    const Int8Source* source;
    const int8_t* at;
    GroupRow groups;

    JAXLLM_INLINE const int8_t* codes(int64_t c) const { return at + (Blocks ? (c >> 5) * block_bytes(8) + 2 : c); }
    JAXLLM_INLINE void fetch(int64_t c) const {
      const uint8_t* line = reinterpret_cast<const uint8_t*>(codes(c));
      prefetch_line(line, source->distance);
      if (Blocks) prefetch_line(line + 64, source->distance);  // two blocks are more than a line
    }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) const {
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) {
        const int8_t* p = codes(c) + n * lane_count<Value>();
        if constexpr (Pairs)
          out[n] = narrow(from_int8(p), from_int8(p + kLanes));
        else
          out[n] = from_int8(p);
      }
      if constexpr (kScaled) {
        const Floats by = scale(c);
        JAXLLM_UNROLL
        for (Value& value : out) value *= by;
      }
    }
    JAXLLM_INLINE Floats scale(int64_t c) const {
      if constexpr (Blocks)
        return source->groups.broadcast.template strided<1>(reinterpret_cast<const uint8_t*>(codes(c)) - 2, 0);
      return source->groups.scale(groups, c);
    }
  };
  const Weight& w;
  int64_t distance;
  Groups groups;
  Int8Source(const Weight& w, const Input& in)
      : w(w), distance(prefetch_distance(w.stride)), groups(make_groups(w, in, Unit)) {}

  JAXLLM_INLINE Row row(int64_t o, int i) const {
    return {this, reinterpret_cast<const int8_t*>(w.data + o * w.stride),
            S == Scales::kUnit && !Blocks ? groups.row(o, i) : GroupRow{}};
  }
};

template <Scales S, int Unit, bool Blocks>
constexpr int kTileRows8<Int8Source<S, Unit, false, Blocks>> = Int8Source<S, Unit, false, Blocks>::kScaled ? 2 : 0;

template <bool Zero, bool Pairs, bool Blocks = false, bool E2M1 = false>
struct Int4Source {
  static constexpr bool kPairs = Pairs, kPartialChunk = false, kPartialUnits = false;
  static constexpr int kUnit = 2 * kBytes, kChunk = 128;
  static constexpr Scales kScales = Scales::kUnit;
  typedef NibbleValue Value;
  struct Row {
    const Int4Source* source;
    const uint8_t* at;
    GroupRow groups;

    JAXLLM_INLINE void fetch(int64_t c) const {
      const uint8_t* line = at + (Blocks ? (c >> 5) * block_bytes(4) : c / 2);
      prefetch_line(line, source->distance);
      if (Blocks) prefetch_line(line + 64, source->distance);
    }
    JAXLLM_INLINE Bytes codes(int64_t c) const { return load_codes<4, Blocks>(at, c); }
    // The zero point; 1 if the weight has none.
    JAXLLM_INLINE Ints offset(int64_t c) const { return Zero ? source->groups.zero(groups, c) : Ints{} + 1; }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) const {
      Ints zero = {};
      if (Zero) zero = source->groups.zero(groups, c);
      source->nibbles.values(codes(c), zero, out);
    }
    JAXLLM_INLINE Floats scale(int64_t c) const {
      if constexpr (Blocks)
        return source->groups.broadcast.template strided<kUnit / 32>(at + (c >> 5) * block_bytes(4), block_bytes(4));
      if constexpr (E2M1) return source->groups.power(groups, c);
      return source->groups.scale(groups, c);
    }
  };
  const Weight& w;
  int64_t distance;
  Groups groups;
  Nibbles<Zero, E2M1> nibbles;
  Int4Source(const Weight& w, const Input& in)
      : w(w), distance(prefetch_distance(w.stride)), groups(make_groups(w, in, kUnit)) {}

  JAXLLM_INLINE Row row(int64_t o, int i) const {
    return {this, w.data + o * w.stride, Blocks ? GroupRow{} : groups.row(o, i)};
  }
};

template <bool Pairs>
void multiply_integers(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (w.kind == Kind::kInt4) {
    if (w.blocks) return multiply_decoded(Int4Source<false, Pairs, true>(w, in), w, in, x, begin, end, y);
    if (w.e2m1) return multiply_decoded(Int4Source<false, Pairs, false, true>(w, in), w, in, x, begin, end, y);
    if (w.zero) return multiply_decoded(Int4Source<true, Pairs>(w, in), w, in, x, begin, end, y);
    return multiply_decoded(Int4Source<false, Pairs>(w, in), w, in, x, begin, end, y);
  }
  const auto multiply = [&](const auto& source) {
    multiply_decoded(source, w, in, x, begin, end, y, source.kMaxSourceRows);
  };
  if (w.groups <= 1)
    multiply(Int8Source<Scales::kRow, 4 * kLanes, Pairs>(w, in));
  else if (w.group > 32)
    multiply(Int8Source<Scales::kUnit, 64, Pairs>(w, in));
  else if (w.blocks)
    multiply(Int8Source<Scales::kUnit, 32, Pairs, true>(w, in));
  else
    multiply(Int8Source<Scales::kUnit, 32, Pairs>(w, in));
}

// One output, in float64 from dequantized weights (slow).
inline float dot_product(const Weight& w, const Input& in, int64_t o, int64_t r) {
  double sum = 0;
  for (int64_t first = 0; first < in.columns; first += kRowChunk) {
    const int64_t count = in.columns - first < kRowChunk ? in.columns - first : kRowChunk;
    float part[kRowChunk];
    dequantize_columns(w, o, first, count, part);
    for (int64_t i = 0; i < count; i++)
      sum += double(part[i]) * element(in.bf16 ? Kind::kBF16 : Kind::kF32, in.x, r * in.columns + first + i);
  }
  return float(sum);
}

// Unscaled sums overflow if inputs are huge: recomputes outputs that are not finite from dequantized weights.
inline void recompute_overflowed(const Weight& w, const Input& in, int64_t begin, int64_t end, float* y) {
  for (int64_t r = 0; r < in.rows; r++)
    for (int64_t lane = begin; lane < end; lane += kLanes) {
      const int64_t last = lane + kLanes < end ? lane + kLanes : end;
      float* out = y + r * w.rows;
      if (last - lane == kLanes && !any_of(Bits(magnitude(load<Floats>(out + lane)) < HUGE_VALF) ^ ~0u)) continue;
      for (int64_t o = lane; o < last; o++)
        if (!__builtin_isfinite(out[o])) out[o] = dot_product(w, in, o, r);
    }
}

}  // namespace
}  // namespace jaxllm
