// Attention's running softmax: visibility, absorbing scores, merging states and writing results.
#pragma once

#include "tiles.h"

namespace jaxllm {
namespace {

// The query rows of one call: G heads of each token.
struct Rows {
  const Queries& s;
  int64_t b, head, first, tokens;

  int64_t G() const { return s.N / s.K; }
  int64_t count() const { return tokens * G(); }
  int64_t at(int64_t i) const {  // of row i in q and in the result
    const int64_t G = s.N / s.K;
    return ((b * s.T + first + i / G) * s.N + head * G + i % G) * s.H;
  }
};

// A key head's keys or values of one slot.
struct Place {
  Kind kind;
  const void* data;
  int64_t at;  // of its first number
};

// Which lanes of a block are visible to any token, in pairs of neighbors, and which of those to each.
struct Seen {
  const Block* block;
  int64_t pairs, pair[kBlock / 2];
  alignas(64) int32_t masks[kStrip][kBlock], any[kBlock];

  const int32_t* mask(int64_t token) const { return masks[token]; }
  int64_t lanes() const { return pairs ? 2 * pair[pairs - 1] + 2 : 0; }  // all visible ones are among these

  // Returns whether there are any.
  bool look(const Rows& rows, const Block& of) {
    const Queries& s = rows.s;
    const int32_t* asks = s.position + rows.b * s.T + rows.first;
    const int32_t window = s.window < 0 || s.window > INT32_MAX ? INT32_MAX : int32_t(s.window);
    block = &of;
    pairs = 0;
    int32_t last = -1, least = INT32_MAX;
    for (int64_t t = 0; t < rows.tokens; t++) {
      last = asks[t] > last ? asks[t] : last;
      least = asks[t] >= 0 && asks[t] < least ? asks[t] : least;
    }
    if (last < of.base || (s.window >= 0 && least - of.base >= s.window + kBlock)) return false;
    alignas(64) int32_t position[kBlock];
    for (int64_t j = 0; j < kBlock; j++) position[j] = of.lane[j].part < 0 ? -1 : int32_t(of.base + j);
    memset(any, 0, sizeof any);
    for (int64_t t = 0; t < rows.tokens; t++)
      for (int64_t j = 0; j < kBlock; j += kLanes) {
        const Ints k = load<Ints>(position + j), q = Ints{} + asks[t];
        const Ints mine = (k >= 0) & (k <= q) & (q - k < window);
        store(masks[t] + j, mine);
        store(any + j, load<Ints>(any + j) | mine);
      }
    for (int64_t j = 0; j < kBlock / 2; j++)
      if (any[2 * j] | any[2 * j + 1]) pair[pairs++] = j;
    return pairs > 0;
  }

  // Where lane j is read: its neighbor's place if only that one is visible, so that nothing else is touched.
  const Block::Slot& slot(int64_t j) const { return block->lane[any[j] ? j : j ^ 1]; }
};

// A query's running softmax: largest score, sum of weights, weighted sum of values.
struct Running {
  float top, total;
  float* value;
};

// Absorbs those products of a block that `mask` selects, and replaces them by their weights. `each`: a factor for each,
// if not `scale` for all. False, and weights of zero, if one is not finite.
inline bool absorb(float* line, float scale, const float* each, const int32_t* mask, Running& row, int64_t width) {
  constexpr int kParts = int(kBlock / kLanes);
  Floats most = all_of(row.top);
  Bits wild = {};  // NaN and infinity
  JAXLLM_UNROLL
  for (int n = 0; n < kParts; n++) {
    const Floats by = each ? load<Floats>(each + n * kLanes) : all_of(scale), product = load<Floats>(line + n * kLanes);
    const Ints here = load<Ints>(mask + n * kLanes) != 0;
    const Floats score = here ? product * by : all_of(-INFINITY);
    wild |= Bits(~(score < INFINITY));
    most = larger(most, score);
    store(line + n * kLanes, score);
  }
  if (any_of(wild) || row.top != row.top) {  // must appear in the result
    row.top = row.total = NAN;
    memset(line, 0, 4 * kBlock);
    return false;
  }
  const float top = largest(most), shift = top == -INFINITY ? 0 : top;
  Floats total = {};
  JAXLLM_UNROLL
  for (int n = 0; n < kParts; n++) {
    const Floats weight = exp_of(load<Floats>(line + n * kLanes) - shift);
    total += weight;
    store(line + n * kLanes, weight);
  }
  if (row.top != top) {
    const Floats shrink = exp_of(all_of(row.top - shift));
    row.total *= shrink[0];
    for (int64_t h = 0; h < width; h += kLanes) store(row.value + h, load<Floats>(row.value + h) * shrink);
  }
  row.total += sum(total);
  row.top = top;
  return true;
}

// The same for queries that may have a soft cap (Gemma 2, section 2): it is first applied to the first `lanes`
// products. Infinite products are not wild then.
inline bool absorb(const Queries& s, float* line, const float* each, const int32_t* mask, int64_t lanes, Running& row,
                   int64_t width) {
  if (!(s.cap > 0)) return absorb(line, s.scale, each, mask, row, width);
  const float inverse = 1 / s.cap;
  for (int64_t j = 0; j < lanes; j += kLanes) {
    const Floats score = load<Floats>(line + j) * (each ? load<Floats>(each + j) : all_of(s.scale));
    store(line + j, tanh_of(score * inverse) * s.cap);
  }
  return absorb(line, 1, nullptr, mask, row, width);
}

// Bytes of the state of a strip's rows: top and total of each, then the value of each.
inline size_t state_bytes(const Queries& s, int64_t tokens) { return 4 * tokens * (s.N / s.K) * (up(s.H, kLanes) + 2); }

// Merges a state with that of later positions.
inline void merge(const Queries& s, int64_t tokens, float* state, const float* next) {
  const int64_t count = tokens * (s.N / s.K), width = up(s.H, kLanes);
  for (int64_t i = 0; i < count; i++) {
    const float a = state[2 * i], b = next[2 * i];
    if (b == -INFINITY || a != a) continue;
    const float top = b > a || b != b ? b : a;
    const Floats by = exp_of(all_of(a - top)), other = exp_of(all_of(b - top));
    state[2 * i] = top;
    state[2 * i + 1] = b != b ? b : state[2 * i + 1] * by[0] + next[2 * i + 1] * other[0];
    float* value = state + 2 * count + i * width;
    const float* more = next + 2 * count + i * width;
    for (int64_t h = 0; h < width; h += kLanes)
      store(value + h, fma(load<Floats>(value + h), by, load<Floats>(more + h) * other));
  }
}

inline void put(const Queries& s, int64_t b, int64_t head, int64_t first, int64_t tokens, float* state, void* out) {
  const Rows rows = {s, b, head, first, tokens};
  const int64_t count = rows.count(), width = up(s.H, kLanes);
  for (int64_t i = 0; i < count; i++) {
    const float total = state[2 * i + 1], by = total == 0 ? 0 : 1 / total;
    float* value = state + 2 * count + i * width;
    for (int64_t h = 0; h < width; h += kLanes) store(value + h, load<Floats>(value + h) * by);
    put_floats(value, s.H, s.bf16, out, rows.at(i));
  }
}

}  // namespace
}  // namespace jaxllm
