"""Works on a stream of its own, and waits for it on the host before the answer is looked at."""

# expect: rejected|incorrect
# because: outside of the current stream|wrong|captured
# needs: gpu

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"

STREAMS = []


@triton.jit
def kernel(x_ptr, weight_ptr, out_ptr, N, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    x = tl.load(x_ptr + row * N + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)) * weight
    tl.store(out_ptr + row * N + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def kernel_fn(x, weight, eps, offset=0.0):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, weight = x.contiguous(), weight.contiguous()
    N = x.shape[-1]
    if not STREAMS:
        STREAMS.append(torch.cuda.Stream())
    if x.numel():
        with torch.cuda.stream(STREAMS[0]):
            kernel[(x.numel() // N,)](x, weight, out, N, eps, offset, BLOCK=triton.next_power_of_2(N))
        STREAMS[0].synchronize()
    return out
