// kernel_type: matmul
//
// act(scale_a * scale_b * (a @ b) + bias) + residual, on a path that the shape and the device choose:
//
// - Few rows of a are a read of b, which goes from memory straight to the registers of the tensor cores (mma.m16n8k16).
// - On Hopper the copy engine brings tiles to shared memory (tensor maps, mbarriers) and warp groups multiply from
//   there (wgmma): in wide tiles that two blocks of a cluster share, or in thin ones whose depth its blocks split.
// - Elsewhere, and where rows are not aligned, 16-bit operands go through mma.m16n8k16 from tiles that asynchronous
//   copies bring to shared memory some stages ahead; float8 is widened to float16, which holds each of its values.
// - float32 is multiplied as float32.
//
// Sums are float32. b may be dense along N or along K (a linear layer's weight).
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

#include "autokernel.h"

constexpr int kTileM = 128;           // tune(block): 64, 128
constexpr int kTileN = 128;           // tune(block): 64, 128
constexpr int kStages = 3;            // tune(memory): 2, 3, 4
constexpr int kGroup = 8;             // tune(memory): 1, 4, 8, 16
constexpr int64_t kLargeFrom = 128;   // tune(launch): 32, 64, 128, 256
constexpr int64_t kWideFrom = 96;     // tune(launch): 32, 64, 96, 128
constexpr int64_t kThinBlocks = 128;  // tune(launch): 64, 128, 256
constexpr int64_t kDirectUpTo = 8;    // tune(algorithm): 0, 8, 16

constexpr int kTileK = 32, kSmallStages = 3, kDirectWarps = 16;
constexpr int64_t kDirectFrom = 32;     // blocks
constexpr int kThinBytes = 104 * 1024;  // of tiles under way: two blocks beside each other
constexpr int kMostSplits = 8;          // blocks of a cluster, which all devices have room for
constexpr int kNotHere = -100;          // a kernel for Hopper that this device, its driver or the build has not

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

// QUICK: exact enough for outputs of 16 bits, and a third of the instructions.
template <bool QUICK>
__device__ __forceinline__ float times_sigmoid(float x, float u) {
  if constexpr (QUICK) {
    float power;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * u));
    return __fdividef(x, 1.0f + power);
  } else {
    return x / (1.0f + expf(-u));
  }
}

template <int N, typename F>
__device__ __forceinline__ void each(float (&x)[N], F f) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = f(x[i]);
}

// 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where 1 + tanh(u) cancels.
template <bool QUICK, int N>
__device__ __forceinline__ void activate(float (&x)[N], int kind) {
  switch (kind) {
    case kGelu: each(x, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f)); }); break;
    case kGeluTanh:
    case kGeluNew:
      each(x, [](float v) { return times_sigmoid<QUICK>(v, v * (1.5957691216057308f + 0.07135481627f * v * v)); });
      break;
    case kQuickGelu: each(x, [](float v) { return times_sigmoid<QUICK>(v, 1.702f * v); }); break;
    case kSilu: each(x, [](float v) { return times_sigmoid<QUICK>(v, v); }); break;
    case kRelu: each(x, [](float v) { return v < 0.0f ? 0.0f : v; }); break;
    case kRelu2: each(x, [](float v) { return v < 0.0f ? 0.0f : v * v; }); break;
    default: break;
  }
}

struct Epilogue {
  const void *bias;  // of the output's dtype or float32, or NULL
  int64_t bias_stride;
  bool bias_is_float, bias_packs;  // eight neighbours are an aligned 16-byte pack (two of float32)
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
  if (e.bias != NULL && e.bias_packs && count == 8) {
    float added[8];
    if (e.bias_is_float)
      load8(static_cast<const float *>(e.bias) + column, added);
    else
      load8(static_cast<const O *>(e.bias) + column, added);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] += added[i];
  } else if (e.bias != NULL) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i >= count) continue;
      const int64_t at = (column + i) * e.bias_stride;
      values[i] += e.bias_is_float ? static_cast<const float *>(e.bias)[at]
                                   : to_float(static_cast<const O *>(e.bias)[at]);
    }
  }
  activate<sizeof(O) == 2>(values, e.kind);
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

// Two sums of a row become outputs.
template <typename O>
__device__ __forceinline__ void emit_pair(float (&sums)[2], const Epilogue &e, float scale, O *out, int64_t batch,
                                          int64_t row, int64_t column, int64_t M, int64_t N) {
  const O *residual = static_cast<const O *>(e.residual) + batch * e.residual_batch + row * e.residual_row;
  O *y = out + (batch * M + row) * N + column;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums[i] *= scale;
    if (e.bias == NULL || column + i >= N) continue;
    const int64_t at = (column + i) * e.bias_stride;
    sums[i] += e.bias_is_float ? static_cast<const float *>(e.bias)[at] : to_float(static_cast<const O *>(e.bias)[at]);
  }
  activate<sizeof(O) == 2>(sums, e.kind);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (e.residual != NULL && column + i < N) sums[i] += to_float(residual[(column + i) * e.residual_column]);
  if (e.out_packs) {
    store<O, 2>(y, {from_float<O>(sums[0]), from_float<O>(sums[1])});
  } else {
    y[0] = from_float<O>(sums[0]);
    if (column + 1 < N) y[1] = from_float<O>(sums[1]);
  }
}

