// kernel_type: layernorm_backward
//
// Gradients of y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in fp32. A block goes
// through rows, which its threads hold in registers, and keeps its share of the parameters' gradients in registers as well;
// a second kernel adds up the shares, in a fixed order. For 16 bits all of a row's sums are made at once, from deviations from
// a few elements' mean. Rows too long for that are read four times.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kBlocks = 264;    // tune(launch): 132, 264, 528
constexpr int kThreads = 256;  // tune(block): 128, 256, 512
constexpr int kHeld = 2;       // tune(memory): 1, 2, 4
constexpr int kAhead = 1;      // tune(memory): 0, 1

namespace {

constexpr bool kLayer = true;
constexpr int kMaxThreads = 512;  // so that a thread may have 128 registers
constexpr int kMost = 4;          // packs of a thread in the longest rows that are held
constexpr int kMostThreads = 384;  // of such rows: 168 registers
constexpr int kSingles = 8;       // elements of a thread where rows cannot be read in packs
constexpr int kShares = 64;       // of long rows, for each column
static_assert(kThreads % 32 == 0 && kThreads <= kMaxThreads && kMaxThreads <= 512 && kHeld <= kMost, "a thread holds its packs in registers");

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

// A weight of x's dtype or float32; without data, ones.
struct Parameter {
  const void *data;
  bool is_float;
};

template <typename T, int V>
__device__ __forceinline__ void load_weight(Parameter weight, float offset, int64_t column, float (&w)[V]) {
  if (weight.data == nullptr) {
#pragma unroll
    for (int i = 0; i < V; i++) w[i] = 1.0f;
  } else if (sizeof(T) == 4 || weight.is_float) {
    const float *p = static_cast<const float *>(weight.data) + column;
    constexpr int W = V < 4 ? V : 4;
#pragma unroll
    for (int i = 0; i < V; i += W) {
      Raw<float, W> raw;
      float some[W];
      raw.load(p + i);
      raw.floats(some);
#pragma unroll
      for (int j = 0; j < W; j++) w[i + j] = some[j];
    }
  } else {
    Raw<T, V> raw;
    raw.load(static_cast<const T *>(weight.data) + column);
    raw.floats(w);
  }
#pragma unroll
  for (int i = 0; i < V; i++) w[i] += offset;
}

// Sums over the threads of a row (blockDim.x of them), the same in all, in an order that never changes. `partial` must not
// be the one of the call before, which others may still read.
template <int K>
__device__ __forceinline__ void row_sums(float (&values)[K], float (*partial)[kMaxThreads / 32][K]) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
    for (int k = 0; k < K; k++) values[k] += __shfl_xor_sync(0xffffffffu, values[k], lanes);
  }
  const int warps = blockDim.x / 32;
  if (warps == 1) return;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < K; k++) (*partial)[threadIdx.x / 32][k] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; k++) values[k] = (*partial)[0][k];
  for (int i = 1; i < warps; i++) {
#pragma unroll
    for (int k = 0; k < K; k++) values[k] += (*partial)[i][k];
  }
}

struct Input {
  const void *data;
  int64_t stride;  // between rows
};

// A number near a row's mean, the same in all threads: deviations from it are small where those from the mean are, but for
// rows whose first elements lie far off, where the variance is large as well.
template <typename T, int V>
__device__ __forceinline__ float pivot_of(const T *row) {
  Raw<T, V> raw;
  float v[V], pivot = 0.0f;
  raw.load(row);
  raw.floats(v);
#pragma unroll
  for (int i = 0; i < V; i++) pivot += v[i] * (1.0f / V);
  return pivot;
}

