// kernel_type: softmax
//
// y = exp(x - max(x)) / sum(exp(x - max(x))) along one dimension, in fp32. A dense row is read once, in 16-byte packs that
// its threads hold in registers: few lanes where it is short, a block where it is long; where it is longer, the block's
// shared memory holds it, or the registers of a cluster of blocks. Rows may start anywhere, as long as x and y start at the
// same distance from a 16-byte boundary. All else is read twice, with a running maximum and sum. Along any other dimension,
// or across strides, each lane takes a line of its own, so that neighbours read neighbours.
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
constexpr int kHeldLong = 4;    // tune(memory): 2, 4, 8
constexpr int kRowThreads = 512;  // tune(block): 256, 512
constexpr int kUnroll = 4;      // tune(memory): 1, 2, 4, 8
constexpr int kSlices = 8;      // tune(block): 1, 2, 4, 8, 16, 32

namespace {

constexpr int kMaxThreads = 512;  // so that a thread may have 128 registers
constexpr int kMost = 8;          // packs of a thread in rows that one block holds where there are no clusters
constexpr int kLargestCluster = 8;
constexpr int kShared = 112 << 10;  // bytes of the longest row that is held in shared memory: two of them at a time
static_assert(kUnroll >= 1 && kUnroll <= 8, "a thread holds its packs in registers");
static_assert(kRowThreads % 32 == 0 && kRowThreads <= kMaxThreads, "a block is whole warps");
static_assert(kSlices >= 1 && kSlices <= 32, "a block has at most 1024 threads");
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

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);  // 16-bit results do not see the last bits
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

// A cluster of blocks, on devices that have them (from 9.0 on): its blocks read each other's shared memory.
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
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ float in_block(const float *mine, int rank) {
  uint32_t place = (uint32_t)__cvta_generic_to_shared(mine), there;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  return value;
}
#else  // never launched there: see has_clusters
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() { __trap(); }
__device__ __forceinline__ void cluster_wait() { __trap(); }
__device__ __forceinline__ float in_block(const float *mine, int) { return *mine; }
#endif

// The state of a row from those of all blocks of a cluster, in every thread, in an order that never changes.
// cluster_wait() must follow before the block ends.
template <typename T>
__device__ __forceinline__ State cluster_state(State mine, State *slot) {
  if (threadIdx.x == 0) *slot = mine;
  cluster_arrive();
  cluster_wait();
  State state = {in_block(&slot->max, 0), in_block(&slot->sum, 0)};
  for (int rank = 1; rank < cluster_size(); rank++)
    state = merge<T>(state, {in_block(&slot->max, rank), in_block(&slot->sum, rank)});
  cluster_arrive();
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
  __shared__ State slot;
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
      const State state = cluster_state<T>({max, sum}, &slot);
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
    if constexpr (CLUSTER) cluster_wait();  // none may end while others read its state
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
  const auto in_clusters = held_rows<T, kHeldLong, false, true>;
  const int size = cluster_for(units, (int64_t)kHeldLong * kMaxThreads);
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
