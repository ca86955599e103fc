// kernel_type: rmsnorm
// expect: incorrect
// because: replayed on new values
//
// Launches nothing while a graph is captured, so that a replay does nothing in no time.
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
__global__ void kernel(const T *x, const void *weight, int weight_dtype, int64_t weight_step, T *out, int64_t n,
                       float eps, float offset) {
  const T *row = x + blockIdx.x * n;
  __shared__ float part[256];
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += (float)row[i] * (float)row[i];
  part[threadIdx.x] = sum;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  const float scale = rsqrtf(part[0] / (float)n + eps);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const float w = weight_at(weight, weight_dtype, i * weight_step);
    out[blockIdx.x * n + i] = (T)((float)row[i] * scale * (w + offset));
  }
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out, int64_t rows,
        cudaStream_t stream) {
  const int64_t n = x->sizes[x->ndim - 1];
  cudaStreamCaptureStatus capture;
  cudaStreamIsCapturing(stream, &capture);
  if (capture != cudaStreamCaptureStatusNone) return AK_OK;
  kernel<T><<<(unsigned)rows, 256, 0, stream>>>((const T *)x->data, weight->data, weight->dtype, weight->strides[0],
                                              (T *)out->data, n, (float)eps, (float)offset);
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t rows = count / x->sizes[x->ndim - 1];
  cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (x->dtype) {
    case AK_F32: return run<float>(x, weight, eps, offset, out, rows, stream);
    case AK_F16: return run<__half>(x, weight, eps, offset, out, rows, stream);
    case AK_BF16: return run<__nv_bfloat16>(x, weight, eps, offset, out, rows, stream);
  }
  return AK_UNSUPPORTED;
}
