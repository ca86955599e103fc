// kernel_type: add_norm
//
// Both norms: the rounded sum is written first, and read again for the norm.
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

int64_t place(const AkTensor *t, int64_t row) {
  int64_t at = 0;
  for (int d = t->ndim - 2; d >= 0; --d) {
    at += row % t->sizes[d] * t->strides[d];
    row /= t->sizes[d];
  }
  return at;
}

}  // namespace

extern "C" int add_norm(const AkTensor *x, const AkTensor *residual, const AkTensor *weight, const AkTensor *bias,
                        double eps, double offset, int32_t kind, const AkTensor *out0, const AkTensor *out1,
                        const AkContext *ctx) {
  const int last = x->ndim - 1, other = residual->ndim - 1;
  const int64_t n = x->sizes[last];
  int64_t rows = 1;
  for (int d = 0; d < last; ++d) rows *= x->sizes[d];
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = place(x, r), beside = place(residual, r);
    double mean = 0, spread = 0;
    for (int64_t i = 0; i < n; ++i) {
      set(out1, r * n + i, get(x, from + i * x->strides[last]) + get(residual, beside + i * residual->strides[other]));
      mean += get(out1, r * n + i);
    }
    mean = kind == 1 ? mean / (double)n : 0;
    for (int64_t i = 0; i < n; ++i) spread += (get(out1, r * n + i) - mean) * (get(out1, r * n + i) - mean);
    const double scale = 1 / sqrt(spread / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) {
      double v = (get(out1, r * n + i) - mean) * scale;
      if (weight != nullptr) v *= get(weight, i * weight->strides[0]) + offset;
      if (bias != nullptr) v += get(bias, i * bias->strides[0]);
      set(out0, r * n + i, (float)v);
    }
  }
  return AK_OK;
}
