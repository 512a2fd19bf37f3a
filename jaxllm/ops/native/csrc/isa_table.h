// The instruction sets of this library.
#pragma once

#include <vector>

#include "kernels.h"

namespace jaxllm {

struct Isa {
  const char* name;
  const Kernels* (*kernels)();
  bool (*is_supported)();
};

// The sets that this machine supports, the best one last.
std::vector<Isa> available_isas();

}  // namespace jaxllm
