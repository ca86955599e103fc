// kernel_type: softmax
//
// y = exp(x - max(x)) / sum(exp(x - max(x))) along one dimension, in fp32. A dense row is read once, in 16-byte packs that
// its threads hold in registers: few lanes where it is short, a block where it is long; where it is longer, the block's
// shared memory holds it, or the registers of a cluster of blocks. Rows may start anywhere, as long as x and y start at the
// same distance from a 16-byte boundary. Longer ones are read twice, with a running maximum and sum. Along any other dimension a
// block takes a tile of columns that lie side by side, in packs where memory lets it, and holds it in registers, if need be
// with the others of a cluster; a longer one is read twice. Where neither the dimension nor what is behind it lies densely,
// each lane takes a line of its own.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kHeld = 2;        // tune(memory): 1, 2, 4, 8
constexpr int kThreads = 128;   // tune(block): 64, 128, 256, 512
constexpr int kColdLoad = 0;    // tune(memory): 0, 1
constexpr int kColdStore = 0;   // tune(memory): 0, 1
constexpr int kHeldLong = 8;    // tune(memory): 2, 4, 8
constexpr int kRowThreads = 512;  // tune(block): 256, 512
constexpr int kColumnHeld = 8;  // tune(memory): 2, 4, 8
constexpr int kColumnPacks = 4;  // tune(block): 2, 4, 8

namespace {

constexpr int kMaxThreads = 512;  // so that a thread may have 128 registers
constexpr int kMost = 8;          // packs of a thread in rows that one block holds where there are no clusters
constexpr int kLooseHeld = kHeldLong < 4 ? kHeldLong : 4;  // where a cluster's row starts anywhere
constexpr int kLargestCluster = 8;
constexpr int kColumnThreads = 256;  // of a tile of columns
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kColumnBlocks = 2;  // the compiler takes more registers there
#else
constexpr int kColumnBlocks = 3;  // of these a multiprocessor has, so that a thread may have 80 registers
#endif
constexpr int kUnroll = 4;   // packs of a thread that are on their way where rows are read twice
constexpr int kSlices = 8;   // parts of a line that is read across strides
constexpr int kShared = 112 << 10;  // bytes of the longest row that is held in shared memory: two of them at a time
static_assert(kRowThreads % 32 == 0 && kRowThreads <= kMaxThreads, "a block is whole warps");
static_assert(kColumnHeld >= 1 && kColumnHeld <= 8, "a thread holds its packs in registers");
static_assert(kColumnPacks <= 32 && (kColumnPacks & (kColumnPacks - 1)) == 0, "lanes of a warp have the same columns");
static_assert(kHeld >= 1 && kHeldLong <= kMost && kHeld <= kMost, "a thread holds its packs in registers");
static_assert(kThreads % 32 == 0 && kThreads <= kMaxThreads, "a block is whole warps");

// A 32-bit word of elements, to and from float.
template <typename T>
constexpr int kInWord = 4 / (int)sizeof(T);

__device__ __forceinline__ void widen(uint32_t word, float *v, float) { v[0] = __uint_as_float(word); }
__device__ __forceinline__ void widen(uint32_t word, float *v, __nv_bfloat16) {
  v[0] = __uint_as_float(word << 16);
  v[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen(uint32_t word, float *v, __half) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&word));
  v[0] = pair.x;
  v[1] = pair.y;
}
__device__ __forceinline__ uint32_t narrow(const float *v, float) { return __float_as_uint(v[0]); }
__device__ __forceinline__ uint32_t narrow(const float *v, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t narrow(const float *v, __half) {
  const __half2 pair = __floats2half2_rn(v[0], v[1]);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float *y) { *y = x; }
__device__ __forceinline__ void from_float(float x, __half *y) { *y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16 *y) { *y = __float2bfloat16_rn(x); }

template <typename T>
constexpr int kPack = 16 / (int)sizeof(T);

// V elements as they lie in memory: a 16-byte pack, or a single one.
template <typename T, int V>
struct Raw {
  uint4 bits;
  __device__ __forceinline__ void load(const T *p, bool cold) {
    bits = cold ? __ldcs(reinterpret_cast<const uint4 *>(p)) : *reinterpret_cast<const uint4 *>(p);
  }
  __device__ __forceinline__ void floats(float (&v)[V]) const {
    constexpr int W = kInWord<T>;
    widen(bits.x, v, T());
    widen(bits.y, v + W, T());
    widen(bits.z, v + 2 * W, T());
    widen(bits.w, v + 3 * W, T());
  }
  __device__ __forceinline__ void take(const float (&v)[V]) {
    constexpr int W = kInWord<T>;
    bits = {narrow(v, T()), narrow(v + W, T()), narrow(v + 2 * W, T()), narrow(v + 3 * W, T())};
  }
  __device__ __forceinline__ void store(T *p, bool cold) const {
    if (cold)
      __stcs(reinterpret_cast<uint4 *>(p), bits);
    else
      *reinterpret_cast<uint4 *>(p) = bits;
  }
};
template <typename T>
struct Raw<T, 1> {
  T value;
  __device__ __forceinline__ void load(const T *p, bool) { value = *p; }
  __device__ __forceinline__ void floats(float (&v)[1]) const { v[0] = to_float(value); }
  __device__ __forceinline__ void take(const float (&v)[1]) { from_float(v[0], &value); }
  __device__ __forceinline__ void store(T *p, bool) const { *p = value; }
};

template <typename T, int V>
__device__ __forceinline__ void store(T *p, const float (&v)[V], bool cold) {
  Raw<T, V> raw;
  raw.take(v);
  raw.store(p, cold);
}

// A row cut where memory has its 16-byte boundaries: `packs` packs from `lead` elements before the row on, of which the
// first and the last may lie in it in part. Where ALIGNED, rows start at a boundary and end at one.
template <typename T, bool ALIGNED>
struct Span {
  static constexpr int V = kPack<T>;
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  int lead, end, packs;

  __device__ __forceinline__ Span(const T *row, int N)
      : lead(ALIGNED ? 0 : (int)((uintptr_t)row % 16 / sizeof(T))), end(lead + N),
        packs(ALIGNED ? N / V : (end + V - 1) / V) {}
  // Whether pack p, one of `packs`, is all of the row's.
  __device__ __forceinline__ bool whole(int p) const { return ALIGNED || (p * V >= lead && (p + 1) * V <= end); }
  __device__ __forceinline__ bool has(int element) const { return ALIGNED || (element >= lead && element < end); }
  // The elements of pack p, `fill` in the place of what is not the row's. A pack is read whole, also at the ends of a row:
  // memory is given out in granules larger than it.
  __device__ __forceinline__ void floats(const Raw<T, V> &raw, int p, float (&v)[V], float fill) const {
    raw.floats(v);
    if (whole(p)) return;
#pragma unroll
    for (int i = 0; i < V; i++)
      if (!has(p * V + i)) v[i] = fill;
  }
  __device__ __forceinline__ void store(T *start, int p, const Raw<T, V> &raw, bool cold) const {
    if (whole(p)) {
      raw.store(start + p * V, cold);
    } else {
      const uint32_t words[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
#pragma unroll
      for (int i = 0; i < V; i++)
        if (has(p * V + i))
          reinterpret_cast<Bits *>(start)[p * V + i] = (Bits)(words[i / kInWord<T>] >> (i % kInWord<T> * 16));
    }
  }
};

// As __expf, but without its three instructions for results below 1.2e-38, which become 0 here.
__device__ __forceinline__ float quick_exponential(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
#else
  return __expf(x);
#endif
}

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : quick_exponential(x);  // 16-bit results do not see the last bits
}

// Dimensions as one: position r starts at r * stride, or with `inner` positions in a group, groups at `outer`.
struct Walk {
  int64_t inner, outer, stride;
  __device__ __forceinline__ int64_t start(int64_t r) const {
    return inner == 0 ? r * stride : r / inner * outer + r % inner * stride;
  }
};

// A maximum, and the sum of exponentials relative to it.
struct State {
  float max, sum;
};

// The reference of exponentials under a maximum: 0 for -inf, so that exp(-inf) is 0 and not NaN.
__device__ __forceinline__ float reference(float max) { return max == -INFINITY ? 0.0f : max; }

template <typename T>
__device__ __forceinline__ State merge(State a, State b) {
  const float max = fmaxf(a.max, b.max), zero = reference(max);
  return {max, a.sum * exponential<T>(a.max - zero) + b.sum * exponential<T>(b.max - zero)};
}

template <typename T, int V>
__device__ __forceinline__ State include(State state, const float (&x)[V]) {
  float max = state.max;
#pragma unroll
  for (int i = 0; i < V; i++) max = fmaxf(max, x[i]);  // a NaN is passed over here and felt in the sum
  const float zero = reference(max);
  float sum = 0.0f;  // of its own first: several short sums err less than a long one
#pragma unroll
  for (int i = 0; i < V; i++) sum += exponential<T>(x[i] - zero);
  return {max, state.sum * exponential<T>(state.max - zero) + sum};
}

constexpr int kSlots = 16;  // warps of a block at most
struct alignas(16) Partial {
  float of_row[kMaxThreads / 64][kSlots];
};

// What the threads of a row (blockDim.x of them: up to 32 a power of two, then whole warps) have together, in every one
// of them, in an order that never changes. Of two calls one after the other the second must use another `partial`.
template <typename F>
__device__ __forceinline__ float over_row(float value, Partial &partial, F merge) {
  if (blockDim.x >= 32) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) value = merge(value, __shfl_xor_sync(0xffffffffu, value, far));
  } else {
    for (int far = blockDim.x / 2; far > 0; far /= 2) value = merge(value, __shfl_xor_sync(0xffffffffu, value, far));
  }
  const int warps = blockDim.x / 32;
  if (warps <= 1) return value;
  float *mine = partial.of_row[threadIdx.y];
  if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = value;
  __syncthreads();
  value = mine[0];