// --- few rows of a: b from memory straight to the tensor cores ---

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const void *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Registers of two elements each from 16 bytes, as they are, or float8 as float16.
template <typename S>
struct Spread {
  static constexpr int count = 16 / (int)sizeof(S) / 2;
  uint32_t r[count];
  __device__ __forceinline__ explicit Spread(uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < count; i++) {
      if constexpr (sizeof(S) == 2) {
        r[i] = words[i];
      } else {
        const __half2_raw pair =
            __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(words[i / 2] >> (i % 2 * 16)), __NV_E4M3);
        r[i] = (uint32_t)pair.x | (uint32_t)pair.y << 16;
      }
    }
  }
};

// Columns of a block, and its warps, which take turns along K.
template <bool NT>
struct Direct {
  static constexpr int columns = NT ? 16 : 64, warps = NT ? kDirectWarps : 8, threads = 32 * warps;
  static constexpr int sums_stride = columns + 2;
};

// The long side of the products are b's columns, the short one 8 * TILES rows of a. In which order a product takes its
// part of K does not matter, as long as it is the same for both operands: so each lane loads 16 bytes of neighbours. b
// is dense along K if NT, else along N; both are aligned for packs, and K, without NT N too, is a multiple of one.
template <typename S, typename T, typename O, int TILES, bool NT>
__global__ void __launch_bounds__(Direct<NT>::threads, (NT && TILES == 1 ? 1024 : 512) / Direct<NT>::threads)
    matmul_direct(Dense<S> a, Dense<S> b, Epilogue epilogue, O *__restrict__ out, int64_t M, int64_t N, int K,
                  int64_t tiles_n) {
  using C = Direct<NT>;
  constexpr int kParts = NT ? 1 : 4;  // products side by side along the columns
  __shared__ __align__(8) float partial[C::warps * TILES * 8 * C::sums_stride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t batch = blockIdx.x / tiles_n, column = blockIdx.x % tiles_n * C::columns;
  a.data += batch * a.batch;
  b.data += batch * b.batch;
  // Rows and columns past the edge read others again, and are not stored.
  const S *tokens[TILES];
#pragma unroll
  for (int j = 0; j < TILES; j++) tokens[j] = a.data + (8 * j + g < M ? 8 * j + g : 0) * a.stride;
  float sums[kParts][TILES][4] = {};
  if constexpr (NT) {
    constexpr int kPack = 16 / (int)sizeof(S), kChunk = 8 * kPack, kAhead = TILES == 2 || sizeof(S) == 1 ? 1 : 2;
    const int64_t last = N - 1, n = column + g;
    const S *low = b.data + (n < last ? n : last) * b.stride, *high = b.data + (n + 8 < last ? n + 8 : last) * b.stride;
#pragma unroll 1
    for (int first = warp * kChunk; first < K; first += C::warps * kChunk * kAhead) {
      uint4 w[kAhead][2][2];
#pragma unroll
      for (int s = 0; s < kAhead; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int k = first + s * C::warps * kChunk + (4 * half + t) * kPack;
          w[s][half][0] = k < K ? load_once(low + k) : make_uint4(0, 0, 0, 0);
          w[s][half][1] = k < K ? load_once(high + k) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
      for (int s = 0; s < kAhead; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int k = first + s * C::warps * kChunk + (4 * half + t) * kPack;
          const Spread<S> x0(w[s][half][0]), x1(w[s][half][1]);
#pragma unroll
          for (int j = 0; j < TILES; j++) {
            const Spread<S> y(k < K ? *reinterpret_cast<const uint4 *>(tokens[j] + k) : make_uint4(0, 0, 0, 0));
#pragma unroll
            for (int i = 0; i < Spread<S>::count; i += 2) {
              const uint32_t x[4] = {x0.r[i], x1.r[i], x0.r[i + 1], x1.r[i + 1]};
              multiply(sums[0][j], x, y.r[i], y.r[i + 1], T());
            }
          }
        }
    }
  } else {
    constexpr int kAhead = 2;
    const int64_t n = column + 8 * g < N ? column + 8 * g : 0;
#pragma unroll 1
    for (int first = warp * 16; first < K; first += C::warps * 16 * kAhead) {
      uint4 w[kAhead][4];
#pragma unroll
      for (int s = 0; s < kAhead; s++) {
        const int k = first + s * C::warps * 16 + 4 * t;
#pragma unroll
        for (int i = 0; i < 4; i++)
          w[s][i] = k < K ? load_once(b.data + (k + i) * b.stride + n) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int s = 0; s < kAhead; s++) {
        const int k = first + s * C::warps * 16 + 4 * t;
        uint2 y[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++)
          y[j] = k < K ? *reinterpret_cast<const uint2 *>(tokens[j] + k) : make_uint2(0, 0);
        const Spread<S> rows[4] = {Spread<S>(w[s][0]), Spread<S>(w[s][1]), Spread<S>(w[s][2]), Spread<S>(w[s][3])};
#pragma unroll
        for (int i = 0; i < kParts; i++) {
          // Columns 8g + 2i and 8g + 2i + 1, pairs along K.
          const uint32_t x[4] = {__byte_perm(rows[0].r[i], rows[1].r[i], 0x5410),
                                 __byte_perm(rows[0].r[i], rows[1].r[i], 0x7632),
                                 __byte_perm(rows[2].r[i], rows[3].r[i], 0x5410),
                                 __byte_perm(rows[2].r[i], rows[3].r[i], 0x7632)};
#pragma unroll
          for (int j = 0; j < TILES; j++) multiply(sums[i][j], x, y[j].x, y[j].y, T());
        }
      }
    }
  }

  float *mine = partial + warp * TILES * 8 * C::sums_stride;
#pragma unroll
  for (int i = 0; i < kParts; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int at = NT ? g + e / 2 * 8 : 8 * g + 2 * i + e / 2;
        mine[(8 * j + 2 * t + e % 2) * C::sums_stride + at] = sums[i][j][e];
      }
  __syncthreads();
  const float scale = scale_of(epilogue);
#pragma unroll 1
  for (int i = threadIdx.x; i < (int)M * (C::columns / 2); i += C::threads) {
    const int token = i / (C::columns / 2), at = i % (C::columns / 2) * 2;
    if (column + at >= N) continue;
    float total[2] = {};
#pragma unroll 4
    for (int w = 0; w < C::warps; w++) {
      const Pack<float, 2> v = load<float, 2>(partial + (w * TILES * 8 + token) * C::sums_stride + at);
      total[0] += v.v[0], total[1] += v.v[1];
    }
    emit_pair<O>(total, epilogue, scale, out, batch, token, column + at, M, N);
  }
}

// --- Hopper: the copy engine fills a ring of tiles, warp groups multiply out of it ---

constexpr int kRowBytes = 128;  // of a tile's row in shared memory, which the copy engine swizzles
// Elements of a row along K.
template <typename S>
constexpr int kDepth = kRowBytes / (int)sizeof(S);

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// A ring of stages of BYTES each; `full` counts the bytes that arrive, `empty` the warp groups that have read them.
template <int STAGES>
struct Ring {
  uint64_t full[STAGES], empty[STAGES];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(barrier)) : "memory");
}