// Rows that their threads hold in registers: `blockDim.x` threads a row, with HELD packs of V elements each, and
// `blockDim.y` rows at once, of one warp each. A block goes through rows with a step, the next one on its way while one
// is summed up, and keeps its share of the parameters' gradients in registers.
template <typename T, int V, int HELD>
__global__ void __launch_bounds__(V > 1 && HELD == kMost ? kMostThreads : kMaxThreads, 1)
    held_rows(Input grads, Input xs, Parameter weight, float eps, float offset, T *__restrict__ dx,
              float *__restrict__ shares, bool want_weight, bool want_bias, int64_t M, int N, float inverse) {
  constexpr bool ONCE = kLayer && V > 1 && sizeof(T) == 2;  // whether all sums are made at once
  constexpr int K = ONCE ? 4 : kLayer ? 3 : 2;
  __shared__ float partial[ONCE ? 2 : 4][kMaxThreads / 32][K];
  __shared__ float joined[kLayer ? 2 : 1][32 * V * HELD];
  const T *grad = static_cast<const T *>(grads.data), *x = static_cast<const T *>(xs.data);
  const int64_t step = (int64_t)gridDim.x * blockDim.y;
  const int first = threadIdx.x * V, stride = blockDim.x * V;
  float dweight[HELD][V], dbias[kLayer ? HELD : 1][V];
#pragma unroll
  for (int h = 0; h < HELD; h++) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      dweight[h][i] = 0.0f;
      if (kLayer) dbias[h][i] = 0.0f;
    }
  }
  constexpr bool AHEAD = kAhead && V > 1 && HELD <= 2;
  Raw<T, V> g_raw[HELD], x_raw[HELD], g_next[AHEAD ? HELD : 1], x_next[AHEAD ? HELD : 1];
  const auto read = [&](int64_t row, Raw<T, V> *g_into, Raw<T, V> *x_into) {
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      const int column = first + h * stride;
      if (column >= N) continue;
      x_into[h].load(x + row * xs.stride + column);
      g_into[h].load(grad + row * grads.stride + column);
    }
  };
  int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  if (AHEAD && row < M) read(row, g_next, x_next);
  int turn = 0;
  for (; row < M; row += step) {
    if constexpr (AHEAD) {
#pragma unroll
      for (int h = 0; h < HELD; h++) {
        g_raw[h] = g_next[h];
        x_raw[h] = x_next[h];
      }
      if (row + step < M) read(row + step, g_next, x_next);
    } else {
      read(row, g_raw, x_raw);
    }
    float mean = ONCE ? pivot_of<T, V>(x + row * xs.stride) : 0.0f;
    if constexpr (kLayer && !ONCE) {
      float sum[1] = {0.0f};
#pragma unroll
      for (int h = 0; h < HELD; h++) {
        if (first + h * stride >= N) continue;
        float v[V], some = 0.0f;
        x_raw[h].floats(v);
#pragma unroll
        for (int i = 0; i < V; i++) some += v[i];
        sum[0] += some;
      }
      row_sums<1>(sum, reinterpret_cast<float(*)[kMaxThreads / 32][1]>(&partial[2 + (turn & 1)]));
      mean = sum[0] / (float)N;
    }
    float sums[K];
#pragma unroll
    for (int k = 0; k < K; k++) sums[k] = 0.0f;
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      const int column = first + h * stride;
      if (column >= N) continue;
      float v[V], g[V], w[V], squares = 0.0f, products = 0.0f, plain = 0.0f, deviations = 0.0f;
      x_raw[h].floats(v);
      g_raw[h].floats(g);
      load_weight<T, V>(weight, offset, column, w);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float centred = kLayer ? v[i] - mean : v[i], weighted = g[i] * w[i];
        squares += centred * centred;
        products += weighted * centred;
        if (kLayer) plain += weighted;
        if (ONCE) deviations += centred;
      }
      sums[0] += squares;
      sums[1] += products;
      if (kLayer) sums[2] += plain;
      if (ONCE) sums[K - 1] += deviations;
    }
    row_sums<K>(sums, &partial[turn & 1]);
    turn++;
    if constexpr (ONCE) {  // from the pivot to the mean
      const float off = sums[K - 1] * inverse;
      mean += off;
      sums[0] -= sums[K - 1] * off;
      sums[1] -= sums[2] * off;
      if (sums[0] < 0.0f) sums[0] = 0.0f;  // by rounding only; NaN stays
    }
    const float scale = rsqrtf(sums[0] * inverse + eps), second = sums[1] * scale * inverse;
    const float mean_gradient = kLayer ? sums[kLayer ? 2 : 0] * inverse : 0.0f;
    T *out = dx + row * N;
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      const int column = first + h * stride;
      if (column >= N) continue;
      float v[V], g[V], w[V];
      x_raw[h].floats(v);
      g_raw[h].floats(g);
      load_weight<T, V>(weight, offset, column, w);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float normed = (kLayer ? v[i] - mean : v[i]) * scale;
        dweight[h][i] += g[i] * normed;
        if (kLayer) dbias[h][i] += g[i];
        v[i] = scale * (g[i] * w[i] - mean_gradient - normed * second);
      }
      Raw<T, V> raw;
      raw.take(v);
      raw.store(out + column);
    }
  }
  if (blockDim.y > 1) {  // the rows' warps join their shares, one after the other
    for (int y = 0; y < (int)blockDim.y; y++) {
      if ((int)threadIdx.y == y) {
#pragma unroll
        for (int h = 0; h < HELD; h++) {
#pragma unroll
          for (int i = 0; i < V; i++) {
            const int at = (h * 32 + threadIdx.x) * V + i;
            joined[0][at] = y == 0 ? dweight[h][i] : joined[0][at] + dweight[h][i];
            if (kLayer) joined[kLayer][at] = y == 0 ? dbias[h][i] : joined[kLayer][at] + dbias[h][i];
          }
        }
      }
      __syncthreads();
    }
    if (threadIdx.y != 0) return;
#pragma unroll
    for (int h = 0; h < HELD; h++) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int at = (h * 32 + threadIdx.x) * V + i;
        dweight[h][i] = joined[0][at];
        if (kLayer) dbias[h][i] = joined[kLayer][at];
      }
    }
  }
  float *own = shares + (int64_t)blockIdx.x * N;
