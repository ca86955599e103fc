"""Residual addition followed by a norm over the last dimension, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels import layernorm
from autokernel_hf.kernels._forms import form, forward_form
from autokernel_hf.kernels._peers import compile_peers, eager_peer, liger_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.base import (
    DTYPES,
    NORMS,
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
    itemsize,
    sum_roundings,
    tensor_bytes,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse(
    "add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset=0.0, "
    'str kind="rms") -> (Tensor, Tensor)'
)


def _rms_exactly(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (offset + weight)
    return y if bias is None else y + bias


def _rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    # As rmsnorm's reference, of which every parameter is optional here.
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        y = normed
    elif offset == 0.0:
        y = weight * normed.to(x.dtype)
    else:
        y = normed * (offset + weight.float())
    return (y if bias is None else y + bias).to(x.dtype)


def oracle(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    kind: str = "rms",
) -> Outputs:
    """s = x + residual; (norm(s), s), with the norm's weight applied as offset + weight, its bias added.

    Shapes: x and residual (.., N), weight and bias (N) -> (.., N), (.., N).
    """
    s = x + residual
    if kind == "layer":
        return layernorm.normalize_exactly(s, None if weight is None else offset + weight, bias, eps), s
    return _rms_exactly(s, weight, bias, eps, offset), s


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    kind: str = "rms",
) -> Outputs:
    """The sum, rounded to x's dtype, then LayerNorm's operator (BERT) or the chain of LlamaRMSNorm."""
    s = x + residual
    if kind == "layer":
        shifted = weight if weight is None or offset == 0.0 else weight + offset
        return layernorm.normalize(s, shifted, bias, eps), s
    return _rms(s, weight, bias, eps, offset), s


def _fused_rms(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    if workload.arg("kind") != "rms" or workload.arg("bias") is not None:
        return None

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        offset: float = 0.0,
        kind: str = "rms",
    ) -> Outputs:
        s = x + residual
        shifted = None if weight is None else (weight + offset if offset else weight).to(x.dtype)
        return F.rms_norm(s, (s.shape[-1],), shifted, eps), s

    return run


def _liger_function() -> Callable[..., Any]:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        offset: float = 0.0,
        kind: str = "rms",
    ) -> Any:
        mode = "gemma" if offset else "llama"
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, mode, False)

    return run


def _liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    if workload.arg("kind") != "rms" or workload.arg("weight") is None or workload.arg("bias") is not None:
        return None
    return liger_peer(_liger_function).make(workload, device)


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x and residual of shape (M, N), (B, M, N) with an axis B, (N,) without M.

    The options weight and bias are a dtype, or None for an absent parameter; the default is x's dtype, and no bias
    for the kind "rms".
    """
    shape = tuple(axes[axis] for axis in ("B", "M", "N") if axis in axes)
    scalars: dict[str, Scalar] = {"eps": 1e-6, "offset": 0.0, "kind": "rms", **options}
    spec = TensorSpec(shape=shape, dtype=dtype)
    tensors: dict[str, TensorSpec | None] = {"x": spec, "residual": spec}
    label = f"{'x'.join(map(str, shape))}/{scalars['kind']}"
    for name in ("weight", "bias"):
        usual = None if name == "bias" and scalars["kind"] == "rms" else dtype
        parameter = scalars.pop(name, usual)
        tensors[name] = None if parameter is None else TensorSpec(shape=shape[-1:], dtype=str(parameter))
        if parameter != usual:
            label += f"/{name}={parameter}"
    return workload_from(SCHEMA, label, tensors, scalars)


