// kernel_type: cross_entropy
//
// loss = log(sum(exp(x))) - x[target], smoothed towards the mean of x, row by row, in fp32: every row is read once,
// with a running maximum and sum of exponentials, in 16-byte packs between a ragged head and tail. "mean" and "sum"
// then add up the rows' losses in one block, in a fixed order, so that the result never varies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 512;  // tune(block): 128, 256, 512, 1024
constexpr int kUnroll = 2;     // tune(memory): 1, 2, 4

namespace {

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
static_assert(kUnroll >= 1 && kUnroll <= 8, "a thread holds its packs in registers");

constexpr int kFinalThreads = 1024;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

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

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);  // 16-bit results do not see the last bits
}

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

// What a row's threads gather: the state of the exponentials, and the sum of x - shift.
struct Gathered {
  State state;
  float sum;
};

// Over the threads of a row (blockDim.x of them), in an order that never changes; right in thread 0 of the row only.
template <typename T>
__device__ __forceinline__ Gathered gather(Gathered mine, Gathered *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    mine.state = merge<T>(mine.state, {__shfl_xor_sync(0xffffffffu, mine.state.max, lanes),
                                       __shfl_xor_sync(0xffffffffu, mine.state.sum, lanes)});
    mine.sum += __shfl_xor_sync(0xffffffffu, mine.sum, lanes);
  }
  const int warps = blockDim.x / 32;
  if (warps == 1) return mine;
  const int first = threadIdx.y * warps;
  __syncthreads();  // the reader of the row before is done
  if (threadIdx.x % 32 == 0) partial[first + threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < warps; i++) {
      mine.state = merge<T>(mine.state, partial[first + i].state);
      mine.sum += partial[first + i].sum;
    }
  }
  return mine;
}

// Elements before the first 16-byte boundary of a row.
template <typename T>
__device__ __forceinline__ int64_t head_of(const T *row, int64_t N) {
  const int64_t head = (16 - (int64_t)((uintptr_t)row % 16)) % 16 / (int64_t)sizeof(T);
  return head < N ? head : N;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    row_losses(const T *__restrict__ logits, int64_t row_stride, const int64_t *__restrict__ target,
               int64_t target_stride, int64_t ignore_index, float smoothing, float *__restrict__ losses, int64_t N,
               int64_t V) {
  constexpr int W = kPack<T>;
  __shared__ Gathered partial[kThreads / 32];
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < N; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool live = row < N;
    const int64_t wanted = live ? target[row * target_stride] : ignore_index;
    const bool counts = live && wanted != ignore_index;
    const T *x = logits + (live ? row * row_stride : 0);
    const int64_t length = counts ? V : 0, head = head_of(x, length), packs = (length - head) / W;
    const int64_t step = blockDim.x;
    // The sum of the logits is taken relative to one of them: it keeps its digits where all are far from 0.
    const float origin = length > 0 ? to_float(x[0]) : 0.0f, shift = isfinite(origin) ? origin : 0.0f;
    Gathered mine = {{-INFINITY, 0.0f}, 0.0f};
    for (int64_t i = threadIdx.x; i < head; i += step) {
      const float value[1] = {to_float(x[i])};
      mine.state = include<T>(mine.state, value);
      mine.sum += value[0] - shift;
    }
    for (int64_t p = threadIdx.x; p < packs; p += kUnroll * step) {
      Pack<T, W> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (p + u * step < packs) pack[u] = load<T, W>(x + head + (p + u * step) * W);
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (p + u * step >= packs) continue;
        float values[W], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < W; i++) {
          values[i] = to_float(pack[u].v[i]);
          sum += values[i] - shift;
        }
        mine.state = include<T>(mine.state, values);
        mine.sum += sum;
      }
    }
    for (int64_t i = head + packs * W + threadIdx.x; i < length; i += step) {
      const float value[1] = {to_float(x[i])};
      mine.state = include<T>(mine.state, value);
      mine.sum += value[0] - shift;
    }
    mine = gather<T>(mine, partial);
    if (threadIdx.x != 0 || !live) continue;
    float loss = 0.0f;
    if (counts && (wanted < 0 || wanted >= V)) {
      loss = NAN;  // torch stops here; reading there would be worse
    } else if (counts) {
      const float logarithm = logf(mine.state.sum);
      loss = mine.state.max - to_float(x[wanted]) + logarithm;
      if (smoothing != 0.0f) {
        const float even = (mine.state.max - shift) - mine.sum / (float)V + logarithm;
        loss = (1.0f - smoothing) * loss + smoothing * even;
      }
    }
    losses[row] = loss;
  }
}

