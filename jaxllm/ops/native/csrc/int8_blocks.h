// GGUF's blocks of 32 columns (Q8_0, Q4_0) times inputs rounded to int8, with a weight row in each lane. A block's
// products then add up to one integer a lane, which is scaled once; with columns in the lanes, as in int8_dynamic.h,
// every four products are scaled. An output has one sum over the blocks in order, for any number of input rows.
#pragma once

#include "int8_dynamic.h"

namespace jaxllm {
namespace {

#ifdef JAXLLM_ROWS_IN_LANES
constexpr int kPassBlocks = 32;  // that fit L1 when transposed

struct BlockTile {
  alignas(64) uint8_t codes[kPassBlocks][8 * kBytes];
  alignas(64) float scale[kPassBlocks][kLanes];
};

// Reads block b of each row from `line` on: four columns of all rows in each register, in order.
template <bool Int4>
JAXLLM_INLINE void read_block(const uint8_t* const (&line)[kLanes], int64_t b, int64_t prefetch, Bytes (&codes)[8],
                              Floats& scale) {
  constexpr int kBlock = block_bytes(Int4 ? 4 : 8);
  const uint8_t* from[kLanes];
  uint16_t scales[kLanes];
  JAXLLM_UNROLL
  for (int i = 0; i < kLanes; i++) {
    from[i] = line[i] + b * kBlock + 2;
    memcpy(&scales[i], line[row_of_lane(i)] + b * kBlock, 2);
  }
  if (b * kBlock % 64 < kBlock) {
    JAXLLM_UNROLL
    for (int i = 0; i < kLanes; i++) prefetch_line(from[i], prefetch);
  }
  Bytes words[Int4 ? 4 : 8];
  words_of_rows(from, words);
  JAXLLM_UNROLL
  for (int k = 0; k < 8; k++)
    codes[k] = Int4 ? (k < 4 ? words[k] & 15 : words[k % 4] >> 4) : words[k] ^ uint8_t(kOffset);
  scale = from_f16(scales);
}

// Adds the products of block b and R input rows.
template <bool Int4, int R, class In>
JAXLLM_INLINE void add_block(const Bytes (&codes)[8], Floats scale, const In* x, int64_t chunks, int64_t b,
                             Floats (&sum)[R]) {
  const int64_t i = b % 4;
  JAXLLM_UNROLL
  for (int j = 0; j < R; j++) {
    const In& in = x[j * chunks + b / 4];
    Ints dot = Ints{} + in.bias[i];
    JAXLLM_UNROLL
    for (int k = 0; k < 8; k++) add_word(dot, codes[k], &in.q[Int4 ? k / 4 * 64 + 16 * i + k % 4 * 4 : 32 * i + 4 * k]);
    sum[j] = fma(to_floats(dot) * scale, splat(in.step[i]), sum[j]);
  }
}

template <int R>
JAXLLM_INLINE void store_lanes(const Floats (&sum)[R], const Weight& w, const TileRows& o, int64_t r, float* y) {
  for (int j = 0; j < R; j++)
    for (int i = 0; i < kLanes; i++) y[(r + j) * w.rows + o[row_of_lane(i)]] = sum[j][i];
}

// Few input rows: each block is multiplied as it is read.
template <bool Int4, int R, class In>
void block_tile(const Weight& w, const In* x, int64_t chunks, const TileRows& o, int64_t r, float* y) {
  const int64_t prefetch = prefetch_distance(w.stride);
  const uint8_t* line[kLanes];
  for (int i = 0; i < kLanes; i++) line[i] = w.data + o[i] * w.stride;
  Floats sum[R] = {};
  for (int64_t b = 0; b < round_up(w.columns, 32) / 32; b++) {
    Bytes codes[8];
    Floats scale;
    read_block<Int4>(line, b, prefetch, codes, scale);
    add_block<Int4>(codes, scale, x + r * chunks, chunks, b, sum);
  }
  store_lanes(sum, w, o, r, y);
}

// Adds the products of blocks `first` to `end`, which the tile has, to the sums of R input rows.
template <bool Int4, int R, class In>
void add_blocks(const BlockTile& tile, const In* x, int64_t chunks, int64_t first, int64_t end, Floats* sums) {
  Floats sum[R];
  JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[j] = first ? sums[j] : Floats{};
  for (int64_t b = first; b < end; b++) {
    Bytes codes[8];
    JAXLLM_UNROLL
    for (int k = 0; k < 8; k++) codes[k] = load<Bytes>(&tile.codes[b - first][k * kBytes]);
    add_block<Int4>(codes, load<Floats>(tile.scale[b - first]), x, chunks, b, sum);
  }
  JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sums[j] = sum[j];
}

// Many input rows: blocks are transposed once for all of them, or for those that stay in L2.
template <bool Int4, class In>
void multiply_transposed(const Weight& w, const In* all, int64_t chunks, const TileRows& o, int64_t from, int64_t to,
                         float* y) {
  const int64_t rows = to - from, blocks = round_up(w.columns, 32) / 32;
  BlockTile& tile = *reinterpret_cast<BlockTile*>(thread_scratch<BlockTile>(sizeof(BlockTile) + rows * sizeof(Floats)));
  Floats* sums = reinterpret_cast<Floats*>(&tile + 1);
  const uint8_t* line[kLanes];
  for (int i = 0; i < kLanes; i++) line[i] = w.data + o[i] * w.stride;
  int64_t first = 0;
  do {
    const int64_t end = blocks - first < kPassBlocks ? blocks : first + kPassBlocks;
    for (int64_t b = first; b < end; b++) {
      Bytes codes[8];
      Floats scale;
      read_block<Int4>(line, b, prefetch_distance(w.stride), codes, scale);
      JAXLLM_UNROLL
      for (int k = 0; k < 8; k++) store(&tile.codes[b - first][k * kBytes], codes[k]);
      store(tile.scale[b - first], scale);
    }
    int64_t r = from;
    for (; r + 8 <= to; r += 8) add_blocks<Int4, 8>(tile, all + r * chunks, chunks, first, end, sums + r - from);
    for (; r + 4 <= to; r += 4) add_blocks<Int4, 4>(tile, all + r * chunks, chunks, first, end, sums + r - from);
    for (; r < to; r++) add_blocks<Int4, 1>(tile, all + r * chunks, chunks, first, end, sums + r - from);
    first = end;
  } while (first < blocks);
  for (int64_t r = from; r < to; r++)
    for (int i = 0; i < kLanes; i++) y[r * w.rows + o[row_of_lane(i)]] = sums[r - from][i];
}

template <bool Int4>
void multiply_blocks(const Weight& w, const Input& in, const uint8_t* prepared, int64_t begin, int64_t end, float* y) {
  typedef Int8Chunk<Int4 ? 16 : 32> In;
  const In* x = reinterpret_cast<const In*>(prepared);
  const int64_t chunks = chunk_count(in);
  if (in.rows <= 4)
    return for_each_tile<kLanes, kLanes, kLanes>(begin, end, in.rows, [&](auto, auto R, const TileRows& o, int64_t r) {
      block_tile<Int4, R>(w, x, chunks, o, r, y);
    });
  const int64_t in_cache = (512 << 10) / int64_t(chunks * sizeof(In) + 1) / 8 * 8 + 8;  // input rows
  for (int64_t r = 0; r < in.rows; r += in_cache)
    for_each_tile<kLanes, 1, 1>(begin, end, 1, [&](auto, auto, const TileRows& o, int64_t) {
      multiply_transposed<Int4>(w, x, chunks, o, r, r + in_cache < in.rows ? r + in_cache : in.rows, y);
    });
}
#endif

inline void multiply_rounded(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
#ifdef JAXLLM_ROWS_IN_LANES
  if (w.blocks)
    return w.kind == Kind::kInt4 ? multiply_blocks<true>(w, in, x, begin, end, y)
                                 : multiply_blocks<false>(w, in, x, begin, end, y);
#endif
  multiply_int8(w, in, x, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
