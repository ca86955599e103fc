"""Scaled dot product attention: grouped heads, masks, causal, windowed, packed sequences."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autokernel_hf.kernels._peers import compile_peers, eager_peer
from autokernel_hf.kernels.base import (
    Dims,
    KernelType,
    Layer,
    Output,
    Outputs,
    Peer,
    Schema,
    Tolerance,
    growth_in_fp32,
    input_bytes,
    itemsize,
    sum_roundings,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, int max_seqlen_q=0, int max_seqlen_k=0, float? scale=None, bool causal=False, "
    "int window=-1) -> Tensor"
)


def _visible(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, causal: bool, window: int
) -> Tensor | None:
    """Which key each query sees, (Sq, Sk) bool, by packing, causality and window; None: all of them.

    With i and j counted from the start of their own sequence, and the ends of both sequences aligned:
    causal asks j <= i + Sk - Sq, a window w asks j > i + Sk - Sq - w.
    """
    Sq, Sk = q.shape[2], k.shape[2]
    i = torch.arange(Sq, device=q.device)[:, None]
    j = torch.arange(Sk, device=q.device)[None, :]
    visible = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        of_q = torch.searchsorted(cu_seqlens_q, i[:, 0].to(cu_seqlens_q.dtype), right=True) - 1
        of_k = torch.searchsorted(cu_seqlens_k, j[0].to(cu_seqlens_k.dtype), right=True) - 1
        visible = of_q[:, None] == of_k[None, :]
        last = cu_seqlens_q.numel() - 2
        # The distance of a token from the end of its sequence, negated: ends align.
        i = i - cu_seqlens_q[of_q.clamp(0, last) + 1][:, None]
        j = j - cu_seqlens_k[of_k.clamp(0, last) + 1][None, :]
    else:
        i = i + (Sk - Sq)
    if causal:
        visible = j <= i if visible is None else visible & (j <= i)
    if window > 0:
        visible = j > i - window if visible is None else visible & (j > i - window)
    return visible


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
) -> Outputs:
    """softmax(scale * q @ k.T + mask) @ v over the keys that a query sees; 0 for a query that sees none.

    Shapes: q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv) -> (B, Hq, Sq, Dv). One head at a time: the scores of
    all would not fit in memory.
    """
    B, Hq, Sq, D = q.shape
    Hk, Sk, Dv = v.shape[1:]
    scale = D**-0.5 if scale is None else scale
    visible = _visible(q, k, cu_seqlens_q, cu_seqlens_k, causal, window)
    mask = None if mask is None else mask.expand(B, Hq, Sq, Sk)
    out = q.new_zeros(B, Hq, Sq, Dv)
    if Sk == 0:
        return (out,)
    for b in range(B):
        for h in range(Hq):
            scores = (q[b, h] @ k[b, h * Hk // Hq].T) * scale
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask[b, h], -math.inf)
            elif mask is not None:
                scores = scores + mask[b, h]
            if visible is not None:
                scores = scores.masked_fill(~visible, -math.inf)
            blind = (scores == -math.inf).all(-1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
            out[b, h] = weights @ v[b, h * Hk // Hq]
    return (out,)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
) -> Outputs:
    """torch's scaled_dot_product_attention, called as transformers' `sdpa` calls it.

    What SDPA has no flag for (windows, packed sequences, causal with Sq != Sk) becomes a mask, as it does there.
    """
    Sq, Sk = q.shape[2], k.shape[2]
    if Sk == 0 or q.numel() == 0:
        return (q.new_zeros(*q.shape[:3], v.shape[3]),)
    if q.is_cuda and not torch.compiler.is_compiling():
        q, k, v = (_aligned(t) for t in (q, k, v))
    aligned = causal and window <= 0 and mask is None and cu_seqlens_q is None and Sq == Sk
    visible = None if aligned else _visible(q, k, cu_seqlens_q, cu_seqlens_k, causal, window)
    options: dict[str, Any] = {}
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        if mask is None and visible is None and k.shape[-1] == v.shape[-1] <= 256:
            options["enable_gqa"] = True
        else:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    blind = None
    if visible is not None:
        if mask is None:
            mask = visible[None, None]
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)
        seen = mask if mask.dtype == torch.bool else mask != -math.inf
        blind = ~seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=aligned, **options)
    # Backends differ on a query that sees no key; with a mask of the model's own that is the model's choice.
    return (out if blind is None else out.masked_fill(blind, 0.0),)


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy where it does not lie on 16 bytes: torch's fused backends fault on such a tensor (2.11, H200)."""
    places = (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1]))
    return x if all(place % 16 == 0 for place in places) else x.clone(memory_format=torch.contiguous_format)


