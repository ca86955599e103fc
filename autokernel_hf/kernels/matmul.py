"""Matrix product with everything that a linear layer puts after it: scales, bias, activation, residual."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autokernel_hf.kernels._peers import compile_peers, eager_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.base import (
    ACTIVATIONS,
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Peer,
    Schema,
    Tolerance,
    activate,
    fill_parameter,
    fill_values,
    growth_in_fp32,
    input_bytes,
    itemsize,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse(
    'matmul(Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, str activation="none", '
    "Tensor? scale_a=None, Tensor? scale_b=None) -> Tensor"
)

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


def oracle(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Outputs:
    """y = act(scale_a * scale_b * (a @ b) + bias) + residual.

    Shapes: a (M, K) or (B, M, K), b (K, N) or (B, K, N), bias (N), residual (.., M, N), scales () -> (.., M, N).
    """
    out = a @ b
    for scale in (scale_a, scale_b):
        if scale is not None:
            out = out * scale
    if bias is not None:
        out = out + bias
    out = activate(out, activation)
    return (out if residual is None else out + residual,)


def reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Outputs:
    """As nn.Linear and Conv1D run it: one addmm where the bias fits, then the activation, then the addition.

    float8 operands are widened to bfloat16, which holds each of their values, as a model without a float8 product does.
    """
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    dtype = a.dtype
    if bias is not None and bias.dtype == dtype and a.dim() == 2 and scale_a is None and scale_b is None:
        out = torch.addmm(bias, a, b)
    else:
        out = a @ b
        if scale_a is not None:
            out = (out * scale_a).to(dtype)
        if scale_b is not None:
            out = (out * scale_b).to(dtype)
        if bias is not None:
            out = (out + bias).to(dtype)
    out = activate(out, activation)
    return (out if residual is None else (out + residual).to(dtype),)


def _scaled_mm(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    """torch's float8 product, where the shapes and the layout let it run: K-major operands, sizes divisible by 16."""
    a, b = workload.tensor("a"), workload.tensor("b")
    if device.type != "cuda" or workload.dtype != "float8_e4m3fn" or len(a.shape) != 2:
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    k_major = a.strides is None and b.strides is not None and b.strides[0] == 1
    if not k_major or any(n % 16 for n in (*a.shape, *b.shape)) or 0 in a.shape:
        return None

    def run(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str,
        scale_a: Tensor,
        scale_b: Tensor,
    ) -> Tensor:
        narrow = None if bias is None else bias.to(torch.bfloat16)
        out: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, bias=narrow, out_dtype=torch.bfloat16)
        out = activate(out, activation)
        return out if residual is None else out + residual

    return run


