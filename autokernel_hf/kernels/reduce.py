"""Reduction of one dimension: sum, mean, max, min, product."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from autokernel_hf.errors import UsageError
from autokernel_hf.kernels._peers import compile_peers, eager_peer
from autokernel_hf.kernels.base import (
    OPS,
    KernelType,
    Output,
    Outputs,
    Reduced,
    Schema,
    Tolerance,
    fill_values,
    growth_in_fp32,
    input_bytes,
    itemsize,
    sum_roundings,
    tells_no_digits,
    workload_from,
)
from autokernel_hf.records import Scalar, TensorSpec, Workload

SCHEMA = Schema.parse('reduce(Tensor x, int dim=-1, bool keepdim=False, str op="sum") -> Tensor')


def reference(x: Tensor, dim: int = -1, keepdim: bool = False, op: str = "sum") -> Outputs:
    """torch's own reduction; NaN propagates; the maximum or minimum of no element raises IndexError.

    Shapes: x any -> x's without dimension `dim`, or with 1 there where `keepdim`.
    """
    if op == "sum":
        return (torch.sum(x, dim, keepdim),)
    if op == "mean":
        return (torch.mean(x, dim, keepdim),)
    if op == "max":
        return (torch.amax(x, dim, keepdim),)
    if op == "min":
        return (torch.amin(x, dim, keepdim),)
    if op == "prod":
        return (torch.prod(x, dim, keepdim),)
    raise ValueError(f"unknown reduction {op!r}; known: {', '.join(OPS)}")


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x of the axes L, M, N that are named, in this order; none at all is a scalar.

    Raises:
        UsageError: The maximum or minimum of no element, which does not exist.
    """
    shape = tuple(axes[name] for name in ("L", "M", "N") if name in axes)
    label = "x".join(map(str, shape)) or "scalar"
    dim = options.get("dim", -1)
    assert isinstance(dim, int)
    if options.get("op") in ("max", "min") and shape and shape[dim] == 0:
        raise UsageError(
            f"There is no {options['op']} of no element.", remedy="Give dim another size than 0."
        )
    return workload_from(
        SCHEMA,
        f"{label}-{options.get('op', 'sum')}-dim{dim}",
        {"x": TensorSpec(shape=shape, dtype=dtype)},
        dict(options),
    )


def _dim(workload: Workload) -> int:
    dim = workload.arg("dim")
    assert isinstance(dim, int)
    return dim


def _length(workload: Workload) -> int:
    """Elements that make one output."""
    shape = workload.tensor("x").shape
    return shape[_dim(workload)] if shape else 1


def _out_elements(workload: Workload) -> int:
    shape = list(workload.tensor("x").shape)
    if shape:
        del shape[_dim(workload)]
    return math.prod(shape)


def _distinct_outputs(workload: Workload) -> int:
    """Outputs that are not the same number again because the input is expanded."""
    spec = workload.tensor("x")
    if spec.strides is None or _out_elements(workload) == 0:
        return _out_elements(workload)
    kept = list(zip(spec.shape, spec.strides, strict=True))
    del kept[_dim(workload)]
    return math.prod(n for n, stride in kept if stride != 0)


def _alike(workload: Workload) -> bool:
    """Whether the elements that make an output are one number many times: a dimension that is expanded."""
    strides = workload.tensor("x").strides
    return strides is not None and len(strides) > 0 and strides[_dim(workload)] == 0


_LONG = 4096  # of more elements one may be missing within the roundings of the rest, unless it is a large one: the last


