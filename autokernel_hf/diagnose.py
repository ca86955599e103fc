"""What bounds a kernel on a workload, and which of its constants to change first.

From the call's least bytes and flops, the ceilings measured on the device, the measured time, and what the compiler
says of registers, spills and shared memory. Where hardware counters could be read (`counters`), they tell apart what is
called `latency` otherwise: a kernel that moves more than the least and is bound by memory after all, and what its warps
wait for. All of it works without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autokernel_hf.ceilings import Ceilings, Roofline, roofline
from autokernel_hf.counters import STALLS, Counters
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Resources, Workload

Bound: TypeAlias = Literal["launch", "latency", "memory", "compute", "underutilized"]

NEAR_FLOOR = 0.6
"""From this share of the roofline on, the roof itself is what bounds a kernel."""
LAUNCH_TIMES = 3.0
"""A call of up to so many times a launch is made of the launch."""
ELEMENTS_PER_UNIT = {"cuda": 2048, "cpu": 4096}
"""Fewer output elements than this for every multiprocessor or core leave most of them without work."""
MANY_REGISTERS = 168
"""So many registers a thread leave a multiprocessor of 65536 room for 12 warps."""
MUCH_MORE = 1.3
"""So many times the least bytes are more than a cache's granularity explains."""
HALF_USED_PCT = 60.0
"""Of the bytes that loads move, so few are asked for where neighbouring threads do not read neighbouring elements."""
FEW_WARPS_PCT = 40.0
MANY_CONFLICTS_PCT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What bounds a kernel, with the numbers it is told from.

    The most that can be gained is `100 / pct_of_floor`: at its floor a kernel would be so many times as fast.

    Args:
        bound: `memory` or `compute`: near that roof; `launch`: too short for anything but the launch; `underutilized`:
            too little parallel work for the device; `latency`: far from every roof with work enough.
        evidence: The numbers, as a phrase.
        floor_us: The least time of the call on this device.
        pct_of_floor: 100 * floor over time: 100 is at the roof.
        prescriptions: Kinds of tunables (of `tunables.ACTS_ON`) to change first, best first.
        reasons: Why, for each of them.
    """

    bound: Bound
    evidence: str
    floor_us: float
    pct_of_floor: float
    prescriptions: tuple[str, ...]
    reasons: tuple[str, ...]


def diagnose(
    kernel_type: KernelType,
    workload: Workload,
    latency_us: float,
    ceilings: Ceilings,
    resources: Resources | None = None,
    counters: Counters | None = None,
) -> Diagnosis:
    """What bounds a kernel that took `latency_us` on `workload`, of which `counters` were read if they could be.

    Raises:
        ValueError: The time is not positive.
    """
    if not latency_us > 0:
        raise ValueError(f"a time must be positive, not {latency_us}")
    known = resources if resources is not None else Resources()
    roofs = roofline(kernel_type, workload, ceilings)
    floor = roofs.floor
    share = floor.us / latency_us
    bound = _bound(workload, latency_us, roofs, ceilings)
    advice: list[tuple[str, str]] = []
    evidence = _evidence(kernel_type, workload, latency_us, roofs, ceilings, known)
    if counters is not None:
        least_bytes = kernel_type.bytes_moved(workload)
        bound = _bound_as_counted(bound, counters)
        advice = _advice_as_counted(bound, counters, least_bytes)
        evidence = f"{evidence}; {counted(counters, least_bytes)}"
    spilled, usual = _advice(bound, roofs, known, ceilings.device.kind)
    advice = [*spilled, *advice, *usual]
    chosen: dict[str, str] = {}
    for kind, reason in advice:
        chosen.setdefault(kind, reason)
    return Diagnosis(
        bound=bound,
        evidence=evidence,
        floor_us=floor.us,
        pct_of_floor=100 * share,
        prescriptions=tuple(chosen),
        reasons=tuple(chosen.values()),
    )


def _bound(workload: Workload, latency_us: float, roofs: Roofline, ceilings: Ceilings) -> Bound:
    if latency_us <= LAUNCH_TIMES * roofs.launch_us:
        return "launch"
    work_us = max(roofs.memory_us, roofs.compute_us)
    if work_us >= NEAR_FLOOR * latency_us:
        return "memory" if roofs.memory_us >= roofs.compute_us else "compute"
    if _elements(workload) < ELEMENTS_PER_UNIT[ceilings.device.kind] * ceilings.device.units:
        return "underutilized"
    return "latency"


def _elements(workload: Workload) -> int:
    """Elements of the largest tensor: how much can be done side by side."""
    sizes = [1]
    for _, spec in workload.tensors:
        count = 1
        for n in spec.shape:
            count *= n
        sizes.append(count)
    return max(sizes)


def _bound_as_counted(bound: Bound, counters: Counters) -> Bound:
    """What is far from its least time may be near a roof all the same, with more work than the least."""
    if bound not in ("latency", "underutilized"):
        return bound
    if (counters.dram_pct or 0.0) >= 100 * NEAR_FLOOR:
        return "memory"
    if max(counters.sm_pct or 0.0, counters.tensor_pct or 0.0) >= 100 * NEAR_FLOOR:
        return "compute"
    if counters.waves is not None:
        return "underutilized" if counters.waves < 0.5 else "latency"
    return bound


def _advice_as_counted(bound: Bound, counters: Counters, least_bytes: float) -> list[tuple[str, str]]:
    """What counters point at, worst first."""
    advice: list[tuple[str, str]] = []
    if counters.local_bytes:
        moved = f"{counters.local_bytes:.4g} bytes go to spilled registers or local arrays and back"
        advice += [("block", f"{moved}: smaller blocks need fewer"), ("compute", f"{moved}: unroll less")]
    if (counters.dram_bytes or 0.0) > MUCH_MORE * least_bytes:
        times = f"{(counters.dram_bytes or 0.0) / least_bytes:.1f} times the least bytes are moved"
        advice += [
            ("algorithm", f"{times}: read each once"),
            ("block", f"{times}: blocks decide what a cache keeps"),
        ]
    if counters.used_pct is not None and counters.used_pct < HALF_USED_PCT:
        advice.append(
            (
                "memory",
                f"{counters.used_pct:.0f} % of the bytes that loads move are asked for: read neighbours together",
            )
        )
    if (counters.conflict_pct or 0.0) > MANY_CONFLICTS_PCT:
        advice.append(
            (
                "memory",
                f"{counters.conflict_pct:.0f} % of the accesses to shared memory repeat others: bank conflicts",
            )
        )
    if bound not in ("latency", "underutilized") or not counters.stalls:
        return advice
    name, part = counters.stalls[0]
    waits = f"{100 * part:.0f} % of the waiting is for {STALLS[name]}"
    few = counters.occupancy_pct is not None and counters.occupancy_pct < FEW_WARPS_PCT
    if name in ("long_scoreboard", "lg_throttle"):
        if few:
            advice.append(
                (
                    "block",
                    f"{waits}, and {counters.occupancy_pct:.0f} % of the warps that fit are there to hide it",
                )
            )
        advice += [
            ("memory", f"{waits}: fetch earlier, wider"),
            ("compute", f"{waits}: more loads in flight"),
        ]
    elif name in ("barrier", "membar", "gmma"):
        advice += [
            ("launch", f"{waits}: smaller groups of threads wait for fewer others"),
            ("memory", f"{waits}: more stages between who loads and who computes"),
        ]
    elif name in ("short_scoreboard", "mio_throttle"):
        advice.append(("memory", f"{waits}: fewer, wider accesses, or another layout"))
    else:
        advice.append(("compute", f"{waits}: more independent work a thread"))
    return advice


def counted(counters: Counters, least_bytes: float) -> str:
    """Counters as a phrase."""
    parts = []
    if counters.dram_bytes is not None:
        parts.append(f"{counters.dram_bytes / least_bytes:.2f} times the least bytes moved")
    for value, of in (
        (counters.dram_pct, "of the memory's peak"),
        (counters.sm_pct, "of the multiprocessors' peak"),
        (counters.tensor_pct, "of the tensor cores'"),
        (counters.occupancy_pct, "of the warps that fit"),
    ):
        if value is not None:
            parts.append(f"{value:.0f} % {of}")
    waits = [f"{STALLS[name]} {100 * part:.0f} %" for name, part in counters.stalls[:3] if part >= 0.05]
    if waits:
        parts.append(f"warps wait for {', '.join(waits)}")
    number = sum(n for _, n in counters.kernels)
    return f"by hardware counters over {number} launch{'es' if number > 1 else ''}: {', '.join(parts)}"


def _advice(
    bound: Bound, roofs: Roofline, resources: Resources, device: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Kinds of tunables and why, best first: what is due whatever else is known, and what the bound asks for."""
    spills: list[tuple[str, str]] = []
    if resources.spill_bytes:
        spilled = f"{resources.spill_bytes} bytes of registers are spilled to memory"
        spills = [("block", f"{spilled}: smaller blocks need fewer"), ("compute", f"{spilled}: unroll less")]
    advice: list[tuple[str, str]] = []
    if bound == "launch":
        advice += [
            ("launch", "the call is hardly longer than a launch: fewer threads or warps start sooner"),
            ("algorithm", "one pass instead of two saves a launch or a barrier"),
        ]
    elif bound == "underutilized":
        advice += [
            ("block", "smaller blocks give every unit work"),
            ("algorithm", "splitting the reduction makes more work to do side by side"),
            ("launch", "the number of threads must fit the little work"),
        ]
    elif bound == "memory":
        advice += [
            ("memory", "the memory's bandwidth is the roof: wider, prefetched or streaming accesses"),
            ("block", "blocks decide what stays in a cache and is read once"),
        ]
    elif bound == "compute":
        advice += [
            ("block", "larger tiles use each loaded element more often"),
            ("compute", "deeper pipelines and unrolling keep the arithmetic units busy"),
        ]
    else:
        many = (resources.registers or 0) >= MANY_REGISTERS
        if many:
            advice.append(
                ("block", f"{resources.registers} registers a thread leave few warps to hide waits")
            )
        if roofs.compute_us > roofs.memory_us:
            advice += [
                ("compute", "far from both roofs and mostly arithmetic: more independent work in flight"),
                ("block", "the tile decides how much each load feeds"),
            ]
        else:
            waiting = "more loads in flight" if device == "cuda" else "more independent vectors in flight"
            advice += [
                ("compute", f"far from the memory's bandwidth: {waiting} hide the waits"),
                ("memory", "prefetching hides the waits, too"),
                ("block", "the block decides how many loads are in flight at once"),
            ]
        advice.append(("algorithm", "another order of passes may wait less"))
    return spills, advice


def _evidence(
    kernel_type: KernelType,
    workload: Workload,
    latency_us: float,
    roofs: Roofline,
    ceilings: Ceilings,
    resources: Resources,
) -> str:
    bytes_moved, flops = kernel_type.bytes_moved(workload), kernel_type.flops(workload)
    reached, limit = bytes_moved / latency_us / 1e3, ceilings.bandwidth_gb_s(bytes_moved)
    parts = [
        f"{latency_us:.4g} us against a floor of {roofs.floor.us:.4g} us",
        f"{reached:.4g} of {limit:.4g} GB/s ({100 * reached / limit:.0f} %)",
    ]
    rate = ceilings.rate_tflops(workload.dtype)
    if rate:
        done = flops / latency_us / 1e6
        parts.append(f"{done:.3g} of {rate:.3g} TFLOP/s ({100 * done / rate:.0f} %)")
    parts.append(f"a launch takes {roofs.launch_us:.3g} us")
    if resources.registers is not None:
        parts.append(f"{resources.registers} registers a thread")
    if resources.spill_bytes:
        parts.append(f"{resources.spill_bytes} bytes spilled")
    if resources.shared_bytes:
        parts.append(f"{resources.shared_bytes} bytes of shared memory")
    return ", ".join(parts)
