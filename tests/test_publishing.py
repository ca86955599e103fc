"""What publishing promises its callers and its author: versions that stay, uploads that resume, refusals that explain."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autokernel_hf import hub as hub_module
from autokernel_hf import hub_client, interface
from autokernel_hf.errors import HubError, PackageError
from tests.hub_server import HubServer
from tests.package_factory import LAYERS, RIGHT, SCHEMA, hand_made


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The loopback Hub, with a token that may write; nothing is loaded back."""
    with HubServer() as server:
        for name, value in server.client_env(token=server.TOKEN).items():
            if name.startswith("HF_") or name == "NO_PROXY":
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub_client, "FIRST_DELAY_S", 0.01)
        monkeypatch.setattr(hub_module, "_load_back", lambda *_: True)
        yield server


# --- versions -----------------------------------------------------------------------------------------------------

OTHER_DEFAULT = SCHEMA.replace("offset=0.0", "offset=1.0")


def changed(folder: Path, file: str, old: str, new: str) -> Path:
    """A package with one file changed and its digests renewed."""
    from autokernel_hf import packages

    place = folder / "build" / "torch-cpu"
    text = (place / file).read_text()
    assert old in text
    (place / file).write_text(text.replace(old, new))
    found = packages.read_variant(place).metadata
    packages.write_metadata(
        place,
        name=found.name,
        id=found.id,
        version=found.version,
        license=found.license,
        backend=found.backend.type,
        archs=None,
    )
    return folder


