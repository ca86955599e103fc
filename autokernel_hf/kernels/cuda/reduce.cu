// kernel_type: reduce
//
// Sum, mean, maximum, minimum or product along one dimension. Dense rows are shared by the threads of a block; along
// any other dimension, or across strides, each lane has outputs of its own, so that neighbours read neighbours. Where
// the outputs are too few to fill a device, the dimension is split among the blocks of a cluster, or, where there are no
// clusters or more parts are needed, among blocks whose parts a second kernel puts together in a fixed order. Threads move 16-byte packs where alignment and widths allow.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 128;        // tune(block): 64, 128, 256, 512
constexpr int kHeld = 8;             // tune(memory): 2, 4, 8, 16
constexpr int kUnroll = 4;           // tune(memory): 1, 2, 4, 8
constexpr int kAcross = 16;          // tune(block): 4, 8, 16, 32
constexpr int kLines = 256;          // tune(block): 64, 128, 256, 512
constexpr int64_t kBlocks = 1024;    // tune(launch): 256, 512, 1024, 2048
constexpr int64_t kShortest = 8192;  // tune(launch): 2048, 8192, 32768

namespace {

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
static_assert(32 % kAcross == 0 && kLines % 32 == 0 && kLines <= 512, "a block is whole warps");

// From 10.0 on, ptxas would spill to have more threads resident than it was asked for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BOUNDS(threads) __launch_bounds__(threads, (threads) > 256 ? 1 : 512 / (threads))
#else
#define BOUNDS(threads) __launch_bounds__(threads)
#endif

constexpr int kLargestCluster = 8;
constexpr int64_t kEnough = 256;  // blocks that keep a device busy
static_assert(kUnroll >= 1 && kUnroll <= 16 && kHeld >= 1 && kHeld <= 16, "a thread holds its packs in registers");

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

// Dimensions as one: position r starts at r * stride, or with `inner` positions in a group, groups at `outer`.
struct Walk {
  int64_t inner, outer, stride;
  __device__ __forceinline__ int64_t start(int64_t r) const {
    return inner == 0 ? r * stride : r / inner * outer + r % inner * stride;
  }
};

enum Op { kSum, kMax, kProduct };

// The accumulator: sums of float32 and all products in double, which costs a memory-bound kernel nothing and loses
// neither digits in long sums nor range in long products.
template <typename T, int OP>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<float, kSum> {
  using type = double;
};
template <typename T>
struct AccumulatorOf<T, kProduct> {
  using type = double;
};
template <typename T, int OP>
using Accumulator = typename AccumulatorOf<T, OP>::type;

template <int OP>
__device__ __forceinline__ float neutral() {
  return OP == kSum ? 0.0f : OP == kMax ? -INFINITY : 1.0f;
}

template <int OP, typename A>
__device__ __forceinline__ A merge(A a, A b) {
  if constexpr (OP == kSum) return a + b;
  if constexpr (OP == kProduct) return a * b;
  return a > b || a != a ? a : b;  // NaN wins
}

// How the merged value becomes an output: a mean is a sum over `count`, a minimum the negative of a maximum.
struct Finish {
  float sign;
  double count;  // below 0 where nothing is divided
};

template <typename T, typename A>
__device__ __forceinline__ T finished(A value, Finish finish) {
  if (finish.count >= 0.0) value = value / (A)finish.count;
  T result;
  from_float((float)value * finish.sign, &result);
  return result;
}

// Where a part of a row goes: to the output if it is all of it, else to the workspace.
template <typename T, typename A>
__device__ __forceinline__ void put(A value, int64_t output, int64_t split, int64_t splits, Finish finish, T *out,
                                    A *parts) {
  if (splits == 1)
    out[output] = finished<T, A>(value, finish);
  else
    parts[output * splits + split] = value;
}

// Elements before the first 16-byte boundary of a run.
template <typename T>
__device__ __forceinline__ int64_t head_of(const T *row, int64_t N) {
  const int64_t head = (16 - (int64_t)((uintptr_t)row % 16)) % 16 / (int64_t)sizeof(T);
  return head < N ? head : N;
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
__device__ __forceinline__ double in_block(const double *mine, int rank) {
  uint32_t place = (uint32_t)__cvta_generic_to_shared(mine), there;
  double value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(there) : "memory");
  return value;
}
#else  // never launched there: see has_clusters
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() { __trap(); }
__device__ __forceinline__ void cluster_wait() { __trap(); }
__device__ __forceinline__ float in_block(const float *mine, int) { return *mine; }
__device__ __forceinline__ double in_block(const double *mine, int) { return *mine; }
#endif

// The values of a cluster's blocks together, in an order that never changes; cluster_wait() must follow before a block
// ends.
template <int OP, typename A>
__device__ __forceinline__ A over_cluster(const A *slot) {
  A sum = in_block(slot, 0);
  for (int rank = 1; rank < cluster_size(); rank++) sum = merge<OP, A>(sum, in_block(slot, rank));
  return sum;
}

// Dense rows: blockDim.x threads (a power of two within a warp, or whole warps) take a row, or one part of one, and the
// block blockDim.y of them.
// CLUSTER: the parts of a row are those of a cluster's blocks.
template <typename T, int OP, bool CLUSTER>
__global__ void BOUNDS(kThreads)
    reduce_rows(const T *__restrict__ x, Walk rows, Finish finish, T *__restrict__ out,
                Accumulator<T, OP> *__restrict__ parts, int64_t M, int64_t N, int64_t splits, int64_t part) {
  using A = Accumulator<T, OP>;
  constexpr int V = kPack<T>;
  __shared__ A partial[2][kThreads / 32];
  __shared__ A slot;
  int half = 0;
  const int64_t groups = (M + blockDim.y - 1) / blockDim.y * splits;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x, half ^= 1) {
    const int64_t block = splits == 1 ? group : group / splits, split = splits == 1 ? 0 : group % splits;
    const int64_t row = block * blockDim.y + threadIdx.y;
    const bool live = row < M;
    const int64_t start = split * part, length = live ? (start + part < N ? part : N - start) : 0;
    const T *in = x + (live ? rows.start(row) + start : 0);
    const int64_t head = head_of(in, length), packs = (length - head) / V, step = blockDim.x;
    const T *body = in + head;
    A sum = neutral<OP>();
    for (int64_t p = threadIdx.x; p < packs; p += kHeld * step) {
      Raw<T, V> raw[kHeld];
#pragma unroll
      for (int u = 0; u < kHeld; u++)
        if (p + u * step < packs) raw[u].load(body + (p + u * step) * V, true);
#pragma unroll
      for (int u = 0; u < kHeld; u++) {
        if (p + u * step >= packs) continue;
        float v[V];
        raw[u].floats(v);
        A some = (A)(v[0] * finish.sign);
#pragma unroll
        for (int i = 1; i < V; i++) some = merge<OP, A>(some, (A)(v[i] * finish.sign));
        sum = merge<OP, A>(sum, some);
      }
    }
    for (int64_t i = threadIdx.x; i < head; i += step) sum = merge<OP, A>(sum, (A)(to_float(in[i]) * finish.sign));
    for (int64_t i = head + packs * V + threadIdx.x; i < length; i += step)
      sum = merge<OP, A>(sum, (A)(to_float(in[i]) * finish.sign));
    const int lanes = blockDim.x < 32 ? blockDim.x : 32, warps = blockDim.x / 32;
    for (int far = lanes / 2; far > 0; far /= 2) sum = merge<OP, A>(sum, __shfl_xor_sync(0xffffffffu, sum, far));
    if (warps > 1) {
      const int warp = threadIdx.y * warps + threadIdx.x / 32;
      if (threadIdx.x % 32 == 0) partial[half][warp] = sum;
      __syncthreads();
      if (threadIdx.x == 0)
        for (int i = 1; i < warps; i++) sum = merge<OP, A>(sum, partial[half][warp + i]);
    }
    if constexpr (CLUSTER) {
      if (threadIdx.x == 0) slot = sum;
      cluster_arrive();
      cluster_wait();
      if (threadIdx.x == 0 && split == 0) out[row] = finished<T, A>(over_cluster<OP, A>(&slot), finish);
      cluster_arrive();
      cluster_wait();  // none may end while others read its part
    } else if (threadIdx.x == 0 && live) {
      put<T, A>(sum, row, split, splits, finish, out, parts);
    }
  }
}

