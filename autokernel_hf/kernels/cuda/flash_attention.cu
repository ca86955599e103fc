// kernel_type: flash_attention
//
// softmax(scale * q @ k.T + mask) @ v with a running maximum and sum over tiles of keys, so that no score leaves the
// block that made it. 16-bit inputs go through the tensor cores (mma.m16n8k16, fp32 sums): a warp keeps its rows'
// scores, weights and outputs in registers, where the weights of one product are already laid out as the next one's
// left operand. float32 is computed in float32. Tiles that causality or the window hides as a whole are never read.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autokernel.h"

constexpr int kWarps = 4;     // tune(block): 2, 4, 8
constexpr int kRowTiles = 2;  // tune(compute): 1, 2
constexpr int kKeys = 64;     // tune(block): 32, 64, 128

namespace {

static_assert(kWarps >= 1 && kWarps <= 16 && kKeys % 16 == 0 && kRowTiles >= 1, "tiles are whole products");

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
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

struct Strides {
  int64_t batch, head, token;
};

struct Attention {
  const void *q, *k, *v, *mask;
  void *out;  // contiguous (B, Hq, Sq, Dv)
  Strides q_strides, k_strides, v_strides;
  bool q_packs, k_packs, v_packs;  // rows are aligned 16-byte packs
  int64_t mask_batch, mask_head, mask_row, mask_column;
  int mask_dtype;
  const int32_t *cu_q, *cu_k;  // starts of packed sequences, or NULL
  int64_t sequences;           // or batches
  int64_t tiles;               // of queries in a sequence
  int64_t heads, heads_per_key, Sq, Sk;
  int D, Dv;
  float scale;
  bool causal;
  int64_t window;  // 0 for none
};

// One head of one sequence: where it starts, and how long it is.
struct Problem {
  int64_t batch, head, q_start, q_length, k_start, k_length;
};

// Packed sequences number `sequences`; one more stands for queries behind the last, which see no key.
__device__ __forceinline__ Problem problem_of(const Attention &a, int64_t index) {
  Problem p = {index / a.heads, index % a.heads, 0, a.Sq, 0, a.Sk};
  if (a.cu_q == NULL) return p;
  const int64_t s = p.batch;
  p.batch = 0;
  const auto bounded = [](int64_t at, int64_t end) { return at < 0 ? 0 : at < end ? at : end; };
  p.q_start = bounded(a.cu_q[s], a.Sq);
  p.k_start = bounded(a.cu_k[s], a.Sk);
  p.q_length = (s < a.sequences ? bounded(a.cu_q[s + 1], a.Sq) : a.Sq) - p.q_start;
  p.k_length = (s < a.sequences ? bounded(a.cu_k[s + 1], a.Sk) : p.k_start) - p.k_start;
  return p;
}

// The keys that rows [first, last] of a sequence may see: [begin, end), begin a multiple of `keys`.
struct Range {
  int64_t begin, end;
};

__device__ __forceinline__ Range range_of(const Attention &a, const Problem &p, int64_t first, int64_t last, int keys) {
  const int64_t shift = p.k_length - p.q_length;
  Range r = {0, p.k_length};
  if (a.causal && last + shift + 1 < r.end) r.end = last + shift + 1;
  if (a.window > 0 && first + shift - a.window + 1 > 0) r.begin = (first + shift - a.window + 1) / keys * keys;
  return r;
}

// Which keys of a tile, counted from its first, a row sees: [begin, end).
struct Seen {
  int begin, end;
};

__device__ __forceinline__ Seen seen_of(const Attention &a, const Problem &p, int64_t row, int64_t first, int keys) {
  const int64_t diagonal = row + p.k_length - p.q_length - first, left = p.k_length - first;
  int64_t begin = a.window > 0 ? diagonal - a.window + 1 : 0;
  int64_t end = a.causal && diagonal + 1 < left ? diagonal + 1 : left;
  begin = begin < 0 ? 0 : begin > keys ? keys : begin;
  end = end < 0 ? 0 : end > keys ? keys : end;
  return {(int)begin, (int)end};
}

// What the mask adds to a score: -inf where a bool mask hides.
__device__ __forceinline__ float mask_at(const Attention &a, const Problem &p, int64_t row, int64_t key) {
  const int64_t at = p.batch * a.mask_batch + p.head * a.mask_head + (p.q_start + row) * a.mask_row +
                     (p.k_start + key) * a.mask_column;
  switch (a.mask_dtype) {
    case AK_BOOL: return static_cast<const uint8_t *>(a.mask)[at] != 0 ? 0.0f : -INFINITY;
    case AK_F32: return static_cast<const float *>(a.mask)[at];
    case AK_F16: return to_float(static_cast<const __half *>(a.mask)[at]);
    default: return to_float(static_cast<const __nv_bfloat16 *>(a.mask)[at]);
  }
}

template <typename T>
__device__ __forceinline__ const T *rows_of(const void *data, Strides strides, const Problem &p, int64_t head,
                                            int64_t start) {
  return static_cast<const T *>(data) + p.batch * strides.batch + head * strides.head + start * strides.token;
}

// The reference of exponentials under a maximum: 0 for -inf, so that exp(-inf) is 0 and not NaN.
__device__ __forceinline__ float reference(float max) { return max == -INFINITY ? 0.0f : max; }

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

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// Inputs below -126 give 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ROWS rows of `width` elements from row `first` on into shared memory, WIDTH columns wide, zeros where they end. The
// rows there are padded by 16 bytes, so that eight of them start in different banks.
template <typename T, int ROWS, int WIDTH, int THREADS>
__device__ __forceinline__ void load_rows(T *tile, const T *data, int64_t stride, bool packs, int64_t first,
                                          int64_t rows, int width) {
  constexpr int kChunks = WIDTH / 8;
  if (packs) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
      const int64_t row = first + i / kChunks;
      const int column = i % kChunks * 8, left = row < rows ? width - column : 0;
      const int count = left < 8 ? left > 0 ? left : 0 : 8;
      const T *from = count > 0 ? data + row * stride + column : data;
      copy_later(tile + i / kChunks * (WIDTH + 8) + column, from, 2 * count);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
    const int64_t row = first + i / kChunks;
    const int column = i % kChunks * 8, left = row < rows ? width - column : 0;
    const T *from = data + row * stride + column;
    Pack<T, 8> values;
#pragma unroll
    for (int j = 0; j < 8; j++) values.v[j] = j < left ? from[j] : from_float<T>(0.0f);
    store<T, 8>(tile + i / kChunks * (WIDTH + 8) + column, values);
  }
}

