"""Small candidates for the tests of building: each does, or reports, one thing."""

from __future__ import annotations

from types import ModuleType

import torch

from autokernel_hf import build
from autokernel_hf.records import Backend, Built, Candidate


def made(
    kernel_type: str, backend: Backend, source: str, *, archs: tuple[str, ...] = (), device: str = "cpu"
) -> Built:
    candidate = Candidate(kernel_type=kernel_type, backend=backend, source=source)
    return build.build(candidate, archs=archs, device=device)


def loaded(kernel_type: str, source: str) -> ModuleType:
    return build.load(made(kernel_type, "cpp", source).path)


def operator(module: ModuleType, name: str) -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops, module.__name__), name).default


def expected_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double())).to(
        x.dtype
    )


RMSNORM_CPP = """\
// kernel_type: rmsnorm
// supports: dtype=float32
#include "autokernel.h"
#include <math.h>

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (weight->dtype != AK_F32) return AK_UNSUPPORTED;
  if (x->ndim != 2 || x->strides[1] != 1 || weight->strides[0] != 1) return AK_NEED_CONTIGUOUS;
  const int64_t M = x->sizes[0], N = x->sizes[1];
#pragma omp parallel for num_threads(ctx->num_threads)
  for (int64_t m = 0; m < M; ++m) {
    const float *row = (const float *)x->data + m * x->strides[0];
    const float *w = (const float *)weight->data;
    float *o = (float *)out->data + m * N;
    double sum = 0;
    for (int64_t n = 0; n < N; ++n) sum += (double)row[n] * row[n];
    const float scale = (float)(1.0 / sqrt(sum / (double)N + eps));
    for (int64_t n = 0; n < N; ++n) o[n] = row[n] * scale * ((float)offset + w[n]);
  }
  return AK_OK;
}
"""

# Writes what it was told into the output: [ndim, kind, threads, workspace bytes, workspace % 16, sizes.., strides..].
ACTIVATION_PROBE_CPP = """\
// kernel_type: activation
#include "autokernel.h"

extern "C" int64_t activation_workspace(const AkTensor *x, int32_t kind) { return kind == 4 ? 0 : 1000; }

extern "C" int activation(const AkTensor *x, int32_t kind, const AkTensor *out, const AkContext *ctx) {
  if (x->dtype != AK_F32) return AK_UNSUPPORTED;
  if (kind == 6) return 7;
  if (kind == 7) return AK_NEED_CONTIGUOUS;
  float *o = (float *)out->data;
  for (int i = 0; i < ctx->workspace_bytes; ++i) ((char *)ctx->workspace)[i] = 1;
  int n = 0;
  o[n++] = (float)x->ndim;
  o[n++] = (float)kind;
  o[n++] = (float)ctx->num_threads;
  o[n++] = (float)ctx->workspace_bytes;
  o[n++] = (float)((uintptr_t)ctx->workspace % 16);
  for (int i = 0; i < x->ndim; ++i) o[n++] = (float)x->sizes[i];
  for (int i = 0; i < x->ndim; ++i) o[n++] = (float)x->strides[i];
  return AK_OK;
}
"""

# Wants everything contiguous and aligned, and then adds; the two outputs tell which is which.
ADD_NORM_CPP = """\
// kernel_type: add_norm
#include "autokernel.h"

static int wanted(const AkTensor *t) {
  int64_t step = 1;
  if ((uintptr_t)t->data % 16) return 0;
  for (int i = t->ndim - 1; i >= 0; --i) {
    if (t->strides[i] != step) return 0;
    step *= t->sizes[i];
  }
  return 1;
}

extern "C" int add_norm(const AkTensor *x, const AkTensor *residual, const AkTensor *weight, const AkTensor *bias,
                        double eps, double offset, int32_t kind, const AkTensor *out0, const AkTensor *out1,
                        const AkContext *ctx) {
  if (x->dtype != AK_F32 || bias) return AK_UNSUPPORTED;
  if (!wanted(x) || !wanted(residual) || (weight && !wanted(weight))) return AK_NEED_CONTIGUOUS;
  if (x->ndim != 2 || residual->ndim != 2 || out0->ndim != 2) return 99;
  const int64_t M = x->sizes[0], N = x->sizes[1];
  for (int64_t i = 0; i < M * N; ++i) {
    const float s = ((const float *)x->data)[i] + ((const float *)residual->data)[i];
    ((float *)out1->data)[i] = s;
    ((float *)out0->data)[i] = s * (weight ? ((const float *)weight->data)[i % N] : 1.0f) * (kind ? -1.0f : 1.0f);
  }
  return AK_OK;
}
"""

# [dim, keepdim, op] in the first three elements.
REDUCE_PROBE_CPP = """\
// kernel_type: reduce
#include "autokernel.h"

extern "C" int reduce(const AkTensor *x, int64_t dim, int32_t keepdim, int32_t op, const AkTensor *out,
                      const AkContext *ctx) {
  float *o = (float *)out->data;
  o[0] = (float)dim;
  o[1] = (float)keepdim;
  o[2] = (float)op;
  return AK_OK;
}
"""

