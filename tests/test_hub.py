"""Publish, load, check and apply, over a loopback Hub with the real clients."""

from __future__ import annotations

import importlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autokernel_hf import hub as hub_module
from autokernel_hf import hub_client, packages
from autokernel_hf.build import build
from autokernel_hf.check import _Call, _child_env, _compare, check
from autokernel_hf.cli import app
from autokernel_hf.errors import AutokernelError, HubError, PackageError, UsageError
from autokernel_hf.export_hf import stage, write_card
from autokernel_hf.kernels import kernel_types
from autokernel_hf.kernels.base import make_inputs
from autokernel_hf.records import Candidate, Package
from tests.hub_server import HubServer
from tests.package_factory import RIGHT, candidate, exported, hand_made


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A real one: the C++ RMSNorm."""
    return exported("rmsnorm", "cpp", tmp_path_factory.mktemp("packages"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The loopback Hub, with a token that may write, for this process and its children."""
    with HubServer() as server:
        for name, value in server.client_env(token=server.TOKEN).items():
            if name.startswith("HF_") or name == "NO_PROXY":
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub_client, "FIRST_DELAY_S", 0.01)
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing without loading back, for tests of what is uploaded."""
    monkeypatch.setattr(hub_module, "_load_back", lambda *_: True)


def answer(hub: HubServer, code: str, *args: str, **options: Any) -> Any:
    result = hub.run_client(code, *args, **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


# --- publish ------------------------------------------------------------------------------------------------------


def test_a_published_kernel_is_the_judged_one_and_loads_in_a_process_of_its_own(
    hub: HubServer, package: Package, tmp_path: Path
) -> None:
    published = hub_module.publish(package, "acme/test-rmsnorm", message="First kernel")
    assert published.loaded
    repo = hub.kernel("acme/test-rmsnorm")
    assert published.revision == repo.branches["v1"]
    assert repo.commits[repo.branches["v1"]].title == "First kernel"
    served, local = repo.files("v1"), Path(package.path)
    for path, file in packages.files_of(local / "build"):
        assert served[f"build/{path}"] == file.read_bytes()
    assert not any(path.startswith("build/") for path in repo.files("main"))
    assert 'get_kernel("acme/test-rmsnorm", version=1' in repo.files("main")["README.md"].decode()
    code = """
import json, sys, torch
class Bar:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "autokernel_hf":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Bar())
from kernels import get_kernel
kernel = get_kernel("acme/test-rmsnorm", version=1, backend="cpu", trust_remote_code=True)
x, w = torch.randn(5, 33), torch.rand(33)
error = (kernel.rmsnorm(x, w, 1e-6) - torch.nn.functional.rms_norm(x, (33,), w, 1e-6)).abs().max().item()
try:
    import autokernel_hf
    there = True
except ModuleNotFoundError:
    there = False
print(json.dumps({"file": kernel.__file__, "error": error, "autokernel_hf": there}))
"""
    home = tmp_path / "home"
    home.mkdir()
    seen = answer(hub, code, home=home, isolated=True)
    assert str(home) in seen["file"]
    assert seen["error"] < 1e-5
    assert not seen["autokernel_hf"]
    # What is there already is not sent again.
    before = dict(repo.branches)
    assert hub_module.publish(package, "acme/test-rmsnorm").revision == before["v1"]
    assert repo.branches == before


def test_every_code_block_of_a_published_card_runs_as_printed(
    hub: HubServer, package: Package, quick: None
) -> None:
    hub_module.publish(package, "acme/test-rmsnorm")
    card = hub.kernel("acme/test-rmsnorm").files("main")["README.md"].decode()
    assert "NAMESPACE" not in card
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 4
    code = """
import json, os, sys
from pathlib import Path
scope = {}
os.chdir(sys.argv[1])
for block in json.loads(sys.argv[2]):
    exec(block, scope)
