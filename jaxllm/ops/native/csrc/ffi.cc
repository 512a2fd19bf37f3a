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

#include "layout.h"
#include "pieces.h"
#include "sets.h"

namespace jaxllm {
namespace {

const std::vector<Set>& sets() {
  static const std::vector<Set> all = available_sets();
  return all;
}

std::atomic<const Set*> chosen{&sets().back()};

const Kernels* kernels_in_use() { return chosen.load()->kernels(); }

// Runs `work(begin, end)` over all of `count` in blocks, on the caller and on XLA's threads as they
// become free. The caller takes blocks like the others and waits only for blocks that some thread is
// working on, so threads cannot deadlock here.
struct Shared {
  std::atomic<int64_t> next{0}, done{0};
};

template <class Work>
void share(ffi::ThreadPool& pool, int64_t count, int64_t block, const Work& work) {
  const int64_t blocks = (count + block - 1) / block;
  const auto shared = std::make_shared<Shared>();
  const auto run = [shared, blocks, block, count, &work] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      work(i * block, (i + 1) * block < count ? (i + 1) * block : count);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t threads = pool.num_threads();
  for (int64_t t = 1; t < threads && t < blocks; t++) pool.Schedule(std::function<void()>(run));
  run();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < blocks; spins++) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (spins > 4096) std::this_thread::yield();
  }
}

// Blocks large enough to amortize scheduling, and small enough that threads finish together.
int64_t block_of(int64_t count, int64_t bytes, int64_t threads) {
  int64_t block = count / (threads > 0 ? threads * 8 : 8);
  const int64_t least = (64 << 10) * count / (bytes ? bytes : 1);
  if (block < least) block = least;
  const int64_t whole = 32;  // tiles, of any set
  return block < whole ? whole : (block + whole - 1) / whole * whole;
}

// Scratch memory of a thread, kept between calls; null if allocation fails.
uint8_t* scratch(size_t bytes) {
  thread_local std::unique_ptr<uint8_t, decltype(&std::free)> memory(nullptr, &std::free);
  thread_local size_t size = 0;
  if (size < bytes || !memory) {
    size = 0;  // free the old memory first; allocation may fail
    memory.reset();
    const size_t whole = bytes / 4096 * 4096 + 4096;
    memory.reset(static_cast<uint8_t*>(std::aligned_alloc(64, whole)));
    if (memory) size = whole;
  }
  return memory.get();
}

// One product of several at once.
struct Product {
  Weight weight;
  Input in;
  const Products* by;
  size_t prepared;  // offset of its input
  bool again;       // its input is that of an earlier one
  float* y;
};

// Whether both need the same prepared input.
bool alike(const Weight& a, const Weight& b) { return a.kind == b.kind && a.group == b.group && !a.zero == !b.zero; }

// Products that are computed at once. `many`: by the matrix unit, if there is one that supports them.
struct Batch {
  const bool many;
  const Kernels* kernels = kernels_in_use();
  std::vector<Product> products = {};
  size_t bytes = 0;
  int64_t outputs = 0, streamed = 0;

  // `other`: a product with the same input; or null.
  void add(const Weight& w, const Input& in, float* y, const Product* other) {
    const bool unit = many && kernels->many.takes && kernels->many.takes(w, in),
               again = other && alike(other->weight, w);
    const Products* by = unit ? &kernels->many : &kernels->products;
    products.push_back({w, in, by, again ? other->prepared : bytes, again, y});
    if (!again) bytes += (by->prepared_bytes(w, in) + 63) / 64 * 64;
    outputs += w.rows;
    streamed += w.rows * w.stride;
  }

  // Calls work(product, from, to) for what is between begin and end, where the `count(product)` of all are numbered
  // consecutively.
  template <class Count, class Work>
  void each(int64_t begin, int64_t end, const Count& count, const Work& work) const {
    for (const Product& p : products) {
      const int64_t all = count(p), from = begin > 0 ? begin : 0, to = end < all ? end : all;
      if (from < to) work(p, from, to);
      begin -= all;
      end -= all;
      if (end <= 0) break;
    }
  }

