// The layer of a matrix unit (matrix_unit.h): AMX's tiles, and weights as tiles take them.
//   MatrixUnit(bytes)     configures the tiles of this thread during its lifetime; `bytes` per row of weights;
//   clear_tile, load_tile, store_tile, add_tiles   tiles 0 to 7; products of bfloat16 pairs or of signed bytes;
//   int8_to_bf16(p)       2 N signed bytes as bfloat16;
//   unpack_nibbles(p, q), nibbles_to_bf16(n, p, zero)   4-bit numbers as bytes, in order, or as bfloat16 by a table n;
//   nibble_order(v)       inputs in the order of nibbles_to_bf16.
// A processor that has AMX has all of layers/avx512.h.
#pragma once

#include "avx512.h"

namespace jaxllm {
namespace {

// Eight tiles: 0 to 3 of sums, always 16 rows of 16 lanes (smaller ones are slower to read back); 4 and 5 of weights,
// 16 rows of `bytes`; 6 and 7 of inputs.
struct MatrixUnit {
  explicit MatrixUnit(int bytes) {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; t++) {
      config.row_bytes[t] = uint16_t(t / 2 == 2 ? bytes : 64);
      config.rows[t] = uint8_t(t < 6 ? 16 : bytes / 4);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
};

template <int T>
JAXLLM_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
JAXLLM_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
JAXLLM_INLINE void store_tile(void* to, int64_t stride = 64) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <bool Pairs, int To, int Weights, int Inputs>
JAXLLM_INLINE void add_tiles() {
  if constexpr (Pairs)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(Weights), "i"(Inputs));
  else
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(Weights), "i"(Inputs));
}

JAXLLM_INLINE Halves int8_to_bf16(const int8_t* p) {
  return Halves(_mm512_cvtne2ps_pbh(from_int8(p + 16), from_int8(p)));
}

// Each 16 bytes are 32 numbers: the low bits of all of them, then the high ones.
JAXLLM_INLINE Bytes unpack_nibbles(const uint8_t* p, const uint8_t* q) {
  const __m512i packed =
      _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)), load<__m128i>(q), 1));
  const __m512i duplicated = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), packed);
  const __m512i high = _mm512_mask_srli_epi16(duplicated, 0xff00ff00u, duplicated, 4);
  return Bytes(_mm512_and_si512(high, _mm512_set1_epi8(15)));
}

// Quarters of the register have columns 0, 2, 4, ...; 16, 18, ...; 1, 3, ...; 17, 19, ...
template <bool Zero>
JAXLLM_INLINE Halves nibbles_to_bf16(const Nibbles<Zero>& table, const uint8_t* p, int zero) {
  const __m512i shift = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0x0008000800080008,
                                          0x0008000800080008, 0x000c000c000c000c, 0x000c000c000c000c);
  __m512i index = _mm512_srlv_epi16(_mm512_broadcast_i32x4(load<__m128i>(p)), shift);
  if (Zero)
    index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), _mm512_set1_epi16(int16_t(15 - zero)));
  return Halves(_mm512_permutexvar_epi16(index, table.table));
}

JAXLLM_INLINE Halves nibble_order(Halves v) {
  alignas(64) uint16_t column[32];
  for (int i = 0; i < 32; i++) column[i] = uint16_t(i % 8 * 2 + i / 8 % 2 * 16 + i / 16);
  return Halves(_mm512_permutexvar_epi16(_mm512_load_si512(column), __m512i(v)));
}

}  // namespace
}  // namespace jaxllm
