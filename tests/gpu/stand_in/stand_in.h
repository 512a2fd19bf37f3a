// A CPU in place of a GPU: the names of device.h, so that tests run the kernels' own sources.
//
// Each thread of a cluster is a fiber that runs until it waits. What a GPU leaves open is decided
// against the kernel, or by chance: shared memory begins as NaN, asynchronous copies happen when
// they are issued or only at the wait, the clusters run in any order, one after another, and
// what the kernel before writes is NaN until it is waited for. `launch` returns the first
// mistake: reads outside of arrays, writes outside of shared memory or to a block that has not
// started or has ended, and threads that wait forever.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};

#define DEVICE inline
#define KERNEL(threads, blocks) static void
#define JAXLLM_UNROLL
#define JAXLLM_UNROLL_BY(count)

namespace jaxllm {
namespace stand_in {

constexpr int BLOCK = 256, STACK = 1 << 16, GUARD = 4096;

// An array that the kernel may read. If `late` is given, its contents are only there after the
// wait for the kernel before.
struct Array {
  unsigned char* data;
  const unsigned char* late;
  int64_t size;
};
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int size, zeros;
};
struct Thread {
  ucontext_t start;
  jmp_buf here;
  int rank, index;
  bool started = false, ended = false;
  const long* counter = nullptr;  // runs once this has reached `needed`
  long needed = 0, arrivals = 0;
  std::vector<std::vector<Copy>> copies{1};  // groups, the last one open
};
struct Barrier {
  int waiting = 0;
  long passed = 0;
};
struct Warp {
  Barrier barrier;
  uint32_t values[32][6];
};
struct Block {
  Barrier barrier;
  Warp warps[BLOCK / 32];
  std::vector<unsigned char> shared;
  int started = 0, ended = 0;
  unsigned char* memory() { return (unsigned char*)((uintptr_t(shared.data()) + 127) / 128 * 128); }
};

inline std::vector<Thread> threads;
inline std::vector<Block> blocks;  // of the cluster that runs
inline std::vector<char> stacks;
inline Thread* current;
inline ucontext_t scheduler_start;
inline jmp_buf scheduler;
inline void (*body)();
inline long cluster_arrivals;
inline int first_block, block_number;
inline unsigned chance;
inline const char* mistake;
inline const Array* arrays;
inline int array_count;
inline bool previous_ended;

inline void report(const char* what) {
  if (!mistake) mistake = what;
}
inline unsigned next_chance() { return (chance = chance * 1664525u + 1013904223u) >> 8; }
inline Block& block() { return blocks[current->rank]; }
inline Warp& warp() { return block().warps[current->index / 32]; }

// Run other threads until a counter has reached a number.
inline void wait_until(const long& counter, long needed) {
  if (counter >= needed) return;
  current->counter = &counter;
  current->needed = needed;
  if (!_setjmp(current->here)) _longjmp(scheduler, 1);
}
inline void pass(Barrier& barrier, int members) {
  const long turn = barrier.passed + 1;
  if (++barrier.waiting == members) {
    barrier.waiting = 0;
    barrier.passed = turn;
  }
  wait_until(barrier.passed, turn);
}
inline void check_read(const void* from, int64_t size) {
  const unsigned char* at = (const unsigned char*)from;
  for (int i = 0; i < array_count; i++)
    if (at >= arrays[i].data && at + size <= arrays[i].data + arrays[i].size) return;
  report("a read outside of the arrays");
}
inline void happen(const Copy& copy) {
  memcpy(copy.to, copy.from, copy.size);
  memset(copy.to + copy.size, 0, copy.zeros);
}
inline void copy_later(void* to, const void* from, int size, int zeros) {
  if (size) check_read(from, size);
  const Copy copy = {(unsigned char*)to, (const unsigned char*)from, size, zeros};
  if (next_chance() % 2)
    happen(copy);
  else
    current->copies.back().push_back(copy);
}
inline void start_thread() {
  block().started++;
  body();
  block().ended++;
  current->ended = true;
  _longjmp(scheduler, 1);
}
inline void resume(Thread& thread) {
  current = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.here, 1);
  thread.started = true;
  setcontext(&thread.start);
}
// Run threads until all of them wait: those of a warp, then its block's, then the other blocks', so
// that what a thread does not wait for has not happened. Return whether any ran.
inline bool run(size_t first, size_t count) {
  if (count == 1) {
    Thread& thread = threads[first];
    if (thread.ended || (thread.counter && *thread.counter < thread.needed)) return false;
    thread.counter = nullptr;
    resume(thread);
    return true;
  }
  const size_t part = count > BLOCK ? BLOCK : count > 32 ? 32 : 1;
  bool ran = false;
  for (bool again = true; again && !mistake; ran |= again) {
    again = false;
    for (size_t i = 0; i < count; i += part) again |= run(first + i, part);
  }
  return ran;
}
inline void run_cluster(int first, int size, int shared_bytes) {
  first_block = first;
  cluster_arrivals = 0;
  threads.assign(size * BLOCK, Thread());
  stacks.resize(size_t(STACK) * threads.size());
  blocks.assign(size, Block());
  for (Block& block : blocks) block.shared.assign(shared_bytes + 128 + GUARD, 0xFF);
  for (size_t i = 0; i < threads.size(); i++) {
    Thread& thread = threads[i];
    thread.rank = i / BLOCK;
    thread.index = i % BLOCK;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = stacks.data() + STACK * i;
    thread.start.uc_stack.ss_size = STACK;
    makecontext(&thread.start, start_thread, 0);
  }
  run(0, threads.size());
  for (Block& block : blocks) {
    if (block.ended != BLOCK) report("threads wait forever");
    for (int i = 0; i < GUARD; i++)
      if (block.memory()[shared_bytes + i] != 0xFF) report("a write beyond shared memory");
  }
}
inline const char* launch(int grid, int cluster, int shared_bytes, unsigned seed,
                          void (*kernel)()) {
  std::vector<int> order(grid / cluster);
  chance = seed, body = kernel, block_number = grid, mistake = nullptr, previous_ended = false;
  for (size_t i = 0; i < order.size(); i++) {
    const size_t other = next_chance() % (i + 1);
    order[i] = order[other];
    order[other] = i;
  }
  for (int i : order)
    if (!mistake) run_cluster(i * cluster, cluster, shared_bytes);
  return mistake;
}
template <class T>
T* in_block(T* pointer, int rank) {
  Block& other = blocks[rank];
  if (!other.started) report("a write to a block that has not started");
  if (other.ended) report("a write to a block that has ended");
  return (T*)(other.memory() + ((unsigned char*)pointer - block().memory()));
}
inline float to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

}  // namespace stand_in

