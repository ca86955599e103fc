"""Pictures of the kernels' result files, for docs/: bandwidth or FLOP rate against size, ours beside the best of the others.

`render.py` draws them. A picture carries the digest of what it was made from, since the bytes of a drawing depend on
matplotlib's version; `render.py --check` compares that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STYLE = {
    "triton": {"marker": "o", "color": "C0"},
    "cuda": {"marker": "s", "color": "C2", "markersize": 4},
    "best peer": {"marker": "x", "color": "C3"},
}
COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. A series is a name of `STYLE` with its (size, rate) points."""

    title: str
    size: str
    rate: str
    series: dict[str, tuple[tuple[float, float], ...]]


def matrix_panels(document: dict[str, Any]) -> list[Panel]:
    """Products, feed-forward blocks and attention. Document: what `matrix_kernels.py` writes.

    Sets that are bound by memory are told in TB/s against the bytes that must move, the others in TFLOP/s against GFLOP.
    """
    by_memory = {"skinny", "skinny-nn", "vocabulary", "mlp-skinny", "decode"}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in document["rows"]:
        timed, which = row["timed"], row["set"]
        us, rates = timed["us"], timed["gb_s"] if which in by_memory else timed["tflops"]
        name = next(iter(us))
        size = us[name] * rates[name] * 1e-3
        scale = 1e-3 if which in by_memory else 1.0
        series = found.setdefault(which, {name: [] for name in STYLE})
        for backend in ("triton", "cuda"):
            if backend in us:
                series[backend].append((size, rates[backend] * scale))
        peers = [rates[name] * scale for name in us if name not in ("triton", "cuda")]
        if peers:
            series["best peer"].append((size, max(peers)))
    return [
        _panel(which, *(("MB moved", "TB/s") if which in by_memory else ("GFLOP", "TFLOP/s")), series)
        for which, series in found.items()
    ]


def _panel(title: str, size: str, rate: str, series: dict[str, list[tuple[float, float]]]) -> Panel:
    kept = {name: tuple(sorted(points)) for name, points in series.items() if points}
    return Panel(title, size, rate, kept)


def digest(panels: Sequence[Panel]) -> str:
    return hashlib.sha256(json.dumps([asdict(p) for p in panels], sort_keys=True).encode()).hexdigest()


def drawn_from(path: Path) -> str | None:
    """The digest of what a picture was made from; None where there is no picture."""
    if not path.exists():
        return None
    found = re.search(r"made from ([0-9a-f]{64})", path.read_text(encoding="utf-8"))
    return found[1] if found else None


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write the picture as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": "autokernel_hf", "svg.fonttype": "none", "font.size": 8}
    with matplotlib.rc_context(settings):
        rows = -(-len(panels) // COLUMNS)
        figure = Figure(figsize=(3.1 * COLUMNS, 2.3 * rows + 0.4), layout="constrained")
        handles: dict[str, Any] = {}
        for at, panel in enumerate(panels):
            axes = figure.add_subplot(rows, COLUMNS, at + 1)
            for name, points in panel.series.items():
                style = {"linestyle": "", "markersize": 5, **STYLE[name]}
                handles[name] = axes.plot(*zip(*points, strict=True), label=name, **style)[0]
            sizes = [x for points in panel.series.values() for x, _ in points]
            if max(sizes) >= 10 * min(sizes):
                axes.set_xscale("log")
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
            axes.set_title(panel.title)
            axes.set_xlabel(panel.size)
            axes.set_ylabel(panel.rate)
            axes.grid(alpha=0.25)
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"Date": None, "Creator": None, "Description": f"made from {digest(panels)}"}
        figure.savefig(path, format="svg", metadata=about)