from transformers import LlamaConfig, LlamaForCausalLM
import torch
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(8)[None]
with torch.no_grad():
    plain = model(ids).logits
    layers = sys.modules[scope["kernel"].__name__ + ".layers"]
    calls, function = [], None
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("_ak_rmsnorm") and n.endswith(".layers")]:
        def counted(*args, function=module.rmsnorm):
            calls.append(1)
            return function(*args)
        module.rmsnorm = counted
    patched = scope["with_kernels"](model)
    error = (patched(ids).logits - plain).abs().max().item()
    from_hub = len(calls)
    again = LlamaForCausalLM(config).eval()
    again.load_state_dict(model.state_dict())
    error = max(error, (scope["faster"](again)(ids).logits - plain).abs().max().item())
print(json.dumps({"calls": from_hub, "applied": len(calls) - from_hub, "error": error, "shape": list(scope["y"].shape)}))
"""
    seen = answer(hub, code, str(Path(package.path).parent), json.dumps(blocks))
    assert seen["calls"] == seen["applied"] == 5  # two norms a layer and the last one
    assert seen["error"] < 1e-5
    assert seen["shape"] == [32, 128]


def test_transformers_pulls_a_model_by_name_with_a_published_kernel_in_it(
    hub: HubServer, package: Package, quick: None, tmp_path: Path
) -> None:
    """The card's `KernelConfig`; transformers takes it for GPUs only, so its list of devices is widened here."""
    if torch.version.cuda is not None:
        pytest.skip("through transformers, a torch that was built for CUDA looks for CUDA variants only")
    if not hasattr(
        importlib.import_module("transformers.utils.kernel_config"), "KERNELS_SUPPORTED_DEVICE_TYPES"
    ):
        pytest.skip("this transformers takes no CPU, and cannot be made to")
    llama().save_pretrained(tmp_path)
    hub.add_model("acme/tiny-llama", tmp_path)
    hub_module.publish(package, "acme/test-rmsnorm")
    code = """
import json, sys, torch
from transformers import AutoModelForCausalLM, KernelConfig
from transformers.utils import kernel_config as gate
gate.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
ids = torch.arange(8)[None]
options = {"version": 1, "trust_remote_code": True}
config = KernelConfig({"RMSNorm": ("acme/test-rmsnorm:RMSNorm", options)})
with torch.no_grad():
    plain = AutoModelForCausalLM.from_pretrained("acme/tiny-llama")(ids).logits
    model = AutoModelForCausalLM.from_pretrained("acme/tiny-llama", use_kernels=True, kernel_config=config)
    calls = []
    (layers,) = [m for n, m in list(sys.modules.items()) if n.startswith("_ak_rmsnorm") and n.endswith(".layers")]
    function = layers.rmsnorm
    layers.rmsnorm = lambda *args: calls.append(1) or function(*args)
    error = (model(ids).logits - plain).abs().max().item()
print(json.dumps({"calls": len(calls), "error": error}))
"""
    seen = answer(hub, code)
    assert seen["calls"] == 5
    assert seen["error"] < 1e-5


def test_transformers_takes_a_published_attention_kernel_by_its_name(
    hub: HubServer, quick: None, tmp_path: Path
) -> None:
    """`attn_implementation="namespace/name"`, through Triton's interpreter, in a model with fewer keys than queries."""
    source = candidate("flash_attention", "triton")
    built = build(source)
    made = stage(built, candidate=source, name="tri-attention", out=tmp_path, interpreter=True)
    write_card(made, candidate=source, built=built)
    hub_module.publish(made, "acme/tri-attention")
    code = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(12)[None].repeat(2, 1)
hidden = torch.ones_like(ids)
hidden[1, :5] = 0
with torch.no_grad():
    plain = [model(ids).logits, model(ids, attention_mask=hidden).logits[:, 5:]]
    model.set_attn_implementation("acme/tri-attention", allow_all_kernels=True)
    (layers,) = [m for n, m in list(sys.modules.items()) if n.startswith("_ak_flash") and n.endswith(".layers")]
    calls, function = [], layers.flash_attention
    layers.flash_attention = lambda *args, **options: calls.append(1) or function(*args, **options)
    found = [model(ids).logits, model(ids, attention_mask=hidden).logits[:, 5:]]
