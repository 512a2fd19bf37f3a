// Int4 weights times bfloat16 inputs on sets that multiply unsigned by signed bytes (VNNI, AVX2). A few rows are
// multiplied as integers: each input is split into three int8 digits. More rows share decoded weights
// (multiply_decoded).
//
// The eight columns of a lane share a step: a power of two for which the inputs are integers and the sum of |weight *
// input| stays below 2^24 steps. Then a lane's sums are exact, in integers and in floats and in any order, so a row has
// the same bits alone and in a batch. Inputs that are no integer number of steps (not finite, or far smaller than a
// neighbor) count as 0 here. They are the row's residual, whose products are added last.
//
// VNNI needs no shift for the high nibbles: byte * x_high + low * (16 x_low - x_high) is 16 times the sum of both
// products. On AVX2 these would overflow its 16-bit sums. It shifts, and scales each digit's sums by 2^14, 2^7 or 1.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

constexpr int kDigitBits = kOffset ? 8 : 7;
constexpr int kSumScale = kOffset ? 16 : 1;  // sums are scaled by it

inline bool uses_digits(const Weight& w, const Input& in) {
  return kDigitRows && w.kind == Kind::kInt4 && !w.e2m1 && in.bf16 && !in.quantize;
}

// Column order of bfloat16 registers that are split into floats: the even columns, then the odd ones.
constexpr int even_odd(int i) { return i / kHalves * kHalves + i % kLanes * 2 + i / kLanes % 2; }

// Column (of 128) of the i-th float that multiplies nibbles.
constexpr int float_column(int i) { return nibble_column(lane_count<NibbleValue>() == kHalves ? even_odd(i) : i); }

// The digits of a unit, most significant first: the factors of low nibbles, then of whole bytes. bias: what the
// weights' offset (or 1 of their zero point) adds to a lane's sum. step: of a lane, divided by kSumScale.
struct alignas(64) InputDigits {
  int8_t digit[3][2][kBytes];
  Ints bias;
  Floats step;
};

// A prepared input has exact_bytes for each row, then each row's residual: the number of columns, and the columns.
inline int64_t unit_count(const Input& in) { return round_up(in.columns, 128) / (2 * kBytes); }
inline int64_t exact_bytes(const Input& in) {
  return in.rows <= kDigitRows ? unit_count(in) * sizeof(InputDigits) : prepared_stride(in) * (kPairs ? 2 : 4);
}
inline int64_t residual_bytes(const Input& in) { return 4 * (in.columns + 1); }
inline int64_t residual_offset(const Input& in, int64_t r) {
  return in.rows * exact_bytes(in) + r * residual_bytes(in);
}

// Prepares row r, `x`, floats in the order of float_column.
inline void prepare_exact(const Weight& w, const Input& in, int64_t r, const float* x, void* prepared) {
  uint8_t* to = static_cast<uint8_t*>(prepared) + r * exact_bytes(in);
  int32_t* residual = reinterpret_cast<int32_t*>(static_cast<uint8_t*>(prepared) + residual_offset(in, r));
  residual[0] = 0;
  for (int64_t c = 0; c < in.columns; c += 128)
    for (int u = 0; u < 128; u += 2 * kBytes, x += 2 * kBytes) {
      Floats v[8], sum = {}, max_abs = {};
      JAXLLM_UNROLL
      for (int n = 0; n < 8; n++) {
        v[n] = load<Floats>(x + n * kLanes);
        const Floats size = magnitude(v[n]) * 0x1p-8f;  // so that no sum overflows
        sum += size;
        max_abs = max(max_abs, size);
      }
      // |weight| is at most 8, or 15 with a zero point: the sum is below 2^21 or 2^20 steps. Three 8-bit digits hold 17
      // times any input (below 2^23 - 2^16 steps), 7-bit digits any input (below 127 * 2^14).
      const Floats bound = max(max(sum, max_abs * (kOffset ? 4.3f : 1.02f)), splat(0x1p-100f));
      const Bits bits = (Bits(bound) & 0x7f800000u) - ((w.zero ? 11u : 12u) << 23);
      const Floats step = Floats(bits), inverse = Floats((254u << 23) - bits);
      Ints steps[2][4], all = {};
      JAXLLM_UNROLL
      for (int n = 0; n < 8; n++) {
        const Floats count = v[n] * inverse, rounded_count = round_nearest(count);
        const Bits is_integral = Bits(rounded_count * step == v[n]) & Bits(magnitude(count) <= 0x1p21f);
        const Floats steps_as_float = Floats(Bits(rounded_count) & is_integral);
        v[n] = steps_as_float * step;
        if (any_of(~is_integral))
          for (int l = 0; l < kLanes; l++)
            if (!is_integral[l]) residual[++residual[0]] = int32_t(c + float_column(u + n * kLanes + l));
        const int column = float_column(n * kLanes);
        all += steps[column / 16][column % 4] = to_ints(steps_as_float);
      }
      if (in.rows <= kDigitRows) {
        InputDigits& out = *reinterpret_cast<InputDigits*>(to);
        Bits word[3][2] = {};
        JAXLLM_UNROLL
        for (int i = 0; i < 4; i++) JAXLLM_UNROLL
        for (int high = 0; high < 2; high++) {
          Ints digits = kOffset && !high ? steps[0][i] * 16 - steps[1][i] : steps[high][i];
          JAXLLM_UNROLL
          for (int k = 2; k >= 0; k--) {
            const Ints above = k ? (digits + (1 << kDigitBits >> 1)) >> kDigitBits : Ints{};
            word[k][high] |= (Bits(digits - (above << kDigitBits)) & 255) << (8 * i);
            digits = above;
          }
        }
        memcpy(out.digit, word, sizeof word);
        out.bias = (w.zero ? -kSumScale : -8 * kSumScale) * all;
        out.step = step * (1.0f / kSumScale);
        to += sizeof out;
        continue;
      }
      JAXLLM_UNROLL
      for (int n = 0; n < 8; n += kPairs + 1, to += sizeof(Floats)) {
        if constexpr (kPairs)
          store(to, narrow(v[n], v[n + 1]));
        else
          store(to, v[n]);
      }
    }
}

