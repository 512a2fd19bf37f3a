// Any processor: the compiler's own vectors of 16 bytes (SSE2, VSX, RVV, or scalars), and no intrinsics.
#pragma once

#include "lanes.h"

namespace jaxllm {
namespace {

JAXLLM_LANES(4);
constexpr int kRegisters = 16;
constexpr int kOffset = 0;
constexpr int kDigitRows = 0;

JAXLLM_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
JAXLLM_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
JAXLLM_INLINE float reduce_add(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }

JAXLLM_INLINE float reduce_max(Floats v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

JAXLLM_INLINE void reduce_add4(const Floats (&v)[4], float* out) {
  for (int i = 0; i < 4; i++) out[i] = reduce_add(v[i]);
}

// If the processor has no conversion of a few narrow numbers, compilers convert them one by one.
JAXLLM_INLINE Bits zip_halves(Halves v, Halves below) {
  return Bits(__builtin_shufflevector(below, v, 0, 8, 1, 9, 2, 10, 3, 11));
}

JAXLLM_INLINE Floats from_f16(const uint16_t* p) {
  const Ints bits = Ints(zip_halves(Halves{}, Halves(U64x2{load<uint64_t>(p), 0}))), magnitude = bits & 0x7fff;
  const Ints exponent = magnitude < 0x7c00 ? Ints{} + (112 << 23) : Ints{} + (224 << 23);  // infinity, NaN
  // Below 2^-14, an integer number of steps; XLA's threads flush subnormal floats.
  const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-24f;
  const Ints wide = magnitude < 0x400 ? Ints(small) : (magnitude << 13) + exponent;
  return Floats(Bits(wide) | Bits(bits & 0x8000) << 16);
}

JAXLLM_INLINE Floats from_int8(const int8_t* p) {
  const Bytes byte = Bytes(U64x2{load<uint32_t>(p), 0});
  const Bytes high = __builtin_shufflevector(Bytes{}, byte, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return __builtin_convertvector(Ints(zip_halves(Halves(high), Halves{})) >> 24, Floats);
}

JAXLLM_INLINE void add_bytes(Ints& sum, Bytes w, Bytes x) {  // two products fit 16 bits: 2 * 128 * 127
  const Shorts even = (Shorts(Halves(w) << 8) >> 8) * (Shorts(Halves(x) << 8) >> 8);
  const Shorts pair = even + (Shorts(w) >> 8) * (Shorts(x) >> 8);
  sum += (Ints(Bits(pair) << 16) >> 16) + (Ints(pair) >> 16);
}
JAXLLM_INLINE void add_nibbles(Ints& sum, Bytes w, Bytes w2, Bytes x, Bytes x2) {
  add_bytes(sum, w, x);
  add_bytes(sum, w2, x2);
}
JAXLLM_INLINE void add_codes(Ints& sum, Bytes w, Bytes x) { add_bytes(sum, w, x); }

JAXLLM_INLINE Ints sum_quads(const Ints (&v)[4]) {
  const Ints a = __builtin_shufflevector(v[0], v[1], 0, 4, 2, 6) + __builtin_shufflevector(v[0], v[1], 1, 5, 3, 7);
  const Ints b = __builtin_shufflevector(v[2], v[3], 0, 4, 2, 6) + __builtin_shufflevector(v[2], v[3], 1, 5, 3, 7);
  return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
}

JAXLLM_INLINE Bytes concat(const Bytes16 (&part)[1]) { return part[0]; }
JAXLLM_INLINE Bytes load_8_per_16(const void* p) { return Bytes(U64x2{load<uint64_t>(p), 0}); }
JAXLLM_INLINE Bytes shuffle_bytes(Bytes from, Bytes index) {
  uint8_t padded[32] = {}, out[16];  // index 16 is 0
  store(padded, from);
  for (int i = 0; i < 16; i++) out[i] = padded[index[i] < 16 ? index[i] : 16];
  return load<Bytes>(out);
}

template <int Size, int Count>
JAXLLM_INLINE Bytes shuffle_lanes(const uint8_t* const (&from)[2], const uint8_t* const (&index)[2], int n) {
  uint32_t lane[4];
  JAXLLM_UNROLL
  for (int i = 0; i < 4; i++) {  // without branches: half of them would be predicted wrongly
    const uint8_t first = index[n / 2][16 * (n % 2) + 4 * i + 4 - Size], *at = from[n / 2] + (first & 15);
    const uint32_t number = Size == 1 ? *at : load<uint16_t>(at);
    lane[i] = number << (32 - 8 * Size) & ((first >> 7) - 1u);
  }
  return Bytes(Bits{lane[0], lane[1], lane[2], lane[3]});
}

struct Exponents {
  Bytes base;

  explicit Exponents(int base) : base(Bytes{} + uint8_t(base)) {}

  JAXLLM_INLINE void decode(Bytes byte, Bytes index, Halves& first, Halves& second) const {
    const Bytes e = base + index, h = (byte & 128) | (e >> 1), l = (byte & 127) | (e << 7);
    first = Halves(__builtin_shufflevector(l, h, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    second = Halves(__builtin_shufflevector(l, h, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
  }
};

// Value n takes bits 4 n to 4 n + 3 of each word of 32.
typedef Floats NibbleValue;
constexpr int nibble_column(int i) { return i / 32 * 32 + i / 4 % 2 * 16 + i % 4 * 4 + i % 32 / 8; }

template <bool Zero, bool E2M1 = false>
struct Nibbles {
  JAXLLM_INLINE void values(Bytes q, Ints zero, Floats (&out)[8]) const {
    JAXLLM_UNROLL
    for (int n = 0; n < 8; n++) {
      Ints nibble = Ints(Bits(q) >> (4 * n) & 15);
      if constexpr (E2M1)
        nibble = Ints{kLevels[nibble[0]], kLevels[nibble[1]], kLevels[nibble[2]], kLevels[nibble[3]]};
      else
        nibble -= Zero ? zero : Ints{} + 8;
      out[n] = __builtin_convertvector(nibble, Floats);
    }
  }
};

struct Codebook {
  const float* level;
  explicit Codebook(const float* p) : level(p) {}
  JAXLLM_INLINE Floats lookup(Bits index) const {
    const Bits i = index & 15;
    return Floats{level[i[0]], level[i[1]], level[i[2]], level[i[3]]};
  }
};

struct Broadcast {  // a register never spans groups
  static constexpr bool kHalves = false;
  explicit Broadcast(int) {}
  JAXLLM_INLINE Floats floats(const float* p) const { return load<float>(p) - Floats{}; }
  template <int Count>
  JAXLLM_INLINE Floats strided(const uint8_t* p, int) const {
    const uint64_t four = load<uint16_t>(p) * 0x0001000100010001u;
    return from_f16(reinterpret_cast<const uint16_t*>(&four));
  }
  JAXLLM_INLINE Ints bytes(const uint8_t* p) const { return Ints{} + int32_t(*p); }
};

}  // namespace
}  // namespace jaxllm
