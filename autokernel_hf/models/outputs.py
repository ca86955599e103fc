"""What a model's forward returns, as tensors that can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def floating_tensors(output: Any) -> dict[str, Tensor]:
    """The floating tensors in a model's output by name, in order: `logits`, `hidden_states.0`, ..."""
    return {name: tensor for name, tensor in _walk("", output) if tensor.is_floating_point()}


def _walk(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name or "output", value
        return
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return
    for key, item in items:
        yield from _walk(f"{name}.{key}" if name else key, item)


def deviation(value: Tensor, expected: Tensor) -> float:
    """The root mean square of a difference over that of what is expected; inf where only one of the two is finite.

    Shapes: any, both alike. Computed in float64, in slices, so that large logits need no second copy.
    """
    if value.shape != expected.shape:
        return float("inf")
    wrong = torch.zeros((), dtype=torch.float64, device=expected.device)
    right = torch.zeros_like(wrong)
    for a, b in zip(slices(value), slices(expected), strict=True):
        a, b = a.double(), b.double()
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite):
            return float("inf")
        difference = torch.where(finite, a - b, 0.0)
        wrong += difference.square().sum()
        right += torch.where(finite, b, 0.0).square().sum()
    if wrong.item() == 0:
        return 0.0
    return float((wrong / right).sqrt()) if right.item() > 0 else float("inf")


_SLICE = 1 << 24


def slices(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor, in order, in slices of some 16 million."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        yield flat[start : start + _SLICE]
