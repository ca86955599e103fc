"""Running the five stages on a candidate in a child."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from autokernel_hf.judge import checks
from autokernel_hf.judge.arena import POISON, Layout, Slot, bits_of, outputs_of, same_bits
from autokernel_hf.judge.cases import Case
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.kernels.base import Args, KernelType
from autokernel_hf.records import BenchStatus, TensorSpec, Workload

_WITH_BANDS = ("smoke", "shapes", "edges")  # stages whose calls are made once more, with guard bands
_SHIFT_BYTES = 1 << 16  # repeated calls get their inputs elsewhere: an address must not matter


class StageFailed(Exception):  # noqa: N818 - the verdict on a candidate
    """A case of a stage was not passed: `reason` is a whole sentence."""

    def __init__(self, status: BenchStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What a passed case showed; `torch_error` per output is kept for the checks of timed calls."""

    max_abs_error: float
    error_ratio: float
    torch_error: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One call's places in the arena."""

    arguments: tuple[tuple[str, object], ...]
    inputs: tuple[tuple[str, Slot], ...]
    sinks: tuple[Slot, ...]
    end: int


def place(workload: Workload, outputs: Iterable[TensorSpec], start: int = 0) -> Placed:
    layout = Layout(start)
    inputs = {name: layout.place(spec) for name, spec in workload.tensors}
    sinks = tuple(layout.place(spec) for spec in outputs)
    arguments = tuple((name, inputs.get(name, value)) for name, value in workload.args)
    return Placed(arguments=arguments, inputs=tuple(inputs.items()), sinks=sinks, end=layout.end)


def room_for(kernel_type: KernelType, case: Case) -> int:
    """The bytes of arena that a case takes."""
    end = place(case.workload, outputs_of(kernel_type, case.workload)).end
    return end + (case.repeats - 1) * _SHIFT_BYTES


def run_case(child: Child, kernel_type: KernelType, case: Case, args: Args, device: torch.device) -> Passed:
    """Run one case on the given arguments, which the candidate has never seen.

    Raises:
        StageFailed: The candidate did not pass it.
    """
    workload = case.workload
    outputs = outputs_of(kernel_type, workload)
    try:
        if case.refuse:
            _must_refuse(child, workload, args, outputs)
            return Passed(max_abs_error=0.0, error_ratio=0.0, torch_error=())
        oracle: checks.Oracle | None = None
        kept: list[list[Tensor]] = []
        outcome = checks.Outcome()
        for repeat in range(case.repeats):
            placed = place(workload, outputs, start=repeat * _SHIFT_BYTES)
            before = _write(child, placed, args, device)
            # Between the last two of the repeats an unrelated op runs.
            child.start_call(
                placed.arguments,
                placed.sinks,
                disturb=0 < repeat == case.repeats - 1,
                bands=case.stage in _WITH_BANDS,
            )
            if oracle is None:
                oracle = checks.Oracle(kernel_type, workload, args)  # while the child computes
            report = child.finish_call()
            if report.beside:
                raise Failed("incorrect", report.beside)
            if not torch.equal(_inputs(child, placed), before):
                raise Failed("incorrect", f"changed its inputs ({_changed(child, placed, args)})")
            problem = checks.check_form(report.outputs, report.shared, oracle, device.type)
            if problem:
                raise Failed("incorrect", problem)
            found = [child.arena.view(slot) for slot in placed.sinks]
            outcome = oracle.check(found)
            if outcome.problem:
                raise Failed("incorrect", f"{outcome.problem}. Tolerance: {kernel_type.tolerance.why}")
            if case.repeats > 1:
                kept.append([tensor.clone() for tensor in found])
        _must_repeat(kept)
        if case.repeats > 1:
            _must_notice(child, kernel_type, workload, args, placed)
    except Failed as failed:
        raise StageFailed(failed.status, _sentence(case, failed.what)) from None
    assert oracle is not None
    return Passed(
        max_abs_error=outcome.max_abs_error,
        error_ratio=outcome.error_ratio,
        torch_error=oracle.torch_error,
    )


