// Attention over the parts of a cache in place (as in ops/attention.py): an online softmax over blocks of slots,
// float32 throughout; slots that no query attends to are skipped. Slots are folded in spans of kSpan, whose states are
// merged in order: results have the same bits whichever thread computes a span, and when.
#pragma once

#include "pairs.h"

namespace jaxllm {
namespace {

// Queries multiplied at once, with four keys or two registers of values.
constexpr int kQueries = kRegisters == 32 ? 4 : 2;

// The products of R queries, at a distance of `width`, with the keys of these slots.
template <Kind K, int R>
void products(const float* q, int64_t width, const void* keys, int64_t apart, const int64_t* slot, int64_t seen,
              float* line) {
  for (int64_t j = 0; j < seen; j += 4) {
    int64_t at[4];
    for (int i = 0; i < 4; i++) at[i] = slot[j + i < seen ? j + i : seen - 1] * apart;
    Floats of[R][4] = {};
    for (int64_t h = 0; h < width; h += kLanes) JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const Floats key = floats_at(K, keys, at[i] + h);
      JAXLLM_UNROLL
      for (int r = 0; r < R; r++) of[r][i] = fma(load<Floats>(q + r * width + h), key, of[r][i]);
    }
    JAXLLM_UNROLL
    for (int r = 0; r < R; r++) sums(of[r], line + r * kBlock + j);
  }
}

// value += weight[j] v[j] of R queries, in two sums: over even and over odd j.
template <Kind K, int R, int N>
void add_values(const float* weight, const void* values, int64_t apart, const int64_t* slot, int64_t seen, int64_t h,
                float* value, int64_t width) {
  Floats of[2][R][N] = {};
  for (int64_t j = 0; j < seen; j += 2) JAXLLM_UNROLL
  for (int odd = 0; odd < 2; odd++) {
    if (odd && j + 1 == seen) break;
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) {
      const Floats v = floats_at(K, values, slot[j + odd] * apart + h + n * kLanes);
      JAXLLM_UNROLL
      for (int r = 0; r < R; r++) of[odd][r][n] = fma(all_of(weight[r * kBlock + j + odd]), v, of[odd][r][n]);
    }
  }
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++) JAXLLM_UNROLL
  for (int n = 0; n < N; n++) {
    float* at = value + r * width + h + n * kLanes;
    store(at, load<Floats>(at) + (of[0][r][n] + of[1][r][n]));
  }
}

template <Kind K, int R>
void add_heads(const float* weight, const void* values, int64_t apart, const int64_t* slot, int64_t seen, float* value,
               int64_t width) {
  int64_t h = 0;
  for (; h + 2 * kLanes <= width; h += 2 * kLanes)
    add_values<K, R, 2>(weight, values, apart, slot, seen, h, value, width);
  if (h < width) add_values<K, R, 1>(weight, values, apart, slot, seen, h, value, width);
}

// Where a block's keys or values are read: in place, or converted to `wide`, heads padded with zeros to full lanes.
struct Place {
  Kind kind;
  const void* data;
  int64_t apart;
  const int64_t* slot;
};

inline Place place_of(const Part& part, const void* data, int64_t row, int64_t head, int64_t K, int64_t H,
                      const int64_t* slot, int64_t seen, int64_t rows, float* wide) {
  static const struct Numbers {
    int64_t of[kBlock];
    Numbers() {
      for (int i = 0; i < kBlock; i++) of[i] = i;
    }
  } numbers;
  const int64_t size = part.kind == Kind::kF32 ? 4 : (part.kind == Kind::kInt8 ? 1 : 2), first = (row * K + head) * H;
  if (H % kLanes == 0 && (part.kind == Kind::kF32 || rows <= kQueries))
    return {part.kind, static_cast<const uint8_t*>(data) + first * size, K * H, slot};
  const int64_t width = up(H, kLanes);
  for (int64_t j = 0; j < seen; j++) {
    to_floats(part.kind, data, first + slot[j] * K * H, H, wide + j * width);
    for (int64_t h = H; h < width; h++) wide[j * width + h] = 0;
  }
  return {Kind::kF32, wide, width, numbers.of};
}

template <Kind K>
struct Of {
  static constexpr Kind kind() { return K; }
};

template <class Work>
JAXLLM_INLINE void by_kind(Kind kind, const Work& work) {
  switch (kind) {
    case Kind::kBF16: return work(Of<Kind::kBF16>());
    case Kind::kF16: return work(Of<Kind::kF16>());
    case Kind::kInt8: return work(Of<Kind::kInt8>());
    default: return work(Of<Kind::kF32>());
  }
}

inline bool finite_values(const Place& at, int64_t seen, int64_t width) {
  Floats wild = {};
  for (int64_t j = 0; j < seen; j++)
    for (int64_t h = 0; h < width; h += kLanes) wild += floats_at(at.kind, at.data, at.slot[j] * at.apart + h) * 0.0f;
  return sum(wild) == 0;
}