// WIDTH: the larger of D and Dv, rounded up. TILES: 16-row tiles of a warp.
template <int WIDTH>
struct Shape {
  static constexpr int tiles = WIDTH > 128 ? 1 : kRowTiles, keys = WIDTH > 128 ? 32 : kKeys;
  static constexpr int threads = 32 * kWarps, rows = 16 * tiles * kWarps, stride = WIDTH + 8;
  static constexpr int bytes = (rows + 2 * keys) * stride * 2;
  static constexpr int mask_stride = keys + 4, mask_bytes = kWarps * 16 * mask_stride * 4;  // only with a mask
};

template <typename T, int WIDTH>
__global__ void __launch_bounds__(Shape<WIDTH>::threads, 1) attend(Attention a) {
  using S = Shape<WIDTH>;
  constexpr int kStride = S::stride;
  extern __shared__ __align__(16) unsigned char memory[];
  T *q_tile = reinterpret_cast<T *>(memory), *k_tile = q_tile + S::rows * kStride, *v_tile = k_tile + S::keys * kStride;
  float *mask = reinterpret_cast<float *>(v_tile + S::keys * kStride) + threadIdx.x / 32 * 16 * S::mask_stride;
  const Problem p = problem_of(a, blockIdx.x / a.tiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // ldmatrix reads four 8x8 matrices; lanes 8i to 8i + 7 name the rows of the i-th.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const T *q = rows_of<T>(a.q, a.q_strides, p, p.head, p.q_start);
  const T *k = rows_of<T>(a.k, a.k_strides, p, p.head / a.heads_per_key, p.k_start);
  const T *v = rows_of<T>(a.v, a.v_strides, p, p.head / a.heads_per_key, p.k_start);
  T *out = static_cast<T *>(a.out) + ((p.batch * a.heads + p.head) * a.Sq + p.q_start) * a.Dv;
  const float to_log2 = 1.4426950408889634f, scale = a.scale * to_log2;  // scores in powers of 2: exp2 is cheaper

  // The last rows have the most keys under causality: they go first. (Tiles beyond a.tiles only where max_seqlen_q is
  // less than the longest sequence.)
  for (int64_t tile = a.tiles - 1 - blockIdx.x % a.tiles; tile * S::rows < p.q_length; tile += a.tiles) {
    const int64_t top = tile * S::rows, warp_top = top + warp * 16 * S::tiles;
    const int64_t bottom = top + S::rows < p.q_length ? top + S::rows - 1 : p.q_length - 1;
    const Range range = range_of(a, p, top, bottom, S::keys);

    load_rows<T, S::rows, WIDTH, S::threads>(q_tile, q, a.q_strides.token, a.q_packs, top, p.q_length, a.D);
    if (range.begin < range.end)
      load_rows<T, S::keys, WIDTH, S::threads>(k_tile, k, a.k_strides.token, a.k_packs, range.begin, p.k_length, a.D);
    end_group();

    float sums[S::tiles][WIDTH / 8][4] = {};
    float max[S::tiles][2], weight[S::tiles][2];  // of rows g and g + 8; the weights of this lane's columns only
#pragma unroll
    for (int i = 0; i < S::tiles; i++) {
      max[i][0] = max[i][1] = -INFINITY;
      weight[i][0] = weight[i][1] = 0.0f;
    }

    for (int64_t first = range.begin; first < range.end; first += S::keys) {
      wait_for_groups<0>();
      __syncthreads();  // q and k are here, and everyone is done with v
      load_rows<T, S::keys, WIDTH, S::threads>(v_tile, v, a.v_strides.token, a.v_packs, first, p.k_length, a.Dv);
      end_group();

      float scores[S::tiles][S::keys / 8][4] = {};
#pragma unroll 2
      for (int d = 0; d < a.D; d += 16) {  // zeros stand behind column D
        uint32_t rows[S::tiles][4];
#pragma unroll
        for (int i = 0; i < S::tiles; i++)
          ldmatrix(rows[i], q_tile + ((warp * S::tiles + i) * 16 + matrix % 2 * 8 + matrix_row) * kStride + d +
                                matrix / 2 * 8);
#pragma unroll
        for (int j = 0; j < S::keys / 16; j++) {
          uint32_t columns[4];
          ldmatrix(columns, k_tile + (16 * j + matrix / 2 * 8 + matrix_row) * kStride + d + matrix % 2 * 8);
#pragma unroll
          for (int i = 0; i < S::tiles; i++) {
            multiply(scores[i][2 * j], rows[i], columns[0], columns[1], T());
            multiply(scores[i][2 * j + 1], rows[i], columns[2], columns[3], T());
          }
        }
      }

      // All of this warp's rows see all of these keys, and nothing is added: the usual case away from the edges.
      const int64_t last = first + S::keys - 1, shift = p.k_length - p.q_length;
      const bool plain = a.mask == NULL && last < p.k_length && (!a.causal || last <= warp_top + shift) &&
                         (a.window <= 0 || first > warp_top + 16 * S::tiles - 1 + shift - a.window);
#pragma unroll
      for (int i = 0; i < S::tiles; i++) {
#pragma unroll
        for (int j = 0; j < S::keys / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) scores[i][j][e] *= scale;
        if (!plain) {
          if (a.mask != NULL) {  // the warp reads its part of the mask row by row, and each lane picks its elements
            __syncwarp();
#pragma unroll 1
            for (int n = lane; n < 16 * S::keys; n += 32) {
              const int64_t row = warp_top + 16 * i + n / S::keys, key = first + n % S::keys;
              const bool inside = row < p.q_length && key < p.k_length;
              mask[n / S::keys * S::mask_stride + n % S::keys] = inside ? mask_at(a, p, row, key) * to_log2 : 0.0f;
            }
            __syncwarp();
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const Seen seen = seen_of(a, p, warp_top + 16 * i + lane / 4 + half * 8, first, S::keys);
#pragma unroll
            for (int j = 0; j < S::keys / 8; j++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const int key = 8 * j + lane % 4 * 2 + e;
                float &score = scores[i][j][2 * half + e];
                if (a.mask != NULL) {
                  const float added = mask[(lane / 4 + half * 8) * S::mask_stride + key];
                  score = added == -INFINITY ? -INFINITY : score + added;
                }
                score = key < seen.begin || key >= seen.end ? -INFINITY : score;
              }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {  // rows g and g + 8 of the tile
          float largest = max[i][half];
#pragma unroll
          for (int j = 0; j < S::keys / 8; j++)
            largest = fmaxf(largest, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
          const float zero = reference(largest), shrink = exp2_fast(max[i][half] - zero);
          max[i][half] = largest;
          float added = 0.0f;
#pragma unroll
          for (int j = 0; j < S::keys / 8; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
              scores[i][j][e] = exp2_fast(scores[i][j][e] - zero);
              added += scores[i][j][e];
            }
          weight[i][half] = weight[i][half] * shrink + added;
#pragma unroll
          for (int j = 0; j < WIDTH / 8; j++) {
            sums[i][j][2 * half] *= shrink;
            sums[i][j][2 * half + 1] *= shrink;
          }
        }
      }

      wait_for_groups<0>();
      __syncthreads();  // v is here, and everyone is done with k
      if (first + S::keys < range.end)
        load_rows<T, S::keys, WIDTH, S::threads>(k_tile, k, a.k_strides.token, a.k_packs, first + S::keys, p.k_length,
                                                 a.D);
      end_group();
#pragma unroll
      for (int n = 0; n < S::keys / 16; n++) {
        uint32_t weights[S::tiles][4];
#pragma unroll
        for (int i = 0; i < S::tiles; i++) {
          weights[i][0] = pack(scores[i][2 * n][0], scores[i][2 * n][1], T());
          weights[i][1] = pack(scores[i][2 * n][2], scores[i][2 * n][3], T());
          weights[i][2] = pack(scores[i][2 * n + 1][0], scores[i][2 * n + 1][1], T());
          weights[i][3] = pack(scores[i][2 * n + 1][2], scores[i][2 * n + 1][3], T());
        }
#pragma unroll
        for (int d = 0; d < WIDTH; d += 16) {
          if (d >= a.Dv) break;
          uint32_t values[4];
          ldmatrix_transposed(values, v_tile + (16 * n + matrix % 2 * 8 + matrix_row) * kStride + d + matrix / 2 * 8);
#pragma unroll
          for (int i = 0; i < S::tiles; i++) {
            multiply(sums[i][d / 8], weights[i], values[0], values[1], T());
            multiply(sums[i][d / 8 + 1], weights[i], values[2], values[3], T());
          }
        }
      }
    }

#pragma unroll
    for (int i = 0; i < S::tiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float total = weight[i][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const float share = total == 0.0f ? 0.0f : 1.0f / total;  // a query that sees no key gives 0
        const int64_t row = warp_top + 16 * i + lane / 4 + half * 8;
        if (row >= p.q_length) continue;
        T *y = out + row * a.Dv;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
          const int column = 8 * j + lane % 4 * 2;
          const float low = sums[i][j][2 * half] * share, high = sums[i][j][2 * half + 1] * share;
          if (column + 1 < a.Dv && a.Dv % 2 == 0) {
            *reinterpret_cast<uint32_t *>(y + column) = pack(low, high, T());
          } else {
            if (column < a.Dv) y[column] = from_float<T>(low);
            if (column + 1 < a.Dv) y[column + 1] = from_float<T>(high);
          }
        }
      }
    }
    wait_for_groups<0>();
    __syncthreads();  // everyone is done with q before the next tile's
  }
}

// --- float32 ---

template <int ROWS, int WIDTH, int THREADS>
__device__ __forceinline__ void load_rows_float(float *tile, const float *data, int64_t stride, bool packs,
                                                int64_t first, int64_t rows, int width) {
#pragma unroll 2
  for (int i = threadIdx.x; i < ROWS * (WIDTH / 4); i += THREADS) {
    const int64_t row = first + i / (WIDTH / 4);
    const int column = i % (WIDTH / 4) * 4, left = row < rows ? width - column : 0;
    const float *from = data + row * stride + column;
    Pack<float, 4> values;
    if (packs && left >= 4) {
      values = load<float, 4>(from);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) values.v[j] = j < left ? from[j] : 0.0f;
    }
    store<float, 4>(tile + i / (WIDTH / 4) * (WIDTH + 4) + column, values);
  }
}

template <int WIDTH>
struct FloatShape {
  static constexpr int rows = WIDTH > 128 ? 32 : 64, keys = 32, threads = rows / 4 * 8, stride = WIDTH + 4;
  static constexpr int bytes = ((rows + keys) * stride + rows * (keys + 4)) * 4;
};

// A thread has four rows (ty + rows / 4 * i) and of each every eighth key and four of every 32 columns.
template <int WIDTH>
__global__ void __launch_bounds__(FloatShape<WIDTH>::threads, 1) attend_float(Attention a) {
  using S = FloatShape<WIDTH>;
  constexpr int kStride = S::stride, kStep = S::rows / 4, kWeights = S::keys + 4;
  extern __shared__ __align__(16) unsigned char memory[];
  float *q_tile = reinterpret_cast<float *>(memory), *kv_tile = q_tile + S::rows * kStride;
  float *weights = kv_tile + S::keys * kStride;
  const Problem p = problem_of(a, blockIdx.x / a.tiles);
  const int tx = threadIdx.x % 8, ty = threadIdx.x / 8;
  const float *q = rows_of<float>(a.q, a.q_strides, p, p.head, p.q_start);
  const float *k = rows_of<float>(a.k, a.k_strides, p, p.head / a.heads_per_key, p.k_start);
  const float *v = rows_of<float>(a.v, a.v_strides, p, p.head / a.heads_per_key, p.k_start);
  float *out = static_cast<float *>(a.out) + ((p.batch * a.heads + p.head) * a.Sq + p.q_start) * a.Dv;

  for (int64_t tile = a.tiles - 1 - blockIdx.x % a.tiles; tile * S::rows < p.q_length; tile += a.tiles) {
    const int64_t top = tile * S::rows;
    const int64_t bottom = top + S::rows < p.q_length ? top + S::rows - 1 : p.q_length - 1;
    const Range range = range_of(a, p, top, bottom, S::keys);
    load_rows_float<S::rows, WIDTH, S::threads>(q_tile, q, a.q_strides.token, a.q_packs, top, p.q_length, a.D);
    float sums[4][WIDTH / 32][4] = {}, max[4], weight[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) max[i] = -INFINITY;

    for (int64_t first = range.begin; first < range.end; first += S::keys) {
      load_rows_float<S::keys, WIDTH, S::threads>(kv_tile, k, a.k_strides.token, a.k_packs, first, p.k_length, a.D);
      __syncthreads();
      float scores[4][4] = {};
#pragma unroll 4
      for (int d = 0; d < a.D; d += 4) {  // zeros stand behind column D
        Pack<float, 4> x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = load<float, 4>(q_tile + (ty + kStep * i) * kStride + d);
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] = load<float, 4>(kv_tile + (tx + 8 * j) * kStride + d);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[i][j] += x[i].v[e] * y[j].v[e];
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int64_t row = top + ty + kStep * i;
        const Seen seen = seen_of(a, p, row, first, S::keys);
        float largest = max[i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int key = tx + 8 * j;
          float score = scores[i][j] * a.scale;
          if (key < seen.begin || key >= seen.end) {
            score = -INFINITY;
          } else if (a.mask != NULL && row < p.q_length) {
            const float added = mask_at(a, p, row, first + key);
            score = added == -INFINITY ? -INFINITY : score + added;
          }
          scores[i][j] = score;
          largest = fmaxf(largest, score);
        }
#pragma unroll
        for (int lanes = 4; lanes > 0; lanes /= 2)
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        const float zero = reference(largest), shrink = expf(max[i] - zero);
        max[i] = largest;
        weight[i] *= shrink;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float w = expf(scores[i][j] - zero);
          weight[i] += w;
          weights[(ty + kStep * i) * kWeights + tx + 8 * j] = w;
        }
#pragma unroll
        for (int c = 0; c < WIDTH / 32; c++)
#pragma unroll
          for (int e = 0; e < 4; e++) sums[i][c][e] *= shrink;
      }
      __syncthreads();  // everyone is done with k; the weights are here
      load_rows_float<S::keys, WIDTH, S::threads>(kv_tile, v, a.v_strides.token, a.v_packs, first, p.k_length, a.Dv);
      __syncthreads();
#pragma unroll 2
      for (int n = 0; n < S::keys; n++) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = weights[(ty + kStep * i) * kWeights + n];
#pragma unroll
        for (int c = 0; c < WIDTH / 32; c++) {
          if (32 * c >= a.Dv) break;
          const Pack<float, 4> y = load<float, 4>(kv_tile + n * kStride + 32 * c + 4 * tx);
#pragma unroll
          for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][c][e] += w[i] * y.v[e];
        }
      }
      __syncthreads();  // everyone is done with v and the weights
    }

