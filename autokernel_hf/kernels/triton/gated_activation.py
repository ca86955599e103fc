"""act(gate) * up: one pass over both inputs, in float32, rounded once."""

KERNEL_TYPE = "gated_activation"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

BLOCK = 1024  # tune(block): 256, 512, 1024, 2048, 4096
WARPS = 4  # tune(launch): 1, 2, 4, 8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("none", "gelu", "gelu_tanh", "gelu_new", "quick_gelu", "silu", "relu", "relu2")


@triton.jit
def act(x, KIND: tl.constexpr):
    """The activation of a float32 tile. Smooth kinds give NaN at -inf, as torch's do."""
    y = x
    if KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh" or KIND == "gelu_new":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u, which needs one exponential that cannot overflow to NaN.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "quick_gelu":
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif KIND == "relu2":
        y = tl.where(x <= 0.0, 0.0, x)
        y = y * y
    return y


@triton.jit
def contiguous_kernel(gate_ptr, up_ptr, out_ptr, elements, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < elements - start
    gate = tl.load(gate_ptr + start + index, mask=mask, other=0.0)
    up = tl.load(up_ptr + start + index, mask=mask, other=0.0)
    y = act(gate.to(tl.float32), KIND) * up.to(tl.float32)
    tl.store(out_ptr + start + index, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def strided_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    elements,
    N,
    gate_row,
    gate_column,
    up_row,
    up_column,
    KIND: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if LONG:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    row, column = (index // N).to(tl.int64), (index % N).to(tl.int64)
    gate = tl.load(gate_ptr + row * gate_row + column * gate_column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_row + column * up_column, mask=mask, other=0.0)
    y = act(gate.to(tl.float32), KIND) * up.to(tl.float32)
    tl.store(out_ptr + index, y.to(out_ptr.dtype.element_ty), mask=mask)


def row_stride(x):
    """The stride between rows, with the leading dimensions merged into one; None where they do not merge."""
    rows, stride = 1, 0
    for size, step in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if rows > 1 and step != stride * rows:
            return None
        if rows == 1:
            stride = step
        rows *= size
    return stride


def with_rows(x):
    """x and its row stride; a copy where rows have no single stride or columns lie too far apart to be read well."""
    step = row_stride(x)
    if step is None or x.stride(-1) > 2:
        x = x.contiguous()
        step = x.shape[-1]
    return x, step


def kernel_fn(gate, up, kind="silu"):
    if gate.dtype not in DTYPES or up.dtype not in DTYPES or kind not in KINDS:
        raise NotImplementedError(f"gated activation {kind} of {gate.dtype} and {up.dtype}")
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    elements = out.numel()
    if elements == 0:
        return out
    grid = (triton.cdiv(elements, BLOCK),)
    if gate.is_contiguous() and up.is_contiguous():
        contiguous_kernel[grid](gate, up, out, elements, KIND=kind, BLOCK=BLOCK, num_warps=WARPS)
        return out
    gate, gate_row = with_rows(gate)
    up, up_row = with_rows(up)
    strided_kernel[grid](
        gate,
        up,
        out,
        elements,
        gate.shape[-1],
        gate_row,
        gate.stride(-1),
        up_row,
        up.stride(-1),
        KIND=kind,
        LONG=elements >= 2**30,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