#pragma unroll
  for (int h = 0; h < HELD; h++) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int column = first + h * stride + i;
      if (column >= N) continue;
      if (want_weight) own[column] = dweight[h][i];
      if (kLayer && want_bias) own[(want_weight ? (int64_t)gridDim.x * N : 0) + column] = dbias[h][i];
    }
  }
}

// Rows of any length: a block reads one three times (four times, for a layer norm) and notes its mean and scale.
template <typename T, int V>
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_rows(Input grads, Input xs, Parameter weight, float eps, float offset, T *__restrict__ dx,
                  float *__restrict__ moments, int64_t M, int64_t N) {
  constexpr int K = kLayer ? 3 : 2;
  __shared__ float partial[4][kMaxThreads / 32][K];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x, turn++) {
    const T *x = static_cast<const T *>(xs.data) + row * xs.stride;
    const T *grad = static_cast<const T *>(grads.data) + row * grads.stride;
    float mean = 0.0f;
    if constexpr (kLayer) {
      float sum[1] = {0.0f};
      for (int64_t column = (int64_t)threadIdx.x * V; column < N; column += (int64_t)blockDim.x * V) {
        Raw<T, V> raw;
        float v[V];
        raw.load(x + column);
        raw.floats(v);
#pragma unroll
        for (int i = 0; i < V; i++) sum[0] += v[i];
      }
      row_sums<1>(sum, reinterpret_cast<float(*)[kMaxThreads / 32][1]>(&partial[2 + (turn & 1)]));
      mean = sum[0] / (float)N;
    }
    float sums[K];
#pragma unroll
    for (int k = 0; k < K; k++) sums[k] = 0.0f;
    for (int64_t column = (int64_t)threadIdx.x * V; column < N; column += (int64_t)blockDim.x * V) {
      Raw<T, V> x_raw, g_raw;
      float v[V], g[V], w[V];
      x_raw.load(x + column);
      g_raw.load(grad + column);
      x_raw.floats(v);
      g_raw.floats(g);
      load_weight<T, V>(weight, offset, column, w);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float centred = kLayer ? v[i] - mean : v[i], weighted = g[i] * w[i];
        sums[0] += centred * centred;
        sums[1] += weighted * centred;
        if (kLayer) sums[K - 1] += weighted;
      }
    }
    row_sums<K>(sums, &partial[turn & 1]);
    const float count = (float)N, scale = rsqrtf(sums[0] / count + eps), second = sums[1] * scale / count;
    const float mean_gradient = kLayer ? sums[K - 1] / count : 0.0f;
    if (threadIdx.x == 0) {
      moments[2 * row] = mean;
      moments[2 * row + 1] = scale;
    }
    for (int64_t column = (int64_t)threadIdx.x * V; column < N; column += (int64_t)blockDim.x * V) {
      Raw<T, V> x_raw, g_raw;
      float v[V], g[V], w[V];
      x_raw.load(x + column);
      g_raw.load(grad + column);
      x_raw.floats(v);
      g_raw.floats(g);
      load_weight<T, V>(weight, offset, column, w);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float normed = (kLayer ? v[i] - mean : v[i]) * scale;
        v[i] = scale * (g[i] * w[i] - mean_gradient - normed * second);
      }
      x_raw.take(v);
      x_raw.store(dx + row * N + column);
    }
  }
}

