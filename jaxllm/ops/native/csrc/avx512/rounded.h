// Integers times inputs rounded to int8.

// As many columns of an input row as share a step. Byte j of half h of a chunk of 128 stands for column
// 64 h + j (8-bit weights) or 32 (j / 16) + 16 h + j % 16 (4-bit ones, whose low and high bits lie so).
// `bias`: what the unsigned weights' offset adds, a 32-bit lane of four bytes at a time, by chunk (and
// half, where scales are of less than a chunk); `whole`, for weights with a scale a row, of all chunks
// together.
constexpr int64_t kChunks = kRounded / 128;

struct alignas(64) Block {
  int8_t digit[kChunks][2][64];
  int32_t bias[kChunks][2][16];
  int32_t whole[16];
  float step;
};

void write_block(const Weight& w, const float* x, Block& out) {
  const bool four = w.kind == Kind::kInt4;
  __m512 most = _mm512_setzero_ps();
  __mmask16 wild = 0;  // NaN and infinities
  for (int64_t i = 0; i < kRounded; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    wild |= _mm512_fpclass_ps_mask(v, 0x99);
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
  }
  memset(&out, 0, sizeof out);
  out.step = wild ? NAN : step_of(_mm512_reduce_max_ps(most));
  if (wild || out.step == 0) return;
  const __m512i ones = _mm512_set1_epi8(1), none = _mm512_setzero_si512();
  __m512i whole = none;
  for (int64_t c = 0; c < kChunks; c++) {
    for (int i = 0; i < 8; i++) {
      const __m512 v = _mm512_div_ps(_mm512_loadu_ps(x + 128 * c + 16 * i), _mm512_set1_ps(out.step));
      const __m512i n = _mm512_cvtps_epi32(v);
      const int h = four ? i % 2 : i / 4, j = 16 * (four ? i / 2 : i % 4);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&out.digit[c][h][j]), _mm512_cvtepi32_epi8(n));
    }
    __m512i sum[2];
    for (int h = 0; h < 2; h++) sum[h] = _mm512_dpbusd_epi32(none, ones, _mm512_load_si512(out.digit[c][h]));
    if (four || !split(w)) sum[0] = _mm512_add_epi32(sum[0], sum[1]);
    const __m512i offset = _mm512_set1_epi32(four ? (w.zero ? 1 : -8) : -128);
    for (int h = 0; h < 2; h++) _mm512_store_si512(out.bias[c][h], _mm512_mullo_epi32(sum[h], offset));
    whole = _mm512_add_epi32(whole, _mm512_mullo_epi32(sum[0], offset));
  }
  _mm512_store_si512(out.whole, whole);
}

// How a chunk of a weight row is read.
enum class Read { kInt8ByRow, kInt8ByChunk, kInt8ByLess, kInt4, kInt4Zero };

Read read_of(const Weight& w) {
  if (w.kind == Kind::kInt4) return w.zero ? Read::kInt4Zero : Read::kInt4;
  if (w.groups == 1) return Read::kInt8ByRow;
  return split(w) ? Read::kInt8ByLess : Read::kInt8ByChunk;
}

