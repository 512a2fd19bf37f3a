// GGUF's K-quants (ggml's Q4_K, Q5_K, Q6_K), read in place. A superblock of 256 columns is sixteen runs of 16; in Q4_K
// and Q5_K two runs share a scale and an offset.
//
// Each weight becomes ggml's float32 value, in column order.
#pragma once

#include <utility>

#include "matmul.h"

namespace jaxllm {
namespace {

constexpr int64_t kSuperblock = 256;

// 64 bytes hold 128 columns: each register of them gives a register of low nibbles, then one of high nibbles. The
// column of byte i of these registers.
template <Kind K>
constexpr int code_column(int i) {
  const int high = i / kBytes % 2, p = i / kBytes / 2 * kBytes + i % kBytes;
  return K == Kind::kQ6K ? high * 64 + p : p / 32 * 64 + high * 32 + p % 32;
}

// The inverse: the byte of column c. Sixteen columns are consecutive bytes.
template <Kind K>
constexpr int code_byte(int c) {
  const int high = K == Kind::kQ6K ? c / 64 : c / 32 % 2, p = K == Kind::kQ6K ? c % 64 : c / 64 * 32 + c % 32;
  return (p / kBytes * 2 + high) * kBytes + p % kBytes;
}

// The run whose sum is in lane i (of 16) after sum_quads of four registers of codes at a time.
template <Kind K>
constexpr int lane_run(int i) {
  const int byte = (i / kLanes * 4 + i % 4) * kBytes + i % kLanes / 4 * 16;
  return byte / 128 * 8 + code_column<K>(byte % 128) / 16;
}

// First upper bit of the low (or high) nibble of byte p, of the 64 bytes of a half.
template <Kind K>
constexpr int upper_bit(int half, int p, int high) {
  return K == Kind::kQ6K ? 2 * (p / 32 + 2 * high) : 4 * half + 2 * (p / 32) + high;
}

// Registers 2 i and 2 i + 1 of a superblock's codes.
template <Kind K>
JAXLLM_INLINE void unpack_codes(const uint8_t* block, int i, Bytes& first, Bytes& second) {
  constexpr bool kSix = K == Kind::kQ6K;
  const int half = i * kBytes / 64, from = i * kBytes % 64;
  const Bytes byte = load<Bytes>(block + (kSix ? 0 : (K == Kind::kQ4K ? 16 : 48)) + i * kBytes);
  first = byte & 15;
  second = byte >> 4;
  if constexpr (K == Kind::kQ4K) return;
  const uint8_t* upper = block + (kSix ? 128 + 32 * half : 16);
  Bytes16 part[kBytes / 16];
  JAXLLM_UNROLL
  for (int n = 0; n < kBytes / 16; n++) part[n] = load<Bytes16>(upper + (from + 16 * n) % 32);
  const Bits bits = Bits(concat(part));
  JAXLLM_UNROLL
  for (int high = 0; high < 2; high++) {
    Bits shift = {};  // to bit 4: all lanes to the left, or all to the right
    JAXLLM_UNROLL
    for (int lane = 0; lane < kLanes; lane++) {
      const int at = upper_bit<K>(half, from + 4 * lane, high);
      shift[lane] = uint32_t(at < 4 ? 4 - at : at - 4);
    }
    const Bits upper_bits = upper_bit<K>(half, from, high) < 4 ? bits << shift : bits >> shift;
    (high ? second : first) |= Bytes(upper_bits) & uint8_t(kSix ? 0x30 : 0x10);
  }
}

template <int... I>
JAXLLM_INLINE Bytes16 shuffle(Bytes16 v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, I...);
}

JAXLLM_INLINE Floats splat_half(const uint8_t* p) {
  const Words halves = Words{} + load<uint16_t>(p);
  return from_f16(reinterpret_cast<const uint16_t*>(&halves));
}

// Scales and offsets of the sixteen runs, permuted by `Order`. Both are exact: 11 bits times 7.
template <Kind K, int... Order>
JAXLLM_INLINE void unpack_scales(const uint8_t* block, std::integer_sequence<int, Order...>,
                                 Floats (&scale)[16 / kLanes], Floats (&offset)[16 / kLanes]) {
  alignas(16) int8_t codes[2][16];
  if constexpr (K == Kind::kQ6K) {
    store(codes[0], shuffle(load<Bytes16>(block + 192), std::integer_sequence<int, Order...>()));
  } else {  // six bits each: those of runs 0 to 7; 8 to 15 have the upper two in the bytes of the first
    const uint64_t low_bits = load<uint64_t>(block + 4), high_bits = load<uint32_t>(block + 12);
    const uint64_t low = low_bits & 0x3f3f3f3f3f3f3f3f,
                   high = ((high_bits | high_bits << 28) & 0x0f0f0f0f0f0f0f0f) | (low_bits >> 2 & 0x3030303030303030);
    const Bytes16 all = Bytes16(U64x2{low, high});  // each half: four scales, four offsets
    store(codes[0], shuffle(all, std::integer_sequence<int, (Order / 8 * 8 + Order / 2 % 4)...>()));
    store(codes[1], shuffle(all, std::integer_sequence<int, (Order / 8 * 8 + 4 + Order / 2 % 4)...>()));
  }
  const Floats d = splat_half(block + (K == Kind::kQ6K ? 208 : 0));
  JAXLLM_UNROLL
  for (int i = 0; i < 16 / kLanes; i++) scale[i] = from_int8(codes[0] + i * kLanes) * d;
  if constexpr (K == Kind::kQ6K) return;
  const Floats min = -splat_half(block + 2);
  JAXLLM_UNROLL
  for (int i = 0; i < 16 / kLanes; i++) offset[i] = from_int8(codes[1] + i * kLanes) * min;
}

typedef std::make_integer_sequence<int, 16> Indices16;

template <Kind K, int... I>
constexpr auto lane_order(std::integer_sequence<int, I...>) {
  return std::integer_sequence<int, lane_run<K>(I)...>();
}

template <Kind K>
struct KQuantSource {
  static constexpr bool kPairs = false, kPartialChunk = false, kPartialUnits = false;
#ifdef JAXLLM_SCALES_NIBBLES
  static constexpr bool kTables = K == Kind::kQ4K;
#else
  static constexpr bool kTables = false;
#endif
  static constexpr int kUnit = kTables ? 64 : 32, kChunk = kSuperblock;
  static constexpr Scales kScales = Scales::kNone;
  typedef Floats Value;
  struct Row {
    const KQuantSource* source;
    const uint8_t* at;
    Floats scale[16 / kLanes], offset[16 / kLanes];
    int8_t codes[128];

