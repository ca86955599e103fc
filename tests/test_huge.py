"""Large calls, made small: how one of more than 2^31 elements is laid out and checked, and how inputs are drawn."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from autokernel_hf.judge import checks, huge, large
from autokernel_hf.judge.arena import Arena, Slot, outputs_of
from autokernel_hf.judge.cases import Scope
from autokernel_hf.judge.remote import Child, Report
from autokernel_hf.judge.stages import StageFailed
from autokernel_hf.kernels import kernel_type, kernel_types
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.variant import Domain

CPU = torch.device("cpu")


class Direct:
    """A child whose candidate is a function of this process."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.arena = Arena.create(1, CPU)

    @contextlib.contextmanager
    def lent(self, arena: Arena) -> Iterator[None]:
        self.arena = arena
        yield

    def start_call(self, args: Any, sinks: Any) -> None:
        given = {n: self.arena.view(v) if isinstance(v, Slot) else v for n, v in args}
        outputs = self.function(**given)
        for sink, output in zip(sinks, outputs, strict=True):
            self.arena.view(sink).copy_(output)
        self.report = Report(outputs=tuple({"type": "Tensor"} for _ in outputs), shared=False)

    def finish_call(self) -> Report:
        return self.report


# The calls of all types, on a machine where 2^31 is some hundreds: the first axis has 67 rows, of which 8 are drawn.
SMALL: dict[str, tuple[dict[str, int], ...]] = {
    "cross_entropy": ({"N": 67, "V": 16},),
    "matmul": ({"M": 67, "N": 16, "K": 8}, {"M": 67, "N": 8, "K": 16}),
    "fused_mlp": ({"M": 67, "D": 16, "H": 8}, {"M": 67, "D": 8, "H": 16}),
    "flash_attention": ({"B": 67, "Hq": 2, "Sq": 4, "D": 8},),
    "rotary_embedding": ({"B": 67, "Hq": 2, "Hk": 2, "S": 4, "D": 8},),
}
# Those of a forward pass.
FORWARD = [t for t in kernel_types().values() if not t.name.endswith("_backward")]
TYPES = [(t.name, i) for t in FORWARD for i in range(len(t.huge))]


