"""Gradient of softmax over any dimension, from its input: the softmax is made again.

Rows that fit are read once and kept in registers; longer ones are read twice. Where the dimension's elements lie apart
in memory, a program takes a tile of neighbouring rows, so that what it reads lies together.
"""

KERNEL_TYPE = "softmax_backward"
BACKEND = "triton"

import math

import torch
import triton
import triton.language as tl

TILE = 2048  # tune(block): 1024, 2048, 4096
LONGEST = 8192  # tune(algorithm): 2048, 4096, 8192
CHUNK = 4096  # tune(memory): 1024, 2048, 4096
PER_THREAD = 16  # tune(launch): 8, 16, 32
ACROSS = 32  # tune(block): 16, 32, 64
ALONG = 32  # tune(memory): 8, 16, 32, 64

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def finite_maximum(maximum):
    """A maximum that can be subtracted: 0 for rows in which nothing but -inf was seen, whose exponentials are 0."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def short_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    M,
    N,
    grad_row,
    grad_column,
    x_row,
    x_column,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of at most BLOCK columns, ROWS of them at once. Rows of -inf give NaN: their sum is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < M)[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask=mask, other=float("-inf"))
    grad = tl.load(grad_ptr + row[:, None] * grad_row + column[None, :] * grad_column, mask=mask, other=0.0)
    x = x.to(tl.float32)
    grad = grad.to(tl.float32)
    e = tl.exp(x - finite_maximum(tl.max(x, axis=1))[:, None])
    y = e / tl.sum(e, axis=1)[:, None]
    dx = y * (grad - tl.sum(y * grad, axis=1)[:, None])
    tl.store(out_ptr + row[:, None] * N + column[None, :], dx.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def long_kernel(
    grad_ptr, x_ptr, out_ptr, N, chunks, grad_row, grad_column, x_row, x_column, BLOCK: tl.constexpr
):
    """One row of any length, in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    maximum = float("-inf")
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=float("-inf")).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        grown = tl.maximum(maximum, tl.max(x, axis=0))
        base = finite_maximum(grown)
        shrink = tl.exp(maximum - base)
        e = tl.exp(x - base)
        sums = sums * shrink + e
        products = products * shrink + e * grad
        maximum = grown
    base = finite_maximum(maximum)
    total = tl.sum(sums, axis=0)
    mean = tl.sum(products, axis=0) / total
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=float("-inf")).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        dx = tl.exp(x - base) / total * (grad - mean)
        tl.store(out_ptr + row * N + column, dx.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def include(maximum, sums, products, x, grad):
    """A running maximum and, relative to it, sums of exponentials and of their products with grad, with a chunk more."""
    x = x.to(tl.float32)
    grown = tl.maximum(maximum, tl.max(x, axis=0))
    base = finite_maximum(grown)
    shrink = tl.exp(maximum - base)
    e = tl.exp(x - base)
    return grown, sums * shrink + e, products * shrink + e * grad.to(tl.float32)


@triton.jit
def dense_kernel(grad_ptr, x_ptr, out_ptr, N, BLOCK: tl.constexpr, PACK: tl.constexpr):
    """One row of any length of contiguous tensors, in chunks of BLOCK columns that start where memory has its 16-byte
    boundaries (every PACK elements), wherever the row does: all but the first and the last are read in packs.
    """
    first = tl.program_id(0).to(tl.int64) * N
    lead = (first % PACK).to(tl.int32)
    first = tl.multiple_of(first - lead, PACK)
    lane = tl.arange(0, BLOCK)
    head = (lane >= lead) & (lane < lead + N)
    whole = (lead + N) // BLOCK  # chunks, the first one included
    last = tl.maximum(whole, 1)
    tail = lane < lead + N - last * BLOCK
    maximum = float("-inf")
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    x = tl.load(x_ptr + first + lane, mask=head, other=float("-inf"))
    grad = tl.load(grad_ptr + first + lane, mask=head, other=0.0)
    maximum, sums, products = include(maximum, sums, products, x, grad)
    for chunk in range(1, whole):
        at = first + tl.cast(chunk, tl.int64) * BLOCK
        x = tl.load(x_ptr + at + lane)
        grad = tl.load(grad_ptr + at + lane)
        maximum, sums, products = include(maximum, sums, products, x, grad)
    at_tail = first + tl.cast(last, tl.int64) * BLOCK
    x = tl.load(x_ptr + at_tail + lane, mask=tail, other=float("-inf"))
    grad = tl.load(grad_ptr + at_tail + lane, mask=tail, other=0.0)
    maximum, sums, products = include(maximum, sums, products, x, grad)
    base = finite_maximum(maximum)
    total = tl.sum(sums, axis=0)
    mean = tl.sum(products, axis=0) / total
    scale = 1.0 / total
    dx = tl.exp(x.to(tl.float32) - base) * scale * (grad.to(tl.float32) - mean)
    tl.store(out_ptr + at_tail + lane, dx.to(out_ptr.dtype.element_ty), mask=tail)
    for back in range(1, whole):
        at = first + tl.cast(whole - back, tl.int64) * BLOCK
        x = tl.load(x_ptr + at + lane)
        grad = tl.load(grad_ptr + at + lane)
        dx = tl.exp(x.to(tl.float32) - base) * scale * (grad.to(tl.float32) - mean)
        tl.store(out_ptr + at + lane, dx.to(out_ptr.dtype.element_ty))
    x = tl.load(x_ptr + first + lane, mask=head, other=float("-inf"))
    grad = tl.load(grad_ptr + first + lane, mask=head, other=0.0)
    dx = tl.exp(x.to(tl.float32) - base) * scale * (grad.to(tl.float32) - mean)
    tl.store(out_ptr + first + lane, dx.to(out_ptr.dtype.element_ty), mask=head)


@triton.jit
def across_kernel(
    grad_ptr, x_ptr, out_ptr, N, steps, width, blocks, ALONG: tl.constexpr, ACROSS: tl.constexpr
):
    """ACROSS neighbouring rows of any length, ALONG elements of each at once; all tensors contiguous."""
    outer = (tl.program_id(0) // blocks).to(tl.int64) * N * width
    i = (tl.program_id(0) % blocks).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    lane = tl.arange(0, ALONG)
    maximum = tl.full([ACROSS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ACROSS], dtype=tl.float32)
    products = tl.zeros([ACROSS], dtype=tl.float32)
    for step in range(steps):
        k = tl.cast(step, tl.int64) * ALONG + lane
        mask = (k < N)[:, None] & (i < width)[None, :]
        place = outer + k[:, None] * width + i[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=float("-inf")).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        grown = tl.maximum(maximum, tl.max(x, axis=0))
        base = finite_maximum(grown)
        shrink = tl.exp(maximum - base)
        e = tl.exp(x - base[None, :])
        total = total * shrink + tl.sum(e, axis=0)
        products = products * shrink + tl.sum(e * grad, axis=0)
        maximum = grown
    base = finite_maximum(maximum)
    mean = products / total
    for step in range(steps):
        k = tl.cast(step, tl.int64) * ALONG + lane
        mask = (k < N)[:, None] & (i < width)[None, :]
        place = outer + k[:, None] * width + i[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=float("-inf")).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        dx = tl.exp(x - base[None, :]) / total[None, :] * (grad - mean[None, :])
        tl.store(out_ptr + place, dx.to(out_ptr.dtype.element_ty), mask=mask)


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


def kernel_fn(grad, x, dim=-1):
    if x.dtype not in DTYPES or grad.dtype != x.dtype:
        raise NotImplementedError(f"gradient of softmax: {grad.dtype}, {x.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.dim() == 0:
        grad, x = grad.view(1), x.view(1)
    dim = dim % x.dim()
    N = x.shape[dim]
    width = math.prod(x.shape[dim + 1 :])
    if width > 1:
        blocks = triton.cdiv(width, ACROSS)
        across_kernel[(out.numel() // (N * width) * blocks,)](
            grad.contiguous(),
            x.contiguous(),
            out,
            N,
            triton.cdiv(N, ALONG),
            width,
            blocks,
            ALONG=ALONG,
            ACROSS=ACROSS,
            num_warps=min(8, max(1, ALONG * ACROSS // 256)),
        )
        return out
    if dim < x.dim() - 1:  # what follows the dimension is one element
        grad, x = grad.reshape(x.shape[: dim + 1]), x.reshape(x.shape[: dim + 1])
    grad, grad_row = with_rows(grad)
    x, x_row = with_rows(x)
    strides = (grad_row, grad.stride(-1), x_row, x.stride(-1))
    M = out.numel() // N
    if N > LONGEST:
        warps = min(16, max(1, CHUNK // (32 * PER_THREAD)))
        dense = M == 1 or (grad_row == N and x_row == N)
        # Rows that all start at 16-byte boundaries are read in packs as it is.
        if N % 16 and dense and grad.stride(-1) == 1 and x.stride(-1) == 1 and N < 2**31 - CHUNK:
            pack = 16 // x.element_size()
            dense_kernel[(M,)](grad, x, out, N, BLOCK=CHUNK, PACK=pack, num_warps=warps)
            return out
        long_kernel[(M,)](grad, x, out, N, triton.cdiv(N, CHUNK), *strides, BLOCK=CHUNK, num_warps=warps)
        return out
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    warps = min(16, max(1, rows * block // (32 * PER_THREAD)))
    short_kernel[(triton.cdiv(M, rows),)](
        grad, x, out, M, N, *strides, ROWS=rows, BLOCK=block, num_warps=warps
    )
    return out
