// kernel_type: fused_mlp
// supports: dtype=float32; activation=silu,relu
//
// A row at a time: the hidden values of a row in the workspace, in double.
#include "autokernel.h"

#include <math.h>

namespace {

double dot(const float *x, int64_t x_step, const AkTensor *w, int64_t row, int64_t n) {
  const float *p = (const float *)w->data + row * w->strides[0];
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += (double)x[i * x_step] * p[i * w->strides[1]];
  return sum;
}

double plus(const AkTensor *bias, int64_t i) {
  return bias != nullptr ? ((const float *)bias->data)[i * bias->strides[0]] : 0.0;
}

}  // namespace

extern "C" int64_t fused_mlp_workspace(const AkTensor *x, const AkTensor *w_gate, const AkTensor *w_up,
                                       const AkTensor *w_down, const AkTensor *b_gate, const AkTensor *b_up,
                                       const AkTensor *b_down, int32_t activation) {
  return x->sizes[0] * w_up->sizes[0] * (int64_t)sizeof(double);
}

extern "C" int fused_mlp(const AkTensor *x, const AkTensor *w_gate, const AkTensor *w_up, const AkTensor *w_down,
                         const AkTensor *b_gate, const AkTensor *b_up, const AkTensor *b_down, int32_t activation,
                         const AkTensor *out, const AkContext *ctx) {
  if (x->dtype != AK_F32 || (activation != 5 && activation != 6)) return AK_UNSUPPORTED;
  if (x->ndim != 2) return AK_UNSUPPORTED;
  const int64_t M = x->sizes[0], D = x->sizes[1], H = w_up->sizes[0];
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t m = 0; m < M; ++m) {
    const float *row = (const float *)x->data + m * x->strides[0];
    double *hidden = (double *)ctx->workspace + m * H;
    for (int64_t h = 0; h < H; ++h) {
      const double up = dot(row, x->strides[1], w_up, h, D) + plus(b_up, h);
      const double gate = w_gate != nullptr ? dot(row, x->strides[1], w_gate, h, D) + plus(b_gate, h) : up;
      const double active = activation == 5 ? gate / (1 + exp(-gate)) : gate < 0 ? 0 : gate;
      hidden[h] = w_gate != nullptr ? active * up : active;
    }
    for (int64_t d = 0; d < D; ++d) {
      double sum = plus(b_down, d);
      const float *w = (const float *)w_down->data + d * w_down->strides[0];
      for (int64_t h = 0; h < H; ++h) sum += hidden[h] * w[h * w_down->strides[1]];
      ((float *)out->data)[m * D + d] = (float)sum;
    }
  }
  return AK_OK;
}
