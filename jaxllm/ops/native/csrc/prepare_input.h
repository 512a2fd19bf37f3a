// Inputs as the kernels read them: dtype, rounding and column order.
#pragma once

#include "floats.h"
#include "int4_exact.h"
#include "int8_blocks.h"
#include "k_quants_int8.h"
#include "nf4.h"
#include "sparse.h"

namespace jaxllm {
namespace {

// Whether input and weights can be multiplied as bfloat16 pairs.
inline bool multiplies_bf16(const Weight& w, const Input& in) {
  return in.bf16 && dense_kind(w.kind) != Kind::kF32 && w.kind != Kind::kF16 && w.kind != Kind::kNF4 && !is_k_quant(w);
}

// Whether they are on this set; otherwise inputs become floats.
inline bool uses_bf16_pairs(const Weight& w, const Input& in) {
  return kPairs && !is_sparse(w) && multiplies_bf16(w, in);
}

// Column (of 128) of the i-th number.
struct ColumnOrder {
  uint8_t column[128];
};

template <class Column>
constexpr ColumnOrder make_order(const Column& column) {
  ColumnOrder order = {};
  for (int i = 0; i < 128; i++) order.column[i] = uint8_t(column(i));
  return order;
}

inline const ColumnOrder* column_order(const Weight& w, bool pairs) {
  static constexpr ColumnOrder kEvenOdd = make_order([](int i) { return even_odd(i); });
  static constexpr ColumnOrder kNarrowed =
      make_order([](int i) { return i / kHalves * kHalves + i % 2 * kLanes + i % kHalves / 2; });
  static constexpr ColumnOrder kNibbles = make_order([](int i) { return nibble_column(i); });
  static constexpr ColumnOrder kNibblesOfFloats = make_order(float_column);
  static constexpr ColumnOrder kNf4 = make_order([](int i) { return nf4_column(i); });
  const Kind kind = dense_kind(w.kind);
  if (kind == Kind::kInt8) return pairs ? &kNarrowed : nullptr;
  if (kind == Kind::kInt4) return pairs ? &kNibbles : &kNibblesOfFloats;
  if (kind == Kind::kNF4) return &kNf4;
  if (pairs || (is_sparse(w) && kInOrder)) return nullptr;
  return kind == Kind::kBF16 || kind == Kind::kPackedBF16 ? &kEvenOdd : nullptr;
}

inline size_t prepared_bytes(const Weight& w, const Input& in) {
  if (uses_digits(w, in)) return in.rows * (exact_bytes(in) + residual_bytes(in));
  if (is_k_quant(w) && in.quantize) return in.rows * superblock_count(in) * sizeof(Int8Superblock);
  return in.rows * (uses_int8_input(w, in) ? chunk_count(in) * chunk_bytes(w)
                                           : prepared_stride(in) * (uses_bf16_pairs(w, in) ? 2 : 4));
}

template <class T>
void store_permuted(const ColumnOrder* order, const T* from, int64_t count, T* to) {
  for (int64_t c = 0; c < count; c += 128) {
    T chunk[128] = {};
    memcpy(chunk, from + c, sizeof(T) * (count - c < 128 ? count - c : 128));
    if (!order) memcpy(to + c, chunk, sizeof chunk);
    for (int i = 0; i < 128 && order; i++) to[c + i] = chunk[order->column[i]];
  }
}

inline void prepare(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const int64_t columns = in.columns, count = chunk_count(in), stride = prepared_stride(in);
  const int64_t padded = is_k_quant(w) ? round_up(columns, kSuperblock) : 128 * count;
  const ColumnOrder* order = column_order(w, uses_bf16_pairs(w, in) && !uses_digits(w, in));
  float* x = reinterpret_cast<float*>(thread_scratch<ColumnOrder>(2 * 4 * padded));
  for (int64_t r = begin; r < end; r++) {
    if (uses_bf16_pairs(w, in) && !uses_int8_input(w, in) && !uses_digits(w, in)) {
      store_permuted(order, static_cast<const uint16_t*>(in.x) + r * columns, columns,
                     static_cast<uint16_t*>(prepared) + r * stride);
      continue;
    }
    to_floats(in.quantized ? Kind::kInt8 : (in.bf16 ? Kind::kBF16 : Kind::kF32), in.x, r * columns, columns, x);
    for (int64_t i = columns; i < padded; i++) x[i] = 0;
    if (uses_digits(w, in)) {
      float* permuted = x + padded;
      store_permuted(order, x, columns, permuted);
      prepare_exact(w, in, r, permuted, prepared);
      continue;
    }
    if (is_k_quant(w) && in.quantize) {
      Int8Superblock* to = static_cast<Int8Superblock*>(prepared) + r * superblock_count(in);
      for (int64_t c = 0; c < padded; c += kSuperblock)
        w.kind == Kind::kQ6K ? quantize_superblock<Kind::kQ6K>(x + c, in.quantized, *to++)
                             : quantize_superblock<Kind::kQ4K>(x + c, in.quantized, *to++);
      continue;
    }
    if (!uses_int8_input(w, in)) {
      if (is_k_quant(w)) memset(static_cast<float*>(prepared) + r * stride, 0, 4 * padded);
      store_permuted(order, x, columns, static_cast<float*>(prepared) + r * stride);
      continue;
    }
    for (int64_t c = 0; c < count; c++)
      if (w.kind == Kind::kInt4)
        quantize_chunk(w, x + 128 * c, in.quantized, static_cast<Int8Chunk<16>*>(prepared)[r * count + c]);
      else
        quantize_chunk(w, x + 128 * c, in.quantized, static_cast<Int8Chunk<32>*>(prepared)[r * count + c]);
  }
}

}  // namespace
}  // namespace jaxllm
