// kernel_type: cross_entropy
//
// loss = log(sum(exp(x))) - x[target], smoothed towards the mean of x, row by row, in fp32: every row is read once,
// with a running maximum and sum of exponentials, in 16-byte packs between a ragged head and tail. "mean" and "sum"
// then add up the rows' losses in one block, in a fixed order, so that the result never varies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 128;  // tune(block): 64, 128, 256, 512
constexpr int kUnroll = 4;     // tune(memory): 1, 2, 4, 8
constexpr int kAhead = 1;      // tune(memory): 0, 1

namespace {

static_assert(kThreads % 32 == 0 && kThreads <= 512, "a block is whole warps");
static_assert(kUnroll >= 1 && kUnroll <= 8, "a thread holds its packs in registers");

constexpr int kFinalThreads = 512;

// Blocks that a multiprocessor must have registers for. From 10.0 on, ptxas would spill for so many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = kThreads < 512 ? 512 / kThreads : 1;
#else
constexpr int kBlocks = 1024 / kThreads;
#endif

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

// From 9.0 on the kernel that adds up is launched while the rows are still being read, and waits for them where it says so:
// its launch then costs nothing.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_last() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename T, bool SMOOTH>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_losses(const T *__restrict__ logits, int64_t row_stride, const int64_t *__restrict__ target,
               int64_t target_stride, int64_t ignore_index, float smoothing, float *__restrict__ losses, int64_t N,
               int64_t V) {
  constexpr int W = kPack<T>;
  __shared__ Gathered partial[kThreads / 32];
  let_next_start();
  for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < N; first += (int64_t)gridDim.x * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool live = row < N;
    const int64_t wanted = live ? target[row * target_stride] : ignore_index;
    const bool counts = live && wanted != ignore_index;
    const T *x = logits + (live ? row * row_stride : 0);
    const int64_t length = counts ? V : 0, head = head_of(x, length), packs = (length - head) / W;
    const int64_t step = blockDim.x;
    const T *body = x + head;
    // The sum of the logits is taken relative to one of them: it keeps its digits where all are far from 0.
    const float origin = SMOOTH && length > 0 ? to_float(x[0]) : 0.0f, shift = isfinite(origin) ? origin : 0.0f;
    Gathered mine = {{-INFINITY, 0.0f}, 0.0f};
    Raw<T, W> raw[kUnroll], next[kUnroll];
    const auto read = [&](Raw<T, W>(&into)[kUnroll], int64_t p) {
#pragma unroll
      for (int u = 0; u < kUnroll; u++)
        if (p + u * step < packs) into[u].load(body + (p + u * step) * W, true);
    };
    if (kAhead) read(next, threadIdx.x);
    for (int64_t p = threadIdx.x; p < packs; p += kUnroll * step) {
      if (kAhead) {
#pragma unroll
        for (int u = 0; u < kUnroll; u++) raw[u] = next[u];
        read(next, p + kUnroll * step);
      } else {
        read(raw, p);
      }
      float max = mine.state.max;
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (p + u * step >= packs) continue;
        float v[W];
        raw[u].floats(v);
#pragma unroll
        for (int i = 0; i < W; i++) max = fmaxf(max, v[i]);  // a NaN is passed over here and felt in the sum
      }
      const float zero = reference(max);
      float sum = mine.state.sum * exponential<T>(mine.state.max - zero);
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (p + u * step >= packs) continue;
        float v[W], some = 0.0f, above = 0.0f;  // of their own: several short sums err less than a long one
        raw[u].floats(v);
#pragma unroll
        for (int i = 0; i < W; i++) {
          some += exponential<T>(v[i] - zero);
          if (SMOOTH) above += v[i] - shift;
        }
        sum += some;
        mine.sum += above;
      }
      mine.state = {max, sum};
    }
    for (int64_t i = threadIdx.x; i < head; i += step) {
      const float value[1] = {to_float(x[i])};
      mine.state = include<T>(mine.state, value);
      if (SMOOTH) mine.sum += value[0] - shift;
    }
    for (int64_t i = head + packs * W + threadIdx.x; i < length; i += step) {
      const float value[1] = {to_float(x[i])};
      mine.state = include<T>(mine.state, value);
      if (SMOOTH) mine.sum += value[0] - shift;
    }
    mine = gather<T>(mine, partial);
    if (threadIdx.x != 0 || !live) continue;
    float loss = 0.0f;
    if (counts && (wanted < 0 || wanted >= V)) {
      loss = NAN;  // torch stops here; reading there would be worse
    } else if (counts) {
      const float logarithm = logf(mine.state.sum);
      loss = mine.state.max - to_float(x[wanted]) + logarithm;
      if (SMOOTH) {
        const float even = (mine.state.max - shift) - mine.sum / (float)V + logarithm;
        loss = (1.0f - smoothing) * loss + smoothing * even;
      }
    }
    losses[row] = loss;
  }
}

// One block adds up all rows.
__global__ void __launch_bounds__(kFinalThreads)
    total(const float *losses, const int64_t *__restrict__ target, int64_t target_stride,
          int64_t ignore_index, bool mean, float *__restrict__ out, int64_t N) {
  __shared__ double sums[kFinalThreads / 32];
  __shared__ double counts[kFinalThreads / 32];
  double sum = 0.0, count = 0.0;
  wait_for_last();
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

// Whether a kernel may start before the one ahead of it has ended: the device must know how, and the code must have been
// compiled for one that does.
bool starts_early(const void *kernel, int device) {
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
    const T *x = static_cast<const T *>(logits->data);
    const int64_t row_stride = logits->strides[0];
    if (smoothing != 0.0f)
      row_losses<T, true><<<grid, block, 0, stream>>>(x, row_stride, wanted, target_stride, ignore_index, smoothing,
                                                      losses, N, V);
    else
      row_losses<T, false><<<grid, block, 0, stream>>>(x, row_stride, wanted, target_stride, ignore_index, smoothing,
                                                       losses, N, V);
  }
  if (reduction == 0) return (int)cudaGetLastError();
  if (N > 0 && starts_early((const void *)total, ctx->device)) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(kFinalThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const float *read = losses;
    const cudaError_t error = cudaLaunchKernelEx(&config, total, read, wanted, target_stride, ignore_index, reduction == 1, result, N);
    return (int)error;
  }
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
