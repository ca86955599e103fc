"""Gradients of the RMS norm. Programs go through rows with a step and keep their share of the weight's gradient in registers.

The shares, a row each in float32, are added up in a fixed order by a second kernel: no atomics, the same bits each time.
Rows too long for registers are read three times.
"""

KERNEL_TYPE = "rmsnorm_backward"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

PROGRAMS = 512  # tune(launch): 128, 256, 512, 1024
TILE = 2048  # tune(block): 1024, 2048, 4096
LONGEST = 8192  # tune(algorithm): 2048, 4096, 8192
CHUNK = 4096  # tune(memory): 1024, 2048, 4096
PER_THREAD = 16  # tune(launch): 8, 16, 32

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def short_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    share_ptr,
    M,
    N,
    steps,
    grad_row,
    grad_column,
    x_row,
    x_column,
    weight_column,
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of at most BLOCK columns, ROWS of them at once."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = tl.load(weight_ptr + column * weight_column, mask=inside, other=0.0).to(tl.float32) + offset
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(steps):
        row = (step * tl.num_programs(0) + program).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask=mask, other=0.0)
        grad = tl.load(
            grad_ptr + row[:, None] * grad_row + column[None, :] * grad_column, mask=mask, other=0.0
        )
        x = x.to(tl.float32)
        grad = grad.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
        normed = tl.where(mask, x * scale[:, None], 0.0)
        g = grad * weight[None, :]
        mean = tl.sum(g * normed, axis=1) / N
        dx = scale[:, None] * (g - normed * mean[:, None])
        tl.store(dx_ptr + row[:, None] * N + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        share += tl.sum(grad * normed, axis=0)
    tl.store(share_ptr + program.to(tl.int64) * N + column, share, mask=inside)


@triton.jit
def long_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    scale_ptr,
    N,
    chunks,
    grad_row,
    grad_column,
    x_row,
    x_column,
    weight_column,
    eps,
    offset,
    BLOCK: tl.constexpr,
):
    """The gradient of one row of any length, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column * weight_column, mask=mask, other=0.0).to(tl.float32) + offset
        squares += x * x
        products += grad * weight * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(scale_ptr + row, scale)
    mean = tl.sum(products, axis=0) * scale / N
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column * weight_column, mask=mask, other=0.0).to(tl.float32) + offset
        dx = scale * (grad * weight - x * scale * mean)
        tl.store(dx_ptr + row * N + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def share_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    share_ptr,
    M,
    N,
    steps,
    grad_row,
    grad_column,
    x_row,
    x_column,
    BLOCK: tl.constexpr,
):
    """A share of the weight's gradient of long rows: a block of columns of every so many rows."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(steps):
        row = (step * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        mask = inside & (row < M)
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < M, other=0.0)
        share += grad * (x * scale)
    tl.store(share_ptr + tl.program_id(1).to(tl.int64) * N + column, share, mask=inside)


@triton.jit
def total_kernel(share_ptr, dweight_ptr, shares, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, shares, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < shares)[:, None] & (column < N)[None, :]
        total += tl.load(share_ptr + row[:, None] * N + column[None, :], mask=mask, other=0.0)
    dweight = tl.sum(total, axis=0)
    tl.store(dweight_ptr + column, dweight.to(dweight_ptr.dtype.element_ty), mask=column < N)


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


def kernel_fn(grad, x, weight, eps, offset=0.0):
    if x.dtype not in DTYPES or grad.dtype != x.dtype or weight.dtype not in DTYPES:
        raise NotImplementedError(f"gradients of rmsnorm: {grad.dtype}, {x.dtype} by {weight.dtype}")
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    N = weight.shape[0]
    if N == 0:
        return dx, dweight
    M = dx.numel() // N
    shares = 0
    share = torch.empty((0,), dtype=torch.float32, device=x.device)
    if M > 0:
        grad, grad_row = with_rows(grad)
        x, x_row = with_rows(x)
        strides = (grad_row, grad.stride(-1), x_row, x.stride(-1))
        if N > LONGEST:
            scale = torch.empty((M,), dtype=torch.float32, device=x.device)
            warps = min(16, max(1, CHUNK // (32 * PER_THREAD)))
            long_kernel[(M,)](
                grad,
                x,
                weight,
                dx,
                scale,
                N,
                triton.cdiv(N, CHUNK),
                *strides,
                weight.stride(0),
                eps,
                offset,
                BLOCK=CHUNK,
                num_warps=warps,
            )
            blocks = triton.cdiv(N, 512)
            shares = min(M, max(1, triton.cdiv(4 * PROGRAMS, blocks)))
            share = torch.empty((shares, N), dtype=torch.float32, device=x.device)
            share_kernel[(blocks, shares)](
                grad, x, scale, share, M, N, triton.cdiv(M, shares), *strides, BLOCK=512, num_warps=4
            )
        else:
            block = triton.next_power_of_2(N)
            rows = max(1, TILE // block)
            shares = min(PROGRAMS, triton.cdiv(M, rows))
            share = torch.empty((shares, N), dtype=torch.float32, device=x.device)
            short_kernel[(shares,)](
                grad,
                x,
                weight,
                dx,
                share,
                M,
                N,
                triton.cdiv(M, rows * shares),
                *strides,
                weight.stride(0),
                eps,
                offset,
                ROWS=rows,
                BLOCK=block,
                num_warps=min(16, max(1, rows * block // (32 * PER_THREAD))),
            )
    total_kernel[(triton.cdiv(N, 32),)](share, dweight, shares, N, ROWS=32, BLOCK=32, num_warps=4)
    return dx, dweight
