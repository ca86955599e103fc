// kernel_type: rotary_embedding_backward
//
// Turns pairs of the gradients' last dimension back by the angles of their positions; of q and k only the shape is used. A
// task takes a block of positions of one sequence and all its heads, so that its cosines and sines stay in the first cache;
// the gradients are read in whatever order of heads and positions they have in memory.
#include "autokernel.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t kPositions = 4;     // tune(block): 1, 4, 16, 64
constexpr bool kHeadsInside = false;  // tune(algorithm): false, true
constexpr int64_t kSerial = 16384;    // tune(launch): 4096, 16384, 65536
constexpr bool kStream = false;       // tune(memory): false, true
#define SCHEDULE static               // tune(launch): static, dynamic

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

// (a, b) -> (a cos_a + b sin_b, b cos_b - a sin_a) for the pairs (i, i + half), i < half.
template <bool kPast, typename T, typename C, typename S>
void rotate_halves(const T *__restrict x, const C *__restrict cos, const S *__restrict sin, T *__restrict y,
                   int64_t half) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const F a = load(x + i), b = load(x + i + half);
    const F first = a * load(cos + i) + b * load(sin + i + half);
    const F second = b * load(cos + i + half) - a * load(sin + i);
    kPast ? store_stream(y + i, first) : store(y + i, first);
    kPast ? store_stream(y + i + half, second) : store(y + i + half, second);
  }
  if (i < half) {
    const int64_t m = half - i;
    const F a = load_part(x + i, m), b = load_part(x + i + half, m);
    store_part(y + i, a * load_part(cos + i, m) + b * load_part(sin + i + half, m), m);
    store_part(y + i + half, b * load_part(cos + i + half, m) - a * load_part(sin + i, m), m);
  }
}

typedef uint64_t Pairs __attribute__((vector_size(4 * W)));

// (a, b) -> (a cos_a + b sin_b, b cos_b - a sin_a) for the pair in neighbouring lanes.
inline F rotate_pairs(F v, F cos, F sin) {
  const Pairs turned = (Pairs)(v * sin), sign = Pairs{} + 0x8000000000000000;
  return v * cos + (F)((turned << 32 | turned >> 32) ^ sign);
}

template <bool kPast, typename T, typename C, typename S>
void rotate_interleaved(const T *__restrict x, const C *__restrict cos, const S *__restrict sin, T *__restrict y,
                        int64_t size) {
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const F v = rotate_pairs(load(x + i), load(cos + i), load(sin + i));
    kPast ? store_stream(y + i, v) : store(y + i, v);
  }
  if (i < size) {
    const int64_t m = size - i;
    store_part(y + i, rotate_pairs(load_part(x + i, m), load_part(cos + i, m), load_part(sin + i, m)), m);
  }
}

template <bool kPast, bool kInterleaved, typename T, typename C, typename S>
void rotate(const T *x, const C *cos, const S *sin, T *y, int64_t rotated, int64_t size) {
  if (kInterleaved) rotate_interleaved<kPast>(x, cos, sin, y, rotated);
  else rotate_halves<kPast>(x, cos, sin, y, rotated / 2);
  if (rotated < size) memcpy(y + rotated, x + rotated, (size - rotated) * sizeof(T));
}

