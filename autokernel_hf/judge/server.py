"""The fork server: a process that has imported what every child needs, and forks a child for each request.

A fork takes milliseconds where a fresh interpreter takes seconds. The server starts no CUDA context and runs no
parallel region: neither survives a fork. It is a process of its own, started by the referee, and ends with it.

    server ── warden ── child                      without namespaces
    server ── warden ── init ── child              with them: the end of init is the end of all below

The warden outlives the child, ends whatever the child left running, and writes how it ended into a pipe that the
child does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from autokernel_hf.cache import cache_root
from autokernel_hf.errors import JudgeError
from autokernel_hf.judge import confine, messages, sandbox, triton_seed

Body = Callable[[int], int]
"""What a child does, over the descriptor of its channel; its exit code."""

_START_TIMEOUT_S = 120.0
_NAMESPACES_REFUSED = 97  # exit code of a warden that could not set up what the system first granted


def program(module: str, *arguments: str, function: str = "main") -> list[str]:
    """The command line of one of our processes, which calls a function of a module with these arguments.

    Nothing of the current directory is importable there, and what PYTHONPATH names comes behind the standard library: a
    user's `profile.py` must not shadow its own.
    """
    root = str(Path(__file__).resolve().parent.parent.parent)
    code = (
        "import os, sys\n"
        "if sys.path and sys.path[0] == '': del sys.path[0]\n"
        "sys.path.sort(key=lambda p: p not in (os.path.dirname(os.__file__), os.path.dirname(os.__file__) + '/lib-dynload'))\n"
        f"if {root!r} not in sys.path: sys.path.append({root!r})\n"
        f"from {module} import {function}\n"
        f"{function}(*sys.argv[1:])\n"
    )
    return [sys.executable, "-c", code, *arguments]


T = TypeVar("T")


class NamespacesFirst:
    """How children are started on this machine: in namespaces, until it has shown that these do not stand here.

    Then under Landlock and the filter alone. `isolate` tells which.
    """

    def __init__(self) -> None:
        self.isolate = True

    def start(self, attempt: Callable[[bool], T | None]) -> T | None:
        """What an attempt makes; None where none succeeds.

        Args:
            attempt: Tries it, in namespaces or without. None: it did not start, or what it is for does not run there.
        """
        if self.isolate:
            made = attempt(True)
            if made is not None:
                return made
            self.isolate = False
        return attempt(False)


class Spawned:
    """A child as the referee holds it: its channel, its output, and how it ended."""

    def __init__(self, channel: socket.socket, status: int, log: int, *, isolated: bool) -> None:
        self.isolated = isolated
        self.channel = channel
        self.log = log
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.not_enforced: tuple[str, ...] = ()
        self._status = os.fdopen(status, "r", encoding="utf-8", errors="replace")

    def started(self) -> bool:
        """Wait until the child runs behind its walls. False: it could not be started in this form."""
        word, _, value = self._status.readline().partition(" ")
        if word != "started":
            return False
        number, _, missing = value.strip().partition(" ")
        self.pid = int(number)
        self.not_enforced = tuple(json.loads(missing))
        return True

    def kill(self) -> None:
        """End the child and all that it started."""
        if self.pid is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, grace_s: float = 0.0) -> int:
        """How it ended: an exit code, or minus a signal. It is killed if it has not ended within `grace_s`."""
        if self.exit_code is None:
            if not select.select([self._status], [], [], grace_s)[0]:
                self.kill()
            word, _, value = self._status.readline().partition(" ")
            code = int(value) if word == "exit" else -signal.SIGKILL
            # The first process of a namespace passes a signal on as shells do.
            self.exit_code = 128 - code if self.isolated and code > 128 else code
        return self.exit_code

    def output(self, limit: int = 2000) -> str:
        """The end of what it printed."""
        size = os.fstat(self.log).st_size
        return os.pread(self.log, limit, max(0, size - limit)).decode(errors="replace").strip()

    def close(self) -> None:
        self.channel.close()
        self._status.close()
        os.close(self.log)


class Server:
    """The referee's side of a fork server.

    Args:
        interpret: Whether children run Triton in its interpreter, which is settled when Triton is imported.
        device: cpu or cuda: without a GPU in play the server hides any from its children.
    """

    def __init__(self, *, interpret: bool, device: str) -> None:
        self.device = device
        environment = sandbox.environment_for_children(os.environ, bind=device == "cpu")
        environment.pop("TRITON_INTERPRET", None)
        if interpret:
            environment["TRITON_INTERPRET"] = "1"
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self._process = subprocess.Popen(
            program("autokernel_hf.judge.server", str(theirs.fileno()), device),
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._channel = ours
        self._ready = False

    def wait_ready(self) -> None:
        """Wait until the imports are done.

        Raises:
            JudgeError: The server did not come up.
        """
        if self._ready:
            return
        try:
            messages.receive(self._channel, timeout_s=_START_TIMEOUT_S)
        except (messages.PeerGone, messages.TooLate):
            self._log.seek(0)
            said = self._log.read()[-2000:].decode(errors="replace")
            raise JudgeError(
                f"The process that judged kernels are forked from did not start:\n{said}"
            ) from None
        self._ready = True

    def spawn(self, *, isolate: bool, builder: bool = False) -> Spawned | None:
        """Fork a child, or a builder, which may write to the build cache and never holds a candidate.

        None: the system refuses the namespaces that `isolate` asks for.
        """
        self.wait_ready()
        request = json.dumps({"isolate": isolate, "builder": builder}).encode()

        def ask(channel: int, log: int, status: int, kept: tuple[int, int]) -> None:
            try:
                socket.send_fds(self._channel, [request], [channel, log, status])
            except OSError as error:
                raise JudgeError(
                    f"The process that judged kernels are forked from is gone: {error}."
                ) from None

        spawned = _spawned(ask, isolate=isolate)
        if spawned is None and not isolate:
            raise JudgeError("No process for a kernel could be started.")
        return spawned

    def close(self) -> None:
        """End the server, and with it whatever children are left."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


