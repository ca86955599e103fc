"""Folders that are made once and then only read: keyed by what they are made from, safe among processes.

A folder is put together under a temporary name and moved into place whole, so that a reader sees all of it or none.
A lock merely keeps processes from doing the same work twice: it is the kernel's own (flock), so it ends with its
holder, and one that waits too long goes ahead without it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autokernel_hf.errors import AutokernelError

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 120.0
_STALE_S = 24 * 3600.0


def cache_root() -> Path:
    """`AUTOKERNEL_HF_CACHE`, or `~/.cache/autokernel_hf`."""
    named = os.environ.get("AUTOKERNEL_HF_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "autokernel_hf"


def need_cache() -> Path:
    """The cache's folder, made where it is not there: to be asked for before work that would fail late without it.

    Raises:
        AutokernelError: It cannot be written.
    """
    folder = cache_root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        raise AutokernelError(
            f"The build cache {folder} cannot be written: {error.strerror or error}.",
            remedy="Free some space, or set AUTOKERNEL_HF_CACHE to a folder that you can write.",
        ) from error
    return folder


def folder_once(folder: Path, make: Callable[[Path], None]) -> bool:
    """Have `folder` made by `make`, which fills a temporary folder beside it, unless it is there already.

    Returns:
        Whether it was there already.
    """
    if folder.is_dir():
        return True
    folder.parent.mkdir(parents=True, exist_ok=True)
    locks = cache_root() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with _lock(locks / folder.name):
        if folder.is_dir():
            return True
        _remove_stale(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            make(temporary)
            temporary.chmod(0o755)
            try:
                temporary.rename(folder)
            except OSError as error:
                # Another process, which had not waited for the lock, was first; the content is the same.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    log.warning("going ahead without the lock %s, which another process holds", path)
                    break
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Remove what builds that were killed a day ago left behind."""
    for left in parent.glob(".*.????????"):
        with contextlib.suppress(OSError):
            if left.is_dir() and time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
