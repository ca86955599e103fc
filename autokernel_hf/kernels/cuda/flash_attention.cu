// kernel_type: flash_attention
//
// softmax(scale * q @ k.T + mask) @ v with a running maximum and sum over tiles of keys, so that no score leaves the
// block that made it. Tiles that causality or the window hides as a whole are never read. 16-bit inputs take a path
// that the shape and the device choose:
//
// - On Hopper the copy engine brings tiles to shared memory (tensor maps, mbarriers) and warp groups multiply from
//   there (wgmma), one while the other one's scores become weights. Where there is a mask, further warps look at it
//   first: tiles that it hides are never fetched, and what it adds to others lies in shared memory in time. Not with
//   packed sequences.
// - From Hopper on, one query a sequence (decoding) has its keys split among the blocks of a cluster.
// - Else they go through mma.m16n8k16: a warp keeps its rows' scores, weights and outputs in registers, where the
//   weights of one product are already laid out as the next one's left operand.
//
// float32 is computed in float32.
#include <cuda.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "autokernel.h"

constexpr int kWarps = 4;               // tune(block): 2, 4, 8
constexpr int kRowTiles = 2;            // tune(compute): 1, 2
constexpr int kKeys = 64;               // tune(block): 32, 64, 128
constexpr bool kInTurn = true;          // tune(algorithm): false, true
constexpr int64_t kShort = 1024;        // tune(launch): 0, 512, 1024, 2048, 4096
constexpr int kDecodeStages = 3;        // tune(memory): 2, 3, 4
constexpr int64_t kDecodeBlocks = 256;  // tune(launch): 64, 128, 256, 512

constexpr int kMostSplits = 16;  // blocks of a cluster on Hopper; 8 elsewhere
constexpr int kNotHere = -100;   // a kernel that this device, its driver or the build has not

namespace {

static_assert(kWarps >= 1 && kWarps <= 16 && kKeys % 16 == 0 && kRowTiles >= 1, "tiles are whole products");

// Elements of 16 bits as the kernels see them: float16 or, if `brain`, bfloat16. Kernels for any device are one for both;
// decoding and those for Hopper, which a choice between products slows down by 5 %, are one for each.
using Bits = uint16_t;

// The toolkit's headers for these dtypes take longer to compile than the kernels' use of them.
__device__ __forceinline__ float to_float(uint32_t bits, bool brain) {
  if (brain) return __uint_as_float(bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)bits));
  return value;
}

// Two neighbours in memory, the first in the low half.
template <bool BRAIN>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (BRAIN)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t pack(float low, float high, bool brain) {
  return brain ? pack<true>(low, high) : pack<false>(low, high);
}

// f is called with whether elements are bfloat16, as a constant.
template <typename F>
__device__ __forceinline__ void by_dtype(bool brain, F f) {
  if (brain)
    f(std::true_type());
  else
    f(std::false_type());
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
  bool brain;  // elements of 16 bits are bfloat16, not float16
  float scale;
  bool causal;
  int64_t window;  // 0 for none
};

// One head of one sequence: where it starts, and how long it is.
struct Problem {
  int64_t batch, head, q_start, q_length, k_start, k_length;
};

// Where nothing is packed.
__device__ __forceinline__ Problem whole_problem(const Attention &a, uint32_t index) {
  const uint32_t batch = index / (uint32_t)a.heads;
  return {batch, index - batch * (uint32_t)a.heads, 0, a.Sq, 0, a.Sk};
}

