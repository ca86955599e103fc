"""Put the figures of the result files into README.md and docs/, between markers, and draw the pictures beside them.

`--check` changes nothing and says whether they are up to date.

python benchmarks/render.py [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import plots

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def where(device: dict[str, Any], dates: str = "") -> str:
    units = "cores" if device["kind"] == "cpu" else "multiprocessors"
    versions = ", ".join(
        f"{name} {device[name]}"
        for name in ("torch", "triton", "driver")
        if device.get(name) and device["kind"] == "cuda"
    )
    versions = versions or f"torch {device['torch']}"
    return f"{device['name']}, {device['units']} {units}, {versions}, {dates or device['date'][:10]}"


def interval(value: list[float] | None) -> str:
    return f" [{value[0]:.3f}, {value[1]:.3f}]" if value else ""


def ratio(value: float | None, ci95: list[float] | None) -> str:
    return f"{value:.3f}{interval(ci95)}" if value is not None else "not measured"


def models(name: str) -> str:
    """Whole models: one row each, as `optimize` told it."""
    document = read(name)
    if document is None:
        return ""
    lines = [
        "| model and input | outcome | eager | with kernels | compile | compile + kernels | against eager (95 %) "
        "| against compile (95 %) | kernels that won | all in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    graphs = any(
        ((result.get("record") or {}).get("verification") or {})
        .get("latency_ms", {})
        .get("eager_kernels_cudagraphs")
        for result in document["cases"].values()
    )
    if graphs:
        lines = [
            lines[0].replace("| against eager", "| graph | graph + kernels | against eager", 1),
            lines[1] + "---|---|",
        ]
    device = None
    dates = set()
    for case, result in document["cases"].items():
        record = result.get("record")
        if not record or "error" in record:
            continue
        device = record["device"]
        dates.add(device["date"][:10])
        won = ", ".join(f"{t['name']} {t['speedup']:.1f}x" for t in record["targets"] if t["status"] == "won")
        found = record["verification"]
        cells = [case, record["status"]]
        if found is None:
            cells += [""] * (8 if graphs else 6)
        else:
            times = found["latency_ms"]
            best = {
                "eager": times["eager"],
                "eager_kernels": times["eager_kernels"],
                "compile": _least(times["compile"], times["compile_cudagraphs"]),
                "compile_kernels": _least(times["compile_kernels"], times["compile_kernels_cudagraphs"]),
            }
            if graphs:
                best |= {n: times.get(n) for n in ("eager_cudagraphs", "eager_kernels_cudagraphs")}
            cells += [f"{v:.2f} ms" if v is not None else "not measured" for v in best.values()]
            cells += [
                ratio(found["speedup"]["vs_eager"], found["speedup_ci95"]["vs_eager"]),
                ratio(found["speedup"]["vs_compile"], found["speedup_ci95"]["vs_compile"]),
            ]
        cells += [won or "none", f"{result['seconds']:.0f} s"]
        lines.append("| " + " | ".join(cells) + " |")
    if device is None:
        return ""
    return (
        f"Measured on {where(device, ' and '.join(sorted(dates)))}; random weights; medians, all columns in turn within a round "
        f"(`benchmarks/results/{name}`). Columns with compile are the better of torch.compile without and with CUDA "
        "graphs, where there are any; against compile is the better of those over the best column with kernels. A speed-up "
        "of a kernel is against the model's own code at that place."
        + (" Graph: the eager pass captured in a CUDA graph as it is." if graphs else "")
        + (f" {document['note']}" if "note" in document else "")
        + "\n\n"
        + "\n".join(lines)
    )


def _least(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return min(known) if known else None


def checks(name: str) -> str:
    """How the judge's calls of the starters went on a GPU, one row a type."""
    document = read(name)
    if document is None:
        return ""
    found: dict[str, dict[str, str]] = {}
    right = made = 0
    for entry in document["checked"]:
        good = entry["done"] - entry["failed"]
        right, made = right + good, made + entry["done"]
        text = f"{good} of {entry['done']}"
        if entry["done"] < entry["calls"]:
            text += f" (of {entry['calls']} in all: time was up)"
        found.setdefault(entry["kernel_type"], {})[entry["backend"]] = entry["error"] or text
    lines = ["| type | triton: right of those made | cuda |", "|---|---|---|"]
    for kind, cells in found.items():
        lines.append(f"| {kind} | {cells.get('triton', 'not run')} | {cells.get('cuda', 'not run')} |")
    return (
        f"Calls of the judge's sweep, edge shapes, adversarial values and layouts in every dtype, on "
        f"{where(document['device'])} (`benchmarks/results/{name}`): {right} of {made} were right.\n\n"
        + "\n".join(lines)
    )


