"""Triton starters of products, attention, losses, rotary embeddings, reductions: right in the interpreter, compiled for GPUs."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel_hf import contract, tunables
from autokernel_hf.judge.cases import STAGES, Scope, cases_of
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels.base import REQUIRED, make_inputs
from autokernel_hf.records import Candidate
from autokernel_hf.variant import Domain
from tests.kernels.compile_ahead import compile_ahead
from tests.kernels.interpreted import load
from tests.kernels.starters_b import COMPILED, TYPES, source_of

# What a block may have, by compute capability times ten.
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448}
MEMORY_BOUND = ("cross_entropy", "rotary_embedding", "reduce")


def report_of(mode: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.starters_b", mode],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    report: dict[str, Any] = report_of("interpret", TRITON_INTERPRET="1")
    return report


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = tmp_path_factory.mktemp("triton_cache")
    report: list[dict[str, Any]] = report_of("compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    return report


@pytest.mark.parametrize("name", TYPES)
def test_starter_is_right_in_every_stage_and_with_every_tunable(
    name: str, interpreted: dict[str, Any]
) -> None:
    assert interpreted[name]["calls"] > 40
    assert interpreted[name]["problems"] == []


@pytest.mark.parametrize("name", TYPES)
def test_starter_keeps_the_candidate_contract(name: str, tmp_path: Path) -> None:
    kind, source = kernel_type(name), source_of(name)
    contract.check(Candidate(kernel_type=name, backend="triton", source=source), kind)
    assert len(tunables.parse(source)) >= 2
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported <= {"torch", "triton", "triton.language", "math"}
    parameters = inspect.signature(load(source, tmp_path, f"signature_{name}").kernel_fn).parameters.values()
    wanted = {
        a.name: inspect.Parameter.empty if a.default is REQUIRED else a.default for a in kind.schema.args
    }
    assert {p.name: p.default for p in parameters} == wanted
    assert [p.name for p in parameters] == list(wanted)


@pytest.mark.parametrize("name", TYPES)
def test_starter_refuses_a_dtype_that_it_would_round(name: str, tmp_path: Path) -> None:
    kind = kernel_type(name)
    axes, options = kind.sweep[0]
    workload = kind.build(axes, "float64", options)
    with pytest.raises(NotImplementedError):
        load(source_of(name), tmp_path, f"refusal_{name}").kernel_fn(**make_inputs(kind, workload, 0))


# Calls whose shapes disagree: an answer would be of memory that is not theirs.
MISFITS: dict[str, dict[str, Any]] = {
    "matmul": {"a": torch.zeros(4, 8), "b": torch.zeros(9, 4)},
    "flash_attention": {
        "q": torch.zeros(1, 4, 8, 16),
        "k": torch.zeros(1, 3, 8, 16),
        "v": torch.zeros(1, 3, 8, 16),
    },
    "fused_mlp": {
        "x": torch.zeros(4, 8),
        "w_gate": None,
        "w_up": torch.zeros(16, 9),
        "w_down": torch.zeros(8, 16),
    },
    "cross_entropy": {"logits": torch.zeros(4, 8), "target": torch.zeros(5, dtype=torch.int64)},
    "rotary_embedding": {
        "q": torch.zeros(1, 2, 4, 8),
        "k": torch.zeros(1, 2, 4, 8),
        "cos": torch.zeros(1, 3, 8),
        "sin": torch.zeros(1, 3, 8),
    },
}


@pytest.mark.parametrize("name", MISFITS)
def test_starter_refuses_shapes_that_do_not_fit(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        load(source_of(name), tmp_path, f"misfit_{name}").kernel_fn(**MISFITS[name])


def of_type(compiled: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    found = [kernel for kernel in compiled if kernel["type"] in names]
    assert found
    return found


def test_all_starters_compile_for_three_generations(compiled: list[dict[str, Any]]) -> None:
    seen = {(kernel["type"], kernel["capability"]) for kernel in compiled}
    assert seen == {(name, capability) for name, *_, capabilities in COMPILED for capability in capabilities}
    for kernel in compiled:
        assert kernel["shared_bytes"] <= SHARED_LIMIT[kernel["capability"]], kernel


def test_memory_bound_starters_keep_everything_in_registers(compiled: list[dict[str, Any]]) -> None:
    for kernel in of_type(compiled, *MEMORY_BOUND):
        assert kernel["stack_bytes"] == 0, kernel


def test_memory_bound_starters_read_whole_vectors(compiled: list[dict[str, Any]]) -> None:
    """Also rows of 50257 16-bit logits, which start at any address."""
    for kernel in of_type(compiled, *MEMORY_BOUND):
        final = (
            kernel["kernel"] == "reduce_kernel" and kernel["shared_bytes"] == 0
        )  # a handful of partial results
        if not final and kernel["kernel"] != "total_kernel" and kernel["label"] != "4096x4096-max-dim0":
            assert kernel["wide_loads"] >= 2, kernel


def test_products_use_tensor_cores_but_never_in_tf32(compiled: list[dict[str, Any]]) -> None:
    for kernel in of_type(compiled, "matmul", "flash_attention", "fused_mlp"):
        assert not kernel["tf32"], kernel
        assert kernel["tensor_cores"] == (kernel["dtype"] != "float32"), kernel


def test_float8_is_native_where_the_hardware_has_it(compiled: list[dict[str, Any]]) -> None:
    native = {k["capability"]: k["float8"] for k in compiled if k["dtype"] == "float8_e4m3fn"}
    assert native == {80: False, 90: True}


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in TYPES for d in kernel_type(n).dtypes])
def test_starter_is_right_on_a_gpu(name: str, dtype: str, tmp_path: Path) -> None:
    """A dtype each: of all together attention compiles for minutes."""
    if dtype == "float8_e4m3fn" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    kind, device = kernel_type(name), torch.device("cuda")
    module = load(source_of(name), tmp_path, f"gpu_{name}")
    scope = Scope(kernel_type=kind, workloads=kind.workloads["cuda"][:2], dtypes=(dtype,))
    domain = Domain(dtypes=(dtype,), values={})
    cases = [c for stage in STAGES for c in cases_of(stage, scope, domain) if not c.refuse]
    compile_ahead(module.kernel_fn, (case.workload for case in cases))
    for case in cases:
        args = make_inputs(kind, case.workload, 5, device)
        expected = expect(kind, case.workload, args)
        for _ in range(2):
            outputs = module.kernel_fn(**args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            outcome = check_values(outputs, expected, kind, case.workload)
            assert not outcome.problem, f"{case.stage} {case.workload.label} {dtype}: {outcome.problem}"
