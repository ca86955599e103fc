"""Shared test set-up: GPU tests skip with a reason, or fail under `--require-gpu`; nothing reaches a network or a user's caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any Hugging Face library is imported: no test may leave this machine.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, not skip, GPU tests where there is no GPU"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or config.getoption("--require-gpu"):
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Builds of tests go to a cache of their own, unless the run names one."""
    if "AUTOKERNEL_HF_CACHE" not in os.environ:
        os.environ["AUTOKERNEL_HF_CACHE"] = str(tmp_path_factory.mktemp("autokernel_hf_cache"))


@pytest.fixture
def repository_root() -> Path:
    return Path(__file__).parent.parent
