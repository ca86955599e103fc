// kernel_type: matmul
//
// act(scale_a * scale_b * (a @ b) + bias) + residual. 16-bit operands go through the tensor cores (mma.m16n8k16, fp32
// sums) from tiles that asynchronous copies bring to shared memory some stages ahead; float8 operands are widened to
// float16, which holds each of their values, on the way there; float32 is multiplied as float32. b may be dense along N
// or along K (a linear layer's weight). The sums pass through shared memory once more, so that everything behind the
// product happens on rows of eight.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kTileM = 128;           // tune(block): 64, 128
constexpr int kTileN = 128;           // tune(block): 64, 128
constexpr int kTileK = 32;            // tune(memory): 32, 64
constexpr int kStages = 3;            // tune(memory): 2, 3, 4
constexpr int kSmallStages = 3;       // tune(memory): 2, 3, 4
constexpr int kGroup = 8;             // tune(memory): 1, 4, 8, 16
constexpr int64_t kLargeFrom = 128;   // tune(launch): 32, 64, 128, 256

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
  const void *residual;  // of the output's dtype, or NULL
  int64_t residual_batch, residual_row, residual_column;
  bool residual_packs;  // eight neighbours of a row are an aligned 16-byte pack (two of float32)
  bool out_packs;
  const float *scale_a, *scale_b;  // or NULL
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
template <typename O>
__device__ __forceinline__ void emit(const float *sums, const Epilogue &e, float scale, O *out, int64_t batch,
                                     int64_t row, int64_t column, int64_t M, int64_t N) {
  const int count = N - column < 8 ? (int)(N - column) : 8;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = sums[i] * scale;
  if (e.bias != NULL) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i >= count) continue;
      const int64_t at = (column + i) * e.bias_stride;
      values[i] += e.bias_is_float ? static_cast<const float *>(e.bias)[at]
                                   : to_float(static_cast<const O *>(e.bias)[at]);
    }
  }
  activate(values, e.kind);
  if (e.residual != NULL) {
    const O *residual = static_cast<const O *>(e.residual) + batch * e.residual_batch + row * e.residual_row;
    if (e.residual_packs && count == 8) {
      float added[8];
      load8(residual + column, added);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] += added[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < count) values[i] += to_float(residual[(column + i) * e.residual_column]);
    }
  }
  O *y = out + (batch * M + row) * N + column;
  if (e.out_packs && count == 8) {
    constexpr int V = 16 / (int)sizeof(O);
#pragma unroll
    for (int i = 0; i < 8; i += V) {
      Pack<O, V> pack;
#pragma unroll
      for (int j = 0; j < V; j++) pack.v[j] = from_float<O>(values[i + j]);
      store<O, V>(y + i, pack);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < count) y[i] = from_float<O>(values[i]);
  }
}

__device__ __forceinline__ float scale_of(const Epilogue &e) {
  return (e.scale_a != NULL ? *e.scale_a : 1.0f) * (e.scale_b != NULL ? *e.scale_b : 1.0f);
}

// --- which block does which tile ---

struct Place {
  int64_t batch, row, column;  // of the tile's first element
};

// Consecutive blocks walk down kGroup tiles before they step right: they share columns of b in the L2 cache.
__device__ __forceinline__ Place place_of(int64_t block, int64_t tiles_m, int64_t tiles_n, int m, int n) {
  const int64_t tile = block % (tiles_m * tiles_n), group = tile / (kGroup * tiles_n), first = group * kGroup;
  const int64_t high = tiles_m - first < kGroup ? tiles_m - first : kGroup, within = tile - first * tiles_n;
  return {block / (tiles_m * tiles_n), (first + within % high) * m, within / high * n};
}

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

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// A matrix in memory that is dense along its rows.
template <typename S>
struct Dense {
  const S *data;
  int64_t batch, stride;  // in elements
  bool packs;             // eight neighbours of a row are one aligned access
};

// float8_e4m3fn reaches shared memory as float16.
__device__ __forceinline__ __half widen(__nv_fp8_storage_t x) { return __half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)); }
__device__ __forceinline__ __half widen(__half x) { return x; }
__device__ __forceinline__ __nv_bfloat16 widen(__nv_bfloat16 x) { return x; }

