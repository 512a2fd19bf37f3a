// Driver that compares the kernels with expected results: `scripts/tools/run_arm.py` writes the cases and runs this
// under an emulator. It prints a line per instruction set; the exit status is 1 if a result is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "key_blocks.h"

using jaxllm::Kernels;

#ifdef JAXLLM_LIBRARY  // a library of a wheel, which detects what the processor supports
extern "C" const Kernels* jaxllm_kernels(const char* name);
#define KERNELS(isa, name) jaxllm_kernels(name)
#else
namespace jaxllm {
const Kernels* portable_kernels();
const Kernels* neon_kernels();
const Kernels* neon_dot_kernels();
const Kernels* neon_bf16_kernels();
}  // namespace jaxllm
#define KERNELS(isa, name) jaxllm::isa##_kernels()
#endif

struct Reader {
  std::vector<char> bytes;
  size_t at = 0;

  int64_t number() {
    int64_t n;
    std::memcpy(&n, bytes.data() + at, 8);
    at += 8;
    return n;
  }
  // Reads an array into its own allocation; null if absent.
  template <class T>
  const T* array() {
    const int64_t size = number();
    if (size < 0) return nullptr;
    char* copy = static_cast<char*>(std::malloc(size + 8));  // never freed: a short run
    std::memcpy(copy, bytes.data() + at, size);
    at += size;
    return reinterpret_cast<T*>(copy);
  }
  std::string text() {
    const int64_t size = number();
    at += size;
    return std::string(bytes.data() + at - size, size);
  }
};

jaxllm::Weight read_weight(Reader& in) {
  jaxllm::Weight w = {};
  w.kind = jaxllm::Kind(in.number());
  w.rows = in.number();
  w.columns = in.number();
  w.stride = in.number();
  w.group = in.number();
  w.groups = in.number();
  w.half = in.number();
  w.base = int32_t(in.number());
  w.nibble_stride = in.number();
  w.escapes = int32_t(in.number());
  w.mask_stride = in.number();
  w.values = in.number();
  w.blocks = in.number();
  w.e2m1 = in.number();
  w.data = in.array<uint8_t>();
  w.scale = in.array<uint8_t>();
  w.zero = in.array<uint8_t>();
  w.nibbles = in.array<uint8_t>();
  w.escape_begin = in.array<int32_t>();
  w.escape_column = in.array<int32_t>();
  w.escape_value = in.array<uint16_t>();
  w.mask = in.array<uint8_t>();
  w.begin = in.array<int32_t>();
  w.codebook = in.array<float>();
  w.scale_codebook = in.array<float>();
  w.factor = in.array<float>();
  w.mean = in.array<float>();
  return w;
}

// Counts the results that differ from the expected ones by more than their bound.
int count_wrong(const std::vector<float>& y, const double* exact, const double* bound) {
  int wrong = 0;
  for (size_t i = 0; i < y.size(); i++) wrong += !(std::fabs(y[i] - exact[i]) <= bound[i]) && std::isfinite(bound[i]);
  return wrong;
}

std::vector<float> multiply(const Kernels* k, const jaxllm::Weight& w, const jaxllm::Input& in) {
  std::vector<float> y(in.rows * w.rows, 7);
  const size_t size = (k->products.prepared_bytes(w, in) + 64) / 64 * 64;
  void* prepared = std::aligned_alloc(64, size);
  k->products.prepare(w, in, 0, in.rows, prepared);
  const int64_t half = w.rows / 8 * 4;
  k->products.multiply(w, in, prepared, 0, half, y.data());
  k->products.multiply(w, in, prepared, half, w.rows, y.data());
  std::free(prepared);
  return y;
}

int linear(const Kernels* k, Reader& in) {
  const jaxllm::Weight w = read_weight(in);
  jaxllm::Input x = {};
  x.bf16 = in.number();
  x.rows = in.number();
  x.columns = w.columns;
  x.quantize = in.number();
  x.x = in.array<uint8_t>();
  const double *exact = in.array<double>(), *bound = in.array<double>();
  const std::vector<float> y = multiply(k, w, x);
  jaxllm::Input first = x;
  first.rows = x.rows ? 1 : 0;
  const std::vector<float> single = multiply(k, w, first);
  const bool same = single.empty() || !std::memcmp(single.data(), y.data(), 4 * single.size());
  return count_wrong(y, exact, bound) + !same;
}

