"""Computes the offset of a row in 32 bits."""

# expect: incorrect|crashed
# because: 131075x16384
# needs: gpu

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"

WARPS = 4


@triton.jit
def kernel(x_ptr, weight_ptr, out_ptr, N, x_step, weight_step, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + row * x_step + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column * weight_step, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)
    y = x * scale * (weight + offset)
    tl.store(out_ptr + row * N + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def kernel_fn(x, weight, eps, offset=0.0):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    N = x.shape[-1]
    rows = x.contiguous().view(-1, N)
    kernel[(rows.shape[0],)](
        rows,
        weight,
        out,
        N,
        rows.stride(0),
        weight.stride(0),
        eps,
        offset,
        BLOCK=triton.next_power_of_2(N),
        num_warps=WARPS,
    )
    return out
