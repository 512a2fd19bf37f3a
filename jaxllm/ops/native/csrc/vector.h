// The vector layer: some thirty operations on vectors. The kernels are written over them once, and compiled for each
// instruction set over that set's layer.
//
// To add an instruction set
//
// 1. Write layers/NAME.h. It defines
//      JAXLLM_LANES(N)        32-bit lanes of a register, and so the types Floats, Ints, Bits (N lanes), Halves (2 N
//                             bfloat16 numbers, as bits) and Bytes (4 N);
//      kRegisters             number of registers, which limits tiles;
//    and operations that C++ arithmetic on vectors (lanes.h) lacks:
//      fma(a, b, c)           a b + c, rounded once if the set can;
//      max(a, b), reduce_max(v), reduce_add(v)   additions in a fixed order; reduce_add4(v[4], out) is four at once;
//      from_f16(p), from_int8(p)          N numbers, in order, as Floats;
//      kOffset                offset of weights for add_bytes: 128 if it takes them unsigned (VNNI), else 0;
//      add_bytes(sum, w, x)   dot products of four neighbors, added to their lane: w (-128 to 127) with the offset, x
//                             signed (-127 to 127);
//      add_nibbles(sum, w, w2, x, x2)   the same for w and w2 from 0 to 15, both pairs;
//      add_codes(sum, w, x)   the same for w from 0 to 63, without offset;
//      sum_quads(v[4])        lane 4 l + k is the sum of the four lanes of v[k] from 4 l on;
//      kDigitRows             up to how many bfloat16 rows multiply int4 by digits (int4_exact.h); 0: none. Without
//                             offset, digit_products(codes, digit) is the weighted sum of codes times digits;
//      Exponents(base).decode(byte, index, first, second)   bfloat16 from 12 bits: sign and mantissa in `byte`, the
//                             exponent base + index; of the lower, then the upper eight bytes of each 16;
//      Nibbles<Zero, E2M1>().values(q, zero, out)   the 8 N numbers q - 8, q - zero or kLevels[q] of 4 N bytes:
//      NibbleValue[4] of
//                             Halves or [8] of Floats, where number i is column nibble_column(i) of 128. Lane l of each
//                             register must be of the same 32 columns as byte 4 l; if kDigitRows is not 0, of bytes 4 l
//                             to 4 l + 3;
//      Codebook(p).lookup(index)   of 16 floats from p on, those that the lowest four bits of each lane select;
//      Broadcast(count)       .floats(p), .bytes(p), if kHalves .halves(p): `count` numbers (1, 2 or 4; no more than
//                             the 32 columns of a register of nibbles), each repeated over its share of lanes;
//                             .strided<Count>(p, bytes), `count` halves at that distance;
//      concat(part[N / 4])    a register from N / 4 times sixteen bytes;
//      load_8_per_16(p)       2 N bytes from p on, eight in the lower half of each sixteen;
//      shuffle_bytes(from, index)   byte index[i] (0 to 15) of the same sixteen of `from`; 0 for indices from 128 on;
//      shuffle_lanes<Size, Count>(from, index, n)   register n of 16 lanes: for i of 0 and 1, Count numbers of Size
//                             bytes at from[i], shuffled to eight lanes by index[i] (LaneShuffles of sparse.h; with
//                             N = 16 and Count 4 all are at from[0]);
//    If it has an instruction that expands numbers to the lanes of a mask, it defines JAXLLM_EXPAND, and
//      has_expand(bytes)      whether this processor can for numbers of that size;
//      expand(p, half, bits)  numbers from p on (for half or a full register), uint32_t, uint16_t or uint8_t, in order
//                             where a bit is set, else 0.
//    and JAXLLM_EXPAND_HALVES if most of its processors can for 16 bits: then all of them add sparse bfloat16 in the
//    order of halves.
//    If it selects floats by four bits of each lane, JAXLLM_SCALES_NIBBLES and scaled_nibbles: 64 columns of Q4_K.
//    If it has dot products of bfloat16 pairs, it defines JAXLLM_PAIRS, and
//      add_pairs(sum, a, b)   the products of both halves added to each lane;
//      transpose(in, out, stride), interleave(a, b, first, second)   N by N lanes; alternating 16-bit numbers.
//    If lanes can hold rows of weights (int8_blocks.h), it defines JAXLLM_ROWS_IN_LANES, and
//      add_word(sum, w, x)    as add_bytes, with the four numbers at x for all lanes;
//      words_of_rows(row[N], out)   register k has word k (four bytes) of each row, of row_of_lane(i) in lane i.
//    Optional CPU features are #ifdefs in the layer, which is compiled for each set.
// 2. Add it to CMakeLists.txt, with compiler flags. A set with a matrix unit (layers/amx.h) uses the kernels of another
//    set, and matrix_unit.h for many rows.
// 3. Add it to isa_table.cc, with a test for its CPU features, and to INSTRUCTION_SETS in
//    jaxllm/ops/native/__init__.py.
//
// Sets may add in different orders: the last bits of an output differ between sets (jaxllm/ops/native/__init__.py says
// how much), but within a set they depend on the output's own rows only. Do not call function templates of the standard
// library here: the linker keeps one copy for all sets, which may use instructions that the processor lacks.
#pragma once

