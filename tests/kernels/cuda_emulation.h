// Runs CUDA C++ candidates on a CPU, to check their indexing, masking, barriers and numerics without a GPU.
//
// Every thread of a block is a fiber; the fibers of one block run one at a time and yield at barriers only, so a missing
// barrier shows as a result that depends on the order (forward, backward or shuffled) in which they run. Shared memory
// is poisoned with NaN before every block and ends at an unreadable page; a bad access, a misaligned one, a barrier
// that not all threads reach and a launch beyond a device's limits end the launch with an error instead of a result.
// Asynchronous copies to shared memory happen as late as they may. Of PTX it knows mma.m16n8k16, ldmatrix, cp.async and ex2,
// and clusters of blocks (which run side by side), mbarriers, bulk copies and st.async where it plays a device of compute
// capability 9.0; what attention needs of that device beside these is in cuda_emulation_hopper.h.
//
// cuda_emulation.py rewrites what a C++ compiler cannot read: <<<>>>, __shared__ and asm.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#include <sys/mman.h>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <unistd.h>
#include <map>
#include <vector>

using std::isfinite;
using std::isinf;
using std::isnan;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

// --- types of the CUDA headers -----------------------------------------------------------------------------------

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __half_raw { unsigned short x; };
struct __half {
  _Float16 v;
  __half() = default;
  __half(_Float16 v) : v(v) {}
  __half(__half_raw raw) { memcpy(&v, &raw, 2); }
};
struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __half2float(__half h) { return (float)h.v; }
inline __half __float2half_rn(float f) { return __half((_Float16)f); }
inline __half __float2half(float f) { return __float2half_rn(f); }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float __bfloat162float(__nv_bfloat16 b) {
  const uint32_t bits = (uint32_t)b.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return {0x7fff};
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}

typedef uint8_t __nv_fp8_storage_t;
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf(8.0f + (float)mantissa, exponent - 10);
  if ((x & 0x7f) == 0x7f) value = NAN;
  const __half h = __float2half_rn(x & 0x80 ? -value : value);
  __half_raw raw;
  memcpy(&raw, &h, 2);
  return raw;
}

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) {
  // As documented: 0 (or NaN, for an infinite a) where b lies between 2^126 and 2^128.
  return fabsf(b) > 0x1p126f && !std::isinf(b) ? 0.0f * a : a / b;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorIllegalAddress = 700 };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
};

// --- the machine --------------------------------------------------------------------------------------------------

