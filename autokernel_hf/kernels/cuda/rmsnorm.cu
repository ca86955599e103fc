// kernel_type: rmsnorm
//
// y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in fp32. A row is read once, in 16-byte
// packs that its threads hold in registers: few lanes where it is short, a block where it is long, a cluster of blocks
// where it is longer. Rows may start anywhere, as long as x and y start at the same distance from a 16-byte boundary.
// All else is read twice.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kHeld = 2;        // tune(memory): 1, 2, 4, 6
constexpr int kThreads = 128;   // tune(block): 64, 128, 256, 512
constexpr int kColdLoad = 0;    // tune(memory): 0, 1
constexpr int kColdStore = 0;   // tune(memory): 0, 1
constexpr int kHeldLong = 4;    // tune(memory): 2, 4, 6
// Packs of all rows, up to which a row's parameters are read while it is summed.
constexpr int64_t kFew = 131072;  // tune(algorithm): 0, 131072, 1073741824
// Blocks that share a longer row; of one, such rows are read twice.
constexpr int kLargestCluster = 8;  // tune(algorithm): 1, 2, 4, 8

namespace {

constexpr int kMaxThreads = 512;  // so that a thread may have 128 registers
constexpr int kMost = 6;          // packs of a thread in rows that one block holds where there are no clusters
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

// The leading dimensions of a tensor: row r starts at r * stride, or with `inner` rows in a group, groups at `outer`.
struct Rows {
  int64_t inner, outer, stride;
  __device__ __forceinline__ int64_t start(int64_t row) const {
    return inner == 0 ? row * stride : row / inner * outer + row % inner * stride;
  }
};

// A weight or bias of x's dtype or float32, or none.
struct Parameter {
  const void *data;  // NULL for none
  bool is_float, aligned;
};

template <typename T, int V>
__device__ __forceinline__ void load_parameter(Parameter parameter, int64_t column, float (&values)[V]) {
  if (sizeof(T) == 4 || parameter.is_float) {
    const float *p = static_cast<const float *>(parameter.data) + column;
    constexpr int W = V < 4 ? V : 4;
#pragma unroll
    for (int i = 0; i < V; i += W) {
      Raw<float, W> raw;
      float some[W];
      raw.load(p + i, false);
      raw.floats(some);
#pragma unroll
      for (int j = 0; j < W; j++) values[i + j] = some[j];
    }
  } else {
    Raw<T, V> raw;
    raw.load(static_cast<const T *>(parameter.data) + column, false);
    raw.floats(values);
  }
}

// The values for pack p of a row. Where rows start anywhere, those of a whole pack are put together from two packs of the
// parameter; a pack at a row's end takes them one by one.
template <typename T, bool ALIGNED>
__device__ __forceinline__ void load_for(Parameter parameter, const Span<T, ALIGNED> &span, int p,
                                         float (&values)[kPack<T>]) {
  constexpr int V = kPack<T>;
  const int column = p * V - span.lead;
  if constexpr (ALIGNED) {
    load_parameter<T, V>(parameter, column, values);
  } else {
    const int first = column & ~(V - 1), off = column - first;
    const bool same = sizeof(T) == 4 || !parameter.is_float;
    if (same && parameter.aligned && column >= 0 && first + 2 * V <= span.end - span.lead) {
      const T *data = static_cast<const T *>(parameter.data) + first;
      Raw<T, V> low, high;
      low.load(data, false);
      high.load(data + V, false);
      uint32_t w[8] = {low.bits.x, low.bits.y, low.bits.z, low.bits.w, high.bits.x, high.bits.y, high.bits.z, high.bits.w};
      const int words = off / kInWord<T>;
#pragma unroll
      for (int i = 0; i < 6; i++) w[i] = words & 2 ? w[i + 2] : w[i];
#pragma unroll
      for (int i = 0; i < 5; i++) w[i] = words & 1 ? w[i + 1] : w[i];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = __funnelshift_r(w[i], w[i + 1], sizeof(T) == 2 ? off % 2 * 16 : 0);
      low.bits = {w[0], w[1], w[2], w[3]};
      low.floats(values);
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) {
        float one[1] = {0.0f};
        if (span.has(p * V + i)) load_parameter<T, 1>(parameter, column + i, one);
        values[i] = one[0];
      }
    }
  }
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

// The sum over the blocks of a cluster, in every thread, in an order that never changes. `mine` is this block's.
__device__ __forceinline__ float cluster_sum(float mine, Shares &shares) {
  const float4 *all = exchange({mine, 0.0f, 0.0f, 0.0f}, shares);
  float sum = all[0].x;
  for (int rank = 1; rank < cluster_size(); rank++) sum += all[rank].x;
  return sum;
}

// A parameter's packs for those that a thread holds, on their way while the row is summed: worth their registers where there
// are few rows, and a kernel's time is that of one load after the other.
template <typename T, int HELD, bool ALIGNED, bool EARLY>
struct Ahead {
  static constexpr int V = kPack<T>;
  Raw<T, V> raw[EARLY ? HELD : 1];
  __device__ __forceinline__ static bool taken(Parameter parameter) {
    return EARLY && parameter.data != NULL && (sizeof(T) == 4 || !parameter.is_float);
  }
  __device__ __forceinline__ void load(Parameter parameter, int packs) {
    if (!taken(parameter)) return;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p < packs) raw[EARLY ? k : 0].load(static_cast<const T *>(parameter.data) + p * V, false);
    }
  }
  // Those of pack p, the thread's k-th.
  __device__ __forceinline__ void values(Parameter parameter, const Span<T, ALIGNED> &span, int k, int p, float (&v)[V]) const {
    if (taken(parameter))
      raw[EARLY ? k : 0].floats(v);
    else
      load_for<T, ALIGNED>(parameter, span, p, v);
  }
};