template <int O, int R, class Source>
void digits_tile(const Source& source, const Weight& w, const InputDigits* x, int64_t units, const TileRows& o,
                 int64_t r, float* y) {
  typename Source::Row row[O];
  Floats sum[O][R];
  clear(sum);
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) row[i] = source.row(o[i], i);
  x += r * units;
  for (int64_t c = 0; c < w.columns; c += Source::kChunk) {
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++)
      if (!r) row[i].fetch(c);
    JAXLLM_UNROLL
    for (int u = 0; u < Source::kChunk; u += Source::kUnit, x++) JAXLLM_UNROLL
    for (int i = 0; i < O; i++) {
      const auto codes = row[i].codes(c + u), low = codes & 15;
      const Ints offset = row[i].offset(c + u);
      const Floats scale = row[i].scale(c + u);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const InputDigits& in = x[j * units];
        Ints total = {};
        JAXLLM_UNROLL
        for (int k = 0; k < 3 && kOffset; k++) {
          if (k) total = Ints(Bits(total) << 8);
          add_bytes(total, low, load<Bytes>(in.digit[k][0]));
          add_bytes(total, codes, load<Bytes>(in.digit[k][1]));
        }
        if constexpr (!kOffset) total = digit_products(codes, in.digit);
        total = Ints(Bits(total) + Bits(in.bias * offset));
        sum[i][j] = fma(to_floats(total) * in.step, scale, sum[i][j]);
      }
    }
  }
  store_sums(sum, w, o, r, false, y);
}

// Adds the residual's products.
inline void add_residual(const Weight& w, const Input& in, const uint8_t* prepared, int64_t begin, int64_t end,
                         float* y) {
  const int64_t bytes = w.blocks ? block_bytes(4) : 16;
  for (int64_t r = 0; r < in.rows; r++) {
    const int32_t* residual = reinterpret_cast<const int32_t*>(prepared + residual_offset(in, r));
    for (int32_t i = 1; i <= residual[0]; i++) {
      const int64_t c = residual[i], group = c / w.group;
      const float x = from_bf16(static_cast<const uint16_t*>(in.x)[r * in.columns + c]);
      const uint8_t* code = w.data + c / 32 * bytes + (w.blocks ? 2 : 0) + c % 16;
      for (int64_t o = begin; o < end; o++) {
        const int64_t g = o * w.groups + group;
        const int q = (code[o * w.stride] >> (c % 32 / 16 * 4) & 15) - (w.zero ? w.zero[g] : 8);
        y[r * w.rows + o] = __builtin_fmaf(float(q) * group_scale(w, g), x, y[r * w.rows + o]);
      }
    }
  }
}

template <bool Zero, bool Blocks>
void multiply_digits(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr int kTileRows = kRegisters < 32 ? 1 : 4;
  const Int4Source<Zero, false, Blocks> source(w, in);
  for_each_tile<4, kTileRows, kTileRows>(begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
    digits_tile<O, R>(source, w, reinterpret_cast<const InputDigits*>(x), unit_count(in), o, r, y);
  });
}

template <bool Pairs>
void multiply_exact(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const bool exact = uses_digits(w, in), uses_few_rows = exact && in.rows <= kDigitRows;
  const int64_t block_rows = exact ? rows_in_cache(w.stride) : end - begin;  // the residual reads weights again
  for (int64_t o = begin; o < end; o += block_rows) {
    const int64_t stop = o + block_rows < end ? o + block_rows : end;
    if (!uses_few_rows)
      multiply_integers<Pairs>(w, in, x, o, stop, y);
    else if constexpr (kDigitRows > 0)
      w.blocks ? multiply_digits<false, true>(w, in, x, o, stop, y)
      : w.zero ? multiply_digits<true, false>(w, in, x, o, stop, y)
               : multiply_digits<false, false>(w, in, x, o, stop, y);
    if (exact) add_residual(w, in, x, o, stop, y);
  }
  recompute_overflowed(w, in, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
