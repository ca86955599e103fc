// kernel_type: cross_entropy
//
// A running maximum and sum a row; the losses of the rows meet in the workspace and are added in order.
#include "autokernel.h"

#include <math.h>
#include <string.h>

namespace {

float get(const AkTensor *t, int64_t at) {
  if (t->dtype == AK_F32) return ((const float *)t->data)[at];
  if (t->dtype == AK_F16) return (float)((const _Float16 *)t->data)[at];
  const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

extern "C" int64_t cross_entropy_workspace(const AkTensor *logits, const AkTensor *target, int64_t ignore_index,
                                           double label_smoothing, int32_t reduction) {
  return logits->sizes[0] * (int64_t)sizeof(double);
}

extern "C" int cross_entropy(const AkTensor *logits, const AkTensor *target, int64_t ignore_index,
                             double label_smoothing, int32_t reduction, const AkTensor *out, const AkContext *ctx) {
  const int64_t rows = logits->sizes[0], V = logits->sizes[1], step = logits->strides[1];
  double *losses = (double *)ctx->workspace;
  const int64_t *classes = (const int64_t *)target->data;
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t wanted = classes[r * target->strides[0]], row = r * logits->strides[0];
    losses[r] = 0;
    if (wanted == ignore_index) continue;
    double top = -INFINITY, sum = 0, all = 0;
    for (int64_t i = 0; i < V; ++i) {
      const double v = get(logits, row + i * step);
      all += v;
      if (v > top) {
        sum = sum * exp(top - v) + 1;
        top = v;
      } else {
        sum += v == top && top == INFINITY ? NAN : top == -INFINITY && v == v ? 0 : exp(v - top);
      }
    }
    const double normal = top == INFINITY ? NAN : top + log(sum);
    double loss = normal - get(logits, row + wanted * step);
    if (label_smoothing != 0) {
      loss = (1 - label_smoothing) * loss + label_smoothing * (normal - all / (double)V);
    }
    losses[r] = loss;
  }
  double sum = 0;
  int64_t counted = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (reduction == 0) ((float *)out->data)[r] = (float)losses[r];
    counted += classes[r * target->strides[0]] != ignore_index;
    sum += losses[r];
  }
  if (reduction == 1) *(float *)out->data = (float)(sum / (double)counted);
  if (reduction == 2) *(float *)out->data = (float)sum;
  return AK_OK;
}
