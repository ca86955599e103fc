"""Two kernels: the factors of the rows first, in memory between them, then the products, a flat block at a time."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"

BLOCK = 512


@triton.jit
def factors(x_ptr, factor_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
        total += tl.sum(x * x, axis=0)
    tl.store(factor_ptr + row, 1.0 / tl.sqrt(total / N + eps))


@triton.jit
def scale(x_ptr, factor_ptr, weight_ptr, out_ptr, count, N, weight_step, offset, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + at // N, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + at % N * weight_step, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out_ptr + at, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=inside)


def kernel_fn(x, weight, eps, offset=0.0):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = out.numel()
    if count == 0:
        return out
    x = x.contiguous()
    N = x.shape[-1]
    between = torch.empty(count // N, dtype=torch.float32, device=x.device)
    factors[(count // N,)](x, between, N, eps, BLOCK=BLOCK)
    scale[(triton.cdiv(count, BLOCK),)](
        x, between, weight, out, count, N, weight.stride(0), offset, BLOCK=BLOCK
    )
    return out
