// Attention over the parts of a cache, where they lie (as ops/attention.py says it): an online softmax over blocks of slots, float32 throughout, slots that nobody sees skipped.
// Included into a namespace of each instruction set.
constexpr int64_t kBlock = 64;
constexpr int kLanes = 16;

typedef float Lanes __attribute__((vector_size(4 * kLanes)));  // as many registers as it takes

static inline Lanes lanes_at(const float* p) {
  Lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void put_lanes(float* p, Lanes v) { memcpy(p, &v, sizeof v); }

static inline float sum_of(Lanes v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(__m512(v));
#else
  for (int half = kLanes / 2; half; half /= 2)
    for (int l = 0; l < half; l++) v[l] += v[l + half];
  return v[0];
#endif
}

static inline bool sees(const Queries& s, int32_t q, int32_t k) {
  return k >= 0 && k <= q && (s.window < 0 || q - k < s.window);
}

// The products of one query with four keys, `width` apart. Heads are padded with zeros to whole
// lanes. Four sums over lanes at once cost little more than one.
static inline void dot4(const float* q, const float* k, int64_t width, float* out) {
  Lanes sum[4] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes a = lanes_at(q + i);
    for (int j = 0; j < 4; j++) sum[j] += a * lanes_at(k + j * width + i);
  }
#ifdef __AVX512F__
  const __m512 a(sum[0]), b(sum[1]), c(sum[2]), d(sum[3]);
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  for (int j = 0; j < 4; j++) out[j] = sum_of(sum[j]);
#endif
}

static inline void widen_head(Kind kind, const void* data, int64_t at, int64_t n, const float* scale,
                              int64_t scale_at, float* out) {
  if (kind == Kind::kBF16) {
    const uint16_t* x = static_cast<const uint16_t*>(data) + at;
    for (int64_t i = 0; i < n; i++) out[i] = from_bf16(x[i]);
  } else if (kind == Kind::kF16) {
    const uint16_t* x = static_cast<const uint16_t*>(data) + at;
    for (int64_t i = 0; i < n; i++) out[i] = from_f16(x[i]);
  } else if (kind == Kind::kInt8) {
    const int8_t* x = static_cast<const int8_t*>(data) + at;
    const float by = scale[scale_at];
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * by;
  } else {
    memcpy(out, static_cast<const float*>(data) + at, 4 * n);
  }
}

// exp by 2^n times a polynomial of degree 6 (Cephes' expf); 0 below -87, as nothing is above 0.
static inline float exp_of(float x) {
  const float kept = x < -87.0f ? -87.0f : x;
  const float n = (kept * 1.44269504f + 12582912.0f) - 12582912.0f;  // to nearest
  const float r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : p * power;
}

// A query's running softmax: largest score, sum of weights, weighted sum of values.
struct Running {
  float top, total;
  float* value;
};

// Takes a block's scores in, and leaves their weights in their place. `line` has kBlock of them,
// -infinity where nothing is seen.
static void absorb(float* line, Running& row, int64_t width) {
  float most[kLanes], bad = 0;
  for (int l = 0; l < kLanes; l++) most[l] = row.top;
  for (int64_t j = 0; j < kBlock; j += kLanes)
    for (int l = 0; l < kLanes; l++) most[l] = line[j + l] > most[l] ? line[j + l] : most[l];
  for (int l = 1; l < kLanes; l++) most[0] = most[l] > most[0] ? most[l] : most[0];
  for (int64_t j = 0; j < kBlock; j++) bad += line[j] < INFINITY ? 0 : 1;  // NaN compares false
  if (bad > 0 || row.top != row.top) {  // not a finite score: shows in the result, as it must
    row.top = row.total = NAN;
    memset(line, 0, 4 * kBlock);
    return;
  }
  const float shift = most[0] == -INFINITY ? 0 : most[0];
  const float shrink = exp_of(row.top - shift);
  for (int64_t j = 0; j < kBlock; j++) line[j] = exp_of(line[j] - shift);
  Lanes sum = lanes_at(line);
  for (int64_t j = kLanes; j < kBlock; j += kLanes) sum += lanes_at(line + j);
  row.total = row.total * shrink + sum_of(sum);
  row.top = most[0];
  for (int64_t h = 0; h < width; h++) row.value[h] *= shrink;
}

// value += sum_j weight[j] * v[j], over the slots that `used` says.
static void add_values(const float* weight, const float* v, int64_t slots, const bool* used,
                       int64_t width, float* value) {
  for (int64_t h = 0; h < width; h += kLanes) {
    Lanes sum = lanes_at(value + h), other = {};
    int64_t j = 0;
    if (!used)
      for (; j + 2 <= slots; j += 2) {
        sum += weight[j] * lanes_at(v + j * width + h);
        other += weight[j + 1] * lanes_at(v + (j + 1) * width + h);
      }
    for (; j < slots; j++)
      if (!used || used[j]) sum += weight[j] * lanes_at(v + j * width + h);  // 0 times NaN is NaN
    put_lanes(value + h, sum + other);
  }
}

