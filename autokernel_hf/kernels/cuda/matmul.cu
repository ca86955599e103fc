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
constexpr int64_t kDirectUpTo = 8;    // tune(algorithm): 0, 8, 16

constexpr int kTileK = 32, kSmallStages = 3, kDirectWarps = 16;
constexpr int64_t kDirectFrom = 32;     // blocks
constexpr int kThinBytes = 104 * 1024;  // of tiles under way: two blocks beside each other
constexpr int kMostBytes = 200 * 1024;  // the same: one block
constexpr int kMostSplits = 8;          // blocks of a cluster, which all devices have room for
constexpr int64_t kCountable = 1 << 30; // elements of a dimension, of which an int counts all and those past them
constexpr int kNotHere = -100;          // a kernel for Hopper that this device, its driver or the build has not

namespace {

// A block's tile, a warp's part of it, and how many tiles along K are under way.
template <int M, int N, int K, int WARP_M, int WARP_N, int STAGES>
struct Tile {
  static constexpr int m = M, n = N, k = K, warp_m = WARP_M, warp_n = WARP_N, stages = STAGES;
  static constexpr int warps_n = N / WARP_N, threads = M / WARP_M * warps_n * 32;
  static_assert(M % WARP_M == 0 && N % WARP_N == 0 && K % 16 == 0, "tiles are whole warps' parts and whole products");
  static_assert(WARP_M % 16 == 0 && WARP_N == 32 && STAGES >= 2, "a warp takes 16 rows and 32 columns at a time");
};
// Elements as the kernels see them. Those of 16 bits are float16 or, if `brain`, bfloat16: one kernel for both, since
// only the products and conversions tell them apart.
using Bits = uint16_t;
using Float8 = uint8_t;  // e4m3fn

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

struct Epilogue {
  bool brain;        // the outputs are bfloat16, not float16
  const void *bias;  // of the output's dtype or float32, or NULL
  int64_t bias_stride;
  bool bias_is_float;
  const void *residual;  // of the output's dtype, or NULL
  int64_t residual_batch, residual_row, residual_column;
  bool residual_packs, out_packs;  // eight neighbours of a row are an aligned 16-byte pack (two of float32)
  const float *scale_a, *scale_b;  // or NULL
  int kind;
};

__device__ __forceinline__ float scale_of(const Epilogue &e) {
  return (e.scale_a != NULL ? *e.scale_a : 1.0f) * (e.scale_b != NULL ? *e.scale_b : 1.0f);
}

__device__ __forceinline__ float bias_at(const Epilogue &e, int64_t column) {
  const int64_t at = column * e.bias_stride;
  return e.bias_is_float ? static_cast<const float *>(e.bias)[at]
                         : to_float(static_cast<const Bits *>(e.bias)[at], e.brain);
}

// The residual that belongs to an output's row.
template <typename O>
__device__ __forceinline__ const O *residual_row(const Epilogue &e, int64_t batch, int64_t row) {
  return static_cast<const O *>(e.residual) + batch * e.residual_batch + row * e.residual_row;
}

// What is added to a block's outputs, rows x columns of them, on its way to the L2 cache while the sums are made.
__device__ __forceinline__ void fetch_ahead(const Epilogue &e, int64_t batch, int64_t row, int64_t column, int rows,
                                            int columns, int64_t M, int64_t N, int thread, int threads) {
  const auto ahead = [](const void *p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p) : "memory"); };
  if (thread == 0 && e.scale_a != NULL) ahead(e.scale_a);
  if (thread == 0 && e.scale_b != NULL) ahead(e.scale_b);
  if (e.bias != NULL && thread < columns && column + thread < N)
    ahead(static_cast<const char *>(e.bias) + (column + thread) * e.bias_stride * (e.bias_is_float ? 4 : 2));
  if (e.residual == NULL || !e.residual_packs) return;
  const int lines = (columns + 63) / 64;  // of 128 bytes
  for (int i = thread; i < rows * lines; i += threads) {
    const int64_t r = row + i / lines, c = column + i % lines * 64;
    if (r < M && c < N) ahead(residual_row<Bits>(e, batch, r) + c);
  }
}

// Where a warp's outputs lie, 16 rows of COLUMNS columns or what is left of them, and the residual to them.
template <int COLUMNS>
struct Outputs {
  Bits *out;
  int64_t stride;
  const Bits *residual;
  int rows, columns;

  __device__ __forceinline__ Outputs(const Epilogue &e, Bits *all, int64_t batch, int64_t row, int64_t column,
                                     int64_t M, int64_t N)
      : out(all + (batch * M + row) * N + column),
        stride(N),
        residual(e.residual == NULL ? NULL : residual_row<Bits>(e, batch, row) + column * e.residual_column),
        rows(M - row < 16 ? M - row > 0 ? (int)(M - row) : 0 : 16),
        columns(N - column < COLUMNS ? N - column > 0 ? (int)(N - column) : 0 : COLUMNS) {}

  __device__ __forceinline__ void step(const Epilogue &e) {
    out += COLUMNS;
    if (residual != NULL) residual += COLUMNS * e.residual_column;
  }
};