  // Prepares the inputs, of `rows` rows in all, and multiplies.
  ffi::Error run(ffi::ThreadPool& pool, int64_t rows) const {
    if (!outputs || !rows) return ffi::Error::Success();
    uint8_t* prepared = scratch(bytes);
    if (!prepared) return wrong("no memory for the input");
    const auto strips = [](const Product& p) { return p.again ? 0 : (p.in.rows + kStrip - 1) / kStrip; };
    const auto prepare = [&](int64_t begin, int64_t end) {
      each(begin, end, strips, [&](const Product& p, int64_t from, int64_t to) {
        p.by->prepare(p.weight, p.in, from * kStrip, std::min(to * kStrip, p.in.rows), prepared + p.prepared);
      });
    };
    int64_t count = 0;
    for (const Product& p : products) count += strips(p);
    rows > kStrip ? share(pool, count, 1, prepare) : prepare(0, count);
    share(pool, outputs, block_of(outputs, streamed, pool.num_threads()), [&](int64_t begin, int64_t end) {
      const auto all = [](const Product& p) { return p.weight.rows; };
      each(begin, end, all, [&](const Product& p, int64_t from, int64_t to) {
        p.by->multiply(p.weight, p.in, prepared + p.prepared, from, to, p.y);
      });
    });
    return ffi::Error::Success();
  }
};

// Calls add(weight, y) for each of the weights, `counts` arrays of `kinds` in groups of `groups` columns, and its
// result.
template <class Add>
ffi::Error each_weight(const ffi::RemainingArgs& args, const ffi::RemainingRets& ys, ffi::Span<const int32_t> kinds,
                       ffi::Span<const int64_t> groups, ffi::Span<const int32_t> counts, int64_t columns,
                       const Add& add) {
  if (kinds.size() != ys.size() || groups.size() != ys.size() || counts.size() != ys.size())
    return wrong("each weight has a kind, a group, pieces and a result");
  size_t piece = 0;
  for (size_t i = 0; i < ys.size(); piece += counts[i++]) {
    if (counts[i] < 1) return wrong("a weight has pieces");
    const auto pieces = pieces_of(args, piece, piece + counts[i]);
    if (!pieces.has_value()) return pieces.error();
    const auto weight = weight_of(pieces.value(), kinds[i], groups[i], columns);
    if (!weight.has_value()) return weight.error();
    auto y = ys.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    if (ffi::Error error = add(weight.value(), **y); error.failure()) return error;
  }
  return piece == args.size() ? ffi::Error::Success() : wrong("a piece belongs to no weight");
}

// x times each of the weights: `counts` arrays of `kinds`, in groups of `groups` columns. `digits`: 1
// rounds x if weights are integers. `many`: by the matrix unit, if there is one that supports them.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets ys,
                  ffi::Span<const int32_t> kinds, ffi::Span<const int64_t> groups, ffi::Span<const int32_t> counts,
                  int64_t columns, int32_t digits, bool many) {
  const bool codes = is(x, Type::S8, {kAny, columns}) && digits == 1;
  if (!codes && !is(x, Type::F32, {kAny, columns}) && !is(x, Type::BF16, {kAny, columns}))
    return wrong("x is of float32, bfloat16 or (one digit) int8, [rows, columns of the weights]");
  const Input in = {x.untyped_data(), x.element_type() == Type::BF16, x.dimensions()[0], columns, digits == 1, codes};
  Batch batch{many};
  const ffi::Error error = each_weight(args, ys, kinds, groups, counts, columns, [&](const Weight& w, auto& y) {
    if (codes && !w.groups) return wrong("inputs of int8 are for weights of integers");
    if (!is(y, Type::F32, {in.rows, w.rows})) return wrong("a product is float32 [rows of x, rows of its weight]");
    const Product* last = batch.products.empty() ? nullptr : &batch.products.back();
    batch.add(w, in, static_cast<float*>(y.untyped_data()), last);
    return ffi::Error::Success();
  });
  return error.failure() ? error : batch.run(pool, in.rows);
}

