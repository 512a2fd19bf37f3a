// Sparse weights: for each row a bit per column, and its nonzero numbers in the order of columns
// (weights/types/sparse.py). Tables map bits to the position of each number, or to zero.
//
// Inputs are floats in any set: products of bfloat16 pairs would use the same execution ports as assembling registers.
#pragma once

#include "floats.h"
#include "rounded.h"
#include "rows.h"

namespace jaxllm {
namespace {

// Tables for sixteen bytes of 32-bit and of 16-bit numbers, and for eight bytes, indexed by the columns' bits: the
// source byte, among the stored numbers, of each byte; 128 for zero.
struct Places {
  uint8_t words[16][16], halves[256][16], bytes[256][8];
};

constexpr Places all_places() {
  Places places = {};
  for (int bits = 0; bits < 256; bits++) {
    int number = 0;
    for (int i = 0; i < 8; i++) {
      const bool there = bits >> i & 1;
      for (int b = 0; b < 2; b++) places.halves[bits][2 * i + b] = uint8_t(there ? 2 * number + b : 128);
      for (int b = 0; b < 4 && bits < 16 && i < 4; b++)
        places.words[bits][4 * i + b] = uint8_t(there ? 4 * number + b : 128);
      places.bytes[bits][i] = uint8_t(there ? number : 128);
      number += there;
    }
  }
  return places;
}

alignas(64) constexpr Places kPlaces = all_places();

// The same for eight lanes, whose highest bytes are numbers of Size bytes: the upper half of a float, or an integer
// times 2^24, which needs no sign extension. The second table, for the upper half of large registers, is of numbers
// that follow four others.
template <int Size>
struct LanePlaces {
  uint8_t of[kLanes == 16 ? 2 : 1][256][32];
};

template <int Size>
constexpr LanePlaces<Size> lane_places() {
  LanePlaces<Size> places = {};
  for (auto& table : places.of)
    for (int bits = 0; bits < 256; bits++) {
      int number = &table == places.of ? 0 : 4;
      for (int i = 0; i < 8; number += bits >> i++ & 1)
        for (int b = 0; b < 4; b++) {
          const bool there = (bits >> i & 1) && b >= 4 - Size;
          table[bits][4 * i + b] = uint8_t(there ? Size * (number + 1) + b - 4 : 128);
        }
    }
  return places;
}

template <int Size>
alignas(64) constexpr LanePlaces<Size> kLanePlaces = lane_places<Size>();

// Whether a register of 16-bit numbers is expanded in the order of lanes, not of their halves.
#ifdef JAXLLM_SPREADS_HALVES
constexpr bool kInOrder = false;
#else
constexpr bool kInOrder = true;
#endif

typedef uint64_t Eights __attribute__((vector_size(16)));

// Bits of a register's columns.
template <class T>
struct BitsOf {
  typedef uint64_t Type;
};
template <>
struct BitsOf<uint16_t> {
  typedef uint32_t Type;
};
template <>
struct BitsOf<uint32_t> {
  typedef uint16_t Type;
};

// The numbers of a row; T has as many bits. TwoOfFour: two of each four columns are stored; otherwise as many as bits
// are set, and registers are read in order. Spread: by the processor's own instruction.
template <class T, bool TwoOfFour, bool Spread>
struct Numbers {
  const uint8_t* mask;
  const T *at, *last;  // beyond which no register may begin

