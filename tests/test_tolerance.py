"""Tolerances are wide enough for honest sums in fp32, in whatever order, and no wider: on every float32 call of the judge.

The kernels here are written in numpy and torch on the CPU. How narrower precisions fail: `test_impostors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from autokernel_hf.judge import checks
from autokernel_hf.judge.cases import STAGES, Scope, cases_of, key_of
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels.base import KernelType, make_inputs, sum_roundings
from autokernel_hf.records import Workload
from autokernel_hf.variant import Domain

LARGEST = 1 << 18  # elements: what a model does with more takes long to add up one by one

Sum = Callable[[Tensor], Tensor]


def in_chains(count: int) -> Sum:
    """Sums over the last dimension in fp32: `count` chains, each one term after the other, then these one by one.

    One chain is the plain loop of a C++ kernel; 256 are the threads of a block that add up with atomics.
    """

    def add(x: Tensor) -> Tensor:
        terms = np.pad(x.numpy(), [(0, 0)] * (x.dim() - 1) + [(0, -x.shape[-1] % count)])
        chains = terms.reshape(*terms.shape[:-1], terms.shape[-1] // count, count)
        parts = np.add.accumulate(chains, axis=-2, dtype=np.float32)[..., -1, :]
        return torch.from_numpy(np.add.accumulate(parts, axis=-1, dtype=np.float32)[..., -1].copy())

    return add


def rmsnorm(add: Sum, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    scale = torch.rsqrt(add(x * x) / x.shape[-1] + eps)
    return x * scale[..., None] * (weight.float() + offset)


def layernorm(add: Sum, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - (add(x) / x.shape[-1])[..., None]
    y = centred * torch.rsqrt(add(centred * centred) / x.shape[-1] + eps)[..., None]
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def softmax(add: Sum, x: Tensor, dim: int) -> Tensor:
    rows = x.movedim(dim, -1)
    powers = torch.exp(rows - rows.amax(-1, keepdim=True))
    return (powers / add(powers)[..., None]).movedim(-1, dim)


def cross_entropy(
    add: Sum, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> Tensor:
    top = logits.amax(-1)
    total = top + torch.log(add(torch.exp(logits - top[:, None])))
    counted = target != ignore_index
    hit = logits.gather(1, torch.where(counted, target, 0)[:, None])[:, 0]
    loss = (1 - label_smoothing) * (total - hit)
    loss += label_smoothing * (total - add(logits) / logits.shape[1])
    loss = torch.where(counted, loss, 0.0)
    if reduction == "none":
        return loss
    return add(loss) if reduction == "sum" else add(loss) / counted.sum()


def reduce(add: Sum, x: Tensor, dim: int, keepdim: bool, op: str) -> Tensor:
    total = add(x.movedim(dim, -1))
    total = total / x.shape[dim] if op == "mean" else total
    return total.unsqueeze(dim) if keepdim else total


KERNELS: dict[str, Callable[..., Tensor]] = {
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
    "reduce": reduce,
}


def calls_of(found: KernelType) -> list[Workload]:
    """Every float32 call of every stage, once, as far as there is something to add up."""
    scope = Scope(kernel_type=found, workloads=found.workloads["cpu"], dtypes=("float32",))
    whole = Domain(dtypes=found.dtypes, values={})
    calls = {key_of(c.workload): c.workload for stage in STAGES for c in cases_of(stage, scope, whole)}
    sizes = [(w, math.prod(w.tensors[0][1].shape)) for w in calls.values() if w.tensors[0][1].shape]
    return [w for w, size in sizes if 0 < size <= LARGEST and w.args[-1][1] not in ("max", "min", "prod")]


@pytest.mark.parametrize("chains", [1, 8, 256])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_sum_in_fp32_is_right_in_any_order(name: str, chains: int) -> None:
    found = kernel_type(name)
    calls = calls_of(found)
    assert len({w.values for w in calls}) >= 8
    wrong = {}
    for workload in calls:
        args = make_inputs(found, workload, 17)
        with np.errstate(invalid="ignore", over="ignore"):
            output = KERNELS[name](in_chains(chains), **args)
        problem = checks.check_values([output], checks.expect(found, workload, args), found, workload).problem
        if problem:
            wrong[workload.label] = problem
    assert wrong == {}


@pytest.mark.parametrize("terms", [100, 10_000])
def test_the_bound_of_a_sum_is_not_far_above_what_happens(terms: int) -> None:
    """Of sums one term after the other: at most the bound, and a tenth of it or more."""
    walk = torch.randn(500, terms, generator=torch.Generator().manual_seed(1))
    size = walk.double().sum(-1).square().mean().sqrt()
    off = (in_chains(1)(walk).double() - walk.double().sum(-1)).abs().max() / size
    same = torch.rand(500, 1, generator=torch.Generator().manual_seed(2)).expand(-1, terms)
    exact = same.double().sum(-1)
    off_alike = ((in_chains(1)(same.contiguous()).double() - exact).abs() / exact).max()
    eps = torch.finfo(torch.float32).eps
    assert 0.1 <= off / eps / sum_roundings(terms) <= 1
    assert 0.1 <= off_alike / eps / sum_roundings(terms, alike=True) <= 1


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_long_sum_without_its_last_term_is_wrong(op: str) -> None:
    found = kernel_type("reduce")
    workload = found.build({"N": 65537}, "float32", {"op": op})
    args = make_inputs(found, workload, 4)
    total = args["x"].double()[:-1].sum()
    output = (total / 65537 if op == "mean" else total).float()
    assert (
        "wrong"
        in checks.check_values([output], checks.expect(found, workload, args), found, workload).problem
    )
