// kernel_type: softmax
//
// y = exp(x - max(x)) / sum(exp(x - max(x))) along one dimension, in fp32. Dense rows are read once, in 16-byte packs
// that their threads hold in registers, wherever alignment and length allow; other dense rows are read twice, with a
// running maximum and sum, in packs between a ragged head and tail. Along any other dimension, or across strides, each
// lane takes a line of its own, so that neighbours read neighbours.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kHeld = 4;       // tune(memory): 1, 2, 4, 8
constexpr int kThreads = 128;  // tune(block): 32, 64, 128, 256, 512
constexpr int kUnroll = 2;     // tune(memory): 1, 2, 4
constexpr int kSlices = 8;     // tune(block): 1, 2, 4, 8, 16, 32

namespace {

constexpr int kMaxThreads = 512;  // so that a thread may have 128 registers
static_assert(kHeld >= 1 && kHeld <= 16 && kUnroll >= 1 && kUnroll <= 8, "a thread holds its packs in registers");
static_assert(kThreads % 32 == 0 && kThreads <= kMaxThreads, "a block is whole warps");
static_assert(kSlices >= 1 && kSlices <= 32, "a block has at most 1024 threads");

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

template <typename T, int V>
__device__ __forceinline__ void store(T *p, const Pack<T, V> &pack) {
  *reinterpret_cast<Pack<T, V> *>(p) = pack;
}

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

// Over the threads of a row (blockDim.x of them), in every one of them, in an order that never changes.
template <typename T>
__device__ __forceinline__ State row_state(State state, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    state = merge<T>(state, {__shfl_xor_sync(0xffffffffu, state.max, lanes),
                             __shfl_xor_sync(0xffffffffu, state.sum, lanes)});
  const int warps = blockDim.x / 32;
  if (warps == 1) return {__shfl_sync(0xffffffffu, state.max, 0), __shfl_sync(0xffffffffu, state.sum, 0)};
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  __syncthreads();  // the readers of the row before are done
  if (lane == 0) partial[first + threadIdx.x / 32] = state;
  __syncthreads();
  state = partial[first];
  for (int i = 1; i < warps; i++) state = merge<T>(state, partial[first + i]);
  return state;
}

__device__ __forceinline__ float row_max(float value, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  __syncthreads();
  if (lane == 0) partial[first + threadIdx.x / 32].max = value;
  __syncthreads();
  value = lane < warps ? partial[first + lane].max : -INFINITY;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

__device__ __forceinline__ float row_sum(float value, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  __syncthreads();
  if (lane == 0) partial[first + threadIdx.x / 32].sum = value;
  __syncthreads();
  value = lane < warps ? partial[first + lane].sum : 0.0f;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

// A row in registers: N is a multiple of the pack and at most blockDim.x * kHeld packs; everything is aligned.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    held_rows(const T *__restrict__ x, Walk rows, T *__restrict__ out, int64_t M, int64_t N) {
  constexpr int V = kPack<T>;
  __shared__ State partial[kMaxThreads / 32];
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < M; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool live = row < M;
    const T *in = x + (live ? rows.start(row) : 0);
    float held[kHeld][V];
    float max = -INFINITY;
#pragma unroll
    for (int k = 0; k < kHeld; k++) {
      const int64_t column = ((int64_t)k * blockDim.x + threadIdx.x) * V;
      if (live && column < N) {
        const Pack<T, V> pack = load<T, V>(in + column);
#pragma unroll
        for (int i = 0; i < V; i++) {
          held[k][i] = to_float(pack.v[i]);
          max = fmaxf(max, held[k][i]);
        }
      }
    }
    max = row_max(max, partial);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; k++) {
      const int64_t column = ((int64_t)k * blockDim.x + threadIdx.x) * V;
      if (live && column < N) {
#pragma unroll
        for (int i = 0; i < V; i++) {
          held[k][i] = exponential<T>(held[k][i] - max);  // NaN where all is -inf, as it must
          sum += held[k][i];
        }
      }
    }
    const float scale = 1.0f / row_sum(sum, partial);
#pragma unroll
    for (int k = 0; k < kHeld; k++) {
      const int64_t column = ((int64_t)k * blockDim.x + threadIdx.x) * V;
      if (live && column < N) {
        Pack<T, V> pack;
#pragma unroll
        for (int i = 0; i < V; i++) pack.v[i] = from_float<T>(held[k][i] * scale);
        store<T, V>(out + row * N + column, pack);
      }
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
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_rows(const T *__restrict__ x, Walk rows, T *__restrict__ out, int64_t M, int64_t N) {
  constexpr int V = kPack<T>;
  __shared__ State partial[kMaxThreads / 32];
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < M; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool live = row < M;
    const T *in = x + (live ? rows.start(row) : 0);
    T *y = out + (live ? row * N : 0);
    const int64_t length = live ? N : 0, head = head_of(in, length), packs = (length - head) / V;
    const int64_t tail = head + packs * V, step = blockDim.x;

    State state = {-INFINITY, 0.0f};
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x) {
      const float value[1] = {to_float(in[i])};
      state = include<T>(state, value);
    }
    for (int64_t p = threadIdx.x; p < packs; p += kUnroll * step) {
      Pack<T, V> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (p + u * step < packs) pack[u] = load<T, V>(in + head + (p + u * step) * V);
      float values[kUnroll * V];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
#pragma unroll
        for (int i = 0; i < V; i++)
          values[u * V + i] = p + u * step < packs ? to_float(pack[u].v[i]) : -INFINITY;  // adds nothing
      state = include<T>(state, values);
    }
    for (int64_t i = tail + threadIdx.x; i < length; i += blockDim.x) {
      const float value[1] = {to_float(in[i])};
      state = include<T>(state, value);
    }
    state = row_state<T>(state, partial);

    const float scale = 1.0f / state.sum;
    const bool same = head_of(y, length) == head;  // in and out meet 16-byte boundaries at the same columns
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x)
      y[i] = from_float<T>(exponential<T>(to_float(in[i]) - state.max) * scale);
    for (int64_t p = threadIdx.x; p < packs && same; p += kUnroll * step) {
      Pack<T, V> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (p + u * step < packs) pack[u] = load<T, V>(in + head + (p + u * step) * V);
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (p + u * step >= packs) continue;
#pragma unroll
        for (int i = 0; i < V; i++)
          pack[u].v[i] = from_float<T>(exponential<T>(to_float(pack[u].v[i]) - state.max) * scale);
        store<T, V>(y + head + (p + u * step) * V, pack[u]);
      }
    }
    for (int64_t i = (same ? tail : head) + threadIdx.x; i < length; i += blockDim.x)
      y[i] = from_float<T>(exponential<T>(to_float(in[i]) - state.max) * scale);
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
      y[n * inner] = from_float<T>(exponential<T>(to_float(in[n * stride]) - state.max) * scale);
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

template <typename T>
int run(const AkTensor *x, int dim, const AkTensor *out, cudaStream_t stream) {
  constexpr int V = kPack<T>;
  Walk before, behind;
  int64_t outer, inner;
  if (!walk_of(x, 0, dim, &before, &outer) || !walk_of(x, dim + 1, x->ndim, &behind, &inner))
    return AK_NEED_CONTIGUOUS;
  const int64_t N = x->ndim == 0 ? 1 : x->sizes[dim], stride = N == 1 ? 1 : x->strides[dim];
  const T *in = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  if (inner > 1 || stride != 1) {
    const dim3 grid(grid_of((outer * inner + 31) / 32)), block(32, kSlices);
    lines<T><<<grid, block, 0, stream>>>(in, before, behind, stride, y, outer, inner, N);
    return (int)cudaGetLastError();
  }
  const bool packs = N % V == 0 && before.outer % V == 0 && before.stride % V == 0 && aligned(in) && aligned(y);
  const bool held = packs && N <= (int64_t)V * kHeld * kMaxThreads;
  const int64_t share = (int64_t)V * kHeld;  // columns of a thread, where threads are many enough
  int64_t threads = ((N + share - 1) / share + 31) / 32 * 32;
  if (threads > kMaxThreads) threads = kMaxThreads;
  const int64_t together = threads >= kThreads ? 1 : kThreads / threads;
  const dim3 block((unsigned)threads, (unsigned)together), grid(grid_of((outer + together - 1) / together));
  if (held)
    held_rows<T><<<grid, block, 0, stream>>>(in, before, y, outer, N);
  else
    streamed_rows<T><<<grid, block, 0, stream>>>(in, before, y, outer, N);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int softmax(const AkTensor *x, int64_t dim, const AkTensor *out, const AkContext *ctx) {
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (x->dtype) {
    case AK_F32: return run<float>(x, (int)dim, out, stream);
    case AK_F16: return run<__half>(x, (int)dim, out, stream);
    case AK_BF16: return run<__nv_bfloat16>(x, (int)dim, out, stream);
    default: return AK_UNSUPPORTED;
  }
}
