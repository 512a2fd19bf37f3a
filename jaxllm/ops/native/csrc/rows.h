// Dequantized rows of weights.
#pragma once

#include "packed.h"
#include "super_blocks.h"

namespace jaxllm {
namespace {

constexpr int64_t kPart = 128;

// `count` columns of row o from `from` on (a multiple of kPart; count at most kPart), as floats.
inline void row_part(const Weight& w, int64_t o, int64_t from, int64_t count, float* out) {
  const uint8_t* row = w.data + o * w.stride;
  if (w.kind == Kind::kPacked) {
    const Packed<false> source(w);
    Packed<false>::Row packed = source.row(o, 0);
    for (int64_t c = from; c < from + count; c += 64) {
      Halves some[Packed<false>::kValues];
      packed.load(c, some);
      uint16_t plain[64];
      memcpy(plain, some, sizeof plain);
      to_floats(Kind::kBF16, plain, 0, from + count - c < 64 ? from + count - c : 64, out + (c - from));
    }
    return;
  }
  if (super(w)) {
    float part[kPart];
    w.kind == Kind::kQ4K   ? super_part<Kind::kQ4K>(w, o, from, part)
    : w.kind == Kind::kQ5K ? super_part<Kind::kQ5K>(w, o, from, part)
                           : super_part<Kind::kQ6K>(w, o, from, part);
    if (count) memcpy(out, part, 4 * count);
    return;
  }
  if (!integers(w) && w.kind != Kind::kNF4) return to_floats(w.kind, row, from, count, out);
  const bool four = w.kind == Kind::kInt4;
  const int64_t bytes = four ? 16 : 32;  // of 32 columns
  float whole[kPart];
  if (w.kind == Kind::kNF4) {
    const Levels levels(w.levels);
    for (int64_t c = 0; c < count; c += 64) {
      const float scale = scale_at(w, o * w.groups + (from + c) / 64);
      for (int64_t j = 0; j < 32; j += kLanes) {
        const Bits codes = Bits(__builtin_convertvector(load<Signed>(row + (from + c) / 2 + j), Ints));
        store(whole + c + j, levels.at(codes) * scale);
        store(whole + c + 32 + j, levels.at(codes >> 4) * scale);
      }
    }
    if (count) memcpy(out, whole, 4 * count);
    return;
  }
  for (int64_t b = 0; b < kPart / 32; b++) {
    const uint8_t* byte = row + (from / 32 + b) * (w.blocks ? bytes + 2 : bytes) + (w.blocks ? 2 : 0);
    int8_t q[32];
    for (int j = 0; j < 16; j++) {
      q[j] = int8_t(four ? byte[j] & 15 : byte[j]);
      q[16 + j] = int8_t(four ? byte[j] >> 4 : byte[16 + j]);
    }
    to_floats(Kind::kInt8, q, 0, 32, whole + 32 * b);
  }
  const int64_t step = w.group < kPart ? w.group : kPart;
  for (int64_t i = 0; i < kPart; i += step) {
    const int64_t g = o * w.groups + (from + i) / w.group;
    const float scale = scale_at(w, g);
    const float zero = w.zero ? w.zero[g] : (four ? 8.0f : 0.0f);
    for (int64_t j = i; j < i + step; j += kLanes) store(whole + j, (load<Floats>(whole + j) - zero) * scale);
  }
  if (count) memcpy(out, whole, 4 * count);
}

inline void widen(const Weight& w, int64_t begin, int64_t end, bool bf16, void* out) {
  for (int64_t o = begin; o < end; o++)
    for (int64_t from = 0; from < w.columns; from += kPart) {
      const int64_t count = w.columns - from < kPart ? w.columns - from : kPart;
      float part[kPart];
      row_part(w, o, from, count, part);
      put_floats(part, count, bf16, out, o * w.columns + from);
    }
}

}  // namespace
}  // namespace jaxllm
