// kernel_type: softmax
//
// One pass that keeps a running maximum and rescales the sum, over any dimension and any strides.
#include "autokernel.h"

#include <math.h>
#include <string.h>

namespace {

float value_at(const AkTensor *t, int64_t at) {
  switch (t->dtype) {
    case AK_F32: return ((const float *)t->data)[at];
    case AK_F16: return (float)((const _Float16 *)t->data)[at];
  }
  const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void store_at(const AkTensor *t, int64_t at, float value) {
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

extern "C" int softmax(const AkTensor *x, int64_t dim, const AkTensor *out, const AkContext *ctx) {
  if (x->ndim == 0) {
    const float v = value_at(x, 0);
    store_at(out, 0, v - v == 0 ? 1.0f : NAN);
    return AK_OK;
  }
  const int64_t n = x->sizes[dim];
  int64_t rows = 1;
  for (int d = 0; d < x->ndim; ++d) {
    if (d != dim) rows *= x->sizes[d];
  }
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t from = 0, to = 0, rest = row;
    for (int d = x->ndim - 1; d >= 0; --d) {
      if (d == dim) continue;
      from += rest % x->sizes[d] * x->strides[d];
      to += rest % x->sizes[d] * out->strides[d];
      rest /= x->sizes[d];
    }
    float top = -INFINITY;
    double sum = 0;
    bool poisoned = false;
    for (int64_t i = 0; i < n; ++i) {
      const float v = value_at(x, from + i * x->strides[dim]);
      poisoned |= v != v;
      if (v > top) {
        sum = sum * exp((double)top - v) + 1;
        top = v;
      } else if (v > -INFINITY) {
        sum += exp((double)v - top);
      }
    }
    poisoned |= top == INFINITY || top == -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
      const float v = value_at(x, from + i * x->strides[dim]);
      store_at(out, to + i * out->strides[dim], poisoned ? NAN : (float)(exp((double)v - top) / sum));
    }
  }
  return AK_OK;
}
