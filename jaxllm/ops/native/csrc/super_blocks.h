// GGUF's blocks of 256 columns (ggml's Q4_K, Q5_K, Q6_K), read where they lie. A block is sixteen runs of 16 columns;
// in Q4_K and Q5_K two of them share a scale and an offset.
//
// Each weight becomes the float32 number that ggml gives, in the order of columns.
#pragma once

#include <utility>

#include "product.h"

namespace jaxllm {
namespace {

constexpr int64_t kSuper = 256;

// Where the codes of 128 columns are, if 64 bytes are read as registers: each gives two, of its low bits and of its
// high ones. The column of byte i of those registers.
template <Kind K>
constexpr int super_column(int i) {
  const int high = i / kBytes % 2, p = i / kBytes / 2 * kBytes + i % kBytes;
  return K == Kind::kQ6K ? high * 64 + p : p / 32 * 64 + high * 32 + p % 32;
}

// The byte of column c, of 128; those of sixteen columns follow each other.
template <Kind K>
constexpr int super_byte(int c) {
  const int high = K == Kind::kQ6K ? c / 64 : c / 32 % 2, p = K == Kind::kQ6K ? c % 64 : c / 64 * 32 + c % 32;
  return (p / kBytes * 2 + high) * kBytes + p % kBytes;
}

// The run whose sum is in lane i, of 16: those of four registers of codes after each other (sums_of_sixteens).
template <Kind K>
constexpr int super_run(int i) {
  const int byte = (i / kLanes * 4 + i % 4) * kBytes + i % kLanes / 4 * 16;
  return byte / 128 * 8 + super_column<K>(byte % 128) / 16;
}

// The first of the upper bits that belong to byte p, of the 64 of a half: to its low bits, or its high ones.
template <Kind K>
constexpr int upper_bit(int half, int p, int high) {
  return K == Kind::kQ6K ? 2 * (p / 32 + 2 * high) : 4 * half + 2 * (p / 32) + high;
}

// Registers 2 i and 2 i + 1 of a block's codes, from 0 on.
template <Kind K>
JAXLLM_INLINE void super_codes(const uint8_t* block, int i, Bytes& first, Bytes& second) {
  constexpr bool kSix = K == Kind::kQ6K;
  const int half = i * kBytes / 64, from = i * kBytes % 64;
  const Bytes byte = load<Bytes>(block + (kSix ? 0 : (K == Kind::kQ4K ? 16 : 48)) + i * kBytes);
  first = byte & 15;
  second = byte >> 4;
  if constexpr (K == Kind::kQ4K) return;
  const uint8_t* upper = block + (kSix ? 128 + 32 * half : 16);
  Sixteen part[kBytes / 16];
  JAXLLM_UNROLL
  for (int n = 0; n < kBytes / 16; n++) part[n] = load<Sixteen>(upper + (from + 16 * n) % 32);
  const Bits bits = Bits(joined(part));
  JAXLLM_UNROLL
  for (int high = 0; high < 2; high++) {
    Bits by = {};  // to bit 4: all lanes to the left, or all to the right
    JAXLLM_UNROLL
    for (int lane = 0; lane < kLanes; lane++) {
      const int at = upper_bit<K>(half, from + 4 * lane, high);
      by[lane] = uint32_t(at < 4 ? 4 - at : at - 4);
    }
    const Bits there = upper_bit<K>(half, from, high) < 4 ? bits << by : bits >> by;
    (high ? second : first) |= Bytes(there) & uint8_t(kSix ? 0x30 : 0x10);
  }
}

typedef uint64_t Two __attribute__((vector_size(16)));

template <int... I>
JAXLLM_INLINE Sixteen shuffled(Sixteen v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, I...);
}

JAXLLM_INLINE Floats all_of_half(const uint8_t* p) {
  const Words some = Words{} + load<uint16_t>(p);
  return from_f16(reinterpret_cast<const uint16_t*>(&some));
}

// The scale and the offset of each run, in the order of `Order`, sixteen runs. Both are exact: 11 bits times 7.
template <Kind K, int... Order>
JAXLLM_INLINE void super_scales(const uint8_t* block, std::integer_sequence<int, Order...>,
                                Floats (&scale)[16 / kLanes], Floats (&offset)[16 / kLanes]) {
  alignas(16) int8_t whole[2][16];
  if constexpr (K == Kind::kQ6K) {
    store(whole[0], shuffled(load<Sixteen>(block + 192), std::integer_sequence<int, Order...>()));
  } else {  // six bits each: those of runs 0 to 7; 8 to 15 have the upper two in the bytes of the first
    const uint64_t six = load<uint64_t>(block + 4), four = load<uint32_t>(block + 12);
    const uint64_t low = six & 0x3f3f3f3f3f3f3f3f,
                   high = ((four | four << 28) & 0x0f0f0f0f0f0f0f0f) | (six >> 2 & 0x3030303030303030);
    const Sixteen all = Sixteen(Two{low, high});  // each half: four scales, four offsets
    store(whole[0], shuffled(all, std::integer_sequence<int, (Order / 8 * 8 + Order / 2 % 4)...>()));
    store(whole[1], shuffled(all, std::integer_sequence<int, (Order / 8 * 8 + 4 + Order / 2 % 4)...>()));
  }
  const Floats d = all_of_half(block + (K == Kind::kQ6K ? 208 : 0));
  JAXLLM_UNROLL
  for (int i = 0; i < 16 / kLanes; i++) scale[i] = from_int8(whole[0] + i * kLanes) * d;
  if constexpr (K == Kind::kQ6K) return;
  const Floats least = -all_of_half(block + 2);
  JAXLLM_UNROLL
  for (int i = 0; i < 16 / kLanes; i++) offset[i] = from_int8(whole[1] + i * kLanes) * least;
}

typedef std::make_integer_sequence<int, 16> Sixteens;

template <Kind K, int... I>
constexpr auto lane_order(std::integer_sequence<int, I...>) {
  return std::integer_sequence<int, super_run<K>(I)...>();
}

template <Kind K>
struct SuperSource {
  static constexpr bool kPairs = false, kTail = false, kEnds = false;
#ifdef JAXLLM_SCALES_NIBBLES
  static constexpr bool kTables = K == Kind::kQ4K;
#else
  static constexpr bool kTables = false;
#endif
  static constexpr int kUnit = kTables ? 64 : 32, kChunk = kSuper;
  static constexpr Scales kScales = Scales::kNone;
  typedef Floats Value;
  struct Row {
    const SuperSource* of;
    const uint8_t* at;
    Floats scale[16 / kLanes], offset[16 / kLanes];
    int8_t codes[128];

