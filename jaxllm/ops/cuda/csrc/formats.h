// How the bytes of a weight's rows become bf16 factors and scales.
//
// A format has, besides `Row` below:
//
// unpack     a lane's columns as pairs, in an order that the mma needs no bytes moved for
// arrange    eight columns of x in the same order
// read_zero  what a lane unpacks with, if a format has zero points or something like them
//
// Blocks of 256 columns (GGUF's K-quants) have one thing more:
//
// read_factors  scales of a span's groups, and offsets, which are added to their weights
//
// An integer n from 0 to 255 is already a bf16, n 2^-133. Times 2^127 it is n / 64, and so are the
// factors of integers: exact, and multiplied by 64 with the scale.
#pragma once

#include "device.h"

namespace jaxllm {

constexpr int UNIT_BYTES = 64;  // of a row; a warp's part of a row is a number of whole units

// Types of scales.
struct Float {
  static constexpr int BYTES = 4;
  static DEVICE float read(const void* at) { return *(const float*)at; }
};
struct Half {
  static constexpr int BYTES = 2;
  static DEVICE float read(const void* at) { return half_to_float(*(const uint16_t*)at); }
};

// Rows of BITS per column, stored in multiples of CHUNK columns. GROUP columns share a scale and
// perhaps a zero point; 0: a row has one scale, or none. SPAN columns are those that a row's four
// lanes take at a time, each a quarter, so that all of x that a lane takes is 16 or 32 bytes. They
// are of one group or of two.
template <int BITS, int CHUNK, int GROUP_SIZE,
          int SPAN_SIZE = BITS == 16 || GROUP_SIZE == 32 ? 32 : 64>
struct Row {
  static constexpr int UNIT = UNIT_BYTES * 8 / BITS;  // columns
  static constexpr int GROUP = GROUP_SIZE;
  static constexpr int STEP = CHUNK == 256 ? 2 : 1;  // units; a part has a multiple
  static constexpr bool WHOLE_UNITS = CHUNK % UNIT == 0;
  static constexpr int SPAN = SPAN_SIZE;
  static constexpr int GROUPS = GROUP && GROUP < SPAN ? 2 : 1;  // of a span
  static constexpr int LANE_BYTES = SPAN / 4 * BITS / 8, WORDS = LANE_BYTES / 4;
  static constexpr bool ROW_SCALE = false, HAS_OFFSETS = false, HAS_ESCAPES = false;
  static constexpr int SCALE_GROUP = CHUNK == 256 ? 256 : GROUP;  // of `Product::scale`
  static constexpr int ZERO_GROUP = 0;  // columns that share ZERO_BYTES of `Product::zero`
  static constexpr int ZERO_BYTES = 1;
  static constexpr int UNROLLED = 2;  // spans, for 16 rows of x, as registers allow
  using Scale = Float;
  static DEVICE int padded(int columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }
  static DEVICE int bytes(int columns) { return padded(columns) * BITS / 8; }
  static DEVICE int units(int columns) { return (bytes(columns) + UNIT_BYTES - 1) / UNIT_BYTES; }
  static DEVICE uint4 arrange(uint4 x) { return x; }
  static DEVICE int place(int chunk) { return chunk; }  // of eight columns of x among the others
};

// Of eight columns of x: 0 2 1 3, 4 6 5 7.
DEVICE uint4 alternate(uint4 x) {
  return uint4{select_bytes(x.x, x.y, 0x5410), select_bytes(x.x, x.y, 0x7632),
               select_bytes(x.z, x.w, 0x5410), select_bytes(x.z, x.w, 0x7632)};
}

struct BFloat16 : Row<16, 8, 0> {
  static DEVICE void unpack(const uint32_t* words, uint32_t, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int w = 0; w < WORDS; w++) pairs[w] = words[w];
  }
};

constexpr float INTEGER_SCALE = 64;
constexpr uint32_t TIMES_2_127 = 0x7F007F00, TIMES_2_123 = 0x7D007D00;                   // pairs
constexpr uint32_t MINUS_8 = 0xBE00BE00, MINUS_32 = 0xBF00BF00, MINUS_128 = 0xC000C000;  // / 64

