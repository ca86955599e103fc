"""Gradients of root-mean-square normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.kernels import rmsnorm
from autokernel_hf.kernels._backward import (
    build_of,
    by_autograd,
    bytes_of,
    fills_of,
    gradients_of,
    gradients_peers,
    layouts_of,
)
from autokernel_hf.kernels.base import (
    Dims,
    KernelType,
    Output,
    Outputs,
    Schema,
    Tolerance,
    growth_in_fp32,
    sum_roundings,
)
from autokernel_hf.kernels.rmsnorm import reference
from autokernel_hf.records import Workload

FORWARD = rmsnorm.KERNEL_TYPE
OF = ("x", "weight")
SCHEMA = Schema.parse(
    "rmsnorm_backward(Tensor grad, Tensor x, Tensor weight, float eps, float offset=0.0) -> (Tensor, Tensor)"
)


def oracle(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Outputs:
    """With r = 1 / sqrt(mean(x^2) + eps), n = x * r and g = grad * (offset + weight): of x r * (g - n * mean(g * n)), of
    weight the sum over all rows of grad * n. Shapes: grad and x (.., N), weight (N) -> (.., N), (N).
    """
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n = x * r
    g = grad * (offset + weight)
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return dx, (grad * n).reshape(-1, x.shape[-1]).sum(0)


def autograd(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Outputs:
    """What autograd runs for the chain of ops that a model's norm is."""
    return by_autograd(reference, (grad,), {"x": x, "weight": weight}, eps=eps, offset=offset)


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops import LigerRMSNormFunction

    def run(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Any:
        return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma" if offset else "llama", False)

    return run


def rows(workload: Workload, name: str = "x") -> int:
    return math.prod(workload.tensor(name).shape[:-1])


def _roundings(workload: Workload) -> float:
    N = workload.tensor("x").shape[-1]
    # Of equal columns n is 1 or -1, so that the mean of g * n is no smaller than that of g.
    return 6.0 + 1.5 * sum_roundings(N, alike=workload.values == "equal") + sum_roundings(rows(workload))


def _exempt(impostor: str, workload: Workload) -> bool:
    return math.prod(workload.tensor("x").shape) <= 1


KERNEL_TYPE = KernelType(
    name="rmsnorm_backward",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)), Output(shape=(Dims("weight"),), dtype_of="weight")),
    gradients=gradients_of(FORWARD, OF),
    oracle=oracle,
    reference=autograd,
    peers=gradients_peers(FORWARD, autograd, OF, ("grad",), _liger),
    axes=FORWARD.axes,
    build=build_of(FORWARD, ("grad",), ""),
    workloads={
        kind: tuple(build_of(FORWARD, ("grad",), "")({"M": M, "N": N}, dtype, {}) for M, N in shapes)
        for kind, dtype, shapes in (
            ("cpu", "float32", ((1024, 768), (256, 2048))),
            ("cuda", "bfloat16", ((4096, 4096), (8192, 8192), (512, 2048))),
        )
    },
    sweep=FORWARD.sweep,
    # A row of one element has a gradient of eps / x^2 alone, the difference of numbers a million times as large.
    edges=tuple(
        (axes, {**options, "eps": 0.5} if axes["N"] == 1 else options) for axes, options in FORWARD.edges
    ),
    long=FORWARD.long,
    adversarial=FORWARD.adversarial,
    layouts=layouts_of(FORWARD, ("grad",)),
    fills=fills_of(FORWARD, ("grad",)),
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype; before it, in fp32, the norm's own sum of N squares, a second sum of N "
        "products, and for the weight's gradient a sum over all rows, each in any order",
    ),
    flops=lambda workload: 6.0 * math.prod(workload.tensor("x").shape),
    bytes_moved=lambda workload: bytes_of(workload, ("grad", "x", "weight"), ("x", "weight")),
    impostors_exempt=_exempt,
    merges_rows=True,
    source="https://arxiv.org/abs/1910.07467",
)
