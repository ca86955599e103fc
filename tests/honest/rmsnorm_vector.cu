// kernel_type: rmsnorm
//
// Sixteen bytes at a time where the addresses allow it, one element at a time for the tail and everywhere else.
#include "autokernel.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

__device__ float weight_at(const void *weight, int dtype, int64_t at) {
  return dtype == AK_F32   ? ((const float *)weight)[at]
         : dtype == AK_F16 ? __half2float(((const __half *)weight)[at])
                           : __bfloat162float(((const __nv_bfloat16 *)weight)[at]);
}

template <typename T>
struct alignas(16) Pack {
  T at[16 / sizeof(T)];
};

template <typename T, bool kPacked>
__global__ void kernel(const T *x, const void *weight, int weight_dtype, int64_t weight_step, T *out, int64_t n,
                       float eps, float offset) {
  constexpr int W = 16 / sizeof(T);
  const T *row = x + blockIdx.x * n;
  const int64_t whole = kPacked ? n / W * W : 0;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x * W; i < whole; i += blockDim.x * W) {
    const Pack<T> pack = *(const Pack<T> *)(row + i);
    for (int j = 0; j < W; ++j) sum += (float)pack.at[j] * (float)pack.at[j];
  }
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x) sum += (float)row[i] * (float)row[i];
  __shared__ float part[8];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (float p : part) sum += p;
  const float scale = rsqrtf(sum / (float)n + eps);
  for (int64_t i = threadIdx.x * W; i < whole; i += blockDim.x * W) {
    Pack<T> pack = *(const Pack<T> *)(row + i);
    for (int j = 0; j < W; ++j) {
      const float w = weight_at(weight, weight_dtype, (i + j) * weight_step) + offset;
      pack.at[j] = (T)((float)pack.at[j] * scale * w);
    }
    *(Pack<T> *)(out + blockIdx.x * n + i) = pack;
  }
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x) {
    out[blockIdx.x * n + i] = (T)((float)row[i] * scale * (weight_at(weight, weight_dtype, i * weight_step) + offset));
  }
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out, int64_t rows,
        int64_t n, const AkContext *ctx) {
  const bool packed = n * sizeof(T) % 16 == 0 && (uintptr_t)x->data % 16 == 0 && (uintptr_t)out->data % 16 == 0;
  auto chosen = packed ? &kernel<T, true> : &kernel<T, false>;
  chosen<<<(unsigned)rows, 256, 0, (cudaStream_t)ctx->stream>>>((const T *)x->data, weight->data, weight->dtype,
                                                                weight->strides[0], (T *)out->data, n, (float)eps,
                                                                (float)offset);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n;
  switch (x->dtype) {
    case AK_F32: return run<float>(x, weight, eps, offset, out, rows, n, ctx);
    case AK_F16: return run<__half>(x, weight, eps, offset, out, rows, n, ctx);
    case AK_BF16: return run<__nv_bfloat16>(x, weight, eps, offset, out, rows, n, ctx);
  }
  return AK_UNSUPPORTED;
}
