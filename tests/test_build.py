"""Building candidates: errors, the cache, what ends up in a library, and what compiles without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import kernel_abi_check
import pytest
import torch

from autokernel_hf import build, cache, native, toolchain
from autokernel_hf.errors import (
    AutokernelError,
    CandidateError,
    CompileError,
    PackageError,
    ToolMissingError,
    UsageError,
)
from autokernel_hf.records import Built, Candidate
from tests import build_candidates as sources
from tests.build_candidates import expected_rmsnorm, loaded, made, operator

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


@pytest.fixture(scope="module")
def rmsnorm() -> ModuleType:
    return loaded("rmsnorm", sources.RMSNORM_CPP)


# --- errors of candidates -----------------------------------------------------------------------------------------


def cpp_error(before: str, after: str) -> str:
    assert before in sources.RMSNORM_CPP
    with pytest.raises((CompileError, CandidateError)) as caught:
        made("rmsnorm", "cpp", sources.RMSNORM_CPP.replace(before, after))
    return str(caught.value)


def test_compile_error_shows_the_candidates_line_once() -> None:
    text = cpp_error("double sum = 0;", "dooble sum = 0;")
    number = sources.RMSNORM_CPP[: sources.RMSNORM_CPP.index("double sum")].count("\n") + 1
    assert f"kernel.cpp:{number}: error: 'dooble' was not declared" in text
    assert f"{number} |     dooble sum = 0;" in text
    assert text.count("'dooble'") == 1 and "unit.cpp" not in text and str(cache.cache_root()) not in text


def test_wrong_launcher_is_told_with_what_it_should_be() -> None:
    text = cpp_error("double eps, double offset", "float eps, double offset")
    assert (
        "another signature than the schema" in text
        and "double eps, double offset, const AkTensor *out" in text
    )
    text = cpp_error('extern "C" int rmsnorm(', "static void helper(")
    assert "defines no launcher rmsnorm" in text
    body = sources.RMSNORM_CPP
    declared = body[: body.index(" {\n", body.index('extern "C"'))] + ";\n"
    with pytest.raises(CandidateError, match="defines no launcher rmsnorm"):
        made("rmsnorm", "cpp", declared)


def test_nothing_outside_of_the_standard_libraries_can_be_called() -> None:
    text = cpp_error("double sum = 0;", "double sum = cblas_sdot(1);")
    assert "cblas_sdot" in text
    source = sources.RMSNORM_CPP.replace("double sum = 0;", "double sum = cblas_sdot(1);").replace(
        "#include <math.h>", '#include <math.h>\nextern "C" double cblas_sdot(int);'
    )
    with pytest.raises(CompileError, match="cblas_sdot is neither defined here nor part of"):
        made("rmsnorm", "cpp", source)


def test_static_initializers_are_refused() -> None:
    assert "initialized when the library is loaded" in cpp_error(
        "#include <math.h>", "#include <math.h>\n#include <iostream>"
    )


@pytest.mark.parametrize(
    ("kernel_type", "source", "message"),
    [
        (
            "rmsnorm",
            sources.RMSNORM_CPP.replace("// kernel_type: rmsnorm", "//"),
            "does not name its kernel type",
        ),
        ("layernorm", sources.RMSNORM_CPP, "says it is a rmsnorm; it should be a layernorm"),
        ("rmsnorm", sources.RMSNORM_CPP.replace("dtype=float32", "dtype=float12"), "lists the dtype float12"),
        ("rmsnorm", sources.RMSNORM_CPP.replace("dtype=float32", "eps=1"), "cannot be narrowed by eps"),
        ("rmsnorm", sources.RMSNORM_CPP.replace("dtype=float32", "dtype"), "cannot be read"),
        ("rmsnorm", sources.RMSNORM_CPP.replace("dtype=float32", "dtype="), "lists no value for dtype"),
        (
            "reduce",
            sources.REDUCE_PROBE_CPP.replace("\n", "\n// supports: op=avg\n", 1),
            "not one of its words",
        ),
    ],
)
def test_broken_headers_are_candidate_errors(kernel_type: str, source: str, message: str) -> None:
    with pytest.raises(CandidateError, match=message):
        made(kernel_type, "cpp", source)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('KERNEL_TYPE = "rmsnorm"', "", "does not name its kernel type"),
        ('KERNEL_TYPE = "rmsnorm"', 'KERNEL_TYPE = "softmax"', "says it is a softmax"),
        ("import torch\n", "import torch\nimport os\n", "Line 7: a candidate may not import os"),
        (
            "import torch\n",
            "import torch\nfrom torch.utils import data\nfrom . import x\n",
            "may not import .",
        ),
        ("    shape = x.shape", "    import subprocess\n    shape = x.shape", "may not import subprocess"),
        ("@triton.jit", "@triton.autotune(configs=[], key=[])\n@triton.jit", "autotune is not allowed"),
        ("offset=0.0):", "offset=1.0):", "another signature than the schema"),
        ("def kernel_fn(x, weight, eps", "def kernel_fn(weight, x, eps", "another signature than the schema"),
        ("offset=0.0):", "offset=0.0, *, fast=True):", "the schema's arguments and no other"),
        ("def kernel_fn(", "def kernel(", "defines no kernel_fn"),
        ('{"dtype": ["float32", "float16"]}', "dict(dtype=[1])", "SUPPORTS is not a literal"),
        ('{"dtype": ["float32", "float16"]}', '{"dtype": "float32"}', "SUPPORTS cannot be read"),
        ("    shape = x.shape", "    shape = = x.shape", "is not Python: line 25"),
    ],
)
def test_triton_candidates_are_held_against_the_contract(before: str, after: str, message: str) -> None:
    assert before in sources.RMSNORM_TRITON
    with pytest.raises(CandidateError, match=message):
        made("rmsnorm", "triton", sources.RMSNORM_TRITON.replace(before, after, 1))


def test_missing_tools_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = (toolchain.gxx, toolchain.nvcc, toolchain.ninja)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ninja", None)
    try:
        for tool, remedy in zip(
            tools, ("apt-get install g", "CUDA toolkit", "pip install ninja"), strict=True
        ):
            tool.cache_clear()
            with pytest.raises(ToolMissingError, match=remedy):
                tool()
        with pytest.raises(ToolMissingError, match="binutils"):
            toolchain.need_binutils()
    finally:
        for tool in tools:
            tool.cache_clear()


def test_a_compiler_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(CompileError, match="did not end within"):
        toolchain.run(
            ["sh", "-c", "setsid -w sleep 61 & sh -c 'sleep 62 & wait' & wait"], cwd=tmp_path, timeout_s=0.5
        )
    assert time.monotonic() - started < 10
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    assert "sleep 62" not in left


# --- the cache ----------------------------------------------------------------------------------------------------


def test_the_same_content_is_built_once_and_other_content_elsewhere(rmsnorm: ModuleType) -> None:
    again = made("rmsnorm", "cpp", sources.RMSNORM_CPP)
    assert again.cached and Path(again.path).name == again.id == rmsnorm.__name__
    assert re.fullmatch(r"_ak_rmsnorm_cpp_[0-9a-f]{12}", again.id)
    other = made("rmsnorm", "triton", sources.RMSNORM_TRITON)
    more = made("rmsnorm", "triton", sources.RMSNORM_TRITON + "\n")
    assert len({again.id, other.id, more.id}) == 3
    assert sorted(p.name for p in Path(again.path).iterdir()) == [
        "__init__.py",
        f"{again.id}.abi3.so",
        "_ops.py",
        "layers.py",
    ]
    assert (Path(more.path) / "op.py").read_text() == sources.RMSNORM_TRITON + "\n"
    assert again.variant == f"torch-stable-abi211-cpu-{toolchain.machine()}-linux"
    assert other.variant == "torch-cuda"


BUILD = """
import sys
from autokernel_hf.build import build, load
from autokernel_hf.records import Candidate
built = build(Candidate(kernel_type="rmsnorm", backend="cpp", source=open(sys.argv[1]).read()))
import torch
y = load(built.path).rmsnorm(torch.ones(2, 4), torch.ones(4), 0.0)
assert torch.equal(y, torch.ones(2, 4)), y
print(built.id, built.cached)
"""


def start_build(source: str, folder: Path, cache_folder: Path) -> subprocess.Popen[str]:
    file = folder / "candidate.cpp"
    file.write_text(source)
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AUTOKERNEL_HF_CACHE": str(cache_folder)},
        start_new_session=True,
    )


def test_processes_that_build_the_same_at_once_all_get_it(tmp_path: Path) -> None:
    processes = [start_build(sources.RMSNORM_CPP, tmp_path, tmp_path / "cache") for _ in range(3)]
    results = [p.communicate(timeout=120) for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0], results
    said = [out.split() for out, _ in results]
    assert len({id_ for id_, _ in said}) == 1
    assert sorted(was_cached for _, was_cached in said) == ["False", "True", "True"]
    assert [p.name for p in (tmp_path / "cache" / "builds").iterdir()] == [said[0][0]]


def test_a_killed_build_leaves_nothing_that_hinders_the_next(tmp_path: Path) -> None:
    cache_folder = tmp_path / "cache"
    process = start_build(sources.RMSNORM_CPP, tmp_path, cache_folder)
    deadline = time.monotonic() + 60
    while not list(cache_folder.glob("builds/.*/*/build.ninja")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(cache_folder.glob("builds/.*")) and not list(cache_folder.glob("builds/_ak_*"))
    process = start_build(sources.RMSNORM_CPP, tmp_path, cache_folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.split()[1] == "False", err


def test_an_unwritable_cache_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AutokernelError, match="build cache .* cannot be written"):
        made("rmsnorm", "triton", sources.RMSNORM_TRITON)


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/ld: final link failed: No space left on device",
        "unit.s: Fatal error: can't write 3888 bytes to section .nv_fatbin of cuda.o: 'No space left on device'",
    ],
)
def test_a_full_disk_is_no_fault_of_the_candidate(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Sequence[str], **options: object) -> tuple[int, str]:
        return 1, f"[2/3] /usr/bin/g++ -c unit.cpp\n{line}\ncollect2: error: ld returned 1 exit status\n"

    made("rmsnorm", "cpp", sources.RMSNORM_CPP)  # the tools are looked for while they still run
    monkeypatch.setattr(toolchain, "run", run)
    with pytest.raises(AutokernelError, match="disk is full.*Free some space") as caught:
        made("rmsnorm", "cpp", sources.RMSNORM_CPP + "// on a full disk\n")
    assert not isinstance(caught.value, (CandidateError, CompileError))


def test_a_candidate_cannot_pretend_that_the_disk_is_full() -> None:
    with pytest.raises(CompileError):
        made("rmsnorm", "cpp", sources.RMSNORM_CPP + "#error No space left on device\n")


def test_what_killed_builds_left_is_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path))
    old, young = tmp_path / "builds" / ".a.12345678", tmp_path / "builds" / ".b.12345678"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert not cache.folder_once(tmp_path / "builds" / "c", lambda folder: None)
    assert not old.exists() and young.exists()


# --- the library --------------------------------------------------------------------------------------------------


def assert_fit_to_ship(built: Built, libraries: set[str]) -> None:
    """Loads on old systems, exports its module only, and names nothing of the machine that built it."""
    library = Path(built.path) / f"{built.id}.abi3.so"
    checker = kernel_abi_check.ObjectFile(str(library))
    assert not checker.check_manylinux("manylinux_2_28") and not checker.check_python_abi("3.9")
    dynamic = subprocess.run(
        ["readelf", "-dW", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert libraries <= needed and not any("gomp" in name for name in needed)
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in symbols.stdout.splitlines()] == [f"PyInit_{built.id}"]
    content = library.read_bytes()
    for secret in (
        Path.home(),
        Path(build.__file__).parent,
        Path(torch.__file__).parent,
        cache.cache_root(),
        tempfile.gettempdir(),
    ):
        assert str(secret).encode() not in content, secret


def test_library_is_fit_to_ship() -> None:
    built = made("gated_activation", "cpp", sources.MODERN_LIBRARY_CPP)
    assert_fit_to_ship(built, {"libtorch_cpu.so"})
    gate, up = torch.randn(2, 5), torch.randn(2, 5)
    y = build.load(built.path).gated_activation(gate, up)
    want = (gate.double().square() + 1).sqrt() + up
    torch.testing.assert_close(y.double(), want.sort(-1).values, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not build.cpu_levels(), reason="one build only on this processor")
def test_code_of_one_instruction_set_is_shut_off_from_the_others(tmp_path: Path) -> None:
    candidate = Candidate(kernel_type="gated_activation", backend="cpp", source=sources.MODERN_LIBRARY_CPP)
    job = build._job(candidate, (), "cpu")
    native.compile_objects(job, tmp_path)
    for level, own, foreign in (("v2", "%xmm", "%ymm"), ("v3", "%ymm", "%zmm"), ("v4", "%ymm", "%none")):
        file = tmp_path / f"{level}.o"
        symbols = subprocess.run(
            ["nm", "--extern-only", "--defined-only", file], capture_output=True, text=True
        ).stdout
        assert [line.split()[1:] for line in symbols.splitlines()] == [["T", f"ak_gated_activation_{level}"]]
        code = subprocess.run(["objdump", "-d", file], capture_output=True, text=True).stdout
        assert own in code and foreign not in code


ONE_RUNTIME = """
import os, sys
import torch
from autokernel_hf.build import load

