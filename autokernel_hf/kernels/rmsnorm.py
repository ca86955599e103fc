"""Root-mean-square normalization over the last dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels._forms import form, forward_form
from autokernel_hf.kernels._peers import compile_peers, eager_peer, fused_peer, liger_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.base import (
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Schema,
    Tolerance,
    fill_parameter,
    growth_in_fp32,
    sum_roundings,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse("rmsnorm(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor")


def oracle(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Outputs:
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight). Shapes: x (.., N), weight (N) -> (.., N)."""
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight),)


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Outputs:
    """The chain of ops that transformers runs: as LlamaRMSNorm where offset is 0, else as GemmaRMSNorm."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset == 0.0:
        return ((weight * normed.to(x.dtype)).to(x.dtype),)
    return ((normed * (offset + weight.float())).to(x.dtype),)


def _fused(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), (weight + offset if offset else weight).to(x.dtype), eps)


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops import LigerRMSNormFunction

    def run(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Any:
        return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma" if offset else "llama", False)

    return run


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x of shape (M, N), (B, M, N) with an axis B, (N,) without M; the option weight is its dtype (default x's)."""
    shape = tuple(axes[axis] for axis in ("B", "M", "N") if axis in axes)
    scalars: dict[str, Scalar] = {"eps": 1e-6, "weight": dtype, **options}
    parameter = str(scalars.pop("weight"))
    tensors = {
        "x": TensorSpec(shape=shape, dtype=dtype),
        "weight": TensorSpec(shape=shape[-1:], dtype=parameter),
    }
    label = "x".join(map(str, shape)) + ("" if parameter == dtype else f"/weight={parameter}")
    return workload_from(SCHEMA, label, tensors, scalars)


def _roundings(workload: Workload) -> float:
    return 3.0 + sum_roundings(workload.tensor("x").shape[-1], alike=workload.values == "equal") / 2


def _flops(workload: Workload) -> float:
    return 4.0 * math.prod(workload.tensor("x").shape)


def _exempt(impostor: str, workload: Workload) -> bool:
    return math.prod(workload.tensor("x").shape) <= 1  # no element, or one: it equals its mean


# The same norm is defined anew in some 180 modeling files, and other norms under the same names: a site is told by what
# its forward computes. Variants of one layer differ in where they round, not in what they round.
_LLAMA = tuple(
    form(f"""
        def forward(self, x):
            wide = x.to(torch.float32)
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return {result}
    """)
    for result in (
        "self.weight * normed.to(x.dtype)",
        "(self.weight * normed).to(x.dtype)",  # OLMo 2
        "(self.weight.to(torch.float32) * normed).to(x.dtype)",  # Nemotron-H
    )
)
_WITH_EPS = tuple(
    form(f"""
        def forward(self, x):
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return {result}
    """)
    for result in (
        "normed.type_as(x) * self.weight",  # Llama 4
        "(normed * self.weight.float()).type_as(x)",  # Moshi
    )
)
_GEMMA = (
    form("""
        def forward(self, x):
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return (normed * (1.0 + self.weight.float())).type_as(x)
    """),
)


# T5 and nine families that copy it. The output has the weight's dtype, whatever the input's is.
_T5 = (
    form("""
        def forward(self, x):
            variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
            normed = x * torch.rsqrt(variance + self.variance_epsilon)
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                normed = normed.to(self.weight.dtype)
            return self.weight * normed
    """),
)


def _computes(forms: tuple[str, ...], module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and forward_form(type(module)) in forms


def _is_torch_norm(module: nn.Module) -> bool:
    return (
        type(module) is nn.RMSNorm
        and len(module.normalized_shape) == 1
        and module.weight is not None
        and module.eps is not None
    )


def _sites(layer: str, matches: Callable[[nn.Module], bool]) -> Callable[[nn.Module], Iterable[Site]]:
    return lambda model: module_sites(model, "rmsnorm", layer, matches)


KERNEL_TYPE = KernelType(
    name="rmsnorm",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)),),
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),
        fused_peer("F.rms_norm", _fused),
        *compile_peers(reference),
        liger_peer(_liger),
    ),
    axes=("M", "N"),
    build=build,
    workloads={
        "cpu": (build({"M": 1024, "N": 768}, "float32", {}), build({"M": 256, "N": 2048}, "float32", {})),
        "cuda": tuple(
            build({"M": M, "N": N}, "bfloat16", {}) for M, N in ((4096, 4096), (8192, 8192), (512, 2048))
        ),
    },
    sweep=(
        ({"M": 32, "N": 128}, {}),
        ({"M": 64, "N": 768}, {"eps": 1e-5}),
        ({"M": 16, "N": 2048}, {"offset": 1.0}),
        ({"B": 2, "M": 2, "N": 8192}, {}),
        ({"M": 16, "N": 1024}, {"weight": "float32"}),
        ({"M": 256, "N": 64}, {"weight": "float32", "offset": 1.0}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {}),
        ({"M": 1, "N": 1}, {}),
        ({"N": 13}, {}),
        ({"M": 3, "N": 7}, {}),
        ({"M": 17, "N": 1023}, {}),
        ({"M": 5, "N": 1025}, {"offset": 1.0}),
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
        "offset": ("x", "weight"),
    },
    fills={"weight": fill_parameter},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding to the output's dtype (torch makes two of them); before it, in fp32, a sum of N squares in any "
        "order, whose error the root halves, a quotient and the products with x and weight",
    ),
    flops=_flops,
    impostors_exempt=_exempt,
    layers=(
        Layer(name="RMSNorm", hook="RMSNorm", find=_sites("RMSNorm", lambda m: _computes(_LLAMA, m))),
        Layer(
            name="TorchRMSNorm",
            hook="TorchRMSNorm",
            find=_sites("TorchRMSNorm", lambda m: _is_torch_norm(m) or _computes(_WITH_EPS, m)),
        ),
        Layer(
            name="GemmaRMSNorm",
            hook="GemmaRMSNorm",
            find=_sites("GemmaRMSNorm", lambda m: _computes(_GEMMA, m)),
        ),
        Layer(
            name="T5LayerNorm", hook="T5LayerNorm", find=_sites("T5LayerNorm", lambda m: _computes(_T5, m))
        ),
    ),
    cut=lambda workload: ("x",) if len(workload.tensor("x").shape) > 1 else (),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    merges_rows=True,
    source="https://arxiv.org/abs/1910.07467",
)
