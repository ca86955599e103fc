"""How long an experiment takes, and in which phase: the starter of each type and backend, then changed constants.

    python benchmarks/judge_speed.py cuda --out benchmarks/results/judge-speed-h200.json
    python benchmarks/judge_speed.py cpu --out benchmarks/results/judge-speed-cpu.json

The workloads are those of a model: what `optimize` would judge on. The first experiment of a session also waits for
its processes; the ones after it do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from autokernel_hf import tunables
from autokernel_hf.evaluate import Judge
from autokernel_hf.kernels import kernel_type, starter
from autokernel_hf.records import Candidate, Evaluation, Workload

TYPES = ("activation", "rmsnorm", "layernorm", "gated_activation", "softmax", "rotary_embedding")


def variants(source: str, count: int) -> list[str]:
    """The source with one constant changed, as the playbook's opening does."""
    made = []
    for tunable in tunables.parse(source):
        for choice in tunable.choices:
            if choice != tunable.value:
                made.append(tunables.substitute(source, {tunable.name: choice}))
    return made[:count]


def workloads_of(name: str, kind: str) -> tuple[Workload, ...]:
    """The first of the type's own calls in a model's usual dtype."""
    dtype = "float16" if kind == "cuda" else "float32"
    own = [w for w in kernel_type(name).workloads[kind] if w.dtype == dtype]
    return tuple((own or list(kernel_type(name).workloads[kind]))[:1])


def session(name: str, backend: str, device: str, count: int) -> dict[str, object]:
    """One judge session: the starter without an opponent, then its variants against it."""
    source = starter(name, backend)  # type: ignore[arg-type]
    if source is None:
        return {"none": "no starter"}
    start = Candidate(kernel_type=name, backend=backend, source=source)  # type: ignore[arg-type]
    rows = []
    opened = time.monotonic()
    workloads = workloads_of(name, device)
    with Judge(name, start.backend, workloads, device=device) as judge:
        for i, text in enumerate([source, *variants(source, count)]):
            candidate = Candidate(kernel_type=name, backend=start.backend, source=text)
            began = time.monotonic()
            evaluation = judge.evaluate(candidate, start if i else None)
            rows.append(row(evaluation, time.monotonic() - began))
    return {
        "workload": workloads[0].shape,
        "dtype": workloads[0].dtype,
        "seconds": round(time.monotonic() - opened, 2),
        "experiments": rows,
    }


def row(evaluation: Evaluation, seconds: float) -> dict[str, object]:
    phases: dict[str, float] = {}
    for phase, spent in evaluation.phases:
        phases[phase] = round(phases.get(phase, 0.0) + spent, 3)
    first = evaluation.workloads[0] if evaluation.workloads else None
    return {
        "seconds": round(seconds, 2),
        "status": evaluation.status,
        "reason": evaluation.reason[:160],
        "device_us": first.device_us if first else None,
        "host_us": first.host_us if first else None,
        "eager_us": first.eager_us if first else None,
        "speedup_vs_eager": first.speedup_vs_eager if first else None,
        "phases": phases,
    }


def summary(results: dict[str, dict[str, object]]) -> Sequence[str]:
    lines = []
    for name, result in results.items():
        rows = result.get("experiments")
        if not isinstance(rows, list):
            continue
        for i, entry in enumerate(rows):
            spent = " ".join(f"{k} {v:.1f}" for k, v in entry["phases"].items() if v >= 0.05)
            lines.append(
                f"{name if i == 0 else '':28s} {entry['seconds']:6.2f} s {entry['status']:10s} "
                f"dev {entry['device_us'] or 0:7.1f} host {entry['host_us'] or 0:6.1f} | {spent} | {entry['reason'][:70]}"
            )
    later = [e["seconds"] for r in results.values() for e in (r.get("experiments") or [])[1:]]  # type: ignore[index]
    if later:
        lines.append(
            f"changed candidates: median {statistics.median(later):.2f} s, longest {max(later):.2f} s"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    parser.add_argument("--backends", nargs="*")
    parser.add_argument("--variants", type=int, default=3)
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all sessions")
    arguments = parser.parse_args()
    backends = arguments.backends or (["triton", "cuda"] if arguments.device == "cuda" else ["cpp"])
    began = time.monotonic()
    results: dict[str, dict[str, object]] = {}
    for name in arguments.types:
        for backend in backends:
            if time.monotonic() - began > arguments.budget:
                results[f"{name} {backend}"] = {"not_run": "the budget was spent"}
                continue
            results[f"{name} {backend}"] = session(name, backend, arguments.device, arguments.variants)
            document = {
                "what": "seconds an experiment, and where they go",
                "date": time.strftime("%Y-%m-%d"),
                "device": arguments.device,
                "sessions": results,
            }
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
