// kernel_type: activation
//
// Every kind and dtype and any strides: a functor for each kind, an odometer over the dimensions, double inside.
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

double smooth(double x, double u) { return x / (1 + exp(-u)); }

double activate(double x, int kind) {
  switch (kind) {
    case 0: return x;
    case 1: return 0.5 * x * erfc(-x * M_SQRT1_2);
    case 2:
    case 3: return smooth(x, 1.5957691216057308 * (x + 0.044715 * x * x * x));
    case 4: return smooth(x, 1.702 * x);
    case 5: return smooth(x, x);
    case 6: return x < 0 ? 0 : x;
  }
  return x < 0 ? 0 : x * x;
}

}  // namespace

extern "C" int activation(const AkTensor *x, int32_t kind, const AkTensor *out, const AkContext *ctx) {
  int64_t count = 1;
  for (int d = 0; d < x->ndim; ++d) count *= x->sizes[d];
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t i = 0; i < count; ++i) {
    int64_t from = 0, rest = i;
    for (int d = x->ndim - 1; d >= 0; --d) {
      from += rest % x->sizes[d] * x->strides[d];
      rest /= x->sizes[d];
    }
    set(out, i, (float)activate(get(x, from), kind));
  }
  return AK_OK;
}