template <int GROUP_SIZE, class ScaleType = Float>
struct Int8 : Row<8, 128, GROUP_SIZE> {
  using Scale = ScaleType;
  static constexpr bool ROW_SCALE = GROUP_SIZE == 0;
  static DEVICE uint4 arrange(uint4 x) { return alternate(x); }
  static DEVICE void unpack(const uint32_t* words, uint32_t, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int i = 0; i < 2 * Int8::WORDS; i++) {
      const uint32_t plus_128 = words[i / 2] ^ 0x80808080u;
      pairs[i] = multiply_add_pairs((plus_128 >> i % 2 * 8) & 0x00FF00FFu, TIMES_2_127, MINUS_128);
    }
  }
};

// XLA's packed int4: column 2 i is the low half of byte i. With zero points, a weight is
// (code - zero) * scale, where the code is the stored number + 8.
template <int GROUP_SIZE, class ScaleType = Float, bool ZERO_POINTS = false>
struct Int4 : Row<4, 128, GROUP_SIZE> {
  static_assert(GROUP_SIZE > 0, "a row of 4-bit codes has groups");
  using Scale = ScaleType;
  static constexpr int ZERO_GROUP = ZERO_POINTS ? GROUP_SIZE : 0;
  static constexpr int UNROLLED = ZERO_POINTS ? 1 : 2;
  static DEVICE uint4 arrange(uint4 x) {  // columns 0 4 1 5 2 6 3 7
    return uint4{select_bytes(x.x, x.z, 0x5410), select_bytes(x.x, x.z, 0x7632),
                 select_bytes(x.y, x.w, 0x5410), select_bytes(x.y, x.w, 0x7632)};
  }
  // -zero / 64, twice; without zero points it is MINUS_8.
  static DEVICE uint32_t read_zero(const unsigned char* at, int, int) {
    return multiply_add_pairs(*at * 0x00010001u, TIMES_2_127 | 0x80008000u, 0);
  }
  static DEVICE void unpack(const uint32_t* words, uint32_t zero, uint32_t* pairs) {
    const uint32_t minus = ZERO_POINTS ? zero : MINUS_8;
    JAXLLM_UNROLL
    for (int i = 0; i < 2 * Int4::WORDS; i++) {
      const uint32_t codes = (words[i / 2] ^ 0x88888888u) >> i % 2 * 8;  // two's complement + 8
      pairs[2 * i] = multiply_add_pairs(codes & 0x000F000Fu, TIMES_2_127, minus);
      pairs[2 * i + 1] = multiply_add_pairs(codes & 0x00F000F0u, TIMES_2_123, minus);
    }
  }
};

// bf16 in 12 bits: the row has signs and mantissas, and `zero` nibbles of exponents, where byte j
// of 64 is of byte j of two units. Bytes 16 j + 8 h of a unit are columns 32 h + 8 j, and so on.
// The weights / 2^base become numbers below 2. `scale` is for all rows: 2^base / 64, where the
// escapes of each row begin, and of each escape its column and a pair: what the row has in its
// place, and the weight.
struct PackedBFloat16 : Row<8, 128, 0> {
  struct Scale : Float {
    static constexpr int BYTES = 0;
  };
  static constexpr bool ROW_SCALE = true, HAS_ESCAPES = true;
  static constexpr int STEP = 2, ZERO_GROUP = 128, ZERO_BYTES = 64;
  static constexpr int UNROLLED = 1;
  static DEVICE int place(int chunk) { return (chunk & ~7) + chunk % 4 * 2 + chunk / 4 % 2; }
  static DEVICE uint4 arrange(uint4 x) { return alternate(x); }
  static DEVICE uint4 read_zero(const unsigned char* nibbles, int lane, int unit) {
    const uint4 of = *(const uint4*)(nibbles + lane * 16);
    const int shift = 4 * unit;
    return {of.x >> shift, of.y >> shift, of.z >> shift, of.w >> shift};
  }
  static DEVICE void unpack(const uint32_t* words, uint4 nibbles, uint32_t* pairs) {
    const uint32_t of[4] = {nibbles.x, nibbles.y, nibbles.z, nibbles.w};
    JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint32_t first = (words[i] << 8 & 0x80008000) | (words[i] & 0x007F007F);
      const uint32_t second = (words[i] & 0x80008000) | (words[i] >> 8 & 0x007F007F);
      pairs[2 * i] = first | (of[i] << 7 & 0x07800780) | 0x38003800;  // 2^-15 and up
      pairs[2 * i + 1] = second | (of[i] >> 1 & 0x07800780) | 0x38003800;
    }
  }
};