// Packed sequences number `sequences`; one more stands for queries behind the last, which see no key.
__device__ __forceinline__ Problem problem_of(const Attention &a, uint32_t index) {
  Problem p = whole_problem(a, index);
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

__device__ __forceinline__ int64_t mask_place(const Attention &a, const Problem &p, int64_t row, int64_t key) {
  return p.batch * a.mask_batch + p.head * a.mask_head + (p.q_start + row) * a.mask_row + (p.k_start + key) * a.mask_column;
}

// What the mask adds to a score: -inf where a bool mask hides.
__device__ __forceinline__ float mask_at(const Attention &a, const Problem &p, int64_t row, int64_t key) {
  const int64_t at = mask_place(a, p, row, key);
  switch (a.mask_dtype) {
    case AK_BOOL: return static_cast<const uint8_t *>(a.mask)[at] != 0 ? 0.0f : -INFINITY;
    case AK_F32: return static_cast<const float *>(a.mask)[at];
    case AK_F16: return to_float(static_cast<const Bits *>(a.mask)[at], false);
    default: return to_float(static_cast<const Bits *>(a.mask)[at], true);
  }
}

// What a mask adds, for scores in powers of 2. The lowest numbers of float32 and bfloat16, with which models hide, stay
// numbers: keys that all have them are all alike, and not all hidden.
__device__ __forceinline__ float in_log2(float added) {
  return added == -INFINITY ? added : fmaxf(added * 1.4426950408889634f, -3.4028234e38f);
}

// The mask of a warp's 16 rows and KEYS keys into its part of shared memory, as `added` makes of it; 0 outside of the first
// `rows` and `keys`. Several loads are on their way at a time: one after the other they take longer than all else.
template <int KEYS, int AT_ONCE, typename E, typename F>
__device__ __forceinline__ void stage_mask(const E *mask, int64_t row_stride, int64_t column_stride, int64_t rows,
                                           int64_t keys, float *tile, int stride, F added) {
  static_assert(16 * KEYS % (32 * AT_ONCE) == 0, "a warp has whole groups of loads");
#pragma unroll 1
  for (int from = threadIdx.x % 32; from < 16 * KEYS; from += 32 * AT_ONCE) {
    E raw[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int row = (from + 32 * u) / KEYS, key = (from + 32 * u) % KEYS;
      raw[u] = row < rows && key < keys ? mask[row * row_stride + key * column_stride] : E();
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int row = (from + 32 * u) / KEYS, key = (from + 32 * u) % KEYS;
      tile[row * stride + key] = row < rows && key < keys ? added(raw[u]) : 0.0f;
    }
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

// Inputs below -126 give 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ROWS rows of `width` elements from row `first` on into shared memory, WIDTH columns wide, zeros where they end. The
// rows there are padded by 16 bytes, so that eight of them start in different banks.
template <int ROWS, int WIDTH, int THREADS>
__device__ __forceinline__ void load_rows(Bits *tile, const Bits *data, int64_t stride, bool packs, int64_t first,
                                          int64_t rows, int width) {
  constexpr int kChunks = WIDTH / 8;
  if (packs) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
      const int64_t row = first + i / kChunks;
      const int column = i % kChunks * 8, left = row < rows ? width - column : 0;
      const int count = left < 8 ? left > 0 ? left : 0 : 8;
      const Bits *from = count > 0 ? data + row * stride + column : data;
      copy_later(tile + i / kChunks * (WIDTH + 8) + column, from, 2 * count);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kChunks; i += THREADS) {
    const int64_t row = first + i / kChunks;
    const int column = i % kChunks * 8, left = row < rows ? width - column : 0;
    const Bits *from = data + row * stride + column;
    Bits *to = tile + i / kChunks * (WIDTH + 8) + column;
#pragma unroll 4
    for (int j = 0; j < 8; j++) to[j] = j < left ? from[j] : (Bits)0;
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

template <int WIDTH>
__global__ void __launch_bounds__(Shape<WIDTH>::threads, 1) attend(Attention a) {
  using S = Shape<WIDTH>;
  constexpr int kStride = S::stride;
  extern __shared__ __align__(16) unsigned char memory[];
  Bits *q_tile = reinterpret_cast<Bits *>(memory), *k_tile = q_tile + S::rows * kStride;
  Bits *v_tile = k_tile + S::keys * kStride;
  float *mask = reinterpret_cast<float *>(v_tile + S::keys * kStride) + threadIdx.x / 32 * 16 * S::mask_stride;
  const Problem p = problem_of(a, blockIdx.x / (uint32_t)a.tiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // ldmatrix reads four 8x8 matrices; lanes 8i to 8i + 7 name the rows of the i-th.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const Bits *q = rows_of<Bits>(a.q, a.q_strides, p, p.head, p.q_start);
  const Bits *k = rows_of<Bits>(a.k, a.k_strides, p, (uint32_t)p.head / (uint32_t)a.heads_per_key, p.k_start);
  const Bits *v = rows_of<Bits>(a.v, a.v_strides, p, (uint32_t)p.head / (uint32_t)a.heads_per_key, p.k_start);
  Bits *out = static_cast<Bits *>(a.out) + ((p.batch * a.heads + p.head) * a.Sq + p.q_start) * a.Dv;
  const float to_log2 = 1.4426950408889634f, scale = a.scale * to_log2;  // scores in powers of 2: exp2 is cheaper

  // The last rows have the most keys under causality: they go first. (Tiles beyond a.tiles only where max_seqlen_q is
  // less than the longest sequence.)
  for (int64_t tile = a.tiles - 1 - blockIdx.x % (uint32_t)a.tiles; tile * S::rows < p.q_length; tile += a.tiles) {
    const int64_t top = tile * S::rows, warp_top = top + warp * 16 * S::tiles;
    const int64_t bottom = top + S::rows < p.q_length ? top + S::rows - 1 : p.q_length - 1;
    const Range range = range_of(a, p, top, bottom, S::keys);

    load_rows<S::rows, WIDTH, S::threads>(q_tile, q, a.q_strides.token, a.q_packs, top, p.q_length, a.D);
    if (range.begin < range.end)
      load_rows<S::keys, WIDTH, S::threads>(k_tile, k, a.k_strides.token, a.k_packs, range.begin, p.k_length, a.D);
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
      load_rows<S::keys, WIDTH, S::threads>(v_tile, v, a.v_strides.token, a.v_packs, first, p.k_length, a.Dv);
      end_group();

      float scores[S::tiles][S::keys / 8][4] = {};
#pragma unroll 2
      for (int d = 0; d < a.D; d += 16) {  // zeros stand behind column D
        uint32_t rows[S::tiles][4];
#pragma unroll
        for (int i = 0; i < S::tiles; i++)
          ldmatrix(rows[i], q_tile + ((warp * S::tiles + i) * 16 + matrix % 2 * 8 + matrix_row) * kStride + d +
                                matrix / 2 * 8);
        by_dtype(a.brain, [&](auto brain) {
#pragma unroll
          for (int j = 0; j < S::keys / 16; j++) {
            uint32_t columns[4];
            ldmatrix(columns, k_tile + (16 * j + matrix / 2 * 8 + matrix_row) * kStride + d + matrix % 2 * 8);
#pragma unroll
            for (int i = 0; i < S::tiles; i++) {
              multiply<brain.value>(scores[i][2 * j], rows[i], columns[0], columns[1]);
              multiply<brain.value>(scores[i][2 * j + 1], rows[i], columns[2], columns[3]);
            }
          }
        });
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
            const int64_t row = warp_top + 16 * i, at = mask_place(a, p, row, first);
            const auto stage = [&](auto *from, auto added) {
              stage_mask<S::keys, WIDTH <= 64 ? 8 : 4>(from + at, a.mask_row, a.mask_column, p.q_length - row,
                                                       p.k_length - first, mask, S::mask_stride, added);
            };
            if (a.mask_dtype == AK_BOOL)
              stage(static_cast<const uint8_t *>(a.mask), [](uint8_t shown) { return shown != 0 ? 0.0f : -INFINITY; });
            else if (a.mask_dtype == AK_F32)
              stage(static_cast<const float *>(a.mask), [&](float value) { return in_log2(value); });
            else
              stage(static_cast<const Bits *>(a.mask),
                    [&](Bits bits) { return in_log2(to_float(bits, a.mask_dtype == AK_BF16)); });
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
        load_rows<S::keys, WIDTH, S::threads>(k_tile, k, a.k_strides.token, a.k_packs, first + S::keys, p.k_length,
                                                 a.D);
      end_group();
      by_dtype(a.brain, [&](auto brain) {
#pragma unroll
        for (int n = 0; n < S::keys / 16; n++) {
          uint32_t weights[S::tiles][4];
#pragma unroll
          for (int i = 0; i < S::tiles; i++) {
            weights[i][0] = pack<brain.value>(scores[i][2 * n][0], scores[i][2 * n][1]);
            weights[i][1] = pack<brain.value>(scores[i][2 * n][2], scores[i][2 * n][3]);
            weights[i][2] = pack<brain.value>(scores[i][2 * n + 1][0], scores[i][2 * n + 1][1]);
            weights[i][3] = pack<brain.value>(scores[i][2 * n + 1][2], scores[i][2 * n + 1][3]);
          }
#pragma unroll
          for (int d = 0; d < WIDTH; d += 16) {
            if (d >= a.Dv) break;
            uint32_t values[4];
            ldmatrix_transposed(values, v_tile + (16 * n + matrix % 2 * 8 + matrix_row) * kStride + d + matrix / 2 * 8);
#pragma unroll
            for (int i = 0; i < S::tiles; i++) {
              multiply<brain.value>(sums[i][d / 8], weights[i], values[0], values[1]);
              multiply<brain.value>(sums[i][d / 8 + 1], weights[i], values[2], values[3]);
            }
          }
        }
      });
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
        Bits *y = out + row * a.Dv;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
          const int column = 8 * j + lane % 4 * 2;
          const float low = sums[i][j][2 * half] * share, high = sums[i][j][2 * half + 1] * share;
          const uint32_t pair = pack(low, high, a.brain);
          if (column + 1 < a.Dv && a.Dv % 2 == 0) {
            *reinterpret_cast<uint32_t *>(y + column) = pair;
          } else {
            if (column < a.Dv) y[column] = (Bits)pair;
            if (column + 1 < a.Dv) y[column + 1] = (Bits)(pair >> 16);
          }
        }
      }
    }
    wait_for_groups<0>();
    __syncthreads();  // everyone is done with q before the next tile's
  }
}

// Marks kernels that an architecture has no instructions for: never launched, with this much static shared memory.
__device__ __forceinline__ void not_for_this_architecture() {
  __shared__ uint32_t mark[1];
  *static_cast<volatile uint32_t *>(mark) = 0;
}

// --- decoding: one query a sequence ---

// Each warp walks over tiles of 16 keys of its own, with copies some tiles ahead and no barrier; the 16 rows of its
// products are the heads that share a head of keys. The blocks of a cluster split the keys; what they have summed up is
// put together in shared memory, always in the same order.
template <int WIDTH>
struct Decode {
  static constexpr int warps = WIDTH > 128 ? 2 : 4, threads = 32 * warps, keys = 16, stride = WIDTH + 8;
  static constexpr int stages = WIDTH > 64 ? kDecodeStages : 2 * kDecodeStages - 1;
  static constexpr int tile = keys * stride;  // elements of k or v
  static constexpr int sums_stride = WIDTH + 4, sums = 16 * sums_stride;
  static constexpr int ring_bytes = warps * stages * 2 * tile * 2, sums_bytes = (warps + 1) * sums * 4;
  // The sums of the warps and of the block take the place of the tiles. Behind them: q, and the largest scores and the
  // weights of the warps and of the block.
  static constexpr int front = ring_bytes > sums_bytes ? ring_bytes : sums_bytes;
  static constexpr int bytes = front + tile * 2 + (warps + 1) * 16 * 2 * 4;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// What lies in another block of the cluster where p lies in this one.
__device__ __forceinline__ float load_from(const float *p, uint32_t block) {
  float v;
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
               : "=f"(v)
               : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(block)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 load4_from(const float *p, uint32_t block) {
  float4 v;
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(block)
      : "memory");
  return v;
}

#endif

template <bool BRAIN, int WIDTH>
__global__ void __launch_bounds__(Decode<WIDTH>::threads) decode(Attention a, int splits, int head_tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = Decode<WIDTH>;
  constexpr int kStride = S::stride;
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, matrix = lane / 8, matrix_row = lane % 8;
  Bits *ring = reinterpret_cast<Bits *>(memory) + warp * S::stages * 2 * S::tile;
  Bits *q_tile = reinterpret_cast<Bits *>(memory + S::front);
  float *warp_sums = reinterpret_cast<float *>(memory), *sums_of_all = warp_sums + S::warps * S::sums;
  float *rests = reinterpret_cast<float *>(q_tile + S::tile), *rest = rests + S::warps * 32;  // of 16 rows each
  const int rank = splits > 1 ? (int)cluster_rank() : 0;
  const int64_t unit = blockIdx.x / splits, key_heads = a.heads / a.heads_per_key;
  const int64_t first_head = unit % head_tiles * 16, key_head = unit / head_tiles % key_heads;
  const int64_t batch = unit / head_tiles / key_heads;
  const int64_t left_heads = a.heads_per_key - first_head;
  const int rows = left_heads < 16 ? (int)left_heads : 16;
  const Problem p = {batch, key_head * a.heads_per_key + first_head, 0, 1, 0, a.Sk};
  const Bits *k = rows_of<Bits>(a.k, a.k_strides, p, key_head, 0), *v = rows_of<Bits>(a.v, a.v_strides, p, key_head, 0);
  const float to_log2 = 1.4426950408889634f, scale = a.scale * to_log2;

  const int64_t hidden = a.window > 0 && a.Sk > a.window ? a.Sk - a.window : 0;  // keys before the window
  const int64_t tiles_begin = hidden / S::keys, tiles_end = (a.Sk + S::keys - 1) / S::keys;
  const int64_t each = (tiles_end - tiles_begin + splits - 1) / splits;
  const int64_t begin = tiles_begin + rank * each, end = begin + each < tiles_end ? begin + each : tiles_end;

  const auto fetch = [&](int64_t i) {
    const int64_t tile = begin + warp + i * S::warps;
    if (tile < end) {
      Bits *k_tile = ring + i % S::stages * 2 * S::tile, *v_tile = k_tile + S::tile;
      constexpr int kChunks = WIDTH / 8;
#pragma unroll(WIDTH > 128 ? 2 : 8)
      for (int n = lane; n < S::keys * kChunks; n += 32) {
        const int64_t key = tile * S::keys + n / kChunks;
        const int column = n % kChunks * 8;
        const int k_left = key < a.Sk ? a.D - column : 0, v_left = key < a.Sk ? a.Dv - column : 0;
        const int k_count = k_left < 8 ? k_left > 0 ? k_left : 0 : 8;
        const int v_count = v_left < 8 ? v_left > 0 ? v_left : 0 : 8;
        copy_later(k_tile + n / kChunks * kStride + column, k_count > 0 ? k + key * a.k_strides.token + column : k,
                   2 * k_count);
        copy_later(v_tile + n / kChunks * kStride + column, v_count > 0 ? v + key * a.v_strides.token + column : v,
                   2 * v_count);
      }
    }
    end_group();  // an empty group too: the count of groups tells the tile
  };
#pragma unroll 1
  for (int s = 0; s < S::stages - 1; s++) fetch(s);
  for (int i = threadIdx.x; i < 16 * WIDTH; i += S::threads) {
    const int row = i / WIDTH, column = i % WIDTH;
    const Bits *q = static_cast<const Bits *>(a.q) + batch * a.q_strides.batch + (p.head + row) * a.q_strides.head;
    q_tile[row * kStride + column] = row < rows && column < a.D ? q[column] : (Bits)0;
  }
  __syncthreads();
  // Wide heads leave no registers for all of q.
  constexpr bool kKeep = WIDTH <= 128;
  uint32_t q_part[kKeep ? WIDTH / 16 : 1][4];
  const Bits *q_rows = q_tile + (matrix % 2 * 8 + matrix_row) * kStride + matrix / 2 * 8;
  if constexpr (kKeep) {
#pragma unroll
    for (int d = 0; d < WIDTH; d += 16) ldmatrix(q_part[d / 16], q_rows + d);
  }

  float sums[WIDTH / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, weight[2] = {};
  int64_t i = 0;
  for (int64_t tile = begin + warp; tile < end; tile += S::warps, i++) {
    wait_for_groups<S::stages - 2>();
    __syncwarp();  // the other lanes' copies are here too, and all lanes are done with what the next fetch overwrites
    fetch(i + S::stages - 1);
    const Bits *k_tile = ring + i % S::stages * 2 * S::tile, *v_tile = k_tile + S::tile;
    float scores[2][4] = {};
#pragma unroll(kKeep ? WIDTH / 16 : 2)
    for (int d = 0; d < WIDTH; d += 16) {
      uint32_t columns[4], (&q_now)[4] = q_part[kKeep ? d / 16 : 0];
      if constexpr (!kKeep) ldmatrix(q_now, q_rows + d);
      ldmatrix(columns, k_tile + (matrix / 2 * 8 + matrix_row) * kStride + d + matrix % 2 * 8);
      multiply<BRAIN>(scores[0], q_now, columns[0], columns[1]);
      multiply<BRAIN>(scores[1], q_now, columns[2], columns[3]);
    }
    const int64_t first = tile * S::keys;
    const bool plain = a.mask == NULL && first >= hidden && first + S::keys <= a.Sk;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float largest = max[half];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float &score = scores[n / 2][2 * half + n % 2];
        score *= scale;
        if (!plain) {
          const int64_t key = first + n / 2 * 8 + lane % 4 * 2 + n % 2;
          const int row = lane / 4 + half * 8;
          if (key < hidden || key >= a.Sk || row >= rows) {
            score = -INFINITY;
          } else if (a.mask != NULL) {
            const Problem one = {batch, p.head + row, 0, 1, 0, a.Sk};
            const float added = in_log2(mask_at(a, one, 0, key));
            score = added == -INFINITY ? -INFINITY : score + added;
          }
        }
        largest = fmaxf(largest, score);
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float zero = reference(largest);
      shrink[half] = exp2_fast(max[half] - zero);
      max[half] = largest;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float &score = scores[n / 2][2 * half + n % 2];
        score = exp2_fast(score - zero);
        added += score;
      }
      weight[half] = weight[half] * shrink[half] + added;
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < WIDTH / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] *= shrink[e / 2];
    }
    const uint32_t weights[4] = {pack<BRAIN>(scores[0][0], scores[0][1]), pack<BRAIN>(scores[0][2], scores[0][3]),
                                 pack<BRAIN>(scores[1][0], scores[1][1]), pack<BRAIN>(scores[1][2], scores[1][3])};
#pragma unroll
    for (int d = 0; d < WIDTH; d += 16) {
      uint32_t values[4];
      ldmatrix_transposed(values, v_tile + (matrix % 2 * 8 + matrix_row) * kStride + d + matrix / 2 * 8);
      multiply<BRAIN>(sums[d / 8], weights, values[0], values[1]);
      multiply<BRAIN>(sums[d / 8 + 1], weights, values[2], values[3]);
    }
  }
  wait_for_groups<0>();
  __syncthreads();  // the tiles' memory is free

  float *mine = warp_sums + warp * S::sums;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = weight[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int row = lane / 4 + half * 8;
    if (lane % 4 == 0) {
      rests[warp * 32 + row] = max[half];
      rests[warp * 32 + 16 + row] = total;
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++)
      store<float, 2>(mine + row * S::sums_stride + 8 * j + lane % 4 * 2, {sums[j][2 * half], sums[j][2 * half + 1]});
  }
  __syncthreads();
  constexpr int kQuads = WIDTH / 4;
  for (int n = threadIdx.x; n < rows * kQuads; n += S::threads) {
    const int row = n / kQuads, column = n % kQuads * 4;
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int w = 0; w < S::warps; w++) top = fmaxf(top, rests[w * 32 + row]);
    Pack<float, 4> joined = {};
#pragma unroll
    for (int w = 0; w < S::warps; w++) {
      const float share = exp2_fast(rests[w * 32 + row] - reference(top));
      total += share * rests[w * 32 + 16 + row];
      const Pack<float, 4> part = load<float, 4>(warp_sums + w * S::sums + row * S::sums_stride + column);
#pragma unroll
      for (int e = 0; e < 4; e++) joined.v[e] += share * part.v[e];
    }
    store<float, 4>(sums_of_all + row * S::sums_stride + column, joined);
    if (column == 0) {
      rest[row] = top;
      rest[16 + row] = total;
    }
  }
  if (splits > 1)
    cluster_sync();
  else
    __syncthreads();
  // Each block finishes a part.
  for (int n = threadIdx.x * splits + rank; n < rows * kQuads; n += S::threads * splits) {
    const int row = n / kQuads, column = n % kQuads * 4;
    float top = -INFINITY, total = 0.0f;
    Pack<float, 4> y = {};
    if (splits > 1) {
      float tops[kMostSplits];
#pragma unroll
      for (int b = 0; b < kMostSplits; b++) {
        tops[b] = b < splits ? load_from(rest + row, b) : -INFINITY;
        top = fmaxf(top, tops[b]);
      }
#pragma unroll
      for (int b = 0; b < kMostSplits; b++) {
        if (b >= splits) break;
        const float share = exp2_fast(tops[b] - reference(top));
        const float4 part = load4_from(sums_of_all + row * S::sums_stride + column, b);
        total += share * load_from(rest + 16 + row, b);
        y.v[0] += share * part.x, y.v[1] += share * part.y, y.v[2] += share * part.z, y.v[3] += share * part.w;
      }
    } else {
      y = load<float, 4>(sums_of_all + row * S::sums_stride + column);
      total = rest[16 + row];
    }
    const float share = total == 0.0f ? 0.0f : 1.0f / total;  // a query that sees no key gives 0
    Bits *out = static_cast<Bits *>(a.out) + (batch * a.heads + p.head + row) * a.Dv;
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (column + e < a.Dv) out[column + e] = (Bits)pack<BRAIN>(y.v[e] * share, 0.0f);
  }
  if (splits > 1) cluster_sync();  // nobody leaves while another may still read its sums
#else
  not_for_this_architecture();
#endif
}

// --- Hopper: the copy engine fills a ring of tiles, warp groups multiply out of it ---

constexpr int kRowBytes = 128;  // of a tile's row in shared memory, which the copy engine swizzles

// Tiles of q, k and v lie as columns of 64 elements, 128 bytes a row. One or two warp groups have 64 queries each; more
// warps (with two groups a third one, which gives them its registers) tell the copy engine what to fetch. One group
// leaves room for a second block beside it, which hides how long a block takes to begin and to end.
//
// With a mask the fetching warps are four in any case. Each looks at one of four tiles; then all of them bring what
// the mask says of a tile that is neither hidden nor shown as a whole to shared memory: 64 bits a row, or 64 numbers.
template <int WIDTH, int GROUPS, bool MASKED>
struct Wide {
  static constexpr int rows = 64 * GROUPS, parts = WIDTH / 64, stages = 2;
  static constexpr int threads = GROUPS == 1 && !MASKED ? 160 : 128 * (GROUPS + 1);
  static constexpr int keys = WIDTH > 128 || GROUPS == 1 ? 64 : 128, blocks = GROUPS == 1 ? 2 : 1;
  static constexpr int q_bytes = rows * WIDTH * 2, tile_bytes = keys * WIDTH * 2;
  static constexpr int mask_bytes = MASKED ? rows * keys * 2 : 0, barrier_bytes = MASKED ? 256 : 128;
  static constexpr int bytes = 1024 + q_bytes + 2 * stages * tile_bytes + stages * mask_bytes + barrier_bytes;
  static_assert(!MASKED || keys == 64, "a row's bits are two words, its numbers 128 bytes");
};

// What a mask does to a tile, or that no tile follows.
enum : int { kHides, kMixes, kShows, kEnd };

struct Tile {
  int key, state;
};

template <int STAGES>
struct Barriers {
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <int STAGES>
struct MaskBarriers : Barriers<STAGES> {
  uint64_t mask_full[STAGES], mask_empty[STAGES];
  Tile tiles[2 * STAGES];  // those under way: a tile's place is written again after all have gone beyond it
  int states[2][4];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

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

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
}

// A map on its way to the multiprocessor, before the first copy asks for it.
__device__ __forceinline__ void fetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// All columns of a tile of rows from `row` on.
template <int PARTS, int ROWS>
__device__ __forceinline__ void copy_rows(unsigned char *to, const CUtensorMap *map, uint64_t *barrier, int row,
                                          int head, int batch) {
  barrier_expect(barrier, PARTS * ROWS * kRowBytes);
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];"
        :
        : "r"(shared_address(to + part * ROWS * kRowBytes)), "l"(map), "r"(shared_address(barrier)), "r"(part * 64),
          "r"(row), "r"(head), "r"(batch)
        : "memory");
}

