// Conversions of single numbers, and thread-local memory.
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
  const Words some = Words{} + bits;
  return from_f16(reinterpret_cast<const uint16_t*>(&some))[0];
}

inline float element(Kind kind, const void* data, int64_t i) {
  switch (kind) {
    case Kind::kBF16: return from_bf16(static_cast<const uint16_t*>(data)[i]);
    case Kind::kF16: return scalar_from_f16(static_cast<const uint16_t*>(data)[i]);
    case Kind::kInt8: return static_cast<const int8_t*>(data)[i];
    default: return load<float>(static_cast<const float*>(data) + i);
  }
}

inline bool sparse(const Weight& w) { return w.kind >= Kind::kSparse24F32 && w.kind <= Kind::kBitmapInt8; }

// The type of a sparse kind's numbers; other kinds unchanged.
inline Kind dense_of(Kind kind) {
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

inline bool integers(const Weight& w) { return dense_of(w.kind) == Kind::kInt8 || w.kind == Kind::kInt4; }

// Bytes of a block: a scale and 32 integers.
constexpr int block_bytes(int bits) { return 2 + 4 * bits; }

// Blocks of 256 columns.
inline bool super(const Weight& w) { return w.kind >= Kind::kQ4K; }
constexpr int super_bytes(Kind kind) { return kind == Kind::kQ4K ? 144 : (kind == Kind::kQ5K ? 176 : 210); }

inline float scale_at(const Weight& w, int64_t i) {
  if (w.levels8)  // rounded once, as a sum near zero would keep few bits of a rounded product
    return __builtin_fmaf(w.levels8[static_cast<const uint8_t*>(w.scale)[i]], w.factor[i >> 8], *w.mean);
  if (w.blocks) return element(Kind::kF16, w.data + i * block_bytes(w.kind == Kind::kInt4 ? 4 : 8), 0);
  return element(w.half ? Kind::kF16 : Kind::kF32, w.scale, i);
}

constexpr int64_t kGathered = 64;  // scales that are converted at once

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// N floats from any kind that is an array of numbers.
JAXLLM_INLINE Floats floats_at(Kind kind, const void* data, int64_t i) {
  switch (kind) {
    case Kind::kBF16: return from_bf16(static_cast<const uint16_t*>(data) + i);
    case Kind::kF16: return from_f16(static_cast<const uint16_t*>(data) + i);
    case Kind::kInt8: return from_int8(static_cast<const int8_t*>(data) + i);
    default: return load<Floats>(static_cast<const float*>(data) + i);
  }
}

// `count` of them to floats.
inline void to_floats(Kind kind, const void* data, int64_t at, int64_t count, float* out) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, floats_at(kind, data, at + i));
  for (int64_t i = whole; i < count; i++) out[i] = element(kind, data, at + i);
}

// The scales of the groups of `rows` rows from row o on.
inline void scales_of(const Weight& w, int64_t o, int64_t rows, float* out) {
  const int64_t first = o * w.groups, count = rows * w.groups, bytes = block_bytes(w.kind == Kind::kInt4 ? 4 : 8);
  for (int64_t i = 0; i < count && w.levels8; i++) out[i] = scale_at(w, first + i);
  if (w.levels8) return;
  if (!w.blocks) return to_floats(w.half ? Kind::kF16 : Kind::kF32, w.scale, first, count, out);
  for (int64_t i = 0; i < count; i += kGathered) {
    const int64_t some = count - i < kGathered ? count - i : kGathered;
    uint16_t halves[kGathered];
    for (int64_t j = 0; j < some; j++) halves[j] = load<uint16_t>(w.data + (first + i + j) * bytes);
    to_floats(Kind::kF16, halves, 0, some, out + i);
  }
}

// A register of a row's codes of so many bits, from column c on, a multiple of the register's or of 32.
template <int Bits, bool Blocks>
JAXLLM_INLINE Bytes codes_at(const uint8_t* row, int64_t c) {
  if constexpr (!Blocks) return load<Bytes>(row + c * Bits / 8);
  constexpr int kColumns = 128 / Bits;  // of sixteen bytes
  const uint8_t* from = row + (c >> 5) * block_bytes(Bits) + 2 + (kBytes * 8 / Bits < 32 ? c % 32 : 0);
  Sixteen part[kBytes / 16];
  JAXLLM_UNROLL
  for (int i = 0; i < kBytes / 16; i++) {
    const int at = i * kColumns;
    part[i] = load<Sixteen>(from + at / 32 * block_bytes(Bits) + at % 32 * Bits / 8);
  }
  return joined(part);
}

// Floats to floats or bfloat16.
inline void put_floats(const float* x, int64_t count, bool bf16, void* out, int64_t at) {
  if (!bf16) {
    if (count) memcpy(static_cast<float*>(out) + at, x, 4 * count);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out) + at;
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store_bf16(to + i, load<Floats>(x + i));
  for (int64_t i = whole; i < count; i++) to[i] = to_bf16(x[i]);
}

// Memory that a thread keeps between calls; its size only grows. One of each `Use`.
template <class Use>
uint8_t* space(size_t bytes) {
  struct Kept {
    uint8_t* data = nullptr;
    size_t size = 0;
    ~Kept() { std::free(data); }
  };
  thread_local Kept kept;
  if (kept.size < bytes || !kept.data) {
    std::free(kept.data);
    kept.size = (bytes + 4095) / 4096 * 4096 + 4096;
    kept.data = static_cast<uint8_t*>(std::aligned_alloc(64, kept.size));
    if (!kept.data) std::abort();
  }
  return kept.data;
}

}  // namespace
}  // namespace jaxllm
