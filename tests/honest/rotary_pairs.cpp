// kernel_type: rotary_embedding
// supports: dtype=float32,float16
//
// A head of a position at a time, any strides, both kinds of pairs.
#include "autokernel.h"

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

void rotate(const AkTensor *x, const AkTensor *cos, const AkTensor *sin, bool interleaved, const AkTensor *out,
            int threads) {
  const int64_t B = x->sizes[0], H = x->sizes[1], S = x->sizes[2], D = x->sizes[3], R = cos->sizes[2];
#pragma omp parallel for num_threads(threads) collapse(3)
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t s = 0; s < S; ++s) {
        const int64_t from = b * x->strides[0] + h * x->strides[1] + s * x->strides[2], to = ((b * H + h) * S + s) * D;
        const int64_t c_at = (cos->sizes[0] > 1 ? b : 0) * cos->strides[0] + s * cos->strides[1];
        const int64_t s_at = (sin->sizes[0] > 1 ? b : 0) * sin->strides[0] + s * sin->strides[1];
        for (int64_t i = 0; i < R / 2; ++i) {
          const int64_t one = interleaved ? 2 * i : i, two = interleaved ? 2 * i + 1 : i + R / 2;
          const float u = get(x, from + one * x->strides[3]), v = get(x, from + two * x->strides[3]);
          set(out, to + one, u * get(cos, c_at + one * cos->strides[2]) - v * get(sin, s_at + one * sin->strides[2]));
          set(out, to + two, v * get(cos, c_at + two * cos->strides[2]) + u * get(sin, s_at + two * sin->strides[2]));
        }
        for (int64_t i = R; i < D; ++i) set(out, to + i, get(x, from + i * x->strides[3]));
      }
    }
  }
}

}  // namespace

extern "C" int rotary_embedding(const AkTensor *q, const AkTensor *k, const AkTensor *cos, const AkTensor *sin,
                                int32_t interleaved, const AkTensor *out0, const AkTensor *out1,
                                const AkContext *ctx) {
  if (q->dtype == AK_BF16) return AK_UNSUPPORTED;
  rotate(q, cos, sin, interleaved != 0, out0, ctx->num_threads);
  rotate(k, cos, sin, interleaved != 0, out1, ctx->num_threads);
  return AK_OK;
}
