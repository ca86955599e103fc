// kernel_type: rmsnorm
// supports: dtype=float32,float16
//
// Sums blocks of 64 columns in float and the blocks pairwise, as numpy does. Contiguous input only.
#include "autokernel.h"

#include <math.h>

namespace {

template <typename T>
float squares(const T *p, int64_t n) {
  if (n <= 64) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (float)p[i] * (float)p[i];
    return sum;
  }
  const int64_t half = n / 128 * 64 + 64;
  return half < n ? squares(p, half) + squares(p + half, n - half) : squares(p, n / 2) + squares(p + n / 2, n - n / 2);
}

float at(const AkTensor *w, int64_t i) {
  i *= w->strides[0];
  return w->dtype == AK_F32 ? ((const float *)w->data)[i] : (float)((const _Float16 *)w->data)[i];
}

template <typename T>
int run(const T *in, const AkTensor *weight, float eps, float offset, int64_t rows, int64_t n, T *out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = 1 / sqrtf(squares(in + r * n, n) / (float)n + eps);
    for (int64_t i = 0; i < n; ++i) out[r * n + i] = (T)((float)in[r * n + i] * scale * (at(weight, i) + offset));
  }
  return AK_OK;
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype == AK_BF16 || weight->dtype == AK_BF16) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n;
  if (x->dtype == AK_F32) {
    return run((const float *)x->data, weight, (float)eps, (float)offset, rows, n, (float *)out->data,
               ctx->num_threads);
  }
  return run((const _Float16 *)x->data, weight, (float)eps, (float)offset, rows, n, (_Float16 *)out->data,
             ctx->num_threads);
}
