"""How far a patched model is from a run in higher precision, beside how far the plain model is.

The plain model in its own dtype is wrong too; a user who runs it accepts that. What counts is the ratio of the two
errors: about 1 for a kernel that rounds as often as the code it replaces.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autokernel_hf.errors import ModelError
from autokernel_hf.models import Inputs, free_memory
from autokernel_hf.models.outputs import slices

logger = logging.getLogger(__name__)

MAX_RATIO = 1.5
"""Errors are sums of many roundings, so another order of them gives another sum of the same size: over thousands of
outputs its root mean square varies by a few percent. Half as much again leaves room for one more rounding at each site,
and is far below what a wrong kernel costs."""

MAX_WORST = 4.0
"""The same for the largest error of a single output, which varies more: a few wrong outputs among millions hardly move
a root mean square."""

_ROOM = 1.3  # a pass in higher precision needs more than its weights


# --- copies of a model --------------------------------------------------------------------------------------------


def twin(model: nn.Module) -> nn.Module:
    """A copy of a model's modules that shares all its parameters and buffers.

    Raises:
        ModelError: The model cannot be copied.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return _copied(model, shared)


@contextmanager
def in_higher_precision(model: nn.Module) -> Iterator[tuple[nn.Module, torch.dtype, list[str]]]:
    """A copy of a model in float64 (float32 for a 16-bit model), and notes on how it came to be.

    It is made on the model's own device if it fits there, else on the CPU.

    Raises:
        ModelError: It fits nowhere.
    """
    parameters = list(model.parameters())
    floating = [p for p in parameters if p.is_floating_point()]
    device = parameters[0].device if parameters else torch.device("cpu")
    wide = torch.float64 if any(p.dtype == torch.float32 for p in floating) else torch.float32
    needed = int(sum(p.numel() for p in floating) * wide.itemsize * _ROOM)
    notes: list[str] = []
    name = str(wide).removeprefix("torch.")
    if needed > free_memory(device):
        if device.type == "cpu" or needed > free_memory(torch.device("cpu")):
            raise ModelError(
                f"A {name} run to compare with needs {needed / 1e9:.1f} GB, which are not free.",
                remedy="Verify a smaller model, or on a machine with more memory.",
            )
        notes.append(f"the {name} run was made on the CPU: the GPU has no room for a second copy")
        device = torch.device("cpu")

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(device, wide) if tensor.is_floating_point() else tensor.to(device)

    converted: dict[int, Tensor] = {
        id(p): nn.Parameter(convert(p.detach()), requires_grad=False) for p in parameters
    }
    converted |= {id(b): convert(b) for b in model.buffers()}
    yield _copied(model, converted), wide, notes


def _copied(model: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    try:
        return copy.deepcopy(model, dict(tensors))
    except (TypeError, RuntimeError, AttributeError, copy.Error) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({error}), so that it cannot be verified.",
            remedy="Let the module hold nothing that copy.deepcopy refuses.",
        ) from error


