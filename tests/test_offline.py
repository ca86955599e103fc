"""Without a network, after a first load with one: through `ak.load`, `ak.apply`, and `kernels` alone as the docs say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autokernel_hf import hub as hub_module
from autokernel_hf import hub_client, packages
from tests.hub_server import HubServer
from tests.package_factory import hand_made

LOAD = """
import json, sys, torch
from autokernel_hf.errors import AutokernelError
from autokernel_hf.hub import apply, load
try:
    kernel = load("acme/tiny-norm", version=int(sys.argv[1]), trust_remote_code=sys.argv[2] == "trust")
except AutokernelError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
class LlamaRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6
x = torch.randn(3, 8)
error = (kernel.rmsnorm(x, torch.ones(8), 1e-6) - torch.nn.functional.rms_norm(x, (8,), eps=1e-6)).abs().max()
print(json.dumps({"file": kernel.__file__, "difference": error.item()}))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with a published kernel of one variant that loads here and one that does not."""
    with HubServer() as server:
        for name, value in server.client_env(token=server.TOKEN).items():
            if name.startswith("HF_") or name == "NO_PROXY":
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub_client, "FIRST_DELAY_S", 0.01)
        monkeypatch.setattr(hub_module, "_load_back", lambda *_: True)
        hub_module.publish(hand_made(tmp_path / "cpu", id="_norm_cpu"), "acme/tiny-norm")
        hub_module.publish(hand_made(tmp_path / "xpu", id="_norm_xpu", variant="torch-xpu"), "acme/tiny-norm")
        yield server


def load(
    hub: HubServer, home: Path, *, version: int = 1, trust: bool = True, **env: str
) -> dict[str, object]:
    result = hub.run_client(LOAD, str(version), "trust" if trust else "", home=home, env=env)
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def test_what_was_loaded_once_loads_again_without_a_network(hub: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    never = load(hub, home, HF_HUB_OFFLINE="1")
    assert "is not in the cache" in str(never["error"])
    online = load(hub, home)
    asked = len(hub.requests)
    offline = load(hub, home, HF_HUB_OFFLINE="1")
    assert offline["file"] == online["file"]
    assert isinstance(offline["difference"], float) and offline["difference"] < 1e-5
    assert len(hub.requests) == asked
    # Only the variant for this machine was fetched.
    assert not [path for path in hub.paths("GET") if path.endswith("build/torch-xpu/_ops.py")]
    assert "not in the cache" in str(load(hub, home, version=2, HF_HUB_OFFLINE="1")["error"])
    assert "trust_remote_code=True" in str(load(hub, home, trust=False, HF_HUB_OFFLINE="1")["error"])


def test_a_cache_that_lost_a_file_is_told_and_not_run(hub: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = Path(str(load(hub, home)["file"]))
    (file.parent / "layers.py").unlink()
    assert "layers.py is missing" in str(load(hub, home, HF_HUB_OFFLINE="1")["error"])


LOCK = """
import json, subprocess, sys
from pathlib import Path
from huggingface_hub import HfApi
from kernels import get_locked_kernel
repo_id = sys.argv[1]
Path("pyproject.toml").write_text(f'[tool.kernels.dependencies]\\n"{repo_id}" = 1\\n')
done = subprocess.run([Path(sys.executable).parent / "kernels", "lock", "."], capture_output=True, text=True)
refused = "trust" in done.stderr
if refused:
    branches = HfApi().list_repo_refs(repo_id, repo_type="kernel").branches
    commit = next(b.target_commit for b in branches if b.name == "v1")
    lock = [{"dependency": {"repo-id": repo_id, "version": 1}, "lock": {"commit": commit}}]
    Path("kernels.lock").write_text(json.dumps(lock))
else:
    assert done.returncode == 0, done.stderr
kernel = get_locked_kernel(repo_id, lockfile=Path("kernels.lock"), trust_remote_code=refused)
print(json.dumps({"refused": refused, "lock": json.loads(Path("kernels.lock").read_text()), "file": kernel.__file__}))
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_a_lock_file_keeps_to_a_commit(trusted: bool, tmp_path: Path) -> None:
    """The recipes of docs/loading.md: by `kernels lock`, and by hand for publishers that it refuses."""
    variant = "torch-cpu" if torch.version.cuda is None else "torch-cuda"
    package = hand_made(tmp_path / "p", variant=variant)
    files = {path: file.read_bytes() for path, file in packages.files_of(package)}
    with HubServer(trusted=["acme"] if trusted else []) as server:
        repo = server.add_kernel("acme/tiny-norm", {"v1": files})
        first = repo.branches["v1"]
        home = tmp_path / "home"
        home.mkdir()
        result = server.run_client(LOCK, "acme/tiny-norm", home=home)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout.strip().splitlines()[-1])
        assert found["refused"] is not trusted
        assert found["lock"][0]["lock"]["commit"] == first and first in found["file"]
        # The publisher builds again.
        server.add_kernel("acme/tiny-norm", {"v1": {**files, "README.md": b"another"}})
        assert repo.branches["v1"] != first
        again = (
            "from pathlib import Path; from kernels import get_locked_kernel; "
            f"print(get_locked_kernel('acme/tiny-norm', lockfile=Path('kernels.lock'), trust_remote_code={not trusted}).__file__)"
        )
        result = server.run_client(again, home=home)
        assert first in result.stdout, result.stderr


def test_with_kernels_alone_a_whole_snapshot_is_needed_and_enough(hub: HubServer, tmp_path: Path) -> None:
    """The recipe of docs/loading.md."""
    home = tmp_path / "home"
    home.mkdir()
    plain = """
import json
from kernels import get_kernel
try:
    print(json.dumps(get_kernel("acme/tiny-norm", version=1, backend="cpu", trust_remote_code=True).__file__))
except Exception as error:
    print(json.dumps(type(error).__name__))
"""
    fetch = 'from huggingface_hub import snapshot_download\nsnapshot_download("acme/tiny-norm", repo_type="kernel", revision="v1")'

    def get(**env: str) -> str:
        result = hub.run_client(plain, home=home, env=env)
        assert result.returncode == 0, result.stderr
        return str(json.loads(result.stdout.strip().splitlines()[-1]))

    assert "snapshots" in get()
    # Should this begin to work, `ak.load` need not help any more, and the docs can be shortened.
    assert get(HF_HUB_OFFLINE="1") == "ValueError"
    shutil.rmtree(home / "huggingface")
    assert hub.run_client(fetch, home=home).returncode == 0
    assert "snapshots" in get(HF_HUB_OFFLINE="1")