// 4-bit NormalFloat: byte j of a block of 64 columns has the codes of columns j and j + 32. Levels
// are rounded to bf16; a byte of one is selected by three bits of a code, then by the fourth.
struct Nf4 : Row<4, 128, 64> {
  static constexpr int UNROLLED = 1;
  static DEVICE int place(int chunk) { return PackedBFloat16::place(chunk); }
  // A byte of the levels of four codes, from all sixteen.
  static DEVICE uint32_t look_up(uint32_t codes, uint32_t b0, uint32_t b4, uint32_t b8,
                                 uint32_t b12) {
    return select_bytes(select_bytes(b0, b4, codes & 0x7777), select_bytes(b8, b12, codes & 0x7777),
                        0x3210 | (codes >> 1 & 0x4444));
  }
  static DEVICE void unpack(const uint32_t* words, uint32_t, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int i = 0; i < 2 * WORDS; i++) {  // two bytes
      const uint32_t codes = words[i / 2] >> i % 2 * 16;
      // Of the levels / 64.
      const uint32_t low = look_up(codes, 0xCA063280, 0x00BA3D92, 0xAD7C25A3, 0x803910E2);
      const uint32_t high = look_up(codes, 0xBBBCBCBC, 0x00BABBBB, 0x3B3B3B3A, 0x3C3C3C3B);
      pairs[i] = select_bytes(low, high, 0x6240);
      pairs[i + 4] = select_bytes(low, high, 0x7351);
    }
  }
};

// Two values of each four columns, bf16 or int8. The mask has a bit for each column, and so a byte
// for eight.
template <int VALUE_BITS>
struct Sparse : Row<VALUE_BITS / 2, 128, 0> {
  static constexpr bool ROW_SCALE = VALUE_BITS == 8;
  static constexpr int ZERO_GROUP = 8;
  static DEVICE uint32_t read_zero(const unsigned char* mask, int lane, int) {
    return ((const uint16_t*)mask)[lane];
  }
  // The two values of four columns.
  static DEVICE uint32_t find_values(const uint32_t* words, int four) {
    if constexpr (VALUE_BITS == 16) return words[four];
    const uint32_t plus_128 = words[four / 2] ^ 0x80808080u;
    const uint32_t codes = select_bytes(plus_128, 0, four % 2 ? 0x4342 : 0x4140);
    return multiply_add_pairs(codes, TIMES_2_127, MINUS_128);
  }
  // Three bits of a mask's four imply the other. They select which bytes become a column: those of
  // the first value, 0x10, of the second, 0x32, or zeros, 0x44.
  static DEVICE void unpack(const uint32_t* words, uint32_t mask, uint32_t* pairs) {
    const uint32_t bits = mask & 0x7777;
    const uint32_t of[4] = {
        // columns of each four, a byte for each four
        select_bytes(0x10441044, 0x44441044, bits), select_bytes(0x32104444, 0x44104444, bits),
        select_bytes(0x44444444, 0x44323210, bits), select_bytes(0x44323244, 0x44444432, bits)};
    JAXLLM_UNROLL
    for (int i = 0; i < 8; i++) {
      const int four = i / 2, column = i % 2 * 2;
      const uint32_t two = select_bytes(of[column], of[column + 1], four / 2 ? 0x7362 : 0x5140);
      pairs[i] = select_bytes(find_values(words, four), 0, two >> four % 2 * 16);
    }
  }
};

// Of the groups of a span.
template <int GROUPS>
struct Factors {
  float scale[GROUPS], offset[GROUPS];
};

// GGUF's Q4_K, as it is stored, but with the first 16 bytes of each block apart, as `scale`: two
// float16, and 6 bits of each group's scale and offset. Byte j of 32 has the codes of columns j
// and j + 32.
struct Q4K : Row<4, 256, 32, 64> {
  static constexpr bool HAS_OFFSETS = true;
  static constexpr int UNROLLED = 1;
  struct Scale {
    static constexpr int BYTES = 16;
  };
  static DEVICE int place(int chunk) { return Nf4::place(chunk); }
  static DEVICE uint4 arrange(uint4 x) { return alternate(x); }
  static DEVICE void unpack(const uint32_t* words, uint32_t, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint32_t codes = words[i / 2] >> i % 2 * 8;
      pairs[i] = multiply_add_pairs(codes & 0x000F000Fu, TIMES_2_127, 0);
      pairs[i + 4] = multiply_add_pairs(codes & 0x00F000F0u, TIMES_2_123, 0);
    }
  }
  static DEVICE Factors<2> read_factors(const unsigned char* scale, const unsigned char*,
                                        int span) {
    const uint4 block = *(const uint4*)scale;
    uint32_t scales = block.y & 0x3F3F3F3F, offsets = block.z & 0x3F3F3F3F;  // of four groups
    if (span >= 2) {
      scales = (block.w & 0x0F0F0F0F) | (block.y >> 2 & 0x30303030);
      offsets = (block.w >> 4 & 0x0F0F0F0F) | (block.z >> 2 & 0x30303030);
    }
    const uint32_t two = span % 2 ? 0x4342 : 0x4140;
    scales = multiply_add_pairs(select_bytes(scales, 0, two), TIMES_2_127, 0);
    offsets = multiply_add_pairs(select_bytes(offsets, 0, two), TIMES_2_127, 0);
    const float by = INTEGER_SCALE * INTEGER_SCALE * half_to_float(uint16_t(block.x));
    const float minus = -INTEGER_SCALE * half_to_float(uint16_t(block.x >> 16));
    return {{by * low_float(scales), by * high_float(scales)},
            {minus * low_float(offsets), minus * high_float(offsets)}};
  }
};

