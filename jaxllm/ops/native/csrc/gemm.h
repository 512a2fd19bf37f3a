// Products of two matrices in any layout, A [M, K] times B [K, N], as training needs them.
//
// A task computes a block of the result. It copies the columns it needs of both, as many as the caches hold, to tiles
// of 16 by 16 units of four bytes: a float, or two bfloat16 that are neighbors in K. A's tiles have a row of A in each
// line, B's tiles a row of B (or a pair of rows). Floats are multiplied by vectors, bfloat16 by the matrix unit. Every
// output adds in the order of K, so its bits depend on nothing but its own row and column.
#pragma once

#include "matrices.h"

namespace jaxllm {
namespace {

constexpr int64_t kTileBytes = kTile * 64;
constexpr int64_t kDepth = 8, kWidth = 3;  // tiles of K that are copied at once; of N that floats multiply at once

// 16 floats, or pairs of bfloat16, of which there are `bytes`; then zeros.
JAXLLM_INLINE Bits some_line(const uint8_t* from, int64_t bytes) {
  if (bytes >= 64) return load<Bits>(from);
  alignas(64) uint8_t line[64] = {};
  if (bytes > 0) memcpy(line, from, bytes);
  return load<Bits>(line);
}

// Line i of the tile of rows (columns of B) x and units u on: of one row, or for `by_depth` of one unit.
JAXLLM_INLINE Bits line_of(const Side& s, int64_t x, int64_t u, int64_t i) {
  const int64_t size = s.bf16 ? 2 : 4, k = s.bf16 ? 2 * u : u;
  if (!s.by_depth) {
    if (x + i >= s.rows) return Bits{};
    return some_line(s.data + ((x + i) * s.depth + k) * size, (s.depth - k) * size);
  }
  const auto at = [&](int64_t k) {
    return k < s.depth ? some_line(s.data + (k * s.rows + x) * size, (s.rows - x) * size) : Bits{};
  };
  if (!s.bf16) return at(k + i);
  const auto half = [&](int64_t k) {  // 16 numbers to 16 lanes
    if (k < s.depth && s.rows - x >= kTile)
      return __builtin_convertvector(load<Words>(s.data + (k * s.rows + x) * 2), Bits);
    const Bits both = at(k);
    return __builtin_convertvector(load<Words>(&both), Bits);
  };
  return half(k + 2 * i) | half(k + 2 * i + 1) << 16;
}

inline void copy_tile(const Side& s, int64_t x, int64_t u, bool turned, uint8_t* to) {
  Bits line[kTile];
  JAXLLM_UNROLL
  for (int64_t i = 0; i < kTile; i++) line[i] = line_of(s, x, u, i);
  if (turned) return transpose(line, reinterpret_cast<uint32_t*>(to), kTile);
  JAXLLM_UNROLL
  for (int64_t i = 0; i < kTile; i++) store(to + 64 * i, line[i]);
}

// Adds 8 rows of A times W tiles of B to sums, `depth` tiles of K. Tiles of one row of tiles follow each other.
template <int W>
void add_floats(const float* a, const float* b, int64_t depth, int64_t b_stride, float* sums, int64_t stride) {
  constexpr int kRows = 8;
  Floats sum[kRows][W] = {};
  for (int64_t t = 0; t < depth; t++, a += kTileFloats, b += kTileFloats)
    for (int k = 0; k < kTile; k++) {
      Floats w[W];
      JAXLLM_UNROLL
      for (int j = 0; j < W; j++) w[j] = load<Floats>(b + j * b_stride + k * kTile);
      JAXLLM_UNROLL
      for (int i = 0; i < kRows; i++) {
        const Floats x = all_of(a[i * kTile + k]);
        JAXLLM_UNROLL
        for (int j = 0; j < W; j++) sum[i][j] = fma(x, w[j], sum[i][j]);
      }
    }
  JAXLLM_UNROLL
  for (int i = 0; i < kRows; i++) JAXLLM_UNROLL
  for (int j = 0; j < W; j++) {
    float* to = sums + i * stride + j * kTile;
    store(to, load<Floats>(to) + sum[i][j]);
  }
}

// The same of two rows of tiles of each, or one.
template <int O, int S>
void add_pairs_of_tiles(const uint8_t* a, const uint8_t* b, int64_t depth, int64_t a_stride, int64_t b_stride,
                        float* sums, int64_t stride) {
  const auto at = [&](int i, int j) { return sums + (i * stride + j) * kTile; };
  each_sum<O, S>([&](auto T, int i, int j) { load_tile<T>(at(i, j), 4 * stride); });
  for (int64_t t = 0; t < depth; t++, a += kTileBytes, b += kTileBytes) {
    load_tile<4>(a, 64);
    if constexpr (O > 1) load_tile<5>(a + a_stride, 64);
    load_tile<6>(b, 64);
    if constexpr (S > 1) load_tile<7>(b + b_stride, 64);
    each_sum<O, S>([](auto T, int, int) { add_tiles<true, T, 4 + T / 2, 6 + T % 2>(); });
  }
  each_sum<O, S>([&](auto T, int i, int j) { store_tile<T>(at(i, j), 4 * stride); });
}

// Rows m to m_end of the result and its columns n to n_end.
inline void multiply_sides(const Side& a, const Side& b, int64_t m, int64_t m_end, int64_t n, int64_t n_end, void* y) {
  const int64_t units = up(a.depth, a.bf16 ? 2 : 1) / (a.bf16 ? 2 : 1), pass = kDepth * (a.bf16 ? 2 : 1);
  const int64_t tall = up(m_end - m, kTile) / kTile, wide = up(n_end - n, kTile) / kTile;
  const int64_t stride = wide * kTile + kTile, panel = pass * kTileBytes;
  struct Use {};
  uint8_t* memory = space<Use>((tall + wide) * panel + 4 * tall * kTile * stride);
  uint8_t* of_b = memory + tall * panel;
  float* sums = reinterpret_cast<float*>(of_b + wide * panel);
  memset(sums, 0, 4 * tall * kTile * stride);
  for (int64_t u = 0; u < units; u += pass * kTile) {
    const int64_t left = up(units - u, kTile) / kTile, depth = left < pass ? left : pass;
    for (int64_t t = 0; t < depth; t++) {
      for (int64_t i = 0; i < tall; i++)
        copy_tile(a, m + i * kTile, u + t * kTile, a.by_depth, memory + i * panel + t * kTileBytes);
      for (int64_t j = 0; j < wide; j++)
        copy_tile(b, n + j * kTile, u + t * kTile, !b.by_depth, of_b + j * panel + t * kTileBytes);
    }
    if (a.bf16) {
      const MatrixUnit on{64};
      for (int64_t j = 0; j < wide; j += 2)
        for (int64_t i = 0; i < tall; i += 2) {
          const auto add = [&](auto O, auto S) {
            add_pairs_of_tiles<O, S>(memory + i * panel, of_b + j * panel, depth, panel, panel,
                                     sums + (i * stride + j) * kTile, stride);
          };
          const bool low = i + 1 < tall, right = j + 1 < wide;
          low ? (right ? add(Int<2>(), Int<2>()) : add(Int<2>(), Int<1>()))
              : (right ? add(Int<1>(), Int<2>()) : add(Int<1>(), Int<1>()));
        }
      continue;
    }
    for (int64_t j = 0; j < wide; j += kWidth)
      for (int64_t i = 0; i < 2 * tall; i++) {
        const auto add = [&](auto W) {
          add_floats<W>(reinterpret_cast<float*>(memory + i / 2 * panel) + i % 2 * kTileFloats / 2,
                        reinterpret_cast<float*>(of_b + j * panel), depth, panel / 4, sums + i * 8 * stride + j * kTile,
                        stride);
        };
        wide - j >= kWidth ? add(Int<kWidth>()) : (wide - j == 2 ? add(Int<2>()) : add(Int<1>()));
      }
  }
  for (int64_t i = m; i < m_end; i++) put_floats(sums + (i - m) * stride, n_end - n, a.bf16, y, i * b.rows + n);
}

}  // namespace
}  // namespace jaxllm
