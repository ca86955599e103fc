// kernel_type: rotary_embedding_backward
//
// Turns pairs of the gradients' last dimension back by the angles of their positions, in fp32: (a, b) -> (a cos_a + b sin_b,
// b cos_b - a sin_a). Of q and k only the shape is used. A thread takes the same part of several heads of a token, so that it
// reads the tables once for them; parts are 16-byte packs where alignment and sizes allow.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 128;  // tune(block): 64, 128, 256, 512
constexpr int kTokens = 4;     // tune(block): 1, 2, 4, 8, 16
constexpr int kHeads = 2;      // tune(memory): 1, 2, 4, 8
constexpr int kColdLoad = 1;   // tune(memory): 0, 1
constexpr int kColdStore = 1;  // tune(memory): 0, 1

namespace {

static_assert((kThreads & (kThreads - 1)) == 0 && kThreads >= 32 && kThreads <= 512 && kTokens >= 1, "a thread may have 128 registers");
static_assert(kHeads >= 1 && kHeads <= 8, "a thread holds its heads' packs in registers");

// A 32-bit word of elements, to and from float.
template <typename T>
constexpr int kInWord = 4 / (int)sizeof(T);

__device__ __forceinline__ void widen(uint32_t word, float *v, float) { v[0] = __uint_as_float(word); }
__device__ __forceinline__ void widen(uint32_t word, float *v, __nv_bfloat16) {
  v[0] = __uint_as_float(word << 16);
  v[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen(uint32_t word, float *v, __half) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&word));
  v[0] = pair.x;
  v[1] = pair.y;
}
__device__ __forceinline__ uint32_t narrow(const float *v, float) { return __float_as_uint(v[0]); }
__device__ __forceinline__ uint32_t narrow(const float *v, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t narrow(const float *v, __half) {
  const __half2 pair = __floats2half2_rn(v[0], v[1]);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float *y) { *y = x; }
__device__ __forceinline__ void from_float(float x, __half *y) { *y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16 *y) { *y = __float2bfloat16_rn(x); }

template <typename T>
constexpr int kPack = 16 / (int)sizeof(T);

// V elements as they lie in memory: a 16-byte pack, or a single one.
template <typename T, int V>
struct Raw {
  uint4 bits;
  __device__ __forceinline__ void load(const T *p, bool cold) {
    bits = cold ? __ldcs(reinterpret_cast<const uint4 *>(p)) : *reinterpret_cast<const uint4 *>(p);
  }
  __device__ __forceinline__ void floats(float (&v)[V]) const {
    constexpr int W = kInWord<T>;
    widen(bits.x, v, T());
    widen(bits.y, v + W, T());
    widen(bits.z, v + 2 * W, T());
    widen(bits.w, v + 3 * W, T());
  }
  __device__ __forceinline__ void take(const float (&v)[V]) {
    constexpr int W = kInWord<T>;
    bits = {narrow(v, T()), narrow(v + W, T()), narrow(v + 2 * W, T()), narrow(v + 3 * W, T())};
  }
  __device__ __forceinline__ void store(T *p, bool cold) const {
    if (cold)
      __stcs(reinterpret_cast<uint4 *>(p), bits);
    else
      *reinterpret_cast<uint4 *>(p) = bits;
  }
};
template <typename T>
struct Raw<T, 1> {
  T value;
  __device__ __forceinline__ void load(const T *p, bool) { value = *p; }
  __device__ __forceinline__ void floats(float (&v)[1]) const { v[0] = to_float(value); }
  __device__ __forceinline__ void take(const float (&v)[1]) { from_float(v[0], &value); }
  __device__ __forceinline__ void store(T *p, bool) const { *p = value; }
};

template <typename T, int V>
__device__ __forceinline__ void store(T *p, const float (&v)[V], bool cold) {
  Raw<T, V> raw;
  raw.take(v);
  raw.store(p, cold);
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
  if constexpr (W == 1 || W == kPack<C>) {
#pragma unroll
    for (int i = 0; i < V; i += W) {
      Raw<C, W> raw;
      float some[W];
      raw.load(p + i, false);
      raw.floats(some);
#pragma unroll
      for (int j = 0; j < W; j++) values[i + j] = some[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; i++) values[i] = to_float(p[i]);
  }
}

// A thread's part of a token's head, as it lies in memory. In halves, V elements from the first half and the V of the
// second that go with them; interleaved, V neighbours (with V = 1, two).
template <typename T, int V, bool INTERLEAVED>
struct Part {
  static constexpr bool kTwo = !INTERLEAVED || V == 1;  // whether it lies in two places
  Raw<T, V> first, second;

  __device__ __forceinline__ void load(const T *x, int i, int k) {
    first.load(x + i, kColdLoad);
    if (kTwo) second.load(x + k, kColdLoad);
  }
  template <int N>
  __device__ __forceinline__ void rotate(const float (&cos_a)[N], const float (&sin_a)[N], const float (&cos_b)[N],
                                         const float (&sin_b)[N]) {
    float a[V], b[V];
    first.floats(a);
    if constexpr (kTwo) {
      second.floats(b);
      float low[V], high[V];
#pragma unroll
      for (int j = 0; j < V; j++) {
        low[j] = a[j] * cos_a[j] + b[j] * sin_b[j];
        high[j] = b[j] * cos_b[j] - a[j] * sin_a[j];
      }
      first.take(low);
      second.take(high);
    } else {
#pragma unroll
      for (int j = 0; j < V; j += 2) {
        b[j] = a[j] * cos_a[j] + a[j + 1] * sin_a[j + 1];
        b[j + 1] = a[j + 1] * cos_a[j + 1] - a[j] * sin_a[j];
      }
      first.take(b);
    }
  }
  __device__ __forceinline__ void store(T *y, int i, int k) const {
    first.store(y + i, kColdStore);
    if (kTwo) second.store(y + k, kColdStore);
  }
};

// A block takes blockDim.y tokens and, of blockIdx.y on, the heads of its z. A thread takes the same part of kHeads heads of
// a token, with the tables of that part in its registers; parts that are only copied come after those that are rotated.
template <typename T, typename C, int V, bool INTERLEAVED>
__global__ void __launch_bounds__(kThreads)
    rotate_tokens(Heads q, Heads k, Tables tables, int64_t tokens, int64_t S, int D, int R) {
  using P = Part<T, V, INTERLEAVED>;
  const int pair_units = R / 2 / (INTERLEAVED && V > 1 ? V / 2 : V), units = pair_units + (D - R) / V;
  const int all = q.count + k.count, step = blockDim.z * gridDim.y;
  for (int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; token < tokens;
       token += (int64_t)gridDim.x * blockDim.y) {
    const bool few = tokens <= 0x7fffffff;  // a division of 32 bits is much cheaper
    const int64_t b = few ? (int64_t)((uint32_t)token / (uint32_t)S) : token / S, t = token - b * S;
    const T *q_in = static_cast<const T *>(q.data) + b * q.batch + t * q.token;
    const T *k_in = static_cast<const T *>(k.data) + b * k.batch + t * k.token;
    T *q_out = static_cast<T *>(q.out) + (b * q.count * S + t) * D;
    T *k_out = static_cast<T *>(k.out) + (b * k.count * S + t) * D;
    const auto in = [&](int h) { return h < q.count ? q_in + h * q.head : k_in + (h - q.count) * k.head; };
    const auto out = [&](int h) { return h < q.count ? q_out + h * S * D : k_out + (h - q.count) * S * D; };
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
      if (unit >= pair_units) {
        const int i = R + (unit - pair_units) * V;
        for (int h = blockIdx.y * blockDim.z + threadIdx.z; h < all; h += step) {
          Raw<T, V> raw;
          raw.load(in(h) + i, kColdLoad);
          raw.store(out(h) + i, kColdStore);
        }
        continue;
      }
      const int i = unit * (INTERLEAVED && V == 1 ? 2 : V), other = INTERLEAVED ? i + 1 : i + R / 2;
      for (int first = blockIdx.y * blockDim.z + threadIdx.z; first < all; first += step * kHeads) {
        P part[kHeads];
#pragma unroll
        for (int j = 0; j < kHeads; j++)
          if (first + j * step < all) part[j].load(in(first + j * step), i, other);
        const C *cos = static_cast<const C *>(tables.cos) + b * tables.cos_batch + t * tables.cos_token;
        const C *sin = static_cast<const C *>(tables.sin) + b * tables.sin_batch + t * tables.sin_token;
        float cos_a[V], sin_a[V], cos_b[V], sin_b[V];
        load_table<C, V>(cos + i, cos_a);
        load_table<C, V>(sin + i, sin_a);
        if constexpr (P::kTwo) {
          load_table<C, V>(cos + other, cos_b);
          load_table<C, V>(sin + other, sin_b);
        }
#pragma unroll
        for (int j = 0; j < kHeads; j++) {
          if (first + j * step >= all) continue;
          part[j].rotate(cos_a, sin_a, cos_b, sin_b);
          part[j].store(out(first + j * step), i, other);
        }
      }
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
  const int64_t heads = q->sizes[1] + k->sizes[1];
  if (D > 0x7fffffff || heads > 0x3fffffff) return AK_UNSUPPORTED;  // counted in 32 bits
  const Heads queries = heads_of(q, q_out), keys = heads_of(k, k_out);
  const Tables tables = {cos->data,          sin->data,
                         cos->sizes[0] == 1 ? 0 : cos->strides[0], cos->strides[1],
                         sin->sizes[0] == 1 ? 0 : sin->strides[0], sin->strides[1]};
  const int64_t run_of_pairs = interleaved ? R : R / 2;  // what a pack must divide
  const bool packed = run_of_pairs % V == 0 && D % V == 0 && R % V == 0 && packs<T>(q) && packs<T>(k) &&
                      packs<C>(cos) && packs<C>(sin) && aligned(q_out->data) && aligned(k_out->data);
  const int64_t width = packed ? V : 1;
  const int64_t units = R / 2 / (packed && interleaved ? V / 2 : width) + (D - R) / width;
  // As many tokens side by side as there are and as fit, then as many heads; what heads are left go to other blocks. A block
  // is whole warps: threads beyond the last part or head have nothing to do.
  const int64_t slots = units < 1 ? 1 : units;
  int64_t wide = 1, high = 1;
  while (wide < slots && wide < kThreads) wide *= 2;
  while (high < kTokens && high < tokens && wide * high < kThreads) high *= 2;
  const int64_t least = wide * high < 32 ? 32 / (wide * high) : 1;
  const int64_t most = kThreads / (wide * high) < 64 ? kThreads / (wide * high) : 64;  // a block is at most 64 deep
  const int64_t groups = (heads + kHeads - 1) / kHeads;
  int64_t across = (groups + most - 1) / most;  // blocks
  if (across < 1) across = 1;
  const int64_t deep = ((groups + across - 1) / across + least - 1) / least * least;
  if (across > 65535) across = 65535;
  const int64_t blocks = (tokens + high - 1) / high;
  const dim3 grid((unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff), (unsigned)across);
  const dim3 block((unsigned)wide, (unsigned)high, (unsigned)deep);
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

extern "C" int rotary_embedding_backward(const AkTensor *grad_q, const AkTensor *grad_k, const AkTensor *q,
                                         const AkTensor *k, const AkTensor *cos, const AkTensor *sin,
                                         int32_t interleaved, const AkTensor *dq, const AkTensor *dk,
                                         const AkContext *ctx) {
  if (grad_k->dtype != grad_q->dtype || q->dtype != grad_q->dtype || k->dtype != grad_q->dtype) return AK_UNSUPPORTED;
  if (sin->dtype != cos->dtype) return AK_UNSUPPORTED;
  if (!dense(grad_q) || !dense(grad_k) || !dense(cos) || !dense(sin)) return AK_NEED_CONTIGUOUS;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (grad_q->dtype) {
    case AK_F32: return with_table<float>(grad_q, grad_k, cos, sin, interleaved, dq, dk, stream);
    case AK_F16: return with_table<__half>(grad_q, grad_k, cos, sin, interleaved, dq, dk, stream);
    case AK_BF16: return with_table<__nv_bfloat16>(grad_q, grad_k, cos, sin, interleaved, dq, dk, stream);
    default: return AK_UNSUPPORTED;
  }
}
