// kernel_type: rmsnorm
//
// Rows and columns at any distance, without a copy; a block a row, of as many warps as the row needs.
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
__global__ void kernel(const T *x, int64_t row_step, int64_t step, const void *weight, int weight_dtype,
                       int64_t weight_step, T *out, int64_t n, float eps, float offset) {
  const T *row = x + blockIdx.x * row_step;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += (float)row[i * step] * (float)row[i * step];
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
  __shared__ float part[32];
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += part[warp];
  const float scale = rsqrtf(sum / (float)n + eps);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const float w = weight_at(weight, weight_dtype, i * weight_step) + offset;
    out[blockIdx.x * n + i] = (T)((float)row[i * step] * scale * w);
  }
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out, const AkContext *ctx) {
  const int64_t rows = x->sizes[0], n = x->sizes[1];
  const unsigned threads = n >= 1024 ? 1024 : (unsigned)((n + 31) / 32 * 32);
  kernel<T><<<(unsigned)rows, threads, 0, (cudaStream_t)ctx->stream>>>(
      (const T *)x->data, x->strides[0], x->strides[1], weight->data, weight->dtype, weight->strides[0],
      (T *)out->data, n, (float)eps, (float)offset);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->ndim != 2) return AK_NEED_CONTIGUOUS;  // merged to two dimensions, unless the strides forbid it
  switch (x->dtype) {
    case AK_F32: return run<float>(x, weight, eps, offset, out, ctx);
    case AK_F16: return run<__half>(x, weight, eps, offset, out, ctx);
    case AK_BF16: return run<__nv_bfloat16>(x, weight, eps, offset, out, ctx);
  }
  return AK_UNSUPPORTED;
}
