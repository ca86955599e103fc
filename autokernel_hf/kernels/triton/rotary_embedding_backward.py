"""Gradients of the rotary position embedding: the pairs turned back, q and k in one launch, in float32, rounded once.

A program turns a tile of heads and positions of q's gradient or of k's. The tables of a position are read once for all heads
of the tile. Of q and k themselves nothing is read.
"""

KERNEL_TYPE = "rotary_embedding_backward"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

HEADS = 4  # tune(block): 1, 2, 4, 8
POSITIONS = 8  # tune(block): 1, 2, 4, 8, 16
TILE = 2048  # tune(block): 512, 1024, 2048, 4096
WARPS = 4  # tune(launch): 1, 2, 4, 8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    Hq,
    Hk,
    S,
    D,
    q_blocks,
    head_blocks,
    q_batch,
    q_head,
    q_position,
    k_batch,
    k_head,
    k_position,
    cos_batch,
    cos_position,
    sin_batch,
    sin_position,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    program = tl.program_id(0)
    block = program % head_blocks
    rest = program // head_blocks
    position_blocks = tl.cdiv(S, POSITIONS)
    b = (rest // position_blocks).to(tl.int64)
    row = tl.arange(0, HEADS * POSITIONS)
    s = (rest % position_blocks) * POSITIONS + row % POSITIONS
    if block < q_blocks:
        h = block * HEADS + row // POSITIONS
        H = Hq
        x_ptr = q_ptr + b * q_batch
        out_ptr = q_out_ptr
        x_row = h.to(tl.int64) * q_head + s.to(tl.int64) * q_position
    else:
        h = (block - q_blocks) * HEADS + row // POSITIONS
        H = Hk
        x_ptr = k_ptr + b * k_batch
        out_ptr = k_out_ptr
        x_row = h.to(tl.int64) * k_head + s.to(tl.int64) * k_position
    inside = (h < H) & (s < S)
    out_row = ((b * H + h) * S + s) * D

    if HALF > 0:
        cos_row = cos_ptr + b * cos_batch + s.to(tl.int64) * cos_position
        sin_row = sin_ptr + b * sin_batch + s.to(tl.int64) * sin_position
        if INTERLEAVED:
            # Both of a pair in one read of neighbours, told apart in registers.
            e = tl.arange(0, 2 * BLOCK_HALF)
            mask = inside[:, None] & (e < 2 * HALF)[None, :]
            x = tl.load(x_ptr + x_row[:, None] + e[None, :], mask=mask, other=0.0).to(tl.float32)
            cos = tl.load(cos_row[:, None] + e[None, :], mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(sin_row[:, None] + e[None, :], mask=mask, other=0.0).to(tl.float32)
            a, c = tl.split(tl.reshape(x, (HEADS * POSITIONS, BLOCK_HALF, 2)))
            cos_a, cos_b = tl.split(tl.reshape(cos, (HEADS * POSITIONS, BLOCK_HALF, 2)))
            sin_a, sin_b = tl.split(tl.reshape(sin, (HEADS * POSITIONS, BLOCK_HALF, 2)))
            y = tl.join(a * cos_a + c * sin_b, c * cos_b - a * sin_a)
            y = tl.reshape(y, (HEADS * POSITIONS, 2 * BLOCK_HALF)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] + e[None, :], y, mask=mask)
        else:
            first = tl.arange(0, BLOCK_HALF)
            second = first + HALF
            mask = inside[:, None] & (first < HALF)[None, :]
            a = tl.load(x_ptr + x_row[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
            c = tl.load(x_ptr + x_row[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
            cos_a = tl.load(cos_row[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
            cos_b = tl.load(cos_row[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
            sin_a = tl.load(sin_row[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
            sin_b = tl.load(sin_row[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
            y_a = (a * cos_a + c * sin_b).to(out_ptr.dtype.element_ty)
            y_b = (c * cos_b - a * sin_a).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] + first[None, :], y_a, mask=mask)
            tl.store(out_ptr + out_row[:, None] + second[None, :], y_b, mask=mask)

    if REST > 0:
        j = tl.arange(0, BLOCK_REST)
        d = 2 * HALF + j
        mask = inside[:, None] & (j < REST)[None, :]
        x = tl.load(x_ptr + x_row[:, None] + d[None, :], mask=mask)
        tl.store(out_ptr + out_row[:, None] + d[None, :], x, mask=mask)


def table_strides(table, batch):
    """The strides of a table; one for all of a batch does not move with it."""
    return (0 if table.shape[0] == 1 else table.stride(0), table.stride(1))


def packed(x):
    """x, with neighbours of the last dimension beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def kernel_fn(grad_q, grad_k, q, k, cos, sin, interleaved=False):
    if grad_q.shape != q.shape or grad_k.shape != k.shape:
        raise ValueError(
            f"rotary embedding: gradients {grad_q.shape} and {grad_k.shape} of {q.shape} and {k.shape}"
        )
    q, k = grad_q, grad_k
    B, Hq, S, D = q.shape
    Hk, R = k.shape[1], cos.shape[-1]
    if q.dtype not in DTYPES or k.dtype != q.dtype or cos.dtype != sin.dtype:
        raise NotImplementedError(
            f"gradients of rotary embedding: {q.dtype} and {k.dtype} by {cos.dtype} and {sin.dtype}"
        )
    if cos.dtype not in (q.dtype, torch.float32):
        raise NotImplementedError(f"gradients of rotary embedding: {q.dtype} by tables of {cos.dtype}")
    if k.shape != (B, Hk, S, D) or cos.shape != sin.shape or cos.shape not in ((1, S, R), (B, S, R)):
        raise ValueError(
            f"gradients of rotary embedding: {q.shape} and {k.shape} by tables of {cos.shape} and {sin.shape}"
        )
    if R > D or R % 2:
        raise ValueError(f"gradients of rotary embedding: {R} of {D} dimensions")
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = packed(q), packed(k), packed(cos), packed(sin)
    width = triton.next_power_of_2(max(R // 2, D - R, 1))
    heads = min(HEADS, triton.next_power_of_2(max(Hq, Hk)))
    positions = min(POSITIONS, triton.next_power_of_2(S), max(TILE // (heads * width), 1))
    q_blocks = triton.cdiv(Hq, heads)
    head_blocks = q_blocks + triton.cdiv(Hk, heads)
    rotate_kernel[(B * triton.cdiv(S, positions) * head_blocks,)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        Hq,
        Hk,
        S,
        D,
        q_blocks,
        head_blocks,
        *q.stride()[:3],
        *k.stride()[:3],
        *table_strides(cos, B),
        *table_strides(sin, B),
        HALF=R // 2,
        BLOCK_HALF=triton.next_power_of_2(max(R // 2, 1)),
        REST=D - R,
        BLOCK_REST=triton.next_power_of_2(max(D - R, 1)),
        INTERLEAVED=interleaved,
        HEADS=heads,
        POSITIONS=positions,
        num_warps=WARPS,
    )
    return q_out, k_out