__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void group_end() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int N>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

// Named barriers of THREADS threads, some of which only arrive.
template <int THREADS>
__device__ __forceinline__ void named_sync(int name) {
  asm volatile("bar.sync %0, %1;" : : "r"(name), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void named_arrive(int name) {
  asm volatile("bar.arrive %0, %1;" : : "r"(name), "n"(THREADS) : "memory");
}

// What tells wgmma of a tile with rows of 128 swizzled bytes: eight rows lie together; `next_part` bytes on are the
// next 64 elements of the rows, where those are not along the depth of the product.
__device__ __forceinline__ uint64_t tile_descriptor(const void *p, uint32_t next_part) {
  return (uint64_t)((shared_address(p) & 0x3FFFF) >> 4) | (uint64_t)(next_part >> 4) << 16 |
         (uint64_t)(8 * kRowBytes >> 4) << 32 | (uint64_t)1 << 62;
}

#define AK_WGMMA_S_64(TYPE)                                                                                            \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31},"                                                                 \
      " %32, %33, add, 1, 1, 0, 0;}"                                                                                   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                      \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_S_128(TYPE)                                                                                           \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43,"      \
      " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"          \
      " %64, %65, add, 1, 1, 0, 0;}"                                                                                   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                      \
      : "l"(a), "l"(b), "r"(add))
#define AK_WGMMA_R_64(TYPE)                                                                                            \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31},"                                                                 \
      " {%32, %33, %34, %35}, %36, add, 1, 1, 1;}"                                                                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define AK_WGMMA_R_128(TYPE)                                                                                           \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43,"      \
      " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"          \
      " {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"                                                                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define AK_WGMMA_R_256(TYPE)                                                                                           \
  asm volatile(                                                                                                        \
      "{.reg .pred add; setp.ne.b32 add, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE          \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"     \
      " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43,"      \
      " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64,"      \
      " %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85,"      \
      " %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105,"     \
      " %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123,"   \
      " %124, %125, %126, %127},"                                                                                      \
      " {%128, %129, %130, %131}, %132, add, 1, 1, 1;}"                                                                \
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
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

#define AK_WGMMA(WHERE, N)                   \
  if constexpr (SUMS == N / 2) {             \
    if constexpr (BRAIN)                     \
      AK_WGMMA_##WHERE##_##N("bf16");        \
    else                                     \
      AK_WGMMA_##WHERE##_##N("f16");         \
  }

// d += a @ b for 64 rows, 2 * SUMS columns and a depth of 16, or d = a @ b without `add`: a and b in shared memory,
// rows along the depth.
template <bool BRAIN, int SUMS>
__device__ __forceinline__ void multiply_shared(float (&d)[SUMS], uint64_t a, uint64_t b, uint32_t add) {
  AK_WGMMA(S, 64)
  AK_WGMMA(S, 128)
}

// The same with a in registers, and b's rows along the columns of the product.
template <bool BRAIN, int SUMS>
__device__ __forceinline__ void multiply_registers(float (&d)[SUMS], const uint32_t (&a)[4], uint64_t b, uint32_t add) {
  AK_WGMMA(R, 64)
  AK_WGMMA(R, 128)
  AK_WGMMA(R, 256)
}
#undef AK_WGMMA

// A warp group's running softmax over its scores: rows lane / 4 and lane / 4 + 8 of each warp.
struct Running {
  float max[2], weight[2], shrink[2];
};

// Scores become weights. HIDE: keys outside of [begin, end) of a row, counted from the tile's first, are hidden.
// DIFFERENCES: of scores as low as numbers are, which `scale` would make infinite.
template <bool DIFFERENCES, int SCORES>
__device__ __forceinline__ void soften(float (&scores)[SCORES], Running &r, float scale, bool hide,
                                       const int (&begin)[2], const int (&end)[2], int lane) {
  if (hide) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (key < begin[i / 2 % 2] || key >= end[i / 2 % 2]) scores[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float largest = r.max[half];
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (i / 2 % 2 == half) largest = fmaxf(largest, scores[i]);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float top = reference(largest), zero = top * scale;
    r.shrink[half] = exp2_fast(DIFFERENCES ? (r.max[half] - top) * scale : r.max[half] * scale - zero);
    r.max[half] = largest;
    float added = 0.0f;
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (i / 2 % 2 == half) {
        scores[i] = exp2_fast(DIFFERENCES ? (scores[i] - top) * scale : scores[i] * scale - zero);
        added += scores[i];
      }
    r.weight[half] = r.weight[half] * r.shrink[half] + added;
  }
}

template <bool BRAIN, int SCORES>
__device__ __forceinline__ void pack_all(uint32_t (&weights)[SCORES / 8][4], const float (&scores)[SCORES]) {
#pragma unroll
  for (int i = 0; i < SCORES; i += 2) weights[i / 8][i / 2 % 4] = pack<BRAIN>(scores[i], scores[i + 1]);
}

// 16 bytes from any place, of which the first `bytes` are a row's. Memory is read in whole aligned granules, and only
// in those that hold a byte of the row: they belong to its allocation.
struct Granules {
  uint4 low, high;
};

__device__ __forceinline__ Granules load_granules(const unsigned char *p, int bytes) {
  const int ahead = (int)((uintptr_t)p % 16);
  Granules g = {};
  if (bytes > 0) g.low = *reinterpret_cast<const uint4 *>(p - ahead);
  if (ahead + bytes > 16) g.high = *reinterpret_cast<const uint4 *>(p - ahead + 16);
  return g;
}

// Those 16 bytes as four words, zeros behind the first `bytes`.
__device__ __forceinline__ void words_of(uint32_t (&word)[4], const Granules &g, const unsigned char *p, int bytes) {
  const int ahead = (int)((uintptr_t)p % 16);
  uint32_t all[8] = {g.low.x, g.low.y, g.low.z, g.low.w, g.high.x, g.high.y, g.high.z, g.high.w};
#pragma unroll
  for (int i = 0; i < 6; i++) all[i] = ahead & 8 ? all[i + 2] : all[i];
#pragma unroll
  for (int i = 0; i < 5; i++) all[i] = ahead & 4 ? all[i + 1] : all[i];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int left = bytes - 4 * i;
    const uint32_t here = left >= 4 ? 0xffffffffu : left > 0 ? (1u << 8 * left) - 1 : 0;  // bytes of the row
    word[i] = __funnelshift_r(all[i], all[i + 1], ahead % 4 * 8) & here;
  }
}

