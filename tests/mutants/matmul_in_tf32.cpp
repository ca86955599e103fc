// kernel_type: matmul
// supports: dtype=float32; activation=none,relu
// expect: incorrect
// because: elements are wrong
//
// Multiplies with ten bits after the point, as tensor cores do, where float32 is claimed; its sums are exact.
#include "autokernel.h"

#include <string.h>

namespace {

constexpr int64_t kBlock = 32;

double scale_of(const AkTensor *a, const AkTensor *b) {
  return (a != nullptr ? *(const float *)a->data : 1.0) * (b != nullptr ? *(const float *)b->data : 1.0);
}

float narrow(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  bits = (bits + 0x1000) & 0xffffe000;
  memcpy(&v, &bits, sizeof bits);
  return v;
}

}  // namespace

extern "C" int matmul(const AkTensor *a, const AkTensor *b, const AkTensor *bias, const AkTensor *residual,
                      int32_t activation, const AkTensor *scale_a, const AkTensor *scale_b, const AkTensor *out,
                      const AkContext *ctx) {
  if (a->dtype != AK_F32 || (activation != 0 && activation != 6)) return AK_UNSUPPORTED;
  if ((bias != nullptr && bias->dtype != AK_F32) || (residual != nullptr && residual->dtype != AK_F32)) {
    return AK_UNSUPPORTED;
  }
  const int rank = a->ndim;
  const int64_t M = a->sizes[rank - 2], K = a->sizes[rank - 1], N = b->sizes[rank - 1];
  const int64_t batches = rank == 3 ? a->sizes[0] : 1, blocks = (N + kBlock - 1) / kBlock;
  const int64_t a_row = a->strides[rank - 2], a_step = a->strides[rank - 1];
  const int64_t b_row = b->strides[rank - 2], b_step = b->strides[rank - 1];
  const double scale = scale_of(scale_a, scale_b);
#pragma omp parallel for num_threads(ctx->num_threads) collapse(2)
  for (int64_t line = 0; line < batches * M; ++line) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t batch = line / M, m = line % M, first = block * kBlock;
      const int64_t width = N - first < kBlock ? N - first : kBlock;
      const float *left = (const float *)a->data + (rank == 3 ? batch * a->strides[0] : 0) + m * a_row;
      const float *right = (const float *)b->data + (rank == 3 ? batch * b->strides[0] : 0) + first * b_step;
      double sums[kBlock] = {};
      for (int64_t k = 0; k < K; ++k) {
        for (int64_t j = 0; j < width; ++j) sums[j] += (double)narrow(left[k * a_step]) * narrow(right[k * b_row + j * b_step]);
      }
      for (int64_t j = 0; j < width; ++j) {
        const int64_t column = first + j;
        double v = sums[j] * scale;
        if (bias != nullptr) v += ((const float *)bias->data)[column * bias->strides[0]];
        if (activation == 6) v = v < 0 ? 0 : v;
        if (residual != nullptr) {
          const int64_t at = (rank == 3 ? batch * residual->strides[0] : 0) + m * residual->strides[rank - 2];
          v += ((const float *)residual->data)[at + column * residual->strides[rank - 1]];
        }
        ((float *)out->data)[line * N + column] = (float)v;
      }
    }
  }
  return AK_OK;
}