# --- the server's side --------------------------------------------------------------------------------------------


def main(descriptor: str, device: str) -> None:
    """Import, then fork on request until the referee closes the channel."""
    sandbox.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=int(descriptor))
    _preload(device)
    walls = {builder: confine.walls(os.environ, builder=builder) for builder in (False, True)}
    # Wardens are nobody's concern here: each tells by itself how its child ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    messages.send(channel, {"ready": True})
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 4096, 3)
        if not request:
            return
        if os.fork() == 0:
            channel.close()
            wish = json.loads(request)
            _warden(wish["isolate"], walls[wish["builder"]], _serve, *descriptors)
        for received in descriptors:
            os.close(received)


def behind_walls(body: Body, *, isolate: bool, builder: bool = False) -> Spawned | None:
    """Fork a child of this process that does `body` behind its walls. None: namespaces are refused."""
    walls = confine.walls(os.environ, builder=builder)

    def fork(channel: int, log: int, status: int, kept: tuple[int, int]) -> None:
        if os.fork() == 0:
            for descriptor in kept:
                os.close(descriptor)
            _warden(isolate, walls, body, channel, log, status)

    return _spawned(fork, isolate=isolate)


def _spawned(start: Callable[[int, int, int, tuple[int, int]], None], *, isolate: bool) -> Spawned | None:
    """A child, whose warden `start` starts; None where it does not come up.

    `start` gets the warden's descriptors (channel, log, status), and those that are not for it.
    """
    ours, theirs = socket.socketpair()
    status_read, status_write = os.pipe()
    with tempfile.TemporaryFile() as file:
        log = os.dup(file.fileno())
    spawned = Spawned(ours, status_read, log, isolated=isolate)
    try:
        start(theirs.fileno(), log, status_write, (ours.fileno(), status_read))
    finally:
        theirs.close()
        os.close(status_write)
    if spawned.started():
        return spawned
    spawned.close()
    return None


def probe() -> None:
    """Write to stdout, as JSON, whether a child gets namespaces here, and what its walls lack (for `doctor`)."""

    def attempt(isolate: bool) -> Spawned | None:
        spawned = behind_walls(lambda channel: 0 if confine.cuda_starts() else 1, isolate=isolate)
        return spawned if spawned is not None and spawned.wait(30.0) == 0 else None

    spawned = NamespacesFirst().start(attempt)
    found = {
        "namespaces": spawned is not None and spawned.isolated,
        "not_enforced": ("there are no walls at all",) if spawned is None else spawned.not_enforced,
    }
    sys.stdout.write(json.dumps(found))


