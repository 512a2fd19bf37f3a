// Common to every layer: vectors of N lanes as extensions of GCC and clang, with lane-wise C++ arithmetic.
#pragma once

#include <cstdint>
#include <cstring>

#define JAXLLM_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define JAXLLM_UNROLL _Pragma("unroll")
#else
#define JAXLLM_UNROLL _Pragma("GCC unroll 32")
#endif

// Floats, Ints, Bits: N lanes of 32 bits; Halves: 2 N bfloat16 numbers as bits; Bytes: 4 N bytes.
#define JAXLLM_LANES(N)                                        \
  constexpr int kLanes = N;                                    \
  typedef float Floats __attribute__((vector_size(4 * N)));    \
  typedef int32_t Ints __attribute__((vector_size(4 * N)));    \
  typedef uint32_t Bits __attribute__((vector_size(4 * N)));   \
  typedef uint16_t Halves __attribute__((vector_size(4 * N))); \
  typedef int16_t Shorts __attribute__((vector_size(4 * N)));  \
  typedef uint8_t Bytes __attribute__((vector_size(4 * N)));   \
  typedef uint16_t Words __attribute__((vector_size(2 * N)));  \
  typedef int8_t Signed __attribute__((vector_size(N)))

typedef uint8_t Bytes16 __attribute__((vector_size(16)));  // bytes, of any layer
typedef uint64_t U64x2 __attribute__((vector_size(16)));

namespace jaxllm {
namespace {

// The 4-bit floats e2m1, doubled; their scales are halved: 2^(e - 128).
constexpr int8_t kLevels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr float nibble_value(int code, bool e2m1) { return float(e2m1 ? kLevels[code] : code - 8); }

template <class V>
JAXLLM_INLINE V load(const void* from) {  // from any address
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
JAXLLM_INLINE void store(void* to, const V& v) {
  memcpy(to, &v, sizeof v);
}

}  // namespace
}  // namespace jaxllm
