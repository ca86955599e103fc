// What the matrix kernels name beside the rest of the runtime: words and pairs of small numbers, and the host's part of
// tensor maps, which the emulated device of compute capability 8.0 has no use for: no driver writes any there.
#pragma once

#include "cuda_emulation_runtime.h"

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(both >> (order >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return r;
}

typedef uint16_t __nv_fp8x2_storage_t;
struct __half2_raw { unsigned short x, y; };
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
  const __half_raw low = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)x, kind);
  const __half_raw high = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(x >> 8), kind);
  __half2_raw r;
  memcpy(&r.x, &low, 2);
  memcpy(&r.y, &high, 2);
  return r;
}

template <typename... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*)(P...)) {
  return cudaFuncGetAttributes(attributes, (const void *)nullptr);
}

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
struct CUtensorMap { alignas(64) uint64_t words[16]; };
enum CUresult { CUDA_SUCCESS };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault };
namespace emu {
inline void *encoder = nullptr;  // of tensor maps
}
inline cudaError_t cudaGetDriverEntryPoint(const char *, void **found, int, cudaDriverEntryPointQueryResult *result) {
  *found = emu::encoder;
  *result = emu::encoder ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

#ifdef EMU_CLUSTERS
#include "cuda_emulation_hopper.h"
#endif