error = max((f - p).abs().max().item() for f, p in zip(found, plain))
print(json.dumps({"calls": len(calls), "error": error}))
"""
    seen = answer(hub, code, env={"TRITON_INTERPRET": "1"})
    assert seen["calls"] == 4  # two layers, two passes
    assert seen["error"] < 1e-5


def test_local_kernels_redirects_and_an_untrusted_publisher_is_refused(
    hub: HubServer, package: Package, quick: None
) -> None:
    hub.trusted = frozenset({"acme"})
    hub_module.publish(package, "acme/test-rmsnorm")
    hub_module.publish(package, "tester/test-rmsnorm")
    code = """
import json, os, sys
from kernels import get_kernel
seen = [get_kernel("acme/test-rmsnorm", version=1, backend="cpu").__file__]
try:
    get_kernel("tester/test-rmsnorm", version=1, backend="cpu")
except ValueError as error:
    seen.append(str(error))
os.environ["LOCAL_KERNELS"] = "tester/test-rmsnorm=" + sys.argv[1]
seen.append(get_kernel("tester/test-rmsnorm", version=1, backend="cpu").__file__)
print(json.dumps(seen))
"""
    trusted, refused, local = answer(hub, code, package.path)
    assert "snapshots" in trusted
    assert "could not verify publisher trust" in refused or "not from a trusted publisher" in refused
    assert Path(local).is_relative_to(package.path)


def test_a_dry_run_lists_the_files_and_sends_nothing(
    hub: HubServer, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    plan = hub_module.publish(package, "acme/test-rmsnorm", dry_run=True)
    assert plan.url == f"{hub.url}/kernels/acme/test-rmsnorm"
    assert not plan.loaded and plan.revision is None
    local = {path for path, _ in packages.files_of(Path(package.path))}
    assert set(plan.files) == local
    assert "build/torch-stable-abi211-cpu-x86_64-linux/metadata.json" in plan.files or "aarch64" in str(
        plan.files
    )
    assert hub.requests == []


def test_publishing_again_replaces_its_variants_and_leaves_the_rest(
    hub: HubServer, quick: None, tmp_path: Path
) -> None:
    first = hand_made(tmp_path / "a", id="_norm_a", more={"old.py": "x = 1"})
    hub_module.publish(first, "acme/tiny-norm")
    repo = hub.kernel("acme/tiny-norm")
    # Somebody adds a variant for another device by hand; it is not ours to remove.
    files = repo.commits[repo.branches["v1"]].files
    other = {"build/torch-xpu/metadata.json": next(iter(files.values()))}
    repo.commit("v1", {**files, **other}, "Add a variant")
    second = hand_made(tmp_path / "b", id="_norm_b")
    hub_module.publish(second, "acme/tiny-norm")
    served = repo.files("v1")
    assert "build/torch-cpu/old.py" not in served
    assert "build/torch-xpu/metadata.json" in served
    assert json.loads(served["build/torch-cpu/metadata.json"])["id"] == "_norm_b"
    v1 = repo.branches["v1"]
    published = hub_module.publish(second, "acme/tiny-norm", version=2)
    assert published.version == 2
    assert repo.branches["v1"] == v1
    assert json.loads(repo.files("v2")["build/torch-cpu/metadata.json"])["version"] == 2
    assert "version=2" in repo.files("main")["README.md"].decode()
    # An older version may be mended, but the page shows the newest.
    hub_module.publish(first, "acme/tiny-norm")
    assert "old.py" in str(sorted(repo.files("v1")))
    assert "version=2" in repo.files("main")["README.md"].decode()


def test_what_the_hub_serves_is_compared_with_what_was_uploaded(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hand_made(tmp_path / "p")
    original = hub_module.snapshot

    def tampered(*args: Any, **options: Any) -> Path:
        served = original(*args, **options)
        (served / "build" / "torch-cpu" / "_ops.py").write_text("import os")
        return served

    monkeypatch.setattr(hub_module, "snapshot", tampered)
    with pytest.raises(HubError, match=r"serves another build/torch-cpu/_ops\.py"):
        hub_module.publish(folder, "acme/tiny-norm")


def test_a_kernel_that_cannot_run_here_is_published_and_said_not_to_be_loaded(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hand_made(tmp_path / "p", variant="torch-stable-abi211-cu130-x86_64-linux")
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch loads it")
    with caplog.at_level(logging.WARNING):
        published = hub_module.publish(folder, "acme/tiny-norm")
    assert not published.loaded
    assert "No variant is for this machine" in caplog.text
    assert "v1" in hub.kernel("acme/tiny-norm").branches


# --- refusals -----------------------------------------------------------------------------------------------------


def test_publishing_needs_a_token_that_may_write_there(
    hub: HubServer, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hand_made(tmp_path / "p")
    hub.add_token("hf_reader", user="tester", role="read", organizations=("acme",))
    hub.add_token("hf_newcomer", user="newcomer", creates_kernels=False)

    def refusal(repo_id: str, token: str | None, **options: Any) -> HubError:
        if token is None:
            monkeypatch.delenv("HF_TOKEN")
        else:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(HubError) as caught:
            hub_module.publish(folder, repo_id, **options)
        return caught.value

    assert "no Hub token" in refusal("acme/k1", None).message
    assert "does not know your token" in refusal("acme/k1", "hf_unknown").message
    assert "only reads" in refusal("acme/k1", "hf_reader").message
    assert "neither you (tester)" in refusal("bigcorp/k1", hub.TOKEN).message
    not_yet = refusal("newcomer/k1", "hf_newcomer")
    assert "may not create kernel repositories yet" in not_yet.message
    assert "approve" in not_yet.remedy
    hub.add_kernel("acme/public", {})
    assert "exists and is public" in refusal("acme/public", hub.TOKEN, private=True).message
    assert "v1" not in hub.kernel("acme/public").branches


def test_a_new_repository_is_private_when_asked(hub: HubServer, quick: None, tmp_path: Path) -> None:
    hub_module.publish(hand_made(tmp_path / "p"), "acme/hidden", private=True)
    assert hub.kernel("acme/hidden").private


def test_faults_of_the_hub_are_waited_out_or_told(
    hub: HubServer, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hand_made(tmp_path / "p")
    hub.fail_next(503, "/commit/v1")
    hub.fail_next(429, "/branch/", times=2)
    hub_module.publish(folder, "acme/k1")
    assert "build/torch-cpu/_ops.py" in hub.kernel("acme/k1").files("v1")
    hub.fail_next(429, "/commit/", times=hub_client.RETRIES)
    with pytest.raises(HubError, match="rate limit"):
        hub_module.publish(folder, "acme/k2")
    hub.fail_next(500, "/api/repos/create", times=hub_client.RETRIES)
    with pytest.raises(HubError, match="has a fault"):
        hub_module.publish(folder, "acme/k3")
    # A connection that breaks in the middle: publishing again goes on from there.
    hub.fail_next(0, "/commit/v1", times=1)
    with pytest.raises(HubError, match="cannot be reached"):
        hub_module.publish(folder, "acme/k4")
    hub_module.publish(folder, "acme/k4")
    assert "build/torch-cpu/_ops.py" in hub.kernel("acme/k4").files("v1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot be reached"):
        hub_module.publish(folder, "acme/k5")


@pytest.mark.parametrize(
    "repo_id", ["norm", "acme/Norm", "acme/nörm", "acme/norm_x", "a/b/c", "acme/../x", "acme/9norm"]
)
def test_names_that_no_kernel_can_have_are_refused_before_anything_is_sent(
    hub: HubServer, repo_id: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        hub_module.publish(hand_made(tmp_path / "p"), repo_id)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda p: (p / "build/torch-cpu/_ops.py").write_text("import os"), "digest differs"),
        (lambda p: (p / "README.md").unlink(), "no card"),
        (lambda p: (p / "README.md").write_text("by /home/ada/x"), "something private"),
        (lambda p: shutil.rmtree(p / "build"), "no `build` folder"),
    ],
)
def test_a_damaged_or_telling_package_is_not_published(
    hub: HubServer, harm: Any, what: str, tmp_path: Path
) -> None:
    folder = hand_made(tmp_path / "p")
    harm(folder)
    with pytest.raises(PackageError, match=what):
        hub_module.publish(folder, "acme/kk")
    assert hub.requests == []


# --- check --------------------------------------------------------------------------------------------------------


def test_check_loads_and_runs_a_real_package_without_this_program(package: Package) -> None:
    report = check(package.path)
    assert report.loaded and report.problems == ()
    assert report.variant == package.variants[0]
    assert report.functions == ("rmsnorm",)
    assert set(report.layers) == set(package.layers)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda y: y * 1.001, "elements are wrong"),
        (lambda y: y * float("nan"), "is nan, expected"),
        (lambda y: y.double(), "float64"),
        (lambda y: y[:-1], "(31, 128)"),
        (lambda y: y.contiguous(), None),
    ],
)
def test_outputs_are_held_against_the_oracle(spoil: Any, problem: str | None) -> None:
    kernel_type = kernel_types()["rmsnorm"]
    workload = kernel_type.build({"M": 32, "N": 128}, "float32", {})
    args = make_inputs(kernel_type, workload, 0)
    call = _Call(kernel_type=kernel_type, workload=workload, args=args)
    outputs = [spoil(kernel_type.reference(**args)[0])]
    outcome = {"call": 0, "outputs": outputs, "refused": None, "error": None}
    problems, notes = _compare([{"name": "rmsnorm"}], [call], [outcome])
    assert notes == []
    assert [problem in found for found in problems] == [True] if problem else problems == []
    refused = {"call": 0, "outputs": None, "refused": "only float64", "error": None}
    assert _compare([{"name": "rmsnorm"}], [call], [refused])[0] == [
        "rmsnorm refuses every input tried: only float64"
    ]


OWN_CONSTRUCTOR = """from torch import nn
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
"""


@pytest.mark.parametrize(
    ("options", "loaded", "problems"),
    [
        (
            {"body": "    raise RuntimeError('broken')", "more": {"layers.py": OWN_CONSTRUCTOR}},
            True,
            ["raises RuntimeError: broken", "layer Norm has a constructor of its own"],
        ),
        ({"body": "    import os\n    os.abort()"}, True, ["ended the process (signal SIGABRT)"]),
        ({"more": {"layers.py": "import autokernel_hf"}}, False, ["autokernel_hf is barred"]),
    ],
)
def test_check_finds_what_is_wrong(
    options: dict[str, Any], loaded: bool, problems: list[str], tmp_path: Path
) -> None:
    report = check(hand_made(tmp_path / "p", **options))
    assert report.loaded == loaded
    for problem in problems:
        assert any(problem in found for found in report.problems), report


def test_a_package_that_was_loaded_from_its_folder_can_still_be_checked_and_published(
    hub: HubServer, tmp_path: Path
) -> None:
    folder = hand_made(tmp_path / "tiny-norm")
    loaded = hub.run_client(
        "import sys; from pathlib import Path; from kernels import get_local_kernel; "
        "get_local_kernel(Path(sys.argv[1]), backend='cpu')",
        str(folder),
        env={"PYTHONDONTWRITEBYTECODE": ""},
    )
    assert loaded.returncode == 0, loaded.stderr
    written = list(folder.rglob("__pycache__/*.pyc"))
    assert len(written) == 3
    assert check(folder).problems == ()
    assert not [f for f in hub_module.publish(folder, "tester/tiny-norm", dry_run=True).files if "pyc" in f]
    # One without a source is imported in place of the source.
    shutil.copyfile(written[0], folder / "build" / "torch-cpu" / "layers2.pyc")
    assert any("bytecode (layers2.pyc)" in problem for problem in check(folder).problems)


def test_check_leaves_functions_of_another_schema_alone(tmp_path: Path) -> None:
    schema = "(Tensor x, Tensor weight, float eps, float offset=1.0) -> Tensor"
    report = check(hand_made(tmp_path / "p", schema=schema, body="    return x * 0"))
    assert report.loaded and report.problems == ()
    assert any("was not called" in note for note in report.notes)


def test_check_takes_packages_of_the_older_layout(tmp_path: Path) -> None:
    """Their Python lies in a folder of the kernel's name inside of the variant."""
    package = hand_made(tmp_path / "p")
    place = package / "build" / "torch-cpu"
    (place / "tiny_norm").mkdir()
    for file in [p for p in place.iterdir() if p.suffix == ".py"]:
        file.rename(place / "tiny_norm" / file.name)
    packages.write_metadata(
        place,
        name="tiny-norm",
        id="_test_rmsnorm_1",
        version=1,
        license="apache-2.0",
        backend="cpu",
        archs=None,
    )
    report = check(package)
    assert report.loaded and report.variant == "torch-cpu" and report.problems == ()
    assert "RMSNorm" in report.layers and "rmsnorm" in report.functions


