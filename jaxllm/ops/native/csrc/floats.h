// Float weights, 32 columns at a time.
#pragma once

#include "matmul.h"

namespace jaxllm {
namespace {

template <Kind K, bool Pairs>
struct FloatSource {
  static constexpr int kSize = K == Kind::kF32 ? 4 : 2;
  static constexpr bool kPairs = Pairs, kPartialChunk = true, kPartialUnits = false;
  static constexpr int kUnit = 32, kChunk = 32;
  static constexpr Scales kScales = Scales::kNone;
  typedef typename FloatsOrHalves<K == Kind::kBF16>::Type Value;
  struct Row {
    const uint8_t* at;
    int64_t distance;

    JAXLLM_INLINE void fetch(int64_t c) const {
      for (int line = 0; line < kChunk * kSize; line += 64) prefetch_line(at + c * kSize + line, distance);
    }
    template <int N>
    JAXLLM_INLINE void load(int64_t c, Value (&out)[N]) const {
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++) {
        const uint8_t* p = at + (c + n * lane_count<Value>()) * kSize;
        if constexpr (K == Kind::kF16)
          out[n] = from_f16(reinterpret_cast<const uint16_t*>(p));
        else
          out[n] = jaxllm::load<Value>(p);
      }
    }
    // From here on, the `count` columns from c on are read from a copy padded with zeros.
    void pad_end(int64_t c, int64_t count, uint8_t* padded) {
      memcpy(padded, at + c * kSize, count * kSize);
      at = padded - c * kSize;
    }
  };
  const Weight& w;
  int64_t distance;
  explicit FloatSource(const Weight& w) : w(w), distance(prefetch_distance(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const { return {w.data + o * w.stride, distance}; }
};

template <Kind K, bool Pairs>
void multiply_floats(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  if (Pairs)  // there is nothing to decode
    return multiply_source(FloatSource<K, Pairs>(w), w, in, x, w.stride, begin, end, y);
  multiply_decoded(FloatSource<K, Pairs>(w), w, in, x, begin, end, y, kRegisters < 32 ? 8 : 16);
}

}  // namespace
}  // namespace jaxllm
