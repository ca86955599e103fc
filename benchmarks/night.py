"""What a run of `optimize` did with its time: a result file, its ledger, and its progress plot.

python benchmarks/night.py RUN --out PREFIX [--samples FILE]

writes PREFIX.json, PREFIX-ledger.jsonl.gz and PREFIX.png from a run folder, finished or not. SAMPLES is what this wrote
beside the run, a line a second:

    nvidia-smi --query-gpu=timestamp,utilization.gpu,power.draw,clocks.sm --format=csv,noheader,nounits -l 1
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from autokernel_hf.figures import gain_over, scores_of, weighted
from autokernel_hf.judge.statistics import combine
from autokernel_hf.ledger import Finished, Judged, Started
from autokernel_hf.records import Evaluation, Experiment, Profile, RunRecord, Target
from autokernel_hf.report import draw_progress
from autokernel_hf.runs import Run, opened

ON_THE_DEVICE = ("smoke", "timing", "shapes", "numerics", "determinism", "edges", "huge")
"""Phases of an experiment in which the judge uses the device; in the others it waits for a process or a compiler."""


def summary(run: Run, samples: Path | None) -> dict[str, Any]:
    """All figures of a run, from its records alone."""
    profile = run.profile()
    if profile is None:
        raise SystemExit(f"{run.path} has no profile yet: there is nothing to tell.")
    experiments = run.experiments()
    judged = [e for e in experiments if e.duplicate_of is None]
    started, ended = window(run)
    result = run.path / "result.json"
    record = RunRecord.load(result) if result.exists() else None
    settings = run.settings
    return {
        "what": "one run of optimize with the playbook: experiments, and what they brought",
        "date": profile.device.date[:10],
        "device": profile.device.model_dump(mode="json"),
        "model": profile.model.model_dump(mode="json", include={"id", "weights", "dtype", "input_shape"}),
        "backend": settings.backend,
        "budget_s": settings.budget_s,
        "devices": list(settings.devices),
        "finished": record is not None,
        "pass_ms": profile.total_ms,
        "pass_device_ms": profile.device_ms,
        "search_s": round(ended - started, 1),
        "experiments": len(experiments),
        "experiments_an_hour": round(3600 * len(experiments) / (ended - started), 1),
        "judged": len(judged),
        "judged_an_hour": round(3600 * len(judged) / (ended - started), 1),
        "by_backend": {b: pace(experiments, b) for b in sorted({e.backend for e in experiments})},
        "distinct_sources": len({(e.backend, e.digest) for e in experiments}),
        "statuses": dict(Counter(e.evaluation.status for e in experiments)),
        "decisions": dict(Counter(e.decision for e in experiments)),
        "kinds": dict(Counter(f"{e.backend} {e.tag.split(',')[0]}" for e in experiments)),
        "device_share": round(device_share(experiments, ended - started, max(1, len(settings.devices))), 3),
        "phases_s": phases(experiments),
        "gpu": gpu_samples(samples, started, ended) if samples is not None else None,
        "targets": [target_figures(run, profile, t) for t in run.targets()],
        "verification": record.verification.model_dump(mode="json")
        if record and record.verification
        else None,
        "status": record.status if record else None,
        "reason": record.reason if record else None,
        "seconds": record.seconds if record else None,
    }


def window(run: Run) -> tuple[float, float]:
    """From the first experiment's start to the last verdict or conclusion, in seconds of the clock."""
    events = run.events()
    if not any(isinstance(e, Judged) for e in events):
        raise SystemExit(f"No experiment of {run.path} has been judged yet: there is nothing to tell.")
    return (
        min(e.at for e in events if isinstance(e, Started)),
        max(e.at for e in events if isinstance(e, Judged | Finished)),
    )


def pace(experiments: list[Experiment], backend: str) -> dict[str, Any]:
    """One backend's experiments; an hour: those that were judged, of the seconds that all of them took.

    A duplicate takes time and is not judged. Between experiments, and in confirmations, no backend is at work.
    """
    own = [e for e in experiments if e.backend == backend]
    judged = [e for e in own if e.duplicate_of is None]
    seconds = math.fsum(e.seconds for e in own)
    return {
        "experiments": len(own),
        "judged": len(judged),
        "timed": sum(any(w.latency_us is not None for w in e.evaluation.workloads) for e in judged),
        "seconds": round(seconds, 1),
        "seconds_an_experiment": round(statistics.median(e.seconds for e in own), 2),
        "judged_an_hour_of_these": round(3600 * len(judged) / seconds) if seconds > 0 else None,
    }


def phases(experiments: list[Experiment]) -> dict[str, float]:
    """Where the experiments' seconds went, largest first."""
    taken: Counter[str] = Counter()
    for experiment in experiments:
        for name, seconds in experiment.evaluation.phases:
            taken[name] += seconds
    return {name: round(seconds, 1) for name, seconds in taken.most_common()}


def device_share(experiments: list[Experiment], wall_s: float, lanes: int) -> float:
    """The part of the search's time in which judges used their devices; confirmations are not counted as such."""
    used = math.fsum(s for e in experiments for name, s in e.evaluation.phases if name in ON_THE_DEVICE)
    return used / wall_s / lanes


