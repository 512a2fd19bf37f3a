// AVX-512 F, BW, VL and DQ; with VNNI and with BF16 if compiled for them.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace jaxllm {
namespace {

JAXLLM_LANES(16);
constexpr int kRegisters = 32;

JAXLLM_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
JAXLLM_INLINE float reduce_add(Floats v) { return _mm512_reduce_add_ps(v); }
JAXLLM_INLINE float reduce_max(Floats v) { return _mm512_reduce_max_ps(v); }
JAXLLM_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }

JAXLLM_INLINE void reduce_add4(const Floats (&v)[4], float* out) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

JAXLLM_INLINE Floats from_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

JAXLLM_INLINE Floats from_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Products are in assembly where GCC 12 would copy the sums from register to register.
#ifdef __AVX512BF16__
#define JAXLLM_PAIRS
JAXLLM_INLINE void add_pairs(Floats& sum, Halves a, Halves b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Twice by pairs of rows, twice by quarters of registers.
JAXLLM_INLINE void transpose(const Bits (&in)[kLanes], uint32_t* out, int64_t stride) {
  __m512i a[16], b[16];
  JAXLLM_UNROLL
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(__m512i(in[i]), __m512i(in[i + 1]));
    a[i + 1] = _mm512_unpackhi_epi32(__m512i(in[i]), __m512i(in[i + 1]));
  }
  JAXLLM_UNROLL
  for (int i = 0; i < 16; i += 4) JAXLLM_UNROLL
  for (int k = 0; k < 2; k++) {  // b[i + m]: column 4 l + m of rows i to i + 3 in quarter l
    b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + 2 + k]);
    b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + 2 + k]);
  }
  JAXLLM_UNROLL
  for (int m = 0; m < 4; m++) {
    const __m512i even = _mm512_shuffle_i32x4(b[m], b[4 + m], 0x88), odd = _mm512_shuffle_i32x4(b[m], b[4 + m], 0xdd);
    const __m512i even_2 = _mm512_shuffle_i32x4(b[8 + m], b[12 + m], 0x88);
    const __m512i odd_2 = _mm512_shuffle_i32x4(b[8 + m], b[12 + m], 0xdd);
    _mm512_storeu_si512(out + m * stride, _mm512_shuffle_i32x4(even, even_2, 0x88));
    _mm512_storeu_si512(out + (4 + m) * stride, _mm512_shuffle_i32x4(odd, odd_2, 0x88));
    _mm512_storeu_si512(out + (8 + m) * stride, _mm512_shuffle_i32x4(even, even_2, 0xdd));
    _mm512_storeu_si512(out + (12 + m) * stride, _mm512_shuffle_i32x4(odd, odd_2, 0xdd));
  }
}

JAXLLM_INLINE void interleave(Halves a, Halves b, Halves& first, Halves& second) {
  alignas(64) uint16_t at[2][32];
  for (int i = 0; i < 32; i++) {
    at[0][i] = uint16_t(i / 2 + i % 2 * 32);
    at[1][i] = uint16_t(at[0][i] + 16);
  }
  first = Halves(_mm512_permutex2var_epi16(__m512i(a), _mm512_load_si512(at[0]), __m512i(b)));
  second = Halves(_mm512_permutex2var_epi16(__m512i(a), _mm512_load_si512(at[1]), __m512i(b)));
}
#endif

