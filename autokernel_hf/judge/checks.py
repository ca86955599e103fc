"""When an output is right.

The rule of `kernels.base.Tolerance`, written once: an element passes where its error against the float64 oracle is at
most k times the largest error of the plain torch expression in the same dtype on the same input, plus the roundings
that no kernel can avoid. NaN and infinities stand exactly where the oracle, rounded to the output's dtype, has them.

And the impostors: functions that compute nothing and must fail everywhere. A workload that an impostor passes says
nothing about a kernel, so it is not admitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autokernel_hf.errors import JudgeError
from autokernel_hf.kernels.base import (
    DTYPE_NAMES,
    Args,
    KernelType,
    Outputs,
    output_specs,
    round_to_bits,
    upcast,
)
from autokernel_hf.records import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The right answer of one call, and how well plain torch does.

    `outputs` are float64 (or integer) tensors; `torch_error` is, per output, the largest error of the type's reference
    in the workload's dtype; `specs` are shapes and dtypes that the outputs must have.
    """

    outputs: Outputs
    torch_error: tuple[float, ...]
    specs: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an output compares: `problem` is empty where it is right, else a sentence on the worst element."""

    problem: str = ""
    max_abs_error: float = 0.0
    error_ratio: float = 0.0


def expect(kernel_type: KernelType, workload: Workload, args: Args) -> Expected:
    """The oracle's answer for the very tensors that the candidate gets.

    Raises:
        JudgeError: Oracle or reference do not keep to the type's own schema.
    """
    specs = output_specs(kernel_type.outputs, args)
    with torch.no_grad():
        exact = kernel_type.oracle(**upcast(args))
        plain = kernel_type.reference(**args)
    for (shape, _), output in zip(specs, exact, strict=True):
        if tuple(output.shape) != shape:
            raise JudgeError(
                f"The oracle of {kernel_type.name} gives {tuple(output.shape)} for {workload.label}, not {shape}."
            )
    errors = tuple(_largest_error(p, e, dtype) for p, e, (_, dtype) in zip(plain, exact, specs, strict=True))
    return Expected(outputs=exact, torch_error=errors, specs=specs)


_PART_BYTES = 1 << 30  # of a part's tensors in float64; what is made of them on the way takes some times more


class Oracle:
    """The right answer of one call: in one piece, or, where that is too large, part by part.

    Taken in parts, each part is held to the error that torch makes in it, and to the size of its own outputs.

    Args:
        part_bytes: What the tensors of a part may take in float64.

    Raises:
        JudgeError: Oracle or reference do not keep to the type's own schema.
    """

    def __init__(
        self, kernel_type: KernelType, workload: Workload, args: Args, *, part_bytes: int = _PART_BYTES
    ) -> None:
        self.specs = output_specs(kernel_type.outputs, args)
        self._kernel_type, self._workload, self._args = kernel_type, workload, args
        self.parts = _parts(kernel_type, workload, args, part_bytes)
        self._whole = expect(kernel_type, workload, args) if len(self.parts) == 1 else None
        self._torch_error: tuple[float, ...] = (0.0,) * len(self.specs)

    @property
    def torch_error(self) -> tuple[float, ...]:
        """Per output, the largest error of plain torch; known once outputs were checked."""
        return self._torch_error if self._whole is None else self._whole.torch_error

    def check(self, outputs: Sequence[Tensor]) -> Outcome:
        """Hold outputs of the right shapes and dtypes against the oracle."""
        if self._whole is not None:
            return check_values(outputs, self._whole, self._kernel_type, self._workload)
        worst = Outcome()
        for rows in self.parts:
            args = part_of(self._kernel_type, self._workload, self._args, rows)
            expected = expect(self._kernel_type, self._workload, args)
            outcome = check_values([o[rows] for o in outputs], expected, self._kernel_type, self._workload)
            self._torch_error = tuple(map(max, self._torch_error, expected.torch_error))
            where = f"in the part from row {rows.start} on, " if outcome.problem else ""
            worst = Outcome(
                problem=worst.problem or where + outcome.problem,
                max_abs_error=max(worst.max_abs_error, outcome.max_abs_error),
                error_ratio=max(worst.error_ratio, outcome.error_ratio),
            )
        return worst


def part_of(kernel_type: KernelType, workload: Workload, args: Args, rows: slice) -> Args:
    """The arguments of a part of a call: some rows of the tensors that can be cut."""
    cut = kernel_type.cut(workload)
    return {name: value[rows] if name in cut and value is not None else value for name, value in args.items()}


def first_part(kernel_type: KernelType, workload: Workload, args: Args) -> Args:
    """The arguments of as much of a call as the oracle takes in one piece."""
    return part_of(kernel_type, workload, args, _parts(kernel_type, workload, args, _PART_BYTES)[0])


def _parts(kernel_type: KernelType, workload: Workload, args: Args, part_bytes: int) -> list[slice]:
    cut = [args[name] for name in kernel_type.cut(workload) if args[name] is not None]
    if not cut:
        return [slice(None)]
    rows = cut[0].shape[0]
    outputs = sum(math.prod(shape) for shape, _ in output_specs(kernel_type.outputs, args))
    total = 8 * (sum(t.numel() for t in cut) + outputs)
    if total <= part_bytes or rows <= 1:
        return [slice(None)]
    step = max(1, rows * part_bytes // total)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def check_values(
    outputs: Sequence[Tensor], expected: Expected, kernel_type: KernelType, workload: Workload
) -> Outcome:
    """Hold outputs of the right shapes and dtypes against the oracle."""
    worst = Outcome()
    for i, (output, exact) in enumerate(zip(outputs, expected.outputs, strict=True)):
        outcome = _check_one(output, exact, expected.torch_error[i], kernel_type, workload)
        name = f"output {i}, " if len(outputs) > 1 else ""
        worst = Outcome(
            problem=worst.problem or (outcome.problem and name + outcome.problem),
            max_abs_error=max(worst.max_abs_error, outcome.max_abs_error),
            error_ratio=max(worst.error_ratio, outcome.error_ratio),
        )
    return worst


def allowed(
    exact: Tensor, torch_error: float, dtype: torch.dtype, kernel_type: KernelType, workload: Workload
) -> Tensor:
    """The largest permitted error of every element, in float64."""
    rule = kernel_type.tolerance
    info = torch.finfo(dtype)
    size = exact.double().abs()
    # An infinity, or what becomes one in this dtype, says nothing of the size of the others.
    ordinary = size[size <= info.max]
    size = size.clamp(max=info.max).nan_to_num(0.0)
    scale = torch.maximum(size, size.new_tensor(max(_rms(ordinary), info.tiny)))
    return rule.k * torch_error + rule.ulps * rule.growth(workload) * info.eps * scale


def _check_one(
    output: Tensor, exact: Tensor, torch_error: float, kernel_type: KernelType, workload: Workload
) -> Outcome:
    if not output.numel():
        return Outcome()
    if not output.is_floating_point():
        same = output == exact.to(output.dtype)
        if bool(same.all()):
            return Outcome()
        return Outcome(problem=_sentence(output, exact, ~same, None), max_abs_error=1.0, error_ratio=math.inf)
    got, want = output.double(), exact.double()
    info = torch.finfo(output.dtype)
    tolerance = allowed(want, torch_error, output.dtype, kernel_type, workload)
    error = (got - want).abs()
    finite = torch.isfinite(want)
    # Beyond the dtype's range the right value is an infinity; on the edge of it either is.
    may_overflow = (
        finite & torch.isinf(got) & (got.sign() == want.sign()) & (want.abs() + tolerance >= info.max)
    )
    right = torch.where(
        finite,
        (torch.isfinite(got) & (error <= tolerance)) | may_overflow,
        (torch.isnan(want) & torch.isnan(got)) | (got == want),
    )
    measured = finite & torch.isfinite(got)
    largest = float(error[measured].max()) if bool(measured.any()) else 0.0
    size = want.abs()[finite & (want.abs() <= info.max)]
    floor = info.eps / 2 * max(_rms(size), info.tiny)
    outcome = Outcome(max_abs_error=largest, error_ratio=largest / max(torch_error, floor))
    if bool(right.all()):
        return outcome
    return Outcome(
        problem=_sentence(output, exact, ~right, tolerance),
        max_abs_error=outcome.max_abs_error,
        error_ratio=outcome.error_ratio,
    )


def _largest_error(output: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    if not output.numel() or not dtype.is_floating_point:
        return 0.0
    got, want = output.double(), exact.double()
    both = torch.isfinite(got) & torch.isfinite(want) & (want.abs() <= torch.finfo(dtype).max)
    return float((got - want).abs()[both].max()) if bool(both.any()) else 0.0


def _rms(size: Tensor) -> float:
    """Root of the mean square, without overflow on the way."""
    if not size.numel():
        return 0.0
    top = float(size.max())
    if top == 0.0 or not math.isfinite(top):
        return 0.0
    return top * math.sqrt(float((size / top).square().mean()))


def _sentence(output: Tensor, exact: Tensor, wrong: Tensor, tolerance: Tensor | None) -> str:
    """The worst wrong element: not-a-number first, then the one furthest beyond its bound."""
    excess = (output.double() - exact.double()).abs()
    if tolerance is not None:
        excess = excess / tolerance.clamp(min=1e-300)
    excess = torch.where(wrong, excess.nan_to_num(nan=math.inf), torch.full_like(excess, -1.0))
    flat = int(excess.argmax())
    index = index_of(flat, output.shape)
    got, want = output.double().reshape(-1)[flat].item(), exact.double().reshape(-1)[flat].item()
    bound = ""
    if tolerance is not None and math.isfinite(want):
        bound = f" (error {abs(got - want):.3g}, allowed {tolerance.reshape(-1)[flat].item():.3g})"
    where = f"element {index}" if index else "the value"
    count = int(wrong.sum())
    return f"{where} is {got:.6g}, expected {want:.6g}{bound}; {count} of {wrong.numel()} elements are wrong"


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Where an element lies, from its number. Not `torch.unravel_index`, whose first call imports sympy, in seconds."""
    return tuple(int(i) for i in np.unravel_index(flat, tuple(shape))) if len(shape) else ()


