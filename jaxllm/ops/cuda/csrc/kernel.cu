// One kernel, whose variant the compiler's macros name. launch.py has those of a product.
#include "product.h"

using namespace jaxllm;

KERNEL(THREADS, JAXLLM_TILES <= 2 ? 2 : 1)
jaxllm_product(const Product product) {
  run<JAXLLM_FORMAT, JAXLLM_PROLOGUE, JAXLLM_EPILOGUE, JAXLLM_CLUSTER, JAXLLM_TILES, JAXLLM_STAGES,
      JAXLLM_EARLY>(product);
}