    JAXLLM_INLINE const uint8_t* block(int64_t c) const { return at + c / kSuper * super_bytes(K); }
    JAXLLM_INLINE void fetch(int64_t c) const {
      for (int i = 0; i < super_bytes(K); i += 64) ahead(block(c) + i, of->distance);
    }
    // That of column c: of Q4_K and Q5_K, one of two that are alike.
    static JAXLLM_INLINE const float* value_of(const Floats (&runs)[16 / kLanes], int64_t c) {
      return reinterpret_cast<const float*>(runs) + (K == Kind::kQ6K ? c % kSuper / 16 : c % kSuper / 32 * 2);
    }
    // Units follow each other, from the beginning of a block on.
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Floats (&out)[N]) {
      if (c % kSuper == 0) {
        super_scales<K>(block(c), Sixteens(), scale, offset);
        asm("" : "+m"(scale), "+m"(offset));  // read from memory: processors load more than they shuffle
      }
#ifdef JAXLLM_SCALES_NIBBLES
      if constexpr (kTables)
        return scaled_nibbles(block(c) + 16 + c % kSuper / 2, value_of(scale, c), value_of(offset, c), out);
#endif
      if (c % 128 == 0) {
        JAXLLM_UNROLL
        for (int i = 0; i < 64 / kBytes; i++) {
          Bytes some[2];
          super_codes<K>(block(c), int(c % kSuper / 128 * (64 / kBytes)) + i, some[0], some[1]);
          if (K == Kind::kQ6K) some[0] -= 32, some[1] -= 32;
          memcpy(codes + 2 * i * kBytes, some, sizeof some);
        }
        asm("" : "+m"(codes));
      }
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) {
        const int64_t column = c + n * kLanes;
        const Floats code = from_int8(codes + super_byte<K>(int(column % 128))), by = all_of(*value_of(scale, column));
        out[n] = K == Kind::kQ6K ? code * by : fma(code, by, all_of(*value_of(offset, column)));
      }
    }
  };
  const Weight& w;
  int64_t distance;
  explicit SuperSource(const Weight& w) : w(w), distance(distance_of(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const {
    Row row;
    row.of = this;
    row.at = w.data + o * w.stride;
    return row;
  }
};

// 128 columns of row o from `from` on, a multiple of 128.
template <Kind K>
void super_part(const Weight& w, int64_t o, int64_t from, float* out) {
  const SuperSource<K> source(w);
  typename SuperSource<K>::Row row = source.row(o, 0);
  super_scales<K>(row.block(from), Sixteens(), row.scale, row.offset);
  for (int c = 0; c < 128; c += row.of->kUnit) {
    Floats some[SuperSource<K>::kUnit / kLanes];
    row.load(from + c, some);
    memcpy(out + c, some, sizeof some);
  }
}

}  // namespace
}  // namespace jaxllm
