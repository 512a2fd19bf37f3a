// The kernels of avx512-vnni, products of many rows and of two matrices by AMX, and attention by pairs of bfloat16. Few
// rows are multiplied as floats: Sapphire Rapids multiplies twice as many of them a cycle as numbers in pairs.
#include "attention.h"
#include "gemm.h"

namespace jaxllm {

const Kernels* avx512_vnni_kernels();

const Kernels* avx512_amx_kernels() {
  static const Kernels kernels = [] {
    Kernels all = *avx512_vnni_kernels();
    all.fold = fold;
    all.many = {by_matrix, matrix_bytes, prepare_matrix, multiply_matrix};
    all.multiply_sides = multiply_sides;
    return all;
  }();
  return &kernels;
}

}  // namespace jaxllm
