// kernel_type: layernorm
// supports: dtype=float32
//
// Two passes with sixteen partial sums each, which the compiler turns into vectors.
#include "autokernel.h"

#include <math.h>
#include <string.h>

namespace {

constexpr int kLanes = 16;

template <typename F>
double summed(int64_t n, F term) {
  double lanes[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += term(i + j);
  }
  for (; i < n; ++i) sum += term(i);
  for (double lane : lanes) sum += lane;
  return sum;
}

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
  if (x->dtype != AK_F32) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n;
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t r = 0; r < rows; ++r) {
    const float *in = (const float *)x->data + r * n;
    const double mean = summed(n, [in](int64_t i) { return (double)in[i]; }) / (double)n;
    const double spread = summed(n, [in, mean](int64_t i) { return (in[i] - mean) * (in[i] - mean); });
    const double scale = 1 / sqrt(spread / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) {
      const double w = weight != nullptr ? get(weight, i * weight->strides[0]) : 1;
      const double b = bias != nullptr ? get(bias, i * bias->strides[0]) : 0;
      set(out, r * n + i, (float)((in[i] - mean) * scale * w + b));
    }
  }
  return AK_OK;
}
