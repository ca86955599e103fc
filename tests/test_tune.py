"""Tuning changes a package's configuration and nothing else; what was found holds in a measurement of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel_hf import build as build_module
from autokernel_hf import evaluate, packages, tunables, tune
from autokernel_hf.build import build
from autokernel_hf.errors import PackageError, UsageError
from autokernel_hf.export_hf import stage, write_card
from autokernel_hf.kernels import kernel_types
from autokernel_hf.progress import Silent
from autokernel_hf.records import Candidate, DeviceInfo, Evaluation, Stages, Workload, WorkloadResult
from tests.package_factory import candidate, exported, hand_made

# A kernel whose answer tells which constants it was run with.
TELLING = """KERNEL_TYPE = "rmsnorm"
SUPPORTS = {"dtype": ["float32", "float16"]}
import torch
import triton
import triton.language as tl

TILE = 256  # tune(block): 128, 256, 512
WARPS = 4  # tune(launch): 2, 4, 8
DOUBLE = 2 * TILE


@triton.jit
def kernel(x, out, n, value: tl.constexpr, tile: tl.constexpr):
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 0 + value, mask=at < n)


def kernel_fn(x, weight, eps, offset=0.0):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = out.numel()
    kernel[(triton.cdiv(n, TILE),)](x.contiguous(), out, n, DOUBLE + WARPS, TILE)
    return out
"""


def telling() -> Candidate:
    return Candidate(kernel_type="rmsnorm", backend="triton", source=TELLING)


# --- configurations as data ---------------------------------------------------------------------------------------

CALL = """
import json, sys, torch
from autokernel_hf.build import load
kernel = load(sys.argv[1])
found = []
for shape, dtype in (((4, 8), "float32"), ((2, 2, 8), "float32"), ((4, 8), "float16"), ((5, 8), "float32")):
    x = torch.ones(shape, dtype=getattr(torch, dtype))
    found.append(kernel.rmsnorm(x, torch.ones(8, dtype=x.dtype), 1e-6).unique().tolist())
