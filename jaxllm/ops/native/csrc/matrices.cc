// The kernels of avx512-bf16, and products of many rows by AMX.
#include "matrices.h"

namespace jaxllm {

const Kernels* avx512_bf16_kernels();

const Kernels* avx512_amx_kernels() {
  static const Kernels kernels = [] {
    Kernels all = *avx512_bf16_kernels();
    all.many = {by_matrix, matrix_bytes, prepare_matrix, multiply_matrix};
    return all;
  }();
  return &kernels;
}

}  // namespace jaxllm