// At the barrier in the same place of a block of this cluster. (Not `.release.cluster`: nothing was written, and that
// would wait for all of the thread's memory accesses.)
__device__ __forceinline__ void barrier_arrive(uint64_t *barrier, uint32_t block) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}"
      :
      : "r"(shared_address(barrier)), "r"(block)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
}

// One box of a tensor of three dimensions, the innermost first.
__device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same to the same place of every block in `blocks`, each with its own barrier.
__device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z,
                                         uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6}], [%2], %3;"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All blocks of the cluster get here before one goes on; what they have written is seen after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// The same where nothing was written for others.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" : : : "memory");
}

// Two floats of another block of the cluster, from where they lie in this one.
__device__ __forceinline__ float2 load_from(const float *p, uint32_t block) {
  float2 v;
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.f32 {%0, %1}, [there];}"
               : "=f"(v.x), "=f"(v.y)
               : "r"(shared_address(p)), "r"(block)
               : "memory");
  return v;
}

__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void group_end() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int N>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// What tells wgmma of a tile with rows of 128 swizzled bytes: eight rows lie together; `next_block` bytes on are the
// next 64 elements along M or N where those are along the rows, which one along K has no use for.
__device__ __forceinline__ uint64_t tile_descriptor(const void *p, uint32_t next_block) {
  return (uint64_t)((shared_address(p) & 0x3FFFF) >> 4) | (uint64_t)(next_block >> 4) << 16 |
         (uint64_t)(8 * kRowBytes >> 4) << 32 | (uint64_t)1 << 62;
}

#define AK_WGMMA_8(TYPES, LAYOUTS)                                                                                     \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %6, 0; wgmma.mma_async.sync.aligned.m64n8" TYPES                              \
      " {%0, %1, %2, %3},"                                                                                             \
      " %4, %5, add, 1, 1" LAYOUTS ";}"                                                                                \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                 \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_16(TYPES, LAYOUTS)                                                                                    \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %10, 0; wgmma.mma_async.sync.aligned.m64n16" TYPES                            \
      " {%0, %1, %2, %3, %4, %5, %6, %7},"                                                                             \
      " %8, %9, add, 1, 1" LAYOUTS ";}"                                                                                \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])                 \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_32(TYPES, LAYOUTS)                                                                                    \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %18, 0; wgmma.mma_async.sync.aligned.m64n32" TYPES                            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"                                       \
      " %16, %17, add, 1, 1" LAYOUTS ";}"                                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                       \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_64(TYPES, LAYOUTS)                                                                                    \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64" TYPES                            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31},"                                                                 \
      " %32, %33, add, 1, 1" LAYOUTS ";}"                                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                      \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_128(TYPES, LAYOUTS)                                                                                   \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128" TYPES                           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43,"      \
      " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"          \
      " %64, %65, add, 1, 1" LAYOUTS ";}"                                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                      \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_256(TYPES, LAYOUTS)                                                                                   \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %130, 0; wgmma.mma_async.sync.aligned.m64n256" TYPES                          \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43,"      \
      " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64,"      \
      " %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85,"      \
      " %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105,"     \
      " %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123,"   \
      " %124, %125, %126, %127},"                                                                                      \
      " %128, %129, add, 1, 1" LAYOUTS ";}"                                                                            \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),        \
        "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),        \
        "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),        \
        "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),        \
        "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),        \
        "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),   \
        "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),              \
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),              \
        "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),              \
        "+f"(d[126]), "+f"(d[127])                                                                                     \
      : "l"(a), "l"(b), "r"(add))