def test_check_runs_nothing_of_a_package_that_was_tampered_with(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "p")
    trace = tmp_path / "ran"
    (folder / "build" / "torch-cpu" / "__init__.py").write_text(f"open({str(trace)!r}, 'w')")
    report = check(folder)
    assert not report.loaded and "digest differs" in report.problems[0]
    assert not trace.exists()


def test_check_of_a_repository_runs_its_code_only_with_trust(
    hub: HubServer, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    trace = tmp_path / "ran"
    monkeypatch.setenv("TRACE_FILE", str(trace))
    init = """import contextlib, os
seen = [name for name in os.environ if name == "HF_TOKEN"]
with contextlib.suppress(OSError):
    open(os.environ["TRACE_FILE"], "w").close()
if seen or os.path.exists(os.path.expanduser("~/.secret")):
    raise RuntimeError(f"sees {seen}")
from . import layers
from ._ops import rmsnorm
__all__ = ["layers", "rmsnorm"]
"""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".secret").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    hub_module.publish(hand_made(tmp_path / "p", more={"__init__.py": init}), "acme/tiny-norm")
    looked = check("acme/tiny-norm")
    assert not looked.loaded and looked.problems == ()
    assert looked.functions == ("rmsnorm",) and looked.layers == ("RMSNorm",)
    assert "--trust-remote-code" in looked.notes[0]
    # Looking without running is a use of its own, and no failure.
    shown = CliRunner().invoke(app, ["check", "acme/tiny-norm"])
    assert shown.exit_code == 0
    assert "loaded: no\n" in shown.stdout and "looked at only" in shown.stdout
    # With trust it runs, behind walls: it finds neither the user's token nor files, and leaves nothing.
    ran = check("acme/tiny-norm", version=1, trust_remote_code=True)
    assert ran.loaded and ran.problems == () and ran.variant == "torch-cpu", ran
    assert not trace.exists()
    with pytest.raises(HubError, match=r"no version 7.*It has: 1"):
        check("acme/tiny-norm", version=7)
    with pytest.raises(HubError, match="no kernel repository acme/nothing"):
        check("acme/nothing")
    with pytest.raises(PackageError, match="neither a folder"):
        check("./nowhere")


