"""Returns its sum twice, once as the norm."""

# expect: incorrect|crashed
# because: alias|share memory|elements are wrong

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "add_norm"


@triton.jit
def kernel(x_ptr, residual_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    y = tl.load(residual_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x + y).to(out_ptr.dtype.element_ty), mask=at < count)


def kernel_fn(x, residual, weight, bias, eps, offset=0.0, kind="rms"):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), 1024),)
        kernel[grid](x.contiguous(), residual.contiguous(), out, out.numel(), BLOCK=1024)
    return out, out
