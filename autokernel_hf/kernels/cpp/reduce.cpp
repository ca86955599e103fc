// kernel_type: reduce
//
// sum, mean, max, min or product along one dimension. Where that dimension is the innermost one, vectors run along it;
// otherwise across it, a tile of neighbouring columns at a time. Long reductions are cut into pieces of fixed length
// whose results are combined in order, so the answer is the same for every number of threads.
#include "autokernel.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int kUnroll = 4;            // tune(compute): 1, 2, 4, 8
constexpr int64_t kPiece = 65536;     // tune(block): 4096, 16384, 65536, 262144
constexpr int64_t kBlock = 16384;     // tune(block): 1024, 4096, 16384, 65536
constexpr int64_t kExact = 64;        // tune(compute): 16, 64, 256
constexpr int64_t kSerial = 32768;    // tune(launch): 8192, 32768, 131072
constexpr int64_t kPrefetch = 0;      // tune(memory): 0, 512, 2048
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

enum Op { kSum, kMean, kMax, kMin, kProd };

template <int kOp>
inline double combine(double a, double b) {
  if (kOp == kMax) return b > a || b != b ? b : a;
  if (kOp == kMin) return b < a || b != b ? b : a;
  return kOp == kProd ? a * b : a + b;
}

// A sum is kept in float for kExact additions, then moved to double; a product, whose parts may leave float's range, is
// double throughout. A maximum or minimum is float, with a note of the lanes that have met a NaN.
template <int kOp>
struct Accumulator {
  static constexpr bool kExtreme = kOp == kMax || kOp == kMin;
  static constexpr float kNeutral = kOp == kMax ? -__builtin_inff() : kOp == kMin ? __builtin_inff() : kOp == kProd;
  F narrow[kUnroll];
  I bad[kUnroll];
  D wide[2 * kUnroll];

  Accumulator() {
    for (int u = 0; u < kUnroll; ++u) {
      narrow[u] = splat(kNeutral);
      bad[u] = I{};
      wide[2 * u] = wide[2 * u + 1] = D{} + (double)(kOp == kProd);
    }
  }

  void take(int u, F v) {
    if constexpr (kOp == kMax) narrow[u] = v > narrow[u] ? v : narrow[u];
    if constexpr (kOp == kMin) narrow[u] = v < narrow[u] ? v : narrow[u];
    if constexpr (kExtreme) bad[u] |= v != v;
    if constexpr (kOp == kSum) narrow[u] += v;
    if constexpr (kOp == kProd) {
      wide[2 * u] *= low(v);
      wide[2 * u + 1] *= high(v);
    }
  }

  void widen() {
    if constexpr (kOp == kSum) {
      for (int u = 0; u < kUnroll; ++u) {
        wide[2 * u] += low(narrow[u]);
        wide[2 * u + 1] += high(narrow[u]);
        narrow[u] = F{};
      }
    }
  }

  // The results of all lanes, in order, after widen().
  void results(double *lanes) const {
    for (int u = 0; u < kUnroll; ++u) {
      const F v = bad[u] ? splat(__builtin_nanf("")) : narrow[u];
      const D halves[2] = {kExtreme ? low(v) : wide[2 * u], kExtreme ? high(v) : wide[2 * u + 1]};
      memcpy(lanes + u * W, halves, sizeof halves);
    }
  }

  // All lanes as one result, after widen().
  double result() const {
    D total;
    if constexpr (kExtreme) {
      F v = narrow[0];
      I any = bad[0];
      for (int u = 1; u < kUnroll; ++u) {
        if (kOp == kMax) v = narrow[u] > v ? narrow[u] : v;
        else v = narrow[u] < v ? narrow[u] : v;
        any |= bad[u];
      }
      v = any ? splat(__builtin_nanf("")) : v;
      const D a = low(v), b = high(v);
      total = (kOp == kMax ? a > b : a < b) | (a != a) ? a : b;
    } else {
      total = wide[0];
      for (int i = 1; i < 2 * kUnroll; ++i) total = kOp == kProd ? total * wide[i] : total + wide[i];
    }
    double one = total[0];
    for (int l = 1; l < W / 2; ++l) one = combine<kOp>(one, total[l]);
    return one;
  }
};

