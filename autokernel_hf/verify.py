"""The whole model with its kernels in place: is it right, and is it faster?

The model is patched with the classes that ship, loaded from the folders that ship. Four questions:

1. Is every kernel called? Calls are counted at the kernel, site by site, in a pass of its own.
2. Is the output right? On several inputs, against a run in higher precision, beside the plain model's own error.
3. Is it faster than the plain model? Pairs of passes in random order; the verdict is the interval of their ratio.
4. How does it compare with torch.compile, without and with CUDA graphs? Always told, also where it wins. On a GPU the
   plain pass and the one with kernels are also captured in CUDA graphs as they are.

The plain model is never touched: what is patched is a copy of its modules that shares its weights. Functions that
belong to the process are replaced only while a patched pass runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autokernel_hf import gpu
from autokernel_hf.accuracy import Accuracy, in_higher_precision, twin, widened
from autokernel_hf.build import load
from autokernel_hf.errors import JudgeError, ModelError, PackageError, UsageError
from autokernel_hf.models import Inputs, LoadedModel, run_pass
from autokernel_hf.models.outputs import deviation, floating_tensors, slices
from autokernel_hf.patch import Patch, rebound
from autokernel_hf.progress import NOTE
from autokernel_hf.records import Latency, OutputError, Site, Speedup, SpeedupInterval, Verification
from autokernel_hf.verify_columns import Timing, captured_pass, compiled_pass

logger = logging.getLogger(__name__)

BUDGET_S = 150.0
_EAGER_PART = 0.45  # of the budget: the eager pair decides, so it is measured longest
_COMPILED_SLACK = 4.0  # see `_compiled_is_right`


class StagedKernel(Protocol):
    """A winner, as this stage needs it: what it replaces, and the folder of the package variant that replaces it."""

    @property
    def target(self) -> str: ...
    @property
    def kernel_type(self) -> str: ...
    @property
    def sites(self) -> tuple[Site, ...]: ...
    @property
    def path(self) -> str: ...


def verify(
    loaded: LoadedModel,
    kernels: Sequence[StagedKernel],
    *,
    budget_s: float | None = None,
    compile: bool = True,
    seed: int = 0,
) -> Verification:
    """Check and time a model with kernels in place.

    Args:
        budget_s: About how long it may take; 150 s if None. torch.compile takes what it takes.
        compile: Whether to compare with torch.compile.

    Raises:
        ModelError: The plain model does not run, or cannot be copied.
        PackageError: A package variant does not load, or lacks a layer.
        UsageError: There is nothing to verify.
    """
    if not kernels or not any(kernel.sites for kernel in kernels):
        raise UsageError("There are no kernels to verify.", remedy="Optimize a model first.")
    started = time.monotonic()
    device = gpu.device_info(loaded.device)
    bench = _Bench(loaded, kernels, random.Random(seed))
    before = bench.fingerprint()
    calls: dict[str, int] = {}
    accuracy, notes = Accuracy(), _Notes()
    reason = ""
    slower: tuple[str, ...] = ()
    latency, speedup, interval = Latency(), Speedup(), SpeedupInterval()
    try:
        calls, reason = bench.count_calls()
        if not reason:
            bench.compare(accuracy, notes)
            reason = accuracy.reason
    except _PatchedFailureError as failure:
        reason = str(failure)
    if not reason:
        with gpu.device_lock(loaded.device):
            timing = bench.time(started + (budget_s or BUDGET_S), compile=compile, notes=notes)
        latency, speedup, interval = timing.latency(), timing.speedup(), timing.intervals()
        reason, slower = timing.problem, timing.slower()
    # After a failed kernel a GPU may be past answering; then the model is not run again.
    if bench.usable:
        changed = bench.changed_since(before)
        if changed:
            reason, latency, speedup, interval = changed, Latency(), Speedup(), SpeedupInterval()
    vs_eager, ratio = interval.vs_eager, speedup.vs_eager
    passed = not reason and vs_eager is not None and vs_eager[0] > 1
    if vs_eager is not None and ratio is not None and not reason:
        gain = f"{ratio:.3f} times as fast as without the kernels (95 % interval {vs_eager[0]:.3f} to {vs_eager[1]:.3f})"
        reason = f"right, and {gain}" if passed else f"right, but not faster beyond doubt: {gain}"
        reason = "; but ".join([reason, *slower]) if passed else reason
    return Verification(
        passed=passed,
        kernel_calls=calls,
        latency_ms=latency,
        speedup=speedup,
        speedup_ci95=interval,
        error=_output_error(accuracy),
        reason=reason,
        notes=tuple(notes.lines),
        device=device,
    )


def _output_error(accuracy: Accuracy) -> OutputError | None:
    if not accuracy.compared or accuracy.problems:
        return None
    return OutputError(
        max_abs=accuracy.max_abs,
        ratio_to_eager=accuracy.ratio,
        top1_agreement=accuracy.top1_agreement,
        kl=accuracy.kl,
    )


class _PatchedFailureError(Exception):
    """The model runs without the kernels, and not with them."""


@dataclass(slots=True)
class _Notes:
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        logger.info("%s", line)
        self.lines.append(line)


# --- the models ---------------------------------------------------------------------------------------------------


class _Bench:
    """The plain model, and its twin that runs with the kernels."""

    def __init__(self, loaded: LoadedModel, kernels: Sequence[StagedKernel], order: random.Random) -> None:
        self._loaded = loaded
        self._kernels = kernels
        self._order = order
        self._plain = loaded.model
        self._twin = twin(loaded.model)
        self._layers = {id(kernel): _layers_of(kernel) for kernel in kernels}
        self._sites = [site for kernel in kernels for site in kernel.sites]
        of_site = {_key(s): self._layers[id(k)] for k in kernels for s in k.sites}
        if len(of_site) != len(self._sites):
            raise UsageError(
                "Two kernels replace the same site.", remedy="Verify kernels with sites of their own."
            )
        self._patch = Patch(self._twin, self._sites, lambda site: of_site[_key(site)])
        self.usable = True

    def run_plain(self, inputs: Inputs) -> Any:
        return run_pass(self._plain, inputs, self._loaded.pulled.id)

    def run_patched(self, inputs: Inputs) -> Any:
        """
        Raises:
            _PatchedFailureError: A kernel fails.
        """
        with self._patch:
            return self._guarded(inputs)

    def _guarded(self, inputs: Inputs) -> Any:
        try:
            output = run_pass(self._twin, inputs, f"{self._loaded.pulled.id} with the kernels")
            self.join()
        except (ModelError, RuntimeError) as error:
            # RuntimeError: a GPU tells of a fault only once one waits for it.
            self.usable = self._loaded.device.type == "cpu"
            text = error.message if isinstance(error, ModelError) else str(error)
            raise _PatchedFailureError(text) from error
        return output

    def join(self) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.synchronize(self._loaded.device)

    # 1. Calls.

    def count_calls(self) -> tuple[dict[str, int], str]:
        """Calls of each target's kernel in one pass, and what is wrong with them."""
        counts = {_key(site): 0 for site in self._sites}
        counted: dict[str, ModuleType] = {}
        for kernel in self._kernels:
            layers = self._layers[id(kernel)]
            function = getattr(layers, kernel.kernel_type, None)
            for site in kernel.sites:
                counted[_key(site)] = rebound(
                    layers, kernel.kernel_type, _counting(function, counts, _key(site))
                )
        # The plain model has run before; so whatever fails now is the kernels' doing.
        self.run_plain(self._loaded.inputs)
        with Patch(self._twin, self._sites, lambda site: counted[_key(site)]):
            self._guarded(self._loaded.inputs)
        calls: dict[str, int] = {}
        for kernel in self._kernels:
            calls[kernel.target] = calls.get(kernel.target, 0) + sum(counts[_key(s)] for s in kernel.sites)
        silent = [site.name for site in self._sites if counts[_key(site)] == 0]
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            return calls, f"the kernel at {silent[0]}{more} is never called"
        return calls, ""

    # 2. Errors.

    def compare(self, accuracy: Accuracy, notes: _Notes) -> None:
        logger.log(NOTE, "  comparing outputs with a run in higher precision")
        begin = time.monotonic()
        first = self.run_plain(self._loaded.inputs)
        slow = time.monotonic() - begin > 1.0
        del first
        seed = self._loaded.spec.seed
        inputs = [
            self._loaded.inputs,
            *(self._loaded.make_inputs(seed + 1 + i) for i in range(1 if slow else 2)),
        ]
        vocabulary = _vocabulary(self._plain)
        try:
            with in_higher_precision(self._plain) as (exact, wide, remarks):
                for remark in remarks:
                    notes.add(remark)
                name = str(wide).removeprefix("torch.")
                for values in inputs:
                    truth = run_pass(exact, widened(values, wide, exact), f"the model in {name}")
                    plain = self.run_plain(values)
                    patched = self.run_patched(values)
                    accuracy.add(
                        floating_tensors(plain),
                        floating_tensors(patched),
                        floating_tensors(truth),
                        vocabulary,
                    )
                    del truth, plain, patched
        except ModelError as error:
            accuracy.problems.append(f"there is no run in higher precision to compare with: {error.message}")
        else:
            notes.add(f"errors are against {name}, on {len(inputs)} inputs")
        _free(self._loaded.device)

    # 3 and 4. Times.

    def time(self, deadline: float, *, compile: bool, notes: _Notes) -> Timing:
        timing = Timing()
        inputs = self._loaded.inputs
        columns: dict[str, Callable[[], Any]] = {
            "eager": lambda: run_pass(self._plain, inputs, self._loaded.pulled.id),
            "eager_kernels": lambda: run_pass(self._twin, inputs, self._loaded.pulled.id),
        }
        for name in columns:
            self._timed(name, columns[name])
        logger.log(NOTE, "  timing the plain model and the one with kernels in turn")
        begin = time.monotonic()
        until = begin + _EAGER_PART * max(0.0, deadline - begin) if compile else deadline
        with _no_garbage_collection():
            while not timing.enough_pairs(time.monotonic() >= until):
                self._round(columns, timing.pairs)
        if not compile:
            return timing
        torch._dynamo.reset()
        try:
            # Every column is code of its own for the same functions: together they pass the usual limits.
            with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
                inputs, remark = self._for_compile()
                if remark:
                    notes.add(remark)
                # What an eager pass gives, and how far the kernels move it: every further column is held against both.
                plain = floating_tensors(self.run_plain(self._loaded.inputs))
                patched_off = _largest(floating_tensors(self.run_patched(self._loaded.inputs)), plain)
                columns |= self._compiled(inputs, plain, patched_off, timing, notes)
                if self._loaded.device.type == "cuda":
                    columns |= self._captured(inputs, plain, patched_off, timing, notes)
                if len(columns) > 2 and not timing.problem:
                    logger.log(NOTE, "  timing %s in turn", ", ".join(columns))
                    with _no_garbage_collection():
                        while not timing.enough_rounds(time.monotonic() >= deadline):
                            self._round(columns, timing.rounds)
        finally:
            torch._dynamo.reset()
            _free(self._loaded.device)
        if timing.rounds:
            notes.add(
                f"medians of {len(timing.pairs)} pairs in eager mode and {len(timing.rounds)} rounds of all columns"
            )
        return timing

    def _round(self, columns: dict[str, Callable[[], Any]], into: list[dict[str, float]]) -> None:
        """Time every column once, in random order."""
        names = list(columns)
        self._order.shuffle(names)
        into.append({name: self._timed(name, columns[name]) for name in names})

    def _timed(self, name: str, run: Callable[[], Any]) -> float:
        """Milliseconds of one pass, from an idle device to an idle device."""
        with self._patch if "kernels" in name else contextlib.nullcontext():
            self.join()
            begin = time.perf_counter()
            output = run()
            self.join()
            end = time.perf_counter()
            del output
        return (end - begin) * 1e3

    def _compiled(
        self, inputs: Inputs, plain: dict[str, Tensor], patched_off: float, timing: Timing, notes: _Notes
    ) -> dict[str, Callable[[], Any]]:
        """The columns of torch.compile that work here, compiled and warm."""
        modes: list[tuple[str, str | None]] = [("", None)]
        if self._loaded.device.type == "cuda":
            modes.append(("_cudagraphs", "reduce-overhead"))
        columns: dict[str, Callable[[], Any]] = {}
        for suffix, mode in modes:
            off: dict[str, float] = {}
            for name, model in ((f"compile{suffix}", self._plain), (f"compile_kernels{suffix}", self._twin)):
                logger.log(NOTE, "  compiling the column %s with torch.compile", name)
                run = compiled_pass(model, inputs, mode)
                begin = time.monotonic()
                try:
                    with self._patch if "kernels" in name else contextlib.nullcontext():
                        for _ in range(3 if mode else 2):
                            output = run()
                        self.join()
                        off[name] = _largest(floating_tensors(output), plain)
                        del output
                except (RuntimeError, ModelError) as error:
                    notes.add(f"{name} was not measured: torch.compile fails ({_first_line(error)})")
                    continue
                notes.add(f"{name}: compiled in {time.monotonic() - begin:.0f} s")
                columns[name] = run
            kernels, peer = off.get(f"compile_kernels{suffix}"), off.get(f"compile{suffix}")
            if kernels is not None and not _compiled_is_right(kernels, peer, patched_off, plain):
                timing.problem = (
                    f"under torch.compile the output with the kernels is off by {kernels:.2g} of its size, "
                    f"and by {patched_off:.2g} without it"
                )
        return columns

    def _captured(
        self, inputs: Inputs, plain: dict[str, Tensor], patched_off: float, timing: Timing, notes: _Notes
    ) -> dict[str, Callable[[], Any]]:
        """The eager passes as CUDA graphs, where they can be captured."""
        others = self._loaded.make_inputs(self._loaded.spec.seed + 17)
        columns: dict[str, Callable[[], Any]] = {}
        for name, model in (("eager_cudagraphs", self._plain), ("eager_kernels_cudagraphs", self._twin)):
            kernels = model is self._twin
            try:
                with self._patch if kernels else contextlib.nullcontext():
                    run = captured_pass(model, inputs, others)
                    found = floating_tensors(run())
                    self.join()
            except (RuntimeError, ModelError) as error:
                self.join()
                notes.add(f"{name} was not measured: the pass cannot be captured ({_first_line(error)})")
                continue
            off, eager = _largest(found, plain), patched_off if kernels else 0.0
            if _compiled_is_right(off, None, eager, plain):
                columns[name] = run
            elif kernels:
                timing.problem = (
                    f"replayed from a CUDA graph the output with the kernels is off by {off:.2g} of its size, "
                    f"and by {eager:.2g} without the graph"
                )
            else:
                notes.add(
                    f"{name} was not measured: the replayed pass is off by {off:.2g} of its output's size"
                )
        return columns

    def _for_compile(self) -> tuple[Inputs, str]:
        """The inputs for torch.compile: without a mask that hides nothing, where the model does not need one.

        Under torch.compile a model cannot look into its mask and so cannot see that it hides nothing: with one, the
        compiled columns would be slower than a user who leaves it out has them.
        """
        inputs = self._loaded.inputs
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or not bool((mask == 1).all()):
            return inputs, ""
        without = {name: value for name, value in inputs.items() if name != "attention_mask"}
        plain = floating_tensors(self.run_plain(inputs))
        try:
            other = floating_tensors(self.run_plain(without))
        except ModelError:
            return inputs, ""
        if plain.keys() != other.keys() or any(not torch.equal(plain[n], other[n]) for n in plain):
            return inputs, ""
        return without, "torch.compile runs without the attention mask, which hides nothing here"

    # Afterwards.

    def fingerprint(self) -> _Fingerprint:
        output = floating_tensors(self.run_plain(self._loaded.inputs))
        return _Fingerprint(
            forwards={name: vars(module).get("forward") for name, module in self._plain.named_modules()},
            sums={name: _sums(tensor) for name, tensor in output.items()},
        )

    def changed_since(self, before: _Fingerprint) -> str:
        """What a kernel has changed in the plain model; empty if nothing.

        Raises:
            JudgeError: A patch is still in place.
        """
        after = self.fingerprint()
        if any(after.forwards[name] is not forward for name, forward in before.forwards.items()):
            raise JudgeError(
                "The model is still patched after its verification.",
                remedy="This is a fault of autokernel-hf.",
            )
        for name, (total, size) in before.sums.items():
            # Some GPU kernels add in an order that changes from run to run.
            allowed = 1e-3 * size if self._loaded.device.type == "cuda" else 0.0
            if any(abs(a - b) > allowed for a, b in zip(after.sums[name], (total, size), strict=True)):
                return (
                    "a kernel writes to the model's weights: afterwards the plain model gives another output"
                )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fingerprint:
    """What must be as it was when all is done: forwards that are set on modules, and sums over the output."""

    forwards: dict[str, Any]
    sums: dict[str, tuple[float, float]]


