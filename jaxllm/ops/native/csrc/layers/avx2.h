// AVX2, FMA and F16C; with AVX-VNNI if compiled for it.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace jaxllm {
namespace {

JAXLLM_LANES(8);
constexpr int kRegisters = 16;

JAXLLM_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
JAXLLM_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }

JAXLLM_INLINE float reduce_add(Floats v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

JAXLLM_INLINE float reduce_max(Floats v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

JAXLLM_INLINE void reduce_add4(const Floats (&v)[4], float* out) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

JAXLLM_INLINE Floats from_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

JAXLLM_INLINE Floats from_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#ifdef __AVXVNNI__
constexpr int kOffset = 128;
constexpr int kDigitRows = 16;
JAXLLM_INLINE void add_bytes(Ints& sum, Bytes w, Bytes x) {  // as an intrinsic GCC 12 copies the sums
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
}
JAXLLM_INLINE void add_nibbles(Ints& sum, Bytes w, Bytes w2, Bytes x, Bytes x2) {
  add_bytes(sum, w, x);
  add_bytes(sum, w2, x2);
}
JAXLLM_INLINE void add_codes(Ints& sum, Bytes w, Bytes x) { add_bytes(sum, w, x); }
#else
constexpr int kOffset = 0;
constexpr int kDigitRows = 1;
JAXLLM_INLINE void add_shorts(Ints& sum, __m256i pairs) { sum += Ints(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
JAXLLM_INLINE void add_bytes(Ints& sum, Bytes w, Bytes x) {  // |w| times x with the sign of w
  add_shorts(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(__m256i(w)), _mm256_sign_epi8(__m256i(x), __m256i(w))));
}
JAXLLM_INLINE void add_codes(Ints& sum, Bytes w, Bytes x) {  // fits 16 bits: 2 * 63 * 127
  add_shorts(sum, _mm256_maddubs_epi16(__m256i(w), __m256i(x)));
}
JAXLLM_INLINE void add_nibbles(Ints& sum, Bytes w, Bytes w2, Bytes x, Bytes x2) {  // fits 16 bits: 4 * 15 * 127
  add_shorts(sum, _mm256_add_epi16(_mm256_maddubs_epi16(__m256i(w), __m256i(x)),
                                   _mm256_maddubs_epi16(__m256i(w2), __m256i(x2))));
}
JAXLLM_INLINE Ints digit_products(Bytes codes, const int8_t (&digit)[3][2][32]) {
  const __m256i low = __m256i(codes & 15), high = __m256i(codes >> 4);
  Ints sum = {};
  JAXLLM_UNROLL
  for (int k = 0; k < 3; k++) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, load<__m256i>(digit[k][0])),
                                           _mm256_maddubs_epi16(high, load<__m256i>(digit[k][1])));
    sum += Ints(_mm256_madd_epi16(pairs, _mm256_set1_epi16(short(1 << (14 - 7 * k)))));
  }
  return sum;
}
#endif

JAXLLM_INLINE Ints sum_quads(const Ints (&v)[4]) {
  return Ints(_mm256_hadd_epi32(_mm256_hadd_epi32(__m256i(v[0]), __m256i(v[1])),
                                _mm256_hadd_epi32(__m256i(v[2]), __m256i(v[3]))));
}

JAXLLM_INLINE __m256i broadcast_table(const uint8_t (&table)[16]) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

JAXLLM_INLINE Bytes concat(const Bytes16 (&part)[2]) {
  return Bytes(_mm256_inserti128_si256(_mm256_castsi128_si256(__m128i(part[0])), __m128i(part[1]), 1));
}
JAXLLM_INLINE Bytes load_8_per_16(const void* p) {
  const __m128i all = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return Bytes(_mm256_permute4x64_epi64(_mm256_castsi128_si256(all), 0x50));
}
JAXLLM_INLINE Bytes shuffle_bytes(Bytes from, Bytes index) {
  return Bytes(_mm256_shuffle_epi8(__m256i(from), __m256i(index)));
}

template <int Size, int Count>
JAXLLM_INLINE Bytes shuffle_lanes(const uint8_t* const (&from)[2], const uint8_t* const (&index)[2], int n) {
  __m256i all;
  if constexpr (Size * Count == 4)
    all = _mm256_set1_epi32(load<int32_t>(from[n]));
  else if constexpr (Size * Count == 8)
    all = _mm256_set1_epi64x(load<int64_t>(from[n]));
  else
    all = _mm256_broadcastsi128_si256(load<__m128i>(from[n]));
  return Bytes(_mm256_shuffle_epi8(all, load<__m256i>(index[n])));
}

// 32 columns of 2:4 int8: the shuffle index of a number is its column less the zeros before it.
#define JAXLLM_TWO_OF_FOUR
JAXLLM_INLINE Bytes two_of_four(const uint8_t* mask, const uint8_t* numbers) {
  const __m256i repeat = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  const __m256i column =
      _mm256_setr_epi64x(0x0504030203020100, 0x0908070607060504, 0x0d0c0b0a0b0a0908, 0x11100f0e0f0e0d0c);
  const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32(load<int32_t>(mask)), repeat);
  const __m256i zero = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), _mm256_setzero_si256());
  const __m256i one = _mm256_slli_epi32(zero, 8), two = _mm256_slli_epi32(zero, 16),
                three = _mm256_slli_epi32(zero, 24);
  const __m256i zeros = _mm256_add_epi8(_mm256_add_epi8(one, two), three);
  const __m256i index = _mm256_or_si256(_mm256_add_epi8(column, zeros), zero);
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
  return Bytes(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), index));
}

