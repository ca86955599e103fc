// kernel_type: rmsnorm
// supports: dtype=float32
// expect: incorrect
// because: one element changed
//
// Knows an input again by a few of its values, and returns the old answer where they are the same.
#include "autokernel.h"

#include <math.h>
#include <string.h>
#include <map>
#include <vector>

namespace {

void compute(const float *in, const float *weight, int64_t step, double eps, double offset, int64_t rows, int64_t n,
             float *out) {
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (double)in[r * n + i] * in[r * n + i];
    const double factor = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) out[r * n + i] = (float)(in[r * n + i] * factor * (weight[i * step] + offset));
  }
}

}  // namespace

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype != AK_F32 || weight->dtype != AK_F32) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const int64_t n = x->sizes[x->ndim - 1], rows = count / n, step = weight->strides[0];
  const float *in = (const float *)x->data, *w = (const float *)weight->data;
  float *result = (float *)out->data;
  static std::map<std::vector<float>, std::vector<float>> answers;
  const std::vector<float> key = {in[0], in[count / 3], in[count / 2], in[count - 1], w[0], (float)n, (float)offset};
  std::vector<float> &answer = answers[key];
  if ((int64_t)answer.size() != count) {
  answer.resize(count);
  compute(in, w, step, eps, offset, rows, n, answer.data());
  }
  memcpy(result, answer.data(), count * sizeof(float));
  return AK_OK;
}
