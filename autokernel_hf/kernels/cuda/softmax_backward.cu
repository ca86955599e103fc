// kernel_type: softmax_backward
//
// y * (grad - sum(grad * y)) along one dimension, in fp32, with y = softmax(x) made again. Rows that fit are read once, in
// 16-byte packs that registers hold, by a warp, a block, or a cluster of blocks; they may start anywhere, as long as all three
// tensors' do so at the same distance from a 16-byte boundary. Longer ones are read twice. Where the dimension is not the
// innermost one, a thread has a column, and neighbours read side by side.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kThreads = 256;  // tune(block): 128, 256, 512
constexpr int kHeld = 4;       // tune(memory): 1, 2, 4
constexpr int kColumns = 128;  // tune(block): 32, 64, 128, 256

namespace {

constexpr int kMaxThreads = 512;
constexpr int kMost = 4;     // packs of a thread in the longest rows that are held
constexpr int kLargestCluster = 8;
constexpr int kSingles = 8;  // elements of a thread where rows cannot be read in packs
// Blocks of the most threads that a multiprocessor has. From 10.0 on, ptxas would spill to have two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kResident = 1;
#else
constexpr int kResident = 2;
#endif
static_assert(kThreads % 32 == 0 && kThreads <= kMaxThreads && kHeld <= kMost, "a thread holds its packs in registers");

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

// The reference of exponentials under a maximum: 0 for -inf, so that exp(-inf) is 0 and not NaN.
__device__ __forceinline__ float reference(float max) { return max == -INFINITY ? 0.0f : max; }

// What a row's threads gather: a maximum, and relative to it the sums of exponentials and of their products with the gradient.
struct State {
  float max, sum, product;
};

template <typename T>
__device__ __forceinline__ State merge(State a, State b) {
  const float max = fmaxf(a.max, b.max), zero = reference(max);
  const float of_a = exponential<T>(a.max - zero), of_b = exponential<T>(b.max - zero);
  return {max, a.sum * of_a + b.sum * of_b, a.product * of_a + b.product * of_b};
}

// Over the threads of a row (blockDim.x of them), the same in all, in an order that never changes.
template <typename T>
__device__ __forceinline__ State gather(State mine, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    mine = merge<T>(mine, {__shfl_xor_sync(0xffffffffu, mine.max, lanes), __shfl_xor_sync(0xffffffffu, mine.sum, lanes),
                           __shfl_xor_sync(0xffffffffu, mine.product, lanes)});
  const int warps = blockDim.x / 32;
  if (warps == 1) return mine;
  __syncthreads();  // the readers of the row before are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = partial[0];
  for (int i = 1; i < warps; i++) mine = merge<T>(mine, partial[i]);
  return mine;
}

struct Input {
  const void *data;
  int64_t stride;  // between rows
};

// V elements more. A NaN is passed over by the maximum and felt in the sums.
template <typename T, int V>
__device__ __forceinline__ void include(State *state, const float (&x)[V], const float (&g)[V]) {
  float max = state->max;
#pragma unroll
  for (int i = 0; i < V; i++) max = fmaxf(max, x[i]);
  const float zero = reference(max), shrink = exponential<T>(state->max - zero);
  float sum = 0.0f, product = 0.0f;  // of their own first: several short sums err less than a long one
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float e = exponential<T>(x[i] - zero);
    sum += e;
    product += e * g[i];
  }
  *state = {max, state->sum * shrink + sum, state->product * shrink + product};
}