# The least that a peer's time may be, as a multiple of ours.
MATRIX_SETS = {
    "skinny": ("a linear layer for 1 to 64 rows", 1.15),
    "skinny-nn": ("GPT-2's projections for 1 to 64 rows", 1.15),
    "vocabulary": ("a language model's head for 1 and 16 rows", 1.15),
    "middle": ("a linear layer for 128 to 4096 rows", 1.0),
    "large": ("large products", 1.0),
    "large-nt": ("the same, b along its depth", 1.0),
    "epilogue": ("with bias, activation or residual", 1.1),
    "float8": ("float8 with scales", 1.0),
    "mlp": ("gated feed-forward blocks", 1.1),
    "mlp-skinny": ("the same for 1 to 64 rows", 1.1),
    "prefill": ("attention over a sequence", 1.0),
    "decode": ("one query a sequence", 1.1),
}


def matrix(name: str) -> str:
    """Products, attention and feed-forward blocks beside the vendor's libraries: a row a set, then one a shape."""
    document = read(name)
    if document is None:
        return ""
    backends = ("triton", "cuda")
    contenders = {c["label"] for c in document["contenders"]}  # of which other labels are variants
    ratios: dict[str, dict[str, list[float]]] = {s: {b: [] for b in backends} for s in MATRIX_SETS}
    shapes = [
        "| set | shape | dtype | fastest of the others | triton | cuda |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        timed = row["timed"]
        us = {n: v for n, v in timed["us"].items() if n not in timed["wrong"]}
        peers = {n: v for n, v in us.items() if n not in contenders}
        best = min(peers, key=lambda n: peers[n])
        cells = [row["set"], timed["label"], timed["dtype"], f"{best} {peers[best]:.1f} us"]
        for backend in backends:
            if backend in us:
                ratios[row["set"]][backend].append(peers[best] / us[backend])
                cells.append(f"{us[backend]:.1f} us, {peers[best] / us[backend]:.2f}x")
            else:
                cells.append("wrong" if backend in timed["wrong"] else "not measured")
        shapes.append("| " + " | ".join(cells) + " |")
    sets = ["| set | what | triton: mean (least) | cuda | target |", "|---|---|---|---|---|"]
    for which, (what, target) in MATRIX_SETS.items():
        cells = [which, what]
        for backend in backends:
            values = ratios[which][backend]
            mean = math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0
            cells.append(f"{mean:.2f} ({min(values):.2f})" if values else "not measured")
        sets.append("| " + " | ".join([*cells, f"{target:.2f}"]) + " |")
    late = document["not_reached"]
    return (
        f"{where(document['device'])}: device time, L2 flushed, medians over rounds in which all took turns "
        f"(`benchmarks/results/{name}`). A ratio is the time of the fastest of torch's own (cuBLAS, cuDNN, ...) and Liger's, "
        "without torch.compile, over ours: above 1 ours is faster. Means of a set are geometric."
        + (f" Not reached in time: {', '.join(late)}." if late else "")
        + "\n\n"
        + "\n".join(sets)
        + "\n\n"
        + "\n".join(shapes)
    )


# The most that a time may be, as a multiple of the time of a copy (or read) of the same bytes.
MEMORY_TARGETS = {"cross_entropy": 1.10, "reduce": 1.10, "rotary_embedding": 1.08}
# Under which name the run measured what ships now; Triton's others are its starters.
MEASURED_AS = {
    ("layernorm", "triton"): "layernorm_t.py",
    ("reduce", "cuda"): "reduce_b.cu",
}
# What ships takes another path there than what was measured.
NOT_MEASURED = {
    ("layernorm", "cuda", "256x131072"),
    ("add_norm", "cuda", "256x131072/rms"),
}


def memory_bound(name: str, peers_name: str) -> str:
    """Memory-bound kernels beside a copy of their bytes, one row a shape; peers are of a run of their own.

    Times of two runs cannot be compared, so all are told as multiples of the copy's (or read's) in the same run; that of
    a small copy varies by some 3 % between runs.
    """
    document, others = read(name), read(peers_name)
    if document is None or others is None:
        return ""
    lines = [
        "| type | shape | copy or read | triton over it | cuda over it | better of the two (95 %) | target "
        "| best peer over it | ours against it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with_peers = {(row["kernel_type"], row["label"]): row for row in others["results"]["rows"]}
    met = won = 0
    late = False
    for row in document["results"]["rows"]:
        kind, label = row["kernel_type"], row["label"]
        ours = {}
        for backend, usual in (("triton", "triton"), ("cuda", f"{kind}_c.cu")):
            found = row["contenders"].get(MEASURED_AS.get((kind, backend), usual))
            if found is not None and (kind, backend, label) not in NOT_MEASURED:
                ours[backend] = found
        reference = with_peers[kind, label]
        peers = {n: reference["contenders"][n] for n in reference["peers"]}
        best, peer = (min(x, key=lambda n: x[n]["ratio"]) for x in (ours, peers))
        target = 1.10 if "50257" in label else MEMORY_TARGETS.get(kind, 1.05)
        gain = peers[peer]["ratio"] / ours[best]["ratio"]
        if (kind, "triton") not in MEASURED_AS:  # took part in the peers' rounds itself
            gain = max(gain, peers[peer]["us"] / reference["contenders"]["triton"]["us"])
        met += ours[best]["ratio"] <= target
        won += gain >= 1
        mark = "" if "compile" in peers else "*"
        late = late or bool(mark)
        low, high = ours[best]["ratio_ci95"]
        cells = [kind, label, f"{row['yardstick']} {row['yardstick_us']:.1f} us"]
        cells += [f"{ours[b]['ratio']:.2f}" if b in ours else "not measured" for b in ("triton", "cuda")]
        cells += [f"{ours[best]['ratio']:.2f} [{low:.2f}, {high:.2f}]", f"{target:.2f}"]
        cells += [f"{peer} {peers[peer]['ratio']:.2f}{mark}", f"{gain:.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    note = " Peers with * are without torch.compile." if late else ""
    return (
        f"{where(document['device'])}: device time, L2 flushed, bfloat16, as a multiple of the time of a copy (or read) of "
        f"the same bytes, the median over rounds in which all took turns (`benchmarks/results/{name}`; peers in a run of "
        f"their own, `{peers_name}`, where Triton's starters took part; a ratio varies by some 3 % between runs). A large copy reached {document['copy_tb_s']:.2f} TB/s. {met} of {len(lines) - 2} "
        f"shapes are within their target; on {won} the better of ours is at least as fast as the best peer.{note}\n\n"
        + "\n".join(lines)
    )


def night(name: str) -> str:
    """A run of the playbook: what it did with its time, and one row a target."""
    document = read(name)
    if document is None:
        return ""
    model, gpu = document["model"], document["gpu"] or {}
    shape = "x".join(map(str, model["input_shape"]))

    def counted(counts: dict[str, int]) -> str:
        return ", ".join(f"{n} {word}" for word, n in sorted(counts.items(), key=lambda pair: -pair[1]))

    lines = [
        "| target | share of the pass | experiments (kept) | best | best starter against the model's own code | against the model's own code (95 %) "
        "| against the fastest of torch (95 %) | floor over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in document["targets"]:
        found = target["confirmed"] or {}
        floor = found.get("pct_of_floor") or target.get("best_pct_of_floor")
        best = "none was right"
        if target["best_experiment"] is not None:
            best = f"#{target['best_experiment']} {target['best_backend']}: {target['best_description']}"
        own = ratio(found.get("vs_model"), found.get("vs_model_ci95"))
        if not found and target["best_vs_model"] is not None:
            own = f"{target['best_vs_model']:.3f}, not confirmed"
        peer = ratio(found.get("vs_best_peer"), found.get("vs_best_peer_ci95"))
        peer += f" ({', '.join(found['best_peers'])})" if found.get("best_peers") else ""
        starter = target["starter_vs_model"]
        cells = [
            target["name"],
            f"{100 * target['share']:.1f} %",
            f"{target['experiments']} ({target['kept']})",
            best,
        ]
        cells += [f"{starter:.2f}" if starter else "", own, peer, f"{floor:.0f} %" if floor else ""]
        lines.append("| " + " | ".join(cells) + " |")
    taken = "; ".join(
        f"{own['judged']} of {b}, {own['seconds_an_experiment']:.1f} s each (median)"
        f", {own['judged_an_hour_of_these'] or 0} an hour of the time that was spent on them"
        for b, own in document["by_backend"].items()
    )
    busy = f"Judges used the device in {100 * document['device_share']:.0f} % of that time, confirmations not counted"
    if gpu.get("samples"):
        busy += (
            f"; by the driver's samples, a second apart, it was busy {gpu['utilization_mean_pct']:.0f} % of the time, and "
            f"{gpu['seconds_without_work_pct']:.0f} % of the samples saw no work (mean power {gpu['power_mean_w']:.0f} W, "
            f"median clock {gpu['sm_clock_median_mhz']:.0f} MHz)"
        )
    after = "the run had not ended when this was taken"
    if document["finished"]:
        after = f"the run as a whole took {document['seconds']:.0f} s, and ended {document['status']}: {document['reason']}"
    return (
        f"{model['id']}, {shape}, {model['dtype']}, {model['weights']} weights, on {where(document['device'])} "
        f"(`benchmarks/results/{name}`, with its ledger and plot). {document['judged']} experiments were judged in "
        f"{document['search_s']:.0f} s of search, {document['judged_an_hour']:.0f} an hour: {taken}; "
        f"{document['experiments'] - document['judged']} more were duplicates by their machine code; "
        f"{document['distinct_sources']} distinct sources; verdicts: {counted(document['statuses'])}; decisions: "
        f"{counted(document['decisions'])}. {busy}; {after}. "
        f"{document.get('note', '')}\n\n" + "\n".join(lines)
    )


def blocks() -> dict[str, dict[str, str]]:
    """By document, the text of each block of results."""
    return {
        "README.md": {"cpu": models("whole-models-cpu.json"), "cuda": models("whole-models-h200.json")},
        "docs/search.md": {"night": night("night-h200.json")},
        "docs/kernels.md": {
            "checks": checks("starter-checks-h200.json"),
            "memory": memory_bound("kernels-h200.json", "kernels-starters-h200.json"),
            "matrix": matrix("matrix-kernels-h200.json"),
        },
    }


def pictures() -> dict[str, list[plots.Panel]]:
    """By file under docs/, what each picture shows."""
    return {"kernels-matrix.svg": plots.matrix_panels(read("matrix-kernels-h200.json"))}


def render(text: str, name: str, block: str) -> str:
    """A document's text with one block of results as the files say."""
    pattern = rf"(<!-- results: {name} -->\n).*?(<!-- end results -->)"
    text, count = re.subn(
        pattern, lambda m: m[1] + (block + "\n" if block else "") + m[2], text, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"there is no block of results named {name}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where a document is out of date"
    )
    arguments = parser.parse_args()
    for document, named in blocks().items():
        path = ROOT / document
        before = after = path.read_text(encoding="utf-8")
        for name, block in named.items():
            after = render(after, name, block)
        if arguments.check and before != after:
            sys.exit(f"{document} does not show the result files; run benchmarks/render.py")
        if not arguments.check:
            path.write_text(after, encoding="utf-8")
    for file, panels in pictures().items():
        path = ROOT / "docs" / file
        current = plots.drawn_from(path) == plots.digest(panels)
        if arguments.check and not current:
            sys.exit(f"docs/{file} does not show the result files; run benchmarks/render.py")
        if not current:
            plots.draw(panels, path)


if __name__ == "__main__":
    main()
