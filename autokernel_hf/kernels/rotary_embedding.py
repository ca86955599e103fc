"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autokernel_hf.kernels._peers import compile_peers, eager_peer
from autokernel_hf.kernels._places import function_sites, layer_class
from autokernel_hf.kernels.base import (
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Peer,
    Schema,
    Tolerance,
    input_bytes,
    itemsize,
    tells_no_digits,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse(
    "rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor, Tensor)"
)


def oracle(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Outputs:
    """Pairs (a, b) of the first R dims become (a * cos_a - b * sin_a, b * cos_b + a * sin_b); the rest is copied.

    Pairs are (i, i + R/2), interleaved (2i, 2i + 1). Shapes: q (B, Hq, S, D), k (B, Hk, S, D), cos and sin (1|B, S, R).
    """
    R = cos.shape[-1]
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    c, s = cos[:, None], sin[:, None]
    outputs = []
    for x in (q, k):
        out = x.clone()
        a, b = x[..., first], x[..., second]
        out[..., first] = a * c[..., first] - b * s[..., first]
        out[..., second] = b * c[..., second] + a * s[..., second]
        outputs.append(out)
    return tuple(outputs)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Outputs:
    """x * cos + rotate(x) * sin, as the modeling files of transformers have it.

    Tables in float32 make the whole expression float32 (some models want that); the outputs have q's dtype again.
    """
    R, D = cos.shape[-1], q.shape[-1]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    outputs = []
    for x in (q, k):
        rotated = x if R == D else x[..., :R]
        if interleaved:
            turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
        else:
            turned = torch.cat((-rotated[..., R // 2 :], rotated[..., : R // 2]), dim=-1)
        out = ((rotated * c) + (turned * s)).to(x.dtype)
        outputs.append(out if R == D else torch.cat((out, x[..., R:]), dim=-1))
    return tuple(outputs)


def _liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    """Liger's kernel, which works in place: timed with the copy that a caller needs who keeps q and k."""
    if device.type != "cuda" or workload.arg("interleaved"):
        return None
    if workload.tensor("cos").shape[-1] != workload.tensor("q").shape[-1]:
        return None
    try:
        from liger_kernel.ops import LigerRopeFunction
    except ImportError:
        return None

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
        return LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)

    return run


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """q and k as a model has them: heads transposed out of (B, S, H, D).

    Options beside the scalars: `rotary_dim` (R, default D), `table_batch` (1 or B, default 1), `table_dtype`.
    """
    B, Hq, Hk, S, D = (axes[name] for name in ("B", "Hq", "Hk", "S", "D"))
    chosen = dict(options)
    R, table_batch = chosen.pop("rotary_dim", D), chosen.pop("table_batch", 1)
    table_dtype = chosen.pop("table_dtype", dtype)
    assert isinstance(R, int) and isinstance(table_batch, int) and isinstance(table_dtype, str)
    table = TensorSpec(shape=(table_batch, S, R), dtype=table_dtype)
    tensors = {
        "q": TensorSpec(shape=(B, Hq, S, D), dtype=dtype, strides=(S * Hq * D, D, Hq * D, 1)),
        "k": TensorSpec(shape=(B, Hk, S, D), dtype=dtype, strides=(S * Hk * D, D, Hk * D, 1)),
        "cos": table,
        "sin": table,
    }
    label = f"{B}x{Hq}-{Hk}x{S}x{D}" + (f"-r{R}" if R != D else "")
    return workload_from(
        SCHEMA, label + ("-interleaved" if chosen.get("interleaved") else ""), tensors, chosen
    )


def _fill_table(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """Real tables (base 10000, positions from 3, so that no row leaves its input as it is), or any numbers.

    A real table repeats its first half, so a kernel may read only that and pass: under the regime `uniform` the
    entries are unrelated, as the definition allows.
    """
    if workload.values == "uniform":
        return torch.rand(spec.shape, generator=generator, dtype=torch.float64) * 2 - 1
    B, S, R = spec.shape
    frequencies = 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    positions = 3 + torch.arange(S, dtype=torch.float64) + 7 * torch.arange(B, dtype=torch.float64)[:, None]
    angles = positions[..., None] * frequencies
    table = angles.cos() if name == "cos" else angles.sin()
    return table.repeat_interleave(2, -1) if workload.arg("interleaved") else torch.cat((table, table), -1)


def _cut(workload: Workload) -> tuple[str, ...]:
    """Each of a batch is a call of its own; tables that all share are whole in each."""
    shared = workload.tensor("cos").shape[0] != workload.tensor("q").shape[0]
    return ("q", "k") if shared else ("q", "k", "cos", "sin")


def _elements(workload: Workload) -> int:
    return sum(math.prod(workload.tensor(name).shape) for name in ("q", "k"))


def _rotated(workload: Workload) -> float:
    D = workload.tensor("q").shape[-1]
    return _elements(workload) * workload.tensor("cos").shape[-1] / D if D else 0.0


# --- which function is which layer ------------------------------------------------------------------------------------


def _probes(vision: bool) -> Iterator[tuple[tuple[Tensor, ...], dict[str, int]]]:
    """Calls that tell the forms apart: table widths, both orders of heads and sequence, dtypes; tables of any numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dtypes = (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    )
    B, Hq, Hk, S, D = 2, 4, 3, 5, 8
    for R in (D, D // 2):
        for dtype, table_dtype in dtypes:
            if vision:
                q, k, cos, sin = draw(S, Hq, D), draw(S, Hk, D), draw(S, R), draw(S, R)
                yield (q.to(dtype), k.to(dtype), cos.to(table_dtype), sin.to(table_dtype)), {}
                continue
            for table_batch in (1, B):
                cos, sin = draw(table_batch, S, R).to(table_dtype), draw(table_batch, S, R).to(table_dtype)
                q, k = draw(B, Hq, S, D).to(dtype), draw(B, Hk, S, D).to(dtype)
                yield (q, k, cos, sin), {}
                yield (q.transpose(1, 2), k.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}
                # Some functions let q be the last of the keys' positions; the operation does not.
                yield (q[:, :, -2:], k, cos, sin), {}


def _same_parameters(function: Callable[..., Any], forward: Callable[..., Any]) -> bool:
    """Whether both take as many arguments, of the same kinds, and may leave out the same ones."""
    theirs, ours = (
        [(p.kind, p.default is p.empty) for p in inspect.signature(f).parameters.values()]
        for f in (function, forward)
    )
    return theirs == ours


def computes(function: Callable[..., Any], layer: str) -> bool:
    """Whether a model's function gives, bit for bit and dtype for dtype, what the layer gives over the reference.

    A probe on which the function fails is no call that a model makes; one that only the layer refuses decides.
    """
    forward = layer_class("rotary_embedding", layer, reference)().forward
    # transformers wraps some of these functions in a module, for kernelize.
    plain = function.forward if isinstance(function, nn.Module) else function
    if not _same_parameters(plain, forward):
        return False
    answered = False
    for args, options in _probes(layer == "RotaryEmbeddingVision"):
        try:
            expected = function(*args, **options)
        except _REFUSALS:
            continue
        try:
            got = forward(*args, **options)
        except _REFUSALS:
            return False
        if not isinstance(expected, tuple) or len(expected) != 2:
            return False
        for e, g in zip(expected, got, strict=True):
            if not isinstance(e, Tensor) or e.dtype != g.dtype or not torch.equal(e, g):
                return False
        answered = True
    return answered


_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def _layer(name: str, hook: str, attribute: str = "apply_rotary_pos_emb") -> Layer:
    def find(model: nn.Module) -> Iterable[Site]:
        for site in function_sites(model, "rotary_embedding", name, attribute):
            if computes(getattr(sys.modules[site.path.split(":")[0]], attribute), name):
                yield site

    return Layer(name=name, hook=hook, find=find)


LAYERS = (
    _layer("RotaryEmbedding", "rotary_pos_emb"),
    _layer("RotaryEmbeddingKeepingDtype", "rotary_pos_emb"),
    _layer("RotaryEmbeddingFloat32", "rotary_pos_emb"),
    _layer("RotaryEmbeddingHalfTables", "rotary_pos_emb"),
    _layer("RotaryEmbeddingInterleaved", "RotaryEmbeddingInterleaved"),
    _layer("RotaryEmbeddingInterleavedHalves", "RotaryEmbeddingInterleavedHalves"),
    _layer("RotaryEmbeddingInterleavedHalvesFloat32", "RotaryEmbeddingInterleavedHalvesFloat32"),
    _layer("RotaryEmbeddingVision", "RotaryEmbeddingVision", "apply_rotary_pos_emb_vision"),
)


KERNEL_TYPE = KernelType(
    name="rotary_embedding",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("q"),)), Output(shape=(Dims("k"),))),
    oracle=oracle,
    reference=reference,
    peers=(eager_peer(reference), *compile_peers(reference), Peer(name="liger", make=_liger)),
    axes=("B", "Hq", "Hk", "S", "D"),
    build=build,
    workloads={
        "cpu": (
            build({"B": 1, "Hq": 12, "Hk": 4, "S": 1024, "D": 64}, "float32", {}),
            build({"B": 1, "Hq": 32, "Hk": 8, "S": 256, "D": 64}, "float32", {}),
        ),
        "cuda": (
            build({"B": 1, "Hq": 32, "Hk": 8, "S": 2048, "D": 128}, "bfloat16", {}),
            build({"B": 8, "Hq": 32, "Hk": 8, "S": 4096, "D": 128}, "bfloat16", {}),
        ),
    },
    sweep=(
        ({"B": 2, "Hq": 4, "Hk": 2, "S": 32, "D": 64}, {}),
        ({"B": 1, "Hq": 3, "Hk": 1, "S": 48, "D": 128}, {"table_dtype": "float32"}),
        ({"B": 2, "Hq": 4, "Hk": 4, "S": 16, "D": 80}, {"rotary_dim": 32, "table_batch": 2}),
        ({"B": 2, "Hq": 4, "Hk": 2, "S": 24, "D": 64}, {"interleaved": True}),
        ({"B": 1, "Hq": 8, "Hk": 8, "S": 16, "D": 256}, {"interleaved": True, "rotary_dim": 64}),
    ),
    edges=(
        ({"B": 0, "Hq": 2, "Hk": 2, "S": 4, "D": 8}, {}),
        ({"B": 1, "Hq": 2, "Hk": 2, "S": 0, "D": 8}, {}),
        ({"B": 1, "Hq": 1, "Hk": 1, "S": 1, "D": 2}, {}),
        ({"B": 1, "Hq": 1, "Hk": 1, "S": 1, "D": 2}, {"interleaved": True}),
        ({"B": 3, "Hq": 5, "Hk": 1, "S": 17, "D": 6}, {"table_batch": 3}),
        ({"B": 1, "Hq": 7, "Hk": 7, "S": 33, "D": 130}, {}),
        ({"B": 2, "Hq": 3, "Hk": 2, "S": 31, "D": 63}, {"rotary_dim": 62}),
        ({"B": 1, "Hq": 3, "Hk": 1, "S": 9, "D": 7}, {"rotary_dim": 2, "interleaved": True}),
        ({"B": 1, "Hq": 2, "Hk": 1, "S": 5, "D": 8}, {"rotary_dim": 0}),
        ({"B": 1, "Hq": 2, "Hk": 0, "S": 5, "D": 8}, {}),
    ),
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
        "sliced": ("q", "k", "cos", "sin"),
        "padded": ("q", "k", "cos"),
        "transposed": ("q", "k"),
        "expanded": ("q", "k"),
        "offset": ("q", "k", "cos", "sin"),
    },
    fills={"cos": _fill_table, "sin": _fill_table},
    tolerance=Tolerance(
        k=2.0,
        ulps=2.0,
        why="two products and one sum, in fp32 or in the dtype as the model does it, and one rounding to the dtype; "
        "where the two products cancel, the roundings are those of the products, which have the size of the whole",
    ),
    cut=_cut,
    huge=(({"B": 1027, "Hq": 16, "Hk": 16, "S": 1024, "D": 128}, {}),),
    flops=lambda workload: 3.0 * _rotated(workload),
    bytes_moved=lambda workload: input_bytes(workload) + _elements(workload) * itemsize(workload.dtype),
    # Nothing is rotated: the right answer is the input.
    impostors_exempt=lambda impostor, workload: (
        workload.tensor("cos").shape[-1] == 0
        or 0 in workload.tensor("q").shape
        or tells_no_digits(impostor, workload, _elements(workload))
    ),
    layers=LAYERS,
    source="https://arxiv.org/abs/2104.09864",
)
