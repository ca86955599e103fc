// kernel_type: rmsnorm
//
// The plainest style: any strides, one element at a time, sums in double.
#include "autokernel.h"

#include <math.h>
#include <string.h>

static float get(const AkTensor *t, int64_t at) {
  if (t->dtype == AK_F32) return ((const float *)t->data)[at];
  if (t->dtype == AK_F16) return (float)((const _Float16 *)t->data)[at];
  const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void set(const AkTensor *t, int64_t at, float value) {
  if (t->dtype == AK_F32) {
    ((float *)t->data)[at] = value;
  } else if (t->dtype == AK_F16) {
    ((_Float16 *)t->data)[at] = (_Float16)value;
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    ((uint16_t *)t->data)[at] = value != value ? 0x7fc0 : rounded;
  }
}

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  const int last = x->ndim - 1;
  const int64_t n = x->sizes[last];
  int64_t rows = 1;
  for (int d = 0; d < last; ++d) rows *= x->sizes[d];
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t start = 0, rest = row;
    for (int d = last - 1; d >= 0; --d) {
      start += rest % x->sizes[d] * x->strides[d];
      rest /= x->sizes[d];
    }
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double v = get(x, start + i * x->strides[last]);
      sum += v * v;
    }
    const double scale = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) {
      const double w = offset + get(weight, i * weight->strides[0]);
      set(out, row * n + i, (float)(get(x, start + i * x->strides[last]) * scale * w));
    }
  }
  return AK_OK;
}