def check_form(
    reports: Sequence[dict[str, Any]], shared: bool, expected: Expected | Oracle, device: str
) -> str:
    """What is wrong with the form of a call's outputs, as the child saw them; empty where nothing is."""
    if len(reports) != len(expected.specs):
        return f"it returned {len(reports)} outputs instead of {len(expected.specs)}"
    for i, (report, (shape, dtype)) in enumerate(zip(reports, expected.specs, strict=True)):
        name = f"output {i}" if len(reports) > 1 else "the output"
        kind = report.get("type")
        if kind != "Tensor":
            return f"{name} is a {kind}, not a plain tensor"
        if report.get("dtype") != DTYPE_NAMES[dtype]:
            return f"{name} has dtype {report.get('dtype')} instead of {DTYPE_NAMES[dtype]}"
        if tuple(report.get("shape", ())) != shape:
            return f"{name} has shape {tuple(report.get('shape', ()))} instead of {shape}"
        if report.get("device") != device:
            return f"{name} is on {report.get('device')} instead of {device}"
        if not report.get("contiguous"):
            return f"{name} is not contiguous"
        if report.get("aliases_input"):
            return f"{name} shares memory with an input"
        if report.get("aliases_last"):
            return f"{name} is not new: it shares memory with an output of the call before"
        if report.get("spoils_last"):
            return "it wrote to an output of the call before"
    if shared:
        return "two outputs share memory"
    return ""


