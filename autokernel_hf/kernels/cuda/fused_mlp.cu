// kernel_type: fused_mlp
//
// y = (act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)) @ w_down.T + b_down, as two or three products that do
// everything else on their way out: the gate's goes to the workspace, the second one turns it into the hidden values
// where it lies, the last one reads them. 16-bit operands go through the tensor cores (mma.m16n8k16, fp32 sums) from
// tiles that asynchronous copies bring to shared memory some stages ahead; float32 is multiplied as float32.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kTileM = 128;          // tune(block): 64, 128
constexpr int kTileN = 128;          // tune(block): 64, 128
constexpr int kTileK = 32;           // tune(memory): 32, 64
constexpr int kStages = 3;           // tune(memory): 2, 3, 4
constexpr int kSmallStages = 3;      // tune(memory): 2, 3, 4
constexpr int kGroup = 8;            // tune(memory): 1, 4, 8, 16
constexpr int64_t kLargeFrom = 128;  // tune(launch): 32, 64, 128, 256

namespace {

// A block's tile, a warp's part of it, and how many tiles along K are under way.
template <int M, int N, int K, int WARP_M, int WARP_N, int STAGES>
struct Tile {
  static constexpr int m = M, n = N, k = K, warp_m = WARP_M, warp_n = WARP_N, stages = STAGES;
  static constexpr int warps_n = N / WARP_N, threads = M / WARP_M * warps_n * 32;
  static_assert(M % WARP_M == 0 && N % WARP_N == 0 && K % 16 == 0, "tiles are whole warps' parts and whole products");
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && STAGES >= 2, "a warp takes 16 rows and 16 columns at a time");
};
using Large = Tile<kTileM, kTileN, kTileK, 64, 32, kStages>;
using Small = Tile<64, 64, 64, 32, 32, kSmallStages>;

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
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T v[V];
};

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load(const T *p) {
  return *reinterpret_cast<const Pack<T, V> *>(p);
}

template <typename T, int V>
__device__ __forceinline__ void store(T *p, const Pack<T, V> &pack) {
  *reinterpret_cast<Pack<T, V> *>(p) = pack;
}

// --- behind the product ---

enum Kind { kNone, kGelu, kGeluTanh, kGeluNew, kQuickGelu, kSilu, kRelu, kRelu2, kKinds };

__device__ __forceinline__ float times_sigmoid(float x, float u) { return x / (1.0f + expf(-u)); }

template <typename F>
__device__ __forceinline__ void each(float (&x)[8], F f) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = f(x[i]);
}

// 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where 1 + tanh(u) cancels.
__device__ __forceinline__ void activate(float (&x)[8], int kind) {
  switch (kind) {
    case kGelu: each(x, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f)); }); break;
    case kGeluTanh:
    case kGeluNew:
      each(x, [](float v) { return times_sigmoid(v, v * (1.5957691216057308f + 0.07135481627f * v * v)); });
      break;
    case kQuickGelu: each(x, [](float v) { return times_sigmoid(v, 1.702f * v); }); break;
    case kSilu: each(x, [](float v) { return times_sigmoid(v, v); }); break;
    case kRelu: each(x, [](float v) { return v < 0.0f ? 0.0f : v; }); break;
    case kRelu2: each(x, [](float v) { return v < 0.0f ? 0.0f : v * v; }); break;
    default: break;
  }
}

struct Epilogue {
  const void *bias;  // of the output's dtype or float32, or NULL
  int64_t bias_stride;
  bool bias_is_float;
  bool gated;  // the output holds the gate: what is written there is act(gate) times this product
  bool packs;  // eight neighbours of an output's row are an aligned 16-byte pack (two of float32)
  int kind;
};

template <typename T>
__device__ __forceinline__ void load8(const T *p, float (&values)[8]) {
  constexpr int V = 16 / (int)sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; i += V) {
    const Pack<T, V> pack = load<T, V>(p + i);
#pragma unroll
    for (int j = 0; j < V; j++) values[i + j] = to_float(pack.v[j]);
  }
}

