"""A run's report: one HTML page without scripts or outside files, and a picture of its progress."""

from __future__ import annotations

import base64
from importlib import resources
from pathlib import Path

from autokernel_hf.figures import scores_of, weighted
from autokernel_hf.ledger import Asked
from autokernel_hf.llm_account import bill
from autokernel_hf.records import Experiment, RunRecord, TargetResult
from autokernel_hf.runs import Run, opened


def write_report(run_dir: Path) -> Path:
    """Write `progress.png` and `report.html` into a run folder, from its records alone. Returns the page's path."""
    from jinja2 import Environment

    with opened(run_dir, lock=False) as run:
        experiments = run.experiments()
        picture = draw_progress(run, run.path / "progress.png")
        result = run.outcome()
        template = (
            resources.files("autokernel_hf").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
        )
        page = (
            Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
            .from_string(template)
            .render(
                run=run,
                profile=run.profile(),
                targets=run.targets(),
                results=_results(run, result),
                experiments=[(e, weighted(e.evaluation, "speedup_vs_eager")) for e in experiments],
                result=result,
                verification=run.verification(),
                bill=bill(run),
                llm=next((e for e in reversed(run.events()) if isinstance(e, Asked)), None),
                kept_of_llm=sum(e.decision == "keep" and "llm" in e.tag.split(",") for e in experiments),
                picture=base64.b64encode(picture.read_bytes()).decode() if picture else None,
            )
        )
        path = run.path / "report.html"
        path.write_text(page, encoding="utf-8")
    return path


def _results(run: Run, result: RunRecord | None) -> list[TargetResult]:
    if result is not None:
        return list(result.targets)
    return [done.result for t in run.targets() if (done := run.result(t.name)) is not None]


def best_so_far(experiments: list[Experiment]) -> list[tuple[int, float, bool]]:
    """(experiment, speed-up against the model's own code, kept) for each right and timed experiment of one target."""
    scores = scores_of(experiments)
    return [
        (e.experiment, score, e.decision == "keep")
        for e in experiments
        if (score := scores[e.experiment]) is not None
    ]


def draw_progress(run: Run, path: Path) -> Path | None:
    """Speed-up against the model's own code by experiment, one line a target; None where nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = {t.name: best_so_far(run.experiments(t.name)) for t in run.targets()}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, points in series.items():
        (line,) = axes.plot(
            [x for x, _, kept in points if kept],
            [y for _, y, kept in points if kept],
            drawstyle="steps-post",
            marker="o",
            label=f"{name}, kept" if any(kept for _, _, kept in points) else f"{name}, none kept",
        )
        axes.scatter(
            [x for x, _, kept in points if not kept],
            [y for _, y, kept in points if not kept],
            s=14,
            alpha=0.5,
            color=line.get_color(),
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("experiment")
    axes.xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
    axes.set_ylabel("speed-up against the model's own code")
    profile = run.profile()
    if profile is not None:
        axes.set_title(f"{profile.model.id} on {profile.device.name}", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return path
