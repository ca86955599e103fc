"""What the documents say is so: figures come from result files, named files and commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_readme_shows_the_result_files(repository_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/render.py", "--check"],
        cwd=repository_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/architecture.md",
        "docs/candidates.md",
        "docs/kernels.md",
        "docs/llm.md",
        "program.md",
    ],
)
def test_links_and_modules_that_documents_name_exist(name: str, repository_root: Path) -> None:
    text = (repository_root / name).read_text()
    folder = (repository_root / name).parent
    links = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if not t.startswith("http")]
    modules = re.findall(r"`((?:autokernel_hf/)?[a-z_]+\.py)`", text)
    for link in links:
        assert (folder / link).exists(), link
    for module in set(modules) - {"kernel.py"}:  # an agent's own file, in a run folder
        path = module if module.startswith("autokernel_hf/") else f"autokernel_hf/{module}"
        assert (repository_root / path).exists(), module
    assert name == "program.md" or links or modules


def test_commands_that_the_readme_names_exist(repository_root: Path) -> None:
    from autokernel_hf.cli import app

    commands = {c.name or c.callback.__name__ for c in app.registered_commands} | {"skill"}
    named = set(re.findall(r"autokernel-hf ([a-z]+)\b", (repository_root / "README.md").read_text()))
    assert named >= {"optimize", "profile", "bench", "export", "check", "publish", "doctor"}
    assert named <= commands


def test_the_page_on_candidates_tells_the_axes_and_codes_that_the_types_have(repository_root: Path) -> None:
    from autokernel_hf.kernels import kernel_types

    page = (repository_root / "docs/candidates.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w,]+) \|", page, re.MULTILINE))
    assert rows == {name: ",".join(found.axes) for name, found in kernel_types().items()}
    for found in kernel_types().values():
        for option, codes in found.codes.items():
            told = ", ".join(f"{word} {code}" for word, code in codes.items())
            assert re.search(rf"^\|[^|]*`{option}`[^|]*\| {told} \|$", page, re.MULTILINE), (
                found.name,
                option,
            )


def test_the_whole_candidate_that_a_page_shows_is_right(repository_root: Path, tmp_path: Path) -> None:
    from autokernel_hf.candidates import read_candidate
    from autokernel_hf.evaluate import evaluate

    page = (repository_root / "docs/candidates.md").read_text()
    found = re.search(r"<!-- example -->\n```cpp\n(.*?)```", page, re.DOTALL)
    assert found is not None
    file = tmp_path / "my_rmsnorm.cpp"
    file.write_text(found[1])
    evaluation = evaluate(read_candidate(file), device="cpu", quick=True, seed=0)
    assert evaluation.status == "passed", evaluation.reason