template <typename T, int V>
__device__ __forceinline__ void finish(T *y, const State &state, const float (&x)[V], const float (&g)[V]) {
  const float zero = reference(state.max), mean = state.product / state.sum, factor = 1.0f / state.sum;
  float v[V];
#pragma unroll
  for (int i = 0; i < V; i++) v[i] = exponential<T>(x[i] - zero) * factor * (g[i] - mean);
  Raw<T, V> raw;
  raw.take(v);
  raw.store(y, false);
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

// Rows that their threads hold in registers: `blockDim.x` threads a row, with HELD packs each, and `blockDim.y` rows at
// once, of one warp each. CLUSTER: one row, so many packs for each block of a cluster.
template <typename T, int HELD, bool ALIGNED, bool CLUSTER>
__global__ void __launch_bounds__(kMaxThreads, kResident)
    held_rows(Input grads, Input xs, T *__restrict__ out, int64_t M, int N) {
  constexpr int V = kPack<T>;
  __shared__ State partial[kMaxThreads / 32];
  __shared__ Shares shares;
  if constexpr (CLUSTER) {
    if (threadIdx.x == 0) {
      make_barrier(&shares.told);
      barriers_are_made();
    }
    cluster_arrive();
  }
  const int lanes = blockDim.x, begin = (CLUSTER ? cluster_rank() * lanes * HELD : 0) + threadIdx.x;
  int64_t row = CLUSTER ? blockIdx.x / cluster_size() : (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  for (; row < M; row += (int64_t)gridDim.x * blockDim.y) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    const Span<T, ALIGNED> span(x, N);
    Raw<T, V> x_raw[HELD], g_raw[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = begin + k * lanes;
      if (p >= span.packs) continue;
      x_raw[k].load(x - span.lead + p * V, false);
      g_raw[k].load(grad - span.lead + p * V, false);
    }
    State state = {-INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (begin + k * lanes >= span.packs) continue;
      float v[V];
      span.floats(x_raw[k], begin + k * lanes, v, -INFINITY);
#pragma unroll
      for (int i = 0; i < V; i++) state.max = fmaxf(state.max, v[i]);
    }
    float zero = reference(state.max);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (begin + k * lanes >= span.packs) continue;
      float v[V], g[V];
      span.floats(x_raw[k], begin + k * lanes, v, -INFINITY);
      span.floats(g_raw[k], begin + k * lanes, g, 0.0f);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float e = exponential<T>(v[i] - zero);
        state.sum += e;
        state.product += e * g[i];
      }
    }
    state = gather<T>(state, partial);
    if constexpr (CLUSTER) {
      cluster_wait();
      const float4 *all = exchange({state.max, state.sum, state.product, 0.0f}, shares);
      state = {all[0].x, all[0].y, all[0].z};
      for (int rank = 1; rank < cluster_size(); rank++) state = merge<T>(state, {all[rank].x, all[rank].y, all[rank].z});
    }
    zero = reference(state.max);
    const float mean = state.product / state.sum, factor = 1.0f / state.sum;
    T *y = out + row * N - span.lead;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = begin + k * lanes;
      if (p >= span.packs) continue;
      float v[V], g[V];
      x_raw[k].floats(v);
      g_raw[k].floats(g);
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = exponential<T>(v[i] - zero) * factor * (g[i] - mean);
      x_raw[k].take(v);
      span.store(y, p, x_raw[k], false);
    }
    if constexpr (CLUSTER) break;
  }
}

// Rows of any length: a block reads one twice.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, kResident)
    streamed_rows(Input grads, Input xs, T *__restrict__ out, int64_t M, int64_t N) {
  constexpr int V = kPack<T>;
  __shared__ State partial[kMaxThreads / 32];
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    T *y = out + row * N;
    // What lies before the first 16-byte boundary and behind the last, one by one; all packs are whole.
    int64_t head = (16 - (int64_t)((uintptr_t)x % 16)) % 16 / (int64_t)sizeof(T);
    if (head > N) head = N;
    const int64_t packs = (N - head) / V, tail = head + packs * V, ends = head + (N - tail);
    State state = {-INFINITY, 0.0f, 0.0f};
    for (int pass = 0; pass < 2; pass++) {
      for (int64_t i = threadIdx.x; i < ends; i += blockDim.x) {
        const int64_t n = i < head ? i : tail + i - head;
        const float v[1] = {to_float(x[n])}, g[1] = {to_float(grad[n])};
        if (pass == 0)
          include<T, 1>(&state, v, g);
        else
          finish<T, 1>(y + n, state, v, g);
      }
#pragma unroll 2
      for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
        Raw<T, V> x_raw, g_raw;
        float v[V], g[V];
        x_raw.load(x + head + p * V, false);
        g_raw.load(grad + head + p * V, false);
        x_raw.floats(v);
        g_raw.floats(g);
        if (pass == 0)
          include<T, V>(&state, v, g);
        else
          finish<T, V>(y + head + p * V, state, v, g);
      }
      if (pass == 0) state = gather<T>(state, partial);
    }
  }
}

