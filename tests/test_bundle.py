"""Several kernels in one package: one `get_kernel`, every function and layer, each kernel as it was judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

from autokernel_hf import hub, packages, shipping
from autokernel_hf.build import build
from autokernel_hf.bundle import Part, export_files, stage_bundle
from autokernel_hf.check import check
from autokernel_hf.errors import PackageError, UsageError
from autokernel_hf.export_hf import export_file
from autokernel_hf.records import Built, Candidate, Package, Resources, Target, Verification, Winner
from autokernel_hf.runs import RunSettings
from tests.hub_server import HubServer
from tests.package_factory import candidate, exported
from tests.test_export import EVALUATION, PROFILE, VERIFICATION

KINDS = ("rmsnorm", "gated_activation", "activation")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Three C++ kernels of a Llama, in an order that is not the alphabet's."""
    files = [candidate(kind, "cpp") for kind in KINDS]
    return export_files(files, "llama-cpu", out=tmp_path_factory.mktemp("packages"))


def in_fresh_process(code: str, *args: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-B", "-I", "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_each_kernel_of_a_bundle_is_byte_for_byte_the_judged_folder(bundle: Package) -> None:
    assert bundle.functions == ("activation", "gated_activation", "rmsnorm")
    assert {"RMSNorm", "SwiGLUMLP", "SiLU"} <= set(bundle.layers)
    (variant,) = packages.read_variants(Path(bundle.path))
    for kind in KINDS:
        built = build(candidate(kind, "cpp"))
        part = packages.part_of(variant.path, kind)
        assert part.name == built.id
        shipped = {path: file.read_bytes() for path, file in packages.files_of(part)}
        assert shipped == {path: file.read_bytes() for path, file in packages.files_of(Path(built.path))}
    metadata = Metadata.read_from_file(variant.path / "metadata.json")
    assert metadata.digest.files == Digest.hash_variant(DigestAlgorithm.SHA256, variant.path).files
    assert packages.inspect(Path(bundle.path)) == []
    assert len(variant.libraries) == 3  # each of them is ABI-checked
    for kind in KINDS:
        Build.open(Path(bundle.path) / "sources" / kind)
    assert {f"benchmark_{kind}.py" for kind in KINDS} == {
        path.name for path in (Path(bundle.path) / "benchmarks").iterdir()
    }


def test_the_order_of_the_files_changes_nothing(bundle: Package, tmp_path: Path) -> None:
    again = export_files([candidate(kind, "cpp") for kind in sorted(KINDS)], "llama-cpu", out=tmp_path)
    first, second = (
        {path: file.read_bytes() for path, file in packages.files_of(Path(p.path))} for p in (bundle, again)
    )
    assert first == second


def test_check_loads_a_bundle_and_runs_every_function(bundle: Package) -> None:
    report = check(bundle.path)
    assert report.loaded and report.problems == ()
    assert not [note for note in report.notes if "was not called" in note]
    assert report.functions == bundle.functions
    assert set(report.layers) == set(bundle.layers)


SIDE_BY_SIDE = """
import json, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
order = [Path(p) for p in sys.argv[1:]]
x, w = torch.randn(5, 33), torch.rand(33)
wanted = torch.nn.functional.rms_norm(x, (33,), w, 1e-6)
errors = [(get_local_kernel(p, backend='cpu').rmsnorm(x, w, 1e-6) - wanted).abs().max().item() for p in order]
bundle = next(m for n, m in sys.modules.items() if n.startswith("_ak_bundle") and "." not in n)
compiled = torch.compile(lambda t: bundle.rmsnorm(bundle.activation(t, "silu"), w, 1e-6), fullgraph=True, backend="eager")
plain = torch.nn.functional.rms_norm(torch.nn.functional.silu(x), (33,), w, 1e-6)
errors.append((compiled(x) - plain).abs().max().item())
print(json.dumps({"errors": errors}))
"""


@pytest.mark.parametrize("first", ["bundle", "single"])
def test_a_bundle_and_a_package_of_one_of_its_kernels_load_in_one_process(
    bundle: Package, first: str, tmp_path: Path
) -> None:
    """Their kernel registers its operators under the same name: whichever comes second must find them there."""
    single = exported("rmsnorm", "cpp", tmp_path)
    order = [bundle.path, single.path] if first == "bundle" else [single.path, bundle.path]
    errors = in_fresh_process(SIDE_BY_SIDE, *order)["errors"]
    assert isinstance(errors, list) and len(errors) == 3 and max(errors) < 1e-5


# Counts its calls, which no kernel may, in a static that the compiler would let all libraries of a process share.
COUNTING = """// kernel_type: rmsnorm
// supports: dtype=float32
#include "autokernel.h"
inline float &calls() {{ static float count = 0; return count; }}
extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {{
  ((float *)out->data)[0] = ++calls();  // {name}
  return AK_OK;
}}
"""
COUNTED = """
import json, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
first, second = (get_local_kernel(Path(p), backend='cpu') for p in sys.argv[1:])
def count(kernel):
    return kernel.rmsnorm(torch.ones(1, 1), torch.ones(1), 1e-6).item()
print(json.dumps({"counts": [count(first), count(first), count(first), count(second)]}))
"""


def test_statics_of_a_kernel_are_its_own(tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        source = Candidate(kernel_type="rmsnorm", backend="cpp", source=COUNTING.format(name=name))
        paths.append(export_file(source, f"counts-{name}", out=tmp_path).path)
    assert in_fresh_process(COUNTED, *paths)["counts"] == [1.0, 2.0, 3.0, 1.0]
    for path in paths:
        (library,) = Path(path).glob("build/*/*.so")
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
        )
        assert not [line for line in listed.stdout.splitlines() if " u " in line]


def test_a_published_bundle_loads_and_every_block_of_its_card_runs(
    bundle: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    with HubServer() as server:
        for name, value in server.client_env(token=server.TOKEN).items():
            if name.startswith("HF_") or name == "NO_PROXY":
                monkeypatch.setenv(name, value)
        published = hub.publish(bundle, "acme/llama-cpu")
        assert published.loaded
        card = server.kernel("acme/llama-cpu").files("main")["README.md"].decode()
        assert all(f"\n## {kind}\n" in card for kind in KINDS)
        blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        assert len(blocks) == 4
        code = """
import json, os, sys
scope = {}
os.chdir(sys.argv[1])
for block in json.loads(sys.argv[2]):
    exec(block, scope)
from transformers import LlamaConfig, LlamaForCausalLM
import torch
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(8)[None]
calls = {}
for name, module in list(sys.modules.items()):
    if not (name.startswith("_ak_") and name.endswith(".layers")):
        continue
    for kind in ("rmsnorm", "gated_activation", "activation"):
        if hasattr(module, kind):
            def counted(*args, function=getattr(module, kind), kind=kind):
                calls[kind] = calls.get(kind, 0) + 1
                return function(*args)
            setattr(module, kind, counted)
with torch.no_grad():
    plain = model(ids).logits
    scope["with_kernels"](model)
    kernelized = (model(ids).logits - plain).abs().max().item()
    by_hooks, calls = dict(calls), {}
    fresh = LlamaForCausalLM(config).eval()
    fresh.load_state_dict(model.state_dict())
    scope["faster"](fresh)
    applied = (fresh(ids).logits - plain).abs().max().item()
print(json.dumps({"by_hooks": by_hooks, "by_apply": calls, "errors": [kernelized, applied]}))
"""
        result = server.run_client(code, str(Path(bundle.path).parent), json.dumps(blocks))
        assert result.returncode == 0, result.stderr
        seen = json.loads(result.stdout.strip().splitlines()[-1])
    assert seen["by_hooks"] == {"rmsnorm": 5, "activation": 2}
    # `apply` also knows the MLP, which has no hook; the activation inside of it is then not called.
    assert seen["by_apply"]["rmsnorm"] == 5 and seen["by_apply"]["gated_activation"] == 2
    assert max(seen["errors"]) < 1e-5


def test_a_bundle_of_triton_kernels_ships_for_all_gpus(tmp_path: Path) -> None:
    package = export_files(
        [candidate("flash_attention", "triton"), candidate("rmsnorm", "triton")], "tri", out=tmp_path
    )
    assert package.variants == ("torch-cuda", "torch-rocm")
    init = (Path(package.path) / "build" / "torch-cuda" / "__init__.py").read_text()
    assert "\nflash_attn_forward = _flash_attention.flash_attn_forward\n" in init
    assert "\nsupports_flash_attn = _flash_attention.supports_flash_attn\n" in init
    assert check(package.path).problems == () or torch.cuda.is_available()


def made(kind: str, backend: str, variant: str, archs: tuple[str, ...]) -> Part:
    built = Built(
        id=f"_ak_{kind}_{backend}_0",
        kernel_type=kind,
        backend=backend,  # type: ignore[arg-type]
        path="",
        variant=variant,
        archs=archs,
        resources=Resources(),
        seconds=0,
        cached=False,
    )
    return Part(candidate=candidate(kind, backend), built=built)


CUDA, CPU = "torch-stable-abi211-cu130-x86_64-linux", "torch-stable-abi211-cpu-x86_64-linux"


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ([made("rmsnorm", "cpp", CPU, ()), made("rmsnorm", "cpp", CPU, ())], "Two kernels of type rmsnorm"),
        ([made("rmsnorm", "cpp", CPU, ()), made("softmax", "triton", "torch-cuda", ())], "a CPU and"),
        ([made("rmsnorm", "cpp", CPU, ()), made("softmax", "cuda", CUDA, ("9.0a",))], "a CPU and"),
        (
            [made("rmsnorm", "cuda", CUDA, ("8.0",)), made("softmax", "cuda", CUDA, ("9.0a",))],
            r"different architectures: 8\.0 and 9\.0a",
        ),
        (
            [
                made("rmsnorm", "cuda", CUDA, ("8.0",)),
                made("softmax", "cuda", CUDA.replace("130", "128"), ("8.0",)),
            ],
            "different systems",
        ),
    ],
)
def test_kernels_that_cannot_be_in_one_variant_are_refused(
    parts: list[Part], what: str, tmp_path: Path
) -> None:
    with pytest.raises(PackageError, match=what):
        stage_bundle(parts, name="mixed", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no kernels"):
        stage_bundle([], name="nothing", out=tmp_path)


class FinishedRun:
    """What an export asks of a run."""

    def __init__(self) -> None:
        self.settings = RunSettings(spec=PROFILE.spec, top=2, max_experiments=8)

    def verification(self) -> Verification:
        return VERIFICATION.model_copy(update={"kernel_calls": {"rmsnorm": 25, "activation": 12}})

    def winner(self, target: str) -> SimpleNamespace:
        return SimpleNamespace(commit=f"commit-of-{target}")


def test_a_runs_kernels_become_one_package_with_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def winner(kind: str) -> Winner:
        target = Target(
            name=kind,
            kernel_type=kind,
            backend="cpp",
            share=0.5,
            attainable_speedup=1.1,
            sites=(),
            workloads=(),
        )
        return Winner(target=target, candidate=candidate(kind, "cpp"), evaluation=EVALUATION)

    winners = [winner("rmsnorm"), winner("activation")]
    monkeypatch.setattr(shipping, "winners_of", lambda run: (PROFILE, winners))
    options: dict[str, Any] = {"name": "gpt2", "version": 1, "archs": (), "license": "MIT", "out": tmp_path}
    (package,) = shipping._export_run(FinishedRun(), bundle=True, **options)  # type: ignore[arg-type]
    assert (package.name, package.functions) == ("gpt2", ("activation", "rmsnorm"))
    card = (Path(package.path) / "README.md").read_text()
    for told in (
        "2 kernels in one package: `activation`, `rmsnorm`; found by autokernel_hf for the calls that "
        "`openai-community/gpt2` makes on Test CPU.",
        "byte for byte as it was built and judged",
        "calls of each kernel in one pass: activation 12, rmsnorm 25",
        "against eager: 1.09× (1.08–1.11)",
        "autokernel-hf optimize openai-community/gpt2",
        "| commit of the run | `commit-of-activation` |",
        "| commit of the run | `commit-of-rmsnorm` |",
    ):
        assert told in card, told
    assert card.count("| 1024x768,768 | float32 | 123 µs |") == 2
    assert card.count("## Whole model") == 1
    # Without --bundle, a package each, of the same builds.
    apart = shipping._export_run(FinishedRun(), bundle=False, **options)  # type: ignore[arg-type]
    assert [p.name for p in apart] == ["gpt2-rmsnorm", "gpt2-activation"]
    with pytest.raises(UsageError, match="None of this run's kernels is a CUDA one"):
        shipping._export_run(FinishedRun(), bundle=True, **{**options, "archs": ("9.0",)})  # type: ignore[arg-type]


def test_sources_that_make_no_one_package_are_refused(tmp_path: Path) -> None:
    files = []
    for kind in ("rmsnorm", "softmax"):
        files.append(tmp_path / f"{kind}.cpp")
        files[-1].write_text(candidate(kind, "cpp").source)
    with pytest.raises(UsageError, match="only with --bundle"):
        shipping.export(*files, name="both", out=tmp_path / "out")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="only where all are candidate files"):
        shipping.export(files[0], run, name="both", out=tmp_path / "out", bundle=True)
    assert not (tmp_path / "out").exists()
