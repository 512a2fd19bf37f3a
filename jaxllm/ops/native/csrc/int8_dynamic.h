// Integer weights times inputs rounded to int8 at run time. The sum of a group is an exact integer.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

// 128 columns of an input row. Byte 64 h + j is column 64 h + j for int8 weights, and column 32 (j / 16) + 16 h + j %
// 16 for int4, whose bytes hold two nibbles. For each lane of four bytes (both nibbles): `step`, and `bias`, what the
// weights' offset (or 1 of their zero point) adds. If a row has one scale, the first register of `bias` is the row's
// sum, and steps are 2^24 times smaller, so that sums do not overflow before they are scaled. With weight rows in the
// lanes (int8_blocks.h), the first four of each are those of 32 columns.
template <int Lanes>
struct alignas(64) Int8Chunk {
  int8_t q[128];
  int32_t bias[Lanes];
  float step[Lanes];
};

inline bool uses_int8_input(const Weight& w, const Input& in) { return is_integer(w) && in.quantize; }
inline int64_t chunk_count(const Input& in) { return round_up(in.columns, 128) / 128; }
inline size_t chunk_bytes(const Weight& w) {
  return w.kind == Kind::kInt4 ? sizeof(Int8Chunk<16>) : sizeof(Int8Chunk<32>);
}

// Columns of the input that share a step: a group of the weights, or 128 if a row has one scale.
inline int64_t step_columns(const Weight& w) { return w.groups > 1 ? w.group : 128; }

// The int8 scale, computed as round_to_int8 of weights/linear.py does: one bit off could round differently. 0 if 2^-24
// of it would be subnormal.
inline float int8_step(float max_abs) {
  const float step = max_abs * (1.0f / 127);
  return step < 0x1p-102f ? 0 : step;
}

// Rounds `count` numbers and returns their step: 0 if all are zero, NaN if one is not finite.
inline float quantize_int8(const float* x, int64_t count, int8_t* q) {
  Floats max_abs = {}, non_finite = {};  // infinity times 0 is NaN
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    max_abs = max(max_abs, magnitude(v));
    non_finite += v * 0.0f;
  }
  const bool finite = reduce_add(non_finite) == 0;
  const float step = finite ? int8_step(reduce_max(max_abs)) : NAN;
  memset(q, 0, count);
  if (!finite || step == 0) return step;
  const float inverse = 1 / step;
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats steps = load<Floats>(x + i) * inverse;
    asm("" : "+m"(steps));  // keep compilers from fusing it with the addition
    store(q + i, __builtin_convertvector(to_ints(round_nearest(steps)), Signed));
  }
  return step;
}

// Stores int8 inputs, whose step is 1.
inline float store_codes(const float* x, int64_t count, int8_t* q) {
  for (int64_t i = 0; i < count; i += kLanes)
    store(q + i, __builtin_convertvector(to_ints(max(load<Floats>(x + i), splat(-127))), Signed));
  return 1;
}

template <int Lanes>
void quantize_chunk(const Weight& w, const float* x, bool quantized, Int8Chunk<Lanes>& out) {
  constexpr bool kInt4 = Lanes == 16;
  const bool scaled_by_row = w.groups <= 1 && !kInt4;
  const int64_t count = step_columns(w);
  const int32_t offset = kInt4 ? (w.zero ? 1 : (w.e2m1 ? kLevels[7] : 8)) : kOffset;
  int8_t q[128];
  float step[4];  // of 32 columns
  for (int64_t c = 0; c < 128; c += count) {
    const float step_size = quantized ? store_codes(x + c, count, q + c) : quantize_int8(x + c, count, q + c);
    for (int64_t i = c / 32; i < (c + count) / 32; i++) step[i] = step_size * (scaled_by_row ? 0x1p-24f : 1);
  }
  for (int b = 0; b < 8; b++)  // 16 at a time
    memcpy(&out.q[kInt4 ? b % 2 * 64 + b / 2 * 16 : b * 16], q + 16 * b, 16);
  for (int lane = 0; lane < Lanes; lane++) {
    int32_t sum = 0;
    for (int at = 4 * lane; at < 128; at += 64 * (kInt4 ? 1 : 2))
      sum += out.q[at] + out.q[at + 1] + out.q[at + 2] + out.q[at + 3];
    out.bias[lane] = -offset * sum;
    out.step[lane] = step[lane * 4 / Lanes];
  }
  for (int lane = kLanes; lane < Lanes && scaled_by_row; lane++) out.bias[lane % kLanes] += out.bias[lane];
  if (!kRowsInLanes || !w.blocks) return;
  for (int i = 0; i < 4; i++) {  // of 32 columns
    int32_t sum = 0;
    for (int lane = 0; lane < Lanes / 4; lane++) sum += out.bias[i * Lanes / 4 + lane];
    out.bias[i] = sum;
    out.step[i] = step[i];
  }
}

// Storage format of the weights.
enum class Format { kInt8Row, kInt8, kInt8Blocks, kInt4, kInt4Zero, kInt4Blocks, kE2M1 };

constexpr bool is_int4(Format format) { return format >= Format::kInt4; }