// Four bits, one for each byte that is not 0.
__device__ __forceinline__ uint32_t bits_of(uint32_t bytes) {
  const uint32_t ones = ((((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u) >> 7;
  return ones * 0x01020408u >> 24;
}

__device__ __forceinline__ uint32_t bits_of(const uint32_t (&word)[4]) {
  return bits_of(word[0]) | bits_of(word[1]) << 4 | bits_of(word[2]) << 8 | bits_of(word[3]) << 12;
}

// The part of a mask that one tile of ROWS rows and 64 keys meets: keys follow each other in memory.
struct MaskTile {
  const unsigned char *data;
  int64_t row_bytes;
  int rows, bytes;  // that there are; of a row
};

template <int ROWS>
__device__ __forceinline__ MaskTile mask_tile_of(const Attention &a, const Problem &p, int64_t top, int64_t first) {
  const int size = a.mask_dtype == AK_BOOL ? 1 : 2;
  const int64_t rows = p.q_length - top, keys = p.k_length - first;
  return {static_cast<const unsigned char *>(a.mask) + mask_place(a, p, top, first) * size, a.mask_row * size,
          rows < ROWS ? (int)rows : ROWS, (keys < 64 ? (int)keys : 64) * size};
}

// What a mask does to a tile, as a warp sees it. HIDDEN: two of the numbers -inf, or 0 of a bool mask.
template <int AT_ONCE>
__device__ __forceinline__ int look_at(const MaskTile &m, uint32_t hidden, int lane) {
  const bool numbers = hidden != 0;
  const int packs = numbers ? 8 : 4;  // of 16 bytes, in a row
  const int rows = m.row_bytes == 0 ? 1 : m.rows;
  uint32_t shows = 0, changes = 0;
#pragma unroll 1
  for (int from = lane; from < rows * packs + lane; from += 32 * AT_ONCE) {
    Granules g[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int at = from + 32 * u, row = at / packs, byte = at % packs * 16;
      g[u] = load_granules(m.data + row * m.row_bytes + byte, row < rows ? m.bytes - byte : 0);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int at = from + 32 * u, row = at / packs, byte = at % packs * 16;
      const int left = row < rows ? m.bytes - byte : 0, bytes = left < 0 ? 0 : left < 16 ? left : 16;
      uint32_t word[4];
      words_of(word, g[u], m.data + row * m.row_bytes + byte, bytes);
      if (numbers) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int rest = bytes - 4 * i;
          shows |= (word[i] ^ hidden) & (rest >= 4 ? 0xffffffffu : rest > 0 ? 0xffffu : 0);
          changes |= word[i] & 0x7fff7fffu;
        }
      } else {
        const uint32_t bits = bits_of(word);
        shows |= bits;
        changes |= bits ^ ((1u << bytes) - 1);
      }
    }
    if (__any_sync(0xffffffffu, shows != 0) && __any_sync(0xffffffffu, changes != 0)) return kMixes;
  }
  return __any_sync(0xffffffffu, shows != 0) ? kShows : kHides;
}

// A tile of a mask into shared memory by 128 threads: 64 bits a row; or 64 numbers, whose chunks of 16 bytes change
// places as those of a swizzled tile do.
template <int ROWS>
__device__ __forceinline__ void stage_tile(unsigned char *to, const MaskTile &m, bool numbers, int thread) {
  const int packs = numbers ? 8 : 4;
#pragma unroll(ROWS > 64 ? 1 : 2)
  for (int at = thread; at < ROWS * packs; at += 128) {
    const int row = at / packs, chunk = at % packs;
    const int left = row < m.rows ? m.bytes - chunk * 16 : 0, bytes = left < 0 ? 0 : left < 16 ? left : 16;
    const unsigned char *from = m.data + row * m.row_bytes + chunk * 16;
    uint32_t word[4];
    words_of(word, load_granules(from, bytes), from, bytes);
    if (numbers)
      *reinterpret_cast<uint4 *>(to + row * kRowBytes + (chunk ^ row % 8) * 16) =
          make_uint4(word[0], word[1], word[2], word[3]);
    else
      *reinterpret_cast<uint16_t *>(to + row * 8 + chunk * 2) = (uint16_t)bits_of(word);
  }
}

// Scores of 64 keys under a mask: of a bool one, hidden where their bits are 0; else scaled, and its numbers added.
template <int SCORES>
__device__ __forceinline__ void apply_mask(float (&scores)[SCORES], const unsigned char *tile, int mask_dtype,
                                           float scale, int row, int lane) {
  static_assert(SCORES == 32, "of 64 keys");
  if (mask_dtype == AK_BOOL) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 bits = *reinterpret_cast<const uint2 *>(tile + (row + 8 * half) * 8);
      const uint32_t mine[2] = {bits.x >> lane % 4 * 2, bits.y >> lane % 4 * 2};
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (i / 2 % 2 == half && (mine[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1) == 0) scores[i] = -INFINITY;
    }
    return;
  }
  by_dtype(mask_dtype == AK_BF16, [&](auto brain) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) {
      const int half = i / 2 % 2, chunk = i / 4;
      const uint32_t pair = *reinterpret_cast<const uint32_t *>(tile + (row + 8 * half) * kRowBytes +
                                                                 (chunk ^ row % 8) * 16 + lane % 4 * 4);
      scores[i] = scores[i] * scale + to_float(pair & 0xffff, brain.value);
      scores[i + 1] = scores[i + 1] * scale + to_float(pair >> 16, brain.value);
    }
  });
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <bool BRAIN, int WIDTH, int GROUPS, bool MASKED>
__global__ void __launch_bounds__(Wide<WIDTH, GROUPS, MASKED>::threads, Wide<WIDTH, GROUPS, MASKED>::blocks)
    attend_wide(const Attention a, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Wide<WIDTH, GROUPS, MASKED>;
  constexpr bool kTurns = kInTurn && GROUPS == 2;
  extern __shared__ unsigned char memory[];
  unsigned char *q_tile = memory + (1024 - shared_address(memory) % 1024) % 1024;
  unsigned char *k_tiles = q_tile + S::q_bytes, *v_tiles = k_tiles + S::stages * S::tile_bytes;
  unsigned char *mask_tiles = v_tiles + S::stages * S::tile_bytes;
  using AllBarriers = std::conditional_t<MASKED, MaskBarriers<S::stages>, Barriers<S::stages>>;
  static_assert(sizeof(AllBarriers) <= S::barrier_bytes, "barriers have room");
  AllBarriers *barriers = reinterpret_cast<AllBarriers *>(mask_tiles + S::stages * S::mask_bytes);
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 32) {
    fetch_map(&q_map);
    fetch_map(&k_map);
    fetch_map(&v_map);
  }
  if (threadIdx.x == 0) {
    barrier_init(&barriers->q_full, 1);
    for (int s = 0; s < S::stages; s++) {
      barrier_init(&barriers->k_full[s], 1);
      barrier_init(&barriers->v_full[s], 1);
      barrier_init(&barriers->k_empty[s], GROUPS);
      barrier_init(&barriers->v_empty[s], GROUPS);
      if constexpr (MASKED) {
        barrier_init(&barriers->mask_full[s], 4);
        barrier_init(&barriers->mask_empty[s], 4 * GROUPS);
      }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();
  const Problem p = whole_problem(a, blockIdx.x / (uint32_t)a.tiles);
  // The last rows have the most keys under causality: they go first.
  const int64_t top = (a.tiles - 1 - blockIdx.x % (uint32_t)a.tiles) * S::rows;
  const int64_t bottom = top + S::rows < a.Sq ? top + S::rows - 1 : a.Sq - 1;
  const Range range = range_of(a, p, top, bottom, S::keys);
  const int count = range.begin < range.end ? (int)((range.end - range.begin + S::keys - 1) / S::keys) : 0;
  const int64_t last = range.begin + (int64_t)(count - 1) * S::keys;  // tiles go from here to the beginning

  if (group == GROUPS) {
    if constexpr (MASKED && GROUPS == 1)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    else if constexpr (MASKED)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    else if constexpr (GROUPS == 2)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const int head = (int)p.head, batch = (int)p.batch;
    const int key_head = (int)((uint32_t)p.head / (uint32_t)a.heads_per_key);
    if constexpr (MASKED) {
      const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
      const bool numbers = a.mask_dtype != AK_BOOL;
      const uint32_t hidden = !numbers ? 0 : a.mask_dtype == AK_BF16 ? 0xff80ff80u : 0xfc00fc00u;
      if (thread == 0 && count > 0)
        copy_rows<S::parts, S::rows>(q_tile, &q_map, &barriers->q_full, (int)top, head, batch);
      int given = 0;  // tiles
#pragma unroll 1
      for (int i = 0; i < count; i++) {
        int *states = barriers->states[i / 4 % 2];
        if (i % 4 == 0) {
          const int64_t first = last - (int64_t)(i + warp) * S::keys;
          if (i + warp < count) {
            const int state = look_at<GROUPS == 1 ? 4 : 2>(mask_tile_of<S::rows>(a, p, top, first), hidden, lane);
            if (lane == 0) states[warp] = state;
          }
          named_sync<128>(5);
        }
        const int state = states[i % 4], stage = given % S::stages, key = (int)(last - (int64_t)i * S::keys);
        if (state == kHides) continue;
        const uint32_t parity = given / S::stages % 2 ^ 1;
        if (thread == 0) {
          barrier_wait(&barriers->k_empty[stage], parity);
          barriers->tiles[given % (2 * S::stages)] = {key, state};
          copy_rows<S::parts, S::keys>(k_tiles + stage * S::tile_bytes, &k_map, &barriers->k_full[stage], key, key_head,
                                       batch);
        }
        __syncwarp();
        barrier_wait(&barriers->mask_empty[stage], parity);
        unsigned char *mask_tile = mask_tiles + stage * S::mask_bytes;
        if (state == kMixes) stage_tile<S::rows>(mask_tile, mask_tile_of<S::rows>(a, p, top, key), numbers, thread);
        __syncwarp();
        if (lane == 0) barrier_arrive(&barriers->mask_full[stage]);
        if (thread == 0) {
          barrier_wait(&barriers->v_empty[stage], parity);
          copy_rows<S::parts, S::keys>(v_tiles + stage * S::tile_bytes, &v_map, &barriers->v_full[stage], key, key_head,
                                       batch);
        }
        given++;
      }
      if (thread == 0 && count > 0) {
        barrier_wait(&barriers->k_empty[given % S::stages], given / S::stages % 2 ^ 1);
        barriers->tiles[given % (2 * S::stages)] = {0, kEnd};
        barrier_arrive(&barriers->k_full[given % S::stages]);
      }
    } else if (threadIdx.x == 128 * GROUPS) {
      if (count > 0)
        copy_rows<S::parts, S::rows>(q_tile, &q_map, &barriers->q_full, (int)top, head, batch);
      for (int i = 0; i < count; i++) {
        const int stage = i % S::stages, key = (int)(last - (int64_t)i * S::keys);
        const uint32_t parity = i / S::stages % 2 ^ 1;
        barrier_wait(&barriers->k_empty[stage], parity);
        copy_rows<S::parts, S::keys>(k_tiles + stage * S::tile_bytes, &k_map, &barriers->k_full[stage], key, key_head,
                                     batch);
        barrier_wait(&barriers->v_empty[stage], parity);
        copy_rows<S::parts, S::keys>(v_tiles + stage * S::tile_bytes, &v_map, &barriers->v_full[stage], key, key_head,
                                     batch);
      }
    }
  } else {
    if constexpr (MASKED && GROUPS == 1)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
    else if constexpr (MASKED)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    else if constexpr (GROUPS == 2)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const float scale = a.scale * 1.4426950408889634f;  // scores in powers of 2: exp2 is cheaper
    const int64_t shift = p.k_length - p.q_length, row = top + 16 * warp + lane / 4, group_top = top + 64 * group;
    float sums[WIDTH / 2], scores[S::keys / 2];
    uint32_t weights[S::keys / 16][4];
    Running running = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {1.0f, 1.0f}};
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) sums[i] = 0.0f;

    const auto multiply_keys = [&](int i) {
      const int stage = i % S::stages;
      const uint64_t q = tile_descriptor(q_tile + group * 64 * kRowBytes, 16);
      const uint64_t k = tile_descriptor(k_tiles + stage * S::tile_bytes, 16);
#pragma unroll
      for (int d = 0; d < WIDTH / 16; d++)  // 16 elements on are 32 bytes of a row, 64 the next part
        multiply_shared<BRAIN>(scores, q + ((d / 4 * S::rows * kRowBytes + d % 4 * 32) >> 4),
                               k + ((d / 4 * S::keys * kRowBytes + d % 4 * 32) >> 4), d > 0);
      group_end();
    };
    const auto multiply_values = [&](int i) {
      const uint64_t v = tile_descriptor(v_tiles + i % S::stages * S::tile_bytes, S::keys * kRowBytes);
#pragma unroll
      for (int n = 0; n < S::keys / 16; n++)
        multiply_registers<BRAIN>(sums, weights[n], v + (n * 16 * kRowBytes >> 4), 1);
      group_end();
    };
    // With a mask the tiles are those that it does not hide, and the last of them is followed by one with kEnd.
    const auto tile_of = [&](int i) -> Tile {
      if constexpr (MASKED) return barriers->tiles[i % (2 * S::stages)];
      return {(int)(last - (int64_t)i * S::keys), kShows};
    };
    const auto soften_tile = [&](int i, Tile tile) {
      const int64_t first = MASKED ? tile.key : last - (int64_t)i * S::keys;
      const bool plain = first + S::keys <= p.k_length && (!a.causal || first + S::keys - 1 <= group_top + shift) &&
                         (a.window <= 0 || first > group_top + 63 + shift - a.window);
      int begin[2] = {0, 0}, end[2] = {0, 0};
      if (!plain) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const Seen seen = seen_of(a, p, row + 8 * half, first, S::keys);
          begin[half] = seen.begin;
          end[half] = seen.end;
        }
      }
      if constexpr (MASKED) {
        const bool numbers = a.mask_dtype != AK_BOOL;
        barrier_wait(&barriers->mask_full[i % S::stages], i / S::stages % 2);
        const unsigned char *mask_tile = mask_tiles + i % S::stages * S::mask_bytes;
        if (tile.state == kMixes) {
          apply_mask(scores, mask_tile, a.mask_dtype, a.scale, 16 * warp + lane / 4, lane);
        } else if (numbers) {
#pragma unroll
          for (int j = 0; j < S::keys / 2; j++) scores[j] *= a.scale;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&barriers->mask_empty[i % S::stages]);
        soften<true>(scores, running, numbers ? 1.4426950408889634f : scale, !plain, begin, end, lane);
      } else {
        soften<false>(scores, running, scale, !plain, begin, end, lane);
      }
    };

    if (count > 0) {
      barrier_wait(&barriers->q_full, 0);
      barrier_wait(&barriers->k_full[0], 0);
    }
    Tile tile = {0, kEnd};
    if (count > 0) tile = tile_of(0);
    if (tile.state != kEnd) {
      if (kTurns && group == 1) named_arrive<256>(1);  // the first group begins
      group_begin();
      multiply_keys(0);
      group_wait<0>();
      if (thread == 0) barrier_arrive(&barriers->k_empty[0]);
      soften_tile(0, tile);
      pack_all<BRAIN>(weights, scores);
      int i = 1;
      for (; MASKED || i < count; i++) {
        const int stage = i % S::stages, before = (i - 1) % S::stages;
        barrier_wait(&barriers->k_full[stage], i / S::stages % 2);
        tile = tile_of(i);
        if (MASKED && tile.state == kEnd) break;
        if (kTurns) named_sync<256>(1 + group);
        group_begin();
        multiply_keys(i);
        barrier_wait(&barriers->v_full[before], (i - 1) / S::stages % 2);
        group_begin();
        multiply_values(i - 1);
        if (kTurns) named_arrive<256>(2 - group);  // the other group's products run while these scores are softened
        group_wait<1>();
        if (thread == 0) barrier_arrive(&barriers->k_empty[stage]);
        soften_tile(i, tile);
        group_wait<0>();
        if (thread == 0) barrier_arrive(&barriers->v_empty[before]);
#pragma unroll
        for (int j = 0; j < WIDTH / 2; j++) sums[j] *= running.shrink[j / 2 % 2];
        pack_all<BRAIN>(weights, scores);
      }
      if (kTurns && group == 0) named_sync<256>(1);
      barrier_wait(&barriers->v_full[(i - 1) % S::stages], (i - 1) / S::stages % 2);
      group_begin();
      multiply_values(i - 1);
      group_wait<0>();
    }

    float share[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = running.weight[half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      share[half] = total == 0.0f ? 0.0f : 1.0f / total;  // a query that sees no key gives 0
    }
    named_sync<128>(3 + group);  // all of the group's products with q are done: its rows' memory is free
    Bits *out = static_cast<Bits *>(a.out) + ((p.batch * a.heads + p.head) * a.Sq + top + 16 * warp) * a.Dv;
    const int64_t rows_left = a.Sq - top - 16 * warp;
#pragma unroll
    for (int part = 0; part < S::parts; part++) {
      // 16 rows of 128 bytes; the chunks of a row change places, so that rows start in different banks.
      unsigned char *mine = q_tile + part * S::rows * kRowBytes + warp * 16 * kRowBytes;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = part * 32 + 4 * j + 2 * half;
          unsigned char *to = mine + (lane / 4 + 8 * half) * kRowBytes + (j ^ lane / 4) * 16 + lane % 4 * 4;
          *reinterpret_cast<uint32_t *>(to) = pack<BRAIN>(sums[at] * share[half], sums[at + 1] * share[half]);
        }
      __syncwarp();
#pragma unroll
      for (int n = lane; n < 16 * 8; n += 32) {
        const int r = n / 8, chunk = n % 8, column = part * 64 + chunk * 8;
        if (r >= rows_left || column >= a.Dv) continue;
        const Bits *values = reinterpret_cast<const Bits *>(mine + r * kRowBytes + (chunk ^ r % 8) * 16);
        Bits *y = out + r * a.Dv + column;
        if (a.Dv % 8 == 0) {
          *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<const uint4 *>(values);
        } else {
#pragma unroll 1
          for (int e = 0; e < 8 && column + e < a.Dv; e++) y[e] = values[e];
        }
      }
    }
  }
