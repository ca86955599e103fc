"""Calls with tensors of more than 2^31 elements: index arithmetic in 32 bits ends there.

Drawn and answered are some rows; the call holds them many times over, each time rotated by a secret number of rows. So
neither values nor oracle need a time or a memory of their own, and whoever reads or writes at an index that wrapped
around finds other rows. Only a GPU with memory to spare runs it; elsewhere `indices` reads the source instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autokernel_hf.judge import checks
from autokernel_hf.judge.arena import POISON, Arena, Slot, extent, outputs_of, same_bits
from autokernel_hf.judge.cases import Scope, build_in
from autokernel_hf.judge.large import blocks
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.stages import StageFailed, place
from autokernel_hf.kernels.base import KernelType, itemsize, make_inputs
from autokernel_hf.records import Workload
from autokernel_hf.variant import Domain

LIMIT = 1 << 31
_MOST_ROWS, _MOST_ELEMENTS = 1024, 1 << 24  # that are drawn, in the widest tensor
# The arena, the child's own output, and what is copied and compared on the way; and so much of all memory is left to others.
_MEMORY_FACTOR, _LEFT_SHARE = 3.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Huge:
    """The call, and the same with few rows, which it is made of.

    `alike` is a small one for which a kernel that is compiled for sizes and strides needs, as a rule, the same variant.
    """

    workload: Workload
    rows: Workload
    alike: Workload


def calls_of(scope: Scope, domain: Domain) -> tuple[Huge, ...]:
    """The type's calls of this kind in the candidate's domain, in the smallest dtype that it has."""
    found = []
    for axes, options in scope.kernel_type.huge:
        first, count = next(iter(axes.items()))
        for dtype in ("bfloat16", "float16", "float32"):
            whole = build_in(scope, [(axes, options)], domain, dtype)
            if not whole:
                continue
            specs = [*(s for _, s in whole[0].tensors), *outputs_of(scope.kernel_type, whole[0])]
            widest = max(math.prod(spec.shape) for spec in specs) // count
            rows = max(1, min(_MOST_ROWS, _MOST_ELEMENTS // widest))
            # A domain that lists values of an argument, and not the call's own, has a call for each: the first will do.
            few, alike = (
                build_in(scope, [({**axes, first: n}, options)], domain, dtype)[0]
                for n in (rows, -(-rows // 16) * 16 + count % 16)
            )
            found.append(Huge(workload=whole[0], rows=few, alike=alike))
            break
    return tuple(found)


def fits(huge: Huge, kernel_type: KernelType, device: torch.device) -> bool:
    """Whether a GPU has the memory free."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return bool(free - _LEFT_SHARE * total >= needed_bytes(huge, kernel_type))


def needed_bytes(huge: Huge, kernel_type: KernelType) -> float:
    """The memory to run a call, of which the hidden values of a feed-forward block are a part that no tensor tells."""
    specs = [*(spec for _, spec in huge.workload.tensors), *outputs_of(kernel_type, huge.workload)]
    hidden = LIMIT * itemsize(huge.workload.dtype)
    return _MEMORY_FACTOR * max(sum(extent(spec) for spec in specs), hidden)


def run(child: Child, kernel_type: KernelType, huge: Huge, seed: int, device: torch.device) -> None:
    """Run the call.

    Raises:
        StageFailed: The candidate did not pass it; `out_of_memory` may be another process's doing.
        OutOfMemoryError: torch's: the memory that was free is not any more.
    """
    placed = place(huge.workload, outputs_of(kernel_type, huge.workload))
    arena = Arena.create(placed.end, device)
    try:
        with child.lent(arena):
            _run(child, kernel_type, huge, seed, device)
    except Failed as failed:
        where = f"{huge.workload.label} ({huge.workload.shape}, {huge.workload.dtype})"
        raise StageFailed(failed.status, f"Stage edges, {where}: {failed.what}.") from None
    finally:
        arena.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _run(child: Child, kernel_type: KernelType, huge: Huge, seed: int, device: torch.device) -> None:
    args = make_inputs(kernel_type, huge.rows, seed, device)
    exact = checks.expect(kernel_type, huge.rows, args)
    placed = place(huge.workload, outputs_of(kernel_type, huge.workload))
    slots, arena = dict(placed.inputs), child.arena
    cut = [name for name in kernel_type.cut(huge.workload) if name in slots]
    for name, slot in placed.inputs:
        if name in cut:
            for part, turned in blocks(arena.view(slot), args[name], seed):
                part.copy_(turned)
        else:
            arena.write(slot, args[name])
    for slot in placed.sinks:
        arena.fill(slot, POISON)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    child.start_call(placed.arguments, placed.sinks)
    report = child.finish_call()
    if len(report.outputs) != len(exact.specs) or any(r.get("type") != "Tensor" for r in report.outputs):
        raise Failed("incorrect", "returned something else than for fewer rows")
    for name in cut:
        if any(
            not same_bits(part, turned) for part, turned in blocks(arena.view(slots[name]), args[name], seed)
        ):
            raise Failed("incorrect", f"changed its input {name}")
    _check(child, kernel_type, huge, placed.sinks, exact, seed)


def _check(
    child: Child,
    kernel_type: KernelType,
    huge: Huge,
    sinks: tuple[Slot, ...],
    exact: checks.Expected,
    seed: int,
) -> None:
    found = [child.arena.view(slot) for slot in sinks]
    # One block after the other: in float64 all of them together are larger than the call.
    pairs = (blocks(f, e, seed) for f, e in zip(found, exact.outputs, strict=True))
    drawn, at = exact.outputs[0].shape[0], 0
    for block in zip(*pairs, strict=True):
        expected = checks.Expected(
            outputs=tuple(turned for _, turned in block), torch_error=exact.torch_error, specs=exact.specs
        )
        problem = checks.check_values([part for part, _ in block], expected, kernel_type, huge.rows).problem
        if problem:
            raise Failed("incorrect", f"is wrong among the {drawn} rows from {at} on: {problem}")
        at += drawn