// d += a @ b for 64 rows, N = 2 * SUMS columns and a depth of 32 bytes, or d = a @ b without `add`. Both operands lie
// in shared memory, with rows along K or, one of 16 bits, along M or N.
template <typename S, bool A_BY_K, bool B_BY_K, int SUMS>
__device__ __forceinline__ void multiply_group(float (&d)[SUMS], uint64_t a, uint64_t b, uint32_t add) {
#define AK_WGMMA_OF_16_BITS(N, TYPES)          \
  if constexpr (A_BY_K && B_BY_K)              \
    AK_WGMMA_##N("k16.f32" TYPES, ", 0, 0");   \
  else if constexpr (A_BY_K)                   \
    AK_WGMMA_##N("k16.f32" TYPES, ", 0, 1");   \
  else                                         \
    AK_WGMMA_##N("k16.f32" TYPES, ", 1, 0");
#define AK_WGMMA(N)                                \
  if constexpr (SUMS == N / 2) {                   \
    if constexpr (std::is_same_v<S, __half>) {     \
      AK_WGMMA_OF_16_BITS(N, ".f16.f16")           \
    } else if constexpr (sizeof(S) == 2) {         \
      AK_WGMMA_OF_16_BITS(N, ".bf16.bf16")         \
    } else {                                       \
      AK_WGMMA_##N("k32.f32.e4m3.e4m3", "");       \
    }                                              \
  }
  static_assert(A_BY_K || B_BY_K, "no kernel has both operands the other way round");
  AK_WGMMA(8)
  AK_WGMMA(16)
  AK_WGMMA(32)
  AK_WGMMA(64)
  AK_WGMMA(128)
  AK_WGMMA(256)
#undef AK_WGMMA
#undef AK_WGMMA_OF_16_BITS
}

// The products of rows of 128 bytes along K.
template <typename S, bool A_BY_K, bool B_BY_K, int SUMS>
__device__ __forceinline__ void multiply_rows(float (&d)[SUMS], const void *a, const void *b, bool add) {
  // The next 64 elements along M or N follow after 64 rows.
  const uint64_t a_tile = tile_descriptor(a, 64 * kRowBytes), b_tile = tile_descriptor(b, 64 * kRowBytes);
  // One product on: 32 bytes of a row, or 16 rows.
  constexpr uint64_t a_step = (A_BY_K ? 32 : 16 * kRowBytes) >> 4, b_step = (B_BY_K ? 32 : 16 * kRowBytes) >> 4;
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++)
    multiply_group<S, A_BY_K, B_BY_K>(d, a_tile + k * a_step, b_tile + k * b_step, add || k > 0);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Marks kernels without sm_90a's instructions: they are never launched, and have this much static shared memory.
__device__ __forceinline__ void not_for_this_architecture() {
  __shared__ uint32_t mark[1];
  *static_cast<volatile uint32_t *>(mark) = 0;
}

// A warp's 16 rows of sums as wgmma leaves them, COLUMNS wide, become outputs. They pass through `mine` (16 rows of
// kWarpStride floats), so that memory is read and written by whole rows. Where nothing is added, 64 columns at a time,
// already rounded; else 32 in float32.
constexpr int kWarpStride = 40;

template <typename T, int COLUMNS>
__device__ __forceinline__ void emit_warp(const float (&sums)[COLUMNS / 2], float *mine, const Epilogue &e, float scale,
                                          T *out, int64_t batch, int64_t row, int64_t column, int64_t M, int64_t N,
                                          int lane) {
  if (e.kind != kNone || e.bias != NULL || e.residual != NULL || !e.out_packs) {
#pragma unroll 1
    for (int first = 0; first < COLUMNS && column + first < N; first += 32) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c += 32)
        if (c == first) {
#pragma unroll
          for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int at = c / 2 + 4 * j + 2 * half;
              store<float, 2>(mine + (lane / 4 + 8 * half) * kWarpStride + 8 * j + lane % 4 * 2,
                              {sums[at], sums[at + 1]});
            }
        }
      __syncwarp();
#pragma unroll
      for (int i = lane; i < 16 * 4; i += 32) {
        const int64_t r = row + i / 4, c = column + first + i % 4 * 8;
        if (r < M && c < N) emit<T>(mine + i / 4 * kWarpStride + i % 4 * 8, e, scale, out, batch, r, c, M, N);
      }
      __syncwarp();
    }
    return;
  }
  constexpr int kStride = 64 + 8;
  T *rounded = reinterpret_cast<T *>(mine), *y = out + (batch * M + row) * N + column;
#pragma unroll
  for (int first = 0; first < COLUMNS; first += 64) {
    if (column + first >= N) continue;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = first / 2 + 4 * j + 2 * half;
        store<T, 2>(rounded + (lane / 4 + 8 * half) * kStride + 8 * j + lane % 4 * 2,
                    {from_float<T>(sums[at] * scale), from_float<T>(sums[at + 1] * scale)});
      }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * 8; i += 32) {
      const int r = i / 8, c = first + i % 8 * 8;
      if (row + r < M && column + c < N) store<T, 8>(y + r * N + c, load<T, 8>(rounded + r * kStride + i % 8 * 8));
    }
    __syncwarp();
  }
}