def widened(inputs: Inputs, wide: torch.dtype, model: nn.Module) -> Inputs:
    """Inputs for a copy in higher precision, on its device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return {
        name: value.to(device, wide if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


# --- errors -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    eager: float = 0.0
    kernels: float = 0.0
    exact: float = 0.0
    worst_eager: float = 0.0
    worst_kernels: float = 0.0
    largest: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Accuracy:
    """Errors gathered over several inputs.

    Args:
        max_abs: The largest error of the model with kernels.
        ratio: The largest ratio, over inputs and outputs, of the two models' root mean square errors.
        worst: The same for the largest single errors.
        finite: Whether the model with kernels is finite exactly where the plain one is.
        compared: How many numbers were compared: those of the plain model that are finite.
    """

    max_abs: float = 0.0
    ratio: float = 0.0
    worst: float = 0.0
    finite: bool = True
    inputs: int = 0
    compared: int = 0
    _agreeing: int = 0
    _positions: int = 0
    _divergence: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return (
            self.compared > 0
            and self.finite
            and not self.problems
            and self.ratio <= MAX_RATIO
            and self.worst <= MAX_WORST
        )

    @property
    def reason(self) -> str:
        """Why it is not right; empty where it is."""
        if self.problems:
            return self.problems[0]
        if not self.finite:
            return "with the kernels the model's output has other infinities or NaNs than without"
        if self.ratio > MAX_RATIO:
            return f"with the kernels the model's error is {self.ratio:.3g} times its own, above {MAX_RATIO}"
        if self.worst > MAX_WORST:
            return f"the largest error is {self.worst:.3g} times the plain model's largest, above {MAX_WORST}"
        if self.inputs and not self.compared:
            return "the model's output holds no finite floating-point number, so that nothing can be compared"
        return "" if self.inputs else "nothing was compared"

    @property
    def top1_agreement(self) -> float | None:
        return self._agreeing / self._positions if self._positions else None

    @property
    def kl(self) -> float | None:
        """Mean Kullback-Leibler divergence of the next-token distribution, plain from patched, in nats."""
        return self._divergence / self._positions if self._positions else None

    def add(
        self,
        plain: dict[str, Tensor],
        patched: dict[str, Tensor],
        exact: dict[str, Tensor],
        vocabulary: int | None,
    ) -> None:
        """Compare the outputs for one input; `vocabulary` is given for models whose logits are over tokens."""
        self.inputs += 1
        for name, expected in plain.items():
            found, truth = patched.get(name), exact.get(name)
            if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
                self.problems.append(f"with the kernels the model's output {name} has another form")
                return
            if truth is None or truth.shape != expected.shape:
                self.problems.append(f"the run in higher precision has no output {name} to compare with")
                return
            self._compare(expected, found, truth)
        logits = plain.get("logits")
        if logits is not None and vocabulary is not None and logits.dim() == 3:
            self._compare_tokens(
                logits.reshape(-1, logits.shape[-1]), patched["logits"].reshape(-1, logits.shape[-1])
            )

    def _compare(self, plain: Tensor, patched: Tensor, exact: Tensor) -> None:
        sums = _Sums()
        for e, k, x in zip(slices(plain), slices(patched), slices(exact), strict=True):
            e, k, x = (t.to(exact.device, torch.float64) for t in (e, k, x))
            finite = torch.isfinite(e)
            if not torch.equal(finite, torch.isfinite(k)):
                self.finite = False
                return
            finite &= torch.isfinite(x)
            e, k, x = e[finite], k[finite], x[finite]
            if not e.numel():
                continue
            error_e, error_k = (e - x).abs(), (k - x).abs()
            sums.eager += float(error_e.square().sum())
            sums.kernels += float(error_k.square().sum())
            sums.exact += float(x.square().sum())
            sums.worst_eager = max(sums.worst_eager, float(error_e.max()))
            sums.worst_kernels = max(sums.worst_kernels, float(error_k.max()))
            sums.largest = max(sums.largest, float(x.abs().max()))
            sums.count += e.numel()
        if not sums.count:
            return
        self.compared += sums.count
        # No dtype can do better than its own rounding of the result: below that a ratio says nothing.
        epsilon = torch.finfo(plain.dtype).eps / 4
        rms_eager, rms_kernels, rms_exact = (
            (total / sums.count) ** 0.5 for total in (sums.eager, sums.kernels, sums.exact)
        )
        floor = max(rms_eager, epsilon * rms_exact)
        worst_floor = max(sums.worst_eager, epsilon * sums.largest)
        self.max_abs = max(self.max_abs, sums.worst_kernels)
        self.ratio = max(self.ratio, _ratio(rms_kernels, floor))
        self.worst = max(self.worst, _ratio(sums.worst_kernels, worst_floor))

    def _compare_tokens(self, plain: Tensor, patched: Tensor) -> None:
        """Shapes: (positions, vocabulary)."""
        rows = max(1, (1 << 24) // plain.shape[-1])
        for e, k in zip(plain.split(rows), patched.split(rows), strict=True):
            self._agreeing += int((e.argmax(-1) == k.argmax(-1)).sum())
            self._positions += len(e)
            log_e, log_k = e.double().log_softmax(-1), k.double().log_softmax(-1)
            self._divergence += float((log_e.exp() * (log_e - log_k)).sum().clamp_min(0))


def _ratio(value: float, reference: float) -> float:
    if reference > 0:
        return value / reference
    return 1.0 if value == 0 else float("inf")
