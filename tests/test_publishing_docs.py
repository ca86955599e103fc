"""Every command and every block of the pages for authors and consumers, run as printed, against a loopback Hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer
from tests.sigstore_server import ISSUER, SigstoreServer

BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add_token("hf_you", user="you")
        yield server


@pytest.fixture(scope="module")
def place(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder to work in, and an environment with the program on its path and nothing of the user's."""
    folder = tmp_path_factory.mktemp("author")
    scripts = tmp_path_factory.mktemp("bin")
    program = scripts / "autokernel-hf"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autokernel_hf "$@"\n')
    program.chmod(0o755)
    env = hub.client_env(token="hf_you", home=tmp_path_factory.mktemp("home"))
    env |= {
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "AUTOKERNEL_HF_CACHE": os.environ["AUTOKERNEL_HF_CACHE"],
    }
    return folder, env


@pytest.mark.slow
def test_an_author_gets_from_a_file_to_the_hub_by_the_page_alone(
    hub: HubServer, place: tuple[Path, dict[str, str]], repository_root: Path, tmp_path: Path
) -> None:
    """The page's sigstore is the public one, where a browser would open."""
    folder, env = place
    with SigstoreServer() as sigstore:
        _author(hub, folder, env, repository_root, sigstore, sigstore.trust_config(tmp_path / "trust.json"))


def _author(
    hub: HubServer, folder: Path, env: dict[str, str], root: Path, sigstore: SigstoreServer, trust: Path
) -> None:
    env = {**env, "GITLAB_CI": "true", "SIGSTORE_ID_TOKEN": sigstore.identity_token("you@example.org")}
    commands = [line for text in blocks(root / "docs/publishing.md", "bash") for line in text.splitlines()]
    assert len(commands) == 14
    said = {}
    for command in commands:
        if command.startswith("autokernel-hf tune"):
            command += " --max-experiments 2"  # the page's is the same, and longer
        if " --sign" in command:
            command = f"{command.replace('https://github.com/login/oauth', ISSUER)} --trust-config {trust}"
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said[command] = done.stdout
        if "--dry-run" in command:
            assert ("kernel", "you/fast-norms") not in hub.repos
    repo = hub.kernel("you/fast-norms")
    assert repo.private and set(repo.branches) == {"main", "v1", "v2"}
    assert "(loaded back)" in said[next(c for c in commands if "--private" in c)]
    assert f"signed by you@example.org ({ISSUER})" in said[next(c for c in said if "--signed-by" in c)]
    assert "version=2" in repo.files("main")["README.md"].decode()
    bundle = folder / "packages" / "fast-cpu"
    assert sorted(path.name for path in (bundle / "sources").iterdir()) == ["activation", "rmsnorm"]
    trained = folder / "packages" / "trained-norms"
    assert "has_backward = True" in next(trained.glob("build/*/layers.py")).read_text()
    assert [path.name for path in (trained / "sources").iterdir()] == ["rmsnorm_backward"]
    assert "configuration" in said[next(c for c in said if c.startswith("autokernel-hf tune"))]


@pytest.mark.slow
def test_a_consumer_gets_a_kernel_into_a_model_by_the_page_alone(
    hub: HubServer, place: tuple[Path, dict[str, str]], repository_root: Path
) -> None:
    """In the author's folder, for the local package that the page names, and with the repository that the author made."""
    folder, env = place
    assert ("kernel", "you/fast-norms") in hub.repos, "the test before this one publishes it"
    page = repository_root / "docs/loading.md"
    code = "\n".join(blocks(page, "python"))
    assert code.count("assert ") == 1
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\{'_ak_rmsnorm_cpp_\w+::rmsnorm(_no_grad)?': 5\}", done.stdout), done.stdout
    (install,) = blocks(page, "bash")
    assert "kernels>=0.17.2,<0.18" in install
    # The variable of the page, and the look before anything is run.
    redirected = subprocess.run(
        [
            sys.executable,
            "-c",
            "import kernels; print(kernels.get_kernel('you/fast-norms', version=1, backend='cpu').__file__)",
        ],
        cwd=folder,
        env={**env, "LOCAL_KERNELS": f"you/fast-norms={folder}/packages/fast-norms"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert str(folder / "packages/fast-norms") in redirected.stdout, redirected.stderr
    looked = subprocess.run(
        ["sh", "-c", "autokernel-hf check you/fast-norms"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "looked at only" in looked.stdout and "problem" not in looked.stdout, looked.stdout + looked.stderr