#pragma unroll
  for (int from = 0; from < kSlots; from += 4) {
    if (from >= warps) break;
    const float4 four = *reinterpret_cast<const float4 *>(mine + from);
    if (from > 0) value = merge(value, four.x);
    if (from + 1 < warps) value = merge(value, four.y);
    if (from + 2 < warps) value = merge(value, four.z);
    if (from + 3 < warps) value = merge(value, four.w);
  }
  return value;
}

__device__ __forceinline__ float row_sum(float value, Partial &partial) {
  return over_row(value, partial, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float row_max(float value, Partial &partial) {
  return over_row(value, partial, [](float a, float b) { return fmaxf(a, b); });
}

// A maximum and sum over the threads of a block.
template <typename T>
__device__ __forceinline__ State row_state(State state, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    state = merge<T>(state, {__shfl_xor_sync(0xffffffffu, state.max, lanes),
                             __shfl_xor_sync(0xffffffffu, state.sum, lanes)});
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = state;
  __syncthreads();
  state = partial[0];
  for (int i = 1; i < (int)blockDim.x / 32; i++) state = merge<T>(state, partial[i]);
  return state;
}

// Clusters of blocks, on devices that have them (from 9.0 on): they write to each other's shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return (int)rank;
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return (int)size;
}
// The cluster's barrier, for its start: what is told later needs no fence.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory"); }
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void make_barrier(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
__device__ __forceinline__ void expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool arrived(uint64_t *barrier, uint32_t parity) {
  uint32_t yes;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(yes)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return yes != 0;
}
// To a block of the cluster: four numbers for `place`, where this thread's block has them too, told to its `barrier`.
__device__ __forceinline__ void tell(float4 mine, float4 *place, uint64_t *barrier, int rank) {
  uint32_t there, told;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" : : "r"(there),
               "r"(told), "f"(mine.x), "f"(mine.y), "f"(mine.z), "f"(mine.w)
               : "memory");
}
#else  // never launched there: see has_clusters
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() { __trap(); }
__device__ __forceinline__ void cluster_wait() { __trap(); }
__device__ __forceinline__ void make_barrier(uint64_t *) {}
__device__ __forceinline__ void barriers_are_made() {}
__device__ __forceinline__ void expect(uint64_t *, uint32_t) {}
__device__ __forceinline__ bool arrived(uint64_t *, uint32_t) { return true; }
__device__ __forceinline__ void tell(float4, float4 *, uint64_t *, int) {}
#endif

// What the blocks of a cluster tell each other of their row.
struct Shares {
  float4 of_block[kLargestCluster];
  uint64_t told;
};

// The shares of all blocks, in every thread. Between cluster_arrive(), after the barrier was made, and this must lie
// cluster_wait(). A block may end after it: nothing is told to it any more.
__device__ __forceinline__ const float4 *exchange(float4 mine, Shares &shares) {
  const int size = cluster_size();
  if (threadIdx.x == 0) expect(&shares.told, 16 * size);
  if ((int)threadIdx.x < size) tell(mine, &shares.of_block[cluster_rank()], &shares.told, threadIdx.x);
  while (!arrived(&shares.told, 0)) continue;
  return shares.of_block;
}

// The state of a row from those of all blocks of a cluster, in every thread, in an order that never changes.
template <typename T>
__device__ __forceinline__ State cluster_state(State mine, Shares &shares) {
  const float4 *all = exchange({mine.max, mine.sum, 0.0f, 0.0f}, shares);
  State state = {all[0].x, all[0].y};
  for (int rank = 1; rank < cluster_size(); rank++) state = merge<T>(state, {all[rank].x, all[rank].y});
  return state;
}

// Rows of at most blockDim.x * HELD packs; CLUSTER: so many for each block of a cluster, which takes one row.
template <typename T, int HELD, bool ALIGNED, bool CLUSTER>
__global__ void __launch_bounds__(kMaxThreads)
    held_rows(const T *__restrict__ x, Walk rows, T *__restrict__ out, int64_t M, int N) {
  constexpr int V = kPack<T>;
  constexpr bool KEEP = HELD * V <= 16;  // whether the exponentials are held too, or computed twice
  __shared__ Partial maxima;
  __shared__ Partial sums;
  __shared__ Shares shares;
  if constexpr (CLUSTER) {  // one row
    if (threadIdx.x == 0) {
      make_barrier(&shares.told);
      barriers_are_made();
    }
    cluster_arrive();
  }
  const int lanes = blockDim.x, begin = (CLUSTER ? cluster_rank() * lanes * HELD : 0) + threadIdx.x;
  const int64_t step = (int64_t)gridDim.x * blockDim.y;
  int64_t row = CLUSTER ? blockIdx.x / cluster_size() : (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  for (int64_t first = row - threadIdx.y; first < M; first += step, row += step) {
    const bool live = row < M;
    const T *in = x + (live ? rows.start(row) : 0);
    const Span<T, ALIGNED> span(in, live ? N : 0);
    const int packs = live ? span.packs : 0;
    Raw<T, V> held[HELD];
    float kept[KEEP ? HELD : 1][V];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = begin + k * lanes;
      if (p < packs) held[k].load(in - span.lead + p * V, kColdLoad);
    }
    float max = -INFINITY;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (begin + k * lanes >= packs) continue;
      float v[V];
      span.floats(held[k], begin + k * lanes, v, -INFINITY);
#pragma unroll
      for (int i = 0; i < V; i++) max = fmaxf(max, v[i]);
    }
    max = row_max(max, maxima);
    const float zero = CLUSTER ? reference(max) : max;  // another block may have more than -inf
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (begin + k * lanes >= packs) continue;
      float v[V];
      span.floats(held[k], begin + k * lanes, v, -INFINITY);
#pragma unroll
      for (int i = 0; i < V; i++) {
        v[i] = exponential<T>(v[i] - zero);  // NaN where all is -inf, as it must
        sum += v[i];
        if constexpr (KEEP) kept[k][i] = v[i];
      }
    }
    sum = row_sum(sum, sums);
    float scale = 1.0f / sum;
    if constexpr (CLUSTER) {
      cluster_wait();
      const State state = cluster_state<T>({max, sum}, shares);
      scale = (max == -INFINITY ? 0.0f : exponential<T>(max - state.max)) / state.sum;
    }
    T *y = out + row * N - span.lead;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = begin + k * lanes;
      if (p >= packs) continue;
      float v[V];
      if constexpr (!KEEP) held[k].floats(v);
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = (KEEP ? kept[KEEP ? k : 0][i] : exponential<T>(v[i] - zero)) * scale;
      held[k].take(v);
      span.store(y, p, held[k], kColdStore);
    }
  }
}

