// kernel_type: rmsnorm_backward
//
// Gradients of y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension. Rows are dealt out to a fixed number
// of parts, each of which adds to a share of the weight's gradient of its own; so the result does not depend on the number
// of threads.
#include "autokernel.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int kUnroll = 4;         // tune(compute): 1, 2, 4, 8
constexpr int64_t kParts = 16;     // tune(launch): 8, 16, 32, 64
constexpr int64_t kSerial = 8192;  // tune(launch): 2048, 8192, 32768
#define SCHEDULE static            // tune(launch): static, dynamic

namespace {  // all names stay in this file: it is compiled once per CPU level, and the copies must not mix

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef F LooseF __attribute__((aligned(4), may_alias));  // anywhere in memory
typedef H LooseH __attribute__((aligned(2), may_alias));

inline F splat(float value) { return value - F{}; }

inline F load(const float *p) { return *(const LooseF *)p; }

// bfloat16
inline F load(const uint16_t *p) { return (F)(__builtin_convertvector(*(const LooseH *)p, U) << 16); }

inline F load(const _Float16 *p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  const U bits = __builtin_convertvector(*(const LooseH *)p, U), magnitude = bits & 0x7fff;
  const F scaled = (F)(magnitude << 13) * 0x1p112f;  // moves the exponent's bias, denormals included
  const U special = (U)(magnitude >= 0x7c00) & 0x7f800000;
  return (F)((U)scaled | special | (bits & 0x8000) << 16);
#endif
}

inline void store(float *p, F v) { *(LooseF *)p = v; }

inline void store(uint16_t *p, F v) {
  const U bits = (U)v, nearest = bits + 0x7fff + ((bits >> 16) & 1);
  *(LooseH *)p = __builtin_convertvector((v != v ? bits | 0x400000 : nearest) >> 16, H);
}

inline void store(_Float16 *p, F v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  const U bits = (U)v, magnitude = bits & 0x7fffffff;
  const U normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
  const U denormal = (U)((F)magnitude + 0.5f) - 0x3f000000;  // the addition rounds to multiples of 2^-24
  const U finite = magnitude < 0x38800000 ? denormal : normal;
  const U special = magnitude > 0x7f800000 ? U{} + 0x7e00 : U{} + 0x7c00;
  const U half = (magnitude >= 0x47800000 ? special : finite) | (bits >> 16 & 0x8000);
  *(LooseH *)p = __builtin_convertvector(half, H);
#endif
}

// n <= W elements, without a call: around one, GCC keeps vectors in memory.
template <typename T>
inline void copy_part(T *to, const T *from, int64_t n) {
  for (int size = W; size > 0; size /= 2) {
    if (n & size) {
      memcpy(to, from, size * sizeof(T));
      to += size;
      from += size;
    }
  }
}

// The first n <= W elements; the other lanes are 0.
template <typename T>
inline F load_part(const T *p, int64_t n) {
  T part[W] = {};
  copy_part(part, p, n);
  return load(part);
}

template <typename T>
inline void store_part(T *p, F v, int64_t n) {
  T part[W];
  store(part, v);
  copy_part(p, part, n);
}

#if defined(__AVX512F__)
#define LOW_HALF 0, 1, 2, 3, 4, 5, 6, 7
#define HIGH_HALF 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
#define LOW_HALF 0, 1, 2, 3
#define HIGH_HALF 4, 5, 6, 7
#else
#define LOW_HALF 0, 1
#define HIGH_HALF 2, 3
#endif

typedef double D __attribute__((vector_size(4 * W)));  // half as many lanes

inline D low(F v) { return __builtin_convertvector(__builtin_shufflevector(v, v, LOW_HALF), D); }
inline D high(F v) { return __builtin_convertvector(__builtin_shufflevector(v, v, HIGH_HALF), D); }

inline double sum(D v) {
  double total = 0.0;
  for (int i = 0; i < W / 2; ++i) total += v[i];
  return total;
}

template <int K>
struct Vectors {
  F of[K];
};

template <int K>
struct Sums {
  double of[K];
};

// K sums over a row of value(i, m): the vectors at i, of whose lanes m belong to the row and the others are 0. Short
// runs are added up in float, then moved to double, so that rounding does not grow with the length.
template <int K, typename Value>
inline Sums<K> accumulate(int64_t n, const Value &value) {
  constexpr int64_t kStep = kUnroll * W, kRun = 16 * kStep;
  D total[2 * K] = {};
  const auto widen = [&](int k, F part) {
    total[2 * k] += low(part);
    total[2 * k + 1] += high(part);
  };
  int64_t i = 0;
  while (i + kStep <= n) {
    F part[kUnroll][K] = {};
    for (const int64_t stop = n - i < kRun ? n : i + kRun; i + kStep <= stop; i += kStep) {
      for (int u = 0; u < kUnroll; ++u) {
        const Vectors<K> v = value(i + u * W, W);
        for (int k = 0; k < K; ++k) part[u][k] += v.of[k];
      }
    }
    for (int u = 0; u < kUnroll; ++u) {
      for (int k = 0; k < K; ++k) widen(k, part[u][k]);
    }
  }
  for (; i < n; i += W) {
    const Vectors<K> v = i + W <= n ? value(i, W) : value(i, n - i);
    for (int k = 0; k < K; ++k) widen(k, v.of[k]);
  }
  Sums<K> sums;
  for (int k = 0; k < K; ++k) sums.of[k] = sum(total[2 * k] + total[2 * k + 1]);
  return sums;
}

template <typename T>
inline F load_some(const T *p, int64_t n) {
  return n < W ? load_part(p, n) : load(p);
}

// A parameter's elements as float: where they are float32 in a row, in place, otherwise copied to `scratch`.
// An absent parameter is `absent` everywhere; `offset` is added.
bool usable(const AkTensor *p, float offset) {
  return p && p->dtype == AK_F32 && offset == 0.0f && (p->strides[0] == 1 || p->sizes[0] <= 1);
}

const float *parameter(const AkTensor *p, float offset, float absent, int64_t n, float *scratch) {
  if (usable(p, offset)) return (const float *)p->data;
  for (int64_t i = 0; i < n; ++i) {
    float value = absent;
    if (p) {
      const int64_t at = i * p->strides[0];
      if (p->dtype == AK_F32) value = ((const float *)p->data)[at] + offset;
      if (p->dtype == AK_F16) value = (float)((const _Float16 *)p->data)[at] + offset;
      if (p->dtype == AK_BF16) value = load_part((const uint16_t *)p->data + at, 1)[0] + offset;
    }
    scratch[i] = value;
  }
  return scratch;
}

// Adds up the parts' shares of a parameter's gradient, in order.
template <typename P>
void total(const float *shares, int64_t parts, int64_t n, P *out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    F sum = {};
    for (int64_t part = 0; part < parts; ++part) sum += load_part(shares + part * n + i, m);
    store_part(out + i, sum, m);
  }
}