// GGUF's Q5_K, likewise, with the fifth bits of the codes apart too, as `zero`: bit r of byte j of
// 32 is that of column 32 r + j.
struct Q5K : Q4K {
  static constexpr int ZERO_GROUP = 256, ZERO_BYTES = 32;
  static DEVICE uint2 read_zero(const unsigned char* fifth, int lane, int span) {
    const uint2 bits = *(const uint2*)(fifth + lane * 8);
    return {bits.x >> 2 * span, bits.y >> 2 * span};
  }
  static DEVICE void unpack(const uint32_t* words, uint2 fifth, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint32_t codes = words[i / 2] >> i % 2 * 8;
      const uint32_t bits = (i / 2 ? fifth.y : fifth.x) >> i % 2 * 8;
      const uint32_t low = (codes & 0x000F000Fu) | (bits << 4 & 0x00100010u);
      const uint32_t high = (codes >> 4 & 0x000F000Fu) | (bits << 3 & 0x00100010u);
      pairs[i] = multiply_add_pairs(low, TIMES_2_127, 0);
      pairs[i + 4] = multiply_add_pairs(high, TIMES_2_127, 0);
    }
  }
};

// GGUF's Q6_K, as it is stored, in three arrays: low bits as the row, a block's float16 as `scale`,
// high bits and the groups' int8 scales as `zero`. Of 128 columns, byte j of 64 has the low bits
// of columns j and j + 64, and byte j of 32 the high bits of columns j, j + 32, j + 64, j + 96.
struct Q6K : Row<4, 256, 16, 32> {
  using Scale = Half;
  static constexpr int ZERO_GROUP = 256, ZERO_BYTES = 80;
  // A lane takes four columns of each of two groups, 64 columns apart.
  static DEVICE int place(int chunk) {  // of the first four of eight columns of x, counted in fours
    return (chunk & ~15) * 2 + chunk % 8 * 4 + chunk / 8 % 2;
  }
  static DEVICE uint4 arrange(uint4 x) { return alternate(x); }
  static DEVICE uint32_t read_zero(const unsigned char* high, int lane, int span) {
    return *(const uint32_t*)(high + span / 4 * 32 + span % 2 * 16 + lane * 4) >> span / 2 % 2 * 2;
  }
  static DEVICE void unpack(const uint32_t* words, uint32_t high, uint32_t* pairs) {
    const uint32_t codes[2] = {(words[0] & 0x0F0F0F0F) | (high << 4 & 0x30303030),
                               (words[0] >> 4 & 0x0F0F0F0F) | (high & 0x30303030)};
    JAXLLM_UNROLL
    for (int i = 0; i < 4; i++)
      pairs[i] =
          multiply_add_pairs((codes[i / 2] >> i % 2 * 8) & 0x00FF00FFu, TIMES_2_127, MINUS_32);
  }
  static DEVICE Factors<2> read_factors(const unsigned char* scale, const unsigned char* zero,
                                        int span) {
    const unsigned char* scales = zero + 64 + span / 4 * 8 + span % 4;
    const uint32_t plus_128 = (scales[0] | scales[4] << 16) ^ 0x00800080u;
    const uint32_t two = multiply_add_pairs(plus_128, TIMES_2_127, MINUS_128);
    const float by = INTEGER_SCALE * INTEGER_SCALE * Half::read(scale);
    return {{by * low_float(two), by * high_float(two)}, {}};
  }
};

}  // namespace jaxllm
