"""What Triton has compiled of one candidate, ahead of the child that will be judged.

A child compiles into a folder of its own, since what one candidate has left there must not reach another. What a process
with the same candidate has compiled before may reach it: it is that candidate's own doing either way. It is kept by the
build's id, which no other source has, and a child that loads that build starts with a copy.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tarfile
import time
from pathlib import Path

from autokernel_hf.cache import cache_root, folder_once

MOST_BYTES = 256 << 20
_MOST_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}")


def folder(built_id: str) -> Path:
    """Where it is kept."""
    return cache_root() / "triton-ahead" / built_id


def packed(source: Path, already: frozenset[str]) -> bytes:
    """The files of a folder of Triton's, but for those that were there before, for `keep`."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file in sorted(source.rglob("*")):
            name = str(file.relative_to(source))
            if file.is_file() and name not in already:
                archive.add(file, name, recursive=False)
    return content.getvalue()


def names_in(source: Path) -> frozenset[str]:
    """The files of a folder, relative to it."""
    return frozenset(str(f.relative_to(source)) for f in source.rglob("*") if f.is_file())


def keep(built_id: str, content: bytes) -> int:
    """Keep what a child has packed, and tell how many files that is. Nothing but plain files in one level of folders.

    Raises:
        ValueError: The child has packed something else.
    """
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                parts = member.name.split("/")
                if not member.isreg() or len(parts) > 2 or not all(map(_NAME.fullmatch, parts)):
                    raise ValueError(f"{member.name[:100]!r} is no file of Triton's")
                if len(files) == _MOST_FILES or member.size > MOST_BYTES:
                    raise ValueError("too much")
                file = archive.extractfile(member)
                assert file is not None
                files[member.name] = file.read()
    except tarfile.TarError as error:
        raise ValueError(str(error)) from None
    if not files:
        return 0

    def make(target: Path) -> None:
        for name, data in files.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(data)

    folder_once(folder(built_id), make)
    return len(files)


def drop(built_id: str) -> None:
    """Forget what was kept of a build: it takes a megabyte a variant, and is made again where it is wanted."""
    shutil.rmtree(folder(built_id), ignore_errors=True)


def drop_old(seconds: float) -> None:
    """Forget what processes that were killed have left, where it is older than that."""
    for left in folder("").glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > seconds:
                shutil.rmtree(left, ignore_errors=True)


def copy_for(built_id: str) -> None:
    """In a child that loads a build: take what was compiled of it before into the folder that Triton looks in."""
    kept, own = folder(built_id), os.environ.get("TRITON_CACHE_DIR")
    if own is not None and kept.is_dir():
        with contextlib.suppress(OSError):  # nothing but time is lost
            shutil.copytree(kept, own, dirs_exist_ok=True)
