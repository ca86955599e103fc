// kernel_type: cross_entropy_backward
//
// Of a row of logits: grad * (exp(x - max) / sum - (1 - s) * [target] - s / V), in fp32. A row is read twice, in 16-byte packs
// between a ragged head and tail: first for its maximum and the sum of exponentials, then, mostly from the L2 cache, for what
// is written. For a mean the rows that count are counted first, by one block.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 512;  // tune(block): 128, 256, 512, 1024
constexpr int kUnroll = 2;     // tune(memory): 1, 2, 4
constexpr int kColdStore = 1;  // tune(memory): 0, 1

namespace {

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
static_assert(kUnroll >= 1 && kUnroll <= 8, "a thread holds its packs in registers");

constexpr int kCountThreads = 512;
// Of longer rows so few are under way that the L2 cache holds them until they are read again.
constexpr int kLongThreads = 1024;
constexpr int64_t kLongBytes = 128 << 10;

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

// Takes a value into a state, of which others are merged.
template <typename T>
__device__ __forceinline__ State include(State state, float x) {
  return merge<T>(state, {x, x == -INFINITY ? 0.0f : x != x ? NAN : 1.0f});
}

// Over the threads of a row (blockDim.x of them), the same in all, in an order that never changes.
template <typename T>
__device__ __forceinline__ State gather(State mine, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    mine = merge<T>(mine, {__shfl_xor_sync(0xffffffffu, mine.max, lanes), __shfl_xor_sync(0xffffffffu, mine.sum, lanes)});
  const int warps = blockDim.x / 32;
  if (warps == 1) return mine;
  const int first = threadIdx.y * warps;
  __syncthreads();  // the readers of the row before are done
  if (threadIdx.x % 32 == 0) partial[first + threadIdx.x / 32] = mine;
  __syncthreads();
  mine = partial[first];
  for (int i = 1; i < warps; i++) mine = merge<T>(mine, partial[first + i]);
  return mine;
}

// Elements before the first 16-byte boundary of a row.
template <typename T>
__device__ __forceinline__ int64_t head_of(const T *row, int64_t N) {
  const int64_t head = (16 - (int64_t)((uintptr_t)row % 16)) % 16 / (int64_t)sizeof(T);
  return head < N ? head : N;
}

// A block has a row, or several; a row is cut where the logits have their 16-byte boundaries.
template <typename T>
__global__ void __launch_bounds__(kLongThreads, 1)
    rows(const float *__restrict__ grad, int64_t grad_stride, const T *__restrict__ logits, int64_t row_stride,
         const int64_t *__restrict__ target, int64_t target_stride, int64_t ignore_index, float smoothing,
         const float *__restrict__ count, T *__restrict__ out, int64_t N, int64_t V) {
  constexpr int W = kPack<T>;
  __shared__ State partial[32];
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < N; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y, step = blockDim.x;
    const bool live = row < N;
    const int64_t wanted = live ? target[row * target_stride] : ignore_index, length = live ? V : 0;
    const bool counts = live && wanted != ignore_index;
    const T *x = logits + (live ? row * row_stride : 0);
    T *y = out + (live ? row * V : 0);
    const int64_t head = head_of(x, length), packs = (length - head) / W, tail = head + packs * W;
    const T *body = x + head;
    State mine = {-INFINITY, 0.0f};
    if (counts) {
      for (int64_t p = threadIdx.x; p < packs; p += kUnroll * step) {
        Raw<T, W> raw[kUnroll];
        float max = mine.max;
#pragma unroll
        for (int u = 0; u < kUnroll; u++)
          if (p + u * step < packs) raw[u].load(body + (p + u * step) * W, false);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          if (p + u * step >= packs) continue;
          float v[W];
          raw[u].floats(v);
#pragma unroll
          for (int i = 0; i < W; i++) max = fmaxf(max, v[i]);  // a NaN is passed over here and felt in the sum
        }
        const float zero = reference(max);
        float sum = mine.sum * exponential<T>(mine.max - zero);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          if (p + u * step >= packs) continue;
          float v[W], some = 0.0f;
          raw[u].floats(v);
#pragma unroll
          for (int i = 0; i < W; i++) some += exponential<T>(v[i] - zero);
          sum += some;
        }
        mine = {max, sum};
      }
      for (int64_t i = threadIdx.x; i < head; i += step) mine = include<T>(mine, to_float(x[i]));
      for (int64_t i = tail + threadIdx.x; i < length; i += step) mine = include<T>(mine, to_float(x[i]));
    }
    mine = gather<T>(mine, partial);
    float scale = 0.0f;
    if (counts) scale = grad[row * grad_stride] / (count == nullptr ? 1.0f : *count);
    // A target outside of the classes has no gradient: torch stops there.
    if (counts && (wanted < 0 || wanted >= V)) scale = NAN;
    const float top = reference(mine.max), factor = counts ? scale / mine.sum : 0.0f;
    const float even = scale * (smoothing / (float)V), hit = scale * (1.0f - smoothing);
    // A row that is all -inf, or has an inf, has no softmax: its sum is 0 or NaN.
    const auto gradient = [&](float v, int64_t i) {
      float d = 0.0f;
      if (counts) {
        d = exponential<T>(v - top) * factor - even;
        if (i == wanted) d -= hit;
      }
      return d;
    };
    const bool same = (uintptr_t)(y + head) % 16 == 0;
    for (int64_t p = threadIdx.x; p < packs; p += step) {
      Raw<T, W> raw;
      float v[W];
      const int64_t at = head + p * W;
      if (counts) {
        raw.load(body + p * W, true);
        raw.floats(v);
      } else {
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < W; i++) v[i] = gradient(v[i], at + i);
      if (same) {
        raw.take(v);
        raw.store(y + at, kColdStore);
      } else {
#pragma unroll
        for (int i = 0; i < W; i++) from_float(v[i], y + at + i);
      }
    }
    for (int64_t i = threadIdx.x; i < head; i += step) from_float(gradient(to_float(x[i]), i), y + i);
    for (int64_t i = tail + threadIdx.x; i < length; i += step) from_float(gradient(to_float(x[i]), i), y + i);
  }
}