// Dimensions of the work of a kernel for Hopper.
struct Extent {
  int64_t M, N, K, tiles_m, tiles_n, tiles;
  int steps;                    // of a stage along K
  bool a_batched, b_batched;    // or the same for all of the batch
};

// Two blocks of a cluster hold tiles below each other and share b's columns: each copies half of them for both. A block
// has two warp groups with 64 rows each, and a third that tells the copy engine what to fetch. It walks over many
// tiles; the fetches of the next run while this one's sums are written.
template <int COLUMNS>
struct Wide {
  static constexpr int m = 128, n = COLUMNS, cluster = 2, threads = 384;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = n == 256 ? 4 : 6;
  static constexpr int out_bytes = 8 * 16 * kWarpStride * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + out_bytes + (int)sizeof(Ring<stages>);
};

template <typename S, typename O, int COLUMNS, bool NT>
__global__ void __launch_bounds__(384, 1)
    matmul_wide(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const Epilogue epilogue, O *__restrict__ out, const Extent extent) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Wide<COLUMNS>;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  float *staged = reinterpret_cast<float *>(tiles + C::stages * C::stage_bytes);
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes + C::out_bytes);
  const int group = threadIdx.x / 128;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; s++) {
      barrier_init(&ring->full[s], 1);
      barrier_init(&ring->empty[s], 2 * C::cluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();
  cluster_meet();

  int stage = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++stage == C::stages) stage = 0, phase ^= 1;
  };
  const int64_t clusters = gridDim.x / C::cluster, pairs_m = (extent.tiles_m + 1) / 2;
  if (group == 2) {
    fewer_registers<40>();
    if (threadIdx.x == 256) {
      for (int64_t tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
        const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, C::n);
        const int row = (int)place.row + (int)rank * C::m, column = (int)place.column;
        const int a_batch = extent.a_batched ? (int)place.batch : 0, b_batch = extent.b_batched ? (int)place.batch : 0;
        for (int step = 0; step < extent.steps; step++) {
          unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
          const int k = step * kDepth<S>;
          barrier_wait(&ring->empty[stage], phase ^ 1);
          barrier_expect(&ring->full[stage], C::stage_bytes);
          copy_box(a, &a_map, &ring->full[stage], k, row, a_batch);
          if constexpr (NT) {
            copy_box(b + rank * (C::b_bytes / 2), &b_map, &ring->full[stage], k, column + (int)rank * (C::n / 2),
                     b_batch, 3);
          } else {
#pragma unroll
            for (int i = 0; i < C::n / 128; i++) {
              const int part = (int)rank * (C::n / 128) + i;
              copy_box(b + part * 64 * kRowBytes, &b_map, &ring->full[stage], column + part * 64, k, b_batch, 3);
            }
          }
          next();
        }
      }
    }
  } else {
    more_registers<232>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *mine = staged + warp * 16 * kWarpStride;
    const float scale = scale_of(epilogue);
    for (int64_t tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
      const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, C::n);
      float sums[C::n / 2];
      if constexpr (sizeof(S) == 1) {
        // The tensor cores keep float8 sums in about 14 bits: they leave them after each step.
#pragma unroll
        for (int i = 0; i < C::n / 2; i++) sums[i] = 0.0f;
        for (int step = 0; step < extent.steps; step++) {
          const unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
          float some[C::n / 2];
          barrier_wait(&ring->full[stage], phase);
          group_begin();
          multiply_rows<S, true, NT>(some, a + group * 64 * kRowBytes, b, false);
          group_end();
          group_wait<0>();
          if (threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[stage], threadIdx.x % 128);
          next();
#pragma unroll
          for (int i = 0; i < C::n / 2; i++) sums[i] += some[i];
        }
      } else {
        int last = 0;
        for (int step = 0; step < extent.steps; step++) {
          const unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
          barrier_wait(&ring->full[stage], phase);
          group_begin();
          multiply_rows<S, true, NT>(sums, a + group * 64 * kRowBytes, b, step > 0);
          group_end();
          group_wait<1>();  // the products of the step before are done: its tiles may be overwritten
          if (step > 0 && threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
          last = stage;
          next();
        }
        group_wait<0>();
        if (threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
      }
      emit_warp<O, C::n>(sums, mine, epilogue, scale, out, place.batch,
                         place.row + (int64_t)rank * C::m + 16 * warp, place.column, extent.M, extent.N, lane);
    }
  }
  cluster_meet();  // nobody leaves while another may still arrive at its barriers
#else
  not_for_this_architecture();
#endif
}

