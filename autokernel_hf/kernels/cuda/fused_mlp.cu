// kernel_type: fused_mlp
//
// y = (act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)) @ w_down.T + b_down, as two or three products that do
// everything else on their way out: the gate's goes to the workspace, the second one turns it into the hidden values
// where it lies, the last one reads them. 16-bit operands go through the tensor cores (mma.m16n8k16, fp32 sums) from
// tiles that asynchronous copies bring to shared memory some stages ahead; float32 is multiplied as float32.
//
// On Hopper the copy engine brings tiles of 16-bit operands to shared memory (tensor maps, mbarriers) and warp groups
// multiply from there (wgmma), the gate and the other product side by side: two launches, of which the second sets
// itself up and reads its weights while the first one ends.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
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
constexpr int kThinBytes = 204800;    // tune(memory): 106496, 204800

constexpr int kTileK = 32, kSmallStages = 3;
constexpr int kMostSplits = 8;  // blocks of a cluster, which all devices have room for
constexpr int kNotHere = -100;  // a kernel for Hopper that this device, its driver or the build has not

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

template <int N, typename F>
__device__ __forceinline__ void each(float (&x)[N], F f) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = f(x[i]);
}

// 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where 1 + tanh(u) cancels.
template <int N>
__device__ __forceinline__ void activate(float (&x)[N], int kind) {
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

// --- Hopper: the copy engine fills a ring of tiles, warp groups multiply out of it ---

constexpr int kRowBytes = 128;  // of a tile's row in shared memory, which the copy engine swizzles
constexpr int kDepth = 64;      // elements of it along K

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

// One box of a matrix from (row, column) on.
__device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint64_t *barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// The same to the same place of every block in `blocks`, each with its own barrier.
__device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                         uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5}], [%2], %3;"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(column), "r"(row)
      : "memory");
}

// Until the kernel before this one on the stream has ended; it may start before, to set itself up.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" : : : "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

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

