"""Softmax over any dimension.

Rows that fit are read once and kept in registers; longer ones are read twice, with a running maximum and sum. Where the
dimension's elements lie apart in memory, a program takes a tile of neighbouring rows, so that what it reads lies together.
"""

KERNEL_TYPE = "softmax"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

TILE = 2048  # tune(block): 1024, 2048, 4096, 8192
LONGEST = 16384  # tune(algorithm): 4096, 8192, 16384
CHUNK = 4096  # tune(memory): 1024, 2048, 4096, 8192
PER_THREAD = 16  # tune(launch): 8, 16, 32
ACROSS = 32  # tune(block): 16, 32, 64, 128
ALONG = 32  # tune(memory): 8, 16, 32, 64

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def finite_maximum(maximum):
    """A maximum that can be subtracted: 0 for rows in which nothing but -inf was seen, whose exponentials are 0."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def short_kernel(x_ptr, out_ptr, M, N, x_row, x_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of at most BLOCK columns, ROWS of them at once. Rows of -inf give NaN: their sum is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < M)[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask=mask, other=float("-inf")).to(
        tl.float32
    )
    e = tl.exp(x - finite_maximum(tl.max(x, axis=1))[:, None])
    y = e / tl.sum(e, axis=1)[:, None]
    tl.store(out_ptr + row[:, None] * N + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def long_kernel(x_ptr, out_ptr, N, chunks, x_row, x_column, BLOCK: tl.constexpr):
    """One row of any length, in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    maximum = float("-inf")
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(chunks):
        first = tl.cast(chunk, tl.int64) * BLOCK
        size = tl.minimum(N - first, BLOCK).to(tl.int32)
        mask = lane < size
        x = tl.load(
            x_ptr + row * x_row + first * x_column + lane * x_column,
            mask=mask,
            other=float("-inf"),
        )
        x = x.to(tl.float32)
        grown = tl.maximum(maximum, tl.max(x, axis=0))
        base = finite_maximum(grown)
        sums = sums * tl.exp(maximum - base) + tl.exp(x - base)
        maximum = grown
    base = finite_maximum(maximum)
    total = tl.sum(sums, axis=0)
    for chunk in range(chunks):
        first = tl.cast(chunk, tl.int64) * BLOCK
        size = tl.minimum(N - first, BLOCK).to(tl.int32)
        mask = lane < size
        x = tl.load(x_ptr + row * x_row + first * x_column + lane * x_column, mask=mask, other=float("-inf"))
        y = tl.exp(x.to(tl.float32) - base) / total
        tl.store(out_ptr + row * N + first + lane, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def across_kernel(
    x_ptr,
    out_ptr,
    N,
    steps,
    inner,
    blocks,
    x_outer,
    x_dim,
    x_inner,
    out_outer,
    out_dim,
    out_inner,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """ACROSS neighbouring rows of any length, ALONG elements of each at once."""
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    x_ptr += outer * x_outer
    out_ptr += outer * out_outer
    lane = tl.arange(0, ALONG)
    maximum = tl.full([ACROSS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ACROSS], dtype=tl.float32)
    for step in range(steps):
        k = tl.cast(step, tl.int64) * ALONG + lane
        mask = (k < N)[:, None] & (i < inner)[None, :]
        x = tl.load(x_ptr + k[:, None] * x_dim + i[None, :] * x_inner, mask=mask, other=float("-inf"))
        x = x.to(tl.float32)
        grown = tl.maximum(maximum, tl.max(x, axis=0))
        base = finite_maximum(grown)
        total = total * tl.exp(maximum - base) + tl.sum(tl.exp(x - base[None, :]), axis=0)
        maximum = grown
    base = finite_maximum(maximum)
    for step in range(steps):
        k = tl.cast(step, tl.int64) * ALONG + lane
        mask = (k < N)[:, None] & (i < inner)[None, :]
        x = tl.load(x_ptr + k[:, None] * x_dim + i[None, :] * x_inner, mask=mask, other=float("-inf"))
        y = tl.exp(x.to(tl.float32) - base[None, :]) / total[None, :]
        target = out_ptr + k[:, None] * out_dim + i[None, :] * out_inner
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=mask)


def merged(shape, strides):
    """Dimensions merged into one: its size and stride; None where they do not merge."""
    count, stride = 1, 0
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if count > 1 and step != stride * count:
            return None
        if count == 1:
            stride = step
        count *= size
    return count, stride


def kernel_fn(x, dim=-1):
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"softmax of {x.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    shape = tuple(x.shape) or (1,)
    strides = tuple(x.stride()) or (1,)
    dim = dim % len(shape)
    outer = merged(shape[:dim], strides[:dim])
    inner = merged(shape[dim + 1 :], strides[dim + 1 :])
    if outer is None or inner is None:
        x = x.contiguous()
        strides = tuple(x.stride())
        outer = merged(shape[:dim], strides[:dim])
        inner = merged(shape[dim + 1 :], strides[dim + 1 :])
    N = shape[dim]
    (groups, x_outer), x_dim, (width, x_inner) = outer, strides[dim], inner
    # Strides of out, which is contiguous.
    out_outer, out_dim, out_inner = N * width, width, 1
    if width == 1 and x_dim > 2 and x_outer == 1:
        # A transposed matrix: what lies together are the elements of neighbouring rows.
        width, x_inner, out_inner = groups, x_outer, out_outer
        groups, x_outer, out_outer = 1, 0, 0
    if width > 1:
        blocks = triton.cdiv(width, ACROSS)
        across_kernel[(groups * blocks,)](
            x,
            out,
            N,
            triton.cdiv(N, ALONG),
            width,
            blocks,
            x_outer,
            x_dim,
            x_inner,
            out_outer,
            out_dim,
            out_inner,
            ALONG=ALONG,
            ACROSS=ACROSS,
            num_warps=min(8, max(1, ALONG * ACROSS // 256)),
        )
        return out
    if N > LONGEST:
        warps = min(16, max(1, CHUNK // (32 * PER_THREAD)))
        long_kernel[(groups,)](x, out, N, triton.cdiv(N, CHUNK), x_outer, x_dim, BLOCK=CHUNK, num_warps=warps)
        return out
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    warps = min(16, max(1, rows * block // (32 * PER_THREAD)))
    short_kernel[(triton.cdiv(groups, rows),)](
        x, out, groups, N, x_outer, x_dim, ROWS=rows, BLOCK=block, num_warps=warps
    )
    return out