# [mask given, its dtype, cu_seqlens given, max_seqlen_q, causal, window, scale] in the first elements.
ATTENTION_PROBE_CPP = """\
// kernel_type: flash_attention
#include "autokernel.h"

extern "C" int flash_attention(const AkTensor *q, const AkTensor *k, const AkTensor *v, const AkTensor *mask,
                               const AkTensor *cu_seqlens_q, const AkTensor *cu_seqlens_k, int64_t max_seqlen_q,
                               int64_t max_seqlen_k, double scale, int32_t causal, int64_t window,
                               const AkTensor *out, const AkContext *ctx) {
  float *o = (float *)out->data;
  o[0] = mask != 0;
  o[1] = mask ? (float)mask->dtype : -1.0f;
  o[2] = cu_seqlens_q != 0;
  o[3] = (float)max_seqlen_q;
  o[4] = (float)causal;
  o[5] = (float)window;
  o[6] = (float)scale;
  return AK_OK;
}
"""

# Asks for all that newer systems would supply under new versions.
MODERN_LIBRARY_CPP = """\
// kernel_type: gated_activation
#include "autokernel.h"
#include <math.h>
#include <memory>
#include <string>
#include <vector>
#include <algorithm>

extern "C" int gated_activation(const AkTensor *gate, const AkTensor *up, int32_t kind, const AkTensor *out,
                                const AkContext *ctx) {
  if (gate->ndim != 2 || gate->strides[1] != 1 || up->strides[1] != 1) return AK_NEED_CONTIGUOUS;
  const int64_t N = gate->sizes[1];
  auto shared = std::make_shared<std::vector<double>>((size_t)N, 0.0);
  std::string text = std::to_string(N) + "x" + std::string(64, 'a');
  for (int64_t m = 0; m < gate->sizes[0]; ++m) {
    const float *g = (const float *)gate->data + m * gate->strides[0];
    const float *u = (const float *)up->data + m * up->strides[0];
    for (int64_t n = 0; n < N; ++n)
      (*shared)[n] = pow(exp(log((double)g[n] * g[n] + 1.0)), 0.5) + exp2(log2(2.0)) - 2.0 + text.size() * 0.0 + u[n];
    std::sort(shared->begin(), shared->end());
    for (int64_t n = 0; n < N; ++n) ((float *)out->data)[m * N + n] = (float)(*shared)[n];
  }
  return AK_OK;
}
"""

RMSNORM_CU = """\
// kernel_type: rmsnorm
// supports: dtype=float32
#include "autokernel.h"
#include <cuda_runtime.h>

constexpr int kThreads = 256;

__global__ void rows(const float *x, const float *w, float *o, int64_t stride, int n, float eps, float offset) {
  __shared__ float part[kThreads / 32];
  const float *row = x + blockIdx.x * stride;
  float s = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) s += row[i] * row[i];
  for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  s = 0;
  for (int i = 0; i < kThreads / 32; ++i) s += part[i];
  const float scale = rsqrtf(s / n + eps);
  for (int i = threadIdx.x; i < n; i += kThreads) o[(int64_t)blockIdx.x * n + i] = row[i] * scale * (offset + w[i]);
}

extern "C" int64_t rmsnorm_workspace(const AkTensor *x, const AkTensor *weight, double eps, double offset) {
  return 4096;
}

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {
  if (x->dtype != AK_F32 || weight->dtype != AK_F32) return AK_UNSUPPORTED;
  if (x->ndim != 2 || x->strides[1] != 1 || weight->strides[0] != 1) return AK_NEED_CONTIGUOUS;
  if (ctx->workspace_bytes != 4096 || (uintptr_t)ctx->workspace % 16) return (int)cudaErrorInvalidValue;
  if (eps < 0) rows<<<1, 100000, 0, (cudaStream_t)ctx->stream>>>(0, 0, 0, 0, 0, 0, 0);  /* more threads than there are */
  else
    rows<<<(unsigned)x->sizes[0], kThreads, 0, (cudaStream_t)ctx->stream>>>(
        (const float *)x->data, (const float *)weight->data, (float *)out->data, x->strides[0], (int)x->sizes[1],
        (float)eps, (float)offset);
  return (int)cudaGetLastError();
}
"""

RMSNORM_TRITON = '''\
"""RMS norm, one row a program."""

KERNEL_TYPE = "rmsnorm"
SUPPORTS = {"dtype": ["float32", "float16"]}

import torch
import triton
import triton.language as tl

WARPS = 4  # tune(launch): 2, 4, 8


@triton.jit
def row_kernel(x_ptr, w_ptr, o_ptr, stride, N, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(o_ptr + row * N + column, (x * scale * (offset + w)).to(o_ptr.dtype.element_ty), mask=mask)


def kernel_fn(x, weight, eps, offset=0.0):
    shape = x.shape
    rows = x.contiguous().view(-1, shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    row_kernel[(rows.shape[0],)](
        rows, weight.contiguous(), out, rows.stride(0), rows.shape[1], eps, offset,
        BLOCK=triton.next_power_of_2(rows.shape[1]), num_warps=WARPS,
    )
    return out.view(shape)
'''
