"""The referee's hold on a child: commands with a deadline, and what it means when no answer comes."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from autokernel_hf.errors import JudgeError, ToolMissingError
from autokernel_hf.judge import compiled, messages
from autokernel_hf.judge.arena import Arena, Pool, Slot
from autokernel_hf.judge.server import Spawned
from autokernel_hf.judge.turn import Times
from autokernel_hf.records import BenchStatus, Built, Candidate

_BUILD_TIMEOUT_S = 330.0  # above the compiler's own limit
_COMPILE_LIMIT_S = 60.0  # for the variants of a Triton candidate; what is not done by then, its calls do
_START_TIMEOUT_S = 60.0
_CLOCK_SLACK_NS = 2_000_000  # the clocks of two processes are one; some hypervisors scale it for each
_LAST_WORDS_S = 2.0  # a process that is ending needs a moment until its end is known


class Failed(Exception):  # noqa: N818 - the verdict on a candidate, not a fault of this program
    """The child did not do what it was told.

    Args:
        status: What that makes of the candidate.
        what: What was seen, as the rest of a sentence whose subject is the candidate.
    """

    def __init__(self, status: BenchStatus, what: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a child says of the outputs of one call."""

    outputs: tuple[dict[str, Any], ...]
    shared: bool
    beside: str = ""  # what the call wrote beside its outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """A child's own times, and the referee's clock around the whole turn."""

    times: Times
    wall_us: float