// The largest element of a pack; 16-bit elements are compared two at a time, as they lie.
__device__ __forceinline__ float largest(uint4 bits, float) {
  return fmaxf(fmaxf(__uint_as_float(bits.x), __uint_as_float(bits.y)), fmaxf(__uint_as_float(bits.z), __uint_as_float(bits.w)));
}
__device__ __forceinline__ float largest(uint4 bits, __nv_bfloat16) {
  const __nv_bfloat162 *pairs = reinterpret_cast<const __nv_bfloat162 *>(&bits);
  const __nv_bfloat162 pair = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__bfloat162float(pair.x), __bfloat162float(pair.y));
}
__device__ __forceinline__ float largest(uint4 bits, __half) {
  const __half2 *pairs = reinterpret_cast<const __half2 *>(&bits);
  const __half2 pair = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__half2float(pair.x), __half2float(pair.y));
}

// Rows in shared memory, one a block. A thread reads back only what it copied itself.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    shared_rows(const T *__restrict__ x, Walk rows, T *__restrict__ out, int64_t M, int N) {
  constexpr int V = kPack<T>;
  extern __shared__ uint4 row_memory[];
  __shared__ State partial[2][kRowThreads / 32];
  int half = 0;
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x, half ^= 1) {
    const T *in = x + rows.start(row);
    const Span<T, false> span(in, N);
    const T *start = in - span.lead;
    for (int p = threadIdx.x; p < span.packs; p += kRowThreads) __pipeline_memcpy_async(row_memory + p, start + p * V, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    const auto values = [&](int p, float(&v)[V]) {
      Raw<T, V> raw;
      raw.bits = row_memory[p];
      span.floats(raw, p, v, -INFINITY);
    };
    float max = -INFINITY, sum = 0.0f;
#pragma unroll 4
    for (int p = threadIdx.x; p < span.packs; p += kRowThreads) {
      if (span.whole(p)) {
        max = fmaxf(max, largest(row_memory[p], T()));
      } else {
        float v[V];
        values(p, v);
#pragma unroll
        for (int i = 0; i < V; i++) max = fmaxf(max, v[i]);
      }
    }
    const float zero = reference(max);
#pragma unroll 4
    for (int p = threadIdx.x; p < span.packs; p += kRowThreads) {
      float v[V], some = 0.0f;
      values(p, v);
#pragma unroll
      for (int i = 0; i < V; i++) some += exponential<T>(v[i] - zero);
      sum += some;
    }
    const State state = row_state<T>({max, sum}, partial[half]);
    const float scale = 1.0f / state.sum;
    T *y = out + row * N - span.lead;
#pragma unroll 2
    for (int p = threadIdx.x; p < span.packs; p += kRowThreads) {
      Raw<T, V> raw;
      float v[V];
      values(p, v);
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = exponential<T>(v[i] - state.max) * scale;
      raw.take(v);
      span.store(y, p, raw, true);
    }
  }
}

