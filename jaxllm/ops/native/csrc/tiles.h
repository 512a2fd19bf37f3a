// Tiles of O weight rows times R input rows: how a range is divided into them, their sums, and
// prefetching. Each output has one accumulator that walks the columns in order, so its bits depend on nothing
// but its own two rows.
#pragma once

#include "numbers.h"

namespace jaxllm {
namespace {

template <int N>
struct Int {
  constexpr operator int() const { return N; }
};

// Each line that is read prefetches a later one into the L2 cache, which keeps more requests in flight than L1.
JAXLLM_INLINE void ahead(const uint8_t* line, int64_t distance) {
  if (distance) __builtin_prefetch(line + distance, 0, 2);
}

// Distance to that later line. Reading so much takes about one memory latency, since a tile's rows are four times it.
inline int64_t distance_of(int64_t stride) { return stride ? 2 << 10 : 0; }

// A tile's O weight rows: o, o + step, ... They are far from each other, and the next tile's follow them. So memory is
// read in O streams without gaps, each in pages of its own, which the processor's own prefetchers follow: a core
// reads 1.1 to 1.2 times as fast as from neighboring rows. Beyond the last row, it is repeated.
struct TileRows {
  int64_t o, step, last;
  JAXLLM_INLINE int64_t operator[](int i) const { return o + i * step < last ? o + i * step : last; }
};

// A tile's sums, one for each of its outputs: kept in registers where all loops over them are
// unrolled.
template <int O, int R>
JAXLLM_INLINE void clear(Floats (&sum)[O][R]) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[i][j] = Floats{};
}

template <int O, int R>
JAXLLM_INLINE void put(const Floats (&of)[O][R], const Weight& w, const TileRows& o, int64_t r, bool scaled, float* y) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) {
    const float whole = sum(of[i][j]);
    y[(r + j) * w.rows + o[i]] = scaled && w.groups ? whole * scale_at(w, o[i]) : whole;
  }
}

// Calls tile(Int<O>, Int<R>, rows, r) over rows begin <= o < end and all rows: `Most` by four, `Few` by two or three,
// `One` by one; if `Eight` is not 0, more than four rows by up to eight, `Eight` weight rows at once. The last rows are
// computed in overlapping tiles: an output's bits are the same in any tile.
template <int One, int Few, int Most, int Eight = 0, class Tile>
void tiles(int64_t begin, int64_t end, int64_t rows, const Tile& tile) {
  const auto down = [&](auto R, int64_t r) {
    constexpr int O = R == 1 ? One : (R < 4 ? Few : (R > 4 ? Eight : Most));
    const int64_t step = (end - begin) / O;
    for (int64_t i = 0; i < step; i++) tile(Int<O>(), R, TileRows{begin + i, step, end - 1}, r);
    if (begin + O * step < end) tile(Int<O>(), R, TileRows{begin + O * step, 1, end - 1}, r);
  };
  if constexpr (Eight > 0) {
    for (int64_t r = 0; r < rows && rows >= 8; r += 8) down(Int<8>(), r + 8 <= rows ? r : rows - 8);
    if (rows == 7) down(Int<7>(), 0);
    if (rows == 6) down(Int<6>(), 0);
    if (rows == 5) down(Int<5>(), 0);
    if (rows > 4) return;
  }
  for (int64_t r = 0; r < rows && rows >= 4; r += 4) down(Int<4>(), r + 4 <= rows ? r : rows - 4);
  if (rows == 3) down(Int<3>(), 0);
  if (rows == 2) down(Int<2>(), 0);
  if (rows == 1) down(Int<1>(), 0);
}

// As many weight rows as the L2 cache holds besides the input, in full tiles; at least one tile.
inline int64_t rows_in_cache(int64_t row_bytes) {
  const int64_t most = (256 << 10) / (row_bytes > 0 ? row_bytes : 1);
  return up(most > 0 ? most : 1, 4);
}

// some(begin, end) in blocks of that size, if rows are needed again for the next four input rows.
template <class Some>
void blocks(int64_t begin, int64_t end, int64_t row_bytes, int64_t rows, const Some& some) {
  const int64_t most = rows <= 4 ? end - begin : rows_in_cache(row_bytes);
  for (int64_t b = begin; b < end; b += most) some(b, b + most < end ? b + most : end);
}

}  // namespace
}  // namespace jaxllm