int total_of(const float *shares, int64_t parts, int64_t n, const AkTensor &out) {
  switch (out.dtype) {
    case AK_F32: total(shares, parts, n, (float *)out.data); return AK_OK;
    case AK_F16: total(shares, parts, n, (_Float16 *)out.data); return AK_OK;
    case AK_BF16: total(shares, parts, n, (uint16_t *)out.data); return AK_OK;
  }
  return AK_UNSUPPORTED;
}

// The gradient of one row, and what it adds to a share of the weight's.
template <typename T>
void norm_row(const T *__restrict grad, const T *__restrict x, const float *__restrict scale, T *__restrict dx,
              float *__restrict dweight, int64_t n, double eps) {
  const Sums<2> sums = accumulate<2>(n, [=](int64_t i, int64_t m) {
    const F v = load_some(x + i, m);
    return Vectors<2>{v * v, load_some(grad + i, m) * load_some(scale + i, m) * v};
  });
  const double r = 1.0 / sqrt(sums.of[0] / (double)n + eps);
  const float factor = (float)r, second = (float)(r * r * sums.of[1] / (double)n);
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    const F normed = load_some(x + i, m) * factor, g = load_some(grad + i, m);
    const F v = g * load_some(scale + i, m) * factor - normed * second;
    const F share = load_some(dweight + i, m) + g * normed;
    m < W ? store_part(dx + i, v, m) : store(dx + i, v);
    m < W ? store_part(dweight + i, share, m) : store(dweight + i, share);
  }
}

