// The number formats, one at a time: bit patterns to float and back, and a weight's row as floats.
// Included into a namespace of each instruction set, so that each is compiled for its own.
static inline float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static inline uint16_t to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if ((wide & 0x7fffffff) > 0x7f800000) return uint16_t((wide >> 16) | 64);
  return uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static inline float from_f16(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  // Below 2^-14 a plain number of steps; threads of XLA flush what a float cannot hold normally.
  if (magnitude < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * float(magnitude);
  const uint32_t exponent = magnitude < 0x7c00 ? 112 : 224;  // infinity and NaN have the largest
  const uint32_t wide = sign | ((magnitude << 13) + (exponent << 23));
  float value;
  memcpy(&value, &wide, 4);
  return value;
#endif
}

static inline float element(Kind kind, const void* data, int64_t i) {
  switch (kind) {
    case Kind::kBF16: return from_bf16(static_cast<const uint16_t*>(data)[i]);
    case Kind::kF16: return from_f16(static_cast<const uint16_t*>(data)[i]);
    case Kind::kInt8: return static_cast<const int8_t*>(data)[i];
    default: {
      float value;  // a float may lie at any address
      memcpy(&value, static_cast<const char*>(data) + 4 * i, 4);
      return value;
    }
  }
}

static inline bool integers(const Weight& w) { return w.kind == Kind::kInt8 || w.kind == Kind::kInt4; }

static inline float scale_at(const Weight& w, int64_t i) {
  return element(w.half ? Kind::kF16 : Kind::kF32, w.scale, i);
}

// The exponent bits, 0 to 15 less `base`, of byte p of a packed row.
static inline int nibble_at(const uint8_t* nibbles, int64_t p) {
  const int64_t block = p / 64;
  const uint8_t byte = nibbles[block / 2 * 64 + p % 64];
  return block & 1 ? byte >> 4 : byte & 15;
}

// The escapes of a packed row, `begin <= i < end`; nothing outside the arrays, whatever they hold.
struct Range {
  int32_t begin, end;
};

static inline Range escapes_of(const Weight& w, int64_t o) {
  const auto inside = [&](int32_t i) { return i < 0 ? 0 : (i < w.escapes ? i : w.escapes); };
  return {inside(w.escape_begin[o]), inside(w.escape_begin[o + 1])};
}

// `count` columns of row o from `from` on (a multiple of 128; count at most 128), as floats.
static void row_part(const Weight& w, int64_t o, int64_t from, int64_t count, float* out) {
  const uint8_t* row = w.data + o * w.stride;
  if (w.kind == Kind::kInt8) {
    const int8_t* q = reinterpret_cast<const int8_t*>(row) + from;
    for (int64_t i = 0; i < count; i++) out[i] = q[i];
  } else if (w.kind == Kind::kInt4) {
    for (int64_t b = 0; b < 4; b++) {
      const uint8_t* q = row + from / 2 + 16 * b;
      float* to = out + 32 * b;
      for (int j = 0; j < 16; j++) to[j] = float(q[j] & 15);
      for (int j = 0; j < 16; j++) to[16 + j] = float(q[j] >> 4);
    }
  } else if (w.kind == Kind::kPacked) {
    const uint8_t* nibbles = w.nibbles + o * w.nibble_stride;
    for (int64_t i = 0; i < count; i++) {
      const int64_t c = from + i, p = c / 64 * 64 + 16 * (c / 8 % 4) + 8 * (c / 32 % 2) + c % 8;
      const uint16_t e = uint16_t(w.base + nibble_at(nibbles, p));
      out[i] = from_bf16(uint16_t((row[p] & 128) << 8 | e << 7 | (row[p] & 127)));
    }
    const Range escapes = escapes_of(w, o);
    for (int32_t e = escapes.begin; e < escapes.end; e++) {
      const int64_t i = w.escape_column[e] - from;
      if (i >= 0 && i < count) out[i] = from_bf16(w.escape_value[e]);
    }
    return;
  } else {
    for (int64_t i = 0; i < count; i++) out[i] = element(w.kind, row, from + i);
    return;
  }
  const int64_t step = w.group < 128 ? w.group : 128;
  for (int64_t i = 0; i < count; i += step) {
    const int64_t g = o * w.groups + (from + i) / w.group;
    const float scale = scale_at(w, g);
    const float zero = w.zero ? w.zero[g] : (w.kind == Kind::kInt4 ? 8.0f : 0.0f);
    for (int64_t j = i; j < i + step && j < count; j++) out[j] = (out[j] - zero) * scale;
  }
}

static void widen(const Weight& w, int64_t begin, int64_t end, bool bf16, void* out) {
  for (int64_t o = begin; o < end; o++) {
    for (int64_t from = 0; from < w.columns; from += 128) {
      const int64_t count = w.columns - from < 128 ? w.columns - from : 128;
      float part[128];
      row_part(w, o, from, count, part);
      const int64_t at = o * w.columns + from;
      if (bf16) {
        for (int64_t i = 0; i < count; i++) static_cast<uint16_t*>(out)[at + i] = to_bf16(part[i]);
      } else {
        memcpy(static_cast<float*>(out) + at, part, 4 * count);
      }
    }
  }
}

// Input row r as floats, zeros up to `width`.
static void input_row(const Input& in, int64_t r, int64_t width, float* out) {
  if (in.bf16) {
    const uint16_t* x = static_cast<const uint16_t*>(in.x) + r * in.columns;
    for (int64_t i = 0; i < in.columns; i++) out[i] = from_bf16(x[i]);
  } else if (in.columns) {  // what has no columns may have no address
    memcpy(out, static_cast<const float*>(in.x) + r * in.columns, 4 * in.columns);
  }
  for (int64_t i = in.columns; i < width; i++) out[i] = 0;
}

// What one step of a rounded block stands for: in this one order of operations, as round_to_int8 has
// it, for a quotient that is one bit off falls on the other side of a half; and 0 where XLA's threads,
// which flush what a float cannot hold normally, have 0.
static inline float step_of(float largest) {
  const float step = largest * (1.0f / 127);
  return step < 0x1p-126f ? 0 : step;
}
