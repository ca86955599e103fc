"""What the command line prints for people: one function a result.

Takes records by their fields alone and imports none of them, so that `--help` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autokernel_hf._console import Console
    from autokernel_hf.records import Evaluation


def optimize_text(console: Console, record: Any) -> None:
    console.table(
        ["target", "share", "tried", "kept", "model's us", "kernel us", "speed-up", "95 %", "status"],
        [
            [
                t.name,
                f"{100 * t.share:.1f} %",
                str(t.experiments),
                str(t.kept),
                number(t.baseline_us),
                number(t.best_us),
                "" if t.speedup is None else ratio(t.speedup),
                interval(t.speedup_ci95),
                t.status,
            ]
            for t in record.targets
        ],
    )
    for target in record.targets:
        if target.reason:
            console.line(f"{target.name}: {target.reason}")
    if record.verification is not None:
        verification_text(console, record.verification)
    for package in record.packages:
        console.line(f"Package {package.name}: {package.path}")
    console.line(f"{record.status}: {record.reason}" if record.reason else record.status)
    console.line(f"Run: {record.run_dir} (open report.html in it; results.tsv has every experiment)")
    if record.packages:
        package = record.packages[0]
        console.line(f"Next: autokernel-hf publish {package.path} --repo-id YOU/{package.name}")


def verification_text(console: Console, verification: Any) -> None:
    latency = verification.latency_ms
    cells = [(k.replace("_", " + ", 1), v) for k, v in latency.model_dump().items() if v is not None]
    speedup, ci95 = verification.speedup, verification.speedup_ci95
    if cells:  # nothing is timed where the model was not right
        console.table([f"{k} ms" for k, _ in cells], [[f"{v:.2f}" for _, v in cells]])
        console.line(
            f"Whole model: {ratio(speedup.vs_eager)} against eager {interval(ci95.vs_eager)}, "
            f"{ratio(speedup.vs_compile)} against torch.compile {interval(ci95.vs_compile)}"
        )
    if verification.error is not None:
        error = verification.error
        more = f", top-1 agreement {error.top1_agreement:.4f}" if error.top1_agreement is not None else ""
        console.line(
            f"Error: largest {error.max_abs:.3g}, {error.ratio_to_eager:.2f} times eager's own{more}; "
            f"calls {', '.join(f'{k} {v}' for k, v in verification.kernel_calls.items())}"
        )


def profile_text(console: Console, found: Any) -> None:
    waits = f", {found.device_ms:.2f} ms of them the GPU's own work" if found.device_ms is not None else ""
    console.line(f"{found.model.id} on {found.device.name}: {found.total_ms:.2f} ms a pass{waits}")
    console.table(
        ["site", "kernel type", "share", "calls", "ms", "floor ms", "bound", "shapes", "starter"],
        [
            [
                s.name + (f" (in {s.nested_in})" if s.nested_in else ""),
                s.kernel_type,
                f"{100 * s.share:.1f} %",
                str(s.calls),
                f"{s.ms:.3f}",
                f"{s.attainable_ms:.3f}",
                s.bound,
                " ".join(s.shapes[:2]),
                "yes" if s.supported else "no",
            ]
            for s in found.sites
        ],
    )
    console.line(f"Not covered by any kernel type: {100 * found.other_share:.1f} %")


def extract_text(console: Console, document: Any) -> None:
    for target in document["targets"]:
        console.line(
            f"{target['name']}: {100 * target['share']:.1f} % of the pass, "
            f"at best {target['attainable_speedup']:.3f}x for the whole model"
        )
    if not document["targets"]:
        console.line("No kernel type has enough to gain in this model on this device.")
    console.line(f"Run: {document['run_dir']}")


def bench_text(console: Console, evaluation: Evaluation) -> None:
    warm = any(w.hot_us is not None for w in evaluation.workloads)
    console.line(f"{evaluation.status}{': ' + evaluation.reason if evaluation.reason else ''}")
    for note in evaluation.notes:
        console.line(note)
    console.line(", ".join(f"{k} {v}" for k, v in evaluation.stages.model_dump().items()))
    console.table(
        [
            "workload",
            "dtype",
            "us",
            *(["hot us", "in a graph us"] if warm else []),
            "fastest peer",
            "its us",
            "speed-up",
            "95 %",
            "GB/s",
            "TFLOP/s",
            "% of peak",
        ],
        [
            [
                w.label,  # several may share a shape
                w.dtype,
                number(w.latency_us),
                *([number(w.hot_us), number(w.graph_us)] if warm else []),
                w.baseline or "",
                number(w.baseline_us),
                ratio(w.speedup),
                interval(w.ci95),
                number(w.gb_s),
                number(w.tflops),
                number(w.pct_peak),
            ]
            for w in evaluation.workloads
        ],
    )


def packages_text(console: Console, document: Any) -> None:
    for package in document["packages"]:
        console.line(
            f"{package['name']} v{package['version']}: {package['path']} ({', '.join(package['variants'])})"
        )


def compiled_text(console: Console, report: Any) -> None:
    """What a compiler said; of C++ it says nothing of registers."""
    said = [
        f"{value} {name}"
        for value, name in (
            (report.registers, "registers"),
            (report.spill_bytes, "bytes spilled"),
            (report.shared_bytes, "bytes shared"),
        )
        if value is not None
    ]
    console.line(f"{report.arch}: {', '.join([*said, f'compiled in {report.seconds:.1f} s'])}")


def published_text(console: Console, published: Any) -> None:
    for file in published.files:
        console.line(file)
    if published.revision is None:
        console.line(f"Dry run: nothing was uploaded to {published.url} (v{published.version}).")
        return
    state = "loaded back" if published.loaded else "not loaded back"
    console.line(f"{published.url} v{published.version} ({state})")


def check_text(console: Console, report: Any) -> None:
    console.line(f"loaded: yes, variant {report.variant}" if report.loaded else "loaded: no")
    console.line(
        f"functions: {', '.join(report.functions) or 'none'}; layers: {', '.join(report.layers) or 'none'}"
    )
    for problem in report.problems:
        console.line(f"problem: {problem}")
    for note in report.notes:
        console.line(f"note: {note}")


def tune_text(console: Console, document: Any) -> None:
    console.table(
        ["configuration", "status", "speed-up over the package's"],
        [
            [", ".join(f"{k}={v}" for k, v in c.values.items()), c.status, ratio(c.speedup)]
            for c in document.configs
        ],
    )
    if not document.shapes:
        console.line(f"Nothing was faster on {document.device} than the package's own configuration.")
        return
    console.table(
        ["shape", "dtype", "constants that change", "speed-up (95 %)"],
        [
            [
                s.shape,
                s.dtype,
                ", ".join(f"{k}={v}" for k, v in s.values.items()),
                f"{ratio(s.speedup)} ({s.ci95[0]:.2f}-{s.ci95[1]:.2f})",
            ]
            for s in document.shapes
        ],
    )
    console.line(
        f"On {document.device}, over the package's own configuration, all shapes: {ratio(document.speedup)}"
    )
    console.line(
        f"{document.package} holds it: publish that, or use it from there."
        if document.package
        else "With --out FOLDER, the package is written with it."
    )


def gpus_text(console: Console, document: Any) -> None:
    console.table(
        ["device", "arch", "units", "memory GB"],
        [
            [d["name"], d["arch"], str(d["units"]), f"{d['memory_bytes'] / 1e9:.0f}"]
            for d in document["devices"]
        ],
    )
    columns = [
        k for k in (document["known"][0] if document["known"] else {}) if k not in ("pattern", "source")
    ]
    console.table(columns, [[cell(row[c]) for c in columns] for row in document["known"]])


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}x"


def interval(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"[{value[0]:.3f}, {value[1]:.3f}]"
