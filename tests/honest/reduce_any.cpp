// kernel_type: reduce
//
// Every operation, dtype and stride; one output at a time, in double.
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

extern "C" int reduce(const AkTensor *x, int64_t dim, int32_t keepdim, int32_t op, const AkTensor *out,
                      const AkContext *ctx) {
  int64_t outputs = 1;
  for (int d = 0; d < x->ndim; ++d) outputs *= d == dim ? 1 : x->sizes[d];
  const int64_t n = x->ndim > 0 ? x->sizes[dim] : 1, step = x->ndim > 0 ? x->strides[dim] : 0;
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t o = 0; o < outputs; ++o) {
    int64_t from = 0, rest = o;
    for (int d = x->ndim - 1; d >= 0; --d) {
      if (d == dim) continue;
      from += rest % x->sizes[d] * x->strides[d];
      rest /= x->sizes[d];
    }
    double result = op == 4 ? 1 : op == 2 ? -INFINITY : op == 3 ? INFINITY : 0;
    for (int64_t i = 0; i < n; ++i) {
      const double v = get(x, from + i * step);
      if (op < 2) {
        result += v;
      } else if (op == 4) {
        result *= v;
      } else if (v != v || result != result) {
        result = NAN;
      } else if (op == 2 ? v > result : v < result) {
        result = v;
      }
    }
    set(out, o, (float)(op == 1 ? result / (double)n : result));
  }
  return AK_OK;
}
