"""What two compiled candidates have in common: the digest of their machine code, without names and line numbers.

Two sources may differ in words, in order, or in a constant that the compiler finds to be of no effect, and be the same
program. A comment moves every line number, and a source's hash is part of the names that the compiler makes up; neither is
machine code.

What is hashed are the objects, before they are linked: a linker places strings by their bytes, some of which are those
made-up names, and with them every address in the code. In an object an address is a relocation, which says what is meant:
a place within a section, or a name from elsewhere. So there go in: all sections that are loaded, what their relocations
refer to, and of each kernel its instructions, constants and resources, in the order of the kernels' names: where threads
compile kernels side by side, the order within an image, and the numbers of its symbols, are not the source's alone. Programs
with the same digest run the same instructions on the same data, the host's launches among them; equal programs whose
digests differ are merely timed twice.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf.elf import machine_images

# Names that hold a source's hash: an anonymous namespace's, of variables and static kernels, and the build's own.
_MADE_UP = re.compile(
    rb"(?:_GLOBAL__N_|_INTERNAL|__nv_static_[0-9]+_)_[0-9a-f]{8}_(?:[0-9]+_unit_cu_[0-9a-f]{8}_[0-9]+)?"
    rb"|_ak_[a-z_]+_(?:cuda|cpp)_[0-9a-f]{12}"
)
_OF_A_KERNEL = (b".text.", b".nv.constant", b".nv.info", b".nv.shared", b".nv.global")
_FACTS = b".nv.info"  # of all kernels together, and of each
_FAT_BINARIES = b".nv_fatbin"
_NO_CONTENT, _SYMBOLS, _RELOCATIONS, _SHORT_RELOCATIONS = 8, 2, 4, 9  # types of sections
_SIZED = 4  # an entry of .nv.info with bytes behind it
_OF_A_SYMBOL = (
    0x0A,
    0x11,
    0x12,
    0x23,
    0x2F,
)  # that begin with a symbol's number: parameters, frame, stacks, registers
_LOADED = 2  # a flag of sections
_UNDEFINED, _RESERVED = 0, 0xFF00  # numbers of sections


@dataclass(frozen=True, slots=True)
class _Section:
    name: bytes
    kind: int
    flags: int
    content: bytes  # of one without any, its size
    link: int
    info: int


def digest_of(objects: Sequence[Path]) -> str | None:
    """A hash of the machine code in object files; None where one cannot be read as a 64-bit little-endian ELF object."""
    whole = hashlib.sha256()
    try:
        for file in objects:
            _add_object(whole, file.read_bytes())
    except (struct.error, ValueError, IndexError):
        return None
    return whole.hexdigest()


def _add_object(whole: hashlib._Hash, data: bytes) -> None:
    sections = _sections(data, 0)
    if not any(s.flags & _LOADED and s.content for s in sections):
        raise ValueError("an object without code or data")
    for section in sections:
        if not section.flags & _LOADED or section.name.startswith(b".note"):
            continue
        if section.name == _FAT_BINARIES:
            continue  # it tells of sources, too; its images follow
        _add(whole, section.name, section.content)
    for section in sections:
        if section.kind == _SHORT_RELOCATIONS:
            raise ValueError("relocations whose addends lie in the code")
        if section.kind == _RELOCATIONS and sections[section.info].flags & _LOADED:
            _add(whole, section.name, b"\n".join(_relocations(section, sections)))
    # In the order of their names, which is that of no hash. Without an image there would be nothing of the kernels.
    images = machine_images(data)
    if not images and any(s.name == _FAT_BINARIES for s in sections):
        raise ValueError("fat binaries without machine code")
    for at in images:
        for name, content in sorted(_of_kernels(_sections(data, at))):
            _add(whole, name, content)


def _of_kernels(sections: Sequence[_Section]) -> Iterator[tuple[bytes, bytes]]:
    """(name, content) of the sections of an image that make its kernels, and of their relocations."""
    for section in sections:
        if section.kind in (_RELOCATIONS, _SHORT_RELOCATIONS):
            if sections[section.info].name.startswith(_OF_A_KERNEL):
                yield _plain(section.name), b"\n".join(_relocations(section, sections, numbered=False))
        elif section.name.startswith(_FACTS):
            yield _plain(section.name), b"\n".join(sorted(_told(section, sections)))
        elif section.name.startswith(_OF_A_KERNEL):
            yield _plain(section.name), section.content


def _told(section: _Section, sections: Sequence[_Section]) -> Iterator[bytes]:
    """The entries of `.nv.info`, those of a symbol with its name for its number, which depends on the others."""
    symbols = sections[section.link]
    if symbols.kind != _SYMBOLS:
        raise ValueError("facts without symbols")
    names = sections[symbols.link].content
    at = 0
    while at < len(section.content):
        form, what, size = struct.unpack_from("<BBH", section.content, at)
        length = size if form == _SIZED else 0
        value = section.content[at + 4 : at + 4 + length]
        if form == _SIZED and what in _OF_A_SYMBOL and length >= 4:
            (number,) = struct.unpack_from("<I", value)
            name, _, _, home = struct.unpack_from("<IBBH", symbols.content, 24 * number)
            own = names[name : names.index(b"\0", name)]  # a section's symbol has none
            value = value[4:] + (own or sections[home].name)
        yield b"%d %d %d " % (form, what, size) + _plain(value)
        at += 4 + length


def _add(whole: hashlib._Hash, *parts: bytes) -> None:
    for part in map(_plain, parts):
        whole.update(len(part).to_bytes(8, "little") + part)


def _plain(text: bytes) -> bytes:
    return _MADE_UP.sub(b"made up", text)


def _relocations(section: _Section, sections: Sequence[_Section], *, numbered: bool = True) -> list[bytes]:
    """What the addresses in a section refer to: `where kind addend`, and a place in a section, or a name from elsewhere.

    Args:
        numbered: Whether sections are told by their numbers, too.
    """
    table = sections[section.link]
    if table.kind != _SYMBOLS:
        raise ValueError("relocations without symbols")
    names = sections[table.link].content
    found = []
    size = 24 if section.kind == _RELOCATIONS else 16
    for at in range(0, len(section.content), size):
        where, what = struct.unpack_from("<QQ", section.content, at)
        (addend,) = struct.unpack_from("<q", section.content, at + 16) if size == 24 else (0,)
        symbol, kind = what >> 32, what & 0xFFFFFFFF
        name, _, _, home, value, _ = struct.unpack_from("<IBBHQQ", table.content, 24 * symbol)
        if home == _UNDEFINED:
            meant = b"another's %s" % names[name : names.index(b"\0", name)]
        elif home >= _RESERVED:
            meant = b"%d of %d" % (value, home)
        else:
            meant = b"%d in %d %s" % (value, home if numbered else 0, sections[home].name)
        found.append(_plain(b"%d %d %d %s" % (where, kind, addend, meant)))
    return found


def _sections(data: bytes, at: int) -> list[_Section]:
    """The sections of an ELF image that begins at an offset, in its order."""
    if data[at : at + 6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF image")
    (table,) = struct.unpack_from("<Q", data, at + 40)
    size, count, of_names = struct.unpack_from("<HHH", data, at + 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, at + table + i * size) for i in range(count)]
    names = at + heads[of_names][4]
    found = []
    for word, kind, flags, _, offset, length, link, info, _, _ in heads:
        start = names + word
        content = length.to_bytes(8, "little")
        if kind != _NO_CONTENT:
            content = data[at + offset : at + offset + length]
            if len(content) != length:
                raise ValueError("a section beyond the end of the file")
        found.append(_Section(data[start : data.index(b"\0", start)], kind, flags, content, link, info))
    return found
