// kernel_type: rotary_embedding
//
// Pairs (a, b) of the first R dims of q and k become (a * cos_a - b * sin_a, b * cos_b + a * sin_b), in fp32; the other
// dims are copied. One launch does both tensors: a block takes a token with all its heads, so that the token's tables
// are read from memory once. Threads move 16-byte packs where alignment and widths allow, and pairs otherwise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 256;  // tune(block): 64, 128, 256, 512
constexpr int kTokens = 1;     // tune(block): 1, 2, 4, 8

namespace {

static_assert(kThreads % 32 == 0 && kThreads * kTokens >= 32, "a block is whole warps");
static_assert(kThreads <= 1024 && kTokens >= 1, "a block has at most 1024 threads");

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
  T v[V];
};

template <typename T>
constexpr int kPack = 16 / (int)sizeof(T);

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load(const T *p) {
  return *reinterpret_cast<const Pack<T, V> *>(p);
}

template <typename T, int V>
__device__ __forceinline__ void store(T *p, const Pack<T, V> &pack) {
  *reinterpret_cast<Pack<T, V> *>(p) = pack;
}

// q or k: strides in elements; the output is contiguous (B, H, S, D).
struct Heads {
  const void *data;
  void *out;
  int64_t batch, head, token;
  int count;
};

// cos and sin have x's dtype or their own; a batch stride of 0 serves all batches.
struct Tables {
  const void *cos, *sin;
  int64_t cos_batch, cos_token, sin_batch, sin_token;
};

template <typename C, int V>
__device__ __forceinline__ void load_table(const C *p, float (&values)[V]) {
  constexpr int W = V < kPack<C> ? V : kPack<C>;
#pragma unroll
  for (int i = 0; i < V; i += W) {
    const Pack<C, W> pack = load<C, W>(p + i);
#pragma unroll
    for (int j = 0; j < W; j++) values[i + j] = to_float(pack.v[j]);
  }
}

// Units of a head: packs of pairs, then packs of what is only copied. In halves, a unit of pairs is V elements from the
// first half and the V of the second that go with them; interleaved, it is V neighbours (with V = 1, two).
template <typename T, typename C, int V, bool INTERLEAVED>
__device__ __forceinline__ void rotate(const T *x, T *y, const C *cos, const C *sin, int unit, int pair_units, int R) {
  if (unit >= pair_units) {
    const int i = R + (unit - pair_units) * V;
    store<T, V>(y + i, load<T, V>(x + i));
    return;
  }
  if constexpr (INTERLEAVED) {
    constexpr int W = V == 1 ? 2 : V;
    const int i = unit * W;
    float c[W], s[W], values[W];
    if constexpr (V == 1) {
#pragma unroll
      for (int j = 0; j < W; j++) {
        c[j] = to_float(cos[i + j]);
        s[j] = to_float(sin[i + j]);
        values[j] = to_float(x[i + j]);
      }
    } else {
      load_table<C, W>(cos + i, c);
      load_table<C, W>(sin + i, s);
      const Pack<T, W> pack = load<T, W>(x + i);
#pragma unroll
      for (int j = 0; j < W; j++) values[j] = to_float(pack.v[j]);
    }
    Pack<T, W> result;
#pragma unroll
    for (int j = 0; j < W; j += 2) {
      result.v[j] = from_float<T>(values[j] * c[j] - values[j + 1] * s[j]);
      result.v[j + 1] = from_float<T>(values[j + 1] * c[j + 1] + values[j] * s[j + 1]);
    }
    if constexpr (V == 1) {
      y[i] = result.v[0];
      y[i + 1] = result.v[1];
    } else {
      store<T, W>(y + i, result);
    }
  } else {
    const int i = unit * V, k = i + R / 2;
    float cos_a[V], sin_a[V], cos_b[V], sin_b[V];
    load_table<C, V>(cos + i, cos_a);
    load_table<C, V>(sin + i, sin_a);
    load_table<C, V>(cos + k, cos_b);
    load_table<C, V>(sin + k, sin_b);
    const Pack<T, V> first = load<T, V>(x + i), second = load<T, V>(x + k);
    Pack<T, V> low, high;
#pragma unroll
    for (int j = 0; j < V; j++) {
      const float a = to_float(first.v[j]), b = to_float(second.v[j]);
      low.v[j] = from_float<T>(a * cos_a[j] - b * sin_a[j]);
      high.v[j] = from_float<T>(b * cos_b[j] + a * sin_b[j]);
    }
    store<T, V>(y + i, low);
    store<T, V>(y + k, high);
  }
}

