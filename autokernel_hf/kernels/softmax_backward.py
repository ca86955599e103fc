"""Gradient of softmax along any dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.kernels import softmax
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
    tells_no_digits,
)
from autokernel_hf.kernels.softmax import reference
from autokernel_hf.records import Workload

FORWARD = softmax.KERNEL_TYPE
OF = ("x",)
SCHEMA = Schema.parse("softmax_backward(Tensor grad, Tensor x, int dim=-1) -> Tensor")


def oracle(grad: Tensor, x: Tensor, dim: int = -1) -> Outputs:
    """With y = softmax(x): y * (grad - sum(grad * y)). Shapes: grad and x (..) -> (..)."""
    y = torch.softmax(x, dim)
    return (y * (grad - (grad * y).sum(dim, keepdim=True)),)


def autograd(grad: Tensor, x: Tensor, dim: int = -1) -> Outputs:
    """What autograd runs for torch.softmax."""
    return by_autograd(reference, (grad,), {"x": x}, dim=dim)


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops import LigerSoftmaxFunction

    return lambda x, dim=-1: LigerSoftmaxFunction.apply(x)


def _length(workload: Workload) -> int:
    dim = workload.arg("dim")
    assert isinstance(dim, int)
    return workload.tensor("x").shape[dim]


def _roundings(workload: Workload) -> float:
    """Those of softmax, and of a sum of as many products as it has columns."""
    reach = 8.0 if workload.values in ("large", "wide", "large_offset") else 4.0
    alike = workload.values in ("equal", "tiny", "denormal")
    N = _length(workload)
    return 8.0 + reach + sum_roundings(N, alike=alike) + sum_roundings(N)


def _exempt(impostor: str, workload: Workload) -> bool:
    # Of one column the gradient is 0; columns far apart leave one that counts, and of that 0.
    x = workload.tensor("x")
    if math.prod(x.shape) <= 1 or _length(workload) == 1:
        return True
    return tells_no_digits(impostor, workload, math.prod(x.shape))


KERNEL_TYPE = KernelType(
    name="softmax_backward",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)),),
    gradients=gradients_of(FORWARD, OF),
    oracle=oracle,
    reference=autograd,
    peers=gradients_peers(
        FORWARD,
        autograd,
        OF,
        ("grad",),
        _liger,
        lambda workload: workload.arg("dim") in (-1, len(workload.tensor("x").shape) - 1),
    ),
    axes=FORWARD.axes,
    build=build_of(FORWARD, ("grad",), ""),
    workloads={
        kind: tuple(build_of(FORWARD, ("grad",), "")({"M": M, "N": N}, dtype, {}) for M, N in shapes)
        for kind, dtype, shapes in (
            ("cpu", "float32", ((4096, 1024), (1024, 768))),
            ("cuda", "bfloat16", ((4096, 4096), (8192, 8192), (32768, 1024))),
        )
    },
    sweep=FORWARD.sweep,
    edges=FORWARD.edges,
    long=FORWARD.long,
    # Where one column is nearly all of a row, its gradient is the difference of two numbers that are nearly the same, and
    # those of the others are as small: no error is relative to that.
    adversarial=tuple(v for v in FORWARD.adversarial if v not in ("one_hot", "large")),
    # Of a gradient that is the same along the dimension nothing is left.
    layouts={**layouts_of(FORWARD, ("grad",)), "expanded": ("x",)},
    fills=fills_of(FORWARD, ("grad",)),
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype; before it, in fp32, a softmax (the rounding of x - max, which exp magnifies "
        "by its size, a sum of N terms in any order and a quotient), a second sum of N products, a difference and a product",
    ),
    flops=lambda workload: 5.0 * math.prod(workload.tensor("x").shape),
    bytes_moved=lambda workload: bytes_of(workload, ("grad", "x"), ("x",)),
    impostors_exempt=_exempt,
    cut=lambda workload: ("grad", *FORWARD.cut(workload)) if FORWARD.cut(workload) else (),
    source="https://arxiv.org/abs/1805.02867",
)
