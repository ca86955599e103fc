"""What two compiled candidates have in common: the digest of a library's machine code, without names and line numbers.

Two sources may differ in words, in order, or in a constant that the compiler finds to be of no effect, and be the same
program. A comment moves every line number, and a source's hash is part of the names that the compiler makes up; neither is
machine code. What is hashed: the processor's instructions and constants, and of each kernel its instructions, constants
and resources. Libraries with the same digest run the same instructions on the same data; equal programs whose digests
differ (since an address has moved) are merely timed twice.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from autokernel_hf.elf import machine_images

# Names that hold a source's hash: an anonymous namespace's, and the build's own.
_MADE_UP = re.compile(rb"_GLOBAL__N__[0-9a-f]{8}_|_ak_[a-z_]+_(?:cuda|cpp)_[0-9a-f]{12}")
_OF_THE_HOST = (".text", ".rodata", ".data", ".data.rel.ro", ".init_array")
_OF_A_KERNEL = (".text.", ".nv.constant", ".nv.info", ".nv.shared", ".nv.global")
_NO_CONTENT = 8  # SHT_NOBITS


def digest_of(library: Path) -> str | None:
    """A hash of a library's machine code; None where it cannot be read as a 64-bit little-endian ELF file."""
    data = library.read_bytes()
    try:
        whole = hashlib.sha256()
        for name, content in _sections(data, 0):
            if name in _OF_THE_HOST:
                _add(whole, name, content)
        for at in machine_images(data):
            for name, content in _sections(data, at):
                if name.startswith(_OF_A_KERNEL):
                    _add(whole, name, content)
    except (struct.error, ValueError, IndexError):
        return None
    return whole.hexdigest()


def _add(whole: hashlib._Hash, name: str, content: bytes) -> None:
    for part in (name.encode(), content):
        part = _MADE_UP.sub(b"made up", part)
        whole.update(len(part).to_bytes(8, "little") + part)


def _sections(data: bytes, at: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the sections of an ELF image that begins at an offset, in its order."""
    if data[at : at + 6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF image")
    (table,) = struct.unpack_from("<Q", data, at + 40)
    size, count, of_names = struct.unpack_from("<HHH", data, at + 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, at + table + i * size) for i in range(count)]
    names = at + heads[of_names][4]
    found = []
    for head in heads:
        start = names + head[0]
        name = data[start : data.index(b"\0", start)].decode(errors="replace")
        offset, length = at + head[4], head[5]
        found.append(
            (name, length.to_bytes(8, "little") if head[1] == _NO_CONTENT else data[offset : offset + length])
        )
    return iter(found)