#ifdef __AVX512VNNI__
constexpr int kOffset = 128;
constexpr int kDigitRows = 16;
JAXLLM_INLINE void add_bytes(Ints& sum, Bytes w, Bytes x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
JAXLLM_INLINE void add_nibbles(Ints& sum, Bytes w, Bytes w2, Bytes x, Bytes x2) {
  add_bytes(sum, w, x);
  add_bytes(sum, w2, x2);
}
JAXLLM_INLINE void add_codes(Ints& sum, Bytes w, Bytes x) { add_bytes(sum, w, x); }

#define JAXLLM_ROWS_IN_LANES
JAXLLM_INLINE void add_word(Ints& sum, Bytes w, const int8_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t(*)[1]>(x)));
}
constexpr int row_of_lane(int i) { return i % 4 + 4 * (i / 8) + i / 4 % 2 * 8; }
// `all`: four words of a row, the next four, and the same of the eighth row after it; then as `transpose`.
template <int N>
JAXLLM_INLINE void words_of_rows(const uint8_t* const (&row)[16], Bytes (&out)[N]) {
  __m512i all[8], pairs[8], fours[8];
  JAXLLM_UNROLL
  for (int i = 0; i < 8; i++) {
    if constexpr (N == 8)
      all[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(row[i])), load<__m256i>(row[i + 8]), 1);
    else
      all[i] = _mm512_inserti64x4(_mm512_castsi128_si512(load<__m128i>(row[i])),
                                  _mm256_castsi128_si256(load<__m128i>(row[i + 8])), 1);
  }
  JAXLLM_UNROLL
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(all[i], all[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(all[i], all[i + 1]);
  }
  JAXLLM_UNROLL
  for (int i = 0; i < 8; i += 4) JAXLLM_UNROLL
  for (int k = 0; k < 2; k++) {
    fours[i + 2 * k] = _mm512_unpacklo_epi64(pairs[i + k], pairs[i + 2 + k]);
    fours[i + 2 * k + 1] = _mm512_unpackhi_epi64(pairs[i + k], pairs[i + 2 + k]);
  }
  JAXLLM_UNROLL
  for (int m = 0; m < 4; m++) {
    out[m] = Bytes(_mm512_shuffle_i32x4(fours[m], fours[4 + m], 0x88));
    if constexpr (N == 8) out[4 + m] = Bytes(_mm512_shuffle_i32x4(fours[m], fours[4 + m], 0xdd));
  }
}
#else
constexpr int kOffset = 0;
constexpr int kDigitRows = 0;
JAXLLM_INLINE void add_shorts(Ints& sum, __m512i pairs) { sum += Ints(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))); }
JAXLLM_INLINE void add_codes(Ints& sum, Bytes w, Bytes x) {  // fits 16 bits: 2 * 63 * 127
  add_shorts(sum, _mm512_maddubs_epi16(__m512i(w), __m512i(x)));
}
JAXLLM_INLINE void add_nibbles(Ints& sum, Bytes w, Bytes w2, Bytes x, Bytes x2) {  // fits 16 bits: 4 * 15 * 127
  add_shorts(sum, _mm512_add_epi16(_mm512_maddubs_epi16(__m512i(w), __m512i(x)),
                                   _mm512_maddubs_epi16(__m512i(w2), __m512i(x2))));
}
JAXLLM_INLINE void add_bytes(Ints& sum, Bytes w, Bytes x) {  // |w| times x with the sign of w
  const __m512i signed_x =
      _mm512_mask_sub_epi8(__m512i(x), _mm512_movepi8_mask(__m512i(w)), _mm512_setzero_si512(), __m512i(x));
  add_shorts(sum, _mm512_maddubs_epi16(_mm512_abs_epi8(__m512i(w)), signed_x));
}
#endif

JAXLLM_INLINE Ints sum_quads(const Ints (&v)[4]) {
  const auto add = [](auto a, auto b) { return _mm512_add_epi32(a, b); };
  const __m512i a = __m512i(v[0]), b = __m512i(v[1]), c = __m512i(v[2]), d = __m512i(v[3]);
  const __m512i ab = add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = add(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return Ints(add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd)));
}

JAXLLM_INLINE Bytes concat(const Bytes16 (&part)[4]) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(__m128i(part[0])), __m128i(part[1]), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(__m128i(part[2])), __m128i(part[3]), 1);
  return Bytes(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
JAXLLM_INLINE Bytes load_8_per_16(const void* p) {
  const __m256i all = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return Bytes(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_castsi256_si512(all)));
}
JAXLLM_INLINE Bytes shuffle_bytes(Bytes from, Bytes index) {
  return Bytes(_mm512_shuffle_epi8(__m512i(from), __m512i(index)));
}

