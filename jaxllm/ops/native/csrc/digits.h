// Four-bit weights times bfloat16 inputs, where the set multiplies unsigned by signed bytes (VNNI, AVX2): few rows are
// multiplied as integers, by three digits of each input. More rows share decoded weights (multiply_expanded).
//
// The eight columns of a lane have a step, a power of two so small that the inputs are whole numbers of steps, and so
// large that the sum of the magnitudes of weights times steps is below 2^24. Then all sums of a lane are exact, as
// integers as well as floats in any order, and a row has the bits that it has among many, multiplied as floats. Inputs
// that are no whole number of steps, far smaller than one beside them, or not finite, are zeros there. They are the
// row's rest, whose products are added last.
//
// With VNNI, weights of high bits need no shift: 16 high + low times x of the high column, and low times what is then
// missing, is 16 times both products. AVX2 adds products in 16 bits, which these would overflow. It then multiplies
// each digit's sums by the digit's weight, which has 16 bits too: 2^14, 2^7 or 1.
#pragma once

#include "integers.h"

namespace jaxllm {
namespace {

constexpr int kDigitBits = kOffset ? 8 : 7;
constexpr int kTimes = kOffset ? 16 : 1;  // sums are so many times the products

inline bool by_digits(const Weight& w, const Input& in) {
  return kDigitRows && w.kind == Kind::kInt4 && in.bf16 && !in.rounded;
}

// Of registers of halves that are converted to floats: the first of each lane's two, then the second.
constexpr int even_odd(int i) { return i / kHalves * kHalves + i % kLanes * 2 + i / kLanes % 2; }

// The column, of 128, of the i-th float that multiplies nibbles.
constexpr int float_column(int i) { return nibble_column(columns_of<NibbleValue>() == kHalves ? even_odd(i) : i); }

// A unit's digits, the highest first: what is multiplied by low bits, and by whole bytes; what the weights' offset (or
// each unit of their zero point) adds to a lane's sum, less than zero; a lane's step, over kTimes.
struct alignas(64) InputDigits {
  int8_t digit[3][2][kBytes];
  Ints bias;
  Floats step;
};

// Of a prepared input: bytes of a row; then, for each row, how many columns are its rest, and which.
inline int64_t units_of(const Input& in) { return up(in.columns, 128) / (2 * kBytes); }
inline int64_t exact_bytes(const Input& in) {
  return in.rows <= kDigitRows ? units_of(in) * sizeof(InputDigits) : stride_of(in) * (kPairs ? 2 : 4);
}
inline int64_t rest_bytes(const Input& in) { return 4 * (in.columns + 1); }
inline int64_t rest_at(const Input& in, int64_t r) { return in.rows * exact_bytes(in) + r * rest_bytes(in); }

// Prepares row r, `x`, floats in the order of float_column.
inline void prepare_exact(const Weight& w, const Input& in, int64_t r, const float* x, void* prepared) {
  uint8_t* to = static_cast<uint8_t*>(prepared) + r * exact_bytes(in);
  int32_t* rest = reinterpret_cast<int32_t*>(static_cast<uint8_t*>(prepared) + rest_at(in, r));
  rest[0] = 0;
  for (int64_t c = 0; c < in.columns; c += 128)
    for (int u = 0; u < 128; u += 2 * kBytes, x += 2 * kBytes) {
      Floats v[8], sum = {}, most = {};
      JAXLLM_UNROLL
      for (int n = 0; n < 8; n++) {
        v[n] = load<Floats>(x + n * kLanes);
        const Floats size = magnitude(v[n]) * 0x1p-8f;  // so that no sum overflows
        sum += size;
        most = larger(most, size);
      }
      // Weights are up to 8, or with a zero point 15: the sum is below 2^21 or 2^20 steps. And three
      // digits hold 17 times any input, below 2^23 - 2^16 steps, or those of 7 bits any input, below 127 * 2^14.
      const Floats bound = larger(larger(sum, most * (kOffset ? 4.3f : 1.02f)), all_of(0x1p-100f));
      const Bits bits = (Bits(bound) & 0x7f800000u) - ((w.zero ? 11u : 12u) << 23);
      const Floats step = Floats(bits), inverse = Floats((254u << 23) - bits);
      Ints steps[2][4], all = {};
      JAXLLM_UNROLL
      for (int n = 0; n < 8; n++) {
        const Floats count = v[n] * inverse, near = nearest(count);
        const Bits whole = Bits(near * step == v[n]) & Bits(magnitude(count) <= 0x1p21f);
        const Floats kept = Floats(Bits(near) & whole);
        v[n] = kept * step;
        if (any_of(~whole))
          for (int l = 0; l < kLanes; l++)
            if (!whole[l]) rest[++rest[0]] = int32_t(c + float_column(u + n * kLanes + l));
        const int column = float_column(n * kLanes);
        all += steps[column / 16][column % 4] = to_ints(kept);
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
        out.bias = (w.zero ? -kTimes : -8 * kTimes) * all;
        out.step = step * (1.0f / kTimes);
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
  put(sum, w, o, r, false, y);
}

// Adds the products of the rest.
inline void add_rest(const Weight& w, const Input& in, const uint8_t* prepared, int64_t begin, int64_t end, float* y) {
  const int64_t bytes = w.blocks ? block_bytes(4) : 16;
  for (int64_t r = 0; r < in.rows; r++) {
    const int32_t* rest = reinterpret_cast<const int32_t*>(prepared + rest_at(in, r));
    for (int32_t i = 1; i <= rest[0]; i++) {
      const int64_t c = rest[i], group = c / w.group;
      const float x = from_bf16(static_cast<const uint16_t*>(in.x)[r * in.columns + c]);
      const uint8_t* code = w.data + c / 32 * bytes + (w.blocks ? 2 : 0) + c % 16;
      for (int64_t o = begin; o < end; o++) {
        const int64_t g = o * w.groups + group;
        const int q = (code[o * w.stride] >> (c % 32 / 16 * 4) & 15) - (w.zero ? w.zero[g] : 8);
        y[r * w.rows + o] = __builtin_fmaf(float(q) * scale_at(w, g), x, y[r * w.rows + o]);
      }
    }
  }
}

template <bool Zero, bool Blocks>
void multiply_digits(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  constexpr int kMost = kRegisters < 32 ? 1 : 4;
  const Int4<Zero, false, Blocks> source(w, in);
  tiles<4, kMost, kMost>(begin, end, in.rows, [&](auto O, auto R, const TileRows& o, int64_t r) {
    digits_tile<O, R>(source, w, reinterpret_cast<const InputDigits*>(x), units_of(in), o, r, y);
  });
}

template <bool Pairs>
void multiply_exact(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const bool exact = by_digits(w, in), few = exact && in.rows <= kDigitRows;
  const int64_t most = exact ? rows_in_cache(w.stride) : end - begin;  // the rest reads weights again
  for (int64_t o = begin; o < end; o += most) {
    const int64_t stop = o + most < end ? o + most : end;
    if (!few)
      multiply_integers<Pairs>(w, in, x, o, stop, y);
    else if constexpr (kDigitRows > 0)
      w.blocks ? multiply_digits<false, true>(w, in, x, o, stop, y)
      : w.zero ? multiply_digits<true, false>(w, in, x, o, stop, y)
               : multiply_digits<false, false>(w, in, x, o, stop, y);
    if (exact) add_rest(w, in, x, o, stop, y);
  }
  mend(w, in, begin, end, y);
}

}  // namespace
}  // namespace jaxllm
