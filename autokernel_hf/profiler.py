"""Where the time of a forward pass goes, site by site, measured at exactly the places that a kernel can replace.

Every site is patched with the layer that would ship for it, whose kernel is a recorder around the type's `reference`:
what is timed is the part that a kernel replaces, and the arguments that are seen are those that it would get. The
outputs of the instrumented model must equal the plain model's; a type for which they do not is left out.

**What is measured.** `total_ms` is the wall time of a plain pass. A site's time is the time between two marks around
the reference: on a CPU by the clock, on a GPU by events on the stream. In a pass that keeps the GPU busy, events
measure device time; in a pass that waits for launches, they measure how long the launches of the site take. Either way
it is the time that the pass would be shorter by if the site took none, which is what a share has to tell; where the
pass would begin to wait for launches only without the site, it is the most that there is to save. Each round
measures a plain pass and the instrumented ones back to back; shares are medians over the rounds' own ratios, so that
drift of the machine cancels. Signatures are recorded in a pass of their own: a timed pass records two marks a call and
nothing else, and the cost of an empty pair is subtracted.

**Counted once.** A layer of `gated_activation` calls the projections around it, which are sites of their own, and does
not call the activation module: that module then has no time of its own. Where a layer replaces sites that count by
themselves (`ENCLOSING`: a whole MLP, a norm together with the addition before it) it is measured in a pass of its own;
the sites that are not called in that pass are marked `nested_in` its row. Shares of rows without `nested_in` are parts
of the pass that do not overlap: `other_share` is what they leave.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autokernel_hf import gpu
from autokernel_hf.ceilings import floor_us, measure_ceilings
from autokernel_hf.clocks import Clock, clock_of, overhead_ms
from autokernel_hf.errors import DeviceError, ModelError, UsageError
from autokernel_hf.kernels import backends
from autokernel_hf.kernels import kernel_type as kernel_type_of
from autokernel_hf.kernels.base import KernelType, describe
from autokernel_hf.models import LoadedModel, run_pass
from autokernel_hf.models.outputs import deviation, floating_tensors
from autokernel_hf.patch import Patch, all_sites, load_layers
from autokernel_hf.records import Profile, Site, SiteProfile, TensorSpec, Workload

logger = logging.getLogger(__name__)

ENCLOSING = ("add_norm", "fused_mlp")
"""Types whose kernel does the work of sites of other types that are worth a kernel of their own."""

BUDGET_S = 30.0
MIN_ROUNDS, MAX_ROUNDS = 3, 25

Signature: TypeAlias = tuple[tuple[str, TensorSpec | bool | int | float | str | None], ...]


def profile(
    loaded: LoadedModel,
    *,
    types: Sequence[str] | None = None,
    trace: Path | None = None,
    memory_snapshot: Path | None = None,
    compile_log: Path | None = None,
) -> Profile:
    """Measure one forward pass.

    Args:
        types: The kernel types to look for; all if None.
        trace: Write a Chrome trace of an instrumented pass here.
        memory_snapshot: Write a snapshot of the GPU's allocations in a plain pass here.
        compile_log: Write what torch.compile makes of the model into this folder.

    Raises:
        ModelError: The model does not run.
        DeviceError: A memory snapshot is asked for on a CPU.
        UsageError: A file cannot be written.
    """
    if memory_snapshot is not None and loaded.device.type != "cuda":
        raise DeviceError(
            "Only a GPU's allocator keeps the history that a memory snapshot shows.",
            remedy="Use --device cuda, or --trace, which holds the allocations of a CPU too.",
        )
    session = _Session(loaded, all_sites(loaded.model, types))
    with gpu.device_lock(loaded.device):
        measured = session.measure()
    rows, other = _rows(loaded, measured)
    if trace is not None:
        session.write_trace(trace)
    if memory_snapshot is not None:
        _write_memory_snapshot(loaded, memory_snapshot)
    if compile_log is not None:
        from autokernel_hf.compile_log import write_compile_log

        write_compile_log(loaded, compile_log)
    return Profile(
        spec=loaded.spec,
        model=loaded.pulled,
        device=gpu.device_info(loaded.device),
        total_ms=measured.total_ms,
        sites=tuple(rows),
        other_share=other,
        device_ms=measured.device_ms,
    )


# --- recorders ----------------------------------------------------------------------------------------------------


class _Recorder:
    """Stands where a site's kernel would: runs the reference, and notes its calls, or their times, or a range."""

    def __init__(self, site: Site, kind: KernelType, clock: Clock) -> None:
        self.site = site
        self._kind = kind
        self._names = [argument.name for argument in kind.schema.args]
        self._clock = clock
        self._single = kind.schema.returns == 1
        self.signatures: list[Signature] = []
        self.marks: list[tuple[Any, Any]] = []
        self.run: Callable[..., Any] = self.note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.run(*args, **kwargs)
        return outputs[0] if self._single else outputs

    def note(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        bound = self._kind.schema.bind(given)
        self.signatures.append(
            tuple((n, describe(v) if isinstance(v, Tensor) else v) for n, v in bound.items())
        )
        return self._kind.reference(*args, **kwargs)

    def time(self, *args: Any, **kwargs: Any) -> Any:
        begin = self._clock.mark()
        outputs = self._kind.reference(*args, **kwargs)
        self.marks.append((begin, self._clock.mark()))
        return outputs

    def annotate(self, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"{self._kind.name} {self.site.name}"):
            return self._kind.reference(*args, **kwargs)


class _Instrument:
    """One way of patching the model with recorders."""

    def __init__(self, model: nn.Module, sites: Sequence[Site], clock: Clock) -> None:
        self.recorders = {
            _key(site): _Recorder(site, kernel_type_of(site.kernel_type), clock) for site in sites
        }
        self.patch = Patch(
            model,
            sites,
            lambda site: load_layers(site.kernel_type, self.recorders[_key(site)], compilable=False),
        )

    def noted(self, run: Callable[[], Any]) -> Any:
        """A pass in which signatures are noted; returns the model's output."""
        for recorder in self.recorders.values():
            recorder.signatures.clear()
            recorder.run = recorder.note
        with self.patch:
            return run()

    def timed(self, run: Callable[[], Any], clock: Clock, overhead: float) -> dict[str, list[float]]:
        """A pass in which calls are timed: for each site, the milliseconds of its calls in order."""
        for recorder in self.recorders.values():
            recorder.marks.clear()
            recorder.run = recorder.time
        with self.patch:
            run()
        clock.join()
        return {
            key: [max(0.0, clock.between(b, e) - overhead) for b, e in recorder.marks]
            for key, recorder in self.recorders.items()
        }

    def annotated(self, run: Callable[[], Any]) -> None:
        for recorder in self.recorders.values():
            recorder.run = recorder.annotate
        with self.patch:
            run()


def _key(site: Site) -> str:
    return f"{site.kernel_type}|{site.attach}|{site.path}"


def _place(site: Site) -> str:
    return f"{site.attach}|{site.path}"


# --- a session ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """All that a session saw.

    Args:
        total_ms: Median wall time of a plain pass.
        device_ms: How long a GPU works in it.
        sites: Every site that was called, by key.
        signatures: The signature of each of a site's calls in one pass, in order.
        rounds: For each round, each site and each of its calls: the part of that round's plain pass that it took.
        enclosed: For a site of an enclosing type, the keys of the sites that are not called when it is replaced.
    """

    total_ms: float
    device_ms: float | None
    sites: dict[str, Site]
    signatures: dict[str, list[Signature]]
    rounds: list[dict[str, list[float]]]
    enclosed: dict[str, set[str]]


class _Session:
    """A model with its instruments: one for sites that do not overlap, and one for each enclosing type."""

    def __init__(self, loaded: LoadedModel, sites: Sequence[Site]) -> None:
        self._loaded = loaded
        self._clock = clock_of(loaded.device)
        self._expected = floating_tensors(loaded.run())
        base = _without_overlap([site for site in sites if site.kernel_type not in ENCLOSING])
        instrument, problem = self._instrument(base)
        if problem:
            if unsteady := self._difference(self._run()):
                raise ModelError(
                    f"{loaded.pulled.id} gives another output when it runs again on the same input ({unsteady}).",
                    remedy="Let its forward draw no random numbers, and change neither its inputs nor itself.",
                )
            base = self._faithful(base)
            instrument, problem = self._instrument(base)
            if problem:
                raise ModelError(
                    f"{loaded.pulled.id} gives another output with all its sites instrumented ({problem}), "
                    "and the same one with those of each kernel type alone.",
                    remedy="This is a fault of autokernel-hf: please report it with the model.",
                )
        self._base = instrument
        self._enclosing: list[_Instrument] = []
        self._enclosed: dict[str, set[str]] = {}
        for name in ENCLOSING:
            own = self._faithful(_without_overlap([site for site in sites if site.kernel_type == name]))
            if own:
                self._add_enclosing(own, base)

    def _add_enclosing(self, own: Sequence[Site], base: Sequence[Site]) -> None:
        instrument = _Instrument(self._loaded.model, own, self._clock)
        instrument.noted(self._run)
        self._enclosing.append(instrument)
        # Once more with the other sites patched too: those that are called less often are silenced by these.
        taken = {_place(site) for site in own}
        rest = [site for site in base if _place(site) not in taken]
        probe = _Instrument(self._loaded.model, [*own, *rest], self._clock)
        probe.noted(self._run)
        silenced = {
            key
            for key, recorder in self._base.recorders.items()
            if key not in probe.recorders or len(probe.recorders[key].signatures) < len(recorder.signatures)
        }
        for outer in own:
            self._enclosed[_key(outer)] = {
                key for key in silenced if _inside(self._base.recorders[key].site, outer, len(own))
            }

    def _run(self) -> Any:
        return run_pass(self._loaded.model, self._loaded.inputs, self._loaded.pulled.id)

    def _instrument(self, sites: Sequence[Site]) -> tuple[_Instrument, str]:
        """An instrument with its signatures noted, and what is wrong with the model's output under it."""
        instrument = _Instrument(self._loaded.model, sites, self._clock)
        try:
            return instrument, self._difference(instrument.noted(self._run))
        except ModelError as error:
            return instrument, error.message

    def _faithful(self, sites: Sequence[Site]) -> list[Site]:
        """The sites of the types whose layers leave the model's output as it is."""
        kept: list[Site] = []
        for name in dict.fromkeys(site.kernel_type for site in sites):
            own = [site for site in sites if site.kernel_type == name]
            _, problem = self._instrument(own)
            if problem:
                logger.warning(
                    "%s is left out of the profile: with its layers the model differs (%s)", name, problem
                )
            else:
                kept += own
        return kept

    def _difference(self, output: Any) -> str:
        """What tells an instrumented pass's output from the plain one's; empty where nothing does."""
        found = floating_tensors(output)
        for name, expected in self._expected.items():
            if name not in found:
                return f"{name} is missing"
            # Another order of roundings is allowed; another function is not. Errors of 16-bit sums grow with depth.
            limit = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.05
            error = deviation(found[name], expected)
            if error > limit:
                return f"{name} by {error:.2g} of its size"
        return ""

    def measure(self) -> _Measured:
        instruments = [self._base, *self._enclosing]
        overhead = overhead_ms(self._clock)
        passes: list[float] = []
        rounds: list[dict[str, list[float]]] = []
        cost_s = self._clock.pass_ms(self._run) * (len(instruments) + 1) / 1e3
        count = max(MIN_ROUNDS, min(MAX_ROUNDS, int(BUDGET_S / max(cost_s, 1e-6))))
        order = random.Random(0)
        with _no_garbage_collection():
            for _ in range(count):
                jobs: list[_Instrument | None] = [None, *instruments]
                order.shuffle(jobs)
                times: dict[str, list[float]] = {}
                for job in jobs:
                    if job is None:
                        passes.append(self._clock.pass_ms(self._run))
                    else:
                        times |= job.timed(self._run, self._clock, overhead)
                rounds.append({key: [ms / passes[-1] for ms in calls] for key, calls in times.items()})
        recorders = {k: r for i in instruments for k, r in i.recorders.items() if r.signatures}
        return _Measured(
            total_ms=statistics.median(passes),
            device_ms=self._clock.device_ms(self._run),
            sites={key: recorder.site for key, recorder in recorders.items()},
            signatures={key: recorder.signatures for key, recorder in recorders.items()},
            rounds=rounds,
            enclosed={
                key: keys & recorders.keys() for key, keys in self._enclosed.items() if key in recorders
            },
        )

    def write_trace(self, path: Path) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._loaded.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        ) as recorded:
            self._base.annotated(self._run)
            self._clock.join()
        with _writable(path):
            recorded.export_chrome_trace(str(path))


