"""A row a program, read by its strides without a copy where there are two dimensions."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "gated_activation"
SUPPORTS = {"kind": ["silu"], "dtype": ["float32", "float16"]}


@triton.jit
def kernel(gate_ptr, up_ptr, out_ptr, N, gate_row, gate_step, up_row, up_step, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    gate = tl.load(gate_ptr + row * gate_row + column * gate_step, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column * up_step, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * N + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def flat(t):
    return t if t.dim() == 2 else t.contiguous().view(-1, t.shape[-1] if t.dim() else 1)


def kernel_fn(gate, up, kind="silu"):
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    gate, up = flat(gate), flat(up)
    rows, N = gate.shape
    kernel[(rows,)](gate, up, out, N, *gate.stride(), *up.stride(), BLOCK=triton.next_power_of_2(N))
    return out
