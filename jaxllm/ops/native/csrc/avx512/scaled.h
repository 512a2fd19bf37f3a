// Integers times float32: each integer becomes the float32 that it stands for, and no input is
// rounded. Sums are added up as floats.h does it, so that they have the bits of the same weights kept
// as float32.

// Where scales lie, without a division: `count` groups in each 128 columns, 0 where a row has one.
struct Groups {
  int64_t groups, count;
  explicit Groups(const Weight& w) : groups(w.groups), count(w.groups == 1 ? 0 : 128 / w.group) {}

  int64_t at(int64_t o, int64_t c) const { return o * groups + c / 128 * count + c % 128 / 32 * count / 4; }
};

// 32 columns of a row, in order.
struct Int8Scaled {
  static constexpr int kLine = 128;  // bytes of 128 columns
  const Weight& w;
  Groups groups;

  Two at(int64_t o, int64_t c) const {
    const __m128i* q = reinterpret_cast<const __m128i*>(w.data + o * w.stride + c);
    const __m512 scale = _mm512_set1_ps(scale_at(w, groups.at(o, c)));
    return {half(q, scale), half(q + 1, scale)};
  }

  static __m512 half(const __m128i* q, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))), scale);
  }
};

struct Int4Scaled {
  static constexpr int kLine = 64;
  const Weight& w;
  Groups groups;

  Two at(int64_t o, int64_t c) const {
    const int64_t g = groups.at(o, c);
    const __m512 count = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 zero = _mm512_set1_ps(w.zero ? w.zero[g] : 8);
    const __m512 table = _mm512_mul_ps(_mm512_sub_ps(count, zero), _mm512_set1_ps(scale_at(w, g)));
    const __m128i* q = reinterpret_cast<const __m128i*>(w.data + o * w.stride + c / 2);
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128(q));  // the table is asked by four bits
    return {_mm512_permutexvar_ps(byte, table), _mm512_permutexvar_ps(_mm512_srli_epi32(byte, 4), table)};
  }
};

template <int O, int R, class Source>
void scaled_tile(const Weight& w, const Source& source, const uint8_t* x, int64_t x_stride, int64_t o,
                 int64_t r, float* y) {
  const int64_t size = r ? 0 : distance_of(w.stride);
  __m512 sum[O][R];
  clear(sum);
  x += r * x_stride;
  for (int64_t c = 0; c < w.columns; c += 128)
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++) {
      for (int line = 0; line < Source::kLine; line += 64)
        ahead(w.data + (o + i) * w.stride + c * Source::kLine / 128 + line, size);
      JAXLLM_UNROLL
      for (int b = 0; b < 4; b++) {
        const Two weight = source.at(o + i, c + 32 * b);
        JAXLLM_UNROLL
        for (int j = 0; j < R; j++)
          sum[i][j] = add_product(sum[i][j], weight, x + j * x_stride + 4 * (c + 32 * b));
      }
    }
  put(sum, w, o, r, y);
}

template <class Source>
void multiply_source(const Weight& w, const Source& source, const Input& in, const uint8_t* x,
                     int64_t begin, int64_t end, float* y) {
  if (in.rows <= 4)
    return tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      scaled_tile<O, R>(w, source, x, 4 * stride_of(in), o, r, y);
    });
  const int64_t width = up(w.columns, 128), distance = distance_of(w.stride);
  const auto expand = [&](int64_t o, float* out) {
    for (int64_t c = 0; c < width; c += 32) {
      ahead(w.data + o * w.stride + c * Source::kLine / 128, distance);
      const Two some = source.at(o, c);
      _mm512_storeu_ps(out + c, some.a);
      _mm512_storeu_ps(out + c + 16, some.b);
    }
  };
  by_expanded<float>(in, begin, end, expand, [&](const float* rows, int64_t stride, int64_t b, int64_t e) {
    multiply_floats<F32, false>(plain_rows(w, Kind::kF32, rows, 4 * stride, b, width), in, x, b, e, y);
  });
}

void multiply_scaled(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  w.kind == Kind::kInt4 ? multiply_source(w, Int4Scaled{w, Groups(w)}, in, x, begin, end, y)
                        : multiply_source(w, Int8Scaled{w, Groups(w)}, in, x, begin, end, y);
}