template <typename T, typename C, int V, bool INTERLEAVED>
__global__ void __launch_bounds__(kThreads, 1)
    rotate_tokens(Heads q, Heads k, Tables tables, int64_t tokens, int64_t S, int D, int R) {
  // (with V = 1 and interleaved, a unit of pairs is two elements and one of the rest is one)
  const int pair_units = R / 2 / (INTERLEAVED && V > 1 ? V / 2 : V), units = pair_units + (D - R) / V;
  const int q_units = q.count * units, all = q_units + k.count * units;
  for (int64_t first = (int64_t)blockIdx.x * kTokens; first < tokens; first += (int64_t)gridDim.x * kTokens) {
    for (int n = threadIdx.x; n < all * kTokens; n += kThreads) {
      const int64_t token = first + n / all;
      if (token >= tokens) break;
      const int64_t b = token / S, t = token % S;
      const bool is_q = n % all < q_units;
      const int index = n % all - (is_q ? 0 : q_units), head = index / units, unit = index % units;
      const Heads &x = is_q ? q : k;
      const T *in = static_cast<const T *>(x.data) + b * x.batch + head * x.head + t * x.token;
      T *out = static_cast<T *>(x.out) + ((b * x.count + head) * S + t) * D;
      const C *cos = static_cast<const C *>(tables.cos) + b * tables.cos_batch + t * tables.cos_token;
      const C *sin = static_cast<const C *>(tables.sin) + b * tables.sin_batch + t * tables.sin_token;
      rotate<T, C, V, INTERLEAVED>(in, out, cos, sin, unit, pair_units, R);
    }
  }
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

bool dense(const AkTensor *t) { return t->sizes[t->ndim - 1] <= 1 || t->strides[t->ndim - 1] == 1; }

Heads heads_of(const AkTensor *t, const AkTensor *out) {
  return {t->data, out->data, t->strides[0], t->strides[1], t->strides[2], (int)t->sizes[1]};
}

// Whether packs of V elements stay aligned wherever the strides of this tensor lead.
template <typename T>
bool packs(const AkTensor *t) {
  constexpr int V = kPack<T>;
  bool fit = aligned(t->data);
  for (int d = 0; d + 1 < t->ndim; d++) fit = fit && (t->sizes[d] == 1 || t->strides[d] % V == 0);
  return fit;
}

template <typename T, typename C>
int run(const AkTensor *q, const AkTensor *k, const AkTensor *cos, const AkTensor *sin, bool interleaved,
        const AkTensor *q_out, const AkTensor *k_out, cudaStream_t stream) {
  constexpr int V = kPack<T>;
  const int64_t B = q->sizes[0], S = q->sizes[2], D = q->sizes[3], R = cos->sizes[2], tokens = B * S;
  const int64_t elements = (q->sizes[1] + k->sizes[1]) * D * kTokens;
  if (D > 0x7fffffff || elements > 0x7fffffff) return AK_UNSUPPORTED;  // counted in 32 bits within a block
  const Heads queries = heads_of(q, q_out), keys = heads_of(k, k_out);
  const Tables tables = {cos->data,          sin->data,
                         cos->sizes[0] == 1 ? 0 : cos->strides[0], cos->strides[1],
                         sin->sizes[0] == 1 ? 0 : sin->strides[0], sin->strides[1]};
  const int64_t run_of_pairs = interleaved ? R : R / 2;  // what a pack must divide
  const bool packed = run_of_pairs % V == 0 && D % V == 0 && R % V == 0 && packs<T>(q) && packs<T>(k) &&
                      packs<C>(cos) && packs<C>(sin) && aligned(q_out->data) && aligned(k_out->data);
  const int64_t blocks = (tokens + kTokens - 1) / kTokens;
  const dim3 grid((unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff)), block(kThreads);
  const int d = (int)D, r = (int)R;
  if (packed && interleaved)
    rotate_tokens<T, C, V, true><<<grid, block, 0, stream>>>(queries, keys, tables, tokens, S, d, r);
  else if (packed)
    rotate_tokens<T, C, V, false><<<grid, block, 0, stream>>>(queries, keys, tables, tokens, S, d, r);
  else if (interleaved)
    rotate_tokens<T, C, 1, true><<<grid, block, 0, stream>>>(queries, keys, tables, tokens, S, d, r);
  else
    rotate_tokens<T, C, 1, false><<<grid, block, 0, stream>>>(queries, keys, tables, tokens, S, d, r);
  return (int)cudaGetLastError();
}

template <typename T>
int with_table(const AkTensor *q, const AkTensor *k, const AkTensor *cos, const AkTensor *sin, bool interleaved,
               const AkTensor *q_out, const AkTensor *k_out, cudaStream_t stream) {
  if (cos->dtype == AK_F32) return run<T, float>(q, k, cos, sin, interleaved, q_out, k_out, stream);
  if (cos->dtype == q->dtype) return run<T, T>(q, k, cos, sin, interleaved, q_out, k_out, stream);
  return AK_UNSUPPORTED;
}

}  // namespace

extern "C" int rotary_embedding(const AkTensor *q, const AkTensor *k, const AkTensor *cos, const AkTensor *sin,
                                int32_t interleaved, const AkTensor *q_out, const AkTensor *k_out,
                                const AkContext *ctx) {
  if (k->dtype != q->dtype || sin->dtype != cos->dtype) return AK_UNSUPPORTED;
  if (!dense(q) || !dense(k) || !dense(cos) || !dense(sin)) return AK_NEED_CONTIGUOUS;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (q->dtype) {
    case AK_F32: return with_table<float>(q, k, cos, sin, interleaved, q_out, k_out, stream);
    case AK_F16: return with_table<__half>(q, k, cos, sin, interleaved, q_out, k_out, stream);
    case AK_BF16: return with_table<__nv_bfloat16>(q, k, cos, sin, interleaved, q_out, k_out, stream);
    default: return AK_UNSUPPORTED;
  }
}
