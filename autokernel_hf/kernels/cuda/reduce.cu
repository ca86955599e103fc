// kernel_type: reduce
//
// Sum, mean, maximum, minimum or product along one dimension. Dense rows are shared by the threads of a block; along
// any other dimension, or across strides, each lane has outputs of its own, so that neighbours read neighbours. Where
// the outputs are too few to fill a device, the dimension is split among blocks, whose parts a second kernel puts
// together in a fixed order. Threads move 16-byte packs where alignment and widths allow.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 256;        // tune(block): 64, 128, 256, 512
constexpr int kUnroll = 4;           // tune(memory): 1, 2, 4, 8
constexpr int kSlices = 8;           // tune(block): 1, 2, 4, 8, 16
constexpr int64_t kBlocks = 1024;    // tune(launch): 256, 512, 1024, 2048
constexpr int64_t kShortest = 8192;  // tune(launch): 2048, 8192, 32768

namespace {

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
static_assert(kSlices >= 1 && kSlices <= 32, "a block has at most 1024 threads");
static_assert(kUnroll >= 1 && kUnroll <= 16, "a thread holds its packs in registers");

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
  T v[V];
};

template <typename T>
constexpr int kPack = 16 / (int)sizeof(T);

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load(const T *p) {
  return *reinterpret_cast<const Pack<T, V> *>(p);
}

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
  return from_float<T>((float)value * finish.sign);
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

// Dense rows. A block takes blockDim.y rows, or one part of one.
template <typename T, int OP>
__global__ void __launch_bounds__(kThreads, 1)
    reduce_rows(const T *__restrict__ x, Walk rows, Finish finish, T *__restrict__ out,
                Accumulator<T, OP> *__restrict__ parts, int64_t M, int64_t N, int64_t splits, int64_t part) {
  using A = Accumulator<T, OP>;
  constexpr int V = kPack<T>;
  __shared__ A partial[kThreads / 32];
  const int64_t groups = (M + blockDim.y - 1) / blockDim.y * splits;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t row = group / splits * blockDim.y + threadIdx.y, split = group % splits;
    const bool live = row < M;
    const int64_t start = split * part, length = live ? (start + part < N ? part : N - start) : 0;
    const T *in = x + (live ? rows.start(row) + start : 0);
    const int64_t head = head_of(in, length), packs = (length - head) / V, step = blockDim.x;
    A sums[V];
#pragma unroll
    for (int i = 0; i < V; i++) sums[i] = neutral<OP>();
    for (int64_t p = threadIdx.x; p < packs; p += kUnroll * step) {
      Pack<T, V> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (p + u * step < packs) pack[u] = load<T, V>(in + head + (p + u * step) * V);
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (p + u * step >= packs) continue;
#pragma unroll
        for (int i = 0; i < V; i++) sums[i] = merge<OP, A>(sums[i], (A)(to_float(pack[u].v[i]) * finish.sign));
      }
    }
    A sum = sums[0];
#pragma unroll
    for (int i = 1; i < V; i++) sum = merge<OP, A>(sum, sums[i]);
    for (int64_t i = threadIdx.x; i < head; i += step) sum = merge<OP, A>(sum, (A)(to_float(in[i]) * finish.sign));
    for (int64_t i = head + packs * V + threadIdx.x; i < length; i += step)
      sum = merge<OP, A>(sum, (A)(to_float(in[i]) * finish.sign));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum = merge<OP, A>(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    const int warps = blockDim.x / 32, warp = threadIdx.y * warps + threadIdx.x / 32;
    if (warps > 1) {
      __syncthreads();  // the reader of the rows before is done
      if (threadIdx.x % 32 == 0) partial[warp] = sum;
      __syncthreads();
      if (threadIdx.x == 0)
        for (int i = 1; i < warps; i++) sum = merge<OP, A>(sum, partial[warp + i]);
    }
    if (threadIdx.x == 0 && live) put<T, A>(sum, row, split, splits, finish, out, parts);
  }
}

