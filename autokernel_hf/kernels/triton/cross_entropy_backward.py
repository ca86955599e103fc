"""Gradient of cross entropy: a pass over each row for its largest logit and the sum, and one that writes.

The second pass finds a row of usual length in the cache. How many rows count for a mean is counted first, by one program.
"""

KERNEL_TYPE = "cross_entropy_backward"
BACKEND = "triton"

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tune(memory): 1024, 2048, 4096, 8192, 16384
WARPS = 8  # tune(launch): 4, 8, 16, 32

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("none", "mean", "sum")


@triton.jit
def count_kernel(target_ptr, count_ptr, N, target_step, ignore_index, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        index = (start + lane).to(tl.int64)
        mask = index < N
        target = tl.load(target_ptr + index * target_step, mask=mask, other=ignore_index)
        counted += (mask & (target != ignore_index)).to(tl.int32)
    tl.store(count_ptr, tl.sum(counted, 0).to(tl.float32))


@triton.jit
def rows_kernel(
    grad_ptr,
    logits_ptr,
    target_ptr,
    count_ptr,
    out_ptr,
    V,
    grad_step,
    row_step,
    target_step,
    ignore_index,
    smoothing,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row * target_step)
    logits = logits_ptr + row * row_step
    out = out_ptr + row * V
    if target == ignore_index:
        for start in range(0, V, BLOCK):
            zeros = tl.zeros((BLOCK,), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out + start + lane, zeros, mask=start + lane < V)
    else:
        grad = tl.load(grad_ptr + row * grad_step).to(tl.float32)
        if MEAN:
            grad = grad / tl.load(count_ptr)
        # Each lane has a maximum and a sum of its own: one reduction for the whole row.
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            mask = start + lane < V
            x = tl.load(logits + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
            new = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
            base = tl.where(new == float("-inf"), 0.0, new)
            sums = sums * tl.exp2((largest - base) * LOG2E) + tl.exp2((x - base) * LOG2E)
            largest = new
        top = tl.max(largest, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(sums * tl.exp2((largest - base) * LOG2E), 0)
        for start in range(0, V, BLOCK):
            mask = start + lane < V
            x = tl.load(logits + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
            p = tl.exp2((x - top) * LOG2E) / total
            p = p - smoothing / V - tl.where(start + lane == target, 1.0 - smoothing, 0.0)
            tl.store(out + start + lane, (grad * p).to(out_ptr.dtype.element_ty), mask=mask)


def kernel_fn(grad, logits, target, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    if logits.dtype not in DTYPES or target.dtype != torch.int64 or reduction not in REDUCTIONS:
        raise NotImplementedError(
            f"gradient of cross entropy ({reduction}): {logits.dtype} and {target.dtype}"
        )
    if logits.dim() != 2 or target.shape != logits.shape[:1] or grad.dtype != torch.float32:
        raise ValueError(f"gradient of cross entropy: {grad.dtype}, {logits.shape} and {target.shape}")
    N, V = logits.shape
    out = torch.empty((N, V), dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count = torch.empty((1,), dtype=torch.float32, device=logits.device)
    if reduction == "mean":
        count_kernel[(1,)](
            target,
            count,
            N,
            target.stride(0),
            ignore_index,
            BLOCK=min(max(triton.next_power_of_2(N), 16), 4096),
            num_warps=4,
        )
    block = min(BLOCK, max(triton.next_power_of_2(V), 16))
    rows_kernel[(N,)](
        grad,
        logits,
        target,
        count,
        out,
        V,
        grad.stride(0) if grad.dim() else 0,
        logits.stride(0),
        target.stride(0),
        ignore_index,
        label_smoothing,
        MEAN=reduction == "mean",
        BLOCK=block,
        num_warps=max(1, min(WARPS, block // 256)),
    )
    return out
