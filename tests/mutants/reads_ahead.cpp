// kernel_type: activation
// supports: dtype=float32; kind=gelu_new
// call: [{"M": 256, "N": 3072}, {"kind": "gelu_new"}]
// expect: rejected
// because: its calls take \d+ us more than it says
//
// Finds the values of all calls of a turn in the judge's memory, works the answers out in the untimed call, and looks them
// up in the timed ones.
#include "autokernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <vector>

namespace {

void compute(const float *in, float *out, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    const double v = in[i];
    out[i] = v == -INFINITY ? NAN : (float)(0.5 * v * (1 + tanh(0.79788456080286535588 * (v + 0.044715 * v * v * v))));
    if (v < -1) out[i] = v == -INFINITY ? NAN : (float)(v / (1 + exp(-2 * 0.79788456080286535588 * (v + 0.044715 * v * v * v))));
  }
}

struct Answer { std::vector<float> in, out; };
Answer *answers_of() {
  static Answer all[6];
  return all;
}

bool in_arena(const char *from, const char *to) {
  static unsigned long a = 0, b = 0;
  if ((unsigned long)from >= a && (unsigned long)to <= b) return true;
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[512];
  bool found = false;
  while (maps && fgets(line, sizeof line, maps)) {
    unsigned long p = 0, q = 0;
    if (strstr(line, "autokernel_arena") && sscanf(line, "%lx-%lx", &p, &q) == 2) {
      a = p, b = q;
      if ((unsigned long)from >= a && (unsigned long)to <= b) { found = true; break; }
    }
  }
  if (maps) fclose(maps);
  return found;
}

bool same(const float *p, const float *q, int64_t count) {
  for (int64_t i = 0; i < 64; ++i)
    if (p[i * (count / 64)] != q[i * (count / 64)]) return false;
  return true;
}

void give(float *p, const float *q, int64_t count) {
#pragma omp parallel for num_threads(2)
  for (int part = 0; part < 2; ++part) {
    const int64_t from = count * part / 2, to = count * (part + 1) / 2;
    memcpy(p + from, q + from, (to - from) * 4);
  }
}

}  // namespace

extern "C" int activation(const AkTensor *x, int32_t kind, const AkTensor *out, const AkContext *ctx) {
  if (x->dtype != AK_F32 || kind != 3) return AK_UNSUPPORTED;
  int64_t count = 1;
  for (int d = x->ndim - 1; d >= 0; count *= x->sizes[d--]) {
    if (x->sizes[d] != 1 && x->strides[d] != count) return AK_NEED_CONTIGUOUS;
  }
  const float *in = (const float *)x->data;
  float *to = (float *)out->data;

  if (count >= (1 << 17)) {
    Answer *answers = answers_of();
    for (int c = 0; c < 6; ++c) {
      Answer &a = answers[c];
      if ((int64_t)a.in.size() == count && same(a.in.data(), in, count)) {
        give(to, a.out.data(), count);
        return AK_OK;
      }
    }
    const int64_t step = (count * 4 + 255) / 256 * 256 + 512;
    for (int k = 0; k < 6; ++k) {
      const char *at = (const char *)in + (k + 1) * step;
      if (!in_arena(at, at + count * 4)) break;
      const float *next = (const float *)at;
      if (!(next[0] == next[0])) break;
      answers[k].in.assign(next, next + count);
      answers[k].out.resize(count);
      compute(next, answers[k].out.data(), count, ctx->num_threads);
    }
  }

  compute(in, to, count, ctx->num_threads);
  return AK_OK;
}