template <int O, int R, Read W>
void rounded_tile(const Weight& w, const uint8_t* prepared, int64_t chunks, int64_t o, int64_t r, float* y) {
  constexpr bool kFour = W == Read::kInt4 || W == Read::kInt4Zero, kRow = W == Read::kInt8ByRow;
  constexpr bool kLess = W == Read::kInt8ByLess;
  constexpr int P = O == 1 ? 1 : 2;  // weight rows that share what is loaded of x
  const int64_t blocks = (chunks + kChunks - 1) / kChunks;
  const Block* x = reinterpret_cast<const Block*>(prepared) + r * blocks;
  const int count = kRow ? 1 : int((kLess ? 64 : 128) / w.group);
  const __m512i spread = spread_of(count), low_bits = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(char(128));
  const int64_t size = r ? 0 : distance_of(w.stride);
  __m512 sum[O][R];
  clear(sum);
  for (int64_t b = 0; b < blocks; b++) {
    __m512i total[O][R];  // exact, where the row has one scale
    __m512 part[O][R];
    clear(part);
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++)
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) total[i][j] = _mm512_load_si512(x[j * blocks + b].whole);
    const int64_t some = chunks - b * kChunks < kChunks ? chunks - b * kChunks : kChunks;
    for (int64_t c = 0; c < some; c++)
      JAXLLM_UNROLL
      for (int i = 0; i < O; i += P) {
        __m512i first[P], second[P], zero[P];
        __m512 scale[P][2];
        JAXLLM_UNROLL
        for (int p = 0; p < P; p++) {
          const int64_t at = b * kChunks + c;
          const uint8_t* line = w.data + (o + i + p) * w.stride + (kFour ? 64 : 128) * at;
          const int64_t group = (o + i + p) * w.groups + at * count * (kLess ? 2 : 1);
          ahead(line, size);
          const __m512i byte = _mm512_loadu_si512(line);
          if (kFour) {
            first[p] = _mm512_and_si512(byte, low_bits);
            second[p] = _mm512_and_si512(_mm512_srli_epi16(byte, 4), low_bits);
          } else {
            ahead(line + 64, size);
            first[p] = _mm512_xor_si512(byte, flip);
            second[p] = _mm512_xor_si512(_mm512_loadu_si512(line + 64), flip);
          }
          if (!kRow) scale[p][0] = lanes_of_scales(w, group, spread, count);
          if (kLess) scale[p][1] = lanes_of_scales(w, group + count, spread, count);
          if (W == Read::kInt4Zero) zero[p] = lanes_of_zeros(w, group, spread, count);
        }
        JAXLLM_UNROLL
        for (int j = 0; j < R; j++) {
          const Block& in = x[j * blocks + b];
          const __m512i here = _mm512_load_si512(in.digit[c][0]), there = _mm512_load_si512(in.digit[c][1]);
          JAXLLM_UNROLL
          for (int p = 0; p < P; p++) {
            if (kRow) {
              add_bytes(total[i + p][j], first[p], here);
              add_bytes(total[i + p][j], second[p], there);
              continue;
            }
            __m512& all = part[i + p][j];
            const __m512i bias = _mm512_load_si512(in.bias[c][0]), none = _mm512_setzero_si512();
            __m512i t = W == Read::kInt4Zero ? none : bias;
            add_bytes(t, first[p], here);
            if (!kLess) add_bytes(t, second[p], there);
            if (W == Read::kInt4Zero) t = _mm512_sub_epi32(t, _mm512_mullo_epi32(bias, zero[p]));
            all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(t), scale[p][0], all);
            if (kLess) {
              __m512i u = _mm512_load_si512(in.bias[c][1]);
              add_bytes(u, second[p], there);
              all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(u), scale[p][1], all);
            }
          }
        }
      }
    JAXLLM_UNROLL
    for (int i = 0; i < O; i++) {
      const __m512 scale = _mm512_set1_ps(kRow ? scale_at(w, o + i) : 1);
      JAXLLM_UNROLL
      for (int j = 0; j < R; j++) {  // scaled first: steps may be so large that nothing else fits
        const __m512 block = kRow ? _mm512_mul_ps(_mm512_cvtepi32_ps(total[i][j]), scale) : part[i][j];
        sum[i][j] = _mm512_fmadd_ps(block, _mm512_set1_ps(x[j * blocks + b].step), sum[i][j]);
      }
    }
  }
  put(sum, w, o, r, y);
}

template <Read W>
void multiply_rounded(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const int64_t chunks = chunks_of(in);
  blocks(begin, end, w.stride, in.rows, [&](int64_t begin, int64_t end) {
    tiles(begin, end, in.rows, [&](auto O, auto R, int64_t o, int64_t r) {
      rounded_tile<O, R, W>(w, x, chunks, o, r, y);
    });
  });
}

void multiply_by_int8(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  switch (read_of(w)) {
    case Read::kInt8ByRow: return multiply_rounded<Read::kInt8ByRow>(w, in, x, begin, end, y);
    case Read::kInt8ByChunk: return multiply_rounded<Read::kInt8ByChunk>(w, in, x, begin, end, y);
    case Read::kInt8ByLess: return multiply_rounded<Read::kInt8ByLess>(w, in, x, begin, end, y);
    case Read::kInt4: return multiply_rounded<Read::kInt4>(w, in, x, begin, end, y);
    case Read::kInt4Zero: return multiply_rounded<Read::kInt4Zero>(w, in, x, begin, end, y);
  }
}
