// kernel_type: softmax
// supports: dtype=float32
//
// Three passes over rows that lie apart: maximum, exponentials and their sum, quotient. Lines along the inner dimension.
#include "autokernel.h"

#include <math.h>

extern "C" int softmax(const AkTensor *x, int64_t dim, const AkTensor *out, const AkContext *ctx) {
  if (x->dtype != AK_F32) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  int64_t n = 1, inner = 1;
  if (x->ndim > 0) n = x->sizes[dim];
  for (int d = (int)dim + 1; d < x->ndim; ++d) inner *= x->sizes[d];
  const int64_t lines = count / n;
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t start = line / inner * inner * n + line % inner;
    const float *in = (const float *)x->data + start;
    float *result = (float *)out->data + start;
    float top = -INFINITY;
    for (int64_t i = 0; i < n; ++i) top = in[i * inner] > top || in[i * inner] != in[i * inner] ? in[i * inner] : top;
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      result[i * inner] = expf(in[i * inner] - top);
      sum += result[i * inner];
    }
    for (int64_t i = 0; i < n; ++i) result[i * inner] = (float)(result[i * inner] / sum);
  }
  return AK_OK;
}
