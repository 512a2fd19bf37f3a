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

// A row of keys or values of a lane; null if `mask` hides it.
template <bool Keys>
const uint16_t* halves_at(const Rows& rows, const Part* parts, const Seen& seen, const int32_t* mask, int64_t j) {
  if (!mask[j]) return nullptr;
  const Block::Slot& slot = seen.block->lane[j];
  const Part& part = parts[slot.part];
  const int64_t row = (Keys ? part.one_k : part.one_v) ? 0 : part.row_of(rows.b);
  return static_cast<const uint16_t*>(Keys ? part.k : part.v) +
         ((row * part.slots + slot.slot) * rows.s.K + rows.head) * rows.s.H;
}

// Keys of the visible lanes, as pairs of channels by lane: out[H / 2][kBlock].
inline void turned_keys(const Rows& rows, const Part* parts, const Seen& seen, uint32_t* out) {
  for (int64_t j = 0; j < kBlock; j += kLanes) {
    const uint16_t* key[kLanes];
    for (int64_t i = 0; i < kLanes; i++) key[i] = halves_at<true>(rows, parts, seen, seen.any, j + i);
    for (int64_t h = 0; h < rows.s.H; h += kHalves) {
      Bits row[kLanes];
      for (int64_t i = 0; i < kLanes; i++) row[i] = key[i] ? load<Bits>(key[i] + h) : Bits{};
      transpose(row, out + h / 2 * kBlock + j, kBlock);
    }
  }
}

// Values that `mask` shows, as pairs of lanes by channel: out[lanes / 2][H]. False if one is not finite.
inline bool paired_values(const Rows& rows, const Part* parts, const Seen& seen, const int32_t* mask, uint32_t* out) {
  const int64_t H = rows.s.H;
  Halves wild = {};
  for (int64_t j = 0; j < seen.lanes(); j += 2) {
    const uint16_t *even = halves_at<false>(rows, parts, seen, mask, j),
                   *odd = halves_at<false>(rows, parts, seen, mask, j + 1);
    for (int64_t h = 0; h < H; h += kHalves) {
      const Halves a = even ? load<Halves>(even + h) : Halves{}, b = odd ? load<Halves>(odd + h) : Halves{};
      wild |= Halves((a & 0x7f80) == 0x7f80) | Halves((b & 0x7f80) == 0x7f80);
      Halves first, second;
      interleave(a, b, first, second);
      store(out + j / 2 * H + h, first);
      store(out + j / 2 * H + h + kLanes, second);
    }
  }
  return !any_of(Bits(wild) | Bits(wild) << 16);
}

inline bool in_pairs(const Queries& s, const Part* parts, const Seen& seen) {
  bool all = s.bf16 && s.H % kHalves == 0;
  for (int64_t j = 0; j < kBlock && all; j++)
    if (seen.any[j]) all = parts[seen.block->lane[j].part].kind == Kind::kBF16;
  return all;
}

inline void fold_pairs(const Rows& rows, const Part* parts, const Seen& seen, Running* running) {
  const Queries& s = rows.s;
  const int64_t H = s.H, count = rows.count();
  struct Use {};
  uint8_t* memory = space<Use>(4 * (count * kBlock + H * kBlock) + 2 * count * (H + kBlock));
  float* score = reinterpret_cast<float*>(memory);
  uint32_t *k = reinterpret_cast<uint32_t*>(score + count * kBlock), *v = k + H / 2 * kBlock;
  uint16_t *q = reinterpret_cast<uint16_t*>(v + H / 2 * kBlock), *weight = q + count * H;
  for (int64_t i = 0; i < count; i++) memcpy(q + i * H, static_cast<const uint16_t*>(s.q) + rows.at(i), 2 * H);
  turned_keys(rows, parts, seen, k);
  pairs_products(count, kBlock, reinterpret_cast<uint32_t*>(q), H / 2, k, kBlock, H / 2, score, kBlock, false);
  for (int64_t i = 0; i < count; i++) {
    float* line = score + i * kBlock;
    absorb(s, line, nullptr, seen.mask(i / rows.G()), seen.lanes(), running[i], H);
    put_floats(line, kBlock, true, weight, i * kBlock);
  }
  const uint32_t* all = reinterpret_cast<uint32_t*>(weight);
  // Values of all rows, consecutively.
  if (paired_values(rows, parts, seen, seen.any, v)) {
    pairs_products(count, H, all, kBlock / 2, v, H, seen.lanes() / 2, running[0].value, H, true);
    return;
  }
  for (int64_t i = 0; i < count; i++) {  // 0 times NaN is NaN: each row adds only what it attends to
    paired_values(rows, parts, seen, seen.mask(i / rows.G()), v);
    pairs_products(1, H, all + i * kBlock / 2, kBlock / 2, v, H, seen.lanes() / 2, running[i].value, H, true);
  }
}

}  // namespace
}  // namespace jaxllm
#endif
