// How x comes to shared memory: a block's share of the columns of all rows, zeros beyond the last.
//
// A prologue may prefetch weights of its own before the wait for the kernel before, and its factor
// multiplies the sums of a row at the end.
#pragma once

#include "ring.h"

namespace jaxllm {

DEVICE uint4 read_eight(const void* rows, size_t row, int columns, int column) {
  if (column >= columns) return uint4{0, 0, 0, 0};
  return read_global((const uint4*)((const uint16_t*)rows + row * columns + column));
}

// A block's share of x in shared memory, and the sums of squares of its rows by part.
struct Inputs {
  unsigned char* x;
  int stride;      // bytes of a row
  float* squares;  // [8 parts][8 TILES rows]
  template <class Format>
  DEVICE void write(int row, int chunk, uint4 eight) const {
    unsigned char* const to = x + row * stride;
    const uint4 arranged = Format::arrange(eight);
    if constexpr (Format::GROUP == 16) {  // two lanes take four columns each
      uint2* const fours = (uint2*)to + Format::place(chunk);
      fours[0] = uint2{arranged.x, arranged.y};
      fours[2] = uint2{arranged.z, arranged.w};
    } else {
      *(uint4*)(to + Format::place(chunk) * 16) = arranged;
    }
  }
};

struct Plain {
  template <class Format, int C>
  static DEVICE void prefetch(const Product&, const Place<Format, C>&) {}

  template <class Format, int TILES, int C>
  static DEVICE void load(const Product& p, const Place<Format, C>& place, const Inputs& inputs) {
    constexpr int TURN = 8;  // loads at once
    const int chunks = (place.share_end - place.share_first) * (Format::UNIT / 8);
    const int total = p.rows * chunks, column = place.share_first * Format::UNIT;
    for (int begin = thread_index(); begin < total; begin += THREADS * TURN) {
      uint4 eight[TURN];
      JAXLLM_UNROLL
      for (int i = 0; i < TURN; i++) {
        const int at = begin + i * THREADS, row = at / chunks;
        if (at < total) eight[i] = read_eight(p.x, row, p.columns, column + at % chunks * 8);
      }
      JAXLLM_UNROLL
      for (int i = 0; i < TURN; i++) {
        const int at = begin + i * THREADS;
        if (at < total) inputs.write<Format>(at / chunks, at % chunks, eight[i]);
      }
    }
  }
  template <int TILES>
  static DEVICE float factor(const Product&, const float*, int) {
    return 1;
  }
  // A number of x, as it is multiplied.
  static DEVICE float read(const Product& p, int row, int column) {
    return read_bf16(p.x, size_t(row) * p.columns + column);
  }
};

// x / rms(x) * (norm + offset): x * (norm + offset) is rounded to bf16, and 1 / rms multiplies the
// sums. A warp loads its own part of the columns, so a row's sum of squares has one order too.
struct RmsNorm {
  template <class Format, int C>
  static DEVICE void prefetch(const Product& p, const Place<Format, C>& place) {
    const int end = place.end * Format::UNIT < p.columns ? place.end * Format::UNIT : p.columns;
    for (int column = place.first * Format::UNIT + place.lane * 8; column < end; column += 256)
      prefetch_global((const uint16_t*)p.norm + column);
  }
  template <class Format, int TILES, int C>
  static DEVICE void load(const Product& p, const Place<Format, C>& place, const Inputs& inputs) {
    constexpr int TURN = 8;  // rows at once; the C warps of a part take turns
    const int chunks = (place.end - place.first) * (Format::UNIT / 8);
    const int before = (place.first - place.share_first) * (Format::UNIT / 8);
    for (int row = place.tile; row < p.rows; row += TURN * C) {
      float sum[TURN] = {};
      for (int chunk = place.lane; chunk < chunks; chunk += 32) {
        const int column = place.first * Format::UNIT + chunk * 8;
        const uint4 norm = read_eight(p.norm, 0, p.columns, column);
        uint4 eight[TURN];
        JAXLLM_UNROLL
        for (int i = 0; i < TURN; i++)
          if (row + i * C < p.rows) eight[i] = read_eight(p.x, row + i * C, p.columns, column);
        JAXLLM_UNROLL
        for (int i = 0; i < TURN; i++)
          if (row + i * C < p.rows)
            inputs.write<Format>(row + i * C, before + chunk,
                                 scale(eight[i], norm, p.offset, sum[i]));
      }
      JAXLLM_UNROLL
      for (int i = 0; i < TURN; i++)
        if (row + i * C < p.rows) share_sum<TILES>(place, inputs.squares, row + i * C, sum[i]);
    }
  }
  // Return eight values times eight weights + offset, and add the values' squares to a sum.
  static DEVICE uint4 scale(uint4 x, uint4 weight, float offset, float& sum) {
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    const uint32_t weights[4] = {weight.x, weight.y, weight.z, weight.w};
    uint32_t out[4];
    JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const float low = low_float(pairs[i]), high = high_float(pairs[i]);
      sum = fmaf(high, high, fmaf(low, low, sum));
      out[i] = round_pair(low * (low_float(weights[i]) + offset),
                          high * (high_float(weights[i]) + offset));
    }
    return uint4{out[0], out[1], out[2], out[3]};
  }
  // Add up the lanes' sums of squares of a row's part, for all blocks of the cluster.
  template <int TILES, class Format, int C>
  static DEVICE void share_sum(const Place<Format, C>& place, float* squares, int row, float sum) {
    JAXLLM_UNROLL
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    float* to = squares + place.part * TILES * 8 + row;
    if constexpr (C == 1) {
      if (place.lane == 0) *to = sum;
    } else {
      if (place.lane < C) write_in_block(to, place.lane, sum);
    }
  }
  template <int TILES>
  static DEVICE float factor(const Product& p, const float* squares, int row) {
    float sum = 0;
    JAXLLM_UNROLL
    for (int part = 0; part < PARTS; part++) sum += squares[part * TILES * 8 + row];
    return 1 / sqrtf(sum / p.columns + p.epsilon);
  }
  static DEVICE float read(const Product& p, int row, int column) {
    const float x = Plain::read(p, row, column);
    return low_float(round_pair(x * (read_bf16(p.norm, column) + p.offset), 0));
  }
};

}  // namespace jaxllm
