"""Elementwise activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels._forms import form, forward_form
from autokernel_hf.kernels._peers import compile_peers, eager_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.base import (
    ACTIVATIONS,
    DTYPES,
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Peer,
    Schema,
    Tolerance,
    activate,
    fill_values,
    growth_in_fp32,
    tells_no_digits,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

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


def activate_exactly(x: Tensor, kind: str) -> Tensor:
    """The activation of a float64 tensor, for oracles. NaN where torch gives NaN (x = -inf of the smooth kinds)."""
    return _EXACT[kind](x)


def oracle(x: Tensor, kind: str) -> Outputs:
    """y = act(x), elementwise. Shapes: x (..) -> (..)."""
    return (activate_exactly(x, kind),)


def reference(x: Tensor, kind: str) -> Outputs:
    """The ops of transformers' activation modules."""
    return (x.clone(memory_format=torch.contiguous_format) if kind == "none" else activate(x, kind),)


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


def fill_argument(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """The regime's values; for "relu2" its range is that of the square, which else leaves 16-bit dtypes."""
    x = fill_values(spec, workload.values, generator)
    if workload.arg("kind") != "relu2":
        return x
    if workload.values == "denormal":
        return x / math.sqrt(torch.finfo(DTYPES[spec.dtype]).tiny)
    return x * {"large": 0.1, "tiny": 1e3, "large_offset": 0.1}.get(workload.values, 1.0)


def _flops(workload: Workload) -> float:
    return 1.0 * math.prod(workload.tensor("x").shape)


def is_degenerate(impostor: str, workload: Workload, name: str) -> bool:
    """Whether an impostor is as good as right on an elementwise workload, of which `name` is the activation's input."""
    spec = workload.tensor(name)
    strides = spec.strides or (1,) * len(spec.shape)
    distinct = math.prod(n for n, stride in zip(spec.shape, strides, strict=True) if stride or not n)
    if distinct <= 1:
        return True  # no element, or one: it equals its mean, and relu may turn it to 0
    if workload.values == "denormal":
        return True  # torch may flush them to 0 (its bfloat16 GELU does), so anything as small is within its error
    if workload.values == "equal":
        return impostor == "mean" or tells_no_digits(impostor, workload, distinct // spec.shape[-1])
    # The hot one of each row has four digits in all, and the others are within its error.
    hot = workload.values == "one_hot" and workload.dtype != "float32" and impostor == "narrow"
    return hot or tells_no_digits(impostor, workload, distinct)


def _exempt(impostor: str, workload: Workload) -> bool:
    copies = workload.arg("kind") == "none" and impostor == "input"
    return copies or is_degenerate(impostor, workload, "x")


# What an activation's own forward computes, and the layer that computes it. A module that chooses its function when it
# is built is told by what it chose, below.
_LAYER_OF_FORM: dict[str, str] = {
    form(f"def forward(self, x):\n    return {expression}"): layer
    for expression, layer in (
        (
            "0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))",
            "NewGELU",
        ),
        (
            "0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))",
            "FastGELU",
        ),
        ("x * torch.sigmoid(1.702 * x)", "QuickGELU"),
        ("torch.nn.functional.silu(x)", "SiLU"),
        ("torch.square(torch.nn.functional.relu(x))", "ReLUSquared"),
    )
}
_CHOSEN = form("def forward(self, x):\n    return self.act(x)")

_KINDS: dict[str, str] = {
    "NewGELU": "gelu_new",
    "FastGELU": "gelu_new",  # the same function to ten digits; this kind's chain of ops is the nearest to its own
    "GeLU": "gelu",
    "GeluTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "SiLU": "silu",
    "ReLU": "relu",
    "ReLUSquared": "relu2",
}


def activation_layer(module: nn.Module) -> str | None:
    """The layer that a module can be replaced by, or None.

    A module that works in place is none: the caller may read the changed input.
    """
    cls = type(module)
    if cls in (nn.ReLU, nn.SiLU):
        return None if module.inplace else cls.__name__
    if cls is nn.GELU:
        return "GeluTanh" if module.approximate == "tanh" else "GeLU"
    spelling = forward_form(cls)
    if spelling == _CHOSEN:
        return _chosen_layer(module.act)
    return None if spelling is None else _LAYER_OF_FORM.get(spelling)


def _chosen_layer(function: object) -> str | None:
    # transformers' GELUActivation and GELUTanh hold a function; their spelled-out variants are other ops than any kind's.
    if function is F.gelu:
        return "GeLU"
    if isinstance(function, partial) and function.func is F.gelu and not function.args:
        return "GeluTanh" if function.keywords == {"approximate": "tanh"} else None
    return None


def activation_kind(module: nn.Module) -> str | None:
    """The kind that a module computes, or None where it computes none of them, or in place."""
    layer = activation_layer(module)
    return None if layer is None else _KINDS[layer]


def _sites(layer: str) -> Callable[[nn.Module], Iterable[Site]]:
    return lambda model: module_sites(
        model, "activation", layer, lambda module: activation_layer(module) == layer
    )


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
        *compile_peers(reference),
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
        ({"M": 3, "N": 7}, {"kind": "silu"}),
        ({"M": 17, "N": 1023}, {"kind": "gelu_tanh"}),
        ({"M": 5, "N": 1025}, {"kind": "quick_gelu"}),
        ({"B": 2, "M": 3, "N": 4099}, {"kind": "gelu"}),
        ({"M": 127, "N": 31}, {"kind": "relu2"}),
    ),
    adversarial=("uniform", "tiny", "denormal", "large", "wide", "equal", "one_hot", "nonfinite"),
    layouts={
        "sliced": ("x",),
        "padded": ("x",),
        "transposed": ("x",),
        "expanded": ("x",),
        "offset": ("x",),
    },
    fills={"x": fill_argument},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(lambda workload: 4.0),
        why="one rounding to the output's dtype; before it, in fp32, an exponential (2 ulp), a sum, a quotient and a "
        "product, of which the sum and the quotient may lose a bit more",
    ),
    flops=_flops,
    layers=tuple(Layer(name=name, hook=name, find=_sites(name)) for name in _KINDS),
    impostors_exempt=_exempt,
    cut=lambda workload: ("x",) if len(workload.tensor("x").shape) > 1 else (),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    merges_rows=True,
    source="https://arxiv.org/abs/1606.08415",
)