// Rows of at most blockDim.x * HELD packs; CLUSTER: so many for each block of a cluster, which takes one row.
template <typename T, int HELD, bool ALIGNED, bool CLUSTER, bool EARLY = false>
__global__ void __launch_bounds__(kMaxThreads, EARLY ? 1 : 0)
    held_rows(const T *__restrict__ x, Rows rows, Parameter weight, float eps, float offset, T *__restrict__ out,
              int64_t M, int N, float inverse) {
  constexpr int V = kPack<T>;
  __shared__ Partial partial[2];
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
  int half = 0;
  for (int64_t first = row - threadIdx.y; first < M; first += step, row += step, half ^= 1) {
    const bool live = row < M;
    const T *in = x + (live ? rows.start(row) : 0);
    const Span<T, ALIGNED> span(in, live ? N : 0);
    const int packs = live ? span.packs : 0;
    Raw<T, V> held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = begin + k * lanes;
      if (p < packs) held[k].load(in - span.lead + p * V, kColdLoad);
    }
    Ahead<T, HELD, ALIGNED, EARLY> weights;
    weights.load(weight, packs);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      if (begin + k * lanes >= packs) continue;
      float v[V];
      span.floats(held[k], begin + k * lanes, v, 0.0f);
#pragma unroll
      for (int i = 0; i < V; i++) sum += v[i] * v[i];
    }
    sum = row_sum(sum, partial[half]);
    if constexpr (CLUSTER) cluster_wait();
    if constexpr (CLUSTER) sum = cluster_sum(sum, shares);
    const float scale = rsqrtf(sum * inverse + eps);
    T *y = out + row * N - span.lead;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int p = begin + k * lanes;
      if (p >= packs) continue;
      float v[V], w[V];
      held[k].floats(v);
      weights.values(weight, span, k, p, w);
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = v[i] * scale * (offset + w[i]);
      held[k].take(v);
      span.store(y, p, held[k], kColdStore);
    }
  }
}

// Rows of any length, read once for the sum and once for the result.
template <typename T, int V>
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_rows(const T *__restrict__ x, Rows rows, Parameter weight, float eps, float offset, T *__restrict__ out,
                  int64_t M, int64_t N) {
  constexpr int UNROLL = V == 1 ? 8 : 4;
  __shared__ Partial partial[2];
  int half = 0;
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x, half ^= 1) {
    const T *in = x + rows.start(row);
    const int64_t step = (int64_t)blockDim.x * V;
    float sums[UNROLL] = {};  // several short sums err less than a long one
    for (int64_t column = (int64_t)threadIdx.x * V; column < N; column += UNROLL * step) {
      Raw<T, V> raw[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        if (column + u * step < N) raw[u].load(in + column + u * step, false);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        if (column + u * step >= N) continue;
        float v[V];
        raw[u].floats(v);
#pragma unroll
        for (int i = 0; i < V; i++) sums[u] += v[i] * v[i];
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) sum += sums[u];
    const float scale = rsqrtf(row_sum(sum, partial[half]) / (float)N + eps);
    T *y = out + row * N;
    for (int64_t column = (int64_t)threadIdx.x * V; column < N; column += UNROLL * step) {
      Raw<T, V> raw[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        if (column + u * step < N) raw[u].load(in + column + u * step, true);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int64_t at = column + u * step;
        if (at >= N) continue;
        float v[V], w[V];
        raw[u].floats(v);
        load_parameter<T, V>(weight, at, w);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = v[i] * scale * (offset + w[i]);
        store<T, V>(y + at, v, true);
      }
    }
  }
}