// a [M, K] times b [K, N], each stored so or as its transpose: `a_axis` and `b_axis` are those of K.
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> y,
                    int64_t a_axis, int64_t b_axis) {
  const auto side_of = [](const ffi::AnyBuffer& x, int64_t axis) {
    return Side{data_of<uint8_t>(x), x.element_type() == Type::BF16, axis == 0, x.dimensions()[1 - axis],
                x.dimensions()[axis]};
  };
  const Kernels* kernels = kernels_in_use();
  if (!kernels->multiply_sides) return wrong("this instruction set has no product of two matrices");
  const auto fits = [](const ffi::AnyBuffer& x) {
    return x.dimensions().size() == 2 && (x.element_type() == Type::F32 || x.element_type() == Type::BF16);
  };
  if (!fits(a) || !fits(b) || (a_axis & ~1) || (b_axis & ~1))
    return wrong("factors are matrices of float32 or bfloat16");
  const Side left = side_of(a, a_axis), right = side_of(b, b_axis);
  if (left.depth != right.depth || left.bf16 != right.bf16 || !is(*y, a.element_type(), {left.rows, right.rows}))
    return wrong("a product of two matrices of one type is of that type, [M, N]");
  // Blocks whose copies fit the L2 cache, or smaller ones, so that each thread has some.
  const auto block = [&](int64_t rows, int64_t most) {
    return std::min(most, std::max<int64_t>(48, (rows / (2 * pool.num_threads()) + 47) / 48 * 48));
  };
  const int64_t tall = 256, wide = block(right.rows, 528);
  const int64_t across = (right.rows + wide - 1) / wide, down = (left.rows + tall - 1) / tall;
  share(pool, across * down, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t m = i / across * tall, n = i % across * wide;
      kernels->multiply_sides(left, right, m, std::min(m + tall, left.rows), n, std::min(n + wide, right.rows),
                              y->untyped_data());
    }
  });
  return ffi::Error::Success();
}

// The matrix of a stack [experts * rows, ...] that begins at its row `first`.
Weight slice_of(const Weight& stack, int64_t first, int64_t rows) {
  Weight w = stack;
  w.rows = rows;
  w.data += first * w.stride;
  if (w.scale) w.scale = static_cast<const uint8_t*>(w.scale) + first * w.groups * (w.half ? 2 : 4);
  if (w.zero) w.zero += first * w.groups;
  return w;
}

// Each row of x times its expert's matrix, for each of the stacks [experts * rows of a matrix, ...]; zeros for an
// expert that does not exist. Matrices of unused experts are not read.
ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR1<ffi::S32> expert, ffi::RemainingArgs args,
                   ffi::RemainingRets ys, ffi::Span<const int32_t> kinds, ffi::Span<const int64_t> groups,
                   ffi::Span<const int32_t> counts, int64_t columns, int32_t digits, bool many, int64_t experts) {
  const int64_t rows = expert.dimensions()[0];
  const bool bf16 = is(x, Type::BF16, {rows, columns});
  if (!bf16 && !is(x, Type::F32, {rows, columns}))
    return wrong("x is of float32 or bfloat16, [rows, columns of the weights], and each row has an expert");
  if (experts < 1) return wrong("there are no experts");
  Batch batch{many};
  size_t each = 0;  // products of a stack: of consecutive rows of x with the same expert
  const ffi::Error error = each_weight(args, ys, kinds, groups, counts, columns, [&](const Weight& stack, auto& y) {
    if (stack.kind > Kind::kInt4 && stack.kind < Kind::kQ4K)
      return wrong("experts are of floats, integers or GGUF's blocks");
    if (stack.rows % experts) return wrong("the rows of a stack are no multiple of its experts");
    const int64_t outputs = stack.rows / experts;
    if (!is(y, Type::F32, {rows, outputs})) return wrong("a product is float32 [rows of x, rows of its weight]");
    float* to = static_cast<float*>(y.untyped_data());
    const bool first = batch.products.empty();
    for (int64_t begin = 0, end; begin < rows; begin = end) {
      const int64_t which = expert.typed_data()[begin];
      for (end = begin + 1; end < rows && expert.typed_data()[end] == which;) end++;
      if (which < 0 || which >= experts) {
        if (outputs) std::memset(to + begin * outputs, 0, (end - begin) * outputs * sizeof(float));
        continue;
      }
      const Input in = {
          data_of<uint8_t>(x) + begin * columns * element_bytes(x), bf16, end - begin, columns, digits == 1, false};
      const Product* before = first ? nullptr : &batch.products[batch.products.size() - each];
      batch.add(slice_of(stack, which * outputs, outputs), in, to + begin * outputs, before);
    }
    if (first) each = batch.products.size();
    return ffi::Error::Success();
  });
  return error.failure() ? error : batch.run(pool, rows);
}