struct Exponents {  // per index: the upper seven bits, and the lowest as the top bit of a byte
  __m256i high, low;

  explicit Exponents(int base) {
    uint8_t high_bytes[16], low_bytes[16];
    for (int i = 0; i < 16; i++) {
      high_bytes[i] = uint8_t((base + i) >> 1);
      low_bytes[i] = uint8_t((base + i) << 7);
    }
    high = broadcast_table(high_bytes);
    low = broadcast_table(low_bytes);
  }

  JAXLLM_INLINE void decode(Bytes bytes, Bytes index, Halves& first, Halves& second) const {
    const __m256i byte = __m256i(bytes), top = _mm256_set1_epi8(char(128)), at = __m256i(index);
    const __m256i h = _mm256_or_si256(_mm256_and_si256(byte, top), _mm256_shuffle_epi8(high, at));
    const __m256i l = _mm256_or_si256(_mm256_andnot_si256(top, byte), _mm256_shuffle_epi8(low, at));
    first = Halves(_mm256_unpacklo_epi8(l, h));
    second = Halves(_mm256_unpackhi_epi8(l, h));
  }
};

// Looks up both bytes of each nibble's bfloat16 value: values 0 and 1 are the low nibbles of bytes 0 to 7 and 8 to 15
// of each half of the register, 2 and 3 the high ones.
typedef Halves NibbleValue;
constexpr int nibble_column(int i) {
  return i / 64 * 64 + i % 16 / 8 * 32 + i % 64 / 32 * 16 + i % 8 / 2 * 4 + i / 16 % 2 * 2 + i % 2;
}
// Moves the bytes of lane l (of a half's four) to bytes 2 l and 8 + 2 l on.
JAXLLM_INLINE __m256i by_lanes(__m256i v) {
  return _mm256_shuffle_epi8(
      v, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)));
}

template <bool Zero, bool E2M1 = false>
struct Nibbles {  // with a zero point: of |q - zero|; the sign follows
  __m256i high, low;

  Nibbles() {
    uint8_t high_bytes[16], low_bytes[16];
    for (int i = 0; i < 16; i++) {
      const float value = Zero ? float(i) : nibble_value(i, E2M1);
      uint32_t bits;
      memcpy(&bits, &value, 4);
      high_bytes[i] = uint8_t(bits >> 24);
      low_bytes[i] = uint8_t(bits >> 16);
    }
    high = broadcast_table(high_bytes);
    low = broadcast_table(low_bytes);
  }

  JAXLLM_INLINE void values(Bytes q, Ints zero, Halves (&out)[4]) const {
    const __m256i bits = _mm256_set1_epi8(15), byte = by_lanes(__m256i(q));
    const Ints pair = zero << 8 | zero, zeros = pair << 16 | pair;
    JAXLLM_UNROLL
    for (int n = 0; n < 2; n++) {
      __m256i at = _mm256_and_si256(n ? _mm256_srli_epi16(byte, 4) : byte, bits), sign = _mm256_setzero_si256();
      if (Zero) {
        const __m256i difference = _mm256_sub_epi8(at, __m256i(zeros));
        sign = _mm256_and_si256(difference, _mm256_set1_epi8(char(128)));
        at = _mm256_abs_epi8(difference);
      }
      const __m256i l = _mm256_shuffle_epi8(low, at);
      __m256i h = _mm256_shuffle_epi8(high, at);
      if (Zero) h = _mm256_or_si256(h, sign);
      out[2 * n] = Halves(_mm256_unpacklo_epi8(l, h));
      out[2 * n + 1] = Halves(_mm256_unpackhi_epi8(l, h));
    }
  }
};

struct Codebook {
  __m256 low, high;
  explicit Codebook(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
  JAXLLM_INLINE Floats lookup(Bits index) const {  // by three bits, and the fourth as a sign
    const __m256i i = __m256i(index);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                            _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
  }
};

struct Broadcast {
  static constexpr bool kHalves = false;
  bool two_groups;
  __m256i index;

  explicit Broadcast(int count)
      : two_groups(count > 1), index(_mm256_setr_epi32(0, 0, 0, 0, two_groups, two_groups, two_groups, two_groups)) {}

  JAXLLM_INLINE Floats floats(const float* p) const {
    if (!two_groups) return _mm256_broadcast_ss(p);
    const __m128 scales = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(scales), index);
  }
  template <int Count>
  JAXLLM_INLINE Floats strided(const uint8_t* p, int bytes) const {
    if constexpr (Count == 1) return _mm256_set1_ps(_cvtsh_ss(load<uint16_t>(p)));
    const int all = load<uint16_t>(p) | load<uint16_t>(p + bytes) << 16;
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_cvtph_ps(_mm_cvtsi32_si128(all))), index);
  }
  JAXLLM_INLINE Ints bytes(const uint8_t* p) const {
    const int first = p[0], second = two_groups ? p[1] : first;
    return Ints(_mm256_setr_epi32(first, first, first, first, second, second, second, second));
  }
};

}  // namespace
}  // namespace jaxllm
