// Integers times inputs rounded to int8. The sums of a group are integers, and exact.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

// 128 columns of an input row. Byte 64 h + j is that column (8-bit weights), or column 32 (j / 16) + 16 h + j % 16
// (4-bit weights, by the layout of their low and high bits). For each lane of four bytes (of low and high bits
// together) `step` is the size of one step, and `bias` the contribution of the weights' offset, to be subtracted; for
// 4-bit weights with a zero point, the contribution of each unit of it. If a row has one scale, the first register of
// `bias` is its total, and steps are 2^24 times smaller, so that sums which are scaled last do not overflow.
template <int Lanes>
struct alignas(64) Digits {
  int8_t digit[128];
  int32_t bias[Lanes];
  float step[Lanes];
};

inline bool rounded(const Weight& w, const Input& in) { return integers(w) && in.rounded; }
inline int64_t chunks_of(const Input& in) { return up(in.columns, 128) / 128; }
inline size_t digits_bytes(const Weight& w) { return w.kind == Kind::kInt4 ? sizeof(Digits<16>) : sizeof(Digits<32>); }

// How many columns of the input share a step: those that share a scale, and 128 if all of them do.
inline int64_t step_columns(const Weight& w) { return w.groups > 1 ? w.group : 128; }

// The size of one step, in the order of operations of round_to_int8 in weights/linear.py: a product
// that is one bit off could round differently. 0 if it would be subnormal 2^24 times smaller.
inline float step_of(float largest) {
  const float step = largest * (1.0f / 127);
  return step < 0x1p-102f ? 0 : step;
}

// Rounds `count` numbers; returns their step: 0 for all zeros, NaN if one is not finite.
inline float write_digits(const float* x, int64_t count, int8_t* digit) {
  Floats most = {}, wild = {};  // infinities and NaN make the latter NaN
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    most = larger(most, magnitude(v));
    wild += v * 0.0f;
  }
  const bool finite = sum(wild) == 0;
  const float step = finite ? step_of(largest(most)) : NAN;
  memset(digit, 0, count);
  if (!finite || step == 0) return step;
  const float inverse = 1 / step;
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats steps = load<Floats>(x + i) * inverse;
    asm("" : "+m"(steps));  // rounded: without it, compilers add to the exact product
    store(digit + i, __builtin_convertvector(to_ints(nearest(steps)), Signed));
  }
  return step;
}

// Codes as digits, of step 1.
inline float write_codes(const float* x, int64_t count, int8_t* digit) {
  for (int64_t i = 0; i < count; i += kLanes)
    store(digit + i, __builtin_convertvector(to_ints(larger(load<Floats>(x + i), all_of(-127))), Signed));
  return 1;
}

template <int Lanes>
void write_chunk(const Weight& w, const float* x, bool codes, Digits<Lanes>& out) {
  constexpr bool kFour = Lanes == 16;
  const bool row = w.groups <= 1 && !kFour;
  const int64_t count = step_columns(w);
  const int32_t offset = kFour ? (w.zero ? 1 : 8) : kOffset;
  int8_t digit[128];
  float step[4];  // of 32 columns
  for (int64_t c = 0; c < 128; c += count) {
    const float one = codes ? write_codes(x + c, count, digit + c) : write_digits(x + c, count, digit + c);
    for (int64_t i = c / 32; i < (c + count) / 32; i++) step[i] = one * (row ? 0x1p-24f : 1);
  }
  for (int b = 0; b < 8; b++)  // 16 at a time
    memcpy(&out.digit[kFour ? b % 2 * 64 + b / 2 * 16 : b * 16], digit + 16 * b, 16);
  for (int lane = 0; lane < Lanes; lane++) {
    int32_t sum = 0;
    for (int at = 4 * lane; at < 128; at += 64 * (kFour ? 1 : 2))
      sum += out.digit[at] + out.digit[at + 1] + out.digit[at + 2] + out.digit[at + 3];
    out.bias[lane] = -offset * sum;
    out.step[lane] = step[lane * 4 / Lanes];
  }
  for (int lane = kLanes; lane < Lanes && row; lane++) out.bias[lane % kLanes] += out.bias[lane];
}

// How a register of a weight row is read.
enum class Read { kInt8Row, kInt8, kInt8Blocks, kInt4, kInt4Zero, kInt4Blocks };

constexpr bool four_bits(Read read) { return read >= Read::kInt4; }