CHANGES = {
    "a function is gone": ("__init__.py", '__all__ = ["layers", "rmsnorm"]', '__all__ = ["layers"]'),
    "a parameter more": (
        "_ops.py",
        "def rmsnorm(x, weight, eps, offset=0.0)",
        "def rmsnorm(x, weight, eps, scale, offset=0.0)",
    ),
    "another default": (
        "_ops.py",
        "def rmsnorm(x, weight, eps, offset=0.0)",
        "def rmsnorm(x, weight, eps, offset=1.0)",
    ),
    "a layer is gone": ("layers.py", "class RMSNorm(", "class Norm("),
    "a layer's forward": ("layers.py", "hidden_states: torch.Tensor)", "hidden_states: torch.Tensor, eps)"),
    "a dtype less": ("_ops.py", "float32, float16, bfloat16", "float32, bfloat16"),
    "some words only": (
        "_ops.py",
        "dtype: float32, float16, bfloat16",
        "dtype: float32, float16, bfloat16; offset: 0.0",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_version_that_is_there_keeps_its_promise_and_a_new_one_may_change_it(
    hub: HubServer, name: str, tmp_path: Path
) -> None:
    hub_module.publish(hand_made(tmp_path / "a"), "acme/tiny-norm")
    repo = hub.kernel("acme/tiny-norm")
    before = dict(repo.branches)
    other = changed(hand_made(tmp_path / "b", id="_norm_b"), *CHANGES[name])
    with pytest.raises(PackageError, match=r"Version 1 of acme/tiny-norm promises.*--version 2"):
        hub_module.publish(other, "acme/tiny-norm")
    assert repo.branches == before
    hub_module.publish(other, "acme/tiny-norm", version=2)
    assert repo.branches["v1"] == before["v1"]
    assert json.loads(repo.files("v2")["build/torch-cpu/metadata.json"])["version"] == 2


@pytest.mark.parametrize(
    "change",
    [
        (
            "_ops.py",
            "def rmsnorm(x, weight, eps, offset=0.0)",
            "def rmsnorm(x, weight, eps, offset=0.0, k=2)",
        ),
        ("layers.py", LAYERS, LAYERS + "\n\nclass Another(nn.Module):\n    pass\n"),
        (
            "__init__.py",
            '__all__ = ["layers", "rmsnorm"]',
            'other = rmsnorm\n__all__ = ["layers", "other", "rmsnorm"]',
        ),
        ("_ops.py", "dtype: float32, float16", "dtype: float64, float32, float16"),
        ("_ops.py", RIGHT, RIGHT.replace("wide", "w")),
    ],
)
def test_what_no_caller_would_miss_may_replace_a_version(
    hub: HubServer, change: tuple[str, str, str], tmp_path: Path
) -> None:
    hub_module.publish(hand_made(tmp_path / "a"), "acme/tiny-norm")
    other = changed(hand_made(tmp_path / "b", id="_norm_b"), *change)
    hub_module.publish(other, "acme/tiny-norm")
    served = hub.kernel("acme/tiny-norm").files("v1")
    assert json.loads(served["build/torch-cpu/metadata.json"])["id"] == "_norm_b"


def test_parameters_are_read_whatever_their_defaults_hold(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(
        "def f(a, /, b: tuple[int, int] = (1, 2), *rest, c: dict = {'x': [1, 2]}, d, **more): ...\n"
        "__all__ = ['f']\n"
    )
    assert interface.api(tmp_path)["f"] == (
        "a",
        "/",
        "b=(1, 2)",
        "*rest",
        "c={'x': [1, 2]}",
        "d",
        "**more",
    )


def test_variants_for_other_devices_stand_side_by_side_in_a_version(hub: HubServer, tmp_path: Path) -> None:
    hub_module.publish(hand_made(tmp_path / "cpu", id="_norm_cpu"), "acme/tiny-norm")
    hub_module.publish(hand_made(tmp_path / "gpu", id="_norm_gpu", variant="torch-cuda"), "acme/tiny-norm")
    served = hub.kernel("acme/tiny-norm").files("v1")
    ids = {v: json.loads(served[f"build/{v}/metadata.json"])["id"] for v in ("torch-cpu", "torch-cuda")}
    assert ids == {"torch-cpu": "_norm_cpu", "torch-cuda": "_norm_gpu"}


# --- uploads ------------------------------------------------------------------------------------------------------


def with_library(folder: Path) -> Path:
    """A package with a file that the Hub keeps in LFS."""
    return hand_made(folder, more={"table.bin": "0123456789" * 1000})


def test_an_interrupted_upload_goes_on_without_sending_large_files_again(
    hub: HubServer, tmp_path: Path
) -> None:
    folder = with_library(tmp_path / "p")
    hub.fail_next(0, "/commit/v1")
    with pytest.raises(HubError, match="cannot be reached"):
        hub_module.publish(folder, "acme/tiny-norm")
    sent = [path for path in hub.paths("PUT") if path.startswith("/lfs/")]
    assert len(sent) == 1
    assert "build/torch-cpu/table.bin" not in hub.kernel("acme/tiny-norm").files("v1")
    hub_module.publish(folder, "acme/tiny-norm")
    assert [path for path in hub.paths("PUT") if path.startswith("/lfs/")] == sent
    assert hub.kernel("acme/tiny-norm").files("v1")["build/torch-cpu/table.bin"] == b"0123456789" * 1000


def test_an_upload_that_breaks_in_a_large_file_is_told_and_can_be_made_again(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    folder = with_library(tmp_path / "p")
    hub.fail_next(0, "^/lfs/", method="PUT", times=99)
    with pytest.raises(HubError, match=r"table\.bin.*Publish again"):
        hub_module.publish(folder, "acme/tiny-norm")
    hub._failures.clear()
    hub.fail_next(403, "^/lfs/", method="PUT", times=1)
    with pytest.raises(HubError, match="the Hub refuses it to tester"):
        hub_module.publish(folder, "acme/tiny-norm")
    hub_module.publish(folder, "acme/tiny-norm")
    assert "build/torch-cpu/table.bin" in hub.kernel("acme/tiny-norm").files("v1")


def test_a_rate_limit_is_waited_out_as_long_as_the_hub_says(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hub_client.time, "sleep", waits.append)
    hub.fail_next(429, "/api/repos/create", headers={"Retry-After": "7"})
    started = time.monotonic()
    hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm")
    assert 7.0 in waits and time.monotonic() - started < 60
    # A Hub that asks for an hour is not waited for that long in silence.
    waits.clear()
    hub.fail_next(429, "/api/repos/create", headers={"Retry-After": "3600"}, times=hub_client.RETRIES)
    with pytest.raises(HubError, match="rate limit"):
        hub_module.publish(hand_made(tmp_path / "q"), "acme/other")
    assert max(waits) <= 60


# --- rights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo_id", "rights", "message", "remedy"),
    [
        ("acme/k1", {"role": "read"}, "your token only reads", "/settings/tokens"),
        (
            "acme/k1",
            {"role": "fineGrained", "scope": ("tester",)},
            "fine-grained token may not write in acme",
            "contents of repositories",
        ),
        ("acme/k1", {"only_reads": ("acme",)}, "as a member of acme you only read", "Ask an admin of acme"),
        ("bigcorp/k1", {}, "bigcorp is neither you", "Publish as tester/k1"),
        ("bigcorp/theirs", {}, "bigcorp is neither you", "ask bigcorp"),
        ("acme/k1", {"creates_kernels": False}, "may not create kernel repositories yet", "approves"),
    ],
)
def test_a_refusal_says_whose_right_is_missing(
    hub: HubServer,
    repo_id: str,
    rights: dict[str, Any],
    message: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add_kernel("bigcorp/theirs", {"v1": {"build/torch-cpu/x.py": b"theirs"}})
    before = dict(hub.kernel("bigcorp/theirs").branches)
    hub.add_token("hf_other", user="tester", organizations=("acme",), **rights)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(HubError) as caught:
        hub_module.publish(hand_made(tmp_path / "p"), repo_id)
    assert message in caught.value.message
    assert caught.value.remedy is not None and remedy in caught.value.remedy
    if "fine-grained" in message or "only reads" in message:
        assert f"{hub.url}/settings/tokens" in caught.value.remedy
    assert hub.kernel("bigcorp/theirs").branches == before
    assert ("kernel", "acme/k1") not in hub.repos


def test_who_may_write_but_not_create_publishes_to_what_is_there(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_kernel("acme/tiny-norm", {})
    hub.add_token("hf_member", user="member", organizations=("acme",), creates_kernels=False)
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm")
    assert "build/torch-cpu/_ops.py" in hub.kernel("acme/tiny-norm").files("v1")


def test_a_fine_grained_token_that_may_write_there_publishes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_token("hf_fine", user="tester", organizations=("acme",), role="fineGrained", scope=("acme",))
    monkeypatch.setenv("HF_TOKEN", "hf_fine")
    hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm")
    assert "build/torch-cpu/_ops.py" in hub.kernel("acme/tiny-norm").files("v1")


def test_a_client_that_cannot_write_to_kernel_repositories_is_told_at_once(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "__version__", "2.2.0")
    with pytest.raises(HubError, match=r"huggingface_hub 2\.2\.0 reads kernel repositories.*>=2\.3"):
        hub_module.publish(hand_made(tmp_path / "p"), "acme/tiny-norm")
    assert hub.requests == []


# --- what comes from a Hub ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../evil.py", "build/torch-cpu/../../../evil.py", "build\\..\\..\\evil.py"])
def test_no_file_of_a_repository_lands_outside_of_the_folder_it_belongs_in(
    hub: HubServer, path: str, tmp_path: Path
) -> None:
    hub.add_kernel("acme/evil", {"v1": {"build/torch-cpu/metadata.json": b"{}", path: b"import os"}})
    folder = tmp_path / "deep" / "folder"
    folder.mkdir(parents=True)
    with pytest.raises(HubError, match="leads out of the repository"):
        hub_module.download("acme/evil", version=1, folder=folder)
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_relative_to(folder)]
    assert outside == []
    assert not list(folder.rglob("*evil*"))