// What tells wgmma of a tile with rows of 128 swizzled bytes along K: eight rows lie together.
__device__ __forceinline__ uint64_t tile_descriptor(const void *p) {
  return (uint64_t)((shared_address(p) & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(8 * kRowBytes >> 4) << 32 |
         (uint64_t)1 << 62;
}

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

// d += a @ b.T for 64 rows of a, N = 2 * SUMS rows of b and a depth of 16, or d = a @ b.T without `add`; both operands
// lie in shared memory with rows along the depth.
template <typename T, int SUMS>
__device__ __forceinline__ void multiply_group(float (&d)[SUMS], uint64_t a, uint64_t b, uint32_t add) {
#define AK_WGMMA(N)                                  \
  if constexpr (SUMS == N / 2) {                     \
    if constexpr (std::is_same_v<T, __half>)         \
      AK_WGMMA_##N("k16.f32.f16.f16", ", 0, 0");     \
    else                                             \
      AK_WGMMA_##N("k16.f32.bf16.bf16", ", 0, 0");   \
  }
  AK_WGMMA(16)
  AK_WGMMA(32)
  AK_WGMMA(64)
  AK_WGMMA(128)
  AK_WGMMA(256)
#undef AK_WGMMA
}

// The products of rows of 128 bytes along K.
template <typename T, int SUMS>
__device__ __forceinline__ void multiply_rows(float (&d)[SUMS], const void *a, const void *b, bool add) {
  const uint64_t a_tile = tile_descriptor(a), b_tile = tile_descriptor(b);
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++)  // one product on: 32 bytes of a row
    multiply_group<T>(d, a_tile + k * (32 >> 4), b_tile + k * (32 >> 4), add || k > 0);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Marks kernels without sm_90a's instructions: they are never launched, and have this much static shared memory.
__device__ __forceinline__ void not_for_this_architecture() {
  __shared__ uint32_t mark[1];
  *static_cast<volatile uint32_t *>(mark) = 0;
}

// What is behind a product on Hopper: act(product + bias), or act(gate + gate_bias) * (product + bias).
struct Behind {
  const void *bias, *gate_bias;  // of the output's dtype or float32, or NULL
  int64_t bias_stride, gate_bias_stride;
  bool bias_is_float, gate_bias_is_float;
  bool packs;  // eight neighbours of an output's row are an aligned 16-byte pack
  int kind;
};

template <typename T>
__device__ __forceinline__ float bias_at(const void *bias, int64_t stride, bool is_float, int64_t column) {
  if (bias == NULL) return 0.0f;
  return is_float ? static_cast<const float *>(bias)[column * stride]
                  : to_float(static_cast<const T *>(bias)[column * stride]);
}

// A warp's 16 rows of sums as wgmma leaves them, COLUMNS wide, become outputs. They pass through `mine` (16 rows of
// kWarpStride floats), so that memory is written by whole rows. Without an activation 64 columns at a time, already
// rounded; else in float32, 32, or 16 of the gate beside 16 of the other product. GATED: the gate's sums come first,
// then as many of the other product.
constexpr int kWarpStride = 40;

template <typename T, int COLUMNS, bool GATED>
__device__ __forceinline__ void emit_warp(const float (&sums)[GATED ? COLUMNS : COLUMNS / 2], float *mine,
                                          const Behind &e, T *out, int64_t row, int64_t column, int64_t M, int64_t N,
                                          int lane) {
  if (GATED || e.kind != kNone || !e.packs) {
    constexpr int kAtOnce = GATED ? 16 : 32;
#pragma unroll 1
    for (int first = 0; first < COLUMNS && column + first < N; first += kAtOnce) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c += kAtOnce)
        if (c == first) {
#pragma unroll
          for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int part = GATED ? j / 2 * (COLUMNS / 2) + j % 2 * 4 : 4 * j, at = c / 2 + part + 2 * half;
              store<float, 2>(mine + (lane / 4 + 8 * half) * kWarpStride + 8 * j + lane % 4 * 2,
                              {sums[at], sums[at + 1]});
            }
        }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < 16 * kAtOnce / 8; i += 32) {
        const int64_t r = row + i / (kAtOnce / 8), c = column + first + i % (kAtOnce / 8) * 8;
        if (r >= M || c >= N) continue;
        const float *from = mine + i / (kAtOnce / 8) * kWarpStride + i % (kAtOnce / 8) * 8;
        const int count = N - c < 8 ? (int)(N - c) : 8;
        float values[8], factors[8];
        load8(from, values);
        if constexpr (GATED) load8(from + 16, factors);
#pragma unroll
        for (int n = 0; n < 8; n++) {
          if (n >= count) continue;
          const float bias = bias_at<T>(e.bias, e.bias_stride, e.bias_is_float, c + n);
          if constexpr (GATED) {
            values[n] += bias_at<T>(e.gate_bias, e.gate_bias_stride, e.gate_bias_is_float, c + n);
            factors[n] += bias;
          } else {
            values[n] += bias;
          }
        }
        activate(values, e.kind);
        Pack<T, 8> y;
#pragma unroll
        for (int n = 0; n < 8; n++) y.v[n] = from_float<T>(GATED ? values[n] * factors[n] : values[n]);
        if (e.packs) {
          store<T, 8>(out + r * N + c, y);
        } else {
#pragma unroll
          for (int n = 0; n < 8; n++)
            if (n < count) out[r * N + c + n] = y.v[n];
        }
      }
      __syncwarp();
    }
    return;
  }
  if constexpr (!GATED) {
    constexpr int kStride = 64 + 8;
    T *rounded = reinterpret_cast<T *>(mine), *y = out + row * N + column;
#pragma unroll
    for (int first = 0; first < COLUMNS; first += 64) {
      if (column + first >= N) continue;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        // Two neighbours of this lane's row, two of the eighth row after it.
        float bias[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int64_t c = column + first + 8 * j + lane % 4 * 2 + i;
          bias[i] = c < N ? bias_at<T>(e.bias, e.bias_stride, e.bias_is_float, c) : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = first / 2 + 4 * j + 2 * half;
          store<T, 2>(rounded + (lane / 4 + 8 * half) * kStride + 8 * j + lane % 4 * 2,
                      {from_float<T>(sums[at] + bias[0]), from_float<T>(sums[at + 1] + bias[1])});
        }
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
}

// Dimensions of the work of a kernel for Hopper; tiles_n counts tiles of outputs.
struct Extent {
  int64_t M, N, tiles_m, tiles_n, tiles;
  int steps;  // of kDepth along K
};

// Two blocks of a cluster hold tiles below each other and share the weights' rows: each copies half of them for both
// (of a gated product one the gate's, one the other's). A block has two warp groups with 64 rows each, and a third that
// tells the copy engine what to fetch. It walks over many tiles; the fetches of the next run while this one's sums are
// written.
template <int COLUMNS>
struct Wide {
  static constexpr int m = 128, n = COLUMNS, cluster = 2, threads = 384;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = n == 256 ? 4 : 6;
  static constexpr int out_bytes = 8 * 16 * kWarpStride * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + out_bytes + (int)sizeof(Ring<stages>);
};

template <typename T, int COLUMNS, bool GATED>
__global__ void __launch_bounds__(384, 1)
    project_wide(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap gate_map,
                 const __grid_constant__ CUtensorMap b_map, const Behind behind, T *__restrict__ out,
                 const Extent extent) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Wide<COLUMNS>;
  constexpr int kOutputs = GATED ? C::n / 2 : C::n;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  float *staged = reinterpret_cast<float *>(tiles + C::stages * C::stage_bytes);
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes + C::out_bytes);
  const int group = threadIdx.x / 128;
  const uint32_t rank = cluster_rank();
  let_next_kernel_start();
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
      const CUtensorMap *weights = GATED && rank == 0 ? &gate_map : &b_map;
      wait_for_kernel_before();
      for (int64_t tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
        const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, kOutputs);
        const int row = (int)place.row + (int)rank * C::m;
        const int column = (int)place.column + (GATED ? 0 : (int)rank * (C::n / 2));
        for (int step = 0; step < extent.steps; step++) {
          unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes + rank * (C::b_bytes / 2);
          barrier_wait(&ring->empty[stage], phase ^ 1);
          barrier_expect(&ring->full[stage], C::stage_bytes);
          copy_box(a, &a_map, &ring->full[stage], step * kDepth, row);
          copy_box(b, weights, &ring->full[stage], step * kDepth, column, 3);
          next();
        }
      }
    }
  } else {
    more_registers<232>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *mine = staged + warp * 16 * kWarpStride;
    for (int64_t tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
      const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, kOutputs);
      float sums[C::n / 2];
      int last = 0;
      for (int step = 0; step < extent.steps; step++) {
        const unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
        barrier_wait(&ring->full[stage], phase);
        group_begin();
        multiply_rows<T>(sums, a + group * 64 * kRowBytes, b, step > 0);
        group_end();
        group_wait<1>();  // the products of the step before are done: its tiles may be overwritten
        if (step > 0 && threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
        last = stage;
        next();
      }
      group_wait<0>();
      if (threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
      emit_warp<T, kOutputs, GATED>(sums, mine, behind, out, place.row + (int64_t)rank * C::m + 16 * warp, place.column,
                                    extent.M, extent.N, lane);
    }
  }
  cluster_meet();  // nobody leaves while another may still arrive at its barriers
#else
  not_for_this_architecture();
#endif
}

