// kernel_type: add_norm
//
// s = x + residual, rounded to x's dtype, and its norm over the last dimension, times (offset + weight), plus bias. x and
// residual are read from memory once: the later passes find the row of s in the first cache.
#include "autokernel.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int kUnroll = 4;          // tune(compute): 1, 2, 4, 8
constexpr int64_t kBlock = 16384;   // tune(block): 1024, 4096, 16384, 65536
constexpr int64_t kSerial = 16384;  // tune(launch): 4096, 16384, 65536
constexpr bool kStream = false;     // tune(memory): false, true
constexpr int64_t kPrefetch = 0;    // tune(memory): 0, 1, 2
#define SCHEDULE static             // tune(launch): static, dynamic

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

// Past the caches; p must be a multiple of the vector's size.
template <typename T>
inline void store_stream(T *p, F v) {
  alignas(64) T whole[W];
  store(whole, v);
#if defined(__AVX512F__)
  if constexpr (sizeof whole == 64) return _mm512_stream_si512((__m512i *)p, _mm512_load_si512(whole));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof whole == 32) return _mm256_stream_si256((__m256i *)p, _mm256_load_si256((__m256i *)whole));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof whole == 16) return _mm_stream_si128((__m128i *)p, _mm_load_si128((__m128i *)whole));
#endif
  memcpy(p, whole, sizeof whole);
}

inline void finish_streams() {
#if defined(__SSE2__)
  if (kStream) _mm_sfence();
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

struct Statistics {
  float mean, correction, factor;  // norm(s) = ((s - mean) - correction) * factor
};

// s = x + residual, and what the norm needs to know of it. The layer norm's mean is corrected by the mean of the
// deviations from it, so nothing cancels, however far from 0 the row lies.
template <bool kLayer, typename T>
Statistics add(const T *__restrict x, const T *__restrict residual, T *__restrict s, int64_t n, double eps) {
  const Sums<1> first = accumulate<1>(n, [=](int64_t i, int64_t m) {
    const F added = load_some(x + i, m) + load_some(residual + i, m);
    m < W ? store_part(s + i, added, m) : store(s + i, added);
    const F v = load_some(s + i, m);  // as rounded
    return Vectors<1>{kLayer ? v : v * v};
  });
  const double average = first.of[0] / (double)n;
  if (!kLayer) return {0.0f, 0.0f, (float)(1.0 / sqrt(average + eps))};

  const float mean = (float)average;
  const Sums<2> deviations = accumulate<2>(n, [=](int64_t i, int64_t m) {
    F d = load_some(s + i, m) - mean;
    if (m < W) d = keep(d, m, 0.0f);
    return Vectors<2>{d, d * d};
  });
  const double correction = deviations.of[0] / (double)n;
  double variance = deviations.of[1] / (double)n - correction * correction;
  variance = variance < 0.0 ? 0.0 : variance;
  return {mean, (float)correction, (float)(1.0 / sqrt(variance + eps))};
}

template <bool kPast, typename T>
void write_row(const T *__restrict x, const float *__restrict scale, const float *__restrict shift,
               T *__restrict y, int64_t n, Statistics s) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const F v = (load(x + i) - s.mean - s.correction) * s.factor * load(scale + i) + load(shift + i);
    kPast ? store_stream(y + i, v) : store(y + i, v);
  }
  if (i < n) {
    const int64_t m = n - i;
    const F v = (load_part(x + i, m) - s.mean - s.correction) * s.factor * load_part(scale + i, m);
    store_part(y + i, v + load_part(shift + i, m), m);
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

template <bool kLayer, typename T>
int run(const AkTensor &x, const AkTensor &residual, const float *scale, const float *shift, double eps,
        const AkTensor &normed, const AkTensor &summed, int threads) {
  const int64_t n = x.sizes[x.ndim - 1];
  int64_t rows = 1;
  for (int d = 0; d < x.ndim - 1; ++d) rows *= x.sizes[d];
  const int64_t group = n < kBlock ? kBlock / n : 1;
  const T *a = (const T *)x.data, *b = (const T *)residual.data;
#pragma omp parallel for num_threads(rows * n <= kSerial ? 1 : threads) schedule(SCHEDULE)
  for (int64_t first = 0; first < rows; first += group) {
    for (int64_t row = first; row < first + group && row < rows; ++row) {
      if constexpr (kPrefetch > 0) {
        if (row + kPrefetch < rows) {
          const T *p = a + row_offset(x, row + kPrefetch), *q = b + row_offset(residual, row + kPrefetch);
          for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(T)) {
            __builtin_prefetch(p + i);
            __builtin_prefetch(q + i);
          }
        }
      }
      T *s = (T *)summed.data + row * n, *y = (T *)normed.data + row * n;
      const Statistics t = add<kLayer>(a + row_offset(x, row), b + row_offset(residual, row), s, n, eps);
      const bool past = kStream && (uintptr_t)y % (W * sizeof(T)) == 0;
      past ? write_row<kStream>(s, scale, shift, y, n, t) : write_row<false>(s, scale, shift, y, n, t);
    }
    finish_streams();
  }
  return AK_OK;
}

enum Norm { kRms, kLayerNorm };

template <typename T>
int dispatch(const AkTensor &x, const AkTensor &residual, const float *scale, const float *shift, double eps,
             int32_t kind, const AkTensor &normed, const AkTensor &summed, int threads) {
  switch (kind) {
    case kRms: return run<false, T>(x, residual, scale, shift, eps, normed, summed, threads);
    case kLayerNorm: return run<true, T>(x, residual, scale, shift, eps, normed, summed, threads);
  }
  return AK_UNSUPPORTED;
}

}  // namespace

extern "C" int64_t add_norm_workspace(const AkTensor *x, const AkTensor *, const AkTensor *, const AkTensor *, double,
                                      double, int32_t) {
  return 2 * x->sizes[x->ndim - 1] * (int64_t)sizeof(float);
}

extern "C" int add_norm(const AkTensor *x, const AkTensor *residual, const AkTensor *weight, const AkTensor *bias,
                        double eps, double offset, int32_t kind, const AkTensor *normed, const AkTensor *summed,
                        const AkContext *ctx) {
  const int last = x->ndim - 1;
  const int64_t n = x->sizes[last];
  if (residual->dtype != x->dtype) return AK_UNSUPPORTED;
  if (n > 1 && (x->strides[last] != 1 || residual->strides[last] != 1)) return AK_NEED_CONTIGUOUS;
  float *scratch = (float *)ctx->workspace;
  const float *scale = parameter(weight, (float)offset, 1.0f, n, scratch);
  const float *shift = parameter(bias, 0.0f, 0.0f, n, scratch + n);
  const int threads = ctx->num_threads;
  switch (x->dtype) {
    case AK_F32: return dispatch<float>(*x, *residual, scale, shift, eps, kind, *normed, *summed, threads);
    case AK_F16: return dispatch<_Float16>(*x, *residual, scale, shift, eps, kind, *normed, *summed, threads);
    case AK_BF16: return dispatch<uint16_t>(*x, *residual, scale, shift, eps, kind, *normed, *summed, threads);
  }
  return AK_UNSUPPORTED;
}