def _addmm_activation(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    """cuBLASLt's product with the bias and the activation in its epilogue."""
    kind = workload.arg("activation")
    plain = all(workload.arg(name) is None for name in ("residual", "scale_a", "scale_b"))
    if device.type != "cuda" or kind not in ("relu", "gelu_tanh", "gelu_new") or not plain:
        return None
    bias = workload.arg("bias")
    if (
        not isinstance(bias, TensorSpec)
        or bias.dtype != workload.dtype
        or len(workload.tensor("a").shape) != 2
    ):
        return None

    def run(a: Tensor, b: Tensor, bias: Tensor, **others: Any) -> Tensor:
        out: Tensor = torch._addmm_activation(bias, a, b, use_gelu=kind != "relu")
        return out

    return run


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """A product (M, K) @ (K, N), or B of them where the axes name B.

    Options beside the scalars: `nt` (b is the transpose of a contiguous (N, K), as a linear layer's weight),
    `with_bias`, `with_residual`, `with_scales`. float8 always has scales, and b K-major unless `nt` says otherwise.
    """
    M, N, K = axes["M"], axes["N"], axes["K"]
    lead = (axes["B"],) if "B" in axes else ()
    float8 = dtype == "float8_e4m3fn"
    chosen = dict(options)
    nt = bool(chosen.pop("nt", float8))
    with_bias, with_residual = bool(chosen.pop("with_bias", False)), bool(chosen.pop("with_residual", False))
    with_scales = bool(chosen.pop("with_scales", False)) or float8
    wide = "bfloat16" if float8 else dtype
    scale = TensorSpec(shape=(), dtype="float32")
    batch_strides = (N * K,) * len(lead)
    tensors = {
        "a": TensorSpec(shape=(*lead, M, K), dtype=dtype),
        "b": TensorSpec(
            shape=(*lead, K, N), dtype=dtype, strides=(*batch_strides, 1, max(K, 1)) if nt else None
        ),
        "bias": TensorSpec(shape=(N,), dtype=wide) if with_bias else None,
        "residual": TensorSpec(shape=(*lead, M, N), dtype=wide) if with_residual else None,
        "scale_a": scale if with_scales else None,
        "scale_b": scale if with_scales else None,
    }
    label = "x".join(map(str, (*lead, M, N, K))) + ("-nt" if nt else "")
    return workload_from(SCHEMA, label, tensors, chosen)


def _fill_a(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    x = fill_values(spec, workload.values, generator)
    if spec.dtype == "float8_e4m3fn":  # quantized as models are: the largest value at the end of the range
        largest = float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0
        x = x * (_FLOAT8_MAX / largest) if largest else x
        return x.clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    # relu2 squares, and float16 ends at 65504.
    return x / 8 if workload.arg("activation") == "relu2" else x


def _fill_b(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """Weights: of a size that keeps the product at the size of a, so that no regime of a leaves float16."""
    x = fill_values(spec, workload.values if workload.values == "nonfinite" else "normal", generator)
    if spec.dtype == "float8_e4m3fn":  # weights are quantized at their own scale
        return x.clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    return x / math.sqrt(max(spec.shape[-2], 1))


def _fill_normal(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    return torch.randn(spec.shape, generator=generator, dtype=torch.float64)


def _inner(workload: Workload) -> int:
    return workload.tensor("a").shape[-1]


def _out_elements(workload: Workload) -> int:
    return math.prod(workload.tensor("a").shape[:-1]) * workload.tensor("b").shape[-1]


def _bytes_moved(workload: Workload) -> float:
    size = 2 if workload.dtype == "float8_e4m3fn" else itemsize(workload.dtype)
    return input_bytes(workload) + _out_elements(workload) * size


def _impostors_exempt(impostor: str, workload: Workload) -> bool:
    """One number: chance may give it. Nothing to add up: the output is 0, unless a bias or a residual is added."""
    added = workload.arg("bias") is not None or workload.arg("residual") is not None
    if impostor != "zeros" and _out_elements(workload) == 1:
        return True
    return _out_elements(workload) == 0 or (_inner(workload) == 0 and not added)


def _is_linear(module: nn.Module) -> bool:
    # Exactly this class: torch's own subclasses are read by other code, not called.
    return type(module) is nn.Linear


def _is_conv1d(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _sites(layer: str, matches: Callable[[nn.Module], bool]) -> Callable[[nn.Module], Iterable[Site]]:
    return lambda model: module_sites(model, "matmul", layer, matches)


KERNEL_TYPE = KernelType(
    name="matmul",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("a", 0, -1), Dims("b", -1))),),
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),
        Peer(name="addmm_activation", make=_addmm_activation),
        Peer(name="scaled_mm", make=_scaled_mm),
        *compile_peers(reference),
    ),
    axes=("M", "N", "K"),
    build=build,
    workloads={
        "cpu": (
            build({"M": 256, "N": 768, "K": 768}, "float32", {"nt": True, "with_bias": True}),
            build({"M": 512, "N": 512, "K": 512}, "float32", {}),
        ),
        "cuda": (
            *(
                build({"M": M, "N": N, "K": K}, "float16", {})
                for M, N, K in ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (512, 8192, 2048))
            ),
            build({"M": 16, "N": 8192, "K": 2048}, "float16", {"nt": True}),
        ),
    },
    sweep=(
        ({"M": 64, "N": 64, "K": 64}, {}),
        ({"M": 128, "N": 96, "K": 256}, {"nt": True, "with_bias": True}),
        (
            {"M": 48, "N": 80, "K": 112},
            {"nt": True, "with_bias": True, "with_residual": True, "activation": "gelu"},
        ),
        ({"M": 32, "N": 160, "K": 96}, {"with_bias": True, "activation": "gelu_new"}),
        ({"M": 16, "N": 64, "K": 128}, {"nt": True, "activation": "silu", "with_scales": True}),
        ({"M": 16, "N": 64, "K": 64}, {"with_residual": True, "activation": "quick_gelu"}),
        ({"M": 16, "N": 48, "K": 64}, {"with_bias": True, "activation": "relu"}),
        ({"M": 16, "N": 48, "K": 64}, {"with_bias": True, "activation": "relu2"}),
        ({"M": 16, "N": 48, "K": 64}, {"with_bias": True, "activation": "gelu_tanh", "nt": True}),
        ({"B": 3, "M": 48, "N": 64, "K": 80}, {}),
        ({"B": 2, "M": 32, "N": 32, "K": 64}, {"nt": True, "with_bias": True, "with_residual": True}),
    ),
    edges=(
        ({"M": 0, "N": 16, "K": 16}, {}),
        ({"M": 16, "N": 0, "K": 16}, {}),
        ({"M": 5, "N": 7, "K": 0}, {"with_bias": True}),
        ({"M": 1, "N": 1, "K": 1}, {}),
        ({"M": 1, "N": 257, "K": 129}, {"nt": True, "with_bias": True}),
        ({"M": 17, "N": 31, "K": 63}, {}),
        ({"M": 129, "N": 65, "K": 127}, {"nt": True, "with_residual": True}),
        ({"M": 3, "N": 5, "K": 2049}, {}),
        ({"B": 5, "M": 7, "N": 3, "K": 11}, {"with_bias": True, "activation": "silu"}),
        ({"B": 0, "M": 4, "N": 4, "K": 4}, {}),
    ),
    adversarial=("uniform", "large_offset", "tiny", "large", "wide", "equal", "one_hot", "nonfinite"),
    layouts={
        "sliced": ("a", "b"),
        "padded": ("a", "b", "residual"),
        "transposed": ("a", "b", "residual"),
        "offset": ("a", "b", "bias", "residual"),
        "expanded": ("a",),
    },
    fills={
        "a": _fill_a,
        "b": _fill_b,
        "bias": fill_parameter,
        "residual": _fill_normal,
        "scale_a": fill_parameter,
        "scale_b": fill_parameter,
    },
    codes={"activation": ACTIVATIONS},
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn"),
    tolerance=Tolerance(
        k=2.0,
        ulps=2.0,
        growth=growth_in_fp32(lambda workload: math.sqrt(_inner(workload) + 1)),
        why="one rounding to the output's dtype; K additions in fp32 of terms of either sign wander by about sqrt(K) "
        "roundings of the sum's size, in any order of summation",
    ),
    flops=lambda workload: 2.0 * _out_elements(workload) * _inner(workload),
    bytes_moved=_bytes_moved,
    cut=lambda workload: (
        ("a", "residual") if len(workload.tensor("a").shape) == 2 else ("a", "b", "residual")
    ),
    # An output, then a factor, of more than 2^31 elements.
    huge=(({"M": 65_539, "N": 32_768, "K": 64}, {}), ({"M": 131_075, "N": 64, "K": 16_384}, {})),
    impostors_exempt=_impostors_exempt,
    layers=(
        Layer(name="Linear", hook="Linear", find=_sites("Linear", _is_linear)),
        Layer(name="Conv1D", hook="Conv1D", find=_sites("Conv1D", _is_conv1d)),
    ),
)
