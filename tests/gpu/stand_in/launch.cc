// A variant of kernel.cu as a function, for ctypes. The variant's macros come before.
#include <cfenv>

#include "kernel.cu"

namespace {
Product given;
using Memory = Layout<JAXLLM_FORMAT, JAXLLM_EPILOGUE, JAXLLM_CLUSTER, JAXLLM_TILES, JAXLLM_STAGES>;
}  // namespace

extern "C" int shared_bytes(int rows, int columns) { return Memory::bytes(rows, columns); }

// Run the kernel and return the first mistake, or null.
extern "C" const char* launch(const Product* product, int grid, int shared, unsigned seed,
                              const stand_in::Array* arrays, int array_count) {
  given = *product;
  stand_in::arrays = arrays;
  stand_in::array_count = array_count;
  // XLA's threads take subnormal numbers as 0, which a GPU does not.
  std::fenv_t environment;
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  const char* mistake =
      stand_in::launch(grid, JAXLLM_CLUSTER, shared, seed, [] { jaxllm_product(given); });
  std::fesetenv(&environment);
  return mistake;
}
