// The kernels as XLA custom calls: buffers in, rows of outputs shared out over XLA's own threads.
#include "xla/ffi/api/ffi.h"

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

#include "kernels.h"

namespace ffi = xla::ffi;

namespace jaxllm {
namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> all = {portable_kernels()};
#ifdef JAXLLM_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2) all.push_back(avx2_kernels());
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    all.push_back(avx512_kernels());
#endif
  return all;
}

std::atomic<const Kernels*> chosen{available().back()};

// `work(begin, end)` over all of `count` in blocks, by the caller and by as many of XLA's threads
// as come in time. The caller takes blocks like the others, so it waits for nothing but blocks that
// some thread is at work on: threads that are all waiting here cannot be.
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

// Blocks that are large enough to be worth taking, and small enough to end at about one time.
int64_t block_of(int64_t count, int64_t bytes, int64_t threads) {
  int64_t block = count / (threads * 8);
  const int64_t least = (64 << 10) * count / (bytes ? bytes : 1);
  if (block < least) block = least;
  block = (block + 3) / 4 * 4;
  return block < 4 ? 4 : block;
}

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("jaxllm: " + what); }

// Scratch memory of a thread, kept between calls.
uint8_t* scratch(size_t bytes) {
  thread_local std::unique_ptr<uint8_t, decltype(&std::free)> memory(nullptr, &std::free);
  thread_local size_t size = 0;
  if (size < bytes) {
    size = (bytes + 4095) / 4096 * 4096;
    memory.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
  }
  return memory.get();
}

// The weight of pieces `begin <= i < end`.
ffi::ErrorOr<Weight> weight_of(ffi::RemainingArgs& args, size_t begin, size_t end, int32_t kind,
                               int64_t group, int64_t columns) {
  std::vector<ffi::AnyBuffer> piece;
  for (size_t i = begin; i < end; i++) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
    piece.push_back(buffer.value());
  }
  if (piece.empty() || piece[0].dimensions().size() != 2)
    return ffi::Unexpected(wrong("a weight is a matrix"));
  Weight w = {};
  w.kind = static_cast<Kind>(kind);
  w.rows = piece[0].dimensions()[0];
  w.columns = columns;
  w.data = static_cast<const uint8_t*>(piece[0].untyped_data());
  w.stride = w.rows ? int64_t(piece[0].size_bytes()) / w.rows : 0;
  if (w.kind == Kind::kInt8 || w.kind == Kind::kInt4) {
    if (piece.size() < 2) return ffi::Unexpected(wrong("integers need scales"));
    const int64_t width = w.stride * (w.kind == Kind::kInt4 ? 2 : 1);
    w.groups = piece[1].dimensions()[1];
    w.group = group ? group : width;
    const bool whole = w.kind == Kind::kInt8 && w.groups == 1;  // a row has one scale
    if (width % 128 || w.group * w.groups != width || columns > width || (!whole && 128 % w.group))
      return ffi::Unexpected(wrong("groups and columns do not fit"));
    w.half = piece[1].element_type() == ffi::DataType::F16;
    w.scale = piece[1].untyped_data();
    if (piece.size() > 2) w.zero = static_cast<const uint8_t*>(piece[2].untyped_data());
  } else if (w.kind == Kind::kPacked) {
    if (piece.size() != 6) return ffi::Unexpected(wrong("packed weights have six pieces"));
    w.nibbles = static_cast<const uint8_t*>(piece[1].untyped_data());
    w.nibble_stride = piece[1].dimensions()[1];
    w.base = *static_cast<const int32_t*>(piece[2].untyped_data());
    w.escape_begin = static_cast<const int32_t*>(piece[3].untyped_data());
    w.escape_column = static_cast<const int32_t*>(piece[4].untyped_data());
    w.escape_value = static_cast<const uint16_t*>(piece[5].untyped_data());
  }
  return w;
}

// One product of several that share their input.
struct Product {
  Weight weight;
  size_t prepared;  // where its input begins
  float* y;
};

// Whether `prepare` makes the same of an input for both.
bool alike(const Weight& a, const Weight& b) { return a.kind == b.kind && a.group == b.group; }

