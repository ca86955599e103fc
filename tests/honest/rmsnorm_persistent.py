"""A fixed number of programs, each of which takes every so many rows."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"

PROGRAMS = 8


@triton.jit
def kernel(
    x_ptr, weight_ptr, out_ptr, rows, N, weight_step, eps, offset, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = tl.load(weight_ptr + column * weight_step, mask=inside, other=0.0).to(tl.float32) + offset
    for row in range(tl.program_id(0).to(tl.int64), rows, PROGRAMS):
        start = row * N
        x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        y = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)) * weight
        tl.store(out_ptr + start + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def kernel_fn(x, weight, eps, offset=0.0):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    N = x.shape[-1]
    kernel[(PROGRAMS,)](
        x.contiguous(),
        weight,
        out,
        x.numel() // N,
        N,
        weight.stride(0),
        eps,
        offset,
        PROGRAMS=PROGRAMS,
        BLOCK=triton.next_power_of_2(N),
    )
    return out