def _preload(device: str) -> None:
    seeding = None
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401

        if device == "cuda":
            # Half a second of hashing, beside the import of torch, which it does not need. It ends before the first fork.
            seeding = threading.Thread(target=triton_seed.preload)
            seeding.start()
    import torch

    import autokernel_hf.build
    import autokernel_hf.judge.child
    import autokernel_hf.kernels

    autokernel_hf.kernels.kernel_types()
    if seeding is not None:
        seeding.join()
    if torch.cuda.is_initialized():
        raise RuntimeError("an import started CUDA: children could not use it")


def _serve(channel: int) -> int:
    from autokernel_hf.judge import child

    return child.serve(socket.socket(fileno=channel))


def _warden(isolate: bool, walls: confine.Walls, body: Body, channel: int, log: int, status: int) -> NoReturn:
    """Start the child, wait for its end, clean up behind it, and say how it ended."""
    code = 1
    private = None
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sandbox.die_with_parent()
        os.setsid()
        if isolate and not sandbox.isolate():
            os._exit(_NAMESPACES_REFUSED)
        if not isolate:
            sandbox.adopt_orphans()
        if not isolate:
            private = tempfile.mkdtemp(prefix="autokernel_hf_")
        start_read, start_write = os.pipe()
        ready_read, ready_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(start_write)
            os.close(ready_read)
            life = _Life(body, walls, private, channel, log, status, start_read, ready_write)
            if isolate:
                _init(life)
            _child(life)
        os.close(channel)
        os.close(start_read)
        os.close(ready_write)
        missing = _line(ready_read)
        if not missing:
            os.waitpid(pid, 0)
            os._exit(_NAMESPACES_REFUSED)
        os.write(status, f"started {pid} {missing}\n".encode())
        os.close(start_write)  # now it may run: whoever must end it knows its number
        _, ended = os.waitpid(pid, 0)
        if not isolate:
            sandbox.end_descendants()
        os.write(status, f"exit {_exit_code(ended)}\n".encode())
        code = 0
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        os._exit(code)


@dataclass(frozen=True, slots=True)
class _Life:
    """What a child needs from its warden: its task, its walls, and descriptors."""

    body: Body
    walls: confine.Walls
    private: str | None  # a folder of its own, where /tmp is not
    channel: int
    log: int
    status: int
    start: int
    ready: int


def _line(descriptor: int) -> str:
    with os.fdopen(descriptor, "r", encoding="utf-8") as file:
        return file.readline().strip()


def _init(life: _Life) -> NoReturn:
    """The first process of the namespaces: it puts up the walls, and its own end ends all others."""
    sandbox.die_with_parent()
    try:
        missing = confine.enter(life.walls)
        pid = os.fork()
    except OSError:
        os.dup2(life.log, 2)
        traceback.print_exc()
        os._exit(_NAMESPACES_REFUSED)
    if pid == 0:
        _child(life, missing)
    os.close(life.channel)
    os.close(life.ready)
    while True:
        ended, how = os.wait()
        if ended == pid:
            code = _exit_code(how)
            os._exit(code if code >= 0 else 128 - code)


def _exit_code(status: int) -> int:
    return os.waitstatus_to_exitcode(status)


def _child(life: _Life, missing: Sequence[str] = ()) -> NoReturn:
    code = 1
    try:
        sandbox.die_with_parent()
        os.setsid()
        os.close(life.status)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(life.log, 1)
        os.dup2(life.log, 2)
        os.close(life.log)
        # Under Landlock its home is out of reach.
        _move_in(life.private or confine.PRIVATE, homeless=life.private is not None)
        missing = list(missing)
        if life.private is not None:
            missing += confine.restrict(life.walls, life.private)
        missing += confine.give_up_rights()
        os.write(life.ready, (json.dumps(missing) + "\n").encode())
        os.close(life.ready)
        os.read(life.start, 1)
        os.close(life.start)
        code = life.body(life.channel)
    except BaseException:  # noqa: BLE001 - the end of this process; it must tell why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _move_in(private: str, *, homeless: bool) -> None:
    """Have this process keep its temporary files, and what Triton compiles, in a folder of its own."""
    os.environ["AUTOKERNEL_HF_CACHE"] = str(cache_root().resolve())
    os.environ["TMPDIR"] = private
    os.environ["TRITON_CACHE_DIR"] = f"{private}/triton"
    triton_seed.copy_to(f"{private}/triton")
    if homeless:
        os.environ["HOME"] = private
        os.chdir(private)
    tempfile.tempdir = None