// V outputs side by side a lane: output o * inner + i is position i of the dimensions behind, o of those before. The
// slices of a block share the elements of its lanes' lines.
template <typename T, int OP, int V>
__global__ void __launch_bounds__(32 * kSlices, 1)
    reduce_lines(const T *__restrict__ x, Walk before, Walk behind, int64_t stride, Finish finish,
                 T *__restrict__ out, Accumulator<T, OP> *__restrict__ parts, int64_t outer, int64_t inner, int64_t N,
                 int64_t splits, int64_t part) {
  using A = Accumulator<T, OP>;
  __shared__ A partial[kSlices][V][32];
  const int64_t count = outer * inner, groups = (count + 32 * V - 1) / (32 * V) * splits;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t output = (group / splits * 32 + threadIdx.x) * V, split = group % splits;
    const bool live = output < count;
    const int64_t o = live ? output / inner : 0, i = live ? output % inner : 0;
    const T *in = x + before.start(o) + behind.start(i);
    const int64_t start = split * part, stop = live ? (start + part < N ? start + part : N) : start;
    A sums[V];
#pragma unroll
    for (int v = 0; v < V; v++) sums[v] = neutral<OP>();
    for (int64_t n = start + threadIdx.y; n < stop; n += kUnroll * kSlices) {
      Pack<T, V> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (n + u * kSlices < stop) pack[u] = load<T, V>(in + (n + u * kSlices) * stride);
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (n + u * kSlices >= stop) continue;
#pragma unroll
        for (int v = 0; v < V; v++) sums[v] = merge<OP, A>(sums[v], (A)(to_float(pack[u].v[v]) * finish.sign));
      }
    }
    __syncthreads();  // the readers of the lines before are done
#pragma unroll
    for (int v = 0; v < V; v++) partial[threadIdx.y][v][threadIdx.x] = sums[v];
    __syncthreads();
    for (int v = threadIdx.y; v < V; v += kSlices) {
      A sum = partial[0][v][threadIdx.x];
      for (int s = 1; s < kSlices; s++) sum = merge<OP, A>(sum, partial[s][v][threadIdx.x]);
      if (live) put<T, A>(sum, output + v, split, splits, finish, out, parts);
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

// How the work is cut, from sizes and strides alone: the same for the workspace's size and the launch.
struct Plan {
  Walk before, behind;
  int64_t outer, inner, N, stride;
  bool rows;              // dense rows, else lines
  int64_t wide, high;     // a block's threads, for rows
  int64_t splits, part;   // parts of a row or line, and their length
};

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
    const int64_t share = V * kUnroll;
    plan->wide = ((plan->N + share - 1) / share + 31) / 32 * 32;
    plan->wide = plan->wide < 32 ? 32 : plan->wide > kThreads ? kThreads : plan->wide;
    plan->high = kThreads / plan->wide;
    blocks = (plan->outer + plan->high - 1) / plan->high;
    shortest = kShortest;
  } else {
    blocks = (plan->outer * plan->inner + 32 * V - 1) / (32 * V);
    shortest = 16 * kSlices;
  }
  const int64_t wanted = kBlocks / (blocks > 0 ? blocks : 1), most = plan->N / shortest;
  const int64_t splits = wanted < most ? wanted : most;
  plan->part = splits > 1 ? ((plan->N + splits - 1) / splits + V - 1) / V * V : plan->N;
  plan->splits = plan->part > 0 ? (plan->N + plan->part - 1) / plan->part : 1;
  return true;
}

template <typename T, int OP>
int run(const AkTensor *x, const Plan &plan, Finish finish, const AkTensor *out, const AkContext *ctx) {
  using A = Accumulator<T, OP>;
  constexpr int V = kPack<T>;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  const T *in = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  A *parts = static_cast<A *>(ctx->workspace);
  const int64_t outputs = plan.outer * plan.inner;
  if (plan.rows) {
    const dim3 block((unsigned)plan.wide, (unsigned)plan.high);
    const dim3 grid(grid_of((plan.outer + plan.high - 1) / plan.high * plan.splits));
    reduce_rows<T, OP><<<grid, block, 0, stream>>>(in, plan.before, finish, y, parts, plan.outer, plan.N, plan.splits,
                                                   plan.part);
  } else {
    const bool packs = plan.inner % V == 0 && plan.behind.inner == 0 && plan.behind.stride == 1 &&
                       plan.stride % V == 0 && plan.before.outer % V == 0 && plan.before.stride % V == 0 &&
                       aligned(in);
    const int64_t lanes = packs ? 32 * V : 32;
    const dim3 grid(grid_of((outputs + lanes - 1) / lanes * plan.splits)), block(32, kSlices);
    if (packs)
      reduce_lines<T, OP, V><<<grid, block, 0, stream>>>(in, plan.before, plan.behind, plan.stride, finish, y, parts,
                                                         plan.outer, plan.inner, plan.N, plan.splits, plan.part);
    else
      reduce_lines<T, OP, 1><<<grid, block, 0, stream>>>(in, plan.before, plan.behind, plan.stride, finish, y, parts,
                                                         plan.outer, plan.inner, plan.N, plan.splits, plan.part);
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
