// Attention of bfloat16 queries to a bfloat16 cache, by products of pairs: as in attention.h, but weights are rounded
// to bfloat16 before they multiply values, as in ops/attention.py. Keys are transposed, and values interleaved, so that
// a register holds pairs of numbers of kLanes columns.
#pragma once

#include "softmax.h"

#ifdef JAXLLM_PAIRS

namespace jaxllm {
namespace {

// C[r, c] (+)= sum over p of A[r, p] * B[p, c], p counting pairs: R rows and N registers of columns.
template <int R, int N>
void pairs_product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t pairs, float* c,
                   int64_t c_stride, bool add) {
  Floats sum[R][N];
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++) JAXLLM_UNROLL
  for (int n = 0; n < N; n++) sum[r][n] = add ? load<Floats>(c + r * c_stride + kLanes * n) : Floats{};
  for (int64_t p = 0; p < pairs; p++, b += b_stride) {
    Halves right[N];
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) right[n] = load<Halves>(b + kLanes * n);
    JAXLLM_UNROLL
    for (int r = 0; r < R; r++) {
      const Halves left = Halves(Bits{} + a[r * a_stride + p]);
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) add_pairs(sum[r][n], left, right[n]);
    }
  }
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++) JAXLLM_UNROLL
  for (int n = 0; n < N; n++) store(c + r * c_stride + kLanes * n, sum[r][n]);
}

// The same for any number of rows, and full kHalves of columns.
inline void pairs_products(int64_t rows, int64_t columns, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                           int64_t b_stride, int64_t pairs, float* c, int64_t c_stride, bool add) {
  for (int64_t n = 0; n < columns; n += 4 * kLanes) {
    const bool whole = columns - n >= 4 * kLanes;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      (whole ? pairs_product<4, 4> : pairs_product<4, 2>)(a + r * a_stride, a_stride, b + n, b_stride, pairs,
                                                          c + r * c_stride + n, c_stride, add);
    for (; r < rows; r++)
      (whole ? pairs_product<1, 4> : pairs_product<1, 2>)(a + r * a_stride, a_stride, b + n, b_stride, pairs,
                                                          c + r * c_stride + n, c_stride, add);
  }
}

// Keys of the visible slots, as pairs of channels by slot: out[H / 2][kBlock].
inline void turned_keys(const uint16_t* k, int64_t apart, const Seen& seen, int64_t H, uint32_t* out) {
  for (int64_t j = 0; j < kBlock; j += kLanes)
    for (int64_t h = 0; h < H; h += kHalves) {
      Bits row[kLanes];
      for (int64_t i = 0; i < kLanes; i++)
        row[i] = j + i < seen.count ? load<Bits>(k + seen.slot[j + i] * apart + h) : Bits{};
      transpose(row, out + h / 2 * kBlock + j, kBlock);
    }
}

// Values as pairs of slots by channel: out[kBlock / 2][H]. False if one is not finite.
inline bool paired_values(const uint16_t* v, int64_t apart, const Seen& seen, int64_t H, uint32_t* out) {
  Halves wild = {};
  for (int64_t j = 0; j < kBlock; j += 2)
    for (int64_t h = 0; h < H; h += kHalves) {
      const Halves a = j < seen.count ? load<Halves>(v + seen.slot[j] * apart + h) : Halves{};
      const Halves b = j + 1 < seen.count ? load<Halves>(v + seen.slot[j + 1] * apart + h) : Halves{};
      wild |= Halves((a & 0x7f80) == 0x7f80) | Halves((b & 0x7f80) == 0x7f80);
      Halves first, second;
      interleave(a, b, first, second);
      store(out + j / 2 * H + h, first);
      store(out + j / 2 * H + h + kLanes, second);
    }
  return !any_of(Bits(wild) | Bits(wild) << 16);
}

inline bool in_pairs(const Queries& s, const Part& part) {
  return s.bf16 && s.H % kHalves == 0 && part.kind == Kind::kBF16;
}

// False if a visible value is not finite: it must not reach queries that do not attend to it.
inline bool fold_pairs(const Rows& rows, const Part& part, int64_t begin, int64_t end, Running* running) {
  const Queries& s = rows.s;
  const int64_t H = s.H, count = rows.count(), apart = s.K * H;
  struct Use {};
  uint8_t* memory = space<Use>(4 * (count * kBlock + H * kBlock) + 2 * count * (H + kBlock));
  float* score = reinterpret_cast<float*>(memory);
  uint32_t *k = reinterpret_cast<uint32_t*>(score + count * kBlock), *v = k + H / 2 * kBlock;
  uint16_t *q = reinterpret_cast<uint16_t*>(v + H / 2 * kBlock), *weight = q + count * H;
  for (int64_t i = 0; i < count; i++) memcpy(q + i * H, static_cast<const uint16_t*>(s.q) + rows.at(i), 2 * H);
  const uint16_t* keys =
      static_cast<const uint16_t*>(part.k) + ((part.one_k ? 0 : rows.b * part.slots) * s.K + rows.head) * H;
  const uint16_t* values =
      static_cast<const uint16_t*>(part.v) + ((part.one_v ? 0 : rows.b * part.slots) * s.K + rows.head) * H;
  Seen seen;
  for (int64_t at = begin; at < end; at += kBlock) {
    if (!seen.look(rows, part, at, end)) continue;
    turned_keys(keys, apart, seen, H, k);
    pairs_products(count, kBlock, reinterpret_cast<uint32_t*>(q), H / 2, k, kBlock, H / 2, score, kBlock, false);
    for (int64_t i = 0; i < count; i++) {
      float* line = score + i * kBlock;
      absorb(s, line, nullptr, seen.mask(i / rows.G()), seen.count, running[i], H);
      put_floats(line, kBlock, true, weight, i * kBlock);
    }
    if (!paired_values(values, apart, seen, H, v)) return false;
    // Values of all rows, consecutively.
    pairs_products(count, H, reinterpret_cast<uint32_t*>(weight), kBlock / 2, v, H, (seen.count + 1) / 2,
                   running[0].value, H, true);
  }
  return true;
}

}  // namespace
}  // namespace jaxllm
#endif
