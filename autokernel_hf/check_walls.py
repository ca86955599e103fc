"""Run `check_child` behind the judge's walls: a package is other people's code.

Run in a process of its own (`server.program`), which forks: nothing here has started threads. The package is read
outside and written into the child's own folder; what comes back are a report and tensors, read without unpickling code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from autokernel_hf.judge import confine
from autokernel_hf.judge.server import NamespacesFirst, Spawned, behind_walls
from autokernel_hf.packages import files_of

CHILD = Path(__file__).parent / "check_child.py"
ANSWERS = ("report.json", "outcomes.pt")
NO_CUDA = 96  # exit code of a child whose walls keep the GPU's driver from starting
_LENGTHS = struct.Struct("<3Q")


def ended_how(code: int, words: str) -> str:
    """How a process ended, in words."""
    last = words.strip().splitlines()[-1:] or [""]
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {last[0]}"


def main(work: str, folder: str, timeout_s: str) -> None:
    """Check the package in `folder`; the request lies in `work`, and the answers and `walls.json` come to lie there."""
    place = Path(work)
    files = {f"package/build/{path}": file.read_bytes() for path, file in files_of(Path(folder) / "build")}
    files |= {name: (place / name).read_bytes() for name in ("request.json", "calls.pt")}

    on_a_gpu = bool(json.loads(files["request.json"])["gpu"])

    def body(channel: int) -> int:
        if on_a_gpu and not confine.cuda_starts():
            return NO_CUDA
        own = Path(os.environ["TMPDIR"]) / "check"
        for name, content in files.items():
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_bytes(content)
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(CHILD), "request.json"],
                cwd=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=float(timeout_s),
                check=False,
            )
            ended = ended_how(done.returncode, done.stderr)
        except subprocess.TimeoutExpired:
            ended = f"still running after {timeout_s} s"
        parts = [ended.encode(), *((own / n).read_bytes() if (own / n).exists() else b"" for n in ANSWERS)]
        with socket.socket(fileno=channel) as found:
            found.sendall(_LENGTHS.pack(*map(len, parts)) + b"".join(parts))
        return 0

    def attempt(isolate: bool) -> tuple[Spawned, int, bytes] | None:
        spawned = behind_walls(body, isolate=isolate)
        if spawned is None:
            return None
        answer = bytearray()
        while part := spawned.channel.recv(1 << 20):
            answer += part
        code = spawned.wait(10.0)
        return None if code == NO_CUDA else (spawned, code, bytes(answer))

    found = NamespacesFirst().start(attempt)
    if found is None:
        gpu = ", or the GPU's driver does not start behind them" if on_a_gpu else ""
        raise SystemExit(f"no walls can be put up here{gpu}")
    spawned, code, answer = found
    if len(answer) < _LENGTHS.size:
        raise SystemExit(ended_how(code, spawned.output()))
    lengths = _LENGTHS.unpack_from(answer)
    parts, at = [], _LENGTHS.size
    for length in lengths:
        parts.append(bytes(answer[at : at + length]))
        at += length
    for name, content in zip(ANSWERS, parts[1:], strict=True):
        if content:
            (place / name).write_bytes(content)
    (place / "walls.json").write_text(
        json.dumps({"ended": parts[0].decode(), "not_enforced": list(spawned.not_enforced)}), encoding="utf-8"
    )
