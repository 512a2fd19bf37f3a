// The kernels for AVX-512 with VNNI and BF16 (Zen 4, Sapphire Rapids and later).
//
// A tile is `O` weight rows times `R` input rows. Each output has one accumulator that walks the
// columns in order, so its bits depend on nothing but its own two rows.
//
// Floats: products of 16 (or 32 bfloat16) columns at a time. Integers: an input row is written as
// base-256 digits, 128 columns sharing a power of two, and the products are exact integer sums of
// 8-bit by 8-bit products (VNNI); three digits keep all that float32 keeps.
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

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows are short and several are walked at once, so the processor's own prefetchers see little but
// beginnings. Each line that is read asks for the one that a later tile will read in its place;
// into the second cache, which keeps more requests in flight than the first.
inline void ahead(const uint8_t* line, int64_t distance) {
  _mm_prefetch(reinterpret_cast<const char*>(line + distance), _MM_HINT_T1);
}

// From a tile to that later one, in whole tiles of four rows: at least 8 kB, which are read about as
// fast as memory answers.
int64_t distance_of(int64_t stride) { return stride ? up(8 << 10, 4 * stride) : 0; }

#define JAXLLM_UNROLL _Pragma("GCC unroll 8")

#include "attention_bf16.h"

// A tile's sums, one for each of its outputs: kept in registers where all loops over them are
// unrolled.
template <int O, int R>
inline void clear(__m512 (&sum)[O][R]) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++)
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) sum[i][j] = _mm512_setzero_ps();
}

template <int O, int R>
inline void put(const __m512 (&sum)[O][R], const Weight& w, int64_t o, int64_t r, float* y) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++)
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) y[(r + j) * w.rows + o + i] = _mm512_reduce_add_ps(sum[i][j]);
}

// Times the one scale of each weight row.
template <int O, int R>
inline void scale_rows(__m512 (&sum)[O][R], const Weight& w, int64_t o) {
  if (!w.groups) return;  // nor columns
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++)
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) sum[i][j] = _mm512_mul_ps(sum[i][j], _mm512_set1_ps(scale_at(w, o + i)));
}

// ---- floats: what is loaded from 32 columns of a weight row, and how it is multiplied ----

struct Two {  // 16 columns each: the first and second half, or the even and the odd ones
  __m512 a, b;
};

__mmask32 mask_of(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

struct F32 {
  static Two load(const uint8_t* row, int64_t c, __mmask32 m) {
    const float* p = reinterpret_cast<const float*>(row) + c;
    return {_mm512_maskz_loadu_ps(__mmask16(m), p), _mm512_maskz_loadu_ps(__mmask16(m >> 16), p + 16)};
  }
};

struct F16 {
  static Two load(const uint8_t* row, int64_t c, __mmask32 m) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + c;
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16(m), p)),
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16(m >> 16), p + 16))};
  }
};

struct BF16 {
  static __m512i load(const uint8_t* row, int64_t c, __mmask32 m) {
    return _mm512_maskz_loadu_epi16(m, reinterpret_cast<const uint16_t*>(row) + c);
  }
};

Two even_odd(__m512i bf16) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bf16, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bf16, _mm512_set1_epi32(int(0xffff0000))))};
}

__m512 add_product(__m512 sum, const Two& w, const uint8_t* x) {
  const float* f = reinterpret_cast<const float*>(x);
  sum = _mm512_fmadd_ps(w.a, _mm512_loadu_ps(f), sum);
  return _mm512_fmadd_ps(w.b, _mm512_loadu_ps(f + 16), sum);
}

__m512 add_product(__m512 sum, __m512i w, const uint8_t* x) {
  return _mm512_dpbf16_ps(sum, __m512bh(w), __m512bh(_mm512_loadu_si512(x)));
}

// How the input is kept, for 32 columns: floats in order, floats even then odd, or bfloat16.
enum class Kept { kOrder, kEvenOdd, kBF16 };

Kept kept_of(const Weight& w, const Input& in) {
  if (w.kind == Kind::kF32 || w.kind == Kind::kF16) return Kept::kOrder;
  return in.bf16 ? Kept::kBF16 : Kept::kEvenOdd;
}

int64_t bytes_of(Kept kept) { return kept == Kept::kBF16 ? 2 : 4; }

template <class F, bool Dot>
auto loaded(const uint8_t* row, int64_t c, __mmask32 m) {
  if constexpr (std::is_same_v<F, BF16> && !Dot)
    return even_odd(BF16::load(row, c, m));
  else
    return F::load(row, c, m);
}