def _plain(workload: Workload) -> bool:
    """Whether the fast backends can take it: no mask, no window, no packing, causal only on a square."""
    sizes = workload.tensor("q").shape[2] == workload.tensor("k").shape[2]
    return (
        workload.arg("mask") is None
        and workload.arg("cu_seqlens_q") is None
        and _number(workload, "window") <= 0
        and (sizes or not workload.arg("causal"))
        and workload.tensor("k").shape[3] == workload.tensor("v").shape[3]
        and 0 not in workload.tensor("q").shape
    )


def _backend_peer(name: str, backend: SDPBackend, widest: int) -> Peer:
    def make(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
        if device.type != "cuda" or workload.dtype == "float32" or not _plain(workload):
            return None
        D = workload.tensor("q").shape[3]
        if widest < D or D % 8:
            return None

        def run(**args: Any) -> Any:
            with sdpa_kernel(backend):
                return reference(**args)

        return run

    return Peer(name=name, make=make)


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    """q, k, v as a model has them: heads transposed out of (B, S, H, D). Axes `Hk`, `Sk`, `Dv` default to q's.

    Options beside the scalars: `mask_kind` ("bool" (B, 1, Sq, Sk), "additive" (1, Hq, Sq, Sk), "padding" bool
    (B, 1, 1, Sk)), `sequences` (packs that many along S, with B = 1).
    """
    B, Hq, Sq, D = (axes[name] for name in ("B", "Hq", "Sq", "D"))
    Hk, Sk, Dv = axes.get("Hk", Hq), axes.get("Sk", Sq), axes.get("Dv", D)
    chosen = dict(options)
    mask_kind, sequences = chosen.pop("mask_kind", None), chosen.pop("sequences", None)

    def heads(H: int, S: int, width: int) -> TensorSpec:
        return TensorSpec(shape=(B, H, S, width), dtype=dtype, strides=(S * H * width, width, H * width, 1))

    masks = {
        "bool": TensorSpec(shape=(B, 1, Sq, Sk), dtype="bool"),
        "additive": TensorSpec(shape=(1, Hq, Sq, Sk), dtype=dtype),
        "padding": TensorSpec(shape=(B, 1, 1, Sk), dtype="bool"),
    }
    tensors: dict[str, TensorSpec | None] = {
        "q": heads(Hq, Sq, D),
        "k": heads(Hk, Sk, D),
        "v": heads(Hk, Sk, Dv),
        "mask": masks[str(mask_kind)] if mask_kind else None,
    }
    label = f"{B}x{Hq}" + (f"-{Hk}" if Hk != Hq else "") + f"x{Sq}" + (f"-{Sk}" if Sk != Sq else "")
    label += f"x{D}" + (f"-{Dv}" if Dv != D else "")
    if sequences:
        assert isinstance(sequences, int)
        bounds = TensorSpec(shape=(sequences + 1,), dtype="int32")
        tensors |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        chosen |= {
            "max_seqlen_q": max(_lengths(Sq, sequences, Sq)),
            "max_seqlen_k": max(_lengths(Sk, sequences, Sk)),
        }
        label += f"-{sequences}seqs"
    label += "".join(f"-{word}" for word in ("causal",) if chosen.get(word)) + (
        f"-{mask_kind}" if mask_kind else ""
    )
    return workload_from(SCHEMA, label, tensors, chosen)


def _lengths(total: int, sequences: int, longest: int) -> list[int]:
    """Lengths of packed sequences, uneven, none above `longest`, summing to `total` as far as that allows."""
    lengths = []
    for index in range(sequences):
        after = sequences - index - 1
        uneven = round(total / (after + 1) * (1.5 if index % 2 == 0 else 0.5)) if after else total
        length = min(max(uneven, total - longest * after, 0), longest, total)
        lengths.append(length)
        total -= length
    return lengths


def _number(workload: Workload, name: str) -> int:
    value = workload.arg(name)
    assert isinstance(value, int)
    return value


def _sequence_lengths(workload: Workload, side: str) -> list[int]:
    """Lengths along S of the packed sequences of a workload, or the one length where nothing is packed."""
    total = workload.tensor(side).shape[2]
    bounds = workload.arg(f"cu_seqlens_{side}")
    if not isinstance(bounds, TensorSpec):
        return [total]
    return _lengths(total, bounds.shape[0] - 1, _number(workload, f"max_seqlen_{side}") or total)


def _fill_bounds(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    lengths = _sequence_lengths(workload, name[-1])
    return torch.tensor([0, *lengths]).cumsum(0)


def _fill_mask(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """A third of the keys hidden, never the first: what a query without a key gets is left to causality and windows."""
    shown = torch.rand(spec.shape, generator=generator) < 0.67
    shown[..., :1] = True
    if spec.dtype == "bool":
        return shown
    bias = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return bias.masked_fill(~shown, -math.inf)


def _fill_value(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    return torch.randn(spec.shape, generator=generator, dtype=torch.float64)


def _pairs(workload: Workload) -> float:
    """Query-key pairs of one head that contribute: a causal square has half of them, windows and packing fewer."""
    causal, window = bool(workload.arg("causal")), _number(workload, "window")
    total = 0
    for Sq, Sk in zip(_sequence_lengths(workload, "q"), _sequence_lengths(workload, "k"), strict=True):
        if not causal and window <= 0:
            total += Sq * Sk
            continue
        for i in range(Sq):
            last = min(i + Sk - Sq, Sk - 1) if causal else Sk - 1
            first = max(i + Sk - Sq - window + 1, 0) if window > 0 else 0
            total += max(last - first + 1, 0)
    return float(total)


def _flops(workload: Workload) -> float:
    B, Hq, _, D = workload.tensor("q").shape
    return 2.0 * B * Hq * _pairs(workload) * (D + workload.tensor("v").shape[3])


def _out_elements(workload: Workload) -> int:
    return math.prod(workload.tensor("q").shape[:3]) * workload.tensor("v").shape[3]


def _cut(workload: Workload) -> tuple[str, ...]:
    """Each of a batch is a call of its own; packed sequences share their rows."""
    if workload.arg("cu_seqlens_q") is not None:
        return ()
    mask = workload.arg("mask")
    per_batch = isinstance(mask, TensorSpec) and mask.shape[0] == workload.tensor("q").shape[0]
    return ("q", "k", "v", "mask") if per_batch else ("q", "k", "v")


def _impostors_exempt(impostor: str, workload: Workload) -> bool:
    """No key: the answer is 0. One key: it is v itself, whatever q and k are."""
    Sk = workload.tensor("k").shape[2]
    return _out_elements(workload) == 0 or Sk == 0 or (Sk == 1 and impostor != "zeros")


def _roundings(workload: Workload) -> float:
    # In these regimes scores reach a hundred, and a weight carries the rounding of its score.
    score = 100.0 if workload.values in ("equal", "one_hot") else 0.0
    return score + math.sqrt(workload.tensor("q").shape[3]) + sum_roundings(workload.tensor("k").shape[2])


def _sites(model: nn.Module) -> Iterable[Site]:
    """One site for all attention of a model that goes through transformers' own `sdpa` entry."""
    for module in model.modules():
        functions = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", None)
        if functions is None:
            continue
        # A modeling file may have put a function of its own in this place.
        entry = functions.get("sdpa", None)
        ours = getattr(entry, "__module__", None) == "transformers.integrations.sdpa_attention"
        config = getattr(module, "config", None)
        if ours and getattr(config, "_attn_implementation", None) == "sdpa":
            yield Site(
                name="sdpa",
                kernel_type="flash_attention",
                layer="SDPAttention",
                attach="attention",
                path="sdpa",
            )
            return


KERNEL_TYPE = KernelType(
    name="flash_attention",
    schema=SCHEMA,
    outputs=(Output(shape=(Dims("q", 0, 3), Dims("v", 3, 4))),),
    oracle=oracle,
    reference=reference,
    peers=(
        eager_peer(reference),
        _backend_peer("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION, 128),
        _backend_peer("sdpa_flash", SDPBackend.FLASH_ATTENTION, 256),
        *compile_peers(reference),
    ),
    axes=("B", "Hq", "Hk", "Sq", "Sk", "D"),
    build=build,
    workloads={
        "cpu": (
            build({"B": 1, "Hq": 12, "Sq": 256, "D": 64}, "float32", {"causal": True}),
            build({"B": 2, "Hq": 8, "Hk": 2, "Sq": 128, "D": 64}, "float32", {"mask_kind": "padding"}),
        ),
        "cuda": tuple(
            build({"B": B, "Hq": H, "Sq": S, "D": D}, "bfloat16", {"causal": True})
            for B, H, S, D in ((4, 32, 2048, 128), (1, 12, 1024, 64), (2, 32, 8192, 128))
        ),
    },
    sweep=(
        ({"B": 1, "Hq": 2, "Sq": 64, "D": 64}, {}),
        ({"B": 2, "Hq": 2, "Sq": 128, "D": 64}, {"causal": True}),
        ({"B": 1, "Hq": 4, "Hk": 2, "Sq": 96, "D": 128}, {"causal": True}),
        ({"B": 2, "Hq": 2, "Sq": 64, "D": 32}, {"mask_kind": "bool"}),
        ({"B": 1, "Hq": 2, "Sq": 48, "Sk": 80, "D": 64}, {"mask_kind": "additive", "scale": 0.2}),
        ({"B": 2, "Hq": 4, "Hk": 1, "Sq": 32, "Sk": 96, "D": 64}, {"mask_kind": "padding"}),
        ({"B": 1, "Hq": 2, "Sq": 32, "Sk": 128, "D": 64}, {"causal": True}),
        ({"B": 1, "Hq": 2, "Sq": 128, "D": 64}, {"causal": True, "window": 40}),
        ({"B": 1, "Hq": 2, "Hk": 1, "Sq": 160, "D": 64}, {"causal": True, "sequences": 4}),
        ({"B": 1, "Hq": 2, "Sq": 64, "D": 64, "Dv": 32}, {}),
        ({"B": 1, "Hq": 1, "Sq": 64, "D": 256}, {"causal": True}),
    ),
    edges=(
        ({"B": 1, "Hq": 2, "Sq": 0, "Sk": 8, "D": 16}, {}),
        ({"B": 1, "Hq": 2, "Sq": 5, "Sk": 0, "D": 16}, {}),
        ({"B": 1, "Hq": 1, "Sq": 1, "Sk": 1, "D": 8}, {}),
        ({"B": 1, "Hq": 4, "Hk": 2, "Sq": 1, "Sk": 257, "D": 64}, {"causal": True}),
        ({"B": 2, "Hq": 3, "Hk": 1, "Sq": 17, "Sk": 31, "D": 33}, {}),
        ({"B": 1, "Hq": 2, "Sq": 65, "Sk": 129, "D": 80}, {"causal": True}),
        # More queries than keys: the first ones see no key.
        ({"B": 1, "Hq": 2, "Sq": 45, "Sk": 19, "D": 64}, {"causal": True}),
        ({"B": 1, "Hq": 2, "Sq": 40, "Sk": 24, "D": 32}, {"causal": True, "mask_kind": "additive"}),
        ({"B": 2, "Hq": 2, "Sq": 33, "Sk": 70, "D": 40}, {"causal": True, "mask_kind": "bool", "window": 9}),
        ({"B": 1, "Hq": 1, "Sq": 127, "D": 16}, {"window": 5}),
        ({"B": 1, "Hq": 2, "Sq": 63, "Sk": 101, "D": 48}, {"causal": True, "sequences": 3, "window": 11}),
        ({"B": 1, "Hq": 2, "Sq": 6, "Sk": 37, "D": 24, "Dv": 7}, {"sequences": 9}),
    ),
    # Other regimes make near ties of large scores, which fp32 cannot tell apart; v stays as it is.
    adversarial=("uniform", "equal", "one_hot"),
    layouts={
        "contiguous": ("q", "k", "v"),
        "sliced": ("q", "k", "v"),
        "padded": ("q", "k", "v", "mask"),
        "transposed": ("q", "k", "v"),
        "expanded": ("q", "k", "v", "mask"),
        "offset": ("q", "k", "v", "mask"),
    },
    fills={
        "v": _fill_value,
        "mask": _fill_mask,
        "cu_seqlens_q": _fill_bounds,
        "cu_seqlens_k": _fill_bounds,
    },
    tolerance=Tolerance(
        k=3.0,
        ulps=3.0,
        growth=growth_in_fp32(_roundings),
        why="one rounding of the output and one of each weight before the second product, which averages them; a "
        "score in fp32 wanders by sqrt(D) roundings and the sums over the keys by sqrt(Sk); k is 3 because torch "
        "picks among kernels of unlike error",
    ),
    flops=_flops,
    cut=_cut,
    huge=(({"B": 1027, "Hq": 16, "Sq": 1024, "D": 128}, {}),),
    bytes_moved=lambda workload: input_bytes(workload) + _out_elements(workload) * itemsize(workload.dtype),
    impostors_exempt=_impostors_exempt,
    layers=(Layer(name="SDPAttention", hook="SDPAttention", find=_sites),),
    source="https://arxiv.org/abs/2205.14135",
)
