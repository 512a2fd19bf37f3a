// What becomes of the sums: which rows of the weight make a tile, and what is written for two of
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

DEVICE uint16_t round_bf16(float x) { return uint16_t(round_pair(x, 0)); }
DEVICE float read_bf16(const void* values, size_t index) {
  return low_float(read_global((const uint16_t*)values + index));
}

struct Consecutive {
  static DEVICE int row(const Product&, int tile, int r, int half) {
    return 16 * tile + 8 * half + r;
  }
  static DEVICE Two read_ahead(const Product&, int, int, int) { return {0, 0}; }
};

// y: float32 [M, O].
struct Float32 : Consecutive {
  static DEVICE void write(const Product& p, int m, int low, int high, Two sum, Two) {
    float* y = (float*)p.y + size_t(m) * p.outputs;
    y[low] = sum.low;
    y[high] = sum.high;
  }
};

// y: bf16 [M, O], the residual + the sums, which are rounded first.
struct Residual : Consecutive {
  static DEVICE Two read_ahead(const Product& p, int m, int low, int high) {
    const size_t row = size_t(m) * p.outputs;
    return {read_bf16(p.residual, row + low), read_bf16(p.residual, row + high)};
  }
  static DEVICE void write(const Product& p, int m, int low, int high, Two sum, Two residual) {
    uint16_t* y = (uint16_t*)p.y + size_t(m) * p.outputs;
    y[low] = round_bf16(residual.low + low_float(round_bf16(sum.low)));
    y[high] = round_bf16(residual.high + low_float(round_bf16(sum.high)));
  }
};

// y: bf16 [M, O / 2], silu(gate) * up. The weight's rows are those of the gate, then those of up.
struct SwiGlu : Consecutive {
  static DEVICE int row(const Product& p, int tile, int r, int half) {
    return half * (p.outputs / 2) + 8 * tile + r;
  }
  static DEVICE void write(const Product& p, int m, int low, int, Two sum, Two) {
    constexpr float LOG2_E = 1.4426950408889634f;
    const float gate = sum.low / (1 + exp2_of(-sum.low * LOG2_E));
    ((uint16_t*)p.y)[size_t(m) * (p.outputs / 2) + low] = round_bf16(gate * sum.high);
  }
};

// y: bf16 [M, heads, H], queries rotated by halves; keys, rotated, and values go to the cache. The
// weight's rows are those of q, k and v; sums are rounded before they are rotated.
struct RotaryCache : Consecutive {
  static DEVICE int row(const Product& p, int tile, int r, int half) {
    const int tiles = p.head_size / 16;  // of a head
    return tile / tiles * p.head_size + tile % tiles * 8 + r + half * (p.head_size / 2);
  }
  static DEVICE void write(const Product& p, int m, int low, int, Two sum, Two) {
    const int head = low / p.head_size, d = low % p.head_size, half = p.head_size / 2;
    uint16_t first = round_bf16(sum.low), second = round_bf16(sum.high);
    if (head < p.heads + p.kv_heads) {
      const float cosine = read_global(p.cosine + m * half + d);
      const float sine = read_global(p.sine + m * half + d);
      const float a = low_float(first), b = low_float(second);
      first = round_bf16(fmaf(a, cosine, -(b * sine)));
      second = round_bf16(fmaf(b, cosine, a * sine));
    }
    uint16_t* to = (uint16_t*)p.y + (size_t(m) * p.heads + head) * p.head_size;
    if (head >= p.heads) {
      const size_t slot = size_t(m) * p.slots + read_global(p.slot + m);
      uint16_t* cache = (uint16_t*)(head < p.heads + p.kv_heads ? p.keys : p.values);
      to = cache + (slot * p.kv_heads + (head - p.heads) % p.kv_heads) * p.head_size;
    }
    to[d] = first;
    to[d + half] = second;
  }
};

}  // namespace jaxllm
