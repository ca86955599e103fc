"""Leaves to the compiler how exactly it multiplies: on tensor cores float32 loses thirteen bits."""

# expect: incorrect
# because: wrong
# needs: gpu

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"
SUPPORTS = {"dtype": ["float32"], "activation": ["none"]}

BLOCK = 32


@triton.jit
def kernel(
    a_ptr,
    b_ptr,
    add_ptr,
    out_ptr,
    factor_a,
    factor_b,
    M,
    N,
    K,
    ab,
    am,
    ak,
    bb,
    bk,
    bn,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(
            a_ptr + batch * ab + m[:, None] * am + k[None, :] * ak, (m[:, None] < M) & (k[None, :] < K), 0.0
        )
        b = tl.load(
            b_ptr + batch * bb + k[:, None] * bk + n[None, :] * bn, (k[:, None] < K) & (n[None, :] < N), 0.0
        )
        total = tl.dot(a, b, total, input_precision="tf32")
    if HAS_A:
        total *= tl.load(factor_a)
    if HAS_B:
        total *= tl.load(factor_b)
    at = batch * M * N + m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + at, total + tl.load(add_ptr + at, inside, 0.0), inside)


def kernel_fn(a, b, bias=None, residual=None, activation="none", scale_a=None, scale_b=None):
    M, K = a.shape[-2:]
    N = b.shape[-1]
    out = torch.empty((*a.shape[:-1], N), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    added = torch.zeros_like(out)
    if residual is not None:
        added.copy_(residual)
    elif bias is not None:
        added.copy_(bias.expand(out.shape))
    batches = a.shape[0] if a.dim() == 3 else 1
    strides = [(t.stride(0) if t.dim() == 3 else 0, t.stride(-2), t.stride(-1)) for t in (a, b)]
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK), batches)
    kernel[grid](
        a,
        b,
        added,
        out,
        a if scale_a is None else scale_a,
        b if scale_b is None else scale_b,
        M,
        N,
        K,
        *strides[0],
        *strides[1],
        HAS_A=scale_a is not None,
        HAS_B=scale_b is not None,
        BLOCK=BLOCK,
    )
    return out
