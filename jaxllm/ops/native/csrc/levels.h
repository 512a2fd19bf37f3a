// NF4: four-bit codes of 16 levels, which bfloat16 does not hold exactly. They are looked up as floats, and a block's
// products are added up before they are scaled.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

// Value n takes bits 4 n to 4 n + 3 of each lane's codes, which are 32 bits, or 16 where 16 lanes are a block's.
constexpr int kLaneCodes = kLanes == 16 ? 4 : 8;

// The column, of 128, of the i-th number: byte j of a block of 32 holds column j in its low bits, j + 32 in its high.
constexpr int level_column(int i) {
  const int byte = (i / (kLaneCodes * kLanes) * kLanes + i % kLanes) * kLaneCodes / 2;
  const int n = i / kLanes % kLaneCodes;
  return (byte + n / 2) / 32 * 64 + (byte + n / 2) % 32 + n % 2 * 32;
}

struct LevelSource {
  static constexpr bool kPairs = false, kTail = false, kEnds = true;
  static constexpr int kUnit = kLaneCodes * kLanes, kChunk = 128;
  static constexpr Scales kScales = Scales::kUnit;
  typedef Floats Value;
  struct Row {
    const LevelSource* of;
    const uint8_t* at;
    const float* scales;

    JAXLLM_INLINE void fetch(int64_t c) const { ahead(at + c / 2, of->distance); }
    JAXLLM_INLINE void load(int64_t c, Floats (&out)[kLaneCodes]) const {
      Bits codes;
      if constexpr (kLaneCodes == 4)
        codes = __builtin_convertvector(jaxllm::load<Words>(at + c / 2), Bits);
      else
        codes = jaxllm::load<Bits>(at + c / 2);
      JAXLLM_UNROLL
      for (int n = 0; n < kLaneCodes; n++) out[n] = of->levels.at(codes >> (4 * n));
    }
    JAXLLM_INLINE Floats scale(int64_t c) const { return all_of(scales[c / 64]); }
  };
  const Weight& w;
  int64_t distance;
  Groups groups;
  Levels levels;
  LevelSource(const Weight& w, const Input& in)
      : w(w), distance(distance_of(w.stride)), groups(groups_of(w, in, kUnit)), levels(w.levels) {}

  JAXLLM_INLINE Row row(int64_t o, int i) const {
    return {this, w.data + o * w.stride, static_cast<const float*>(groups.row(o, i).scales)};
  }
};

inline void multiply_levels(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  Weight padded = w;  // units of fewer lanes are parts of a block
  padded.columns = up(w.columns, 64);
  multiply_expanded(LevelSource(padded, in), padded, in, x, begin, end, y);
  mend(w, in, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
