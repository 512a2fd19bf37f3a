// What an instruction set must offer, and the data that goes in. One table of functions for each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxllm {

enum class Kind : int32_t {
  kF32,
  kBF16,
  kF16,
  kInt8,
  kInt4,
  kPacked,
  kNF4,
  kSparse24F32,
  kSparse24BF16,
  kSparse24Int8,
  kBitmapF32,
  kBitmapBF16,
  kBitmapInt8,
  kQ4K,
  kQ5K,
  kQ6K
};

// Padding after a bitmap's numbers, since a register may read past their end.
constexpr int64_t kSpare = 128;

// A weight matrix [rows, columns] in any of the formats of jaxllm/weights/types/, which documents
// their layouts. `stride` is the distance between rows of `data`, in bytes. Here as in all
// that follows, arrays are aligned to their elements and no further, and any size may be 0.
struct Weight {
  Kind kind;
  int64_t rows, columns, stride;
  const uint8_t* data;
  // Integers: `groups` scales a row, each of `group` columns; float16 scales if `half`.
  int64_t group, groups;
  bool half;
  const void* scale;
  const uint8_t* zero;  // null: 8 for four bits, 0 for eight
  // Integers in GGUF's blocks (Q4_0, Q8_0): before each 32 of `data` is their float16 scale. `scale` is then null.
  // Blocks of 256 columns (Q4_K, Q5_K, Q6_K) are kinds of their own, with `data` alone; rows are padded to whole ones.
  bool blocks;
  // NF4: the 16 levels of the codes, and a scale for each 64 columns; rows are padded to whole ones. If `levels8` is
  // not null, scales are uint8 codes of its 256 levels: the i-th of the matrix is levels8[code] * factor[i / 256] +
  // *mean.
  const float *levels, *levels8, *factor, *mean;
  // Packed bfloat16: exponents, and escapes for those that do not fit four bits.
  const uint8_t* nibbles;
  int64_t nibble_stride;
  int32_t base;
  const int32_t *escape_begin, *escape_column;
  const uint16_t* escape_value;
  int32_t escapes;  // of all rows
  // Sparse: a bit for each column. For bitmaps, where each row's numbers begin, how many are stored (with kSpare), and
  // `stride`, the average row size.
  const uint8_t* mask;
  int64_t mask_stride;
  const int32_t* begin;
  int64_t values;
};

// Activations [rows, columns]. `rounded`: if weights are integers, these are too, with a step for
// each group of columns, or 128 if rows have one scale: the same ones as round_to_int8 of weights/linear.py makes, bit
// for bit. Otherwise a product has float32 accuracy relative to the sum of its terms' magnitudes, whatever their sizes:
// no input may lose bits because of a larger neighbor, nor a sum overflow that a scale would prevent. `codes`: they are
// integers already, int8 from -127 to 127 (-128 counts as -127), which integer weights multiply directly; if a row has
// one scale, the sum is exact, and scaled once.
struct Input {
  const void* x;
  bool bf16;
  int64_t rows, columns;
  bool rounded;
  bool codes;  // with `rounded`
};

// Keys and values of one part of a cache, each [B or 1, S, K, H], with positions [B or 1, S]: rows
// may share values whose keys are rotated for each, or attend to different shared slots.
struct Part {
  Kind kind;                        // kF32, kBF16, kF16, kInt8
  bool one_k, one_v, one_position;  // a row shared by all
  int64_t slots;
  // Which of the other rows each row of queries reads, of `rows`; null: its own.
  const int32_t* row;
  int64_t rows;
  const void *k, *v;
  const float *k_scale, *v_scale;  // int8: [B or 1, S, K]
  const int32_t* position;

  int64_t row_of(int64_t b) const {
    if (!row) return b;
    return row[b] < 0 ? 0 : (row[b] < rows ? row[b] : rows - 1);
  }
};