def call_of(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[KernelType, huge.Huge]:
    found = kernel_type(name)
    entries = SMALL.get(name, ({"M": 67, "N": 16},))
    assert [list(axes) for axes in entries] == [list(axes) for axes, _ in found.huge]
    small = tuple((axes, options) for axes, (_, options) in zip(entries, found.huge, strict=True))
    monkeypatch.setattr(huge, "_MOST_ROWS", 8)
    scope = Scope(kernel_type=replace(found, huge=small), workloads=(), dtypes=found.dtypes)
    call = huge.calls_of(scope, Domain(dtypes=found.dtypes, values={}))[number]
    assert call.workload.dtype == "bfloat16"
    return found, call


def run(found: KernelType, call: huge.Huge, function: Callable[..., tuple[Tensor, ...]]) -> None:
    huge.run(cast("Child", Direct(function)), found, call, 5, CPU)


@pytest.mark.parametrize(("name", "number"), TYPES)
def test_a_right_function_passes(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, call = call_of(name, number, monkeypatch)
    run(found, call, found.reference)


@pytest.mark.parametrize(("name", "number"), TYPES)
@pytest.mark.parametrize("row", [0, 40, 66])
def test_a_row_that_is_read_elsewhere_is_found(
    name: str, number: int, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, call = call_of(name, number, monkeypatch)

    def wraps_around(**args: Any) -> tuple[Tensor, ...]:
        for cut in found.cut(call.workload)[:1]:
            args[cut] = args[cut].clone()
            args[cut][row] = args[cut][(row + 3) % 67]
        return found.reference(**args)

    with pytest.raises(StageFailed, match=f"wrong among the 8 rows from {row // 8 * 8} on"):
        run(found, call, wraps_around)


@pytest.mark.parametrize(("name", "number"), TYPES)
def test_a_row_that_is_not_written_is_found(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, call = call_of(name, number, monkeypatch)

    def leaves_one(**args: Any) -> tuple[Tensor, ...]:
        outputs = tuple(o.clone() for o in found.reference(**args))
        outputs[-1][50] = outputs[-1][1]
        return outputs

    with pytest.raises(StageFailed, match="wrong among the 8 rows from 48 on"):
        run(found, call, leaves_one)


@pytest.mark.parametrize("name", sorted({name for name, _ in TYPES}))
def test_a_changed_input_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, call = call_of(name, 0, monkeypatch)
    first = found.cut(call.workload)[0]

    def changes(**args: Any) -> tuple[Tensor, ...]:
        outputs = tuple(o.clone() for o in found.reference(**args))
        args[first][50] += 1
        return outputs

    with pytest.raises(StageFailed, match=f"changed its input {first}"):
        run(found, call, changes)


@pytest.mark.parametrize("found", FORWARD, ids=lambda t: t.name)
def test_every_type_has_calls_beyond_32_bits_that_a_large_gpu_has_room_for(found: KernelType) -> None:
    scope = Scope(kernel_type=found, workloads=(), dtypes=found.dtypes)
    calls = huge.calls_of(scope, Domain(dtypes=found.dtypes, values={}))
    assert len(calls) == len(found.huge) >= 1
    for call in calls:
        axes = dict(zip(("M", "D", "H"), (*call.workload.tensors[0][1].shape, 0), strict=False))
        sizes = [math.prod(s.shape) for _, s in call.workload.tensors]
        sizes += [math.prod(s.shape) for s in outputs_of(found, call.workload)]
        if found.name == "fused_mlp":  # the hidden values
            sizes.append(axes["M"] * call.workload.tensor("w_up").shape[0])
        assert huge.LIMIT < max(sizes) < 1.01 * huge.LIMIT
        assert call.workload.dtype == "bfloat16"
        assert huge.needed_bytes(call, found) < 0.6 * (140 << 30)
        drawn = max(math.prod(s.shape) for _, s in call.rows.tensors)
        assert drawn <= 1 << 24
        first = [w.tensors[0][1].shape[0] for w in (call.workload, call.alike)]
        assert first[0] % 16 == first[1] % 16, (
            "a kernel that is compiled for multiples of 16 needs no other variant"
        )


def test_a_narrow_domain_has_a_call_of_its_own_values() -> None:
    found = kernel_type("activation")
    scope = Scope(kernel_type=found, workloads=(), dtypes=("float32",))
    domain = Domain(dtypes=("float32",), values={"kind": ("gelu_new", "gelu_tanh")})
    (call,) = huge.calls_of(scope, domain)
    assert [w.arg("kind") for w in (call.workload, call.rows, call.alike)] == ["gelu_new"] * 3
    assert huge.calls_of(scope, Domain(dtypes=("float16",), values={})) == ()


@pytest.mark.parametrize("name", ["rmsnorm", "add_norm", "cross_entropy", "matmul", "softmax"])
def test_inputs_of_a_large_call_are_some_rows_many_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel_type(name)
    axes = {
        "rmsnorm": {"M": 100, "N": 8},
        "cross_entropy": {"N": 100, "V": 16},
        "matmul": {"M": 100, "K": 8, "N": 4},
    }
    options = {"reduction": "none"} if name == "cross_entropy" else {}
    workload = found.build(axes.get(name, axes["rmsnorm"]), "float32", options)
    whole = large.inputs_of(found, workload, 3, CPU)
    monkeypatch.setattr(large, "MOST_DRAWN", 200)
    args = large.inputs_of(found, workload, 3, CPU)
    assert {k: getattr(v, "shape", v) for k, v in args.items()} == {
        k: getattr(v, "shape", v) for k, v in whole.items()
    }
    first = args[found.cut(workload)[0]]
    distinct = torch.unique(first, dim=0).shape[0]
    assert 5 <= distinct <= 25
    assert torch.unique(whole[found.cut(workload)[0]], dim=0).shape[0] == 100
    before = large.inputs_of(found, workload, 4, CPU)
    assert checks.admit(found, workload, (args, before)) == ()
