"""Reduction of one dimension, whatever lies before and behind it, in float32, in a fixed order.

A program reduces a tile of outputs over one part of the dimension; where outputs alone would leave the device idle, a
dimension is split into parts, and a second pass over their results, by the same kernel, finishes the job.
"""

KERNEL_TYPE = "reduce"
BACKEND = "triton"

import math

import torch
import triton
import triton.language as tl

TILE = 4096  # tune(block): 1024, 2048, 4096, 8192
COLUMNS = 128  # tune(memory): 32, 64, 128, 256
WARPS = 4  # tune(launch): 2, 4, 8
PROGRAMS = 528  # tune(launch): 264, 528, 1056, 2112
PART = 8192  # tune(algorithm): 4096, 8192, 16384, 32768

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("sum", "mean", "max", "min", "prod")


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def reduce_kernel(
    x_ptr,
    out_ptr,
    outputs,
    length,
    inner,
    outer_step,
    inner_step,
    step,
    part,
    parts,
    count,
    OP: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Output o = (i, j), i outside of the dimension and j inside, over elements part * p : part * (p + 1) of it.

    Where there are several parts, each is a multiple of BLOCK_R: the last block of one never reads into the next.
    """
    p = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    base = (o // inner) * outer_step + (o % inner) * inner_step
    first = p * part
    last = tl.minimum(first + part, length)
    kept = o < outputs

    if OP == "prod":
        acc = tl.full((BLOCK_O, BLOCK_R), 1.0, tl.float32)
    elif OP == "max":
        acc = tl.full((BLOCK_O, BLOCK_R), float("-inf"), tl.float32)
    elif OP == "min":
        acc = tl.full((BLOCK_O, BLOCK_R), float("inf"), tl.float32)
    else:
        acc = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
    lane = tl.arange(0, BLOCK_R)
    for start in range(first, last, BLOCK_R):
        r = start + lane
        mask = kept[:, None] & (r < length)[None, :]
        pointers = x_ptr + base[:, None] + (r * step)[None, :]
        if OP == "prod":
            acc *= tl.load(pointers, mask=mask, other=1.0).to(tl.float32)
        elif OP == "max":
            x = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
            acc = tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)
        elif OP == "min":
            x = tl.load(pointers, mask=mask, other=float("inf")).to(tl.float32)
            acc = tl.minimum(acc, x, propagate_nan=tl.PropagateNan.ALL)
        else:
            acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)

    if OP == "prod":
        result = tl.reduce(acc, 1, multiply)
    elif OP == "max":
        result = tl.max(acc, 1)
    elif OP == "min":
        result = tl.min(acc, 1)
    else:
        result = tl.sum(acc, 1)
    if OP == "max" or OP == "min":
        # The hardware's maximum drops NaN.
        broken = tl.max((acc != acc).to(tl.int32), 1) > 0
        result = tl.where(broken, float("nan"), result)
    if DIVIDE:
        result = result / count
    tl.store(out_ptr + o * parts + p, result.to(out_ptr.dtype.element_ty), mask=kept)


def merged(sizes, strides):
    """Size and stride of several dimensions seen as one, or None where their strides do not allow it."""
    size, stride = 1, 0
    for n, s in zip(reversed(sizes), reversed(strides), strict=True):
        if n == 1:
            continue
        if size > 1 and s != stride * size:
            return None
        if size == 1:
            stride = s
        size *= n
    return size, stride


def tile(outputs, length, rows):
    """Outputs and elements of a block: a few whole rows, or neighbouring columns and as many elements as fit."""
    if rows:
        block_r = min(triton.next_power_of_2(max(length, 1)), TILE)
        # Few enough outputs a program that many programs run.
        return min(TILE // block_r, triton.next_power_of_2(max(outputs // PROGRAMS, 1)), 64), block_r
    block_o = min(triton.next_power_of_2(outputs), COLUMNS)
    return block_o, min(triton.next_power_of_2(max(length, 1)), max(TILE // block_o, 1))


def kernel_fn(x, dim=-1, keepdim=False, op="sum"):
    if x.dtype not in DTYPES or op not in OPS:
        raise NotImplementedError(f"reduction {op} of {x.dtype}")
    rank = x.dim()
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise IndexError(f"dimension {dim} of a tensor with {rank}")
    dim = dim % rank if rank else 0
    sizes, strides = (list(x.shape), list(x.stride())) if rank else ([1], [1])
    length = sizes[dim]
    if length == 0 and op in ("max", "min"):
        raise IndexError(f"the {op} of no element, along dimension {dim}")
    kept = sizes[:dim] + ([1] if keepdim else []) + sizes[dim + 1 :]
    out = torch.empty(kept if rank else (), dtype=x.dtype, device=x.device)
    outputs = out.numel()
    if outputs == 0:
        return out
    outer, behind = merged(sizes[:dim], strides[:dim]), merged(sizes[dim + 1 :], strides[dim + 1 :])
    if outer is None or behind is None:
        x = x.contiguous()
        inner = math.prod(sizes[dim + 1 :])
        outer_step, inner_step, step = inner * length, 1, inner
    else:
        (_, outer_step), (inner, inner_step), step = outer, behind, strides[dim]

    # Whether the elements of one output lie closer together than neighbouring outputs.
    rows = inner == 1 or 0 < step <= inner_step
    block_o, block_r = tile(outputs, length, rows)
    tiles, part, parts = triton.cdiv(outputs, block_o), max(length, 1), 1
    if tiles < PROGRAMS // 2 and length > PART // block_o:
        wanted = min(triton.cdiv(PROGRAMS, tiles), triton.cdiv(length, max(PART // block_o, 1)))
        part = triton.cdiv(triton.cdiv(length, wanted), block_r) * block_r
        parts = triton.cdiv(length, part)
    mean = op == "mean"
    between = out if parts == 1 else torch.empty((outputs, parts), dtype=torch.float32, device=x.device)
    reduce_kernel[(tiles, parts)](
        x,
        between,
        outputs,
        length,
        inner,
        outer_step,
        inner_step,
        step,
        part,
        parts,
        length,
        OP=op,
        DIVIDE=mean and parts == 1,
        BLOCK_O=block_o,
        BLOCK_R=block_r,
        num_warps=WARPS,
    )
    if parts > 1:
        block_o, block_r = tile(outputs, parts, True)
        reduce_kernel[(triton.cdiv(outputs, block_o), 1)](
            between,
            out,
            outputs,
            parts,
            1,
            parts,
            0,
            1,
            parts,
            1,
            length,
            OP=op,
            DIVIDE=mean,
            BLOCK_O=block_o,
            BLOCK_R=block_r,
            num_warps=WARPS,
        )
    return out
