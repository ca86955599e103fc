// kernel_type: gated_activation
// supports: dtype=float32,bfloat16; kind=silu
//
// One kind only; both inputs contiguous.
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

bool dense(const AkTensor *t) {
  int64_t step = 1;
  for (int d = t->ndim - 1; d >= 0; step *= t->sizes[d--]) {
    if (t->sizes[d] != 1 && t->strides[d] != step) return false;
  }
  return true;
}

}  // namespace

extern "C" int gated_activation(const AkTensor *gate, const AkTensor *up, int32_t kind, const AkTensor *out,
                                const AkContext *ctx) {
  if (kind != 5 || gate->dtype == AK_F16 || up->dtype != gate->dtype) return AK_UNSUPPORTED;
  if (!dense(gate) || !dense(up)) return AK_NEED_CONTIGUOUS;
  int64_t count = 1;
  for (int d = 0; d < gate->ndim; ++d) count *= gate->sizes[d];
#pragma omp parallel for simd num_threads(ctx->num_threads)
  for (int64_t i = 0; i < count; ++i) {
    const float v = get(gate, i);
    set(out, i, v / (1.0f + expf(-v)) * get(up, i));
  }
  return AK_OK;
}