// x times each of the weights: `counts` pieces of `kinds`, in groups of `groups` columns.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs pieces,
                  ffi::RemainingRets ys, ffi::Span<const int32_t> kinds, ffi::Span<const int64_t> groups,
                  ffi::Span<const int32_t> counts, int64_t columns, int32_t digits) {
  const Input in = {x.untyped_data(), x.element_type() == ffi::DataType::BF16, x.dimensions()[0],
                    x.dimensions()[1], digits};
  if (in.columns != columns) return wrong("the columns of x and of the weights differ");
  if (kinds.size() != ys.size() || groups.size() != ys.size() || counts.size() != ys.size())
    return wrong("each weight has a kind, a group, pieces and a result");
  const Kernels* kernels = chosen.load();
  std::vector<Product> products;
  int64_t rows = 0, streamed = 0;
  size_t piece = 0, bytes = 0;
  for (size_t i = 0; i < ys.size(); piece += counts[i++]) {
    const auto weight = weight_of(pieces, piece, piece + counts[i], kinds[i], groups[i], in.columns);
    if (!weight.has_value()) return weight.error();
    auto y = ys.get<ffi::BufferR2<ffi::F32>>(i);
    if (!y.has_value()) return y.error();
    const Weight& w = weight.value();
    const bool again = i && alike(products[i - 1].weight, w);
    products.push_back({w, again ? products[i - 1].prepared : bytes, (*y)->typed_data()});
    if (!again) bytes += (kernels->prepared_bytes(w, in) + 63) / 64 * 64;
    rows += w.rows;
    streamed += w.rows * w.stride;
  }
  if (!in.rows || !rows) return ffi::Error::Success();
  uint8_t* prepared = scratch(bytes);
  if (!prepared) return wrong("no memory for the input");
  const auto prepare = [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < products.size(); i++)
      if (!i || products[i].prepared != products[i - 1].prepared)
        kernels->prepare(products[i].weight, in, begin, end, prepared + products[i].prepared);
  };
  const int64_t least = 16;  // rows that are worth another thread
  in.rows > least ? share(pool, in.rows, least, prepare) : prepare(0, in.rows);
  share(pool, rows, block_of(rows, streamed, pool.num_threads()), [&](int64_t begin, int64_t end) {
    for (const Product& p : products) {  // the rows of all weights are numbered in turn
      const int64_t from = begin > 0 ? begin : 0, to = end < p.weight.rows ? end : p.weight.rows;
      if (from < to) kernels->multiply(p.weight, in, prepared + p.prepared, from, to, p.y);
      begin -= p.weight.rows;
      end -= p.weight.rows;
    }
  });
  return ffi::Error::Success();
}

ffi::Error widen(ffi::ThreadPool pool, ffi::RemainingArgs pieces, ffi::Result<ffi::AnyBuffer> out,
                 int32_t kind, int64_t group, int64_t columns) {
  const auto weight = weight_of(pieces, 0, pieces.size(), kind, group, columns);
  if (!weight.has_value()) return weight.error();
  const Weight& w = weight.value();
  const bool bf16 = out->element_type() == ffi::DataType::BF16;
  const Kernels* kernels = chosen.load();
  share(pool, w.rows, block_of(w.rows, w.rows * w.stride, pool.num_threads()),
        [&](int64_t begin, int64_t end) { kernels->widen(w, begin, end, bf16, out->untyped_data()); });
  return ffi::Error::Success();
}

ffi::Error take(ffi::AnyBuffer table, ffi::BufferR1<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t rows = table.dimensions()[0], count = index.dimensions()[0];
  if (!rows || !count) return ffi::Error::Success();
  const int64_t size = int64_t(table.size_bytes()) / rows;
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = index.typed_data()[i], row = at < 0 ? 0 : (at < rows ? at : rows - 1);
    std::memcpy(static_cast<uint8_t*>(out->untyped_data()) + i * size,
                static_cast<const uint8_t*>(table.untyped_data()) + row * size, size);
  }
  return ffi::Error::Success();
}

// The sum of all 8-byte words: memory read as fast as it goes, to measure others against.
ffi::Error read(ffi::ThreadPool pool, ffi::AnyBuffer bytes, ffi::Result<ffi::BufferR0<ffi::U32>> sum) {
  const uint8_t* data = static_cast<const uint8_t*>(bytes.untyped_data());
  const int64_t words = int64_t(bytes.size_bytes()) / 8;
  std::atomic<uint64_t> total{0};
  share(pool, words, 1 << 17, [&](int64_t begin, int64_t end) {
    uint64_t lane[32] = {};
    for (int64_t i = begin; i + 32 <= end; i += 32)
      for (int j = 0; j < 32; j++) {
        uint64_t word;
        memcpy(&word, data + 8 * (i + j), 8);
        lane[j] += word;
      }
    for (uint64_t one : lane) total += one;
  });
  *sum->typed_data() = uint32_t(total.load());
  return ffi::Error::Success();
}

Kind kind_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return Kind::kBF16;
    case ffi::DataType::F16: return Kind::kF16;
    case ffi::DataType::S8: return Kind::kInt8;
    default: return Kind::kF32;
  }
}

