// GGUF's blocks of 256 columns times inputs rounded to int8, with a step for each 32 columns. The sum of a run of 16 is
// an exact integer, which is scaled and added to one of an output's sixteen lanes. So all instruction sets add in the
// same order.
#pragma once

#include "rounded.h"

namespace jaxllm {
namespace {

// 256 columns of an input row. The digits are in the order of registers of codes; of each lane (super_run) the step,
// and the sum of its digits, which its offset multiplies: of Q6_K, 32 less for each unit of it.
struct alignas(64) SuperDigits {
  int8_t digit[kSuper];
  float step[16], bias[16];
};

inline int64_t supers_of(const Input& in) { return up(in.columns, kSuper) / kSuper; }

template <Kind K>
void write_super(const float* x, bool codes, SuperDigits& out) {
  int8_t digit[kSuper];
  float step[8];
  for (int i = 0; i < 8; i++)
    step[i] = codes ? write_codes(x + 32 * i, 32, digit + 32 * i) : write_digits(x + 32 * i, 32, digit + 32 * i);
  for (int i = 0; i < kSuper; i += 16) memcpy(out.digit + i, digit + i / 128 * 128 + super_column<K>(i % 128), 16);
  for (int i = 0; i < 16; i++) {
    const int run = super_run<K>(i);
    int sum = 0;
    for (int j = 0; j < 16; j++) sum += digit[16 * run + j];
    out.step[i] = step[run / 2];
    out.bias[i] = float(K == Kind::kQ6K ? -32 * sum : sum);
  }
}

template <Kind K, int O, int R>
void super_tile(const Weight& w, const SuperDigits* x, int64_t blocks, const TileRows& o, int64_t r, float* y) {
  constexpr int kGroups = 16 / kLanes;  // of four registers of codes
  const int64_t distance = r ? 0 : distance_of(w.stride);
  x += r * blocks;
  Floats sum[kGroups][O][R];
  JAXLLM_UNROLL
  for (int g = 0; g < kGroups; g++) clear(sum[g]);
  for (int64_t b = 0; b < blocks; b++) JAXLLM_UNROLL
  for (int i = 0; i < O; i++) {
    const uint8_t* block = w.data + o[i] * w.stride + b * super_bytes(K);
    for (int at = 0; at < super_bytes(K); at += 64) ahead(block + at, distance);
    Floats scale[kGroups], offset[kGroups];
    super_scales<K>(block, lane_order<K>(Sixteens()), scale, offset);
    JAXLLM_UNROLL
    for (int g = 0; g < kGroups; g++) {
      Bytes codes[4];
      super_codes<K>(block, 2 * g, codes[0], codes[1]);
      super_codes<K>(block, 2 * g + 1, codes[2], codes[3]);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const SuperDigits& in = x[j * blocks + b];
        Ints each[4] = {};
        JAXLLM_UNROLL
        for (int k = 0; k < 4; k++) add_codes(each[k], codes[k], load<Bytes>(in.digit + (4 * g + k) * kBytes));
        const Floats whole = to_floats(sums_of_sixteens(each)), bias = load<Floats>(in.bias + g * kLanes);
        const Floats scaled = K == Kind::kQ6K ? (whole + bias) * scale[g] : fma(bias, offset[g], whole * scale[g]);
        // Scaled first: steps may be so large that anything else overflows.
        sum[g][i][j] = fma(scaled, load<Floats>(in.step + g * kLanes), sum[g][i][j]);
      }
    }
  }
  JAXLLM_UNROLL
  for (int g = 1; g < kGroups; g++) JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[0][i][j] += sum[g][i][j];
  put(sum[0], w, o, r, false, y);
}

template <Kind K>
void multiply_super(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr bool kSmall = kRegisters < 32;
  constexpr int kMost = kSmall ? 1 : 2;
  const SuperSource<K> source(w);
  if (!in.rounded && in.rows > 16) return multiply_expanded(source, w, in, x, begin, end, y);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    if (in.rounded)
      return tiles<4, kMost, kMost, kMost>(begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
        super_tile<K, O, R>(w, reinterpret_cast<const SuperDigits*>(x), supers_of(in), o, r, y);
      });
    tiles<4, kSmall ? 3 : 4, kSmall ? 2 : 4, kSmall ? 1 : 2>(
        begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
          tile<SuperSource<K>, O, R>(source, w, reinterpret_cast<const float*>(x), stride_of(in), o, r, y);
        });
  });
}

}  // namespace
}  // namespace jaxllm
