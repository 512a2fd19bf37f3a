// The kernels of avx512-vnni, with AMX for many rows and for products of two matrices, and bfloat16 attention. Few rows
// are multiplied as floats: Sapphire Rapids multiplies twice as many floats a cycle as bfloat16 in pairs.
#include "attention.h"
#include "gemm.h"

namespace jaxllm {

const Kernels* avx512_vnni_kernels();

const Kernels* avx512_amx_kernels() {
  static const Kernels kernels = [] {
    Kernels all = *avx512_vnni_kernels();
    all.fold = fold;
    all.matrix_unit = {by_matrix, matrix_bytes, prepare_matrix, multiply_matrix};
    all.multiply_operands = multiply_operands;
    return all;
  }();
  return &kernels;
}

}  // namespace jaxllm
