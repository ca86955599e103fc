// kernel_type: layernorm
//
// Mean and variance in one pass, as Welford has it, in double; any strides of merged rows.
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

extern "C" int layernorm(const AkTensor *x, const AkTensor *weight, const AkTensor *bias, double eps,
                         const AkTensor *out, const AkContext *ctx) {
  if (x->ndim != 2) return AK_NEED_CONTIGUOUS;
  const int64_t rows = x->sizes[0], n = x->sizes[1];
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t r = 0; r < rows; ++r) {
    double mean = 0, m2 = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double v = get(x, r * x->strides[0] + i * x->strides[1]), delta = v - mean;
      mean += delta / (double)(i + 1);
      m2 += delta * (v - mean);
    }
    const double scale = 1 / sqrt(m2 / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) {
      double v = (get(x, r * x->strides[0] + i * x->strides[1]) - mean) * scale;
      if (weight != nullptr) v *= get(weight, i * weight->strides[0]);
      if (bias != nullptr) v += get(bias, i * bias->strides[0]);
      set(out, r * n + i, (float)v);
    }
  }
  return AK_OK;
}