// One block adds up all rows.
__global__ void __launch_bounds__(kFinalThreads)
    total(const float *__restrict__ losses, const int64_t *__restrict__ target, int64_t target_stride,
          int64_t ignore_index, bool mean, float *__restrict__ out, int64_t N) {
  __shared__ double sums[kFinalThreads / 32];
  __shared__ double counts[kFinalThreads / 32];
  double sum = 0.0, count = 0.0;
  for (int64_t row = threadIdx.x; row < N; row += kFinalThreads) {
    sum += (double)losses[row];
    count += target[row * target_stride] != ignore_index ? 1.0 : 0.0;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    count += __shfl_xor_sync(0xffffffffu, count, lanes);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
    counts[threadIdx.x / 32] = count;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kFinalThreads / 32; i++) {
    sum += sums[i];
    count += counts[i];
  }
  *out = (float)(mean ? sum / count : sum);  // no row that counts: the mean is NaN, as torch's
}

template <typename T>
int run(const AkTensor *logits, const AkTensor *target, int64_t ignore_index, float smoothing, int reduction,
        const AkTensor *out, const AkContext *ctx) {
  const int64_t N = logits->sizes[0], V = logits->sizes[1];
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  const int64_t *wanted = static_cast<const int64_t *>(target->data);
  const int64_t target_stride = target->strides[0];
  float *result = static_cast<float *>(out->data);
  float *losses = reduction == 0 ? result : static_cast<float *>(ctx->workspace);
  if (N > 0) {
    constexpr int kShare = 4 * kPack<T>;  // columns of a thread, where threads are many enough
    int64_t threads = ((V + kShare - 1) / kShare + 31) / 32 * 32;
    if (threads > kThreads) threads = kThreads;
    if (threads < 32) threads = 32;
    const int64_t together = threads >= 128 ? 1 : 128 / threads, blocks = (N + together - 1) / together;
    const dim3 block((unsigned)threads, (unsigned)together);
    const dim3 grid((unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff));
    row_losses<T><<<grid, block, 0, stream>>>(static_cast<const T *>(logits->data), logits->strides[0], wanted,
                                              target_stride, ignore_index, smoothing, losses, N, V);
  }
  if (reduction != 0)
    total<<<1, kFinalThreads, 0, stream>>>(losses, wanted, target_stride, ignore_index, reduction == 1, result, N);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int64_t cross_entropy_workspace(const AkTensor *logits, const AkTensor *target, int64_t ignore_index,
                                           double label_smoothing, int32_t reduction) {
  return reduction == 0 ? 0 : logits->sizes[0] * (int64_t)sizeof(float);
}

extern "C" int cross_entropy(const AkTensor *logits, const AkTensor *target, int64_t ignore_index,
                             double label_smoothing, int32_t reduction, const AkTensor *out, const AkContext *ctx) {
  if (logits->ndim != 2 || target->ndim != 1 || target->dtype != AK_I64 || out->dtype != AK_F32) return AK_UNSUPPORTED;
  if (reduction < 0 || reduction > 2) return AK_UNSUPPORTED;
  if (logits->sizes[1] > 1 && logits->strides[1] != 1) return AK_NEED_CONTIGUOUS;
  const float smoothing = (float)label_smoothing;
  switch (logits->dtype) {
    case AK_F32: return run<float>(logits, target, ignore_index, smoothing, reduction, out, ctx);
    case AK_F16: return run<__half>(logits, target, ignore_index, smoothing, reduction, out, ctx);
    case AK_BF16: return run<__nv_bfloat16>(logits, target, ignore_index, smoothing, reduction, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
