"""Judge Triton starters in Triton's interpreter. A program of its own, since the interpreter is chosen at import.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted TYPE...

prints one JSON object: for each type the number of calls, and a sentence for each call that went wrong.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel_hf import tunables
from autokernel_hf.judge.cases import INTERPRETER_DTYPES, STAGES, Scope, cases_of
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type, starter
from autokernel_hf.kernels.base import KernelType, make_inputs
from autokernel_hf.records import Scalar, Workload
from autokernel_hf.tunables import Tunable
from autokernel_hf.variant import Domain

# Small enough that every way through a starter is short in the interpreter.
SHORTENED: dict[str, Scalar] = {"LONGEST": 512, "CHUNK": 256, "TILE": 512, "HELD": 256, "MANY_TILES": 4}
FEW_PROGRAMS = 1 << 13
# Constants that choose how a kernel is launched: the interpreter reads none of it, so that one call shows what there is.
LAUNCH_ONLY = re.compile(r"WARPS|STAGES|PER_THREAD")


def load(source: str, folder: Path, name: str) -> Any:
    """A starter's module, from a file, which Triton reads its functions from."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def workloads_of(kind: KernelType) -> list[Workload]:
    """The judge's own calls of all stages that the interpreter can run, each once.

    Of those in float16 every second, which takes the same ways.
    """
    scope = Scope(kernel_type=kind, workloads=(), dtypes=INTERPRETER_DTYPES, interpret=True)
    domain = Domain(dtypes=kind.dtypes, values={})
    every = [case.workload for stage in STAGES for case in cases_of(stage, scope, domain)]
    distinct = {w.model_dump_json(): w for w in every}.values()
    return [w for i, w in enumerate(distinct) if w.dtype == "float32" or i % 2]


def with_each_choice(
    known: Sequence[Tunable], few: list[Workload]
) -> list[tuple[dict[str, Scalar], list[Workload]]]:
    """Every value of every tunable, and the calls that are made with it: one, where it only tells how to launch."""
    shortest = min((w for w in few if min(spec_size(w))), key=lambda w: max(spec_size(w)))
    return [
        ({t.name: choice}, [shortest] if LAUNCH_ONLY.search(t.name) else few)
        for t in known
        for choice in t.choices
        if choice != t.value
    ]


def problems_of(module: Any, kind: KernelType, workload: Workload) -> Iterator[str]:
    """What is wrong with one call: its numbers, its outputs' form, its inputs afterwards."""
    args = make_inputs(kind, workload, 21)
    before = {k: v.clone() for k, v in args.items() if isinstance(v, Tensor)}
    expected = expect(kind, workload, args)
    outputs = module.kernel_fn(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for output, (shape, dtype) in zip(outputs, expected.specs, strict=True):
        if tuple(output.shape) != shape or output.dtype != dtype or not output.is_contiguous():
            yield f"{tuple(output.shape)} {output.dtype} {output.stride()}, expected {shape} {dtype}"
            return
        inputs = {
            v.untyped_storage().data_ptr() for v in args.values() if isinstance(v, Tensor) and v.numel()
        }
        if output.numel() and output.untyped_storage().data_ptr() in inputs:
            yield "an output shares memory with an input"
    for name, old in before.items():
        if not bool(((old == args[name]) | (old.isnan() & args[name].isnan())).all()):
            yield f"it changed {name}"
    outcome = check_values(outputs, expected, kind, workload)
    if outcome.problem:
        yield outcome.problem


def examine(name: str, folder: Path) -> dict[str, Any]:
    kind, source = kernel_type(name), starter(name, "triton")
    assert source is not None
    ordinary = workloads_of(kind)
    short = [w for w in ordinary if sum(spec_size(w)) <= FEW_PROGRAMS]
    settings: list[tuple[dict[str, Scalar], list[Workload]]] = [({}, ordinary)]
    known = tunables.parse(source)
    shortened = {t.name: v for t in known for n, v in SHORTENED.items() if t.name == n}
    if shortened:
        settings.append((shortened, short))
    # A few calls that take different ways through the starter.
    longest = max(ordinary, key=lambda w: max(spec_size(w)))
    settings += with_each_choice(known, [*short[:: max(1, len(short) // 4)], longest])
    problems, calls = [], 0
    for i, (values, workloads) in enumerate(settings):
        # SHORTENED leaves the tunables' own choices, so it is set and not substituted.
        module = load(source, folder, f"{name}_{i}")
        for key, value in values.items():
            setattr(module, key, value)
        for workload in workloads:
            calls += 1
            problems += [
                f"{workload.label} {workload.dtype} {values or ''}: {problem}"
                for problem in problems_of(module, kind, workload)
            ]
    return {"calls": calls, "problems": problems}


def spec_size(workload: Workload) -> list[int]:
    sizes = []
    for _, spec in workload.tensors:
        count = 1
        for n in spec.shape:
            count *= n
        sizes.append(count)
    return sizes


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")  # numpy's, about the divisions by zero that give the NaN asked for
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = {name: examine(name, Path(folder)) for name in names}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
