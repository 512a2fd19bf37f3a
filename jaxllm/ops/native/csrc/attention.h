// Attention over the parts of a cache in place (ops/attention.py): an online softmax over blocks of positions, in
// float32. A key's block and lane follow from its position, so the result's bits depend neither on its slot and part
// nor on other queries. Spans of kSpan positions have separate states, merged in order, so threads may compute them in
// any order.
#pragma once

#include "bf16_attention.h"

namespace jaxllm {
namespace {

// Queries multiplied at once, with four keys or two registers of values.
constexpr int kQueries = kRegisters == 32 ? 4 : 2;

// Products of R queries, `width` floats apart, with the visible keys.
template <Kind K, int R>
void score_tile(const float* q, int64_t width, const LaneData* key, const VisibleLanes& visible, float* line) {
  for (int64_t p = 0; p < visible.pairs; p += 2) {
    const int64_t first = 2 * visible.pair[p], second = 2 * visible.pair[p + 1 < visible.pairs ? p + 1 : p];
    const LaneData* at[4] = {key + first, key + first + 1, key + second, key + second + 1};
    Floats dot[R][4] = {};
    for (int64_t h = 0; h < width; h += kLanes) JAXLLM_UNROLL
    for (int i = 0; i < 4; i++) {
      const Floats k = load_floats(K, at[i]->data, at[i]->at + h);
      JAXLLM_UNROLL
      for (int r = 0; r < R; r++) dot[r][i] = fma(load<Floats>(q + r * width + h), k, dot[r][i]);
    }
    JAXLLM_UNROLL
    for (int r = 0; r < R; r++) {
      float dots[4];
      reduce_add4(dot[r], dots);
      memcpy(line + r * kBlock + first, dots, 8);
      memcpy(line + r * kBlock + second, dots + 2, 8);
    }
  }
}

// sum += weight[j] v[j] of R queries, added separately over even and odd lanes j.
template <Kind K, int R, int N>
void add_values(const float* weight, const LaneData* value, const VisibleLanes& visible, int64_t h, float* sum,
                int64_t width) {
  Floats sums[2][R][N] = {};
  for (int64_t p = 0; p < visible.pairs; p++) JAXLLM_UNROLL
  for (int odd = 0; odd < 2; odd++) {
    const int64_t j = 2 * visible.pair[p] + odd;
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) {
      const Floats v = load_floats(K, value[j].data, value[j].at + h + n * kLanes);
      JAXLLM_UNROLL
      for (int r = 0; r < R; r++) sums[odd][r][n] = fma(splat(weight[r * kBlock + j]), v, sums[odd][r][n]);
    }
  }
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++) JAXLLM_UNROLL
  for (int n = 0; n < N; n++) {
    float* at = sum + r * width + h + n * kLanes;
    store(at, load<Floats>(at) + (sums[0][r][n] + sums[1][r][n]));
  }
}

template <Kind K, int R>
void add_heads(const float* weight, const LaneData* value, const VisibleLanes& visible, float* sum, int64_t width) {
  int64_t h = 0;
  for (; h + 2 * kLanes <= width; h += 2 * kLanes) add_values<K, R, 2>(weight, value, visible, h, sum, width);
  if (h < width) add_values<K, R, 1>(weight, value, visible, h, sum, width);
}

