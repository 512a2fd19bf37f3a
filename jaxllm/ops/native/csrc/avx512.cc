// The kernels for AVX-512 with VNNI and BF16 (Zen 4, Sapphire Rapids and later).
//
// A tile is `O` weight rows times `R` input rows. Each output has one accumulator that walks the
// columns in order, so its bits depend on nothing but its own two rows.
//
// One file for each way of multiplying: floats.h and packed.h by what the weights are, and for integer
// weights scaled.h, rounded.h and halves.h by what the input is.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace jaxllm {
namespace {

#include "numbers.h"
#include "attention.h"
#include "avx512/tiles.h"
#include "avx512/floats.h"
#include "avx512/expanded.h"
#include "avx512/packed.h"
#include "avx512/integers.h"
#include "avx512/scaled.h"
#include "avx512/rounded.h"
#include "avx512/halves.h"
#include "avx512/attention.h"

size_t prepared_bytes(const Weight& w, const Input& in) {
  return in.rows * (rounded(w, in) ? blocks_of(in) * sizeof(Block) : stride_of(in) * bytes_of(kept_of(w, in)));
}

void prepare(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const int64_t count = blocks_of(in), wide = up(in.columns, 128), stride = stride_of(in);
  const Kept kept = kept_of(w, in);
  std::vector<float> x(count * kRounded);
  for (int64_t r = begin; r < end; r++) {
    if (rounded(w, in)) {
      input_row(in, r, count * kRounded, x.data());
      for (int64_t b = 0; b < count; b++)
        write_block(w, &x[kRounded * b], static_cast<Block*>(prepared)[r * count + b]);
      continue;
    }
    if (kept == Kept::kBF16) {
      uint16_t* to = static_cast<uint16_t*>(prepared) + r * stride;
      if (in.columns) memcpy(to, static_cast<const uint16_t*>(in.x) + r * in.columns, 2 * in.columns);
      memset(to + in.columns, 0, 2 * (wide - in.columns));
      if (w.kind != Kind::kInt4) continue;
      for (int64_t c = 0; c < wide; c += 128) in_places(to + c);
      continue;
    }
    float* to = static_cast<float*>(prepared) + r * stride;
    input_row(in, r, wide, kept == Kept::kOrder ? to : x.data());
    for (int64_t c = 0; kept == Kept::kEvenOdd && c < wide; c++)
      to[c / 32 * 32 + c % 2 * 16 + c % 32 / 2] = x[c];
  }
}

void multiply(const Weight& w, const Input& in, const void* prepared, int64_t begin, int64_t end, float* y) {
  const uint8_t* x = static_cast<const uint8_t*>(prepared);
  switch (w.kind) {
    case Kind::kF32: return multiply_floats<F32, false>(w, in, x, begin, end, y);
    case Kind::kF16: return multiply_floats<F16, false>(w, in, x, begin, end, y);
    case Kind::kBF16:
      return in.bf16 ? multiply_floats<BF16, true>(w, in, x, begin, end, y)
                     : multiply_floats<BF16, false>(w, in, x, begin, end, y);
    case Kind::kPacked:
      if (!in.bf16) return multiply_packed<false>(w, in, x, begin, end, y);
      return in.rows > 4 ? multiply_packed_bf16(w, in, x, begin, end, y)
                         : multiply_packed<true>(w, in, x, begin, end, y);
    default:
      if (in.rounded) return multiply_by_int8(w, in, x, begin, end, y);
      return in.bf16 ? multiply_by_bf16(w, in, x, begin, end, y) : multiply_scaled(w, in, x, begin, end, y);
  }
}

void attend_either(const Queries& s, const Part* parts, int64_t count, int64_t b, int64_t head,
                   int64_t first, int64_t tokens, void* out) {
  if (!by_bf16(s, parts, count) || !attend_bf16(s, parts, count, b, head, first, tokens, out))
    attend(s, parts, count, b, head, first, tokens, out);
}

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels kernels = {"avx512", prepared_bytes, prepare, multiply, widen, attend_either};
  return &kernels;
}

}  // namespace jaxllm
