"""Trained models by name, over HTTP from a Hub on loopback, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import HubServer
from tests.trained import minilm, smollm2

pytestmark = pytest.mark.timeout(1200)


def told(hub: HubServer, work: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a command that talks to the loopback Hub from an empty cache."""
    done = subprocess.run(
        [sys.executable, "-m", "autokernel_hf", *arguments, "--device", "cpu", "--json"],
        cwd=work,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(work / "hf"), "HF_TOKEN": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_minilm_by_name_is_optimized_with_its_trained_weights(tmp_path: Path) -> None:
    with HubServer() as hub:
        sha = hub.add_model("acme/all-MiniLM-L6-v2", minilm())
        pulled = told(hub, tmp_path, "pull", "acme/all-MiniLM-L6-v2")
        record = told(
            hub, tmp_path, "optimize", "acme/all-MiniLM-L6-v2", "--input-shape", "2,128",
            "--top", "1", "--max-experiments", "2",
        )  # fmt: skip
    assert pulled["revision"] == sha
    assert pulled["parameters"] == 22_713_216
    assert record["model"] == {
        "id": "acme/all-MiniLM-L6-v2",
        "revision": sha,
        "architecture": "BertModel",
        "weights": "trained",
    }
    # BERT has little to win; whichever it is, it must be told in full.
    assert record["status"] in ("won", "no_speedup"), record["reason"]
    assert record["reason"]
    assert bool(record["packages"]) == (record["status"] == "won")
    if record["verification"] is not None:
        assert record["verification"]["error"]["ratio_to_eager"] < 2
        assert all(calls > 0 for calls in record["verification"]["kernel_calls"].values())


@pytest.mark.slow
def test_smollm2_by_name_is_optimized_from_its_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (gguf,) = smollm2().glob("*.gguf")
    shutil.copy(gguf, folder)
    with HubServer() as hub:
        sha = hub.add_model("acme/SmolLM2-135M-Instruct", folder)
        record = told(
            hub, tmp_path, "optimize", "acme/SmolLM2-135M-Instruct", "--input-shape", "1,256",
            "--top", "3", "--max-experiments", "1",
        )  # fmt: skip
    assert record["model"]["revision"] == sha
    assert record["model"]["architecture"] == "LlamaForCausalLM"
    assert record["model"]["weights"] == "trained"
    tried = {t["kernel_type"] for t in record["targets"] if t["experiments"]}
    assert tried <= {"rmsnorm", "rotary_embedding", "gated_activation", "add_norm"}
    assert tried
    if record["verification"] is not None:
        assert record["verification"]["error"]["top1_agreement"] == 1.0
