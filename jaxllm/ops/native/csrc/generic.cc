// The kernels in plain C++, compiled once for any machine (portable: SSE2, NEON) and, on x86, once
// more for AVX2. Fixed-width inner loops that compilers turn into vectors; one order of additions
// for an output whatever else is computed beside it.
#include <cmath>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "kernels.h"

#ifndef JAXLLM_ISA
#define JAXLLM_ISA portable
#endif
#define JAXLLM_JOIN(a, b) a##b
#define JAXLLM_NAMED(a, b) JAXLLM_JOIN(a, b)
#define JAXLLM_QUOTE(a) #a
#define JAXLLM_TEXT(a) JAXLLM_QUOTE(a)

namespace jaxllm {
namespace {

#include "numbers.h"
#include "attention.h"

float largest(const float* x, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  return most;
}

bool finite(const float* x, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; i++) sum += x[i] * 0;
  return sum == 0;
}

int64_t width_of(const Input& in) {
  const int64_t whole = in.rounded ? kRounded : 128;
  return (in.columns + whole - 1) / whole * whole;
}

size_t prepared_bytes(const Weight&, const Input& in) { return 4 * in.rows * width_of(in); }

void prepare(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const int64_t width = width_of(in);
  for (int64_t r = begin; r < end; r++) {
    float* x = static_cast<float*>(prepared) + r * width;
    input_row(in, r, width, x);
    for (int64_t c = 0; integers(w) && in.rounded && c < width; c += kRounded) {
      if (!finite(x + c, kRounded)) continue;
      const float step = step_of(largest(x + c, kRounded)), by = step > 0 ? step : 1;
      for (int i = 0; i < kRounded; i++) x[c + i] = nearbyintf(x[c + i] / by) * step;
    }
  }
}

void multiply(const Weight& w, const Input& in, const void* prepared, int64_t begin, int64_t end,
              float* y) {
  const int64_t width = width_of(in), most = 16;
  for (int64_t o = begin; o < end; o++)
    for (int64_t first = 0; first < in.rows; first += most) {
      const int64_t rows = in.rows - first < most ? in.rows - first : most;
      float lane[most][kLanes] = {};
      for (int64_t from = 0; from < in.columns; from += 128) {
        const int64_t count = in.columns - from < 128 ? in.columns - from : 128;
        float part[128] = {};
        row_part(w, o, from, count, part);
        for (int64_t r = 0; r < rows; r++) {
          const float* x = static_cast<const float*>(prepared) + (first + r) * width + from;
          for (int i = 0; i < 128; i += kLanes)
            for (int l = 0; l < kLanes; l++) lane[r][l] += part[i + l] * x[i + l];
        }
      }
      for (int64_t r = 0; r < rows; r++) {
        for (int half = kLanes / 2; half; half /= 2)
          for (int l = 0; l < half; l++) lane[r][l] += lane[r][l + half];
        y[(first + r) * w.rows + o] = lane[r][0];
      }
    }
}

}  // namespace

const Kernels* JAXLLM_NAMED(JAXLLM_ISA, _kernels)() {
  static const Kernels kernels = {JAXLLM_TEXT(JAXLLM_ISA), prepared_bytes, prepare, multiply, widen,
                                  attend};
  return &kernels;
}

}  // namespace jaxllm
