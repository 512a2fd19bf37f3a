// The kernels of avx512-bf16, products of many rows by AMX, and those of two matrices.
#include "gemm.h"

namespace jaxllm {

const Kernels* avx512_bf16_kernels();

const Kernels* avx512_amx_kernels() {
  static const Kernels kernels = [] {
    Kernels all = *avx512_bf16_kernels();
    all.many = {by_matrix, matrix_bytes, prepare_matrix, multiply_matrix};
    all.multiply_sides = multiply_sides;
    return all;
  }();
  return &kernels;
}

}  // namespace jaxllm
