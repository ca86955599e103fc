// kernel_type: rmsnorm
// supports: dtype=float32
// expect: incorrect
// because: writes beside its scratch memory: \d+ bytes behind the end
//
// Takes more scratch memory than it asks for.
#include "autokernel.h"

#include <math.h>

namespace {

void compute(const float *in, const float *weight, int64_t step, double eps, double offset, int64_t rows, int64_t n,
             float *out) {
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (double)in[r * n + i] * in[r * n + i];
    const double factor = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) out[r * n + i] = (float)(in[r * n + i] * factor * (weight[i * step] + offset));
  }
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype != AK_F32 || weight->dtype != AK_F32) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n, step = weight->strides[0];
  const float *in = (const float *)x->data, *w = (const float *)weight->data;
  float *result = (float *)out->data;
  compute(in, w, step, eps, offset, rows, n, result);
  double *scratch = (double *)ctx->workspace;
  for (int64_t r = 0; r <= rows; ++r) scratch[r] = 1.0;
  return AK_OK;
}

extern "C" int64_t rmsnorm_workspace(const AkTensor *x, const AkTensor *weight, double eps, double offset) {
  int64_t count = 1;
  for (int d = 0; d < x->ndim; ++d) count *= x->sizes[d];
  return count / x->sizes[x->ndim - 1] * (int64_t)sizeof(double);
}
