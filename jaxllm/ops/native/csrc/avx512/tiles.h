// Tiles of O weight rows times R input rows: how a range is cut into them, what they sum into, and
// how memory is asked for ahead.
#define JAXLLM_UNROLL _Pragma("GCC unroll 8")

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows are short and several are walked at once, so the processor's own prefetchers see little but
// beginnings. Each line that is read asks for the one that a later tile will read in its place;
// into the second cache, which keeps more requests in flight than the first.
inline void ahead(const uint8_t* line, int64_t distance) {
  if (distance) _mm_prefetch(reinterpret_cast<const char*>(line + distance), _MM_HINT_T1);
}

// From a tile to that later one, in whole tiles of four rows: at least 8 kB, which are read about as
// fast as memory answers.
int64_t distance_of(int64_t stride) { return stride ? up(8 << 10, 4 * stride) : 0; }

// A tile's sums, one for each of its outputs: kept in registers where all loops over them are
// unrolled.
template <int O, int R>
inline void clear(__m512 (&sum)[O][R]) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++)
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) sum[i][j] = _mm512_setzero_ps();
}

template <int O, int R>
inline void put(const __m512 (&sum)[O][R], const Weight& w, int64_t o, int64_t r, float* y) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++)
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) y[(r + j) * w.rows + o + i] = _mm512_reduce_add_ps(sum[i][j]);
}

// Times the one scale of each weight row.
template <int O, int R>
inline void scale_rows(__m512 (&sum)[O][R], const Weight& w, int64_t o) {
  if (!w.groups) return;  // nor columns
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++)
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) sum[i][j] = _mm512_mul_ps(sum[i][j], _mm512_set1_ps(scale_at(w, o + i)));
}

// Calls tile<O, R>(o, r) over begin <= o < end and all rows: four by four (or two by four), and what
// is left over.
template <int Most = 4, class Tile>
void tiles(int64_t begin, int64_t end, int64_t rows, const Tile& tile) {
  const auto down = [&](auto R, int64_t r) {
    constexpr int O = R == 1 ? 4 : Most;
    int64_t o = begin;
    for (; o + O <= end; o += O) tile(std::integral_constant<int, O>(), R, o, r);
    for (; o < end; o++) tile(std::integral_constant<int, 1>(), R, o, r);
  };
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) down(std::integral_constant<int, 4>(), r);
  switch (rows - r) {
    case 3: return down(std::integral_constant<int, 3>(), r);
    case 2: return down(std::integral_constant<int, 2>(), r);
    case 1: return down(std::integral_constant<int, 1>(), r);
  }
}

// As many weight rows as the second cache holds beside the input, in whole tiles; never none.
int64_t rows_in_cache(int64_t row_bytes) {
  const int64_t most = (256 << 10) / (row_bytes > 0 ? row_bytes : 1);
  return up(most > 0 ? most : 1, 4);
}

// The same by as many at once as that, where they are needed again for the next four input rows.
template <class Tiles>
void blocks(int64_t begin, int64_t end, int64_t row_bytes, int64_t rows, const Tiles& some) {
  const int64_t most = rows <= 4 ? end - begin : rows_in_cache(row_bytes);
  for (int64_t b = begin; b < end; b += most) some(b, b + most < end ? b + most : end);
}