// Sums as the tensor cores leave them in a lane become outputs: rows lane / 4 and eight on, columns 8j + lane % 4 * 2
// and the next. They pass through shared memory, a patch of the warp's own with kPatchStride elements a row, so that
// memory is read and written in packs. The bias to the columns lies in shared memory too.
template <int COLUMNS>
constexpr int kPatchStride = COLUMNS + 8;  // eight rows start in different banks
template <int COLUMNS>
constexpr int kPatchBytes = 16 * kPatchStride<COLUMNS> * 2;

template <int COLUMNS>
__device__ __forceinline__ void emit_patch(float (&v)[COLUMNS / 2], Bits *patch, const float *bias, const Epilogue &e,
                                           float scale, const Outputs<COLUMNS> &to, int lane) {
  constexpr int kStride = kPatchStride<COLUMNS>, kChunks = COLUMNS / 8;
  Bits *own = patch + lane / 4 * kStride + lane % 4 * 2;
  if (to.residual != NULL) {
#pragma unroll
    for (int i = 0; i < kChunks / 2; i++) {
      const int r = (lane + 32 * i) / kChunks, c = lane % kChunks * 8;
      const Bits *from = to.residual + r * e.residual_row + c * e.residual_column;
      Bits *kept = patch + r * kStride + c;
      if (r >= to.rows) continue;
      if (e.residual_packs && c + 8 <= to.columns) {
        *reinterpret_cast<uint4 *>(kept) = *reinterpret_cast<const uint4 *>(from);
      } else {
#pragma unroll 1
        for (int j = 0; j < 8 && c + j < to.columns; j++) kept[j] = from[j * e.residual_column];
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) v[i] *= scale;
  if (bias != NULL) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      const Pack<float, 2> added = load<float, 2>(bias + 8 * j + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; i++) v[4 * j + i] += added.v[i % 2];
    }
  }
  activate<true>(v, e.kind);
  if (to.residual != NULL) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
      const uint32_t added = *reinterpret_cast<const uint32_t *>(own + i / 2 % 2 * 8 * kStride + i / 4 * 8);
      v[i] += to_float(added & 0xFFFF, e.brain), v[i + 1] += to_float(added >> 16, e.brain);
    }
  }
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i += 2)
    *reinterpret_cast<uint32_t *>(own + i / 2 % 2 * 8 * kStride + i / 4 * 8) = round_pair(v[i], v[i + 1], e.brain);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kChunks / 2; i++) {
    const int r = (lane + 32 * i) / kChunks, c = lane % kChunks * 8;
    const Bits *kept = patch + r * kStride + c;
    Bits *y = to.out + r * to.stride + c;
    if (r >= to.rows) continue;
    if (e.out_packs && c + 8 <= to.columns) {
      *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<const uint4 *>(kept);
    } else {
#pragma unroll 1
      for (int j = 0; j < 8 && c + j < to.columns; j++) y[j] = kept[j];
    }
  }
  __syncwarp();
}

// V neighbouring sums of a row become outputs.
template <int V>
__device__ __forceinline__ void emit_few(float (&sums)[V], const Epilogue &e, float scale, Bits *out, int64_t batch,
                                         int64_t row, int64_t column, int64_t M, int64_t N) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    sums[i] *= scale;
    if (e.bias != NULL && column + i < N) sums[i] += bias_at(e, column + i);
  }
  activate<true>(sums, e.kind);
  if (e.residual != NULL) {
    const Bits *residual = residual_row<Bits>(e, batch, row);
#pragma unroll
    for (int i = 0; i < V; i++)
      if (column + i < N) sums[i] += to_float(residual[(column + i) * e.residual_column], e.brain);
  }
  Bits *y = out + (batch * M + row) * N + column;
  Pack<uint32_t, V / 2> pairs;
#pragma unroll
  for (int i = 0; i < V; i += 2) pairs.v[i / 2] = round_pair(sums[i], sums[i + 1], e.brain);
  if (e.out_packs) {
    store<uint32_t, V / 2>(reinterpret_cast<uint32_t *>(y), pairs);
  } else {
#pragma unroll
    for (int i = 0; i < V; i++)
      if (column + i < N) y[i] = (Bits)(pairs.v[i / 2] >> i % 2 * 16);
  }
}

// --- which block does which tile ---

struct Place {
  int64_t batch, row, column;  // of the tile's first element
};

// Consecutive blocks walk down kGroup tiles before they step right: they share columns of b in the L2 cache.
__device__ __forceinline__ Place place_of(uint32_t block, uint32_t tiles_m, uint32_t tiles_n, int m, int n) {
  const uint32_t tiles = tiles_m * tiles_n, batch = block / tiles, tile = block - batch * tiles;
  const uint32_t group = tile / (kGroup * tiles_n), first = group * kGroup;
  const uint32_t high = tiles_m - first < kGroup ? tiles_m - first : kGroup, within = tile - first * tiles_n;
  return {batch, (int64_t)(first + within % high) * m, (int64_t)(within / high) * n};
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

// One kernel multiplies operands of either dtype of 16 bits, and a b that lies along K (NT) or along N: f is called
// with what holds, as constants. float8 counts as float16 here.
template <typename S, typename F>
__device__ __forceinline__ void by_case(bool brain, bool nt, F f) {
  if (sizeof(S) == 2 && brain) {
    if (nt)
      f(std::true_type(), std::true_type());
    else
      f(std::true_type(), std::false_type());
  } else {
    if (nt)
      f(std::false_type(), std::true_type());
    else
      f(std::false_type(), std::false_type());
  }
}

// A matrix in memory that is dense along its rows.
template <typename S>
struct Dense {
  const S *data;
  int64_t batch, stride;  // in elements
  bool packs;             // eight neighbours of a row are one aligned access
};

// Two float8 as two float16, which hold each of their values.
__device__ __forceinline__ uint32_t widen_pair(uint32_t two) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t halves;
  asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)two));
  return halves;