// Eight sums of a row (those before column N count) become outputs.
template <typename T>
__device__ __forceinline__ void emit(const float *sums, const Epilogue &e, T *out, int64_t row, int64_t column,
                                     int64_t N) {
  const int count = N - column < 8 ? (int)(N - column) : 8;
  const bool packs = e.packs && count == 8;
  T *y = out + row * N + column;
  float values[8], factors[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    values[i] = sums[i];
    if (e.bias == NULL || i >= count) continue;
    const int64_t at = (column + i) * e.bias_stride;
    values[i] += e.bias_is_float ? static_cast<const float *>(e.bias)[at]
                                 : to_float(static_cast<const T *>(e.bias)[at]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) factors[i] = 1.0f;
  if (e.gated) {
#pragma unroll
    for (int i = 0; i < 8; i++) factors[i] = values[i];
    if (packs) {
      load8(y, values);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] = i < count ? to_float(y[i]) : 0.0f;
    }
  }
  activate(values, e.kind);
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] *= factors[i];
  if (packs) {
    constexpr int V = 16 / (int)sizeof(T);
#pragma unroll
    for (int i = 0; i < 8; i += V) {
      Pack<T, V> pack;
#pragma unroll
      for (int j = 0; j < V; j++) pack.v[j] = from_float<T>(values[i + j]);
      store<T, V>(y + i, pack);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < count) y[i] = from_float<T>(values[i]);
  }
}

// --- which block does which tile ---

struct Place {
  int64_t row, column;  // of the tile's first element
};

// Consecutive blocks walk down kGroup tiles before they step right: they share weights in the L2 cache.
__device__ __forceinline__ Place place_of(int64_t block, int64_t tiles_m, int64_t tiles_n, int m, int n) {
  const int64_t group = block / (kGroup * tiles_n), first = group * kGroup;
  const int64_t high = tiles_m - first < kGroup ? tiles_m - first : kGroup, within = block - first * tiles_n;
  return {(first + within % high) * m, within / high * n};
}

// A matrix in memory, dense along its rows.
template <typename T>
struct Dense {
  const T *data;
  int64_t stride;  // in elements
  bool packs;      // neighbours of a row are aligned 16-byte packs
};

// --- tensor cores ---