// Adds 32 columns' products to a tile's sums.
template <class F, bool Dot, int O, int R>
inline void add_columns(__m512 (&sum)[O][R], const uint8_t* row, int64_t stride, const uint8_t* x,
                        int64_t x_stride, __mmask32 mask) {
  JAXLLM_UNROLL
  for (int i = 0; i < O; i++) {
    const auto weight = loaded<F, Dot>(row + i * stride, 0, mask);
    JAXLLM_UNROLL
    for (int j = 0; j < R; j++) sum[i][j] = add_product(sum[i][j], weight, x + j * x_stride);
  }
}

template <class F, bool Dot, int O, int R>
void float_tile(const Weight& w, const uint8_t* x, int64_t x_stride, int64_t o, int64_t r, float* y) {
  constexpr int64_t kLine = std::is_same_v<F, F32> ? 128 : 64, kInput = Dot ? 64 : 128;
  __m512 sum[O][R];
  clear(sum);
  const int64_t stride = w.stride, size = r ? 0 : distance_of(stride);
  const uint8_t* row = w.data + o * stride;
  x += r * x_stride;
  for (int64_t left = w.columns / 32; left > 0; left--, row += kLine, x += kInput) {
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++)
      for (int64_t line = 0; line < kLine; line += 64) ahead(row + i * stride + line, size);
    add_columns<F, Dot>(sum, row, stride, x, x_stride, ~0u);
  }
  if (w.columns % 32) add_columns<F, Dot>(sum, row, stride, x, x_stride, mask_of(w.columns % 32));
  put(sum, w, o, r, y);
}

// ---- bfloat16 from 12 bits ----

struct Pair {  // 64 bfloat16 weights, in order
  __m512i first, second;
};

struct Exponents {  // of each index: the upper seven bits, and the lowest as the top bit of a byte
  __m512i high, low;
};

Exponents exponents_of(int32_t base) {
  alignas(16) uint8_t high[16], low[16];
  for (int i = 0; i < 16; i++) {
    high[i] = uint8_t((base + i) >> 1);
    low[i] = uint8_t((base + i) << 7);
  }
  return {_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(high))),
          _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(low)))};
}

// From 64 bytes of sign and mantissa, and as many indices.
Pair expanded(const uint8_t* bytes, __m512i index, const Exponents& e) {
  const __m512i byte = _mm512_loadu_si512(bytes), top = _mm512_set1_epi8(char(128));
  // (byte & 128) | high bits of the exponent; its low bit | (byte & 127)
  const __m512i high = _mm512_ternarylogic_epi32(byte, top, _mm512_shuffle_epi8(e.high, index), 0xea);
  const __m512i low = _mm512_ternarylogic_epi32(byte, top, _mm512_shuffle_epi8(e.low, index), 0xba);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

// The escapes of a row, in the order of its columns.
struct Escapes {
  const Weight& w;
  int32_t at, end;
  Escapes(const Weight& w, int64_t o) : w(w), at(w.escape_begin[o]), end(w.escape_begin[o + 1]) {}

  int32_t next() const { return at < end ? w.escape_column[at] : INT32_MAX; }

  // Puts those of columns c to c + 63 in their places, and returns the column of the next.
  __attribute__((noinline)) int32_t patch(int64_t c, Pair& pair) {
    alignas(64) uint16_t plain[64];
    _mm512_store_si512(plain, pair.first);
    _mm512_store_si512(plain + 32, pair.second);
    for (; next() < c + 64; at++) plain[w.escape_column[at] - c] = w.escape_value[at];
    pair = {_mm512_load_si512(plain), _mm512_load_si512(plain + 32)};
    return next();
  }
};

template <bool Dot>
__m512 add_pair(__m512 sum, const Pair& w, const uint8_t* x) {
  if constexpr (Dot) return add_product(add_product(sum, w.first, x), w.second, x + 64);
  return add_product(add_product(sum, even_odd(w.first), x), even_odd(w.second), x + 128);
}

template <bool Dot, int O, int R>
void packed_tile(const Weight& w, const uint8_t* x, int64_t x_stride, int64_t o, int64_t r, float* y) {
  constexpr int64_t kBytes = Dot ? 2 : 4;
  const Exponents e = exponents_of(w.base);
  const __m512i low_bits = _mm512_set1_epi8(15);
  const int64_t size = r ? 0 : distance_of(w.stride), nibbles_size = r ? 0 : distance_of(w.nibble_stride);
  __m512 sum[O][R];
  clear(sum);
  std::vector<Escapes> escapes;
  int32_t next[O];
  escapes.reserve(O);
  for (int i = 0; i < O; i++) {
    escapes.emplace_back(w, o + i);
    next[i] = escapes[i].next();
  }
  x += r * x_stride;
  for (int64_t c = 0; c < w.columns; c += 128)
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++) {
      const uint8_t* bytes = w.data + (o + i) * w.stride + c;
      const uint8_t* nibbles = w.nibbles + (o + i) * w.nibble_stride + c / 2;
      ahead(bytes, size);
      ahead(bytes + 64, size);
      ahead(nibbles, nibbles_size);
      const __m512i index = _mm512_loadu_si512(nibbles);
      for (int half = 0; half < 2; half++) {
        const int64_t at = c + 64 * half;
        if (at >= w.columns) break;
        const __m512i mine = half ? _mm512_srli_epi16(index, 4) : index;
        Pair pair = expanded(bytes + 64 * half, _mm512_and_si512(mine, low_bits), e);
        if (__builtin_expect(next[i] < at + 64, 0)) next[i] = escapes[i].patch(at, pair);
        JAXLLM_UNROLL
        for (int j = 0; j < R; j++)
          sum[i][j] = add_pair<Dot>(sum[i][j], pair, x + j * x_stride + at * kBytes);
      }
    }
  put(sum, w, o, r, y);
}

