"""Gradients of the elementwise half of a gated MLP."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.kernels import gated_activation
from autokernel_hf.kernels._backward import (
    build_of,
    by_autograd,
    bytes_of,
    fill_gradient,
    fills_of,
    gradients_of,
    gradients_peers,
    layouts_of,
)
from autokernel_hf.kernels.activation import activate_exactly
from autokernel_hf.kernels.base import (
    ACTIVATIONS,
    Dims,
    KernelType,
    Output,
    Outputs,
    Schema,
    Tolerance,
    fill_values,
    growth_in_fp32,
    tells_no_digits,
)
from autokernel_hf.kernels.gated_activation import reference
from autokernel_hf.records import TensorSpec, Workload

FORWARD = gated_activation.KERNEL_TYPE
OF = ("gate", "up")
SCHEMA = Schema.parse(
    'gated_activation_backward(Tensor grad, Tensor gate, Tensor up, str kind="silu") -> (Tensor, Tensor)'
)


def slope_exactly(x: Tensor, kind: str) -> Tensor:
    """The derivative of an activation of a float64 tensor, for oracles; 0 at the corner of relu."""
    if kind == "none":
        return torch.ones_like(x)
    if kind == "gelu":  # the normal distribution, and x times its density
        density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return 0.5 * torch.special.erfc(-x / math.sqrt(2.0)) + x * density
    if kind in ("gelu_tanh", "gelu_new"):
        c = 2.0 * math.sqrt(2.0 / math.pi)
        s = torch.sigmoid(c * (x + 0.044715 * x**3))
        t = torch.sigmoid(-c * (x + 0.044715 * x**3))  # 1 - s, with its digits
        return s + x * s * t * c * (1.0 + 3.0 * 0.044715 * x * x)
    if kind in ("silu", "quick_gelu"):
        c = 1.0 if kind == "silu" else 1.702
        s, t = torch.sigmoid(c * x), torch.sigmoid(-c * x)
        return s + c * x * s * t
    return (x > 0).to(x.dtype) if kind == "relu" else 2.0 * torch.relu(x)


def oracle(grad: Tensor, gate: Tensor, up: Tensor, kind: str = "silu") -> Outputs:
    """Of gate grad * up * act'(gate), of up grad * act(gate). Shapes: grad, gate and up (..) -> (..), (..)."""
    return grad * up * slope_exactly(gate, kind), grad * activate_exactly(gate, kind)


def autograd(grad: Tensor, gate: Tensor, up: Tensor, kind: str = "silu") -> Outputs:
    """What autograd runs for act(gate) * up."""
    return by_autograd(reference, (grad,), {"gate": gate, "up": up}, kind=kind)


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    def run(gate: Tensor, up: Tensor, kind: str = "silu") -> Any:
        return (LigerSiLUMulFunction if kind == "silu" else LigerGELUMulFunction).apply(gate, up)

    return run


def _fill(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    # The product of three wide or hot numbers would leave float16.
    strong = workload.values in ("wide", "one_hot")
    if name == "grad":
        return (
            fill_values(spec, "normal", generator)
            if strong
            else fill_gradient(name, spec, workload, generator)
        )
    return FORWARD.fills[name](name, spec, workload, generator)


def _exempt(impostor: str, workload: Workload) -> bool:
    elements = math.prod(workload.tensor("gate").shape)
    return elements <= 1 or tells_no_digits(impostor, workload, elements)


KERNEL_TYPE = KernelType(
    name="gated_activation_backward",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("gate"),)), Output(shape=(Dims("up"),))),
    codes={"kind": ACTIVATIONS},
    gradients=gradients_of(FORWARD, OF),
    oracle=oracle,
    reference=autograd,
    peers=gradients_peers(
        FORWARD,
        autograd,
        OF,
        ("grad",),
        _liger,
        lambda workload: workload.arg("kind") in ("silu", "gelu_tanh", "gelu_new"),
    ),
    axes=FORWARD.axes,
    build=build_of(FORWARD, ("grad",), ""),
    workloads={
        kind: tuple(
            build_of(FORWARD, ("grad",), "")({"M": M, "N": N}, dtype, {"kind": act}) for M, N, act in shapes
        )
        for kind, dtype, shapes in (
            ("cpu", "float32", ((1024, 2048, "silu"), (256, 8192, "silu"), (512, 2048, "gelu_tanh"))),
            ("cuda", "bfloat16", ((4096, 11008, "silu"), (512, 8192, "silu"), (4096, 14336, "gelu_tanh"))),
        )
    },
    sweep=FORWARD.sweep,
    edges=FORWARD.edges,
    # What a derivative is at an infinity, torch's own ops do not agree about.
    adversarial=tuple(v for v in FORWARD.adversarial if v not in ("nonfinite", "denormal")),
    layouts=layouts_of(FORWARD, ("grad",)),
    fills={**fills_of(FORWARD, ()), "grad": _fill},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(lambda workload: 12.0),
        why="one rounding to the output's dtype (torch makes several); before it, in fp32, an exponential (2 ulp), a "
        "quotient, and a sum and six products of numbers no larger than the slope's largest",
    ),
    flops=lambda workload: 4.0 * math.prod(workload.tensor("gate").shape),
    bytes_moved=lambda workload: bytes_of(workload, ("grad", "gate", "up"), ("gate", "up")),
    impostors_exempt=_exempt,
    cut=lambda workload: ("grad", "gate", "up") if len(workload.tensor("gate").shape) > 1 else (),
    merges_rows=True,
    source="https://arxiv.org/abs/2002.05202",
)
