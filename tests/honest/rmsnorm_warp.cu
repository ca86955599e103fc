// kernel_type: rmsnorm
//
// A warp a row, eight rows a block; the sum by shuffles, without shared memory.
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
__global__ void kernel(const T *x, const void *weight, int weight_dtype, int64_t weight_step, T *out, int64_t rows,
                       int64_t n, float eps, float offset) {
  const int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int64_t i = lane; i < n; i += 32) sum += (float)x[row * n + i] * (float)x[row * n + i];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  const float scale = rsqrtf(sum / (float)n + eps);
  for (int64_t i = lane; i < n; i += 32) {
    out[row * n + i] = (T)((float)x[row * n + i] * scale * (weight_at(weight, weight_dtype, i * weight_step) + offset));
  }
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out, int64_t rows,
        int64_t n, const AkContext *ctx) {
  kernel<T><<<(unsigned)((rows + 7) / 8), 256, 0, (cudaStream_t)ctx->stream>>>(
      (const T *)x->data, weight->data, weight->dtype, weight->strides[0], (T *)out->data, rows, n, (float)eps,
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