def _write(child: Child, placed: Placed, args: Args, device: torch.device) -> Tensor:
    """Write the inputs, poison everything around them and the outputs' places; return the bytes as written."""
    arena = child.arena
    for _, slot in placed.inputs:
        arena.fill(slot, POISON)
    for name, slot in placed.inputs:
        arena.write(slot, args[name])
    for slot in placed.sinks:
        arena.fill(slot, POISON)
    before = _inputs(child, placed).clone()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return before


def _inputs(child: Child, placed: Placed) -> Tensor:
    slots = [slot for _, slot in placed.inputs]
    return child.arena.span(slots[0], slots[-1])


def _changed(child: Child, placed: Placed, args: Args) -> str:
    """Which input it was, or the memory around them."""
    for name, slot in placed.inputs:
        now, then = child.arena.view(slot), args[name]
        if not same_bits(now, then):
            return name
    return "memory beside them"


def start_compile(child: Child, workloads: Iterable[Workload]) -> None:
    """Have a Triton candidate compile what these calls need, without making them; `child.finish_compile` waits for it."""
    child.start_compile([place(workload, ()).arguments for workload in workloads])


def write_calls(child: Child, calls: Iterable[tuple[Workload, Args]]) -> list[Placed]:
    """Write the inputs of calls side by side, as far as the arena has room; the places of those that are there."""
    placed: list[Placed] = []
    for workload, args in calls:
        here = place(workload, (), start=placed[-1].end if placed else 0)
        if here.end > child.arena.nbytes:
            break
        for name, slot in here.inputs:
            child.arena.write(slot, args[name])
        placed.append(here)
    if child.arena.memory.device.type == "cuda":
        torch.cuda.synchronize(child.arena.memory.device)
    return placed


def _must_refuse(child: Child, workload: Workload, args: Args, outputs: tuple[TensorSpec, ...]) -> None:
    placed = place(workload, outputs)
    for name, slot in placed.inputs:
        child.arena.write(slot, args[name])
    child.start_call(placed.arguments, placed.sinks)
    try:
        child.finish_call()
    except Failed as failed:
        if failed.status == "unsupported":
            return
        raise
    raise Failed("incorrect", "answered a call outside of its declared domain instead of refusing it")


def _must_repeat(kept: list[list[Tensor]]) -> None:
    for i, again in enumerate(kept[1:], start=2):
        for first, now in zip(kept[0], again, strict=True):
            different = (
                bits_of(first).view(-1, first.element_size()).ne(bits_of(now).view(-1, now.element_size()))
            )
            if bool(different.any()):
                count = int(different.any(-1).sum())
                raise Failed(
                    "nondeterministic",
                    f"gave other bits in {count} of {first.numel()} elements when it was called again (call {i}) "
                    "on the same input",
                )


def _must_notice(
    child: Child, kernel_type: KernelType, workload: Workload, args: Args, placed: Placed
) -> None:
    """The call before once more, at the same addresses, with one element of the first tensor changed.

    Who knows an input again by its address, by some of its values or by a sum of them, answers the old question.
    """
    name, slot = placed.inputs[0]
    first = args[name]
    if not first.numel() or not first.is_floating_point():
        return
    place = secrets.randbelow(first.numel())
    index = checks.index_of(place, first.shape)
    old = float(first[index])
    new = torch.tensor(-2.0 * old - 1.0 if math.isfinite(old) else 1.0).to(first.dtype).to(first.device)
    child.arena.view(slot)[index] = new
    changed = {**args, name: child.arena.view(slot).clone(memory_format=torch.preserve_format)}
    for sink in placed.sinks:
        child.arena.fill(sink, POISON)
    if first.device.type == "cuda":
        torch.cuda.synchronize(first.device)
    child.start_call(placed.arguments, placed.sinks)
    oracle = checks.Oracle(kernel_type, workload, changed)
    report = child.finish_call()
    problem = checks.check_form(report.outputs, report.shared, oracle, first.device.type)
    problem = problem or oracle.check([child.arena.view(slot) for slot in placed.sinks]).problem
    if problem:
        raise Failed("incorrect", f"was called again with one element changed: {problem}")


def _sentence(case: Case, what: str) -> str:
    workload = case.workload
    return f"Stage {case.stage}, {workload.label} ({workload.shape}, {workload.dtype}): {what}."
