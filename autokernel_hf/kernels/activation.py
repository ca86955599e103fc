"""Elementwise activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autokernel_hf.kernels.base import (
    ACTIVATIONS,
    Dims,
    KernelType,
    Output,
    Outputs,
    Peer,
    Schema,
    Tolerance,
    compile_peer,
    eager_peer,
    fill_values,
    growth_in_fp32,
    workload_from,
)
from autokernel_hf.records import Scalar, TensorSpec, Workload

SCHEMA = Schema.parse("activation(Tensor x, str kind) -> Tensor")

_EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x.clone(),
    # erfc and the logistic function keep their digits where 1 + erf and 1 + tanh cancel.
    "gelu": lambda x: 0.5 * x * torch.special.erfc(-x / math.sqrt(2.0)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: torch.relu(x),
    "relu2": lambda x: torch.relu(x).square(),
}
_EXACT["gelu_new"] = _EXACT["gelu_tanh"]

# The ops of transformers' activation modules, in their order: the results are bitwise theirs.
_EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x.clone(memory_format=torch.contiguous_format),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: F.silu(x),
    "relu": lambda x: F.relu(x),
    "relu2": lambda x: torch.square(F.relu(x)),
}


def activate_exactly(x: Tensor, kind: str) -> Tensor:
    """The activation of a float64 tensor, for oracles. NaN where torch gives NaN (x = -inf of the smooth kinds)."""
    return _EXACT[kind](x)


def activate(x: Tensor, kind: str) -> Tensor:
    """The activation as transformers' module of that kind computes it, in x's dtype."""
    return _EAGER[kind](x)


def oracle(x: Tensor, kind: str) -> Outputs:
    """y = act(x), elementwise. Shapes: x (..) -> (..)."""
    return (activate_exactly(x, kind),)


def reference(x: Tensor, kind: str) -> Outputs:
    """The ops of transformers' activation modules."""
    return (activate(x, kind),)


def _fused_gelu(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    # The other kinds' own expression is the fused operator already, or has none.
    if workload.arg("kind") != "gelu_new":
        return None
    return lambda x, kind: F.gelu(x, approximate="tanh")


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x of shape (M, N), (B, M, N) with an axis B, (N,) without M."""
    shape = tuple(axes[axis] for axis in ("B", "M", "N") if axis in axes)
    scalars = {"kind": "silu", **options}
    label = f"{'x'.join(map(str, shape))}/{scalars['kind']}"
    return workload_from(SCHEMA, label, {"x": TensorSpec(shape=shape, dtype=dtype)}, scalars)


def _fill(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    x = fill_values(spec, workload.values, generator)
    # The square of a "large" value leaves float16: there the right answer is inf, and every wrong one as good.
    return x / 10 if workload.values == "large" and workload.arg("kind") == "relu2" else x


def _flops(workload: Workload) -> float:
    return 1.0 * math.prod(workload.tensor("x").shape)


def _exempt(impostor: str, workload: Workload) -> bool:
    elements = math.prod(workload.tensor("x").shape)
    if elements <= 1:  # none at all, or one that equals its mean and that relu may turn to 0
        return True
    return workload.arg("kind") == "none" and impostor == "input"


KERNEL_TYPE = KernelType(
    name="activation",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)),),
    codes={"kind": ACTIVATIONS},
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),
        Peer(name="F.gelu", make=_fused_gelu),
        compile_peer(reference),
    ),
    axes=("M", "N"),
    build=build,
    workloads={
        "cpu": tuple(
            build({"M": 1024, "N": 3072}, "float32", {"kind": kind}) for kind in ("gelu_new", "gelu", "silu")
        ),
        "cuda": (
            build({"M": 1024, "N": 3072}, "float16", {"kind": "gelu_new"}),
            build({"M": 4096, "N": 3072}, "float16", {"kind": "gelu"}),
            build({"M": 4096, "N": 11008}, "bfloat16", {"kind": "silu"}),
            build({"M": 16384, "N": 8192}, "bfloat16", {"kind": "gelu_tanh"}),
        ),
    },
    sweep=(
        ({"M": 64, "N": 3072}, {"kind": "gelu_new"}),
        ({"M": 32, "N": 1024}, {"kind": "gelu"}),
        ({"M": 128, "N": 256}, {"kind": "gelu_tanh"}),
        ({"B": 2, "M": 16, "N": 768}, {"kind": "quick_gelu"}),
        ({"M": 16, "N": 2048}, {"kind": "silu"}),
        ({"M": 8, "N": 4096}, {"kind": "relu"}),
        ({"B": 4, "M": 8, "N": 512}, {"kind": "relu2"}),
        ({"M": 32, "N": 512}, {"kind": "none"}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {"kind": "silu"}),
        ({"M": 5, "N": 0}, {"kind": "gelu"}),
        ({"M": 1, "N": 1}, {"kind": "gelu_new"}),
        ({"N": 13}, {"kind": "gelu_new"}),
        ({"M": 3, "N": 7}, {"kind": "relu2"}),
        ({"M": 17, "N": 1023}, {"kind": "gelu_tanh"}),
        ({"M": 5, "N": 1025}, {"kind": "quick_gelu"}),
        ({"B": 2, "M": 3, "N": 4099}, {"kind": "gelu"}),
        ({"M": 127, "N": 31}, {"kind": "relu"}),
    ),
    adversarial=("uniform", "tiny", "denormal", "large", "wide", "equal", "one_hot", "nonfinite"),
    layouts={
        "sliced": ("x",),
        "padded": ("x",),
        "transposed": ("x",),
        "expanded": ("x",),
        "offset": ("x",),
    },
    fills={"x": _fill},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(lambda workload: 4.0),
        why="one rounding to the output's dtype; before it, in fp32, an exponential (2 ulp), a sum, a quotient and a "
        "product, of which the sum and the quotient may lose a bit more",
    ),
    flops=_flops,
    impostors_exempt=_exempt,
    merges_rows=True,
    source="https://arxiv.org/abs/1606.08415",
)
