"""What Triton builds once for a machine, or does once a process, so that not every child does it again.

Each child compiles into a folder of its own: what one candidate has left there must not reach another. But the module by
which Triton talks to the driver is the same for all, and takes a compiler a second. A builder, which never runs a
candidate, makes it and keeps it in the build cache; a child starts with a copy.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import shutil
import sys
from pathlib import Path

from autokernel_hf.cache import cache_root, folder_once

log = logging.getLogger(__name__)


def preload() -> None:
    """In the process that children are forked from: what Triton does before the first kernel that a process compiles.

    It imports its compiler, and hashes all of its own files, half a gigabyte, for the key of its cache.
    """
    try:
        importlib.import_module("triton.compiler.code_generator")
        for name in ("triton.runtime.cache", "triton.compiler.compiler"):  # from version to version
            key = getattr(importlib.import_module(name), "triton_key", None)
            if key is not None:
                key()
                return
    except Exception as error:  # noqa: BLE001 - foreign code, and nothing but time is lost
        log.info("Triton's compiler could not be imported ahead: %s", error)


def folder() -> Path | None:
    """Where it is kept; None where there is no Triton."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return cache_root() / "triton" / f"{version}-{python}"


def fill() -> None:
    """Make it, in a builder on a machine with a GPU. Where that fails, each child builds its own, as Triton does."""
    kept = folder()
    if kept is None or kept.is_dir():
        return
    before = os.environ.get("TRITON_CACHE_DIR")

    def make(target: Path) -> None:
        os.environ["TRITON_CACHE_DIR"] = str(target)
        from triton.runtime import driver

        driver.active.get_current_target()

    try:
        folder_once(kept, make)
    except Exception as error:  # noqa: BLE001 - foreign code, and nothing but time is lost
        log.warning("Triton's driver module could not be built ahead: %s", error)
    finally:
        if before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def copy_to(target: str) -> None:
    """Give a child its copy, if there is one."""
    kept = folder()
    if kept is not None and kept.is_dir():
        shutil.copytree(kept, target)
