"""What is exported is what was judged, in the form that the Kernel Hub's own tools accept."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tomlkit
import torch
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

from autokernel_hf import packages
from autokernel_hf.build import build
from autokernel_hf.elf import dynamic
from autokernel_hf.errors import PackageError, UsageError
from autokernel_hf.export_hf import (
    _one_a_variant,
    check_license,
    chosen_name,
    name_of_model,
    package_name,
    refuse_foreign,
    stage,
    write_card,
)
from autokernel_hf.kernels import kernel_types
from autokernel_hf.kernels.base import make_inputs, upcast
from autokernel_hf.records import (
    Built,
    Candidate,
    DeviceInfo,
    Evaluation,
    Latency,
    ModelSpec,
    OutputError,
    Package,
    Profile,
    PulledModel,
    Resources,
    Speedup,
    SpeedupInterval,
    Stages,
    Verification,
    WorkloadResult,
)
from autokernel_hf.runs import RunSettings
from autokernel_hf.sources import small_workloads, standalone
from autokernel_hf.variant import Domain
from tests.package_factory import candidate, exported

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists(), reason="no nvcc here"
)


@pytest.fixture(scope="module")
def built() -> Built:
    return build(candidate("rmsnorm", "cpp"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return exported("rmsnorm", "cpp", tmp_path_factory.mktemp("packages"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in packages.files_of(folder)}


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "kernel_type", "name"),
    [
        ("gpt2", "activation", "gpt2-activation"),
        ("Llama-3.2_1B", "add_norm", "llama-3-2-1b-add-norm"),
        ("7b", "rmsnorm", "k-7b-rmsnorm"),
        ("Café  Modèle!", None, "cafe-modele"),
        ("--x--", "softmax", "x-softmax"),
        ("ok", None, "ok"),
    ],
)
def test_any_input_becomes_a_name_that_the_hub_takes(base: str, kernel_type: str | None, name: str) -> None:
    assert package_name(base, kernel_type) == name
    assert packages.is_name(name)


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ("openai-community/gpt2", "gpt2"),
        ("模型", "model"),
        ("./", "model"),
        ("my/7b", "k-7b"),
        ("net.py:Net", "net-py-net"),
        ("a" * 200, "a" * 50),
    ],
)
def test_a_models_packages_always_have_a_name(model: str, stem: str) -> None:
    assert name_of_model(model) == stem
    assert packages.is_name(package_name(name_of_model(model), max(kernel_types(), key=len)))


@pytest.mark.parametrize("license", ["", "a", 'MIT"\nx = "', "all rights reserved"])
def test_what_is_no_licence_is_refused(license: str) -> None:
    with pytest.raises(UsageError, match="no licence's identifier"):
        check_license(license)
    check_license("GPL-2.0+")


@pytest.mark.parametrize("base", ["", "模型", "x", "!!!", "a" * 200])
def test_a_name_that_cannot_be_made_is_refused(base: str) -> None:
    with pytest.raises(UsageError, match="cannot be made a kernel's name"):
        package_name(base, None)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        ("torch-cuda", "cuda"),
        ("torch-stable-abi211-cpu-x86_64-linux", "cpu"),
        ("torch-stable-abi211-cu130-x86_64-linux", "cuda"),
        ("torch213-cxx11-rocm63-x86_64-linux", "rocm"),
    ],
)
def test_variant_names_are_read(variant: str, backend: str) -> None:
    assert packages.backend_of_variant(variant) == backend


@pytest.mark.parametrize(
    "variant",
    ["torch-foo", "torch213-cxx11-cu13-x86_64-linux", "build", "torch-universal", "torch-cuda-x86_64-linux"],
)
def test_variant_names_that_load_nowhere_are_not_taken(variant: str) -> None:
    assert not packages.is_variant(variant)


# --- what is inside -----------------------------------------------------------------------------------------------


def test_the_variant_is_byte_for_byte_the_judged_folder(built: Built, package: Package) -> None:
    shipped = contents(Path(package.path) / "build" / built.variant)
    metadata = shipped.pop("metadata.json")
    assert shipped == contents(Path(built.path))
    assert f"{built.id}.abi3.so" in shipped
    assert f'"id": "{built.id}"'.encode() in metadata
    assert package.functions == ("rmsnorm",)
    assert package.layers == ("RMSNorm", "TorchRMSNorm", "GemmaRMSNorm", "T5LayerNorm")


def test_kernels_own_parsers_accept_metadata_digest_and_build_description(package: Package) -> None:
    folder = Path(package.path)
    for variant in packages.read_variants(folder):
        metadata = Metadata.read_from_file(variant.path / "metadata.json")
        assert (str(metadata.name), metadata.version) == (package.name, package.version)
        assert metadata.digest.files == Digest.hash_variant(DigestAlgorithm.SHA256, variant.path).files
    Build.open(folder)


def test_the_same_export_gives_the_same_bytes(package: Package, tmp_path: Path) -> None:
    again = exported("rmsnorm", "cpp", tmp_path)
    assert contents(Path(again.path)) == contents(Path(package.path))
    assert {p.stat().st_mode & 0o777 for p in Path(again.path).rglob("*") if p.is_file()} == {0o644}


def test_a_triton_kernel_ships_for_gpus_and_for_a_cpu_only_on_request(tmp_path: Path) -> None:
    source = candidate("rmsnorm", "triton")
    made = build(source)
    plain = stage(made, candidate=source, name="tri-norm", out=tmp_path)
    assert plain.variants == ("torch-cuda", "torch-rocm")
    text = write_card(plain, candidate=source, built=made).read_text()
    assert "the variants hold the source." in text and "judged." not in text, "nobody has judged it"
    Build.open(Path(plain.path))
    for variant in packages.read_variants(Path(plain.path)):
        assert variant.metadata.backend.type == variant.name.removeprefix("torch-")
        assert (variant.path / "op.py").read_text() == source.source
    testing = stage(made, candidate=source, name="tri-norm", out=tmp_path, interpreter=True)
    assert testing.variants == ("torch-cpu", "torch-cuda", "torch-rocm")
    nvidia = source.model_copy(update={"source": source.source + "\n# tl.inline_asm_elementwise\n"})
    assert stage(build(nvidia), candidate=nvidia, name="tri-norm", out=tmp_path).variants == ("torch-cuda",)


@needs_nvcc
def test_a_cuda_package_says_truly_which_architectures_it_holds(tmp_path: Path) -> None:
    package = exported("rmsnorm", "cuda", tmp_path, archs=("8.0", "9.0a"))
    (variant,) = packages.read_variants(Path(package.path))
    assert variant.metadata.backend.archs == ("8.0", "9.0a")
    assert packages.inspect(Path(package.path)) == []
    (library,) = variant.libraries
    assert dynamic(library).search_paths == ()
    assert any(name.startswith("libcudart.so") for name in dynamic(library).needed)
    card = (Path(package.path) / "README.md").read_text()
    assert "8.0: compiled, not run; 9.0a: compiled, not run" in card
    Build.open(Path(package.path))


def test_of_two_builds_of_a_variant_the_one_for_all_architectures_ships() -> None:
    def one(id: str, *archs: str) -> Built:
        return Built(
            id=id,
            kernel_type="rmsnorm",
            backend="cuda",
            path="",
            variant="torch-stable-abi211-cu130-x86_64-linux",
            archs=archs,
            resources=Resources(),
            seconds=0,
            cached=False,
        )

    assert _one_a_variant([one("a", "9.0a"), one("b", "8.0", "9.0a")])[0].id == "b"
    with pytest.raises(PackageError, match=r"serves all of 8\.0, 9\.0a"):
        _one_a_variant([one("a", "9.0a"), one("b", "8.0")])


# --- what is refused ----------------------------------------------------------------------------------------------


def with_library(built: Built, folder: Path, source: str, *flags: str) -> Built:
    """The build with its library exchanged for one compiled in another way."""
    copy = folder / built.id
    shutil.copytree(built.path, copy)
    (folder / "bad.cpp").write_text(source)
    library = copy / f"{built.id}.abi3.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", str(folder / "bad.cpp"), "-o", str(library), *flags], check=True
    )
    return built.model_copy(update={"path": str(copy)})


def test_a_library_that_needs_a_newer_system_is_refused(built: Built, tmp_path: Path) -> None:
    newer = 'extern "C" double pow(double, double); extern "C" double f(double x) { return pow(x, x); }'
    bad = with_library(built, tmp_path, newer, "-lm")
    with pytest.raises(PackageError, match="manylinux_2_28"):
        stage(bad, candidate=candidate("rmsnorm", "cpp"), name="bad-norm", out=tmp_path / "out")
    assert not (tmp_path / "out" / "bad-norm").exists()


def test_a_library_that_searches_this_machines_folders_is_refused(built: Built, tmp_path: Path) -> None:
    bad = with_library(built, tmp_path, "int f;", "-Wl,-rpath,/opt/builder/lib")
    with pytest.raises(PackageError, match="/opt/builder/lib"):
        stage(bad, candidate=candidate("rmsnorm", "cpp"), name="bad-norm", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("comment", "what"),
    [
        ("see /home/ada/kernels", "/home/ada"),
        (f"built under {Path.home()}/x", "local path"),
        ("token hf_" + "a" * 34, "Hugging Face token"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "private key"),
    ],
)
def test_what_is_private_is_not_packed(comment: str, what: str, tmp_path: Path) -> None:
    plain = candidate("rmsnorm", "triton")
    telling = plain.model_copy(update={"source": plain.source + f"\n# {comment}\n"})
    with pytest.raises(PackageError, match=what):
        stage(build(telling), candidate=telling, name="leaky", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_private_strings_are_found_in_libraries_and_common_words_are_not(
    built: Built, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packages.private_strings(Path(package.path)) == []
    with_library(built, tmp_path, 'const char *where = "/home/ada/src/kernel.cpp";')
    assert any("/home/ada" in found for found in packages.private_strings(tmp_path / built.id))
    monkeypatch.setenv("HF_TOKEN", "my-secret-token")
    (tmp_path / built.id / "note.txt").write_text("my-secret-token")
    assert "note.txt holds your Hub token" in packages.private_strings(tmp_path / built.id)


@pytest.mark.parametrize("version", [0, -1, 10_000, 2**63])
def test_a_version_that_no_caller_would_write_is_refused(version: int, built: Built, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no version of a kernel: .* from 1 to 9999"):
        stage(built, candidate=candidate("rmsnorm", "cpp"), name="fast-norms", version=version, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_becomes_another_ones_does_not_overwrite_it(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    out = Path(package.path).parent
    typed = package.name.replace("-", "_").title()  # Fast_Norms for fast-norms
    with pytest.raises(UsageError, match=f"becomes '{package.name}' .* is there already") as refusal:
        chosen_name(typed, None, out)
    assert f"--name {package.name} " in refusal.value.remedy
    assert chosen_name(package.name, None, out) == package.name
    with caplog.at_level("INFO", logger="autokernel_hf"):
        assert chosen_name("Other_Name", "rmsnorm", out) == "other-name-rmsnorm"
    assert "The package is called other-name-rmsnorm" in caplog.text


def test_another_kernels_package_is_not_overwritten_and_the_own_one_is_told(
    built: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(version: int) -> None:
        stage(built, candidate=candidate("rmsnorm", "cpp"), name="mine", version=version, out=tmp_path)

    with caplog.at_level("INFO", logger="autokernel_hf"):
        make(1)
        make(1)
        assert "replaces" not in caplog.text, "the same again"
        make(2)
    assert f"replaces what was there: {built.id} (version 1)" in caplog.text
    with pytest.raises(PackageError, match=r"a package of .*, and not of softmax"):
        refuse_foreign(tmp_path / "mine", ["softmax"])


def test_a_folder_that_is_no_package_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    source = candidate("rmsnorm", "triton")
    with pytest.raises(PackageError, match="in the way"):
        stage(build(source), candidate=source, name="thesis", out=tmp_path)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"


def test_tampering_links_and_wrong_metadata_are_seen_without_running(
    package: Package, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(package.path, folder)
    assert packages.inspect(folder) == []
    variant = folder / "build" / package.variants[0]
    (variant / "_ops.py").write_text("import os")
    (variant / "extra.py").write_text("")
    (variant / "link.py").symlink_to("/etc/hostname")
    problems = "\n".join(packages.inspect(folder))
    assert "_ops.py is not what was built" in problems
    assert "extra.py is not in the digest" in problems
    assert "link.py leads out of the package" in problems
    metadata = variant / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"type": "cpu"', '"type": "cuda"'))
    assert "the folder's name says otherwise" in "\n".join(packages.inspect(folder))
    metadata.write_text("{}")
    assert "metadata.json" in "\n".join(packages.inspect(folder))


# --- the card -----------------------------------------------------------------------------------------------------

DEVICE = DeviceInfo(
    kind="cpu",
    name="Test CPU",
    arch="x86-64-v4",
    units=2,
    memory_bytes=1 << 33,
    torch="2.13.0",
    date="2026-02-03T04:05:06",
)
EVALUATION = Evaluation(
    status="passed",
    stages=Stages(smoke="passed", shapes="passed", numerics="passed", determinism="passed", edges="passed"),
    workloads=(
        WorkloadResult(
            label="w",
            shape="1024x768,768",
            dtype="float32",
            latency_us=123.4,
            baseline="F.rms_norm",
            baseline_us=246.8,
            speedup=2.0,
            ci95=(1.97, 2.04),
            speedup_vs_eager=5.5,
            ci95_vs_eager=(5.3, 5.7),
            peers_us={"eager": 678.7, "F.rms_norm": 246.8},
            gb_s=51.3,
            pct_peak=81.0,
            max_abs_error=3.1e-7,
            error_ratio=0.9,
        ),
    ),
    confirmed=True,
)
MODEL = PulledModel(
    id="openai-community/gpt2",
    revision="607a30d783dfa663caf39e06633721c8d4cfcd7e",
    path=None,
    architecture="GPT2LMHeadModel",
    parameters=124,
    weights="trained",
    dtype="float32",
    input_shape=(1, 1024),
)
PROFILE = Profile(
    spec=ModelSpec(model="gpt2"), model=MODEL, device=DEVICE, total_ms=400.0, sites=(), other_share=0.5
)
VERIFICATION = Verification(
    passed=True,
    kernel_calls={"rmsnorm": 25},
    latency_ms=Latency(eager=412.5, eager_kernels=377.1, compile=391.0),
    speedup=Speedup(vs_eager=1.094, vs_compile=0.98),
    speedup_ci95=SpeedupInterval(vs_eager=(1.08, 1.11), vs_compile=(0.97, 0.99)),
    error=OutputError(max_abs=1.5e-5, ratio_to_eager=1.01, top1_agreement=1.0, kl=2e-9),
    notes=("compile_kernels was not measured: the budget ended",),
    device=DEVICE,
)


def test_the_cards_picture_shows_every_contender_and_is_the_same_each_time(
    built: Built, tmp_path: Path
) -> None:
    source = candidate("rmsnorm", "cpp")
    pictures = []
    for place in ("first", "second"):
        package = stage(built, candidate=source, name="card-norm", out=tmp_path / place)
        text = write_card(
            package, candidate=source, built=built, evaluation=EVALUATION, profile=PROFILE
        ).read_text()
        assert "(media/measured.svg)" in text
        pictures.append((Path(package.path) / "media" / "measured.svg").read_bytes())
    assert pictures[0] == pictures[1]
    picture = pictures[0].decode()
    # 678.7 us of eager torch over 246.8 us of the fused op; the kernel's own ratio is the paired one.
    for shown in ("1024x768,768 float32", "this kernel", "F.rms_norm", "5.50", "2.75"):
        assert shown in picture, shown


def test_a_card_without_figures_has_no_picture(built: Built, tmp_path: Path) -> None:
    source = candidate("rmsnorm", "cpp")
    package = stage(built, candidate=source, name="card-norm", out=tmp_path)
    assert "measured.svg" not in write_card(package, candidate=source, built=built).read_text()
    assert not (Path(package.path) / "media").exists()


def test_the_card_tells_the_records_and_nothing_else(built: Built, tmp_path: Path) -> None:
    source = candidate("rmsnorm", "cpp")
    package = stage(built, candidate=source, name="card-norm", license="MIT", out=tmp_path)
    text = write_card(
        package,
        candidate=source,
        built=built,
        evaluation=EVALUATION,
        verification=VERIFICATION,
        profile=PROFILE,
        run_settings=RunSettings(spec=PROFILE.spec, top=2, max_experiments=8),
        commit="abc123",
    ).read_text()
    for told in (
        "license: mit",
        "| 1024x768,768 | float32 | 123 µs | F.rms_norm | 247 µs | 2.00× (1.97–2.04) | 5.50× (5.30–5.70) | 51.3 GB/s, 81 % of peak |",
        "F.rms_norm 247 µs, eager 679 µs",
        "| eager | 412.5 |",
        "| eager, with the kernels | 377.1 |",
        "against eager: 1.09× (1.08–1.11)",
        "0.98× (0.97–0.99)",
        "rmsnorm 25",
        "top-1 agreement 100.00 %",
        "compile_kernels was not measured: the budget ended",
        "a confirmation run of their own",
        "On Test CPU (x86-64-v4, 2 cores), torch 2.13.0, 2026-02-03.",
        "judged on Test CPU",
        "byte for byte, what was judged",
        "openai-community/gpt2",
        "607a30d783dfa663caf39e06633721c8d4cfcd7e",
        source.digest,
        built.id,
        "abc123",
        "autokernel-hf optimize openai-community/gpt2 --revision 607a30d783dfa663caf39e06633721c8d4cfcd7e"
        " --input-shape 1,1024 --dtype float32 --device cpu --top 2 --max-experiments 8",
        "ninja by autokernel_hf, not by kernel-builder",
    ):
        assert told in text, told
    assert "with CUDA graphs" not in text  # a column that was not measured
    assert "None" not in text.replace("None not in (m.weight, m.eps)", "")


def test_a_card_without_a_run_has_no_figures_and_names_no_local_model(package: Package, built: Built) -> None:
    text = (Path(package.path) / "README.md").read_text()
    assert "Not measured: exported from a file, without a run." in text
    assert "×" not in text
    assert "µs" not in text
    source = candidate("rmsnorm", "cpp")
    local = PROFILE.model_copy(
        update={"model": MODEL.model_copy(update={"id": "/srv/models/secret", "revision": None})}
    )
    card = write_card(package, candidate=source, built=built, profile=local).read_text()
    assert "`secret` (a local model)" in card
    assert "/srv/models" not in card


# --- the source half ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(kernel_types()))
def test_references_that_ship_compute_what_the_kernel_types_do(name: str) -> None:
    kernel_type = kernel_types()[name]
    header = "from __future__ import annotations\nimport math\nimport torch\nimport torch.nn.functional as F\nfrom torch import Tensor\n"
    scope: dict[str, object] = {}
    exec(header + standalone(kernel_type.oracle, kernel_type.reference), scope)
    workloads = small_workloads(kernel_type, Domain(dtypes=("float32", "float16"), values={}))
    assert workloads
    for workload in workloads[:3]:
        args = make_inputs(kernel_type, workload, 0)
        for function, inputs in ((kernel_type.reference, args), (kernel_type.oracle, upcast(args))):
            ours = scope[function.__name__](**inputs)  # type: ignore[operator]
            for a, b in zip(ours, function(**inputs), strict=True):
                assert torch.equal(a, b)


def test_shipped_tests_and_benchmark_run(package: Package) -> None:
    script = """