def _without_overlap(sites: Sequence[Site]) -> list[Site]:
    """Of several sites in one place, the first."""
    places: dict[str, Site] = {}
    for site in sites:
        known = places.setdefault(_place(site), site)
        if known is not site:
            logger.info("%s is counted as %s, not as %s", site.name, known.kernel_type, site.kernel_type)
    return list(places.values())


def _inside(inner: Site, outer: Site, candidates: int) -> bool:
    """Whether a silenced site lies within this enclosing one; by its path, where it has one."""
    if inner.attach != "module" or outer.attach != "module":
        return candidates == 1
    return inner.path == outer.path or inner.path.startswith(f"{outer.path}.")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- rows ---------------------------------------------------------------------------------------------------------


def pattern(name: str) -> str:
    """A site's name with the numbers of layers replaced: `h.3.mlp.act` -> `h.*.mlp.act`."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)


def _rows(loaded: LoadedModel, measured: _Measured) -> tuple[list[SiteProfile], float]:
    kind = loaded.device.type
    ceilings = measure_ceilings(loaded.device)
    groups: dict[tuple[str, str, str, str | None], list[str]] = {}
    parents = _parents(measured)
    names = _row_names(measured)
    for key, site in measured.sites.items():
        parent = parents.get(key)
        nested_in = names[parent] if parent is not None else None
        groups.setdefault((site.kernel_type, site.layer, names[key], nested_in), []).append(key)
    rows = []
    for (type_name, layer, name, nested_in), keys in groups.items():
        usable = ("triton", "cuda") if kind == "cuda" else ("cpp",)
        workloads = _workloads(measured, keys)
        floors = [(w, *floor_us(kernel_type_of(type_name), w, ceilings)) for w in workloads]
        share = _share(measured, _calls(measured, keys))
        rows.append(
            SiteProfile(
                name=name,
                kernel_type=type_name,
                layer=layer,
                sites=tuple(measured.sites[k] for k in keys),
                share=share,
                calls=sum(w.calls for w in workloads),
                ms=share * measured.total_ms,
                attainable_ms=math.fsum(w.calls * us for w, us, _ in floors) / 1e3,
                shapes=tuple(dict.fromkeys(w.shape for w in workloads)),
                bound=floors[0][2],
                supported=any(b in usable for b in backends(type_name)),
                workloads=workloads,
                nested_in=nested_in,
            )
        )
    return _counted_once(rows)


_NOISY = 1.02
"""Sums of parts by so much above the whole are told: a percent is what passes differ by on a quiet machine."""


def _counted_once(rows: Sequence[SiteProfile]) -> tuple[list[SiteProfile], float]:
    """The rows by share, and what they leave of the pass.

    Noise can make parts of a pass add up to more than the pass; then they are scaled to add up to it.
    """
    total = math.fsum(row.share for row in rows if row.nested_in is None)
    if total > _NOISY:
        logger.warning("the sites' times add up to %.2f passes: the measurement is noisy", total)
    if total > 1:
        rows = [
            row.model_copy(
                update={
                    "share": row.share / total,
                    "ms": row.ms / total,
                    "workloads": tuple(
                        w.model_copy(update={"share": w.share / total}) for w in row.workloads
                    ),
                }
            )
            for row in rows
        ]
    return sorted(rows, key=lambda row: -row.share), max(0.0, 1 - total)


def _share(measured: _Measured, calls: Sequence[tuple[str, int]]) -> float:
    """The part of a pass that some calls take together: the median over the rounds."""
    return statistics.median(
        math.fsum(parts[key][index] for key, index in calls) for parts in measured.rounds
    )


def _calls(measured: _Measured, keys: Sequence[str]) -> list[tuple[str, int]]:
    return [(key, index) for key in keys for index in range(len(measured.signatures[key]))]


def _workloads(measured: _Measured, keys: Sequence[str]) -> tuple[Workload, ...]:
    """The distinct calls of some sites, by share."""
    by_signature: dict[Signature, list[tuple[str, int]]] = {}
    for key, index in _calls(measured, keys):
        by_signature.setdefault(measured.signatures[key][index], []).append((key, index))
    found = [
        Workload(label="", args=signature, calls=len(calls), share=_share(measured, calls))
        for signature, calls in by_signature.items()
    ]
    found.sort(key=lambda w: -w.share)
    labels: Counter[str] = Counter()
    labelled = []
    for workload in found:
        labels[workload.shape] += 1
        suffix = f"#{labels[workload.shape]}" if labels[workload.shape] > 1 else ""
        labelled.append(workload.model_copy(update={"label": workload.shape + suffix}))
    return tuple(labelled)


def _parents(measured: _Measured) -> dict[str, str]:
    """For each site whose work an enclosing site does too, that site: the one with most of the time, if several."""
    parents: dict[str, str] = {}
    by_time = sorted(measured.enclosed, key=lambda key: _share(measured, _calls(measured, [key])))
    for outer in by_time:  # the last one, with most of the time, stays
        parents.update(dict.fromkeys(measured.enclosed[outer], outer))
    for inner in measured.enclosed:
        for outer in by_time:
            if inner != outer and _within(measured.sites[inner], measured.sites[outer]):
                parents[inner] = outer
    return parents


def _within(inner: Site, outer: Site) -> bool:
    return inner.attach == outer.attach == "module" and inner.path.startswith(f"{outer.path}.")


def _row_names(measured: _Measured) -> dict[str, str]:
    """A name for each site's row; where an enclosing site and another share it, the enclosing one says so."""
    plain = {pattern(s.name) for k, s in measured.sites.items() if k not in measured.enclosed}
    names = {}
    for key, site in measured.sites.items():
        name = pattern(site.name)
        names[key] = f"{name} (whole)" if key in measured.enclosed and name in plain else name
    return names


# --- files --------------------------------------------------------------------------------------------------------


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"{path} cannot be written ({error}).", remedy="Name a file in a writable folder."
        ) from error


def _write_memory_snapshot(loaded: LoadedModel, path: Path) -> None:
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=200_000)
    try:
        loaded.run()
        torch.cuda.synchronize(loaded.device)
        with _writable(path):
            memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)
