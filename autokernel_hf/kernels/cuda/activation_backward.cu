// kernel_type: activation_backward
//
// grad * act'(x), element by element, in fp32: one pass over both inputs. Dense tensors are one long row; rows that lie apart
// are walked in place. Threads move 16-byte packs where alignment and length allow, and single elements otherwise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kUnroll = 1;     // tune(memory): 1, 2, 4, 8
constexpr int kThreads = 128;  // tune(block): 64, 128, 256, 512, 1024
constexpr int kColdLoad = 0;   // tune(memory): 0, 1
constexpr int kColdStore = 0;  // tune(memory): 0, 1

namespace {

static_assert(kUnroll >= 1 && kUnroll <= 16, "a thread holds its packs in registers");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");

constexpr int kBlocks = kThreads < 512 ? 512 / kThreads : 1;  // that a multiprocessor must have registers for

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

// The leading dimensions of a tensor: row r starts at r * stride, or with `inner` rows in a group, groups at `outer`.
struct Rows {
  int64_t inner, outer, stride;
  __device__ __forceinline__ int64_t start(int64_t row) const {
    return inner == 0 ? row * stride : row / inner * outer + row % inner * stride;
  }
};

enum Kind { kNone, kGelu, kGeluTanh, kGeluNew, kQuickGelu, kSilu, kRelu, kRelu2, kAny };

// 1 / (1 + exp(-u)). 16-bit results do not see the last bits of the fast exponential and quotient.
template <typename T>
__device__ __forceinline__ float sigmoid(float u) {
  return sizeof(T) == 4 ? 1.0f / (1.0f + expf(-u)) : __fdividef(1.0f, 1.0f + __expf(-u));
}

// Value and derivative.
struct Pair {
  float y, slope;
};

// Of x * sigmoid(u), where u has the derivative `du`. 1 - sigmoid(u) is sigmoid(-u), with its digits; for 16-bit results the
// difference will do.
template <typename T>
__device__ __forceinline__ Pair times_sigmoid(float x, float u, float du) {
  const float s = sigmoid<T>(u), t = sizeof(T) == 4 ? sigmoid<T>(-u) : 1.0f - s;
  return {x * s, s + x * s * t * du};
}

// erf(z) to 1.5e-7 (Abramowitz and Stegun 7.1.26), enough for 16-bit results: a quotient, an exponential and a polynomial.
__device__ __forceinline__ float fast_erf(float z) {
  const float a = fabsf(z), t = __fdividef(1.0f, 1.0f + 0.3275911f * a);
  const float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return copysignf(1.0f - p * __expf(-a * a), z);
}

template <typename T, int KIND>
__device__ __forceinline__ Pair act(float x) {
  if constexpr (KIND == kGelu) {
    const float half = 0.5f * (1.0f + (sizeof(T) == 4 ? erff(x * 0.70710678118654752f) : fast_erf(x * 0.70710678118654752f)));
    const float density = 0.39894228040143268f * (sizeof(T) == 4 ? expf(-0.5f * x * x) : __expf(-0.5f * x * x));
    return {x * half, half + x * density};
  }
  // 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where 1 + tanh(u) cancels.
  if constexpr (KIND == kGeluTanh)
    return times_sigmoid<T>(x, x * (1.5957691216057308f + 0.07135481627f * x * x), 1.5957691216057308f + 0.21406444881f * x * x);
  if constexpr (KIND == kQuickGelu) return times_sigmoid<T>(x, 1.702f * x, 1.702f);
  if constexpr (KIND == kSilu) return times_sigmoid<T>(x, x, 1.0f);
  if constexpr (KIND == kRelu) return x <= 0.0f ? Pair{0.0f, 0.0f} : Pair{x, 1.0f};
  if constexpr (KIND == kRelu2) return x <= 0.0f ? Pair{0.0f, 0.0f} : Pair{x * x, 2.0f * x};
  return {x, 1.0f};
}

// The same with the kind known at run time only: enough for single elements, which are bound by their loads.
template <typename T, int KIND>
__device__ __forceinline__ Pair act(float x, int kind) {
  if constexpr (KIND != kAny) return act<T, KIND>(x);
  switch (kind) {
    case kGelu: return act<T, kGelu>(x);
    case kGeluTanh:
    case kGeluNew: return act<T, kGeluTanh>(x);
    case kQuickGelu: return act<T, kQuickGelu>(x);
    case kSilu: return act<T, kSilu>(x);
    case kRelu: return act<T, kRelu>(x);
    case kRelu2: return act<T, kRelu2>(x);
    default: return {x, 1.0f};
  }
}

// The gradients of V elements.
template <typename T, int V, int KIND>
__device__ __forceinline__ void gradients(const Raw<T, V> &grads, const Raw<T, V> &xs, int kind, T *dx) {
  float g[V], v[V];
  grads.floats(g);
  xs.floats(v);
#pragma unroll
  for (int i = 0; i < V; i++) v[i] = g[i] * act<T, KIND>(v[i], kind).slope;
  store<T, V>(dx, v, kColdStore);
}

template <typename T, int KIND>
__device__ __forceinline__ void gradient_of_one(T grad, T x, int kind, T *dx) {
  const Raw<T, 1> g = {grad}, v = {x};
  gradients<T, 1, KIND>(g, v, kind, dx);
}

// Dense tensors: a block takes kUnroll * kThreads packs side by side.
template <typename T, int KIND>
__global__ void __launch_bounds__(kThreads, kBlocks)
    dense(const T *__restrict__ grad, const T *__restrict__ x, T *__restrict__ dx, int64_t N) {
  constexpr int V = kPack<T>, BLOCK = kThreads * kUnroll * V;
  const int64_t start = (int64_t)blockIdx.x * BLOCK;
  grad += start;
  x += start;
  dx += start;
  const int left = N - start < BLOCK ? (int)(N - start) : BLOCK, first = threadIdx.x * V;
  Raw<T, V> grads[kUnroll], xs[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; u++) {
    const int at = first + u * kThreads * V;
    if (at + V > left) continue;
    grads[u].load(grad + at, kColdLoad);
    xs[u].load(x + at, kColdLoad);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; u++) {
    const int at = first + u * kThreads * V;
    if (at + V <= left) {
      gradients<T, V, KIND>(grads[u], xs[u], KIND, dx + at);
    } else {
      for (int i = at; i < left; i++) gradient_of_one<T, KIND>(grad[i], x[i], KIND, dx + i);
    }
  }
}

// A block takes blockDim.x packs side by side, of one row or (in y) of several.
template <typename T, int KIND, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    in_rows(const T *__restrict__ grad, Rows grad_rows, const T *__restrict__ x, Rows x_rows, T *__restrict__ dx,
            int64_t M, int64_t N, int kind) {
  const int64_t packs = N / V, wide = blockDim.x, step = (int64_t)gridDim.x * wide;
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < M;
       row += (int64_t)gridDim.y * blockDim.y) {
    const T *g = grad + grad_rows.start(row), *v = x + x_rows.start(row);
    T *y = dx + row * N;
    for (int64_t p = (int64_t)blockIdx.x * wide + threadIdx.x; p < packs; p += step) {
      Raw<T, V> grads, xs;
      grads.load(g + p * V, kColdLoad);
      xs.load(v + p * V, kColdLoad);
      gradients<T, V, KIND>(grads, xs, kind, y + p * V);
    }
    if (V > 1 && blockIdx.x == 0)
      for (int64_t i = packs * V + threadIdx.x; i < N; i += wide) gradient_of_one<T, KIND>(g[i], v[i], kind, y + i);
  }
}