def _fill(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """The workload's regime, each output's elements at a size of their own, tamed where the answer would be noise.

    A product is of values near 1 (times a sign); sums that would cancel or vanish are of positive values (a single one,
    for which nothing else tells the size of an error, and tiny ones); in float16 sums stay below the largest number.
    """
    x = fill_values(spec, workload.values, generator)
    op, length = workload.arg("op"), max(_length(workload), 1)
    shape = list(spec.shape)
    if shape:
        shape[_dim(workload)] = 1
    size = torch.exp2(torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2)
    if op == "prod":
        normal = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        near_one = torch.sign(normal) * torch.exp2(normal / math.sqrt(length)) * size ** (1 / length)
        return torch.where(torch.isfinite(x), near_one, x)
    x = x * size
    if op in ("sum", "mean") and length > _LONG and workload.values == "normal" and not _alike(workload):
        last = x.select(_dim(workload), -1)
        last.copy_(torch.sign(last) * size.select(_dim(workload), 0) * math.sqrt(length))
    if op in ("sum", "mean") and (_distinct_outputs(workload) == 1 or workload.values == "tiny"):
        x = torch.where(torch.isfinite(x), x.abs(), x)
    if op == "sum" and spec.dtype == "float16" and x.numel():
        largest = torch.nan_to_num(x, 0.0, 0.0, 0.0).abs().sum(_dim(workload)).max().item()
        x = x * min(1.0, 3e4 / max(largest, 1e-30))
    return x


def _roundings(workload: Workload) -> float:
    length = _length(workload)
    op = workload.arg("op")
    if op in ("max", "min"):
        return 0.0
    if op == "prod":
        return math.sqrt(length + 1)
    return 1.0 + sum_roundings(length, alike=_alike(workload))


def _impostors_exempt(impostor: str, workload: Workload) -> bool:
    """No element or one: the answer is a constant, or the input itself. Outputs all alike: each is their mean.

    One number: chance may give it; a few, or one many times, are too few to tell digits by.
    """
    if _length(workload) <= 1 or _out_elements(workload) == 0:
        return True
    if _out_elements(workload) == 1:
        return impostor != "zeros"
    distinct = _distinct_outputs(workload)
    return (impostor == "mean" and distinct == 1) or tells_no_digits(impostor, workload, distinct)


KERNEL_TYPE = KernelType(
    name="reduce",
    schema=SCHEMA,
    outputs=(Output(shape=(Reduced("x", "dim", "keepdim"),)),),
    oracle=reference,
    reference=reference,
    peers=(eager_peer(reference), *compile_peers(reference)),
    axes=("M", "N"),
    build=build,
    workloads={
        "cpu": (
            build({"M": 1024, "N": 768}, "float32", {}),
            build({"M": 1024, "N": 768}, "float32", {"dim": 0, "op": "mean"}),
            build({"M": 64, "N": 16384}, "float32", {"op": "max"}),
        ),
        "cuda": tuple(
            build({"M": M, "N": N}, "bfloat16", {}) for M, N in ((4096, 4096), (8192, 8192), (64, 1048576))
        ),
    },
    sweep=(
        ({"M": 128, "N": 128}, {}),
        ({"M": 64, "N": 768}, {"op": "mean"}),
        ({"M": 64, "N": 256}, {"op": "max", "keepdim": True}),
        ({"M": 128, "N": 96}, {"op": "sum", "dim": 0}),
        ({"M": 64, "N": 192}, {"op": "prod"}),
        ({"L": 4, "M": 32, "N": 48}, {"op": "min", "dim": 1}),
        ({"L": 4, "M": 16, "N": 24}, {"op": "mean", "dim": -2, "keepdim": True}),
        ({"M": 64, "N": 8192}, {"op": "sum"}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {}),
        ({"M": 5, "N": 0}, {"op": "sum"}),
        ({"M": 5, "N": 0}, {"op": "mean"}),
        ({"M": 0, "N": 5}, {"op": "prod", "dim": 0, "keepdim": True}),
        ({"M": 0, "N": 5}, {"op": "max"}),
        ({}, {"op": "sum"}),
        ({}, {"op": "max", "keepdim": True}),
        ({"M": 1, "N": 1}, {"op": "mean"}),
        ({"N": 1023}, {"op": "sum"}),
        ({"N": 16383}, {"op": "sum"}),
        ({"N": 65537}, {"op": "mean"}),
        ({"M": 3, "N": 7}, {"op": "min"}),
        ({"M": 67, "N": 1031}, {"op": "sum"}),
        ({"M": 17, "N": 1025}, {"op": "max"}),
        ({"M": 4, "N": 16384}, {"op": "sum"}),
        ({"M": 257, "N": 3}, {"op": "prod", "dim": 0}),
        ({"M": 4099, "N": 3}, {"op": "max", "dim": 0}),
        ({"L": 3, "M": 5, "N": 129}, {"op": "sum", "dim": 0}),
        ({"M": 2, "N": 4099}, {"op": "sum"}),
    ),
    adversarial=("uniform", "large_offset", "tiny", "denormal", "large", "wide", "one_hot", "nonfinite"),
    layouts={
        "sliced": ("x",),
        "padded": ("x",),
        "transposed": ("x",),
        "expanded": ("x",),
        "offset": ("x",),
    },
    fills={"x": _fill},
    codes={"op": OPS},
    tolerance=Tolerance(
        k=2.0,
        ulps=2.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype; a sum of N terms in fp32 wanders by about sqrt(N) roundings in the worst "
        "order, or N/4 where all terms are the same; a product wanders by sqrt(N) roundings; a maximum has none",
    ),
    flops=lambda workload: float(math.prod(workload.tensor("x").shape)),
    bytes_moved=lambda workload: input_bytes(workload) + _out_elements(workload) * itemsize(workload.dtype),
    cut=lambda workload: ("x",) if _dim(workload) % max(len(workload.tensor("x").shape), 1) else (),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    impostors_exempt=_impostors_exempt,
)
