// kernel_type: rmsnorm
// supports: dtype=float32
//
// Intrinsics behind a target attribute, chosen by the processor at run time; plain code for the others.
#include "autokernel.h"

#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

void plain(const float *in, const float *w, float eps, float offset, int64_t n, float *out) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += (double)in[i] * in[i];
  const float scale = (float)(1 / sqrt(sum / (double)n + eps));
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * scale * (w[i] + offset);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void wide(const float *in, const float *w, float eps, float offset, int64_t n,
                                              float *out) {
  __m256 a = _mm256_setzero_ps(), b = a;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 u = _mm256_loadu_ps(in + i), v = _mm256_loadu_ps(in + i + 8);
    a = _mm256_fmadd_ps(u, u, a);
    b = _mm256_fmadd_ps(v, v, b);
  }
  float part[8];
  _mm256_storeu_ps(part, _mm256_add_ps(a, b));
  double sum = 0;
  for (float p : part) sum += p;
  for (; i < n; ++i) sum += (double)in[i] * in[i];
  const float scale = (float)(1 / sqrt(sum / (double)n + eps));
  const __m256 s = _mm256_set1_ps(scale), o = _mm256_set1_ps(offset);
  for (i = 0; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(in + i), s);
    _mm256_storeu_ps(out + i, _mm256_mul_ps(v, _mm256_add_ps(_mm256_loadu_ps(w + i), o)));
  }
  for (; i < n; ++i) out[i] = in[i] * scale * (w[i] + offset);
}
#endif

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype != AK_F32 || weight->dtype != AK_F32) return AK_UNSUPPORTED;
  if (weight->strides[0] != 1 && weight->sizes[0] != 1) return AK_NEED_CONTIGUOUS;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n;
  auto row = &plain;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) row = &wide;
#endif
#pragma omp parallel for num_threads(ctx->num_threads) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    row((const float *)x->data + r * n, (const float *)weight->data, (float)eps, (float)offset, n,
        (float *)out->data + r * n);
  }
  return AK_OK;
}