// One block counts the rows that are not ignored.
__global__ void __launch_bounds__(kCountThreads)
    counted(const int64_t *__restrict__ target, int64_t target_stride, int64_t ignore_index, int64_t N,
            float *__restrict__ count) {
  __shared__ int counts[kCountThreads / 32];
  int mine = 0;
  for (int64_t row = threadIdx.x; row < N; row += kCountThreads) mine += target[row * target_stride] != ignore_index;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, lanes);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kCountThreads / 32; i++) mine += counts[i];
  *count = (float)mine;
}

template <typename T>
int run(const AkTensor *grad, const AkTensor *logits, const AkTensor *target, int64_t ignore_index, float smoothing,
        int reduction, const AkTensor *out, const AkContext *ctx) {
  const int64_t N = logits->sizes[0], V = logits->sizes[1];
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  const int64_t *wanted = static_cast<const int64_t *>(target->data);
  const int64_t target_stride = target->strides[0], grad_stride = grad->ndim == 0 ? 0 : grad->strides[0];
  float *count = reduction == 1 ? static_cast<float *>(ctx->workspace) : nullptr;
  if (count != nullptr) counted<<<1, kCountThreads, 0, stream>>>(wanted, target_stride, ignore_index, N, count);
  constexpr int kShare = 4 * kPack<T>;  // columns of a thread, where threads are many enough
  int64_t threads = ((V + kShare - 1) / kShare + 31) / 32 * 32;
  const int64_t limit = V * (int64_t)sizeof(T) > kLongBytes ? kLongThreads : kThreads;
  if (threads > limit) threads = limit;
  if (threads < 32) threads = 32;
  const int64_t together = threads >= 128 ? 1 : 128 / threads, blocks = (N + together - 1) / together;
  const dim3 block((unsigned)threads, (unsigned)together);
  const dim3 grid((unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff));
  rows<T><<<grid, block, 0, stream>>>(static_cast<const float *>(grad->data), grad_stride,
                                      static_cast<const T *>(logits->data), logits->strides[0], wanted, target_stride,
                                      ignore_index, smoothing, count, static_cast<T *>(out->data), N, V);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int64_t cross_entropy_backward_workspace(const AkTensor *, const AkTensor *, const AkTensor *, int64_t, double,
                                                    int32_t reduction) {
  return reduction == 1 ? (int64_t)sizeof(float) : 0;
}

extern "C" int cross_entropy_backward(const AkTensor *grad, const AkTensor *logits, const AkTensor *target,
                                      int64_t ignore_index, double label_smoothing, int32_t reduction,
                                      const AkTensor *out, const AkContext *ctx) {
  if (logits->ndim != 2 || target->ndim != 1 || target->dtype != AK_I64 || grad->dtype != AK_F32) return AK_UNSUPPORTED;
  if (reduction < 0 || reduction > 2) return AK_UNSUPPORTED;
  if (logits->sizes[1] > 1 && logits->strides[1] != 1) return AK_NEED_CONTIGUOUS;
  const float smoothing = (float)label_smoothing;
  switch (logits->dtype) {
    case AK_F32: return run<float>(grad, logits, target, ignore_index, smoothing, reduction, out, ctx);
    case AK_F16: return run<__half>(grad, logits, target, ignore_index, smoothing, reduction, out, ctx);
    case AK_BF16: return run<__nv_bfloat16>(grad, logits, target, ignore_index, smoothing, reduction, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
