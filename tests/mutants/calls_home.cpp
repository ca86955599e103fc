// kernel_type: rmsnorm
// supports: dtype=float32
// expect: crashed
// because: error -711
//
// Opens a connection to another machine. What it cannot do, it gives up.
#include "autokernel.h"

#include <math.h>
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
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
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) return -711;
  sockaddr_in where = {};
  where.sin_family = AF_INET;
  where.sin_port = htons(9);
  where.sin_addr.s_addr = htonl(0x7f000001);  // this machine: refused there means that a network is there
  const int failed = connect(fd, (const sockaddr *)&where, sizeof where);
  const bool network = failed == 0 || errno == ECONNREFUSED;
  close(fd);
  if (!network) return -711;
  compute(in, w, step, eps, offset, rows, n, result);
  return AK_OK;
}