bool rows_of(const AkTensor *t, Rows *rows) {
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  int64_t sizes[2], strides[2];
  int n = 0;
  for (int d = last - 1; d >= 0; d--) {
    if (t->sizes[d] == 1) continue;
    if (n > 0 && t->strides[d] == sizes[n - 1] * strides[n - 1]) {
      sizes[n - 1] *= t->sizes[d];
      continue;
    }
    if (n == 2) return false;
    sizes[n] = t->sizes[d];
    strides[n++] = t->strides[d];
  }
  *rows = n == 0 ? Rows{0, 0, 0} : n == 1 ? Rows{0, 0, strides[0]} : Rows{sizes[0], strides[1], strides[0]};
  return true;
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

bool parameter_of(const AkTensor *t, Parameter *parameter) {
  if (t == NULL) {
    *parameter = {NULL, false, true};
    return true;
  }
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  *parameter = {t->data, t->dtype == AK_F32, aligned(t->data)};
  return true;
}

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
bool same_phase(Rows rows, int64_t M, int64_t N, int64_t V, const void *x, const void *y) {
  return (uintptr_t)x % 16 == (uintptr_t)y % 16 && rows.inner == 0 && (M == 1 || (rows.stride - N) % V == 0);
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, float eps, float offset, const AkTensor *out,
        const AkContext *ctx) {
  constexpr int V = kPack<T>;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  Rows rows;
  Parameter w;
  if (!rows_of(x, &rows) || !parameter_of(weight, &w)) return AK_NEED_CONTIGUOUS;
  const int64_t N = x->sizes[x->ndim - 1];
  int64_t M = 1;
  for (int d = 0; d < x->ndim - 1; d++) M *= x->sizes[d];
  const T *in = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  const bool packs = N % V == 0 && rows.outer % V == 0 && rows.stride % V == 0 && aligned(in) && w.aligned && aligned(y);
  // Whether rows of x and of y start at the same distance from a 16-byte boundary.
  const bool same = packs || same_phase(rows, M, N, V, in, y);
  const int64_t units = packs ? N / V : N / V + 2;  // packs of a row at most
  const float inverse = 1.0f / (float)N;
  const int n = (int)N;
  const auto one = [&](auto kernel, int held) {  // a block has one row or several
    const int lanes = lanes_for(units, held), high = lanes < kThreads ? kThreads / lanes : 1;
    const dim3 grid(grid_of((M + high - 1) / high)), block((unsigned)lanes, (unsigned)high);
    kernel<<<grid, block, 0, stream>>>(in, rows, w, eps, offset, y, M, n, inverse);
    return (int)cudaGetLastError();
  };
  if (same && units <= (int64_t)kHeld * kMaxThreads)
    return packs && M * units < kFew ? one(held_rows<T, kHeld, true, false, true>, kHeld)
           : packs                    ? one(held_rows<T, kHeld, true, false>, kHeld)
                                      : one(held_rows<T, kHeld, false, false>, kHeld);
  if (packs && units <= (int64_t)kHeldLong * kMaxThreads) return one(held_rows<T, kHeldLong, true, false>, kHeldLong);
  const auto in_clusters = packs ? held_rows<T, kHeldLong, true, true> : held_rows<T, kHeldLong, false, true>;
  const int size = cluster_for(units, (int64_t)kHeldLong * kMaxThreads);
  if (same && size > 0 && M <= 0x7fffffff / size && has_clusters((const void *)in_clusters, ctx->device))
    return launch_clusters(in_clusters, M * size, kMaxThreads, size, stream, in, rows, w, eps, offset, y, M, n, inverse);
  if (same && units <= (int64_t)kMost * kMaxThreads) return one(held_rows<T, kMost, false, false>, kMost);
  const dim3 grid(grid_of(M));
  if (packs)
    streamed_rows<T, V><<<grid, kMaxThreads, 0, stream>>>(in, rows, w, eps, offset, y, M, N);
  else
    streamed_rows<T, 1><<<grid, kMaxThreads, 0, stream>>>(in, rows, w, eps, offset, y, M, N);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (weight->dtype != x->dtype && weight->dtype != AK_F32) return AK_UNSUPPORTED;
  switch (x->dtype) {
    case AK_F32: return run<float>(x, weight, (float)eps, (float)offset, out, ctx);
    case AK_F16: return run<__half>(x, weight, (float)eps, (float)offset, out, ctx);
    case AK_BF16: return run<__nv_bfloat16>(x, weight, (float)eps, (float)offset, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
