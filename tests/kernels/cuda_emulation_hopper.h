// Of Hopper's instructions, what attention needs beside clusters and mbarriers: tensor maps and the copies by them, products of
// warp groups (wgmma) and named barriers.
//
// Copies and products happen at once where threads run forward, so that they overwrite what is still read; else as late as
// they may, so that who does not wait for them reads what was there before.
#pragma once

#include <array>
#include <deque>

namespace emu {

// A tensor map as cuTensorMapEncodeTiled writes it, for four dimensions of 16-bit elements, swizzled by 128 bytes.
struct Map {
  const unsigned char *data;
  uint64_t sizes[4], strides[3];
  uint32_t columns, rows;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap), "a map has room");

inline CUresult encode_map(CUtensorMap *out, CUtensorMapDataType, uint32_t rank, void *data, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map m = {(const unsigned char *)data, {}, {}, box[0], box[1]};
  bool good = rank == 4 && (uintptr_t)data % 16 == 0 && box[0] == 64 && box[1] <= 256;
  for (int d = 0; d < 4; d++) {
    m.sizes[d] = sizes[d];
    good = good && sizes[d] > 0;
  }
  for (int d = 0; d < 3; d++) {
    m.strides[d] = strides[d];
    good = good && strides[d] % 16 == 0;
  }
  memcpy(out, &m, sizeof m);
  return good ? CUDA_SUCCESS : (CUresult)1;
}

inline std::deque<std::array<unsigned char, 16>> under_way;  // what copies bring, 16 bytes each

// A box of 64 columns: rows of 128 bytes, the chunks of which are swizzled; zeros outside of the tensor.
inline void copy_box(uint32_t to, const CUtensorMap *map, uint32_t address, int column, int row, int head, int batch) {
  Map m;
  memcpy(&m, map, sizeof m);
  Mbarrier &barrier = mbarrier(address);
  if (to % 1024 != 0 || to + m.rows * 128 > kArena) fail(cudaErrorIllegalAddress, "a box to shared address %u", to);
  for (uint32_t r = 0; r < m.rows; r++)
    for (int chunk = 0; chunk < 8; chunk++) {
      under_way.emplace_back();
      unsigned char *values = under_way.back().data();
      for (int e = 0; e < 8; e++) {
        const int64_t at[4] = {column + 8 * chunk + e, row + (int64_t)r, head, batch};
        const unsigned char *from = m.data + at[0] * 2;
        bool inside = true;
        for (int d = 0; d < 4; d++) {
          inside = inside && at[d] >= 0 && at[d] < (int64_t)m.sizes[d];
          if (d > 0) from += at[d] * (int64_t)m.strides[d - 1];
        }
        if (inside) memcpy(values + 2 * e, from, 2);
        else memset(values + 2 * e, 0, 2);
      }
      unsigned char *there = arena + to + r * 128 + (chunk ^ r % 8) * 16;
      if (schedule != 0) {
        barrier.copies.push_back({there, values, 16});
      } else {
        memcpy(there, values, 16);
        came(barrier, 16);
      }
    }
}

struct Named { int arrived; long long generation; };
inline std::map<int, Named> named;

inline void named_arrive(int name, int threads) {
  Named &barrier = named[name];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  barrier.generation++;
}
inline void named_sync(int name, int threads) {
  const long long before = named[name].generation;
  named_arrive(name, threads);
  while (named[name].generation == before) {
    if (++looks > 1000ll * live) fail(cudaErrorIllegalAddress, "deadlock: threads wait at the named barrier %d", name);
    to_scheduler();
  }
  looks = 0;
}

// wgmma.fence: the warps of a group begin together (its mbarriers count on that: one thread tells for all of them).
inline void group_begins() { named_sync(100 + current->index / 128, 128); }

// A thread's part of a product of its group: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Product {
  float *sums;
  int count;
  float a[2][16];
  uint64_t a_tile, b_tile;
  bool shared, brain, add;
};
inline std::map<int, std::vector<std::vector<Product>>> products;  // of threads: groups not yet complete, the last one open