template <int kOp, typename T>
double reduce_row(const T *x, int64_t n) {
  Accumulator<kOp> total;
  int64_t i = 0;
  while (i + kUnroll * W <= n) {
    const int64_t limit = i + kExact * kUnroll * W, stop = limit < n ? limit : n;
    for (; i + kUnroll * W <= stop; i += kUnroll * W) {
      if constexpr (kPrefetch > 0) {
        for (int b = 0; b < kUnroll * W; b += 64 / (int)sizeof(T)) __builtin_prefetch(x + i + kPrefetch + b);
      }
      for (int u = 0; u < kUnroll; ++u) total.take(u, load(x + i + u * W));
    }
    total.widen();
  }
  for (; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    total.take(0, keep(load_part(x + i, m), m, Accumulator<kOp>::kNeutral));
  }
  total.widen();
  return total.result();
}

// `width` <= kUnroll * W neighbouring columns, `step` elements from row to row; there is room for kUnroll * W results.
template <int kOp, typename T>
void reduce_tile(const T *x, int64_t n, int64_t step, int64_t width, double *results) {
  Accumulator<kOp> total;
  for (int64_t start = 0; start < n; start += kExact) {
    const int64_t stop = start + kExact < n ? start + kExact : n;
    if (width == kUnroll * W) {
      for (int64_t i = start; i < stop; ++i) {
        for (int u = 0; u < kUnroll; ++u) total.take(u, load(x + i * step + u * W));
      }
    } else {
      for (int64_t i = start; i < stop; ++i) {
        for (int u = 0; u * W < width; ++u) {
          const int64_t m = width - u * W < W ? width - u * W : W;
          total.take(u, load_part(x + i * step + u * W, m));
        }
      }
    }
    total.widen();
  }
  total.results(results);
}

// How the work is laid out: kept dimensions x pieces of the reduced one x tiles of columns.
struct Plan {
  bool possible = true;
  int inner = -1, rank = 0;
  int64_t n, step = 1, columns = 1, column_step = 1, tile = 1, tiles = 1, pieces = 1, piece, outer = 1;
  int64_t sizes[64], from[64], to[64];

  Plan(const AkTensor &x, int dim, const AkTensor *out) {
    n = x.ndim > 0 ? x.sizes[dim] : 1;
    if (n > 1) step = x.strides[dim];
    if (step != 1) {
      possible = false;
      for (int d = 0; d < x.ndim; ++d) {
        if (d != dim && x.sizes[d] > 1 && x.strides[d] == 1) inner = d;
      }
      possible = inner >= 0;
    }
    for (int d = 0; d < x.ndim; ++d) {
      if (d == dim || x.sizes[d] == 1) continue;
      const int64_t target = out ? out->strides[out->ndim == x.ndim || d < dim ? d : d - 1] : 0;
      if (d == inner) {
        columns = x.sizes[d];
        column_step = target;
        tile = kUnroll * W;
        tiles = (columns + tile - 1) / tile;
        continue;
      }
      sizes[rank] = x.sizes[d];
      from[rank] = x.strides[d];
      to[rank++] = target;
      outer *= x.sizes[d];
    }
    piece = inner < 0 ? kPiece : kPiece / 64;
    if (n > piece) pieces = (n + piece - 1) / piece;
  }

  int64_t partial_results() const { return pieces > 1 ? outer * columns * pieces : 0; }
};

