// kernel_type: rmsnorm
//
// y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in fp32. A row is read once, in 16-byte
// packs that its threads hold in registers, wherever alignment and length allow; otherwise it is read twice.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kHeld = 4;       // tune(memory): 1, 2, 4, 8
constexpr int kThreads = 128;  // tune(block): 32, 64, 128, 256, 512

namespace {

constexpr int kMaxThreads = 512;  // so that a thread may have 128 registers
static_assert(kHeld >= 1 && kHeld <= 16, "a thread holds its packs in registers");
static_assert(kThreads % 32 == 0 && kThreads <= kMaxThreads, "a block is whole warps");

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

// The leading dimensions of a tensor: row r starts at r * stride, or with `inner` rows in a group, groups at `outer`.
struct Rows {
  int64_t inner, outer, stride;
  __device__ __forceinline__ int64_t start(int64_t row) const {
    return inner == 0 ? row * stride : row / inner * outer + row % inner * stride;
  }
};

// A weight or bias of x's dtype or float32.
struct Parameter {
  const void *data;
  bool is_float;
};

template <typename T, int V>
__device__ __forceinline__ void load_parameter(Parameter parameter, int64_t column, float (&values)[V]) {
  if (sizeof(T) == 4 || parameter.is_float) {
    constexpr int W = V < 4 ? V : 4;
#pragma unroll
    for (int i = 0; i < V; i += W) {
      const Pack<float, W> pack = load<float, W>(static_cast<const float *>(parameter.data) + column + i);
#pragma unroll
      for (int j = 0; j < W; j++) values[i + j] = pack.v[j];
    }
  } else {
    const Pack<T, V> pack = load<T, V>(static_cast<const T *>(parameter.data) + column);
#pragma unroll
    for (int i = 0; i < V; i++) values[i] = to_float(pack.v[i]);
  }
}

// The sum over the threads of a row (blockDim.x of them), in every one of them, in an order that never changes.
__device__ __forceinline__ float row_sum(float value, float *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  __syncthreads();  // the readers of the sum before are done
  if (lane == 0) partial[first + threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? partial[first + lane] : 0.0f;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

template <typename T, int V>
__device__ __forceinline__ void finish(const Pack<T, V> &pack, Parameter weight, float offset, float scale,
                                       int64_t column, T *y) {
  float w[V];
  load_parameter<T, V>(weight, column, w);
  Pack<T, V> result;
#pragma unroll
  for (int i = 0; i < V; i++) result.v[i] = from_float<T>(to_float(pack.v[i]) * scale * (offset + w[i]));
  store<T, V>(y + column, result);
}

// A row in registers: N is a multiple of the pack and at most blockDim.x * kHeld packs; everything is aligned.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    held_rows(const T *__restrict__ x, Rows rows, Parameter weight, float eps, float offset, T *__restrict__ out,
              int64_t M, int64_t N) {
  constexpr int V = kPack<T>;
  __shared__ float partial[kMaxThreads / 32];
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < M; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool live = row < M;
    const T *in = x + (live ? rows.start(row) : 0);
    Pack<T, V> held[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; k++) {
      const int64_t column = ((int64_t)k * blockDim.x + threadIdx.x) * V;
      if (live && column < N) held[k] = load<T, V>(in + column);
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; k++) {
      const int64_t column = ((int64_t)k * blockDim.x + threadIdx.x) * V;
      if (live && column < N) {
#pragma unroll
        for (int i = 0; i < V; i++) sum += to_float(held[k].v[i]) * to_float(held[k].v[i]);
      }
    }
    const float scale = 1.0f / sqrtf(row_sum(sum, partial) / (float)N + eps);
#pragma unroll
    for (int k = 0; k < kHeld; k++) {
      const int64_t column = ((int64_t)k * blockDim.x + threadIdx.x) * V;
      if (live && column < N) finish<T, V>(held[k], weight, offset, scale, column, out + row * N);
    }
  }
}

// Rows of any length (and, with V = 1, of any alignment), read once for the sum and once for the result.
template <typename T, int V>
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_rows(const T *__restrict__ x, Rows rows, Parameter weight, float eps, float offset, T *__restrict__ out,
                  int64_t M, int64_t N) {
  __shared__ float partial[kMaxThreads / 32];
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < M; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool live = row < M;
    const T *in = x + (live ? rows.start(row) : 0);
    const int64_t length = live ? N : 0, step = (int64_t)blockDim.x * V;
    float sums[V] = {};  // several short sums err less than a long one
    for (int64_t column = (int64_t)threadIdx.x * V; column < length; column += step) {
      const Pack<T, V> pack = load<T, V>(in + column);
#pragma unroll
      for (int i = 0; i < V; i++) sums[i] += to_float(pack.v[i]) * to_float(pack.v[i]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < V; i++) sum += sums[i];
    const float scale = 1.0f / sqrtf(row_sum(sum, partial) / (float)N + eps);
    for (int64_t column = (int64_t)threadIdx.x * V; column < length; column += step)
      finish<T, V>(load<T, V>(in + column), weight, offset, scale, column, out + row * N);
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

bool parameter_of(const AkTensor *t, Parameter *parameter) {
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  *parameter = {t->data, t->dtype == AK_F32};
  return true;
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, float eps, float offset, const AkTensor *out, cudaStream_t stream) {
  constexpr int V = kPack<T>;
  Rows rows;
  Parameter w;
  if (!rows_of(x, &rows) || !parameter_of(weight, &w)) return AK_NEED_CONTIGUOUS;
  const int64_t N = x->sizes[x->ndim - 1];
  int64_t M = 1;
  for (int d = 0; d < x->ndim - 1; d++) M *= x->sizes[d];
  const bool packs = N % V == 0 && rows.outer % V == 0 && rows.stride % V == 0 && aligned(x->data) &&
                     aligned(w.data) && aligned(out->data);
  const bool held = packs && N <= (int64_t)V * kHeld * kMaxThreads;
  const int64_t share = packs ? (int64_t)V * kHeld : kHeld;  // columns of a thread, where threads are many enough
  int64_t threads = ((N + share - 1) / share + 31) / 32 * 32;
  if (threads > kMaxThreads) threads = kMaxThreads;
  const int64_t together = threads >= kThreads ? 1 : kThreads / threads;
  const dim3 block((unsigned)threads, (unsigned)together);
  const int64_t blocks = (M + together - 1) / together;
  const dim3 grid((unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff));
  const T *in = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  if (held)
    held_rows<T><<<grid, block, 0, stream>>>(in, rows, w, eps, offset, y, M, N);
  else if (packs)
    streamed_rows<T, V><<<grid, block, 0, stream>>>(in, rows, w, eps, offset, y, M, N);
  else
    streamed_rows<T, 1><<<grid, block, 0, stream>>>(in, rows, w, eps, offset, y, M, N);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (weight->dtype != x->dtype && weight->dtype != AK_F32) return AK_UNSUPPORTED;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (x->dtype) {
    case AK_F32: return run<float>(x, weight, (float)eps, (float)offset, out, stream);
    case AK_F16: return run<__half>(x, weight, (float)eps, (float)offset, out, stream);
    case AK_BF16: return run<__nv_bfloat16>(x, weight, (float)eps, (float)offset, out, stream);
    default: return AK_UNSUPPORTED;
  }
}
