"""A Xet store, for the loopback Hub: content by chunks, as `hf_xet` uploads and fetches it.

It speaks what that client needs of the published protocol: xorbs (runs of compressed chunks) and shards (how files are
put together from them) come in; how to put a file together, and ranges of xorbs, go out. Nothing is taken on trust: a
shard whose files do not have the SHA-256 that it says is refused.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

RECORD_BYTES = 48  # everything in a shard is a multiple of this
END_OF_SECTION = b"\xff" * 32
HAS_VERIFICATION, HAS_SHA256 = 1 << 31, 1 << 30
PLAIN, LZ4, GROUPED_LZ4 = range(3)


class XetError(ValueError):
    """What was uploaded cannot be read, or is not what it says."""


def hash_name(raw: bytes) -> str:
    """A hash of 32 bytes as paths and headers write it: four little-endian integers of 64 bits."""
    return "".join(f"{part:016x}" for part in struct.unpack("<4Q", raw))


@dataclass(frozen=True)
class Chunk:
    """Where a chunk lies in its xorb, header included, and what it holds."""

    start: int
    stop: int
    content: bytes


@dataclass(frozen=True)
class Term:
    """A run of chunks of one xorb."""

    xorb: str
    first: int
    stop: int
    size: int


@dataclass
class XetStore:
    """All content that was uploaded.

    Args:
        xorbs: Serialized, by name.
        chunks: Those of each xorb.
        files: How each file is put together, by its name.
        names: The name of each file by its SHA-256.
        contents: Each file's bytes by its SHA-256.
    """

    xorbs: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_xorb(self, name: str, data: bytes) -> bool:
        """Take a xorb; whether it is new.

        Raises:
            XetError: It cannot be read.
        """
        with self.lock:
            if name in self.xorbs:
                return False
            self.chunks[name] = list(read_chunks(data))
            self.xorbs[name] = data
            return True

    def add_shard(self, data: bytes) -> None:
        """Take the files that a shard describes.

        Raises:
            XetError: It cannot be read, names a xorb that is not there, or a file is not what it says.
        """
        for name, terms, sha256 in read_files(data):
            with self.lock:
                content = b"".join(self._content(term) for term in terms)
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise XetError(f"file {name} does not have the SHA-256 {sha256}")
                self.files[name] = terms
                self.names[sha256] = name
                self.contents[sha256] = content

    def _content(self, term: Term) -> bytes:
        if term.xorb not in self.chunks:
            raise XetError(f"there is no xorb {term.xorb}")
        content = b"".join(chunk.content for chunk in self.chunks[term.xorb][term.first : term.stop])
        if len(content) != term.size:
            raise XetError(f"chunks {term.first} to {term.stop} of {term.xorb} are not {term.size} bytes")
        return content

    def recipe(self, name: str, start: int, stop: int | None, url: str) -> dict[str, Any] | None:
        """How to put a range of a file together, as the client wants to be told; None without such bytes.

        Args:
            start, stop: The range in bytes; to the end where `stop` is None.
            url: Where xorbs are fetched from, to be followed by a xorb's name.
        """
        terms = self.files[name]
        size = sum(term.size for term in terms)
        stop = size if stop is None else min(stop, size)
        if start >= stop and size:
            return None
        found: list[dict[str, Any]] = []
        fetch: dict[str, list[dict[str, Any]]] = {}
        position, skipped = 0, None
        for term in terms:
            chunks = self.chunks[term.xorb][term.first : term.stop]
            first, last = term.first, term.first
            length = 0
            for index, chunk in enumerate(chunks, term.first):
                begins, position = position, position + len(chunk.content)
                if position <= start or begins >= stop:
                    continue
                if skipped is None:
                    skipped = start - begins
                if not length:
                    first = index
                last = index + 1
                length += len(chunk.content)
            if not length:
                continue
            range_ = {"start": first, "end": last}
            found.append({"hash": term.xorb, "unpacked_length": length, "range": range_})
            in_xorb = self.chunks[term.xorb]
            where = {"start": in_xorb[first].start, "end": in_xorb[last - 1].stop - 1}
            fetch.setdefault(term.xorb, []).append(
                {"range": range_, "url": f"{url}{term.xorb}", "url_range": where}
            )
        return {"offset_into_first_range": skipped or 0, "terms": found, "fetch_info": fetch}


# --- what is uploaded ---------------------------------------------------------------------------------------------


def read_chunks(xorb: bytes) -> Iterator[Chunk]:
    """The chunks of a serialized xorb.

    Raises:
        XetError: It is cut off, or holds what is not known.
    """
    at = 0
    # A footer, where a client still sends one, begins with its own mark.
    while at < len(xorb) and not xorb.startswith(b"XETBLOB", at):
        if xorb[at] != 0:
            raise XetError(f"a chunk of version {xorb[at]}")
        packed = int.from_bytes(xorb[at + 1 : at + 4], "little")
        scheme = xorb[at + 4]
        size = int.from_bytes(xorb[at + 5 : at + 8], "little")
        stop = at + 8 + packed
        if stop > len(xorb):
            raise XetError("a chunk is cut off")
        yield Chunk(at, stop, unpack(xorb[at + 8 : stop], scheme, size))
        at = stop


def read_files(shard: bytes) -> Iterator[tuple[str, list[Term], str]]:
    """The files of a shard: name, terms, SHA-256.

    Raises:
        XetError: It is cut off, or a file lacks its SHA-256.
    """
    at = RECORD_BYTES  # after the header
    while True:
        header, at = _record(shard, at)
        if header[:32] == END_OF_SECTION:
            return
        flags, count = struct.unpack_from("<II", header, 32)
        terms = []
        for _ in range(count):
            record, at = _record(shard, at)
            _, size, first, stop = struct.unpack_from("<IIII", record, 32)
            terms.append(Term(hash_name(record[:32]), first, stop, size))
        if flags & HAS_VERIFICATION:
            at += count * RECORD_BYTES
        if not flags & HAS_SHA256:
            raise XetError("a file without its SHA-256")
        record, at = _record(shard, at)
        yield hash_name(header[:32]), terms, hash_name(record[:32])


def _record(shard: bytes, at: int) -> tuple[bytes, int]:
    record = shard[at : at + RECORD_BYTES]
    if len(record) < RECORD_BYTES:
        raise XetError("the shard is cut off")
    return record, at + RECORD_BYTES


# --- compression --------------------------------------------------------------------------------------------------


def unpack(data: bytes, scheme: int, size: int) -> bytes:
    """A chunk's content.

    Raises:
        XetError: The scheme is not known, or the content has another size.
    """
    if scheme == PLAIN:
        content = data
    elif scheme == LZ4:
        content = unpack_lz4(data)
    elif scheme == GROUPED_LZ4:
        content = ungroup(unpack_lz4(data))
    else:
        raise XetError(f"compression {scheme} is not known")
    if len(content) != size:
        raise XetError(f"a chunk of {len(content)} bytes that says {size}")
    return content


def ungroup(data: bytes) -> bytes:
    """Undo the sorting of bytes by their place in groups of four."""
    content = bytearray(len(data))
    at = 0
    for place in range(4):
        count = len(range(place, len(data), 4))
        content[place::4] = data[at : at + count]
        at += count
    return bytes(content)


def unpack_lz4(frame: bytes) -> bytes:
    """The content of an LZ4 frame.

    Raises:
        XetError: It is no such frame.
    """
    if frame[:4] != b"\x04\x22\x4d\x18":
        raise XetError("no LZ4 frame")
    flags = frame[4]
    at = 6 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0) + 1  # content size, dictionary, checksum
    content = bytearray()
    while size := int.from_bytes(frame[at : at + 4], "little"):
        at += 4
        length = size & 0x7FFFFFFF
        block = frame[at : at + length]
        if size >> 31:
            content += block
        else:
            _unpack_block(block, content, linked=not flags & 0x20)
        at += length + (4 if flags & 0x10 else 0)  # a block's checksum
    return bytes(content)


def _unpack_block(block: bytes, content: bytearray, *, linked: bool) -> None:
    """Append a block's content; `linked` blocks may repeat what stands in those before."""
    begin = 0 if linked else len(content)
    at = 0
    while at < len(block):
        token = block[at]
        at += 1
        literals, at = _length(block, at, token >> 4)
        content += block[at : at + literals]
        at += literals
        if at >= len(block):
            return
        distance = int.from_bytes(block[at : at + 2], "little")
        count, at = _length(block, at + 2, token & 15)
        source = len(content) - distance
        if not distance or source < begin:
            raise XetError("an LZ4 block repeats what is not there")
        for i in range(count + 4):
            content.append(content[source + i])


def _length(block: bytes, at: int, length: int) -> tuple[int, int]:
    if length == 15:
        while True:
            more = block[at]
            at += 1
            length += more
            if more != 255:
                break
    return length, at
