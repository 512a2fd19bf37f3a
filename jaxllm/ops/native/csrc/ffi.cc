// The kernels as XLA custom calls; output rows are distributed over XLA's own threads.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ffi_buffers.h"
#include "isa_table.h"
#include "key_blocks.h"

namespace jaxllm {
namespace {

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = available_isas();
  return all;
}

const Isa* find_isa(const char* name) {
  for (const Isa& isa : isas())
    if (!std::strcmp(isa.name, name)) return &isa;
  return nullptr;
}

std::atomic<const Isa*> current_isa{&isas().back()};

const Kernels* kernels_in_use() { return current_isa.load()->kernels(); }

// Runs work(begin, end) for blocks of 0 to `count` on the caller and on XLA's free threads. The caller waits only for
// blocks that a thread is working on, so this cannot deadlock.
struct TaskCounters {
  std::atomic<int64_t> next{0}, done{0};
};

template <class Work>
void parallel_for(ffi::ThreadPool& pool, int64_t count, int64_t block, const Work& work) {
  const int64_t blocks = (count + block - 1) / block;
  const auto counters = std::make_shared<TaskCounters>();
  const auto run = [counters, blocks, block, count, &work] {
    for (int64_t i; (i = counters->next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      work(i * block, (i + 1) * block < count ? (i + 1) * block : count);
      counters->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t threads = pool.num_threads();
  for (int64_t t = 1; t < threads && t < blocks; t++) pool.Schedule(std::function<void()>(run));
  run();
  for (int spins = 0; counters->done.load(std::memory_order_acquire) < blocks; spins++) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (spins > 4096) std::this_thread::yield();
  }
}

// Blocks large enough to amortize scheduling, and small enough that threads finish together.
int64_t block_size(int64_t count, int64_t bytes, int64_t threads) {
  int64_t block = count / (threads > 0 ? threads * 8 : 8);
  const int64_t min_block = (64 << 10) * count / (bytes ? bytes : 1);
  if (block < min_block) block = min_block;
  const int64_t tile_rows = 32;  // tiles, of any set
  return block < tile_rows ? tile_rows : (block + tile_rows - 1) / tile_rows * tile_rows;
}

// Scratch memory of a thread, kept between calls; null if allocation fails.
uint8_t* scratch(size_t bytes) {
  thread_local std::unique_ptr<uint8_t, decltype(&std::free)> memory(nullptr, &std::free);
  thread_local size_t size = 0;
  if (size < bytes || !memory) {
    size = 0;  // free the old memory first; allocation may fail
    memory.reset();
    const size_t allocated = bytes / 4096 * 4096 + 4096;
    memory.reset(static_cast<uint8_t*>(std::aligned_alloc(64, allocated)));
    if (memory) size = allocated;
  }
  return memory.get();
}

// One product of several at once.
struct Product {
  Weight weight;
  Input in;
  const Products* kernels;
  size_t prepared;    // offset of its input
  bool reuses_input;  // its input is that of an earlier one
  float* y;
};

// Whether both need the same prepared input.
bool same_prepared_input(const Weight& a, const Weight& b) {
  return a.kind == b.kind && a.group == b.group && a.blocks == b.blocks && !a.zero == !b.zero && a.e2m1 == b.e2m1;
}

// Products that are computed together, by the matrix unit if `matrix_unit` and it supports them.
struct Batch {
  const bool matrix_unit;
  const Kernels* kernels = kernels_in_use();
  std::vector<Product> products = {};
  size_t bytes = 0;
  int64_t outputs = 0, streamed = 0;

  // `same_input`: a product with the same input; or null.
  void add(const Weight& w, const Input& in, float* y, const Product* same_input) {
    const bool unit = matrix_unit && kernels->matrix_unit.supports && kernels->matrix_unit.supports(w, in),
               reuses_input = same_input && same_prepared_input(same_input->weight, w);
    const Products* kernels_of_product = unit ? &kernels->matrix_unit : &kernels->products;
    products.push_back({w, in, kernels_of_product, reuses_input ? same_input->prepared : bytes, reuses_input, y});
    if (!reuses_input) bytes += (kernels_of_product->prepared_bytes(w, in) + 63) / 64 * 64;
    outputs += w.rows;
    streamed += w.rows * w.stride;
  }

  // Calls work(product, first, last) for items begin to end of all products' `count(product)` items.
  template <class Count, class Work>
  void for_each(int64_t begin, int64_t end, const Count& count, const Work& work) const {
    for (const Product& p : products) {
      const int64_t size = count(p), first = begin > 0 ? begin : 0, last = end < size ? end : size;
      if (first < last) work(p, first, last);
      begin -= size;
      end -= size;
      if (end <= 0) break;
    }
  }

  // Prepares the inputs, of `rows` rows in all, and multiplies.
  Error run(ffi::ThreadPool& pool, int64_t rows) const {
    if (!outputs || !rows) return Error::Success();
    uint8_t* prepared = scratch(bytes);
    if (!prepared) return invalid_argument("no memory for the input");
    const auto strips = [](const Product& p) { return p.reuses_input ? 0 : (p.in.rows + kStrip - 1) / kStrip; };
    const auto prepare = [&](int64_t begin, int64_t end) {
      for_each(begin, end, strips, [&](const Product& p, int64_t first, int64_t last) {
        p.kernels->prepare(p.weight, p.in, first * kStrip, std::min(last * kStrip, p.in.rows), prepared + p.prepared);
      });
    };
    int64_t count = 0;
    for (const Product& p : products) count += strips(p);
    rows > kStrip ? parallel_for(pool, count, 1, prepare) : prepare(0, count);
    parallel_for(pool, outputs, block_size(outputs, streamed, pool.num_threads()), [&](int64_t begin, int64_t end) {
      const auto size = [](const Product& p) { return p.weight.rows; };
      for_each(begin, end, size, [&](const Product& p, int64_t first, int64_t last) {
        p.kernels->multiply(p.weight, p.in, prepared + p.prepared, first, last, p.y);
      });
    });
    return Error::Success();
  }
};

// Calls add(weight, y) for each weight, of counts[i] arrays, and its result.
template <class Add>
Error for_each_weight(const ffi::RemainingArgs& args, const ffi::RemainingRets& ys, ffi::Span<const int32_t> kinds,
                      ffi::Span<const int64_t> groups, ffi::Span<const int32_t> counts, int64_t columns,
                      const Add& add) {
  if (kinds.size() != ys.size() || groups.size() != ys.size() || counts.size() != ys.size())
    return invalid_argument("each weight has a kind, a group, pieces and a result");
  size_t next = 0;
  for (size_t i = 0; i < ys.size(); next += counts[i++]) {
    if (counts[i] < 1) return invalid_argument("a weight has pieces");
    const auto buffers = get_buffers(args, next, next + counts[i]);
    if (!buffers.has_value()) return buffers.error();
    const auto weight = parse_weight(buffers.value(), kinds[i], groups[i], columns);
    if (!weight.has_value()) return weight.error();
    auto y = ys.get<AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    if (Error error = add(weight.value(), **y); error.failure()) return error;
  }
  return next == args.size() ? Error::Success() : invalid_argument("a piece belongs to no weight");
}

// x times each of the weights: `counts` arrays of `kinds`, in groups of `groups` columns. `digits`: 1
// rounds x if weights are integers. `matrix_unit`: by the matrix unit, if there is one that supports them.
Error linear(ffi::ThreadPool pool, AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets ys,
             ffi::Span<const int32_t> kinds, ffi::Span<const int64_t> groups, ffi::Span<const int32_t> counts,
             int64_t columns, int32_t digits, bool matrix_unit) {
  const bool codes = is(x, Type::S8, {kAny, columns}) && digits == 1;
  if (!codes && !is(x, Type::F32, {kAny, columns}) && !is(x, Type::BF16, {kAny, columns}))
    return invalid_argument("x is of float32, bfloat16 or (one digit) int8, [rows, columns of the weights]");
  const Input in = {x.untyped_data(), x.element_type() == Type::BF16, x.dimensions()[0], columns, digits == 1, codes};
  Batch batch{matrix_unit};
  const Error error = for_each_weight(args, ys, kinds, groups, counts, columns, [&](const Weight& w, auto& y) {
    if (codes && !w.groups) return invalid_argument("inputs of int8 are for weights of integers");
    if (!is(y, Type::F32, {in.rows, w.rows}))
      return invalid_argument("a product is float32 [rows of x, rows of its weight]");
    const Product* last = batch.products.empty() ? nullptr : &batch.products.back();
    batch.add(w, in, static_cast<float*>(y.untyped_data()), last);
    return Error::Success();
  });
  return error.failure() ? error : batch.run(pool, in.rows);
}

// a [M, K] times b [K, N], each stored so or as its transpose: `a_axis` and `b_axis` are those of K.
Error multiply(ffi::ThreadPool pool, AnyBuffer a, AnyBuffer b, ffi::Result<AnyBuffer> y, int64_t a_axis,
               int64_t b_axis) {
  const auto make_operand = [](const AnyBuffer& x, int64_t axis) {
    return Operand{data_as<uint8_t>(x), x.element_type() == Type::BF16, axis == 0, x.dimensions()[1 - axis],
                   x.dimensions()[axis]};
  };
  const Kernels* kernels = kernels_in_use();
  if (!kernels->multiply_operands) return invalid_argument("this instruction set has no product of two matrices");
  const auto is_factor = [](const AnyBuffer& x) {
    return x.dimensions().size() == 2 && (x.element_type() == Type::F32 || x.element_type() == Type::BF16);
  };
  if (!is_factor(a) || !is_factor(b) || (a_axis & ~1) || (b_axis & ~1))
    return invalid_argument("factors are matrices of float32 or bfloat16");
  const Operand left = make_operand(a, a_axis), right = make_operand(b, b_axis);
  if (left.depth != right.depth || left.bf16 != right.bf16 || !is(*y, a.element_type(), {left.rows, right.rows}))
    return invalid_argument("a product of two matrices of one type is of that type, [M, N]");
  // Blocks whose copies fit the L2 cache, or smaller ones, so that each thread has some.
  const auto block = [&](int64_t rows, int64_t max_block) {
    return std::min(max_block, std::max<int64_t>(48, (rows / (2 * pool.num_threads()) + 47) / 48 * 48));
  };
  const int64_t block_m = 256, block_n = block(right.rows, 528);
  const int64_t blocks_n = (right.rows + block_n - 1) / block_n, blocks_m = (left.rows + block_m - 1) / block_m;
  parallel_for(pool, blocks_n * blocks_m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t m = i / blocks_n * block_m, n = i % blocks_n * block_n;
      kernels->multiply_operands(left, right, m, std::min(m + block_m, left.rows), n, std::min(n + block_n, right.rows),
                                 y->untyped_data());
    }
  });
  return Error::Success();
}

// The matrix of a stack [experts * rows, ...] that begins at its row `first`.
Weight expert_matrix(const Weight& stack, int64_t first, int64_t rows) {
  Weight w = stack;
  w.rows = rows;
  w.data += first * w.stride;
  if (w.scale) w.scale = static_cast<const uint8_t*>(w.scale) + first * w.groups * (w.e2m1 ? 1 : (w.half ? 2 : 4));
  if (w.zero) w.zero += first * w.groups;
  return w;
}

// Each row of x times its expert's matrix, for each of the stacks [experts * rows of a matrix, ...]; zeros for an
// expert that does not exist. Matrices of unused experts are not read.
Error experts(ffi::ThreadPool pool, AnyBuffer x, ffi::BufferR1<ffi::S32> expert, ffi::RemainingArgs args,
              ffi::RemainingRets ys, ffi::Span<const int32_t> kinds, ffi::Span<const int64_t> groups,
              ffi::Span<const int32_t> counts, int64_t columns, int32_t digits, bool matrix_unit, int64_t experts) {
  const int64_t rows = expert.dimensions()[0];
  const bool bf16 = is(x, Type::BF16, {rows, columns});
  if (!bf16 && !is(x, Type::F32, {rows, columns}))
    return invalid_argument("x is of float32 or bfloat16, [rows, columns of the weights], and each row has an expert");
  if (experts < 1) return invalid_argument("there are no experts");
  Batch batch{matrix_unit};
  size_t products_per_stack = 0;  // products of a stack: of consecutive rows of x with the same expert
  const Error error = for_each_weight(args, ys, kinds, groups, counts, columns, [&](const Weight& stack, auto& y) {
    if (stack.kind > Kind::kInt4 && stack.kind < Kind::kQ4K)
      return invalid_argument("experts are of floats, integers or GGUF's blocks");
    if (stack.rows % experts) return invalid_argument("the rows of a stack are no multiple of its experts");
    const int64_t outputs = stack.rows / experts;
    if (!is(y, Type::F32, {rows, outputs}))
      return invalid_argument("a product is float32 [rows of x, rows of its weight]");
    float* to = static_cast<float*>(y.untyped_data());
    const bool first = batch.products.empty();
    for (int64_t begin = 0, end; begin < rows; begin = end) {
      const int64_t index = expert.typed_data()[begin];
      for (end = begin + 1; end < rows && expert.typed_data()[end] == index;) end++;
      if (index < 0 || index >= experts) {
        if (outputs) std::memset(to + begin * outputs, 0, (end - begin) * outputs * sizeof(float));
        continue;
      }
      const Input in = {
          data_as<uint8_t>(x) + begin * columns * element_bytes(x), bf16, end - begin, columns, digits == 1, false};
      const Product* same_input = first ? nullptr : &batch.products[batch.products.size() - products_per_stack];
      batch.add(expert_matrix(stack, index * outputs, outputs), in, to + begin * outputs, same_input);
    }
    if (first) products_per_stack = batch.products.size();
    return Error::Success();
  });
  return error.failure() ? error : batch.run(pool, rows);
}

// Dequantizes as many rows as `out` has from `first` on, which is clipped.
Error dequantize(ffi::ThreadPool pool, ffi::BufferR0<ffi::S32> first, ffi::RemainingArgs args,
                 ffi::Result<AnyBuffer> out, int32_t kind, int64_t group, int64_t columns) {
  const auto buffers = get_buffers(args, 0, args.size());
  if (!buffers.has_value()) return buffers.error();
  const auto weight = parse_weight(buffers.value(), kind, group, columns);
  if (!weight.has_value()) return weight.error();
  const Weight& w = weight.value();
  const bool bf16 = is(*out, Type::BF16, {kAny, columns});
  if ((!bf16 && !is(*out, Type::F32, {kAny, columns})) || out->dimensions()[0] > w.rows)
    return invalid_argument("rows of a weight are dequantized to float32 or bfloat16 [at most all rows, columns]");
  const int64_t rows = out->dimensions()[0], last = w.rows - rows, requested = *first.typed_data();
  const int64_t from = requested < 0 ? 0 : (requested < last ? requested : last);
  uint8_t* to = static_cast<uint8_t*>(out->untyped_data()) - from * columns * (bf16 ? 2 : 4);
  const Kernels* kernels = kernels_in_use();
  parallel_for(pool, rows, block_size(rows, rows * w.stride, pool.num_threads()),
               [&](int64_t begin, int64_t end) { kernels->dequantize(w, from + begin, from + end, bf16, to); });
  return Error::Success();
}

// Rows of a table by number, clipped to the table; zeros if it has no rows.
Error take(AnyBuffer table, ffi::BufferR1<ffi::S32> index, ffi::Result<AnyBuffer> out) {
  const int64_t count = index.dimensions()[0], element = element_bytes(table);
  if (!is(table, table.element_type(), {kAny, kAny}) || !element ||
      !is(*out, table.element_type(), {count, table.dimensions()[1]}))
    return invalid_argument("rows of a table [rows, columns] are taken as its type, [indices, columns]");
  const int64_t rows = table.dimensions()[0], size = table.dimensions()[1] * element;
  uint8_t* to = static_cast<uint8_t*>(out->untyped_data());
  if (!rows && count && size) std::memset(to, 0, count * size);
  for (int64_t i = 0; i < count && rows && size; i++) {
    const int64_t at = index.typed_data()[i], row = at < 0 ? 0 : (at < rows ? at : rows - 1);
    std::memcpy(to + i * size, data_as<uint8_t>(table) + row * size, size);
  }
  return Error::Success();
}

// Runs the kernel Run on each row of x, for a number if Scalar, or else a row.
template <auto Run, bool Scalar>
Error reduce_rows(ffi::ThreadPool pool, AnyBuffer x, ffi::Result<AnyBuffer> out) {
  if (!is(x, Type::F32, {kAny, kAny})) return invalid_argument("rows are of float32");
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  if (!(Scalar ? is(*out, Type::F32, {rows}) : is(*out, Type::F32, {rows, columns})))
    return invalid_argument("the results do not fit the rows");
  const auto run = kernels_in_use()->*Run;
  float* to = static_cast<float*>(out->untyped_data());
  parallel_for(pool, rows, (32 << 10) / (columns + 1) + 1,
               [&](int64_t begin, int64_t end) { run(data_as<float>(x), columns, begin, end, to); });
  return Error::Success();
}

// Rows [R, columns] normalized with weights [columns], and a bias if there is one more argument.
Error normalize(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer weight, ffi::RemainingArgs args,
                ffi::Result<AnyBuffer> out, float eps, float offset, bool centered) {
  const bool bf16 = x.element_type() == Type::BF16;
  if (x.dimensions().size() != 2 || (!bf16 && x.element_type() != Type::F32) ||
      !is(*out, x.element_type(), {x.dimensions()[0], x.dimensions()[1]}))
    return invalid_argument("rows to normalize are of float32 or bfloat16, and so are the results");
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  Norm norm = {x.untyped_data(), bf16, columns, Kind::kF32, Kind::kF32, nullptr, nullptr, eps, offset, centered};
  const auto parse = [&](const AnyBuffer& from, Kind& kind, const void*& data) {
    for (Kind candidate : {Kind::kF32, Kind::kBF16, Kind::kF16})
      if (is(from, data_type(candidate), {columns})) {
        kind = candidate;
        data = from.untyped_data();
        return true;
      }
    return false;
  };
  const auto bias = get_buffers(args, 0, args.size());
  if (!bias.has_value()) return bias.error();
  if (args.size() > 1 || !parse(weight, norm.weight_kind, norm.weight) ||
      (args.size() && !parse(bias.value()[0], norm.bias_kind, norm.bias)))
    return invalid_argument("the weights and the bias of a norm are floats [columns]");
  const Kernels* kernels = kernels_in_use();
  parallel_for(pool, rows, (32 << 10) / (columns + 1) + 1,
               [&](int64_t begin, int64_t end) { kernels->normalize(norm, begin, end, out->untyped_data()); });
  return Error::Success();
}

// Python's function that fills the token masks of rows' grammars, prompt lengths, lengths and texts. It takes the GIL,
// which the thread that waits for this program has released.
using MaskFunction = void (*)(const void*, const void*, const void*, const void*, int64_t, int64_t, void*, int64_t);
std::atomic<MaskFunction> mask_function{nullptr};

Error mask_tokens(ffi::Buffer<ffi::S32> grammar, ffi::Buffer<ffi::S32> prompt, ffi::Buffer<ffi::S32> length,
                  ffi::Buffer<ffi::S32> text, ffi::Result<ffi::Buffer<ffi::U32>> bits) {
  const MaskFunction call = mask_function.load();
  const int64_t rows = int64_t(prompt.element_count());
  if (!call) return invalid_argument("no function for masks of tokens is set");
  if (int64_t(grammar.element_count()) != rows || int64_t(length.element_count()) != rows || !text.dimensions().size())
    return invalid_argument("masks of tokens need a grammar, a length and a text for each row");
  call(grammar.untyped_data(), prompt.untyped_data(), length.untyped_data(), text.untyped_data(), rows,
       text.dimensions().back(), bits->untyped_data(), bits->dimensions().back());
  return Error::Success();
}

// The sum of all 8-byte words, the last padded with zeros: a read at full memory bandwidth, as a
// reference for benchmarks.
Error read(ffi::ThreadPool pool, AnyBuffer array, ffi::Result<ffi::BufferR0<ffi::U32>> sum) {
  const int64_t element = element_bytes(array), bytes = int64_t(array.element_count()) * element;
  if (!element) return invalid_argument("elements of less than a byte are not read");
  const uint8_t* data = data_as<uint8_t>(array);
  std::atomic<uint64_t> total{0};
  parallel_for(pool, (bytes + 7) / 8, 1 << 17, [&](int64_t begin, int64_t end) {
    uint64_t lane[32] = {};
    const auto add = [&](uint64_t& to, int64_t i, int64_t count) {
      uint64_t word = 0;
      memcpy(&word, data + 8 * i, count);
      to += word;
    };
    const int64_t words = bytes / 8 < end ? bytes / 8 : end;  // complete words
    int64_t i = begin;
    for (; i + 32 <= words; i += 32) {
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(data + 8 * i + (16 << 10) + line, 0, 2);
      for (int j = 0; j < 32; j++) add(lane[j], i + j, 8);
    }
    for (; i < words; i++) add(lane[0], i, 8);
    if (i < end) add(lane[0], i, bytes % 8);
    for (uint64_t sum_of_lane : lane) total += sum_of_lane;
  });
  *sum->typed_data() = uint32_t(total.load());
  return Error::Success();
}

// Writes arrays [R, T, ...] to rows and slots of as many arrays [B, S, ...], which come first and are the results, in
// place. Entries for rows and slots that do not exist are dropped. Further arguments only order the computation.
Error write(ffi::BufferR1<ffi::S32> row, ffi::BufferR2<ffi::S32> slot, ffi::RemainingArgs args,
            ffi::RemainingRets out) {
  const size_t count = out.size();
  const auto arrays = get_buffers(args, 0, args.size());
  if (!arrays.has_value()) return arrays.error();
  const int64_t entries = slot.dimensions()[0], width = slot.dimensions()[1];
  if (args.size() < 2 * count || row.dimensions()[0] != entries)
    return invalid_argument("write takes what is new for each array, and a row and slots for it");
  for (size_t i = 0; i < count; i++) {
    const AnyBuffer &old = arrays.value()[i], &update = arrays.value()[count + i];
    auto result = out.get<AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    const auto shape = old.dimensions(), update_shape = update.dimensions(), result_shape = (*result)->dimensions();
    bool matches_array = shape.size() >= 2 && update_shape.size() == shape.size() &&
                         result_shape.size() == shape.size() && update.element_type() == old.element_type() &&
                         (*result)->element_type() == old.element_type() && element_bytes(old) &&
                         update_shape[0] == entries && update_shape[1] == width;
    int64_t size = element_bytes(old);  // of a slot
    for (size_t axis = 0; matches_array && axis < shape.size(); axis++) {
      matches_array = result_shape[axis] == shape[axis] && (axis < 2 || update_shape[axis] == shape[axis]);
      if (axis > 1) size *= shape[axis];
    }
    if (!matches_array) return invalid_argument("what is written is [R, T, ...] of the array's type, for [B, S, ...]");
    const int64_t rows = shape[0], slots = shape[1];
    if (!rows || !slots || !size) continue;
    uint8_t* to = static_cast<uint8_t*>((*result)->untyped_data());
    if (to != old.untyped_data()) std::memcpy(to, old.untyped_data(), rows * slots * size);
    for (int64_t r = 0; r < entries; r++) {
      const int64_t b = row.typed_data()[r];
      for (int64_t t = 0; t < width && b >= 0 && b < rows; t++)
        if (const int64_t s = slot.typed_data()[r * width + t]; s >= 0 && s < slots)
          std::memcpy(to + (b * slots + s) * size, data_as<uint8_t>(update) + (r * width + t) * size, size);
    }
  }
  return Error::Success();
}

Error attend(ffi::ThreadPool pool, AnyBuffer q, AnyBuffer position, AnyBuffer row, AnyBuffer sink,
             ffi::RemainingArgs args, ffi::Result<AnyBuffer> out, int64_t cached, float scale, int64_t window,
             float cap) {
  const auto size = q.dimensions();
  const bool bf16 = q.element_type() == Type::BF16;
  if (size.size() != 4 || (!bf16 && q.element_type() != Type::F32) ||
      !is(*out, q.element_type(), {size[0], size[1], size[2], size[3]}) || !is(position, Type::S32, {size[0], size[1]}))
    return invalid_argument("queries are [B, T, N, H] in float32 or bfloat16, their positions [B, T]");
  if (!is(row, Type::S32, {cached ? size[0] : 0, kAny}))
    return invalid_argument("each row of queries has rows of the cached parts");
  const bool sinks = sink.element_count() > 0;
  if (!is(sink, Type::F32, {sinks ? size[2] : 0})) return invalid_argument("sinks are float32, one of each head");
  Queries queries = {
      q.untyped_data(), bf16, data_as<int32_t>(position), size[0], size[1], size[2], 0, size[3], window, scale, cap};
  if (sinks) queries.sink = data_as<float>(sink);
  const auto buffers = get_buffers(args, 0, args.size());
  if (!buffers.has_value()) return buffers.error();
  const auto parsed = parse_cache(buffers.value(), size_t(cached), data_as<int32_t>(row), row.dimensions()[1], queries);
  if (!parsed.has_value()) return parsed.error();
  const std::vector<CachePart>& parts = parsed.value();
  if (!out->element_count()) return Error::Success();
  const Kernels* kernels = kernels_in_use();
  const int64_t strips = (queries.T + kStrip - 1) / kStrip, tasks = queries.B * queries.K * strips;
  std::vector<KeyBlocks> key_blocks(queries.B);
  parallel_for(pool, queries.B, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) key_blocks[b].build(parts, b);
  });
  int64_t spans = 0;
  for (const KeyBlocks& row_blocks : key_blocks) spans = std::max(spans, row_blocks.spans());
  if (!spans) {  // nothing is visible
    std::memset(out->untyped_data(), 0, out->element_count() * element_bytes(q));
    return Error::Success();
  }
  const int64_t tokens = queries.T < kStrip ? queries.T : kStrip;  // of a strip, at most
  const int64_t bytes = (kernels->state_bytes(queries, tokens) + 63) / 64 * 64;
  // Folds one strip in order, or many strips at once and then merges: the same results.
  const bool at_once = tasks < 4 * pool.num_threads() && spans > 1;
  uint8_t* states = at_once ? scratch(bytes * tasks * spans) : nullptr;
  if (at_once && !states) return invalid_argument("no memory for attention");
  const auto strip = [&](int64_t i, const auto& work) {
    const int64_t head = i / strips, first = i % strips * kStrip;
    work(head / queries.K, head % queries.K, first, queries.T - first < kStrip ? queries.T - first : kStrip);
  };
  const auto state = [&](int64_t i) { return reinterpret_cast<float*>(states + bytes * i); };
  if (at_once)
    parallel_for(pool, tasks * spans, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        strip(i / spans, [&](int64_t b, int64_t k, int64_t first, int64_t count) {
          kernels->fold(queries, parts.data(), b, k, first, count, key_blocks[b].span(i % spans), state(i));
        });
    });
  parallel_for(pool, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      strip(i, [&](int64_t b, int64_t k, int64_t first, int64_t count) {
        float *all, *next = nullptr;
        if (at_once) {
          all = state(i * spans);
        } else {
          all = reinterpret_cast<float*>(scratch(2 * bytes));
          next = all + bytes / 4;
          kernels->fold(queries, parts.data(), b, k, first, count, key_blocks[b].span(0), all);
        }
        for (int64_t span = 1; span < key_blocks[b].spans(); span++) {
          if (!at_once) kernels->fold(queries, parts.data(), b, k, first, count, key_blocks[b].span(span), next);
          kernels->merge(queries, count, all, at_once ? state(i * spans + span) : next);
        }
        kernels->store_output(queries, b, k, first, count, all, out->untyped_data());
      });
  });
  return Error::Success();
}

