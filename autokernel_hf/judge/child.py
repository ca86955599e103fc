"""The child: builds, imports and calls one candidate, and does what the referee says. It decides nothing.

What it reports about an output (shape, dtype, aliasing) is checked against the arena by the referee where that is
possible; values and verdicts never come from here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from autokernel_hf import build
from autokernel_hf.cache import cache_root
from autokernel_hf.errors import AutokernelError, CandidateError, CompileError, ToolMissingError
from autokernel_hf.judge import (
    audit,
    compiled,
    graphs,
    launches,
    messages,
    precompile,
    sandbox,
    triton_seed,
    turn,
)
from autokernel_hf.judge.arena import POISON, Arena, Slot, same_bits
from autokernel_hf.judge.bands import Bands
from autokernel_hf.kernels.base import DTYPE_NAMES, DTYPES
from autokernel_hf.records import Candidate

_COMPILERS = max(1, min(8, len(os.sched_getaffinity(0))))
_COMPILE_ERRORS = {
    "CompilationError",
    "UnsupportedLanguageConstruct",
    "CompileTimeAssertionFailure",
    "PTXASError",
}
_LARGEST_COPY = 256 << 20  # bytes of an output that is compared at the next call
_TOO_MUCH = {"OutOfResources"}  # of shared memory or registers: the configuration does not fit this device
MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "Unable to allocate",
)
_FORM_WORDS = (
    "alias",
    "Unable to cast",
)  # what torch says of an operator that returns an input, or no tensor


def serve(channel: socket.socket) -> int:
    """Do what comes over the channel until it is closed; the exit code."""
    worker = _Worker(channel)
    while True:
        try:
            request = messages.receive(channel)
        except messages.PeerGone:
            return 0
        try:
            reply = worker.do(request)
        except BaseException as error:  # noqa: BLE001
            # This is the wall between a candidate and the judge: whatever it raises is a result, an exit too.
            traceback.print_exc()
            reply = {"error": classify(error), "message": describe(error)}
            if isinstance(error, ToolMissingError):
                reply |= {"message": error.message, "remedy": error.remedy}
        try:
            messages.send(channel, reply)
        except messages.PeerGone:
            return 0


def classify(error: BaseException) -> str:
    """The bench status that an exception stands for; `tool_missing` where the machine is at fault."""
    names = {cls.__name__ for cls in type(error).__mro__}
    text = _text(error)
    cause = error.__cause__
    if "InterpreterError" in names and cause is not None:
        return classify(cause)
    if isinstance(error, ToolMissingError):
        return "tool_missing"
    if isinstance(error, CandidateError):
        return "rejected"
    if isinstance(error, CompileError) or names & _COMPILE_ERRORS or names & _TOO_MUCH:
        return "compile_error"
    if isinstance(error, turn.WrongOutput):
        return "incorrect"
    if isinstance(error, NotImplementedError):
        return "unsupported"
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names or any(w in text for w in MEMORY_WORDS):
        return "out_of_memory"
    if isinstance(error, RuntimeError) and any(w in text for w in _FORM_WORDS):
        return "incorrect"
    return "crashed"


def _is_want_of_room(error: Exception) -> bool:
    """Whether a build failed for want of a place on the disk, which is not the candidate's doing."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    return "No space left on device" in _text(error) or "Disk quota exceeded" in _text(error)


def describe(error: BaseException) -> str:
    if isinstance(error, AutokernelError):
        return str(error)[:4000]
    text = _text(error).strip()
    return f"{type(error).__name__}: {text}"[:2000] if text else type(error).__name__