// ---- integers ----

// 128 columns of an input row. Byte j of half h stands for column 64 h + j (8-bit weights) or
// 32 (j / 16) + 16 h + j % 16 (4-bit ones, whose low and high bits lie so). `bias` holds what the
// unsigned weights' offset adds, a 32-bit lane of four bytes at a time: for each digit, half by
// half or together (8 bits), or the plain sums of all digits (4 bits).
template <int D>
struct alignas(64) Chunk {
  int8_t digit[D][2][64];
  int32_t bias[D][2][16];
  float scale;
};

bool split(const Weight& w) { return w.kind == Kind::kInt8 && w.group < 128 && w.groups > 1; }

// What a number is multiplied by to become digits, and what one step of theirs stands for.
struct Step {
  float by, scale;
};

template <int D>
Step step_of(float most) {
  if (D == 1) return {most * (1 / 127.0f) > 0x1p-126f ? 127 / most : 0, most / 127};
  int exponent;  // a power of two, so that nothing is rounded where there is room for all bits
  frexpf(most, &exponent);
  int power = exponent - 23;
  if (ldexpf(most, -power) > 8355711) power++;  // 127 * (1 + 256 + 65536), the largest number
  power = power < -126 ? -126 : power;
  return {ldexpf(1, -power), ldexpf(1, power)};
}

template <int D>
void write_chunk(const Weight& w, const float* x, Chunk<D>& out) {
  const bool four = w.kind == Kind::kInt4;
  __m512 most = _mm512_setzero_ps();
  __mmask16 wild = 0;  // NaN and infinities
  for (int i = 0; i < 8; i++) {
    const __m512 v = _mm512_loadu_ps(x + 16 * i);
    wild |= _mm512_fpclass_ps_mask(v, 0x99);
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
  }
  const float top = _mm512_reduce_max_ps(most);
  if (wild || top == 0) {
    memset(&out, 0, sizeof out);
    out.scale = wild ? NAN : 0;
    return;
  }
  const Step step = step_of<D>(top);
  out.scale = step.scale;
  const __m512i limit = _mm512_set1_epi32(D == 1 ? 127 : 8355711);
  for (int i = 0; i < 8; i++) {
    __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(step.by)));
    n = _mm512_max_epi32(_mm512_min_epi32(n, limit), _mm512_sub_epi32(_mm512_setzero_si512(), limit));
    const int h = four ? i % 2 : i / 4, j = 16 * (four ? i / 2 : i % 4);
    for (int d = 0; d < D; d++) {
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(n, 24), 24);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&out.digit[d][h][j]), _mm512_cvtepi32_epi8(low));
      n = _mm512_srai_epi32(_mm512_sub_epi32(n, low), 8);
    }
  }
  __m512i all = _mm512_setzero_si512();
  for (int d = D - 1; d >= 0; d--) {
    __m512i sum[2];
    for (int h = 0; h < 2; h++)
      sum[h] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1),
                                   _mm512_load_si512(out.digit[d][h]));
    if (four) {
      all = _mm512_add_epi32(_mm512_slli_epi32(all, 8), _mm512_add_epi32(sum[0], sum[1]));
      continue;
    }
    if (!split(w)) sum[0] = _mm512_add_epi32(sum[0], sum[1]);
    for (int h = 0; h < 2; h++)
      _mm512_store_si512(out.bias[d][h], _mm512_mullo_epi32(sum[h], _mm512_set1_epi32(-128)));
  }
  if (four) _mm512_store_si512(out.bias[0][0], all);
}

