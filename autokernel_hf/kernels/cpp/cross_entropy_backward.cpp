// kernel_type: cross_entropy_backward
//
// Of a row of logits: grad * (exp(x - max) / sum - (1 - s) * [target] - s / V). A row is read for its maximum, for the sum of
// exponentials, and to be written; the first cache holds most of a row of usual length.
#include "autokernel.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t kSpan = 131072;  // tune(algorithm): 1024, 4096, 131072, 1073741824
constexpr int kUnroll = 4;         // tune(compute): 1, 2, 4, 8
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

// e^t to about one unit in the last place; inf, 0, denormals and NaN as in IEEE arithmetic.
inline F exponential(F t) {
  const float kMagic = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low bits
  t = t > 130.0f ? splat(130.0f) : t;
  t = t < -150.0f ? splat(-150.0f) : t;
  const F shifted = t * 0x1.715476p0f + kMagic, n = shifted - kMagic;
  F f = t - n * 0x1.62e4p-1f;  // ln 2 in two parts; the first product is exact
  f = f - n * 1.42860677e-6f;
  F p = 1.381446700e-3f * f + 8.368780479e-3f;  // minimax on |f| <= ln(2)/2, relative error 3e-9
  p = p * f + 4.166839450e-2f;
  p = p * f + 1.666651964e-1f;
  p = p * f + 4.999999404e-1f;
  p = p * f * f + f + 1.0f;
#if defined(__AVX512F__)
  return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const I k = (I)shifted - 0x4b400000, half = k >> 1;
  return p * (F)((half + 127) << 23) * (F)((k - half + 127) << 23);
#endif
}

// The first n lanes of v; the others take the value `rest`.
inline F keep(F v, int64_t n, float rest) {
  I lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  return lane < (int32_t)n ? v : splat(rest);
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

inline F larger(F a, F b) { return a > b ? a : b; }

inline float largest(F v) {
  float lane[W];
  memcpy(lane, &v, sizeof v);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  }
  return lane[0];
}

const float kLowest = -3.402823466e38f;  // finite, so that lowest - lowest is 0

// The largest element that is a number, at least kLowest.
template <typename T>
float largest(const T *x, int64_t n) {
  F top[kUnroll];
  for (int u = 0; u < kUnroll; ++u) top[u] = splat(kLowest);
  int64_t i = 0;
  for (; i + kUnroll * W <= n; i += kUnroll * W) {
    for (int u = 0; u < kUnroll; ++u) top[u] = larger(load(x + i + u * W), top[u]);
  }
  for (; i + W <= n; i += W) top[0] = larger(load(x + i), top[0]);
  if (i < n) top[0] = larger(keep(load_part(x + i, n - i), n - i, kLowest), top[0]);
  for (int u = 1; u < kUnroll; ++u) top[0] = larger(top[u], top[0]);
  return largest(top[0]);
}

// The largest element of a row and the sum of exp(x - largest). NaN and inf turn the sum into NaN by themselves, as
// they should; a row of -inf has the sum 0, which turns the quotients into NaN.
struct Denominator {
  float largest;
  double total;
};

// Of kSpan elements at a time; the sum is rescaled when a larger element comes. `e`, if not null, receives
// exp(x - largest), of a row that is one span.
template <typename T>
Denominator measure(const T *x, float *e, int64_t n) {
  Denominator d = {kLowest, 0.0};
  for (int64_t start = 0; start < n; start += kSpan) {
    const int64_t length = n - start < kSpan ? n - start : kSpan;
    const T *from = x + start;
    const float before = d.largest, here = largest(from, length), top = here > before ? here : before;
    const Sums<1> sums = accumulate<1>(length, [=](int64_t i, int64_t m) {
      F v = exponential(load_some(from + i, m) - top);
      if (m < W) v = keep(v, m, 0.0f);
      if (e) m < W ? store_part(e + i, v, m) : store(e + i, v);
      return Vectors<1>{v};
    });
    d = {top, d.total * exp((double)before - (double)top) + sums.of[0]};
  }
  return d;
}

template <typename T>
void gradient_row(const T *__restrict x, T *__restrict y, int64_t n, int64_t target, double scale, double smoothing) {
  const Denominator d = measure(x, (float *)NULL, n);
  const float factor = (float)(scale / d.total), even = (float)(scale * smoothing / (double)n), top = d.largest;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, exponential(load(x + i) - top) * factor - even);
  if (i < n) store_part(y + i, exponential(load_part(x + i, n - i) - top) * factor - even, n - i);
  const F p = exponential(load_part(x + target, 1) - top) * factor;
  store_part(y + target, p - (float)(scale * (1.0 - smoothing)) - even, 1);
}

template <typename T>
void fill(T *y, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += W) store_part(y + i, splat(value), n - i < W ? n - i : W);
}

template <typename T>
int run(const AkTensor &grad, const AkTensor &logits, const AkTensor &target, int64_t ignore_index, double smoothing,
        bool mean, const AkTensor &out, int threads) {
  const int64_t rows = logits.sizes[0], n = logits.sizes[1];
  const float *g = (const float *)grad.data;
  const int64_t *wanted = (const int64_t *)target.data, step = grad.ndim ? grad.strides[0] : 0;
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) count += wanted[row * target.strides[0]] != ignore_index;
  const double share = mean ? 1.0 / (double)count : 1.0;
#pragma omp parallel for num_threads(rows * n <= kSerial ? 1 : threads) schedule(SCHEDULE)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t t = wanted[row * target.strides[0]];
    T *y = (T *)out.data + row * n;
    if (t == ignore_index) fill(y, n, 0.0f);
    else if (t < 0 || t >= n) fill(y, n, NAN);  // torch stops here; reading there would be worse
    else gradient_row((const T *)logits.data + row * logits.strides[0], y, n, t, share * g[row * step], smoothing);
  }
  return AK_OK;
}

}  // namespace

extern "C" int cross_entropy_backward(const AkTensor *grad, const AkTensor *logits, const AkTensor *target,
                                      int64_t ignore_index, double label_smoothing, int32_t reduction,
                                      const AkTensor *out, const AkContext *ctx) {
  if (logits->ndim != 2 || target->dtype != AK_I64 || grad->dtype != AK_F32) return AK_UNSUPPORTED;
  if (reduction < 0 || reduction > 2) return AK_UNSUPPORTED;
  if (logits->sizes[1] > 1 && logits->strides[1] != 1) return AK_NEED_CONTIGUOUS;
  const bool mean = reduction == 1;
  switch (logits->dtype) {
    case AK_F32: return run<float>(*grad, *logits, *target, ignore_index, label_smoothing, mean, *out, ctx->num_threads);
    case AK_F16: return run<_Float16>(*grad, *logits, *target, ignore_index, label_smoothing, mean, *out, ctx->num_threads);
    case AK_BF16: return run<uint16_t>(*grad, *logits, *target, ignore_index, label_smoothing, mean, *out, ctx->num_threads);
  }
  return AK_UNSUPPORTED;
}
