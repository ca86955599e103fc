"""Layer norm of rows: rows that fit are read once and kept in registers, longer ones are read twice.

The variance is that of deviations from the mean; chunks of a long row are merged by the formula of Chan, Golub and
LeVeque, so no digits are lost where the mean is large. In 16 bits, deviations from the mean of the row's first chunk do.
"""

KERNEL_TYPE = "layernorm"
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
def parameter(ptr, column, stride, mask, ABSENT: tl.constexpr):
    """A chunk of a weight or bias in float32; ABSENT in its place where there is none."""
    value = tl.full(column.shape, ABSENT, dtype=tl.float32)
    if ptr is not None:
        if mask is None:
            value = tl.load(ptr + column * stride).to(tl.float32)
        else:
            value = tl.load(ptr + column * stride, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def short_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    x_row,
    x_column,
    weight_column,
    bias_column,
    eps,
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
    mean = tl.sum(x, axis=1) / N
    deviation = tl.where(mask, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(deviation * deviation, axis=1) / N + eps)
    # Loaded only now: beside the row, the largest tiles would need more registers than there are.
    weight = parameter(weight_ptr, column, weight_column, column < N, 1.0)
    bias = parameter(bias_ptr, column, bias_column, column < N, 0.0)
    y = deviation * scale[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + row[:, None] * N + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def long_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N,
    chunks,
    x_row,
    x_column,
    weight_column,
    bias_column,
    eps,
    BLOCK: tl.constexpr,
):
    """One row of any length, in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    squares = 0.0
    for chunk in range(chunks):
        first = tl.cast(chunk, tl.int64) * BLOCK
        size = tl.minimum(N - first, BLOCK).to(tl.int32)
        mask = lane < size
        x = tl.load(x_ptr + row * x_row + first * x_column + lane * x_column, mask=mask, other=0.0).to(
            tl.float32
        )
        chunk_mean = tl.sum(x, axis=0) / size
        deviation = tl.where(mask, x - chunk_mean, 0.0)
        delta = chunk_mean - mean
        share = size / (first + size)
        mean += delta * share
        squares += tl.sum(deviation * deviation, axis=0) + delta * delta * first * share
    scale = tl.rsqrt(squares / N + eps)
    for chunk in range(chunks):
        first = tl.cast(chunk, tl.int64) * BLOCK
        size = tl.minimum(N - first, BLOCK).to(tl.int32)
        mask = lane < size
        x = tl.load(x_ptr + row * x_row + first * x_column + lane * x_column, mask=mask, other=0.0).to(
            tl.float32
        )
        weight = parameter(weight_ptr, first + lane, weight_column, mask, 1.0)
        bias = parameter(bias_ptr, first + lane, bias_column, mask, 0.0)
        y = (x - mean) * scale * weight + bias
        tl.store(out_ptr + row * N + first + lane, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dense_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, N, x_row, eps, BLOCK: tl.constexpr):
    """One row of at least BLOCK columns in 16 bits; rows, weight and bias are dense and start at 16-byte boundaries."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    out_ptr += row * N
    lane = tl.arange(0, BLOCK)
    whole = N // BLOCK
    tail = lane < N - whole * BLOCK
    x = tl.load(x_ptr + lane).to(tl.float32)
    pivot = tl.sum(x, axis=0) / BLOCK
    deviation = x - pivot
    sums = deviation
    squares = deviation * deviation
    for chunk in range(1, whole):
        deviation = tl.load(x_ptr + chunk * BLOCK + lane).to(tl.float32) - pivot
        sums += deviation
        squares += deviation * deviation
    x = tl.load(x_ptr + whole * BLOCK + lane, mask=tail, other=0.0).to(tl.float32)
    deviation = tl.where(tail, x - pivot, 0.0)
    sums += deviation
    squares += deviation * deviation
    off = tl.sum(sums, axis=0) / N
    variance = tl.sum(squares, axis=0) / N - off * off
    scale = tl.rsqrt(tl.where(variance < 0.0, 0.0, variance) + eps)  # below 0 by rounding only; NaN stays
    mean = pivot + off
    weight = parameter(weight_ptr, whole * BLOCK + lane, 1, tail, 1.0)
    bias = parameter(bias_ptr, whole * BLOCK + lane, 1, tail, 0.0)
    y = (x - mean) * scale * weight + bias
    tl.store(out_ptr + whole * BLOCK + lane, y.to(out_ptr.dtype.element_ty), mask=tail)
    for back in range(whole):  # what was read last is most likely still in the cache
        column = (whole - 1 - back) * BLOCK + lane
        weight = parameter(weight_ptr, column, 1, None, 1.0)
        bias = parameter(bias_ptr, column, 1, None, 0.0)
        y = (tl.load(x_ptr + column).to(tl.float32) - mean) * scale * weight + bias
        tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty))


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


def kernel_fn(x, weight, bias, eps):
    for tensor in (x, weight, bias):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise NotImplementedError(f"layernorm of {tensor.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, x_row = with_rows(x)
    N = x.shape[-1]
    M = out.numel() // N
    weight_column = 0 if weight is None else weight.stride(0)
    bias_column = 0 if bias is None else bias.stride(0)
    arguments = (x_row, x.stride(-1), weight_column, bias_column, eps)
    if N > LONGEST:
        warps = min(16, max(1, CHUNK // (32 * PER_THREAD)))
        dense = x.stride(-1) == 1 and all(p is None or p.stride(0) == 1 for p in (weight, bias))
        if (
            dense
            and x.element_size() == 2
            and N % 16 == 0
            and x_row % 16 == 0
            and 2 * CHUNK <= N < 2**31 - 2 * CHUNK
        ):
            tile = {"BLOCK": 2 * CHUNK, "num_warps": min(16, 2 * warps)}
            dense_kernel[(M,)](x, weight, bias, out, N, x_row, eps, **tile)
            return out
        long_kernel[(M,)](
            x, weight, bias, out, N, triton.cdiv(N, CHUNK), *arguments, BLOCK=CHUNK, num_warps=warps
        )
        return out
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    warps = min(16, max(1, rows * block // (32 * PER_THREAD)))
    short_kernel[(triton.cdiv(M, rows),)](
        x, weight, bias, out, M, N, *arguments, ROWS=rows, BLOCK=block, num_warps=warps
    )
    return out