// With Count 4, the upper half's numbers follow the lower half's: index[1] starts at 4.
template <int Size, int Count>
JAXLLM_INLINE Bytes shuffle_lanes(const uint8_t* const (&from)[2], const uint8_t* const (&index)[2], int) {
  const __m512i indices =
      _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(index[0])), load<__m256i>(index[1]), 1);
  __m512i all;
  if constexpr (Size == 1)
    all = _mm512_set1_epi64(load<int64_t>(from[0]));
  else
    all = _mm512_broadcast_i32x4(load<__m128i>(from[0]));
  if constexpr (Count == 8 && Size == 1) all = _mm512_mask_set1_epi64(all, 0xf0, load<int64_t>(from[1]));
  if constexpr (Count == 8 && Size == 2) all = _mm512_mask_broadcast_i32x4(all, 0xff00, load<__m128i>(from[1]));
  return Bytes(_mm512_shuffle_epi8(all, indices));
}
// Every AVX-512 expands lanes of 32 bits; VBMI2, on most processors with VNNI, narrower ones. It is detected separately
// and written in assembly, since no set is compiled for it.
#define JAXLLM_EXPAND
#ifdef __AVX512VNNI__
#define JAXLLM_EXPAND_HALVES
#endif
inline bool has_expand(size_t bytes) {
#ifdef __AVX512VNNI__
  static const bool has_vbmi2 = __builtin_cpu_supports("avx512vbmi2");
  return has_vbmi2 || bytes == 4;
#else
  return bytes == 4;
#endif
}
JAXLLM_INLINE __m512i load_partial(const void* p, bool half) {
  return half ? _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p))) : _mm512_loadu_si512(p);
}
JAXLLM_INLINE Bytes expand(const uint32_t* p, bool half, uint16_t bits) {
  return Bytes(_mm512_maskz_expand_epi32(bits, load_partial(p, half)));
}
JAXLLM_INLINE Bytes expand(const uint16_t* p, bool half, uint32_t bits) {
  __m512i out;
  asm("vpexpandw %2, %0%{%1%}%{z%}" : "=v"(out) : "Yk"(__mmask32(bits)), "v"(load_partial(p, half)));
  return Bytes(out);
}
JAXLLM_INLINE Bytes expand(const uint8_t* p, bool half, uint64_t bits) {
  __m512i out;
  asm("vpexpandb %2, %0%{%1%}%{z%}" : "=v"(out) : "Yk"(__mmask64(bits)), "v"(load_partial(p, half)));
  return Bytes(out);
}

struct Exponents {  // per index: the upper seven bits, and the lowest as the top bit of a byte
  __m512i high, low;

  explicit Exponents(int base) {
    alignas(16) uint8_t high_bytes[16], low_bytes[16];
    for (int i = 0; i < 16; i++) {
      high_bytes[i] = uint8_t((base + i) >> 1);
      low_bytes[i] = uint8_t((base + i) << 7);
    }
    high = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(high_bytes)));
    low = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(low_bytes)));
  }

  JAXLLM_INLINE void decode(Bytes bytes, Bytes index, Halves& first, Halves& second) const {
    const __m512i byte = __m512i(bytes), top = _mm512_set1_epi8(char(128));
    // (byte & 128) | high bits of the exponent; its low bit | (byte & 127)
    const __m512i h = _mm512_ternarylogic_epi32(byte, top, _mm512_shuffle_epi8(high, __m512i(index)), 0xea);
    const __m512i l = _mm512_ternarylogic_epi32(byte, top, _mm512_shuffle_epi8(low, __m512i(index)), 0xba);
    first = Halves(_mm512_unpacklo_epi8(l, h));
    second = Halves(_mm512_unpackhi_epi8(l, h));
  }
};

#ifdef JAXLLM_PAIRS
// Value n takes bits 4 n to 4 n + 3 of each word of 16.
typedef Halves NibbleValue;
constexpr int nibble_column(int i) { return i % 32 / 8 * 32 + i / 32 % 2 * 16 + i % 8 * 2 + i / 64; }

template <bool Zero, bool E2M1 = false>
struct Nibbles {
  __m512i table;  // by the lowest five bits of a word: q - 8, or the word less 15