// ROWS x COLUMNS elements from (row, column) on into shared memory, zeros where the matrix ends. The rows there are
// padded by 16 bytes, so that eight of them start in different banks.
template <typename T, typename S, int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void load_tile(T *tile, const Dense<S> &matrix, int64_t row, int64_t column, int64_t rows,
                                          int64_t columns) {
  constexpr int kChunks = COLUMNS / 8;
  static_assert(ROWS * kChunks % THREADS == 0, "threads share the tile evenly");
  if constexpr (std::is_same_v<S, T>) {
    if (matrix.packs) {
#pragma unroll
      for (int first = 0; first < ROWS * kChunks; first += THREADS) {
        const int i = first + threadIdx.x;
        const int64_t r = row + i / kChunks, c = column + i % kChunks * 8, left = r < rows ? columns - c : 0;
        const int count = left < 8 ? left > 0 ? (int)left : 0 : 8;
        const S *from = count > 0 ? matrix.data + r * matrix.stride + c : matrix.data;
        copy_later(tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8, from, 2 * count);
      }
      return;
    }
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
    const int64_t r = row + i / kChunks, c = column + i % kChunks * 8, left = r < rows ? columns - c : 0;
    const S *from = matrix.data + r * matrix.stride + c;
    Pack<T, 8> pack;
    if (!std::is_same_v<S, T> && matrix.packs && left >= 8) {
      const Pack<S, 8> narrow = load<S, 8>(from);
#pragma unroll
      for (int j = 0; j < 8; j++) pack.v[j] = widen(narrow.v[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) pack.v[j] = j < left ? widen(from[j]) : from_float<T>(0.0f);
    }
    store<T, 8>(tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8, pack);
  }
}

template <typename C, bool NT>
struct Shared {
  static constexpr int a_stride = C::k + 8, b_stride = NT ? C::k + 8 : C::n + 8;
  static constexpr int a_size = C::m * a_stride, b_size = (NT ? C::n : C::k) * b_stride;
  static constexpr int stage_bytes = (a_size + b_size) * 2;
  static constexpr int sums_stride = C::warp_n + 4, warp_sums = C::warp_m * sums_stride;
  static constexpr int sums_bytes = C::threads / 32 * warp_sums * 4;
  static constexpr int bytes = stage_bytes * C::stages > sums_bytes ? stage_bytes * C::stages : sums_bytes;
};

// a (M, K) dense along K; b dense along K if NT, as (N, K), else along N, as (K, N).
template <typename S, typename T, typename O, typename C, bool NT>
__global__ void __launch_bounds__(C::threads)
    matmul_tiles(Dense<S> a, Dense<S> b, Epilogue epilogue, O *__restrict__ out, int64_t M, int64_t N, int64_t K,
                 int64_t tiles_m, int64_t tiles_n) {
  using Layout = Shared<C, NT>;
  extern __shared__ __align__(16) unsigned char memory[];
  T *tiles = reinterpret_cast<T *>(memory);
  const Place place = place_of(blockIdx.x, tiles_m, tiles_n, C::m, C::n);
  a.data += place.batch * a.batch;
  b.data += place.batch * b.batch;
  const int64_t steps = (K + C::k - 1) / C::k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / C::warps_n * C::warp_m, warp_column = warp % C::warps_n * C::warp_n;
  // ldmatrix reads four 8x8 matrices; lanes 8i to 8i + 7 name the rows of the i-th.
  const int matrix = lane / 8, matrix_row = lane % 8;

  const auto fetch = [&](int64_t step) {
    if (step < steps) {
      T *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
      const int64_t k = step * C::k;
      load_tile<T, S, C::m, C::k, C::threads>(a_tile, a, place.row, k, M, K);
      if constexpr (NT)
        load_tile<T, S, C::n, C::k, C::threads>(b_tile, b, place.column, k, N, K);
      else
        load_tile<T, S, C::k, C::n, C::threads>(b_tile, b, k, place.column, K, N);
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
        ldmatrix(a_part[i], a_tile + (warp_row + 16 * i + matrix % 2 * 8 + matrix_row) * Layout::a_stride + k +
                                matrix / 2 * 8);
#pragma unroll
      for (int j = 0; j < C::warp_n / 16; j++) {
        if constexpr (NT)
          ldmatrix(b_part[j], b_tile + (warp_column + 16 * j + matrix / 2 * 8 + matrix_row) * Layout::b_stride + k +
                                  matrix % 2 * 8);
        else
          ldmatrix_transposed(b_part[j], b_tile + (k + matrix % 2 * 8 + matrix_row) * Layout::b_stride + warp_column +
                                             16 * j + matrix / 2 * 8);
      }
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
  const float scale = scale_of(epilogue);
  constexpr int kChunks = C::warp_n / 8;
#pragma unroll 1
  for (int i = lane; i < C::warp_m * kChunks; i += 32) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const int64_t row = place.row + warp_row + r, column = place.column + warp_column + c;
    if (row < M && column < N)
      emit<O>(mine + r * Layout::sums_stride + c, epilogue, scale, out, place.batch, row, column, M, N);
  }
}

// --- float32 ---

struct Strided {
  const float *data;
  int64_t batch, row, column;
};

// M x N outputs a block, TM x TN a thread; any strides.
template <int M_TILE, int N_TILE, int TM, int TN>
__global__ void __launch_bounds__((M_TILE / TM) * (N_TILE / TN))
    matmul_float(Strided a, Strided b, Epilogue epilogue, float *__restrict__ out, int64_t M, int64_t N, int64_t K,
                 int64_t tiles_m, int64_t tiles_n) {
  constexpr int kThreads = (M_TILE / TM) * (N_TILE / TN), kDepth = 16;
  constexpr int kA = M_TILE * kDepth / kThreads, kB = N_TILE * kDepth / kThreads;
  static_assert(M_TILE * kDepth % kThreads == 0 && N_TILE * kDepth % kThreads == 0, "threads share the tiles evenly");
  constexpr int kAStride = M_TILE + 4, kBStride = N_TILE + 4, kSumsStride = N_TILE + 4;
  constexpr int kSlot = kDepth * (kAStride + kBStride), kSums = M_TILE * kSumsStride;
  constexpr int kMemory = 2 * kSlot > kSums ? 2 * kSlot : kSums;
  __shared__ __align__(16) float memory[kMemory];  // two slots of a's tile and b's, by depth; in the end, the sums
  const Place place = place_of(blockIdx.x, tiles_m, tiles_n, M_TILE, N_TILE);
  const float *a_data = a.data + place.batch * a.batch, *b_data = b.data + place.batch * b.batch;
  const int64_t steps = (K + kDepth - 1) / kDepth;
  const bool a_along_k = a.column == 1, b_along_k = b.row == 1 && b.column != 1;  // how neighbours read neighbours
  const int tx = threadIdx.x % (N_TILE / TN), ty = threadIdx.x / (N_TILE / TN);

  float a_next[kA], b_next[kB];
  const auto fetch = [&](int64_t step) {
#pragma unroll
    for (int i = 0; i < kA; i++) {
      const int e = threadIdx.x + i * kThreads, k = a_along_k ? e % kDepth : e / M_TILE;
      const int64_t row = place.row + (a_along_k ? e / kDepth : e % M_TILE), depth = step * kDepth + k;
      a_next[i] = row < M && depth < K ? a_data[row * a.row + depth * a.column] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kB; i++) {
      const int e = threadIdx.x + i * kThreads, k = b_along_k ? e % kDepth : e / N_TILE;
      const int64_t column = place.column + (b_along_k ? e / kDepth : e % N_TILE), depth = step * kDepth + k;
      b_next[i] = column < N && depth < K ? b_data[depth * b.row + column * b.column] : 0.0f;
    }
  };
  const auto keep = [&](int slot) {
#pragma unroll
    for (int i = 0; i < kA; i++) {
      const int e = threadIdx.x + i * kThreads;
      const int k = a_along_k ? e % kDepth : e / M_TILE, row = a_along_k ? e / kDepth : e % M_TILE;
      memory[slot * kSlot + k * kAStride + row] = a_next[i];
    }
#pragma unroll
    for (int i = 0; i < kB; i++) {
      const int e = threadIdx.x + i * kThreads;
      const int k = b_along_k ? e % kDepth : e / N_TILE, column = b_along_k ? e / kDepth : e % N_TILE;
      memory[slot * kSlot + kDepth * kAStride + k * kBStride + column] = b_next[i];
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
  const float scale = scale_of(epilogue);
#pragma unroll 1
  for (int e = threadIdx.x; e < M_TILE * (N_TILE / 8); e += kThreads) {
    const int r = e / (N_TILE / 8), c = e % (N_TILE / 8) * 8;
    const int64_t row = place.row + r, column = place.column + c;
    if (row < M && column < N)
      emit<float>(memory + r * kSumsStride + c, epilogue, scale, out, place.batch, row, column, M, N);
  }
}

// --- host ---

bool aligned(const void *p, int bytes) { return (uintptr_t)p % bytes == 0; }

struct Problem {
  int64_t batch, M, N, K;
  // Strides of a and b by batch, row, column; those of dimensions of one element are 0.
  int64_t a[3], b[3];
};

int64_t stride_of(const AkTensor *t, int from_end) {
  const int d = t->ndim - from_end;
  return d < 0 || t->sizes[d] == 1 ? 0 : t->strides[d];
}

int64_t blocks_of(const Problem &p, int m, int n) { return (p.M + m - 1) / m * ((p.N + n - 1) / n) * p.batch; }

template <typename S, typename T, typename O, typename C, bool NT>
int launch(const Problem &p, Dense<S> a, Dense<S> b, const Epilogue &epilogue, O *out, cudaStream_t stream) {
  constexpr int kBytes = Shared<C, NT>::bytes;
  const auto kernel = matmul_tiles<S, T, O, C, NT>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess) {
    cudaGetLastError();  // this device has less shared memory
    return AK_UNSUPPORTED;
  }
  const int64_t tiles_m = (p.M + C::m - 1) / C::m, tiles_n = (p.N + C::n - 1) / C::n, blocks = blocks_of(p, C::m, C::n);
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  kernel<<<(unsigned)blocks, C::threads, kBytes, stream>>>(a, b, epilogue, out, p.M, p.N, p.K, tiles_m, tiles_n);
  return (int)cudaGetLastError();
}

template <typename S, typename T, typename O>
int run(const AkTensor *a, const AkTensor *b, const Problem &p, const Epilogue &epilogue, const AkTensor *out,
        cudaStream_t stream) {
  constexpr int kBytes = 8 * (int)sizeof(S);  // of a pack in memory
  if (p.K > 1 && p.a[2] != 1) return AK_NEED_CONTIGUOUS;
  const bool along_k = p.K <= 1 || p.b[1] == 1, along_n = p.N <= 1 || p.b[2] == 1;
  if (!along_k && !along_n) return AK_NEED_CONTIGUOUS;
  const auto packs = [&](const AkTensor *t, int64_t batch, int64_t stride) {
    return aligned(t->data, kBytes) && batch % 8 == 0 && stride % 8 == 0;
  };
  const S *b_data = static_cast<const S *>(b->data);
  const Dense<S> left = {static_cast<const S *>(a->data), p.a[0], p.a[1], packs(a, p.a[0], p.a[1])};
  const Dense<S> rows = {b_data, p.b[0], p.b[1], packs(b, p.b[0], p.b[1])};
  const Dense<S> columns = {b_data, p.b[0], p.b[2], packs(b, p.b[0], p.b[2])};
  O *y = static_cast<O *>(out->data);
  const bool large = blocks_of(p, Large::m, Large::n) >= kLargeFrom;
  if (along_n && !(along_k && columns.packs))
    return large ? launch<S, T, O, Large, false>(p, left, rows, epilogue, y, stream)
                 : launch<S, T, O, Small, false>(p, left, rows, epilogue, y, stream);
  return large ? launch<S, T, O, Large, true>(p, left, columns, epilogue, y, stream)
               : launch<S, T, O, Small, true>(p, left, columns, epilogue, y, stream);
}

template <int M_TILE, int N_TILE, int TM, int TN>
int launch_float(const Problem &p, Strided a, Strided b, const Epilogue &epilogue, float *out, cudaStream_t stream) {
  const int64_t tiles_m = (p.M + M_TILE - 1) / M_TILE, tiles_n = (p.N + N_TILE - 1) / N_TILE;
  const int64_t blocks = blocks_of(p, M_TILE, N_TILE);
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  constexpr int kThreads = (M_TILE / TM) * (N_TILE / TN);
  matmul_float<M_TILE, N_TILE, TM, TN>
      <<<(unsigned)blocks, kThreads, 0, stream>>>(a, b, epilogue, out, p.M, p.N, p.K, tiles_m, tiles_n);
  return (int)cudaGetLastError();
}

int run_float(const AkTensor *a, const AkTensor *b, const Problem &p, const Epilogue &epilogue, const AkTensor *out,
              cudaStream_t stream) {
  const Strided left = {static_cast<const float *>(a->data), p.a[0], p.a[1], p.a[2]};
  const Strided right = {static_cast<const float *>(b->data), p.b[0], p.b[1], p.b[2]};
  float *y = static_cast<float *>(out->data);
  if (blocks_of(p, 128, 64) >= kLargeFrom) return launch_float<128, 64, 8, 4>(p, left, right, epilogue, y, stream);
  return launch_float<32, 32, 2, 2>(p, left, right, epilogue, y, stream);
}

}  // namespace

extern "C" int matmul(const AkTensor *a, const AkTensor *b, const AkTensor *bias, const AkTensor *residual,
                      int32_t activation, const AkTensor *scale_a, const AkTensor *scale_b, const AkTensor *out,
                      const AkContext *ctx) {
  const int rank = a->ndim;
  if (b->dtype != a->dtype || activation < 0 || activation >= kKinds) return AK_UNSUPPORTED;
  if (bias != NULL && bias->dtype != out->dtype && bias->dtype != AK_F32) return AK_UNSUPPORTED;
  if (residual != NULL && residual->dtype != out->dtype) return AK_UNSUPPORTED;
  for (const AkTensor *scale : {scale_a, scale_b})
    if (scale != NULL && scale->dtype != AK_F32) return AK_UNSUPPORTED;
  Problem p = {rank == 3 ? a->sizes[0] : 1, a->sizes[rank - 2], b->sizes[b->ndim - 1], a->sizes[rank - 1], {}, {}};
  for (int i = 0; i < 3; i++) {
    p.a[i] = stride_of(a, 3 - i);
    p.b[i] = stride_of(b, 3 - i);
  }
  Epilogue e = {};
  e.kind = activation;
  e.scale_a = scale_a == NULL ? NULL : static_cast<const float *>(scale_a->data);
  e.scale_b = scale_b == NULL ? NULL : static_cast<const float *>(scale_b->data);
  if (bias != NULL) {
    e.bias = bias->data;
    e.bias_stride = stride_of(bias, 1);
    e.bias_is_float = bias->dtype == AK_F32;
  }
  const int pack = out->dtype == AK_F32 ? 4 : 8;
  if (residual != NULL) {
    e.residual = residual->data;
    e.residual_batch = stride_of(residual, 3);
    e.residual_row = stride_of(residual, 2);
    e.residual_column = stride_of(residual, 1);
    e.residual_packs = e.residual_column == 1 && e.residual_batch % pack == 0 && e.residual_row % pack == 0 &&
                       aligned(residual->data, 16);
  }
  e.out_packs = p.N % pack == 0 && aligned(out->data, 16);
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (a->dtype) {
    case AK_F32: return run_float(a, b, p, e, out, stream);
    case AK_F16: return run<__half, __half, __half>(a, b, p, e, out, stream);
    case AK_BF16: return run<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(a, b, p, e, out, stream);
    case AK_F8E4M3: return run<__nv_fp8_storage_t, __half, __nv_bfloat16>(a, b, p, e, out, stream);
    default: return AK_UNSUPPORTED;
  }
}