// Up to four scales, spread over the lanes.
__m512 lanes_of_scales(const Weight& w, int64_t at, __m512i spread, int count) {
  const __mmask8 m = __mmask8((1u << count) - 1);
  const __m128 some =
      w.half ? _mm_cvtph_ps(_mm_maskz_loadu_epi16(m, static_cast<const uint16_t*>(w.scale) + at))
             : _mm_maskz_loadu_ps(m, static_cast<const float*>(w.scale) + at);
  return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(some));
}

__m512i lanes_of_zeros(const Weight& w, int64_t at, __m512i spread, int count) {
  const __m128i some = _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), w.zero + at);
  return _mm512_permutexvar_epi32(spread, _mm512_cvtepu8_epi32(some));
}

// Digits' sums put together: sum_d 256^d t[d] as floats.
template <int D>
__m512 together(const __m512i (&t)[D]) {
  __m512 f = _mm512_cvtepi32_ps(t[D - 1]);
  for (int d = D - 2; d >= 0; d--)
    f = _mm512_fmadd_ps(f, _mm512_set1_ps(256), _mm512_cvtepi32_ps(t[d]));
  return f;
}

// Of 16 lanes, which of a chunk's `count` groups each is of.
__m512i spread_of(int count) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_srl_epi32(lane, _mm_cvtsi32_si128(4 - (count > 1) - (count > 2)));
}

// P weight rows of a tile share what is loaded of x.
template <int D, int O, int R>
void int4_tile(const Weight& w, const uint8_t* prepared, int64_t chunks, int64_t o, int64_t r, float* y) {
  constexpr int P = O == 1 ? 1 : 2;
  const Chunk<D>* x = reinterpret_cast<const Chunk<D>*>(prepared) + r * chunks;
  const int count = int(128 / w.group);  // groups in a chunk
  const __m512i spread = spread_of(count), low_bits = _mm512_set1_epi8(15);
  const int64_t size = r ? 0 : distance_of(w.stride);
  __m512 sum[O][R];
  clear(sum);
  for (int64_t c = 0; c < chunks; c++)
    JAXLLM_UNROLL
    for (int i = 0; i < O; i += P) {
      __m512i low[P], high[P], zero[P];
      __m512 scale[P];
      JAXLLM_UNROLL
      for (int p = 0; p < P; p++) {
        const uint8_t* line = w.data + (o + i + p) * w.stride + 64 * c;
        ahead(line, size);
        const __m512i byte = _mm512_loadu_si512(line);
        low[p] = _mm512_and_si512(byte, low_bits);
        high[p] = _mm512_and_si512(_mm512_srli_epi16(byte, 4), low_bits);
        const int64_t group = (o + i + p) * w.groups + c * count;
        scale[p] = lanes_of_scales(w, group, spread, count);
        if (w.zero) zero[p] = lanes_of_zeros(w, group, spread, count);
      }
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const Chunk<D>& in = x[j * chunks + c];
        const __m512i bias = _mm512_load_si512(in.bias[0][0]), eight = _mm512_slli_epi32(bias, 3);
        __m512i t[P];
        JAXLLM_UNROLL
        for (int d = D - 1; d >= 0; d--) {
          const __m512i first = _mm512_load_si512(in.digit[d][0]), second = _mm512_load_si512(in.digit[d][1]);
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            t[p] = d < D - 1 ? _mm512_slli_epi32(t[p], 8) : _mm512_setzero_si512();
            t[p] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(t[p], low[p], first), high[p], second);
          }
        }
        const __m512 step = _mm512_set1_ps(in.scale);
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) {
          t[p] = _mm512_sub_epi32(t[p], w.zero ? _mm512_mullo_epi32(bias, zero[p]) : eight);
          sum[i + p][j] =
              _mm512_fmadd_ps(_mm512_cvtepi32_ps(t[p]), _mm512_mul_ps(scale[p], step), sum[i + p][j]);
        }
      }
    }
  put(sum, w, o, r, y);
}

// How many columns share a scale: a row, a chunk, or less.
enum class Share { kRow, kChunk, kLess };