// A few rows of a times weights that are read once: rows of the weights are on the products' long side, TOKENS rows of
// a on the short one. Of a gated product, one warp group has rows of the gate, the other those of the other weight. The
// blocks of a cluster share their rows and split K; in the end each adds up its part of all their sums, in one order.
template <int TOKENS, bool GATED>
struct Thin {
  static constexpr int groups = GATED || TOKENS > 32 ? 2 : 1, rows = 64 * groups, outputs = GATED ? 64 : rows;
  static constexpr int threads = 128 * groups + 32, parts = TOKENS <= 64 ? 2 : 1;  // of 64 along K in a stage
  static constexpr int w_bytes = rows * kRowBytes, a_bytes = TOKENS * kRowBytes, part_bytes = w_bytes + a_bytes;
  static constexpr int stage_bytes = parts * part_bytes;
  static constexpr int budget = groups == 1 || TOKENS <= 32 ? kThinBytes : 200 * 1024;
  static constexpr int stages = budget / stage_bytes;
  static constexpr int sums_stride = rows + 4, sums_bytes = TOKENS * sums_stride * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + (int)sizeof(Ring<stages>);
  static_assert(sums_bytes <= stages * stage_bytes, "the sums take the place of the tiles");
};

template <typename T, int TOKENS, bool GATED>
__global__ void __launch_bounds__(Thin<TOKENS, GATED>::threads)
    project_thin(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap gate_map,
                 const __grid_constant__ CUtensorMap b_map, const Behind behind, T *__restrict__ out,
                 const Extent extent, const int splits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Thin<TOKENS, GATED>;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes);
  const uint32_t rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; s++) {
      barrier_init(&ring->full[s], 1);
      barrier_init(&ring->empty[s], C::groups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();

  const int64_t tile = blockIdx.x / splits;
  // Blocks with the same weights follow each other: they are read from memory once.
  const int64_t row = tile % extent.tiles_m * TOKENS, column = tile / extent.tiles_m * C::outputs;
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
      const auto copy_weights = [&](int step, int to) {
        barrier_expect(&ring->full[to], C::stage_bytes);
#pragma unroll
        for (int part = 0; part < C::parts; part++) {
          unsigned char *w = tiles + to * C::stage_bytes + part * C::part_bytes;
          const int k = (step * C::parts + part) * kDepth;
          if constexpr (GATED) {
            copy_box(w, &gate_map, &ring->full[to], k, (int)column);
            copy_box(w + 64 * kRowBytes, &b_map, &ring->full[to], k, (int)column);
          } else {
            copy_box(w, &b_map, &ring->full[to], k, (int)column);
          }
        }
      };
      const auto copy_rows = [&](int step, int to) {
#pragma unroll
        for (int part = 0; part < C::parts; part++)
          copy_box(tiles + to * C::stage_bytes + part * C::part_bytes + C::w_bytes, &a_map, &ring->full[to],
                   (step * C::parts + part) * kDepth, (int)row);
      };
      // The weights are there before the kernel that makes a has ended.
      const int ahead = end - begin < C::stages ? end - begin : C::stages;
      for (int s = 0; s < ahead; s++) copy_weights(begin + s, s);
      wait_for_kernel_before();
      for (int s = 0; s < ahead; s++) copy_rows(begin + s, s);
      for (int step = begin; step < end; step++) {
        if (step >= begin + ahead) {
          barrier_wait(&ring->empty[stage], phase ^ 1);
          copy_weights(step, stage);
          copy_rows(step, stage);
        }
        next();
      }
    }
    __syncwarp();
  } else {
    int last = 0;
    for (int step = begin; step < end; step++) {
      barrier_wait(&ring->full[stage], phase);
      group_begin();
#pragma unroll
      for (int part = 0; part < C::parts; part++) {
        const unsigned char *w = tiles + stage * C::stage_bytes + part * C::part_bytes;
        multiply_rows<T>(sums, w + group * 64 * kRowBytes, w + C::w_bytes, true);
      }
      group_end();
      group_wait<1>();
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
  const int tokens = extent.M - row < TOKENS ? (int)(extent.M - row) : TOKENS, pairs = tokens * (C::outputs / 2);
  const int share = (pairs + splits - 1) / splits, mine_end = share * ((int)rank + 1);
#pragma unroll 1
  for (int i = share * (int)rank + threadIdx.x; i < mine_end && i < pairs; i += C::threads) {
    const int token = i / (C::outputs / 2), at = i % (C::outputs / 2) * 2;
    const int64_t n = column + at;
    if (n >= extent.N) continue;
    const float *from = partial + token * C::sums_stride + at;
    float values[2] = {}, factors[2] = {};  // sums of the gate or of the only product, and of the other
#pragma unroll
    for (int block = 0; block < kMostSplits; block++) {
      if (block >= splits) break;
      const float2 v = load_from(from, block);
      values[0] += v.x, values[1] += v.y;
      if constexpr (GATED) {
        const float2 u = load_from(from + 64, block);
        factors[0] += u.x, factors[1] += u.y;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (n + e >= extent.N) continue;
      const float bias = bias_at<T>(behind.bias, behind.bias_stride, behind.bias_is_float, n + e);
      if constexpr (GATED) {
        values[e] += bias_at<T>(behind.gate_bias, behind.gate_bias_stride, behind.gate_bias_is_float, n + e);
        factors[e] += bias;
      } else {
        values[e] += bias;
        factors[e] = 1.0f;
      }
    }
    activate(values, behind.kind);
    T *y = out + (row + token) * extent.N + n;
#pragma unroll
    for (int e = 0; e < 2; e++) values[e] *= factors[e];
    if (behind.packs) {
      store<T, 2>(y, {from_float<T>(values[0]), from_float<T>(values[1])});
    } else {
      y[0] = from_float<T>(values[0]);
      if (n + 1 < extent.N) y[1] = from_float<T>(values[1]);
    }
  }
  if (splits > 1) cluster_meet();  // nobody leaves while another may still read its sums
#else
  not_for_this_architecture();
#endif
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

// A matrix's map: boxes of 64 elements (128 bytes, swizzled) of so many rows.
template <typename T>
bool map_of(CUtensorMap *map, const Dense<T> &matrix, int64_t columns, int64_t rows, int box_rows) {
  const Encode encode = encoder();
  if (encode == NULL) return false;
  const int64_t stride = rows == 1 ? (columns + 7) / 8 * 8 : matrix.stride;
  const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
  const cuuint32_t box[2] = {kDepth, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  const CUtensorMapDataType type =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 2, const_cast<T *>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
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
int launch_clusters(void (*kernel)(Parameters...), int64_t blocks, int threads, int bytes, int cluster, bool early,
                    cudaStream_t stream, const Arguments &...arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 1;
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, arguments...);
  return code != cudaSuccess ? (int)code : (int)cudaGetLastError();
}

// A product on Hopper: a (M, K) @ w.T with w (N, K), and the gate's weight, or NULL.
template <typename T>
struct Hopper {
  Dense<T> a, w;
  const Dense<T> *gate;
  Behind behind;
  T *out;
  int64_t M, N, K;
  bool early;  // may start before the kernel ahead of it has ended, which makes a
  int device, processors;
  cudaStream_t stream;
};

template <typename T, int COLUMNS, bool GATED>
int launch_wide(const Hopper<T> &h) {
  using C = Wide<COLUMNS>;
  CUtensorMap a_map, gate_map = {}, w_map;
  if (!runs_here<project_wide<T, COLUMNS, GATED>>(C::bytes, h.device) || !map_of(&a_map, h.a, h.K, h.M, C::m) ||
      !map_of(&w_map, h.w, h.K, h.N, C::n / 2) || (GATED && !map_of(&gate_map, *h.gate, h.K, h.N, C::n / 2)))
    return kNotHere;
  const int64_t outputs = GATED ? C::n / 2 : C::n;
  const int64_t tiles_m = (h.M + C::m - 1) / C::m, tiles_n = (h.N + outputs - 1) / outputs;
  const int steps = (int)((h.K + kDepth - 1) / kDepth);
  const Extent extent = {h.M, h.N, tiles_m, tiles_n, (tiles_m + 1) / 2 * tiles_n, steps};
  const int64_t room = h.processors / C::cluster, clusters = extent.tiles < room ? extent.tiles : room;
  return launch_clusters(project_wide<T, COLUMNS, GATED>, clusters * C::cluster, C::threads, C::bytes, C::cluster,
                         h.early, h.stream, a_map, gate_map, w_map, h.behind, h.out, extent);
}

template <typename T, int TOKENS, bool GATED>
int launch_thin(const Hopper<T> &h) {
  using C = Thin<TOKENS, GATED>;
  CUtensorMap a_map, gate_map = {}, w_map;
  if (!runs_here<project_thin<T, TOKENS, GATED>>(C::bytes, h.device) || !map_of(&a_map, h.a, h.K, h.M, TOKENS) ||
      !map_of(&w_map, h.w, h.K, h.N, C::outputs) || (GATED && !map_of(&gate_map, *h.gate, h.K, h.N, C::outputs)))
    return kNotHere;
  const int64_t tiles_m = (h.M + TOKENS - 1) / TOKENS, tiles_n = (h.N + C::outputs - 1) / C::outputs;
  const int depth = C::parts * kDepth;
  const Extent extent = {h.M, h.N, tiles_m, tiles_n, tiles_m * tiles_n, (int)((h.K + depth - 1) / depth)};
  int splits = 1;
  while (splits < kMostSplits && extent.tiles * splits < kThinBlocks && extent.steps >= splits * 2) splits *= 2;
  if (extent.tiles * splits > 0x7fffffff) return AK_UNSUPPORTED;
  return launch_clusters(project_thin<T, TOKENS, GATED>, extent.tiles * splits, C::threads, C::bytes, splits, h.early,
                         h.stream, a_map, gate_map, w_map, h.behind, h.out, extent, splits);
}

template <typename T, bool GATED>
int product_hopper(const Hopper<T> &h) {
  constexpr int kOutputs = GATED ? 128 : 256;
  if (h.M > 128 && blocks_of(h.M, h.N, 128, kOutputs) >= kWideFrom) return launch_wide<T, 256, GATED>(h);
  if constexpr (!GATED) {
    if (h.M > 128 && blocks_of(h.M, h.N, 128, 128) >= kWideFrom) return launch_wide<T, 128, false>(h);
  }
  if (h.M <= 16) return launch_thin<T, 16, GATED>(h);
  if (h.M <= 32) return launch_thin<T, 32, GATED>(h);
  if (h.M <= 64) return launch_thin<T, 64, GATED>(h);
  return launch_thin<T, 128, GATED>(h);
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

Behind behind_of(const AkTensor *bias, const AkTensor *gate_bias, int kind, int64_t N, const void *out) {
  const Epilogue one = epilogue_of(bias, false, kind), gate = epilogue_of(gate_bias, false, kind);
  return {one.bias, gate.bias, one.bias_stride, gate.bias_stride, one.bias_is_float, gate.bias_is_float,
          N % 8 == 0 && aligned(out), kind};
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
  if constexpr (sizeof(T) == 2) {
    int major = 0, processors = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ctx->device);
    // Tensor maps are of aligned rows that do not overlap.
    const auto maps = [](const Dense<T> &m, int64_t rows) { return m.packs && (rows == 1 || m.stride > 0); };
    const bool all = maps(a, M) && maps(up, H) && maps(down, D) && (w_gate == NULL || maps(gate, H)) && H % 8 == 0;
    if (major == 9 && all && M > 0 && D > 0 && H > 0 && M < INT32_MAX && D < INT32_MAX && H < INT32_MAX) {
      const Dense<T> h = {hidden, H, true};
      T *y = static_cast<T *>(out->data);
      const Hopper<T> first = {a, up, w_gate != NULL ? &gate : NULL, behind_of(b_up, b_gate, kind, H, hidden), hidden,
                               M, H, D, false, ctx->device, processors, stream};
      const Hopper<T> second = {h, down, NULL, behind_of(b_down, NULL, kNone, D, y), y, M, D, H, true, ctx->device,
                                processors, stream};
      const int made = w_gate != NULL ? product_hopper<T, true>(first) : product_hopper<T, false>(first);
      if (made != kNotHere && made != AK_OK) return made;
      if (made == AK_OK) {
        const int done = product_hopper<T, false>(second);
        if (done != kNotHere) return done;
        return product<T>(h, down, epilogue_of(b_down, false, kNone), y, M, D, H, stream);
      }
    }
  }
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