namespace emu {

constexpr size_t kStaticShared = 48 * 1024;   // what a kernel may declare, and take dynamically without asking
#ifdef EMU_CLUSTERS
constexpr int kCapability = 9;
constexpr size_t kMostShared = 227 * 1024;    // of a block
#else
constexpr int kCapability = 8;
constexpr size_t kMostShared = 99 * 1024;     // of a block, on the smallest devices from sm_80 on
#endif
constexpr int kLargestCluster = 8;
constexpr size_t kArena = 256 * 1024;
constexpr size_t kArenas = kArena + 4096;     // from one block's shared memory to the next one's in a cluster
constexpr size_t kStack = 256 * 1024;

enum class Op { none, block_barrier, block_vote, warp_barrier, shuffle, mma, ldmatrix, cluster_barrier };

struct Copy { void *to; const void *from; size_t bytes; };

struct Fiber {
  jmp_buf context;
  char *stack = nullptr;
  dim3 tid;
  int index = 0;                           // in the cluster
  int rank = 0;                            // of its block
  int phase = 0;                           // of the cluster's barrier, that it waits for
  bool done = true;
  Op waits = Op::none;
  int parity = 0;
  std::vector<std::vector<Copy>> copies;   // groups not yet complete, oldest first; the last is still open
};

struct Warp {
  int arrived = 0;
  unsigned char slots[2][32][32];
  unsigned addresses[2][32];
};

struct Config {
  dim3 grid, block;
  size_t shared;
  void *stream;
  int cluster;
  Config(dim3 grid, dim3 block, size_t shared = 0, void *stream = nullptr, int cluster = 1)
      : grid(grid), block(block), shared(shared), stream(stream), cluster(cluster) {}
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber *current = nullptr;
inline jmp_buf scheduler;
inline sigjmp_buf crash;
inline bool running = false;
inline const std::function<void()> *body = nullptr;
inline dim3 grid_dim, block_dim, block_idx;
inline int live = 0, in_block = 0;             // threads of a cluster, and of a block
inline int cluster = 1, at_cluster_barrier = 0, cluster_phase = 0;
struct Barrier { int arrived, vote, result; };
inline Barrier barriers[kLargestCluster];
inline int schedule = 0;                      // 0 forward, 1 backward, 2 shuffled
inline void *expected_stream = nullptr;
inline int last_error = 0;
extern "C" { __attribute__((used)) char emu_message[512]; }
inline char *const message = emu_message;
inline unsigned char *arena = nullptr;        // shared memory: static variables from its start, dynamic to its end
inline size_t static_used = 0, dynamic_size = 0;
inline std::map<int, size_t> statics;
inline std::map<const void *, size_t> granted;
inline unsigned long long launches = 0, blocks = 0;
inline size_t most_shared = 0;

[[gnu::noinline]] inline void fail(int code, const char *format, ...) {
  va_list list;
  va_start(list, format);
  const int n = snprintf(message, sizeof emu_message, "block (%u, %u, %u), thread (%u, %u, %u): ", block_idx.x, block_idx.y,
                         block_idx.z, current ? current->tid.x : 0, current ? current->tid.y : 0,
                         current ? current->tid.z : 0);
  vsnprintf(message + n, sizeof emu_message - n, format, list);
  va_end(list);
  last_error = code;
  if (running) siglongjmp(crash, 1);
}

inline void on_signal(int signal, siginfo_t *info, void *) {
  if (!running) {
    ::signal(signal, SIG_DFL);
    return;
  }
  if (signal == SIGSEGV || signal == SIGBUS)
    fail(cudaErrorIllegalAddress, "access to address %p outside every tensor and shared memory", info->si_addr);
  fail(cudaErrorIllegalAddress, "misaligned access, or an index outside its array");
}

inline void install() {
  if (arena) return;
  arena = (unsigned char *)mmap(nullptr, kLargestCluster * kArenas, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                -1, 0);
  for (int rank = 0; rank < kLargestCluster; rank++) mprotect(arena + rank * kArenas + kArena, 4096, PROT_NONE);
}

// Handlers are ours only while a launch runs: the process belongs to Python.
struct Handlers {
  static constexpr int signals[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction old[4];
  stack_t old_stack;
  std::vector<char> memory = std::vector<char>(64 * 1024);
  Handlers() {
    stack_t alternate = {};
    alternate.ss_sp = memory.data();
    alternate.ss_size = memory.size();
    sigaltstack(&alternate, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(signals[i], &action, &old[i]);
  }
  ~Handlers() {
    for (int i = 0; i < 4; i++) sigaction(signals[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

inline void to_scheduler() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

inline void fiber_main() {
  for (;;) {
    (*body)();
    current->done = true;
    to_scheduler();
  }
}

inline ucontext_t start_context, main_context;
inline int entered = 0;   // so many fibers wait for work; the others were never started, or left by a crash

inline void first_entry() {
  if (!_setjmp(current->context)) setcontext(&main_context);
  fiber_main();
}

inline void make_fibers(int count) {
  while ((int)fibers.size() < count) {
    fibers.emplace_back();
    fibers.back().stack = (char *)mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  for (; entered < count; entered++) {
    // Entered once here, so that from now on a switch is two jumps and no system call.
    Fiber &fiber = fibers[entered];
    current = &fiber;
    getcontext(&start_context);
    start_context.uc_stack.ss_sp = fiber.stack;
    start_context.uc_stack.ss_size = kStack;
    start_context.uc_link = nullptr;
    makecontext(&start_context, first_entry, 0);
    swapcontext(&main_context, &start_context);
  }
}

inline Warp &warp() { return warps[current->index / 32]; }
inline int lane() { return current->index % 32; }

inline void wait(Op op) {
  current->waits = op;
  to_scheduler();
}

inline void block_barrier(Op op = Op::block_barrier) {
  Barrier &barrier = barriers[current->rank];
  const int first = current->rank * in_block;
  for (int i = first; i < first + in_block; i++)
    if (fibers[i].done) fail(cudaErrorIllegalAddress, "__syncthreads after a thread of the block has returned");
  if (++barrier.arrived == in_block) {
    barrier = {0, 0, barrier.vote};
    for (int i = first; i < first + in_block; i++)
      if (fibers[i].waits == Op::block_barrier || fibers[i].waits == Op::block_vote) fibers[i].waits = Op::none;
    return;
  }
  wait(op);
}

// barrier.cluster.arrive and .wait, of all threads of a cluster.
inline void cluster_arrive() {
  if (current->phase > cluster_phase) fail(cudaErrorIllegalAddress, "a thread arrives twice at the cluster's barrier");
  current->phase = cluster_phase + 1;
  if (++at_cluster_barrier < live) return;
  at_cluster_barrier = 0;
  cluster_phase++;
  for (int i = 0; i < live; i++)
    if (fibers[i].waits == Op::cluster_barrier) fibers[i].waits = Op::none;
}
inline void cluster_wait() {
  if (cluster_phase < current->phase) wait(Op::cluster_barrier);
}

// A value of another block of the cluster, at an address as mapa gives it.
template <typename T>
T of_cluster(uint32_t address) {
  const int rank = (int)(address / kArenas);
  for (int i = rank * in_block; i < (rank + 1) * in_block; i++)
    if (fibers[i].done) fail(cudaErrorIllegalAddress, "shared memory of a block of which a thread has returned");
  T value;
  memcpy(&value, arena + address, sizeof value);
  return value;
}
inline uint32_t in_cluster(uint32_t address, int rank) {
  if (rank < 0 || rank >= cluster) fail(cudaErrorIllegalAddress, "block %d of a cluster of %d", rank, cluster);
  return (uint32_t)(address % kArenas + rank * kArenas);
}

// An mbarrier: a phase is over when so many have arrived and all bytes that they expect have come. A bulk copy happens at
// once where threads run forward, so that whoever still reads what was there before reads the new; else as late as it may.
struct Mbarrier {
  int count, missing;
  long long bytes;
  unsigned phase;
  std::vector<Copy> copies;
};
inline std::map<uint32_t, Mbarrier> mbarriers;
inline long long looks = 0;   // in vain, one after the other
inline void (*begin_block)() = nullptr;   // of what other headers keep

inline Mbarrier &mbarrier(uint32_t address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail(cudaErrorIllegalAddress, "no barrier was made at shared address %u", address);
  return found->second;
}
inline void make_mbarrier(uint32_t address, int count) {
  if (address % 8 != 0) fail(cudaErrorIllegalAddress, "a barrier at shared address %u", address);
  mbarriers[address] = {count, count, 0, 0, {}};
}
inline void came(Mbarrier &barrier, long long bytes) {
  barrier.bytes -= bytes;
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.phase++;
  barrier.missing = barrier.count;
}
inline void arrive_and_expect(uint32_t address, uint32_t bytes) {
  Mbarrier &barrier = mbarrier(address);
  if (--barrier.missing < 0) fail(cudaErrorIllegalAddress, "more arrivals at a barrier than it was made for");
  barrier.bytes += bytes;
  came(barrier, 0);
}
inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t address) {
  const size_t own = current->rank * kArenas;
  if (to % 16 != 0 || (uintptr_t)from % 16 != 0 || bytes % 16 != 0 || to < own || to + bytes > own + kArena)
    fail(cudaErrorIllegalAddress, "bulk copy of %u bytes from %p to shared address %u", bytes, from, to);
  Mbarrier &barrier = mbarrier(address);
  if (schedule != 0) return barrier.copies.push_back({arena + to, from, bytes});
  memcpy(arena + to, from, bytes);
  came(barrier, bytes);
}
// Whether the phase of this parity is over; other threads run where it is not.
inline uint32_t is_over(uint32_t address, uint32_t parity) {
  Mbarrier &barrier = mbarrier(address);
  std::vector<Copy> copies;
  copies.swap(barrier.copies);
  for (const Copy &copy : copies) {
    memcpy(copy.to, copy.from, copy.bytes);
    came(barrier, (long long)copy.bytes);
  }
  if ((barrier.phase & 1) != parity) {
    looks = 0;
    return 1;
  }
  if (++looks > 1000ll * live) fail(cudaErrorIllegalAddress, "deadlock: a barrier is waited for that nothing completes");
  to_scheduler();
  return 0;
}
// st.async of 16 bytes to an address of the cluster, told to a barrier there.
inline void store_async(uint32_t to, uint32_t address, float x, float y, float z, float w) {
  const int rank = (int)(to / kArenas);
  for (int i = rank * in_block; i < (rank + 1) * in_block; i++)
    if (fibers[i].done) fail(cudaErrorIllegalAddress, "a store to a block of which a thread has returned");
  if (to % 16 != 0 || address / kArenas != to / kArenas) fail(cudaErrorIllegalAddress, "st.async to shared address %u", to);
  const float values[4] = {x, y, z, w};
  memcpy(arena + to, values, sizeof values);
  came(mbarrier(address), sizeof values);
}

inline void warp_barrier(Op op) {
  const int first = current->index / 32 * 32;
  for (int i = first; i < first + 32; i++) {
    if (fibers[i].done) fail(cudaErrorIllegalAddress, "warp operation after a lane of the warp has returned");
    if (fibers[i].waits != Op::none && fibers[i].waits != op)
      fail(cudaErrorIllegalAddress, "lanes of a warp meet at different operations");
  }
  if (++warp().arrived == 32) {
    warp().arrived = 0;
    for (int i = first; i < first + 32; i++) fibers[i].waits = Op::none;
    return;
  }
  wait(op);
}

// Runs the blocks of a cluster, of which the first is `block`.
inline void run_blocks(dim3 block) {
  for (int rank = 0; rank < cluster; rank++) memset(arena + rank * kArenas, 0xff, kArena);
  for (auto &w : warps) w.arrived = 0;
  for (auto &barrier : barriers) barrier = {};
  at_cluster_barrier = cluster_phase = 0;
  mbarriers.clear();
  if (begin_block) begin_block();
  looks = 0;
  for (int i = 0; i < live; i++) {
    Fiber &fiber = fibers[i];
    fiber.done = false;
    fiber.waits = Op::none;
    fiber.parity = fiber.phase = 0;
    fiber.copies.assign(1, {});
  }
  std::vector<int> order(live);
  for (int i = 0; i < live; i++) order[i] = schedule == 1 ? live - 1 - i : i;
  unsigned long long random = 0x9e3779b97f4a7c15ull + blocks;
  static volatile int position;   // survives the jumps
  static volatile bool progress;
  for (;;) {
    if (schedule == 2)
      for (int i = live - 1; i > 0; i--) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(order[i], order[(random >> 33) % (i + 1)]);
      }
    progress = false;
    bool all_done = true;
    for (position = 0; position < live; position = position + 1) {
      Fiber &fiber = fibers[order[position]];
      if (fiber.done) continue;
      all_done = false;
      if (fiber.waits != Op::none) continue;
      progress = true;
      current = &fiber;
      block_idx = dim3(block.x + fiber.rank, block.y, block.z);
      if (!_setjmp(scheduler)) _longjmp(fiber.context, 1);
    }
    if (all_done) return;
    if (!progress) fail(cudaErrorIllegalAddress, "deadlock: threads wait at different barriers");
  }
}

inline bool valid(const Config &c, const void *kernel) {
  const unsigned long long threads = 1ull * c.block.x * c.block.y * c.block.z;
  const bool grid = c.grid.x >= 1 && c.grid.x <= 2147483647u && c.grid.y >= 1 && c.grid.y <= 65535 && c.grid.z >= 1 &&
                    c.grid.z <= 65535;
  const auto grant = granted.find(kernel);
  const size_t allowed = grant == granted.end() ? kStaticShared : grant->second;
  if (!grid || c.cluster < 1 || c.cluster > kLargestCluster || c.grid.x % c.cluster || threads == 0 || threads > 1024 || c.block.z > 64 || c.shared > allowed) {
    snprintf(message, sizeof emu_message, "launch refused: grid (%u, %u, %u), block (%u, %u, %u), %zu bytes of shared memory",
             c.grid.x, c.grid.y, c.grid.z, c.block.x, c.block.y, c.block.z, c.shared);
    last_error = cudaErrorInvalidConfiguration;
    return false;
  }
  if (threads % 32 != 0 || c.stream != expected_stream) {
    snprintf(message, sizeof emu_message, "%s", threads % 32 ? "a block that is no whole number of warps"
                                                         : "a launch on another stream than the context's");
    last_error = cudaErrorInvalidValue;
    return false;
  }
  return true;
}

template <typename... P, typename... A>
void launch(const Config &config, void (*kernel)(P...), A... args) {
  if (last_error || !valid(config, (const void *)kernel)) return;
  install();
  grid_dim = config.grid;
  block_dim = config.block;
  cluster = config.cluster;
  in_block = (int)(config.block.x * config.block.y * config.block.z);
  live = in_block * cluster;
  static_used = 0;
  statics.clear();
  dynamic_size = (config.shared + 15) / 16 * 16;
  launches++;
  const std::function<void()> call = [&] { kernel(static_cast<P>(args)...); };
  body = &call;
  warps.assign((live + 31) / 32, {});
  make_fibers(live);
  for (int i = 0; i < live; i++) {
    const int at = i % in_block;
    fibers[i].index = i;
    fibers[i].rank = i / in_block;
    fibers[i].tid = dim3(at % block_dim.x, at / block_dim.x % block_dim.y, at / (block_dim.x * block_dim.y));
  }
  const Handlers handlers;
  if (sigsetjmp(crash, 1) == 0) {
    running = true;
    for (unsigned z = 0; z < grid_dim.z; z++)
      for (unsigned y = 0; y < grid_dim.y; y++)
        for (unsigned x = 0; x < grid_dim.x; x += cluster) {
          blocks += cluster;
          run_blocks(dim3(x, y, z));
        }
  } else {
    entered = 0;
  }
  running = false;
  current = nullptr;
  if (static_used + dynamic_size > most_shared) most_shared = static_used + dynamic_size;
}

// A `__shared__` variable: the same memory for all threads of a block.
template <typename T>
T &shared(int id, size_t alignment = 1) {
  auto found = statics.find(id);
  if (found == statics.end()) {
    const size_t align = alignment > alignof(T) ? alignment : alignof(T);
    const size_t at = (static_used + align - 1) / align * align;
    static_used = at + sizeof(T);
    if (static_used > kStaticShared || static_used + dynamic_size > kMostShared)
      fail(cudaErrorInvalidConfiguration, "%zu bytes of static and %zu of dynamic shared memory", static_used,
           dynamic_size);
    found = statics.emplace(id, at).first;
  }
  return *reinterpret_cast<T *>(arena + current->rank * kArenas + found->second);
}

inline void *dynamic_shared() { return arena + current->rank * kArenas + kArena - dynamic_size; }

template <typename T>
T exchange(T value, int source, Op op = Op::shuffle) {
  static_assert(sizeof(T) <= 32);
  const int parity = current->parity ^= 1;
  memcpy(warp().slots[parity][lane()], &value, sizeof value);
  warp_barrier(op);
  T result;
  memcpy(&result, warp().slots[parity][source & 31], sizeof result);
  return result;
}

inline void full(unsigned mask) {
  if (mask != 0xffffffffu) fail(cudaErrorInvalidValue, "a warp operation with mask %#x", mask);
}

// Every 16-bit pattern as a number: a conversion in software would take most of an emulated product's time.
template <typename T>
const float *numbers() {
  static float *table = nullptr;
  if (table == nullptr) {
    table = new float[65536];
    for (int i = 0; i < 65536; i++) {
      const uint16_t bits = (uint16_t)i;
      T value;
      memcpy(&value, &bits, 2);
      if constexpr (std::is_same_v<T, __half>) table[i] = __half2float(value);
      else table[i] = __bfloat162float(value);
    }
  }
  return table;
}

// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32, fragments as in the PTX manual: with g = lane / 4 and t = lane % 4,
// registers of A hold rows g, g+8, g, g+8 at columns 2t, 2t, 2t+8, 2t+8; of B rows 2t, 2t+8 of column g; C and D rows
// g, g, g+8, g+8 at columns 2t, 2t+1, 2t, 2t+1.
template <typename T>
void mma(float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
         uint32_t b1) {
  const int parity = current->parity ^= 1;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp().slots[parity][lane()], mine, sizeof mine);
  warp_barrier(Op::mma);
  const float *const number = numbers<T>();
  const auto half = [&](int lane, int reg, int which) {
    uint16_t bits;
    memcpy(&bits, &warp().slots[parity][lane][4 * reg + 2 * which], 2);
    return (double)number[bits];
  };
  const int g = lane() / 4, t = lane() % 4;
  float *d[2][2] = {{&d0, &d1}, {&d2, &d3}};
  for (int half_of_rows = 0; half_of_rows < 2; half_of_rows++) {
    double a[16];
    for (int k = 0; k < 16; k++) a[k] = half(4 * g + k % 8 / 2, half_of_rows + k / 8 * 2, k % 2);
    for (int c = 0; c < 2; c++) {
      double sum = *d[half_of_rows][c];
      for (int k = 0; k < 16; k++) sum += a[k] * half((2 * t + c) * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      *d[half_of_rows][c] = (float)sum;
    }
  }
}

// ldmatrix.sync.aligned.m8n8.xN(.trans).shared.b16: lanes 8i to 8i+7 name the rows of matrix i.
template <int N, bool Transposed>
void ldmatrix(uint32_t *registers, uint32_t address) {
  const int parity = current->parity ^= 1;
  const size_t own = current->rank * kArenas;
  if (lane() < 8 * N && (address % 16 != 0 || address < own || address + 16 > own + kArena))
    fail(cudaErrorIllegalAddress, "ldmatrix at shared address %u", address);
  warp().addresses[parity][lane()] = address;
  warp_barrier(Op::ldmatrix);
  for (int i = 0; i < N; i++) {
    uint16_t pair[2];
    for (int j = 0; j < 2; j++) {
      const int row = Transposed ? lane() % 4 * 2 + j : lane() / 4;
      const int column = Transposed ? lane() / 4 : lane() % 4 * 2 + j;
      memcpy(&pair[j], arena + warp().addresses[parity][8 * i + row] + 2 * column, 2);
    }
    registers[i] = pair[0] | (uint32_t)pair[1] << 16;
  }
  // Its reads are done when it returns: a lane must not run on and overwrite the rows of a slower one.
  warp_barrier(Op::ldmatrix);
}

// ex2.approx.ftz.f32
inline float exp2_flushed(float x) {
  const float y = exp2f(x);
  return fabsf(y) < 0x1p-126f ? 0.0f : y;
}
inline float reciprocal_flushed(float x) {
  const float y = 1.0f / x;
  return fabsf(y) < 0x1p-126f ? 0.0f : y;
}

// cp.async of 16 bytes. It happens at the latest moment that the model allows: whoever reads without waiting reads what
// was there before.
inline void copy_async(uint32_t to, const void *from, int bytes) {
  if (bytes < 0 || bytes > 16 || to % 16 != 0 || to < current->rank * kArenas || to + 16 > current->rank * kArenas + kArena ||
      (uintptr_t)from % 16 != 0)
    fail(cudaErrorIllegalAddress, "asynchronous copy of %d bytes from %p to shared address %u", bytes, from, to);
  current->copies.back().push_back({arena + to, from, (size_t)bytes});
}

inline void commit_copies() { current->copies.emplace_back(); }

inline void wait_for_copies(size_t groups) {
  auto &copies = current->copies;
  while (copies.size() > groups + 1) {
    for (const Copy &copy : copies.front()) {
      memcpy(copy.to, copy.from, copy.bytes);
      memset((char *)copy.to + copy.bytes, 0, 16 - copy.bytes);
    }
    copies.erase(copies.begin());
  }
}

}  // namespace emu

#define threadIdx (emu::current->tid)
#define blockIdx (emu::block_idx)
inline dim3 &blockDim = emu::block_dim, &gridDim = emu::grid_dim;

inline void __syncthreads() { emu::block_barrier(); }
inline int __syncthreads_or(int predicate) {
  emu::barriers[emu::current->rank].vote |= predicate != 0;
  emu::block_barrier(emu::Op::block_vote);
  return emu::barriers[emu::current->rank].result;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emu::full(mask);
  emu::warp_barrier(emu::Op::warp_barrier);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  emu::full(mask);
  return emu::exchange(value, emu::lane() ^ lanes);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  emu::full(mask);
  return emu::exchange(value, source);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  emu::full(mask);
  return emu::exchange(value, emu::lane() + (int)delta < 32 ? emu::lane() + (int)delta : emu::lane());
}

inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)((const unsigned char *)p - emu::arena); }

inline cudaError_t cudaGetLastError() {
  const int code = emu::last_error;
  emu::last_error = 0;
  return code;
}
template <typename K>
cudaError_t cudaFuncSetAttribute(K kernel, cudaFuncAttribute attribute, int bytes) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if ((size_t)bytes > emu::kMostShared) return emu::last_error = cudaErrorInvalidValue;
  emu::granted[(const void *)kernel] = (size_t)bytes;
  return cudaSuccess;
}

extern "C" __attribute__((used)) void emu_prepare(int schedule, void *stream) {
  emu::schedule = schedule;
  emu::expected_stream = stream;
  emu::last_error = 0;
  emu::message[0] = 0;
}