def _text(error: BaseException) -> str:
    """What an error says; nothing where it is of a class that will not tell."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a candidate's own class may do anything
        return ""


class _Worker:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.arena: Arena | None = None
        self.module: ModuleType | None = None
        self.function: Callable[..., Any] | None = None
        self.flush: turn.Flush | None = None
        self.graph: graphs.Graph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.kernel_fn: Callable[..., Any] | None = None  # of a Triton candidate: what its operator calls
        self.library: Path | None = None  # of a compiled one
        self.watch: audit.Watch | None = None
        # The outputs of the last checked call stay alive: one that is returned again is not new.
        self.last: tuple[Tensor, ...] = ()
        self.copies: tuple[Tensor | None, ...] = ()  # what they were
        self.audited: set[str] = set()  # calls whose operators were looked at

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        method: Callable[[dict[str, Any]], dict[str, Any]] = getattr(self, f"do_{request['op']}")
        if self.stream is None:
            return method(request)
        # Not the default stream: a candidate that launches there, instead of where it is told, must be seen.
        with torch.cuda.stream(self.stream):
            return method(request)

    def do_noop(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def do_wake(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start CUDA, before any candidate is here."""
        device = torch.device(request["device"])
        torch.cuda.set_device(
            device
        )  # or a context, and half a gigabyte, would be taken of the first GPU, too
        self.stream = torch.cuda.Stream(device)
        self.flush = turn.flush_for(device)
        torch.cuda.synchronize()
        return {}

    def do_open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take over an arena, instead of the one before."""
        _, (descriptor,), _, _ = socket.recv_fds(self.channel, 1, 1)
        self.last = self.copies = ()
        self.graph = None
        if self.arena is not None:
            self.arena.close()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # after a call of more than 2^31 elements it would hold on to gigabytes
        self.arena = Arena.open(request["handle"], descriptor)
        return {"threads": torch.get_num_threads()}

    def do_build(self, request: dict[str, Any]) -> dict[str, Any]:
        candidate = Candidate.model_validate(request["candidate"])
        if candidate.backend == "triton" and request["device"].startswith("cuda"):
            triton_seed.fill()
        with sandbox.on_all_cores():
            try:
                built = build.build(candidate, device=request["device"])
            except (OSError, CompileError) as error:
                if not _is_want_of_room(error):
                    raise
                raise ToolMissingError(
                    f"Nothing can be built: the cache {cache_root()}, or the folder of temporary files, is full or "
                    f"cannot be written ({describe(error).splitlines()[0][:200]}).",
                    remedy="Free some space, or set AUTOKERNEL_HF_CACHE to a folder that you can write.",
                ) from error
        return {"built": built.model_dump(mode="json")}

    def do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        compiled.copy_for(Path(request["path"]).name)
        watch = audit.Watch()
        self.module = build.load(request["path"])
        self.watch = watch
        self.function = getattr(self.module, request["kernel_type"])
        if (Path(request["path"]) / "op.py").exists():
            # Taken now: what the candidate does to `sys.modules` later hides nothing.
            self.kernel_fn = sys.modules[f"{self.module.__name__}.op"].kernel_fn
        else:
            self.library = next(Path(request["path"]).glob("*.so"))
        return {}

    def do_inspect(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the candidate has replaced since before it was imported."""
        return {"replaced": self.watch.replaced() if self.watch is not None else []}

    def do_compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have copies of this process compile what calls need; the calls are not made."""
        assert self.arena is not None
        if self.kernel_fn is not None and self.arena.memory.device.type == "cuda":
            self._compile_apart(request["calls"], request["limit_s"])
        return {}

    def do_device(self, request: dict[str, Any]) -> dict[str, Any]:
        """What Triton asks of this device while it compiles, for `do_ahead` in processes that do not start CUDA."""
        from triton.runtime import driver

        return {"device": precompile.StillDriver.like(driver.active).description()}

    def do_ahead(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compile what calls need, and write what came of it to a file; this process is of no other use afterwards."""
        _, (descriptor,), _, _ = socket.recv_fds(self.channel, 1, 1)
        assert self.kernel_fn is not None
        own = Path(os.environ["TRITON_CACHE_DIR"])
        already = compiled.names_in(own)
        still = precompile.StillDriver.described(request["device"])
        with tempfile.TemporaryDirectory() as claims:
            precompile.compile_calls(self.kernel_fn, request["calls"], still, precompile.Claims(Path(claims)))
        with os.fdopen(descriptor, "wb") as file:
            file.write(compiled.packed(own, already))
        return {}

    def do_warm(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make calls in several threads."""
        assert self.arena is not None and self.function is not None
        function, stream = self.function, self.stream

        def call(args: list[list[Any]]) -> None:
            # Whatever it raises, the call that counts will raise again and be judged for.
            with contextlib.suppress(Exception), torch.cuda.stream(stream):
                function(**self._arguments(args))

        with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
            list(pool.map(call, request["calls"]))
        if self.arena.memory.device.type == "cuda":
            torch.cuda.synchronize()
        return {}

    def do_launches(self, request: dict[str, Any]) -> dict[str, Any]:
        """The digest of what a Triton candidate launches in these calls; none where that cannot be told."""
        assert self.kernel_fn is not None
        with contextlib.suppress(Exception):  # the call that counts will raise it again
            calls = [self._arguments(args) for args in request["calls"]]
            digest = launches.digest_of(self.kernel_fn, calls)
            torch.cuda.synchronize()
            return {"digest": digest}
        return {"digest": None}

    def _compile_apart(self, calls: list[precompile.Call], limit_s: float) -> None:
        """Have what calls need compiled side by side; without it the calls compile themselves."""
        assert self.kernel_fn is not None
        from triton.runtime import driver

        try:
            processes = precompile.processes_for(len(calls))
            still = precompile.StillDriver.like(driver.active) if processes else None
        except Exception:  # noqa: BLE001 - another version of Triton may name things otherwise; only time is lost
            traceback.print_exc()
            return
        if still is not None:
            close = self.channel.fileno()
            precompile.side_by_side(self.kernel_fn, calls, still, processes, close=close, limit_s=limit_s)

    def do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call once, and copy the outputs to their slots; before that once between guard bands, where asked to."""
        assert self.arena is not None and self.function is not None
        arguments = self._arguments(request["args"])
        odd: Exception | None = None
        if request.get("bands"):
            try:
                beside = self._beside(arguments)
            except Exception as error:
                if self.kernel_fn is None:
                    raise
                odd = error  # what a candidate that lets torch compute may raise there is not what is wrong with it
            else:
                if beside:
                    return {"outputs": [], "shared": False, "beside": beside}
        if request.get("disturb"):
            _disturb(self.arena.memory.device)
        _poison_pool(request["sinks"], self.arena.memory.device)
        result = self.function(**arguments)
        if self.arena.memory.device.type == "cuda":
            torch.cuda.synchronize()
        if self.flush is not None:
            self.flush.persisting.forget()
        outputs = turn.as_tuple(result)
        if not audit.floating_point_is_sound():
            raise CandidateError(
                "it leaves the floating-point state of the process changed: denormal numbers, or the rounding"
            )
        reports = [self._report(output, arguments) for output in outputs]
        kept = zip(self.last, self.copies, strict=True)
        if any(
            copy is not None and not (old.shape == copy.shape and same_bits(old, copy)) for old, copy in kept
        ):
            for report in reports:
                report["spoils_last"] = True
        storages = [r["storage"] for r in reports if "storage" in r]
        shared = len(set(storages)) != len(storages)
        for output, data in zip(outputs, request["sinks"], strict=False):
            sink = self.arena.view(Slot.from_json(data))
            # A wrong shape, dtype or device is in the report; there is nothing to compare then.
            same = type(output) is Tensor and output.shape == sink.shape and output.dtype == sink.dtype
            if same and output.device == sink.device:
                sink.copy_(output)
        if self.arena.memory.device.type == "cuda":
            torch.cuda.synchronize()
        self.last = tuple(o for o in outputs if type(o) is Tensor)
        self.copies = tuple(o.clone() if o.nbytes <= _LARGEST_COPY else None for o in self.last)
        for report in reports:
            report.pop("storage", None)
        self._audit_new(request["args"], arguments)
        if odd is not None:
            raise odd
        return {"outputs": reports, "shared": shared}

    def _beside(self, arguments: dict[str, Any]) -> str:
        """What a call writes beside the memory that it allocates; empty where nothing is."""
        assert self.arena is not None and self.function is not None
        device = self.arena.memory.device
        bands = Bands(device, self.library)
        # A Triton candidate's operator would hide what is allocated below it.
        function = self.kernel_fn if self.kernel_fn is not None else self.function
        with bands:
            result = function(**arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return bands.written(turn.as_tuple(result))

    def _audit_new(self, args: list[list[Any]], arguments: dict[str, Any]) -> None:
        """Look at the operators of a Triton candidate's Python, once for each kind of call.

        Raises:
            CandidateError: It lets torch compute.
        """
        if self.kernel_fn is None:
            return
        kind = json.dumps([[n, v["spec"] if isinstance(v, dict) else v] for n, v in args])
        if kind in self.audited:
            return
        self.audited.add(kind)
        operators = audit.operators_of(self.kernel_fn, arguments)
        if operators:
            raise CandidateError(
                f"it lets torch compute ({', '.join(operators[:5])}); it may only allocate, view and copy"
            )

    def do_turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take one turn of a round of timing; a blank one calls the candidate once, and times nothing but the rest."""
        began_ns = turn.now_ns()
        assert self.arena is not None and self.function is not None
        arguments = self._arguments(request["args"])
        function = self.function
        if request["blank"]:
            result = function(**arguments)

            def function(**_: Any) -> Any:
                return result

        taken = turn.Turn(
            function,
            arguments,
            [arguments[name] for name in request["live"]],
            [[self.arena.view(Slot.from_json(s)) for s in call] for call in request["sources"]],
            [[self.arena.view(Slot.from_json(s)) for s in call] for call in request["sinks"]],
        ).take(self.flush, request["delay_us"])
        return {
            "device_us": taken.device_us,
            "host_us": taken.host_us,
            "late_us": taken.late_us,
            "clock_ns": (began_ns, turn.now_ns()),
        }

    def do_loop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call again and again, which the referee times; nothing is looked at."""
        assert self.arena is not None and self.function is not None
        function, arguments = self.function, self._arguments(request["args"])
        for _ in range(request["calls"]):
            function(**arguments)
        if self.arena.memory.device.type == "cuda":
            torch.cuda.synchronize()
        return {}

    def do_hot(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time calls with warm caches, and keep what the last one returned."""
        assert self.arena is not None and self.function is not None
        taken, outputs = graphs.hot(self.function, self._arguments(request["args"]), request["calls"])
        self._keep(outputs, request["sinks"])
        return {"us": taken}

    def do_capture(self, request: dict[str, Any]) -> dict[str, Any]:
        """Capture calls in a CUDA graph."""
        assert self.arena is not None and self.function is not None
        self.graph = None
        try:
            self.graph = graphs.Graph(self.function, self._arguments(request["args"]), request["calls"])
        except RuntimeError as error:
            if classify(error) == "out_of_memory" or isinstance(error, NotImplementedError):
                raise
            raise CandidateError(
                f"a call cannot be captured in a CUDA graph ({describe(error).splitlines()[0][:200]}): it must neither "
                "synchronize with the device, nor allocate from the driver, nor leave the current stream"
            ) from None
        return {}

    def do_replay(self, request: dict[str, Any]) -> dict[str, Any]:
        """Replay what was captured, keep its outputs, and time further replays."""
        assert self.graph is not None
        self.graph.replay(POISON)
        self._keep(self.graph.outputs, request["sinks"])
        return {"us": self.graph.times()}

    def do_spin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Replay what was captured again and again, which the referee times."""
        assert self.graph is not None
        self.graph.spin(request["replays"])
        if request["last"]:
            self.graph = None
        return {}

    def _keep(self, outputs: tuple[Any, ...], sinks: list[dict[str, Any]]) -> None:
        """Copy outputs, whose form a call before has shown, to their slots."""
        assert self.arena is not None
        for output, data in zip(outputs, sinks, strict=True):
            self.arena.view(Slot.from_json(data)).copy_(output)
        torch.cuda.synchronize()

    def do_memory(self, request: dict[str, Any]) -> dict[str, Any]:
        """The most device memory that was allocated here so far, in bytes; the arena is not part of it."""
        if self.arena is None or self.arena.memory.device.type != "cuda":
            return {"peak_bytes": None}
        return {"peak_bytes": torch.cuda.max_memory_allocated()}

    def _arguments(self, args: list[list[Any]]) -> dict[str, Any]:
        assert self.arena is not None
        return {
            name: self.arena.view(Slot.from_json(value)) if isinstance(value, dict) else value
            for name, value in args
        }

    def _report(self, output: object, arguments: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(output, Tensor):
            return {"type": type(output).__name__}
        report: dict[str, Any] = {
            "type": type(output).__name__ if type(output) is not Tensor else "Tensor",
            "shape": list(output.shape),
            "dtype": DTYPE_NAMES.get(output.dtype, str(output.dtype)),
            "device": output.device.type,
            "contiguous": output.is_contiguous(),
        }
        if output.layout is not torch.strided or not output.numel():
            return report
        assert self.arena is not None
        storage = output.untyped_storage().data_ptr()
        report["storage"] = storage
        report["aliases_input"] = storage == self.arena.memory.untyped_storage().data_ptr()
        report["aliases_last"] = any(
            storage == old.untyped_storage().data_ptr() for old in self.last if old.numel()
        )
        return report


def _poison_pool(sinks: list[dict[str, Any]], device: torch.device) -> None:
    """Leave garbage in freed memory of the outputs' sizes: what a kernel does not write must not look right."""
    for data in sinks:
        spec = Slot.from_json(data).spec
        torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device).view(-1).view(torch.uint8).fill_(
            POISON
        )


def _disturb(device: torch.device) -> None:
    """An unrelated op: other memory, other threads, another kernel before the next call."""
    a = torch.randn(257, 129, device=device)
    (a @ a.T).sigmoid().sum().item()
