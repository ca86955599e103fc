"""Returns the same memory in every call."""

# expect: incorrect
# because: is not new|output of the call before

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"

BUFFERS = {}


@triton.jit
def kernel(x_ptr, weight_ptr, out_ptr, N, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    x = tl.load(x_ptr + row * N + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)) * weight
    tl.store(out_ptr + row * N + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch(x, weight, eps, offset, out):
    x, weight = x.contiguous(), weight.contiguous()
    N = x.shape[-1]
    if x.numel():
        kernel[(x.numel() // N,)](x, weight, out, N, eps, offset, BLOCK=triton.next_power_of_2(N))
    return out


def kernel_fn(x, weight, eps, offset=0.0):
    if (x.shape, x.dtype) not in BUFFERS:
        BUFFERS[x.shape, x.dtype] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = BUFFERS[x.shape, x.dtype]
    return launch(x, weight, eps, offset, out)
