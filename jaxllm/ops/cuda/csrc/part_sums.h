// A warp's sums: its part of the columns of 16 rows of the weight, with 8 TILES rows of x.
#pragma once

#include "prologues.h"

namespace jaxllm {

// Read words from shared memory, up to four at a time.
template <int WORDS>
DEVICE void read_words(const unsigned char* at, uint32_t* words) {
  if constexpr (WORDS == 1) {
    words[0] = *(const uint32_t*)at;
  } else if constexpr (WORDS == 2) {
    const uint2 read = *(const uint2*)at;
    words[0] = read.x, words[1] = read.y;
  } else {
    JAXLLM_UNROLL
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 read = *(const uint4*)(at + i * 4);
      words[i] = read.x, words[i + 1] = read.y, words[i + 2] = read.z, words[i + 3] = read.w;
    }
  }
}

template <class Format, int C, int TILES>
struct PartSums {
  static constexpr int SPANS = Format::UNIT / Format::SPAN, PAIRS = Format::SPAN / 8;
  static constexpr int GROUPS = Format::GROUPS;
  // Chains of additions that take turns: groups or spans for one tile of x, tiles for more.
  static constexpr int SPAN_TURN = Format::GROUP && GROUPS == 1 && TILES == 1 && SPANS > 1 ? 2 : 1;
  static constexpr int TILE_TURN = TILES < 4 ? TILES : 4;
  static constexpr int UNROLLED = TILES == 2 || Format::HAS_OFFSETS ? Format::UNROLLED : 2;

  const Place<Format, C>& place;
  int g, c;                       // of the lane in the tile's mma
  const unsigned char* x[TILES];  // this lane's row of each tile, from its part's first column
  int scale_skew[2], zero_skew[2];
  float sum[TILES][4];