// Elements before the first 16-byte boundary of a row.
template <typename T>
__device__ __forceinline__ int64_t head_of(const T *row, int64_t N) {
  const int64_t head = (16 - (int64_t)((uintptr_t)row % 16)) % 16 / (int64_t)sizeof(T);
  return head < N ? head : N;
}

// Dense rows of any length and alignment.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 2)
    streamed_rows(const T *__restrict__ x, Walk rows, T *__restrict__ out, int64_t M, int64_t N) {
  constexpr int V = kPack<T>, UNROLL = kUnroll;
  __shared__ State partial[2][kMaxThreads / 32];
  int half = 0;
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x, half ^= 1) {
    const T *in = x + rows.start(row);
    T *y = out + row * N;
    const int64_t head = head_of(in, N), packs = (N - head) / V, tail = head + packs * V, step = blockDim.x;
    State state = {-INFINITY, 0.0f};
    for (int64_t i = threadIdx.x; i < head; i += step) {
      const float value[1] = {to_float(in[i])};
      state = include<T>(state, value);
    }
    for (int64_t p = threadIdx.x; p < packs; p += UNROLL * step) {
      Raw<T, V> raw[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        if (p + u * step < packs) raw[u].load(in + head + (p + u * step) * V, false);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        if (p + u * step >= packs) continue;
        float v[V];
        raw[u].floats(v);
        state = include<T>(state, v);
      }
    }
    for (int64_t i = tail + threadIdx.x; i < N; i += step) {
      const float value[1] = {to_float(in[i])};
      state = include<T>(state, value);
    }
    state = row_state<T>(state, partial[half]);

    const float scale = 1.0f / state.sum;
    const bool same = head_of(y, N) == head;  // in and out meet 16-byte boundaries at the same columns
    for (int64_t i = threadIdx.x; i < head; i += step)
      from_float(exponential<T>(to_float(in[i]) - state.max) * scale, y + i);
    for (int64_t p = threadIdx.x; p < packs && same; p += UNROLL * step) {
      Raw<T, V> raw[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        if (p + u * step < packs) raw[u].load(in + head + (p + u * step) * V, true);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        if (p + u * step >= packs) continue;
        float v[V];
        raw[u].floats(v);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = exponential<T>(v[i] - state.max) * scale;
        store<T, V>(y + head + (p + u * step) * V, v, true);
      }
    }
    for (int64_t i = (same ? tail : head) + threadIdx.x; i < N; i += step)
      from_float(exponential<T>(to_float(in[i]) - state.max) * scale, y + i);
  }
}

// One line a lane: line l is position l % inner of the dimensions behind, l / inner of those before. The slices of a
// block share the lines' N elements among them.
template <typename T>
__global__ void __launch_bounds__(32 * kSlices, 1)
    lines(const T *__restrict__ x, Walk before, Walk behind, int64_t stride, T *__restrict__ out, int64_t outer,
          int64_t inner, int64_t N) {
  __shared__ State partial[kSlices][32];
  const int64_t count = outer * inner;
  for (int64_t first = (int64_t)blockIdx.x * 32; first < count; first += (int64_t)gridDim.x * 32) {
    const int64_t line = first + threadIdx.x;
    const bool live = line < count;
    const int64_t o = live ? line / inner : 0, i = live ? line % inner : 0;
    const T *in = x + before.start(o) + behind.start(i);
    T *y = out + o * N * inner + i;
    const int64_t length = live ? N : 0;
    State state = {-INFINITY, 0.0f};
    for (int64_t n = threadIdx.y; n < length; n += 8 * kSlices) {
      float values[8];
#pragma unroll
      for (int u = 0; u < 8; u++)
        values[u] = n + u * kSlices < length ? to_float(in[(n + u * kSlices) * stride]) : -INFINITY;  // adds nothing
      state = include<T>(state, values);
    }
    __syncthreads();  // the readers of the lines before are done
    partial[threadIdx.y][threadIdx.x] = state;
    __syncthreads();
    state = partial[0][threadIdx.x];
    for (int s = 1; s < kSlices; s++) state = merge<T>(state, partial[s][threadIdx.x]);
    const float scale = 1.0f / state.sum;
    for (int64_t n = threadIdx.y; n < length; n += kSlices)
      from_float(exponential<T>(to_float(in[n * stride]) - state.max) * scale, y + n * inner);
  }
}