// Rows whose tensors lie at different distances from 16-byte boundaries, element by element, in a block's registers.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, kResident)
    single_rows(Input grads, Input xs, T *__restrict__ out, int64_t M, int N) {
  __shared__ State partial[kMaxThreads / 32];
  const int first = threadIdx.x, stride = blockDim.x;
  for (int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; row < M; row += (int64_t)gridDim.x * blockDim.y) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    T x_raw[kSingles], g_raw[kSingles];
#pragma unroll
    for (int h = 0; h < kSingles; h++) {
      if (first + h * stride >= N) continue;
      x_raw[h] = x[first + h * stride];
      g_raw[h] = grad[first + h * stride];
    }
    State state = {-INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < kSingles; h++) {
      if (first + h * stride >= N) continue;
      const float v[1] = {to_float(x_raw[h])}, g[1] = {to_float(g_raw[h])};
      include<T, 1>(&state, v, g);
    }
    state = gather<T>(state, partial);
#pragma unroll
    for (int h = 0; h < kSingles; h++) {
      if (first + h * stride >= N) continue;
      const float v[1] = {to_float(x_raw[h])}, g[1] = {to_float(g_raw[h])};
      finish<T, 1>(out + row * N + first + h * stride, state, v, g);
    }
  }
}

// The same for rows of any length, which are read twice.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, kResident)
    streamed_singles(Input grads, Input xs, T *__restrict__ out, int64_t M, int64_t N) {
  __shared__ State partial[kMaxThreads / 32];
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    State state = {-INFINITY, 0.0f, 0.0f};
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 4
      for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
        const float v[1] = {to_float(x[n])}, g[1] = {to_float(grad[n])};
        if (pass == 0)
          include<T, 1>(&state, v, g);
        else
          finish<T, 1>(out + row * N + n, state, v, g);
      }
      if (pass == 0) state = gather<T>(state, partial);
    }
  }
}

// Contiguous tensors of which the dimension is not the innermost one: a thread has a column.
template <typename T>
__global__ void __launch_bounds__(kColumns)
    columns(const T *__restrict__ grad, const T *__restrict__ x, T *__restrict__ out, int64_t outer, int64_t N,
            int64_t inner) {
  const int64_t all = outer * inner;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t start = i / inner * N * inner + i % inner;
    State state = {-INFINITY, 0.0f, 0.0f};
    for (int64_t k = 0; k < N; k++) {
      const float v[1] = {to_float(x[start + k * inner])}, g[1] = {to_float(grad[start + k * inner])};
      include<T, 1>(&state, v, g);
    }
    for (int64_t k = 0; k < N; k++) {
      const float v[1] = {to_float(x[start + k * inner])}, g[1] = {to_float(grad[start + k * inner])};
      finish<T, 1>(out + start + k * inner, state, v, g);
    }
  }
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// The stride between the rows of a tensor, all its dimensions but the last, if there is one.
bool rows_of(const AkTensor *t, int64_t *stride) {
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  int64_t rows = 1;
  *stride = 0;
  for (int d = last - 1; d >= 0; d--) {
    if (t->sizes[d] == 1) continue;
    if (rows > 1 && t->strides[d] != rows * *stride) return false;
    if (rows == 1) *stride = t->strides[d];
    rows *= t->sizes[d];
  }
  return true;
}

