// Of the CUDA runtime and its intrinsics, what the emulation (cuda_emulation.h) needs beside the machine itself: questions
// to the device, one of compute capability 8.0 or, with clusters, 9.0, hints for caches, and copies by the pipeline's functions.
#pragma once

#include "cuda_emulation.h"

inline __half __hmax(__half a, __half b) { return __float2half_rn(fmaxf(__half2float(a), __half2float(b))); }
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(fmaxf(__bfloat162float(a), __bfloat162float(b)));
}
template <typename Pair>
Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline float __uint_as_float(unsigned i) { float f; memcpy(&f, &i, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (bits & 31));
}
template <typename T>
T __ldcs(const T *p) { return *p; }
template <typename T>
void __stcs(T *p, T value) { *p = value; }
inline void __trap() { emu::fail(cudaErrorIllegalAddress, "a trap"); }

inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
  if (bytes != 16) emu::fail(cudaErrorIllegalAddress, "an asynchronous copy of %zu bytes", bytes);
  emu::copy_async((uint32_t)__cvta_generic_to_shared(to), from, (int)bytes);
}
inline void __pipeline_commit() { emu::commit_copies(); }
inline void __pipeline_wait_prior(size_t groups) { emu::wait_for_copies(groups); }

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount           ? 108
           : attribute == cudaDevAttrComputeCapabilityMajor      ? emu::kCapability
                                                                 : (int)emu::kMostShared;
  return cudaSuccess;
}
struct cudaFuncAttributes { int ptxVersion; size_t sharedSizeBytes; };
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  attributes->ptxVersion = emu::kCapability * 10;
  attributes->sharedSizeBytes = 0;
  return cudaSuccess;
}

// Launches with attributes: of these, clusters only, and only on the device that has them.
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttributeValue {
  struct { unsigned x, y, z; } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute { cudaLaunchAttributeID id; cudaLaunchAttributeValue val; };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};
template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A... args) {
  if (emu::kCapability < 9 || config->numAttrs != 1 || config->attrs->id != cudaLaunchAttributeClusterDimension) {
    emu::fail(cudaErrorInvalidConfiguration, "a launch with attributes that the emulated device lacks");
    return emu::last_error;
  }
  const auto size = config->attrs->val.clusterDim;
  if (size.y != 1 || size.z != 1) {
    emu::fail(cudaErrorInvalidConfiguration, "a cluster of (%u, %u, %u)", size.x, size.y, size.z);
    return emu::last_error;
  }
  emu::launch(emu::Config(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, (int)size.x), kernel,
              args...);
  return emu::last_error;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel, int threads, size_t shared) {
  const size_t by_shared = shared == 0 ? 32 : emu::kMostShared / shared;
  *blocks = (int)(by_shared < 2048u / threads ? by_shared : 2048u / threads);
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, Kernel, const cudaLaunchConfig_t *) {
  *clusters = emu::kCapability < 9 ? 0 : 2;
  return cudaSuccess;
}

#include "cuda_emulation_tensor_maps.h"
