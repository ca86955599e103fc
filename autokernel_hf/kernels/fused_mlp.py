"""A transformer's feed-forward block as one operation: up (and gate), activation, down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels._forms import form, forward_form
from autokernel_hf.kernels._peers import compile_peers, eager_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.activation import activation_kind
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
    input_bytes,
    itemsize,
    tells_no_digits,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse(
    "fused_mlp(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate=None, Tensor? b_up=None, "
    'Tensor? b_down=None, str activation="silu") -> Tensor'
)


def reference(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "silu",
) -> Outputs:
    """y = (act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)) @ w_down.T + b_down; without a gate act(x @ w_up.T + b_up).

    In float64 it is the oracle. Shapes: x (.., D), w_gate and w_up (H, D), w_down (D, H) -> (.., D).
    """
    up = _linear(x, w_up, b_up)
    h = activate(up, activation) if w_gate is None else activate(_linear(x, w_gate, b_gate), activation) * up
    return (_linear(h, w_down, b_down),)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or bias.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return (F.linear(x, weight) + bias).to(x.dtype)


def _liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    """Liger's SiLU * up kernel between three products."""
    biases = any(workload.arg(name) is not None for name in ("b_gate", "b_up", "b_down"))
    gated = workload.arg("w_gate") is not None and workload.arg("activation") == "silu"
    if device.type != "cuda" or biases or not gated:
        return None
    try:
        from liger_kernel.ops import LigerSiLUMulFunction
    except ImportError:
        return None

    def run(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, **others: Any) -> Tensor:
        h = LigerSiLUMulFunction.apply(F.linear(x, w_gate), F.linear(x, w_up))
        return F.linear(h, w_down)

    return run


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """x (M, D) through H hidden units. Options beside the scalars: `gated` (default true), `with_bias`."""
    M, D, H = axes["M"], axes["D"], axes["H"]
    chosen = dict(options)
    gated, with_bias = bool(chosen.pop("gated", True)), bool(chosen.pop("with_bias", False))
    up, down = TensorSpec(shape=(H, D), dtype=dtype), TensorSpec(shape=(D, H), dtype=dtype)
    hidden, out = TensorSpec(shape=(H,), dtype=dtype), TensorSpec(shape=(D,), dtype=dtype)
    tensors = {
        "x": TensorSpec(shape=(M, D), dtype=dtype),
        "w_gate": up if gated else None,
        "w_up": up,
        "w_down": down,
        "b_gate": hidden if gated and with_bias else None,
        "b_up": hidden if with_bias else None,
        "b_down": out if with_bias else None,
    }
    return workload_from(SCHEMA, f"{M}x{D}x{H}" + ("" if gated else "-plain"), tensors, chosen)