print(json.dumps(found))
"""


def answers(variant: Path) -> list[list[float]]:
    import os
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-B", "-c", CALL, str(variant)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[float]] = json.loads(done.stdout)
    return found


def test_a_configuration_is_data_for_its_device_and_shape_with_the_files_own_as_default(
    tmp_path: Path,
) -> None:
    plain = build(telling())
    own = 2.0 * 256 + 4
    assert answers(Path(plain.path)) == [[own]] * 4
    entries: list[dict[str, object]] = [
        {"device": "cpu", "dtype": "float32", "shapes": [[4, 8], [8]], "values": {"TILE": 128}},
        {"device": "cpu", "values": {"WARPS": 8}},
        {"device": "NVIDIA Nothing", "values": {"TILE": 512}},
    ]
    tuned = build(telling(), configs=entries)
    # Leading dimensions count as one; what is derived from a constant follows it.
    assert answers(Path(tuned.path)) == [[2.0 * 128 + 4], [2.0 * 128 + 4], [2.0 * 256 + 8], [2.0 * 256 + 8]]
    # All that differs is the data, and the name by which it is known.
    names = {path for path, _ in packages.files_of(Path(plain.path))}
    assert names == {path for path, _ in packages.files_of(Path(tuned.path))}
    for path in names - {"configs.json"}:
        before, after = ((Path(b.path) / path).read_text() for b in (plain, tuned))
        assert before.replace(plain.id, "ID") == after.replace(tuned.id, "ID"), path
    assert plain.id != tuned.id
    assert packages.configs(Path(tuned.path)) == entries


def test_a_configuration_of_a_constant_that_is_not_there_is_refused() -> None:
    bad = build(telling(), configs=[{"device": "cpu", "values": {"TILES": 1}}])
    with pytest.raises(ValueError, match=r"configs\.json names TILES"):
        build_module.load(bad.path)


# --- the search ---------------------------------------------------------------------------------------------------


class FakeJudge:
    """Times that follow from the constants: `gains` gives a shape's speed-up over the package's own."""

    gains: Any = None
    asked: list[dict[str, Any]] = []

    def __init__(self, kernel_type: str, backend: str, workloads: Sequence[Workload], **_: Any) -> None:
        self.workloads = workloads

    def __enter__(self) -> FakeJudge:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        values = tunables.values(candidate.source)
        self.asked.append(values)
        rows = []
        for workload in self.workloads:
            gain = type(self).gains(values, workload, len(self.asked))
            rows.append(
                WorkloadResult(
                    label=workload.label,
                    shape=workload.shape,
                    dtype=workload.dtype,
                    share=workload.share,
                    latency_us=10.0 / gain,
                    incumbent_us=10.0,
                    speedup_vs_incumbent=gain,
                    ci95_vs_incumbent=(gain - 0.02, gain + 0.02),
                )
            )
        stages = Stages(**dict.fromkeys(Stages.model_fields, "passed"))
        return Evaluation(status="passed", stages=stages, workloads=tuple(rows))


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> type[FakeJudge]:
    FakeJudge.asked = []
    monkeypatch.setattr(evaluate, "Judge", FakeJudge)
    return FakeJudge


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo(
        kind="cuda",
        name="NVIDIA Test",
        arch="sm_90",
        units=132,
        memory_bytes=1 << 36,
        torch="2.13.0",
        date="2026-02-03T04:05:06",
    )
    monkeypatch.setattr(tune, "device_info", lambda _: info)


def triton_package(folder: Path) -> Path:
    source = candidate("rmsnorm", "triton")
    built = build(source)
    package = stage(built, candidate=source, name="tri-norm", version=3, license="mit", out=folder)
    write_card(package, candidate=source, built=built)
    return Path(package.path)


def test_each_shape_gets_what_is_faster_there_and_the_rest_what_is_faster_on_the_whole(
    judge: type[FakeJudge], gpu: None, tmp_path: Path
) -> None:
    folder = triton_package(tmp_path / "here")
    before = {path: file.read_bytes() for path, file in packages.files_of(folder)}
    # Another tile is faster but for the first shape, where the package's own is best.
    first = kernel_types()["rmsnorm"].workloads["cuda"][0]
    judge.gains = lambda values, w, _: (
        1.0 if values["TILE"] == 2048 else 0.99 if w.label == first.label else 1.3
    )
    report = tune.tune(
        str(folder), device="cuda", max_experiments=6, out=tmp_path / "there", progress=Silent()
    )
    assert report.speedup > 1.15 and report.device == "NVIDIA Test"
    assert {c.status for c in report.configs} == {"passed"}
    count = len(kernel_types()["rmsnorm"].workloads["cuda"])
    assert len(report.shapes) == count - 1
    assert {path: file.read_bytes() for path, file in packages.files_of(folder)} == before
    changed = Path(str(report.package))
    assert changed == tmp_path / "there" / "tri-norm"
    assert packages.inspect(changed) == []
    old, new = packages.read_variants(folder)[0], packages.read_variants(changed)[0]
    assert (new.metadata.name, new.metadata.version, new.metadata.license) == ("tri-norm", 3, "mit")
    assert (new.path / "op.py").read_bytes() == (old.path / "op.py").read_bytes()
    entries = packages.configs(new.path)
    assert all(entry["device"] == "NVIDIA Test" for entry in entries)
    own = [e for e in entries if e.get("shapes") == [list(s.shape) for _, s in first.tensors]]
    assert own and own[0]["values"] == {}
    assert entries[-1].get("shapes") is None and entries[-1]["values"]["TILE"] != 2048
    card = (changed / "README.md").read_text()
    assert "by `configs.json`, on NVIDIA Test (1 shape and all other shapes)" in card
    # The sources for kernel-builder hold the same configuration.
    assert json.loads((changed / "torch-ext" / "tri_norm" / "configs.json").read_text())["configs"] == entries


def test_luck_in_the_search_does_not_get_into_the_package(
    judge: type[FakeJudge], gpu: None, tmp_path: Path
) -> None:
    judge.gains = lambda values, w, asked: 1.5 if asked <= 5 and values["TILE"] != 2048 else 1.0
    report = tune.tune(
        str(triton_package(tmp_path / "a")),
        device="cuda",
        max_experiments=6,
        out=tmp_path / "b",
        progress=Silent(),
    )
    assert max(c.speedup or 0 for c in report.configs) == pytest.approx(1.5)
    assert report.speedup == 1.0 and report.shapes == () and report.package is None
    assert report.best == tunables.values(candidate("rmsnorm", "triton").source)
    assert not (tmp_path / "b").exists()


def test_a_device_tuned_before_keeps_its_entries_when_another_is_tuned(
    judge: type[FakeJudge], gpu: None, tmp_path: Path
) -> None:
    source = candidate("rmsnorm", "triton")
    other: dict[str, object] = {"device": "NVIDIA Other", "values": {"TILE": 1024}}
    mine: dict[str, object] = {"device": "NVIDIA Test", "values": {"TILE": 1024}}
    package = stage(
        build(source, configs=[other, mine]), candidate=source, name="tri-norm", out=tmp_path / "a"
    )
    judge.gains = lambda values, w, _: 1.0 if values["TILE"] == 2048 else 1.3
    report = tune.tune(package.path, device="cuda", max_experiments=4, out=tmp_path / "b", progress=Silent())
    entries = packages.configs(packages.read_variants(Path(str(report.package)))[0].path)
    assert other in entries and mine not in entries
    assert [e["device"] for e in entries].count("NVIDIA Test") == 1


def test_a_compiled_kernel_is_built_again_with_the_best_constants(
    judge: type[FakeJudge], tmp_path: Path
) -> None:
    package = exported("rmsnorm", "cpp", tmp_path / "here")
    own = tunables.values(candidate("rmsnorm", "cpp").source)
    assert own, "the starter has no tunables"
    judge.gains = lambda values, w, _: 1.0 if values == own else 1.2
    report = tune.tune(
        package.path, device="cpu", max_experiments=3, out=tmp_path / "there", progress=Silent()
    )
    assert report.speedup == pytest.approx(1.2)
    changed = Path(str(report.package))
    source = (changed / "src" / "rmsnorm.cpp").read_text()
    assert tunables.values(source) == report.best != own
    assert tunables.substitute(source, own) == candidate("rmsnorm", "cpp").source
    assert packages.inspect(changed) == []


def test_what_cannot_be_tuned_is_told(
    tmp_path: Path, judge: type[FakeJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = triton_package(tmp_path / "a")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="runs on GPUs"):
            tune.tune(str(folder), progress=Silent())
    with pytest.raises(PackageError, match="ships no kernel source"):
        tune.tune(str(hand_made(tmp_path / "b")), progress=Silent())
    with pytest.raises(PackageError, match="Tuning acme/x runs its code"):
        tune.tune("acme/x", progress=Silent())
    with pytest.raises(UsageError, match="where the package itself is"):
        tune.tune(str(folder), out=tmp_path / "a", progress=Silent())
    from autokernel_hf.bundle import export_files

    bundle = export_files(
        [candidate("rmsnorm", "triton"), candidate("softmax", "triton")], "two", out=tmp_path
    )
    with pytest.raises(PackageError, match="several kernels: rmsnorm, softmax"):
        tune.tune(bundle.path, progress=Silent())