def _sums(tensor: Tensor) -> tuple[float, float]:
    """The sum of a tensor's finite elements, and of their sizes."""
    total = size = 0.0
    for part in slices(tensor):
        finite = torch.where(torch.isfinite(part), part, 0).double()
        total, size = total + float(finite.sum()), size + float(finite.abs().sum())
    return total, size


def _layers_of(kernel: StagedKernel) -> ModuleType:
    layers = getattr(load(kernel.path), "layers", None)
    if not isinstance(layers, ModuleType):
        raise PackageError(
            f"The package of {kernel.target} has no layers.", remedy="Build it again, with its type's layers."
        )
    return layers


def _counting(function: Callable[..., Any] | None, counts: dict[str, int], key: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        assert function is not None  # `rebound` has refused layers without one
        return function(*args, **kwargs)

    return counted


def _key(site: Site) -> str:
    return f"{site.attach}|{site.path}"


def _vocabulary(model: nn.Module) -> int | None:
    """The size of a language model's vocabulary, by its configuration."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return int(size) if size else None


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest deviation over the outputs."""
    if found.keys() != expected.keys():
        return float("inf")
    return max((deviation(found[name], expected[name]) for name in expected), default=0.0)


def _compiled_is_right(kernels: float, peer: float | None, eager: float, plain: dict[str, Tensor]) -> bool:
    """Whether the compiled model with kernels is as near to the plain one as compiling and the kernels each are.

    Both round otherwise than the plain model, so the two deviations add up; the slack is for their chance.
    """
    epsilon = max((torch.finfo(t.dtype).eps for t in plain.values()), default=0.0)
    return kernels <= _COMPILED_SLACK * max(eager + (peer or 0.0), epsilon)


# --- small things ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