// As many rows of a weight as `out` has, from `first` on, dequantized; the last ones if there are not as many.
ffi::Error widen(ffi::ThreadPool pool, ffi::BufferR0<ffi::S32> first, ffi::RemainingArgs args,
                 ffi::Result<ffi::AnyBuffer> out, int32_t kind, int64_t group, int64_t columns) {
  const auto pieces = pieces_of(args, 0, args.size());
  if (!pieces.has_value()) return pieces.error();
  const auto weight = weight_of(pieces.value(), kind, group, columns);
  if (!weight.has_value()) return weight.error();
  const Weight& w = weight.value();
  const bool bf16 = is(*out, Type::BF16, {kAny, columns});
  if ((!bf16 && !is(*out, Type::F32, {kAny, columns})) || out->dimensions()[0] > w.rows)
    return wrong("rows of a weight are widened to float32 or bfloat16 [at most all rows, columns]");
  const int64_t rows = out->dimensions()[0], last = w.rows - rows, named = *first.typed_data();
  const int64_t from = named < 0 ? 0 : (named < last ? named : last);
  uint8_t* to = static_cast<uint8_t*>(out->untyped_data()) - from * columns * (bf16 ? 2 : 4);
  const Kernels* kernels = kernels_in_use();
  share(pool, rows, block_of(rows, rows * w.stride, pool.num_threads()),
        [&](int64_t begin, int64_t end) { kernels->widen(w, from + begin, from + end, bf16, to); });
  return ffi::Error::Success();
}

// Rows of a table by number, clipped to the table; zeros if it has no rows.
ffi::Error take(ffi::AnyBuffer table, ffi::BufferR1<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t count = index.dimensions()[0], element = element_bytes(table);
  if (!is(table, table.element_type(), {kAny, kAny}) || !element ||
      !is(*out, table.element_type(), {count, table.dimensions()[1]}))
    return wrong("rows of a table [rows, columns] are taken as its type, [indices, columns]");
  const int64_t rows = table.dimensions()[0], size = table.dimensions()[1] * element;
  uint8_t* to = static_cast<uint8_t*>(out->untyped_data());
  if (!rows && count && size) std::memset(to, 0, count * size);
  for (int64_t i = 0; i < count && rows && size; i++) {
    const int64_t at = index.typed_data()[i], row = at < 0 ? 0 : (at < rows ? at : rows - 1);
    std::memcpy(to + i * size, data_of<uint8_t>(table) + row * size, size);
  }
  return ffi::Error::Success();
}

// What the kernel Run makes of each row of x: a number if One, or a row.
template <auto Run, bool One>
ffi::Error each_row(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  if (!is(x, Type::F32, {kAny, kAny})) return wrong("rows are of float32");
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  if (!(One ? is(*out, Type::F32, {rows}) : is(*out, Type::F32, {rows, columns})))
    return wrong("the results do not fit the rows");
  const auto run = kernels_in_use()->*Run;
  float* to = static_cast<float*>(out->untyped_data());
  share(pool, rows, (32 << 10) / (columns + 1) + 1,
        [&](int64_t begin, int64_t end) { run(data_of<float>(x), columns, begin, end, to); });
  return ffi::Error::Success();
}