def _fill_x(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """The workload's regime, small enough that a hidden value, a product of two such, stays below float16's 65504."""
    x = fill_values(spec, workload.values, generator)
    return x / 8 if workload.values in ("large_offset", "wide") else x


def _fill_weight(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """Weights of the size that keeps activations at theirs."""
    x = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return x / math.sqrt(max(spec.shape[-1], 1))


def _fill_bias(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    return torch.rand(spec.shape, generator=generator, dtype=torch.float64) + 0.5


def _sizes(workload: Workload) -> tuple[int, int, int]:
    x = workload.tensor("x").shape
    return math.prod(x[:-1]), x[-1], workload.tensor("w_up").shape[0]


def _flops(workload: Workload) -> float:
    M, D, H = _sizes(workload)
    return 2.0 * M * D * H * (2 if workload.arg("w_gate") is None else 3)


def _bytes_moved(workload: Workload) -> float:
    M, D, _ = _sizes(workload)
    return input_bytes(workload) + M * D * itemsize(workload.dtype)


def _roundings(workload: Workload) -> float:
    _, D, H = _sizes(workload)
    return math.sqrt(D + 1) + math.sqrt(H + 1)


def _impostors_exempt(impostor: str, workload: Workload) -> bool:
    """One number: chance may give it. Nothing to add up: the answer is 0, or a bias, whose digits a few may lack."""
    M, D, H = _sizes(workload)
    if impostor != "zeros" and M * D == 1:
        return True
    if H == 0 and tells_no_digits(impostor, workload, M * D):
        return True
    return M * D == 0 or (H == 0 and workload.arg("b_down") is None)


_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")

# The canonical spelling of a forward, for each name by which a block may call its activation.
_GATED = {
    form(f"""
        def forward(self, x):
            return self.down_proj(self.{name}(self.gate_proj(x)) * self.up_proj(x))
    """): name
    for name in _ACTIVATION_NAMES
}
_PACKED = {
    form(f"""
        def forward(self, x):
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(up * self.{name}(gate))
    """): name
    for name in _ACTIVATION_NAMES
}


def _plain_forms(up: str, down: str) -> dict[str, str]:
    return {
        form(f"""
            def forward(self, x):
                return self.{down}(self.{name}(self.{up}(x)))
        """): name
        for name in _ACTIVATION_NAMES
    }


def _layer(name: str, forms: Mapping[str, str], kind: str, projections: tuple[str, ...]) -> Layer:
    """A layer for blocks whose forward has one of the forms, with that activation between plain linear layers."""

    def matches(module: nn.Module) -> bool:
        act = forms.get(forward_form(type(module)) or "")
        if act is None or not all(type(getattr(module, p, None)) is nn.Linear for p in projections):
            return False
        function = getattr(module, act)
        return isinstance(function, nn.Module) and activation_kind(function) == kind

    def find(model: nn.Module) -> Iterable[Site]:
        return module_sites(model, "fused_mlp", name, matches)

    return Layer(name=name, hook=name, find=find)


_SPLIT, _FC = ("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2")
_NEOX = ("dense_h_to_4h", "dense_4h_to_h")

LAYERS = (
    _layer("FusedSwiGLUMLP", _GATED, "silu", _SPLIT),
    _layer("FusedGeGLUMLP", _GATED, "gelu_tanh", _SPLIT),
    _layer("FusedGeGLUErfMLP", _GATED, "gelu", _SPLIT),
    _layer("FusedPackedSwiGLUMLP", _PACKED, "silu", ("gate_up_proj", "down_proj")),
    _layer("FusedGELUMLP", _plain_forms(*_FC), "gelu", _FC),
    _layer("FusedGELUTanhMLP", _plain_forms(*_FC), "gelu_tanh", _FC),
    _layer("FusedNewGELUMLP", _plain_forms(*_FC), "gelu_new", _FC),
    _layer("FusedQuickGELUMLP", _plain_forms(*_FC), "quick_gelu", _FC),
    _layer("FusedNeoXMLP", _plain_forms(*_NEOX), "gelu", _NEOX),
)


KERNEL_TYPE = KernelType(
    name="fused_mlp",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("x"),)),),
    oracle=reference,
    reference=reference,
    peers=(eager_peer(reference), *compile_peers(reference), Peer(name="liger", make=_liger)),
    axes=("M", "D", "H"),
    build=build,
    workloads={
        "cpu": (
            build({"M": 128, "D": 768, "H": 2048}, "float32", {}),
            build({"M": 256, "D": 256, "H": 1024}, "float32", {"gated": False, "activation": "gelu_new"}),
        ),
        "cuda": (
            build({"M": 4096, "D": 4096, "H": 11008}, "bfloat16", {}),
            build({"M": 512, "D": 2048, "H": 8192}, "bfloat16", {}),
        ),
    },
    sweep=(
        ({"M": 32, "D": 64, "H": 128}, {}),
        ({"M": 64, "D": 96, "H": 160}, {"with_bias": True, "activation": "gelu_tanh"}),
        ({"M": 16, "D": 128, "H": 256}, {"gated": False, "with_bias": True, "activation": "gelu"}),
        ({"M": 16, "D": 64, "H": 192}, {"gated": False, "activation": "gelu_new"}),
        ({"M": 16, "D": 64, "H": 64}, {"activation": "quick_gelu"}),
        ({"M": 16, "D": 64, "H": 64}, {"activation": "relu", "with_bias": True}),
        ({"M": 16, "D": 64, "H": 64}, {"gated": False, "activation": "relu2"}),
    ),
    edges=(
        ({"M": 0, "D": 16, "H": 32}, {}),
        ({"M": 1, "D": 1, "H": 1}, {}),
        ({"M": 1, "D": 65, "H": 129}, {}),
        ({"M": 17, "D": 31, "H": 63}, {"with_bias": True}),
        ({"M": 33, "D": 127, "H": 257}, {"gated": False, "activation": "gelu"}),
        ({"M": 3, "D": 7, "H": 0}, {"with_bias": True}),
    ),
    # float16 ends at 65504: regimes that square past it (large) or below its smallest number (tiny) have no answer there.
    adversarial=("uniform", "large_offset", "wide", "equal", "one_hot", "nonfinite"),
    layouts={
        "sliced": ("x", "w_up"),
        "padded": ("x", "w_gate", "w_down"),
        "transposed": ("x", "w_gate", "w_up", "w_down"),
        "expanded": ("x",),
        "offset": ("x", "w_up", "w_down"),
    },
    fills={
        "x": _fill_x,
        "w_gate": _fill_weight,
        "w_up": _fill_weight,
        "w_down": _fill_weight,
        "b_gate": _fill_bias,
        "b_up": _fill_bias,
        "b_down": _fill_bias,
    },
    codes={"activation": ACTIVATIONS},
    tolerance=Tolerance(
        k=2.0,
        ulps=3.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding of the output, and those of the hidden values, which the second product averages; the sums "
        "over D and over H in fp32 wander by about sqrt(D) + sqrt(H) roundings",
    ),
    flops=_flops,
    bytes_moved=_bytes_moved,
    cut=lambda workload: ("x",),
    # Input and output, then the hidden values, of more than 2^31 elements.
    huge=(({"M": 131_075, "D": 16_384, "H": 64}, {}), ({"M": 65_539, "D": 64, "H": 32_768}, {})),
    impostors_exempt=_impostors_exempt,
    layers=LAYERS,
    source="https://arxiv.org/abs/2002.05202",
)