// The shares of the parameters' gradients of long rows: a thread has one column of every so many rows.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    shares_of_columns(Input grads, Input xs, const float *__restrict__ moments, float *__restrict__ shares,
                      bool want_weight, bool want_bias, int64_t M, int64_t N) {
  const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= N) return;
  float dweight = 0.0f, dbias = 0.0f;
  for (int64_t row = blockIdx.y; row < M; row += gridDim.y) {
    const float g = to_float(static_cast<const T *>(grads.data)[row * grads.stride + column]);
    const float v = to_float(static_cast<const T *>(xs.data)[row * xs.stride + column]);
    dweight += g * ((v - moments[2 * row]) * moments[2 * row + 1]);
    dbias += g;
  }
  float *own = shares + (int64_t)blockIdx.y * N + column;
  if (want_weight) *own = dweight;
  if (kLayer && want_bias) own[want_weight ? (int64_t)gridDim.y * N : 0] = dbias;
}

constexpr int kTotalRows = 16;

// Adds up the shares of 32 columns, in a fixed order.
template <typename P>
__global__ void __launch_bounds__(32 * kTotalRows)
    total(const float *__restrict__ shares, int64_t count, int64_t N, P *__restrict__ out) {
  __shared__ float sums[kTotalRows][32];
  const int64_t column = (int64_t)blockIdx.x * 32 + threadIdx.x;
  float sum = 0.0f;
  if (column < N) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < count; row += kTotalRows) sum += shares[row * N + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= N) return;
  for (int i = 1; i < kTotalRows; i++) sum += sums[i][threadIdx.x];
  from_float(sum, out + column);
}