def form_of(outputs: Sequence[object], expected: Expected | Oracle) -> str:
    """What is wrong with the form of outputs that are here, as far as values can be compared; empty where nothing is."""
    found = [
        (tuple(o.shape), o.dtype) if isinstance(o, Tensor) else (type(o).__name__, None) for o in outputs
    ]
    return "" if found == list(expected.specs) else f"it returned {found} instead of {list(expected.specs)}"


# --- impostors ----------------------------------------------------------------------------------------------------

Impostor = Callable[[KernelType, Args, Expected, Expected], Outputs]
"""(type, arguments, right answer, right answer of another call) -> what the impostor returns."""


def _zeros(kernel_type: KernelType, args: Args, expected: Expected, previous: Expected) -> Outputs:
    return tuple(torch.zeros_like(o) for o in expected.outputs)


def _first_input(kernel_type: KernelType, args: Args, expected: Expected, previous: Expected) -> Outputs:
    """The first tensor, repeated or cut to each output's size."""
    first = next(v for v in args.values() if isinstance(v, Tensor)).double().reshape(-1)
    outputs = []
    for output in expected.outputs:
        if not first.numel() or not output.numel():
            outputs.append(torch.zeros_like(output))
            continue
        repeats = -(-output.numel() // first.numel())
        outputs.append(first.repeat(repeats)[: output.numel()].reshape(output.shape).to(output.dtype))
    return tuple(outputs)


def _mean(kernel_type: KernelType, args: Args, expected: Expected, previous: Expected) -> Outputs:
    """The mean of the right answer everywhere, which is more than an impostor could know."""
    return tuple(
        torch.full_like(o, float(o.double().nan_to_num(0, 0, 0).mean())) if o.numel() else o.clone()
        for o in expected.outputs
    )


def _previous(kernel_type: KernelType, args: Args, expected: Expected, previous: Expected) -> Outputs:
    return tuple(o.clone() for o in previous.outputs)


# Significant bits of the next narrower precision: of float16 and TF32, of bfloat16, of two kinds of float8.
_NARROWER_BITS = {torch.float32: 11, torch.float16: 8, torch.bfloat16: 4, torch.float8_e4m3fn: 3}


def _narrow(kernel_type: KernelType, args: Args, expected: Expected, previous: Expected) -> Outputs:
    """Torch's own result in the next lower precision, of which only the digits are lost and not the range."""
    dtype = args[kernel_type.lead].dtype
    bits = _NARROWER_BITS[dtype]
    narrowed = {
        name: round_to_bits(value, bits).to(dtype)
        if isinstance(value, Tensor) and value.dtype == dtype
        else value
        for name, value in args.items()
    }
    with torch.no_grad():
        outputs = kernel_type.reference(**narrowed)
    return tuple(round_to_bits(o, bits) if o.is_floating_point() else o for o in outputs)


IMPOSTORS: dict[str, Impostor] = {
    "zeros": _zeros,
    "input": _first_input,
    "mean": _mean,
    "previous": _previous,
    "narrow": _narrow,
}


def admit(kernel_type: KernelType, workload: Workload, calls: tuple[Args, Args]) -> tuple[str, ...]:
    """The impostors that pass a workload although the type does not list them as right there: none, if it is a good one.

    Args:
        calls: The arguments of two calls with different values; the second call's answer is what `previous` gives.
    """
    args, before = calls
    expected = expect(kernel_type, workload, args)
    return passing_impostors(kernel_type, workload, args, expected, expect(kernel_type, workload, before))


def passing_impostors(
    kernel_type: KernelType, workload: Workload, args: Args, expected: Expected, previous: Expected
) -> tuple[str, ...]:
    passed = []
    for name, impostor in IMPOSTORS.items():
        if kernel_type.impostors_exempt(name, workload):
            continue
        outputs = impostor(kernel_type, args, expected, previous)
        typed = [o.to(dtype) for o, (_, dtype) in zip(outputs, expected.specs, strict=True)]
        if not check_values(typed, expected, kernel_type, workload).problem:
            passed.append(name)
    return tuple(passed)