// Where row `row` starts; the rows are all dimensions but the last, in order.
int64_t row_offset(const AkTensor &t, int64_t row) {
  int64_t offset = 0;
  for (int d = t.ndim - 2; d > 0; --d) {
    offset += row % t.sizes[d] * t.strides[d];
    row /= t.sizes[d];
  }
  return t.ndim > 1 ? offset + row * t.strides[0] : 0;
}

int64_t rows_of(const AkTensor &t) {
  int64_t rows = 1;
  for (int d = 0; d < t.ndim - 1; ++d) rows *= t.sizes[d];
  return rows;
}

int64_t parts_of(const AkTensor &x) {
  const int64_t rows = rows_of(x);
  return rows < kParts ? rows : kParts;
}

template <typename T>
int run(const AkTensor &grad, const AkTensor &x, const float *scale, double eps, const AkTensor &dx, float *dweight,
        int threads) {
  const int64_t n = x.sizes[x.ndim - 1], rows = rows_of(x), parts = parts_of(x);
  const T *g = (const T *)grad.data, *source = (const T *)x.data;
  T *target = (T *)dx.data;
#pragma omp parallel for num_threads(rows * n <= kSerial ? 1 : threads) schedule(SCHEDULE)
  for (int64_t part = 0; part < parts; ++part) {
    float *own = dweight + part * n;
    for (int64_t i = 0; i < n; ++i) own[i] = 0.0f;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row)
      norm_row(g + row_offset(grad, row), source + row_offset(x, row), scale, target + row * n, own, n, eps);
  }
  return AK_OK;
}

}  // namespace

extern "C" int64_t rmsnorm_backward_workspace(const AkTensor *, const AkTensor *x, const AkTensor *, double, double) {
  const int64_t n = x->sizes[x->ndim - 1];
  return (n + parts_of(*x) * n) * (int64_t)sizeof(float);
}

extern "C" int rmsnorm_backward(const AkTensor *grad, const AkTensor *x, const AkTensor *weight, double eps,
                                double offset, const AkTensor *dx, const AkTensor *dweight, const AkContext *ctx) {
  if (grad->dtype != x->dtype) return AK_UNSUPPORTED;
  const int64_t n = x->sizes[x->ndim - 1];
  if (n > 1 && (x->strides[x->ndim - 1] != 1 || grad->strides[grad->ndim - 1] != 1)) return AK_NEED_CONTIGUOUS;
  float *scratch = (float *)ctx->workspace, *shares = scratch + n;
  const float *scale = parameter(weight, (float)offset, 1.0f, n, scratch);
  int status = AK_UNSUPPORTED;
  switch (x->dtype) {
    case AK_F32: status = run<float>(*grad, *x, scale, eps, *dx, shares, ctx->num_threads); break;
    case AK_F16: status = run<_Float16>(*grad, *x, scale, eps, *dx, shares, ctx->num_threads); break;
    case AK_BF16: status = run<uint16_t>(*grad, *x, scale, eps, *dx, shares, ctx->num_threads); break;
  }
  return status == AK_OK ? total_of(shares, parts_of(*x), n, *dweight) : status;
}
