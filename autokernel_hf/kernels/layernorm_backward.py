"""Gradients of layer normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.kernels import layernorm
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
from autokernel_hf.kernels.layernorm import reference
from autokernel_hf.records import TensorSpec, Workload

FORWARD = layernorm.KERNEL_TYPE
OF = ("x", "weight", "bias")
SCHEMA = Schema.parse(
    "layernorm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"
)


def oracle(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Outputs:
    """With r = 1 / sqrt(var(x) + eps), n = (x - mean(x)) * r and g = grad * weight: of x r * (g - mean(g) - n * mean(g * n)),
    of weight the sum over all rows of grad * n, of bias that of grad; empty for what is absent.
    Shapes: grad and x (.., N), weight and bias (N) -> (.., N), (N), (N).
    """
    centred = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    n = centred * r
    g = grad if weight is None else grad * weight
    dx = r * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    none = grad.new_empty(0)
    dweight = none if weight is None else (grad * n).reshape(-1, x.shape[-1]).sum(0)
    return dx, dweight, none if bias is None else grad.reshape(-1, x.shape[-1]).sum(0)


def autograd(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Outputs:
    """What autograd runs for torch.nn.LayerNorm."""
    return by_autograd(reference, (grad,), {"x": x, "weight": weight, "bias": bias}, eps=eps)


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias, eps: LigerLayerNormFunction.apply(x, weight, bias, eps)


def _liger_does(workload: Workload) -> bool:
    return workload.arg("weight") is not None and workload.arg("bias") is not None


def _roundings(workload: Workload) -> float:
    """Those of the normalized row count twice: in n, and in the mean of g * n."""
    M = math.prod(workload.tensor("x").shape[:-1])
    N = workload.tensor("x").shape[-1]
    return 4.0 + 2.0 * layernorm.roundings(workload) + sum_roundings(N) + sum_roundings(M)


def _fill_x(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """As forward; but where the elements of a row are equal its n is 0, and the first row is an ordinary one.

    With every row alike the weight's gradient would be 0, to which no rounding is relative.
    """
    x = FORWARD.fills[name](name, spec, workload, generator)
    if workload.values == "equal" and x.dim() > 1 and x.numel() > 0:
        first = (0,) * (x.dim() - 1)
        x[first] = torch.randn(x.shape[-1], generator=generator, dtype=x.dtype)
    return x


def _exempt(impostor: str, workload: Workload) -> bool:
    elements = math.prod(workload.tensor("x").shape)
    return elements <= 1 or tells_no_digits(impostor, workload, elements)


KERNEL_TYPE = KernelType(
    name="layernorm_backward",
    schema=SCHEMA,
    outputs=(
        Output(shape=(Dims("x"),)),
        Output(shape=(Dims("weight"),), dtype_of="weight"),
        Output(shape=(Dims("bias"),), dtype_of="bias"),
    ),
    gradients=gradients_of(FORWARD, OF),
    oracle=oracle,
    reference=autograd,
    peers=gradients_peers(FORWARD, autograd, OF, ("grad",), _liger, _liger_does),
    axes=FORWARD.axes,
    build=build_of(FORWARD, ("grad",), ""),
    workloads={
        kind: tuple(build_of(FORWARD, ("grad",), "")({"M": M, "N": N}, dtype, {}) for M, N in shapes)
        for kind, dtype, shapes in (
            ("cpu", "float32", ((1024, 768), (256, 2048))),
            ("cuda", "bfloat16", ((4096, 4096), (8192, 8192), (8192, 768))),
        )
    },
    sweep=FORWARD.sweep,
    # Of a row of one or two elements nothing reaches x: what is left are roundings, of which none is relative to 0.
    edges=tuple(({**axes, "N": 3} if axes["N"] == 1 else axes, options) for axes, options in FORWARD.edges),
    long=FORWARD.long,
    adversarial=FORWARD.adversarial,
    layouts=layouts_of(FORWARD, ("grad",)),
    fills={**fills_of(FORWARD, ("grad",)), "x": _fill_x},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype; before it, in fp32, the norm's own two sums of N terms, of which the mean "
        "counts as often as it is large against the spread, a third sum of N terms, and for the parameters' gradients a sum "
        "over all rows, each in any order",
    ),
    flops=lambda workload: 8.0 * math.prod(workload.tensor("x").shape),
    bytes_moved=lambda workload: bytes_of(workload, ("grad", "x", "weight"), ("x", "weight", "bias")),
    impostors_exempt=_exempt,
    merges_rows=True,
    source="https://arxiv.org/abs/1607.06450",
)
