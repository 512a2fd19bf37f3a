// Online softmax of attention: masks, updates by a block of scores, merging and output.
#pragma once

#include "tiles.h"

namespace jaxllm {
namespace {

// The query rows of one call: G heads of each token.
struct QueryRows {
  const Queries& s;
  int64_t b, head, first, tokens;

  int64_t G() const { return s.N / s.K; }
  int64_t count() const { return tokens * G(); }
  int64_t at(int64_t i) const {  // of row i in q and in the result
    return ((b * s.T + first + i / G()) * s.N + head * G() + i % G()) * s.H;
  }
};

// Address of a slot's key or value of one head.
struct LaneData {
  Kind kind;
  const void* data;
  int64_t at;  // of its first number
};

// The lanes of a block that each token attends to, and in pairs of neighbors those of any token.
struct VisibleLanes {
  const Block* block;
  int64_t pairs, pair[kBlock / 2];
  alignas(64) int32_t masks[kStrip][kBlock], any[kBlock];

  const int32_t* mask(int64_t token) const { return masks[token]; }
  int64_t lanes() const { return pairs ? 2 * pair[pairs - 1] + 2 : 0; }  // up to the last visible one

  // Returns whether any lane is visible.
  bool compute(const QueryRows& rows, const Block& block_at) {
    const Queries& s = rows.s;
    const int32_t* q_position = s.position + rows.b * s.T + rows.first;
    const int32_t window = s.window < 0 || s.window > INT32_MAX ? INT32_MAX : int32_t(s.window);
    block = &block_at;
    pairs = 0;
    int32_t last_position = -1, first_position = INT32_MAX;
    for (int64_t t = 0; t < rows.tokens; t++) {
      last_position = q_position[t] > last_position ? q_position[t] : last_position;
      first_position = q_position[t] >= 0 && q_position[t] < first_position ? q_position[t] : first_position;
    }
    if (last_position < block_at.base || (s.window >= 0 && first_position - block_at.base >= s.window + kBlock))
      return false;
    alignas(64) int32_t position[kBlock];
    for (int64_t j = 0; j < kBlock; j++) position[j] = block_at.lane[j].part < 0 ? -1 : int32_t(block_at.base + j);
    memset(any, 0, sizeof any);
    for (int64_t t = 0; t < rows.tokens; t++)
      for (int64_t j = 0; j < kBlock; j += kLanes) {
        const Ints k = load<Ints>(position + j), q = Ints{} + q_position[t];
        const Ints in_range = (k >= 0) & (k <= q) & (q - k < window);
        store(masks[t] + j, in_range);
        store(any + j, load<Ints>(any + j) | in_range);
      }
    for (int64_t j = 0; j < kBlock / 2; j++)
      if (any[2 * j] | any[2 * j + 1]) pair[pairs++] = j;
    return pairs > 0;
  }

