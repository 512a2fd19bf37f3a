// What a product's kernel is given: one struct by value, laid out alike by every compiler.
#pragma once

namespace jaxllm {

constexpr int WEIGHTS = 3;

// y = x W^T for up to three weights of one format. Arrays are dense, row by row, and aligned to 16
// bytes; bf16 is bfloat16.
struct Product {
  const void* x;                // bf16 [M, K]
  const void* norm;             // RmsNorm: bf16 [K]
  const void* residual;         // Residual: bf16 [M, O]; may be y
  const void* weight[WEIGHTS];  // [O, K] or [O, K'], as their format stores it (formats.h)
  const void* scale[WEIGHTS];   // [O, G]
  const void* zero[WEIGHTS];    // uint8 [O, G]: zero points, or a mask of 8 columns, if it has them
  void* y[WEIGHTS];             // as the epilogue writes it (epilogues.h)
  int rows;                     // M
  int columns;                  // K, a multiple of 8
  int outputs[WEIGHTS];         // O, multiples of 16; 0 for no weight
  float epsilon;                // RmsNorm
  float offset;                 // RmsNorm: is added to the norm's weight
};
static_assert(sizeof(Product) == 152, "the host fills it with the same layout");

}  // namespace jaxllm