#else
  float v[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // As a float16 of the same digits: its exponent counts from eight more.
    const uint32_t x = two >> 8 * i & 0xFF;
    const float low = to_float((x & 0x80) << 8 | (x & 0x7F) << 7, false);
    v[i] = (x & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : 256.0f * low;
  }
  return round_pair(v[0], v[1], false);
#endif
}
__device__ __forceinline__ Bits widen(Float8 x) { return (Bits)widen_pair(x); }
__device__ __forceinline__ Bits widen(Bits x) { return x; }

// ROWS x COLUMNS elements from (row, column) on into shared memory, zeros where the matrix ends. The rows there are
// padded by 16 bytes, so that eight of them start in different banks.
template <typename S, int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void load_tile(Bits *tile, const Dense<S> &matrix, int64_t row, int64_t column, int64_t rows,
                                          int64_t columns) {
  constexpr int kChunks = COLUMNS / 8;
  static_assert(ROWS * kChunks % THREADS == 0, "threads share the tile evenly");
  if constexpr (sizeof(S) == 2) {
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
    Bits *to = tile + i / kChunks * (COLUMNS + 8) + i % kChunks * 8;
    if (sizeof(S) == 1 && matrix.packs && left >= 8) {
      const uint2 narrow = *reinterpret_cast<const uint2 *>(from);
      *reinterpret_cast<uint4 *>(to) = make_uint4(widen_pair(narrow.x & 0xFFFF), widen_pair(narrow.x >> 16),
                                                  widen_pair(narrow.y & 0xFFFF), widen_pair(narrow.y >> 16));
    } else {
#pragma unroll 4
      for (int j = 0; j < 8; j++) to[j] = j < left ? widen(from[j]) : (Bits)0;
    }
  }
}

template <typename C>
struct Shared {
  static constexpr int a_stride = C::k + 8, nt_stride = C::k + 8, nn_stride = C::n + 8;
  static constexpr int a_size = C::m * a_stride, nt_size = C::n * nt_stride, nn_size = C::k * nn_stride;
  static constexpr int stage_bytes = (a_size + (nt_size > nn_size ? nt_size : nn_size)) * 2;
  static constexpr int bytes = stage_bytes * C::stages;
  static_assert(C::n * 4 + C::threads / 32 * kPatchBytes<32> <= bytes, "bias and patches take the place of the tiles");
};

// a (M, K) dense along K; b dense along K if `nt`, as (N, K), else along N, as (K, N).
template <typename S, typename C>
__global__ void __launch_bounds__(C::threads)
    matmul_tiles(Dense<S> a, Dense<S> b, Epilogue epilogue, Bits *__restrict__ out, int64_t M, int64_t N, int64_t K,
                 int tiles_m, int tiles_n, bool nt) {
  using Layout = Shared<C>;
  extern __shared__ __align__(16) unsigned char memory[];
  Bits *tiles = reinterpret_cast<Bits *>(memory);
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
      Bits *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
      const int64_t k = step * C::k;
      load_tile<S, C::m, C::k, C::threads>(a_tile, a, place.row, k, M, K);
      if (nt)
        load_tile<S, C::n, C::k, C::threads>(b_tile, b, place.column, k, N, K);
      else
        load_tile<S, C::k, C::n, C::threads>(b_tile, b, k, place.column, K, N);
    }
    end_group();  // an empty group too: the count of groups tells the step
  };

  fetch_ahead(epilogue, place.batch, place.row, place.column, C::m, C::n, M, N, threadIdx.x, C::threads);
  float sums[C::warp_m / 16][C::warp_n / 8][4] = {};
