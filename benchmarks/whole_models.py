"""The whole main job, model by model: what `autokernel-hf optimize` says, collected into one result file.

    python benchmarks/whole_models.py cpu --out benchmarks/results/whole-models-cpu.json
    python benchmarks/whole_models.py cuda --budget 480 --out benchmarks/results/whole-models-h200.json
    python benchmarks/whole_models.py cuda --only "llama-1b 1x512" --run RUN --out FILE     # a run that has ended

Each model is one `optimize --json` in a process of its own; its record goes into the file as it is, with the seconds
that every experiment took. Models that do not fit the budget are named as not run. Cases that the file has already and
that are not run again stay in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, list[tuple[str, list[str]]]] = {
    "cpu": [
        ("gpt2 1x1024 float32", ["gpt2", "--top", "2", "--max-experiments", "8"]),
        ("llama 1x1024 float32", ["llama", "--top", "3", "--max-experiments", "8"]),
        ("bert 1x512 float32", ["bert", "--top", "2", "--max-experiments", "4"]),
    ],
    "cuda": [
        ("gpt2 1x1024 float16", ["gpt2", "--dtype", "float16", "--input-shape", "1,1024"]),
        ("llama-1b 1x512 bfloat16", ["llama-1b", "--dtype", "bfloat16", "--input-shape", "1,512"]),
        ("llama-1b 8x2048 bfloat16", ["llama-1b", "--dtype", "bfloat16", "--input-shape", "8,2048"]),
        ("bert 8x512 float16", ["bert", "--dtype", "float16", "--input-shape", "8,512"]),
    ],
}


def run_case(arguments: list[str], device: str, timeout_s: float, log: Path) -> dict[str, object]:
    """One `optimize` run: its record, the time of each experiment, and the wall time of all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autokernel_hf", "optimize", *arguments]
        command += ["--random-weights", "--device", device, "--json", "--out", folder]
        started = time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            file.write(f"\n== {' '.join(command[3:])}\n")
            file.flush()
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=file, text=True, timeout=timeout_s, check=False
                )
            except subprocess.TimeoutExpired:
                return {"not_finished_after_s": round(timeout_s), "experiments": experiments_of(Path(folder))}
        seconds = time.monotonic() - started
        record = json.loads(done.stdout) if done.stdout.strip() else {"error": f"exit code {done.returncode}"}
        asked = [a for a in command[3:] if a != folder and a != "--out"]
        return case_of(asked, time.strftime("%Y-%m-%d"), seconds, record, experiments_of(Path(folder)))


def case_of(
    asked: list[str], date: str, seconds: float, record: dict[str, Any], experiments: list[dict[str, object]]
) -> dict[str, object]:
    """What the result file holds of a case, whoever started it. Where it ran is nobody's business."""
    record.pop("run_dir", None)
    for package in record.get("packages", []):
        package["path"] = Path(package["path"]).name
    return {
        "arguments": asked,
        "date": date,
        "seconds": round(seconds, 1),
        "record": record,
        "experiments": experiments,
    }


def ended_run(folder: Path) -> dict[str, object]:
    """The case of a run that has ended: its result, and the settings that it was started with."""
    record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    spec = settings["spec"]
    options = {
        "--dtype": spec["dtype"],
        "--input-shape": ",".join(map(str, spec["input_shape"])) if spec["input_shape"] else None,
        "--device": spec["device"],
        "--backend": settings["backend"],
        "--top": settings["top"],
        "--max-experiments": settings["max_experiments"],
        "--budget": f"{settings['budget_s']:g}s" if settings["budget_s"] is not None else None,
    }
    asked = ["optimize", spec["model"]]
    asked += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    asked += ["--random-weights"] if spec["random_weights"] else []
    date = profile["device"]["date"][:10]
    return case_of(asked, date, record["seconds"], record, experiments_of(folder.parent, folder.name))


def experiments_of(folder: Path, run: str = "*") -> list[dict[str, object]]:
    """What the ledgers of runs in a folder say of their experiments, and the seconds that each took."""
    found = []
    for path in folder.glob(f"{run}/ledger.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "judged":
                record = event["record"]
                fields = ("target", "backend", "decision", "reason", "description", "seconds")
                phases = record["evaluation"]["phases"]
                status = record["evaluation"]["status"]
                found.append({"status": status, **{f: record[f] for f in fields}, "phases": phases})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="run the cases whose name contains this")
    parser.add_argument("--run", type=Path, help="a run that has ended, for the one case that --only names")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all cases")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--top", type=int, help="targets a model, where it is not the case's own")
    parser.add_argument(
        "--max-experiments", type=int, help="experiments a target, where it is not the case's own"
    )
    arguments = parser.parse_args()
    if (
        arguments.run is not None
        and len([n for n, _ in CASES[arguments.device] if (arguments.only or "") in n]) != 1
    ):
        parser.error("--run needs --only with a part of one case's name")
    started = time.monotonic()
    results: dict[str, object] = {}
    known = json.loads(arguments.out.read_text(encoding="utf-8"))["cases"] if arguments.out.exists() else {}
    log = arguments.out.with_suffix(".log")
    for name, case in CASES[arguments.device]:
        if arguments.only and arguments.only not in name:
            continue
        left = arguments.budget - (time.monotonic() - started)
        if arguments.run is None and left < 30:
            results[name] = {"not_run": "the budget was spent"}
            continue
        more = ["--backend", arguments.backend]
        more += ["--top", str(arguments.top)] if arguments.top else []
        more += ["--max-experiments", str(arguments.max_experiments)] if arguments.max_experiments else []
        results[name] = (
            ended_run(arguments.run)
            if arguments.run is not None
            else run_case([*case, *more], arguments.device, left, log)
        )
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "what": "autokernel-hf optimize --random-weights, one run a model",
            "date": time.strftime("%Y-%m-%d"),
            "device": arguments.device,
            "cases": known | results,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, result in results.items():
        print(summary(name, result))  # type: ignore[arg-type]


def summary(name: str, result: dict[str, object]) -> str:
    record = result.get("record")
    if not isinstance(record, dict):
        return f"{name}: {result}"
    if "error" in record:
        return f"{name}: {record['error']}"
    lines = [f"{name}: {record['status']} in {result['seconds']} s: {record['reason']}"]
    for target in record["targets"]:
        if target["status"] != "skipped":
            lines.append(
                f"   {target['name']:18s} share {target['share']:.3f} {target['backend']} "
                f"{target['kept']}/{target['experiments']} {target['speedup'] or 0:.2f}x {target['status']} {target['reason'][:90]}"
            )
    if record["verification"]:
        latency = {k: round(v, 3) for k, v in record["verification"]["latency_ms"].items() if v}
        lines.append(
            f"   {latency} {record['verification']['speedup']} {record['verification']['speedup_ci95']}"
        )
    experiments = result["experiments"]
    assert isinstance(experiments, list)
    for backend in sorted({e["backend"] for e in experiments}):
        seconds = [e["seconds"] for e in experiments if e["backend"] == backend]
        lines.append(
            f"   {backend}: {len(seconds)} experiments, median {statistics.median(seconds):.1f} s each"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
