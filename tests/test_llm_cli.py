"""The llm proposer through the command line, with the real judge and a scripted server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel_hf.kernels import starter
from autokernel_hf.ledger import Asked, Reflected, Round
from autokernel_hf.llm import KEY_VARIABLE
from autokernel_hf.runs import Run
from tests.llm_server import ChatServer, Step, error

pytestmark = pytest.mark.timeout(1200)


def cli(server: ChatServer, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in (KEY_VARIABLE, "HF_HUB_OFFLINE")}
    return subprocess.run(
        [sys.executable, "-m", "autokernel_hf", "optimize", *arguments, "--json"],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def llm(server: ChatServer, *more: str) -> list[str]:
    return ["--device", "cpu", "--proposer", "llm", "--llm", "m", "--base-url", server.url, *more]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 whose activations are most of its time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_inner=8192, n_layer=2, n_head=4, vocab_size=512, n_positions=256,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "wide-gpt2"
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_refused_key_and_an_unknown_price_are_told_before_any_work(
    model_folder: Path, tmp_path: Path
) -> None:
    with ChatServer("yes", models=401) as server:
        done = cli(server, str(model_folder), *llm(server), cwd=tmp_path)
        assert done.returncode == 1
        assert "refuses its key" in done.stderr
        assert KEY_VARIABLE in done.stderr
        assert "--resume" in done.stderr
        assert "Traceback" not in done.stderr
        assert server.asked == []
    with ChatServer("yes") as server:
        done = cli(server, str(model_folder), *llm(server, "--max-cost", "1"), cwd=tmp_path)
    assert done.returncode == 2
    assert "--max-cost cannot be held" in done.stderr
    assert "--price-in" in done.stderr
    assert not list(tmp_path.rglob("profile.json")), "nothing was profiled"


@pytest.mark.slow
def test_a_run_with_a_model_from_refusal_through_a_repair_to_a_verified_package(
    model_folder: Path, tmp_path: Path
) -> None:
    """The key fails, is cured, and the resumed run takes an edit, a repair and a reflexion to the real judge."""
    source = starter("activation", "cpp")
    (old,) = [text for text in source.splitlines() if text.startswith("constexpr int64_t kChunk")]

    def edit(before: str, after: str, why: str) -> str:
        return f"Hypothesis: {why}\n<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE\n"

    broken = f"{old}\nconstexpr int64_t kHalf = kChunk / kNothing;"
    repaired = f"{old}\nconstexpr int64_t kHalf = kChunk / 2;\nstatic_assert(kHalf * 2 == kChunk);"
    steps = [
        error(401, "expired"),
        edit(old, broken, "half chunks"),
        *["I would try something.", "I would, really."] * 2,  # the other two candidates of the round
        edit(broken.splitlines()[1], "\n".join(repaired.splitlines()[1:]), "the constant has a name now"),
        "#2: kNothing is no name\n#3: it does the same work",
        Step(text="nothing more"),
    ]
    with ChatServer(*steps) as server:
        first = cli(
            server, str(model_folder), *llm(server, "--top", "1", "--max-experiments", "4", "--max-tokens", "50000"),
            cwd=tmp_path,
        )  # fmt: skip
        assert first.returncode == 1
        assert "its key was refused (HTTP 401: expired)" in first.stderr
        (folder,) = (tmp_path / "runs").iterdir()
        assert f"--resume {folder}" in first.stderr
        done = cli(server, "--resume", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["targets"][0]["experiments"] == 4
    assert record["status"] == "won", record["reason"]
    with Run.open(folder) as run:
        tried = run.experiments()
        asked = [e for e in run.events() if isinstance(e, Asked)]
        rounds = [e for e in run.events() if isinstance(e, Round)]
        reflected = {e.experiment: e.why for e in run.events() if isinstance(e, Reflected)}
    assert [e.tag for e in tried][:3] == ["starter", "llm", "llm,repair,repair-of-2"]
    assert tried[1].evaluation.status == "compile_error"
    assert tried[2].evaluation.status == "passed", tried[2].evaluation.reason
    assert "kNothing" in server.prompts()[6], "the compiler's words"
    assert reflected == {2: "kNothing is no name", 3: "it does the same work"}
    assert rounds[0].usable == 1
    assert any("no_code" in words for words in rounds[0].unusable)
    assert sum(a.prompt_tokens + a.completion_tokens for a in asked) == 1100 * (len(server.asked) - 1)