template <int D, int O, int R, Share S>
void int8_tile(const Weight& w, const uint8_t* prepared, int64_t chunks, int64_t o, int64_t r, float* y) {
  constexpr int P = O == 1 ? 1 : (D == 1 && S == Share::kRow ? O : 2);
  const Chunk<D>* x = reinterpret_cast<const Chunk<D>*>(prepared) + r * chunks;
  const int count = S == Share::kLess ? int(64 / w.group) : 1;  // groups in a half
  const __m512i spread = spread_of(count), flip = _mm512_set1_epi8(char(128));
  const int64_t size = r ? 0 : distance_of(w.stride);
  __m512 sum[O][R];
  clear(sum);
  for (int64_t c = 0; c < chunks; c++)
    JAXLLM_UNROLL
    for (int i = 0; i < O; i += P) {
      __m512i first[P], second[P];
      __m512 scale[P][2];
      JAXLLM_UNROLL
      for (int p = 0; p < P; p++) {
        const uint8_t* byte = w.data + (o + i + p) * w.stride + 128 * c;
        ahead(byte, size);
        ahead(byte + 64, size);
        first[p] = _mm512_xor_si512(_mm512_loadu_si512(byte), flip);
        second[p] = _mm512_xor_si512(_mm512_loadu_si512(byte + 64), flip);
        const int64_t group = (o + i + p) * w.groups + c * count * (S == Share::kLess ? 2 : 1);
        if (S != Share::kRow) scale[p][0] = lanes_of_scales(w, group, spread, count);
        if (S == Share::kLess) scale[p][1] = lanes_of_scales(w, group + count, spread, count);
      }
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const Chunk<D>& in = x[j * chunks + c];
        __m512i t[P][D], u[P][D];
        JAXLLM_UNROLL
        for (int d = 0; d < D; d++) {
          const __m512i bias = _mm512_load_si512(in.bias[d][0]);
          const __m512i here = _mm512_load_si512(in.digit[d][0]), there = _mm512_load_si512(in.digit[d][1]);
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            t[p][d] = _mm512_dpbusd_epi32(bias, first[p], here);
            if (S != Share::kLess)
              t[p][d] = _mm512_dpbusd_epi32(t[p][d], second[p], there);
            else
              u[p][d] = _mm512_dpbusd_epi32(_mm512_load_si512(in.bias[d][1]), second[p], there);
          }
        }
        const __m512 step = _mm512_set1_ps(in.scale);
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) {
          __m512& all = sum[i + p][j];
          const __m512 by = S == Share::kRow ? step : _mm512_mul_ps(scale[p][0], step);
          all = _mm512_fmadd_ps(together<D>(t[p]), by, all);
          if (S == Share::kLess)
            all = _mm512_fmadd_ps(together<D>(u[p]), _mm512_mul_ps(scale[p][1], step), all);
        }
      }
    }
  if (S == Share::kRow) scale_rows(sum, w, o);
  put(sum, w, o, r, y);
}

// ---- integers times bfloat16: 8 bits hold them exactly, so the products are BF16's own ----

// Some columns of a weight row as bfloat16, 32 to a register.
template <int N>
struct Some {
  __m512i r[N];
};

// 64 columns in order.
struct Int8Rows {
  static constexpr int kRegisters = 2;
  const uint8_t* data;
  int64_t stride, distance;
  explicit Int8Rows(const Weight& w) : data(w.data), stride(w.stride), distance(distance_of(w.stride)) {}

  Some<2> at(int64_t o, int64_t c, bool fetch) const {
    const uint8_t* q = data + o * stride + c;
    if (fetch) ahead(q, distance);
    return {{half(q), half(q + 32)}};
  }

  static __m512i half(const uint8_t* q) {
    const __m128i* p = reinterpret_cast<const __m128i*>(q);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p + 1)));
    return __m512i(_mm512_cvtne2ps_pbh(high, low));
  }
};

// 128 columns in the order of the bits of 32 words of four: register n takes bits 4 n to 4 n + 3 of
// each word, so that its word 8 b + k is of column 32 b + 16 (n % 2) + 2 k + n / 2. The input is put
// in the same order.
void in_places(uint16_t* x) {
  alignas(64) uint16_t from[32], block[4][32];
  for (int n = 0; n < 4; n++)
    for (int k = 0; k < 8; k++) from[8 * n + k] = uint16_t(16 * (n % 2) + 2 * k + n / 2);
  const __m512i order = _mm512_load_si512(from);
  for (int b = 0; b < 4; b++)
    _mm512_store_si512(block[b], _mm512_permutexvar_epi16(order, _mm512_loadu_si512(x + 32 * b)));
  for (int n = 0; n < 4; n++)
    for (int b = 0; b < 4; b++) memcpy(x + 32 * n + 8 * b, block[b] + 8 * n, 16);
}

