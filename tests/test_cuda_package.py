"""CUDA packages, compiled here without a GPU: what they promise is in the file, and the file would load elsewhere."""

from __future__ import annotations

import logging
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from kernels._rust import Build

from autokernel_hf import hub, packages
from autokernel_hf.bundle import export_files
from autokernel_hf.check import check
from autokernel_hf.elf import dynamic, gpu_code
from autokernel_hf.records import Package
from tests.hub_server import HubServer
from tests.package_factory import candidate, exported

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists(), reason="no nvcc here"
)
ARCHS = ("8.0", "9.0a", "9.0+PTX")
KERNEL = "cross_entropy"  # the starter that nvcc compiles soonest


# --- what is in a fat binary --------------------------------------------------------------------------------------


def fat_binary(*entries: tuple[int, int, int]) -> bytes:
    """As nvcc writes it, with nothing in the entries: (kind, number of the architecture, flags)."""
    body = b"".join(
        struct.pack("<HHIQIIHHIIIQQQ", kind, 257, 64, 8, 0, 0, 8, 1, number, 0, 0, flags, 0, 0)
        + b"\x7fELF\0\0\0\0"
        for kind, number, flags in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_architectures_are_read_from_fat_binaries(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    first = fat_binary((2, 80, 0x11), (2, 90, 0x100011), (1, 90, 0x8011))
    file.write_bytes(
        b"noise" + first + b"\x50\xed\x55\xba" + b"more noise" * 9 + fat_binary((2, 100, 0x1200011))
    )
    code = gpu_code(file)
    assert code.machine == ("8.0", "9.0a", "10.0f") and code.ptx == ("9.0",)
    assert [code.runs(a) for a in ("8.0", "9.0a", "9.0", "9.0+PTX", "8.0+PTX")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    file.write_bytes(first[:40])
    assert gpu_code(file).machine == ()


# --- packages -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return exported(KERNEL, "cuda", tmp_path_factory.mktemp("packages"), archs=ARCHS)


@needs_nvcc
def test_metadata_tells_the_architectures_that_the_library_holds(package: Package) -> None:
    (variant,) = packages.read_variants(Path(package.path))
    assert variant.name.startswith("torch-stable-abi211-cu") and variant.metadata.backend.type == "cuda"
    assert variant.metadata.backend.archs == ARCHS
    (library,) = variant.libraries
    code = gpu_code(library)
    assert code.machine == ("8.0", "9.0", "9.0a")
    assert code.ptx == ("9.0",)
    build = Build.open(Path(package.path))
    assert build is not None


@needs_nvcc
def test_the_library_is_clean_for_old_systems_and_names_no_folder(package: Package) -> None:
    import kernel_abi_check

    (variant,) = packages.read_variants(Path(package.path))
    (library,) = variant.libraries
    checked = kernel_abi_check.ObjectFile(library)
    assert not checked.check_python_abi("3.9")
    assert not checked.check_manylinux("manylinux_2_28")
    assert dynamic(library).search_paths == ()
    # torch brings these; a library of our own beside them would be a second copy in the process.
    assert not [n for n in dynamic(library).needed if "stdc++" in n and "so.6" not in n]
    # Nothing but its entry point is seen from outside: no static of one kernel can be taken for that of another.
    defined = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in defined.splitlines()] == [f"PyInit_{variant.metadata.id}"]
    assert packages.private_strings(Path(package.path)) == []
    assert packages.inspect(Path(package.path)) == []


@needs_nvcc
@pytest.mark.parametrize("promised", ["10.0", "8.0+PTX"])
def test_an_architecture_that_is_promised_and_not_there_is_found(
    package: Package, promised: str, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(package.path, folder)
    metadata = next((folder / "build").glob("*/metadata.json"))
    metadata.write_text(metadata.read_text().replace('"8.0"', f'"{promised}"'))
    (problem,) = packages.inspect(folder)
    assert f"metadata promises {promised}, but there is no code for it" in problem
    assert "8.0, 9.0, 9.0a, 9.0 as PTX" in problem


@needs_nvcc
def test_a_bundle_of_cuda_and_triton_kernels_is_one_variant_with_both(tmp_path: Path) -> None:
    bundle = export_files(
        [candidate(KERNEL, "cuda"), candidate("softmax", "triton")], "mixed", archs=ARCHS, out=tmp_path
    )
    (variant,) = packages.read_variants(Path(bundle.path))
    assert variant.name.startswith("torch-stable-abi211-cu") and variant.metadata.backend.archs == ARCHS
    assert bundle.functions == (KERNEL, "softmax")
    assert (packages.part_of(variant.path, "softmax") / "op.py").read_text() == candidate(
        "softmax", "triton"
    ).source
    assert packages.inspect(Path(bundle.path)) == []


@needs_nvcc
def test_compiling_again_from_nothing_gives_the_same_bytes(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path / "another" / "cache"))
    again = exported(KERNEL, "cuda", tmp_path, archs=ARCHS)
    first, second = (
        {path: file.read_bytes() for path, file in packages.files_of(Path(p.path))} for p in (package, again)
    )
    assert {path for path in first if first[path] != second.get(path)} == set()
    assert first.keys() == second.keys()
    assert any(
        (tmp_path / "another" / "cache" / "builds").iterdir()
    )  # it was compiled, not taken from the cache


@needs_nvcc
def test_a_cuda_and_a_cpu_package_share_a_version_and_each_machine_gets_its_own(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the CUDA package would be loaded back")
    with HubServer() as server:
        for name, value in server.client_env(token=server.TOKEN).items():
            if name.startswith("HF_") or name == "NO_PROXY":
                monkeypatch.setenv(name, value)
        with caplog.at_level(logging.WARNING):
            published = hub.publish(package, "acme/test-loss")
        assert (
            not published.loaded
            and "No variant is for this machine: it has torch-stable-abi211-cu" in caplog.text
        )
        repo = server.kernel("acme/test-loss")
        (library,) = packages.read_variants(Path(package.path))[0].libraries
        path = library.relative_to(package.path).as_posix()
        assert repo.files("v1")[path] == library.read_bytes()
        assert repo.commits[repo.branches["v1"]].files[path].lfs
        looked = check("acme/test-loss")
        assert looked.problems == () and looked.functions == (KERNEL,)
        # The same kernel for CPUs, beside it.
        assert hub.publish(exported(KERNEL, "cpp", tmp_path), "acme/test-loss").loaded
        names = {p.split("/")[1] for p in repo.files("v1") if p.startswith("build/")}
        assert {packages.backend_of_variant(name) for name in names} == {"cpu", "cuda"}
        assert repo.files("v1")[path] == library.read_bytes()
