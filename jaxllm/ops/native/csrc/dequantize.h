// Dequantized rows of weights.
#pragma once

#include "k_quants.h"
#include "packed_bf16.h"

namespace jaxllm {
namespace {

constexpr int64_t kRowChunk = 128;

// Dequantizes kRowChunk integers of row o.
inline void dequantize_integers(const Weight& w, const uint8_t* row, int64_t o, int64_t first, float* out) {
  const bool int4 = w.kind == Kind::kInt4;
  const int64_t bytes = int4 ? 16 : 32;  // of 32 columns
  for (int64_t b = 0; b < kRowChunk / 32; b++) {
    const uint8_t* byte = row + (first / 32 + b) * (w.blocks ? bytes + 2 : bytes) + (w.blocks ? 2 : 0);
    int8_t q[32];
    for (int j = 0; j < 16; j++) {
      const int low = int4 ? byte[j] & 15 : byte[j], high = int4 ? byte[j] >> 4 : byte[16 + j];
      q[j] = w.e2m1 ? kLevels[low] : int8_t(low);
      q[16 + j] = w.e2m1 ? kLevels[high] : int8_t(high);
    }
    to_floats(Kind::kInt8, q, 0, 32, out + 32 * b);
  }
  const int64_t step = w.group < kRowChunk ? w.group : kRowChunk;
  for (int64_t i = 0; i < kRowChunk; i += step) {
    const int64_t g = o * w.groups + (first + i) / w.group;
    const float scale = group_scale(w, g);
    const float zero = w.zero ? w.zero[g] : (int4 && !w.e2m1 ? 8.0f : 0.0f);
    for (int64_t j = i; j < i + step; j += kLanes) store(out + j, (load<Floats>(out + j) - zero) * scale);
  }
}

// Dequantizes `count` columns of row o, at most kRowChunk, from a multiple of kRowChunk on.
inline void dequantize_columns(const Weight& w, int64_t o, int64_t first, int64_t count, float* out) {
  const uint8_t* row = w.data + o * w.stride;
  if (w.kind == Kind::kPackedBF16) {
    const PackedBf16Source<false> source(w);
    PackedBf16Source<false>::Row packed = source.row(o, 0);
    for (int64_t c = first; c < first + count; c += 64) {
      Halves halves[PackedBf16Source<false>::kValues];
      packed.load(c, halves);
      uint16_t bf16[64];
      memcpy(bf16, halves, sizeof bf16);
      to_floats(Kind::kBF16, bf16, 0, first + count - c < 64 ? first + count - c : 64, out + (c - first));
    }
    return;
  }
  const bool packs_codes = is_integer(w) || is_k_quant(w) || w.kind == Kind::kNF4;
  if (!packs_codes) return to_floats(w.kind, row, first, count, out);
  float values[kRowChunk];
  if (is_k_quant(w)) {
    w.kind == Kind::kQ4K   ? dequantize_k_quant<Kind::kQ4K>(w, o, first, values)
    : w.kind == Kind::kQ5K ? dequantize_k_quant<Kind::kQ5K>(w, o, first, values)
                           : dequantize_k_quant<Kind::kQ6K>(w, o, first, values);
  } else if (w.kind == Kind::kNF4) {
    const Codebook codebook(w.codebook);
    for (int64_t c = 0; c < count; c += 64) {
      const float scale = group_scale(w, o * w.groups + (first + c) / 64);
      for (int64_t j = 0; j < 32; j += kLanes) {
        const Bits codes = Bits(__builtin_convertvector(load<Signed>(row + (first + c) / 2 + j), Ints));
        store(values + c + j, codebook.lookup(codes) * scale);
        store(values + c + 32 + j, codebook.lookup(codes >> 4) * scale);
      }
    }
  } else {
    dequantize_integers(w, row, o, first, values);
  }
  if (count) memcpy(out, values, 4 * count);
}

inline void dequantize(const Weight& w, int64_t begin, int64_t end, bool bf16, void* out) {
  for (int64_t o = begin; o < end; o++)
    for (int64_t first = 0; first < w.columns; first += kRowChunk) {
      const int64_t count = w.columns - first < kRowChunk ? w.columns - first : kRowChunk;
      float part[kRowChunk];
      dequantize_columns(w, o, first, count, part);
      store_floats(part, count, bf16, out, o * w.columns + first);
    }
}

}  // namespace
}  // namespace jaxllm
