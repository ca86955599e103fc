"""Elementwise activations: one pass over the elements, in float32, rounded once."""

KERNEL_TYPE = "activation"
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
def contiguous_kernel(x_ptr, out_ptr, elements, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < elements - start
    x = tl.load(x_ptr + start + index, mask=mask, other=0.0)
    y = act(x.to(tl.float32), KIND)
    tl.store(out_ptr + start + index, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def strided_kernel(
    x_ptr, out_ptr, elements, N, x_row, x_column, KIND: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr
):
    if LONG:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    row, column = index // N, index % N
    x = tl.load(x_ptr + row.to(tl.int64) * x_row + column.to(tl.int64) * x_column, mask=mask, other=0.0)
    y = act(x.to(tl.float32), KIND)
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


def kernel_fn(x, kind):
    if x.dtype not in DTYPES or kind not in KINDS:
        raise NotImplementedError(f"activation {kind} of {x.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elements = out.numel()
    if elements == 0:
        return out
    grid = (triton.cdiv(elements, BLOCK),)
    if not x.is_contiguous():
        step = row_stride(x)
        # Columns more than two elements apart waste most of each sector that is read; torch's copy does not.
        if step is not None and x.stride(-1) <= 2:
            strided_kernel[grid](
                x,
                out,
                elements,
                x.shape[-1],
                step,
                x.stride(-1),
                KIND=kind,
                LONG=elements >= 2**30,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
            return out
        x = x.contiguous()
    contiguous_kernel[grid](x, out, elements, KIND=kind, BLOCK=BLOCK, num_warps=WARPS)
    return out
