"""Root-mean-square normalization over the last dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels.base import (
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Schema,
    Tolerance,
    compile_peer,
    eager_peer,
    fill_parameter,
    fused_peer,
    growth_in_fp32,
    liger_peer,
    module_sites,
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
    return 3.0 + math.log2(workload.tensor("x").shape[-1] + 2) / 2


def _flops(workload: Workload) -> float:
    return 4.0 * math.prod(workload.tensor("x").shape)


def _exempt(impostor: str, workload: Workload) -> bool:
    return math.prod(workload.tensor("x").shape) <= 1  # no element, or one: it equals its mean


def _is_llama_norm(module: nn.Module) -> bool:
    # Told by its code's names, not by its class: some 130 modeling files define this norm anew.
    return (
        type(module).__name__.endswith("RMSNorm")
        and hasattr(module, "variance_epsilon")
        and isinstance(getattr(module, "weight", None), nn.Parameter)
    )


def _is_torch_norm(module: nn.Module) -> bool:
    return (
        type(module) is nn.RMSNorm
        and len(module.normalized_shape) == 1
        and module.weight is not None
        and module.eps is not None
    )


def _is_gemma_norm(module: nn.Module) -> bool:
    return type(module).__name__ in {"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"} and hasattr(
        module, "eps"
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
        compile_peer(reference),
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
        why="one rounding to the output's dtype (torch makes two of them); before it, in fp32, the mean of N squares, "
        "halved by the root, a quotient and the products with x and weight",
    ),
    flops=_flops,
    impostors_exempt=_exempt,
    layers=(
        Layer(name="RMSNorm", hook="RMSNorm", find=_sites("RMSNorm", _is_llama_norm)),
        Layer(name="TorchRMSNorm", hook="TorchRMSNorm", find=_sites("TorchRMSNorm", _is_torch_norm)),
        Layer(name="GemmaRMSNorm", hook="GemmaRMSNorm", find=_sites("GemmaRMSNorm", _is_gemma_norm)),
    ),
    merges_rows=True,
    source="https://arxiv.org/abs/1910.07467",
)