def test_a_triton_package_is_checked_in_the_interpreter_where_there_is_no_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    source = candidate("rmsnorm", "triton")
    package = stage(build(source), candidate=source, name="tri-norm", out=tmp_path)
    report = check(package.path)
    assert report.loaded and report.problems == ()
    assert "Triton's interpreter" in report.notes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_gpu_packages_load_and_are_right_on_the_gpu(backend: str, tmp_path: Path) -> None:
    package = exported("rmsnorm", backend, tmp_path, device="cuda")
    report = check(package.path)
    assert report.loaded and report.problems == ()
    assert report.variant in package.variants
    assert not any("interpreter" in note for note in report.notes)


def test_telemetry_switches_that_break_the_loader_are_told(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    with pytest.raises(HubError, match="DO_NOT_TRACK=1"):
        hub_module.load("acme/tiny-norm", version=1)
    with caplog.at_level(logging.WARNING):
        env = _child_env(no_gpu=True, cache=None)
    assert "DO_NOT_TRACK" not in env
    assert "DO_NOT_TRACK is unset for the process" in caplog.text


# --- load and apply -----------------------------------------------------------------------------------------------


def test_load_takes_folders_and_repositories_and_tells_what_is_missing(
    hub: HubServer, quick: None, tmp_path: Path
) -> None:
    folder = hand_made(tmp_path / "p", id="_norm_load")
    x, w = torch.randn(3, 8), torch.rand(8)
    wanted = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    assert torch.allclose(hub_module.load(folder).rmsnorm(x, w, 1e-6), wanted, atol=1e-5)
    hub_module.publish(folder, "acme/tiny-norm")
    code = """
import json, torch
from autokernel_hf.errors import AutokernelError
from autokernel_hf.hub import load
told = []
for options in ({}, {"version": 5, "trust_remote_code": True}, {"version": 1}):
    try:
        load("acme/tiny-norm", **options)
    except AutokernelError as error:
        told.append(f"{type(error).__name__}: {error}")
module = load("acme/tiny-norm", version=1, trust_remote_code=True)
told.append(module.rmsnorm(torch.ones(1, 4), torch.ones(4), 0.0).sum().item())
print(json.dumps(told))
"""
    without, missing, untrusted, total = answer(hub, code)
    assert "UsageError" in without and "Say version=1" in without
    assert "HubError" in missing and "Version 5 not found, available versions: 1" in missing
    assert "HubError" in untrusted and "trust_remote_code=True" in untrusted
    assert total == pytest.approx(4.0)
    with pytest.raises(UsageError, match="There is no folder"):
        hub_module.load("nowhere")
    with pytest.raises(UsageError, match="There is no folder ~no-such-account-here/p"):
        hub_module.load("~no-such-account-here/p")
    (tmp_path / "empty" / "build").mkdir(parents=True)
    with pytest.raises(PackageError, match="is no kernel package"):
        hub_module.load(tmp_path / "empty")
    elsewhere = hand_made(tmp_path / "gpu", id="_norm_gpu", variant="torch-tpu")
    with pytest.raises(PackageError, match="(?s)no variant for this machine.*torch-tpu"):
        hub_module.load(elsewhere)


def test_a_package_for_cpus_loads_where_torch_was_built_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernels` then looks for CUDA variants, with or without a GPU; so is the torch of PyPI."""
    import kernels

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cpu = hand_made(tmp_path / "cpu", id="_norm_cpu_only")
    with pytest.raises(FileNotFoundError):
        kernels.get_local_kernel(cpu)
    assert hub_module.load(cpu).__name__ == "_norm_cpu_only"
    # Where a package has both, a load takes what torch was built for, and a model what it is on.
    both = hand_made(tmp_path / "both", id="_norm_cpu_too")
    gpu = hand_made(tmp_path / "gpu", id="_norm_gpu_too", variant="torch-cuda")
    shutil.copytree(gpu / "build" / "torch-cuda", both / "build" / "torch-cuda")
    assert hub_module.load(both).__name__ == "_norm_gpu_too"
    assert hub_module.load(both, backend="cpu").__name__ == "_norm_cpu_too"
    model = llama()
    hub_module.apply(model, both)
    assert model.model.norm.forward.__func__.__module__.startswith("_norm_cpu_too")
    with pytest.raises(PackageError, match="has no variant for this machine"):
        hub_module.load(gpu, backend="cpu")


def test_a_version_whose_upload_was_interrupted_is_told_as_that(
    hub: HubServer, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = hand_made(tmp_path / "p")
    hub_module.publish(folder, "acme/half-norm")
    hub.fail_next(400, r"/commit/v2", method="POST")
    with pytest.raises(HubError):
        hub_module.publish(folder, "acme/half-norm", version=2)
    with pytest.raises(HubError, match="Version 2 of acme/half-norm holds no builds") as caught:
        check("acme/half-norm")
    assert "Publish it again" in caught.value.remedy
    with pytest.raises(HubError, match="holds no builds"):
        hub_module.download("acme/half-norm", folder=tmp_path / "files")
    (told,) = answer(
        hub,
        """
import json
from autokernel_hf.errors import HubError
from autokernel_hf.hub import load
try:
    load("acme/half-norm", version=2, trust_remote_code=True)
except HubError as error:
    print(json.dumps([str(error)]))
""",
    )
    assert "holds no builds" in told
    assert check("acme/half-norm", version=1).problems == ()


def llama(**options: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, **options)
    return LlamaForCausalLM(config).eval()


def test_apply_replaces_every_site_and_restore_puts_all_back(package: Package) -> None:
    model = llama()
    ids = torch.arange(8)[None]
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with torch.no_grad():
        plain = model(ids).logits
        assert hub_module.apply(model, package.path) is model
        layers = hub_module.load(package.path).layers
        calls = []
        function = layers.rmsnorm

        def counted(*args: Any) -> torch.Tensor:
            calls.append(1)
            return function(*args)

        layers.rmsnorm = counted
        try:
            patched = model(ids).logits
        finally:
            layers.rmsnorm = function
        assert len(calls) == 5
        assert 0 < (patched - plain).abs().max() < 1e-5 or torch.equal(patched, plain)
        with pytest.raises(AutokernelError, match="already replaced"):
            hub_module.apply(model, package.path)
        assert hub_module.restore(model) is model
        assert {name: vars(module).get("forward") for name, module in model.named_modules()} == forwards
        assert torch.equal(model(ids).logits, plain)
        assert hub_module.restore(model) is model


def test_apply_says_why_nothing_fits(package: Package, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="Nothing in this Linear fits"):
        hub_module.apply(torch.nn.Linear(2, 2).eval(), package.path)
    with pytest.raises(UsageError, match=r"Call model\.eval"):
        hub_module.apply(llama().train(), package.path)
    only = tmp_path / "p"
    hand_made(only, id="_norm_only", body=RIGHT)
    ops = only / "build" / "torch-cpu" / "_ops.py"
    ops.write_text(ops.read_text().replace("float32, float16, bfloat16", "float16"))
    with pytest.raises(PackageError, match=r"runs in float32 \(and 4 more\).*dtype: float16"):
        hub_module.apply(llama(), only)


def test_apply_keeps_to_the_domain_of_the_kernel(tmp_path: Path) -> None:
    plain = candidate("activation", "triton")
    narrow = Candidate(
        kernel_type="activation",
        backend="triton",
        source=plain.source + '\nSUPPORTS = {"kind": ["gelu_new"]}\n',
    )
    made = build(narrow)
    package = stage(made, candidate=narrow, name="narrow", out=tmp_path, interpreter=True)
    write_card(package, candidate=narrow, built=made)
    with pytest.raises(PackageError, match="needs SiLU"):
        hub_module.apply(llama(hidden_act="silu"), package.path)
    model = hub_module.apply(llama(hidden_act="gelu_new"), package.path)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [
        "model.layers.0.mlp.act_fn",
        "model.layers.1.mlp.act_fn",
    ]
    hub_module.restore(model)
