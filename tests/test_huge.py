"""Large calls, made small: how one of more than 2^31 elements is laid out and checked, and how inputs are drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from autokernel_hf.judge import checks, huge, large
from autokernel_hf.judge.arena import Arena, Slot
from autokernel_hf.judge.remote import Child, Report
from autokernel_hf.judge.stages import StageFailed
from autokernel_hf.kernels import kernel_type

RMS = kernel_type("rmsnorm")
CPU = torch.device("cpu")


class Direct:
    """A child whose candidate is a function of this process."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.arena = Arena.create(1, CPU)

    @contextlib.contextmanager
    def lent(self, arena: Arena) -> Iterator[None]:
        self.arena = arena
        yield

    def start_call(self, args: Any, sinks: Any) -> None:
        given = {n: self.arena.view(v) if isinstance(v, Slot) else v for n, v in args}
        self.arena.view(sinks[0]).copy_(self.function(**given))

    def finish_call(self) -> Report:
        return Report(outputs=({"type": "Tensor"},), shared=False)


def run(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "_ROWS", 8)
    call = huge.Huge(
        workload=RMS.build({"M": 67, "N": 16}, "bfloat16", {}),
        rows=RMS.build({"M": 8, "N": 16}, "bfloat16", {}),
    )
    huge.run(cast("Child", Direct(function)), RMS, call, 5, CPU)


def right(**args: Any) -> Tensor:
    return RMS.reference(**args)[0]


def test_a_right_function_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    run(right, monkeypatch)


@pytest.mark.parametrize("row", [0, 7, 8, 40, 66])
def test_a_row_that_is_read_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    def wraps_around(x: Tensor, **args: Any) -> Tensor:
        x = x.clone()
        x[row] = x[(row + 3) % 67]
        return right(x=x, **args)

    with pytest.raises(StageFailed, match=f"wrong among the 8 rows from {row // 8 * 8} on"):
        run(wraps_around, monkeypatch)


def test_a_changed_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(x: Tensor, **args: Any) -> Tensor:
        output = right(x=x, **args)
        x[50, 3] += 1
        return output

    with pytest.raises(StageFailed, match="changed its input x"):
        run(changes, monkeypatch)


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
