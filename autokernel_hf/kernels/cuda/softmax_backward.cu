// kernel_type: softmax_backward
//
// y * (grad - sum(grad * y)) along one dimension, in fp32, with y = softmax(x) made again. Rows that fit are read once and held
// in registers, by a warp or a block; longer ones are read twice. Where the dimension is not the innermost one, a thread has
// a column, and neighbours read side by side.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kThreads = 256;  // tune(block): 128, 256, 512
constexpr int kHeld = 2;       // tune(memory): 1, 2, 4
constexpr int kColumns = 128;  // tune(block): 32, 64, 128, 256

namespace {

constexpr int kMaxThreads = 512;
constexpr int kMost = 4;     // packs of a thread in the longest rows that are held
constexpr int kSingles = 8;  // elements of a thread where rows cannot be read in packs
static_assert(kThreads % 32 == 0 && kThreads <= kMaxThreads && kHeld <= kMost, "a thread holds its packs in registers");

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
  __device__ __forceinline__ void load(const T *p) { bits = *reinterpret_cast<const uint4 *>(p); }
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
  __device__ __forceinline__ void store(T *p) const { *reinterpret_cast<uint4 *>(p) = bits; }
};
template <typename T>
struct Raw<T, 1> {
  T value;
  __device__ __forceinline__ void load(const T *p) { value = *p; }
  __device__ __forceinline__ void floats(float (&v)[1]) const { v[0] = to_float(value); }
  __device__ __forceinline__ void take(const float (&v)[1]) { from_float(v[0], &value); }
  __device__ __forceinline__ void store(T *p) const { *p = value; }
};

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);  // 16-bit results do not see the last bits
}

// The reference of exponentials under a maximum: 0 for -inf, so that exp(-inf) is 0 and not NaN.
__device__ __forceinline__ float reference(float max) { return max == -INFINITY ? 0.0f : max; }

// What a row's threads gather: a maximum, and relative to it the sums of exponentials and of their products with the gradient.
struct State {
  float max, sum, product;
};

template <typename T>
__device__ __forceinline__ State merge(State a, State b) {
  const float max = fmaxf(a.max, b.max), zero = reference(max);
  const float of_a = exponential<T>(a.max - zero), of_b = exponential<T>(b.max - zero);
  return {max, a.sum * of_a + b.sum * of_b, a.product * of_a + b.product * of_b};
}

// Over the threads of a row (blockDim.x of them), the same in all, in an order that never changes.
template <typename T>
__device__ __forceinline__ State gather(State mine, State *partial) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    mine = merge<T>(mine, {__shfl_xor_sync(0xffffffffu, mine.max, lanes), __shfl_xor_sync(0xffffffffu, mine.sum, lanes),
                           __shfl_xor_sync(0xffffffffu, mine.product, lanes)});
  const int warps = blockDim.x / 32;
  if (warps == 1) return mine;
  __syncthreads();  // the readers of the row before are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = partial[0];
  for (int i = 1; i < warps; i++) mine = merge<T>(mine, partial[i]);
  return mine;
}

struct Input {
  const void *data;
  int64_t stride;  // between rows
};

// V elements more. A NaN is passed over by the maximum and felt in the sums.
template <typename T, int V>
__device__ __forceinline__ void include(State *state, const float (&x)[V], const float (&g)[V]) {
  float max = state->max;
#pragma unroll
  for (int i = 0; i < V; i++) max = fmaxf(max, x[i]);
  const float zero = reference(max), shrink = exponential<T>(state->max - zero);
  float sum = 0.0f, product = 0.0f;  // of their own first: several short sums err less than a long one
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float e = exponential<T>(x[i] - zero);
    sum += e;
    product += e * g[i];
  }
  *state = {max, state->sum * shrink + sum, state->product * shrink + product};
}

