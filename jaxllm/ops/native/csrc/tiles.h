// Tiles of O weight rows times R input rows, their sums, and prefetching. Each output has one accumulator over the
// columns in order, so its bits depend on its own two rows only.
#pragma once

#include "convert.h"

namespace jaxllm {
namespace {

template <int N>
struct Int {
  constexpr operator int() const { return N; }
};

// Prefetches a later cache line into L2, which keeps more requests in flight than L1.
JAXLLM_INLINE void prefetch_line(const uint8_t* line, int64_t distance) {
  if (distance) __builtin_prefetch(line + distance, 0, 2);
}

// Its distance: a tile reads four rows, and four times this takes about one memory latency.
inline int64_t prefetch_distance(int64_t stride) { return stride ? 2 << 10 : 0; }

// A tile's O weight rows: o, o + step, ..., clipped to the last row. Consecutive tiles read O distant streams, which
// the hardware prefetchers follow: a core reads 1.1 to 1.2 times as fast as from neighboring rows.
struct TileRows {
  int64_t o, step, last;
  JAXLLM_INLINE int64_t operator[](int i) const { return o + i * step < last ? o + i * step : last; }
};

// A tile's sums stay in registers if all loops over them are unrolled.
template <int O, int R>
JAXLLM_INLINE void clear(Floats (&sum)[O][R]) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) sum[i][j] = Floats{};
}

template <int O, int R>
JAXLLM_INLINE void store_sums(const Floats (&sums)[O][R], const Weight& w, const TileRows& o, int64_t r, bool scaled,
                              float* y) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) JAXLLM_UNROLL
  for (int j = 0; j < R; j++) {
    const float total = reduce_add(sums[i][j]);
    y[(r + j) * w.rows + o[i]] = scaled && w.groups ? total * group_scale(w, o[i]) : total;
  }
}

// Calls tile(Int<O>, Int<R>, rows, r) for weight rows begin <= o < end and all input rows: RowsN weight rows at a time
// with N input rows (Rows2 also with 3, Rows8 with 5 to 8). The last tiles overlap: an output has the same bits in any
// tile.
template <int Rows1, int Rows2, int Rows4, int Rows8 = 0, class Tile>
void for_each_tile(int64_t begin, int64_t end, int64_t rows, const Tile& tile) {
  const auto run_rows = [&](auto R, int64_t r) {
    constexpr int O = R == 1 ? Rows1 : (R < 4 ? Rows2 : (R > 4 ? Rows8 : Rows4));
    const int64_t step = (end - begin) / O;
    for (int64_t i = 0; i < step; i++) tile(Int<O>(), R, TileRows{begin + i, step, end - 1}, r);
    if (begin + O * step < end) tile(Int<O>(), R, TileRows{begin + O * step, 1, end - 1}, r);
  };
  if constexpr (Rows8 > 0) {
    for (int64_t r = 0; r < rows && rows >= 8; r += 8) run_rows(Int<8>(), r + 8 <= rows ? r : rows - 8);
    if (rows == 7) run_rows(Int<7>(), 0);
    if (rows == 6) run_rows(Int<6>(), 0);
    if (rows == 5) run_rows(Int<5>(), 0);
    if (rows > 4) return;
  }
  for (int64_t r = 0; r < rows && rows >= 4; r += 4) run_rows(Int<4>(), r + 4 <= rows ? r : rows - 4);
  if (rows == 3) run_rows(Int<3>(), 0);
  if (rows == 2) run_rows(Int<2>(), 0);
  if (rows == 1) run_rows(Int<1>(), 0);
}

// Weight rows that fit the L2 cache besides the input, in full tiles; at least one tile.
inline int64_t rows_in_cache(int64_t row_bytes) {
  const int64_t rows = (256 << 10) / (row_bytes > 0 ? row_bytes : 1);
  return round_up(rows > 0 ? rows : 1, 4);
}

// Calls run(begin, end) in blocks of that size if the next four input rows read the same weights again.
template <class Run>
void for_each_block(int64_t begin, int64_t end, int64_t row_bytes, int64_t rows, const Run& run) {
  const int64_t block_rows = rows <= 4 ? end - begin : rows_in_cache(row_bytes);
  for (int64_t b = begin; b < end; b += block_rows) run(b, b + block_rows < end ? b + block_rows : end);
}

}  // namespace
}  // namespace jaxllm