// 16 bytes to shared memory, some time before wait_for_groups: the first `bytes` from memory, zeros after them.
__device__ __forceinline__ void copy_later(void *to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Until all of this thread's groups but the last N are here.
template <int N>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((uint32_t)__cvta_generic_to_shared(p)));
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ROWS x COLUMNS elements from (row, column) on into shared memory, zeros where the matrix ends. The rows there are
// padded by 16 bytes, so that eight of them start in different banks.
template <typename T, int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void load_tile(T *tile, const Dense<T> &matrix, int64_t row, int64_t column, int64_t rows,
                                          int64_t columns) {
  constexpr int kChunks = COLUMNS / 8;
  static_assert(ROWS * kChunks % THREADS == 0, "threads share the tile evenly");
  if (matrix.packs) {
#pragma unroll
    for (int first = 0; first < ROWS * kChunks; first += THREADS) {
      const int i = first + threadIdx.x;
      const int64_t r = row + i / kChunks, c = column + i % kChunks * 8, left = r < rows ? columns - c : 0;
      const int count = left < 8 ? left > 0 ? (int)left : 0 : 8;
      const T *from = count > 0 ? matrix.data + r * matrix.stride + c : matrix.data;
      copy_later(tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8, from, 2 * count);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
    const int64_t r = row + i / kChunks, c = column + i % kChunks * 8, left = r < rows ? columns - c : 0;
    const T *from = matrix.data + r * matrix.stride + c;
    Pack<T, 8> pack;
#pragma unroll
    for (int j = 0; j < 8; j++) pack.v[j] = j < left ? from[j] : from_float<T>(0.0f);
    store<T, 8>(tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8, pack);
  }
}

template <typename C>
struct Shared {
  static constexpr int stride = C::k + 8, a_size = C::m * stride, b_size = C::n * stride;
  static constexpr int stage_bytes = (a_size + b_size) * 2;
  static constexpr int sums_stride = C::warp_n + 4, warp_sums = C::warp_m * sums_stride;
  static constexpr int sums_bytes = C::threads / 32 * warp_sums * 4;
  static constexpr int bytes = stage_bytes * C::stages > sums_bytes ? stage_bytes * C::stages : sums_bytes;
};

// a (M, K) @ b.T with b (N, K), both dense along K. (The output may hold the gate: no __restrict__.)
template <typename T, typename C>
__global__ void __launch_bounds__(C::threads)
    project(Dense<T> a, Dense<T> b, Epilogue epilogue, T *out, int64_t M, int64_t N, int64_t K, int64_t tiles_m,
            int64_t tiles_n) {
  using Layout = Shared<C>;
  extern __shared__ __align__(16) unsigned char memory[];
  T *tiles = reinterpret_cast<T *>(memory);
  const Place place = place_of(blockIdx.x, tiles_m, tiles_n, C::m, C::n);
  const int64_t steps = (K + C::k - 1) / C::k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / C::warps_n * C::warp_m, warp_column = warp % C::warps_n * C::warp_n;
  // ldmatrix reads four 8x8 matrices; lanes 8i to 8i + 7 name the rows of the i-th.
  const int matrix = lane / 8, matrix_row = lane % 8;

  const auto fetch = [&](int64_t step) {
    if (step < steps) {
      T *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
      load_tile<T, C::m, C::k, C::threads>(a_tile, a, place.row, step * C::k, M, K);
      load_tile<T, C::n, C::k, C::threads>(b_tile, b, place.column, step * C::k, N, K);
    }
    end_group();  // an empty group too: the count of groups tells the step
  };

  float sums[C::warp_m / 16][C::warp_n / 8][4] = {};
#pragma unroll 1
  for (int s = 0; s < C::stages - 1; s++) fetch(s);
  for (int64_t step = 0; step < steps; step++) {
    wait_for_groups<C::stages - 2>();
    __syncthreads();  // this step's tiles are here, and everyone is done with those that the next fetch overwrites
    fetch(step + C::stages - 1);
    const T *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
#pragma unroll
    for (int k = 0; k < C::k; k += 16) {
      uint32_t a_part[C::warp_m / 16][4], b_part[C::warp_n / 16][4];
#pragma unroll
      for (int i = 0; i < C::warp_m / 16; i++)
        ldmatrix(a_part[i],
                 a_tile + (warp_row + 16 * i + matrix % 2 * 8 + matrix_row) * Layout::stride + k + matrix / 2 * 8);
#pragma unroll
      for (int j = 0; j < C::warp_n / 16; j++)
        ldmatrix(b_part[j],
                 b_tile + (warp_column + 16 * j + matrix / 2 * 8 + matrix_row) * Layout::stride + k + matrix % 2 * 8);
#pragma unroll
      for (int i = 0; i < C::warp_m / 16; i++)
#pragma unroll
        for (int j = 0; j < C::warp_n / 8; j++)
          multiply(sums[i][j], a_part[i], b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1], T());
    }
  }
  wait_for_groups<0>();
  __syncthreads();  // the tiles' memory is free

  float *mine = reinterpret_cast<float *>(memory) + warp * Layout::warp_sums;
#pragma unroll
  for (int i = 0; i < C::warp_m / 16; i++)
#pragma unroll
    for (int j = 0; j < C::warp_n / 8; j++) {
      float *at = mine + (16 * i + lane / 4) * Layout::sums_stride + 8 * j + lane % 4 * 2;
      store<float, 2>(at, {sums[i][j][0], sums[i][j][1]});
      store<float, 2>(at + 8 * Layout::sums_stride, {sums[i][j][2], sums[i][j][3]});
    }
  __syncwarp();
  constexpr int kChunks = C::warp_n / 8;
#pragma unroll 1
  for (int i = lane; i < C::warp_m * kChunks; i += 32) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const int64_t row = place.row + warp_row + r, column = place.column + warp_column + c;
    if (row < M && column < N) emit<T>(mine + r * Layout::sums_stride + c, epilogue, out, row, column, N);
  }
}

