// Integers times inputs rounded to int8. The sums of a group are integers, and exact.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

// The columns of an input row that share a step. Byte 64 h + j of a chunk of 128 is that column (8-bit weights), or
// column 32 (j / 16) + 16 h + j % 16 (4-bit weights, by the layout of their low and high bits). `bias`: the
// contribution of the weights' offset, for each lane of four bytes (of low and high bits together), to be subtracted;
// for 4-bit weights with a zero point, the contribution of each unit of it. `whole`: the total, over lanes.
constexpr int64_t kChunks = kRounded / 128;

struct alignas(64) Digits {
  int8_t digit[kChunks][128];
  int32_t bias[kChunks][32];
  int32_t whole[kLanes];
  float step;
};

inline bool rounded(const Weight& w, const Input& in) { return integers(w) && in.rounded; }
inline int64_t blocks_of(const Input& in) { return up(in.columns, kRounded) / kRounded; }

// The size of one step, in the order of operations of round_to_int8 in weights/linear.py: a quotient
// that is one bit off could round differently. 0 where XLA's threads, which flush subnormal numbers,
// have 0.
inline float step_of(float largest) {
  const float step = largest * (1.0f / 127);
  return step < 0x1p-126f ? 0 : step;
}

// Rounds kRounded numbers; returns their step: 0 for all zeros, NaN if one is not finite.
inline float write_digits(const float* x, int8_t* digit) {
  Floats most = {}, wild = {};  // infinities and NaN make the latter NaN
  for (int64_t i = 0; i < kRounded; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    most = larger(most, magnitude(v));
    wild += v * 0.0f;
  }
  const bool finite = sum(wild) == 0;
  const float step = finite ? step_of(largest(most)) : NAN;
  memset(digit, 0, kRounded);
  if (!finite || step == 0) return step;
  for (int64_t i = 0; i < kRounded; i += kLanes)
    store(digit + i, __builtin_convertvector(to_ints(nearest(load<Floats>(x + i) / step)), Signed));
  return step;
}

// Codes as digits, of step 1.
inline float write_codes(const float* x, int8_t* digit) {
  for (int64_t i = 0; i < kRounded; i += kLanes)
    store(digit + i, __builtin_convertvector(to_ints(larger(load<Floats>(x + i), all_of(-127))), Signed));
  return 1;
}

inline void write_block(const Weight& w, const float* x, bool codes, Digits& out) {
  const bool four = w.kind == Kind::kInt4;
  int8_t digit[kRounded];
  memset(&out, 0, sizeof out);
  out.step = codes ? write_codes(x, digit) : write_digits(x, digit);
  const int32_t offset = four ? (w.zero ? 1 : 8) : kOffset;
  for (int64_t c = 0; c < kChunks; c++) {
    for (int b = 0; b < 8; b++)  // 16 at a time
      memcpy(&out.digit[c][four ? b % 2 * 64 + b / 2 * 16 : b * 16], digit + 128 * c + 16 * b, 16);
    for (int lane = 0; lane < 32; lane++) {
      const int8_t* of = &out.digit[c][4 * lane];
      const int32_t bias = -offset * (of[0] + of[1] + of[2] + of[3]);
      out.bias[c][four ? lane % 16 : lane] += bias;
      out.whole[lane % kLanes] += bias;
    }
  }
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
  const int64_t blocks = (chunks + kChunks - 1) / kChunks;
  const Digits* x = reinterpret_cast<const Digits*>(prepared) + r * blocks;
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
  for (int64_t b = 0; b < blocks; b++) {
    Ints all[O][R];  // exact if the row has one scale
    Floats part[O][R];
    clear(part);
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++) JAXLLM_UNROLL
    for (int j = 0; j < R; j++) all[i][j] = kOffset ? load<Ints>(x[j * blocks + b].whole) : Ints{};
    const int64_t some = chunks - b * kChunks < kChunks ? chunks - b * kChunks : kChunks;
    for (int64_t c = 0; c < some; c++) JAXLLM_UNROLL
    for (int i = 0; i < O; i += P) {
      const uint8_t* line[P];
      JAXLLM_UNROLL
      for (int p = 0; p < P; p++) {
        line[p] = w.data + o[i + p] * w.stride + kChunkBytes * (b * kChunks + c);
        for (int at = 0; at < kChunkBytes; at += 64) ahead(line[p] + at, distance);
      }
      JAXLLM_UNROLL
      for (int v = 0; v < kRegistersOfChunk; v++) {
        Bytes first[P], second[P];
        Floats scale[P];
        Ints zero[P];
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) {
          const int64_t column = 128 * (b * kChunks + c) + v * kColumns;
          const Bytes bytes = codes_at<kBits, kBlocks>(line[p], v * kColumns);
          first[p] = kFour ? bytes & 15 : (kOffset ? bytes ^ uint8_t(kOffset) : bytes);
          if (kFour) second[p] = bytes >> 4;
          if constexpr (kBlocks)
            scale[p] = groups.spread.template apart<(kColumns + 31) / 32>(
                line[p] + v * kColumns / 32 * block_bytes(kBits), block_bytes(kBits));
          else if (!kRow)
            scale[p] = groups.scale(group[i + p], column);
          if (W == Read::kInt4Zero) zero[p] = groups.zero(group[i + p], column);
        }
        JAXLLM_UNROLL
        for (int j = 0; j < R; j++) {
          const Digits& in = x[j * blocks + b];
          const Bytes here = load<Bytes>(&in.digit[c][v * kBytes]);
          Bytes there;
          if (kFour) there = load<Bytes>(&in.digit[c][64 + v * kBytes]);
          Ints bias = {};
          if (kFour || (kOffset && !kRow)) bias = load<Ints>(&in.bias[c][v * kLanes]);
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            if (kRow) {
              add_bytes(all[i + p][j], first[p], here);
              continue;
            }
            Ints t = W == Read::kInt4Zero ? bias * zero[p] : bias;
            if (kFour)
              add_nibbles(t, first[p], second[p], here, there);
            else
              add_bytes(t, first[p], here);
            part[i + p][j] = fma(to_floats(t), scale[p], part[i + p][j]);
          }
        }
      }
    }
    JAXLLM_UNROLL
    for (int i = 0; i < O && Codes; i++) JAXLLM_UNROLL
    for (int j = 0; j < R; j++) exact[i][j] += all[i][j];
    JAXLLM_UNROLL
    for (int i = 0; i < O && !Codes; i++) {
      const Floats scale = all_of(kRow ? scale_at(w, o[i]) : 1);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {  // scaled first: steps may be so large that anything else overflows
        const Floats block = kRow ? to_floats(all[i][j]) * scale : part[i][j];
        total[i][j] = fma(block, all_of(x[j * blocks + b].step), total[i][j]);
      }
    }
  }
  if (!Codes) return put(total, w, o, r, false, y);
  for (int i = 0; i < O; i++) {
    const float scale = w.groups ? scale_at(w, o[i]) : 0;  // there is none without columns
    for (int j = 0; j < R; j++) y[(r + j) * w.rows + o[i]] = float(exact_sum(exact[i][j])) * scale;
  }
}

template <Read W, bool Codes = false>
void multiply_read(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr bool kFour = four_bits(W);
  constexpr int kMost = kRegisters == 32 ? 4 : (kFour ? 1 : 2);
  const Groups groups = groups_of(w, in, kFour ? 2 * kBytes : kBytes);
  const int64_t chunks = up(in.columns, 128) / 128;
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