    JAXLLM_INLINE const uint8_t* block(int64_t c) const { return at + c / kSuperblock * superblock_bytes(K); }
    JAXLLM_INLINE void fetch(int64_t c) const {
      for (int i = 0; i < superblock_bytes(K); i += 64) prefetch_line(block(c) + i, source->distance);
    }
    // The run's value at column c.
    static JAXLLM_INLINE const float* run_value(const Floats (&runs)[16 / kLanes], int64_t c) {
      return reinterpret_cast<const float*>(runs) + (K == Kind::kQ6K ? c % kSuperblock / 16 : c % kSuperblock / 32 * 2);
    }
    // Called for consecutive units from the start of a superblock.
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Floats (&out)[N]) {
      if (c % kSuperblock == 0) {
        unpack_scales<K>(block(c), Indices16(), scale, offset);
        asm("" : "+m"(scale), "+m"(offset));  // read from memory: processors load more than they shuffle
      }
#ifdef JAXLLM_SCALES_NIBBLES
      if constexpr (kTables)
        return scaled_nibbles(block(c) + 16 + c % kSuperblock / 2, run_value(scale, c), run_value(offset, c), out);
#endif
      if (c % 128 == 0) {
        JAXLLM_UNROLL
        for (int i = 0; i < 64 / kBytes; i++) {
          Bytes bytes[2];
          unpack_codes<K>(block(c), int(c % kSuperblock / 128 * (64 / kBytes)) + i, bytes[0], bytes[1]);
          if (K == Kind::kQ6K) bytes[0] -= 32, bytes[1] -= 32;
          memcpy(codes + 2 * i * kBytes, bytes, sizeof bytes);
        }
        asm("" : "+m"(codes));
      }
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) {
        const int64_t column = c + n * kLanes;
        const Floats code = from_int8(codes + code_byte<K>(int(column % 128))),
                     run_scale = splat(*run_value(scale, column));
        out[n] = K == Kind::kQ6K ? code * run_scale : fma(code, run_scale, splat(*run_value(offset, column)));
      }
    }
  };
  const Weight& w;
  int64_t distance;
  explicit KQuantSource(const Weight& w) : w(w), distance(prefetch_distance(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const {
    Row row;
    row.source = this;
    row.at = w.data + o * w.stride;
    return row;
  }
};

// Dequantizes 128 columns of row o from `from` on, a multiple of 128.
template <Kind K>
void dequantize_k_quant(const Weight& w, int64_t o, int64_t from, float* out) {
  const KQuantSource<K> source(w);
  typename KQuantSource<K>::Row row = source.row(o, 0);
  unpack_scales<K>(row.block(from), Indices16(), row.scale, row.offset);
  for (int c = 0; c < 128; c += row.source->kUnit) {
    Floats values[KQuantSource<K>::kUnit / kLanes];
    row.load(from + c, values);
    memcpy(out + c, values, sizeof values);
  }
}

}  // namespace
}  // namespace jaxllm
