// NF4: 4-bit codes of 16 values that are not exact in bfloat16. They are looked up as floats; a block's sum is scaled.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

// Value n is bits 4 n to 4 n + 3 of each lane's codes: 32 bits, or 16 if a register has 16 lanes.
constexpr int kCodesPerLane = kLanes == 16 ? 4 : 8;

// Column (of 128) of the i-th number: byte j of a block's 32 holds columns j and j + 32.
constexpr int nf4_column(int i) {
  const int byte = (i / (kCodesPerLane * kLanes) * kLanes + i % kLanes) * kCodesPerLane / 2;
  const int n = i / kLanes % kCodesPerLane;
  return (byte + n / 2) / 32 * 64 + (byte + n / 2) % 32 + n % 2 * 32;
}

struct Nf4Source {
  static constexpr bool kPairs = false, kPartialChunk = false, kPartialUnits = true;
  static constexpr int kUnit = kCodesPerLane * kLanes, kChunk = 128;
  static constexpr Scales kScales = Scales::kUnit;
  typedef Floats Value;
  struct Row {
    const Nf4Source* source;
    const uint8_t* at;
    const float* scales;

    JAXLLM_INLINE void fetch(int64_t c) const { prefetch_line(at + c / 2, source->distance); }
    JAXLLM_INLINE void load(int64_t c, Floats (&out)[kCodesPerLane]) const {
      Bits codes;
      if constexpr (kCodesPerLane == 4)
        codes = __builtin_convertvector(jaxllm::load<Words>(at + c / 2), Bits);
      else
        codes = jaxllm::load<Bits>(at + c / 2);
      JAXLLM_UNROLL
      for (int n = 0; n < kCodesPerLane; n++) out[n] = source->codebook.lookup(codes >> (4 * n));
    }
    JAXLLM_INLINE Floats scale(int64_t c) const { return splat(scales[c / 64]); }
  };
  const Weight& w;
  int64_t distance;
  Groups groups;
  Codebook codebook;
  Nf4Source(const Weight& w, const Input& in)
      : w(w), distance(prefetch_distance(w.stride)), groups(make_groups(w, in, kUnit)), codebook(w.codebook) {}

  JAXLLM_INLINE Row row(int64_t o, int i) const {
    return {this, w.data + o * w.stride, static_cast<const float*>(groups.row(o, i).scales)};
  }
};

inline void multiply_nf4(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  Weight padded = w;  // units of fewer lanes are parts of a block
  padded.columns = round_up(w.columns, 64);
  multiply_decoded(Nf4Source(padded, in), padded, in, x, begin, end, y);
  recompute_overflowed(w, in, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