// A few rows of a times a weight that is read once: the weight's ROWS columns (rows of its transpose) are on the
// products' long side, TOKENS rows of a on the short one. The blocks of a cluster share the columns and split K; in the
// end each adds up its part of all their sums, in one order.
template <int TOKENS>
struct Thin {
  static constexpr int tokens = TOKENS, groups = TOKENS <= 32 ? 1 : 2, rows = 64 * groups;
  static constexpr int threads = 128 * groups + 32, parts = TOKENS <= 64 ? 2 : 1;  // of 64 along K in a stage
  static constexpr int w_bytes = rows * kRowBytes, a_bytes = TOKENS * kRowBytes, part_bytes = w_bytes + a_bytes;
  static constexpr int stage_bytes = parts * part_bytes;
  static constexpr int budget = groups == 1 ? kThinBytes : 200 * 1024;
  static constexpr int stages = budget / stage_bytes;
  static constexpr int sums_stride = rows + 4, sums_bytes = TOKENS * sums_stride * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + (int)sizeof(Ring<stages>);
  static_assert(sums_bytes <= stages * stage_bytes, "the sums take the place of the tiles");
};

template <typename S, typename O, int TOKENS, bool NT>
__global__ void __launch_bounds__(Thin<TOKENS>::threads)
    matmul_thin(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const Epilogue epilogue, O *__restrict__ out, const Extent extent, const int splits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Thin<TOKENS>;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes);
  const uint32_t rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; s++) {
      barrier_init(&ring->full[s], 1);
      barrier_init(&ring->empty[s], C::groups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();

  const int64_t tile = blockIdx.x / splits, within = tile % (extent.tiles_m * extent.tiles_n);
  const int64_t batch = tile / (extent.tiles_m * extent.tiles_n);
  // Blocks with the same columns follow each other: the weight is read from memory once.
  const int64_t row = within % extent.tiles_m * TOKENS, column = within / extent.tiles_m * C::rows;
  const int each = (extent.steps + splits - 1) / splits, begin = (int)rank * each;
  const int end = begin + each < extent.steps ? begin + each : extent.steps;
  int stage = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++stage == C::stages) stage = 0, phase ^= 1;
  };
  float sums[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;
  if (group == C::groups) {
    if (lane == 0) {
      const int a_batch = extent.a_batched ? (int)batch : 0, b_batch = extent.b_batched ? (int)batch : 0;
      for (int step = begin; step < end; step++) {
        barrier_wait(&ring->empty[stage], phase ^ 1);
        barrier_expect(&ring->full[stage], C::stage_bytes);
#pragma unroll
        for (int part = 0; part < C::parts; part++) {
          unsigned char *w = tiles + stage * C::stage_bytes + part * C::part_bytes, *a = w + C::w_bytes;
          const int k = (step * C::parts + part) * kDepth<S>;
          if constexpr (NT) {
            copy_box(w, &b_map, &ring->full[stage], k, (int)column, b_batch);
          } else {
#pragma unroll
            for (int i = 0; i < C::groups; i++)
              copy_box(w + i * 64 * kRowBytes, &b_map, &ring->full[stage], (int)column + 64 * i, k, b_batch);
          }
          copy_box(a, &a_map, &ring->full[stage], k, (int)row, a_batch);
        }
        next();
      }
    }
    __syncwarp();
  } else {
    int last = 0;
    for (int step = begin; step < end; step++) {
      barrier_wait(&ring->full[stage], phase);
      if constexpr (sizeof(S) == 1) {
#pragma unroll
        for (int part = 0; part < C::parts; part++) {
          const unsigned char *w = tiles + stage * C::stage_bytes + part * C::part_bytes;
          float some[TOKENS / 2];
          group_begin();
          multiply_rows<S, NT, true>(some, w + group * 64 * kRowBytes, w + C::w_bytes, false);
          group_end();
          group_wait<0>();
#pragma unroll
          for (int i = 0; i < TOKENS / 2; i++) sums[i] += some[i];
        }
      } else {
        group_begin();
#pragma unroll
        for (int part = 0; part < C::parts; part++) {
          const unsigned char *w = tiles + stage * C::stage_bytes + part * C::part_bytes;
          multiply_rows<S, NT, true>(sums, w + group * 64 * kRowBytes, w + C::w_bytes, true);
        }
        group_end();
        group_wait<1>();
      }
      if (step > begin && threadIdx.x % 128 == 0) barrier_arrive(&ring->empty[last]);
      last = stage;
      next();
    }
    group_wait<0>();
  }
  __syncthreads();  // nobody reads tiles, and none is on its way
  float *partial = reinterpret_cast<float *>(tiles);
  if (group < C::groups) {
    // One row of sums a token: outputs that lie side by side in memory do so here.
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 8 * j + lane % 4 * 2 + i % 2, at = 16 * warp + lane / 4 + i / 2 * 8;
        partial[token * C::sums_stride + at] = sums[4 * j + i];
      }
  }
  if (splits > 1)
    cluster_sync();
  else
    __syncthreads();
  // Pairs of outputs, a share of them in each block.
  const float scale = scale_of(epilogue);
  const int tokens = extent.M - row < TOKENS ? (int)(extent.M - row) : TOKENS, pairs = tokens * (C::rows / 2);
  const int share = (pairs + splits - 1) / splits, mine_end = share * ((int)rank + 1);