// --- float32 ---

// M x N outputs a block, TM x TN a thread.
template <int M_TILE, int N_TILE, int TM, int TN>
__global__ void __launch_bounds__((M_TILE / TM) * (N_TILE / TN))
    project_float(Dense<float> a, Dense<float> b, Epilogue epilogue, float *out, int64_t M, int64_t N, int64_t K,
                  int64_t tiles_m, int64_t tiles_n) {
  constexpr int kThreads = (M_TILE / TM) * (N_TILE / TN), kDepth = 16;
  constexpr int kA = M_TILE * kDepth / kThreads, kB = N_TILE * kDepth / kThreads;
  static_assert(M_TILE * kDepth % kThreads == 0 && N_TILE * kDepth % kThreads == 0, "threads share the tiles evenly");
  constexpr int kAStride = M_TILE + 4, kBStride = N_TILE + 4, kSumsStride = N_TILE + 4;
  constexpr int kSlot = kDepth * (kAStride + kBStride), kSums = M_TILE * kSumsStride;
  constexpr int kMemory = 2 * kSlot > kSums ? 2 * kSlot : kSums;
  __shared__ __align__(16) float memory[kMemory];  // two slots of a's tile and b's, by depth; in the end, the sums
  const Place place = place_of(blockIdx.x, tiles_m, tiles_n, M_TILE, N_TILE);
  const int64_t steps = (K + kDepth - 1) / kDepth;
  const int tx = threadIdx.x % (N_TILE / TN), ty = threadIdx.x / (N_TILE / TN);

  float a_next[kA], b_next[kB];
  const auto fetch = [&](int64_t step) {
#pragma unroll
    for (int i = 0; i < kA; i++) {
      const int e = threadIdx.x + i * kThreads;
      const int64_t row = place.row + e / kDepth, depth = step * kDepth + e % kDepth;
      a_next[i] = row < M && depth < K ? a.data[row * a.stride + depth] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kB; i++) {
      const int e = threadIdx.x + i * kThreads;
      const int64_t column = place.column + e / kDepth, depth = step * kDepth + e % kDepth;
      b_next[i] = column < N && depth < K ? b.data[column * b.stride + depth] : 0.0f;
    }
  };
  const auto keep = [&](int slot) {
#pragma unroll
    for (int i = 0; i < kA; i++) {
      const int e = threadIdx.x + i * kThreads;
      memory[slot * kSlot + e % kDepth * kAStride + e / kDepth] = a_next[i];
    }
#pragma unroll
    for (int i = 0; i < kB; i++) {
      const int e = threadIdx.x + i * kThreads;
      memory[slot * kSlot + kDepth * kAStride + e % kDepth * kBStride + e / kDepth] = b_next[i];
    }
  };

  float sums[TM][TN] = {};
  if (steps > 0) {
    fetch(0);
    keep(0);
  }
  __syncthreads();
  for (int64_t step = 0; step < steps; step++) {
    const int slot = (int)(step % 2);
    if (step + 1 < steps) fetch(step + 1);
#pragma unroll
    for (int k = 0; k < kDepth; k++) {
      const Pack<float, TM> x = load<float, TM>(memory + slot * kSlot + k * kAStride + ty * TM);
      const Pack<float, TN> y = load<float, TN>(memory + slot * kSlot + kDepth * kAStride + k * kBStride + tx * TN);
#pragma unroll
      for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) sums[i][j] += x.v[i] * y.v[j];
    }
    if (step + 1 < steps) keep(1 - slot);
    __syncthreads();
  }

  // All sums lie side by side where the tiles were.
