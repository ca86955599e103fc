"""Gradient of elementwise activations."""

from __future__ import annotations

import math

from torch import Tensor

from autokernel_hf.kernels import activation
from autokernel_hf.kernels._backward import (
    build_of,
    by_autograd,
    bytes_of,
    fills_of,
    gradients_of,
    gradients_peers,
    layouts_of,
)
from autokernel_hf.kernels.activation import reference
from autokernel_hf.kernels.base import (
    ACTIVATIONS,
    Dims,
    KernelType,
    Output,
    Outputs,
    Schema,
    Tolerance,
    growth_in_fp32,
    tells_no_digits,
)
from autokernel_hf.kernels.gated_activation_backward import slope_exactly
from autokernel_hf.records import Workload

FORWARD = activation.KERNEL_TYPE
OF = ("x",)
SCHEMA = Schema.parse("activation_backward(Tensor grad, Tensor x, str kind) -> Tensor")


def oracle(grad: Tensor, x: Tensor, kind: str) -> Outputs:
    """grad * act'(x). Shapes: grad and x (..) -> (..)."""
    return (grad * slope_exactly(x, kind),)


def autograd(grad: Tensor, x: Tensor, kind: str) -> Outputs:
    """What autograd runs for the ops of transformers' activation modules."""
    return by_autograd(reference, (grad,), {"x": x}, kind=kind)


def _exempt(impostor: str, workload: Workload) -> bool:
    elements = math.prod(workload.tensor("x").shape)
    if impostor == "input" and workload.arg("kind") == "none":  # whose slope is 1
        return True
    return elements <= 1 or tells_no_digits(impostor, workload, elements)


KERNEL_TYPE = KernelType(
    name="activation_backward",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)),),
    codes={"kind": ACTIVATIONS},
    gradients=gradients_of(FORWARD, OF),
    oracle=oracle,
    reference=autograd,
    peers=gradients_peers(FORWARD, autograd, OF, ("grad",)),
    axes=FORWARD.axes,
    build=build_of(FORWARD, ("grad",), ""),
    workloads={
        kind: tuple(
            build_of(FORWARD, ("grad",), "")({"M": M, "N": N}, dtype, {"kind": act}) for M, N, act in shapes
        )
        for kind, dtype, shapes in (
            ("cpu", "float32", ((1024, 3072, "gelu_new"), (1024, 3072, "gelu"), (1024, 3072, "silu"))),
            ("cuda", "bfloat16", ((4096, 11008, "silu"), (16384, 8192, "gelu_tanh"), (4096, 3072, "gelu"))),
        )
    },
    sweep=FORWARD.sweep,
    edges=FORWARD.edges,
    # What a derivative is at an infinity, torch's own ops do not agree about.
    adversarial=tuple(v for v in FORWARD.adversarial if v not in ("nonfinite", "denormal")),
    layouts=layouts_of(FORWARD, ("grad",)),
    fills=fills_of(FORWARD, ("grad",)),
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(lambda workload: 10.0),
        why="one rounding to the output's dtype (torch makes several); before it, in fp32, an exponential (2 ulp), a "
        "quotient, and a sum and five products of numbers no larger than the slope's largest",
    ),
    flops=lambda workload: 3.0 * math.prod(workload.tensor("x").shape),
    bytes_moved=lambda workload: bytes_of(workload, ("grad", "x"), ("x",)),
    impostors_exempt=_exempt,
    cut=lambda workload: ("grad", "x") if len(workload.tensor("x").shape) > 1 else (),
    merges_rows=True,
    source="https://arxiv.org/abs/1606.08415",
)