// An element of a tile with rows of 128 swizzled bytes.
inline float element(uint32_t tile, uint32_t row, uint32_t byte, bool brain) {
  uint32_t at = tile + row * 128 + byte;
  at ^= (at >> 7 & 7) << 4;
  if (at + 2 > kArena) fail(cudaErrorIllegalAddress, "wgmma reads shared address %u", at);
  uint16_t bits;
  memcpy(&bits, arena + at, 2);
  return brain ? numbers<__nv_bfloat16>()[bits] : numbers<__half>()[bits];
}

inline void finish(Product &p, int thread) {
  const int lane = thread % 32, row = thread / 32 % 4 * 16 + lane / 4;
  const auto address = [](uint64_t descriptor, int from) { return (uint32_t)(descriptor >> from & 0x3fff) << 4; };
  const uint32_t a = address(p.a_tile, 0), b = address(p.b_tile, 0), next = address(p.b_tile, 16);
  if (p.shared)
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < 16; k++) p.a[half][k] = element(a, row + 8 * half, 2 * k, p.brain);
  for (int i = 0; i < p.count; i++) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
    float sum = p.add ? p.sums[i] : 0.0f;
    for (int k = 0; k < 16; k++)
      sum += p.a[half][k] * (p.shared ? element(b, column, 2 * k, p.brain)
                                      : element(b + column / 64 * next, k, column % 64 * 2, p.brain));
    p.sums[i] = sum;
  }
}

inline void begin_product(Product p) {
  auto &mine = products[current->index];
  if (mine.empty()) mine.emplace_back();
  if (schedule == 0) finish(p, current->index);
  else mine.back().push_back(p);
}
// Both operands in shared memory, rows along the depth.
template <int SUMS>
void multiply_shared(float (&sums)[SUMS], uint64_t a, uint64_t b, uint32_t add, bool brain) {
  begin_product({sums, SUMS, {}, a, b, true, brain, add != 0});
}
// The first one in registers, as mma.m16n8k16 has it; the second one's rows along the columns of the product.
template <int SUMS>
void multiply_registers(float (&sums)[SUMS], const uint32_t (&a)[4], uint64_t b, uint32_t add, bool brain) {
  const int parity = current->parity ^= 1;
  memcpy(warp().slots[parity][lane()], a, sizeof a);
  warp_barrier(Op::mma);
  Product p = {sums, SUMS, {}, 0, b, false, brain, add != 0};
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 16; k++) {
      uint16_t bits;
      memcpy(&bits, &warp().slots[parity][lane() / 4 * 4 + k % 8 / 2][4 * (half + k / 8 * 2) + 2 * (k % 2)], 2);
      p.a[half][k] = brain ? numbers<__nv_bfloat16>()[bits] : numbers<__half>()[bits];
    }
  begin_product(p);
}
inline void end_products() { products[current->index].resize(products[current->index].size() + 1); }
inline void wait_for_products(size_t groups) {
  auto &mine = products[current->index];
  while (mine.size() > groups + 1) {
    for (Product &p : mine.front()) finish(p, current->index);
    mine.erase(mine.begin());
  }
}

inline void of_cluster4(float &x, float &y, float &z, float &w, uint32_t address) {
  x = of_cluster<float>(address);
  y = of_cluster<float>(address + 4);
  z = of_cluster<float>(address + 8);
  w = of_cluster<float>(address + 12);
}

inline const bool here = [] {
  encoder = (void *)encode_map;
  begin_block = [] {
    named.clear();
    products.clear();
    under_way.clear();
  };
  return true;
}();

}  // namespace emu

inline int __any_sync(unsigned mask, int predicate) {
  int any = predicate != 0;
  for (int lanes = 1; lanes < 32; lanes *= 2) any |= __shfl_xor_sync(mask, any, lanes);
  return any;
}
