// The kernels of an instruction set, as a table of functions, and their arguments.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxllm {

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum class Kind : int32_t {
  kF32,
  kBF16,
  kF16,
  kInt8,
  kInt4,
  kPackedBF16,
  kNF4,
  kSparse24F32,
  kSparse24BF16,
  kSparse24Int8,
  kBitmapF32,
  kBitmapBF16,
  kBitmapInt8,
  kQ4K,
  kQ5K,
  kQ6K,
  kMXFP4
};

// Padding after a bitmap's numbers, since a register may read past their end.
constexpr int64_t kBitmapPadding = 128;

// A weight matrix [rows, columns] in a format of jaxllm/weights/types/, which documents the layouts. `stride` is the
// distance between rows of `data`, in bytes. All arrays are aligned to their elements only, and any size may be 0.
struct Weight {
  Kind kind;
  int64_t rows, columns, stride;
  const uint8_t* data;
  // Integers: `groups` scales a row, each of `group` columns; float16 scales if `half`.
  int64_t group, groups;
  bool half;
  const void* scale;
  const uint8_t* zero;  // null: 8 for four bits, 0 for eight
  // MXFP4 is a matrix of kInt4 whose codes stand for kLevels, and whose scales are biased exponents, uint8.
  bool e2m1;
  // Integers in GGUF's blocks (Q4_0, Q8_0): before each 32 of `data` is their float16 scale. `scale` is then null.
  // Blocks of 256 columns (Q4_K, Q5_K, Q6_K) are kinds of their own, with `data` alone; rows are padded to whole ones.
  bool blocks;
  // NF4: the codebook of 16 values, and a scale for each 64 columns, to which rows are padded. If `scale_codebook` is
  // not null, scales are uint8 codes of its 256 values: the i-th of the matrix is scale_codebook[code] * factor[i /
  // 256] + *mean.
  const float *codebook, *scale_codebook, *factor, *mean;
  // Packed bfloat16: exponents, and escapes for those that do not fit four bits.
  const uint8_t* nibbles;
  int64_t nibble_stride;
  int32_t base;
  const int32_t *escape_begin, *escape_column;
  const uint16_t* escape_value;
  int32_t escapes;  // of all rows
  // Sparse: a bit for each column. For bitmaps, where each row's numbers begin, how many are stored (with
  // kBitmapPadding), and `stride`, the average row size.
  const uint8_t* mask;
  int64_t mask_stride;
  const int32_t* begin;
  int64_t values;
};

// Activations [rows, columns]. `quantize`: round them to int8 if weights are integers, with a step for each group of
// columns, or for 128 if rows have one scale, bit for bit as round_to_int8 of weights/linear.py. Otherwise a product
// has float32 accuracy relative to the sum of its terms' magnitudes: no input loses bits because of a larger neighbor,
// and no sum overflows that a scale would prevent. `quantized`: they are int8 already, from -127 to 127 (-128 counts as
// -127); if a row has one scale, the integer sum is exact, and scaled once.
struct Input {
  const void* x;
  bool bf16;
  int64_t rows, columns;
  bool quantize;
  bool quantized;  // with `quantize`
};

// Keys and values of one part of a cache, each [B or 1, S, K, H], with positions [B or 1, S]: rows
// may share values whose keys are rotated for each, or attend to different shared slots.
struct CachePart {
  Kind kind;                                 // kF32, kBF16, kF16, kInt8
  bool shared_k, shared_v, shared_position;  // a row shared by all
  int64_t slots;
  // The rows (of `rows`) that each row of queries reads, [B, rows_each], one after another; null: its own. A row that
  // does not exist is empty.
  const int32_t* row;
  int64_t rows, rows_each;
  const void *k, *v;
  const float *k_scale, *v_scale;  // int8: [B or 1, S, K]
  const int32_t* position;
};

// Queries [B, T, N, H], in float32 or bfloat16, and their positions. window < 0: none. cap: soft cap on scores;
// 0: none. sink: a score of each head that takes part in the softmax without a value; null: none.
struct Queries {
  const void* q;
  bool bf16;
  const int32_t* position;
  int64_t B, T, N, K, H, window;
  float scale, cap;
  const float* sink = nullptr;
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

// The slots of the keys at kBlock positions from `base` on, a multiple of kBlock. part: -1 for no key.
struct Block {
  struct Slot {
    int32_t part, row, slot;
  };
  int64_t base;
  Slot lane[kBlock];
};

// Consecutive blocks.
struct Blocks {
  const Block *begin, *end;
};

// A factor of a product of two matrices, float32 or bfloat16: [rows, depth], or if transposed [depth, rows].
struct Operand {
  const uint8_t* data;
  bool bf16, transposed;
  int64_t rows, depth;
};

struct Products {
  bool (*supports)(const Weight&, const Input&);
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
  void (*dequantize)(const Weight&, int64_t begin, int64_t end, bool bf16, void* out);
  // Attention of a strip of up to kStrip queries from `first` on, of row b and key head k: `fold` computes the state of
  // a span, `merge` adds the next span's state, and `store_output` stores the values [tokens, N / K, H] to out [B, T,
  // N, H], in the queries' type.
  size_t (*state_bytes)(const Queries&, int64_t tokens);
  void (*fold)(const Queries&, const CachePart*, int64_t b, int64_t k, int64_t first, int64_t tokens, Blocks span,
               float* state);
  void (*merge)(const Queries&, int64_t tokens, float* state, const float* next);
  void (*store_output)(const Queries&, int64_t b, int64_t k, int64_t first, int64_t tokens, float* state, void* out);
  // Reductions of rows begin <= r < end of x [rows, columns], in a fixed order.
  void (*sum_rows)(const float* x, int64_t columns, int64_t begin, int64_t end, float* sum);
  void (*logsumexp_rows)(const float* x, int64_t columns, int64_t begin, int64_t end, float* sum);
  void (*softmax_rows)(const float* x, int64_t columns, int64_t begin, int64_t end, float* out);
  // Rows begin <= r < end to out, in the type of x.
  void (*normalize)(const Norm&, int64_t begin, int64_t end, void* out);
  // `products` by a matrix unit, with another order of additions; null if there is none.
  Products matrix_unit;
  // Rows m to m_end and columns n to n_end of the product a b^T, in their type; null if not supported.
  void (*multiply_operands)(const Operand& a, const Operand& b, int64_t m, int64_t m_end, int64_t n, int64_t n_end,
                            void* y);
};

}  // namespace jaxllm