bool rows_of(const AkTensor *t, Rows *rows) {
  if (t->ndim == 0) {
    *rows = {0, 0, 0};
    return true;
  }
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  int64_t sizes[2], strides[2];
  int n = 0;
  for (int d = last - 1; d >= 0; d--) {
    if (t->sizes[d] == 1) continue;
    if (n > 0 && t->strides[d] == sizes[n - 1] * strides[n - 1]) {
      sizes[n - 1] *= t->sizes[d];
      continue;
    }
    if (n == 2) return false;
    sizes[n] = t->sizes[d];
    strides[n++] = t->strides[d];
  }
  *rows = n == 0 ? Rows{0, 0, 0} : n == 1 ? Rows{0, 0, strides[0]} : Rows{sizes[0], strides[1], strides[0]};
  return true;
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// Runs f with the kind as a constant.
template <typename F>
int with_kind(int32_t kind, F f) {
  switch (kind) {
    case kNone: return f(std::integral_constant<int, kNone>());
    case kGelu: return f(std::integral_constant<int, kGelu>());
    case kGeluTanh:
    case kGeluNew: return f(std::integral_constant<int, kGeluTanh>());
    case kQuickGelu: return f(std::integral_constant<int, kQuickGelu>());
    case kSilu: return f(std::integral_constant<int, kSilu>());
    case kRelu: return f(std::integral_constant<int, kRelu>());
    case kRelu2: return f(std::integral_constant<int, kRelu2>());
    default: return AK_UNSUPPORTED;
  }
}

bool dense_rows(Rows rows, int64_t N) { return rows.inner == 0 && rows.stride == N; }
bool packed_rows(Rows rows, int64_t V) { return rows.outer % V == 0 && rows.stride % V == 0; }

template <typename T>
int run(const AkTensor *grad, const AkTensor *x, int32_t kind, const AkTensor *out, cudaStream_t stream) {
  constexpr int V = kPack<T>;
  Rows grad_rows, x_rows;
  if (!rows_of(grad, &grad_rows) || !rows_of(x, &x_rows)) return AK_NEED_CONTIGUOUS;
  int64_t M = 1, N = x->ndim == 0 ? 1 : x->sizes[x->ndim - 1];
  for (int d = 0; d < x->ndim - 1; d++) M *= x->sizes[d];
  if (M == 1 || (dense_rows(grad_rows, N) && dense_rows(x_rows, N))) {
    N *= M;  // dense: one row
    M = 1;
    grad_rows = x_rows = {0, 0, 0};
  }
  const bool packed = aligned(grad->data) && aligned(x->data) && aligned(out->data) &&
                      (M == 1 || (N % V == 0 && packed_rows(grad_rows, V) && packed_rows(x_rows, V)));
  const int64_t columns = packed ? (N + V - 1) / V : N;
  int64_t wide = 32;  // threads side by side in a row; the block's others take further rows
  while (wide < kThreads && wide < columns) wide *= 2;
  const int64_t high = M == 1 ? 1 : kThreads / wide;
  const int64_t across = (columns + wide - 1) / wide, down = (M + high - 1) / high;
  const dim3 block((unsigned)wide, (unsigned)high);
  const dim3 grid((unsigned)(across < 0x7fffffff ? across : 0x7fffffff), (unsigned)(down < 65535 ? down : 65535));
  const T *g = static_cast<const T *>(grad->data), *v = static_cast<const T *>(x->data);
  T *y = static_cast<T *>(out->data);
  if (kind < 0 || kind >= kAny) return AK_UNSUPPORTED;
  if (!packed) {
    in_rows<T, kAny, 1><<<grid, block, 0, stream>>>(g, grad_rows, v, x_rows, y, M, N, kind);
    return (int)cudaGetLastError();
  }
  constexpr int64_t kBlock = (int64_t)kThreads * kUnroll * V;
  const int64_t blocks = (N + kBlock - 1) / kBlock;
  const bool one_row = M == 1 && blocks <= 0x7fffffff;
  return with_kind(kind, [&](auto k) {
    constexpr int KIND = decltype(k)::value;
    if (one_row)
      dense<T, KIND><<<(unsigned)blocks, kThreads, 0, stream>>>(g, v, y, N);
    else
      in_rows<T, KIND, V><<<grid, block, 0, stream>>>(g, grad_rows, v, x_rows, y, M, N, kind);
    return (int)cudaGetLastError();
  });
}

}  // namespace

extern "C" int activation_backward(const AkTensor *grad, const AkTensor *x, int32_t kind, const AkTensor *out,
                                   const AkContext *ctx) {
  if (grad->dtype != x->dtype) return AK_UNSUPPORTED;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (x->dtype) {
    case AK_F32: return run<float>(grad, x, kind, out, stream);
    case AK_F16: return run<__half>(grad, x, kind, out, stream);
    case AK_BF16: return run<__nv_bfloat16>(grad, x, kind, out, stream);
    default: return AK_UNSUPPORTED;
  }
}