// Finds the keys or values of the visible lanes: in place, or converted to floats in `converted` if kinds differ, rows
// are not whole registers, or many queries read them. Returns their kind.
template <bool Keys>
Kind find_lane_data(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible, float* converted,
                    LaneData* lane_data) {
  const Queries& s = rows.s;
  const int64_t width = round_up(s.H, kLanes);
  Kind kind = Kind::kF32;
  bool same_kind = true;
  for (int64_t p = 0; p < visible.pairs; p++)
    for (int64_t j = 2 * visible.pair[p]; j < 2 * visible.pair[p] + 2; j++) {
      const Block::Slot& slot = visible.slot(j);
      const CachePart& part = parts[slot.part];
      const int64_t row = (Keys ? part.shared_k : part.shared_v) ? 0 : slot.row;
      lane_data[j] = {part.kind, Keys ? part.k : part.v, ((row * part.slots + slot.slot) * s.K + rows.head) * s.H};
      if (!p && j % 2 == 0) kind = part.kind;
      same_kind = same_kind && part.kind == kind;
    }
  if (same_kind && s.H == width && (kind == Kind::kF32 || rows.count() <= kQueries)) return kind;
  for (int64_t p = 0; p < visible.pairs; p++)
    for (int64_t j = 2 * visible.pair[p]; j < 2 * visible.pair[p] + 2; j++) {
      float* to = converted + j * width;
      to_floats(lane_data[j].kind, lane_data[j].data, lane_data[j].at, s.H, to);
      for (int64_t h = s.H; h < width; h++) to[h] = 0;
      lane_data[j] = {Kind::kF32, converted, j * width};
    }
  return Kind::kF32;
}

template <Kind K>
struct KindConstant {
  static constexpr Kind kind() { return K; }
};

template <class Work>
JAXLLM_INLINE void dispatch_kind(Kind kind, const Work& work) {
  switch (kind) {
    case Kind::kBF16: return work(KindConstant<Kind::kBF16>());
    case Kind::kF16: return work(KindConstant<Kind::kF16>());
    case Kind::kInt8: return work(KindConstant<Kind::kInt8>());
    default: return work(KindConstant<Kind::kF32>());
  }
}

inline bool finite_values(Kind kind, const LaneData* value, const VisibleLanes& visible, int64_t width) {
  Floats non_finite = {};
  for (int64_t p = 0; p < visible.pairs; p++)
    for (int64_t j = 2 * visible.pair[p]; j < 2 * visible.pair[p] + 2; j++)
      for (int64_t h = 0; h < width; h += kLanes)
        non_finite += load_floats(kind, value[j].data, value[j].at + h) * 0.0f;
  return reduce_add(non_finite) == 0;
}

// Scales of int8 keys or values, times `factor`; false if no visible lane has one.
template <bool Keys>
bool lane_scales(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible, float factor,
                 float* scale) {
  bool any = false;
  for (int64_t j = 0; j < kBlock; j++) scale[j] = factor;
  for (int64_t p = 0; p < visible.pairs; p++)
    for (int64_t j = 2 * visible.pair[p]; j < 2 * visible.pair[p] + 2; j++) {
      const Block::Slot& slot = visible.slot(j);
      const CachePart& part = parts[slot.part];
      const float* scales = Keys ? part.k_scale : part.v_scale;
      if (!scales) continue;
      const int64_t row = (Keys ? part.shared_k : part.shared_v) ? 0 : slot.row;
      scale[j] = factor * scales[(row * part.slots + slot.slot) * rows.s.K + rows.head];
      any = true;
    }
  return any;
}

// Replaces hidden lanes by a visible one: their weight is 0, but 0 times NaN is NaN. False if there is none.
inline bool replace_hidden(const int32_t* mask, const VisibleLanes& visible, LaneData* lane_data) {
  int64_t visible_lane = -1;
  for (int64_t j = 0; j < kBlock && visible_lane < 0; j++)
    if (mask[j]) visible_lane = j;
  for (int64_t p = 0; p < visible.pairs && visible_lane >= 0; p++)
    for (int64_t j = 2 * visible.pair[p]; j < 2 * visible.pair[p] + 2; j++)
      if (!mask[j]) lane_data[j] = lane_data[visible_lane];
  return visible_lane >= 0;
}

