// How the bytes of a weight's rows become bf16 factors and scales.
//
// A format has, besides `Row` below:
//
// PAIRS      pairs of bf16 in a word of 32 bits
// unpack     a word's columns as pairs, in an order that the mma needs no bytes moved for
// arrange    eight columns of x in the same order
//
// Integers become bf16 exactly: 128 + n is 0x4300 | n where n has 7 bits, and 128 is subtracted.
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
  static constexpr int LANE_BYTES = SPAN / 4 * BITS / 8;
  // -(128 + zero), twice: what a code of 4 bits has too much.
  static DEVICE uint32_t subtrahend(uint8_t zero) { return 0xC300C300u | zero * 0x00010001u; }
  static DEVICE int bytes(int columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK * BITS / 8; }
  static DEVICE int units(int columns) { return (bytes(columns) + UNIT_BYTES - 1) / UNIT_BYTES; }
  static DEVICE int groups(int columns) {
    return GROUP ? bytes(columns) * 8 / BITS / (GROUP ? GROUP : 1) : 1;
  }
};

struct BFloat16 : Row<16, 8, 0> {
  using Scale = Float;  // of none
  static constexpr bool ROW_SCALE = false, HAS_ZERO = false;
  static constexpr int PAIRS = 1;
  static DEVICE uint4 arrange(uint4 x) { return x; }
  static DEVICE void unpack(uint32_t word, uint32_t, uint32_t* pairs) { pairs[0] = word; }
};

template <int GROUP_SIZE, class ScaleType = Float>
struct Int8 : Row<8, 128, GROUP_SIZE> {
  using Scale = ScaleType;
  static constexpr bool ROW_SCALE = GROUP_SIZE == 0, HAS_ZERO = false;
  static constexpr int PAIRS = 2;
  static DEVICE uint4 arrange(uint4 x) {  // columns 0 2 1 3, 4 6 5 7
    return uint4{select_bytes(x.x, x.y, 0x5410), select_bytes(x.x, x.y, 0x7632),
                 select_bytes(x.z, x.w, 0x5410), select_bytes(x.z, x.w, 0x7632)};
  }
  // The low 7 bits less 128, or less 256 if the sign is set, after 128 was added.
  static DEVICE uint32_t to_pair(uint32_t bytes) {
    return add_pairs((bytes & 0x007F007Fu) | 0x43004300u, (bytes & 0x00800080u) | 0xC300C300u);
  }
  static DEVICE void unpack(uint32_t word, uint32_t, uint32_t* pairs) {
    pairs[0] = to_pair(word);
    pairs[1] = to_pair(word >> 8);
  }
};

// XLA's packed int4: column 2 i is the low half of byte i. With zero points, a weight is
// (code - zero) * scale, where the code is the stored number + 8.
template <int GROUP_SIZE, class ScaleType = Float, bool ZERO_POINTS = false>
struct Int4 : Row<4, 128, GROUP_SIZE> {
  static_assert(GROUP_SIZE > 0, "a row of 4-bit codes has groups");
  using Scale = ScaleType;
  static constexpr bool ROW_SCALE = false, HAS_ZERO = ZERO_POINTS;
  static constexpr int PAIRS = 4;
  static DEVICE uint4 arrange(uint4 x) {  // columns 0 4 1 5 2 6 3 7
    return uint4{select_bytes(x.x, x.z, 0x5410), select_bytes(x.x, x.z, 0x7632),
                 select_bytes(x.y, x.w, 0x5410), select_bytes(x.y, x.w, 0x7632)};
  }
  static DEVICE void unpack(uint32_t word, uint32_t minus, uint32_t* pairs) {
    JAXLLM_UNROLL
    for (int i = 0; i < 4; i++)  // the sign's bit is flipped: two's complement + 8
      pairs[i] = add_pairs(((word >> 4 * i) & 0x000F000Fu) ^ 0x43084308u, minus);
  }
};

}  // namespace jaxllm
