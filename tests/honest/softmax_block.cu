// kernel_type: softmax
// supports: dtype=float32
//
// A block a line, along any dimension of contiguous input: maximum, sum, quotient by trees in shared memory.
#include "autokernel.h"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;

__device__ float largest(float a, float b) { return a != a || a > b ? a : b; }
__device__ float sum_of(float a, float b) { return a + b; }

template <typename F>
__device__ float over_block(float value, F combine) {
  __shared__ float part[kThreads];
  __syncthreads();
  part[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] = combine(part[threadIdx.x], part[threadIdx.x + half]);
  }
  __syncthreads();
  return part[0];
}

__global__ void kernel(const float *x, float *out, int64_t n, int64_t inner) {
  const int64_t line = blockIdx.x, start = line / inner * inner * n + line % inner;
  float top = -INFINITY;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) top = largest(x[start + i * inner], top);
  top = over_block(top, largest);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += expf(x[start + i * inner] - top);
  sum = over_block(sum, sum_of);
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    out[start + i * inner] = expf(x[start + i * inner] - top) / sum;
  }
}

}  // namespace

extern "C" int softmax(const AkTensor *x, int64_t dim, const AkTensor *out, const AkContext *ctx) {
  if (x->dtype != AK_F32) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  int64_t inner = 1;
  for (int d = (int)dim + 1; d < x->ndim; ++d) inner *= x->sizes[d];
  const int64_t n = x->ndim > 0 ? x->sizes[dim] : 1;
  kernel<<<(unsigned)(count / n), kThreads, 0, (cudaStream_t)ctx->stream>>>((const float *)x->data,
                                                                            (float *)out->data, n, inner);
  return (int)cudaGetLastError();
}
