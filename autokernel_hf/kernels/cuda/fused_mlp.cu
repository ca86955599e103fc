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
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kTileM = 128;           // tune(block): 64, 128
constexpr int kTileN = 128;           // tune(block): 64, 128
constexpr int kStages = 3;            // tune(memory): 2, 3, 4
constexpr uint32_t kGroup = 8;        // tune(memory): 1, 4, 8, 16
constexpr int64_t kLargeFrom = 128;   // tune(launch): 32, 64, 128, 256
constexpr int64_t kWideFrom = 96;     // tune(launch): 32, 64, 96, 128
constexpr int64_t kThinBlocks = 128;  // tune(launch): 64, 128, 256
constexpr int kThinBytes = 204800;    // tune(memory): 106496, 204800

constexpr int kTileK = 32, kSmallStages = 3;
constexpr int kMostSplits = 8;  // blocks of a cluster, which all devices have room for
constexpr int64_t kCountable = 1 << 30;  // rows or columns, of which an int counts all and those past them
constexpr int kNotHere = -100;  // a kernel for Hopper that this device, its driver or the build has not

namespace {

// A block's tile, a warp's part of it, and how many tiles along K are under way.
template <int M, int N, int K, int WARP_M, int WARP_N, int STAGES>
struct Tile {
  static constexpr int m = M, n = N, k = K, warp_m = WARP_M, warp_n = WARP_N, stages = STAGES;
  static constexpr int warps_n = N / WARP_N, threads = M / WARP_M * warps_n * 32;
  static_assert(M % WARP_M == 0 && N % WARP_N == 0 && K % 16 == 0, "tiles are whole warps' parts and whole products");
  static_assert(WARP_M % 16 == 0 && WARP_N == 32 && STAGES >= 2, "a warp takes 16 rows and 32 columns at a time");
};
// Elements of 16 bits as the kernels see them: float16 or, if `brain`, bfloat16. One kernel for both, since only the
// products and conversions tell them apart.
using Bits = uint16_t;

using Large = Tile<kTileM, kTileN, kTileK, 64, 32, kStages>;
using Small = Tile<64, 64, 64, 32, 32, kSmallStages>;

// The toolkit's headers for these dtypes take longer to compile than the kernels' use of them.
__device__ __forceinline__ float to_float(uint32_t bits, bool brain) {
  if (brain) return __uint_as_float(bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)bits));
  return value;
}

// Two neighbours in memory, the first in the low half.
__device__ __forceinline__ uint32_t round_pair(float a, float b, bool brain) {
  uint32_t pair;
  if (brain)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

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

// x * sigmoid(u). QUICK: exact enough for outputs of 16 bits, and a third of the instructions.
template <bool QUICK>
__device__ __forceinline__ float times_sigmoid(float x, float u) {
  if constexpr (QUICK) {
    float power, share;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * u));
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return x * share;
  } else {
    return x / (1.0f + expf(-u));
  }
}

// All but erf are one of two forms, so that few instructions are compiled and fetched: relu, and
// x * sigmoid(x * (linear + cubic * x * x)), since 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where
// 1 + tanh(u) cancels.
template <bool QUICK, int N>
__device__ __forceinline__ void activate(float (&x)[N], int kind) {
  if (kind == kNone) return;
  if (kind == kGelu) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
  } else if (kind < kRelu) {
    const float linear = kind == kSilu ? 1.0f : kind == kQuickGelu ? 1.702f : 1.5957691216057308f;
    const float cubic = kind == kGeluTanh || kind == kGeluNew ? 0.07135481627f : 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
      x[i] = times_sigmoid<QUICK>(x[i], x[i] * (linear + cubic * fminf(x[i] * x[i], 1e30f)));  // not 0 * infinity
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = x[i] < 0.0f ? 0.0f : kind == kRelu2 ? x[i] * x[i] : x[i];
  }
}

struct Bias {
  const void *data;  // of the output's dtype or float32, or NULL
  int64_t stride;
  bool is_float;
};

// act(product + bias); act(gate) * (product + bias) where the output holds the gate; act(gate + gate_bias) * (product +
// bias) where both are made at once.
struct Behind {
  Bias bias, gate_bias;
  bool gated;  // the output holds the gate
  bool packs;  // eight neighbours of an output's row are an aligned 16-byte pack
  bool brain;  // all of 16 bits are bfloat16, not float16
  int kind;
};

__device__ __forceinline__ float bias_at(const Bias &b, int64_t column, bool brain) {
  if (b.data == NULL) return 0.0f;
  return b.is_float ? static_cast<const float *>(b.data)[column * b.stride]
                    : to_float(static_cast<const Bits *>(b.data)[column * b.stride], brain);
}