// The exact sum of integers in all lanes.
JAXLLM_INLINE int32_t exact_sum(Ints v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

// Codes: inputs are codes and rows have one scale, so sums are scaled once, at the end.
template <int O, int R, Read W, bool Codes>
void rounded_tile(const Weight& w, const Groups& groups, const uint8_t* prepared, int64_t chunks, const TileRows& o,
                  int64_t r, float* y) {
  constexpr bool kFour = four_bits(W), kRow = W == Read::kInt8Row;
  constexpr bool kBlocks = W == Read::kInt8Blocks || W == Read::kInt4Blocks;
  constexpr int kBits = kFour ? 4 : 8, kChunkBytes = kBlocks ? 4 * block_bytes(kBits) : 16 * kBits;
  constexpr int P = O == 1 || kRegisters < 32 ? 1 : 2;  // weight rows that share loads of x
  constexpr int kRegistersOfChunk = (kFour ? 64 : 128) / kBytes, kColumns = kFour ? 2 * kBytes : kBytes;
  constexpr int kUnit = kRow ? kRegistersOfChunk : 1;  // registers whose lanes share scales and steps
  typedef Digits<kFour ? 16 : 32> In;
  const In* x = reinterpret_cast<const In*>(prepared) + r * chunks;
  const int64_t distance = r ? 0 : distance_of(w.stride);
  GroupRow group[O];
  JAXLLM_UNROLL
  for (int i = 0; i < O && !kRow && !kBlocks; i++) group[i] = groups.row(o[i], i);
  Floats total[O][R];
  Ints exact[O][R];
  clear(total);
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) exact[i][j] = Ints{};
  for (int64_t c = 0; c < chunks; c++) JAXLLM_UNROLL
  for (int i = 0; i < O; i += P) {
    const uint8_t* line[P];
    JAXLLM_UNROLL
    for (int p = 0; p < P; p++) {
      line[p] = w.data + o[i + p] * w.stride + kChunkBytes * c;
      for (int at = 0; at < kChunkBytes; at += 64) ahead(line[p] + at, distance);
    }
    JAXLLM_UNROLL
    for (int v = 0; v < kRegistersOfChunk; v += kUnit) {
      Bytes first[P][kUnit], second[P];
      Floats scale[P];
      Ints zero[P];
      JAXLLM_UNROLL
      for (int p = 0; p < P; p++) {
        const int64_t column = 128 * c + v * kColumns;
        JAXLLM_UNROLL
        for (int u = 0; u < kUnit; u++) {
          const Bytes bytes = codes_at<kBits, kBlocks>(line[p], (v + u) * kColumns);
          first[p][u] = kFour ? bytes & 15 : (kOffset ? bytes ^ uint8_t(kOffset) : bytes);
          if (kFour) second[p] = bytes >> 4;
        }
        if constexpr (kBlocks)
          scale[p] = groups.spread.template apart<(kColumns + 31) / 32>(
              line[p] + v * kColumns / 32 * block_bytes(kBits), block_bytes(kBits));
        else if (!kRow)
          scale[p] = groups.scale(group[i + p], column);
        if (W == Read::kInt4Zero) zero[p] = groups.zero(group[i + p], column);
      }
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const In& in = x[j * chunks + c];
        Bytes here[kUnit], there;
        JAXLLM_UNROLL
        for (int u = 0; u < kUnit; u++) here[u] = load<Bytes>(&in.digit[(v + u) * kBytes]);
        if (kFour) there = load<Bytes>(&in.digit[64 + v * kBytes]);
        Ints bias = {};
        if (kFour || kOffset) bias = load<Ints>(&in.bias[v * kLanes]);
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) {
          Ints t = W == Read::kInt4Zero ? bias * zero[p] : bias;
          if (Codes) t += exact[i + p][j];
          if (kFour) add_nibbles(t, first[p][0], second[p], here[0], there);
          JAXLLM_UNROLL
          for (int u = 0; u < kUnit && !kFour; u++) add_bytes(t, first[p][u], here[u]);
          if (Codes)
            exact[i + p][j] = t;
          else  // scaled first: steps may be so large that anything else overflows
            total[i + p][j] =
                fma(kRow ? to_floats(t) : to_floats(t) * scale[p], load<Floats>(&in.step[v * kLanes]), total[i + p][j]);
        }
      }
    }
  }
  if (!kRow) return put(total, w, o, r, false, y);
  for (int i = 0; i < O; i++) {
    const float scale = w.groups ? scale_at(w, o[i]) : 0;  // there is none without columns
    for (int j = 0; j < R; j++)
      y[(r + j) * w.rows + o[i]] = Codes ? float(exact_sum(exact[i][j])) * scale : sum(total[i][j]) * (scale * 0x1p24f);
  }
}

template <Read W, bool Codes = false>
void multiply_read(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr bool kFour = four_bits(W);
  constexpr int kMost = kRegisters == 32 ? 4 : (kFour ? 1 : 2);
  const Groups groups = groups_of(w, in, kFour ? 2 * kBytes : kBytes);
  const int64_t chunks = chunks_of(in);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    tiles<4, kMost, kMost>(begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
      rounded_tile<O, R, W, Codes>(w, groups, x, chunks, o, r, y);
    });
  });
}

inline void multiply_rounded(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (w.blocks)
    return w.kind == Kind::kInt4 ? multiply_read<Read::kInt4Blocks>(w, in, x, begin, end, y)
                                 : multiply_read<Read::kInt8Blocks>(w, in, x, begin, end, y);
  if (w.kind == Kind::kInt4)
    return w.zero ? multiply_read<Read::kInt4Zero>(w, in, x, begin, end, y)
                  : multiply_read<Read::kInt4>(w, in, x, begin, end, y);
  if (w.groups > 1) return multiply_read<Read::kInt8>(w, in, x, begin, end, y);
  return in.codes ? multiply_read<Read::kInt8Row, true>(w, in, x, begin, end, y)
                  : multiply_read<Read::kInt8Row>(w, in, x, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