// Queries [B, T, N, H], in float32 or bfloat16, and their positions. window < 0: none. cap: soft cap on scores;
// 0: none.
struct Queries {
  const void* q;
  bool bf16;
  const int32_t* position;
  int64_t B, T, N, K, H, window;
  float scale, cap;
};

// Rows to normalize [rows, columns], float32 or bfloat16: x / sqrt(mean of squares + eps) * (weight + offset) + bias,
// of x less its mean if `centered`. The weights and the bias (null: none) are arrays of floats.
struct Norm {
  const void* x;
  bool bf16;
  int64_t columns;
  Kind weight_kind, bias_kind;
  const void *weight, *bias;
  float eps, offset;
  bool centered;
};

constexpr int64_t kStrip = 16, kBlock = 64, kSpan = 512;

// What a row's queries can attend to at kBlock positions from `base` (a multiple) on: where each one's key and value
// are. part: -1 if there is none.
struct Block {
  struct Slot {
    int32_t part, slot;
  };
  int64_t base;
  Slot lane[kBlock];
};

// Consecutive blocks.
struct Blocks {
  const Block *begin, *end;
};

// One side of a product of two matrices: A [rows, depth] or the transpose of B [depth, rows], float32 or bfloat16. It
// is stored as such, or for `by_depth` as its transpose.
struct Side {
  const uint8_t* data;
  bool bf16, by_depth;
  int64_t rows, depth;
};

struct Products {
  bool (*takes)(const Weight&, const Input&);
  // Bytes that `prepare` writes for all rows: the input as `multiply` needs it.
  size_t (*prepared_bytes)(const Weight&, const Input&);
  // Input rows begin <= r < end, where begin is a multiple of kStrip.
  void (*prepare)(const Weight&, const Input&, int64_t begin, int64_t end, void* prepared);
  // y[r, o] for weight rows begin <= o < end and all input rows r; y is [rows of x, rows of w].
  void (*multiply)(const Weight&, const Input&, const void* prepared, int64_t begin, int64_t end, float* y);
};

struct Kernels {
  Products products;
  // Weight rows begin <= o < end as bfloat16 or float32, [rows, columns].
  void (*widen)(const Weight&, int64_t begin, int64_t end, bool bf16, void* out);
  // Attention of a strip of up to kStrip queries from `first` on, of row b and key head k. The row's blocks of kSpan
  // positions are folded into one state, of state_bytes; the states are merged in order of positions into the first;
  // and the softmax-weighted values [tokens, N / K, H] are written to out [B, T, N, H], in the queries' type.
  size_t (*state_bytes)(const Queries&, int64_t tokens);
  void (*fold)(const Queries&, const Part*, int64_t b, int64_t k, int64_t first, int64_t tokens, Blocks of_span,
               float* state);
  void (*merge)(const Queries&, int64_t tokens, float* state, const float* next);
  void (*put)(const Queries&, int64_t b, int64_t k, int64_t first, int64_t tokens, float* state, void* out);
  // Of rows begin <= r < end of x [rows, columns], in one order of additions: the sum; the logarithm of the sum of
  // exponentials; the softmax [rows, columns].
  void (*sum_rows)(const float* x, int64_t columns, int64_t begin, int64_t end, float* sum);
  void (*logsumexp_rows)(const float* x, int64_t columns, int64_t begin, int64_t end, float* sum);
  void (*softmax_rows)(const float* x, int64_t columns, int64_t begin, int64_t end, float* out);
  // Rows begin <= r < end to out, in the type of x.
  void (*normalize)(const Norm&, int64_t begin, int64_t end, void* out);
  // The same products by a matrix unit, with another order of additions; null if there is none.
  Products many;
  // Rows m to m_end and columns n to n_end of the product of two matrices [rows of a, rows of b], in their type; null
  // if there is none.
  void (*multiply_sides)(const Side& a, const Side& b, int64_t m, int64_t m_end, int64_t n, int64_t n_end, void* y);
};

}  // namespace jaxllm