torch.set_num_threads(2)
a = torch.randn(512, 512)
a @ a
torch.nn.functional.gelu(torch.randn(1 << 20))
before = len(os.listdir("/proc/self/task"))
module = load(sys.argv[1])
x, w = torch.randn(4096, 256), torch.rand(256)
for _ in range(5):
    module.rmsnorm(x, w, 1e-6)
    torch.nn.functional.gelu(x)
maps = open("/proc/self/maps").read()
runtimes = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line or "iomp5" in line}
print(before, len(os.listdir("/proc/self/task")), len(runtimes))
"""


def test_kernel_shares_torchs_openmp_threads(rmsnorm: ModuleType) -> None:
    """A second runtime would have a pool of its own: more threads than cores, each waiting actively for its turn."""
    path = made("rmsnorm", "cpp", sources.RMSNORM_CPP).path
    done = subprocess.run(
        [sys.executable, "-c", ONE_RUNTIME, path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    before, after, runtimes = map(int, done.stdout.split())
    assert after == before and runtimes == 1


HUB = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel

module = get_local_kernel(Path(sys.argv[1]), backend="cpu")
y = module.rmsnorm(torch.full((2, 4), 3.0), torch.ones(4), 0.0)
assert torch.allclose(y, torch.ones(2, 4)), y
layer = module.layers.RMSNorm
assert "autokernel_hf" not in sys.modules
print(module.__name__)
"""


