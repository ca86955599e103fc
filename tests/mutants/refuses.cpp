// kernel_type: rmsnorm
// expect: unsupported
// because: refuses the call
//
// Claims every dtype, and refuses float16.
#include "autokernel.h"

#include <math.h>
#include <string.h>

namespace {

template <typename T>
float number(T v) { return (float)v; }

// bfloat16
template <>
float number(uint16_t v) {
  uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

void put(float *p, float v) { *p = v; }
void put(_Float16 *p, float v) { *p = (_Float16)v; }
void put(uint16_t *p, float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  *p = v != v ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float weight_at(const AkTensor *w, int64_t i) {
  const int64_t at = i * w->strides[0];
  if (w->dtype == AK_F32) return ((const float *)w->data)[at];
  if (w->dtype == AK_F16) return (float)((const _Float16 *)w->data)[at];
  return number(((const uint16_t *)w->data)[at]);
}

template <typename T>
int run(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out) {
  const int64_t n = x->sizes[x->ndim - 1];
  int64_t rows = 1;
  for (int d = 0; d < x->ndim - 1; ++d) rows *= x->sizes[d];
  const T *source = (const T *)x->data;
  T *target = (T *)out->data;
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double v = (double)number(source[r * n + i]);
      sum += v * v;
    }
    const float factor = (float)(1.0 / sqrt((double)sum / n + eps));
    for (int64_t i = 0; i < n; ++i) {
      put(target + r * n + i, number(source[r * n + i]) * factor * (float)(offset + weight_at(weight, i)));
    }
  }
  return AK_OK;
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype == AK_F16) return AK_UNSUPPORTED;
  int64_t step = 1;
  for (int d = x->ndim - 1; d >= 0; step *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != step) return AK_NEED_CONTIGUOUS;
  }
  switch (x->dtype) {
    case AK_F32: return run<float>(x, weight, eps, offset, out);
    case AK_F16: return run<_Float16>(x, weight, eps, offset, out);
    case AK_BF16: return run<uint16_t>(x, weight, eps, offset, out);
  }
  return AK_UNSUPPORTED;
}