// V outputs side by side a thread, kAcross threads side by side: output o * inner + i is position i of the dimensions
// behind, o of those before. The kLines / kAcross slices of a block share the elements of its lines. CLUSTER: the parts of
// a line are those of a cluster's blocks.
template <typename T, int OP, int V, bool CLUSTER>
__global__ void BOUNDS(kLines)
    reduce_lines(const T *__restrict__ x, Walk before, Walk behind, int64_t stride, Finish finish,
                 T *__restrict__ out, Accumulator<T, OP> *__restrict__ parts, int64_t outer, int64_t inner, int64_t N,
                 int64_t splits, int64_t part) {
  using A = Accumulator<T, OP>;
  constexpr int WARPS = kLines / 32, SLICES = kLines / kAcross, WIDE = kAcross * V;
  __shared__ A partial[WARPS][V][kAcross];
  __shared__ A slots[CLUSTER ? WIDE : 1];
  const int across = threadIdx.x % kAcross, slice = threadIdx.x / kAcross;
  const int64_t count = outer * inner, groups = (count + WIDE - 1) / WIDE * splits;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t first = group / splits * WIDE, output = first + across * V, split = group % splits;
    const bool live = output < count;
    const int64_t o = live ? output / inner : 0, i = live ? output % inner : 0;
    const T *in = x + before.start(o) + behind.start(i);
    const int64_t start = split * part, stop = live ? (start + part < N ? start + part : N) : start;
    A sums[V];
#pragma unroll
    for (int v = 0; v < V; v++) sums[v] = neutral<OP>();
    for (int64_t n = start + slice; n < stop; n += kUnroll * SLICES) {
      Raw<T, V> raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (n + u * SLICES < stop) raw[u].load(in + (n + u * SLICES) * stride, true);
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (n + u * SLICES >= stop) continue;
        float values[V];
        raw[u].floats(values);
#pragma unroll
        for (int v = 0; v < V; v++) sums[v] = merge<OP, A>(sums[v], (A)(values[v] * finish.sign));
      }
    }
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
      for (int far = 16; far >= kAcross; far /= 2)
        sums[v] = merge<OP, A>(sums[v], __shfl_xor_sync(0xffffffffu, sums[v], far));
    __syncthreads();  // the readers of the lines before are done
    if (threadIdx.x % 32 < kAcross) {
#pragma unroll
      for (int v = 0; v < V; v++) partial[threadIdx.x / 32][v][across] = sums[v];
    }
    __syncthreads();
    for (int place = threadIdx.x; place < WIDE; place += kLines) {
      A sum = partial[0][place % V][place / V];
#pragma unroll
      for (int w = 1; w < WARPS; w++) sum = merge<OP, A>(sum, partial[w][place % V][place / V]);
      if constexpr (CLUSTER)
        slots[place] = sum;
      else if (first + place < count)
        put<T, A>(sum, first + place, split, splits, finish, out, parts);
    }
    if constexpr (CLUSTER) {
      cluster_arrive();
      cluster_wait();
      // Each block finishes a part of the outputs.
      for (int place = (int)split + (int)splits * (int)threadIdx.x; place < WIDE; place += (int)splits * kLines)
        if (first + place < count)
          out[first + place] = finished<T, A>(over_cluster<OP, A>(slots + place), finish);
      cluster_arrive();
      cluster_wait();  // none may end while others read its parts
    }
  }
}

