"""The llm proposer against a real server: `transformers serve` with SmolLM2-135M, which writes no usable kernels."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from autokernel_hf.ledger import Asked, Round
from autokernel_hf.llm import Chat, Patience
from autokernel_hf.llm_proposer import LanguageModel, Rules
from autokernel_hf.progress import Silent
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import KnownJudge, decide, diagnose, settings, starter, target
from tests.trained import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# The server takes its configuration from a folder in Hub layout; from the GGUF file itself it finds no architecture.
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
folder, gguf, out = sys.argv[1:]
loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
known = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
model = LlamaForCausalLM(LlamaConfig.from_dict(known))
model.load_state_dict(loaded.state_dict())
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(out)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(base URL, name of the model) of a server that was started for this file."""
    missing = [m for m in ("fastapi", "uvicorn", "openai", "gguf") if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"`transformers serve` needs {', '.join(missing)}")
    work = tmp_path_factory.mktemp("served")
    model, log = work / "SmolLM2-135M-Instruct", work / "server.log"
    (gguf,) = smollm2().glob("*.gguf")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", CONVERT, str(gguf.parent), gguf.name, str(model)], env=environment, check=True
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "transformers.cli.transformers", "serve", str(model),
        "--device", "cpu", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1", str(model)
        finally:
            server.kill()  # it would first finish the answer that it is writing
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"the server did not come up: {log.read_text()}")


def test_a_run_survives_a_model_that_writes_no_kernels_and_says_so(
    served: tuple[str, str], tmp_path: Path
) -> None:
    url, name = served
    found = settings(proposer="llm", llm=name, base_url=url, max_tokens=40_000)
    with Run.create(tmp_path, "org/model", found) as run:
        run.add_target(target(), [starter()])
        asked = Chat(name, base_url=url, patience=Patience(timeout_s=600))
        model = LanguageModel(
            run, asked, rules=Rules(temperatures=(0.7,), fruitless_rounds=2, answer_tokens=40)
        )
        search = Search(
            target(),
            [starter()],
            run=run,
            judge=KnownJudge(),
            decide=decide,
            diagnose=diagnose,
            limits=Limits(max_experiments=6, max_reverts=9),
            progress=Silent(),
        )
        result, winner = search.run_all(model)
        questions = [e for e in run.events() if isinstance(e, Asked)]
        rounds = [e for e in run.events() if isinstance(e, Round)]
        assert [e.tag.split(",")[0] for e in run.experiments()][0] == "starter"
        assert not any("llm" in e.tag for e in run.experiments()), "nothing of it reached the judge"
    assert result.experiments == 6
    assert winner is not None, "the playbook went on"
    assert [r.usable for r in rounds] == [0, 0, 0]
    assert all(words for r in rounds[:2] for words in r.unusable)
    assert f"{name} made no usable proposal in 2 rounds" in result.reason
    # The server's own count: each prompt holds the contract and the task, each answer is at most as long as asked for.
    assert len(questions) >= 4
    assert all(not q.estimated and q.prompt_tokens > 1000 and q.completion_tokens <= 80 for q in questions)
    assert all((run.path / str(q.transcript)).exists() for q in questions)
