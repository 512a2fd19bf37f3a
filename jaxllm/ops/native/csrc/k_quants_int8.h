// K-quants times inputs rounded to int8, with a step for each 32 columns. The sum of a run is an exact integer; it is
// scaled and added to one of an output's sixteen lanes, so that all sets add in the same order.
#pragma once

#include "int8_dynamic.h"

namespace jaxllm {
namespace {

// 256 columns of an input row, in the order of the registers of codes. For each lane (lane_run): the step, and `bias`,
// the sum of its numbers, which the offset multiplies (for Q6_K times -32, the offset itself).
struct alignas(64) Int8Superblock {
  int8_t q[kSuperblock];
  float step[16], bias[16];
};

inline int64_t superblock_count(const Input& in) { return round_up(in.columns, kSuperblock) / kSuperblock; }

template <Kind K>
void quantize_superblock(const float* x, bool quantized, Int8Superblock& out) {
  int8_t q[kSuperblock];
  float step[8];
  for (int i = 0; i < 8; i++)
    step[i] = quantized ? store_codes(x + 32 * i, 32, q + 32 * i) : quantize_int8(x + 32 * i, 32, q + 32 * i);
  for (int i = 0; i < kSuperblock; i += 16) memcpy(out.q + i, q + i / 128 * 128 + code_column<K>(i % 128), 16);
  for (int i = 0; i < 16; i++) {
    const int run = lane_run<K>(i);
    int sum = 0;
    for (int j = 0; j < 16; j++) sum += q[16 * run + j];
    out.step[i] = step[run / 2];
    out.bias[i] = float(K == Kind::kQ6K ? -32 * sum : sum);
  }
}

template <Kind K, int O, int R>
void k_quant_int8_tile(const Weight& w, const Int8Superblock* x, int64_t blocks, const TileRows& o, int64_t r,
                       float* y) {
  constexpr int kGroups = 16 / kLanes;  // of four registers of codes
  const int64_t prefetch = r ? 0 : prefetch_distance(w.stride);
  x += r * blocks;
  Floats sum[kGroups][O][R];
  JAXLLM_UNROLL
  for (int g = 0; g < kGroups; g++) clear(sum[g]);
  for (int64_t b = 0; b < blocks; b++) JAXLLM_UNROLL
  for (int i = 0; i < O; i++) {
    const uint8_t* block = w.data + o[i] * w.stride + b * superblock_bytes(K);
    for (int at = 0; at < superblock_bytes(K); at += 64) prefetch_line(block + at, prefetch);
    Floats scale[kGroups], offset[kGroups];
    unpack_scales<K>(block, lane_order<K>(Indices16()), scale, offset);
    JAXLLM_UNROLL
    for (int g = 0; g < kGroups; g++) {
      Bytes codes[4];
      unpack_codes<K>(block, 2 * g, codes[0], codes[1]);
      unpack_codes<K>(block, 2 * g + 1, codes[2], codes[3]);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const Int8Superblock& in = x[j * blocks + b];
        Ints dots[4] = {};
        JAXLLM_UNROLL
        for (int k = 0; k < 4; k++) add_codes(dots[k], codes[k], load<Bytes>(in.q + (4 * g + k) * kBytes));
        const Floats dot = to_floats(sum_quads(dots)), bias = load<Floats>(in.bias + g * kLanes);
        const Floats scaled = K == Kind::kQ6K ? (dot + bias) * scale[g] : fma(bias, offset[g], dot * scale[g]);
        // Scaled first: steps may be so large that anything else overflows.
        sum[g][i][j] = fma(scaled, load<Floats>(in.step + g * kLanes), sum[g][i][j]);
      }
    }
  }
  JAXLLM_UNROLL
  for (int g = 1; g < kGroups; g++) JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[0][i][j] += sum[g][i][j];
  store_sums(sum[0], w, o, r, false, y);
}

template <Kind K>
void multiply_k_quant(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr bool kFewRegisters = kRegisters < 32;
  constexpr int kTileRows = kFewRegisters ? 1 : 2;
  const KQuantSource<K> source(w);
  if (!in.quantize && in.rows > 16) return multiply_decoded(source, w, in, x, begin, end, y);
  for_each_block(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    if (in.quantize)
      return for_each_tile<4, kTileRows, kTileRows, kTileRows>(
          begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
            k_quant_int8_tile<K, O, R>(w, reinterpret_cast<const Int8Superblock*>(x), superblock_count(in), o, r, y);
          });
    for_each_tile<4, kFewRegisters ? 3 : 4, kFewRegisters ? 2 : 4, kFewRegisters ? 1 : 2>(
        begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
          tile<KQuantSource<K>, O, R>(source, w, reinterpret_cast<const float*>(x), prepared_stride(in), o, r, y);
        });
  });
}

}  // namespace
}  // namespace jaxllm
