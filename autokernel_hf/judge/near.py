"""The quick look at a timed output: is it as near to torch's as a right one is?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Workload

_PART = 1 << 26  # elements of an output that are compared at a time


class Near:
    """Whether an output is so near to torch's that both may be taken for right; made once for all contenders."""

    def __init__(
        self, wanted: Tensor, kernel_type: KernelType, workload: Workload, torch_error: float
    ) -> None:
        self._exact = wanted if not wanted.is_floating_point() or not wanted.numel() else None
        self._wanted: tuple[Tensor, ...] = ()
        self._bound: Tensor | None = None  # of all elements, where those are few enough to keep it
        if self._exact is None:
            rule = kernel_type.tolerance
            self._wanted = self._parts(wanted)
            self._unit = rule.ulps * rule.growth(workload) * torch.finfo(wanted.dtype).eps
            # An infinity says nothing of the size of the others; where one stands, only the oracle decides.
            norms = [float(part.float().nan_to_num(0.0, 0.0, 0.0).norm()) for part in self._wanted]
            self._base = rule.k * torch_error + self._unit * math.hypot(*norms) / math.sqrt(wanted.numel())
            if len(self._wanted) == 1:
                self._wanted = (wanted.reshape(-1).float(),)
                self._bound = self._bound_of(self._wanted[0])

    def _bound_of(self, wanted: Tensor) -> Tensor:
        return wanted.abs().mul_(self._unit).add_(self._base)

    @staticmethod
    def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.reshape(-1).split(_PART))

    def holds(self, output: Tensor) -> bool:
        if self._exact is not None:
            return bool(torch.equal(output, self._exact))
        for part, wanted in zip(self._parts(output), self._wanted, strict=True):
            want = wanted.float()
            bound = self._bound if self._bound is not None else self._bound_of(want)
            if not bool(((part.float() - want).abs_() <= bound).all()):
                return False
        return True