  DEVICE PartSums(const Product& p, const Place<Format, C>& place, const Inputs& inputs)
      : place(place), g(place.lane / 4), c(place.lane % 4) {
    const int column = (place.first - place.share_first) * Format::UNIT + c * (Format::SPAN / 4);
    JAXLLM_UNROLL
    for (int n = 0; n < TILES; n++) {  // any row will do beyond the last: its sums are not used
      const int row = g + 8 * n < p.rows ? g + 8 * n : p.rows - 1;
      x[n] = inputs.x + row * inputs.stride + column * 2;
    }
  }
  // Begin a tile with these rows of the weight.
  DEVICE void begin(int low, int high, int columns) {
    JAXLLM_UNROLL
    for (int n = 0; n < TILES; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
    JAXLLM_UNROLL
    for (int half = 0; half < 2; half++) {
      scale_skew[half] = Scales<Format>::skew_of(half ? high : low, columns, place.first);
      zero_skew[half] = Zeros<Format>::skew_of(half ? high : low, columns, place.first);
    }
  }
  // Add a stage's unit, 0 or 1.
  DEVICE void add_unit(const unsigned char* bytes, int stage, int unit) {
    JAXLLM_UNROLL_BY(UNROLLED)
    for (int span = 0; span < SPANS; span += SPAN_TURN) {
      uint32_t a[SPAN_TURN][PAIRS / 2][4];
      Factors<GROUPS> factors[SPAN_TURN][2];
      JAXLLM_UNROLL
      for (int i = 0; i < SPAN_TURN; i++) {
        uint32_t pairs[2][PAIRS];
        JAXLLM_UNROLL
        for (int half = 0; half < 2; half++) {
          read_pairs(bytes, stage, unit, span + i, half, pairs[half]);
          factors[i][half] = read_factors(bytes, stage, unit, span + i, half);
        }
        JAXLLM_UNROLL
        for (int k = 0; k < PAIRS / 2; k++) {
          a[i][k][0] = pairs[0][2 * k], a[i][k][1] = pairs[1][2 * k];
          a[i][k][2] = pairs[0][2 * k + 1], a[i][k][3] = pairs[1][2 * k + 1];
        }
      }
      const int offset = ((2 * stage + unit) * Format::UNIT + span * Format::SPAN) * 2;
      JAXLLM_UNROLL
      for (int n = 0; n < TILES; n += TILE_TURN) multiply(n, offset, a, factors);
    }
  }
  // Add spans of the weight times those of some tiles of x.
  DEVICE void multiply(int tile, int offset, const uint32_t (&a)[SPAN_TURN][PAIRS / 2][4],
                       const Factors<GROUPS> (&factors)[SPAN_TURN][2]) {
    constexpr int STEPS = PAIRS / 2 / GROUPS;  // of a group
    constexpr uint32_t ONES[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
    uint32_t b[TILE_TURN][SPAN_TURN][PAIRS];
    JAXLLM_UNROLL
    for (int n = 0; n < TILE_TURN; n++) JAXLLM_UNROLL
    for (int i = 0; i < SPAN_TURN; i++)
      read_words<PAIRS>(x[tile + n] + offset + i * (Format::SPAN * 2), b[n][i]);
    JAXLLM_UNROLL
    for (int j = 0; j < GROUPS; j++) {
      float group[TILE_TURN][SPAN_TURN][4] = {}, of_x[TILE_TURN][SPAN_TURN][4] = {};  // of x alone
      JAXLLM_UNROLL
      for (int k = j * STEPS; k < (j + 1) * STEPS; k++) JAXLLM_UNROLL
      for (int n = 0; n < TILE_TURN; n++) JAXLLM_UNROLL
      for (int i = 0; i < SPAN_TURN; i++) {
        const uint32_t two[2] = {b[n][i][2 * k], b[n][i][2 * k + 1]};
        multiply_tile(Format::GROUP ? group[n][i] : sum[tile + n], a[i][k], two);
        if constexpr (Format::HAS_OFFSETS) multiply_tile(of_x[n][i], ONES, two);
      }
      if constexpr (Format::GROUP != 0) JAXLLM_UNROLL
      for (int i = 0; i < SPAN_TURN; i++) JAXLLM_UNROLL
      for (int n = 0; n < TILE_TURN; n++) JAXLLM_UNROLL
      for (int e = 0; e < 4; e++) {
        const Factors<GROUPS>& by = factors[i][e / 2];
        float& to = sum[tile + n][e];
        to = fmaf(by.scale[j], group[n][i][e], to);
        if constexpr (Format::HAS_OFFSETS) to = fmaf(by.offset[j], of_x[n][i][e], to);
      }
    }
  }
  // This lane's columns of a span, in row g of a half of the tile.
  DEVICE void read_pairs(const unsigned char* bytes, int stage, int unit, int span, int half,
                         uint32_t (&pairs)[PAIRS]) const {
    const int byte = unit * UNIT_BYTES + (span * 4 + c) * Format::LANE_BYTES;
    const unsigned char* at = bytes + half * 1024 + swizzle<Format>(g, byte / 16) + byte % 16;
    uint32_t words[Format::WORDS];
    read_words<Format::WORDS>(at, words);
    if constexpr (Format::ZERO_GROUP != 0) {
      const unsigned char* zeros = find_zero(bytes, stage, unit, span, half);
      Format::unpack(words, Format::read_zero(zeros, c, unit * SPANS + span), pairs);
    } else {
      Format::unpack(words, 0, pairs);
    }
  }
  DEVICE const unsigned char* find_zero(const unsigned char* bytes, int stage, int unit, int span,
                                        int half) const {
    return bytes + 2048 + Scales<Format>::SIZE +
           Zeros<Format>::find(g + 8 * half, zero_skew[half], stage, place.first, unit, span);
  }
  DEVICE Factors<GROUPS> read_factors(const unsigned char* bytes, int stage, int unit, int span,
                                      int half) const {
    if constexpr (Format::GROUP != 0) {
      const unsigned char* scale =
          bytes + 2048 +
          Scales<Format>::find(g + 8 * half, scale_skew[half], stage, place.first, unit, span);
      if constexpr (GROUPS == 1)
        return {{INTEGER_SCALE * Format::Scale::read(scale)}, {}};
      else
        return Format::read_factors(scale, find_zero(bytes, stage, unit, span, half),
                                    unit * SPANS + span);
    } else {
      return {};
    }
  }
  // Write the sums where the block that ends the tile looks for them.
  DEVICE void send(float* sums) const {
    float4* const to = (float4*)sums + place.part * TILES * 32 + place.lane;
    JAXLLM_UNROLL
    for (int n = 0; n < TILES; n++) {
      const float4 four = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
      if constexpr (C == 1)
        to[n * 32] = four;
      else
        write_in_block(to + n * 32, place.tile, four);
    }
  }
};

}  // namespace jaxllm
