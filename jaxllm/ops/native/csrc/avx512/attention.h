// Attention of bfloat16 queries to a bfloat16 cache, by BF16's own products: as attention.h has it,
// but weights are rounded to bfloat16 before they meet values, as ops/attention.py rounds them.
// Keys are turned, and values interleaved, so that a register holds pairs of numbers of 16 columns.

// C[r, c] (+)= sum over p of A[r, p] * B[p, c], p counting pairs: R rows and 16 * N columns.
template <int R, int N>
void pairs_product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                   int64_t pairs, float* c, int64_t c_stride, bool add) {
  __m512 sum[R][N];
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++)
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++)
      sum[r][n] = add ? _mm512_loadu_ps(c + r * c_stride + 16 * n) : _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; p++, b += b_stride) {
    __m512i right[N];
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) right[n] = _mm512_loadu_si512(b + 16 * n);
    JAXLLM_UNROLL
    for (int r = 0; r < R; r++) {
      const __m512i left = _mm512_set1_epi32(int(a[r * a_stride + p]));
      JAXLLM_UNROLL
      for (int n = 0; n < N; n++)
        sum[r][n] = _mm512_dpbf16_ps(sum[r][n], __m512bh(left), __m512bh(right[n]));
    }
  }
  JAXLLM_UNROLL
  for (int r = 0; r < R; r++)
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) _mm512_storeu_ps(c + r * c_stride + 16 * n, sum[r][n]);
}

// The same for any number of rows, and of columns in 32s.
void pairs_products(int64_t rows, int64_t columns, const uint32_t* a, int64_t a_stride,
                    const uint32_t* b, int64_t b_stride, int64_t pairs, float* c, int64_t c_stride,
                    bool add) {
  for (int64_t n = 0; n < columns; n += 64) {
    const bool whole = columns - n >= 64;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      (whole ? pairs_product<4, 4> : pairs_product<4, 2>)(a + r * a_stride, a_stride, b + n, b_stride, pairs,
                                                          c + r * c_stride + n, c_stride, add);
    for (; r < rows; r++)
      (whole ? pairs_product<1, 4> : pairs_product<1, 2>)(a + r * a_stride, a_stride, b + n, b_stride, pairs,
                                                          c + r * c_stride + n, c_stride, add);
  }
}

// out[c][r] = in[r][c], 16 by 16: twice by pairs of rows, twice by quarters of registers.
void transpose(const __m512i (&in)[16], uint32_t* out, int64_t stride) {
  __m512i a[16], b[16];
  JAXLLM_UNROLL
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  JAXLLM_UNROLL
  for (int i = 0; i < 16; i += 4)
    JAXLLM_UNROLL
    for (int k = 0; k < 2; k++) {  // b[i + m]: column 4 l + m of rows i to i + 3 in quarter l
      b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + 2 + k]);
      b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + 2 + k]);
    }
  JAXLLM_UNROLL
  for (int m = 0; m < 4; m++) {
    const __m512i even = _mm512_shuffle_i32x4(b[m], b[4 + m], 0x88), odd = _mm512_shuffle_i32x4(b[m], b[4 + m], 0xdd);
    const __m512i even_2 = _mm512_shuffle_i32x4(b[8 + m], b[12 + m], 0x88);
    const __m512i odd_2 = _mm512_shuffle_i32x4(b[8 + m], b[12 + m], 0xdd);
    _mm512_storeu_si512(out + m * stride, _mm512_shuffle_i32x4(even, even_2, 0x88));
    _mm512_storeu_si512(out + (4 + m) * stride, _mm512_shuffle_i32x4(odd, odd_2, 0x88));
    _mm512_storeu_si512(out + (8 + m) * stride, _mm512_shuffle_i32x4(even, even_2, 0xdd));
    _mm512_storeu_si512(out + (12 + m) * stride, _mm512_shuffle_i32x4(odd, odd_2, 0xdd));
  }
}

// Heads of `seen` slots, as pairs of numbers by slot: out[H / 2][kBlock].
void turned_keys(const uint16_t* k, int64_t apart, const int64_t* slot, int64_t seen, int64_t H, uint32_t* out) {
  for (int64_t j = 0; j < kBlock; j += 16)
    for (int64_t h = 0; h < H; h += 32) {
      __m512i row[16];
      for (int64_t i = 0; i < 16; i++)
        row[i] = j + i < seen ? _mm512_loadu_si512(k + slot[j + i] * apart + h) : _mm512_setzero_si512();
      transpose(row, out + h / 2 * kBlock + j, kBlock);
    }
}

// The same as pairs of slots by number: out[kBlock / 2][H]. False where one is not finite.
bool paired_values(const uint16_t* v, int64_t apart, const int64_t* slot, int64_t seen, int64_t H, uint32_t* out) {
  alignas(64) uint16_t first[32], second[32];
  for (int i = 0; i < 32; i++) {
    first[i] = uint16_t(i / 2 + i % 2 * 32);
    second[i] = uint16_t(first[i] + 16);
  }
  const __m512i low = _mm512_load_si512(first), high = _mm512_load_si512(second);
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 wild = 0;
  for (int64_t j = 0; j < kBlock; j += 2)
    for (int64_t h = 0; h < H; h += 32) {
      const __m512i none = _mm512_setzero_si512();
      const __m512i a = j < seen ? _mm512_loadu_si512(v + slot[j] * apart + h) : none;
      const __m512i b = j + 1 < seen ? _mm512_loadu_si512(v + slot[j + 1] * apart + h) : none;
      wild |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, exponent), exponent) |
              _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, exponent), exponent);
      _mm512_storeu_si512(out + j / 2 * H + h, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(out + j / 2 * H + h + 16, _mm512_permutex2var_epi16(a, high, b));
    }
  return !wild;
}

