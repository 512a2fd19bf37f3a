// Attention's running softmax: visibility, absorbing scores, merging states and writing results.
#pragma once

#include "tiles.h"

namespace jaxllm {
namespace {

constexpr int64_t kBlock = 64;

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

// Which slots of a block are visible to any token, and which of those to each.
struct Seen {
  int64_t count, slot[kBlock];
  alignas(64) int32_t masks[kStrip][kBlock];

  const int32_t* mask(int64_t token) const { return masks[token]; }

  // Up to a block of slots from `begin` on; returns how many are visible.
  int64_t look(const Rows& rows, const Part& part, int64_t begin, int64_t end) {
    const Queries& s = rows.s;
    const int32_t* asks = s.position + rows.b * s.T + rows.first;
    const int32_t* from = part.position + (part.one_position ? 0 : rows.b * part.slots) + begin;
    const int64_t n = end - begin < kBlock ? end - begin : kBlock;
    const int32_t window = s.window < 0 || s.window > INT32_MAX ? INT32_MAX : int32_t(s.window);
    int32_t position[kBlock], any[kBlock] = {};
    for (int64_t j = 0; j < kBlock; j++) position[j] = j < n ? from[j] : -1;
    for (int64_t t = 0; t < rows.tokens; t++)
      for (int64_t j = 0; j < kBlock; j += kLanes) {
        const Ints k = load<Ints>(position + j), q = Ints{} + asks[t];
        const Ints mine = (k >= 0) & (k <= q) & (q - k < window);
        store(masks[t] + j, mine);
        store(any + j, load<Ints>(any + j) | mine);
      }
    count = 0;
    for (int64_t j = 0; j < n; j++) {
      slot[count] = begin + j;
      count -= any[j];
    }
    for (int64_t j = 0, to = 0; j < n && count < n; j++)
      if (any[j]) {
        for (int64_t t = 0; t < rows.tokens; t++) masks[t][to] = masks[t][j];
        to++;
      }
    for (int64_t t = 0; t < rows.tokens && count < n; t++)
      for (int64_t j = count; j < n; j++) masks[t][j] = 0;
    return count;
  }
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

// The same for queries that may have a soft cap (Gemma 2, section 2): it is first applied to the first `seen` products.
// Infinite products are not wild then.
inline bool absorb(const Queries& s, float* line, const float* each, const int32_t* mask, int64_t seen, Running& row,
                   int64_t width) {
  if (!(s.cap > 0)) return absorb(line, s.scale, each, mask, row, width);
  const float inverse = 1 / s.cap;
  for (int64_t j = 0; j < seen; j += kLanes) {
    const Floats score = load<Floats>(line + j) * (each ? load<Floats>(each + j) : all_of(s.scale));
    store(line + j, tanh_of(score * inverse) * s.cap);
  }
  return absorb(line, 1, nullptr, mask, row, width);
}

// Bytes of the state of a strip's rows: top and total of each, then the value of each.
inline size_t state_bytes(const Queries& s, int64_t tokens) { return 4 * tokens * (s.N / s.K) * (up(s.H, kLanes) + 2); }

// Merges a state with that of later slots.
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
