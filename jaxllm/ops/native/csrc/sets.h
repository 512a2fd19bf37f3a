// Which instruction sets this library holds, and which of them this machine has.
#pragma once

#include <vector>

#include "kernels.h"

namespace jaxllm {

struct Set {
  const char* name;
  const Kernels* (*kernels)();
  bool (*there)();
};

// Those that this machine has, the best one last.
std::vector<Set> available_sets();

}  // namespace jaxllm