  // A register of columns, from c on.
  JAXLLM_INLINE Bytes next(int64_t c) {
    if (!TwoOfFour) at = at < last ? at : last;
#ifdef JAXLLM_SPREADS
    if constexpr (Spread) {
      const auto bits = load<typename BitsOf<T>::Type>(mask + c / 8);
      const Bytes all = spread(TwoOfFour ? at + c / 2 : at, TwoOfFour, bits);
      if (!TwoOfFour) at += __builtin_popcountll(bits);
      return all;
    }
#endif
#ifdef JAXLLM_TWO_OF_FOUR
    if constexpr (TwoOfFour && sizeof(T) == 1) return two_of_four(mask + c / 8, at + c / 2);
#endif
    constexpr int kParts = kBytes / 16, kColumns = 16 / sizeof(T);
    Sixteen place[kParts], number[kParts];
    JAXLLM_UNROLL
    for (int i = 0; i < kParts; i++) {
      const int64_t column = c + i * kColumns;
      unsigned bits = mask[column / 8], more = 0;
      if constexpr (sizeof(T) == 4) bits = bits >> (column & 4) & 15;
      if constexpr (sizeof(T) == 1) more = mask[column / 8 + 1];
      const int count = TwoOfFour ? 0 : __builtin_popcount(bits);
      if constexpr (sizeof(T) == 4)
        place[i] = load<Sixteen>(kPlaces.words[bits]);
      else if constexpr (sizeof(T) == 2)
        place[i] = load<Sixteen>(kPlaces.halves[bits]);
      else
        place[i] = Sixteen(Eights{load<uint64_t>(kPlaces.bytes[bits]), load<uint64_t>(kPlaces.bytes[more])}) +
                   Sixteen(Eights{0, (TwoOfFour ? 4 : 8) * 0x0101010101010101u});
      if constexpr (!TwoOfFour) {
        if constexpr (sizeof(T) == 1)
          number[i] = Sixteen(Eights{load<uint64_t>(at), load<uint64_t>(at + count)});
        else
          number[i] = load<Sixteen>(at);
        at += count + __builtin_popcount(more);
      }
    }
    if constexpr (TwoOfFour)
      return picked(eights(at + c / 2), joined(place));
    else
      return picked(joined(number), joined(place));
  }
};

template <class T, bool TwoOfFour, bool Spread>
JAXLLM_INLINE Numbers<T, TwoOfFour, Spread> numbers_of(const Weight& w, int64_t o) {
  const T* values = reinterpret_cast<const T*>(w.data);
  const uint8_t* mask = w.mask + o * w.mask_stride;
  if (TwoOfFour) return {mask, reinterpret_cast<const T*>(w.data + o * w.stride), nullptr};
  const int64_t last = w.values - kSpare, begin = w.begin[o];
  return {mask, values + (begin < 0 ? 0 : (begin < last ? begin : last)), values + last};
}

// call(T(), TwoOfFour, Spread) for a kind.
template <class Call>
void by_kind(const Weight& w, const Call& call) {
  const auto spread = [&](auto number, auto two_of_four) {
#ifdef JAXLLM_SPREADS
    if (spreads(sizeof number)) return call(number, two_of_four, Int<1>());
    if (sizeof number == 4) return;
#endif
    call(number, two_of_four, Int<0>());
  };
  switch (w.kind) {
    case Kind::kSparse24F32: return spread(uint32_t(), Int<1>());
    case Kind::kSparse24BF16: return spread(uint16_t(), Int<1>());
    case Kind::kSparse24Int8: return spread(uint8_t(), Int<1>());
    case Kind::kBitmapF32: return spread(uint32_t(), Int<0>());
    case Kind::kBitmapBF16: return spread(uint16_t(), Int<0>());
    default: return spread(uint8_t(), Int<0>());
  }
}

// Prefetches what a later row has in place of these numbers of columns c to c + 127, and of these bits.
template <class T>
JAXLLM_INLINE void fetch_numbers(const T* at, const uint8_t* mask, int64_t c, int64_t distance) {
  for (size_t line = 0; line < 64 * sizeof *at; line += 64)
    ahead(reinterpret_cast<const uint8_t*>(at) + line, distance);
  if (!(c & 511)) ahead(mask, distance_of(1));
}

// A decoded row, with its zeros, padded to 128 columns.
inline void write_row(const Weight& w, int64_t o, uint8_t* to) {
  by_kind(w, [&](auto number, auto two_of_four, auto spread) {
    typedef decltype(number) T;
    auto row = numbers_of<T, two_of_four, spread>(w, o);
    for (int64_t c = 0; c < w.columns; c += 128) {
      fetch_numbers(row.at + (two_of_four ? c / 2 : 0), row.mask + c / 8, c, distance_of(w.stride));
      JAXLLM_UNROLL
      for (int i = 0; i < 128; i += int(kBytes / sizeof(T))) store(to + (c + i) * sizeof(T), row.next(c + i));
    }
  });
}

// dense(rows, o, count) for `most` decoded rows at a time: weights whose row 0 is row o of these.
template <class Dense>
void by_blocks(const Weight& w, int64_t begin, int64_t end, int64_t most, const Dense& dense) {
  Weight rows = {};
  rows.kind = dense_of(w.kind);
  rows.rows = w.rows;  // the distance of outputs
  rows.columns = w.columns;
  rows.stride = up(w.columns, 128) * number_bytes(rows.kind) + 64 * 3;
  rows.group = w.group;
  rows.groups = w.groups;
  uint8_t* memory = space<Dense>(most * rows.stride);
  rows.data = memory;
  for (int64_t o = begin; o < end; o += most) {
    const int64_t count = end - o < most ? end - o : most;
    for (int64_t i = 0; i < count; i++) write_row(w, o + i, memory + i * rows.stride);
    if (w.scale) rows.scale = static_cast<const float*>(w.scale) + o;
    dense(rows, o, count);
  }
}

// A source (product.h). Each byte of bits selects eight floats, in the order of columns, which are read on from where
// it was, so that addresses within a chunk are constants; or bits select a register of numbers, in the dense weights'
// order.
template <class T, bool TwoOfFour, bool Spread>
struct Sparse {
  static constexpr bool kInteger = sizeof(T) == 1, kEights = kInteger ? !Spread : sizeof(T) == 2 && kInOrder;
  static constexpr bool kPairs = false, kTail = false, kEnds = !kEights;
  static constexpr int kUnit = kEights ? 16 : (kInteger ? kBytes : 64), kChunk = 128;
  static constexpr Scales kScales = !kInteger ? Scales::kNone : (kEights ? Scales::kShifted : Scales::kRow);
  typedef typename FloatsOrHalves<sizeof(T) == 2 && !kEights>::Type Value;
  struct Row {
    Numbers<T, TwoOfFour, Spread> numbers;
    int64_t distance;

