// Attention of a few queries over the parts of a cache, where they lie (as ops/attention.py says
// it): an online softmax over blocks of slots, float32 throughout, slots that nobody sees skipped.
// Included into a namespace of each instruction set.
constexpr int64_t kBlock = 64;
constexpr int kLanes = 16;

static inline bool sees(const Queries& s, int32_t q, int32_t k) {
  return k >= 0 && k <= q && (s.window < 0 || q - k < s.window);
}

static inline float dot(const float* a, const float* b, int64_t n) {
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; l++) lane[l] += a[i + l] * b[i + l];
  float sum = 0;
  for (; i < n; i++) sum += a[i] * b[i];
  for (int half = kLanes / 2; half; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return sum + lane[0];
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
  const float n = nearbyintf(kept * 1.44269504f);
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

static void attend(const Queries& s, const Part* parts, int64_t count, int64_t b, int64_t head,
                   float* out) {
  const int64_t G = s.N / s.K, H = s.H, rows = s.T * G;
  std::vector<float> space(rows * (2 + kBlock) + rows * H + H);
  float* top = space.data();
  float* total = top + rows;
  float* score = total + rows;
  float* value = score + rows * kBlock;
  float* wide = value + rows * H;
  for (int64_t i = 0; i < rows; i++) top[i] = -INFINITY;
  const float* q = s.q + (b * s.T * s.N + head * G) * H;  // row t, member g: q + (t * N + g) * H
  const int32_t* asks = s.position + b * s.T;
  for (int64_t p = 0; p < count; p++) {
    const Part& part = parts[p];
    const int64_t b_part = part.shared ? 0 : b;
    const int32_t* position = part.position + b_part * part.slots;
    for (int64_t begin = 0; begin < part.slots; begin += kBlock) {
      const int64_t n = part.slots - begin < kBlock ? part.slots - begin : kBlock;
      int64_t slot[kBlock], seen = 0;
      for (int64_t j = 0; j < n; j++) {
        bool any = false;
        for (int64_t t = 0; t < s.T; t++) any |= sees(s, asks[t], position[begin + j]);
        if (any) slot[seen++] = begin + j;
      }
      if (!seen) continue;
      for (int64_t j = 0; j < seen; j++) {
        const int64_t at = (b_part * part.slots + slot[j]) * s.K + head;
        widen_head(part.kind, part.k, at * H, H, part.k_scale, at, wide);
        for (int64_t t = 0; t < s.T; t++) {
          const bool visible = sees(s, asks[t], position[slot[j]]);
          for (int64_t g = 0; g < G; g++)
            score[(t * G + g) * kBlock + j] =
                visible ? s.scale * dot(q + (t * s.N + g) * H, wide, H) : -INFINITY;
        }
      }
      for (int64_t i = 0; i < rows; i++) {
        float* line = score + i * kBlock;
        float most = top[i], sum = 0;
        for (int64_t j = 0; j < seen; j++) {
          most = line[j] > most ? line[j] : most;
          sum += line[j] * 0 == 0 || line[j] == -INFINITY ? 0 : 1;
        }
        if (sum > 0 || top[i] != top[i]) {  // not a finite score: shows in the result, as it must
          top[i] = total[i] = NAN;
          memset(line, 0, 4 * seen);
          continue;
        }
        const float shift = most == -INFINITY ? 0 : most;
        const float shrink = exp_of(top[i] - shift);
        for (int64_t j = 0; j < seen; j++) line[j] = exp_of(line[j] - shift);
        for (int64_t j = 0; j < seen; j++) sum += line[j];
        total[i] = total[i] * shrink + sum;
        top[i] = most;
        float* v = value + i * H;
        for (int64_t h = 0; h < H; h++) v[h] *= shrink;
      }
      for (int64_t j = 0; j < seen; j++) {
        const int64_t at = (b_part * part.slots + slot[j]) * s.K + head;
        widen_head(part.kind, part.v, at * H, H, part.v_scale, at, wide);
        for (int64_t i = 0; i < rows; i++) {
          const float weight = score[i * kBlock + j];
          float* v = value + i * H;
          if (sees(s, asks[i / G], position[slot[j]]))  // zero times NaN is NaN
            for (int64_t h = 0; h < H; h++) v[h] += weight * wide[h];
        }
      }
    }
  }
  for (int64_t t = 0; t < s.T; t++)
    for (int64_t g = 0; g < G; g++) {
      const int64_t i = t * G + g;
      float* to = out + ((b * s.T + t) * s.N + head * G + g) * H;
      const float by = total[i] == 0 ? 0 : 1 / total[i];
      for (int64_t h = 0; h < H; h++) to[h] = value[i * H + h] * by;
    }
}
