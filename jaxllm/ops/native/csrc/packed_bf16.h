// bfloat16 packed to 12 bits. Products have the bits that bfloat16 weights give.
#pragma once

#include "matmul.h"

namespace jaxllm {
namespace {

// The escapes of a row, clipped to the array.
struct EscapeRange {
  int32_t begin, end;
};

inline EscapeRange escape_range(const Weight& w, int64_t o) {
  const auto clip = [&](int32_t i) { return i < 0 ? 0 : (i < w.escapes ? i : w.escapes); };
  return {clip(w.escape_begin[o]), clip(w.escape_begin[o + 1])};
}

template <bool Pairs>
struct PackedBf16Source {
  static constexpr bool kPairs = Pairs, kPartialChunk = false, kPartialUnits = true;
  static constexpr int kUnit = 64, kChunk = 128, kValues = kUnit / kHalves;
  static constexpr Scales kScales = Scales::kNone;
  typedef Halves Value;
  struct Row {
    const PackedBf16Source* source;
    const uint8_t *bytes, *nibbles;
    int32_t at, end, next;  // escapes, and the column of the next one

    JAXLLM_INLINE void fetch(int64_t c) const {
      prefetch_line(bytes + c, source->distance);
      prefetch_line(bytes + c + 64, source->distance);
      prefetch_line(nibbles + c / 2, source->distance / 2);
    }

    JAXLLM_INLINE void load(int64_t c, Halves (&out)[kValues]) {
      constexpr int kParts = 64 / kBytes;
      JAXLLM_UNROLL
      for (int i = 0; i < kParts; i++) {
        const Bytes index = jaxllm::load<Bytes>(nibbles + c / 128 * 64 + i * kBytes);
        const Bytes nibbles_of_unit = (c & 64 ? index >> 4 : index) & 15;
        source->exponents.decode(jaxllm::load<Bytes>(bytes + c + i * kBytes), nibbles_of_unit, out[i], out[kParts + i]);
      }
      if (__builtin_expect(next < c + 64, 0)) apply_escapes(c, out);
    }

    int32_t column() const { return at < end ? source->w.escape_column[at] : INT32_MAX; }

    // Overwrites columns c to c + 63 that are escapes.
    __attribute__((noinline)) void apply_escapes(int64_t c, Halves (&out)[kValues]) {
      uint16_t values[64];
      memcpy(values, out, sizeof values);
      for (; column() < c + 64; at++)
        if (column() >= c) values[column() - c] = source->w.escape_value[at];
      memcpy(out, values, sizeof values);
      next = column();
    }
  };
  const Weight& w;
  Exponents exponents;
  int64_t distance;
  explicit PackedBf16Source(const Weight& w) : w(w), exponents(w.base), distance(prefetch_distance(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const {
    const EscapeRange range = escape_range(w, o);
    Row row = {this, w.data + o * w.stride, w.nibbles + o * w.nibble_stride, range.begin, range.end, 0};
    row.next = row.column();
    return row;
  }
};

template <bool Pairs>
void multiply_packed(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  multiply_decoded(PackedBf16Source<Pairs>(w), w, in, x, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