    JAXLLM_INLINE void fetch(int64_t c) const {
      fetch_numbers(numbers.at + (TwoOfFour && !kEights ? c / 2 : 0), numbers.mask + (kEights ? 0 : c / 8), c,
                    distance);
    }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) {
      if constexpr (kEights) {
        const uint8_t *from[2], *place[2];
        if (!TwoOfFour && !(c & 63)) numbers.at = numbers.at < numbers.last ? numbers.at : numbers.last;
        const unsigned both = jaxllm::load<uint16_t>(numbers.mask);
        JAXLLM_UNROLL
        for (int i = 0; i < 2; i++) {  // bitmaps need each byte twice: loading it again is cheaper than two shifts
          const unsigned bits = TwoOfFour ? (i ? both >> 8 : both & 255) : numbers.mask[i];
          place[i] = kLanePlaces<sizeof(T)>.of[TwoOfFour && kLanes == 16 ? i : 0][bits];
          from[i] = reinterpret_cast<const uint8_t*>(numbers.at);
          numbers.at += TwoOfFour ? 4 : __builtin_popcount(bits);
        }
        numbers.mask += 2;
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++) {  // integers stay 2^24 times as large
          const Bytes lanes = expanded < sizeof(T), TwoOfFour ? 4 : 8 > (from, place, n);
          out[n] = kInteger ? to_floats(Ints(lanes)) : Floats(lanes);
        }
      } else if constexpr (kInteger) {
        alignas(64) int8_t q[kBytes];
        store(q, numbers.next(c));
        asm("" : "+m"(q));  // read its parts from memory: splitting registers costs as much as joining them
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++) out[n] = from_int8(q + n * kLanes);
      } else {
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++) out[n] = Value(numbers.next(c + n * columns_of<Value>()));
      }
    }
    JAXLLM_INLINE Floats scale(int64_t) const { return Floats{}; }
  };
  const Weight& w;
  int64_t distance;
  explicit Sparse(const Weight& w) : w(w), distance(distance_of(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const { return {numbers_of<T, TwoOfFour, Spread>(w, o), distance}; }
};

template <class T, bool TwoOfFour, bool Spread>
constexpr bool kReadsOn<Sparse<T, TwoOfFour, Spread>> = true;

inline void multiply_sparse(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (rounded(w, in)) {
    const int64_t most = in.rows > 1 ? rows_in_cache(2 * w.columns) : 4;
    return by_blocks(w, begin, end, most, [&](const Weight& rows, int64_t o, int64_t count) {
      multiply_rounded(rows, in, x, 0, count, y + o);
    });
  }
  by_kind(w, [&](auto number, auto two_of_four, auto spread) {
    const int few = kRegisters < 32 || sizeof number == 1 ? 4 : 8;
    multiply_expanded(Sparse<decltype(number), two_of_four, spread>(w), w, in, x, begin, end, y, few);
  });
  if (!integers(w)) return;
  for (int64_t o = begin; o < end; o++) {  // as for dense ones
    bool finite = true;
    for (int64_t r = 0; r < in.rows; r++) finite = finite && __builtin_isfinite(y[r * w.rows + o]);
    if (!finite) by_blocks(w, o, o + 1, 1, [&](const Weight& row, int64_t, int64_t) { mend(row, in, 0, 1, y + o); });
  }
}

}  // namespace
}  // namespace jaxllm