// The exact sum of integers in all lanes.
JAXLLM_INLINE int32_t exact_sum(Ints v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

// Quantized: inputs are int8 and rows have one scale, so that the sums stay integers until the end.
template <int O, int R, Format W, bool Quantized>
void int8_tile(const Weight& w, const Groups& groups, const uint8_t* prepared, int64_t chunks, const TileRows& o,
               int64_t r, float* y) {
  constexpr bool kInt4 = is_int4(W), kRow = W == Format::kInt8Row;
  constexpr bool kBlocks = W == Format::kInt8Blocks || W == Format::kInt4Blocks;
  constexpr int kBits = kInt4 ? 4 : 8, kChunkBytes = kBlocks ? 4 * block_bytes(kBits) : 16 * kBits;
  constexpr int P = O == 1 || kRegisters < 32 ? 1 : 2;  // weight rows that share loads of x
  constexpr int kRegistersOfChunk = (kInt4 ? 64 : 128) / kBytes, kColumns = kInt4 ? 2 * kBytes : kBytes;
  constexpr int kUnit = kRow ? kRegistersOfChunk : 1;  // registers whose lanes share scales and steps
  typedef Int8Chunk<kInt4 ? 16 : 32> In;
  const In* x = reinterpret_cast<const In*>(prepared) + r * chunks;
  const int64_t prefetch = r ? 0 : prefetch_distance(w.stride);
  GroupRow group[O];
  JAXLLM_UNROLL
  for (int i = 0; i < O && !kRow && !kBlocks; i++) group[i] = groups.row(o[i], i);
  Bytes levels = {};  // with the offset that makes them unsigned
  for (int i = 0; i < kBytes && W == Format::kE2M1; i++) levels[i] = uint8_t(kLevels[i % 16] + kLevels[7]);
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
      for (int at = 0; at < kChunkBytes; at += 64) prefetch_line(line[p] + at, prefetch);
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
          const Bytes bytes = load_codes<kBits, kBlocks>(line[p], (v + u) * kColumns);
          first[p][u] = kInt4 ? bytes & 15 : (kOffset ? bytes ^ uint8_t(kOffset) : bytes);
          if (kInt4) second[p] = bytes >> 4;
          if (W == Format::kE2M1) {
            first[p][u] = shuffle_bytes(levels, first[p][u]);
            second[p] = shuffle_bytes(levels, second[p]);
          }
        }
        if constexpr (kBlocks)
          scale[p] = groups.broadcast.template strided<(kColumns + 31) / 32>(
              line[p] + v * kColumns / 32 * block_bytes(kBits), block_bytes(kBits));
        else if (W == Format::kE2M1)
          scale[p] = groups.power(group[i + p], column);
        else if (!kRow)
          scale[p] = groups.scale(group[i + p], column);
        if (W == Format::kInt4Zero) zero[p] = groups.zero(group[i + p], column);
      }
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const In& in = x[j * chunks + c];
        Bytes x_low[kUnit], x_high;
        JAXLLM_UNROLL
        for (int u = 0; u < kUnit; u++) x_low[u] = load<Bytes>(&in.q[(v + u) * kBytes]);
        if (kInt4) x_high = load<Bytes>(&in.q[64 + v * kBytes]);
        Ints bias = {};
        if (kInt4 || kOffset) bias = load<Ints>(&in.bias[v * kLanes]);
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) {
          Ints t = W == Format::kInt4Zero ? bias * zero[p] : bias;
          if (Quantized) t += exact[i + p][j];
          if (kInt4) add_nibbles(t, first[p][0], second[p], x_low[0], x_high);
          JAXLLM_UNROLL
          for (int u = 0; u < kUnit && !kInt4; u++) add_bytes(t, first[p][u], x_low[u]);
          if (Quantized)
            exact[i + p][j] = t;
          else  // scaled first: steps may be so large that anything else overflows
            total[i + p][j] =
                fma(kRow ? to_floats(t) : to_floats(t) * scale[p], load<Floats>(&in.step[v * kLanes]), total[i + p][j]);
        }
      }
    }
  }
  if (!kRow) return store_sums(total, w, o, r, false, y);
  for (int i = 0; i < O; i++) {
    const float scale = w.groups ? group_scale(w, o[i]) : 0;  // there is none without columns
    for (int j = 0; j < R; j++)
      y[(r + j) * w.rows + o[i]] =
          Quantized ? float(exact_sum(exact[i][j])) * scale : reduce_add(total[i][j]) * (scale * 0x1p24f);
  }
}

template <Format W, bool Quantized = false>
void multiply_format(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr bool kInt4 = is_int4(W);
  constexpr int kTileRows = kRegisters == 32 ? 4 : (kInt4 ? 1 : 2);
  const Groups groups = make_groups(w, in, kInt4 ? 2 * kBytes : kBytes);
  const int64_t chunks = chunk_count(in);
  for_each_block(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    for_each_tile<4, kTileRows, kTileRows>(begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
      int8_tile<O, R, W, Quantized>(w, groups, x, chunks, o, r, y);
    });
  });
}

inline void multiply_int8(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if constexpr (!kRowsInLanes)  // else int8_blocks.h
    if (w.blocks)
      return w.kind == Kind::kInt4 ? multiply_format<Format::kInt4Blocks>(w, in, x, begin, end, y)
                                   : multiply_format<Format::kInt8Blocks>(w, in, x, begin, end, y);
  if (w.kind == Kind::kInt4)
    return w.zero   ? multiply_format<Format::kInt4Zero>(w, in, x, begin, end, y)
           : w.e2m1 ? multiply_format<Format::kE2M1>(w, in, x, begin, end, y)
                    : multiply_format<Format::kInt4>(w, in, x, begin, end, y);
  if (w.groups > 1) return multiply_format<Format::kInt8>(w, in, x, begin, end, y);
  return in.quantized ? multiply_format<Format::kInt8Row, true>(w, in, x, begin, end, y)
                      : multiply_format<Format::kInt8Row>(w, in, x, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
