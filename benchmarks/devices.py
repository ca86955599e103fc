"""The same experiments on two GPUs, then on one, through the sessions that `optimize --devices 0,1` opens.

python benchmarks/devices.py [--number 18] [--limit 143] [--out FILE]

No model and no profile. Every event is printed as it comes, and every 45 s where each thread is, so that a hang shows where.
`--cpu` tries the script itself, with two runs on the CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import logging
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from autokernel_hf import pipeline, tunables, worker
from autokernel_hf.agent import Context
from autokernel_hf.ceilings import Ceilings
from autokernel_hf.kernels import kernel_type, starter
from autokernel_hf.ledger import Judged
from autokernel_hf.records import Candidate, Experiment, ModelSpec, Proposal, Target
from autokernel_hf.runs import Run, RunSettings
from autokernel_hf.search import Limits, Stop

TYPE = "gated_activation"
BEGAN = time.monotonic()
_printing = threading.Lock()


def say(*words: object) -> None:
    with _printing:
        print(f"{time.monotonic() - BEGAN:6.1f}", *words, flush=True)


class Shown:
    def stage(self, text: str) -> None:
        say(text)

    def step(self, done: int, total: int, text: str) -> None:
        say(f"[{done}/{total}]", text[:150])


class Script:
    """All configurations of a file in a fixed order, the same on any number of devices."""

    name = "script"

    def __init__(self, first: Candidate) -> None:
        self.first = first

    def propose(self, context: Context, n: int) -> list[Proposal]:
        space = tunables.parse(self.first.source)
        known = {e.digest for e in context.attempts}
        known |= {self.first.model_copy(update={"source": p.source}).digest for p in context.pending}
        for choice in itertools.product(*(t.choices for t in space)):
            values = {t.name: value for t, value in zip(space, choice, strict=True)}
            source = tunables.substitute(self.first.source, values)
            if self.first.model_copy(update={"source": source}).digest not in known:
                words = " ".join(map(str, choice))
                return [Proposal(source=source, rationale=words, tags=("script",), tunables=values)]
        return []


def row_of(run: Run, devices: tuple[int, ...], took: float) -> dict[str, Any]:
    """Experiments an hour from when every device has done its first."""
    events = [e for e in run.events() if isinstance(e, Judged)]
    lanes: dict[str, list[Experiment]] = {}
    for event in events:
        lanes.setdefault(event.record.device or "only", []).append(event.record)
    firsts = [min(e.at for e in events if (e.record.device or "only") == name) for name in lanes]
    steady = [e for e in events if e.at > max(firsts)]
    span = max(e.at for e in events) - max(firsts)
    return {
        "devices": list(devices),
        "experiments": len(events),
        "seconds": round(took, 1),
        "after_the_first_on_each": len(steady),
        "their_seconds": round(span, 2),
        "an_hour_then": round(3600 * len(steady) / span) if span > 0 else None,
        "by_device": {name: len(records) for name, records in lanes.items()},
        "duplicates": sum(e.record.duplicate_of is not None for e in events),
        "statuses": sorted({e.record.evaluation.status for e in events}),
        "eager_us": {name: r[0].evaluation.workloads[0].eager_us for name, r in lanes.items()},
        "phases": [[e.record.device, *e.record.evaluation.phases] for e in events],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=18, help="experiments a run")
    parser.add_argument("--limit", type=float, default=143.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, help="a result file")
    parser.add_argument("--cpu", action="store_true", help="two runs on the CPU, to try the script")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(45, repeat=True, exit=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="       %(name)s %(message)s")
    logging.getLogger("autokernel_hf").setLevel(logging.DEBUG)
    device, backend, dtype = ("cpu", "cpp", "float32") if arguments.cpu else ("cuda:0", "triton", "bfloat16")
    workload = kernel_type(TYPE).build({"M": 512, "N": 8192}, dtype, {"kind": "silu"})
    workload = workload.model_copy(update={"share": 0.2, "calls": 16})
    source = starter(TYPE, backend)  # type: ignore[arg-type]
    assert source is not None
    first = Candidate(kernel_type=TYPE, backend=backend, source=source)  # type: ignore[arg-type]
    target = Target(
        name=TYPE, kernel_type=TYPE, backend=first.backend, share=0.2, attainable_speedup=1.2, sites=(),
        workloads=(workload,), device=device,
    )  # fmt: skip
    say("measuring ceilings on the first device")
    ceilings = worker.call("ceilings", worker.CeilingsRequest(device=device), Ceilings)
    place = Path(tempfile.mkdtemp())
    rows: list[dict[str, Any]] = []
    for devices in ((), ()) if arguments.cpu else ((0, 1), (0,)):
        spec = ModelSpec(model="llama-1b", random_weights=True, device=device)
        with Run.create(
            place, f"on-{len(devices)}", RunSettings(spec=spec, backend=backend, devices=devices)
        ) as run:
            ceilings.save(run.path / "ceilings.json")
            run.add_target(target, [first])
            start = time.monotonic()
            say(f"devices {devices}: opening sessions")
            with pipeline.searching(run, target, [first], Shown()) as search:
                left = arguments.limit - 12 - (time.monotonic() - BEGAN)
                search.limits = Limits(
                    max_experiments=arguments.number,
                    max_reverts=10**6,
                    pct_peak=1e9,
                    max_seconds=max(1.0, left),
                )

                def end(stop: Stop) -> Any:
                    say(f"ends: {stop.reason}")
                    return None, None

                search.conclude = end  # type: ignore[method-assign]
                search.run_all(Script(first))
                took = time.monotonic() - start
                say("closing sessions")
            say("closed")
            rows.append(row_of(run, devices, took))
        say(json.dumps({k: v for k, v in rows[-1].items() if k != "phases"}))
        if arguments.out is not None:
            document = {"device": ceilings.device.model_dump(mode="json"), "rows": rows}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if all(row["an_hour_then"] for row in rows):
        say(
            f"{rows[0]['an_hour_then'] / rows[1]['an_hour_then']:.2f} times as many experiments in the first run"
        )
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
