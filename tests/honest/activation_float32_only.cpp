// kernel_type: activation
// supports: dtype=float32; kind=gelu_new,gelu_tanh
//
// A narrow domain, contiguous input only, and a polynomial of its own for tanh.
#include "autokernel.h"

#include <math.h>

extern "C" int activation(const AkTensor *x, int32_t kind, const AkTensor *out, const AkContext *ctx) {
  if (x->dtype != AK_F32 || (kind != 2 && kind != 3)) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; --d) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
    count *= x->sizes[d];
  }
  const float *in = (const float *)x->data;
  float *result = (float *)out->data;
#pragma omp parallel for simd num_threads(ctx->num_threads)
  for (int64_t i = 0; i < count; ++i) {
    const float v = in[i];
    // x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), which neither overflows to NaN nor cancels.
    const float u = 0.79788456080286536f * (v + 0.044715f * v * v * v);
    result[i] = v / (1.0f + expf(-2.0f * u));
  }
  return AK_OK;
}
