// bfloat16 from 12 bits. Products have the same bits as with bfloat16 weights: the same units in the same order.
#pragma once

#include "product.h"

namespace jaxllm {
namespace {

// The escapes of a row, `begin <= i < end`; never reads outside the arrays, whatever they hold.
struct Range {
  int32_t begin, end;
};

inline Range escapes_of(const Weight& w, int64_t o) {
  const auto inside = [&](int32_t i) { return i < 0 ? 0 : (i < w.escapes ? i : w.escapes); };
  return {inside(w.escape_begin[o]), inside(w.escape_begin[o + 1])};
}

template <bool Pairs>
struct Packed {
  static constexpr bool kPairs = Pairs, kTail = false, kEnds = true;
  static constexpr int kUnit = 64, kChunk = 128, kValues = kUnit / kHalves;
  static constexpr Scales kScales = Scales::kNone;
  typedef Halves Value;
  struct Row {
    const Packed* of;
    const uint8_t *bytes, *nibbles;
    int32_t at, end, next;  // escapes, and the column of the next one

    JAXLLM_INLINE void fetch(int64_t c) const {
      ahead(bytes + c, of->distance);
      ahead(bytes + c + 64, of->distance);
      ahead(nibbles + c / 2, of->distance / 2);
    }

    JAXLLM_INLINE void load(int64_t c, Halves (&out)[kValues]) {
      constexpr int kParts = 64 / kBytes;
      JAXLLM_UNROLL
      for (int i = 0; i < kParts; i++) {
        const Bytes index = jaxllm::load<Bytes>(nibbles + c / 128 * 64 + i * kBytes);
        const Bytes mine = (c & 64 ? index >> 4 : index) & 15;
        of->exponents.join(jaxllm::load<Bytes>(bytes + c + i * kBytes), mine, out[i], out[kParts + i]);
      }
      if (__builtin_expect(next < c + 64, 0)) patch(c, out);
    }

    int32_t column() const { return at < end ? of->w.escape_column[at] : INT32_MAX; }

    // Inserts the escapes of columns c to c + 63.
    __attribute__((noinline)) void patch(int64_t c, Halves (&out)[kValues]) {
      uint16_t plain[64];
      memcpy(plain, out, sizeof plain);
      for (; column() < c + 64; at++)
        if (column() >= c) plain[column() - c] = of->w.escape_value[at];
      memcpy(out, plain, sizeof plain);
      next = column();
    }
  };
  const Weight& w;
  Exponents exponents;
  int64_t distance;
  explicit Packed(const Weight& w) : w(w), exponents(w.base), distance(distance_of(w.stride)) {}

  JAXLLM_INLINE Row row(int64_t o, int) const {
    const Range range = escapes_of(w, o);
    Row row = {this, w.data + o * w.stride, w.nibbles + o * w.nibble_stride, range.begin, range.end, 0};
    row.next = row.column();
    return row;
  }
};

template <bool Pairs>
void multiply_packed(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  multiply_expanded(Packed<Pairs>(w), w, in, x, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
