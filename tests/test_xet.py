"""Large files of packages travel by Xet where the Hub has it, and through Git LFS where it has not: with the real hf_xet."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import HubServer
from tests.package_factory import exported, hand_made
from tests.xet_store import XetError, XetStore, read_chunks, ungroup, unpack_lz4

PUBLISH = """
import json, sys
from autokernel_hf import hub, hub_client
from autokernel_hf.errors import HubError
hub_client.FIRST_DELAY_S = 0.01
if sys.argv[2] == "quick":
    hub._load_back = lambda *_: True
from pathlib import Path
for _ in range(int(sys.argv[3])):
    try:
        told = {"loaded": hub.publish(Path(sys.argv[1]), "acme/tiny-norm").loaded}
    except HubError as error:
        told = {"message": error.message, "remedy": error.remedy}
    print(json.dumps(told))
"""
TABLE = bytes(range(256)) * 700  # more than one chunk


@pytest.fixture
def hub() -> Iterator[HubServer]:
    pytest.importorskip("hf_xet")
    with HubServer(xet=True) as server:
        yield server


def large(folder: Path) -> Path:
    """A package with a file of several chunks that compress well."""
    return hand_made(folder, more={"table.bin": TABLE.decode("latin-1")})


def publish(
    hub: HubServer, folder: Path, *, quick: bool = True, times: int = 1, **env: str
) -> list[dict[str, Any]]:
    """What each of `times` publications by one process told."""
    how = "quick" if quick else "load"
    result = hub.run_client(PUBLISH, str(folder), how, str(times), token=hub.TOKEN, env=env, timeout=300)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def asked(hub: HubServer, method: str, part: str) -> int:
    return sum(part in path for path in hub.paths(method))


def served(hub: HubServer) -> bytes:
    return hub.kernel("acme/tiny-norm").files("v1")["build/torch-cpu/table.bin"]


@pytest.mark.slow
def test_a_compiled_package_travels_by_xet_there_and_back(hub: HubServer, tmp_path: Path) -> None:
    package = Path(exported("rmsnorm", "cpp", tmp_path).path)
    assert publish(hub, package, quick=False) == [{"loaded": True}]
    (library,) = package.glob("build/*/*.so")
    path = library.relative_to(package).as_posix()
    assert hub.kernel("acme/tiny-norm").files("v1")[path] == library.read_bytes()
    assert asked(hub, "POST", "/xet/v1/xorbs/") == 1
    # Once to compare the bytes, once by get_kernel in a process of its own.
    assert asked(hub, "GET", "/xet/v1/reconstructions/") == 2
    assert asked(hub, "PUT", "/lfs/") == 0
    assert asked(hub, "GET", f"/resolve/{hub.kernel('acme/tiny-norm').branches['v1']}/{path}") == 0


def test_a_hub_without_xet_gets_large_files_through_lfs_from_a_client_that_has_it(tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    with HubServer() as hub:
        assert publish(hub, large(tmp_path / "p"), HF_HUB_DISABLE_XET="0") == [{"loaded": True}]
        assert asked(hub, "GET", "/xet-write-token/") > 0
        assert asked(hub, "PUT", "/lfs/") == 1
        assert served(hub).decode().encode("latin-1") == TABLE


def test_xet_can_be_switched_off_as_everywhere(hub: HubServer, tmp_path: Path) -> None:
    assert publish(hub, large(tmp_path / "p"), HF_HUB_DISABLE_XET="1") == [{"loaded": True}]
    assert asked(hub, "PUT", "/lfs/") == 1
    assert not [path for path in hub.paths() if "xet" in path]
    assert served(hub).decode().encode("latin-1") == TABLE


def test_an_upload_by_xet_goes_on_after_an_interruption_without_sending_chunks_again(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.fail_next(0, "/commit/v1")
    first, second = publish(hub, large(tmp_path / "p"), times=2)
    assert "cannot be reached" in first["message"] and second == {"loaded": True}
    assert asked(hub, "POST", "/xet/v1/xorbs/") == 1
    assert served(hub).decode().encode("latin-1") == TABLE


@pytest.mark.parametrize(
    ("path", "status", "times", "told"),
    [
        ("/xet/v1/shards", 403, 9, ("store of large files answers 403", "HF_HUB_DISABLE_XET=1")),
        ("/xet-write-token/", 403, 9, ("the Hub refuses it to tester", "right to write")),
        pytest.param("/xet-write-token/", 429, 1, None, marks=pytest.mark.slow),
        pytest.param("/xet/v1/xorbs/", 500, 1, None, marks=pytest.mark.slow),
        pytest.param("/xet/v1/xorbs/", 0, 1, None, marks=pytest.mark.slow),
    ],
)
def test_what_the_store_refuses_is_told_and_its_faults_are_waited_out(
    hub: HubServer, path: str, status: int, times: int, told: tuple[str, str] | None, tmp_path: Path
) -> None:
    hub.fail_next(status, path, times=times)
    (answer,) = publish(hub, large(tmp_path / "p"))
    if told is None:
        assert answer == {"loaded": True}
        assert served(hub).decode().encode("latin-1") == TABLE
    else:
        assert told[0] in answer["message"] and told[1] in answer["remedy"]
        assert "build/torch-cpu/table.bin" not in hub.kernel("acme/tiny-norm").files("v1")


# --- the store itself ---------------------------------------------------------------------------------------------


def chunk(content: bytes, scheme: int = 0, size: int | None = None) -> bytes:
    size = len(content) if size is None else size
    return b"\0" + len(content).to_bytes(3, "little") + bytes([scheme]) + size.to_bytes(3, "little") + content


def shard(name: bytes, size: int, sha256: bytes) -> bytes:
    """One file of one chunk."""
    header = bytes(48)
    file = struct.pack("<32sIIQ", b"f" * 32, 1 << 30, 1, 0)
    term = struct.pack("<32sIIII", name, 0, size, 0, 1)
    return header + file + term + sha256 + bytes(16) + b"\xff" * 32 + bytes(16)


def test_the_store_refuses_files_that_are_not_what_they_say() -> None:
    store = XetStore()
    store.add_xorb("11" * 32, chunk(b"hello"))
    with pytest.raises(XetError, match="does not have the SHA-256"):
        store.add_shard(shard(b"\x11" * 32, 5, bytes(32)))
    with pytest.raises(XetError, match="are not 4 bytes"):
        store.add_shard(shard(b"\x11" * 32, 4, bytes(32)))
    with pytest.raises(XetError, match="no xorb"):
        store.add_shard(shard(b"\x22" * 32, 5, bytes(32)))
    with pytest.raises(XetError, match="cut off"):
        store.add_shard(shard(b"\x11" * 32, 5, bytes(32))[:100])
    assert not store.files


@pytest.mark.parametrize(
    ("xorb", "reason"),
    [
        (chunk(b"hello")[:-1], "cut off"),
        (b"\x01" + chunk(b"hello")[1:], "version 1"),
        (chunk(b"hello", scheme=9), "compression 9"),
        (chunk(b"hello", scheme=1), "no LZ4 frame"),
        (chunk(b"hello", size=6), "5 bytes that says 6"),
    ],
)
def test_the_store_refuses_what_it_cannot_read(xorb: bytes, reason: str) -> None:
    with pytest.raises(XetError, match=reason):
        list(read_chunks(xorb))


def test_compressed_chunks_are_read() -> None:
    # "abc", then six bytes repeated from three back, then "xyz" as literals: one LZ4 block, in a frame.
    block = b"\x32abc" + b"\x03\x00" + b"\x30xyz"
    frame = b"\x04\x22\x4d\x18\x60\x40\x82" + len(block).to_bytes(4, "little") + block + bytes(4)
    assert unpack_lz4(frame) == b"abcabcabcxyz"
    assert ungroup(b"aeibfcgdh") == b"abcdefghi"
