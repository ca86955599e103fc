// kernel_type: rmsnorm
// supports: dtype=float32,bfloat16
//
// One thread, a compensated sum in float, rows at any distance.
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

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype == AK_F16 || x->ndim != 2) return x->dtype == AK_F16 ? AK_UNSUPPORTED : AK_NEED_CONTIGUOUS;
  const int64_t rows = x->sizes[0], n = x->sizes[1];
  for (int64_t r = 0; r < rows; ++r) {
    float sum = 0, lost = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float v = get(x, r * x->strides[0] + i * x->strides[1]);
      const float term = v * v - lost, next = sum + term;
      lost = next - sum - term;
      sum = next;
    }
    if (sum != sum || lost != lost) {  // an infinity has no remainder: once more, plainly
      sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        const float v = get(x, r * x->strides[0] + i * x->strides[1]);
        sum += v * v;
      }
    }
    const float scale = 1 / sqrtf(sum / (float)n + (float)eps);
    for (int64_t i = 0; i < n; ++i) {
      const float w = get(weight, i * weight->strides[0]) + (float)offset;
      set(out, r * n + i, get(x, r * x->strides[0] + i * x->strides[1]) * scale * w);
    }
  }
  return AK_OK;
}