template <typename T, int V>
__device__ __forceinline__ void finish(T *y, const State &state, const float (&x)[V], const float (&g)[V]) {
  const float zero = reference(state.max), mean = state.product / state.sum, factor = 1.0f / state.sum;
  float v[V];
#pragma unroll
  for (int i = 0; i < V; i++) v[i] = exponential<T>(x[i] - zero) * factor * (g[i] - mean);
  Raw<T, V> raw;
  raw.take(v);
  raw.store(y);
}

// Rows that their threads hold in registers: `blockDim.x` threads a row, with HELD packs of V elements each, and
// `blockDim.y` rows at once, of one warp each.
template <typename T, int V, int HELD>
__global__ void __launch_bounds__(kMaxThreads, 1)
    held_rows(Input grads, Input xs, T *__restrict__ out, int64_t M, int N) {
  __shared__ State partial[kMaxThreads / 32];
  const int first = threadIdx.x * V, stride = blockDim.x * V;
  for (int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; row < M; row += (int64_t)gridDim.x * blockDim.y) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    Raw<T, V> x_raw[HELD], g_raw[HELD];
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      if (first + h * stride >= N) continue;
      x_raw[h].load(x + first + h * stride);
      g_raw[h].load(grad + first + h * stride);
    }
    State state = {-INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      if (first + h * stride >= N) continue;
      float v[V], g[V];
      x_raw[h].floats(v);
      g_raw[h].floats(g);
      include<T, V>(&state, v, g);
    }
    state = gather<T>(state, partial);
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      if (first + h * stride >= N) continue;
      float v[V], g[V];
      x_raw[h].floats(v);
      g_raw[h].floats(g);
      finish<T, V>(out + row * N + first + h * stride, state, v, g);
    }
  }
}

// Rows of any length: a block reads one twice.
template <typename T, int V>
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_rows(Input grads, Input xs, T *__restrict__ out, int64_t M, int64_t N) {
  __shared__ State partial[kMaxThreads / 32];
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    State state = {-INFINITY, 0.0f, 0.0f};
    for (int pass = 0; pass < 2; pass++) {
      for (int64_t column = (int64_t)threadIdx.x * V; column < N; column += (int64_t)blockDim.x * V) {
        Raw<T, V> x_raw, g_raw;
        float v[V], g[V];
        x_raw.load(x + column);
        g_raw.load(grad + column);
        x_raw.floats(v);
        g_raw.floats(g);
        if (pass == 0)
          include<T, V>(&state, v, g);
        else
          finish<T, V>(out + row * N + column, state, v, g);
      }
      if (pass == 0) state = gather<T>(state, partial);
    }
  }
}

// Contiguous tensors of which the dimension is not the innermost one: a thread has a column.
template <typename T>
__global__ void __launch_bounds__(kColumns)
    columns(const T *__restrict__ grad, const T *__restrict__ x, T *__restrict__ out, int64_t outer, int64_t N,
            int64_t inner) {
  const int64_t all = outer * inner;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t start = i / inner * N * inner + i % inner;
    State state = {-INFINITY, 0.0f, 0.0f};
    for (int64_t k = 0; k < N; k++) {
      const float v[1] = {to_float(x[start + k * inner])}, g[1] = {to_float(grad[start + k * inner])};
      include<T, 1>(&state, v, g);
    }
    for (int64_t k = 0; k < N; k++) {
      const float v[1] = {to_float(x[start + k * inner])}, g[1] = {to_float(grad[start + k * inner])};
      finish<T, 1>(out + start + k * inner, state, v, g);
    }
  }
}

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// The stride between the rows of a tensor, all its dimensions but the last, if there is one.
bool rows_of(const AkTensor *t, int64_t *stride) {
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  int64_t rows = 1;
  *stride = 0;
  for (int d = last - 1; d >= 0; d--) {
    if (t->sizes[d] == 1) continue;
    if (rows > 1 && t->strides[d] != rows * *stride) return false;
    if (rows == 1) *stride = t->strides[d];
    rows *= t->sizes[d];
  }
  return true;
}

