"""RMS norm of rows: rows that fit are read once and kept in registers, longer ones are read twice."""

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

TILE = 2048  # tune(block): 1024, 2048, 4096, 8192
LONGEST = 16384  # tune(algorithm): 4096, 8192, 16384
CHUNK = 4096  # tune(memory): 1024, 2048, 4096, 8192
PER_THREAD = 16  # tune(launch): 8, 16, 32

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def short_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    M,
    N,
    x_row,
    x_column,
    weight_column,
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of at most BLOCK columns, ROWS of them at once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < M)[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask=mask, other=0.0).to(
        tl.float32
    )
    weight = tl.load(weight_ptr + column * weight_column, mask=column < N, other=0.0).to(tl.float32) + offset
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
    y = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * N + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def long_kernel(
    x_ptr, weight_ptr, out_ptr, N, chunks, x_row, x_column, weight_column, eps, offset, BLOCK: tl.constexpr
):
    """One row of any length, in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(chunks):
        first = tl.cast(chunk, tl.int64) * BLOCK
        size = tl.minimum(N - first, BLOCK).to(tl.int32)
        mask = lane < size
        x = tl.load(x_ptr + row * x_row + first * x_column + lane * x_column, mask=mask, other=0.0).to(
            tl.float32
        )
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    for chunk in range(chunks):
        first = tl.cast(chunk, tl.int64) * BLOCK
        size = tl.minimum(N - first, BLOCK).to(tl.int32)
        mask = lane < size
        x = tl.load(x_ptr + row * x_row + first * x_column + lane * x_column, mask=mask, other=0.0).to(
            tl.float32
        )
        weight = (
            tl.load(weight_ptr + first * weight_column + lane * weight_column, mask=mask, other=0.0).to(
                tl.float32
            )
            + offset
        )
        tl.store(
            out_ptr + row * N + first + lane, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask
        )


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


def kernel_fn(x, weight, eps, offset=0.0):
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise NotImplementedError(f"rmsnorm of {x.dtype} by {weight.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, x_row = with_rows(x)
    N = x.shape[-1]
    M = out.numel() // N
    arguments = (x_row, x.stride(-1), weight.stride(0), eps, offset)
    if N > LONGEST:
        warps = min(16, max(1, CHUNK // (32 * PER_THREAD)))
        long_kernel[(M,)](x, weight, out, N, triton.cdiv(N, CHUNK), *arguments, BLOCK=CHUNK, num_warps=warps)
        return out
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    warps = min(16, max(1, rows * block // (32 * PER_THREAD)))
    short_kernel[(triton.cdiv(M, rows),)](
        x, weight, out, M, N, *arguments, ROWS=rows, BLOCK=block, num_warps=warps
    )
    return out
