"""Shared test set-up: GPU tests skip with a reason, or fail under `--require-gpu`; nothing reaches a network or a user's caches."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Before any Hugging Face library is imported: no test may leave this machine.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is: threads of OpenMP spin while they wait, so that two workers with a thread a core take several times the
# cores' time. Each gets its part of them.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, not skip, GPU tests where there is no GPU"
    )


# Files whose tests take minutes on two cores: the first to be begun, so that no worker is left with one in the end.
LONG = ("test_pipeline.py", "test_backward.py", "test_cuda.py", "test_mutants.py", "test_honest.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or config.getoption("--require-gpu"):
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_configure(config: pytest.Config) -> None:
    """Builds of tests go to a cache of their own, which the workers share, unless the run names one."""
    if "AUTOKERNEL_HF_CACHE" in os.environ:  # named, or this is a worker
        return
    folder = tempfile.mkdtemp(prefix="autokernel_hf_tests_")
    os.environ["AUTOKERNEL_HF_CACHE"] = folder

    def remove() -> None:
        os.environ.pop("AUTOKERNEL_HF_CACHE", None)
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(remove)


@pytest.fixture
def repository_root() -> Path:
    return Path(__file__).parent.parent
