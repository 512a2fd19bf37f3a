// The vector layer: what the kernels are written over, some thirty operations on vectors. Each kernel is
// written once, and compiled for each instruction set over that set's layer.
//
// To add an instruction set
//
// 1. Write layers/NAME.h. It defines
//      JAXLLM_LANES(N)        how many 32-bit lanes a register has, which makes the types Floats, Ints, Bits
//                             (N lanes), Halves (2 N bfloat16 numbers, as bits) and Bytes (4 N);
//      kRegisters             how many of them there are: how large tiles may be;
//    and operations that C++ arithmetic on vectors (lanes.h) lacks:
//      fma(a, b, c)           a b + c, rounded once if the set can;
//      larger(a, b), largest(v), sum(v)   a fixed order of additions; sums(v[4], out) is four at once;
//      from_f16(p), from_int8(p)          N numbers, in order, as Floats;
//      kOffset                offset of signed weights for add_bytes: 128 if it takes them unsigned (VNNI),
//                             else 0;
//      add_bytes(sum, w, x)   products of 8-bit numbers, w (-128 to 127) with that offset and x signed (-127 to
//                             127), those of four neighbors added to their lane;
//      add_nibbles(sum, w, w2, x, x2) the same for w and w2 from 0 to 15, both pairs;
//      add_codes(sum, w, x)   the same for w from 0 to 63, without offset;
//      sums_of_sixteens(v[4]) lane 4 l + k is the sum of the four lanes from 4 l on of v[k];
//      kDigitRows             up to how many bfloat16 rows multiply four bits by digits (digits.h); 0: none. Without
//                             offset, digit_products(codes, digit) is the sum of codes times their digits, weighted;
//      Exponents(base).join(byte, index, first, second)   bfloat16 from 12 bits: sign and mantissa in `byte`, the
//                             exponent base + index; put together from the lower and the upper eight bytes of
//                             each 16;
//      Nibbles<Zero>().values(q, zero, out)   the 8 N numbers q - 8, or q - zero, of 4 N bytes: NibbleValue[4] of
//                             Halves or [8] of Floats, in the order nibble_column(i), the column (of 128) of the
//                             i-th number; any order in which lane l of each register is of columns of the same
//                             32 as byte 4 l; if kDigitRows is not 0, of those of bytes 4 l to 4 l + 3;
//      Levels(p).at(index)    of 16 floats from p on, the one that the lowest four bits of each lane select; its
//                             other bits may be anything;
//      Spread(count)          .floats(p), .bytes(p), if kHalves .halves(p): `count` neighbors (1, 2 or 4; no more
//                             than the 32 columns of a register of nibbles), each repeated over its share of lanes;
//                             .apart<Count>(p, bytes), `count` halves at that distance, likewise;
//      joined(part[N / 4])    a register from N / 4 times sixteen bytes;
//      eights(p)              2 N bytes from p on, eight of them to the lower half of each sixteen;
//      picked(from, place)    for each byte, byte `place` (0 to 15) of the same sixteen of `from`; 0 from 128 on;
//      expanded<Size, Count>(from, place, n)   register n of 16 lanes, those of two bytes of bits. Each has Count
//      numbers
//                             of Size bytes, at from[0] and from[1], and for each byte of its eight lanes a place among
//                             them (LanePlaces of sparse.h; sets of 16 lanes take the second table for from[1] if Count
//                             is 4);
//    If it can expand numbers into the lanes of a register whose bits are set, it defines JAXLLM_SPREADS, and
//      spreads(bytes)         whether this processor can for numbers of that size;
//      spread(p, half, bits)  the numbers from p on (for half or a full register), uint32_t, uint16_t or uint8_t, in
//                             order where a bit is set, else 0.
//    and JAXLLM_SPREADS_HALVES if most of its processors can for 16 bits: then all of them add sparse bfloat16 in the
//    order of halves.
//    If it selects floats by four bits of each lane, JAXLLM_SCALES_NIBBLES and scaled_nibbles: 64 columns of Q4_K.
//    If it has products of bfloat16 pairs, it defines JAXLLM_PAIRS, and
//      add_pairs(sum, a, b)   a b of two neighbors added to each lane;
//      transpose(in, out, stride), interleave(a, b, first, second)   N by N lanes; alternating 16-bit numbers.
//    Optional CPU features are #ifdefs in the layer, which is compiled for each set.
// 2. Add it to CMakeLists.txt, with compiler flags. A set with a matrix unit (layers/amx.h) uses the kernels of another
//    set, and matrices.h for many rows.
// 3. Add it to sets.cc, with a test for its CPU features, and to INSTRUCTION_SETS in
//    jaxllm/ops/native/__init__.py.
//
// Sets may round in different orders: an output's last bits differ between sets (see jaxllm/ops/native/__init__.py for
// how much), but within one they depend only on the output's own rows. Do not call function templates of the standard
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

JAXLLM_INLINE Floats all_of(float value) { return value - Floats{}; }

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
JAXLLM_INLINE Floats nearest(Floats v) { return (v + 12582912.0f) - 12582912.0f; }

JAXLLM_INLINE Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }
JAXLLM_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
// Whether any lane is all ones; the others are zeros.
JAXLLM_INLINE bool any_of(Bits v) { return largest(Floats(v & 0x3f800000u)) > 0; }
JAXLLM_INLINE Floats magnitude(Floats v) { return Floats(Bits(v) & 0x7fffffffu); }

#ifdef JAXLLM_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
JAXLLM_INLINE void add_pairs(Floats& sum, Halves a, Halves b) { sum = fma(odd(a), odd(b), fma(even(a), even(b), sum)); }
#endif

// exp as 2^n times a polynomial of degree 6 (Cephes' expf), for arguments up to 0; 0 below -87. NaN gives anything.
JAXLLM_INLINE Floats exp_of(Floats x) {
  const Ints kept = x >= -87.0f;
  x = Floats(Ints(x) & kept);
  const Floats n = nearest(x * 1.44269504f);
  Floats r = fma(n, all_of(-0.693359375f), x);
  r = fma(n, all_of(2.12194440e-4f), r);
  Floats p = all_of(1.9875691500e-4f);
  p = fma(p, r, all_of(1.3981999507e-3f));
  p = fma(p, r, all_of(8.3334519073e-3f));
  p = fma(p, r, all_of(4.1665795894e-2f));
  p = fma(p, r, all_of(1.6666665459e-1f));
  p = fma(p, r, all_of(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  const Floats power = Floats(Bits(to_ints(n) + 127) << 23);
  return Floats(Ints(p * power) & kept);
}

// tanh as a polynomial below 0.625, above with exp (Cephes' tanhf), within two units in the last place. NaN stays NaN.
JAXLLM_INLINE Floats tanh_of(Floats x) {
  const Floats size = magnitude(x), e = exp_of(size * -2.0f), z = x * x;
  Floats p = all_of(-5.70498872745e-3f);
  p = fma(p, z, all_of(2.06390887954e-2f));
  p = fma(p, z, all_of(-5.37397155531e-2f));
  p = fma(p, z, all_of(1.33314422036e-1f));
  p = fma(p, z, all_of(-3.33332819422e-1f));
  const Floats near = fma(p * z, x, x), far = (1.0f - e) / (1.0f + e);
  return size > 0.625f ? Floats(Bits(far) | (Bits(x) & 0x80000000u)) : near;
}

}  // namespace
}  // namespace jaxllm