#else
  not_for_this_architecture();
#endif
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
  const Problem p = problem_of(a, blockIdx.x / (uint32_t)a.tiles);
  const int tx = threadIdx.x % 8, ty = threadIdx.x / 8;
  const float *q = rows_of<float>(a.q, a.q_strides, p, p.head, p.q_start);
  const float *k = rows_of<float>(a.k, a.k_strides, p, (uint32_t)p.head / (uint32_t)a.heads_per_key, p.k_start);
  const float *v = rows_of<float>(a.v, a.v_strides, p, (uint32_t)p.head / (uint32_t)a.heads_per_key, p.k_start);
  float *out = static_cast<float *>(a.out) + ((p.batch * a.heads + p.head) * a.Sq + p.q_start) * a.Dv;

  for (int64_t tile = a.tiles - 1 - blockIdx.x % (uint32_t)a.tiles; tile * S::rows < p.q_length; tile += a.tiles) {
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
#pragma unroll 2
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

// --- host, from Hopper on ---

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

// A tensor's map: boxes of 64 elements (128 bytes, swizzled) of so many tokens. Its rows are dense and aligned for
// packs; false where it has none, as an expanded tensor.
bool map_of(CUtensorMap *map, const void *data, bool brain, const Strides &s, int64_t width, int64_t tokens,
            int64_t heads, int64_t batch, int rows) {
  const Encode encode = encoder();
  if (encode == NULL) return false;
  const int64_t row = (width + 7) / 8 * 8, counts[3] = {tokens, heads, batch}, given[3] = {s.token, s.head, s.batch};
  const cuuint64_t sizes[4] = {(cuuint64_t)width, (cuuint64_t)tokens, (cuuint64_t)heads, (cuuint64_t)batch};
  cuuint64_t strides[3];
  for (int d = 0; d < 3; d++) {
    if (counts[d] > INT32_MAX || (counts[d] > 1 && given[d] <= 0)) return false;
    strides[d] = (cuuint64_t)(counts[d] > 1 ? given[d] : row) * 2;
  }
  const cuuint32_t box[4] = {64, (cuuint32_t)rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = brain ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 4, const_cast<void *>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether this device has a kernel's instructions and its shared memory; asked once a device.
template <auto KERNEL>
bool runs_here(int bytes, bool wide_clusters, int device) {
  constexpr int kDevices = 64;
  static signed char kept[kDevices];
  if (device < 0 || device >= kDevices) return false;
  signed char known = __atomic_load_n(&kept[device], __ATOMIC_RELAXED);
  if (known == 0) {
    cudaFuncAttributes attributes;
    bool able = cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess && attributes.sharedSizeBytes == 0 &&
                cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
    if (able && wide_clusters)
      able = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess;
    if (!able) cudaGetLastError();
    known = able ? 1 : -1;
    __atomic_store_n(&kept[device], known, __ATOMIC_RELAXED);
  }
  return known > 0;
}

template <bool BRAIN, int WIDTH>
int run_decode(const Attention &a, int major, int device, cudaStream_t stream) {
  using S = Decode<WIDTH>;
  if (!runs_here<decode<BRAIN, WIDTH>>(S::bytes, true, device)) return kNotHere;
  const int64_t head_tiles = (a.heads_per_key + 15) / 16;
  const int64_t units = a.sequences * (a.heads / a.heads_per_key) * head_tiles;
  const int64_t seen = a.window > 0 && a.window < a.Sk ? a.window : a.Sk, most = major == 9 ? kMostSplits : 8;
  int splits = 1;
  // A warp has four tiles at least.
  while (splits < most && units * splits < kDecodeBlocks && seen >= (int64_t)splits * 2 * S::warps * 4 * S::keys)
    splits *= 2;
  for (;; splits /= 2) {
    if (units * splits > 0x7fffffff) return AK_UNSUPPORTED;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = splits;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(units * splits));
    config.blockDim = dim3(S::threads);
    config.dynamicSmemBytes = S::bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t code = cudaLaunchKernelEx(&config, decode<BRAIN, WIDTH>, a, splits, (int)head_tiles);
    if (code == cudaSuccess) return (int)cudaGetLastError();
    cudaGetLastError();
    // Sixteen blocks of a cluster are more than every device promises room for.
    if (splits <= 8) return (int)code;
  }
}

template <bool BRAIN, int WIDTH, int GROUPS, bool MASKED>
int run_wide(Attention &a, int64_t key_heads, int device, cudaStream_t stream) {
  using S = Wide<WIDTH, GROUPS, MASKED>;
  CUtensorMap q_map, k_map, v_map;
  if (!runs_here<attend_wide<BRAIN, WIDTH, GROUPS, MASKED>>(S::bytes, false, device) ||
      !map_of(&q_map, a.q, a.brain, a.q_strides, a.D, a.Sq, a.heads, a.sequences, S::rows) ||
      !map_of(&k_map, a.k, a.brain, a.k_strides, a.D, a.Sk, key_heads, a.sequences, S::keys) ||
      !map_of(&v_map, a.v, a.brain, a.v_strides, a.Dv, a.Sk, key_heads, a.sequences, S::keys))
    return kNotHere;
  a.tiles = (a.Sq + S::rows - 1) / S::rows;
  const int64_t blocks = a.tiles * a.heads * a.sequences;
  if (blocks > 0x7fffffff) return AK_UNSUPPORTED;
  attend_wide<BRAIN, WIDTH, GROUPS, MASKED>
      <<<(unsigned)blocks, S::threads, S::bytes, stream>>>(a, q_map, k_map, v_map);
  return (int)cudaGetLastError();
}

// Kernels that only new devices have, or kNotHere.
template <bool BRAIN, int WIDTH>
int run_here(Attention &a, int major, int64_t key_heads, const AkContext *ctx) {
  const cudaStream_t stream = (cudaStream_t)ctx->stream;
  if (a.Sq == 1) return run_decode<BRAIN, WIDTH>(a, major, ctx->device, stream);
  if (!a.q_packs || a.scale <= 0.0f || major != 9) return kNotHere;
  if (a.mask != NULL) {
    // Its keys follow each other, its numbers have 16 bits: so models give it.
    if (a.mask_column != 1 || a.mask_dtype == AK_F32) return kNotHere;
    return run_wide<BRAIN, WIDTH, WIDTH <= 128 ? 1 : 2, true>(a, key_heads, ctx->device, stream);
  }
  int processors = 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ctx->device);
  const int64_t blocks = (a.Sq + 127) / 128 * a.heads * a.sequences;
  // Short sequences, or too few: smaller blocks.
  if (WIDTH <= 128 && (a.Sk <= kShort || blocks < processors))
    return run_wide<BRAIN, WIDTH <= 128 ? WIDTH : 128, 1, false>(a, key_heads, ctx->device, stream);
  return run_wide<BRAIN, WIDTH, 2, false>(a, key_heads, ctx->device, stream);
}

template <int WIDTH>
int run(Attention &a, int64_t longest, int64_t key_heads, const AkContext *ctx) {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->device);
  if (major >= 9 && a.cu_q == NULL && a.k_packs && a.v_packs && a.Sk > 0) {
    const int code = a.brain ? run_here<true, WIDTH>(a, major, key_heads, ctx)
                             : run_here<false, WIDTH>(a, major, key_heads, ctx);
    if (code != kNotHere) return code;
  }
  using S = Shape<WIDTH>;
  const int bytes = S::bytes + (a.mask != NULL ? S::mask_bytes : 0);
  return launch(attend<WIDTH>, a, S::rows, S::threads, bytes, longest, (cudaStream_t)ctx->stream);
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
  a.brain = q->dtype == AK_BF16;
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
    case AK_BF16:
      return widest <= 64    ? run<64>(a, longest, k->sizes[1], ctx)
             : widest <= 128 ? run<128>(a, longest, k->sizes[1], ctx)
                             : run<256>(a, longest, k->sizes[1], ctx);
    default: return AK_UNSUPPORTED;
  }
}