// A warp puts the parts of an output together.
template <typename T, int OP>
__global__ void __launch_bounds__(256)
    reduce_parts(const Accumulator<T, OP> *__restrict__ parts, Finish finish, T *__restrict__ out, int64_t outputs,
                 int64_t splits) {
  using A = Accumulator<T, OP>;
  const int lane = threadIdx.x % 32;
  const int64_t step = (int64_t)gridDim.x * 8;
  for (int64_t output = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; output < outputs; output += step) {
    A sum = neutral<OP>();
    for (int64_t i = lane; i < splits; i += 32) sum = merge<OP, A>(sum, parts[output * splits + i]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum = merge<OP, A>(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    if (lane == 0) out[output] = finished<T, A>(sum, finish);
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

unsigned grid_of(int64_t blocks) { return (unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff); }

// The threads that share a row of so many units, with HELD of them each: a power of two within a warp, else whole warps.
int lanes_for(int64_t units, int held) {
  const int64_t wanted = (units + held - 1) / held;
  if (wanted > 32) return (int)((wanted + 31) / 32 * 32);
  int lanes = 1;
  while (lanes < wanted) lanes *= 2;
  return lanes;
}

// How the work is cut, from sizes and strides alone: the same for the workspace's size and the launch.
struct Plan {
  Walk before, behind;
  int64_t outer, inner, N, stride;
  bool rows;              // dense rows, else lines
  int64_t wide, high;     // a block's threads, for rows
  int64_t blocks;         // as many as there are without parts
  int64_t splits, part;   // parts of a row or line, and their length
};

// Cut rows or lines in so many parts, of whole packs.
void cut(Plan *plan, int64_t splits, int64_t V) {
  plan->part = splits > 1 ? ((plan->N + splits - 1) / splits + V - 1) / V * V : plan->N;
  plan->splits = plan->part > 0 ? (plan->N + plan->part - 1) / plan->part : 1;
}

bool plan_of(const AkTensor *x, int dim, Plan *plan) {
  if (!walk_of(x, 0, dim, &plan->before, &plan->outer) ||
      !walk_of(x, dim + 1, x->ndim, &plan->behind, &plan->inner))
    return false;
  plan->N = x->ndim == 0 ? 1 : x->sizes[dim];
  plan->stride = plan->N <= 1 ? 1 : x->strides[dim];
  plan->rows = plan->inner == 1 && plan->stride == 1;
  const int64_t V = x->dtype == AK_F32 ? 4 : 8;
  int64_t blocks, shortest;
  if (plan->rows) {
    plan->wide = lanes_for((plan->N + V - 1) / V, kHeld);
    if (plan->wide > kThreads) plan->wide = kThreads;
    plan->high = kThreads / plan->wide;
    blocks = (plan->outer + plan->high - 1) / plan->high;
    shortest = kShortest;
  } else {
    blocks = (plan->outer * plan->inner + kAcross * V - 1) / (kAcross * V);
    shortest = 2 * kLines / kAcross;
  }
  plan->blocks = blocks;
  const int64_t wanted = kBlocks / (blocks > 0 ? blocks : 1), most = plan->N / shortest;
  cut(plan, wanted < most ? wanted : most, V);
  return true;
}

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

template <typename T, int OP>
int run(const AkTensor *x, Plan plan, Finish finish, const AkTensor *out, const AkContext *ctx) {
  using A = Accumulator<T, OP>;
  constexpr int V = kPack<T>;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  const T *in = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  A *parts = static_cast<A *>(ctx->workspace);
  const int64_t outputs = plan.outer * plan.inner;
  // Whether lines can be read in packs.
  const bool packs = plan.inner % V == 0 && plan.behind.inner == 0 && plan.behind.stride == 1 &&
                     plan.stride % V == 0 && plan.before.outer % V == 0 && plan.before.stride % V == 0 && aligned(in);
  // A few parts go into a cluster; a cluster's blocks are all there, also those that have nothing to do.
  int size = 1;
  if (plan.splits > 1 && (plan.rows ? plan.high == 1 : packs) && plan.blocks * kLargestCluster >= kEnough && plan.blocks <= 0x7fffffff / kLargestCluster &&
      has_clusters((const void *)(reduce_rows<T, OP, true>), ctx->device)) {
    size = kLargestCluster;
    while (size / 2 >= plan.splits) size /= 2;
    plan.part = ((plan.N + size - 1) / size + V - 1) / V * V;
    plan.splits = size;
  }
  if (plan.rows) {
    const dim3 block((unsigned)plan.wide, (unsigned)plan.high);
    const dim3 grid(grid_of((plan.outer + plan.high - 1) / plan.high * plan.splits));
    if (size > 1)  // of rows so long, one a block
      return launch_clusters(reduce_rows<T, OP, true>, plan.blocks * size, (int)plan.wide, size, stream, in, plan.before,
                             finish, y, parts, plan.outer, plan.N, plan.splits, plan.part);
    reduce_rows<T, OP, false>
        <<<grid, block, 0, stream>>>(in, plan.before, finish, y, parts, plan.outer, plan.N, plan.splits, plan.part);
  } else {
    const int64_t wide = packs ? kAcross * V : kAcross, blocks = (outputs + wide - 1) / wide;
    if (size > 1 && packs)
      return launch_clusters(reduce_lines<T, OP, V, true>, blocks * size, kLines, size, stream, in, plan.before,
                             plan.behind, plan.stride, finish, y, parts, plan.outer, plan.inner, plan.N, plan.splits,
                             plan.part);
    const dim3 grid(grid_of(blocks * plan.splits));
    if (packs)
      reduce_lines<T, OP, V, false><<<grid, kLines, 0, stream>>>(in, plan.before, plan.behind, plan.stride, finish, y,
                                                                 parts, plan.outer, plan.inner, plan.N, plan.splits,
                                                                 plan.part);
    else
      reduce_lines<T, OP, 1, false><<<grid, kLines, 0, stream>>>(in, plan.before, plan.behind, plan.stride, finish, y,
                                                                 parts, plan.outer, plan.inner, plan.N, plan.splits,
                                                                 plan.part);
  }
  if (plan.splits > 1)
    reduce_parts<T, OP><<<grid_of((outputs + 7) / 8), 256, 0, stream>>>(parts, finish, y, outputs, plan.splits);
  return (int)cudaGetLastError();
}

template <typename T>
int with_op(const AkTensor *x, const Plan &plan, int op, const AkTensor *out, const AkContext *ctx) {
  switch (op) {
    case 0: return run<T, kSum>(x, plan, {1.0f, -1.0}, out, ctx);
    case 1: return run<T, kSum>(x, plan, {1.0f, (double)plan.N}, out, ctx);
    case 2: return run<T, kMax>(x, plan, {1.0f, -1.0}, out, ctx);
    case 3: return run<T, kMax>(x, plan, {-1.0f, -1.0}, out, ctx);
    case 4: return run<T, kProduct>(x, plan, {1.0f, -1.0}, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}

}  // namespace

extern "C" int64_t reduce_workspace(const AkTensor *x, int64_t dim, int32_t keepdim, int32_t op) {
  Plan plan;
  if (!plan_of(x, (int)dim, &plan) || plan.splits <= 1) return 0;
  return plan.outer * plan.inner * plan.splits * (int64_t)sizeof(double);
}

extern "C" int reduce(const AkTensor *x, int64_t dim, int32_t keepdim, int32_t op, const AkTensor *out,
                      const AkContext *ctx) {
  Plan plan;
  if (!plan_of(x, (int)dim, &plan)) return AK_NEED_CONTIGUOUS;
  if (plan.N == 0 && (op == 2 || op == 3)) return AK_UNSUPPORTED;  // nothing has no largest element
  switch (x->dtype) {
    case AK_F32: return with_op<float>(x, plan, op, out, ctx);
    case AK_F16: return with_op<__half>(x, plan, op, out, ctx);
    case AK_BF16: return with_op<__nv_bfloat16>(x, plan, op, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