import sys
from pathlib import Path
import pytest
folder = Path(sys.argv[1])
assert pytest.main(["-q", "-p", "no:cacheprovider", str(folder / "tests")]) == 0
from kernels.cli.benchmark import run_benchmark_script
(path,) = (folder / "benchmarks").glob("benchmark*.py")
import torch
# A torch that was built for CUDA finds no package for CPUs there, as the card says; the folder of a variant it takes.
place = folder if torch.version.cuda is None else next(folder.glob("build/*"))
timings, _ = run_benchmark_script(path, iterations=2, warmup=1, cwd=folder, repo_id=str(place), is_local=True, revision="local")
assert len(timings) == 2 and all(t.verified and t.ref_mean_ms > 0 for t in timings.values()), timings
print("BOTH RAN")
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(Path(package.path).resolve())],
        capture_output=True,
        text=True,
        cwd=package.path,
        timeout=200,
        check=False,
    )
    assert "BOTH RAN" in done.stdout, done.stdout + done.stderr
    assert packages.inspect(Path(package.path)) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_the_sources_build_and_load_as_the_official_builder_lays_them_out(
    package: Package, tmp_path: Path
) -> None:
    """What build.toml lists, compiled by hand with its flags, under a `_ops.py` as kernel-builder writes it."""
    folder = Path(package.path)
    target = tmp_path / "other_norm"
    shutil.copytree(folder / "torch-ext" / "test_rmsnorm", target)
    id = "_other_norm_abc1234"
    include = Path(torch.__file__).parent / "include"
    description = tomlkit.parse((folder / "build.toml").read_text()).unwrap()
    parts = (
        (
            description["torch"],
            f"-DTORCH_EXTENSION_NAME={id} -DTORCH_TARGET_VERSION=0x020b000000000000ULL -std=c++20 "
            f"-isystem {include} -isystem {sysconfig.get_paths()['include']}",
        ),
        *((part, "") for part in description["kernel"].values()),
    )
    objects, running = [], []
    for part, more in parts:
        flags = [*part.get("cxx-flags", []), *more.split(), *(f"-I{folder / i}" for i in part["include"])]
        for source in (folder / path for path in part["src"] if path.endswith(".cpp")):
            objects.append(str(tmp_path / f"{source.stem}.o"))
            command = ["g++", "-c", "-fPIC", *flags, "-O1", str(source), "-o", objects[-1]]
            running.append(subprocess.Popen(command))
    assert [process.wait() for process in running] == [0] * 6
    code = {
        s: subprocess.check_output(["objdump", "-d", tmp_path / f"unit_{s}.o"], text=True)
        for s in ("v2", "v3", "v4")
    }
    assert ["zmm" in code[s] for s in code] == [False, False, True]
    assert ["ymm" in code[s] for s in code] == [False, True, True]
    lib = Path(torch.__file__).parent / "lib"
    command = [
        "g++",
        "-shared",
        *objects,
        "-o",
        str(target / f"{id}.abi3.so"),
        f"-L{lib}",
        "-ltorch_cpu",
        "-fopenmp",
    ]
    subprocess.run(command, check=True)
    (target / "_ops.py").write_text(
        f"import torch\nfrom . import {id}\nops = torch.ops.{id}\n"
        f'def add_op_namespace_prefix(op_name: str):\n    return f"{id}::{{op_name}}"\n'
    )
    script = """
import importlib, sys
import torch
sys.path.insert(0, sys.argv[1])
module = importlib.import_module("other_norm")
x, w = torch.randn(7, 300), torch.rand(300)
ours, torchs = module.rmsnorm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (300,), w, 1e-5)
assert (ours - torchs).abs().max() < 1e-5
layer = module.layers.RMSNorm()
layer.weight, layer.variance_epsilon = w, 1e-5
assert torch.equal(layer(x), ours)
print("LOADED")
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "LOADED" in done.stdout, done.stderr


def test_a_narrow_domain_hides_the_layers_that_lie_outside(tmp_path: Path) -> None:
    plain = candidate("activation", "triton")
    narrow = Candidate(
        kernel_type="activation",
        backend="triton",
        source=plain.source.replace(
            "\n\n", '\n\nSUPPORTS = {"kind": ["gelu_new"], "dtype": ["float32"]}\n\n', 1
        )
        if "SUPPORTS" not in plain.source
        else pytest.skip("the starter narrows its domain itself"),
    )
    made = build(narrow)
    package = stage(made, candidate=narrow, name="narrow", out=tmp_path)
    variant = Path(package.path) / "build" / "torch-cuda"
    assert packages.domain(variant) == {"dtype": ("float32",), "kind": ("gelu_new",)}
    assert set(packages.usable_layers(variant, "activation")) == {"NewGELU", "FastGELU"}
    card = write_card(package, candidate=narrow, built=made).read_text()
    assert "outside of this kernel's domain" in card
    assert '"NewGELU": "NewGELU"' in card
    assert '"SiLU": "SiLU"' not in card