  // The slot read for lane j: its neighbor's if only that is visible, so that hidden slots are never read.
  const Block::Slot& slot(int64_t j) const { return block->lane[any[j] ? j : j ^ 1]; }
};

// A query's largest score, sum of weights, and weighted sum of values.
struct SoftmaxState {
  float max, total;
  float* value;
};

// Updates a row by the products of a block that `mask` selects, and replaces them by their weights. They are scaled by
// `scales`, or `scale` if that is null. If one is not finite, returns false, and weights are 0.
inline bool update_softmax(float* line, float scale, const float* scales, const int32_t* mask, SoftmaxState& row,
                           int64_t width) {
  constexpr int kParts = int(kBlock / kLanes);
  Floats max_score = splat(row.max);
  Bits non_finite = {};  // NaN and infinity
  JAXLLM_UNROLL
  for (int n = 0; n < kParts; n++) {
    const Floats factor = scales ? load<Floats>(scales + n * kLanes) : splat(scale),
                 product = load<Floats>(line + n * kLanes);
    const Ints is_visible = load<Ints>(mask + n * kLanes) != 0;
    const Floats score = is_visible ? product * factor : splat(-INFINITY);
    non_finite |= Bits(~(score < INFINITY));
    max_score = max(max_score, score);
    store(line + n * kLanes, score);
  }
  if (any_of(non_finite) || row.max != row.max) {  // the result is NaN
    row.max = row.total = NAN;
    memset(line, 0, 4 * kBlock);
    return false;
  }
  const float new_max = reduce_max(max_score), shift = new_max == -INFINITY ? 0 : new_max;
  Floats total = {};
  JAXLLM_UNROLL
  for (int n = 0; n < kParts; n++) {
    const Floats weight = exp_of(load<Floats>(line + n * kLanes) - shift);
    total += weight;
    store(line + n * kLanes, weight);
  }
  if (row.max != new_max) {
    const Floats rescale = exp_of(splat(row.max - shift));
    row.total *= rescale[0];
    for (int64_t h = 0; h < width; h += kLanes) store(row.value + h, load<Floats>(row.value + h) * rescale);
  }
  row.total += reduce_add(total);
  row.max = new_max;
  return true;
}

// First applies the soft cap of scores (Gemma 2, section 2) to `lanes` products; infinite ones then become finite.
inline bool update_softmax(const Queries& s, float* line, const float* scales, const int32_t* mask, int64_t lanes,
                           SoftmaxState& row, int64_t width) {
  if (!(s.cap > 0)) return update_softmax(line, s.scale, scales, mask, row, width);
  const float inverse = 1 / s.cap;
  for (int64_t j = 0; j < lanes; j += kLanes) {
    const Floats score = load<Floats>(line + j) * (scales ? load<Floats>(scales + j) : splat(s.scale));
    store(line + j, tanh_of(score * inverse) * s.cap);
  }
  return update_softmax(line, 1, nullptr, mask, row, width);
}

// Bytes of a strip's state: each row's maximum and total, then each row's value.
inline size_t state_bytes(const Queries& s, int64_t tokens) {
  return 4 * tokens * (s.N / s.K) * (round_up(s.H, kLanes) + 2);
}

// Merges the state of later positions into `state`.
inline void merge(const Queries& s, int64_t tokens, float* state, const float* next) {
  const int64_t count = tokens * (s.N / s.K), width = round_up(s.H, kLanes);
  for (int64_t i = 0; i < count; i++) {
    const float a = state[2 * i], b = next[2 * i];
    if (b == -INFINITY || a != a) continue;
    const float max_score = b > a || b != b ? b : a;
    const Floats factor = exp_of(splat(a - max_score)), next_factor = exp_of(splat(b - max_score));
    state[2 * i] = max_score;
    state[2 * i + 1] = b != b ? b : state[2 * i + 1] * factor[0] + next[2 * i + 1] * next_factor[0];
    float* value = state + 2 * count + i * width;
    const float* next_value = next + 2 * count + i * width;
    for (int64_t h = 0; h < width; h += kLanes)
      store(value + h, fma(load<Floats>(value + h), factor, load<Floats>(next_value + h) * next_factor));
  }
}

inline void store_output(const Queries& s, int64_t b, int64_t head, int64_t first, int64_t tokens, float* state,
                         void* out) {
  const QueryRows rows = {s, b, head, first, tokens};
  const int64_t count = rows.count(), width = round_up(s.H, kLanes);
  for (int64_t i = 0; i < count; i++) {
    const float sink = s.sink ? __builtin_expf(s.sink[head * rows.G() + i % rows.G()] - state[2 * i]) : 0;
    const float total = state[2 * i + 1] + sink, inverse = total == 0 ? 0 : 1 / total;
    float* value = state + 2 * count + i * width;
    for (int64_t h = 0; h < width; h += kLanes) store(value + h, load<Floats>(value + h) * inverse);
    store_floats(value, s.H, s.bf16, out, rows.at(i));
  }
}

}  // namespace
}  // namespace jaxllm