#pragma unroll
    for (int i = 0; i < 4; i++) {
      float total = weight[i];
#pragma unroll
      for (int lanes = 4; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
      const float share = total == 0.0f ? 0.0f : 1.0f / total;
      const int64_t row = top + ty + kStep * i;
      if (row >= p.q_length) continue;
#pragma unroll
      for (int c = 0; c < WIDTH / 32; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = 32 * c + 4 * tx + e;
          if (column < a.Dv) out[row * a.Dv + column] = sums[i][c][e] * share;
        }
    }
    __syncthreads();  // everyone is done with q before the next tile's
  }
}

// --- host ---

bool dense(const AkTensor *t) { return t->sizes[3] <= 1 || t->strides[3] == 1; }

int64_t stride_of(const AkTensor *t, int d) { return t->sizes[d] == 1 ? 0 : t->strides[d]; }

Strides strides_of(const AkTensor *t) { return {stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)}; }

bool packs(const AkTensor *t, Strides s, int pack) {
  return (uintptr_t)t->data % 16 == 0 && s.batch % pack == 0 && s.head % pack == 0 && s.token % pack == 0;
}

template <typename K>
int launch(K kernel, Attention &a, int rows, int threads, int bytes, int64_t longest, cudaStream_t stream) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
    cudaGetLastError();  // this device has less shared memory
    return AK_UNSUPPORTED;
  }
  a.tiles = (longest + rows - 1) / rows;
  const int64_t blocks = a.tiles * a.heads * (a.sequences + (a.cu_q != NULL ? 1 : 0));
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  kernel<<<(unsigned)blocks, threads, bytes, stream>>>(a);
  return (int)cudaGetLastError();
}

