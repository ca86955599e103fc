"""Gradients of the layer norm. Programs go through rows with a step and keep their share of the parameters' gradients.

The shares, a row each in float32, are added up in a fixed order by a second kernel: no atomics, the same bits each time.
Rows too long for registers are read four times.
"""

KERNEL_TYPE = "layernorm_backward"
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
def load_weight(weight_ptr, column, weight_column, mask, WEIGHT: tl.constexpr):
    if WEIGHT:
        weight = tl.load(weight_ptr + column * weight_column, mask=mask, other=0.0).to(tl.float32)
    else:
        weight = tl.where(mask, 1.0, 0.0)
    return weight


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
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of at most BLOCK columns, ROWS of them at once. Shares of weight and bias lie one after the other."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = load_weight(weight_ptr, column, weight_column, inside, WEIGHT)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    dbias = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(steps):
        row = (step * tl.num_programs(0) + program).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask=mask, other=0.0)
        grad = tl.load(
            grad_ptr + row[:, None] * grad_row + column[None, :] * grad_column, mask=mask, other=0.0
        )
        x = x.to(tl.float32)
        grad = grad.to(tl.float32)
        mean = tl.sum(x, axis=1) / N
        centred = tl.where(mask, x - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / N + eps)
        normed = tl.where(mask, centred * scale[:, None], 0.0)
        g = grad * weight[None, :]
        first = tl.sum(g, axis=1) / N
        second = tl.sum(g * normed, axis=1) / N
        dx = scale[:, None] * (g - first[:, None] - normed * second[:, None])
        tl.store(dx_ptr + row[:, None] * N + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT:
            dweight += tl.sum(grad * normed, axis=0)
        if BIAS:
            dbias += tl.sum(grad, axis=0)
    if WEIGHT:
        tl.store(share_ptr + program.to(tl.int64) * N + column, dweight, mask=inside)
    if BIAS:
        share = tl.num_programs(0) + program if WEIGHT else program
        tl.store(share_ptr + share.to(tl.int64) * N + column, dbias, mask=inside)


@triton.jit
def long_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    moments_ptr,
    N,
    chunks,
    grad_row,
    grad_column,
    x_row,
    x_column,
    weight_column,
    eps,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one row of any length, its mean and its scale."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        total += tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        g = grad * load_weight(weight_ptr, column, weight_column, mask, WEIGHT)
        centred = tl.where(mask, x - mean, 0.0)
        squares += centred * centred
        sums += g
        products += g * centred
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(moments_ptr + 2 * row, mean)
    tl.store(moments_ptr + 2 * row + 1, scale)
    first = tl.sum(sums, axis=0) / N
    second = tl.sum(products, axis=0) * scale / N
    for chunk in range(chunks):
        column = tl.cast(chunk, tl.int64) * BLOCK + lane
        mask = column < N
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        g = grad * load_weight(weight_ptr, column, weight_column, mask, WEIGHT)
        dx = scale * (g - first - (x - mean) * scale * second)
        tl.store(dx_ptr + row * N + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def share_kernel(
    grad_ptr,
    x_ptr,
    moments_ptr,
    share_ptr,
    M,
    N,
    steps,
    grad_row,
    grad_column,
    x_row,
    x_column,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A share of the parameters' gradients of long rows: a block of columns of every so many rows."""
    program, programs = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    dbias = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(steps):
        row = (step * programs + program).to(tl.int64)
        mask = inside & (row < M)
        grad = tl.load(grad_ptr + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT:
            x = tl.load(x_ptr + row * x_row + column * x_column, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(moments_ptr + 2 * row, mask=row < M, other=0.0)
            scale = tl.load(moments_ptr + 2 * row + 1, mask=row < M, other=0.0)
            dweight += grad * ((x - mean) * scale)
        if BIAS:
            dbias += grad
    if WEIGHT:
        tl.store(share_ptr + program.to(tl.int64) * N + column, dweight, mask=inside)
    if BIAS:
        share = programs + program if WEIGHT else program
        tl.store(share_ptr + share.to(tl.int64) * N + column, dbias, mask=inside)


@triton.jit
def total_kernel(share_ptr, out_ptr, first, shares, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, shares, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < shares)[:, None] & (column < N)[None, :]
        place = (first + row).to(tl.int64)[:, None] * N + column[None, :]
        total += tl.load(share_ptr + place, mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < N)


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


def kernel_fn(grad, x, weight, bias, eps):
    if x.dtype not in DTYPES or grad.dtype != x.dtype:
        raise NotImplementedError(f"gradients of layernorm: {grad.dtype}, {x.dtype}")
    for parameter in (weight, bias):
        if parameter is not None and parameter.dtype not in DTYPES:
            raise NotImplementedError(f"gradients of layernorm: a parameter of {parameter.dtype}")
    N = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # An absent parameter's gradient is empty.
    dweight, dbias = (
        torch.empty((0,), dtype=grad.dtype, device=x.device)
        if parameter is None
        else torch.empty((N,), dtype=parameter.dtype, device=x.device)
        for parameter in (weight, bias)
    )
    if N == 0:
        return dx, dweight, dbias
    M = dx.numel() // N
    has_weight, has_bias = weight is not None, bias is not None
    weight_column = weight.stride(0) if has_weight else 0
    shares = 0
    share = torch.empty((0,), dtype=torch.float32, device=x.device)
    if M > 0:
        grad, grad_row = with_rows(grad)
        x, x_row = with_rows(x)
        strides = (grad_row, grad.stride(-1), x_row, x.stride(-1))
        if N > LONGEST:
            moments = torch.empty((M, 2), dtype=torch.float32, device=x.device)
            long_kernel[(M,)](
                grad,
                x,
                weight,
                dx,
                moments,
                N,
                triton.cdiv(N, CHUNK),
                *strides,
                weight_column,
                eps,
                WEIGHT=has_weight,
                BLOCK=CHUNK,
                num_warps=min(16, max(1, CHUNK // (32 * PER_THREAD))),
            )
            if has_weight or has_bias:
                blocks = triton.cdiv(N, 512)
                shares = min(M, max(1, triton.cdiv(4 * PROGRAMS, blocks)))
                share = torch.empty(
                    ((has_weight + has_bias) * shares, N), dtype=torch.float32, device=x.device
                )
                share_kernel[(blocks, shares)](
                    grad,
                    x,
                    moments,
                    share,
                    M,
                    N,
                    triton.cdiv(M, shares),
                    *strides,
                    WEIGHT=has_weight,
                    BIAS=has_bias,
                    BLOCK=512,
                    num_warps=4,
                )
        else:
            block = triton.next_power_of_2(N)
            rows = max(1, TILE // block)
            shares = min(PROGRAMS, triton.cdiv(M, rows))
            share = torch.empty(((has_weight + has_bias) * shares, N), dtype=torch.float32, device=x.device)
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
                weight_column,
                eps,
                WEIGHT=has_weight,
                BIAS=has_bias,
                ROWS=rows,
                BLOCK=block,
                num_warps=min(16, max(1, rows * block // (32 * PER_THREAD))),
            )
    grid = (triton.cdiv(N, 32),)
    if has_weight:
        total_kernel[grid](share, dweight, 0, shares, N, ROWS=32, BLOCK=32, num_warps=4)
    if has_bias:
        first = shares if has_weight else 0
        total_kernel[grid](share, dbias, first, shares, N, ROWS=32, BLOCK=32, num_warps=4)
    return dx, dweight, dbias