template <bool kInterleaved, typename T, typename C, typename S>
int run(const AkTensor &q, const AkTensor &k, const AkTensor &cos, const AkTensor &sin, const AkTensor &q_out,
        const AkTensor &k_out, int threads) {
  const int64_t batches = q.sizes[0], positions = q.sizes[2], size = q.sizes[3], rotated = cos.sizes[2];
  const int64_t blocks = (positions + kPositions - 1) / kPositions;
  const int64_t elements = (q.sizes[1] + k.sizes[1]) * batches * positions * size;
#pragma omp parallel for num_threads(elements <= kSerial ? 1 : threads) schedule(SCHEDULE)
  for (int64_t task = 0; task < batches * blocks; ++task) {
    const int64_t batch = task / blocks, start = task % blocks * kPositions;
    const int64_t stop = start + kPositions < positions ? start + kPositions : positions;
    const C *c = (const C *)cos.data + (cos.sizes[0] > 1 ? batch * cos.strides[0] : 0);
    const S *s = (const S *)sin.data + (sin.sizes[0] > 1 ? batch * sin.strides[0] : 0);
    for (int which = 0; which < 2; ++which) {
      const AkTensor &in = which ? k : q, &out = which ? k_out : q_out;
      const T *x = (const T *)in.data + batch * in.strides[0];
      T *y = (T *)out.data + batch * out.strides[0];
      const auto one = [&](int64_t head, int64_t p) {
        T *target = y + head * out.strides[1] + p * out.strides[2];
        const T *source = x + head * in.strides[1] + p * in.strides[2];
        const C *angle_c = c + p * cos.strides[1];
        const S *angle_s = s + p * sin.strides[1];
        // The second halves must be aligned, too.
        const int64_t step = kInterleaved ? W : rotated / 2;
        const bool past = kStream && (uintptr_t)target % (W * sizeof(T)) == 0 && step % W == 0;
        past ? rotate<kStream, kInterleaved>(source, angle_c, angle_s, target, rotated, size)
             : rotate<false, kInterleaved>(source, angle_c, angle_s, target, rotated, size);
      };
      if (kHeadsInside) {
        for (int64_t p = start; p < stop; ++p) {
          for (int64_t head = 0; head < in.sizes[1]; ++head) one(head, p);
        }
      } else {
        for (int64_t head = 0; head < in.sizes[1]; ++head) {
          for (int64_t p = start; p < stop; ++p) one(head, p);
        }
      }
    }
    finish_streams();
  }
  return AK_OK;
}

template <typename T, typename C, typename S>
int with_angles(const AkTensor &q, const AkTensor &k, const AkTensor &cos, const AkTensor &sin, bool interleaved,
                const AkTensor &q_out, const AkTensor &k_out, int threads) {
  return interleaved ? run<true, T, C, S>(q, k, cos, sin, q_out, k_out, threads)
                     : run<false, T, C, S>(q, k, cos, sin, q_out, k_out, threads);
}

template <typename T>
int dispatch(const AkTensor &q, const AkTensor &k, const AkTensor &cos, const AkTensor &sin, bool interleaved,
             const AkTensor &q_out, const AkTensor &k_out, int threads) {
  const bool wide_cos = cos.dtype == AK_F32, wide_sin = sin.dtype == AK_F32;
  if ((!wide_cos && cos.dtype != q.dtype) || (!wide_sin && sin.dtype != q.dtype)) return AK_UNSUPPORTED;
  if (wide_cos && wide_sin) return with_angles<T, float, float>(q, k, cos, sin, interleaved, q_out, k_out, threads);
  if (!wide_cos && !wide_sin) return with_angles<T, T, T>(q, k, cos, sin, interleaved, q_out, k_out, threads);
  if (wide_cos) return with_angles<T, float, T>(q, k, cos, sin, interleaved, q_out, k_out, threads);
  return with_angles<T, T, float>(q, k, cos, sin, interleaved, q_out, k_out, threads);
}

bool unit(const AkTensor &t) {
  for (int d = 0; d < t.ndim; ++d) {
    if (t.sizes[d] == 0) return true;
  }
  return t.sizes[t.ndim - 1] <= 1 || t.strides[t.ndim - 1] == 1;
}

}  // namespace

extern "C" int rotary_embedding_backward(const AkTensor *grad_q, const AkTensor *grad_k, const AkTensor *q,
                                         const AkTensor *k, const AkTensor *cos, const AkTensor *sin,
                                         int32_t interleaved, const AkTensor *dq, const AkTensor *dk,
                                         const AkContext *ctx) {
  if (grad_k->dtype != grad_q->dtype || q->dtype != grad_q->dtype || k->dtype != grad_q->dtype) return AK_UNSUPPORTED;
  if (!unit(*grad_q) || !unit(*grad_k) || !unit(*cos) || !unit(*sin)) return AK_NEED_CONTIGUOUS;
  const int threads = ctx->num_threads;
  switch (grad_q->dtype) {
    case AK_F32: return dispatch<float>(*grad_q, *grad_k, *cos, *sin, interleaved, *dq, *dk, threads);
    case AK_F16: return dispatch<_Float16>(*grad_q, *grad_k, *cos, *sin, interleaved, *dq, *dk, threads);
    case AK_BF16: return dispatch<uint16_t>(*grad_q, *grad_k, *cos, *sin, interleaved, *dq, *dk, threads);
  }
  return AK_UNSUPPORTED;
}
