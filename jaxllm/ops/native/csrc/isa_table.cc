// The table of instruction sets. Each CPU feature is tested separately.
#include "isa_table.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jaxllm {

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx2_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* avx512_amx_kernels();
const Kernels* neon_kernels();
const Kernels* neon_dot_kernels();
const Kernels* neon_bf16_kernels();

namespace {

[[maybe_unused]] bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"); }

// Linux lets a process use the tile registers after a request (arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool has_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  return has_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") && !syscall(SYS_arch_prctl, 0x1023, 18);
#else
  return false;
#endif
}
#elif defined(__aarch64__)
// `bit`: in the first (0) or second (1) hwcap word of Linux; `name`: the sysctl of macOS.
bool has_arm([[maybe_unused]] int word, [[maybe_unused]] int bit, [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return getauxval(word ? AT_HWCAP2 : AT_HWCAP) >> bit & 1;
#elif defined(__APPLE__)
  int supported = 0;
  size_t size = sizeof supported;
  return !sysctlbyname(name, &supported, &size, nullptr, 0) && supported;
#else
  return false;
#endif
}

bool has_dot() { return has_arm(0, 20, "hw.optional.arm.FEAT_DotProd"); }
#endif

const Isa kIsas[] = {
#ifdef JAXLLM_PORTABLE
    {"portable", portable_kernels, always},
#endif
#ifdef JAXLLM_AVX2
    {"avx2", avx2_kernels, has_avx2},
#endif
#ifdef JAXLLM_AVX2_VNNI
    {"avx2-vnni", avx2_vnni_kernels, [] { return has_avx2() && __builtin_cpu_supports("avxvnni"); }},
#endif
#ifdef JAXLLM_AVX512
    {"avx512", avx512_kernels, has_avx512},
#endif
#ifdef JAXLLM_AVX512_VNNI
    {"avx512-vnni", avx512_vnni_kernels, [] { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }},
#endif
#ifdef JAXLLM_AVX512_BF16
    {"avx512-bf16", avx512_bf16_kernels, has_bf16},
#endif
#ifdef JAXLLM_AVX512_AMX
    {"avx512-amx", avx512_amx_kernels, has_amx},
#endif
#ifdef JAXLLM_NEON
    {"neon", neon_kernels, always},
#endif
#ifdef JAXLLM_NEON_DOT
    {"neon-dot", neon_dot_kernels, has_dot},
#endif
#ifdef JAXLLM_NEON_BF16
    {"neon-bf16", neon_bf16_kernels, [] { return has_dot() && has_arm(1, 14, "hw.optional.arm.FEAT_BF16"); }},
#endif
};

}  // namespace

std::vector<Isa> available_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  std::vector<Isa> supported;
  for (const Isa& isa : kIsas)
    if (isa.is_supported()) supported.push_back(isa);
  return supported;
}

}  // namespace jaxllm