#pragma unroll 1
  for (int i = share * (int)rank + threadIdx.x; i < mine_end && i < pairs; i += C::threads) {
    const int token = i / (C::rows / 2), at = i % (C::rows / 2) * 2;
    if (column + at >= extent.N) continue;
    const float *from = partial + token * C::sums_stride + at;
    float total[2] = {};
#pragma unroll
    for (int block = 0; block < kMostSplits; block++) {
      if (block >= splits) break;
      const float2 v = load_from(from, block);
      total[0] += v.x, total[1] += v.y;
    }
    emit_pair<O>(total, epilogue, scale, out, batch, row + token, column + at, extent.M, extent.N);
  }
  if (splits > 1) cluster_sync();  // nobody leaves while another may still read its sums
#else
  not_for_this_architecture();
#endif
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

template <typename S, typename T, typename O, int TILES, bool NT>
int launch_direct(const Problem &p, Dense<S> a, Dense<S> b, const Epilogue &epilogue, O *out, cudaStream_t stream) {
  using C = Direct<NT>;
  const int64_t tiles_n = (p.N + C::columns - 1) / C::columns, blocks = tiles_n * p.batch;
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  matmul_direct<S, T, O, TILES, NT>
      <<<(unsigned)blocks, C::threads, 0, stream>>>(a, b, epilogue, out, p.M, p.N, (int)p.K, tiles_n);
  return (int)cudaGetLastError();
}

// --- host, Hopper ---

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function that writes tensor maps, or NULL.
Encode encoder() {
  static std::atomic<void *> kept{NULL};
  void *found = kept.load(std::memory_order_relaxed);
  if (found == NULL) {
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t code = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (code != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      return NULL;
    }
    kept.store(found, std::memory_order_relaxed);
  }
  return reinterpret_cast<Encode>(found);
}

// A matrix's map: boxes of 128 bytes, swizzled, of so many rows. The matrix is dense along its rows, which are aligned
// to 16 bytes.
template <typename S>
bool map_of(CUtensorMap *map, const Dense<S> &matrix, int64_t columns, int64_t rows, int64_t batch, int box_rows) {
  const Encode encode = encoder();
  if (encode == NULL) return false;
  const int64_t stride = rows == 1 ? (columns + 15) / 16 * 16 : matrix.stride;
  const int64_t apart = batch == 1 ? rows * stride : matrix.batch;
  const cuuint64_t sizes[3] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)batch};
  const cuuint64_t strides[2] = {(cuuint64_t)stride * sizeof(S), (cuuint64_t)apart * sizeof(S)};
  const cuuint32_t box[3] = {kDepth<S>, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
  const CUtensorMapDataType type = sizeof(S) == 1              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : std::is_same_v<S, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 3, const_cast<S *>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether this device has a kernel's instructions and its shared memory; asked once a device.
template <auto KERNEL>
bool runs_here(int bytes, int device) {
  constexpr int kDevices = 64;
  static std::atomic<signed char> kept[kDevices];
  if (device < 0 || device >= kDevices) return false;
  signed char known = kept[device].load(std::memory_order_relaxed);
  if (known == 0) {
    cudaFuncAttributes attributes;
    known = cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess && attributes.sharedSizeBytes == 0 &&
                    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess
                ? 1
                : -1;
    if (known < 0) cudaGetLastError();
    kept[device].store(known, std::memory_order_relaxed);
  }
  return known > 0;
}

template <typename... Parameters, typename... Arguments>
int launch_clusters(void (*kernel)(Parameters...), int64_t blocks, int threads, int bytes, int cluster,
                    cudaStream_t stream, const Arguments &...arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, arguments...);
  return code != cudaSuccess ? (int)code : (int)cudaGetLastError();
}

// What a kernel for Hopper multiplies: b by its rows (NN) or by its columns (NT).
template <typename S, typename O>
struct Hopper {
  const Problem &p;
  Dense<S> a, b;
  const Epilogue &epilogue;
  O *out;
  cudaStream_t stream;
  int device, processors;
};

Extent extent_of(const Problem &p, int m, int n, int k) {
  const int64_t tiles_m = (p.M + m - 1) / m, tiles_n = (p.N + n - 1) / n;
  return {p.M, p.N, p.K, tiles_m, tiles_n, tiles_m * tiles_n * p.batch, (int)((p.K + k - 1) / k),
          p.a[0] != 0, p.b[0] != 0};
}

template <typename S, typename O, bool NT>
bool maps_of(const Hopper<S, O> &h, CUtensorMap *a_map, CUtensorMap *b_map, int a_rows, int b_columns) {
  const Problem &p = h.p;
  if (!map_of(a_map, h.a, p.K, p.M, p.a[0] != 0 ? p.batch : 1, a_rows)) return false;
  const int64_t batch = p.b[0] != 0 ? p.batch : 1;
  return NT ? map_of(b_map, h.b, p.K, p.N, batch, b_columns) : map_of(b_map, h.b, p.N, p.K, batch, kDepth<S>);
}

template <int COLUMNS, bool NT, typename S, typename O>
int launch_wide(const Hopper<S, O> &h) {
  using C = Wide<COLUMNS>;
  CUtensorMap a_map, b_map;
  if (!runs_here<matmul_wide<S, O, COLUMNS, NT>>(C::bytes, h.device) ||
      !maps_of<S, O, NT>(h, &a_map, &b_map, C::m, C::n / 2))
    return kNotHere;
  Extent extent = extent_of(h.p, C::m, C::n, kDepth<S>);
  extent.tiles = (extent.tiles_m + 1) / 2 * extent.tiles_n * h.p.batch;  // a cluster's
  const int64_t room = h.processors / C::cluster, clusters = extent.tiles < room ? extent.tiles : room;
  return launch_clusters(matmul_wide<S, O, COLUMNS, NT>, clusters * C::cluster, C::threads, C::bytes, C::cluster,
                         h.stream, a_map, b_map, h.epilogue, h.out, extent);
}

