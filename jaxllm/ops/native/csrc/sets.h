// The instruction sets that this library contains, and those that this machine supports.
#pragma once

#include <vector>

#include "kernels.h"

namespace jaxllm {

struct Set {
  const char* name;
  const Kernels* (*kernels)();
  bool (*there)();
};

// Those that this machine supports, the best one last.
std::vector<Set> available_sets();

}  // namespace jaxllm
