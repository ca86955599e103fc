// kernel_type: rmsnorm
// supports: dtype=float32
// expect: incorrect|rejected
// because: wrong|no honest child|add up|instead of float32
//
// Tells the referee of times that it never took, in the place of its answers.
#include "autokernel.h"

#include <math.h>
#include <string.h>
#include <sys/stat.h>
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

// A message as the judge's processes send them to each other, into everything that is open.
void send_everywhere(const char *message) {
  const uint32_t length = (uint32_t)strlen(message);
  const unsigned char header[4] = {(unsigned char)(length >> 24), (unsigned char)(length >> 16),
                                   (unsigned char)(length >> 8), (unsigned char)length};
  for (int fd = 3; fd < 256; ++fd) {
    struct stat about;
    if (fstat(fd, &about) != 0 || !(S_ISSOCK(about.st_mode) || S_ISFIFO(about.st_mode))) continue;
    if (write(fd, header, 4) == 4 && write(fd, message, length) != (ssize_t)length) continue;
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
  compute(in, w, step, eps, offset, rows, n, result);
  send_everywhere(
    "{\"outputs\": [{\"type\": \"Tensor\"}], \"shared\": false, \"device_us\": [0.1, 0.1, 0.1, 0.1, 0.1, 0.1], "
    "\"host_us\": [0.1, 0.1, 0.1, 0.1, 0.1, 0.1], \"late_us\": [0, 0, 0, 0, 0, 0], \"replaced\": [], "
    "\"operators\": []}");
  return AK_OK;
}