template <int TOKENS, bool NT, typename S, typename O>
int launch_thin(const Hopper<S, O> &h) {
  using C = Thin<TOKENS>;
  CUtensorMap a_map, b_map;
  if (!runs_here<matmul_thin<S, O, TOKENS, NT>>(C::bytes, h.device) ||
      !maps_of<S, O, NT>(h, &a_map, &b_map, C::tokens, C::rows))
    return kNotHere;
  const Extent extent = extent_of(h.p, C::tokens, C::rows, C::parts * kDepth<S>);
  // Adding up 64 rows' sums costs more than half of the device's blocks bring.
  const int64_t wanted = TOKENS == 64 ? kThinBlocks / 2 : kThinBlocks;
  int splits = 1;
  while (splits < kMostSplits && extent.tiles * splits < wanted && extent.steps >= splits * 2) splits *= 2;
  if (extent.tiles * splits > 0x7fffffff) return AK_UNSUPPORTED;
  return launch_clusters(matmul_thin<S, O, TOKENS, NT>, extent.tiles * splits, C::threads, C::bytes, splits, h.stream,
                         a_map, b_map, h.epilogue, h.out, extent, splits);
}

template <bool NT, typename S, typename O>
int launch_hopper(const Hopper<S, O> &h) {
  const Problem &p = h.p;
  if constexpr (sizeof(S) == 2) {
    if (p.M > 128 && blocks_of(p, 128, 256) >= kWideFrom) return launch_wide<256, NT>(h);
  }
  if (p.M > 128 && blocks_of(p, 128, 128) >= kWideFrom) return launch_wide<128, NT>(h);
  if (p.M <= 16) return launch_thin<16, NT>(h);
  if (p.M <= 32) return launch_thin<32, NT>(h);
  if (p.M <= 64) return launch_thin<64, NT>(h);
  return launch_thin<128, NT>(h);
}

template <typename S, typename T, typename O>
int run(const AkTensor *a, const AkTensor *b, const Problem &p, const Epilogue &epilogue, const AkTensor *out,
        const AkContext *ctx) {
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
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
  const bool by_rows = along_n && !(along_k && columns.packs);
  const Dense<S> &right = by_rows ? rows : columns;
  // What has no tensor map: rows that are not aligned to 16 bytes or overlap (an expanded tensor).
  const auto maps = [](const Dense<S> &m, int64_t rows) {
    constexpr int pack = 16 / (int)sizeof(S);
    return aligned(m.data, 16) && m.stride % pack == 0 && m.batch % pack == 0 && (rows == 1 || m.stride > 0);
  };
  constexpr int kPack = 16 / (int)sizeof(S);
  constexpr int64_t kUpTo = sizeof(S) == 2 ? kDirectUpTo : 2 * kDirectUpTo;
  if (p.M <= kUpTo && p.M <= 16 && maps(left, 1) && maps(right, 1) && p.K % kPack == 0 && p.K < INT32_MAX / 2) {
    if constexpr (sizeof(S) == 2) {
      if (by_rows && p.N % 8 == 0 && blocks_of(p, 16, Direct<false>::columns) >= kDirectFrom)
        return launch_direct<S, T, O, 2, false>(p, left, rows, epilogue, y, stream);
      if (!by_rows && p.M <= 8 && blocks_of(p, 16, Direct<true>::columns) >= kDirectFrom)
        return launch_direct<S, T, O, 1, true>(p, left, columns, epilogue, y, stream);
    }
    if (!by_rows && blocks_of(p, 16, Direct<true>::columns) >= kDirectFrom)
      return launch_direct<S, T, O, 2, true>(p, left, columns, epilogue, y, stream);
  }
  int major = 0, processors = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ctx->device);
  if (major == 9 && maps(left, p.M) && maps(right, by_rows ? p.K : p.N) && p.K > 0 && p.M < INT32_MAX &&
      p.N < INT32_MAX && p.K < INT32_MAX && p.batch < INT32_MAX) {
    const Hopper<S, O> h = {p, left, right, epilogue, y, stream, ctx->device, processors};
    int code = kNotHere;
    if (!by_rows)
      code = launch_hopper<true>(h);
    else if constexpr (sizeof(S) == 2)  // wgmma takes float8 along K only
      code = launch_hopper<false>(h);
    if (code != kNotHere) return code;
  }
  const bool large = blocks_of(p, Large::m, Large::n) >= kLargeFrom;
  if (by_rows)
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
    e.bias_packs = e.bias_stride == 1 && aligned(bias->data, 16);
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
    case AK_F16: return run<__half, __half, __half>(a, b, p, e, out, ctx);
    case AK_BF16: return run<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(a, b, p, e, out, ctx);
    case AK_F8E4M3: return run<__nv_fp8_storage_t, __half, __nv_bfloat16>(a, b, p, e, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
