"""The Triton starters of the elementwise and row types: right in the interpreter, compiled for GPUs that are not here."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel_hf import contract, tunables
from autokernel_hf.judge.cases import STAGES, Scope, cases_of
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type, starter
from autokernel_hf.kernels.base import DTYPES, REQUIRED, make_inputs, with_layout
from autokernel_hf.records import Candidate, TensorSpec, Workload
from autokernel_hf.variant import Domain
from tests.kernels.compile_ahead import compile_ahead

TYPES = ("activation", "gated_activation", "layernorm", "rmsnorm", "add_norm", "softmax")
ARCHS = (80, 90, 100)


def source_of(name: str) -> str:
    source = starter(name, "triton")
    assert source is not None
    return source


def load(name: str, folder: Path) -> Any:
    path = folder / f"starter_{name}.py"
    path.write_text(source_of(name), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- numbers, in the interpreter ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `tests.kernels.interpreted` says of all starters; one process, since starting one takes seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", *TYPES],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", TYPES)
def test_starter_is_right_in_every_stage_and_with_every_tunable(
    name: str, interpreted: dict[str, Any]
) -> None:
    assert interpreted[name]["calls"] > 60
    assert interpreted[name]["problems"] == []


# --- the contract -------------------------------------------------------------------------------------------------


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
    parameters = inspect.signature(load(name, tmp_path).kernel_fn).parameters.values()
    defaults = {
        a.name: inspect.Parameter.empty if a.default is REQUIRED else a.default for a in kind.schema.args
    }
    assert {p.name: p.default for p in parameters} == defaults
    assert [p.name for p in parameters] == [a.name for a in kind.schema.args]


@pytest.mark.parametrize("name", TYPES)
def test_starter_refuses_a_dtype_that_it_would_round(name: str, tmp_path: Path) -> None:
    kind = kernel_type(name)
    workload = kind.build({"M": 2, "N": 8}, "float64", {})
    with pytest.raises(NotImplementedError):
        load(name, tmp_path).kernel_fn(**make_inputs(kind, workload, 0))


# --- compiling for GPUs that are not here -------------------------------------------------------------------------


class Recorder:
    """Stands in for a JIT function and keeps what it would be launched with."""

    def __init__(self, function: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **options: Any) -> None:
            assert all(0 < n < 2**31 for n in grid)
            bound = {**dict(zip(self.function.arg_names, args, strict=False)), **options}
            self.launches.append((self.function, bound))

        return record


def launches_of(name: str, workloads: list[Workload], folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    """What a starter would launch for workloads, whose tensors have no memory."""
    module, launches = load(name, folder), []
    for key, value in list(vars(module).items()):
        if key.endswith("_kernel"):
            setattr(module, key, Recorder(value, launches))
    for workload in workloads:
        args = {k: meta(v) if isinstance(v, TensorSpec) else v for k, v in workload.args}
        module.kernel_fn(**args)
    return launches


def meta(spec: TensorSpec) -> torch.Tensor:
    strides = spec.strides or torch.empty(spec.shape, device="meta").stride()
    return torch.empty_strided(spec.shape, strides, dtype=DTYPES[spec.dtype], device="meta")


def compile_launch(function: Any, bound: dict[str, Any], arch: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
    options = {key: value for key, value in bound.items() if key not in function.arg_names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(function.arg_names):
        value = bound[name]
        fixed = function.params[i].is_constexpr or value is None or isinstance(value, (bool, str))
        if fixed or (isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = names[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def spilled_bytes(cubin: bytes, folder: Path) -> int:
    """Bytes of local memory that a kernel uses a thread: its stack, which holds what registers do not."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = re.search(r"REG:\d+ STACK:(\d+).*?LOCAL:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]) + int(found[2])


