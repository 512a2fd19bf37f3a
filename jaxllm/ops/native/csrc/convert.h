// Conversions of numbers and scales, and scratch memory.
#pragma once

#include <cstdlib>

#include "kernels.h"
#include "vector.h"

namespace jaxllm {
namespace {

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  return load<float>(&wide);
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
  const uint32_t wide = load<uint32_t>(&value);
  if ((wide & 0x7fffffff) > 0x7f800000) return uint16_t((wide >> 16) | 64);
  return uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

inline float scalar_from_f16(uint16_t bits) {
  const Words halves = Words{} + bits;
  return from_f16(reinterpret_cast<const uint16_t*>(&halves))[0];
}

// 2^(e - 128); 0 for 0 and 1, as XLA's threads flush subnormal floats.
inline float from_exponent(uint32_t e) {
  const uint32_t bits = (e - (e > 0)) << 23;
  return load<float>(&bits);
}

inline float element(Kind kind, const void* data, int64_t i) {
  switch (kind) {
    case Kind::kBF16: return from_bf16(static_cast<const uint16_t*>(data)[i]);
    case Kind::kF16: return scalar_from_f16(static_cast<const uint16_t*>(data)[i]);
    case Kind::kInt8: return static_cast<const int8_t*>(data)[i];
    default: return load<float>(static_cast<const float*>(data) + i);
  }
}

inline bool is_sparse(const Weight& w) { return w.kind >= Kind::kSparse24F32 && w.kind <= Kind::kBitmapInt8; }

// The kind of a sparse weight's numbers; other kinds unchanged.
inline Kind dense_kind(Kind kind) {
  switch (kind) {
    case Kind::kSparse24F32:
    case Kind::kBitmapF32: return Kind::kF32;
    case Kind::kSparse24BF16:
    case Kind::kBitmapBF16: return Kind::kBF16;
    case Kind::kSparse24Int8:
    case Kind::kBitmapInt8: return Kind::kInt8;
    default: return kind;
  }
}

inline int64_t number_bytes(Kind dense) { return dense == Kind::kF32 ? 4 : (dense == Kind::kInt8 ? 1 : 2); }

inline bool is_integer(const Weight& w) { return dense_kind(w.kind) == Kind::kInt8 || w.kind == Kind::kInt4; }

// Bytes of a block: a scale and 32 integers.
constexpr int block_bytes(int bits) { return 2 + 4 * bits; }

// Q4_K, Q5_K and Q6_K.
inline bool is_k_quant(const Weight& w) { return w.kind >= Kind::kQ4K; }
constexpr int superblock_bytes(Kind kind) { return kind == Kind::kQ4K ? 144 : (kind == Kind::kQ5K ? 176 : 210); }

inline float group_scale(const Weight& w, int64_t i) {
  if (w.scale_codebook)  // rounded once, as a sum near zero would keep few bits of a rounded product
    return __builtin_fmaf(w.scale_codebook[static_cast<const uint8_t*>(w.scale)[i]], w.factor[i >> 8], *w.mean);
  if (w.blocks) return element(Kind::kF16, w.data + i * block_bytes(w.kind == Kind::kInt4 ? 4 : 8), 0);
  if (w.e2m1) return from_exponent(static_cast<const uint8_t*>(w.scale)[i]);
  return element(w.half ? Kind::kF16 : Kind::kF32, w.scale, i);
}

// from_exponent of each lane.
JAXLLM_INLINE Floats from_exponents(Ints e) { return Floats((e + (e > 0)) << 23); }

constexpr int64_t kScalesAtOnce = 64;  // scales that are converted at once

// A register of floats from an array of any kind.
JAXLLM_INLINE Floats load_floats(Kind kind, const void* data, int64_t i) {
  switch (kind) {
    case Kind::kBF16: return from_bf16(static_cast<const uint16_t*>(data) + i);
    case Kind::kF16: return from_f16(static_cast<const uint16_t*>(data) + i);
    case Kind::kInt8: return from_int8(static_cast<const int8_t*>(data) + i);
    default: return load<Floats>(static_cast<const float*>(data) + i);
  }
}

// Converts `count` numbers to floats.
inline void to_floats(Kind kind, const void* data, int64_t at, int64_t count, float* out) {
  const int64_t vector_end = count / kLanes * kLanes;
  for (int64_t i = 0; i < vector_end; i += kLanes) store(out + i, load_floats(kind, data, at + i));
  for (int64_t i = vector_end; i < count; i++) out[i] = element(kind, data, at + i);
}

// Converts the scales of `rows` rows from row o on; not exponents.
inline void load_scales(const Weight& w, int64_t o, int64_t rows, float* out) {
  const int64_t first = o * w.groups, count = rows * w.groups, bytes = block_bytes(w.kind == Kind::kInt4 ? 4 : 8);
  for (int64_t i = 0; i < count && w.scale_codebook; i++) out[i] = group_scale(w, first + i);
  if (w.scale_codebook) return;
  if (!w.blocks) return to_floats(w.half ? Kind::kF16 : Kind::kF32, w.scale, first, count, out);
  for (int64_t i = 0; i < count; i += kScalesAtOnce) {
    const int64_t n = count - i < kScalesAtOnce ? count - i : kScalesAtOnce;
    uint16_t halves[kScalesAtOnce];
    for (int64_t j = 0; j < n; j++) halves[j] = load<uint16_t>(w.data + (first + i + j) * bytes);
    to_floats(Kind::kF16, halves, 0, n, out + i);
  }
}

// A register of a row's codes from column c on, a multiple of the register's columns or of 32.
template <int Bits, bool Blocks>
JAXLLM_INLINE Bytes load_codes(const uint8_t* row, int64_t c) {
  if constexpr (!Blocks) return load<Bytes>(row + c * Bits / 8);
  constexpr int kColumns = 128 / Bits;  // of sixteen bytes
  const uint8_t* from = row + (c >> 5) * block_bytes(Bits) + 2 + (kBytes * 8 / Bits < 32 ? c % 32 : 0);
  Bytes16 part[kBytes / 16];
  JAXLLM_UNROLL
  for (int i = 0; i < kBytes / 16; i++) {
    const int at = i * kColumns;
    part[i] = load<Bytes16>(from + at / 32 * block_bytes(Bits) + at % 32 * Bits / 8);
  }
  return concat(part);
}

// Stores floats as floats or bfloat16.
inline void store_floats(const float* x, int64_t count, bool bf16, void* out, int64_t at) {
  if (!bf16) {
    if (count) memcpy(static_cast<float*>(out) + at, x, 4 * count);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out) + at;
  const int64_t vector_end = count / kLanes * kLanes;
  for (int64_t i = 0; i < vector_end; i += kLanes) store_bf16(to + i, load<Floats>(x + i));
  for (int64_t i = vector_end; i < count; i++) to[i] = to_bf16(x[i]);
}

// Scratch memory of a thread, one for each `Tag`, kept between calls; it only grows.
template <class Tag>
uint8_t* thread_scratch(size_t bytes) {
  struct Buffer {
    uint8_t* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.size < bytes || !buffer.data) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096 + 4096;
    buffer.data = static_cast<uint8_t*>(std::aligned_alloc(64, buffer.size));
    if (!buffer.data) std::abort();
  }
  return buffer.data;
}

}  // namespace
}  // namespace jaxllm
