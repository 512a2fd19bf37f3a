// Sparse weights: per row a bit for each column and the nonzero numbers in column order. Byte
// shuffles by tables, indexed by the bits, expand them.
//
// Inputs are always floats: dot products of bfloat16 pairs compete with shuffles for execution ports.
#pragma once

#include "dequantize.h"
#include "floats.h"
#include "int8_dynamic.h"

namespace jaxllm {
namespace {

// Shuffle indices for 16 bytes of 32-bit and of 16-bit numbers, and for 8 bytes; 128 gives 0.
struct ShuffleTables {
  uint8_t words[16][16], halves[256][16], bytes[256][8];
};

constexpr ShuffleTables make_shuffle_tables() {
  ShuffleTables tables = {};
  for (int bits = 0; bits < 256; bits++) {
    int number = 0;
    for (int i = 0; i < 8; i++) {
      const bool is_set = bits >> i & 1;
      for (int b = 0; b < 2; b++) tables.halves[bits][2 * i + b] = uint8_t(is_set ? 2 * number + b : 128);
      for (int b = 0; b < 4 && bits < 16 && i < 4; b++)
        tables.words[bits][4 * i + b] = uint8_t(is_set ? 4 * number + b : 128);
      tables.bytes[bits][i] = uint8_t(is_set ? number : 128);
      number += is_set;
    }
  }
  return tables;
}

alignas(64) constexpr ShuffleTables kShuffleTables = make_shuffle_tables();

// The same for eight lanes whose upper bytes are numbers of Size bytes: the upper half of a float, or an integer times
// 2^24, which needs no sign extension. The second table, for the upper half of large registers, starts at number 4.
template <int Size>
struct LaneShuffles {
  uint8_t table[kLanes == 16 ? 2 : 1][256][32];
};

template <int Size>
constexpr LaneShuffles<Size> make_lane_shuffles() {
  LaneShuffles<Size> tables = {};
  for (auto& table : tables.table)
    for (int bits = 0; bits < 256; bits++) {
      int number = &table == tables.table ? 0 : 4;
      for (int i = 0; i < 8; number += bits >> i++ & 1)
        for (int b = 0; b < 4; b++) {
          const bool is_set = (bits >> i & 1) && b >= 4 - Size;
          table[bits][4 * i + b] = uint8_t(is_set ? Size * (number + 1) + b - 4 : 128);
        }
    }
  return tables;
}

template <int Size>
alignas(64) constexpr LaneShuffles<Size> kLaneShuffles = make_lane_shuffles<Size>();

// Whether 16-bit numbers are expanded one per lane, not two.
#ifdef JAXLLM_EXPAND_HALVES
constexpr bool kInOrder = false;
#else
constexpr bool kInOrder = true;
#endif

// The mask of a register's columns.
template <class T>
struct MaskOf {
  typedef uint64_t Type;
};
template <>
struct MaskOf<uint16_t> {
  typedef uint32_t Type;
};
template <>
struct MaskOf<uint32_t> {
  typedef uint16_t Type;
};

// Reads a row's numbers, of T's size. TwoOfFour: two of each four columns are stored; otherwise one for each set bit,
// and registers must be read in order. Expand: by the processor's expand instruction.
template <class T, bool TwoOfFour, bool Expand>
struct SparseReader {
  const uint8_t* mask;
  const T *at, *last;  // beyond which no register may begin