// The larger of two packs' elements, one by one, as they lie. A NaN is passed over; it is felt in the sums.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, float) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __hmax2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
  return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __half) {
  const __half2 pair = __hmax2(*reinterpret_cast<const __half2 *>(&a), *reinterpret_cast<const __half2 *>(&b));
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// V elements side by side as they lie in memory, a 16-byte pack or a single one, to be worked on a word at a time.
template <typename T, int V>
struct Cells {
  static constexpr int kWords = V == 1 ? 1 : 4, kIn = V == 1 ? 1 : kInWord<T>;
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  uint32_t word[kWords];
  __device__ __forceinline__ void load(const T *p, bool cold) {
    if constexpr (V == 1) {
      word[0] = *reinterpret_cast<const Bits *>(p);
    } else {
      const uint4 *pack = reinterpret_cast<const uint4 *>(p), bits = cold ? __ldcs(pack) : *pack;
      word[0] = bits.x, word[1] = bits.y, word[2] = bits.z, word[3] = bits.w;
    }
  }
  __device__ __forceinline__ void fill(float value) {
    const float v[2] = {value, value};
#pragma unroll
    for (int w = 0; w < kWords; w++) word[w] = narrow(v, T());
  }
  __device__ __forceinline__ void floats(int w, float (&v)[kIn]) const {
    float all[2];
    widen(word[w], all, T());
#pragma unroll
    for (int i = 0; i < kIn; i++) v[i] = all[i];
  }
  __device__ __forceinline__ void take(int w, const float (&v)[kIn]) {
    const float all[2] = {v[0], v[kIn - 1]};
    word[w] = narrow(all, T());
  }
  __device__ __forceinline__ void store(T *p, bool cold) const {
    if constexpr (V == 1) {
      *reinterpret_cast<Bits *>(p) = (Bits)word[0];
    } else {
      const uint4 bits = {word[0], word[1], word[2], word[3]};
      if (cold)
        __stcs(reinterpret_cast<uint4 *>(p), bits);
      else
        *reinterpret_cast<uint4 *>(p) = bits;
    }
  }
};

// Shared memory of a block for a tile of `columns`: maxima and sums of `groups` of threads, what the columns have in the
// end, and, in a cluster, what its blocks tell each other.
struct Tile {
  float *max, *sum, *final_max, *final_scale;
  float4 *of_block;
  static int64_t bytes(int groups, int columns, int blocks) {
    return (2 * (int64_t)groups + 2 + (blocks > 1 ? 4 * blocks : 0)) * columns * 4;
  }
  __device__ __forceinline__ Tile(float4 *memory, int groups, int columns, int blocks) {
    of_block = memory;
    max = reinterpret_cast<float *>(memory + (blocks > 1 ? blocks * columns : 0));
    sum = max + groups * columns;
    final_max = sum + groups * columns;
    final_scale = final_max + columns;
  }
};

// Where a thread stands in a tile: a pack of `lanes`, and a row of `slices`. A group is a warp, or as many as lanes are.
struct Place {
  int lane, slice, slices, group, groups, columns, mine;
  bool speaks;  // for its group: tells of its columns from `mine` on
  __device__ __forceinline__ Place(int lanes, int V) {
    const int t = threadIdx.x, wide = lanes < 32 ? 32 : lanes;
    lane = t % lanes;
    slice = t / lanes;
    slices = blockDim.x / lanes;
    group = t / wide;
    groups = blockDim.x / wide;
    columns = lanes * V;
    speaks = t % wide < lanes;
    mine = lane * V;
  }
};

// From the maxima and sums of all groups to final_max and final_scale (one over the sum), in an order that never changes.
template <typename T, bool CLUSTER>
__device__ __forceinline__ void settle(const Place &at, const Tile &tile, uint64_t *told) {
  const int size = CLUSTER ? cluster_size() : 1;
  if constexpr (CLUSTER) {
    if (threadIdx.x == 0) expect(told, 16 * size * at.columns);
    cluster_wait();  // all blocks have made their barriers
  }
  __syncthreads();
  for (int c = threadIdx.x; c < at.columns; c += blockDim.x) {
    float top = tile.max[c], all = 0.0f;
#pragma unroll 4
    for (int g = 1; g < at.groups; g++) top = fmaxf(top, tile.max[g * at.columns + c]);
    const float zero = reference(top);
#pragma unroll 4
    for (int g = 0; g < at.groups; g++)
      all += tile.sum[g * at.columns + c] * exponential<T>(tile.max[g * at.columns + c] - zero);
    if constexpr (CLUSTER) {
      for (int rank = 0; rank < size; rank++)
        tell({top, all, 0.0f, 0.0f}, tile.of_block + cluster_rank() * at.columns + c, told, rank);
    } else {
      tile.final_max[c] = top;
      tile.final_scale[c] = 1.0f / all;
    }
  }
  if constexpr (CLUSTER) {
    for (int c = threadIdx.x; c < at.columns; c += blockDim.x) {
      while (!arrived(told, 0)) continue;
      State state = {tile.of_block[c].x, tile.of_block[c].y};
      for (int rank = 1; rank < size; rank++) {
        const float4 other = tile.of_block[rank * at.columns + c];
        state = merge<T>(state, {other.x, other.y});
      }
      tile.final_max[c] = state.max;
      tile.final_scale[c] = 1.0f / state.sum;
    }
  }
  __syncthreads();
}

// What cells become in the end, their words one after the other, so that few numbers are in registers at a time.
template <typename T, int V, int HELD>
__device__ __forceinline__ void finish(Cells<T, V> (&held)[HELD], const Place &at, const Tile &tile) {
  constexpr int IN = Cells<T, V>::kIn;
#pragma unroll
  for (int w = 0; w < Cells<T, V>::kWords; w++) {
    float top[IN], scale[IN];
#pragma unroll
    for (int i = 0; i < IN; i++) {
      top[i] = tile.final_max[at.mine + w * IN + i];
      scale[i] = tile.final_scale[at.mine + w * IN + i];
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      float v[IN];
      held[k].floats(w, v);
#pragma unroll
      for (int i = 0; i < IN; i++) v[i] = exponential<T>(v[i] - top[i]) * scale[i];  // NaN where all is -inf, as it must
      held[k].take(w, v);
    }
  }
}

// Tiles of columns: `lanes` packs of V side by side (a power of two), and all N rows, of which a thread has HELD; CLUSTER:
// as many for each block of a cluster, which takes one tile. `tiles` are in a position of the dimensions before.
template <typename T, int V, int HELD, bool CLUSTER>
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) == 4 ? 1 : kColumnBlocks)  // of fp32 some would spill
    held_columns(const T *__restrict__ x, Walk before, int64_t stride, T *__restrict__ out, int64_t count, int64_t tiles,
                 int64_t inner, int N, int lanes) {
  constexpr int IN = Cells<T, V>::kIn, WORDS = Cells<T, V>::kWords;
  extern __shared__ float4 memory[];
  __shared__ uint64_t told;
  if constexpr (CLUSTER) {  // one tile
    if (threadIdx.x == 0) {
      make_barrier(&told);
      barriers_are_made();
    }
    cluster_arrive();
  }
  const Place at(lanes, V);
  const int size = CLUSTER ? cluster_size() : 1;
  const Tile tile(memory, at.groups, at.columns, size);
  const int first = (CLUSTER ? cluster_rank() * at.slices * HELD : 0) + at.slice;
  for (int64_t t = blockIdx.x / size; t < count; t += gridDim.x / size) {
    const int64_t o = t / tiles, column = (t - o * tiles) * at.columns + at.mine;
    const bool live = column < inner;
    const int mine = live && first < N ? (N - first + at.slices - 1) / at.slices : 0;  // rows, of which HELD count
    const T *in = x + before.start(o) + first * stride + column;
    Cells<T, V> held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (k < mine)
        held[k].load(in, kColdLoad);
      else
        held[k].fill(-INFINITY);  // adds nothing
      in += at.slices * stride;
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      Cells<T, V> tops;
      tops.word[w] = held[0].word[w];
#pragma unroll
      for (int k = 1; k < HELD; k++) tops.word[w] = larger(tops.word[w], held[k].word[w], T());
      for (int far = lanes; far < 32; far *= 2)
        tops.word[w] = larger(tops.word[w], __shfl_xor_sync(0xffffffffu, tops.word[w], far), T());
      float max[IN], sum[IN] = {};
      tops.floats(w, max);
#pragma unroll
      for (int k = 0; k < HELD; k++) {
        float v[IN];
        held[k].floats(w, v);
#pragma unroll
        for (int i = 0; i < IN; i++) sum[i] += exponential<T>(v[i] - reference(max[i]));
      }
      for (int far = lanes; far < 32; far *= 2) {
#pragma unroll
        for (int i = 0; i < IN; i++) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], far);
      }
      if (at.speaks) {
#pragma unroll
        for (int i = 0; i < IN; i++) {
          tile.max[at.group * at.columns + at.mine + w * IN + i] = max[i];
          tile.sum[at.group * at.columns + at.mine + w * IN + i] = sum[i];
        }
      }
    }
    settle<T, CLUSTER>(at, tile, &told);
    finish(held, at, tile);
    T *y = out + (o * N + first) * inner + column;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (k < mine) held[k].store(y, kColdStore);
      y += at.slices * inner;
    }
    if constexpr (CLUSTER) break;
  }
}

