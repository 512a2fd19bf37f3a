// The kernels of one instruction set, compiled for each set with its flags, layer and name.
#include "attention.h"
#include "prepare_input.h"
#include "row_reductions.h"

#ifndef JAXLLM_SET
#define JAXLLM_SET portable
#endif
#define JAXLLM_JOIN(a, b) a##b
#define JAXLLM_NAMED(a, b) JAXLLM_JOIN(a, b)

namespace jaxllm {
namespace {

void multiply(const Weight& w, const Input& in, const void* prepared, int64_t begin, int64_t end, float* y) {
  const uint8_t* x = static_cast<const uint8_t*>(prepared);
  const auto dispatch_pairs = [&](auto by_pairs, auto by_floats) {
    if constexpr (kPairs) {
      if (uses_bf16_pairs(w, in)) return by_pairs(w, in, x, begin, end, y);
    }
    by_floats(w, in, x, begin, end, y);
  };
  if (is_sparse(w)) return multiply_sparse(w, in, x, begin, end, y);
  switch (w.kind) {
    case Kind::kF32: return multiply_floats<Kind::kF32, false>(w, in, x, begin, end, y);
    case Kind::kF16: return multiply_floats<Kind::kF16, false>(w, in, x, begin, end, y);
    case Kind::kBF16: return dispatch_pairs(multiply_floats<Kind::kBF16, kPairs>, multiply_floats<Kind::kBF16, false>);
    case Kind::kPackedBF16: return dispatch_pairs(multiply_packed<kPairs>, multiply_packed<false>);
    case Kind::kNF4: return multiply_nf4(w, in, x, begin, end, y);
    case Kind::kQ4K: return multiply_k_quant<Kind::kQ4K>(w, in, x, begin, end, y);
    case Kind::kQ5K: return multiply_k_quant<Kind::kQ5K>(w, in, x, begin, end, y);
    case Kind::kQ6K: return multiply_k_quant<Kind::kQ6K>(w, in, x, begin, end, y);
    default:
      if (in.quantize) return multiply_rounded(w, in, x, begin, end, y);
      return dispatch_pairs(multiply_exact<kPairs>, multiply_exact<false>);
  }
}

void dequantize_any(const Weight& w, int64_t begin, int64_t end, bool bf16, void* out) {
  if (!is_sparse(w)) return dequantize(w, begin, end, bf16, out);
  for_each_decoded(w, begin, end, 4, [&](const Weight& rows, int64_t o, int64_t count) {
    dequantize(rows, 0, count, bf16, static_cast<uint8_t*>(out) + o * w.columns * (bf16 ? 2 : 4));
  });
}

bool always(const Weight&, const Input&) { return true; }

}  // namespace

const Kernels* JAXLLM_NAMED(JAXLLM_SET, _kernels)() {
  static constexpr Products products = {always, prepared_bytes, prepare, multiply};
  static constexpr Kernels kernels = {products, dequantize_any, state_bytes,  fold,      merge,      store_output,
                                      sum_rows, logsumexp_rows, softmax_rows, normalize, Products(), nullptr};
  return &kernels;
}

}  // namespace jaxllm