  // The register of columns from c on.
  JAXLLM_INLINE Bytes next(int64_t c) {
    if (!TwoOfFour) at = at < last ? at : last;
#ifdef JAXLLM_EXPAND
    if constexpr (Expand) {
      const auto bits = load<typename MaskOf<T>::Type>(mask + c / 8);
      const Bytes expanded = expand(TwoOfFour ? at + c / 2 : at, TwoOfFour, bits);
      if (!TwoOfFour) at += __builtin_popcountll(bits);
      return expanded;
    }
#endif
#ifdef JAXLLM_TWO_OF_FOUR
    if constexpr (TwoOfFour && sizeof(T) == 1) return two_of_four(mask + c / 8, at + c / 2);
#endif
    constexpr int kParts = kBytes / 16, kColumns = 16 / sizeof(T);
    Bytes16 index[kParts], number[kParts];
    JAXLLM_UNROLL
    for (int i = 0; i < kParts; i++) {
      const int64_t column = c + i * kColumns;
      unsigned bits = mask[column / 8], next_bits = 0;
      if constexpr (sizeof(T) == 4) bits = bits >> (column & 4) & 15;
      if constexpr (sizeof(T) == 1) next_bits = mask[column / 8 + 1];
      const int count = TwoOfFour ? 0 : __builtin_popcount(bits);
      if constexpr (sizeof(T) == 4)
        index[i] = load<Bytes16>(kShuffleTables.words[bits]);
      else if constexpr (sizeof(T) == 2)
        index[i] = load<Bytes16>(kShuffleTables.halves[bits]);
      else
        index[i] = Bytes16(U64x2{load<uint64_t>(kShuffleTables.bytes[bits]),
                                 load<uint64_t>(kShuffleTables.bytes[next_bits])}) +
                   Bytes16(U64x2{0, (TwoOfFour ? 4 : 8) * 0x0101010101010101u});
      if constexpr (!TwoOfFour) {
        if constexpr (sizeof(T) == 1)
          number[i] = Bytes16(U64x2{load<uint64_t>(at), load<uint64_t>(at + count)});
        else
          number[i] = load<Bytes16>(at);
        at += count + __builtin_popcount(next_bits);
      }
    }
    if constexpr (TwoOfFour)
      return shuffle_bytes(load_8_per_16(at + c / 2), concat(index));
    else
      return shuffle_bytes(concat(number), concat(index));
  }
};

template <class T, bool TwoOfFour, bool Expand>
JAXLLM_INLINE SparseReader<T, TwoOfFour, Expand> sparse_reader(const Weight& w, int64_t o) {
  const T* values = reinterpret_cast<const T*>(w.data);
  const uint8_t* mask = w.mask + o * w.mask_stride;
  if (TwoOfFour) return {mask, reinterpret_cast<const T*>(w.data + o * w.stride), nullptr};
  const int64_t last = w.values - kBitmapPadding, begin = w.begin[o];
  return {mask, values + (begin < 0 ? 0 : (begin < last ? begin : last)), values + last};
}

// Calls call(T(), TwoOfFour, Expand) for a kind.
template <class Call>
void dispatch_kind(const Weight& w, const Call& call) {
  const auto dispatch = [&](auto number, auto two_of_four) {
#ifdef JAXLLM_EXPAND
    if (has_expand(sizeof number)) return call(number, two_of_four, Int<1>());
    if (sizeof number == 4) return;
#endif
    call(number, two_of_four, Int<0>());
  };
  switch (w.kind) {
    case Kind::kSparse24F32: return dispatch(uint32_t(), Int<1>());
    case Kind::kSparse24BF16: return dispatch(uint16_t(), Int<1>());
    case Kind::kSparse24Int8: return dispatch(uint8_t(), Int<1>());
    case Kind::kBitmapF32: return dispatch(uint32_t(), Int<0>());
    case Kind::kBitmapBF16: return dispatch(uint16_t(), Int<0>());
    default: return dispatch(uint8_t(), Int<0>());
  }
}

// Prefetches the numbers and mask of 128 columns of a later row.
template <class T>
JAXLLM_INLINE void fetch_numbers(const T* at, const uint8_t* mask, int64_t c, int64_t distance) {
  for (size_t line = 0; line < 64 * sizeof *at; line += 64)
    prefetch_line(reinterpret_cast<const uint8_t*>(at) + line, distance);
  if (!(c & 511)) prefetch_line(mask, prefetch_distance(1));
}

// Decodes a row, with its zeros, padded to 128 columns.
inline void decode_row(const Weight& w, int64_t o, uint8_t* to) {
  dispatch_kind(w, [&](auto number, auto two_of_four, auto expand) {
    typedef decltype(number) T;
    auto row = sparse_reader<T, two_of_four, expand>(w, o);
    for (int64_t c = 0; c < w.columns; c += 128) {
      fetch_numbers(row.at + (two_of_four ? c / 2 : 0), row.mask + c / 8, c, prefetch_distance(w.stride));
      JAXLLM_UNROLL
      for (int i = 0; i < 128; i += int(kBytes / sizeof(T))) store(to + (c + i) * sizeof(T), row.next(c + i));
    }
  });
}

// Calls run(rows, o, count) for up to max_rows decoded rows at a time; row 0 of `rows` is row o of w.
template <class Run>
void for_each_decoded(const Weight& w, int64_t begin, int64_t end, int64_t max_rows, const Run& run) {
  Weight rows = {};
  rows.kind = dense_kind(w.kind);
  rows.rows = w.rows;  // the distance of outputs
  rows.columns = w.columns;
  rows.stride = round_up(w.columns, 128) * number_bytes(rows.kind) + 64 * 3;
  rows.group = w.group;
  rows.groups = w.groups;
  uint8_t* memory = thread_scratch<Run>(max_rows * rows.stride);
  rows.data = memory;
  for (int64_t o = begin; o < end; o += max_rows) {
    const int64_t count = end - o < max_rows ? end - o : max_rows;
    for (int64_t i = 0; i < count; i++) decode_row(w, o + i, memory + i * rows.stride);
    if (w.scale) rows.scale = static_cast<const float*>(w.scale) + o;
    run(rows, o, count);
  }
}

// A source (matmul.h). By bytes of the mask, each of which gives eight floats in column order, read sequentially so
// that addresses within a chunk are constants; or by registers of numbers, in the order of dense weights.
template <class T, bool TwoOfFour, bool Expand>
struct SparseSource {
  static constexpr bool kInteger = sizeof(T) == 1, kByBytes = kInteger ? !Expand : sizeof(T) == 2 && kInOrder;
  static constexpr bool kPairs = false, kPartialChunk = false, kPartialUnits = !kByBytes;
  static constexpr int kUnit = kByBytes ? 16 : (kInteger ? kBytes : 64), kChunk = 128;
  static constexpr Scales kScales = !kInteger ? Scales::kNone : (kByBytes ? Scales::kShifted : Scales::kRow);
  typedef typename FloatsOrHalves<sizeof(T) == 2 && !kByBytes>::Type Value;
  struct Row {
    SparseReader<T, TwoOfFour, Expand> reader;
    int64_t distance;

