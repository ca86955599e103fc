"""Cross entropy: one pass over each row with a running maximum and sum, then one program for the mean or the sum.

The loss is log(sum(exp(x - m))) + (m - x_target), whose parts have the size of the result; the mean logit that label
smoothing needs is taken relative to the target's. The last reduction goes in a fixed order, without atomics.
"""

KERNEL_TYPE = "cross_entropy"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tune(memory): 1024, 2048, 4096, 8192, 16384
WARPS = 8  # tune(launch): 4, 8, 16, 32

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("none", "mean", "sum")


@triton.jit
def absorb(x, mask, largest, sums, above, shift, SMOOTH: tl.constexpr):
    """Takes a block of logits, -inf where `mask` is false, into the running maximum and sums."""
    LOG2E: tl.constexpr = 1.4426950408889634
    new = tl.maximum(largest, tl.max(x, 0))
    # Only -inf so far: any number will do to subtract.
    base = tl.where(new == float("-inf"), 0.0, new)
    sums = sums * tl.exp2((largest - base) * LOG2E) + tl.exp2((x - base) * LOG2E)
    if SMOOTH:
        above += tl.where(mask, x - shift, 0.0)
    return new, sums, above


@triton.jit
def rows_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    V,
    row_step,
    target_step,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_step)
    loss = 0.0
    if target != ignore_index:
        first = row * row_step
        known = (target >= 0) & (target < V)
        picked = tl.load(logits_ptr + first + target, mask=known, other=float("nan")).to(tl.float32)
        # The logits' mean is summed around the target's own logit, if that is a number.
        shift = tl.where(tl.abs(picked) < float("inf"), picked, 0.0)
        lane = tl.arange(0, BLOCK)
        largest = float("-inf")
        sums = tl.zeros((BLOCK,), tl.float32)
        above = tl.zeros((BLOCK,), tl.float32)
        if ALIGNED:
            for start in range(0, V, BLOCK):
                mask = start + lane < V
                x = tl.load(logits_ptr + first + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
                largest, sums, above = absorb(x, mask, largest, sums, above, shift, SMOOTH)
        else:
            # Rows start anywhere: from the last multiple of 16 bytes before, all but the outer blocks load whole vectors.
            base = first // ALIGN * ALIGN
            skip = (first - base).to(tl.int32)
            last = skip + V
            mask = (lane >= skip) & (lane < last)
            x = tl.load(logits_ptr + base + lane, mask=mask, other=float("-inf")).to(tl.float32)
            largest, sums, above = absorb(x, mask, largest, sums, above, shift, SMOOTH)
            whole = last // BLOCK * BLOCK
            everywhere = lane >= 0
            for start in range(BLOCK, whole, BLOCK):
                x = tl.load(logits_ptr + base + start + lane).to(tl.float32)
                largest, sums, above = absorb(x, everywhere, largest, sums, above, shift, SMOOTH)
            if whole >= BLOCK:
                mask = whole + lane < last
                x = tl.load(logits_ptr + base + whole + lane, mask=mask, other=float("-inf")).to(tl.float32)
                largest, sums, above = absorb(x, mask, largest, sums, above, shift, SMOOTH)
        log_sum = tl.log(tl.sum(sums, 0))
        loss = log_sum + (largest - picked)
        if SMOOTH:
            loss = (1.0 - smoothing) * loss + smoothing * (
                (log_sum + (largest - shift)) - tl.sum(above, 0) / V
            )
    tl.store(loss_ptr + row, loss)


@triton.jit
def total_kernel(
    loss_ptr, target_ptr, out_ptr, N, target_step, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        index = (start + lane).to(tl.int64)
        mask = index < N
        total += tl.load(loss_ptr + index, mask=mask, other=0.0)
        if MEAN:
            target = tl.load(target_ptr + index * target_step, mask=mask, other=ignore_index)
            counted += (mask & (target != ignore_index)).to(tl.int32)
    result = tl.sum(total, 0)
    if MEAN:
        result = result / tl.sum(counted, 0).to(tl.float32)
    tl.store(out_ptr, result)


def kernel_fn(logits, target, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    if logits.dtype not in DTYPES or target.dtype != torch.int64 or reduction not in REDUCTIONS:
        raise NotImplementedError(f"cross entropy ({reduction}) of {logits.dtype} and {target.dtype}")
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"cross entropy of {logits.shape} and {target.shape}")
    N, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    losses = torch.empty((N,), dtype=torch.float32, device=logits.device)
    if N:
        align = 16 // logits.element_size()
        block = min(BLOCK, max(triton.next_power_of_2(V), 16))
        rows_kernel[(N,)](
            logits,
            target,
            losses,
            V,
            logits.stride(0),
            target.stride(0),
            ignore_index,
            label_smoothing,
            SMOOTH=label_smoothing != 0.0,
            ALIGN=align,
            ALIGNED=logits.stride(0) % align == 0,
            BLOCK=block,
            # Sixteen elements a thread at most.
            num_warps=max(1, min(WARPS, block // 256)),
        )
    if reduction == "none":
        return losses
    out = torch.empty((), dtype=torch.float32, device=logits.device)
    total_kernel[(1,)](
        losses,
        target,
        out,
        N,
        target.stride(0),
        ignore_index,
        MEAN=reduction == "mean",
        BLOCK=min(max(triton.next_power_of_2(N), 16), 4096),
        num_warps=4,
    )
    return out