template <typename T, int WIDTH>
int run(Attention &a, int64_t longest, cudaStream_t stream) {
  using S = Shape<WIDTH>;
  const int bytes = S::bytes + (a.mask != NULL ? S::mask_bytes : 0);
  return launch(attend<T, WIDTH>, a, S::rows, S::threads, bytes, longest, stream);
}

template <int WIDTH>
int run_float(Attention &a, int64_t longest, cudaStream_t stream) {
  using S = FloatShape<WIDTH>;
  return launch(attend_float<WIDTH>, a, S::rows, S::threads, S::bytes, longest, stream);
}

}  // namespace

extern "C" int flash_attention(const AkTensor *q, const AkTensor *k, const AkTensor *v, const AkTensor *mask,
                               const AkTensor *cu_seqlens_q, const AkTensor *cu_seqlens_k, int64_t max_seqlen_q,
                               int64_t max_seqlen_k, double scale, int32_t causal, int64_t window,
                               const AkTensor *out, const AkContext *ctx) {
  if (k->dtype != q->dtype || v->dtype != q->dtype) return AK_UNSUPPORTED;
  if (!dense(q) || !dense(k) || !dense(v)) return AK_NEED_CONTIGUOUS;
  const int64_t D = q->sizes[3], Dv = v->sizes[3], widest = D > Dv ? D : Dv;
  if (widest > 256) return AK_UNSUPPORTED;
  const int pack = q->dtype == AK_F32 ? 4 : 8;
  Attention a = {};
  a.q = q->data;
  a.k = k->data;
  a.v = v->data;
  a.out = out->data;
  a.q_strides = strides_of(q);
  a.k_strides = strides_of(k);
  a.v_strides = strides_of(v);
  a.q_packs = packs(q, a.q_strides, pack);
  a.k_packs = packs(k, a.k_strides, pack);
  a.v_packs = packs(v, a.v_strides, pack);
  a.sequences = q->sizes[0];
  a.heads = q->sizes[1];
  a.heads_per_key = k->sizes[1] > 0 ? a.heads / k->sizes[1] : 1;
  a.Sq = q->sizes[2];
  a.Sk = k->sizes[2];
  a.D = (int)D;
  a.Dv = (int)Dv;
  a.scale = (float)scale;
  a.causal = causal != 0;
  a.window = window > 0 ? window : 0;
  if (mask != NULL) {
    if (mask->ndim > 4) return AK_UNSUPPORTED;
    if (mask->dtype != AK_BOOL && mask->dtype != AK_F32 && mask->dtype != AK_F16 && mask->dtype != AK_BF16)
      return AK_UNSUPPORTED;
    int64_t strides[4] = {0, 0, 0, 0};  // missing dimensions and those of one element are broadcast
    for (int d = 0; d < mask->ndim; d++) strides[4 - mask->ndim + d] = stride_of(mask, d);
    a.mask = mask->data;
    a.mask_dtype = mask->dtype;
    a.mask_batch = strides[0];
    a.mask_head = strides[1];
    a.mask_row = strides[2];
    a.mask_column = strides[3];
  }
  int64_t longest = a.Sq;
  if ((cu_seqlens_q == NULL) != (cu_seqlens_k == NULL)) return AK_UNSUPPORTED;
  if (cu_seqlens_q != NULL) {
    for (const AkTensor *bounds : {cu_seqlens_q, cu_seqlens_k}) {
      if (bounds->dtype != AK_I32 || bounds->ndim != 1 || bounds->sizes[0] < 1) return AK_UNSUPPORTED;
      if (bounds->sizes[0] > 1 && bounds->strides[0] != 1) return AK_NEED_CONTIGUOUS;
    }
    if (q->sizes[0] != 1 || cu_seqlens_q->sizes[0] != cu_seqlens_k->sizes[0]) return AK_UNSUPPORTED;
    a.cu_q = static_cast<const int32_t *>(cu_seqlens_q->data);
    a.cu_k = static_cast<const int32_t *>(cu_seqlens_k->data);
    a.sequences = cu_seqlens_q->sizes[0] - 1;
    if (max_seqlen_q > 0 && max_seqlen_q < longest) longest = max_seqlen_q;
  }
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  switch (q->dtype) {
    case AK_F32:
      return widest <= 64    ? run_float<64>(a, longest, stream)
             : widest <= 128 ? run_float<128>(a, longest, stream)
                             : run_float<256>(a, longest, stream);
    case AK_F16:
      return widest <= 64    ? run<__half, 64>(a, longest, stream)
             : widest <= 128 ? run<__half, 128>(a, longest, stream)
                             : run<__half, 256>(a, longest, stream);
    case AK_BF16:
      return widest <= 64    ? run<__nv_bfloat16, 64>(a, longest, stream)
             : widest <= 128 ? run<__nv_bfloat16, 128>(a, longest, stream)
                             : run<__nv_bfloat16, 256>(a, longest, stream);
    default: return AK_UNSUPPORTED;
  }
}