template <bool Zero>
struct Int4Rows {
  static constexpr int kRegisters = 4;
  const Weight& w;
  __m512i table;   // bfloat16 by the lowest five bits of a word: q - 8, or the word less 15
  __m512i spread;  // of each word, which of the chunk's groups it is of
  __mmask16 groups;
  int64_t distance;

  explicit Int4Rows(const Weight& w) : w(w), distance(distance_of(w.stride)) {
    alignas(64) uint16_t values[32], group[32];
    for (int i = 0; i < 32; i++) {
      values[i] = to_bf16(float(Zero ? i - 15 : i % 16 - 8));
      group[i] = uint16_t(i / 8 * 32 / w.group);
    }
    table = _mm512_load_si512(values);
    spread = _mm512_load_si512(group);
    groups = __mmask16((1u << 128 / w.group) - 1);
  }

  Some<4> at(int64_t o, int64_t c, bool fetch) const {
    const uint8_t* q = w.data + o * w.stride + c / 2;
    if (fetch) ahead(q, distance);
    __m512i word = _mm512_loadu_si512(q), shift;
    if (Zero) {
      const __m128i zero = _mm_maskz_loadu_epi8(groups, w.zero + o * w.groups + c / w.group);
      const __m512i each = _mm512_castsi256_si512(_mm256_cvtepu8_epi16(zero));
      shift = _mm512_sub_epi16(_mm512_set1_epi16(15), _mm512_permutexvar_epi16(spread, each));
    }
    Some<4> out;
    JAXLLM_UNROLL
    for (int n = 0; n < 4; n++, word = _mm512_srli_epi16(word, 4)) {
      __m512i index = word;  // whose bits above the fourth are of no account
      if (Zero) index = _mm512_add_epi16(_mm512_and_si512(word, _mm512_set1_epi16(15)), shift);
      out.r[n] = _mm512_permutexvar_epi16(index, table);
    }
    return out;
  }
};

// Rows that have been expanded before, from row `first` on.
template <int N>
struct ExpandedRows {
  static constexpr int kRegisters = N;
  const uint16_t* data;
  int64_t stride, first;

  Some<N> at(int64_t o, int64_t c, bool) const {
    const uint16_t* p = data + (o - first) * stride + c;
    Some<N> out;
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) out.r[n] = _mm512_loadu_si512(p + 32 * n);
    return out;
  }
};

// How scales fall on the columns that are taken at once: one a row (applied last), one for all, one
// for each register, or by lanes.
enum class Scales { kRow, kOne, kEach, kLanes };

Scales scales_of(const Weight& w) {
  if (w.kind == Kind::kInt4) return Scales::kLanes;
  if (w.groups == 1) return Scales::kRow;
  return w.group > 32 ? Scales::kOne : Scales::kEach;
}

template <Scales S, int O, int R, class Source>
void bf16_tile(const Weight& w, const Source& source, const uint16_t* x, int64_t x_stride, int64_t o,
               int64_t r, float* y) {
  constexpr int N = Source::kRegisters, P = O > 1 ? 2 : 1;  // P rows share what is loaded of x
  const int count = S == Scales::kLanes ? int(128 / w.group) : 1;
  const __m512i spread = spread_of(count);
  __m512 sum[O][R];
  clear(sum);
  x += r * x_stride;
  for (int64_t c = 0; c < w.columns; c += 32 * N) {
    JAXLLM_UNROLL
    for (int i = 0; i < O; i += P) {
      Some<N> weight[P];
      __m512 scale[P][N];
      JAXLLM_UNROLL
      for (int p = 0; p < P; p++) {
        weight[p] = source.at(o + i + p, c, r == 0);
        const int64_t g = S == Scales::kRow ? 0 : (o + i + p) * w.groups + c / w.group;
        if (S == Scales::kLanes) scale[p][0] = lanes_of_scales(w, g, spread, count);
        if (S == Scales::kOne) scale[p][0] = _mm512_set1_ps(scale_at(w, g));
        for (int n = 0; S == Scales::kEach && n < N; n++)
          scale[p][n] = _mm512_set1_ps(scale_at(w, g + n));
      }
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {
        const uint8_t* at = reinterpret_cast<const uint8_t*>(x + j * x_stride + c);
        __m512 part[P];
        JAXLLM_UNROLL
        for (int n = 0; n < N; n++)
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            __m512& all = sum[i + p][j];
            if (S == Scales::kRow) {
              all = add_product(all, weight[p].r[n], at + 64 * n);
              continue;
            }
            const bool begins = S == Scales::kEach || n == 0, ends = S == Scales::kEach || n == N - 1;
            part[p] = add_product(begins ? _mm512_setzero_ps() : part[p], weight[p].r[n], at + 64 * n);
            if (ends) all = _mm512_fmadd_ps(part[p], scale[p][S == Scales::kEach ? n : 0], all);
          }
      }
    }
  }
  if (S == Scales::kRow) scale_rows(sum, w, o);
  put(sum, w, o, r, y);
}