#pragma unroll 1
  for (int s = 0; s < C::stages - 1; s++) fetch(s);
  for (int64_t step = 0; step < steps; step++) {
    wait_for_groups<C::stages - 2>();
    __syncthreads();  // this step's tiles are here, and everyone is done with those that the next fetch overwrites
    fetch(step + C::stages - 1);
    const Bits *a_tile = tiles + step % C::stages * (Layout::stage_bytes / 2), *b_tile = a_tile + Layout::a_size;
    by_case<S>(epilogue.brain, nt, [&](auto brain, auto by_k) {
#pragma unroll
      for (int k = 0; k < C::k; k += 16) {
        uint32_t a_part[C::warp_m / 16][4], b_part[C::warp_n / 16][4];
#pragma unroll
        for (int i = 0; i < C::warp_m / 16; i++)
          ldmatrix(a_part[i], a_tile + (warp_row + 16 * i + matrix % 2 * 8 + matrix_row) * Layout::a_stride + k +
                                  matrix / 2 * 8);
#pragma unroll
        for (int j = 0; j < C::warp_n / 16; j++) {
          if constexpr (by_k.value)
            ldmatrix(b_part[j], b_tile + (warp_column + 16 * j + matrix / 2 * 8 + matrix_row) * Layout::nt_stride + k +
                                    matrix % 2 * 8);
          else
            ldmatrix_transposed(b_part[j], b_tile + (k + matrix % 2 * 8 + matrix_row) * Layout::nn_stride +
                                               warp_column + 16 * j + matrix / 2 * 8);
        }
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

  float *bias = reinterpret_cast<float *>(memory);
  if (epilogue.bias != NULL) {
    for (int i = threadIdx.x; i < C::n && place.column + i < N; i += C::threads)
      bias[i] = bias_at(epilogue, place.column + i);
    __syncthreads();
  }
  Bits *patch = reinterpret_cast<Bits *>(memory + C::n * 4 + warp * kPatchBytes<32>);
  const float scale = scale_of(epilogue);
#pragma unroll 1
  for (int part = 0; part < C::warp_m / 16; part++) {
    float v[16];
#pragma unroll
    for (int i = 0; i < C::warp_m / 16; i++)
      if (i == part) {
#pragma unroll
        for (int j = 0; j < 16; j++) v[j] = sums[i][j / 4][j % 4];
      }
    const Outputs<32> to(epilogue, out, place.batch, place.row + warp_row + 16 * part, place.column + warp_column, M,
                         N);
    emit_patch<32>(v, patch, epilogue.bias != NULL ? bias + warp_column : NULL, epilogue, scale, to, lane);
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
    for (int i = 0; i < count; i++)
      r[i] = sizeof(S) == 2 ? words[i % 4] : widen_pair(words[i / 2 % 4] >> (i % 2 * 16) & 0xFFFF);
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
template <typename S, bool BRAIN, int TILES, bool NT>
__global__ void __launch_bounds__(Direct<NT>::threads, (NT && TILES == 1 ? 1024 : 512) / Direct<NT>::threads)
    matmul_direct(Dense<S> a, Dense<S> b, Epilogue epilogue, Bits *__restrict__ out, int64_t M, int64_t N, int K,
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
              multiply<BRAIN>(sums[0][j], x, y.r[i], y.r[i + 1]);
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
          for (int j = 0; j < TILES; j++) multiply<BRAIN>(sums[i][j], x, y[j].x, y[j].y);
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
    emit_few<2>(total, epilogue, scale, out, batch, token, column + at, M, N);
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

__device__ __forceinline__ void fetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
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
template <typename S, bool BRAIN, bool A_BY_K, bool B_BY_K, int SUMS>
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
    if constexpr (sizeof(S) == 2 && BRAIN) {       \
      AK_WGMMA_OF_16_BITS(N, ".bf16.bf16")         \
    } else if constexpr (sizeof(S) == 2) {         \
      AK_WGMMA_OF_16_BITS(N, ".f16.f16")           \
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
template <typename S, bool BRAIN, bool A_BY_K, bool B_BY_K, int SUMS>
__device__ __forceinline__ void multiply_rows(float (&d)[SUMS], const void *a, const void *b, bool add) {
  // The next 64 elements along M or N follow after 64 rows.
  const uint64_t a_tile = tile_descriptor(a, 64 * kRowBytes), b_tile = tile_descriptor(b, 64 * kRowBytes);
  // One product on: 32 bytes of a row, or 16 rows.
  constexpr uint64_t a_step = (A_BY_K ? 32 : 16 * kRowBytes) >> 4, b_step = (B_BY_K ? 32 : 16 * kRowBytes) >> 4;
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++)
    multiply_group<S, BRAIN, A_BY_K, B_BY_K>(d, a_tile + k * a_step, b_tile + k * b_step, add || k > 0);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Marks kernels without sm_90a's instructions: they are never launched, and have this much static shared memory.
__device__ __forceinline__ void not_for_this_architecture() {
  __shared__ uint32_t mark[1];
  *static_cast<volatile uint32_t *>(mark) = 0;
}

// emit_patch for all of a warp's columns, `left` of them there, where nothing is added and outputs are aligned packs.
template <int COLUMNS>
__device__ __forceinline__ void emit_plain(const float (&sums)[COLUMNS / 2], Bits *patch, bool brain, float scale,
                                           const Outputs<64> &to, int left, int lane) {
  constexpr int kStride = kPatchStride<64>;
  Bits *own = patch + lane / 4 * kStride + lane % 4 * 2;
#pragma unroll
  for (int first = 0; first < COLUMNS; first += 64) {
    if (first >= left) continue;
#pragma unroll
    for (int i = 0; i < 32; i += 2)
      *reinterpret_cast<uint32_t *>(own + i / 2 % 2 * 8 * kStride + i / 4 * 8) =
          round_pair(sums[first / 2 + i] * scale, sums[first / 2 + i + 1] * scale, brain);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = lane / 8 + 4 * i, c = lane % 8 * 8;
      if (r < to.rows && first + c < left)
        *reinterpret_cast<uint4 *>(to.out + r * to.stride + first + c) =
            *reinterpret_cast<const uint4 *>(patch + r * kStride + c);
    }
    __syncwarp();
  }
}

// Dimensions of the work of a kernel for Hopper, which multiplies b by its columns (NT) or by its rows.
struct Extent {
  int M, N, tiles_m, tiles_n, tiles;
  int steps;                    // of a stage along K
  bool a_batched, b_batched;    // or the same for all of the batch
  bool nt;
};

// Two blocks of a cluster hold tiles below each other and share b's columns: each copies half of them for both. A block
// has two warp groups with 64 rows each, and a third that tells the copy engine what to fetch. It walks over many
// tiles; the fetches of the next run while this one's sums are written.
template <int COLUMNS>
struct Wide {
  static constexpr int m = 128, n = COLUMNS, cluster = 2, threads = 384;
  static constexpr int a_bytes = m * kRowBytes, b_bytes = n * kRowBytes, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = n == 256 ? 4 : 6;
  static constexpr int out_bytes = 8 * kPatchBytes<64>, bias_bytes = 2 * n * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + out_bytes + bias_bytes + (int)sizeof(Ring<stages>);
};

template <typename S, int COLUMNS>
__global__ void __launch_bounds__(384, 1)
    matmul_wide(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const Epilogue epilogue, Bits *__restrict__ out, const Extent extent) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Wide<COLUMNS>;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  unsigned char *patches = tiles + C::stages * C::stage_bytes;
  float *biases = reinterpret_cast<float *>(patches + C::out_bytes);
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(patches + C::out_bytes + C::bias_bytes);
  const int group = threadIdx.x / 128;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 32) {
    fetch_map(&a_map);
    fetch_map(&b_map);
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
      for (int tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
        const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, C::n);
        const int row = (int)place.row + (int)rank * C::m, column = (int)place.column;
        const int a_batch = extent.a_batched ? (int)place.batch : 0, b_batch = extent.b_batched ? (int)place.batch : 0;
        for (int step = 0; step < extent.steps; step++) {
          unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
          const int k = step * kDepth<S>;
          barrier_wait(&ring->empty[stage], phase ^ 1);
          barrier_expect(&ring->full[stage], C::stage_bytes);
          copy_box(a, &a_map, &ring->full[stage], k, row, a_batch);
          if (sizeof(S) == 1 || extent.nt) {
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
    Bits *patch = reinterpret_cast<Bits *>(patches + warp * kPatchBytes<64>);
    float *bias = epilogue.bias != NULL ? biases : NULL;
    const bool plain = epilogue.kind == kNone && bias == NULL && epilogue.residual == NULL && epilogue.out_packs;
    const float scale = scale_of(epilogue);
    for (int tile = blockIdx.x / C::cluster; tile < extent.tiles; tile += clusters) {
      const Place place = place_of(tile, pairs_m, extent.tiles_n, 2 * C::m, C::n);
      const int64_t row = place.row + (int64_t)rank * C::m;
      fetch_ahead(epilogue, place.batch, row, place.column, C::m, C::n, extent.M, extent.N, threadIdx.x, 256);
      float sums[C::n / 2];
      if constexpr (sizeof(S) == 1) {
        // The tensor cores keep float8 sums in about 14 bits: they leave them after each step, 128 columns at a time,
        // for which there are registers; the other group's products fill the gap.
#pragma unroll
        for (int i = 0; i < C::n / 2; i++) sums[i] = 0.0f;
        for (int step = 0; step < extent.steps; step++) {
          const unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
          barrier_wait(&ring->full[stage], phase);
#pragma unroll
          for (int first = 0; first < C::n; first += 128) {
            float some[64];
            group_begin();
            multiply_rows<S, false, true, true>(some, a + group * 64 * kRowBytes, b + first * kRowBytes, false);
            group_end();
            group_wait<0>();
            if (first + 128 == C::n && threadIdx.x % 128 < C::cluster)
              barrier_arrive(&ring->empty[stage], threadIdx.x % 128);
#pragma unroll
            for (int i = 0; i < 64; i++) sums[first / 2 + i] += some[i];
          }
          next();
        }
      } else {
        by_case<S>(epilogue.brain, extent.nt, [&](auto brain, auto by_k) {
          int last = 0;
          for (int step = 0; step < extent.steps; step++) {
            const unsigned char *a = tiles + stage * C::stage_bytes, *b = a + C::a_bytes;
            barrier_wait(&ring->full[stage], phase);
            group_begin();
            multiply_rows<S, brain.value, true, by_k.value>(sums, a + group * 64 * kRowBytes, b, step > 0);
            group_end();
            group_wait<1>();  // the products of the step before are done: its tiles may be overwritten
            if (step > 0 && threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
            last = stage;
            next();
          }
          group_wait<0>();
          if (threadIdx.x % 128 < C::cluster) barrier_arrive(&ring->empty[last], threadIdx.x % 128);
        });
      }
      if (bias != NULL) {
        // The other half of the room is still read by warps that are behind.
        bias = biases + (bias == biases ? C::n : 0);
        const int i = threadIdx.x;
        if (i < C::n) bias[i] = place.column + i < extent.N ? bias_at(epilogue, place.column + i) : 0.0f;
        asm volatile("bar.sync 1, 256;" : : : "memory");
      }
      Outputs<64> to(epilogue, out, place.batch, row + 16 * warp, place.column, extent.M, extent.N);
      if (plain) {
        emit_plain<C::n>(sums, patch, epilogue.brain, scale, to, extent.N - (int)place.column, lane);
        continue;
      }
#pragma unroll 1
      for (int first = 0; first < C::n; first += 64) {
        const int left = extent.N - (int)place.column - first;
        if (left <= 0) break;
        to.columns = left < 64 ? left : 64;
        float v[32];
        // Registers have no index. A jump to one of four places, where 32 are moved, is quicker than a choice for all.
        const auto take = [&](auto part) {
          asm volatile("");
          if constexpr (64 * part.value < C::n) {
#pragma unroll
            for (int i = 0; i < 32; i++) v[i] = sums[32 * part.value + i];
          }
        };
        switch (first / 64) {
          case 0: take(std::integral_constant<int, 0>()); break;
          case 1: take(std::integral_constant<int, 1>()); break;
          case 2: take(std::integral_constant<int, 2>()); break;
          default: take(std::integral_constant<int, 3>()); break;
        }
        emit_patch<64>(v, patch, bias != NULL ? bias + first : NULL, epilogue, scale, to, lane);
        to.step(epilogue);
      }
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
  static constexpr int stages = (TOKENS <= 32 ? kThinBytes : kMostBytes) / stage_bytes;
  static constexpr int sums_stride = rows + 4, sums_bytes = TOKENS * sums_stride * 4;
  static constexpr int bytes = 1024 + stages * stage_bytes + (int)sizeof(Ring<stages>);
  static_assert(sums_bytes <= stages * stage_bytes, "the sums take the place of the tiles");
};

template <typename S, int TOKENS>
__global__ void __launch_bounds__(Thin<TOKENS>::threads, TOKENS <= 32 ? 2 : 1)
    matmul_thin(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const Epilogue epilogue, Bits *__restrict__ out, const Extent extent, const int splits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Thin<TOKENS>;
  extern __shared__ unsigned char memory[];
  unsigned char *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
  Ring<C::stages> *ring = reinterpret_cast<Ring<C::stages> *>(tiles + C::stages * C::stage_bytes);
  const uint32_t rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  if (threadIdx.x == 32) {
    fetch_map(&a_map);
    fetch_map(&b_map);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; s++) {
      barrier_init(&ring->full[s], 1);
      barrier_init(&ring->empty[s], C::groups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();

  const int tile = (int)blockIdx.x / splits, within = tile % (extent.tiles_m * extent.tiles_n);
  const int64_t batch = tile / (extent.tiles_m * extent.tiles_n);
  // Blocks with the same columns follow each other: the weight is read from memory once.
  const int row = within % extent.tiles_m * TOKENS, column = within / extent.tiles_m * C::rows;
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
  fetch_ahead(epilogue, batch, row, column, TOKENS, C::rows, extent.M, extent.N, threadIdx.x, C::threads);
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
          if (sizeof(S) == 1 || extent.nt) {
            copy_box(w, &b_map, &ring->full[stage], k, column, b_batch);
          } else {
#pragma unroll
            for (int i = 0; i < C::groups; i++)
              copy_box(w + i * 64 * kRowBytes, &b_map, &ring->full[stage], column + 64 * i, k, b_batch);
          }
          copy_box(a, &a_map, &ring->full[stage], k, row, a_batch);
        }
        next();
      }
    }
    __syncwarp();
  } else {
    by_case<S>(epilogue.brain, sizeof(S) == 1 || extent.nt, [&](auto brain, auto by_k) {
      int last = 0;
      for (int step = begin; step < end; step++) {
        barrier_wait(&ring->full[stage], phase);
        if constexpr (sizeof(S) == 1) {
#pragma unroll
          for (int part = 0; part < C::parts; part++) {
            const unsigned char *w = tiles + stage * C::stage_bytes + part * C::part_bytes;
            float some[TOKENS / 2];
            group_begin();
            multiply_rows<S, false, true, true>(some, w + group * 64 * kRowBytes, w + C::w_bytes, false);
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
            multiply_rows<S, brain.value, by_k.value, true>(sums, w + group * 64 * kRowBytes, w + C::w_bytes, true);
          }
          group_end();
          group_wait<1>();
        }
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
  const float scale = scale_of(epilogue);
  const int tokens = extent.M - row < TOKENS ? extent.M - row : TOKENS, all = tokens * (C::rows / 4);
  const int share = (all + splits - 1) / splits, mine_end = share * ((int)rank + 1);
#pragma unroll 1
  for (int i = share * (int)rank + threadIdx.x; i < mine_end && i < all; i += C::threads) {
    const int token = i / (C::rows / 4), at = i % (C::rows / 4) * 4;
    if (column + at >= extent.N) continue;
    float total[4];
    sum_of_blocks(total, partial + token * C::sums_stride + at, splits);
    emit_few<4>(total, epilogue, scale, out, batch, row + token, column + at, extent.M, extent.N);
  }
  // Nobody leaves while another may still read its sums. What a thread has read it has used by now.
  if (splits > 1) cluster_meet();
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
  for (int e = threadIdx.x; e < M_TILE * N_TILE; e += kThreads) {
    const int r = e / N_TILE, c = e % N_TILE;
    const int64_t row = place.row + r, column = place.column + c;
    if (row >= M || column >= N) continue;
    float total[1] = {memory[r * kSumsStride + c] * scale};
    if (epilogue.bias != NULL) total[0] += bias_at(epilogue, column);
    activate<false>(total, epilogue.kind);
    if (epilogue.residual != NULL)
      total[0] += residual_row<float>(epilogue, place.batch, row)[column * epilogue.residual_column];
    out[(place.batch * M + row) * N + column] = total[0];
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

template <typename S, typename C>
int launch(const Problem &p, Dense<S> a, Dense<S> b, bool nt, const Epilogue &epilogue, Bits *out,
           cudaStream_t stream) {
  constexpr int kBytes = Shared<C>::bytes;
  const auto kernel = matmul_tiles<S, C>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) != cudaSuccess) {
    cudaGetLastError();  // this device has less shared memory
    return AK_UNSUPPORTED;
  }
  const int64_t tiles_m = (p.M + C::m - 1) / C::m, tiles_n = (p.N + C::n - 1) / C::n, blocks = blocks_of(p, C::m, C::n);
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  kernel<<<(unsigned)blocks, C::threads, kBytes, stream>>>(a, b, epilogue, out, p.M, p.N, p.K, (int)tiles_m,
                                                           (int)tiles_n, nt);
  return (int)cudaGetLastError();
}

template <typename S, int TILES, bool NT>
int launch_direct(const Problem &p, Dense<S> a, Dense<S> b, const Epilogue &epilogue, Bits *out, cudaStream_t stream) {
  using C = Direct<NT>;
  const int64_t tiles_n = (p.N + C::columns - 1) / C::columns, blocks = tiles_n * p.batch;
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  // A kernel for each dtype: around a choice between products, loads would wait for each other.
  if (sizeof(S) == 2 && epilogue.brain)
    matmul_direct<S, sizeof(S) == 2, TILES, NT>
        <<<(unsigned)blocks, C::threads, 0, stream>>>(a, b, epilogue, out, p.M, p.N, (int)p.K, tiles_n);
  else
    matmul_direct<S, false, TILES, NT>
        <<<(unsigned)blocks, C::threads, 0, stream>>>(a, b, epilogue, out, p.M, p.N, (int)p.K, tiles_n);
  return (int)cudaGetLastError();
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

// A matrix's map: boxes of 128 bytes, swizzled, of so many rows. The matrix is dense along its rows, which are aligned
// to 16 bytes.
template <typename S>
bool map_of(CUtensorMap *map, const Dense<S> &matrix, bool brain, int64_t columns, int64_t rows, int64_t batch,
            int box_rows) {
  const Encode encode = encoder();
  if (encode == NULL) return false;
  const int64_t stride = rows == 1 ? (columns + 15) / 16 * 16 : matrix.stride;
  const int64_t apart = batch == 1 ? rows * stride : matrix.batch;
  const cuuint64_t sizes[3] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)batch};
  const cuuint64_t strides[2] = {(cuuint64_t)stride * sizeof(S), (cuuint64_t)apart * sizeof(S)};
  const cuuint32_t box[3] = {kDepth<S>, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
  const CUtensorMapDataType type = sizeof(S) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : brain        ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 3, const_cast<S *>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
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
template <typename S>
struct Hopper {
  const Problem &p;
  Dense<S> a, b;
  const Epilogue &epilogue;
  Bits *out;
  cudaStream_t stream;
  bool nt;
  int device, processors;
};

// tiles is 0 where there are more than an int counts.
Extent extent_of(const Problem &p, int m, int n, int k, bool nt) {
  const int64_t tiles_m = (p.M + m - 1) / m, tiles_n = (p.N + n - 1) / n, tiles = tiles_m * tiles_n * p.batch;
  return {(int)p.M, (int)p.N, (int)tiles_m, (int)tiles_n, tiles < INT32_MAX / 16 ? (int)tiles : 0,
          (int)((p.K + k - 1) / k), p.a[0] != 0, p.b[0] != 0, nt};
}

template <typename S>
bool maps_of(const Hopper<S> &h, CUtensorMap *a_map, CUtensorMap *b_map, int a_rows, int b_columns) {
  const Problem &p = h.p;
  const bool brain = h.epilogue.brain;
  if (!map_of(a_map, h.a, brain, p.K, p.M, p.a[0] != 0 ? p.batch : 1, a_rows)) return false;
  const int64_t batch = p.b[0] != 0 ? p.batch : 1;
  return h.nt ? map_of(b_map, h.b, brain, p.K, p.N, batch, b_columns)
              : map_of(b_map, h.b, brain, p.N, p.K, batch, kDepth<S>);
}

template <int COLUMNS, typename S>
int launch_wide(const Hopper<S> &h) {
  using C = Wide<COLUMNS>;
  CUtensorMap a_map, b_map;
  if (!runs_here<matmul_wide<S, COLUMNS>>(C::bytes, h.device) || !maps_of(h, &a_map, &b_map, C::m, C::n / 2))
    return kNotHere;
  Extent extent = extent_of(h.p, C::m, C::n, kDepth<S>, h.nt);
  if (extent.tiles == 0) return AK_UNSUPPORTED;
  extent.tiles = (extent.tiles_m + 1) / 2 * extent.tiles_n * (int)h.p.batch;  // a cluster's
  const int room = h.processors / C::cluster, clusters = extent.tiles < room ? extent.tiles : room;
  return launch_clusters(matmul_wide<S, COLUMNS>, clusters * C::cluster, C::threads, C::bytes, C::cluster, h.stream,
                         a_map, b_map, h.epilogue, h.out, extent);
}

// So many clusters run at once where each multiprocessor has room for one block: a cluster's are of one group of 16.
int64_t room_for_clusters(int blocks, int processors) {
  return blocks <= 2 ? processors / blocks : processors / 18 * (16 / blocks);
}

// Among how many blocks of a cluster to split the depth of each of so many tiles.
int splits_of(int64_t tiles, int64_t steps, int tokens, int processors) {
  int splits = 1;
  if (tokens <= 32) {
    while (splits < kMostSplits && tiles * splits < kThinBlocks && steps >= splits * 2) splits *= 2;
  } else {
    for (int more = 2; more <= kMostSplits && steps >= 2 * more && tiles * more <= kThinBlocks; more++)
      if (tiles <= room_for_clusters(more, processors)) splits = more;
  }
  return splits;
}

template <int TOKENS, typename S>
int launch_thin(const Hopper<S> &h) {
  using C = Thin<TOKENS>;
  CUtensorMap a_map, b_map;
  if (!runs_here<matmul_thin<S, TOKENS>>(C::bytes, h.device) || !maps_of(h, &a_map, &b_map, C::tokens, C::rows))
    return kNotHere;
  const Extent extent = extent_of(h.p, C::tokens, C::rows, C::parts * kDepth<S>, h.nt);
  if (extent.tiles == 0) return AK_UNSUPPORTED;
  const int splits = splits_of(extent.tiles, extent.steps, TOKENS, h.processors);
  return launch_clusters(matmul_thin<S, TOKENS>, extent.tiles * splits, C::threads, C::bytes, splits, h.stream, a_map,
                         b_map, h.epilogue, h.out, extent, splits);
}

// What a multiprocessor reads in rows of 128 bytes, with tiles of so many tokens.
template <typename S>
int64_t rows_read(const Hopper<S> &h, int tokens) {
  constexpr int kRows = 128;
  const int64_t tiles = blocks_of(h.p, tokens, kRows), steps = (h.p.K + kDepth<S> - 1) / kDepth<S>;
  const int splits = splits_of(tiles, tokens <= 64 ? (steps + 1) / 2 : steps, tokens, h.processors);
  return (tiles * splits + h.processors - 1) / h.processors * ((steps + splits - 1) / splits) * (kRows + tokens);
}

template <typename S>
int launch_hopper(const Hopper<S> &h) {
  const Problem &p = h.p;
  if (p.M > 128 && blocks_of(p, 128, 256) >= kWideFrom) return launch_wide<256>(h);
  if (p.M > 128 && blocks_of(p, 128, 128) >= kWideFrom) return launch_wide<128>(h);
  if (p.M <= 16) return launch_thin<16>(h);
  if (p.M <= 32) return launch_thin<32>(h);
  if (p.M <= 64 || rows_read(h, 64) < rows_read(h, 128)) return launch_thin<64>(h);
  return launch_thin<128>(h);
}

template <typename S>
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
  Bits *y = static_cast<Bits *>(out->data);
  const bool by_rows = along_n && !(along_k && columns.packs);
  const Dense<S> &right = by_rows ? rows : columns;
  // What has no tensor map: rows that are not aligned to 16 bytes or overlap (an expanded tensor).
  const auto maps = [](const Dense<S> &m, int64_t rows) {
    constexpr int pack = 16 / (int)sizeof(S);
    return aligned(m.data, 16) && m.stride % pack == 0 && m.batch % pack == 0 && (rows == 1 || m.stride > 0);
  };
  constexpr int kPack = 16 / (int)sizeof(S);
  if (p.M <= kDirectUpTo && p.M <= 16 && maps(left, 1) && maps(right, 1) && p.K % kPack == 0 && p.K < INT32_MAX / 2) {
    if constexpr (sizeof(S) == 2) {
      if (by_rows && p.N % 8 == 0 && blocks_of(p, 16, Direct<false>::columns) >= kDirectFrom)
        return launch_direct<S, 2, false>(p, left, rows, epilogue, y, stream);
      if (!by_rows && p.M <= 8 && blocks_of(p, 16, Direct<true>::columns) >= kDirectFrom)
        return launch_direct<S, 1, true>(p, left, columns, epilogue, y, stream);
    }
    if (!by_rows && blocks_of(p, 16, Direct<true>::columns) >= kDirectFrom)
      return launch_direct<S, 2, true>(p, left, columns, epilogue, y, stream);
  }
  int major = 0, processors = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ctx->device);
  const bool countable = p.M < kCountable && p.N < kCountable && p.K < kCountable && p.batch < kCountable;
  if (major == 9 && maps(left, p.M) && maps(right, by_rows ? p.K : p.N) && p.K > 0 && countable) {
    const Hopper<S> h = {p, left, right, epilogue, y, stream, !by_rows, ctx->device, processors};
    // wgmma takes float8 along K only.
    const int code = sizeof(S) == 2 || !by_rows ? launch_hopper(h) : kNotHere;
    if (code != kNotHere) return code;
  }
  if constexpr (sizeof(S) == 2) {
    if (blocks_of(p, Large::m, Large::n) >= kLargeFrom)
      return launch<S, Large>(p, left, right, !by_rows, epilogue, y, stream);
  }
  return launch<S, Small>(p, left, right, !by_rows, epilogue, y, stream);
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
  e.brain = out->dtype == AK_BF16;
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
    case AK_F16:
    case AK_BF16: return run<Bits>(a, b, p, e, out, ctx);
    case AK_F8E4M3: return run<Float8>(a, b, p, e, out, ctx);
    default: return AK_UNSUPPORTED;
  }
}