inline int thread_index() { return stand_in::current->index; }
inline int block_index() { return stand_in::first_block + stand_in::current->rank; }
inline int block_count() { return stand_in::block_number; }
inline unsigned char* shared_memory() { return stand_in::block().memory(); }

inline void block_barrier() { stand_in::pass(stand_in::block().barrier, stand_in::BLOCK); }
inline void warp_barrier() { stand_in::pass(stand_in::warp().barrier, 32); }
inline float shuffle_xor(float value, int mask) {
  stand_in::Warp& warp = stand_in::warp();
  const int lane = thread_index() % 32;
  memcpy(warp.values[lane], &value, 4);
  warp_barrier();
  const float other = stand_in::to_float(warp.values[lane ^ mask][0]);
  warp_barrier();
  return other;
}

inline float low_float(uint32_t pair) { return stand_in::to_float(pair << 16); }
inline float high_float(uint32_t pair) { return stand_in::to_float(pair & 0xFFFF0000u); }
inline uint32_t round_pair(float low, float high) {
  uint32_t bits[2];
  memcpy(bits, &low, 4);
  memcpy(bits + 1, &high, 4);
  for (uint32_t& x : bits)
    x = (x & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (x + 0x7FFF + (x >> 16 & 1)) >> 16;
  return bits[0] | bits[1] << 16;
}
inline uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  return round_pair(fmaf(low_float(a), low_float(b), low_float(c)),
                    fmaf(high_float(a), high_float(b), high_float(c)));
}
inline float half_to_float(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float value = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return half >> 15 ? -value : value;
}
inline float exp2_of(float x) { return exp2f(x); }
inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  if (selector & 0x8888) stand_in::report("a selector of a byte's sign");
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t selected = 0;
  for (int i = 0; i < 4; i++) selected |= (bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return selected;
}
inline void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  stand_in::Warp& warp = stand_in::warp();
  const int lane = thread_index() % 32;
  memcpy(warp.values[lane], a, 16);
  memcpy(warp.values[lane] + 4, b, 8);
  warp_barrier();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
    float products = 0;
    for (int k = 0; k < 8; k++) {  // pairs
      const uint32_t left = warp.values[row * 4 + k % 4][half + k / 4 * 2];
      const uint32_t right = warp.values[column * 4 + k % 4][4 + k / 4];
      products += low_float(left) * low_float(right);
      products += high_float(left) * high_float(right);
    }
    sum[i] += products;
  }
  warp_barrier();
}

template <class T>
T read_global(const T* pointer) {
  stand_in::check_read(pointer, sizeof(T));
  return *pointer;
}
inline void prefetch_global(const void* pointer) { stand_in::check_read(pointer, 2); }
inline void copy_async_16(void* shared, const void* global, int size) {
  stand_in::copy_later(shared, global, size, 16 - size);
}
template <int SIZE>
void copy_async(void* shared, const void* global) {
  stand_in::copy_later(shared, global, SIZE, 0);
}
inline void end_copy_group() { stand_in::current->copies.emplace_back(); }
template <int N>
void wait_for_copies() {
  auto& groups = stand_in::current->copies;
  for (; groups.size() > N + 1; groups.erase(groups.begin()))
    for (const stand_in::Copy& copy : groups[0]) stand_in::happen(copy);
}

inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {
  for (int i = 0; i < stand_in::array_count && !stand_in::previous_ended; i++)
    if (const auto& array = stand_in::arrays[i]; array.late)
      memcpy(array.data, array.late, array.size);
  stand_in::previous_ended = true;
}
inline void arrive_in_cluster() {
  stand_in::cluster_arrivals++;
  stand_in::current->arrivals++;
}
inline void wait_for_cluster() {
  stand_in::wait_until(stand_in::cluster_arrivals,
                       stand_in::current->arrivals * long(stand_in::threads.size()));
}
inline void write_in_block(float* shared, int rank, float value) {
  *stand_in::in_block(shared, rank) = value;
}
inline void write_in_block(float4* shared, int rank, float4 value) {
  *stand_in::in_block(shared, rank) = value;
}

}  // namespace jaxllm
