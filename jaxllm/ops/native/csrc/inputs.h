// Inputs as the products need them: which numbers in which order.
#pragma once

#include "digits.h"
#include "floats.h"
#include "levels.h"
#include "rounded.h"
#include "sparse.h"
#include "super_rounded.h"

namespace jaxllm {
namespace {

// Whether the instruction set multiplies them as bfloat16 pairs.
inline bool halves(const Weight& w, const Input& in) {
  return in.bf16 && dense_of(w.kind) != Kind::kF32 && w.kind != Kind::kF16 && w.kind != Kind::kNF4 && !super(w);
}

// Whether they stay bfloat16; otherwise they become floats.
inline bool pairs(const Weight& w, const Input& in) { return kPairs && !sparse(w) && halves(w, in); }

// The column, of 128, of the i-th number.
struct Order {
  uint8_t column[128];
};

template <class Column>
constexpr Order order_by(const Column& column) {
  Order order = {};
  for (int i = 0; i < 128; i++) order.column[i] = uint8_t(column(i));
  return order;
}

inline const Order* order_of(const Weight& w, bool pairs) {
  static constexpr Order kEvenOdd = order_by([](int i) { return even_odd(i); });
  static constexpr Order kNarrowed =
      order_by([](int i) { return i / kHalves * kHalves + i % 2 * kLanes + i % kHalves / 2; });
  static constexpr Order kNibbles = order_by([](int i) { return nibble_column(i); });
  static constexpr Order kNibblesOfFloats = order_by(float_column);
  static constexpr Order kLevels = order_by([](int i) { return level_column(i); });
  const Kind kind = dense_of(w.kind);
  if (kind == Kind::kInt8) return pairs ? &kNarrowed : nullptr;
  if (kind == Kind::kInt4) return pairs ? &kNibbles : &kNibblesOfFloats;
  if (kind == Kind::kNF4) return &kLevels;
  if (pairs || (sparse(w) && kInOrder)) return nullptr;
  return kind == Kind::kBF16 || kind == Kind::kPacked ? &kEvenOdd : nullptr;
}

inline size_t prepared_bytes(const Weight& w, const Input& in) {
  if (by_digits(w, in)) return in.rows * (exact_bytes(in) + rest_bytes(in));
  if (super(w) && in.rounded) return in.rows * supers_of(in) * sizeof(SuperDigits);
  return in.rows * (rounded(w, in) ? chunks_of(in) * digits_bytes(w) : stride_of(in) * (pairs(w, in) ? 2 : 4));
}

template <class T>
void put_in_order(const Order* order, const T* from, int64_t count, T* to) {
  for (int64_t c = 0; c < count; c += 128) {
    T chunk[128] = {};
    memcpy(chunk, from + c, sizeof(T) * (count - c < 128 ? count - c : 128));
    if (!order) memcpy(to + c, chunk, sizeof chunk);
    for (int i = 0; i < 128 && order; i++) to[c + i] = chunk[order->column[i]];
  }
}

inline void prepare(const Weight& w, const Input& in, int64_t begin, int64_t end, void* prepared) {
  const int64_t columns = in.columns, count = chunks_of(in), stride = stride_of(in);
  const int64_t whole = super(w) ? up(columns, kSuper) : 128 * count;
  const Order* order = order_of(w, pairs(w, in) && !by_digits(w, in));
  float* x = reinterpret_cast<float*>(space<Order>(2 * 4 * whole));
  for (int64_t r = begin; r < end; r++) {
    if (pairs(w, in) && !rounded(w, in) && !by_digits(w, in)) {
      put_in_order(order, static_cast<const uint16_t*>(in.x) + r * columns, columns,
                   static_cast<uint16_t*>(prepared) + r * stride);
      continue;
    }
    to_floats(in.codes ? Kind::kInt8 : (in.bf16 ? Kind::kBF16 : Kind::kF32), in.x, r * columns, columns, x);
    for (int64_t i = columns; i < whole; i++) x[i] = 0;
    if (by_digits(w, in)) {
      float* turned = x + whole;
      put_in_order(order, x, columns, turned);
      prepare_exact(w, in, r, turned, prepared);
      continue;
    }
    if (super(w) && in.rounded) {
      SuperDigits* to = static_cast<SuperDigits*>(prepared) + r * supers_of(in);
      for (int64_t c = 0; c < whole; c += kSuper)
        w.kind == Kind::kQ6K ? write_super<Kind::kQ6K>(x + c, in.codes, *to++)
                             : write_super<Kind::kQ4K>(x + c, in.codes, *to++);
      continue;
    }
    if (!rounded(w, in)) {
      if (super(w)) memset(static_cast<float*>(prepared) + r * stride, 0, 4 * whole);
      put_in_order(order, x, columns, static_cast<float*>(prepared) + r * stride);
      continue;
    }
    for (int64_t c = 0; c < count; c++)
      if (w.kind == Kind::kInt4)
        write_chunk(w, x + 128 * c, in.codes, static_cast<Digits<16>*>(prepared)[r * count + c]);
      else
        write_chunk(w, x + 128 * c, in.codes, static_cast<Digits<32>*>(prepared)[r * count + c]);
  }
}

}  // namespace
}  // namespace jaxllm