// Which of `n` slots from `begin` on any of some queries sees, and at seen_by[t * kBlock + j] whether
// query t sees the j-th of those.
static int64_t seen_slots(const Queries& s, const int32_t* asks, int64_t tokens, const int32_t* position,
                          int64_t begin, int64_t n, int64_t* slot, bool* seen_by) {
  int64_t seen = 0;
  for (int64_t j = 0; j < n; j++) {
    bool any = false;
    for (int64_t t = 0; t < tokens; t++)
      any |= seen_by[t * kBlock + seen] = sees(s, asks[t], position[begin + j]);
    if (any) slot[seen++] = begin + j;
  }
  return seen;
}

// Products to scores: -infinity where nothing is seen.
static void mask_scores(float* line, float scale, int64_t seen, const bool* visible) {
  for (int64_t j = 0; j < kBlock; j++) line[j] = j < seen && visible[j] ? scale * line[j] : -INFINITY;
}

// The rows of queries that one call of `attend` answers: G heads of each token.
struct Rows {
  const Queries& s;
  int64_t b, head, first, G;

  int64_t at(int64_t i) const {  // of row i in q and in the result
    return ((b * s.T + first + i / G) * s.N + head * G + i % G) * s.H;
  }
};

static void put_rows(const Rows& rows, int64_t count, const Running* running, void* out) {
  for (int64_t i = 0; i < count; i++) {
    const float by = running[i].total == 0 ? 0 : 1 / running[i].total;
    const int64_t at = rows.at(i);
    for (int64_t h = 0; h < rows.s.H; h++) {
      const float value = running[i].value[h] * by;
      if (rows.s.bf16)
        static_cast<uint16_t*>(out)[at + h] = to_bf16(value);
      else
        static_cast<float*>(out)[at + h] = value;
    }
  }
}

static void attend(const Queries& s, const Part* parts, int64_t count, int64_t b, int64_t head,
                   int64_t first, int64_t tokens, void* out) {
  const int64_t G = s.N / s.K, H = s.H, rows = tokens * G, width = (H + kLanes - 1) / kLanes * kLanes;
  const Rows asked = {s, b, head, first, G};
  std::vector<float> space((2 * rows + kBlock) * width + rows * kBlock);
  float *q = space.data(), *value = q + rows * width, *wide = value + rows * width;
  float* score = wide + kBlock * width;
  std::vector<Running> running(rows);
  for (int64_t i = 0; i < rows; i++) {
    running[i] = {-INFINITY, 0, value + i * width};
    widen_head(s.bf16 ? Kind::kBF16 : Kind::kF32, s.q, asked.at(i), H, nullptr, 0, q + i * width);
  }
  const int32_t* asks = s.position + b * s.T + first;
  std::vector<uint8_t> flags(tokens * kBlock + 1);
  bool* seen_by = reinterpret_cast<bool*>(flags.data());
  for (int64_t p = 0; p < count; p++) {
    const Part& part = parts[p];
    const int64_t k_row = part.one_k ? 0 : b * part.slots, v_row = part.one_v ? 0 : b * part.slots;
    const int32_t* position = part.position + (part.one_position ? 0 : b * part.slots);
    for (int64_t begin = 0; begin < part.slots; begin += kBlock) {
      const int64_t n = part.slots - begin < kBlock ? part.slots - begin : kBlock;
      int64_t slot[kBlock];
      const int64_t seen = seen_slots(s, asks, tokens, position, begin, n, slot, seen_by);
      if (!seen) continue;
      for (int64_t j = 0; j < seen; j++) {
        const int64_t at = (k_row + slot[j]) * s.K + head;
        widen_head(part.kind, part.k, at * H, H, part.k_scale, at, wide + j * width);
      }
      for (int64_t i = 0; i < rows; i++) {
        float* line = score + i * kBlock;
        for (int64_t j = 0; j < seen; j += 4) dot4(q + i * width, wide + j * width, width, line + j);
        mask_scores(line, s.scale, seen, seen_by + i / G * kBlock);
        absorb(line, running[i], width);
      }
      for (int64_t j = 0; j < seen; j++) {
        const int64_t at = (v_row + slot[j]) * s.K + head;
        widen_head(part.kind, part.v, at * H, H, part.v_scale, at, wide + j * width);
      }
      for (int64_t i = 0; i < rows; i++)
        add_values(score + i * kBlock, wide, seen, tokens > 1 ? seen_by + i / G * kBlock : nullptr,
                   width, running[i].value);
    }
  }
  put_rows(asked, rows, running.data(), out);
}