def test_variant_loads_with_the_kernels_library_alone(tmp_path: Path) -> None:
    built = made("rmsnorm", "cpp", sources.RMSNORM_CPP)
    folder = tmp_path / "build" / built.variant
    shutil.copytree(built.path, folder)
    metadata = {
        "name": "rmsnorm",
        "id": built.id,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    done = subprocess.run(
        [sys.executable, "-B", "-c", HUB, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [built.id]
    assert build.load(folder) is build.load(built.path)  # one content, one module, wherever it lies


def test_loading_is_idempotent_and_writes_nothing(tmp_path: Path) -> None:
    built = made("rmsnorm", "triton", sources.RMSNORM_TRITON + "# written by nobody\n")
    module = build.load(built.path)
    assert build.load(Path(built.path)) is module and sys.modules[built.id] is module
    assert not list(Path(built.path).rglob("*.pyc"))
    with pytest.raises(PackageError, match="has no _ops.py"):
        build.load(tmp_path)


def test_a_variant_that_does_not_load_leaves_no_trace(tmp_path: Path) -> None:
    built = made("rmsnorm", "cpp", sources.RMSNORM_CPP)
    folder = tmp_path / "_ak_rmsnorm_cpp_000000000000"
    shutil.copytree(built.path, folder)
    with pytest.raises(PackageError, match="does not load"):
        build.load(folder)
    assert not [name for name in sys.modules if name.startswith(folder.name)]


# --- Triton -------------------------------------------------------------------------------------------------------

INTERPRETED = """
import sys
import torch
from autokernel_hf.build import load

module = load(sys.argv[1])
x, w = torch.randn(3, 5, 24), torch.rand(24)
want = torch.nn.functional.rms_norm(x, (24,), 0.5 + w, 1e-5)
torch.testing.assert_close(module.rmsnorm(x, w, 1e-5, 0.5), want)
for suffix in ("", "_no_grad"):
    op = getattr(getattr(torch.ops, module.__name__), "rmsnorm" + suffix).default
    torch.library.opcheck(op, (x.transpose(0, 1), w, 1e-5))
compiled = torch.compile(module.rmsnorm, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    torch.testing.assert_close(compiled(x, w, 1e-5, 0.5), want)
y = compiled(x.requires_grad_(), w, 1e-5)
for y in (y, module.rmsnorm(x, w, 1e-5)):
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "has no backward" in str(error), error
    else:
        raise AssertionError("a gradient came out")
for bad, kind in (((x, w[:3], 1e-5), RuntimeError), ((x.bfloat16(), w, 1e-5), NotImplementedError)):
    try:
        module.rmsnorm(*bad)
    except kind as error:
        print(error)
"""


def test_triton_candidate_is_an_operator_under_the_interpreter() -> None:
    built = made("rmsnorm", "triton", sources.RMSNORM_TRITON)
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, built.path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "weight has shape (3,), which does not fit (N)" in done.stdout
    assert "bfloat16 is outside of this kernel's domain" in done.stdout


def triton_report(source: str, arch: str) -> object:
    return build.compile_only(Candidate(kernel_type="rmsnorm", backend="triton", source=source), arch)


def test_triton_candidate_compiles_without_a_gpu() -> None:
    report = triton_report(sources.RMSNORM_TRITON, "sm_90")
    assert report.arch == "sm_90"  # type: ignore[attr-defined]
    assert 8 <= report.registers <= 255 and report.spill_bytes == 0  # type: ignore[attr-defined]
    assert 0 < report.shared_bytes < 1024 and "row_kernel: 4 warps" in report.log  # type: ignore[attr-defined]
    more = triton_report(sources.RMSNORM_TRITON.replace("WARPS = 4", "WARPS = 8"), "sm_80")
    assert more.shared_bytes == 2 * report.shared_bytes and "8 warps" in more.log  # type: ignore[attr-defined]


def test_triton_compile_error_shows_the_candidates_line() -> None:
    with pytest.raises(CompileError) as caught:
        triton_report(sources.RMSNORM_TRITON.replace("tl.rsqrt(", "tl.rsquirt("), "sm_90")
    number = sources.RMSNORM_TRITON[: sources.RMSNORM_TRITON.index("tl.rsqrt(")].count("\n") + 1
    assert f"kernel.py:{number}: error:" in str(caught.value) and "rsquirt" in str(caught.value)
    assert f"{number} |     scale = tl.rsquirt(" in str(caught.value)


# --- CUDA, compiled but not run -----------------------------------------------------------------------------------


@needs_nvcc
def test_cuda_candidate_is_built_for_the_architectures_asked_for() -> None:
    archs = ("8.0", "9.0a", "10.0", "9.0+PTX")
    built = made("rmsnorm", "cuda", sources.RMSNORM_CU, archs=archs)
    assert built.archs == archs and re.fullmatch(r"torch-stable-abi211-cu\d+-\w+-linux", built.variant)
    assert 8 <= built.resources.registers <= 255  # type: ignore[operator]
    assert built.resources.spill_bytes == 0 and built.resources.shared_bytes == 32
    assert_fit_to_ship(
        built,
        {"libtorch_cpu.so", "libtorch_cuda.so", f"libcudart.so.{toolchain.nvcc().version.split('.')[0]}"},
    )
    content = (Path(built.path) / f"{built.id}.abi3.so").read_bytes()
    assert str(toolchain.cuda_home()).encode() not in content
    default = made("rmsnorm", "cuda", sources.RMSNORM_CU)
    assert default.archs == build.DEFAULT_CUDA_ARCHS and default.id != built.id


def test_an_architecture_that_the_compiler_does_not_know_is_told_with_a_remedy() -> None:
    said = (
        "[1/2] toolkit/bin/nvcc -O3 -c unit.cu\nFAILED: cuda.o\n"
        "nvcc fatal   : Unsupported gpu architecture 'compute_9999'\nninja: build stopped.\n"
    )
    error = toolchain.compile_error(said, "source", "kernel.cu")
    assert error.message == "nvcc itself refuses: Unsupported gpu architecture 'compute_9999'."
    assert "--list-gpu-code" in error.remedy
    with pytest.raises(CompileError, match=r"ended with status -6: LLVM ERROR: [^\n]*") as caught:
        triton_report(sources.RMSNORM_TRITON, "sm_20")
    assert "sm_20" in caught.value.remedy and "\n" not in caught.value.message


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_cuda_candidate_compiles_without_a_gpu(arch: str) -> None:
    report = build.compile_only(
        Candidate(kernel_type="rmsnorm", backend="cuda", source=sources.RMSNORM_CU), arch
    )
    assert report.arch == arch and report.shared_bytes == 32 and report.spill_bytes == 0
    assert report.registers and f"rows: {report.registers} registers" in report.log


@needs_nvcc
def test_cuda_compile_error_shows_the_candidates_line() -> None:
    source = sources.RMSNORM_CU.replace("float s = 0;", "floot s = 0;")
    number = source[: source.index("floot")].count("\n") + 1
    with pytest.raises(CompileError, match=rf"kernel.cu:{number}: error: identifier \"floot\" is undefined"):
        made("rmsnorm", "cuda", source)
    with pytest.raises(CompileError, match="uses too much shared data"):
        made("rmsnorm", "cuda", sources.RMSNORM_CU.replace("part[kThreads / 32]", "part[kThreads * 400]"))
    with pytest.raises(CandidateError, match="another signature than the schema"):
        made(
            "rmsnorm",
            "cuda",
            sources.RMSNORM_CU.replace(
                "eps, double offset, const AkTensor *out", "eps, float offset, const AkTensor *out"
            ),
        )


def test_cpp_candidate_is_compiled_for_one_instruction_set() -> None:
    candidate = Candidate(kernel_type="rmsnorm", backend="cpp", source=sources.RMSNORM_CPP)
    level = (build.cpu_levels() or ("",))[-1]
    if level:
        assert build.compile_only(candidate, level).arch == level
    with pytest.raises(UsageError, match="cannot be compiled for 'sm_90'"):
        build.compile_only(candidate, "sm_90")
    with pytest.raises(UsageError, match="'9.0' is not a CUDA architecture"):
        build.compile_only(
            Candidate(kernel_type="rmsnorm", backend="triton", source=sources.RMSNORM_TRITON), "9.0"
        )


# --- CUDA, run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuda_rmsnorm() -> ModuleType:
    return build.load(made("rmsnorm", "cuda", sources.RMSNORM_CU, device="cuda").path)


@pytest.mark.gpu
def test_cuda_kernel_is_right_on_the_gpu(cuda_rmsnorm: ModuleType) -> None:
    weight = torch.rand(512, device="cuda")
    for x in (
        torch.randn(6, 5, 512, device="cuda"),
        torch.randn(5, 6, 512, device="cuda").transpose(0, 1),
        torch.randn(6, 1024, device="cuda")[:, ::2],
    ):
        y = cuda_rmsnorm.rmsnorm(x, weight, 1e-5, 0.5)
        torch.testing.assert_close(y, expected_rmsnorm(x, weight, 1e-5, 0.5), rtol=1e-5, atol=1e-5)
        assert y.is_contiguous()
    assert cuda_rmsnorm.rmsnorm(torch.randn(0, 512, device="cuda"), weight, 1e-5).shape == (0, 512)
    torch.library.opcheck(
        operator(cuda_rmsnorm, "rmsnorm"), (torch.randn(3, 512, device="cuda"), weight, 1e-5)
    )


@pytest.mark.gpu
def test_cuda_errors_are_told_in_cudas_words(cuda_rmsnorm: ModuleType) -> None:
    x, weight = torch.randn(3, 8, device="cuda"), torch.rand(8, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA error: invalid (configuration argument|argument)"):
        cuda_rmsnorm.rmsnorm(x, weight, -1.0)
    with pytest.raises(RuntimeError, match="weight is on another device"):
        cuda_rmsnorm.rmsnorm(x, weight.cpu(), 1e-6)
    with pytest.raises(NotImplementedError):
        cuda_rmsnorm.rmsnorm(x.cpu(), weight.cpu(), 1e-6)
    torch.testing.assert_close(
        cuda_rmsnorm.rmsnorm(x, weight, 1e-6), expected_rmsnorm(x, weight, 1e-6), rtol=1e-5, atol=1e-5
    )


@pytest.mark.gpu
def test_cuda_kernel_runs_on_the_current_stream_and_in_a_graph(cuda_rmsnorm: ModuleType) -> None:
    x, weight = torch.randn(64, 512, device="cuda"), torch.rand(512, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # some 100 ms during which x still holds its old values
        x.fill_(2.0)
        y = cuda_rmsnorm.rmsnorm(x, weight, 0.0)
    side.synchronize()
    torch.testing.assert_close(y, weight.expand(64, 512), rtol=1e-5, atol=1e-5)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cuda_rmsnorm.rmsnorm(x, weight, 1e-6)
    x.copy_(torch.randn(64, 512, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, expected_rmsnorm(x, weight, 1e-6), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_cuda_kernel_compiles_whole(cuda_rmsnorm: ModuleType) -> None:
    x, weight = torch.randn(64, 512, device="cuda"), torch.rand(512, device="cuda")
    compiled = torch.compile(lambda x, w: cuda_rmsnorm.rmsnorm(x.sin(), w, 1e-6) * 2, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(x, weight), expected_rmsnorm(x.sin(), weight, 1e-6) * 2, rtol=1e-5, atol=1e-5
        )


@pytest.mark.gpu
def test_triton_kernel_runs_on_the_gpu() -> None:
    module = build.load(made("rmsnorm", "triton", sources.RMSNORM_TRITON).path)
    x, weight = torch.randn(64, 500, device="cuda"), torch.rand(500, device="cuda")
    torch.testing.assert_close(
        module.rmsnorm(x, weight, 1e-6), expected_rmsnorm(x, weight, 1e-6), rtol=1e-5, atol=1e-5
    )
    compiled = torch.compile(module.rmsnorm, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(x, weight, 1e-6), expected_rmsnorm(x, weight, 1e-6), rtol=1e-5, atol=1e-5
        )


@pytest.mark.gpu
def test_gpu_without_named_architectures_gets_its_own(cuda_rmsnorm: ModuleType) -> None:
    built = made("rmsnorm", "cuda", sources.RMSNORM_CU, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    assert built.archs == (f"{major}.{minor}{'a' if major >= 9 else ''}",)


@pytest.mark.gpu
def test_kernels_run_on_the_device_of_their_arguments(cuda_rmsnorm: ModuleType) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    triton_module = build.load(made("rmsnorm", "triton", sources.RMSNORM_TRITON).path)
    x, weight = torch.randn(4, 64, device="cuda:1"), torch.rand(64, device="cuda:1")
    for module in (cuda_rmsnorm, triton_module):
        y = module.rmsnorm(x, weight, 1e-6)
        assert y.device == x.device and torch.cuda.current_device() == 0
        torch.testing.assert_close(y, expected_rmsnorm(x, weight, 1e-6), rtol=1e-5, atol=1e-5)