// The same for any number of rows, which are read twice, HELD of a thread at a time. CLUSTER: a block has N / size of them.
template <typename T, int V, int HELD, bool CLUSTER>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    streamed_columns(const T *__restrict__ x, Walk before, int64_t stride, T *__restrict__ out, int64_t count,
                     int64_t tiles, int64_t inner, int64_t N, int lanes) {
  constexpr int IN = Cells<T, V>::kIn, WORDS = Cells<T, V>::kWords;
  extern __shared__ float4 memory[];
  __shared__ uint64_t told;
  if constexpr (CLUSTER) {
    if (threadIdx.x == 0) {
      make_barrier(&told);
      barriers_are_made();
    }
    cluster_arrive();
  }
  const Place at(lanes, V);
  const int size = CLUSTER ? cluster_size() : 1;
  const Tile tile(memory, at.groups, at.columns, size);
  const int64_t share = (N + size - 1) / size, begin = CLUSTER ? cluster_rank() * share : 0;
  const int64_t end = begin + share < N ? begin + share : N, step = at.slices;
  const int64_t turns = (share + HELD * step - 1) / (HELD * step);
  for (int64_t t = blockIdx.x / size; t < count; t += gridDim.x / size) {
    const int64_t o = t / tiles, column = (t - o * tiles) * at.columns + at.mine;
    const bool live = column < inner;
    const T *in = x + before.start(o) + column;
    T *y = out + o * N * inner + column;
    Cells<T, V> tops, held[HELD];
    tops.fill(-INFINITY);
    float sum[WORDS][IN] = {};
    const auto load = [&](int64_t r, bool last) {
#pragma unroll
      for (int k = 0; k < HELD; k++) {
        if (live && r + k * step < end)
          held[k].load(in + (r + k * step) * stride, last);
        else
          held[k].fill(-INFINITY);  // adds nothing
      }
    };
    for (int64_t turn = 0; turn < turns; turn++) {
      load(begin + at.slice + turn * HELD * step, false);
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        float old[IN], max[IN];
        tops.floats(w, old);
#pragma unroll
        for (int k = 0; k < HELD; k++) tops.word[w] = larger(tops.word[w], held[k].word[w], T());
        tops.floats(w, max);
#pragma unroll
        for (int i = 0; i < IN; i++) sum[w][i] *= exponential<T>(old[i] - reference(max[i]));
#pragma unroll
        for (int k = 0; k < HELD; k++) {
          float v[IN];
          held[k].floats(w, v);
#pragma unroll
          for (int i = 0; i < IN; i++) sum[w][i] += exponential<T>(v[i] - reference(max[i]));
        }
      }
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      float max[IN];
      tops.floats(w, max);
#pragma unroll
      for (int i = 0; i < IN; i++) {
        State state = {max[i], sum[w][i]};
        for (int far = lanes; far < 32; far *= 2)
          state = merge<T>(state, {__shfl_xor_sync(0xffffffffu, state.max, far), __shfl_xor_sync(0xffffffffu, state.sum, far)});
        if (at.speaks) {
          tile.max[at.group * at.columns + at.mine + w * IN + i] = state.max;
          tile.sum[at.group * at.columns + at.mine + w * IN + i] = state.sum;
        }
      }
    }
    settle<T, CLUSTER>(at, tile, &told);
    for (int64_t turn = turns - 1; turn >= 0; turn--) {  // what was read last is most likely still in the cache
      const int64_t r = begin + at.slice + turn * HELD * step;
      load(r, true);
      finish(held, at, tile);
#pragma unroll
      for (int k = 0; k < HELD; k++)
        if (live && r + k * step < end) held[k].store(y + (r + k * step) * inner, true);
    }
    if constexpr (CLUSTER) break;
  }
}

