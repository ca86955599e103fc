"""Targets: which kernel types of a profile are worth a search, and on which workloads.

Amdahl's law orders them: a target is worth the time that its sites take now, less the time that the same calls would
take at the device's floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autokernel_hf.errors import UsageError
from autokernel_hf.kernels import backends, starter
from autokernel_hf.records import Backend, Candidate, Profile, SiteProfile, Target, TargetResult, Workload

MIN_GAIN = 0.005
"""A target whose ideal kernel would make the pass less than 0.5 % faster cannot be told from noise."""

COVERED = 0.95
"""Workloads are taken by share until they cover this part of the type's time, at most MAX_WORKLOADS of them."""
MAX_WORKLOADS = 6


def usable_backends(kernel_type: str, device: str, wanted: str = "auto") -> tuple[Backend, ...]:
    """The backends with a starter for a type that can be run, timed and shipped on a device kind."""
    runnable: tuple[Backend, ...] = ("triton", "cuda") if device == "cuda" else ("cpp",)
    return tuple(b for b in backends(kernel_type) if b in runnable and wanted in ("auto", b))


def extract(
    profile: Profile, *, top: int, backend: str = "auto", settled: Mapping[str, bool] | None = None
) -> tuple[list[Target], list[TargetResult]]:
    """The `top` targets of a profile by attainable gain, and the types that were passed over, with the reason.

    Args:
        settled: Targets that were searched already, and whether each holds its place in the model. They are in neither
            list. What lies within one that holds its place is passed over; one that does not leaves its sites to others.

    Raises:
        UsageError: The backend cannot run on the profile's device.
    """
    kind = profile.device.kind
    if backend != "auto" and backend not in (("triton", "cuda") if kind == "cuda" else ("cpp",)):
        raise UsageError(
            f"The backend {backend} cannot be timed on {profile.device.name}.",
            remedy="Use --backend cpp on a CPU, triton or cuda on a GPU.",
        )
    rows: dict[str, list[SiteProfile]] = {}
    for site in profile.sites:
        rows.setdefault(site.kernel_type, []).append(site)
    known = settled or {}
    held = [name for name, holds in known.items() if holds]
    gains = {name: _gain(group, profile.total_ms) for name, group in rows.items()}
    targets: list[Target] = []
    skipped: list[TargetResult] = []
    taken = {r.name for name in held for r in rows[name]}  # names of rows that a chosen target replaces
    for name in sorted(rows, key=lambda n: -gains[n]):
        if name in known:
            continue
        group = rows[name]
        share = sum(r.share for r in group)
        usable = usable_backends(name, kind, backend)
        reason = ""
        if not usable:
            reason = (
                f"no {backend if backend != 'auto' else ''} starter of this type runs on this device".replace(
                    "  ", " "
                )
            )
        elif gains[name] < MIN_GAIN:
            reason = (
                f"an ideal kernel would save {100 * gains[name]:.1f} % of the pass, too little to measure"
            )
        elif any(r.nested_in in taken for r in group) or any(
            other.nested_in in {r.name for r in group}
            for chosen in [*held, *(t.kernel_type for t in targets)]
            for other in rows[chosen]
        ):
            reason = "its sites overlap those of a target with more to gain"
        elif len(targets) >= top:
            reason = f"beyond the top {top + len(known)}"
        if reason:
            skipped.append(
                TargetResult(
                    name=name, kernel_type=name, backend=None, share=share, status="skipped", reason=reason
                )
            )
            continue
        taken |= {r.name for r in group}
        targets.append(
            Target(
                name=name,
                kernel_type=name,
                backend=usable[0],
                share=share,
                attainable_speedup=1 / (1 - gains[name]),
                sites=tuple(s for r in group for s in r.sites),
                workloads=_main_workloads(group),
                device=profile.spec.device if profile.spec.device != "auto" else kind,
                launch_bound=profile.launch_bound,
            )
        )
    return targets, skipped


def starters(target: Target, device: str, backend: str = "auto") -> list[Candidate]:
    """The starters of a target's type, one for each backend that runs on the device."""
    found = []
    for name in usable_backends(target.kernel_type, device, backend):
        source = starter(target.kernel_type, name)
        assert source is not None
        found.append(Candidate(kernel_type=target.kernel_type, backend=name, source=source))
    return found


def _gain(group: Sequence[SiteProfile], total_ms: float) -> float:
    """The part of the pass that goes away if every site of the group ran at its floor, 0 to 1."""
    return min(0.99, sum(max(0.0, r.ms - r.attainable_ms) for r in group) / total_ms)


def _main_workloads(group: Sequence[SiteProfile]) -> tuple[Workload, ...]:
    merged: dict[str, Workload] = {}
    for workload in (w for r in group for w in r.workloads):
        key = repr((workload.args, workload.values))
        known = merged.get(key)
        if known is not None:
            workload = known.model_copy(
                update={"calls": known.calls + workload.calls, "share": known.share + workload.share}
            )
        merged[key] = workload
    ordered = sorted(merged.values(), key=lambda w: -w.share)
    total = math.fsum(w.share for w in ordered)
    chosen: list[Workload] = []
    for workload in ordered:
        if len(chosen) == MAX_WORKLOADS or (chosen and math.fsum(w.share for w in chosen) >= COVERED * total):
            break
        chosen.append(workload)
    return tuple(chosen)
