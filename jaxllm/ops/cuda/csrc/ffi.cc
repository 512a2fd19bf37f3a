// Kernels for a GPU as XLA's custom calls. Python compiles and loads them, and adds them here under
// a key; a call launches one through CUDA's driver, whose structures are declared as its ABI has
// them, so that building needs no CUDA.
#include "xla/ffi/api/ffi.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "arguments.h"

namespace jaxllm {
namespace {

namespace ffi = xla::ffi;
using ffi::Error;

// CUlaunchAttribute and CUlaunchConfig.
struct Attribute {
  enum : uint32_t { kClusterDimension = 4, kStartEarly = 6 } id;
  uint32_t padding;
  uint32_t value[16];
};
struct Config {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "as in cuda.h");
using Launch = int (*)(const Config*, void* kernel, void** arguments, void** extra);

std::mutex mutex;
std::unordered_map<int64_t, void*> kernels;  // by the key that programs have; never removed
Launch launch = nullptr;

void* find_kernel(int64_t key) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = kernels.find(key);
  return found == kernels.end() ? nullptr : found->second;
}

Error internal(const std::string& what) { return Error::Internal("jaxllm: " + what); }

// Launches a product. places: the field of `Product` that each argument, and then each result, is
// put in, counted in pointers. numbers: the fields after the pointers. Shapes were checked when the
// program was traced.
Error product(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
              ffi::Span<const int32_t> places, ffi::Span<const int32_t> numbers, int64_t key,
              int32_t grid, int32_t cluster, int32_t shared_bytes, bool early) {
  constexpr size_t kPointers = offsetof(Product, rows) / sizeof(void*);
  constexpr size_t kNumbers = (offsetof(Product, offset) - offsetof(Product, rows)) / 4 + 1;
  Product product = {};
  if (places.size() != args.size() + rets.size() || numbers.size() != kNumbers)
    return internal("a call has other arguments than the kernel");
  for (size_t i = 0; i < places.size(); i++) {
    void* data;
    if (i < args.size()) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return buffer.error();
      data = buffer->untyped_data();
    } else {
      auto buffer = rets.get<ffi::AnyBuffer>(i - args.size());
      if (!buffer.has_value()) return buffer.error();
      data = (*buffer)->untyped_data();
    }
    if (size_t(places[i]) >= kPointers) return internal("no such argument of the kernel");
    std::memcpy(reinterpret_cast<char*>(&product) + places[i] * sizeof(void*), &data,
                sizeof(void*));
  }
  std::memcpy(&product.rows, numbers.begin(), kNumbers * 4);
  void* kernel = find_kernel(key);
  if (!kernel) return internal("the kernel of a program was not loaded");
  Attribute attributes[2] = {{Attribute::kClusterDimension, 0, {uint32_t(cluster), 1, 1}},
                             {Attribute::kStartEarly, 0, {1}}};
  // Cards without clusters know neither of these.
  Attribute* first = attributes + (cluster == 1);
  const Config config = {
      {uint32_t(grid), 1, 1},         {256, 1, 1}, uint32_t(shared_bytes), stream, first,
      uint32_t((cluster > 1) + early)};
  void* arguments[] = {&product};
  const int error = launch(&config, kernel, arguments, nullptr);
  return error ? internal("CUDA's driver did not launch a kernel (error " + std::to_string(error) +
                          ")")
               : Error::Success();
}

template <class Binding>
auto bind_product(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<ffi::Span<const int32_t>>("places")
      .template Attr<ffi::Span<const int32_t>>("numbers")
      .template Attr<int64_t>("key")
      .template Attr<int32_t>("grid")
      .template Attr<int32_t>("cluster")
      .template Attr<int32_t>("shared_bytes")
      .template Attr<bool>("early");
}

}  // namespace
}  // namespace jaxllm

// Adds a kernel, and the driver's function that launches it.
extern "C" void jaxllm_cuda_add(int64_t key, void* kernel, void* launch) {
  const std::lock_guard<std::mutex> lock(jaxllm::mutex);
  jaxllm::kernels[key] = kernel;
  jaxllm::launch = reinterpret_cast<jaxllm::Launch>(launch);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_cuda_product, jaxllm::product,
    jaxllm::bind_product(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
// The same on a CPU, where tests stand in for a GPU.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_cuda_product_cpu,
    [](auto... arguments) { return jaxllm::product(nullptr, arguments...); },
    jaxllm::bind_product(xla::ffi::Ffi::Bind()));
