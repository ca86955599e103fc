"""Gradient of an activation: one pass over two inputs, in float32, rounded once."""

KERNEL_TYPE = "activation_backward"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

BLOCK = 1024  # tune(block): 256, 512, 1024, 2048, 4096
WARPS = 4  # tune(launch): 1, 2, 4, 8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("none", "gelu", "gelu_tanh", "gelu_new", "quick_gelu", "silu", "relu", "relu2")


@triton.jit
def slope_of(x, KIND: tl.constexpr):
    """The derivative of an activation, of a float32 tile."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if KIND == "gelu":
        half = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = half + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh" or KIND == "gelu_new":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u; one less it is that of -2u, with its digits.
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = 1.0 / (1.0 + tl.exp(-u))
        t = 1.0 / (1.0 + tl.exp(u))
        slope = s + x * s * t * (1.5957691216057308 + 0.21406444881780074 * x * x)
    elif KIND == "quick_gelu":
        s = 1.0 / (1.0 + tl.exp(-1.702 * x))
        t = 1.0 / (1.0 + tl.exp(1.702 * x))
        slope = s + 1.702 * x * s * t
    elif KIND == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        t = 1.0 / (1.0 + tl.exp(x))
        slope = s + x * s * t
    elif KIND == "relu":
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "relu2":
        slope = 2.0 * tl.where(x <= 0.0, 0.0, x)
    return slope


@triton.jit
def contiguous_kernel(grad_ptr, x_ptr, out_ptr, elements, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < elements - start
    grad = tl.load(grad_ptr + start + index, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + start + index, mask=mask, other=0.0).to(tl.float32)
    dx = grad * slope_of(x, KIND)
    tl.store(out_ptr + start + index, dx.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def strided_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    elements,
    N,
    grad_row,
    grad_column,
    x_row,
    x_column,
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
    grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
    dx = grad * slope_of(x, KIND)
    tl.store(out_ptr + index, dx.to(out_ptr.dtype.element_ty), mask=mask)


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


def kernel_fn(grad, x, kind):
    if x.dtype not in DTYPES or grad.dtype != x.dtype or kind not in KINDS:
        raise NotImplementedError(f"gradient of activation {kind}: {grad.dtype}, {x.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elements = out.numel()
    if elements == 0:
        return out
    grid = (triton.cdiv(elements, BLOCK),)
    if grad.is_contiguous() and x.is_contiguous():
        contiguous_kernel[grid](grad, x, out, elements, KIND=kind, BLOCK=BLOCK, num_warps=WARPS)
        return out
    grad, grad_row = with_rows(grad)
    x, x_row = with_rows(x)
    strided_kernel[grid](
        grad,
        x,
        out,
        elements,
        x.shape[-1],
        grad_row,
        grad.stride(-1),
        x_row,
        x.stride(-1),
        KIND=kind,
        LONG=elements >= 2**30,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