def gpu_samples(path: Path, started: float, ended: float) -> dict[str, Any]:
    """What the driver says of the GPU during the search: how busy, how much power, which clock."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = [f.strip() for f in line.split(",")]
        try:
            at = datetime.strptime(fields[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            numbers = [float(f) for f in fields[1:4]]
        except (ValueError, IndexError):
            continue  # a line that was cut short, or words of the driver
        if started <= at <= ended:
            rows.append(numbers)
    if not rows:
        return {"samples": 0}
    busy, watts, clock = zip(*rows, strict=True)
    return {
        "samples": len(rows),
        "utilization_mean_pct": round(statistics.fmean(busy), 1),
        "seconds_without_work_pct": round(100 * sum(b == 0 for b in busy) / len(busy), 1),
        "power_mean_w": round(statistics.fmean(watts), 1),
        "sm_clock_median_mhz": statistics.median(clock),
    }


def target_figures(run: Run, profile: Profile, target: Target) -> dict[str, Any]:
    """One target: what was tried, and its best beside starter, model, torch and floor."""
    attempts = run.experiments(target.name)
    events = [e for e in run.events() if isinstance(e, Finished) and e.result.name == target.name]
    scores = {n: s for n, s in scores_of(attempts).items() if s is not None}
    of_starters = {
        e.experiment: scores[e.experiment] for e in attempts if e.tag == "starter" and e.experiment in scores
    }
    winner = next((e.experiment for e in attempts if events and e.commit == events[-1].commit), None)
    best = winner if winner in scores else max(scores, key=lambda n: scores[n], default=None)
    found: dict[str, Any] = {
        "name": target.name,
        "share": target.share,
        "workloads": [w.shape for w in target.workloads],
        "experiments": len(attempts),
        "kept": sum(e.decision == "keep" for e in attempts),
        "statuses": dict(Counter(e.evaluation.status for e in attempts)),
        "searches": [{"stopped": e.stopped, "experiments": e.result.experiments} for e in events],
        "search_s": round(math.fsum(e.seconds for e in attempts), 1),
        "starter_vs_model": max(of_starters.values(), default=None),
        "best_vs_model": scores[best] if best is not None else None,
        "best_experiment": best,
        "best_description": next((e.description for e in attempts if e.experiment == best), None),
        "best_backend": next((e.backend for e in attempts if e.experiment == best), None),
        "status": events[-1].result.status if events else None,
        "reason": events[-1].result.reason if events else None,
        "confirmed": None,
    }
    if of_starters and best is not None:
        found["best_vs_starter"] = scores[best] / max(of_starters.values())
    if best is not None:
        (attempt,) = (e for e in attempts if e.experiment == best)
        found["best_pct_of_floor"] = weighted(attempt.evaluation, "pct_peak")
    if events and events[-1].confirmation is not None:
        found["confirmed"] = confirmed(events[-1].confirmation)
    return found


def confirmed(evaluation: Evaluation) -> dict[str, Any]:
    """The winner's confirmation run: against the model's own code, against the fastest of torch's, against the floor."""
    against_model = gain_over(evaluation, "eager")
    peers = [w for w in evaluation.workloads if w.speedup is not None and w.ci95 is not None]
    against_peer = None
    if peers and len(peers) == len(evaluation.workloads):
        against_peer = combine(
            [w.speedup for w in peers if w.speedup is not None],
            [w.ci95 for w in peers if w.ci95 is not None],
            [w.share for w in peers],
        )
    return {
        "us": weighted(evaluation, "latency_us"),
        "device_us": weighted(evaluation, "device_us"),
        "model_us": weighted(evaluation, "eager_us"),
        "vs_model": against_model[0] if against_model else None,
        "vs_model_ci95": against_model[1] if against_model else None,
        "vs_best_peer": against_peer[0] if against_peer else None,
        "vs_best_peer_ci95": against_peer[1] if against_peer else None,
        "best_peers": sorted({w.baseline for w in peers if w.baseline}),
        "pct_of_floor": weighted(evaluation, "pct_peak"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="where the files go, without a suffix")
    parser.add_argument("--samples", type=Path, help="what nvidia-smi told meanwhile")
    arguments = parser.parse_args()
    samples = arguments.samples if arguments.samples and arguments.samples.exists() else None
    with opened(arguments.run, lock=False) as run:
        document = summary(run, samples)
        prefix = arguments.out
        prefix.parent.mkdir(parents=True, exist_ok=True)
        prefix.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        ledger = (run.path / "ledger.jsonl").read_bytes()
        packed = gzip.compress(ledger[: ledger.rfind(b"\n") + 1], mtime=0)
        prefix.with_name(f"{prefix.name}-ledger.jsonl.gz").write_bytes(packed)
        draw_progress(run, prefix.with_suffix(".png"))
    print(json.dumps({k: v for k, v in document.items() if k != "targets"}))
    for target in document["targets"]:
        print(json.dumps(target))


if __name__ == "__main__":
    main()