def demanding_workloads(name: str) -> list[Workload]:
    """Calls that take every way through a starter, with the largest tiles that its default constants give."""
    kind = kernel_type(name)
    options = {
        "activation": [{"kind": "gelu"}, {"kind": "gelu_new"}],
        "gated_activation": [{"kind": "silu"}],
        "add_norm": [{"kind": "layer"}],
    }.get(name, [{}])
    # Above LONGEST, rows are taken in chunks: the largest tile is a row of that length.
    longest = {t.name: t.value for t in tunables.parse(source_of(name))}.get("LONGEST", 16384)
    built = [kind.build({"M": 8, "N": int(str(longest))}, "float32", o) for o in options]
    small = kind.build({"M": 40, "N": 48}, "bfloat16", options[0])
    names = [k for k, v in small.args if isinstance(v, TensorSpec)]
    built.append(with_layout(small, "sliced", names))
    if name not in ("activation", "gated_activation"):
        built.append(kind.build({"M": 8, "N": 50257}, "bfloat16", options[0]))
    if name == "softmax":
        built += [kind.build({"M": m, "N": 48}, "float16", {"dim": 0}) for m in (40, 4000)]
        built.append(with_layout(built[-3], "padded", names))
        built.append(kind.build({"B": 64, "M": 1024, "N": 1000}, "bfloat16", {"dim": 1}))
    if name == "layernorm":
        built.append(kind.build({"M": 8, "N": 65536}, "bfloat16", {}))
    return built


@pytest.mark.parametrize("name", TYPES)
def test_starter_compiles_for_every_architecture_without_spills(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = launches_of(name, demanding_workloads(name), tmp_path)
    assert len({function for function, _ in launches}) == len(
        re.findall(r"^def \w+_kernel", source_of(name), re.M)
    )
    for function, bound in launches:
        for arch in ARCHS:
            kernel = compile_launch(function, bound, arch)
            assert spilled_bytes(kernel.asm["cubin"], tmp_path) == 0, f"{function.__name__} on sm_{arch}"


@pytest.mark.parametrize("name", TYPES)
def test_long_rows_take_no_giant_blocks_and_offsets_are_64_bits_wide(name: str, tmp_path: Path) -> None:
    kind = kernel_type(name)
    for function, bound in launches_of(name, [kind.build({"M": 3, "N": 2**31 - 5}, "float16", {})], tmp_path):
        blocks = [bound[n] for n in function.arg_names if n in ("BLOCK", "ROWS", "ACROSS", "ALONG")]
        assert torch.Size(blocks).numel() <= 16384
        ttir = compile_launch(function, {**bound, "num_warps": 4}, 90).asm["ttir"]
        offsets = re.findall(
            r"tt\.addptr .* : (?:tensor<[\dx]*)?!tt\.ptr<\w+>.*?, (?:tensor<[\dx]*)?(i\d+)", ttir
        )
        assert "i64" in offsets, ttir


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_starter_is_right_on_a_gpu(name: str, tmp_path: Path) -> None:
    kind, module = kernel_type(name), load(name, tmp_path)
    scope = Scope(kernel_type=kind, workloads=kind.workloads["cuda"], dtypes=kind.dtypes)
    domain = Domain(dtypes=kind.dtypes, values={})
    cases = [case for stage in STAGES for case in cases_of(stage, scope, domain)]
    compile_ahead(module.kernel_fn, (case.workload for case in cases))
    for case in cases:
        args = make_inputs(kind, case.workload, 31, "cuda")
        outputs = module.kernel_fn(**args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outcome = check_values(outputs, expect(kind, case.workload, args), kind, case.workload)
        assert not outcome.problem, f"{case.workload.label} {case.workload.dtype}: {outcome.problem}"


@pytest.mark.gpu
def test_starters_reach_past_two_to_the_31_elements_on_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free GPU memory")
    M, N = 2**20 + 3, 2**11 + 8
    x = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    weight, last = torch.ones(N, device="cuda", dtype=torch.bfloat16), slice(-4, None)
    made = {
        "activation": ({"x": x, "kind": "silu"}, {"x": x[last], "kind": "silu"}),
        "rmsnorm": ({"x": x, "weight": weight, "eps": 1e-6}, {"x": x[last], "weight": weight, "eps": 1e-6}),
        "softmax": ({"x": x}, {"x": x[last]}),
    }
    for name, (whole, tail) in made.items():
        output = load(name, tmp_path).kernel_fn(**whole)[last]
        exact = kernel_type(name).oracle(
            **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in tail.items()}
        )
        torch.testing.assert_close(output.double(), exact[0], atol=1e-6, rtol=1e-2)