#pragma unroll
  for (int i = 0; i < TM; i++)
#pragma unroll
    for (int j = 0; j < TN; j++) memory[(ty * TM + i) * kSumsStride + tx * TN + j] = sums[i][j];
  __syncthreads();
#pragma unroll 1
  for (int e = threadIdx.x; e < M_TILE * (N_TILE / 8); e += kThreads) {
    const int r = e / (N_TILE / 8), c = e % (N_TILE / 8) * 8;
    const int64_t row = place.row + r, column = place.column + c;
    if (row < M && column < N) emit<float>(memory + r * kSumsStride + c, epilogue, out, row, column, N);
  }
}

// --- host ---

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

int64_t blocks_of(int64_t M, int64_t N, int m, int n) { return (M + m - 1) / m * ((N + n - 1) / n); }

template <typename T, typename C>
int launch(Dense<T> a, Dense<T> b, const Epilogue &epilogue, T *out, int64_t M, int64_t N, int64_t K,
           cudaStream_t stream) {
  constexpr int kBytes = Shared<C>::bytes;
  const auto kernel = project<T, C>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess) {
    cudaGetLastError();  // this device has less shared memory
    return AK_UNSUPPORTED;
  }
  const int64_t tiles_m = (M + C::m - 1) / C::m, tiles_n = (N + C::n - 1) / C::n;
  if (tiles_m * tiles_n > 0x7fffffff) return AK_UNSUPPORTED;
  kernel<<<(unsigned)(tiles_m * tiles_n), C::threads, kBytes, stream>>>(a, b, epilogue, out, M, N, K, tiles_m, tiles_n);
  return (int)cudaGetLastError();
}

template <int M_TILE, int N_TILE, int TM, int TN>
int launch_float(Dense<float> a, Dense<float> b, const Epilogue &epilogue, float *out, int64_t M, int64_t N, int64_t K,
                 cudaStream_t stream) {
  constexpr int kThreads = (M_TILE / TM) * (N_TILE / TN);
  const int64_t tiles_m = (M + M_TILE - 1) / M_TILE, tiles_n = (N + N_TILE - 1) / N_TILE;
  if (tiles_m * tiles_n > 0x7fffffff) return AK_UNSUPPORTED;
  project_float<M_TILE, N_TILE, TM, TN><<<(unsigned)(tiles_m * tiles_n), kThreads, 0, stream>>>(
      a, b, epilogue, out, M, N, K, tiles_m, tiles_n);
  return (int)cudaGetLastError();
}

template <typename T>
int product(Dense<T> a, Dense<T> b, Epilogue epilogue, T *out, int64_t M, int64_t N, int64_t K, cudaStream_t stream) {
  if (M == 0 || N == 0) return AK_OK;
  epilogue.packs = N % (16 / (int)sizeof(T)) == 0 && aligned(out);
  if constexpr (sizeof(T) == 4) {
    if (blocks_of(M, N, 128, 64) >= kLargeFrom)
      return launch_float<128, 64, 8, 4>(a, b, epilogue, out, M, N, K, stream);
    return launch_float<32, 32, 2, 2>(a, b, epilogue, out, M, N, K, stream);
  } else {
    if (blocks_of(M, N, Large::m, Large::n) >= kLargeFrom)
      return launch<T, Large>(a, b, epilogue, out, M, N, K, stream);
    return launch<T, Small>(a, b, epilogue, out, M, N, K, stream);
  }
}

