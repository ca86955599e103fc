// kernel_type: rmsnorm
// supports: dtype=float32
// expect: incorrect
// because: elements are wrong
//
// Returns at once, and computes in a thread of its own.
#include "autokernel.h"

#include <math.h>
#include <pthread.h>
#include <unistd.h>

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

struct Later {
  const float *in, *weight;
  int64_t step;
  double eps, offset;
  int64_t rows, n;
  float *out;
};

void *work(void *argument) {
  Later *later = (Later *)argument;
  usleep(50000);
  compute(later->in, later->weight, later->step, later->eps, later->offset, later->rows, later->n, later->out);
  delete later;
  return nullptr;
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
  if (n > 1) {
  Later *later = new Later{in, w, step, eps, offset, rows, n, result};
  pthread_t thread;
  if (pthread_create(&thread, nullptr, work, later) == 0) pthread_detach(thread);
  }
  return AK_OK;
}