  Nibbles() {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; i++) {
      const float value = Zero ? float(i - 15) : nibble_value(i % 16, E2M1);
      uint32_t bits;
      memcpy(&bits, &value, 4);
      values[i] = uint16_t(bits >> 16);
    }
    table = _mm512_load_si512(values);
  }

  JAXLLM_INLINE void values(Bytes q, Ints zero, Halves (&out)[4]) const {
    __m512i word = __m512i(q), shift;
    if (Zero) shift = __m512i((15 - zero) << 16 | (15 - zero));
    JAXLLM_UNROLL
    for (int n = 0; n < 4; n++) {
      const __m512i shifted = n ? _mm512_srli_epi16(word, 4 * n) : word;
      __m512i index = shifted;  // bits above the fourth are ignored
      if (Zero) index = _mm512_add_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(15)), shift);
      out[n] = Halves(_mm512_permutexvar_epi16(index, table));
    }
  }
};
#else
// Value n takes bits 4 n to 4 n + 3 of each lane.
typedef Floats NibbleValue;
constexpr int nibble_column(int i) { return i % 16 / 4 * 32 + i / 16 % 2 * 16 + i % 4 * 4 + i / 32; }

template <bool Zero, bool E2M1 = false>
struct Nibbles {
  __m512 table;  // by the lowest four bits of a lane: q - 8, or q

  Nibbles() {
    alignas(64) float values[16];
    for (int i = 0; i < 16; i++) values[i] = Zero ? float(i) : nibble_value(i, E2M1);
    table = _mm512_load_ps(values);
  }

  JAXLLM_INLINE void values(Bytes q, Ints zero, Floats (&out)[8]) const {
    const __m512i lane = __m512i(q);
    JAXLLM_UNROLL
    for (int n = 0; n < 8; n++) {
      out[n] = _mm512_permutexvar_ps(n ? _mm512_srli_epi32(lane, 4 * n) : lane, table);
      if (Zero) out[n] -= _mm512_cvtepi32_ps(__m512i(zero));
    }
  }
};
#endif

struct Codebook {
  __m512 level;
  explicit Codebook(const float* p) : level(_mm512_loadu_ps(p)) {}
  JAXLLM_INLINE Floats lookup(Bits index) const { return _mm512_permutexvar_ps(__m512i(index), level); }
};

// 64 columns of Q4_K (k_quants.h), scaled by tables of the 16 codes' values.
#define JAXLLM_SCALES_NIBBLES
JAXLLM_INLINE void scaled_nibbles(const uint8_t* p, const float* scale, const float* offset, Floats (&out)[4]) {
  const __m512 code = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 low = fma(code, _mm512_set1_ps(scale[0]), _mm512_set1_ps(offset[0]));
  const __m512 high = fma(code, _mm512_set1_ps(scale[2]), _mm512_set1_ps(offset[2]));
  JAXLLM_UNROLL
  for (int n = 0; n < 2; n++) {  // bits above the fourth are ignored
    const __m512i byte = _mm512_cvtepu8_epi32(load<__m128i>(p + n * 16));
    out[n] = _mm512_permutexvar_ps(byte, low);
    out[2 + n] = _mm512_permutexvar_ps(_mm512_srli_epi32(byte, 4), high);
  }
}

struct Broadcast {
  static constexpr bool kHalves = true;
  __m512i index;
  __mmask8 mask;

  explicit Broadcast(int count) : mask(__mmask8((1u << count) - 1)) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    index = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(4 - (count > 1) - (count > 2)));
  }

  JAXLLM_INLINE Floats floats(const float* p) const {
    const __m128 scales =
        mask < 4 ? _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))) : _mm_loadu_ps(p);
    return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(scales));
  }
  JAXLLM_INLINE Floats halves(const uint16_t* p) const {
    return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_cvtph_ps(_mm_maskz_loadu_epi16(mask, p))));
  }
  template <int Count>
  JAXLLM_INLINE Floats strided(const uint8_t* p, int bytes) const {
    if constexpr (Count == 1) return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(load<uint16_t>(p))));
    uint64_t all = load<uint16_t>(p);
    JAXLLM_UNROLL
    for (int i = 1; i < Count; i++) all |= uint64_t(load<uint16_t>(p + i * bytes)) << (16 * i);
    return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi64_si128(int64_t(all)))));
  }
  JAXLLM_INLINE Ints bytes(const uint8_t* p) const {
    return Ints(_mm512_permutexvar_epi32(index, _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, p))));
  }
};

}  // namespace
}  // namespace jaxllm
