"""The source half of every package: accepted by the official builder's parser, and its benchmark judges what it times."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import pytest
import tomlkit
import torch
from kernels import Benchmark
from kernels._rust import Build

from autokernel_hf import contract
from autokernel_hf.kernels import backends, kernel_types
from autokernel_hf.sources import source_files
from tests.package_factory import candidate

ARCHS = {"cuda": ("8.0", "9.0a", "9.0+PTX"), "cpp": ("x86-64-v2", "x86-64-v3"), "triton": ()}
EVERY = [(name, backend) for name in sorted(kernel_types()) for backend in backends(name)]


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_every_starters_sources_are_accepted_and_name_the_files_that_are_there(
    name: str, backend: str, tmp_path: Path
) -> None:
    source = candidate(name, backend)
    files = source_files(
        source, name=f"my-{name.replace('_', '-')}", version=2, license="MIT", archs=ARCHS[backend]
    )
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        if path.endswith(".py"):
            ast.parse(text)
    Build.open(tmp_path)
    description = tomlkit.parse(files["build.toml"]).unwrap()
    assert (description["general"]["version"], description["general"]["edition"]) == (2, 5)
    parts = [description.get("torch", {}), *description.get("kernel", {}).values()]
    listed = {path for part in parts for path in part.get("src", [])}
    assert {path for path in listed if path not in files} == set()
    # Every source that ships is built; what is only included is listed or named by what includes it.
    for path in files:
        if path.startswith("src/") and path not in listed:
            assert any(Path(path).name in files[other] for other in listed), path
    package = f"torch-ext/my_{name}"
    assert f"{package}/__init__.py" in files
    assert f"{package}/_ops.py" not in files  # kernel-builder writes this one
    if backend == "triton":
        assert files[f"{package}/op.py"] == source.source
        assert {f"{package}/configs.py", f"{package}/configs.json"} <= set(files)
        assert description["torch-noarch"]["pyext"] == ["py", "json"]
    else:
        suffix = {"cuda": "cu", "cpp": "cpp"}[backend]
        assert files[f"src/{name}.{suffix}"] == source.source
    if backend == "cuda":
        # PTX is left out: what kernel-builder makes of +PTX here is not known.
        assert description["kernel"][name]["cuda-capabilities"] == ["8.0", "9.0a", "9.0"]


@pytest.mark.parametrize("name", [name for name, backend in EVERY if backend == "cpp"])
def test_a_benchmark_times_what_it_says_and_refuses_a_wrong_kernel(name: str) -> None:
    kernel_type = kernel_types()[name]
    source = candidate(name, "cpp")
    text = source_files(source, name="b", version=1, license="MIT", archs=())[
        f"benchmarks/benchmark_{name}.py"
    ]
    scope: dict[str, object] = {}
    exec(compile(text, "benchmark.py", "exec"), scope)
    (made,) = [
        v for v in scope.values() if isinstance(v, type) and issubclass(v, Benchmark) and v is not Benchmark
    ]

    def right(**args: object) -> object:
        outputs = kernel_type.reference(**args)
        return outputs if len(outputs) > 1 else outputs[0]

    def wrong(**args: object) -> object:
        outputs = tuple(o * 1.5 + 0.5 for o in kernel_type.reference(**args))
        return outputs if len(outputs) > 1 else outputs[0]

    assert contract.check(source, kernel_type).dtypes
    for function, passes in ((right, True), (wrong, False)):
        bench = made()
        bench.device = "cpu"
        bench.kernel = types.SimpleNamespace(**{name: function})
        torch.manual_seed(0)
        bench.setup_0()  # type: ignore[attr-defined]
        bench.benchmark_0()  # type: ignore[attr-defined]
        if passes:
            wanted = bench.verify_0()  # type: ignore[attr-defined]
            assert torch.equal(wanted, kernel_type.reference(**bench.args)[0])  # type: ignore[attr-defined]
        else:
            with pytest.raises(RuntimeError, match="differ"):
                bench.verify_0()  # type: ignore[attr-defined]