// Updates the states of all query rows by a block.
inline void fold_block(const QueryRows& rows, const CachePart* parts, const VisibleLanes& visible, const float* q,
                       float* converted, float* score, SoftmaxState* softmax) {
  const Queries& s = rows.s;
  const int64_t width = round_up(s.H, kLanes), count = rows.count();
  LaneData lane_data[kBlock];
  dispatch_kind(find_lane_data<true>(rows, parts, visible, converted, lane_data), [&](auto kind_constant) {
    constexpr Kind K = kind_constant.kind();
    int64_t i = 0;
    for (; i + kQueries <= count; i += kQueries)
      score_tile<K, kQueries>(q + i * width, width, lane_data, visible, score + i * kBlock);
    for (; i < count; i++) score_tile<K, 1>(q + i * width, width, lane_data, visible, score + i * kBlock);
  });
  alignas(64) float k_scale[kBlock], v_scale[kBlock];
  const float* scales = lane_scales<true>(rows, parts, visible, s.scale, k_scale) ? k_scale : nullptr;
  const bool scaled = lane_scales<false>(rows, parts, visible, 1, v_scale);
  for (int64_t i = 0; i < count; i++) {
    update_softmax(s, score + i * kBlock, scales, visible.mask(i / rows.G()), visible.lanes(), softmax[i], width);
    for (int64_t j = 0; j < kBlock && scaled; j++) score[i * kBlock + j] *= v_scale[j];
  }
  const Kind kind = find_lane_data<false>(rows, parts, visible, converted, lane_data);
  const bool per_query = rows.tokens > 1 && !finite_values(kind, lane_data, visible, width);
  dispatch_kind(kind, [&](auto kind_constant) {
    constexpr Kind K = kind_constant.kind();
    int64_t i = 0;
    for (; i + kQueries <= count && !per_query; i += kQueries)
      add_heads<K, kQueries>(score + i * kBlock, lane_data, visible, softmax[i].value, width);
    for (; i < count; i++) {
      LaneData own_data[kBlock];
      memcpy(own_data, lane_data, sizeof own_data);
      const int32_t* mask = visible.mask(i / rows.G());
      if (!per_query || replace_hidden(mask, visible, own_data))
        add_heads<K, 1>(score + i * kBlock, own_data, visible, softmax[i].value, width);
    }
  });
}

inline void fold(const Queries& s, const CachePart* parts, int64_t b, int64_t head, int64_t first, int64_t tokens,
                 Blocks span, float* state) {
  const QueryRows rows = {s, b, head, first, tokens};
  const int64_t count = rows.count(), width = round_up(s.H, kLanes);
  struct States {};
  SoftmaxState* softmax = reinterpret_cast<SoftmaxState*>(thread_scratch<States>(count * sizeof(SoftmaxState)));
  memset(state, 0, 4 * count * (width + 2));
  for (int64_t i = 0; i < count; i++) softmax[i] = {-INFINITY, 0, state + 2 * count + i * width};
  struct Buffers {};
  float* q = reinterpret_cast<float*>(thread_scratch<Buffers>(4 * (count * width + kBlock * width + count * kBlock)));
  float *converted = q + count * width, *score = converted + kBlock * width;
  bool queries_ready = false;
  VisibleLanes visible;
  for (const Block* block = span.begin; block < span.end; block++) {
    if (!visible.compute(rows, *block)) continue;
#ifdef JAXLLM_PAIRS
    if (all_in_bf16(s, parts, visible)) {
      fold_bf16(rows, parts, visible, softmax);
      continue;
    }
#endif
    if (!queries_ready) {
      memset(q, 0, 4 * count * width);
      for (int64_t i = 0; i < count; i++)
        to_floats(s.bf16 ? Kind::kBF16 : Kind::kF32, s.q, rows.at(i), s.H, q + i * width);
      queries_ready = true;
    }
    fold_block(rows, parts, visible, q, converted, score, softmax);
  }
  for (int64_t i = 0; i < count; i++) {
    state[2 * i] = softmax[i].max;
    state[2 * i + 1] = softmax[i].total;
  }
}

}  // namespace
}  // namespace jaxllm