#ifndef JAXLLM_LAYER
#define JAXLLM_LAYER "layers/portable.h"
#endif
#include JAXLLM_LAYER

#include <cmath>

namespace jaxllm {
namespace {

constexpr int kHalves = 2 * kLanes, kBytes = 4 * kLanes;  // of a register

template <bool>
struct FloatsOrHalves {
  typedef Floats Type;
};
template <>
struct FloatsOrHalves<true> {
  typedef Halves Type;
};

JAXLLM_INLINE Floats splat(float value) { return value - Floats{}; }

// Two bfloat16 numbers per lane: the first and the second of each.
JAXLLM_INLINE Floats even(Halves v) { return Floats(Bits(v) << 16); }
JAXLLM_INLINE Floats odd(Halves v) { return Floats(Bits(v) & 0xffff0000u); }

// Floats rounded to bfloat16: the first and the second of each lane.
JAXLLM_INLINE Halves narrow(Floats first, Floats second) { return Halves(Bits(first) >> 16 | Bits(second)); }

// In order.
JAXLLM_INLINE Floats from_bf16(const uint16_t* p) {
  return Floats(__builtin_convertvector(load<Words>(p), Bits) << 16);
}

// To nearest, ties to even; NaN stays NaN.
JAXLLM_INLINE void store_bf16(uint16_t* to, Floats v) {
  const Bits wide = Bits(v), rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  const Bits bits = (wide & 0x7fffffff) > 0x7f800000u ? (wide >> 16 | 64) : rounded;
  store(to, __builtin_convertvector(bits, Words));
}

// To nearest, ties to even, where |v| < 2^22.
JAXLLM_INLINE Floats round_nearest(Floats v) { return (v + 12582912.0f) - 12582912.0f; }

JAXLLM_INLINE Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }
JAXLLM_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
// Whether any lane is all ones; the others are zeros.
JAXLLM_INLINE bool any_of(Bits v) { return reduce_max(Floats(v & 0x3f800000u)) > 0; }
JAXLLM_INLINE Floats magnitude(Floats v) { return Floats(Bits(v) & 0x7fffffffu); }

#ifdef JAXLLM_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
JAXLLM_INLINE void add_pairs(Floats& sum, Halves a, Halves b) { sum = fma(odd(a), odd(b), fma(even(a), even(b), sum)); }
#endif

#ifdef JAXLLM_ROWS_IN_LANES
constexpr bool kRowsInLanes = true;
#else
constexpr bool kRowsInLanes = false;
#endif

// exp as 2^n times a polynomial of degree 6 (Cephes' expf), for arguments up to 0; 0 below -87. NaN gives anything.
JAXLLM_INLINE Floats exp_of(Floats x) {
  const Ints in_range = x >= -87.0f;
  x = Floats(Ints(x) & in_range);
  const Floats n = round_nearest(x * 1.44269504f);
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  const Floats power = Floats(Bits(to_ints(n) + 127) << 23);
  return Floats(Ints(p * power) & in_range);
}

// tanh as a polynomial below 0.625, above with exp (Cephes' tanhf), within two units in the last place. NaN stays NaN.
JAXLLM_INLINE Floats tanh_of(Floats x) {
  const Floats size = magnitude(x), e = exp_of(size * -2.0f), z = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const Floats near = fma(p * z, x, x), far = (1.0f - e) / (1.0f + e);
  return size > 0.625f ? Floats(Bits(far) | (Bits(x) & 0x80000000u)) : near;
}

}  // namespace
}  // namespace jaxllm
