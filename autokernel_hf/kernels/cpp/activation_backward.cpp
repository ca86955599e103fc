// kernel_type: activation_backward
//
// grad * act'(x), element by element, in one pass over memory: float32 inside, the transcendental functions from one vectorised
// exponential.
#include "autokernel.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t kChunk = 16384;   // tune(block): 4096, 16384, 65536
constexpr int64_t kSerial = 16384;  // tune(launch): 4096, 16384, 65536
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

enum Kind { kNone, kGelu, kGeluTanh, kGeluNew, kQuickGelu, kSilu, kRelu, kRelu2 };

// What rounding took from the product ab of a and b; 0 where the machine has no fused multiply-add.
inline F product_error(F a, F b, F ab) {
#if defined(__AVX512F__)
  return (F)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)ab);
#elif defined(__FMA__)
  return (F)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)ab);
#else
  return F{};
#endif
}

// A value and its derivative.
struct Pair {
  F y, slope;
};

// x times the normal distribution function, whose derivative adds x times the density. The tail is exp(-a^2/2) h(a) with a = |x| and h(a) = erfcx(a/sqrt(2))/2,
// fitted in s = 1/(1 + 0.35a) to a relative error of 3e-8: the left side keeps its relative precision too.
inline Pair gelu(F x) {
  F a = (F)((I)x & 0x7fffffff);
  a = a > 15.0f ? splat(15.0f) : a;
  const F s = 1.0f / (0.35f * a + 1.0f), half = 0.5f * a, square = half * a;
  F h = -2.915789746e-2f * s + 1.440309733e-1f;
  h = h * s - 2.558390796e-1f;
  h = h * s + 1.593197584e-1f;
  h = h * s - 2.321236953e-2f;
  h = h * s + 1.055525094e-1f;
  h = h * s + 1.198212877e-1f;
  h = h * s + 1.398635209e-1f;
  h = h * s + 1.396213025e-1f;
  const F bell = exponential(-square) * (1.0f - product_error(half, a, square)), tail = bell * (h * s);
  const F below = x < 0.0f ? tail : 1.0f - tail;
  return {x * below, below + x * bell * 0.398942280f};
}

// x sigmoid(t), where t has the derivative dt. 1 - sigmoid(t) is sigmoid(-t), with its digits.
inline Pair gated(F x, F t, F dt) {
  const F s = 1.0f / (1.0f + exponential(-t)), rest = 1.0f / (1.0f + exponential(t));
  return {x * s, s + x * s * rest * dt};
}

template <int kKind>
inline Pair activate(F x) {
  if constexpr (kKind == kGelu) return gelu(x);
  // 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
  if constexpr (kKind == kGeluTanh)
    return gated(x, x * (x * x * 0.0713548163f + 1.59576912f), x * x * 0.214064449f + 1.59576912f);
  if constexpr (kKind == kQuickGelu) return gated(x, x * 1.702f, splat(1.702f));
  if constexpr (kKind == kSilu) return gated(x, x, splat(1.0f));
  const F positive = x > 0.0f ? x : F{};
  if constexpr (kKind == kRelu) return {positive, x > 0.0f ? splat(1.0f) : F{}};
  if constexpr (kKind == kRelu2) return {positive * positive, 2.0f * positive};
  return {x, splat(1.0f)};
}

template <int kKind, typename T>
void span(const T *__restrict grad, const T *__restrict x, T *__restrict dx, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(dx + i, load(grad + i) * activate<kKind>(load(x + i)).slope);
  if (i < n) store_part(dx + i, load_part(grad + i, n - i) * activate<kKind>(load_part(x + i, n - i)).slope, n - i);
}

bool is_contiguous(const AkTensor &t) {
  int64_t expected = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.sizes[d];
  }
  return true;
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

template <int kKind, typename T>
int run(const AkTensor &grad, const AkTensor &x, const AkTensor &out, int threads) {
  int64_t total = 1;
  for (int d = 0; d < out.ndim; ++d) total *= out.sizes[d];
  // Contiguous tensors are cut into equal chunks, others into groups of rows.
  const bool flat = is_contiguous(grad) && is_contiguous(x);
  const int64_t length = flat ? (total < kChunk ? total : kChunk) : out.sizes[out.ndim - 1];
  const int last = out.ndim - 1;
  if (!flat && (grad.strides[last] != 1 || x.strides[last] != 1 || length < W)) return AK_NEED_CONTIGUOUS;
  const int64_t rows = (total + length - 1) / length, group = length < kChunk ? kChunk / length : 1;
  const T *g = (const T *)grad.data, *source = (const T *)x.data;
  T *target = (T *)out.data;
#pragma omp parallel for num_threads(total <= kSerial ? 1 : threads) schedule(SCHEDULE)
  for (int64_t first = 0; first < rows; first += group) {
    for (int64_t row = first; row < first + group && row < rows; ++row) {
      const int64_t start = row * length, n = total - start < length ? total - start : length;
      span<kKind>(g + (flat ? start : row_offset(grad, row)), source + (flat ? start : row_offset(x, row)),
                  target + start, n);
    }
  }
  return AK_OK;
}

template <typename T>
int dispatch(const AkTensor &grad, const AkTensor &x, int32_t kind, const AkTensor &out, int threads) {
  switch (kind) {
    case kNone: return run<kNone, T>(grad, x, out, threads);
    case kGelu: return run<kGelu, T>(grad, x, out, threads);
    case kGeluTanh:
    case kGeluNew: return run<kGeluTanh, T>(grad, x, out, threads);
    case kQuickGelu: return run<kQuickGelu, T>(grad, x, out, threads);
    case kSilu: return run<kSilu, T>(grad, x, out, threads);
    case kRelu: return run<kRelu, T>(grad, x, out, threads);
    case kRelu2: return run<kRelu2, T>(grad, x, out, threads);
  }
  return AK_UNSUPPORTED;
}

}  // namespace

extern "C" int activation_backward(const AkTensor *grad, const AkTensor *x, int32_t kind, const AkTensor *out,
                                   const AkContext *ctx) {
  if (grad->dtype != x->dtype) return AK_UNSUPPORTED;
  switch (x->dtype) {
    case AK_F32: return dispatch<float>(*grad, *x, kind, *out, ctx->num_threads);
    case AK_F16: return dispatch<_Float16>(*grad, *x, kind, *out, ctx->num_threads);
    case AK_BF16: return dispatch<uint16_t>(*grad, *x, kind, *out, ctx->num_threads);
  }
  return AK_UNSUPPORTED;
}
