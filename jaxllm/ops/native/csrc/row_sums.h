// Sums over rows of floats, each in one order of additions: four registers in turn, so that additions do not wait for
// each other.
#pragma once

#include "numbers.h"

namespace jaxllm {
namespace {

constexpr int kTurns = 4;

// Calls add(n, i, values) for all columns, the last ones padded with `fill`: value i on of the row for register n.
template <class Add>
JAXLLM_INLINE void walk(const float* row, int64_t columns, float fill, const Add& add) {
  constexpr int64_t kTurn = kTurns * kLanes;
  int64_t c = 0;
  for (; c + kTurn <= columns; c += kTurn) JAXLLM_UNROLL
  for (int n = 0; n < kTurns; n++) add(n, c + n * kLanes, load<Floats>(row + c + n * kLanes));
  if (c == columns) return;
  alignas(64) float rest[kTurn];
  for (int64_t i = 0; i < kTurn; i++) rest[i] = c + i < columns ? row[c + i] : fill;
  JAXLLM_UNROLL
  for (int n = 0; n < kTurns; n++) add(n, c + n * kLanes, load<Floats>(rest + n * kLanes));
}

JAXLLM_INLINE float total(const Floats (&part)[kTurns]) { return sum((part[0] + part[1]) + (part[2] + part[3])); }

inline void sum_rows(const float* x, int64_t columns, int64_t begin, int64_t end, float* out) {
  for (int64_t r = begin; r < end; r++) {
    Floats part[kTurns] = {};
    walk(x + r * columns, columns, 0, [&](int n, int64_t, Floats v) { part[n] += v; });
    out[r] = total(part);
  }
}

// A row's largest number and the sum of exponentials after it is subtracted, each of them given to put(i, values);
// NaN unless all numbers are less than infinity, and one is more than -infinity.
struct Exponentials {
  float top, sum;
};

template <class Put>
JAXLLM_INLINE Exponentials exponentials(const float* row, int64_t columns, const Put& put) {
  Floats most = all_of(-INFINITY);
  Bits wild = {};
  walk(row, columns, -INFINITY, [&](int, int64_t, Floats v) {
    wild |= Bits(~(v < INFINITY));
    most = larger(most, v);
  });
  const float top = largest(most);
  if (any_of(wild) || top == -INFINITY) return {NAN, NAN};
  Floats part[kTurns] = {};
  walk(row, columns, -INFINITY, [&](int n, int64_t i, Floats v) {
    const Floats e = exp_of(v - top);
    part[n] += e;
    put(i, e);
  });
  return {top, total(part)};
}

inline void logsumexp_rows(const float* x, int64_t columns, int64_t begin, int64_t end, float* out) {
  for (int64_t r = begin; r < end; r++) {
    const Exponentials e = exponentials(x + r * columns, columns, [](int64_t, Floats) {});
    out[r] = float(e.top + __builtin_log(double(e.sum)));
  }
}

inline void softmax_rows(const float* x, int64_t columns, int64_t begin, int64_t end, float* out) {
  for (int64_t r = begin; r < end; r++) {
    float* to = out + r * columns;
    const Exponentials e = exponentials(x + r * columns, columns, [&](int64_t i, Floats v) {
      memcpy(to + i, &v, i + kLanes <= columns ? sizeof v : (i < columns ? 4 * (columns - i) : 0));
    });
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) store(to + i, load<Floats>(to + i) / e.sum);
    for (; i < columns; i++) to[i] = to[i] / e.sum;
    if (e.sum != e.sum)
      for (i = 0; i < columns; i++) to[i] = NAN;
  }
}

inline void normalize(const Norm& norm, int64_t begin, int64_t end, void* out) {
  const int64_t columns = norm.columns, width = up(columns, kLanes);
  struct Use {};
  float* row = reinterpret_cast<float*>(space<Use>(3 * 4 * width));
  float *weight = row + width, *bias = weight + width;
  memset(row, 0, 3 * 4 * width);
  to_floats(norm.weight_kind, norm.weight, 0, columns, weight);
  if (norm.bias) to_floats(norm.bias_kind, norm.bias, 0, columns, bias);
  for (int64_t c = 0; c < width; c += kLanes) store(weight + c, load<Floats>(weight + c) + norm.offset);
  for (int64_t r = begin; r < end; r++) {
    to_floats(norm.bf16 ? Kind::kBF16 : Kind::kF32, norm.x, r * columns, columns, row);
    if (norm.centered) {
      Floats part[kTurns] = {};
      walk(row, columns, 0, [&](int n, int64_t, Floats v) { part[n] += v; });
      const float mean = total(part) / float(columns);
      for (int64_t c = 0; c < columns; c++) row[c] -= mean;
    }
    Floats part[kTurns] = {};
    walk(row, columns, 0, [&](int n, int64_t, Floats v) { part[n] = fma(v, v, part[n]); });
    const float scale = 1 / __builtin_sqrtf(total(part) / float(columns) + norm.eps);
    for (int64_t c = 0; c < width; c += kLanes)
      store(row + c, fma(load<Floats>(row + c) * scale, load<Floats>(weight + c), load<Floats>(bias + c)));
    put_floats(row, columns, norm.bf16, out, r * columns);
  }
}

}  // namespace
}  // namespace jaxllm
