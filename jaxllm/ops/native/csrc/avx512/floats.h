// Float weights, 16 (or 32 bfloat16) columns at a time.

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
  if (w.kind == Kind::kF32 || w.kind == Kind::kF16 || (integers(w) && !in.bf16)) return Kept::kOrder;
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

// Adds products of bfloat16 numbers, two to a lane. The intrinsic says the same, but GCC 12 then
// copies the sums from register to register.
inline void add_pairs(__m512& sum, __m512i w, __m512i x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

// Numbers between rows of a prepared float input: not a power of two, or all rows of both factors
// would fall on the same few lines of the first cache.
int64_t stride_of(const Input& in) { return up(in.columns, 128) + 32 * 5; }

template <class F, bool Dot>
void multiply_floats(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const int64_t stride = stride_of(in) * (Dot ? 2 : 4);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      float_tile<F, Dot, O, R>(w, x, stride, o, r, y);
    });
  });
}
