"""Softmax over one dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
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
    fill_values,
    growth_in_fp32,
    sum_roundings,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse("softmax(Tensor x, int dim=-1) -> Tensor")


def oracle(x: Tensor, dim: int = -1) -> Outputs:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) along `dim`; a row of -inf gives NaN. Shapes: x (..) -> (..)."""
    return (torch.softmax(x, dim),)


def reference(x: Tensor, dim: int = -1) -> Outputs:
    """The operator that torch.nn.Softmax runs."""
    return (torch.softmax(x, dim),)


def _liger_function() -> Callable[..., Any]:
    from liger_kernel.ops import LigerSoftmaxFunction

    return lambda x, dim=-1: LigerSoftmaxFunction.apply(x)


def _liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    if workload.arg("dim") not in (-1, len(workload.tensor("x").shape) - 1):
        return None
    return liger_peer(_liger_function).make(workload, device)


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x of shape (M, N), (B, M, N) with an axis B, (N,) without M."""
    shape = tuple(axes[axis] for axis in ("B", "M", "N") if axis in axes)
    scalars = {"dim": -1, **options}
    label = "x".join(map(str, shape)) + ("" if scalars["dim"] == -1 else f"/dim={scalars['dim']}")
    return workload_from(SCHEMA, label, {"x": TensorSpec(shape=shape, dtype=dtype)}, scalars)


def _length(workload: Workload) -> int:
    dim = workload.arg("dim")
    assert isinstance(dim, int)
    return workload.tensor("x").shape[dim]


def _fill(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """As attention scores have them: the regime "nonfinite" masks with -inf, here a part of a row, there all of it."""
    if workload.values != "nonfinite":
        return fill_values(spec, workload.values, generator)
    dim = workload.arg("dim")
    assert isinstance(dim, int)
    x = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    rows = x.movedim(dim, -1).reshape(-1, spec.shape[dim])
    rows[torch.rand(rows.shape, generator=generator) < 0.3] = -math.inf
    rows[1::7] = -math.inf
    rows[2::7, 0] = math.nan
    rows[3::7, -1] = math.inf
    others = [n for i, n in enumerate(spec.shape) if i != dim % len(spec.shape)]
    return rows.reshape(*others, spec.shape[dim]).movedim(-1, dim)


def _roundings(workload: Workload) -> float:
    # The largest |x - max(x)| of each regime: exp turns an absolute error of its argument into a relative one.
    reach = {"large": 8.0, "wide": 8.0, "large_offset": 8.0, "one_hot": 8.0}.get(workload.values, 4.0)
    alike = workload.values in ("equal", "tiny", "denormal")  # every exponential is 1, or nearly
    return 4.0 + reach + sum_roundings(_length(workload), alike=alike)


def _flops(workload: Workload) -> float:
    return 4.0 * math.prod(workload.tensor("x").shape)


def _exempt(impostor: str, workload: Workload) -> bool:
    x, dim = workload.tensor("x"), workload.arg("dim")
    assert isinstance(dim, int)
    if math.prod(x.shape) <= 1:
        return True
    # One column gives ones, equal (or as good as equal) columns give 1/n: their mean is the answer, today and yesterday.
    equal = x.shape[dim] == 1 or (x.strides is not None and x.strides[dim] == 0)
    equal = equal or workload.values in ("equal", "tiny", "denormal")
    if (
        impostor == "narrow"
    ):  # 1/n may have few digits, and so have 1 and 0, which is what far-apart columns give
        return equal or workload.values in ("one_hot", "large")
    return impostor in ("mean", "previous") and equal


def _find(model: nn.Module) -> Iterable[Site]:
    # Without a dimension torch guesses one from the rank, with a warning.
    return module_sites(
        model, "softmax", "Softmax", lambda module: type(module) is nn.Softmax and module.dim is not None
    )


KERNEL_TYPE = KernelType(
    name="softmax",
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
        "cpu": (build({"M": 4096, "N": 1024}, "float32", {}), build({"M": 1024, "N": 768}, "float32", {})),
        "cuda": tuple(
            build({"M": M, "N": N}, "bfloat16", {})
            for M, N in ((4096, 4096), (8192, 8192), (4096, 50257), (32768, 1024))
        ),
    },
    sweep=(
        ({"M": 64, "N": 128}, {}),
        ({"M": 32, "N": 1024}, {}),
        ({"B": 4, "M": 16, "N": 256}, {}),
        ({"B": 2, "M": 64, "N": 96}, {"dim": 1}),
        ({"M": 4, "N": 8192}, {}),
        ({"M": 512, "N": 32}, {"dim": 0}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {}),
        ({"M": 5, "N": 0}, {}),
        ({"M": 0, "N": 5}, {"dim": 0}),
        ({"M": 1, "N": 1}, {}),
        ({"M": 33, "N": 1}, {}),
        ({"N": 13}, {}),
        ({"M": 3, "N": 7}, {"dim": 0}),
        ({"M": 17, "N": 1023}, {}),
        ({"M": 5, "N": 1025}, {}),
        ({"B": 3, "M": 129, "N": 5}, {"dim": 1}),
        ({"M": 2, "N": 4099}, {}),
        ({"M": 2, "N": 50257}, {}),
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
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype; before it, in fp32, the rounding of x - max, which exp magnifies by "
        "its size, an exponential (2 ulp), a sum of N terms in any order and a quotient",
    ),
    flops=_flops,
    layers=(Layer(name="Softmax", hook="Softmax", find=_find),),
    cut=lambda workload: (
        ("x",) if int(str(workload.arg("dim"))) % max(len(workload.tensor("x").shape), 1) else ()
    ),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    impostors_exempt=_exempt,
    source="https://arxiv.org/abs/1805.02867",
)