// To sums as the tensor cores leave them in a lane: rows lane / 4 and eight on, columns 8j + lane % 4 * 2 and the next.
__device__ __forceinline__ void add_bias(float (&v)[16], const Bias &b, int64_t column, int columns, bool brain,
                                         int lane) {
  if (b.data == NULL) return;
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int c = 8 * j + lane % 4 * 2 + i;
      const float added = c < columns ? bias_at(b, column + c, brain) : 0.0f;
      v[4 * j + i] += added, v[4 * j + i + 2] += added;
    }
}

// 16 rows of 32 columns (`rows` and `columns` of them are there), act(x) * factors, become outputs. They pass through
// shared memory, a patch of the warp's own with kPatchStride elements a row, so that memory is written in packs.
constexpr int kPatchStride = 32 + 8;  // eight rows start in different banks
constexpr int kPatchBytes = 16 * kPatchStride * 2;

__device__ __forceinline__ void emit_patch(float (&x)[16], const float (&factors)[16], Bits *patch, const Behind &b,
                                           Bits *out, int64_t stride, int rows, int columns, int lane) {
  activate<true>(x, b.kind);
  Bits *own = patch + lane / 4 * kPatchStride + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; i += 2)
    *reinterpret_cast<uint32_t *>(own + i / 2 % 2 * 8 * kPatchStride + i / 4 * 8) =
        round_pair(x[i] * factors[i], x[i + 1] * factors[i + 1], b.brain);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = lane / 4 + 8 * i, c = lane % 4 * 8;
    const Bits *kept = patch + r * kPatchStride + c;
    Bits *y = out + r * stride + c;
    if (r >= rows) continue;
    if (b.packs && c + 8 <= columns) {
      *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<const uint4 *>(kept);
    } else {
#pragma unroll 1
      for (int j = 0; j < 8 && c + j < columns; j++) y[j] = kept[j];
    }
  }
  __syncwarp();
}

// The gate that the output holds, to the lanes that have the other product's sums.
__device__ __forceinline__ void read_patch(float (&x)[16], Bits *patch, const Behind &b, const Bits *out,
                                           int64_t stride, int rows, int columns, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = lane / 4 + 8 * i, c = lane % 4 * 8;
    Bits *kept = patch + r * kPatchStride + c;
    const Bits *y = out + r * stride + c;
    if (r >= rows) continue;
    if (b.packs && c + 8 <= columns) {
      *reinterpret_cast<uint4 *>(kept) = *reinterpret_cast<const uint4 *>(y);
    } else {
#pragma unroll 1
      for (int j = 0; j < 8 && c + j < columns; j++) kept[j] = y[j];
    }
  }
  __syncwarp();
  const Bits *own = patch + lane / 4 * kPatchStride + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const uint32_t pair = *reinterpret_cast<const uint32_t *>(own + i / 2 % 2 * 8 * kPatchStride + i / 4 * 8);
    x[i] = to_float(pair & 0xFFFF, b.brain), x[i + 1] = to_float(pair >> 16, b.brain);
  }
}

__device__ __forceinline__ int left_of(int64_t all, int64_t from, int most) {
  const int64_t left = all - from;
  return left < most ? left > 0 ? (int)left : 0 : most;
}

// --- which block does which tile ---

struct Place {
  int64_t row, column;  // of the tile's first element
};

