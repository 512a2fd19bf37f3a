// Integers times bfloat16: 8 bits hold them exactly, so the products are BF16's own.

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

// How scales fall on the columns that are taken at once: one a row (applied last), one for all, one
// for each register, or by lanes.
enum class Scales { kRow, kOne, kEach, kLanes };

Scales scales_of(const Weight& w) {
  if (w.kind == Kind::kInt4) return Scales::kLanes;
  if (w.groups == 1) return Scales::kRow;
  return w.group > 32 ? Scales::kOne : Scales::kEach;
}

// P weight rows are taken at once, whose sums of a few products are many enough not to wait for each
// other, and few enough for the registers.
template <Scales S, int O, int R, class Source>
void bf16_tile(const Weight& w, const Source& source, const uint16_t* x, int64_t x_stride, int64_t o,
               int64_t r, float* y) {
  constexpr int N = Source::kRegisters, P = R == 1 || O == 1 ? O : 2;
  const int count = S == Scales::kLanes ? int(128 / w.group) : 1;
  const __m512i spread = spread_of(count);
  __m512 sum[O][R];
  clear(sum);
  x += r * x_stride;
  for (int64_t c = 0; c < w.columns; c += 32 * N) {
    JAXLLM_UNROLL
    for (int i = 0; i < O; i += P) {
      Some<N> weight[P];
      __m512 scale[P][N], part[P][R];
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
      for (int n = 0; n < N; n++)
        JAXLLM_UNROLL
        for (int j = 0; j < R; j++) {
          const __m512i x_n = _mm512_loadu_si512(x + j * x_stride + c + 32 * n);
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            __m512& all = S == Scales::kRow ? sum[i + p][j] : part[p][j];
            if (S == Scales::kEach || (S != Scales::kRow && n == 0)) all = _mm512_setzero_ps();
            add_pairs(all, weight[p].r[n], x_n);
            if (S == Scales::kEach || (S != Scales::kRow && n == N - 1))
              sum[i + p][j] = _mm512_fmadd_ps(all, scale[p][S == Scales::kEach ? n : 0], sum[i + p][j]);
          }
        }
    }
  }
  if (S == Scales::kRow) scale_rows(sum, w, o);
  put(sum, w, o, r, y);
}

template <Scales S, class Source>
void multiply_rows(const Weight& w, const Source& source, const Input& in, const uint8_t* prepared,
                   int64_t begin, int64_t end, float* y) {
  constexpr int N = Source::kRegisters;
  const uint16_t* x = reinterpret_cast<const uint16_t*>(prepared);
  const int64_t stride = stride_of(in);
  const auto all = [&](const auto& rows, int64_t begin, int64_t end) {
    tiles<S == Scales::kRow ? 4 : 2>(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
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
  by_expanded<uint16_t>(in, begin, end, expand, [&](const uint16_t* rows, int64_t stride, int64_t b, int64_t e) {
    all(ExpandedRows<N>{rows, stride, b}, b, e);
  });
}

void multiply_halves(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
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

// One output by itself: slowly, from the weights' own numbers.
float product(const Weight& w, const Input& in, int64_t o, int64_t r) {
  double sum = 0;
  for (int64_t from = 0; from < in.columns; from += 128) {
    const int64_t count = in.columns - from < 128 ? in.columns - from : 128;
    float part[128];
    row_part(w, o, from, count, part);
    for (int64_t i = 0; i < count; i++)
      sum += double(part[i]) * element(in.bf16 ? Kind::kBF16 : Kind::kF32, in.x, r * in.columns + from + i);
  }
  return float(sum);
}

// Sums that are scaled after they were added up overflow where inputs are huge: an output that is not
// finite is computed once more, from weights that are scaled before.
void multiply_by_bf16(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  multiply_halves(w, in, x, begin, end, y);
  for (int64_t r = 0; r < in.rows; r++)
    for (int64_t o = begin; o < end; o++)
      if (float& out = y[r * w.rows + o]; !std::isfinite(out)) out = product(w, in, o, r);
}
