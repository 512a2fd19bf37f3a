// How the bytes of a weight's rows become bf16 factors and scales.
//
// A format has, besides `Row` below:
//
// unpack     a lane's columns as pairs, in an order that the mma needs no bytes moved for
// arrange    eight columns of x in the same order
// read_zero  what a lane unpacks with, if a format has zero points or something like them
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
// perhaps a zero point; 0: a row has one scale, or none.
template <int BITS, int CHUNK, int GROUP_SIZE>
struct Row {
  static constexpr int UNIT = UNIT_BYTES * 8 / BITS;  // columns
  static constexpr int GROUP = GROUP_SIZE;
  static constexpr bool WHOLE_UNITS = CHUNK % UNIT == 0;
  // Columns that a row's four lanes take at a time, each a quarter, so that all of x that a lane
  // takes is 16 or 32 bytes. They have one scale.
  static constexpr int SPAN = BITS == 16 || GROUP == 32 ? 32 : 64;
  static constexpr int LANE_BYTES = SPAN / 4 * BITS / 8, WORDS = LANE_BYTES / 4;
  static constexpr bool ROW_SCALE = false;
  static constexpr int ZERO_GROUP = 0;  // columns that share a byte of `Product::zero`
  static constexpr int UNROLLED = 2;    // spans, for 16 rows of x, as registers allow
  using Scale = Float;
  static DEVICE int padded(int columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }
  static DEVICE int bytes(int columns) { return padded(columns) * BITS / 8; }
  static DEVICE int units(int columns) { return (bytes(columns) + UNIT_BYTES - 1) / UNIT_BYTES; }
  static DEVICE uint4 arrange(uint4 x) { return x; }
  static DEVICE int place(int chunk) { return chunk; }  // of eight columns of x among the others
};

struct BFloat16 : Row<16, 8, 0> {
  static DEVICE void unpack(const uint32_t* words, uint32_t, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int w = 0; w < WORDS; w++) pairs[w] = words[w];
  }
};

constexpr float INTEGER_SCALE = 64;
constexpr uint32_t TIMES_2_127 = 0x7F007F00, TIMES_2_123 = 0x7D007D00;  // pairs
constexpr uint32_t MINUS_8 = 0xBE00BE00, MINUS_128 = 0xC000C000;        // pairs, / 64

template <int GROUP_SIZE, class ScaleType = Float>
struct Int8 : Row<8, 128, GROUP_SIZE> {
  using Scale = ScaleType;
  static constexpr bool ROW_SCALE = GROUP_SIZE == 0;
  static DEVICE uint4 arrange(uint4 x) {  // columns 0 2 1 3, 4 6 5 7
    return uint4{select_bytes(x.x, x.y, 0x5410), select_bytes(x.x, x.y, 0x7632),
                 select_bytes(x.z, x.w, 0x5410), select_bytes(x.z, x.w, 0x7632)};
  }
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
  static DEVICE uint32_t read_zero(const unsigned char* at, int) {
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

// 4-bit NormalFloat: byte j of a block of 64 columns has the codes of columns j and j + 32. Levels
// are rounded to bf16; a byte of one is selected by three bits of a code, then by the fourth.
struct Nf4 : Row<4, 128, 64> {
  static constexpr int UNROLLED = 1;
  static DEVICE int place(int chunk) { return (chunk & ~7) + chunk % 4 * 2 + chunk / 4 % 2; }
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
  static DEVICE uint32_t read_zero(const unsigned char* mask, int lane) {
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

}  // namespace jaxllm
