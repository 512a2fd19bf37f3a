// Attention over the parts of a cache in place (as in ops/attention.py): an online softmax over blocks of positions,
// float32 throughout. A key's lane in its block, and what is folded together, follow from its position alone: the bits
// of a result depend neither on the slots and parts that keys are in, nor on other queries. Spans of kSpan positions
// are folded apart, and their states merged in order: whichever thread computes a span, and when.
#pragma once

#include "pairs.h"

namespace jaxllm {
namespace {

// Queries multiplied at once, with four keys or two registers of values.
constexpr int kQueries = kRegisters == 32 ? 4 : 2;

// The products of R queries, at a distance of `width`, with the keys of these pairs of lanes.
template <Kind K, int R>
void products(const float* q, int64_t width, const Place* key, const Seen& seen, float* line) {
  for (int64_t p = 0; p < seen.pairs; p += 2) {
    const int64_t first = 2 * seen.pair[p], second = 2 * seen.pair[p + 1 < seen.pairs ? p + 1 : p];
    const Place* at[4] = {key + first, key + first + 1, key + second, key + second + 1};
    Floats of[R][4] = {};
    for (int64_t h = 0; h < width; h += kLanes) JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const Floats k = floats_at(K, at[i]->data, at[i]->at + h);
      JAXLLM_UNROLL
      for (int r = 0; r < R; r++) of[r][i] = fma(load<Floats>(q + r * width + h), k, of[r][i]);
    }
    JAXLLM_UNROLL
    for (int r = 0; r < R; r++) {
      float four[4];
      sums(of[r], four);
      memcpy(line + r * kBlock + first, four, 8);
      memcpy(line + r * kBlock + second, four + 2, 8);
    }
  }
}

// value += weight[j] v[j] of R queries, in two sums: over even and over odd lanes j.
template <Kind K, int R, int N>
void add_values(const float* weight, const Place* value, const Seen& seen, int64_t h, float* sum, int64_t width) {
  Floats of[2][R][N] = {};
  for (int64_t p = 0; p < seen.pairs; p++) JAXLLM_UNROLL
  for (int odd = 0; odd < 2; odd++) {
    const int64_t j = 2 * seen.pair[p] + odd;
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) {
      const Floats v = floats_at(K, value[j].data, value[j].at + h + n * kLanes);
      JAXLLM_UNROLL
      for (int r = 0; r < R; r++) of[odd][r][n] = fma(all_of(weight[r * kBlock + j]), v, of[odd][r][n]);
    }
  }
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++) JAXLLM_UNROLL
  for (int n = 0; n < N; n++) {
    float* at = sum + r * width + h + n * kLanes;
    store(at, load<Floats>(at) + (of[0][r][n] + of[1][r][n]));
  }
}

template <Kind K, int R>
void add_heads(const float* weight, const Place* value, const Seen& seen, float* sum, int64_t width) {
  int64_t h = 0;
  for (; h + 2 * kLanes <= width; h += 2 * kLanes) add_values<K, R, 2>(weight, value, seen, h, sum, width);
  if (h < width) add_values<K, R, 1>(weight, value, seen, h, sum, width);
}

