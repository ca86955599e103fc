"""Inputs of large calls, whose values would take more memory to draw, in float64, than the call itself."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from autokernel_hf.kernels.base import DTYPES, Args, KernelType, make_inputs
from autokernel_hf.records import TensorSpec, Workload

MOST_DRAWN = 1 << 27  # elements: a gigabyte in float64


def inputs_of(kernel_type: KernelType, workload: Workload, seed: int, device: torch.device) -> Args:
    """As `make_inputs`; of a call that is too large for that, and can be cut into rows, some rows many times over.

    Each time they are rotated by another secret number of rows, the same for all tensors that are cut.
    """
    cut = {name: spec for name, spec in workload.tensors if name in kernel_type.cut(workload)}
    elements = sum(math.prod(spec.shape) for spec in cut.values())
    as_it_lies = all(spec.strides is None and spec.offset == 0 for spec in cut.values())
    if elements <= MOST_DRAWN or not as_it_lies:
        return make_inputs(kernel_type, workload, seed, device)
    rows = max(1, next(iter(cut.values())).shape[0] * MOST_DRAWN // elements)
    few = make_inputs(kernel_type, _with_rows(workload, tuple(cut), rows), seed, device)
    args: Args = {}
    for name, value in few.items():
        if name not in cut:
            args[name] = value
            continue
        spec = cut[name]
        args[name] = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
        for part, turned in blocks(args[name], value, seed):
            part.copy_(turned)
    return args


def blocks(whole: Tensor, rows: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a tensor, and what stands there: the drawn rows, rotated by another number in each part."""
    dice, count = random.Random(seed), rows.shape[0]
    for start in range(0, whole.shape[0], count):
        part = whole[start : start + count]
        yield part, torch.roll(rows, dice.randrange(count), 0)[: part.shape[0]]


def _with_rows(workload: Workload, names: tuple[str, ...], rows: int) -> Workload:
    args = tuple(
        (name, value.model_copy(update={"shape": (rows, *value.shape[1:])}))
        if name in names and isinstance(value, TensorSpec)
        else (name, value)
        for name, value in workload.args
    )
    return workload.model_copy(update={"args": args})
