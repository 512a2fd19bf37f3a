// What a product's kernel is given: one struct by value, laid out alike by every compiler.
#pragma once

namespace jaxllm {

// y = x W^T. Arrays are dense, row by row, and aligned to 16 bytes; bf16 is bfloat16.
struct Product {
  const void* weight;    // [O, K] or [O, K'], as its format stores it (formats.h)
  const void* scale;     // [O, G]
  const void* zero;      // uint8 [O, G]: zero points, if the format has them
  const void* x;         // bf16 [M, K]
  void* y;               // as the epilogue writes it (epilogues.h)
  const void* norm;      // RmsNorm: bf16 [K]
  const void* residual;  // Residual: bf16 [M, O]; may be y
  const float* cosine;   // RotaryCache: float32 [M, H / 2]
  const float* sine;     // RotaryCache: float32 [M, H / 2]
  void* keys;            // RotaryCache: bf16 [M, S, kv heads, H]
  void* values;          // RotaryCache: bf16 [M, S, kv heads, H]
  const int* slot;       // RotaryCache: [M], where each row is written, from 0 to S - 1
  int rows;              // M
  int columns;           // K, a multiple of 8
  int outputs;           // O
  float epsilon;         // RmsNorm
  int slots;             // S
  int heads;             // of queries
  int kv_heads;
  int head_size;  // H, a multiple of 16
};
static_assert(sizeof(Product) == 128, "the host fills it with the same layout");

}  // namespace jaxllm
