// NEON, which every aarch64 has; with the products of dotprod and of bf16 if compiled for them.
#pragma once

#include <arm_neon.h>

#include "lanes.h"

namespace jaxllm {
namespace {

JAXLLM_LANES(4);
constexpr int kRegisters = 32;
constexpr int kOffset = 0;
constexpr int kDigitRows = 0;

JAXLLM_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
JAXLLM_INLINE Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
JAXLLM_INLINE float reduce_add(Floats v) { return vaddvq_f32(v); }
JAXLLM_INLINE float reduce_max(Floats v) { return vmaxvq_f32(v); }

JAXLLM_INLINE void reduce_add4(const Floats (&v)[4], float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
}

JAXLLM_INLINE Floats from_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(p))); }

JAXLLM_INLINE Floats from_int8(const int8_t* p) {
  const int8x8_t four = vreinterpret_s8_s32(vdup_n_s32(load<int32_t>(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define JAXLLM_PAIRS
JAXLLM_INLINE bfloat16x8_t as_bf16(Halves v) { return vreinterpretq_bf16_u16(uint16x8_t(v)); }
// Not BFDOT, whose sums are not rounded to nearest.
JAXLLM_INLINE void add_pairs(Floats& sum, Halves a, Halves b) {
  sum = vbfmlaltq_f32(vbfmlalbq_f32(sum, as_bf16(a), as_bf16(b)), as_bf16(a), as_bf16(b));
}
JAXLLM_INLINE void transpose(const Bits (&in)[kLanes], uint32_t* out, int64_t stride) {
  const uint32x4x2_t a = vzipq_u32(uint32x4_t(in[0]), uint32x4_t(in[2]));
  const uint32x4x2_t b = vzipq_u32(uint32x4_t(in[1]), uint32x4_t(in[3]));
  const uint32x4x2_t low = vzipq_u32(a.val[0], b.val[0]), high = vzipq_u32(a.val[1], b.val[1]);
  vst1q_u32(out, low.val[0]);
  vst1q_u32(out + stride, low.val[1]);
  vst1q_u32(out + 2 * stride, high.val[0]);
  vst1q_u32(out + 3 * stride, high.val[1]);
}
JAXLLM_INLINE void interleave(Halves a, Halves b, Halves& first, Halves& second) {
  first = Halves(vzip1q_u16(uint16x8_t(a), uint16x8_t(b)));
  second = Halves(vzip2q_u16(uint16x8_t(a), uint16x8_t(b)));
}
#endif

JAXLLM_INLINE void add_bytes(Ints& sum, Bytes w, Bytes x) {
  const int8x16_t a = vreinterpretq_s8_u8(uint8x16_t(w)), b = vreinterpretq_s8_u8(uint8x16_t(x));
#ifdef __ARM_FEATURE_DOTPROD
  sum = Ints(vdotq_s32(int32x4_t(sum), a, b));
#else  // two products fit 16 bits: 2 * 128 * 127
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_s8(vget_high_s8(a), vget_high_s8(b));
  sum = Ints(vpadalq_s16(int32x4_t(sum), vpaddq_s16(low, high)));
#endif
}
JAXLLM_INLINE void add_nibbles(Ints& sum, Bytes w, Bytes w2, Bytes x, Bytes x2) {
  add_bytes(sum, w, x);
  add_bytes(sum, w2, x2);
}
JAXLLM_INLINE void add_codes(Ints& sum, Bytes w, Bytes x) { add_bytes(sum, w, x); }

JAXLLM_INLINE Ints sum_quads(const Ints (&v)[4]) {
  return Ints(vpaddq_s32(vpaddq_s32(int32x4_t(v[0]), int32x4_t(v[1])), vpaddq_s32(int32x4_t(v[2]), int32x4_t(v[3]))));
}

JAXLLM_INLINE Bytes concat(const Bytes16 (&part)[1]) { return part[0]; }
JAXLLM_INLINE Bytes load_8_per_16(const void* p) {
  const uint8x8_t all = vld1_u8(static_cast<const uint8_t*>(p));
  return Bytes(vcombine_u8(all, all));
}
JAXLLM_INLINE Bytes shuffle_bytes(Bytes from, Bytes index) {
  return Bytes(vqtbl1q_u8(uint8x16_t(from), uint8x16_t(index)));
}

template <int Size, int Count>
JAXLLM_INLINE Bytes shuffle_lanes(const uint8_t* const (&from)[2], const uint8_t* const (&index)[2], int n) {
  uint8x16_t all;
  if constexpr (Size * Count == 4)
    all = vreinterpretq_u8_u32(vdupq_n_u32(load<uint32_t>(from[n / 2])));
  else if constexpr (Size * Count == 8)
    all = vcombine_u8(vld1_u8(from[n / 2]), vdup_n_u8(0));
  else
    all = vld1q_u8(from[n / 2]);
  return Bytes(vqtbl1q_u8(all, vld1q_u8(index[n / 2] + n % 2 * 16)));
}

struct Exponents {  // per index: the upper seven bits, and the lowest as the top bit of a byte
  uint8x16_t high, low;

  explicit Exponents(int base) {
    uint8_t high_bytes[16], low_bytes[16];
    for (int i = 0; i < 16; i++) {
      high_bytes[i] = uint8_t((base + i) >> 1);
      low_bytes[i] = uint8_t((base + i) << 7);
    }
    high = vld1q_u8(high_bytes);
    low = vld1q_u8(low_bytes);
  }

  JAXLLM_INLINE void decode(Bytes bytes, Bytes index, Halves& first, Halves& second) const {
    const uint8x16_t top = vdupq_n_u8(128), byte = uint8x16_t(bytes), at = uint8x16_t(index);
    const uint8x16_t h = vbslq_u8(top, byte, vqtbl1q_u8(high, at)), l = vbslq_u8(top, vqtbl1q_u8(low, at), byte);
    first = Halves(vreinterpretq_u16_u8(vzip1q_u8(l, h)));
    second = Halves(vreinterpretq_u16_u8(vzip2q_u8(l, h)));
  }
};

// Looks up both bytes of each nibble's bfloat16 value, in column order.
typedef Halves NibbleValue;
constexpr int nibble_column(int i) { return i; }

template <bool Zero, bool E2M1 = false>
struct Nibbles {  // tables of q - 8, or with a zero point of q - zero, by 15 + q - zero
  uint8x16x2_t high, low;

  Nibbles() {
    uint8_t high_bytes[32], low_bytes[32];
    for (int i = 0; i < 32; i++) {
      const float value = Zero ? float(i - 15) : nibble_value(i % 16, E2M1);
      uint32_t bits;
      memcpy(&bits, &value, 4);
      high_bytes[i] = uint8_t(bits >> 24);
      low_bytes[i] = uint8_t(bits >> 16);
    }
    for (int i = 0; i < 2; i++) {
      high.val[i] = vld1q_u8(high_bytes + 16 * i);
      low.val[i] = vld1q_u8(low_bytes + 16 * i);
    }
  }

  JAXLLM_INLINE static uint8x16_t look_up(const uint8x16x2_t& table, uint8x16_t at) {
    return Zero ? vqtbl2q_u8(table, at) : vqtbl1q_u8(table.val[0], at);
  }

  JAXLLM_INLINE void values(Bytes q, Ints zero, Halves (&out)[4]) const {
    const uint8x16_t byte = uint8x16_t(q);
    JAXLLM_UNROLL
    for (int n = 0; n < 2; n++) {
      uint8x16_t at = n ? vshrq_n_u8(byte, 4) : vandq_u8(byte, vdupq_n_u8(15));
      if (Zero) at = vaddq_u8(at, vdupq_n_u8(uint8_t(15 - zero[0])));
      const uint8x16_t l = look_up(low, at), h = look_up(high, at);
      out[2 * n] = Halves(vreinterpretq_u16_u8(vzip1q_u8(l, h)));
      out[2 * n + 1] = Halves(vreinterpretq_u16_u8(vzip2q_u8(l, h)));
    }
  }
};

struct Codebook {
  uint8x16x4_t table;
  explicit Codebook(const float* p) : table(load<uint8x16x4_t>(p)) {}
  JAXLLM_INLINE Floats lookup(Bits index) const {  // by bytes: four for each level
    return Floats(vqtbl4q_u8(table, uint8x16_t((index & 15) * 0x04040404 + 0x03020100)));
  }
};

struct Broadcast {  // a register never spans groups
  static constexpr bool kHalves = false;
  explicit Broadcast(int) {}
  JAXLLM_INLINE Floats floats(const float* p) const { return vdupq_n_f32(load<float>(p)); }
  template <int Count>
  JAXLLM_INLINE Floats strided(const uint8_t* p, int) const {
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load<uint16_t>(p))));
  }
  JAXLLM_INLINE Ints bytes(const uint8_t* p) const { return Ints(vdupq_n_s32(*p)); }
};

}  // namespace
}  // namespace jaxllm