// Where a row and key head has the keys or values of each visible lane: in place, or, if they are of different kinds,
// or not of full lanes, or needed often, converted to `wide`. Returns their kind.
template <bool Keys>
Kind places_of(const Rows& rows, const Part* parts, const Seen& seen, float* wide, Place* place) {
  const Queries& s = rows.s;
  const int64_t width = up(s.H, kLanes);
  Kind kind = Kind::kF32;
  bool alike = true;
  for (int64_t p = 0; p < seen.pairs; p++)
    for (int64_t j = 2 * seen.pair[p]; j < 2 * seen.pair[p] + 2; j++) {
      const Block::Slot& slot = seen.slot(j);
      const Part& part = parts[slot.part];
      const int64_t row = (Keys ? part.one_k : part.one_v) ? 0 : part.row_of(rows.b);
      place[j] = {part.kind, Keys ? part.k : part.v, ((row * part.slots + slot.slot) * s.K + rows.head) * s.H};
      if (!p && j % 2 == 0) kind = part.kind;
      alike = alike && part.kind == kind;
    }
  if (alike && s.H == width && (kind == Kind::kF32 || rows.count() <= kQueries)) return kind;
  for (int64_t p = 0; p < seen.pairs; p++)
    for (int64_t j = 2 * seen.pair[p]; j < 2 * seen.pair[p] + 2; j++) {
      float* to = wide + j * width;
      to_floats(place[j].kind, place[j].data, place[j].at, s.H, to);
      for (int64_t h = s.H; h < width; h++) to[h] = 0;
      place[j] = {Kind::kF32, wide, j * width};
    }
  return Kind::kF32;
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

inline bool finite_values(Kind kind, const Place* value, const Seen& seen, int64_t width) {
  Floats wild = {};
  for (int64_t p = 0; p < seen.pairs; p++)
    for (int64_t j = 2 * seen.pair[p]; j < 2 * seen.pair[p] + 2; j++)
      for (int64_t h = 0; h < width; h += kLanes) wild += floats_at(kind, value[j].data, value[j].at + h) * 0.0f;
  return sum(wild) == 0;
}

// The scales of int8 keys or values, times `by`; false if no visible lane has any.
template <bool Keys>
bool scales_of(const Rows& rows, const Part* parts, const Seen& seen, float by, float* scale) {
  bool any = false;
  for (int64_t j = 0; j < kBlock; j++) scale[j] = by;
  for (int64_t p = 0; p < seen.pairs; p++)
    for (int64_t j = 2 * seen.pair[p]; j < 2 * seen.pair[p] + 2; j++) {
      const Block::Slot& slot = seen.slot(j);
      const Part& part = parts[slot.part];
      const float* of = Keys ? part.k_scale : part.v_scale;
      if (!of) continue;
      const int64_t row = (Keys ? part.one_k : part.one_v) ? 0 : part.row_of(rows.b);
      scale[j] = by * of[(row * part.slots + slot.slot) * rows.s.K + rows.head];
      any = true;
    }
  return any;
}

inline bool any_lane(const int32_t* mask) {
  for (int64_t j = 0; j < kBlock; j++)
    if (mask[j]) return true;
  return false;
}

// Replaces what query i does not attend to by something that it does: 0 times NaN is NaN.
inline void hide(const int32_t* mask, const Seen& seen, Place* place) {
  int64_t shown = -1;
  for (int64_t j = 0; j < kBlock && shown < 0; j++)
    if (mask[j]) shown = j;
  for (int64_t p = 0; p < seen.pairs && shown >= 0; p++)
    for (int64_t j = 2 * seen.pair[p]; j < 2 * seen.pair[p] + 2; j++)
      if (!mask[j]) place[j] = place[shown];
}

// Folds a block into rows of queries.
inline void fold_block(const Rows& rows, const Part* parts, const Seen& seen, const float* q, float* wide, float* score,
                       Running* running) {
  const Queries& s = rows.s;
  const int64_t width = up(s.H, kLanes), count = rows.count();
  Place place[kBlock];
  by_kind(places_of<true>(rows, parts, seen, wide, place), [&](auto of) {
    constexpr Kind K = of.kind();
    int64_t i = 0;
    for (; i + kQueries <= count; i += kQueries)
      products<K, kQueries>(q + i * width, width, place, seen, score + i * kBlock);
    for (; i < count; i++) products<K, 1>(q + i * width, width, place, seen, score + i * kBlock);
  });
  alignas(64) float k_scale[kBlock], v_scale[kBlock];
  const float* each = scales_of<true>(rows, parts, seen, s.scale, k_scale) ? k_scale : nullptr;
  const bool scaled = scales_of<false>(rows, parts, seen, 1, v_scale);
  for (int64_t i = 0; i < count; i++) {
    absorb(s, score + i * kBlock, each, seen.mask(i / rows.G()), seen.lanes(), running[i], width);
    for (int64_t j = 0; j < kBlock && scaled; j++) score[i * kBlock + j] *= v_scale[j];
  }
  const Kind kind = places_of<false>(rows, parts, seen, wide, place);
  const bool apart = rows.tokens > 1 && !finite_values(kind, place, seen, width);
  by_kind(kind, [&](auto of) {
    constexpr Kind K = of.kind();
    int64_t i = 0;
    for (; i + kQueries <= count && !apart; i += kQueries)
      add_heads<K, kQueries>(score + i * kBlock, place, seen, running[i].value, width);
    for (; i < count; i++) {
      Place own[kBlock];
      memcpy(own, place, sizeof own);
      const int32_t* mask = seen.mask(i / rows.G());
      if (apart) hide(mask, seen, own);
      if (!apart || any_lane(mask)) add_heads<K, 1>(score + i * kBlock, own, seen, running[i].value, width);
    }
  });
}

inline void fold(const Queries& s, const Part* parts, int64_t b, int64_t head, int64_t first, int64_t tokens,
                 Blocks blocks, float* state) {
  const Rows rows = {s, b, head, first, tokens};
  const int64_t count = rows.count(), width = up(s.H, kLanes);
  struct Use {};
  Running* running = reinterpret_cast<Running*>(space<Use>(count * sizeof(Running)));
  memset(state, 0, 4 * count * (width + 2));
  for (int64_t i = 0; i < count; i++) running[i] = {-INFINITY, 0, state + 2 * count + i * width};
  struct Memory {};
  float* q = reinterpret_cast<float*>(space<Memory>(4 * (count * width + kBlock * width + count * kBlock)));
  float *wide = q + count * width, *score = wide + kBlock * width;
  bool widened = false;
  Seen seen;
  for (const Block* block = blocks.begin; block < blocks.end; block++) {
    if (!seen.look(rows, *block)) continue;
#ifdef JAXLLM_PAIRS
    if (in_pairs(s, parts, seen)) {
      fold_pairs(rows, parts, seen, running);
      continue;
    }
#endif
    if (!widened) {
      memset(q, 0, 4 * count * width);
      for (int64_t i = 0; i < count; i++)
        to_floats(s.bf16 ? Kind::kBF16 : Kind::kF32, s.q, rows.at(i), s.H, q + i * width);
      widened = true;
    }
    fold_block(rows, parts, seen, q, wide, score, running);
  }
  for (int64_t i = 0; i < count; i++) {
    state[2 * i] = running[i].top;
    state[2 * i + 1] = running[i].total;
  }
}

}  // namespace
}  // namespace jaxllm
