"""The few facts of a shared object that the ABI checker does not tell.

What it needs, where it looks for that, and for which GPUs it holds code.
"""

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


# --- GPU code -----------------------------------------------------------------------------------------------------

# A fat binary, as nvcc puts it into a library: a header, then an entry for each piece of code. NVIDIA does not describe
# it; these are the fields that nvcc 13.0 was seen to write for every kind of architecture.
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of all entries
_PTX, _MACHINE_CODE = 1, 2
_OWN_FEATURES, _FAMILY_FEATURES = 1 << 20, 1 << 21


@dataclass(frozen=True, slots=True)
class GpuCode:
    """For which compute capabilities (9.0, 9.0a, 10.0f) a library holds machine code, and for which PTX."""

    machine: tuple[str, ...]
    ptx: tuple[str, ...]

    def runs(self, arch: str) -> bool:
        """Whether there is code for an architecture as the Kernel Hub writes it: 9.0a, 9.0+PTX."""
        capability, _, more = arch.partition("+")
        return capability in self.ptx if more == "PTX" else capability in self.machine


def gpu_code(path: Path) -> GpuCode:
    """What is in the fat binaries of a library; both empty where it has none."""
    data = path.read_bytes()
    found: dict[int, set[str]] = {_PTX: set(), _MACHINE_CODE: set()}
    at = data.find(_FATBIN_MAGIC)
    while at >= 0:
        for kind, capability, _ in _fatbin_entries(data, at):
            found.setdefault(kind, set()).add(capability)
        at = data.find(_FATBIN_MAGIC, at + 4)
    return GpuCode(machine=_in_order(found[_MACHINE_CODE]), ptx=_in_order(found[_PTX]))


def machine_images(data: bytes) -> list[int]:
    """Where the images of machine code begin in a library with fat binaries; they are not compressed in ours."""
    found = []
    at = data.find(_FATBIN_MAGIC)
    while at >= 0:
        found += [start for kind, _, start in _fatbin_entries(data, at) if kind == _MACHINE_CODE]
        at = data.find(_FATBIN_MAGIC, at + 4)
    return found


def _fatbin_entries(data: bytes, at: int) -> list[tuple[int, str, int]]:
    """(kind, capability, where it begins) of each entry; nothing where the bytes only look like a fat binary."""
    try:
        _, version, header, size = _FATBIN_HEADER.unpack_from(data, at)
        entries, at = [], at + header
        end = at + size
        if version != 1 or end > len(data):
            return []
        while at < end:
            kind, _, head, length = struct.unpack_from("<HHIQ", data, at)
            (number,) = struct.unpack_from("<I", data, at + 28)
            (flags,) = struct.unpack_from("<Q", data, at + 40)
            suffix = "a" if flags & _OWN_FEATURES else "f" if flags & _FAMILY_FEATURES else ""
            entries.append((kind, f"{number // 10}.{number % 10}{suffix}", at + head))
            at += head + length
    except struct.error:
        return []
    return entries


def _in_order(capabilities: set[str]) -> tuple[str, ...]:
    return tuple(sorted(capabilities, key=lambda c: (float(c.rstrip("af")), c)))