// Dimensions [begin, end) as one walk of `count` positions; false where two strides do not do.
bool walk_of(const AkTensor *t, int begin, int end, Walk *walk, int64_t *count) {
  int64_t sizes[2], strides[2];
  int n = 0;
  *count = 1;
  for (int d = end - 1; d >= begin; d--) {
    *count *= t->sizes[d];
    if (t->sizes[d] == 1) continue;
    if (n > 0 && t->strides[d] == sizes[n - 1] * strides[n - 1]) {
      sizes[n - 1] *= t->sizes[d];
      continue;
    }
    if (n == 2) return false;
    sizes[n] = t->sizes[d];
    strides[n++] = t->strides[d];
  }
  *walk = n == 0 ? Walk{0, 0, 0} : n == 1 ? Walk{0, 0, strides[0]} : Walk{sizes[0], strides[1], strides[0]};
  return true;
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// The threads that share a row of so many units, with HELD of them each: a power of two within a warp, else whole warps.
int lanes_for(int64_t units, int held) {
  const int64_t wanted = (units + held - 1) / held;
  if (wanted > 32) return (int)((wanted + 31) / 32 * 32);
  int lanes = 1;
  while (lanes < wanted) lanes *= 2;
  return lanes;
}

unsigned grid_of(int64_t blocks) { return (unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff); }

// Whether clusters can be used: the device must have them, and the code must have been compiled for one that has.
bool has_clusters(const void *kernel, int device) {
  static int8_t known[64];  // 0 before it was asked for
  if (device < 0 || device >= 64) return false;
  if (known[device] == 0) {
    int major = 0;
    cudaFuncAttributes attributes = {};
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (major >= 9) cudaFuncGetAttributes(&attributes, kernel);
    known[device] = major >= 9 && attributes.ptxVersion >= 90 ? 1 : -1;
  }
  return known[device] > 0;
}

// The blocks that share a row of so many units where each takes at most `each`; 0 where a cluster is too small.
int cluster_for(int64_t units, int64_t each) {
  int size = 2;
  while (size <= kLargestCluster && size * each < units) size *= 2;
  return size <= kLargestCluster ? size : 0;
}

// A launch in clusters of `size` blocks.
template <typename... Parameters, typename... Values>
int launch_clusters(void (*kernel)(Parameters...), int64_t blocks, int threads, int size, cudaStream_t stream,
                    Values... values) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)size, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3((unsigned)threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&config, kernel, values...);
}

// Whether rows of x and of y (contiguous) start at the same distance from a 16-byte boundary.
bool same_phase(Walk rows, int64_t M, int64_t N, int64_t V, const void *x, const void *y) {
  return (uintptr_t)x % 16 == (uintptr_t)y % 16 && rows.inner == 0 && (M == 1 || (rows.stride - N) % V == 0);
}

template <typename T>
int rows_in_shared(const T *in, Walk rows, T *y, int64_t M, int64_t N, const AkContext *ctx) {
  const int64_t bytes = N * (int64_t)sizeof(T) + 32;
  static int allowed[64];  // bytes that a block may have, by device; 0 before it was asked for
  const int device = ctx->device;
  if (bytes > kShared || device < 0 || device >= 64) return AK_UNSUPPORTED;
  if (allowed[device] == 0) {
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (most > kShared) most = kShared;
    most -= 1024;  // what the kernel has of its own
    if (cudaFuncSetAttribute(shared_rows<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, most) != cudaSuccess)
      return (int)cudaGetLastError();
    allowed[device] = most;
  }
  if (bytes > allowed[device]) return AK_UNSUPPORTED;
  const dim3 grid(grid_of(M));
  shared_rows<T><<<grid, kRowThreads, (size_t)bytes, (cudaStream_t)ctx->stream>>>(in, rows, y, M, (int)N);
  return (int)cudaGetLastError();
}

// A launch with `shared` bytes for each block, in clusters of `size` blocks where that is more than one.
template <typename... Parameters, typename... Values>
int launch_tiles(void (*kernel)(Parameters...), int64_t tiles, int threads, int size, size_t shared, cudaStream_t stream,
                 Values... values) {
  if (size == 1) {
    kernel<<<grid_of(tiles), (unsigned)threads, shared, stream>>>(values...);
    return (int)cudaGetLastError();
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)size, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)(tiles * size));
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&config, kernel, values...);
}

