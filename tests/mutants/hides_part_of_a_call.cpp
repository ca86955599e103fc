// kernel_type: rmsnorm
// supports: dtype=float32
// expect: rejected
// because: referee's clock|clock
//
// Replaces the system's clock within its process by one that shows, right after a call, two fifths of what it took; to
// everyone else it tells the truth.
#include "autokernel.h"

#include <math.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
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

long system_clock(clockid_t which, timespec *now) { return syscall(SYS_clock_gettime, which, now); }

long long real_ns() {
  timespec now;
  system_clock(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

long long hidden_ns = 0;  // from the next one who asks

int slow_clock(clockid_t which, timespec *now) {
  if (system_clock(which, now) != 0) return -1;
  if (which != CLOCK_MONOTONIC || hidden_ns == 0) return 0;
  const long long time = now->tv_sec * 1000000000LL + now->tv_nsec - hidden_ns;
  hidden_ns = 0;
  now->tv_sec = time / 1000000000LL;
  now->tv_nsec = time % 1000000000LL;
  return 0;
}

// mov rax, slow_clock; jmp rax
void replace_clock() {
  unsigned char code[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
  const void *target = (const void *)&slow_clock;
  memcpy(code + 2, &target, sizeof target);
  void *at = dlsym(RTLD_DEFAULT, "clock_gettime");
  const uintptr_t page = (uintptr_t)at & ~(uintptr_t)4095;
  if (mprotect((void *)page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) == 0) memcpy(at, code, sizeof code);
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
  static bool replaced = false;
  if (!replaced) {
    replaced = true;
    replace_clock();
  }
  const long long began = real_ns();
  compute(in, w, step, eps, offset, rows, n, result);
  hidden_ns = 3 * (real_ns() - began) / 5;
  return AK_OK;
}