// A tensor as rows of its last dimension, all one stride apart; false where it is not that.
template <typename T>
bool dense_of(const AkTensor *t, Dense<T> *matrix) {
  const int last = t->ndim - 1;
  if (t->sizes[last] > 1 && t->strides[last] != 1) return false;
  int64_t rows = 1, stride = 0;
  for (int d = last - 1; d >= 0; d--) {
    if (t->sizes[d] == 1) continue;
    if (rows > 1 && t->strides[d] != rows * stride) return false;
    if (rows == 1) stride = t->strides[d];
    rows *= t->sizes[d];
  }
  *matrix = {static_cast<const T *>(t->data), stride, aligned(t->data) && stride % (16 / (int)sizeof(T)) == 0};
  return true;
}

Epilogue epilogue_of(const AkTensor *bias, bool gated, int kind) {
  if (bias == NULL) return {NULL, 0, false, gated, false, kind};
  return {bias->data, bias->sizes[0] == 1 ? 0 : bias->strides[0], bias->dtype == AK_F32, gated, false, kind};
}

int64_t rows_of(const AkTensor *x) {
  int64_t rows = 1;
  for (int d = 0; d < x->ndim - 1; d++) rows *= x->sizes[d];
  return rows;
}

template <typename T>
int run(const AkTensor *x, const AkTensor *w_gate, const AkTensor *w_up, const AkTensor *w_down,
        const AkTensor *b_gate, const AkTensor *b_up, const AkTensor *b_down, int kind, const AkTensor *out,
        const AkContext *ctx) {
  Dense<T> a, gate, up, down;
  if (!dense_of(x, &a) || !dense_of(w_up, &up) || !dense_of(w_down, &down)) return AK_NEED_CONTIGUOUS;
  if (w_gate != NULL && !dense_of(w_gate, &gate)) return AK_NEED_CONTIGUOUS;
  const int64_t M = rows_of(x), D = x->sizes[x->ndim - 1], H = w_up->sizes[0];
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  T *hidden = static_cast<T *>(ctx->workspace);
  int code = AK_OK;
  if (w_gate != NULL) code = product<T>(a, gate, epilogue_of(b_gate, false, kNone), hidden, M, H, D, stream);
  if (code == AK_OK) code = product<T>(a, up, epilogue_of(b_up, w_gate != NULL, kind), hidden, M, H, D, stream);
  if (code != AK_OK) return code;
  const Dense<T> h = {hidden, H, H % (16 / (int)sizeof(T)) == 0};
  return product<T>(h, down, epilogue_of(b_down, false, kNone), static_cast<T *>(out->data), M, D, H, stream);
}

}  // namespace

extern "C" int64_t fused_mlp_workspace(const AkTensor *x, const AkTensor *w_gate, const AkTensor *w_up,
                                       const AkTensor *w_down, const AkTensor *b_gate, const AkTensor *b_up,
                                       const AkTensor *b_down, int32_t activation) {
  return rows_of(x) * w_up->sizes[0] * (x->dtype == AK_F32 ? 4 : 2);
}

extern "C" int fused_mlp(const AkTensor *x, const AkTensor *w_gate, const AkTensor *w_up, const AkTensor *w_down,
                         const AkTensor *b_gate, const AkTensor *b_up, const AkTensor *b_down, int32_t activation,
                         const AkTensor *out, const AkContext *ctx) {
  if (activation < 0 || activation >= kKinds) return AK_UNSUPPORTED;
  for (const AkTensor *weight : {w_gate, w_up, w_down})
    if (weight != NULL && weight->dtype != x->dtype) return AK_UNSUPPORTED;
  for (const AkTensor *bias : {b_gate, b_up, b_down})
    if (bias != NULL && bias->dtype != x->dtype && bias->dtype != AK_F32) return AK_UNSUPPORTED;
  switch (x->dtype) {
    case AK_F32: return run<float>(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, out, ctx);
    case AK_F16: return run<__half>(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, out, ctx);
    case AK_BF16: return run<__nv_bfloat16>(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
