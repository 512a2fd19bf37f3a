// The kernels of one instruction set: compiled once for each, with its flags, its layer and its name.
#include "attention.h"
#include "inputs.h"
#include "row_sums.h"

#ifndef JAXLLM_SET
#define JAXLLM_SET portable
#endif
#define JAXLLM_JOIN(a, b) a##b
#define JAXLLM_NAMED(a, b) JAXLLM_JOIN(a, b)

namespace jaxllm {
namespace {

void multiply(const Weight& w, const Input& in, const void* prepared, int64_t begin, int64_t end, float* y) {
  const uint8_t* x = static_cast<const uint8_t*>(prepared);
  const auto either = [&](auto by_pairs, auto by_floats) {
    if constexpr (kPairs) {
      if (pairs(w, in)) return by_pairs(w, in, x, begin, end, y);
    }
    by_floats(w, in, x, begin, end, y);
  };
  if (sparse(w)) return multiply_sparse(w, in, x, begin, end, y);
  switch (w.kind) {
    case Kind::kF32: return multiply_floats<Kind::kF32, false>(w, in, x, begin, end, y);
    case Kind::kF16: return multiply_floats<Kind::kF16, false>(w, in, x, begin, end, y);
    case Kind::kBF16: return either(multiply_floats<Kind::kBF16, kPairs>, multiply_floats<Kind::kBF16, false>);
    case Kind::kPacked: return either(multiply_packed<kPairs>, multiply_packed<false>);
    case Kind::kNF4: return multiply_levels(w, in, x, begin, end, y);
    case Kind::kQ4K: return multiply_super<Kind::kQ4K>(w, in, x, begin, end, y);
    case Kind::kQ5K: return multiply_super<Kind::kQ5K>(w, in, x, begin, end, y);
    case Kind::kQ6K: return multiply_super<Kind::kQ6K>(w, in, x, begin, end, y);
    default:
      if (in.rounded) return multiply_rounded(w, in, x, begin, end, y);
      return either(multiply_exact<kPairs>, multiply_exact<false>);
  }
}

void widen_any(const Weight& w, int64_t begin, int64_t end, bool bf16, void* out) {
  if (!sparse(w)) return widen(w, begin, end, bf16, out);
  by_blocks(w, begin, end, 4, [&](const Weight& rows, int64_t o, int64_t count) {
    widen(rows, 0, count, bf16, static_cast<uint8_t*>(out) + o * w.columns * (bf16 ? 2 : 4));
  });
}

bool always(const Weight&, const Input&) { return true; }

}  // namespace

const Kernels* JAXLLM_NAMED(JAXLLM_SET, _kernels)() {
  static constexpr Kernels kernels = {{always, prepared_bytes, prepare, multiply},
                                      widen_any,
                                      state_bytes,
                                      fold,
                                      merge,
                                      put,
                                      sum_rows,
                                      logsumexp_rows,
                                      softmax_rows,
                                      normalize,
                                      {},
                                      nullptr};
  return &kernels;
}

}  // namespace jaxllm
