"""Attention with a running softmax: a program holds a block of queries and walks over the keys that they may see.

Blocks of keys that causality or the window hides from all queries of a program are never read, and only those at the
rims of what is seen compare positions. Heads of queries that share a head of keys follow each other.

One query a sequence, as in decoding, is a read of all keys and values: there a program takes all heads that share a head
of keys, and a share of the keys; a second launch puts the shares together.
"""

KERNEL_TYPE = "flash_attention"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

BLOCK_M = 128  # tune(block): 64, 128
BLOCK_N = 64  # tune(block): 32, 64, 128
WARPS = 8  # tune(launch): 4, 8
STAGES = 3  # tune(memory): 2, 3, 4
DECODE_N = 64  # tune(block): 32, 64, 128
DECODE_WARPS = 4  # tune(launch): 2, 4, 8
DECODE_STAGES = 3  # tune(memory): 2, 3, 4, 5
DECODE_PROGRAMS = 264  # tune(launch): 132, 264, 528, 1056

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def attend(
    acc,
    total,
    largest,
    q,
    k_ptr,
    v_ptr,
    mask_ptr,
    first,
    last,
    Sk,
    m,
    m_kept,
    shift,
    scale,
    window,
    k_position,
    v_position,
    mask_key,
    d_mask,
    dv_mask,
    CHECKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    FOLDED: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes the keys first : last, first a multiple of BLOCK_N, into the running softmax; CHECKED compares positions.

    Scores are to the base 2, but those with an additive mask are to the base e: the lowest number of a dtype, which
    stands for "hidden" in many masks, must not overflow. FOLDED, for scales above 0: the largest score is found before
    scaling, so that scaling and subtracting are one instruction. (In prefill that took two registers more than leave
    room for a second block beside it.)
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    lane = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        n = start + lane
        inside = n < Sk
        k_tile = k_ptr + n.to(tl.int64)[None, :] * k_position
        if CHECKED:
            if EVEN_D:
                k = tl.load(k_tile, mask=inside[None, :], other=0.0)
            else:
                k = tl.load(k_tile, mask=d_mask[:, None] & inside[None, :], other=0.0)
        else:
            if EVEN_D:
                k = tl.load(k_tile)
            else:
                k = tl.load(k_tile, mask=d_mask[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee")
        if not FOLDED:
            s *= scale
        if MASK > 0:
            shown = m_kept[:, None] & inside[None, :]
            given = tl.load(mask_ptr + n.to(tl.int64)[None, :] * mask_key, mask=shown, other=0)
            if MASK == 1:
                s = tl.where(given != 0, s, float("-inf"))
            else:
                s += given.to(tl.float32)
        if CHECKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= m[:, None] + shift)
            if WINDOW:
                seen = seen & (n[None, :] > m[:, None] + shift - window)
            s = tl.where(seen, s, float("-inf"))
        if FOLDED:
            new = tl.maximum(largest, tl.max(s, 1) * scale)
        else:
            new = tl.maximum(largest, tl.max(s, 1))
        # Nothing seen so far: any number will do to subtract.
        base = tl.where(new == float("-inf"), 0.0, new)
        if MASK == 2:
            p = tl.exp2((s - base[:, None]) * LOG2E)
            decay = tl.exp2((largest - base) * LOG2E)
        else:
            if FOLDED:
                p = tl.exp2(s * scale - base[:, None])
            else:
                p = tl.exp2(s - base[:, None])
            decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v_tile = v_ptr + n.to(tl.int64)[:, None] * v_position
        if CHECKED:
            if EVEN_DV:
                v = tl.load(v_tile, mask=inside[:, None], other=0.0)
            else:
                v = tl.load(v_tile, mask=dv_mask[None, :] & inside[:, None], other=0.0)
        else:
            if EVEN_DV:
                v = tl.load(v_tile)
            else:
                v = tl.load(v_tile, mask=dv_mask[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        largest = new
    return acc, total, largest


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    q_bounds_ptr,
    k_bounds_ptr,
    out_ptr,
    Hq,
    groups,
    Sq,
    Sk,
    D,
    Dv,
    blocks,
    scale,
    window,
    q_batch,
    q_head,
    q_position,
    q_element,
    k_batch,
    k_head,
    k_position,
    k_element,
    v_batch,
    v_head,
    v_position,
    v_element,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    # The last queries see most keys of a causal square: they start first.
    block = blocks - 1 - program % blocks
    head = (program // blocks) % Hq
    batch = program // blocks // Hq
    rows = Sq
    q_start = tl.full((), 0, tl.int64)
    k_start = tl.full((), 0, tl.int64)
    memory_batch = batch.to(tl.int64)
    if PACKED:
        q_start = tl.load(q_bounds_ptr + batch).to(tl.int64)
        k_start = tl.load(k_bounds_ptr + batch).to(tl.int64)
        Sq = (tl.load(q_bounds_ptr + batch + 1) - q_start).to(tl.int32)
        Sk = (tl.load(k_bounds_ptr + batch + 1) - k_start).to(tl.int32)
        memory_batch = tl.full((), 0, tl.int64)
    start = block * BLOCK_M
    if start < Sq:
        head_long = head.to(tl.int64)
        key_head = (head // groups).to(tl.int64)
        m = start + tl.arange(0, BLOCK_M)
        m_kept = m < Sq
        row = q_start + m
        d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        d_mask, dv_mask = d < D, dv < Dv
        q_tile = q_ptr + memory_batch * q_batch + head_long * q_head
        q_tile = q_tile + row[:, None] * q_position + d[None, :] * q_element
        q = tl.load(q_tile, mask=m_kept[:, None] & d_mask[None, :], other=0.0)
        k_ptr += memory_batch * k_batch + key_head * k_head + k_start * k_position
        v_ptr += memory_batch * v_batch + key_head * v_head + k_start * v_position
        k_columns = k_ptr + d[:, None] * k_element
        v_rows = v_ptr + dv[None, :] * v_element
        mask_rows = mask_ptr + memory_batch * mask_batch + head_long * mask_head + k_start * mask_key
        mask_rows = mask_rows + row[:, None] * mask_query

        shift = Sk - Sq
        first = tl.full((), 0, tl.int32)
        last = Sk
        if CAUSAL:
            last = tl.maximum(tl.minimum(Sk, tl.minimum(start + BLOCK_M, Sq) + shift), 0)
        if WINDOW:
            first = tl.maximum(start + shift - window + 1, 0) // BLOCK_N * BLOCK_N
            whole = first
        else:
            # Up to here every query of the block sees every key.
            whole = last
            if CAUSAL:
                whole = tl.maximum(tl.minimum(start + shift + 1, Sk), 0)
            whole = whole // BLOCK_N * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        acc, total, largest = attend(
            acc,
            total,
            largest,
            q,
            k_columns,
            v_rows,
            mask_rows,
            first,
            whole,
            Sk,
            m,
            m_kept,
            shift,
            scale,
            window,
            k_position,
            v_position,
            mask_key,
            d_mask,
            dv_mask,
            False,
            CAUSAL,
            WINDOW,
            MASK,
            False,
            EVEN_D,
            EVEN_DV,
            BLOCK_N,
        )
        acc, total, largest = attend(
            acc,
            total,
            largest,
            q,
            k_columns,
            v_rows,
            mask_rows,
            whole,
            last,
            Sk,
            m,
            m_kept,
            shift,
            scale,
            window,
            k_position,
            v_position,
            mask_key,
            d_mask,
            dv_mask,
            True,
            CAUSAL,
            WINDOW,
            MASK,
            False,
            EVEN_D,
            EVEN_DV,
            BLOCK_N,
        )
        # A query that saw no key has added up nothing, and gives 0.
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_tile = out_ptr + ((memory_batch * Hq + head_long) * rows + row)[:, None] * Dv + dv[None, :]
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=m_kept[:, None] & dv_mask[None, :])


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    shares_ptr,
    rests_ptr,
    Hk,
    groups,
    Sk,
    D,
    Dv,
    splits,
    each,
    scale,
    window,
    q_batch,
    q_head,
    q_element,
    k_batch,
    k_head,
    k_position,
    k_element,
    v_batch,
    v_head,
    v_position,
    v_element,
    mask_batch,
    mask_head,
    mask_key,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    FOLDED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The heads that share a head of keys, over `each` keys. SPLIT: sums, largest scores and weights for join_kernel."""
    program = tl.program_id(0)
    split = program % splits
    key_head = (program // splits) % Hk
    batch = (program // splits // Hk).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    m_kept = m < groups
    head = key_head * groups + m
    head_long, key_head_long = head.to(tl.int64), key_head.to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    d_mask, dv_mask = d < D, dv < Dv
    q_tile = q_ptr + batch * q_batch + head_long[:, None] * q_head + d[None, :] * q_element
    q = tl.load(q_tile, mask=m_kept[:, None] & d_mask[None, :], other=0.0)
    k_columns = k_ptr + batch * k_batch + key_head_long * k_head + d[:, None] * k_element
    v_rows = v_ptr + batch * v_batch + key_head_long * v_head + dv[None, :] * v_element
    mask_rows = mask_ptr + batch * mask_batch + head_long[:, None] * mask_head

    first = split * each
    last = tl.minimum(first + each, Sk)
    hidden = tl.full((), 0, tl.int32)
    if WINDOW:
        # Keys before this one are out of the window.
        hidden = tl.maximum(Sk - window, 0)
        first = tl.maximum(first, hidden // BLOCK_N * BLOCK_N)
    # The block at the window's rim and that at the end compare positions.
    rim = first
    if WINDOW:
        rim = tl.minimum(tl.cdiv(tl.maximum(first, hidden), BLOCK_N) * BLOCK_N, last)
    whole = tl.maximum(last // BLOCK_N * BLOCK_N, rim)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if WINDOW:
        acc, total, largest = attend(
            acc,
            total,
            largest,
            q,
            k_columns,
            v_rows,
            mask_rows,
            first,
            rim,
            Sk,
            m * 0,
            m_kept,
            Sk - 1,
            scale,
            window,
            k_position,
            v_position,
            mask_key,
            d_mask,
            dv_mask,
            True,
            False,
            WINDOW,
            MASK,
            FOLDED,
            EVEN_D,
            EVEN_DV,
            BLOCK_N,
        )
    acc, total, largest = attend(
        acc,
        total,
        largest,
        q,
        k_columns,
        v_rows,
        mask_rows,
        rim,
        whole,
        Sk,
        m * 0,
        m_kept,
        Sk - 1,
        scale,
        window,
        k_position,
        v_position,
        mask_key,
        d_mask,
        dv_mask,
        False,
        False,
        False,
        MASK,
        FOLDED,
        EVEN_D,
        EVEN_DV,
        BLOCK_N,
    )
    acc, total, largest = attend(
        acc,
        total,
        largest,
        q,
        k_columns,
        v_rows,
        mask_rows,
        whole,
        last,
        Sk,
        m * 0,
        m_kept,
        Sk - 1,
        scale,
        window,
        k_position,
        v_position,
        mask_key,
        d_mask,
        dv_mask,
        True,
        False,
        WINDOW,
        MASK,
        FOLDED,
        EVEN_D,
        EVEN_DV,
        BLOCK_N,
    )
    if SPLIT:
        place = (batch * Hk + key_head) * splits + split
        row = place * groups + m
        tl.store(shares_ptr + row[:, None] * Dv + dv[None, :], acc, mask=m_kept[:, None] & dv_mask[None, :])
        tl.store(rests_ptr + row * 2, largest, mask=m_kept)
        tl.store(rests_ptr + row * 2 + 1, total, mask=m_kept)
    else:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_tile = out_ptr + (batch * Hk * groups + head_long)[:, None] * Dv + dv[None, :]
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=m_kept[:, None] & dv_mask[None, :])


@triton.jit
def join_kernel(
    shares_ptr,
    rests_ptr,
    out_ptr,
    Hk,
    groups,
    Dv,
    splits,
    base,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One head's output from its shares; `base` is log2 of the base of the scores."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    s, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    row = ((program // groups) * splits + s) * groups + group
    kept = s < splits
    largest = tl.load(rests_ptr + row * 2, mask=kept, other=float("-inf"))
    total = tl.load(rests_ptr + row * 2 + 1, mask=kept, other=0.0)
    shares = shares_ptr + row[:, None] * Dv + dv[None, :]
    acc = tl.load(shares, mask=kept[:, None] & (dv < Dv)[None, :], other=0.0)
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((largest - top) * base)
    total = tl.sum(total * weight, 0)
    out = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + program * Dv + dv, out.to(out_ptr.dtype.element_ty), mask=dv < Dv)


def decode(q, k, v, mask, steps, kind, out, scale, window, block_d, block_dv):
    """One query a sequence: q (B, Hq, 1, D)."""
    (B, Hq, _, D), Hk, Sk, Dv = q.shape, k.shape[1], k.shape[2], v.shape[3]
    groups = Hq // Hk
    wide = max(max(block_d, block_dv) * q.element_size() // 256, 1)
    block_n = max(DECODE_N // wide, 16)
    blocks = max(triton.cdiv(Sk, block_n), 1)
    # Below four blocks a share costs more than it saves.
    splits = max(min(triton.cdiv(DECODE_PROGRAMS, B * Hk), blocks // 4, 128), 1)
    each = triton.cdiv(blocks, splits) * block_n
    splits = max(triton.cdiv(Sk, each), 1)
    split = splits > 1
    shares = torch.empty((B * Hq * splits * Dv,), dtype=torch.float32, device=q.device) if split else out
    rests = torch.empty((B * Hq * splits * 2,), dtype=torch.float32, device=q.device) if split else out
    decode_kernel[(B * Hk * splits,)](
        q,
        k,
        v,
        mask,
        out,
        shares,
        rests,
        Hk,
        groups,
        Sk,
        D,
        Dv,
        splits,
        each,
        scale,
        window,
        q.stride(0),
        q.stride(1),
        q.stride(3),
        *k.stride(),
        *v.stride(),
        steps[0],
        steps[1],
        steps[3],
        MASK=kind,
        WINDOW=window > 0,
        FOLDED=kind != 2 and scale > 0,
        SPLIT=split,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        EVEN_D=block_d == D,
        EVEN_DV=block_dv == Dv,
        BLOCK_M=max(triton.next_power_of_2(groups), 16),
        BLOCK_N=block_n,
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
    )
    if split:
        join_kernel[(B * Hq,)](
            shares,
            rests,
            out,
            Hk,
            groups,
            Dv,
            splits,
            1.4426950408889634 if kind == 2 else 1.0,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_DV=block_dv,
            num_warps=4,
        )
    return out


def kernel_fn(
    q,
    k,
    v,
    mask=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
    scale=None,
    causal=False,
    window=-1,
):
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise NotImplementedError(f"attention of {q.dtype}, {k.dtype} and {v.dtype}")
    B, Hq, Sq, D = q.shape
    Hk, Sk, Dv = k.shape[1], k.shape[2], v.shape[3]
    if k.shape != (B, Hk, Sk, D) or v.shape != (B, Hk, Sk, Dv) or (Hk and Hq % Hk):
        raise ValueError(f"attention of {q.shape}, {k.shape} and {v.shape}")
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None) or (
        packed and (B != 1 or len(cu_seqlens_q) != len(cu_seqlens_k))
    ):
        raise ValueError("packed sequences have B = 1 and as many bounds of queries as of keys")
    out = torch.empty((B, Hq, Sq, Dv), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    block_d, block_dv = max(triton.next_power_of_2(D), 16), max(triton.next_power_of_2(Dv), 16)
    if max(block_d, block_dv) > 256:
        raise NotImplementedError(f"attention with heads of {D} and {Dv}")
    if mask is None:
        kind, mask, steps = 0, q, (0, 0, 0, 0)
    else:
        kind = 1 if mask.dtype == torch.bool else 2
        mask = mask.expand(B, Hq, Sq, Sk)
        steps = mask.stride()
    scale = D**-0.5 if scale is None else scale
    base_scale = scale if kind == 2 else scale * 1.4426950408889634
    if Sq == 1 and Sk and not packed and Hq // Hk <= 64:
        return decode(q, k, v, mask, steps, kind, out, base_scale, window, block_d, block_dv)
    sequences, longest = B, Sq
    if packed:
        sequences, longest = len(cu_seqlens_q) - 1, max_seqlen_q or Sq
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    # Wide heads and float32 fill registers and shared memory with smaller blocks.
    wide = max(max(block_d, block_dv) * q.element_size() // 256, 1) * (1 if q.element_size() < 4 else 4)
    block_m = min(max(BLOCK_M // wide, 16), max(triton.next_power_of_2(longest), 16))
    block_n = max(BLOCK_N // wide, 16)
    blocks = triton.cdiv(longest, block_m)
    attention_kernel[(blocks * sequences * Hq,)](
        q,
        k,
        v,
        mask,
        cu_seqlens_q if packed else q,
        cu_seqlens_k if packed else q,
        out,
        Hq,
        Hq // Hk if Hk else 1,
        Sq,
        Sk,
        D,
        Dv,
        blocks,
        base_scale,
        window,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *steps,
        CAUSAL=causal,
        WINDOW=window > 0,
        MASK=kind,
        PACKED=packed,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        EVEN_D=block_d == D,
        EVEN_DV=block_dv == Dv,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=WARPS if block_m >= 128 else 4,
        num_stages=STAGES if wide == 1 else 2,
    )
    return out
