"""Gradients of the rotary position embedding of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autokernel_hf.kernels import rotary_embedding
from autokernel_hf.kernels._backward import (
    build_of,
    by_autograd,
    bytes_of,
    fills_of,
    gradients_of,
    gradients_peers,
    layouts_of,
)
from autokernel_hf.kernels.base import Dims, KernelType, Output, Outputs, Schema, Tolerance, tells_no_digits
from autokernel_hf.kernels.rotary_embedding import reference
from autokernel_hf.records import Workload

FORWARD = rotary_embedding.KERNEL_TYPE
OF = ("q", "k")  # the tables are positions, which no model trains
GRADS = ("grad_q", "grad_k")
SCHEMA = Schema.parse(
    "rotary_embedding_backward(Tensor grad_q, Tensor grad_k, Tensor q, Tensor k, Tensor cos, Tensor sin, "
    "bool interleaved=False) -> (Tensor, Tensor)"
)


def oracle(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Outputs:
    """The pairs turned back: of a grad_a * cos_a + grad_b * sin_b, of b grad_b * cos_b - grad_a * sin_a; the rest is copied.

    Of q and k only the shape matters. Shapes: grad_q and q (B, Hq, S, D), grad_k and k (B, Hk, S, D), cos and sin
    (1|B, S, R) -> (B, Hq, S, D), (B, Hk, S, D).
    """
    R = cos.shape[-1]
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    c, s = cos[:, None], sin[:, None]
    outputs = []
    for grad in (grad_q, grad_k):
        out = grad.clone()
        a, b = grad[..., first], grad[..., second]
        out[..., first] = a * c[..., first] + b * s[..., second]
        out[..., second] = b * c[..., second] - a * s[..., first]
        outputs.append(out)
    return tuple(outputs)


def autograd(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Outputs:
    """What autograd runs for the expression of transformers' modeling files."""
    return by_autograd(
        reference, (grad_q, grad_k), {"q": q, "k": k}, cos=cos, sin=sin, interleaved=interleaved
    )


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops import LigerRopeFunction

    # Its forward works in place, which a leaf of autograd does not allow; the product makes another tensor of it.
    return lambda q, k, cos, sin, interleaved: LigerRopeFunction.apply(q * 1.0, k * 1.0, cos, sin)


def _liger_does(workload: Workload) -> bool:
    whole = workload.tensor("cos").shape[-1] == workload.tensor("q").shape[-1]
    return whole and not workload.arg("interleaved")


def _exempt(impostor: str, workload: Workload) -> bool:
    elements = sum(math.prod(workload.tensor(name).shape) for name in OF)
    return (
        workload.tensor("cos").shape[-1] == 0
        or 0 in workload.tensor("q").shape
        or tells_no_digits(impostor, workload, elements)
    )


KERNEL_TYPE = KernelType(
    name="rotary_embedding_backward",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("q"),)), Output(shape=(Dims("k"),))),
    gradients=gradients_of(FORWARD, OF, dict(zip(OF, GRADS, strict=True))),
    oracle=oracle,
    reference=autograd,
    peers=gradients_peers(FORWARD, autograd, OF, GRADS, _liger, _liger_does),
    axes=FORWARD.axes,
    build=build_of(FORWARD, GRADS, ""),
    workloads={
        kind: tuple(
            build_of(FORWARD, GRADS, "")(dict(zip(FORWARD.axes, sizes, strict=True)), dtype, {})
            for sizes in shapes
        )
        for kind, dtype, shapes in (
            ("cpu", "float32", ((1, 12, 4, 1024, 64), (1, 32, 8, 256, 64))),
            ("cuda", "bfloat16", ((1, 32, 8, 2048, 128), (8, 32, 8, 4096, 128))),
        )
    },
    sweep=FORWARD.sweep,
    edges=FORWARD.edges,
    adversarial=("uniform", "wide", "one_hot"),  # regimes of gradients: the values of q and k do not matter
    layouts=layouts_of(FORWARD, GRADS),
    fills=fills_of(FORWARD, GRADS),
    tolerance=Tolerance(
        k=2.0,
        ulps=2.0,
        why="two products and one sum, in fp32 or in the dtype as torch does it, and one rounding to the dtype; where the "
        "two products cancel, the roundings are those of the products, which have the size of the whole",
    ),
    flops=lambda workload: 3.0 * sum(math.prod(workload.tensor(name).shape) for name in OF),
    bytes_moved=lambda workload: bytes_of(workload, (*GRADS, "cos", "sin"), OF),
    impostors_exempt=_exempt,
    source="https://arxiv.org/abs/2104.09864",
)
