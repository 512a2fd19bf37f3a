// Names of what a GPU does, for nvcc and for NVRTC, which has no headers of the host.
// A test of the same sources without a GPU replaces them with a CPU's.
#pragma once

#ifdef JAXLLM_STAND_IN
#include "stand_in.h"
#else

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
#else
#include <cstdint>
#endif

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define JAXLLM_UNROLL _Pragma("unroll")
#define JAXLLM_PRAGMA(text) _Pragma(#text)
#define JAXLLM_UNROLL_BY(count) JAXLLM_PRAGMA(unroll count)

namespace jaxllm {

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_count() { return gridDim.x; }
DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return bytes;
}
DEVICE uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Threads of a block and of a warp.
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

// sum[16 x 8] += a[16 x 16] b[16 x 8], of bf16 pairs, by all threads of a warp. With g = lane / 4
// and c = lane % 4, a thread has sum[g][2c, 2c + 1] and sum[g + 8][2c, 2c + 1]; a in rows g, g + 8,
// g, g + 8 at columns 2c, 2c, 2c + 8, 2c + 8; b in column g at rows 2c and 2c + 8.
DEVICE void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Numbers. A pair is two bf16, the first in the low half.
DEVICE float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high_float(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
DEVICE uint32_t round_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {  // a * b + c, rounded once
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
DEVICE float half_to_float(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
DEVICE float exp2_of(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}
DEVICE uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// Memory that the kernel before may have written: read from the second-level cache.
template <class T>
DEVICE T read_global(const T* pointer) {
  return __ldcg(pointer);
}
DEVICE void prefetch_global(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// Copies to shared memory that go on while the threads compute. `size` bytes are read, and the
// rest of the 16 are zeros. A thread waits for all of its groups of copies but the last N.
DEVICE void copy_async_16(void* shared, const void* global, int size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(size)
               : "memory");
}
template <int SIZE>
DEVICE void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)),
               "l"(global), "n"(SIZE)
               : "memory");
}
DEVICE void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// What cards before the H100 lack: a kernel that starts before the one before it has ended, and
// clusters of blocks that write to each other's shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE uint32_t address_in_block(const void* shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(shared)), "r"(rank));
  return address;
}
DEVICE void write_in_block(float* shared, int rank, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_block(shared, rank)), "f"(value)
               : "memory");
}
DEVICE void write_in_block(float4* shared, int rank, float4 value) {
  asm volatile(
      "st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_in_block(shared, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}
#else
DEVICE void let_next_kernel_start() {}
DEVICE void wait_for_previous_kernel() {}
DEVICE void arrive_in_cluster() { __trap(); }
DEVICE void wait_for_cluster() { __trap(); }
template <class T>
DEVICE void write_in_block(T*, int, T) {
  __trap();
}
#endif

}  // namespace jaxllm
#endif
