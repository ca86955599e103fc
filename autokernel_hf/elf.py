"""The few facts of a shared object that the ABI checker does not tell: what it needs and where it looks for it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf.errors import PackageError

_DYNAMIC_SEGMENT, _LOAD_SEGMENT = 2, 1
_NEEDED, _STRING_TABLE, _RPATH, _RUNPATH = 1, 5, 15, 29


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A shared object's dynamic section: libraries it needs, and folders of its own in which they are searched."""

    needed: tuple[str, ...]
    search_paths: tuple[str, ...]


def dynamic(path: Path) -> Dynamic:
    """Read the dynamic section of a 64-bit little-endian ELF file.

    Raises:
        PackageError: It is no such file.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise PackageError(f"{path.name} is not a 64-bit little-endian ELF file.")
    try:
        return _parse(data)
    except (struct.error, IndexError, ValueError) as error:
        raise PackageError(f"{path.name} is a damaged ELF file ({error}).") from error


def _parse(data: bytes) -> Dynamic:
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    loads: list[tuple[int, int, int]] = []  # address, size in the file, offset in the file
    section: tuple[int, int] | None = None
    for i in range(count):
        kind, _, offset, address, _, in_file = struct.unpack_from("<IIQQQQ", data, table + i * size)
        if kind == _LOAD_SEGMENT:
            loads.append((address, in_file, offset))
        elif kind == _DYNAMIC_SEGMENT:
            section = (offset, in_file)
    if section is None:
        return Dynamic((), ())
    entries = [struct.unpack_from("<QQ", data, section[0] + at) for at in range(0, section[1], 16)]
    address = next(value for tag, value in entries if tag == _STRING_TABLE)
    strings = next(offset + address - a for a, n, offset in loads if a <= address < a + n)

    def text(at: int) -> str:
        start = strings + at
        return data[start : data.index(b"\0", start)].decode(errors="replace")

    return Dynamic(
        needed=tuple(text(value) for tag, value in entries if tag == _NEEDED),
        search_paths=tuple(text(value) for tag, value in entries if tag in (_RPATH, _RUNPATH)),
    )