// Columns that lie side by side in x as they do in y, V elements a pack.
template <typename T, int V>
int run_columns(const T *in, Walk before, int64_t stride, T *y, int64_t outer, int64_t inner, int64_t N, const AkContext *ctx) {
  constexpr int HELD = V == 1 ? 16 : kColumnHeld, AGAIN = V == 1 ? 8 : 4, NARROW = V == 1 ? 32 : kColumnPacks;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  const int64_t across = (inner + V - 1) / V;
  int lanes = 1;
  while (lanes < NARROW && lanes < across) lanes *= 2;
  // The threads of a block where each of so many blocks has `rows`: the last warp is whole.
  const auto threads_for = [&](int64_t rows) {
    const int64_t slices = (rows + HELD - 1) / HELD, least = lanes < 32 ? 32 / lanes : 1;
    return (slices + least - 1) / least * least * lanes;
  };
  const auto clustered = held_columns<T, V, HELD, true>;
  const bool clusters = has_clusters((const void *)clustered, ctx->device);
  int64_t size = (threads_for(N) + kColumnThreads - 1) / kColumnThreads;
  while (clusters && V > 1 && size > kLargestCluster && lanes > 2) {
    lanes /= 2;
    size = (threads_for(N) + kColumnThreads - 1) / kColumnThreads;
  }
  if (size == 1) {  // short columns: more of them
    while (2 * threads_for(N) <= kColumnThreads && lanes < across && lanes < 128) lanes *= 2;
  }
  const bool held = size == 1 || (clusters && size <= kLargestCluster);
  if (!held) {
    lanes = 1;
    while (lanes < NARROW && lanes < across) lanes *= 2;
    size = clusters ? kLargestCluster : 1;
  }
  // Too few for a warp: the kernel that takes a line a lane has more of them side by side.
  if (held && (N + HELD - 1) / HELD * lanes < 32) return AK_UNSUPPORTED;
  const int64_t threads = held ? threads_for((N + size - 1) / size) : kColumnThreads;
  const int columns = lanes * V, groups = (int)threads / (lanes < 32 ? 32 : lanes);
  const int64_t tiles = (inner + columns - 1) / columns, count = outer * tiles;
  if (size > 1 && count > 0x7fffffff / size) return AK_UNSUPPORTED;
  const size_t shared = (size_t)Tile::bytes(groups, columns, (int)size);
  const auto launch = [&](auto kernel, auto rows) {
    return launch_tiles(kernel, count, (int)threads, (int)size, shared, stream, in, before, stride, y, count, tiles, inner,
                        rows, lanes);
  };
  if (held) return launch(size > 1 ? clustered : held_columns<T, V, HELD, false>, (int)N);
  return launch(size > 1 ? streamed_columns<T, V, AGAIN, true> : streamed_columns<T, V, AGAIN, false>, N);
}

template <typename T>
int run(const AkTensor *x, int dim, const AkTensor *out, const AkContext *ctx) {
  constexpr int V = kPack<T>;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  Walk rows, behind;
  int64_t M, inner;
  if (!walk_of(x, 0, dim, &rows, &M) || !walk_of(x, dim + 1, x->ndim, &behind, &inner)) return AK_NEED_CONTIGUOUS;
  const int64_t N = x->ndim == 0 ? 1 : x->sizes[dim], stride = N == 1 ? 1 : x->strides[dim];
  const T *in = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  if (inner > 1 && behind.inner == 0 && behind.stride == 1) {
    const bool whole = inner % V == 0 && (N == 1 || stride % V == 0) && rows.outer % V == 0 && rows.stride % V == 0;
    const int result = whole && aligned(in) && aligned(y) ? run_columns<T, V>(in, rows, stride, y, M, inner, N, ctx)
                                                          : run_columns<T, 1>(in, rows, stride, y, M, inner, N, ctx);
    if (result != AK_UNSUPPORTED) return result;
  }
  if (inner > 1 || stride != 1) {
    const dim3 grid(grid_of((M * inner + 31) / 32)), block(32, kSlices);
    lines<T><<<grid, block, 0, stream>>>(in, rows, behind, stride, y, M, inner, N);
    return (int)cudaGetLastError();
  }
  const bool packs = N % V == 0 && rows.outer % V == 0 && rows.stride % V == 0 && aligned(in) && aligned(y);
  // Whether rows of x and of y start at the same distance from a 16-byte boundary.
  const bool same = packs || same_phase(rows, M, N, V, in, y);
  const int64_t units = packs ? N / V : N / V + 2;  // packs of a row at most
  const int n = (int)N;
  const auto one = [&](auto kernel, int held) {  // a block has one row or several
    const int lanes = lanes_for(units, held), high = lanes < kThreads ? kThreads / lanes : 1;
    const dim3 grid(grid_of((M + high - 1) / high)), block((unsigned)lanes, (unsigned)high);
    kernel<<<grid, block, 0, stream>>>(in, rows, y, M, n);
    return (int)cudaGetLastError();
  };
  if (same && units <= (int64_t)kHeld * kMaxThreads)
    return packs ? one(held_rows<T, kHeld, true, false>, kHeld) : one(held_rows<T, kHeld, false, false>, kHeld);
  if (packs && units <= (int64_t)kHeldLong * kMaxThreads) return one(held_rows<T, kHeldLong, true, false>, kHeldLong);
  if (same) {
    const int result = rows_in_shared<T>(in, rows, y, M, N, ctx);
    if (result != AK_UNSUPPORTED) return result;
  }
  const auto in_clusters = packs ? held_rows<T, kHeldLong, true, true> : held_rows<T, kLooseHeld, false, true>;
  const int size = cluster_for(units, (int64_t)(packs ? kHeldLong : kLooseHeld) * kMaxThreads);
  if (same && size > 0 && M <= 0x7fffffff / size && has_clusters((const void *)in_clusters, ctx->device))
    return launch_clusters(in_clusters, M * size, kMaxThreads, size, stream, in, rows, y, M, n);
  if (same && units <= (int64_t)kMost * kMaxThreads) return one(held_rows<T, kMost, false, false>, kMost);
  const dim3 grid(grid_of(M));
  streamed_rows<T><<<grid, kMaxThreads, 0, stream>>>(in, rows, y, M, N);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int softmax(const AkTensor *x, int64_t dim, const AkTensor *out, const AkContext *ctx) {
  switch (x->dtype) {
    case AK_F32: return run<float>(x, (int)dim, out, ctx);
    case AK_F16: return run<__half>(x, (int)dim, out, ctx);
    case AK_BF16: return run<__nv_bfloat16>(x, (int)dim, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