template <int kOp, typename T>
int run(const Plan &plan, const AkTensor &x, bool mean, const AkTensor &out, const AkContext &ctx) {
  constexpr int64_t kWidest = kUnroll * W;
  const T *source = (const T *)x.data;
  T *target = (T *)out.data;
  double *partial = (double *)ctx.workspace;
  const double divisor = mean ? (double)plan.n : 1.0;
  const int64_t tasks = plan.outer * plan.pieces * plan.tiles, work = (plan.n + 1) * plan.columns * plan.outer;
  const int64_t size = (plan.n < plan.piece ? plan.n : plan.piece) * plan.tile + 1;
  const int64_t group = size < kBlock ? kBlock / size : 1;
  const int threads = work <= kSerial ? 1 : ctx.num_threads;
  const auto locate = [&](int64_t index, int64_t *a, int64_t *b) {
    *a = *b = 0;
    for (int d = plan.rank - 1; d >= 0; --d) {
      const int64_t i = d > 0 ? index % plan.sizes[d] : index;
      index /= plan.sizes[d];
      *a += i * plan.from[d];
      *b += i * plan.to[d];
    }
  };
  const auto write = [&](int64_t at, double value) {
    store_part(target + at, splat((float)(value / divisor)), 1);
  };
#pragma omp parallel for num_threads(threads) schedule(SCHEDULE)
  for (int64_t first = 0; first < tasks; first += group) {
    for (int64_t task = first; task < first + group && task < tasks; ++task) {
      const int64_t tile = task % plan.tiles, piece = task / plan.tiles % plan.pieces;
      const int64_t outer = task / plan.tiles / plan.pieces, column = tile * plan.tile, start = piece * plan.piece;
      const int64_t n = plan.n - start < plan.piece ? plan.n - start : plan.piece;
      const int64_t width = plan.columns - column < plan.tile ? plan.columns - column : plan.tile;
      int64_t a, b;
      locate(outer, &a, &b);
      double results[kWidest];
      const T *p = source + a + start * plan.step + column;
      if (plan.inner < 0) results[0] = reduce_row<kOp>(p, n);
      else reduce_tile<kOp>(p, n, plan.step, width, results);
      for (int64_t c = 0; c < width; ++c) {
        if (plan.pieces == 1) write(b + (column + c) * plan.column_step, results[c]);
        else partial[(outer * plan.pieces + piece) * plan.columns + column + c] = results[c];
      }
    }
  }
  if (plan.pieces == 1) return AK_OK;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < plan.outer * plan.columns; ++i) {
    const int64_t outer = i / plan.columns, column = i % plan.columns;
    const double *p = partial + outer * plan.pieces * plan.columns + column;
    double total = p[0];
    for (int64_t piece = 1; piece < plan.pieces; ++piece) total = combine<kOp>(total, p[piece * plan.columns]);
    int64_t a, b;
    locate(outer, &a, &b);
    write(b + column * plan.column_step, total);
  }
  return AK_OK;
}

template <typename T>
int dispatch(const AkTensor &x, int dim, int32_t op, const AkTensor &out, const AkContext &ctx) {
  const Plan plan(x, dim, &out);
  if (!plan.possible) return AK_NEED_CONTIGUOUS;
  switch (op) {
    case kSum:
    case kMean: return run<kSum, T>(plan, x, op == kMean, out, ctx);
    case kMax: return plan.n > 0 ? run<kMax, T>(plan, x, false, out, ctx) : AK_UNSUPPORTED;  // torch raises too
    case kMin: return plan.n > 0 ? run<kMin, T>(plan, x, false, out, ctx) : AK_UNSUPPORTED;
    case kProd: return run<kProd, T>(plan, x, false, out, ctx);
  }
  return AK_UNSUPPORTED;
}

}  // namespace

extern "C" int64_t reduce_workspace(const AkTensor *x, int64_t dim, int32_t, int32_t) {
  return Plan(*x, (int)dim, nullptr).partial_results() * (int64_t)sizeof(double);
}

extern "C" int reduce(const AkTensor *x, int64_t dim, int32_t, int32_t op, const AkTensor *out, const AkContext *ctx) {
  switch (x->dtype) {
    case AK_F32: return dispatch<float>(*x, (int)dim, op, *out, *ctx);
    case AK_F16: return dispatch<_Float16>(*x, (int)dim, op, *out, *ctx);
    case AK_BF16: return dispatch<uint16_t>(*x, (int)dim, op, *out, *ctx);
  }
  return AK_UNSUPPORTED;
}