// Rows [R, columns] normalized with weights [columns], and a bias if there is one more argument.
ffi::Error normalize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs args,
                     ffi::Result<ffi::AnyBuffer> out, float eps, float offset, bool centered) {
  const bool bf16 = x.element_type() == Type::BF16;
  if (x.dimensions().size() != 2 || (!bf16 && x.element_type() != Type::F32) ||
      !is(*out, x.element_type(), {x.dimensions()[0], x.dimensions()[1]}))
    return wrong("rows to normalize are of float32 or bfloat16, and so are the results");
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  Norm norm = {x.untyped_data(), bf16, columns, Kind::kF32, Kind::kF32, nullptr, nullptr, eps, offset, centered};
  const auto set = [&](const ffi::AnyBuffer& from, Kind& kind, const void*& data) {
    for (Kind known : {Kind::kF32, Kind::kBF16, Kind::kF16})
      if (is(from, type_of(known), {columns})) {
        kind = known;
        data = from.untyped_data();
        return true;
      }
    return false;
  };
  const auto rest = pieces_of(args, 0, args.size());
  if (!rest.has_value()) return rest.error();
  if (args.size() > 1 || !set(weight, norm.weight_kind, norm.weight) ||
      (args.size() && !set(rest.value()[0], norm.bias_kind, norm.bias)))
    return wrong("the weights and the bias of a norm are floats [columns]");
  const Kernels* kernels = kernels_in_use();
  share(pool, rows, (32 << 10) / (columns + 1) + 1,
        [&](int64_t begin, int64_t end) { kernels->normalize(norm, begin, end, out->untyped_data()); });
  return ffi::Error::Success();
}

// What Python does to the masks of grammars: a function of rows' grammars, prompt lengths, lengths and
// texts. It takes the interpreter's lock; whoever waits for this program has released it.
using MaskFunction = void (*)(const void*, const void*, const void*, const void*, int64_t, int64_t, void*, int64_t);
std::atomic<MaskFunction> mask_function{nullptr};

ffi::Error mask_tokens(ffi::Buffer<ffi::S32> grammar, ffi::Buffer<ffi::S32> prompt, ffi::Buffer<ffi::S32> length,
                       ffi::Buffer<ffi::S32> text, ffi::Result<ffi::Buffer<ffi::U32>> bits) {
  const MaskFunction call = mask_function.load();
  const int64_t rows = int64_t(prompt.element_count());
  if (!call) return wrong("no function for masks of tokens is set");
  if (int64_t(grammar.element_count()) != rows || int64_t(length.element_count()) != rows || !text.dimensions().size())
    return wrong("masks of tokens need a grammar, a length and a text for each row");
  call(grammar.untyped_data(), prompt.untyped_data(), length.untyped_data(), text.untyped_data(), rows,
       text.dimensions().back(), bits->untyped_data(), bits->dimensions().back());
  return ffi::Error::Success();
}

// The sum of all 8-byte words, the last padded with zeros: a read at full memory bandwidth, as a
// reference for benchmarks.
ffi::Error read(ffi::ThreadPool pool, ffi::AnyBuffer array, ffi::Result<ffi::BufferR0<ffi::U32>> sum) {
  const int64_t element = element_bytes(array), bytes = int64_t(array.element_count()) * element;
  if (!element) return wrong("elements of less than a byte are not read");
  const uint8_t* data = data_of<uint8_t>(array);
  std::atomic<uint64_t> total{0};
  share(pool, (bytes + 7) / 8, 1 << 17, [&](int64_t begin, int64_t end) {
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
    for (uint64_t one : lane) total += one;
  });
  *sum->typed_data() = uint32_t(total.load());
  return ffi::Error::Success();
}

