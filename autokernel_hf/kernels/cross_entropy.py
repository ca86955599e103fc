"""Cross entropy of logits and class indices, with label smoothing and an ignored index."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.kernels._peers import compile_peers, eager_peer, liger_peer
from autokernel_hf.kernels._places import module_sites
from autokernel_hf.kernels.base import (
    REDUCTIONS,
    KernelType,
    Layer,
    Output,
    Outputs,
    RowsIfNone,
    Schema,
    Tolerance,
    input_bytes,
    workload_from,
)
from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

SCHEMA = Schema.parse(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index=-100, float label_smoothing=0.0, "
    'str reduction="mean") -> Tensor'
)


def oracle(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Outputs:
    """loss_n = (1 - s) * -log p_n[target_n] + s / V * sum_v -log p_n[v], 0 where target_n is ignored.

    The mean is over the rows that are not ignored; of none it is NaN. Shapes: logits (N, V), target (N) -> (N) or ().
    """
    N, V = logits.shape
    counts = target != ignore_index
    log_p = torch.log_softmax(logits, -1)
    loss = -log_p.gather(1, torch.where(counts, target, 0)[:, None])[:, 0] if V else logits.new_zeros(N)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing / V * log_p.sum(-1)
    loss = torch.where(counts, loss, 0.0)
    if reduction == "none":
        return (loss,)
    return (loss.sum() if reduction == "sum" else loss.sum() / counts.sum(),)


def reference(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Outputs:
    """The loss of transformers' language models: the logits widened to float32, then F.cross_entropy."""
    return (
        F.cross_entropy(
            logits.float(),
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        ),
    )


def _liger() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def run(
        logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> Tensor:
        out: Tensor = liger_cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return out.float()

    return run


def _liger_is_precise(workload: Workload) -> bool:
    """Liger keeps each row's loss in the logits' dtype: of 16 bits, it has 8 or 11 digits where torch's has 24."""
    return workload.tensor("logits").dtype == "float32"


def build(axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]) -> Workload:
    N, V = axes["N"], axes["V"]
    tensors = {
        "logits": TensorSpec(shape=(N, V), dtype=dtype),
        "target": TensorSpec(shape=(N,), dtype="int64"),
    }
    return workload_from(SCHEMA, f"{N}x{V}-{options.get('reduction', 'mean')}", tensors, dict(options))


def _fill_target(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """Classes below V; about one row in eight is ignored, the first never is (unless every class is)."""
    N, V = workload.tensor("logits").shape
    ignore_index = workload.arg("ignore_index")
    target = torch.randint(max(V, 1), (N,), generator=generator)
    ignored = torch.rand(N, generator=generator) < 0.125
    if N:
        ignored[0] = False
    return torch.where(ignored, torch.tensor(ignore_index), target)


def _rows(workload: Workload) -> int:
    return workload.tensor("logits").shape[0]


def _classes(workload: Workload) -> int:
    return workload.tensor("logits").shape[1]


def _impostors_exempt(impostor: str, workload: Workload) -> bool:
    """One class: every loss is 0. All logits alike: every loss is log(V). One output is its own mean, or NaN."""
    if _rows(workload) == 0 or _classes(workload) <= 1:
        return True
    scalar = workload.arg("reduction") != "none" or _rows(workload) == 1
    alike = workload.values in ("equal", "tiny", "denormal")
    if impostor in ("previous", "narrow"):  # NaN has no digits
        return scalar and ((alike and impostor == "previous") or workload.values == "nonfinite")
    return impostor == "mean" and (scalar or alike)


def _is_loss(module: nn.Module) -> bool:
    return type(module) is nn.CrossEntropyLoss and module.weight is None


def _sites(model: nn.Module) -> Iterable[Site]:
    return module_sites(model, "cross_entropy", "CrossEntropyLoss", _is_loss)


KERNEL_TYPE = KernelType(
    name="cross_entropy",
    schema=SCHEMA,
    outputs=(Output(shape=(RowsIfNone("logits", "reduction"),), dtype="float32"),),
    oracle=oracle,
    reference=reference,
    peers=(eager_peer(reference), *compile_peers(reference), liger_peer(_liger, _liger_is_precise)),
    axes=("N", "V"),
    build=build,
    workloads={
        "cpu": (
            build({"N": 256, "V": 8192}, "float32", {}),
            build({"N": 64, "V": 50257}, "float32", {}),
        ),
        "cuda": tuple(
            build({"N": N, "V": V}, "bfloat16", {}) for N, V in ((4096, 32000), (8192, 50257), (4096, 128256))
        ),
    },
    sweep=(
        ({"N": 32, "V": 128}, {"reduction": "none"}),
        ({"N": 64, "V": 1000}, {}),
        ({"N": 16, "V": 8192}, {"reduction": "sum"}),
        ({"N": 48, "V": 512}, {"reduction": "none", "label_smoothing": 0.1}),
        ({"N": 33, "V": 2048}, {"label_smoothing": 0.25, "ignore_index": 0}),
        ({"N": 4, "V": 50257}, {"reduction": "none"}),
    ),
    edges=(
        ({"N": 0, "V": 8}, {"reduction": "none"}),
        ({"N": 0, "V": 8}, {"reduction": "mean"}),
        ({"N": 0, "V": 8}, {"reduction": "sum"}),
        ({"N": 3, "V": 1}, {"reduction": "mean", "ignore_index": 0}),
        ({"N": 3, "V": 1}, {"reduction": "none"}),
        ({"N": 1, "V": 2}, {}),
        ({"N": 5, "V": 7}, {"reduction": "sum", "label_smoothing": 1.0}),
        ({"N": 17, "V": 1023}, {"reduction": "none", "ignore_index": 5}),
        ({"N": 9, "V": 1025}, {"reduction": "mean"}),
        ({"N": 131, "V": 3}, {"reduction": "mean"}),
        ({"N": 2, "V": 128256}, {"reduction": "none", "label_smoothing": 0.1}),
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
        "sliced": ("logits", "target"),
        "padded": ("logits",),
        "transposed": ("logits",),
        "expanded": ("logits",),
        "offset": ("logits", "target"),
    },
    fills={"target": _fill_target},
    codes={"reduction": REDUCTIONS},
    tolerance=Tolerance(
        k=2.0,
        ulps=2.0,
        growth=lambda workload: 2.0 + math.log2(_classes(workload) + 2) / 2,
        why="the output is float32 whatever the logits are: exp, log and the difference of the largest logit and the "
        "target's round once each, and a sum of V terms by a tree adds log2(V) roundings",
    ),
    flops=lambda workload: 4.0 * _rows(workload) * _classes(workload),
    bytes_moved=lambda workload: (
        input_bytes(workload) + 4.0 * (_rows(workload) if workload.arg("reduction") == "none" else 1)
    ),
    cut=lambda workload: ("logits", "target") if workload.arg("reduction") == "none" else (),
    huge=(({"N": 65_539, "V": 32_768}, {"reduction": "none"}),),
    impostors_exempt=_impostors_exempt,
    layers=(Layer(name="CrossEntropyLoss", hook="CrossEntropyLoss", find=_sites),),
)
