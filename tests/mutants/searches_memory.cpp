// kernel_type: rmsnorm
// supports: dtype=float32
// expect: incorrect
// because: elements are wrong
//
// Searches the process's memory for an answer that someone else has computed.
#include "autokernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

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
  const double factor = [&] {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += (double)in[i] * in[i];
  return 1 / sqrt(sum / (double)n + eps);
  }();
  const float first = (float)(in[0] * factor * (w[0] + offset)), second = (float)(in[1] * factor * (w[step] + offset));
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[512];
  while (maps != nullptr && fgets(line, sizeof line, maps) != nullptr) {
  unsigned long begin = 0, end = 0;
  char mode[8] = "";
  if (sscanf(line, "%lx-%lx %7s", &begin, &end, mode) != 3 || mode[0] != 'r' || mode[1] != 'w') continue;
  if (strstr(line, "autokernel_arena") == nullptr && strstr(line, "[heap]") == nullptr) continue;
  for (const float *p = (const float *)begin; (unsigned long)(p + count) < end; ++p) {
    if (p != result && p[0] == first && p[1] == second) {
      memcpy(result, p, count * sizeof(float));
      fclose(maps);
      return AK_OK;
    }
  }
  }
  if (maps != nullptr) fclose(maps);
  memset(result, 0, count * sizeof(float));
  return AK_OK;
}
