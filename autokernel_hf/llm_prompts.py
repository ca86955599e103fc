"""What a language model is told: templates in `prompts/` that a person can read, and what is filled in.

A prompt has levels of detail. Where a model's context is full, the next lower one is used: first without the worst
attempt, then with fewer reflexions and attempts, in the end with the contract, the calls and the file alone.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from autokernel_hf.agent import Context
from autokernel_hf.binding import launcher_prototype
from autokernel_hf.contract import python_signature
from autokernel_hf.figures import weighted
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.ledger import Reflected
from autokernel_hf.llm_edits import difference
from autokernel_hf.records import Backend, Experiment, TensorSpec, Workload

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """How much a prompt tells. `said` is for the run's story."""

    said: str
    worst: bool
    best: bool
    attempts: int
    reflexions: int
    reference: bool


LEVELS = (
    Detail(said="in full", worst=True, best=True, attempts=10, reflexions=12, reference=True),
    Detail(said="without the worst attempt", worst=False, best=True, attempts=10, reflexions=12, reference=True),
    Detail(
        said="with the last 3 reflexions and 4 attempts",
        worst=False, best=True, attempts=4, reflexions=3, reference=True,
    ),
    Detail(
        said="with the contract, the calls and the file alone",
        worst=False, best=False, attempts=0, reflexions=0, reference=False,
    ),
)  # fmt: skip

ANGLES = (
    "Make the change that you are surest of.",
    "Change how the data is moved: fewer passes, wider or better placed accesses, more of them under way at once.",
    "Take another algorithm or another split of the work, not another constant.",
    "Question what the file takes for granted, and propose the boldest change that you believe in.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An attempt as a prompt shows it."""

    experiment: int
    description: str
    status: str
    decision: str
    score: str
    words: str  # the judge's or the compiler's
    diff: str = ""


def shown(
    attempt: Experiment, score: float | None, *, words: int = 400, source: str = "", against: str = ""
) -> Shown:
    """An attempt with at most `words` characters of its verdict, and its difference to another source."""
    return Shown(
        experiment=attempt.experiment,
        description=attempt.description,
        status=attempt.evaluation.status,
        decision=attempt.decision,
        score="none" if score is None else f"{score:.3f}",
        words=verdict(attempt, words),
        diff=difference(against, source) if source and source != against else "",
    )


def verdict(attempt: Experiment, most: int) -> str:
    """What was decided and why, with the ratio to the incumbent where it was timed."""
    ratio = weighted(attempt.evaluation, "speedup_vs_incumbent")
    parts = [attempt.reason]
    if attempt.evaluation.reason and attempt.evaluation.reason not in attempt.reason:
        parts.append(attempt.evaluation.reason)
    if ratio is not None:
        parts.append(f"{ratio:.3f}x the incumbent's speed")
    resources_ = attempt.evaluation.resources
    if resources_.registers is not None:
        parts.append(f"{resources_.registers} registers, {resources_.spill_bytes or 0} bytes spilled")
    text = "; ".join(p for p in parts if p) or attempt.evaluation.status
    # A compiler's first and last words say most.
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


# --- the prompts --------------------------------------------------------------------------------------------------


def system(kernel_type: str, backend: Backend) -> str:
    """The contract and the form of an answer."""
    found = find_type(kernel_type)
    if backend == "triton":
        told = {
            "header": f'`KERNEL_TYPE = "{kernel_type}"`',
            "entry": f"`def kernel_fn{python_signature(found)}`",
            "domain": '`SUPPORTS = {"dtype": ["float32"]}`',
            "tunable": "`BLOCK = 1024  # tune(memory): 512, 1024, 2048`",
        }
    else:
        told = {
            "header": f"`// kernel_type: {kernel_type}`",
            "entry": f"`{launcher_prototype(found)}`",
            "domain": "`// supports: dtype=float32,float16` in the first lines",
            "tunable": "`constexpr int kChunk = 4096;  // tune(memory): 2048, 4096, 8192`",
        }
    codes = "; ".join(
        f"{arg}: " + ", ".join(f"{word} {code}" for word, code in words.items())
        for arg, words in found.codes.items()
    )
    return _page(
        "system", schema=found.schema.text, backend=backend, name=kernel_type, codes=codes,
        merges_rows=found.merges_rows, **told,
    )  # fmt: skip


def propose(
    context: Context,
    detail: Detail,
    *,
    best: Shown | None,
    worst: Shown | None,
    attempts: Sequence[Shown],
    reflexions: Sequence[Reflected],
    proposed: Sequence[str],
    sample: int,
) -> str:
    """The task, in as much detail as asked for."""
    return _page(
        "propose",
        context=context,
        detail=detail,
        reference=reference_source(context.target.kernel_type),
        workloads=[call_of(w) for w in context.target.workloads],
        best=best if detail.best else None,
        worst=worst if detail.worst else None,
        attempts=attempts[-detail.attempts :] if detail.attempts else (),
        reflexions=reflexions[-detail.reflexions :] if detail.reflexions else (),
        proposed=proposed,
        angle=ANGLES[sample % len(ANGLES)],
    )


def repair(failed: Shown, source: str) -> str:
    """A failed file, with what the compiler or the judge said of it."""
    return _page("repair", failed=failed, source=source)


def again(fault: str, words: str) -> str:
    """What is wrong with an answer, in a sentence."""
    return _page("again", fault=fault, words=words)


def reflect(kernel_type: str, backend: Backend, attempts: Sequence[Shown]) -> str:
    """Asks for one line on each attempt."""
    return _page("reflect", schema=find_type(kernel_type).schema.text, backend=backend, attempts=attempts)


def call_of(workload: Workload) -> str:
    """One call of a model as text: tensors with shape, dtype and, where they are not contiguous, strides."""
    parts = []
    for name, value in workload.args:
        if not isinstance(value, TensorSpec):
            if value is not None:
                parts.append(f"{name}={value}")
            continue
        strides = f", strides {value.strides}" if value.strides is not None else ""
        parts.append(f"{name} {'x'.join(map(str, value.shape))} {value.dtype}{strides}")
    return f"{', '.join(parts)}; {workload.calls} calls, {100 * workload.share:.1f} %"


@cache
def reference_source(kernel_type: str) -> str:
    """The plain torch expression of a type, as code."""
    return textwrap.dedent(inspect.getsource(find_type(kernel_type).reference)).strip()


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, StrictUndefined

    text = resources.files("autokernel_hf").joinpath(f"prompts/{name}.j2").read_text(encoding="utf-8")
    page = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
    return page.from_string(text)


def _page(template: str, /, **values: Any) -> str:
    return _template(template).render(**values).strip() + "\n"
