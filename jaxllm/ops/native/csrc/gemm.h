// Products of two matrices in any layout, A [M, K] times B [K, N], as training needs them.
//
// A task computes a block of the result. It copies as many columns of both as the caches hold to tiles of 16 by 16
// units of four bytes: a float, or two bfloat16 that are neighbors in K. A line of A's tiles is a row of A, a line of
// B's a row (or pair of rows) of B. Floats are multiplied by vectors, bfloat16 by the matrix unit. Outputs add in the
// order of K, so their bits depend on their own row and column only.
#pragma once

#include "matrix_unit.h"

namespace jaxllm {
namespace {

constexpr int64_t kTileBytes = kTile * 64;
constexpr int64_t kDepth = 8, kWidth = 3;  // tiles of K that are copied at once; of N that floats multiply at once

// Loads 64 bytes, zero padded after `bytes`.
JAXLLM_INLINE Bits load_padded(const uint8_t* from, int64_t bytes) {
  if (bytes >= 64) return load<Bits>(from);
  alignas(64) uint8_t line[64] = {};
  if (bytes > 0) memcpy(line, from, bytes);
  return load<Bits>(line);
}

// Line i of the tile of rows (columns of B) x and units u on: of one row, or for `transposed` of one unit.
JAXLLM_INLINE Bits line_of(const Operand& s, int64_t x, int64_t u, int64_t i) {
  const int64_t size = s.bf16 ? 2 : 4, k = s.bf16 ? 2 * u : u;
  if (!s.transposed) {
    if (x + i >= s.rows) return Bits{};
    return load_padded(s.data + ((x + i) * s.depth + k) * size, (s.depth - k) * size);
  }
  const auto at = [&](int64_t k) {
    return k < s.depth ? load_padded(s.data + (k * s.rows + x) * size, (s.rows - x) * size) : Bits{};
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

inline void copy_tile(const Operand& s, int64_t x, int64_t u, bool transpose_it, uint8_t* to) {
  Bits line[kTile];
  JAXLLM_UNROLL
  for (int64_t i = 0; i < kTile; i++) line[i] = line_of(s, x, u, i);
  if (transpose_it) return transpose(line, reinterpret_cast<uint32_t*>(to), kTile);
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
        const Floats x = splat(a[i * kTile + k]);
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

// The same for bfloat16: O by S tiles of sums.
template <int O, int S>
void add_pairs_of_tiles(const uint8_t* a, const uint8_t* b, int64_t depth, int64_t a_stride, int64_t b_stride,
                        float* sums, int64_t stride) {
  const auto at = [&](int i, int j) { return sums + (i * stride + j) * kTile; };
  for_each_sums<O, S>([&](auto T, int i, int j) { load_tile<T>(at(i, j), 4 * stride); });
  for (int64_t t = 0; t < depth; t++, a += kTileBytes, b += kTileBytes) {
    load_tile<4>(a, 64);
    if constexpr (O > 1) load_tile<5>(a + a_stride, 64);
    load_tile<6>(b, 64);
    if constexpr (S > 1) load_tile<7>(b + b_stride, 64);
    for_each_sums<O, S>([](auto T, int, int) { add_tiles<true, T, 4 + T / 2, 6 + T % 2>(); });
  }
  for_each_sums<O, S>([&](auto T, int i, int j) { store_tile<T>(at(i, j), 4 * stride); });
}

// Computes rows m to m_end and columns n to n_end of the result.
inline void multiply_operands(const Operand& a, const Operand& b, int64_t m, int64_t m_end, int64_t n, int64_t n_end,
                              void* y) {
  const int64_t units = round_up(a.depth, a.bf16 ? 2 : 1) / (a.bf16 ? 2 : 1), pass = kDepth * (a.bf16 ? 2 : 1);
  const int64_t tiles_m = round_up(m_end - m, kTile) / kTile, tiles_n = round_up(n_end - n, kTile) / kTile;
  const int64_t stride = tiles_n * kTile + kTile, panel = pass * kTileBytes;
  struct Scratch {};
  uint8_t* a_tiles = thread_scratch<Scratch>((tiles_m + tiles_n) * panel + 4 * tiles_m * kTile * stride);
  uint8_t* b_tiles = a_tiles + tiles_m * panel;
  float* sums = reinterpret_cast<float*>(b_tiles + tiles_n * panel);
  memset(sums, 0, 4 * tiles_m * kTile * stride);
  for (int64_t u = 0; u < units; u += pass * kTile) {
    const int64_t rest = round_up(units - u, kTile) / kTile, depth = rest < pass ? rest : pass;
    for (int64_t t = 0; t < depth; t++) {
      for (int64_t i = 0; i < tiles_m; i++)
        copy_tile(a, m + i * kTile, u + t * kTile, a.transposed, a_tiles + i * panel + t * kTileBytes);
      for (int64_t j = 0; j < tiles_n; j++)
        copy_tile(b, n + j * kTile, u + t * kTile, !b.transposed, b_tiles + j * panel + t * kTileBytes);
    }
    if (a.bf16) {
      const MatrixUnit on{64};
      for (int64_t j = 0; j < tiles_n; j += 2)
        for (int64_t i = 0; i < tiles_m; i += 2) {
          const auto add = [&](auto O, auto S) {
            add_pairs_of_tiles<O, S>(a_tiles + i * panel, b_tiles + j * panel, depth, panel, panel,
                                     sums + (i * stride + j) * kTile, stride);
          };
          const bool two_m = i + 1 < tiles_m, two_n = j + 1 < tiles_n;
          two_m ? (two_n ? add(Int<2>(), Int<2>()) : add(Int<2>(), Int<1>()))
                : (two_n ? add(Int<1>(), Int<2>()) : add(Int<1>(), Int<1>()));
        }
      continue;
    }
    for (int64_t j = 0; j < tiles_n; j += kWidth)
      for (int64_t i = 0; i < 2 * tiles_m; i++) {
        const auto add = [&](auto W) {
          add_floats<W>(reinterpret_cast<float*>(a_tiles + i / 2 * panel) + i % 2 * kTileFloats / 2,
                        reinterpret_cast<float*>(b_tiles + j * panel), depth, panel / 4,
                        sums + i * 8 * stride + j * kTile, stride);
        };
        tiles_n - j >= kWidth ? add(Int<kWidth>()) : (tiles_n - j == 2 ? add(Int<2>()) : add(Int<1>()));
      }
  }
  for (int64_t i = m; i < m_end; i++) store_floats(sums + (i - m) * stride, n_end - n, a.bf16, y, i * b.rows + n);
}

}  // namespace
}  // namespace jaxllm