// Consecutive blocks walk down kGroup tiles before they step right: they share weights in the L2 cache.
__device__ __forceinline__ Place place_of(uint32_t block, uint32_t tiles_m, uint32_t tiles_n, int m, int n) {
  const uint32_t group = block / (kGroup * tiles_n), first = group * kGroup;
  const uint32_t high = tiles_m - first < kGroup ? tiles_m - first : kGroup, within = block - first * tiles_n;
  return {(int64_t)(first + within % high) * m, (int64_t)(within / high) * n};
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

template <bool BRAIN>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (BRAIN)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// f is called with whether operands are bfloat16, as a constant.
template <typename F>
__device__ __forceinline__ void by_dtype(bool brain, F f) {
  if (brain)
    f(std::true_type());
  else
    f(std::false_type());
}

// ROWS x COLUMNS elements from (row, column) on into shared memory, zeros where the matrix ends. The rows there are
// padded by 16 bytes, so that eight of them start in different banks.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void load_tile(Bits *tile, const Dense<Bits> &matrix, int64_t row, int64_t column,
                                          int64_t rows, int64_t columns) {
  constexpr int kChunks = COLUMNS / 8;
  static_assert(ROWS * kChunks % THREADS == 0, "threads share the tile evenly");
  if (matrix.packs) {
#pragma unroll
    for (int first = 0; first < ROWS * kChunks; first += THREADS) {
      const int i = first + threadIdx.x;
      const int64_t r = row + i / kChunks, c = column + i % kChunks * 8, left = r < rows ? columns - c : 0;
      const int count = left < 8 ? left > 0 ? (int)left : 0 : 8;
      const Bits *from = count > 0 ? matrix.data + r * matrix.stride + c : matrix.data;
      copy_later(tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8, from, 2 * count);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
    const int64_t r = row + i / kChunks, c = column + i % kChunks * 8, left = r < rows ? columns - c : 0;
    const Bits *from = matrix.data + r * matrix.stride + c;
    Bits *to = tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8;
#pragma unroll 4
    for (int j = 0; j < 8; j++) to[j] = j < left ? from[j] : (Bits)0;
  }
}

template <typename C>
struct Shared {
  static constexpr int stride = C::k + 8, a_size = C::m * stride, b_size = C::n * stride;
  static constexpr int stage_bytes = (a_size + b_size) * 2;
  static constexpr int bytes = stage_bytes * C::stages;
  static_assert(C::threads / 32 * kPatchBytes <= bytes, "patches take the place of the tiles");
};

// a (M, K) @ b.T with b (N, K), both dense along K. (The output may hold the gate: no __restrict__.)
template <typename C>
__global__ void __launch_bounds__(C::threads)
    project(Dense<Bits> a, Dense<Bits> b, Behind behind, Bits *out, int64_t M, int64_t N, int64_t K, int tiles_m,
            int tiles_n) {
  using Layout = Shared<C>;
  extern __shared__ __align__(16) unsigned char memory[];
  Bits *tiles = reinterpret_cast<Bits *>(memory);
  const Place place = place_of(blockIdx.x, tiles_m, tiles_n, C::m, C::n);
  const int64_t steps = (K + C::k - 1) / C::k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / C::warps_n * C::warp_m, warp_column = warp % C::warps_n * C::warp_n;
  // ldmatrix reads four 8x8 matrices; lanes 8i to 8i + 7 name the rows of the i-th.
  const int matrix = lane / 8, matrix_row = lane % 8;

  const auto fetch = [&](int64_t step) {
    if (step < steps) {
      Bits *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
      load_tile<C::m, C::k, C::threads>(a_tile, a, place.row, step * C::k, M, K);
      load_tile<C::n, C::k, C::threads>(b_tile, b, place.column, step * C::k, N, K);
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
    const Bits *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
    by_dtype(behind.brain, [&](auto brain) {
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
            multiply<brain.value>(sums[i][j], a_part[i], b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]);
      }
    });
  }
  wait_for_groups<0>();
  __syncthreads();  // the tiles' memory is free

  Bits *patch = reinterpret_cast<Bits *>(memory + warp * kPatchBytes);
  const int64_t column = place.column + warp_column;
  const int columns = left_of(N, column, 32);
#pragma unroll 1
  for (int part = 0; part < C::warp_m / 16; part++) {
    float v[16], x[16];
#pragma unroll
    for (int i = 0; i < C::warp_m / 16; i++)
      if (i == part) {
#pragma unroll
        for (int j = 0; j < 16; j++) v[j] = sums[i][j / 4][j % 4];
      }
    const int64_t row = place.row + warp_row + 16 * part;
    const int rows = left_of(M, row, 16);
    Bits *y = out + row * N + column;
    add_bias(v, behind.bias, column, columns, behind.brain, lane);
    if (behind.gated) {
      read_patch(x, patch, behind, y, N, rows, columns, lane);
    } else {
#pragma unroll
      for (int i = 0; i < 16; i++) x[i] = v[i], v[i] = 1.0f;
    }
    emit_patch(x, v, patch, behind, y, N, rows, columns, lane);
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

__device__ __forceinline__ void fetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
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

// All blocks of the cluster get here before one goes on; what they have written is seen after it. One warp's release,
// a wait for memory as far as the L2 cache, covers what all have written before they met.
__device__ __forceinline__ void cluster_sync() {
  __syncthreads();
  if (threadIdx.x < 32)
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// The same where nothing was written for others.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" : : : "memory");
}

// The sum over the first `blocks` of the cluster's blocks, in their order, of four floats each: from where they lie in
// this block. All are under way at once.
__device__ __forceinline__ void sum_of_blocks(float (&sum)[4], const float *p, uint32_t blocks) {
  float v[kMostSplits][4];
#pragma unroll
  for (uint32_t block = 0; block < kMostSplits; block++)
    asm volatile(
        "{.reg .pred there_is; .reg .b32 there; setp.lt.u32 there_is, %5, %6; mov.f32 %0, 0f00000000; "
        "mov.f32 %1, 0f00000000; mov.f32 %2, 0f00000000; mov.f32 %3, 0f00000000; "
        "@there_is mapa.shared::cluster.u32 there, %4, %5; "
        "@there_is ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
        : "=&f"(v[block][0]), "=&f"(v[block][1]), "=&f"(v[block][2]), "=&f"(v[block][3])
        : "r"(shared_address(p)), "r"(block), "r"(blocks));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[i] = v[0][i];
#pragma unroll
    for (int block = 1; block < kMostSplits; block++) sum[i] += v[block][i];
  }
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
template <bool BRAIN, int SUMS>
__device__ __forceinline__ void multiply_group(float (&d)[SUMS], uint64_t a, uint64_t b, uint32_t add) {
#define AK_WGMMA(N)                                  \
  if constexpr (SUMS == N / 2) {                     \
    if constexpr (BRAIN)                             \
      AK_WGMMA_##N("k16.f32.bf16.bf16", ", 0, 0");   \
    else                                             \
      AK_WGMMA_##N("k16.f32.f16.f16", ", 0, 0");     \
  }
  AK_WGMMA(16)
  AK_WGMMA(32)
  AK_WGMMA(64)
  AK_WGMMA(128)
  AK_WGMMA(256)
#undef AK_WGMMA
}

// The products of rows of 128 bytes along K.
template <bool BRAIN, int SUMS>
__device__ __forceinline__ void multiply_rows(float (&d)[SUMS], const void *a, const void *b, bool add) {
  const uint64_t a_tile = tile_descriptor(a), b_tile = tile_descriptor(b);
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++)  // one product on: 32 bytes of a row
    multiply_group<BRAIN>(d, a_tile + k * (32 >> 4), b_tile + k * (32 >> 4), add || k > 0);
}

// Sixteen sums a lane, from the part-th on. Registers have no index: a jump to where 16 are moved is quicker than a
// choice for each of all.
template <int PART, int SUMS>
__device__ __forceinline__ void take(float (&v)[16], const float (&sums)[SUMS]) {
  asm volatile("");
  if constexpr (16 * PART + 16 <= SUMS) {
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = sums[16 * PART + i];
  }
}

// A warp's 16 rows of sums as wgmma leaves them become outputs, OUTPUTS columns. GATED: the gate's sums come first,
// then as many of the other product.
template <int OUTPUTS, bool GATED>
__device__ __forceinline__ void emit_warp(const float (&sums)[GATED ? OUTPUTS : OUTPUTS / 2], Bits *patch,
                                          const Behind &b, Bits *out, int64_t row, int64_t column, int64_t M,
                                          int64_t N, int lane) {
  constexpr int kParts = OUTPUTS / 32;  // of the gate's too
  const int rows = left_of(M, row, 16), left = left_of(N, column, OUTPUTS);
  Bits *y = out + row * N + column;
#pragma unroll 1
  for (int first = 0; first < left; first += 32) {
    const int columns = left - first < 32 ? left - first : 32;
    float x[16], factors[16];
#pragma unroll
    for (int i = 0; i < 16; i++) factors[i] = 1.0f;
    switch (first / 32) {
      case 0:
        take<0>(x, sums);
        if constexpr (GATED) take<kParts>(factors, sums);
        break;
      case 1:
        take<1>(x, sums);
        if constexpr (GATED) take<kParts + 1>(factors, sums);
        break;
      case 2:
        take<2>(x, sums);
        if constexpr (GATED) take<kParts + 2>(factors, sums);
        break;
      case 3:
        take<3>(x, sums);
        if constexpr (GATED) take<kParts + 3>(factors, sums);
        break;
      case 4: take<4>(x, sums); break;
      case 5: take<5>(x, sums); break;
      case 6: take<6>(x, sums); break;
      default: take<7>(x, sums); break;
    }
    add_bias(x, GATED ? b.gate_bias : b.bias, column + first, columns, b.brain, lane);
    if constexpr (GATED) add_bias(factors, b.bias, column + first, columns, b.brain, lane);
    emit_patch(x, factors, patch, b, y + first, N, rows, columns, lane);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Marks kernels without sm_90a's instructions: they are never launched, and have this much static shared memory.
__device__ __forceinline__ void not_for_this_architecture() {
  __shared__ uint32_t mark[1];
  *static_cast<volatile uint32_t *>(mark) = 0;
}

// Dimensions of the work of a kernel for Hopper; tiles_n counts tiles of outputs.
struct Extent {
  int M, N, tiles_m, tiles_n, tiles;
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
  static constexpr int out_bytes = 8 * kPatchBytes;
  static constexpr int bytes = 1024 + stages * stage_bytes + out_bytes + (int)sizeof(Ring<stages>);
};

template <int COLUMNS, bool GATED>
__global__ void __launch_bounds__(384, 1)
    project_wide(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap gate_map,
                 const __grid_constant__ CUtensorMap b_map, const Behind behind, Bits *__restrict__ out,
                 const Extent extent) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Wide<COLUMNS>;
  constexpr int kOutputs = GATED ? C::n / 2 : C::n;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  unsigned char *patches = tiles + C::stages * C::stage_bytes;
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes + C::out_bytes);
  const int group = threadIdx.x / 128;
  const uint32_t rank = cluster_rank();
  let_next_kernel_start();
  if (threadIdx.x == 32) {
    fetch_map(&a_map);
    fetch_map(&b_map);
    if constexpr (GATED) fetch_map(&gate_map);
  }
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
  const int clusters = gridDim.x / C::cluster, pairs_m = (extent.tiles_m + 1) / 2;
  if (group == 2) {
    fewer_registers<40>();
    if (threadIdx.x == 256) {
      const CUtensorMap *weights = GATED && rank == 0 ? &gate_map : &b_map;
      wait_for_kernel_before();
      for (int tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
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
    Bits *patch = reinterpret_cast<Bits *>(patches + warp * kPatchBytes);
    for (int tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
      const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, kOutputs);
      float sums[C::n / 2];
      by_dtype(behind.brain, [&](auto brain) {
        int last = 0;
        for (int step = 0; step < extent.steps; step++) {
          const unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
          barrier_wait(&ring->full[stage], phase);
          group_begin();
          multiply_rows<brain.value>(sums, a + group * 64 * kRowBytes, b, step > 0);
          group_end();
          group_wait<1>();  // the products of the step before are done: its tiles may be overwritten
          if (step > 0 && threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
          last = stage;
          next();
        }
        group_wait<0>();
        if (threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
      });
      emit_warp<kOutputs, GATED>(sums, patch, behind, out, place.row + (int64_t)rank * C::m + 16 * warp, place.column,
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
  static constexpr int threads = 128 * groups + 32, parts = TOKENS <= 32 ? 2 : 1;  // of 64 along K in a stage
  static constexpr int w_bytes = rows * kRowBytes, a_bytes = TOKENS * kRowBytes, part_bytes = w_bytes + a_bytes;
  static constexpr int stage_bytes = parts * part_bytes;
  // Of 64 rows two blocks beside each other do best, of more one with as much as it can hold.
  static constexpr int budget = TOKENS <= 32 ? kThinBytes : TOKENS <= 64 ? 104 * 1024 : 200 * 1024;
  static constexpr int stages = budget / stage_bytes;
  static constexpr int sums_stride = rows + 4, sums_bytes = TOKENS * sums_stride * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + (int)sizeof(Ring<stages>);
  static_assert(sums_bytes <= stages * stage_bytes, "the sums take the place of the tiles");
};

template <int TOKENS, bool GATED>
__global__ void __launch_bounds__(Thin<TOKENS, GATED>::threads, TOKENS <= 64 ? 2 : 1)
    project_thin(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap gate_map,
                 const __grid_constant__ CUtensorMap b_map, const Behind behind, Bits *__restrict__ out,
                 const Extent extent, const int splits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Thin<TOKENS, GATED>;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes);
  const uint32_t rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  let_next_kernel_start();
  if (threadIdx.x == 32) {
    fetch_map(&a_map);
    fetch_map(&b_map);
    if constexpr (GATED) fetch_map(&gate_map);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; s++) {
      barrier_init(&ring->full[s], 1);
      barrier_init(&ring->empty[s], C::groups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();

  const int tile = (int)blockIdx.x / splits;
  // Blocks with the same weights follow each other: they are read from memory once.
  const int row = tile % extent.tiles_m * TOKENS, column = tile / extent.tiles_m * C::outputs;
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
    by_dtype(behind.brain, [&](auto brain) {
      int last = 0;
      for (int step = begin; step < end; step++) {
        barrier_wait(&ring->full[stage], phase);
        group_begin();
#pragma unroll
        for (int part = 0; part < C::parts; part++) {
          const unsigned char *w = tiles + stage * C::stage_bytes + part * C::part_bytes;
          multiply_rows<brain.value>(sums, w + group * 64 * kRowBytes, w + C::w_bytes, true);
        }
        group_end();
        group_wait<1>();
        if (step > begin && threadIdx.x % 128 == 0) barrier_arrive(&ring->empty[last]);
        last = stage;
        next();
      }
      group_wait<0>();
    });
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
  // Four outputs at a time, a share of them in each block.
  const int tokens = left_of(extent.M, row, TOKENS), all = tokens * (C::outputs / 4);
  const int share = (all + splits - 1) / splits, mine_end = share * ((int)rank + 1);
#pragma unroll 1
  for (int i = share * (int)rank + threadIdx.x; i < mine_end && i < all; i += C::threads) {
    const int token = i / (C::outputs / 4), at = i % (C::outputs / 4) * 4, n = column + at;
    if (n >= extent.N) continue;
    const float *from = partial + token * C::sums_stride + at;
    float x[4], factors[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // sums of the gate or of the only product, and of the other
    sum_of_blocks(x, from, splits);
    if constexpr (GATED) sum_of_blocks(factors, from + 64, splits);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (n + e >= extent.N) continue;
      x[e] += bias_at(GATED ? behind.gate_bias : behind.bias, n + e, behind.brain);
      if constexpr (GATED) factors[e] += bias_at(behind.bias, n + e, behind.brain);
    }
    activate<true>(x, behind.kind);
    Bits *y = out + (int64_t)(row + token) * extent.N + n;
    const uint32_t low = round_pair(x[0] * factors[0], x[1] * factors[1], behind.brain);
    const uint32_t high = round_pair(x[2] * factors[2], x[3] * factors[3], behind.brain);
    if (behind.packs) {
      *reinterpret_cast<uint2 *>(y) = make_uint2(low, high);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (n + e < extent.N) y[e] = (Bits)((e < 2 ? low : high) >> e % 2 * 16);
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
    project_float(Dense<float> a, Dense<float> b, Behind behind, float *out, int64_t M, int64_t N, int64_t K,
                  int tiles_m, int tiles_n) {
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
  for (int e = threadIdx.x; e < M_TILE * N_TILE; e += kThreads) {
    const int r = e / N_TILE, c = e % N_TILE;
    const int64_t row = place.row + r, column = place.column + c;
    if (row >= M || column >= N) continue;
    float *y = out + row * N + column, sum = memory[r * kSumsStride + c] + bias_at(behind.bias, column, false);
    float x[1] = {behind.gated ? *y : sum};
    activate<false>(x, behind.kind);
    *y = behind.gated ? x[0] * sum : x[0];
  }
}

// --- host ---

bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

int64_t blocks_of(int64_t M, int64_t N, int m, int n) { return (M + m - 1) / m * ((N + n - 1) / n); }

template <typename C>
int launch(Dense<Bits> a, Dense<Bits> b, const Behind &behind, Bits *out, int64_t M, int64_t N, int64_t K,
           cudaStream_t stream) {
  constexpr int kBytes = Shared<C>::bytes;
  const auto kernel = project<C>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess) {
    cudaGetLastError();  // this device has less shared memory
    return AK_UNSUPPORTED;
  }
  const int64_t tiles_m = (M + C::m - 1) / C::m, tiles_n = (N + C::n - 1) / C::n;
  if (tiles_m * tiles_n > 0x7fffffff) return AK_UNSUPPORTED;
  kernel<<<(unsigned)(tiles_m * tiles_n), C::threads, kBytes, stream>>>(a, b, behind, out, M, N, K, (int)tiles_m,
                                                                        (int)tiles_n);
  return (int)cudaGetLastError();
}

template <int M_TILE, int N_TILE, int TM, int TN>
int launch_float(Dense<float> a, Dense<float> b, const Behind &behind, float *out, int64_t M, int64_t N, int64_t K,
                 cudaStream_t stream) {
  constexpr int kThreads = (M_TILE / TM) * (N_TILE / TN);
  const int64_t tiles_m = (M + M_TILE - 1) / M_TILE, tiles_n = (N + N_TILE - 1) / N_TILE;
  if (tiles_m * tiles_n > 0x7fffffff) return AK_UNSUPPORTED;
  project_float<M_TILE, N_TILE, TM, TN><<<(unsigned)(tiles_m * tiles_n), kThreads, 0, stream>>>(
      a, b, behind, out, M, N, K, (int)tiles_m, (int)tiles_n);
  return (int)cudaGetLastError();
}

template <typename T>
int product(Dense<T> a, Dense<T> b, Behind behind, T *out, int64_t M, int64_t N, int64_t K, cudaStream_t stream) {
  if (M == 0 || N == 0) return AK_OK;
  behind.packs = N % (16 / (int)sizeof(T)) == 0 && aligned(out);
  if constexpr (sizeof(T) == 4) {
    if (blocks_of(M, N, 128, 64) >= kLargeFrom)
      return launch_float<128, 64, 8, 4>(a, b, behind, out, M, N, K, stream);
    return launch_float<32, 32, 2, 2>(a, b, behind, out, M, N, K, stream);
  } else {
    if (blocks_of(M, N, Large::m, Large::n) >= kLargeFrom)
      return launch<Large>(a, b, behind, out, M, N, K, stream);
    return launch<Small>(a, b, behind, out, M, N, K, stream);
  }
}

// --- host, Hopper ---

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function that writes tensor maps, or NULL.
Encode encoder() {
  static void *kept = NULL;
  void *found = __atomic_load_n(&kept, __ATOMIC_RELAXED);
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
    __atomic_store_n(&kept, found, __ATOMIC_RELAXED);
  }
  return reinterpret_cast<Encode>(found);
}

// A matrix's map: boxes of 64 elements (128 bytes, swizzled) of so many rows.
bool map_of(CUtensorMap *map, const Dense<Bits> &matrix, bool brain, int64_t columns, int64_t rows, int box_rows) {
  const Encode encode = encoder();
  if (encode == NULL) return false;
  const int64_t stride = rows == 1 ? (columns + 7) / 8 * 8 : matrix.stride;
  const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
  const cuuint32_t box[2] = {kDepth, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  const CUtensorMapDataType type = brain ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 2, const_cast<Bits *>(matrix.data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether this device has a kernel's instructions and its shared memory; asked once a device.
template <auto KERNEL>
bool runs_here(int bytes, int device) {
  constexpr int kDevices = 64;
  static signed char kept[kDevices];
  if (device < 0 || device >= kDevices) return false;
  signed char known = __atomic_load_n(&kept[device], __ATOMIC_RELAXED);
  if (known == 0) {
    cudaFuncAttributes attributes;
    known = cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess && attributes.sharedSizeBytes == 0 &&
                    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess
                ? 1
                : -1;
    if (known < 0) cudaGetLastError();
    __atomic_store_n(&kept[device], known, __ATOMIC_RELAXED);
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
struct Hopper {
  Dense<Bits> a, w;
  const Dense<Bits> *gate;
  Behind behind;
  Bits *out;
  int64_t M, N, K;
  bool early;  // may start before the kernel ahead of it has ended, which makes a
  int device, processors;
  cudaStream_t stream;
};

bool maps_of(const Hopper &h, CUtensorMap (&maps)[3], int a_rows, int w_rows) {
  const bool brain = h.behind.brain;
  return map_of(&maps[0], h.a, brain, h.K, h.M, a_rows) &&
         (h.gate == NULL || map_of(&maps[1], *h.gate, brain, h.K, h.N, w_rows)) &&
         map_of(&maps[2], h.w, brain, h.K, h.N, w_rows);
}

template <int COLUMNS, bool GATED>
int launch_wide(const Hopper &h) {
  using C = Wide<COLUMNS>;
  CUtensorMap maps[3] = {};
  if (!runs_here<project_wide<COLUMNS, GATED>>(C::bytes, h.device) || !maps_of(h, maps, C::m, C::n / 2))
    return kNotHere;
  const int64_t outputs = GATED ? C::n / 2 : C::n;
  const int64_t tiles_m = (h.M + C::m - 1) / C::m, tiles_n = (h.N + outputs - 1) / outputs;
  const int64_t tiles = (tiles_m + 1) / 2 * tiles_n, room = h.processors / C::cluster;
  if (tiles > INT32_MAX / 2) return AK_UNSUPPORTED;
  const int steps = (int)((h.K + kDepth - 1) / kDepth);
  const Extent extent = {(int)h.M, (int)h.N, (int)tiles_m, (int)tiles_n, (int)tiles, steps};
  return launch_clusters(project_wide<COLUMNS, GATED>, (tiles < room ? tiles : room) * C::cluster, C::threads, C::bytes,
                         C::cluster, h.early, h.stream, maps[0], maps[1], maps[2], h.behind, h.out, extent);
}

template <int TOKENS, bool GATED>
int launch_thin(const Hopper &h) {
  using C = Thin<TOKENS, GATED>;
  CUtensorMap maps[3] = {};
  if (!runs_here<project_thin<TOKENS, GATED>>(C::bytes, h.device) || !maps_of(h, maps, TOKENS, C::outputs))
    return kNotHere;
  const int64_t tiles_m = (h.M + TOKENS - 1) / TOKENS, tiles_n = (h.N + C::outputs - 1) / C::outputs;
  const int64_t tiles = tiles_m * tiles_n;
  if (tiles > INT32_MAX / kMostSplits) return AK_UNSUPPORTED;
  const int depth = C::parts * kDepth;
  const Extent extent = {(int)h.M, (int)h.N, (int)tiles_m, (int)tiles_n, (int)tiles, (int)((h.K + depth - 1) / depth)};
  int splits = 1;
  while (splits < kMostSplits && tiles * splits < kThinBlocks && extent.steps >= splits * 2) splits *= 2;
  return launch_clusters(project_thin<TOKENS, GATED>, tiles * splits, C::threads, C::bytes, splits, h.early, h.stream,
                         maps[0], maps[1], maps[2], h.behind, h.out, extent, splits);
}

template <bool GATED>
int product_hopper(const Hopper &h) {
  constexpr int kOutputs = GATED ? 128 : 256;
  if (h.M > 128 && blocks_of(h.M, h.N, 128, kOutputs) >= kWideFrom) return launch_wide<256, GATED>(h);
  if constexpr (!GATED) {
    if (h.M > 128 && blocks_of(h.M, h.N, 128, 128) >= kWideFrom) return launch_wide<128, false>(h);
  }
  if (h.M <= 16) return launch_thin<16, GATED>(h);
  if (h.M <= 32) return launch_thin<32, GATED>(h);
  if (h.M <= 64) return launch_thin<64, GATED>(h);
  return launch_thin<128, GATED>(h);
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

Bias bias_of(const AkTensor *bias) {
  if (bias == NULL) return {};
  return {bias->data, bias->sizes[0] == 1 ? 0 : bias->strides[0], bias->dtype == AK_F32};
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
  T *hidden = static_cast<T *>(ctx->workspace), *y = static_cast<T *>(out->data);
  const bool brain = x->dtype == AK_BF16;
  const Behind last = {bias_of(b_down), {}, false, D % (16 / (int)sizeof(T)) == 0 && aligned(y), brain, kNone};
  const Dense<T> h = {hidden, H, H % (16 / (int)sizeof(T)) == 0};
  if constexpr (sizeof(T) == 2) {
    int major = 0, processors = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ctx->device);
    // Tensor maps are of aligned rows that do not overlap.
    const auto maps = [](const Dense<T> &m, int64_t rows) { return m.packs && (rows == 1 || m.stride > 0); };
    const bool all = maps(a, M) && maps(up, H) && maps(down, D) && (w_gate == NULL || maps(gate, H)) && H % 8 == 0;
    if (major == 9 && all && M > 0 && D > 0 && H > 0 && M < kCountable && D < kCountable && H < kCountable) {
      const Behind middle = {bias_of(b_up), bias_of(b_gate), false, true, brain, kind};
      const Hopper first = {a, up, w_gate != NULL ? &gate : NULL, middle, hidden, M, H, D, false, ctx->device,
                            processors, stream};
      const Hopper second = {h, down, NULL, last, y, M, D, H, true, ctx->device, processors, stream};
      const int made = w_gate != NULL ? product_hopper<true>(first) : product_hopper<false>(first);
      if (made != kNotHere && made != AK_OK) return made;
      if (made == AK_OK) {
        const int done = product_hopper<false>(second);
        if (done != kNotHere) return done;
        return product<T>(h, down, last, y, M, D, H, stream);
      }
    }
  }
  int code = AK_OK;
  if (w_gate != NULL) {
    const Behind gates = {bias_of(b_gate), {}, false, false, brain, kNone};
    code = product<T>(a, gate, gates, hidden, M, H, D, stream);
  }
  const Behind middle = {bias_of(b_up), {}, w_gate != NULL, false, brain, kind};
  if (code == AK_OK) code = product<T>(a, up, middle, hidden, M, H, D, stream);
  return code == AK_OK ? product<T>(h, down, last, y, M, D, H, stream) : code;
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
    case AK_F16:
    case AK_BF16: return run<Bits>(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