int dequantize(const Kernels* k, Reader& in) {
  const jaxllm::Weight w = read_weight(in);
  const double *exact = in.array<double>(), *bound = in.array<double>();
  std::vector<float> y(w.rows * w.columns, 7);
  k->dequantize(w, 0, w.rows, false, y.data());
  return count_wrong(y, exact, bound);
}

int attend(const Kernels* k, Reader& in) {
  jaxllm::Queries s = {};
  s.bf16 = in.number();
  s.B = in.number();
  s.T = in.number();
  s.N = in.number();
  s.K = in.number();
  s.H = in.number();
  s.window = in.number();
  const float* about = in.array<float>();
  s.scale = about[0];
  s.cap = about[1];
  s.q = in.array<uint8_t>();
  s.position = in.array<int32_t>();
  std::vector<jaxllm::CachePart> parts(in.number());
  for (jaxllm::CachePart& part : parts) {
    part.kind = jaxllm::Kind(in.number());
    part.shared_k = in.number();
    part.shared_v = in.number();
    part.shared_position = in.number();
    part.slots = in.number();
    part.k = in.array<uint8_t>();
    part.v = in.array<uint8_t>();
    part.k_scale = in.array<float>();
    part.v_scale = in.array<float>();
    part.position = in.array<int32_t>();
  }
  const double *exact = in.array<double>(), *bound = in.array<double>();
  std::vector<float> y(s.B * s.T * s.N * s.H);
  std::vector<uint16_t> half(y.size());
  for (int64_t b = 0; b < s.B; b++) {
    jaxllm::KeyBlocks blocks;
    blocks.build(parts, b);
    for (int64_t head = 0; head < s.K; head++)
      for (int64_t first = 0; first < s.T; first += jaxllm::kStrip) {
        const int64_t tokens = s.T - first < jaxllm::kStrip ? s.T - first : jaxllm::kStrip;
        const size_t size = k->state_bytes(s, tokens) / 4;
        std::vector<float> state(size), next(size);
        k->fold(s, parts.data(), b, head, first, tokens, blocks.span(0), state.data());
        for (int64_t span = 1; span < blocks.spans(); span++) {
          k->fold(s, parts.data(), b, head, first, tokens, blocks.span(span), next.data());
          k->merge(s, tokens, state.data(), next.data());
        }
        k->store_output(s, b, head, first, tokens, state.data(), s.bf16 ? static_cast<void*>(half.data()) : y.data());
      }
  }
  for (size_t i = 0; i < y.size() && s.bf16; i++) {
    const uint32_t wide = uint32_t(half[i]) << 16;
    std::memcpy(&y[i], &wide, 4);
  }
  return count_wrong(y, exact, bound);
}

int main(int count, char** arguments) {
  if (count != 2) return 2;
  std::FILE* file = std::fopen(arguments[1], "rb");
  if (!file) return 2;
  Reader all;
  char block[1 << 16];
  for (size_t n; (n = std::fread(block, 1, sizeof block, file)) > 0;)
    all.bytes.insert(all.bytes.end(), block, block + n);
  std::fclose(file);
  const struct {
    const char* name;
    const Kernels* kernels;
  } isas[] = {{"portable", KERNELS(portable, "portable")},
              {"neon", KERNELS(neon, "neon")},
              {"neon-dot", KERNELS(neon_dot, "neon-dot")},
              {"neon-bf16", KERNELS(neon_bf16, "neon-bf16")}};
  int failed = 0;
  for (const auto& isa : isas) {
    if (!isa.kernels) {
      std::printf("%s: missing\n", isa.name);
      failed++;
      continue;
    }
    Reader in = all;
    int cases = 0, wrong = 0;
    for (; in.at < in.bytes.size(); cases++) {
      const int64_t kernel = in.number();
      const std::string name = in.text();
      const int wrong_results = (kernel == 0 ? linear : kernel == 1 ? dequantize : attend)(isa.kernels, in);
      if (wrong_results) std::printf("%s: %s: %d wrong\n", isa.name, name.c_str(), wrong_results);
      wrong += wrong_results > 0;
    }
    std::printf("%-12s%6d cases%6d wrong\n", isa.name, cases, wrong);
    failed += wrong;
  }
  return failed > 0;
}