void expand_packed(const Weight& w, int64_t o, uint16_t* out) {
  const Exponents e = exponents_of(w.base);
  const uint8_t *bytes = w.data + o * w.stride, *nibbles = w.nibbles + o * w.nibble_stride;
  const int64_t distance = distance_of(w.stride);
  for (int64_t c = 0; c < w.stride; c += 64) {
    ahead(bytes + c, distance);
    __m512i index = _mm512_loadu_si512(nibbles + c / 128 * 64);
    if (c & 64) index = _mm512_srli_epi16(index, 4);
    const Pair pair = expanded(bytes + c, _mm512_and_si512(index, _mm512_set1_epi8(15)), e);
    _mm512_storeu_si512(out + c, pair.first);
    _mm512_storeu_si512(out + c + 32, pair.second);
  }
  for (int32_t i = w.escape_begin[o]; i < w.escape_begin[o + 1]; i++)
    out[w.escape_column[i]] = w.escape_value[i];
}

// ---- the tiles of a range of outputs ----

// Calls tile<O, R>(o, r) over begin <= o < end and all rows: four by four, and what is left over.
template <class Tile>
void tiles(int64_t begin, int64_t end, int64_t rows, const Tile& tile) {
  const auto down = [&](auto R, int64_t r) {
    int64_t o = begin;
    for (; o + 4 <= end; o += 4) tile(std::integral_constant<int, 4>(), R, o, r);
    for (; o < end; o++) tile(std::integral_constant<int, 1>(), R, o, r);
  };
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) down(std::integral_constant<int, 4>(), r);
  switch (rows - r) {
    case 3: return down(std::integral_constant<int, 3>(), r);
    case 2: return down(std::integral_constant<int, 2>(), r);
    case 1: return down(std::integral_constant<int, 1>(), r);
  }
}

// The same, by as many weight rows at once as the second cache holds beside the input, where they
// are needed again for the next four input rows.
template <class Tiles>
void blocks(int64_t begin, int64_t end, int64_t row_bytes, int64_t rows, const Tiles& some) {
  const int64_t most = rows <= 4 ? end - begin : up((256 << 10) / row_bytes, 4);
  for (int64_t b = begin; b < end; b += most) some(b, b + most < end ? b + most : end);
}

bool integers(const Weight& w) { return w.kind == Kind::kInt8 || w.kind == Kind::kInt4; }

// Integers times bfloat16, exactly: not by way of digits.
bool by_bf16(const Weight& w, const Input& in) { return integers(w) && in.bf16 && in.digits > 1; }

int64_t chunks_of(const Input& in) { return up(in.columns, 128) / 128; }

// Numbers between rows of a prepared float input: not a power of two, or all rows of both factors
// would fall on the same few lines of the first cache.
int64_t stride_of(const Input& in) { return up(in.columns, 128) + 32 * 5; }

size_t prepared_bytes(const Weight& w, const Input& in) {
  if (integers(w) && !by_bf16(w, in))
    return in.rows * chunks_of(in) * (in.digits == 1 ? sizeof(Chunk<1>) : sizeof(Chunk<3>));
  return in.rows * stride_of(in) * bytes_of(kept_of(w, in));
}

void prepare(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const int64_t width = up(in.columns, 128), chunks = chunks_of(in);
  std::vector<float> x(width);
  for (int64_t r = begin; r < end; r++) {
    if (integers(w) && !by_bf16(w, in)) {
      input_row(in, r, width, x.data());
      for (int64_t c = 0; c < chunks; c++) {
        if (in.digits == 1)
          write_chunk(w, &x[128 * c], static_cast<Chunk<1>*>(prepared)[r * chunks + c]);
        else
          write_chunk(w, &x[128 * c], static_cast<Chunk<3>*>(prepared)[r * chunks + c]);
      }
      continue;
    }
    const int64_t wide = up(in.columns, 128), stride = stride_of(in);
    const Kept kept = kept_of(w, in);
    if (kept == Kept::kBF16) {
      uint16_t* to = static_cast<uint16_t*>(prepared) + r * stride;
      memcpy(to, static_cast<const uint16_t*>(in.x) + r * in.columns, 2 * in.columns);
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

template <class F, bool Dot>
void multiply_floats(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const int64_t stride = stride_of(in) * (Dot ? 2 : 4);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      float_tile<F, Dot, O, R>(w, x, stride, o, r, y);
    });
  });
}

