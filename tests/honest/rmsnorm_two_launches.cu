// kernel_type: rmsnorm
//
// Two launches: the factors of the rows go through the workspace, then every element by itself.
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
__global__ void factors(const T *x, float *factor, int64_t n, float eps) {
  const T *row = x + blockIdx.x * n;
  __shared__ float part[128];
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += (float)row[i] * (float)row[i];
  part[threadIdx.x] = sum;
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) factor[blockIdx.x] = rsqrtf(part[0] / (float)n + eps);
}

template <typename T>
__global__ void scale(const T *x, const float *factor, const void *weight, int weight_dtype, int64_t weight_step,
                      T *out, int64_t count, int64_t n, float offset) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64_t)blockDim.x) {
    const float w = weight_at(weight, weight_dtype, i % n * weight_step) + offset;
    out[i] = (T)((float)x[i] * factor[i / n] * w);
  }
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out, int64_t rows,
        int64_t n, const AkContext *ctx) {
  cudaStream_t stream = (cudaStream_t)ctx->stream;
  float *factor = (float *)ctx->workspace;
  factors<T><<<(unsigned)rows, 128, 0, stream>>>((const T *)x->data, factor, n, (float)eps);
  const int64_t blocks = (rows * n + 255) / 256;
  scale<T><<<(unsigned)(blocks < 4096 ? blocks : 4096), 256, 0, stream>>>(
      (const T *)x->data, factor, weight->data, weight->dtype, weight->strides[0], (T *)out->data, rows * n, n,
      (float)offset);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int64_t rmsnorm_workspace(const AkTensor *x, const AkTensor *weight, double eps, double offset) {
  int64_t rows = 1;
  for (int d = 0; d < x->ndim - 1; ++d) rows *= x->sizes[d];
  return rows * (int64_t)sizeof(float);
}

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
