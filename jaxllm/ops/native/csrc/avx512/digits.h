// Integers times float32, by base-256 digits.

// 128 columns of an input row. Byte j of half h stands for column 64 h + j (8-bit weights) or
// 32 (j / 16) + 16 h + j % 16 (4-bit ones, whose low and high bits lie so). `bias` holds what the
// unsigned weights' offset adds, a 32-bit lane of four bytes at a time: for each digit, half by
// half or together (8 bits), or the plain sums of all digits (4 bits).
constexpr int kDigits = 3;

struct alignas(64) Chunk {
  int8_t digit[kDigits][2][64];
  int32_t bias[kDigits][2][16];
  float scale;
};

// What a number is multiplied by to become digits, and what one step of theirs stands for.
struct Step {
  float by, scale;
};

Step step_of(float most) {
  int exponent;  // a power of two, so that nothing is rounded where there is room for all bits
  frexpf(most, &exponent);
  int power = exponent - 23;
  if (ldexpf(most, -power) > 8355711) power++;  // 127 * (1 + 256 + 65536), the largest number
  power = power < -126 ? -126 : power;
  return {ldexpf(1, -power), ldexpf(1, power)};
}

void write_chunk(const Weight& w, const float* x, Chunk& out) {
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
  const Step step = step_of(top);
  out.scale = step.scale;
  const __m512i limit = _mm512_set1_epi32(8355711);
  for (int i = 0; i < 8; i++) {
    __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(step.by)));
    n = _mm512_max_epi32(_mm512_min_epi32(n, limit), _mm512_sub_epi32(_mm512_setzero_si512(), limit));
    const int h = four ? i % 2 : i / 4, j = 16 * (four ? i / 2 : i % 4);
    for (int d = 0; d < kDigits; d++) {
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(n, 24), 24);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&out.digit[d][h][j]), _mm512_cvtepi32_epi8(low));
      n = _mm512_srai_epi32(_mm512_sub_epi32(n, low), 8);
    }
  }
  __m512i all = _mm512_setzero_si512();
  for (int d = kDigits - 1; d >= 0; d--) {
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

// Digits' sums put together: sum_d 256^d t[d] as floats.
__m512 together(const __m512i (&t)[kDigits]) {
  __m512 f = _mm512_cvtepi32_ps(t[kDigits - 1]);
  for (int d = kDigits - 2; d >= 0; d--)
    f = _mm512_fmadd_ps(f, _mm512_set1_ps(256), _mm512_cvtepi32_ps(t[d]));
  return f;
}

// P weight rows of a tile share what is loaded of x.
template <int O, int R>
void int4_tile(const Weight& w, const uint8_t* prepared, int64_t chunks, int64_t o, int64_t r, float* y) {
  constexpr int P = O == 1 ? 1 : 2;
  const Chunk* x = reinterpret_cast<const Chunk*>(prepared) + r * chunks;
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
        const Chunk& in = x[j * chunks + c];
        const __m512i bias = _mm512_load_si512(in.bias[0][0]), eight = _mm512_slli_epi32(bias, 3);
        __m512i t[P];
        JAXLLM_UNROLL
        for (int d = kDigits - 1; d >= 0; d--) {
          const __m512i first = _mm512_load_si512(in.digit[d][0]), second = _mm512_load_si512(in.digit[d][1]);
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            t[p] = d < kDigits - 1 ? _mm512_slli_epi32(t[p], 8) : _mm512_setzero_si512();
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

template <int O, int R, Share S>
void int8_tile(const Weight& w, const uint8_t* prepared, int64_t chunks, int64_t o, int64_t r, float* y) {
  constexpr int P = O == 1 ? 1 : 2;
  const Chunk* x = reinterpret_cast<const Chunk*>(prepared) + r * chunks;
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
        const Chunk& in = x[j * chunks + c];
        __m512i t[P][kDigits], u[P][kDigits];
        JAXLLM_UNROLL
        for (int d = 0; d < kDigits; d++) {
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
          all = _mm512_fmadd_ps(together(t[p]), by, all);
          if (S == Share::kLess)
            all = _mm512_fmadd_ps(together(u[p]), _mm512_mul_ps(scale[p][1], step), all);
        }
      }
    }
  if (S == Share::kRow) scale_rows(sum, w, o);
  put(sum, w, o, r, y);
}

void multiply_by_digits(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const int64_t chunks = chunks_of(in);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      if (w.kind == Kind::kInt4)
        int4_tile<O, R>(w, x, chunks, o, r, y);
      else if (w.groups == 1)
        int8_tile<O, R, Share::kRow>(w, x, chunks, o, r, y);
      else if (split(w))
        int8_tile<O, R, Share::kLess>(w, x, chunks, o, r, y);
      else
        int8_tile<O, R, Share::kChunk>(w, x, chunks, o, r, y);
    });
  });
}