// Arrays `[B, S, ...]` in the first half of the arguments, which are also the results, in place; what
// comes to their slots `cursor, cursor + 1, ...`, `[B, T, ...]`, in the second. What would run past
// the end is dropped.
ffi::Error write(ffi::BufferR0<ffi::S32> cursor, ffi::RemainingArgs arrays, ffi::RemainingRets out) {
  const size_t count = out.size();
  if (arrays.size() != 2 * count) return wrong("write takes what is new for each array");
  const int64_t at = *cursor.typed_data();
  for (size_t i = 0; i < count; i++) {
    const auto old = arrays.get<ffi::AnyBuffer>(i), fresh = arrays.get<ffi::AnyBuffer>(count + i);
    auto result = out.get<ffi::AnyBuffer>(i);
    if (!old.has_value() || !fresh.has_value() || !result.has_value()) return wrong("write of no array");
    uint8_t* to = static_cast<uint8_t*>((*result)->untyped_data());
    const uint8_t* from = static_cast<const uint8_t*>(fresh.value().untyped_data());
    if (to != old.value().untyped_data())
      std::memcpy(to, old.value().untyped_data(), old.value().size_bytes());
    const auto shape = old.value().dimensions();
    const int64_t rows = shape[0], slots = shape[1], width = fresh.value().dimensions()[1];
    if (!rows || !slots) continue;
    const int64_t size = int64_t(old.value().size_bytes()) / (rows * slots);
    const int64_t skip = at < 0 ? -at : 0, end = slots - at < width ? slots - at : width;
    for (int64_t b = 0; b < rows && end > skip; b++)
      std::memcpy(to + (b * slots + at + skip) * size, from + (b * width + skip) * size,
                  (end - skip) * size);
  }
  return ffi::Error::Success();
}

// Pieces: for each part its k, v and positions, and after them the two scales where k is int8.
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::BufferR2<ffi::S32> position,
                  ffi::RemainingArgs pieces, ffi::Result<ffi::AnyBuffer> out, float scale,
                  int64_t window) {
  const auto size = q.dimensions();
  const bool bf16 = q.element_type() == ffi::DataType::BF16;
  if (size.size() != 4 || out->element_type() != q.element_type() ||
      (!bf16 && q.element_type() != ffi::DataType::F32))
    return wrong("queries [B, T, N, H] in float32 or bfloat16");
  Queries queries = {q.untyped_data(), bf16, position.typed_data(), size[0], size[1], size[2], 0, size[3],
                     window, scale};
  std::vector<Part> parts;
  for (size_t i = 0; i < pieces.size();) {
    const auto k = pieces.get<ffi::AnyBuffer>(i), v = pieces.get<ffi::AnyBuffer>(i + 1),
               at = pieces.get<ffi::AnyBuffer>(i + 2);
    if (!k.has_value() || !v.has_value() || !at.has_value()) return wrong("a part has k, v, positions");
    const auto shape = k.value().dimensions();
    Part part = {kind_of(k.value().element_type()), shape[0] == 1, v.value().dimensions()[0] == 1,
                 at.value().dimensions()[0] == 1, shape[1],
                 k.value().untyped_data(), v.value().untyped_data(), nullptr, nullptr,
                 static_cast<const int32_t*>(at.value().untyped_data())};
    queries.K = shape[2];
    i += 3;
    if (part.kind == Kind::kInt8) {
      const auto ks = pieces.get<ffi::AnyBuffer>(i), vs = pieces.get<ffi::AnyBuffer>(i + 1);
      if (!ks.has_value() || !vs.has_value()) return wrong("int8 keys and values have scales");
      part.k_scale = static_cast<const float*>(ks.value().untyped_data());
      part.v_scale = static_cast<const float*>(vs.value().untyped_data());
      i += 2;
    }
    parts.push_back(part);
  }
  if (!queries.K || queries.N % queries.K) return wrong("heads of queries in groups of keys' heads");
  const Kernels* kernels = chosen.load();
  const int64_t some = 16, strips = (queries.T + some - 1) / some, heads = queries.B * queries.K;
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t head = i / strips, first = i % strips * some;
      const int64_t tokens = queries.T - first < some ? queries.T - first : some;
      kernels->attend(queries, parts.data(), int64_t(parts.size()), head / queries.K,
                      head % queries.K, first, tokens, out->untyped_data());
    }
  };
  share(pool, heads * strips, 1, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear, jaxllm::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int32_t>>("kinds")
                                  .Attr<ffi::Span<const int64_t>>("groups")
                                  .Attr<ffi::Span<const int32_t>>("counts")
                                  .Attr<int64_t>("columns")
                                  .Attr<int32_t>("digits"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_widen, jaxllm::widen,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("kind")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("columns"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_take, jaxllm::take,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_write, jaxllm::write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_read, jaxllm::read,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR0<ffi::U32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attend, jaxllm::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));

// The instruction set in use; with a name, takes that one (null where this machine has it not).
extern "C" const char* jaxllm_isa(const char* name) {
  if (name) {
    const jaxllm::Kernels* found = nullptr;
    for (const jaxllm::Kernels* kernels : jaxllm::available())
      if (!std::strcmp(kernels->name, name)) found = kernels;
    if (!found) return nullptr;
    jaxllm::chosen = found;
  }
  return jaxllm::chosen.load()->name;
}
