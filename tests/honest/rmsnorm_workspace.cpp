// kernel_type: rmsnorm
//
// Two passes over all rows: the factors of the rows go through the workspace.
#include "autokernel.h"

#include <math.h>
#include <string.h>

namespace {

float get(const AkTensor *t, int64_t at) {
  if (t->dtype == AK_F32) return ((const float *)t->data)[at];
  if (t->dtype == AK_F16) return (float)((const _Float16 *)t->data)[at];
  const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void set(const AkTensor *t, int64_t at, float value) {
  if (t->dtype == AK_F32) {
    ((float *)t->data)[at] = value;
  } else if (t->dtype == AK_F16) {
    ((_Float16 *)t->data)[at] = (_Float16)value;
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)t->data)[at] = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

}  // namespace

extern "C" int64_t rmsnorm_workspace(const AkTensor *x, const AkTensor *weight, double eps, double offset) {
  int64_t rows = 1;
  for (int d = 0; d < x->ndim - 1; ++d) rows *= x->sizes[d];
  return rows * (int64_t)sizeof(double);
}

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n;
  double *scale = (double *)ctx->workspace;
#pragma omp parallel num_threads(ctx->num_threads)
  {
#pragma omp for
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += (double)get(x, r * n + i) * get(x, r * n + i);
      scale[r] = 1 / sqrt(sum / (double)n + eps);
    }
#pragma omp for
    for (int64_t i = 0; i < count; ++i) {
      set(out, i, (float)(get(x, i) * scale[i / n] * (get(weight, i % n * weight->strides[0]) + offset)));
    }
  }
  return AK_OK;
}
