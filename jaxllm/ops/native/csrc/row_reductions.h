// Reductions over rows of floats in a fixed order, with four independent accumulators.
#pragma once

#include "convert.h"

namespace jaxllm {
namespace {

constexpr int kAccumulators = 4;

// Calls add(n, i, values) for each register of a row: accumulator n, columns from i on, padded with `fill`.
template <class Add>
JAXLLM_INLINE void for_each_vector(const float* row, int64_t columns, float fill, const Add& add) {
  constexpr int64_t kStep = kAccumulators * kLanes;
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep) JAXLLM_UNROLL
  for (int n = 0; n < kAccumulators; n++) add(n, c + n * kLanes, load<Floats>(row + c + n * kLanes));
  if (c == columns) return;
  const Floats fills = splat(fill);
  Floats rest[kAccumulators] = {fills, fills, fills, fills};
  memcpy(rest, row + c, 4 * (columns - c));
  JAXLLM_UNROLL
  for (int n = 0; n < kAccumulators; n++) add(n, c + n * kLanes, rest[n]);
}

JAXLLM_INLINE float reduce(const Floats (&part)[kAccumulators]) {
  return reduce_add((part[0] + part[1]) + (part[2] + part[3]));
}

inline void sum_rows(const float* x, int64_t columns, int64_t begin, int64_t end, float* out) {
  for (int64_t r = begin; r < end; r++) {
    Floats part[kAccumulators] = {};
    for_each_vector(x + r * columns, columns, 0, [&](int n, int64_t, Floats v) { part[n] += v; });
    out[r] = reduce(part);
  }
}

// A row's maximum m and the sum of exp(x - m), each register of which is passed to output(i, values). NaN if a number
// is NaN or infinity, or all are -infinity.
struct Exponentials {
  float maximum, sum;
};

template <class Output>
JAXLLM_INLINE Exponentials exponentials(const float* row, int64_t columns, const Output& output) {
  Floats row_max = splat(-INFINITY);
  Bits non_finite = {};
  for_each_vector(row, columns, -INFINITY, [&](int, int64_t, Floats v) {
    non_finite |= Bits(~(v < INFINITY));
    row_max = max(row_max, v);
  });
  const float maximum = reduce_max(row_max);
  if (any_of(non_finite) || maximum == -INFINITY) return {NAN, NAN};
  Floats part[kAccumulators] = {};
  for_each_vector(row, columns, -INFINITY, [&](int n, int64_t i, Floats v) {
    const Floats e = exp_of(v - maximum);
    part[n] += e;
    output(i, e);
  });
  return {maximum, reduce(part)};
}

inline void logsumexp_rows(const float* x, int64_t columns, int64_t begin, int64_t end, float* out) {
  for (int64_t r = begin; r < end; r++) {
    const Exponentials e = exponentials(x + r * columns, columns, [](int64_t, Floats) {});
    out[r] = float(e.maximum + __builtin_log(double(e.sum)));
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
  const int64_t columns = norm.columns, width = round_up(columns, kLanes);
  struct Scratch {};
  float* row = reinterpret_cast<float*>(thread_scratch<Scratch>(3 * 4 * width));
  float *weight = row + width, *bias = weight + width;
  memset(row, 0, 3 * 4 * width);
  to_floats(norm.weight_kind, norm.weight, 0, columns, weight);
  if (norm.bias) to_floats(norm.bias_kind, norm.bias, 0, columns, bias);
  for (int64_t c = 0; c < width; c += kLanes) store(weight + c, load<Floats>(weight + c) + norm.offset);
  for (int64_t r = begin; r < end; r++) {
    to_floats(norm.bf16 ? Kind::kBF16 : Kind::kF32, norm.x, r * columns, columns, row);
    if (norm.centered) {
      Floats part[kAccumulators] = {};
      for_each_vector(row, columns, 0, [&](int n, int64_t, Floats v) { part[n] += v; });
      const float mean = reduce(part) / float(columns);
      for (int64_t c = 0; c < columns; c++) row[c] -= mean;
    }
    Floats part[kAccumulators] = {};
    for_each_vector(row, columns, 0, [&](int n, int64_t, Floats v) { part[n] = fma(v, v, part[n]); });
    const float scale = 1 / __builtin_sqrtf(reduce(part) / float(columns) + norm.eps);
    for (int64_t c = 0; c < width; c += kLanes)
      store(row + c, fma(load<Floats>(row + c) * scale, load<Floats>(weight + c), load<Floats>(bias + c)));
    store_floats(row, columns, norm.bf16, out, r * columns);
  }
}

}  // namespace
}  // namespace jaxllm