bool is_contiguous(const AkTensor *t) {
  int64_t expected = 1;
  for (int d = t->ndim - 1; d >= 0; d--) {
    if (t->sizes[d] != 1 && t->strides[d] != expected) return false;
    expected *= t->sizes[d];
  }
  return true;
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

template <typename T>
int run(const AkTensor *grad, const AkTensor *x, int64_t dim, const AkTensor *out, int device, cudaStream_t stream) {
  constexpr int V = kPack<T>;
  int64_t outer = 1, inner = 1;
  for (int d = 0; d < x->ndim; d++) {
    if (d < dim) outer *= x->sizes[d];
    if (d > dim) inner *= x->sizes[d];
  }
  const int64_t N = x->ndim == 0 ? 1 : x->sizes[dim];
  T *y = static_cast<T *>(out->data);
  Input grads = {grad->data, N}, xs = {x->data, N};
  const bool last = x->ndim > 0 && dim == x->ndim - 1;
  if (!last || !rows_of(grad, &grads.stride) || !rows_of(x, &xs.stride)) {
    if (!is_contiguous(grad) || !is_contiguous(x)) return AK_NEED_CONTIGUOUS;
    if (inner > 1) {
      const int64_t blocks = (outer * inner + kColumns - 1) / kColumns;
      columns<T><<<grid_of(blocks), kColumns, 0, stream>>>(static_cast<const T *>(grad->data),
                                                           static_cast<const T *>(x->data), y, outer, N, inner);
      return (int)cudaGetLastError();
    }
    grads.stride = xs.stride = N;
  }
  const int64_t M = outer;
  const auto phase = [](const void *p) { return (uintptr_t)p % 16; };
  const bool even = M == 1 || ((grads.stride - N) % V == 0 && (xs.stride - N) % V == 0);
  const bool same = even && phase(grads.data) == phase(xs.data) && phase(xs.data) == phase(y);
  const bool packs = same && N % V == 0 && aligned(xs.data);
  const int64_t units = packs ? N / V : same ? N / V + 2 : N, most = same ? kMost : kSingles;  // of a row, and of a thread
  int held = (int)most, lanes = 32;
  if (packs && units <= 64) held = units <= 32 ? 1 : 2;
  if (packs && units > 32 * most && units <= (int64_t)kHeld * kMaxThreads) held = kHeld;
  if (units > 32 * most) lanes = (int)((units + held * 32 - 1) / (held * 32)) * 32;
  const auto one = [&](auto kernel) {  // a block has one row, or several of a warp each
    const int64_t high = lanes == 32 ? kThreads / 32 : 1;
    const dim3 block((unsigned)lanes, (unsigned)high), grid(grid_of((M + high - 1) / high));
    kernel<<<grid, block, 0, stream>>>(grads, xs, y, M, (int)N);
    return (int)cudaGetLastError();
  };
  if (units <= most * kMaxThreads) {
    if (!same) return one(single_rows<T>);
    if (!packs) return one(held_rows<T, kMost, false, false>);
    if (held == 1) return one(held_rows<T, 1, true, false>);
    if (held == 2) return one(held_rows<T, 2, true, false>);
    return one(held_rows<T, kMost, true, false>);
  }
  const auto in_clusters = packs ? held_rows<T, kMost, true, true> : held_rows<T, kMost, false, true>;
  const int size = same ? cluster_for(units, (int64_t)kMost * kMaxThreads) : 0;
  if (size > 0 && M <= 0x7fffffff / size && has_clusters((const void *)in_clusters, device)) {
    const int64_t each = (units + size - 1) / size;  // packs of a block
    const int threads = (int)((each + kMost * 32 - 1) / (kMost * 32)) * 32;
    return launch_clusters(in_clusters, M * size, threads, size, stream, grads, xs, y, M, (int)N);
  }
  if (same)
    streamed_rows<T><<<grid_of(M), kMaxThreads, 0, stream>>>(grads, xs, y, M, N);
  else
    streamed_singles<T><<<grid_of(M), kMaxThreads, 0, stream>>>(grads, xs, y, M, N);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int softmax_backward(const AkTensor *grad, const AkTensor *x, int64_t dim, const AkTensor *out,
                                const AkContext *ctx) {
  if (grad->dtype != x->dtype) return AK_UNSUPPORTED;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (x->dtype) {
    case AK_F32: return run<float>(grad, x, dim, out, ctx->device, stream);
    case AK_F16: return run<__half>(grad, x, dim, out, ctx->device, stream);
    case AK_BF16: return run<__nv_bfloat16>(grad, x, dim, out, ctx->device, stream);
    default: return AK_UNSUPPORTED;
  }
}