class Process:
    """A process behind walls that does what the referee says: a builder, or a child that holds a candidate.

    Args:
        timeout_s: The longest that one command may take, building apart.
    """

    def __init__(self, spawned: Spawned, *, timeout_s: float) -> None:
        self.spawned = spawned
        self.timeout_s = timeout_s
        self.ended = False
        self.too_large: str = ""  # set by the watchdog that ends it: what it took
        self.granted_bytes = 0  # of shared memory that the referee has given it

    @property
    def pid(self) -> int:
        assert self.spawned.pid is not None
        return self.spawned.pid

    def end(self) -> None:
        """End it with all that it started. Safe to call again."""
        if self.ended:
            return
        self.ended = True
        self.spawned.kill()
        self.spawned.wait()
        self.spawned.close()

    def _command(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._send(request)
        return self._receive(timeout_s)

    def _send(self, request: dict[str, Any]) -> None:
        try:
            messages.send(self.spawned.channel, request)
        except messages.PeerGone:
            raise self._gone() from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            reply = messages.receive(self.spawned.channel, timeout_s=timeout_s)
        except messages.TooLate:
            self.end()
            raise Failed("timeout", f"did not return within {timeout_s:.3g} s") from None
        except messages.PeerGone:
            raise self._gone() from None
        if "error" in reply:
            status, message = str(reply["error"]), str(reply.get("message", ""))
            # Only a builder, which runs no candidate, is believed that this machine lacks something.
            if status == "tool_missing" and isinstance(self, Builder):
                self.end()
                raise ToolMissingError(message, remedy=str(reply.get("remedy", "")))
            if status not in get_args(BenchStatus) or status == "passed":
                raise self._forged()
            raise Failed(cast(BenchStatus, status), _what(status, message))
        return reply

    def _gone(self) -> Failed:
        """The channel is closed: the process is gone, or has closed it to be left alone."""
        code = self.spawned.wait(_LAST_WORDS_S)
        said = self.spawned.output(400)
        self.end()
        if self.too_large:
            return Failed("out_of_memory", self.too_large)
        if code == -signal.SIGKILL:
            how = "ended before it returned a result (killed, or it closed its channel)"
        elif code < 0:
            how = f"ended before it returned a result, by {signal.Signals(-code).name}"
        else:
            how = f"ended before it returned a result, with exit code {code}"
        return Failed("crashed", how + (f"; it printed: {said}" if said else ""))

    def _forged(self) -> Failed:
        self.end()
        return Failed("rejected", "sent an answer that no honest child sends")


class Builder(Process):
    """A process that compiles candidates and never runs one: it alone may write to the build cache."""

    def __init__(self, spawned: Spawned, *, timeout_s: float) -> None:
        super().__init__(spawned, timeout_s=timeout_s)
        self.busy = False  # whether it owes an answer

    def build(self, candidate: Candidate, device: str) -> Built:
        """`start`, then `finish`."""
        self.start(candidate, device)
        return self.finish()

    def start(self, candidate: Candidate, device: str) -> None:
        """Have it build a candidate; the answer is for `finish`."""
        self._send({"op": "build", "candidate": candidate.model_dump(mode="json"), "device": device})
        self.busy = True

    def finish(self) -> Built:
        """What it has built.

        Raises:
            Failed: The candidate does not build.
            ToolMissingError: This machine has no compiler for it.
        """
        self.busy = False
        return Built.model_validate(self._receive(_BUILD_TIMEOUT_S)["built"])


class Compiler(Process):
    """A process that holds one candidate, and compiles what its calls need; it makes none, and starts no device."""

    def device(self, device: str) -> dict[str, Any]:
        """What Triton asks of a GPU while it compiles. This process starts CUDA for it.

        Raises:
            Failed: It does not start.
        """
        self._command({"op": "wake", "device": device}, _START_TIMEOUT_S)
        described = self._command({"op": "device"}, self.timeout_s).get("device")
        if not isinstance(described, dict):
            raise self._forged()
        return described

    def compile(
        self, built: Built, calls: Sequence[Sequence[tuple[str, object]]], device: dict[str, Any]
    ) -> bytes:
        """What Triton has made of these calls for a GPU that `device` described, as `compiled.keep` takes it.

        Raises:
            Failed: It does not import, or did not end in time.
        """
        self._command({"op": "load", "path": built.path, "kernel_type": built.kernel_type}, self.timeout_s)
        with tempfile.TemporaryFile() as file:
            self._send({"op": "ahead", "calls": [_wire(args) for args in calls], "device": device})
            socket.send_fds(self.spawned.channel, [b"."], [file.fileno()])
            self._receive(_BUILD_TIMEOUT_S)
            file.seek(0)
            return file.read(compiled.MOST_BYTES)


class Child(Process):
    """A process with an arena, for one candidate.

    Args:
        device: Where it runs candidates, as torch names it.
    """

    def __init__(self, spawned: Spawned, pool: Pool, *, device: str, timeout_s: float) -> None:
        super().__init__(spawned, timeout_s=timeout_s)
        # Its CUDA starts while this process may still be starting its own; `open` takes the answer.
        self._wakes = device.startswith("cuda")
        if self._wakes:
            with contextlib.suppress(messages.PeerGone):  # `open` will find out
                messages.send(spawned.channel, {"op": "wake", "device": device})
        self.arena = self._own_arena = pool.take()
        self.granted_bytes = self.arena.nbytes if self.arena.memory.device.type == "cpu" else 0
        self._pool = pool

    def end(self) -> None:
        """End it with all that it started, and put its arena back."""
        if not self.ended:
            super().end()
            self.arena = self._own_arena
            self._pool.give(self.arena)

    def open(self) -> None:
        """Hand the arena over.

        Raises:
            JudgeError: The child, which holds no candidate yet, cannot open it.
        """
        try:
            self._hand_over()
            reply = {}
            for _ in range(1 + self._wakes):
                if "error" not in reply:
                    reply = messages.receive(self.spawned.channel, timeout_s=_START_TIMEOUT_S)
        except (messages.PeerGone, messages.TooLate):
            reply = {"error": "crashed", "message": "it ended"}
        if "error" in reply:
            said = self.spawned.output()
            self.end()
            raise JudgeError(f"A fresh process could not open the shared memory: {reply['message']}\n{said}")

    @contextlib.contextmanager
    def lent(self, arena: Arena) -> Iterator[None]:
        """Give it another arena for a while. It is ended if anything fails in between, but for want of memory.

        Raises:
            Failed: It cannot open it.
        """
        try:
            self._take_over(arena)
            yield
        except BaseException as error:
            if self.ended or not isinstance(error, Failed) or error.status != "out_of_memory":
                self.end()
                raise
            self._take_over(self._own_arena)
            raise
        self._take_over(self._own_arena)

    def _take_over(self, arena: Arena) -> None:
        self.arena = arena
        try:
            self._hand_over()
        except messages.PeerGone:
            raise self._gone() from None
        self._receive(self.timeout_s)

    def _hand_over(self) -> None:
        messages.send(self.spawned.channel, {"op": "open", "handle": self.arena.handle()})
        socket.send_fds(self.spawned.channel, [b"."], [self.arena.descriptor])

    def load(self, built: Built) -> None:
        """Import what a builder has built.

        Raises:
            Failed: It does not import.
        """
        self._command({"op": "load", "path": built.path, "kernel_type": built.kernel_type}, self.timeout_s)

    def inspect(self) -> None:
        """Look for what the candidate has replaced in its process.

        Raises:
            Failed: It has.
        """
        replaced = self._command({"op": "inspect"}, self.timeout_s).get("replaced")
        if not isinstance(replaced, list):
            raise self._forged()
        if replaced:
            raise Failed("rejected", f"replaced {', '.join(map(str, replaced[:5]))}")

    def start_compile(self, calls: Sequence[Sequence[tuple[str, object]]]) -> None:
        """Have it compile what these calls need, side by side, without making them; the answer is for `finish_compile`."""
        limit_s = min(self.timeout_s, _COMPILE_LIMIT_S)
        self._send({"op": "compile", "calls": [_wire(args) for args in calls], "limit_s": limit_s})

    def finish_compile(self) -> None:
        """Wait for it.

        Raises:
            Failed: It crashed or hung. What does not compile is left for the call that counts.
        """
        self._receive(_COMPILE_LIMIT_S + self.timeout_s)

    def warm(self, calls: Sequence[Sequence[tuple[str, object]]]) -> None:
        """Have it make these calls side by side, their results dropped, so that what they need is loaded later.

        Raises:
            Failed: It crashed or hung. What a call raises is left for the call that counts.
        """
        # Where there is one core alone, they compile everything themselves.
        limit_s = _COMPILE_LIMIT_S + self.timeout_s
        self._command({"op": "warm", "calls": [_wire(args) for args in calls]}, limit_s)

    def launches(self, calls: Sequence[Sequence[tuple[str, object]]]) -> str | None:
        """The digest of what a Triton candidate launches in these calls, as its own process tells it.

        Raises:
            Failed: It crashed, hung, or reported nonsense.
        """
        reply = self._command({"op": "launches", "calls": [_wire(args) for args in calls]}, self.timeout_s)
        digest = reply.get("digest")
        if digest is not None and not (isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)):
            raise self._forged()
        return digest

    def start_call(
        self,
        args: Sequence[tuple[str, object]],
        sinks: Sequence[Slot],
        *,
        disturb: bool = False,
        bands: bool = False,
    ) -> None:
        """Have it call the candidate; the answer is for `finish_call`.

        Args:
            disturb: Whether an unrelated op runs before.
            bands: Whether it is called once before with guard bands around what it allocates.
        """
        self._deadline = time.monotonic() + self.timeout_s
        request = {
            "op": "call",
            "args": _wire(args),
            "sinks": [s.to_json() for s in sinks],
            "disturb": disturb,
            "bands": bands,
        }
        self._send(request)

    def finish_call(self) -> Report:
        reply = self._receive(max(self._deadline - time.monotonic(), 0.1))
        try:
            return Report(
                outputs=tuple(dict(o) for o in reply["outputs"]),
                shared=bool(reply["shared"]),
                beside=str(reply.get("beside", ""))[:200],
            )
        except (KeyError, TypeError, ValueError):
            raise self._forged() from None

    def turn(
        self,
        args: Sequence[tuple[str, object]],
        live: Sequence[str],
        sources: Sequence[Sequence[Slot]],
        sinks: Sequence[Sequence[Slot]],
        delay_us: float,
        *,
        blank: bool = False,
    ) -> TurnReport:
        """Have it take a turn of timed calls; a blank one does all that a turn does but the timed calls.

        Raises:
            Failed: It crashed, hung, or reported nonsense.
        """
        request = {
            "op": "turn",
            "args": _wire(args),
            "live": list(live),
            "sources": [[s.to_json() for s in call] for call in sources],
            "sinks": [[s.to_json() for s in call] for call in sinks],
            "delay_us": delay_us,
            "blank": blank,
        }
        began = time.perf_counter_ns()
        reply = self._command(request, self.timeout_s)
        ended = time.perf_counter_ns()
        wall_us = (ended - began) / 1e3
        try:
            times = Times(
                device_us=tuple(map(float, reply["device_us"])),
                host_us=tuple(map(float, reply["host_us"])),
                late_us=tuple(map(float, reply["late_us"])),
            )
            first, last = map(int, reply["clock_ns"])
        except (KeyError, TypeError, ValueError):
            raise self._forged() from None
        if len(times.device_us) != len(sources) or not all(0 < t < 1e12 for t in times.device_us):
            raise self._forged()
        if not began - _CLOCK_SLACK_NS <= first <= last <= ended + _CLOCK_SLACK_NS:
            self.end()
            off_ms = max(began - first, last - ended, first - last) / 1e6
            raise Failed(
                "rejected", f"has another clock in its process, {off_ms:.3g} ms off the referee's clock"
            )
        if sum(times.device_us) > wall_us:
            self.end()
            raise Failed("rejected", "reported times that add up to more than the turn took")
        return TurnReport(times=times, wall_us=wall_us)

    def loop(self, args: Sequence[tuple[str, object]], calls: int) -> float:
        """Have it call the candidate so many times; the referee's time of that in microseconds."""
        began = time.perf_counter_ns()
        self._command({"op": "loop", "args": _wire(args), "calls": calls}, self.timeout_s)
        return (time.perf_counter_ns() - began) / 1e3

    def hot(self, args: Sequence[tuple[str, object]], sinks: Sequence[Slot], calls: int) -> tuple[float, ...]:
        """The device's times of calls one after the other, in microseconds; the last one's outputs are in their places.

        Raises:
            Failed: It failed, or reported nonsense.
        """
        return self._microseconds({"op": "hot", "args": _wire(args), "calls": calls}, sinks)

    def capture(self, args: Sequence[tuple[str, object]], calls: int) -> None:
        """Have it capture so many calls in a CUDA graph.

        Raises:
            Failed: They cannot be captured.
        """
        self._command({"op": "capture", "args": _wire(args), "calls": calls}, self.timeout_s)

    def replay(self, sinks: Sequence[Slot]) -> tuple[float, ...]:
        """The device's times of a call of what was captured; the outputs are in their places.

        Raises:
            Failed: It failed, or reported nonsense.
        """
        return self._microseconds({"op": "replay"}, sinks)

    def spin(self, replays: int, *, last: bool) -> float:
        """Have it replay what was captured so many times; the referee's time of that in microseconds.

        Args:
            last: Whether it may forget the graph.
        """
        began = time.perf_counter_ns()
        self._command({"op": "spin", "replays": replays, "last": last}, self.timeout_s)
        return (time.perf_counter_ns() - began) / 1e3

    def _microseconds(self, request: dict[str, Any], sinks: Sequence[Slot]) -> tuple[float, ...]:
        reply = self._command({**request, "sinks": [s.to_json() for s in sinks]}, self.timeout_s)
        try:
            taken = tuple(map(float, reply["us"]))
        except (KeyError, TypeError, ValueError):
            raise self._forged() from None
        if not taken or not all(0 < t < 1e12 for t in taken):
            raise self._forged()
        return taken

    def noop(self) -> float:
        """The time that a command without work takes, in microseconds."""
        began = time.perf_counter_ns()
        self._command({"op": "noop"}, self.timeout_s)
        return (time.perf_counter_ns() - began) / 1e3

    def peak_bytes(self) -> int | None:
        value = self._command({"op": "memory"}, self.timeout_s).get("peak_bytes")
        return value if isinstance(value, int) else None


def _wire(args: Sequence[tuple[str, object]]) -> list[list[object]]:
    return [[name, value.to_json() if isinstance(value, Slot) else value] for name, value in args]


def _what(status: str, message: str) -> str:
    if status == "rejected":
        return f"breaks the candidate contract: {message}"
    if status == "compile_error":
        return f"does not compile: {message}"
    if status == "unsupported":
        return f"refuses the call: {message}"
    if status == "out_of_memory":
        return f"ran out of memory: {message}"
    if status == "incorrect":
        return f"returned {message}" if not message.startswith(("RuntimeError", "WrongOutput")) else message
    return f"raised {message}"
