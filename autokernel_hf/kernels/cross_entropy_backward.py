"""Gradient of the cross entropy of logits and class indices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autokernel_hf.kernels import cross_entropy
from autokernel_hf.kernels._backward import (
    build_of,
    by_autograd,
    bytes_of,
    fill_gradient,
    gradients_of,
    gradients_peers,
    layouts_of,
)
from autokernel_hf.kernels.base import (
    REDUCTIONS,
    Dims,
    KernelType,
    Output,
    Outputs,
    Schema,
    Tolerance,
    fill_parameter,
    fill_values,
    growth_in_fp32,
    sum_roundings,
    tells_no_digits,
)
from autokernel_hf.kernels.cross_entropy import reference
from autokernel_hf.records import TensorSpec, Workload

FORWARD = cross_entropy.KERNEL_TYPE
OF = ("logits",)
SCHEMA = Schema.parse(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, int ignore_index=-100, "
    'float label_smoothing=0.0, str reduction="mean") -> Tensor'
)


def oracle(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Outputs:
    """grad_n * (p_n[v] - (1 - s) * [v = target_n] - s / V), 0 in a row whose target is ignored; of a mean, grad_n is grad over
    the number of rows that are not. Shapes: grad (N) or (), logits (N, V), target (N) -> (N, V).
    """
    N, V = logits.shape
    counts = target != ignore_index
    p = torch.softmax(logits, -1)
    if label_smoothing:
        p = p - label_smoothing / V
    if N and V:
        hit = torch.zeros_like(p).scatter_(1, torch.where(counts, target, 0)[:, None], 1.0 - label_smoothing)
        p = p - hit
    scale = (grad / counts.sum() if reduction == "mean" else grad).expand(N)
    return (torch.where(counts[:, None], scale[:, None] * p, 0.0),)


def autograd(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Outputs:
    """What autograd runs for the loss of transformers' language models."""
    return by_autograd(
        reference,
        (grad,),
        {"logits": logits},
        target=target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _fill(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """The gradient of one number is far from 0: it multiplies all others. Logits are as far apart as a trained model's.

    Where logits are not finite, no row is ignored: of one that is, torch's gradient is 0 * NaN.
    """
    if name == "grad":
        fill = fill_gradient if spec.shape else fill_parameter
        return fill(name, spec, workload, generator)
    if name == "logits":
        return fill_values(spec, workload.values, generator) * (4.0 if workload.values == "normal" else 1.0)
    target = FORWARD.fills[name](name, spec, workload, generator)
    if workload.values == "nonfinite":
        ignore_index, V = workload.arg("ignore_index"), workload.tensor("logits").shape[1]
        other = 1 if ignore_index == 0 else 0
        return torch.where(target == ignore_index, other % max(V, 1), target)
    return target


def _roundings(workload: Workload) -> float:
    # As a softmax's, and the rounding of a p near 1, against the mean size of all the others.
    V = workload.tensor("logits").shape[1]
    alike = workload.values in ("equal", "tiny", "denormal")
    return 14.0 + sum_roundings(V, alike=alike) + math.sqrt(V)


def _exempt(impostor: str, workload: Workload) -> bool:
    # No rows; one class, whose logit does not matter. Where probabilities are 0, 1 or all the same, they have no digits.
    N, V = workload.tensor("logits").shape
    alike = workload.values in ("equal", "tiny", "denormal", "one_hot", "large", "nonfinite")
    if impostor == "narrow" and alike and workload.dtype != "float32":
        return True
    return N == 0 or V <= 1 or tells_no_digits(impostor, workload, N * V)


KERNEL_TYPE = KernelType(
    name="cross_entropy_backward",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("logits"),), dtype_of="logits"),),
    codes={"reduction": REDUCTIONS},
    leading="logits",
    gradients=gradients_of(FORWARD, OF),
    oracle=oracle,
    reference=autograd,
    # Liger computes the gradient in its forward pass, in the place of the logits: there is no backward pass to time.
    peers=gradients_peers(FORWARD, autograd, OF, ("grad",)),
    axes=FORWARD.axes,
    build=build_of(FORWARD, ("grad",), "logits"),
    workloads={
        kind: tuple(build_of(FORWARD, ("grad",), "logits")({"N": N, "V": V}, dtype, {}) for N, V in shapes)
        for kind, dtype, shapes in (
            ("cpu", "float32", ((256, 8192), (64, 50257))),
            ("cuda", "bfloat16", ((4096, 32000), (8192, 50257), (4096, 128256))),
        )
    },
    sweep=FORWARD.sweep,
    # Where one row is all, and its target as good as certain, all gradients are differences of numbers near 1.
    edges=(
        *((axes, options) for axes, options in FORWARD.edges if axes["N"] != 1),
        ({"N": 9, "V": 2}, {}),
        ({"N": 1, "V": 64}, {"label_smoothing": 0.1}),
    ),
    adversarial=FORWARD.adversarial,
    layouts=layouts_of(FORWARD, ("grad",)),
    fills=dict.fromkeys(("grad", "logits", "target"), _fill),
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype; before it, in fp32, a softmax (the rounding of x - max, which exp magnifies "
        "by its size, a sum of V terms in any order and a quotient), and a difference from 1 whose rounding counts as often "
        "as 1 is large against the mean size of a row, sqrt(V)",
    ),
    flops=lambda workload: 4.0 * math.prod(workload.tensor("logits").shape),
    bytes_moved=lambda workload: bytes_of(workload, ("grad", "logits", "target"), ("logits",)),
    cut=lambda workload: ("grad", "logits", "target") if workload.arg("reduction") == "none" else (),
    impostors_exempt=_exempt,
)
