"""The picture of a card: each kernel and its peers, as times as fast as the plain torch expression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf.records import Evaluation, Interval, WorkloadResult

PLOT = "media/measured.svg"
"""Where it lies in a package, beside the card that shows it."""

THIS = "this kernel"
_MOST_ROWS = 12  # more are in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload: by contender, how many times as fast as the plain expression; of this kernel with its interval."""

    label: str
    ratios: dict[str, float]
    interval: Interval | None


def rows_of(evaluation: Evaluation | None, name: str = "") -> list[Row]:
    """The workloads of which both this kernel and the plain expression were timed."""
    workloads = evaluation.workloads if evaluation is not None else ()
    found = [_row(w, name) for w in workloads if w.speedup_vs_eager is not None]
    return found[:_MOST_ROWS]


def _row(w: WorkloadResult, name: str) -> Row:
    assert w.speedup_vs_eager is not None
    eager = w.peers_us.get("eager", w.eager_us)
    peers = {n: eager / us for n, us in w.peers_us.items() if n != "eager"} if eager is not None else {}
    words = [name, w.shape, w.dtype]
    return Row(
        label=" ".join(word for word in words if word),
        ratios={THIS: w.speedup_vs_eager, **dict(sorted(peers.items(), key=lambda item: -item[1]))},
        interval=w.ci95_vs_eager,
    )


def draw(rows: Sequence[Row], path: Path) -> Path | None:
    """Write the picture, the same bytes for the same rows; None where there is nothing to show."""
    if not rows:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row.ratios))
    bars = sum(len(row.ratios) for row in rows)
    with matplotlib.rc_context({"svg.hashsalt": "autokernel_hf", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 1.3 + 0.24 * bars + 0.14 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        at, middles, seen = 0.0, [], set[str]()
        for row in rows:
            first = at
            for name, ratio in row.ratios.items():
                error = None
                if name == THIS and row.interval is not None:
                    low, high = row.interval
                    error = [[max(0.0, ratio - low)], [max(0.0, high - ratio)]]
                axes.barh(
                    at,
                    ratio,
                    xerr=error,
                    height=0.8,
                    color=f"C{names.index(name) % 10}",
                    label=None if name in seen else name,
                )
                axes.annotate(
                    f" {ratio:.2f}", (row.interval[1] if error and row.interval else ratio, at), va="center"
                )
                seen.add(name)
                at += 1.0
            middles.append((first + at - 1.0) / 2)
            at += 0.6
        axes.axvline(1.0, color="grey", linewidth=0.8)
        axes.set_yticks(middles, [row.label for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("times as fast as eager torch (with the kernel's 95 % interval)")
        figure.legend(loc="outside upper center", ncols=min(len(names), 5), fontsize=8, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.chmod(0o644)
    return path
