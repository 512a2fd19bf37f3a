// bfloat16 from 12 bits.

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
  Escapes(const Weight& w, Range range) : w(w), at(range.begin), end(range.end) {}

  int32_t next() const { return at < end ? w.escape_column[at] : INT32_MAX; }

  // Puts those of columns c to c + 63 in their places, and returns the column of the next.
  __attribute__((noinline)) int32_t patch(int64_t c, Pair& pair) {
    alignas(64) uint16_t plain[64];
    _mm512_store_si512(plain, pair.first);
    _mm512_store_si512(plain + 32, pair.second);
    for (; next() < c + 64; at++)
      if (next() >= c) plain[next() - c] = w.escape_value[at];
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
    escapes.emplace_back(w, escapes_of(w, o + i));
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
  const Range escapes = escapes_of(w, o);
  for (int32_t i = escapes.begin; i < escapes.end; i++)
    if (w.escape_column[i] >= 0 && w.escape_column[i] < w.stride) out[w.escape_column[i]] = w.escape_value[i];
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

void multiply_packed_bf16(const Weight& w, const Input& in, const uint8_t* x, int64_t begin, int64_t end, float* y) {
  const auto expand = [&](int64_t o, uint16_t* out) { expand_packed(w, o, out); };
  by_expanded<uint16_t>(in, begin, end, expand, [&](const uint16_t* rows, int64_t stride, int64_t b, int64_t e) {
    multiply_floats<BF16, true>(plain_rows(w, Kind::kBF16, rows, 2 * stride, b, w.columns), in, x, b, e, y);
  });
}
