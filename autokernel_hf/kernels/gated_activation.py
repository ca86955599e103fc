"""The elementwise half of a gated MLP: the activation of one projection times another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels._forms import form, forward_form
from autokernel_hf.kernels._peers import compile_peers, eager_peer, liger_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.activation import (
    activate_exactly,
    activation_kind,
    fill_argument,
    is_degenerate,
)
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
    fill_values,
    growth_in_fp32,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse('gated_activation(Tensor gate, Tensor up, str kind="silu") -> Tensor')


def oracle(gate: Tensor, up: Tensor, kind: str = "silu") -> Outputs:
    """y = act(gate) * up, elementwise. Shapes: gate (..), up (..) -> (..)."""
    return (activate_exactly(gate, kind) * up,)


def reference(gate: Tensor, up: Tensor, kind: str = "silu") -> Outputs:
    """As the gated MLPs of transformers: the activation is rounded to the dtype, then the product."""
    return (activate(gate, kind) * up,)


def _fused_gelu(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    if workload.arg("kind") != "gelu_new":
        return None
    return lambda gate, up, kind="silu": F.gelu(gate, approximate="tanh") * up


def _liger_silu() -> Callable[..., Any]:
    from liger_kernel.ops import LigerSiLUMulFunction

    return lambda gate, up, kind="silu": LigerSiLUMulFunction.apply(gate, up)


def _liger_gelu() -> Callable[..., Any]:
    from liger_kernel.ops import LigerGELUMulFunction

    return lambda gate, up, kind="silu": LigerGELUMulFunction.apply(gate, up)


def _liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    kind = workload.arg("kind")
    if kind == "silu":
        return liger_peer(_liger_silu).make(workload, device)
    if kind in ("gelu_tanh", "gelu_new"):
        return liger_peer(_liger_gelu).make(workload, device)
    return None


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """gate and up of shape (M, N), (B, M, N) with an axis B, (N,) without M."""
    shape = tuple(axes[axis] for axis in ("B", "M", "N") if axis in axes)
    scalars = {"kind": "silu", **options}
    label = f"{'x'.join(map(str, shape))}/{scalars['kind']}"
    spec = TensorSpec(shape=shape, dtype=dtype)
    return workload_from(SCHEMA, label, {"gate": spec, "up": spec}, scalars)


def _fill_up(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    # The product of two large values would leave float16, that of two small ones underflow in every dtype.
    strong = workload.values in ("large", "large_offset", "tiny", "denormal")
    values = "normal" if strong else workload.values
    return fill_values(spec, values, generator)


def _flops(workload: Workload) -> float:
    return 2.0 * math.prod(workload.tensor("gate").shape)


def _exempt(impostor: str, workload: Workload) -> bool:
    return is_degenerate(impostor, workload, "gate")


# How the activation is called in an MLP of three projections, and in one of a packed and a down projection.
_GATED: dict[str, str] = {
    form(f"""
        def forward(self, x):
            return self.down_proj(self.{name}(self.gate_proj(x)) * self.up_proj(x))
    """): name
    for name in ("act_fn", "activation_fn", "act")
}
_PACKED: dict[str, str] = {
    form(f"""
        def forward(self, x):
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(self.{name}(gate) * up)
    """): name
    for name in ("act_fn", "activation_fn", "act")
}


def _sites(layer: str, forms: Mapping[str, str], kind: str) -> Callable[[nn.Module], Iterable[Site]]:
    def matches(module: nn.Module) -> bool:
        name = forms.get(forward_form(type(module)) or "")
        act = None if name is None else getattr(module, name)
        return isinstance(act, nn.Module) and activation_kind(act) == kind

    return lambda model: module_sites(model, "gated_activation", layer, matches)


KERNEL_TYPE = KernelType(
    name="gated_activation",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("gate"),)),),
    codes={"kind": ACTIVATIONS},
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),
        Peer(name="F.gelu", make=_fused_gelu),
        *compile_peers(reference),
        Peer(name="liger", make=_liger),
    ),
    axes=("M", "N"),
    build=build,
    workloads={
        "cpu": (
            build({"M": 1024, "N": 2048}, "float32", {}),
            build({"M": 256, "N": 8192}, "float32", {}),
            build({"M": 512, "N": 2048}, "float32", {"kind": "gelu_tanh"}),
        ),
        "cuda": (
            build({"M": 4096, "N": 11008}, "bfloat16", {}),
            build({"M": 512, "N": 8192}, "bfloat16", {}),
            build({"M": 16384, "N": 8192}, "bfloat16", {}),
            build({"M": 4096, "N": 14336}, "bfloat16", {"kind": "gelu_tanh"}),
        ),
    },
    sweep=(
        ({"M": 32, "N": 2048}, {}),
        ({"M": 16, "N": 3072}, {"kind": "gelu_tanh"}),
        ({"M": 64, "N": 256}, {"kind": "gelu"}),
        ({"B": 2, "M": 8, "N": 1024}, {"kind": "relu"}),
        ({"M": 8, "N": 4096}, {"kind": "quick_gelu"}),
        ({"M": 16, "N": 768}, {"kind": "gelu_new"}),
        ({"M": 16, "N": 512}, {"kind": "relu2"}),
        ({"B": 2, "M": 16, "N": 128}, {"kind": "none"}),
    ),
    edges=(
        ({"M": 0, "N": 64}, {}),
        ({"M": 5, "N": 0}, {"kind": "gelu_tanh"}),
        ({"M": 1, "N": 1}, {}),
        ({"N": 13}, {}),
        ({"M": 3, "N": 7}, {"kind": "gelu"}),
        ({"M": 17, "N": 1023}, {}),
        ({"M": 5, "N": 1025}, {"kind": "gelu_tanh"}),
        ({"B": 2, "M": 3, "N": 4099}, {}),
        ({"M": 127, "N": 31}, {"kind": "relu"}),
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
        "sliced": ("gate", "up"),
        "padded": ("gate", "up"),  # the halves of one packed projection look like this
        "transposed": ("up",),
        "expanded": ("gate",),
        "offset": ("gate", "up"),
    },
    fills={"gate": fill_argument, "up": _fill_up},
    tolerance=Tolerance(
        k=2.0,
        ulps=1.0,
        growth=growth_in_fp32(lambda workload: 5.0),
        why="one rounding to the output's dtype (torch rounds twice); before it, in fp32, an exponential (2 ulp), a "
        "sum, a quotient and two products",
    ),
    flops=_flops,
    layers=tuple(
        Layer(name=name, hook=name, find=_sites(name, forms, kind))
        for name, forms, kind in (
            ("SwiGLUMLP", _GATED, "silu"),
            ("GeGLUMLP", _GATED, "gelu_tanh"),
            ("GeGLUErfMLP", _GATED, "gelu"),
            ("PackedSwiGLUMLP", _PACKED, "silu"),
        )
    ),
    impostors_exempt=_exempt,
    cut=lambda workload: ("gate", "up") if len(workload.tensor("gate").shape) > 1 else (),
    huge=(({"M": 131_075, "N": 16_384}, {}),),
    merges_rows=True,
    source="https://arxiv.org/abs/2002.05202",
)