auto bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }
auto bind_rows() { return bind().Arg<AnyBuffer>().Ret<AnyBuffer>(); }

// Binds what for_each_weight takes, and how the products are computed.
template <class Binding>
auto bind_weights(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<ffi::Span<const int32_t>>("kinds")
      .template Attr<ffi::Span<const int64_t>>("groups")
      .template Attr<ffi::Span<const int32_t>>("counts")
      .template Attr<int64_t>("columns")
      .template Attr<int32_t>("digits")
      .template Attr<bool>("matrix_unit");
}

}  // namespace
}  // namespace jaxllm

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear, jaxllm::linear, jaxllm::bind_weights(jaxllm::bind().Arg<AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_multiply, jaxllm::multiply,
    jaxllm::bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>().Attr<int64_t>("a_axis").Attr<int64_t>("b_axis"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_experts, jaxllm::experts,
    jaxllm::bind_weights(jaxllm::bind().Arg<AnyBuffer>().Arg<ffi::BufferR1<ffi::S32>>()).Attr<int64_t>("experts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_dequantize, jaxllm::dequantize,
                              jaxllm::bind()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<AnyBuffer>()
                                  .Attr<int32_t>("kind")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_take, jaxllm::take);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_write, jaxllm::write,
    ffi::Ffi::Bind().Arg<ffi::BufferR1<ffi::S32>>().Arg<ffi::BufferR2<ffi::S32>>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_read, jaxllm::read,
                              jaxllm::bind().Arg<AnyBuffer>().Ret<ffi::BufferR0<ffi::U32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_sum_rows, (jaxllm::reduce_rows<&jaxllm::Kernels::sum_rows, true>),
                              jaxllm::bind_rows());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_logsumexp_rows, (jaxllm::reduce_rows<&jaxllm::Kernels::logsumexp_rows, true>),
                              jaxllm::bind_rows());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_softmax_rows, (jaxllm::reduce_rows<&jaxllm::Kernels::softmax_rows, false>),
                              jaxllm::bind_rows());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_normalize, jaxllm::normalize,
                              jaxllm::bind()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<bool>("centered"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_mask_tokens, jaxllm::mask_tokens);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attend, jaxllm::attend,
                              jaxllm::bind()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<AnyBuffer>()
                                  .Attr<int64_t>("cached")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("cap"));

extern "C" void jaxllm_set_mask_function(jaxllm::MaskFunction function) { jaxllm::mask_function = function; }

// An instruction set's `Kernels`; null if this machine or this build does not support it.
extern "C" const jaxllm::Kernels* jaxllm_kernels(const char* name) {
  const jaxllm::Isa* isa = jaxllm::find_isa(name);
  return isa ? isa->kernels() : nullptr;
}

// The instruction set in use; with a name, selects that one (null if it does not exist).
extern "C" const char* jaxllm_isa(const char* name) {
  const jaxllm::Isa* selected = name ? jaxllm::find_isa(name) : jaxllm::current_isa.load();
  if (selected) jaxllm::current_isa = selected;
  return selected ? selected->name : nullptr;
}