// The first arguments are arrays `[B, S, ...]`, which are also the results, in place; as many more, `[R, T, ...]`, are
// written to slots of their rows. Entries for slots and rows that do not exist are dropped. Further arguments are not
// read: they are computed before.
ffi::Error write(ffi::BufferR1<ffi::S32> row, ffi::BufferR2<ffi::S32> slot, ffi::RemainingArgs args,
                 ffi::RemainingRets out) {
  const size_t count = out.size();
  const auto arrays = pieces_of(args, 0, args.size());
  if (!arrays.has_value()) return arrays.error();
  const int64_t entries = slot.dimensions()[0], width = slot.dimensions()[1];
  if (args.size() < 2 * count || row.dimensions()[0] != entries)
    return wrong("write takes what is new for each array, and a row and slots for it");
  for (size_t i = 0; i < count; i++) {
    const ffi::AnyBuffer &old = arrays.value()[i], &fresh = arrays.value()[count + i];
    auto result = out.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    const auto shape = old.dimensions(), some = fresh.dimensions(), full = (*result)->dimensions();
    bool fits = shape.size() >= 2 && some.size() == shape.size() && full.size() == shape.size() &&
                fresh.element_type() == old.element_type() && (*result)->element_type() == old.element_type() &&
                element_bytes(old) && some[0] == entries && some[1] == width;
    int64_t size = element_bytes(old);  // of a slot
    for (size_t axis = 0; fits && axis < shape.size(); axis++) {
      fits = full[axis] == shape[axis] && (axis < 2 || some[axis] == shape[axis]);
      if (axis > 1) size *= shape[axis];
    }
    if (!fits) return wrong("what is written is [R, T, ...] of the array's type, for [B, S, ...]");
    const int64_t rows = shape[0], slots = shape[1];
    if (!rows || !slots || !size) continue;
    uint8_t* to = static_cast<uint8_t*>((*result)->untyped_data());
    if (to != old.untyped_data()) std::memcpy(to, old.untyped_data(), rows * slots * size);
    for (int64_t r = 0; r < entries; r++) {
      const int64_t b = row.typed_data()[r];
      for (int64_t t = 0; t < width && b >= 0 && b < rows; t++)
        if (const int64_t s = slot.typed_data()[r * width + t]; s >= 0 && s < slots)
          std::memcpy(to + (b * slots + s) * size, data_of<uint8_t>(fresh) + (r * width + t) * size, size);
    }
  }
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer position, ffi::AnyBuffer row,
                  ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out, int64_t cached, float scale, int64_t window,
                  float cap) {
  const auto size = q.dimensions();
  const bool bf16 = q.element_type() == Type::BF16;
  if (size.size() != 4 || (!bf16 && q.element_type() != Type::F32) ||
      !is(*out, q.element_type(), {size[0], size[1], size[2], size[3]}) || !is(position, Type::S32, {size[0], size[1]}))
    return wrong("queries are [B, T, N, H] in float32 or bfloat16, their positions [B, T]");
  if (!is(row, Type::S32, {cached ? size[0] : 0})) return wrong("each row of queries has a row of the cached parts");
  Queries queries = {
      q.untyped_data(), bf16, data_of<int32_t>(position), size[0], size[1], size[2], 0, size[3], window, scale, cap};
  const auto pieces = pieces_of(args, 0, args.size());
  if (!pieces.has_value()) return pieces.error();
  const auto found = parts_of(pieces.value(), size_t(cached), data_of<int32_t>(row), queries);
  if (!found.has_value()) return found.error();
  const std::vector<Part>& parts = found.value();
  if (!out->element_count()) return ffi::Error::Success();
  const Kernels* kernels = kernels_in_use();
  const int64_t strips = (queries.T + kStrip - 1) / kStrip, tasks = queries.B * queries.K * strips;
  std::vector<Layout> layouts(queries.B);
  share(pool, queries.B, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) layouts[b].build(parts, b);
  });
  int64_t spans = 0;
  for (const Layout& layout : layouts) spans = std::max(spans, layout.spans());
  if (!spans) {  // nothing is visible
    std::memset(out->untyped_data(), 0, out->element_count() * element_bytes(q));
    return ffi::Error::Success();
  }
  const int64_t tokens = queries.T < kStrip ? queries.T : kStrip;  // of a strip, at most
  const int64_t bytes = (kernels->state_bytes(queries, tokens) + 63) / 64 * 64;
  // Folds one strip in order, or many strips at once and then merges: the same results.
  const bool at_once = tasks < 4 * pool.num_threads() && spans > 1;
  uint8_t* states = at_once ? scratch(bytes * tasks * spans) : nullptr;
  if (at_once && !states) return wrong("no memory for attention");
  const auto strip = [&](int64_t i, const auto& work) {
    const int64_t head = i / strips, first = i % strips * kStrip;
    work(head / queries.K, head % queries.K, first, queries.T - first < kStrip ? queries.T - first : kStrip);
  };
  const auto state = [&](int64_t i) { return reinterpret_cast<float*>(states + bytes * i); };
  if (at_once)
    share(pool, tasks * spans, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        strip(i / spans, [&](int64_t b, int64_t k, int64_t first, int64_t count) {
          kernels->fold(queries, parts.data(), b, k, first, count, layouts[b].of_span(i % spans), state(i));
        });
    });
  share(pool, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      strip(i, [&](int64_t b, int64_t k, int64_t first, int64_t count) {
        float *all, *next = nullptr;
        if (at_once) {
          all = state(i * spans);
        } else {
          all = reinterpret_cast<float*>(scratch(2 * bytes));
          next = all + bytes / 4;
          kernels->fold(queries, parts.data(), b, k, first, count, layouts[b].of_span(0), all);
        }
        for (int64_t span = 1; span < layouts[b].spans(); span++) {
          if (!at_once) kernels->fold(queries, parts.data(), b, k, first, count, layouts[b].of_span(span), next);
          kernels->merge(queries, count, all, at_once ? state(i * spans + span) : next);
        }
        kernels->put(queries, b, k, first, count, all, out->untyped_data());
      });
  });
  return ffi::Error::Success();
}