bool is_contiguous(const AkTensor *t) {
  int64_t expected = 1;
  for (int d = t->ndim - 1; d >= 0; d--) {
    if (t->sizes[d] != 1 && t->strides[d] != expected) return false;
    expected *= t->sizes[d];
  }
  return true;
}

unsigned grid_of(int64_t blocks) { return (unsigned)(blocks < 0x7fffffff ? blocks : 0x7fffffff); }

template <typename T>
int run(const AkTensor *grad, const AkTensor *x, int64_t dim, const AkTensor *out, cudaStream_t stream) {
  constexpr int V = kPack<T>;
  int64_t outer = 1, inner = 1;
  for (int d = 0; d < x->ndim; d++) {
    if (d < dim) outer *= x->sizes[d];
    if (d > dim) inner *= x->sizes[d];
  }
  const int64_t N = x->ndim == 0 ? 1 : x->sizes[dim];
  T *y = static_cast<T *>(out->data);
  Input grads = {grad->data, N}, xs = {x->data, N};
  const bool last = x->ndim > 0 && dim == x->ndim - 1;
  if (!last || !rows_of(grad, &grads.stride) || !rows_of(x, &xs.stride)) {
    if (!is_contiguous(grad) || !is_contiguous(x)) return AK_NEED_CONTIGUOUS;
    if (inner > 1) {
      const int64_t blocks = (outer * inner + kColumns - 1) / kColumns;
      columns<T><<<grid_of(blocks), kColumns, 0, stream>>>(static_cast<const T *>(grad->data),
                                                           static_cast<const T *>(x->data), y, outer, N, inner);
      return (int)cudaGetLastError();
    }
    grads.stride = xs.stride = N;
  }
  const int64_t M = outer;
  const bool packs = N % V == 0 && grads.stride % V == 0 && xs.stride % V == 0 && aligned(grads.data) && aligned(xs.data);
  const int64_t units = packs ? N / V : N, most = packs ? kMost : kSingles;
  if (units <= most * kMaxThreads) {
    int held = packs ? (units <= 32 ? 1 : units <= 64 ? 2 : kMost) : kSingles, lanes = 32;
    if (units > 32 * most) {
      held = !packs ? kSingles : units <= (int64_t)kHeld * kMaxThreads ? kHeld : kMost;
      lanes = (int)((units + held * 32 - 1) / (held * 32)) * 32;
    }
    const int64_t high = lanes == 32 ? kThreads / 32 : 1;
    const dim3 block((unsigned)lanes, (unsigned)high), grid(grid_of((M + high - 1) / high));
    const auto launch = [&](auto kernel) { kernel<<<grid, block, 0, stream>>>(grads, xs, y, M, (int)N); };
    if (!packs)
      launch(held_rows<T, 1, kSingles>);
    else if (held == 1)
      launch(held_rows<T, V, 1>);
    else if (held == 2)
      launch(held_rows<T, V, 2>);
    else
      launch(held_rows<T, V, kMost>);
  } else if (packs) {
    streamed_rows<T, V><<<grid_of(M), kMaxThreads, 0, stream>>>(grads, xs, y, M, N);
  } else {
    streamed_rows<T, 1><<<grid_of(M), kMaxThreads, 0, stream>>>(grads, xs, y, M, N);
  }
  return (int)cudaGetLastError();
}

}  // namespace

extern "C" int softmax_backward(const AkTensor *grad, const AkTensor *x, int64_t dim, const AkTensor *out,
                                const AkContext *ctx) {
  if (grad->dtype != x->dtype) return AK_UNSUPPORTED;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (x->dtype) {
    case AK_F32: return run<float>(grad, x, dim, out, stream);
    case AK_F16: return run<__half>(grad, x, dim, out, stream);
    case AK_BF16: return run<__nv_bfloat16>(grad, x, dim, out, stream);
    default: return AK_UNSUPPORTED;
  }
}
