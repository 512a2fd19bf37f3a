// What products with integer weights share: their scales by lanes, and 8-bit products.

bool rounded(const Weight& w, const Input& in) { return integers(w) && in.rounded; }

int64_t chunks_of(const Input& in) { return up(in.columns, 128) / 128; }

int64_t blocks_of(const Input& in) { return up(in.columns, kRounded) / kRounded; }

bool split(const Weight& w) { return w.kind == Kind::kInt8 && w.group < 128 && w.groups > 1; }

// Adds products of 8-bit numbers, unsigned by signed, four to a lane; see add_pairs.
inline void add_bytes(__m512i& sum, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
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

// Of 16 lanes, which of a chunk's `count` groups each is of.
__m512i spread_of(int count) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_srl_epi32(lane, _mm_cvtsi32_si128(4 - (count > 1) - (count > 2)));
}
