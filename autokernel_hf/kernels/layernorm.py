"""Layer normalization over the last dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels._peers import compile_peers, eager_peer, liger_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.base import (
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Peer,
    Schema,
    Tolerance,
    fill_parameter,
    fill_values,
    growth_in_fp32,
    round_to_bits,
    sum_roundings,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse("layernorm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")


def normalize_exactly(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm of a float64 tensor, for oracles."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm as torch.nn.LayerNorm computes it; parameters of another dtype are used in float32."""
    shape = (x.shape[-1],)
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, shape, weight, bias, eps)
    wide_weight, wide_bias = (None if p is None else p.float() for p in (weight, bias))
    return F.layer_norm(x.float(), shape, wide_weight, wide_bias, eps).to(x.dtype)


def oracle(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Outputs:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. Shapes: x (.., N), weight and bias (N) -> (.., N)."""
    return (normalize_exactly(x, weight, bias, eps),)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Outputs:
    """The operator that torch.nn.LayerNorm runs."""
    return (normalize(x, weight, bias, eps),)


def _liger_function() -> Callable[..., Any]:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias, eps: LigerLayerNormFunction.apply(x, weight, bias, eps)


def _liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    if workload.arg("weight") is None or workload.arg("bias") is None:
        return None
    return liger_peer(_liger_function).make(workload, device)


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x of shape (M, N), (B, M, N) with an axis B, (N,) without M.

    The options weight and bias are a dtype, or None for an absent parameter; the default is x's dtype.
    """
    shape = tuple(axes[axis] for axis in ("B", "M", "N") if axis in axes)
    scalars: dict[str, Scalar] = {"eps": 1e-5, **options}
    tensors: dict[str, TensorSpec | None] = {"x": TensorSpec(shape=shape, dtype=dtype)}
    label = "x".join(map(str, shape))
    for name in ("weight", "bias"):
        parameter = scalars.pop(name, dtype)
        tensors[name] = None if parameter is None else TensorSpec(shape=shape[-1:], dtype=str(parameter))
        if parameter != dtype:
            label += f"/{name}={parameter}"
    return workload_from(SCHEMA, label, tensors, scalars)


def roundings(workload: Workload) -> float:
    """Roundings in fp32 of a two-pass norm: half of those of the sum of squares, and all of the mean's, magnified.

    The deviation from the mean is divided by the deviations' spread: in the regime "large_offset" the values are 100
    spreads away from 0; in "equal" they go up to 4, and the spread is sqrt(eps), but their sum is exact (see `_fill`), so
    that the mean is known to an ulp or two.
    """
    N, eps = workload.tensor("x").shape[-1], workload.arg("eps")
    assert isinstance(eps, float)
    if workload.values == "equal":
        return 2.0 + 10.0 / math.sqrt(max(eps, 1e-12))
    magnified = 100.0 if workload.values == "large_offset" else 1.0
    return 2.0 + sum_roundings(N) / 2 + magnified * (1.0 + sum_roundings(N))


def _fill(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    # Rows of equal elements without a bias give 0, to which no error is relative.
    undefined = workload.values == "equal" and workload.arg("bias") is None
    values = "normal" if undefined else workload.values
    x = fill_values(spec, values, generator)
    if values == "equal":
        # Of eight bits, so that up to 2^16 of them add up without rounding, in any order. Otherwise a norm that divides
        # by sqrt(eps) would magnify the roundings of a long sum until they are as large as the bias.
        x = round_to_bits(x, 8)
    # Standard normal rows are normalized already: without parameters a copy of them would do.
    return x * 1.75 + 0.5 if values == "normal" else x


def _flops(workload: Workload) -> float:
    return 5.0 * math.prod(workload.tensor("x").shape)


def _exempt(impostor: str, workload: Workload) -> bool:
    # At most one element; or rows of equal columns (one, or all): those equal the bias, whatever x is.
    shape = workload.tensor("x").shape
    equal = shape[-1] == 1 or workload.values == "equal"
    if impostor == "narrow":
        # In a long row the one element is some ninety times as large as the rest: where it has 16 bits, its own rounding is
        # larger than what a narrower precision does to any other, unless a weight makes it small.
        return math.prod(shape) <= 1 or (
            workload.values == "one_hot" and workload.dtype != "float32" and workload.arg("weight") is None
        )
    return math.prod(shape) <= 1 or (equal and impostor == "mean")


def is_row_layernorm(module: nn.Module) -> bool:
    """Whether a module is torch's own LayerNorm over the last dimension alone."""
    return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1


def _find(model: nn.Module) -> Iterable[Site]:
    return module_sites(model, "layernorm", "LayerNorm", is_row_layernorm)


KERNEL_TYPE = KernelType(
    name="layernorm",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)),),
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),  # already torch's fused operator
        *compile_peers(reference),
        Peer(name="liger", make=_liger),
    ),
    axes=("M", "N"),
    build=build,
    workloads={
        "cpu": (build({"M": 1024, "N": 768}, "float32", {}), build({"M": 256, "N": 2048}, "float32", {})),
        "cuda": tuple(
            build({"M": M, "N": N}, "bfloat16", {}) for M, N in ((4096, 4096), (8192, 8192), (8192, 768))
        ),
    },
    sweep=(
        ({"M": 32, "N": 128}, {}),
        ({"M": 64, "N": 768}, {}),
        ({"B": 2, "M": 8, "N": 2048}, {"bias": None}),
        ({"M": 4, "N": 8192}, {"weight": None, "bias": None}),
        ({"M": 16, "N": 1024}, {"weight": "float32", "bias": "float32"}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {}),
        ({"M": 1, "N": 1}, {}),
        ({"N": 13}, {}),
        ({"M": 3, "N": 7}, {"weight": None, "bias": None}),
        ({"M": 17, "N": 1023}, {"eps": 1e-12}),
        ({"M": 5, "N": 1025}, {"bias": None}),
        ({"B": 2, "M": 3, "N": 257}, {}),
        ({"M": 2, "N": 4099}, {}),
        ({"M": 2, "N": 20011}, {}),
    ),
    long=(({"M": 3, "N": 131_077}, {}),),  # longer than the shared memory of a multiprocessor
    adversarial=(
        "uniform",
        "large_offset",
        "tiny",
        "denormal",
        "large",
        "wide",
        "equal",
        "one_hot",
        "nonfinite",
    ),
    layouts={
        "sliced": ("x", "weight"),
        "padded": ("x",),
        "transposed": ("x",),
        "expanded": ("x",),
        "offset": ("x", "weight", "bias"),
    },
    fills={"x": _fill, "weight": fill_parameter, "bias": fill_parameter},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(roundings),
        why="one rounding to the output's dtype; before it, in fp32, two sums of N terms in any order, of which the "
        "first, the mean, counts as often as it is large against the spread",
    ),
    flops=_flops,
    layers=(Layer(name="LayerNorm", hook="LayerNorm", find=_find),),
    impostors_exempt=_exempt,
    cut=lambda workload: ("x",) if len(workload.tensor("x").shape) > 1 else (),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    merges_rows=True,
    source="https://arxiv.org/abs/1607.06450",
)
