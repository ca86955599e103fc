"""Softmax over any dimension.

Rows that fit are read once and kept in registers; longer ones are read twice, with a running maximum and sum. Where the
dimension's elements lie apart in memory, a program takes a tile of neighbouring rows, so that what it reads lies together:
all of their elements where registers hold them. Longer ones are read twice as well, by one program where there are many
tiles, and in parts where there are few: a first kernel leaves the parts' maxima and sums for a second one.
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
HELD = 16384  # tune(memory): 8192, 16384, 32768
MANY_TILES = 1024  # tune(algorithm): 256, 1024, 4096

MOST_PARTS = 32
PER_COLUMN_THREAD = 64  # elements

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
def include(maximum, sums, x):
    """A running maximum and, relative to it, sums of exponentials, with a chunk more."""
    x = x.to(tl.float32)
    grown = tl.maximum(maximum, tl.max(x, axis=0))
    base = finite_maximum(grown)
    return grown, sums * tl.exp(maximum - base) + tl.exp(x - base)


@triton.jit
def dense_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, PACK: tl.constexpr):
    """One row of any length of a contiguous tensor, in chunks of BLOCK columns that start where memory has its 16-byte
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
    x = tl.load(x_ptr + first + lane, mask=head, other=float("-inf"))
    maximum, sums = include(maximum, sums, x)
    for chunk in range(1, whole):
        x = tl.load(x_ptr + (first + tl.cast(chunk, tl.int64) * BLOCK) + lane)
        maximum, sums = include(maximum, sums, x)
    at_tail = first + tl.cast(last, tl.int64) * BLOCK
    x = tl.load(x_ptr + at_tail + lane, mask=tail, other=float("-inf"))
    maximum, sums = include(maximum, sums, x)
    base = finite_maximum(maximum)
    scale = 1.0 / tl.sum(sums, axis=0)
    y = tl.exp(x.to(tl.float32) - base) * scale
    tl.store(out_ptr + at_tail + lane, y.to(out_ptr.dtype.element_ty), mask=tail)
    for back in range(1, whole):
        at = first + tl.cast(whole - back, tl.int64) * BLOCK
        y = tl.exp(tl.load(x_ptr + at + lane).to(tl.float32) - base) * scale
        tl.store(out_ptr + at + lane, y.to(out_ptr.dtype.element_ty))
    y = tl.exp(tl.load(x_ptr + first + lane, mask=head, other=float("-inf")).to(tl.float32) - base) * scale
    tl.store(out_ptr + first + lane, y.to(out_ptr.dtype.element_ty), mask=head)