template <bool Dot>
void multiply_packed(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const int64_t stride = stride_of(in) * (Dot ? 2 : 4);
  blocks(begin, end, w.stride * 3 / 2, in.rows, [&](int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      packed_tile<Dot, O, R>(w, x, stride, o, r, y);
    });
  });
}

template <int D>
void multiply_integers(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const int64_t chunks = chunks_of(in);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      if (w.kind == Kind::kInt4)
        int4_tile<D, O, R>(w, x, chunks, o, r, y);
      else if (w.groups == 1)
        int8_tile<D, O, R, Share::kRow>(w, x, chunks, o, r, y);
      else if (split(w))
        int8_tile<D, O, R, Share::kLess>(w, x, chunks, o, r, y);
      else
        int8_tile<D, O, R, Share::kChunk>(w, x, chunks, o, r, y);
    });
  });
}

// Rows expanded to bfloat16, as many at once as the second cache holds: for more than four input
// rows. `expand(o, out)` writes one, `some(rows, begin, end)` multiplies them.
template <int N, class Expand, class Multiply>
void by_expanded(const Input& in, int64_t begin, int64_t end, const Expand& expand, const Multiply& some) {
  const int64_t stride = up(in.columns, 128) + 32 * 3, most = up((256 << 10) / (2 * stride), 4);
  thread_local std::vector<uint16_t> scratch;
  scratch.resize(most * stride);
  for (int64_t b = begin; b < end; b += most) {
    const int64_t stop = b + most < end ? b + most : end;
    for (int64_t o = b; o < stop; o++) expand(o, scratch.data() + (o - b) * stride);
    some(ExpandedRows<N>{scratch.data(), stride, b}, b, stop);
  }
}

void multiply_packed_bf16(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const auto expand = [&](int64_t o, uint16_t* out) { expand_packed(w, o, out); };
  by_expanded<1>(in, begin, end, expand, [&](const ExpandedRows<1>& rows, int64_t begin, int64_t end) {
    Weight plain = w;
    plain.kind = Kind::kBF16;
    plain.stride = 2 * rows.stride;
    plain.data = reinterpret_cast<const uint8_t*>(rows.data) - rows.first * plain.stride;
    multiply_floats<BF16, true>(plain, in, x, begin, end, y);
  });
}

template <Scales S, class Source>
void multiply_rows(const Weight& w, const Source& source, const Input& in, const uint8_t* prepared,
                   int64_t begin, int64_t end, float* y) {
  constexpr int N = Source::kRegisters;
  const uint16_t* x = reinterpret_cast<const uint16_t*>(prepared);
  const int64_t stride = stride_of(in);
  const auto all = [&](const auto& rows, int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      bf16_tile<S, O, R>(w, rows, x, stride, o, r, y);
    });
  };
  if (in.rows <= 4) return all(source, begin, end);
  const auto expand = [&](int64_t o, uint16_t* out) {
    for (int64_t c = 0; c < w.columns; c += 32 * N) {
      const Some<N> some = source.at(o, c, true);
      for (int n = 0; n < N; n++) _mm512_storeu_si512(out + c + 32 * n, some.r[n]);
    }
  };
  by_expanded<N>(in, begin, end, expand, all);
}

void multiply_by_bf16(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const Scales scales = scales_of(w);
  if (w.kind == Kind::kInt8) {
    const Int8Rows rows(w);
    if (scales == Scales::kRow) return multiply_rows<Scales::kRow>(w, rows, in, x, begin, end, y);
    if (scales == Scales::kOne) return multiply_rows<Scales::kOne>(w, rows, in, x, begin, end, y);
    return multiply_rows<Scales::kEach>(w, rows, in, x, begin, end, y);
  }
  if (w.zero) return multiply_rows<Scales::kLanes>(w, Int4Rows<true>(w), in, x, begin, end, y);
  return multiply_rows<Scales::kLanes>(w, Int4Rows<false>(w), in, x, begin, end, y);
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
      if (by_bf16(w, in)) return multiply_by_bf16(w, in, x, begin, end, y);
      return in.digits == 1 ? multiply_integers<1>(w, in, x, begin, end, y)
                            : multiply_integers<3>(w, in, x, begin, end, y);
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
