// What becomes of the sums: which rows of the weights make a tile, and what is written for two of
// them. A tile has two halves of 8 rows; a thread has the same row r of both.
//
// An epilogue may read ahead, before the sums are there.
#pragma once

#include "arguments.h"
#include "device.h"

namespace jaxllm {

struct Two {
  float low, high;  // of rows in the first and in the second half of a tile
};
struct WeightRow {
  int weight, row;
};

// An array's element, without an index that only memory has.
template <class T>
DEVICE T pick(const T (&of)[WEIGHTS], int weight) {
  return weight == 0 ? of[0] : weight == 1 ? of[1] : of[2];
}

DEVICE uint16_t round_bf16(float x) { return uint16_t(round_pair(x, 0)); }
DEVICE float read_bf16(const void* values, size_t index) {
  return low_float(read_global((const uint16_t*)values + index));
}

// The weights' rows, one weight after the other.
struct Consecutive {
  static DEVICE int tile_count(const Product& p) {
    return (p.outputs[0] + p.outputs[1] + p.outputs[2]) / 16;
  }
  static DEVICE WeightRow row(const Product& p, int tile, int r, int half) {
    WeightRow at = {0, 16 * tile};
    JAXLLM_UNROLL
    for (int i = 0; i < WEIGHTS - 1; i++)
      if (at.weight == i && at.row >= p.outputs[i]) at = {i + 1, at.row - p.outputs[i]};
    return {at.weight, at.row + 8 * half + r};
  }
  static DEVICE Two read_ahead(const Product&, int, WeightRow, WeightRow) { return {0, 0}; }
  template <class T>
  static DEVICE T* outputs(const Product& p, int m, int weight) {
    return (T*)pick(p.y, weight) + size_t(m) * pick(p.outputs, weight);
  }
};

// y: float32 [M, O].
struct Float32 : Consecutive {
  static DEVICE void write(const Product& p, int m, WeightRow low, WeightRow high, Two sum, Two) {
    float* y = outputs<float>(p, m, low.weight);
    y[low.row] = sum.low;
    y[high.row] = sum.high;
  }
};

// y: bf16 [M, O].
struct Rounded : Consecutive {
  static DEVICE void write(const Product& p, int m, WeightRow low, WeightRow high, Two sum, Two) {
    uint16_t* y = outputs<uint16_t>(p, m, low.weight);
    y[low.row] = round_bf16(sum.low);
    y[high.row] = round_bf16(sum.high);
  }
};

// y: bf16 [M, O], the residual + the sums, which are rounded first.
struct Residual : Consecutive {
  static DEVICE Two read_ahead(const Product& p, int m, WeightRow low, WeightRow high) {
    const size_t row = size_t(m) * p.outputs[0];
    return {read_bf16(p.residual, row + low.row), read_bf16(p.residual, row + high.row)};
  }
  static DEVICE void write(const Product& p, int m, WeightRow low, WeightRow high, Two sum,
                           Two residual) {
    uint16_t* y = outputs<uint16_t>(p, m, low.weight);
    y[low.row] = round_bf16(residual.low + low_float(round_bf16(sum.low)));
    y[high.row] = round_bf16(residual.high + low_float(round_bf16(sum.high)));
  }
};

struct Silu {
  static DEVICE float of(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
    return x / (1 + exp2_of(-x * LOG2_E));
  }
};
struct GeluTanh {  // x / 2 (1 + tanh z) = x / (1 + exp(-2 z))
  static DEVICE float of(float x) {
    constexpr float MINUS_2_LOG2_E = -2.8853900817779268f, ROOT_2_OVER_PI = 0.7978845608028654f;
    return x / (1 + exp2_of(MINUS_2_LOG2_E * ROOT_2_OVER_PI * (x + 0.044715f * x * x * x)));
  }
};

// y: bf16 [M, O], activation(gate) * up, of the first weight's rows and the second's. Both sums
// are rounded first.
template <class Activation>
struct Gated : Consecutive {
  static DEVICE int tile_count(const Product& p) { return p.outputs[0] / 8; }
  static DEVICE WeightRow row(const Product&, int tile, int r, int half) {
    return {half, 8 * tile + r};
  }
  static DEVICE void write(const Product& p, int m, WeightRow low, WeightRow, Two sum, Two) {
    const float gate = low_float(round_bf16(Activation::of(low_float(round_bf16(sum.low)))));
    outputs<uint16_t>(p, m, 0)[low.row] = round_bf16(gate * low_float(round_bf16(sum.high)));
  }
};

}  // namespace jaxllm
