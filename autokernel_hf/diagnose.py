"""What bounds a kernel on a workload, and which of its constants to change first.

From the call's least bytes and flops, the ceilings measured on the device, the measured time, and what the compiler
says of registers, spills and shared memory. Hardware counters are not read yet: they would tell apart what is called
`latency` here (too few loads in flight, bank conflicts, waits at barriers), and are to come with Nsight Compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autokernel_hf.gpu import Ceilings, Roofline, roofline
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What bounds a kernel, with the numbers it is told from.

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
) -> Diagnosis:
    """What bounds a kernel that took `latency_us` on `workload`.

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
    advice = _advice(bound, roofs, known, ceilings.device.kind)
    return Diagnosis(
        bound=bound,
        evidence=_evidence(kernel_type, workload, latency_us, roofs, ceilings, known),
        floor_us=floor.us,
        pct_of_floor=100 * share,
        prescriptions=tuple(kind for kind, _ in advice),
        reasons=tuple(reason for _, reason in advice),
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


def _advice(bound: Bound, roofs: Roofline, resources: Resources, device: str) -> list[tuple[str, str]]:
    """Kinds of tunables and why, best first, each kind once."""
    advice: list[tuple[str, str]] = []
    if resources.spill_bytes:
        spilled = f"{resources.spill_bytes} bytes of registers are spilled to memory"
        advice += [("block", f"{spilled}: smaller blocks need fewer"), ("compute", f"{spilled}: unroll less")]
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
    chosen: dict[str, str] = {}
    for kind, reason in advice:
        chosen.setdefault(kind, reason)
    return list(chosen.items())


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