// Folds a block's slots into rows of queries.
inline void fold_block(const Rows& rows, const Part& part, const Seen& seen, const float* q, float* wide, float* score,
                       Running* running) {
  const Queries& s = rows.s;
  const int64_t width = up(s.H, kLanes), count = rows.count();
  const int64_t k_row = part.one_k ? 0 : rows.b * part.slots, v_row = part.one_v ? 0 : rows.b * part.slots;
  const Place k = place_of(part, part.k, k_row, rows.head, s.K, s.H, seen.slot, seen.count, count, wide);
  by_kind(k.kind, [&](auto of) {
    constexpr Kind K = of.kind();
    int64_t i = 0;
    for (; i + kQueries <= count; i += kQueries)
      products<K, kQueries>(q + i * width, width, k.data, k.apart, k.slot, seen.count, score + i * kBlock);
    for (; i < count; i++)
      products<K, 1>(q + i * width, width, k.data, k.apart, k.slot, seen.count, score + i * kBlock);
  });
  alignas(64) float k_scale[kBlock], v_scale[kBlock];
  for (int64_t j = 0; j < kBlock && part.k_scale; j++) {
    const int64_t slot = seen.slot[j < seen.count ? j : 0];
    k_scale[j] = s.scale * part.k_scale[(k_row + slot) * s.K + rows.head];
    v_scale[j] = part.v_scale[(v_row + slot) * s.K + rows.head];
  }
  for (int64_t i = 0; i < count; i++) {
    absorb(s, score + i * kBlock, part.k_scale ? k_scale : nullptr, seen.mask(i / rows.G()), seen.count, running[i],
           width);
    for (int64_t j = 0; j < kBlock && part.v_scale; j++) score[i * kBlock + j] *= v_scale[j];
  }
  const Place v = place_of(part, part.v, v_row, rows.head, s.K, s.H, seen.slot, seen.count, count, wide);
  // 0 times NaN is NaN: if a value is not finite and not visible to all rows, each row adds its visible values only.
  if (rows.tokens > 1 && !finite_values(v, seen.count, width)) {
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < seen.count; j++)
        if (seen.mask(i / rows.G())[j])
          by_kind(v.kind, [&](auto K) {
            add_heads<K.kind(), 1>(score + i * kBlock + j, v.data, v.apart, v.slot + j, 1, running[i].value, width);
          });
    return;
  }
  by_kind(v.kind, [&](auto of) {
    constexpr Kind K = of.kind();
    int64_t i = 0;
    for (; i + kQueries <= count; i += kQueries)
      add_heads<K, kQueries>(score + i * kBlock, v.data, v.apart, v.slot, seen.count, running[i].value, width);
    for (; i < count; i++)
      add_heads<K, 1>(score + i * kBlock, v.data, v.apart, v.slot, seen.count, running[i].value, width);
  });
}

inline void fold_floats(const Rows& rows, const Part& part, int64_t begin, int64_t end, Running* running) {
  const Queries& s = rows.s;
  const int64_t count = rows.count(), width = up(s.H, kLanes);
  struct Use {};
  float* q = reinterpret_cast<float*>(space<Use>(4 * (count * width + kBlock * width + count * kBlock)));
  float *wide = q + count * width, *score = wide + kBlock * width;
  memset(q, 0, 4 * count * width);
  for (int64_t i = 0; i < count; i++) to_floats(s.bf16 ? Kind::kBF16 : Kind::kF32, s.q, rows.at(i), s.H, q + i * width);
  Seen seen;
  for (int64_t at = begin; at < end; at += kBlock)
    if (seen.look(rows, part, at, end)) fold_block(rows, part, seen, q, wide, score, running);
}

inline void fold(const Queries& s, const Part* parts, int64_t b, int64_t head, int64_t first, int64_t tokens,
                 int64_t span, float* state) {
  const Rows rows = {s, b, head, first, tokens};
  const Part* part = parts;
  while (span >= spans_of(*part)) span -= spans_of(*part++);
  const int64_t begin = span * kSpan, end = part->slots - begin < kSpan ? part->slots : begin + kSpan;
  const int64_t width = up(s.H, kLanes), count = rows.count();
  struct Use {};
  Running* running = reinterpret_cast<Running*>(space<Use>(count * sizeof(Running)));
  const auto start = [&] {
    memset(state, 0, 4 * count * (width + 2));
    for (int64_t i = 0; i < count; i++) running[i] = {-INFINITY, 0, state + 2 * count + i * width};
  };
  start();
#ifdef JAXLLM_PAIRS
  if (!in_pairs(s, *part) || !fold_pairs(rows, *part, begin, end, running)) {
    start();
    fold_floats(rows, *part, begin, end, running);
  }
#else
  fold_floats(rows, *part, begin, end, running);
#endif
  for (int64_t i = 0; i < count; i++) {
    state[2 * i] = running[i].top;
    state[2 * i + 1] = running[i].total;
  }
}

}  // namespace
}  // namespace jaxllm