// exp_of, 16 at a time.
__m512 exp_of(__m512 x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87), _CMP_GE_OQ);
  x = _mm512_maskz_mov_ps(kept, x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(next));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1));
  return _mm512_maskz_scalef_ps(kept, p, n);
}

// `absorb` for products of which `visible` count; their weights in bfloat16.
void absorb_bf16(const float* line, float scale, uint64_t visible, Running& row, int64_t width, uint16_t* weight) {
  constexpr int kParts = kBlock / 16;
  __m512 score[kParts], most = _mm512_set1_ps(row.top);
  __mmask16 wild = 0;  // NaN and infinity
  JAXLLM_UNROLL
  for (int n = 0; n < kParts; n++) {
    score[n] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), __mmask16(visible >> 16 * n),
                                  _mm512_loadu_ps(line + 16 * n), _mm512_set1_ps(scale));
    wild |= _mm512_cmp_ps_mask(score[n], _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
    most = _mm512_max_ps(most, score[n]);
  }
  if (wild || row.top != row.top) {
    row.top = row.total = NAN;
    memset(weight, 0, 2 * kBlock);
    return;
  }
  const float top = _mm512_reduce_max_ps(most), shift = top == -INFINITY ? 0 : top;
  const float shrink = exp_of(row.top - shift);
  __m512 sum = _mm512_setzero_ps();
  JAXLLM_UNROLL
  for (int n = 0; n < kParts; n++) {
    const __m512 each = exp_of(_mm512_sub_ps(score[n], _mm512_set1_ps(shift)));
    sum = _mm512_add_ps(sum, each);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + 16 * n), __m256i(_mm512_cvtneps_pbh(each)));
  }
  row.total = row.total * shrink + _mm512_reduce_add_ps(sum);
  if (row.top != top)
    for (int64_t h = 0; h < width; h++) row.value[h] *= shrink;
  row.top = top;
}

bool by_bf16(const Queries& s, const Part* parts, int64_t count) {
  bool all = s.bf16 && s.H % 32 == 0;
  for (int64_t p = 0; p < count; p++) all = all && parts[p].kind == Kind::kBF16;
  return all;
}

// As `attend`; false, and nothing written, where a value that somebody sees is not finite: it must
// not reach those who do not.
bool attend_bf16(const Queries& s, const Part* parts, int64_t count, int64_t b, int64_t head,
                 int64_t first, int64_t tokens, void* out) {
  const int64_t G = s.N / s.K, H = s.H, rows = tokens * G;
  const Rows asked = {s, b, head, first, G};
  thread_local std::vector<float> space;
  thread_local std::vector<uint16_t> rounded;
  thread_local std::vector<uint32_t> turned;
  thread_local std::vector<uint8_t> flags;
  space.resize(rows * (H + kBlock));
  rounded.resize(rows * (H + kBlock));
  turned.resize(H * kBlock);
  flags.resize(tokens * kBlock + 1);
  float *value = space.data(), *score = value + rows * H;
  uint16_t *q = rounded.data(), *weight = q + rows * H;
  uint32_t *k = turned.data(), *v = k + H / 2 * kBlock;
  bool* seen_by = reinterpret_cast<bool*>(flags.data());
  std::vector<Running> running(rows);
  std::fill(value, value + rows * H, 0.0f);
  for (int64_t i = 0; i < rows; i++) {
    running[i] = {-INFINITY, 0, value + i * H};
    memcpy(q + i * H, static_cast<const uint16_t*>(s.q) + asked.at(i), 2 * H);
  }
  const int32_t* asks = s.position + b * s.T + first;
  for (int64_t p = 0; p < count; p++) {
    const Part& part = parts[p];
    const uint16_t* keys = static_cast<const uint16_t*>(part.k) + ((part.one_k ? 0 : b * part.slots) * s.K + head) * H;
    const uint16_t* values = static_cast<const uint16_t*>(part.v) + ((part.one_v ? 0 : b * part.slots) * s.K + head) * H;
    const int32_t* position = part.position + (part.one_position ? 0 : b * part.slots);
    for (int64_t begin = 0; begin < part.slots; begin += kBlock) {
      const int64_t n = part.slots - begin < kBlock ? part.slots - begin : kBlock;
      int64_t slot[kBlock];
      const int64_t seen = seen_slots(s, asks, tokens, position, begin, n, slot, seen_by);
      if (!seen) continue;
      turned_keys(keys, s.K * H, slot, seen, H, k);
      pairs_products(rows, kBlock, reinterpret_cast<uint32_t*>(q), H / 2, k, kBlock, H / 2, score, kBlock, false);
      const uint64_t used = seen == 64 ? ~uint64_t(0) : (uint64_t(1) << seen) - 1;
      for (int64_t i = 0; i < rows; i++) {
        const __m512i visible = _mm512_loadu_si512(seen_by + i / G * kBlock);
        absorb_bf16(score + i * kBlock, s.scale, used & _mm512_test_epi8_mask(visible, visible), running[i], H,
                    weight + i * kBlock);
      }
      if (!paired_values(values, s.K * H, slot, seen, H, v)) return false;
      pairs_products(rows, H, reinterpret_cast<uint32_t*>(weight), kBlock / 2, v, H, (seen + 1) / 2, value, H, true);
    }
  }
  put_rows(asked, rows, running.data(), out);
  return true;
}