auto bind_rows() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(); }

// Binds what each_weight takes, and how the products are computed.
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
      .template Attr<bool>("many");
}

}  // namespace
}  // namespace jaxllm

namespace ffi = xla::ffi;
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear, jaxllm::linear,
                              jaxllm::bind_weights(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_multiply, jaxllm::multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("a_axis")
                                  .Attr<int64_t>("b_axis"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_experts, jaxllm::experts,
    jaxllm::bind_weights(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::BufferR1<ffi::S32>>())
        .Attr<int64_t>("experts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_widen, jaxllm::widen,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("kind")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_take, jaxllm::take);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_write, jaxllm::write,
    ffi::Ffi::Bind().Arg<ffi::BufferR1<ffi::S32>>().Arg<ffi::BufferR2<ffi::S32>>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_read, jaxllm::read,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::BufferR0<ffi::U32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_sum_rows, (jaxllm::each_row<&jaxllm::Kernels::sum_rows, true>),
                              jaxllm::bind_rows());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_logsumexp_rows, (jaxllm::each_row<&jaxllm::Kernels::logsumexp_rows, true>),
                              jaxllm::bind_rows());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_softmax_rows, (jaxllm::each_row<&jaxllm::Kernels::softmax_rows, false>),
                              jaxllm::bind_rows());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_normalize, jaxllm::normalize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<bool>("centered"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_mask_tokens, jaxllm::mask_tokens);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attend, jaxllm::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("cached")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("cap"));

extern "C" void jaxllm_set_mask_function(jaxllm::MaskFunction function) { jaxllm::mask_function = function; }

// An instruction set's `Kernels`; null if this machine or this build does not support it.
extern "C" const jaxllm::Kernels* jaxllm_kernels(const char* name) {
  for (const jaxllm::Set& set : jaxllm::sets())
    if (!std::strcmp(set.name, name)) return set.kernels();
  return nullptr;
}

// The instruction set in use; with a name, selects that one (null if it does not exist).
extern "C" const char* jaxllm_isa(const char* name) {
  if (name) {
    const jaxllm::Set* found = nullptr;
    for (const jaxllm::Set& set : jaxllm::sets())
      if (!std::strcmp(set.name, name)) found = &set;
    if (!found) return nullptr;
    jaxllm::chosen = found;
  }
  return jaxllm::chosen.load()->name;
}