    JAXLLM_INLINE void fetch(int64_t c) const {
      fetch_numbers(reader.at + (TwoOfFour && !kByBytes ? c / 2 : 0), reader.mask + (kByBytes ? 0 : c / 8), c,
                    distance);
    }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) {
      if constexpr (kByBytes) {
        constexpr int kCount = TwoOfFour ? 4 : 8;
        const uint8_t *from[2], *index[2];
        if (!TwoOfFour && !(c & 63)) reader.at = reader.at < reader.last ? reader.at : reader.last;
        const unsigned two_bytes = jaxllm::load<uint16_t>(reader.mask);
        JAXLLM_UNROLL
        for (int i = 0; i < 2; i++) {  // bitmaps need each byte twice: loading it again is cheaper than two shifts
          const unsigned bits = TwoOfFour ? (i ? two_bytes >> 8 : two_bytes & 255) : reader.mask[i];
          index[i] = kLaneShuffles<sizeof(T)>.table[TwoOfFour && kLanes == 16 ? i : 0][bits];
          from[i] = reinterpret_cast<const uint8_t*>(reader.at);
          reader.at += TwoOfFour ? 4 : __builtin_popcount(bits);
        }
        reader.mask += 2;
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++) {  // integers stay 2^24 times as large
          const Bytes lanes = shuffle_lanes<sizeof(T), kCount>(from, index, n);
          out[n] = kInteger ? to_floats(Ints(lanes)) : Floats(lanes);
        }
      } else if constexpr (kInteger) {
        alignas(64) int8_t q[kBytes];
        store(q, reader.next(c));
        asm("" : "+m"(q));  // read its parts from memory: splitting registers costs as much as joining them
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++) out[n] = from_int8(q + n * kLanes);
      } else {
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++) out[n] = Value(reader.next(c + n * lane_count<Value>()));
      }
    }
    JAXLLM_INLINE Floats scale(int64_t) const { return Floats{}; }
  };
  const Weight& w;
  int64_t distance;
  explicit SparseSource(const Weight& w) : w(w), distance(prefetch_distance(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const { return {sparse_reader<T, TwoOfFour, Expand>(w, o), distance}; }
};

template <class T, bool TwoOfFour, bool Expand>
constexpr bool kSequential<SparseSource<T, TwoOfFour, Expand>> = true;

inline void multiply_sparse(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (uses_int8_input(w, in)) {
    const int64_t max_rows = in.rows > 1 ? rows_in_cache(2 * w.columns) : 4;
    return for_each_decoded(w, begin, end, max_rows, [&](const Weight& rows, int64_t o, int64_t count) {
      multiply_int8(rows, in, x, 0, count, y + o);
    });
  }
  dispatch_kind(w, [&](auto number, auto two_of_four, auto expand) {
    const int max_source_rows = kRegisters < 32 || sizeof number == 1 ? 4 : 8;
    multiply_decoded(SparseSource<decltype(number), two_of_four, expand>(w), w, in, x, begin, end, y, max_source_rows);
  });
  if (!is_integer(w)) return;
  for (int64_t o = begin; o < end; o++) {  // as for dense ones
    bool finite = true;
    for (int64_t r = 0; r < in.rows; r++) finite = finite && __builtin_isfinite(y[r * w.rows + o]);
    if (!finite)
      for_each_decoded(w, o, o + 1, 1,
                       [&](const Weight& row, int64_t, int64_t) { recompute_overflowed(row, in, 0, 1, y + o); });
  }
}

}  // namespace
}  // namespace jaxllm