@triton.jit
def across_kernel(
    x_ptr,
    out_ptr,
    N,
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
    """ACROSS neighbouring rows of at most ALONG elements."""
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    k = tl.arange(0, ALONG).to(tl.int64)
    mask = (k < N)[:, None] & (i < inner)[None, :]
    source = x_ptr + outer * x_outer + k[:, None] * x_dim + i[None, :] * x_inner
    x = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - finite_maximum(tl.max(x, axis=0))[None, :])
    y = e * (1.0 / tl.sum(e, axis=0))[None, :]
    target = out_ptr + outer * out_outer + k[:, None] * out_dim + i[None, :] * out_inner
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def loop_kernel(
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


@triton.jit
def part_kernel(
    x_ptr,
    parts_ptr,
    N,
    inner,
    blocks,
    parts,
    steps,
    x_outer,
    x_dim,
    x_inner,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Maximum and sum of one of `parts` of ACROSS neighbouring rows, of `steps` times ALONG elements each.

    They go to (outer, 2, parts, inner), in fp32.
    """
    part = tl.program_id(0) % parts
    tile = tl.program_id(0) // parts
    outer = (tile // blocks).to(tl.int64)
    i = (tile % blocks).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    lane = tl.arange(0, ALONG)
    maximum = tl.full([ACROSS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ACROSS], dtype=tl.float32)
    for step in range(steps):
        k = (tl.cast(part, tl.int64) * steps + step) * ALONG + lane
        mask = (k < N)[:, None] & (i < inner)[None, :]
        source = x_ptr + outer * x_outer + k[:, None] * x_dim + i[None, :] * x_inner
        x = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
        grown = tl.maximum(maximum, tl.max(x, axis=0))
        base = finite_maximum(grown)
        total = total * tl.exp(maximum - base) + tl.sum(tl.exp(x - base[None, :]), axis=0)
        maximum = grown
    target = parts_ptr + (outer * 2 * parts + part) * inner + i
    tl.store(target, maximum, mask=i < inner)
    tl.store(target + tl.cast(parts, tl.int64) * inner, total, mask=i < inner)


@triton.jit
def finish_kernel(
    x_ptr,
    parts_ptr,
    out_ptr,
    N,
    inner,
    blocks,
    parts,
    steps,
    x_outer,
    x_dim,
    x_inner,
    out_outer,
    out_dim,
    out_inner,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """From what part_kernel left to the softmax of a part; the last part first, which the cache may still have."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    part = program % parts
    tile = program // parts
    outer = (tile // blocks).to(tl.int64)
    i = (tile % blocks).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    p = tl.arange(0, PARTS).to(tl.int64)
    known = (p < parts)[:, None] & (i < inner)[None, :]
    place = parts_ptr + (outer * 2 * parts + p[:, None]) * inner + i[None, :]
    maxima = tl.load(place, mask=known, other=float("-inf"))
    sums = tl.load(place + tl.cast(parts, tl.int64) * inner, mask=known, other=0.0)
    base = finite_maximum(tl.max(maxima, axis=0))
    scale = 1.0 / tl.sum(sums * tl.exp(maxima - base[None, :]), axis=0)
    lane = tl.arange(0, ALONG)
    for back in range(steps):
        k = (tl.cast(part, tl.int64) * steps + (steps - 1 - back)) * ALONG + lane
        mask = (k < N)[:, None] & (i < inner)[None, :]
        source = x_ptr + outer * x_outer + k[:, None] * x_dim + i[None, :] * x_inner
        x = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - base[None, :]) * scale[None, :]
        target = out_ptr + outer * out_outer + k[:, None] * out_dim + i[None, :] * out_inner
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
        across = min(ACROSS, triton.next_power_of_2(width))
        along = min(HELD // across, triton.next_power_of_2(N))
        blocks = triton.cdiv(width, across)
        warps = min(16, max(1, along * across // (32 * PER_COLUMN_THREAD)))
        source, target = (x_outer, x_dim, x_inner), (out_outer, out_dim, out_inner)
        tile = {"ALONG": along, "ACROSS": across, "num_warps": warps}
        if along >= N:
            across_kernel[(groups * blocks,)](x, out, N, width, blocks, *source, *target, **tile)
            return out
        if groups * blocks >= MANY_TILES:
            warps = min(8, max(1, ALONG * across // 256))
            tile |= {"ALONG": ALONG, "num_warps": warps}
            loop_kernel[(groups * blocks,)](
                x, out, N, triton.cdiv(N, ALONG), width, blocks, *source, *target, **tile
            )
            return out
        parts = min(MOST_PARTS, triton.cdiv(N, along))
        steps = triton.cdiv(N, along * parts)
        left = torch.empty((groups, 2, parts, width), dtype=torch.float32, device=x.device)
        grid = (groups * blocks * parts,)
        part_kernel[grid](x, left, N, width, blocks, parts, steps, *source, **tile)
        finish_kernel[grid](
            x,
            left,
            out,
            N,
            width,
            blocks,
            parts,
            steps,
            *source,
            *target,
            **tile,
            PARTS=triton.next_power_of_2(parts),
        )
        return out
    if N > LONGEST:
        warps = min(16, max(1, CHUNK // (32 * PER_THREAD)))
        # Rows that all start at 16-byte boundaries are read in packs as it is.
        if N % 16 and x_dim == 1 and (groups == 1 or x_outer == N) and N < 2**31 - CHUNK:
            dense_kernel[(groups,)](x, out, N, BLOCK=CHUNK, PACK=16 // x.element_size(), num_warps=warps)
            return out
        long_kernel[(groups,)](x, out, N, triton.cdiv(N, CHUNK), x_outer, x_dim, BLOCK=CHUNK, num_warps=warps)
        return out
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    warps = min(16, max(1, rows * block // (32 * PER_THREAD)))
    short_kernel[(triton.cdiv(groups, rows),)](
        x, out, groups, N, x_outer, x_dim, ROWS=rows, BLOCK=block, num_warps=warps
    )
    return out
