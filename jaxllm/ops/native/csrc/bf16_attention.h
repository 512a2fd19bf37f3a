// Attention of bfloat16 queries to a bfloat16 cache by dot products of pairs. As in ops/attention.py, weights are
// rounded to bfloat16. Keys are transposed and values interleaved, so that a register holds pairs of kLanes columns.
#pragma once

#include "online_softmax.h"

#ifdef JAXLLM_PAIRS

namespace jaxllm {
namespace {

// C[r, c] (+)= sum over p of A[r, p] * B[p, c], p counting pairs: R rows and N registers of columns.
template <int R, int N>
void bf16_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t pairs, float* c,
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

// For any number of rows, and a multiple of kHalves columns.
inline void bf16_matmul(int64_t rows, int64_t columns, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                        int64_t b_stride, int64_t pairs, float* c, int64_t c_stride, bool add) {
  for (int64_t n = 0; n < columns; n += 4 * kLanes) {
    const bool full = columns - n >= 4 * kLanes;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      (full ? bf16_tile<4, 4> : bf16_tile<4, 2>)(a + r * a_stride, a_stride, b + n, b_stride, pairs,
                                                 c + r * c_stride + n, c_stride, add);
    for (; r < rows; r++)
      (full ? bf16_tile<1, 4> : bf16_tile<1, 2>)(a + r * a_stride, a_stride, b + n, b_stride, pairs,
                                                 c + r * c_stride + n, c_stride, add);
  }
}

// The key or value of a lane; null if `mask` hides it.
template <bool Keys>
const uint16_t* lane_numbers(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible,
                             const int32_t* mask, int64_t j) {
  if (!mask[j]) return nullptr;
  const Block::Slot& slot = visible.block->lane[j];
  const CachePart& part = parts[slot.part];
  const int64_t row = (Keys ? part.shared_k : part.shared_v) ? 0 : slot.row;
  return static_cast<const uint16_t*>(Keys ? part.k : part.v) +
         ((row * part.slots + slot.slot) * rows.s.K + rows.head) * rows.s.H;
}

// Keys of the visible lanes, as pairs of channels by lane: out[H / 2][kBlock].
inline void transpose_keys(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible, uint32_t* out) {
  for (int64_t j = 0; j < kBlock; j += kLanes) {
    const uint16_t* key[kLanes];
    for (int64_t i = 0; i < kLanes; i++) key[i] = lane_numbers<true>(rows, parts, visible, visible.any, j + i);
    for (int64_t h = 0; h < rows.s.H; h += kHalves) {
      Bits row[kLanes];
      for (int64_t i = 0; i < kLanes; i++) row[i] = key[i] ? load<Bits>(key[i] + h) : Bits{};
      transpose(row, out + h / 2 * kBlock + j, kBlock);
    }
  }
}

// Values that `mask` selects, as pairs of lanes by channel: out[lanes / 2][H]. False if one is not finite.
inline bool interleave_values(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible,
                              const int32_t* mask, uint32_t* out) {
  const int64_t H = rows.s.H;
  Halves non_finite = {};
  for (int64_t j = 0; j < visible.lanes(); j += 2) {
    const uint16_t *even = lane_numbers<false>(rows, parts, visible, mask, j),
                   *odd = lane_numbers<false>(rows, parts, visible, mask, j + 1);
    for (int64_t h = 0; h < H; h += kHalves) {
      const Halves a = even ? load<Halves>(even + h) : Halves{}, b = odd ? load<Halves>(odd + h) : Halves{};
      non_finite |= Halves((a & 0x7f80) == 0x7f80) | Halves((b & 0x7f80) == 0x7f80);
      Halves first, second;
      interleave(a, b, first, second);
      store(out + j / 2 * H + h, first);
      store(out + j / 2 * H + h + kLanes, second);
    }
  }
  return !any_of(Bits(non_finite) | Bits(non_finite) << 16);
}

inline bool all_in_bf16(const Queries& s, const CachePart* parts, const VisibleLanes& visible) {
  bool all_bf16 = s.bf16 && s.H % kHalves == 0;
  for (int64_t j = 0; j < kBlock && all_bf16; j++)
    if (visible.any[j]) all_bf16 = parts[visible.block->lane[j].part].kind == Kind::kBF16;
  return all_bf16;
}

inline void fold_bf16(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible,
                      SoftmaxState* softmax) {
  const Queries& s = rows.s;
  const int64_t H = s.H, count = rows.count();
  struct Scratch {};
  uint8_t* memory = thread_scratch<Scratch>(4 * (count * kBlock + H * kBlock) + 2 * count * (H + kBlock));
  float* score = reinterpret_cast<float*>(memory);
  uint32_t *k = reinterpret_cast<uint32_t*>(score + count * kBlock), *v = k + H / 2 * kBlock;
  uint16_t *q = reinterpret_cast<uint16_t*>(v + H / 2 * kBlock), *weight = q + count * H;
  for (int64_t i = 0; i < count; i++) memcpy(q + i * H, static_cast<const uint16_t*>(s.q) + rows.at(i), 2 * H);
  transpose_keys(rows, parts, visible, k);
  bf16_matmul(count, kBlock, reinterpret_cast<uint32_t*>(q), H / 2, k, kBlock, H / 2, score, kBlock, false);
  for (int64_t i = 0; i < count; i++) {
    float* line = score + i * kBlock;
    update_softmax(s, line, nullptr, visible.mask(i / rows.G()), visible.lanes(), softmax[i], H);
    store_floats(line, kBlock, true, weight, i * kBlock);
  }
  const uint32_t* weight_pairs = reinterpret_cast<uint32_t*>(weight);
  // Values of all rows, consecutively.
  if (interleave_values(rows, parts, visible, visible.any, v)) {
    bf16_matmul(count, H, weight_pairs, kBlock / 2, v, H, visible.lanes() / 2, softmax[0].value, H, true);
    return;
  }
  for (int64_t i = 0; i < count; i++) {  // 0 times NaN is NaN: each row adds only what it attends to
    interleave_values(rows, parts, visible, visible.mask(i / rows.G()), v);
    bf16_matmul(1, H, weight_pairs + i * kBlock / 2, kBlock / 2, v, H, visible.lanes() / 2, softmax[i].value, H, true);
  }
}

}  // namespace
}  // namespace jaxllm
#endif