def _fill_residual(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    if workload.values == "large_offset":
        # Steps that every dtype adds to 100 exactly: else the sum's own rounding is as large as the spread, and
        # nothing can be told from it.
        return torch.round(torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 2).clamp(-8, 8)
    if workload.values == "denormal":
        half = torch.finfo(DTYPES[spec.dtype]).tiny / 2
        return (torch.rand(spec.shape, generator=generator, dtype=torch.float64) * 2 - 1) * half
    return fill_values(spec, workload.values, generator)


def _roundings(workload: Workload) -> float:
    if workload.arg("kind") == "layer":
        return 1.0 + layernorm.roundings(workload)
    return 3.0 + sum_roundings(workload.tensor("x").shape[-1]) / 2


def _flops(workload: Workload) -> float:
    return 5.0 * math.prod(workload.tensor("x").shape)


def _bytes_moved(workload: Workload) -> float:
    x = workload.tensor("x")
    return tensor_bytes(workload) + math.prod(x.shape) * itemsize(x.dtype)


def _exempt(impostor: str, workload: Workload) -> bool:
    # No element, or layer norms of one column: those equal the bias, whatever x is.
    shape = workload.tensor("x").shape
    return math.prod(shape) == 0 or shape[-1] == 1


_BERT_OUTPUT = form("""
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)
""")


def _is_bert_output(module: nn.Module) -> bool:
    return forward_form(type(module)) == _BERT_OUTPUT and layernorm.is_row_layernorm(module.LayerNorm)


def _find(model: nn.Module) -> Iterable[Site]:
    return module_sites(model, "add_norm", "AddLayerNorm", _is_bert_output)


KERNEL_TYPE = KernelType(
    name="add_norm",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)), Output(shape=(Dims("x"),))),
    codes={"kind": NORMS},
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),
        Peer(name="F.rms_norm", make=_fused_rms),
        *compile_peers(reference),
        Peer(name="liger", make=_liger),
    ),
    axes=("M", "N"),
    build=build,
    workloads={
        "cpu": (
            build({"M": 512, "N": 768}, "float32", {"kind": "layer", "eps": 1e-12}),
            build({"M": 1024, "N": 768}, "float32", {}),
        ),
        "cuda": (
            build({"M": 4096, "N": 768}, "float16", {"kind": "layer", "eps": 1e-12}),
            build({"M": 4096, "N": 4096}, "bfloat16", {}),
            build({"M": 8192, "N": 8192}, "bfloat16", {}),
            build({"M": 512, "N": 2048}, "bfloat16", {}),
        ),
    },
    sweep=(
        ({"M": 32, "N": 128}, {}),
        ({"M": 64, "N": 768}, {"kind": "layer", "eps": 1e-12}),
        ({"B": 2, "M": 8, "N": 2048}, {"offset": 1.0}),
        ({"M": 4, "N": 8192}, {"kind": "layer", "weight": None, "bias": None}),
        ({"M": 8, "N": 1024}, {"weight": "float32"}),
        ({"M": 8, "N": 640}, {"kind": "layer", "weight": "float32", "bias": "float32"}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {}),
        ({"M": 1, "N": 1}, {}),
        ({"N": 13}, {}),
        ({"M": 3, "N": 7}, {"kind": "layer", "bias": None}),
        ({"M": 17, "N": 1023}, {"kind": "layer"}),
        ({"M": 5, "N": 1025}, {"offset": 1.0}),
        ({"M": 5, "N": 129}, {"weight": None}),
        ({"B": 2, "M": 3, "N": 257}, {}),
        ({"M": 2, "N": 4099}, {"kind": "layer"}),
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
        "one_hot",
        "nonfinite",
    ),
    layouts={
        "sliced": ("x", "residual", "weight"),
        "padded": ("residual",),
        "transposed": ("x",),
        "expanded": ("residual",),
        "offset": ("x", "residual", "weight", "bias"),
    },
    fills={"residual": _fill_residual, "weight": fill_parameter, "bias": fill_parameter},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(_roundings),
        why="the sum's rounding to x's dtype, which torch makes too, and one rounding to the output's dtype; between "
        "them, in fp32, those of the norm",
    ),
    flops=_flops,
    layers=(Layer(name="AddLayerNorm", hook="AddLayerNorm", find=_find),),
    bytes_moved=_bytes_moved,
    impostors_exempt=_exempt,
    cut=lambda workload: ("x", "residual") if len(workload.tensor("x").shape) > 1 else (),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    merges_rows=True,
    source="https://arxiv.org/abs/1810.04805",
)