int total_of(const float *shares, int64_t count, int64_t N, const AkTensor *out, cudaStream_t stream) {
  const dim3 grid((unsigned)((N + 31) / 32)), block(32, kTotalRows);
  switch (out->dtype) {
    case AK_F32: total<float><<<grid, block, 0, stream>>>(shares, count, N, static_cast<float *>(out->data)); break;
    case AK_F16: total<__half><<<grid, block, 0, stream>>>(shares, count, N, static_cast<__half *>(out->data)); break;
    case AK_BF16: total<__nv_bfloat16><<<grid, block, 0, stream>>>(shares, count, N, static_cast<__nv_bfloat16 *>(out->data)); break;
    default: return AK_UNSUPPORTED;
  }
  return (int)cudaGetLastError();
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

// How a call is run: with V elements at a time, `lanes` threads a row with `held` of them each (0: any length), `high` rows
// of a block, `blocks` of them; `parameters` gradients of parameters.
struct Plan {
  int64_t M, N, blocks;
  int64_t grad_stride, x_stride;
  int lanes, held, high, parameters;
  bool fits, packs;
};

Plan plan_of(const AkTensor *grad, const AkTensor *x, const AkTensor *weight, const AkTensor *bias) {
  Plan plan = {};
  plan.N = x->sizes[x->ndim - 1];
  plan.M = 1;
  for (int d = 0; d < x->ndim - 1; d++) plan.M *= x->sizes[d];
  plan.parameters = (weight != NULL) + (bias != NULL);
  plan.fits = rows_of(grad, &plan.grad_stride) && rows_of(x, &plan.x_stride) &&
              (weight == NULL || weight->sizes[weight->ndim - 1] <= 1 || weight->strides[weight->ndim - 1] == 1);
  const int V = x->dtype == AK_F32 ? 4 : 8;
  plan.packs = plan.N % V == 0 && plan.grad_stride % V == 0 && plan.x_stride % V == 0 && aligned(grad->data) &&
               aligned(x->data) && (weight == NULL || aligned(weight->data));
  const int64_t units = plan.packs ? plan.N / V : plan.N;
  const int most = plan.packs ? kMost : kSingles;
  plan.high = 1;
  if (units <= 32 * most) {  // a warp has a row
    plan.lanes = 32;
    plan.held = plan.packs ? (units <= 32 ? 1 : units <= 64 ? 2 : kMost) : kSingles;
    plan.high = kThreads / 32;
  } else if (units <= (plan.packs ? (int64_t)kMost * kMostThreads : (int64_t)kSingles * kMaxThreads)) {
    plan.held = !plan.packs ? kSingles : kHeld < kMost && units <= (int64_t)kHeld * kMaxThreads ? kHeld : kMost;
    plan.lanes = (int)((units + plan.held * 32 - 1) / (plan.held * 32)) * 32;
  }
  if (plan.held == 0) {
    plan.blocks = plan.M < kShares ? plan.M : kShares;
  } else {
    const int64_t wanted = (plan.M + plan.high - 1) / plan.high, small = kThreads / (plan.lanes * plan.high);
    // Threads of many registers are alone on a multiprocessor: more blocks would only make more shares.
    const bool alone = plan.packs && (plan.lanes * plan.high > 256 || plan.held == kMost);
    plan.blocks = alone ? (kBlocks + 1) / 2 : kBlocks * (small > 1 ? small : 1);
    if (wanted < plan.blocks) plan.blocks = wanted;
  }
  return plan;
}

int64_t scratch(const Plan &plan) {
  const int64_t moments = plan.held == 0 ? 2 * plan.M : 0;
  return (moments + plan.parameters * plan.blocks * plan.N) * (int64_t)sizeof(float);
}

template <typename T>
int run(const Plan &plan, const AkTensor *grad, const AkTensor *x, const AkTensor *weight, float eps, float offset,
        const AkTensor *dx, const AkTensor *dweight, const AkTensor *dbias, const AkContext *ctx) {
  constexpr int V = kPack<T>;
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  const Input grads = {grad->data, plan.grad_stride}, xs = {x->data, plan.x_stride};
  const Parameter parameter = {weight == NULL ? NULL : weight->data, weight != NULL && weight->dtype == AK_F32};
  const bool want_weight = dweight != NULL, want_bias = dbias != NULL;
  const int64_t M = plan.M, N = plan.N;
  float *shares = static_cast<float *>(ctx->workspace);
  T *out = static_cast<T *>(dx->data);
  if (M > 0 && plan.held > 0) {
    const dim3 block((unsigned)plan.lanes, (unsigned)plan.high);
    const auto launch = [&](auto kernel) {
      kernel<<<(unsigned)plan.blocks, block, 0, stream>>>(grads, xs, parameter, eps, offset, out, shares, want_weight,
                                                         want_bias, M, (int)N, 1.0f / (float)N);
    };
    if (!plan.packs)
      launch(held_rows<T, 1, kSingles>);
    else if (plan.held == 1)
      launch(held_rows<T, V, 1>);
    else if (plan.held == 2)
      launch(held_rows<T, V, 2>);
    else
      launch(held_rows<T, V, kMost>);
  } else if (M > 0) {
    float *moments = shares;
    shares += 2 * M;
    const unsigned blocks = (unsigned)(M < 0x7fffffff ? M : 0x7fffffff);
    if (plan.packs)
      streamed_rows<T, V><<<blocks, kMaxThreads, 0, stream>>>(grads, xs, parameter, eps, offset, out, moments, M, N);
    else
      streamed_rows<T, 1><<<blocks, kMaxThreads, 0, stream>>>(grads, xs, parameter, eps, offset, out, moments, M, N);
    const dim3 grid((unsigned)((N + kThreads - 1) / kThreads), (unsigned)plan.blocks);
    if (plan.parameters > 0)
      shares_of_columns<T><<<grid, kThreads, 0, stream>>>(grads, xs, moments, shares, want_weight, want_bias, M, N);
  }
  int status = (int)cudaGetLastError();
  if (status == 0 && want_weight) status = total_of(shares, plan.blocks, N, dweight, stream);
  if (status == 0 && want_bias)
    status = total_of(shares + (want_weight ? plan.blocks * N : 0), plan.blocks, N, dbias, stream);
  return status;
}

}  // namespace

extern "C" int64_t layernorm_backward_workspace(const AkTensor *grad, const AkTensor *x, const AkTensor *weight,
                                                const AkTensor *bias, double) {
  return scratch(plan_of(grad, x, weight, bias));
}

extern "C" int layernorm_backward(const AkTensor *grad, const AkTensor *x, const AkTensor *weight, const AkTensor *bias,
                                  double eps, const AkTensor *dx, const AkTensor *dweight, const AkTensor *dbias,
                                  const AkContext *ctx) {
  if (grad->dtype != x->dtype || (weight != NULL && weight->dtype != x->dtype && weight->dtype != AK_F32))
    return AK_UNSUPPORTED;
  const Plan plan = plan_of(grad, x, weight, bias);
  if (!plan.fits) return AK_NEED_CONTIGUOUS;
  const AkTensor *of_weight = weight == NULL ? NULL : dweight, *of_bias = bias == NULL ? NULL : dbias;
  const auto go = [&](auto t) {
    return run<decltype(t)>(plan, grad, x, weight, (float)eps, 0.0f, dx, of_weight, of_bias, ctx);
  };
  switch (x->dtype) {
    case AK_F32: return go(float());
    case AK_F16: return go(__half());
    case AK_BF16: return go(__nv_bfloat16());
    default: return AK_UNSUPPORTED;
  }
}
